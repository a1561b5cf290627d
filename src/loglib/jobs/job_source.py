"""Job source: what gives jobs one by one: the member of a share, or members of the shares of several topics.

Threads: safe for all; each loop has jobs of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from ..config.arguments import check_count
from ..config.quantities import Duration, timeout_seconds
from .job import InHand, Job
from .runner import run

Lent = TypeVar("Lent", bound=InHand)


def lent(give: Callable[[], Lent | None]) -> Iterator[Lent]:
    """The jobs that `give` returns, until it returns None. Each comes back before the next one, and at the end."""
    while (job := give()) is not None:
        is_handled = False
        try:
            yield job
            is_handled = True
        finally:
            job.come_back(is_handled=is_handled)
        del job  # a job that nobody has any more is released


class JobSource(ABC):
    """The loops over jobs: a base of `Share` and `TopicsShare`."""

    _explicit: bool  # the loops settle nothing

    @abstractmethod
    def _given(self, wait_s: float | None) -> Job | None:
        """The next job; None if there is none for `wait_s` seconds, or the source is stopped."""

    @abstractmethod
    def stop(self) -> None:
        """Let all loops end when they ask for the next job. What is in hand stays in hand. Any thread may call this."""

    def __iter__(self) -> Iterator[Job]:
        return self.follow()

    def follow(self, timeout: Duration | None = None) -> Iterator[Job]:
        """Yield one job after the other, for ever or until `timeout` seconds pass without one.

        With `settle="after"` a job that is not settled is accepted when the loop asks for the next one. If the loop
        body raises or leaves the loop, its job is released, and comes again.

        Raises `FencedJobError` if the job to be accepted was taken away; `StaleGenerationError` if this member was
        evicted; `NotLeaderError`, within a second, if a promotion has superseded the topic; `UnsettledError` with
        `settle="explicit"`; `ShareFullError` instead of the timeout if the window is full and there are fresh records.
        Closing the share ends the loop. If the topic is closed, a loop with a timeout raises `LogClosedError`.
        """
        return lent(partial(self._given, timeout_seconds(timeout)))

    def take(self, timeout: Duration | None = None) -> Job | None:
        """One job, which the caller settles; None if none comes in `timeout` seconds, or the share is stopped."""
        return self._given(timeout_seconds(timeout))

    def run(
        self, handler: Callable[[Job], object], threads: int = 1, *, timeout: Duration | None = None
    ) -> None:  # fmt: skip
        """Call `handler` for each job, in this thread or in `threads` others, until `timeout`, `stop` or SIGTERM.

        If the handler returns, its job is accepted, unless it has settled it itself. If it raises, the job is released
        and the error logged; `Reject` rejects it. SIGTERM lets the jobs in hand end (in the main thread only).
        """
        check_count("threads", threads)
        run(self, handler, threads, timeout, explicit=self._explicit)
