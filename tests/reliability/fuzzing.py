"""Fuzzing: hostile bytes with right checksums for every decoder, and the results that are allowed.

Random bytes do not pass the first checksum. So each target builds what a writer would write, replaces some
of it with values that often break decoders, and seals it again. A target draws everything from one
function, `random`, of numbers in [0, 1). With a seed a run can be repeated; with the input of a fuzzer
it is coverage-guided (coverage_guided.py).

An execution may end in two ways: the decoder refuses the bytes, or its value agrees with another way of
reading the same bytes. Everything else is a fault and is raised.
"""

from __future__ import annotations

import io
import json
import uuid
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, pairwise
from struct import Struct
from typing import Any

from builders import IDENTITY, LOG_ID, NOW, a_mark
from hostile_batches import (
    any_header,
    batch_columns,
    batch_header,
    batch_to_arrow,
    check_layout,
    columns_of_any_kind,
    compressed_body,
    names,
    opened,
)
from hostile_bytes import (
    _BITS,
    ACCEPTED,
    BATCH,
    REFUSED,
    SALT,
    TEMPLATES,
    Draw,
    Outcome,
    change_fields,
    damaged,
    pick,
    seal,
    signed,
    wild,
)

from loglib import LogError
from loglib.append import transfer
from loglib.config.policies import TopicConfig
from loglib.format.chain import added
from loglib.format.header import Header, crc32c
from loglib.format.watermark import SECOND_SLOT, SLOT_BYTES, encode_new, newest
from loglib.log import search as search_of
from loglib.log import topic_file
from loglib.log.producers import Producers
from loglib.segment import HEADER_BYTES, MAX_PRODUCERS, SegmentHeader, SegmentReader, first_segment
from loglib.system.files import Files

# --- segment header, producers, watermark ----------------------------------------------------------

SEGMENT = Struct("<8sHHI16sIIQQQQIIqqQQQIIq16sIIQQQIIQ24x")
_SEGMENT_BITS = (0, 16, 16, 32, 0, 32, 32, 64, 64, 64, 64, 32, 32, 64, 64, 64, 64, 64, 32, 32, 64, 0, 32, 32,
                 64, 64, 64, 32, 32, 64)  # fmt: skip
_SEGMENT_SIGNED = (13, 14, 20)
_SEGMENT_FIELDS = [index for index, bits in enumerate(_SEGMENT_BITS) if bits]
FIRST_SEGMENT = first_segment(IDENTITY, created=NOW).encode()


def segment_header(random: Draw) -> Outcome:
    """False fields and a false table of producers; a header that passes can be used."""
    fields = list(SEGMENT.unpack_from(FIRST_SEGMENT))
    table = b""
    if random() < 0.5:
        count = int(random() * 6) if random() < 0.9 else MAX_PRODUCERS
        table = Struct(f"<{4 * count}Q").pack(*[wild(random, 64, near=number) for number in range(4 * count)])
        fields[12] = count
    for _ in range(int(random() * 3)):
        index = pick(random, _SEGMENT_FIELDS)
        number = wild(random, _SEGMENT_BITS[index], near=fields[index])
        fields[index] = signed(number, 64) if index in _SEGMENT_SIGNED else number
    content = bytearray((SEGMENT.pack(*fields) + table).ljust(HEADER_BYTES, b"\0"))
    if random() < 0.95:
        content[12:16] = crc32c(content[16:], crc32c(content[:12])).to_bytes(4, "little")
    try:
        header = SegmentHeader.decode(bytes(content), "hostile")
    except LogError:
        return REFUSED
    assert len(header.producers) <= MAX_PRODUCERS
    if header.producers and random() < 0.3:
        producers = Producers(0, header.producers, list)
        assert len(producers.snapshot()) <= MAX_PRODUCERS
    return ACCEPTED


SLOT = Struct("<3sBIQQQQIIQQQQI4x7Q48s")
_SLOT_BITS = (0, 8, 0, 64, 64, 64, 64, 32, 32, 64, 64, 64, 64, 32, *(64,) * 7, 0)
_SLOT_FIELDS = [index for index, bits in enumerate(_SLOT_BITS) if bits]


