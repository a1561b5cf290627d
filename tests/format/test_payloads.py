"""Records that hold batches, in a sound log: lookups and readers take them for records, and for nothing else.

Their maker knows the log, and guesses where his record will stand. He makes his batches with the library itself, in
a log of the same id that has a batch at the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from builders import BODY_AT, make_topic
from spark_logs import scan_rows

from conftest import NOW, QUIET, SECOND, last_segment, values_of
from loglib import Topic, testing
from loglib import segment as segments
from loglib.config.policies import TopicConfig
from loglib.config.times import to_datetime
from loglib.errors import InvalidOffsetError
from loglib.format.header import Header, parse_header
from loglib.segment import HEADER_BYTES
from loglib.testing import MemoryFiles

VALUE_AT = BODY_AT + 8  # in a batch of one record without a key
OPENED = QUIET | {"clock": lambda: NOW}
_numbers = count()
Forge = Callable[..., bytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A topic whose log id everybody knows."""
    make_topic(tmp_path / "topic", TopicConfig(**QUIET))
    return tmp_path / "topic"


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    """Makes batches for a place in the log, one record each, as the library would write them there."""

    def make(place: int, count: int = 1, *, timestamp: int = NOW, size: int = 32) -> bytes:
        other = tmp_path / f"other-{next(_numbers)}"
        make_topic(other, TopicConfig(**QUIET))
        with testing.open_topic(other, **OPENED) as topic:
            if place:
                topic.append(bytes(place - VALUE_AT), sync=True)
            assert topic.partition(0).log_end_offset == place
            for number in range(count):
                topic.append((b"invented %d" % number).ljust(size), timestamp=timestamp + number, sync=True)
        return last_segment(other).read_bytes()[HEADER_BYTES + place :]

    return make


def attacked(topic: Topic, forge: Forge) -> list[bytes]:
    """Two records, of which the second holds batches from between their times; returns the values."""
    topic.append(b"first", timestamp=NOW, sync=True)
    fakes = forge(topic.partition(0).log_end_offset + VALUE_AT, 40, timestamp=NOW + SECOND)
    topic.append(fakes, timestamp=NOW + 2 * SECOND, sync=True)
    return [b"first", fakes]


def tear(path: Path, end: int) -> None:
    """Wipe out the header of the batch at this place, as a crash can."""
    segment = last_segment(path)
    stored = bytearray(segment.read_bytes())
    stored[HEADER_BYTES + end : HEADER_BYTES + end + BODY_AT] = bytes(BODY_AT)
    segment.write_bytes(stored)


BETWEEN = (NOW + 1, NOW + SECOND, NOW + SECOND + 20, NOW + SECOND + 39, NOW + 2 * SECOND)


def test_start_by_time_returned_an_invented_record_and_hid_the_real_one(path: Path, forge: Forge) -> None:
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        _, real = attacked(topic, forge)
        for start in BETWEEN:
            assert values_of(topic, to_datetime(start)) == [real]


def test_one_more_append_raised_corrupt_log_error_on_a_sound_log(path: Path, forge: Forge) -> None:
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        _, real = attacked(topic, forge)
        topic.append(b"more", timestamp=NOW + 3 * SECOND, sync=True)
        for start in BETWEEN:
            assert values_of(topic, to_datetime(start)) == [real, b"more"]
        assert values_of(topic, to_datetime(NOW + 2 * SECOND + 1)) == [b"more"]


def test_offset_inside_a_record_that_looks_like_a_batch_is_no_records(path: Path, forge: Forge) -> None:
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        place = topic.partition(0).log_end_offset + VALUE_AT
        topic.append(forge(place, 40), sync=True)
        after = topic.append(b"after", sync=True)
        size = VALUE_AT + 32
        for offset in (place, place + 7 * size, place + 39 * size):
            with pytest.raises(InvalidOffsetError) as caught:
                topic.read(offset)
            assert (caught.value.batch_offsets, caught.value.next_offset) == (range(1), after.offset)


