"""Open topic: a topic that is open, as archives, transactions and groups know it, and how they open one by its path.

Invariant: `topic.Topic` is the only topic. The rooms below it do not import the module that is built of all of them: it
is loaded, by its name, when a path is opened.

Threads: as topic.py.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from .append.access import Access
from .append.handles import Handles
from .append.placement import Placement
from .config.lazy import called_later
from .config.policies import TopicConfig
from .partition import Partition
from .system.files import Files

_open_topic = called_later("loglib.topic", "open_topic")


class OpenTopic(ABC):
    """The base of `Topic`: what it is made of."""

    path: str  # absolute, or the URI of a place
    name: str
    log_id: bytes
    _files: Files
    _clock: Callable[[], int]  # microseconds UTC
    _handles: Handles
    _placement: Placement

    @property
    @abstractmethod
    def config(self) -> TopicConfig:
        """The topic's policies now."""

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


def open_for_reading(topic: OpenTopic | str | os.PathLike[str]) -> AbstractContextManager[OpenTopic]:
    """Open the topic at a path or URI for reading, until the end of the `with` statement. An open topic stays open."""
    if isinstance(topic, OpenTopic):
        return nullcontext(topic)
    opened: AbstractContextManager[OpenTopic] = _open_topic(topic, mode="r")
    return opened
