"""jobs/entries.py, state.py, generation.py, ack_log.py: the file of a share decides, whatever happens to it."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from builders import spoil
from processes import fork, wait
from shared_jobs import RECORDS, acks_of, die, only, taken, values, with_records

from conftest import NOW, Clock, UnsyncedFiles, crash_copy, open_files, opened_since, values_of
from loglib import (
    CorruptLogError,
    LogError,
    LogMovedError,
    Share,
    StorageFullError,
    Topic,
    UnsupportedFormatError,
    repair,
)
from loglib.append import live_policies
from loglib.cli.shares import _share_facts
from loglib.errors import LockedError, ShareFullError, ShareReplacedError
from loglib.jobs import ack_log, entries, generation, recent_moment
from loglib.jobs.ack_log import AckLog
from loglib.jobs.directory import ShareDirectory
from loglib.jobs.entries import (
    ACCEPTED,
    BEGIN,
    BY_KEY,
    BY_TIME,
    DEAD,
    DEFER,
    ENTRY_BYTES,
    EXPIRED,
    LOST,
    PASS,
    PIN,
    PINNED,
    REAP,
    REJECTED,
    RELEASED,
    RENEW,
    RESET,
    RETURNED,
    SEAL,
    SETTLE,
    UNPINNED,
    encode,
    pair,
)
from loglib.jobs.free_records import Free
from loglib.jobs.generation import Checkpoint, Place
from loglib.jobs.state import Counts, Item, Settings, State, items_of
from loglib.system.clock import Clock as SystemClock
from loglib.system.clock import Moment, PlainClock
from loglib.testing import FullDisk, MemoryFiles, RecordingFiles
from loglib.transactions.job_commits import settle_in_file

Open = Callable[..., Topic]
ALL = [b"%d" % number for number in range(RECORDS)]
DEFAULT = Settings()
SALT, ME, OTHER = 7, 11, 12
PLACE = Place(bytes(16), 3, "mail")


@pytest.fixture
def topic(open_topic: Open) -> Topic:
    return with_records(open_topic)


# --- the rules ------------------------------------------------------------------------------------------


def state_after(*written: tuple[Any, ...], settings: Settings = DEFAULT) -> State:
    """The state after some entries of generation 1: kind, outcome, count, then moment, offset, token by name."""
    state = State(ME, 1, 100, settings, Counts())
    block = b"".join(encode(SALT, *each[:3], **each[3]) for each in written)
    assert state.apply(block, SALT) == len(block)
    return state


def begin(offset: int, member: int = ME, count: int = 1, until: int = 0, *, spare: int = 0) -> tuple[Any, ...]:
    return BEGIN, spare, count, {"moment": pair(member, 50), "offset": offset, "token": until}


def settle(number: int, offset: int, outcome: int = ACCEPTED, count: int = 1, until: int = 0) -> tuple[Any, ...]:
    return SETTLE, outcome, count, {"moment": until, "offset": offset, "token": token(number)}


def token(number: int) -> int:
    return pair(number, 1)


def dead(member: int, by: int = ME) -> tuple[Any, ...]:
    return REAP, DEAD, 0, {"moment": member, "offset": by}


def test_i3_a_settle_without_the_token_in_hand_changes_nothing() -> None:
    before = state_after(begin(100), begin(101, OTHER))
    for number, offset in ((5, 100), (0, 101), (1, 100), (0, 99), (0, 5000)):
        for outcome in (ACCEPTED, RELEASED, RETURNED, REJECTED):
            after = state_after(begin(100), begin(101, OTHER), settle(number, offset, outcome))
            assert sorted(items_of(after)) == sorted(items_of(before))
            assert (after.counts, after.fresh) == (before.counts, 102)
    again = state_after(begin(100), settle(0, 100), settle(0, 100))
    assert again.counts == [1, 0, 0, 0]


def test_begin_of_a_record_that_is_taken_or_settled_is_void() -> None:
    late = [begin(101), begin(100, count=0)]
    state = state_after(begin(100), begin(100, OTHER), begin(101, OTHER), settle(2, 101), *late)
    assert {each.member for each in state.hands.values()} == {ME} and list(state.hands) == [token(0)]
    assert (state.begun, state.mine, state.fresh) == ([token(0)], {token(0)}, 102)


def test_begin_of_records_that_others_have_begun_takes_the_next_ones_up_to_the_last_spare_one() -> None:
    def taken_by(*written: tuple[Any, ...], settings: Settings = DEFAULT) -> list[tuple[int, int, int]]:
        state = state_after(*written, settings=settings)
        return [(hand.member, hand.offset, hand.count) for hand in state.hands.values()]

    both = begin(100, OTHER, spare=5), begin(100, ME, spare=5)
    assert taken_by(*both) == [(OTHER, 100, 1), (ME, 101, 1)]
    assert state_after(*both).fresh == 102
    assert taken_by(begin(100, OTHER, 4), begin(100, ME, spare=3)) == [(OTHER, 100, 4)], "103 was the last one"
    assert taken_by(begin(100, OTHER, 4), begin(100, ME, spare=4)) == [(OTHER, 100, 4), (ME, 104, 1)]
    assert taken_by(begin(100, OTHER, 4), begin(102, ME, 3, spare=1))[1:] == [(ME, 104, 2)]
    released = begin(100, OTHER), settle(0, 100, RELEASED), begin(100, ME, spare=1)
    assert taken_by(*released) == [(ME, 101, 1)], "a fresh record was asked for"
    assert taken_by(*both, settings=Settings(window=1)) == [(OTHER, 100, 1)]
    assert taken_by(begin(100, OTHER), dead(ME), begin(100, ME, spare=5)) == [(OTHER, 100, 1)]


def test_released_records_are_begun_one_by_one_and_only_after_their_time() -> None:
    state = state_after(begin(100, count=3), settle(0, 100, RELEASED, 3, until=9))
    assert (state.free.ready(8, 0), state.next_moment()) == (None, 9)
    assert [state.free.ready(9, choice) for choice in range(4)] == [100, 101, 102, 100]
    state = state_after(begin(100, count=3), settle(0, 100, RELEASED, 3), begin(100, count=2), begin(101, OTHER))
    assert [each.offset for each in state.hands.values()] == [101]
    assert state.free == {100: Free(1, 0, 50), 102: Free(1, 0, 50)} and state.free.ready(0, 0) == 100


def test_part_of_a_hand_is_settled() -> None:
    state = state_after(begin(100, count=4), settle(0, 101, REJECTED), settle(0, 100, ACCEPTED, 2), settle(0, 101))
    (hand,) = state.hands.values()
    assert (list(hand.offsets()), state.in_hand, state.counts) == ([102, 103], 2, [1, 1, 0, 0])
    state = state_after(begin(100, count=2), settle(0, 101), settle(0, 100))
    assert (state.hands, state.in_hand, state.mine, state.counts[0]) == ({}, 0, set(), 2)


def test_attempts_count_unless_they_are_given_back_and_end_at_the_most() -> None:
    two = Settings(max_attempts=2)
    state = state_after(begin(100), settle(0, 100, RETURNED), begin(100), settle(2, 100, RELEASED), settings=two)
    assert state.free[100].attempts == 1
    state = state_after(begin(100), settle(0, 100, RELEASED), begin(100), settle(2, 100, RELEASED), settings=two)
    assert (state.free, state.counts, state.ended[0][:2]) == ({}, [0, 0, 1, 0], (100, 2))


def test_reaped_member_loses_all_it_has_and_begins_nothing_any_more() -> None:
    state = state_after(begin(100, OTHER, 2), begin(102), dead(OTHER), begin(103, OTHER), begin(100, OTHER))
    assert (sorted(state.free), state.members(), state.fresh) == ([100, 101], {ME}, 103)
    state = state_after(begin(100), dead(ME, by=OTHER))
    assert (state.taken[token(0)].offsets, state.mine) == (range(100, 101), set())
    state = state_after(begin(100, OTHER), dead(OTHER), settings=Settings(max_attempts=1))
    assert state.counts[2] == 1 and "has died" in state.ended[0].how


def test_lease_is_reaped_only_when_it_is_over_and_not_after_it_was_renewed() -> None:
    def expire(now: int, number: int = 0) -> tuple[Any, ...]:
        return REAP, EXPIRED, 0, {"moment": now, "offset": OTHER, "token": token(number)}

    renewed = RENEW, 0, 0, {"moment": 20, "offset": 100, "token": token(0)}
    assert state_after(begin(100, until=10), expire(9)).in_hand == 1
    assert state_after(begin(100, until=10), expire(10)).free == {100: Free(1, 0, 50)}
    assert state_after(begin(100, until=10), renewed, expire(10)).in_hand == 1
    assert state_after(begin(100), renewed, expire(1 << 60), expire(5, 4)).hands[token(0)].until == 0
    state = state_after(begin(100, until=10), renewed)
    assert [state.expired(now) for now in (19, 20, 20)] == [[], [token(0)], [token(0)]]
    assert state.next_moment() == 20
    assert state_after(begin(100, until=10), settle(0, 100)).expired(50) == []
    assert state_after(begin(100, until=10), settle(0, 100)).next_moment() is None


def pin(outcome: int, offset: int, count: int = 1, number: int = 0) -> tuple[Any, ...]:
    return PIN, outcome, count, {"moment": ME, "offset": offset, "token": token(number)}


def test_pin_of_records_that_are_pinned_or_not_in_this_hand_is_void() -> None:
    of_another = PIN, PINNED, 1, {"moment": OTHER, "offset": 100, "token": token(0)}
    void = [pin(PINNED, 100, 2), pin(PINNED, 102, 2), pin(PINNED, 100, number=5), of_another]
    state = state_after(begin(100, count=3), pin(PINNED, 101), *void)
    assert state.hands[token(0)].pinned == {101} and state.pins == {token(0)}


def test_hand_is_pinned_until_its_last_pin_has_ended() -> None:
    pins = [begin(100, count=3), pin(PINNED, 100), pin(PINNED, 102)]
    state = state_after(*pins, pin(UNPINNED, 100))
    assert (state.hands[token(0)].pinned, state.pins) == ({102}, {token(0)})
    state = state_after(*pins, pin(UNPINNED, 100), pin(UNPINNED, 102))
    assert (state.hands[token(0)].pinned, state.pins, state.in_hand) == (set(), set(), 3)


def test_time_of_a_record_that_waited_and_is_gone_is_forgotten() -> None:
    waits = [begin(100), settle(0, 100, RELEASED, until=9)]
    state = state_after(*waits)
    assert state.next_moment() == 9
    state = state_after(*waits, (LOST, 0, 1, {"offset": 100, "token": ME}))
    assert state.is_timed and (state.free.ready(9, 0), state.is_timed) == (None, False)
    state = state_after(*waits, (LOST, 0, 1, {"offset": 100, "token": ME}))
    assert (state.next_moment(), state.is_timed) == (None, False)


def test_window_and_most_in_hand_are_part_of_the_rules() -> None:
    small = Settings(window=2, max_in_hand=2)
    state = state_after(begin(100), settle(0, 100, RELEASED), begin(101), begin(102), settings=small)
    assert (state.fresh, state.unsettled, state.room(), state.may_take()) == (102, 2, 0, True)
    state = state_after(begin(100), begin(101), begin(102), settings=small)
    assert (state.in_hand, state.may_take()) == (2, False)


def test_deferred_records_are_begun_one_by_one_and_their_first_attempt_is_the_first() -> None:
    def defer(offset: int, how: int, count: int = 1, until: int = 0) -> tuple[Any, ...]:
        return DEFER, how, count, {"offset": offset, "moment": until}

    state = state_after(defer(100, BY_KEY, 3), begin(101), begin(103))
    assert (list(state.deferred), state.fresh, state.unsettled) == ([100, 102], 104, 4)
    hands = sorted((hand.offset, hand.attempt, hand.first_begun) for hand in state.hands.values())
    assert hands == [(101, 1, 50), (103, 1, 50)]
    state = state_after(defer(100, BY_TIME, 2, until=9), begin(100))
    (hand,) = state.hands.values()
    assert (state.free, hand.attempt, hand.first_begun) == ({101: Free(0, 9, 0)}, 1, 50)
    state = state_after(defer(100, BY_KEY, 2), defer(101, BY_TIME, until=9), defer(100, BY_KEY), defer(50, BY_TIME))
    assert (list(state.deferred), state.free) == ([100], {101: Free(0, 9, 0)})
    small = Settings(window=2)
    assert state_after(defer(100, BY_KEY, 3), settings=small).fresh == 100, "the window has no room"
    state = state_after(defer(100, BY_KEY, 2), (LOST, 0, 1, {"offset": 101, "token": ME}))
    assert (list(state.deferred), state.counts[3], state.ended[0].attempts) == ([100], 1, 0)


def test_lost_records_are_counted_and_hands_stay() -> None:
    lost = [begin(100), begin(101), begin(102), settle(1, 101, RELEASED), settle(2, 102, RELEASED)]
    state = state_after(*lost, (LOST, 0, 1, {"offset": 102, "token": ME}), (LOST, 0, 1, {"offset": 700, "token": ME}))
    assert (sorted(state.free), state.counts[3], state.fresh) == ([101], 1, 103)
    state = state_after(*lost, (LOST, 0, 0, {"offset": 400, "token": OTHER}))
    assert (state.free, state.in_hand, state.counts[3], state.fresh, len(state.ended)) == ({}, 1, 2, 400, 0)


def test_nothing_counts_after_a_seal_and_unknown_kinds_do_nothing() -> None:
    state = State(ME, 1, 100, Settings(), Counts())
    block = encode(SALT, 99) + encode(SALT, SEAL) + encode(SALT, *begin(100)[:3], **begin(100)[3])
    assert (state.apply(block, SALT), state.sealed, state.fresh) == (64, True, 100)
    assert (state.apply(block[64:], SALT), state.fresh) == (0, 100)
    state = state_after(begin(100), begin(101, OTHER), (SEAL, RESET, 0, {"offset": 7}))
    assert (state.fresh, state.hands, list(state.taken), state.in_hand) == (7, {}, [token(0)], 0)


def test_entry_that_differs_in_any_bit_or_is_cut_is_none() -> None:
    entry = encode(SALT, *begin(100)[:3], **begin(100)[3])
    assert len(entry) == ENTRY_BYTES
    for bit in range(8 * ENTRY_BYTES):
        spoilt = bytearray(entry)
        spoilt[bit // 8] ^= 1 << bit % 8
        assert State(ME, 1, 100, Settings(), Counts()).apply(bytes(spoilt), SALT) == 0
    for size in range(ENTRY_BYTES):
        assert State(ME, 1, 100, Settings(), Counts()).apply(entry[:size], SALT) == 0
    assert State(ME, 1, 100, Settings(), Counts()).apply(bytes(ENTRY_BYTES), SALT) == 0
    assert State(ME, 1, 100, Settings(), Counts()).apply(entry, SALT + 1) == 0


@pytest.mark.parametrize("seed", range(20))
def test_state_is_the_same_after_a_checkpoint_at_any_place(seed: int) -> None:
    """A checkpoint and the entries after it say what all entries say; and the replay is the same in any pieces."""
    draw, written, tokens = random.Random(seed), [], [(0, 0)]
    settings = Settings(max_attempts=3, window=20, max_in_hand=9)
    whole = State(ME, 1, 100, settings, Counts())
    split = State(OTHER, 1, 100, settings, Counts())
    for _ in range(400):
        offset = draw.choice([whole.fresh, whole.fresh + 3, draw.randrange(100, 160), *whole.free, *whole.deferred])
        kind = draw.choice(["begin", "begin", "settle", "settle", "reap", "lost", "pass", "renew", "defer", "again"])
        if kind == "begin":
            count, until = draw.choice((1, 1, 3)), draw.choice((0, 40))
            entry = begin(offset, draw.choice((ME, OTHER, 13)), count, until, spare=draw.choice((0, 0, 2)))
        elif kind == "settle":
            at, offset = draw.choice([*((each, hand.offset) for each, hand in whole.hands.items()), *tokens])
            outcome = draw.choice((ACCEPTED, ACCEPTED, RELEASED, RETURNED, REJECTED))
            entry = SETTLE, outcome, draw.choice((1, 3)), {"moment": draw.choice((0, 9)), "offset": offset, "token": at}
        elif kind == "reap":
            entry = REAP, EXPIRED, 0, {"moment": 50, "offset": ME, "token": draw.choice([*whole.hands, 0])}
        elif kind == "lost":
            entry = LOST, 0, draw.choice((0, 1, 1)), {"offset": draw.randrange(100, 110), "token": ME}
        elif kind == "defer":
            how = draw.choice(((BY_TIME, 30), (BY_KEY, 0)))
            entry = DEFER, how[0], draw.choice((1, 1, 3)), {"offset": offset, "moment": how[1]}
        elif kind == "again":
            entry = DEFER, BY_TIME, 1, {"offset": draw.choice([*whole.deferred, 0]), "moment": 70}
        elif kind == "pass":
            entry = PASS, 0, 0, {"offset": whole.fresh + draw.choice((-2, 0, 3))}
        else:
            entry = RENEW, 0, 0, {"moment": 60, "offset": 0, "token": draw.choice([*whole.hands, 0])}
        written.append(entry)
        block = encode(SALT, *entry[:3], **entry[3])
        for state in (whole, split):
            state.apply(block, SALT)
        if draw.random() < 0.2:
            entries_before = split.entries
            split = State(OTHER, 1, split.fresh, settings, Counts(*split.counts), sorted(items_of(split), key=_order))
            split.entries = entries_before
        assert sorted(items_of(whole)) == sorted(items_of(split)) and whole.counts == split.counts
        _check_room(whole)
        assert (whole.in_hand, whole.fresh) == (split.in_hand, split.fresh) and whole.in_hand == sum(
            map(len, whole.hands.values())
        )
    assert whole.counts[0] > 5 and len(written) == 400


@pytest.mark.parametrize("seed", range(20))
def test_the_usual_entries_in_few_steps_say_what_they_say_by_the_rules(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One state takes begins of one record and their accepts in fewer steps; the other one goes by the rules."""
    draw = random.Random(seed)
    settings = Settings(max_attempts=2, window=12, max_in_hand=draw.choice((0, 6)))
    quick = State(ME, 1, 100, settings, Counts())
    with monkeypatch.context() as patch:
        patch.setattr(State, "_count_room", _take_none_in_few_steps)
        slow = State(ME, 1, 100, settings, Counts())
        for number in range(60):
            block, tokens = b"", list(slow.hands.items())
            for _ in range(draw.choice((1, 3, 9))):
                if draw.random() < (0.9 if number % 20 < 6 else 0.3):  # until there is no room
                    offset = draw.choice((slow.fresh, slow.fresh, slow.fresh + 2, slow.fresh - 1, 100, *slow.free))
                    member, spare = draw.choice((ME, OTHER, 13)), draw.choice((0, 1, 9))
                    entry = begin(offset, member, draw.choice((1, 1, 1, 2)), draw.choice((0, 0, 0, 40)), spare=spare)
                elif tokens:
                    held, hand = draw.choice(tokens)
                    outcome = draw.choice((ACCEPTED, ACCEPTED, ACCEPTED, RELEASED, REJECTED))
                    fields = {"offset": hand.offset + draw.choice((0, 0, 0, 1)), "token": held}
                    entry = SETTLE, outcome, draw.choice((1, 1, 1, 2)), fields
                else:
                    entry = dead(draw.choice((OTHER, 13))) if draw.random() < 0.05 else settle(3, 103)
                block += encode(SALT, *entry[:3], **entry[3])
            assert slow.apply(block, SALT) == len(block)
            patch.undo()
            assert quick.apply(block, SALT) == len(block)
            _check_room(quick)
            patch.setattr(State, "_count_room", _take_none_in_few_steps)
            for name in ("counts", "fresh", "in_hand", "entries", "mine", "begun", "gone", "ended", "taken"):
                assert getattr(quick, name) == getattr(slow, name), name
            assert quick.unsettled <= settings.window and quick.in_hand <= (settings.max_in_hand or settings.window)
            if draw.random() < 0.3:
                assert sorted(items_of(quick)) == sorted(items_of(slow))
    assert sorted(items_of(quick)) == sorted(items_of(slow)) and quick.counts[0] > 5


