"""G1: a state that a crash may leave never loses promised records, never shows invented ones, and is never refused.

The power is cut at every instant of every workload of up to three calls, and then of long workloads drawn with seeds,
until there are half a million distinct states, a tenth of them inside a recovery. See crash_engine.py.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain, count, islice
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import counts
import numpy as np
import pytest
from crash_engine import REGRESSIONS, replay, run_workloads, save
from crash_judge import Judge
from crash_workloads import long_workload, making_workloads, short_workloads, workloads
from crash_worlds import DirectoriesNeverSynced, Failure, NeverSynced, Recorder, Workload
from roomy import with_room

from loglib.append import writer
from loglib.append.active import ActiveSegment
from loglib.append.tail import TailWriter
from loglib.format import batch
from loglib.log import recovery
from loglib.log.recovery import Tail
from loglib.testing import CrashFS, Image

SHARDS = 28
STATES = 11_000  # per shard; another shard has about one in twenty of them too
NESTED_EVERY = 110  # so that a tenth of all states are inside a recovery
SHORT_SHARDS = 4


def check(cases: Iterable[Workload], judge: Judge) -> None:
    """Run the workloads, keep the states that fail, and count."""
    figures = {"lost": 0, "phantoms": 0, "refused": 0}
    ran = 0

    def counted() -> Iterator[Workload]:
        nonlocal ran
        for case in cases:
            ran += 1
            yield case

    try:
        run_workloads(counted(), judge=judge)
    except Failure as failure:
        figures[failure.kind] += 1
        failure.add_note(f"kept as {save(failure)}")
        raise
    finally:
        counts.count(
            "G1", workloads=ran, distinct_states=new_ones("states", judge.digests),
            of_them_inside_recovery=new_ones("nested", judge.nested), **figures,
        )  # fmt: skip
        counts.count("G14", accounted_records=judge.accounted, named_by_an_error=judge.named, untold=figures["lost"])


def new_ones(kind: str, digests: set[int]) -> int:
    """How many of these digests are new in this run, in all processes; the new ones are noted."""
    directory = counts.FILE.parent
    directory.mkdir(exist_ok=True)
    with (directory / f"crash-{kind}.digests").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = np.frombuffer(file.read(), dtype=np.uint64)
        found = np.setdiff1d(np.fromiter(digests, dtype=np.uint64, count=len(digests)), known)
        file.write(found.tobytes())
        return len(found)


# --- the proof -----------------------------------------------------------------------------------------------


@pytest.mark.reliability
@pytest.mark.parametrize(("durability", "room"), [("disk", 0), ("disk", 200), ("os", 0)])
@pytest.mark.parametrize("shard", range(SHORT_SHARDS))
def test_no_workload_of_up_to_three_calls_loses_anything(shard: int, durability: str, room: int) -> None:
    everything = chain.from_iterable(short_workloads(length, durability=durability) for length in (1, 2, 3))
    with with_room(room):
        check(islice(everything, shard, None, SHORT_SHARDS * counts.part()), Judge(nested_every=NESTED_EVERY))


@pytest.mark.reliability
def test_no_topic_is_half_made() -> None:
    check(making_workloads(), Judge())


@pytest.mark.reliability
@pytest.mark.timeout(max(300, counts.scale(300)))
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_long_workload_loses_anything(shard: int) -> None:
    judge = Judge(nested_every=NESTED_EVERY)
    enough = counts.scale(STATES)

    def until_enough() -> Iterator[Workload]:
        for workload in map(long_workload, count()):
            if len(judge.digests) >= enough:
                return
            if shard_of(workload) == shard:
                yield workload

    with with_room(200 * (shard % 2)):
        check(until_enough(), judge)


def shard_of(workload: Workload) -> int:
    """The same shard for workloads that begin alike: their common states are then judged once."""
    return crc32(repr(workload._replace(calls=workload.calls[:1], seed=0)).encode()) % SHARDS


# --- the engine sees faults ----------------------------------------------------------------------------------


class SyncedLate(Recorder):
    """Reports a sync as done at once, and does it before the next call."""

    def __init__(self, image: Image | None = None) -> None:
        super().__init__(image)
        self.late: tuple[str, Any] | None = None

    def datasync(self, fd: int) -> None:
        opened = self._opened(fd)
        self.late = opened.path, opened.node

    def _changed(self, name: str, path: str, *facts: Any, **more: Any) -> None:
        late, self.late = self.late, None
        if late is not None:
            super()._changed("sync", *late)
        super()._changed(name, path, *facts, **more)


class PublishesFirst(TailWriter):
    """Publishes what it has written before it syncs that."""

    _written: Tail | None = None

    def write(self, *arguments: Any) -> tuple[Tail, list[range]]:
        self._written, ranges = super().write(*arguments)
        return self._written, ranges

    def write_one(self, *arguments: Any) -> Tail | None:
        written = super().write_one(*arguments)
        self._written = written or self._written
        return written

    def sync(self, active: ActiveSegment, tail: Tail) -> None:
        self.publication.publish(flushed=tail, durable=tail)
        super().sync(active, tail)


FAULTS: dict[str, tuple[Callable[[Image], CrashFS], Any]] = {
    "files are never synced": (NeverSynced, nullcontext),
    "directories are never synced": (DirectoriesNeverSynced, nullcontext),
    "acknowledged before it is synced": (SyncedLate, nullcontext),
    "published before it is synced": (Recorder, lambda: mock.patch.object(writer, "TailWriter", PublishesFirst)),
    "not written again in recovery": (Recorder, lambda: mock.patch.object(recovery, "rewrite", lambda *_: None)),
    "bodies are not checked": (Recorder, lambda: mock.patch.object(batch, "check_body", lambda *_: None)),
}


@pytest.mark.reliability
@pytest.mark.parametrize("fault", FAULTS)
def test_engine_sees_the_fault(fault: str) -> None:
    disk, patched = FAULTS[fault]
    with patched(), pytest.raises(Failure) as caught:
        run_workloads(workloads(), disk=disk)
    assert caught.value.kind in ("lost", "phantoms", "refused")
    assert "operations:" in caught.value.__notes__[-1], "a failure says how to repeat it"


def test_failure_is_kept_and_can_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(Failure) as caught:
        run_workloads(short_workloads(1), disk=NeverSynced)
    path = save(caught.value, tmp_path)
    assert path is not None
    with pytest.raises(Failure, match="lost"):
        replay(path)


def test_states_that_once_failed_are_recovered() -> None:
    kept = sorted(REGRESSIONS.glob("*.json"))  # the first of them: a state in which an unchecked body would be read
    assert kept
    for path in kept:
        replay(path)
