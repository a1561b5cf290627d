"""G17: payloads that pose as batches, in a log that is read in every way, damaged, cut off in a crash and continued.

Somebody who knows the format, the log id, the writer's nonce and the clock appends records made of batches, headers,
marks and frames, each in its right place (forgery.py). The records that are read are compared with those that were
appended: none is invented, none is hidden, and only damage is called damage. Each failure names its seed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import counts
import pytest
from builders import BODY_AT
from payload_stories import TOPIC, WATERMARK, Reads, Stored, Story, records_of, same, segment, without_lock
from spark_logs import as_row, scan_rows

from conftest import NOW, QUIET, Clock
from loglib import CorruptLogError, Record, Topic, testing
from loglib import segment as segments
from loglib.config.times import to_datetime
from loglib.format.header import parse_header
from loglib.segment import HEADER_BYTES
from loglib.testing import CrashFS, Image

pytestmark = pytest.mark.reliability
SHARDS = 4
STORIES = 10  # in each shard

Tree = dict[str, bytes]


# --- what is found, against what was appended --------------------------------------------------------


def on_disk(tree: Tree, path: Path) -> Path:
    """The same topic on disk, where other programs can read it."""
    shutil.rmtree(path, ignore_errors=True)
    for name, content in tree.items():
        place = path / os.path.relpath(name, TOPIC)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return path


def opened(tree: Tree, clock: Clock, **arguments: Any) -> Topic:
    return testing.open_topic(TOPIC, files=CrashFS(Image.of(tree)), clock=clock, **arguments)


# --- the tests ---------------------------------------------------------------------------------------


def stories(name: str, shard: int, share: float = 1) -> Iterator[tuple[str, Story]]:
    for number in range(counts.scale(round(STORIES * share))):
        seed = f"{name} {shard} {number}"
        yield seed, Story(Random(seed))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_way_of_reading_gives_what_was_appended(shard: int, tmp_path: Path) -> None:
    payloads = attacks = reads = 0
    for seed, story in stories("read", shard):
        try:
            reads += read_everything(story, tmp_path / "topic")
        except Exception as error:
            raise AssertionError(f"{seed}: {error!r}") from error
        payloads += story.payloads
        attacks += len(story.fakes)
    assert attacks > payloads, "the payloads must be real attacks"
    counts.count("G17", payloads=payloads, attacks=attacks, reads=reads, invented=0, hidden=0, falsely_damaged=0)


def read_everything(story: Story, path: Path) -> int:
    reads = Reads(story)
    with opened(story.tree, story.clock, mode="r") as topic:
        reads.every_way(topic, story.batches)
    on_disk(story.tree, path)
    rows = [as_row(record, path.name) for record in story.records]
    for split_bytes in {max(each, story.end // 150) for each in (97, 160, 511, 2000)} | {4096, 1 << 40}:
        scanned = lambda size=split_bytes: scan_rows(path, split_bytes=size, includeHeaders=True)  # noqa: E731
        reads.same(f"spark, {split_bytes}", scanned, rows)
    for time in reads.some(sorted({each.timestamp for each in story.records}), 3):
        first = next(each.offset for each in story.records if each.timestamp >= time)
        late = [as_row(each, path.name) for each in story.records if each.offset >= first]
        start = {"startingTimestamp": -(-time // 1000)} if not time % 1000 else {}
        if start:
            reads.same("spark by time", partial(scan_rows, path, includeHeaders=True, **start), late)
    with Topic.open(path, mode="r") as topic, topic.group("somebody", commit="manual") as group:
        lag = group.lag(count_records=True)[0]
        assert (lag.records, lag.bytes) == (len(story.records), story.end - story.bases[0]), "lag of a group"
    return reads.done + 1


@pytest.mark.parametrize("shard", range(SHARDS))
def test_damage_beside_forgeries_costs_its_own_batches_and_nothing_is_invented(shard: int) -> None:
    payloads = attacks = reads = damaged = 0
    for seed, story in stories("damage", shard):
        for turn in range(3):
            if story.batches:
                try:
                    reads += read_damaged(story, Random(f"{seed} {turn}"))
                except Exception as error:
                    raise AssertionError(f"{seed}, turn {turn}: {error!r}") from error
                damaged += 1
        payloads += story.payloads
        attacks += len(story.fakes)
    counts.count(
        "G17", payloads=payloads, attacks=attacks, damaged_logs=damaged, reads=reads, invented=0, hidden=0,
        falsely_damaged=0,
    )  # fmt: skip


def read_damaged(story: Story, random: Random) -> int:
    tree, ends = dict(story.tree), {*story.bases, story.end}
    bad = sorted(random.sample(story.batches, min(len(story.batches), random.choice((1, 1, 1, 2, 3)))))
    # Wipe at most one: no pointer may lead to batches between two, or between one and the last two of a segment.
    last_two = any(one.end == other.base and other.end in ends for one, other in pairwise(bad))
    wiped = None if last_two else random.choice([None, *bad])
    for each in bad:
        hurt(tree, story, each, random, wipe=each is wiped)
    known_by_batch = sorted({each.base for each in story.batches if each not in bad} & {*story.bases[1:]})
    if random.random() < 0.2 and known_by_batch:  # then the first batch says where the segment before ends
        path = segment(random.choice(known_by_batch))
        tree[path] = bytes(4) + tree[path][4:]
    reads = Reads(story)
    sound = [each for each in story.batches if each not in bad]
    with opened(tree, story.clock, mode="r") as topic:
        reader = topic.read(on_damage="skip")
        reads.same("past damage", lambda: reader, records_of(sound))
        gaps = joined(gap.offsets for gap in reader.gaps)
        assert gaps == joined(each.range for each in bad), f"gaps {gaps}, damaged {[each.range for each in bad]}"
        for record in reads.some(records_of(sound), 8):
            reads.same(
                f"beside damage, {record.offset}",
                partial(first_of, topic, record.offset),
                [record],
            )
        for time in reads.some(sorted({each.timestamp for each in story.records}), 6):
            time_beside_damage(topic, story, bad, time)
            reads.done += 1
        verified = joined(damage.offsets for damage in topic.verify().damage)
        assert verified == joined(each.range for each in bad), "verify"
    return reads.done


def hurt(tree: Tree, story: Story, each: Stored, random: Random, *, wipe: bool) -> None:
    """Change one byte of the batch, mostly of its header; or zero its header."""
    base = max(base for base in story.bases if base <= each.base)
    at = HEADER_BYTES + each.base - base
    content = bytearray(tree[segment(base)])
    if wipe:
        content[at : at + BODY_AT] = random.choice((bytes(BODY_AT), b"\xff" * BODY_AT, random.randbytes(BODY_AT)))
    else:
        of_header = random.choice((random.randrange(60), random.randrange(64, BODY_AT)))  # not the link
        place = random.choice((of_header, of_header, random.randrange(each.end - each.base)))
        content[at + place] ^= 1 << random.randrange(8)
    tree[segment(base)] = bytes(content)


def time_beside_damage(topic: Topic, story: Story, bad: list[Stored], time: int) -> None:
    """A start by time gives the right record or an error; past damage, the first record left or a gap before it."""
    first = next((each.offset for each in story.records if each.timestamp >= time), story.end)
    try:
        found = topic.read(to_datetime(time)).tell()[0]
    except CorruptLogError:
        pass
    else:
        assert found == first, f"time {time}: {found}, not {first}"
    left = [each for stored in story.batches if stored not in bad for each in stored.records]
    whole = next((each.offset for each in left if each.timestamp >= time), story.end)
    found = topic.read(to_datetime(time), on_damage="skip").tell()[0]
    assert found == whole or found in [each.base for each in bad if each.base < whole], f"time {time}, past damage"


def first_of(topic: Topic, offset: int) -> list[Record]:
    """The record at the offset, whatever is damaged before it."""
    return [next(iter(topic.read(offset, on_damage="skip")))]


def joined(ranges: Iterable[range]) -> list[range]:
    """The same offsets, with neighbours joined."""
    found: list[range] = []
    for each in sorted((each for each in ranges if each), key=lambda each: each.start):
        if found and found[-1].stop >= each.start:
            found[-1] = range(found[-1].start, max(each.stop, found[-1].stop))
        else:
            found.append(each)
    return found


@pytest.mark.parametrize("shard", range(SHARDS))
def test_recovery_keeps_what_was_appended_and_takes_no_forgery_for_it(shard: int) -> None:
    payloads = attacks = reads = openings = left = 0
    for seed, story in stories("recovery", shard):
        for name, tree, kept, refusable in crashes(story):
            try:
                opening = Recovery(story, tree, kept, refusable=refusable)
                left += opening.refused
                reads += opening.reads
            except Exception as error:
                raise AssertionError(f"{seed}, {name}: {error!r}") from error
            openings += 1
        payloads += story.payloads
        attacks += len(story.fakes)
    assert left < openings / 10
    counts.count(
        "G17", payloads=payloads, attacks=attacks, recoveries=openings, left_to_a_person=left, reads=reads, invented=0,
        hidden=0, falsely_damaged=0,
    )  # fmt: skip


def crashes(story: Story) -> Iterator[tuple[str, Tree, list[Stored], bool]]:
    """States that a crash may leave: name, files, the batches to be kept, and whether recovery may refuse the state."""
    tree, random = story.tree, story.random
    bare = {name: content for name, content in tree.items() if name != WATERMARK}
    slotless = tree | {WATERMARK: bytes(len(tree[WATERMARK]))}
    yield "as it was", tree, story.batches, False
    yield "without a watermark", bare, story.batches, False
    yield "without a whole slot", slotless, story.batches, False
    old_end, old = random.choice(story.marks)
    yield f"with the watermark of {old_end}", tree | {WATERMARK: old}, story.batches, False
    last = story.bases[-1]
    in_last = [each for each in story.batches if each.base >= last]
    for each in random.sample(in_last, min(3, len(in_last))):
        torn, how = torn_at(tree[segment(last)], each, last, random)
        if torn == tree[segment(last)][: len(torn)] and len(torn) == HEADER_BYTES + each.end - last:
            continue  # zeros were lost, and zeros replaced them
        kept = [other for other in story.batches if other.end <= each.base]
        marks = [mark for end, mark in story.marks if end <= each.base]
        if marks:
            stale = tree | {segment(last): torn, WATERMARK: random.choice(marks)}
            yield f"{how} {each.base}, an old watermark", stale, kept, False
        # Anything in the file may have been durable then, and only bytes that look like batches up to its end show it.
        yield f"{how} {each.base}, no watermark", bare | {segment(last): torn}, kept, True


def torn_at(content: bytes, each: Stored, base: int, random: Random) -> tuple[bytes, str]:
    """The segment with this batch as its last one, torn."""
    at, end = HEADER_BYTES + each.base - base, HEADER_BYTES + each.end - base
    match random.randrange(4):
        case 0:
            return content[: random.randrange(at + 1, end)], "cut in"
        case 1:
            return content[:at] + bytes(BODY_AT) + content[at + BODY_AT : end], "header lost of"
        case 2:
            first = min(-(-at // 512) * 512, end - 1)  # its first sectors were never written
            place = min(end, first + 512 * random.randrange(1, 4))
            return content[:at] + bytes(place - at) + content[place:end], "sectors lost of"
        case _:
            place = random.randrange(at, end)
            return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 : end], "byte changed in"


class Recovery:
    """Read what a crash has left, open it, append, and read again."""

    def __init__(self, story: Story, tree: Tree, kept: list[Stored], *, refusable: bool) -> None:
        self.story, self.refused, self.reads = story, 0, 0
        self._read_before(tree, kept)
        files = CrashFS(Image.of(tree))
        try:
            topic = testing.open_topic(TOPIC, files=files, clock=story.clock)
        except CorruptLogError as error:
            if not refusable:
                raise AssertionError(f"falsely damaged: {error}") from error
            assert without_lock(files.tree()) == tree, "refused, but not left alone"
            self.refused = 1
            return
        with topic:
            self._go_on(topic, kept)
        with testing.open_topic(TOPIC, mode="r", files=files, clock=story.clock) as topic:
            same([record.value for record in topic.read()][-2:], [b"more", b"and more"], "what was appended")

    def _read_before(self, tree: Tree, kept: list[Stored]) -> None:
        """Before a writer opens the log, readers see a part of it from the beginning, in whole batches."""
        with opened(tree, self.story.clock, mode="r") as topic:
            found = list(topic.read())
            records = records_of(kept)
            whole = {0, *(len(records_of(kept[: number + 1])) for number in range(len(kept)))}
            same(found, records[: len(found)], "before recovery")
            assert len(found) in whole, "half a batch"
            reader = topic.read(on_damage="skip")
            same(list(reader), found, "before recovery, past damage")
        self.reads += 2

    def _go_on(self, topic: Topic, kept: list[Stored]) -> None:
        partition = topic.partition(0)
        end = kept[-1].end if kept else self.story.bases[0]
        assert partition.log_end_offset == end, f"the log ends at {partition.log_end_offset}, not at {end}"
        reads = Reads(self.story)
        self.story.clock.now += 1
        for value in (b"more", b"and more"):
            position = partition.append(value, timestamp=NOW + 10**7)
            partition.flush()
            after = partition.log_end_offset
            record = Record(0, position.offset, NOW + 10**7, None, value, (), after)
            kept = [*kept, Stored(position.offset, after, [record])]
        if self.story.random.random() < 0.2:
            reads.every_way(topic, kept)
        else:
            reads.whole(topic, kept, records_of(kept))
        self.reads += reads.done


# --- what a search costs -----------------------------------------------------------------------------


class CountingFiles(CrashFS):
    """Counts the bytes that are read."""

    bytes_read = 0

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        content = super().pread(fd, size_bytes, position)
        self.bytes_read += len(content)
        return content


def test_payloads_cost_no_more_to_look_through_than_zeros() -> None:
    """Counts the headers and the bytes that are read; measures no time."""
    size = 8 << 20
    zeros, *others = (costs_of(content * (size // len(content))) for content in (b"\0", b"\x89LLB", b"\x89LLB\0\0\0\0"))
    for costs in others:
        assert costs.keys() == zeros.keys()
        for what, (looks, read) in costs.items():
            assert looks <= zeros[what][0] and read <= zeros[what][1], f"{what}: {costs[what]}, zeros {zeros[what]}"
    counts.count("G17", costs_compared=len(others) * len(zeros))


def to_write(topic: Topic) -> object:
    return topic.partition(0)._access.writer()


def costs_of(value: bytes) -> dict[str, tuple[int, int]]:
    """The cost of lookups in a log with two such values between small ones: (headers read, bytes read)."""
    files = CrashFS()
    with testing.open_topic(TOPIC, files=files, clock=Clock(), **QUIET) as topic:
        for number, each in enumerate((b"small", value, b"small", value, b"small")):
            last = topic.append(each, timestamp=NOW + number)
            topic.flush()
    tree = without_lock(files.tree())
    bare = {name: content for name, content in tree.items() if name != WATERMARK}
    torn = tree | {segment(0): tree[segment(0)][:-1]}
    broken = bytearray(tree[segment(0)])
    broken[HEADER_BYTES + 144 + 20] ^= 1  # in the header of the first large batch
    damaged = tree | {segment(0): bytes(broken)}
    bare_and_torn = bare | {segment(0): tree[segment(0)][:-1]}
    return {
        "by time": cost(tree, lambda topic: topic.read(to_datetime(NOW + 2)), mode="r"),
        "by offset": cost(tree, lambda topic: topic.read(last.offset), mode="r"),
        "opening": cost(tree, to_write),
        "without a watermark": cost(bare, lambda topic: topic.read(to_datetime(NOW + 2)), mode="r"),
        "opening without a watermark": cost(bare, to_write),
        "opening a torn tail without a watermark": cost(bare_and_torn, to_write),
        "refusing one that is cut": cost(torn, to_write),
        "past damage": cost(damaged, lambda topic: list(topic.read(on_damage="skip")), mode="r"),
    }


def cost(tree: Tree, use: Callable[[Topic], object], **arguments: Any) -> tuple[int, int]:
    files = CountingFiles(Image.of(tree))
    with mock.patch.object(segments, "parse_header", wraps=parse_header) as looks:
        try:
            with testing.open_topic(TOPIC, files=files, clock=Clock(), **arguments) as topic:
                use(topic)
        except CorruptLogError:
            pass
    return looks.call_count, files.bytes_read
