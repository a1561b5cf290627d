"""Recent moment: the time for calls that need it only to the second. To read both clocks costs microseconds.

Threads: one at a time; the share's lock is held.
"""

from __future__ import annotations

from ..system.clock import Clock, Moment, monotonic
from ..system.not_copyable import NotCopyable

_RECENT_S = 0.01  # without a lease it tells when a record was begun, in seconds


class RecentMoment(NotCopyable):
    """The moment that was read last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._moment: Moment | None = None
        self._read_at = 0.0

    def known(self, now: float) -> Moment | None:
        """The moment, if it was read within the last 10 ms. `now`: monotonic seconds."""
        return self._moment if 0 <= now - self._read_at < _RECENT_S else None

    def read(self, *, exactly: bool) -> Moment:
        """The present moment; up to 10 ms ago, unless it is wanted exactly."""
        now = monotonic()
        moment = None if exactly else self.known(now)
        if moment is None:
            self._read_at, self._moment = now, self._clock.moment()
            moment = self._moment
        return moment
