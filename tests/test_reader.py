"""Readers: where they start, how far they go, what wakes them, and what ends them."""

import gc
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from builders import forged
from conftest import (
    NOW,
    QUIET,
    SECOND,
    Clock,
    needs_proc,
    needs_root,
    open_files,
    run_python,
    start_python,
    tree,
    values_of,
)
from loglib import (
    CorruptLogError,
    FlushPolicy,
    InvalidOffsetError,
    LogClosedError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    Retention,
    StorageIOError,
    Topic,
)
from loglib.records import to_datetime
from loglib.segment import Identity
from loglib.testing import Call, FaultyFiles, RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]


def fill(topic: Topic, count: int, *, partition: int = 0, step: int = SECOND) -> list[int]:
    """Append records with rising times, flushed; returns their offsets."""
    offsets = [
        topic.append(b"%d" % number, partition=partition, timestamp=NOW + number * step).offset
        for number in range(count)
    ]
    topic.flush()
    return offsets


# --- read ----------------------------------------------------------------------------------------


def test_read_ends_at_the_end_as_of_now(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 5)
    reader = topic.read()
    topic.append(b"too late", sync=True)
    assert [r.value for r in reader] == [b"%d" % n for n in range(5)]
    assert list(reader) == [] and reader.poll() == []


def test_reader_sees_only_what_is_flushed(open_topic: Open) -> None:
    topic = open_topic(batch_records=2)
    for _ in range(5):
        topic.append(b"x")  # two batches are written, but not flushed
    assert values_of(topic) == []
    assert topic.follow("begin").poll() == []
    topic.flush()
    assert len(values_of(topic)) == 5


@pytest.mark.parametrize("mode", ["a", "r"])
def test_every_form_of_start_finds_its_record(mode: str, open_topic: Open, path: Path, clock: Clock) -> None:
    with open_topic(batch_records=3, segment_bytes=4096) as topic:
        offsets = fill(topic, 60)
    clock.now = NOW + 59 * SECOND
    topic = open_topic(mode=mode)
    forms: list[tuple[Any, int]] = [
        ("begin", 0),
        ("end", 60),
        (offsets[0], 0),
        (offsets[31], 31),
        (to_datetime(NOW + 31 * SECOND), 31),
        (to_datetime(NOW + 31 * SECOND - 1), 31),
        (to_datetime(NOW + 31 * SECOND + 1), 32),
        (to_datetime(NOW - 10**12), 0),
        (to_datetime(NOW + 10**12), 60),
        (datetime.fromtimestamp(NOW // SECOND + 7, UTC), 7),
        (timedelta(seconds=9), 50),
        (timedelta(seconds=-9), 50),
        ("-9s", 50),
        ("-1m", 0),
        ("-0s", 59),
        ({0: offsets[12]}, 12),
        ({0: "-9s"}, 50),
    ]
    for start, index in forms:
        expected = [b"%d" % n for n in range(index, 60)]
        assert values_of(topic, start) == expected, start
        assert values_of(topic.partition(0), start) == expected, start
        assert [v for batch in topic.batches(start) for v in batch.values] == expected, start
        assert [r.value for r in topic.follow(start, timeout=0)] == expected, start
    assert values_of(topic, topic.partition(0).high_watermark) == []
    topic.close()


def test_end_bounds_what_is_read(open_topic: Open) -> None:
    topic = open_topic(batch_records=3)
    offsets = fill(topic, 20)
    for start, end in [(0, 20), (0, 7), (4, 5), (5, 5), (7, 6), (3, 9)]:
        stop = offsets[end] if end < 20 else "end"
        expected = [b"%d" % n for n in range(start, end)]
        assert [r.value for r in topic.read(offsets[start], stop)] == expected
        assert [v for batch in topic.batches(offsets[start], stop) for v in batch.values] == expected
    assert [r.value for r in topic.read("begin", to_datetime(NOW + 3 * SECOND))] == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (datetime(2020, 1, 1), ValueError),  # noqa: DTZ001
        ("start", ValueError),
        ("-5 minutes", ValueError),
        (1.5, TypeError),
        (None, TypeError),
        (b"begin", TypeError),
        (True, TypeError),
        ({1: "begin"}, ValueError),
    ],
)
def test_bad_start_is_refused(start: Any, error: type[Exception], open_topic: Open) -> None:
    topic = open_topic()
    for read in (topic.read, topic.follow, topic.partition(0).read, topic.partition(0).follow):
        with pytest.raises(error):
            read(start)
    with pytest.raises(error):
        topic.batches(start)
    with pytest.raises(error):
        topic.read().seek(start)


def test_offset_outside_the_log_raises_with_the_valid_range(open_topic: Open) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0))
    fill(topic, 4)
    topic.partition(0).roll()
    fill(topic, 4)
    topic.retain()
    start, end = topic.partition(0).log_start_offset, topic.partition(0).high_watermark
    assert 0 < start < end
    for offset in (0, start - 1, end + 1, 1 << 62, -1):
        with pytest.raises(OffsetOutOfRangeError) as raised:
            topic.read(offset)
        assert (raised.value.offset, raised.value.log_start_offset, raised.value.high_watermark) == (offset, start, end)
        assert isinstance(raised.value, LookupError)


def test_offset_of_no_record_raises_with_its_neighbours(open_topic: Open) -> None:
    topic = open_topic(batch_records=2)
    offsets = fill(topic, 6)
    end = topic.partition(0).high_watermark
    for offset in range(end):
        if offset in offsets:
            assert next(iter(topic.read(offset))).offset == offset
            continue
        with pytest.raises(InvalidOffsetError) as raised:
            topic.read(offset)
        around = raised.value
        assert around.offset == offset and around.batch_offsets.stop <= offset < around.next_offset
        assert around.next_offset in (*offsets, end)


