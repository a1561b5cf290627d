"""Chaos: members of a consumer group, each in its own process, that come and go, are killed, and are stopped.

Each member writes down at once what it does, in one file for all members (`Evidence`): the partitions that it gets and
gives up, and each record when it has handled it. `faults` finds everything that a group must never do. It uses these
lines, the committed offsets of the group, and the times when the test killed members. It must find mutants of the
library.
"""

from __future__ import annotations

import os
import random
import signal
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from described import Value, decode
from processes import fork, wait

from loglib import Group, LogClosedError, Record, StaleGenerationError, Topic
from loglib.groups import TopicPartition, evict_member
from loglib.groups.commit_log import parse
from loglib.groups.lock_file import read_if_held
from loglib.groups.offsets import Offsets, offsets_identity
from loglib.log.cursor import Cursor
from loglib.log.log import Log
from loglib.log.recovery import list_segments
from loglib.segment import HEADER_BYTES
from loglib.system.directory import Directory
from loglib.system.files import REAL

GROUP = "chaos"
KEPT = ".kept"  # suffix of the logs of commits that a member has folded
PRODUCED_AT_ONCE = 20  # records per partition
PARTITIONS_AT_ONCE = 8  # random partitions
PRODUCED_EVERY_S = 0.02
PATIENCE_S = 60.0
NEVER_NS = 1 << 62
LINE_BYTES = 64
CLOCKS_NS = 2_000_000  # tolerance where two clocks are compared, one of them in microseconds


# --- what a member writes down --------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One line of evidence. Times are of CLOCK_MONOTONIC, which all processes share."""

    time_ns: int
    kind: str  # "assigned", "revoked", "handled" or "stale"
    pid: int
    partition: int = -1
    generation: int = -1
    offset: int = -1

    def encode(self) -> bytes:
        """As text, padded so that no line crosses a page: there a write may be seen, or be killed, half done."""
        return " ".join(map(str, self)).ljust(LINE_BYTES - 1).encode() + b"\n"


class Evidence:
    """A file to which many processes append, each line with one write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, kind: str, *facts: int) -> None:
        os.write(self.fd, Line(time.monotonic_ns(), kind, os.getpid(), *facts).encode())

    def lines(self, start_bytes: int = 0) -> list[Line]:
        rows = [row.split() for row in self.path.read_bytes()[start_bytes:].decode().splitlines()]
        return [Line(int(row[0]), row[1], *map(int, row[2:])) for row in rows]


class Member:
    """One member's life: follows the group, and writes down what it does."""

    def __init__(self, path: Path, evidence: Evidence, rng: random.Random, options: dict[str, Any]) -> None:
        self.path = path
        self.evidence = evidence
        self.rng = rng
        self.options = options
        self.generations: dict[int, int] = {}

    def live(self) -> None:
        """Follow the group until SIGTERM, which closes the group wherever the member is."""
        with Topic.open(self.path, mode="r") as topic:
            self.group_topic = topic.name
            self.group = group = topic.group(
                GROUP, member=f"m{os.getpid()}", on_assign=self.assigned, on_revoke=self.revoked, **self.options
            )
            signal.signal(signal.SIGTERM, lambda *_: group.close())
            with suppress(LogClosedError), group:
                self.work(group)

    def work(self, group: Group) -> None:
        while not group.closed:
            try:
                for record in group.follow(timeout=0.2):
                    self.handle(record)
                    if self.options["commit"] == "manual" and self.rng.random() < 0.05:
                        group.commit(record)
                if self.options["commit"] == "manual" and not group.closed:
                    group.commit()
            except _PoisonError:  # a record whose body raised is handed out again
                continue
            except StaleGenerationError:
                self.evidence.add("stale")
                return

    def handle(self, record: Record) -> None:
        """Take some time, or raise, or be killed in the middle."""
        generation = self.generations.get(record.partition, -1)
        chance = self.rng.random()
        if chance < 0.001:
            time.sleep(self.rng.uniform(0.0, 0.05))
        elif chance < 0.0015:
            raise _PoisonError
        self.evidence.add("handled", record.partition, generation, record.offset)

    def assigned(self, partitions: list[int]) -> None:
        for number in partitions:
            # Not the owner's file: it may belong to another member already, if this one was stopped and evicted.
            owned = self.group._membership.ownership._owned
            _, self.generations[number] = owned[TopicPartition(self.group_topic, number)]
            self.evidence.add("assigned", number, self.generations[number])

    def revoked(self, partitions: list[int]) -> None:
        for number in partitions:
            self.evidence.add("revoked", number, self.generations.pop(number, -1))


