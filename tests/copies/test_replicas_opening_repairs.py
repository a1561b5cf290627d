"""Topics with replicas: an opening brings up directories that are stale, heals rotten ones, and sets others aside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import replicas_written
from replicas_written import FIRST, dying, restored, saved
from replicated import Devices, all_have_all, assert_same, open_all, until

from conftest import QUIET, values_of
from loglib import CorruptLogError, Topic, testing
from loglib.copies import assemble
from loglib.copies.election import claim_of
from loglib.copies.roster import read_members
from loglib.errors import TooFewCopiesError
from loglib.log.recovery import read_mark
from loglib.segment import Identity
from loglib.system.directory import Directory
from loglib.system.files import REAL

places = replicas_written.places
written = replicas_written.written
devices = replicas_written.devices


def test_stale_directory_is_brought_up(written: list[Path]) -> None:
    saved(written[0])
    with open_all(written) as topic:
        topic.append(b"four", sync=True)
        topic.partition(0).roll()
        topic.append(b"five", sync=True)
        until(partial(all_have_all, topic), "all have it")
    restored(written[0])
    with open_all(written) as topic:
        assert values_of(topic)[3:] == [b"four", b"five"]
        topic.append(b"six", sync=True)
    assert len(assert_same(written)) == 6


def test_other_history_is_set_aside(written: list[Path], devices: Devices) -> None:
    """A writer whose records reached its own directory only, and then a topic without it."""
    topic = open_all(written, files=devices)
    with devices.failing(written[1]), devices.failing(written[2]):
        topic.append(b"alone")
        with pytest.raises(TooFewCopiesError):
            topic.close()
    away = written[0].with_name("away")
    os.rename(written[0], away)
    with open_all([written[1], written[0], written[2]], files=devices) as topic:
        topic.append(b"four", sync=True)
    os.rename(away, written[0])
    with open_all(written, files=devices) as topic:
        assert values_of(topic) == [b"one", b"two", b"three", b"four"]
    assert len(assert_same(written)) == 4
    assert [each.name for each in (written[0] / "0000").glob("*.diverged-*")]


def rot(place: Path, name: str, start: int, end: int | None = None) -> None:
    path = place / "0000" / name
    content = bytearray(path.read_bytes())
    content[start:end] = bytes(len(content[start:end]))
    path.write_bytes(content)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("damage", [
    lambda place: rot(place, FIRST, 4096 + 150),
    lambda place: rot(place, FIRST, 4096),
    lambda place: rot(place, FIRST, 0),
    lambda place: os.truncate(place / "0000" / FIRST, 4200),
    lambda place: os.truncate(place / "0000" / FIRST, 100),
    lambda place: (place / "0000" / FIRST).unlink(),
    lambda place: rot(place, "watermark", 0),
    lambda place: (place / "0000/watermark").unlink(),
    lambda place: shutil.rmtree(place / "0000"),
    lambda place: [(place / "0000" / name).unlink() for name in ("watermark", FIRST)],
], ids=[
    "body", "batch", "header", "cut", "cut header", "no segment", "mark", "no mark", "no partition", "no files",
])  # fmt: skip
def test_rotten_directory_is_healed_by_the_others(
    written: list[Path], damage: Callable[[Path], object], victim: int
) -> None:
    damage(written[victim])
    for number in range(2):
        with open_all(written) as topic:
            assert values_of(topic)[:3] == [b"one", b"two", b"three"]
            topic.append(b"%d" % number, sync=True)
            until(partial(all_have_all, topic), "all have it")
        assert len(assert_same(written)) == 4 + number
        if number == 0:
            damage(written[victim])
    members = [read_members(REAL, str(each)) for each in written]
    assert [each.version for each in members if each is not None] == [1, 1, 1]


def test_damage_of_all_is_an_error(written: list[Path]) -> None:
    for place in written:
        rot(place, FIRST, 4096 + 150)
    with pytest.raises(CorruptLogError):
        open_all(written)


def test_damage_that_the_source_meets_later_is_passed_by_another_source(written: list[Path]) -> None:
    with open_all(written) as topic:
        topic.append(b"four", sync=True)
        until(partial(all_have_all, topic), "all have it")
    rot(written[0], FIRST, 4096 + 140, 4096 + 160)  # in the first batch of two
    shutil.rmtree(written[2])
    with open_all(written, forget_replicas=[written[2]]) as topic:
        assert len(topic.replicas()) == 3
    assert_same(written[1:])


def test_damage_inside_of_every_source_is_an_error(written: list[Path]) -> None:
    with open_all(written) as topic:
        topic.append(b"four", sync=True)
        until(partial(all_have_all, topic), "all have it")
    for place in written[:2]:
        rot(place, FIRST, 4096 + 140, 4096 + 160)  # in the first batch of two
    shutil.rmtree(written[2])
    with pytest.raises(CorruptLogError, match=r"byte 4096|byte 42"):
        open_all(written, forget_replicas=[written[2]])


def test_copy_that_says_to_have_been_longer_counts_so(path: Path, open_topic: Callable[..., Topic]) -> None:
    topic = open_topic(partitions=1)
    topic.append(b"one", sync=True)
    mark = (path / "0000/watermark").read_bytes()
    ends = []
    for value in (b"two", b"three"):
        topic.append(value, sync=True)
        ends.append(topic.partition(0).high_watermark)
    with Directory.open(REAL, str(path / "0000")) as place:
        identity = Identity.of(topic.log_id, 0)
        (path / "0000/watermark").write_bytes(mark)  # a power cut has taken the newer marks,
        content = (path / "0000" / FIRST).read_bytes()
        (path / "0000" / FIRST).write_bytes(content.replace(b"two", b"tow"))  # and what was durable is damaged
        found = read_mark(place, identity)
        assert found is not None
        standing = claim_of(place, identity, found)
    assert standing.claim == ends[0] and standing.damage is not None and not standing.is_rotten


def test_opening_that_dies_while_it_sets_a_partition_aside_leaves_no_witness(
    written: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rot(written[1], FIRST, 4096)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="it dies here"):
        patched.setattr(assemble, "_set_aside", dying)
        patched.setattr("loglib.copies.roster.Roster.without", dying)
        open_all(written)
    members = read_members(REAL, str(written[1]))
    assert members is not None and not members.version
    with open_all([written[1], written[0], written[2]]) as topic:
        assert len(values_of(topic)) == 3
    members = read_members(REAL, str(written[1]))
    assert members is not None and members.version


def test_replacement_that_dies_is_repeated(written: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(written[2])
    with monkeypatch.context() as patched, pytest.raises(OSError, match="it dies here"):
        patched.setattr(assemble, "_set_floors", dying)
        open_all(written, forget_replicas=[written[2]])
    with open_all(written, forget_replicas=[written[2]]) as topic:
        assert [each.state for each in topic.replicas()] == ["own", "in step", "in step"]
    assert len(assert_same(written)) == 3


def test_long_copy_shows_what_is_acknowledged_on_its_way(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.copies.log_copier.SYNC_BYTES", 1)
    monkeypatch.setattr("loglib.copies.local_source.BLOCK_BYTES", 1)
    devices = Devices(testing.UnsyncedFiles())
    with testing.open_topic(places[0], **QUIET) as topic:
        for number in range(5):
            topic.append(b"%d" % number, sync=True)
    topic = open_all(places[:2], files=devices)
    with devices.failing(places[1]):
        for _ in range(5):
            with pytest.raises(TooFewCopiesError):
                topic.append(b"not acknowledged", sync=True)
        with pytest.raises(TooFewCopiesError):
            topic.close()
    open_all(places[:2], files=devices).close()
    assert len(assert_same(places[:2])) == 10


def test_lost_mark_is_no_witness(written: list[Path]) -> None:
    (written[1] / "0000/watermark").unlink()
    os.rename(written[2], written[2].with_name("away"))
    with pytest.raises(TooFewCopiesError, match="does not say what was acknowledged"):
        open_all(written)
