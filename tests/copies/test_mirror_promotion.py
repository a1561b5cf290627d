"""Mirrors that take the place of their source."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import spoil
from mirrored import assert_same

import loglib
from conftest import QUIET, fill, in_parts, last_segment, values_of
from loglib import LockedError, LogError, LogMovedError, NotLeaderError, OffsetOutOfRangeError, Topic, testing
from loglib.copies import Mirror, local_source, mirror, promote
from loglib.copies.promotion import promote_on
from loglib.log.log import Log
from loglib.segment import HEADER_BYTES, Identity
from loglib.system.files import REAL
from loglib.testing import CrashFS, MemoryFiles

OpenTopic = Callable[..., Topic]


def test_promoted_mirror_takes_the_place_of_its_source(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 3)
    mirror(topic.path, to)
    fill(topic, 3, partition=1)
    before = values_of(topic)
    with pytest.raises(LockedError):  # the source has a writer
        promote(to)
    topic.close()
    promote(to)
    promote(to)
    with pytest.raises(NotLeaderError, match="was superseded by"):
        Topic.open(topic.path, create=True)
    with pytest.raises(NotLeaderError):
        promote(topic.path)
    with Topic.open(to, create=True) as promoted, Topic.open(topic.path, mode="r") as old:
        assert values_of(promoted) == before == values_of(old)
        promoted.append(b"of the new topic", sync=True)
        mirror(to, topic.path)  # the old one follows the new one
        assert_same(promoted, Path(topic.path))
    with pytest.raises(NotLeaderError, match="is a mirror of"):
        Topic.open(topic.path)
    promote(topic.path)  # and back
    with Topic.open(topic.path) as again:
        assert values_of(again) == [*before, b"of the new topic"] or len(values_of(again)) == 7
    with pytest.raises(NotLeaderError):
        Topic.open(to)


def test_topic_that_was_open_before_is_not_written_after_it_was_superseded(path: Path, to: Path) -> None:
    with Topic.open(path, create=True, partitions=1) as topic:
        fill(topic, 2)
    shared = Topic.open(path, shared=True)
    mirror(path, to)
    promote(to)
    with pytest.raises(NotLeaderError):
        shared.append(b"too late", sync=True)
    shared.close()
    with Topic.open(path, mode="r") as old:
        assert len(values_of(old)) == 2


def test_source_that_cannot_be_reached_needs_force(open_topic: OpenTopic, to: Path, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    with topic.group("etl") as group:
        group.poll(timeout=10)
        group.commit()
    mirror(topic.path, to)
    (to / "groups" / ".left.tmp").mkdir()
    (to / "groups" / "elsewhere").write_text("{}")
    (to / "groups" / "etl" / "offsets" / ".left.tmp").mkdir()
    fill(topic, 2)
    topic.close()
    away = tmp_path / "away"
    os.rename(topic.path, away)
    with pytest.raises(LogError, match="force=True"):
        promote(to)
    with pytest.raises(FileNotFoundError):
        promote(tmp_path / "nothing")
    promote(to, force=True)
    with Topic.open(to, create=True) as promoted:
        assert len(values_of(promoted)) == 3
        promoted.append(b"of the new topic", sync=True)
        assert promoted.group_info("etl").committed


def test_superseded_topic_is_promoted_by_force(path: Path, to: Path) -> None:
    with Topic.open(path, create=True, partitions=1) as topic:
        fill(topic, 3)
        mirror(path, to)
    promote(to)
    shutil.rmtree(to)  # the new one is lost
    promote(path, force=True)
    with Topic.open(path) as again:
        assert len(values_of(again)) == 3


def test_forced_promotion_beside_a_living_writer(open_topic: OpenTopic, to: Path, tmp_path: Path) -> None:
    """There are two topics then; when the old one is given up, what it has alone is set aside."""
    topic = open_topic(partitions=1)
    fill(topic, 3)
    mirror(topic.path, to)
    promote(to, force=True)
    topic.append(b"of the old topic", sync=True)
    with Topic.open(to, create=True) as promoted:
        promoted.append(b"of the new topic", sync=True)
        topic.close()
        with pytest.raises(NotLeaderError):
            mirror(to, topic.path)


def test_topic_that_was_split_off_gives_up(path: Path, to: Path) -> None:
    """Also one whose segments have second names in a snapshot: the snapshot keeps its bytes."""
    with Topic.open(path, create=True, partitions=1) as topic:
        fill(topic, 3)
        mirror(path, to)
        promote(to, force=True)
        topic.append(b"of the old topic", sync=True)
        topic.partition(0).roll()
        topic.append(b"of the old topic, too", sync=True)
        loglib.copies.snapshot(path, path.with_name("snapshot"))
    with Topic.open(to, create=True) as promoted:
        promoted.append(b"of the new topic", sync=True)
        with Topic.open(path), pytest.raises(LockedError):
            mirror(to, path, demote=True)
        (path / "0000" / (f"{0:020d}.log.tmp")).write_bytes(b"left by a crash")
        report = mirror(to, path, demote=True)
        assert len(report.set_aside) == 2
        assert_same(promoted, path)
        with Topic.open(path.with_name("snapshot"), mode="r") as kept:
            assert values_of(kept)[-2:] == [b"of the old topic", b"of the old topic, too"]
            assert kept.verify().damage == ()
    with pytest.raises(NotLeaderError):
        Topic.open(path)


def test_topic_that_gives_up_keeps_what_its_source_has_and_cannot_show_now(
    path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Topic.open(path, create=True, partitions=1, **QUIET) as topic:
        fill(topic, 3)
        last = topic.append(b"damaged at the source", sync=True).offset
    mirror(path, to)
    promote(to, force=True)
    with Topic.open(to, mode="r") as promoted:
        spoil(last_segment(to), HEADER_BYTES + last + 40)
        hidden = Log(REAL, f"{to}/0000", Identity.of(promoted.log_id, 0)).published()._replace(flushed_end=0)
    monkeypatch.setattr(local_source, "marks_together", lambda logs, _: {each.partition: hidden for each in logs})
    assert mirror(to, path, demote=True).set_aside == ()
    with Topic.open(path, mode="r") as kept:
        assert values_of(kept)[-1] == b"damaged at the source"


def test_source_on_a_disk_that_fails_needs_force(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    mirror(topic.path, to)
    topic.close()

    class Failing(testing.UnsyncedFiles):
        def open(self, path: Any, *arguments: Any, **keywords: Any) -> int:
            if str(path).startswith(topic.path):
                raise OSError(5, "Input/output error")
            return super().open(path, *arguments, **keywords)

    with pytest.raises(LogError, match="force=True"):
        promote_on(Failing(), str(to), now=1)
    promote_on(Failing(), str(to), now=1, force=True)
    with Topic.open(to, create=True) as promoted:
        assert len(values_of(promoted)) == 3


def test_mirror_whose_source_goes_away_says_so(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    gone = threading.Timer(0.5, lambda: os.rename(topic.path, topic.path + ".gone"))
    gone.start()
    with pytest.raises((FileNotFoundError, LogMovedError)):
        mirror(topic.path, to, follow=True)
    gone.join()


@in_parts(3)
def test_promotion_that_is_cut_leaves_no_leader_or_one(part: slice) -> None:
    source = MemoryFiles()
    with testing.open_topic("/data/topic", files=source, partitions=2, **QUIET) as topic:
        for number in range(6):
            topic.append(b"%d" % number * 30, partition=number % 2, sync=True)
        with Mirror("/data/topic", "/data/copy", files=source) as made:
            made.copy()
        topic.append(b"last", partition=0, sync=True)
    fs = CrashFS(testing.Image.of(source.tree()))
    fs.kill()
    promote_on(fs, "/data/copy", now=1)
    seen = set()
    for state in [*fs.crash_states(random=1)][part]:
        leaders, files = [], state.files
        for path in ("/data/topic", "/data/copy"):
            try:
                testing.open_topic(path, files=files, **QUIET).close()
                leaders.append(path)
            except NotLeaderError:
                pass
        seen.add(tuple(leaders))
        if leaders != ["/data/topic"]:
            promote_on(files, "/data/copy", now=2)
            with testing.open_topic("/data/copy", files=files, **QUIET) as promoted:
                assert len(values_of(promoted)) == 7 and promoted.verify().damage == ()
    assert seen == {("/data/topic",), (), ("/data/copy",)}


def test_mirror_that_lacks_what_retention_has_dropped_is_promoted_by_force(tmp_path: Path) -> None:
    """The topic is there and has no writer, but the pass that would bring the mirror up cannot reach its end."""
    source, copy = tmp_path / "a" / "topic", tmp_path / "b" / "topic"
    with Topic.open(source, create=True, **QUIET) as topic:
        topic.append(b"copied", sync=True)
        mirror(source, copy)
        topic.append(b"dropped", sync=True)
        topic.partition(0).roll()
        topic.append(b"last", sync=True)
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
    with pytest.raises(OffsetOutOfRangeError):
        promote(copy)
    promote(copy, force=True)
    with Topic.open(copy) as promoted:
        assert values_of(promoted) == [b"copied"]
        promoted.append(b"more", sync=True)
    with pytest.raises(NotLeaderError):
        Topic.open(source)
