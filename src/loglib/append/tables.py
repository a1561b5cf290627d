"""Tables: how the records of one `append_arrow` become batches, from columns to writers.

Invariant: as for `append_many` (batching.py), a bad record is refused before any record of its call is appended, as far
as pieces.py says. Pieces are written in their order. So after an error, the records that are not in the log are some
of the piece that was being written, and all behind it.

    what the caller has -> batches of our columns    arrow_columns.py
    gathered or cut into pieces, and checked         pieces.py
    dealt to partitions, and encoded                 hash_columns.py, arrow_bodies.py; in a thread, if there is more
    written                                          writer.py; meanwhile the helper encodes the next piece

    few records for a partition   added to the open batch, with the records of other calls
    many                          as separate batches; those of a piece in one write
    with a producer               as one separate batch in each partition, for any number of records

Needs the extra [arrow]. Threads: a call belongs to one thread, which alone calls the writers, reads the caller's
stream and calls its function for keys. The helper ends with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..config.policies import MAX_BATCH_BYTES, TopicConfig
from ..errors import OffsetRange, report_appended, report_missing
from ..format.codec import codec_id
from ..format.columns import Columns
from ..format.header import NO_PRODUCER, Body, Producer
from .arrow_bodies import Numbers, Rows
from .arrow_columns import Names, open_source
from .batching import MANY
from .encode_thread import Helper
from .hash_columns import Share, can_hash, deal, partitions_by, partitions_of
from .partitioner import Partitioner
from .pieces import Piece, checked_pieces, gathered, whole
from .writer import Writer

__all__ = ["Names", "Route", "append_table"]

_PIECE_BYTES = 16 << 20  # written at once: 1 MiB at a time costs up to 15 % more where the file is not aligned to it
_SPREAD_BYTES = 64 << 20  # at most, of a piece that is spread over many partitions


class Route(NamedTuple):
    """Where the records of a call go. With a partition, nothing behind it is used."""

    writer_of: Callable[[int], Writer]
    partition: int | None  # of all records; None: the column `partition` chooses, and where it is null, the key
    partitions: int = 1
    partitioner: str = ""
    function: Callable[[], Partitioner] | None = None  # raises `ValueError` if the topic was opened without it
    keyless: Callable[[int, int], int] | None = None  # the partition of records without a key: of so many, so large


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
    """Append all records of the data; returns their offsets. An error's `appended` says which were appended."""
    source = open_source(data, names)
    spreads = route.partition is None and not {"key", "partition"}.isdisjoint(source.columns)
    if producer != NO_PRODUCER and route.partition is None and not spreads:
        raise ValueError("an idempotent append without keys must say partition=, to meet its first try again")
    encoder = _Encoder(route, config, producer, spreads=spreads)
    written = _Written(route.writer_of, producer)
    try:
        pieces = checked_pieces(
            source, encoder.gather, limit_bytes=config.max_record_bytes, now_us=now_us, place=encoder.place
        )
        with closing(_encoded_ahead(pieces, encoder)) as encoded:
            for piece, loads in encoded:
                written.write(piece, loads)
    except BaseException as error:
        written.report(error, encoder.taken if source.records is None else source.records)
        raise
    return written.ranges


def _encoded_ahead(pieces: Iterator[Piece], encoder: _Encoder) -> Generator[tuple[Piece, Iterator[_Load]]]:
    """Each piece and its loads. If there are several pieces, a thread encodes ahead while the caller writes."""
    piece, following = next(pieces, None), next(pieces, None)
    if piece is None:
        return
    if following is None:
        yield piece, encoder.loads(piece)
        return
    helper = Helper(encoder.loads)
    try:
        helper.give(piece)
        for each in chain([following], pieces):
            helper.give(each)
            yield piece, helper.take()
            piece = each
        yield piece, helper.take()
    finally:
        helper.stop()