def _check_room(state: State) -> None:
    before = state._plain_room, state._simple_room
    state._count_room()
    assert before == (state._plain_room, state._simple_room), "it is counted again whenever it changes"


def _take_none_in_few_steps(state: State) -> None:
    state._plain_room = state._simple_room = 0


def _order(item: Item) -> tuple[int, int]:
    return item.token, item.offset


# --- the file -------------------------------------------------------------------------------------------

MOMENT = Moment(NOW, 5_000_000, bytes(range(16)))
ITEMS = (Item(9, 0, 7_000_000, 0, 1, 0, 2), Item(12, pair(4, 1), 8_000_000, ME, 1, 2, 3))
CHECKPOINT = Checkpoint(2, 20, 99, Settings(3, 200, 5), Counts(1, 2, 3, 4), MOMENT, ITEMS)


def test_checkpoint_is_read_as_it_was_written_and_entries_begin_at_a_multiple_of_their_size() -> None:
    content = CHECKPOINT.encode(PLACE)
    assert generation.decode(content, "a", PLACE, 2) == CHECKPOINT._replace(items=list(ITEMS))
    for count in range(50):
        begun = CHECKPOINT._replace(items=ITEMS[:1] * count).encode(PLACE)
        assert len(begun) == generation.first_entry(count) and len(begun) % ENTRY_BYTES == 0


