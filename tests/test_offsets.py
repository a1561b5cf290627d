"""Offsets: what was committed is there, after compaction and crashes as well; damage is never "no commit yet"."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Clock, crash_copy, needs_proc, open_files, settled_files
from loglib import (
    Commit,
    CorruptLogError,
    LockedError,
    LogMovedError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    StorageFullError,
    StorageIOError,
    TopicPartition,
    testing,
)
from loglib.append.writer import Writer
from loglib.config import FlushPolicy, TopicConfig
from loglib.cursor import Cursor
from loglib.format.columns import Columns
from loglib.format.watermark import WatermarkWriter
from loglib.groups import offsets
from loglib.groups.offsets import Entry, Offsets, history_at, make_offsets, offsets_identity
from loglib.index import SegmentIndex
from loglib.system.files import REAL, Files
from loglib.testing import Call, WatchedFiles

A, B = TopicPartition("clicks", 0), TopicPartition("a-b", 12)
LOG_ID = bytes(16)
OF_TOPIC = bytes(range(16))
Opener = Callable[..., Offsets]


def anyone() -> None:
    """A fence that lets everybody commit."""


@pytest.fixture
def directory(tmp_path: Path, clock: Clock) -> Path:
    path = tmp_path / "offsets"
    path.mkdir()
    make_offsets(REAL, str(path), LOG_ID, "etl", now=clock(), permissions=0o600)
    return path


@pytest.fixture
def open_log(directory: Path, clock: Clock) -> Iterator[Opener]:
    opened: list[Offsets] = []

    def open_it(at: Path = directory, *, files: Files = REAL, durability: Any = "disk") -> Offsets:
        opened.append(
            Offsets(files, str(at), LOG_ID, "etl", durability=durability, permissions=0o600, clock=clock)
        )
        return opened[-1]

    yield open_it
    for log in opened:
        log.close()


def entry(offset: int | None, generation: int = 1, *, meta: str = "", member: str = "one", timestamp: int = 5) -> Entry:
    return Entry(offset, generation, OF_TOPIC, 77, meta, member, timestamp)


def put(log: Offsets, offset: int, *, of: TopicPartition = A, generation: int = 1, meta: str = "") -> None:
    log.commit({of: entry(offset, generation, meta=meta)}, fence=anyone)


def offset_of(log: Offsets, partition: TopicPartition = A) -> int | None:
    commit = log.commits().get(partition)
    return None if commit is None else commit.offset


def logs(directory: Path) -> list[Path]:
    return sorted(each for each in directory.iterdir() if not each.name.startswith("."))


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9a-f]*/*.log"))


def test_nothing_is_committed_at_first(open_log: Opener) -> None:
    assert open_log().commits() == {}


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_commit_is_there_for_all(open_log: Opener, durability: str) -> None:
    one, two = open_log(durability=durability), open_log(durability=durability)
    assert two.commits() == {}
    one.commit({A: entry(7, 3, meta="mine"), B: entry(8, 0)}, fence=anyone)
    expected = {A: Commit(7, "mine", 3, "one", 5), B: Commit(8, "", 0, "one", 5)}
    assert one.commits() == two.commits() == open_log(durability=durability).commits() == expected
    assert two.entries()[A] == entry(7, 3, meta="mine")._replace(number=1)


def test_members_commit_in_turns(open_log: Opener, directory: Path) -> None:
    one, two = open_log(), open_log()
    for offset in range(0, 20, 2):
        put(one, offset)
        put(two, offset + 1, of=B)
        assert (offset_of(one), offset_of(two, B)) == (offset, offset + 1)
    assert len(logs(directory)) == 2


def test_member_that_is_stopped_in_a_commit_stops_nobody(open_log: Opener) -> None:
    """Whoever is stopped holds its own log, and nothing else."""

    class Stopping(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "datasync" and call.file.endswith(".log") and stopping:
                stopping.clear()
                put(healthy, 8, of=B)
                assert offset_of(healthy, B) == 8 and offset_of(healthy) in (5, 6)

    stopping: list[bool] = []
    stopped, healthy = open_log(files=Stopping()), open_log()
    put(stopped, 5)
    stopping.append(True)
    put(stopped, 6)
    assert not stopping and offset_of(healthy) == 6


def test_later_commit_counts_and_may_go_back(open_log: Opener) -> None:
    log = open_log()
    put(log, 9)
    put(log, 5)
    assert offset_of(log) == 5


def test_commit_of_a_lower_generation_changes_nothing(open_log: Opener) -> None:
    log, late = open_log(), open_log()
    put(log, 5, generation=2)
    put(late, 9, generation=1)
    assert offset_of(log) == offset_of(late) == offset_of(open_log()) == 5


def test_claim_without_a_commit_is_none_and_keeps_late_ones_out(open_log: Opener) -> None:
    log, late = open_log(), open_log()
    log.commit({A: entry(None, 4)}, fence=anyone)
    put(late, 9, generation=3)
    assert late.commits() == {} and late.entries()[A].generation == 4


def test_member_that_may_not_commit_writes_nothing(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    size = segments(directory)[0].stat().st_size

    def fence() -> None:
        raise RuntimeError("evicted")

    for each in (log, open_log()):
        with pytest.raises(RuntimeError, match="evicted"):
            each.commit({A: entry(9)}, fence=fence)
    assert [each.stat().st_size for each in segments(directory)] == [size]


def test_commit_after_which_the_partition_is_lost_is_not_said_to_have_worked(open_log: Opener) -> None:
    log, asked = open_log(), []

    def fence() -> None:
        asked.append(1)
        if len(asked) == 2:  # evicted while it wrote
            raise RuntimeError("evicted")

    with pytest.raises(RuntimeError, match="evicted"):
        log.commit({A: entry(9)}, fence=fence)


def test_commit_can_be_read_as_the_format_says(open_log: Opener) -> None:
    log = open_log()
    log.commit({A: entry(7, 3, meta="ü"), B: entry(None, 8)}, fence=anyone)
    assert log._own is not None
    mark = log._own._log.mark()
    (batch,) = Cursor.at(log._own._log, mark.log_start_offset).read(mark.flushed_end)
    assert batch.keys == [b"one"] and batch.timestamps == [5]
    assert json.loads(batch.values[0] or b"") == {
        "clicks": {"log_id": OF_TOPIC.hex(), "partitions": {"0": [7, 3, 1, 77, "ü"]}},
        "a-b": {"log_id": OF_TOPIC.hex(), "partitions": {"12": [None, 8, 1, 77, ""]}},
    }


def test_huge_commit_is_refused(open_log: Opener) -> None:
    log = open_log()
    with pytest.raises(RecordTooLargeError, match="the commit is 9"):
        put(log, 5, meta="x" * (9 << 20))
    assert log.commits() == {}


# --- one log for each member ----------------------------------------------------------------------------


def test_log_that_nobody_holds_is_taken_by_the_next(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.close()
    other = open_log()
    put(other, 8, of=B)
    assert len(logs(directory)) == 1
    assert (offset_of(other), offset_of(other, B)) == (5, 8)
    assert not other.fold()


def test_what_others_have_left_is_folded_into_the_own_log(open_log: Opener, directory: Path) -> None:
    dead, superseded, living = open_log(), open_log(), open_log()
    put(living, 1, of=TopicPartition("other", 0))
    put(dead, 5, meta="kept", generation=3)
    put(superseded, 4)
    before = dead.entries()
    for each in (dead, superseded):
        each.close()
    assert len(logs(directory)) == 3
    assert not open_log().fold()  # who has no log of its own writes nothing
    assert living.fold() and living.fold() and not living.fold()
    assert len(logs(directory)) == 1
    assert living.entries() == open_log().entries() == before


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_log_is_removed_only_when_what_it_has_is_durable_elsewhere(open_log: Opener, durability: str) -> None:
    class Watching(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name in ("datasync", "pwritev", "rename") and call.file != "watermark":
                seen.append(call.name)

    seen: list[str] = []
    living, dead = open_log(files=Watching(), durability=durability), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    dead.close()
    seen.clear()
    assert living.fold()
    assert seen[:1] == ["pwritev"] and "datasync" in seen[: seen.index("rename")]


def test_fold_that_was_cut_is_ended_by_the_next(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, dead, other = open_log(), open_log(), open_log()
    for number, each in enumerate((living, dead, other)):
        put(each, number, of=TopicPartition("clicks", number))
    before = living.entries()
    dead.close()
    with monkeypatch.context() as patched:
        patched.setattr(Files, "remove_tree", lambda *_: None)
        assert living.fold()
    assert len(list(directory.iterdir())) == 3
    other.close()
    assert living.fold()
    assert len(list(directory.iterdir())) == 1
    assert living.entries() == before


def test_offsets_log_that_may_not_be_removed_blocks_nobody(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, dead = open_log(), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    dead.close()

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Offsets, "_remove", refuse)
    assert living.fold() and not living.fold()
    assert offset_of(living) == 5 and len(logs(directory)) == 2


@pytest.mark.parametrize("moment", ["_read", "_remove"])
def test_log_of_a_topic_that_comes_to_the_place_of_this_one_is_not_folded(
    open_log: Opener, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As with `mv topic topic.bak` and a copy at the old path, where nobody holds what a member of this one holds."""
    living, dead = open_log(), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    dead.close()
    shutil.copytree(directory, tmp_path / "copy")
    method = getattr(Offsets, moment)
    swapped: list[Any] = []

    def swapping(self: Offsets, *arguments: Any) -> Any:
        if not swapped:
            swapped.append(directory.rename(tmp_path / "moved"))
            (tmp_path / "copy").rename(directory)
        return method(self, *arguments)

    monkeypatch.setattr(Offsets, moment, swapping)
    assert living.fold() and swapped
    assert len(logs(directory)) == len(logs(tmp_path / "moved")) == 2
    assert offset_of(open_log()) == 5
    with pytest.raises(LogMovedError):
        living.close()


