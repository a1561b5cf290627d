"""Archiving: each durable record of a sealed segment is in one file, once, and what is committed does not change."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import spoil
from conftest import NOW, QUIET, SECOND, run_python, start_python
from loglib import (
    Archived,
    CorruptLogError,
    LockedError,
    LogError,
    OffsetOutOfRangeError,
    Topic,
    UnsupportedFormatError,
    archive,
    archived,
    numbered,
    read_archive,
    repair,
    testing,
)
from loglib.archiving.manifest import ArchivedFile, ArchivedPartition, decode, encode
from loglib.archiving.place import DirectoryPlace, newest
from loglib.sealed import seal
from loglib.system.files import REAL, Files
from loglib.testing import FaultyFiles, FullDisk, MemoryFiles, RecordingFiles, ShortWrites

Open = Callable[..., Topic]
KAFKA = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]


@pytest.fixture
def to(tmp_path: Path) -> Path:
    """Where an archive may be made."""
    return tmp_path / "archive"


def sealed(topic: Topic, *, segments: int = 3, records: int = 10, partition: int = 0) -> None:
    """Add sealed segments with numbered records, with keys, headers and nulls among them."""
    part = topic.partition(partition)
    for _ in range(segments):
        for _ in range(records):
            at = part.log_end_offset
            part.append(
                None if at % 7 == 0 else b"value %d" % at,
                b"k%d" % (at % 3) if at % 2 else None,
                headers=[("at", b"%d" % at), ("at", b"")] if at % 5 == 0 else None,
                timestamp=NOW + at * SECOND,
            )
        part.flush()
        part.roll()


def in_order(table: pa.Table) -> pa.Table:
    return table.sort_by([("partition", "ascending"), ("offset", "ascending")]).combine_chunks()


def offsets(table: pa.Table) -> list[int]:
    found: list[int] = table.column("offset").to_pylist()
    return found


def parquet_files(to: Path) -> list[Path]:
    return sorted(to.glob("[0-9]*/*"))


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
    monkeypatch.setattr("loglib.archiving.archiver.FILES_A_COMMIT", 2)
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
        with pytest.raises(FileNotFoundError, match=r"loglib\.archive makes one"):
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
    made = archive(topic, to, on_gap="skip")
    assert made.partitions[0].gaps == ((first.ends[0], start),) and made.rows == 20
    assert topic.arrow(archive=to).read_all().num_rows == 20


def test_a_log_that_is_behind_its_archive_is_refused(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic, segments=1)
    made = archive(topic, to)
    ahead = made.partitions[0]._replace(end=made.ends[0] + 1)
    with closing(DirectoryPlace(REAL, str(to), 0o600)) as place:
        assert place.commit(made._replace(version=2, partitions=(ahead,)))
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
    skipped = archive(topic, to, on_gap="skip")
    ((start, end),) = skipped.partitions[0].gaps
    assert 0 <= start < end <= second.base_offset and 10 <= skipped.rows < 20
    topic.close()
    repair(path)
    topic = open_topic()
    other = to.with_name("other")
    assert archive(topic, other).partitions[0].gaps == skipped.partitions[0].gaps
    assert offsets(read_archive(other).read_all()) == offsets(topic.arrow(on_gap="skip").read_all())


def test_segments_without_a_whole_batch_make_no_file(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    topic.append_many([b"x"] * 10)
    topic.partition(0).roll()
    (first, _) = topic.partition(0).segments
    topic.close()
    spoil(Path(first.path), 4096 + 80)
    made = archive(open_topic(), to, on_gap="skip")
    assert made.rows == 0 and made.partitions[0].gaps == ((0, first.end_offset),)
    assert made.ends == {0: first.end_offset}


# --- manifests --------------------------------------------------------------------------------------------------


def an_archive() -> Archived:
    file = ArchivedFile(f"0000/{0:020d}-{9:020d}-{'a' * 16}.parquet", 0, 9, 3, 100, 7, 8, -5, NOW, NOW)
    return Archived(3, bytes(range(16)), "clicks", NOW, (ArchivedPartition(0, 0, 20, ((9, 12),), (file,)),))


def test_a_manifest_that_differs_in_any_byte_is_damaged() -> None:
    content = encode(an_archive())
    assert decode(content, "m") == an_archive()
    for at in range(len(content)):
        with pytest.raises(CorruptLogError):
            decode(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], "m")
        with pytest.raises(CorruptLogError):
            decode(content[:at], "m")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1}, {"version": True}, {"version": 1 << 63}, {"log_id": "x"}, {"partitions": 5}, {"format": "1"},
        {"partitions": [{"partition": 1, "start": 0, "end": 0, "gaps": [], "files": []}]},
        {"partitions": [{"partition": 0, "start": 5, "end": 0, "gaps": [], "files": []}]},
        {"partitions": [{"partition": 0, "start": 0, "end": 9, "gaps": [[0, 10]], "files": []}]},
        {"partitions": [{"partition": 0, "start": 0, "end": 9, "gaps": [], "files": [{
            "name": "0000/../../x", "start": 0, "end": 9, "rows": 1, "bytes": 1, "crc": "0", "footer_crc": "0",
            "first_time": 0, "last_time": 0, "added": 0}]}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_manifest_is_damaged(changes: dict[str, Any]) -> None:
    facts = {"format": 1, "version": 1, "log_id": "00" * 16, "topic": "t", "time": 0, "partitions": []}
    decode(seal(facts), "m")
    with pytest.raises(CorruptLogError):
        decode(seal(facts | changes), "m")


def test_a_newer_manifest_says_so() -> None:
    with pytest.raises(UnsupportedFormatError):
        decode(seal({"format": 2}), "m")


def test_a_manifest_under_another_number_is_damaged(open_topic: Open, to: Path) -> None:
    archive(open_topic(), to)
    (to / "_loglib" / f"{1:020d}.json").rename(to / "_loglib" / f"{2:020d}.json")
    with pytest.raises(CorruptLogError, match="version 1"):
        archived(to)


def test_manifests_that_vanish_while_they_are_read_are_looked_for_again(to: Path) -> None:
    files = MemoryFiles()
    files.make_directories("/a")
    with closing(DirectoryPlace(files, "/a", 0o600)) as place:
        assert place.commit(Archived(1, bytes(16), "t", 0, ()))

    class Vanishing(RecordingFiles):
        left = 3

        def before(self, call: testing.Call) -> None:
            super().before(call)
            if call.path.endswith(".json") and call.name == "open_read" and self.left:
                self.left -= 1
                raise FileNotFoundError(errno.ENOENT, "gone", call.path)

    vanishing = Vanishing(files)
    found = newest(vanishing, "/a")
    assert found is not None and found.version == 1 and vanishing.left == 0
    vanishing.left = 1000
    with pytest.raises(CorruptLogError, match="vanish"):
        newest(vanishing, "/a")


def test_old_manifests_go_and_their_numbers_are_not_taken_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered, "VERSIONS_KEPT", 3)
    files = MemoryFiles()
    files.make_directories("/a")
    versions = [Archived(number, bytes(16), "t", 0, ()) for number in range(8)]
    one, two = DirectoryPlace(files, "/a", 0o600), DirectoryPlace(files, "/a", 0o600)
    with closing(one) as place, closing(two) as other:
        for each in versions[1:7]:
            assert place.commit(each)
            assert not other.commit(each), "of several processes one commits a version"
        assert len(files.listdir("/a/_loglib")) == 3
        for each in versions[1:4]:
            assert not other.commit(each), "the number is free again, but behind"
        assert other.newest() == versions[6]
        assert place.commit(versions[7])
        assert len(files.listdir("/a/_loglib")) == 3


# --- other processes, and what they leave -------------------------------------------------------------------------


def test_a_committed_file_is_synced_and_so_is_its_name(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    topic.close()
    files = RecordingFiles()
    with testing.open_topic(path, files=files, mode="r") as topic:
        files.calls.clear()
        archive(topic, to)
    changes = files.named("pwritev", "datasync", "drop_cached", "link", "unlink", "fsync")
    names = [call for call, name in changes if name.endswith((".tmp", ".parquet", "0000")) and call != "pwritev"]
    assert names[:5] == ["datasync", "drop_cached", "link", "unlink", "fsync"]
    last = [call for call, _ in changes[-5:]]
    assert last == ["datasync", "link", "unlink", "fsync", "fsync"], "the manifest, then its name; and a last look"


def test_what_dead_processes_left_is_swept_and_nothing_else(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    archive(topic, to)
    kept = set(parquet_files(to))
    orphan = f"{0:020d}-{100:020d}-{'b' * 16}.parquet"
    ours = [to / "0000" / orphan, to / "0000" / f".{orphan}.tmp", to / "_loglib" / ".7-aa.tmp"]
    others = [to / "0000" / "notes.txt", to / "readme", to / "9999"]
    for each in (*ours, *others):
        each.write_bytes(b"x")
    archive(topic, to)
    assert not any(each.exists() for each in ours)
    assert all(each.exists() for each in others) and set(parquet_files(to)) > kept


def test_files_of_a_live_process_are_not_swept(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    with closing(DirectoryPlace(REAL, str(to), 0o600)) as place:
        unfinished = place.partition(0).path_of(f"{0:020d}-{100:020d}-{'b' * 16}.parquet")
        Path(unfinished).write_bytes(b"x")
        archive(topic, to)
        assert os.path.exists(unfinished)
    archive(topic, to)
    assert not os.path.exists(unfinished)


def test_whoever_sweeps_is_waited_for(to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.system.directory._LOCK_TIMEOUT_S", 0.01)
    to.mkdir()
    fd = REAL.open_directory(str(to))
    try:
        assert REAL.try_lock(fd)
        with pytest.raises(LockedError, match="sweeps"):
            DirectoryPlace(REAL, str(to), 0o600)
    finally:
        REAL.close(fd)


RACER = """
import sys
from loglib import archive
for _ in range(int(sys.argv[3])):
    archive(sys.argv[1], sys.argv[2], file_bytes=1)
