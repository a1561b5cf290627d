"""Rate limit: a limit on the speed of work that reads or copies a log.

Threads: one waits; another may end the wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..system.clock import monotonic

_BEAT_S = 5.0  # the longest silence of one that waits


class RateLimit:
    """A limit of bytes per second, or none. Setting `ended` ends a wait."""

    def __init__(self, bytes_per_second: float | None, ended: threading.Event) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is a number above 0, not {bytes_per_second!r}")
        self._bytes_per_second = bytes_per_second
        self._ended = ended

    def wait(self, size_bytes: int, beat: Callable[[], object] = lambda: None) -> None:
        """Wait as long as the limit says for this number of bytes; `beat` is called every few seconds meanwhile."""
        if self._bytes_per_second is not None:
            until = monotonic() + size_bytes / self._bytes_per_second
            while (left := until - monotonic()) > 0 and not self._ended.wait(min(left, _BEAT_S)):
                beat()
