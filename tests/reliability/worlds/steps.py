"""Steps: what a program does with the topic while it has it open.

Invariant: a step notes what it is about to do before it does it, and what is acknowledged after that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pyarrow as pa

import loglib
from loglib import CorruptLogError, Job, LogError, OffsetOutOfRangeError, StaleGenerationError, Topic
from loglib.errors import ShareReplacedError

from .oracle import Wrong
from .world import World

__all__ = [
    "ALWAYS",
    "BY_FEATURE",
    "IN_CHILDREN",
    "Step",
    "append_many",
    "archive",
    "mirror",
    "pass_of_mirror",
    "roll",
    "tier",
    "transact",
]

MANY_VALUES = 30
JOBS = "jobs"
BIG_BYTES, BIG_VALUES = 30_000, 50  # more than what a transaction stages in memory


def append(world: World, topic: Topic) -> None:
    choose = world.choose
    more: dict[str, Any] = {}
    headers, timed, key, sync = choose.random() < 0.5, choose.random() < 0.3, world.key(), choose.random() < 0.5
    time = 10**15 + choose.below(10**15)
    if headers and "headers" in world.on:
        more["headers"] = [("h", b"%d" % world.number)]
    if timed:
        more["timestamp"] = time
    value = world.value()
    topic.append(value, key=key, sync=sync, **more)
    world.pending.append(value)
    if sync:
        world.acknowledge([value])


def append_many(world: World, topic: Topic) -> None:
    choose = world.choose
    more: dict[str, Any] = {}
    count, keyed, placed = 1 + choose.below(MANY_VALUES), choose.random() < 0.5, choose.random() < 0.3
    partition, headers = choose.below(world.partitions), choose.random() < 0.3
    values = [world.value() for _ in range(count)]
    if keyed:
        more["keys"] = [b"k%d" % (number % 5) for number in range(count)]
    if placed:
        more["partition"] = partition
    if headers and "headers" in world.on:
        more["headers"] = [None if number % 2 else [("a", b"b"), ("c", b"")] for number in range(count)]
    topic.append_many(values, **more)
    world.pending += values


def flush(world: World, topic: Topic) -> None:
    world.flush(topic)


def roll(world: World, topic: Topic) -> None:
    world.flush(topic)
    for partition in topic.partitions:
        if world.choose.random() < 0.6:
            partition.roll()


def check(world: World, topic: Topic) -> None:
    world.flush(topic)
    world.check()


def alter(world: World, topic: Topic) -> None:
    codec = world.choose.pick(("none", "zlib", "zstd"))
    topic.alter(
        batch_records=world.choose.pick((1, 7, 100)), compression=codec if "compression" in world.on else "none"
    )
    world.follow_policies(topic)


def arrow(world: World, topic: Topic) -> None:
    values = [world.value() for _ in range(1 + world.choose.below(20))]
    keys = [b"k%d" % (number % 5) for number in range(len(values))]
    topic.append_arrow(pa.table({"value": pa.array(values, pa.binary()), "key": pa.array(keys, pa.binary())}))
    world.pending += values


def produce(world: World, topic: Topic) -> None:
    """A producer goes on where it was, and repeats what it has appended."""
    choose = world.choose
    partition, name = choose.below(world.partitions), f"p{choose.below(2)}"
    flushes, repeats = choose.random() < 0.5, choose.random() < 0.7
    last = topic.partition(partition).last_sequence(name)
    if (last or 0) < world.numbers.get((partition, name), 0) and not world.ledger.free:
        raise Wrong(f"producer {name} of {partition} is at {last}, acknowledged {world.numbers[partition, name]}")
    number, value = (last or 0) + 1, world.value()
    topic.append(value, partition=partition, producer=(name, number))
    world.pending.append(value)
    if flushes:
        world.flush(topic)
        world.note("world", "noted_producer", partition, name, number)
    if repeats:
        topic.append(world.value(given=False), partition=partition, producer=(name, number))


# --- transactions ----------------------------------------------------------------------------------------------


def transact(
    world: World, topic: Topic, *, app: str = "app", commits: Any = None, accepts: Job | None = None
) -> tuple[bytes, ...]:
    """Commit a transaction in orders and bills; returns its values in orders. May be big, or aborted."""
    choose = world.choose
    size, kind, others = choose.random(), choose.random(), choose.random() < 0.5
    interleaved, count = choose.random() < 0.3, 1 + choose.below(4)
    mine: list[bytes] = []
    bills: list[bytes] = []
    aborted = kind < 0.15 and commits is None and accepts is None
    with world.open_bills() if others else nullcontext() as other, suppress(_Abort), world.transaction(app) as tx:
        for _ in range(count):
            mine.append(world.value())
            tx.append(topic, mine[-1], partition=choose.below(world.partitions))
            if interleaved:
                append(world, topic)
        if size < 0.1:
            big = [world.value(size=BIG_BYTES) for _ in range(BIG_VALUES)]
            tx.append_many(topic, big, partition=0)
            mine += big
        if other is not None:
            bills.append(world.value("bills"))
            tx.append(other, bills[-1])
        if commits is not None:
            tx.commit(commits)
        if accepts is not None:
            tx.accept(accepts)
        world.note("orders", "again", tuple(mine))
        sections = [("orders", tuple(mine)), *([("bills", tuple(bills))] if bills else [])]
        if aborted:
            world.note("orders", "refused", tuple(mine))
            world.note("bills", "refused", tuple(bills))
            raise _Abort
        world.note("world", "noted_section", sections, "begun")
    if not aborted:
        world.note("world", "noted_section", sections, "committed")
        world.note("orders", "acknowledged", tuple(mine))
        world.note("bills", "acknowledged", tuple(bills))
    return tuple(mine)


class _Abort(Exception):
    """The body of a transaction has failed."""


def transaction(world: World, topic: Topic) -> None:
    world.flush(topic)
    transact(world, topic)


# --- copies ----------------------------------------------------------------------------------------------------


def mirror(world: World, topic: Topic | None = None) -> None:
    if topic is not None:
        world.flush(topic)
    pass_of_mirror(world)
    if topic is not None:
        world.flush(topic)
    world.check_copy(world.other)


def pass_of_mirror(world: World) -> None:
    set_back = world.ledger.free or world.is_rewound or world.floor is not None or "hold" in world.on
    loglib.copies.mirror(world.path, world.other, on_divergence="restart" if set_back else "raise")


def snapshot(world: World, topic: Topic) -> None:
    world.flush(topic)
    to = world.fresh("snapshot")
    loglib.copies.snapshot(world.path, to, links=world.choose.random() < 0.5)
    world.check_copy(to)


def archive(world: World, topic: Topic) -> None:
    passes = world.ledger.free or world.has_gaps or world.floor not in (None, world.archive)
    try:
        loglib.offload.archive(topic, world.archive, on_damage="skip" if passes else "raise")
    except LogError as error:
        if not (world.is_rewound or (isinstance(error, OffsetOutOfRangeError) and world.ledger.free)):
            raise
        world.give_up_archive()
    else:
        world.note("world", "noted_archived")


def tier(world: World, topic: Topic) -> None:
    try:
        loglib.offload.tier(topic, world.place)
    except LogError as error:
        if isinstance(error, CorruptLogError) and "does not count: remove it" in str(error) and world.has_gaps:
            os.remove(error.path)  # uploaded by a process that died, before a repair changed the segment
            tier(world, topic)
            return
        if not (world.is_rewound or (isinstance(error, OffsetOutOfRangeError) and world.ledger.free)):
            raise
        world.give_up_place()
    else:
        world.note("world", "noted_placed")


# --- retention and groups --------------------------------------------------------------------------------------


def retain(world: World, topic: Topic) -> None:
    topic.retain()


def delete_before(world: World, topic: Topic) -> None:
    world.flush(topic)
    partition, at = topic.partition(world.choose.below(world.partitions)), world.choose.random()
    world.note("world", "noted_cut")
    low, high = partition.log_start_offset, partition.high_watermark
    if low < high:
        partition.delete_before(low + int(at * (high - low)))


def group(world: World, topic: Topic) -> None:
    """A member handles all that is there, and commits it by itself or in a transaction. Nothing comes again."""
    name, in_a_transaction = world.choose.pick(("g1", "holder")), world.choose.random() < 0.4
    world.flush(topic)
    if world.is_rewound:
        with suppress(StaleGenerationError):  # the store knows a later owner: the next one is above it
            _handle(world, topic, name, in_a_transaction=in_a_transaction)
            return
    _handle(world, topic, name, in_a_transaction=in_a_transaction)


def _handle(world: World, topic: Topic, name: str, *, in_a_transaction: bool) -> None:
    done = world.handled.setdefault(name, set())
    with topic.group(name, commit="manual", on_out_of_range="start") as member:
        got: list[bytes] = []
        while some := member.poll(timeout=0):
            got += [record.value or b"" for record in some]
        again = [value for value in got if value in done]
        if again and not world.repeats:
            raise Wrong(f"group {name} got {again[0][:12]!r} again after its commit")
        world.note("world", "noted_begun", name, tuple(got))
        if got and in_a_transaction and "tx" in world.on:
            transact(world, topic, app="etl", commits=member)
        else:
            member.commit()
    world.note("world", "noted_group", name, tuple(got))


# --- jobs -------------------------------------------------------------------------------------------------------


def jobs(world: World, topic: Topic) -> None:
    """A worker settles what is there, in one way or another. Nothing that is settled comes again.

    Some records may stay in its hand, and are released when it leaves. Or it settles all, and nothing was left out.
    """
    choose = world.choose
    settles_all, most, in_a_transaction = choose.random() < 0.4, 1 + choose.below(40), choose.random() < 0.3
    world.flush(topic)
    try:
        share = topic.share(JOBS, max_attempts=60_000, order=world.order)
    except ShareReplacedError:
        if not world.is_rewound:
            raise
        topic.reset_share(JOBS, "begin")
        world.note("world", "noted_reset", world.share)
        share = topic.share(JOBS)
    with share:
        there = {record.value or b"" for record in topic.read()}
        for number, job in enumerate(share.follow(0.0)):
            if not settles_all and number >= most:
                break
            _settle(world, topic, job, settles_all=settles_all, in_a_transaction=in_a_transaction)
    if "hold" not in world.on:  # retention may have dropped some in the middle, which the share has told
        there &= {record.value or b"" for record in topic.read()}
    left = there - world.begun_jobs()
    if settles_all and left:
        raise Wrong(f"a share has passed over {sorted(left)[:2]}")


def _settle(world: World, topic: Topic, job: Job, *, settles_all: bool, in_a_transaction: bool) -> None:
    value, how, name = job.value or b"", world.choose.random(), world.share
    if value in world.handled.get(name, ()) and not world.repeats:
        raise Wrong(f"job {value[:12]!r} came again after it was settled")
    if how < 0.2 and not settles_all:
        job.release()
        return
    world.note("world", "noted_begun", name, (value,))
    if how < 0.3:
        job.reject("by chance")
    elif how < 0.35 and in_a_transaction and "tx" in world.on and not world.is_rewound:
        transact(world, topic, app="jobs", accepts=job)
    else:
        job.accept()
    world.note("world", "noted_group", name, (value,))


# --- which ------------------------------------------------------------------------------------------------------

Step = Callable[[World, Topic], None]
ALWAYS: tuple[Step, ...] = (append, append, append_many, append_many, append_many, flush, roll, roll, check, alter)
BY_FEATURE: dict[str, tuple[Step, ...]] = {
    "tx": (transaction, transaction, transaction),
    "producers": (produce, produce),
    "arrow": (arrow, arrow),
    "mirror": (mirror, mirror),
    "snapshot": (snapshot,),
    "archive": (archive, archive),
    "tier": (tier, tier),
    "retention": (retain, retain),
    "hold": (group,),
    "groups": (group, group),
    "deletebefore": (delete_before,),
    "jobs": (jobs, jobs),
}
IN_CHILDREN = (append, append_many, append_many, flush, roll)
