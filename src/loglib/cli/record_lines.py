"""Record lines: records as text that comes back exactly: JSON lines, and CSV.

Invariant: reading what was written gives the same value, key, headers and time, for any bytes. Null and empty differ.
What cannot be read exactly, such as a field with another name, raises a `ValueError` and is never guessed.

    field           JSON lines                  CSV
    partition       number                      number; these two are the former place of the record
    offset          number                      number
    timestamp_us    number, microseconds UTC    number; null or left out: the time of appending
    key, value      text in UTF-8, or null      text; a cell without quotes and content is null, "" is empty
    key_base64      bytes that are not UTF-8    the same; then the field without _base64 is left out, or null
    value_base64    the same                    the same
    headers         list of objects with name and value, or value_base64; the same list as JSON, or null

Threads: pure functions, except `CsvRows`, which belongs to one thread.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

from ..format.columns import Headers
from ..format.record import Record
from ..system.failures import printable
from .output import json_line, record_facts

FORMS = ("jsonl", "csv", "parquet")  # of `cat` and `append`; the last one is in parquet.py
FIELDS = ("partition", "offset", "timestamp_us", "key", "key_base64", "value", "value_base64", "headers")
CSV_HEAD = (",".join(FIELDS) + "\n").encode()

_INT64 = range(-(1 << 63), 1 << 63)
_SPECIAL = (b'"', b",", b"\n", b"\r")


class Row(NamedTuple):
    """A record that was read, without a place."""

    value: bytes | None
    key: bytes | None
    timestamp_us: int | None
    headers: Headers
    partition: int | None


# --- JSON lines ---------------------------------------------------------------------------------------------


def to_json(record: Record) -> bytes:
    """The record as a line of JSON, without its end."""
    return json_line(record_facts(record)).encode()


def from_json(line: bytes) -> Row:
    """The record of a line of JSON. `ValueError` if the line is none."""
    fields = _parsed(line)
    if not isinstance(fields, dict):
        raise ValueError('it is not a JSON object such as {"key": "ann", "value": "text"}')
    check_fields(fields)
    if not {"value", "value_base64"} & fields.keys():
        raise ValueError("it has no field value; without --format, each line is a value as a whole")
    headers = fields.get("headers")
    return Row(
        _bytes("value", fields), _bytes("key", fields), _number("timestamp_us", fields, _INT64),
        () if headers is None else _headers(headers), _number("partition", fields, range(1 << 31)),
    )  # fmt: skip


def check_fields(names: Iterable[str]) -> None:
    """Raise `ValueError` if one of these is no name of a field: its content would be lost."""
    unknown = [name for name in names if name not in FIELDS]
    if unknown:
        from difflib import get_close_matches  # imported here: only an error needs it

        close = get_close_matches(unknown[0], FIELDS, 1)
        hint = f" (is {close[0]} meant?)" if close else ""
        other = "" if close else ". Without --format each line is a value; `loglib sql` makes JSON of other columns"
        shown = ", ".join(map(printable, unknown))
        raise ValueError(f"unknown fields {shown[:200]}{hint}; the known ones are {', '.join(FIELDS)}{other}")


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text.decode(), parse_constant=_refuse, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at letter {error.pos + 1}") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")
    return found


def _bytes(name: str, fields: dict[str, Any]) -> bytes | None:
    """The bytes of a field: its text in UTF-8, or those of its base64."""
    text, coded = fields.get(name), fields.get(f"{name}_base64")
    if coded is None:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{name} must be text or null, not {json.dumps(text)[:40]}; a text may contain JSON")
        try:
            return None if text is None else text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} has half of a surrogate pair, which no UTF-8 has") from error
    if text is not None:
        raise ValueError(f"it has {name} and {name}_base64; give one of them")
    return _from_base64(name, coded)


def _from_base64(name: str, coded: Any) -> bytes:
    try:
        if not isinstance(coded, str | bytes):
            raise ValueError("no text")
        return base64.b64decode(coded, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{name}_base64 is not base64: {error}") from error


def _number(name: str, fields: dict[str, Any], allowed: range) -> int | None:
    number = fields.get(name)
    if number is not None and (type(number) is not int or number not in allowed):
        bounds = f"from {allowed.start} to {allowed.stop - 1}"
        raise ValueError(f"{name} must be a whole number {bounds}, not {number!r:.40}")
    return number


def _headers(given: Any) -> Headers:
    if not isinstance(given, list):
        raise ValueError('headers must be a list such as [{"name": "trace", "value": "1"}]')
    return tuple(map(_header, given))


def _header(given: Any) -> tuple[str, bytes]:
    if not isinstance(given, dict) or not given.keys() <= {"name", "value", "value_base64"}:
        raise ValueError('a header must be an object such as {"name": "trace", "value": "1"}')
    name, value = given.get("name"), _bytes("value", given)
    if not isinstance(name, str) or value is None:
        raise ValueError("a header needs a name and a value, which are text")
    return name, value


# --- CSV ----------------------------------------------------------------------------------------------------


def to_csv(record: Record) -> bytes:
    """The record as a row of CSV, without its end."""
    facts = record_facts(record)
    if "headers" in facts:
        facts["headers"] = json.dumps(facts["headers"], ensure_ascii=False)
    return b",".join([_cell(facts.get(name)) for name in FIELDS])


def _cell(content: Any) -> bytes:
    """A cell. Text is quoted if it is empty, so that it differs from null, or if it has a letter with a meaning."""
    if content is None:
        return b""
    text = str(content).encode()
    if text and not any(each in text for each in _SPECIAL):
        return text
    return b'"' + text.replace(b'"', b'""') + b'"'


class CsvRows:
    """Makes rows of the lines of a CSV file. The first row has the names of the columns.

    A cell in quotes may contain line ends, so a row may have several lines.
    """

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: the size of the longest allowed row."""
        self._limit = limit_bytes
        self._names: list[str] | None = None
        self._lines: list[bytes] = []  # of the row that has no end yet
        self._bytes = 0
        self._is_quoted = False  # True if the row ends within quotes up to now

    def row(self, line: bytes) -> Row | None:
        """The record whose row ends with this line. None if the line is empty, the head, or not the last of its row.

        `ValueError` if the row is no record.
        """
        self._lines.append(line)
        self._bytes += len(line) + 1
        self._is_quoted ^= bool(line.count(b'"') & 1)
        if self._bytes > self._limit:
            raise ValueError(f"its row has more than {self._limit:,} bytes; is a quote missing?")
        if self._is_quoted:
            return None
        text = b"\n".join(self._lines)
        self._lines, self._bytes = [], 0
        cells = _cells(text)
        if cells is None:
            return None
        if self._names is None:
            self._names = self._head(cells)
            return None
        if len(cells) != len(self._names):
            raise ValueError(f"it has {len(cells)} cells for {len(self._names)} columns")
        return _csv_row(dict(zip(self._names, cells, strict=True)))

    @property
    def open_lines(self) -> int:
        """The number of lines in a row that has no end yet."""
        return len(self._lines)

    def _head(self, cells: list[bytes | None]) -> list[str]:
        names = [(cell or b"").decode(errors="replace") for cell in cells]
        check_fields(names)
        if len({*names}) < len(names):
            raise ValueError("a column is there twice")
        if not {"value", "value_base64"} & {*names}:
            raise ValueError(f"the first line must name the columns, and value is none of {', '.join(names)}")
        return names


