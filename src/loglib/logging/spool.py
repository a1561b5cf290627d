"""Spool: records of a process on their way into a topic. A thread appends them, so that no caller waits for a disk.

Invariant: a record that `put` accepted is in the topic exactly once when `flush` has returned True, whatever errors the
disk gave before. A record that was not accepted is counted, and the count is reported in the topic when there is room
again. A record that the topic can never take is dropped and counted as well, and delays no other. Only a killed process
loses accepted records, those of the last moments; `flush` returns True when all are safe.

A spool without records gives its partition back after some seconds, and its thread ends. A later record starts another
thread. Where no thread can be started, the call itself writes: at the end of the process, and where the system has no
thread left. spool_topic.py shares the topic with other processes, and finds the records of a failed write.

Threads: safe for all. A finalizer, a signal handler or a callback of a fork may put a record in the middle of any call
here, also in the thread that writes. So no call is made while a lock is held, and only one thread at a time is the
*writer*; a call that interrupts the writer in its thread leaves the work to the interrupted call. Locks and threads are
those of the system, or of the greenlets that were there when this module was imported, and never of both.

Forks: a child has an empty spool and a thread of its own; earlier records belong to the parent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from _thread import LockType, allocate_lock, get_ident, start_new_thread
from _thread import RLock as Reentrant
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import compress
from math import inf
from operator import not_
from typing import NamedTuple, Unpack

from ..config.arguments import check_count, topic_path
from ..config.policies import Policies
from ..errors import OffsetRange
from ..system.clock import monotonic
from ..system.files import REAL, Files
from ..system.not_copyable import NotCopyable
from ..system.process import at_exit, forking, in_child, leave_parent
from .spool_topic import Item, SpoolTopic

logger = logging.getLogger("loglib")

_PORTION_BYTES = 4 << 20
_LINGER_S = 0.05  # to collect records, so that one flush serves many
_LOOK_S = 0.5  # between checks whether another process waits for a partition, and whether a thread still writes
_IDLE_S = 10.0  # after which the partition is given back
_INT64 = range(-(1 << 63), 1 << 63)  # timestamps
_FIRST_NAP_S, _LONGEST_NAP_S = 0.02, 1.0  # after an error

_in_child = in_child()


class Drops(NamedTuple):
    """The number of records that were not accepted, and the times of the first and last, in microseconds UTC."""

    records: int
    first_us: int
    last_us: int


class Spool(NotCopyable):
    """A buffer of limited size for the records of a topic."""

    def __init__(
        self, path: str | os.PathLike[str], *, capacity_bytes: int, patience_s: float,
        report: Callable[[Drops], bytes], end_timeout_s: float = 5.0, partitions: int | None = None,
        files: Files = REAL, defaults: Policies | None = None, **policies: Unpack[Policies],
    ) -> None:  # fmt: skip
        """`put` waits up to `patience_s` for room. `report` makes the record that reports drops.

        The end of the process waits up to `end_timeout_s` for the disk. `partitions`, the policies, and `defaults` in
        place of policies that are not given, are for a topic that does not exist yet. If it exists, a warning names the
        policies that differ from the stored ones.
        """
        check_count("capacity_bytes", capacity_bytes)
        self.path = topic_path(path)
        self._capacity_bytes = capacity_bytes
        self._patience_s = patience_s
        self._report = report
        self._end_timeout_s = end_timeout_s
        self._make_topic = partial(SpoolTopic, files, self.path, partitions, defaults or {}, policies)
        self._begin()

    def _begin(self) -> None:
        # Guards the numbers and the writer. No call is made while it is held, so nothing can interrupt its holder.
        self._counting = Reentrant()
        self._held_bytes = 0  # of the items, and of the portion that is being written
        self._unreported = 0  # dropped records
        self._first_drop_us = self._last_drop_us = 0  # of them
        self.dropped = 0  # records that were not accepted, since the beginning
        self._writer: int | None = None  # the thread that writes now
        # Records, and locks of callers that wait until the records before are written.
        self._items: deque[Item | LockType] = deque()
        self._portion: list[Item | LockType] = []  # being written; it belongs to the writer
        self._reported = b""  # the last report
        self._gates: deque[LockType] = deque()  # locks of callers that check again after each portion
        self._wake = _shut()  # the thread waits for it
        self._is_awake = False  # True if the thread needs no wake
        self._urgent = False
        self._closing = False  # the writer gives the partition back after its portion
        self._given_back = 0  # the number of times that the partition was given back
        self._until = inf  # when the writer gives up, in monotonic seconds
        self._awaited_until = 0.0  # until then a started thread may not run yet
        self._here_again_at = 0.0  # when a call may write again, without a thread
        self._end_at: float | None = None  # the process ends, and waits for its last records until then
        self._topic = self._make_topic()
        at_exit.add(self._end)
        _in_child.add(self._begin_in_child)

    def _begin_in_child(self, parent_pid: int) -> None:
        del parent_pid
        self._begin()

    # --- for callers ---------------------------------------------------------------------------------

    def put(self, value: bytes, timestamp_us: int, *, urgent: bool = False) -> bool:
        """Accept a record, or count it as dropped and return False.

        An `urgent` record is written immediately, together with those before it.
        """
        if forking:
            leave_parent()
        item, size = Item(value, timestamp_us), len(value)
        with self._counting:
            fits = self._held_bytes + size <= self._capacity_bytes
            if fits:
                self._held_bytes += size
        if not fits and not self._wait_for_room(size):
            self._note_drop(timestamp_us)
            return False
        self._items.append(item)
        self._rouse(urgent=urgent)
        return True

    def drop(self) -> None:
        """Count a record that could not be made."""
        if forking:
            leave_parent()
        self._note_drop(time.time_ns() // 1000)

    def _note_drop(self, timestamp_us: int) -> None:
        with self._counting:
            if not self._unreported:
                self._first_drop_us = timestamp_us
            self._last_drop_us = timestamp_us
            self._unreported += 1
            self.dropped += 1
        self._rouse()

    def _wait_for_room(self, size: int) -> bool:
        """Wait up to `patience_s` for room of this size, and take it. False if there is none."""
        if size > self._capacity_bytes or self._patience_s <= 0 or self._is_here():
            return False
        deadline = monotonic() + self._patience_s
        gate = _shut()
        while (rest := deadline - monotonic()) > 0:
            self._gates.append(gate)  # before the check: each later write opens it
            with self._counting:
                fits = self._held_bytes + size <= self._capacity_bytes
                if fits:
                    self._held_bytes += size
            if fits:
                return True
            self._rouse(urgent=True)
            gate.acquire(timeout=min(rest, _LOOK_S))
        return False

    def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all accepted records are written. Return True if they are.

        It returns False immediately in the middle of a write, for example in a finalizer.
        """
        if forking:
            leave_parent()
        if self._is_here() or sys.is_finalizing():
            return False
        if not self._items and not self._portion and self._writer is None:
            return True
        deadline = monotonic() + timeout
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            # The caller may hold logging's lock, as `dictConfig` does. Without this the writer's first line needs it.
            logger.isEnabledFor(level)
        written = _shut()
        self._items.append(written)
        while True:
            self._rouse(urgent=True, until=deadline)
            rest = deadline - monotonic()
            if written.acquire(timeout=min(max(rest, 0.0), _LOOK_S)):
                return True
            if rest <= 0:
                with suppress(ValueError):  # the writer has it
                    self._items.remove(written)
                return False

    def close(self, timeout: float) -> int:
        """Write accepted records for at most `timeout` seconds, and give the partition back.

        Returns the number of records that are not written. A later record opens the topic again.
        """
        is_written = self.flush(timeout)
        deadline = monotonic() + (timeout if is_written else _LOOK_S)  # for a failed write to be given up
        gate, given_back = _shut(), self._given_back
        self._closing = True
        while self._writer is not None and self._given_back == given_back and not self._is_here():
            self._gates.append(gate)
            rest = deadline - monotonic()
            if rest <= 0 or sys.is_finalizing():
                break
            _open(self._wake)
            gate.acquire(timeout=min(rest, _LOOK_S))
        if is_written:
            return 0
        left = sum(isinstance(each, Item) for each in [*self._portion, *self._items.copy()])
        if left:
            logger.error("%s: %d lines were not written", self.path, left)
        return left

    def time_left(self, timeout: float) -> float:
        """`timeout`, or less at the end of the process: all waits for the same failure share the time of the end."""
        if self._end_at is None:
            return timeout
        now = monotonic()
        if not self._portion:  # nothing fails
            self._end_at = now + self._end_timeout_s
        return min(timeout, max(0.0, self._end_at - now))

    def _end(self) -> None:
        """The process ends. Later calls, from other exit functions, write their records themselves."""
        self._end_at = monotonic() + self._end_timeout_s
        self.close(self._end_timeout_s)

    # --- the writer ----------------------------------------------------------------------------------

    def _is_here(self) -> bool:
        """True if this thread is the writer, so that the caller has interrupted a write."""
        return self._writer is not None and self._writer == get_ident()

    def _rouse(self, *, urgent: bool = False, until: float | None = None) -> None:
        """Let the thread write. Start a thread if there is none; if that fails, write in this one, `until` a time."""
        if self._writer is not None:
            if not self._is_awake or (urgent and not self._urgent):
                self._is_awake = True
                self._urgent = self._urgent or urgent
                _open(self._wake)
            return
        self._urgent = self._urgent or urgent
        now = monotonic()
        if self._end_at is not None:
            self._write_here(until or self._end_at)
        elif now < self._awaited_until or self._start(now):
            return
        elif urgent or now >= self._here_again_at:
            written = self._write_here(until or now)
            self._here_again_at = monotonic() + (_LINGER_S if written else _LONGEST_NAP_S)

    def _start(self, now: float) -> bool:
        """Start the thread. False if the system has none left.

        `threading` is not used: it has locks of its own and waits for the thread, and this may be a finalizer in the
        middle of such a start.
        """
        try:
            start_new_thread(_traced, (partial(self._run, inf, waits=True),))
        except Exception:  # noqa: BLE001  RuntimeError, or no memory for it: the next record tries again.
            return False
        self._awaited_until = now + _LOOK_S
        at_exit.add(self._end)  # again: a worker of billiard imports the package that ends it after its fork
        return True

    def _write_here(self, until: float) -> bool:
        """Write in this thread. False if something could not be written."""
        try:
            self._run(until)
        except Exception:  # a call to a logger must not fail, and the records wait
            logger.exception("%s: records wait in memory", self.path)
        return not self._portion

    def _run(self, until: float, *, waits: bool = False) -> None:
        """Be the writer, if there is no other, until no record is left. A thread `waits` for more records."""
        me, again = get_ident(), True
        while again:
            mine = again = False
            try:
                with self._counting:
                    if self._writer is None:
                        self._writer = me
                        mine = True
                if mine:
                    self._closing = False
                    self._until = until
                    again = self._work(waits=waits)
            finally:
                if mine:
                    self._awaited_until = 0.0
                    self._given_back += 1
                    self._writer = None
            if mine:
                self._open_gates()
            again = again and bool(self._items or self._unreported)  # put since the last check

    def _work(self, *, waits: bool) -> bool:
        """Write until no record is left. False if the writer gives up before."""
        nap = _FIRST_NAP_S
        try:
            while self._next_portion(waits=waits):
                if self._write_portion():
                    nap = _FIRST_NAP_S
                else:
                    self._sleep(nap)
                    nap = min(2 * nap, _LONGEST_NAP_S)
                    if self._closing:  # it has waited long enough
                        return False
                if monotonic() >= self._until:
                    return False
                if self._closing:
                    return True
            return True
        finally:
            self._topic.give_back()

    def _next_portion(self, *, waits: bool) -> bool:
        """Fill the portion, unless it has records left. False if there is no record to write.

        An interrupt at any point loses no record: each is in the portion before it leaves the items.
        """
        portion = self._portion
        if portion:
            if self._items and self._items[0] is portion[-1]:
                self._items.popleft()
            return True
        if waits:
            self._await_records()
        self._urgent = False
        size = 0
        while self._items and size < _PORTION_BYTES:
            first = self._items[0]
            portion.append(first)
            size += len(first.value) if isinstance(first, Item) else 0
            self._items.popleft()
        self._report_drops()
        return bool(portion)

    def _await_records(self) -> None:
        """Wait for records until the thread has been idle for too long, and then a moment for more of them."""
        idle_until = monotonic() + _IDLE_S
        while True:
            self._is_awake = False
            if self._items or self._unreported or self._closing:
                break
            rest = idle_until - monotonic()
            if rest <= 0:
                return
            self._wake.acquire(timeout=min(rest, _LOOK_S))  # an interrupt may have prevented a wake
        self._is_awake = True
        linger_until = monotonic() + _LINGER_S
        while not self._urgent and not self._closing and (rest := linger_until - monotonic()) > 0:
            self._wake.acquire(timeout=rest)  # an urgent record ends it

    def _report_drops(self) -> None:
        """Add the record that reports drops, if there were any."""
        with self._counting:
            count = self._unreported
            first_us = self._first_drop_us
            last_us = self._last_drop_us
            self._unreported = 0
        if count:
            self._reported = self._report(Drops(count, first_us, last_us))
            size = len(self._reported)
            with self._counting:
                self._held_bytes += size
            self._portion.append(Item(self._reported, last_us))

    def _sleep(self, seconds: float) -> None:
        """Sleep, unless the spool is closed or the writer's time is over."""
        deadline = min(monotonic() + seconds, self._until)
        while not self._closing and (rest := deadline - monotonic()) > 0:
            self._wake.acquire(timeout=rest)

    def _open_gates(self) -> None:
        """Let the waiting callers check again."""
        while self._gates:
            _open(self._gates.popleft())

    # --- writing -------------------------------------------------------------------------------------

    def _write_portion(self) -> bool:
        """Append the portion's records, and flush them. True if all are in the topic; the others stay."""
        records = [each for each in self._portion if isinstance(each, Item)]
        waiting = [each for each in self._portion if not isinstance(each, Item)]
        appended: list[OffsetRange] = []
        portion = records  # those of them that the topic can take, when that is known
        try:
            if records:
                topic = self._topic.opened()
                portion = self._writable(records, topic.config.max_record_bytes)
                values, timestamps = [each.value for each in portion], [each.timestamp_us for each in portion]
                appended = topic.append_many(values, timestamps=timestamps)
                topic.flush()
        except BaseException as error:  # of any kind: no other thread could write the records later
            left = self._topic.missing(error, portion, appended, self._nap)
            self._settle(records, left)
            self._portion = [*left, *waiting]
            if not isinstance(error, Exception):
                raise
            return False
        self._settle(records, [])
        self._portion = []
        for each in waiting:
            _open(each)
        self._topic.end_portion()
        return True

    def _nap(self) -> bool:
        """Sleep a moment. False if the writer must give up."""
        self._sleep(_FIRST_NAP_S)
        return not self._closing and monotonic() < self._until

    def _settle(self, records: list[Item], left: list[Item]) -> None:
        """Free the room of the `records`, except of those that are `left`."""
        size = sum(len(each.value) for each in records) - sum(len(each.value) for each in left)
        with self._counting:
            self._held_bytes -= size
        self._open_gates()

    def _writable(self, portion: list[Item], limit_bytes: int) -> list[Item]:
        """The records that the topic can take. The others are dropped and, except a report of drops, counted."""
        writable = [len(each.value) <= limit_bytes and each.timestamp_us in _INT64 for each in portion]
        if all(writable):
            return portion
        for each in compress(portion, map(not_, writable)):
            if each.value is not self._reported:
                self._note_drop(time.time_ns() // 1000)
        return list(compress(portion, writable))


def _traced(run: Callable[[], None]) -> None:
    """Run in a thread that `threading` has not started, and still let debuggers and coverage see it."""
    sys.settrace(threading.gettrace())
    run()


def _shut() -> LockType:
    """A lock that is held, so that a thread waits for it until another one opens it."""
    gate = allocate_lock()
    gate.acquire()
    return gate


def _open(gate: LockType) -> None:
    with suppress(RuntimeError):  # it is open already
        gate.release()
