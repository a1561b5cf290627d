"""G1, consumer groups: after any crash a group has only commits that were made, and no acknowledged one is gone.

Groups are made, joined, left, committed to, compacted and reset on a `CrashFS`, by one or more members. The power is
cut at every instant. Afterwards the commits must be those after one of the calls: the last call that had returned, or
one that had begun. With durability "os" each partition may go back to an earlier commit on its own after a power cut,
because each member has a log. If the making of a group was cut, there is no group. The next member continues from
there, in a higher generation. See crash_engine.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any
from unittest import mock

import counts
import pytest
from account import Account
from crash_worlds import LEFT_OUT, NOW, PATH, DirectoriesNeverSynced, Failure, NeverSynced, Recorder, Workload, made
from roomy import room_by_chance

from loglib import Group, LogError, testing
from loglib.groups import membership, offsets, reset_group
from loglib.groups.commit_log import CommitLog
from loglib.groups.offsets import Offsets
from loglib.testing import CrashFS, CrashState, Image, MemoryFiles

SHARDS = 4
STATES = 5_000  # per shard
PARTITIONS = 2

Standing = dict[int, tuple[int, int, str]]  # by partition: offset, generation, meta


class World:
    """A topic with some records on a recording disk, the members of its group, and what they have committed."""

    def __init__(self, seed: int, *, durability: str, disk: type[CrashFS] = Recorder) -> None:
        self.choose = Random(seed)
        self.durability = durability
        self.disk = disk
        self.serial = 0
        self.start(_image(durability), {})

    def start(self, image: Image, standing: Standing) -> None:
        self.image = image
        self.fs = self.disk(image)
        self.commits = Account([standing])  # each is there as a whole or not at all
        self.commits.promise()
        self.members: list[Group] = []
        self.topic = testing.open_topic(PATH, mode="r", files=self.fs, clock=lambda: NOW)
        self.places = [[0, *(record.next_offset for record in partition.read())] for partition in self.topic.partitions]

    def states(self, *, since: int = 0) -> Iterator[CrashState]:
        return self.fs.crash_states(seed=self.choose.randrange(1 << 30), random=6, since=since)

    def close(self) -> None:
        """Close the objects of the process that is gone: nothing of them reaches the disk any more."""
        self.fs.kill()
        for member in self.members:
            member._abandon_in_child(os.getpid())
        self.topic.close()


@contextmanager
def noting(world: World) -> Iterator[None]:
    """Note every commit, also those of joining, leaving and resetting."""
    commit = Offsets.commit

    def noted(log: Offsets, commits: Mapping[Any, Any], **facts: Any) -> None:
        begun, standing = len(world.fs.operations), dict(world.commits.contents[-1])
        for partition, each in commits.items():
            # A claim of a partition without a commit does not say yet where the group is.
            if each.offset is not None and each.generation >= standing.get(partition.partition, (0, 0, ""))[1]:
                standing[partition.partition] = each.offset, each.generation, each.meta
        commit(log, commits, **facts)
        world.commits.begin([standing], at=begun + 1)
        world.commits.promise(at=len(world.fs.operations), power=world.durability == "disk")

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(Offsets, "commit", noted))
        patched.enter_context(mock.patch.object(membership, "_LOOK_S", 0.0))
        patched.enter_context(mock.patch.object(membership, "_LOOKS_S", ()))  # fold at each look
        patched.enter_context(mock.patch.object(os, "urandom", world.choose.randbytes))
        yield


def join(world: World) -> None:
    if len(world.members) == 3:
        return leave(world)
    world.serial += 1
    start = world.choose.choice(("begin", "end"))
    member = world.topic.group("etl", member=f"m{world.serial}", start=start, commit="manual")
    world.members.append(member)
    return settle(world)


def leave(world: World) -> None:
    if world.members:
        world.members.pop(world.choose.randrange(len(world.members))).close()
        settle(world)


def settle(world: World) -> None:
    """Let the members see each other."""
    for _ in range(2):
        for member in world.members:
            member.poll(max_records=1)


def commit(world: World) -> None:
    """Some member commits one of its partitions, or all."""
    member = world.choose.choice([each for each in world.members if each.assignment] or [None])
    if member is None:
        return join(world)
    owned = member.assignment if world.choose.random() < 0.5 else [world.choose.choice(member.assignment)]
    world.serial += 1
    meta = f"{world.serial}" + "." * world.choose.choice((0, 600))
    return member.commit({each: world.choose.choice(world.places[each]) for each in owned}, meta=meta)


def compact(world: World) -> None:
    with mock.patch.object(offsets, "_COMPACT_BYTES", 0):
        commit(world)


def reset(world: World) -> None:
    while world.members:
        world.members.pop().close()
    place = world.choose.choice(world.places[0])
    reset_group(world.topic, "etl", world.choose.choice(("begin", "end", {0: place})))


def kill(world: World) -> None:
    """Kill the process: its unsynced operations are still pending, and its locks are gone."""
    world.close()
    world.members = []
    world.topic = testing.open_topic(PATH, mode="r", files=world.fs, clock=lambda: NOW)
    join(world)


def crash(world: World) -> None:
    """Cut the power and continue with what is left."""
    state = world.choose.choice(list(world.states(since=len(world.fs.operations))))
    standing = found_in(state.files)
    world.close()
    world.start(state.image, standing)


CALLS = {
    "join": join,
    "leave": leave,
    "commit": commit,
    "compact": compact,
    "reset": reset,
    "kill": kill,
    "crash": crash,
}
WEIGHTS = [3, 1, 6, 2, 1, 1, 1]


def _image(durability: str) -> Image:
    """A disk with a topic that has records; everything is synced."""
    files = MemoryFiles()
    with made(files, Workload((), durability, partitions=PARTITIONS).config()) as topic:
        for number in range(8):
            topic.append(b"%d" % number, partition=number % PARTITIONS, sync=True)
    return Image.of(files.tree())


# --- judging ---------------------------------------------------------------------------------------------


def standing_of(group: Group) -> Standing:
    return {number: (each.offset, each.generation, each.meta) for number, each in group.committed().items()}


def found_in(files: CrashFS) -> Standing:
    """What a member that joins after the crash finds. The member must be able to continue and to commit."""
    try:
        with testing.open_topic(PATH, mode="r", files=files, clock=lambda: NOW) as topic:
            with topic.group("etl", member="next", commit="manual") as group:
                found = standing_of(group)
                group.poll()
                group.commit(dict.fromkeys(group.assignment, 0), meta="next")
            with topic.group("etl", member="last", commit="manual") as group:
                after = standing_of(group)
    except (LogError, OSError) as error:
        raise Failure("refused", repr(error)) from error
    for number in range(PARTITIONS):
        offset, generation, meta = after.get(number, (0, 0, ""))
        if (offset, meta) != (0, "next") or generation <= found.get(number, (0, 0, ""))[1]:
            raise Failure("lost", f"committed anew, there is {after.get(number)} behind {found.get(number)}")
    return found


def _each_among(found: Standing, allowed: list[Standing]) -> bool:
    """Whether each partition stands where it stood at some time."""
    return all(
        found.get(number) in [standing.get(number) for standing in allowed] for number in range(PARTITIONS)
    )


class Judge:
    """Judges states, each set of files once, and counts them."""

    def __init__(self) -> None:
        self.found: dict[int, Standing] = {}

    def judge(self, world: World, since: int) -> None:
        for state in world.states(since=since):
            digest = state.image.digest(leaving_out=LEFT_OUT)
            try:
                found = self.found.get(digest)
                if found is None:
                    found = self.found[digest] = found_in(state.files)
                allowed = world.commits.possible(state.at, power=not state.whole)
                durable = state.whole or world.durability == "disk"
                if not (found in allowed if durable else _each_among(found, allowed)):
                    kind = "lost" if found in world.commits.contents or not found else "phantoms"
                    raise Failure(kind, f"committed is {found}, not one of {allowed}")
            except Failure as failure:
                failure.add_note(f"{state!r}\n" + "\n".join(map(str, state.operations)))
                raise


def run(seed: int, judge: Judge, *, disk: type[CrashFS] = Recorder) -> None:
    """Run one workload, and judge the states that cuts at all its instants may leave."""
    choose = Random(f"a group/{seed}")
    world = World(seed, durability=choose.choice(("disk", "disk", "os")), disk=disk)
    calls = ["join", "commit", *choose.choices(list(CALLS), WEIGHTS, k=choose.randrange(3, 9))]
    try:
        with noting(world), room_by_chance(seed):
            begun = 0
            for name in calls:
                if name == "crash":  # the earlier states are on another disk
                    judge.judge(world, begun)
                CALLS[name](world)
                begun = 0 if name == "crash" else begun
            judge.judge(world, begun)
    except Failure as failure:
        failure.add_note(f"seed {seed}, {world.durability}: {calls}")
        raise
    finally:
        with suppress(LogError, OSError):
            world.close()


@pytest.mark.reliability
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_crash_loses_or_invents_a_commit(shard: int) -> None:
    judge, ran = Judge(), 0
    figures = {"lost": 0, "phantoms": 0, "refused": 0}
    try:
        while len(judge.found) < counts.scale(STATES):
            run(shard + SHARDS * ran, judge)
            ran += 1
    except Failure as failure:
        figures[failure.kind] += 1
        raise
    finally:
        counts.count("G1", group_workloads=ran, group_states=len(judge.found), **figures)


# --- the test sees faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [NeverSynced, DirectoriesNeverSynced])
def test_commits_that_are_not_synced_are_missed(disk: type[CrashFS]) -> None:
    with pytest.raises(Failure):
        for seed in range(20):
            run(seed, Judge(), disk=disk)


def test_crash_that_is_not_seen_to_is_missed() -> None:
    """If members do not look above a watermark, an unsynced watermark hides the last commits."""
    with mock.patch.object(CommitLog, "_above", lambda *_: {}), pytest.raises(Failure):
        for seed in range(20):
            run(seed, Judge())
