"""Finding batches by pointers: whatever their payloads hold, and around damage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from builders import BODY_AT, IDENTITY, NOW, PLAIN, calm, chained, forged, header_of, stamped, write_segment
from hypothesis import given, settings
from hypothesis import strategies as st

from loglib.errors import CorruptLogError
from loglib.format import header as batch
from loglib.format.chain import Jumps, added
from loglib.format.columns import Columns
from loglib.format.header import Header
from loglib.log.search import (
    after_damage,
    around,
    first_reaching,
    jumps_at,
    likely_headers,
    proven_headers,
    refuse_damage,
)
from loglib.segment import HEADER_BYTES, SegmentReader
from loglib.system.files import REAL

TINY = Columns([b"tiny"])


class Counting(SegmentReader):
    """A segment that counts the headers read, one by one."""

    looks = 0

    def header_at(self, offset: int) -> Header:
        self.looks += 1
        return super().header_at(offset)

    def headers(self, offset: int, limit: int) -> Iterator[Header]:
        for header in super().headers(offset, limit):
            self.looks += 1
            yield header


def opened(path: Path) -> Counting:
    return Counting(REAL, str(path), IDENTITY)


def headers_in(stored: bytes) -> list[Header]:
    headers, at = [], 0
    while at < len(stored):
        headers.append(header_of(stored[at:], at))
        at = headers[-1].next_offset
    return headers


def fakes(headers: list[Header], place: int, end: int, choose: random.Random) -> bytes:
    """A chain of batches for the bytes [place, end) of the log, right in every respect that can be checked.

    Whoever makes it knows the log, and guesses where the value that holds it will stand.
    """
    stored, previous = b"", headers[-1]
    while True:
        body = batch.encode_body(Columns([b"invented %d" % choose.randrange(1 << 30)]), codec=0)
        if place + len(stored) + body.length > end:
            return stored
        jump = choose.choice([each.base_offset for each in headers])
        here = place + len(stored)
        header = stamped(
            body, here, previous_crc=previous.header_crc, previous_bytes=here - previous.base_offset,
            jump_offset=jump, running_max=NOW + choose.randrange(10_000), durable_up_to=end,
        )  # fmt: skip
        stored += header + b"".join(body.parts)
        previous = header_of(header, here)


def hostile(seed: int, count: int = 40) -> bytes:
    """Batches whose payloads are made of batches, each in its right place."""
    choose = random.Random(seed)
    parts = [PLAIN]
    stored = chained(parts)
    for _ in range(count):
        headers = headers_in(stored)
        # A lone value stands behind one column of offsets: its place is easily guessed.
        start = len(stored) + BODY_AT + 8
        size = choose.choice((0, 8, 200, 300, 1500, 6000))
        forgery = fakes(headers, start, start + size, choose)
        parts.append(Columns([forgery + batch.MAGIC * choose.randrange(20)], timestamps=[NOW + choose.randrange(9000)]))
        stored = chained(parts)
    return stored


def steps(stored: bytes) -> Iterator[tuple[int, Header]]:
    """Each offset, and the batch that holds it."""
    for header in headers_in(stored):
        for offset in range(header.base_offset, header.next_offset):
            yield offset, header


# --- jumps --------------------------------------------------------------------------------------------------


def chain(jumps: Jumps | None) -> list[int]:
    found = []
    while jumps is not None:
        found.append(jumps.base_offset)
        jumps = jumps.rest
    return found


def test_jumps_go_to_earlier_batches_in_a_chain_of_logarithmic_length() -> None:
    jumps: Jumps | None = None
    targets = {}
    for number in range(5000):
        jumps = added(jumps, 8 * number)
        targets[8 * number] = jumps.jump_offset
        assert len(chain(jumps)) <= 2 * (number + 2).bit_length()
    assert targets.pop(0) == 0
    assert all(target < place for place, target in targets.items())
    for place, target in targets.items():
        assert chain(jumps)[-1] == 0
        assert target in targets or target == 0, place


def test_any_batch_is_found_in_few_steps(tmp_path: Path) -> None:
    stored = chained([TINY] * 3000)
    size = len(stored) // 3000
    with opened(write_segment(tmp_path, stored)) as segment:
        most = 0
        for number in range(0, 3000, 7):
            segment.looks = 0
            header, place = around(segment, number * size + 5, len(stored) - size, len(stored))
            assert header is not None and header.base_offset == place == number * size
            most = max(most, segment.looks)
        assert most <= 3 * 12, "3 log2(n)"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 100, 1000])
def test_jumps_are_found_again_as_they_were_when_the_segment_is_opened(tmp_path: Path, count: int) -> None:
    stored = chained([TINY] * count)
    jumps: Jumps | None = None
    for header in headers_in(stored):
        jumps = added(jumps, header.base_offset)
        assert header.jump_offset == jumps.jump_offset
    with opened(write_segment(tmp_path, stored)) as segment:
        assert jumps_at(segment, headers_in(stored)[-1].base_offset) == jumps


@pytest.mark.parametrize("count", [2, 3, 7, 8, 9, 100, 1000])
def test_jumps_are_found_from_those_of_each_earlier_batch(tmp_path: Path, count: int) -> None:
    headers = headers_in(stored := chained([TINY] * count))
    before: list[Jumps] = []
    for header in headers:
        before.append(added(before[-1] if before else None, header.base_offset))
    with opened(write_segment(tmp_path, stored)) as segment:
        segment.looks = 0
        assert jumps_at(segment, headers[-1].base_offset) == before[-1]
        whole = segment.looks
        for known in before:
            segment.looks = 0
            assert jumps_at(segment, headers[-1].base_offset, known) == before[-1]
            assert segment.looks <= whole
        assert segment.looks <= 1 + count.bit_length(), "of the last batch only its own distance is unknown"


def test_jumps_of_another_log_are_not_taken_for_known(tmp_path: Path) -> None:
    headers = headers_in(stored := chained([TINY] * 100))
    whole = jumps_of(headers)
    with opened(write_segment(tmp_path, stored)) as segment:
        for known in (Jumps(headers[50].base_offset + 1, 0, None), Jumps(headers[-1].base_offset + 9, 1, None)):
            assert jumps_at(segment, headers[-1].base_offset, known) == whole


def test_jumps_are_found_as_far_as_headers_are_whole(tmp_path: Path) -> None:
    stored = bytearray(chained([TINY] * 100))
    headers = headers_in(bytes(stored))
    whole = chain(jumps_of(headers))
    for lost in (0, 50, 90, 98):
        damaged = bytearray(stored)
        damaged[headers[lost].base_offset + 20] ^= 1
        with opened(write_segment(new(tmp_path), bytes(damaged))) as segment:
            found = jumps_at(segment, headers[-1].base_offset)
            bad = headers[lost].base_offset
            assert chain(found) == (whole[: whole.index(bad)] if bad in whole else whole)
            again = added(found, len(stored))
            assert again.jump_offset < again.base_offset


def jumps_of(headers: list[Header]) -> Jumps | None:
    jumps: Jumps | None = None
    for header in headers:
        jumps = added(jumps, header.base_offset)
    return jumps


# --- offsets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_payloads_of_batches_in_their_right_places_are_never_found(tmp_path: Path, seed: int) -> None:
    stored = hostile(seed)
    last = headers_in(stored)[-1].base_offset
    inside = 0
    with opened(write_segment(tmp_path, stored)) as segment:
        for offset, here in steps(stored):
            if offset % 8 == 0 and offset != here.base_offset:
                try:
                    segment.header_at(offset)
                    inside += 1  # a payload that would pass for a batch
                except CorruptLogError:
                    pass
            if offset % 8 == 0 or offset % 131 == 0:
                assert around(segment, offset, last, len(stored)) == (here, here.base_offset)
    assert inside > 50, "the payloads must be real attacks"


def test_every_byte_of_a_small_segment_finds_its_batch(tmp_path: Path) -> None:
    stored = chained([PLAIN, TINY, PLAIN, TINY, TINY])
    last = headers_in(stored)[-1].base_offset
    with opened(write_segment(tmp_path, stored)) as segment:
        for offset, here in steps(stored):
            assert around(segment, offset, last, len(stored)) == (here, here.base_offset)
            assert around(segment, offset, None, len(stored)) == (here, here.base_offset), "the end is not known"


def test_end_of_the_log_that_lies_before_the_offset_is_damage(tmp_path: Path) -> None:
    stored = chained([TINY] * 3)
    size = len(stored) // 3
    with opened(write_segment(tmp_path, stored)) as segment:
        assert around(segment, 2 * size + 1, 0, len(stored))[1] == 2 * size, "the batches behind it tell"
        assert around(segment, len(stored) + 5, 2 * size, len(stored) + 100) == (None, len(stored))
        assert around(segment, len(stored) + 5, 2 * size, len(stored)) == (None, len(stored))


@pytest.mark.parametrize("size", [4096 - BODY_AT, 5000, 70_000, 2_500_000])
def test_large_batch_is_found(tmp_path: Path, size: int) -> None:
    stored = chained([TINY, Columns([random.Random(size).randbytes(size)]), TINY])
    first, large, last = headers_in(stored)
    with opened(write_segment(tmp_path, stored)) as segment:
        for offset in (large.base_offset, large.base_offset + size // 2, large.next_offset - 1):
            assert around(segment, offset, last.base_offset, len(stored))[0] == large
        assert around(segment, 0, last.base_offset, len(stored))[0] == first
        assert list(segment.headers(0, len(stored))) == [first, large, last]


# --- damage -------------------------------------------------------------------------------------------------


def new(directory: Path) -> Path:
    """A directory in this one, each time another."""
    inner = directory / str(len(list(directory.iterdir())))
    inner.mkdir()
    return inner


def damage(stored: bytes, header: Header, at: int = 20) -> bytes:
    place = header.base_offset + at
    return stored[:place] + bytes([stored[place] ^ 0x55]) + stored[place + 1 :]


@pytest.mark.parametrize("at", [0, 5, 12, 15, 20, 36, 39, 44, 47, 60, 112, 125])
@pytest.mark.parametrize("known", [True, False], ids=["end-known", "end-unknown"])
def test_damaged_header_costs_its_own_batch_and_no_other(tmp_path: Path, at: int, known: bool) -> None:
    whole = hostile(9, count=24)
    headers = headers_in(whole)
    for number, bad in enumerate(headers):
        stored = damage(whole, bad, at)
        last = headers[-1].base_offset if known else None
        with opened(write_segment(new(tmp_path), stored)) as segment:
            for here in headers:
                for offset in (here.base_offset, here.base_offset + here.length // 2, here.next_offset - 1):
                    expected = (None, bad.base_offset) if here == bad else (here, here.base_offset)
                    assert around(segment, offset, last, len(stored)) == expected, (number, offset)
            assert after_damage(segment, bad.base_offset, len(stored), last) == bad.next_offset


def test_headers_damaged_in_many_places_cost_their_own_batches_and_no_others(tmp_path: Path) -> None:
    choose = random.Random(5)
    whole = chained([TINY] * 200)
    headers = headers_in(whole)
    for turn in range(40):
        bad = choose.sample(headers[:-1], choose.randrange(1, 12))
        stored = whole
        for each in bad:
            stored = damage(stored, each, choose.choice((5, 20, 70)))
        with opened(write_segment(new(tmp_path), stored)) as segment:
            last = headers[-1].base_offset
            for here in headers:
                found, place = around(segment, here.base_offset + 3, last, len(stored))
                if here in bad:  # and perhaps those right before it
                    neighbours = range(place, here.base_offset, len(whole) // 200)
                    assert found is None and {each.base_offset for each in bad} >= set(neighbours)
                else:
                    assert found == here, (turn, here.base_offset)


@pytest.mark.parametrize("wiped", [b"\0", b"\xff"], ids=["zeros", "ones"])
def test_batches_between_headers_that_are_wiped_out_are_found_by_the_jumps_of_later_ones(
    tmp_path: Path, wiped: bytes
) -> None:
    whole = chained([TINY] * 200)
    size = len(whole) // 200
    stored = bytearray(whole)
    for number in (60, 120):
        stored[number * size : number * size + BODY_AT] = wiped * BODY_AT
    with opened(write_segment(tmp_path, bytes(stored))) as segment:
        last = 199 * size
        for number in set(range(200)) - {60, 120}:
            found, place = around(segment, number * size + 3, last, len(stored))
            assert found is not None and place == number * size
        assert after_damage(segment, 60 * size, len(stored), last) == 61 * size
        assert after_damage(segment, 60 * size, len(stored), None) == len(stored), "nothing tells where it ends"


def test_fakes_behind_a_wiped_header_are_not_taken_for_batches(tmp_path: Path) -> None:
    """Nothing but chance is left of the header, and the payload holds batches that say they follow it."""
    inner_at = BODY_AT + 8
    body = batch.encode_body(Columns([b"invented"]), codec=0)
    for link in (0, 0xFFFFFFFF, 0x0C0C0C0C):
        fake = stamped(body, 160 + inner_at, previous_crc=link, previous_bytes=inner_at) + b"".join(body.parts)
        stored = bytearray(chained([PLAIN, Columns([fake]), TINY]))
        first, bad, third = headers_in(bytes(stored))
        assert bad.base_offset == 160 and stored.find(fake) == 160 + inner_at
        wiped = link.to_bytes(4, "little") * (BODY_AT // 4)
        stored[160 : 160 + BODY_AT] = wiped
        with opened(write_segment(new(tmp_path), bytes(stored))) as segment:
            if link != 0x0C0C0C0C:  # which is no pattern that a disk leaves
                assert list(proven_headers(segment, 0, len(stored))) == [first]
                assert after_damage(segment, 160, len(stored), None) == len(stored)
            assert after_damage(segment, 160, len(stored), third.base_offset) == third.base_offset


def test_lost_page_and_a_lost_end_cost_what_they_cover(tmp_path: Path) -> None:
    """No pointer leads between the two: what is there is known by what follows it."""
    whole = hostile(6, count=30)
    headers = headers_in(whole)
    stored = bytearray(whole)
    for each in headers[8:12]:
        stored[each.base_offset : each.base_offset + BODY_AT] = bytes(BODY_AT)
    last = headers[-1]
    for at, known in ((20, True), (60, False)):  # the second has lost its link as well
        with opened(write_segment(new(tmp_path), damage(bytes(stored), last, at))) as segment:
            for number, here in enumerate(headers[:-1]):
                found, place = around(segment, here.base_offset + 9, last.base_offset, len(stored))
                if number < 8 or (known and number > 11):
                    assert (found, place) == (here, here.base_offset)
                else:
                    assert (found, place) == (None, headers[8].base_offset)


def test_what_looks_like_batches_is_believed_only_if_it_leads_to_the_end(tmp_path: Path) -> None:
    whole = hostile(8, count=20)
    headers = headers_in(whole)
    stored = bytearray(whole)
    for each in headers[5:8]:  # with the payloads of these, which hold whole chains
        stored[each.base_offset : each.base_offset + BODY_AT] = bytes(BODY_AT)
    with opened(write_segment(tmp_path, bytes(stored))) as segment:
        assert list(likely_headers(segment, headers[5].base_offset, len(stored))) == headers[8:]
        assert list(likely_headers(segment, headers[-1].base_offset, len(stored))) == []
    for behind, found in ((b"\xff" * 8, []), (bytes(8), headers[8:]), (bytes(5000), headers[8:])):
        with opened(write_segment(new(tmp_path), bytes(stored) + behind)) as segment:
            assert list(likely_headers(segment, headers[5].base_offset, segment.end_of_file())) == found


def test_batch_behind_a_damaged_header_is_known_by_its_link(tmp_path: Path) -> None:
    whole = hostile(3, count=12)
    headers = headers_in(whole)
    for bad in headers[:-1]:
        for at in (5, 40):  # the CRC itself, or something under it
            with opened(write_segment(new(tmp_path), damage(whole, bad, at))) as segment:
                assert list(proven_headers(segment, 0, len(whole))) == [each for each in headers if each != bad]


def test_batch_is_not_taken_for_the_next_if_the_damaged_header_agrees_with_its_link_in_nothing(tmp_path: Path) -> None:
    whole = chained([TINY] * 4)
    first = headers_in(whole)[0]
    stored = damage(damage(whole, first, 5), first, 40)  # neither the CRC that it states nor that of its bytes
    with opened(write_segment(tmp_path, stored)) as segment:
        assert after_damage(segment, 0, len(stored), None) == len(stored)
        assert after_damage(segment, 0, len(stored), headers_in(whole)[-1].base_offset) == first.next_offset


def test_headers_that_are_damaged_side_by_side_are_passed_one_after_the_other(tmp_path: Path) -> None:
    """What lies between them and one that is lost was lost with them."""
    whole = chained([TINY] * 9)
    headers = headers_in(whole)
    stored = bytearray(damage(damage(damage(whole, headers[1]), headers[2], 5), headers[3], 90))
    stored[headers[6].base_offset : headers[6].base_offset + BODY_AT] = bytes(BODY_AT)
    with opened(write_segment(tmp_path, bytes(stored))) as segment:
        for last in (headers[-1].base_offset, None):
            assert after_damage(segment, headers[1].base_offset, len(stored), last) == headers[2].base_offset
            for here in headers[4:6]:
                assert around(segment, here.base_offset, last, len(stored)) == (here, here.base_offset)
            assert around(segment, headers[2].base_offset, last, len(stored)) == (None, headers[2].base_offset)


def follower(at: int, before: Header, *, version: int = batch.VERSION) -> bytes:
    """A batch at an offset that says it follows the one given, as somebody can who has read that one."""
    body = batch.encode_body(Columns([b"invented"]), codec=0)
    distance = at - before.base_offset
    header = stamped(body, at, previous_crc=before.header_crc, previous_bytes=distance, durable_up_to=1 << 40)
    return forged(header + b"".join(body.parts), version=version)


def test_record_of_the_next_batch_that_says_it_follows_a_damaged_one_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """An invented record was read, where the header of the record's own batch was damaged as well."""
    place = 144 + 160 + BODY_AT + 8
    before = headers_in(chained([TINY, PLAIN]))[1]
    fake = follower(place, before)
    whole = chained([TINY, PLAIN, Columns([fake]), TINY, TINY])
    assert whole.find(fake) == place
    _, first, second, third, last = headers_in(whole)
    length = (place - first.base_offset).to_bytes(4, "little")
    lying = whole[: first.base_offset + 12] + length + whole[first.base_offset + 16 :]
    hollow = whole[: first.base_offset + 44] + b"\xff" * 4 + whole[first.base_offset + 48 :]
    for stored in (damage(whole, first), damage(whole, first, 5), lying, hollow):
        with opened(write_segment(new(tmp_path), stored)) as segment:  # the next one is whole
            assert after_damage(segment, first.base_offset, len(stored), None) == second.base_offset
            assert list(proven_headers(segment, first.base_offset, len(stored))) == [second, third, last]
        with opened(write_segment(new(tmp_path), damage(stored, second))) as segment:
            found, where = around(segment, place, last.base_offset, len(stored))
            assert found is None and where == second.base_offset, "the two agree where the second begins"
            for known in (last.base_offset, None):
                assert after_damage(segment, first.base_offset, len(stored), known) == second.base_offset
            assert list(proven_headers(segment, first.base_offset, len(stored))) == [third, last]
        both = damage(damage(stored, first, 90), second)  # and what is left of the first agrees on nothing
        with opened(write_segment(new(tmp_path), both)) as segment:
            assert around(segment, place, last.base_offset, len(stored))[0] is None
            after = after_damage(segment, first.base_offset, len(stored), last.base_offset)
            assert after in (second.base_offset, third.base_offset)
            assert place not in [each.base_offset for each in proven_headers(segment, 0, len(stored))]


