"""Handles: the readers and writers that a topic has open, and whether the topic itself is open.

Invariant: after `closed` is set, no writer is added. The topic, its partitions and its background thread
refer to the handles. The handles refer to none of them, so garbage collection can free an unused topic, which
then closes itself. The readers refer to the topic, so it stays open as long as one of them is used.

Threads: safe for all; `opening` is held while a writer is made.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from ..errors import LogClosedError
from ..system.not_copyable import NotCopyable
from ..system.process import Listeners
from ..system.reentry import enter
from .batch_writer import Timer
from .losses import from_background
from .section_writer import SectionWriter
from .turn_writer import Keeper
from .turns import TURN_S, Turns


class Handles(NotCopyable):
    """The open readers and writers of one topic."""

    def __init__(self) -> None:
        self._opening = threading.RLock()
        self.topic: Callable[[], object] = lambda: None  # a weak reference to the topic
        self.closed: LogClosedError | None = None
        self.timer: Timer | None = None  # for future writers
        self.turns: Turns | None = None  # if other processes may write the topic, too
        self.keeper: Keeper | None = None  # as the timer
        self.flush_observers: list[Callable[[float], object]] = []  # called with the seconds of each flush
        self.writers: list[SectionWriter] = []
        self.store: object = None  # of the topic's transactions: it stays open as long as the topic
        self._readers: Listeners[[str]] = Listeners()  # readers, and members of groups

    @property
    def opening(self) -> threading.RLock:
        """The lock that is held while a writer is made; `LogError` if this thread is making one."""
        return enter(self._opening, "the topic")

    def check_outside(self) -> None:
        """Raise `LogError` in the middle of a call of this thread on one of the writers."""
        for writer in self.writers:
            writer.check_outside()

    def check_open(self) -> None:
        if self.closed is not None:
            raise self.closed

    def set_timer(self, timer: Timer | None) -> None:
        """Set the timer that present and future writers touch. None: they flush by themselves."""
        with self.opening:
            self.timer = timer
            for writer in self.writers:
                writer.timer = timer

    def add_writer(self, writer: SectionWriter) -> None:
        writer.timer = self.timer
        if self.keeper is not None and writer.takes_turns:
            writer.keeper = self.keeper
        writer.flush_clock.observers = self.flush_observers
        self.writers.append(writer)
        if writer.keeper is not None:
            writer.keeper.watch_turns(TURN_S)

    def look(self) -> float:
        """Give partitions up for which other processes wait, or that are not in use.

        Returns the time until the next look, in seconds; infinity if this process has none any more.
        """
        turns = self.turns
        assert turns is not None  # else no writer asks for a look
        writers = list(self.writers)
        having = [each for each in writers if not each.is_parked]  # few of the thousands that a topic may have
        is_over = turns.look(is_idle=all(each.is_idle() for each in having))
        if turns.held() > len(having):  # an interrupt has kept one of the others from giving its lock up
            having = writers
        return min([self._look(writer, is_over=is_over) for writer in having], default=math.inf)

    def _look(self, writer: SectionWriter, *, is_over: bool) -> float:
        try:
            return writer.look(is_over=is_over)
        except LogClosedError:
            return math.inf
        except BaseException as error:  # noqa: BLE001  Raised by the writer's next call.
            writer.raise_soon(from_background(error, writer.directory, "giving the partition up"))
            return TURN_S

    def track(self, end: Callable[[str], object]) -> object:
        """Let a reader or a group member end when the topic is closed: `end` is called with the reason.

        Returns the topic. The reader must refer to it, because a topic without references closes itself.
        """
        self._readers.add(end)
        return self.topic()

    def end_readers(self) -> list[Exception]:
        """End all readers, because the topic is closed; returns the errors that they raised."""
        return self._readers.call(str(self.closed))

    def abandon_in_child(self, why: LogClosedError) -> None:
        """After a fork: only the parent may use the handles."""
        self._opening = threading.RLock()
        self.closed = why
