"""Topic.stats: figures that agree with the log, that only rise where they count, and that change nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from conftest import MANUAL, Clock
from loglib import LogClosedError, StorageFullError, Topic, testing
from loglib.append.flushes import FLUSH_BOUNDS_S, FlushClock
from loglib.metrics import Lag
from loglib.testing import MemoryFiles


def test_stats_are_those_of_the_log(path: Path) -> None:
    with Topic.open(path, create=True, partitions=2, flush=MANUAL) as topic:
        empty = topic.stats()
        assert (empty.topic, empty.size_bytes, empty.segments, empty.oldest) == ("topic", 0, 2, None)
        topic.append_many([b"x" * 100] * 50, partition=0)
        topic.append(b"waits", partition=1)
        topic.flush()
        topic.partition(0).roll()
        topic.append(b"unflushed", partition=1)
        stats = topic.stats()
        first, second = stats.partitions
        for each, partition in zip(stats.partitions, topic.partitions, strict=True):
            assert each.partition == partition.id
            assert (each.log_start_offset, each.high_watermark) == (0, partition.high_watermark)
            assert each.size_bytes == each.appended_bytes == partition.high_watermark
            assert each.segments == len(partition.segments)
        assert (first.appended_records, second.appended_records, stats.appended_records) == (50, 1, 51)
        assert (first.unflushed_bytes, second.unflushed_bytes) == (0, 9)
        assert (first.flush_times.flushes, stats.flushes) == (1, 2)
        assert 0 < first.flush_times.longest <= first.flush_times.seconds < stats.flush_seconds
        assert stats.appended_bytes == stats.size_bytes
        oldest = next(iter(topic.partition(0).batches())).append_time
        assert stats.oldest == first.oldest == oldest


def test_newest_is_the_last_batch_that_readers_see_and_moves_with_it(
    open_topic: Callable[..., Topic], clock: Clock
) -> None:
    topic = open_topic(partitions=2)
    assert topic.stats().newest is None
    expected = []
    for _ in range(3):
        expected.append(clock.now)
        topic.append(b"x", partition=1, sync=True)
        clock.advance(timedelta(seconds=1))
        assert topic.stats().newest == topic.stats().partitions[1].newest == expected[-1]
    topic.append(b"unflushed", partition=1)
    assert topic.stats().newest == expected[-1]
    with Topic.open(topic.path, mode="r") as reader:
        assert [each.newest for each in reader.stats().partitions] == [None, expected[-1]]
    topic.flush()
    topic.partition(1).delete_before(topic.partition(1).high_watermark)
    assert topic.stats().newest is topic.stats().oldest is None, "all was dropped"


def test_rates_are_those_between_two_moments(path: Path) -> None:
    with Topic.open(path, create=True, flush=MANUAL) as topic:
        topic.append(b"before", sync=True)
        earlier = topic.stats()
        topic.append_many([b"x"] * 500)
        topic.flush()
        later = topic.stats()
    rates = later._replace(taken_at=earlier.taken_at + 2).rates_since(earlier)
    assert (rates.records, rates.flushes) == (250, 0.5)
    assert rates.bytes == (later.size_bytes - earlier.size_bytes) / 2
    assert rates.flush_seconds == pytest.approx(later.flush_seconds - earlier.flush_seconds)
    assert earlier.rates_since(earlier) == (0, 0, 0, 0)


def test_lag_of_each_group_is_there(path: Path) -> None:
    with Topic.open(path, create=True, partitions=2, flush=MANUAL) as topic:
        assert topic.stats().lag == {}
        topic.append(b"x", partition=0, sync=True)
        topic.reset_group("behind", "begin")
        topic.reset_group("ahead", "end")
        lag = topic.stats().lag
        assert lag.keys() == {"behind", "ahead"}
        assert lag["behind"][0].bytes == topic.partition(0).high_watermark
        assert lag["behind"][1] == lag["ahead"][0] == Lag(0, 0.0)


def test_reader_and_second_process_see_the_sizes_and_not_the_counters(path: Path) -> None:
    with Topic.open(path, create=True, flush=MANUAL) as topic:
        topic.append(b"x", sync=True)
        topic.partition(0).roll()
        with Topic.open(path, mode="r") as reader:
            (mine,), (others,) = topic.stats().partitions, reader.stats().partitions
    assert others == mine._replace(appended_records=0, appended_bytes=0, flush_times=others.flush_times)
    assert others.flush_times.flushes == 0


def test_reopened_topic_counts_from_zero(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append(b"x", sync=True)
    with Topic.open(path) as topic:
        assert (topic.stats().appended_records, topic.stats().appended_bytes) == (0, 0)
        assert topic.stats().size_bytes > 0


def test_oldest_is_read_again_when_retention_has_dropped(clock: Clock) -> None:
    with testing.open_topic("/topic", files=MemoryFiles(), clock=clock, flush=MANUAL) as topic:
        for _ in range(2):
            clock.now += 1_000_000
            topic.append(b"x", sync=True)
            topic.partition(0).roll()
        assert topic.stats().oldest == clock.now - 1_000_000
        topic.partition(0).delete_before(topic.partition(0).segments[1].base_offset)
        assert topic.stats().oldest == clock.now
        topic.partition(0).delete_before(topic.partition(0).high_watermark)
        assert topic.stats().oldest is None


def test_damage_hides_the_age_and_nothing_else(path: Path) -> None:
    with Topic.open(path, create=True, flush=MANUAL) as topic:
        topic.append(b"x" * 100, sync=True)
        segment = Path(topic.partition(0).segments[0].path)
        content = bytearray(segment.read_bytes())
        content[4096] ^= 1
        segment.write_bytes(content)
        stats = topic.stats()
        assert stats.oldest is None
        assert stats.size_bytes == topic.partition(0).high_watermark


def test_lost_batch_was_never_counted() -> None:
    files = MemoryFiles(capacity=1 << 20)
    with testing.open_topic("/topic", files=files, flush=MANUAL) as topic:
        topic.append(b"x", sync=True)
        before = topic.stats()
        topic.append(bytes(900_000))
        fd = files.create("/others", 0o600)
        files.write_all(fd, [bytes(files.free_space("/")[0] - 4096)], 0)
        with pytest.raises(StorageFullError):
            topic.flush()
        after = topic.stats()
        assert after.partitions == before.partitions


def test_observer_gets_the_time_of_each_flush(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[float] = []

    def fail(seconds: float) -> None:
        raise RuntimeError("exporter")

    with Topic.open(path, create=True, flush=MANUAL) as topic:
        topic.append(b"x", sync=True)
        topic.on_flush(fail)
        topic.on_flush(seen.append)
        topic.append(b"x", sync=True)
        topic.flush()  # there is nothing to flush
        assert len(seen) == 1
        assert sum(seen) < topic.stats().flush_seconds
    assert "observes flushes failed" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    with pytest.raises(LogClosedError):
        topic.on_flush(fail)


def test_flush_times_fall_between_the_bounds() -> None:
    clock = FlushClock()
    for bound in FLUSH_BOUNDS_S:
        clock.note(bound)
    clock.note(11.0)
    clock.note(0.0)
    times = clock.times()
    assert times.counts == (2, *(1,) * len(FLUSH_BOUNDS_S))
    assert (times.flushes, times.longest) == (sum(times.counts), 11.0)


def test_closed_topic_has_no_stats(path: Path) -> None:
    topic = Topic.open(path, create=True)
    topic.close()
    with pytest.raises(LogClosedError):
        topic.stats()


def test_members_count_what_they_hand_out(path: Path) -> None:
    with Topic.open(path, create=True, partitions=1, flush=MANUAL) as topic:
        topic.append_many([b"x"] * 30)
        topic.flush()
        with topic.group("etl") as member:
            assert (member.handed_out, member.topics) == ({}, ["topic"])
            for _ in zip(range(5), member.follow(5), strict=False):
                pass
            assert member.handed_out[0] in (5, 6)
            before = member.handed_out[0]
            polled = len(member.poll(max_records=10, timeout=5))
            assert member.handed_out == {0: before + polled}
            for batch in member.batches(0):
                before += len(batch)
            assert member.handed_out == {0: before + polled}
