"""Job chaos: workers of a share that are killed, stopped, poisoned, evicted or without room on the disk, at any moment.

Handlers note what they begin and end in a file of their own, and that file is compared with what the share says.
"""

from __future__ import annotations

import collections
import os
import random
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from dead_letters import letters
from harm import harmed
from processes import fork
from shared_jobs import only

from conftest import values_of
from loglib import Job, LogError, Reject, Topic, transaction
from loglib.jobs import ack_log
from loglib.jobs.entries import ENTRY_BYTES
from loglib.system.clock import SYSTEM

_EVENT = struct.Struct("<iqQi")  # a worker, an offset, a token, and an attempt; negative at the end of the handler
_WORKERS = 3


class Handled:
    """What handlers have begun and ended, in a file to which all of them append: in the order in which they did it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def note(self, job: Job, *, ends: bool = False) -> None:
        os.write(self._fd, _EVENT.pack(os.getpid(), job.offset, job.token, -job.attempt if ends else job.attempt))

    def events(self) -> list[tuple[int, int, int, int]]:
        return list(_EVENT.iter_unpack(self.path.read_bytes()))

    def check(self, count: int, *, dead: set[int]) -> None:
        """I1, I2 and I4, from outside: `dead` are the workers that were evicted or killed, also by themselves."""
        attempts: dict[int, list[int]] = collections.defaultdict(list)
        running: dict[int, int] = {}
        ended = collections.Counter[int]()
        for worker, offset, _, attempt in self.events():
            if attempt < 0:
                ended[offset] += 1
                if running.get(offset) == worker:
                    del running[offset]
                else:
                    assert worker in dead, "a handler ended whose record another one had begun"
            else:
                before = running.get(offset)
                assert before is None or before in dead or before == worker, "two handlers of one record"
                running[offset] = worker
                attempts[offset].append(attempt)
        assert len(attempts) == count and len(ended) == count, "a record that nobody has handled"
        for offset, found in attempts.items():
            assert found == sorted(set(found)), f"offset {offset}: an attempt was not counted: {found}"

    def check_order(self, keys: dict[int, bytes | None]) -> None:
        """I5, from outside: a record is begun only after the last handler of each earlier one of its key has ended."""
        left: dict[bytes | None, list[int]] = collections.defaultdict(list)
        for offset, key in sorted(keys.items()):
            left[key].append(offset)
        last = {offset: number for number, (_, offset, _, attempt) in enumerate(self.events()) if attempt < 0}
        for number, (_, offset, _, attempt) in enumerate(self.events()):
            if attempt > 0 and keys[offset] is not None:
                earlier = left[keys[offset]][: left[keys[offset]].index(offset)]
                assert all(last[each] < number for each in earlier), f"{offset} of {keys[offset]!r} was begun too early"


@contextmanager
def generations_of(entries: int) -> Iterator[None]:
    """Files of shares that end after so few entries, also in processes that are forked meanwhile."""
    with mock.patch.object(ack_log, "_LOG_BYTES", entries * ENTRY_BYTES):
        yield


@contextmanager
def limited_files() -> Iterator[Callable[[], None]]:
    """A function after which no file of this process grows, until the end of the block: as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- workers that accept ----------------------------------------------------------------------------------


def _work(path: Path, handled: Handled, **options: Any) -> None:
    """Handle records: some kill their worker, some are released once, and after some no file grows any more."""
    me = f"w{os.getpid()}"
    with (
        limited_files() as limit,
        Topic.open(path, mode="r") as topic,
        topic.share("mail", max_attempts=1000, member=me, **options) as share,
    ):
        for job in share.follow(timeout=0.0):
            handled.note(job)
            number = int(job.value or b"")
            if number % 40 == 7 and job.attempt < 3:
                os.kill(os.getpid(), signal.SIGKILL)
            handled.note(job, ends=True)  # first: from the release on, another one may begin
            if number % 40 == 9 and job.attempt < 2:
                job.release()
            if number % 40 == 11 and job.attempt < 2:
                limit()


def _until_done(path: Path, handled: Handled, count: int, **options: Any) -> None:
    """Handle until all records are accepted: a member may end while others have the last ones in hand."""
    with Topic.open(path, mode="r") as topic:
        while not topic.shares() or only(topic).counts.accepted < count:
            with suppress(LogError):  # it was evicted, or has no room
                _work(path, handled, **options)


