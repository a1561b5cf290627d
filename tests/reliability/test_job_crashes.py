"""G26: after any power cut the jobs that are left are done, each once, and no settled one comes again.

Programs run on a `CrashFS`: one or two members take records, hold some of them, and accept, release, renew or reject
them, also in transactions that append a result. Generations are short. The disk is cut at many operations. Then:

    a member    gets what is left, in the order of keys, and nothing of which the program was told that it is settled,
                or whose result or dead letter can be seen
    a look      each record is settled, and has its one result or its one dead letter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from random import Random
from typing import Any, NamedTuple

import counts
import pytest
from dead_letters import died, forget_stores
from job_chaos import generations_of
from roomy import room_by_chance

from conftest import QUIET, Clock
from loglib import CommitPendingError, Job, Share, Topic, testing, transaction
from loglib.jobs import SharePartition
from loglib.testing import CrashFS, CrashState, Mode

SHARDS = 8
STATES = 5_000  # per shard
STATES_OF_A_MODE = 200  # of each program about this number is judged: many programs find more than many states of one
MODES: tuple[Mode, ...] = ("strict", "linux")
FATES = b"atrln"  # accept, in a transaction, reject, release at first, renew


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process waits for one of before the cut."""
    forget_stores(monkeypatch)


class Plan(NamedTuple):
    """A program, drawn by its seed."""

    seed: int
    fates: bytes
    partitions: int
    order: str
    members: int
    generation: int  # entries
    commit: float  # seconds; the clock of the program stands still
    lease: float | None

    @classmethod
    def of(cls, seed: int) -> Plan:
        draw = Random(f"plan {seed}")
        fates = bytes(draw.choice(FATES) for _ in range(draw.randrange(2, 8)))
        return cls(
            seed, fates, partitions=draw.randrange(1, 3), order=draw.choice(["none", "key"]),
            members=draw.randrange(1, 3), generation=draw.randrange(5, 20), commit=draw.choice([0, 9]),
            lease=draw.choice([None, 100]),
        )  # fmt: skip

    def values(self) -> list[bytes]:
        return [b"%c%d" % (fate, number) for number, fate in enumerate(self.fates)]

    def of_fate(self, fate: bytes) -> Counter[bytes | None]:
        return Counter(value for value in self.values() if value[:1] == fate)


class World:
    """The topics on a disk: records, results, dead letters."""

    def __init__(self, files: CrashFS, plan: Plan) -> None:
        self.files, self.plan, self.clock = files, plan, Clock()
        self.handled: list[tuple[int, bytes | None, bytes]] = []  # partition, key and value, as they are settled

    def open(self, name: str, **options: Any) -> Topic:
        return testing.open_topic(f"/t/{name}", files=self.files, clock=self.clock, background=False, **options)

    def make(self) -> None:
        self.files.mkdir("/t")
        self.files.sync_directory("/")
        with self.open("mail", partitions=self.plan.partitions, **QUIET) as mail, self.open("results", **QUIET):
            for number, value in enumerate(self.plan.values()):
                mail.append(value, b"%d" % (number % 2))
            mail.flush()
            with mail.share("mail", dead_letter="/t/dead", max_attempts=100, order=self.plan.order):  # type: ignore[arg-type]
                pass

    def settle(self, job: Job, results: Topic) -> bool:
        """Settle a job as its value says. True if it is sure by now that it will not come again."""
        value = job.value or b""
        if value[:1] == b"l" and job.attempt == 1:
            job.release()
            return False
        self.handled.append((job.partition, job.key, value))
        match value[:1]:
            case b"t":
                with transaction("app", timeout=0.01) as tx:
                    tx.append(results, value)
                    tx.accept(job)
                return True
            case b"r":
                job.reject("bad")
            case b"n":
                if self.plan.lease is not None:
                    job.renew(200)
                job.accept()
            case _:
                job.accept()
        return False

    def run(self) -> Iterator[set[bytes]]:
        """Do the program. Yields what is settled for sure, whenever that may have changed."""
        draw, sure = Random(f"run {self.plan.seed}"), set[bytes]()
        with ExitStack() as stack:
            mail = stack.enter_context(self.open("mail", mode="r"))
            results = stack.enter_context(self.open("results", mode="r"))
            shares = [
                stack.enter_context(mail.share("mail", commit=self.plan.commit, lease=self.plan.lease))
                for _ in range(self.plan.members)
            ]
            held: list[tuple[Job, Share]] = []
            settled: dict[Share, set[bytes]] = {share: set() for share in shares}
            while True:
                share = draw.choice(shares)
                job = share.take(0.0) if len(held) < 3 else None
                if job is not None:
                    held.append((job, share))
                    continue
                if not held:
                    break
                job, share = held.pop(draw.randrange(len(held)))
                if self.settle(job, results):
                    sure.add(job.value or b"")
                elif (job.partition, job.key, job.value) in self.handled:
                    settled[share].add(job.value or b"")
                if draw.random() < 0.3:
                    share.flush()
                    sure |= settled[share]
                yield sure
        yield set(self.plan.values())

    def finish(self) -> None:
        """Others do what is left."""
        for _ in range(100):
            with (
                suppress(CommitPendingError),
                self.open("mail", mode="r") as mail,
                self.open("results", mode="r") as results,
                mail.share("mail", lease=self.plan.lease) as share,
            ):
                while (job := share.take(0.0)) is not None:
                    self.settle(job, results)
                return

    def info(self) -> list[SharePartition]:
        with self.open("mail", mode="r") as mail:
            return list(mail.share_info("mail").partitions.values())

    def visible(self) -> tuple[Counter[bytes | None], Counter[bytes | None]]:
        """Results, and dead letters."""
        with self.open("results", mode="r") as results:
            done = Counter(record.value for record in results.read())
        return done, Counter(died("/t/dead", files=self.files))


