"""Programs that write a topic with replicas on simulated devices, and what must hold after power cuts and losses.

Each directory is a device of its own. At any instant any of the devices lose their power, together or alone: each of
these has any state that a cut may leave, and the others have all that was handed to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from replicated import Devices, assert_same, open_all, until

from conftest import QUIET, values_of
from loglib import LogError, Topic, testing
from loglib.copies.roster import Acks, needed, read_members
from loglib.errors import TooFewCopiesError
from loglib.testing import CrashFS, CrashState, Image, MemoryFiles, Operation, crash_states

__all__ = ["Judged", "ReplicaProgram", "ReplicaWorld", "step", "walk"]

Tree = dict[str, bytes]


class Judged(NamedTuple):
    """What was looked at."""

    states: int = 0

    def __add__(self, other: object) -> Judged:
        assert isinstance(other, Judged)
        return Judged(*map(sum, zip(self, other, strict=True)))


class ReplicaProgram:
    """Appends, flushes, rolls, retention, closings and openings at random by the seed; all of it again after a cut."""

    def __init__(self, seed: int, *, steps: int = 10) -> None:
        self._chance = chance = random.Random(seed)
        self.acks: Acks = "all" if chance.random() < 0.3 else "quorum"
        self.places = [f"/{device}/t" for device in ("abc" if self.acks == "quorum" or chance.random() < 0.5 else "ab")]
        self.appended: list[bytes] = []
        self.acknowledged: list[tuple[int, int]] = [(0, 0)]  # operations so far, and how many records
        self.dropped: list[tuple[int, int]] = [(0, 0)]  # the same, for records that retention may have dropped
        made = MemoryFiles()
        if chance.random() < 0.7:
            open_all(self.places, files=made, acks=self.acks, segment_bytes=8192).close()
        else:
            testing.open_topic(self.places[0], files=made, segment_bytes=8192, **QUIET).close()
        self.fs = CrashFS(Image.of(made.tree()))
        self.fs.kill()
        self._topic = open_all(self.places, files=self.fs, acks=self.acks)
        self._append()
        for _ in range(steps):
            chance.choice([self._append, self._append, self._many, self._roll, self._drop, self._reopen])()
        self._topic.close()

    # --- the program -----------------------------------------------------------------------------------

    def _append(self) -> None:
        for _ in range(self._chance.choice([1, 1, 3])):
            self._value()
        if self._chance.random() < 0.8:
            self._acknowledge()

    def _value(self) -> None:
        value = b"%06d " % len(self.appended) + b"x" * self._chance.choice([1, 30, 600])
        self.appended.append(value)
        self._topic.append(value)

    def _many(self) -> None:
        values = [b"%06d " % (len(self.appended) + number) + b"y" * 90 for number in range(20)]
        self.appended += values
        self._topic.append_many(values)
        if self._chance.random() < 0.5:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self._topic.flush()
        self.acknowledged.append((len(self.fs.operations), len(self.appended)))

    def _roll(self) -> None:
        self._topic.partition(0).roll()

    def _drop(self) -> None:
        segments = self._topic.partition(0).segments
        if len(segments) > 2 and self._chance.random() < 0.5:
            before = len(self.fs.operations)
            first = next(iter(values_of(self._topic.partition(0), segments[1].base_offset)), None)
            if first is not None:
                self.dropped.append((before, self.appended.index(first)))
                self._topic.partition(0).delete_before(segments[1].base_offset)

    def _reopen(self) -> None:
        self._topic.close()
        self.acknowledged.append((len(self.fs.operations), len(self.appended)))
        places = list(self.places)
        self._chance.shuffle(places)
        self._topic = open_all(places, files=self.fs, acks=self.acks)

    # --- what must hold ----------------------------------------------------------------------------------

    def judge_cuts(self, every: int = 1, *, seed: int = 0) -> Judged:
        """Judge states at each `every`-th instant."""
        judged = Judged()
        for at in range(seed % every, len(self.fs.operations) + 1, every):
            judged += self._judge_instant(at, random.Random(f"{seed}/{at}"))
        return judged

    def _judge_instant(self, at: int, chance: random.Random) -> Judged:
        """Judge the instant at which these operations had begun, with a few subsets of devices that lose power."""
        states = {place: self._states(place, at) for place in self.places}
        judged = Judged()
        subsets = [(), tuple(self.places), tuple(each for each in self.places if chance.random() < 0.5)]
        for cut in subsets:
            tree: Tree = {}
            said: list[str] = []
            for place, found in states.items():
                state = chance.choice(found) if place in cut else found[0]
                tree |= _part(state, place)
                said.append(f"{place}: {state!r}")
            judged += self.judge(tree, at, "\n".join([f"instant {at}, power lost by {cut}", *said]), chance)
        return judged

    def _states(self, place: str, at: int) -> list[CrashState]:
        return list(_states_of(self.fs.before, self.fs.operations[:at], place, seed=at))

    def judge(self, tree: Tree, at: int, what: str, chance: random.Random) -> Judged:
        """Open the directories again, one of them first, and one of them lost, cut, rotten or swapped."""
        order, forget_replicas, fate = list(self.places), list[str](), "whole"
        if _is_made(tree, order):  # before, the directory that was there first is opened
            chance.shuffle(order)
            fate = chance.choice(["whole", "whole", "lost", "cut", "rotten", "swapped"])
        victim = order[-1]
        if fate == "lost":
            tree = {path: content for path, content in tree.items() if not path.startswith(victim)}
            if needed(self.acks, len(order)) == len(order):
                forget_replicas, order = [victim], order[:-1]
        elif fate == "cut":
            tree = _cut(tree, victim)
        elif fate == "rotten":
            tree = _rotten(tree, victim, chance)
        elif fate == "swapped":
            tree = _swapped(tree, order[0], victim)
        what = f"{what}\n{fate} {victim}, opened as {order}, forget_replicas={forget_replicas}"
        files = CrashFS(Image.of(tree))
        try:
            found = self._go_on(files, order, forget_replicas)
            self._check(found, at, what)
            reachable = [each for each in order if files.exists(f"{each}/topic.json")]
            assert assert_same(reachable, files) == [*found, b"after"], what
        except Exception as error:
            raise AssertionError(what) from error
        return Judged(1)

    def _go_on(self, files: CrashFS, order: list[str], forget_replicas: list[str]) -> list[bytes]:
        """Open the topic, append, and open it once more; the records that were there at first."""
        own, *others = order
        with testing.open_topic(
            own, files=files, replicas=others, forget_replicas=forget_replicas, replica_timeout=30.0
        ) as topic:
            found = values_of(topic)
            topic.append(b"after", sync=True)
        with testing.open_topic(own, files=files, replicas=others, replica_timeout=30.0) as topic:
            assert values_of(topic) == [*found, b"after"]
        return found

    def _check(self, found: list[bytes], at: int, what: str) -> None:
        """They are neighbours of those that were appended, with all that were acknowledged and not dropped."""
        kept = max(count for since, count in self.acknowledged if since <= at)
        dropped = max(count for since, count in self.dropped if since <= at)
        if found:
            first = self.appended.index(found[0])
            assert found == self.appended[first : first + len(found)], what
            assert first <= dropped and first + len(found) >= kept, what
        else:
            assert kept <= dropped, what


def _part(state: CrashState, place: str) -> Tree:
    return {path: content for path, content in state.image.tree().items() if path.startswith(place[:2])}


def _is_made(tree: Tree, places: Sequence[str]) -> bool:
    """Whether all directories are whole members."""
    files = CrashFS(Image.of(tree))
    found = [read_members(files, each) for each in places]
    return all(each is not None and each.version for each in found)


def _last_segment(tree: Tree, place: str) -> str:
    return max(path for path in tree if path.startswith(place) and path.endswith(".log"))


def _cut(tree: Tree, place: str) -> Tree:
    """The last segment of the directory has lost its last bytes."""
    last = _last_segment(tree, place)
    return tree | {last: tree[last][: max(4096, len(tree[last]) - 100)]}


def _rotten(tree: Tree, place: str, chance: random.Random) -> Tree:
    """A sector of the directory's mark, or of the end of its last segment, is lost."""
    last = _last_segment(tree, place)
    path = chance.choice([last, f"{place}/0000/watermark"])
    if path == last:
        start = max(4096, len(tree[last]) - 512)
        return tree | {path: tree[path][:start] + bytes(len(tree[path]) - start)}
    return tree | {path: bytes(len(tree[path]))}


