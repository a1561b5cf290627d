"""format/batch.py and format/record.py: what readers are given, as columns and one by one."""

from __future__ import annotations

import copy
import itertools
import pickle
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from builders import (
    EVERYTHING,
    NOW,
    PLAIN,
    batch_of,
    calm,
    chained,
    columns_of,
    encoded,
    read_back,
    write_segment,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from loglib import OffsetRange, Position, Record
from loglib.config.times import from_datetime, to_datetime
from loglib.format.columns import Columns

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


def test_places_are_plain_tuples() -> None:
    assert Position(1, 2) == (1, 2)
    assert OffsetRange(1, range(2, 4)).offsets[1] == 3


def test_batches_of_one_block_share_its_memory(tmp_path: Path) -> None:
    found = read_back(write_segment(tmp_path, chained([PLAIN, EVERYTHING])))
    assert found[0]._data is found[1]._data


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
    with pytest.raises(OverflowError, match="timestamp 4611686018427387904 us is outside of the years 1 to 9999"):
        _ = found.records()[0].time
    with pytest.raises(ValueError, match="use the number"):
        _ = found.records()[0].time
    assert "from 4611686018427387904 us" in repr(found)
