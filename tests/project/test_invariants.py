"""What always holds: the invariants that ARCHITECTURE.md lists, a test or more for each by its number."""

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MANUAL, QUIET, last_segment, records_of, run_python, start_python, tree, values_of
from loglib import CorruptLogError, FlushPolicy, Topic, testing
from loglib.errors import InvalidOffsetError
from loglib.testing import RecordingFiles

OpenTopic = Callable[..., Topic]


def test_1_partition_is_a_run_of_segments_named_by_base_offset(open_topic: OpenTopic) -> None:
    topic = open_topic(partitions=3, segment_bytes=4096)
    for _ in range(20):
        topic.append_many([b"x" * 100] * 30, keys=[b"%d" % n for n in range(30)])
        topic.flush()
    topic.close()
    assert sorted(os.listdir(topic.path)) == ["0000", "0001", "0002", "topic.json", "topic.json.spare"]
    for number in range(3):
        directory = Path(topic.path) / f"{number:04d}"
        segments = sorted(directory.glob("*.log"))
        assert len(segments) > 3
        end = 0
        for segment in segments:
            assert segment.name == f"{end:020d}.log"
            end += segment.stat().st_size - 4096


def test_2_offset_is_a_place_found_by_arithmetic(open_topic: OpenTopic) -> None:
    topic = open_topic(segment_bytes=4096)
    for number in range(200):
        topic.append(b"%d " % number + b"." * (number * 7 % 300), sync=number % 3 == 0)
    topic.flush()
    partition = topic.partition(0)
    bases = [segment.base_offset for segment in partition.segments]
    last = -1
    for batch in partition.batches():
        base = max(each for each in bases if each <= batch.offsets.start)
        content = (Path(topic.path) / "0000" / f"{base:020d}.log").read_bytes()
        at = 4096 + batch.offsets.start - base
        assert struct.unpack_from("<Q", content, at + 16)[0] == batch.offsets.start
        assert batch.offsets.start > last
        assert batch.next_offset >= batch.offsets.stop
        last = batch.offsets[-1]


def test_2_there_is_no_index_file_of_any_kind(open_topic: OpenTopic) -> None:
    topic = open_topic(segment_bytes=4096)
    for _ in range(10):
        topic.append_many([b"x" * 100] * 100)
        topic.flush()
    names = set(os.listdir(Path(topic.path) / "0000"))
    assert {name for name in names if not re.fullmatch(r"\d{20}\.log", name)} == {"watermark", "lock"}


def test_2_every_offset_that_is_no_records_is_refused(open_topic: OpenTopic) -> None:
    topic = open_topic()
    topic.append_many([b"abc"] * 5)
    topic.flush()
    topic.append_many([b"defg"] * 3)
    topic.flush()
    partition = topic.partition(0)
    offsets = {record.offset for record in topic.read()}
    for offset in range(partition.high_watermark):
        if offset in offsets:
            assert next(iter(partition.read(offset))).offset == offset
        else:
            with pytest.raises(InvalidOffsetError):
                partition.read(offset)


def test_3_order_holds_within_a_partition(open_topic: OpenTopic) -> None:
    topic = open_topic(partitions=4)
    for number in range(500):
        topic.append(b"%d" % number, key=b"key %d" % (number % 17))
    topic.append_many([b"%d" % n for n in range(500, 3000)], keys=[b"key %d" % (n % 17) for n in range(500, 3000)])
    topic.flush()
    last: dict[bytes | None, tuple[int, int]] = {}
    for record in topic.read():
        number = int(record.value or b"")
        assert last.get(record.key, (record.partition, -1)) < (record.partition, number)
        last[record.key] = (record.partition, number)
    assert len(last) == 17


def test_4_reader_sees_a_record_only_once_it_is_flushed(path: Path) -> None:
    files = RecordingFiles()
    with testing.open_topic(path, files=files, **QUIET) as topic, Topic.open(path, mode="r") as other:
        topic.append(b"first")
        topic.append_many([b"x" * 100_000] * 30)  # more than a batch: written, and still not visible
        assert (values_of(topic), values_of(other)) == ([], [])
        before = files.count("datasync")
        topic.flush()
        assert files.count("datasync") == before + 1
        assert len(values_of(topic)) == len(values_of(other)) == 31


@pytest.mark.parametrize("policy", [FlushPolicy(records=5, interval=None), FlushPolicy(bytes=500, interval=None)])
def test_4_flush_comes_after_so_many_records_or_bytes(path: Path, policy: FlushPolicy) -> None:
    with Topic.open(path, create=True, flush=policy) as topic:
        for number in range(1, 26):
            topic.append(b"." * 100)
            assert len(values_of(topic)) == number - number % 5


def test_4_half_a_batch_is_never_seen_while_it_is_written(path: Path) -> None:
    program = """
        import sys
        from loglib import FlushPolicy, Topic
        with Topic.open(sys.argv[1], create=True, flush=FlushPolicy(records=None, interval=None, bytes=None)) as topic:
            print("open", flush=True)
            for number in range(60):
                topic.append_many([b"%d" % number * 1000] * 2000)
                topic.flush()
            topic.append(b"last", sync=True)
    """
    writer = start_python(program, path)
    assert writer.stdout is not None
    writer.stdout.readline()
    with Topic.open(path, mode="r") as topic:
        seen = 0
        for batch in topic.follow("begin", timeout=60).batches():
            if batch.values == [b"last"]:
                break
            assert len(set(batch.values)) == 1
            seen += len(batch)
    assert seen == 120_000
    assert writer.communicate()[1] == ""


