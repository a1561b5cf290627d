"""Time limits end where a program's tests freeze the time, as freezegun does: it replaces `time.monotonic`, too."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from conftest import values_of
from loglib import Retention, Topic, transaction
from loglib.logging import LogHandler


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_ns = time.time_ns()
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 0.0)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 0)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns)
    monkeypatch.setattr(time, "time", lambda: wall_ns / 1e9)


@pytest.mark.parametrize("mode", ["a", "r"])
def test_time_limits_of_readers_and_members_end_under_a_frozen_clock(path: Path, mode: str) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        topic.append(b"x", key=b"k", sync=True)
        with Topic.open(path, mode="r") if mode == "r" else topic as reading:
            assert [each.value for each in reading.follow("begin", timeout=0.02)] == [b"x"]
            assert reading.follow("end").poll(timeout=0.02) == []
            assert list(reading.follow("end", timeout=0.02).batches()) == []
            with reading.group("g") as group:
                assert [each.value for each in group.follow(timeout=0.02)] == [b"x"]
                assert group.poll(timeout=0.02) == []


def test_records_become_visible_by_the_interval_under_a_frozen_clock(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append(b"x")
        assert next(iter(topic.follow("begin", timeout=30.0))).value == b"x"


def test_transactions_and_retention_end_under_a_frozen_clock(path: Path) -> None:
    with Topic.open(path, create=True, partitions=2, retention=Retention(age=None)) as topic:
        with transaction("app") as tx:
            tx.append(topic, b"x", partition=0)
            tx.append(topic, b"y", partition=1)
        assert sorted(values_of(topic)) == [b"x", b"y"]
        assert topic.retain() is not None


def test_lines_of_a_logger_are_written_under_a_frozen_clock(path: Path) -> None:
    handler = LogHandler(path, partitions=1)
    try:
        Topic.open(path, create=True, partitions=1).close()
        handler.handle(logging.makeLogRecord({"msg": "a line", "levelno": logging.INFO}))
        with Topic.open(path, mode="r") as topic:
            assert b"a line" in (next(iter(topic.follow("begin", timeout=10.0))).value or b"")
    finally:
        handler.close()
