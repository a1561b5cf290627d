"""AsyncJob: a record in the hand of a member, for tasks of an event loop.

Invariant: a settling call that has begun ends, also if its task is cancelled. It may wait for a disk and for a lock, so
it is made in a thread of the loop's pool.

Threads: belongs to the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from ..config.quantities import Duration
from ..format.columns import Headers
from ..format.display import Shown
from ..jobs.job import InHand, Job, JobBatch

if TYPE_CHECKING:
    from ..format.batch import Batch
    from ..format.record import Record

Taken = TypeVar("Taken", bound=InHand)


class Caller(Protocol):
    """The share of a job."""

    async def call(self, function: Callable[[], object]) -> None:
        """Call the function in a thread, to its end."""


class AsyncInHand(Shown, Generic[Taken]):
    """The base of `AsyncJob` and `AsyncJobBatch`: the settling calls of `Job`, as coroutines."""

    __slots__ = ("_share", "job")

    def __init__(self, share: Caller, job: Taken) -> None:
        self._share = share
        self.job = job  # as `Topic.share` gives it

    def _facts(self) -> Iterator[tuple[str, object]]:
        return self.job._facts()

    @property
    def partition(self) -> int:
        """The partition."""
        return self.job.partition

    @property
    def attempt(self) -> int:
        """The number of times that a handler began, with this one."""
        return self.job.attempt

    @property
    def first_begun(self) -> int:
        """When a handler first began: microseconds UTC, whole seconds."""
        return self.job.first_begun

    @property
    def token(self) -> int:
        """The number of this hand: a later one of the same record has a higher token."""
        return self.job.token

    @property
    def settled(self) -> bool:
        """True if it was accepted, released or rejected here."""
        return self.job.settled

    async def accept(self) -> None:
        """Settle as done; see `Job.accept`."""
        await self._share.call(self.job.accept)

    async def release(self, delay: Duration | None = None, *, count: bool = True, reason: str = "") -> None:
        """Let it be handled again; see `Job.release`."""
        await self._share.call(partial(self.job.release, delay, count=count, reason=reason))

    async def reject(self, reason: str = "") -> None:
        """Settle as rejected; see `Job.reject`."""
        await self._share.call(partial(self.job.reject, reason))

    async def renew(self, seconds: Duration) -> None:
        """Let the lease end that many seconds from now; see `Job.renew`."""
        await self._share.call(partial(self.job.renew, seconds))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        """Accept; after an exception or a cancellation release, or reject if it is a `Reject`.

        Only an `Exception` is swallowed, so a cancelled task ends.
        """
        if isinstance(error, GeneratorExit):
            return False  # its loop was closed; without its job, the record is released at the next step of the member
        if error is not None:
            await self._share.call(partial(self.job.fail, error))
        elif not self.job.settled:
            await self.accept()
        return isinstance(error, Exception)


class AsyncJob(AsyncInHand[Job]):
    """One record in hand; it has the attributes of `Record`."""

    __slots__ = ()

    @property
    def record(self) -> Record:
        """The record."""
        return self.job.record

    @property
    def offset(self) -> int:
        """The offset of the record."""
        return self.job.record.offset

    @property
    def timestamp(self) -> int:
        """The event time in microseconds UTC."""
        return self.job.record.timestamp

    @property
    def time(self) -> datetime:
        """The timestamp as an aware UTC datetime; raises as `Record.time`."""
        return self.job.time

    @property
    def key(self) -> bytes | None:
        """The key; None for null."""
        return self.job.record.key

    @property
    def value(self) -> bytes | None:
        """The value; None for null."""
        return self.job.record.value

    @property
    def headers(self) -> Headers:
        """A tuple of (name, bytes) pairs."""
        return self.job.record.headers

    @property
    def next_offset(self) -> int:
        """Where a reader continues after the record."""
        return self.job.record.next_offset


class AsyncJobBatch(AsyncInHand[JobBatch]):
    """Records that were taken together. They are settled together, or by `jobs` one by one."""

    __slots__ = ()

    @property
    def batch(self) -> Batch:
        """The records as columns."""
        return self.job.batch

    def jobs(self) -> list[AsyncJob]:
        """A job for each of the records, to settle some of them otherwise than the rest. Ask once."""
        return [AsyncJob(self._share, each) for each in self.job.jobs()]

    def __len__(self) -> int:
        return len(self.job)
