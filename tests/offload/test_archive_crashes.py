"""Archiving through power cuts and kills: after each of them and a second run, each record is archived once.

Two calls of `archive` run on a `CrashFS`, with a roll between. The disk is cut at every operation. Then:

    a reader                     sees the archive as some commit left it, and not before one that has returned
    each file that it names      is whole, and has the rows of the log
    the call is made again       all sealed records are in it once, and nothing lies beside the files that are named
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import pyarrow as pa
import pytest

from conftest import NOW, QUIET
from loglib import LogError, Topic, archive, testing
from loglib.offload.archive_reader import ArchiveReader, stream
from loglib.offload.archive_store import newest
from loglib.system.files import Files
from loglib.testing import CrashFS, CrashState, DyingFiles, Killed

TO = "/data/archive"
TOPIC = "/data/t"


def open_topic(files: Files, *, mode: Literal["a", "r"] = "r") -> Topic:
    return testing.open_topic(TOPIC, files=files, clock=lambda: NOW, mode=mode, **(QUIET if mode == "a" else {}))


def fill(files: Files) -> None:
    """Two sealed segments more."""
    with open_topic(files, mode="a") as topic:
        for _ in range(2):
            for number in range(3):
                topic.append(b"value %d" % number, timestamp=NOW + number)
            topic.partition(0).roll()


def table_of(files: Files) -> pa.Table | None:
    """All that is archived; None if there is no archive."""
    if newest(files, TO) is None:
        return None
    past = ArchiveReader.load(files, TO)
    return stream(past, "begin", None, columns=None, batch_bytes=1 << 20, now_us=NOW).read_all()


def names(files: Files) -> set[str]:
    """All data files, also unfinished ones."""
    return {f"0000/{each}" for each in files.listdir(f"{TO}/0000")} if files.exists(f"{TO}/0000") else set()


def judge(files: Files, rows: set[int]) -> None:
    """The archive has one of these numbers of rows; a second run completes it."""
    archived = table_of(files)
    with open_topic(files) as topic:
        log = topic.arrow().read_all()
        if archived is not None:
            assert archived.equals(log.slice(0, archived.num_rows))
        assert (0 if archived is None else archived.num_rows) in rows
        made = archive(topic, TO, file_bytes=1)
        found = table_of(files)
        assert found is not None and found.equals(log), "each record once"
        assert topic.arrow(archive=TO).read_all().equals(log)
    assert names(files) == {file.name for file in made.partitions[0].files}
    assert not [each for each in files.listdir(f"{TO}/_loglib") if each.startswith(".")]


def states(files: CrashFS, since: int) -> Iterator[CrashState]:
    """Each state once."""
    seen = set()
    for state in files.crash_states(since=since, random=1):
        if state.key not in seen:
            seen.add(state.key)
            yield state


def program() -> tuple[CrashFS, list[tuple[int, int]]]:
    """Two runs; the instants at which a run began and had returned, with the rows that were archived then."""
    files = CrashFS()
    files.make_directories("/data")
    fill(files)
    instants = [(len(files.operations), 0)]
    for rows in (6, 12):
        with open_topic(files) as topic:
            archive(topic, TO, file_bytes=1)
        instants.append((len(files.operations), rows))
        if rows == 6:
            fill(files)
            instants.append((len(files.operations), rows))
    return files, instants


def cut(files: CrashFS, instants: list[tuple[int, int]], *, every: int) -> int:
    """Judge each state of the two runs, or some of them; returns how many."""
    tried = 0
    for number, state in enumerate(states(files, instants[0][0])):
        if instants[1][0] < state.at < instants[2][0]:
            continue  # the topic grows: its own tests cut it there
        if number % every and not state.whole:
            continue
        promised = max(rows for at, rows in instants if at <= state.at)
        tried += 1
        try:
            judge(state.files, {promised, promised + 6} if promised < 12 else {12})
        except BaseException:
            print(state)
            raise
    return tried


def test_power_cuts_at_every_step_double_and_lose_nothing() -> None:
    assert cut(*program(), every=11) > 50


@pytest.mark.reliability
def test_every_state_after_a_power_cut_doubles_and_loses_nothing() -> None:
    assert cut(*program(), every=1) > 300


def test_kills_at_every_step_double_and_lose_nothing() -> None:
    for at in range(1, 1000):
        files = CrashFS()
        files.make_directories("/data")
        fill(files)
        with open_topic(files) as topic:
            archive(topic, TO, file_bytes=1)
        fill(files)
        try:
            with open_topic(DyingFiles(at, files)) as topic:
                archive(topic, TO, file_bytes=1)
        except Killed:
            files.kill()
            judge(files, {6, 12})
        else:
            break
    assert at > 20


def test_a_cut_after_a_kill_and_a_second_run_loses_nothing() -> None:
    """What a dead process has made and not synced, the next one builds on."""
    for at in range(1, 1000, 4):
        files = CrashFS()
        files.make_directories("/data")
        fill(files)
        try:
            with open_topic(DyingFiles(at, files)) as topic:
                archive(topic, TO, file_bytes=1)
        except Killed:
            files.kill()
        else:
            break
        with open_topic(files) as topic:
            archive(topic, TO, file_bytes=1)
        for state in files.crash_states(since=len(files.operations), random=1):
            judge(state.files, {6})
    assert at > 20


def test_a_lost_directory_of_manifests_is_an_archive_that_is_made_anew() -> None:
    files = CrashFS()
    files.make_directories("/data")
    fill(files)
    with open_topic(files) as topic:
        archive(topic, TO)
        files.remove_tree(os.path.join(TO, "_loglib"))
        assert archive(topic, TO).version == 1
    judge(files, {6})


def test_manifests_are_read_only_by_whoever_understands_them() -> None:
    files = CrashFS()
    files.make_directories("/data")
    fill(files)
    with open_topic(files) as topic:
        archive(topic, TO)
        files.write_new(f"{TO}/_loglib/{2:020d}.json", b"{}", 0o600)
        with pytest.raises(LogError):
            archive(topic, TO)
