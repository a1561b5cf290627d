"""Tiering to a directory through power cuts and kills: after each of them and a second run, each segment is there once.

Two calls of `tier` run on a `CrashFS`, with more sealed segments between. The disk is cut at every operation. Then:

    whoever opens the place      sees it as some commit left it, and not before one that has returned
    each segment that it names   is whole, and has the bytes of the log
    the call is made again       all sealed segments are named once, and nothing unfinished lies beside them
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import pytest
from tiered import records, seal

from conftest import NOW, QUIET
from loglib import Retention, Tiered, Topic, testing, tier
from loglib.format.header import crc32c
from loglib.offload import tier as uploader
from loglib.offload.tier_files import Tier
from loglib.system.files import Files
from loglib.testing import CrashFS, CrashState, DyingFiles, Killed

TO = "/data/tier/t"
TOPIC = "/data/t"


@pytest.fixture(autouse=True)
def _a_commit_for_each_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "SEGMENTS_A_COMMIT", 1)


def open_topic(files: Files, *, mode: Literal["a", "r"] = "r") -> Topic:
    return testing.open_topic(TOPIC, files=files, clock=lambda: NOW, mode=mode, **(QUIET if mode == "a" else {}))


def fill(files: Files) -> None:
    """Two sealed segments more."""
    with open_topic(files, mode="a") as topic:
        seal(topic, 2, records=2, size=10)


def tiered(files: Files) -> Tiered | None:
    try:
        return Tier(files, TO).tiered
    except FileNotFoundError:
        return None


def count(made: Tiered | None) -> int:
    return 0 if made is None else len(made.partitions[0].segments)


def read(files: Files, path: str) -> bytes:
    return files.read_whole(path, 1 << 20)


def judge(files: Files, segments: set[int]) -> None:
    """The place names so many segments; a second run completes it."""
    made = tiered(files)
    assert count(made) in segments
    check(files, made)
    with open_topic(files) as topic:
        made = tier(topic, TO, in_flight=1)
        log = records(topic)
    check(files, made)
    assert count(made) == max(segments)
    with testing.open_topic(TO, files=files, mode="r") as place:
        assert records(place) == log
    names = files.listdir(f"{TO}/0000")
    assert sorted(names) == [each.file_name for each in made.partitions[0].segments], "each once, and nothing else"
    assert not [each for each in [*files.listdir(TO), *files.listdir(f"{TO}/_tier")] if each.startswith(".")]


def check(files: Files, made: Tiered | None) -> None:
    for each in () if made is None else made.partitions[0].segments:
        content = read(files, f"{TO}/0000/{each.file_name}")
        assert content == read(files, f"{TOPIC}/0000/{each.file_name}") and crc32c(content) == each.crc


def states(files: CrashFS, since: int) -> Iterator[CrashState]:
    """Each state once."""
    seen = set()
    for state in files.crash_states(since=since, random=1):
        if state.key not in seen:
            seen.add(state.key)
            yield state


def program() -> tuple[CrashFS, list[tuple[int, int]]]:
    """Two runs; the instants at which a run began and had returned, with the segments that were named then."""
    files = CrashFS()
    files.make_directories("/data")
    fill(files)
    instants = [(len(files.operations), 0)]
    for segments in (2, 4):
        with open_topic(files) as topic:
            tier(topic, TO, in_flight=1)
        instants.append((len(files.operations), segments))
        if segments == 2:
            fill(files)
            instants.append((len(files.operations), segments))
    return files, instants


def cut(files: CrashFS, instants: list[tuple[int, int]], *, every: int) -> int:
    """Judge each state of the two runs, or some of them; returns how many."""
    tried = 0
    for number, state in enumerate(states(files, instants[0][0])):
        if instants[1][0] < state.at < instants[2][0]:
            continue  # the topic grows: its own tests cut it there
        if number % every and not state.whole:
            continue
        promised = max(segments for at, segments in instants if at <= state.at)
        tried += 1
        try:
            judge(state.files, set(range(promised, (2 if state.at < instants[2][0] else 4) + 1)))
        except BaseException:
            print(state)
            raise
    return tried


def test_power_cuts_double_and_lose_no_segment() -> None:
    assert cut(*program(), every=8) > 30


@pytest.mark.slow
def test_every_state_after_a_power_cut_doubles_and_loses_no_segment() -> None:
    assert cut(*program(), every=1) > 300


def test_kills_at_every_step_double_and_lose_no_segment() -> None:
    for at in range(1, 1000):
        files = CrashFS()
        files.make_directories("/data")
        fill(files)
        try:
            with open_topic(DyingFiles(at, files)) as topic:
                tier(topic, TO, in_flight=1)
        except Killed:
            files.kill()
            judge(files, {0, 1, 2})
        else:
            break
    assert at > 40


def test_a_cut_after_a_kill_and_a_second_run_loses_nothing() -> None:
    """What a dead process has made and not synced, the next one builds on."""
    for at in range(1, 1000, 9):
        files = CrashFS()
        files.make_directories("/data")
        fill(files)
        try:
            with open_topic(DyingFiles(at, files)) as topic:
                tier(topic, TO, in_flight=1)
        except Killed:
            files.kill()
        else:
            break
        with open_topic(files) as topic:
            tier(topic, TO, in_flight=1)
        for state in states(files, len(files.operations)):
            judge(state.files, {2})
    assert at > 40


def test_retention_after_a_power_cut_leaves_every_record_in_one_of_the_two() -> None:
    """What is dropped is in the place, whatever the place's disk has lost."""
    files = CrashFS()
    files.make_directories("/data")
    fill(files)
    with open_topic(files) as topic:
        expected = records(topic)
    with testing.open_topic(
        TOPIC, files=files, clock=lambda: NOW + 5, retention=Retention(age=None, bytes=0, archive="tier/../../tier/t",
        archive_grace=timedelta(0)),
    ) as topic:  # fmt: skip
        before = len(files.operations)
        with open_topic(files) as reading:
            tier(reading, TO, in_flight=1)
        assert [each.drop for each in topic.retain()] == [True, True, False]
    for state in states(files, before):
        path = TO if count(tiered(state.files)) else None
        with testing.open_topic(TOPIC, files=state.files, mode="r", tier=path) as topic:
            assert records(topic) == expected, state
