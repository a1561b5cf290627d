"""G18: workers that read, write and commit in transactions, killed by SIGKILL at any moment: each effect is there once.

Each worker reads an input topic in a group, and commits, in one transaction, a record for each input to two topics and
the group's positions. Workers are killed and started again. Meanwhile a native writer holds one of the output topics
and appends to it, and a reader looks at all partitions of the other one. What must hold is judged from the outputs:

    each input has its record in each output topic, once, in the order of its partition
    native records are at the offsets that their appends returned
    a reader sees a transaction in all partitions of a topic, or in none
    every byte of the topics is right
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from counts import count, scale
from processes import fork, wait

from conftest import sound
from loglib import CommitPendingError, LockedError, StaleGenerationError, Topic, transaction

pytestmark = pytest.mark.reliability

SHARDS = 2
SECONDS = 30.0
WORKERS = 3
PARTITIONS = 4
LONGEST_LIFE_S = 1.5


def work(path: Path, name: str, seed: int) -> NoReturn:
    """Read, transform and write for ever."""
    rng = random.Random(seed)
    source = Topic.open(path / "source", mode="r")
    topics = [Topic.open(path / "orders", mode="r"), Topic.open(path / "bills", mode="r")]
    while True:
        with suppress(StaleGenerationError), source.group("etl", member=name, commit="manual") as group:
            while True:
                records = group.poll(max_records=rng.choice((1, 5, 50)), timeout=0.2)
                if not records:
                    continue
                size = rng.choice((0, 0, 0, 0, 60_000))  # some transactions are staged in files
                with suppress(CommitPendingError, LockedError):
                    with transaction(f"etl-{name}") as tx:
                        mark = os.urandom(6).hex().encode()  # of the transaction
                        for record in records:
                            value = b"%d %s %s " % (record.partition, record.value, mark) + bytes(size)
                            tx.append(topics[0], value, partition=int(record.value or b"") % PARTITIONS)
                            tx.append(topics[1], value, partition=record.partition % 2)
                        for number in range(PARTITIONS):
                            tx.append(topics[0], b"all " + mark, partition=number)
                        tx.commit(group)
                    continue
                break  # in doubt: join again, and go on from what is committed


def write_natively(path: Path, seed: int, said: int) -> NoReturn:
    """Hold the topic of bills, and append to its first partition for ever; each offset is told."""
    rng = random.Random(seed)
    with Topic.open(path / "bills", create=True) as bills:
        number = 0
        while True:
            place = bills.append(b"native %d " % number + bytes(rng.choice((0, 900))), partition=0, sync=True)
            os.write(said, b"%d %d\n" % (number, place.offset))
            number += 1
            time.sleep(rng.choice((0.0, 0.001, 0.01)))


def look(path: Path, stop: float) -> None:
    """Read all partitions of the orders again and again: a transaction is in all of them, or in none."""
    with Topic.open(path / "orders", mode="r") as orders:
        begins: int | str = "begin"
        looks = 0
        while time.monotonic() < stop:
            seen = Counter(
                value for record in orders.read(begins) if (value := record.value or b"").startswith(b"all ")
            )
            torn = {mark: times for mark, times in seen.items() if times != PARTITIONS}
            assert not torn, f"a look at {begins} shows {torn}"
            looks += 1
            time.sleep(0.02)
        print(f"{looks} looks", file=sys.stderr)


def check(path: Path, told: dict[int, int]) -> None:
    """The outputs are a function of the inputs, and nothing else is there."""
    with Topic.open(path / "source", mode="r") as source:
        inputs = Counter((record.partition, record.value) for record in source.read())
    for name in ("orders", "bills"):
        with Topic.open(path / name, create=True) as topic:
            found: Counter[tuple[int, bytes | None]] = Counter()
            last: dict[tuple[int, int], int] = {}
            for record in topic.read():
                value = record.value or b""
                if value.startswith((b"all ", b"native ")):
                    continue
                partition, number = map(int, value.split()[:2])
                found[partition, b"%d" % number] += 1
                key = record.partition, partition
                assert last.get(key, -1) < number, f"{name}: {number} of {key} comes behind {last[key]}"
                last[key] = number
            assert found == inputs, f"{name}: {[each for each in inputs if found[each] != 1][:20]} are not there once"
            for each in topic.partitions:
                sound(each)
            if name == "bills":
                native = {
                    int((record.value or b"").split()[1]): record.offset
                    for record in topic.partition(0).read() if (record.value or b"").startswith(b"native ")
                }  # fmt: skip
                for number, offset in told.items():
                    assert native.get(number) == offset, f"native {number} at {offset} is at {native.get(number)}"


class Processes:
    """The children of a test, which it may kill and replace."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}

    def start(self, name: str, action: Callable[[], object]) -> None:
        self.pids[name] = fork(action)

    def kill(self, name: str) -> None:
        pid = self.pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        status = wait(pid)
        assert status == -signal.SIGKILL, f"{name} failed; its error is above"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def lines(fd: int) -> Iterator[tuple[int, int]]:
    with os.fdopen(fd, "rb") as told:
        for line in told.read().splitlines(keepends=True):
            if line.endswith(b"\n"):
                number, offset = map(int, line.split())
                yield number, offset


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.timeout(600)
def test_each_input_has_its_effect_once_under_kills(shard: int, tmp_path: Path) -> None:
    rng = random.Random(shard)
    for name, partitions in (("source", 3), ("orders", PARTITIONS), ("bills", 2)):
        Topic.open(tmp_path / name, create=True, partitions=partitions, segment_bytes=1 << 20).close()
    stop = time.monotonic() + scale(int(SECONDS))
    kills = fed = 0
    notes = os.memfd_create("told")
    with Processes() as children, Topic.open(tmp_path / "source", create=True) as source:
        children.start("native", lambda: write_natively(tmp_path, shard, notes))
        children.start("reader", lambda: look(tmp_path, stop))
        deaths: dict[str, float] = {}
        lives = 0
        while time.monotonic() < stop:
            for name in (f"w{each}" for each in range(WORKERS)):
                if name not in children.pids:
                    lives += 1
                    seed = shard * 1_000_000 + lives
                    children.start(name, lambda name=name, seed=seed: work(tmp_path, name, seed))  # type: ignore[misc]
                    deaths[name] = time.monotonic() + rng.uniform(0.05, LONGEST_LIFE_S)
                elif time.monotonic() > deaths[name]:
                    children.kill(name)
                    kills += 1
            for _ in range(rng.choice((0, 1, 3))):
                source.append(b"%d" % fed, partition=rng.randrange(3))
                fed += 1
            source.flush()
            time.sleep(0.01)
        children.start("last", lambda: work(tmp_path, "last", 0))  # nobody is killed from here on
        for name in [each for each in children.pids if each.startswith("w")]:
            children.kill(name)
        wait_until_read(tmp_path, fed)
        children.kill("last")
        children.kill("native")
        assert wait(children.pids.pop("reader")) == 0, "the reader failed; its error is above"
    os.lseek(notes, 0, os.SEEK_SET)
    told = dict(lines(notes))
    check(tmp_path, told)
    count("G18", kills=kills, inputs=fed, native_records=len(told), lost=0, phantoms=0, wrong=0)


def wait_until_read(path: Path, fed: int) -> None:
    """Wait until the group has committed all inputs and these are visible in the outputs.

    How long that takes depends on what else the machine does. A minute without a new record is too long.
    """
    before, deadline = [-1, -1], 0.0
    with Topic.open(path / "orders", mode="r") as orders, Topic.open(path / "bills", mode="r") as bills:
        while True:
            found = [
                sum(not (each.value or b"").startswith((b"all", b"nat")) for each in topic.read())
                for topic in (orders, bills)
            ]
            if min(found) >= fed:
                return
            if found != before:
                before, deadline = found, time.monotonic() + 60
            assert time.monotonic() < deadline, f"a minute long {found} of {fed} inputs have their records"
            time.sleep(1.0)