def test_one_offset_for_several_partitions_is_refused(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    with pytest.raises(ValueError, match="another record in each partition"):
        topic.read(0)
    fill(topic, 2, partition=0)
    offsets = fill(topic, 3, partition=1)
    assert [(r.partition, r.value) for r in topic.read({1: offsets[1], 0: "end"})] == [(1, b"1"), (1, b"2")]
    assert len(list(topic.read({1: offsets[2]}))) == 3, "a partition not named is read from its beginning"
    assert len(list(topic.read("begin", {0: 0}))) == 3


def test_partitions_take_turns_and_keep_their_order(open_topic: Open) -> None:
    topic = open_topic(partitions=3)
    for number in range(300):
        topic.append_many([b"%d" % number + b"x" * 20_000], partition=number % 3)
    topic.flush()
    seen = [r.partition for r in topic.read()]
    assert len(seen) == 300 and set(seen[:120]) == {0, 1, 2}
    for partition in range(3):
        numbers = [int(r.value.split(b"x")[0]) for r in topic.read() if r.partition == partition and r.value]
        assert numbers == sorted(numbers)


def test_topic_without_records_reads_as_empty(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    assert list(topic.read()) == [] == list(topic.batches()) == list(topic.follow("begin", timeout=0))
    assert topic.read(timedelta(days=1)).tell() == {0: 0, 1: 0}


# --- poll, seek, tell ----------------------------------------------------------------------------


def test_poll_honours_its_limits(open_topic: Open) -> None:
    topic = open_topic(batch_records=4)
    fill(topic, 10)
    reader = topic.read()
    assert [r.value for r in reader.poll(max_records=3)] == [b"0", b"1", b"2"]
    assert [r.value for r in reader.poll()] == [b"3"], "the rest of the batch"
    assert [r.value for r in reader.poll()] == [b"4", b"5", b"6", b"7"]
    assert [r.value for r in reader.poll(max_records=100)] == [b"8", b"9"]
    assert reader.poll(max_records=100) == []
    reader.seek("begin")
    assert len(reader.poll(max_bytes=5)) == 5, "of one byte each"
    assert len(reader.poll(max_bytes=1)) == 1, "at least one"
    assert len(reader.poll(max_records=2, max_bytes=1 << 20)) == 2
    assert len(reader.poll(max_bytes=1 << 20)) == 2
    with pytest.raises(ValueError, match="max_records"):
        reader.poll(max_records=0)


def test_poll_counts_the_bytes_of_keys(open_topic: Open) -> None:
    topic = open_topic()
    topic.append_many([b"v", None, b"v"], keys=[b"kkkk", b"kkkkk", None])
    topic.flush()
    assert len(topic.read().poll(max_bytes=10)) == 2


def test_poll_waits_for_the_first_record_only(open_topic: Open) -> None:
    topic = open_topic()
    reader = topic.follow()
    assert reader.poll(timeout=0.001) == []
    timer = threading.Timer(0.05, lambda: topic.append(b"x", sync=True))
    timer.start()
    assert [r.value for r in reader.poll(max_records=10, timeout=60)] == [b"x"]
    timer.join()


def test_poll_without_timeout_waits_for_ever(open_topic: Open) -> None:
    topic = open_topic()
    reader = topic.follow()
    threading.Timer(0.05, lambda: topic.append(b"x", sync=True)).start()
    assert [r.value for r in reader.poll(timeout=None)] == [b"x"]


def test_very_long_timeout_is_no_overflow(open_topic: Open, path: Path) -> None:
    with open_topic() as topic, Topic.open(path, mode="r") as other:
        readers = [topic.follow(timeout=1e12), other.follow(timeout=1e12)]
        results: list[bytes | None] = []
        threads = [threading.Thread(target=lambda r=r: results.append(next(iter(r)).value)) for r in readers]
        for each in threads:
            each.start()
        wait_until_waiting(*readers)
        topic.append(b"x", sync=True)
        for each in threads:
            each.join()
        assert results == [b"x", b"x"]


def wait_until_waiting(*readers: Any) -> None:
    while any(reader._waiter is None for reader in readers):
        time.sleep(0)


@pytest.mark.parametrize("how", ["iterate", "poll", "batches"])
def test_tell_and_seek_round_trip_at_every_record(how: str, open_topic: Open) -> None:
    topic = open_topic(batch_records=4)
    offsets = fill(topic, 11)
    end = topic.partition(0).high_watermark
    reader = topic.read()
    assert reader.tell() == {0: offsets[0]}
    for index, offset in enumerate(offsets):
        if how == "iterate":
            assert next(iter(reader)).offset == offset
        elif how == "poll":
            assert reader.poll(max_records=1)[0].offset == offset
        else:
            reader.seek(offset)
            rest = next(reader.batches())
            assert rest.offsets.start == offset and rest.values[0] == b"%d" % index
            reader.seek(offset)
            next(iter(reader))
        following = offsets[index + 1] if index + 1 < len(offsets) else end
        told = reader.tell()
        if (index + 1) % 4:
            assert told == {0: following}
        resumed = topic.read(told)
        assert [r.value for r in resumed] == [b"%d" % n for n in range(index + 1, 11)]
        reader.seek(told)
    assert list(reader) == []


def test_batches_after_partial_iteration_give_the_rest(open_topic: Open) -> None:
    topic = open_topic(batch_records=5)
    offsets = fill(topic, 12)
    reader = topic.read()
    iterator = iter(reader)
    next(iterator), next(iterator)
    batch = next(reader.batches())
    assert batch.values == [b"2", b"3", b"4"] and batch.offsets == range(offsets[2], offsets[4] + 1)
    assert batch.next_offset == offsets[5]
    assert next(iterator).value == b"5", "and a loop goes on behind them"
    assert [b.values for b in reader.batches()] == [[b"6", b"7", b"8", b"9"], [b"10", b"11"]]


def test_records_are_made_a_few_at_a_time_and_all_arrive(open_topic: Open) -> None:
    topic = open_topic()
    topic.append_many([b"%d" % n for n in range(3000)])
    topic.flush()
    reader = topic.read()
    values = [next(iter(reader)).value for _ in range(700)]
    told = reader.tell()
    assert told == {0: 700}
    assert len(next(reader.batches())) == 2300
    reader.seek(told)
    values += [r.value for r in reader]
    assert values == [b"%d" % n for n in range(3000)]


def test_seek_moves_the_partitions_named_and_leaves_the_others(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 4, partition=0)
    fill(topic, 4, partition=1)
    reader = topic.read()
    first = next(iter(reader))
    reader.seek({first.partition: "end"})
    assert {r.partition for r in reader} == {1 - first.partition}
    reader.seek("begin")
    assert len(list(reader)) == 8


def test_failed_seek_changes_nothing(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 4)
    reader = topic.read()
    next(iter(reader))
    with pytest.raises(OffsetOutOfRangeError):
        reader.seek(1 << 40)
    assert [r.value for r in reader] == [b"1", b"2", b"3"]


def test_lag_is_a_subtraction(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 4)
    reader = topic.follow("begin")
    assert reader.lag_bytes() == {0: topic.partition(0).high_watermark}
    list(reader.poll())
    assert reader.lag_bytes() == {0: 0}


# --- follow --------------------------------------------------------------------------------------


def test_follow_starts_at_the_end_and_ends_after_silence(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 3)
    reader = topic.follow(timeout=0.02)
    topic.append(b"new", sync=True)
    assert [r.value for r in reader] == [b"new"]
    assert list(reader) == []


@pytest.mark.parametrize("inotify", [True, False])
def test_follow_survives_rolls_retention_and_writer_restarts(
    inotify: bool, open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inotify:
        monkeypatch.setattr("loglib.system.wait._watch", lambda paths, descriptors: False)
    open_topic(segment_bytes=4096, retention=Retention(age=None, bytes=0)).close()
    with Topic.open(path, mode="r") as reading:
        follower = iter(reading.follow("begin"))
        seen = []
        for round_ in range(4):
            with open_topic() as topic:
                for number in range(20):
                    topic.append(b"%d %d" % (round_, number) + b"x" * 500, sync=True)
                    seen.append(next(follower).value[:5].split(b"x")[0])  # type: ignore[index]
                topic.retain()
        assert seen == [b"%d %d" % (r, n) for r in range(4) for n in range(20)]
        assert reading.partition(0).log_start_offset > 0


def test_follower_in_another_process_wakes_at_a_flush(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    process = start_python(
        """
        import sys
        from loglib import Topic
        with Topic.open(sys.argv[1], mode="r") as topic:
            print("ready")
            for record in topic.follow("begin", timeout=60):
                print(record.value.decode())
                if record.value == b"stop":
                    break
        """,
        path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in range(5):
        topic.append(b"%d" % number, sync=True)
        assert process.stdout.readline() == f"{number}\n"
    topic.append(b"stop", sync=True)
    output, errors = process.communicate(timeout=60)
    assert (output, errors, process.returncode) == ("stop\n", "", 0)


def test_follower_survives_the_writer_being_killed(path: Path) -> None:
    writer = """
        import os, signal, sys
        from loglib import Topic
        topic = Topic.open(sys.argv[1])
        topic.append(sys.argv[2].encode(), sync=True)
        topic.append(b"never flushed")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    Topic.open(path, flush=FlushPolicy(records=None, interval=None, bytes=None)).close()
    with Topic.open(path, mode="r") as topic:
        follower = iter(topic.follow("begin", timeout=60))
        for number in range(3):
            process = start_python(writer, path, number)
            assert process.wait(60) == -signal.SIGKILL
            process.communicate()
            assert next(follower).value == b"%d" % number


def test_close_from_another_thread_ends_a_waiting_follow(open_topic: Open, path: Path) -> None:
    with open_topic() as topic, Topic.open(path, mode="r") as other:
        for source in (topic, other):
            reader = source.follow()
            ended = threading.Event()

            def run(reader: Any = reader, ended: threading.Event = ended) -> None:
                assert list(reader) == []
                ended.set()

            thread = threading.Thread(target=run)
            thread.start()
            wait_until_waiting(reader)
            reader.close()
            thread.join(60)
            assert ended.is_set() and reader.closed
            with pytest.raises(LogClosedError):
                reader.poll()
            with pytest.raises(LogClosedError):
                reader.seek("begin")
            assert list(reader) == [] == list(reader.batches())


@pytest.mark.parametrize("mode", ["a", "r"])
def test_closing_the_topic_ends_its_readers_in_other_threads(mode: str, open_topic: Open, path: Path) -> None:
    """They end; they do not find a closed file, another file under its number, or an empty queue."""
    with open_topic() as topic:
        topic.append_many([b"x" * 100] * 20_000)
    for _ in range(15):
        topic = Topic.open(path, mode=mode)
        failures: list[BaseException] = []
        started = threading.Barrier(5)

        def run(topic: Topic = topic, failures: list[BaseException] = failures, started: Any = started) -> None:
            try:
                reader = topic.follow("begin")
                started.wait()
                for _ in reader:
                    pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for each in threads:
            each.start()
        started.wait()
        topic.close()
        for each in threads:
            each.join(60)
        assert failures == []


def test_close_while_another_thread_reads_never_breaks_it(open_topic: Open) -> None:
    """Closing used to take the queue away between a look at it and the next step."""
    topic = open_topic(batch_records=3)
    topic.append_many([b"x"] * 3000)
    topic.flush()
    for _ in range(60):
        reader = topic.read()
        failures: list[BaseException] = []

        def run(reader: Any = reader, failures: list[BaseException] = failures) -> None:
            try:
                for _ in reader:
                    pass
                list(reader.batches())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        reader.close()
        thread.join(60)
        assert failures == []


def test_closing_reader_in_its_own_loop_ends_the_loop(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 10)
    with topic.read() as reader:
        seen = []
        for record in reader:
            seen.append(record)
            reader.close()
        assert len(seen) == 1


def test_sigint_ends_a_waiting_follow(open_topic: Open, path: Path) -> None:
    open_topic().close()
    for mode in ("r", "a"):
        process = start_python(
            """
            import sys
            from loglib import Topic
            with Topic.open(sys.argv[1], mode=sys.argv[2]) as topic:
                follower = topic.follow()
                follower.poll(timeout=0.01)
                print("waiting")
                try:
                    for record in follower:
                        pass
                except KeyboardInterrupt:
                    print("interrupted")
                    assert follower.poll() == []
            """,
            path,
            mode,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        while "S" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert (output, errors, process.returncode) == ("interrupted\n", "", 0)


@pytest.mark.slow
@pytest.mark.parametrize("use_inotify", [True, False])
def test_idle_follow_costs_next_to_no_cpu(use_inotify: bool, open_topic: Open, path: Path) -> None:
    open_topic().close()
    output = run_python(
        """
        import sys, time
        from loglib import Topic
        from loglib.system import wait
        if sys.argv[2] == "False":
            wait._watch = lambda paths, descriptors: False
        with Topic.open(sys.argv[1], mode="r") as topic:
            follower = topic.follow()
            follower.poll(timeout=0.2)  # until the naps are as long as they get
            cpu, wall = time.process_time(), time.monotonic()
            assert follower.poll(timeout=2.0) == []
            print((time.process_time() - cpu) / (time.monotonic() - wall))
        """,
        path,
        use_inotify,
    )
    assert float(output) < 0.03


# --- damage, and files that go away ----------------------------------------------------------------


def rolled(open_topic: Open, segments: int, **policies: Any) -> tuple[Topic, list[int]]:
    topic = open_topic(retention=Retention(age=None, bytes=0), **policies)
    offsets = []
    for number in range(segments):
        offsets.append(topic.append(b"%d" % number).offset)
        topic.partition(0).roll()
    return topic, offsets


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same handle", "another process's handle"])
def test_reader_overtaken_by_retention_is_told_the_range(elsewhere: bool, open_topic: Open, path: Path) -> None:
    """Its own segment is open and stays readable; the next ones are gone, which is not the end of the file."""
    topic, offsets = rolled(open_topic, 4)
    topic.append(b"last", sync=True)
    source = open_topic(mode="r") if elsewhere else topic
    reader = source.read()
    assert reader.poll()[0].value == b"0"
    for each in topic.partition(0).segments[:3]:
        assert each.sealed
    topic.partition(0).writer().drop_before(offsets[3])
    if elsewhere:
        source.partition(0).log.refresh()
    with pytest.raises(OffsetOutOfRangeError) as raised:
        while reader.poll():
            pass
    assert raised.value.log_start_offset == offsets[3]
    reader.seek("begin")
    assert [r.value for r in reader.poll(max_records=9)] == [b"3", b"last"]


def test_new_reader_racing_retention_is_told_the_range(open_topic: Open, path: Path) -> None:
    topic, offsets = rolled(open_topic, 4)
    with Topic.open(path, mode="r") as reading:
        log = reading.partition(0).log
        stale = log.mark()
        topic.retain()
        with pytest.raises(OffsetOutOfRangeError):
            log.cursor(offsets[1], mark=stale)
        assert log.resolve(reading_time(NOW - 5), mark=stale) == topic.partition(0).log_start_offset
        with pytest.raises(OffsetOutOfRangeError):
            reading.read(offsets[1])


def reading_time(timestamp: int) -> Any:
    from loglib.arguments import Time

    return Time(timestamp)


def test_read_error_is_an_error_and_never_the_end(open_topic: Open, path: Path) -> None:
    with open_topic(batch_records=2) as topic:
        fill(topic, 6)
    files = FaultyFiles("pread", armed=False, every=True)
    with Topic.open(path, mode="r", files=files) as topic:
        reader = topic.read()
        first = reader.poll()
        files.armed = True
        with pytest.raises(StorageIOError, match="watermark"):
            topic.partition(0).log.mark()
        with pytest.raises(StorageIOError):
            topic.read()
        with pytest.raises(StorageIOError):
            reader.seek("begin")
        files.armed = False
        assert [r.value for r in first] + [r.value for r in reader] == [b"%d" % n for n in range(6)]


def test_read_error_in_a_segment_names_file_and_byte(open_topic: Open, path: Path) -> None:
    with open_topic() as topic:
        fill(topic, 6)

    class BadSector(RecordingFiles):
        def before(self, call: Call) -> None:
            if call.name == "pread" and call.arguments[1] >= 4096:
                raise OSError(5, "Input/output error")

    with Topic.open(path, mode="r", files=BadSector()) as topic:
        for _ in range(2):
            with pytest.raises(StorageIOError, match=r"\.log.*reading at byte 4096"):
                list(topic.read())


# --- writes nothing --------------------------------------------------------------------------------


def test_reading_writes_nothing(open_topic: Open, path: Path) -> None:
    with open_topic(segment_bytes=4096, partitions=2) as topic:
        topic.append_many([b"x" * 100] * 200, keys=[b"%d" % n for n in range(200)])
    before = tree(path), {each: each.stat().st_mtime_ns for each in path.rglob("*")}
    files = RecordingFiles()
    with Topic.open(path, mode="r", files=files) as topic:
        assert len(values_of(topic)) == 200
        list(topic.follow("begin", timeout=0.01))
        topic.partition(0).check()
        topic.retain(dry_run=True)
        for refused in (
            lambda: topic.append(b"x"), lambda: topic.append_many([b"x"]), topic.flush, topic.retain,
            lambda: topic.append(b"x", key=b"k"), topic.partition(0).roll, lambda: topic.partition(0).append(b"x"),
        ):  # fmt: skip
            with pytest.raises(ReadOnlyError):
                refused()
    assert (
        files.count("create", "open_write", "pwritev", "ftruncate", "rename", "unlink", "datasync", "flock") == 0
    )
    assert before == (tree(path), {each: each.stat().st_mtime_ns for each in path.rglob("*")})


@needs_root
def test_read_only_mount_can_be_read(open_topic: Open, path: Path, tmp_path: Path) -> None:
    with open_topic() as topic:
        fill(topic, 3)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    import subprocess

    subprocess.run(["mount", "--bind", path, mounted], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", mounted], check=True)
        with Topic.open(mounted, mode="r") as topic:
            assert values_of(topic) == [b"0", b"1", b"2"]
            assert list(topic.follow(timeout=0.01)) == []
        with pytest.raises(OSError, match="Read-only"):
            Topic.open(mounted)
    finally:
        subprocess.run(["umount", mounted], check=True)


@needs_root
def test_another_user_may_read_what_permissions_allow(tmp_path: Path) -> None:
    path = tmp_path / "topic"
    for each in [tmp_path, *tmp_path.parents]:
        if each.stat().st_uid == 0 and len(each.parts) > 2:
            each.chmod(0o755)
    with Topic.open(path, permissions=0o644) as topic:
        topic.append(b"x")
    path.chmod(0o755)
    program = """
        import os, sys
        from loglib import Topic
        os.setuid(65534)
        with Topic.open(sys.argv[1], mode="r") as topic:
            print([r.value for r in topic.read()])
        try:
            Topic.open(sys.argv[1])
        except PermissionError as error:
            print("refused", error.filename is not None)
    """
    assert run_python(program, path) == "[b'x']\nrefused True\n"


# --- resources -------------------------------------------------------------------------------------


@needs_proc
def test_dropped_iterators_leak_no_file(open_topic: Open, path: Path) -> None:
    with open_topic(segment_bytes=4096, batch_records=10) as topic:
        fill(topic, 500)
    topic = open_topic(mode="r")
    assert topic.partition(0).high_watermark > 0  # and from now on its file is open
    before = open_files()
    for _ in range(30):
        next(iter(topic.read()))
        next(topic.batches())
        topic.follow("begin", timeout=0).poll()
        topic.follow().poll(timeout=0.0001)
        topic.read(to_datetime(NOW + 100 * SECOND))
    assert open_files() == before
    topic.close()
    assert len(open_files()) == len(before) - 1


@needs_proc
def test_running_out_of_files_is_a_clear_error_and_leaks_nothing(open_topic: Open, path: Path) -> None:
    with open_topic(segment_bytes=4096, partitions=2) as topic:
        topic.append_many([b"x" * 100] * 100, keys=[b"%d" % n for n in range(100)])
    before = open_files()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        for spare in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + spare, limits[1]))
            for use in (read_all, follow_briefly, open_for_writing):
                try:
                    use(path)
                except OSError as error:
                    assert error.errno == 24 or "Too many open files" in str(error)
                    taken.append(spare)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert open_files() == before, f"with {spare} files to spare"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert taken, "the limit was never met"
    read_all(path)


def read_all(path: Path) -> None:
    with Topic.open(path, mode="r") as topic:
        assert len(values_of(topic)) == 100


def follow_briefly(path: Path) -> None:
    with Topic.open(path, mode="r") as topic:
        list(topic.follow(timeout=0.001))


def open_for_writing(path: Path) -> None:
    Topic.open(path, files=UnsyncedFiles()).close()


def test_reader_is_a_context_manager_and_iterates_on(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 4)
    with topic.read() as reader:
        first: Iterator[Any] = iter(reader)
        assert next(first).value == b"0"
        assert [r.value for r in reader] == [b"1", b"2", b"3"]
    assert reader.closed


def test_reader_of_a_closed_log_says_so_unless_it_was_closed_itself(open_topic: Open, path: Path) -> None:
    open_topic(partitions=2).close()

    class Closing(UnsyncedFiles):
        """Closes the topic while a reader looks at the first partition; the second is closed by then."""

        armed = False

        def pread(self, fd: int, size: int, position: int) -> bytes:  # type: ignore[override]
            if self.armed:
                self.armed = False
                topic.close()
            return os.pread(fd, size, position)

    files = Closing()
    topic = Topic.open(path, mode="r", files=files)
    reader = topic.follow("begin")
    files.armed = True
    assert list(reader) == [] and reader.closed
    topic = Topic.open(path, mode="r", files=files)
    reader = topic.follow("begin")
    files.armed = True
    with pytest.raises(LogClosedError, match="open the topic again"):
        reader.poll(timeout=60)
    topic = Topic.open(path, mode="r")
    reader = topic.follow("begin")
    for partition in topic.partitions:
        partition.log.close()
    with pytest.raises(LogClosedError):
        reader.poll()


def test_reader_that_has_come_to_an_end_inside_a_batch_tells_that_end(open_topic: Open) -> None:
    """Whoever goes on from there misses nothing: the rest of the batch was read with what stands before it."""
    topic = open_topic()
    fill(topic, 10)
    fill(topic, 10)
    for end in (4, topic.partition(0).high_watermark - 100):
        offsets = [record.offset for record in topic.read()]
        end = next(offset for offset in offsets if offset >= min(end, offsets[-1]))
        for reader in (topic.read(end=end), topic.read(end=end)):
            seen = [record.offset for record in reader]
            assert reader.tell() == {0: end}
            assert seen + [record.offset for record in topic.read(reader.tell())] == offsets
            reader.seek("begin")
            assert [offset for batch in reader.batches() for offset in batch.offsets] == seen
            assert reader.tell() == {0: end}


# --- the reader and its topic ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")
@pytest.mark.parametrize("mode", ["a", "r"])
def test_reader_keeps_its_topic_open(mode: Any, path: Path) -> None:
    """The topic was collected, and so closed: the reader looked like one of an empty log."""
    with Topic.open(path, **QUIET) as topic:
        topic.append_many([b"%d" % number for number in range(5000)])

    assert len(list(Topic.open(path, mode=mode).read())) == 5000
    assert sum(map(len, Topic.open(path, mode=mode).batches())) == 5000
    assert sum(map(len, Topic.open(path, mode=mode).read().batches())) == 5000
    assert len(list(Topic.open(path, mode=mode).follow("begin", timeout=0.001))) == 5000
    topic = Topic.open(path, mode=mode)
    reader, batches = topic.partition(0).read(), topic.partition(0).batches()
    del topic
    gc.collect()
    assert (len(list(reader)), sum(map(len, batches))) == (5000, 5000)
    del reader, batches
    Topic.open(path).close()  # nobody refers to it any more: its locks are free


@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")
def test_partition_of_a_collected_topic_is_closed_and_says_so(path: Path) -> None:
    partition = Topic.open(path, **QUIET).partition(0)
    for call in (partition.read, partition.follow, partition.batches, lambda: partition.append(b"x")):
        with pytest.raises(LogClosedError, match="open the topic again"):
            call()


def closed_after(topic: Topic, items: Any, count: int) -> list[Any]:
    """What comes of the items, whose topic is closed after the first of them."""
    got = []
    for item in items:
        got.append(item)
        if len(got) == count:
            topic.close()
    return got


@pytest.mark.parametrize("mode", ["a", "r"])
@pytest.mark.parametrize(
    "items",
    [
        lambda topic: topic.read(),
        lambda topic: topic.partition(0).read(),
        lambda topic: topic.read().batches(),
        lambda topic: topic.batches(),
        lambda topic: topic.follow("begin", timeout=60),
        lambda topic: topic.follow("begin", timeout=60).batches(),
    ],
    ids=["read", "partition", "read-batches", "batches", "follow", "follow-batches"],
)
def test_reading_that_is_cut_short_by_a_close_is_no_finished_log(
    items: Callable[[Topic], Any], mode: str, open_topic: Open
) -> None:
    """A loop whose topic was closed elsewhere ended at 100 of 5,000 records, and nothing said so."""
    with open_topic(batch_records=100) as topic:
        for number in range(1000):
            topic.append(b"%d" % number)
    topic = open_topic(mode=mode)
    with pytest.raises(LogClosedError, match="open the topic again, and read on from {0: "):
        closed_after(topic, items(topic), 3)


def test_cut_reader_tells_where_to_read_on(open_topic: Open) -> None:
    """It had forgotten records that were made and not handed out, and told of the place behind them."""
    topic = open_topic(batch_records=300)
    fill(topic, 1000)
    readers = [topic.read(), topic.read()]
    seen = [[next(iter(reader)).value for _ in range(450)] for reader in readers]
    readers[0].close()
    topic.close()
    topic = open_topic(mode="r")
    for reader, values in zip(readers, seen, strict=True):
        assert values + values_of(topic, reader.tell()) == [b"%d" % number for number in range(1000)]
        reader.close()
        assert values + values_of(topic, reader.tell()) == [b"%d" % number for number in range(1000)]


def test_reader_at_its_end_does_not_mind_that_its_topic_is_closed(open_topic: Open) -> None:
    topic = open_topic(batch_records=10)
    positions = fill(topic, 30)
    finished, bounded, fresh = topic.read(), topic.read(end=positions[15]), topic.read()
    assert len(list(finished)) == 30 and len(list(bounded)) == 15
    topic.close()
    for reader in (finished, bounded):
        assert list(reader) == list(reader.batches()) == []
    for call in (lambda: list(fresh), lambda: list(fresh.batches()), fresh.poll, fresh.take):
        with pytest.raises(LogClosedError, match="open the topic again"):
            call()


def test_follower_without_a_timeout_just_ends_when_its_topic_is_closed(open_topic: Open) -> None:
    """It has no other end, and so its end says it."""
    topic = open_topic()
    fill(topic, 30)
    assert len(closed_after(topic, topic.follow("begin"), 3)) == 3


def test_reader_that_its_user_closed_just_ends(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 30)
    readers = [topic.read(), topic.follow("begin", timeout=60)]
    for reader in readers:
        for _ in reader:
            reader.close()
    topic.close()
    for reader in readers:
        assert list(reader) == list(reader.batches()) == []


@pytest.mark.parametrize("start", ["begin", "-1h", timedelta(hours=1)])
def test_start_that_is_no_offset_is_looked_for_again_when_retention_drops_it(start: Any, open_topic: Open) -> None:
    """Nobody asked for an offset, and yet it was out of range: between its finding and its use the log start moved."""
    topic = open_topic()
    for number in range(6):
        topic.append(b"%d" % number, sync=True)
        topic.partition(0).roll()
    bases = [each.base_offset for each in topic.partition(0).segments]
    log, writer = topic.partition(0).log, topic.partition(0).writer()
    resolve, to_drop = log.resolve, [bases[1], bases[3]]

    def overtaken(*arguments: Any, **keywords: Any) -> int:
        offset = resolve(*arguments, **keywords)
        if to_drop and arguments[0] != "end":
            writer.drop_before(to_drop.pop(0))
        return offset

    log.resolve = overtaken  # type: ignore[method-assign]
    assert [record.value for record in topic.read(start)] == [b"3", b"4", b"5"]
    reader = topic.read()
    to_drop[:] = [bases[4]]
    reader.seek(start)
    assert [record.value for record in reader] == [b"4", b"5"]
    with pytest.raises(OffsetOutOfRangeError):
        topic.read(bases[2])
    with pytest.raises(OffsetOutOfRangeError):
        reader.seek(bases[2])


# --- damage ------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A batch: its records' values, its offsets in the log, and where it is stored."""

    values: list[bytes | None]
    offsets: range
    segment: Path
    file_position: int


def places_of(path: Path) -> list[Place]:
    with Topic.open(path, mode="r") as topic:
        bases = [segment.base_offset for segment in topic.partition(0).segments]
        found = []
        for batch in topic.batches():
            header = batch.header
            base = max(each for each in bases if each <= header.base_offset)
            segment = path / "0000" / f"{base:020d}.log"
            offsets = range(header.base_offset, header.next_offset)
            found.append(Place(batch.values, offsets, segment, 4096 + header.base_offset - base))
        return found


@pytest.fixture
def stored(open_topic: Open, path: Path) -> list[Place]:
    """Three segments of four batches of three records."""
    with open_topic(files=UnsyncedFiles(), batch_records=3) as topic:
        for number in range(36):
            topic.append(b"%d" % number, timestamp=NOW + number * SECOND)
            if number in (11, 23):
                topic.partition(0).roll()
    return places_of(path)


def flip(file: Path, at: int, bits: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= bits
    file.write_bytes(content)


def values_without(stored: list[Place], *lost: int) -> list[bytes | None]:
    return [value for number, place in enumerate(stored) if number not in lost for value in place.values]


@pytest.mark.parametrize("number", [0, 1, 5, 11])
def test_reader_has_every_record_before_the_damage(number: int, stored: list[Place], path: Path) -> None:
    """It used to have none of the block that the damage was in."""
    flip(stored[number].segment, stored[number].file_position + 131)
    before = []
    with Topic.open(path, mode="r") as topic, pytest.raises(CorruptLogError) as caught:
        before.extend(record.value for record in topic.read())
    assert before == values_without(stored[:number])
    assert caught.value.path == str(stored[number].segment)
    assert caught.value.file_position == stored[number].file_position + 128


@pytest.mark.parametrize("at", [0, 5, 9, 13, 20, 40, 90, 120, 128, 146], ids=str)
@pytest.mark.parametrize("number", [0, 3, 4, 6, 11])
def test_skipping_reader_has_every_record_but_those_of_the_damaged_batch(
    number: int, at: int, stored: list[Place], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(stored[number].segment, stored[number].file_position + at)
    expected = values_without(stored, number)
    with Topic.open(path, mode="r") as topic, caplog.at_level(logging.WARNING, "loglib"):
        reader = topic.read(on_gap="skip")
        assert [record.value for record in reader] == expected
        assert reader.tell() == {0: stored[-1].offsets.stop}
        (gap,) = reader.gaps
        assert (gap.partition, gap.offsets, gap.path) == (0, stored[number].offsets, str(stored[number].segment))
        assert stored[number].file_position <= gap.file_position <= stored[number].file_position + max(at, 4)
        for part in (str(stored[number].segment), f"byte {gap.file_position}", f"[{gap.offsets.start}, "):
            assert part in caplog.text
        reader.seek("begin")
        assert [value for batch in reader.batches() for value in batch.values] == expected
        assert reader.gaps == [gap] and len(caplog.records) == 1, "a gap that is met again is not told again"
        assert [value for batch in topic.batches(on_gap="skip") for value in batch.values] == expected
        assert [value for batch in topic.partition(0).batches(on_gap="skip") for value in batch.values] == expected
        follower = topic.follow("begin", timeout=0, on_gap="skip")
        assert [record.value for record in follower.poll(max_records=100)] == expected
        assert follower.gaps == [gap]


@pytest.mark.parametrize("damage", ["zeroed", "of another log", "cut", "emptied"])
def test_batches_behind_a_bad_segment_header_are_read_all_the_same(
    damage: str, stored: list[Place], path: Path, tmp_path: Path
) -> None:
    segment = stored[4].segment
    content = segment.read_bytes()
    if damage == "of another log":
        content = content[:20] + bytes([content[20] ^ 1]) + content[21:]
    elif damage == "zeroed":
        content = bytes(4096) + content[4096:]
    else:
        content = content[:100] if damage == "cut" else b""
    segment.write_bytes(content)
    lost = () if damage in ("zeroed", "of another log") else (4, 5, 6, 7)
    with Topic.open(path, mode="r") as topic:
        with pytest.raises(CorruptLogError):
            values_of(topic)
        starts: list[Any] = ["begin", stored[6].offsets.start + 1, to_datetime(NOW + 19 * SECOND)]
        for start, first in zip(starts, (0, 19, 19), strict=True):
            reader = topic.read(start, on_gap="skip")
            expected = [value for value in values_without(stored, *lost) if int(value or b"") >= first]
            assert [record.value for record in reader] == expected
            header, *rest = reader.gaps
            assert (header.path, len(header.offsets)) == (str(segment), 0)
            assert "nothing lost" in str(header)
            assert [gap.offsets.stop for gap in rest] == ([stored[7].offsets.stop] if lost else [])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_missing_segment_is_a_gap_of_all_its_offsets(number: int, stored: list[Place], path: Path) -> None:
    stored[4 * number].segment.unlink()
    lost = range(4 * number, 4 * number + 4)
    with Topic.open(path, mode="r") as topic:
        with pytest.raises(CorruptLogError):
            values_of(topic)
        reader = topic.read(on_gap="skip")
        assert [record.value for record in reader] == values_without(stored, *lost)
        assert [gap.offsets for gap in reader.gaps] == [
            range(stored[lost[0]].offsets.start, stored[lost[-1]].offsets.stop)
        ]
        reader = topic.read(stored[lost[1]].offsets.start, on_gap="skip")
        assert [record.value for record in reader] == values_without(stored, *range(lost[-1] + 1))


def test_segment_that_vanishes_while_it_is_read_past_is_a_gap(stored: list[Place], path: Path) -> None:
    class Vanishing(UnsyncedFiles):
        def open_read(self, path: str) -> int:
            if path == str(stored[4].segment):
                raise FileNotFoundError(2, "gone", path)
            return super().open_read(path)

    with Topic.open(path, mode="r", files=Vanishing()) as topic:
        reader = topic.read(on_gap="skip")
        assert [record.value for record in reader] == values_without(stored, 4, 5, 6, 7)


def test_partition_without_a_segment_is_one_gap(stored: list[Place], path: Path) -> None:
    for segment in {place.segment for place in stored}:
        segment.unlink()
    with Topic.open(path, mode="r") as topic:
        reader = topic.read(on_gap="skip")
        assert list(reader) == []
        assert [gap.offsets for gap in reader.gaps] == [range(stored[-1].offsets.stop)]


def test_segment_cut_at_a_batch_or_within_one_is_a_gap_to_its_end(stored: list[Place], path: Path) -> None:
    content = stored[4].segment.read_bytes()
    for cut in (stored[6].file_position, stored[6].file_position + 60, stored[6].file_position + 129):
        stored[4].segment.write_bytes(content[:cut])
        with Topic.open(path, mode="r") as topic:
            reader = topic.read(on_gap="skip")
            assert [record.value for record in reader] == values_without(stored, 6, 7)
            assert [gap.offsets for gap in reader.gaps] == [range(stored[6].offsets.start, stored[7].offsets.stop)]


def test_start_and_end_within_a_damaged_batch_are_taken_as_they_are(stored: list[Place], path: Path) -> None:
    flip(stored[5].segment, stored[5].file_position)
    first, stop = stored[5].offsets.start + 1, stored[5].offsets.start + 2
    with Topic.open(path, mode="r") as topic:
        for forms in ({"start": first}, {"end": stop}):
            with pytest.raises(CorruptLogError):
                topic.read(**forms)
        assert [record.value for record in topic.read(first, on_gap="skip")] == values_without(stored, *range(6))
        reader = topic.read(end=stop, on_gap="skip")
        assert [record.value for record in reader] == values_without(stored[:5])
        assert list(reader) == []
        reader.seek(first)
        assert list(reader) == []


@pytest.mark.parametrize("number", range(12))
def test_start_by_time_does_not_step_over_a_damaged_batch(number: int, stored: list[Place], path: Path) -> None:
    """The search by bisection looks at whole headers only, and went past a bad one without a word."""
    flip(stored[number].segment, stored[number].file_position + 9)
    start = to_datetime(NOW + (3 * number + 1) * SECOND)
    with Topic.open(path, mode="r") as topic:
        with pytest.raises(CorruptLogError):
            values_of(topic, start)
        later = topic.read(start, on_gap="skip")
        assert [record.value for record in later] == values_without(stored, *range(number + 1))
        assert [gap.offsets for gap in later.gaps] == [stored[number].offsets]


def test_follower_goes_on_past_damage_when_more_is_flushed(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    topic.append(b"bad", sync=True)
    flip(path / "0000" / f"{0:020d}.log", 4096 + 129)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin", timeout=0, on_gap="skip")
        assert follower.poll() == []
        topic.append(b"good", sync=True)
        assert [record.value for record in follower.poll()] == [b"good"]
        assert len(follower.gaps) == 1


def test_damage_at_the_end_of_a_segment_does_not_hide_one_made_since(open_topic: Open, path: Path) -> None:
    """The search for the next batch ended where the reader's old listing of the directory did."""
    topic = open_topic()
    topic.append(b"one", sync=True)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin", timeout=0, on_gap="skip")
        assert len(follower.poll()) == 1
        topic.append(b"bad", sync=True)
        topic.partition(0).roll()
        topic.append(b"in a new segment", sync=True)
        flip(path / "0000" / f"{0:020d}.log", 4096 + 144 + 1)
        assert [record.value for record in follower.poll()] == [b"in a new segment"]


def test_retention_that_overtakes_is_no_gap(open_topic: Open, path: Path) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0))
    topic.append(b"old", sync=True)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin", on_gap="skip")
        topic.partition(0).roll()
        topic.retain()
        with pytest.raises(OffsetOutOfRangeError):
            follower.poll()
        assert follower.gaps == []


def test_columns_that_contradict_their_header_are_a_gap_as_well(open_topic: Open, path: Path) -> None:
    """Such a batch has the right checksums: no rot, but somebody's work, or a fault of the memory."""
    topic = open_topic()
    offsets = [topic.append(value, sync=True).offset for value in (b"one", b"two", b"three")]
    segment = path / "0000" / f"{0:020d}.log"
    content = segment.read_bytes()
    start = 4096 + offsets[2]
    bad = forged(content[start:], body=b"\x01" + content[start + 129 :], identity=Identity.of(topic.log_id, 0))
    segment.write_bytes(content[:start] + bad)
    with Topic.open(path, mode="r") as reading:
        with pytest.raises(CorruptLogError, match="column offsets"):
            values_of(reading)
        reader = reading.read(on_gap="skip")
        assert [record.value for record in reader] == [b"one", b"two"]
        assert [gap.offsets for gap in reader.gaps] == [range(offsets[2], offsets[2] + 144)]


@pytest.mark.parametrize("blocks", ["one block", "a block for each"])
@pytest.mark.parametrize("stale", [0, 1, 2, 3], ids=["first", "second", "third", "last"])
def test_batch_of_another_history_is_not_returned_where_the_next_one_denies_it(
    stale: int, blocks: str, open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that the disk has lost uncovers what stood there: a batch that is whole and fits its place."""
    if blocks == "a block for each":
        monkeypatch.setattr("loglib.log.BLOCK_BYTES", 128)
    topic = open_topic()
    offsets = [topic.append(b"%d" % number, sync=True).offset for number in range(4)]
    segment = path / "0000" / f"{0:020d}.log"
    content = segment.read_bytes()
    start = 4096 + offsets[stale]
    batch = content[start : start + 144]
    old = forged(batch, body=batch[128:].replace(b"%d" % stale, b"X"), identity=Identity.of(topic.log_id, 0))
    segment.write_bytes(content[:start] + old + content[start + 144 :])
    with Topic.open(path, mode="r") as reading:
        reader = reading.read(on_gap="skip")
        values = [record.value for record in reader]
        if stale == 3:
            assert values == [b"0", b"1", b"2", b"X"], "nothing stands behind it to deny it"
            return
        with pytest.raises(CorruptLogError, match="a batch that follows one"):
            values_of(reading)
        assert [gap.found for gap in reader.gaps] == [reading.verify().damage[0].found]
        assert values == [b"%d" % number for number in range(4) if number != stale]


def test_batch_of_another_history_is_denied_by_the_next_segment_as_well(stored: list[Place], path: Path) -> None:
    for number in (3, 7):
        content = stored[number].segment.read_bytes()
        start = stored[number].file_position
        with Topic.open(path, mode="r") as topic:
            batch = content[start : start + len(stored[number].offsets)]
            old = forged(batch, writer_epoch=9, identity=Identity.of(topic.log_id, 0))
            stored[number].segment.write_bytes(content[:start] + old + content[start + len(batch) :])
            reader = topic.read(on_gap="skip")
            assert [record.value for record in reader] == values_without(stored, number)
            assert [gap.offsets for gap in reader.gaps] == [stored[number].offsets]
        stored[number].segment.write_bytes(content)


def test_follower_is_told_when_the_batch_that_it_had_last_is_denied(open_topic: Open, path: Path) -> None:
    """Nothing stood behind it when it was read, so that nothing could tell."""
    topic = open_topic()
    topic.append(b"old", sync=True)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin", timeout=0, on_gap="skip")
        strict = reading.follow("begin", timeout=0)
        assert [record.value for record in follower.poll()] == [record.value for record in strict.poll()] == [b"old"]
        segment, identity = path / "0000" / f"{0:020d}.log", Identity.of(topic.log_id, 0)
        topic.append(b"new", sync=True)
        topic.append(b"newer", sync=True)
        content = segment.read_bytes()
        other = forged(content[4240:4384], previous_crc=7, identity=identity)  # of another than the one that was read
        third = forged(content[4384:], previous_crc=int.from_bytes(other[4:8], "little"), identity=identity)
        segment.write_bytes(content[:4240] + other + third)
        assert [record.value for record in follower.poll(max_records=9)] == [b"new", b"newer"]
        assert [len(gap.offsets) for gap in follower.gaps] == [0]
        with pytest.raises(CorruptLogError, match="a batch that follows one"):
            strict.poll()


def test_batch_that_neither_neighbour_knows_is_the_one_left_out(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    offsets = [topic.append(b"%d" % number, sync=True).offset for number in range(5)]
    segment = path / "0000" / f"{0:020d}.log"
    content = segment.read_bytes()
    for strange in (1, 2, 3):
        start = 4096 + offsets[strange]
        old = forged(content[start : start + 144], previous_crc=7, identity=Identity.of(topic.log_id, 0))
        segment.write_bytes(content[:start] + old + content[start + 144 :])
        with Topic.open(path, mode="r") as reading:
            reader = reading.read(on_gap="skip")
            assert [record.value for record in reader] == [b"%d" % n for n in range(5) if n != strange]
            assert [gap.offsets for gap in reader.gaps] == [range(offsets[strange], offsets[strange] + 144)]


def test_gap_policy_that_there_is_not_is_refused(open_topic: Open) -> None:
    with pytest.raises(ValueError, match='on_gap must be "raise" or "skip"'):
        open_topic().read(on_gap="ignore")  # type: ignore[arg-type]


def test_take_gives_columns_and_goes_on_where_it_ended(open_topic: Open) -> None:
    topic = open_topic()
    topic.append_many([b"%d" % number for number in range(10)])
    topic.flush()
    with topic.read() as reader:
        first, second = reader.take(4), reader.take()
        assert first is not None and second is not None
        assert (first.values, second.values) == ([b"0", b"1", b"2", b"3"], [b"%d" % number for number in range(4, 10)])
        assert reader.tell() == {0: topic.partition(0).high_watermark}
        assert reader.take() is None and reader.take(5) is None
