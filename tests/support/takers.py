"""Takers: processes that take turns at the partitions of one topic, what each was told, and what the log must have.

A taker is a forked child. Before and after each call it writes its progress into memory that it shares with the test.
One store says one fact, so a kill leaves no half of it. The value of a record names the taker and its number, and the
rest follows from these, so that the test knows each record that may be in the log.

    begun       a call with the record was begun: it may be read, once
    appended    a call has returned its place: if it is read, then there
    durable     a call with sync=True, or a flush, has returned: it must be read
    refused     an error said that it is not in the log: it must not be read

A taker that ends in order has flushed: then all that it appended must be read.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from processes import fork, shared, wait

from conftest import sound
from loglib import LockedError, Record, Topic, testing
from loglib.testing import UnsyncedFiles

MOST = 4000  # records of one taker
MOST_PARTITIONS = 16
KEYS = 24
PATIENCE_S = 60.0  # far above what any of this takes; a test that waits for all of it has found a deadlock

_APPENDED, _REFUSED = 1, 2


class Told(ctypes.Structure):
    """What one taker has reported."""

    _fields_ = (
        ("opened", ctypes.c_uint64),
        ("begun", ctypes.c_uint64),  # the number after the last record that a call was begun with
        ("locked", ctypes.c_uint64),  # how often it got LockedError
        ("calls", ctypes.c_uint64),  # how many calls have returned
        ("done", ctypes.c_uint64),  # it has flushed all that it appended
        ("over", ctypes.c_uint64),  # set by the test: end in order
        ("durable", ctypes.c_uint64 * MOST_PARTITIONS),  # records below this number are durable, by partition
        ("places", ctypes.c_uint64 * MOST),  # by number of the record; 0 while nothing is known
    )

    def append(self, number: int, partition: int, offset: int) -> None:
        self.places[number] = offset << 16 | partition << 4 | _APPENDED

    def refuse(self, number: int) -> None:
        self.places[number] = _REFUSED

    def place(self, number: int) -> tuple[int, int] | None:
        """The partition and the offset of an appended record; None of any other."""
        word = self.places[number]
        return (word >> 4 & 0xFFF, word >> 16) if word & 15 == _APPENDED else None

    def is_refused(self, number: int) -> bool:
        return bool(self.places[number] == _REFUSED)

    def is_owed(self, number: int) -> bool:
        """Whether the record must be in the log."""
        place = self.place(number)
        return place is not None and bool(self.done or number < self.durable[place[0]])


def told() -> Told:
    """Memory for one taker."""
    return shared(Told)


def opened(path: Path, *, files: Any = None, **options: Any) -> Topic:
    """The topic, open for writing together with others."""
    if files is None:
        return Topic.open(path, shared=True, **options)
    return testing.open_topic(path, shared=True, files=files, **options)


def key_of(number: int) -> bytes:
    return b"key %d" % (number % KEYS)


def value_of(taker: int, number: int) -> bytes:
    """The only value that the record may have. Most are small, some are larger than a page."""
    size = (0, 7, 30, 120, 900, 5000)[random.Random(taker << 32 | number).choice((0, 1, 1, 2, 2, 3, 3, 4, 5))]
    return b"%d %d %d " % (taker, number, size) + b"." * size


# --- a taker ---------------------------------------------------------------------------------------------


class Taker:
    """One process's part: it appends, and reports what it is told."""

    def __init__(self, topic: Topic, told: Told, number: int, rng: random.Random) -> None:
        self.topic = topic
        self.told = told
        self.number = number
        self.rng = rng
        self.partitions = len(topic.partitions)

    def append(self, *, sync: bool = False) -> None:
        """One record, at the partition of its key."""
        number = self._begin(1)
        self._one(number, partial(self.topic.append, key=key_of(number), sync=sync), sync=sync)

    def append_synced(self) -> None:
        self.append(sync=True)

    def append_to(self) -> None:
        """One record, at a partition by its number."""
        number, sync = self._begin(1), self.rng.random() < 0.3
        self._one(
            number, partial(self.topic.append, partition=self.rng.randrange(self.partitions), sync=sync), sync=sync
        )

    def append_anywhere(self) -> None:
        """One record without a key."""
        number, sync = self._begin(1), self.rng.random() < 0.3
        self._one(number, partial(self.topic.append, sync=sync), sync=sync)

    def append_many(self) -> None:
        """Records with keys, at several partitions in an order of their own."""
        count = self.rng.choice((2, 5, 40))
        first = self._begin(count)
        numbers = list(range(first, first + count))
        keys = [key_of(each) for each in numbers]
        missing: Sequence[int] = ()
        try:
            ranges = self.topic.append_many([value_of(self.number, each) for each in numbers], keys=keys)
        except LockedError as error:
            self.told.locked += 1
            ranges, missing = list(error.appended), error.not_appended
        self._many(numbers, keys, ranges, missing)

    def flush(self) -> None:
        begun = self.told.begun
        self.topic.flush()
        for number in range(self.partitions):
            self.told.durable[number] = begun
        self.told.calls += 1

    def roll(self) -> None:
        """Seal the open segment of a partition."""
        try:
            self.topic.partition(self.rng.randrange(self.partitions)).roll()
        except LockedError:
            self.told.locked += 1

    def look(self) -> None:
        """Records that a reader may see are durable as well."""
        partition = self.topic.partition(self.rng.randrange(self.partitions))
        end = partition.high_watermark
        seen = self.told.durable[partition.id]
        for number in range(seen, self.told.begun):
            place = self.told.place(number)
            if place is not None and place[0] == partition.id:
                if place[1] >= end:
                    break
                seen = number + 1
        self.told.durable[partition.id] = seen

    def rest(self) -> None:
        """Do nothing for a moment, with a partition in the hand."""
        time.sleep(self.rng.choice((0, 0.0005, 0.003)))

    # --- what it is told ------------------------------------------------------------------------------

    def _begin(self, count: int) -> int:
        number = int(self.told.begun)
        self.told.begun = number + count
        return number

    def _one(self, number: int, append: Callable[..., Any], *, sync: bool) -> None:
        try:
            at = append(value_of(self.number, number))
        except LockedError:
            self.told.locked += 1
            self.told.refuse(number)
            return
        self.told.append(number, at.partition, at.offset)
        if sync:
            self.told.durable[at.partition] = number + 1
        self.told.calls += 1

    def _many(self, numbers: list[int], keys: list[bytes], ranges: list[Any], missing: Sequence[int]) -> None:
        offsets: dict[int, Iterator[int]] = {}
        for each in ranges:  # one for each batch, in order
            offsets[each.partition] = chain(offsets.get(each.partition, ()), each.offsets)
        out = set(missing)
        for index, (number, key) in enumerate(zip(numbers, keys, strict=True)):
            if index in out:
                self.told.refuse(number)
            else:
                partition = self.topic.partition_of(key)
                self.told.append(number, partition, next(offsets[partition]))
        assert not any(list(each) for each in offsets.values()), "more offsets than records"
        self.told.calls += 1


