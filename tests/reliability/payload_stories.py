"""Histories of a log whose records pose as batches, and every way of reading them against what was appended."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest
from forgery import Known, columns_with, compressed_forgery, passing

from conftest import NOW, QUIET, Clock, sound
from loglib import CorruptLogError, Record, Topic, testing
from loglib.config.times import to_datetime
from loglib.errors import InvalidOffsetError
from loglib.format.columns import Columns
from loglib.format.header import Header
from loglib.log.lag import measure_lag
from loglib.segment import HEADER_BYTES, Identity, SegmentReader, parse_segment_name
from loglib.testing import CrashFS

TOPIC = "/logs/payloads"
DIRECTORY = f"{TOPIC}/0000"
WATERMARK = f"{DIRECTORY}/watermark"
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
        reader = topic.read(on_damage="skip")
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
