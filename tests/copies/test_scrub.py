"""A scrub reads all of a topic at a limited rate, reports damage, and heals it where it has donors."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from builders import spoil

from conftest import QUIET
from loglib import CorruptLogError, LogClosedError, LogError, Topic, repair, testing
from loglib.copies import Scrub, ScrubReport, snapshot
from loglib.copies.rate_limit import RateLimit
from loglib.segment import HEADER_BYTES


@pytest.fixture
def copy(tmp_path: Path, path: Path) -> Path:
    """A snapshot of the topic at `path`, which has two partitions of some segments."""
    copy = tmp_path / "copy" / path.name
    files = testing.UnsyncedFiles()
    with testing.open_topic(path, files=files, partitions=2, segment_bytes=4096, batch_bytes=512, **QUIET) as topic:
        for number in range(120):
            topic.append(b"%03d" % number + b"." * 100, partition=number % 2)
    snapshot(path, copy, links=False)
    return copy


def damaged(path: Path) -> Path:
    """A segment of the second partition, after damage to its first batch."""
    segment = min((path / "0001").glob("*.log"))
    spoil(segment, HEADER_BYTES + 140)
    return segment


def test_a_scrub_without_donors_reports_and_changes_nothing(
    path: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reports: list[ScrubReport] = []
    with Scrub(path, on_report=reports.append) as scrub:
        assert scrub.run().is_whole and "no damage" in caplog.text and str(path) in repr(scrub)
        before = damaged(path).read_bytes()
        report = scrub.run()
    assert not report.is_whole and report.healing is None and len(report.found.damage) == 1
    assert reports[1] == report and str(report.found.damage[0]) in caplog.text
    assert damaged(path).read_bytes() != before  # the damage is undone: nothing else had changed it


def test_a_scrub_with_donors_heals_only_where_it_has_found_damage(
    path: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = damaged(copy).read_bytes()
    segment = damaged(path)
    shutil.rmtree(copy)
    with Topic.open(path, mode="r") as topic:
        assert topic.verify().damage
    spoil(segment, HEADER_BYTES + 140)
    snapshot(path, copy, links=False)
    spoil(segment, HEADER_BYTES + 140)
    assert segment.read_bytes() == whole
    with Scrub(path, donors=[copy]) as scrub:
        report = scrub.run()
    assert report.healing is not None and report.is_whole and report.healing.verified.records == 60
    assert "1 batch from" in caplog.text
    with Topic.open(path, mode="r") as topic:
        assert not topic.verify().damage


def test_declared_gaps_are_healed_by_a_scrub(path: Path, copy: Path) -> None:
    damaged(path)
    repair(path)
    with Scrub(path) as scrub:
        assert not scrub.run().is_whole
    with Scrub(path, donors=[copy]) as scrub:
        assert scrub.run().is_whole


def test_a_lost_description_and_a_lost_partition_are_met(path: Path, copy: Path, tmp_path: Path) -> None:
    (path / "topic.json").unlink()
    with Scrub(path) as scrub, pytest.raises(CorruptLogError, match=r"topic\.json"):
        scrub.run()
    with Scrub(path, donors=[copy]) as scrub:
        assert scrub.run().is_whole
    shutil.rmtree(path / "0001")
    with Scrub(path, donors=[copy]) as scrub:
        report = scrub.run()
    assert not report.is_whole and report.healing is not None and report.healing.unhealed
    with Scrub(tmp_path / "nothing") as scrub, pytest.raises(FileNotFoundError):
        scrub.run()


def test_progress_of_a_scrub_that_misses_a_partition_ends_with_the_bytes_of_the_others(path: Path, copy: Path) -> None:
    shutil.rmtree(path / "0001")
    reports: list[tuple[int, int]] = []
    with Scrub(path) as scrub:
        report = scrub.run(progress=lambda done, total: reports.append((done, total)))
    assert not report.is_whole and [each.path for each in report.found.damage] == [str(path / "0001")]
    assert reports[-1] == (report.found.bytes, report.found.bytes) and report.found.bytes > 0


def test_the_rate_is_kept_and_a_pass_can_be_ended(
    path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    with Scrub(path, bytes_per_second=1e9) as scrub:
        monkeypatch.setattr(RateLimit, "wait", lambda _, size: waits.append(size))
        found = scrub.run().found
        assert sum(waits) == found.bytes > 0

        def close(_: Any, size: int) -> None:
            scrub.close()

        monkeypatch.setattr(RateLimit, "wait", close)
        with pytest.raises(LogClosedError):
            scrub.run()
        with pytest.raises(LogClosedError):
            scrub.run()
    with pytest.raises(ValueError, match="above 0"):
        Scrub(path, bytes_per_second=0)


def test_a_limit_waits_as_long_as_the_bytes_need_and_gives_a_sign_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, signs = [100.0], [0.0], [0.0]
    monkeypatch.setattr("loglib.copies.rate_limit.monotonic", lambda: now[0])

    class Passing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            now[0] += timeout or 0
            return False

    RateLimit(1000, Passing()).wait(12_000, lambda: signs.append(now[0]))
    RateLimit(None, Passing()).wait(500)
    assert waits[1:] == [5, 5, 2] and signs[1:] == [105, 110, 112]


def test_a_limit_ends_where_a_program_freezes_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    RateLimit(1000, threading.Event()).wait(10)


def test_a_thread_makes_passes_until_it_is_closed(
    path: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    passes = threading.Semaphore(0)
    seen: list[ScrubReport] = []

    def note(report: ScrubReport) -> None:
        seen.append(report)
        passes.release()
        if len(seen) == 2:
            raise RuntimeError("of the callback")

    with Scrub(path, on_report=note) as scrub:
        scrub.start(every=timedelta(microseconds=1))
        for _ in range(3):
            assert passes.acquire(timeout=30)
        with pytest.raises(LogError, match="already"):
            scrub.start()
        [thread] = [each for each in threading.enumerate() if each.name == "loglib-scrub"]
    assert not thread.is_alive() and "a pass of the scrub has failed" in caplog.text
    with pytest.raises(LogClosedError):
        scrub.start()


def test_closing_ends_a_pass_that_waits_for_its_rate(path: Path, copy: Path) -> None:
    with Scrub(path, bytes_per_second=1) as scrub:  # it would take hours
        scrub.start()
        scrub.close()
    assert not [each for each in threading.enumerate() if each.name == "loglib-scrub"]


def test_a_callback_may_close_the_scrub(path: Path, copy: Path) -> None:
    closed = threading.Event()

    def close(_: ScrubReport) -> None:
        scrub.close()
        closed.set()

    scrub = Scrub(path, on_report=close)
    scrub.start()
    assert closed.wait(30)
    scrub.close()
