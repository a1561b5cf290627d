"""G6: every call to the system fails once, in every way, and does no harm.

The reference work is done again and again, and each time one call goes wrong: an error, a short count, or an error
although the call was done. Only documented errors may be raised, and no file may stay open. The writer works again or
says that it has failed. All acknowledged records are there.

This is confirmed without the seam: `strace` makes system calls of a child process fail, and kills or interrupts it.
"""

import ctypes
import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from counts import count, need, part, scale
from disks import memory
from processes import fork, shared, wait
from reference import POLICIES, STEPS, Kept, Reference, accounts_of

from conftest import open_files, opened_since
from loglib import LogError, WriterFailedError
from loglib.system.files import REAL
from loglib.testing import Call, RecordingFiles, WatchedFiles

pytestmark = pytest.mark.reliability

ERRORS = ("EIO", "ENOSPC", "EMFILE", "EROFS", "EACCES", "EINTR")
SHARDS = 4


class OneFault(WatchedFiles):
    """Call number `at`, from 1, goes wrong: with an error; "late", with EIO after the call was done; or "short"."""

    def __init__(self, at: int, fault: str) -> None:
        super().__init__()
        self.at = at
        self.fault = fault
        self.seen = 0
        self.hit: Call | None = None

    def before(self, call: Call) -> None:
        self.seen += 1
        if self.seen == self.at:
            self.hit = call
            if self.fault in ERRORS:
                self.fail(getattr(errno, self.fault))

    def after(self, call: Call, result: Any) -> Any:
        if self.hit is call:
            if self.fault == "late":
                if call.name in ("create", "open_read", "open_write", "open_directory"):
                    self.inner.close(result)  # the caller never gets this descriptor, so it could not close it
                self.fail(errno.EIO)
            if call.name in ("pread", "read"):
                return result[: len(result) // 2]
        return result

    def fail(self, number: int) -> None:
        assert self.hit is not None
        raise OSError(number, os.strerror(number), self.hit.path)

    def next_is_short(self) -> bool:
        return self.fault == "short" and self.seen + 1 == self.at

    def close(self, fd: int) -> None:
        try:
            self.before(Call("close", self._paths.get(fd, "")))
        finally:
            self.inner.close(fd)  # as in the kernel: the file is closed, whatever the call returns

    def pwritev(self, fd: int, parts: Any, position: int, flags: int = 0) -> int:
        if self.next_is_short():
            whole = b"".join(parts)
            parts = [whole[: len(whole) // 2]]
        return super().pwritev(fd, parts, position)

    def sendfile(self, to: int, source: int, start: int, size_bytes: int) -> int:
        return super().sendfile(to, source, start, size_bytes // 2 if self.next_is_short() else size_bytes)

    def write(self, fd: int, data: Any) -> int:
        return super().write(fd, data[: len(data) // 2] if self.next_is_short() else data)


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where a sync takes no time."""
    with memory(tmp_path / "memory", "size=256m") as point:
        yield point


def faults_of(call: Call) -> list[str]:
    short = ["short"] if call.name in ("pread", "pwritev", "read", "write", "sendfile") else []
    return [*ERRORS, "late", *short]


def calls_of_the_work(root: Path) -> list[Call]:
    files = RecordingFiles()
    work = Reference(root, files)
    root.mkdir()
    work.run()
    work.judge()
    assert not work.errors
    return files.calls


def work_with(root: Path, at: int, fault: str) -> Reference:
    root.mkdir()
    files = OneFault(at, fault)
    work = Reference(root, files)
    try:
        work.run()
        work.judge()
    except (AssertionError, LogError, OSError) as error:
        raise AssertionError(f"call {at} went wrong ({fault}): {files.hit}; errors {work.errors}") from error
    assert files.hit is not None, f"there is no call {at}"
    failed = any(isinstance(error, WriterFailedError) for _, error in work.errors)
    if files.hit.name == "pwritev" and files.hit.file.endswith(".log") and fault == "ENOSPC":
        assert not failed, f"a full disk ended the writer: call {at}, {files.hit}"
    if files.hit.name == "datasync" and files.hit.file.endswith(".log") and fault in ERRORS and work.errors:
        assert failed or work.errors[0][0] in ("recover", "go_on_where_it_crashed"), f"call {at}, {files.hit}"
    return work


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_call_that_fails_does_harm(fast: Path, shard: int) -> None:
    points = accounted = named = 0
    calls = calls_of_the_work(fast / "unharmed")
    chosen = range(1 + shard, len(calls) + 1, SHARDS * part())
    for at in chosen:
        for fault in faults_of(calls[at - 1]):
            work = work_with(fast / "work", at, fault)
            points += 1
            accounted += sum(account.accounted for account in work.accounts)
            named += sum(account.named for account in work.accounts)
            shutil.rmtree(fast / "work")
    assert accounted, "no record was looked for"
    count("G6", calls=len(chosen), points=points, lost=0, phantoms=0)
    count("G14", accounted_records=accounted, named_by_an_error=named, untold=0)


# --- the same without the seam -----------------------------------------------------------------------

POINTS = 100  # in each of the three tests

# After EINTR the interpreter repeats the call (PEP 475), so no caller notices. `close` is not here: strace answers
# instead of the kernel, which would have closed the file. os.pwritev calls `pwritev2`.
AGAIN = ("openat", "pread64", "pwritev2", "fdatasync", "fsync", "ftruncate", "flock", "sendfile")
SYSTEM_CALLS = (*AGAIN, "newfstatat", "statx", "rename", "unlink", "mkdir", "getdents64", "statfs", "fchmod", "chmod")


class Progress(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("ready", "traced", "steps", "done"))


class Strace:
    """The reference work in a traced child: `strace` makes one of its system calls go wrong."""

    def __init__(self, root: Path) -> None:
        need(shutil.which("strace"), "strace (Debian's strace)")
        self.root = root
        self.unharmed = Reference(self.made("unharmed"), REAL)
        self.acknowledged = [[0, 0]]  # after each step, in the main topic
        for step in STEPS:
            step(self.unharmed)
            self.acknowledged.append([account.promised() for account in self.unharmed.main.accounts])
        self.steps = 0  # which the last child has done
        self.calls = self.count_calls()

    def made(self, name: str) -> Path:
        directory = self.root / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        return directory

    def count_calls(self) -> dict[str, int]:
        """How many system calls of each kind the work makes."""
        status, report = self.trace("--summary-only", "--summary-columns=calls,name", judging=False)
        assert status == 0, "the child's error is above"
        rows = [line.split() for line in report.splitlines()]
        return {row[1]: int(row[0]) for row in rows if len(row) == 2 and row[1] in SYSTEM_CALLS}

    def inject(self, call: str, at: int, what: str) -> int | None:
        """Inject this fault into that call. Returns how the child ended; None if it made fewer calls this time."""
        status, report = self.trace(f"--trace={call}", f"--inject={call}:{what}:when={at}")
        return status if "INJECTED" in report or "SIG" in report else None

    def trace(self, *options: str, judging: bool = True) -> tuple[int, str]:
        """Returns how the child ended, and what strace wrote."""
        work, progress = Reference(self.made("traced"), REAL, leave_torn_copy_elsewhere), shared(Progress)
        child = fork(lambda: work_when_traced(work, progress, judging=judging))
        report = self.root / "report"
        while not progress.ready and os.path.exists(f"/proc/{child}/fd"):  # a call before that is not the work's
            time.sleep(0.001)
        with subprocess.Popen(["strace", "-qq", "-o", report, "-p", str(child), *options]) as tracer:
            while "TracerPid:\t0\n" in Path(f"/proc/{child}/status").read_text() and tracer.poll() is None:
                time.sleep(0.001)
            progress.traced = 1
            while not progress.done and tracer.poll() is None:
                time.sleep(0.001)
            tracer.send_signal(signal.SIGINT)  # it lets the child go: what judges makes the same system calls
            assert tracer.wait() in (0, -signal.SIGINT), "strace failed; its error is above"
        progress.traced = 0
        status = wait(child)
        self.steps = progress.steps
        return status, report.read_text()

    def judge_the_dead(self) -> None:
        """Check the main topic of a child that did not reach its end, by the steps that the child had done."""
        main = Kept(self.root / "traced" / "topic", REAL, accounts_of(2), POLICIES)
        for account, whole, least in zip(
            main.accounts, self.unharmed.main.accounts, self.acknowledged[self.steps], strict=True
        ):
            account.begin(whole.contents)
            account.promise(least)
            account.drop(whole.may_begin, done=False)
        main.judge()


def work_when_traced(work: Reference, progress: Progress, *, judging: bool) -> None:
    before = open_files()
    progress.ready = 1
    while not progress.traced:  # this wait makes no system call that is counted
        time.sleep(0.001)
    try:
        for step in STEPS:
            work.take(step)
            progress.steps += 1
    except KeyboardInterrupt:
        for kept in (work.main, work.receiver, work.crashed):
            with suppress(LogError, OSError):
                kept.close()
        return  # the descriptor of a file that was being opened may be lost
    progress.done = 1
    while progress.traced:
        time.sleep(0.001)
    if judging:
        assert not opened_since(before), "files were left open"
        work.judge()


def leave_torn_copy_elsewhere(source: Path, target: Path) -> None:
    """The same in a process that is not traced."""
    script = 'cp -r "$0" "$1" && last=$(ls "$1"/0001/*.log | tail -n 1) && head -c 1200 /dev/zero >>"$last"'
    assert os.spawnvp(os.P_WAIT, "sh", ["sh", "-c", script, str(source), str(target)]) == 0


@pytest.fixture
def strace(fast: Path) -> Strace:
    return Strace(fast)


def inject_everywhere(strace: Strace, whats: dict[str, tuple[str, ...]], seed: str) -> Iterator[tuple[str, int]]:
    """Faults in system calls, drawn evenly over all calls. Gives where each one was, and how the child ended."""
    chance = random.Random(seed)
    calls = [(call, at) for call, number in strace.calls.items() for at in range(1, number + 1)]
    made = missed = 0
    while made < scale(POINTS):
        call, at = chance.choice(calls)
        what = chance.choice([what for what, names in whats.items() if call in names])
        status = strace.inject(call, at, what)
        if status is None:  # the number of calls depends on the time that the steps take, a little
            missed += 1
            assert missed <= max(10, scale(POINTS) // 10), f"{call} number {at} was never made"
        else:
            made += 1
            yield f"{call} number {at}, {what}", status


def test_no_system_call_that_fails_does_harm(strace: Strace) -> None:
    errors = {f"error={error}": SYSTEM_CALLS for error in ("EIO", "ENOSPC", "EMFILE", "EROFS", "EACCES")}
    for where, status in inject_everywhere(strace, errors | {"error=EINTR": AGAIN}, seed="errors"):
        assert status == 0, f"{where}: the child's error is above"
    count("G6", points_by_strace=scale(POINTS), lost=0, phantoms=0)


@pytest.mark.parametrize(("name", "end"), [("KILL", -signal.SIGKILL), ("INT", 0)])
def test_no_system_call_that_a_signal_ends_does_harm(strace: Strace, name: str, end: int) -> None:
    for where, status in inject_everywhere(strace, {f"signal={name}": SYSTEM_CALLS}, seed=name):
        assert status == end, f"{where}: the child's error is above"
        try:
            strace.judge_the_dead()
        except (AssertionError, LogError) as error:
            raise AssertionError(f"{where}, after {strace.steps} steps") from error
    count("G6", points_by_strace=scale(POINTS), lost=0, phantoms=0)
