"""The writer: what append promises, what flush promises, and what stands after each way of failing."""

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from clock_worlds import Machine
from conftest import MANUAL, NOW, QUIET, SECOND, crash_copy, last_segment, open_files, records_of, tree, values_of
from interrupts import Interrupter, every_point
from loglib import (
    CorruptLogError,
    FlushPolicy,
    ForkedHandleError,
    InvalidOffsetError,
    LogClosedError,
    LogError,
    OffsetOutOfRangeError,
    OffsetRange,
    Position,
    RecordTooLargeError,
    Retention,
    StorageFullError,
    StorageIOError,
    Topic,
    WriterFailedError,
)
from loglib import topic as topic_module
from loglib.append import writer as writer_module
from loglib.format.batch import Columns
from loglib.index import SegmentIndex
from loglib.segment import HEADER_BYTES
from loglib.testing import CHANGES, Call, FaultyFiles, FullDisk, RecordingFiles, ShortWrites, UnsyncedFiles

Open = Callable[..., Topic]


def offsets_of(topic: Topic) -> list[int]:
    return [record.offset for record in topic.read()]


# --- what is appended is what is read ------------------------------------------------------------


def test_append_returns_the_offset_at_which_the_record_is_read(open_topic: Open) -> None:
    topic = open_topic(batch_records=3)
    positions = [topic.append(b"%d" % number) for number in range(10)]
    positions += [
        topic.append(b"k", key=b"key"),
        topic.append(b"h", headers={"a": b"1"}),
        topic.append(b"t", timestamp=5),
    ]
    topic.flush()
    assert [Position(r.partition, r.offset) for r in topic.read()] == positions
    assert topic.partition(0).log_end_offset == topic.partition(0).high_watermark


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 100])
def test_append_many_returns_the_offsets_across_batch_boundaries(count: int, open_topic: Open) -> None:
    topic = open_topic(batch_records=3)
    topic.append(b"before")
    ranges = topic.append_many([b"%d" % number for number in range(count)])
    topic.append(b"after")
    topic.flush()
    records = list(topic.read())
    assert [r.offset for r in records[1:-1]] == [offset for each in ranges for offset in each.offsets]
    assert [r.value for r in records[1:-1]] == [b"%d" % number for number in range(count)]


def test_appending_nothing_appends_nothing(open_topic: Open) -> None:
    topic = open_topic()
    assert topic.append_many([]) == [] == topic.partition(0).append_many([])
    topic.flush()
    assert topic.partition(0).high_watermark == 0


def test_log_end_offset_counts_what_is_buffered(open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"a")
    topic.append(b"b")
    partition = topic.partition(0)
    assert (partition.high_watermark, partition.log_end_offset) == (0, 2)
    assert topic.append(b"c").offset == 2


def test_null_is_not_empty_in_values_and_keys(open_topic: Open) -> None:
    topic = open_topic()
    given = [(None, None), (b"", b""), (None, b""), (b"", None), (b"v", b"k")]
    for value, key in given:
        topic.append(value, key)
    topic.append_many([value for value, _ in given], keys=[key for _, key in given])
    topic.flush()
    assert [(r.value, r.key) for r in topic.read()] == given * 2


def test_columns_of_every_mixture_share_a_batch(open_topic: Open) -> None:
    topic = open_topic()
    given: list[dict[str, Any]] = [
        {}, {"key": b"k"}, {"timestamp": 7}, {"headers": {"a": b"1"}}, {}, {"key": b"", "timestamp": 9},
        {"headers": [("a", b"1"), ("a", b"2")], "timestamp": -1}, {"key": b"k", "headers": {}}, {},
    ]  # fmt: skip
    for index, arguments in enumerate(given):
        topic.append(b"%d" % index, **arguments)
    topic.flush()
    (batch,) = topic.batches()
    assert [r.value for r in batch.records()] == [b"%d" % index for index in range(len(given))]
    assert batch.keys == [each.get("key") for each in given]
    assert batch.timestamps == [each.get("timestamp", NOW) for each in given]
    assert batch.headers[6] == (("a", b"1"), ("a", b"2")) and batch.headers[3] == (("a", b"1"),)
    assert batch.headers[0] == batch.headers[7] == ()


def test_timestamp_is_the_events_and_append_time_the_logs(open_topic: Open, clock: Any) -> None:
    topic = open_topic()
    moment = datetime(2015, 5, 17, 10, 5, tzinfo=UTC)
    topic.append(b"old", timestamp=moment)
    topic.append(b"now")
    topic.flush()
    clock.now -= SECOND  # a clock set back: append times never fall, and event times follow it
    topic.append(b"later")
    topic.flush()
    first, second = topic.batches()
    assert first.records()[0].time == moment and first.timestamps[1] == NOW
    assert first.append_time == second.append_time == NOW and second.timestamps == [NOW - SECOND]


def test_one_append_in_2037_dates_none_of_the_records_after_it(open_topic: Open, clock: Any) -> None:
    topic = open_topic(segment_bytes=4096)
    year = timedelta(days=365)
    topic.append(b"before", sync=True)
    clock.advance(12 * year)
    topic.append(b"while it was wrong", sync=True)
    clock.advance(-12 * year)
    for _ in range(10):
        clock.advance(timedelta(seconds=1))
        topic.append(b"x" * 900, sync=True)
    topic.append_many([b"many"])
    topic.append(b"with a time", timestamp=NOW)
    topic.append(b"beside it")
    topic.close()
    topic = open_topic()
    topic.append(b"reopened", sync=True)
    times = [record.timestamp for record in topic.read()]
    assert times[2:12] == [NOW + SECOND * number for number in range(1, 11)]
    assert times[12:] == [clock.now, NOW, clock.now, clock.now]
    logged = [batch.append_time for batch in topic.batches()]
    assert logged == sorted(logged), "while the log's own time never falls"
    late = datetime.fromtimestamp(NOW / 1e6 + 7, UTC)
    found = next(iter(topic.read(late)))
    assert found.value == b"while it was wrong", "the first record at or after the time is that of 2037"
    assert topic.partition(0).check()


def test_last_record_of_a_batch_fills_it_exactly(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=1000)
    for _ in range(10):
        topic.append(b"x" * 100)
    assert topic.partition(0).log_end_offset == 10, "ten of a hundred bytes are one batch"
    topic.append(b"y")
    assert topic.partition(0).log_end_offset > 1000
    topic.flush()
    assert [len(batch) for batch in topic.batches()] == [10, 1]


