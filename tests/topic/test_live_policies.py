"""Policies that one process changes are used by every other one that has the topic open."""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from consumers import wait_for

from conftest import QUIET, start_python, values_of
from loglib import (
    FlushPolicy,
    LogError,
    RecordTooLargeError,
    Retention,
    StorageFullError,
    Topic,
    testing,
)
from loglib.append import live_policies
from loglib.append.live_policies import LivePolicies
from loglib.errors import MissingCodecError
from loglib.log import topic_file
from loglib.system.notify import Observer
from loglib.testing import FaultyFiles, MemoryFiles
from loglib.transactions import notifications

NOTHING = Retention(age=None, bytes=0)  # is kept, except the open segment
SLOW = FlushPolicy(records=None, interval=3600.0, bytes=None)  # has a thread, and flushes only when it is asked to


def alter_beside(path: Path, **policies: Any) -> None:
    """Change policies as another process does, while a writer has the topic."""
    with Topic.open(path, shared=True) as topic:
        topic.alter(**policies)


# --- a writer --------------------------------------------------------------------------------------------

SERVICE = """
    import sys, time
    from loglib import Retention, Topic
    with Topic.open(sys.argv[1], create=True, segment_bytes=4096, retention=Retention(age=None)) as topic:
        for _ in range(5):
            topic.append(b"x" * 3000, sync=True)
        print(len(topic.partition(0).segments), flush=True)
        while len(topic.partition(0).segments) > 1 or topic.config.compression != "zlib":
            time.sleep(0.01)
        topic.append(b"y" * 3000, sync=True)
        print([batch._header.codec for batch in topic.batches()][-1], flush=True)
"""


def test_service_that_has_the_topic_alone_uses_what_an_operator_changes(path: Path) -> None:
    """It used its old policies until it was started again. Retention drops at once, and not after a minute."""
    with start_python(SERVICE, path, stderr=None) as service:
        assert service.stdout is not None
        assert int(service.stdout.readline()) == 5
        alter_beside(path, retention=NOTHING)
        alter_beside(path, compression="zlib")
        assert service.stdout.readline() == "1\n", "zlib"
        assert service.wait(60) == 0
    with Topic.open(path) as topic:
        assert (topic.config.retention, topic.config.compression) == (NOTHING, "zlib")


@pytest.mark.parametrize("shared", [False, True])
def test_each_policy_that_is_changed_beside_a_writer_is_in_use(path: Path, shared: bool) -> None:
    with Topic.open(path, create=True, flush=SLOW, retention=Retention(age=None), shared=shared) as topic:
        topic.append(b"w" * 500)
        alter_beside(
            path, compression="zlib", batch_bytes=1000, max_record_bytes=600, segment_bytes=4096, segment_age=None,
            flush=FlushPolicy(records=2, interval=None, bytes=None), durability="os", producer_expiry=None,
        )  # fmt: skip
        wait_for(lambda: topic.config.segment_bytes == 4096)
        writer = topic.partition(0)._access.writer()
        wait_for(lambda: writer.timer is None)  # the last of the parts: no interval is kept any more
        with pytest.raises(RecordTooLargeError):
            topic.append(b"z" * 700)
        with pytest.raises(RecordTooLargeError):
            topic.partition(0).append(b"z" * 700)
        topic.append(b"y" * 500)
        assert topic.partition(0).high_watermark == topic.partition(0).log_end_offset, "two records are a flush"
        assert [each._header.codec for each in topic.batches()][:2] == [0, 1], "what waited went by the old policies"
        for _ in range(4):
            topic.append(os.urandom(590))
            topic.append(os.urandom(590))
        assert len(topic.partition(0).segments) > 1
    assert len(values_of(Topic.open(path, mode="r"))) == 10


def test_interval_and_thread_of_a_later_policy_begin_in_every_writer(path: Path) -> None:
    with Topic.open(path, create=True, **QUIET) as topic, Topic.open(path, mode="r") as reader:
        topic.append(b"waits")
        alter_beside(path, flush=FlushPolicy(records=None, interval=0.01, bytes=None))
        topic.flush()  # a topic without a thread looks when it flushes
        assert topic._policies.watched and topic._background.has_thread
        topic.append(b"comes")
        wait_for(lambda: values_of(reader) == [b"waits", b"comes"])
        alter_beside(path, batch_records=7)
        wait_for(lambda: topic.config.batch_records == 7)


