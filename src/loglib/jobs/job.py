"""Job: a record in the hand of a member, and how it is settled.

Invariant: a job is settled once. A call that settles it again raises `FencedJobError`, and changes nothing.

    accept()      done
    release()     again, now or later; its attempt counts, or is given back
    reject()      never again

Threads: a job may be settled in any thread.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Protocol, Self

from ..config.quantities import Duration
from ..config.times import to_datetime
from ..errors import FencedJobError
from ..format.batch import Batch
from ..format.columns import Headers
from ..format.display import Shown
from ..format.record import Record
from .entries import ACCEPTED, REJECTED, RELEASED, RETURNED
from .records import record_of
from .transacting import Promise

logger = logging.getLogger("loglib")


class Reject(Exception):
    """Raised by a handler: the record of its job is rejected, with this reason, and is not handled again."""


class Settler(Protocol):
    """The share of a job."""

    def take_back(self, job: InHand, *, is_handled: bool) -> None:
        """Take back a job that is not settled. Its loop asks for the next one (`is_handled`), or is left."""

    def settle(self, job: InHand, outcome: int, *, delay: Duration | None = None, reason: str = "") -> None:
        """Settle the records of the job."""

    def renew(self, job: InHand, period: Duration) -> None:
        """Give the records of the job a new lease."""

    def promise(self, job: InHand) -> Promise:
        """Let a transaction settle the records of the job."""


class InHand(Shown, ABC):
    """Records of one hand: the base of `Job` and `JobBatch`."""

    __slots__ = (
        "__weakref__", "_share", "attempt", "count", "first_begun", "first_offset", "partition", "promised", "token",
    )  # fmt: skip

    def __init__(
        self, share: Settler, partition: int, token: int, offset: int, count: int, attempt: int, first_begun: int
    ) -> None:
        self._share: Settler | None = share  # None: it is settled
        self.partition = partition
        self.promised = False  # a transaction that is not over yet settles it
        self.token = token  # identifies this hand: a later one of the same record has a higher token
        self.first_offset = offset
        self.count = count
        self.attempt = attempt  # the number of times that a handler began, with this one
        self.first_begun = first_begun  # microseconds UTC, whole seconds

    @property
    def settled(self) -> bool:
        """True if it was accepted, released or rejected here."""
        return self._share is None

    @abstractmethod
    def records_at(self, offsets: Sequence[int]) -> list[Record]:
        """The records at these offsets, from memory."""

    def accept(self) -> None:
        """Settle as done. `FencedJobError` if it is no longer in this hand; `LogClosedError` if the share is closed."""
        self._settle(ACCEPTED)

    def release(self, delay: Duration | None = None, *, count: bool = True, reason: str = "") -> None:
        """Let it be handled again, after `delay` seconds; by default after the share's `backoff`.

        With `count=False` the attempt is given back: for a member that shuts down, or lacks a resource. Otherwise a
        record whose attempts have reached `max_attempts` is settled as exhausted, with a dead letter if the share
        has `dead_letter`. Raises like `accept` and, if the dead letter cannot be written, like `reject`.
        """
        self._settle(RELEASED if count else RETURNED, delay=delay, reason=reason)

    def reject(self, reason: str = "") -> None:
        """Settle as rejected, with a dead letter if the share has `dead_letter`: it is not handled again.

        The reason is logged, and is in the dead letter. Raises like `accept`. If the dead letter cannot be written, it
        raises the errors of a transaction, and the job stays in hand.
        """
        self._settle(REJECTED, reason=reason)

    def fail(self, error: BaseException) -> None:
        """Release after an exception of the handler, which is logged; reject if it is a `Reject`. Raises like `accept`.

        A job that is settled stays so.
        """
        if isinstance(error, Exception) and not isinstance(error, Reject):
            logger.warning("the handler of %r failed", self, exc_info=error)
        if self.settled:
            return
        if isinstance(error, Reject):
            self.reject(str(error))
        else:
            self.release(reason=repr(error))

    def renew(self, seconds: Duration) -> None:
        """Let the lease end that many seconds from now. `ValueError` if the share was joined without a lease."""
        self._open().renew(self, seconds)

    def _settle(self, outcome: int, *, delay: Duration | None = None, reason: str = "") -> None:
        try:
            self._open().settle(self, outcome, delay=delay, reason=reason)
        except FencedJobError:
            self._share = None
            raise
        self._share = None

    def come_back(self, *, is_handled: bool) -> None:
        """The loops call this: the loop of the job asks for the next one (`is_handled`), or is left."""
        share = self._share
        if share is not None and not self.promised:
            share.take_back(self, is_handled=is_handled)

    def _transact(self) -> Promise:
        """Let a transaction settle it: `Transaction.accept` calls this. It writes nothing."""
        if self.promised:
            raise ValueError(f"{self!r} is part of a transaction already: settle a job once")
        found = self._open().promise(self)
        self.promised = True
        return found

    def end_promise(self, *, settled: bool) -> None:
        """The transaction is over, and has settled it or not."""
        self.promised = False
        if settled:
            self._share = None

    def _open(self) -> Settler:
        share = self._share
        if share is None:
            raise ValueError(f"{self!r} is settled already: settle a job once")
        return share

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        """Accept; after an exception release, or reject if it is a `Reject`. Only an `Exception` is swallowed."""
        if error is not None:
            self.fail(error)
        elif not (self.settled or self.promised):
            self.accept()
        return isinstance(error, Exception)


class Job(InHand):
    """One record in hand; it has the attributes of `Record`."""

    __slots__ = ("_of", "record")

    def __init__(
        self, share: Settler, record: Record, token: int, attempt: int, first_begun: int, of: JobBatch | None = None
    ) -> None:
        super().__init__(share, record.partition, token, record.offset, 1, attempt, first_begun)
        self.record = record
        self._of = of  # the batch is in hand as long as one of its jobs is in use

    def records_at(self, offsets: Sequence[int]) -> list[Record]:
        return [self.record] if self.offset in offsets else []

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield "of partition", self.partition
        yield "offset", self.offset
        yield "attempt", self.attempt
        if self.settled:
            yield "", "settled"

    @property
    def offset(self) -> int:
        """The offset of the record."""
        return self.record.offset

    @property
    def timestamp(self) -> int:
        """The event time in microseconds UTC."""
        return self.record.timestamp

    @property
    def time(self) -> datetime:
        """The timestamp as an aware UTC datetime; raises as `Record.time`."""
        return to_datetime(self.record.timestamp)

    @property
    def key(self) -> bytes | None:
        """The key; None for null."""
        return self.record.key

    @property
    def value(self) -> bytes | None:
        """The value; None for null."""
        return self.record.value

    @property
    def headers(self) -> Headers:
        """A tuple of (name, bytes) pairs."""
        return self.record.headers

    @property
    def next_offset(self) -> int:
        """Where a reader continues after the record."""
        return self.record.next_offset


class JobBatch(InHand):
    """Records with consecutive offsets that were taken together. They are settled together, or by `jobs` one by one.

    If its member dies, each of them is handled alone. `batch` has them as columns.
    """

    __slots__ = ("batch",)

    def __init__(self, share: Settler, batch: Batch, token: int, attempt: int, first_begun: int) -> None:
        super().__init__(share, batch.partition, token, batch.offsets.start, len(batch), attempt, first_begun)
        self.batch = batch

    def records_at(self, offsets: Sequence[int]) -> list[Record]:
        return [record_of(self.batch, each) for each in offsets]

    def jobs(self) -> list[Job]:
        """A job for each of the records, to settle some of them otherwise than the rest. Ask once."""
        share = self._open()
        return [Job(share, record, self.token, self.attempt, self.first_begun, self) for record in self.batch.records()]

    def __len__(self) -> int:
        return self.count

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield "of partition", self.partition
        yield "offsets", f"{self.first_offset} to {self.first_offset + self.count}"
        yield "attempt", self.attempt
        if self.settled:
            yield "", "settled"