def test_damaged_or_foreign_checkpoint_is_never_believed() -> None:
    content = CHECKPOINT.encode(PLACE)
    end = generation.HEADER_BYTES + 2 * generation.ITEM_BYTES
    for byte in range(end):
        spoilt = bytearray(content)
        spoilt[byte] ^= 0x55
        with pytest.raises(CorruptLogError):
            generation.decode(bytes(spoilt), "a", PLACE, 2)
    for size in range(end):
        with pytest.raises(CorruptLogError):
            generation.decode(content[:size], "a", PLACE, 2)
    for place, number in ((PLACE._replace(share="other"), 2), (PLACE._replace(log_id=b"1" * 16), 2), (PLACE, 3)):
        with pytest.raises(CorruptLogError):
            generation.decode(content, "a", place, number)


def test_newer_file_is_called_newer_and_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    content = CHECKPOINT.encode(PLACE)
    monkeypatch.setattr(generation, "VERSION", 0)
    with pytest.raises(UnsupportedFormatError, match="1 is newer than this loglib"):
        generation.decode(content, "a", PLACE, 2)


def test_names_of_generations_sort_and_other_names_are_none() -> None:
    assert generation.generation_of(generation.file_name(12)) == 12
    for name in ("12.acks.tmp", ".12.acks", "acks", ".acks", "١.acks", "12.log"):
        assert generation.generation_of(name) is None


