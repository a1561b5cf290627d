"""AsyncShare: a member of a share in an event loop.

Invariant: a record is in hand from the moment before a task gets its job until the job is settled. A cancelled task
leaves nothing in hand: a job that a thread has taken for it is given back with its attempt, and a job that it was
handling is released. A loop accepts a job when it asks for the next one, as in `Share.follow`.

Taking and settling are done in the loop's pool of threads, because an accept waits for a sync that another call makes.
One thread makes all the calls that wait, in their order. Waiting for jobs needs no thread: the member's observer is in
the loop's selector (waiters.py).

Threads: belongs to the loop's thread. Any number of its tasks may take jobs; `stop` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from ..config.arguments import check_count
from ..config.quantities import Duration, timeout_seconds
from ..errors import FencedJobError, ForkedHandleError, LogClosedError, LogError, ShareFullError
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from .calls import Writing, opened, settled
from .job import AsyncInHand, AsyncJob, AsyncJobBatch
from .waiters import Waiters

if TYPE_CHECKING:
    from ..jobs.job import InHand, Job, JobBatch
    from ..jobs.share import Share
    from ..jobs.taking import Taking
    from ..system.clock import Moment

logger = logging.getLogger("loglib")

_MOST_TOGETHER = 0xFFFF  # records in one entry

Taken = TypeVar("Taken", bound="InHand")
Handed = TypeVar("Handed", bound=AsyncInHand[Any])


class _Way(NamedTuple, Generic[Taken]):
    """The way in which records are taken: one by one, or in batches."""

    most: int
    make: Callable[[Taking, int, Moment], Taken | None]


class _Look(NamedTuple, Generic[Taken]):
    """The result of a look in a thread."""

    found: Taken | None
    until: float  # seconds until something is due
    ended: bool  # the share is closed or stopped


class AsyncShare(NotCopyable):
    """One member of a share. `AsyncTopic.share` makes it; it joins and leaves with `async with`."""

    def __init__(self, join: Callable[[], Share]) -> None:
        self._join = join
        self._joined: Share | None = None
        self._calls = Writing(lambda: None)
        self._waiters = Waiters()

    async def __aenter__(self) -> Self:
        self._joined = await opened(self._join, lambda share: share.close())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- taking ----------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[AsyncJob]:
        return self.follow()

    def follow(self, timeout: Duration | None = None) -> AsyncGenerator[AsyncJob, None]:
        """Yield one job after the other, for ever or until `timeout` seconds pass without one.

        `Share.follow` explains when a job is accepted and released, and the errors. A job whose loop is left or
        cancelled is released when the generator is closed: by its garbage collection, or by `contextlib.aclosing`.
        """
        return self._loop(timeout, self._one_by_one(), AsyncJob)

    def batches(self, max_records: int = 100, timeout: Duration | None = None) -> AsyncGenerator[AsyncJobBatch, None]:
        """Like `follow`, but up to `max_records` records of a partition together; see `Share.batches`."""
        check_count("max_records", max_records)
        way: _Way[JobBatch] = _Way(min(max_records, _MOST_TOGETHER), self.joined._batch)
        return self._loop(timeout, way, AsyncJobBatch)

    async def take(self, timeout: Duration | None = None) -> AsyncJob | None:
        """One job, which the caller settles; None if none comes in `timeout` seconds, or the share is stopped."""
        found = await self._take(timeout, self._one_by_one())
        return None if found is None else AsyncJob(self, found)

    async def run(
        self, handler: Callable[[AsyncJob], Awaitable[object]], tasks: int = 1, *, timeout: Duration | None = None
    ) -> None:  # fmt: skip
        """Await `handler(job)` for each job, in up to `tasks` tasks at a time, until `timeout`, `stop` or SIGTERM.

        If the handler returns, its job is accepted, unless it has settled it itself. If it raises, the job is released
        and the error logged; `Reject` rejects it. If this call is cancelled, its handlers are cancelled, and their jobs
        released. SIGTERM lets the jobs in hand end, if the program has left the signal to the system.
        """
        check_count("tasks", tasks)
        with _stopped_by_sigterm(self):
            workers = [asyncio.ensure_future(self._work(handler, timeout)) for _ in range(tasks)]
            try:
                await asyncio.gather(*workers)
            except (Exception, asyncio.CancelledError):  # an exception is not of a handler, whose errors are logged
                for each in workers:
                    each.cancel()
                await asyncio.wait(workers)
                raise

    def stop(self) -> None:
        """Let all loops end when they ask for the next job. What is in hand stays in hand."""
        self.joined.stop()

    async def flush(self) -> None:
        """Make durable all that was settled. Synced."""
        await self.call(self.joined.flush)

    # --- life ------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the share."""
        return self.joined.name

    @property
    def member(self) -> str:
        """The name of this member."""
        return self.joined.member

    @property
    def closed(self) -> bool:
        """True if this member has left the share, or has not joined it yet."""
        return self._joined is None or self._joined._closed is not None

    @property
    def joined(self) -> Share:
        """The member itself. `LogClosedError` if it has not joined yet."""
        if self._joined is None:
            raise LogClosedError("the member has not joined the share; join with `async with`")
        return self._joined

    async def close(self) -> None:
        """Release what is in hand, make durable what is settled, and leave the share. Loops in other tasks end."""
        share = self._joined
        if share is not None:
            await settled(asyncio.get_running_loop().run_in_executor(None, share.close))
            self._waiters.wake_all()

    # --- inside ----------------------------------------------------------------------------------

    async def call(self, function: Callable[[], object]) -> None:
        """Call a function of the member in a thread, to its end."""
        await settled(asyncio.ensure_future(self._calls.ask(function, flush=False)))

    async def _work(self, handler: Callable[[AsyncJob], Awaitable[object]], timeout: Duration | None) -> None:
        """Handle one job after the other. A job is accepted in the call that takes the next one."""
        before, way = None, self._one_by_one()
        while True:
            try:
                found = await self._take(timeout, way, before)
                if found is None:
                    return
                before = None if await self._is_settled(AsyncJob(self, found), handler) else found
            except FencedJobError as error:  # it took too long, or its member was evicted: another one handles it again
                logger.warning("%s", error)
                before = None

    async def _is_settled(self, job: AsyncJob, handler: Callable[[AsyncJob], Awaitable[object]]) -> bool:
        """Handle one job. False if it is to be accepted."""
        try:
            done = handler(job)
            if inspect.isawaitable(done):
                await done
        except GeneratorExit:
            raise  # its loop was closed; without its job, the record is released at the next step of the member
        except BaseException as error:
            await self.call(partial(job.job.fail, error))
            if not isinstance(error, Exception):
                raise
        if self.joined._explicit and not job.settled:
            await job.accept()
        return job.settled

    def _one_by_one(self) -> _Way[Job]:
        return _Way(1, self.joined._job)

    async def _loop(
        self, timeout: Duration | None, way: _Way[Taken], hand_out: Callable[[AsyncShare, Taken], Handed]
    ) -> AsyncGenerator[Handed, None]:
        before = None
        while (found := await self._take(timeout, way, before)) is not None:
            came_back = False
            try:
                yield hand_out(self, found)
                came_back = True
            finally:
                if not came_back:
                    await self._release(found)
            before, found = found, None

    async def _take(
        self, timeout: Duration | None, way: _Way[Taken], before: Taken | None = None
    ) -> Taken | None:
        """The next records, after `before` has come back; None at the end, or after `timeout` seconds."""
        share, timeout = self.joined, timeout_seconds(timeout)
        deadline = None if timeout is None else monotonic() + timeout
        event, woken = asyncio.Event(), False
        try:
            while True:
                rest = None if deadline is None else max(0.0, deadline - monotonic())
                look = await self._look(partial(_look, share, way, before, rest, woken=woken))
                before, woken = None, True
                if look.found is not None:
                    self._waiters.wake_one()  # there may be more to take
                    return look.found
                if look.ended:
                    self._waiters.wake_all()
                if look.ended or rest == 0.0:
                    return None
                await self._waiters.wait(event, share._observer, look.until, rest)
        finally:
            self._waiters.leave(event)

    async def _look(self, look: Callable[[], _Look[Taken]]) -> _Look[Taken]:
        """Look in a thread. If the task is cancelled meanwhile, give back what was found for it."""
        looking = asyncio.ensure_future(self._calls.ask(look, flush=False))
        try:
            return await settled(looking)
        except asyncio.CancelledError:
            if looking.exception() is None and (found := looking.result().found) is not None:
                await self._give_back(found)
            raise

    async def _give_back(self, job: InHand) -> None:
        """No handler has begun it: its attempt does not count."""
        with suppress(LogError, OSError):  # others take it back
            await self.call(partial(job.release, count=False))

    async def _release(self, job: InHand) -> None:
        """Release the job of a loop that was left."""
        if not job.settled and not self.closed:
            with suppress(LogError, OSError):  # without its job, the record is released at the next step of this member
                await self.call(partial(job.release, reason="its loop was left"))


def _look(
    share: Share, way: _Way[Taken], before: Taken | None, rest: float | None, *, woken: bool
) -> _Look[Taken]:
    """In a thread: accept what has come back, and take what there is. `rest` is the time that is left for it."""
    if before is not None:
        before.come_back(is_handled=True)
    if woken:
        share._wait.wait(0.0, share._wait.number())  # empties the pipe with which others wake the member
        share._read_at = 0.0
    found = None
    try:
        found = share._next(0.0, way.most, way.make)
    except ShareFullError:
        if rest == 0.0:
            raise
    except LogClosedError as error:
        if rest is not None or isinstance(error, ForkedHandleError):
            raise
    with share._use():
        is_ended = share._closed is not None or share._stopped
        until = 0.0 if found is not None or is_ended else share._until(None)
    return _Look(found, until, is_ended)


@contextmanager
def _stopped_by_sigterm(share: AsyncShare) -> Iterator[None]:
    """Let SIGTERM stop the share, if this is the main thread and the program has left the signal to the system."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, share.stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
