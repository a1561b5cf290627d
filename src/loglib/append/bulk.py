"""Bulk: the records of one call as encoded batches, made before the first of them is appended.

Invariant: a refused argument leaves the log unchanged, also if many good records came before it. The batches
of a call are encoded ahead, up to `_AHEAD_BYTES`. In a larger call all records are checked before the first
is appended, and the rest is encoded while it is written.

The first access to an object outside the processor's cache costs as much as all further work on it
(docs/decisions/0010). So each object is visited once: joining the values also checks that they are bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping
from itertools import accumulate
from typing import TypeVar

from ..config.policies import TopicConfig
from ..errors import RecordTooLargeError
from ..format.columns import SHARED_HEADERS, Columns, common_headers
from ..format.header import Body, encode_body
from .record_arguments import check_columns, record_sizes

__all__ = ["chunks", "encode_all"]

_AHEAD_BYTES = 16 << 20
_SAMPLE = 32  # records used to estimate the size of the first batch

Target = TypeVar("Target", bound=Hashable)


def encode_all(groups: Mapping[Target, Columns], config: TopicConfig, codec: int) -> Iterator[tuple[Target, Body]]:
    """The batches of each group's records, in order, each with its group.

    Values and keys need not be checked before. Bad records raise the errors of `check_columns`, before the
    first batch is given.
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
    body = _encode_unchecked(part, codec, limit_bytes=min(2 * config.batch_bytes, config.max_record_bytes))
    if body is not None:
        yield body
        return
    checked, _ = check_columns(part, limit_bytes=config.max_record_bytes, first=first)
    for chunk in chunks(checked, config):
        yield encode_body(chunk, codec=codec)


def _encode_unchecked(part: Columns, codec: int, *, limit_bytes: int) -> Body | None:
    """The records as one batch; None if they need a full check: values that are not bytes, too many bytes.

    Headers that differ need one, too.
    """
    if part.headers is not None and common_headers(part.headers) is None:
        return None
    try:
        return encode_body(part, codec=codec, limit_bytes=limit_bytes)
    except (RecordTooLargeError, TypeError):
        return None


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