@pytest.mark.parametrize("ask", ["flush", "sync", "lone", "retain"])
def test_topic_without_a_thread_looks_when_it_flushes_and_before_it_drops(path: Path, ask: str) -> None:
    asks: dict[str, Callable[[Topic], object]] = {
        "flush": lambda topic: topic.flush(),
        "sync": lambda topic: topic.append(b"x", key=b"k", sync=True),
        "lone": lambda topic: topic.append(b"x", sync=True),
        "retain": lambda topic: topic.retain(),
    }
    with Topic.open(path, create=True, **QUIET) as topic:
        topic.append(b"first")
        alter_beside(path, batch_records=7)
        assert topic.config.batch_records != 7
        asks[ask](topic)
        assert topic.config.batch_records == 7 and topic.partition(0)._access.writer()._config.batch_records == 7


def test_change_is_said_in_the_log_of_the_process_that_uses_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Topic.open(path, create=True, retention=Retention(age="7d")) as topic, caplog.at_level("INFO", "loglib"):
        alter_beside(path, retention=Retention(age="1d"), segment_age=None)
        wait_for(lambda: topic.config.segment_age is None)
    told = [each.getMessage() for each in caplog.records if "another process" in each.getMessage()]
    assert told == [
        f"{path}: another process changed retention.age to 1 day, 0:00:00; it was 7 days, 0:00:00",
        f"{path}: another process changed segment_age to None; it was 1 day, 0:00:00",
    ]


def test_own_change_is_no_change_of_another_process(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Topic.open(path, create=True) as topic, caplog.at_level("INFO", "loglib"):
        topic.alter(batch_records=7)
        assert topic._policies.look() is False
    assert [each.getMessage() for each in caplog.records] == [f"{path}: batch_records is 7 now, and was 65536"]


def test_look_that_an_own_change_keeps_out_is_made_after_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process changes a policy between the writing of this one's change and the end of the call."""
    with Topic.open(path, create=True) as topic:
        use = LivePolicies.use

        def overtaken(policies: LivePolicies, config: Any) -> None:
            monkeypatch.undo()
            alter_beside(path, batch_records=8)
            looked = threading.Thread(target=lambda: found.append(policies.look()))
            looked.start()
            looked.join()
            use(policies, config)

        found: list[bool] = []
        monkeypatch.setattr(LivePolicies, "use", overtaken)
        topic.alter(batch_records=7)
        assert found == [False]
        wait_for(lambda: topic.config.batch_records == 8)


def test_change_is_seen_where_the_system_reports_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "Observer", lambda: Observer(use_inotify=False))
    monkeypatch.setattr(notifications, "_QUIET_S", 0.0)
    monkeypatch.setattr(notifications.notification_thread, "_made", {"value": notifications.NotificationThread()})
    with Topic.open(path, create=True) as topic:
        alter_beside(path, batch_records=7)
        wait_for(lambda: topic.config.batch_records == 7)


@pytest.mark.parametrize("inbox", [False, True])
def test_change_is_seen_with_and_without_an_inbox(path: Path, inbox: bool) -> None:
    with Topic.open(path, create=True) as topic:
        if inbox:
            notifications.notify(topic._files, str(path))
        for records in (7, 8, 9):
            alter_beside(path, batch_records=records)
            wait_for(lambda: topic.config.batch_records == records)  # noqa: B023


# --- what a process cannot follow ---------------------------------------------------------------------------


