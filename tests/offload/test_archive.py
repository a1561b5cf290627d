"""Archiving: each durable record of a sealed segment is in one file, once; what cannot be archived is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import archived_topics
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from archived_topics import in_order, offsets, open_store, parquet_files, sealed
from builders import spoil
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import NOW, QUIET, run_python
from loglib import CorruptLogError, LogError, OffsetOutOfRangeError, Topic, repair, testing
from loglib.offload import archive, archived, read_archive
from loglib.offload.archiving import commit
from loglib.testing import MemoryFiles

Open = Callable[..., Topic]

to = archived_topics.to
KAFKA = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]


# --- what is archived -----------------------------------------------------------------------------------------


def test_sealed_segments_are_archived_and_the_open_one_is_not(open_topic: Open, to: Path) -> None:
    topic = open_topic(partitions=2)
    sealed(topic)
    sealed(topic, partition=1, segments=1)
    ends = [each.log_end_offset for each in topic.partitions]
    topic.append(b"open", partition=0, sync=True)
    made = archive(topic, to)
    assert made == archived(to)
    assert (made.version, made.log_id, made.topic) == (1, topic.log_id, "topic")
    assert (made.ends, made.rows, made.log_bytes) == (dict(enumerate(ends)), 40, sum(ends))
    assert made.bytes == sum(each.stat().st_size for each in parquet_files(to))
    expected = topic.arrow("begin", made.ends).read_all()
    assert in_order(read_archive(to).read_all()).equals(in_order(expected))


def test_files_have_the_columns_of_kafka_and_the_encodings_that_are_promised(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    archive(topic.path, to)
    (file,) = parquet_files(to)
    opened = pq.ParquetFile(file)
    assert opened.schema_arrow.names == KAFKA
    group = opened.metadata.row_group(0)
    columns = {group.column(number).path_in_schema: group.column(number) for number in range(group.num_columns)}
    assert all(each.compression == "ZSTD" for each in columns.values())
    for name in ("offset", "timestamp"):
        assert "DELTA_BINARY_PACKED" in columns[name].encodings and columns[name].statistics.has_min_max
    for name in ("key", "value"):
        assert not columns[name].has_dictionary_page and columns[name].statistics is None
    table = opened.read()
    assert set(table.column("topic").to_pylist()) == {"topic"}
    assert set(table.column("timestampType").to_pylist()) == {0}
    found = archived(to).partitions[0].files[0]
    times = pc.min_max(table.column("timestamp").cast("int64")).as_py()
    assert (found.first_time, found.last_time) == (times["min"], times["max"])
    assert (found.rows, found.bytes) == (30, file.stat().st_size)


def test_a_flipped_bit_in_a_page_is_found_by_other_readers(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    topic.append_many([os.urandom(1000) for _ in range(100)])
    topic.partition(0).roll()
    archive(topic, to)
    (file,) = parquet_files(to)
    spoil(file, 50_000)
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(file, page_checksum_verification=True).read()


def test_archiving_goes_on_where_it_ended(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic, segments=1)
    first = archive(topic, to)
    assert archive(topic, to) == first, "nothing was sealed"
    files = {each: each.read_bytes() for each in parquet_files(to)}
    sealed(topic, segments=2)
    second = archive(topic, to)
    assert second.version == 2 and second.partitions[0].files[0] == first.partitions[0].files[0]
    assert second.partitions[0].files[1].start == first.ends[0]
    assert all(each.read_bytes() == content for each, content in files.items()), "a file never changes"
    assert offsets(read_archive(to).read_all()) == offsets(topic.arrow().read_all())


def test_an_empty_topic_makes_an_archive_without_files(open_topic: Open, to: Path) -> None:
    made = archive(open_topic(partitions=2), to)
    assert (made.version, made.rows, made.bytes, made.ends) == (1, 0, 0, {0: 0, 1: 0})
    assert read_archive(to).read_all().num_rows == 0


@pytest.mark.parametrize(("file_bytes", "files"), [(1, 6), (1000, 3), (1 << 30, 1)])
def test_several_segments_go_to_a_file(open_topic: Open, to: Path, file_bytes: int, files: int) -> None:
    topic = open_topic()
    sealed(topic, segments=6)
    sizes = {each.size_bytes for each in topic.partition(0).segments if each.sealed}
    assert min(sizes) > 500, "two reach 1000 bytes, and one does not"
    made = archive(topic, to, file_bytes=file_bytes if file_bytes != 1000 else max(sizes) + 1)
    assert len(made.partitions[0].files) == files
    assert offsets(read_archive(to).read_all()) == offsets(topic.arrow().read_all())


def test_row_groups_have_about_the_wanted_size(open_topic: Open, to: Path) -> None:
    topic = open_topic(batch_bytes=4096)
    topic.append_many([bytes(1000)] * 100)
    topic.partition(0).roll()
    archive(topic, to, row_group_bytes=10_000)
    (file,) = parquet_files(to)
    groups = pq.ParquetFile(file).metadata
    rows = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
    assert sum(rows) == 100 and all(10 <= each <= 20 for each in rows[:-1])


@pytest.mark.parametrize("name", ["file_bytes", "row_group_bytes"])
def test_sizes_that_make_no_sense_are_refused(open_topic: Open, to: Path, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        archive(open_topic(), to, **{name: 0})  # type: ignore[arg-type]
    assert not to.exists()


def test_many_files_are_committed_in_several_versions(
    open_topic: Open, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.offload.archiving.FILES_A_COMMIT", 2)
    topic = open_topic(partitions=2)
    sealed(topic, segments=3)
    sealed(topic, segments=2, partition=1)
    told: list[tuple[int, int]] = []
    made = archive(topic, to, file_bytes=1, progress=lambda done, total: told.append((done, total)))
    assert made.version == 3 and made.rows == 50
    assert told == sorted(told) and told[0] == (0, made.log_bytes) and told[-1] == (made.log_bytes, made.log_bytes)


def test_partitions_that_are_added_are_archived_too(open_topic: Open, to: Path, path: Path) -> None:
    topic = open_topic()
    sealed(topic, segments=1)
    archive(topic, to)
    topic.close()
    Topic.add_partitions(path, 2)
    topic = open_topic()
    assert archive(topic, to).ends[1] == 0
    sealed(topic, segments=1, partition=1)
    assert archive(topic, to).rows == 20
    assert topic.arrow(archive=to).read_all().num_rows == 20


def test_records_that_are_not_yet_durable_are_not_archived(path: Path, to: Path) -> None:
    with testing.open_topic(path, **QUIET, durability="os") as topic:
        sealed(topic, segments=2)
        part = topic.partition(0)
        made = archive(topic, to)
        assert made.ends[0] <= part.durable_end <= part.high_watermark
        assert all(each.end <= part.durable_end for each in made.partitions[0].files)


def test_a_transaction_that_is_not_done_is_not_archived(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic, segments=1)
    part = topic.partition(0)
    made = archive(topic, to)
    assert made.ends[0] == part.durable_end == part.high_watermark


@pytest.mark.parametrize("codec", ["zlib", "lz4", "zstd"])
def test_compressed_logs_are_archived(open_topic: Open, to: Path, codec: str) -> None:
    topic = open_topic(compression=codec)
    topic.append_many([b"value %d" % number for number in range(1000)])
    topic.partition(0).roll()
    archive(topic, to)
    assert read_archive(to, columns=["value"]).read_all().column(0).to_pylist() == [
        b"value %d" % number for number in range(1000)
    ]


_bytes = st.none() | st.binary(max_size=20)
_headers = st.none() | st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=3)
_times = st.integers(-(1 << 63), (1 << 63) - 1).filter(lambda each: not 10**9 <= abs(each) < 10**14)
_record = st.tuples(_bytes, _bytes, _headers, _times, st.booleans())


@settings(deadline=None, max_examples=25)
@given(records=st.lists(_record, max_size=40), row_group_bytes=st.sampled_from([1, 50, 1 << 20]))
def test_archive_and_tail_are_the_log_row_by_row(records: list[Any], row_group_bytes: int) -> None:
    files = MemoryFiles()
    files.make_directories("/data")
    with testing.open_topic("/data/t", files=files, clock=lambda: NOW, **QUIET) as topic:
        for value, key, headers, timestamp, roll in records:
            topic.append(value, key, headers=headers, timestamp=timestamp)
            if roll:
                topic.partition(0).roll()
        topic.flush()
        made = archive(topic, "/data/archive", row_group_bytes=row_group_bytes)
        expected = topic.arrow().read_all()
        assert topic.arrow(archive="/data/archive").read_all().combine_chunks().equals(expected.combine_chunks())
        assert made.rows == sum(each < made.ends[0] for each in offsets(expected))


def test_memory_does_not_grow_with_the_log(open_topic: Open, path: Path, to: Path) -> None:
    with open_topic() as topic:
        for _ in range(60):
            topic.append_many([os.urandom(500) * 2] * 2000)
        topic.partition(0).roll()
    peak = int(run_python(PEAK, path, to))
    assert peak < 60_000  # kB; the log has 120 MB


PEAK = """
import resource, sys
import pyarrow.parquet
from loglib.offload import archive
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert archive(sys.argv[1], sys.argv[2], row_group_bytes=4 << 20).rows == 120_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


