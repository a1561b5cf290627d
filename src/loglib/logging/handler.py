"""Handler: a handler of the standard library's `logging` that writes to a topic.

Invariant: a call to a logger waits for no disk, and never longer than `patience`. A line that finds no room is counted,
and the count is written to the topic when there is room again. See spool.py for what happens to accepted lines.

In a configuration:

    {"class": "loglib.logging.LogHandler", "path": "data/app", "level": "INFO"}

Threads: safe for all, and without the handler's lock: no thread waits because another one waits for room.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any, Unpack

from ..config.policies import Policies
from ..system.process import at_exit, in_child
from .spool import Drops, Spool

__all__ = ["JsonFormatter", "LogHandler"]

_OWN = __name__.partition(".")[0]
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NAMES = frozenset(("time", "level", "logger", "message", "exception", "stack"))
_encode = json.JSONEncoder(ensure_ascii=False, default=repr, check_circular=True).encode

_in_child = in_child()


class JsonFormatter(logging.Formatter):
    """A line of JSON: `time` (UTC), `level`, `logger`, `message`, `exception` and `stack` if there are, and extras.

    An extra that has one of these names gets the prefix `extra.`. What JSON does not know is written as its `repr`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._second = (0, "")  # the last whole second, and its text

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = {
            "time": self._time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        extras = record.__dict__.keys() - _STANDARD
        for name in sorted(extras):
            facts[f"extra.{name}" if name in _NAMES else name] = record.__dict__[name]
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            facts["exception"] = record.exc_text
        if record.stack_info:
            facts["stack"] = record.stack_info
        try:
            return _encode(facts)
        except (TypeError, ValueError, RecursionError):  # a key that is no text, a circle
            plain = {name: value if name in _NAMES else repr(value) for name, value in facts.items()}
            return _encode(plain)

    def _time(self, created: float) -> str:
        second = int(created)
        known, text = self._second
        if known != second:
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second, text
        return f"{text}.{int((created - second) * 1_000_000):06d}Z"


class LogHandler(logging.Handler):
    """Writes log records to a topic, as JSON, or as text by another formatter. Each is a record with its own time.

    - `path`: the topic's directory. It is made if there is none.
    - `partitions`: int, by default 8, of a topic that is made. Each process writes one; more processes take turns.
    - `capacity`: bytes, by default 16 MiB, of lines that wait for the disk in memory.
    - `patience`: seconds, by default 0, that a call to a logger waits for room before its line is dropped.
    - `flush_timeout`: seconds, by default 5, that `flush` and the end of the process wait for the disk.
    - other keywords are policies of a topic that is made, as in `Topic.open`. The default for `durability` is "os":
      what was written survives a killed process.

    Lines are written in portions, about 50 ms after the first; lines from WARNING on are written at once. A killed
    process loses the lines that were not yet written; call `flush` to be sure. The loggers of loglib itself are left
    out, so that an error of writing does not cause more lines.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        level: int | str = logging.NOTSET,
        *,
        partitions: int = 8,
        capacity: int = 16 << 20,
        patience: float = 0.0,
        flush_timeout: float = 5.0,
        **policies: Unpack[Policies],
    ) -> None:
        super().__init__(level)
        policies.setdefault("durability", "os")
        self._spool = Spool(
            path, capacity_bytes=capacity, patience_s=patience, report=self._report, partitions=partitions, **policies
        )
        self._flush_timeout = flush_timeout
        self._ending = False
        self.formatter = JsonFormatter()
        at_exit.add(self._end)
        _in_child.add(self._begin_in_child)

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and write a record. Without the handler's lock, which a waiting thread would hold."""
        found: Any = self.filter(record)
        if isinstance(found, logging.LogRecord):  # from Python 3.12 on a filter may replace the record
            record = found
        if found:
            self.emit(record)
        return bool(found)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        name = record.name or ""
        if name.startswith(_OWN) and name[len(_OWN) :][:1] in ("", "."):
            return
        try:
            line = self.format(record).encode("utf-8", "backslashreplace")
            self._spool.put(line, int(record.created * 1_000_000), urgent=record.levelno >= logging.WARNING)
        except Exception:  # noqa: BLE001  Whatever a formatter raises must not end the program that logs.
            self.handleError(record)
        if self._ending:
            self.flush()

    def flush(self) -> None:
        """Wait until the lines so far are written, for at most `flush_timeout` seconds."""
        self._spool.flush(self._flush_timeout)

    def drain(self, timeout: float) -> bool:
        """The same for `timeout` seconds. True if all lines so far are written, but for those that were dropped."""
        return self._spool.flush(timeout)

    def close(self) -> None:
        """Write what is left, and give the partition back. A later line begins anew."""
        at_exit.discard(self._end)
        _in_child.discard(self._begin_in_child)
        self._close_spool()
        super().close()

    @property
    def dropped(self) -> int:
        """Lines that this process has dropped."""
        return self._spool.dropped

    def _end(self) -> None:
        """The process ends. Lines that come now, from other exit functions, are written one by one."""
        self._ending = True
        self._close_spool()

    def _close_spool(self) -> None:
        left = self._spool.close(self._flush_timeout)
        if left:
            logging.getLogger(_OWN).error("%s: %d lines were not written", self._spool.path, left)

    def _begin_in_child(self, parent_pid: int) -> None:
        del parent_pid
        self._ending = False
        at_exit.add(self._end)
        _in_child.add(self._begin_in_child)

    def _report(self, drops: Drops) -> bytes:
        """The line that tells of dropped lines, by this handler's formatter."""
        span = (drops.last_us - drops.first_us) / 1_000_000
        text = "%d lines were dropped within %.3f s, because nothing could be written"
        record = logging.LogRecord(
            __name__, logging.WARNING, __file__, 0, text, (drops.records, span), None,
        )  # fmt: skip
        record.created = drops.last_us / 1_000_000
        record.dropped = drops.records
        return self.format(record).encode("utf-8", "backslashreplace")
