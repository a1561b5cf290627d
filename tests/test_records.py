"""records.py: batches as columns and records; forged columns end in CorruptLogError with file and byte."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import (
    BODY_AT,
    EVERYTHING,
    NOW,
    PLAIN,
    batch_of,
    calm,
    chained,
    columns_of,
    encoded,
    forged,
    header_of,
    read_back,
    write_segment,
)
from loglib import Batch, CorruptLogError, LogError, OffsetRange, Position, Record, records
from loglib.format.batch import Columns, Layout, layout
from loglib.records import from_datetime, to_datetime
from loglib.segment import HEADER_BYTES

# --- what a batch shows -------------------------------------------------------------------------------


def test_records_hold_what_the_columns_hold() -> None:
    found = batch_of(encoded(EVERYTHING, 800), 800)
    made = found.records()
    assert all(type(record) is Record for record in made)
    assert [record.offset for record in made] == list(found.offsets) == [800, 801, 802, 803, 804]
    assert Columns(*([getattr(record, name) for record in made] for name in ("value", "key", "timestamp", "headers"))) \
        == columns_of(found) == EVERYTHING  # fmt: skip
    assert [record.next_offset for record in made] == [801, 802, 803, 804, found.next_offset]
    assert {record.partition for record in made} == {0}
    assert made[0].time == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert found.append_time == NOW


def test_batch_says_where_it_is() -> None:
    at = "2023-11-14T22:13:20+00:00"
    said = f"<Batch of partition 0, offsets 0 to 160, records 3, from {at}, to {at}>"
    assert repr(batch_of(encoded(PLAIN))) == said


def test_columns_left_out_are_null_now_and_empty() -> None:
    found = batch_of(encoded(PLAIN))
    assert (found.keys, found.timestamps, found.headers) == ([None] * 3, [NOW] * 3, [()] * 3)


@pytest.mark.parametrize("decode_first", [False, True], ids=["decoded-late", "decoded-before"])
@settings(calm, max_examples=100)
@given(start=st.integers(0, 900), end=st.integers(0, 900))
def test_part_of_a_batch_shows_the_records_between(decode_first: bool, start: int, end: int) -> None:
    whole = batch_of(encoded(EVERYTHING, 400), 400)
    if decode_first:
        whole.decode()
    part = whole.between(start, end)
    expected = [record for record in whole.records() if start <= record.offset < end]
    assert part.records() == expected
    assert len(part) == len(part.offsets) == len(expected)
    if expected:
        assert part.next_offset == expected[-1].next_offset
        assert part.between(400, expected[0].next_offset).records() == expected[:1]


def test_part_of_a_part_never_grows() -> None:
    part = batch_of(encoded(EVERYTHING)).between(1, 3)
    assert part.between(0, 100).offsets == range(1, 3)
    assert list(part.between(50, 60).offsets) == []


@pytest.mark.parametrize("codec", [0, 1], ids=["none", "zlib"])
@pytest.mark.parametrize("given_columns", [EVERYTHING, PLAIN], ids=["everything", "plain"])
def test_part_of_a_batch_is_the_same_after_pickling(given_columns: Columns, codec: int) -> None:
    whole = batch_of(encoded(given_columns, 800, codec=codec), 800)
    count = len(whole)
    for start, end in itertools.combinations_with_replacement(range(count + 1), 2):
        part = whole.between(800 + start, 800 + end)
        found = pickle.loads(pickle.dumps(part))
        assert (repr(found), found.append_time) == (repr(part), NOW)
        assert found.records() == part.records() and columns_of(found) == columns_of(part)
        assert found.to_arrow().equals(part.to_arrow())
        assert found.between(800 + start + 1, 800 + end).records() == part.between(800 + start + 1, 800 + end).records()
        assert copy.deepcopy(found).records() == part.records()


def test_pickled_batch_holds_its_own_records_alone(tmp_path: Path) -> None:
    """It held the block that it was read in, up to a mebibyte of other batches, and a part all of its batch."""
    values = [b"%6d" % number + b"x" * 1000 for number in range(900)]
    parts = [Columns(values[start : start + 300], [b"key"] * 300) for start in (0, 300, 600)]
    _, batch, _ = read_back(write_segment(tmp_path, chained(parts)))
    assert len(pickle.dumps(batch)) < 330_000
    few = batch.between(batch.offsets.start + 10, batch.offsets.start + 13)
    assert len(pickle.dumps(few)) < 5_000
    assert pickle.loads(pickle.dumps(batch)).values == values[300:600]
    assert pickle.loads(pickle.dumps(few)).records() == few.records()
    assert few.values == values[310:313]


def test_columns_are_decoded_once() -> None:
    found = batch_of(encoded(EVERYTHING))
    for name in ("values", "keys", "timestamps", "headers"):
        assert getattr(found, name) is getattr(found, name)


def test_columns_of_numbers_are_read_on_a_big_endian_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # What byteswap does to an array is the same everywhere: the numbers must come back swapped here.
    data = struct.pack(">3i", 1, -2, 3) + struct.pack(">q", -5)
    monkeypatch.setattr(sys, "byteorder", "big")
    assert records._integers("i", data, 0, 3) == [1, -2, 3]
    assert records._integers("q", data, 12, 1) == [-5]


def test_places_are_plain_tuples() -> None:
    assert Position(1, 2) == (1, 2)
    assert OffsetRange(1, range(2, 4)).offsets[1] == 3


# --- times --------------------------------------------------------------------------------------------


@calm
@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-11))])))
def test_times_come_back_to_the_microsecond(time: datetime) -> None:
    assert to_datetime(from_datetime(time)) == time


def test_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        from_datetime(datetime(2024, 1, 1))  # noqa: DTZ001


def test_time_beyond_the_calendar_overflows_only_when_asked_for() -> None:
    found = batch_of(encoded(Columns([b"x"], timestamps=[1 << 62])))
    assert found.timestamps == [1 << 62]
    with pytest.raises(OverflowError):
        _ = found.records()[0].time


# --- forged columns: every checksum is right, the numbers in the body are not -----------------------------


def changed(at: Callable[[Layout], int], *numbers: int) -> bytes:
    """A batch with every column in which these int32 stand at a place in the body instead."""
    stored = encoded(EVERYTHING)
    body = bytearray(stored[BODY_AT:])
    struct.pack_into(f"<{len(numbers)}i", body, at(layout(header_of(stored))), *numbers)
    return forged(stored, body=bytes(body))


BIG, LEAST = 0x7FFFFFFF, -0x80000000
FORGED = [
    pytest.param(changed(lambda at: at.value_offsets, 1), ["values"], id="values-not-from-0"),
    pytest.param(changed(lambda at: at.value_offsets, 0, -1), ["values"], id="value-offset-negative"),
    pytest.param(changed(lambda at: at.value_offsets, 0, 7, 3), ["values"], id="value-offsets-falling"),
    pytest.param(changed(lambda at: at.value_offsets, 0, BIG), ["values"], id="value-offset-wild"),
    pytest.param(changed(lambda at: at.value_offsets + 20, 11), ["values"], id="values-end-early"),
    pytest.param(changed(lambda at: at.value_offsets + 20, BIG), ["values"], id="values-end-beyond"),
    pytest.param(changed(lambda at: at.key_offsets, 0, LEAST), ["keys"], id="key-offset-wild"),
    pytest.param(changed(lambda at: at.key_offsets + 20, 0), ["keys"], id="keys-end-at-0"),
    pytest.param(changed(lambda at: at.header_counts, 1), ["headers"], id="counts-not-from-0"),
    pytest.param(changed(lambda at: at.header_counts, 0, -1), ["headers"], id="count-negative"),
    pytest.param(changed(lambda at: at.header_counts + 20, -1), ["headers"], id="counts-end-negative"),
    pytest.param(changed(lambda at: at.header_counts + 20, LEAST), ["headers"], id="counts-end-least"),
    pytest.param(changed(lambda at: at.header_counts + 20, BIG), ["headers"], id="counts-end-beyond"),
    pytest.param(changed(lambda at: at.header_counts + 20, 5), ["headers"], id="one-header-more"),
    pytest.param(changed(lambda at: at.header_counts, 0, 4, 3), ["headers"], id="counts-falling"),
    pytest.param(changed(lambda at: at.headers, 1), ["headers"], id="names-not-from-0"),
    pytest.param(changed(lambda at: at.headers + 4, 9, 1), ["headers"], id="name-offsets-falling"),
    pytest.param(changed(lambda at: at.headers + 16, BIG), ["headers"], id="names-end-beyond"),
    pytest.param(changed(lambda at: at.headers + 16, -1), ["headers"], id="names-end-negative"),
    pytest.param(changed(lambda at: at.headers + 24, 1), ["headers"], id="header-values-not-from-0"),
    pytest.param(changed(lambda at: at.headers + 40, BIG), ["headers"], id="header-values-end-beyond"),
    pytest.param(changed(lambda at: at.headers + 40, LEAST), ["headers"], id="header-values-end-least"),
    pytest.param(changed(lambda at: at.headers + 48, -1), ["headers"], id="name-no-utf-8"),
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
            column = {"values": "value_offsets", "keys": "key_offsets", "headers": "headers"}[columns[0]]
            place = getattr(layout(header), column)
            at = caught.value.file_position - body_starts
            assert at == 0 if codec else at in range(place - 72, place + 56), (name, at, place)
        else:
            view(bad)


@pytest.mark.parametrize("stored", [changed(lambda at: at.value_validity, -1)], ids=["bits-beyond-the-last-record"])
def test_bits_beyond_the_last_record_mean_nothing(stored: bytes) -> None:
    found = batch_of(stored)
    assert found.values == [b"one", b"", b"", b"four", "fünf".encode()]
    assert found.to_arrow()["value"].to_pylist() == found.values


def test_null_with_bytes_is_null() -> None:
    stored = encoded(Columns([b"abc", None]))
    at = layout(header_of(stored)).value_validity
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
    stored = encoded(Columns(*(column * 20 for column in EVERYTHING if column)), codec=codec)
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
    from loglib.format.batch import BadBatch

    try:
        return batch_of(stored)
    except BadBatch as error:
        raise CorruptLogError("here", error.at, error.found, error.expected) from error


def test_nulls_among_a_million_records_are_found_in_linear_time() -> None:
    # One shift of a large number for each record took minutes here.
    count = 1 << 20
    values = [None if i % 3 else b"" for i in range(count)]
    assert batch_of(encoded(Columns(values))).values == values


def test_batches_of_one_block_share_its_memory(tmp_path: Path) -> None:
    found = read_back(write_segment(tmp_path, chained([PLAIN, EVERYTHING])))
    assert found[0]._data is found[1]._data


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
