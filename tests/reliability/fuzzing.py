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
from typing import Any, NamedTuple

from builders import IDENTITY, LOG_ID, NOW, a_mark, encoded
from loglib import LogError, description, transfer
from loglib import search as search_of
from loglib.append.producers import Producers
from loglib.arguments import check_names
from loglib.batch import Batch, Source
from loglib.config import MAX_BATCH_BYTES, MAX_DECOMPRESSED_BYTES, TopicConfig
from loglib.format import codec
from loglib.format.batch import (
    VERSION,
    BadBatch,
    Header,
    NewerBatch,
    check_body,
    crc32c,
    layout,
    open_body,
    parse_header,
)
from loglib.format.columns import HEADERS, KEYS, NULL_KEYS, NULL_VALUES, TIMESTAMPS, BinaryColumn, Columns
from loglib.format.jumps import added
from loglib.format.watermark import SECOND_SLOT, SLOT_BYTES, encode_new, newest
from loglib.segment import (
    HEADER_BYTES,
    MAX_PRODUCERS,
    SegmentHeader,
    SegmentReader,
    first_segment,
    parse_segment_name,
    segment_name,
)
from loglib.system.files import Files

Draw = Callable[[], float]

SALT = IDENTITY.salt
HERE = Source("hostile", 0)

# Wrong values for lengths, counts and offsets.
WILD = (
    0, 1, 2, 3, 7, 8, 9, 15, 16, 63, 64, 100, 127, 128, 129, 136, 255, 256, 4095, 4096, 4097, 65535, 65536,
    (1 << 20) - 1, 1 << 20, 1 << 24, (1 << 24) + 1, 1 << 25, 1 << 26, 1 << 29, (1 << 30) - 8, 1 << 30, (1 << 30) + 8,
    (1 << 31) - 8, (1 << 31) - 1, 1 << 31, (1 << 32) - 8, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 62), (1 << 63) - 4096,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1,
)  # fmt: skip


class Outcome(NamedTuple):
    """Whether the decoder accepted the bytes."""

    accepted: bool


ACCEPTED, REFUSED = Outcome(True), Outcome(False)


def pick(random: Draw, items: Any) -> Any:
    return items[int(random() * len(items))]


def wild(random: Draw, bits: int, *, near: int = 0) -> int:
    """A number of this many bits: one that often breaks decoders, or one close to the right value."""
    if random() < 0.5:
        return int(pick(random, WILD)) & (1 << bits) - 1
    return near + int(random() * 33) - 16 & (1 << bits) - 1


def signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> bits - 1 else number


def damaged(random: Draw, content: bytes, *, most: int = 4) -> bytearray:
    """The bytes with a few of them changed."""
    changed = bytearray(content)
    for _ in range(1 + int(random() * most)):
        if changed:
            changed[int(random() * len(changed))] = int(random() * 256)
    return changed


# --- batches ---------------------------------------------------------------------------------------

BATCH = Struct("<4sIIIQQIIBBHIIIIIqqqqQQIIQ")
_BITS = (0, 0, 32, 32, 64, 64, 32, 32, 8, 8, 16, *[32] * 5, *[64] * 6, 32, 32, 64)  # of each field
_SIGNED = range(16, 20)


def templates() -> list[tuple[list[Any], bytes]]:
    """Headers, as lists of their fields, and bodies, of batches as they are written."""
    texts = [b"%d" % number * (number % 7) for number in range(40)]
    columns = [
        Columns([b"x"]),
        Columns([b"abc"] * 9),
        Columns([None, b"", b"value", None], [b"k", None, b"", b"kk"]),
        Columns(texts, texts, [NOW + number for number in range(40)], [(("name", b"v"),) * (n % 3) for n in range(40)]),
        Columns([bytes(3000)] * 3),
    ]
    found = []
    for each in columns:
        for number in range(4):
            stored = encoded(each, codec=number)
            found.append((list(BATCH.unpack_from(stored)), stored[BATCH.size :]))
    return found


TEMPLATES = templates()


def seal(fields: list[Any], body: bytes | None = None) -> bytes:
    """A batch's header, and its body if given, with checksums that are right."""
    if body is not None:
        fields[2] = crc32c(body)
    unsealed = BATCH.pack(*fields)
    sealed = unsealed[:4] + crc32c(unsealed[8:], SALT).to_bytes(4, "little") + unsealed[8:]
    return sealed if body is None else sealed + body


def change_fields(random: Draw, fields: list[Any]) -> None:
    for _ in range(1 + int(random() * 3)):
        index = 2 + int(random() * (len(_BITS) - 2))
        number = wild(random, _BITS[index], near=fields[index])
        fields[index] = signed(number, 64) if index in _SIGNED else number


