"""Large topics: 10,000 segments in one partition, and 1,000 partitions. What a page asks for comes in parts.

The time in which they open is a benchmark, which `python tests/ui/test_ui_large.py` prints: a busy machine is no
failure.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import QUIET
from loglib import testing
from loglib.system.files import REAL
from loglib.testing import UnsyncedFiles
from loglib.ui import samples
from loglib.ui.app import Answers, Asked, _plain
from loglib.ui.topics import Topics

SEGMENTS, PARTITIONS = 10_000, 1_000
MOST_BYTES = 64 << 10  # of one answer
# The requests of the views, in the order in which a page makes them.
VIEWS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "list": (("row", {}),),
    "overview": (("row", {}), ("topic", {}), ("samples", {}), ("partitions", {"count": 100})),
    "segments": (("topic", {}), ("segments", {"partition": 0, "count": 100})),
    "records": (("topic", {}), ("records", {"partition": 0, "way": "back", "limit": 50})),
    "groups": (("groups", {}), ("topic", {}), ("shares", {}), ("share", {"share": "mail"})),
    "tail": (("topic", {}), ("tail", {"partition": 0})),
}  # fmt: skip


def many_segments(path: Path, count: int) -> None:
    with testing.open_topic(path, files=UnsyncedFiles(), segment_bytes=4096, **QUIET) as topic:
        for _ in range(count - 1):
            topic.append(b"x" * 200, partition=0)
            topic.flush()
            topic.partition(0).roll()
        topic.share("mail").close()


def many_partitions(path: Path, count: int) -> None:
    with testing.open_topic(path, files=UnsyncedFiles(), partitions=count, **QUIET) as topic:
        for number in range(count):
            topic.append_many([b"hello"] * 5, partition=number)
        topic.flush()
        topic.reset_group("etl", "begin")
        topic.share("mail").close()


@contextmanager
def asking(place: Path) -> Iterator[Callable[..., Any]]:
    answers = Answers(Topics(place))

    def ask(name: str, **arguments: Any) -> Any:
        text = json.dumps(_plain(answers.by_name[name](Asked({key: str(each) for key, each in arguments.items()}))))
        assert len(text) <= MOST_BYTES or name in ("groups", "tail"), f"{name}: {len(text)} bytes"
        return json.loads(text)

    try:
        yield ask
    finally:
        answers.close()


class _Counting:
    """Counts the files that are opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened = 0
        opens = type(REAL).open_read

        def open_read(files: Any, *arguments: Any, **keywords: Any) -> int:
            self.opened += 1
            return opens(files, *arguments, **keywords)

        patch.setattr(type(REAL), "open_read", open_read)


def test_list_and_records_of_a_topic_open_few_of_its_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "EVERY_S", 1e9)  # the second sample counts the records, in every segment
    monkeypatch.setattr(samples, "_FRESH_S", 1e9)
    many_segments(tmp_path / "t", 600)
    counting = _Counting(monkeypatch)
    with asking(tmp_path) as ask:
        row = ask("row", topic="t")
        assert (row["partitions"], row["troubles"]) == (1, []) and counting.opened < 60
        part = ask("partitions", topic="t")
        assert part["partitions"][0]["segments"] == 600 and counting.opened < 100
        before = counting.opened
        assert len(ask("records", topic="t", partition=0, limit=20)["records"]) == 20
        assert counting.opened - before < 200


def test_long_lists_come_in_parts(tmp_path: Path) -> None:
    many_partitions(tmp_path / "p", 260)
    with asking(tmp_path) as ask:
        parts = [ask("partitions", topic="p", **{"from": start, "count": 100}) for start in (0, 100, 200)]
        assert [len(each["partitions"]) for each in parts] == [100, 100, 60] and parts[0]["total"] == 260
        assert [each["partition"] for part in parts for each in part["partitions"]] == list(range(260))
        assert len(ask("segments", topic="p", partition=259)["segments"]) == 1
        worked = [ask("share", topic="p", share="mail", **{"from": start}) for start in (0, 100, 200)]
        assert [len(each["partitions"]) for each in worked] == [100, 100, 60] and worked[0]["all_partitions"] == 260


@pytest.mark.slow
def test_each_view_of_the_largest_topics_opens(tmp_path: Path) -> None:
    many_segments(tmp_path / "segments", SEGMENTS)
    many_partitions(tmp_path / "partitions", PARTITIONS)
    for topic in ("segments", "partitions"):
        for name, requests in VIEWS.items():
            with asking(tmp_path) as ask:
                for request, arguments in requests:
                    assert ask(request, topic=topic, **arguments) is not None, name


def measure() -> None:
    """Print how long each view of the largest topics takes to open, in a server that has not seen them."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        many_segments(place / "segments", SEGMENTS)
        many_partitions(place / "partitions", PARTITIONS)
        for topic in ("segments", "partitions"):
            for name, requests in VIEWS.items():
                with asking(place) as ask:
                    began, busy = time.perf_counter(), time.process_time()
                    for request, arguments in requests:
                        ask(request, topic=topic, **arguments)
                    took, busy = time.perf_counter() - began, time.process_time() - busy
                    print(f"{topic:10} {name:8} {took:.2f} s, of the processor {busy:.2f} s")


if __name__ == "__main__":
    measure()
    sys.exit(0)