def test_record_larger_than_a_batch_gets_one_of_its_own(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=100)
    values = [b"a", b"b" * 1000, b"c", b"d" * 99, b"e" * 100]
    for value in values:
        topic.append(value)
    topic.flush()
    assert values_of(topic) == values


def test_too_large_a_record_is_refused_and_loses_nothing_else(open_topic: Open) -> None:
    topic = open_topic(max_record_bytes=100)
    topic.append(b"first")
    for refused in (
        lambda: topic.append(b"x" * 101),
        lambda: topic.append(b"x" * 60, key=b"k" * 60),
        lambda: topic.append_many([b"fine", b"x" * 101]),
    ):
        with pytest.raises(RecordTooLargeError, match="101|120") as raised:
            refused()
        assert raised.value.limit_bytes == 100
    topic.append(b"last")
    topic.flush()
    assert values_of(topic) == [b"first", b"last"]


def test_header_name_without_utf8_is_refused_at_once(open_topic: Open) -> None:
    """It used to be found when the batch was encoded, which then failed for ever with all that was in it."""
    topic = open_topic()
    topic.append(b"first")
    with pytest.raises(ValueError):
        topic.append(b"bad", headers={"\ud800": b""})
    topic.append(b"last")
    topic.flush()
    assert values_of(topic) == [b"first", b"last"]


# --- flush policies ------------------------------------------------------------------------------


def test_records_policy_flushes_at_the_nth_record(open_topic: Open) -> None:
    topic = open_topic(flush=FlushPolicy(records=3, interval=None, bytes=None))
    seen = []
    for number in range(7):
        topic.append(b"%d" % number)
        seen.append(len(values_of(topic)))
    assert seen == [0, 0, 3, 3, 3, 6, 6]


def test_records_policy_counts_a_bulk_append(open_topic: Open) -> None:
    topic = open_topic(flush=FlushPolicy(records=3, interval=None, bytes=None))
    topic.append_many([b"x"] * 2)
    assert values_of(topic) == []
    topic.append_many([b"y"] * 2)
    assert len(values_of(topic)) == 4


@pytest.mark.parametrize("how", ["one by one", "in bulk", "with keys"])
def test_bytes_policy_flushes_after_that_many_bytes(how: str, open_topic: Open) -> None:
    topic = open_topic(flush=FlushPolicy(records=None, interval=None, bytes=2000))
    for _ in range(60):
        if how == "one by one":
            topic.append(b"x" * 100)
        elif how == "in bulk":
            topic.append_many([b"x" * 100])
        else:
            topic.append(b"x" * 100, key=b"k")
        unflushed = topic.partition(0).log_end_offset - topic.partition(0).high_watermark
        assert unflushed < 2000 + 200
    assert 38 <= len(values_of(topic)) <= 60


def test_bytes_policy_counts_whole_batches_of_bulk_appends(open_topic: Open) -> None:
    topic = open_topic(flush=FlushPolicy(records=None, interval=None, bytes=100), batch_bytes=100)
    topic.append_many([b"x" * 60] * 4)
    assert len(values_of(topic)) == 4


def test_without_a_policy_only_flush_flushes(open_topic: Open, path: Path) -> None:
    topic = open_topic(batch_records=2)
    for _ in range(9):
        topic.append(b"x")
    assert values_of(topic) == []
    topic.flush()
    assert len(values_of(topic)) == 9
    topic.append(b"y", sync=True)
    assert len(values_of(topic)) == 10
    topic.append(b"z")
    topic.close()
    assert len(records_of(path)) == 11


def test_flush_syncs_the_segment_before_it_publishes(open_topic: Open) -> None:
    files = RecordingFiles()
    topic = open_topic(files=files)
    topic.append(b"x")
    files.calls.clear()
    topic.flush()
    segment = "00000000000000000000.log"
    assert files.named(*CHANGES) == [("pwritev", segment), ("datasync", segment), ("pwritev", "watermark")]
    files.calls.clear()
    topic.flush()
    assert files.named(*CHANGES) == [], "nothing to flush, nothing to do"


def test_os_durability_syncs_nothing_until_close(open_topic: Open) -> None:
    files = RecordingFiles()
    topic = open_topic(files=files, durability="os")
    files.calls.clear()
    for _ in range(3):
        topic.append(b"x", sync=True)
    assert files.count("datasync") == 0 and len(values_of(topic)) == 3
    topic.close()
    in_order = [("datasync", "00000000000000000000.log"), ("pwritev", "watermark"), ("datasync", "watermark")]
    assert once_each(files.named(), "datasync", "pwritev")[-3:] == in_order


def once_each(calls: list[tuple[str, str]], *names: str) -> list[tuple[str, str]]:
    """The calls of these names, and of several equal ones in a row the first."""
    chosen = [call for call in calls if call[0] in names]
    return [call for call, before in zip(chosen, [("", ""), *chosen], strict=False) if call != before]


def test_waiting_appends_share_an_fsync(open_topic: Open) -> None:
    """While one thread's fsync runs, fifteen others append and wait: the next one serves them all."""
    begun, go = threading.Event(), threading.Event()
    syncs: list[str] = []

    class Slow(UnsyncedFiles):
        def datasync(self, fd: int) -> None:
            if armed:
                syncs.append(threading.current_thread().name)
                begun.set()
                assert go.wait(60)

    armed = False
    topic = open_topic(files=Slow())
    armed = True
    first = threading.Thread(target=topic.append, args=(b"first",), kwargs={"sync": True})
    first.start()
    assert begun.wait(60)
    writer = topic.partition(0).writer()
    others = [
        threading.Thread(target=topic.append, args=(b"%d" % number,), kwargs={"sync": True}) for number in range(15)
    ]
    for each in others:
        each.start()
    while writer.next_offset - writer.batch.tail.end < 15:  # all have appended; none can have been flushed
        assert all(each.is_alive() for each in others)
    assert values_of(topic) == []
    go.set()
    for each in [first, *others]:
        each.join()
    assert len(syncs) == 2, "one for the first, and one for all that came meanwhile"
    assert len(values_of(topic)) == 16


