"""Counter: counts records by topic, partition and time window, and publishes the counts to a trail.

Invariant: each tier counts each record of a partition exactly once, across any crash. A counter begins after the range
that its tier published last. An entry is flushed before the group commits, and before it releases a partition. A member
that gets a partition reads the trail again. So records that are delivered again after a crash are not counted again.

Threads: a counter belongs to one thread, an auditor as well; `close` may be called from any thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from ..config.quantities import Duration, microseconds, seconds
from ..errors import LockedError
from ..format.batch import Batch, stored_header
from ..log.history import SET_BACK, HistoryPoint, compare_history
from ..system.clock import SYSTEM
from ..system.not_copyable import NotCopyable
from ..topic import Topic
from .tally import merged, tallies
from .trail import LOG, Entry, entries, logs_of, publish

logger = logging.getLogger("loglib")
WINDOW = timedelta(minutes=10)
_GROUP = "audit"


class Counter(NotCopyable):
    """Counts the records that an application has handled, by time window, and publishes the counts.

    `tier` names the application. Give `on_assign` and `on_revoke` to the group, and call `publish` before it commits:
    then records that are delivered again, to any member, are not counted again. The trail must be open for writing,
    with `shared=True` if other processes write it as well.
    """

    def __init__(
        self, trail: Topic, tier: str, *, window: timedelta = WINDOW, clock: Callable[[], int] = SYSTEM
    ) -> None:
        self.window_us = microseconds(window)
        if not tier or self.window_us <= 0:
            raise ValueError(f"a counter needs the name of a tier and a window above 0, not {tier!r} and {window!r}")
        self._trail = trail
        self._tier = tier
        self._clock = clock
        self._counted: dict[tuple[str, int], int] = {}  # by log id and partition: the end of the counted range
        self._published: dict[tuple[str, int], list[HistoryPoint]] = {}  # by the same: ends of ranges in the trail
        self._new: dict[tuple[str, str, int], list[Entry]] = {}  # not published; by topic, log id and partition
        self.on_assign()

    def on_assign(self, partitions: object = None) -> None:
        """Read the counted ranges, perhaps of another process, from the trail. For the group to call."""
        del partitions  # the entries of all are read
        published: dict[tuple[str, int], list[HistoryPoint]] = {}
        for entry in entries(self._trail):
            if entry.tier == self._tier and entry.partition is not None:
                published.setdefault((entry.log_id, entry.partition), []).append(entry.point)
        unpublished = {key[1:] for key in self._new}
        self._counted = {key: end for key, end in self._counted.items() if key in unpublished}
        self._published = published

    def on_revoke(self, partitions: object = None) -> None:
        """Publish the counts before another member takes over. For the group to call."""
        del partitions
        self.publish()

    def add(self, topic: Topic, batch: Batch) -> None:
        """Count the records of a batch, except those that were counted before."""
        log_id, partition = topic.log_id.hex(), batch.partition
        counted = self._counted_to(topic, partition)
        if batch.next_offset <= counted:
            return
        if batch.offsets.start < counted:
            batch = batch.between(counted, batch.offsets.stop)
        windows = tallies(batch, self.window_us)
        ranges = self._new.setdefault((topic.name, log_id, partition), [])
        start = batch.offsets.start
        if ranges and ranges[-1].end == start:
            before = ranges.pop()
            start = before.start
            windows = merged([before.windows, windows])
        header = stored_header(batch)
        ranges.append(Entry(
            self._tier, topic.name, log_id, partition, start, batch.next_offset, header.header_crc,
            header.writer_epoch, self.window_us, windows, time=0,
        ))  # fmt: skip
        self._counted[log_id, partition] = batch.next_offset

    @property
    def has_new(self) -> bool:
        """True if some counts are not published yet."""
        return bool(self._new)

    def _counted_to(self, topic: Topic, partition: int) -> int:
        """The end of the counted range in the log's present history; -1 if there is none."""
        key = topic.log_id.hex(), partition
        if key not in self._counted:
            points = sorted(self._published.get(key, ()), key=lambda each: each.offset)
            self._counted[key] = -1
            if points:
                found = compare_history(points, logs_of(topic)[partition])
                self._counted[key] = found.common if found.relation in SET_BACK else points[-1].offset
        return self._counted[key]

    def publish(self, caught_up: tuple[Topic, int] | None = None) -> int:
        """Publish the new counts, and flush them. Returns the number of records.

        `caught_up`: a topic, and a time in microseconds. All its records that were flushed before then are counted.

        `LockedError` if other processes have all partitions of the trail for ten seconds; the next call publishes these
        counts and later ones. `ForkedHandleError` in a forked child; open the trail and make the counter there.
        """
        now = self._clock()
        found = [each._replace(time=now) for counted in self._new.values() for each in counted]
        if caught_up is not None:
            topic, time = caught_up
            found.append(Entry(self._tier, topic.name, topic.log_id.hex(), None, 0, 0, 0, 0, self.window_us, {}, time))
        publish(self._trail, found)
        self._new.clear()
        return sum(tally.records for entry in found for tally in entry.windows.values())


