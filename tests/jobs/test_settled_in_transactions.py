"""Dead letters and accepts in transactions, when a process dies, stops or fails anywhere: all of it, or nothing, once.

A member accepts a record together with its result, and rejects one that then has a dead letter. Wherever this ends,
others finish it: each record has one result and is accepted, or has one dead letter and is rejected.
"""

from __future__ import annotations

import errno
import gc
import shutil
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from dead_letters import StoppingFiles, died, forget_stores
from interrupts import Interrupter
from shared_jobs import die, only, taken

from conftest import QUIET, Clock, UnsyncedFiles
from loglib import CommitPendingError, LogError, Share, Topic, testing, transaction
from loglib.system.files import Files
from loglib.testing import CrashFS, DyingFiles, FaultyFiles, Killed

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning"),
]
ALL = {b"0", b"1"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for the lock of one that is stopped, and each has its own store, as another process has."""
    forget_stores(monkeypatch)


class World:
    """A topic with two records, a topic for results, and one for dead letters."""

    def __init__(self, files: Files, root: str, **options: Any) -> None:
        self.files, self.root, self.options = files, root, options
        self.clock = Clock()

    def open(self, name: str, files: Files | None = None, **arguments: Any) -> Topic:
        return testing.open_topic(
            f"{self.root}/{name}", files=files or self.files, clock=self.clock, background=False, **arguments
        )

    def make(self) -> None:
        with self.open("mail", **QUIET) as mail, self.open("results", **QUIET):
            mail.append_many(sorted(ALL))
            mail.flush()
            with mail.share("mail", dead_letter=f"{self.root}/dead", max_attempts=100, **self.options):
                pass

    def work(self, files: Files, *, app: str, shares: list[Share] | None = None, **options: Any) -> None:
        """Accept one record with its result, and reject the other one."""
        with self.open("mail", files, mode="r") as mail, self.open("results", files, mode="r") as results:
            share = mail.share("mail", **options)
            if shares is not None:
                shares.append(share)
            for job in share.follow(0.0):
                if job.value == b"1":
                    job.reject("bad")
                    continue
                with transaction(app, timeout=0.01) as tx:
                    tx.append(results, job.value)
                    tx.accept(job)
            share.close()

    def finish(self) -> None:
        for _ in range(100):
            with suppress(CommitPendingError):
                self.work(self.files, app="other")
                if self.info().counts[:2] == (1, 1):
                    return

    def info(self) -> Any:
        with self.open("mail", mode="r") as mail:
            return only(mail)

    def check(self, where: object) -> None:
        """I1 and I8: each record is settled once, with its result or its dead letter, and these are visible."""
        info = self.info()
        assert (info.counts, info.in_hand, info.free, info.dead_letters_due) == ((1, 1, 0, 0), (), 0, 0), where
        with self.open("results", mode="r") as results:
            assert sorted(record.value or b"" for record in results.read()) == [b"0"], where
        assert died(f"{self.root}/dead", files=self.files) == [b"1"], where

    def check_together(self, where: object) -> None:
        """What a look sees meanwhile: no record is settled without the records of its transaction."""
        before = self.info().counts
        with self.open("results", mode="r") as results:
            assert before.accepted <= len(list(results.read())) <= 1, where
        assert before.rejected <= len(died(f"{self.root}/dead", files=self.files)) <= 1, where


def in_directory(tmp_path: Path, name: object, **options: Any) -> World:
    root = tmp_path / str(name)
    root.mkdir()
    world = World(UnsyncedFiles(), str(root), **options)
    world.make()
    return world


def copied(world: World) -> World:
    """What the world leaves behind if its process ends now: a copy, whose locks nobody holds."""
    left = World(UnsyncedFiles(), f"{world.root}-left")
    shutil.copytree(world.root, left.root)
    return left


@pytest.mark.slow
def test_i8_death_at_any_change_leaves_all_or_nothing_to_the_others(tmp_path: Path) -> None:
    reached = 0
    for at in range(1, 400):
        world = in_directory(tmp_path, at)
        shares: list[Share] = []
        try:
            world.work(DyingFiles(at, inner=UnsyncedFiles()), app="one", shares=shares)
        except Killed:
            reached = at
        left = copied(world)
        for share in shares:
            die(share)
        shares.clear()
        gc.collect()
        left.finish()
        left.check(f"change {at}")
        if reached < at:
            break
    assert 60 < reached < 399


@pytest.mark.slow
@pytest.mark.parametrize("how", ["evicted", "lease"])
def test_i8_member_that_is_stopped_at_any_change_and_continues_later_changes_nothing(tmp_path: Path, how: str) -> None:
    """Others have taken its records back meanwhile, or finished what it had committed."""
    reached, refused = 0, 0
    options: dict[str, Any] = {"lease": 10} if how == "lease" else {}
    for at in range(1, 400):
        world = in_directory(tmp_path, at)
        shares: list[Share] = []

        def meanwhile(world: World = world, shares: list[Share] = shares) -> None:
            if how == "lease":
                world.clock.now += 11_000_000
            elif shares:
                with world.open("mail", mode="r") as mail, suppress(LogError):
                    mail.evict_share_member("mail", shares[0].member)
            with suppress(LogError):
                world.work(world.files, app="other", **options)

        files = StoppingFiles(at, meanwhile, UnsyncedFiles())
        files.armed = True
        try:
            world.work(files, app="one", shares=shares, **options)
        except (LogError, OSError):
            refused += 1
        files.armed = False
        for share in shares:
            with suppress(LogError, OSError):
                share.close()
        shares.clear()
        world.finish()
        world.check(f"change {at}")
        if files.changes < at:
            break
        reached = at
    assert 60 < reached < 399 and refused > 10


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_i8_error_of_any_call_leaves_all_or_nothing_and_the_member_continues(tmp_path: Path, error: int) -> None:
    names = ("append", "create", "pwritev", "datasync", "fsync", "link", "unlink", "pread", "open_write", "rename")
    reached = 0
    for at in range(1, 600):
        world = in_directory(tmp_path, at)
        faulty = FaultyFiles(*names, at=at, error=error, inner=UnsyncedFiles())
        with suppress(LogError, OSError):
            world.work(faulty, app="one")
        if not faulty.failed:
            break
        reached = at
        faulty.armed = False
        gc.collect()
        with suppress(CommitPendingError):
            world.work(faulty, app="one")
        world.finish()
        world.check(f"call {at}")
    assert 60 < reached < 599


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "linux"])
def test_i8_power_cut_leaves_all_or_nothing(mode: Any) -> None:
    files = CrashFS()
    files.mkdir("/t")
    files.sync_directory("/")
    world = World(files, "/t")
    world.make()
    begun = len(files.operations)
    world.work(files, app="one")
    world.check("before")
    states = list(files.crash_states(mode=mode, since=begun, random=1))
    assert len(states) > 300
    for state in states[:: len(states) // 300]:
        left = state.files
        left._drawn = 1000  # after the cut, other random names are drawn
        after = World(left, "/t")
        after.finish()
        after.check(state)


@pytest.mark.slow
def test_i8_interrupt_at_many_points_leaves_all_or_nothing(tmp_path: Path) -> None:
    def once(at: int, interrupter: Interrupter) -> bool:
        world = in_directory(tmp_path, at)
        with world.open("mail", mode="r") as mail, world.open("results", mode="r") as results:
            share = mail.share("mail")
            jobs = taken(share, 1)

            def accept() -> None:
                with transaction("one", timeout=0.01) as tx:
                    tx.append(results, b"0")
                    tx.accept(jobs[0])

            was_interrupted = False
            try:
                interrupter.run(accept)
            except KeyboardInterrupt:
                was_interrupted = True
            jobs.clear()
            gc.collect()
            with suppress(LogError):
                share.take(0.0)
            share.close()
        left = copied(world)  # an interrupt may leave a lock to its process, which ends now
        left.finish()
        left.check(interrupter.where)
        shutil.rmtree(left.root)
        return was_interrupted

    reached = list(takewhile(lambda at: once(at, Interrupter(at, lines_only=True)), range(1, 100_000, 37)))
    assert len(reached) > 5
