"""Where: the condition of a query on the event times and keys of its records.

Invariant: a condition is true for the same records in a task of Spark and in Spark's own reader. It is a small part of
SQL: comparisons of `timestamp` and `key` with constants, joined by AND. All else is refused, never ignored.

    timestamp >= '2024-05-01T12:00Z' AND timestamp < '-15m'     a time with its zone, or an age
    timestamp BETWEEN '2024-05-01T12:00Z' AND '2024-05-01T13:00Z'
    key = 'user 1'        key IN ('user 1', X'00FF')            text, or bytes in hexadecimal digits

A record without a key fulfils no condition on keys, as in SQL.

Processes: plain facts, made on the driver; `choose` in executors' workers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from ..config.arguments import Time, parse_start
from ..config.times import to_datetime

if TYPE_CHECKING:
    from pyspark.sql import Column

_TOKEN = re.compile(
    r"\s*(?:(?P<bytes>X'(?:[0-9A-F]{2})*')|(?P<text>'(?:[^']|'')*')|(?P<word>[A-Z_]\w*)|(?P<sign><=|>=|[=<>(),]))",
    re.IGNORECASE,
)
_EXPECTED = "conditions on timestamp and key joined by AND, as in timestamp >= '-15m' AND key IN ('a', 'b')"
_FIRST, _LAST = -(1 << 63), (1 << 63) - 1  # what a timestamp can be, in microseconds
_YEAR_1, _YEAR_9999 = -62_135_596_800_000_000, 253_402_300_799_999_999  # the first and the last that text can say


class Where(NamedTuple):
    """A condition: a range of event times in microseconds, both ends included, and some keys. None: all keys."""

    first_us: int = _FIRST
    last_us: int = _LAST
    keys: frozenset[bytes] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that decide."""
        has_times = self.first_us > _FIRST or self.last_us < _LAST
        return ("timestamp",) * has_times + ("key",) * (self.keys is not None)

    def choose(self, records: pa.RecordBatch) -> np.ndarray:
        """The numbers of the records that fulfil the condition. The batch has at least the deciding columns."""
        chosen = np.ones(records.num_rows, np.bool_)
        if "timestamp" in self.columns:
            times = records.column("timestamp")
            times_us = np.frombuffer(times.buffers()[1], np.int64)[times.offset : times.offset + len(times)]
            chosen &= (times_us >= self.first_us) & (times_us <= self.last_us)
        if self.keys is not None:
            chosen &= _are_in(records.column("key"), self.keys)
        return np.flatnonzero(chosen)

    def as_column(self) -> Column:
        """The condition for rows that Spark reads itself."""
        from pyspark.sql.functions import col, lit, timestamp_micros

        condition = lit(True)  # by microseconds: Spark takes a `datetime` for one of the Julian calendar before 1582
        if self.first_us > _FIRST:
            condition &= col("timestamp") >= timestamp_micros(lit(self.first_us))
        if self.last_us < _LAST:
            condition &= col("timestamp") <= timestamp_micros(lit(self.last_us))
        if self.keys is not None:
            condition &= col("key").isin([bytearray(key) for key in sorted(self.keys)])
        return condition

    def as_option(self) -> str:
        """The condition as the text of the option `where`, with times instead of ages.

        A limit outside the years 1 to 9999, which no text can say, is left out.
        """
        parts = []
        if self.first_us >= _YEAR_1:
            parts.append(f"timestamp >= '{to_datetime(min(self.first_us, _YEAR_9999)).isoformat()}'")
        if self.last_us <= _YEAR_9999:
            parts.append(f"timestamp <= '{to_datetime(max(self.last_us, _YEAR_1)).isoformat()}'")
        if self.keys is not None:
            listed = ", ".join(f"X'{key.hex()}'" for key in sorted(self.keys))
            parts.append(f"key IN ({listed})" if listed else "key = 'a' AND key = 'b'")  # SQL has no empty list
        return " AND ".join(parts)


@lru_cache(maxsize=1)  # each batch of a task asks for the same set
def _array_of(keys: frozenset[bytes]) -> pa.Array:
    """The keys as an array. It is made of buffers: `pa.array` would import pandas, 0.5 s per worker."""
    ends = np.cumsum([0, *map(len, keys)], dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(keys), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(keys))])


