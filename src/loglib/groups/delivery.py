"""Delivery: the records that a member has read, handed out and handled in each partition that it owns.

Invariant: reading continues at the positions of the partitions, also after an interrupt. Cursors and blocks only serve
reading, and can be made again at any time. Records are handed out in runs, one run at a time. `Run.offset` is the next
record to be handed out, at any moment and from any thread. A record counts as handed out only when its receiver has it.
A run is handled when its receiver asks for more.

A partition that is read to its end sleeps until the system reports a write to its watermark, so a thousand
idle partitions cost nothing. Only the few partitions that were read last have open files.

A run is sized to take a few milliseconds: between two runs the group commits and looks at its members. A run
that takes longer is cut, so that the group also acts in a slow loop. The run reads the clock a few times, not
for each record.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Literal

from ..errors import StorageIOError
from ..format.batch import Batch, stored_header
from ..format.header import Header
from ..format.record import Record
from ..log.cursor import BorrowedRange, Cursor
from ..log.history import history_at
from ..log.log import LiveWriter
from ..system.clock import monotonic
from ..system.failures import is_out_of_descriptors
from ..system.not_copyable import NotCopyable
from ..system.notify import REPLACED, Observer
from .assignment import TopicPartition
from .directory import GroupDirectory

Way = Literal["one by one", "batch", "polled"]

RUN_S = 0.005
_CLOCK_READS = 16  # of one run, about
_MOST_MADE = 256  # records that are made between two looks at the clock; they fit the processor's cache


class Run:
    """The records of a batch, or of a part of it, while they are handed out.

    "one by one": a record is handled when the receiver asks for the next one. "batch": all records are
    handled when the loop asks for the next batch. "polled": all records are handled at the next call.
    """

    def __init__(self, partition: TopicPartition, batch: Batch, way: Way) -> None:
        self.partition = partition
        self.batch = batch
        self.way = way
        self.all_out = False  # all records are handed out; an attribute, because an interrupt cannot split its setting
        self._began = monotonic()
        self._made_together = max(1, min(len(batch) // _CLOCK_READS, _MOST_MADE))
        self._few: Iterator[Record] = iter(())  # the records that are being handed out, by a loop in C
        self._taken = batch.offsets.start  # the offset after `_few`
        self._stop = batch.offsets.stop
        if way == "one by one":
            batch.decode()  # once for all parts of the batch

    def next_few(self) -> Iterator[Record] | None:
        """The next records to be handed out; None at the end of the run, or if it took too long."""
        start, taken = self.batch.offsets.start, self._taken
        if taken >= self._stop or (taken > start and self.seconds() > 2 * RUN_S):
            return None
        few = self.batch.between(taken, min(taken + self._made_together, self._stop)).records()
        self._few, self._taken = iter(few), taken + len(few)
        if self._taken > self._stop:  # another thread has meanwhile cut the run
            self.cut()
            return None
        return self._few

    @property
    def offset(self) -> int:
        """The offset of the next record to be handed out; the end if there is none."""
        return self._stop if self.all_out else self._taken - length_hint(self._few)

    def seconds(self) -> float:
        """Seconds since the run began."""
        return monotonic() - self._began

    def handled_to(self, *, came_back: bool) -> int:
        """The offset up to which records are handled. `came_back`: the receiver asked for more."""
        if came_back:
            return self.offset
        start = self.batch.offsets.start
        return max(start, self.offset - 1) if self.way == "one by one" else start

    def next_after(self, offset: int) -> int:
        """The offset at which a reader at `offset` continues: at the batch's end this is the next batch."""
        return self.batch.next_offset if offset == self.batch.offsets.stop else offset

    def cut(self) -> None:
        """Hand out no more records. Any thread may call this."""
        if not self.all_out:
            self._taken -= len(list(self._few))
            self._stop = min(self._stop, self._taken)


logger = logging.getLogger("loglib")

_LONGEST_RUN = 8192  # records
_MOST_OPEN = 32  # partitions whose segment and watermark are open: two files each


