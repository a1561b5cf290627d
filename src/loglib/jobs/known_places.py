"""Known places: what a share knows of the log whose records it has settled, compared with the log that is there now.

Invariant: a known place is an offset, and the chain of the log there (log/history.py; 0: not known). What a share knows
goes from each generation into the next one, also if an older log was put in place meanwhile: then each member that
joins refuses that log, however long it has grown, until the share is reset.

Threads: no state, safe for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from ..errors import LogError
from ..log.history import history_at
from ..log.log import Log

KnownPlace = tuple[int, int]  # an offset and a chain


def known_history(log: Log, offset: int) -> int:
    """The chain that identifies the log up to the offset; 0 if that is not known."""
    try:
        return history_at(log, offset)
    except LogError:  # damaged, or dropped by retention
        return 0


def difference(log: Log, places: Iterable[KnownPlace]) -> tuple[int, str] | None:
    """A place that the log has otherwise, and how; None if there is none."""
    for offset, history in places:
        found = known_history(log, offset) if history else 0
        if found and history != found:
            return offset, f"the batch before offset {offset} had CRC {history:08x} and now has {found:08x}"
    return None


def next_history(log: Log, fresh: int, places: Iterable[KnownPlace]) -> int:
    """The chain at `fresh` for the next generation: the known one, or if there is none, that of the log.

    It is the chain of the last known place if this is not the log that had it, so that no log has it at `fresh`.
    """
    known = sorted(each for each in places if each[1])
    for offset, history in known:
        if offset == fresh:
            return history
    with suppress(LogError):
        if known and (fresh > log.mark().flushed_end or difference(log, known) is not None):
            return known[-1][1]
    return known_history(log, fresh)
