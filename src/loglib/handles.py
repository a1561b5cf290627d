"""Handles: the readers and writers that a topic has open, and whether it is open itself.

Invariant: once `closed` is set no writer is added. The topic, its partitions and its background thread
all refer to the handles, and the handles refer to none of them: a topic that nobody refers to can be
collected, and closes itself then. Its readers refer to it: it stays open for as long as one of them is used.

Threads: safe for all; `opening` is held while a writer is made.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from .append.writer import Timer, Writer
from .errors import LogClosedError
from .unique import Unique

__all__ = ["Handles"]


class Closable(Protocol):
    """A reader or a member of a group."""

    def keep(self, topic: object) -> None:
        """Refer to the topic, which closes itself when nobody does."""

    def end(self, why: str) -> None:
        """Close, because the topic is closed."""


Tracked = TypeVar("Tracked", bound=Closable)


class Handles(Unique):
    """What one topic has open."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.topic: Callable[[], object] = lambda: None  # a weak reference to it
        self.closed: LogClosedError | None = None
        self.timer: Timer | None = None  # for the writers to come
        self.writers: list[Writer] = []
        self._readers: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()

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

    def track(self, reader: Tracked) -> Tracked:
        """Remember the reader, or member of a group, for as long as somebody has it, and have it keep the topic."""
        self._readers[id(reader)] = reader
        reader.keep(self.topic())
        return reader

    def end_readers(self) -> None:
        """Tell them that the topic is closed."""
        references = self._readers.valuerefs()  # a copy made in C: other threads may add readers meanwhile
        for reader in filter(None, (reference() for reference in references)):
            reader.end(str(self.closed))

    def abandon_in_child(self, why: LogClosedError) -> None:
        """After a fork: all of it is the parent's."""
        self.opening = threading.Lock()
        self.closed = why
