"""A place that the log no longer has is an error, or a new beginning where that was asked for."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from consumers import die, fill, next_offset, numbers, rebalance, rest, take

import loglib
from conftest import crash_copy
from loglib import CorruptLogError, OffsetOutOfRangeError, StaleGenerationError, Topic, TopicPartition
from loglib.errors import LogReplacedError

Opener = Callable[..., Topic]

pytestmark = pytest.mark.usefixtures("attentive")


# --- below the log start, ahead of its end, damaged, missing -------------------------------------


def drop_first(topic: Topic, count: int) -> None:
    """Have retention drop the first so many records."""
    topic.partition(0).roll()
    start = topic.partition(0).log_end_offset
    fill(topic, 5, first=100)
    topic.partition(0)._access.writer().drop_before(start)


def test_commit_below_the_log_start_is_an_error(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 3) == [0, 1, 2]
    drop_first(topic, 10)
    with topic.group("etl") as group:
        for _ in range(2):
            with pytest.raises(OffsetOutOfRangeError):
                group.poll()
        assert group.assignment == []
        assert group.lag(count_records=True)[0].records == 5


@pytest.mark.parametrize(("start", "expected"), [("begin", [100, 101, 102, 103, 104]), ("end", [])])
def test_commit_below_the_log_start_begins_again(topic: Topic, start: str, expected: list[int]) -> None:
    with topic.group("etl") as group:
        assert take(group, 3) == [0, 1, 2]
    drop_first(topic, 10)
    group = topic.group("etl", start=start, on_out_of_range="start", commit="manual")
    assert rest(group) == expected
    die(group)
    fill(topic, 1, first=105)
    with topic.group("etl", start=start, on_out_of_range="start") as group:
        assert rest(group) == [*expected, 105]  # the new beginning is kept


def test_member_that_retention_overtakes_begins_again_or_says_so(topic: Topic) -> None:
    with topic.group("etl", on_out_of_range="start") as heedless, topic.group("audit") as strict:
        assert numbers(heedless.poll()) == numbers(strict.poll()) == [0]
        heedless.seek({0: next_offset(topic, 0)})
        strict.seek({0: next_offset(topic, 0)})
        drop_first(topic, 10)
        assert rest(heedless) == [100, 101, 102, 103, 104]
        with pytest.raises(OffsetOutOfRangeError):
            rest(strict)


def test_commit_ahead_of_the_log_is_an_error_or_begins_again(open_topic: Opener, topic: Topic, path: Path) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
    fill(topic, 5, first=10)
    with topic.group("etl") as group:
        assert len(rest(group)) == 5
        ahead = group.committed()[0].offset
    log = group._directory.logs[TopicPartition("topic", 0)]
    mark = log.mark()
    shorter = mark._replace(flushed_end=next_offset(topic, 5), durable_end=next_offset(topic, 5))
    log.mark = lambda: shorter  # type: ignore[method-assign]  # as where a log was lost and begun anew
    with topic.group("etl") as group, pytest.raises(OffsetOutOfRangeError) as caught:
        group.poll()
    assert caught.value.offset == ahead
    with topic.group("etl", on_out_of_range="start") as group:
        group.poll()
        assert group.committed()[0].offset == 0


@pytest.mark.parametrize("value", ["", "skip", None])
def test_other_answers_to_a_lost_place_are_refused(topic: Topic, value: Any) -> None:
    with pytest.raises(ValueError, match="on_out_of_range must be"):
        topic.group("etl", on_out_of_range=value)


def test_damaged_offsets_are_an_error_and_never_a_new_group(topic: Topic, path: Path) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
    segment = max((path / "groups/etl/offsets").glob("*/*.log"))
    raw = bytearray(segment.read_bytes())
    raw[4096 + 70] ^= 1
    segment.write_bytes(raw)
    with topic.group("etl") as group:
        with pytest.raises(CorruptLogError):
            group.poll()
        assert group.assignment == []
        with pytest.raises(CorruptLogError):
            group.committed()


def test_missing_offsets_are_an_error_and_never_a_new_group(topic: Topic, path: Path) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
    offsets = path / "groups/etl/offsets"
    offsets.rename(path / "aside")
    with pytest.raises(CorruptLogError, match="no directory"):
        topic.group("etl")
    offsets.mkdir()
    with pytest.raises(CorruptLogError), topic.group("etl") as group:
        group.poll()


def test_commit_after_the_place_was_lost_says_so_until_records_are_asked_for(open_topic: Opener, path: Path) -> None:
    topic = open_topic(partitions=2)
    group = topic.group("etl", member="hung", commit="manual")
    rebalance(group)
    os.replace(path / f"groups/etl/owners/{topic.log_id.hex()}-0", path / "groups/etl/owners/aside")
    with pytest.raises(StaleGenerationError, match="topic-0"):
        group.poll()
    for _ in range(2):
        with pytest.raises(StaleGenerationError, match="topic-0"):
            group.commit()
    assert group.poll() == []
    group.commit()
    loglib.groups.evict_member(topic, "etl", "hung")
    with pytest.raises(StaleGenerationError, match="was evicted"):
        group.commit()
    with pytest.raises(StaleGenerationError, match="was evicted"):
        group.poll()
    with pytest.raises(StaleGenerationError, match="was evicted"):
        group.commit()
    group.close()


# --- another log at the place of the one committed to --------------------------------------------


def test_topic_deleted_and_made_again_is_not_read_from_where_the_old_one_was_left(
    open_topic: Opener, tmp_path: Path
) -> None:
    clicks, views = open_topic(tmp_path / "clicks", partitions=1), open_topic(tmp_path / "views", partitions=1)
    fill(views, 100)
    with loglib.group([clicks, views], "etl") as group:
        assert len(list(group.follow(timeout=0.0))) == 100
    views.close()
    shutil.rmtree(tmp_path / "views")
    views = open_topic(tmp_path / "views", partitions=1)
    fill(views, 150, first=1000)
    with loglib.group([clicks, views], "etl") as group:
        assert group.lag(count_records=True)[TopicPartition("views", 0)].records == 150
        for _ in range(2):
            with pytest.raises(LogReplacedError, match="views-0 is not the log in which offset") as caught:
                group.poll()
        assert caught.value.partition == "views-0" and group.assignment == []
    with loglib.group([clicks, views], "etl", on_out_of_range="start") as group:
        assert [int(record.value or b"") for _, record in group.follow(timeout=0.0)] == list(range(1000, 1150))
    with loglib.group([clicks, views], "etl") as group:
        assert group.poll() == []


def test_partition_restored_from_a_backup_and_grown_on_is_not_read_from_the_old_place(
    open_topic: Opener, topic: Topic, path: Path, tmp_path: Path
) -> None:
    topic.flush()
    backup = crash_copy(path / "0000", tmp_path / "backup")
    fill(topic, 10, first=10)
    with topic.group("etl") as group:
        assert len(rest(group)) == 20
    topic.close()
    crash_copy(backup, path / "0000")
    topic = open_topic()
    fill(topic, 30, first=100)
    with topic.group("etl") as group, pytest.raises(LogReplacedError, match="had CRC"):
        group.poll()
    loglib.groups.reset_group(topic, "etl", {0: next_offset(topic, 9)})
    with topic.group("etl") as group:
        assert rest(group) == list(range(100, 130))


def test_backup_with_all_that_was_committed_is_read_on(open_topic: Opener, topic: Topic, path: Path) -> None:
    with topic.group("etl") as group:
        for record in group.follow(timeout=0.0):  # in the midst of a batch, at its border, at the end
            if record.value == b"6":
                break
    topic.close()
    backup = crash_copy(path / "0000", path.parent / "backup")
    topic = open_topic()
    fill(topic, 10, first=10)
    topic.close()
    crash_copy(backup, path / "0000")
    topic = open_topic()
    fill(topic, 2, first=100)
    with topic.group("etl") as group:
        assert rest(group) == [6, 7, 8, 9, 100, 101]
