"""Spool: records of a process on their way into a topic. A thread appends them, so that nobody waits for a disk.

Invariant: a record that `put` accepted is in the topic exactly once when `flush` has returned True, whatever errors the
disk gave meanwhile. A record that was not accepted is counted, and the count is reported in the topic as soon as there
is room. A record that the topic can never take is dropped and counted as well, and holds up no other. Only a killed
process loses accepted records, those of the last moments; `flush` says which are safe.

Several processes may have spools on one topic, also more than it has partitions. Each takes a partition that is free.
A process that finds none leaves the file `waiting` in the topic's directory. The others then give their partition back
after each portion.

A spool that has nothing to do gives its partition back after some seconds, and its thread ends. A later record starts
another one. Where no thread can be started, the call writes by itself: so it is when the process ends, and where the
system has no thread left.

Threads: safe for all. A finalizer, a signal handler or a callback of a fork may put a record in the middle of any call
here, also in the thread that writes. So no call is made while a lock is held, and only one thread at a time is the
*writer*; a call that finds itself to be the writer leaves the work to the call that it interrupts. Locks and threads
are those of the system, or of the greenlets that were there when this module was imported, and never of both.

Forks: a child has an empty spool and a thread of its own; the records of before belong to the parent.
"""

from __future__ import annotations

import _thread
import logging
import os
import sys
import threading
import time
from _thread import LockType, allocate_lock, get_ident, start_new_thread
from _thread import RLock as Reentrant
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from math import inf
from operator import not_
from typing import Any, NamedTuple, Unpack

from ..config.arguments import check_count, topic_path
from ..config.policies import Policies
from ..errors import (
    InvalidOffsetError,
    LockedError,
    LogClosedError,
    LogError,
    LogMovedError,
    OffsetOutOfRangeError,
    OffsetRange,
)
from ..log.topic_file import NAME
from ..system.files import REAL, Files
from ..system.not_copyable import NotCopyable
from ..system.process import at_exit, forking, in_child, leave_parent, try_each
from ..topic import Topic, open_topic

__all__ = ["WAITING", "Drops", "Spool"]

logger = logging.getLogger("loglib")

WAITING = "waiting"
_PORTION_BYTES = 4 << 20
_LINGER_S = 0.05  # to collect records, so that one flush serves many
_LOOK_S = 0.5  # between looks whether another process waits for a partition, and whether a thread still writes
_IDLE_S = 10.0  # after which the partition is given back
_STALE_S = 10.0  # who waits renews the file more often than that
_INT64 = range(-(1 << 63), 1 << 63)  # timestamps
_FIRST_NAP_S, _LONGEST_NAP_S = 0.02, 1.0  # after an error

_in_child = in_child()


class _Item(NamedTuple):
    value: bytes
    timestamp_us: int


class Drops(NamedTuple):
    """How many records were not accepted, and when, in microseconds UTC."""

    records: int
    first_us: int
    last_us: int