def test_batches_in_a_record_that_end_where_it_ends_are_not_read_if_all_around_is_lost(tmp_path: Path) -> None:
    place = 144 + BODY_AT + 8
    fake = follower(place, headers_in(chained([TINY]))[0])
    whole = chained([TINY, Columns([fake]), TINY])
    _, bad, last = headers_in(whole)
    assert whole.find(fake) == place and place + len(fake) == last.base_offset
    stored = bytearray(damage(whole, last))
    stored[bad.base_offset : place] = bytes(place - bad.base_offset)
    with opened(write_segment(tmp_path, bytes(stored))) as segment:
        assert after_damage(segment, bad.base_offset, len(stored), last.base_offset) == len(stored)
        assert around(segment, place, last.base_offset, len(stored)) == (None, bad.base_offset)


def test_batch_in_a_record_that_ends_where_the_next_batch_begins_is_not_taken_for_the_one_before_that(
    tmp_path: Path,
) -> None:
    """The next batch leads to a place that counts, and does not follow what stands in the record."""
    place = 144 + BODY_AT + 8
    fake = follower(place, headers_in(chained([TINY]))[0])
    whole = chained([TINY, Columns([fake]), TINY, TINY, TINY, TINY])
    _, bad, sound, _, cut, last = headers_in(whole)
    assert whole.find(fake) == place and place + len(fake) == sound.base_offset
    stored = bytearray(damage(whole, cut))
    stored[bad.base_offset : bad.base_offset + BODY_AT] = bytes(BODY_AT)
    with opened(write_segment(tmp_path, bytes(stored))) as segment:
        assert after_damage(segment, bad.base_offset, len(stored), last.base_offset) == sound.base_offset


