"""The topic: made once and whole, opened with the same policies, records spread over its partitions."""

import json
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from conftest import QUIET, needs_proc, open_files, records_of, run_python, settled_files, sound, values_of
from loglib import (
    ConfigConflictError,
    CorruptLogError,
    FlushPolicy,
    LockedError,
    LogClosedError,
    LogError,
    ReadOnlyError,
    RecordTooLargeError,
    Retention,
    Topic,
    TopicConfig,
    UnsupportedFormatError,
    WriterFailedError,
    testing,
)
from loglib.append.writer import Writer
from loglib.system.directory import Directory
from loglib.system.files import REAL
from loglib.testing import Call, FaultyFiles, MemoryFiles, RecordingFiles, UnsyncedFiles, WatchedFiles

Open = Callable[..., Topic]

MANUAL = FlushPolicy(records=None, interval=None, bytes=None)


def by_region(key: bytes, partitions: int) -> int:
    return 0


def by_tenant(key: bytes, partitions: int) -> int:
    return 0


# --- making and opening ----------------------------------------------------------------------------


def test_topic_is_made_once_and_describes_itself(path: Path) -> None:
    policies: dict[str, Any] = {
        "partitions": 3, "flush": FlushPolicy(records=5, interval=None, bytes=100), "segment_bytes": 5000,
        "retention": Retention(age=timedelta(hours=5), bytes=10**6, keep_free=0.2), "compression": "zlib",
        "segment_age": timedelta(hours=2), "durability": "os", "batch_bytes": 999, "batch_records": 77,
        "max_record_bytes": 500, "permissions": 0o640,
    }  # fmt: skip
    with Topic.open(path, **policies) as topic:
        first = topic.config
        assert {name: getattr(first, name) for name in policies} == policies
    with Topic.open(path) as topic:
        assert topic.config == first
    with Topic.open(path, **policies) as topic:
        assert topic.config == first and topic.name == "topic" and topic.path == str(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("partitions", 2), ("flush", FlushPolicy(records=7)), ("retention", Retention(bytes=5)),
        ("segment_bytes", 9999), ("segment_age", None), ("compression", "zlib"), ("durability", "os"),
        ("batch_bytes", 5), ("batch_records", 5), ("max_record_bytes", 5), ("permissions", 0o644),
        ("partitioner", "murmur2"), ("partitioner", by_tenant),
    ],
)  # fmt: skip
def test_argument_that_disagrees_is_an_error_and_never_wins(name: str, value: Any, path: Path) -> None:
    """But for the policies that a writer may change."""
    Topic.open(path).close()
    stored = (path / "topic.json").read_bytes()
    fixed = name in ("partitions", "partitioner")
    for mode in ("a", "r") if fixed else ("r",):
        with pytest.raises(ConfigConflictError, match=name) as raised:
            Topic.open(path, mode=mode, **{name: value})
        assert raised.value.name == name
        wanted = "copy the records to a new topic" if fixed else 'open it with mode="a" to change it'
        assert wanted in str(raised.value)
    Topic.open(path).close()
    assert (path / "topic.json").read_bytes() == stored


