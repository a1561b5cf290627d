"""Handler: a handler of the standard library's `logging` that writes to a topic.

Invariant: a call to a logger waits for no disk, and never longer than `patience`. A line that finds no room is counted,
and the count is written to the topic when there is room again. See spool.py for what happens to accepted lines.

In a configuration:

    {"class": "loglib.logging.LogHandler", "path": "data/app", "level": "INFO"}

Threads: safe for all, and without the handler's lock: no thread waits because another one waits for room. A finalizer,
a signal handler, or an object that is being formatted may log in the middle of any call here. A line that comes after
the exit functions, from a finalizer at the end of the interpreter, is counted as dropped.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import weakref
from _thread import get_ident
from contextlib import suppress
from typing import Any, Unpack

from ..config.policies import Policies
from .spool import Drops, Spool

__all__ = ["JsonFormatter", "LogHandler"]

_OWN = __name__.partition(".")[0]
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NAMES = frozenset(("time", "level", "logger", "message", "exception", "stack", "replaced"))
_LARGEST = 10**300  # of an int that is written as a number
_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}
_DEEPEST = 50  # levels of an extra; what lies deeper is written as text
_encoder = json.JSONEncoder(ensure_ascii=False, default=repr, allow_nan=False).encode


def _encode(facts: dict[str, Any]) -> str:
    """The facts as JSON. Raises if they hold what JSON has no way to write, as NaN or half a surrogate pair."""
    text = _encoder(facts)
    if not text.isascii():
        text.encode()
    return text


class _Replacing:
    """Makes JSON of values that JSON cannot write as they are, and counts what it replaces by text."""

    def __init__(self) -> None:
        self.replaced = 0
        self._around: list[int] = []  # the ids of the collections around the present value

    def value(self, value: Any) -> Any:
        """The value, or what JSON can write instead."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else self._instead(_NOT_FINITE.get(value, "NaN"))
        try:
            known = len(self._around) < _DEEPEST and id(value) not in self._around
            if known and isinstance(value, dict | list | tuple):
                return self._collection(value)
            return int(value) if isinstance(value, int) and abs(value) < _LARGEST else self.text(repr(value))
        except Exception:  # noqa: BLE001  The `repr` of an object may raise anything.
            return self._instead(f"<{type(value).__name__} that cannot be shown>")

    def _collection(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Any:
        self._around.append(id(value))
        try:
            if isinstance(value, dict):
                return {self._name(name): self.value(each) for name, each in value.items()}
            return [self.value(each) for each in value]
        finally:
            self._around.pop()

    def text(self, text: str) -> str:
        """The text, with a mark in place of each half of a surrogate pair."""
        try:
            text.encode()
            return str(text)
        except UnicodeEncodeError:
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # two halves are a character
            return self._instead(whole) if "\ufffd" in whole else whole

    def _name(self, name: Any) -> str:
        return self.text(name if isinstance(name, str) else str(name))

    def _instead(self, text: str) -> str:
        self.replaced += 1
        return text


class JsonFormatter(logging.Formatter):
    """A line of JSON: `time` (UTC), `level`, `logger`, `message`, `exception` and `stack` if there are, and extras.

    An extra that has one of these names gets the prefix `extra.`. An object that JSON does not know is written as its
    `repr`. Each line is JSON for any parser: NaN, the infinities, halves of surrogate pairs and objects whose `repr`
    raises are replaced by text, and `replaced` says how many of them.
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
        for name in sorted(extras, key=str):
            facts[f"extra.{name}" if name in _NAMES else str(name)] = record.__dict__[name]
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            facts["exception"] = record.exc_text
        if record.stack_info:
            facts["stack"] = record.stack_info
        try:
            return _encode(facts)
        except Exception:  # noqa: BLE001  What JSON cannot write, or the `repr` of an object, which may raise anything.
            replacing = _Replacing()
            plain = {replacing.text(name): replacing.value(value) for name, value in facts.items()}
            return _encode(plain | {"replaced": replacing.replaced} if replacing.replaced else plain)

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
    out, so that an error of writing does not cause more lines. A line that can never be written, because its formatter
    raises or because it is longer than `max_record_bytes`, is dropped and counted; the others are written.
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
            path, capacity_bytes=capacity, patience_s=patience, report=_Report(self), end_timeout_s=flush_timeout,
            partitions=partitions, **policies,
        )  # fmt: skip
        self._flush_timeout = flush_timeout
        self._telling: set[int] = set()  # threads that tell of a line that could not be made
        self.formatter = JsonFormatter()

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and write a record. Without the handler's lock, which a waiting thread would hold."""
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
                return
            if sys.is_finalizing():  # no thread runs any more, and what writing needs is being taken apart
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
        except Exception as error:  # noqa: BLE001  It was not accepted; an interrupt may come after that.
            self._lose(record, error)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  The name is logging's.
        """Tell of a line that could not be made, on stderr, as `logging` does. It raises nothing.

        Where stderr leads back to a logger, what is told of a line is a line, and nothing is told of that one.
        """
        me = get_ident()
        if me in self._telling:
            return
        self._telling.add(me)
        try:
            with suppress(Exception):  # stderr may be closed, or of any kind
                super().handleError(record)
        finally:
            self._telling.discard(me)

    def _lose(self, record: logging.LogRecord, error: BaseException) -> None:
        """Count a record that could not be made: its filter, formatter or argument may raise anything.

        What is no `Exception` is raised again, since it is an interrupt, or the end of the program.
        """
        self._spool.drop()
        if not isinstance(error, Exception):
            raise error
        self.handleError(record)

    def flush(self) -> None:
        """Wait until the lines so far are written, for at most `flush_timeout` seconds."""
        self._spool.flush(self._flush_timeout)

    def drain(self, timeout: float) -> bool:
        """The same for `timeout` seconds. True if all lines so far are written, but for those that were dropped."""
        return self._spool.flush(timeout)

    def close(self) -> None:
        """Write what is left, and give the partition back. A later line begins anew."""
        self._spool.close(self._flush_timeout)
        super().close()

    @property
    def dropped(self) -> int:
        """Lines that this process has dropped."""
        return self._spool.dropped


class _Report:
    """Makes the line that tells of dropped lines, by the handler's formatter. The spool may outlive the handler."""

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
