"""Consumer groups on several topics, in an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from ..format.batch import Batch
from ..format.record import Record
from ..groups import TopicPartition, several_topics
from ..groups.group import GroupOptions
from .group import AsyncGroup
from .topic import AsyncTopic

__all__ = ["group"]


def group(
    topics: Sequence[AsyncTopic], name: str, **options: Unpack[GroupOptions]
) -> AsyncGroup[tuple[str, Record], tuple[str, Batch], TopicPartition]:
    """A member of a group on several topics; the options are those of `loglib.group`. It joins with `async with`."""
    return AsyncGroup(partial(several_topics.group, [each.topic for each in topics], name, **options))