def test_reader_that_comes_upon_a_log_just_folded_looks_again(open_log: Opener, directory: Path) -> None:
    class Racing(WatchedFiles):
        def after(self, call: Call, result: Any) -> Any:
            if call.name == "listdir" and call.file == "offsets" and racing:
                racing.clear()
                assert living.fold()
            return result

    racing: list[bool] = []
    reading, living, dead = open_log(files=Racing()), open_log(), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    reading.commits()
    dead.close()
    racing.append(True)
    assert (offset_of(reading), offset_of(reading, B)) == (5, 1)
    late = open_log(files=Racing())
    dead = open_log()
    put(dead, 6, generation=2)
    dead.close()
    racing.append(True)
    put(late, 9, of=B, generation=9)  # which took its own log, as the one that it came for is gone
    assert (offset_of(late), offset_of(late, B), len(logs(directory))) == (6, 9, 2)


def test_log_that_is_removed_while_its_lock_is_tried_is_not_folded(open_log: Opener, directory: Path) -> None:
    class Racing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name in at and call.path in paths:
                paths.remove(call.path)
                assert other.fold()

    paths: list[str] = []
    at: list[str] = []
    living, other = open_log(files=Racing()), open_log()
    put(living, 1, of=B)
    put(other, 2, of=TopicPartition("clicks", 1))
    for name in ("open_directory", "flock"):
        before = logs(directory)
        dead = open_log()
        put(dead, 5)
        dead.close()
        paths[:] = [str(each) for each in logs(directory) if each not in before]
        at[:] = [name]
        assert not living.fold()
        assert not paths and offset_of(living) == 5