def batch_header(random: Draw) -> Outcome:
    """False fields: a header that passes has columns inside its body and within the limits."""
    fields = list(pick(random, TEMPLATES)[0])
    change_fields(random, fields)
    try:
        header = parse_header(seal(fields), 0, salt=SALT, offset=0)
    except (BadBatch, NewerBatch):
        return REFUSED
    check_layout(header)
    return ACCEPTED


def check_layout(header: Header) -> None:
    at = layout(header)
    assert BATCH.size < header.length <= MAX_BATCH_BYTES and 1 <= header.record_count <= header.length
    assert header.stored_bytes <= header.length - BATCH.size
    columns = [at.values] if at.keys is None else [at.values, at.keys]
    ends = [column.items + column.size_bytes for column in columns]
    if at.headers is not None:
        ends.append(at.headers.section + at.headers.size_bytes)
    assert 0 < at.values.items <= ends[0] and ends == sorted(ends) and ends[-1] <= at.end
    assert at.end <= (MAX_DECOMPRESSED_BYTES if header.codec else header.stored_bytes)
    assert header.version == VERSION and header.next_offset < 1 << 63


def any_header(random: Draw) -> Outcome:
    """Bytes without a right checksum: all of them are refused."""
    stored = seal(list(pick(random, TEMPLATES)[0]))
    changed = bytes(damaged(random, stored)) if random() < 0.9 else stored[: int(random() * len(stored))]
    try:
        header = parse_header(changed, 0, salt=SALT, offset=0)
    except (BadBatch, NewerBatch):
        return REFUSED
    assert changed == stored and header.length
    return ACCEPTED


def columns_of_any_kind(random: Draw) -> bytes:
    """A plain batch whose columns are right in most places and wrong in some."""
    count = 1 + int(random() * 6)
    flags = int(random() * 32) if random() < 0.7 else KEYS | NULL_VALUES | NULL_KEYS | TIMESTAMPS | HEADERS
    parts: list[bytes] = []
    sizes = [0, 0, 0]
    values, sizes[0] = offsets(random, count)
    parts.append(values)
    if flags & KEYS:
        keys, sizes[1] = offsets(random, count)
        parts.append(keys)
    parts += [bytes([int(random() * 256)]) + bytes(7) for flag in (NULL_VALUES, NULL_KEYS) if flags & flag]
    times = [NOW]
    if flags & TIMESTAMPS:
        times = [signed(wild(random, 64, near=NOW), 64) for _ in range(count)]
        parts.append(Struct(f"<{count}q").pack(*times))
    section = b""
    if flags & HEADERS:
        counts, total = offsets(random, count, most=3)
        parts.append(counts)
        section = header_section(random, total)
        sizes[2] = len(section)
    parts += [padded(noise(random, sizes[0])), padded(noise(random, sizes[1])), section]
    body = b"".join(parts)
    if random() < 0.1:
        body = bytes(damaged(random, body))
    fields = list(TEMPLATES[0][0])
    fields[3] = BATCH.size + len(body)
    fields[7], fields[10], fields[11] = count, flags, len(body)
    fields[12:15] = sizes
    fields[17], fields[18] = times[0], max(times)
    return seal(fields, body)


def offsets(random: Draw, count: int, *, most: int = 20) -> tuple[bytes, int]:
    """An offsets column, and the size that it should end with."""
    numbers, at = [0], 0
    for _ in range(count):
        at += int(random() * most)
        numbers.append(at)
    if random() < 0.15:
        index = int(random() * len(numbers))
        numbers[index] = signed(wild(random, 32, near=numbers[index]), 32)
    return padded(Struct(f"<{count + 1}i").pack(*numbers)), at


def header_section(random: Draw, total: int) -> bytes:
    total = max(0, total)
    names, name_bytes = offsets(random, total, most=4)
    values, value_bytes = offsets(random, total, most=4)
    text = b"abc\xc3\xa9" * 40 if random() < 0.8 else noise(random, 200)
    section = names + values + padded(text[:name_bytes]) + padded(noise(random, value_bytes))
    return section if random() < 0.9 else section[: int(random() * len(section)) & ~7]


def noise(random: Draw, size: int) -> bytes:
    return b"%.15f" % random() * (size // 16 + 1) if size > 32 else (b"%.31f" % random())[:size].ljust(size, b"\xff")


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) & 7)


def opened(stored: bytes) -> Batch:
    """The batch in these bytes, read as a segment's reader reads it."""
    header = parse_header(stored, 0, salt=SALT, offset=0)
    body = memoryview(stored)[BATCH.size : header.length]
    check_body(header, body)
    if header.codec:
        return Batch(0, header, open_body(header, body), 0, HERE)
    return Batch(0, header, stored, BATCH.size, HERE)


