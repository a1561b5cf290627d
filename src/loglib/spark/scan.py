"""Scan: the records of one split as Arrow batches of a good size for Spark.

Invariant: a split yields its records once and in order, or an error. Pointers in the batch headers
(log/search.py) find the batch that covers the split's first byte. The scan never guesses from bytes, because
a record's value may look like a batch. From there each batch is checked and follows the batch before it.
A task reads nothing unless the topic at the path has the log id of the plan.

With `skip_damage` a split leaves out damage, and reports the damage that begins in it. The damage before
its first batch begins in an earlier split.

Keys, values and record headers are arrays over the bytes that were read. They are copied once if small
batches of the log are merged, because an Arrow batch's columns are contiguous. The scan keeps at most
64 MiB of the log in memory, or its largest batch if that is more.

Processes: runs in a Spark task; opens files by path, takes no lock and writes nothing. It lists no directory,
because the split has the names of its segments. It looks for other files only if these are missing.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ..errors import CorruptLogError, LogError, OffsetOutOfRangeError
from ..format.record import Damage
from ..format.watermark import Mark
from ..log import topic_file
from ..log.bundle_reader import Bundle
from ..log.cursor import Cursor, Piece
from ..log.log import Log
from ..log.search import around
from ..system.files import REAL
from .columns import known_name
from .data_loss import report_gap, warn_of_loss
from .options import Options
from .plan import Part, Range, Split
from .ranges import open_range
from .where import Where

# Spark pays for each small batch; merging larger batches costs more here than it saves in Spark.
_MERGED_BYTES = 512 << 10
# Bytes of the log that waiting columns may keep in memory. With few columns many batches are merged into one.
_HELD_BYTES = 64 << 20
_CREATE_TIME = 0  # Kafka's name for a timestamp that the producer gave


def scan(split: Split, schema: pa.Schema, options: Options) -> Iterator[pa.RecordBatch]:
    """The split's records with the columns of `schema`, in batches of at most `arrow_batch_bytes`.

    A batch is larger only if it is a single record. Raises `CorruptLogError` for a damaged log, unless damage is
    skipped, and `OffsetOutOfRangeError` if retention has dropped records, unless the query accepts loss.
    """
    layout, limit_bytes = _Layout(split.range.part, schema, options.where), options.arrow_batch_bytes
    pieces = (piece for read in _pieces(split, options) for piece in layout.pieces(read, limit_bytes))
    for group in _groups(pieces, limit_bytes):
        yield layout.record_batch(group)


# --- batches of the log ------------------------------------------------------------------------------


def _pieces(split: Split, options: Options) -> Iterator[Piece]:
    wanted, part = split.range, split.range.part
    on_damage = partial(_report, split) if options.skip_damage else None
    if part.storage.is_local:  # in an object store each segment names its log
        _check_host(wanted)
    with closing(open_range(wanted, until_offset=split.end_position)) as log:
        position = split.start_position
        while position < split.end_position:
            try:
                for piece in _pieces_from(log, position, split, on_damage):
                    position = piece.next_offset
                    if records := _wanted_part(piece, wanted):
                        yield records
                return
            except OffsetOutOfRangeError as error:
                if options.fail_on_data_loss:
                    error.add_note(
                        f"(topic {part.path}; retention has dropped what the query planned to read: load() again, "
                        "or give failOnDataLoss=false to read what is left)"
                    )
                    raise
                lost = min(error.log_start_offset, split.end_position)
                warn_of_loss(f"{part}: [{position}, {lost}) of the log is gone")
                position = error.log_start_offset


def _check_host(wanted: Range) -> None:
    """`FileNotFoundError` if this host has no topic at the path, and `LogError` if it is another one than was planned.

    The plan cannot know which hosts see a path: containers may share an ext4 file system, and hosts need not share an
    NFS mount. So the plan names its host, and the error names both.
    """
    part = wanted.part
    described = topic_file.read(REAL, part.path)
    if described is not None and described[0] == part.log_id:
        return
    host = socket.gethostname()
    if described is None:
        raise FileNotFoundError(
            errno.ENOENT,
            f"no topic on {host}, and the plan was made on {wanted.made_on}; logs must be on storage that all "
            "executors mount at the same path",
            part.path,
        )
    raise LogError(
        f"{part.path} on {host} is log {described[0].hex()}, and the query was planned for {part.log_id.hex()} on "
        f"{wanted.made_on}: the topic was made again, or it is not the same storage; load() again"
    )


def _pieces_from(
    log: Log, position: int, split: Split, on_damage: Callable[[Damage], object] | None
) -> Iterator[Piece]:
    """The batches with base offsets in [position, the split's end). With `on_damage` damage is left out."""
    mark = log.mark()
    if position < mark.log_start_offset:
        raise OffsetOutOfRangeError(log.partition, position, mark.log_start_offset, mark.flushed_end)
    mark = _as_planned(mark, split.range)
    skip = on_damage is not None
    first = _first_past_damage(log, position, mark) if skip else _first(log, position, mark)
    with closing(Cursor(log, first, on_damage=on_damage)) as cursor:
        while cursor.position < split.end_position:
            for piece in cursor.read_pieces(split.range.flushed_end):
                if isinstance(piece, Bundle):
                    piece = piece.beginning_before(split.end_position)
                if piece.offset_of(0) >= split.end_position:
                    return
                yield piece


def _as_planned(mark: Mark, wanted: Range) -> Mark:
    """The mark with the end of the plan, which lies in the planned segments. Newer segments need not be listed."""
    if not wanted.segments or mark.flushed_end < wanted.flushed_end:  # the log was replaced by an older state
        return mark
    return mark.flushed_to(wanted.flushed_end, wanted.flushed_tail)


def _first(log: Log, position: int, mark: Mark) -> int:
    """The base offset of the first batch from `position` on."""
    header = log.header_around(position, mark)
    return position if header.base_offset == position else header.next_offset


def _first_past_damage(log: Log, position: int, mark: Mark) -> int:
    """As `_first`. If damage covers the position: the position, if the damage begins there, or its end."""
    try:
        segment = log.open_segment(position, past_damage=True)
    except CorruptLogError:  # the segment is missing, or its end
        before = log.index.find(position)
        if before is None:
            return position if position == mark.log_start_offset else log.after_damage(position, mark.flushed_end)
        segment = log.open_base(before, past_damage=True)
    with segment:
        header, place = around(segment, position, *log.end_of(segment, mark))
        end = segment.end_of_file()
    if header is not None and header.next_offset <= end:
        return position if header.base_offset == position else header.next_offset
    begins_here = position == place <= end  # above the end: the file ends in the batch before
    return position if begins_here else log.after_damage(place, mark.flushed_end)


def _report(split: Split, damage: Damage) -> None:
    """Report the part of the damage that the query would have read. Later splits report damage after this split."""
    wanted, lost = split.range, damage.offsets
    if lost:
        if lost.start >= split.end_position:
            return
        lost = range(max(lost.start, wanted.start_offset), min(lost.stop, wanted.end_offset))
        if not lost:
            return
    report_gap(str(wanted.part), damage._replace(offsets=lost))


def _wanted_part(piece: Piece, wanted: Range) -> Piece | None:
    """The part of the piece that is in the range; the piece may begin before it and end after it."""
    if piece.offset_of(0) < wanted.start_offset or piece.next_offset > wanted.end_offset:
        piece = piece.between(wanted.start_offset, wanted.end_offset)
    return piece if len(piece) else None


# --- Arrow batches -----------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Some records with the columns that are read from the log."""

    columns: pa.RecordBatch
    arrow_bytes: int
    held_bytes: int  # of the log, kept in memory by the columns


class _Layout:
    """The columns from the log, the constant columns, and their order."""

    def __init__(self, part: Part, schema: pa.Schema, where: Where | None) -> None:
        self._part = part
        self._schema = schema
        self._names = [known_name(name) for name in schema.names]  # the schema has them as the user wrote them
        self._constants: dict[str, str | int] = {
            "topic": part.topic, "partition": part.partition, "timestampType": _CREATE_TIME,
        }  # fmt: skip
        read = tuple(name for name in self._names if name not in self._constants)
        self._read = read or ("offset",)  # one column must give the number of records
        self._where = where
        self._decide = () if where is None else tuple(name for name in where.columns if name not in self._read)
        self._repeated: dict[str, pa.Array] = {}
        constants = [self._constant(name, 1) for name in self._names if name in self._constants]
        self._constant_bytes = sum(each.nbytes for each in constants)  # per record

    def pieces(self, read: Piece, limit_bytes: int) -> Iterator[_Piece]:
        """The columns of the wanted records, halved until each piece is within the limit or is one record."""
        columns, held_bytes, offset_of = read.to_arrow((*self._read, *self._decide)), read.held_bytes, read.offset_of
        if self._where is not None:
            chosen = self._where.choose(columns)
            if len(chosen) < len(read):
                if not len(chosen):
                    return
                numbers = pa.Array.from_buffers(pa.int64(), len(chosen), [None, pa.py_buffer(chosen)])
                columns, held_bytes = columns.take(numbers), 0  # it copies
                offset_of = lambda number: read.offset_of(int(chosen[number]))  # noqa: E731
            columns = columns.select(self._read)
        fields = [field for name, field in zip(self._names, self._schema, strict=True) if name in self._read]
        for index, field in enumerate(fields):
            name = self._read[index]
            if field.type == pa.string():
                columns = columns.set_column(index, name, self._text(columns.column(index), field.name, offset_of))
            if not field.nullable and columns.column(index).null_count:
                self._refuse_null(columns.column(index), field.name, offset_of)
        yield from self._halves(columns, held_bytes, limit_bytes)

    def record_batch(self, pieces: list[_Piece]) -> pa.RecordBatch:
        """The pieces as one batch, with all requested columns."""
        count = sum(piece.columns.num_rows for piece in pieces)
        arrays = []
        for name in self._names:
            if name in self._constants:
                arrays.append(self._constant(name, count))
            elif len(pieces) == 1:
                arrays.append(pieces[0].columns.column(name))
            else:
                arrays.append(pa.concat_arrays([piece.columns.column(name) for piece in pieces]))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _constant(self, name: str, count: int) -> pa.Array:
        """A column of one repeated value: a slice of the longest column that was made so far."""
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

    def _text(self, column: pa.Array, name: str, offset_of: Callable[[int], int]) -> pa.Array:
        try:
            return column.cast(pa.string())  # checks UTF-8, copies nothing
        except pa.ArrowInvalid:
            for number, item in enumerate(column.to_pylist()):
                try:
                    bytes(item or b"").decode()
                except UnicodeDecodeError as reason:
                    where = f"{self._part}, offset {offset_of(number)}"
                    raise ValueError(f"{where}: the {name} is not UTF-8; read it as binary") from reason
            raise

    def _refuse_null(self, column: pa.Array, name: str, offset_of: Callable[[int], int]) -> None:
        offset = offset_of(column.is_null().index(True).as_py())
        raise ValueError(f"{self._part}, offset {offset}: the {name} is null, and the schema says NOT NULL")


def _repeat(value: str | int, count: int) -> pa.Array:
    """An array of `count` times the value. `pa.scalar` would import pandas: half a second per worker."""
    if isinstance(value, int):
        return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(np.full(count, value, np.int32))])
    text = value.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * len(text)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text * count)])


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