def judge(state: CrashState, plan: Plan, sure: set[bytes]) -> None:
    files = state.files
    files._drawn = 1000  # after the cut, other random names are drawn
    world = World(files, plan)
    done, dead = world.visible()
    world.finish()
    handled = [value for _, _, value in world.handled]
    again = set(handled) & (sure | {value for value in (done | dead) if value})
    assert not again, f"wrong: {again} came again"
    assert len(handled) == len(set(handled)), f"wrong: handled twice: {handled}"
    assert (done, dead) <= (plan.of_fate(b"t"), plan.of_fate(b"r")), "phantoms"
    for name in ("results", "dead") if dead or b"r" in plan.fates else ("results",):
        world.open(name).close()  # a reader sees only a part after a torn watermark, until a writer has recovered
    done, dead = world.visible()
    assert (done, dead) == (plan.of_fate(b"t"), plan.of_fate(b"r")), f"lost: {done} {dead}"
    info = world.info()
    assert sum(each.counts.rejected for each in info) == dead.total(), info
    assert sum(each.counts.accepted for each in info) == len(plan.fates) - dead.total(), info
    assert not any(each.in_hand or each.free or each.dead_letters_due for each in info), info
    if plan.order == "key":
        for key in {key for _, key, _ in world.handled}:
            numbers = [int(value[1:]) for _, each, value in world.handled if each == key]
            assert numbers == sorted(numbers), f"wrong: the order of key {key!r}: {numbers}"


def crash(plan: Plan) -> int:
    """Cut the disk at operations of the program, and judge the states; returns the number of distinct ones."""
    files = CrashFS()
    world = World(files, plan)
    world.make()
    begun, judged = len(files.operations), 0
    promised = [(begun, set[bytes]()), *((len(files.operations), set(sure)) for sure in world.run())]
    for mode in MODES:
        states = dict[object, tuple[CrashState, set[bytes]]]()
        for state in files.crash_states(mode=mode, since=begun, random=1):
            sure = [what for at, what in promised if at <= state.at][-1]
            states[state.key, len(sure)] = state, sure
        stride = len(states) // STATES_OF_A_MODE | 1
        for state, sure in list(states.values())[plan.seed % stride :: stride]:
            judged += 1
            try:
                judge(state, plan, sure)
            except Exception as error:
                raise AssertionError(f"{plan} in mode {mode}: {state}") from error
    return judged


@pytest.mark.reliability
@pytest.mark.parametrize("shard", range(SHARDS))
def test_power_cut_leaves_each_job_to_be_done_once(shard: int) -> None:
    seed, judged, programs = shard, 0, 0
    while judged < counts.scale(STATES):
        plan = Plan.of(seed)
        with generations_of(plan.generation), room_by_chance(seed):
            judged += crash(plan)
        seed, programs = seed + SHARDS, programs + 1
    counts.count("G26", job_crash_states=judged, job_programs=programs, lost=0, phantoms=0, wrong=0)
