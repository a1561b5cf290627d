"""A copy's view is not the truth about its source: what cannot be read there costs a copy no record."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from mirrored import assert_same
from streamed import served
from transacted import dying

from conftest import fill, values_of
from loglib import CorruptLogError, LogError, LogMovedError, Topic, transaction
from loglib.copies import Mirror, mirror, snapshot
from loglib.format.watermark import SECOND_SLOT, SLOT_BYTES
from loglib.transactions.store import Store

OpenTopic = Callable[..., Topic]
Damage = Callable[[Path], object]


def rot(*slots: int) -> Damage:
    """Damages slots of a watermark: 0 is the one that was published first."""

    def damage(watermark: Path) -> None:
        content = bytearray(watermark.read_bytes())
        places = sorted((0, SECOND_SLOT), key=lambda at: content[at + 8 : at + 16])
        for slot in slots:
            content[places[slot] + SLOT_BYTES // 2] ^= 1
        watermark.write_bytes(content)

    return damage


MARKS: dict[str, Damage] = {
    "lost": Path.unlink, "older": rot(0), "newer": rot(1), "both": rot(0, 1), "empty": lambda at: at.write_bytes(b""),
}  # fmt: skip


@contextmanager
def mirroring(path: Path, to: Path, way: str, **options: Any) -> Iterator[Mirror]:
    """A mirror of a directory, over a stream or not."""
    if way == "here":
        with Mirror(path, to, **options) as made:
            yield made
        return
    with served(path) as serving, Mirror.over(serving.stream, to, **options) as made:
        yield made


@pytest.mark.parametrize("damage", [MARKS["lost"], MARKS["both"]], ids=["lost", "rotten"])
def test_transaction_that_is_whole_in_a_log_without_a_mark_is_done(
    path: Path, tmp_path: Path, damage: Damage
) -> None:
    """Its end stands in the log, so what is found there names it as applied."""
    with Topic.open(path, create=True, partitions=1) as topic:
        fill(topic, 1)
        with transaction("shop") as tx:
            for value in (b"one", b"two"):
                tx.append(topic, value)
        applied = topic._accesses[0].log.mark().applied_txn
        expected = values_of(topic)
    damage(path / "0000" / "watermark")
    with Topic.open(path, mode="r") as reading:
        found = reading._accesses[0].log.found()
    assert found.applied_txn == applied > 0
    snapshot(path, tmp_path / "backup" / "topic")
    with Topic.open(tmp_path / "backup" / "topic", mode="r") as copy:
        assert values_of(copy) == expected


@pytest.mark.parametrize("slot", [0, 1])
def test_slot_that_is_left_of_a_mirror_holds_back_no_transaction_that_was_shown(
    path: Path, to: Path, tmp_path: Path, slot: int
) -> None:
    """A mark holds a transaction back until all partitions have it. The other slot kept that mark."""
    with Topic.open(path, create=True, partitions=2) as topic:
        fill(topic, 2)
        mirror(path, to)
        with transaction("shop") as tx:
            for number in (0, 1):
                tx.append(topic, b"shown", partition=number)
        mirror(path, to)
        expected = sorted(values_of(topic))
    for number in (0, 1):
        rot(slot)(to / f"{number:04d}" / "watermark")
    snapshot(to, tmp_path / "backup" / "topic")
    with Topic.open(tmp_path / "backup" / "topic", mode="r") as copy:
        assert sorted(values_of(copy)) == expected


@pytest.mark.parametrize("way", ["here", "stream"])
@pytest.mark.parametrize("damage", MARKS.values(), ids=MARKS)
@pytest.mark.parametrize("copied", [0, 1, 2])
def test_damaged_mark_of_the_source_costs_no_record(
    open_topic: OpenTopic, to: Path, damage: Damage, way: str, copied: int
) -> None:
    """The pass finds the end as a writer's recovery would. What the copy has, it keeps."""
    topic = open_topic(partitions=1)
    fill(topic, 3)
    topic.partition(0).roll()
    fill(topic, 2)
    if copied == 1:
        mirror(topic.path, to)
    topic.append(b"the last one", sync=True)
    if copied == 2:
        mirror(topic.path, to)
    damage(Path(topic.path, "0000", "watermark"))
    with mirroring(Path(topic.path), to, way, on_divergence="restart") as made:
        made.copy()
        assert made.report().set_aside == ()
    with Topic.open(to, mode="r") as copy:
        assert len(values_of(copy)) == 6 and copy.verify().damage == ()
    with suppress(LogMovedError):  # the watermark is gone
        topic.close()
    with open_topic() as again:
        again.append(b"later", sync=True)
        mirror(topic.path, to)
        assert_same(again, to)


@pytest.mark.parametrize("damage", MARKS.values(), ids=MARKS)
def test_snapshot_of_a_topic_with_a_damaged_mark_is_whole(open_topic: OpenTopic, to: Path, damage: Damage) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    with topic.group("etl") as group:
        group.poll(timeout=5)
        group.commit()
    committed = topic.partition(0).high_watermark
    topic.append(b"the last one", sync=True)
    end = topic.partition(0).high_watermark
    damage(Path(topic.path, "0000", "watermark"))
    for each in Path(topic.path, "groups", "etl", "offsets").glob("*/watermark"):
        damage(each)
    assert snapshot(topic.path, to).ends == (end,)
    mirrored = to.parent.parent / "mirrored" / to.name
    mirror(topic.path, mirrored)
    for place in (to, mirrored):
        with Topic.open(place, mode="r") as copy:
            assert values_of(copy) == [b"0", b"1", b"2", b"the last one"]
            assert copy.group_info("etl").committed[0].offset == committed


