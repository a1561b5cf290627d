"""Background: the work of a topic that goes by the clock, in one thread: flushes, rolls by age, retention.

Invariant: there is a thread only if a policy needs one, because Python 3.12 and later warn when a process with threads
forks. Without a flush interval the appending threads flush when a flush is due.

Threads: one thread at a time calls `begin` and `use`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config.policies import TopicConfig
from ..system.not_copyable import NotCopyable
from .access import Access
from .flusher import Flusher
from .handles import Handles
from .retention_pass import RetentionRunner

__all__ = ["Background"]

_HOUSEKEEPING_S = 60.0  # once a minute is often enough, because retention and rolling by age work in hours


class Background(NotCopyable):
    """The thread of a topic, if it has one. It refers to no topic, which garbage collection can then free."""

    def __init__(
        self, handles: Handles, accesses: Sequence[Access], runner: RetentionRunner, *, may_have_thread: bool
    ) -> None:
        self._handles = handles
        self._accesses = accesses
        self._runner = runner
        self._may_have_thread = may_have_thread
        self._flusher: Flusher | None = None

    @property
    def has_thread(self) -> bool:
        """True if the thread runs."""
        return self._flusher is not None

    def begin(self, config: TopicConfig) -> None:
        """Begin the thread if a policy needs one."""
        interval = config.flush.interval
        if self._flusher is None and self._may_have_thread and _needs_thread(config):
            self._flusher = Flusher(
                self._handles.writers,
                interval=interval,
                housekeeping=self._keep_house,
                housekeeping_every=_HOUSEKEEPING_S,
            )
        self._handles.set_timer(None if interval is None else self._flusher)

    def use(self, config: TopicConfig) -> None:
        """Work by other policies from now on. Waiting records are flushed now if there is a flush interval."""
        self.begin(config)
        if self._flusher is not None:
            self._flusher.set_interval(config.flush.interval)

    def stop(self) -> None:
        """End the thread and wait for it."""
        if self._flusher is not None:
            self._flusher.stop()

    def is_here(self) -> bool:
        """True if the caller is this thread."""
        return self._flusher is not None and self._flusher.is_here()

    def _keep_house(self) -> None:
        for access in self._accesses:
            access.keep_house()
        self._runner.run_for_others()


def _needs_thread(config: TopicConfig) -> bool:
    policy = config.retention
    clocked = (config.flush.interval, config.segment_age, policy.age, policy.bytes)
    return any(each is not None for each in clocked) or policy.keep_free > 0
