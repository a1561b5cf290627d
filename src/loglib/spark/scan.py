"""Scan: the records of one split as Arrow batches of a good size for Spark.

Invariant: a split gives its records once and in order, or an error. Pointers in the batch headers
(search.py) find the batch that covers the split's first byte. The scan never guesses from bytes, because
a record's value may look like a batch. From there each batch is checked and follows the batch before it.

Keys, values and record headers are arrays over the bytes that were read. They are copied once if small
batches of the log are merged, because an Arrow batch's columns are contiguous. The scan keeps at most
64 MiB of the log in memory, or its largest batch if that is more.

Processes: runs in a Spark task; opens files by path, takes no lock and writes nothing.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from .. import description
from ..batch import Batch
from ..cursor import Cursor
from ..errors import LogError, OffsetOutOfRangeError
from ..log import Log
from ..system.files import REAL
from .plan import Range, Split
from .ranges import open_log, warn_of_loss

__all__ = ["scan"]

# Spark pays for each small batch; merging larger batches costs more here than it saves in Spark.
_MERGED_BYTES = 512 << 10
# Bytes of the log that waiting columns may keep in memory. With few columns many batches are merged into one.
_HELD_BYTES = 64 << 20
_CREATE_TIME = 0  # Kafka's name for a timestamp that the producer gave


def scan(
    split: Split, schema: pa.Schema, *, arrow_batch_bytes: int, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """The split's records with the columns of `schema`, in batches of at most `arrow_batch_bytes`.

    A batch is larger only if it is a single record. Raises `CorruptLogError` for a damaged log, and
    `OffsetOutOfRangeError` if retention has dropped records, unless the query accepts loss.
    """
    layout = _Layout(split.range, schema)
    pieces = (
        piece
        for batch in _batches(split, fail_on_data_loss=fail_on_data_loss)
        for piece in layout.pieces(batch, arrow_batch_bytes)
    )
    for group in _groups(pieces, arrow_batch_bytes):
        yield layout.record_batch(group)


# --- batches of the log ------------------------------------------------------------------------------


def _batches(split: Split, *, fail_on_data_loss: bool) -> Iterator[Batch]:
    wanted = split.range
    _check_topic(wanted)
    with closing(open_log(wanted.path, wanted.log_id, wanted.partition)) as log:
        position = split.start_position
        while position < split.end_position:
            try:
                for batch in _batches_from(log, position, split):
                    position = batch.header.next_offset
                    if part := _wanted_part(batch, wanted):
                        yield part
                return
            except OffsetOutOfRangeError as error:
                if fail_on_data_loss:
                    error.add_note(
                        f"(topic {wanted.path}; retention has dropped what this DataFrame planned to read: "
                        "load() again, or give failOnDataLoss=false to read what is left)"
                    )
                    raise
                lost = min(error.log_start_offset, split.end_position)
                warn_of_loss(f"{wanted.path}, partition {wanted.partition}: [{position}, {lost}) of the log is gone")
                position = error.log_start_offset


def _check_topic(wanted: Range) -> None:
    described = description.read(REAL, wanted.path)
    if described is None:
        raise FileNotFoundError(
            errno.ENOENT,
            f"no topic on {socket.gethostname()}; logs must be on storage that all executors mount at the same path",
            wanted.path,
        )
    if described[0] != wanted.log_id:
        raise LogError(
            f"{wanted.path} on {socket.gethostname()} is log {described[0].hex()}, and the query was planned for "
            f"{wanted.log_id.hex()}: the topic was made again, or it is not the same storage; load() again"
        )


def _batches_from(log: Log, position: int, split: Split) -> Iterator[Batch]:
    """The batches with base offsets in [position, the split's end)."""
    mark = log.mark()
    if position < mark.log_start_offset:
        raise OffsetOutOfRangeError(log.partition, position, mark.log_start_offset, mark.flushed_end)
    around = log.header_around(position, mark)
    first = position if around.base_offset == position else around.next_offset
    with closing(Cursor(log, first)) as cursor:
        while cursor.position < split.end_position:
            for batch in cursor.read(split.range.flushed_end):
                if batch.header.base_offset >= split.end_position:
                    return
                yield batch


def _wanted_part(batch: Batch, wanted: Range) -> Batch | None:
    """The part of the batch that is in the range; the batch may begin before it and end after it."""
    offsets = batch.offsets
    if offsets.start < wanted.start_offset or offsets.stop > wanted.end_offset:
        batch = batch.between(wanted.start_offset, wanted.end_offset)
    return batch if len(batch) else None


# --- Arrow batches -----------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Some records with the columns that are read from the log."""

    columns: pa.RecordBatch
    arrow_bytes: int
    held_bytes: int  # of the log, kept in memory by the columns


class _Layout:
    """The columns from the log, the constant columns, and their order."""

    def __init__(self, range_: Range, schema: pa.Schema) -> None:
        self._range = range_
        self._schema = schema
        self._constants = _constants(range_)
        read = tuple(name for name in schema.names if name not in self._constants)
        self._read = read or ("offset",)  # one column must give the number of records
        self._repeated: dict[str, pa.Array] = {}
        constants = [self._constant(name, 1) for name in schema.names if name in self._constants]
        self._constant_bytes = sum(each.nbytes for each in constants)  # per record

    def pieces(self, batch: Batch, limit_bytes: int) -> Iterator[_Piece]:
        """The batch's columns, halved until each piece is within the limit or is one record."""
        columns = batch.to_arrow(self._read)
        fields = [self._schema.field(name) for name in self._read if name in self._schema.names]
        for index, field in enumerate(fields):
            if field.type == pa.string():
                columns = columns.set_column(index, field.name, self._text(batch, columns.column(index), field.name))
            if not field.nullable and columns.column(index).null_count:
                self._refuse_null(batch, columns.column(index), field.name)
        yield from self._halves(columns, _memory(batch), limit_bytes)

    def record_batch(self, pieces: list[_Piece]) -> pa.RecordBatch:
        """The pieces as one batch, with all requested columns."""
        count = sum(piece.columns.num_rows for piece in pieces)
        arrays = []
        for name in self._schema.names:
            if name in self._constants:
                arrays.append(self._constant(name, count))
            elif len(pieces) == 1:
                arrays.append(pieces[0].columns.column(name))
            else:
                arrays.append(pa.concat_arrays([piece.columns.column(name) for piece in pieces]))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _constant(self, name: str, count: int) -> pa.Array:
        """A column of one repeated value: a slice of the longest column made so far."""
        longest = self._repeated.get(name)
        if longest is None or len(longest) < count:
            longest = self._repeated[name] = _repeat(self._constants[name], count)
        return longest.slice(0, count)

    def _halves(self, columns: pa.RecordBatch, held_bytes: int, limit_bytes: int) -> Iterator[_Piece]:
        count = columns.num_rows
        arrow_bytes = columns.nbytes + count * self._constant_bytes
        if arrow_bytes <= limit_bytes or count == 1:
            yield _Piece(columns, arrow_bytes, held_bytes)
            return
        half = count // 2
        yield from self._halves(columns.slice(0, half), held_bytes // 2, limit_bytes)
        yield from self._halves(columns.slice(half), held_bytes // 2, limit_bytes)

    def _text(self, batch: Batch, column: pa.Array, name: str) -> pa.Array:
        try:
            return column.cast(pa.string())  # checks UTF-8, copies nothing
        except pa.ArrowInvalid:
            for offset, item in zip(batch.offsets, column.to_pylist(), strict=True):
                try:
                    bytes(item or b"").decode()
                except UnicodeDecodeError as reason:
                    raise ValueError(f"{self._at(offset)}: the {name} is not UTF-8; read it as binary") from reason
            raise

    def _refuse_null(self, batch: Batch, column: pa.Array, name: str) -> None:
        offset = batch.offsets[column.is_null().index(True).as_py()]
        raise ValueError(f"{self._at(offset)}: the {name} is null, and the schema says NOT NULL")

    def _at(self, offset: int) -> str:
        return f"{self._range.path}, partition {self._range.partition}, offset {offset}"


def _constants(range_: Range) -> dict[str, str | int]:
    return {"topic": range_.topic, "partition": range_.partition, "timestampType": _CREATE_TIME}


def _repeat(value: str | int, count: int) -> pa.Array:
    """The value `count` times. `pa.scalar` is not used, because it imports pandas: half a second per worker."""
    if isinstance(value, int):
        return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(np.full(count, value, np.int32))])
    text = value.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * len(text)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text * count)])


def _memory(batch: Batch) -> int:
    """Bytes that the batch's arrays keep in memory."""
    header = batch.header
    return max(header.length, header.value_bytes + header.key_bytes + header.header_bytes)


def _groups(pieces: Iterable[_Piece], limit_bytes: int) -> Iterator[list[_Piece]]:
    """Groups of neighbouring pieces: each makes a batch that is large enough and within the limit."""
    group: list[_Piece] = []
    arrow_bytes = held_bytes = 0
    for piece in pieces:
        if group and (
            arrow_bytes >= _MERGED_BYTES
            or arrow_bytes + piece.arrow_bytes > limit_bytes
            or held_bytes + piece.held_bytes > _HELD_BYTES
        ):
            yield group
            group, arrow_bytes, held_bytes = [], 0, 0
        group.append(piece)
        arrow_bytes += piece.arrow_bytes
        held_bytes += piece.held_bytes
    if group:
        yield group
