"""Mirrors: a copy of a topic has its bytes at its offsets, and follows it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mirrored import Meanwhile, assert_same, following, wait_for

import loglib
from conftest import fill, settled_files, start_python, values_of
from loglib import LockedError, LogClosedError, LogError, NotLeaderError, OffsetOutOfRangeError, Retention, Topic
from loglib.copies import Mirror, mirror, mirrors, promote

OpenTopic = Callable[..., Topic]
WRITER = """
    import sys
    from loglib import Topic

    with Topic.open(sys.argv[1], create=True, partitions=2, segment_bytes=1 << 16) as topic:
        for number in range(10_000_000):
            topic.append(b"%d " % number * 20, partition=number % 2, sync=True)
"""
MIRROR = """
    import sys
    import loglib

    loglib.copies.mirror(sys.argv[1], sys.argv[2], follow=True)
"""


# --- what it copies ------------------------------------------------------------------------------------------


def test_copy_has_the_same_bytes_and_goes_on_where_it_was(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=2, segment_bytes=1 << 16)
    copied = 0
    for number in range(4):
        topic.append_many([b"value %d" % each for each in range(3000)], keys=[b"%d" % each for each in range(3000)])
        topic.append_many([None, b"x" * 5000], keys=[b"a", b"b"], headers=[{"h": b"1"}, {}])
        for each in range(200):
            topic.append(b"one %d" % each, sync=True)
        topic.append(b"not flushed")
        report = mirror(topic.path, to)
        copied += report.copied_bytes
        assert report.set_aside == () and report.path == str(to)
        assert report.ends == tuple(each.high_watermark for each in topic.partitions)
        topic.flush()
        assert number or report.copied_bytes == sum(report.ends)
    copied += mirror(topic.path, to).copied_bytes
    assert_same(topic, to)
    assert copied == sum(each.high_watermark for each in topic.partitions)
    assert mirror(topic.path, to).copied_bytes == 0


@pytest.mark.parametrize("compression", ["none", "zlib"])
def test_large_and_compressed_batches(open_topic: OpenTopic, to: Path, compression: str) -> None:
    topic = open_topic(partitions=1, compression=compression, max_record_bytes=4 << 20, segment_bytes=16 << 20)
    for size in (3 << 20, 100, 2 << 20):
        topic.append(random.Random(size).randbytes(size), sync=True)
    topic.append_many([b"%d" % each for each in range(50_000)])
    topic.flush()
    mirror(topic.path, to)
    assert_same(topic, to)


def test_small_files_of_a_partition_come_along(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    mirror(topic.path, to)
    for number in range(130):  # more than a segment's header takes
        topic.append(b"x", producer=(f"p{number}", 1))
    topic.flush()
    topic.partition(0).roll()
    (Path(topic.path) / "0000" / "clock").write_bytes(b"as it is")
    topic.append(b"y", sync=True)
    mirror(topic.path, to)
    assert_same(topic, to)
    for name in ("clock", next(Path(topic.path, "0000").glob("*.producers")).name):
        assert (to / "0000" / name).read_bytes() == (Path(topic.path) / "0000" / name).read_bytes()
    topic.close()
    promote(to)
    with Topic.open(to, create=True) as promoted:
        assert not promoted.append(b"x", producer=("p0", 1)).offset  # known from the source: not appended again


def test_policies_and_new_partitions_come_along(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    with Mirror(topic.path, to) as made:
        made.copy()
        topic.alter(retention=Retention(age=None, bytes=12345))
        made.copy()
        with Topic.open(to, mode="r") as copy:
            assert copy.config.retention.bytes == 12345
        topic.close()
        Topic.add_partitions(topic.path, 3)
        with Topic.open(topic.path, create=True) as grown:
            grown.append(b"x", partition=2, sync=True)
            made.copy()
            assert_same(grown, to)


def test_retention_of_the_source_is_carried_over(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    for _ in range(3):
        fill(topic, 3)
        topic.partition(0).roll()
    mirror(topic.path, to)
    first, second, *_ = [each.base_offset for each in topic.partition(0).segments]
    topic.partition(0).delete_before(second)
    mirror(topic.path, to)
    assert_same(topic, to)
    assert not (to / "0000" / f"{first:020d}.log").exists()


def test_mirror_of_a_topic_that_has_dropped_its_first_segments(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    topic.partition(0).roll()
    topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
    mirror(topic.path, to)
    assert_same(topic, to)
    fill(topic, 3)
    mirror(topic.path, to)
    assert_same(topic, to)


def test_mirror_that_retention_has_overtaken(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    mirror(topic.path, to)
    for _ in range(2):
        fill(topic, 3)
        topic.partition(0).roll()
    topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
    fill(topic, 2)
    with pytest.raises(OffsetOutOfRangeError):
        mirror(topic.path, to)
    with Topic.open(to, mode="r") as copy:
        assert len(values_of(copy)) == 3 and copy.verify().damage == ()
    mirror(topic.path, to, on_divergence="restart")
    assert_same(topic, to)
    assert len(list((to / "0000").glob("*.log"))) == 1
    fill(topic, 2)
    mirror(topic.path, to)
    assert_same(topic, to)


def test_mirror_of_a_mirror(open_topic: OpenTopic, to: Path, tmp_path: Path) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 3)
    mirror(topic.path, to)
    mirror(to, tmp_path / "third" / to.name)
    assert_same(topic, tmp_path / "third" / to.name)


# --- where it may be -------------------------------------------------------------------------------------------


def test_mirror_goes_only_where_nothing_or_its_copy_is(open_topic: OpenTopic, to: Path, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    with pytest.raises(FileNotFoundError):
        mirror(tmp_path / "nothing", to)
    assert not to.exists()
    with Topic.open(tmp_path / "other", create=True) as other:
        fill(other, 2)
    with pytest.raises(NotLeaderError, match="no mirror"):
        mirror(topic.path, other.path)
    with pytest.raises(NotLeaderError):
        mirror(topic.path, topic.path)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine").write_text("x")
    with pytest.raises(LogError, match="holds files but no copy"):
        mirror(topic.path, tmp_path / "files")
    loglib.copies.snapshot(topic.path, tmp_path / "snapshot")  # its sealed segments are those of the topic
    with pytest.raises(LogError, match="new directory"):
        mirror(topic.path, tmp_path / "snapshot")
    for wrong in ({"on_divergence": "ignore"}, {"bytes_per_second": 0}):
        with pytest.raises(ValueError, match="not"):
            Mirror(topic.path, to, **wrong)


def test_copy_has_one_mirror_and_no_writer(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=2)
    with Mirror(topic.path, to) as made:
        with pytest.raises(LockedError):
            mirror(topic.path, to)
        made.copy()
        with pytest.raises(NotLeaderError, match="is a mirror of"):
            Topic.open(to, create=True)
        with pytest.raises(LockedError):
            promote(to)
        assert repr(made) == f"<Mirror of {topic.path!r} in {str(to)!r}>"
    made.close()
    with pytest.raises(LogClosedError):
        made.copy()


# --- following -------------------------------------------------------------------------------------------------


def test_following_mirror_shows_each_record_soon(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=2)
    with following(topic.path, to) as made:
        wait_for((to / "topic.json").exists, "the copy is made")
        with Topic.open(to, mode="r") as copy:
            for number in range(50):
                end = topic.append(b"%d" % number, partition=number % 2, sync=True)
                part = copy.partition(number % 2)
                while part.high_watermark <= end.offset:
                    time.sleep(0)
            wait_for(lambda: made.lag().bytes == 0, "nothing is behind")
            assert made.lag().seconds == 0.0
            with topic.group("etl") as group:
                group.poll(max_records=7, timeout=10)
                group.commit()
                committed = topic.group_info("etl").committed
            wait_for(lambda: "etl" in copy.groups() and copy.group_info("etl").committed == committed, "the commit")
    assert_same(topic, to)


def grown_copy(to: Path) -> list[int]:
    with Topic.open(to, mode="r") as copy:
        return [each.high_watermark for each in copy.partitions]


def test_many_partitions_keep_few_files_open(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=70)
    with topic.group("etl"):
        pass
    before = len(settled_files())
    with Mirror(topic.path, to) as made:
        for number in range(3):
            for partition in (0, 69):
                topic.append(b"%d" % number, partition=partition, sync=True)
                if number == 1:
                    topic.partition(partition).roll()
            made.copy()
        assert len(settled_files()) - before < 2 * 70
    assert_same(topic, to)


def test_mirror_that_has_closed_its_files_goes_on_in_the_next_segment(
    open_topic: OpenTopic, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "_MANY", 0)
    topic = open_topic(partitions=1)
    with Mirror(topic.path, to) as made:
        for _ in range(2):
            topic.append(b"x", sync=True)
            made.copy()
            topic.partition(0).roll()
    assert_same(topic, to)


def test_copy_that_another_mirror_makes_at_the_same_time_is_continued(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)

    def make_it() -> None:
        mirror(topic.path, to)
        fill(topic, 2)

    files = Meanwhile(lambda call: call.name == "rename" and str(to) in call.arguments, make_it)
    with Mirror(topic.path, to, files=files) as made:
        made.copy()
    assert_same(topic, to)
    assert [each.name for each in to.parent.iterdir()] == [to.name]


def test_waking_a_mirror_for_nothing_does_no_harm(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    with following(topic.path, to) as made:
        for _ in range(20):
            made._origin.wake()
            time.sleep(0.01)
        topic.append(b"x", sync=True)
        wait_for(lambda: grown_copy(to)[0] > 0, "the record is copied")


def test_following_mirror_meets_new_partitions(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    with following(topic.path, to):
        topic.close()
        Topic.add_partitions(topic.path, 2)
        with Topic.open(topic.path, create=True) as grown:
            grown.append(b"x", partition=1, sync=True)
            wait_for(lambda: list(to.glob("0001/*.log")), "the partition is made")
            wait_for(lambda: len(grown_copy(to)) == 2, "it is known")
            wait_for(lambda: grown_copy(to)[1], "its record is copied")


def test_speed_is_limited_and_closing_does_not_wait(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    topic.append_many([b"x" * 1000] * 4000)
    topic.flush()
    with following(topic.path, to, bytes_per_second=1 << 10) as made:  # the rest would take an hour, and it must end
        wait_for(lambda: made.lag().bytes, "something is left")
        time.sleep(0.2)
        assert made.lag().bytes > 1 << 20 and made.lag().seconds > 0


def test_kill_at_any_time_of_source_and_mirror(path: Path, to: Path) -> None:
    chance = random.Random(5)
    for _ in range(3):
        writer = start_python(WRITER, path)
        wait_for((path / "topic.json").exists, "the topic is made")
        copier = start_python(MIRROR, path, to)
        time.sleep(chance.uniform(0.2, 1.5))
        for process in chance.sample([writer, copier], 2):
            process.kill()
            process.communicate()
        if (to / "topic.json").exists():
            with Topic.open(to, mode="r") as copy:
                assert copy.verify().damage == ()
    with Topic.open(path, create=True) as topic:
        assert mirror(path, to).set_aside == ()
        assert_same(topic, to)
        assert all(each.high_watermark for each in topic.partitions)
