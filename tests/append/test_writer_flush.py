"""When a writer flushes, what a flush does and in which order, and who shares it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MANUAL, once_each, records_of, values_of
from loglib import FlushPolicy, Topic
from loglib.testing import CHANGES, RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]


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
    writer = topic.partition(0)._access.writer()
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
    class Disk(RecordingFiles):
        def datasync(self, fd: int) -> None:
            time.sleep(0.002)  # as a disk does; in memory a thread is done before the next one has begun
            super().datasync(fd)

    files = Disk()
    topic = open_topic(files=files)
    files.calls.clear()
    together = threading.Barrier(16)

    def run() -> None:
        together.wait()
        for number in range(20):
            topic.append(b"%d" % number, sync=True)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(values_of(topic)) == 320
    assert files.count("datasync") < 320 // 2


def test_received_batches_are_in_the_interval_as_well(open_topic: Open, tmp_path: Path) -> None:
    source = open_topic()
    source.append(b"x", sync=True)
    with (tmp_path / "stream").open("wb") as stream:
        source.partition(0).transfer(stream, 0)
    target = open_topic(tmp_path / "target", flush=FlushPolicy(records=None, interval=0.001, bytes=None))
    with (tmp_path / "stream").open("rb") as received:
        target.partition(0).receive(received)
    assert [r.value for r in target.follow("begin").poll(timeout=60)] == [b"x"]


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
    writer = topic.partition(0)._access.writer()
    other = threading.Thread(target=lambda: [topic.append(b"two"), topic.append_many([bytes(5000)])])
    topic.append(b"one")
    files.armed = True
    topic.flush()
    assert writer.flushed_end > 144
    other.join()


def test_manual_policy_has_no_limit() -> None:
    assert (MANUAL.records, MANUAL.interval, MANUAL.bytes) == (None, None, None)
