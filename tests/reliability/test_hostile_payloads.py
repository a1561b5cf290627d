"""G17: payloads that pose as batches, in a log that is read in every way, damaged, cut off in a crash and continued.

Somebody who knows the format, the log id, the writer's nonce and the clock appends records made of batches, headers,
marks and frames, each in its right place (forgery.py). The records that are read are compared with those that were
appended: none is invented, none is hidden, and only damage is called damage. Each failure names its seed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import counts
import pytest

from builders import BODY_AT
from conftest import NOW, QUIET, Clock, sound
from forgery import Known, columns_with, compressed_forgery, passing
from loglib import CorruptLogError, InvalidOffsetError, Record, Topic, testing
from loglib import segment as segments
from loglib.format.batch import Header, parse_header
from loglib.format.columns import Columns
from loglib.lag import measure_lag
from loglib.segment import HEADER_BYTES, Identity, SegmentReader, parse_segment_name
from loglib.testing import CrashFS, Image
from loglib.times import to_datetime
from spark_logs import as_row, scan_rows

pytestmark = pytest.mark.reliability

TOPIC = "/logs/payloads"
DIRECTORY = f"{TOPIC}/0000"
WATERMARK = f"{DIRECTORY}/watermark"
SHARDS = 4
STORIES = 10  # in each shard

Tree = dict[str, bytes]


class Stored(NamedTuple):
    """A batch that was appended."""

    base: int
    end: int
    records: list[Record]

    @property
    def range(self) -> range:
        return range(self.base, self.end)


class Story:
    """A log that grew under attack, and what was appended to it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.clock = Clock()
        self.files = CrashFS()
        self.codec = random.choice((0, 0, 0, 1, 2, 3))
        self.policies: dict[str, Any] = QUIET | {
            "compression": ("none", "zlib", "lz4", "zstd")[self.codec],
            "durability": random.choice(("disk", "os")),
            "batch_bytes": 1 << 20,
        }
        self.batches: list[Stored] = []
        self.marks: list[tuple[int, bytes]] = []  # the watermarks since the log start moved, and their ends
        self.payloads = 0
        log_id = uuid.UUID(int=random.getrandbits(128))
        with mock.patch.object(uuid, "uuid4", lambda: log_id):  # otherwise the checksums would differ each time
            self.topic = testing.open_topic(TOPIC, files=self.files, clock=self.clock, **self.policies)
        self.identity = Identity.of(self.topic.log_id, 0)
        self._marked()
        for _ in range(random.randrange(6, 16)):
            self._step()
        self.topic.close()
        self._marked()
        self.tree = without_lock(self.files.tree())
        named = [parse_segment_name(os.path.basename(name)) for name in self.tree]
        self.bases = sorted(base for base in named if base is not None)
        real = {each.base for each in self.batches}
        self.fakes = [
            offset
            for base in self.bases
            for offset in passing(self.tree[segment(base)][HEADER_BYTES:], base, self.identity)
            if offset not in real
        ]

    def _step(self) -> None:
        random, partition = self.random, self.topic.partition(0)
        self.clock.now += random.randrange(-3, 40) * 1000
        match random.randrange(12):
            case 0:
                partition.roll()
            case 1:
                self.topic.close()
                self.topic = testing.open_topic(TOPIC, files=self.files, clock=self.clock)
            case 2 if len(partition.segments) > 2:
                base = partition.segments[1].base_offset
                partition._access.writer().drop_before(base)
                self.batches = [each for each in self.batches if each.base >= base]
                self.marks = []
            case _:
                self._append()
        self._marked()

    def _marked(self) -> None:
        mark = self.topic.partition(0)._access.log.mark() if not self.topic.closed else None
        end = mark.flushed_end if mark is not None else self.marks[-1][0]
        self.marks.append((end, self.files.tree()[WATERMARK]))

    def _append(self) -> None:
        random, partition = self.random, self.topic.partition(0)
        base, writer = partition.log_end_offset, partition._access.writer()
        known = Known(self.identity, self.headers(), base, self.clock.now, writer.disk.epoch, writer.disk.nonce)
        count = random.choice((1, 1, 1, 2, 3, 7))
        sizes = [random.choice((0, 3, 8, 160, 300, 304, 1500, 5000, 12_000)) for _ in range(count)]
        columns = Columns([bytes(size) for size in sizes])
        if random.random() < 0.3:
            columns = columns._replace(keys=[random.choice((None, bytes(160), bytes(400))) for _ in sizes])
        if random.random() < 0.3:
            columns = columns._replace(timestamps=[NOW + random.randrange(600) * 1000 for _ in sizes])
        if random.random() < 0.3:
            pairs = [(name, bytes(size)) for name in ("a", "name", "имя") for size in (0, 168, 640)]
            columns = columns._replace(headers=[tuple(random.choices(pairs, k=random.randrange(3))) for _ in sizes])
        columns = columns_with(known, columns, random)
        if self.codec and random.random() < 0.5 and (value := compressed_forgery(known, self.codec, random)):
            columns = Columns([value])
        before = self.clock.now
        ranges = partition.append_many(
            columns.values,
            keys=columns.keys,
            timestamps=columns.timestamps,
            headers=columns.headers,
            producer=("somebody", len(self.batches)) if random.random() < 0.1 else None,
        )
        partition.flush()
        (appended,) = ranges
        end = partition.log_end_offset
        if appended.offsets.start != base:  # the producer's sequence was known: a replay
            return
        assert appended.offsets == range(base, base + len(columns.values))
        self.batches.append(
            Stored(
                base,
                end,
                [
                    Record(
                        0,
                        offset,
                        before if columns.timestamps is None else columns.timestamps[index],
                        None if columns.keys is None else columns.keys[index],
                        columns.values[index],
                        () if columns.headers is None else tuple(columns.headers[index]),
                        end if index == len(columns.values) - 1 else offset + 1,
                    )
                    for index, offset in enumerate(appended.offsets)
                ],
            )
        )
        self.payloads += len(columns.values)

    def headers(self) -> list[Header]:
        """The headers of the batches so far, as any reader finds them."""
        found: list[Header] = []
        for each in self.batches:
            base = max(one for one in self.topic.partition(0)._access.log.index.bases() if one <= each.base)
            with SegmentReader(self.files, segment(base), self.identity) as reader:
                found.append(reader.header_at(each.base))
        return found

    @property
    def records(self) -> list[Record]:
        return records_of(self.batches)

    @property
    def start(self) -> int:
        return self.batches[0].base if self.batches else self.bases[0]

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else self.bases[0]


