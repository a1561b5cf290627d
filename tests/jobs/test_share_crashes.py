"""Shares, when the disk, the process or the user ends a call anywhere: each record is handled, and settled once."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interrupts import Interrupter, every_line
from shared_jobs import die, only, taken, values, with_records

from conftest import Clock, UnsyncedFiles, opened_since
from loglib import LogError, Share, Topic, testing
from loglib.jobs import ack_log
from loglib.jobs.entries import ENTRY_BYTES
from loglib.testing import CrashFS, DyingFiles, FaultyFiles, Killed

Open = Callable[..., Topic]
pytestmark = [
    # An interrupt in a finalizer is printed and forgotten, by the interpreter as well.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning"),
]
COUNT = 6
ALL = {b"%d" % number for number in range(COUNT)}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation ends after a few entries."""
    monkeypatch.setattr(ack_log, "_LOG_BYTES", 6 * ENTRY_BYTES)


def work(share: Share, handled: list[Any]) -> None:
    """Handle some records in each of the ways; what is accepted for sure is in `handled`."""
    loop = share.follow(0.0)
    handled.append(next(loop).value)
    next(loop).release()
    third = next(loop)
    handled.append(third.value)
    third.accept()
    share.flush()
    for job in loop:
        handled.append(job.value)
        if len(handled) > COUNT - 2:
            break


def finish(topic: Topic, handled: list[Any], where: str) -> None:
    """The rest is handled by others; none was settled before it was handled, and none is forgotten."""
    with topic.share("mail") as share:
        handled += values(share)
    info = only(topic)
    assert set(handled) == ALL, where
    assert (info.counts.accepted, info.in_hand, info.free) == (COUNT, (), 0), where


# --- power cuts -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mode", ["strict", "linux"])
def test_i1_power_cut_forgets_nothing_that_was_flushed_and_settles_nothing_unhandled(mode: Any) -> None:
    files = CrashFS()
    files.mkdir("/t")
    promised: list[tuple[int, set[Any]]] = [(0, set())]
    handled: list[Any] = []
    with testing.open_topic("/t/topic", files=files, clock=Clock(), background=False) as topic:
        topic.append_many([b"%d" % number for number in range(COUNT)])
        topic.flush()
        begun = len(files.operations)
        with topic.share("mail", commit=1000) as share:
            for job in share.follow(0.0):
                handled.append(job.value)
                if len(handled) == 3:
                    job.accept()
                    share.flush()
                    promised.append((len(files.operations), set(handled)))
        promised.append((len(files.operations), ALL))
        states = list(files.crash_states(mode=mode, since=begun, random=1))
    assert len(states) > 100
    for state in states:
        with testing.open_topic("/t/topic", files=state.files, clock=Clock(), background=False) as topic:
            with topic.share("mail") as share:
                got = values(share)
            sure = [what for at, what in promised if at <= state.at][-1]
            assert len(got) == len(set(got)) and set(got) >= ALL - set(handled), state
            assert not sure & set(got), f"what was flushed came again: {state}"
            assert only(topic).settled_to == only(topic).next_offset


# --- dying, failing and interrupted calls ------------------------------------------------------------------