def test_record_that_says_it_is_of_a_version_to_come_stops_no_search(tmp_path: Path) -> None:
    """A log with damage could not be read, nor opened: "batch version 9 is newer than this loglib knows"."""
    place = 144 + BODY_AT + 8
    newer = follower(place, headers_in(chained([TINY]))[0], version=9)
    pair = follower(place + 144, headers_in(chained([TINY]))[0])  # a chain that leads to one
    pair += follower(place + 288, header_of(pair, place + 144), version=9)
    whole = chained([TINY, Columns([newer + pair]), TINY, TINY, TINY])
    assert whole.find(newer + pair) == place
    _, bad, sound, end, last = headers_in(whole)
    stored = bytearray(damage(damage(whole, end), last, 20))
    stored[bad.base_offset : bad.base_offset + BODY_AT] = bytes(BODY_AT)
    with opened(write_segment(tmp_path, bytes(stored))) as segment:
        assert list(likely_headers(segment, bad.base_offset, len(stored))) == []
        assert after_damage(segment, bad.base_offset, last.base_offset, end.base_offset) == sound.base_offset
        assert around(segment, sound.base_offset, end.base_offset, last.base_offset) == (sound, sound.base_offset)


def test_batch_as_long_as_it_has_records_is_known_by_their_number(tmp_path: Path) -> None:
    whole = chained([TINY, Columns([b""] * 3000), TINY], codec=1)
    assert [each.length for each in headers_in(whole)][1] == 3000
    _, bad, last = headers_in(whole)
    for at in (5, 12, 20, 36, 44):
        with opened(write_segment(new(tmp_path), damage(whole, bad, at))) as segment:
            found = after_damage(segment, bad.base_offset, len(whole), None)
            assert found == (len(whole) if at == 36 else last.base_offset), at


