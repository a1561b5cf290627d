"""Many threads on one topic: nothing is lost, doubled or out of order, whoever is interrupted where."""

import itertools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from conftest import MANUAL, QUIET, records_of, sound
from loglib import FlushPolicy, LogClosedError, OffsetOutOfRangeError, Position, Record, Retention, Topic, testing
from loglib.log.reader import Reader
from loglib.system.group_commit import Turn
from loglib.testing import UnsyncedFiles

Open = Callable[..., Topic]
Appended = dict[Position, bytes]
THREADS = 8
LONG_S = 60.0  # for what comes at once unless something is wrong


@pytest.fixture(autouse=True)
def hasty() -> Iterator[None]:
    """Threads change places as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


class Crew:
    """Threads that work at once; what one of them raises is raised by `join`."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []

    def start(self, action: Callable[..., object], *arguments: Any) -> None:
        thread = threading.Thread(target=self.guard, args=(action, *arguments), daemon=True)
        self.threads.append(thread)
        thread.start()

    def guard(self, action: Callable[..., object], *arguments: Any) -> None:
        try:
            action(*arguments)
        except BaseException as error:
            self.failures.append(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(LONG_S)
        assert not any(thread.is_alive() for thread in self.threads), self.failures
        if self.failures:
            raise self.failures[0]


# --- appending: each way, `count` records named after the thread and their order in it -------------------


def names(thread: int, count: int) -> list[bytes]:
    return [b"%d-%d" % (thread, number) for number in range(count)]


def plain(topic: Topic, values: list[bytes], appended: Appended) -> None:
    for value in values:
        appended[topic.append(value)] = value


def keyed(topic: Topic, values: list[bytes], appended: Appended) -> None:
    for value in values:
        appended[topic.append(value, key=value[-1:], headers={"a": b"b"})] = value


def synced(topic: Topic, values: list[bytes], appended: Appended) -> None:
    for value in values[: len(values) // 4]:
        position = topic.append(value, sync=True)
        assert topic.partition(position.partition).high_watermark > position.offset
        appended[position] = value


def bulk(topic: Topic, values: list[bytes], appended: Appended) -> None:
    for start in range(0, len(values), 40):
        some = values[start : start + 40]
        for partition, offsets in topic.append_many(some, partition=start // 40 % len(topic.partitions)):
            appended |= {Position(partition, offset): some.pop(0) for offset in offsets}


def spread(topic: Topic, values: list[bytes], appended: Appended) -> None:
    for start in range(0, len(values), 40):
        some = values[start : start + 40]
        rest = defaultdict(list)
        for value in some:
            rest[_partition_of(topic, value[-1:])].append(value)
        for partition, offsets in topic.append_many(some, keys=[value[-1:] for value in some]):
            appended |= {Position(partition, offset): rest[partition].pop(0) for offset in offsets}


def _partition_of(topic: Topic, key: bytes) -> int:
    return crc32(key) % len(topic.partitions)


WAYS = (plain, keyed, bulk, synced, spread)


def by_partition(records: list[Record]) -> dict[int, list[tuple[Position, bytes | None]]]:
    found = defaultdict(list)
    for record in records:
        found[record.partition].append((Position(record.partition, record.offset), record.value))
    return dict(found)


def in_log_order(appended: list[Appended]) -> dict[int, list[tuple[Position, bytes]]]:
    found = defaultdict(list)
    for position, value in sorted(pair for each in appended for pair in each.items()):
        found[position.partition].append((position, value))
    return dict(found)


def test_each_record_is_read_once_where_it_was_appended_and_in_its_threads_order(open_topic: Open, path: Path) -> None:
    count = 1500
    topic = open_topic(
        partitions=3, flush=FlushPolicy(records=60, interval=0.001), segment_bytes=20_000, batch_bytes=2000,
        files=UnsyncedFiles(),
    )  # fmt: skip
    appended: list[Appended] = [{} for _ in range(THREADS)]
    kinds = [WAYS[number % len(WAYS)] for number in range(THREADS)]
    total = sum(count // 4 if kind is synced else count for kind in kinds)
    other = open_topic(mode="r")
    seen: list[list[Record]] = [[], [], []]
    followers = [topic.follow("begin", timeout=LONG_S), other.follow("begin", timeout=LONG_S), topic.follow("begin")]

    def follow(reader: Reader, records: list[Record]) -> None:
        for record in reader:
            records.append(record)
            if len(records) == total:
                return

    def poll(reader: Reader, records: list[Record]) -> None:
        while len(records) < total:
            records += reader.poll(max_records=7, timeout=LONG_S)

    crew = Crew()
    for reader, records, way in zip(followers, seen, (follow, follow, poll), strict=True):
        crew.start(way, reader, records)
    for number, kind in enumerate(kinds):
        crew.start(kind, topic, names(number, count), appended[number])
    crew.join()

    expected = in_log_order(appended)
    assert sum(map(len, expected.values())) == total
    for records in seen:
        assert by_partition(records) == expected
    for number in range(THREADS):
        for pairs in expected.values():
            order = [int(value.split(b"-")[1]) for _, value in pairs if value.startswith(b"%d-" % number)]
            assert order == sorted(order)
    topic.close()
    assert by_partition(records_of(path)) == expected


def test_flushing_rolling_and_retention_at_once_lose_only_what_was_to_go(open_topic: Open, path: Path) -> None:
    topic = open_topic(
        partitions=2, retention=Retention(age=None, bytes=12_000), segment_bytes=4096, batch_bytes=500,
        files=UnsyncedFiles(),
    )  # fmt: skip
    appended: list[Appended] = [{} for _ in WAYS]
    seen: list[Record] = []
    done = threading.Event()

    def keep_on(action: Callable[[], object]) -> None:
        while not done.is_set():
            action()

    def follow(reader: Reader) -> None:
        finished = False
        while not finished:
            finished = done.is_set()
            try:
                while polled := reader.poll(max_records=50):
                    seen.extend(polled)
            except OffsetOutOfRangeError as error:
                seek_to_begin(reader, error.partition)

    appenders, others = Crew(), Crew()
    others.start(follow, topic.follow("begin"))
    for action in (topic.flush, topic.retain, topic.partition(0).roll, lambda: look_around(topic)):
        others.start(keep_on, action)
    for number, kind in enumerate(WAYS):
        appenders.start(kind, topic, names(number, 1500), appended[number])
    appenders.join()
    topic.flush()
    done.set()
    others.join()

    expected = in_log_order(appended)
    for partition in topic.partitions:
        pairs = expected[partition.id]
        kept = [pair for pair in pairs if pair[0].offset >= partition.log_start_offset]
        assert by_partition(list(partition.read())).get(partition.id, []) == kept
        assert sound(partition).records == len(kept)
        followed = by_partition(seen).get(partition.id, [])
        assert followed == sorted(set(followed))
        assert set(followed) <= set(pairs)
        assert set(kept) <= set(followed)


def test_log_start_never_moves_back_while_all_lists_and_drops(path: Path) -> None:
    """Every roll begins a retention pass, and every start by time lists the directory: see test_writer_retention.py."""

    class Slowly(UnsyncedFiles):
        def unlink(self, path: Any, **within: Any) -> None:
            time.sleep(0.001)  # others have their turn between the new log start and the last file's going
            super().unlink(path, **within)

    policies = QUIET | {"retention": Retention(age=None, bytes=3 * 4096), "flush": FlushPolicy(5, None, None)}
    topic = testing.open_topic(path, files=Slowly(), segment_bytes=4096, batch_records=1, **policies)
    partition, done = topic.partition(0), threading.Event()
    starts: list[int] = []

    def append() -> None:
        for _ in range(300):
            topic.append(b"x" * 700)

    def keep_on(action: Callable[[], object]) -> None:
        while not done.is_set():
            action()

    appenders, others = Crew(), Crew()
    actions = [lambda: topic.read("-1h"), topic.retain, lambda: starts.append(partition.log_start_offset)]
    for action in [*actions, actions[0], actions[1]]:
        others.start(keep_on, action)
    for _ in range(3):
        appenders.start(append)
    appenders.join()
    done.set()
    others.join()
    assert starts == sorted(starts) and starts[-1] > 0
    assert min(int(each.stem) for each in (path / "0000").glob("*.log")) == partition.log_start_offset
    topic.close()
    with testing.open_topic(path, files=UnsyncedFiles()) as topic:
        assert sound(topic.partition(0)).records == len(list(topic.read())) > 0


def seek_to_begin(reader: Reader, partition: int) -> None:
    while True:
        try:
            return reader.seek({partition: "begin"})
        except OffsetOutOfRangeError:  # overtaken once more
            continue


def look_around(topic: Topic) -> None:
    """What a person who watches would call; retention must not show as damage."""
    for partition in topic.partitions:
        sound(partition)
        assert partition.segments[-1].base_offset <= partition.log_end_offset
        try:
            offsets = [record.offset for record in partition.read()]
        except OffsetOutOfRangeError:
            continue
        assert offsets == sorted(offsets)


class Gate(UnsyncedFiles):
    """Holds up the first sync of a segment until told, and counts them all."""

    def __init__(self) -> None:
        self.armed = False
        self.syncs = 0
        self.reached = threading.Event()
        self.opened = threading.Event()

    def datasync(self, fd: int) -> None:
        super().datasync(fd)
        if self.armed:
            self.syncs += 1
            self.reached.set()
            assert self.opened.wait(LONG_S)


def test_records_appended_during_a_sync_share_the_next_one(open_topic: Open) -> None:
    gate = Gate()
    topic = open_topic(files=gate)
    partition = topic.partition(0)
    gate.armed = True
    crew = Crew()
    crew.start(lambda: topic.append(b"first", sync=True))
    assert gate.reached.wait(LONG_S)
    first_end = partition.log_end_offset
    for number in range(THREADS):
        crew.start(lambda number: topic.append(b"%d" % number, sync=True), number)
    until(lambda: partition.log_end_offset == first_end + THREADS)
    assert partition.high_watermark == 0  # nothing is seen before it is synced
    gate.opened.set()
    crew.join()
    assert gate.syncs == 2
    assert sound(partition).batches == 2
    gate.armed = False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0)


@pytest.mark.parametrize("round_", range(5))
def test_append_that_meets_a_close_is_in_the_log_or_has_raised(round_: int, path: Path) -> None:
    topic = testing.open_topic(path, partitions=2, batch_bytes=300, files=UnsyncedFiles(), **QUIET)
    appended: list[Appended] = [{} for _ in range(THREADS)]
    started = threading.Semaphore(0)

    def append_until_closed(kind: Callable[..., None], number: int) -> None:
        try:
            for call in itertools.count():
                kind(topic, [b"%d-%d-%d" % (number, call, part) for part in range(4)], appended[number])
                if call == 10 * round_:
                    started.release()
        except LogClosedError:
            return

    crew = Crew()
    for number in range(THREADS):
        crew.start(append_until_closed, WAYS[number % len(WAYS)], number)
    for _ in range(THREADS):
        assert started.acquire(timeout=LONG_S)
    topic.close()
    crew.join()

    stored = {Position(record.partition, record.offset): record.value for record in records_of(path)}
    acknowledged = {position: value for each in appended for position, value in each.items()}
    assert acknowledged.items() <= stored.items()
    assert len(stored) - len(acknowledged) <= 4 * THREADS  # of the calls that raised, part may be there
    assert len(set(stored.values())) == len(stored)
    with Topic.open(path, create=True) as again:
        assert all(each.recovery is not None and each.recovery.clean for each in again.partitions)


def test_close_ends_readers_in_other_threads(open_topic: Open) -> None:
    topic = open_topic(partitions=2, files=UnsyncedFiles())
    topic.append_many([b"x"] * 1000, partition=0)
    topic.flush()
    reading = threading.Semaphore(0)

    def read(reader: Reader) -> None:
        for record in reader:
            assert record.value == b"x"
            reading.release()

    crew = Crew()
    for _ in range(THREADS):
        crew.start(read, topic.follow("begin"))
    for _ in range(THREADS * 500):
        assert reading.acquire(timeout=LONG_S)
    topic.close()
    crew.join()


def test_at_most_one_action_has_the_turn() -> None:
    turn = Turn()
    inside: list[int] = []
    done: list[int] = []

    def act(number: int) -> None:
        assert not inside
        inside.append(number)
        done.append(number)
        assert inside.pop() == number

    def take(number: int) -> None:
        for _ in range(300):
            turn.take(lambda: act(number))

    crew = Crew()
    for number in range(THREADS):
        crew.start(take, number)
    crew.join()
    assert sorted(done) == [number for number in range(THREADS) for _ in range(300)]


def test_turn_is_given_up_only_when_another_has_done_the_work() -> None:
    turn = Turn()
    wanted, reached = [0], [0]
    lock = threading.Lock()

    def act() -> None:
        with lock:
            latest = wanted[0]
        assert reached[0] <= latest
        reached[0] = latest

    def done(mine: int) -> bool:
        return reached[0] >= mine

    def want() -> None:
        for _ in range(300):
            with lock:
                wanted[0] += 1
                mine = wanted[0]
            turn.take(act, unless=partial(done, mine))
            assert reached[0] >= mine

    crew = Crew()
    for _ in range(THREADS):
        crew.start(want)
    crew.join()


def test_threads_that_sync_starved_each_other_and_shared_few_syncs(path: Path) -> None:
    """Two of them passed the turn to and fro, while the others waited for its lock: two records to a sync."""
    syncs = []

    class Disk(UnsyncedFiles):
        def datasync(self, fd: int) -> None:
            syncs.append(fd)
            time.sleep(0.0003)

    with testing.open_topic(path, files=Disk(), flush=MANUAL) as topic:

        def append() -> None:
            for _ in range(100):
                topic.append(b"x" * 200, sync=True)

        threads = [threading.Thread(target=append) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(syncs) < 1600 / 4
