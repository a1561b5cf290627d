"""G13: consumer groups of real processes, which join, leave, are killed and stopped at random moments.

These must hold, whatever happens: a partition never has two owners at once; every record is handled at least once;
records of a partition are in order while one member owns it; only records that were not committed are repeated.
chaos.py looks for violations. It can be trusted because it finds the mutants at the end of this file.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from chaos import Chaos, Evidence, faults, keep, takeovers_ms
from counts import FILE, count, scale
from processes import fork, together, wait

from loglib import Topic
from loglib.groups import offsets
from loglib.groups.commit_log import Entry
from loglib.groups.group import Group
from loglib.groups.membership import Membership
from loglib.groups.offsets import Offsets
from loglib.groups.owners import Ownership
from loglib.groups.start_position import StartPosition
from loglib.system.files import Files

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(max(300, scale(300)))]

SECONDS = 17.0

SHAPES = {
    "range, after": {"partitions": 16, "members": 16, "strategy": "range", "commit": "after"},
    "sticky, after": {"partitions": 16, "members": 8, "strategy": "sticky", "commit": "after"},
    "range, manual": {"partitions": 5, "members": 4, "strategy": "range", "commit": "manual"},
    "sticky, manual": {"partitions": 64, "members": 6, "strategy": "sticky", "commit": "manual"},
    "range, 20 ms": {"partitions": 64, "members": 12, "strategy": "range", "commit": 0.02},
    "sticky, 300 ms": {"partitions": 7, "members": 5, "strategy": "sticky", "commit": 0.3},
    "one partition": {"partitions": 1, "members": 3, "strategy": "range", "commit": "after"},
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On the disk of the checkout: a commit takes time there, so that other members act during it."""
    FILE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FILE.parent) as directory:
        yield Path(directory)


@contextmanager
def chaos(directory: Path, seed: int, **shape: Any) -> Iterator[Chaos]:
    """A group in chaos, removed at the end. All its commits are kept until then, because they judge it."""
    with ExitStack() as patched:  # also in the members, which are forked
        patched.enter_context(mock.patch.object(offsets, "_COMPACT_BYTES", 1 << 40))
        patched.enter_context(mock.patch.object(Offsets, "_remove", keep))
        found = Chaos(directory, seed, **shape)
        try:
            yield found
        finally:
            found.clean_up()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_group_in_chaos_never_has_two_owners_and_loses_nothing(shape: dict[str, Any], tmp_path: Path) -> None:
    seed = list(SHAPES.values()).index(shape)
    with chaos(tmp_path, seed, **shape) as group:
        group.run(SECONDS * scale(100) / 100)
        assert faults(group) == [], f"seed {seed}"
    handled = [line for line in group.evidence.lines() if line.kind == "handled"]
    count(
        "G13", **group.done, records=len({line[3:6:2] for line in handled}), handled=len(handled),
        rebalances=sum(line.kind == "assigned" for line in group.evidence.lines()), wrong=0, lost=0,
    )  # fmt: skip


def test_killed_members_partitions_are_taken_over_and_the_time_is_counted(tmp_path: Path) -> None:
    """How long a killed member's partitions are without an owner: reported, not a condition."""
    seed = 25
    with chaos(tmp_path, seed, partitions=8, members=4) as group:
        for _ in range(4):
            group.join()
        group.settle()
        for _ in range(scale(25)):
            group.kill()
            group.settle()
            group.join()
            group.settle()
        group.finish()
        assert faults(group) == [], f"seed {seed}"
    times = sorted(takeovers_ms(group))
    p50, p99 = (round(times[int(len(times) * part)]) for part in (0.5, 0.99))
    print(f"{len(times)} takeovers: p50 {p50} ms, p99 {p99} ms")
    count("G13", kills=group.done["kills"], takeovers=len(times), takeover_p50_ms=p50, takeover_p99_ms=p99)


def test_stopped_member_keeps_its_partitions_until_it_is_evicted(tmp_path: Path) -> None:
    with chaos(tmp_path, 1, partitions=4, members=2) as group:
        group.join()
        group.join()
        group.share()
        group.settle()
        victim, other = group.members
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.5)
        assert all(pid in (victim, other) for pid in group.owners().values())
        assert victim in group.owners().values()
        group.evict(victim)
        group.members.remove(victim)
        group.settle()  # the other member has taken over, while the victim is still stopped
        assert set(group.owners().values()) == {other}
        os.kill(victim, signal.SIGCONT)
        assert wait(victim) == 0
        group.finish()
        assert faults(group) == []
        assert [line.pid for line in group.evidence.lines() if line.kind == "stale"] == [victim]
        with Topic.open(group.path, mode="r") as topic:
            last = [each for each in group.commits(topic) if each.pid == victim]
        assert all(each.time_ns < group.evicted[victim] for each in last)
    count("G13", evictions=1, wrong=0)