def _swapped(tree: Tree, one: str, other: str) -> Tree:
    """Each of the directories is mounted where the other was."""
    def turned(path: str) -> str:
        for here, there in ((one, other), (other, one)):
            if path.startswith(here):
                return there + path.removeprefix(here)
        return path

    return {turned(path): content for path, content in tree.items()}


class ReplicaWorld:
    """A topic with replicas on simulated devices, step by step, and what must always hold.

    What was acknowledged, or shown by an opening, is there after every later opening. At most one device at a time is
    lost or rotten; the next opening mends it.
    """

    def __init__(self, acks: Acks, seed: int) -> None:
        self.chance = random.Random(seed)
        self.acks: Acks = acks
        self.places = [f"/{device}/t" for device in ("ab" if acks == "all" else "abc")]
        self.kept: list[bytes] = []  # what must be there
        self.pending: list[list[bytes]] = []  # what else may be there, behind it
        self.faulty: str | None = None  # a place that is lost or rotten
        self.lost: str | None = None  # the same, if it is lost
        self.topic: Topic | None = None
        self.log: list[str] = []  # the steps, for a failure
        self._number = 0
        made = MemoryFiles()
        open_all(self.places, files=made, acks=acks, segment_bytes=4096).close()
        self.tree = made.tree()
        self._begin(self.tree)

    def _begin(self, tree: Tree) -> None:
        self.tree = tree
        self.fs = CrashFS(Image.of(tree))
        self.devices = Devices(self.fs)
        self._pending_before: list[list[bytes]] = []
        self._mended_at = 1 << 60  # the number of operations when an opening had mended all
        self.told = [(0, len(self.kept))]  # operations so far, and how much must be there

    def _tell(self) -> None:
        self.told.append((len(self.fs.operations), len(self.kept)))

    def note(self, step: str) -> None:
        self.log.append(step)

    # --- steps -------------------------------------------------------------------------------------------

    def open(self, order: Sequence[str], absent: str | None = None) -> None:
        """Open the topic in these directories, without one of them if that may be."""
        assert self.topic is None
        order, forget_replicas = list(order), list[str]()
        if self.faulty is not None:
            absent = None
            if self.lost is not None:
                forget_replicas = [self.lost]
                order.sort(key=lambda each: each == self.lost)
        if absent is not None and (self.acks == "all" or order[0] == absent):
            absent = None
        self.note(f"open {order} without {absent}, lose {forget_replicas}")
        with self.devices.gone(absent or "nowhere"):
            try:
                self.topic = open_all(order, files=self.devices, forget_replicas=forget_replicas)
            except LogError:
                if self.lost is None:
                    raise
                self.note("it was replaced already")  # by an opening that died then
                self.topic = open_all(order, files=self.devices)
        found = values_of(self.topic)
        behind = found[len(self.kept) :]
        assert found[: len(self.kept)] == self.kept, self.said(found)
        assert not behind or any(behind == each[: len(behind)] for each in self.pending), self.said(found)
        self._pending_before = self.pending
        self.kept, self.pending = found, [[]]
        self._tell()
        self._mended_at = len(self.fs.operations)

    def append(self, count: int) -> None:
        """Append records. Nothing is promised."""
        assert self.topic is not None
        for _ in range(count):
            self._number += 1
            value = b"%06d" % self._number + b"x" * self.chance.choice([1, 200, 700])
            self.pending[-1].append(value)
            self.topic.append(value)
        self.note(f"append {count}, up to {self._number}")

    def flush(self) -> None:
        """Flush; what it acknowledges must be kept."""
        assert self.topic is not None
        try:
            self.topic.flush()
        except TooFewCopiesError:
            self.note("a flush fails")
            return
        self.kept = [*self.kept, *self.pending[-1]]
        self.pending = [[]]
        self._tell()
        self.note("flush")

    def fail(self, place: str) -> None:
        """A device that is not the own one fails for some records."""
        assert self.topic is not None
        if place == self.topic.path:
            return
        self.note(f"{place} fails")
        with self.devices.failing(place):
            self.append(1)
            self.flush()
            self.append(1)
            self.flush()

    def come_back(self) -> None:
        """Wait until all are in step, or have another reason."""
        topic = self.topic
        assert topic is not None
        until(lambda: all(each.state != "left out" for each in topic.replicas()[1:] if each.id), "they come back")
        self.note("all are back")

    def roll(self) -> None:
        """Begin a new segment."""
        assert self.topic is not None
        try:
            self.topic.partition(0).roll()
        except TooFewCopiesError:
            return
        self.kept = [*self.kept, *self.pending[-1]]
        self.pending = [[]]
        self._tell()
        self.note("roll")

    def close(self) -> None:
        """Close the topic."""
        topic, self.topic = self.topic, None
        assert topic is not None
        try:
            topic.close()
            self.kept = [*self.kept, *self.pending[-1]]
            self.pending = [[]]
        except TooFewCopiesError:
            pass
        self.note("close")
        self.faulty = self.lost = None
        self._begin(self.fs.tree())

    def cut(self, devices: Sequence[str], share: float) -> None:
        """These devices lose their power, and the process dies, at an instant since the opening began."""
        operations = list(self.fs.operations)
        at = round(share * len(operations))
        kept = max(count for since, count in self.told if since <= at)
        self.pending.append([*self.kept[kept:], *self.pending[-1]])
        self.kept = self.kept[:kept]
        if at < self._mended_at:  # what one directory has alone was not given up yet
            self.pending += self._pending_before
        if at >= self._mended_at:
            self.faulty = self.lost = None
        tree: Tree = {}
        for place in self.places:
            found = list(_states_of(self.fs.before, operations[:at], place, seed=at))
            tree |= _part(self.chance.choice(found) if place in devices else found[0], place)
        topic, self.topic = self.topic, None
        if topic is not None:
            with suppress(LogError, OSError):
                topic.close()
        self.note(f"power cut of {devices} after {at} of {len(operations)} operations")
        self._begin(tree)
        for place in self.places:
            self._look(place)

    def _look(self, place: str) -> None:
        """What a reader of any directory sees now must be there from now on."""
        try:
            with testing.open_topic(place, files=self.fs, mode="r") as topic:
                shown = values_of(topic)
        except (LogError, OSError):  # it is harmed, or just being made
            return
        self.note(f"{place} shows {len(shown)}")
        if len(shown) > len(self.kept):
            more = shown[len(self.kept) :]
            assert shown[: len(self.kept)] == self.kept, self.said(shown)
            self.pending = [each[len(more) :] for each in self.pending if each[: len(more)] == more]
            assert self.pending, self.said(shown)
            self.kept = shown
        assert shown == self.kept[: len(shown)], self.said(shown)

    def harm(self, place: str, how: str) -> None:
        """A directory is lost or rotten while the topic is closed."""
        if self.topic is not None or self.faulty is not None or not _is_made(self.tree, self.places):
            return
        self.faulty = place
        self.note(f"{place} is {how}")
        if how == "lost":
            self.lost = place
            tree = {path: content for path, content in self.tree.items() if not path.startswith(place)}
        elif how == "cut":
            tree = _cut(self.tree, place)
        else:
            tree = _rotten(self.tree, place, self.chance)
        self._begin(tree)

    def said(self, found: list[bytes]) -> str:
        """What went wrong, in words."""
        short = [each[:6].decode() for each in found], [each[:6].decode() for each in self.kept]
        return "\n".join([*self.log, f"found {short[0]}, of which must be there {short[1]}"])