@pytest.mark.parametrize("way", ["here", "stream"])
def test_mark_that_was_set_back_takes_nothing_from_a_copy(open_topic: OpenTopic, to: Path, way: str) -> None:
    """An older watermark was put in its place. The writer's recovery will find the rest."""
    topic = open_topic(partitions=1)
    fill(topic, 2)
    watermark = Path(topic.path, "0000", "watermark")
    older = watermark.read_bytes()
    fill(topic, 2)
    topic.partition(0).roll()
    mirror(topic.path, to)
    newer = watermark.read_bytes()
    watermark.write_bytes(older)
    with mirroring(Path(topic.path), to, way) as made:
        assert made.copy() == 0 and made.report().set_aside == ()
    with Topic.open(to, mode="r") as copy:
        assert len(values_of(copy)) == 4
    watermark.write_bytes(newer)


@pytest.mark.parametrize("on_divergence", ["raise", "restart"])
@pytest.mark.parametrize("lost", [slice(0, 1), slice(0, 3), slice(3, 4)])
def test_source_without_a_mark_and_segments_takes_nothing_from_a_copy(
    open_topic: OpenTopic, to: Path, lost: slice, on_divergence: Any
) -> None:
    topic = open_topic(partitions=1)
    for number in range(3):
        fill(topic, 2)
        if lost == slice(0, 3) and number == 1:
            mirror(topic.path, to)
        topic.partition(0).roll()
    fill(topic, 2)
    if lost != slice(0, 3):
        mirror(topic.path, to)
    before = len(records(to))
    Path(topic.path, "0000", "watermark").unlink()
    for each in topic.partition(0).segments[lost]:
        Path(each.path).unlink()
    try:
        mirror(topic.path, to, on_divergence=on_divergence)
    except CorruptLogError as error:
        assert "no whole watermark" in str(error) or "no file" in str(error)
    assert len(records(to)) >= before


def records(path: Path) -> list[bytes]:
    with Topic.open(path, mode="r") as copy:
        return values_of(copy)


def test_source_without_its_groups_takes_no_commit_from_a_copy(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    with topic.group("etl") as group:
        group.poll(timeout=5)
        group.commit()
    mirror(topic.path, to)
    committed = topic.group_info("etl").committed
    topic.close()
    os.rename(f"{topic.path}/groups", f"{topic.path}/.away")
    mirror(topic.path, to)
    with Topic.open(to, mode="r") as copy:
        assert copy.group_info("etl").committed == committed


def test_source_with_fewer_partitions_than_its_copy_is_refused(open_topic: OpenTopic, to: Path) -> None:
    """An older backup was put in its place."""
    topic = open_topic(partitions=1)
    older = Path(topic.path, "topic.json").read_bytes()
    topic.close()
    Topic.add_partitions(topic.path, 2)
    with open_topic() as grown:
        grown.append(b"x", partition=1, sync=True)
    mirror(topic.path, to)
    grown.close()
    Path(topic.path, "topic.json").write_bytes(older)
    shutil.rmtree(f"{topic.path}/0001")
    with pytest.raises(LogError, match="says that it has 1 partitions, and its copy .* has 2"):
        mirror(topic.path, to)
    assert records(to) == [b"x"]


def test_commits_of_a_log_whose_mark_was_set_back_stay_in_the_copy(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    with topic.group("etl") as group:
        for number in range(2):
            fill(topic, 2)
            group.poll(timeout=5)
            group.commit()
            [watermark] = Path(topic.path, "groups", "etl", "offsets").glob("*/watermark")
            if number == 0:
                older = watermark.read_bytes()
    mirror(topic.path, to)
    watermark.write_bytes(older)
    with topic.group("another") as another:
        another.poll(timeout=5)
        another.commit()
    mirror(topic.path, to)
    with Topic.open(to, mode="r") as copy:
        assert copy.group_info("etl").committed[0].offset == topic.partition(0).high_watermark


def test_source_without_a_segment_and_a_whole_mark_is_corrupt(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)
    mirror(topic.path, to)
    rot(0)(Path(topic.path, "0000", "watermark"))
    Path(topic.partition(0).segments[0].path).unlink()
    with pytest.raises(CorruptLogError, match="the last segment"):
        mirror(topic.path, to)
    assert records(to) == [b"0", b"1"]


@pytest.mark.parametrize("behind", [0, 1])
def test_transaction_of_a_source_without_marks_is_in_all_partitions_of_the_copy_or_in_none(
    open_topic: OpenTopic, to: Path, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    """Only the headers of the last segments say that it is held."""
    topic = open_topic(partitions=2)
    fill(topic, 2)
    with dying(monkeypatch, Store, "finish"), transaction("etl") as changes:
        for number in range(2):
            changes.append(topic, b"x", partition=number)
    for number in range(2):
        topic.partition(number).roll()
        for _ in range(behind):
            topic.append(b"behind it", partition=number, sync=True)
        Path(topic.path, f"{number:04d}", "watermark").unlink()
    mirror(topic.path, to)
    snapshot(topic.path, to.with_name("snapshot"))
    assert records(to) == records(to.with_name("snapshot")) == [b"0", b"1"]
