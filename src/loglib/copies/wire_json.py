"""Wire JSON: the errors that a source reports to its copy over a stream, and the small facts that both ends exchange.

Invariant: an error that a mirror handles (retention was faster, damage, a log that is gone) arrives as the same class
with the same facts. Any other error is raised as a `LogError` with the original message.

Threads: no state.
"""

from __future__ import annotations

import errno
from base64 import b64decode, b64encode
from typing import Any

from ..errors import CorruptLogError, LogError, LogMovedError, OffsetOutOfRangeError
from ..format.chain import End
from ..format.watermark import FILE_BYTES, SLOT_BYTES, Mark, encode_new, newest
from ..system.failures import printable

_MOST_WORDS = 4000
_FACTS: dict[type[LogError], tuple[str, ...]] = {
    CorruptLogError: ("path", "file_position", "found", "expected"),
    LogMovedError: ("path", "became"),
    OffsetOutOfRangeError: ("partition", "offset", "log_start_offset", "high_watermark"),
}
_OF_A_FILE = ("CorruptLogError", "LogMovedError", "FileNotFoundError")  # their first fact is a path
_CLASSES = {each.__name__: each for each in _FACTS}


def tell_error(error: Exception) -> dict[str, Any]:
    """The facts of an error."""
    if isinstance(error, FileNotFoundError):
        return {"error": "FileNotFoundError", "facts": [str(error.filename)]}
    names = _FACTS.get(type(error), ()) if isinstance(error, LogError) else ()
    return {"error": type(error).__name__, "facts": [getattr(error, name) for name in names], "words": str(error)}


def as_error(facts: Any, host: str) -> Exception:
    """The error with these facts, of a source on this host.

    Raises `LookupError`, `TypeError` or `ValueError` if they do not describe an error.
    """
    name, values = facts["error"], [_as_fact(each) for each in facts["facts"]]
    if name in _OF_A_FILE:
        values[0] = f"{host}:{values[0]}"
    if name == "FileNotFoundError":
        return FileNotFoundError(errno.ENOENT, "no such file at the source", *values)
    kind = _CLASSES.get(name)
    if kind is None:
        return LogError(f"at the source: {_as_fact(str(facts['words']))}")
    numbers = {each for each in _FACTS[kind] if each not in ("path", "found", "expected", "became")}
    if len(values) != len(_FACTS[kind]) or any(
        type(value) is not (int if each in numbers else str) for each, value in zip(_FACTS[kind], values, strict=True)
    ):
        raise ValueError(f"facts {facts!r:.200}")
    return kind(*values)


def _as_fact(value: Any) -> Any:
    return printable(value[:_MOST_WORDS]) if isinstance(value, str) else value


def tell_bytes(content: bytes | None) -> str | None:
    """Bytes as text."""
    return None if content is None else b64encode(content).decode()


def as_bytes(text: str | None) -> bytes | None:
    """The bytes in a text; `ValueError` or `TypeError` if it cannot be decoded."""
    return None if text is None else b64decode(text, validate=True)


def tell_mark(mark: Mark, salt: int) -> str:
    """A mark, as the slot of a watermark."""
    return encode_new(mark, salt)[:SLOT_BYTES].hex()


def as_mark(text: str, salt: int) -> Mark:
    """The mark in a slot of this log; `ValueError`, `TypeError` or `CorruptLogError` if there is none."""
    mark = newest(bytes.fromhex(text).ljust(FILE_BYTES, b"\0"), salt, "the stream")
    if mark is None:
        raise ValueError("a mark that differs from its CRC")
    return mark


def as_end(facts: Any) -> End:
    """The end in three numbers; `ValueError` or `TypeError` if it is malformed."""
    end, last_batch, crc = facts
    if type(end) is not int or type(last_batch) is not int or type(crc) not in (int, type(None)):
        raise TypeError(f"an end {facts!r:.100}")
    return End(end, last_batch, crc)
