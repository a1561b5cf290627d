"""A partition: facts that agree, raw transfer, retention and its reasons."""

import io
import pickle
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from clock_worlds import Machine

from conftest import MANUAL, NOW, SECOND, Clock, sound, values_of
from loglib import (
    FlushPolicy,
    LogClosedError,
    OffsetRange,
    ReadOnlyError,
    RecordTooLargeError,
    Retention,
    StorageIOError,
    Topic,
)
from loglib.config.quantities import microseconds
from loglib.errors import InvalidOffsetError
from loglib.testing import UnsyncedFiles

Open = Callable[..., Topic]
DAY = timedelta(days=1)


def days(topic: Topic, clock: Clock, count: int, *, timestamp: int | None = None) -> list[int]:
    """A segment for each day; returns their base offsets."""
    bases = []
    partition = topic.partition(0)
    for number in range(count):
        bases.append(partition.append(b"day %d" % number, timestamp=timestamp).offset)
        partition.flush()
        for _ in range(48):
            clock.advance(DAY / 48)
        partition.roll()
    return bases


def test_offsets_of_a_partition_agree(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    partition = topic.partition(0)
    assert (partition.log_start_offset, partition.high_watermark, partition.log_end_offset) == (0, 0, 0)
    partition.append(b"x")
    assert (partition.log_start_offset, partition.high_watermark, partition.log_end_offset) == (0, 0, 1)
    partition.flush()
    end = partition.high_watermark
    assert (partition.log_start_offset, partition.log_end_offset) == (0, end) and end > 0
    with Topic.open(path, mode="r") as reading:
        other = reading.partition(0)
        assert (other.log_start_offset, other.high_watermark, other.log_end_offset) == (0, end, end)
        assert other.recovery is None and partition.recovery is not None
        assert other._access.open_writer is None and partition._access.open_writer is not None


def test_partition_says_where_it_is(open_topic: Open) -> None:
    partition = open_topic(partitions=2).partition(1)
    assert partition.id == 1 and partition.path.endswith("/0001") and partition.path in repr(partition)


def test_reading_side_flushes_nothing(open_topic: Open, path: Path) -> None:
    open_topic().close()
    with Topic.open(path, mode="r") as topic:
        topic.partition(0).flush()
        topic.partition(0)._access.keep_house()


def test_bulk_append_cuts_batches_by_size_and_by_count(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=1000, batch_records=7)
    ranges = topic.partition(0).append_many([b"x" * 100] * 50)
    assert {(type(each), each.partition) for each in ranges} == {(OffsetRange, 0)}
    assert sum(len(each.offsets) for each in ranges) == 50
    assert len(topic.partition(0).append_many([b""] * 20)) == 3
    topic.flush()
    assert [len(b) for b in topic.batches()][-3:] == [7, 7, 6]


def test_large_records_side_by_side_have_batches_of_their_own(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=300, max_record_bytes=400)
    values = [b"small"] * 20 + [b"L" * 400] * 5
    topic.partition(0).append_many(values, keys=[None] * 25)
    topic.flush()
    assert values_of(topic) == values
    assert max(b._header.value_bytes for b in topic.batches()) <= 400


def test_idempotent_batch_beyond_the_limits_is_refused_whole(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = open_topic()
    topic.append(b"before")
    monkeypatch.setattr("loglib.append.writer.MAX_BATCH_BYTES", 1000)
    with pytest.raises(RecordTooLargeError, match="the batch"):
        topic.partition(0).append_many([b"x" * 500] * 3, producer=("p", 1))
    monkeypatch.setattr("loglib.format.header.MAX_RECORDS_PER_BATCH", 2)
    with pytest.raises(ValueError, match="at most 2 records, not 3"):
        topic.partition(0).append_many([b"x"] * 3, producer=("p", 1))
    monkeypatch.undo()
    topic.flush()
    assert values_of(topic) == [b"before"]


# --- transfer --------------------------------------------------------------------------------------


def test_batches_go_from_log_to_log_with_their_offsets(open_topic: Open, tmp_path: Path) -> None:
    source = open_topic(batch_records=3, segment_bytes=4096)
    for number in range(100):
        source.append(b"%d" % number, key=b"k", headers={"h": b"v"}, timestamp=number)
    source.flush()
    target = open_topic(tmp_path / "target", segment_bytes=4096)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        offset = 0
        with ours:
            while offset < source.partition(0).high_watermark:
                offset = source.partition(0).transfer(ours, offset, max_bytes=1500)

    thread = threading.Thread(target=serve)
    thread.start()
    with theirs:
        received = []
        while (got := target.partition(0).receive(theirs, preserve_offsets=True)) is not None:
            received.append(got)
    thread.join()
    target.flush()
    assert received[0].start == 0 and received[-1].stop == source.partition(0).high_watermark
    assert list(target.read()) == list(source.read())
    sound(target.partition(0))


def test_received_batches_continue_another_log(open_topic: Open, tmp_path: Path) -> None:
    source = open_topic(batch_records=2)
    source.append_many([b"a", b"b", b"c"])
    source.flush()
    with (tmp_path / "stream").open("wb") as stream:
        source.partition(0).transfer(stream, 0)
    content = (tmp_path / "stream").read_bytes()
    target = open_topic(tmp_path / "target", flush=FlushPolicy(records=1, interval=None))
    target.append(b"own")
    assert target.partition(0).receive(io.BytesIO(content)) is not None
    with pytest.raises(InvalidOffsetError):
        target.partition(0).receive(io.BytesIO(content), preserve_offsets=True)
    assert values_of(target) == [b"own", b"a", b"b", b"c"]
    sound(target.partition(0))
    assert target.partition(0).receive(io.BytesIO(b"")) is None


# --- retention -------------------------------------------------------------------------------------


def test_age_counts_from_the_sealing_and_drops_whole_segments(open_topic: Open, clock: Clock) -> None:
    topic = open_topic(retention=Retention(age=2 * DAY), files=UnsyncedFiles())
    bases = days(topic, clock, 5)
    decisions = topic.partition(0).retain(dry_run=True)
    assert [each.drop for each in decisions] == [True, True, False, False, False, False]
    assert "sealed 4.0 days ago, the limit is 2 days" in decisions[0].reason
    assert decisions[2].reason == "within all limits at 2.0 days"
    assert decisions[3].reason == "an older segment stays"
    assert decisions[-1].age_us is None and not decisions[-1].drop
    assert len(topic.partition(0).segments) == 6, "a dry run drops nothing"
    assert topic.partition(0).retain() == decisions
    assert topic.partition(0).log_start_offset == bases[2]
    assert values_of(topic) == [b"day 2", b"day 3", b"day 4"]
    assert not Path(decisions[0].path).exists() and Path(decisions[2].path).exists()


@pytest.mark.parametrize("event_time", [0, NOW + 10**15])
def test_event_times_neither_drop_nor_pin(event_time: int, open_topic: Open, clock: Clock) -> None:
    """A backfill of old events stays for its time; an event from the future pins nothing."""
    topic = open_topic(retention=Retention(age=2 * DAY), files=UnsyncedFiles())
    days(topic, clock, 5, timestamp=event_time)
    topic.partition(0).retain()
    assert values_of(topic) == [b"day 2", b"day 3", b"day 4"]


def test_bytes_drop_the_oldest_until_the_rest_fits(open_topic: Open, clock: Clock) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=300), files=UnsyncedFiles())
    days(topic, clock, 5)
    (first, *_) = topic.partition(0).retain()
    assert "the partition holds" in first.reason
    sizes = [each.size_bytes for each in topic.partition(0).segments]
    assert sum(sizes) <= 300 < sum(sizes) + sizes[0]