# --- refusals ---------------------------------------------------------------------------------------------------


def test_the_archive_of_another_topic_is_refused(open_topic: Open, to: Path, tmp_path: Path) -> None:
    topic = open_topic()
    sealed(topic)
    made = archive(topic, to)
    other = open_topic(tmp_path / "other")
    sealed(other)
    for use in (lambda: archive(other, to), lambda: other.arrow(archive=to)):
        with pytest.raises(LogError, match="archive of another log"):
            use()
    assert archived(to) == made


def test_a_topic_or_an_archive_that_is_not_there_is_no_archive(tmp_path: Path, to: Path) -> None:
    with pytest.raises(FileNotFoundError):
        archive(tmp_path / "nothing", to)
    assert not to.exists()
    for use in (archived, read_archive):
        with pytest.raises(FileNotFoundError, match=r"loglib\.offload\.archive makes one"):
            use(to)
    to.write_bytes(b"a file")
    with pytest.raises(FileNotFoundError):
        archived(to)


def test_dropped_offsets_are_an_error_or_a_declared_gap(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic, segments=1)
    first = archive(topic, to)
    sealed(topic, segments=2)
    start = topic.partition(0).delete_before(topic.partition(0).segments[2].base_offset)
    with pytest.raises(OffsetOutOfRangeError):
        archive(topic, to)
    assert archived(to) == first
    with pytest.raises(OffsetOutOfRangeError):
        topic.arrow(archive=to).read_all()
    made = archive(topic, to, on_damage="skip")
    assert made.partitions[0].gaps == ((first.ends[0], start),) and made.rows == 20
    assert topic.arrow(archive=to).read_all().num_rows == 20