class Auditor(NotCopyable):
    """Counts the records of a topic's log, and publishes the counts to a trail.

    It reads as the consumer group "audit", so retention can wait for it: `Retention(hold_for=["audit"], ...)`. Several
    auditors of a topic share its partitions. The topic may be open for reading; the trail must be open for writing,
    with `shared=True` if several processes write it.
    """

    def __init__(
        self, topic: Topic, trail: Topic, *, window: timedelta = WINDOW, group: str = _GROUP,
        clock: Callable[[], int] = SYSTEM,
    ) -> None:  # fmt: skip
        self._topic = topic
        self._clock = clock
        self._counter = counter = Counter(trail, LOG, window=window, clock=clock)
        self._member = topic.group(
            group, commit="manual", on_out_of_range="start", on_assign=counter.on_assign, on_revoke=counter.on_revoke
        )
        self._open_until = 0  # the end of the last window that is not over yet, microseconds
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._working = threading.RLock()
        self._depth = 0  # of nested uses, such as by a signal handler

    def publish(self) -> int:
        """Count all flushed records and publish the counts. Returns the number of records read."""
        with self._at_work():
            began, found = self._clock(), 0
            for batch in self._member.batches(timeout=0.0):
                self._counter.add(self._topic, batch)
                found += len(batch)
                self._open_until = max(self._open_until, max(batch.timestamps) + 2 * self._counter.window_us)
                if self._ended.is_set():
                    break
            alone = len(self._member.assignment) == len(self._topic.partitions)
            is_over = 0 < self._open_until < began  # all windows so far are over: publish that once
            if found or self._counter.has_new or (alone and is_over):
                caught_up = alone and not self._ended.is_set()
                self._counter.publish((self._topic, began) if caught_up else None)
                self._member.commit()
            if is_over:
                self._open_until = 0
            return found

    def run(self, *, every: Duration = 60.0) -> None:
        """Publish at this interval, a duration, until `close` is called from another thread or in a signal handler.

        If others have the trail for too long, a warning is logged, and the next round publishes all.
        """
        every_s = seconds("every", every)
        while not self._ended.is_set():
            with self._at_work():
                if not self._ended.is_set():
                    try:
                        self.publish()
                    except LockedError as error:
                        logger.warning("the counts of %s wait for their trail: %s", self._topic.path, error)
            self._ended.wait(every_s)
        self.close()

    def close(self) -> None:
        """Leave the group. The next auditor counts the records that were flushed since the last `publish`.

        It waits for a `publish` in another thread, which ends after its present batch. In a signal handler it does not
        wait: the interrupted call leaves the group at its end. Then the topic and the trail may be closed.
        """
        self._ended.set()
        with self._at_work():
            pass

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Use the member in one thread at a time. The outermost use then leaves the group if `close` was called."""
        if self._pid != os.getpid():  # a fork: a thread of the parent may have held the lock
            self._pid, self._working, self._depth = os.getpid(), threading.RLock(), 0
        with self._working:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth and self._ended.is_set():
                    self._member.close()

    def __enter__(self) -> Auditor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
