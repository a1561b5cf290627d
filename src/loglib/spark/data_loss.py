"""Data loss: records that a stream should have read, and that are gone.

Invariant: a loss is an error, or with `failOnDataLoss=false` a warning; it is never silent. A warning comes once for
each loss, however often Spark asks.

Processes: driver.
"""

from __future__ import annotations

from ..errors import LogError
from .ranges import warn_of_loss

__all__ = ["Losses"]


class Losses:
    """The losses of one run of a query."""

    def __init__(self, *, fail: bool) -> None:
        self.fail = fail
        self._told: set[str] = set()

    def report(self, what: str) -> None:
        """`LogError`, or a warning if the query accepts losses."""
        if self.fail:
            raise LogError(f"{what}. The query stops; with failOnDataLoss=false it would go on without these records")
        if what not in self._told:
            self._told.add(what)
            warn_of_loss(what)
