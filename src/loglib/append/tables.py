"""Tables: how the records of one `append_arrow` become batches, from columns to writers.

Invariant: a bad record is refused before any record of its call is appended, if the records are in memory. Of a stream
this holds for the first 16 MiB, and the rest is checked piece by piece. A piece has about `_PIECE_BYTES`, or
`_STREAM_PIECE_BYTES`, whatever the batches are that the caller gives, so memory is constant. Pieces are written in
their order. So after an error, the records that are not in the log are some of the piece that was being written, and
all after it.

    what the caller has -> batches of our columns    arrow_columns.py
    gathered or cut into pieces, and checked         here
    partitions found, and records encoded            hash_columns.py, arrow_bodies.py; in a thread, if there is more
    written                                          writer.py; meanwhile the thread encodes the next piece

    few records for a partition   added to the open batch, with the records of other calls
    many                          as separate batches; those of a piece in one write
    with a producer               as one separate batch in each partition, for any number of records

Needs the extra [arrow]. Threads: a call belongs to one thread, which alone calls the writers, reads the caller's
stream and calls its function for keys. The thread that encodes ends with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ..config.policies import MAX_BATCH_BYTES, TopicConfig
from ..errors import OffsetRange, RecordTooLargeError
from ..format.arrow import join
from ..format.codec import codec_id
from ..format.columns import Columns
from ..format.header import NO_PRODUCER, Body, Producer
from ..system.failures import report_appended, report_missing
from .arrow_bodies import Numbers, Rows
from .arrow_columns import Names, Source, open_source
from .batching import MANY
from .hash_columns import Share, can_hash, deal, partitions_by, partitions_of, place_rows
from .partitioner import Partitioner
from .work_ahead import WorkAhead
from .writer import Writer

__all__ = ["Names", "Route", "append_table"]

_PIECE_BYTES = 16 << 20  # of one write: 2 MiB at a time of a table in memory took up to 20 % longer
_STREAM_PIECE_BYTES = 2 << 20  # of a stream, whose batches are joined: with 16 MiB it took twice the time and memory
_SPREAD_BYTES = 64 << 20  # at most, of a piece that is spread over many partitions
_AHEAD_BYTES = 16 << 20  # checked before the first record is appended


class Route(NamedTuple):
    """Where the records of a call go. With a partition, the fields after it are not used."""

    writer_of: Callable[[int], Writer]
    partition: int | None  # of all records; None: the column `partition` chooses, and where it is null, the key
    partitions: int = 1
    partitioner: str = ""
    function: Callable[[], Partitioner] | None = None  # raises `ValueError` if the topic was opened without it
    keyless: Callable[[int, int], int] | None = None  # the partition of that many keyless records of that size


class _Piece(NamedTuple):
    """Some records of a call, checked."""

    records: pa.RecordBatch  # of the columns that `Rows` knows
    first: int  # the number of its first record in the call
    partitions: Callable[[], Numbers | int]  # of each record, or of all; may be called in another thread


class _Load(NamedTuple):
    """Encoded records of a piece for one partition."""

    shares: Sequence[Share]  # of the whole piece
    partition: int
    bodies: list[Body]
    few: Columns | None  # then there are no bodies
    size_bytes: int


def append_table(
    data: Any, names: Names, route: Route, config: TopicConfig, producer: Producer, now_us: Callable[[], int]
) -> list[OffsetRange]:
    """Append all records of the data; returns their offsets. An error's `appended` has those that were appended."""
    source = open_source(data, names)
    spreads = route.partition is None and not {"key", "partition"}.isdisjoint(source.columns)
    if producer != NO_PRODUCER and route.partition is None and not spreads:
        raise ValueError("an idempotent append without keys must say partition=, to meet its first try again")
    encoder = _Encoder(route, config, producer, spreads=spreads)
    written = _Written(route.writer_of, producer)
    try:
        with closing(_encoded_ahead(encoder.pieces(source, now_us), encoder)) as encoded:
            for piece, loads in encoded:
                written.write(piece, loads)
    except BaseException as error:
        written.report(error, encoder.taken if source.records is None else source.records)
        raise
    return written.ranges