@pytest.mark.usefixtures("short")
def test_death_at_any_change_loses_nothing(open_topic: Open, tmp_path: Path) -> None:
    reached = 0
    for at in range(1, 200):
        topic = with_records(open_topic, COUNT, at=tmp_path / f"{at}", files=UnsyncedFiles())
        handled: list[Any] = []
        dying = DyingFiles(at, inner=UnsyncedFiles())
        reading = testing.open_topic(topic.path, mode="r", files=dying, clock=Clock())
        share = None
        try:
            share = reading.share("mail")
            work(share, handled)
            share.close()
            share = None
        except Killed:
            reached = at
        if share is not None:
            die(share)
        del reading
        gc.collect()
        finish(topic, handled, f"change {at}")
        if reached < at:
            break
    assert 30 < reached < 199


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_error_of_any_call_loses_nothing_and_the_member_continues(
    open_topic: Open, tmp_path: Path, error: int
) -> None:
    names = ("append", "create", "pwritev", "datasync", "fsync", "link", "unlink", "pread", "open_write", "fstat")
    reached = 0
    for at in range(1, 300):
        topic = with_records(open_topic, COUNT, at=tmp_path / f"{error}-{at}", files=UnsyncedFiles())
        handled: list[Any] = []
        faulty = FaultyFiles(*names, at=at, error=error, armed=False, inner=UnsyncedFiles())
        reading = testing.open_topic(topic.path, mode="r", files=faulty, clock=Clock())
        share = reading.share("mail")
        faulty.armed = True
        try:
            work(share, handled)
        except (LogError, OSError):
            reached = at
        faulty.armed = False
        gc.collect()
        handled += values(share)
        share.close()
        finish(topic, handled, f"call {at}")
        reading.close()
        if faulty.failed == 0:
            break
    assert 30 < reached < 299


ACTIONS: dict[str, tuple[Callable[[Share], Any], Callable[[Share, Any, list[Any]], object]]] = {
    "taking": (lambda _: None, lambda share, _, kept: kept.append(share.take(0.0))),
    "accepting": (lambda share: taken(share, 2), lambda _, jobs, __: jobs[0].accept()),
    "releasing": (lambda share: taken(share, 2), lambda _, jobs, __: jobs[1].release()),
    "looping": (lambda share: share.follow(0.0), lambda _, loop, kept: kept.extend(loop)),
    "flushing": (lambda share: taken(share, 2), lambda share, _, __: share.flush()),
    "closing": (lambda share: taken(share, 2), lambda share, _, __: share.close()),
}


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("action", ACTIONS)
def test_interrupt_at_any_line_loses_nothing(open_topic: Open, action: str) -> None:
    prepare, call = ACTIONS[action]
    topic = with_records(open_topic, COUNT, files=UnsyncedFiles())
    tried = 0

    def once(interrupter: Interrupter) -> bool:
        nonlocal tried
        tried += 1
        name = f"m{tried}"
        share = topic.share(name)
        prepared, kept = prepare(share), list[Any]()
        was_interrupted = False
        try:
            interrupter.run(partial(call, share, prepared, kept))
        except KeyboardInterrupt:
            was_interrupted = True
        del prepared, kept
        gc.collect()
        if action != "closing":
            values(share)
            assert only(topic, name).in_hand == (), interrupter.where
        share.close()
        assert topic.share_info(name).members == {}, interrupter.where
        with topic.share(name) as again:
            values(again)
        info = only(topic, name)
        assert (info.counts.accepted, info.in_hand, info.free) == (COUNT, (), 0), interrupter.where
        topic.delete_share(name)
        return was_interrupted

    assert len(list(every_line(once))) > 10


@pytest.mark.slow
def test_interrupted_join_leaves_no_member(open_topic: Open) -> None:
    topic = with_records(open_topic, COUNT, files=UnsyncedFiles())
    tried = 0

    def once(interrupter: Interrupter) -> bool:
        nonlocal tried
        tried += 1
        name, shares = f"m{tried}", list[Share]()
        try:
            interrupter.run(lambda: shares.append(topic.share(name)))
        except KeyboardInterrupt:
            pass
        else:
            shares.pop().close()
            return False
        shares.clear()
        gc.collect()
        with topic.share(name) as again:
            assert len(topic.share_info(name).members) == 1, interrupter.where
            assert set(values(again)) == ALL, interrupter.where
        topic.delete_share(name)
        return True

    assert len(list(every_line(once))) > 20


def test_descriptors_are_closed_with_the_share(open_topic: Open) -> None:
    from conftest import settled_files

    topic = with_records(open_topic, COUNT)
    with topic.share("mail") as share:
        values(share)
    before = settled_files()
    for _ in range(3):
        with topic.share("mail") as share:
            topic.share_info("mail")
            topic.alter_share("mail", window=100)
            values(share)
    assert not opened_since(before)