def _states_of(before: Image, operations: list[Operation], place: str, *, seed: int) -> Iterator[CrashState]:
    """The states of one device: first that without a cut."""
    own = [
        each for each in operations
        if each.path == "/" or (each.path.startswith(place[:2]) and not (
            each.path.endswith("/lock") and each.name in ("write", "truncate")
        ))
    ]  # fmt: skip
    return crash_states(before, own, since=len(own), seed=seed, random=3)


def walk(seed: int, steps: int) -> ReplicaWorld:
    """Steps at random by the seed; a failure says all of them."""
    chance = random.Random(f"walk {seed}")
    world = ReplicaWorld(chance.choice(["quorum", "quorum", "all"]), seed)
    try:
        for _ in range(steps):
            step(world, chance)
        if world.topic is not None:
            world.close()
        world.open(world.places)
        world.append(1)
        world.flush()
        world.close()
        assert_same(world.places, world.fs)
    except Exception as error:
        raise AssertionError("\n".join([f"seed {seed}", *world.log])) from error
    return world


def step(world: ReplicaWorld, chance: random.Random) -> None:
    """One step that may be taken now."""
    place = chance.choice(world.places)
    if world.topic is None:
        if chance.random() < 0.2:
            world.harm(place, chance.choice(["lost", "cut", "rotten"]))
        world.open(chance.sample(world.places, len(world.places)), chance.choice([None, place]))
        if chance.random() < 0.3:  # it dies before it does anything
            world.cut([each for each in world.places if chance.random() < 0.5], chance.random())
        return
    match chance.randrange(8):
        case 0 | 1:
            world.append(chance.choice([1, 1, 5]))
        case 2:
            world.append(1)
            world.flush()
        case 3:
            world.fail(place)
        case 4:
            world.come_back()
        case 5:
            world.roll()
        case 6:
            world.close()
        case 7:
            world.cut([each for each in world.places if chance.random() < 0.5], chance.random())