def watermark(random: Draw) -> Outcome:
    """False or torn slots: the mark is from a whole slot whose numbers are in order, or there is none."""
    content = bytearray(encode_new(a_mark(4, 0, 4096, 4096, 1), SALT))
    for at in (0, SECOND_SLOT):
        if random() < 0.7:
            fields = list(SLOT.unpack_from(content, at))
            for _ in range(1 + int(random() * 3)):
                index = pick(random, _SLOT_FIELDS)
                fields[index] = wild(random, _SLOT_BITS[index], near=fields[index])
            slot = bytearray(SLOT.pack(*fields))
            if random() < 0.9:
                slot[4:8] = crc32c(slot[8:], crc32c(slot[:4], SALT)).to_bytes(4, "little")
            content[at : at + SLOT_BYTES] = slot
    if random() < 0.1:
        del content[int(random() * len(content)) :]
    try:
        mark = newest(bytes(content), SALT)
    except LogError:
        return REFUSED
    if mark is not None:
        assert mark.log_start_offset <= mark.durable_end <= mark.flushed_end
        assert mark.durable_tail <= mark.durable_end and mark.flushed_tail <= mark.flushed_end
    return ACCEPTED


# --- finding batches -------------------------------------------------------------------------------

_POINTERS = (3, 4, 15, 22, 24)  # of a batch header's fields: length, base_offset, previous_crc, previous_bytes, jump


class Bytes(SegmentReader):
    """A segment made of bytes in memory. It counts the headers that are read."""

    looks = 0

    def __init__(self, stored: bytes, base_offset: int) -> None:
        self._fd = -1
        self.stored, self.base_offset = stored, base_offset
        self.salt, self.path = SALT, "hostile"

    def end_of_file(self) -> int:
        return self.base_offset + len(self.stored)

    def read(self, offset: int, size_bytes: int) -> bytes:
        assert offset >= self.base_offset, "bytes before the segment are nobody's"
        at = offset - self.base_offset
        return self.stored[at : at + max(size_bytes, 0)]

    def header_at(self, offset: int) -> Header:
        self.looks += 1
        return super().header_at(offset)


def linked_batches(random: Draw, base: int) -> tuple[list[bytes], int]:
    """Batches linked as a writer links them, some with false pointers; and the number of these."""
    stored: list[bytes] = []
    at, previous_crc, previous_bytes, lies = base, 0, int(random() * 3) * 64, 0
    jumps = None
    for _ in range(1 + int(random() * 9)):
        jumps = added(jumps, at)
        fields, body = pick(random, TEMPLATES)
        fields = [*fields[:4], at, *fields[5:]]
        fields[15], fields[22], fields[24] = previous_crc, previous_bytes, jumps.jump_offset
        if random() < 0.15:
            index = pick(random, _POINTERS)
            fields[index] = wild(random, _BITS[index], near=fields[index])
            lies += 1
        stored.append(seal(fields, body))
        previous_crc, previous_bytes = int.from_bytes(stored[-1][4:8], "little"), len(stored[-1])
        at += previous_bytes
    return stored, lies


def search(random: Draw) -> Outcome:
    """False pointers, and damage: a batch that is found exists and holds the offset, and the search ends."""
    base = pick(random, (0, 0, 4096, 1 << 40))
    batches, lies = linked_batches(random, base)
    starts = list(accumulate(map(len, batches), initial=base))
    limit, last = starts.pop(), starts[-1]
    segment = Bytes(b"".join(batches), base)
    if random() < 0.4:
        segment.stored = bytes(damaged(random, segment.stored))
        lies += 1
    tail: int | None = last
    if random() < 0.3:
        lies += 1
        tail = pick(random, (None, wild(random, 64, near=last)))
        limit = limit if random() < 0.8 else max(base, wild(random, 62, near=limit))
    offset = pick(random, starts) + int(random() * 400)
    looked_for = [
        lambda: found_around(segment, offset, tail, limit),
        lambda: search_of.first_reaching(segment, signed(wild(random, 64, near=NOW), 64), tail, limit) is not None,
        lambda: passed_over(segment, pick(random, starts), tail, limit),
        lambda: in_order(list(search_of.proven_headers(segment, base, limit))),
        lambda: in_order(list(search_of.likely_headers(segment, pick(random, starts), segment.end_of_file()))),
        lambda: search_of.jumps_at(segment, last) is not None,
    ]
    try:
        found = pick(random, looked_for)()
    except LogError:
        assert lies, "a sound segment is refused"
        return REFUSED
    assert segment.looks < 4000 + len(segment.stored), "it looks without end"
    if not lies and base <= offset < limit:
        expected = starts[bisect_right(starts, offset) - 1]
        assert search_of.around(segment, offset, tail, limit)[1] == expected, "the wrong batch"
    return Outcome(found)


