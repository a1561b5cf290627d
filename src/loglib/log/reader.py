"""Reader: reads records from one or more partitions, up to an end or for ever.

Invariant: a reader owns its position and writes nothing to the log. `tell` returns the offset of the next
record for each partition, and records that are only read ahead do not count; `seek` accepts the result of `tell`.
Order holds within a partition. Partitions take turns, one block each.

A reader refers to its topic, because a topic that nothing refers to closes itself.

A reader that follows a topic also reads the partitions that are added, from their beginning: their records are newer
than the reader. The system reports that the topic's description was replaced. Without a report the reader looks
twice a second.

Threads: a reader belongs to one thread. `close` may be called from any thread, and ends the iteration.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import length_hint
from typing import Literal

from ..config.arguments import Time, check_count, spin_seconds
from ..config.quantities import Duration, timeout_seconds
from ..errors import CorruptLogError, LogClosedError, LogError, OffsetOutOfRangeError, TooManyFilesError
from ..format.batch import Batch
from ..format.display import Shown, sized
from ..format.record import Damage, Record
from ..system.clock import monotonic
from ..system.files import with_a_free_descriptor
from ..system.not_copyable import NotCopyable
from ..system.notify import Waiter
from ..system.reentry import enter, is_mine
from .arrow_stream import ArrowStream
from .cursor import BorrowedRange, Cursor, Piece
from .log import LOOK_S, FixedMark, Log
from .lookup import StartLike, ends_together, resolve, starts_of
from .topic_file import NAME as DESCRIPTION

__all__ = ["OnDamage", "Reader", "StartLike"]

logger = logging.getLogger("loglib")

OnDamage = Literal["raise", "skip"]
_FOR_EVER = 1 << 63
_ADDED_S = 0.5  # how often to look for added partitions without a report: a look costs a system call


class Reader(ArrowStream, Shown, NotCopyable):
    """An iterable of `Record`s over some partitions; made by `read` and `follow`.

    Iteration continues at the current position, so a second loop continues the first. A reader keeps its
    topic open. Closing the reader ends the iteration. If the topic is closed, an iteration with an end or a
    timeout raises `LogClosedError`, because it would look complete; one that follows for ever just ends.

    Damage raises `CorruptLogError`. With `on_damage="skip"` the reader logs a warning, adds the damage to
    `gaps`, and continues at the next whole batch. It always does so with a gap that `repair` has declared.

    If the topic was opened with `donors`, these copies are asked first for damaged and lost offsets. Records of a copy
    that are proven to be the same are handed out; the reader logs a warning and adds the range to `healed`. A start
    that is a time may then begin with earlier records, if damage may hold the first one.
    """

    def __init__(
        self,
        logs: Sequence[Log],
        start: StartLike,
        *,
        clock: Callable[[], int],
        end: StartLike | None = None,
        follow: bool = False,
        timeout: Duration | None = None,
        spin: Duration | None = None,
        on_damage: OnDamage = "raise",
        track: Callable[[Callable[[str], None]], object],
        logs_now: Callable[[], Sequence[Log]] | None = None,
    ) -> None:
        """`logs_now` returns the logs of a topic that may get more partitions."""
        if on_damage not in ("raise", "skip"):
            raise ValueError(f'on_damage must be "raise" or "skip", not {on_damage!r}')
        timeout = timeout_seconds(timeout)
        self.gaps: list[Damage] = []  # the damage skipped so far, in reading order
        self.healed: list[BorrowedRange] = []  # read from other copies so far, in reading order
        self._skip = on_damage == "skip"
        self._logs = {log.partition: log for log in logs}
        self._logs_now = logs_now
        self._added_at = monotonic() + _ADDED_S  # when to look for added partitions
        self._clock = clock
        self._follow = follow
        still = [log for log in logs if isinstance(log.writer, FixedMark)]
        self._timeout = 0.0 if still and follow else timeout  # logs that do not grow are followed to their ends
        self._spin_s = spin_seconds(spin)  # how long a wait polls the watermarks before it sleeps
        self._closed = False
        self._why = ""  # why the reader is closed, if its topic was closed
        self._reading = threading.RLock()  # held while files are in use, so that close() can see it
        self._waiter: Waiter | None = None
        self._has_waited = False  # since the last look: then there is usually one small batch to read
        # The waiter's process id, and the logs' number and restores when it was made.
        self._watching = (0, 0, 0)
        super().__init__()
        self._ends = dict.fromkeys(self._logs, _FOR_EVER)
        if not follow:
            past_damage = self._reads_past_damage
            self._ends = ends_together(logs, end, now_us=clock(), past_damage=past_damage)
        starts = self._starts(start, others="begin")
        self._cursors = {partition: self._cursor(partition, each) for partition, each in starts.items()}
        self._turns = deque(self._cursors)
        self._topic = track(self._end)  # a topic closes itself when nothing refers to it

    def _facts(self) -> Iterator[tuple[str, object]]:
        if self._closed:
            yield "", "closed"
        yield "at", self.tell()
        yield "lag", sized(sum(self.lag_bytes().values()))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Record]:
        return chain.from_iterable(self._record_runs())  # a loop in C: a generator of records costs a tenth more

    def _record_runs(self) -> Iterator[Iterator[Record]]:
        while self._has_records(self._timeout):
            yield self._unread
        self._check_not_cut_short()

    def batches(self) -> Iterator[Batch]:
        """Iterate over batches (whole columns). A partly read batch yields its remaining records."""
        while (batch := self._next_batch(self._timeout)) is not None:
            yield self._take_batch(batch)
        self._check_not_cut_short()

    def _next_batch(self, timeout: float | None) -> Batch | None:
        """The batch that is handed out next, perhaps in part; None if `_has_records` would return False."""
        if not self._closed and (batch := self._after_whole_batch()) is not None:
            return batch
        while (piece := self._next_piece(timeout)) is not None:
            if isinstance(piece, Batch):
                return piece
            self._split_bundle(piece)
        return None

    def poll(
        self, *, max_records: int | None = None, max_bytes: int | None = None, timeout: Duration | None = 0.0
    ) -> list[Record]:
        """Return up to `max_records` records, or the first that together reach `max_bytes` of keys and values.

        Waits up to `timeout` seconds (None: for ever) for the first record, and returns an empty list if
        none comes. Without limits it returns one batch, or the remaining records of a partly read one, or many small
        batches that were read together. Raises `LogClosedError` if the reader is closed, or if the topic is
        closed before a record comes.
        """
        for name, limit in (("max_records", max_records), ("max_bytes", max_bytes)):
            if limit is not None:
                check_count(name, limit)
        timeout = timeout_seconds(timeout)
        self._check_open()
        before = self.tell()
        polled: list[Record] = []
        room = max_bytes
        try:
            while self._has_more(polled, timeout):
                for record in self._unread:
                    polled.append(record)
                    if room is not None:
                        room -= len(record.value or b"") + len(record.key or b"")
                    if len(polled) == max_records or (room is not None and room <= 0):
                        return polled
                if max_records is None and max_bytes is None and self._is_current_made():
                    break
        except BaseException:  # an interrupt: the caller does not get the polled records
            now = self.tell()
            with suppress(LogError):
                self.seek({partition: offset for partition, offset in before.items() if offset != now[partition]})
            raise
        if not polled and self._why and not self._is_at_end():
            self._check_open()
        return polled

    def tell(self) -> dict[int, int]:
        """The offset of the next record for each partition."""
        positions = {partition: cursor.offset for partition, cursor in self._cursors.items()}
        for piece in reversed(self._pieces):
            if (number := self._next_number(piece)) < len(piece):
                positions[piece.partition] = piece.offset_of(number)
        return positions

    def seek(self, start: StartLike) -> None:
        """Go to a start. A mapping moves only the partitions that it names.

        The keys of a mapping may be strings of digits, as when a result of `tell` was stored as JSON. An
        invalid start raises the errors of `Topic.read`, and moves nothing.
        """
        self._check_open()
        self._take_in_added()
        cursors = {partition: self._cursor(partition, each) for partition, each in self._starts(start).items()}
        for partition, cursor in cursors.items():  # all or none: an invalid start has already raised
            self._cursors[partition].close()
            self._cursors[partition] = cursor
            self._forget(partition)

    def lag_bytes(self) -> dict[int, int]:
        """Bytes of log between the position and the flushed end, for each partition."""
        self._take_in_added()
        ends = {partition: log.mark().flushed_end for partition, log in self._logs.items()}
        return {partition: max(0, ends[partition] - offset) for partition, offset in self.tell().items()}

    @property
    def closed(self) -> bool:
        """True if the reader is closed, by `close` or with its topic."""
        return self._closed

    def close(self) -> None:
        """End the iteration, also an iteration that waits in another thread."""
        self._closed = True
        self._left.extend(self._unread)  # empties the iterator in one step in C, so that its loop ends
        if (waiter := self._waiter) is not None:
            waiter.wake()
        # Otherwise the thread that is reading cleans up. This call may be a signal handler that has interrupted it.
        if not is_mine(self._reading) and self._reading.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._reading.release()

    # --- the topic -------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        """Close because the topic was closed. An iteration that is not at its end then raises."""
        if not self._closed:
            self._why = why
        self.close()

    def _check_not_cut_short(self) -> None:
        """Raise if the topic was closed before the iteration ended by itself."""
        ends_by_itself = not self._follow or self._timeout is not None
        if self._why and ends_by_itself and not self._is_at_end():
            raise LogClosedError(f"{self._why}, and read on from {self.tell()}")

    def _is_at_end(self) -> bool:
        return all(offset >= self._ends[partition] for partition, offset in self.tell().items())

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosedError(self._why or "this reader is closed; read or follow again")

    # --- places ----------------------------------------------------------------------------------

    def _starts(self, start: StartLike, *, others: str | None = None) -> dict[int, str | int | Time]:
        return starts_of(start, self._logs, now_us=self._clock(), others=others)

    def _reads_past_damage(self, log: Log) -> bool:
        """True if a start or an end may lie in damage. A time then means the damage that may hold its record."""
        return self._skip or bool(log.donors)

    def _cursor(self, partition: int, start: str | int | Time) -> Cursor:
        """A cursor at the start. If retention drops a start that the caller gave without an offset, look again."""
        log = self._logs[partition]
        on_gap = partial(_note, self.gaps)
        on_damage = on_gap if self._skip else None
        on_lent = partial(_note_lent, self.healed)
        while True:
            offset = start if isinstance(start, int) else resolve(log, start, past_damage=self._reads_past_damage(log))
            try:
                return Cursor.at(log, offset, on_damage=on_damage, on_gap=on_gap, on_lent=on_lent)
            except OffsetOutOfRangeError:
                if isinstance(start, int):
                    raise

    def _watched_files(self, logs: Iterable[Log]) -> list[str]:
        """The files whose change may bring records: the logs' watermarks, and the description of a topic that grows."""
        watermarks = [log.watermark_path for log in logs]
        if self._logs_now is None:
            return watermarks
        topic = os.path.dirname(next(iter(self._logs.values())).directory)
        return [*watermarks, os.path.join(topic, DESCRIPTION)]

    def _check_moved(self) -> None:
        """Act on a report that a file was moved, removed or replaced. `LogMovedError` if a log is gone."""
        self._added_at = 0.0
        for log in self._logs.values():
            log.check_moved()

    def _take_in_added(self) -> None:
        """Add the partitions that the topic has got. Each dictionary is replaced: other threads may look at it."""
        if self._logs_now is None or self._closed:
            return
        self._added_at = monotonic() + _ADDED_S
        for log in self._logs_now():
            number = log.partition
            if number not in self._turns:
                self._logs, self._ends = self._logs | {number: log}, self._ends | {number: _FOR_EVER}
                self._cursors = self._cursors | {number: self._cursor(number, "begin")}
                self._turns.append(number)  # last: after an interrupt the partition is added again

    # --- records ---------------------------------------------------------------------------------

    def _has_records(self, timeout: float | None) -> bool:
        """Fill `_unread`; False at the end, or after `timeout` seconds without a record."""
        if length_hint(self._unread):
            return True
        if self._closed:
            return False
        piece = self._next_piece(timeout)
        if piece is None:
            return False
        self._make_records(piece)
        return True

    def _has_more(self, polled: list[Record], timeout: float | None) -> bool:
        """Fill `_unread` for a poll. An error after the first record is left to the next poll, which meets it again."""
        if not polled:
            return self._has_records(timeout)
        try:
            return self._has_records(0.0)
        except LogError:  # raised now, it would lose the polled records
            return False

    def _next_piece(self, timeout: float | None, *, wanted_bytes: int = 0) -> Piece | None:
        """The piece that is handed out next, perhaps in part; None if `_has_records` would return False.

        If there is one, and it is small, more pieces are read without waiting, up to `wanted_bytes` in all.
        """
        with enter(self._reading, "the reader"):
            try:
                piece = self._read_or_wait(timeout)
                if piece is not None and wanted_bytes:
                    self._read_more(wanted_bytes)
                return piece
            except LogClosedError:
                if not self._closed:
                    raise
                return None  # the topic was closed while this thread was reading
            finally:
                if self._closed:
                    self._release()

    def _read_or_wait(self, timeout: float | None) -> Piece | None:
        deadline = None if timeout is None else monotonic() + timeout
        spin_until: float | None = None
        while not self._closed:
            if self._pieces:
                if self._next_number(self._pieces[0]) < len(self._pieces[0]):
                    return self._pieces[0]
                self._pieces.popleft()
                self._current = None  # the last reference: the next block reuses memory in the processor's cache
                continue
            if self._logs_now is not None and monotonic() >= self._added_at:
                self._take_in_added()
            if self._read_news() or self._read_ahead():
                if self._waiter is not None:
                    self._waiter.progressed()
                continue
            remaining = None if deadline is None else deadline - monotonic()
            if not self._follow or (remaining is not None and remaining <= 0):
                return None
            if self._spin_s and spin_until is None:
                spin_until = monotonic() + self._spin_s
            if spin_until is None or not self._spin(spin_until, deadline):
                self._wait(remaining)
        return None

    def _read_more(self, wanted_bytes: int) -> None:
        with suppress(LogError):  # the next call meets it again
            while sum(piece.content_bytes for piece in self._pieces) < wanted_bytes and self._read_ahead():
                pass

    def _read_news(self) -> bool:
        """Read the one batch that a partition has got during a wait, in few steps. False: `_read_ahead` must look.

        This is done once after each wait, so that a busy partition does not keep the others from their turns.
        """
        waited, self._has_waited = self._has_waited, False
        for cursor in self._cursors.values() if waited else ():
            place = cursor.place
            try:
                batch = cursor.read_news()
                if batch is not None and (not self._skip or self._is_sound(batch)):
                    self._pieces = deque([*self._pieces, batch])
            except BaseException:  # otherwise the batch that it has read would be skipped
                cursor.place = place
                raise
            if batch is not None:
                return True
        return False

    def _read_block(self, partition: int, cursor: Cursor) -> list[Piece]:
        """The next block of a partition. If there are no more descriptors, the other cursors close their segments."""
        while True:
            try:
                return cursor.read_pieces(self._logs[partition].mark().flushed_end)
            except TooManyFilesError:
                if sum(map(Cursor.leave, self._cursors.values())) == 0:
                    raise

    def _read_ahead(self) -> bool:
        """Read one block of the next partition that has more; False if no partition has."""
        for _ in self._cursors:
            partition = self._turns[0]
            self._turns.rotate(-1)
            cursor, end = self._cursors[partition], self._ends[partition]
            if cursor.offset >= end:
                continue
            place = cursor.place
            try:
                pieces = self._read_block(partition, cursor)
                if self._skip:
                    pieces = list(filter(self._is_sound, pieces))
                if pieces and pieces[-1].next_offset > end:  # the end lies inside a batch or a block
                    pieces = [part for piece in pieces if len(part := piece.between(0, end))]
                    cursor.seek(end)
                self._pieces = deque([*self._pieces, *pieces])
            except BaseException:  # otherwise what it has read would be skipped
                cursor.place = place
                raise
            if pieces:
                return True
        return False

    def _is_sound(self, piece: Piece) -> bool:
        """True if the columns of a batch agree with its header. Otherwise the batch is a gap."""
        try:
            piece.decode()
        except CorruptLogError as error:
            _note(self.gaps, Damage.of(error, piece.partition, range(piece.offset_of(0), piece.next_offset)))
            return False
        return True

    def _spin(self, until: float, deadline: float | None) -> bool:
        """Poll the watermarks for a moment. False when it is time to sleep; True if the caller should look for records.

        A log that this process writes is not polled: its writer needs the interpreter, and wakes the reader.
        """
        now = monotonic()
        watermarks = [log.watermark_of_another() for log in self._logs.values()]
        if now >= until or None in watermarks:
            return False
        until = min(until, now + LOOK_S, math.inf if deadline is None else deadline)
        self._has_waited = True
        while not self._closed and monotonic() < until:
            for watermark in watermarks:
                if watermark is None or watermark.has_next_mark():
                    return True
        return True

    def _wait(self, timeout: float | None) -> None:
        # A forked child needs its own waiter. Replaced files need a new one.
        watching = os.getpid(), len(self._logs), sum([log.restored for log in self._logs.values()])
        self._has_waited = True
        if self._waiter is None or self._watching != watching:
            self._waiter, self._watching = self._watch(), watching
            return  # the caller looks once more: records from before the watch are not reported
        if self._waiter.wait(LOOK_S if timeout is None else min(timeout, LOOK_S)):
            self._check_moved()
            self._watching = (0, 0, 0)  # the files that were replaced need a new watch

    def _watch(self) -> Waiter:
        """A waiter for all partitions; it does not report earlier changes.

        Its descriptors are more important than segments, which are opened again.
        """
        for each in self._cursors.values():
            each.leave()
        logs = list(self._logs.values())
        watched = [log for log in logs if log.writer is None]
        paths = self._watched_files(watched)
        # The system cannot watch files that exist only in a test's memory.
        use_inotify = all(log.files.real for log in watched)
        waiter = with_a_free_descriptor(logs[0].directory, lambda: Waiter(paths, use_inotify=use_inotify))
        for log in logs:
            if log.writer is not None:
                log.writer.listen(waiter)
        return waiter

    def _release(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None


def _note(gaps: list[Damage], gap: Damage) -> None:
    """A function, not a method: cursors must not refer to their reader, which is freed with its last user."""
    if gap not in gaps:  # a reader that went back meets it again
        logger.warning("%s", gap)
        gaps.append(gap)


def _note_lent(healed: list[BorrowedRange], lent: BorrowedRange) -> None:
    """Note a range that another copy has given. Neighbouring ranges become one."""
    if any(_has(each, lent) for each in healed):  # after a seek back
        return
    last = healed[-1] if healed else lent
    if last.offsets.stop == lent.offsets.start and last._replace(offsets=lent.offsets) == lent:
        healed[-1] = lent._replace(offsets=range(last.offsets.start, lent.offsets.stop))
        return
    logger.warning("%s", lent)
    healed.append(lent)


def _has(known: BorrowedRange, lent: BorrowedRange) -> bool:
    within = known.offsets.start <= lent.offsets.start and lent.offsets.stop <= known.offsets.stop
    return within and known._replace(offsets=lent.offsets) == lent
