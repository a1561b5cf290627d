"""G8: two thousand readers at once, while one writer appends at full speed and retention drops its segments.

Every value describes itself (see described.py), so a reader notices a record that is wrong, repeated, out of order or
missing. A reader may be told that retention was faster; then it starts again. Nothing else may go wrong.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from counts import count, scale
from described import Value, decode
from processes import ended, fork, shared, wait

from conftest import MANUAL
from loglib import OffsetOutOfRangeError, Record, Retention, Topic, testing
from loglib.config.times import to_datetime
from loglib.log.reader import Reader
from loglib.testing import UnsyncedFiles

pytestmark = pytest.mark.reliability

PARTITIONS = 2
SEGMENT_BYTES = 16 << 10
KEPT_BYTES = 256 << 10  # so few that retention overtakes readers all the time
AT_ONCE = 300  # records that a reader takes before it does something else
READERS = 2000


class Shared(ctypes.Structure):
    """What the processes tell each other; counts by process."""

    _fields_ = (
        ("present", ctypes.c_uint64 * READERS),  # readers that are open
        ("reads", ctypes.c_uint64 * READERS),
        ("overtaken", ctypes.c_uint64 * READERS),
        ("appended", ctypes.c_uint64),
        ("begun", ctypes.c_uint64),
        ("over", ctypes.c_uint64),
    )


# --- one reader -------------------------------------------------------------------------------------------


class Looker:
    """One reader: it reads in every way, and checks everything."""

    def __init__(self, topic: Topic, rng: random.Random) -> None:
        self.topic = topic
        self.rng = rng
        self.reads = 0
        self.overtaken = 0
        self.last = [Record(number, 0, 0, None, None, (), 0) for number in range(PARTITIONS)]  # seen of each partition

    def open(self) -> Reader:
        """Open a reader at the beginning, which may move during the search for it."""
        while True:
            try:
                return self.topic.follow("begin")
            except OffsetOutOfRangeError:
                self.overtaken += 1

    def look(self) -> None:
        """Read in one way, chosen at random."""
        way = self.rng.choice([self.read, self.follow, self.poll, self.batches, self.seek, self.by_time])
        try:
            way()
        except OffsetOutOfRangeError as error:
            assert error.offset < error.log_start_offset, "retention was faster, or it is another error"
            self.overtaken += 1

    def read(self) -> None:
        self.check(self.topic.read())

    def follow(self) -> None:
        with self.topic.follow("begin", timeout=0.01) as reader:
            self.check(reader)

    def poll(self) -> None:
        with self.topic.follow("begin") as reader:
            self.check(record for _ in range(9) for record in reader.poll(max_records=50, timeout=0.01))

    def batches(self) -> None:
        self.check(record for batch in self.topic.batches() for record in batch.records())

    def seek(self) -> None:
        """Seek to a record seen before, which must still be there, or to an end."""
        seen = self.rng.choice(self.last)
        if seen.value is None:
            return self.read()
        with self.topic.read({seen.partition: seen.offset}) as reader:
            first = next(each for each in reader if each.partition == seen.partition)
            assert first == seen
            reader.seek({0: "begin", 1: "end"})
            self.check(reader)
        return None

    def by_time(self) -> None:
        now = time.time_ns() // 1000 - self.rng.randrange(3_000_000)
        for partition in self.topic.partitions:
            records = partition.read(to_datetime(now))
            self.check(records, since=now)

    def check(self, records: Iterable[Record], *, since: int = 0) -> None:
        """Take some records. Each is whole, those of a partition follow each other, and all of them are flushed."""
        expected: dict[int, Value] = {}
        for record, _ in zip(records, range(AT_ONCE), strict=False):
            found = decode(record.value)
            assert expected.get(record.partition, found) == found
            assert found.partition == record.partition
            assert record.timestamp >= since
            expected[record.partition] = found._replace(number=found.number + 1)
            self.last[record.partition] = record
            self.reads += 1
        for record in self.last:
            assert record.next_offset <= self.topic.partition(record.partition).high_watermark


class Looking:
    """Some readers in one process, each in its own thread."""

    def __init__(self, path: Path, told: Shared, process: int, threads: int) -> None:
        self.path = path
        self.told = told
        self.process = process
        self.threads = threads
        self.lock = threading.Lock()
        self.failures: list[BaseException] = []

    def run(self) -> None:
        """Read until the end. Half of the threads share a topic."""
        os.nice(5)  # the writer goes first
        first = self.process * self.threads
        with Topic.open(self.path, mode="r") as shared_topic:
            topics = [shared_topic if n % 2 else Topic.open(self.path, mode="r") for n in range(self.threads)]
            threads = [threading.Thread(target=self.work, args=(topic, first + n)) for n, topic in enumerate(topics)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self.failures:
            raise self.failures[0]

    def work(self, topic: Topic, seed: int) -> None:
        looker = Looker(topic, random.Random(seed))
        try:
            with looker.open():
                self.add(self.told.present, 1)
                while not (self.told.begun or self.failures):
                    time.sleep(0.05)
                while not self.told.over and not self.failures:
                    looker.look()
        except BaseException as error:
            self.failures.append(error)
        self.add(self.told.reads, looker.reads)
        self.add(self.told.overtaken, looker.overtaken)

    def add(self, counts: Any, number: int) -> None:
        with self.lock:
            counts[self.process] += number


# --- the writer -----------------------------------------------------------------------------------------------


def write(path: Path, told: Shared) -> None:
    """Append to all partitions, as fast as possible."""
    rng = random.Random(0)
    numbers = [0] * PARTITIONS
    with testing.open_topic(path, files=UnsyncedFiles()) as topic:  # the writer must not wait for the disk
        while not told.over:
            partition = rng.randrange(PARTITIONS)
            start, size_bytes = numbers[partition], rng.choice([0, 30, 300])
            numbers[partition] += rng.choice([1, 20, 100])
            values = [Value(partition, each).encode(size_bytes) for each in range(start, numbers[partition])]
            if len(values) < 50:
                for value in values:
                    topic.append(value, partition=partition)
            else:
                topic.append_many(values, partition=partition)
            topic.flush()
            told.appended = sum(numbers)


def read_while_writing(path: Path, *, processes: int, seconds: float) -> None:
    """Start all readers before the first one begins to read; the writer writes for this many seconds."""
    told = shared(Shared)
    Topic.open(
        path, create=True, partitions=PARTITIONS, segment_bytes=SEGMENT_BYTES, segment_age=None, flush=MANUAL,
        retention=Retention(age=None, bytes=KEPT_BYTES),
    ).close()  # fmt: skip
    writer = fork(partial(write, path, told))
    readers = [fork(Looking(path, told, each, READERS // processes).run) for each in range(processes)]
    while (present := sum(told.present)) < READERS and not ended():
        time.sleep(0.05)
    told.begun = 1
    time.sleep(seconds)
    told.over = 1
    assert [wait(each) for each in [writer, *readers]] == [0] * (1 + processes), "a child failed; its error is above"
    assert present == READERS
    count(
        "G8", readers=READERS, records_appended=told.appended, records_read=sum(told.reads),
        overtaken_by_retention=sum(told.overtaken), wrong=0,
    )  # fmt: skip


@pytest.mark.parametrize(("processes", "seconds"), [(40, 20), (200, 6)])
def test_none_of_two_thousand_readers_sees_anything_wrong(processes: int, seconds: float, path: Path) -> None:
    read_while_writing(path, processes=processes, seconds=seconds * scale(100) / 100)


# --- large batches ------------------------------------------------------------------------------------------------

LARGE_BYTES = 8 << 20


def write_large(path: Path, told: Shared) -> None:
    """Append 8 MiB in each call, as a few large records."""
    with testing.open_topic(path, files=UnsyncedFiles()) as topic:
        number = 0
        while not told.over:
            values = [Value(0, each).encode(LARGE_BYTES // 4) for each in range(number, number + 4)]
            number += len(values)
            topic.append_many(values)
            topic.flush()
            told.appended = number


def read_large(path: Path, told: Shared, process: int) -> None:
    """Poll without a pause, and never find a part of a batch."""
    with Topic.open(path, mode="r") as topic:
        reader = topic.follow("begin")
        number = 0
        while not told.over:
            try:
                polled = reader.poll(max_records=7)
            except OffsetOutOfRangeError:
                told.overtaken[process] += 1
                number = -1
                reader.seek("begin")
                continue
            for record in polled:
                found = decode(record.value)
                assert number in (-1, found.number)
                number = found.number + 1
                told.reads[process] += 1


def test_reader_never_sees_a_part_of_a_batch_of_8_mib(path: Path) -> None:
    told = shared(Shared)
    Topic.open(
        path, create=True, segment_bytes=3 * LARGE_BYTES, segment_age=None, flush=MANUAL, batch_bytes=LARGE_BYTES,
        retention=Retention(age=None, bytes=12 * LARGE_BYTES),
    ).close()  # fmt: skip
    children = [fork(partial(write_large, path, told)), *(fork(partial(read_large, path, told, n)) for n in range(6))]
    time.sleep(8 * scale(100) / 100)
    told.over = 1
    assert [wait(each) for each in children] == [0] * len(children), "a child failed; its error is above"
    count("G8", large_batches=told.appended // 4, large_records_read=sum(told.reads), wrong=0)
