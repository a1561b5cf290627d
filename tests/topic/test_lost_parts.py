"""Each file and each directory of a topic, of its copy and of its store is lost once: all that follows has words."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import loglib
from conftest import QUIET
from loglib import LogError, Topic, testing
from loglib.copies import mirror, snapshot


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic with a group, a share, a transaction and sealed segments; its store, its dead letters and a mirror."""
    base = tmp_path_factory.mktemp("whole")
    with testing.open_topic(base / "t", partitions=2, **QUIET) as topic:
        with loglib.transaction("app", version=0) as changes:
            changes.append(topic, b"in a transaction", key=b"a")
        for part in topic.partitions:
            part.append_many([b"a", b"b"])
            part.roll()
            part.append_many([b"c", b"d"])
        topic.flush()
        with topic.group("g", start="begin") as group:
            group.poll()
            group.commit()
        with topic.share("s", dead_letter=base / "dead") as share:
            for settle in "accept", "reject":
                job = share.take(timeout=0)
                assert job is not None
                getattr(job, settle)()
    mirror(base / "t", base / "copy")
    return base


def uses(base: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What one does with them; the last ones mend, and then remove."""

    def opened(use: Callable[[Topic], Any], mode: Any = "r") -> Callable[[], Any]:
        def call() -> None:
            with testing.open_topic(base / "t", mode=mode) as topic:
                use(topic)

        return call

    def take(topic: Topic) -> None:
        with topic.share("s") as share:
            share.take(timeout=0)

    def poll(topic: Topic) -> None:
        with topic.group("g") as group:
            group.poll()

    def change(topic: Topic) -> None:
        with loglib.transaction("app", version=9) as changes:
            changes.append(topic, b"one more")

    yield "list", lambda: loglib.topics(base)
    yield "read", opened(lambda topic: list(topic.read("begin", on_damage="skip")))
    yield "verify", opened(Topic.verify)
    yield "look", opened(lambda topic: [topic.group_info(each) for each in topic.groups()])
    yield "look at shares", opened(lambda topic: [topic.share_info(each) for each in topic.shares()])
    yield "figures", opened(Topic.stats)
    yield "poll", opened(poll)
    yield "take", opened(take)
    yield "append", opened(lambda topic: topic.append(b"x", sync=True), "a")
    yield "change", opened(change, "a")
    yield "mirror", lambda: mirror(base / "t", base / "copy")
    yield "snapshot", lambda: snapshot(base / "t", base / "snapshot")
    yield "repair", lambda: loglib.repair(base / "t")
    yield "repair the store", lambda: loglib.repair(base / ".transactions")
    yield "read again", opened(lambda topic: list(topic.read("begin", on_damage="skip")))
    yield "append again", opened(lambda topic: topic.append(b"x", sync=True), "a")
    yield "delete the share", opened(lambda topic: topic.delete_share("s"))
    yield "delete the group", opened(lambda topic: topic.delete_group("g"))
    yield "grow", lambda: Topic.add_partitions(base / "t", 3)
    yield "delete", lambda: Topic.delete(base / "t")


@pytest.mark.parametrize("part", ["t", "copy", ".transactions"])
def test_whatever_is_lost_is_told_by_an_error_of_loglib(
    whole: Path, tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    caplog.set_level(logging.CRITICAL)
    lost = sorted(each.relative_to(whole) for each in (whole / part).rglob("*"))
    assert len(lost) > 3
    for each in lost:
        base = tmp_path / "base"
        shutil.copytree(whole, base)
        path = base / each
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        is_described = each != Path("t", "topic.json")
        for name, use in uses(base):
            if part == "copy" and name not in ("list", "mirror"):
                continue
            try:
                use()
            except LogError:
                pass
            except FileNotFoundError:
                assert not is_described, (each, name)  # there is no topic
        shutil.rmtree(base)


def test_file_in_place_of_the_groups_or_shares_hides_no_topic(whole: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(whole, base)
    for name in "groups", "shares":
        shutil.rmtree(base / "t" / name)
        (base / "t" / name).write_bytes(b"")
    assert [each.name for each in loglib.topics(base)] == ["copy", "dead", "t"]
    with Topic.open(base / "t", mode="r") as topic:
        assert (topic.groups(), topic.shares(), topic.stats().damaged) == ([], [], ())
