"""Topics with replicas: directories that fail in an opening are left out, and what was promised stays promised."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import replicas_written
from replicas_written import FIRST, dying, restored, saved
from replicated import Devices, all_have_all, assert_same, open_all, until

from conftest import values_of
from loglib import testing
from loglib.copies import assemble
from loglib.copies.election import LogClaim, claim_of
from loglib.copies.follower_log import FollowerLog
from loglib.copies.replica import Replica
from loglib.errors import LockedError, TooFewCopiesError
from loglib.log.recovery import read_mark
from loglib.segment import Identity
from loglib.system.directory import Directory
from loglib.system.files import REAL

places = replicas_written.places
written = replicas_written.written
devices = replicas_written.devices


def test_directory_that_fails_while_it_is_opened_is_left_out(written: list[Path], devices: Devices) -> None:
    with devices.failing(written[2]), open_all(written, files=devices) as topic:
        assert "the device fails" in str(topic.replicas()[2].error)
        topic.append(b"four", sync=True)
    with devices.failing(written[0]), pytest.raises(OSError, match="the device fails"):
        open_all(written, files=devices)
    with devices.gone(written[1]), open_all(written, files=devices) as topic:
        assert "the device is gone" in str(topic.replicas()[2].error)
    with open_all(written, files=devices) as topic:
        assert len(values_of(topic)) == 4
    assert len(assert_same(written)) == 4


@pytest.mark.parametrize("file", ["watermark", FIRST])
def test_directory_that_fails_later_in_the_opening_is_left_out(
    written: list[Path], devices: Devices, file: str
) -> None:
    saved(written[2])
    with open_all(written, files=devices) as topic:
        topic.append(b"four", sync=True)
        until(partial(all_have_all, topic), "all have it")
    restored(written[2])

    def refuse(call: testing.Call) -> None:
        if call.path == f"{written[2]}/0000/{file}" and call.name == "pwritev":
            raise OSError(errno.EIO, "refused", call.path)

    devices.meanwhile = refuse
    with open_all(written, files=devices) as topic:
        assert "refused" in str(topic.replicas()[2].error)
        topic.append(b"five", sync=True)
    devices.meanwhile = lambda _: None
    with open_all(written, files=devices) as topic:
        assert len(values_of(topic)) == 5
    assert_same(written)


def test_new_directory_that_fails_late_makes_no_replicated_topic(places: list[Path], devices: Devices) -> None:
    def refuse(call: testing.Call) -> None:
        if call.path.startswith(f"{places[1]}/0000") and call.name == "datasync":
            raise OSError(errno.EIO, "refused", call.path)

    devices.meanwhile = refuse
    with pytest.raises(OSError, match="refused"):
        open_all(places, files=devices)
    testing.open_topic(places[0]).close()


def test_failure_before_the_writers_are_made_releases_all(written: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(OSError, match="it dies here"):
        patched.setattr("loglib.append.access.Access", dying)
        open_all(written)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="it dies here"):
        patched.setattr("loglib.append.access.SectionWriter", dying)
        open_all(written)
    open_all(written).close()


def test_new_directory_that_fails_makes_no_replicated_topic(places: list[Path], devices: Devices) -> None:
    with devices.failing(places[1]), pytest.raises(OSError, match="the device fails"):
        open_all(places, files=devices)
    with testing.open_topic(places[0]) as topic:
        topic.append(b"one", sync=True)
    with open_all(places, files=devices) as topic:
        assert values_of(topic) == [b"one"]
    assert_same(places)


def test_promise_is_durable_in_all_before_anything_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made, places = testing.MemoryFiles(), [f"/{device}/topic" for device in "abc"]
    with open_all(places, files=made, acks="quorum") as topic:
        identity = Identity.of(topic.log_id, 0)
    fs = testing.CrashFS(testing.Image.of(made.tree()))

    def promised(files: Any) -> list[int]:
        marks = []
        for place in places:
            with Directory.open(files, f"{place}/0000") as directory:
                marks.append(read_mark(directory, identity))
        return [mark.promised_epoch for mark in marks if mark is not None]

    before, seen = promised(fs), []

    def look(*arguments: Any) -> LogClaim:
        _, nothing_pending, *_ = fs.crash_states(since=len(fs.operations))
        seen.append(promised(nothing_pending.files))
        return claim_of(*arguments)

    monkeypatch.setattr(assemble, "claim_of", look)
    open_all(places, files=fs).close()
    assert seen[0] == [before[0] + 1] * 3


def test_directory_that_comes_back_has_accepted_the_writer_for_good() -> None:
    made, places = testing.MemoryFiles(), [f"/{device}/topic" for device in "abc"]
    open_all(places, files=made, acks="quorum").close()
    fs = testing.CrashFS(testing.Image.of(made.tree()))
    devices = Devices(fs)
    with devices.gone("/c"):
        topic = open_all(places, files=devices)
    with topic:
        until(lambda: topic.replicas()[2].state == "in step", "it comes back")
        _, nothing_pending, *_ = fs.crash_states(since=len(fs.operations))
        epochs = []
        for place in places:
            with Directory.open(nothing_pending.files, f"{place}/0000") as directory:
                mark = read_mark(directory, Identity.of(topic.log_id, 0))
                epochs.append(None if mark is None else mark.writer_epoch)
    assert epochs[0] and epochs == [epochs[0]] * 3


def test_opening_that_too_few_accept_shows_nothing_new(
    places: list[Path], devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_all(places[:2], files=devices)
    topic.append(b"one", sync=True)
    with devices.failing(places[1]), pytest.raises(TooFewCopiesError):
        topic.append(b"two")
        topic.close()
    with monkeypatch.context() as patched, pytest.raises(TooFewCopiesError, match="the disk is full"):
        patched.setattr(Replica, "set_epoch", lambda _: (_ for _ in ()).throw(OSError("the disk is full")))
        open_all(places[:2], files=devices)
    for place in places[:2]:
        with testing.open_topic(place, files=devices, mode="r") as reader:
            assert values_of(reader) == [b"one"]
    with open_all(places[:2], files=devices) as topic:
        assert values_of(topic) == [b"one", b"two"]


def test_number_that_was_promised_to_a_later_opening_keeps_a_directory_out(written: list[Path]) -> None:
    away = written[1].with_name("away")
    os.rename(written[1], away)
    with open_all(written) as topic:
        copied = FollowerLog(REAL, str(away / "0000"), Identity.of(topic.log_id, 0), 0o600, shows=False)
        copied.set_epoch_floor(99)
        copied.close()
        os.rename(away, written[1])
        until(lambda: "a later opening" in str(topic.replicas()[2].error), "it is refused")
    with pytest.raises(LockedError), open_all(written), open_all(written):
        pass
