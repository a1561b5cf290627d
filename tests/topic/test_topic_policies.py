"""The policies of a topic change while it is open, while others change them, or while nobody writes."""

import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from conftest import alter, values_of
from loglib import (
    FlushPolicy,
    LockedError,
    LogError,
    ReadOnlyError,
    RecordTooLargeError,
    Retention,
    Topic,
    TopicConfig,
    WriterFailedError,
    testing,
)
from loglib.append.writer import Writer
from loglib.system.directory import Directory
from loglib.system.files import REAL
from loglib.testing import FaultyFiles, MemoryFiles

MANUAL = FlushPolicy(records=None, interval=None, bytes=None)


# --- making and opening ----------------------------------------------------------------------------


def test_policies_that_could_not_be_written_are_not_used(path: Path) -> None:
    memory = MemoryFiles()
    testing.open_topic("/topic", files=memory).close()
    files = FaultyFiles("rename", inner=memory)
    with pytest.raises(OSError):
        testing.open_topic("/topic", files=files, batch_records=9, alter=True)
    with testing.open_topic("/topic", files=files) as topic:
        assert topic.config.batch_records == TopicConfig().batch_records


# --- changing policies while the topic is open ------------------------------------------------------


def test_policies_change_while_records_wait(path: Path) -> None:
    with Topic.open(path, create=True, flush=MANUAL, batch_bytes=1 << 20) as topic:
        topic.append(b"x" * 500)
        topic.alter(compression="zlib", batch_bytes=1000, max_record_bytes=600)
        topic.append(b"y" * 500)
        with pytest.raises(RecordTooLargeError):
            topic.append(b"z" * 700)
        topic.flush()
        assert [each._header.codec for each in topic.batches()] == [0, 1], "what waited went by the old policies"
        assert values_of(topic) == [b"x" * 500, b"y" * 500]
        topic.alter(max_record_bytes=800)
        topic.append(b"z" * 700, sync=True)
    with Topic.open(path, mode="r") as topic:
        assert (topic.config.compression, topic.config.max_record_bytes) == ("zlib", 800)


def test_interval_that_is_set_later_flushes_what_waits_and_what_comes(path: Path) -> None:
    with Topic.open(path, create=True, flush=MANUAL, retention=Retention(age=None), segment_age=None) as topic:
        topic.append(b"waits")
        topic.alter(flush=FlushPolicy(records=None, interval=0.01, bytes=None))
        with Topic.open(path, mode="r") as reader, reader.follow("begin", timeout=60.0) as records:
            assert next(iter(records)).value == b"waits"
            topic.append(b"comes")
            assert next(iter(records)).value == b"comes"
        topic.alter(flush=MANUAL)
        topic.flush()
        topic.append(b"stays")
        time.sleep(0.05)
        assert topic.partition(0).high_watermark < topic.partition(0).log_end_offset


def test_retention_that_is_set_later_counts_at_once(path: Path) -> None:
    with Topic.open(path, create=True, retention=Retention(age=None), flush=MANUAL, segment_bytes=4096) as topic:
        for _ in range(5):
            topic.append(b"x" * 3000, sync=True)
        topic.retain()
        assert len(topic.partition(0).segments) > 3
        topic.alter(retention=Retention(bytes=0))
        topic.retain()
        assert len(topic.partition(0).segments) == 1


def test_segments_that_retention_drops_are_said_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Topic.open(path, create=True, retention=Retention(age=None), flush=MANUAL, segment_bytes=4096) as topic:
        for _ in range(5):
            topic.append(b"x" * 3000, sync=True)
        bases = [each.base_offset for each in topic.partition(0).segments]
        with caplog.at_level("INFO", logger="loglib"):
            topic.alter(retention=Retention(bytes=0))
            caplog.clear()
            topic.retain()
            topic.retain()
    (told,) = [each.getMessage() for each in caplog.records]
    assert told == (
        f"{path}/0000: retention dropped {len(bases) - 1} segments, offsets 0 to {bases[-1]}; "
        f"reason for the last one: the partition holds {2 * (bases[1] - bases[0])} bytes, the limit is 0"
    )