# --- every kind of worker --------------------------------------------------------------------------------------------


RECORDS = 4000


def consume(path: Path, evidence_path: Path) -> None:
    """Be a member until there are no more records."""
    evidence = Evidence(evidence_path)
    with Topic.open(path, mode="r") as topic, topic.group("kinds") as group:
        for record in group.follow(timeout=1.5):
            evidence.add("handled", record.partition, 0, record.offset)
            time.sleep(0.0005)


def in_threads(path: Path, evidence_path: Path) -> None:
    threads = [threading.Thread(target=consume, args=(path, evidence_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_forked_processes(path: Path, evidence_path: Path) -> None:
    together([partial(consume, path, evidence_path)] * 4)


def in_spawned_processes(path: Path, evidence_path: Path) -> None:
    processes = [get_context("spawn").Process(target=consume, args=(path, evidence_path)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4


def under_a_parent_that_is_a_member_too(path: Path, evidence_path: Path) -> None:
    evidence = Evidence(evidence_path)
    with Topic.open(path, create=True) as topic, topic.group("kinds") as group:
        children: list[Any] = []
        for record in group.follow(timeout=1.5):
            evidence.add("handled", record.partition, 0, record.offset)
            if len(children) < 3:
                children.append(fork(partial(consume, path, evidence_path)))
        assert [wait(each) for each in children] == [0] * 3


KINDS = [in_threads, in_forked_processes, in_spawned_processes, under_a_parent_that_is_a_member_too]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_members_share_the_work_and_handle_each_record_once(kind: Callable[[Path, Path], None], tmp_path: Path) -> None:
    path = tmp_path / "topic"
    with Topic.open(path, create=True, partitions=8) as topic:
        topic.append_many([b"%d" % number for number in range(RECORDS)], keys=[b"%d" % n for n in range(RECORDS)])
    kind(path, tmp_path / "evidence")
    with Topic.open(path, mode="r") as topic:
        expected = sorted((record.partition, record.offset) for record in topic.read())
    lines = Evidence(tmp_path / "evidence").lines()
    assert sorted((line.partition, line.offset) for line in lines) == expected
    count("G13", handled=len(lines), records=len(expected), wrong=0)


# --- that it would be found out ------------------------------------------------------------------------------------


def commit_before_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Group._next

    def early(self: Group, *asked: Any) -> Any:
        run = original(self, *asked)
        with self._use():
            if run is not None and not self.closed:
                self._membership.commit({run.partition: run.batch.next_offset})
        return run

    monkeypatch.setattr(Group, "_next", early)


def take_no_owner_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLocks(Files):
        def try_lock(self, fd: int, path: str = "", *, shared: bool = False) -> bool:
            return True

    original = Ownership.__init__

    def unlocked(self: Ownership, files: Files, *others: Any) -> None:
        original(self, NoLocks(), *others)

    monkeypatch.setattr(Ownership, "__init__", unlocked)


def release_before_committing(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Ownership.release

    def revoke(self: Any, partitions: list[Any]) -> None:
        if partitions:
            held = {each: self.ownership.generation(each) or 0 for each in partitions}
            self._call(self._on_revoke, partitions)
            original(self.ownership, partitions)
            time.sleep(0.02)  # a disk that is busy
            handled, now = self._delivery.handled, self._directory.clock()
            late = {
                each: Entry(
                    handled[each], held[each], self._directory.log_id, self._delivery.history(each, handled[each]), "",
                    self.file.name, now,
                )
                for each in partitions if each in handled
            }  # fmt: skip
            if late:
                self.offsets.commit(late, fence=lambda: None)
            self._delivery.drop(partitions)

    monkeypatch.setattr(Membership, "_revoke", revoke)


def start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartPosition, "_offset", lambda self, entry, partition: 0)


def skip_what_was_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StartPosition, "_offset", lambda self, entry, partition: self._directory.logs[partition].mark().flushed_end
    )


MUTANTS = [
    commit_before_the_body, take_no_owner_lock, release_before_committing, start_anew, skip_what_was_not_committed,
]  # fmt: skip


@pytest.mark.slow  # it finds the mistake by chance
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_found_out(
    mutant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)  # the members are forked, and so have it too
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        with chaos(directory, attempt, partitions=8, members=4, stops=False) as group:
            group.run(3.0, drain=False)
            found = faults(group)
        if found:
            print(found[0])
            count("G13", mutants_found=1, undetected=0)
            return
    pytest.fail(f"{mutant.__name__} was not found out")
