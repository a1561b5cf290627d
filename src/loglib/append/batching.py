"""Batching: how the records of one call become batches. Only this module decides it.

    few                     checked, and added to the open batch, with the records of other calls
    few, but large          checked, and written as separate batches
    many                    encoded without an earlier check, as separate batches (see bulk.py)
    with a producer         checked, and written as one separate batch, for any number of records

Invariant: a bad record is refused before any record of its call is appended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..config.policies import TopicConfig
from ..errors import report_appended
from ..format.codec import codec_id
from ..format.columns import Columns
from ..format.header import NO_PRODUCER, Producer, encode_body
from ..format.record import OffsetRange
from .bulk import chunks, encode_all
from .record_arguments import check_columns
from .writer import Writer

__all__ = ["MANY", "Load", "append_loads", "append_numbered", "weigh"]

MANY = 1024  # so many records get a separate batch, even if they are small


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
    """Append the records of one call to their partitions. An error's `appended` says which were appended."""
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
    """Append one record of a producer, or find it; returns its offset."""
    (found,) = append_loads({writer: load}, config, producer)
    try:
        if sync:
            writer.flush()
    except BaseException as error:
        report_appended(error, [found])
        raise
    return found.offsets.start


def _append_few(
    writer: Writer, columns: Columns, size_bytes: int, config: TopicConfig, producer: Producer
) -> Iterator[range]:
    if producer != NO_PRODUCER:
        yield writer.append_body(encode_body(columns, codec=codec_id(config.compression)), producer=producer)
    elif 2 * size_bytes < config.batch_bytes and len(columns.values) <= config.batch_records:
        yield writer.append(columns, size_bytes)
    else:
        codec = codec_id(config.compression)
        for chunk in chunks(columns, config):
            yield writer.append_body(encode_body(chunk, codec=codec))