def segment(base: int) -> str:
    return f"{DIRECTORY}/{base:020d}.log"


def without_lock(tree: Tree) -> Tree:
    return {name: content for name, content in tree.items() if not name.endswith("/lock")}


def records_of(batches: Iterable[Stored]) -> list[Record]:
    return [record for each in batches for record in each.records]


# --- what is found, against what was appended --------------------------------------------------------


def same(found: Sequence[Any], expected: Sequence[Any], what: str) -> None:
    """Assert that two values are equal. The message says what is wrong, and does not print the payloads."""
    if list(found) == list(expected):
        return
    invented = [each for each in found if each not in expected]
    hidden = [each for each in expected if each not in found]
    offsets = [[getattr(each, "offset", each) for each in some][:5] for some in (invented, hidden)]
    raise AssertionError(f"{what}: {len(invented)} invented {offsets[0]}, {len(hidden)} hidden {offsets[1]}")


class Reads:
    """Reads of one log, each compared; `done` counts them."""

    def __init__(self, story: Story) -> None:
        self.story, self.random, self.done = story, story.random, 0

    def same(self, what: str, read: Callable[[], Iterable[Any]], expected: Iterable[Any]) -> None:
        self.done += 1
        try:
            found = list(read())
        except CorruptLogError as error:
            raise AssertionError(f"{what}: falsely damaged: {error}") from error
        same(found, list(expected), what)

    def some(self, items: Sequence[Any], most: int) -> list[Any]:
        return self.random.sample(items, min(most, len(items)))

    def every_way(self, topic: Topic, batches: list[Stored]) -> None:
        """Do all reads that a reader can do, in a sound log with these batches."""
        records = records_of(batches)
        self.whole(topic, batches, records)
        self.offsets(topic, batches, records)
        self.times(topic, batches, records)
        self.others(topic, batches, records)

    def whole(self, topic: Topic, batches: list[Stored], records: list[Record]) -> None:
        self.same("read", topic.read, records)
        self.same("batches", lambda: [(each.offsets, each.next_offset) for each in topic.batches()],
                  [(range(each.base, each.base + len(each.records)), each.end) for each in batches])  # fmt: skip
        reader = topic.read(on_gap="skip")
        self.same("skip", lambda: reader, records)
        assert reader.gaps == [], "falsely damaged"
        self.same("follow", lambda: topic.follow("begin", timeout=0), records)
        self.same("arrow", lambda: arrow_rows(topic), [(each.offset, each.key, each.value) for each in records])

    def offsets(self, topic: Topic, batches: list[Stored], records: list[Record]) -> None:
        for record in self.some(records, 12):
            rest = records[records.index(record) :]
            self.same(f"from {record.offset}", partial(topic.read, record.offset), rest)
            before = records[: records.index(record)]
            self.same(f"up to {record.offset}", partial(topic.read, end=record.offset), before)
        for each in batches:
            inside = range(each.base + len(each.records), each.end)
            fakes = [offset for offset in self.story.fakes if offset in inside]
            aligned = [offset for offset in inside if not offset & 7]
            for offset in {*self.some(fakes, 8), *self.some(aligned, 4), *inside[:1], *inside[-1:]}:
                self.done += 1
                with pytest.raises(InvalidOffsetError) as caught:
                    topic.read(offset)
                told = (caught.value.batch_offsets, caught.value.next_offset)
                assert told == (range(each.base, each.base + len(each.records)), each.end), f"offset {offset}"

    def times(self, topic: Topic, batches: list[Stored], records: list[Record]) -> None:
        end = batches[-1].end if batches else self.story.start
        times = {each.timestamp for each in records}
        for time in self.some(sorted({*times, *(each + 1 for each in times), NOW - 10**9, NOW + 10**9}), 25):
            first = next((each for each in records if each.timestamp >= time), None)
            reader = topic.read(to_datetime(time))
            assert reader.tell() == {0: end if first is None else first.offset}, f"time {time}"
            expected = [] if first is None else records[records.index(first) :]
            self.same(f"from time {time}", partial(iter, reader), expected)
        for start, expected in (("begin", records), ("end", [])):
            self.same(start, partial(topic.read, start), expected)

    def others(self, topic: Topic, batches: list[Stored], records: list[Record]) -> None:
        partition = topic.partition(0)
        assert topic.verify().damage == (), "verify: falsely damaged"
        report = sound(partition)
        assert (report.batches, report.records) == (len(batches), len(records)), "verify"
        for record in self.some(records, 6):
            rest = len(records) - records.index(record)
            lag = measure_lag(partition._access.log, record.offset, now_us=self.story.clock.now, count_records=True)
            assert (lag.records, lag.bytes) == (rest, batches[-1].end - record.offset), "lag"
            self.done += 1
        for most in (1, self.random.randrange(1, 9000), 1 << 30):
            self.same(f"transfer of {most} bytes", partial(received, topic, most), [
                (each.timestamp, each.key, each.value, each.headers) for each in records
            ])  # fmt: skip


