"""SQL: queries over the topics of a directory, by DuckDB.

Invariant: a topic that a query names is a table of that name. DuckDB reads it as a stream, each time that the query
uses it, up to the end that the topic had at the first time. So a topic need not fit into memory, and a table that is
used twice is the same both times. A topic that is not used is not opened. The columns are those of a topic in Arrow's
memory.

Damage of a topic ends the query with the error of the log. Nothing is installed from the network.

Needs the extra [sql]. Threads: DuckDB calls a stream from its own threads, one call at a time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from decimal import Decimal
from itertools import chain, count, islice
from math import isfinite
from typing import TYPE_CHECKING, Any

import click

from ..errors import LogError
from ..log import catalog, topic_file
from ..log.lookup import marks_together
from ..log.reader import OnDamage, Reader
from ..system.files import REAL
from ..topic import Topic
from .arguments import DIRECTORY, as_json
from .ending import DAMAGED
from .output import bytes_fact, note, print_json, print_rows, safe
from .signals import Held

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_TOGETHER = 1000  # rows, which decide the widths of a table's columns
_BYTES_AS_JSON = re.compile(r"\b(value|key)\s*->", re.IGNORECASE)
_AS_JSON = re.compile(r"\bas_json\s*\(|\bjson\b", re.IGNORECASE)
_OFFSET = re.compile(r'(?<!")\boffset\b(?!")', re.IGNORECASE)
# DuckDB would draw its progress on standard output.
_SETTINGS = """
    set timezone = 'UTC';
    set autoinstall_known_extensions = false;
    set enable_progress_bar = false;
    create temp macro as_text(bytes) as try(decode(bytes));
    create temp macro as_json(bytes) as try(decode(bytes)::json);
"""


@click.command()
@click.argument("query")
@click.option("-C", "--directory", type=DIRECTORY, default=".", show_default=True, help="Where the topics are.")
@click.option("--skip-damage", "on_damage", flag_value="skip", default="raise",
              help="Skip damage, and end with exit code 1.")  # fmt: skip
@as_json
def sql(query: str, directory: str, on_damage: OnDamage, as_json: bool) -> int:
    """Query the topics of a directory, which are tables of their names, with DuckDB's SQL.

    The columns of a table are key, value, partition, "offset", timestamp and headers. OFFSET is a word of SQL, so the
    column is written in double quotes. as_text(value) and as_json(value) are null for what is no text, or no JSON.

    \b
    loglib sql "select key, count(*) from orders group by key" -C data
    loglib sql "select as_json(value)->>'user' as user from orders where timestamp > now() - interval 1 hour"
    """
    if not query.strip():
        raise click.UsageError("the query is empty")
    if (found := _BYTES_AS_JSON.search(query)) and not _AS_JSON.search(query):
        note(f"{found[1]} is bytes, of which -> makes null; write as_json({found[1]})->")
    if topic_file.exists(REAL, directory):
        raise click.UsageError(f"{directory} is a topic; --directory is the directory in which topics are")
    tables: list[_Table] = []
    with ExitStack() as opened, Held() as held:
        import duckdb  # here: an import in C would swallow the error of a signal
        import pyarrow  # noqa: F401  If it is missing, it is missed now.

        with held.loose():
            connection = opened.enter_context(duckdb.connect())
            opened.enter_context(held.stopping(connection.interrupt))
            try:
                connection.execute(_SETTINGS)
                for name in _names(query, catalog.names(REAL, directory)):
                    tables.append(_Table(os.path.join(directory, name), on_damage, opened))
                    # A view: DuckDB joins a stream with itself only through views.
                    connection.register(f"loglib_{len(tables)}", tables[-1])
                    connection.execute(f'create temp view "{name}" as select * from loglib_{len(tables)}')
                _print(connection, query, as_json=as_json)
            except (duckdb.Error, OSError, RuntimeError) as error:
                held.raise_recorded()  # DuckDB makes errors of its own of one that a signal's handler raises
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise _error(error, tables, query, directory) from error
    gaps = [damage for table in tables for damage in table.gaps]
    for damage in gaps:
        note(f"damage: {damage}")
    return DAMAGED if gaps else 0


class _Table:
    """A topic as DuckDB reads it."""

    def __init__(self, path: str, on_damage: OnDamage, opened: ExitStack) -> None:
        """`opened` closes the topic, which is opened when it is read."""
        self._path, self._on_damage, self._opened = path, on_damage, opened
        self._topic: Topic | None = None
        self._ends: dict[int, int] = {}
        self.gaps: list[Any] = []
        self.errors: list[Exception] = []  # DuckDB keeps only their text

    def __arrow_c_schema__(self) -> object:
        from ..format.arrow import SCHEMA

        return SCHEMA.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow as pa

        from ..format.arrow import SCHEMA

        try:
            reader = self._read()
        except Exception as error:
            self.errors.append(error)
            raise
        return pa.RecordBatchReader.from_batches(SCHEMA, self._batches(reader)).__arrow_c_stream__(requested_schema)

    def _read(self) -> Reader:
        if self._topic is None:
            self._topic = self._opened.enter_context(Topic.open(self._path, mode="r"))
            marks = marks_together(self._topic._logs())  # noqa: SLF001  A transaction is in all partitions, or in none.
            self._ends = {number: mark.flushed_end for number, mark in marks.items()}
        return self._topic.read("begin", self._ends, on_damage=self._on_damage)

    def _batches(self, reader: Reader) -> Iterator[pa.RecordBatch]:
        try:
            with reader:
                yield from reader.arrow()
        except Exception as error:
            self.errors.append(error)
            raise
        finally:
            self.gaps += [each for each in reader.gaps if each not in self.gaps]


def _names(query: str, topics: Sequence[str]) -> list[str]:
    """The topics that the query may name: those whose names are in its text, or all if none is.

    In SQL the case of names does not count. Of topics whose names differ only in case, it must name one exactly.
    """
    by_name: dict[str, list[str]] = {}
    for each in topics:
        by_name.setdefault(each.lower(), []).append(each)
    named = {name: same for name, same in by_name.items() if name in query.lower()}
    for name, same in named.items():
        exact = [each for each in same if each in query]
        if len(same) > 1 and len(exact) != 1:
            raise click.UsageError(f"{' and '.join(same)} differ only in case, which names in SQL do not; name one")
        named[name] = exact if len(same) > 1 else same
    return [same[0] for same in (named or by_name).values() if len(same) == 1]


def _error(error: Exception, tables: Sequence[_Table], query: str, directory: str) -> Exception:
    """The error to raise for one of DuckDB: that of a topic's log, or a usage error if the query is wrong."""
    import duckdb

    for table in tables:
        for each in table.errors:
            return each
    text = str(error).strip()
    if isinstance(error, duckdb.ParserException) and _OFFSET.search(query):
        text += '\nThe word OFFSET belongs to SQL: write the column as "offset", in double quotes.'
    if isinstance(error, duckdb.CatalogException):
        names = ", ".join(catalog.names(REAL, directory)) or "none"
        text += f"\nThe topics in {directory}: {names}"
    if isinstance(error, duckdb.ProgrammingError):
        return click.UsageError(_printable(text))
    return LogError(_printable(text))


