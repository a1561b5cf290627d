"""log/ages.py: an age is never above the true one, and known as soon as it can be."""

from __future__ import annotations

import pytest
from builders import IDENTITY, NOW

from conftest import SECOND
from loglib import CorruptLogError, UnsupportedFormatError
from loglib.format.header import crc32c
from loglib.log.ages import (
    BELIEVED_AFTER_US,
    MOST_BYTES,
    TOLERANCE_US,
    Stamp,
    Timeline,
    began_boottime,
    decode,
    encode,
)
from loglib.segment import NO_TIMESTAMP, SegmentHeader
from loglib.system.clock import Moment

MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
SALT = IDENTITY.salt
FIRST, SECOND_BOOT = b"1" * 16, b"2" * 16
SECOND_BEGAN = 10 * DAY  # true time, counted from the first boot


def at(true_us: int, *, error: int = 0, base: int = 0) -> Stamp:
    """A stamp at a true time since the first boot; the second boot is ten days later."""
    boot_id, began = (FIRST, 0) if true_us < SECOND_BEGAN else (SECOND_BOOT, SECOND_BEGAN)
    return Stamp(base, NOW + true_us + error, true_us - began, boot_id)


def now(true_us: int, *, error: int = 0) -> Moment:
    return Moment(*at(true_us, error=error)[1:])


def steady(begin: int, *, base: int = 0) -> list[Stamp]:
    """Two looks by which a boot's clock is believed."""
    return [at(begin, base=base), at(begin + BELIEVED_AFTER_US + 1, base=base)]


# --- within a boot ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealing", [0, -40 * DAY, 400 * DAY])
@pytest.mark.parametrize("present", [0, -40 * DAY, 400 * DAY])
def test_age_within_a_boot_is_exact_whatever_the_wall_clock_says(sealing: int, present: int) -> None:
    age = Timeline().age(at(HOUR, error=sealing), now(3 * HOUR, error=present))
    assert (age.at_least_us, age.exact) == (2 * HOUR, True)


def test_time_that_runs_backwards_within_a_boot_is_no_age() -> None:
    """As after the restore of a virtual machine's snapshot."""
    assert Timeline().age(at(3 * HOUR), now(HOUR)).at_least_us == 0


# --- across boots ----------------------------------------------------------------------------------------


def test_age_across_boots_is_known_when_both_clocks_are_believed() -> None:
    timeline = Timeline([*steady(HOUR), *steady(SECOND_BEGAN + MINUTE, base=8)])
    age = timeline.age(at(5 * HOUR), now(SECOND_BEGAN + 2 * HOUR))
    assert (age.at_least_us, age.exact) == (SECOND_BEGAN - 3 * HOUR - 2 * TOLERANCE_US, True)


