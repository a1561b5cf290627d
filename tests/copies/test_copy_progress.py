"""Mirrors and scrubs report how far they are: numbers that rise to the whole."""

from pathlib import Path

import pytest
from builders import spoil

from conftest import QUIET, last_segment
from loglib import Topic
from loglib.copies import Mirror, Scrub, snapshot

Reports = list[tuple[int, int]]


@pytest.fixture
def clicks(path: Path) -> Path:
    """Two partitions with some segments each."""
    with Topic.create(path, partitions=2, **QUIET) as topic:
        for number in range(6):
            topic.append_many([b"%d" % number * 1000] * 300, partition=number % 2)
            topic.partition(number % 2).roll()
    return path


def check_rises_to(reports: Reports, total: int) -> None:
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert all(0 < done <= whole for done, whole in reports)
    assert reports[-1] == (total, total)


def size_of(path: Path) -> int:
    with Topic.open(path, mode="r") as topic:
        return topic.stats().size_bytes


def test_mirror_reports_what_this_call_copies(clicks: Path, to: Path) -> None:
    first: Reports = []
    second: Reports = []
    with Mirror(clicks, to) as mirror:
        size = mirror.copy(progress=lambda done, total: first.append((done, total)))
        assert size == size_of(clicks)
        check_rises_to(first, size)
        with Topic.open(clicks) as topic:
            topic.append(b"x" * 5000, partition=1, sync=True)
        more = mirror.copy(progress=lambda done, total: second.append((done, total)))
        check_rises_to(second, more)
        before = list(second)
        mirror.copy()
        assert second == before, "a call reports to its own function only"


def test_scrub_reports_what_it_has_checked_and_healed(clicks: Path, to: Path) -> None:
    snapshot(clicks, to, links=False)
    reports: Reports = []
    with Scrub(clicks, donors=[to]) as scrub:
        assert scrub.run(progress=lambda done, total: reports.append((done, total))).is_whole
        check_rises_to(reports, size_of(clicks))
        spoil(min((clicks / "0000").glob("*.log")), 5000)
        healing: Reports = []
        report = scrub.run(progress=lambda done, total: healing.append((done, total)))
    assert report.healing is not None and report.is_whole and len(healing) > len(reports)
    assert last_segment(clicks).exists() and all(done <= total for done, total in healing)