def _are_in(keys: pa.Array, wanted: frozenset[bytes]) -> np.ndarray:
    """Which keys are wanted."""
    import pyarrow.compute as pc

    found = pc.is_in(keys, value_set=_array_of(wanted))
    bits = np.unpackbits(np.frombuffer(found.buffers()[1], np.uint8), bitorder="little")
    return bits[found.offset : found.offset + len(found)].astype(np.bool_)


# --- text ------------------------------------------------------------------------------------------


def parse_where(text: str, *, now_us: int) -> Where:
    """The condition of this text. Ages count from `now_us`. `ValueError` says what is expected."""
    return _Parser(text, now_us).parse()


class _Parser:
    def __init__(self, text: str, now_us: int) -> None:
        self._text = text
        self._now_us = now_us
        self._tokens = _tokens_of(text)
        self._next = 0

    def parse(self) -> Where:
        where = Where()
        while True:
            where = self._condition(where)
            if self._next == len(self._tokens):
                return where
            self._take("word", "AND")

    def _condition(self, where: Where) -> Where:
        name = self._take("word").lower()
        if name == "timestamp":
            first_us, last_us = self._range()
            return where._replace(first_us=max(where.first_us, first_us), last_us=min(where.last_us, last_us))
        if name != "key":
            _refuse(self._text, f"there is no condition on {name}")
        keys = self._keys()
        return where._replace(keys=keys if where.keys is None else where.keys & keys)

    def _range(self) -> tuple[int, int]:
        if self._peek("word", "BETWEEN"):
            self._take("word")
            first_us = self._time()
            self._take("word", "AND")
            return first_us, self._time()
        sign, time_us = self._take("sign"), self._time()
        ranges = {
            "=": (time_us, time_us), ">": (time_us + 1, _LAST), ">=": (time_us, _LAST),
            "<": (_FIRST, time_us - 1), "<=": (_FIRST, time_us),
        }  # fmt: skip
        if sign not in ranges:
            _refuse(self._text, f"{sign} is no comparison")
        return ranges[sign]

    def _time(self) -> int:
        text = _unquoted(self._take("text"))
        try:
            found = parse_start(text, now_us=self._now_us)
        except ValueError:
            found = text
        if not isinstance(found, Time):
            _refuse(self._text, f"{text!r} is not a time with its zone like 2024-05-01T12:00Z, nor an age like -15m")
        return found.timestamp_us

    def _keys(self) -> frozenset[bytes]:
        if self._peek("sign", "="):
            self._take("sign")
            return frozenset([self._key()])
        self._take("word", "IN", "= or IN")
        self._take("sign", "(")
        keys = {self._key()}
        while self._peek("sign", ","):
            self._take("sign")
            keys.add(self._key())
        self._take("sign", ")")
        return frozenset(keys)

    def _key(self) -> bytes:
        if self._peek("bytes"):
            return bytes.fromhex(self._take("bytes")[2:-1])
        return _unquoted(self._take("text")).encode()

    def _peek(self, kind: str, wanted: str | None = None) -> bool:
        if self._next == len(self._tokens):
            return False
        found, token = self._tokens[self._next]
        return found == kind and (wanted is None or token.upper() == wanted)

    def _take(self, kind: str, wanted: str | None = None, described: str | None = None) -> str:
        if not self._peek(kind, wanted):
            present = self._tokens[self._next][1] if self._next < len(self._tokens) else "the end"
            _refuse(self._text, f"{described or wanted or _KINDS[kind]} is missing before {present}")
        self._next += 1
        return self._tokens[self._next - 1][1]


_KINDS = {"word": "a column", "text": "a text in single quotes", "sign": "a comparison"}


def _tokens_of(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    text = text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            _refuse(text, f"{text[at:].lstrip()[:20]!r} is not understood")
        assert found.lastgroup is not None
        tokens.append((found.lastgroup, found[found.lastgroup]))
        at = found.end()
    return tokens


def _unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'")


def _refuse(text: str, why: str) -> NoReturn:
    """`ValueError` for a condition."""
    raise ValueError(f"option where must be {_EXPECTED}, not {text!r}: {why}")
