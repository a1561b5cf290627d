"""Crash engine: runs workloads on a `CrashFS`, cuts the power at every instant, and judges the result of recovery.

A workload is a list of calls, named in `CALLS`. While it runs, an `Account` of each partition notes which records were
appended, and which were promised after how many file operations. A call that returns promises records, and so does a
published watermark, because readers see them. The real `Writer` recovers each state. The result must not be:

    lost        fewer records than were promised at the instant of the cut
    phantoms    records that were never appended there, that replace others, or that were dropped before
    refused     an error although nothing but a crash has happened

Then the state is recovered a second time, which must change nothing. It is appended to, and read. Before the first
recovery a reader reads the state; it must see the beginning of what is there afterwards. The files of a partition
determine the outcome, so equal files are recovered once for all instants at which they occur.

A failure says how to repeat it, and `save` keeps the state for ever: tests/reliability/regressions/.

    run_workloads(workloads())                      all workloads, up to the first failure
    run_workloads(workloads(), disk=NeverSynced)    the same over a faulty `CrashFS`: the engine must see the fault

crash_worlds.py has the disk and the accounts, crash_workloads.py the calls and the workloads, crash_judge.py the judge.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from account import Account
from crash_judge import Judge, judge_making
from crash_workloads import CALLS, LONGEST_SHORT, MAKING
from crash_worlds import LEFT_OUT, LOG_ID, Failure, Recorder, Workload, World, account_with, fresh_images, judged

from loglib import LogError, segment
from loglib.segment import Identity
from loglib.testing import CrashFS, Image

REGRESSIONS = Path(__file__).parent / "regressions"


# --- what was appended, and what was promised ---------------------------------------------------------


def known_of(account: Account, instant: int, *, power: bool) -> dict[str, Any]:
    """What is true at the instant, in terms of JSON."""
    rows = [(offset, *(None if each is None else _pack(each) for each in two)) for offset, *two in account.contents]
    return {
        "rows": rows,
        "promised": account.promised(instant, power=power),
        "starts": [start for since, start in account.log_starts if since <= instant],
        "dropped": [start for since, start in account.drops if since <= instant],
    }


def account_of(known: dict[str, Any]) -> Account:
    """An account of what is true, in which all instants are one."""
    account = account_with((offset, _unpack(value), _unpack(key)) for offset, value, key in known["rows"])
    account.log_starts = [(0, start) for start in known["starts"]]
    account.drops = [(0, start) for start in known["dropped"]]
    account.promise(known["promised"])
    return account


# --- all of it -----------------------------------------------------------------------------------------------


def run_workload(workload: Workload, judge: Judge) -> None:
    """Run one workload. Judge the states that cuts during its last call may leave; if it is long, during any call."""
    if workload.calls == MAKING:
        judge_making(judge, workload)
        return
    world = World(workload, disk=judge.disk)
    try:
        begun = 0
        for number, name in enumerate(workload.calls, 1):
            before, now = world.fs, world.now
            if name == "crash":  # the earlier states are on another disk
                judge.judge(world.states(since=begun), world.config, world.identities, world.accounts)
            CALLS[name](world)
            if world.fs is not before:
                begun = 0
            elif number == len(workload.calls) <= LONGEST_SHORT:  # the workloads without this call have judged the rest
                begun = now + 1
        judge.judge(world.states(since=begun), world.config, world.identities, world.accounts)
    finally:
        with suppress(LogError, OSError):
            world.close()
        judge.accounted += world.appended
        judge.named += world.named


@contextmanager
def _unlogged() -> Iterator[None]:
    """Switch logging off: each recovery logs a line, and there are a million of them."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@_unlogged()
def run_workloads(
    workloads: Iterable[Workload], *, judge: Judge | None = None, disk: Callable[[Image], CrashFS] = Recorder
) -> Judge:
    """Run the workloads up to the first `Failure`, which says how to repeat it. Returns the counts."""
    judge = judge or Judge(disk=disk)
    fresh_images.clear()  # images made by earlier code; the code may be patched now
    for workload in workloads:
        try:
            with mock.patch.object(segment, "MAX_PRODUCERS", 1):  # so that two producers are too many
                run_workload(workload, judge)
        except Failure as failure:
            failure.workload = workload
            failure.add_note(f"in {workload}")
            if failure.state is not None:
                listed = [f"{at:4} {operation}" for at, operation in enumerate(failure.state.operations, 1)]
                failure.add_note("\n".join([f"{failure.state!r}", "operations:", *listed]))
            raise
    return judge


# --- states that have once failed ------------------------------------------------------------------------------


def save(failure: Failure, directory: Path = REGRESSIONS) -> Path | None:
    """Keep the state and what is true of it, as a file that `replay` reads."""
    state, workload = failure.state, failure.workload
    if state is None or workload is None or not failure.accounts:
        return None
    facts = {
        "why": str(failure),
        "workload": workload._asdict(),
        "first_partition": failure.first_partition,
        "histories": [known_of(account, state.at, power=not state.whole) for account in failure.accounts],
        "files": {path: _pack(content) for path, content in state.image.tree().items()},
    }
    directory.mkdir(exist_ok=True)
    path = directory / f"{state.image.digest(leaving_out=LEFT_OUT):016x}.json"
    path.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    return path


def replay(path: Path) -> None:
    """Judge a state that has been kept."""
    facts = json.loads(path.read_text("utf-8"))
    workload = Workload(**facts["workload"])
    image = Image.of({name: zlib.decompress(base64.b64decode(content)) for name, content in facts["files"].items()})
    for number, known in enumerate(facts["histories"], facts["first_partition"]):
        identity = Identity.of(LOG_ID.bytes, number)
        outcome, _ = Judge()._outcome(image, 0, workload.config(), identity)
        judged(account_of(known), 0, power=True, log_start=outcome.log_start, rows=outcome.rows)


def _pack(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def _unpack(content: str | None) -> bytes | None:
    return None if content is None else zlib.decompress(base64.b64decode(content))
