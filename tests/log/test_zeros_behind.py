"""Zeros behind the tail of the last segment mean nothing: they are room for batches to come, also after a crash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import spoil
from crashed_logs import batch_ends, closed_topic, end_of, mark_of, three_segments, write_crashed
from mirrored import segments
from replicated import open_all

from conftest import crash_copy, last_segment, sound, tree, values_of
from loglib import CorruptLogError, Topic, repair, testing
from loglib.copies import heal, mirror, snapshot
from loglib.segment import HEADER_BYTES
from loglib.testing import UnsyncedFiles

Open = Callable[..., Topic]
SIZES = [1, 8, 127, 4096, 300_000]


def preallocate(path: Path, more: int, partition: int = 0) -> None:
    """Make the file of the last segment longer, as a writer that gets its blocks ahead."""
    segment = last_segment(path, partition)
    os.truncate(segment, segment.stat().st_size + more)


def others(path: Path) -> list[str]:
    """What recovery has put beside the log."""
    return sorted(each.name for each in path.rglob("*") if ".torn-" in each.name or ".damaged-" in each.name)


@pytest.fixture(params=["mark", "no-mark"])
def has_mark(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "mark")


def lose_mark(path: Path, has_mark: bool) -> None:
    if not has_mark:
        (path / "0000" / "watermark").unlink()


@pytest.mark.parametrize("more", SIZES)
def test_zeros_behind_a_closed_log_are_nothing(open_topic: Open, path: Path, more: int, has_mark: bool) -> None:
    closed_topic(open_topic)
    end = end_of(path)
    with Topic.open(path, mode="r") as topic:
        expected = list(topic.read())
    preallocate(path, more)
    lose_mark(path, has_mark)
    before = tree(path)
    with Topic.open(path, mode="r") as topic:
        shown = list(topic.read())
        assert shown == expected if has_mark else shown == expected[: len(shown)] and len(shown) > 0
        if has_mark:
            assert topic.verify().damage == ()
    assert tree(path) == before, "reading changes nothing"
    if has_mark:
        assert repair(path).repairs == ()
    with Topic.open(path, create=True) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None
        assert (recovery.cut_bytes, recovery.quarantine, recovery.watermark_lost) == (0, None, not has_mark)
        assert end_of(path) == end and list(topic.read()) == expected
        topic.append(b"more", sync=True)
        assert values_of(topic)[-1] == b"more"
        sound(topic.partition(0))
    assert others(path) == []


@pytest.mark.parametrize("more", SIZES)
def test_zeros_behind_batches_that_were_not_synced_are_nothing(
    open_topic: Open, path: Path, tmp_path: Path, more: int, has_mark: bool
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed")
    end = end_of(crashed)
    preallocate(crashed, more)
    lose_mark(crashed, has_mark)
    with Topic.open(crashed, create=True) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.rewritten_bytes > 0
        assert (recovery.cut_bytes, recovery.quarantine) == (0, None)
        assert values_of(topic) == [b"flushed %d" % i for i in range(6)] + [b"written %d" % i for i in range(8)]
        assert end_of(crashed) == end
    assert others(crashed) == []


def test_half_a_batch_before_zeros_is_cut_as_without_them(
    open_topic: Open, path: Path, tmp_path: Path, has_mark: bool
) -> None:
    """A power cut writes some sectors of a batch, and the room behind it was there already."""
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=4)
    whole, promised = last_segment(crashed).read_bytes(), mark_of(crashed).durable_end
    lose_mark(crashed, has_mark)
    ends = [promised, *batch_ends(crashed, promised, len(whole) - HEADER_BYTES)]
    for end in range(promised, len(whole) - HEADER_BYTES + 1, 5):
        for room in (0, 5000):
            there = (whole[: HEADER_BYTES + end] + bytes(room))[: len(whole)]  # zeros may be what is missing
            kept_end = max(each for each in ends if there.startswith(whole[: HEADER_BYTES + each]))
            copy = crash_copy(crashed, tmp_path / "copy")
            last_segment(copy).write_bytes(whole[: HEADER_BYTES + end] + bytes(room))
            with testing.open_topic(copy, files=UnsyncedFiles()) as topic:
                recovery = topic.partition(0).recovery
                assert recovery is not None
                kept = b"" if recovery.quarantine is None else Path(recovery.quarantine).read_bytes()
                assert len(kept) == recovery.cut_bytes
                assert kept == there[HEADER_BYTES + kept_end :].rstrip(b"\0")
                assert end_of(copy) == kept_end
                sound(topic.partition(0))


@pytest.mark.parametrize("more", [0, 8, 5000])
def test_batch_that_ends_in_zeros_stays_whole_before_zeros(
    open_topic: Open, path: Path, tmp_path: Path, more: int, has_mark: bool
) -> None:
    with open_topic(files=UnsyncedFiles()) as topic:
        topic.append(b"flushed", sync=True)
        before = crash_copy(path, tmp_path / "before")
        topic.append(bytes(3000), sync=True)
        shutil.copyfile(last_segment(path), last_segment(before))
    preallocate(before, more)
    lose_mark(before, has_mark)
    with Topic.open(before, create=True) as topic:
        assert values_of(topic) == [b"flushed", bytes(3000)]
    assert others(before) == []


@pytest.mark.parametrize("more", [0, 4096])
def test_damage_before_whole_batches_and_zeros_is_no_torn_tail(open_topic: Open, path: Path, more: int) -> None:
    """Without a mark the batches behind the damage prove that it was promised, if they lead to the end of the log."""
    closed_topic(open_topic)
    first = mark_of(path).log_start_offset
    spoil(last_segment(path), HEADER_BYTES + first + 12)  # its length is gone, so no link leads on
    spoil(last_segment(path), HEADER_BYTES + first + 36)
    spoil(last_segment(path), HEADER_BYTES + first + 44)
    preallocate(path, more)
    (path / "0000" / "watermark").unlink()
    before = tree(path)
    with pytest.raises(CorruptLogError):
        Topic.open(path, create=True)
    assert tree(path) == before


def test_file_of_zeros_up_to_a_promised_end_is_damage(open_topic: Open, path: Path) -> None:
    """Zeros are nothing behind the end of the log, and lost batches before it."""
    closed_topic(open_topic)
    segment = last_segment(path)
    content = segment.read_bytes()
    segment.write_bytes(content[:-40] + bytes(5000))
    before = tree(path)
    with Topic.open(path, mode="r") as topic:
        assert topic.verify().damage
        with pytest.raises(CorruptLogError):
            values_of(topic)
    assert tree(path) == before


def test_sealed_segment_with_zeros_behind_is_damage(open_topic: Open, path: Path) -> None:
    """A sealed segment is as long as the next one says."""
    first = three_segments(open_topic, path)[0]
    os.truncate(first, first.stat().st_size + 512)
    before = tree(path)
    with pytest.raises(CorruptLogError, match="a segment of"):
        Topic.open(path, create=True)
    assert tree(path) == before
    with Topic.open(path, mode="r") as topic:
        assert len(values_of(topic)) == 3
    [done] = repair(path).repairs
    assert "512 bytes" in done.what
    with Topic.open(path) as topic:
        assert len(values_of(topic)) == 3


def test_roll_behind_a_log_with_room_makes_a_segment_that_is_exact(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    preallocate(path, 4096)
    with Topic.open(path, create=True) as topic:
        topic.append(b"more")
        topic.partition(0).roll()
        topic.append(b"again", sync=True)
        assert topic.verify().damage == ()
    assert repair(path).repairs == ()


def test_copies_of_a_log_with_room_have_the_log_alone(open_topic: Open, path: Path, tmp_path: Path) -> None:
    closed_topic(open_topic)
    plain = segments(path)
    expected = [b"value %d" % number for number in range(12)]
    preallocate(path, 4096)
    mirror(path, tmp_path / "mirror")
    snapshot(path, tmp_path / "snapshot")
    snapshot(path, tmp_path / "copied", links=False)
    for name in ("mirror", "snapshot", "copied"):
        assert segments(tmp_path / name) == plain, name
    shutil.copytree(path, tmp_path / "cp")
    for name in ("mirror", "snapshot", "copied", "cp"):
        with Topic.open(tmp_path / name, mode="r") as topic:
            assert values_of(topic) == expected and topic.verify().damage == ()
    with Topic.open(path, mode="r") as topic, Topic.open(tmp_path / "other", create=True) as other:
        with (tmp_path / "frames").open("w+b") as stream:
            topic.partition(0).transfer(stream, 0)
            stream.seek(0)
            other.partition(0).receive(stream)
        other.flush()
        assert values_of(other) == expected


def test_mirror_with_room_goes_on(open_topic: Open, path: Path, tmp_path: Path) -> None:
    to = tmp_path / "mirror"
    with open_topic() as topic:
        for number in range(4):
            topic.append(b"%d" % number, sync=True)
            mirror(path, to)
            preallocate(to, 1000 * number + 1)
        topic.append(b"last", sync=True)
        report = mirror(path, to)
        assert report.set_aside == ()
        assert segments(to) == segments(path)
    assert others(to) == []


def test_damaged_log_with_room_is_healed_from_its_mirror(open_topic: Open, path: Path, tmp_path: Path) -> None:
    closed_topic(open_topic)
    mirror(path, tmp_path / "mirror")
    for each in (path, tmp_path / "mirror"):
        preallocate(each, 3000)
    spoil(last_segment(path), HEADER_BYTES + 140)
    report = heal(path, [tmp_path / "mirror"])
    assert report.healed and not report.unhealed
    with Topic.open(path, mode="r") as topic:
        assert len(values_of(topic)) == 12 and topic.verify().damage == ()
    Topic.open(path, create=True).close()


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1, 2)])
def test_replicas_with_room_have_the_same_log(tmp_path: Path, which: tuple[int, ...]) -> None:
    places = [tmp_path / name for name in "abc"]
    with open_all(places) as topic:
        for number in range(5):
            topic.append(b"%d" % number, sync=True)
    for number in which:
        preallocate(places[number], 2000 + number)
    with open_all(places) as topic:
        assert values_of(topic) == [b"%d" % number for number in range(5)]
        topic.append(b"more", sync=True)
    for place in places:
        with Topic.open(place, mode="r") as topic:
            assert len(values_of(topic)) == 6 and topic.verify().damage == ()
        assert others(place) == []


def test_commits_of_a_group_with_room_behind_them_count(open_topic: Open, path: Path) -> None:
    with open_topic() as topic:
        topic.append_many([b"a", b"b", b"c"])
        topic.flush()
        with topic.group("g", commit="manual") as group:
            group.commit(group.poll(max_records=2)[-1])
        for log in (path / "groups" / "g" / "offsets").iterdir():
            for segment in log.glob("*.log"):
                os.truncate(segment, segment.stat().st_size + 4000)
        with topic.group("g", commit="manual") as group:
            assert [record.value for record in group.poll(max_records=9)] == [b"c"]
