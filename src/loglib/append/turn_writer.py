"""Turn writer: the part of a partition's writer that gives the partition to other processes, and takes it back.

Invariant: `is_parked` is True while other processes may write. Then the open batch is empty, all that was appended is
written, and the files stay open. `is_parked` becomes True only under both the writer's turn of threads and `lock`, and
False only under `lock`. So a call that has one of the two, and finds it False, has the partition until it is through.
A call that takes several steps holds the partition (`held`).

Threads: `_taking` is held by the thread that waits for the partition. It is acquired before the writer's turn and
`lock`, which other threads need meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar
from weakref import WeakSet

from ..config.policies import TopicConfig
from ..errors import LogClosedError, LogError
from ..format.watermark import Mark
from ..system import lock
from ..system.clock import Clock, monotonic
from ..system.group_commit import Turn
from ..system.reentry import enter, refuse
from .batch_writer import BatchWriter
from .tail import TailWriter
from .turns import TURN_S, Turns

# To take a partition costs about half a millisecond. A turn lasts longer, unless others can write during a long sync.
_LEAST_TURN_S = 0.004
_LONG_FLUSH_S = 0.001
_NOTHING_SEEN = (-1, -1)
_LONGEST_PAUSE_S = 0.1  # between two looks while records wait for a flush, and none is added


T = TypeVar("T")


class Keeper(Protocol):
    """The writer's view of the thread that looks whether other processes wait."""

    def watch_turns(self, pause_s: float) -> None:
        """A writer has its partition from now on. `pause_s`: the time until the first look, in seconds."""


class _Hold:
    """A call that needs the partition for several steps. It holds nothing any more when an interrupt has lost it."""


