"""Copied mark: the readable range of a copy of a partition's files in an object store.

Invariant: only records below the flushed end of the copied watermark are read. Without a watermark, the last segment
counts as open and is not read: only the header of a later segment proves that a segment is sealed, and so flushed.
Records of a transaction that was not done when the copy was made are not read in either case.

Segments that retention has dropped from the log since are read too. The segments of a copy must follow each other
without a gap; a gap, or an object of another size, is damage.

    copied                                              read
    watermark, and segments up to it                    up to the watermark
    watermark, and segments that end before it          `CorruptLogError`; with onGap=skip the segments
    watermark, and not the first segment that it names  `CorruptLogError`; with failOnDataLoss=false the segments
    no watermark                                        all segments but the last one

Processes: driver.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from itertools import pairwise

from ..errors import CorruptLogError
from ..format.watermark import Mark, WatermarkReader
from ..log.log import Log
from ..log.recovery import list_segments
from ..segment import HEADER_BYTES, segment_name
from .options import Options

logger = logging.getLogger("loglib")


def mark_of_copy(log: Log, options: Options) -> Mark:
    """The mark with the start and the end of the readable range of the copy."""
    segments = list_segments(log.files, log.directory)
    if not segments:
        raise CorruptLogError(log.directory, 0, "no segment", "at least one: a partition is made with one")
    if not options.skip_damage:
        _check_sizes(log.directory, segments)
    first = min(segments)
    mark = _copied_mark(log)
    if mark is None:
        return _sealed(log, first, max(segments))
    if first > mark.log_start_offset:
        _report_lost_start(log, first, mark, options)
    mark = mark.committed()
    return Mark.at_rest(0, min(first, mark.flushed_end), mark.flushed_end, mark.flushed_tail)


def _check_sizes(directory: str, segments: Mapping[int, int]) -> None:
    """`CorruptLogError` unless each segment but the last ends where the next one begins."""
    for (base, size), (following, _) in pairwise(segments.items()):
        end = base + size - HEADER_BYTES
        if end < following:
            expected = f"the log up to {following}; a segment is missing, or the one before it was copied in part"
            raise CorruptLogError(os.path.join(directory, segment_name(end)), 0, "no object", expected)
        if end > following:
            path = os.path.join(directory, segment_name(base))
            expected = f"{following - base + HEADER_BYTES}, up to the next segment"
            raise CorruptLogError(path, following - base + HEADER_BYTES, f"an object of {size} bytes", expected)


def _report_lost_start(log: Log, first: int, mark: Mark, options: Options) -> None:
    path = os.path.join(log.directory, segment_name(mark.log_start_offset))
    if options.fail_on_data_loss:
        expected = f"the first segment; the copy begins at {first} (failOnDataLoss=false reads from there)"
        raise CorruptLogError(path, 0, "no object", expected)
    logger.warning("%s: no such object; the copy is read from offset %d on (failOnDataLoss=false)", path, first)


def _copied_mark(log: Log) -> Mark | None:
    try:
        watermark = WatermarkReader(log.files, log.watermark_path, log.identity.salt)
    except FileNotFoundError:
        return None
    mark = watermark.read()
    if mark is None:
        raise CorruptLogError(log.watermark_path, 0, "no whole watermark", "one of this log, or no such object")
    return mark


def _sealed(log: Log, first: int, last: int) -> Mark:
    """The mark of the sealed segments, which are all but the last one."""
    logger.warning(
        "%s: the copy has no watermark, so its last segment, from offset %d on, is not read", log.directory, last
    )
    with log.open_base(last) as segment:
        header = segment.header
    mark = Mark.at_rest(0, first, last, header.previous_batch)
    if not header.held_txn or header.held_from >= last:
        return mark
    end = max(header.held_from, first)  # the transaction was not done when the last segment was made
    tail = log.header_around(end - 1, mark).base_offset if end > first else first
    return Mark.at_rest(0, first, end, tail)
