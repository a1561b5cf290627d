"""Spool: records of a process on their way into a topic. A thread appends them, so that nobody waits for a disk.

Invariant: a record that `put` accepted is in the topic exactly once when `flush` has returned True, whatever errors the
disk gave meanwhile. A record that was not accepted is counted, and the count is reported in the topic as soon as there
is room. A record that the topic can never take is dropped and counted as well, and holds up no other. Only a killed
process loses accepted records, those of the last moments; `flush` says which are safe.

Several processes may have spools on one topic, also more than it has partitions. Each takes a partition that is free.
A process that finds none leaves the file `waiting` in the topic's directory. The others then give their partition back
after each portion.

A spool that has nothing to do gives its partition back after some seconds.

Threads: safe for all. Forks: a child has an empty spool and a thread of its own; the records of before belong to the
parent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import compress
from operator import not_
from typing import NamedTuple, Unpack

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
from ..system.process import in_child, try_each
from ..topic import Topic, open_topic

__all__ = ["WAITING", "Drops", "Spool"]

logger = logging.getLogger("loglib")

WAITING = "waiting"
_PORTION_BYTES = 4 << 20
_LINGER_S = 0.05  # to collect records, so that one flush serves many
_LOOK_S = 0.5  # between looks whether another process waits for a partition
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
        partitions: int | None = None,
        files: Files = REAL,
        **policies: Unpack[Policies],
    ) -> None:
        """`patience_s`: how long `put` may wait for room. `report` makes the record that tells of drops.

        `partitions` and the policies are for a topic that does not exist yet.
        """
        check_count("capacity_bytes", capacity_bytes)
        self.path = topic_path(path)
        self._capacity_bytes = capacity_bytes
        self._patience_s = patience_s
        self._report = report
        self._partitions = partitions
        self._files = files
        self._policies = policies
        self._begin()
        _in_child.add(self._begin_in_child)

    def _begin(self) -> None:
        # Reentrant, since a finalizer or a signal handler may log in the middle of a call here. So each statement that
        # changes a counter makes no call between reading and writing it.
        self._state = threading.Condition(threading.RLock())
        self._items: deque[_Item] = deque()
        self._held_bytes = 0  # of the items, and of the portion that is being written
        self._accepted = self._written = 0  # records, since the beginning
        self._unreported = 0  # dropped records
        self._first_drop_us: int | None = None
        self._last_drop_us = 0
        self._told = b""  # the last report
        self.dropped = 0  # records that were not accepted, since the beginning
        self._urgent = False
        self._closing = False
        self._thread: object | None = None  # which takes records
        self._alive: set[object] = set()  # threads that have not ended, also those that give the partition back
        self._topic: Topic | None = None
        self._failing = False
        self._waits = False  # whether this process has left the file

    def _begin_in_child(self, parent_pid: int) -> None:
        del parent_pid
        self._begin()
        _in_child.add(self._begin_in_child)

    # --- for those who have records ------------------------------------------------------------------

    def put(self, value: bytes, timestamp_us: int, *, urgent: bool = False) -> bool:
        """Accept a record, or count it as dropped: False. `urgent` records are written at once, with those before."""
        size = len(value)
        with self._state:
            if self._held_bytes + size > self._capacity_bytes and not self._has_room(size):
                self._note_drop(timestamp_us)
                return False
            self._items.append(_Item(value, timestamp_us))
            self._held_bytes += size
            self._accepted += 1
            if self._thread is None:
                self._start()
            elif len(self._items) == 1 or (urgent and not self._urgent):
                self._state.notify_all()
            self._urgent = self._urgent or urgent
        return True

    def drop(self) -> None:
        """Count a record that could not be made."""
        with self._state:
            self._note_drop(time.time_ns() // 1000)
            self._state.notify_all()

    def _note_drop(self, timestamp_us: int) -> None:
        if self._first_drop_us is None:
            self._first_drop_us = timestamp_us
        self._last_drop_us = timestamp_us
        self._unreported += 1
        self.dropped += 1

    def _has_room(self, size: int) -> bool:
        """Wait for room, as long as the patience lasts."""
        deadline = time.monotonic() + self._patience_s
        while self._held_bytes + size > self._capacity_bytes:
            rest = deadline - time.monotonic()
            if rest <= 0 or size > self._capacity_bytes:
                return False
            self._urgent = True
            self._state.notify_all()
            self._state.wait(rest)
        return True

    def flush(self, timeout: float) -> bool:
        """Write what was accepted so far. Whether it is written, which may take `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._state:
            wanted = self._accepted
            while self._written < wanted:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    return False
                if self._thread is None:
                    self._start()
                self._urgent = True
                self._state.notify_all()
                self._state.wait(rest)
        return True

    def close(self, timeout: float) -> int:
        """Write what was accepted, for at most `timeout` seconds, and give the partition back.

        Returns the number of records that are not written. A record that is put later begins anew.
        """
        self.flush(timeout)
        deadline = time.monotonic() + timeout
        with self._state:
            thread = self._thread
            if thread is None:
                return 0
            self._closing = True
            self._state.notify_all()
            while thread in self._alive and (rest := deadline - time.monotonic()) > 0:
                self._state.wait(rest)
            return self._accepted - self._written

    def _start(self) -> None:
        """Start the thread. If the system has none left, the next call tries again; the records wait meanwhile.

        Without `threading`, which has locks of its own and waits for the thread: this may be a finalizer in the middle
        of such a start.
        """
        self._closing = False
        self._thread = thread = object()
        self._alive.add(thread)
        try:
            start_new_thread(_traced, (self._run, thread))
        except RuntimeError:
            self._thread = None
            self._alive.discard(thread)

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self, thread: object) -> None:
        try:
            self._work()
        finally:
            with self._state:
                self._alive.discard(thread)
                self._state.notify_all()

    def _work(self) -> None:
        nap = _FIRST_NAP_S
        portion: list[_Item] = []
        while True:
            portion = portion or self._next_portion()
            if not portion:
                break
            left = self._write(portion)
            self._note_written(portion, left)
            if left:
                self._sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP_S)
            else:
                nap = _FIRST_NAP_S
            portion = left
            with self._state:
                if self._closing and portion:  # closing has waited long enough
                    self._items.extendleft(reversed(portion))
                    self._thread = None
                    break
        self._give_back()

    def _next_portion(self) -> list[_Item]:
        """The records that are to be written next; none if the spool is closed. Ends the thread then."""
        idle_since = time.monotonic()
        with self._state:
            while not self._items and not self._unreported:
                if self._closing:
                    self._thread = None
                    return []
                if self._topic is None:
                    self._state.wait()
                    continue
                self._state.wait(_LOOK_S)
                if not self._items and (time.monotonic() - idle_since > _IDLE_S or self._is_awaited()):
                    self._give_back()
            if not self._urgent and not self._closing:
                self._state.wait(_LINGER_S)  # an urgent record ends it
            self._urgent = False
            portion, size = [], 0
            while self._items and size < _PORTION_BYTES:
                portion.append(self._items.popleft())
                size += len(portion[-1].value)
            if count := self._unreported:
                first_us, last_us = self._first_drop_us or 0, self._last_drop_us
                self._first_drop_us = None
                self._unreported -= count
                self._told = self._report(Drops(count, first_us, last_us))
                portion.append(_Item(self._told, last_us))
                size = len(self._told)
                self._accepted += 1
                self._held_bytes += size
        return portion

    def _note_written(self, portion: list[_Item], left: list[_Item]) -> None:
        with self._state:
            count = len(portion) - len(left)
            size = sum(len(each.value) for each in portion) - sum(len(each.value) for each in left)
            self._written += count
            self._held_bytes -= size
            self._state.notify_all()

    def _sleep(self, seconds: float) -> None:
        """Sleep, unless the spool is closed."""
        deadline = time.monotonic() + seconds
        with self._state:
            while not self._closing and (rest := deadline - time.monotonic()) > 0:
                self._state.wait(rest)

    def _write(self, portion: list[_Item]) -> list[_Item]:
        """Append the records, and flush them. Returns those that are not in the topic."""
        appended: list[OffsetRange] = []
        try:
            topic = self._opened()
            portion = self._writable(portion, topic.config.max_record_bytes)
            values, timestamps = [each.value for each in portion], [each.timestamp_us for each in portion]
            appended = topic.append_many(values, timestamps=timestamps)
            topic.flush()
        except Exception as error:  # noqa: BLE001  Of any kind: no other thread could write the records later.
            errors = [error, *self._give_back()]
            if isinstance(error, LockedError):
                self._ask_for_a_partition()
            elif not self._failing and not isinstance(error, LogClosedError):
                self._failing = True  # told once, until something can be written again
                logger.warning("%s: %d records wait in memory: %s", self.path, len(portion), error)
            if isinstance(error, LogMovedError):  # the topic that is made next shall have them
                return portion
            return self._missing(portion, appended or getattr(error, "appended", ()), errors)
        self._failing = False
        if self._waits:
            self._waits = False
            with suppress(OSError):
                self._files.unlink(self._waiting)
        elif self._is_awaited():
            self._give_back()
        return []

    def _writable(self, portion: list[_Item], limit_bytes: int) -> list[_Item]:
        """The records that the topic can take. The others are dropped and counted, but for a report of drops."""
        writable = [len(each.value) <= limit_bytes and each.timestamp_us in _INT64 for each in portion]
        if all(writable):
            return portion
        with self._state:
            for each in compress(portion, map(not_, writable)):
                if each.value is not self._told:
                    self._note_drop(time.time_ns() // 1000)
        return list(compress(portion, writable))

    def _missing(
        self, portion: list[_Item], appended: Iterable[OffsetRange], errors: Sequence[Exception]
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
                if self._closing:
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
            if self._files.exists(os.path.join(self.path, NAME)):
                self._topic = open_topic(self.path, shared=True, files=self._files)
            else:
                policies = self._policies
                self._topic = open_topic(
                    self.path, shared=True, files=self._files, partitions=self._partitions, **policies
                )
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


def _traced(run: Callable[[object], None], thread: object) -> None:
    """Run in a thread that `threading` has not started, and let debuggers and coverage see it all the same."""
    sys.settrace(threading.gettrace())
    run(thread)


def _places(errors: Iterable[Exception], name: str) -> set[tuple[int, int]]:
    """The places that errors name as "lost" or "in_doubt"."""
    ranges = [each for error in errors for each in getattr(error, name, ())]
    return {(each.partition, offset) for each in ranges for offset in each.offsets}
