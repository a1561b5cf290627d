"""A follower at the end of the log: the short way to a record, and spinning. Nothing is lost or shown too soon."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import interrupted, last_segment, run_python, start_python, values_of
from loglib import CorruptLogError, FlushPolicy, LogClosedError, LogMovedError, OffsetOutOfRangeError, Retention, Topic
from loglib.append.publication import Hold
from loglib.format.batch import Batch
from loglib.format.watermark import WatermarkReader
from loglib.log.cursor import Cursor
from loglib.log.reader import Reader
from loglib.segment import SegmentReader
from loglib.system.files import REAL

Open = Callable[..., Topic]
LONG = timedelta(seconds=30)
SPIN = timedelta(milliseconds=200)


def follower(reading: Topic, start: Any = "end", **arguments: Any) -> Reader:
    """A reader that has come to the end, and has read something, so that the short way is open to it."""
    reader = reading.follow(start, **arguments)
    while reader.poll():
        pass
    return reader


def read_news(reader: Reader) -> Batch | None:
    """What the short way gives."""
    (cursor,) = reader._cursors.values()
    return cursor.read_news()


@pytest.fixture
def reading(topic: Topic, path: Path) -> Iterator[Topic]:
    """The topic of ten records, as another process reads it."""
    with Topic.open(path, mode="r") as reading:
        yield reading


# --- the short way -----------------------------------------------------------------------------------


def test_short_way_gives_each_record_once(topic: Topic, reading: Topic) -> None:
    reader = follower(reading, "begin")
    for number in range(5):
        assert read_news(reader) is None
        position = topic.append(b"%d" % number, b"key", timestamp=number, sync=True)
        batch = read_news(reader)
        assert batch is not None
        (record,) = batch.records()
        assert record[:5] == (0, position.offset, number, b"key", b"%d" % number)
        assert record.next_offset == reader.tell()[0] == topic.partition(0).high_watermark
    assert reader.poll() == []


RECORD = st.tuples(
    st.none() | st.binary(max_size=50), st.none() | st.binary(max_size=9), st.none() | st.integers(0, 1 << 50),
    st.none() | st.just({"h": b"x"}),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.lists(RECORD, min_size=1, max_size=3), min_size=1, max_size=6),
    codec=st.sampled_from(["none", "zlib"]), segment_bytes=st.sampled_from([4096, 1 << 20]), skip=st.booleans(),
)  # fmt: skip
def test_short_way_gives_what_the_long_way_gives(
    batches: list[list[tuple[Any, Any, Any, Any]]], codec: str, segment_bytes: int, skip: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("same") / "t"
    never = FlushPolicy(records=None, interval=None, bytes=None)
    with Topic.open(
        path, create=True, flush=never, compression=codec, segment_bytes=segment_bytes, durability="os"
    ) as topic:
        topic.append(b"x" * 2000, sync=True)
        with Topic.open(path, mode="r") as reading:
            reader = follower(reading, "begin", on_damage="skip" if skip else "raise")
            found = []
            for batch in batches:
                for value, key, timestamp, headers in batch:
                    topic.append(value, key, timestamp=timestamp, headers=headers)
                topic.flush()
                reader._has_waited = True
                found += reader.poll(timeout=None)
                assert reader.poll() == []
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Batch, "_lone_record", lambda _: None)
                assert found == list(reading.read("begin"))[1:]


def test_short_way_leaves_what_is_unusual_to_the_long_way(topic: Topic, reading: Topic) -> None:
    reader = follower(reading, "begin")
    (cursor,) = reader._cursors.values()
    fresh = Cursor.at(reading.partition(0)._access.log, reading.partition(0).high_watermark)
    topic.append(b"one", sync=True)
    assert fresh.read_news() is None, "nothing was read: there is no chain to check yet"
    topic.append(b"two", sync=True)
    assert cursor.read_news() is not None, "the first of the two"
    assert cursor.read_news() is not None
    topic.append_many([b"x" * 50_000] * 2)
    topic.flush()
    assert cursor.read_news() is None, "much"
    assert len(cursor.read(reading.partition(0).high_watermark)) == 1
    topic.partition(0).roll()
    topic.append(b"in another file", sync=True)
    assert cursor.read_news() is None
    assert [r.value for r in reader.poll()] == [b"in another file"]
    log = reading.partition(0)._access.log
    topic.append(b"x", sync=True)
    log.restored += 1
    assert cursor.read_news() is None, "the files were replaced"


def test_follower_of_this_process_takes_the_short_way(topic: Topic) -> None:
    reader = follower(topic, "begin")
    topic.append(b"x", sync=True)
    batch = read_news(reader)
    assert batch is not None and batch.values == [b"x"]


def test_look_at_the_files_is_not_forgotten(topic: Topic, reading: Topic) -> None:
    reader = follower(reading, "begin")
    topic.append(b"x", sync=True)
    log = reading.partition(0)._access.log
    log._look_at = 0.0
    assert read_news(reader) is None, "mark() looks first"
    log._watermark, log._look_at = None, time.monotonic() + 60
    assert read_news(reader) is None


def test_record_of_a_pending_transaction_is_not_shown(
    topic: Topic, reading: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.log.log.is_pending_here", lambda *_: True)
    reader = follower(reading, "begin")
    disk = topic.partition(0)._access.writer().disk
    disk.publication.publish(hold=Hold(7, disk.mark.flushed_end, disk.mark.flushed_tail, 5, 0))
    topic.append(b"held", sync=True)
    assert [read_news(reader), read_news(reader)] == [None, None]


@pytest.mark.parametrize("at", [0, 5, 60, 100, 130, 140])
def test_damage_is_met_by_the_long_way(at: int, topic: Topic, path: Path, reading: Topic) -> None:
    reader = follower(reading, "begin")
    end = topic.partition(0).log_end_offset
    topic.append(b"x" * 40, sync=True)
    with last_segment(path).open("r+b") as file:
        file.seek(4096 + end + at)
        byte = file.read(1)
        file.seek(4096 + end + at)
        file.write(bytes([byte[0] ^ 4]))
    reader._has_waited = True
    assert read_news(reader) is None
    with pytest.raises(CorruptLogError):
        reader.poll(timeout=None)


def test_batch_of_another_history_is_not_shown(topic: Topic, reading: Topic) -> None:
    """A whole batch in its place, but it follows another one than was read."""
    reader = follower(reading, "begin")
    (cursor,) = reader._cursors.values()
    assert cursor._last_read is not None
    end, crc = cursor._last_read
    topic.append(b"x", sync=True)
    cursor._last_read = end, crc ^ 1
    assert read_news(reader) is None


def test_file_that_cannot_be_read_is_no_news(topic: Topic, reading: Topic) -> None:
    reader = follower(reading, "begin")
    (cursor,) = reader._cursors.values()
    topic.append(b"x", sync=True)
    segment = cursor._segment
    assert segment is not None
    fd, segment._fd = segment._fd, REAL.open_directory("/")
    assert read_news(reader) is None
    REAL.close(segment._fd)
    segment._fd = fd
    assert [r.value for r in reader.poll()] == [b"x"]


def test_interrupt_while_news_are_read_loses_nothing(
    topic: Topic, reading: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = follower(reading, "begin")
    topic.append(b"x", sync=True)
    read = Cursor.read_news

    def interrupted_read(cursor: Cursor) -> Batch | None:
        read(cursor)
        raise KeyboardInterrupt

    monkeypatch.setattr(Cursor, "read_news", interrupted_read)
    reader._has_waited = True
    with pytest.raises(KeyboardInterrupt):
        reader.poll(timeout=None)
    monkeypatch.undo()
    assert [r.value for r in reader.poll()] == [b"x"]


def test_news_that_do_not_agree_with_their_header_are_a_gap_with_skip(
    topic: Topic, reading: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = follower(reading, "begin", on_damage="skip")
    topic.append(b"x", sync=True)
    topic.append(b"y", sync=True)
    monkeypatch.setattr(Reader, "_is_sound", lambda *_: False)
    assert reader._read_news() is False
    reader._has_waited = True
    assert reader._read_news() is True and not reader._pieces
    monkeypatch.undo()
    assert [r.value for r in reader.poll()] == [b"y"]


def test_busy_partition_does_not_keep_others_from_their_turns(open_topic: Open, path: Path) -> None:
    topic = open_topic(partitions=2)
    for number in (0, 1):
        topic.append(b"x", partition=number, sync=True)
    with Topic.open(path, mode="r") as reading:
        reader = follower(reading, "begin")
        seen = []
        for _ in range(10):
            topic.append(b"busy", partition=0, sync=True)
            topic.append(b"quiet", partition=1, sync=True)
            reader._has_waited = True
            seen += [record.partition for _ in range(2) for record in reader.poll(timeout=None)]
        assert set(seen) == {0, 1}


# --- spinning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spin", [True, b"1s", datetime(2026, 1, 1, tzinfo=UTC)])
def test_spin_is_a_duration(spin: Any, topic: Topic) -> None:
    with pytest.raises(TypeError, match="spin must be a duration"):
        topic.follow(spin=spin)
    with pytest.raises(TypeError, match="spin must be a duration"):
        topic.partition(0).follow(spin=spin)


def test_spin_is_not_negative(topic: Topic) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        topic.follow(spin=timedelta(microseconds=-1))
    assert topic.follow(spin=timedelta(0)).poll() == []


@pytest.mark.parametrize("partitions", [1, 3])
def test_spinning_finds_what_another_process_writes(partitions: int, open_topic: Open, path: Path) -> None:
    open_topic(partitions=partitions).close()
    process = start_python(
        """
        import sys
        from datetime import timedelta
        from loglib import Topic
        with Topic.open(sys.argv[1], mode="r") as topic:
            print("ready")
            for record in topic.follow("begin", timeout=60, spin=timedelta(seconds=60)):
                print(record.value.decode())
                if record.value == b"stop":
                    break
        """,
        path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with open_topic() as topic:
        for number in range(20):
            topic.append(b"%d" % number, partition=number % partitions, sync=True)
            if number % 7 == 6:
                topic.partition(number % partitions).roll()
            assert process.stdout.readline() == f"{number}\n"
        topic.append(b"stop", sync=True)
        output, errors = process.communicate(timeout=60)
    assert (output, errors, process.returncode) == ("stop\n", "", 0)


def test_spinning_ends_with_the_timeout_and_looks_before_it_sleeps(topic: Topic, reading: Topic) -> None:
    reader = follower(reading, timeout=0.05, spin=LONG)
    assert list(reader) == []
    topic.append(b"x", sync=True)
    assert [record.value for record in reader] == [b"x"]
    assert reader._waiter is None, "it never slept"


def test_spinning_ends_after_its_time_and_then_the_reader_sleeps(topic: Topic, reading: Topic) -> None:
    reader = follower(reading, timeout=0.2, spin=timedelta(milliseconds=20))
    assert list(reader) == []
    assert reader._waiter is not None


@pytest.mark.parametrize("what", ["reader", "topic"])
def test_spinning_ends_when_closed(what: str, topic: Topic, reading: Topic) -> None:
    reader = follower(reading, spin=LONG)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(reader))
    thread.start()
    while not reader._has_waited:
        time.sleep(0)
    (reader if what == "reader" else reading).close()
    thread.join(20)
    assert not thread.is_alive() and not found


def test_spinning_that_has_a_timeout_and_is_cut_short_raises(topic: Topic, reading: Topic) -> None:
    reader = follower(reading, timeout=30, spin=LONG)
    caught: list[BaseException] = []

    def follow() -> None:
        try:
            list(reader)
        except LogClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    while not reader._has_waited:
        time.sleep(0)
    reading.close()
    thread.join(20)
    assert len(caught) == 1


@pytest.mark.usefixtures("unmeasured")
def test_sigint_ends_spinning(open_topic: Open, path: Path) -> None:
    open_topic().close()
    process = start_python(
        """
        import sys
        from datetime import timedelta
        from loglib import Topic
        with Topic.open(sys.argv[1], mode="r") as topic:
            reader = topic.follow(spin=timedelta(seconds=60))
            reader.poll(timeout=0.01)
            try:
                print("spinning")
                for record in reader:
                    pass
            except KeyboardInterrupt:
                print("interrupted")
                assert reader.poll() == []
        """,
        path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "spinning\n"
    output, errors = interrupted(process)
    assert (output, errors, process.returncode) == ("interrupted\n", "", 0)


def test_forked_child_spins_on_with_its_own_reader(open_topic: Open, path: Path) -> None:
    with open_topic() as topic:
        topic.append(b"x", sync=True)
    output = run_python(
        """
        import os, sys
        from datetime import timedelta
        from loglib import Topic
        reading = Topic.open(sys.argv[1], mode="r")
        reader = reading.follow("begin", timeout=20, spin=timedelta(seconds=20))
        rest = iter(reader)
        assert next(rest).value == b"x"
        pid = os.fork()
        if pid == 0:
            assert next(rest).value == b"y"
            os._exit(0)
        with Topic.open(sys.argv[1], create=True) as topic:
            topic.append(b"y", sync=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), next(rest).value.decode())
        """,
        path,
    )
    assert output.split() == ["0", "y"]


def test_log_of_this_process_is_not_spun_on(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> bool:
        raise AssertionError("its writer needs the interpreter")

    monkeypatch.setattr(WatermarkReader, "has_next_mark", refuse)
    reader = follower(topic, timeout=0.02, spin=LONG)
    assert list(reader) == []
    assert reader._waiter is not None, "it slept"


def test_spinning_reader_finds_that_the_topic_is_gone(topic: Topic, path: Path, reading: Topic) -> None:
    reader = follower(reading, spin=LONG)
    topic.close()
    shutil.rmtree(path)
    with pytest.raises(LogMovedError):
        reader.poll(timeout=20)


def test_spinning_reader_meets_damage(topic: Topic, path: Path, reading: Topic) -> None:
    reader = follower(reading, "begin", spin=LONG)
    end = topic.partition(0).log_end_offset
    topic.append(b"x" * 40, sync=True)
    with last_segment(path).open("r+b") as file:
        os.pwrite(file.fileno(), b"?", 4096 + end + 150)
    with pytest.raises(CorruptLogError):
        reader.poll(timeout=20)


def test_spinning_reader_that_retention_overtakes_gets_the_error(open_topic: Open, path: Path) -> None:
    topic = open_topic(segment_bytes=4096, retention=Retention(age=None, bytes=0))
    topic.append(b"x", sync=True)
    with Topic.open(path, mode="r") as reading:
        reader = reading.follow("begin", spin=LONG)
        for _ in range(20):
            topic.append(bytes(1000), sync=True)
        topic.retain()
        with pytest.raises(OffsetOutOfRangeError):
            list(zip(range(30), reader, strict=False))
        reader = follower(reading, spin=LONG)
        for _ in range(20):
            topic.append(bytes(1000), sync=True)
            assert len(reader.poll(timeout=20)) == 1
        topic.retain()
        topic.append(b"last", sync=True)
        assert [record.value for record in reader.poll(timeout=20)] == [b"last"]


def test_reader_that_begins_while_another_spins_sees_all(topic: Topic, reading: Topic) -> None:
    """They share the watermark's reader: what one has seen is not hidden from the other."""
    one, two = follower(reading, spin=SPIN), follower(reading, spin=SPIN)
    topic.append(b"x", sync=True)
    assert [r.value for r in one.poll(timeout=20)] == [b"x"]
    assert [r.value for r in two.poll(timeout=20)] == [b"x"]
    assert len(values_of(reading)) == 11


def test_segment_without_the_whole_batch_is_no_news(topic: Topic, reading: Topic) -> None:
    log = reading.partition(0)._access.log
    end = reading.partition(0).high_watermark
    with log.open_segment(0) as segment:
        assert isinstance(segment, SegmentReader)
        assert segment.only_batch(end, end + 200, previous_crc=0) is None