def test_members_that_are_always_quicker_are_an_error_in_the_end(
    open_log: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offsets, "_try_open", lambda *_: None)
    monkeypatch.setattr(offsets, "_OPEN_TRIES", 2)
    with pytest.raises(LockedError, match="all logs of offsets"):
        put(open_log(), 5)


# --- compaction -----------------------------------------------------------------------------------------


def test_compaction_keeps_every_commit(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets, "_COMPACT_BYTES", 2000)
    log, other = open_log(), open_log()
    put(log, 3, of=B, generation=4, meta="old")
    before = log.entries()[B]
    compacted = 0
    for offset in range(100):
        put(log, offset, meta="m")
        assert other.commits() == {A: Commit(offset, "m", 1, "one", 5), B: before.commit()}
        assert other.entries()[B] == before
        compacted += segments(directory)[0].stat().st_size < 5000
        assert len(segments(directory)) == 1
    assert compacted > 1
    assert segments(directory)[0].stat().st_size < 4096 + 3000
    assert open_log().commits() == other.commits() == log.commits()


def test_large_state_is_not_compacted_at_every_commit(
    open_log: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets, "_COMPACT_BYTES", 2000)
    compactions = []
    begin_anew = offsets._MemberLog.begin_anew

    def counted(log: Any, columns: Columns) -> int:
        compactions.append(log.size_bytes())
        return begin_anew(log, columns)

    monkeypatch.setattr(offsets._MemberLog, "begin_anew", counted)
    log = open_log()
    put(log, 1, of=B, meta="x" * 20_000)
    for offset in range(100):
        put(log, offset)
    assert 1 <= len(compactions) <= 2
    assert compactions[1:] == [] or compactions[1] > 40_000


