"""Batching: how the records of one call become batches. Only this module decides it.

    few                     checked, and added to the open batch, with the records of other calls
    few, but large          checked, and written as separate batches
    many                    encoded without an earlier check, as separate batches
    with a producer         checked, and written as one separate batch, for any number of records

Invariant: a bad record is refused before any record of its call is appended. So the batches of many records are
encoded ahead of the first append, up to `_AHEAD_BYTES`. In a larger call all records are checked before the first is
appended, and the rest is encoded while it is written.

The first access to an object outside the processor's cache costs as much as all further work on it
(docs/decisions/0010). So each object of many is visited once: joining the values also checks that they are bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple, TypeVar

from ..config.policies import TopicConfig
from ..errors import RecordTooLargeError
from ..format.codec import codec_id
from ..format.columns import SHARED_HEADERS, Columns, common_headers
from ..format.header import NO_PRODUCER, Body, Producer, encode_body
from ..format.record import OffsetRange
from ..system.failures import report_appended
from .record_arguments import check_columns, record_sizes
from .writer import Writer

MANY = 1024  # from this number on, records get a separate batch, even if they are small
_AHEAD_BYTES = 16 << 20
_SAMPLE = 32  # records used to estimate the size of the first batch

Target = TypeVar("Target", bound=Hashable)


class Load(NamedTuple):
    """The records of one call for one partition."""

    columns: Columns
    size_bytes: int | None  # of few records, which are checked; None for many, which encoding checks


def weigh(columns: Columns, config: TopicConfig, producer: Producer = NO_PRODUCER) -> Load:
    """Check the records if they are few. Raises the errors of `check_columns`."""
    if len(columns.values) >= MANY and producer == NO_PRODUCER:
        return Load(columns, None)
    return Load(*check_columns(columns, limit_bytes=config.max_record_bytes))


def append_loads(
    loads: Mapping[Writer, Load], config: TopicConfig, producer: Producer = NO_PRODUCER
) -> list[OffsetRange]:
    """Append the records of one call to their partitions. An error's `appended` has the ranges that were appended."""
    many = {writer: load.columns for writer, load in loads.items() if load.size_bytes is None}
    ranges: list[OffsetRange] = []
    try:
        if many:
            bodies = encode_all(many, config, codec_id(config.compression))
            ranges.extend(OffsetRange(writer.partition, writer.append_body(body)) for writer, body in bodies)
        for writer, (columns, size_bytes) in loads.items():
            if size_bytes is not None:  # one by one: records before an error stay
                few = _append_few(writer, columns, size_bytes, config, producer)
                ranges.extend(OffsetRange(writer.partition, offsets) for offsets in few)
    except BaseException as error:
        report_appended(error, ranges)
        raise
    return ranges


def append_numbered(writer: Writer, load: Load, config: TopicConfig, producer: Producer, *, sync: bool) -> int:
    """Append one record of a producer, or find the record of an earlier try; returns its offset."""
    (only,) = append_loads({writer: load}, config, producer)
    try:
        if sync:
            writer.flush()
    except BaseException as error:
        report_appended(error, [only])
        raise
    return only.offsets.start


def _append_few(
    writer: Writer, columns: Columns, size_bytes: int, config: TopicConfig, producer: Producer
) -> Iterator[range]:
    if producer != NO_PRODUCER:
        yield writer.append_body(encode_body(columns, codec=codec_id(config.compression)), producer=producer)
    elif 2 * size_bytes < config.batch_bytes and len(columns.values) <= config.batch_records:
        yield writer.append(columns, size_bytes)
    else:
        for chunk in chunks(columns, config):
            yield writer.append_body(encode_body(chunk, codec=codec_id(config.compression)))


# --- many records -----------------------------------------------------------------------------


def encode_all(groups: Mapping[Target, Columns], config: TopicConfig, codec: int) -> Iterator[tuple[Target, Body]]:
    """The batches of each group's records, in order, each with its group.

    Values and keys need not be checked before. Bad records raise the errors of `check_columns`, before the
    first batch is yielded.
    """
    ahead: list[tuple[Target, Body]] = []
    room = _AHEAD_BYTES
    for target, columns in groups.items():
        for body in _bodies(columns, config, codec):
            if room < 0:
                yield target, body
                continue
            ahead.append((target, body))
            room -= body.length
            if room < 0:
                for each in groups.values():
                    check_columns(each, limit_bytes=config.max_record_bytes)
                yield from ahead
                ahead.clear()
    yield from ahead


def _bodies(columns: Columns, config: TopicConfig, codec: int) -> Iterator[Body]:
    """The columns as batches of about the configured size, estimated from earlier records."""
    count = len(columns.values)
    start = 0
    _, size = check_columns(columns.part(slice(0, _SAMPLE)), limit_bytes=config.max_record_bytes)
    average = size / min(count, _SAMPLE)
    while start < count:
        most = max(1, min(config.batch_records, int(config.batch_bytes / max(average, 1))))
        step = -(-(count - start) // -(-(count - start) // most))  # batches of equal size, without a short last one
        part = columns.part(slice(start, start + step))
        size = 0
        for body in _encode(part, config, codec, first=start):
            repeats = body.record_count if body.flags & SHARED_HEADERS else 1
            size += body.value_bytes + body.key_bytes + body.header_bytes * repeats
            yield body
        average = size / step
        start += step


def _encode(part: Columns, config: TopicConfig, codec: int, *, first: int) -> Iterator[Body]:
    """The records as one batch, or as several if they are larger than the estimate."""
    limit_bytes = min(2 * config.batch_bytes, config.max_record_bytes)
    if part.headers is None or common_headers(part.headers) is not None:  # else their sizes need a check
        try:
            body = encode_body(part, codec=codec, limit_bytes=limit_bytes)
        except (RecordTooLargeError, TypeError):  # too many bytes, or a value that is not bytes
            pass
        else:
            yield body
            return
    checked, _ = check_columns(part, limit_bytes=config.max_record_bytes, first=first)
    for chunk in chunks(checked, config):
        yield encode_body(chunk, codec=codec)


def chunks(columns: Columns, config: TopicConfig) -> Iterator[Columns]:
    """Checked columns cut into batches of the configured size. A larger record gets its own batch."""
    count = len(columns.values)
    ends = list(accumulate(record_sizes(columns)))
    start = done = 0
    while start < count:
        full = bisect_right(ends, done + config.batch_bytes, lo=start)
        stop = min(max(full, start + 1), start + config.batch_records)
        yield columns.part(slice(start, stop))
        start, done = stop, ends[stop - 1]
