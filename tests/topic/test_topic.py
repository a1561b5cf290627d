"""Topics: how they are made and opened, what describes them, and what is refused."""

import json
import os
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from own_partitioners import by_tenant

from conftest import QUIET, needs_proc, run_python, sound, values_of
from loglib import (
    ConfigConflictError,
    CorruptLogError,
    FlushPolicy,
    LogClosedError,
    LogError,
    ReadOnlyError,
    Retention,
    Topic,
    UnsupportedFormatError,
    testing,
)
from loglib.testing import FaultyFiles, MemoryFiles, RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]


# --- making and opening ----------------------------------------------------------------------------


def test_topic_is_made_once_and_describes_itself(path: Path) -> None:
    policies: dict[str, Any] = {
        "partitions": 3, "flush": FlushPolicy(records=5, interval=None, bytes=100), "segment_bytes": 5000,
        "retention": Retention(age=timedelta(hours=5), bytes=10**6, keep_free=0.2), "compression": "zlib",
        "segment_age": timedelta(hours=2), "durability": "os", "batch_bytes": 999, "batch_records": 77,
        "max_record_bytes": 500, "permissions": 0o640,
    }  # fmt: skip
    with Topic.open(path, create=True, **policies) as topic:
        first = topic.config
        assert {name: getattr(first, name) for name in policies} == policies
    with Topic.open(path) as topic:
        assert topic.config == first
    with Topic.open(path, create=True, **policies) as topic:
        assert topic.config == first and topic.name == "topic" and topic.path == str(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("partitions", 2), ("flush", FlushPolicy(records=7)), ("retention", Retention(bytes=5)),
        ("segment_bytes", 9999), ("segment_age", None), ("compression", "zlib"), ("durability", "os"),
        ("batch_bytes", 5), ("batch_records", 5), ("max_record_bytes", 5), ("permissions", 0o644),
        ("partitioner", "murmur2"), ("partitioner", by_tenant),
    ],
)  # fmt: skip
def test_argument_that_disagrees_is_an_error_and_never_wins(name: str, value: Any, path: Path) -> None:
    """But for the policies that a writer may change."""
    Topic.open(path, create=True).close()
    stored = (path / "topic.json").read_bytes()
    fixed = name in ("partitions", "partitioner")
    for mode in ("a", "r") if fixed else ("r",):
        with pytest.raises(ConfigConflictError, match=name) as raised:
            Topic.open(path, create=True, mode=mode, **{name: value})
        assert raised.value.name == name
        wanted = "copy the records to a new topic" if fixed else 'open it with mode="a" and alter=True to change it'
        assert wanted in str(raised.value)
        assert ("Topic.add_partitions" in str(raised.value)) == (name == "partitions")
    Topic.open(path).close()
    assert (path / "topic.json").read_bytes() == stored