def test_free_space_is_kept(open_topic: Open, clock: Clock) -> None:
    class Tight(UnsyncedFiles):
        def free_space(self, path: str) -> tuple[int, int]:
            return 1000, 10_000

    topic = open_topic(retention=Retention(age=None, keep_free=0.11), files=Tight())
    days(topic, clock, 5)
    first = topic.partition(0).retain()[0]
    assert first.drop and "1000 bytes free, 1100 must stay free" in first.reason
    assert len(topic.partition(0).segments) == 5, "one is enough"


def test_open_segment_is_never_dropped(open_topic: Open, clock: Clock) -> None:
    topic = open_topic(retention=Retention(age=timedelta(seconds=1), bytes=0, keep_free=0.99))
    topic.append(b"x", sync=True)
    for _ in range(50):
        clock.advance(timedelta(minutes=50))
        topic.retain()
    assert values_of(topic) == [b"x"]


def test_rolling_runs_retention(open_topic: Open) -> None:
    topic = open_topic(segment_bytes=4096, retention=Retention(age=None, bytes=9000), batch_records=1)
    for _ in range(60):
        topic.append(b"x" * 900)
        topic.flush()
    assert topic.partition(0).log_start_offset > 0
    assert sum(each.size_bytes for each in topic.partition(0).segments) < 9000 + 4096


