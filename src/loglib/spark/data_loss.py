"""Data loss: records that a query should have read, and that are gone or damaged.

Invariant: a loss is an error, or a warning if the query accepts it (`failOnDataLoss=false`, `onGap=skip`). It is never
silent. A stream warns once of each loss, however often Spark asks.

Processes: driver; `report_gap` and `warn_of_loss` also in tasks.
"""

from __future__ import annotations

import logging
import sys
import warnings

from ..errors import LogError
from ..format.record import Damage

logger = logging.getLogger("loglib")


class Losses:
    """The losses of one run of a stream."""

    def __init__(self, *, fail: bool) -> None:
        self.fail = fail
        self._reported: set[str] = set()

    def report(self, what: str) -> None:
        """`LogError`, or a warning if the query accepts losses."""
        if self.fail:
            raise LogError(f"{what}. The query stops; with failOnDataLoss=false it would continue without them")
        if what not in self._reported:
            self._reported.add(what)
            warn_of_loss(what)


def warn_of_loss(what: str) -> None:
    """Warn on standard error, which Spark collects, that a query skips lost records."""
    warnings.warn(f"{what} (failOnDataLoss=false)", RuntimeWarning, stacklevel=3)


def report_gap(partition: str, damage: Damage) -> None:
    """Log that a query skips damage: in Spark's table of worker logs, if it is enabled, or on standard error."""
    lost = damage.offsets
    what = f"skipped offsets [{lost.start}, {lost.stop}), {len(lost)} bytes" if lost else "skipped damage without loss"
    text = f"{partition}: {what} (onGap=skip): {damage}"
    logger.warning("%s", text)
    if not logging.getLogger().handlers:  # then the logger of a library shows nothing
        sys.stderr.write(f"{text}\n")
