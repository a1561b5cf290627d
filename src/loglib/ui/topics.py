"""Topics: the topics at a path, open for reading while the page is shown.

Invariant: a topic is opened with mode="r": nothing is locked, created or written. A name that is asked for must be a
name in the directory, so no request leads out of it. A topic that was moved or replaced is opened again, once.

Threads: safe for all.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ..config.arguments import check_names
from ..errors import LogClosedError, LogError, LogMovedError
from ..log import catalog, topic_file
from ..log.log import Log
from ..partition import Partition
from ..system.files import REAL
from ..system.not_copyable import NotCopyable
from ..topic import Topic

_MOST_OPEN = 200  # topics; an open topic without readers has no open files of its own

T = TypeVar("T")


class Topics(NotCopyable):
    """The topic at a path, or all topics in that directory, whichever are there when they are asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        absolute = os.path.abspath(os.fsdecode(path))
        self.only = os.path.basename(absolute) if topic_file.exists(REAL, absolute) else None  # the path is a topic
        self.root = os.path.dirname(absolute) if self.only is not None else absolute
        self._open: OrderedDict[str, Topic] = OrderedDict()  # the one that was used last comes last
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The names of the topics, sorted."""
        if self.only is not None:
            return [self.only]
        return catalog.names(REAL, self.root)

    def path_of(self, name: str) -> str:
        """The path of a topic; `FileNotFoundError` if there is none of this name."""
        with suppress(ValueError):
            check_names(name)
            path = os.path.join(self.root, name)
            if self.only in (None, name) and not name.startswith(".") and topic_file.exists(REAL, path):
                return path
        self._forget(name)
        raise FileNotFoundError(f"there is no topic {name!r} in {self.root}")

    def ask(self, name: str, look: Callable[[Topic], T]) -> T:
        """The result of `look`, called with the open topic. Raises the errors of `Topic.open` and of `look`."""
        topic = self._opened(name)
        try:
            return look(topic)
        except (LogMovedError, LogClosedError):
            self._forget(name)
            return look(self._opened(name))

    def close(self) -> None:
        """Close all topics."""
        with self._lock:
            opened, self._open = list(self._open.values()), OrderedDict()
        for each in opened:
            with suppress(LogError, OSError):
                each.close()

    def _opened(self, name: str) -> Topic:
        path = self.path_of(name)
        with self._lock:
            found = self._open.get(name)
            if found is not None:
                self._open.move_to_end(name)
        if found is None:
            found = Topic.open(path, mode="r")
            with self._lock:
                found = self._open.setdefault(name, found)
                while len(self._open) > _MOST_OPEN:  # a thread that still uses it keeps it
                    self._open.popitem(last=False)
        return found

    def _forget(self, name: str) -> None:
        with self._lock:
            self._open.pop(name, None)


def log_of(partition: Partition) -> Log:
    """The log of a partition, whose batch headers tell more than the partition does."""
    return partition._access.log  # noqa: SLF001