def test_sixteen_threads_share_fsyncs(open_topic: Open) -> None:
    files = RecordingFiles()
    topic = open_topic(files=files)
    files.calls.clear()

    def run() -> None:
        for number in range(20):
            topic.append(b"%d" % number, sync=True)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(values_of(topic)) == 320
    assert files.count("datasync") < 320 // 2


# --- rolling -------------------------------------------------------------------------------------


def test_segments_roll_by_size_and_their_bases_are_contiguous(open_topic: Open, path: Path) -> None:
    with open_topic(segment_bytes=4096, batch_records=4) as topic:
        for number in range(200):
            topic.append(b"%05d" % number * 10)
    sizes = {int(each.stem): each.stat().st_size - HEADER_BYTES for each in sorted((path / "0000").glob("*.log"))}
    bases = list(sizes)
    assert len(bases) > 3
    assert all(base + sizes[base] == after for base, after in itertools.pairwise(bases))
    assert all(size <= 4096 for size in sizes.values())
    with open_topic() as topic:
        assert topic.partition(0).check().records == 200
        assert len(topic.partition(0).segments) == len(bases)


def test_batch_larger_than_a_segment_gets_a_segment_of_its_own(open_topic: Open) -> None:
    topic = open_topic(segment_bytes=4096)
    for _ in range(3):
        topic.append(b"x" * 10_000)
        topic.flush()
    assert len(topic.partition(0).segments) == 3
    assert topic.partition(0).check().records == 3


def test_segment_rolls_when_its_first_record_is_old(open_topic: Open, clock: Any) -> None:
    topic = open_topic(segment_age=timedelta(hours=1))
    topic.append(b"a")
    topic.flush()
    clock.advance(timedelta(minutes=59))
    topic.append(b"b")
    topic.flush()
    assert len(topic.partition(0).segments) == 1
    clock.advance(timedelta(minutes=1))
    topic.append(b"c")
    topic.flush()
    assert [s.sealed for s in topic.partition(0).segments] == [True, False]
    assert values_of(topic) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("jump", [timedelta(days=400), -timedelta(days=400)], ids=["forward", "back"])
@pytest.mark.parametrize("reopened", [False, True])
def test_jump_of_the_wall_clock_neither_rolls_a_young_segment_nor_keeps_an_old_one(
    jump: timedelta, reopened: bool, open_topic: Open
) -> None:
    machine = Machine()
    topic = open_topic(segment_age=timedelta(hours=1), clock=machine)
    topic.append(b"first", sync=True)
    topic.partition(0).roll()  # so that the header says when, by both clocks
    topic.append(b"a", sync=True)
    machine.error_us = jump // timedelta(microseconds=1)
    if reopened:
        topic.close()
        topic = open_topic(clock=machine)
    machine.true_us += 59 * 60 * SECOND
    topic.append(b"b", sync=True)
    assert len(topic.partition(0).segments) == 2
    machine.true_us += 60 * SECOND
    topic.append(b"c", sync=True)
    assert len(topic.partition(0).segments) == 3


def test_age_of_a_segment_counts_on_after_reopening(open_topic: Open, clock: Any) -> None:
    with open_topic(segment_age=timedelta(hours=1)) as topic:
        topic.append(b"a")
    clock.advance(timedelta(hours=2))
    with open_topic() as topic:
        topic.append(b"b")
        topic.flush()
        assert len(topic.partition(0).segments) == 2


def test_rolling_an_empty_segment_does_nothing(open_topic: Open) -> None:
    topic = open_topic()
    assert not topic.partition(0).roll()
    topic.append(b"x")
    assert topic.partition(0).roll()
    assert not topic.partition(0).roll()
    assert len(topic.partition(0).segments) == 2


def test_each_writer_has_a_higher_epoch(open_topic: Open, path: Path, tmp_path: Path) -> None:
    epochs = []
    for number in range(3):
        with open_topic() as topic:
            topic.append(b"%d" % number)
    topic = open_topic()
    topic.append(b"and one that is killed")
    topic.flush()
    with open_topic(crash_copy(path, tmp_path / "after")) as after:
        after.append(b"the next")
        after.flush()
        epochs = [batch.header.writer_epoch for batch in after.batches()]
    assert epochs == sorted(set(epochs)), "of two batches for one place the later writer's must be known"


def test_roll_makes_everything_durable_in_order(open_topic: Open) -> None:
    files = RecordingFiles()
    topic = open_topic(files=files)
    topic.append(b"x")
    files.calls.clear()
    topic.partition(0).roll()
    old, new = "00000000000000000000.log", f"{topic.partition(0).log_end_offset:020d}.log"
    assert files.named(*CHANGES, "close") == [
        ("pwritev", old), ("datasync", old), ("pwritev", "watermark"), ("datasync", "watermark"),
        ("create", new + ".tmp"), ("pwritev", new + ".tmp"), ("datasync", new + ".tmp"),
        ("rename", new + ".tmp"), ("fsync", "0000"), ("close", old),
    ]  # fmt: skip


def test_failed_roll_leaves_no_file_that_later_batches_run_into(open_topic: Open, path: Path) -> None:
    """The new segment had its name, then syncing the directory failed; smaller batches still fit the old one."""
    files = FaultyFiles("fsync", armed=False)
    topic = open_topic(files=files, segment_bytes=4096)
    topic.append(b"a" * 3000, sync=True)
    files.armed = True
    topic.append(b"b" * 3000)
    with pytest.raises(StorageIOError):
        topic.flush()
    assert files.failed == 1
    topic.append(b"c" * 10, sync=True)
    assert values_of(topic) == [b"a" * 3000, b"c" * 10]
    topic.append(b"d", sync=True)
    topic.close()
    with open_topic() as topic:
        assert topic.partition(0).check().records == 3


