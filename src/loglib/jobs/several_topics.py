"""Several topics: one share of each of them, whose members are asked in turn: the first one that has a job gives it.

Invariant: a job belongs to the share of its topic, with all rules of that share. Nothing joins the shares but the order
in which this process asks them.

Threads: safe for all, as the shares are.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self, Unpack

from ..errors import ShareFullError
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from ..system.system_calls import new_poll
from .job import Job
from .job_source import JobSource
from .share import Share, ShareOptions
from .sharing_topic import SharingTopic

_NAP_S = 0.001  # of a thread that was woken, and found nothing: others write for each of their records


def share(topics: Sequence[SharingTopic], name: str, **options: Unpack[ShareOptions]) -> TopicsShare:
    """Join the share of this name of each topic; the first topic that has a job gives the next one.

    The options are those of `Topic.share`, for each of them. Raises `ValueError` without topics, or for one twice.
    """
    if not topics or len({topic.log_id for topic in topics}) < len(topics):
        raise ValueError(f"a share needs different topics, not {[topic.path for topic in topics]}")
    with ExitStack() as joined:
        shares = [joined.enter_context(topic.share(name, **options)) for topic in topics]
        joined.pop_all()
    return TopicsShare(shares)


class TopicsShare(JobSource, NotCopyable):
    """Members of the shares of several topics. `loglib.share` makes it; it is a context manager, and iterable."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = tuple(shares)  # the first one is asked first
        self._explicit = shares[0]._explicit  # noqa: SLF001
        self._waiting: list[None] = []  # an item for each thread that waits for a job

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stop(self) -> None:
        for each in self.shares:
            each.stop()

    def flush(self) -> None:
        """Make durable all that was settled. Synced."""
        for each in self.shares:
            each.flush()

    def close(self) -> None:
        """Leave all shares. What is in hand is released."""
        with ExitStack() as left:
            for each in self.shares:
                left.callback(each.close)

    def _given(self, wait_s: float | None) -> Job | None:
        deadline = None if wait_s is None else monotonic() + wait_s
        is_fruitless = False
        while True:
            full: ShareFullError | None = None
            for each in self.shares[1:]:  # what a loop has accepted; another share may give the next job
                each.settle_owed()
            for each in self.shares:
                try:
                    job = each.take(0.0)
                except ShareFullError as error:
                    full, job = full or error, None
                if job is not None:
                    if self._waiting:
                        each._wait.wake()  # noqa: SLF001  Another thread, which may have more to take
                    return job
            now = monotonic()
            if any(each._stopped or each._closed is not None for each in self.shares):  # noqa: SLF001
                return None
            if deadline is not None and now >= deadline:
                if full is not None:
                    raise full
                return None
            if is_fruitless:
                time.sleep(_NAP_S)
            is_fruitless = True
            self._waiting.append(None)
            try:
                self._wait(deadline)
            finally:
                self._waiting.pop()

    def _wait(self, deadline: float | None) -> None:
        """Return when one of the shares may have a job, or at the deadline."""
        poll, rest_s = new_poll(), min(each.rest(deadline) for each in self.shares)
        for each in self.shares:
            for fd in each._observer.descriptors():  # noqa: SLF001
                poll.register(fd, select.POLLIN)
        poll.poll(rest_s * 1000)
        for each in self.shares:
            each.end_wait()
