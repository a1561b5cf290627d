"""Mirrors that are cut, overtaken, or on a disk that fails: they show a prefix, and go on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from mirror_programs import MirrorProgram
from mirrored import Cut, Meanwhile, assert_same, mirror_end, source_gone

from conftest import QUIET, fill, values_of
from loglib import OffsetOutOfRangeError, Topic, testing
from loglib.copies import Mirror, log_copier, mirror
from loglib.copies.promotion import promote_on
from loglib.format.watermark import newest
from loglib.segment import Identity
from loglib.testing import CrashFS, MemoryFiles

OpenTopic = Callable[..., Topic]


def test_long_copy_is_shown_in_parts(open_topic: OpenTopic, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_copier, "SYNC_BYTES", 1 << 20)
    topic = open_topic(partitions=1)
    for number in range(40):
        topic.append_many([b"%d" % number * 100] * 1000)
    topic.flush()
    cut = Cut(lambda call: call.name == "pwritev" and call.path.endswith(".log") and call.arguments[-1] > 3 << 20)
    with Mirror(topic.path, to, files=cut) as made, pytest.raises(KeyboardInterrupt):
        made.copy()
    assert 1 << 20 <= mirror_end(to) < topic.partition(0).high_watermark
    mirror(topic.path, to)
    assert_same(topic, to)


@pytest.mark.parametrize("part", [1 << 30, 1 << 20])
def test_sync_that_fails_is_not_tried_again(
    open_topic: OpenTopic, to: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """A second sync may succeed although the first has thrown the data away."""
    monkeypatch.setattr(log_copier, "SYNC_BYTES", part)
    topic = open_topic(partitions=1)
    mirror(topic.path, to)
    topic.append_many([b"x" * 1000] * 5000)
    topic.flush()
    failed: list[str] = []

    class Failing(testing.UnsyncedFiles):
        def datasync(self, fd: int) -> None:
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith(str(to)) and name.endswith(".log") and not failed:
                failed.append(name)
                raise OSError(5, "Input/output error")

    with Mirror(topic.path, to, files=Failing()) as made:
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                made.copy()
    assert mirror_end(to) == 0 and failed
    mirror(topic.path, to)
    assert_same(topic, to)


def test_full_disk_is_an_error_and_the_mirror_goes_on_when_there_is_room(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=2)
    mirror(topic.path, to)
    for number in range(6):
        topic.append(b"%d" % number * 3000, partition=number % 2, sync=True)
        if number == 3:
            topic.partition(1).roll()
    files = testing.FullDisk(3 * 4096, testing.UnsyncedFiles())
    with Mirror(topic.path, to, files=files) as made:
        with pytest.raises(OSError, match="No space left"):
            made.copy()
        files.room = 1 << 20
        made.copy()
    assert_same(topic, to)


def test_parts_are_shown_when_they_are_synced(
    open_topic: OpenTopic, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_copier, "SYNC_BYTES", 1 << 20)
    topic = open_topic(partitions=1)
    mirror(topic.path, to)
    for _ in range(8):
        topic.append_many([b"x" * 1000] * 1000)
    topic.flush()
    name, synced = str(to / "0000" / f"{0:020d}.log"), [0]

    class Slow(testing.UnsyncedFiles):
        def datasync(self, fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}") == name:
                before = os.path.getsize(name) - 4096
                time.sleep(0.05)
                synced[0] = before

        def pwritev(self, fd: int, parts: Any, position: int, *flags: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}") == str(to / "0000" / "watermark"):
                mark = newest(b"".join(parts).ljust(4224, b"\0"), Identity.of(topic.log_id, 0).salt)
                assert mark is None or mark.flushed_end <= synced[0]
            return super().pwritev(fd, parts, position)

    with Mirror(topic.path, to, files=Slow()) as made:
        made.copy()
    assert_same(topic, to)


@pytest.mark.parametrize("on_divergence", ["raise", "restart"])
@pytest.mark.parametrize("segment", [0, 1])
def test_retention_that_overtakes_a_pass(
    open_topic: OpenTopic, to: Path, segment: int, on_divergence: Literal["raise", "restart"]
) -> None:
    topic = open_topic(partitions=1)
    for _ in range(3):
        fill(topic, 2)
        topic.partition(0).roll()
    *bases, last = [each.base_offset for each in topic.partition(0).segments]
    name = f"{topic.path}/0000/{bases[segment]:020d}.log"
    armed = threading.Event()
    files = Meanwhile(
        lambda call: armed.is_set() and call.name == "open_read" and call.path == name,
        lambda: topic.partition(0).delete_before(last),
    )
    with Mirror(topic.path, to, files=files, on_divergence=on_divergence) as made:
        armed.set()
        if on_divergence == "raise":
            with pytest.raises(OffsetOutOfRangeError):
                made.copy()
        else:
            made.copy()
    mirror(topic.path, to, on_divergence="restart")
    assert_same(topic, to)


def test_retention_that_overtakes_between_two_passes(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)
    with Mirror(topic.path, to, on_divergence="restart") as made:
        made.copy()
        for _ in range(2):
            fill(topic, 2)
            topic.partition(0).roll()
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        fill(topic, 2)
        made.copy()
        assert_same(topic, to)


@pytest.mark.parametrize("ends_with", ["the segment", "a batch in it"])
def test_retention_that_drops_the_last_batch_of_the_copy_while_it_is_compared(
    open_topic: OpenTopic, to: Path, ends_with: str
) -> None:
    """If the next segment says that it follows that batch, the copy goes on there."""
    topic = open_topic(partitions=1)
    fill(topic, 2)
    mirror(topic.path, to)
    copied = mirror_end(to)

    def roll_and_drop() -> None:
        if ends_with == "a batch in it":
            fill(topic, 1)
        topic.partition(0).roll()
        fill(topic, 2)
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)

    name = f"{topic.path}/0000/{0:020d}.log"
    files = Meanwhile(lambda call: call.name == "open_read" and call.path == name, roll_and_drop)
    with Mirror(topic.path, to, files=files) as made:
        if ends_with == "the segment":
            made.copy()
        else:
            with pytest.raises(OffsetOutOfRangeError):
                made.copy()
    assert files.happened
    if ends_with == "the segment":
        assert topic.partition(0).log_start_offset == copied
        mirror(topic.path, to)
        assert_same(topic, to)
    else:
        assert mirror_end(to) == copied


def test_retention_that_overtakes_the_making_of_a_copy(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)
    topic.partition(0).roll()
    fill(topic, 2)
    name = f"{topic.path}/0000/{0:020d}.log"
    files = Meanwhile(
        lambda call: call.name == "open_read" and call.path == name,
        lambda: topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset),
    )
    with Mirror(topic.path, to, files=files) as made:
        made.copy()
    assert_same(topic, to)


@pytest.mark.parametrize("seed", range(4))
def test_mirror_that_is_cut_shows_a_prefix_and_goes_on(seed: int) -> None:
    """Power fails in a program, some hundred times; the proof does it for more programs, at each operation."""
    judged = MirrorProgram(seed).judge_cuts(every=24)
    assert judged.states > 20 and judged.shown


def test_power_cut_while_segments_are_dropped() -> None:
    source = MemoryFiles()
    with testing.open_topic("/data/topic", files=source, partitions=1, **QUIET) as topic:
        for number in range(3):
            topic.append(b"%d" % number, sync=True)
            topic.partition(0).roll()
        with Mirror("/data/topic", "/data/copy", files=source) as made:
            made.copy()
        topic.partition(0).delete_before(topic.partition(0).segments[2].base_offset)
    fs = CrashFS(testing.Image.of(source.tree()))
    fs.kill()
    with Mirror("/data/topic", "/data/copy", files=fs) as made:
        made.copy()
    starts = set()
    for state in fs.crash_states(random=1):
        files = state.files
        with testing.open_topic("/data/copy", files=files, mode="r") as copy:
            starts.add(copy.partition(0).log_start_offset)
            assert values_of(copy)[-1:] == [b"2"], state
        promote_on(source_gone(files), "/data/copy", now=1, force=True)
        with testing.open_topic("/data/copy", files=files, **QUIET) as copy:
            assert values_of(copy)[-1:] == [b"2"] and copy.verify().damage == (), state
    assert len(starts) == 2