def test_codec_that_is_not_installed_here_does_not_stop_a_writer(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> int:
        raise MissingCodecError(name, name)

    with Topic.open(path, create=True) as topic:
        monkeypatch.setattr(live_policies, "codec_id", missing)
        alter_beside(path, compression="zlib", batch_records=7)
        wait_for(lambda: topic.config.batch_records == 7)
        assert topic.config.compression == "none"
        topic.append(b"x", sync=True)
        assert [each._header.codec for each in topic.batches()] == [0]
    assert "the compression of new batches is still 'none'" in caplog.text


def test_codec_that_is_not_installed_is_not_stored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic could not be opened any more."""

    def missing(name: str) -> int:
        raise MissingCodecError(name, name)

    with Topic.open(path, create=True) as topic:
        monkeypatch.setattr("loglib.topic.codec_id", missing)
        with pytest.raises(MissingCodecError):
            topic.alter(compression="zlib")
    with Topic.open(path, mode="r") as reader:
        assert reader.config.compression == "none"


def test_description_that_cannot_be_read_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Topic.open(path, create=True, batch_records=7) as topic:
        (path / "topic.json").write_text("{")
        wait_for(lambda: "the former stay in use" in caplog.text)
        topic.append(b"x", sync=True)
        assert topic.config.batch_records == 7
        assert not topic._policies.look()
    told = [each.getMessage() for each in caplog.records if "the former stay in use" in each.getMessage()]
    assert all(one != other for one, other in zip(told, told[1:], strict=False)), "not at each look"


def test_description_of_another_topic_changes_nothing(path: Path, tmp_path: Path) -> None:
    Topic.create(tmp_path / "other", batch_records=9).close()
    with Topic.open(path, create=True, batch_records=7) as topic:
        os.replace(tmp_path / "other" / "topic.json", path / "topic.json")
        assert not topic._policies.look() and topic.config.batch_records == 7


def test_partitions_that_are_added_do_not_change_those_of_a_writer(path: Path) -> None:
    with Topic.open(path, create=True, shared=True, partitions=2) as topic:
        Topic.add_partitions(path, 4)
        alter_beside(path, batch_records=7)
        wait_for(lambda: topic.config.batch_records == 7)
        assert topic._placement.count == 2


def test_topic_that_is_closed_or_gone_uses_nothing(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        os.rename(path, path.with_name("moved"))
        assert not topic._policies.look()
        os.rename(path.with_name("moved"), path)
    alter_beside(path, flush=FlushPolicy(interval=0.001))
    topic._policies.look()
    assert topic._background._flusher is not None and not topic._background._flusher._thread.is_alive()


def test_thread_does_not_begin_after_the_topic_was_closed(path: Path) -> None:
    topic = Topic.create(path, **QUIET)
    topic.close()
    alter_beside(path, flush=FlushPolicy(interval=0.001))
    topic._policies.look()
    assert not topic._background.has_thread


# --- errors -------------------------------------------------------------------------------------------------


def test_change_reaches_all_partitions_though_one_of_them_fails() -> None:
    files = FaultyFiles("pwritev", error=errno.ENOSPC, every=True, armed=False, inner=MemoryFiles())
    topic = testing.open_topic("/topic", files=files, partitions=3, **QUIET)
    topic.append(b"lost", partition=1)
    write = topic_file.write

    def write_and_fail(*given: Any) -> None:
        write(*given)
        files.armed = True

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(topic_file, "write", write_and_fail)
        with pytest.raises(StorageFullError) as raised:
            topic.alter(batch_records=7, retention=NOTHING)
    files.armed = False
    assert [each.partition for each in raised.value.lost] == [1]
    writers = [each._access.writer() for each in topic.partitions]
    assert [each._config.batch_records for each in writers] == [7, 7, 7]
    assert topic.config.retention == topic._retention.config.retention == NOTHING
    topic.append(b"next", partition=1, sync=True)
    topic.close()


def test_records_that_are_lost_while_a_change_is_used_are_named_by_the_next_call() -> None:
    inner = MemoryFiles()
    files = FaultyFiles("pwritev", error=errno.ENOSPC, every=True, armed=False, inner=inner)
    topic = testing.open_topic("/topic", files=files, partitions=2, **QUIET)
    topic.append(b"lost", partition=0)
    content = inner.tree()["/topic/topic.json"]
    with testing.open_topic("/other", files=inner) as other:  # writes what another process would write
        described = topic_file.read(inner, "/topic")
        assert described is not None
        topic_file.write(_directory(inner, "/topic"), described[0], described[1].changed({"batch_records": 7}))
        del other
    assert inner.tree()["/topic/topic.json"] != content
    files.armed = True
    assert topic._policies.look()
    files.armed = False
    assert topic.config.batch_records == 7
    with pytest.raises(StorageFullError) as raised:
        topic.append(b"next", partition=0)
    assert [each.partition for each in raised.value.lost] == [0]
    with suppress(LogError):
        topic.close()


def _directory(files: MemoryFiles, path: str) -> Any:
    from loglib.system.directory import Directory

    return Directory.open(files, path)


# --- readers and keepers --------------------------------------------------------------------------------------


def test_reader_has_the_present_policies(path: Path) -> None:
    with Topic.open(path, create=True, segment_bytes=4096, **QUIET) as topic, Topic.open(path, mode="r") as reader:
        for _ in range(4):
            topic.append(b"x" * 3000, sync=True)
        assert not any(each.drop for each in reader.retain(dry_run=True))
        topic.alter(retention=NOTHING)
        wait_for(lambda: reader.config.retention == NOTHING)
        assert [each.drop for each in reader.retain(dry_run=True)] == [True, True, True, False]
        assert reader.config.segment_bytes == 4096


def test_process_that_shares_a_topic_runs_retention_by_the_present_policies(path: Path) -> None:
    """A pass over partitions that nobody holds is for processes with the present policies: an old one never ran it."""
    with Topic.open(path, create=True, partitions=2, segment_bytes=4096, **QUIET) as topic:
        for _ in range(4):
            topic.append(b"x" * 3000, partition=1, sync=True)
    with Topic.open(path, shared=True) as sharing:
        sharing.append(b"mine", partition=0, sync=True)
        alter_beside(path, retention=NOTHING, segment_age=timedelta(days=1))
        sharing.flush()  # it has no thread yet
        wait_for(lambda: len(sharing.partition(1).segments) == 1)