def test_a_log_that_is_behind_its_archive_is_refused(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic, segments=1)
    made = archive(topic, to)
    ahead = made.partitions[0]._replace(end=made.ends[0] + 1)
    with closing(open_store(to)) as store:
        assert commit(store, made._replace(version=2, partitions=(ahead,)))
    with pytest.raises(OffsetOutOfRangeError):
        archive(topic, to)


def test_damage_is_an_error_or_a_gap_and_a_repair_declares_it(open_topic: Open, to: Path, path: Path) -> None:
    topic = open_topic()
    sealed(topic, segments=2)
    first, second, _ = topic.partition(0).segments
    topic.close()
    spoil(Path(first.path), 4096 + 300)
    topic = open_topic()
    with pytest.raises(CorruptLogError):
        archive(topic, to)
    assert parquet_files(to) == [], "a file that was begun is removed"
    skipped = archive(topic, to, on_damage="skip")
    ((start, end),) = skipped.partitions[0].gaps
    assert 0 <= start < end <= second.base_offset and 10 <= skipped.rows < 20
    topic.close()
    repair(path)
    topic = open_topic()
    other = to.with_name("other")
    assert archive(topic, other).partitions[0].gaps == skipped.partitions[0].gaps
    assert offsets(read_archive(other).read_all()) == offsets(topic.arrow(on_damage="skip").read_all())


def test_segments_without_a_whole_batch_make_no_file(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    topic.append_many([b"x"] * 10)
    topic.partition(0).roll()
    (first, _) = topic.partition(0).segments
    topic.close()
    spoil(Path(first.path), 4096 + 80)
    made = archive(open_topic(), to, on_damage="skip")
    assert made.rows == 0 and made.partitions[0].gaps == ((0, first.end_offset),)
    assert made.ends == {0: first.end_offset}
