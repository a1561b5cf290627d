"""Filters: which records a search finds: by text, by key, or by a condition on JSON.

Invariant: a filter only looks. A wrong filter is a `ValueError` that says what is wrong with it.

    text        the letters occur in the value, the key, or a header; upper and lower case count as equal
    key         the key has exactly these letters
    path        a condition on a value that is JSON (format/json_condition.py)

Threads: immutable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..format.json_condition import parse_condition
from ..format.record import Record


@dataclass(frozen=True, slots=True)
class Filter:
    """The records that have a text and a key, and whose value fulfils a condition; None: any."""

    text: bytes | None = None  # in lower case
    key: bytes | None = None
    path: Callable[[bytes | None], bool] | None = None

    def matches(self, record: Record) -> bool:
        """True if the record has all that is asked for."""
        if self.key is not None and record.key != self.key:
            return False
        if self.text is not None and not self._has_text(record, self.text):
            return False
        return self.path is None or self.path(record.value)

    @staticmethod
    def _has_text(record: Record, text: bytes) -> bool:
        parts = [record.value, record.key, *(value for _, value in record.headers)]
        if any(part is not None and text in _lower(part) for part in parts):
            return True
        return any(text in _lower(name.encode()) for name, _ in record.headers)


def parse_filter(text: str, key: str, path: str) -> Filter | None:
    """The filter of what a person has written; None if all of it is empty."""
    if not (text or key or path):
        return None
    return Filter(
        _lower(text.encode(errors="surrogateescape")) if text else None,
        key.encode(errors="surrogateescape") if key else None,
        parse_condition(path) if path else None,
    )


def _lower(data: bytes) -> bytes:
    """The text in lower case; bytes that are not UTF-8 stay."""
    if data.isascii():
        return data.lower()
    return data.decode(errors="surrogateescape").lower().encode(errors="surrogateescape")