def test_failing_retention_does_not_fail_the_append_that_rolled(open_topic: Open) -> None:
    class NoRemoval(UnsyncedFiles):
        def unlink(self, path: str, *, dir_fd: int) -> None:  # type: ignore[override]
            if path.endswith(".log"):
                raise OSError(5, "no removal")
            super().unlink(path, dir_fd=dir_fd)

    topic = open_topic(files=NoRemoval(), segment_bytes=4096, retention=Retention(age=None, bytes=0), flush=MANUAL)
    topic.append(b"a" * 3000, sync=True)
    topic.append(b"b" * 3000, sync=True)  # rolls
    with pytest.raises(StorageIOError, match="no removal"):
        topic.append(b"c")
    assert values_of(topic) == [b"b" * 3000]


def test_retention_of_a_reader_only_explains(open_topic: Open, clock: Clock, path: Path) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0), files=UnsyncedFiles())
    days(topic, clock, 2)
    with Topic.open(path, mode="r") as reading:
        assert [each.drop for each in reading.partition(0).retain(dry_run=True)] == [True, True, False]
        with pytest.raises(ReadOnlyError):
            reading.partition(0).retain()


def test_partition_of_a_closed_topic_is_closed(open_topic: Open, path: Path) -> None:
    for shared in (False, True):
        topic = open_topic(shared=shared)
        topic.close()
        with pytest.raises(LogClosedError):
            topic.partition(0).append(b"x")
        with pytest.raises(LogClosedError):
            topic.partition(0).append_many([b"x"])


def test_writable_partition_cannot_be_pickled(open_topic: Open) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(open_topic().partition(0))


def test_housekeeping_of_a_closed_partition_does_nothing(open_topic: Open) -> None:
    topic = open_topic(segment_age=timedelta(hours=1))
    topic.append(b"x", sync=True)
    assert [batch.values for batch in topic.partition(0).batches()] == [[b"x"]]
    topic.close()
    topic.partition(0)._access.keep_house()


JUMPS = [
    pytest.param([-10 * DAY], id="back"),
    pytest.param([10 * DAY, -20 * DAY, DAY], id="forward and back"),
    pytest.param([-timedelta(microseconds=NOW)], id="to 1970"),
    pytest.param([-timedelta(microseconds=NOW) - 5 * DAY, 60 * 365 * DAY], id="before 1970, then far ahead"),
]


@pytest.mark.parametrize("jumps", JUMPS)
def test_append_times_never_decrease_whatever_the_clock_does(
    jumps: list[timedelta], open_topic: Open, path: Path, clock: Clock
) -> None:
    topic = open_topic(segment_age=timedelta(hours=1), batch_records=2)
    for jump in jumps:
        for number in range(5):
            topic.append(b"%d" % number)
        topic.flush()
        clock.advance(jump)
        topic.append(b"after the jump", sync=True)
        topic.partition(0).roll()
        topic.append(b"in a new segment", sync=True)
        topic.close()
        topic = open_topic()
        topic.append(b"after reopening", sync=True)
    headers = [batch._header.append_time for batch in topic.batches()]
    assert headers == sorted(headers)
    sound(topic.partition(0))


@pytest.mark.parametrize("jumps", JUMPS)
def test_clock_that_jumps_back_and_forth_drops_nothing_that_is_young(
    jumps: list[timedelta], open_topic: Open
) -> None:
    machine = Machine()
    topic = open_topic(retention=Retention(age=3 * DAY), files=UnsyncedFiles(), clock=machine)
    for number in range(3):
        topic.append(b"%d" % number, sync=True)
        topic.partition(0).roll()
    topic.retain()
    for jump in jumps:
        machine.error_us += jump // timedelta(microseconds=1)
        for _ in range(3):
            assert not any(each.drop for each in topic.retain()), "in none of the passes"
            machine.true_us += SECOND
    machine.error_us = 0
    assert not any(each.drop for each in topic.retain())
    assert values_of(topic) == [b"0", b"1", b"2"]
    machine.true_us += microseconds(3 * DAY)
    assert [each.drop for each in topic.retain()] == [True, True, True, False], "and then it is due at once"
