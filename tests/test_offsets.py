"""Offsets: what was committed is there, after compaction and crashes as well; damage is never "no commit yet"."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Clock, crash_copy, needs_proc, open_files
from loglib import (
    Commit,
    CorruptLogError,
    LockedError,
    RecordTooLargeError,
    StorageFullError,
    StorageIOError,
    TopicPartition,
)
from loglib.batch import Columns
from loglib.config import TopicConfig
from loglib.description import make_partition
from loglib.files import REAL, Files
from loglib.groups import offsets
from loglib.groups.offsets import OffsetLog, offsets_identity
from loglib.index import SegmentIndex
from loglib.testing import Call, WatchedFiles
from loglib.writer import Writer

A, B = TopicPartition("clicks", 0), TopicPartition("a-b", 12)
IDENTITY = offsets_identity(bytes(16), "etl")
Opener = Callable[..., OffsetLog]


def anyone() -> None:
    """A fence that lets everybody commit."""


@pytest.fixture
def directory(tmp_path: Path, clock: Clock) -> Path:
    path = tmp_path / "offsets"
    path.mkdir()
    make_partition(REAL, str(path), IDENTITY, now=clock(), permissions=0o600)
    return path


@pytest.fixture
def open_log(directory: Path, clock: Clock) -> Iterator[Opener]:
    opened: list[OffsetLog] = []

    def open_it(at: Path = directory, *, files: Files = REAL, durability: Any = "disk") -> OffsetLog:
        opened.append(OffsetLog(files, str(at), IDENTITY, durability=durability, permissions=0o600, clock=clock))
        return opened[-1]

    yield open_it
    for log in opened:
        log.close()


def put(log: OffsetLog, offset: int, *, of: TopicPartition = A, generation: int = 1, meta: str = "") -> None:
    log.commit({of: Commit(offset, meta, generation)}, member="one", fence=anyone)


def offset_of(log: OffsetLog, partition: TopicPartition = A) -> int | None:
    commit = log.commits().get(partition)
    return None if commit is None else commit.offset


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


def test_nothing_is_committed_at_first(open_log: Opener) -> None:
    assert open_log().commits() == {}


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_commit_is_there_for_all(open_log: Opener, clock: Clock, durability: str) -> None:
    one, two = open_log(durability=durability), open_log(durability=durability)
    assert two.commits() == {}
    one.commit({A: Commit(7, "mine", 3), B: Commit(8)}, member="one", fence=anyone)
    expected = {A: Commit(7, "mine", 3, "one", clock.now), B: Commit(8, "", 0, "one", clock.now)}
    assert one.commits() == two.commits() == open_log(durability=durability).commits() == expected


def test_members_commit_in_turns(open_log: Opener) -> None:
    one, two = open_log(), open_log()
    for offset in range(0, 20, 2):
        put(one, offset)
        put(two, offset + 1, of=B)
        assert (offset_of(one), offset_of(two, B)) == (offset, offset + 1)


def test_later_commit_counts_and_may_go_back(open_log: Opener) -> None:
    log = open_log()
    put(log, 9)
    put(log, 5)
    assert offset_of(log) == 5


def test_commit_of_a_lower_generation_changes_nothing(open_log: Opener) -> None:
    log = open_log()
    put(log, 5, generation=2)
    put(log, 9, generation=1)
    assert offset_of(log) == offset_of(open_log()) == 5


def test_member_that_may_not_commit_writes_nothing(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    size = segments(directory)[0].stat().st_size

    def fence() -> None:
        raise RuntimeError("evicted")

    for each in (log, open_log()):
        with pytest.raises(RuntimeError, match="evicted"):
            each.commit({A: Commit(9)}, member="one", fence=fence)
    assert segments(directory)[0].stat().st_size == size
    put(open_log(), 6)  # and the lock is free


def test_commit_can_be_read_as_the_format_says(open_log: Opener, directory: Path, clock: Clock) -> None:
    log = open_log()
    log.commit({A: Commit(7, "ü", 3), B: Commit(8)}, member="web-1", fence=anyone)
    mark = log._log.mark()
    (batch,) = log._log.cursor(mark.log_start_offset).read(mark.flushed_end)
    assert batch.keys == [b"web-1"] and batch.timestamps == [clock.now]
    assert json.loads(batch.values[0] or b"") == {"clicks-0": [7, 3, "ü"], "a-b-12": [8, 0, ""]}


def test_huge_commit_is_refused(open_log: Opener) -> None:
    log = open_log()
    with pytest.raises(RecordTooLargeError, match="the commit is 9"):
        put(log, 5, meta="x" * (9 << 20))
    assert log.commits() == {}


# --- compaction -----------------------------------------------------------------------------------------


def test_compaction_keeps_every_commit(
    open_log: Opener, directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets, "_COMPACT_BYTES", 2000)
    log, other = open_log(), open_log()
    put(log, 3, of=B, generation=4, meta="old")
    before = log.commits()[B]
    compacted = 0
    for offset in range(100):
        clock.now += 1
        put(log, offset, meta="m")
        assert other.commits() == {A: Commit(offset, "m", 1, "one", clock.now), B: before}
        compacted += segments(directory)[0].stat().st_size < 5000
        assert len(segments(directory)) == 1
    assert segments(directory)[0].stat().st_size < 4096 + 3000
    assert open_log().commits() == other.commits() == log.commits()


def test_member_that_reads_while_another_compacts_finds_all(open_log: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "_COMPACT_BYTES", 0)
    writing, reading = open_log(), open_log()
    put(writing, 1)
    reading.commits()
    reading._forget_cursor()
    refresh = reading._log.refresh

    def compacted_meanwhile() -> None:
        monkeypatch.setattr(reading._log, "refresh", refresh)
        put(writing, 2)

    monkeypatch.setattr(reading._log, "refresh", compacted_meanwhile)
    assert offset_of(reading) == 2


def test_disk_without_room_for_compaction_does_not_fail_the_commit(
    open_log: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log()
    put(log, 4)

    def refuse(writer: Writer) -> None:
        raise StorageFullError(writer.directory, OSError(28, "No space left on device"))

    monkeypatch.setattr(offsets, "_COMPACT_BYTES", 0)
    monkeypatch.setattr(Writer, "roll", refuse)
    with caplog.at_level(logging.WARNING, "loglib"):
        put(log, 5)
    assert "stay as long as they are" in caplog.text
    assert offset_of(log) == offset_of(open_log()) == 5


# --- what a crash has left --------------------------------------------------------------------------------


def tear(directory: Path) -> None:
    """As after a kill in the middle of a commit: bytes above the watermark."""
    with segments(directory)[0].open("ab") as file:
        file.write(b"half of a batch")


def test_torn_commit_is_mended_by_the_next_one(open_log: Opener, directory: Path) -> None:
    log, other = open_log(), open_log()
    put(log, 5)
    put(other, 4, of=B)
    tear(directory)
    put(log, 6)
    put(other, 5, of=B)
    assert (offset_of(log), offset_of(other, B)) == (6, 5)
    assert open_log().commits() == log.commits()


def test_torn_commit_is_mended_by_the_next_look(open_log: Opener, directory: Path) -> None:
    put(open_log(), 5)
    tear(directory)
    assert offset_of(open_log()) == 5
    size = segments(directory)[0].stat().st_size
    put(open_log(), 6)
    assert size < segments(directory)[0].stat().st_size < size + 500


def test_commit_that_was_synced_is_found_although_the_watermark_was_not(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 4)
    before = (directory / "watermark").read_bytes()
    put(log, 5)
    (directory / "watermark").write_bytes(before)  # as after a power cut
    assert offset_of(open_log()) == 5


def test_lost_watermark_is_not_taken_for_no_commit(open_log: Opener, directory: Path) -> None:
    put(open_log(), 5)
    (directory / "watermark").unlink()
    assert offset_of(open_log()) == 5
    (directory / "watermark").write_bytes(bytes(512))
    log = open_log()
    put(log, 6)
    assert offset_of(log) == 6


def test_compaction_that_was_cut_is_done_again(
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
    put(open_log(committed_to), 8)
    assert (offset_of(open_log(committed_to)), offset_of(open_log(committed_to), B)) == (8, 6)
    assert len(segments(looked_at)) == len(segments(committed_to)) == 1


# --- damage ------------------------------------------------------------------------------------------------


def test_damaged_commit_is_an_error(open_log: Opener, directory: Path) -> None:
    put(open_log(), 5)
    put(open_log(), 6)
    path = segments(directory)[0]
    raw = bytearray(path.read_bytes())
    raw[4096 + 60] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptLogError):
        open_log().commits()


def test_missing_files_are_an_error(open_log: Opener, directory: Path) -> None:
    put(open_log(), 5)
    segments(directory)[0].unlink()
    with pytest.raises(CorruptLogError):
        open_log().commits()


def test_missing_directory_is_an_error(open_log: Opener, tmp_path: Path) -> None:
    with pytest.raises(CorruptLogError, match="no directory"):
        open_log(tmp_path / "missing")


def test_log_cut_below_its_watermark_is_an_error(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    path = segments(directory)[0]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptLogError):
        put(log, 6)
    with pytest.raises(CorruptLogError):
        open_log().commits()


def test_log_of_another_group_is_an_error(directory: Path, clock: Clock) -> None:
    other = OffsetLog(
        REAL, str(directory), offsets_identity(bytes(16), "other"), durability="disk", permissions=0o600, clock=clock
    )
    with pytest.raises(CorruptLogError):
        other.commits()
    other.close()


FORGED = {
    "no JSON": b"{", "no object": b"[]", "no partition": b'{"clicks": [1, 1, ""]}', "too few": b'{"clicks-0": [1]}',
    "no number": b'{"clicks-0": ["x", 1, ""]}', "endless": b'{"clicks-0": [1e999, 1, ""]}', "nothing": b"",
    "no list": b'{"clicks-0": 5}', "no text": b"\xff", "deep": b"[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
def test_record_that_is_no_commit_is_an_error(open_log: Opener, directory: Path, clock: Clock, value: bytes) -> None:
    writer = Writer(REAL, str(directory), IDENTITY, TopicConfig(), index=SegmentIndex([]), clock=clock)
    writer.append(Columns([value], [b"one"]), len(value))
    writer.close()
    with pytest.raises(CorruptLogError, match="a record at offset 0 that is no commit"):
        open_log().commits()


# --- the lock and the files ---------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "_LOCK_TIMEOUT_S", 0.01)


@pytest.mark.usefixtures("impatient")
def test_commit_beside_a_member_that_is_stopped_says_so(open_log: Opener, directory: Path) -> None:
    log, fresh = open_log(), open_log()
    put(log, 5)
    lock = REAL.open_directory(str(directory))
    assert REAL.try_lock(lock)
    try:
        for each in (log, fresh):
            with pytest.raises(LockedError, match="it may be stopped"):
                put(each, 6)
        tear(directory)
        with pytest.raises(LockedError), log._writer():
            pass
    finally:
        REAL.close(lock)
    put(log, 6)
    assert offset_of(fresh) == 6


@pytest.mark.parametrize("call", ["pwritev", "datasync"])
def test_commit_that_fails_is_an_error_and_the_next_one_is_whole(open_log: Opener, directory: Path, call: str) -> None:
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


@needs_proc
def test_closed_log_leaves_no_file_open(open_log: Opener) -> None:
    before = open_files()
    log = open_log()
    put(log, 5)
    log.commits()
    log.close()
    log.close()
    del log
    open_log().close()
    assert [each for each in open_files() if each not in before and "watermark" not in each] == []


def test_commit_that_is_interrupted_is_mended_by_the_next_one(
    open_log: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    put(log, 4)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(offsets.WatermarkWriter, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(log, 5)
    put(log, 6)
    assert offset_of(log) == offset_of(open_log()) == 6


def test_writer_whose_close_is_interrupted_is_closed(
    open_log: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(open_log(), 4)
    tear(directory)
    close = Writer.close
    calls: list[Writer] = []

    def interrupted_once(writer: Writer) -> None:
        calls.append(writer)
        if len(calls) == 1:
            raise KeyboardInterrupt
        close(writer)

    monkeypatch.setattr(Writer, "close", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        open_log().commits()
    assert offset_of(open_log()) == 4 and len(calls) == 2
