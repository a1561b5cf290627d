"""Open topic: a topic that is open, as archives, transactions and groups know it, and how they open one by its path.

Invariant: `topic.Topic` is the only topic. It hands in the way to open a path when it is imported, so the rooms below
it do not import the module that is built of all of them.

Threads: as topic.py.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from .append.access import Access
from .append.handles import Handles
from .append.placement import Placement
from .config.policies import TopicConfig
from .partition import Partition
from .system.files import Files

__all__ = ["OpenTopic", "open_for_reading", "opens_paths"]


class OpenTopic(ABC):
    """The base of `Topic`: what it is made of."""

    path: str  # absolute, or the URI of a place
    name: str
    log_id: bytes
    config: TopicConfig
    _files: Files
    _clock: Callable[[], int]  # microseconds UTC
    _handles: Handles
    _placement: Placement

    @property
    @abstractmethod
    def partitions(self) -> tuple[Partition, ...]:
        """The present partitions, by number."""

    @property
    @abstractmethod
    def _accesses(self) -> tuple[Access, ...]:
        """The access to each of the present partitions."""

    @abstractmethod
    def partition(self, number: int) -> Partition:
        """The partition with this number; `ValueError` if there is none."""


_OpenPath = Callable[[str | os.PathLike[str]], AbstractContextManager[OpenTopic]]
_open_path: _OpenPath  # of `Topic`, which hands it in


def opens_paths(open_path: _OpenPath) -> None:
    """Open paths by this function from now on."""
    global _open_path  # noqa: PLW0603
    _open_path = open_path


def open_for_reading(path: str | os.PathLike[str]) -> AbstractContextManager[OpenTopic]:
    """Open the topic at a path or URI for reading. The end of the `with` statement closes it."""
    return _open_path(path)