class Spool(NotCopyable):
    """A buffer of limited size before a topic."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        patience_s: float,
        report: Callable[[Drops], bytes],
        end_timeout_s: float = 5.0,
        partitions: int | None = None,
        files: Files = REAL,
        **policies: Unpack[Policies],
    ) -> None:
        """`patience_s`: how long `put` may wait for room. `report` makes the record that tells of drops.

        `end_timeout_s`: how long the end of the process may wait for the disk. `partitions` and the policies are for a
        topic that does not exist yet.
        """
        check_count("capacity_bytes", capacity_bytes)
        self.path = topic_path(path)
        self._capacity_bytes = capacity_bytes
        self._patience_s = patience_s
        self._report = report
        self._end_timeout_s = end_timeout_s
        self._partitions = partitions
        self._files = files
        self._policies = policies
        self._begin()
        at_exit.add(self._end)
        _in_child.add(self._begin_in_child)

    def _begin(self) -> None:
        # Guards the numbers and the writer. No call is made while it is held, so nothing can interrupt its holder.
        self._noting = Reentrant()
        self._held_bytes = 0  # of the items, and of the portion that is being written
        self._unreported = 0  # dropped records
        self._first_drop_us = self._last_drop_us = 0  # of them
        self.dropped = 0  # records that were not accepted, since the beginning
        self._writer: int | None = None  # the thread that writes now
        # Records, and locks of those who wait until the records before are written.
        self._items: deque[_Item | LockType] = deque()
        self._portion: list[_Item | LockType] = []  # that is being written; it belongs to the writer
        self._told = b""  # the last report
        self._waiting_here: deque[LockType] = deque()  # locks of those who look again after each portion
        self._wake = _shut()  # at which the thread waits
        self._roused = False  # whether it needs no wake
        self._urgent = False
        self._closing = False  # the writer gives the partition back after its portion
        self._given_back = 0  # how often the partition was given back
        self._until = inf  # when the writer gives up, in monotonic seconds
        self._awaited_until = 0.0  # until then a thread that was started may still be on its way
        self._here_again_at = 0.0  # when a call may write again, without a thread
        self._end_at: float | None = None  # the process ends, and its last records wait until then
        self._topic: Topic | None = None
        self._failing = False
        self._waits = False  # whether this process has left the file

    def _begin_in_child(self, parent_pid: int) -> None:
        del parent_pid
        self._begin()
        at_exit.add(self._end)
        _in_child.add(self._begin_in_child)

    # --- for those who have records ------------------------------------------------------------------

    def put(self, value: bytes, timestamp_us: int, *, urgent: bool = False) -> bool:
        """Accept a record, or count it as dropped: False. `urgent` records are written at once, with those before."""
        if forking:
            leave_parent()
        item, size = _Item(value, timestamp_us), len(value)
        with self._noting:
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
        with self._noting:
            if not self._unreported:
                self._first_drop_us = timestamp_us
            self._last_drop_us = timestamp_us
            self._unreported += 1
            self.dropped += 1
        self._rouse()

    def _wait_for_room(self, size: int) -> bool:
        """Take room as soon as there is some, as long as the patience lasts."""
        if size > self._capacity_bytes or self._patience_s <= 0 or self._is_here():
            return False
        deadline = time.monotonic() + self._patience_s
        gate = _shut()
        while (rest := deadline - time.monotonic()) > 0:
            self._waiting_here.append(gate)  # first: what is written from now on opens it
            with self._noting:
                fits = self._held_bytes + size <= self._capacity_bytes
                if fits:
                    self._held_bytes += size
            if fits:
                return True
            self._rouse(urgent=True)
            gate.acquire(timeout=min(rest, _LOOK_S))
        return False

    def flush(self, timeout: float) -> bool:
        """Write what was accepted so far. Whether it is written, which may take `timeout` seconds.

        False at once in the middle of writing, for example in a finalizer that the collector runs there.
        """
        if forking:
            leave_parent()
        if self._is_here() or sys.is_finalizing():
            return False
        if not self._items and not self._portion and self._writer is None:
            return True
        deadline = time.monotonic() + timeout
        written = _shut()
        self._items.append(written)
        while True:
            self._rouse(urgent=True, until=deadline)
            rest = deadline - time.monotonic()
            if written.acquire(timeout=min(max(rest, 0.0), _LOOK_S)):
                return True
            if rest <= 0:
                with suppress(ValueError):  # the writer has it
                    self._items.remove(written)
                return False

    def close(self, timeout: float) -> int:
        """Write what was accepted, for at most `timeout` seconds, and give the partition back.

        Returns the number of records that are not written. A record that is put later begins anew.
        """
        is_written = self.flush(timeout)
        deadline = time.monotonic() + timeout
        gate, given_back = _shut(), self._given_back
        self._closing = True
        while self._writer is not None and self._given_back == given_back and not self._is_here():
            self._waiting_here.append(gate)
            rest = deadline - time.monotonic()
            if rest <= 0 or sys.is_finalizing():
                break
            _open(self._wake)
            gate.acquire(timeout=min(rest, _LOOK_S))
        if is_written:
            return 0
        left = sum(isinstance(each, _Item) for each in [*self._portion, *self._items.copy()])
        if left:
            logger.error("%s: %d lines were not written", self.path, left)
        return left

    def _end(self) -> None:
        """The process ends. What is put from now on, by other exit functions, is written by the call."""
        self._end_at = time.monotonic() + self._end_timeout_s
        self.close(self._end_timeout_s)

    # --- who writes ----------------------------------------------------------------------------------

    def _is_here(self) -> bool:
        """Whether this thread is the writer, and the caller has interrupted it."""
        return self._writer is not None and self._writer == get_ident()

    def _rouse(self, *, urgent: bool = False, until: float | None = None) -> None:
        """Let the thread write. Start one if there is none; and if there can be none, write here, `until` then."""
        if self._writer is not None:
            if not self._roused or (urgent and not self._urgent):
                self._roused = True
                self._urgent = self._urgent or urgent
                _open(self._wake)
            return
        self._urgent = self._urgent or urgent
        now = time.monotonic()
        if self._end_at is not None:
            self._write_here(until or self._end_at)
        elif now < self._awaited_until or self._start(now):
            return
        elif urgent or now >= self._here_again_at:
            written = self._write_here(until or now)
            self._here_again_at = time.monotonic() + (_LINGER_S if written else _LONGEST_NAP_S)

    def _start(self, now: float) -> bool:
        """Start the thread. False if the system has none left.

        Without `threading`, which has locks of its own and waits for the thread: this may be a finalizer in the middle
        of such a start.
        """
        try:
            start_new_thread(_traced, (partial(self._run, inf, waits=True),))
        except Exception:  # noqa: BLE001  RuntimeError, or no memory for it: the next record tries again.
            return False
        self._awaited_until = now + _LOOK_S
        return True

    def _write_here(self, until: float) -> bool:
        """Write in this thread. False if something could not be written."""
        try:
            self._run(until)
        except Exception:  # who logs must not end by it, and the records wait
            logger.exception("%s: records wait in memory", self.path)
        return not self._portion

    def _run(self, until: float, *, waits: bool = False) -> None:
        """Be the writer, if there is no other, until nothing is left. A thread `waits` for more."""
        me, again = get_ident(), True
        while again:
            mine = again = False
            try:
                with self._noting:
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
            again = again and bool(self._items or self._unreported)  # put since the writer has looked

    def _work(self, *, waits: bool) -> bool:
        """Write, until nothing is left. False if the writer gives up before."""
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
                if time.monotonic() >= self._until:
                    return False
                if self._closing:
                    return True
            return True
        finally:
            self._give_back()

    def _next_portion(self, *, waits: bool) -> bool:
        """Fill the portion, if all of it is written. False if there is nothing to write, and nothing came.

        An interrupt at any place loses no record: each is in the portion before it leaves the items.
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
            size += len(first.value) if isinstance(first, _Item) else 0
            self._items.popleft()
        self._tell_drops()
        return bool(portion)

    def _await_records(self) -> None:
        """Wait for records as long as the thread may be idle, and then a moment for more of them."""
        idle_until = time.monotonic() + _IDLE_S
        while True:
            self._roused = False
            if self._items or self._unreported or self._closing:
                break
            rest = idle_until - time.monotonic()
            if rest <= 0:
                return
            self._wake.acquire(timeout=min(rest, _LOOK_S))  # an interrupt may have prevented a wake
            if self._topic is not None and not self._items and self._is_awaited():
                self._give_back()
        self._roused = True
        linger_until = time.monotonic() + _LINGER_S
        while not self._urgent and not self._closing and (rest := linger_until - time.monotonic()) > 0:
            self._wake.acquire(timeout=rest)  # an urgent record ends it

    def _tell_drops(self) -> None:
        """Add the record that tells of drops, if there were any."""
        with self._noting:
            count = self._unreported
            first_us = self._first_drop_us
            last_us = self._last_drop_us
            self._unreported = 0
        if count:
            self._told = self._report(Drops(count, first_us, last_us))
            size = len(self._told)
            with self._noting:
                self._held_bytes += size
            self._portion.append(_Item(self._told, last_us))

    def _sleep(self, seconds: float) -> None:
        """Sleep, unless the spool is closed or the writer's time is over."""
        deadline = min(time.monotonic() + seconds, self._until)
        while not self._closing and (rest := deadline - time.monotonic()) > 0:
            self._wake.acquire(timeout=rest)

    def _open_gates(self) -> None:
        """Let those who wait look again."""
        while self._waiting_here:
            _open(self._waiting_here.popleft())

    # --- writing -------------------------------------------------------------------------------------

    def _write_portion(self) -> bool:
        """Append the portion's records, and flush them. Those that are not in the topic stay. Whether all are in it."""
        records = [each for each in self._portion if isinstance(each, _Item)]
        waiting = [each for each in self._portion if not isinstance(each, _Item)]
        appended: list[OffsetRange] = []
        portion = records
        try:
            if records:
                topic = self._opened()
                portion = self._writable(records, topic.config.max_record_bytes)
                values, timestamps = [each.value for each in portion], [each.timestamp_us for each in portion]
                appended = topic.append_many(values, timestamps=timestamps)
                topic.flush()
        except BaseException as error:  # of any kind: no other thread could write the records later
            left = self._left_after(error, portion, appended)
            self._settle(records, left)
            self._portion = [*left, *waiting]
            if not isinstance(error, Exception):
                raise
            return False
        self._settle(records, [])
        self._portion = []
        for each in waiting:
            _open(each)
        self._failing = False
        if self._waits:
            self._waits = False
            with suppress(OSError):
                self._files.unlink(self._waiting)
        elif self._is_awaited():
            self._give_back()
        return True

    def _settle(self, records: list[_Item], left: list[_Item]) -> None:
        """Make room for others."""
        size = sum(len(each.value) for each in records) - sum(len(each.value) for each in left)
        with self._noting:
            self._held_bytes -= size
        self._open_gates()

    def _left_after(self, error: BaseException, portion: list[_Item], appended: list[OffsetRange]) -> list[_Item]:
        """The records that are not in the topic after this error. Closes the topic."""
        errors = [error, *self._give_back()]
        if isinstance(error, LockedError):
            self._ask_for_a_partition()
        elif not self._failing and not isinstance(error, LogClosedError):
            self._failing = True  # told once, until something can be written again
            logger.warning("%s: %d records wait in memory: %s", self.path, len(portion), error)
        if isinstance(error, LogMovedError):  # the topic that is made next shall have them
            return portion
        return self._missing(portion, appended or getattr(error, "appended", ()), errors)

    def _writable(self, portion: list[_Item], limit_bytes: int) -> list[_Item]:
        """The records that the topic can take. The others are dropped and counted, but for a report of drops."""
        writable = [len(each.value) <= limit_bytes and each.timestamp_us in _INT64 for each in portion]
        if all(writable):
            return portion
        for each in compress(portion, map(not_, writable)):
            if each.value is not self._told:
                self._note_drop(time.time_ns() // 1000)
        return list(compress(portion, writable))

    def _missing(
        self, portion: list[_Item], appended: Iterable[OffsetRange], errors: Sequence[BaseException]
    ) -> list[_Item]:
        """The records that are not in the topic after these errors, in their order.

        Errors of loglib name each record that is lost or in doubt; what is in doubt is looked up. The topic is closed,
        so what was appended and is not named is in it.
        """
        not_appended = set(getattr(errors[0], "not_appended", ()))
        places = [(each.partition, offset) for each in appended for offset in each.offsets]
        placed = [index for index in range(len(portion)) if index not in not_appended] if places else []
        lost = _places(errors, "lost")
        doubtful = _places(errors, "in_doubt")
        found = self._found(doubtful) if doubtful else {}
        written = {
            index
            for index, place in zip(placed, places, strict=True)
            if place not in lost and (place not in doubtful or found.get(place) == portion[index])
        }
        return [item for index, item in enumerate(portion) if index not in written]

    def _found(self, places: set[tuple[int, int]]) -> dict[tuple[int, int], _Item]:
        """The records that are at these places now, after their partitions were recovered.

        Another process may have recovered a partition and written it since. Its records have other times.
        """
        found: dict[tuple[int, int], _Item] = {}
        for number in sorted({partition for partition, _ in places}):
            while not self._recovered(number):
                self._sleep(_FIRST_NAP_S)
                if self._closing or time.monotonic() >= self._until:
                    return found
            first = min(offset for partition, offset in places if partition == number)
            partition = self._opened().partition(number)
            with suppress(OffsetOutOfRangeError, InvalidOffsetError):  # then none of them is there
                for record in partition.read(first):
                    found[number, record.offset] = _Item(record.value or b"", record.timestamp)
        return found

    def _recovered(self, number: int) -> bool:
        """Take a partition, which recovers it, and seal the segment that could not be written."""
        try:
            self._opened().partition(number).roll()
        except (LogError, OSError) as error:
            self._give_back()
            if isinstance(error, LockedError):
                self._ask_for_a_partition()
            return False
        return True

    # --- the topic -----------------------------------------------------------------------------------

    def _opened(self) -> Topic:
        if self._topic is None:
            # A thread of the topic would be a greenlet if these were patched in later. It would wait for this thread.
            is_as_imported = _thread.start_new_thread is start_new_thread
            given: dict[str, Any] = {"shared": True, "files": self._files, "background": is_as_imported}
            if not self._files.exists(os.path.join(self.path, NAME)):
                given |= {"partitions": self._partitions, **self._policies}
            try:
                self._topic = open_topic(self.path, **given)
            except RuntimeError:  # no thread can be started: this spool flushes by itself, and can do without
                self._topic = open_topic(self.path, **given | {"background": False})
        return self._topic

    def _give_back(self) -> list[Exception]:
        """Close the topic; returns the error of closing, if there is one."""
        topic, self._topic = self._topic, None
        return [] if topic is None else [error for _, error in try_each([topic], Topic.close)]

    @property
    def _waiting(self) -> str:
        return os.path.join(self.path, WAITING)

    def _ask_for_a_partition(self) -> None:
        """Let other processes know that this one waits."""
        self._waits = True
        with suppress(OSError):
            with suppress(FileNotFoundError):
                self._files.unlink(self._waiting)
            self._files.close(self._files.create(self._waiting, 0o600))

    def _is_awaited(self) -> bool:
        """Whether another process waits for a partition. A file that is no longer renewed is removed."""
        try:
            age = time.time() - self._files.facts(self._waiting).st_mtime
        except OSError:
            return False
        if abs(age) > _STALE_S:
            with suppress(OSError):
                self._files.unlink(self._waiting)
            return False
        return True


def _traced(run: Callable[[], None]) -> None:
    """Run in a thread that `threading` has not started, and let debuggers and coverage see it all the same."""
    sys.settrace(threading.gettrace())
    run()


def _shut() -> LockType:
    """A lock at which a thread waits until another one opens it."""
    gate = allocate_lock()
    gate.acquire()
    return gate


def _open(gate: LockType) -> None:
    with suppress(RuntimeError):  # it is open
        gate.release()


def _places(errors: Iterable[BaseException], name: str) -> set[tuple[int, int]]:
    """The places that errors name as "lost" or "in_doubt"."""
    ranges = [each for error in errors for each in getattr(error, name, ())]
    return {(each.partition, offset) for each in ranges for offset in each.offsets}
