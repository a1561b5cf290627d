"""Chains, as a model: copies of copies of a topic are promoted, by several at once, and promotions are cut.

A topic is written, mirrored, and mirrors are mirrored. Two processes promote copies of their choice, and each may die
at any step. Whatever the order, there is never more than one directory that takes appends without force, and the one
that takes them has every acknowledged record.

    copies/chain.py       from a copy to the topic's leader, or to the last one while there is none
    copies/promotion.py     lock the leader, look again, copy, supersede, take its role, let go
    copies/mirrors.py      where a mirror may be made, and that its file names its source
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from explore import Wrong, explore

LEADER, MIRROR, SUPERSEDED, NOTHING = "leader", "mirror", "superseded", "nothing"
RECORDS = 1
NOBODY = -1
SEVERAL = "the chain is a circle"


class Place(NamedTuple):
    """A directory."""

    role: str = NOTHING
    of: int = NOBODY
    records: int = 0
    locked_by: int = NOBODY  # a promoting process


class Promoter(NamedTuple):
    """A process that promotes a copy, and how far it is."""

    at: str = "idle"
    copy: int = NOBODY
    former: int = NOBODY  # what it takes the place of


class World(NamedTuple):
    """Directories, of which the first is the topic, and processes."""

    places: tuple[Place, ...]
    promoters: tuple[Promoter, ...] = (Promoter(), Promoter())
    acknowledged: int = 0
    may_force: bool = False  # once
    forced: int = 0
    crashes: int = 1  # that may still happen

    def put(self, number: int, **facts: object) -> World:
        changed = self.places[number]._replace(**facts)  # type: ignore[arg-type]
        return self._replace(places=(*self.places[:number], changed, *self.places[number + 1 :]))

    def let(self, process: int, **facts: object) -> World:
        changed = self.promoters[process]._replace(**facts)  # type: ignore[arg-type]
        return self._replace(promoters=(*self.promoters[:process], changed, *self.promoters[process + 1 :]))

    def without_locks(self, process: int) -> World:
        free = (each._replace(locked_by=NOBODY) if each.locked_by == process else each for each in self.places)
        return self._replace(places=tuple(free))

    def canonical(self) -> World:
        """The same state, whichever process is called the first."""
        one, other = self.promoters
        if one <= other:
            return self
        names = {0: 1, 1: 0, NOBODY: NOBODY}
        places = tuple(each._replace(locked_by=names[each.locked_by]) for each in self.places)
        return self._replace(promoters=(other, one), places=places)


def world_of(places: int, *, promoters: int = 2, may_force: bool = False) -> World:
    processes = (*(Promoter("done") for _ in range(2 - promoters)), *(Promoter() for _ in range(promoters)))
    return World((Place(LEADER), *(Place() for _ in range(places - 1))), processes, may_force=may_force)


def former_of(world: World, copy: int, mistake: str) -> int | None:
    """Where the chain from a copy leads; None if it is a circle."""
    here, seen, last = world.places[copy].of, [copy], NOBODY
    if mistake == "it looks at its source only":
        return NOBODY if world.places[here].role == SUPERSEDED else here
    while here not in seen:
        place = world.places[here]
        if place.role == LEADER:
            return here
        if place.role == SUPERSEDED:
            last = here
        seen.append(here)
        here = place.of
    if mistake == "a superseded topic has nothing that the copy lacks":
        return NOBODY
    return NOBODY if mistake == SEVERAL else None if last == NOBODY else last


def steps(world: World, mistake: str = "") -> Iterator[tuple[str, World]]:
    """The next step of each process."""
    _check(world)
    for name, after in _steps(world, mistake):
        yield name, after.canonical()


def _steps(world: World, mistake: str) -> Iterator[tuple[str, World]]:
    for number, place in enumerate(world.places):
        if place.role == LEADER and place.locked_by == NOBODY and world.acknowledged < RECORDS:
            after = world.put(number, records=place.records + 1)
            yield f"write at {number}", after._replace(acknowledged=world.acknowledged + 1)
        for source, other in enumerate(world.places):
            if source != number and other.role != NOTHING and _may_follow(world, number, source, mistake):
                after = world.put(number, role=MIRROR, of=source, records=other.records)
                yield f"mirror {source} to {number}", after
    for process, promoter in enumerate(world.promoters):
        yield from _promote(world, process, promoter, mistake)
        if promoter.at not in ("idle", "done") and world.crashes:
            dead = world.without_locks(process).let(process, at="done", copy=NOBODY, former=NOBODY)
            yield f"process {process} dies", dead._replace(crashes=world.crashes - 1)


def _may_follow(world: World, number: int, source: int, mistake: str) -> bool:
    """Whether a mirror of the source may be made there: its chain leads elsewhere, or it is the copy's source."""
    place = world.places[number]
    if place.role == LEADER or place.locked_by != NOBODY:
        return False
    here, seen = source, [number]
    while world.places[here].role in (MIRROR, SUPERSEDED) and here not in seen:
        seen.append(here)
        here = world.places[here].of
    is_its_own = place.role == MIRROR and place.of == source
    return here != number or is_its_own or mistake == SEVERAL