"""


def test_archivers_that_race_double_and_lose_nothing(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic(partitions=2)
    for number in range(8):
        sealed(topic, segments=1, partition=number % 2)
    racers = [start_python(RACER, path, to, 10) for _ in range(2)]
    for number in range(10):
        sealed(topic, segments=1, partition=number % 2)
    for each in racers:
        assert each.communicate(timeout=60)[1] == "" and each.returncode == 0
    made = archive(topic, to)
    assert made.rows == 180
    assert in_order(read_archive(to).read_all()).equals(in_order(topic.arrow().read_all()))
    named = {to / file.name for each in made.partitions for file in each.files}
    assert set(parquet_files(to)) == named


def test_a_file_that_another_process_archived_first_is_thrown_away(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)

    class Overtaken(RecordingFiles):
        """Another process archives all before the first manifest is linked."""

        done = False

        def before(self, call: testing.Call) -> None:
            super().before(call)
            if call.name == "link" and os.path.basename(call.arguments[0]).startswith(".1-") and not self.done:
                self.done = True
                archive(topic, to)

    with testing.open_topic(path, files=Overtaken(), mode="r") as reader:
        made = archive(reader, to)
    assert made.version == 1 and made.rows == 30 and len(parquet_files(to)) == 1


def test_what_another_process_archived_and_retention_dropped_meanwhile_is_no_error(
    open_topic: Open, path: Path, to: Path
) -> None:
    topic = open_topic()
    sealed(topic)

    class Overtaken(RecordingFiles):
        """While the first file is written, another process archives all, and retention drops it."""

        done = False

        def before(self, call: testing.Call) -> None:
            super().before(call)
            if call.name == "create" and call.path.endswith(".parquet.tmp") and not self.done:
                self.done = True
                archive(topic, to)
                topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)

    with testing.open_topic(path, files=Overtaken(), mode="r") as reader:
        made = archive(reader, to, file_bytes=1)
    assert made.version == 1 and made.rows == 30 and len(parquet_files(to)) == 1


@pytest.mark.parametrize("given", ["a topic", "another topic", "nothing"])
def test_an_archive_is_a_directory_of_its_own(open_topic: Open, path: Path, tmp_path: Path, given: str) -> None:
    Topic.open(tmp_path / "other").close()
    topic = open_topic()
    sealed(topic)
    places: dict[str, str | Path] = {"a topic": path, "another topic": tmp_path / "other", "nothing": ""}
    with pytest.raises(ValueError, match="is a topic; an archive" if given != "nothing" else "is empty"):
        archive(topic, places[given])
    assert not list(tmp_path.rglob("_loglib"))


# --- failing disks ------------------------------------------------------------------------------------------------


def failing(path: Path, to: Path, files: Files) -> None:
    with testing.open_topic(path, files=files, mode="r") as reader:
        if isinstance(files, FaultyFiles):
            files.armed = True
        try:
            archive(reader, to)
        finally:
            if isinstance(files, FaultyFiles):
                files.armed = False


CALLS = (
    "open_read", "open_directory", "create", "pwritev", "datasync", "fsync", "link", "unlink", "mkdir", "chmod",
    "fchmod", "pread", "fstat", "flock",
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_loses_nothing_and_the_next_run_goes_on(
    open_topic: Open, path: Path, to: Path, call: str
) -> None:
    topic = open_topic()
    sealed(topic, segments=2)
    counting = FaultyFiles(call, at=1 << 60, armed=False)
    failing(path, to.with_name("counting"), counting)
    assert counting.seen
    for at in range(1, counting.seen + 1):
        faulty = FaultyFiles(call, at=at, armed=False)
        with suppress(OSError, LogError):
            failing(path, to, faulty)
            assert call in ("open_read", "pread"), "only what reads the log may try again"
        assert faulty.failed == 1
        found = newest(REAL, str(to))
        assert found is None or found.rows == 20
        archive(topic, to)
        assert offsets(read_archive(to).read_all()) == offsets(topic.arrow().read_all())
        os.rename(to, to.with_name(f"{call}{at}"))


def test_a_full_disk_is_an_error_and_leaves_nothing_half(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    for room in (0, 100, 2000):
        with pytest.raises(OSError) as caught:
            failing(path, to, FullDisk(room))
        assert caught.value.errno == errno.ENOSPC
        assert parquet_files(to) == [] and newest(REAL, str(to)) is None
    archive(topic, to)
    assert read_archive(to).read_all().num_rows == 30


def test_short_writes_are_continued(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    failing(path, to, ShortWrites(1000))
    assert offsets(read_archive(to).read_all()) == offsets(topic.arrow().read_all())


class Lying(RecordingFiles):
    """A disk that returns other bytes than were written to the unfinished file."""

    def pread(self, fd: int, size: int, position: int) -> bytes:
        data = self.inner.pread(fd, size, position)
        at = 200 - position
        if self._paths.get(fd, "").endswith(".tmp") and 0 <= at < len(data):
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data


def test_a_file_is_read_back_before_it_counts(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    with pytest.raises(CorruptLogError, match="differ from those that were written"):
        failing(path, to, Lying())
    assert parquet_files(to) == [] and newest(REAL, str(to)) is None


def test_a_file_that_differs_from_the_log_does_not_count(
    open_topic: Open, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loglib.archiving import parquet

    topic = open_topic()
    sealed(topic)
    write = parquet.write

    def later(files: Files, fd: int, name: str, records: Any, **rest: Any) -> Any:
        return write(files, fd, name, (each.slice(first, each.num_rows - first - less) for each in records), **rest)

    monkeypatch.setattr(parquet, "write", later)
    for first, less in ((1, 0), (9, 0), (0, 1)):  # noqa: B007  `later` uses them
        with pytest.raises(CorruptLogError, match="differ from the log's"):
            archive(topic, to)
    assert parquet_files(to) == [] and newest(REAL, str(to)) is None


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
from loglib import archive
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert archive(sys.argv[1], sys.argv[2], row_group_bytes=4 << 20).rows == 120_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