def test_change_of_an_operator_outlives_a_restart_of_the_service(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The code of the service has a value of its own, which came back with the next start, without a word."""
    code: dict[str, Any] = {"retention": Retention(age=timedelta(days=7), bytes=1 << 40), "segment_age": "1h"}
    Topic.open(path, create=True, **code).close()
    with Topic.open(path, shared=True) as topic:
        topic.alter(retention=Retention(age=timedelta(days=1), bytes=1 << 40), segment_age=None)
    with caplog.at_level("WARNING", logger="loglib"):
        for _ in range(2):
            with Topic.open(path, create=True, batch_records=1 << 16, **code) as topic:
                assert topic.config.retention.age == timedelta(days=1) and topic.config.segment_age is None
    ignored = "given where it is opened, is ignored. `loglib alter` changes the topic, or open it with alter=True"
    assert [each.getMessage() for each in caplog.records] == [
        f"{path}: retention.age is 1 day, 0:00:00 in the topic; 7 days, 0:00:00, {ignored}",
        f"{path}: segment_age is None in the topic; 1:00:00, {ignored}",
    ], "once for each that differs, however often the process opens it"


def test_service_that_says_so_changes_the_stored_policies(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Topic.open(path, create=True, retention=Retention(age=timedelta(days=7))).close()
    with caplog.at_level("INFO", logger="loglib"):
        for _ in range(2):
            with Topic.open(path, alter=True, retention=Retention(age=timedelta(days=14)), batch_records=9) as topic:
                assert topic.config.retention.age == timedelta(days=14)
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 2 and "retention is Retention(age=datetime.timedelta(days=14)" in told[0], "once, as it changed"
    assert "and was Retention(age=datetime.timedelta(days=7)" in told[0] and "batch_records is 9" in told[1]
    with Topic.open(path, mode="r") as topic:
        assert (topic.config.retention.age, topic.config.batch_records) == (timedelta(days=14), 9)
    with pytest.raises(ValueError, match="writes nothing"):
        Topic.open(path, mode="r", alter=True)


def test_policy_that_is_invalid_is_refused_though_another_one_counts(path: Path) -> None:
    Topic.create(path).close()
    with pytest.raises(ValueError, match="batch_records"):
        Topic.open(path, batch_records=0)


# --- changing policies while the topic is open ------------------------------------------------------


def test_reading_what_is_not_there_makes_nothing(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Topic.create.* makes one"):
        Topic.open(path, mode="r")
    assert not path.exists()


def test_mistyped_path_makes_no_topic(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="create=True"):
        Topic.open(path, partitions=3)
    assert not path.exists() and not Topic.exists(path)
    with Topic.create(path, partitions=3, segment_age="1h30m", segment_bytes="1MiB") as topic:
        assert len(topic.partitions) == 3 and topic.config.segment_bytes == 1 << 20
        assert topic.config.segment_age == timedelta(minutes=90)
    assert Topic.exists(path)
    with pytest.raises(FileExistsError, match="Topic.open opens it"):
        Topic.create(path)
    with Topic.open(path, create=True, partitions=3) as topic:  # made only if there is none
        assert topic.config.segment_bytes == 1 << 20
    with pytest.raises(ValueError, match="URI"):
        Topic.exists("s3://bucket/topic")


def test_partition_of_a_key_is_where_its_records_go(path: Path) -> None:
    with Topic.create(path, partitions=5) as topic:
        keys = [b"key-%d" % number for number in range(50)]
        assert [topic.partition_of(key) for key in keys] == [topic.append(b"", key).partition for key in keys]
    with Topic.open(path, mode="r") as topic:
        assert {topic.partition_of(key) for key in keys} == set(range(5))


def test_offset_at_a_time_is_that_of_the_first_record_then(path: Path) -> None:
    at = datetime(2026, 5, 1, 12, tzinfo=UTC)
    with Topic.create(path) as topic:
        offsets = [topic.append(b"", timestamp=at + timedelta(hours=n), sync=True).offset for n in range(4)]
        partition = topic.partition(0)
        assert [partition.offset_at(at + timedelta(hours=n, minutes=-1)) for n in range(4)] == offsets
        assert partition.offset_at("2026-05-01T14:00Z") == offsets[2]
        assert partition.offset_at(at + timedelta(days=1)) == partition.high_watermark
        for wrong in ("begin", "end", offsets[1]):
            with pytest.raises(ValueError, match="is no time"):
                partition.offset_at(wrong)  # type: ignore[arg-type]
    with pytest.raises(LogClosedError):
        partition.offset_at(at)


def test_mode_must_be_one_of_two(path: Path) -> None:
    with pytest.raises(ValueError, match="mode must be"):
        Topic.open(path, create=True, mode="w")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a b", "ä", "x" * 250, "a\0b", "a\nb"])
def test_name_that_some_system_cannot_hold_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a name|null byte"):
        Topic.open(os.path.join(tmp_path, name), create=True)
    assert list(tmp_path.iterdir()) == []


def test_directory_of_other_files_is_not_made_a_topic(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("x")
    with pytest.raises(LogError, match="holds files"):
        Topic.open(path, create=True)
    assert [each.name for each in path.iterdir()] == ["precious"]


def test_topic_that_is_removed_while_it_is_opened_is_not_found(path: Path) -> None:
    class Removing(UnsyncedFiles):
        def rename(self, source: str, target: str, **directories: int) -> None:  # type: ignore[override]
            os.rename(source, target, **directories)
            if target == str(path):
                self.remove_tree(target)

    with pytest.raises(FileNotFoundError, match="removed while"):
        testing.open_topic(path, files=Removing())


def test_newer_topic_is_refused_by_name(path: Path) -> None:
    Topic.open(path, create=True).close()
    description = json.loads((path / "topic.json").read_text())
    description["format"] = 4
    description.pop("crc", None)
    (path / "topic.json").write_text(json.dumps(description))
    with pytest.raises(UnsupportedFormatError, match="topic format 4"):
        Topic.open(path, mode="r")


def test_unreadable_description_is_corruption(path: Path) -> None:
    Topic.open(path, create=True).close()
    for content in ("", "[]", "{}", '{"format": 3}', "null"):
        (path / "topic.json").write_text(content)
        with pytest.raises(CorruptLogError, match="topic.json"):
            Topic.open(path)


def test_missing_codec_is_found_at_open_and_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="zstd"):
        Topic.open(path, create=True, compression="zstd")
    assert not path.exists()
    monkeypatch.undo()
    Topic.create(path, compression="zstd").close()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="zstd"):
        Topic.open(path)
    monkeypatch.undo()
    with Topic.open(path) as topic:
        topic.append(b"x" * 1000)


@pytest.mark.parametrize("compression", ["none", "zlib", "lz4", "zstd"])
def test_every_codec_gives_back_what_was_appended(compression: str, open_topic: Open) -> None:
    topic = open_topic(compression=compression)
    values = [b"abc" * n for n in range(100)]
    topic.append_many(values)
    topic.append(os.urandom(100))
    topic.flush()
    assert values_of(topic)[:100] == values
    sound(topic.partition(0))


# --- the end -----------------------------------------------------------------------------------------


def test_topic_is_a_context_manager_and_says_its_state(open_topic: Open) -> None:
    with open_topic(partitions=2) as topic:
        assert repr(topic) == f"<Topic at {topic.path}, partitions 2, mode a, holding 0 bytes, groups none>"
    assert "closed" in repr(topic)
    with pytest.raises(LogClosedError, match="open the topic again"):
        topic.append(b"x")


def test_topic_open_for_reading_pickles_as_its_path(open_topic: Open, path: Path) -> None:
    with open_topic() as topic:
        topic.append(b"x", sync=True)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(topic)
        with Topic.open(path, mode="r") as reading:
            content = pickle.dumps(reading)
            assert len(content) < 500
            with pickle.loads(content) as copy:
                assert copy.mode == "r" and values_of(copy) == [b"x"]


def test_reading_topic_needs_no_close(path: Path) -> None:
    Topic.open(path, create=True, **QUIET).close()
    topic = Topic.open(path, mode="r")
    with pytest.raises(ReadOnlyError):
        topic.append(b"x")
    del topic  # and no ResourceWarning, which would be an error here


def test_topic_in_memory_is_reconfigured_there(tmp_path: Path) -> None:
    # The new topic.json was written to the disk, whatever files the topic was on.
    files = MemoryFiles()
    path = tmp_path / "topic"
    testing.open_topic(path, files=files, **QUIET).close()
    with testing.open_topic(path, files=files) as topic:
        topic.alter(segment_bytes=1 << 20)
    with testing.open_topic(path, mode="r", files=files) as topic:
        assert topic.config.segment_bytes == 1 << 20
    assert not path.exists()


def test_opening_costs_a_few_calls_a_partition(open_topic: Open) -> None:
    open_topic(partitions=40).close()
    files = RecordingFiles()
    with open_topic(files=files):
        assert len(files.calls) < 50 * 40


@needs_proc
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("room", [119, 121])
def test_more_partitions_than_descriptors_say_how_many_are_needed(tmp_path: Path, room: int) -> None:
    """340 partitions under 1,024 descriptors: a raw "Too many open files", of a file that nobody has heard of."""
    run_python(
        """
        import os, resource, sys
        from loglib import FlushPolicy, Retention, Topic
        from loglib.errors import TooManyFilesError

        path, room = sys.argv[1], int(sys.argv[2])
        quiet = dict(flush=FlushPolicy(records=None, interval=None, bytes=None), retention=Retention(age=None))
        Topic.open(path, create=True, partitions=40, segment_age=None, **quiet).close()
        used = len(os.listdir("/proc/self/fd")) - 1  # without the one for looking
        limit = used + room
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            topic = Topic.open(path)
        except TooManyFilesError as error:
            assert room == 119 and (error.needed, error.limit, error.errno) == (121, limit, 24), error
            assert f"needs 121 descriptors besides those in use, and `ulimit -n` is {limit}" in str(error)
            assert len(os.listdir("/proc/self/fd")) - 1 == used, "nothing is left open"
        else:
            assert room == 121
            for partition in topic.partitions:
                partition.append(b"x", sync=True)
                partition.roll()
            topic.close()
        with Topic.open(path, shared=True) as topic:  # and nothing is left locked
            topic.append(b"x", sync=True)
        """,
        tmp_path / "topic",
        room,
    )


def test_other_failures_while_locks_are_taken_are_what_they_are(path: Path) -> None:
    Topic.open(path, create=True).close()
    with pytest.raises(OSError, match="Input/output error") as caught:
        testing.open_topic(path, files=FaultyFiles("flock"))
    assert not isinstance(caught.value, LogError)
