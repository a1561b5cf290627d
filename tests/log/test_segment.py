"""segment.py: any byte of a segment finds its batch, and no damaged byte is ever returned as data."""

from __future__ import annotations

import errno
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from builders import (
    BODY_AT,
    EVERYTHING,
    IDENTITY,
    LOG_ID,
    NOW,
    PLAIN,
    calm,
    chained,
    encoded,
    forged,
    header_of,
    read_back,
    records_of,
    resealed_segment,
    write_segment,
)
from hypothesis import given
from hypothesis import strategies as st

from conftest import opened_since, settled_files
from loglib import CorruptLogError, LogError, StorageIOError, UnsupportedFormatError
from loglib.format.columns import Columns
from loglib.log.search import around, first_reaching
from loglib.segment import (
    HEADER_BYTES,
    MAX_PRODUCERS,
    NO_TIMESTAMP,
    Identity,
    ProducerState,
    SegmentHeader,
    SegmentInfo,
    SegmentReader,
    create_segment,
    first_segment,
    parse_segment_name,
    read_segment_header,
    segment_name,
)
from loglib.system.directory import Directory
from loglib.system.files import REAL, Files
from loglib.testing import FaultyFiles

TINY = Columns([b"tiny"])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A segment of four batches, plain and compressed."""
    stored = b""
    for columns, codec in ((PLAIN, 0), (EVERYTHING, 0), (Columns([b"z" * 200]), 1), (TINY, 0)):
        stored += encoded(columns, len(stored), codec=codec)
    return write_segment(tmp_path, stored)


def opened(path: Path, identity: Identity = IDENTITY) -> SegmentReader:
    return SegmentReader(REAL, str(path), identity)


def batch_ranges(path: Path) -> list[range]:
    """The bytes of each batch, as offsets."""
    return [range(each._header.base_offset, each._header.next_offset) for each in read_back(path)]


# --- names --------------------------------------------------------------------------------------------


@calm
@given(st.integers(0, 10**20 - 1))
def test_name_of_a_segment_states_its_base_offset(base_offset: int) -> None:
    assert parse_segment_name(segment_name(base_offset)) == base_offset


@pytest.mark.parametrize(
    "name",
    ["", ".log", "watermark", "lock", "0.log", "0" * 21 + ".log", "0" * 20, "0" * 20 + ".log.tmp", "0" * 20 + ".LOG",
     "0" * 20 + ".torn-4096", "-" + "0" * 19 + ".log", "١" * 20 + ".log", " " + "0" * 19 + ".log", "0" * 20 + ".log\n"],
)  # fmt: skip
def test_other_names_are_no_segments(name: str) -> None:
    assert parse_segment_name(name) is None


# --- header -------------------------------------------------------------------------------------------

FULL = SegmentHeader(
    LOG_ID, 0, 7, 800, NOW, 400, 400, 0xDEADBEEF, NOW - 1, NOW + 1, 1, 2, 3, 4, 5, 6, LOG_ID, 7, 8,
    9, 10, 11, 12, 13, 14,
    tuple(ProducerState(number + 1, number, 8 * number, 3) for number in range(MAX_PRODUCERS)), 0x8100,
)  # fmt: skip


@pytest.mark.parametrize("header", [first_segment(IDENTITY, created=NOW), FULL], ids=["first", "full"])
def test_encoded_header_decodes_to_the_same(header: SegmentHeader) -> None:
    content = header.encode()
    assert len(content) == HEADER_BYTES
    assert SegmentHeader.decode(content, "a file") == header


def test_first_segment_has_nothing_before_it() -> None:
    header = first_segment(IDENTITY, created=NOW)
    assert (header.base_offset, header.previous_base_offset, header.previous_bytes, header.previous_crc) == (0, 0, 0, 0)
    assert (header.last_append_time, header.running_max_timestamp, header.producers) == (0, NO_TIMESTAMP, ())
    assert header.previous_batch == 0


def test_no_flip_in_a_segment_header_is_accepted() -> None:
    content = bytearray(FULL._replace(producers=FULL.producers[:2]).encode())
    for bit in range(8 * HEADER_BYTES):
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptLogError) as caught:
            SegmentHeader.decode(bytes(content), "the path")
        assert (caught.value.path, caught.value.file_position) == ("the path", 0 if bit < 64 else 12)
        content[bit // 8] ^= 1 << bit % 8


def test_no_prefix_of_a_segment_header_is_accepted(tmp_path: Path) -> None:
    content = first_segment(IDENTITY, created=NOW).encode()
    path = tmp_path / segment_name(0)
    for size in [*range(200), *range(200, HEADER_BYTES, 311), HEADER_BYTES - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(CorruptLogError, match="the end of the file") as caught:
            opened(path)
        assert caught.value.file_position == size


def test_last_batch_from_before_the_log_began_is_damage() -> None:
    """It was believed: recovery without a watermark then ended in a `struct.error`."""
    with pytest.raises(CorruptLogError, match="last batch of 801 bytes before offset 800") as caught:
        SegmentHeader.decode(FULL._replace(previous_batch_bytes=801).encode(), "a file")
    assert caught.value.file_position == 124
    assert SegmentHeader.decode(FULL._replace(previous_batch_bytes=800).encode(), "a file").previous_batch == 0


def test_zeroed_header_is_damage(tmp_path: Path) -> None:
    path = tmp_path / segment_name(0)
    path.write_bytes(bytes(2 * HEADER_BYTES))
    with pytest.raises(CorruptLogError, match=r"byte 0: found bytes 0{16}"):
        opened(path)


def test_more_producers_than_there_is_room_for_are_refused() -> None:
    content = resealed_segment(first_segment(IDENTITY, created=NOW).encode(), 76, struct.pack("<I", MAX_PRODUCERS + 1))
    with pytest.raises(CorruptLogError, match="122 producers") as caught:
        SegmentHeader.decode(content, "a file")
    assert caught.value.file_position == 76


@pytest.mark.parametrize(("at", "what"), [(8, "segment version"), (10, "segment flags")])
def test_newer_segment_is_refused_by_name(at: int, what: str) -> None:
    content = resealed_segment(first_segment(IDENTITY, created=NOW).encode(), at, b"\x09\0")
    with pytest.raises(UnsupportedFormatError, match=f"{what} 9 is newer"):
        SegmentHeader.decode(content, "a file")


def test_base_offset_beyond_the_last_one_is_damage() -> None:
    content = resealed_segment(first_segment(IDENTITY, created=NOW).encode(), 40, b"\xf8" + b"\xff" * 7)
    with pytest.raises(CorruptLogError, match="byte 40: found base offset 1844"):
        SegmentHeader.decode(content, "a file")


def test_version_zero_is_no_version() -> None:
    content = resealed_segment(first_segment(IDENTITY, created=NOW).encode(), 8, b"\0\0")
    with pytest.raises(CorruptLogError, match="byte 8: found segment version 0"):
        SegmentHeader.decode(content, "a file")


@pytest.mark.parametrize(
    ("identity", "at"),
    [(Identity.of(LOG_ID, 1), 16), (Identity.of(LOG_ID[::-1], 0), 16)],
    ids=["another-partition", "another-log"],
)
def test_segment_of_another_log_is_refused(small: Path, identity: Identity, at: int) -> None:
    with pytest.raises(CorruptLogError, match="a segment of log") as caught:
        opened(small, identity)
    assert caught.value.file_position == at


def test_segment_under_another_name_is_refused(small: Path) -> None:
    moved = small.rename(small.with_name(segment_name(8)))
    with pytest.raises(CorruptLogError, match="base offset 0") as caught:
        read_segment_header(REAL, str(moved), IDENTITY)
    assert caught.value.file_position == 40


def test_header_alone_can_be_read(small: Path) -> None:
    assert read_segment_header(REAL, str(small), IDENTITY) == first_segment(IDENTITY, created=NOW)


# --- creation -------------------------------------------------------------------------------------------


def test_new_segment_is_whole_and_replaces_what_a_crash_left(tmp_path: Path) -> None:
    (tmp_path / (segment_name(0) + ".tmp")).write_bytes(b"rubbish")
    with Directory.open(REAL, str(tmp_path)) as directory:
        os.close(create_segment(directory, first_segment(IDENTITY, created=NOW), 0o640))
    assert [entry.name for entry in tmp_path.iterdir()] == [segment_name(0)]
    assert (tmp_path / segment_name(0)).stat().st_mode & 0o777 == 0o640
    with opened(tmp_path / segment_name(0)) as segment:
        assert segment.end_of_file() == 0
        assert segment.batches(0, 8, block_bytes=100) == []


@pytest.mark.parametrize("operation", ["pwritev", "datasync", "rename"])
def test_creation_that_fails_leaves_no_segment_and_no_open_file(tmp_path: Path, operation: str) -> None:
    before = settled_files()
    with (
        Directory.open(FaultyFiles(operation), str(tmp_path)) as directory,
        pytest.raises(OSError, match="Input/output"),
    ):
        create_segment(directory, first_segment(IDENTITY, created=NOW), 0o600)
    assert not (tmp_path / segment_name(0)).exists()
    assert not opened_since(before)


# --- reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 112, 200, 400, 1 << 20])
def test_batches_are_the_same_in_blocks_of_any_size(small: Path, block_bytes: int) -> None:
    expected = records_of(read_back(small))
    with opened(small) as segment:
        found, offset = [], 0
        block = max(block_bytes, BODY_AT)
        while more := segment.batches(offset, segment.end_of_file(), block_bytes=block):
            found += more
            offset = more[-1]._header.next_offset
    assert records_of(found) == expected
    assert [record.value for record in expected][-1] == b"tiny"


def test_no_batch_is_read_beyond_the_limit(small: Path) -> None:
    limit = batch_ranges(small)[1].stop
    with opened(small) as segment:
        assert [each._header.next_offset for each in segment.batches(0, limit, block_bytes=1 << 20)][-1] == limit
        assert segment.batches(limit, limit, block_bytes=1 << 20) == []
        assert [header.next_offset for header in segment.headers(0, limit)][-1] == limit


def test_file_position_is_arithmetic(small: Path) -> None:
    with opened(small) as segment:
        for header in segment.headers(0, segment.end_of_file()):
            content = small.read_bytes()[segment.file_position(header.base_offset) :]
            assert header_of(content, header.base_offset) == header == segment.header_at(header.base_offset)


def test_reader_closes_its_file_once(small: Path) -> None:
    before = settled_files()
    segment = opened(small)
    fd = segment.fileno()
    segment.close()
    segment.close()
    assert fd >= 0 and segment.fileno() == -1
    dropped = opened(small)
    del dropped
    assert not opened_since(before)


def test_reader_of_a_bad_segment_closes_its_file_once(tmp_path: Path) -> None:
    # It was closed a second time when the reader was collected: by then its number was another file's.
    path = tmp_path / segment_name(0)
    path.write_bytes(b"no segment")
    closed: list[int] = []

    class Counting(Files):
        def close(self, fd: int) -> None:
            closed.append(fd)
            os.close(fd)

    for _ in range(3):
        with pytest.raises(CorruptLogError):
            SegmentReader(Counting(), str(path), IDENTITY)
    assert len(closed) == 3


def test_missing_segment_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / segment_name(0))


@pytest.mark.parametrize("place", ["header", "body"])
def test_read_error_is_neither_damage_nor_the_end(small: Path, place: str) -> None:
    class Broken(Files):
        def pread(self, fd: int, size: int, position: int) -> bytes:
            if (place == "header") == (position == 0):
                raise OSError(errno.EIO, "Input/output error")
            return os.pread(fd, size, position)

    with pytest.raises(StorageIOError) as caught, SegmentReader(Broken(), str(small), IDENTITY) as segment:
        segment.batches(0, 100, block_bytes=100)
    assert caught.value.errno == errno.EIO
    assert str(small) in str(caught.value)


# --- damage: every flip, every cut -----------------------------------------------------------------------


def read_or_refuse(path: Path, end: int) -> list[object] | LogError:
    try:
        return list(records_of(read_back(path, limit=end)))
    except LogError as error:
        return error


def test_flipped_bit_is_never_returned(small: Path) -> None:
    content = small.read_bytes()
    ranges = batch_ranges(small)
    end = ranges[-1].stop
    with small.open("r+b", buffering=0) as file:
        for at in range(HEADER_BYTES, len(content)):
            for bit in range(8):
                file.seek(at)
                file.write(bytes([content[at] ^ 1 << bit]))
                found = read_or_refuse(small, end)
                assert isinstance(found, CorruptLogError), f"byte {at}, bit {bit}: {found}"
                assert found.path == str(small)
                (damaged,) = [each for each in ranges if at - HEADER_BYTES in each]
                assert found.file_position - HEADER_BYTES in damaged, f"byte {at}, bit {bit}: {found}"
            file.seek(at)
            file.write(content[at : at + 1])


def test_cut_segment_is_never_taken_for_a_whole_one(small: Path) -> None:
    content = small.read_bytes()
    ranges = batch_ranges(small)
    for size in range(HEADER_BYTES, len(content)):
        small.write_bytes(content[:size])
        end = size - HEADER_BYTES
        whole = [each for each in ranges if each.stop <= end]
        with opened(small) as segment:
            offset = 0
            for expected in whole:
                (found, *_) = segment.batches(offset, ranges[-1].stop, block_bytes=BODY_AT)
                assert range(found._header.base_offset, found._header.next_offset) == expected
                offset = expected.stop
            if offset == end:
                assert segment.batches(offset, ranges[-1].stop, block_bytes=1 << 20) == [], "the end of the file"
            else:
                with pytest.raises(CorruptLogError, match="the end of the") as caught:
                    segment.batches(offset, ranges[-1].stop, block_bytes=1 << 20)
                assert caught.value.file_position == size


@pytest.mark.parametrize("sector", [64, 512])
def test_zeroed_sector_is_never_returned(small: Path, sector: int) -> None:
    content = small.read_bytes()
    end = len(content) - HEADER_BYTES
    for at in range(HEADER_BYTES, len(content), sector):
        zeroed = content[:at] + bytes(min(sector, len(content) - at)) + content[at + sector :]
        if zeroed == content:
            continue
        small.write_bytes(zeroed)
        assert isinstance(read_or_refuse(small, end), CorruptLogError), f"zeros at byte {at}"


@pytest.mark.parametrize("sector", [8, 64])
def test_swapped_sectors_are_never_returned(small: Path, sector: int) -> None:
    content = small.read_bytes()
    choose = random.Random(sector)
    for _ in range(200):
        one, other = sorted(choose.sample(range(HEADER_BYTES, len(content) - sector, sector), 2))
        a, b = content[one : one + sector], content[other : other + sector]
        if a == b or one + sector > other:
            continue
        swapped = content[:one] + b + content[one + sector : other] + a + content[other + sector :]
        small.write_bytes(swapped)
        assert isinstance(read_or_refuse(small, len(content) - HEADER_BYTES), CorruptLogError), (one, other)


def test_batch_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = write_segment(tmp_path, encoded(Columns([bytes(1000)])))
    with opened(path) as segment, pytest.raises(CorruptLogError, match="at most 800, up to the flushed end") as caught:
        segment.batches(0, 800, block_bytes=400)
    assert caught.value.file_position == HEADER_BYTES + 12


@pytest.mark.parametrize("fields", [{"version": 7}, {"flags": 0x80}, {"codec": 99}], ids=["version", "flag", "codec"])
def test_newer_batch_is_refused_by_name_however_it_is_met(tmp_path: Path, fields: dict[str, Any]) -> None:
    stored = chained([PLAIN, PLAIN])
    size = len(stored) // 2
    path = write_segment(tmp_path, stored[:size] + forged(stored[size:], **fields))
    with opened(path) as segment:
        for meet in (
            lambda: segment.batches(size, 2 * size, block_bytes=1 << 20),
            lambda: segment.header_at(size),
            lambda: around(segment, size + 1, size, 2 * size),
            lambda: first_reaching(segment, NOW + 1, size, 2 * size),
            lambda: list(segment.headers(0, 2 * size)),
        ):
            with pytest.raises(UnsupportedFormatError) as caught:
                meet()
            assert caught.value.path == str(path)


# --- headers -------------------------------------------------------------------------------------------


def test_header_at_a_place_where_none_begins_is_damage(small: Path) -> None:
    with opened(small) as segment, pytest.raises(CorruptLogError) as caught:
        segment.header_at(8)
    assert caught.value.file_position == HEADER_BYTES + 8


def test_size_of_a_segment_counts_batches() -> None:
    assert SegmentInfo("a file", 100, 164, True, NOW, None).size_bytes == 64