def workers_harmed(path: Path, seed: int, *, order: str, count: int, kills: int) -> dict[str, int]:
    """I1, I2, I4 and I5 under harm. Workers are evicted, too, unless keys have an order."""
    draw = random.Random(seed)
    keys: dict[int, bytes | None] = {}
    with Topic.create(path, partitions=1) as topic:
        for number in range(count):
            key = None if number % 9 == 0 else b"%d" % (number * 7 % 11)
            keys[topic.append(b"%d" % number, key).offset] = key
            if number % 3 == 2:
                topic.flush()
    handled, evicted = Handled(path.parent / f"{path.name}-handled"), set[int]()

    def evict(running: list[int]) -> None:
        if order == "key" or draw.random() < 0.9:  # else a handler that is evicted may end after others of its key
            return
        with Topic.open(path, mode="r") as topic, suppress(LogError):
            victim = draw.choice(running)
            evicted.add(victim)
            topic.evict_share_member("mail", f"w{victim}")

    with generations_of(draw.randrange(20, 80)):
        harm = harmed(
            lambda: fork(lambda: _until_done(path, handled, count, order=order)), draw, workers=_WORKERS, kills=kills,
            deadly=0.8, longest_pause_s=0.02, besides=evict,
        )  # fmt: skip
    handled.check(count, dead=harm.dead | evicted)
    if order == "key":
        handled.check_order(keys)
    with Topic.open(path, mode="r") as topic:
        info = only(topic)
    assert (info.counts, info.in_hand, info.free) == ((count, 0, 0, 0), (), 0), f"seed {seed}"
    return {
        "job_kills": harm.kills, "job_stops": harm.stops, "job_poisonings": len(harm.dead) - harm.kills,
        "job_evictions": len(evicted), "jobs": count, "job_starts": sum(each[3] > 0 for each in handled.events()),
    }  # fmt: skip


# --- workers that accept in transactions, and reject --------------------------------------------------------


def _transact(path: Path) -> None:
    """Handle all records: each third is rejected, and some kill their worker before."""
    dead, settled = path.parent / "dead", 0
    with Topic.open(path, mode="r") as topic, Topic.open(path.parent / "results", mode="r") as results:
        count = int(max(values_of(topic), key=lambda value: int(value or b"0")) or b"0") + 1
        while settled < count:
            with suppress(LogError), topic.share("mail", dead_letter=dead, max_attempts=1000) as share:
                for job in share.follow(timeout=0.0):
                    number = int(job.value or b"0")
                    if number % 7 == 0 and job.attempt < 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    with job:
                        if number % 3 == 0:
                            raise Reject(f"attempt {job.attempt}")
                        with transaction(f"worker-{os.getpid()}") as tx:
                            tx.append(results, job.value)
                            tx.accept(job)
            counts = only(topic).counts if "mail" in topic.shares() else (0, 0)
            settled = counts[0] + counts[1]


def transactions_harmed(path: Path, seed: int, *, count: int, kills: int) -> dict[str, int]:
    """I1 and I8 under harm: each record has one result, or one dead letter."""
    with Topic.create(path, partitions=1) as topic:
        topic.append_many([b"%d" % number for number in range(count)])
    Topic.create(path.parent / "results").close()
    with generations_of(32):
        harm = harmed(
            lambda: fork(lambda: _transact(path)), random.Random(seed), workers=_WORKERS, kills=kills, deadly=0.6,
            longest_pause_s=0.05,
        )  # fmt: skip
    with Topic.open(path, mode="r") as topic, topic.share("mail") as share:
        assert share.take(0.0) is None  # it also finishes what the last ones have left
        info = only(topic)
    with Topic.open(path.parent / "results", mode="r") as results:
        done = collections.Counter(int(value or b"0") for value in values_of(results))
    dead = collections.Counter(int(each.value or b"0") for each in letters(path.parent / "dead", clock=SYSTEM))
    assert done == dict.fromkeys((number for number in range(count) if number % 3), 1), f"seed {seed}"
    assert dead == dict.fromkeys(range(0, count, 3), 1), f"seed {seed}"
    assert (info.counts, info.in_hand, info.free) == ((sum(done.values()), sum(dead.values()), 0, 0), (), 0)
    return {
        "job_kills": harm.kills, "job_stops": harm.stops, "job_poisonings": len(harm.dead) - harm.kills, "jobs": count,
    }  # fmt: skip
