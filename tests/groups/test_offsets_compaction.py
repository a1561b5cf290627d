"""Compaction of a log of offsets keeps every commit that counts, also where it is cut or has no room."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import committed
import pytest
from committed import A, B, anyone, entry, full, offset_of, put, segments

from conftest import crash_copy
from loglib import Commit
from loglib.append.writer import Writer
from loglib.format.columns import Columns
from loglib.groups import commit_log, offsets
from loglib.groups.offsets import Offsets

Opener = Callable[..., Offsets]

directory = committed.directory
open_log = committed.open_log


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
        assert other.commits() == {A: Commit(offset, "m", 1, "one", 5), **commit_log.commits_of({B: before})}
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
    replace_all = commit_log.CommitLog.replace_all

    def counted(log: Any, columns: Columns) -> int:
        compactions.append(log.size_bytes())
        return replace_all(log, columns)

    monkeypatch.setattr(commit_log.CommitLog, "replace_all", counted)
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
