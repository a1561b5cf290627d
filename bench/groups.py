"""Groups: what a consumer group costs, and how long a killed member's partitions wait for an owner.

Invariant: readers with and without a group get the same records, one by one, from the same
partitions. Joining and opening are not timed; committing is.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, cast

from inputs import payload_bytes_of
from loglib import Topic
from measure import Measurement, percentile, timed_rounds
from ours import open_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from job import Options

_MEMBERS = 4
_PARTITIONS = 8
_PRODUCED_EVERY_S = 0.001


def fill(directory: Path, options: Options) -> None:
    """Write the messages to four partitions in turn."""
    messages = options.number("messages")
    with open_topic(directory / "log", flush="no fsync", partitions=4) as topic:
        values = [b"x" * 200] * 10_000
        for number, _ in enumerate(range(0, messages, len(values))):
            topic.append_many(values, partition=number % 4)


def read(directory: Path, options: Options) -> Measurement:
    """Read all records one by one."""
    messages, system = options.number("messages"), options.text("system")
    names = count()
    with Topic.open(directory / "log", mode="r") as topic:
        records: list[Iterator[object]] = []

        def before() -> None:
            if system == "group":
                group = topic.group(f"{os.getpid()}-{next(names)}")
                group.poll(max_records=1)  # now it has joined and owns all partitions
                group.seek("begin")
                records.append(group.follow())
            else:
                records.append(iter(topic.read() if system == "read" else topic.follow("begin")))

        def work() -> None:
            left = messages
            for _ in records.pop():
                left -= 1
                if not left:
                    break

        timing = timed_rounds(work, before=before)
    return Measurement(
        messages=messages,
        payload_bytes=payload_bytes_of("200", messages),
        seconds=timing.seconds,
        best_seconds=timing.best_seconds,
        cpu_seconds=timing.cpu_seconds,
        peak_bytes=timing.peak_bytes,
    )


def commit(directory: Path, options: Options) -> Measurement:
    """Commit the same record again and again."""
    commits = options.number("commits")
    with Topic.open(directory / "log", create=True, durability=cast(Any, options.text("durability"))) as topic:
        topic.append(b"x", sync=True)
        with topic.group("commits", commit="manual") as group:
            [record] = group.poll(timeout=1.0)

            def work() -> None:
                for _ in range(commits):
                    group.commit(record)

            timing = timed_rounds(work)
    return Measurement(
        messages=commits,
        seconds=timing.seconds,
        best_seconds=timing.best_seconds,
        cpu_seconds=timing.cpu_seconds,
    )


def takeover(directory: Path, options: Options) -> Measurement:
    """Kill a member, and wait until others have handled a record of each of its partitions."""
    pool = _Pool(directory)
    try:
        times = sorted(each for _ in range(options.number("kills")) for each in pool.takeovers_us())
    finally:
        pool.close()
    return Measurement(seconds=sum(times) / 1e6, p50_us=percentile(times, 50), p99_us=percentile(times, 99))


class _Pool:
    """Members, each in its own process, and a topic that gets records all the time."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "log"
        self._told = directory / "told"
        self._told.touch()
        self._topic = open_topic(self._path, flush="each call, no fsync", partitions=_PARTITIONS)
        self._spawn = get_context("spawn")
        self._members = [self._start() for _ in range(_MEMBERS)]

    def takeovers_us(self) -> list[float]:
        before = self._settled()
        victim = self._members.pop(0)
        killed = time.monotonic_ns()
        os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join()
        after = self._settled()
        self._members.append(self._start())
        lost = [partition for partition, (pid, _) in before.items() if pid == victim.pid]
        return [(after[partition][1] - killed) / 1000 for partition in lost]

    def close(self) -> None:
        for member in self._members:
            member.kill()
            member.join()
        self._topic.close()

    def _start(self) -> BaseProcess:
        member = self._spawn.Process(target=_be_member, args=(self._path, self._told), daemon=True)
        member.start()
        return member

    def _settled(self) -> dict[int, tuple[int, int]]:
        """Which member handles each partition, and since when, once all living members have their share."""
        pids = {member.pid for member in self._members}
        while True:
            for partition in range(_PARTITIONS):
                self._topic.append(b"x", partition=partition)
            time.sleep(_PRODUCED_EVERY_S)
            rows = [list(map(int, line.split())) for line in self._told.read_text().splitlines()]
            owners = {partition: (pid, since) for partition, pid, since in rows}
            if len(owners) == _PARTITIONS and {pid for pid, _ in owners.values()} == pids:
                return owners


def _be_member(path: Path, told: Path) -> None:
    """Follow the group, and report the first record that this member gets of each partition."""
    fd = os.open(told, os.O_WRONLY | os.O_APPEND)
    fresh: set[int] = set()
    with Topic.open(path, mode="r") as topic, topic.group("takeover", on_assign=fresh.update) as group:
        for record in group.follow():
            if record.partition in fresh:
                fresh.remove(record.partition)
                os.write(fd, b"%d %d %d\n" % (record.partition, os.getpid(), time.monotonic_ns()))
