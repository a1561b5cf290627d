"""Archives, places and floors know the history of their log: a copy that is ahead, too old or beside is told apart."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from builders import spoil
from tiered import bytes_of, seal

import loglib
from conftest import NOW
from loglib import CorruptLogError, LogError, OffsetOutOfRangeError, Retention, Topic
from loglib.log.history import FOREIGN, HistoryPoint, compare_history, history_at
from loglib.offload import archive, archived, read_archive, tier, tiered
from loglib.segment import HEADER_BYTES

Open = Callable[..., Topic]


def due_at_once(to: Path) -> Retention:
    return Retention(age=None, bytes=0, archive=to, archive_grace=timedelta(0))


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "elsewhere" / "topic"


def set_back(path: Path, to: Path, offload: Callable[..., object], *, more: int) -> None:
    """Make a topic, offload it, and put an older copy of it in its place, which goes on with `more` segments."""
    backup = path.parent / "backup"
    with Topic.open(path, create=True) as topic:
        seal(topic)
        shutil.copytree(path, backup)
    for _ in range(2):  # two writers: what is offloaded is of a later one than the copy's next
        with Topic.open(path) as topic:
            seal(topic)
    offload(path, to)
    shutil.rmtree(path)
    backup.rename(path)
    if more:
        with Topic.open(path) as topic:
            seal(topic, more, size=50)


def files_of(path: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("more", [1, 4], ids=["shorter", "longer"])
def test_an_archive_of_another_history_is_refused_and_drops_nothing(path: Path, to: Path, more: int) -> None:
    """It invented records of the old history in the union, and retention dropped those of the new one."""
    set_back(path, to, archive, more=more)
    before = files_of(to)
    with Topic.open(path, create=True, alter=True, retention=due_at_once(to)) as topic:
        topic.append(b"an epoch of its own", sync=True)
        expected = [record.value for record in topic.read()]
        with pytest.raises(LogError, match="has another history|is ahead"):
            archive(topic, to)
        assert files_of(to) == before
        assert not any(each.drop for each in topic.retain())
        assert [record.value for record in topic.read()] == expected
        with pytest.raises(LogError, match="has another history|is ahead"):
            topic.arrow(archive=to)
    assert read_archive(to).read_all().num_rows == 15


def test_an_archive_that_is_ahead_is_told_apart(path: Path, to: Path, caplog: pytest.LogCaptureFixture) -> None:
    set_back(path, to, archive, more=0)
    with Topic.open(path, create=True, alter=True, retention=due_at_once(to)) as topic:
        for call in (lambda: archive(topic, to), lambda: topic.arrow(archive=to)):
            with pytest.raises(OffsetOutOfRangeError, match="is ahead: it ends at offset"):
                call()
        assert not any(each.drop for each in topic.retain())
    assert "is ahead" in caplog.text


def test_a_later_writer_tells_that_an_archive_is_beside_and_not_ahead(path: Path, to: Path) -> None:
    set_back(path, to, archive, more=0)
    for _ in range(3):
        with Topic.open(path, create=True) as topic:
            topic.append(b"-", sync=True)
    with pytest.raises(LogError, match="has another history than .* up to offset 0, and differ before"):
        archive(path, to)


def test_an_archive_that_is_too_old_continues_only_if_it_may_skip(path: Path, to: Path) -> None:
    with Topic.open(path, create=True) as topic:
        seal(topic)
        archive(topic, to)
        seal(topic, 2)
        topic.partition(0).delete_before(topic.partition(0).segments[2].base_offset)
        with pytest.raises(OffsetOutOfRangeError, match="is too old: it ends at .* what lies between is missing"):
            archive(topic, to)
        made = archive(topic, to, on_damage="skip")
        assert made.ends == {0: topic.partition(0).log_end_offset} and made.partitions[0].gaps
        assert topic.arrow(archive=to).read_all().num_rows == 10


def test_a_place_of_another_history_is_refused_whatever_is_left_in_the_directory(path: Path, to: Path) -> None:
    """It opened, and then reading met batches that did not follow each other."""
    set_back(path, to, tier, more=4)
    before = bytes_of(to)
    with pytest.raises(LogError, match="the place .* has another history than"):
        Topic.open(path, mode="r", tier=to)
    with pytest.raises(LogError, match="nothing was uploaded"):
        tier(path, to)
    with Topic.open(path, create=True, alter=True, retention=due_at_once(to)) as topic:
        assert not any(each.drop for each in topic.retain())
    assert bytes_of(to) == before


def test_a_shorter_log_beside_a_place_is_not_taken_for_one_that_lags(path: Path, to: Path) -> None:
    set_back(path, to, tier, more=0)
    with Topic.open(path, mode="r", tier=to) as topic:
        assert len(list(topic.read())) == 5, "the place has more, and the same up to there"
    assert tier(path, to) == tiered(to)
    with Topic.open(path, create=True) as topic:
        topic.append(b"-", sync=True)
    with pytest.raises(LogError, match="which ends before its place does, has another history than"):
        Topic.open(path, mode="r", tier=to)


def test_a_copy_that_lags_is_read_with_a_place_that_is_ahead(path: Path, tmp_path: Path, to: Path) -> None:
    with Topic.open(path, create=True) as topic:
        seal(topic, 2)
        topic.append(b"half of a segment", sync=True)
        loglib.copies.mirror(path, tmp_path / "copy")
        seal(topic, 2)
        tier(topic, to)
    with Topic.open(tmp_path / "copy", mode="r", tier=to) as copy:
        assert len(list(copy.read())) == 11 and not copy.verify().damage
        assert copy.partition(0).log_end_offset < tiered(to).ends[0]


def test_a_place_without_what_the_lagging_copy_ends_in_proves_nothing(path: Path, tmp_path: Path, to: Path) -> None:
    with Topic.open(path, create=True) as topic:
        seal(topic)
        loglib.copies.mirror(path, tmp_path / "copy")
        seal(topic, 2)
        topic.partition(0).delete_before(topic.partition(0).segments[2].base_offset)
        tier(topic, to)
    with pytest.raises(OffsetOutOfRangeError, match="is ahead"):
        Topic.open(tmp_path / "copy", mode="r", tier=to)


def test_a_log_with_other_segments_is_not_uploaded_behind_them(path: Path, tmp_path: Path, to: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append(b"one", sync=True)
        shutil.copytree(path, tmp_path / "copy")
        topic.partition(0).roll()
        tier(topic, to)
    with Topic.open(tmp_path / "copy", create=True) as topic:
        seal(topic, 2)
        with pytest.raises(LogError, match="no segment of .* begins there, but one at 0"):
            tier(topic, to)


def test_points_of_another_log_are_foreign(open_topic: Open) -> None:
    topic = open_topic()
    seal(topic)
    log = topic._accesses[0].log
    found = compare_history([HistoryPoint(bytes(16), 8, 1)], log)
    assert found.relation == FOREIGN
    with pytest.raises(LogError, match=f"is of log {bytes(16).hex()}, and .* is another log"):
        found.check("it", log, "go")
    end = topic.partition(0).log_end_offset
    same = compare_history([HistoryPoint(topic.log_id, end, history_at(log, end))], log)
    assert same.words("it", "log") == f"it has the history of log up to offset {end}"


def test_the_manifest_says_which_history_was_archived(path: Path, to: Path) -> None:
    with Topic.open(path, create=True) as topic:
        seal(topic, 2)
        made = archive(topic, to)
        log = topic._accesses[0].log
        (file,) = made.partitions[0].files
        assert made.partitions[0].chain == file.chain == history_at(log, made.ends[0]) != 0
        assert file.epoch > 0 and archived(to) == made and made.time > NOW


def test_an_archive_of_more_partitions_loses_none_of_them(path: Path, to: Path) -> None:
    """A topic was restored from before partitions were added, and its next archive named no file of these."""
    backup = path.parent / "backup"
    with Topic.open(path, create=True) as topic:
        seal(topic)
        shutil.copytree(path, backup)
    Topic.add_partitions(path, 2)
    with Topic.open(path) as topic:
        seal(topic, partitions=(0, 1))
        archive(topic, to)
    with Topic.open(backup, create=True) as older:
        seal(older, 3)
        with pytest.raises(LogError, match="is ahead: it has 2 partitions, and .* has 1"):
            archive(older, to)
    assert archived(to).rows == 15


def test_what_damage_hides_is_neither_the_same_nor_another_history(open_topic: Open) -> None:
    topic = open_topic()
    for _ in range(5):
        topic.append(b"x" * 100, sync=True)
    (file,) = [Path(each.path) for each in topic.partition(0).segments]
    log, size = topic._accesses[0].log, topic.partition(0).log_end_offset // 5
    points = [HistoryPoint(topic.log_id, at * size, history_at(log, at * size), 1) for at in range(1, 5)]
    spoil(file, HEADER_BYTES + 3 * size + 100, HEADER_BYTES + 4 * size + 100)
    with pytest.raises(CorruptLogError):
        history_at(log, 4 * size)
    found = compare_history(points, log)
    assert found.is_same and found.common == 2 * size
    assert not compare_history(points[2:], log).common


def test_a_log_whose_beginning_is_damaged_is_archived_only_past_damage(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    seal(topic, 2)
    (file, *_) = [Path(each.path) for each in topic.partition(0).segments]
    spoil(file, 100, HEADER_BYTES + 100)
    with pytest.raises(CorruptLogError):
        archive(topic, to)
    assert archive(topic, to, on_damage="skip").rows == 5


def test_a_place_that_ends_where_the_log_begins_lets_nothing_go(path: Path, to: Path) -> None:
    for offload in (tier, archive):
        with Topic.open(path, create=True) as topic:
            seal(topic)
            offload(topic, to)
            topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
            seal(topic)
        with Topic.open(path, alter=True, retention=due_at_once(to)) as topic:
            assert not any(each.drop for each in topic.retain())
        shutil.rmtree(to)
        shutil.rmtree(path)