def test_body_that_is_damaged_is_passed_over_by_its_header(tmp_path: Path) -> None:
    whole = hostile(4, count=6)
    for bad in headers_in(whole):
        with opened(write_segment(new(tmp_path), damage(whole, bad, BODY_AT + 3))) as segment:
            assert after_damage(segment, bad.base_offset, len(whole), None) == bad.next_offset
            assert after_damage(segment, bad.base_offset, bad.next_offset - 8, None) == bad.next_offset - 8


def test_pointer_to_a_batch_that_is_not_the_one_before_is_damage(tmp_path: Path) -> None:
    body = batch.encode_body(TINY, codec=0)
    stored = chained([TINY, TINY])
    first, second = headers_in(stored)
    third = stamped(body, 288, previous_crc=second.header_crc, previous_bytes=288, jump_offset=288)
    stored += third + b"".join(body.parts)
    with opened(write_segment(tmp_path, stored)) as segment:
        assert around(segment, 3, 288, len(stored))[0] == first, "found forwards from the base"
        assert around(segment, 150, 288, len(stored))[0] == second
        assert first_reaching(segment, 0, 288, len(stored)) == first


def test_search_ends_where_the_file_does(tmp_path: Path) -> None:
    with opened(write_segment(tmp_path, chained([TINY]))) as segment:
        assert list(likely_headers(segment, 144, 8 << 20)) == []


