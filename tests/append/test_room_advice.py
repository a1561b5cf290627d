"""The advice about room: for small syncs in a row, and as long as these become shorter by it."""

from __future__ import annotations

import pytest

from loglib.append import room
from loglib.append.room import Room

SLOW, QUICK = 200e-6, 130e-6


@pytest.fixture
def advice() -> Room:
    return Room()


def sync(advice: Room, number: int, seconds: float, *, size_bytes: int = 500, has_grown: bool = True) -> None:
    for _ in range(number):
        advice.note(size_bytes, seconds, has_grown=has_grown)


def test_it_takes_some_small_syncs_in_a_row(advice: Room) -> None:
    sync(advice, room._FEW_SYNCS - 1, SLOW)
    assert advice.wanted() == 0
    sync(advice, 1, SLOW)
    assert advice.wanted() == room._LEAST_BYTES


def test_a_large_one_ends_the_row(advice: Room) -> None:
    sync(advice, 100, SLOW)
    sync(advice, 1, SLOW, size_bytes=1 << 20)
    assert advice.wanted() == 0


def test_it_becomes_more_while_it_is_used_up(advice: Room) -> None:
    sync(advice, 100, SLOW)
    wanted = [advice.wanted() for _ in range(8)]
    assert wanted == [1 << 16, 1 << 17, 1 << 18, 1 << 19, *[1 << 20] * 4]


def test_there_is_none_without_a_disk(advice: Room) -> None:
    sync(advice, 100, 5e-6)
    assert advice.wanted() == 0


@pytest.mark.parametrize(("within", "is_worth_it"), [(QUICK, True), (SLOW, False), (2 * SLOW, False)])
def test_it_ends_where_it_brings_nothing(advice: Room, within: float, is_worth_it: bool) -> None:
    """As on a file system that writes each block to a new place."""
    sync(advice, 100, SLOW)
    assert advice.wanted() > 0
    sync(advice, room._FEW_SYNCS - 1, within, has_grown=False)
    assert advice.wanted() > 0, "there is no judgement before some syncs"
    sync(advice, 1, within, has_grown=False)
    assert (advice.wanted() > 0) is is_worth_it


def test_one_slow_sync_decides_nothing(advice: Room) -> None:
    sync(advice, 100, SLOW)
    sync(advice, 20, QUICK, has_grown=False)
    sync(advice, 5, 1.0, has_grown=False)
    sync(advice, 20, QUICK, has_grown=False)
    assert advice.wanted() > 0


def test_noise_decides_nothing(advice: Room) -> None:
    """Another program keeps the disk busy, more than half of the time."""
    for has_grown, seconds in ((True, SLOW), (False, QUICK)):
        for number in range(room._FEW_SYNCS):
            advice.note(500, 5e-3 if number % 3 else seconds, has_grown=has_grown)
    assert advice.wanted() > 0


@pytest.mark.parametrize("reason", ["a full disk", "not worth it"])
def test_it_is_tried_again_later(advice: Room, reason: str) -> None:
    sync(advice, 100, SLOW)
    if reason == "a full disk":
        advice.give_up()
    else:
        sync(advice, room._FEW_SYNCS, SLOW, has_grown=False)
    assert advice.wanted() == 0
    sync(advice, 1000, SLOW)
    assert advice.wanted() == 0
    sync(advice, room._LATER_SYNCS, SLOW)
    assert advice.wanted() == room._LEAST_BYTES