def test_clock_is_believed_after_more_than_an_hour_without_a_jump() -> None:
    begin = SECOND_BEGAN + MINUTE
    timeline = Timeline([*steady(HOUR), at(begin, base=8)])
    sealed = at(5 * HOUR)
    for later in (MINUTE, HOUR // 2, HOUR):
        assert not timeline.add(at(begin + later, base=8))
        assert not timeline.believes(now(begin + later)) and timeline.steady_us(now(begin + later)) == later
        age = timeline.age(sealed, now(begin + later))
        assert (age.at_least_us, age.exact) == (later, False), "as old as the first look of this boot, at least"
    assert timeline.add(at(begin + HOUR + 1, base=8))
    assert timeline.believes(now(begin + HOUR + 1))
    assert timeline.age(sealed, now(begin + HOUR + 1)).exact


def test_what_a_wrong_clock_stamped_is_right_once_its_boot_is_believed() -> None:
    """A segment stamped 2037 blocks nothing: the time since the boot says when it was sealed."""
    timeline = Timeline([*steady(HOUR), *steady(SECOND_BEGAN + MINUTE, base=8)])
    age = timeline.age(at(5 * HOUR, error=4000 * DAY), now(SECOND_BEGAN + 2 * HOUR))
    assert (age.at_least_us, age.exact) == (SECOND_BEGAN - 3 * HOUR - 2 * TOLERANCE_US, True)


@pytest.mark.parametrize("error", [-30 * DAY, -TOLERANCE_US - 1, TOLERANCE_US + 1, 30 * DAY])
def test_jump_ends_the_belief_until_the_clock_is_right_again_or_an_hour_has_passed(error: int) -> None:
    begin = SECOND_BEGAN + MINUTE
    timeline = Timeline([*steady(HOUR), *steady(begin, base=8)])
    jumped = begin + 2 * HOUR
    assert timeline.add(at(jumped, error=error, base=8))
    assert not timeline.believes(now(jumped, error=error)) and timeline.steady_us(now(jumped, error=error)) == 0
    assert timeline.steady_us(now(jumped + MINUTE)) == 0, "that moment would be a jump as well"
    assert not timeline.age(at(5 * HOUR), now(jumped, error=error)).exact
    assert timeline.believes(now(jumped + MINUTE)), "the lead is that which was believed before"
    assert timeline.add(at(jumped + HOUR + 1, error=error, base=8))
    assert timeline.believes(now(jumped + HOUR + 1, error=error)), "longer than a clock may be wrong: so it was right"
    assert not timeline.believes(now(jumped + HOUR + 1))


@pytest.mark.parametrize("error", [-TOLERANCE_US, TOLERANCE_US])
def test_small_step_is_no_jump_and_makes_no_age_too_high(error: int) -> None:
    begin = SECOND_BEGAN + MINUTE
    timeline = Timeline([at(HOUR, error=-error), at(3 * HOUR), at(begin), at(begin + 2 * HOUR, error=error)])
    moment = now(begin + 2 * HOUR, error=error)
    assert timeline.believes(moment)
    true_age = begin + 2 * HOUR - 5 * HOUR
    assert true_age - 4 * TOLERANCE_US <= timeline.age(at(5 * HOUR), moment).at_least_us <= true_age


def test_segment_of_a_boot_that_is_not_believed_is_as_old_as_what_came_after_it() -> None:
    third = Moment(NOW + 40 * DAY, 30 * MINUTE, b"3" * 16)
    doubtful = at(5 * HOUR, error=-DAY, base=8)
    timeline = Timeline([at(HOUR), at(90 * MINUTE), *steady(SECOND_BEGAN + MINUTE, base=16)])
    timeline.add(Stamp(24, third.wall_us - 2 * HOUR, third.boottime_us - 20 * MINUTE, third.boot_id))
    assert timeline.age(doubtful, third).at_least_us == 20 * MINUTE
    third = third._replace(wall_us=third.wall_us + 2 * HOUR, boottime_us=third.boottime_us + 2 * HOUR)
    timeline = Timeline([*timeline.worth_keeping(), Stamp(24, third.wall_us - 2 * HOUR, 30 * MINUTE, third.boot_id)])
    timeline.add(Stamp(24, *third))
    age = timeline.age(doubtful, third)
    first_look = NOW + SECOND_BEGAN + MINUTE
    assert (age.at_least_us, age.exact) == (third.wall_us - first_look - 2 * TOLERANCE_US, False)
    assert timeline.age(doubtful._replace(base_offset=17), third).at_least_us < age.at_least_us, "after that look"


def test_unknown_boot_proves_nothing() -> None:
    timeline = Timeline([Stamp(0, NOW, 0, bytes(16)), Stamp(0, NOW + DAY, DAY, bytes(16))])
    assert timeline.worth_keeping() == []
    assert not timeline.believes(now(HOUR)) and timeline.steady_us(now(HOUR)) == 0
    age = timeline.age(Stamp(8, NOW - DAY, 0, bytes(16)), now(HOUR))
    assert (age.at_least_us, age.exact) == (0, False)


def test_segments_of_all_partitions_have_an_order_before_any_clock_is_believed() -> None:
    moment = now(SECOND_BEGAN + HOUR)
    sealed = [at(HOUR), at(5 * DAY), at(SECOND_BEGAN + MINUTE), at(SECOND_BEGAN + 2 * MINUTE)]
    orders = [Timeline().age(stamp, moment).order for stamp in sealed]
    assert orders == sorted(orders) and len(set(orders)) == 4
    believed = Timeline(steady(HOUR)).age(at(6 * DAY, error=400 * DAY), moment)
    assert believed.order == (0, NOW + 6 * DAY)


# --- what is kept ------------------------------------------------------------------------------------------


def test_stamps_worth_keeping_prove_the_same() -> None:
    timeline = Timeline([at(minutes * MINUTE) for minutes in range(300)])
    timeline.add(at(301 * MINUTE, error=DAY))
    for minutes in range(302, 310):
        timeline.add(at(minutes * MINUTE, error=DAY))
    timeline.add(at(SECOND_BEGAN + MINUTE, base=8))
    kept = timeline.worth_keeping()
    assert len(kept) == 4
    again = Timeline(reversed(kept))
    assert again.worth_keeping() == kept
    for moment in (now(310 * MINUTE), now(310 * MINUTE, error=DAY), now(SECOND_BEGAN + HOUR)):
        assert again.believes(moment) == timeline.believes(moment)
        assert again.steady_us(moment) == timeline.steady_us(moment)
        assert again.age(at(HOUR), moment) == timeline.age(at(HOUR), moment)


def test_boots_of_which_nothing_is_left_are_forgotten() -> None:
    timeline = Timeline([at(HOUR, base=0), at(SECOND_BEGAN, base=16)])
    third = Stamp(16, NOW, HOUR, b"3" * 16)
    timeline.add(third)
    for start in (0, 8, 15):
        timeline.forget_before(start)
        assert len(timeline.worth_keeping()) == 3, "what begins at 8 was sealed in the first boot, or the second"
    timeline.forget_before(16)
    assert timeline.worth_keeping() == [at(SECOND_BEGAN, base=16), third], "boots that begin alike stay together"


# --- the file ----------------------------------------------------------------------------------------------


STAMPS = [at(HOUR), at(2 * HOUR, error=-2 * NOW, base=8), at(SECOND_BEGAN, base=(1 << 63) - 8)]


def test_stamps_survive_the_file_and_its_bytes_are_as_described() -> None:
    content = encode(STAMPS, SALT)
    assert decode(content, SALT) == STAMPS
    assert decode(encode([], SALT), SALT) == []
    assert content[:12] == b"\x89LLCLK\r\n\x01\0\0\0"
    assert content[12:16] == crc32c(content[16:], crc32c(content[:12], SALT)).to_bytes(4, "little")
    assert content[56:64] == (8).to_bytes(8, "little") and content[80:96] == FIRST
    assert int.from_bytes(content[64:72], "little", signed=True) == 2 * HOUR - NOW
    assert int.from_bytes(content[72:80], "little", signed=True) == 2 * HOUR


def test_oldest_stamps_are_left_out_of_a_file_that_would_be_too_long() -> None:
    stamps = [at(number, base=8 * number) for number in range(2000)]
    content = encode(stamps, SALT)
    assert len(content) == MOST_BYTES
    assert decode(content, SALT) == stamps[-1024:]


def test_every_cut_and_every_flip_of_the_file_is_noticed() -> None:
    content = encode(STAMPS, SALT)
    for end in range(len(content)):
        with pytest.raises(CorruptLogError):
            decode(content[:end], SALT)
    for at_bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[at_bit // 8] ^= 1 << at_bit % 8
        with pytest.raises(CorruptLogError):
            decode(bytes(flipped), SALT)
    with pytest.raises(CorruptLogError, match="CRC"):
        decode(content, SALT + 1)


@pytest.mark.parametrize(
    ("at_byte", "replacement", "error", "words"),
    [(8, b"\x02", UnsupportedFormatError, "clock version"), (8, b"\0", CorruptLogError, "version 0"),
     (10, b"\x01", UnsupportedFormatError, "clock flags"), (11, b"\x01", None, ""),
     (16, b"\xff" * 8, CorruptLogError, "base offset")],
)  # fmt: skip
def test_checksummed_file_of_another_kind_is_refused(
    at_byte: int, replacement: bytes, error: type[Exception] | None, words: str
) -> None:
    content = bytearray(encode(STAMPS, SALT))
    content[at_byte : at_byte + len(replacement)] = replacement
    content[12:16] = crc32c(content[16:], crc32c(content[:12], SALT)).to_bytes(4, "little")
    if error is None:
        assert decode(bytes(content), SALT) == STAMPS, "a flag that may be ignored"
        return
    with pytest.raises(error, match=words):
        decode(bytes(content), SALT)


# --- when the open segment was begun -------------------------------------------------------------------------


def test_stamp_of_a_header_is_that_of_its_making() -> None:
    header = SegmentHeader(
        bytes(16), 0, 1, 800, NOW, 0, 800, 0, NOW - 1, NO_TIMESTAMP, created_boottime=7, boot_id=FIRST
    )
    assert Stamp.of(header) == (800, NOW, 7, FIRST)


@pytest.mark.parametrize(
    ("created", "first_append", "present", "began"),
    [
        pytest.param(at(HOUR), NOW + 2 * HOUR, now(3 * HOUR), 2 * HOUR, id="by the first batch"),
        pytest.param(at(HOUR), NOW + 9 * DAY, now(3 * HOUR), HOUR, id="first batch in the future"),
        pytest.param(at(HOUR), NOW - DAY, now(3 * HOUR), HOUR, id="first batch before the segment"),
        pytest.param(at(HOUR), NOW + 2 * HOUR, now(3 * HOUR, error=DAY), HOUR, id="now in the future"),
        pytest.param(at(HOUR), NOW + 2 * HOUR, now(SECOND_BEGAN + MINUTE), 2 * HOUR - SECOND_BEGAN, id="other boot"),
    ],
)  # fmt: skip
def test_header_and_first_batch_say_when_an_open_segment_began(
    created: Stamp, first_append: int, present: Moment, began: int
) -> None:
    assert began_boottime(created, first_append, present) == began


def test_open_segment_whose_times_all_lie_in_the_future_is_old_enough_to_be_rolled() -> None:
    present = now(SECOND_BEGAN + HOUR)
    began = began_boottime(at(HOUR, error=400 * DAY), NOW + 400 * DAY, present)
    assert present.boottime_us - began > 1000 * DAY