def test_checkpoint_of_another_boot_waits_for_the_rest_and_has_no_lease() -> None:
    later = Moment(NOW + 1_500_000, 100, bytes(16))
    waits, in_hand = CHECKPOINT.rebased(later).items
    assert (waits.until, in_hand.until) == (100 + 500_000, 1)
    for lead, rest in ((10**12, 0), (-(10**12), 2_000_000)):  # the wall clock was set
        assert CHECKPOINT.rebased(Moment(NOW + lead, 100, bytes(16))).items[0].until == 100 + rest


def test_free_record_that_need_not_wait_is_free_after_a_restart() -> None:
    free = CHECKPOINT._replace(items=(ITEMS[0]._replace(until=0),))
    assert free.rebased(Moment(NOW, 100, bytes(16))).items[0].until == 0


def test_i7_the_file_stays_small_and_has_a_checkpoint_of_what_is_unsettled(open_topic: Open) -> None:
    topic = with_records(open_topic, 500, files=UnsyncedFiles())
    with topic.share("mail", max_attempts=60_000) as share:
        jobs = taken(share, 3)
        most = 0
        for _ in range(20_000):
            (job,) = taken(share, 1)
            job.release(count=False)
            most = max(most, acks_of(topic).stat().st_size)
        assert acks_of(topic).name > generation.file_name(1)
        assert most <= (1 << 20) + 64 * 500
        assert [job.value for job in jobs] == ALL[:3]
        for job in jobs:
            job.accept()
    assert only(topic).counts.accepted == 3
    assert len(list(acks_of(topic).parent.iterdir())) == 1


def test_member_that_was_far_behind_goes_to_the_newest_generation(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_log, "_LOG_BYTES", 4 * ENTRY_BYTES)
    with topic.share("mail") as slow, topic.share("mail") as quick:
        first, second = taken(slow, 2)
        for _ in range(20):
            (job,) = taken(quick, 1)
            job.release(count=False)
        assert acks_of(topic).name > generation.file_name(5)
        first.accept()
        second.release()
        assert sorted(values(slow)) == ALL[1:]
    assert only(topic).counts.accepted == RECORDS


def test_settle_that_lands_after_a_seal_is_said_again(topic: Topic) -> None:
    with topic.share("mail") as share:
        jobs = taken(share, 3)
        topic.alter_share("mail", window=50)
        jobs[0].accept()
        topic.alter_share("mail", window=60)
        jobs[1].reject()
        loop = share.follow(0.0)
        next(loop)
        topic.alter_share("mail", window=70)
        next(loop)
        assert only(topic).counts == (2, 1, 0, 0)


def test_late_link_of_an_old_generation_is_passed_over(topic: Topic) -> None:
    """A process that was stopped before its link makes a file whose number others have left long ago."""
    with topic.share("mail") as share:
        first = acks_of(topic)
        old = first.read_bytes()
        taken(share, 1)
        for window in (50, 60, 70):
            topic.alter_share("mail", window=window)
            share.take(0.0)
        first.write_bytes(old)
        with topic.share("mail") as other:
            assert other.take(0.0) is not None
        assert only(topic).settled_to == 0 and topic.share_info("mail").settings.window == 70


