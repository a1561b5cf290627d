"""columns.py: records by column to bytes and back; forged columns end in CorruptLogError with file and byte."""

from __future__ import annotations

import gc
import random
import struct
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from builders import BODY_AT, EVERYTHING, PLAIN, batch_of, calm, encoded, forged, header_of, read_back, write_segment
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import run_python
from loglib import Batch, CorruptLogError, LogError, RecordTooLargeError, Topic
from loglib.format import columns
from loglib.format.columns import Columns
from loglib.format.header import encode_body, layout
from loglib.segment import HEADER_BYTES


class Text(bytes):
    """Bytes of a class of its own."""

    def __new__(cls, text: str) -> Text:
        return super().__new__(cls, text.encode())


@pytest.fixture(autouse=True, params=["standard library", "arrow"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are sliced in one of two ways, by how many they are; here each way takes all of them."""
    monkeypatch.setattr(columns, "_ARROW_LEAST", 1 if request.param == "arrow" else 1 << 40)


# --- there and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65])
def test_nulls_come_back_whatever_their_number(count: int) -> None:
    for period in (1, 2, 3, 5):
        values = [None if i % period == 0 else b"%d" % i for i in range(count)]
        keys = [b"" if i % period == 0 else None for i in range(count)]
        found = batch_of(encoded(Columns(values, keys)))
        assert (found.values, found.keys) == (values, keys)


def test_unused_columns_take_no_room() -> None:
    assert header_of(encoded(PLAIN)).flags == 0
    assert header_of(encoded(Columns([b"x"] * 2, timestamps=[5, 5]))).flags == 0, "equal timestamps need no column"
    assert header_of(encoded(Columns([b"x"] * 2, headers=[(), ()]))).flags == 0
    assert header_of(encoded(EVERYTHING)).flags == 31
    assert len(encoded(Columns([b"12345678"]))) == BODY_AT + 8 + 8


def test_falling_timestamps_need_their_column() -> None:
    header = header_of(encoded(Columns([b"a", b"b"], timestamps=[9, 3])))
    assert (header.flags, header.base_timestamp, header.max_timestamp) == (columns.TIMESTAMPS, 9, 9)


def test_part_takes_the_same_records_of_each_column() -> None:
    part = EVERYTHING.part(slice(1, 3))
    assert EVERYTHING.keys and EVERYTHING.timestamps and EVERYTHING.headers
    cut: list[Any] = [column[1:3] for column in EVERYTHING if column is not None]
    assert part == Columns(*cut)
    assert PLAIN.part(slice(1, 3)) == Columns([b"beta", b"gamma"])


ITEMS = st.lists(st.binary(max_size=9) | st.binary(min_size=5, max_size=5).map(bytearray), min_size=1, max_size=1200)


@settings(calm, max_examples=60)
@given(items=ITEMS, odd=st.sampled_from([None, memoryview(b"view"), Text("of a class of its own")]), at=st.integers(0))
def test_both_ways_to_make_a_column_make_the_same(items: list[Any], odd: Any, at: int) -> None:
    for values in (items, [*items[: at % len(items)], odd, *items]):
        made = []
        for may in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(columns, "_may_use_arrow", lambda may=may: may)
                patch.setattr(columns, "_ARROW_LEAST", 1)
                made.append(encoded(Columns(values, values)))
        assert made[0] == made[1]


@pytest.mark.parametrize("odd", ["text", 7, memoryview(array("i", [1, 2]))], ids=["text", "number", "numbers"])
@pytest.mark.parametrize("count", [0, 700])
def test_neither_way_takes_what_is_not_bytes(odd: Any, count: int) -> None:
    """Arrow by itself would take text."""
    values = [b"x" * (n % 5) for n in range(count)]
    with pytest.raises(TypeError):
        columns.encode(Columns([*values, odd, b"xy"]))


def test_items_that_arrow_would_keep_in_chunks_are_joined_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it does above 2 GiB."""
    values: list[bytes | None] = [b"x" * (n % 5) for n in range(700)]
    whole = encoded(Columns(values))
    made = pa.array
    monkeypatch.setattr(pa, "array", lambda *arguments: pa.chunked_array([made(*arguments)]))
    assert encoded(Columns(values)) == whole


def test_limit_counts_before_much_is_copied_and_after() -> None:
    values = [b"x" * (100 + n % 7) for n in range(800)]
    size = sum(map(len, values))
    for limit in (size - 1, size // 3):
        with pytest.raises(RecordTooLargeError):
            columns.encode(Columns(values), limit_bytes=limit)
    assert columns.encode(Columns(values), limit_bytes=size).value_bytes == size


@pytest.mark.parametrize("piece_bytes", [1, 7, 64])
def test_pieces_that_are_joined_apart_make_the_same_batch(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoded(EVERYTHING)
    monkeypatch.setattr(columns, "_PIECE_BYTES", piece_bytes)
    assert encoded(EVERYTHING) == whole
    assert len(columns.encode(Columns([b"x"] * 5000)).parts) < 1024  # the most that one write takes


def test_nulls_among_a_million_records_are_found_in_linear_time() -> None:
    # One shift of a large number for each record took minutes here.
    count = 1 << 20
    values = [None if i % 3 else b"" for i in range(count)]
    assert batch_of(encoded(Columns(values))).values == values


def test_columns_of_numbers_are_read_on_a_big_endian_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # What byteswap does to an array is the same everywhere: the numbers must come back swapped here.
    data = struct.pack(">3i", 1, -2, 3) + struct.pack(">q", -5)
    monkeypatch.setattr(sys, "byteorder", "big")
    assert columns._integers("i", data, 0, 3) == [1, -2, 3]
    assert columns._integers("q", data, 12, 1) == [-5]


def test_columns_that_are_kept_for_the_next_batch_are_small_together() -> None:
    """They were kept by number: 16 batches of a million records left 200 MB behind."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for count in [*range(8_100, 8_116), *range(65_520, 65_536), *range(300_000, 300_016)]:
            found = batch_of(encoded(Columns([b""] * count)))
            assert found.values[-1] == b""
        del found
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 10_000_000
    finally:
        tracemalloc.stop()


# --- limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1 << 26] * 32, [1 << 30, 1 << 30, 1]], ids=["uniform", "mixed"])
def test_column_beyond_32_bits_is_refused_before_it_is_joined(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sized(bytes):
        def __len__(self) -> int:
            return next(left)

    left = iter(sizes)
    monkeypatch.setattr(columns, "_may_use_arrow", lambda: False)
    with pytest.raises(RecordTooLargeError) as caught:
        columns.encode(Columns([Sized()] * len(sizes)))
    assert caught.value.size_bytes == sum(sizes)


def test_item_whose_length_is_not_its_size_is_refused() -> None:
    with pytest.raises(TypeError, match="length"):
        columns.encode(Columns([memoryview(array("i", [1, 2]))]))  # type: ignore[list-item]


def test_columns_beyond_the_limit_are_refused() -> None:
    encode_body(Columns([bytes(500)], [bytes(500)]), codec=0, limit_bytes=1000)
    with pytest.raises(RecordTooLargeError) as caught:
        encode_body(Columns([bytes(500)], [bytes(501)]), codec=1, limit_bytes=1000)
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (1001, 1000)


def test_uniform_offsets_are_those_of_any_column() -> None:
    for size in (0, 1, 200):
        assert columns._uniform_offsets(size, 3) == struct.pack("<4i", 0, size, 2 * size, 3 * size)


# --- forged columns: every checksum is right, the numbers in the body are not -----------------------------


def changed(at: Callable[[Any], int], *numbers: int) -> bytes:
    """A batch with every column in which these int32 stand at a place in the body instead."""
    stored = encoded(EVERYTHING)
    body = bytearray(stored[BODY_AT:])
    struct.pack_into(f"<{len(numbers)}i", body, at(layout(header_of(stored))), *numbers)
    return forged(stored, body=bytes(body))


BIG, LEAST = 0x7FFFFFFF, -0x80000000
FORGED = [
    pytest.param(changed(lambda at: at.values.offsets, 1), ["values"], id="values-not-from-0"),
    pytest.param(changed(lambda at: at.values.offsets, 0, -1), ["values"], id="value-offset-negative"),
    pytest.param(changed(lambda at: at.values.offsets, 0, 7, 3), ["values"], id="value-offsets-falling"),
    pytest.param(changed(lambda at: at.values.offsets, 0, BIG), ["values"], id="value-offset-wild"),
    pytest.param(changed(lambda at: at.values.offsets + 20, 11), ["values"], id="values-end-early"),
    pytest.param(changed(lambda at: at.values.offsets + 20, BIG), ["values"], id="values-end-beyond"),
    pytest.param(changed(lambda at: at.keys.offsets, 0, LEAST), ["keys"], id="key-offset-wild"),
    pytest.param(changed(lambda at: at.keys.offsets + 20, 0), ["keys"], id="keys-end-at-0"),
    pytest.param(changed(lambda at: at.headers.counts, 1), ["headers"], id="counts-not-from-0"),
    pytest.param(changed(lambda at: at.headers.counts, 0, -1), ["headers"], id="count-negative"),
    pytest.param(changed(lambda at: at.headers.counts + 20, -1), ["headers"], id="counts-end-negative"),
    pytest.param(changed(lambda at: at.headers.counts + 20, LEAST), ["headers"], id="counts-end-least"),
    pytest.param(changed(lambda at: at.headers.counts + 20, BIG), ["headers"], id="counts-end-beyond"),
    pytest.param(changed(lambda at: at.headers.counts + 20, 5), ["headers"], id="one-header-more"),
    pytest.param(changed(lambda at: at.headers.counts, 0, 4, 3), ["headers"], id="counts-falling"),
    pytest.param(changed(lambda at: at.headers.section, 1), ["headers"], id="names-not-from-0"),
    pytest.param(changed(lambda at: at.headers.section + 4, 9, 1), ["headers"], id="name-offsets-falling"),
    pytest.param(changed(lambda at: at.headers.section + 16, BIG), ["headers"], id="names-end-beyond"),
    pytest.param(changed(lambda at: at.headers.section + 16, -1), ["headers"], id="names-end-negative"),
    pytest.param(changed(lambda at: at.headers.section + 24, 1), ["headers"], id="header-values-not-from-0"),
    pytest.param(changed(lambda at: at.headers.section + 40, BIG), ["headers"], id="header-values-end-beyond"),
    pytest.param(changed(lambda at: at.headers.section + 40, LEAST), ["headers"], id="header-values-end-least"),
    pytest.param(changed(lambda at: at.headers.section + 48, -1), ["headers"], id="name-no-utf-8"),
]
VIEWS: dict[str, Callable[[Batch], Any]] = {
    "values": lambda found: found.values,
    "keys": lambda found: found.keys,
    "headers": lambda found: found.headers,
    "records": lambda found: found.records(),
    "arrow": lambda found: found.to_arrow(),
}


@pytest.mark.parametrize("codec", [0, 1], ids=["none", "zlib"])
@pytest.mark.parametrize(("stored", "columns"), FORGED)
def test_forged_columns_are_refused_with_file_and_byte(
    tmp_path: Path, stored: bytes, columns: list[str], codec: int
) -> None:
    from loglib.format.codec import compress

    header = header_of(stored)
    if codec:
        body = compress(codec, stored[BODY_AT:])
        stored = forged(stored, body=body, codec=codec, stored_bytes=len(body))
    first = encoded(PLAIN)
    moved = forged(stored, base_offset=len(first))
    path = write_segment(tmp_path, first + moved)
    for name, view in VIEWS.items():
        good, bad = read_back(path)
        assert good.records()
        if name in [*columns, "records", "arrow"]:
            with pytest.raises(CorruptLogError) as caught:
                view(bad)
            assert caught.value.path == str(path)
            body_starts = HEADER_BYTES + len(first) + BODY_AT
            at: Any = layout(header)  # with every column
            place = {"values": at.values.offsets, "keys": at.keys.offsets, "headers": at.headers.section}[columns[0]]
            found = caught.value.file_position - body_starts
            assert found == 0 if codec else found in range(place - 72, place + 56), (name, found, place)
        else:
            view(bad)


@pytest.mark.parametrize("stored", [changed(lambda at: at.values.validity, -1)], ids=["bits-beyond-the-last-record"])
def test_bits_beyond_the_last_record_mean_nothing(stored: bytes) -> None:
    found = batch_of(stored)
    assert found.values == [b"one", b"", b"", b"four", "fünf".encode()]
    assert found.to_arrow()["value"].to_pylist() == found.values


def test_null_with_bytes_is_null() -> None:
    stored = encoded(Columns([b"abc", None]))
    at = layout(header_of(stored)).values.validity
    assert at is not None
    body = bytearray(stored[BODY_AT:])
    body[at] = 0
    found = batch_of(forged(stored, body=bytes(body)))
    assert found.values == [None, None] == found.to_arrow()["value"].to_pylist()


@pytest.mark.parametrize("flags", [2 | 4, 4, 1 | 4], ids=["no-keys-but-null-keys", "only-null-keys", "keys"])
def test_any_combination_of_known_flags_is_read_or_refused(flags: int) -> None:
    body = bytearray(200)
    at = layout(header_of(encoded(PLAIN))._replace(flags=flags, key_bytes=0))
    body = body[: at.end]
    struct.pack_into("<4i", body, 0, 0, 5, 9, 14)
    found = batch_of(forged(encoded(PLAIN), body=bytes(body), flags=flags, stored_bytes=at.end))
    assert len(found.records()) == 3
    assert found.to_arrow().num_rows == 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("codec", [0, 1, 2, 3], ids=["none", "zlib", "lz4", "zstd"])
def test_body_of_random_bytes_never_breaks_a_reader(codec: int, seed: int) -> None:
    choose = random.Random(seed)
    everything: list[Any] = [column for column in EVERYTHING if column]
    stored = encoded(Columns(*(column * 20 for column in everything)), codec=codec)
    refused = 0
    for _ in range(300):
        body = bytearray(stored[BODY_AT:])
        for _ in range(choose.choice([1, 1, 2, 8])):
            at = choose.randrange(len(body))
            body[at : at + 4] = choose.choice([b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f", choose.randbytes(4)])
        damaged = forged(stored, body=bytes(body[: len(stored) - BODY_AT]))
        for view in VIEWS.values():
            try:
                view(batch_of_or_error(damaged))
            except LogError:
                refused += 1
    assert refused > 50, f"seed {seed}"


def batch_of_or_error(stored: bytes) -> Batch:
    """As a segment reader would: what a bad batch means for the caller."""
    from loglib.format.header import BadBatch

    try:
        return batch_of(stored)
    except BadBatch as error:
        raise CorruptLogError("here", error.at, error.found, error.expected) from error


def test_a_reader_does_not_import_arrow(tmp_path: Path) -> None:
    """It would need more memory than all that a reader keeps."""
    with Topic.open(tmp_path / "topic", create=True) as topic:
        topic.append_many([b"x" * size for size in range(1000)])
    assert run_python(READ, tmp_path / "topic").split() == ["1000", "False"]


READ = """
import sys
from loglib import Topic
with Topic.open(sys.argv[1], mode="r") as topic:
    print(sum(1 for _ in topic.read()), "pyarrow" in sys.modules)
"""
