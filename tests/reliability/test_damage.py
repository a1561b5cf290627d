"""G3: every single-bit flip and every truncation of a segment, its watermark and its description.

Damage is detected if three things hold. Reading past the damage returns every batch but the damaged one,
unchanged. The gap has exactly the offsets of that batch. The error names the file and a byte: of the batch, at
or before the flipped byte, or of the header that was hit. Nothing else may happen: no other exception, no
other record, no end without an error.

For each flip, the damaged batch is read, and the next batch is searched for. For one flip in each byte, the
batch and its neighbours are read by the cursor that every reader uses. For an evenly spread sample, the whole
partition is read, verified and opened for writing, as a program would do it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

import counts
import pytest
from builders import BODY_AT, describe

from conftest import NOW, QUIET, Clock
from loglib import CorruptLogError, LogError, OffsetOutOfRangeError, Record, Topic, testing
from loglib.config.policies import TopicConfig
from loglib.errors import InvalidOffsetError
from loglib.format.record import Damage
from loglib.format.watermark import SECOND_SLOT, SLOT_BYTES, newest
from loglib.log import topic_file as description
from loglib.log.cursor import Cursor
from loglib.log.search import after_damage, around
from loglib.segment import HEADER_BYTES, SegmentReader
from loglib.testing import MemoryFiles

pytestmark = pytest.mark.reliability

TOPIC = "/logs/clicks"
DIRECTORY = f"{TOPIC}/0000"
SEGMENT = f"{DIRECTORY}/{0:020d}.log"
WATERMARK = f"{DIRECTORY}/watermark"
DESCRIPTION = f"{TOPIC}/topic.json"
SEGMENT_BYTES = 1 << 16
SHARDS = 4
SAMPLE = 2003  # one in so many is read, verified and opened as a program would; a prime, so that every field is met


class Stored(NamedTuple):
    """A batch as it was written."""

    header: Any
    body: bytes
    start: int
    stop: int


class Lab:
    """A topic in memory with one segment of exactly 64 KiB, and what was read from it while it was whole."""

    def __init__(self) -> None:
        self.files = MemoryFiles()
        self.clock = Clock()
        self._fill()
        self.whole = self.files.tree()
        assert len(self.whole[SEGMENT]) == SEGMENT_BYTES
        self.topic = testing.open_topic(TOPIC, mode="r", files=self.files, clock=self.clock)
        self.log = self.topic.partition(0)._access.log
        self.mark = self.log.mark()
        self.end, self.last = self.mark.flushed_end, self.mark.flushed_tail
        self.records = list(self.topic.read())
        self.batches = [
            Stored(batch._header, body_of(batch), batch._header.base_offset, batch._header.next_offset)
            for batch in self.topic.batches()
        ]
        self.segment = SegmentReader(self.files, SEGMENT, self.log.identity)
        self._fds = {path: self.files.open_write(path) for path in (SEGMENT, WATERMARK, DESCRIPTION)}

    def _open(self, **policies: Any) -> Topic:
        return testing.open_topic(TOPIC, files=self.files, clock=self.clock, **policies)

    def _fill(self) -> None:
        """Batches of many sizes with every kind of column, in every codec."""
        rng = Random(3)
        with self._open(**QUIET):
            pass
        for turn, codec in enumerate(("none", "zlib", "none", "lz4", "zstd", "none")):
            log_id, config = self.description()
            describe(TOPIC, log_id, replace(config, compression=codec), files=self.files)
            with self._open() as topic:
                for number in range(4):
                    count = rng.choice((1, 2, 7, 40))
                    topic.append_many(
                        [None if rng.random() < 0.2 else rng.randbytes(rng.randrange(1, 90)) for _ in range(count)],
                        keys=[None if rng.random() < 0.2 else b"key %d" % rng.randrange(9) for _ in range(count)]
                        if number != 1 else None,
                        timestamps=[NOW + rng.randrange(10**6) for _ in range(count)] if number != 2 else None,
                        headers=[[("name", rng.randbytes(3))] * rng.randrange(3) for _ in range(count)]
                        if number == 3 else None,
                        partition=0,
                        producer=("producer", turn) if number == 0 else None,
                    )  # fmt: skip
                    topic.flush()
        with self._open() as topic:
            for share in (0.5, 0.7, 1):
                room = SEGMENT_BYTES - HEADER_BYTES - topic.partition(0).log_end_offset
                topic.append(rng.randbytes(int(share * room) // 8 * 8 - BODY_AT - 8), sync=True)

    def description(self) -> tuple[bytes, TopicConfig]:
        described = description.read(self.files, TOPIC)
        assert described is not None
        return described

    def patch(self, path: str, at: int, content: bytes) -> None:
        self.files.pwritev(self._fds[path], [content], at)

    def cut(self, path: str, size: int) -> None:
        self.files.ftruncate(self._fds[path], size)

    def restore(self, path: str) -> None:
        self.patch(path, 0, self.whole[path])

    def read(self, start: int, limit: int) -> tuple[list[Stored], list[Damage]]:
        """The batches from `start` up to `limit`, read past all damage."""
        gaps: list[Damage] = []
        cursor = Cursor(self.log, start, on_damage=gaps.append)
        found: list[Stored] = []
        while block := cursor.read(limit):
            found += [Stored(each._header, body_of(each), each.offsets.start, each.next_offset) for each in block]
        cursor.close()
        return found, gaps

    def batch_at(self, file_position: int) -> int:
        offset = file_position - HEADER_BYTES
        return bisect_right(self.batches, offset, key=lambda each: each.start) - 1

    def records_outside(self, *lost: range) -> list[Record]:
        return [each for each in self.records if not any(each.offset in offsets for offsets in lost)]


def without_lock(tree: dict[str, bytes]) -> dict[str, bytes]:
    """All files, without the text in the lock, which says who holds it."""
    return {path: content for path, content in tree.items() if not path.endswith("/lock")}


def body_of(batch: Any) -> bytes:
    header = batch._header
    if header.codec:
        return bytes(batch._data)
    return bytes(batch._data[batch._body_at : batch._body_at + header.length - BODY_AT])


def same(found: object, expected: object, what: str) -> None:
    """Assert that two values are equal, without printing 64 KiB if they differ."""
    if found != expected:
        raise AssertionError(f"not what was written: {what}")


@cache
def lab() -> Lab:
    return Lab()


def check_batch(where: Lab, bad: Stored, at: int, what: str) -> None:
    """If byte `at` of a batch is changed, the batch is refused by file and byte, and reading continues behind it."""
    first = HEADER_BYTES + bad.start
    try:
        where.segment.batches(bad.start, where.end, block_bytes=bad.stop - bad.start)
    except CorruptLogError as error:
        # The error names the first byte of a wrong magic, the CRC of a wrong header, and the start of a wrong body.
        assert error.path == SEGMENT and first <= error.file_position <= max(at, first + 4), what
    else:
        raise AssertionError(f"not noticed: {what}")
    assert after_damage(where.segment, bad.start, where.end, where.last) == bad.stop, what
    assert around(where.segment, bad.start, where.last, where.end)[1] == bad.start, what


def check_neighbours(where: Lab, index: int, what: str) -> None:
    """The batches before and behind a bad one are read, and the bad one is a gap."""
    bad = where.batches[index]
    around = where.batches[max(0, index - 1) : index + 2]
    found, gaps = where.read(around[0].start, around[-1].stop)
    same(found, [each for each in around if each is not bad], what)
    (gap,) = gaps
    assert (gap.path, gap.offsets) == (SEGMENT, range(bad.start, bad.stop)), what


def check_as_a_program_would(where: Lab, lost: range, path: str, near: range, what: str) -> None:
    """Read by the public calls, verify, and open for writing: no wrong record, no changed byte."""
    before = where.files.tree()
    with pytest.raises(CorruptLogError) as caught:
        list(where.topic.read())
    assert caught.value.path == path and caught.value.file_position in near, what
    reader = where.topic.read(on_damage="skip")
    same(list(reader), where.records_outside(lost), what)
    assert [gap.offsets for gap in reader.gaps if gap.offsets] == ([lost] if lost else []), what
    report = where.topic.verify()
    assert [(each.path, each.offsets) for each in report.damage] == [(path, lost)], what
    assert report.damage[0].file_position in near, what
    assert report.records == len(where.records_outside(lost)), what
    same(where.files.tree(), before, what)
    try:
        testing.open_topic(TOPIC, files=where.files, clock=where.clock).close()
    except CorruptLogError:
        same(without_lock(where.files.tree()), without_lock(before), what)
    else:  # the damage lies below the end, where opening does not look: it must stay
        same(where.files.tree()[SEGMENT], before[SEGMENT], what)
        where.patch(WATERMARK, 0, before[WATERMARK])


# --- the segment's batches -------------------------------------------------------------------------


def flips(where: Lab, shard: int) -> Iterator[tuple[int, int]]:
    """The bytes of the batches in this shard, and their values after a flip of each bit."""
    for at in range(HEADER_BYTES + shard, SEGMENT_BYTES, SHARDS):
        for bit in range(8):
            yield at, where.whole[SEGMENT][at] ^ 1 << bit


def settings_of(where: Lab, shard: int) -> Iterator[tuple[int, int]]:
    """The same with every byte set to 0 and to 255."""
    for at in range(HEADER_BYTES + shard, SEGMENT_BYTES, SHARDS):
        for value in {0, 255} - {where.whole[SEGMENT][at]}:
            yield at, value


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("changes", [flips, settings_of], ids=["flips", "bytes set"])
def test_no_changed_byte_of_a_batch_is_returned(
    changes: Callable[[Lab, int], Iterator[tuple[int, int]]], shard: int
) -> None:
    where = lab()
    done = sampled = 0
    for done, (at, value) in enumerate(itertools.islice(changes(where, shard), 0, None, counts.part()), start=1):
        what = f"byte {at} set to {value}"
        index = where.batch_at(at)
        bad = where.batches[index]
        where.patch(SEGMENT, at, bytes([value]))
        check_batch(where, bad, at, what)
        if done % 8 == at % 8:  # another bit in each byte
            check_neighbours(where, index, what)
        if done % SAMPLE == 0:
            near = range(HEADER_BYTES + bad.start, HEADER_BYTES + bad.stop)
            check_as_a_program_would(where, range(bad.start, bad.stop), SEGMENT, near, what)
            sampled += 1
        where.patch(SEGMENT, at, where.whole[SEGMENT][at : at + 1])
    same(where.files.tree()[SEGMENT], where.whole[SEGMENT], "the test itself")
    if changes is flips:
        counts.count("G3", flips=done, read_as_a_program_would=sampled, undetected=0, wrong=0)
    else:
        counts.count("G3", bytes_set=done, read_as_a_program_would=sampled, undetected=0, wrong=0)


# --- headers, watermark, description ---------------------------------------------------------------


def every_flip(size: int) -> Iterator[tuple[int, int]]:
    return ((at, 1 << bit) for at in range(size) for bit in range(8))


def test_no_flip_in_a_segment_header_is_believed_and_none_costs_a_record() -> None:
    where = lab()
    done = sampled = 0
    for done, (at, bit) in enumerate(every_flip(HEADER_BYTES), start=1):
        what = f"byte {at}, bit {bit} of the segment header"
        where.patch(SEGMENT, at, bytes([where.whole[SEGMENT][at] ^ bit]))
        try:
            where.log.open_segment(0)
        except CorruptLogError as error:
            assert error.path == SEGMENT and error.file_position in (0, 12), what
        else:
            raise AssertionError(f"not noticed: {what}")
        if done % 8 == at % 8:
            found, (gap,) = where.read(0, where.batches[1].stop)
            same((found, gap.offsets), (where.batches[:2], range(0)), what)
        if done % SAMPLE == 0:
            check_as_a_program_would(where, range(0), SEGMENT, range(HEADER_BYTES), what)
            sampled += 1
        where.patch(SEGMENT, at, where.whole[SEGMENT][at : at + 1])
    counts.count("G3", flips=done, read_as_a_program_would=sampled, undetected=0, wrong=0)


def test_no_flip_in_the_watermark_moves_a_mark() -> None:
    """At rest both slots agree, so that one is enough; what lies between them means nothing."""
    where = lab()
    done = told = 0
    for done, (at, bit) in enumerate(every_flip(len(where.whole[WATERMARK])), start=1):
        what = f"byte {at}, bit {bit} of the watermark"
        content = bytearray(where.whole[WATERMARK])
        content[at] ^= bit
        mark = newest(bytes(content), where.log.identity.salt)
        assert mark is not None and mark[1:] == where.mark[1:], what
        if done % 8 == at % 8:
            where.patch(WATERMARK, at, bytes(content[at : at + 1]))
            spare = SLOT_BYTES <= at < SECOND_SLOT
            damage = [(each.path, each.file_position) for each in where.topic.partition(0).verify().damage]
            assert damage == [(WATERMARK, at // SECOND_SLOT * SECOND_SLOT)] * (not spare), what
            where.restore(WATERMARK)
            told += 1
        if done % SAMPLE == 0:
            where.patch(WATERMARK, at, bytes(content[at : at + 1]))
            same(list(where.topic.read()), where.records, what)
            testing.open_topic(TOPIC, files=where.files, clock=where.clock).close()
            same(where.files.tree()[SEGMENT], where.whole[SEGMENT], what)
            where.restore(WATERMARK)
    counts.count("G3", flips=done, verified=told, undetected=0, wrong=0)


def test_watermark_of_any_length_gives_the_mark_or_what_the_batches_prove() -> None:
    where = lab()
    proven = where.batches[-1].header.durable_up_to
    for size in range(len(where.whole[WATERMARK])):
        where.cut(WATERMARK, size)
        mark = where.log.mark()
        assert mark.flushed_end == (where.end if size >= SLOT_BYTES else proven), size
        assert where.topic.partition(0).verify().damage[0].path == WATERMARK, size
        if size % 997 == 0:
            with testing.open_topic(TOPIC, files=where.files, clock=where.clock) as topic:
                same(list(topic.read()), where.records, f"all records after a watermark of {size} bytes")
        where.restore(WATERMARK)
    counts.count("G3", truncations=size + 1, undetected=0, wrong=0)


def test_no_flip_and_no_cut_of_the_description_makes_another_topic() -> None:
    where = lab()
    whole = where.whole[DESCRIPTION]
    changed = [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at, bit in every_flip(len(whole))]
    changed += [whole[:at] + bytes([value]) + whole[at + 1 :] for at in range(len(whole)) for value in (0, 255)]
    changed += [whole[:size] for size in range(len(whole))]
    described = where.description()
    harmless = 0
    for content in changed:
        where.cut(DESCRIPTION, 0)
        where.patch(DESCRIPTION, 0, content)
        try:
            assert description.read(where.files, TOPIC) == described, content
            harmless += 1  # the name of the checksum itself, or white space
        except LogError as error:
            assert isinstance(error, CorruptLogError) and error.path == DESCRIPTION, content
    where.cut(DESCRIPTION, 0)
    where.restore(DESCRIPTION)
    assert harmless < 100
    counts.count("G3", flips=8 * len(whole), bytes_set=2 * len(whole), truncations=len(whole), undetected=0, wrong=0)


# --- whole pieces ----------------------------------------------------------------------------------


def test_no_truncation_of_a_segment_is_taken_for_its_end() -> None:
    """From the longest to the shortest: the batches before the cut are read, and all that is behind it is a gap."""
    where = lab()
    done = 0
    for size in range(SEGMENT_BYTES - 1, -1, -counts.part()):
        what = f"cut at {size}"
        where.cut(SEGMENT, size)
        index = where.batch_at(size) if size >= HEADER_BYTES else 0
        first = where.batches[max(0, index - 1)]
        found, gaps = where.read(first.start, where.end)
        same(found, where.batches[max(0, index - 1) : index], what)
        assert [gap.offsets for gap in gaps if gap.offsets] == [range(where.batches[index].start, where.end)], what
        first_bad = size if size < HEADER_BYTES else max(size, HEADER_BYTES + where.batches[index].start)
        assert (gaps[0].path, gaps[0].file_position) == (SEGMENT, first_bad), what
        done += 1
        if done % SAMPLE == 0:
            lost = range(where.batches[index].start, where.end)
            same(list(where.topic.read(on_damage="skip")), where.records_outside(lost), what)
            before = where.files.tree()
            with pytest.raises(CorruptLogError):
                testing.open_topic(TOPIC, files=where.files, clock=where.clock)
            same(without_lock(where.files.tree()), without_lock(before), what)
    where.restore(SEGMENT)
    counts.count("G3", truncations=done, undetected=0, wrong=0)


def check_touched(where: Lab, ranges: list[range], what: str) -> int:
    """If these bytes of the file are changed, exactly the batches that have none of them are read.

    If there are two holes that have each taken several headers, no pointer may lead to the batches between them.
    Then these are left out as well. Returns how many batches were left out in this way.
    """
    touched = [
        each for each in where.batches
        if any(each.start + HEADER_BYTES < hit.stop and hit.start < each.stop + HEADER_BYTES for hit in ranges)
    ]  # fmt: skip
    now, whole = where.files.tree()[SEGMENT], where.whole[SEGMENT]
    changed = [each for each in touched if not _same(now, whole, each)]
    found, gaps = where.read(0, where.end)
    left_out = [each for each in where.batches if each not in changed and each not in found]
    if left_out:
        assert len(ranges) > 1 and changed[0].start < left_out[0].start < changed[-1].start, what
        assert left_out[-1].start < changed[-1].start, what
    gone = sorted([*changed, *left_out], key=lambda each: each.start)
    same(found, [each for each in where.batches if each not in gone], what)
    assert joined(gap.offsets for gap in gaps) == joined(range(each.start, each.stop) for each in gone), what
    return len(left_out)


def joined(ranges: Iterable[range]) -> list[range]:
    """The same offsets with neighbours joined: two bad batches side by side may be one gap."""
    found: list[range] = []
    for each in ranges:
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        elif each:
            found.append(each)
    return found


def _same(now: bytes, whole: bytes, batch: Stored) -> bool:
    place = slice(HEADER_BYTES + batch.start, HEADER_BYTES + batch.stop)
    return now[place] == whole[place]


@pytest.mark.parametrize("sector", [512, 4096])
def test_no_zeroed_or_swapped_sector_is_returned(sector: int) -> None:
    where = lab()
    whole = where.whole[SEGMENT]
    places = range(0, SEGMENT_BYTES, sector)
    for at in places:
        for content in (bytes(sector), b"\xff" * sector, Random(at).randbytes(sector)):
            where.patch(SEGMENT, at, content)
            check_touched(where, [range(at, at + sector)], f"sector {at // sector} replaced")
            where.patch(SEGMENT, at, whole[at : at + sector])
    swaps = list(itertools.combinations(places, 2))
    cut_off = 0
    for one, other in swaps:
        where.patch(SEGMENT, one, whole[other : other + sector])
        where.patch(SEGMENT, other, whole[one : one + sector])
        what = f"sectors {one // sector} and {other // sector} swapped"
        cut_off += bool(check_touched(where, [range(one, one + sector), range(other, other + sector)], what))
        where.patch(SEGMENT, one, whole[one : one + sector])
        where.patch(SEGMENT, other, whole[other : other + sector])
    assert cut_off < len(swaps) / 10, "what lies between two holes is found as a rule"
    counts.count("G3", sectors=3 * len(places) + len(swaps), undetected=0, wrong=0)


@pytest.mark.parametrize("watermark", ["as it was", "lost"])
def test_writer_that_meets_damage_below_the_end_touches_nothing(watermark: str) -> None:
    """Even if the watermark is lost: later batches say what was durable, which is all but the last batch."""
    where = lab()
    refused = 0
    for index, each in enumerate(where.batches):
        for at in (0, 5, 60, BODY_AT, each.stop - each.start - 1):
            file_position = HEADER_BYTES + each.start + at
            where.patch(SEGMENT, file_position, bytes([where.whole[SEGMENT][file_position] ^ 0x10]))
            if watermark == "lost":
                where.patch(WATERMARK, 0, bytes(len(where.whole[WATERMARK])))
            before = where.files.tree()
            what = f"batch {index}, byte {at}"
            try:
                testing.open_topic(TOPIC, files=where.files, clock=where.clock).close()
            except CorruptLogError:
                same(without_lock(where.files.tree()), without_lock(before), what)
                refused += 1
            else:
                last = index == len(where.batches) - 1
                assert watermark == "as it was" or last, f"taken for a torn tail: {what}"
                if watermark == "as it was":
                    same(where.files.tree()[SEGMENT], before[SEGMENT], what)
            for name in set(where.files.tree()) - set(where.whole):  # the part of the last one that was kept aside
                where.files.unlink(name)
            where.cut(SEGMENT, SEGMENT_BYTES)
            where.restore(SEGMENT)
            where.restore(WATERMARK)
    assert refused
    counts.count("G3", openings=5 * len(where.batches), wrong=0)


# --- places in the log -----------------------------------------------------------------------------


def test_every_offset_is_a_records_or_refused() -> None:
    """F31: also offsets in a payload, beyond the end, negative and huge."""
    where = lab()
    topic = where.topic
    offsets = {record.offset: record for record in where.records}
    for offset in range(where.end):
        try:
            reader = topic.read(offset)
        except InvalidOffsetError:
            assert offset not in offsets
        else:
            if offset % 8 == 0:
                assert next(iter(reader)) == offsets[offset]
            assert offset in offsets
    for offset in (-1, -(1 << 63), where.end + 1, where.end + 8, 1 << 63, 1 << 64, 1 << 200):
        with pytest.raises(OffsetOutOfRangeError):
            topic.read(offset)
    assert list(topic.read(where.end)) == []
    counts.count("G3", offsets=where.end + 7, wrong=0)
