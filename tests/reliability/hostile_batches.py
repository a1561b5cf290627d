"""Targets of the fuzzing that decode batches: their headers, their columns and their bodies."""

from __future__ import annotations

from itertools import pairwise
from struct import Struct

from builders import NOW
from hostile_bytes import (
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
from loglib.config.arguments import check_names
from loglib.config.policies import MAX_BATCH_BYTES, MAX_DECOMPRESSED_BYTES
from loglib.format import codec
from loglib.format.batch import Batch, Source
from loglib.format.columns import HEADERS, KEYS, NULL_KEYS, NULL_VALUES, SHARED_HEADERS, TIMESTAMPS, BinaryColumn
from loglib.format.header import VERSION, BadBatch, Header, NewerBatch, check_body, layout, open_body, parse_header
from loglib.segment import parse_segment_name, segment_name

HERE = Source("hostile", 0)


# --- batches ---------------------------------------------------------------------------------------


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
    if random() < 0.4:
        flags |= SHARED_HEADERS
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
        is_shared = flags & SHARED_HEADERS
        counts, total = offsets(random, 1 if is_shared else count, most=3)
        section = header_section(random, total)
        if is_shared:
            section = counts + section if random() < 0.9 else b""
        else:
            parts.append(counts)
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
        sets, times = (1, count) if at.headers.is_shared else (count, 1)
        counts = Struct(f"<{sets + 1}i").unpack_from(body, at.headers.counts)
        assert [len(pairs) for pairs in batch.headers] == [stop - start for start, stop in pairwise(counts)] * times


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


# --- topic.json, names -----------------------------------------------------------------------------

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
