"""A wrong clock does not mislead the passes of retention, and the file of the clock is only a help."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import aged
import pytest
from aged import dropped
from builders import calm
from clock_worlds import DAY, HOUR, Machine, live
from hypothesis import given
from hypothesis import strategies as st

from conftest import MANUAL, SECOND, values_of
from loglib import Retention, Topic, UnsupportedFormatError, testing
from loglib.format.header import crc32c
from loglib.log.ages import decode
from loglib.segment import Identity
from loglib.testing import FaultyFiles, RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]

machine = aged.machine
WEEK = Retention(age=timedelta(days=7))
MINUTE = 60 * SECOND


def days(topic: Topic, machine: Machine, count: int) -> None:
    """A segment each day, and a pass each half day."""
    for number in range(count):
        topic.append(b"day %d" % number, sync=True)
        topic.partition(0).roll()
        for _ in range(2):
            topic.retain()
            machine.true_us += DAY // 2


# --- a clock that lies ---------------------------------------------------------------------------------------


def test_clock_thirty_days_ahead_drops_nothing_in_any_pass(open_topic: Open, machine: Machine) -> None:
    topic = open_topic(retention=WEEK, files=UnsyncedFiles(), clock=machine)
    days(topic, machine, 6)
    machine.error_us = 30 * DAY
    for _ in range(60):
        assert not dropped(topic)
        machine.true_us += MINUTE
    machine.error_us = 0
    assert not dropped(topic)
    assert len(values_of(topic)) == 6


def test_first_pass_of_a_fresh_process_with_a_wrong_clock_drops_nothing(open_topic: Open, machine: Machine) -> None:
    with open_topic(retention=WEEK, files=UnsyncedFiles(), clock=machine) as topic:
        days(topic, machine, 6)
    machine.error_us = 30 * DAY
    for _ in range(3):
        with open_topic(clock=machine) as topic:
            assert not dropped(topic) and not dropped(topic)
        machine.true_us += 20 * MINUTE


def test_wrong_clock_after_a_restart_drops_nothing_and_the_right_one_does(open_topic: Open, machine: Machine) -> None:
    with open_topic(retention=WEEK, files=UnsyncedFiles(), clock=machine) as topic:
        days(topic, machine, 6)
    machine.restart()
    machine.error_us = 30 * DAY
    with open_topic(clock=machine) as topic:
        for _ in range(60):
            assert not dropped(topic)
            machine.true_us += MINUTE
        machine.error_us = 0
        machine.true_us += 4 * DAY
        assert not dropped(topic), "a clock that has just jumped is not believed"
        (first, *_) = topic.retain(dry_run=True)
        assert first.reason == (
            "at least 4.0 days old; the clock has run for 0.0 seconds without a jump, and is believed after 60 minutes"
        )
        machine.true_us += 12 * MINUTE
        (first, *_) = topic.retain(dry_run=True)
        assert "the clock has run for 12.0 minutes without a jump" in first.reason
        machine.true_us += 49 * MINUTE
        assert dropped(topic) == 4, "sealed at days 0 to 3; now is day 10 and two hours"


def test_limits_of_bytes_hold_while_the_clock_is_not_believed(open_topic: Open, machine: Machine) -> None:
    with open_topic(retention=Retention(age=timedelta(days=7), bytes=0), clock=machine) as topic:
        topic.append(b"x", sync=True)
        topic.partition(0).roll()
    machine.restart()
    machine.error_us = -30 * DAY
    with open_topic(clock=machine) as topic:
        assert dropped(topic) == 1


def test_age_of_seconds_works_at_once(open_topic: Open, machine: Machine) -> None:
    topic = open_topic(retention=Retention(age=timedelta(seconds=10)), clock=machine)
    topic.append(b"x", sync=True)
    topic.partition(0).roll()
    machine.true_us += 10 * SECOND
    assert not dropped(topic)
    machine.true_us += 1
    assert dropped(topic) == 1


@calm
@given(st.randoms(use_true_random=False), st.booleans())
def test_lying_clock_makes_retention_wait_and_never_drop_early(chance: random.Random, lies: bool) -> None:
    """Retention drops nothing that the right clock would keep, and with a right clock all that is due."""
    live(chance, steps=40, lies=lies)


def test_clock_that_is_ahead_at_a_roll_forgets_no_producer(open_topic: Open, machine: Machine) -> None:
    """Or else the retry of a call would be appended a second time."""
    topic = open_topic(retention=WEEK, producer_expiry=timedelta(days=2), files=UnsyncedFiles(), clock=machine)
    partition = topic.partition(0)

    def roll() -> None:
        topic.retain()
        topic.append(b"x", sync=True)
        partition.roll()

    partition.append_many([b"a"], producer=("p", 1))
    machine.true_us += 2 * HOUR
    for error in (30 * DAY, 0, 30 * DAY, 0):
        machine.error_us = error
        machine.true_us += 10 * MINUTE
        roll()
    assert partition.last_sequence("p") == 1
    machine.true_us += 3 * DAY
    roll()
    roll()
    assert partition.last_sequence("p") is None, "a clock that has run for an hour without a jump is believed"


def test_system_clock_is_used_and_believed_by_the_time_since_boot(path: Path) -> None:
    policy = Retention(age=timedelta(milliseconds=1))
    with Topic.open(path, create=True, retention=policy, flush=MANUAL) as topic:
        topic.append(b"x", sync=True)
        topic.partition(0).roll()
        while not dropped(topic):
            threading.Event().wait(0.001)
        assert values_of(topic) == []


# --- the file `clock` ----------------------------------------------------------------------------------------


def clock_file(path: Path) -> Path:
    return path / "0000" / "clock"


def test_file_is_written_twice_a_boot_and_says_what_was_seen(open_topic: Open, path: Path, machine: Machine) -> None:
    files = RecordingFiles(UnsyncedFiles())
    topic = open_topic(retention=WEEK, files=files, clock=machine)
    assert not clock_file(path).exists()
    for _ in range(200):
        topic.retain()
        machine.true_us += MINUTE
    writes = [call for call in files.calls if call.name == "rename" and call.file == "clock.tmp"]
    assert len(writes) == 2, "the first look, and the one that proves an hour without a jump"
    stamps = decode(clock_file(path).read_bytes(), Identity.of(topic.log_id, 0).salt)
    assert [each.boottime_us // MINUTE for each in stamps] == [0, 61]
    assert not (path / "0000" / "clock.tmp").exists()


@pytest.mark.parametrize("policy", [Retention(age=None), Retention(age=None, bytes=100)], ids=["none", "bytes"])
def test_no_file_is_written_where_age_is_no_limit(
    policy: Retention, open_topic: Open, path: Path, machine: Machine
) -> None:
    topic = open_topic(retention=policy, clock=machine)
    topic.retain()
    assert not clock_file(path).exists()


def test_dry_run_and_reader_write_nothing(open_topic: Open, path: Path, machine: Machine) -> None:
    topic = open_topic(retention=WEEK, clock=machine)
    topic.append(b"x", sync=True)
    topic.partition(0).roll()
    with testing.open_topic(path, mode="r", clock=machine) as reading:
        for each in (topic, reading, topic.partition(0), reading.partition(0)):
            assert [decision.drop for decision in each.retain(dry_run=True)] == [False, False]
    assert not clock_file(path).exists()


def without(content: bytes) -> None:
    return None


def damaged(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("spoil", [without, damaged, lambda content: b""], ids=["lost", "damaged", "empty"])
def test_file_that_is_lost_costs_a_wait_and_no_data(
    spoil: Callable[[bytes], bytes | None], open_topic: Open, path: Path, machine: Machine,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with open_topic(retention=WEEK, files=UnsyncedFiles(), clock=machine) as topic:
        topic.append(b"x", sync=True)
        topic.partition(0).roll()
        topic.retain()
        machine.true_us += DAY
        topic.retain()
    machine.true_us += 20 * DAY
    machine.restart()
    spoilt = spoil(clock_file(path).read_bytes())
    clock_file(path).unlink()
    if spoilt is not None:
        clock_file(path).write_bytes(spoilt)
    with open_topic(clock=machine) as topic, caplog.at_level(logging.WARNING, "loglib"):
        assert not dropped(topic)
        assert ("retention by age starts to observe the clock again" in caplog.text) == (spoilt is not None)
        machine.true_us += HOUR + SECOND
        assert not dropped(topic)
        assert "sealed while the clock could not be believed; at least 1.0 hours ago" in topic.retain()[0].reason
        machine.true_us += 7 * DAY
        assert dropped(topic) == 1


def test_file_of_a_newer_version_is_refused(open_topic: Open, path: Path, machine: Machine) -> None:
    with open_topic(retention=WEEK, clock=machine) as topic:
        topic.retain()
        salt = Identity.of(topic.log_id, 0).salt
    content = bytearray(clock_file(path).read_bytes())
    content[8] = 9
    content[12:16] = crc32c(content[16:], crc32c(content[:12], salt)).to_bytes(4, "little")
    clock_file(path).write_bytes(content)
    topic = open_topic(clock=machine)
    with pytest.raises(UnsupportedFormatError, match="clock version"):
        topic.retain()


@pytest.mark.parametrize("name", ["create", "pwritev", "datasync", "rename"])
def test_clock_file_that_cannot_be_written_does_not_stop_retention(
    name: str, open_topic: Open, path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(FaultyFiles):
        def before(self, call: Any) -> None:
            if call.file in ("clock", "clock.tmp"):
                super().before(call)

    files = Full(name, every=True, armed=False)
    topic = open_topic(retention=Retention(age=timedelta(days=7), bytes=0), files=files, clock=machine)
    topic.append(b"x", sync=True)
    topic.partition(0).roll()
    files.armed = True
    with caplog.at_level(logging.WARNING, "loglib"):
        assert dropped(topic) == 1
    assert "retention by age may wait longer after a restart" in caplog.text and files.failed == 1
    files.armed = False
    machine.true_us += 2 * HOUR
    topic.retain()
    assert clock_file(path).exists(), "the next news is written all the same"
    assert not (path / "0000" / "clock.tmp").exists()