def test_compaction_drops_what_others_have_superseded(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = open_log(), open_log()
    put(log, 1, meta="x" * 5000)
    put(other, 2, generation=2)
    monkeypatch.setattr(offsets, "_COMPACT_BYTES", 0)
    log.commit({A: entry(3)}, fence=anyone)  # late: it has nothing left that counts
    assert max(each.stat().st_size for each in segments(directory)) < 5000
    assert offset_of(log) == offset_of(other) == 2


def test_member_that_reads_while_another_compacts_finds_all(open_log: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "_COMPACT_BYTES", 0)
    writing, reading = open_log(), open_log()
    put(writing, 1)
    reading.commits()
    (known,) = reading._known.values()
    read_on = known._read_on

    def compacted_meanwhile(*asked: Any) -> Any:
        monkeypatch.setattr(known, "_read_on", read_on)
        put(writing, 3)
        return read_on(*asked)

    put(writing, 2)
    known._position = 0
    monkeypatch.setattr(known, "_read_on", compacted_meanwhile)
    assert offset_of(reading) == 3


def test_disk_without_room_for_compaction_does_not_fail_the_commit(
    open_log: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log()
    put(log, 4)

    def refuse(writer: Writer) -> None:
        raise full(writer.directory)

    monkeypatch.setattr(offsets, "_COMPACT_BYTES", 0)
    monkeypatch.setattr(Writer, "roll", refuse)
    with caplog.at_level(logging.WARNING, "loglib"):
        put(log, 5)
    assert "was not compacted" in caplog.text
    assert offset_of(log) == offset_of(open_log()) == 5


# --- what a crash has left --------------------------------------------------------------------------------


def tear(directory: Path) -> None:
    """As after a kill in the middle of a commit: bytes above the watermark."""
    with segments(directory)[0].open("ab") as file:
        file.write(b"half of a batch")


def test_torn_commit_is_none_and_is_mended_by_the_next_member(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.abandon()
    tear(directory)
    assert offset_of(open_log()) == offset_of(log) == 5
    other = open_log()
    assert offset_of(other) == 5
    put(other, 6)
    assert offset_of(open_log()) == offset_of(log) == 6


def test_commit_that_was_synced_is_found_although_the_watermark_was_not(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 4)
    (watermark,) = directory.glob("*/watermark")
    before = watermark.read_bytes()
    put(log, 5)
    put(log, 7, of=B)
    watermark.write_bytes(before)  # as after a power cut
    found = open_log()
    assert (offset_of(found), offset_of(found, B)) == (5, 7)
    log.abandon()
    put(found, 8, of=TopicPartition("clicks", 1))
    assert (offset_of(found), offset_of(open_log(), B)) == (5, 7)


def test_commit_of_a_history_that_a_crash_has_cut_off_does_not_count(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 4)
    (segment,), (watermark,) = directory.glob("*/*.log"), directory.glob("*/watermark")
    one, mark, end = segment.read_bytes(), watermark.read_bytes(), segment.stat().st_size
    put(log, 5)
    put(log, 6)
    later = segment.read_bytes()
    log.abandon()
    segment.write_bytes(one)
    watermark.write_bytes(mark)
    other = open_log()
    put(other, 9)  # of another epoch, and so with another CRC
    other.abandon()
    mark = watermark.read_bytes()
    size = segment.stat().st_size
    segment.write_bytes(segment.read_bytes() + later[size:])  # what the disk had there uncovered
    assert size > end and offset_of(open_log()) == 9
    watermark.write_bytes(mark)
    assert offset_of(open_log()) == 9


def test_damage_above_the_watermark_that_was_durable_is_an_error(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 4)
    (segment,), (watermark,) = directory.glob("*/*.log"), directory.glob("*/watermark")
    before, start = watermark.read_bytes(), segment.stat().st_size
    for offset in (5, 6, 7):
        put(log, offset)
    log.abandon()
    watermark.write_bytes(before)  # as after a power cut
    raw = bytearray(segment.read_bytes())
    raw[start + 150] ^= 1
    segment.write_bytes(raw)
    with pytest.raises(CorruptLogError):
        open_log().commits()
    last = bytearray(raw)
    raw = raw[: start + (len(raw) - start) // 3]
    segment.write_bytes(raw)  # the last alone, which nothing proves to have been synced
    assert offset_of(open_log()) == 4
    assert len(last) > len(raw)


@pytest.mark.filterwarnings("ignore:.*watermark is lost")
def test_lost_watermark_is_not_taken_for_no_commit(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.close()
    (watermark,) = directory.glob("*/watermark")
    watermark.unlink()
    assert offset_of(open_log()) == 5
    watermark.write_bytes(bytes(512))
    log = open_log()
    put(log, 6)
    assert offset_of(log) == 6


def test_power_cut_that_leaves_less_than_was_flushed_is_no_damage(open_log: Opener, directory: Path) -> None:
    """As durability "os" allows: the watermark was written by the system, and the last commit was not."""
    log = open_log(durability="os")
    for offset in (4, 5, 6):
        put(log, offset)
    (segment,) = directory.glob("*/*.log")
    log.abandon()
    raw = bytearray(segment.read_bytes())
    third = (len(raw) - 4096) // 3
    segment.write_bytes(raw[: 4096 + 2 * third] + bytes(third))
    assert offset_of(open_log(durability="os")) == 5
    segment.write_bytes(raw[: 4096 + third // 2])
    assert open_log(durability="os").commits() == {}
    other = open_log(durability="os")
    put(other, 7, generation=2)
    assert offset_of(other) == 7


def test_full_disk_leaves_a_log_unfolded(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    living, dead = open_log(), open_log()
    put(living, 1, of=B)
    put(dead, 5)
    dead.close()

    def refuse(log: Any, *_: Any) -> None:
        raise full(log.directory)

    with monkeypatch.context() as patched:
        patched.setattr(offsets._MemberLog, "append", refuse)
        assert living.fold() and not living.fold()
    assert "not folded into another log" in caplog.text
    assert offset_of(living) == 5 and len(logs(directory)) == 2


def full(path: str) -> StorageFullError:
    return StorageFullError(path, OSError(28, "No space left on device"))


def test_compaction_that_was_cut_loses_nothing(
    open_log: Opener, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    put(log, 5)
    put(log, 6, of=B)
    drop = Writer.drop_before

    def cut(writer: Writer, offset: int) -> Any:
        crash_copy(directory, tmp_path / "crashed")
        return drop(writer, offset)

    monkeypatch.setattr(Writer, "drop_before", cut)
    monkeypatch.setattr(offsets, "_COMPACT_BYTES", 0)
    put(log, 7)
    crashed = tmp_path / "crashed"
    assert len(segments(crashed)) == 2
    looked_at, committed_to = crash_copy(crashed, tmp_path / "a"), crash_copy(crashed, tmp_path / "b")
    assert (offset_of(open_log(looked_at)), offset_of(open_log(looked_at), B)) == (7, 6)
    put(open_log(committed_to), 8, generation=2)
    assert (offset_of(open_log(committed_to)), offset_of(open_log(committed_to), B)) == (8, 6)
    assert len(segments(committed_to)) == 1


# --- damage ------------------------------------------------------------------------------------------------


def test_damaged_commit_is_an_error(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    put(log, 6)
    path = segments(directory)[0]
    raw = bytearray(path.read_bytes())
    raw[4096 + 60] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptLogError):
        open_log().commits()


def test_missing_files_are_an_error(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.close()
    segments(directory)[0].unlink()
    with pytest.raises(CorruptLogError):
        open_log().commits()
    with pytest.raises(CorruptLogError):
        put(open_log(), 6)


def test_missing_logs_are_an_error_and_never_no_commit(open_log: Opener, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptLogError, match="no directory"):
        open_log(tmp_path / "missing")
    log = open_log()
    (only,) = logs(directory)
    only.rename(tmp_path / "aside")
    with pytest.raises(CorruptLogError, match="no log of committed offsets"):
        log.commits()


def test_log_cut_below_its_watermark_is_an_error(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.close()
    path = segments(directory)[0]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptLogError):
        put(open_log(), 6)
    with pytest.raises(CorruptLogError):
        open_log().commits()


def test_log_of_another_group_or_name_is_an_error(open_log: Opener, directory: Path, clock: Clock) -> None:
    other = Offsets(REAL, str(directory), LOG_ID, "other", durability="disk", permissions=0o600, clock=clock)
    with pytest.raises(CorruptLogError):
        other.commits()
    (only,) = logs(directory)
    only.rename(directory / "moved")
    with pytest.raises(CorruptLogError):
        open_log().commits()


OF_CLICKS = b'{"clicks": {"log_id": "00", "partitions": {"0": %b}}}'
FORGED = {
    "no JSON": b"{", "no object": b"[]", "no partition": b'{"clicks": [1, 1, ""]}', "too few": OF_CLICKS % b"[1]",
    "no number": OF_CLICKS % b'["x", 1, 1, 0, ""]', "endless": OF_CLICKS % b'[1e999, 1, 1, 0, ""]', "nothing": b"",
    "no list": OF_CLICKS % b"5", "no text": b"\xff", "deep": b"[" * 100_000, "no log id": b'{"clicks": {}}',
}  # fmt: skip


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
@pytest.mark.usefixtures("no_garbage")
def test_record_that_is_no_commit_is_an_error(open_log: Opener, directory: Path, clock: Clock, value: bytes) -> None:
    (only,) = logs(directory)
    identity = offsets_identity(LOG_ID, "etl", only.name)
    writer = Writer(REAL, str(only), identity, TopicConfig(), index=SegmentIndex([]), clock=clock)
    writer.append(Columns([value], [b"one"]), len(value))
    writer.close()
    with pytest.raises(CorruptLogError, match="a record at offset 0 that is not a commit"):
        open_log().commits()


# --- failures and files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwritev", "datasync"])
def test_commit_that_fails_is_an_error_and_the_next_one_is_whole(open_log: Opener, call: str) -> None:
    class Failing(WatchedFiles):
        failing = False

        def before(self, each: Call) -> None:
            if self.failing and each.name == call:
                self.failing = False
                raise OSError(5, "Input/output error")

    files = Failing()
    log = open_log(files=files)
    put(log, 4)
    files.failing = True
    with pytest.raises(StorageIOError, match="committing offsets"):
        put(log, 5)
    assert offset_of(open_log()) in (4, 5)
    put(log, 6)
    assert offset_of(log) == offset_of(open_log()) == 6


def test_later_of_two_logs_of_one_member_counts(open_log: Opener, directory: Path) -> None:
    """A member whose log failed goes on in another, which may come before the first in order."""
    for _ in range(20):
        log = open_log()
        put(log, 4)
        own = log._own
        assert own is not None
        log._own = None  # and its lock is held still
        put(log, 5)
        assert offset_of(log) == offset_of(open_log()) == 5
        own.close()
        log.close()
        for each in logs(directory)[1:]:
            (each / "watermark").rename(directory / ".aside")
            for left in each.iterdir():
                left.unlink()
            each.rmdir()


@needs_proc
def test_closed_log_leaves_no_file_open(open_log: Opener) -> None:
    before = settled_files()
    log = open_log()
    put(log, 5)
    log.commits()
    log.close()
    log.close()
    del log
    other = open_log()
    put(other, 6)
    other.abandon()
    other.abandon()
    assert open_files() == before


def test_commit_that_is_interrupted_is_made_good_by_the_next_one(
    open_log: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    put(log, 4)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WatermarkWriter, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(log, 5)
    put(log, 6)
    assert offset_of(log) == offset_of(open_log()) == 6


def test_writer_whose_close_is_interrupted_is_closed(open_log: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    close = Writer.close
    calls: list[Writer] = []

    def interrupted_once(writer: Writer) -> None:
        calls.append(writer)
        if len(calls) == 1:
            raise KeyboardInterrupt
        close(writer)

    log = open_log()
    put(log, 4)
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "close", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            log.close()
    other = open_log()
    put(other, 5)
    assert offset_of(other) == 5 and len(calls) == 2


# --- history ------------------------------------------------------------------------------------------------


def test_history_is_the_batch_before_wherever_one_asks(path: Path, clock: Clock) -> None:
    with testing.open_topic(path, flush=FlushPolicy(None, None, None), clock=clock) as topic:
        partition = topic.partition(0)
        log = partition._access.log
        assert history_at(log, 0) == 0
        crcs = [0]
        for number in range(6):
            topic.append_many([b"%d" % number] * 3)
            topic.flush()
            if number % 2:
                partition.roll()
        for batch in topic.batches():
            header = batch._header
            assert history_at(log, header.base_offset) == header.previous_crc == crcs[-1]
            assert history_at(log, header.base_offset + 2) == header.header_crc
            assert history_at(log, header.next_offset) == header.header_crc
            crcs.append(header.header_crc)
        end = partition.log_end_offset
        partition._access.writer().drop_before(end)
        assert partition.log_start_offset == end and history_at(log, end) == crcs[-1]
        for offset in (0, end + 8):
            with pytest.raises(OffsetOutOfRangeError):
                history_at(log, offset)
        only = next((path / "0000").glob("*.log"))
        only.rename(path / "aside")
        with pytest.raises(CorruptLogError, match="the segment that begins at offset"):
            history_at(log, end)
        (path / "aside").rename(only)


def test_history_is_asked_again_when_retention_is_quicker(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with testing.open_topic(path, flush=FlushPolicy(None, None, None), clock=clock) as topic:
        topic.append(b"x")
        topic.flush()
        partition = topic.partition(0)
        partition.roll()
        log, end = partition._access.log, partition.log_end_offset
        expected = history_at(log, end)
        open_segment = log.open_segment

        def dropped_meanwhile(offset: int, **how: Any) -> Any:
            monkeypatch.setattr(log, "open_segment", open_segment)
            partition._access.writer().drop_before(end)
            return open_segment(offset, **how)

        monkeypatch.setattr(log, "open_segment", dropped_meanwhile)
        assert history_at(log, end) == expected != 0
