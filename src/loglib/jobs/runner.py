"""Runner: the workers of one member, in one process.

Invariant: a job is taken only when a worker is free for it, so nothing is in hand that no handler has begun. A handler
that raises ends no worker.

Threads: one thread takes the jobs; each worker handles one job at a time.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from ..config.quantities import Duration
from ..errors import FencedJobError

if TYPE_CHECKING:
    from .job import Job

logger = logging.getLogger("loglib")


class Source(Protocol):
    """A share, as its runner knows it."""

    def follow(self, timeout: Duration | None = None) -> Iterator[Job]:
        """One job after the other; each is accepted with the next one, unless the share has `settle="explicit"`."""

    def take(self, timeout: Duration | None = None) -> Job | None:
        """The next job; None at the end."""

    def stop(self) -> None:
        """End the taking."""


def run(
    share: Source, handler: Callable[[Job], object], threads: int, timeout: Duration | None, *, explicit: bool
) -> None:  # fmt: skip
    """Handle jobs until the share has no more to give."""
    with _stopped_by_sigterm(share):
        if threads > 1:
            _run_threads(share, handler, threads, timeout)
            return
        while not _loop(share, handler, timeout, explicit=explicit):
            pass


def _loop(share: Source, handler: Callable[[Job], object], timeout: Duration | None, *, explicit: bool) -> bool:
    """Handle jobs in this thread; the loop accepts each one in the write that takes the next. True at the end."""
    try:
        for job in share.follow(timeout):
            if explicit:
                _handle(job, handler)
                continue
            try:
                handler(job)
            except Exception as error:  # noqa: BLE001  It is the handler's, and the job keeps it.
                job.fail(error)
    except FencedJobError as error:  # it took too long, or its member was evicted: another one handles it again
        logger.warning("%s", error)
        return False
    return True


def _handle(job: Job, handler: Callable[[Job], object]) -> None:
    """Handle one job, and settle it."""
    try:
        with job:
            handler(job)
    except FencedJobError as error:
        logger.warning("%s", error)


def _run_threads(share: Source, handler: Callable[[Job], object], threads: int, timeout: Duration | None) -> None:
    given: SimpleQueue[Job | None] = SimpleQueue()
    free = threading.Semaphore(threads)
    failed: list[BaseException] = []

    def work() -> None:
        while (job := given.get()) is not None:
            try:
                _handle(job, handler)
            except BaseException as error:  # noqa: BLE001  Raised in the thread that runs them.
                failed.append(error)
                share.stop()
            finally:
                del job
                free.release()

    workers = [threading.Thread(target=work, name=f"loglib-job-{number}") for number in range(threads)]
    try:
        for each in workers:
            each.start()
        while free.acquire() and not failed and (job := share.take(timeout)) is not None:
            given.put(job)
            del job
    finally:
        for _ in workers:
            given.put(None)
        for each in workers:
            if each.ident is not None:
                each.join()
    if failed:
        raise failed[0]


@contextmanager
def _stopped_by_sigterm(share: Source) -> Iterator[None]:
    """Let SIGTERM stop the share, if this is the main thread and the program has left the signal to the system."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: share.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