def test_spark_counted_152_rows_where_there_were_2(path: Path, forge: Forge) -> None:
    """Whatever the splits; in this one the value is smaller than that in a real Spark, and the splits are."""
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        topic.append(b"first", sync=True)
        fakes = forge(topic.partition(0).log_end_offset + VALUE_AT, 300)
        topic.append(fakes, sync=True)
        end = topic.partition(0).log_end_offset
    for split_bytes in (end // 2, end // 3, 4096, 1000, 160):
        rows = scan_rows(path, split_bytes=split_bytes)
        assert [row["value"] for row in rows] == [b"first", fakes], split_bytes


def test_record_that_a_crash_left_without_its_header_is_a_torn_tail_whatever_it_holds(path: Path, forge: Forge) -> None:
    """Batches in it lead to the end of the file, and say that all before was durable; the watermark knows better."""
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        first = topic.append(b"first", sync=True)
        end = topic.partition(0).log_end_offset
        mark = (path / "0000" / "watermark").read_bytes()
        topic.append(forge(end + VALUE_AT, 40), sync=True)
    tear(path, end)
    (path / "0000" / "watermark").write_bytes(mark)  # as it was when only the first was durable
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        assert [record.offset for record in topic.read()] == [first.offset]
        topic.append(b"more", sync=True)
        assert values_of(topic) == [b"first", b"more"] and topic.verify().damage == ()


def test_value_of_repeated_magics_cost_seconds_of_search() -> None:
    """Counted: the headers looked at by time, by offset, by opening, and without a watermark; as many as with zeros."""
    zeros, magics = (looks_at(pattern * (1 << 14)) for pattern in (b"\0\0\0\0", b"\x89LLB"))
    assert magics == zeros
    assert max(zeros) < 100


def test_chain_of_batches_in_a_torn_record_was_walked_from_each_of_them(path: Path, forge: Forge) -> None:
    """Counted: the headers looked at. The chain ends a little before the last byte, so it is not the log's."""
    fakes = 300
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        topic.append(b"first", sync=True)
        end = topic.partition(0).log_end_offset
        topic.append(forge(end + VALUE_AT, fakes) + b"\xff" * 64, sync=True)
    tear(path, end)
    (path / "0000" / "watermark").unlink()
    counted = mock.patch.object(segments, "parse_header", wraps=parse_header)
    with counted as parse, testing.open_topic(path, clock=lambda: NOW) as topic:
        assert values_of(topic) == [b"first"]
    assert parse.call_count < 10 * fakes


@pytest.mark.parametrize("magics", ["no", "one", "all"])
def test_torn_record_of_words_that_name_their_own_place_is_cut(path: Path, magics: str) -> None:
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        topic.append(b"first", sync=True)
        end = topic.partition(0).log_end_offset
        topic.append(bytes(3 << 20), sync=True)
    segment = last_segment(path)
    stored = bytearray(segment.read_bytes())
    torn = stored[HEADER_BYTES:]
    for place in range(end + 16, len(torn), 24 if magics == "all" else 8):
        torn[place : place + 8] = (place - 16).to_bytes(8, "little")
        if magics == "all":
            torn[place - 16 : place - 12] = b"\x89LLB"
    if magics == "one":
        torn[-2048:-2044] = b"\x89LLB"
    segment.write_bytes(stored[:HEADER_BYTES] + torn)
    tear(path, end)
    (path / "0000" / "watermark").unlink()
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        assert values_of(topic) == [b"first"]


def looks_at(value: bytes) -> list[int]:
    files = MemoryFiles()
    with testing.open_topic("/topic", files=files, **OPENED) as topic:
        for number, each in enumerate((b"small", value, b"small", value, b"small")):
            last = topic.append(each, timestamp=NOW + number, sync=True)
    looks, parsed = [], [0]

    def counting(*arguments: Any, **keywords: Any) -> Header:
        parsed[0] += 1
        return parse_header(*arguments, **keywords)

    for lost in (False, True):
        if lost:
            files.unlink("/topic/0000/watermark")
        uses: list[tuple[Any, Callable[[Topic], object]]] = [
            ("r", lambda topic: topic.read(to_datetime(NOW + 2))),
            ("r", lambda topic: topic.read(last.offset - 40)),
            ("a", lambda topic: topic.partition(0)._access.writer()),
        ]
        for mode, use in uses:
            before = parsed[0]
            counted, refused = mock.patch.object(segments, "parse_header", counting), suppress(InvalidOffsetError)
            with counted, refused, testing.open_topic("/topic", mode=mode, files=files) as topic:
                use(topic)
            looks.append(parsed[0] - before)
    return looks
