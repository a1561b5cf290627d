"""Record import: appends the records of files that `cat --format` writes: JSON lines, CSV, Parquet.

Invariant: a record goes in as the file has it, or the import stops with the file, the line and the reason. Records
before that line are in the topic, and the message says how many. A signal loses no record that was read from a pipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import click

from ..errors import LogError, RecordTooLargeError
from ..format.columns import headers_bytes
from ..format.display import counted, sized
from ..topic import Topic
from .lines import BOM, LineSource, Portion, RefusedLine
from .output import Progress, note
from .record_lines import CsvRows, Row, from_json
from .signals import Held
from .streams import INPUT

_MOST_TIMES = 6  # by which JSON is longer than what it stands for: \\u0000
_FRAME_BYTES = 1 << 20  # for the names of fields and headers


class RecordImport:
    """Appends files of records to a topic, and counts them."""

    def __init__(
        self, topic: Topic, held: Held, form: str, *, partition: int | None, keep_partitions: bool, sync: bool
    ) -> None:
        self._topic, self._held, self._form = topic, held, form
        self._partition, self._keeps, self._sync = partition, keep_partitions, sync
        self._most_bytes = topic.config.max_record_bytes
        self._limit = self._most_bytes * _MOST_TIMES + _FRAME_BYTES
        self._records = self._bytes = 0

    def append(self, name: str, progress: Progress | None = None) -> None:
        """Append the records of one file; `-` is standard input."""
        if self._form == "parquet":
            self._append_parquet(name, progress)
            return
        csv = CsvRows(self._limit)
        parse: Callable[[bytes], Row | None] = csv.row if self._form == "csv" else _json_row
        with LineSource(name, end=b"\n", limit_bytes=self._limit, held=self._held) as source:
            source.check_text()
            last, size = 0, source.size_bytes if source.is_file else 0
            try:
                for portion in source.portions():
                    self._append_lines(source, portion, parse)
                    last = portion.number + len(portion.lines)
                    if progress is not None and size:
                        progress(min(portion.ends[-1], size), size)
            except RefusedLine as error:
                self._stop(source.name, error.number, f"it has more than {self._limit:,} bytes, and no record does")
            if csv.open_lines:
                row, why = last - csv.open_lines, "a cell in quotes begins in this row and has no end"
                if self._held.number is None:
                    self._stop(source.name, row, why)
                note(f"{source.name}, line {row:,} was not whole when the signal came: {why}")

    def _append_lines(self, source: LineSource, portion: Portion, parse: Callable[[bytes], Row | None]) -> None:
        rows: list[Row] = []
        for number, line in enumerate(portion.lines, portion.number):
            if number == 1:
                line = line.removeprefix(BOM)
            try:
                row = parse(line)
                if row is not None:
                    self._check(row)
                    rows.append(row)
            except ValueError as error:
                self._append_rows(rows)
                if self._held.number is not None:  # the signal came in the middle of it
                    note(f"{source.name}, line {number:,} was not whole when the signal came: {error}")
                    return
                self._stop(source.name, number, str(error))
        self._append_rows(rows)
        if self._sync:
            self._topic.flush()

    def _check(self, row: Row) -> None:
        """Raise `ValueError` if the topic cannot take the record."""
        size = len(row.value or b"") + len(row.key or b"") + headers_bytes(row.headers)
        if size > self._most_bytes:
            raise ValueError(f"its record has {size:,} bytes; --max-record-bytes of the topic is {self._most_bytes:,}")
        if self._keeps and (row.partition or 0) >= len(self._topic.partitions):
            raise ValueError(f"partition {row.partition}: the topic has {len(self._topic.partitions)}")

    def _append_rows(self, rows: list[Row]) -> None:
        by_partition: dict[int | None, list[Row]] = {}
        for row in rows:
            by_partition.setdefault(row.partition if self._keeps else self._partition, []).append(row)
        for partition, some in by_partition.items():
            self._topic.append_many([row.value for row in some], partition=partition, **_columns(some))
            self._count(len(some), sum(len(row.value or b"") for row in some))

    def _count(self, records: int, size_bytes: int) -> None:
        self._records += records
        self._bytes += size_bytes

    def _append_parquet(self, name: str, progress: Progress | None) -> None:
        from .parquet import batches_of

        place: Any = "partition" if self._keeps else self._partition
        shown, before = INPUT if name == "-" else name, self._records
        with batches_of(name, self._held, progress) as batches:
            for batch in batches:
                try:
                    self._topic.append_arrow(batch, partition=place)
                except RecordTooLargeError as error:
                    kind, _, at = error.what.partition(" ")  # counted in the batch, from 0 on
                    number = self._records - before + int(at) + 1 if kind == "record" else 0
                    size, limit = error.size_bytes, error.limit_bytes
                    self._refuse(f"{shown}, record {number:,}: it has {size:,} bytes, and the limit is {limit:,}")
                except (ValueError, TypeError) as error:  # a column that is no field, or a type
                    self._refuse(f"{shown}: {error}")
                self._count(batch.num_rows, batch.column("value").nbytes)
                if self._held.number is not None:
                    return

    def _stop(self, name: str, number: int, why: str) -> NoReturn:
        """Raise an error that names the line, and how many records were appended."""
        self._refuse(f"{name}, line {number:,}: {why}")

    def _refuse(self, why: str) -> NoReturn:
        if not self._records:
            raise click.UsageError(f"{why}. Nothing was appended")
        self._topic.flush()
        raise LogError(f"{why}. {self._records:,} records before it were appended")

    def report(self) -> None:
        """Print what was appended."""
        note(f"appended {counted(self._records, 'record')}, {sized(self._bytes)}")


def _json_row(line: bytes) -> Row | None:
    return from_json(line) if line.strip() else None


def _columns(rows: Iterable[Row]) -> dict[str, Any]:
    """The columns of records beside the values; one that no record has is left out."""
    rows = list(rows)
    columns: dict[str, Any] = {}
    if any(row.key is not None for row in rows):
        columns["keys"] = [row.key for row in rows]
    if any(row.timestamp_us is not None for row in rows):
        now_us = time.time_ns() // 1000
        columns["timestamps"] = [now_us if row.timestamp_us is None else row.timestamp_us for row in rows]
    if any(row.headers for row in rows):
        columns["headers"] = [row.headers for row in rows]
    return columns
