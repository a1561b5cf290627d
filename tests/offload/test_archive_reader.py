"""The archived past and the live tail as one stream: each record once, in order, cut at an exact offset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import spoil

from conftest import NOW, QUIET, SECOND
from loglib import CorruptLogError, LogError, OffsetOutOfRangeError, Topic, testing
from loglib.config.times import to_datetime
from loglib.offload import archive, archived, read_archive
from loglib.offload.archive_reader import ArchiveReader, Range
from loglib.system.files import REAL

Open = Callable[..., Topic]


class Past:
    """A topic whose archive ends in the middle of it, and whose log has lost the older half of that."""

    def __init__(self, path: Path, to: Path, *, drop: bool) -> None:
        self.to = to
        random = Random(7)
        self.topic = testing.open_topic(path, partitions=3, segment_bytes=1 << 20, clock=lambda: NOW, **QUIET)
        for round_ in range(8):
            for partition in self.topic.partitions:
                for _ in range(random.randrange(40)):
                    stamp = NOW + round_ * 1000 * SECOND + random.randrange(-3000, 3000) * SECOND
                    value, key = random.randbytes(random.randrange(30)), b"k" * random.randrange(3)
                    partition.append(value, key, timestamp=stamp)
                self.topic.flush()
                partition.roll()
            if round_ == 4:
                archive(self.topic, to, file_bytes=1 << 10, row_group_bytes=512)
        self.rows = self.topic.arrow().read_all().sort_by([("partition", "ascending"), ("offset", "ascending")])
        if drop:
            for partition, end in zip(self.topic.partitions, archived(to).ends.values(), strict=True):
                bases = [each.base_offset for each in partition.segments if each.base_offset <= end]
                partition.delete_before(bases[len(bases) // 2])

    def of(self, partition: int) -> pa.Table:
        return self.rows.filter(pa.compute.equal(self.rows["partition"], partition))


@pytest.fixture(params=[True, False], ids=["the log begins later", "the log has all"])
def past(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Past]:
    made = Past(tmp_path / "topic", tmp_path / "archive", drop=request.param)
    with made.topic:
        yield made


def in_order(table: pa.Table) -> pa.Table:
    return table.sort_by([("partition", "ascending"), ("offset", "ascending")])


def test_archive_and_log_are_each_record_once(past: Past) -> None:
    for batch_bytes in (1, 700, 1 << 20):
        found = past.topic.arrow(archive=past.to, batch_bytes=batch_bytes).read_all()
        assert in_order(found).equals(past.rows)
    for partition in past.topic.partitions:
        assert in_order(partition.arrow(archive=past.to).read_all()).equals(past.of(partition.id))


def test_each_range_of_offsets_is_that_range(past: Past) -> None:
    random = Random(1)
    for number in range(3):
        mine = past.of(number)
        offsets = mine["offset"].to_pylist()
        for _ in range(25):
            first, last = sorted(random.choices(range(len(offsets)), k=2))
            columns = random.choice([["offset", "value"], ["value"], ["key", "timestamp"], None])
            found = past.topic.partition(number).arrow(
                offsets[first], offsets[last], archive=past.to, columns=columns, batch_bytes=random.choice((1, 4096))
            ).read_all()  # fmt: skip
            assert found.equals(mine.slice(first, last - first).select(columns or mine.column_names))


def test_a_time_is_found_in_the_archive_or_in_the_log(past: Past) -> None:
    times = past.rows["timestamp"].cast("int64").to_pylist()
    for time in (min(times), *Random(2).choices(times, k=30), max(times), max(times) + 1):
        expected, within = [], []
        for number in range(3):
            mine = past.of(number)
            stamps = mine["timestamp"].cast("int64").to_pylist()
            first = next((at for at, each in enumerate(stamps) if each >= time), len(stamps))
            expected.append(mine.slice(first))
            within.append(mine.slice(0, first))
        start = to_datetime(time)
        assert in_order(past.topic.arrow(start, archive=past.to).read_all()).equals(pa.concat_tables(expected))
        assert in_order(past.topic.arrow(end=start, archive=past.to).read_all()).equals(pa.concat_tables(within))


def test_a_time_behind_the_archive_does_not_lead_back_into_it(open_topic: Open, tmp_path: Path) -> None:
    """The log's search ends at a damaged batch, which may hold the record; the archive has it as a gap."""
    topic = open_topic(partitions=1)
    places = [topic.append(b"%d" % number, timestamp=NOW + number * SECOND, sync=True) for number in range(4)]
    topic.partition(0).roll()
    spoil(Path(topic.partition(0).segments[0].path), 4096 + places[3].offset + 130)
    archive(topic, tmp_path / "archive", on_damage="skip")
    topic.append(b"tail", timestamp=NOW + 9 * SECOND, sync=True)
    found = topic.arrow(to_datetime(NOW + 3 * SECOND), archive=tmp_path / "archive", on_damage="skip").read_all()
    assert found["value"].to_pylist() == [b"tail"]