def test_pointers_that_lead_nowhere_are_damage_and_no_search_without_end(tmp_path: Path) -> None:
    body = batch.encode_body(TINY, codec=0)
    first = chained([TINY])
    crc = int.from_bytes(first[4:8], "little")
    pointers = [(0, 144), (8, 144), (1 << 29, 0), (144, 8), (144, 1 << 60), (0, 0)]
    for previous_bytes, jump in pointers:
        second = stamped(body, 144, previous_crc=crc, previous_bytes=previous_bytes, jump_offset=jump)
        stored = first + second + b"".join(body.parts)
        with opened(write_segment(new(tmp_path), stored)) as segment:
            assert around(segment, 150, 144, len(stored))[1] == 144
            assert around(segment, 3, 144, len(stored))[1] == 0, "found forwards from the base"
            assert jumps_at(segment, 144) is not None
            assert first_reaching(segment, 0, 144, len(stored)) == header_of(first)


# --- times --------------------------------------------------------------------------------------------------


@settings(calm, max_examples=60)
@given(times=st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=3), min_size=1, max_size=40))
def test_first_reaching_agrees_with_a_scan(tmp_path_factory: pytest.TempPathFactory, times: list[list[int]]) -> None:
    stored = chained([Columns([bytes(50 * abs(each[0])) for _ in each], timestamps=each) for each in times])
    headers = headers_in(stored)
    path = write_segment(tmp_path_factory.mktemp("times"), stored)
    with opened(path) as segment:
        for timestamp in range(-52, 53):
            reaching = [header for header in headers if header.running_max_timestamp >= timestamp]
            expected = reaching[0] if reaching else None
            assert first_reaching(segment, timestamp, headers[-1].base_offset, len(stored)) == expected
            assert first_reaching(segment, timestamp, None, len(stored)) == expected


