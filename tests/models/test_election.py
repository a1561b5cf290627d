"""Election, as a model: which directory's history an opening of a topic with replicas takes.

Each directory has a log, the epoch of the leader whose log it has accepted, and the highest epoch that it has promised.
An opening sees some directories. It chooses the one with the highest accepted epoch, and of these the longest log. All
that it sees promise a higher epoch first. Then it makes their logs equal, one batch at a time, and each accepts the
epoch when its log is complete. A leader appends in one directory, writes to the others, and acknowledges what enough
of them have. It may die between any two steps, and a later opening may see other directories.

Whatever happens, each opening takes a history with all that was acknowledged (copies/election.py, copies/assemble.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import pytest
from explore import Wrong, explore

Log = tuple[tuple[int, int], ...]  # of each batch: which opening wrote it, and where


class Directory(NamedTuple):
    """One of the places in which the topic is written."""

    promised: int = 0
    accepted: int = 0
    log: Log = ()


class Leader(NamedTuple):
    """The process that has the topic open."""

    epoch: int
    opening: int
    chosen: Log
    seen: frozenset[int]
    ready: frozenset[int] = frozenset()  # have accepted the epoch


class World(NamedTuple):
    """What is on the disks, and what the callers of all leaders were told."""

    directories: tuple[Directory, ...]
    openings: int = 0
    leader: Leader | None = None
    acknowledged: Log = ()

    def put(self, number: int, directory: Directory) -> World:
        changed = (*self.directories[:number], directory, *self.directories[number + 1 :])
        return self._replace(directories=changed)


class Protocol(NamedTuple):
    """The rules, and perhaps a mistake."""

    directories: int
    enough: int  # of them have what is acknowledged
    openings: int  # at most
    mistake: str = ""

    def start(self) -> World:
        return World((Directory(),) * self.directories)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """What may happen next."""
        if world.leader is not None:
            yield "it dies", world._replace(leader=None)
            yield from self._prepare(world, world.leader)
            yield from self._write(world, world.leader)
        elif world.openings < self.openings:
            yield from self._open(world)

    def _open(self, world: World) -> Iterator[tuple[str, World]]:
        least = max(self.enough, self.directories - self.enough + 1) - (self.mistake == "one directory too few")
        opening = world.openings + 1
        for count in range(least, self.directories + 1):
            for seen in combinations(range(self.directories), count):
                found = [world.directories[each] for each in seen]
                chosen = max(found, key=self._rank).log
                if chosen[: len(world.acknowledged)] != world.acknowledged:
                    raise Wrong(f"opening {seen} loses what was acknowledged")
                known = (each.accepted if self.mistake == "nothing is promised" else each.promised for each in found)
                leader = Leader(1 + max(known), opening, chosen, frozenset(seen))
                yield f"open {seen}", world._replace(openings=opening, leader=leader)

    def _rank(self, directory: Directory) -> tuple[int, int]:
        length = len(directory.log)
        if self.mistake == "the longest log is chosen":
            return length, directory.accepted
        if self.mistake == "the last batch decides":
            return (directory.log[-1][0] if directory.log else 0), length
        return directory.accepted, length

    def _prepare(self, world: World, leader: Leader) -> Iterator[tuple[str, World]]:
        """Promises, then the chosen history, then acceptance."""
        free = self.mistake == "nothing is promised"
        late = [each for each in leader.seen if world.directories[each].promised < leader.epoch and not free]
        for each in late:
            yield f"{each} promises", world.put(each, world.directories[each]._replace(promised=leader.epoch))
        for each in leader.seen - leader.ready:
            if each in late or (late and self.mistake != "some promises suffice"):
                continue
            directory = world.directories[each]
            if self.mistake == "it accepts before it has the log" and directory.accepted < leader.epoch:
                yield f"{each} accepts", world.put(each, directory._replace(accepted=leader.epoch))
                continue
            same = _common(directory.log, leader.chosen)
            if same < len(directory.log):
                yield f"{each} is cut", world.put(each, directory._replace(log=directory.log[:same]))
            elif same < len(leader.chosen):
                yield f"{each} copies", world.put(each, directory._replace(log=leader.chosen[: same + 1]))
            else:
                promised = max(leader.epoch, directory.promised)
                after = world.put(each, directory._replace(accepted=leader.epoch, promised=promised))
                yield f"{each} is ready", after._replace(leader=leader._replace(ready=leader.ready | {each}))

    def _write(self, world: World, leader: Leader) -> Iterator[tuple[str, World]]:
        """One batch for each leader: appended in its first directory, written to the others, acknowledged."""
        if not leader.ready:
            return
        logs = {each: world.directories[each].log for each in leader.ready}
        first, longest = min(leader.ready), max(logs.values(), key=len)
        if logs[first] == longest and not any(opening == leader.opening for opening, _ in longest):
            log = (*longest, (leader.opening, len(longest)))
            yield "append", world.put(first, world.directories[first]._replace(log=log))
        for each, log in logs.items():
            if len(log) < len(longest):
                yield f"write {each}", world.put(each, world.directories[each]._replace(log=longest[: len(log) + 1]))
        if len(logs) >= self.enough:
            end = sorted(map(len, logs.values()), reverse=True)[self.enough - 1]
            if end > len(world.acknowledged):
                yield "acknowledge", world._replace(acknowledged=longest[:end])


def _common(one: Log, other: Log) -> int:
    """The number of batches that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(("directories", "enough", "openings"), [(2, 2, 4), (3, 3, 3), (3, 2, 3)])
def test_no_opening_loses_what_was_acknowledged(directories: int, enough: int, openings: int) -> None:
    protocol = Protocol(directories, enough, openings)
    assert explore(protocol.start(), protocol.steps) > 5_000


@pytest.mark.parametrize(
    ("mistake", "openings"),
    [
        ("nothing is promised", 3),
        ("some promises suffice", 3),
        ("it accepts before it has the log", 3),
        ("one directory too few", 2),
        pytest.param("the last batch decides", 4, marks=pytest.mark.slow),
        pytest.param("the longest log is chosen", 4, marks=pytest.mark.slow),
    ],
)
def test_each_rule_of_an_opening_is_needed(mistake: str, openings: int) -> None:
    protocol = Protocol(3, 2, openings, mistake)
    with pytest.raises(Wrong, match="loses what was acknowledged"):
        explore(protocol.start(), protocol.steps)