def _encoded_ahead(pieces: Iterator[_Piece], encoder: _Encoder) -> Generator[tuple[_Piece, Iterator[_Load]]]:
    """Each piece and its loads. If there are several pieces, a thread encodes ahead while the caller writes."""
    piece, following = next(pieces, None), next(pieces, None)
    if piece is None:
        return
    if following is None:
        yield piece, encoder.loads(piece)
        return
    ahead = WorkAhead(encoder.loads)
    try:
        ahead.give(piece)
        for each in chain([following], pieces):
            ahead.give(each)
            yield piece, ahead.take()
            piece = each
        yield piece, ahead.take()
    finally:
        ahead.stop()


@dataclass(eq=False)
class _Encoder:
    """The way of the records of one call to encoded batches."""

    route: Route
    config: TopicConfig
    producer: Producer
    spreads: bool
    taken: int = 0  # records that the source has given
    keyless: int | None = None  # the partition of records without a key, when there are some

    def __post_init__(self) -> None:
        self._codec = codec_id(self.config.compression)

    # --- in the caller's thread ----------------------------------------------------------------------------

    def pieces(self, source: Source, now_us: Callable[[], int]) -> Iterator[_Piece]:
        """The records in pieces. Before the first one is yielded, records are checked as the invariant says.

        Raises the errors of `Rows.check` and of `place_rows`, and those of the caller's stream.
        """
        checked = self._cut(source, now_us, check=True)
        ahead: list[_Piece] = []
        room = _AHEAD_BYTES
        for piece in checked:
            ahead.append(piece)
            room -= piece.records.nbytes
            if room < 0:
                break
        if source.records is None:
            yield from ahead
            yield from checked
            return
        for _ in checked:  # only checked, because the memory for what is converted has a limit
            pass
        yield from ahead
        if room < 0:
            yield from islice(self._cut(source, now_us, check=False), len(ahead), None)

    def _cut(self, source: Source, now_us: Callable[[], int], *, check: bool) -> Iterator[_Piece]:
        first = 0
        for batch in self._gathered(source):
            records = _with_times(batch, now_us)
            if check:
                Rows(records).check(limit_bytes=self.config.max_record_bytes, first=first)
            yield _Piece(records, first, self._placed(records))
            first += len(records)

    def _counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.taken += len(batch)
            yield batch

    def _gathered(self, source: Source) -> Iterator[pa.RecordBatch]:
        batches, size = self._counted(source.batches()), self.config.batch_bytes
        if self.producer != NO_PRODUCER:
            return _whole(batches, limit_bytes=MAX_BATCH_BYTES)
        if self.spreads:
            size = min(size * self.route.partitions, max(size, _SPREAD_BYTES))
        return _gathered(batches, max(size, _STREAM_PIECE_BYTES if source.records is None else _PIECE_BYTES))

    def _placed(self, records: pa.RecordBatch) -> Callable[[], Numbers | int]:
        """The partitions of the records. What `loads` may compute in its thread is left to it."""
        route, names, count = self.route, records.schema.names, len(records)
        chosen = records.column("partition") if "partition" in names else None
        if route.partition is not None or (route.partitions == 1 and chosen is None):
            return lambda: route.partition or 0
        keys = records.column("key") if "key" in names else None
        if self.keyless is None and (chosen is None or chosen.null_count) and (keys is None or keys.null_count):
            assert route.keyless is not None
            self.keyless = route.keyless(count, records.nbytes)
        keyless = self.keyless or 0
        if keys is None and chosen is None:
            return lambda: keyless
        place = partial(place_rows, count, keys, chosen, self._of_keys, route.partitions, keyless=keyless)
        if chosen is None and can_hash(route.partitioner):
            return place
        placed = place()
        return lambda: placed

    def _of_keys(self, keys: pa.Array) -> Numbers:
        route, keyless = self.route, self.keyless or 0
        if can_hash(route.partitioner):
            return partitions_of(keys, route.partitioner, route.partitions, keyless=keyless)
        assert route.function is not None
        return partitions_by(route.function(), keys, route.partitions, keyless=keyless)

    # --- in the thread that encodes ------------------------------------------------------------------------

    def loads(self, piece: _Piece) -> Iterator[_Load]:
        """The records of each partition, encoded."""
        records = piece.records
        if "partition" in records.schema.names:
            records = records.drop_columns("partition")
        partitions = piece.partitions()
        if isinstance(partitions, int):
            shares = [Share(partitions, records, range(len(records)))]
        else:
            shares = list(deal(records, partitions))
        for share in shares:
            yield self._load(share, shares)

    def _load(self, share: Share, shares: list[Share]) -> _Load:
        rows, config = Rows(share.records), self.config
        if self.producer != NO_PRODUCER:
            return _Load(shares, share.partition, [rows.body(0, rows.count, self._codec)], None, 0)
        if rows.count < MANY and rows.count <= config.batch_records and 2 * rows.size_bytes < config.batch_bytes:
            return _Load(shares, share.partition, [], _as_columns(share.records), rows.size_bytes)
        return _Load(shares, share.partition, list(rows.bodies(config, self._codec)), None, 0)


