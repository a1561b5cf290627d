"""Archiving and tiering to a directory through power cuts and kills: a second run has each sealed segment once.

Two runs take place on a `CrashFS`, with more sealed segments between. The disk is cut at every operation. Then:

    a reader                  sees what some commit left, and nothing before a commit that has returned
    each file that it names   is whole, and has the records of the log
    a second run              names all sealed segments once, and nothing unfinished lies beside them
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal, Protocol

import pytest
from archived_topics import newest
from tiered import records, seal

from conftest import NOW, QUIET
from loglib import LogError, Retention, Topic, testing
from loglib.format.header import crc32c
from loglib.offload import TierManifest, archive, tier
from loglib.offload import tiering as uploader
from loglib.offload.archive_reader import ArchiveReader, stream
from loglib.offload.tier_files import Tier
from loglib.system.files import Files
from loglib.testing import CrashFS, CrashState, DyingFiles, Killed

TO = "/data/to/t"
TOPIC = "/data/t"
RECORDS = 3  # of a segment


class World(Protocol):
    """What a run makes."""

    step: int  # the number of segments that are committed together
    manifests: str

    def run(self, topic: Topic) -> None:
        """Archive or upload all sealed segments."""

    def count(self, files: Files) -> int:
        """The number of segments that count; each of them is whole."""

    def check_complete(self, files: Files, topic: Topic) -> set[str]:
        """All sealed segments are there; returns the names of their files."""


class Archive:
    step = 2
    manifests = "_loglib"

    def run(self, topic: Topic) -> None:
        archive(topic, TO, file_bytes=1)

    def count(self, files: Files) -> int:
        if newest(files, TO) is None:
            return 0
        past = ArchiveReader.load(files, TO)
        table = stream(past, "begin", None, columns=None, batch_bytes=1 << 20, now_us=NOW).read_all()
        with open_topic(files) as topic:
            assert table.equals(topic.arrow().read_all().slice(0, table.num_rows))
        return int(table.num_rows) // RECORDS

    def check_complete(self, files: Files, topic: Topic) -> set[str]:
        assert topic.arrow(archive=TO).read_all().equals(topic.arrow().read_all())
        made = newest(files, TO)
        assert made is not None and made.rows == topic.arrow().read_all().num_rows
        return {os.path.basename(file.name) for file in made.partitions[0].files}


class Place:
    step = 1
    manifests = "_tier"

    def run(self, topic: Topic) -> None:
        tier(topic, TO, in_flight=1)

    def count(self, files: Files) -> int:
        made = tiered(files)
        for each in () if made is None else made.partitions[0].segments:
            content = files.read_whole(f"{TO}/0000/{each.file_name}", 1 << 20)
            assert content == files.read_whole(f"{TOPIC}/0000/{each.file_name}", 1 << 20)
            assert crc32c(content) == each.crc
        return 0 if made is None else len(made.partitions[0].segments)

    def check_complete(self, files: Files, topic: Topic) -> set[str]:
        made = tiered(files)
        assert made is not None
        with testing.open_topic(TO, files=files, mode="r") as place:
            assert records(place) == records(topic)
        return {each.file_name for each in made.partitions[0].segments}


def tiered(files: Files) -> TierManifest | None:
    try:
        return Tier(files, TO).tiered
    except FileNotFoundError:
        return None


@pytest.fixture(params=[Archive(), Place()], ids=["archive", "tier"])
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.param
    return made


@pytest.fixture(autouse=True)
def _a_commit_for_each_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "SEGMENTS_A_COMMIT", 1)


def open_topic(files: Files, *, mode: Literal["a", "r"] = "r") -> Topic:
    return testing.open_topic(TOPIC, files=files, clock=lambda: NOW, mode=mode, **(QUIET if mode == "a" else {}))


def disk() -> CrashFS:
    """A disk with a topic of two sealed segments."""
    files = CrashFS()
    files.make_directories("/data")
    fill(files)
    return files


def fill(files: Files) -> None:
    """Two sealed segments more."""
    with open_topic(files, mode="a") as topic:
        seal(topic, 2, records=RECORDS, size=10)


def run(world: World, files: Files) -> None:
    with open_topic(files) as topic:
        world.run(topic)


def judge(world: World, files: Files, segments: set[int]) -> None:
    """One of these numbers of segments counts; a second run completes it."""
    assert world.count(files) in segments
    with open_topic(files) as topic:
        world.run(topic)
        named = world.check_complete(files, topic)
    assert world.count(files) == max(segments)
    assert set(files.listdir(f"{TO}/0000")) == named, "each once, and nothing else"
    names = [*files.listdir(TO), *files.listdir(f"{TO}/{world.manifests}")]
    assert not [each for each in names if each.startswith(".")]


def states(files: CrashFS, since: int) -> Iterator[CrashState]:
    """Each state once."""
    seen = set()
    for state in files.crash_states(since=since, random=1):
        if state.key not in seen:
            seen.add(state.key)
            yield state


def cut(world: World, *, every: int) -> int:
    """Judge each state of two runs, or some of them; returns how many."""
    files = disk()
    instants = [len(files.operations)]  # a run begins, or has returned
    run(world, files)
    instants.append(len(files.operations))
    fill(files)
    instants.append(len(files.operations))
    run(world, files)
    instants.append(len(files.operations))
    tried = 0
    for number, state in enumerate(states(files, instants[0])):
        if instants[1] < state.at < instants[2]:
            continue  # the topic grows: its own tests cut it there
        if number % every and not state.whole:
            continue
        promised = 4 if state.at >= instants[3] else 2 if state.at >= instants[1] else 0
        sealed = 4 if state.at >= instants[2] else 2
        tried += 1
        try:
            judge(world, state.files, {*range(promised, sealed, world.step), sealed})
        except BaseException:
            print(state)
            raise
    return tried


def test_power_cuts_at_every_step_double_and_lose_nothing(world: World) -> None:
    assert cut(world, every=10) > 30


@pytest.mark.reliability
def test_every_state_after_a_power_cut_doubles_and_loses_nothing(world: World) -> None:
    assert cut(world, every=1) > 300


def test_kills_at_every_step_double_and_lose_nothing(world: World) -> None:
    for at in range(1, 1000):
        files = disk()
        run(world, files)
        fill(files)
        try:
            run(world, DyingFiles(at, files))
        except Killed:
            files.kill()
            judge(world, files, {2, 3, 4} if world.step == 1 else {2, 4})
        else:
            break
    assert at > 20


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cut_after_a_kill_and_a_second_run_loses_nothing(world: World, every: int) -> None:
    """What a dead process has made and not synced, the next one builds on."""
    for at in range(1, 1000, every):
        files = disk()
        try:
            run(world, DyingFiles(at, files))
        except Killed:
            files.kill()
        else:
            break
        run(world, files)
        for state in states(files, len(files.operations)):
            judge(world, state.files, {2})
    assert at > 20


def test_a_lost_directory_of_manifests_is_an_archive_that_is_made_once_more() -> None:
    files = disk()
    with open_topic(files) as topic:
        archive(topic, TO)
        files.remove_tree(os.path.join(TO, "_loglib"))
        assert archive(topic, TO, file_bytes=1).version == 1
    judge(Archive(), files, {2})


def test_manifests_are_read_only_by_whoever_understands_them() -> None:
    files = disk()
    with open_topic(files) as topic:
        archive(topic, TO)
        files.write_new(f"{TO}/_loglib/{2:020d}.json", b"{}", 0o600)
        with pytest.raises(LogError):
            archive(topic, TO)


def test_retention_after_a_power_cut_leaves_every_record_in_one_of_the_two() -> None:
    """What is dropped is in the place, whatever the place's disk has lost."""
    files = disk()
    with open_topic(files) as topic:
        expected = records(topic)
    with testing.open_topic(
        TOPIC, files=files, clock=lambda: NOW + 5, alter=True,
        retention=Retention(age=None, bytes=0, archive="../to/t", archive_grace=timedelta(0)),
    ) as topic:  # fmt: skip
        before = len(files.operations)
        run(Place(), files)
        assert [each.drop for each in topic.retain()] == [True, True, False]
    for state in states(files, before):
        path = TO if tiered(state.files) else None
        with testing.open_topic(TOPIC, files=state.files, mode="r", tier=path) as topic:
            assert records(topic) == expected, state