@pytest.mark.parametrize("name", ["create", "pwritev", "datasync", "rename", "fsync", "ftruncate", "fstat"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_roll_that_fails_at_any_call_loses_nothing_flushed(name: str, error: int, open_topic: Open, path: Path) -> None:
    for at in range(1, 6):
        if path.exists():
            shutil.rmtree(path)
        files = FaultyFiles(name, at=at, error=error, armed=False)
        topic = open_topic(files=files)
        topic.append(b"a", sync=True)
        files.armed = True
        try:
            topic.partition(0).roll()
        except LogError:
            assert files.failed
        files.armed = False
        expected = [b"a"]
        try:
            topic.append(b"b", sync=True)
            expected.append(b"b")
        except WriterFailedError:
            with pytest.raises(WriterFailedError):
                topic.close()
        topic.close()
        with open_topic() as topic:
            assert values_of(topic) == expected, (name, at)
            topic.partition(0).check()


# --- failing disks -------------------------------------------------------------------------------


def test_failed_fsync_poisons_the_writer_for_ever(open_topic: Open, path: Path) -> None:
    files = FaultyFiles("datasync", armed=False)
    topic = open_topic(files=files)
    topic.append(b"safe", sync=True)
    topic.append(b"doubtful")
    files.armed = True
    with pytest.raises(WriterFailedError, match="a flush failed.*reopen"):
        topic.flush()
    assert files.failed == 1 and isinstance(files.names, tuple)
    partition = topic.partition(0)
    for refused in (
        topic.flush,
        partition.flush,
        partition.roll,
        lambda: topic.append(b"x"),
        lambda: partition.append(b"x", sync=True),
        lambda: topic.append_many([b"x"] * 10),
        lambda: partition.append_many([b"x"], producer=("p", 1)),
        lambda: topic.append(b"x", key=b"k"),
    ):
        with pytest.raises(WriterFailedError) as raised:
            refused()
        assert isinstance(raised.value.error, OSError)
    assert values_of(topic) == [b"safe"], "readers go on"
    with pytest.raises(WriterFailedError):
        topic.close()
    with pytest.raises(LogClosedError):
        topic.append(b"x")
    with open_topic() as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.rewritten_bytes > 0, "the page cache is not believed"
        assert values_of(topic) == [b"safe", b"doubtful"]


def test_failed_publication_poisons_the_writer(open_topic: Open) -> None:
    files = FaultyFiles("pwritev", at=2, armed=False)
    topic = open_topic(files=files)
    topic.append(b"x")
    files.armed = True
    with pytest.raises(WriterFailedError):
        topic.flush()
    with pytest.raises(WriterFailedError):
        topic.append(b"y")
    with pytest.raises(WriterFailedError):
        topic.close()
    with open_topic() as topic:
        assert values_of(topic) == [b"x"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_costs_the_failing_records_only(error: int, open_topic: Open, path: Path) -> None:
    files = FaultyFiles("pwritev", error=error, armed=False)
    topic = open_topic(files=files)
    topic.append(b"before", sync=True)
    size = last_segment(path).stat().st_size
    lost = [topic.append(b"lost %d" % number).offset for number in range(3)]
    files.armed = True
    with pytest.raises(StorageFullError, match="3 buffered records from offset") as raised:
        topic.flush()
    assert raised.value.lost == (OffsetRange(0, range(lost[0], lost[-1] + 1)),)
    assert raised.value.errno == error and raised.value.path == str(last_segment(path))
    assert last_segment(path).stat().st_size == size
    assert topic.append(b"after", sync=True).offset == lost[0], "the offsets are given out again"
    assert values_of(topic) == [b"before", b"after"]
    topic.partition(0).check()


def test_io_error_while_writing_costs_the_failing_records_only(open_topic: Open) -> None:
    files = FaultyFiles("pwritev", error=errno.EIO, armed=False)
    topic = open_topic(files=files)
    topic.append(b"lost")
    files.armed = True
    with pytest.raises(StorageIOError, match="writing a batch"):
        topic.flush()
    topic.append(b"after", sync=True)
    assert values_of(topic) == [b"after"]


def test_file_that_cannot_be_cut_back_poisons_the_writer(open_topic: Open) -> None:
    class Stuck(FullDisk):
        def ftruncate(self, fd: int, size: int) -> None:
            if self.room < 500:
                raise OSError(errno.EIO, "stuck")
            os.ftruncate(fd, size)

    files = Stuck(room=1 << 30)
    topic = open_topic(files=files)
    topic.append(b"x" * 1000)
    files.room = 499
    with pytest.raises(WriterFailedError):
        topic.flush()
    with pytest.raises(WriterFailedError):
        topic.append(b"y")
    with pytest.raises(WriterFailedError):
        topic.close()
    with open_topic() as topic:
        assert values_of(topic) == []


def test_disk_that_fills_at_any_byte_never_shows_a_failed_record(open_topic: Open, path: Path) -> None:
    open_topic().close()
    files = FullDisk(room=1 << 30)
    topic = Topic.open(path, files=files)
    topic.append(b"first", sync=True)
    expected: list[bytes | None] = [b"first"]
    for room in range(0, 700, 13):
        files.room = room
        appended = []
        try:
            for number in range(3):
                appended.append(b"%d %d" % (room, number))
                topic.append(appended[-1])
            topic.flush()
            expected += appended
        except StorageFullError as error:
            assert [len(each.offsets) for each in error.lost] == [3]
            assert last_segment(path).stat().st_size == HEADER_BYTES + topic.partition(0).high_watermark
        except WriterFailedError:  # the watermark did not fit: not a byte more, in a file that never grows
            files.room = 1 << 30
            with pytest.raises(WriterFailedError):
                topic.close()
            expected += appended
            topic = Topic.open(path, files=files)
        files.room = 1 << 30
        assert values_of(topic) == expected
    assert len(expected) > 10
    topic.close()


def test_disk_that_fills_while_rolling_costs_the_failing_records_only(open_topic: Open, path: Path) -> None:
    open_topic(segment_bytes=4096).close()
    outcomes = set()
    for room in range(0, 8000, 400):
        files = FullDisk(room=1 << 30)
        topic = Topic.open(path, files=files)
        expected = [*values_of(topic), b"a" * 3000]
        topic.append(b"a" * 3000, sync=True)
        topic.append(b"b" * 3000)
        files.room = room
        try:
            topic.flush()
            expected.append(b"b" * 3000)
            outcomes.add("fits")
        except StorageFullError as error:
            assert [len(each.offsets) for each in error.lost] == [1]
            outcomes.add("full")
        except WriterFailedError:  # the watermark did not fit
            outcomes.add("failed")
        files.room = 1 << 30
        try:
            topic.append(b"c", sync=True)
            expected.append(b"c")
            topic.close()
        except WriterFailedError:
            with pytest.raises(WriterFailedError):
                topic.close()
        with open_topic() as topic:
            assert values_of(topic)[: len(expected)] == expected
            topic.partition(0).check()
    assert outcomes == {"fits", "full", "failed"}


def test_bulk_append_that_fails_midway_says_where(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=1000, files=FaultyFiles("pwritev", at=3, error=errno.ENOSPC, armed=False))
    topic.partition(0)._files.armed = True  # type: ignore[attr-defined]
    with pytest.raises(StorageFullError) as raised:
        topic.append_many([b"%03d" % number * 100 for number in range(100)])
    topic.flush()
    values = values_of(topic)
    assert values == [b"%03d" % number * 100 for number in range(len(values))] and values
    assert raised.value.lost == ()  # nobody had been given an offset of these
    assert [offset for each in raised.value.appended for offset in each.offsets] == offsets_of(topic)
    assert raised.value.not_appended == tuple(range(len(values), 100))


def test_waiter_learns_that_another_threads_flush_lost_its_record(open_topic: Open) -> None:
    """The record was buffered, another thread's flush found the disk full, and the offset was given out again."""
    held, go = threading.Event(), threading.Event()

    class Held(FaultyFiles):
        def datasync(self, fd: int) -> None:
            if self.armed and not go.is_set():
                held.set()
                assert go.wait(60)

    files = Held("pwritev", at=3, error=errno.ENOSPC, armed=False)  # the batch, the mark, then the next batch
    topic = open_topic(files=files)
    files.armed = True
    results: dict[str, object] = {}

    def append(name: str) -> None:
        try:
            results[name] = topic.append(name.encode(), sync=True)
        except StorageFullError as error:
            results[name] = error

    first = threading.Thread(target=append, args=("first",))
    first.start()
    assert held.wait(60)
    writer = topic.partition(0).writer()
    others = [threading.Thread(target=append, args=(name,)) for name in ("second", "third")]
    for each in others:
        each.start()
    while writer.next_offset - writer.batch.tail.end < 2:
        assert all(each.is_alive() for each in others)
    go.set()
    for each in [first, *others]:
        each.join()
    assert isinstance(results["first"], Position)
    assert isinstance(results["second"], StorageFullError) and isinstance(results["third"], StorageFullError)
    assert topic.append(b"again", sync=True)
    assert values_of(topic) == [b"first", b"again"]


def test_short_writes_are_carried_on(open_topic: Open, path: Path) -> None:
    with open_topic(files=ShortWrites()) as topic:
        for number in range(20):
            topic.append(b"%d" % number * 30, key=b"k", headers={"h": b"v"})
    assert [r.value for r in records_of(path)] == [b"%d" % number * 30 for number in range(20)]


def test_background_error_is_raised_by_the_next_call_and_only_there(open_topic: Open) -> None:
    topic = open_topic()
    writer = topic.partition(0).writer()
    for call in (
        lambda: topic.append(b"x"),
        topic.flush,
        lambda: topic.append_many([b"x"] * 3),
        lambda: topic.append(b"x", key=b"k"),
        lambda: topic.partition(0).append_many([b"x"], producer=("p", 1)),
        topic.partition(0).roll,
    ):
        topic.append(b"fine")
        writer.raise_soon(LogError("something in the background"))
        with pytest.raises(LogError, match="something in the background"):
            call()
    topic.append(b"fine")
    writer.raise_soon(LogError("at the end"))
    with pytest.raises(LogError, match="at the end"):
        topic.close()
    topic.close()
    with open_topic() as topic:
        assert values_of(topic) == [b"fine"] * 7


# --- interrupted close ---------------------------------------------------------------------------


def test_close_is_idempotent_and_refuses_everything_after(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    partition = topic.partition(0)
    topic.append(b"x")
    topic.close()
    topic.close()
    for refused in (
        lambda: topic.append(b"y"), lambda: partition.append(b"y"), topic.flush, partition.flush, partition.roll,
        topic.read, topic.follow, topic.retain, lambda: list(partition.read()), lambda: topic.append(b"y", key=b"k"),
    ):  # fmt: skip
        with pytest.raises(LogClosedError):
            refused()
    assert len(records_of(path)) == 1


def test_interrupted_close_can_be_repeated_and_releases_everything(open_topic: Open, path: Path) -> None:
    class Interrupting(UnsyncedFiles):
        at = 0

        def close(self, fd: int) -> None:
            os.close(fd)
            Interrupting.at -= 1
            if Interrupting.at == 0:
                raise KeyboardInterrupt

    for at in (1, 2, 3):
        before = open_files()
        topic = open_topic(files=Interrupting(), partitions=2)
        topic.append(b"x", partition=0)
        topic.append(b"x", partition=1)
        Interrupting.at = at
        with pytest.raises(KeyboardInterrupt):
            topic.close()
        topic.close()
        assert open_files() == before
    with open_topic() as topic:
        assert len(values_of(topic)) == 6


def test_record_appended_while_closing_is_refused_or_written(open_topic: Open, path: Path) -> None:
    """An append used to slip in between close's flush and the release: accepted, and gone."""
    closing, go = threading.Event(), threading.Event()
    armed = False

    class Held(UnsyncedFiles):
        def datasync(self, fd: int) -> None:
            if armed and not closing.is_set():
                closing.set()
                assert go.wait(60)

    topic = open_topic(files=Held())
    topic.append(b"early")
    armed = True
    accepted: list[bytes] = [b"early"]
    closer = threading.Thread(target=topic.close)
    closer.start()
    assert closing.wait(60)

    def append() -> None:
        try:
            topic.partition(0).append(b"late")
            accepted.append(b"late")
        except LogClosedError:
            return

    appender = threading.Thread(target=append)
    appender.start()
    go.set()
    closer.join()
    appender.join()
    assert [r.value for r in records_of(path)] == accepted


def test_file_left_longer_by_an_interrupted_write_is_trimmed_at_close(open_topic: Open, path: Path) -> None:
    class Interrupted(UnsyncedFiles):
        armed = False

        def write_all(self, fd: int, parts: Any, position: int) -> int:
            count = super().write_all(fd, parts, position)
            if self.armed:
                raise KeyboardInterrupt
            return count

    files = Interrupted()
    for roll in (False, True):
        topic = open_topic(files=files)
        topic.append(b"kept", sync=True)
        files.armed = True
        with pytest.raises(KeyboardInterrupt):
            topic.partition(0).append_many([b"given up"] * 3, producer=("p", 1))
        files.armed = False
        if roll:
            topic.partition(0).roll()
        topic.close()
        with open_topic() as topic:
            recovery = topic.partition(0).recovery
            assert recovery is not None and recovery.clean
    assert [r.value for r in records_of(path)] == [b"kept"] * 2


# --- retention, as far as the writer does it -----------------------------------------------------


def segments_of_one_record(topic: Topic, count: int, clock: Any = None, step: timedelta = timedelta(days=1)) -> None:
    for number in range(count):
        topic.partition(0).append(b"%d" % number, timestamp=NOW)
        topic.partition(0).flush()
        if clock is not None:
            clock.advance(step)
        topic.partition(0).roll()


def test_segment_may_be_filled_to_the_byte(open_topic: Open, path: Path) -> None:
    """`segment_bytes` is the most that a segment holds, and a batch that fills it does not need another."""
    value = b"x" * 2000
    with open_topic(path / "probe") as topic:
        topic.append(value, sync=True)
        size = topic.partition(0).high_watermark
    for limit, expected in ((3 * size - 1, [2, 2, 2]), (3 * size, [3, 3]), (3 * size + 1, [3, 3])):
        with open_topic(path / f"of-{limit}", segment_bytes=limit) as topic:
            for _ in range(6):
                topic.append(value, sync=True)
            assert [each.size_bytes for each in topic.partition(0).segments] == [count * size for count in expected]


def test_log_start_is_durable_before_the_first_file_goes(open_topic: Open) -> None:
    files = RecordingFiles()
    topic = open_topic(files=files, retention=Retention(age=None, bytes=0))
    segments_of_one_record(topic, 3)
    names = [os.path.basename(each.path) for each in topic.partition(0).segments[:3]]
    files.calls.clear()
    topic.retain()
    calls = once_each(files.named(), "pwritev", "datasync", "unlink", "fsync")
    removed = calls.index(("unlink", names[0]))
    assert calls[:2] == [("pwritev", "watermark"), ("datasync", "watermark")] and removed >= 2
    assert {call for call in calls[:removed] if call[0] != "unlink"} == set(calls[:2])
    assert calls[removed:] == [*[("unlink", name) for name in names], ("fsync", "0000")]


def test_retention_that_dies_anywhere_leaves_no_gap(open_topic: Open, path: Path, tmp_path: Path) -> None:
    from loglib.testing import DyingFiles, Killed

    with open_topic(retention=Retention(age=None, bytes=0)) as topic:
        segments_of_one_record(topic, 3)
        topic.append(b"last")
    at = 0
    while True:
        at += 1
        copy = crash_copy(path, tmp_path / "copy")
        dying = DyingFiles(1 << 30)
        topic = Topic.open(copy, files=dying, retention=None)
        dying.changes, dying.at = 0, at
        died = False
        try:
            topic.retain()
        except Killed:
            died = True
        image = crash_copy(copy, tmp_path / "image")
        dying.at = 1 << 30
        topic.close()
        with Topic.open(image) as recovered:
            assert values_of(recovered)[-1:] == [b"last"]
            recovered.partition(0).check()
            start = recovered.partition(0).log_start_offset
            assert min(int(each.stem) for each in (image / "0000").glob("*.log")) == start
        if not died:
            break
    assert at >= 7


def test_dropping_nothing_or_too_much_does_nothing(open_topic: Open) -> None:
    topic = open_topic()
    segments_of_one_record(topic, 2)
    writer = topic.partition(0).writer()
    assert writer.drop_before(0) == []
    assert writer.drop_before(10_000_000) == []
    assert len(writer.drop_before(topic.partition(0).segments[1].base_offset)) == 1


def test_listing_while_segments_are_dropped_does_not_move_the_log_start_back(open_topic: Open, path: Path) -> None:
    """It brought their bases back, and a pass that had decided earlier published its older start: no way to open."""
    listed: list[list[int]] = []

    class ListedMeanwhile(UnsyncedFiles):
        """Another thread lists the directory when the new log start is out and the first file is not yet gone."""

        def unlink(self, path: str, **within: Any) -> None:
            if path.endswith(".log") and not listed:
                log = topic.partition(0).log
                log.refresh()
                listed.append(log.index.bases())
            super().unlink(path, **within)

    topic = open_topic(files=ListedMeanwhile())
    segments_of_one_record(topic, 5)
    topic.append(b"last", sync=True)
    bases = [each.base_offset for each in topic.partition(0).segments]
    writer = topic.partition(0).writer()
    assert len(writer.drop_before(bases[3])) == 3
    assert writer.drop_before(bases[1]) == []  # decided when the log began further back
    topic.partition(0).log.refresh()
    assert topic.partition(0).log_start_offset == bases[3]
    assert [each.base_offset for each in topic.partition(0).segments] == bases[3:]
    assert values_of(topic) == values_of(topic, "-1h") == [b"3", b"4", b"last"]
    topic.close()
    with open_topic() as topic:
        assert topic.partition(0).log_start_offset == bases[3]
        assert values_of(topic) == [b"3", b"4", b"last"]
    assert listed == [bases]


def test_pass_that_decided_earlier_does_not_drop_less(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the index says: the published log start is looked at where it is moved."""
    topic = open_topic()
    segments_of_one_record(topic, 4)
    bases = [each.base_offset for each in topic.partition(0).segments]
    writer = topic.partition(0).writer()
    writer.drop_before(bases[2])
    monkeypatch.setattr(writer.disk, "_index", SegmentIndex(bases))
    assert writer.drop_before(bases[1]) == []
    assert topic.partition(0).log_start_offset == bases[2]


def test_pass_that_ended_half_way_is_finished_by_the_next(open_topic: Open, path: Path) -> None:
    """Its files stayed until the topic was opened again."""

    class FailingOnce(UnsyncedFiles):
        left = 1

        def unlink(self, path: str, **within: Any) -> None:
            if path.endswith(".log"):
                self.left -= 1
                if self.left == -1:
                    raise OSError(errno.EIO, "not now")
            super().unlink(path, **within)

    topic = open_topic(files=FailingOnce())
    segments_of_one_record(topic, 4)
    bases = [each.base_offset for each in topic.partition(0).segments]
    with pytest.raises(OSError, match="not now"):
        topic.partition(0).writer().drop_before(bases[2])
    assert topic.partition(0).log_start_offset == bases[2]
    assert values_of(topic) == [b"2", b"3"]
    topic.partition(0).writer().drop_before(bases[3])
    assert sorted(int(each.stem) for each in (path / "0000").glob("*.log")) == bases[3:]


def test_segment_that_somebody_else_removed_does_not_stop_retention(open_topic: Open) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0))
    segments_of_one_record(topic, 2)
    segments = topic.partition(0).segments
    os.unlink(segments[0].path)
    assert len(topic.partition(0).writer().drop_before(segments[2].base_offset)) == 2


def test_reading_what_retention_dropped_raises_with_the_range(open_topic: Open) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0))
    segments_of_one_record(topic, 3)
    topic.append(b"last", sync=True)
    topic.retain()
    start = topic.partition(0).log_start_offset
    with pytest.raises(OffsetOutOfRangeError) as raised:
        topic.read(0)
    assert (raised.value.log_start_offset, raised.value.high_watermark) == (
        start, topic.partition(0).high_watermark,
    )  # fmt: skip
    assert values_of(topic) == [b"last"]


# --- adopting, and other callers' mistakes -------------------------------------------------------


def test_adopted_batch_must_continue_the_log_if_its_offsets_are_kept(open_topic: Open, tmp_path: Path) -> None:
    source = open_topic()
    source.append_many([b"a", b"b"])
    source.flush()
    source.append(b"c", sync=True)
    first, second = source.batches()
    stored = last_segment(Path(source.path)).read_bytes()[HEADER_BYTES:]
    bodies = [stored[each.header.base_offset + 128 : each.header.next_offset] for each in (first, second)]
    target = open_topic(tmp_path / "target")
    writer = target.partition(0).writer()
    with pytest.raises(InvalidOffsetError):
        writer.adopt([(second.header, bodies[1])], preserve_offsets=True)
    assert writer.adopt([(first.header, bodies[0])], preserve_offsets=True) == range(first.header.next_offset)
    end = second.header.next_offset
    assert writer.adopt([(second.header, bodies[1])], preserve_offsets=True) == range(first.header.next_offset, end)
    target.flush()
    assert values_of(target) == [b"a", b"b", b"c"]
    target.partition(0).check()


def test_wrong_partition_is_a_value_error(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    for number in (-1, 2):
        with pytest.raises(ValueError, match="partitions 0 to 1"):
            topic.append(b"x", partition=number)


def test_failed_open_leaks_nothing_and_leaves_the_lock_free(open_topic: Open, path: Path) -> None:
    open_topic().close()
    content = last_segment(path).read_bytes()
    last_segment(path).write_bytes(content[:100])
    before = open_files()
    for _ in range(3):
        with pytest.raises(CorruptLogError):
            Topic.open(path)
    assert open_files() == before
    last_segment(path).write_bytes(content)
    open_topic().close()
    assert tree(path)


def test_manual_policy_has_no_limit() -> None:
    assert (MANUAL.records, MANUAL.interval, MANUAL.bytes) == (None, None, None)


# --- Ctrl-C at every point -----------------------------------------------------------------------

OLD = [b"old %d" % number for number in range(3)]
NEW = [b"new %d" % number for number in range(3)]


def append_plain(topic: Topic) -> None:
    topic.append(NEW[0])


def append_keyed(topic: Topic) -> None:
    topic.append(NEW[0], key=b"k", timestamp=1, headers={"h": b"v"})


def append_sync(topic: Topic) -> None:
    topic.append(NEW[0], sync=True)


def append_many(topic: Topic) -> None:
    topic.append_many(NEW)


def append_many_keyed(topic: Topic) -> None:
    topic.append_many(NEW, keys=[b"k"] * len(NEW))


def append_idempotent(topic: Topic) -> None:
    topic.append_many(NEW, partition=0, producer=("p", 2))


def flush(topic: Topic) -> None:
    topic.flush()


def roll(topic: Topic) -> None:
    topic.partition(0).roll()


def close(topic: Topic) -> None:
    topic.close()


def interrupt_everywhere(
    action: Callable[[Topic], None], path: Path, *, lines_only: bool, error: type[BaseException] = KeyboardInterrupt,
    **policies: Any,
) -> int:  # fmt: skip
    """Interrupt the action at each point in turn; afterwards the log must hold what it held, and perhaps the new."""
    new = NEW if "many" in action.__name__ or "idempotent" in action.__name__ else NEW[:1]
    new = new if "append" in action.__name__ else []

    def once(interrupter: Interrupter) -> bool:
        shutil.rmtree(path, ignore_errors=True)
        topic = Topic.open(path, files=UnsyncedFiles(), **(QUIET | policies))
        topic.append(OLD[0], sync=True)
        topic.append_many(OLD[1:2], partition=0, producer=("p", 1))
        topic.append(OLD[2])
        try:
            interrupter.run(lambda: action(topic))
        except error:
            assert interrupter.where
        else:
            topic.close()
            return False
        if action is close:
            topic.close()
            expected: list[list[bytes]] = [OLD]
        else:
            if action is append_idempotent:
                action(topic)
            topic.append(b"later", sync=True)
            cut = len(new) + 1 if action is not append_idempotent else 0
            expected = [[*OLD, *new[:count], b"later"] for count in range(cut)] or [[*OLD, *new, b"later"]]
            assert values_of(topic) in expected, interrupter.where
            topic.close()
        with Topic.open(path, files=UnsyncedFiles()) as topic:
            recovery = topic.partition(0).recovery
            assert recovery is not None and recovery.clean, interrupter.where
            assert values_of(topic) in expected, interrupter.where
            topic.partition(0).check()
        return True

    return len(list(every_point(once, lines_only=lines_only, error=error)))


ACTIONS = [
    append_plain, append_keyed, append_sync, append_many, append_many_keyed, append_idempotent, flush, roll, close,
]  # fmt: skip
POLICIES = [
    pytest.param({}, id="quiet"),
    pytest.param({"flush": FlushPolicy(records=2, interval=None, bytes=None), "batch_records": 2}, id="flushing"),
    pytest.param({"segment_bytes": 4096, "batch_bytes": 100, "batch_records": 1}, id="small"),
]


@pytest.mark.parametrize("action", ACTIONS)
def test_interrupt_at_any_line_leaves_the_log_consistent(action: Callable[[Topic], None], path: Path) -> None:
    assert interrupt_everywhere(action, path, lines_only=True) >= 5



# --- the same, at points chosen by hand ----------------------------------------------------------


class Interrupted(list[Any]):
    """A list that a Ctrl-C meets in the middle of being taken over, or of growing."""

    def __iter__(self) -> Any:
        raise KeyboardInterrupt

    def append(self, item: Any) -> None:
        raise KeyboardInterrupt


def test_interrupt_within_an_append_leaves_the_columns_in_step(open_topic: Open) -> None:
    topic = open_topic()
    writer = topic.partition(0).writer()
    topic.append(b"before")
    with pytest.raises(KeyboardInterrupt):
        writer.append(Columns([b"never"], Interrupted([b"k"])), 6)
    assert topic.append(b"after", key=b"k").offset == 1
    topic.flush()
    assert [(r.value, r.key) for r in topic.read()] == [(b"before", None), (b"after", b"k")]


def test_interrupt_on_the_fast_path_gives_the_offset_out_again(open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"before")
    batch = topic.partition(0).writer().batch
    values, batch.values = batch.values, Interrupted(batch.values)
    with pytest.raises(KeyboardInterrupt):
        topic.append(b"never")
    batch.values = values
    batch.resume()
    assert topic.append(b"after").offset == 1
    topic.flush()
    assert values_of(topic) == [b"before", b"after"]


def test_interrupted_fsync_is_not_believed_and_everything_is_written_again(open_topic: Open) -> None:
    """Its answer may have been an error that nobody read, after which the page cache lies."""

    class Interrupting(RecordingFiles):
        armed = False

        def after(self, call: Call, result: Any) -> Any:
            if self.armed and call.name == "datasync":
                self.armed = False
                raise KeyboardInterrupt
            return super().after(call, result)

    files = Interrupting()
    topic = open_topic(files=files)
    topic.append(b"x" * 1000)
    files.armed = True
    with pytest.raises(KeyboardInterrupt):
        topic.flush()
    assert values_of(topic) == []
    files.calls.clear()
    topic.flush()
    segment = "00000000000000000000.log"
    assert files.named("pwritev", "datasync")[:2] == [("pwritev", segment), ("datasync", segment)]
    assert values_of(topic) == [b"x" * 1000]
    files.calls.clear()
    topic.append(b"y", sync=True)
    assert files.count("pread") == 0, "once is enough"


def test_synced_append_that_meets_a_close_is_flushed_by_it(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    writer = topic.partition(0).writer()
    turn = writer._turn

    class Closing:
        """Lets a close go first."""

        def take(self, *arguments: Any, **keywords: Any) -> Any:
            writer._turn = turn
            closing = threading.Thread(target=topic.close)
            closing.start()
            closing.join()
            return turn.take(*arguments, **keywords)

    writer._turn = Closing()  # type: ignore[assignment]
    assert topic.append(b"x", sync=True).offset == 0
    assert [r.value for r in records_of(path)] == [b"x"]
    with pytest.raises(LogClosedError):
        writer._flush_record(1 << 40)


def test_roll_that_cannot_read_the_producers_costs_the_failing_records_only(open_topic: Open) -> None:
    with open_topic() as topic:
        topic.partition(0).append_many([b"a"], producer=("p", 1))
    files = FaultyFiles("pread", armed=False)
    topic = open_topic(files=files)
    topic.append(b"lost")
    files.armed = True
    with pytest.raises(StorageIOError, match="reading"):
        topic.partition(0).roll()
    topic.append(b"b", sync=True)
    assert topic.partition(0).roll()
    assert [value for value in values_of(topic) if value != b"lost"] == [b"a", b"b"]


def test_segment_that_is_not_old_enough_is_not_rolled(open_topic: Open, clock: Any) -> None:
    topic = open_topic()
    writer = topic.partition(0).writer()
    topic.append(b"x")
    assert not writer.roll(older_than_us=10 * SECOND)
    clock.now += 10 * SECOND
    assert writer.roll(older_than_us=10 * SECOND)


def test_received_batches_are_in_the_interval_as_well(open_topic: Open, tmp_path: Path) -> None:
    source = open_topic()
    source.append(b"x", sync=True)
    with (tmp_path / "stream").open("wb") as stream:
        source.partition(0).transfer(stream, 0)
    target = open_topic(tmp_path / "target", flush=FlushPolicy(records=None, interval=0.001, bytes=None))
    with (tmp_path / "stream").open("rb") as received:
        target.partition(0).receive(received)
    assert [r.value for r in target.follow("begin").poll(timeout=60)] == [b"x"]


def test_abandoned_writer_refuses_and_its_files_are_closed(open_topic: Open) -> None:
    """What happens in a forked child, here without one."""
    before = open_files()
    topic = open_topic(shared=True, partitions=2)
    topic.append(b"x", partition=0)
    writer_module._abandon_writers()
    topic_module._abandon_topics()
    for refused in (
        topic.flush, lambda: topic.append(b"x"), lambda: topic.partition(0).append(b"x"),
        lambda: topic.partition(1).append(b"x"), topic.read, topic.partition(0).flush,
    ):  # fmt: skip
        with pytest.raises(ForkedHandleError):
            refused()
    topic.close()
    assert open_files() == before
    assert values_of(open_topic(mode="r")) == []


def test_flush_that_a_roll_overtakes_does_not_move_the_published_end_back(open_topic: Open) -> None:
    """The roll publishes more than the flush has set out to, while that waits for the disk."""

    class Overtaken(UnsyncedFiles):
        armed = False

        def datasync(self, fd: int) -> None:
            if self.armed:
                self.armed = False
                other.start()
                while writer.flushed_end <= 144:  # until the roll has published
                    threading.Event().wait(0.001)
            super().datasync(fd)

    files = Overtaken()
    topic = open_topic(files=files, segment_bytes=4096, batch_bytes=1024)
    writer = topic.partition(0).writer()
    other = threading.Thread(target=lambda: [topic.append(b"two"), topic.append_many([bytes(5000)])])
    topic.append(b"one")
    files.armed = True
    topic.flush()
    assert writer.flushed_end > 144
    other.join()
