"""Search: finds the batches of a segment by pointers that only a writer of the log can have written.

Invariant: the contents of records play no part. A place is trusted as the place of a batch in these cases: it is the
segment's base; the watermark or the next segment's header names it as the last batch; a batch at a trusted place points
to it (as the batch before, or by its jump: format/chain.py); or such a batch ends there. Bytes that only look
like a batch are not trusted, even with right checksums: a record's value can hold them.

A damaged header loses only what it covers. A search then goes around it: by other pointers, or forwards from
the last trusted place below it. After a damaged header the search looks for the next batch at one place only:
the end of the damaged batch, if two remaining facts of its header agree on it. The batch there must also be
linked to the remains by the CRC of a header, which is unknown before the batch is written.

If even that is not enough, for example if a page of small batches and the segment's end are lost, the search
looks for chains of batches in the bytes. A chain counts only if it leads to the place of the last batch, and
the batch there is linked to the chain in the same way. A chain inside a record cannot lead out of it.

Threads: those of the segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from heapq import heappop, heappush
from itertools import repeat
from struct import pack
from typing import NoReturn

from ..config.policies import MAX_BATCH_BYTES
from ..errors import CorruptLogError, UnsupportedFormatError
from ..format.chain import Jumps
from ..format.columns import aligned
from ..format.header import HEADER_BYTES, MAGIC, Header, crc32c
from ..segment import SegmentReader

_WINDOW = 1 << 20
# Fields of a header.
_LENGTH_AT, _PLACE_AT, _COUNT_AT, _STORED_AT, _LINK_AT = 12, 16, 36, 44, 60
_WIPED = {bytes(4), b"\xff" * 4, b""}  # not a link: these bytes can be in any payload
_NO_DIFFERENCE = bytes(8)
_MOST_LOOKS = 4096  # headers to read for a way around damage: about ten milliseconds


def refuse_damage(segment: SegmentReader, offset: int, place: int) -> NoReturn:
    """Raise the error for the batch that holds `offset`, which cannot be read because of the damage at `place`."""
    segment.header_at(place)  # raises the fault, unless the batch was just being written
    segment.corrupt(place, "no batch", f"the batch that holds offset {offset}")


def around(segment: SegmentReader, offset: int, last: int | None, limit: int) -> tuple[Header | None, int]:
    """The header of the batch that holds `offset`, and its base; None and the place of the damage, if it is lost.

    `last` is the base offset of the segment's last batch, or of any batch at or after the wanted one; None if
    unknown. `limit` is the end of the segment's batches.
    """
    lower = [segment.base_offset]  # places for a way forwards, if the way back is blocked
    header = _whole(segment, last)
    while header is not None:
        if header.base_offset <= offset:
            if offset < header.next_offset:
                return header, header.base_offset
            lower.append(header.base_offset)
            break
        if segment.base_offset <= header.jump_offset <= offset:
            lower.append(header.jump_offset)
        header = _back(segment, header, above=offset)
    lower.sort()
    while len(lower) > 1 and _whole(segment, lower[-1]) is None:
        lower.pop()
    gap = place = lower[-1]
    while place <= offset:
        try:
            for header in segment.headers(place, limit):
                place = header.next_offset
                if offset < place:
                    return header, header.base_offset
            return None, place
        except CorruptLogError:
            gap, place = place, after_damage(segment, place, limit, last)
    return None, gap


def first_reaching(segment: SegmentReader, timestamp: int, last: int | None, limit: int) -> Header | None:
    """The first batch whose running maximum of event times is `timestamp` or later; None if there is none.

    `CorruptLogError` if damage hides it.
    """
    try:
        return _first_reaching(segment, timestamp, last, limit)
    except CorruptLogError:
        headers = segment.headers(segment.base_offset, limit)
        return next((each for each in headers if each.running_max_timestamp >= timestamp), None)


def _first_reaching(segment: SegmentReader, timestamp: int, last: int | None, limit: int) -> Header | None:
    header = _whole(segment, last)
    if header is None or header.next_offset != limit:
        segment.corrupt(segment.base_offset, "no way to the last batch", "one from the mark or the next segment")
    if header.running_max_timestamp < timestamp:
        return None
    while header.base_offset > segment.base_offset:
        if header.jump_offset < header.previous_offset:
            jumped = _whole(segment, header.jump_offset)
            if jumped is not None and jumped.running_max_timestamp >= timestamp:
                header = jumped
                continue
        before = _before(segment, header)
        if before.running_max_timestamp < timestamp:
            break
        header = before
    return header


def after_damage(segment: SegmentReader, offset: int, limit: int, last: int | None) -> int:
    """The place after the damaged batch at `offset` where reading continues: the next batch, or `limit`.

    `offset` must be a trusted place.
    """
    bad = _whole(segment, offset)
    if bad is not None and bad.next_offset <= min(limit, segment.end_of_file()):  # only its body is bad
        return bad.next_offset
    above = None if last is None or last <= offset else _lowest_above(segment, offset, last, limit)
    if above is not None and above.previous_offset == offset:
        return above.base_offset
    stop = limit if above is None else above.base_offset
    linked = _linked_to(segment, offset, stop)
    if linked is not None:
        return linked
    end = last if above is None else above.previous_offset  # the place of another damaged batch
    if end is not None and offset < end < limit:
        link = segment.read(end + _LINK_AT, 4)
        for first, last_linked in _chains(segment, offset + 8, end) if link not in _WIPED else ():
            if (last_linked.next_offset, last_linked.header_crc.to_bytes(4, "little")) == (end, link):
                return first.base_offset
    return stop


def proven_headers(
    segment: SegmentReader, offset: int, limit: int, walked: set[int] | None = None
) -> Iterator[Header]:
    """The headers of the batches from `offset` on, past damage, while each is linked to the batch before.

    `offset` must be a trusted place. This is for a log without a pointer to its last batch. The walk stops at the
    places in `walked`, and adds its own places to it.
    """
    before: Header | None = None
    while offset < limit:
        if walked is not None and offset in walked:
            return
        header = _whole(segment, offset)
        if header is not None and before is not None and not _follows(header, before):
            return
        if walked is not None:
            walked.add(offset)
        if header is None:
            linked = _linked_to(segment, offset, limit)
            if linked is None:
                return
            offset, before = linked, None
            continue
        yield header
        offset, before = header.next_offset, header


def likely_headers(segment: SegmentReader, offset: int, limit: int) -> Iterator[Header]:
    """The headers of the first batches after the damage at `offset` that lead to `limit` or to zeros before it.

    Use this only to decide whether damage is a torn tail. If a batch's header is torn away and nothing follows, a
    record in it may contain such headers. So they are a reason to refuse, but are never read as data.
    """
    least = min(segment.end_of_data(offset), limit)
    for first, last in _chains(segment, offset + 8, limit):
        if last.next_offset >= least:
            yield from proven_headers(segment, first.base_offset, limit)
            return


def jumps_at(segment: SegmentReader, last: int, known: Jumps | None = None) -> Jumps | None:
    """The jumps of the segment's last batch, up to the first damaged one. The next batch is added to them.

    `known`: those of an earlier batch. A path of jumps from a later batch meets it, and is not read beyond.
    """
    path: list[tuple[int, int]] = []
    place = last
    jumps: Jumps | None = None
    while jumps is None and (header := _whole(segment, place)) is not None:
        path.append((place, _distance(segment, header)))
        if header.jump_offset >= place:
            break
        place = header.jump_offset
        while known is not None and known.base_offset > place:
            known = known.rest
        if known is not None and known.base_offset == place:
            jumps = known
    for base_offset, distance in reversed(path):
        jumps = Jumps(base_offset, distance if jumps is not None else 0, jumps)
    return jumps


def _distance(segment: SegmentReader, header: Header) -> int:
    """The length of the jump in batches: 1, or twice that of the batch before plus 1; 0 if unknown."""
    doublings = 0
    while header.jump_offset != header.previous_offset:
        before = _whole(segment, header.previous_offset) if header.jump_offset < header.base_offset else None
        if before is None or not segment.base_offset <= before.base_offset < header.base_offset:
            return 0
        header = before
        doublings += 1
    return (2 << doublings) - 1


# --- steps ---------------------------------------------------------------------------------------------------


def _whole(segment: SegmentReader, offset: int | None) -> Header | None:
    """The header at a place; None if it is damaged, or if the place is unknown."""
    if offset is not None and offset >= segment.base_offset:
        with suppress(CorruptLogError):
            return segment.header_at(offset)
    return None


def _follows(header: Header, before: Header) -> bool:
    """True if the batch with `header` names the other one as its predecessor."""
    return (header.previous_crc, header.previous_offset) == (before.header_crc, before.base_offset)


def _before(segment: SegmentReader, header: Header) -> Header:
    """The header of the batch before."""
    if header.previous_offset < segment.base_offset or not header.previous_bytes:
        expected = "that of the batch before, in this segment"
        segment.corrupt(header.base_offset, f"previous length {header.previous_bytes}", expected)
    before = segment.header_at(header.previous_offset)
    if not _follows(header, before):
        expected = f"the one of {header.previous_bytes} that the next one follows"
        segment.corrupt(before.base_offset, f"another batch, of {before.length} bytes", expected)
    return before


def _back(segment: SegmentReader, header: Header, *, above: int) -> Header | None:
    """The header of an earlier batch, but not before the batch that holds `above`; None if damage blocks the way."""
    if above < header.jump_offset < header.base_offset:
        jumped = _whole(segment, header.jump_offset)
        if jumped is not None:
            return jumped
    with suppress(CorruptLogError):
        return _before(segment, header)
    return None


def _lowest_above(segment: SegmentReader, offset: int, last: int, limit: int) -> Header | None:
    """The earliest batch after `offset` that pointers reach, from `last` and then from each other."""
    lowest: Header | None = None
    places, seen = [last], {last}
    while places and len(seen) < _MOST_LOOKS and (lowest is None or lowest.previous_offset > offset):
        header = _whole(segment, heappop(places))
        if header is None:
            continue
        if lowest is None or header.base_offset < lowest.base_offset:
            lowest = header
        for place in (header.jump_offset, header.previous_offset, header.next_offset):
            if offset < place < limit and place not in seen:
                seen.add(place)
                heappush(places, place)
    return lowest


def _linked_to(segment: SegmentReader, offset: int, limit: int) -> int | None:
    """The place of the batch that follows the batch with a damaged header at `offset`; None if there is none.

    The next batch names the CRC of its predecessor: either the CRC in the damaged header, or the CRC of the other
    bytes. The search looks at one place only: the end of the damaged batch, by the remains of its header. A record in
    the next batch could claim the same link, because its author may have read this header before.
    """
    remains = segment.read(offset, HEADER_BYTES)
    links = {remains[4:8], crc32c(remains[8:], segment.salt).to_bytes(4, "little")}
    length = _length_by(remains, segment.salt) if len(remains) == HEADER_BYTES else 0
    place = offset + length
    if not HEADER_BYTES < length <= MAX_BATCH_BYTES or length & 7 or place >= limit:
        return None
    if segment.read(place + _LINK_AT, 4) not in links:
        return None
    header = _whole(segment, place)
    # If the next header is damaged as well, its link still proves that a batch begins there.
    return place if header is None or (header.previous_offset == offset and header.next_offset <= limit) else None


def _length_by(remains: bytes, salt: int) -> int:
    """The length of a batch by the remains of its header, if two facts agree on it; otherwise 0.

    A batch is as long as its header and body, or as its number of records. If only one of these numbers is damaged,
    the others and the CRC show which one.
    """
    at = (_LENGTH_AT, _COUNT_AT, _STORED_AT)
    length, count, stored = (int.from_bytes(remains[each : each + 4], "little") for each in at)
    by_body = aligned(HEADER_BYTES + stored)
    if length in (by_body, aligned(count)):
        return length
    by_body = max(by_body, aligned(count))
    if _has_crc_with(remains, _LENGTH_AT, by_body, salt):
        return by_body
    bodies = range(length - HEADER_BYTES, max(length - HEADER_BYTES - 8, -1), -1)
    return length if any(_has_crc_with(remains, _STORED_AT, each, salt) for each in bodies) else 0


def _has_crc_with(remains: bytes, at: int, number: int, salt: int) -> bool:
    """True if the header's CRC is right when it has this number at this byte."""
    if number >> 32:
        return False
    mended = remains[8:at] + number.to_bytes(4, "little") + remains[at + 4 :]
    return crc32c(mended, salt) == int.from_bytes(remains[4:8], "little")


