"""Handles: the readers and writers that a topic has open, and whether it is open itself.

Invariant: once `closed` is set no writer is added. The topic, its partitions and its background thread
all refer to the handles, and the handles refer to none of them: a topic that nobody refers to can be
collected, and closes itself then. Its readers refer to it: it stays open for as long as one of them is used.

Threads: safe for all; `opening` is held while a writer is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .append.writer import Timer, Writer
from .errors import LogClosedError
from .lifetime import Listeners
from .unique import Unique

__all__ = ["Handles"]


class Handles(Unique):
    """What one topic has open."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.topic: Callable[[], object] = lambda: None  # a weak reference to it
        self.closed: LogClosedError | None = None
        self.timer: Timer | None = None  # for the writers to come
        self.writers: list[Writer] = []
        self._readers: Listeners[[str]] = Listeners()  # and members of groups

    def check_open(self) -> None:
        if self.closed is not None:
            raise self.closed

    def set_timer(self, timer: Timer | None) -> None:
        """The timer that the writers, present and to come, are to touch; None: they flush by themselves."""
        with self.opening:
            self.timer = timer
            for writer in self.writers:
                writer.timer = timer

    def add_writer(self, writer: Writer) -> None:
        writer.timer = self.timer
        self.writers.append(writer)

    def track(self, end: Callable[[str], object]) -> object:
        """Have a reader, or a member of a group, end when the topic is closed: call `end`, which is told why.

        Returns the topic, for the reader to refer to: it closes itself when nobody does.
        """
        self._readers.add(end)
        return self.topic()

    def end_readers(self) -> list[Exception]:
        """Tell all of them that the topic is closed; returns what they have raised."""
        return self._readers.call(str(self.closed))

    def abandon_in_child(self, why: LogClosedError) -> None:
        """After a fork: all of it is the parent's."""
        self.opening = threading.Lock()
        self.closed = why
