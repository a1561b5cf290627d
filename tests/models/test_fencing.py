"""Fencing, as a model: a new owner of a partition ends the transactions of the former owner.

The former owner commits input 0 in a transaction. Meanwhile a new owner claims the partition, ends the former one's
transactions, reads the commits, and commits input 0 itself if nobody has. A third process folds the store into a
checkpoint. Wherever the three meet, the input takes effect once, and a commit that was acknowledged stays.

    transactions/group_commits.py     the file `transacted` (the mark), the fence, the pending commits
    transactions/store.py             numbers, checkpoints, and a look back after a link
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from explore import Wrong, explore

FORMER, NEW = 3, 4  # generations


class Entry(NamedTuple):
    """What stands under a number of the store."""

    number: int
    kind: str  # "commit" or "fence"
    generation: int


class World(NamedTuple):
    """Files that all see, and how far each process is."""

    generation: int = FORMER
    marked: bool = False  # the group's commits may be part of transactions
    entries: tuple[Entry, ...] = ()
    checkpoint: int = 0  # entries up to this number are void, but those that it has folded
    folded: tuple[Entry, ...] = ()
    former: str = "begin"
    former_saw: int = 0  # the highest number when it looked
    new: str = "claim"
    new_saw: int = 0
    folder: str = "fold"

    def known(self) -> tuple[Entry, ...]:
        """What a process that reads the store finds."""
        return self.folded + tuple(each for each in self.entries if each.number > self.checkpoint)

    def highest(self) -> int:
        return max([self.checkpoint, *(each.number for each in self.known())])

    def has(self, number: int) -> bool:
        return any(each.number == number for each in self.entries)

    def link(self, kind: str, generation: int, number: int) -> World:
        return self._replace(entries=(*self.entries, Entry(number, kind, generation)))


def steps(world: World, mistake: str = "") -> Iterator[tuple[str, World]]:
    """The next step of each process."""
    _check(world)
    yield from _former(world, mistake)
    yield from _new(world, mistake)
    if world.folder == "fold" and world.highest() > world.checkpoint:
        yield "fold", world._replace(checkpoint=world.highest(), folded=world.known(), folder="delete")
    if world.folder == "delete":
        left = tuple(each for each in world.entries if each.number > world.checkpoint)
        yield "delete what is folded", world._replace(entries=left, folder="end")


def _former(world: World, mistake: str) -> Iterator[tuple[str, World]]:
    """It leaves the mark, checks that it owns the partition, looks at the store, and links its commit."""
    late = mistake == "it checks before it marks"
    owns = world.generation == FORMER
    match world.former:
        case "begin":
            yield "the former owner begins", world._replace(former="check" if late else "mark")
        case "mark":
            yield "it marks", world._replace(marked=True, former="look" if late else "check")
        case "check":
            yield "it checks", world._replace(former="refused" if not owns else "mark" if late else "look")
        case "look":
            fenced = any(each.kind == "fence" for each in world.known())
            yield "it looks", world._replace(former="refused" if fenced else "link", former_saw=world.highest())
        case "link":
            number = world.former_saw + 1
            if not world.has(number):
                yield f"it links {number}", world.link("commit", FORMER, number)._replace(former="look back")
            elif mistake == "it takes the next number without a look":
                yield f"{number} is taken", world._replace(former_saw=number)
            else:
                yield f"{number} is taken", world._replace(former="look")
        case "look back":
            number = world.former_saw + 1
            void = number <= world.checkpoint and Entry(number, "commit", FORMER) not in world.folded
            believed = not void or mistake == "it does not look back"
            yield "it looks back", world._replace(former="acknowledged" if believed else "refused")


def _new(world: World, mistake: str) -> Iterator[tuple[str, World]]:
    """It claims the partition, looks for the mark, fences, reads the commits, and commits what nobody has."""
    early = mistake == "it reads the commits before it fences"
    match world.new:
        case "claim":
            yield "the new owner claims", world._replace(generation=NEW, new="look for the mark")
        case "look for the mark":
            yield "it looks for the mark", world._replace(new="fence" if world.marked and not early else "read")
        case "fence":
            yield "it reads the store", world._replace(new="link the fence", new_saw=world.highest())
        case "link the fence":
            number = world.new_saw + 1
            after = "commit" if early else "read"
            if world.has(number):
                yield f"{number} is taken", world._replace(new="fence")
            else:
                yield f"it links the fence {number}", world.link("fence", NEW, number)._replace(new=after)
        case "read":
            done = any(each.kind == "commit" for each in world.known())
            fence_now = early and world.marked
            yield "it reads the commits", world._replace(new="end" if done else "fence" if fence_now else "commit")
        case "commit":
            yield "it reads the store", world._replace(new="link the commit", new_saw=world.highest(), marked=True)
        case "link the commit":
            number = world.new_saw + 1
            if world.has(number):
                yield f"{number} is taken", world._replace(new="commit")
            else:
                yield f"it links {number}", world.link("commit", NEW, number)._replace(new="end")


def _check(world: World) -> None:
    commits = [each for each in set(world.known()) if each.kind == "commit"]
    if len(commits) > 1:
        raise Wrong("the input takes effect twice")
    if world.former == "acknowledged" and not any(each.generation == FORMER for each in commits):
        raise Wrong("a commit was acknowledged and is void")


def test_new_owner_and_former_owner_never_both_commit() -> None:
    assert explore(World(), steps) > 150


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ("it checks before it marks", "twice"),
        ("it takes the next number without a look", "twice"),
        ("it reads the commits before it fences", "twice"),
        ("it does not look back", "void"),
    ],
)
def test_each_rule_of_the_fence_is_needed(mistake: str, found: str) -> None:
    with pytest.raises(Wrong, match=found):
        explore(World(), lambda world: steps(world, mistake))