def _chains(segment: SegmentReader, start: int, limit: int) -> Iterator[tuple[Header, Header]]:
    """(first, last) of each chain of linked batches that the bytes in [start, limit) seem to hold.

    No place is visited twice: a record can hold a chain of thousands of batches, and each could be the first. A
    chain ends where it meets an earlier chain.
    """
    walked: set[int] = set()
    for first in _candidates(segment, start, limit):
        last = first
        with suppress(UnsupportedFormatError):  # it may not be a batch at all
            for header in proven_headers(segment, first.base_offset, limit, walked):
                last = header
        yield first, last


def _candidates(segment: SegmentReader, start: int, stop: int) -> Iterator[Header]:
    """All bytes in [start, stop) that look like a header and name their own place."""
    start = aligned(start)
    while start < stop:
        window = segment.read(start, min(_WINDOW, stop - start) + HEADER_BYTES)
        if len(window) < HEADER_BYTES:
            return
        for place in _named_places(window, start) if MAGIC in window else ():
            header = None
            with suppress(UnsupportedFormatError):  # a record may claim a version to come
                header = _whole(segment, place)
            if header is not None and header.next_offset <= stop:
                yield header
        start += _WINDOW


def _named_places(window: bytes, start: int) -> Iterator[int]:
    """The places in a window of bytes where a header would name its own place; `start` is the window's first place.

    All words are compared together, as two long integers. A loop over each apparent magic would take minutes for a
    record made of magics.
    """
    size = len(window) - HEADER_BYTES & -8
    steps, ones = _words()
    here = (steps + start * ones) & ((1 << 8 * size) - 1)
    named = int.from_bytes(memoryview(window)[_PLACE_AT : _PLACE_AT + size], "little")
    differing = (here ^ named).to_bytes(size, "little")
    at = differing.find(_NO_DIFFERENCE)
    while at >= 0:
        at = aligned(at)
        if differing.startswith(_NO_DIFFERENCE, at) and window.startswith(MAGIC, at):
            yield start + at
        at = differing.find(_NO_DIFFERENCE, at + 8)


@cache
def _words() -> tuple[int, int]:
    """Two integers: a window of 8-byte words that each hold their own place, from 0 on; and as many ones."""
    form = f"<{_WINDOW // 8}Q"
    steps, ones = pack(form, *range(0, _WINDOW, 8)), pack(form, *repeat(1, _WINDOW // 8))
    return int.from_bytes(steps, "little"), int.from_bytes(ones, "little")
