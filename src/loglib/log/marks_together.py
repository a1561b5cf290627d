"""Marks together: the marks of a topic's logs, chosen so that each transaction is in all of them or in none.

Threads: safe for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..format.watermark import Mark
from .log import Log, promised_marks
from .pending_marks import is_held, shown

__all__ = ["marks_together"]


def marks_together(logs: Collection[Log], look: Callable[[Log], Mark] | None = None) -> dict[int, Mark]:
    """The marks of a topic's logs, by partition.

    `look` returns a log's mark: `Log.found` for copies; by default the mark that it has published.

    A mark that shows a transaction does not fit a mark that was read before the transaction came. In that case the
    second look finds a change, and all marks are read again.
    """
    look = look or _published
    while True:
        marks = {log.partition: look(log) for log in logs}
        if not any(mark.applied_txn or mark.held_txn for mark in marks.values()):
            return marks
        alone = [log for log in logs if not is_held(marks[log.partition])]
        promised = promised_marks([log for log in logs if is_held(marks[log.partition])])
        seen = {number: shown(marks[number], mark) for number, mark in promised.items()}
        seen |= {log.partition: log.visible(marks[log.partition]) for log in alone}
        over = {marks[number].held for number, mark in seen.items() if not mark.held_txn}
        again = {log.partition: look(log) for log in logs}
        if all(again[number].transactions == mark.transactions for number, mark in marks.items()):
            # Look again at the logs that show a transaction as held: others may have found meanwhile that it is over.
            late = [log for log in alone if seen[log.partition].held_txn and marks[log.partition].held in over]
            return seen | {log.partition: log.visible(marks[log.partition]) for log in late}


def _published(log: Log) -> Mark:
    return log.published()  # a method, which a subclass overrides: with a tier the log begins where the tier begins
