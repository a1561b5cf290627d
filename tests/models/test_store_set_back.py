"""Stores that are set back, as a model: a commit that returns is in every partition, and no reader sees half of one.

Three transactions are committed one after the other for two partitions. At any moment the process may die, and an
operator may copy the store, put the copy back, or replace the store by a new one; and copy one partition, and put it
back (transactions/fit.py, append/section_writer.py and log/log.py have the rules). Each order of steps is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from explore import Wrong, explore

TARGETS = {1: (0, 1), 2: (0,), 3: (0, 1)}  # by transaction: its partitions
MISTAKES = (
    "a number alone says that it is applied", "numbers are not compared before the commit",
    "a new store begins at 1", "a done number of another one shows a part", "a part is built on",
)  # fmt: skip


class Partition(NamedTuple):
    """What a partition's mark says, and what its log has."""

    last: tuple[int, int] = (0, 0)  # number and transaction that was applied last
    held: tuple[int, int] = (0, 0)
    store: int = 0  # which store gave the numbers
    log: tuple[tuple[int, bool], ...] = ()  # transactions, and whether as a whole


class Store(NamedTuple):
    """The entries by number, and which of them are done."""

    id: int = 1
    entries: tuple[int, ...] = ()  # the transaction of number 1, of number 2 and so on; 0 for one that is passed over
    done: frozenset[int] = frozenset()


class World(NamedTuple):
    """All of it."""

    store: Store = Store()
    partitions: tuple[Partition, Partition] = (Partition(), Partition())
    committed: int = 0  # transactions that were tried
    returned: frozenset[int] = frozenset()  # whose commit has returned
    backup: Store | None = None
    copy: Partition | None = None
    disasters: int = 0


def replaced(world: World, at: int, **changes: Any) -> World:
    partitions = list(world.partitions)
    partitions[at] = partitions[at]._replace(**changes)
    return world._replace(partitions=(partitions[0], partitions[1]))


def is_pending(store: Store, held: tuple[int, int]) -> bool:
    number, txn = held
    return number <= len(store.entries) and store.entries[number - 1] == txn and number not in store.done


def is_torn(partition: Partition) -> bool:
    return any(not whole for _, whole in partition.log)


def shown(world: World, partition: Partition, mistake: str) -> list[tuple[int, bool]]:
    """What a reader sees."""
    found = list(partition.log)
    if partition.held[0]:
        if is_pending(world.store, partition.held):
            return [each for each in found if each[0] != partition.held[1]]
        believes = mistake == "a done number of another one shows a part" and partition.held[0] in world.store.done
        if partition.last != partition.held and not believes:
            return [each for each in found if each[1]]
    return found


def check(world: World, mistake: str) -> None:
    for at, partition in enumerate(world.partitions):
        seen = shown(world, partition, mistake)
        if any(not whole for _, whole in seen):
            raise Wrong("a reader sees a part of a transaction")
        for txn in world.returned:
            if at in TARGETS[txn] and (txn, True) not in partition.log:
                raise Wrong(f"transaction {txn} was acknowledged, and is not in partition {at}")


def commit(world: World, mistake: str) -> World | None:
    """Commit the next transaction; None if it is refused."""
    txn, store = world.committed + 1, world.store
    highest = 0
    for at in TARGETS[txn]:
        partition = world.partitions[at]
        if partition.held[0] and not is_pending(store, partition.held) and is_torn(partition):
            if mistake != "a part is built on":
                return None
            world = replaced(world, at, held=(0, 0))
        last = max(partition.last[0], partition.held[0])
        if last > len(store.entries):
            if partition.store == store.id and mistake != "numbers are not compared before the commit":
                return None
            highest = max(highest, last)
    if mistake not in ("numbers are not compared before the commit", "a new store begins at 1"):
        store = store._replace(
            entries=store.entries + (0,) * (highest - len(store.entries)),
            done=store.done | set(range(len(store.entries) + 1, highest + 1)),
        )
    return world._replace(store=store._replace(entries=(*store.entries, txn)), committed=txn)


def applied(world: World, number: int, mistake: str) -> Iterator[tuple[str, World]]:
    """The steps of the process that applies an entry. None where a partition has another history."""
    txn = world.store.entries[number - 1]
    waiting = []
    for at in TARGETS[txn]:
        partition = world.partitions[at]
        trusts = mistake in (
            "a number alone says that it is applied", "numbers are not compared before the commit",
            "a new store begins at 1",
        )  # fmt: skip
        if partition.last[0] >= number and (trusts or (txn, True) in partition.log):
            continue
        waiting.append(at)
        if partition.last[0] >= number:
            continue  # it is not this transaction: nobody can apply it
        if partition.held != (number, txn):
            if not partition.held[0] or not (is_pending(world.store, partition.held) or is_torn(partition)):
                log = (*partition.log, (txn, False))
                yield f"hold {txn}@{at}", replaced(world, at, held=(number, txn), store=world.store.id, log=log)
        elif (txn, False) in partition.log:
            log = tuple((each, whole or each == txn) for each, whole in partition.log)
            yield f"end {txn}@{at}", replaced(world, at, last=(number, txn), log=log)
    if not waiting:
        done = world.store._replace(done=world.store.done | {number})
        yield f"done {txn}", world._replace(store=done, returned=world.returned | {txn})


def steps(world: World, mistake: str) -> Iterator[tuple[str, World]]:
    check(world, mistake)
    pending = [n for n, txn in enumerate(world.store.entries, 1) if n not in world.store.done and txn]
    if pending:
        yield from applied(world, pending[0], mistake)
    elif world.committed < len(TARGETS) and (after := commit(world, mistake)) is not None:
        yield f"commit {after.committed}", after
    if pending and world.committed < len(TARGETS) and (after := commit(world, mistake)) is not None:
        yield f"commit {after.committed} beside it", after
    for at, partition in enumerate(world.partitions):
        whole = partition.last == partition.held or not is_torn(partition)
        if partition.held[0] and whole and not is_pending(world.store, partition.held):
            yield f"release @{at}", replaced(world, at, held=(0, 0))
    if world.backup is None:
        yield "copy the store", world._replace(backup=world.store)
    if world.copy is None:
        yield "copy partition 0", world._replace(copy=world.partitions[0])
    if world.disasters < 2:
        more = world._replace(disasters=world.disasters + 1)
        if world.backup is not None:
            yield "put the store's copy back", more._replace(store=world.backup)
        yield "a new store", more._replace(store=Store(world.store.id + 1))
        if world.copy is not None:
            kept = {txn for txn, whole in world.copy.log if whole}
            returned = frozenset(each for each in world.returned if 0 not in TARGETS[each] or each in kept)
            yield "put the partition's copy back", replaced(more, 0, **world.copy._asdict())._replace(returned=returned)


def test_commit_that_returns_is_in_every_partition_whatever_became_of_the_store() -> None:
    assert explore(World(), lambda world: steps(world, "")) > 10_000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_rule_is_needed(mistake: str) -> None:
    with pytest.raises(Wrong):
        explore(World(), lambda world: steps(world, mistake))