def test_service_whose_code_says_another_retention_did_not_start(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Topic.open(path, retention=Retention(age=timedelta(days=7))).close()
    with caplog.at_level("INFO", logger="loglib"):
        for _ in range(2):
            with Topic.open(path, retention=Retention(age=timedelta(days=14)), batch_records=9) as topic:
                assert topic.config.retention.age == timedelta(days=14)
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 2 and "retention is Retention(age=datetime.timedelta(days=14)" in told[0], "once, as it changed"
    assert "and was Retention(age=datetime.timedelta(days=7)" in told[0] and "batch_records is 9" in told[1]
    with Topic.open(path, mode="r") as topic:
        assert (topic.config.retention.age, topic.config.batch_records) == (timedelta(days=14), 9)


def test_policies_that_could_not_be_written_are_not_used(path: Path) -> None:
    memory = MemoryFiles()
    testing.open_topic("/topic", files=memory).close()
    files = FaultyFiles("rename", inner=memory)
    with pytest.raises(OSError):
        testing.open_topic("/topic", files=files, batch_records=9)
    with testing.open_topic("/topic", files=files) as topic:
        assert topic.config.batch_records == TopicConfig().batch_records


# --- changing policies while the topic is open ------------------------------------------------------


def test_policies_change_while_records_wait(path: Path) -> None:
    with Topic.open(path, flush=MANUAL, batch_bytes=1 << 20) as topic:
        topic.append(b"x" * 500)
        topic.alter(compression="zlib", batch_bytes=1000, max_record_bytes=600)
        topic.append(b"y" * 500)
        with pytest.raises(RecordTooLargeError):
            topic.append(b"z" * 700)
        topic.flush()
        assert [each._header.codec for each in topic.batches()] == [0, 1], "what waited went by the old policies"
        assert values_of(topic) == [b"x" * 500, b"y" * 500]
        topic.alter(max_record_bytes=800)
        topic.append(b"z" * 700, sync=True)
    with Topic.open(path, mode="r") as topic:
        assert (topic.config.compression, topic.config.max_record_bytes) == ("zlib", 800)


def test_interval_that_is_set_later_flushes_what_waits_and_what_comes(path: Path) -> None:
    with Topic.open(path, flush=MANUAL, retention=Retention(age=None), segment_age=None) as topic:
        topic.append(b"waits")
        topic.alter(flush=FlushPolicy(records=None, interval=0.01, bytes=None))
        with Topic.open(path, mode="r") as reader, reader.follow("begin", timeout=10.0) as records:
            assert next(iter(records)).value == b"waits"
            topic.append(b"comes")
            assert next(iter(records)).value == b"comes"
        topic.alter(flush=MANUAL)
        topic.flush()
        topic.append(b"stays")
        time.sleep(0.05)
        assert topic.partition(0).high_watermark < topic.partition(0).log_end_offset


def test_retention_that_is_set_later_counts_at_once(path: Path) -> None:
    with Topic.open(path, retention=Retention(age=None), flush=MANUAL, segment_bytes=4096) as topic:
        for _ in range(5):
            topic.append(b"x" * 3000, sync=True)
        topic.retain()
        assert len(topic.partition(0).segments) > 3
        topic.alter(retention=Retention(bytes=0))
        topic.retain()
        assert len(topic.partition(0).segments) == 1


def test_segments_that_retention_drops_are_said_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Topic.open(path, retention=Retention(age=None), flush=MANUAL, segment_bytes=4096) as topic:
        for _ in range(5):
            topic.append(b"x" * 3000, sync=True)
        bases = [each.base_offset for each in topic.partition(0).segments]
        with caplog.at_level("INFO", logger="loglib"):
            topic.alter(retention=Retention(bytes=0))
            caplog.clear()
            topic.retain()
            topic.retain()
    (told,) = [each.getMessage() for each in caplog.records]
    assert told == (
        f"{path}/0000: retention dropped {len(bases) - 1} segments, offsets 0 to {bases[-1]}; "
        f"reason for the last one: the partition holds {2 * (bases[1] - bases[0])} bytes, the limit is 0"
    )


def test_pass_of_retention_that_comes_too_late_says_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Topic.open(path, retention=Retention(age=None, bytes=0), flush=MANUAL, segment_bytes=4096) as topic:
        for _ in range(3):
            topic.append(b"x" * 3000, sync=True)
        topic.partition(0).roll()
        monkeypatch.setattr(Writer, "drop_before", lambda *_: [])  # as for one that decided before another dropped
        with caplog.at_level("INFO", logger="loglib"):
            topic.retain()
    assert caplog.text == ""


def test_processes_that_share_a_topic_keep_each_others_changes(path: Path) -> None:
    with Topic.open(path, partitions=2, shared=True) as one, Topic.open(path, shared=True) as two:
        one.append(b"x", partition=0)
        two.append(b"x", partition=1)
        one.alter(batch_records=7)
        two.alter(batch_bytes=999)
        assert (two.config.batch_records, two.config.batch_bytes) == (7, 999)
    with Topic.open(path, mode="r") as topic:
        assert (topic.config.batch_records, topic.config.batch_bytes) == (7, 999)


def test_change_waits_for_another_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Topic.open(path) as topic, Directory.open(REAL, str(path)) as directory:
        assert REAL.try_lock(directory.fd)
        threading.Timer(0.05, lambda: REAL.unlock(directory.fd)).start()
        topic.alter(batch_records=7)
        assert REAL.try_lock(directory.fd)
        monkeypatch.setattr("loglib.system.directory._LOCK_TIMEOUT_S", 0.02)
        with pytest.raises(LockedError, match="changes its policies"):
            topic.alter(batch_records=8)


@pytest.mark.parametrize(
    ("policies", "error"),
    [
        ({"partitions": 2}, ValueError), ({"partitioner": "crc32"}, ValueError), ({"retention": 5}, ValueError),
        ({"messages": 5}, TypeError), ({"segment_age": timedelta.max}, ValueError),
        ({"segment_age": timedelta(days=10**6, microseconds=1)}, ValueError),
    ],
)  # fmt: skip
def test_policies_that_make_no_sense_change_nothing(policies: dict[str, Any], error: type, path: Path) -> None:
    with Topic.open(path) as topic:
        stored = (path / "topic.json").read_bytes()
        with pytest.raises(error):
            topic.alter(**policies)
        assert (path / "topic.json").read_bytes() == stored and topic.config == TopicConfig()
    with Topic.open(path, mode="r") as topic, pytest.raises(ReadOnlyError):
        topic.alter(batch_records=7)


def test_policy_that_cannot_be_stored_makes_no_topic(path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        Topic.open(path, segment_age=timedelta(days=10**6, microseconds=1))
    assert list(path.parent.iterdir()) == []


def test_writer_that_has_failed_is_not_given_other_policies(path: Path) -> None:
    files = FaultyFiles("datasync", inner=MemoryFiles(), armed=False)
    topic = testing.open_topic("/topic", files=files, flush=MANUAL)
    topic.append(b"x")
    files.armed = True
    with pytest.raises(WriterFailedError):
        topic.flush()
    with pytest.raises(WriterFailedError):
        topic.alter(batch_records=7)
    with suppress(LogError):
        topic.close()


def test_reading_what_is_not_there_makes_nothing(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mode='a' makes one"):
        Topic.open(path, mode="r")
    assert not path.exists()


def test_mode_must_be_one_of_two(path: Path) -> None:
    with pytest.raises(ValueError, match="mode must be"):
        Topic.open(path, mode="w")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a b", "ä", "x" * 250, "a\0b", "a\nb"])
def test_name_that_some_system_cannot_hold_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a name|null byte"):
        Topic.open(os.path.join(tmp_path, name))
    assert list(tmp_path.iterdir()) == []


def test_directory_of_other_files_is_not_made_a_topic(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("x")
    with pytest.raises(LogError, match="holds files"):
        Topic.open(path)
    assert [each.name for each in path.iterdir()] == ["precious"]


def test_topic_that_is_removed_while_it_is_opened_is_not_found(path: Path) -> None:
    class Removing(UnsyncedFiles):
        def rename(self, source: str, target: str, **directories: int) -> None:  # type: ignore[override]
            os.rename(source, target, **directories)
            if target == str(path):
                self.remove_tree(target)

    with pytest.raises(FileNotFoundError, match="removed while"):
        testing.open_topic(path, files=Removing())


def test_newer_topic_is_refused_by_name(path: Path) -> None:
    Topic.open(path).close()
    description = json.loads((path / "topic.json").read_text())
    description["format"] = 3
    description.pop("crc", None)
    (path / "topic.json").write_text(json.dumps(description))
    with pytest.raises(UnsupportedFormatError, match="topic format 3"):
        Topic.open(path, mode="r")


def test_unreadable_description_is_corruption(path: Path) -> None:
    Topic.open(path).close()
    for content in ("", "[]", "{}", '{"format": 2}', "null"):
        (path / "topic.json").write_text(content)
        with pytest.raises(CorruptLogError, match="topic.json"):
            Topic.open(path)


def test_missing_codec_is_found_at_open_and_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="zstd"):
        Topic.open(path, compression="zstd")
    assert not path.exists()
    monkeypatch.undo()
    Topic.open(path, compression="zstd").close()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="zstd"):
        Topic.open(path)
    monkeypatch.undo()
    with Topic.open(path) as topic:
        topic.append(b"x" * 1000)


@pytest.mark.parametrize("compression", ["none", "zlib", "lz4", "zstd"])
def test_every_codec_gives_back_what_was_appended(compression: str, open_topic: Open) -> None:
    topic = open_topic(compression=compression)
    values = [b"abc" * n for n in range(100)]
    topic.append_many(values)
    topic.append(os.urandom(100))
    topic.flush()
    assert values_of(topic)[:100] == values
    sound(topic.partition(0))


def test_policies_can_be_changed_while_nobody_writes(path: Path) -> None:
    Topic.open(path, partitions=2).close()
    Topic.reconfigure(path, retention=Retention(bytes=5), segment_age=None, compression="zlib")
    with Topic.open(path) as topic:
        assert (topic.config.retention, topic.config.segment_age) == (Retention(bytes=5), None)
        with pytest.raises(LockedError):
            Topic.reconfigure(path, compression="none")
    fixed: list[dict[str, Any]] = [{"partitions": 4}, {"partitioner": 4}]
    for changed in fixed:
        with pytest.raises(ValueError, match="cannot change"):
            Topic.reconfigure(path, **changed)
    with pytest.raises(ValueError, match="compression"):
        Topic.reconfigure(path, compression="rar")
    assert Topic.open(path, mode="r").config.compression == "zlib"


# --- where records go --------------------------------------------------------------------------------


def test_key_chooses_the_partition_by_crc32(open_topic: Open) -> None:
    topic = open_topic(partitions=5)
    keys = [b"key %d" % n for n in range(50)] + [b""]
    for key in keys:
        assert topic.append(key, key=key).partition == crc32(key) % 5
    for partition, offsets in topic.append_many(keys, keys=keys):
        assert len(offsets) == sum(crc32(key) % 5 == partition for key in keys)
    topic.flush()
    assert all(r.partition == crc32(r.key or b"") % 5 for r in topic.read())
    for number in range(5):
        ours = [key for key in keys if crc32(key) % 5 == number]
        assert [r.value for r in topic.partition(number).read()] == ours * 2


def test_keyless_records_stay_together_until_a_batch_is_full(open_topic: Open) -> None:
    topic = open_topic(partitions=4, batch_records=10)
    places = [topic.append(b"x").partition for _ in range(400)]
    runs = [places[start : start + 10] for start in range(0, 400, 10)]
    assert sum(len(set(run)) == 1 for run in runs) >= 30
    assert len(set(places)) == 4


def test_explicit_partition_beats_the_key(open_topic: Open) -> None:
    topic = open_topic(partitions=4)
    wrong = (crc32(b"k") + 1) % 4
    assert topic.append(b"x", key=b"k", partition=wrong).partition == wrong
    (only,) = topic.append_many([b"x"] * 9, keys=[b"k"] * 9, partition=wrong)
    assert only.partition == wrong and len(only.offsets) == 9


def test_records_with_and_without_keys_share_a_call(open_topic: Open) -> None:
    topic = open_topic(partitions=3)
    keys = [None, b"a", None, b"b", b""]
    topic.append_many(
        [b"%d" % n for n in range(5)], keys=keys, timestamps=range(5), headers=[None, {"h": b"1"}] + [None] * 3
    )
    topic.flush()
    found = sorted(topic.read(), key=lambda r: r.timestamp)
    assert [r.value for r in found] == [b"0", b"1", b"2", b"3", b"4"] and [r.key for r in found] == keys
    assert found[1].headers == (("h", b"1"),)
    assert found[0].partition == found[2].partition


def test_own_partitioner_is_kept_by_name_and_must_be_given_again(open_topic: Open, path: Path) -> None:
    def by_length(key: bytes, partitions: int) -> int:
        return len(key) % partitions

    with open_topic(partitions=3, partitioner=by_length) as topic:
        assert topic.append(b"x", key=b"12345").partition == 2
        assert {each.partition for each in topic.append_many([b"x"] * 2, keys=[b"1", b"1234"])} == {1}
    assert json.loads((path / "topic.json").read_text())["partitioner"] == "by_length"
    Topic.reconfigure(path, compression="zlib")
    with open_topic() as topic:
        topic.append(b"keyless needs none")
        assert topic.append(b"x", key=b"k", partition=2).partition == 2
        assert [each.partition for each in topic.append_many([b"x"], keys=[b"k"], partition=0)] == [0]
        for append in (lambda: topic.append(b"x", key=b"k"), lambda: topic.append_many([b"x"], keys=[b"k"])):
            with pytest.raises(ValueError, match="by your function by_length: open it with partitioner=by_length"):
                append()
    with open_topic(mode="r") as topic:
        assert len(values_of(topic)) == 6
    with open_topic(partitioner=by_length) as topic:
        assert topic.append(b"x", key=b"12345").partition == 2


@pytest.mark.parametrize("other", ["crc32", "murmur2", by_region], ids=["crc32", "murmur2", "by_region"])
def test_partitioner_of_another_name_is_refused(other: Any, open_topic: Open) -> None:
    open_topic(partitioner=by_tenant).close()
    name = getattr(other, "__name__", other)
    for mode in ("a", "r"):
        with pytest.raises(ConfigConflictError, match=f"'by_tenant', not '{name}'.*copy the records"):
            open_topic(partitioner=other, mode=mode)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_partitioner_that_chooses_no_partition_is_refused(wrong: int, open_topic: Open) -> None:
    def astray(key: bytes, partitions: int) -> int:
        return wrong

    with open_topic(partitions=3, partitioner=astray) as topic:
        for append in (lambda: topic.append(b"x", key=b"k"), lambda: topic.append_many([b"x"], keys=[b"k"])):
            with pytest.raises(ValueError, match="the partitioner chose"):
                append()


@pytest.mark.parametrize("value", ["text", 5, [1], object()])
def test_values_that_are_not_bytes_are_refused_with_advice(value: Any, open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"first")
    for append in (
        lambda: topic.append(value), lambda: topic.append(b"v", key=value), lambda: topic.append_many([value]),
        lambda: topic.append_many([b"v"], keys=[value]), lambda: topic.append(b"v", headers={"h": value}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="must be bytes|must map str to bytes"):
            append()
    topic.flush()
    assert values_of(topic) == [b"first"]


def test_bytes_like_values_are_copied(open_topic: Open) -> None:
    topic = open_topic()
    buffer = bytearray(b"abc")
    topic.append(buffer)  # type: ignore[arg-type]
    topic.append(memoryview(buffer))  # type: ignore[arg-type]
    buffer[:] = b"xyz"
    topic.flush()
    assert values_of(topic) == [b"abc", b"abc"]


# --- one writer, or several --------------------------------------------------------------------------


def test_second_writer_is_refused_and_holds_nothing(open_topic: Open, path: Path) -> None:
    topic = open_topic(partitions=3)
    with pytest.raises(LockedError, match=f"pid {os.getpid()}"):
        Topic.open(path)
    topic.close()
    partly = open_topic(shared=True)
    partly.append(b"x", partition=2)
    with pytest.raises(LockedError, match="0002"):
        Topic.open(path)
    other = open_topic(shared=True)
    assert other.append(b"y", partition=0).partition == 0, "the locks that could be taken were given back"


def test_shared_topics_spread_over_the_partitions(open_topic: Open) -> None:
    topics = [open_topic(partitions=3, shared=True) for _ in range(4)]
    taken = [topic.append(b"%d" % n).partition for n, topic in enumerate(topics[:3])]
    assert sorted(taken) == [0, 1, 2]
    with pytest.raises(LockedError, match="all 3 partitions are taken.*append again when"):
        topics[3].append(b"no room")
    for topic, partition in zip(topics, taken, strict=False):
        assert {topic.append(b"x").partition for _ in range(10)} == {partition}
        with pytest.raises(LockedError):
            topic.append(b"x", partition=(partition + 1) % 3)
        topic.flush()
    assert len(values_of(topics[3])) == 33
    topics[0].close()
    assert topics[3].append(b"now").partition == taken[0]


def test_shared_partition_that_was_appended_to_directly_is_the_topics_as_well(open_topic: Open) -> None:
    """Its writer used to be unknown to the topic: not flushed, not in the interval, not closed."""
    topic = open_topic(shared=True, partitions=2)
    topic.partition(1).append(b"x")
    topic.flush()
    assert values_of(topic) == [b"x"]
    with open_topic(shared=True, at=Path(topic.path)) as other:
        with pytest.raises(LockedError):
            other.partition(1).append(b"y")
        assert topic.append(b"z").partition == 1, "the one it has already"


def test_threads_that_meet_at_a_shared_partition_make_one_writer(open_topic: Open) -> None:
    topic = open_topic(shared=True)
    barrier = threading.Barrier(8)
    failures: list[BaseException] = []

    def run() -> None:
        barrier.wait()
        try:
            topic.append(b"x", partition=0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    topic.flush()
    assert failures == [] and len(values_of(topic)) == 8


def test_retention_of_a_shared_topic_leaves_the_partitions_of_others_alone(open_topic: Open) -> None:
    policies: dict[str, Any] = {"partitions": 2, "retention": Retention(age=None, bytes=0)}
    other, topic = open_topic(shared=True, **policies), open_topic(shared=True, **policies)
    other.append(b"x", partition=0, sync=True)
    topic.append(b"x", partition=1)
    topic.partition(1).roll()
    assert {each.partition for each in topic.retain()} == {1}
    assert {each.partition for each in topic.retain(dry_run=True)} == {0, 1}


# --- the end -----------------------------------------------------------------------------------------


@needs_proc
def test_close_releases_everything_also_when_a_flush_fails(open_topic: Open, path: Path) -> None:
    before = settled_files()
    files = FaultyFiles("datasync", every=True, armed=False)
    topic = open_topic(partitions=3, files=files)
    reader = topic.follow()
    reader.poll(timeout=0.001)
    for number in range(3):
        topic.append(b"x", partition=number)
    files.armed = True
    with pytest.raises(LogError):
        topic.close()
    assert open_files() == before and reader.closed and topic.closed
    topic.close()
    with open_topic() as topic:
        assert Counter(values_of(topic)) <= Counter([b"x"] * 3)


@needs_proc
def test_failed_open_releases_everything(open_topic: Open, path: Path) -> None:
    open_topic(partitions=3).close()
    before = settled_files()
    (path / "0002" / f"{0:020d}.log").write_bytes(b"x")
    with pytest.raises(CorruptLogError):
        Topic.open(path)
    assert open_files() == before


def test_topic_is_a_context_manager_and_says_its_state(open_topic: Open) -> None:
    with open_topic(partitions=2) as topic:
        assert repr(topic) == f"<Topic at {topic.path}, partitions 2, mode a, holding 0 bytes, groups none>"
    assert "closed" in repr(topic)
    with pytest.raises(LogClosedError, match="open the topic again"):
        topic.append(b"x")


def test_topic_open_for_reading_pickles_as_its_path(open_topic: Open, path: Path) -> None:
    with open_topic() as topic:
        topic.append(b"x", sync=True)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(topic)
        with Topic.open(path, mode="r") as reading:
            content = pickle.dumps(reading)
            assert len(content) < 500
            with pickle.loads(content) as copy:
                assert copy.mode == "r" and values_of(copy) == [b"x"]


def test_everything_unflushed_is_flushed_at_the_end_of_the_process(path: Path) -> None:
    output = run_python(
        """
        import sys
        from loglib import FlushPolicy, Topic
        manual = FlushPolicy(records=None, interval=None, bytes=None)
        topics = [Topic.open(f"{sys.argv[1]}{n}", flush=manual) for n in range(3)]
        for topic in topics:
            topic.append(b"never flushed by hand")
        print("done")
        """,
        path,
    )
    assert output == "done\n"
    for number in range(3):
        with Topic.open(f"{path}{number}", mode="r") as topic:
            assert values_of(topic) == [b"never flushed by hand"]


def test_topic_that_cannot_be_flushed_at_the_end_leaves_the_others_no_worse(path: Path) -> None:
    from conftest import start_python

    process = start_python(
        """
        import sys
        from loglib.testing import FaultyFiles, open_topic
        from loglib import FlushPolicy
        manual = FlushPolicy(records=None, interval=None, bytes=None)
        files = FaultyFiles("datasync", every=True, armed=False)
        topics = [
            open_topic(f"{sys.argv[1]}{n}", flush=manual, **({"files": files} if n == 1 else {})) for n in range(4)
        ]
        for topic in topics:
            topic.append(b"x")
        files.armed = True
        """,
        path,
    )
    _, errors = process.communicate(timeout=60)
    assert "WriterFailedError" in errors
    for number in (0, 2, 3):
        with Topic.open(f"{path}{number}", mode="r") as topic:
            assert values_of(topic) == [b"x"]


def test_reading_topic_needs_no_close(path: Path) -> None:
    Topic.open(path, **QUIET).close()
    topic = Topic.open(path, mode="r")
    with pytest.raises(ReadOnlyError):
        topic.append(b"x")
    del topic  # and no ResourceWarning, which would be an error here


def test_topic_in_memory_is_reconfigured_there(tmp_path: Path) -> None:
    # The new topic.json was written to the disk, whatever files the topic was on.
    files = MemoryFiles()
    path = tmp_path / "topic"
    testing.open_topic(path, files=files, **QUIET).close()
    with testing.open_topic(path, files=files) as topic:
        topic.alter(segment_bytes=1 << 20)
    with testing.open_topic(path, mode="r", files=files) as topic:
        assert topic.config.segment_bytes == 1 << 20
    assert not path.exists()


def test_opening_costs_a_few_calls_a_partition(open_topic: Open) -> None:
    open_topic(partitions=40).close()
    files = RecordingFiles()
    with open_topic(files=files):
        assert len(files.calls) < 50 * 40


def test_large_records_of_one_key_are_not_put_into_one_batch(open_topic: Open) -> None:
    topic = open_topic(partitions=2, max_record_bytes=1000, batch_bytes=2000)
    values = [b"x" * 900] * 20 + [b"y"] * 20
    topic.append_many(values, keys=[b"a"] * 20 + [b"d"] * 20)
    topic.flush()
    assert sorted(values_of(topic)) == sorted(values)
    assert max(batch._header.value_bytes for batch in topic.batches()) <= 3000


@pytest.mark.parametrize("call", ["pwritev", "datasync", "rename"])
def test_close_in_the_middle_of_another_call_closes_when_that_has_ended(
    call: str, open_topic: Open, path: Path
) -> None:
    """As a signal handler may: it waited for locks that the call which it had interrupted held."""

    class Interrupting(WatchedFiles):
        handler: Any = None

        def before(self, called: Call) -> None:
            if called.name == call and self.handler is not None:
                handler, self.handler = self.handler, None
                handler()

    files = Interrupting(UnsyncedFiles())
    topic = open_topic(files=files, segment_bytes=4096, batch_records=2)
    topic.append(b"before", sync=True)
    files.handler = topic.close
    with suppress(LogClosedError):
        for number in range(100):
            topic.append(b"%d" % number + bytes(1000))
            topic.flush()
    topic.close()
    for thread in threading.enumerate():
        if thread.name == "loglib-close":
            thread.join(60)
    assert files.handler is None
    assert topic.closed
    with Topic.open(path) as again:
        recovery = again.partition(0).recovery
        assert recovery is not None and recovery.clean
        assert values_of(again)[0] == b"before"


def test_close_within_a_call_on_another_topic_closes_at_once(open_topic: Open, tmp_path: Path) -> None:
    source = open_topic()
    source.append(b"x", sync=True)

    def values() -> Iterator[bytes | None]:
        yield from values_of(source)
        source.close()
        assert source.partition(0)._access.writer()._closed is not None

    target = open_topic(tmp_path / "target")
    target.append_many(values())
    target.flush()
    assert values_of(target) == [b"x"]


@pytest.mark.usefixtures("unmeasured")  # measuring has locks of its own, which a handler may find taken
def test_service_that_closes_in_its_signal_handler_ends_and_keeps_everything(path: Path) -> None:
    program = """
        import os, signal, sys
        from loglib import LogClosedError, Topic
        topic = Topic.open(sys.argv[1])
        def stop(*_):
            topic.close()
            sys.exit(0)
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
        number = 0
        try:
            while True:
                topic.append(b"%d" % number, sync=number % 100 == 0)
                number += 1
        except LogClosedError:
            pass
        finally:
            print(number)
    """
    for milliseconds in (20, 31, 47):
        before = len(records_of(path)) if path.exists() else 0
        appended = int(run_python(program, path, milliseconds / 1000))
        values = [record.value for record in records_of(path)[before:]]
        assert values[:appended] == [b"%d" % number for number in range(appended)]
        assert len(values) <= appended + 1


@needs_proc
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("room", [119, 121])
def test_more_partitions_than_descriptors_say_how_many_are_needed(tmp_path: Path, room: int) -> None:
    """340 partitions under 1,024 descriptors: a raw "Too many open files", of a file that nobody has heard of."""
    run_python(
        """
        import os, resource, sys
        from loglib import FlushPolicy, Retention, Topic, TooManyFilesError

        path, room = sys.argv[1], int(sys.argv[2])
        quiet = dict(flush=FlushPolicy(records=None, interval=None, bytes=None), retention=Retention(age=None))
        Topic.open(path, partitions=40, segment_age=None, **quiet).close()
        used = len(os.listdir("/proc/self/fd")) - 1  # without the one for looking
        limit = used + room
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            topic = Topic.open(path)
        except TooManyFilesError as error:
            assert room == 119 and (error.needed, error.limit, error.errno) == (121, limit, 24), error
            assert f"needs 121 descriptors besides those in use, and `ulimit -n` is {limit}" in str(error)
            assert len(os.listdir("/proc/self/fd")) - 1 == used, "nothing is left open"
        else:
            assert room == 121
            for partition in topic.partitions:
                partition.append(b"x", sync=True)
                partition.roll()
            topic.close()
        with Topic.open(path, shared=True) as topic:  # and nothing is left locked
            topic.append(b"x", sync=True)
        """,
        tmp_path / "topic",
        room,
    )


def test_other_failures_while_locks_are_taken_are_what_they_are(path: Path) -> None:
    Topic.open(path).close()
    with pytest.raises(OSError, match="Input/output error") as caught:
        testing.open_topic(path, files=FaultyFiles("flock"))
    assert not isinstance(caught.value, LogError)
