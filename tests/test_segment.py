"""segment.py: any byte of a segment finds its batch, and no damaged byte is ever returned as data."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from loglib import CorruptLogError, LogError, StorageIOError, UnsupportedFormatError, batch
from loglib.batch import Columns, Header
from loglib.files import REAL, Files
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
    return [range(each.header.base_offset, each.header.next_offset) for each in read_back(path)]


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
    LOG_ID, 0, 7, 800, NOW, 400, 400, 0xDEADBEEF, NOW - 1, NOW + 1,
    tuple(ProducerState(number + 1, number, 8 * number, 3) for number in range(MAX_PRODUCERS)),
)  # fmt: skip


@pytest.mark.parametrize("header", [first_segment(IDENTITY, created=NOW), FULL], ids=["first", "full"])
def test_header_comes_back(header: SegmentHeader) -> None:
    content = header.encode()
    assert len(content) == HEADER_BYTES
    assert SegmentHeader.decode(content, "a file") == header


def test_first_segment_has_nothing_before_it() -> None:
    header = first_segment(IDENTITY, created=NOW)
    assert (header.base_offset, header.previous_base_offset, header.previous_bytes, header.previous_crc) == (0, 0, 0, 0)
    assert (header.last_append_time, header.running_max_timestamp, header.producers) == (0, NO_TIMESTAMP, ())


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


def test_zeroed_header_is_damage(tmp_path: Path) -> None:
    path = tmp_path / segment_name(0)
    path.write_bytes(bytes(2 * HEADER_BYTES))
    with pytest.raises(CorruptLogError, match=r"byte 0: found bytes 0{16}"):
        opened(path)


def test_more_producers_than_there_is_room_for_are_refused() -> None:
    content = resealed_segment(first_segment(IDENTITY, created=NOW).encode(), 76, struct.pack("<I", MAX_PRODUCERS + 1))
    with pytest.raises(CorruptLogError, match="126 producers") as caught:
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


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def test_new_segment_is_whole_and_replaces_what_a_crash_left(tmp_path: Path) -> None:
    (tmp_path / (segment_name(0) + ".tmp")).write_bytes(b"rubbish")
    fd = create_segment(REAL, str(tmp_path), first_segment(IDENTITY, created=NOW), 0o640)
    os.close(fd)
    assert [entry.name for entry in tmp_path.iterdir()] == [segment_name(0)]
    assert (tmp_path / segment_name(0)).stat().st_mode & 0o777 == 0o640
    with opened(tmp_path / segment_name(0)) as segment:
        assert segment.end_of_file() == 0
        assert segment.batches(0, 8, block_bytes=100) == []


@pytest.mark.parametrize("operation", ["pwritev", "datasync", "rename"])
def test_creation_that_fails_leaves_no_segment_and_no_open_file(tmp_path: Path, operation: str) -> None:
    before = open_files()
    with pytest.raises(OSError, match="Input/output"):
        create_segment(FaultyFiles(operation), str(tmp_path), first_segment(IDENTITY, created=NOW), 0o600)
    assert not (tmp_path / segment_name(0)).exists()
    assert open_files() == before


# --- reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 112, 200, 400, 1 << 20])
def test_batches_are_the_same_in_blocks_of_any_size(small: Path, block_bytes: int) -> None:
    expected = records_of(read_back(small))
    with opened(small) as segment:
        found, offset = [], 0
        block = max(block_bytes, BODY_AT)
        while more := segment.batches(offset, segment.end_of_file(), block_bytes=block):
            found += more
            offset = more[-1].header.next_offset
    assert records_of(found) == expected
    assert [record.value for record in expected][-1] == b"tiny"


def test_limit_ends_the_batches(small: Path) -> None:
    limit = batch_ranges(small)[1].stop
    with opened(small) as segment:
        assert [each.header.next_offset for each in segment.batches(0, limit, block_bytes=1 << 20)][-1] == limit
        assert segment.batches(limit, limit, block_bytes=1 << 20) == []
        assert [header.next_offset for header in segment.headers(0, limit)][-1] == limit


def test_file_position_is_arithmetic(small: Path) -> None:
    with opened(small) as segment:
        for header in segment.headers(0, segment.end_of_file()):
            content = small.read_bytes()[segment.file_position(header.base_offset) :]
            assert header_of(content, header.base_offset) == header == segment.header_at(header.base_offset)


def test_reader_closes_its_file_once(small: Path) -> None:
    before = open_files()
    segment = opened(small)
    fd = segment.fileno()
    segment.close()
    segment.close()
    assert fd >= 0 and segment.fileno() == -1
    dropped = opened(small)
    del dropped
    assert open_files() == before


def test_reader_of_a_bad_segment_closes_its_file_once(tmp_path: Path) -> None:
    # It was closed a second time when the reader was collected: by then its number was another file's.
    path = tmp_path / segment_name(0)
    path.write_bytes(b"no segment")
    closed: list[int] = []

    class Counting(Files):
        def close(self, fd: int) -> None:  # type: ignore[override]
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
        def pread(self, fd: int, size: int, position: int) -> bytes:  # type: ignore[override]
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
                assert range(found.header.base_offset, found.header.next_offset) == expected
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


def test_batches_around_a_damaged_one_stay_readable(small: Path) -> None:
    ranges = batch_ranges(small)
    content = bytearray(small.read_bytes())
    content[HEADER_BYTES + ranges[1].start + BODY_AT] ^= 1
    small.write_bytes(content)
    with opened(small) as segment:
        assert segment.batches(0, ranges[0].stop, block_bytes=1 << 20)[0].values == PLAIN.values
        following = segment.next_header(ranges[1].start + 8, ranges[-1].stop)
        assert following is not None and following.base_offset == ranges[2].start
        assert segment.batches(following.base_offset, ranges[-1].stop, block_bytes=1 << 20)[-1].values == [b"tiny"]


def test_batch_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = write_segment(tmp_path, encoded(Columns([bytes(1000)])))
    with opened(path) as segment, pytest.raises(CorruptLogError, match="at most 800, up to the flushed end") as caught:
        segment.batches(0, 800, block_bytes=400)
    assert caught.value.file_position == HEADER_BYTES + 12


@pytest.mark.parametrize("fields", [{"version": 7}, {"flags": 0x80}, {"codec": 99}], ids=["version", "flag", "codec"])
def test_newer_batch_is_refused_by_name_however_it_is_met(tmp_path: Path, fields: dict[str, int]) -> None:
    stored = chained([PLAIN, PLAIN])
    size = len(stored) // 2
    path = write_segment(tmp_path, stored[:size] + forged(stored[size:], **fields))
    with opened(path) as segment:
        for meet in (
            lambda: segment.batches(size, 2 * size, block_bytes=1 << 20),
            lambda: segment.header_at(size),
            lambda: segment.locate(size + 1, 2 * size),
            lambda: segment.next_header(8, 2 * size),
            lambda: segment.first_reaching(NOW + 1, 2 * size),
            lambda: list(segment.headers(0, 2 * size)),
        ):
            with pytest.raises(UnsupportedFormatError) as caught:
                meet()
            assert caught.value.path == str(path)


# --- finding batches from any byte ------------------------------------------------------------------------


def decoys(choose: random.Random, real: bytes, place: int) -> list[bytes]:
    """Payloads that look like batches: copies, magics, and headers that name their own place."""
    return [
        batch.MAGIC * choose.randrange(1, 60),
        real,
        real[: choose.randrange(BODY_AT)],
        bytes(choose.randrange(8)) + encoded(PLAIN, place),
        bytes(choose.randrange(8)) + encoded(PLAIN, place, identity=Identity.of(LOG_ID, 1)),
        choose.randbytes(choose.randrange(6000)),
    ]


def tricky(seed: int, count: int = 12) -> bytes:
    """Batches whose payloads try to look like batches."""
    choose = random.Random(seed)
    stored, previous, running = b"", encoded(PLAIN), NO_TIMESTAMP
    for _ in range(count):
        values = choose.sample(decoys(choose, previous, len(stored) + 8 * choose.randrange(30)), 3)
        times = [NOW + choose.randrange(1000) for _ in values]
        running = max(running, *times)
        previous = encoded(Columns(values, timestamps=times), len(stored), running_max=running)
        stored += previous
    return stored


def headers_in(stored: bytes) -> list[Header]:
    headers, at = [], 0
    while at < len(stored):
        headers.append(header_of(stored[at:], at))
        at = headers[-1].next_offset
    return headers


def steps(stored: bytes) -> Iterator[tuple[int, Header, Header | None]]:
    """Each offset, the batch that holds it and the first that begins at or after it."""
    headers = headers_in(stored)
    for number, header in enumerate(headers):
        following = headers[number + 1] if number + 1 < len(headers) else None
        for offset in range(header.base_offset, header.next_offset):
            yield offset, header, header if offset == header.base_offset else following


@pytest.mark.parametrize("seed", range(3))
def test_any_byte_finds_its_batch_and_the_next(tmp_path: Path, seed: int) -> None:
    stored = tricky(seed)
    with opened(write_segment(tmp_path, stored)) as segment:
        for offset, here, following in steps(stored):
            if offset % 7 and offset not in range(here.base_offset - 9, here.base_offset + 130):
                continue
            assert segment.locate(offset, len(stored)) == here, f"seed {seed}, offset {offset}"
            assert segment.next_header(offset, len(stored)) == following, f"seed {seed}, offset {offset}"


def test_every_byte_of_a_small_segment_finds_its_batch_and_the_next(small: Path) -> None:
    stored = small.read_bytes()[HEADER_BYTES:]
    with opened(small) as segment:
        for offset, here, following in steps(stored):
            assert segment.locate(offset, len(stored)) == here
            assert segment.next_header(offset, len(stored)) == following


@pytest.mark.parametrize("size", [4096 - BODY_AT, 5000, 70_000, 2_500_000])
def test_batch_larger_than_the_search_window_is_found(tmp_path: Path, size: int) -> None:
    stored = chained([TINY, Columns([random.Random(size).randbytes(size)]), TINY])
    first, large, last = headers_in(stored)
    with opened(write_segment(tmp_path, stored)) as segment:
        for offset in (large.base_offset, large.base_offset + size // 2, large.next_offset - 1):
            assert segment.locate(offset, len(stored)) == large
        assert segment.next_header(1, len(stored)) == large
        assert segment.next_header(large.base_offset + 1, len(stored)) == last
        assert segment.next_header(last.base_offset + 1, len(stored)) is None
        assert segment.locate(0, len(stored)) == first
        assert segment.next_header(len(stored), len(stored)) is None


def test_ranges_that_cover_a_segment_have_each_batch_once(tmp_path: Path) -> None:
    stored = tricky(7)
    expected = headers_in(stored)
    with opened(write_segment(tmp_path, stored)) as segment:
        for parts in (1, 2, 3, 17, 200):
            bounds = [len(stored) * part // parts for part in range(parts + 1)]
            found = []
            for low, high in pairwise(bounds):
                header = segment.next_header(low, high)
                while header is not None:
                    found.append(header)
                    header = segment.next_header(header.base_offset + 1, high)
            assert found == expected, f"{parts} parts"


def test_batch_that_begins_at_an_odd_place_is_none(tmp_path: Path) -> None:
    # Whole and salted, but where no writer puts one: a payload must not choose where batches begin.
    inner = encoded(PLAIN, BODY_AT + 8 + 4)
    stored = encoded(Columns([bytes(4) + inner]))
    with opened(write_segment(tmp_path, stored)) as segment:
        assert segment.locate(len(stored) - 1, len(stored)).base_offset == 0
        assert segment.next_header(1, len(stored)) is None


def test_offset_in_a_damaged_batch_is_reported_where_the_damage_is(small: Path) -> None:
    ranges = batch_ranges(small)
    content = bytearray(small.read_bytes())
    content[HEADER_BYTES + ranges[1].start] ^= 1
    small.write_bytes(content)
    with opened(small) as segment:
        for offset in ranges[1]:
            with pytest.raises(CorruptLogError, match=f"the batch that holds offset {offset}") as caught:
                segment.locate(offset, ranges[-1].stop)
            assert caught.value.file_position == HEADER_BYTES + ranges[1].start
    content[HEADER_BYTES] ^= 1
    small.write_bytes(content)
    with opened(small) as segment, pytest.raises(CorruptLogError, match="no batch header") as caught:
        segment.locate(5, ranges[-1].stop)
    assert caught.value.file_position == HEADER_BYTES


def test_header_at_a_place_where_none_begins_is_damage(small: Path) -> None:
    with opened(small) as segment, pytest.raises(CorruptLogError) as caught:
        segment.header_at(8)
    assert caught.value.file_position == HEADER_BYTES + 8


# --- time -----------------------------------------------------------------------------------------------


@settings(calm, max_examples=60)
@given(times=st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=3), min_size=1, max_size=20))
def test_first_reaching_agrees_with_a_scan(tmp_path_factory: pytest.TempPathFactory, times: list[list[int]]) -> None:
    stored = chained([Columns([bytes(50 * abs(each[0])) for _ in each], timestamps=each) for each in times])
    headers = headers_in(stored)
    path = write_segment(tmp_path_factory.mktemp("times"), stored)
    with opened(path) as segment:
        for timestamp in range(-52, 53):
            reaching = [header for header in headers if header.running_max_timestamp >= timestamp]
            assert segment.first_reaching(timestamp, len(stored)) == (reaching[0] if reaching else None)
        half = headers[len(headers) // 2].base_offset
        assert segment.first_reaching(NOW, half) is None


def test_first_reaching_finds_nothing_in_an_empty_segment(tmp_path: Path) -> None:
    with opened(write_segment(tmp_path, b"")) as segment:
        assert segment.first_reaching(0, 0) is None


def test_size_of_a_segment_counts_batches() -> None:
    assert SegmentInfo("a file", 100, 164, True, NOW, None).size_bytes == 64