def test_pass_of_retention_that_comes_too_late_says_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Topic.open(
        path, create=True, retention=Retention(age=None, bytes=0), flush=MANUAL, segment_bytes=4096
    ) as topic:
        for _ in range(3):
            topic.append(b"x" * 3000, sync=True)
        topic.partition(0).roll()
        # As for a pass that has decided before another one has dropped.
        monkeypatch.setattr(Writer, "drop_before", lambda *_, **__: [])
        with caplog.at_level("INFO", logger="loglib"):
            topic.retain()
    assert caplog.text == ""


def test_processes_that_share_a_topic_keep_each_others_changes(path: Path) -> None:
    with Topic.open(path, create=True, partitions=2, shared=True) as one, Topic.open(path, shared=True) as two:
        one.append(b"x", partition=0)
        two.append(b"x", partition=1)
        one.alter(batch_records=7)
        two.alter(batch_bytes=999)
        assert (two.config.batch_records, two.config.batch_bytes) == (7, 999)
    with Topic.open(path, mode="r") as topic:
        assert (topic.config.batch_records, topic.config.batch_bytes) == (7, 999)


def test_change_waits_for_another_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Topic.open(path, create=True) as topic, Directory.open(REAL, str(path)) as directory:
        assert REAL.try_lock(directory.fd)
        threading.Timer(0.05, lambda: REAL.unlock(directory.fd)).start()
        topic.alter(batch_records=7)
        assert REAL.try_lock(directory.fd)
        monkeypatch.setattr("loglib.system.directory._LOCK_TIMEOUT_S", 0.02)
        with pytest.raises(LockedError, match="changes its policies"):
            topic.alter(batch_records=8)


@pytest.mark.parametrize(
    ("policies", "error"),
    [
        ({"partitions": 2}, ValueError), ({"partitioner": "crc32"}, ValueError), ({"retention": 5}, ValueError),
        ({"messages": 5}, TypeError), ({"segment_age": timedelta.max}, ValueError),
        ({"segment_age": timedelta(days=10**6, microseconds=1)}, ValueError),
    ],
)  # fmt: skip
def test_policies_that_make_no_sense_change_nothing(policies: dict[str, Any], error: type, path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        stored = (path / "topic.json").read_bytes()
        with pytest.raises(error):
            topic.alter(**policies)
        assert (path / "topic.json").read_bytes() == stored and topic.config == TopicConfig()
    with Topic.open(path, mode="r") as topic, pytest.raises(ReadOnlyError):
        topic.alter(batch_records=7)


def test_policy_that_cannot_be_stored_makes_no_topic(path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        Topic.open(path, create=True, segment_age=timedelta(days=10**6, microseconds=1))
    assert list(path.parent.iterdir()) == []


def test_writer_that_has_failed_is_not_given_other_policies(path: Path) -> None:
    files = FaultyFiles("datasync", inner=MemoryFiles(), armed=False)
    topic = testing.open_topic("/topic", files=files, flush=MANUAL)
    topic.append(b"x")
    files.armed = True
    with pytest.raises(WriterFailedError):
        topic.flush()
    with pytest.raises(WriterFailedError):
        topic.alter(batch_records=7)
    with suppress(LogError):
        topic.close()


def test_policies_can_be_changed_while_nobody_writes(path: Path) -> None:
    Topic.open(path, create=True, partitions=2).close()
    alter(path, retention=Retention(bytes=5), segment_age=None, compression="zlib")
    with Topic.open(path) as topic:
        assert (topic.config.retention, topic.config.segment_age) == (Retention(bytes=5), None)
        with pytest.raises(LockedError):
            alter(path, compression="none")
    fixed: list[dict[str, Any]] = [{"partitions": 4}, {"partitioner": 4}]
    for changed in fixed:
        with pytest.raises(ValueError, match="cannot change"):
            alter(path, **changed)
    with pytest.raises(ValueError, match="compression"):
        alter(path, compression="rar")
    assert Topic.open(path, mode="r").config.compression == "zlib"
