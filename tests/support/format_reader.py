"""A reader of topics written from docs/format.md alone: the standard library, and nothing of loglib."""

import json
import uuid
import zlib
from pathlib import Path
from struct import unpack_from
from typing import Any


def _table_entry(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


TABLE = [_table_entry(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def read_topic(path: Path) -> dict[int, list[tuple[Any, ...]]]:
    """(offset, time, key, value, headers) of every record, by partition."""
    text = (path / "topic.json").read_bytes()
    topic = json.loads(text)
    assert topic["format"] == 3 and int(topic["crc"], 16) == crc32c(text.rpartition(b'"crc"')[0])
    log_id = uuid.UUID(topic["log_id"]).bytes
    return {number: read_partition(path / f"{number:04d}", log_id, number) for number in range(topic["partitions"])}


def read_partition(path: Path, log_id: bytes, number: int) -> list[tuple[Any, ...]]:
    salt = log_id + number.to_bytes(4, "little")
    start, end = read_watermark((path / "watermark").read_bytes(), salt)
    records, offset = [], start
    for file in sorted(path.glob("*.log")):
        data = file.read_bytes()
        magic, version, flags, crc, its_log, its_number, _, base = unpack_from("<8sHHI16sIIQ", data)
        assert (magic, version, flags, its_log, its_number) == (b"\x89LLSEG\r\n", 3, 0, log_id, number)
        assert crc == crc32c(data[:12] + data[16:4096]) and base == int(file.stem)
        if base >= start:
            assert base == offset, "a gap between segments"
            while offset < end and (at := 4096 + offset - base) < len(data):
                length, found = read_batch(data, at, salt, offset)
                records += found
                offset += length
    assert offset == end, "records are missing"
    return records


def read_group(path: Path, group: str) -> dict[tuple[str, int], tuple[Any, ...]]:
    """(offset, meta, member, time, history) of the commit that counts, by (topic, partition)."""
    log_id = uuid.UUID(json.loads((path / "topic.json").read_bytes())["log_id"]).bytes
    logs = [each for each in (path / "groups" / group / "offsets").iterdir() if not each.name.startswith(".")]
    assert logs, "no log of commits"
    best: dict[tuple[str, int], tuple[Any, ...]] = {}
    for log in logs:
        number = 1 << 31 | crc32c(f"{group}/{log.name}".encode()) & 0x7FFFFFFF
        for _, time, member, value, _ in read_partition(log, log_id, number):
            for facts in json.loads(value):
                for partition, (offset, generation, count, history, meta) in facts["partitions"].items():
                    key, order = (facts["log_id"], int(partition)), (generation, count)
                    if key not in best or order > best[key][0]:
                        commit = offset, meta, member.decode(), time, history, facts["log_id"]
                        best[key] = order, facts["topic"], commit
    return {
        (topic, partition): commit for (_, partition), (_, topic, commit) in best.items() if commit[0] is not None
    }


def read_watermark(data: bytes, salt: bytes) -> tuple[int, int]:
    marks = []
    for slot in (data[:192], data[4096:4288]):
        magic, version, crc, *mark = unpack_from("<3sBIQQQQI", slot)
        if magic == b"\x89LW" and crc == crc32c(salt + slot[:4] + slot[8:]):
            assert version == 3
            marks.append(mark)
    return max(marks)[1], max(marks)[2]


def read_batch(data: bytes, at: int, salt: bytes, offset: int) -> tuple[int, list[tuple[Any, ...]]]:
    magic, header_crc, body_crc, length, base, _, _, n = unpack_from("<4sIIIQQII", data, at)
    version, codec, flags, stored, value_bytes, key_bytes, header_bytes = unpack_from("<BBHIIII", data, at + 40)
    (time,) = unpack_from("<q", data, at + 72)
    assert magic == b"\x89LLB" and header_crc == crc32c(salt + data[at + 8 : at + 128]) and base == offset
    assert version == 3 and not flags & 0xA0 and codec <= 1
    assert body_crc == crc32c(data[at + 128 : at + length])
    body = data[at + 128 : at + 128 + stored]
    body, place = zlib.decompress(body) if codec else body, 0

    def column(size: int, present: int = 1) -> bytes:
        nonlocal place
        begin, place = place, place + (size + 7) // 8 * 8 * bool(present)
        return body[begin : begin + size]

    offsets = [column(4 * (n + 1)), column(4 * (n + 1), flags & 1)]
    valid = [column((n + 7) // 8, flags & 2), column((n + 7) // 8, flags & 4)]
    times = unpack_from(f"<{n}q", column(8 * n, flags & 8)) if flags & 8 else (time,) * n
    own = flags & 80 == 16
    counts = unpack_from(f"<{n + 1}i", column(4 * (n + 1))) if own else (0,) * (n + 1)
    values = items(offsets[0], column(value_bytes), n, valid[0] if flags & 2 else None)
    keys_column = column(key_bytes, flags & 1)
    keys = items(offsets[1], keys_column, n, valid[1] if flags & 4 else None) if flags & 1 else [None] * n
    section = column(header_bytes)
    pairs = record_headers(section, counts[-1]) if own else []
    shared = record_headers(section[8:], unpack_from("<2i", section)[1]) if flags & 80 == 80 else []
    assert place == len(body)
    return length, [
        (base + i, times[i], keys[i], values[i], tuple(shared or pairs[counts[i] : counts[i + 1]])) for i in range(n)
    ]


def items(offsets: bytes, column: bytes, n: int, valid: bytes | None) -> list[bytes | None]:
    bounds = unpack_from(f"<{n + 1}i", offsets)
    null = [valid is not None and not valid[i // 8] >> i % 8 & 1 for i in range(n)]
    return [None if null[i] else column[bounds[i] : bounds[i + 1]] for i in range(n)]


def record_headers(section: bytes, m: int) -> list[tuple[str, bytes]]:
    step = (4 * (m + 1) + 7) // 8 * 8
    (name_bytes,) = unpack_from("<i", section, 4 * m)
    values_at = 2 * step + (name_bytes + 7) // 8 * 8
    names = items(section, section[2 * step :], m, None)
    values = items(section[step:], section[values_at:], m, None)
    pairs = [(name, value) for name, value in zip(names, values, strict=True) if name is not None and value is not None]
    assert len(pairs) == m, "a header has a name and a value"
    return [(name.decode(), value) for name, value in pairs]