def _promote(world: World, process: int, promoter: Promoter, mistake: str) -> Iterator[tuple[str, World]]:
    copy, former = promoter.copy, promoter.former
    who = f"{process} promotes {copy}: "
    unlooked = mistake == "it does not look again under the locks"
    match promoter.at:
        case "idle":
            for number, place in enumerate(world.places):
                if place.role == MIRROR:
                    yield f"{process} begins with {number}", world.let(process, at="look", copy=number)
                if place.role == MIRROR and place.locked_by == NOBODY and world.may_force:
                    yield f"force {number}", world.put(number, role=LEADER)._replace(may_force=False, forced=1)
        case "look":
            found = former_of(world, copy, mistake)
            if world.places[copy].role != MIRROR or found is None:
                yield who + "refused", _over(world, process)
            elif found == NOBODY:
                yield who + "nothing is to be taken over", world.let(process, at="take the role")
            else:
                yield who + "it looks", world.let(process, at="lock", former=found)
        case "lock":
            if world.places[former].locked_by != NOBODY:
                yield who + f"{former} is locked", _over(world, process)
            else:
                after = world.put(former, locked_by=process)
                yield who + f"it locks {former}", after.let(process, at="copy" if unlooked else "look again")
        case "look again":
            same = world.places[copy].role == MIRROR and former_of(world, copy, mistake) == former
            after = world if same else world.without_locks(process)
            yield who + "it looks again", after.let(process, at="copy" if same else "look")
        case "copy":
            if world.places[copy].locked_by not in (NOBODY, process):
                yield who + "it is locked", _over(world, process)
            else:
                source = world.places[copy].of if mistake == "it copies from its source" else former
                after = world.put(copy, of=former, records=world.places[source].records, locked_by=process)
                yield who + "it copies", after.let(process, at="supersede")
        case "supersede":
            after = world.put(former, role=SUPERSEDED, of=copy)
            if mistake == "it lets go before it has its role":
                after = after.put(former, locked_by=NOBODY).put(copy, locked_by=NOBODY)
            if mistake == "it takes its role first":
                after = world.put(copy, role=LEADER)
            yield who + f"it supersedes {former}", after.let(process, at="take the role")
        case "take the role":
            after = world.put(copy, role=LEADER)
            if mistake == "it takes its role first":
                after = world.put(former, role=SUPERSEDED, of=copy)
            yield who + "it has its role", _over(after, process)


def _over(world: World, process: int) -> World:
    return world.without_locks(process).let(process, at="idle", copy=NOBODY, former=NOBODY)


def _check(world: World) -> None:
    leaders = [each for each in world.places if each.role == LEADER]
    if len(leaders) > 1 + world.forced:
        raise Wrong("two directories take appends")
    if not world.forced and any(each.records != world.acknowledged for each in leaders):
        raise Wrong("an acknowledged record is lost")


@pytest.mark.parametrize(
    "world",
    [world_of(3), world_of(4, promoters=1), world_of(3, promoters=1, may_force=True)],
    ids=["3, two processes", "4, one process", "3, one process, and force once"],
)
def test_one_directory_takes_appends_and_has_all_that_was_acknowledged(world: World) -> None:
    assert explore(world, steps) > 1_000


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ("it looks at its source only", "two"),
        ("a superseded topic has nothing that the copy lacks", "two|lost"),
        ("it does not look again under the locks", "two|lost"),
        ("it copies from its source", "lost"),
        ("it lets go before it has its role", "two"),
        ("it takes its role first", "two"),
        (SEVERAL, "two|lost"),
    ],
)
def test_each_rule_of_a_promotion_is_needed(mistake: str, found: str) -> None:
    with pytest.raises(Wrong, match=found):
        explore(world_of(3), lambda world: steps(world, mistake))