class TurnWriter(BatchWriter):
    """A batch writer that may give its partition up. Without `turns` it never does."""

    directory: str  # its path, for messages

    def __init__(
        self,
        disk: TailWriter,
        partition: int,
        config: TopicConfig,
        clock: Clock,
        held: lock.Lock,
        turns: Turns | None,
    ) -> None:
        """`turns`: those of the topic, if other processes may write it, too."""
        super().__init__(disk, partition, config, clock)
        self._held = held
        self._turn = Turn()
        self._turns = turns
        self._taking = threading.RLock()
        self._is_awaited = False  # whether a thread waits for another process, with `_taking`
        self.is_parked = False
        self.keeper: Keeper | None = None  # None: the writer gives the partition up after each flush
        self.check: Callable[[], object] = lambda: None  # raises if the topic must not be written any more
        self.on_hold: Callable[[], object] | None = None  # called when another process has left a transaction here
        self._ending = False  # the writer is being closed, and no call waits any longer
        self._holds: WeakSet[_Hold] = WeakSet()  # calls that need the partition for several steps
        self._seen = _NOTHING_SEEN  # the end and the mark at the last look
        self._pause_s = TURN_S  # until the next one
        self._is_unwatched = False  # the call that took the partition is about to flush, and may give it up
        self._taken_at = monotonic()
        self._flush_s = 0.0  # of the last flush, in seconds
        self._others_bytes = 0  # that other processes have appended

    @property
    def takes_turns(self) -> bool:
        """True if other processes may write the partition, too."""
        return self._turns is not None

    def has(self, held: lock.Lock) -> bool:
        """True if this is the lock of the writer."""
        return self._held is held

    def published(self) -> Mark:
        """The last publication of any process."""
        return self.publication.look()

    # --- the threads of this process ---------------------------------------------------------------

    def check_outside(self) -> None:
        """Raise `LogError` in the middle of a call of this thread that holds one of the writer's locks."""
        if self.has_lock() or self.publication.is_mine():
            refuse(self.directory)

    def _take_turn(self, action: Callable[[], T], *, unless: Callable[[], bool] | None = None) -> T | None:
        """Run the action in this thread's turn. Raises `LogError` in the middle of another call of this thread."""
        self.check_outside()  # the thread that has the turn may wait for it
        self._turn.check_outside(self.directory)
        return self._turn.take(action, unless=unless)

    def _take_reporting(self, action: Callable[[], T]) -> T | None:
        """Run the action in this thread's turn, with the partition. A `LogError` of it also reports what is owed."""
        self.check_outside()

        def run() -> T | None:
            with self.held():
                return self._take_turn(action)

        return self._reporting(run)

    def _reporting(self, action: Callable[[], T]) -> T:
        """Run the action. A `LogError` of it also reports what is owed."""
        try:
            return action()
        except LogError as error:
            self._losses.report(error)
            raise

    # --- take ------------------------------------------------------------------------------------

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The writer's lock, while this process has the partition."""
        while True:
            if self.is_parked:
                self._take_back()
            with self.lock:
                if not self.is_parked:
                    yield
                    return

    @contextmanager
    def held(self, *, wait_s: float | None = None, says_who: bool = True) -> Iterator[None]:
        """Keep the partition for several steps, which may each take the lock.

        `LockedError` if another process still has it after `wait_s` seconds; by default as long as appends wait.
        Without `says_who` it names none: to find out which one it is takes ten times as long as to find the partition
        taken.
        """
        if self._turns is None:
            yield
            return
        hold = _Hold()
        try:
            with self.lock:
                self._holds.add(hold)  # before it is taken back: from then on it is not given up
            if self.is_parked:
                self._take_back(wait_s, says_who=says_who)
            yield
        finally:
            self._holds.discard(hold)
            if self.keeper is None and not self.is_parked:
                self._take_turn(self._hand_over)

    def _take_back(self, wait_s: float | None = None, *, says_who: bool = True, flushes: bool = False) -> None:
        """Wait for the partition, and find where its log ends now. Another thread may do it for this one.

        With `flushes` the caller flushes next, and then calls `_watch`: most often it has given the partition up.
        """
        turns = self._turns
        assert turns is not None
        wait_s = turns.wait_s if wait_s is None else wait_s
        deadline = monotonic() + wait_s
        place = self.disk.place
        self._check_unawaited(wait_s, says_who=says_who)
        with enter(self._taking, place.path):
            with self.lock:  # a thread that gives the partition up may not have unlocked it yet
                if not self.is_parked:
                    return
            self.disk.check()
            self._check_ending()
            try:
                self._is_awaited = wait_s > 0
                taken = turns.take(place, wait_s=max(deadline - monotonic(), 0.0), is_over=lambda: self._ending)
            finally:
                self._is_awaited = False
            if not taken:
                self._check_ending()  # which has ended the wait
                raise lock.refusal(place, says_who=says_who, advice=lock.waited_for(wait_s))
            try:
                self.check()
                with self.lock:
                    held = self.disk.mark.held
                    if self.closed is None:
                        self._find_tail()
                        self._seen, self._pause_s = _NOTHING_SEEN, turns.first_look_s()
                        self._taken_at = monotonic()
                        self.is_parked = False
            finally:
                if self.is_parked:
                    self._release_turn(turns)
            self._is_unwatched = True
        if not flushes:
            self._watch()
        if self.on_hold is not None and self.disk.mark.held_txn and self.disk.mark.held != held:
            self.on_hold()

    def _watch(self) -> None:
        """Let the keeper look when this turn is over, if it does not."""
        if self._is_unwatched:
            if self.keeper is not None and not self.is_parked:
                self.keeper.watch_turns(self._pause_s)
            self._is_unwatched = False

    def _check_unawaited(self, wait_s: float | None, *, says_who: bool = True) -> None:
        """`LockedError` if a thread waits for another process: whoever does not wait does not wait for it either."""
        if wait_s is not None and wait_s <= 0 and self._is_awaited:
            raise lock.refusal(self.disk.place, says_who=says_who)

    def _check_ending(self) -> None:
        if self._ending:
            raise self.closed or LogClosedError(f"{self.disk.place.path} is being closed; open the topic again")

    def _find_tail(self) -> None:
        before = self.batch.tail
        tail = self.disk.resume(before)
        if tail is None:
            tail = self.disk.reopen()._replace(records=before.records)
        self._others_bytes += max(tail.end - before.end, 0)
        self.batch = self.open_batch(tail)
        if self.disk.mark.flushed_end >= before.end:  # also by others; else the flush of its own records is still due
            self._limits.flushed_records = tail.records

    # --- give up ---------------------------------------------------------------------------------

    def look(self, *, is_over: bool) -> float:
        """Give the partition up if this turn is over, or if nothing is done here.

        Returns the time until the next look, in seconds; infinity if this process does not have the partition any more.
        """
        turns = self._turns
        if turns is None or self.closed is not None:
            return math.inf
        if self.is_parked:
            self._release_again(turns)
            return math.inf
        before, self._seen = self._seen, self._to_see()
        is_idle = self._seen == before
        if is_idle:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        elif before != _NOTHING_SEEN:
            rest_s = self._taken_at + TURN_S - monotonic()
            self._pause_s = rest_s if rest_s > 0 else TURN_S
        # Records that wait for a flush stay together: each batch that is written earlier takes more room.
        if is_over or (is_idle and not self.unflushed()) or self.disk.failure is not None:
            self._take_turn(self._hand_over)
        return self._pause_s if self._has_partition() else math.inf

    def is_idle(self) -> bool:
        """True if nothing was appended or flushed since the last look."""
        return self._to_see() == self._seen

    def _to_see(self) -> tuple[int, int]:
        return self.next_offset, self.disk.mark.sequence

    def _has_partition(self) -> bool:
        return not self.is_parked

    def _end_turn(self) -> None:
        """At a flush: give the partition up if another process waits. The caller has the turn of threads."""
        turns = self._turns
        if turns is None or (self.keeper is not None and not (self._is_worth_a_turn() and turns.ends_with_flush())):
            return
        with suppress(LogError):  # it is owed to the next call
            self._hand_over()

    def _is_worth_a_turn(self) -> bool:
        """True if another process may come now: during a long sync, or after enough short ones."""
        return self._flush_s >= _LONG_FLUSH_S or monotonic() - self._taken_at >= _LEAST_TURN_S

    def _hand_over(self) -> None:
        """Write what was appended, and give the partition up. The caller has the turn of threads.

        It is not flushed. This process does that later, without the partition; or another one does it with its own
        records, or a recovery.
        """
        turns = self._turns
        assert turns is not None
        with self.lock:
            if self.is_parked or self._holds or self.closed is not None:
                return
            if self.disk.failure is None:  # else this process never writes here again
                self._seal()
                self.disk.active.give_room_back(self.batch.tail)
                self.publication.leave(self.batch.tail)
                self.batch = self.open_batch(self.batch.tail)
            self.is_parked = True  # from here on, an interrupt leaves it to `look`, or to the next call
            self._release_turn(turns)

    def give_room_back(self) -> None:
        """Cut off the zeros after the log, since the disk is short of space. A parked writer has none."""
        with self.lock:
            if self.closed is None and not self.is_parked and self.disk.failure is None:
                self.disk.active.room.give_up()
                self.disk.active.give_room_back(self.batch.tail)

    def _release_turn(self, turns: Turns) -> None:
        self._held.give_up()
        turns.given_up(self.disk.place)

    def _release_again(self, turns: Turns) -> None:
        """Give the lock up if an interrupt came just before that."""
        if self._taking.acquire(blocking=False):
            try:
                with self.lock:
                    if self.is_parked and self.closed is None:
                        self._release_turn(turns)
            finally:
                self._taking.release()