def _as_columns(records: pa.RecordBatch) -> Columns:
    """A few records as lists, for the open batch."""

    def column(name: str) -> list[object] | None:
        found = records.column(name) if name in records.schema.names else None
        return None if found is None or found.null_count == len(found) else found.to_pylist()

    headers = column("headers")
    pairs = None if headers is None else [tuple((e["key"], e["value"]) for e in each or ()) for each in headers]  # type: ignore[attr-defined]
    values = records.column("value").to_pylist()
    return Columns(values, column("key"), column("timestamp"), pairs)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Written:
    """The records that a call has appended."""

    writer_of: Callable[[int], Writer]
    producer: Producer
    ranges: list[OffsetRange] = field(default_factory=list)
    writers: dict[int, Writer] = field(default_factory=dict)
    complete: int = 0  # records of the pieces before the one that is being written
    complete_ranges: int = 0
    shares: Sequence[Share] = ()  # of the piece that is being written

    def write(self, piece: _Piece, loads: Iterator[_Load]) -> None:
        """Append a piece: to all partitions in turn."""
        for self.shares, partition, bodies, few, size_bytes in loads:
            for share in self.shares:  # all of them, before the first is appended to
                if share.partition not in self.writers:
                    self.writers[share.partition] = self.writer_of(share.partition)
            writer = self.writers[partition]
            if few is None:
                offsets = writer.append_bodies(bodies, producer=self.producer)
                self.ranges.extend(OffsetRange(partition, each) for each in offsets)
            else:
                self.ranges.append(OffsetRange(partition, writer.append(few, size_bytes)))
        self.shares, self.complete, self.complete_ranges = (), piece.first + len(piece.records), len(self.ranges)

    def report(self, error: BaseException, count: int) -> None:
        """Add to the error what was appended, and which of the `count` records of the call were not."""
        report_appended(error, self.ranges)
        appended: tuple[OffsetRange, ...] = getattr(error, "appended", ())
        missing: list[int] = []
        after = self.complete
        for partition, records, indexes in self.shares:
            done = sum(len(each) for number, each in appended[self.complete_ranges :] if number == partition)
            missing += (self.complete + int(index) for index in indexes[done:])
            after += len(records)
        rest = range(after, count)
        report_missing(error, (*sorted(missing), *rest) if missing else rest, count)


# --- record batches -----------------------------------------------------------------------------------------


def _with_times(records: pa.RecordBatch, now_us: Callable[[], int]) -> pa.RecordBatch:
    """The records, with the time of appending for those that have none if others have one."""
    at = records.schema.get_field_index("timestamp")
    if at < 0 or not 0 < records.column(at).null_count < len(records):
        return records
    return records.set_column(at, "timestamp", pc.fill_null(records.column(at), now_us()))


def _gathered(batches: Iterable[pa.RecordBatch], piece_bytes: int) -> Iterator[pa.RecordBatch]:
    """The records in batches of at most `piece_bytes`, and of at least half of that, except the last one."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        for part, part_bytes in _halved(batch, piece_bytes):
            if waiting and size + part_bytes > piece_bytes:
                yield join(waiting)
                waiting, size = [], 0
            waiting.append(part)
            size += part_bytes
    if waiting:
        yield join(waiting)


def _whole(batches: Iterable[pa.RecordBatch], *, limit_bytes: int) -> Iterator[pa.RecordBatch]:
    """All records as one batch; `RecordTooLargeError` if they are larger together."""
    parts: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        parts.append(batch)
        size += batch.nbytes
        if size > limit_bytes:
            raise RecordTooLargeError("the batch", size, limit_bytes)
    if parts:
        yield join(parts)


def _halved(batch: pa.RecordBatch, most_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The batch, halved until no part is larger, and the sizes of the parts."""
    size = batch.nbytes
    if size <= most_bytes or len(batch) == 1:
        yield batch, size
        return
    half = len(batch) // 2
    yield from _halved(batch.slice(0, half), most_bytes)
    yield from _halved(batch.slice(half), most_bytes)