def _csv_row(cells: dict[str, bytes | None]) -> Row:
    headers = cells.get("headers")
    return Row(
        _csv_bytes("value", cells), _csv_bytes("key", cells), _csv_number("timestamp_us", cells, _INT64),
        () if headers is None else _headers(_parsed(headers)), _csv_number("partition", cells, range(1 << 31)),
    )  # fmt: skip


def _csv_bytes(name: str, cells: dict[str, bytes | None]) -> bytes | None:
    text, coded = cells.get(name), cells.get(f"{name}_base64")
    if coded is None:
        return text
    if text is not None:
        raise ValueError(f"it has {name} and {name}_base64; give one of them")
    return _from_base64(name, coded)


def _csv_number(name: str, cells: dict[str, bytes | None], allowed: range) -> int | None:
    cell = cells.get(name)
    if cell is None:
        return None
    digits = cell.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19:
        raise ValueError(f"{name} must be a whole number, not {cell[:40]!r}")
    return _number(name, {name: int(cell)}, allowed)


def _cells(row: bytes) -> list[bytes | None] | None:
    """The cells of a row: None for one without quotes and content. None for an empty row."""
    if row in (b"", b"\r"):
        return None
    cells: list[bytes | None] = []
    at = 0
    while True:
        if row[at : at + 1] == b'"':
            cell, at = _quoted(row, at + 1)
            cells.append(cell)
        else:
            comma = row.find(b",", at)
            end = len(row) if comma < 0 else comma
            plain = row[at:end].removesuffix(b"\r") if comma < 0 else row[at:end]
            if b'"' in plain:
                raise ValueError(f"cell {len(cells) + 1} has a quote but does not begin with one")
            cells.append(plain or None)
            at = end
        if at >= len(row) or row[at:] == b"\r":
            return cells
        if row[at : at + 1] != b",":
            raise ValueError(f"after the quotes of cell {len(cells)} comes no comma")
        at += 1


def _quoted(row: bytes, at: int) -> tuple[bytes, int]:
    """The content of a cell in quotes, from after its first quote, and the place after its last one."""
    parts: list[bytes] = []
    while True:
        quote = row.index(b'"', at)  # there is one, since the number of quotes is even
        parts.append(row[at:quote])
        if row[quote + 1 : quote + 2] != b'"':
            return b'"'.join(parts), quote + 1
        at = quote + 2