def _printable(text: str) -> str:
    return "\n".join(safe(line) for line in text.splitlines())


def _print(connection: duckdb.DuckDBPyConnection, query: str, *, as_json: bool) -> None:
    statements = connection.extract_statements(query)
    is_select = bool(statements) and statements[-1].type.name == "SELECT"
    relation: Any = connection.sql(query)
    if relation is None:
        return
    reader = relation.to_arrow_reader(_TOGETHER)
    names = _distinct([field.name for field in reader.schema])
    rows = chain.from_iterable(
        zip(*map(_values, batch.columns), strict=True) for batch in reader
    )  # fmt: skip
    if names == ["Count"] and not is_select:  # of `copy` and others that change something: it is no data
        for (changed,) in rows:
            note(f"{changed:,} rows")
        return
    if as_json:
        for row in rows:
            print_json(_facts(names, row))
        return
    import pyarrow.types as types

    right = [types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
             for field in reader.schema]  # fmt: skip
    heads = [f">{name}" if at_right else name for name, at_right in zip(names, right, strict=True)]
    cells = ([_cell(value) for value in row] for row in rows)
    print_rows(heads, list(islice(cells, _TOGETHER)), cells)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names of columns, each once: an object of JSON has one value for a name."""
    found: list[str] = []
    for name in names:
        free = (f"{name}_{number}" if number else name for number in count())
        found.append(next(each for each in free if each not in found))
    return found


def _values(column: pa.Array) -> list[Any]:
    """The values of a column. A time that Python does not have is its number, with the unit."""
    try:
        found: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        found = [_value(each) for each in column]
    return found


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        return f"{getattr(scalar, 'value', '?')} {getattr(scalar.type, 'unit', '')}"


def _facts(names: Sequence[str], row: Iterable[Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, value in zip(names, row, strict=True):
        facts |= bytes_fact(name, value) if isinstance(value, bytes) else {name: _plain(value)}
    return facts


def _plain(value: Any) -> Any:
    """The value with text for bytes and times in it, as JSON can have it."""
    match value:
        case bytes():
            return value.decode(errors="backslashreplace")
        case dict():
            return _facts([str(name) for name in value], value.values())
        case list() | tuple():
            return [_plain(each) for each in value]
        case datetime():
            return value.isoformat()
        case float() if not isfinite(value):
            return str(value)  # JSON has no such number
        case Decimal() if value == value.to_integral_value():
            return int(value)
        case Decimal() if Decimal(str(float(value))) == value:
            return float(value)
    return value


def _cell(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case bytes() | str():
            return safe(value)
        case dict() | list() | tuple():
            return safe(json.dumps(_plain(value), ensure_ascii=False, default=str))
    return safe(str(value))
