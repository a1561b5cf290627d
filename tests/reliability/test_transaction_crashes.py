"""G18: after any crash each transaction is in all of its partitions, or in none, and each version once.

Programs run on a `CrashFS`: transactions over two topics with 2 and 1 partitions, small ones and staged ones, some with
a commit of a group; native records before, between, and inside of their sections; kills, also in the middle of a
transaction. The disk is cut at every operation. Then:

    a reader, before any writer      sees no half of a transaction, in no partition and no topic
    a member that joins the group    finds the commit of the last transaction that is committed
    writers open the topics          each transaction is whole or gone, and no later one without an earlier one;
                                     one that has returned is there; native records are at their offsets
    all transactions are repeated    each record is there once

Some of the recoveries are cut as well. No state has a byte of a transaction in a log without its entry in the store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple

import counts
import pytest
from crash_worlds import LEFT_OUT, Failure
from roomy import room_by_chance
from transaction_worlds import (
    APP,
    CALLS,
    PARTITIONS,
    PLACES,
    STORE,
    WEIGHTS,
    Fuse,
    Place,
    Rows,
    World,
    close,
    fixed_clock,
    join,
    new_process,
    open_topics,
    read,
    repeat,
    small,
    steady,
)

from loglib import CorruptLogError, Group, LogError, Topic, testing
from loglib.testing import CrashState, Image, Mode, Operation, crash_states
from loglib.transactions.manifest import decode, decode_checkpoint
from loglib.transactions.store import open_store

SHARDS = 2
STATES = 1_500  # per shard


class Found(NamedTuple):
    """What was found in a state."""

    rows: Rows
    committed: int  # version of the last transaction that is there, -1 for none


def token_of(value: bytes) -> int:
    """The version of the transaction whose value it is; -1 for a native one."""
    return int(value[1:].partition(b"-")[0]) if value.startswith(b"t") else -1


def whole(world: World, rows: Rows, place: Place) -> set[int]:
    """The versions of the transactions that the partition has; a half is a failure."""
    values: dict[int, list[bytes]] = {}
    for _, value in rows[place]:
        values.setdefault(token_of(value), []).append(value)
    values.pop(-1, None)
    if list(values) != sorted(values):
        raise Failure("phantoms", f"{place} has transactions in the order {list(values)}")
    for version, found in values.items():
        expected = world.txs[version].values.get(place) if version < len(world.txs) else None
        if found != expected:
            raise Failure("lost", f"{place} has {found} of transaction {version}, not {expected}")
    return set(values)


def together(world: World, rows: Rows) -> set[int]:
    """The versions that are there; one that is not in all of its partitions is a failure."""
    there = {place: whole(world, rows, place) for place in PLACES}
    versions = set().union(*there.values())
    for version in versions:
        for place in world.txs[version].values:
            if version not in there[place]:
                raise Failure("lost", f"transaction {version} is not in {place}, but elsewhere")
    return versions


def staged_bytes(image: Image) -> None:
    """Each transaction with a byte in a log must have its entry in the store."""
    tree = image.tree()
    versions = {
        int(found) for path, content in tree.items() if path.endswith(".log")
        for found in re.findall(rb"t(\d+)-\d+\|", content)
    }  # fmt: skip
    if not versions:
        return
    known = -1
    for path, content in tree.items():
        name = os.path.basename(path)
        if os.path.dirname(path) == STORE and not name.endswith(".tmp"):
            with suppress(CorruptLogError):
                if name.isdigit():
                    known = max(known, decode(content, path).version or 0)
                elif name.endswith(".checkpoint"):
                    apps = decode_checkpoint(content, path).apps
                    known = max(known, (apps[APP].version if APP in apps else -1) or 0)
    if max(versions) > known:
        raise Failure("phantoms", f"transaction {max(versions)} is in a log, and {known} is the last in the store")


class Judge:
    """Judges states, each set of files once, and counts them."""

    def __init__(self, *, nested_every: int = 50) -> None:
        self.found: dict[int, Found] = {}
        self.nested_every = nested_every
        self.nested = 0

    def judge(self, world: World) -> None:
        known: set[tuple[Any, int]] = set()
        for state in sampled(world.fs.before, world.fs.operations, world.choose, world.mode, 0.3):
            digest = state.image.digest(leaving_out=LEFT_OUT)
            if (digest, state.at) in known:
                continue
            known.add((digest, state.at))
            try:
                found = self.found.get(digest)
                if found is None:
                    found = self.found[digest] = self.find(world, state)
                self.compare(world, state, found)
            except Failure as failure:
                failure.add_note(f"{state!r}\n" + "\n".join(map(str, state.operations[-150:])))
                raise

    def compare(self, world: World, state: CrashState, found: Found) -> None:
        """Whether what was promised at this instant is there, and nothing that had not begun."""
        for tx, returned in zip(world.txs, world.returned, strict=True):
            if returned is not None and returned <= state.at and found.committed < tx.version:
                raise Failure("lost", f"transaction {tx.version} had returned at {returned}, and is gone")
            if tx.begun > state.at and found.committed >= tx.version:
                raise Failure("phantoms", f"transaction {tx.version} has begun later")
        for place in PLACES:
            there = {value: offset for offset, value in found.rows[place] if token_of(value) < 0}
            order = [value for _, value in found.rows[place] if token_of(value) < 0]
            begun = [each for each in world.natives[place] if each.begun <= state.at]
            if order != [each.value for each in begun if each.value in there]:
                raise Failure("phantoms", f"{place} has {order}, begun were {begun}")
            if state.whole or world.durability == "disk":
                least = max(count for at, count in world.promised[place] if at <= state.at)
            else:
                least = 0
            for number, each in enumerate(begun):
                gone = world.gone.get(each.value, 1 << 60) <= state.at or world.gone.get(each.value) is not None
                if each.value not in there and number < least and not gone:
                    raise Failure("lost", f"{place}: {each} was promised")
                if each.offset >= 0 and there.get(each.value, each.offset) != each.offset:
                    raise Failure("phantoms", f"{place}: {each} is at {there[each.value]}")

    def find(self, world: World, state: CrashState) -> Found:
        staged_bytes(state.image)
        try:
            before = self.read_before(world, state)
            standing = self.joined(world, state) if world.choose.random() < 0.3 else None
            files = Fuse(state.image)
            files.process = 100
            found = self.recovered(world, files)
            done = list(files.operations)
            self.went_on(world, files, found)
        except (LogError, OSError) as error:
            raise Failure("refused", repr(error)) from error
        for place, rows in before.items():
            if rows != found.rows[place][: len(rows)]:
                raise Failure("phantoms", f"{place}: a reader saw {rows}, then there was {found.rows[place]}")
        if standing is not None and standing != self.expected_commit(world, found):
            raise Failure("lost", f"a new owner found {standing}, not {self.expected_commit(world, found)}")
        if self.nested_every and len(self.found) % self.nested_every == 0:
            self.cut_again(world, state, done, found)
        return found

    def read_before(self, world: World, state: CrashState) -> Rows:
        """What readers see that come before any writer."""
        if world.durability == "os" and not state.whole:
            return {}  # readers must wait until a writer has mended the log
        if any(state.operations[each].path.endswith("/watermark") for each in state._torn):
            return {}  # two torn publications may take back one that was synced
        files = Fuse(state.image)
        topics = open_topics(files, "r")
        try:
            rows = read(topics)
            at_once: Rows = {place: [] for place in PLACES}
            for name in PARTITIONS:
                for record in topics[name].read():
                    at_once[name, record.partition].append((record.offset, record.value or b""))
        finally:
            close(topics)
        if rows != at_once:
            raise Failure("phantoms", f"read at once: {at_once}, and each partition: {rows}")
        together(world, rows)
        return rows

    def joined(self, world: World, state: CrashState) -> str | None:
        """The last commit that a new member finds before any writer applies what is pending."""
        if not world.with_group or "/data/orders/groups/etl/members/" not in str(sorted(state.image.tree())):
            return None
        files = Fuse(state.image)
        files.process = 200
        new_process()
        topics = open_topics(files, "r")
        group = None
        try:
            group = join(topics["orders"], "new")
            return meta_of(group)
        finally:
            files.kill()
            close(topics, group)

    def expected_commit(self, world: World, found: Found) -> str:
        metas = [str(tx.version) for tx in world.txs[: found.committed + 1] if tx.commits]
        return metas[-1] if metas else ""

    def recovered(self, world: World, files: Fuse) -> Found:
        """Open both topics for writing, in either order."""
        new_process()
        topics: dict[str, Topic] = {}
        for name in world.choose.sample(list(PARTITIONS), len(PARTITIONS)):
            topics |= {name: testing.open_topic(f"/data/{name}", files=files, clock=fixed_clock)}
        try:
            rows = read(topics)
            versions = together(world, rows)
            if versions and versions != set(range(max(versions) + 1)):
                raise Failure("lost", f"the transactions {sorted(versions)} are there")
            if files.exists(STORE):
                pending = open_store(files, STORE).pending()
                if pending:
                    raise Failure("lost", f"still pending: {[each.number for each in pending]}")
            return Found(rows, max(versions, default=-1))
        finally:
            files.kill()
            close(topics)

    def went_on(self, world: World, files: Fuse, found: Found) -> None:
        """Repeat all transactions. Each must be there once, and what was there must be there still."""
        files.process += 1
        new_process()
        topics = open_topics(files)
        group = join(topics["orders"], "next") if world.with_group else None
        try:
            if read(topics) != found.rows:
                raise Failure("lost", f"opened again, there is {read(topics)}, before it {found.rows}")
            if group is not None and meta_of(group) != self.expected_commit(world, found):
                raise Failure("lost", f"committed is {meta_of(group)}, not {self.expected_commit(world, found)}")
            for tx in world.txs:
                if repeat(topics, tx, group) != (tx.version <= found.committed):
                    raise Failure("lost", f"transaction {tx.version} behind {found.committed} was taken wrongly")
            rows = read(topics)
            if together(world, rows) != set(range(len(world.txs))):
                raise Failure("lost", f"after all repetitions there is {rows}")
            for place in PLACES:
                if rows[place][: len(found.rows[place])] != found.rows[place]:
                    raise Failure("lost", f"{place} had {found.rows[place]}, now {rows[place]}")
            for topic in topics.values():
                for damage in topic.verify().damage:
                    raise Failure("lost", str(damage))
        finally:
            files.kill()
            close(topics, group)

    def cut_again(self, world: World, cut: CrashState, operations: list[Operation], outer: Found) -> None:
        """Cut the recovery; what it had found must be found again."""
        for state in sampled(cut.image, operations, world.choose, world.mode, 0.3):
            self.nested += 1
            try:
                self.find_again(world, state, outer)
            except Failure as failure:
                failure.add_note(f"in the recovery, {state!r}\n" + "\n".join(map(str, state.operations)) + "\nafter")
                raise

    def find_again(self, world: World, state: CrashState, outer: Found) -> None:
        files = Fuse(state.image)
        files.process = 150
        try:
            if world.durability == "disk":
                self.read_before(world, state)
            inner = self.recovered(world, files)
            self.went_on(world, files, inner)
        except (LogError, OSError) as error:
            raise Failure("refused", repr(error)) from error
        if inner.committed != outer.committed:
            raise Failure("lost", f"recovered again, {inner.committed} is the last, and was {outer.committed}")


def meta_of(group: Group) -> str:
    metas = {commit.meta for commit in group.committed().values()}
    if len(metas) > 1:
        raise Failure("lost", f"the partitions of a commit differ: {metas}")
    return metas.pop() if metas else ""


def sampled(
    image: Image, operations: list[Operation], choose: Random, mode: Mode, share: float
) -> Iterator[CrashState]:
    """At this share of the instants: the states with all done and with none done, and some of the others."""
    seed = choose.randrange(1 << 30)
    for at, states in groupby(crash_states(image, operations, mode=mode, seed=seed, random=2), attrgetter("at")):
        if choose.random() < share or at == len(operations):
            all_done, *others = states
            yield from (all_done, *others[:1], *choose.sample(others[1:], min(3, len(others[1:]))))


def run(seed: int, judge: Judge, *, disk: type[Fuse] = Fuse) -> int:
    """Run one program, and judge the states that cuts at all its instants may leave.

    Returns how many pieces became segments.
    """
    world = World(seed, disk=disk)
    calls = world.choose.choices(list(CALLS), WEIGHTS, k=world.choose.randrange(2, 6))
    try:
        with small(world), room_by_chance(seed):
            for name in calls:
                CALLS[name](world)
        with steady(world.choose):
            judge.judge(world)
        return world.attached
    except Failure as failure:
        failure.add_note(f"seed {seed}, {world.durability}, {world.mode}: {calls}")
        raise
    finally:
        world.fs.kill()
        close(world.topics, world.group)


@pytest.mark.reliability
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_crash_splits_or_doubles_a_transaction(shard: int) -> None:
    judge, ran, attached = Judge(), 0, 0
    figures = {"lost": 0, "phantoms": 0, "refused": 0}
    try:
        while len(judge.found) + judge.nested < counts.scale(STATES) or (5 <= ran < 20 and attached <= ran // 10):
            attached += run(shard + SHARDS * ran, judge)
            ran += 1
        assert attached > ran // 10 or ran < 5, "a few programs may have none"
    except Failure as failure:
        figures[failure.kind] += 1
        raise
    finally:
        states = {"crash_states": len(judge.found), "cut_in_recovery": judge.nested}
        counts.count("G18", programs=ran, attached=attached, **states, **figures)
