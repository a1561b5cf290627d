"""Each view of `loglib ui` in a real Chromium, of a topic that lives and has faults.

It has a million records, damage, a declared gap, a writer, a group with a member and a share with a member.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from browsers import chromium, tab_of
from builders import spoil
from served_page import Page, serving

import loglib
from conftest import QUIET
from loglib import Topic, testing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unmeasured")]

RECORDS = 1_000_000
PART = 10_000  # records appended together


def million(path: Path) -> None:
    """Records 0 to 999,999 in turns of a part over two partitions: damage in one, a declared gap in the other."""
    with testing.open_topic(path, partitions=2, segment_bytes="2MiB", **QUIET) as topic:
        for first in range(0, RECORDS, PART):
            values = [b'{"n": %d}' % number for number in range(first, first + PART)]
            topic.append_many(values, partition=first // PART % 2)
        topic.flush()
        topic.reset_group("slow", "begin")
    spoil(path / "0001" / f"{0:020}.log", 4096 + 2000)
    loglib.repair(path)
    spoil(path / "0000" / f"{0:020}.log", 4096 + 2000)


@pytest.fixture
def living(tmp_path: Path) -> Iterator[tuple[Path, Topic]]:
    """The topic while a thread appends to it, and members of a group and of a share have something in hand."""
    path, stop = tmp_path / "topics" / "big", threading.Event()
    million(path)
    with ExitStack() as at_end:
        topic = at_end.enter_context(Topic.open(path))
        group = at_end.enter_context(topic.group("fast", member="alice", start="end"))
        group.poll()
        share = at_end.enter_context(topic.share("mail", member="bob", start="end"))

        def write() -> None:
            number = 0
            while not stop.wait(0.02):
                topic.append(b"living %d" % number, partition=number % 2)
                topic.flush()
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        at_end.callback(writer.join)
        at_end.callback(stop.set)
        jobs = [share.take(30.0) for _ in range(4)]
        assert None not in jobs
        yield path, topic
        for job in filter(None, jobs):
            job.release()


@pytest.fixture
def view(living: tuple[Path, Topic]) -> Iterator[tuple[Any, Page, Path]]:
    path, _ = living
    with chromium() as browser, serving(path.parent) as served, tab_of(browser, served) as tab:
        yield tab, served, path


def figure(view: Any, name: str) -> str:
    """A figure of the topic's page."""
    found: str = view.locator(f".figures div:has(dt:text-is('{name}')) dd").inner_text()
    return found


def number(text: str) -> int:
    return int("".join(filter(str.isdigit, text)))


def test_each_view_shows_a_living_topic_with_damage_a_gap_and_a_million_records(
    view: tuple[Any, Page, Path]
) -> None:  # fmt: skip
    tab, served, path = view
    tab.goto(served.address)
    tab.wait_for_selector("text=partition 1 has lost")
    row = tab.locator("tr[data-row='big']")
    row.locator("text=mail 4 in hand").wait_for()
    row.locator("text=slow").wait_for()

    tab.goto(served.address + "#/t/big/records?partition=0&from=begin&way=on")
    tab.wait_for_selector("section.records [role=alert]:has-text('⚠ damage')")
    assert tab.locator(".rows li").count() == 50
    tab.goto(served.address + "#/t/big/records?partition=1&from=begin&way=on")
    tab.wait_for_selector("section.records [role=alert]:has-text('declared')")
    tab.goto(served.address + "#/t/big/records?path=.n%20%3D%3D%20995000")
    tab.wait_for_selector(".rows .value bdi:text-is('{\"n\": 995000}')")

    tab.goto(served.address + "#/t/big")
    tab.wait_for_selector("ul.troubles li:has-text('⚠ damage')")
    tab.wait_for_selector("ul.troubles li:has-text('⚠ gap')")
    commands = tab.locator("ul.troubles code").all_inner_texts()
    assert commands == [f"loglib verify {path}", f"loglib repair {path} --accept --dry-run"]
    tab.wait_for_function(f"least => Number({DIGITS}) > least", arg=RECORDS * 9 // 10)
    ends = tab.locator("tr[data-row='p0'] td:nth-child(3)")
    before = ends.inner_text()
    tab.wait_for_function(
        "end => document.querySelector(\"tr[data-row='p0'] td:nth-child(3)\").innerText !== end", arg=before
    )
    assert int(ends.inner_text()) > int(before) and number(figure(tab, "Partitions")) == 2

    tab.goto(served.address + "#/t/big/segments/0")
    tab.wait_for_selector("td:text-is('open')")
    assert tab.locator("tbody tr").count() >= 3
    tab.goto(served.address + "#/t/big/groups")
    tab.wait_for_selector("tr:has-text('alice') td:text-is('0 to 1')")
    tab.wait_for_selector("text=No member is there: nobody reads for this group now.")
    tab.wait_for_selector("article.share tr:has-text('bob')")
    assert tab.locator("[aria-label='Records in hand, the longest first'] tbody tr").count() == 4
    tab.goto(served.address + "#/t/big/records?live=1")
    newest = tab.locator(".rows .value bdi:has-text('living')").last
    newest.wait_for()
    seen = newest.inner_text()
    tab.wait_for_function(
        "seen => [...document.querySelectorAll('.rows .value bdi')].at(-1).innerText !== seen", arg=seen
    )


DIGITS = "document.querySelector('.figures dd').innerText.replace(/\\D/g, '')"