def test_only_files_and_row_groups_that_are_wanted_are_opened(past: Past) -> None:
    files = archived(past.to).partitions[0].files
    assert len(files) > 2
    for each in (files[0], files[-1]):
        (past.to / each.name).unlink()
    start, end = files[0].end, files[-1].start
    found = past.topic.partition(0).arrow(start, end, archive=past.to).read_all()
    assert found.num_rows == sum(each.rows for each in files[1:-1])
    with pytest.raises(CorruptLogError, match="no file"):
        past.topic.partition(0).arrow(archive=past.to).read_all()


def test_files_of_a_range_are_those_with_its_records(past: Past) -> None:
    reader = ArchiveReader.load(REAL, past.to)
    offsets = {each.name: set(pq.read_table(past.to / each.name)["offset"].to_pylist())
               for each in reader.archived.partitions[0].files}  # fmt: skip
    inside = sorted(set().union(*offsets.values()))
    assert len(offsets) > 2
    for start, end in ((0, 1 << 62), (inside[0], inside[1]), (inside[len(inside) // 2], inside[-1])):
        wanted = [name for name, found in offsets.items() if any(start <= each < end for each in found)]
        assert [each.name for each in reader.files(Range(0, start, end))] == wanted


def test_archive_alone_ends_where_it_ends(past: Past) -> None:
    ends = archived(past.to).ends
    within = pa.array([row["offset"] < ends[row["partition"]] for row in past.rows.to_pylist()])
    expected = past.rows.filter(within)
    assert in_order(read_archive(past.to).read_all()).equals(expected)
    offsets = past.of(1)["offset"].to_pylist()
    part = read_archive(past.to, {1: offsets[3]}, {0: 0, 1: offsets[5], 2: 0}, columns=["offset"]).read_all()
    assert part["offset"].to_pylist() == offsets[3:5]
    assert read_archive(past.to, to_datetime(NOW + 10**6 * SECOND)).read_all().num_rows == 0
    assert read_archive(past.to, timedelta(days=36500)).read_all().num_rows == expected.num_rows


@pytest.mark.parametrize("how", ["cut", "another footer", "a page", "no Parquet"])
def test_damaged_file_is_an_error_that_names_it(past: Past, how: str) -> None:
    path = past.to / archived(past.to).partitions[0].files[0].name
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[-1]
    elif how == "another footer":
        content[-20] ^= 1
    elif how == "a page":
        content[pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset + 30] ^= 1
    else:
        content[:] = bytes(len(content))
    path.write_bytes(content)
    with pytest.raises(CorruptLogError, match=path.name):
        past.topic.partition(0).arrow(archive=past.to).read_all()


def test_partition_that_the_archive_does_not_know_is_read_from_the_log(past: Past) -> None:
    past.topic.close()
    Topic.add_partitions(past.topic.path, 4)
    with Topic.open(past.topic.path, create=True) as topic:
        topic.append(b"new", partition=3, sync=True)
        found = topic.arrow(archive=past.to).read_all()
        assert found.num_rows == past.rows.num_rows + 1
        assert topic.partition(3).arrow(archive=past.to).read_all()["value"].to_pylist() == [b"new"]


def test_what_lies_in_neither_is_an_error(past: Past, tmp_path: Path) -> None:
    topic, ends = past.topic, archived(past.to).ends
    part = topic.partition(0)
    later = next(each.base_offset for each in part.segments if each.base_offset > ends[0])
    part.delete_before(later)
    with pytest.raises(OffsetOutOfRangeError):
        topic.arrow(archive=past.to).read_all()
    with pytest.raises(OffsetOutOfRangeError):
        read_archive(past.to, {0: ends[0] + 8})
    with pytest.raises(ValueError, match="no partition 9 here"):
        read_archive(past.to, {9: 0})
    with pytest.raises(ValueError, match="another record in each partition"):
        topic.arrow(7, archive=past.to)
    with pytest.raises(FileNotFoundError, match="no archive here"):
        topic.arrow(archive=tmp_path / "nowhere")
    with Topic.open(
        tmp_path / "other", create=True
    ) as other, pytest.raises(LogError, match="the archive of another log"):
        other.arrow(archive=past.to)


def test_offset_before_the_archive_is_an_error(open_topic: Open, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    for _ in range(2):
        topic.append(b"x", sync=True)
        topic.partition(0).roll()
    topic.partition(0).delete_before(topic.partition(0).segments[1].base_offset)
    archive(topic, tmp_path / "archive")
    with pytest.raises(OffsetOutOfRangeError):
        topic.partition(0).arrow(0, archive=tmp_path / "archive")
    assert topic.partition(0).arrow(archive=tmp_path / "archive").read_all().num_rows == 1