def test_times_in_payloads_play_no_part(tmp_path: Path) -> None:
    stored = hostile(11)
    headers = headers_in(stored)
    with opened(write_segment(tmp_path, stored)) as segment:
        for one, other in pairwise([NOW - 1, *sorted({each.running_max_timestamp for each in headers}), NOW + 99_999]):
            for timestamp in (one, one + 1, other):
                reaching = [header for header in headers if header.running_max_timestamp >= timestamp]
                expected = reaching[0] if reaching else None
                assert first_reaching(segment, timestamp, headers[-1].base_offset, len(stored)) == expected


def test_time_beside_damage_is_found_and_within_it_refused(tmp_path: Path) -> None:
    whole = chained([Columns([b"x"], timestamps=[NOW + number]) for number in range(30)])
    headers = headers_in(whole)
    last = headers[-1].base_offset
    for number, bad in enumerate(headers[:-1]):
        with opened(write_segment(new(tmp_path), damage(whole, bad))) as segment:
            for wanted, header in enumerate(headers):
                if wanted in (number, number + 1):  # the one before may have been the first
                    with pytest.raises(CorruptLogError) as caught:
                        first_reaching(segment, NOW + wanted, last, len(whole))
                    assert caught.value.file_position - HEADER_BYTES - bad.base_offset in range(BODY_AT)
                elif wanted < number:
                    assert first_reaching(segment, NOW + wanted, last, len(whole)) == header


def test_place_that_has_become_whole_meanwhile_is_refused_all_the_same(tmp_path: Path) -> None:
    with opened(write_segment(tmp_path, chained([TINY]))) as segment:
        with pytest.raises(CorruptLogError, match="no batch, expected the batch that holds offset 5"):
            refuse_damage(segment, 5, 0)
        assert segment.read(1 << 63, 8) == b"", "no system takes so large a place in a file"
