"""The open batch: its columns agree, its offsets are known at once, and it knows what it still takes."""

import pytest

from loglib import LogError, Position
from loglib.append.open_batch import NO_ROOM, OpenBatch
from loglib.format.columns import Columns
from loglib.log.recovery import Tail

TAIL = Tail(1000, 0, 0, 0, 0, 0, 1)


def opened(*, records: int = 100, size_bytes: int = 1000, any_size: bool = True) -> OpenBatch:
    batch = OpenBatch(TAIL, 7, any_size=any_size)
    batch.take_up_to(records, size_bytes)
    return batch


def test_offsets_follow_the_tail() -> None:
    batch = opened()
    assert batch.extend(Columns([b"a", b"b"]), 2) == range(1000, 1002)
    assert batch.extend(Columns([b"c"]), 1) == range(1002, 1003)
    assert next(batch.positions) == Position(7, 1003)


def test_new_batch_takes_nothing_on_the_fast_path() -> None:
    batch = OpenBatch(TAIL, 0)
    assert batch.plain_room == NO_ROOM and batch.bytes_left() == 0 and batch.buffered_bytes() == 0
    assert next(batch.positions, None) is None
    assert batch.add_keyed(b"v", b"k") is None


def test_room_counts_bytes_on_both_paths() -> None:
    batch = opened(size_bytes=10)
    batch.extend(Columns([b"abc"]), 3)
    assert (batch.plain_room, batch.bytes_left(), batch.buffered_bytes()) == (7, 7, 3)
    batch.plain_room -= 2  # as the fast path does
    batch.values.append(b"xy")
    assert (batch.bytes_left(), batch.buffered_bytes()) == (5, 5)
    batch.extend(Columns([b"z" * 20]), 20)
    assert batch.plain_room == NO_ROOM and batch.bytes_left() < 0 and batch.buffered_bytes() == 25


def test_record_with_a_key_is_added_to_records_with_keys() -> None:
    batch = opened(size_bytes=10)
    batch.extend(Columns([b"1"]), 1)
    assert batch.add_keyed(b"2", b"k") is None, "the batch has no keys yet"
    batch.extend(Columns([b"2"], [b"k"]), 2)
    assert batch.add_keyed(b"3", b"kk") == Position(7, 1002)
    assert (batch.bytes_left(), batch.buffered_bytes(), batch.plain_room) == (4, 6, NO_ROOM)
    assert batch.add_keyed(b"four", b"") is None, "it would fill the batch"
    assert batch.add_keyed(b"4", b"") == Position(7, 1003)
    batch.extend(Columns([b"5"]), 1)
    assert batch.columns(0) == Columns([b"1", b"2", b"3", b"4", b"5"], [None, b"k", b"kk", b"", None])
    assert (batch.bytes_left(), batch.buffered_bytes()) == (2, 8)


@pytest.mark.parametrize("columns", [Columns([b"v"], None, [5]), Columns([b"v"], None, None, [(("h", b"1"),)])])
def test_record_with_a_key_is_not_added_beside_other_columns(columns: Columns) -> None:
    batch = opened()
    batch.extend(Columns([b"keyed"], [b"k"]), 6)
    batch.extend(columns, 1)
    assert batch.add_keyed(b"v", b"k") is None
    assert batch.bytes_left() == 993


def test_record_with_a_key_stops_one_record_before_the_batch_is_full() -> None:
    batch = opened(records=3)
    batch.extend(Columns([b"a"], [b"k"]), 2)
    assert batch.add_keyed(b"b", b"k") == Position(7, 1001)
    assert batch.add_keyed(b"c", b"k") is None
    assert batch.extend(Columns([b"c"], [b"k"]), 2) == range(1002, 1003)
    assert batch.is_full()


def test_owed_error_stops_records_with_keys() -> None:
    batch = opened()
    batch.extend(Columns([b"a"], [b"k"]), 2)
    batch.owe(LogError("it failed"))
    assert batch.add_keyed(b"b", b"k") is None
    assert batch.bytes_left() == 998


def test_fast_path_stops_one_record_before_the_batch_is_full() -> None:
    """The last one goes the general way, which sees that a flush is due."""
    batch = opened(records=4)
    batch.extend(Columns([b"a"]), 1)
    assert [position.offset for position in batch.positions] == [1001, 1002]


@pytest.mark.parametrize(
    "columns", [Columns([b"v"], [b"k"]), Columns([b"v"], None, [5]), Columns([b"v"], None, None, [(("h", b"1"),)])]
)
def test_batch_with_other_columns_takes_nothing_on_the_fast_path(columns: Columns) -> None:
    batch = opened()
    batch.extend(Columns([b"plain"]), 5)
    assert batch.plain_room > 0
    batch.extend(columns, 1)
    assert batch.plain_room == NO_ROOM and batch.bytes_left() == 994


def test_sizes_that_must_be_looked_at_leave_nothing_to_the_fast_path() -> None:
    batch = opened(any_size=False)
    batch.extend(Columns([b"a"]), 1)
    assert batch.plain_room == NO_ROOM and batch.bytes_left() == 999
    batch.extend(Columns([b"a"], [b"k"]), 2)
    assert batch.add_keyed(b"b", b"k") is None


def test_columns_that_begin_late_are_filled_up() -> None:
    batch = opened()
    batch.extend(Columns([b"1"]), 1)
    batch.extend(Columns([b"2", None], [b"k", None], [5, 6], [(), (("h", b""),)]), 3)
    batch.extend(Columns([b"3"]), 1)
    columns = batch.columns(99)
    assert columns == Columns(
        [b"1", b"2", None, b"3"], [None, b"k", None, None], [99, 5, 6, 99], [(), (), (("h", b""),), ()]
    )


@pytest.mark.parametrize("missing", ["keys", "timestamps", "headers"])
def test_resume_cuts_columns_that_an_interrupt_left_longer(missing: str) -> None:
    batch = opened()
    batch.extend(Columns([b"1"], [b"k"], [5], [()]), 2)
    getattr(batch, missing).append(None)  # the interrupt came before the values
    batch.resume()
    assert [len(each) for each in (batch.values, batch.keys or (), batch.timestamps or (), batch.headers or ())] == [
        1
    ] * 4
    assert batch.extend(Columns([b"2"]), 1) == range(1001, 1002)


def test_resume_gives_the_offset_of_a_value_that_never_came_again() -> None:
    batch = opened()
    batch.extend(Columns([b"1"]), 1)
    assert next(batch.positions).offset == 1001  # and then an interrupt, before the value
    batch.resume()
    assert next(batch.positions).offset == 1001
