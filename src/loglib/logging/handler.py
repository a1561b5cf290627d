"""Handler: a handler of the standard library's `logging` that writes to a topic.

Invariant: a call to a logger waits for no disk, and never longer than `patience`. A line without room is dropped and
counted, and the count is written to the topic when there is room again. spool.py writes the accepted lines.

In a configuration:

    {"class": "loglib.logging.LogHandler", "path": "data/app", "level": "INFO"}

Threads: safe for all, and without the handler's lock, so a thread that waits for room blocks no other. A finalizer, a
signal handler, or an object that is being formatted may log in the middle of any call here. A line after the exit
functions, from a finalizer at the end of the interpreter, is counted as dropped.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from _thread import get_ident
from contextlib import suppress
from typing import Any, Unpack

from ..config.policies import Policies
from ..config.quantities import seconds
from .json_formatter import JsonFormatter
from .spool import Drops, Spool

_OWN = __name__.partition(".")[0]
_LOGGER = logging.getLogger(_OWN)


class LogHandler(logging.Handler):
    """Writes log records to a topic, as JSON, or as text by another formatter. Each line has the time of its record.

    - `path`: the topic's directory. The topic is created if there is none.
    - `partitions`: int, by default 8, of a new topic. Each process writes one; more processes take turns.
    - `capacity`: bytes, by default 16 MiB, of lines that wait for the disk in memory.
    - `patience`: seconds, by default 0, that a call to a logger waits for room before its line is dropped.
    - `flush_timeout`: seconds, by default 5, that `flush` and the end of the process wait for the disk.
    - other keywords are policies of a new topic, as in `Topic.open`. The default for `durability` is "os": lines that
      were written survive a killed process. A topic that exists keeps its policies, with a warning for each one that
      differs. `loglib alter` changes them, and the handler uses them within a second.

    Lines are written in portions, about 50 ms after the first; lines from WARNING on are written immediately. A killed
    process loses the lines that were not yet written; call `flush` to be sure. The loggers of loglib itself are
    ignored, so that a failing write does not cause more lines; a warning goes to stderr if no other handler takes it.
    A line that can never be written, because its formatter raises or because it is longer than `max_record_bytes`, is
    dropped and counted; the others are written.

    Raises `ValueError` or `TypeError` for a wrong argument or policy, also if the topic exists.
    """

    def __init__(
        self, path: str | os.PathLike[str], level: int | str = logging.NOTSET, *, partitions: int = 8,
        capacity: int = 16 << 20, patience: float = 0.0, flush_timeout: float = 5.0, **policies: Unpack[Policies],
    ) -> None:  # fmt: skip
        super().__init__(level)
        self._flush_timeout = seconds("flush_timeout", flush_timeout)
        self._spool = Spool(
            path, capacity_bytes=capacity, patience_s=seconds("patience", patience), report=_Report(self),
            end_timeout_s=self._flush_timeout, partitions=partitions, defaults={"durability": "os"}, **policies,
        )  # fmt: skip
        self._reporting: set[int] = set()  # threads that print a line that could not be formatted
        self.formatter = JsonFormatter()

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and write a record, without the handler's lock, which a waiting thread would hold."""
        try:
            found: Any = self.filter(record)
        except BaseException as error:  # noqa: BLE001  See `_lose`.
            self._lose(record, error)
            return False
        if isinstance(found, logging.LogRecord):  # from Python 3.12 on a filter may replace the record
            record = found
        if found:
            self.emit(record)
        return bool(found)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            name = record.name or ""
            if name.startswith(_OWN) and name[len(_OWN) :][:1] in ("", "."):
                self._show(record)
                return
            if sys.is_finalizing():  # no other thread runs, and modules are being taken apart
                self._spool.dropped += 1
                return
            line = self.format(record).encode("utf-8", "backslashreplace")
            timestamp_us = int(record.created * 1_000_000)
            urgent = record.levelno >= logging.WARNING
        except BaseException as error:  # noqa: BLE001  See `_lose`.
            self._lose(record, error)
            return
        try:
            self._spool.put(line, timestamp_us, urgent=urgent)
        except Exception as error:  # noqa: BLE001  It was not accepted. An interrupt may come after `put`.
            self._lose(record, error)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  The name is logging's.
        """Print a line that could not be formatted to stderr, as `logging` does. It raises nothing.

        If stderr leads back to a logger, the printed text is a line; if that fails as well, nothing is printed.
        """
        me = get_ident()
        if me in self._reporting:
            return
        self._reporting.add(me)
        try:
            with suppress(Exception):  # stderr may be closed, or of any kind
                super().handleError(record)
        finally:
            self._reporting.discard(me)

    def _show(self, record: logging.LogRecord) -> None:
        """Print a warning of loglib to stderr, if only handlers of this class and null handlers would take it.

        `logging` does so with a warning that no handler takes. Otherwise lines could be lost without a word.
        """
        takers: list[logging.Handler] = []
        logger: logging.Logger | None = _LOGGER
        with suppress(Exception):  # stderr may be closed, or of any kind
            while logger is not None:
                takers += [each for each in logger.handlers if not isinstance(each, logging.NullHandler)]
                logger = logger.parent if logger.propagate else None
            last = logging.lastResort
            is_alone = takers[:1] == [self] and all(isinstance(each, LogHandler) for each in takers)
            if is_alone and last is not None and record.levelno >= last.level:
                last.handle(record)

    def _lose(self, record: logging.LogRecord, error: BaseException) -> None:
        """Count a record that could not be formatted: its filter, formatter or argument may raise anything.

        An error that is no `Exception` is raised again: it is an interrupt, or the end of the program.
        """
        self._spool.drop()
        if not isinstance(error, Exception):
            raise error
        self.handleError(record)

    def flush(self) -> None:
        """Wait until all earlier lines are written, for at most `flush_timeout` seconds."""
        self._spool.flush(self._spool.time_left(self._flush_timeout))

    def drain(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds. True if all earlier lines are written, except dropped ones."""
        return self._spool.flush(timeout)

    def close(self) -> None:
        """Write the remaining lines, and give the partition back. A later line opens the topic again."""
        self._spool.close(self._spool.time_left(self._flush_timeout))
        super().close()

    @property
    def dropped(self) -> int:
        """The number of lines that this process has dropped."""
        return self._spool.dropped


class _Report:
    """Makes the line that reports dropped lines, with the handler's formatter. The spool may outlive the handler."""

    def __init__(self, handler: LogHandler) -> None:
        self._handler = weakref.ref(handler)

    def __call__(self, drops: Drops) -> bytes:
        span = (drops.last_us - drops.first_us) / 1_000_000
        text = "%d lines were dropped within %.3f s, because nothing could be written"
        record = logging.LogRecord(
            __name__, logging.WARNING, __file__, 0, text, (drops.records, span), None,
        )  # fmt: skip
        record.created = drops.last_us / 1_000_000
        record.dropped = drops.records
        handler = self._handler()
        with suppress(Exception, SystemExit):  # a formatter may need extras that this record does not have
            if handler is not None:
                return handler.format(record).encode("utf-8", "backslashreplace")
        return JsonFormatter().format(record).encode()
