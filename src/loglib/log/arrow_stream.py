"""Arrow stream: the records of a reader as Arrow's batches of columns, raw or decoded.

Invariant: a batch that is handed out moves the reader past its records, and nothing else does. An error leaves the
reader before the record that it names.

Threads: those of a reader, which is the only subclass.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Literal

from ..config.arguments import check_count
from ..config.extras import named_extras
from ..errors import CorruptLogError
from .cursor import BLOCK_BYTES, Piece
from .lookup import StartLike
from .read_ahead import ReadAhead

if TYPE_CHECKING:
    import pyarrow as pa

    from ..format.decoding import Decoder

Decode = Literal["text", "json"]


class ArrowStream(ReadAhead):
    """A reader as a stream of Arrow."""

    _timeout: float | None
    _follow: bool

    @abstractmethod
    def _next_piece(self, timeout: float | None, *, wanted_bytes: int = 0) -> Piece | None:
        """The piece that is handed out next."""

    @abstractmethod
    def _check_not_cut_short(self) -> None:
        """Raise if the topic was closed before the iteration ended by itself."""

    @abstractmethod
    def tell(self) -> dict[int, int]:
        """The offset of the next record for each partition."""

    @abstractmethod
    def seek(self, start: StartLike) -> None:
        """Go to a start."""

    def arrow(
        self,
        columns: Sequence[str] | None = None,
        *,
        batch_bytes: int = BLOCK_BYTES,
        decode: Decode | None = None,
        schema: pa.Schema | pa.DataType | Mapping[str, pa.DataType | str] | None = None,
    ) -> pa.RecordBatchReader:
        """The records as a `pyarrow.RecordBatchReader`, which reads while it is read; columns as in `Batch.to_arrow`.

        Small batches are joined up to `batch_bytes` bytes of keys and values, and larger ones are cut; a larger record
        comes by itself. About `batch_bytes` are in memory. A reader that follows hands out what there is, and waits for
        more. `tell` is after the last batch that was handed out. The stream ends and raises as iterating does; other
        engines than Python put an error into a message of Arrow. Needs the extra [arrow].

        With `decode`, keys are strings, and a value is a string ("text") or a struct of the fields of its JSON
        ("json"). A record that is not UTF-8, not JSON or not of the schema raises `DecodeError`, after all records
        before it, and the reader stays there. `schema` names the fields that are wanted and their types, such as
        `{"page": "string", "ms": "int64"}`; it may also be a type, for values that are no objects. A field that a
        value does not have is null. Without a schema the records are read twice, first for the types of all fields:
        then the call itself raises, and the reader must have an end.
        """
        with named_extras():
            import pyarrow as pa

            from ..format.arrow import schema_of

        check_count("batch_bytes", batch_bytes)
        decoder = self._decoder(columns, decode, schema)
        made = schema_of(columns) if decoder is None else decoder.schema
        return pa.RecordBatchReader.from_batches(made, self._arrow_batches(columns, batch_bytes, decoder))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The remaining records, all columns, for readers of Arrow streams: DuckDB, Polars, pandas, DataFusion."""
        return self.arrow().__arrow_c_stream__(requested_schema)

    def _decoder(
        self,
        columns: Sequence[str] | None,
        decode: Decode | None,
        schema: pa.Schema | pa.DataType | Mapping[str, pa.DataType | str] | None,
    ) -> Decoder | None:
        decoder = decoder_of(columns, decode, schema)
        if decode != "json" or schema is not None or (columns is not None and "value" not in columns):
            return decoder
        if self._follow:
            raise ValueError('decode="json" of a reader that follows needs schema=: the fields of its records')
        from ..format.decoding import Decoder, learned_type

        before = self.tell()
        try:
            learned = learned_type(self._arrow_batches(["value", "partition", "offset"], BLOCK_BYTES, None))
        finally:
            self.seek(before)
        return Decoder(columns, learned)

    def _arrow_batches(
        self, columns: Sequence[str] | None, batch_bytes: int, decoder: Decoder | None
    ) -> Iterator[pa.RecordBatch]:
        while self._next_piece(self._timeout, wanted_bytes=batch_bytes // 2) is not None:
            yield self._take_arrow(columns, batch_bytes, decoder)
        self._check_not_cut_short()

    def _take_arrow(self, columns: Sequence[str] | None, batch_bytes: int, decoder: Decoder | None) -> pa.RecordBatch:
        """Hand out the first pieces as one batch of about `batch_bytes` bytes; at least one record."""
        from ..format.arrow import join

        batches: list[pa.RecordBatch] = []
        taken: list[range] = []  # the numbers of the records that are taken, for each piece
        for piece in self._pieces:
            start = self._next_number(piece)
            part = piece.part(start, len(piece))
            size = part.content_bytes
            if size > batch_bytes:
                if batches:
                    break
                part = part.part(0, max(1, len(part) * batch_bytes // size))
            try:
                batches.append(part.to_arrow(columns if decoder is None else decoder.read_columns))
            except CorruptLogError:
                if not batches:
                    raise
                break  # the next call meets it again
            batch_bytes -= size
            taken.append(range(start, start + len(part)))
        joined = join(batches)
        if decoder is not None:
            joined = decoder.decode(joined)
        last, made = _last_of(taken, joined.num_rows)
        pieces = deque(islice(self._pieces, last, None))
        self._unmake_records()
        self._pieces, self._current, self._made = pieces, pieces[0], made
        return joined


def decoder_of(
    columns: Sequence[str] | None,
    decode: Decode | None,
    schema: pa.Schema | pa.DataType | Mapping[str, pa.DataType | str] | None,
) -> Decoder | None:
    """The decoder for these arguments of a stream; None if it stays raw. Without a schema, JSON has no values yet."""
    if decode not in (None, "text", "json"):
        raise ValueError(f'decode must be "text" or "json", not {decode!r}')
    if schema is not None and decode != "json":
        raise ValueError('schema= is for decode="json"')
    if decode is None:
        return None
    with named_extras():
        from ..format.decoding import Decoder, json_type

    return Decoder(columns, None if schema is None else json_type(schema))


def _last_of(taken: Sequence[range], rows: int) -> tuple[int, int]:
    """The number of the piece that has the last of these rows, and the number of the record after that row."""
    ends = list(accumulate(map(len, taken)))
    last = bisect_left(ends, rows)
    return last, taken[last].stop - (ends[last] - rows)
