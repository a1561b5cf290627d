"""AsyncTopic: a topic in an event loop.

Invariant: the loop never waits for a disk or for a lock. An append that only adds to the open batch is made
immediately, in the loop's thread. All other appends and all flushes are made in a thread of the loop's pool, in the
order of the calls (calls.py). A topic is opened and closed in such a thread, also if the task is cancelled meanwhile.

An `AsyncTopic` belongs to one event loop. The topic itself (`topic`) may be used beside it, from any thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from ..append.record_arguments import HeadersLike
from ..append.stats import TopicStats
from ..config.quantities import Duration
from ..format.batch import Batch
from ..format.record import Position, Record
from ..groups import TopicPartition, several_topics
from ..groups.group import GroupOptions
from ..log.reader import OnDamage, StartLike
from ..system.not_copyable import NotCopyable
from ..system.process import Listeners
from ..topic import Topic
from .calls import Writing, opened, settled
from .group import AsyncGroup
from .reader import AsyncReader
from .share import AsyncShare

if TYPE_CHECKING:
    from ..jobs.share import ShareOptions

P = ParamSpec("P")
T = TypeVar("T")

_YIELD_EVERY = 64  # appends; about 0.2 ms


def _in_turn(method: Callable[Concatenate[Topic, P], T]) -> Callable[Concatenate[AsyncTopic, P], Awaitable[T]]:
    """Make a coroutine function of a topic's method: with the same arguments, in its turn, in a thread."""

    @wraps(method)
    async def call(self: AsyncTopic, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._writing.ask(partial(method, self.topic, *args, **kwargs), flush=False)

    return call


class AsyncTopic(NotCopyable):
    """A topic for tasks of one event loop. `aio.open` opens it."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self._writing = Writing(topic.flush)
        self._at_once = 0  # appends that waited for nothing, so far
        self._readers: Listeners[[]] = Listeners()

    # --- append ----------------------------------------------------------------------------------

    async def append(
        self, value: bytes | None, key: bytes | None = None, *, timestamp: int | datetime | None = None,
        headers: HeadersLike | None = None, partition: int | None = None, sync: bool = False,
        producer: tuple[str, int] | None = None,
    ) -> Position:  # fmt: skip
        """Append one record and return its partition and offset; see `Topic.append`.

        With `sync` it waits until the record is durable. Tasks that wait at the same time share a flush. A cancelled
        append has either appended nothing, or is complete when `CancelledError` is raised.
        """
        topic = self.topic
        if not sync and producer is None and self._writing.idle:
            position = topic._append_at_once(value, key, timestamp=timestamp, headers=headers, partition=partition)
            if position is not None:
                self._at_once += 1
                if self._at_once % _YIELD_EVERY == 0:  # otherwise a task that appends in a loop blocks all others
                    await asyncio.sleep(0)
                return position
        call = partial(
            topic.append, value, key, timestamp=timestamp, headers=headers, partition=partition, producer=producer
        )
        return await self._writing.ask(call, flush=sync)

    append_many = _in_turn(Topic.append_many)
    append_arrow = _in_turn(Topic.append_arrow)

    async def flush(self) -> None:
        """Make everything appended durable and visible to readers. Tasks that wait at the same time share a flush."""
        await self._writing.ask(lambda: None, flush=True)

    # --- read ------------------------------------------------------------------------------------

    def read(
        self, start: StartLike = "begin", end: StartLike | None = None, *, on_damage: OnDamage = "raise"
    ) -> AsyncReader:
        """A reader of all partitions that ends at `end`, or at the present end; see `Topic.read`.

        The call finds the start in the loop's thread, which reads some headers.
        """
        return self._reader(AsyncReader(self.topic.read(start, end, on_damage=on_damage)))

    def follow(
        self, start: StartLike = "end", timeout: Duration | None = None, *, on_damage: OnDamage = "raise"
    ) -> AsyncReader:
        """A reader that waits for more records, until `timeout` seconds pass without one. None waits for ever."""
        return self._reader(AsyncReader(self.topic.follow(start, timeout, on_damage=on_damage), timeout=timeout))

    def batches(
        self, start: StartLike = "begin", end: StartLike | None = None, *, on_damage: OnDamage = "raise"
    ) -> AsyncGenerator[Batch, None]:
        """Whole columns of all partitions, from `start` to `end` or to the present end."""
        return self.read(start, end, on_damage=on_damage).batches()

    def group(self, name: str, **options: Unpack[GroupOptions]) -> AsyncGroup[Record, Batch, int]:
        """A member of a consumer group; the options are those of `Topic.group`. It joins with `async with`.

        `on_assign` and `on_revoke` are called in a thread.
        """
        return AsyncGroup(partial(self.topic.group, name, **options))

    def share(self, name: str, **options: Unpack[ShareOptions]) -> AsyncShare:
        """A member of a share, for jobs; the options are those of `Topic.share`. It joins with `async with`."""
        return AsyncShare(partial(self.topic.share, name, **options))

    async def stats(self) -> TopicStats:
        """Figures for monitoring; see `Topic.stats`."""
        return await asyncio.to_thread(self.topic.stats)

    # --- end -------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True if the topic is closed."""
        return self.topic.closed

    async def close(self) -> None:
        """Wait for the calls that are under way, end the readers, flush, and release the locks; see `Topic.close`."""
        await settled(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await self._writing.done()
        try:
            await asyncio.to_thread(self.topic.close)
        finally:
            self._readers.call()

    def _reader(self, reader: AsyncReader) -> AsyncReader:
        self._readers.add(reader.wake)
        return reader


@asynccontextmanager
async def open_topic(path: str | os.PathLike[str], **options: Any) -> AsyncIterator[AsyncTopic]:
    """Open the topic in the directory `path` for the running event loop, and close it at the end of `async with`.

    The options, and the errors, are those of `loglib.Topic.open`.
    """
    topic = AsyncTopic(await opened(partial(Topic.open, path, **options), Topic.close))
    try:
        yield topic
    finally:
        await topic.close()


def group(
    topics: Sequence[AsyncTopic], name: str, **options: Unpack[GroupOptions]
) -> AsyncGroup[tuple[str, Record], tuple[str, Batch], TopicPartition]:
    """A member of a group on several topics; the options are those of `loglib.group`. It joins with `async with`."""
    return AsyncGroup(partial(several_topics.group, [each.topic for each in topics], name, **options))
