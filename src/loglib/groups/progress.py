"""Progress: how far a member has read, handed out and handled each partition that it owns.

Invariant: the positions say where to go on in each partition, for whoever comes after an interrupt as well;
readers are only the way there, and can be made anew at any time. What is handed out is a run, of which
there is one at a time; it becomes handled when its receiver comes back for more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from ..reader import Reader, watch
from ..unique import Unique
from ..wait import Waiter
from .assignment import TopicPartition
from .place import Place
from .run import RUN_S, Run, Way

__all__ = ["Progress"]

_LONGEST_RUN = 8192  # records


class Progress(Unique):
    """What one member of a group reads; who owns what, and what is committed, is the group's own matter."""

    def __init__(self, place: Place) -> None:
        self.handled: dict[TopicPartition, int] = {}  # and not committed yet: the offset after the last one handled
        self.run: Run | None = None  # being handed out
        self._place = place
        self._positions: dict[TopicPartition, int] = {}  # behind the run
        self._paused: set[TopicPartition] = set()
        self._by_hand: dict[TopicPartition, int] = {}  # committed by the caller: handled, though its loop ends there
        self._readers: dict[str, Reader] = {}  # by topic, of what is not paused, at their positions:
        self._stale = False  # unless they have to be made anew,
        self._moved: set[TopicPartition] = set()  # or but for these, which have still to be sent there
        self._turns: deque[str] = deque()  # of topics
        self._waiter: Waiter | None = None
        self._run_length = 1

    # --- partitions ------------------------------------------------------------------------------

    def add(self, starts: Mapping[TopicPartition, int]) -> None:
        """Read these partitions, too."""
        self._positions.update(starts)
        self._stale = True

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions no more, and forget what was handled of them."""
        for each in partitions:
            for offsets in (self.handled, self._positions, self._by_hand):
                offsets.pop(each, None)
            self._paused.discard(each)
        self._stale = True

    def pause(self, partition: TopicPartition) -> None:
        """Hand out nothing more of this partition."""
        if partition not in self._paused:
            if self.run is not None and self.run.partition == partition:
                self.run.cut()
            self._paused.add(partition)
            self._stale = True

    def resume(self, partition: TopicPartition) -> None:
        """Go on where it was paused."""
        if partition in self._paused:
            self._paused.remove(partition)
            self._stale = True

    def next_offsets(self) -> dict[TopicPartition, int]:
        """The next record to be handed out, by partition."""
        run = self.run
        return self._positions | ({} if run is None else {run.partition: run.next_after(run.offset)})

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on from there, and count it as progress."""
        if of_run := self.run is not None and self.run.partition == partition:
            self.run.cut()
        self._go_to(partition, offset)
        self._by_hand.pop(partition, None)
        self.handled[partition] = offset
        if of_run:
            self.run = None

    def overtaken(self) -> list[TopicPartition]:
        """The partitions of which retention has dropped what was to come next."""
        logs = self._place.logs
        return [each for each, offset in self._positions.items() if offset < logs[each].mark().log_start_offset]

    # --- records ---------------------------------------------------------------------------------

    def take(self, way: Way, most: int | None = None) -> Run | None:
        """The next records, if there are any just now: up to `most`, or up to the end of a batch."""
        if way == "one by one":
            most = self._run_length
        try:
            self._prepare_readers()
            for _ in self._readers:
                topic = self._turns[0]
                self._turns.rotate(-1)
                batch = self._readers[topic].take(most)
                if batch is not None:
                    partition = TopicPartition(topic, batch.partition)
                    self.run = Run(partition, batch, way)
                    self._positions[partition] = batch.next_offset
                    return self.run
        except BaseException:
            self._stale = True  # what they have read and not handed over is read once more
            raise
        return None

    def leave(self, run: Run, *, came_back: bool) -> None:
        """The receiver of a run has come back for more, or has not: note what is handled, and where to go on."""
        if self.run is not run:  # seek() or close() has ended it
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
        self.run = None  # at last: after an interrupt it is left once more

    def settle(self) -> None:
        """Somebody comes for more: what was polled is handled now, the last of a loop that is still held is not."""
        if self.run is not None:
            self.run.cut()
            self.leave(self.run, came_back=self.run.way == "polled")

    def put_back(self) -> None:
        """Nobody will come back for what is being handed out."""
        if self.run is not None:
            self.run.cut()
            self.leave(self.run, came_back=False)

    def so_far(self) -> dict[TopicPartition, int]:
        """What is handled, if the record being handed out is."""
        run = self.run
        if run is None or run.offset == run.batch.offsets.start:
            return dict(self.handled)
        return self.handled | {run.partition: run.next_after(run.offset)}

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """These offsets are committed."""
        for partition, offset in offsets.items():
            if self.handled.get(partition, offset) <= offset:
                self.handled.pop(partition, None)

    def committed_by_hand(self, offsets: Mapping[TopicPartition, int]) -> None:
        """The same, by the caller: it counts as handled, though a loop may still end in it."""
        self._by_hand.update(offsets)

    # --- readers ---------------------------------------------------------------------------------

    def wait(self, timeout: float) -> None:
        """Until there may be more, or `timeout` seconds are over."""
        if self._waiter is None:
            self._waiter = watch(self._place.logs[each] for each in self._positions if each not in self._paused)
            return  # and look once more: what came before the watch began is not reported
        self._waiter.wait(timeout)

    def wake(self) -> None:
        """End a wait in another thread."""
        if (waiter := self._waiter) is not None:
            waiter.wake()

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None

    def _prepare_readers(self) -> None:
        """Have a reader for each topic, at the positions."""
        if self._stale:
            self.close()
            by_topic: dict[str, dict[int, int]] = {}
            for (topic, number), offset in self._positions.items():
                if (topic, number) not in self._paused:
                    by_topic.setdefault(topic, {})[number] = offset
            self._readers = {
                topic: Reader(
                    [self._place.logs[TopicPartition(topic, number)] for number in offsets], dict(offsets),
                    follow=True, timeout=0.0, clock=self._place.clock,
                )
                for topic, offsets in by_topic.items()
            }  # fmt: skip
            self._turns = deque(self._readers)
            self._moved.clear()
            self._stale = False
        while self._moved:
            partition = next(iter(self._moved))
            self._readers[partition.topic].seek({partition.partition: self._positions[partition]})
            self._moved.discard(partition)

    def _go_to(self, partition: TopicPartition, offset: int) -> None:
        self._positions[partition] = offset
        if partition not in self._paused:
            self._moved.add(partition)

    def _adapt(self, run: Run) -> None:
        """Make the next runs shorter or longer, by how long this one took."""
        took = run.seconds()
        if took > 2 * RUN_S:
            self._run_length = max(1, self._run_length // 8)
        elif took < RUN_S:
            self._run_length = min(2 * self._run_length, _LONGEST_RUN)