def found_around(segment: Bytes, offset: int, tail: int | None, limit: int) -> bool:
    header, place = search_of.around(segment, offset, tail, limit)
    assert place >= segment.base_offset
    assert header is None or header.base_offset == place <= offset < header.next_offset
    return header is not None


def passed_over(segment: Bytes, start: int, tail: int | None, limit: int) -> bool:
    if start >= limit:
        return False
    place = search_of.after_damage(segment, start, limit, tail)
    assert start < place <= limit, "reading would not go on"
    return place < limit


def in_order(headers: list[Header]) -> bool:
    assert all(before.next_offset <= after.base_offset for before, after in pairwise(headers))
    return bool(headers)


# --- topic.json, names -----------------------------------------------------------------------------


class _OneFile(Files):
    """A directory with only a description in it."""

    content = b""

    def read_whole(self, path: str, limit_bytes: int) -> bytes:
        return self.content

    def exists(self, path: str, **within: Any) -> bool:
        return False


_ONE_FILE = _OneFile()
_VALUES = {"format": topic_file.FORMAT, "log_id": str(uuid.UUID(bytes=LOG_ID))} | TopicConfig().to_json()
_ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, -0.0, 1e308, float("inf"), float("nan"), 10**30, 1 << 63, "", "1", "none", "zlib",
    "crc32", "..", "\x00", "é", [], [1], {}, {"age": 1}, {"records": "x"}, {"bytes": -1}, {"keep_free": 2},
)  # fmt: skip


def topic_description(random: Draw) -> Outcome:
    """JSON that does not describe a topic; what passes is a configuration that keeps all rules."""
    values = dict(_VALUES)
    for _ in range(1 + int(random() * 3)):
        name = pick(random, tuple(values))
        if random() < 0.2:
            del values[name]
        elif name in ("flush", "retention") and random() < 0.7:
            policy: Any = dict(_VALUES[name])  # type: ignore[call-overload]
            policy[pick(random, tuple(policy))] = pick(random, _ODD)
            values[name] = policy
        else:
            values[name] = pick(random, _ODD)
    content = json.dumps(values).encode()
    if random() < 0.6:
        before = content[:-1] + b", "
        content = before + b'"crc": "%08x"}' % crc32c(before)
    if random() < 0.1:
        content = bytes(damaged(random, content))
    _ONE_FILE.content = content
    try:
        described = topic_file.read(_ONE_FILE, "/hostile")
    except LogError:
        return REFUSED
    assert described is not None
    log_id, config = described
    assert len(log_id) == 16 and config == TopicConfig.from_json(config.to_json())
    return ACCEPTED


# --- transfer --------------------------------------------------------------------------------------

FRAME = Struct("<4sHHIIQQ")


def frame(random: Draw) -> bytes:
    """A frame with one batch, from a hostile peer."""
    if random() < 0.5:
        fields, body = pick(random, TEMPLATES)
        fields = list(fields)
        if random() < 0.7:
            change_fields(random, fields)
        batch = seal(fields, body)
    else:
        batch = columns_of_any_kind(random)
    numbers: list[Any] = [transfer.MAGIC, transfer.VERSION, transfer.BATCHES, 0, SALT, 0, len(batch)]
    if random() < 0.3:
        index = 1 + int(random() * 6)
        numbers[index] = wild(random, (0, 16, 16, 32, 32, 64, 64)[index], near=numbers[index])
    head = FRAME.pack(*numbers)
    return head + crc32c(head).to_bytes(4, "little") + batch


def transfer_frame(random: Draw) -> Outcome:
    """A reader can read every batch that is accepted."""
    stream = io.BytesIO(frame(random))
    try:
        for header, stored in transfer.read_frame(stream):
            check_layout(header)
            assert len(stored) == header.length - BATCH.size
            taken = opened(seal([*header[:4], 0, *header[5:]], stored))
            assert max(taken.timestamps) == header.max_timestamp
            taken.decode()
    except LogError:
        return REFUSED
    return ACCEPTED


# Executions at scale 1: five million in all, most of them of the cheap targets.
TARGETS: dict[Callable[[Draw], Outcome], int] = {
    batch_header: 2_200_000,
    any_header: 750_000,
    names: 250_000,
    watermark: 650_000,
    segment_header: 350_000,
    compressed_body: 250_000,
    batch_columns: 250_000,
    transfer_frame: 125_000,
    topic_description: 100_000,
    search: 50_000,
    batch_to_arrow: 25_000,
}
