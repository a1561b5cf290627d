"""Unmarked tail: the whole batches after the mark of a log, and the log's mark itself.

Invariant: only the mark says what was durable. Whole batches after it may not have been synced, and may not have been
acknowledged.

Threads: no state, safe for all.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import CorruptLogError
from ..format.watermark import MOST_BYTES, Mark, WatermarkWriter, newest
from ..format.watermark import NAME as WATERMARK
from ..log.recovery import Sections, Tail, load_headers, tail_at, valid_prefix
from ..segment import Identity, SegmentReader, parse_segment_name, segment_name
from ..system.directory import Directory

__all__ = ["UnmarkedTail", "find_tail", "read_mark", "segment_reader", "segment_sizes", "set_epoch_floor"]


class UnmarkedTail(NamedTuple):
    """The end of the whole batches after the mark of a log."""

    tail: Tail
    bases: list[int]  # of the log's segments, up to that tail
    unsynced: list[tuple[int, int, int]]  # parts that may not be on the disk: segment, start and end offset


def read_mark(place: Directory, identity: Identity) -> Mark | None:
    """The mark of the log in an open directory; None if it is lost."""
    if not place.exists(WATERMARK):
        return None
    return newest(place.read_whole(WATERMARK, MOST_BYTES), identity.salt, place.path_of(WATERMARK))


def set_epoch_floor(place: Directory, identity: Identity, mark: Mark, epoch: int) -> Mark:
    """Refuse writers with a lower epoch in this directory, whose newest mark is given, from now on. Synced."""
    writer = WatermarkWriter(place.files, place.path_of(WATERMARK), identity.salt, mark, within=place)
    try:
        writer.publish(mark._replace(sequence=mark.sequence + 1, promised_epoch=epoch))
        writer.sync()
        return writer.mark
    finally:
        writer.close()


def find_tail(place: Directory, identity: Identity, mark: Mark) -> UnmarkedTail:
    """Find the whole batches after the mark of the log in an open directory. Nothing is changed.

    `CorruptLogError` if there is less than the mark promises.
    """
    sizes = segment_sizes(place)
    bases = sorted(base for base in sizes if base >= mark.log_start_offset)
    if not bases or bases[0] != mark.log_start_offset:
        found = f"a first segment at {bases[0]}" if bases else "no segment"
        raise CorruptLogError(place.path, 0, found, f"one at {mark.log_start_offset}")
    there = [base for base in bases if base <= mark.flushed_end]
    load_headers(place, {base: sizes[base] for base in there}, identity)
    start, following = mark.flushed_end, iter([base for base in bases if base > mark.flushed_end])
    unsynced: list[tuple[int, int, int]] = []
    with segment_reader(place, identity, there[-1]) as reader:
        if (file_end := reader.end_of_file()) < start:
            position = reader.file_position(file_end)
            raise CorruptLogError(reader.path, position, "the end of the file", f"data up to offset {start}")
        sections = Sections.of(mark, mark.held_tail)
        tail = tail_at(reader, start, mark.flushed_tail)._replace(sections=sections)
        tail, fault = valid_prefix(reader, tail, file_end)
    if start < tail.end:
        unsynced.append((there[-1], start, tail.end))
    while fault is None and next(following, None) == tail.end and not tail.sections.held_txn:
        with segment_reader(place, identity, tail.end) as reader:
            if tail_at(reader, tail.end, tail.end).chain_end != tail.chain_end:
                break
            there.append(tail.end)
            tail, fault = valid_prefix(reader, tail, reader.end_of_file())
        if there[-1] < tail.end:
            unsynced.append((there[-1], there[-1], tail.end))
    return UnmarkedTail(tail, there, unsynced)


def segment_sizes(place: Directory) -> dict[int, int]:
    """The base offset and file size of each segment."""
    return {base: size for name, size in place.sizes().items() if (base := parse_segment_name(name)) is not None}


def segment_reader(place: Directory, identity: Identity, base: int) -> SegmentReader:
    """Open a segment."""
    return SegmentReader(place.files, place.path_of(segment_name(base)), identity, within=place)
