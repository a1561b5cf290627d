"""Workloads for the crash engine: the calls that they are made of, and which lists of calls there are."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from random import Random
from typing import Any

import pyarrow as pa
from crash_worlds import Failure, Workload, World, account_with, judged, made, rows_in

from loglib import LogError, StorageFullError
from loglib.append.partitioner import by_crc32
from loglib.testing import MemoryFiles, Mode

# --- workloads -------------------------------------------------------------------------------------------


def _append(world: World) -> None:
    value = world.value(world.choose.choice((0, 40, 700)))
    world.note(0, world.topic.append(value, partition=0).offset, value)


def _append_sync(world: World) -> None:
    value = world.value(300)
    world.note(0, world.topic.append(value, partition=0, sync=True).offset, value)
    world.promise(0)


def _append_large(world: World) -> None:
    value = world.value(5000)
    world.note(0, world.topic.append_many([value], partition=0)[0].offsets.start, value)


def _append_many(world: World) -> None:
    values = [world.value(world.choose.choice((10, 900))) for _ in range(3)]
    _note_ranges(world, world.topic.append_many(values, partition=0), values)


def _append_keyed(world: World) -> None:
    keys = [b"a", b"b", b"c", b"d"]
    values = [world.value(100) for _ in keys]
    partitions = [by_crc32(key, world.config.partitions) for key in keys]
    for found in world.topic.append_many(values, keys=keys):
        rows = [(value, key) for value, key, each in zip(values, keys, partitions, strict=True) if each == found[0]]
        for offset, (value, key) in zip(found.offsets, rows, strict=True):
            world.note(found[0], offset, value, key)


def _append_arrow(world: World) -> None:
    """Batches of their own, written together: more than what is left of a segment."""
    values = [world.value(world.choose.choice((900, 3000))) for _ in range(5)]
    _note_ranges(world, world.topic.append_arrow(pa.table({"value": pa.array(values)}), partition=0), values)


def _produce(world: World) -> None:
    world.sequence += 1
    values = [world.value(50), world.value(50)]
    world.last_call = values, world.sequence
    _note_ranges(world, world.topic.append_many(values, partition=0, producer=("p", world.sequence)), values)


def _produce_many(world: World) -> None:
    """Use more producers than the header has room for here, so that a roll writes a file of them."""
    world.sequence += 1
    for name in ("q", "r", "s"):
        values = [world.value(20)]
        found = world.topic.append_many(values, partition=0, producer=(name, world.sequence))
        _note_ranges(world, found, values)


def _full(world: World) -> None:
    """Fill the disk, now or soon: records that the errors name are not in the log, and all others are."""
    world.fs.capacity = world.fs.used + world.choose.choice((0, 200, 1500, 6000))
    try:
        for size in (40, 5000, 40):
            value = world.value(size)
            try:
                world.note(0, world.topic.append(value, partition=0).offset, value)
            except StorageFullError as error:
                world.told(error)
        try:
            world.topic.flush()
            world.promise()
        except StorageFullError as error:
            world.told(error)
    finally:
        world.fs.capacity = None


def _retry(world: World) -> None:
    if world.last_call is None:
        return _produce(world)
    values, sequence = world.last_call
    found = world.topic.append_many(values, partition=0, producer=("p", sequence))
    offsets = [offset for each in found for offset in each.offsets]
    known = {row[1]: row[0] for row in world.accounts[0].contents}
    if known.get(values[0]) is None:  # lost in a crash, and appended again
        _note_ranges(world, found, values)
    elif offsets != [known[value] for value in values]:
        raise Failure("phantoms", f"tried again, the call was answered with {offsets}")
    return None


def _note_ranges(world: World, ranges: Any, values: Sequence[bytes]) -> None:
    offsets = [offset for each in ranges for offset in each.offsets]
    for offset, value in zip(offsets, values, strict=True):
        world.note(0, offset, value)


def _flush(world: World) -> None:
    world.topic.flush()
    world.promise()


def _roll(world: World) -> None:
    world.topic.partition(0).roll()
    world.promise(0, power=True)


def _drop(world: World) -> None:
    writer = world.topic.partition(0)._access.writer()
    start = max(segment.base_offset for segment in world.topic.partition(0).segments)
    if writer.drop_before(start):
        world.accounts[0].drops.append((world.now, start))


def _reopen(world: World) -> None:
    world.topic.close()
    world.promise(power=True)
    world.open()


def _receive(world: World) -> None:
    number = world.choose.randrange(1 << 30)
    frame, rows = frame_of(number)
    received = world.topic.partition(0).receive(io.BytesIO(frame))
    assert received is not None
    for offset, value in rows:
        world.note(0, received.start + offset, value)


def _crash(world: World) -> None:
    """Cut the power, or kill the process, and continue with what is left."""
    state = world.choose.choice(list(world.states(since=world.now)))
    world.topic.close()  # the topic of the process that is gone: its disk is no longer in use
    before = world.accounts
    world.start(state.image)
    world.accounts = []
    for number, account in enumerate(before):
        log = world.topic.partition(number)._access.log
        start, rows = log.mark().log_start_offset, rows_in(log)
        try:
            judged(account, state.at, power=not state.whole, log_start=start, rows=rows)
        except Failure as failure:
            failure.found_in(state, before)
            raise
        world.accounts.append(account_with([*account.contents[: account.serial_at(start)], *rows], start))
        world.accounts[-1].promise()


def _kill(world: World) -> None:
    """Kill the process, and open the topic again: what it had not synced is still pending."""
    world.note_marks()
    world.fs.kill()
    with suppress(LogError, OSError):  # its objects in this process can do nothing any more
        world.topic.close()
    world.open()
    for number, account in enumerate(world.accounts):
        log = world.topic.partition(number)._access.log
        start, rows = log.mark().log_start_offset, rows_in(log)
        judged(account, world.now, power=False, log_start=start, rows=rows)
        account.recovered(account.serial_at(start) + len(rows))


CALLS: dict[str, Callable[[World], None]] = {
    "append": _append, "append-sync": _append_sync, "append-large": _append_large, "append-many": _append_many,
    "append-keyed": _append_keyed, "append-arrow": _append_arrow, "produce": _produce, "retry": _retry,
    "flush": _flush, "roll": _roll, "drop": _drop, "reopen": _reopen, "receive": _receive, "kill": _kill, "full": _full,
    "produce-many": _produce_many, "crash": _crash,
}  # fmt: skip
SHORT = [name for name in CALLS if name != "crash"]
# At most the last of three calls: two calls show their effect on what follows.
LATE = ("full", "produce-many", "append-arrow")
WEIGHTS = {"crash": 1, "kill": 1, "retry": 1, "drop": 1, "reopen": 1, "append-sync": 3, "flush": 3, "append": 3}


def frame_of(number: int) -> tuple[bytes, list[tuple[int, bytes]]]:
    """A transfer frame with two batches of another log, and its records: (offset from the first, value)."""
    files = MemoryFiles()
    with made(files, Workload(()).config()) as topic:
        values = [b"%d/%d" % (number, each) + b"~" * 60 for each in range(3)]
        positions = [topic.append(values[0], partition=0), topic.append(values[1], partition=0)]
        topic.flush()
        positions.append(topic.append(values[2], partition=0, sync=True))
        out = files.create("/frame", 0o600)
        topic.partition(0).transfer(out, 0)
        frame = files.pread(out, 1 << 20, 0)
    start = positions[0].offset
    return frame, [(position.offset - start, value) for position, value in zip(positions, values, strict=True)]


# --- all of it -----------------------------------------------------------------------------------------------

MAKING = ("make a topic",)
LONGEST_SHORT = 3


def short_workloads(length: int, *, durability: str = "disk") -> Iterator[Workload]:
    """Every workload with this many calls."""
    for calls in product(SHORT, repeat=length):
        if length < LONGEST_SHORT or not set(LATE) & set(calls[:-1]):
            yield Workload(calls, durability, partitions=2 if "append-keyed" in calls else 1)


def long_workload(seed: int) -> Workload:
    """Some calls in an order that the seed determines."""
    choose = Random(f"a long workload/{seed}")
    partitions = choose.choice((1, 1, 1, 2))
    names = [name for name in CALLS if partitions > 1 or name != "append-keyed"]
    calls = choose.choices(names, [WEIGHTS.get(name, 2) for name in names], k=choose.randrange(4, 14))
    durability, compression = choose.choice(("disk", "disk", "os")), choose.choice(("none", "none", "zlib"))
    mode: Mode = "linux" if seed % 8 == 7 else "strict"
    return Workload(tuple(calls), durability, partitions, compression, seed, mode)


def making_workloads() -> Iterator[Workload]:
    """The making of topics."""
    for partitions, durability, mode in product((1, 3), ("disk", "os"), ("strict", "linux")):
        yield Workload(MAKING, durability, partitions, mode=mode)  # type: ignore[arg-type]


def workloads(*, long: int = 200) -> Iterator[Workload]:
    """All kinds, the short ones first, because they find a fault soonest."""
    for durability in ("disk", "os"):
        yield from short_workloads(1, durability=durability)
    yield from making_workloads()
    yield from short_workloads(2)
    yield from map(long_workload, range(long))