class _PoisonError(Exception):
    """The body of a loop failed."""


# --- the test's side ------------------------------------------------------------------------------------------------


def produce(path: Path, seed: int) -> None:
    """Append to random partitions until SIGTERM."""
    rng = random.Random(seed)
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: over.append(number))
    with Topic.open(path, create=True) as topic:
        numbers = [0] * len(topic.partitions)
        while not over:
            for partition in rng.sample(range(len(numbers)), min(PARTITIONS_AT_ONCE, len(numbers))):
                values = [Value(partition, numbers[partition] + each).encode() for each in range(PRODUCED_AT_ONCE)]
                numbers[partition] += len(values)
                topic.append_many(values, partition=partition)
            topic.flush()
            time.sleep(PRODUCED_EVERY_S)


class Chaos:
    """A group, its members, and the harm that is done to them."""

    def __init__(
        self, directory: Path, seed: int, *, partitions: int, members: int, stops: bool = True, **options: Any
    ) -> None:
        self.path = directory / "topic"
        self.rng = random.Random(seed)
        self.seed = seed
        self.partitions = partitions
        self.most = members
        self.stops = stops
        self.epoch_ns = time.time_ns() - time.monotonic_ns()
        self.options = {"commit": "after", "strategy": "range"} | options
        self.evidence = Evidence(directory / "evidence")
        self.ended_ns: dict[int, int] = {}  # by process: when it was killed or evicted
        self.evicted: dict[int, int] = {}  # by process: when, by the clock of commits
        self.members: list[int] = []
        self.done: dict[str, int] = defaultdict(int)
        Topic.open(self.path, create=True, partitions=partitions, durability="os").close()
        self.producer = fork(partial(produce, self.path, seed))

    def join(self) -> None:
        """Start a member."""
        member = Member(self.path, self.evidence, random.Random(self.rng.random()), self.options)
        self.members.append(fork(member.live))
        self.done["joins"] += 1

    def leave(self) -> None:
        """Let a member leave in order."""
        pid = self._any()
        os.kill(pid, signal.SIGTERM)
        self._gone(pid)
        self.done["leaves"] += 1

    def kill(self) -> None:
        """Kill a member with SIGKILL, at any instruction."""
        pid = self._any()
        self.ended_ns[pid] = time.monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        assert self._gone(pid, killed=True) == -signal.SIGKILL
        self.done["kills"] += 1

    def stop(self) -> None:
        """Stop a member for a while; sometimes it is evicted in the meantime."""
        pid = self._any()
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        time.sleep(self.rng.uniform(0.0, 0.2))
        evict = self.rng.random() < 0.5
        if evict:
            self.evict(pid)
            time.sleep(self.rng.uniform(0.0, 0.2))
        os.kill(pid, signal.SIGCONT)
        if evict and pid in self.evicted:
            self._gone(pid)
        self.done["stops"] += 1

    def evict(self, pid: int) -> None:
        """Evict a member if it has joined: a member that has not yet locked its file would make another file."""
        if read_if_held(REAL, str(self.path / "groups" / GROUP / "members" / f"m{pid}")) is not None:
            self.ended_ns[pid] = time.monotonic_ns()
            with Topic.open(self.path, mode="r") as topic:
                evict_member(topic, GROUP, f"m{pid}")
            self.evicted[pid] = time.time_ns()
            self.done["evictions"] += 1

    def run(self, seconds: float, *, drain: bool = True) -> None:
        """Do all this at random, then let the remaining members handle the remaining records."""
        until = time.monotonic() + seconds
        actions: list[Callable[[], None]] = [self.leave, self.kill, self.kill, *([self.stop] * self.stops)]
        while time.monotonic() < until:
            if not self.members or (len(self.members) < self.most and self.rng.random() < 0.6):
                self.join()
            else:
                self.rng.choice(actions)()
            time.sleep(self.rng.uniform(0.0, 0.3))
        self.finish(drain=drain)

    def finish(self, *, drain: bool = True) -> None:
        """Append no more records. All members leave when all records are handled."""
        os.kill(self.producer, signal.SIGTERM)
        assert wait(self.producer) == 0, "the producer failed; its error is above"
        if not self.members:
            self.join()
        if drain:
            self.drain()
        for pid in list(self.members):
            os.kill(pid, signal.SIGTERM)
            self._gone(pid)

    def share(self) -> None:
        """Wait until each member has partitions; before that, the first member has all of them."""
        self._wait(lambda: set(self.owners().values()) == set(self.members), "a member has no partition")

    def settle(self) -> None:
        """Wait until some member handles the new records of each partition."""
        seen_bytes = self.evidence.path.stat().st_size

        def settled() -> bool:
            last = {line.partition: line for line in self.evidence.lines(seen_bytes)}
            return len(last) == self.partitions and all(
                line.kind == "handled" and line.pid in self.members for line in last.values()
            )

        self._wait(settled, "a partition has no owner")

    def drain(self) -> None:
        """Wait until the group has committed all records."""
        with Topic.open(self.path, mode="r") as topic:
            ends = {each.id: each.high_watermark for each in topic.partitions if each.high_watermark}
            self._wait(
                lambda: self._last_commits(topic) == ends,
                "not everything was handled",
            )

    def _wait(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{otherwise}, seed {self.seed}"
            time.sleep(0.02)

    def owners(self) -> dict[int, int]:
        """By partition: the process to which it was assigned last."""
        return {line.partition: line.pid for line in self.evidence.lines() if line.kind == "assigned"}

    def clean_up(self) -> None:
        """End the processes that a failure has left running."""
        for pid in [*self.members, self.producer]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _any(self) -> int:
        return self.rng.choice(self.members)

    def _gone(self, pid: int, *, killed: bool = False) -> int:
        self.members.remove(pid)
        status = wait(pid)
        assert killed or status in (0, -signal.SIGTERM), f"member {pid} failed, seed {self.seed}; its error is above"
        if status == -signal.SIGTERM:  # before it could install its handler
            self.ended_ns[pid] = time.monotonic_ns()
        return status

    # --- what was committed --------------------------------------------------------------------------------

    def _last_commits(self, topic: Topic) -> dict[int, int]:
        """The committed offset of each partition, as a member sees it."""
        offsets = topic._group_directory(GROUP).offsets()
        try:
            return {partition.partition: commit.offset for partition, commit in offsets.commits().items()}
        finally:
            offsets.close()

    def commits(self, topic: Topic) -> Iterator[Line]:
        """Every commit that was ever made, in the order of time, as lines of evidence with times since 1970.

        A commit that a new owner, or a member that folds a log, repeats is not a commit of its own.
        """
        place = topic._group_directory(GROUP)
        found: dict[tuple[int, int, int, int], Line] = {}
        for log in (Path(place.path) / "offsets").iterdir():
            if log.name.endswith(".tmp"):  # left from a member that was killed while it made a log
                continue
            name = log.name.removeprefix(".").removesuffix(KEPT)
            for entries in _entries(Log(REAL, str(log), offsets_identity(place.log_id, GROUP, name))):
                for (_, partition), each in entries.items():
                    if each.offset is not None:
                        pid, time_ns = int(each.member[1:]), each.timestamp * 1000
                        line = Line(time_ns, "committed", pid, partition, each.generation, each.offset)
                        key = partition, pid, time_ns, each.offset
                        found[key] = min(line, found.get(key, line))
        yield from sorted(found.values())


def keep(offsets: Offsets, held: Directory, name: str) -> None:
    """Keep a log of commits instead of removing it: the group is judged by its commits."""
    os.rename(offsets._path(name), offsets._path(f".{name}{KEPT}"))


def _entries(log: Log) -> Iterator[dict[TopicPartition, Any]]:
    """The entries of a log, record by record; above its watermark as well, as far as there are whole batches."""
    segments = list_segments(REAL, log.directory)
    end = max(segments) + segments[max(segments)] - HEADER_BYTES
    cursor = Cursor(log, min(segments), on_damage=lambda _: None)
    try:
        while batches := cursor.read(end):
            for batch in batches:
                for record in batch.records():
                    value, member = record.value or b"", record.key or b""
                    found = parse(value, member, record.timestamp, log.directory, record.offset)
                    yield {TopicPartition(entry.topic, each.partition): entry for each, entry in found.items()}
    finally:
        cursor.close()


# --- what must hold ---------------------------------------------------------------------------------------------------


class Ownership(NamedTuple):
    """A time in which a member owned a partition."""

    start_ns: int
    end_ns: int
    pid: int
    generation: int


def ownerships(chaos: Chaos) -> dict[int, list[Ownership]]:
    """By partition: which member owned it, and when."""
    found: dict[int, list[Ownership]] = defaultdict(list)
    begun: dict[tuple[int, int, int], int] = {}
    for line in chaos.evidence.lines():
        key = line.pid, line.partition, line.generation
        if line.time_ns > chaos.ended_ns.get(line.pid, NEVER_NS):  # it was evicted, and does not know this yet
            continue
        if line.kind == "assigned":
            begun[key] = line.time_ns
        elif line.kind == "revoked":
            found[line.partition].append(Ownership(begun.pop(key), line.time_ns, line.pid, line.generation))
    for (pid, partition, generation), start_ns in begun.items():
        found[partition].append(Ownership(start_ns, chaos.ended_ns.get(pid, NEVER_NS), pid, generation))
    return {partition: sorted(each) for partition, each in found.items()}


def faults(chaos: Chaos) -> list[str]:
    """Everything that the group did and must not do."""
    with Topic.open(chaos.path, mode="r") as topic:
        offsets = {each.id: [record.offset for record in each.read()] for each in topic.partitions}
        for each in topic.partitions:
            numbers = [decode(record.value).number for record in each.read()]
            assert numbers == list(range(len(numbers)))
        commits = list(chaos.commits(topic))
    lines = chaos.evidence.lines()
    owned = ownerships(chaos)
    found = [*_two_owners(owned), *_lost(offsets, lines), *_after_the_end(lines)]
    for partition, of_partition in owned.items():
        handled: dict[int, list[Line]] = defaultdict(list)
        for line in lines:
            if line.kind == "handled" and line.partition == partition:
                handled[line.generation].append(line)
        made = [each for each in commits if each.partition == partition]
        for owner in of_partition:
            name = f"partition {partition}, generation {owner.generation}"
            mine = [line for line in handled[owner.generation] if line.pid == owner.pid]
            now = [commit for commit in made if commit.generation == owner.generation]
            before = [commit for commit in made if commit.generation < owner.generation]
            found += _order(name, [line.offset for line in mine], offsets[partition])
            found += _starts(name, mine[:1], before, offsets[partition], chaos)
            found += _commits(name, mine, now, offsets[partition], chaos)
        found += _late_commits(partition, made, chaos)
    return found


def _two_owners(owned: dict[int, list[Ownership]]) -> Iterator[str]:
    for partition, each in owned.items():
        for before, after in zip(each, each[1:], strict=False):
            if before.end_ns > after.start_ns:
                yield f"partition {partition} had two owners at once: {before}, {after}"
            if before.generation >= after.generation:
                yield f"partition {partition} went back from generation {before.generation} to {after.generation}"


def _lost(offsets: dict[int, list[int]], lines: list[Line]) -> Iterator[str]:
    handled = {(line.partition, line.offset) for line in lines if line.kind == "handled"}
    for partition, of_partition in offsets.items():
        lost = [offset for offset in of_partition if (partition, offset) not in handled]
        if lost:
            yield f"partition {partition}: {len(lost)} records handled by nobody, the first at {lost[0]}"


def _order(name: str, mine: list[int], offsets: list[int]) -> Iterator[str]:
    """Within a generation, each record follows the one before."""
    if mine:
        first = bisect_left(offsets, mine[0])
        if mine != offsets[first : first + len(mine)]:
            yield f"{name}: not in order, or not each once"


def _starts(name: str, first: list[Line], commits: list[Line], offsets: list[int], chaos: Chaos) -> Iterator[str]:
    """A new owner starts at the last commit: only records that were not committed are repeated."""
    sure = [each for each in commits if each.pid not in chaos.evicted]
    # If a member was stopped and evicted during a commit, the commit may come after the new owner's first look.
    unsure = [each for each in commits if each.pid in chaos.evicted]
    latest = max((each.generation for each in sure), default=0)
    last = [each for each in sure if each.generation == latest][-1:]
    starts = {each.offset for each in last + unsure} | ({0} if not last else set())
    allowed = {offset for start in starts for offset in offsets[bisect_left(offsets, start) :][:1]}
    for line in first:
        if line.offset not in allowed:
            yield f"{name}: began at {line.offset}, and the last commit says {sorted(allowed)}"


def _commits(name: str, mine: list[Line], commits: list[Line], offsets: list[int], chaos: Chaos) -> Iterator[str]:
    """No record is committed before it is handled."""
    for each in commits:
        done = [line.offset for line in mine if line.time_ns + chaos.epoch_ns <= each.time_ns + CLOCKS_NS]
        end = offsets[bisect_left(offsets, done[-1]) + 1 :][:1] if done else [0]
        if end and each.offset > end[0]:
            yield f"{name}: committed {each.offset}, handled up to {end[0]}"


def _late_commits(partition: int, commits: list[Line], chaos: Chaos) -> Iterator[str]:
    """A member that lost a partition commits no more. A commit begun before its stop and eviction does not count."""
    highest = 0
    for each in commits:
        if each.generation < highest and each.pid not in chaos.evicted:
            yield f"partition {partition}: generation {each.generation} committed after {highest} had"
        if each.time_ns > chaos.evicted.get(each.pid, NEVER_NS):
            yield f"partition {partition}: {each.pid} committed though it was evicted"
        highest = max(highest, each.generation)


def _after_the_end(lines: list[Line]) -> Iterator[str]:
    """A member that closes its group in the middle of a record may finish this record, and gets no more."""
    late: dict[int, int] = defaultdict(int)
    for line in lines:
        late[line.pid] += line.kind == "handled" and line.generation < 0
    yield from (
        f"process {pid} handled {count} records after it gave them up" for pid, count in late.items() if count > 1
    )


def takeovers_ms(chaos: Chaos) -> list[float]:
    """The times from each kill to the first record of each partition that its next owner handled."""
    first: dict[tuple[int, int], int] = {}
    for line in chaos.evidence.lines():
        if line.kind == "handled":
            first.setdefault((line.partition, line.generation), line.time_ns)
    return [
        (first[partition, after.generation] - before.end_ns) / 1_000_000
        for partition, each in ownerships(chaos).items()
        for before, after in zip(each, each[1:], strict=False)
        if before.end_ns == chaos.ended_ns.get(before.pid) and before.pid not in chaos.evicted
        if (partition, after.generation) in first
    ]