Action = Callable[[Taker], None]
SINGLE: tuple[Action, ...] = (Taker.append,)
SYNCED: tuple[Action, ...] = (Taker.append_synced,)
MIXED: tuple[Action, ...] = (
    Taker.append, Taker.append, Taker.append, Taker.append_synced, Taker.append_to, Taker.append_anywhere,
    Taker.append_many, Taker.flush, Taker.look, Taker.rest,
)  # fmt: skip


def take_turns(
    path: Path, told: Told, number: int, *, actions: Sequence[Action] = MIXED, calls: int | None = None, seed: int = 0,
    files: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Be a taker: make a number of calls, or go on until the test says that it is over; then end in order."""
    rng = random.Random(f"{seed} {number}")
    with opened(path, files=files, **options) as topic:
        taker = Taker(topic, told, number, rng)
        told.opened = 1
        made = 0
        while not told.over and (calls is None or made < calls) and told.begun < MOST - 100:
            rng.choice(actions)(taker)
            made += 1
    told.done = 1


def together(path: Path, count: int, **options: Any) -> list[Told]:
    """So many takers at once, each to its end; all must end well."""
    all_told = [told() for _ in range(count)]
    children = [fork(partial(take_turns, path, each, number, **options)) for number, each in enumerate(all_told)]
    assert [wait(child) for child in children] == [0] * count, "a taker failed; its error is above"
    return all_told


@contextmanager
def ending() -> Iterator[Callable[[Callable[[], object]], int]]:
    """A function that starts a process. At the end of the block it kills those that are left, stopped ones as well."""
    pids: list[int] = []

    def start(action: Callable[[], object]) -> int:
        pids.append(fork(action))
        return pids[-1]

    try:
        yield start
    finally:
        for pid in pids:
            with suppress(ChildProcessError, ProcessLookupError):  # it was waited for
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.kill(pid, signal.SIGKILL)
                wait(pid)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for what must come; the patience only ends a test that hangs."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"{what} has not come"
        time.sleep(0.001)


def stop(pid: int) -> None:
    """Stop a process, and wait until it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def holder_of(error: LockedError) -> int | None:
    """The process that the error names; None if it names none."""
    found = re.match(r"pid (\d+) ", error.holder)
    return int(found[1]) if found else None


# --- what must hold ----------------------------------------------------------------------------------------


class Wrong(AssertionError):
    """The log has what it must not have, or lacks what it must have."""


def judge(path: Path, takers: Sequence[Told], *, others: int = 0, from_start: bool = True) -> int:
    """Check the log against what the takers were told; return the number of their records in it.

    `others` is the number of records that somebody else has appended, with values that begin with "-". Without
    `from_start` retention may have dropped the first records of a partition.
    """
    seen: set[tuple[int, int]] = set()
    strange = 0
    with Topic.open(path, mode="r") as topic:
        starts = [each.log_start_offset for each in topic.partitions]
        for partition in topic.partitions:
            sound(partition)
            records = list(partition.read())
            start = partition.log_start_offset
            if from_start and start != 0:
                raise Wrong(f"partition {partition.id} begins at {start}")
            if [each.offset for each in records] + [partition.high_watermark] != [
                start, *(each.next_offset for each in records)
            ]:
                raise Wrong(f"in partition {partition.id} a record does not begin where the one before it ends")
            newest = dict.fromkeys(range(len(takers)), -1)
            for record in records:
                if (record.value or b"-").startswith(b"-"):
                    strange += 1
                    continue
                taker, number = _check(topic, record, takers)
                if (taker, number) in seen:
                    raise Wrong(f"record {number} of taker {taker} is there twice")
                if number < newest[taker]:
                    raise Wrong(f"record {number} of taker {taker} stands behind {newest[taker]}")
                newest[taker] = number
                seen.add((taker, number))
    for taker, told in enumerate(takers):
        for number in range(told.begun):
            if (taker, number) not in seen and told.is_owed(number):
                partition_number, offset = told.place(number) or (0, 0)
                if offset >= starts[partition_number]:
                    raise Wrong(f"record {number} of taker {taker}, at {(partition_number, offset)}, is lost")
    if strange != others:
        raise Wrong(f"{strange} records of others, and not {others}")
    return len(seen)


def _check(topic: Topic, record: Record, takers: Sequence[Told]) -> tuple[int, int]:
    """Which record it is; it must have its value and be where its append said that it is."""
    words = (record.value or b"").split(b" ", 2)
    taker, number = int(words[0]), int(words[1])
    told, at = takers[taker], (record.partition, record.offset)
    if record.value != value_of(taker, number) or number >= told.begun:
        raise Wrong(f"nobody has appended what is at {at}: {record.value!r}")
    if told.is_refused(number):
        raise Wrong(f"record {number} of taker {taker} is at {at}, and its append was refused")
    if told.place(number) not in (None, at):
        raise Wrong(f"record {number} of taker {taker} is at {at}; its append returned {told.place(number)}")
    if record.key is not None and topic.partition_of(record.key) != record.partition:
        raise Wrong(f"key {record.key!r} is in partition {record.partition}")
    return taker, number


__all__ = [
    "KEYS", "MIXED", "MOST", "PATIENCE_S", "SINGLE", "SYNCED", "Action", "Taker", "Told", "UnsyncedFiles", "Wrong",
    "ending", "holder_of", "judge", "key_of", "opened", "stop", "take_turns", "together", "told", "value_of",
    "wait_until",
]  # fmt: skip