def arrow_rows(topic: Topic) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    for batch in topic.batches():
        columns = batch.to_arrow()
        columns.validate(full=True)
        yield from zip(
            batch.offsets, columns.column("key").to_pylist(), columns.column("value").to_pylist(), strict=True
        )


def received(topic: Topic, most: int) -> list[tuple[Any, ...]]:
    """The records of another log after everything was sent to it, `most` bytes at a time."""
    partition = topic.partition(0)
    pipe = os.memfd_create("frames")
    try:
        offset = partition.log_start_offset
        while offset < partition.high_watermark:
            after = partition.transfer(pipe, offset, most)
            assert after > offset
            offset = after
        size = os.lseek(pipe, 0, os.SEEK_CUR)
        stream = BytesIO(os.pread(pipe, size, 0))
    finally:
        os.close(pipe)
    with testing.open_topic("/logs/receiver", files=CrashFS(), clock=Clock(), **QUIET) as receiver:
        while receiver.partition(0).receive(stream):
            pass
        receiver.flush()
        assert receiver.verify().damage == ()
        return [(each.timestamp, each.key, each.value, each.headers) for each in receiver.read()]


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
        reader = topic.read(on_gap="skip")
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
    found = topic.read(to_datetime(time), on_gap="skip").tell()[0]
    assert found == whole or found in [each.base for each in bad if each.base < whole], f"time {time}, past damage"


def first_of(topic: Topic, offset: int) -> list[Record]:
    """The record at the offset, whatever is damaged before it."""
    return [next(iter(topic.read(offset, on_gap="skip")))]


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
            reader = topic.read(on_gap="skip")
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
        "past damage": cost(damaged, lambda topic: list(topic.read(on_gap="skip")), mode="r"),
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