def test_5_damage_is_reported_with_file_and_byte_and_nothing_is_changed(path: Path) -> None:
    with Topic.open(path, create=True, **QUIET) as topic:
        topic.append_many([b"precious"] * 100)
        topic.flush()
    segment = last_segment(path)
    content = bytearray(segment.read_bytes())
    content[-20] ^= 1
    segment.write_bytes(content)
    before = tree(path)
    with Topic.open(path, mode="r") as topic, pytest.raises(CorruptLogError) as caught:
        values_of(topic)
    assert caught.value.path == str(segment)
    assert caught.value.file_position == 4096 + 128  # the body whose CRC fails begins there
    assert tree(path) == before


def test_6_every_record_is_checked_on_every_read(path: Path) -> None:
    with Topic.open(path, create=True, **QUIET) as topic:
        topic.append_many([b"a" * 100] * 50)
        topic.flush()
        segment = last_segment(path)
        assert len(values_of(topic)) == 50
        content = segment.read_bytes()
        for at in range(4096, len(content), 97):  # after a good read as well: nothing is remembered
            segment.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            with pytest.raises(CorruptLogError):
                values_of(topic)
        segment.write_bytes(content)
        assert len(values_of(topic)) == 50


def test_7_log_keeps_nothing_about_its_readers(path: Path) -> None:
    with Topic.open(path, create=True, **QUIET) as topic:
        topic.append_many([b"x"] * 1000)
        topic.flush()
    before = tree(path)
    names = sorted(str(each) for each in path.rglob("*"))
    with Topic.open(path, mode="r") as topic:
        for _ in range(3):
            reader = topic.read()
            assert len(reader.poll(max_records=10)) == 10
            reader.seek("end")
        assert topic.follow("begin", timeout=0).poll(max_records=1)[0].value == b"x"
    assert tree(path) == before
    assert sorted(str(each) for each in path.rglob("*")) == names


def test_8_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    program = """
        import os, resource, sys
        from loglib import FlushPolicy, Topic

        def peak_kib():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        quiet = FlushPolicy(records=None, interval=None, bytes=None)
        values = [os.urandom(200) for _ in range(10_000)]
        with Topic.open(sys.argv[1], create=True, flush=quiet, durability="os", segment_bytes=32 << 20) as topic:
            def work(times):
                for _ in range(times):
                    topic.append_many(values)
                    for value in values[:1000]:
                        topic.append(value)
                topic.flush()
                count = sum(len(batch.values) for batch in topic.batches())
                assert count == sum(1 for _ in topic.read())
            work(5)
            small = peak_kib()
            work(120)  # 250 MB
            print(peak_kib() - small)
    """
    assert int(run_python(program, tmp_path / "topic")) < 16 << 10


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_8_nothing_is_cached_between_reads(path: Path, codec: str) -> None:
    files = RecordingFiles()
    with testing.open_topic(path, files=files, compression=codec, **QUIET) as topic:
        topic.append_many([os.urandom(1000) for _ in range(1000)])
        topic.flush()
        name = last_segment(path).name
        read = []
        for _ in range(2):
            before = files.bytes_read[name]
            assert len(values_of(topic)) == 1000
            read.append(files.bytes_read[name] - before)
        assert read[0] == read[1] > 1_000_000


def test_9_no_native_code_of_our_own() -> None:
    package = Path(__file__).resolve().parents[2] / "src"
    suffixes = {each.suffix for each in package.rglob("*") if each.is_file() and each.suffix != ".pyc"}
    # The script starts Python in Spark's workers; a browser reads the others, which are the page of `loglib ui`.
    assert suffixes == {".py", ".sh", ".typed", ".html", ".css", ".js"}


def test_10_producer_that_repeats_itself_is_heard_once(path: Path) -> None:
    with Topic.open(path, create=True, flush=MANUAL) as topic:
        first = topic.append_many([b"a", b"b"], partition=0, producer=("etl", 1))
        assert topic.append_many([b"a", b"b"], partition=0, producer=("etl", 1)) == first
    with Topic.open(path) as topic:  # also by another process, later
        assert topic.append_many([b"a", b"b"], partition=0, producer=("etl", 1)) == first
        topic.append_many([b"c"], partition=0, producer=("etl", 2))
    assert [record.value for record in records_of(path)] == [b"a", b"b", b"c"]


def test_10_delivery_is_at_least_once_for_who_keeps_positions_after_the_work(path: Path) -> None:
    with Topic.open(path, create=True, partitions=3, **QUIET) as topic:
        topic.append_many([b"%d" % n for n in range(300)], keys=[b"%d" % n for n in range(300)])
    done: list[bytes | None] = []
    positions: dict[int, int | str] = dict.fromkeys(range(3), "begin")
    deaths = 0
    for attempt in range(20):  # each attempt dies at another record, between the work and the keeping
        with Topic.open(path, mode="r") as topic:
            for count, record in enumerate(topic.read(positions)):
                done.append(record.value)
                if count == attempt:
                    deaths += 1
                    break
                positions[record.partition] = record.next_offset
    with Topic.open(path, mode="r") as topic:
        done += [record.value for record in topic.read(positions)]
    assert set(done) == {b"%d" % n for n in range(300)}
    assert len(done) == 300 + deaths  # what was in hand at each death came twice, and nothing else
    assert deaths == 20