@pytest.mark.parametrize("size", [1, 7, 31])
def test_torn_entry_ends_the_generation_and_nothing_before_it_is_lost(
    topic: Topic, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    share = topic.share("mail")
    for _ in range(3):
        taken(share, 1)[0].accept()
    jobs = taken(share, 1)
    with open(acks_of(topic), "ab") as file:
        file.write(os.urandom(size))
    assert only(topic).counts.accepted == 3, "looking changes nothing"
    jobs[0].accept()
    assert sorted(values(share)) == ALL[4:]
    share.close()
    assert only(topic).counts.accepted == RECORDS
    assert "a new generation begins" in caplog.text and acks_of(topic).name == generation.file_name(2)


@pytest.mark.parametrize("garbage", [bytes(4096), b"\xff" * 64], ids=["zeros", "garbage"])
def test_zeros_after_a_power_cut_end_the_generation(topic: Topic, garbage: bytes) -> None:
    with topic.share("mail") as share:
        taken(share, 1)[0].accept()
        share.flush()
    with open(acks_of(topic), "ab") as file:
        file.write(garbage)
    with topic.share("mail") as share:
        assert values(share) == ALL[1:]


def test_seal_is_written_only_if_bytes_stay_bad(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that once gave other bytes ends no generation in another place than for other members."""
    share = topic.share("mail")
    (job,) = taken(share, 1)
    real, spoil = State.apply, [True]

    def apply(state: State, block: bytes, salt: int) -> int:
        if spoil:
            spoil.clear()
            return 0
        return real(state, block, salt)

    with topic.share("mail") as other:
        (mine,) = taken(other, 1)
        monkeypatch.setattr(State, "apply", apply)
        job.accept()
        monkeypatch.undo()
        mine.accept()
        assert only(topic).counts.accepted == 2
    share.close()


def test_other_boot_ends_leases_and_begins_a_generation(open_topic: Open) -> None:
    boots = [b"a" * 16]

    class Rebooted(SystemClock):
        def __call__(self) -> int:
            return NOW

        def moment(self) -> Moment:
            return Moment(NOW, 50_000_000 if boots == [b"a" * 16] else 1_000_000, boots[0])

    topic = with_records(open_topic, clock=Rebooted())
    before = topic.share("mail", lease=3600)
    jobs = taken(before, 2)
    jobs[0].release(30)
    die(before)
    boots[:] = [b"b" * 16]
    with topic.share("mail", lease=3600) as share:
        assert acks_of(topic).name == generation.file_name(2)
        assert [(job.value, job.attempt) for job in share.follow(0.0)][:1] == [(b"1", 2)]
        assert only(topic).waiting == {jobs[0].offset: 30.0}


def test_member_of_another_machine_is_refused_while_one_lives(open_topic: Open) -> None:
    class Elsewhere(SystemClock):
        def moment(self) -> Moment:
            return Moment(NOW, 1, b"elsewhere-------")

    topic = with_records(open_topic)
    with topic.share("mail"), pytest.raises(LockedError, match="one machine"):
        open_topic(mode="r", clock=Elsewhere()).share("mail")
    assert topic.share_info("mail").members == {}


@pytest.mark.parametrize("room", range(0, 97, 8))
def test_full_disk_at_any_byte_loses_nothing(open_topic: Open, room: int) -> None:
    disk = FullDisk(1 << 20, inner=UnsyncedFiles())
    topic = with_records(open_topic, files=disk)
    share = topic.share("mail")
    loop = share.follow(0.0)
    got = [next(loop).value]
    disk.room = room
    with pytest.raises(StorageFullError):
        got.extend(job.value for job in loop)
    jobs: list[Any] = []
    with pytest.raises(StorageFullError):
        jobs += taken(share, RECORDS)
    disk.room = 1 << 20
    del jobs, loop
    got += values(share)
    share.close()
    assert set(got) == set(ALL)
    assert only(topic).counts.accepted == RECORDS


def test_full_disk_at_a_new_generation_is_said_and_then_mended(topic: Topic, open_topic: Open) -> None:
    topic.close()
    disk = FullDisk(1 << 20, inner=UnsyncedFiles())
    reading = open_topic(mode="r", files=disk)
    with reading.share("mail") as share:
        (job,) = taken(share, 1)
        reading.alter_share("mail", window=77)
        disk.room = 0
        with pytest.raises(StorageFullError):
            job.release()
        disk.room = 1 << 20
        job.accept()
        assert len(values(share)) == RECORDS - 1
    assert not [each for each in acks_of(reading).parent.iterdir() if each.name.endswith(".tmp")]


def test_restored_log_is_refused(topic: Topic, open_topic: Open, path: Path, tmp_path: Path) -> None:
    """A backup of the records beside the newer files of a share."""
    before = crash_copy(path, tmp_path / "before")
    topic.append_many([b"more"] * 5)
    topic.flush()
    with topic.share("mail") as share:
        values(share)
    topic.close()
    (before / "shares").mkdir(exist_ok=True)
    os.rename(path / "shares", before / "shares2")
    os.rmdir(before / "shares")
    os.rename(before / "shares2", before / "shares")
    older = open_topic(before)
    with pytest.raises(ShareReplacedError, match="the log ends at offset"):
        older.share("mail")
    older.append_many([b"other"] * 40)
    older.flush()
    with pytest.raises(ShareReplacedError, match="CRC"):
        older.reset_share("mail", "end")
        acks = acks_of(older)
        spoilt = generation.decode(acks.read_bytes(), "a", Place(older.log_id, 0, "mail"), 2)
        acks.write_bytes(spoilt._replace(history=spoilt.history ^ 1).encode(Place(older.log_id, 0, "mail")))
        older.share("mail")


def restored_and_grown(
    topic: Topic, open_topic: Open, path: Path, tmp_path: Path, more: int, work: Callable[[Share], object],
    grows: int = 40,
) -> Topic:  # fmt: skip
    """An older copy of the topic with the present share, to which other records were appended since."""
    before = crash_copy(path, tmp_path / "before")
    topic.append_many([b"more"] * more)
    topic.flush()
    with topic.share("mail") as share:
        work(share)
    topic.close()
    os.rename(path / "shares", before / "shares")
    older = open_topic(before)
    older.append_many([b"other"] * grows)
    older.flush()
    return older


def test_log_that_was_restored_and_has_grown_again_is_refused(
    topic: Topic, open_topic: Open, path: Path, tmp_path: Path
) -> None:
    """Otherwise its new records would count as settled, and nobody would handle them."""
    older = restored_and_grown(topic, open_topic, path, tmp_path, 5, values)
    with pytest.raises(ShareReplacedError, match="CRC"):
        older.share("mail")
    older.reset_share("mail", "begin")
    with older.share("mail") as share:
        assert values(share)[-40:] == [b"other"] * 40


def accept_some(share: Share) -> None:
    """Settle some of the records that came after the copy, and leave others."""
    for job in taken(share, RECORDS + 5):
        job.accept()


def test_log_that_was_restored_is_refused_though_no_member_was_at_its_end(
    topic: Topic, open_topic: Open, path: Path, tmp_path: Path
) -> None:
    older = restored_and_grown(topic, open_topic, path, tmp_path, 20, accept_some)
    with pytest.raises(ShareReplacedError, match="CRC"):
        older.share("mail")


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize(("work", "more"), [(values, 5), (accept_some, 20)], ids=["all", "some"])
@pytest.mark.parametrize("how", ["altered", "another boot", "a transaction"])
def test_log_that_was_restored_is_refused_also_in_the_next_generation(
    topic: Topic, open_topic: Open, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    *, how: str, grown: bool, work: Callable[[Share], object], more: int,
) -> None:  # fmt: skip
    """It may begin before any member looks at the log, or while the log is still shorter than the share knows it."""
    older = restored_and_grown(topic, open_topic, path, tmp_path, more, work, grows=40 if grown else 0)
    with monkeypatch.context() as patch:
        if how == "altered":
            older.alter_share("mail", window=77)
        else:
            patch.setattr(AckLog, "_is_of_another_boot", lambda _: True)
            if how == "another boot":
                with pytest.raises(ShareReplacedError):
                    older.share("mail")
            else:
                settle_in_file(older._files, older.path, "mail", 0, [], PlainClock(lambda: NOW))
    older.append_many([b"other"] * 40)
    older.flush()
    with pytest.raises(ShareReplacedError, match="CRC"):
        older.share("mail")
    older.reset_share("mail", "begin")
    with older.share("mail") as share:
        assert values(share) == values_of(older)


@pytest.mark.parametrize("grown", [False, True])
def test_log_that_was_restored_is_refused_also_after_a_member_was_killed(
    topic: Topic, open_topic: Open, path: Path, tmp_path: Path, *, grown: bool
) -> None:
    """What it has begun lies after the last place that the share knows of the log."""

    def taken_by_a_member_that_dies(share: Share) -> None:
        accept_some(share)
        share.close()

        def take() -> None:
            with Topic.open(path, mode="r") as topic:
                taken(topic.share("mail"), 3)
                os._exit(0)

        assert wait(fork(take)) == 0

    older = restored_and_grown(
        topic, open_topic, path, tmp_path, 20, taken_by_a_member_that_dies, grows=40 if grown else 0
    )
    older.alter_share("mail", window=77)
    older.append_many([b"other"] * 40)
    older.flush()
    with pytest.raises(ShareReplacedError, match="CRC"):
        older.share("mail")


def test_lag_of_a_share_is_all_of_a_log_that_ends_before_its_place(
    topic: Topic, open_topic: Open, path: Path, tmp_path: Path
) -> None:
    """No member can join, so nothing must look as if all was handled."""
    older = restored_and_grown(topic, open_topic, path, tmp_path, 50, values)
    end = older.partition(0).high_watermark
    assert only(older).next_offset > end
    assert older.stats().shares["mail"].partitions[0].lag.bytes == end
    assert _share_facts(older, older.share_info("mail"))["lag_bytes"] == end


@pytest.mark.parametrize("rolled", [False, True])
def test_repair_of_the_last_batch_is_no_other_log(open_topic: Open, path: Path, *, rolled: bool) -> None:
    with with_records(open_topic) as topic:
        topic.append(b"last", sync=True)
        offset = topic.partition(0).segments[-1].base_offset + 192
        with topic.share("mail") as share:
            assert len(values(share)) == RECORDS + 1
        if rolled:
            topic.partition(0).roll()
    spoil(path / "0000" / f"{0:020}.log", 4096 + offset + 80)
    repair(path)
    with open_topic(mode="a") as topic, topic.share("mail") as share:
        assert values(share) == []
        topic.append(b"next", sync=True)
        assert values(share) == [b"next"]


def test_share_and_group_whose_names_would_not_be_listed_are_not_made(topic: Topic) -> None:
    """A topic with their members would be renamed under them, and retention would hold nothing for them."""
    for join in (topic.share, topic.group):
        with pytest.raises(ValueError, match="'.hidden' begins with a dot"):
            join(".hidden")
    assert (topic.shares(), topic.groups()) == ([], [])


def test_files_of_another_topic_are_refused(topic: Topic, open_topic: Open, tmp_path: Path) -> None:
    with topic.share("mail"):
        pass
    other = open_topic(tmp_path / "other")
    os.rename(f"{topic.path}/shares", f"{other.path}/shares")
    with pytest.raises(CorruptLogError):
        other.share("mail")


def test_moved_and_recreated_topic_ends_its_members(open_topic: Open, path: Path, tmp_path: Path) -> None:
    with_records(open_topic).close()
    reading = open_topic(mode="r")
    share = reading.share("mail")
    (job,) = taken(share, 1)
    os.rename(path, tmp_path / "moved")
    with_records(open_topic, 4)
    job.accept()
    with pytest.raises(LogMovedError):
        share._look_at_members()
    share.close()
    with open_topic(mode="r").share("mail") as fresh:
        assert values(fresh) == ALL[:4]


def test_missing_and_damaged_files_are_named(topic: Topic) -> None:
    with topic.share("mail"):
        pass
    place = Path(topic.path) / "shares" / "mail"
    settings = (place / "share.json").read_bytes()
    (place / "share.json").write_bytes(settings.replace(b"5", b"6"))
    with pytest.raises(CorruptLogError):
        topic.share("mail")
    (place / "share.json").write_bytes(settings)
    acks_of(topic).unlink()
    for call in (lambda: topic.share("mail"), lambda: topic.share_info("mail")):
        with pytest.raises(CorruptLogError, match="no file of a share"):
            call()
    (place / "share.json").unlink()
    with pytest.raises(LogError, match="something else"):
        topic.share("mail")


def test_foreign_names_do_no_harm(topic: Topic) -> None:
    with topic.share("mail"):
        pass
    place = Path(topic.path) / "shares"
    (place / "mail" / "members" / "README").write_text("x")
    (place / "mail" / "members" / "0000abcd").mkdir()
    (place / "mail" / "members" / "0000abce").write_text("not held")
    (place / "mail" / "0000" / "notes").write_text("x")
    (place / ".hidden").mkdir()
    with topic.share("mail") as share:
        assert values(share) == ALL and topic.shares() == ["mail"]
        assert len(topic.share_info("mail").members) == 1


def test_i9_opening_a_share_costs_the_same_in_a_large_topic(
    open_topic: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_policies, "_LOOK_S", 1e18)  # a reader looks for new policies when it joins first
    calls = []
    for count in (30, 3000):
        files = RecordingFiles(UnsyncedFiles())
        with_records(open_topic, count, at=tmp_path / str(count)).close()
        topic = open_topic(tmp_path / str(count), mode="r", files=files)
        with topic.share("mail", start="end"):
            pass
        files.calls.clear()
        files.bytes_read.clear()
        with topic.share("mail"):
            calls.append((len(files.calls), sum(size for name, size in files.bytes_read.items() if ".log" in name)))
    assert calls[0][0] == calls[1][0] and abs(calls[1][1] - calls[0][1]) <= 8192


def test_taking_and_settling_costs_two_calls(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_moment, "_RECENT_S", 1e18)
    files = RecordingFiles(UnsyncedFiles())
    topic = open_topic(files=files)
    topic.append_many([b"x"] * 90)
    topic.flush()
    with topic.share("mail", commit=1000) as share:
        loop = share.follow(0.0)
        for _ in range(10):
            next(loop)
        share._look_at = share._read_at = 1e18
        files.calls.clear()
        for _ in range(50):
            next(loop)
        name = acks_of(topic).name
        assert files.named() == [("append", name), ("pread", name)] * 50


@pytest.mark.parametrize("moment_s", [0.0, 1e18], ids=["with a look before", "in few steps"])
def test_members_that_are_behind_get_the_next_records_and_none_twice(
    open_topic: Open, monkeypatch: pytest.MonkeyPatch, moment_s: float
) -> None:
    monkeypatch.setattr(recent_moment, "_RECENT_S", moment_s)
    topic = open_topic()
    for _ in range(4):
        topic.append_many([b"x"] * 100)
        topic.flush()
    with topic.share("mail") as one, topic.share("mail") as two, topic.share("mail") as three:
        loops, draw, offsets = [each.follow(0.0) for each in (one, two, three)], random.Random(1), list[int]()
        for each in (one, two, three):
            each._look_at = each._read_at = 1e18  # what the others write, each learns only from the file
        while loops:
            loop = draw.choice(loops)
            job = next(loop, None)
            if job is None:
                loops.remove(loop)
            else:
                offsets.append(job.offset)
                assert job.record.value == b"x"
    assert len(offsets) == len(set(offsets)) == 400 == only(topic).counts.accepted


def test_share_in_memory_works_as_on_a_disk(open_topic: Open) -> None:
    from loglib import testing

    files = MemoryFiles()
    files.mkdir("/t")
    with testing.open_topic("/t/topic", files=files, clock=Clock()) as topic:
        topic.append_many([b"a", b"b"])
        topic.flush()
        with topic.share("mail") as share:
            assert values(share) == [b"a", b"b"]


def test_lost_records_of_retention_are_settled_and_named(
    open_topic: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    topic = with_records(open_topic)
    with topic.share("mail") as share:
        jobs = taken(share, 3)
        jobs[0].release()
        topic.partition(0).roll()
        topic.append(b"kept", sync=True)
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        assert jobs[1].value == b"1"
        jobs[1].release()
        jobs[2].accept()
        with topic.share("mail") as other:  # the first one has read them
            assert values(other) == [b"kept"]
    assert only(topic).counts == (2, 0, 0, 2)
    assert "that nobody had begun" in caplog.text and "lost: the log no longer has it" in caplog.text


def test_nothing_is_lost_where_all_records_were_accepted_before_retention_dropped_them(
    open_topic: Open, caplog: pytest.LogCaptureFixture
) -> None:
    topic = with_records(open_topic)
    with topic.share("mail") as share:
        assert len(values(share)) == RECORDS
        topic.partition(0).roll()
        end = topic.partition(0).high_watermark
        assert only(topic).next_offset == end
        topic.partition(0).delete_before(end)
        topic.append(b"kept", sync=True)
        with topic.share("mail") as other:
            assert values(other) == [b"kept"]
    assert only(topic).counts == (RECORDS + 1, 0, 0, 0) and caplog.text == ""


def test_member_that_left_after_the_last_record_has_settled_its_whole_batch(
    open_topic: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks for no further record, so it does not see that there is none. Retention can drop the segment."""
    topic = with_records(open_topic)
    with topic.share("mail") as share:
        for _ in range(RECORDS):
            (job,) = taken(share, 1)
            job.accept()
    end = topic.partition(0).high_watermark
    assert only(topic).settled_to == end
    topic.partition(0).roll()
    topic.append(b"kept", sync=True)
    topic.partition(0).delete_before(end)
    with topic.share("mail") as other:
        assert values(other) == [b"kept"]
    assert caplog.text == ""


@pytest.mark.parametrize("limits", [{"max_in_hand": 2}, {"window": 2}], ids=["in hand", "window"])
def test_records_that_a_limit_keeps_back_are_not_passed_over(open_topic: Open, limits: dict[str, int]) -> None:
    topic = with_records(open_topic)
    with topic.share("mail", **limits) as share:  # type: ignore[arg-type]
        jobs = taken(share, 2)
        with suppress(ShareFullError):
            assert share.take(0.0) is None
        for job in jobs:
            job.accept()
        assert len(values(share)) == RECORDS - 2
    assert only(topic).counts.accepted == RECORDS


def test_damaged_record_is_raised_and_nothing_is_begun(topic: Topic, path: Path) -> None:
    segment = max((path / "0000").glob("*.log"))
    content = bytearray(segment.read_bytes())
    content[4096 + 80] ^= 1
    segment.write_bytes(content)
    with topic.share("mail") as share:
        with pytest.raises(CorruptLogError):
            share.take(0.0)
        assert only(topic).in_hand == ()


def test_errors_of_a_disk_are_told_and_the_record_stays_in_hand(open_topic: Open) -> None:
    from loglib.testing import FaultyFiles

    files = FaultyFiles("append", every=True, error=errno.EIO, armed=False, inner=UnsyncedFiles())
    topic = with_records(open_topic, files=files)
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        files.armed = True
        with pytest.raises(LogError, match="begun or settled"):
            job.accept()
        files.armed = False
        job.accept()
    assert only(topic).counts.accepted == 1


def test_codes_of_entries_are_frozen() -> None:
    assert (BEGIN, SETTLE, RENEW, REAP, LOST, PIN, SEAL, PASS, DEFER) == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert (BY_TIME, BY_KEY) == (1, 2)
    assert (ACCEPTED, RELEASED, RETURNED, REJECTED, DEAD, EXPIRED, entries.PLAIN, entries.ALTERED, RESET) == (
        1, 2, 3, 4, 1, 2, 0, 1, 2,
    )  # fmt: skip


def seal_first(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the generation end before the next entry. It does so again when the list is cleared."""
    real, sealed = ack_log.AckLog.append, list[int]()

    def append(acks: ack_log.AckLog, written: list[bytes]) -> None:
        if not sealed:
            sealed.append(1)
            real(acks, [acks.encode(SEAL)])
        real(acks, written)

    monkeypatch.setattr(ack_log.AckLog, "append", append)
    return sealed


def test_change_that_lands_after_a_seal_is_made_again(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another member ends the generation between the look of the operator and the seal."""
    share = topic.share("mail", member="one")
    jobs = taken(share, 2)
    sealed = seal_first(monkeypatch)
    topic.alter_share("mail", max_attempts=1)
    sealed.clear()
    assert list(topic.evict_share_member("mail", "one")) == [0]
    monkeypatch.undo()
    info = only(topic)
    assert (info.counts.exhausted, info.in_hand, info.free) == (2, (), 0) and len(jobs) == 2
    die(share)


def test_lost_entry_that_lands_after_a_seal_is_written_again(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    topic.partition(0).roll()
    topic.append(b"kept", sync=True)
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        job.accept()
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        with topic.share("mail") as other:
            seal_first(monkeypatch)
            assert values(other) == [b"kept"]
            monkeypatch.undo()


def test_record_in_a_declared_gap_is_settled_as_lost(topic: Topic) -> None:
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        job.release()
        taking = share._takings[0]
        state = taking._lose(taking.acks.state, job.offset)
        assert (state.free, state.counts[3]) == ({}, 1)
        assert values(share) == ALL[1:]


def test_member_that_always_meets_a_new_generation_gives_up(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    with topic.share("mail"):
        pass
    newest = iter(range(1, 1000))
    monkeypatch.setattr(ack_log.AckLog, "_newest", lambda _: next(newest))
    with pytest.raises(CorruptLogError, match="a new generation at each of 100 looks"):
        topic.share("mail")


def test_flipped_bit_before_the_end_ends_the_generation_for_all(topic: Topic) -> None:
    """Members that have read on, and those that come later, agree: the first one that links decides."""
    with topic.share("mail") as share:
        jobs = taken(share, 4)
        for job in jobs[:3]:
            job.accept()
        content = bytearray(acks_of(topic).read_bytes())
        content[-ENTRY_BYTES - 5] ^= 4
        acks_of(topic).write_bytes(content)
        with topic.share("mail") as other:
            got = values(other)
        assert set(ALL[4:]) <= set(got)
        del job
        got += values(share)
        jobs[3].accept()
    assert (only(topic).in_hand, only(topic).free, only(topic).counts.accepted) == ((), 0, RECORDS)


def test_records_that_are_far_ahead_are_sought(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from loglib.jobs import records

    monkeypatch.setattr(records, "_FAR_BYTES", 8)
    topic = open_topic()
    for number in range(40):
        topic.append(b"%d" % number, sync=True)
    monkeypatch.setattr("loglib.log.cursor.BLOCK_BYTES", 256)
    with topic.share("mail") as slow, topic.share("mail") as quick:
        assert taken(slow, 1)[0].value == b"0"
        jobs = taken(quick, 30)
        assert taken(slow, 1)[0].value in (b"0", b"31")
        for job in jobs[::-1]:
            job.release()
        assert {job.value for job in taken(slow, 30)} >= {b"5", b"20"}


def test_copy_of_hard_links_has_a_share_of_its_own(topic: Topic, open_topic: Open, path: Path, tmp_path: Path) -> None:
    """As `cp -al` makes it, beside a member that lives on."""
    with topic.share("mail") as share:
        (job,) = taken(share, 1)
        copy = tmp_path / "copy"
        shutil.copytree(path, copy, copy_function=os.link)
        for each in (copy / "shares" / "mail" / "members").iterdir():
            each.unlink()
        copied = open_topic(copy, mode="r")
        with copied.share("mail") as other:
            assert sorted(values(other)) == ALL, "in the copy the member is dead, and its record comes again"
        assert only(topic).counts.accepted == 0 and only(copied).counts.accepted == RECORDS
        job.accept()
        assert values(share) == ALL[1:]
    assert only(topic).counts.accepted == only(copied).counts.accepted == RECORDS


def test_generation_that_ended_while_it_was_opened_is_left(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing came before others went on, and a late link has given the old number a file again."""
    with topic.share("mail"):
        pass
    first = acks_of(topic)
    old = first.read_bytes()
    topic.alter_share("mail", window=77)
    first.write_bytes(old)
    real, listed = ack_log.AckLog._newest, [1]
    monkeypatch.setattr(ack_log.AckLog, "_newest", lambda acks: listed.pop() if listed else real(acks))
    with topic.share("mail") as share:
        assert share._takings[0].acks.state.settings.window == 77


def test_file_of_a_share_is_closed_once(topic: Topic, path: Path) -> None:
    """A second `close` closes no file that has got the same number meanwhile."""
    with topic.share("mail"):
        pass
    before = open_files()
    acks = topic._share_directory("mail").acks(0, 0)
    assert len(opened_since(before)) == 2
    acks.close()
    others = [os.open(path / "topic.json", os.O_RDONLY) for _ in range(2)]
    acks.close()
    for each in others:
        os.close(each)
    assert not opened_since(before)


def test_log_that_ends_before_what_others_have_begun_is_refused(topic: Topic) -> None:
    """An older log was put in the place of one whose later records another member has passed over."""
    with topic.share("mail") as share:
        values(share)
        end = topic.partition(0).high_watermark
        with closing(topic._share_directory("mail").acks(0, OTHER)) as acks:
            acks.append([acks.encode(PASS, offset=end + 4096)])
        with pytest.raises(ShareReplacedError, match=f"the log ends at offset {end}"):
            share.take(0.0)


def test_member_far_behind_reads_past_the_records_of_others(
    open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.log.cursor.BLOCK_BYTES", 256)
    topic = open_topic()
    for number in range(40):
        topic.append(b"%d" % number, sync=True)
    with topic.share("mail") as slow, topic.share("mail") as quick:
        jobs = taken(slow, 1) + taken(quick, 30)
        assert [job.value for job in taken(slow, 2)] == [b"31", b"32"] and len(jobs) == 31


def test_released_record_in_a_declared_gap_is_lost_and_the_next_ones_come(open_topic: Open, path: Path) -> None:
    with with_records(open_topic) as topic:
        with topic.share("mail") as share:
            taken(share, 1)[0].release()
        topic.partition(0).roll()
        topic.append(b"kept", sync=True)
    spoil(path / "0000" / f"{0:020}.log", 4096 + 80)
    repair(path)
    reading = open_topic(mode="r")
    with reading.share("mail") as share:
        assert values(share) == [b"kept"]
    assert only(reading).counts == (1, 0, 0, 1)


def test_member_far_behind_continues_after_retention_has_dropped_what_others_have_settled(
    open_topic: Open, caplog: pytest.LogCaptureFixture
) -> None:
    topic = open_topic(segment_bytes=4096)
    for number in range(12):
        topic.append(b"%d" % number + b"x" * 1500, sync=True)
    with topic.share("mail") as slow, topic.share("mail") as quick:
        for job in taken(slow, 1) + taken(quick, 9):
            job.accept()
        topic.partition(0).delete_before(only(topic).settled_to)
        assert len(topic.partition(0).segments) < 3
        assert [value[:2] for value in values(slow)] == [b"10", b"11"]
    assert only(topic).counts == (12, 0, 0, 0) and caplog.text == ""


def test_lag_of_a_share_is_all_of_an_older_log_that_has_grown_past_its_place(
    topic: Topic, open_topic: Open, path: Path, tmp_path: Path
) -> None:
    """No member can join, so nothing must look as if all but the last records was handled."""
    older = restored_and_grown(topic, open_topic, path, tmp_path, 5, values)
    end = older.partition(0).high_watermark
    assert only(older).is_of_another_log and only(older).next_offset < end
    assert older.stats().shares["mail"].partitions[0].lag.bytes == end


def test_share_of_a_log_that_cannot_be_read_is_described(
    topic: Topic, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(directory: ShareDirectory, acks: AckLog) -> None:
        raise CorruptLogError(str(path), 0, "one byte", "another one")

    with topic.share("mail") as share:
        assert len(values(share)) == RECORDS
    monkeypatch.setattr(ShareDirectory, "check_history", damaged)
    assert not only(topic).is_of_another_log and only(topic).counts.accepted == RECORDS