class _Encoder:
    """What happens to pieces before they are written."""

    def __init__(self, route: Route, config: TopicConfig, producer: Producer, *, spreads: bool) -> None:
        self.taken = 0  # records that the source has given
        self._route = route
        self._config = config
        self._producer = producer
        self._spreads = spreads
        self._codec = codec_id(config.compression)
        self._keyless: int | None = None

    def gather(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches as pieces."""
        route, size = self._route, self._config.batch_bytes
        batches = self._counted(batches)
        if self._producer != NO_PRODUCER:
            return whole(batches, limit_bytes=MAX_BATCH_BYTES)
        if self._spreads:
            size = min(size * route.partitions, max(size, _SPREAD_BYTES))
        return gathered(batches, max(size, _PIECE_BYTES))

    def _counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.taken += len(batch)
            yield batch

    # --- in the caller's thread ----------------------------------------------------------------------------

    def place(self, records: pa.RecordBatch) -> Numbers | int | None:
        """The partitions of the records, or of all of them; None if `loads` can find them."""
        route, names = self._route, records.schema.names
        if route.partition is not None:
            return route.partition
        if route.partitions == 1 and "partition" not in names:
            return 0
        chosen = records.column("partition") if "partition" in names else None
        if chosen is not None and not chosen.null_count:
            return _checked(chosen, route.partitions)
        keys = records.column("key") if "key" in names else None
        if keys is None or keys.null_count:
            self._place_keyless(records)
        if keys is None or keys.null_count == len(keys):
            found: Numbers | int = self._no_key
        elif can_hash(route.partitioner):
            if chosen is None:
                return None
            found = partitions_of(keys, route.partitioner, route.partitions, keyless=self._no_key)
        else:
            assert route.function is not None
            found = partitions_by(route.function(), keys, route.partitions, keyless=self._no_key)
        if chosen is not None:
            found = np.full(len(records), found, np.uint16) if isinstance(found, int) else found
            given = chosen.is_valid().to_numpy(zero_copy_only=False)
            found[given] = _checked(chosen.drop_null(), route.partitions)
        return found

    def _place_keyless(self, records: pa.RecordBatch) -> None:
        if self._keyless is None:
            assert self._route.keyless is not None
            self._keyless = self._route.keyless(len(records), records.nbytes)

    @property
    def _no_key(self) -> int:
        return self._keyless or 0

    # --- in the helper -------------------------------------------------------------------------------------

    def loads(self, piece: Piece) -> Iterator[_Load]:
        """The records of each partition, encoded."""
        records, _, partitions = piece
        if "partition" in records.schema.names:
            records = records.drop_columns("partition")
        if isinstance(partitions, int):
            shares = [Share(partitions, records, range(len(records)))]
        else:
            if partitions is None:
                partitions = self._hashed(records)
            shares = list(deal(records, partitions))
        for share in shares:
            yield self._load(share, shares)

    def _hashed(self, records: pa.RecordBatch) -> Numbers:
        route = self._route
        return partitions_of(records.column("key"), route.partitioner, route.partitions, keyless=self._no_key)

    def _load(self, share: Share, shares: list[Share]) -> _Load:
        rows, config = Rows(share.records), self._config
        if self._producer != NO_PRODUCER:
            return _Load(shares, share.partition, [rows.body(0, rows.count, self._codec)], None, 0)
        if rows.count < MANY and rows.count <= config.batch_records and 2 * rows.size_bytes < config.batch_bytes:
            return _Load(shares, share.partition, [], _as_columns(share.records), rows.size_bytes)
        return _Load(shares, share.partition, list(rows.bodies(config, self._codec)), None, 0)


def _checked(partitions: pa.Array, count: int) -> Numbers:
    """A column of partitions; `ValueError` if one is not there."""
    numbers: Numbers = partitions.to_numpy()
    wrong = (numbers < 0) | (numbers >= count)
    if wrong.any():
        raise ValueError(f"a record for partition {int(numbers[np.argmax(wrong)])}; there are 0 to {count - 1}")
    return numbers.astype(np.uint16)


def _as_columns(records: pa.RecordBatch) -> Columns:
    """A few records as lists, for the open batch."""

    def column(name: str) -> list[object] | None:
        found = records.column(name) if name in records.schema.names else None
        return None if found is None or found.null_count == len(found) else found.to_pylist()

    headers = column("headers")
    pairs = None if headers is None else [tuple((e["key"], e["value"]) for e in each or ()) for each in headers]  # type: ignore[attr-defined]
    values = records.column("value").to_pylist()
    return Columns(values, column("key"), column("timestamp"), pairs)  # type: ignore[arg-type]


class _Written:
    """What a call has appended."""

    def __init__(self, writer_of: Callable[[int], Writer], producer: Producer) -> None:
        self.ranges: list[OffsetRange] = []
        self._writer_of = writer_of
        self._writers: dict[int, Writer] = {}
        self._producer = producer
        self._complete = 0  # records of the pieces before the one that is being written
        self._complete_ranges = 0
        self._shares: Sequence[Share] = ()  # of the piece that is being written

    def write(self, piece: Piece, loads: Iterator[_Load]) -> None:
        """Append a piece: to all partitions in turn."""
        for self._shares, partition, bodies, few, size_bytes in loads:
            for share in self._shares:  # all of them, before the first is appended to
                if share.partition not in self._writers:
                    self._writers[share.partition] = self._writer_of(share.partition)
            writer = self._writers[partition]
            if few is None:
                offsets = writer.append_bodies(bodies, producer=self._producer)
                self.ranges.extend(OffsetRange(partition, each) for each in offsets)
            else:
                self.ranges.append(OffsetRange(partition, writer.append(few, size_bytes)))
        self._shares, self._complete, self._complete_ranges = (), piece.first + len(piece.records), len(self.ranges)

    def report(self, error: BaseException, count: int) -> None:
        """Add to the error what was appended, and which of the `count` records of the call were not."""
        report_appended(error, self.ranges)
        appended: tuple[OffsetRange, ...] = getattr(error, "appended", ())
        missing: list[int] = []
        behind = self._complete
        for partition, records, indexes in self._shares:
            done = sum(len(each) for number, each in appended[self._complete_ranges :] if number == partition)
            missing += (self._complete + int(index) for index in indexes[done:])
            behind += len(records)
        rest = range(behind, count)
        report_missing(error, (*sorted(missing), *rest) if missing else rest, count)
