"""Damaged topics for tests of repair: which bytes are spoilt, and what is read afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import spoil

from loglib import Topic
from loglib.segment import HEADER_BYTES

POLICIES: dict[str, Any] = {"segment_bytes": 4096, "batch_bytes": 512}


@pytest.fixture
def offsets(path: Path) -> dict[int, bytes | None]:
    """A topic of one partition with some segments: its records by offset."""
    with Topic.open(path, create=True, **POLICIES) as topic:
        for number in range(120):
            topic.append(b"%03d" % number + b"." * 100, key=b"k", timestamp=1_000_000 * number)
            if number % 3 == 2:
                topic.flush()
        topic.flush()
        assert len(topic.partition(0).segments) > 3
        return {record.offset: record.value for record in topic.read()}


def segments(path: Path) -> list[Path]:
    return sorted((path / "0000").glob("*.log"))


def first_batches(segment: Path, count: int) -> list[tuple[int, int]]:
    """Offset and end of the first batches of a segment."""
    base = int(segment.stem)
    content, found, at = segment.read_bytes(), [], HEADER_BYTES
    for _ in range(count):
        length = int.from_bytes(content[at + 12 : at + 16], "little")
        found.append((base + at - HEADER_BYTES, base + at - HEADER_BYTES + length))
        at += length
    return found


def spoil_batch(path: Path, number: int = 1, which: int = 1, at: int = 40) -> range:
    """Flip a byte in a batch of a segment; returns its offsets."""
    segment = segments(path)[number]
    start, end = first_batches(segment, which + 1)[which]
    spoil(segment, HEADER_BYTES + start - int(segment.stem) + at)
    return range(start, end)


def read_all(path: Path, **options: Any) -> tuple[dict[int, bytes | None], list[range]]:
    with Topic.open(path, mode="r") as topic:
        reader = topic.read(**options)
        return {record.offset: record.value for record in reader}, [gap.offsets for gap in reader.gaps]


def without(records: dict[int, bytes | None], *gaps: range) -> dict[int, bytes | None]:
    return {offset: value for offset, value in records.items() if not any(offset in gap for gap in gaps)}