class Delivery(NotCopyable):
    """The reading of one member. Ownership and commits belong to `Membership`."""

    def __init__(self, directory: GroupDirectory, observer: Observer) -> None:
        self.handled: dict[TopicPartition, int] = {}  # next offset after handled, uncommitted records
        self.run: Run | None = None  # the run that is being handed out
        self._directory = directory
        self._observer = observer  # of the watermarks, by partition
        self._positions: dict[TopicPartition, int] = {}  # the offset after the run
        self._paused: set[TopicPartition] = set()
        self._by_hand: dict[TopicPartition, int] = {}  # offsets that the caller committed, which are handled
        self._headers: dict[TopicPartition, Header] = {}  # of the batch handed out last
        self._turns: dict[TopicPartition, None] = {}  # partitions that may have more, in order; the others sleep
        self._blocks: deque[tuple[TopicPartition, Batch]] = deque()  # batches read and not fully handed out
        self._cursors: OrderedDict[TopicPartition, Cursor] = OrderedDict()  # after the blocks; last used is last
        self._stale = False  # all blocks and cursors must be made again
        self._moved: dict[TopicPartition, None] = {}  # the blocks and cursors of these partitions must be made again
        self._heard: dict[TopicPartition, LiveWriter] = {}  # the writers that report what they publish
        self._run_length = 1
        self._handed_out: Counter[TopicPartition] = Counter()  # records of earlier runs

    # --- partitions ------------------------------------------------------------------------------

    def add(self, starts: Mapping[TopicPartition, int]) -> None:
        """Read these partitions as well."""
        for partition, offset in starts.items():
            if partition not in self._positions:
                self._observer.observe_file(partition, self._directory.logs[partition].watermark_path)
            self._go_to(partition, offset)

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions, and forget their handled offsets."""
        for each in partitions:
            self._moved[each] = None
            self._observer.forget(each)
            for of_partition in (self.handled, self._positions, self._by_hand, self._headers, self._heard):
                of_partition.pop(each, None)
            self._paused.discard(each)
            self._directory.logs[each].release_files()

    def pause(self, partition: TopicPartition) -> None:
        """Hand out no more records of this partition."""
        if partition not in self._paused:
            if self.run is not None and self.run.partition == partition:
                self.run.cut()
            self._moved[partition] = None
            self._paused.add(partition)

    def resume(self, partition: TopicPartition) -> None:
        """Continue where the partition was paused."""
        if partition in self._paused:
            self._moved[partition] = None
            self._paused.remove(partition)

    def next_offsets(self) -> dict[TopicPartition, int]:
        """The offset of the next record, by partition."""
        run = self.run
        return self._positions | ({} if run is None else {run.partition: run.next_after(run.offset)})

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue at the offset, and count it as progress."""
        if of_run := self.run is not None and self.run.partition == partition:
            self.run.cut()
        self._go_to(partition, offset)
        self._by_hand.pop(partition, None)
        self.handled[partition] = offset
        if of_run:
            self.run = None

    def history(self, partition: TopicPartition, offset: int) -> int:
        """`history_at` of the offset; usually from the batch just read."""
        header = self._headers.get(partition)
        if header is not None and header.base_offset <= offset <= header.next_offset:
            return header.previous_crc if offset == header.base_offset else header.header_crc
        return history_at(self._directory.logs[partition], offset)

    def overtaken(self) -> list[TopicPartition]:
        """The partitions whose next record was dropped by retention."""
        overtaken = []
        for partition, offset in self._positions.items():
            log = self._directory.logs[partition]
            if offset < log.mark().log_start_offset:
                overtaken.append(partition)
            log.release_files()
        return overtaken

    # --- records ---------------------------------------------------------------------------------

    def changed(self, changes: Mapping[Hashable, Collection[str]]) -> None:
        """Read these partitions again, which were written. `LogMovedError` if a log was moved or removed."""
        for each, names in changes.items():
            if isinstance(each, TopicPartition) and each in self._positions:
                self._turns.setdefault(each)
                if REPLACED in names:
                    self._directory.logs[each].check_moved()

    def take(self, way: Way, most: int | None = None) -> Run | None:
        """The next records, if there are any now: up to `most`, or up to the end of a batch."""
        if way == "one by one":
            most = self._run_length
        try:
            self._prepare()
            if not self._blocks and not self._read():
                return None
            partition, batch = self._blocks[0]
            start, stop = max(batch.offsets.start, self._positions[partition]), batch.offsets.stop
            part = batch
            if start > batch.offsets.start or (most is not None and stop - start > most):
                batch.decode()  # once for all parts of the batch
                part = batch.between(start, stop if most is None else min(stop, start + most))
            if part.offsets.stop == stop:
                self._blocks.popleft()
                del batch  # the last reference, so that the next block reuses memory in the processor's cache
            self._headers[partition] = stored_header(part)
            self.run = Run(partition, part, way)
            self._positions[partition] = part.next_offset
            return self.run
        except BaseException:
            self._stale = True  # batches that were read but not handed out are read again
            raise

    def leave(self, run: Run, *, came_back: bool) -> None:
        """End the run: its handled offset and the next position are set. `came_back`: its receiver asked for more."""
        if self.run is not run:  # seek() or close() has ended the run
            return
        partition, by_hand = run.partition, self._by_hand.get(run.partition, -1)
        offset = max(run.handled_to(came_back=came_back), min(by_hand, run.offset))
        if run.way == "one by one":
            self._adapt(run)
        next_offset = run.next_after(offset)
        if offset > run.batch.offsets.start and next_offset > by_hand:
            self.handled[partition] = next_offset
        if next_offset != run.batch.next_offset:
            self._go_to(partition, next_offset)
        self._handed_out[partition] += run.offset - run.batch.offsets.start
        self.run = None  # the last step: after an interrupt the run is left again

    def settle(self, *, asks: bool = True) -> None:
        """End the run. If its receiver `asks` for more, polled records are handled; the last one of a loop is not."""
        if self.run is not None:
            self.run.cut()
            self.leave(self.run, came_back=asks and self.run.way == "polled")

    def so_far(self) -> dict[TopicPartition, int]:
        """The handled offsets, including the record that is being handed out."""
        run = self.run
        if run is None or run.offset == run.batch.offsets.start:
            return dict(self.handled)
        return self.handled | {run.partition: run.next_after(run.offset)}

    def handed_out(self) -> dict[TopicPartition, int]:
        """The number of records that were handed out, by partition."""
        counts, run = dict(self._handed_out), self.run
        if run is not None:
            counts[run.partition] = counts.get(run.partition, 0) + run.offset - run.batch.offsets.start
        return counts

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Forget the handled offsets that are committed."""
        for partition, offset in offsets.items():
            if self.handled.get(partition, offset) <= offset:
                self.handled.pop(partition, None)

    def committed_by_hand(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Count these offsets as handled, because the caller committed them, even if a loop ends there."""
        self._by_hand.update(offsets)

    # --- files -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._blocks.clear()
        while self._cursors:
            partition, cursor = self._cursors.popitem()
            cursor.close()
            self._directory.logs[partition].release_files()

    def _prepare(self) -> None:
        """Drop blocks and cursors that no longer match the positions."""
        if self._stale:
            self.close()
            self._turns = dict.fromkeys(self._positions)
            self._stale = False
        while self._moved:
            partition = next(iter(self._moved))
            if any(each == partition for each, _ in self._blocks):
                self._blocks = deque(each for each in self._blocks if each[0] != partition)
            cursor = self._cursors.pop(partition, None)
            if cursor is not None:
                cursor.close()
            self._turns[partition] = None
            self._moved.pop(partition, None)

    def _read(self) -> bool:
        """Read a block of the next partition that has more; False if no partition has."""
        while self._turns:
            partition = next(iter(self._turns))
            wanted = partition in self._positions and partition not in self._paused
            batches = self._read_block(partition) if wanted else []
            del self._turns[partition]
            if batches:
                self._turns[partition] = None  # put it at the end of the turns
                self._blocks.extend((partition, batch) for batch in batches)
                self._observer.progressed()
                return True
        return False

    def _read_block(self, partition: TopicPartition) -> list[Batch]:
        log = self._directory.logs[partition]
        try:
            self._listen(partition)
            cursor = self._cursors.get(partition)
            end = log.mark().flushed_end
            if cursor is None and self._positions[partition] == end:
                return []  # only the watermark was opened
            if cursor is None:
                cursor = Cursor.at(log, self._positions[partition], on_lent=_note_lent)
                self._cursors[partition] = cursor
            return cursor.read(end)
        except OSError as error:
            if not is_out_of_descriptors(error):
                raise
            if not self._cursors.keys() - {partition}:
                raise StorageIOError(log.directory, error, "opening it to read; raise the limit (ulimit -n)") from error
            self.close()  # the open files of other partitions may be the reason
            return self._read_block(partition)
        finally:
            self._keep_open(partition)

    def _listen(self, partition: TopicPartition) -> None:
        """Let a writer in this process report when it has published: the system's report comes too early."""
        writer = self._directory.logs[partition].writer
        if writer is not None and writer is not self._heard.get(partition):
            writer.listen(self._observer.bell(partition))
            self._heard[partition] = writer

    def _keep_open(self, partition: TopicPartition) -> None:
        """If too many files are open, close the files that were read longest ago."""
        if partition in self._cursors:
            self._cursors.move_to_end(partition)
        elif len(self._positions) > _MOST_OPEN:
            self._directory.logs[partition].release_files()
        while len(self._cursors) > _MOST_OPEN:
            other, cursor = self._cursors.popitem(last=False)
            cursor.close()
            self._directory.logs[other].release_files()

    def _go_to(self, partition: TopicPartition, offset: int) -> None:
        self._moved[partition] = None
        self._positions[partition] = offset

    def _adapt(self, run: Run) -> None:
        """Make the next runs shorter or longer, depending on the time that this run took."""
        took = run.seconds()
        if took > 2 * RUN_S:
            self._run_length = max(1, self._run_length // 8)
        elif took < RUN_S:
            self._run_length = min(2 * self._run_length, _LONGEST_RUN)


def _note_lent(lent: BorrowedRange) -> None:
    logger.warning("%s", lent)
