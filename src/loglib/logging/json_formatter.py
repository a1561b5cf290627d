"""JsonFormatter: log records as lines of JSON.

Invariant: each line is JSON for any parser, whatever the record contains.
"""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NAMES = frozenset(("time", "level", "logger", "message", "exception", "stack", "replaced"))
_LARGEST = 10**300  # larger ints are written as text
_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}
_DEEPEST = 50  # levels of an extra; deeper ones are written as text
_encoder = json.JSONEncoder(ensure_ascii=False, default=repr, allow_nan=False).encode


def _encode(facts: dict[str, Any]) -> str:
    """The facts as JSON. Raises for values that JSON cannot express, such as NaN or half a surrogate pair."""
    text = _encoder(facts)
    if not text.isascii():
        text.encode()
    return text


class _Replacing:
    """Replaces values that JSON cannot express by text, and counts them."""

    def __init__(self) -> None:
        self.replaced = 0
        self._around: list[int] = []  # the ids of the collections that contain the present value

    def value(self, value: Any) -> Any:
        """The value, or a replacement that JSON can express."""
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
                return {self.text(str(name)): self.value(each) for name, each in value.items()}
            return [self.value(each) for each in value]
        finally:
            self._around.pop()

    def text(self, text: str) -> str:
        """The text, with a mark for each half of a surrogate pair."""
        try:
            text.encode()
            return str(text)
        except UnicodeEncodeError:
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # two halves are a character
            return self._instead(whole) if "\ufffd" in whole else whole

    def _instead(self, text: str) -> str:
        self.replaced += 1
        return text


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: `time` (UTC), `level`, `logger`, `message`, extras, and any `exception` and `stack`.

    An extra with one of these names gets the prefix `extra.`. An object that JSON does not know is written as its
    `repr`. Each line is JSON for any parser: NaN, the infinities, halves of surrogate pairs and objects whose `repr`
    raises are replaced by text, and `replaced` is their number.
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
        except Exception:  # noqa: BLE001  JSON cannot express a value, or its `repr` raises, which may be anything.
            replacing = _Replacing()
            plain = {replacing.text(name): replacing.value(value) for name, value in facts.items()}
            return _encode(plain | {"replaced": replacing.replaced} if replacing.replaced else plain)

    def _time(self, created: float) -> str:
        second, microseconds = divmod(int(created * 1_000_000), 1_000_000)  # as that of the record in the topic
        known, text = self._second
        if known != second:
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second, text
        return f"{text}.{microseconds:06d}Z"