def batch_columns(random: Draw) -> Outcome:
    """False columns: the decoded values are those that the plainest way of reading gives."""
    stored = columns_of_any_kind(random)
    try:
        batch = opened(stored)
        records = batch.records()
    except (BadBatch, NewerBatch, LogError):
        return REFUSED
    check_columns(batch, stored[BATCH.size :])
    assert len(records) == len(batch)
    return ACCEPTED


def check_columns(batch: Batch, body: bytes) -> None:
    header, at = batch._header, layout(batch._header)
    count = header.record_count
    assert batch.values == plainly(body, at.values)
    if at.keys is not None:
        assert batch.keys == plainly(body, at.keys)
    else:
        assert batch.keys == [None] * count
    if at.timestamps is not None:
        assert batch.timestamps == list(Struct(f"<{count}q").unpack_from(body, at.timestamps))
    assert len(batch.headers) == count
    if at.headers is not None:
        counts = Struct(f"<{count + 1}i").unpack_from(body, at.headers.counts)
        assert [len(pairs) for pairs in batch.headers] == [stop - start for start, stop in pairwise(counts)]


def plainly(body: bytes, at: BinaryColumn) -> list[bytes | None]:
    bounds = Struct(f"<{at.length + 1}i").unpack_from(body, at.offsets)
    items: list[bytes | None] = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        null = at.validity is not None and not body[at.validity + index // 8] >> index % 8 & 1
        items.append(None if null else body[at.items + start : at.items + stop])
    return items


def batch_to_arrow(random: Draw) -> Outcome:
    """The same columns as Arrow arrays: refused, or valid by all checks of Arrow and with the same values."""
    stored = columns_of_any_kind(random)
    try:
        batch = opened(stored)
    except (BadBatch, NewerBatch):
        return REFUSED
    try:
        columns = batch.to_arrow()
    except LogError:
        columns = None
    try:
        batch.decode()
    except LogError:
        assert columns is None, "Arrow has taken what the lists refuse"
        return REFUSED
    assert columns is not None, "Arrow has refused what the lists take"
    columns.validate(full=True)
    assert columns.column("value").to_pylist() == batch.values
    assert columns.column("key").to_pylist() == batch.keys
    assert columns.column("timestamp").cast("int64").to_pylist() == batch.timestamps
    pairs = [tuple((each["key"], each["value"]) for each in row or ()) for row in columns.column("headers").to_pylist()]
    assert pairs == batch.headers
    return ACCEPTED


COMPRESSED = [(number, fields, body) for fields, body in TEMPLATES if (number := fields[9])]


def compressed_body(random: Draw) -> Outcome:
    """Compressed bytes that were changed, or that declare a wrong size."""
    number, fields, body = pick(random, COMPRESSED)
    header = Header._make(fields)
    stored = body[: header.stored_bytes]
    size = layout(header).end
    content = bytes(damaged(random, stored)) if random() < 0.8 else stored[: int(random() * len(stored))]
    declared = size if random() < 0.7 else wild(random, 20, near=size)
    try:
        found = codec.decompress(number, content, body_bytes=declared)
    except codec.BadCompression:
        return REFUSED
    assert len(found) == declared
    return ACCEPTED


# --- segment header, producers, watermark ----------------------------------------------------------

SEGMENT = Struct("<8sHHI16sIIQQQQIIqqQQQIIq16sII")
_SEGMENT_BITS = (0, 16, 16, 32, 0, 32, 32, 64, 64, 64, 64, 32, 32, 64, 64, 64, 64, 64, 32, 32, 64, 0, 32, 32)
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


SLOT = Struct("<3sBIQQQQIIQQQQI4xQ32s")
_SLOT_BITS = (0, 8, 0, 64, 64, 64, 64, 32, 32, 64, 64, 64, 64, 32, 64, 0)
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
_VALUES = {"format": description.FORMAT, "log_id": str(uuid.UUID(bytes=LOG_ID))} | TopicConfig().to_json()
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
        described = description.read(_ONE_FILE, "/hostile")
    except LogError:
        return REFUSED
    assert described is not None
    log_id, config = described
    assert len(log_id) == 16 and config == TopicConfig.from_json(config.to_json())
    return ACCEPTED


_LETTERS = "abzAZ09._-/\\\0\n ~*?é\u202e\ud800"


def names(random: Draw) -> Outcome:
    """Names: a topic's name that passes stays in its directory, and a segment's name stands for one number."""
    text = "".join(pick(random, _LETTERS) for _ in range(int(random() * 12))) * (1 if random() < 0.95 else 30)
    base = parse_segment_name(text if random() < 0.5 else f"{wild(random, 64):020d}.log")
    assert base is None or segment_name(base)
    try:
        check_names(text)
    except ValueError:
        return REFUSED
    assert 0 < len(text) < 250 and text not in (".", "..") and not set(text) & set("/\\\0\n ")
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
