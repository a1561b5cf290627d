"""AsyncGroup: a member of a consumer group in an event loop.

Invariant: a record is handled when the loop asks for the next one, as in `Group.follow`. After a cancelled task, an
error or a `break` the record is not handled: this member or another one gets it again. Records that a thread has read
for a cancelled task are read again, and none is skipped.

Reading, commits and checks of the other members are done in the loop's pool of threads, one at a time. Waiting needs no
thread: the member's observer is in the loop's selector. `on_assign` and `on_revoke` are called in a thread of the pool.

A member belongs to one task at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

from ..config.arguments import Start, check_count
from ..config.quantities import Duration, timeout_seconds
from ..errors import LogClosedError
from ..groups import Commit
from ..groups.delivery import Run, Way
from ..groups.group import POLLED_RECORDS, AnyGroup
from ..log.lag import Lag
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from .calls import Calls, opened, settled

Handed = TypeVar("Handed")
HandedBatch = TypeVar("HandedBatch")
Key = TypeVar("Key")

_NAP_S = 0.01  # between two looks, if the system reports nothing


class AsyncGroup(NotCopyable, Generic[Handed, HandedBatch, Key]):
    """One member of a consumer group. `AsyncTopic.group` makes it; it joins and leaves with `async with`."""

    def __init__(self, join: Callable[[], AnyGroup[Handed, HandedBatch, Key]]) -> None:
        self._join = join
        self._joined: AnyGroup[Handed, HandedBatch, Key] | None = None
        self._calls = Calls()

    async def __aenter__(self) -> Self:
        self._joined = await opened(self._join, AnyGroup.close)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- reading ---------------------------------------------------------------------------------

    async def follow(self, timeout: Duration | None = None) -> AsyncGenerator[Handed, None]:
        """Yield the group's records, until `timeout` seconds pass without one. None waits for ever.

        `Group.follow` explains when a record is handled and committed, and the errors.
        """
        group = self.joined
        while (run := await self._take("one by one", timeout)) is not None:
            while (few := run.next_few()) is not None:
                for each in group._shown(run.partition, few):
                    yield each
            group._delivery.leave(run, came_back=True)  # otherwise the next call settles it, or `close`
            del run, few

    async def batches(self, timeout: Duration | None = None) -> AsyncGenerator[HandedBatch, None]:
        """Like `follow`, but yields batches: whole columns instead of single records."""
        group = self.joined
        while (run := await self._take("batch", timeout)) is not None:
            run.all_out = True
            yield group._shown_batch(run.partition, run.batch)
            group._delivery.leave(run, came_back=True)

    async def poll(self, *, max_records: int = POLLED_RECORDS, timeout: Duration | None = 0.0) -> list[Handed]:
        """Return up to `max_records` records of one partition; an empty list if none comes in `timeout` seconds.

        `Group.poll` explains when they are handled. The records of a cancelled call are returned again.
        """
        check_count("max_records", max_records)
        group = self.joined
        group._check_open()
        run = await self._take("polled", timeout, max_records)
        return [] if run is None else group._polled(run)

    async def commit(self, what: Handed | Mapping[Any, int] | None = None, *, meta: str = "") -> None:
        """Commit all handled records, or `what`: a record or the next offsets; see `Group.commit`."""
        await settled(asyncio.ensure_future(self._calls(self.joined.commit, what, meta=meta)))

    async def committed(self) -> dict[Key, Commit]:
        """The group's last commit for each partition, of all members."""
        return await self._calls(self.joined.committed)

    async def lag(self, *, count_records: bool = False) -> dict[Key, Lag]:
        """The group's lag for each partition, owned or not; see `Group.lag`."""
        return await self._calls(self.joined.lag, count_records=count_records)

    async def seek(self, start: Start | Mapping[Any, Start]) -> None:
        """Continue at `start` in all owned partitions, or at each start of a mapping by partition."""
        await self._calls(self.joined.seek, start)

    def tell(self) -> dict[Key, int]:
        """The offset of the next record, for each partition that this member owns."""
        return self.joined.tell()

    def pause(self, *partitions: Any) -> None:
        """Return no more records of these partitions; of all owned ones if none is named."""
        self.joined.pause(*partitions)

    def resume(self, *partitions: Any) -> None:
        """Return records of these partitions again; of all if none is named."""
        self.joined.resume(*partitions)

    @property
    def assignment(self) -> list[Key]:
        """The partitions that this member owns, sorted."""
        return self.joined.assignment

    @property
    def closed(self) -> bool:
        """True if this member has left the group, or has not joined it yet."""
        return self._joined is None or self._joined.closed

    @property
    def joined(self) -> AnyGroup[Handed, HandedBatch, Key]:
        """The member itself, for methods that this class does not have: call them in a thread, one at a time.

        `LogClosedError` if it has not joined yet.
        """
        if self._joined is None:
            raise LogClosedError("the member has not joined the group; join with `async with`")
        return self._joined

    async def close(self) -> None:
        """Commit handled records, release the partitions and leave the group. Iterations in other tasks end."""
        group = self._joined
        if group is not None:
            await settled(asyncio.get_running_loop().run_in_executor(None, group.close))

    # --- inside ----------------------------------------------------------------------------------

    async def _take(self, way: Way, timeout: Duration | None, most: int | None = None) -> Run | None:
        """The next records; None at the end, or after `timeout` seconds without a record."""
        group, timeout = self.joined, timeout_seconds(timeout)
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            asked = monotonic()  # the last call begins after the deadline, so it makes the commits that are due
            run = await self._calls(group._next, 0.0, way, most, endless=deadline is None)
            if group.closed and group._why and deadline is not None:  # by its topic, perhaps after that call
                raise LogClosedError(group._why)
            if run is not None or group.closed or (deadline is not None and asked >= deadline):
                return run
            await self._wait(self._nap(group._until(deadline)))

    async def _wait(self, timeout: float) -> None:
        """Wait until something has changed for the member, or for `timeout` seconds."""
        observer = self.joined._observer
        kept_open = observer._open  # the selector would not report the wake of a close if they were closed meanwhile
        if kept_open is not None:
            await _readable(observer.descriptors(), timeout)
            observer.wait(0.0)  # empties the pipe with which writers in this process wake the member

    def _nap(self, seconds: float) -> float:
        return seconds if self.joined._observer.reports else min(seconds, _NAP_S)


async def _readable(descriptors: Sequence[int], timeout: float) -> None:
    """Wait in the loop's selector until a descriptor is readable, or for `timeout` seconds."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    watched = []
    try:
        for fd in descriptors:
            loop.add_reader(fd, event.set)
            watched.append(fd)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await event.wait()
    finally:
        for fd in [] if loop.is_closed() else watched:  # the loop may have been closed during the wait
            loop.remove_reader(fd)
