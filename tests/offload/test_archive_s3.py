"""Archiving to an S3 API server on the loopback interface, whose connections break, time out and answer with errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import s3_server
from s3_server import Fault, Request, S3Server
from tiered import seal

from conftest import Clock, start_python
from loglib import CorruptLogError, LogError, Retention, Topic
from loglib.offload import ArchiveManifest, archive, archived, parquet, read_archive, s3, tier
from loglib.offload.archiving import commit, open_archive
from loglib.offload.store import Store
from loglib.system.files import REAL

Open = Callable[..., Topic]


store, impatient = s3_server.store, s3_server.impatient


@pytest.fixture
def key(tmp_path: Path) -> str:
    """Of an archive that only this test has."""
    return f"{tmp_path.name}/archive"


def files_of(store: S3Server, key: str) -> list[str]:
    """The names of the objects with records."""
    return [each.removeprefix(f"{key}/") for each in store.keys(key) if each.endswith(".parquet")]


def check(made: ArchiveManifest, store: S3Server, key: str, topic: Topic) -> None:
    """The archive names exactly the objects that there are, and they have the log's records, each once."""
    assert sorted(file.name for each in made.partitions for file in each.files) == files_of(store, key)
    assert archived(store.uri(key)) == made
    expected = [record for part in topic.partitions for record in part.read(end=made.ends[part.id])]
    found = read_archive(store.uri(key)).read_all()
    assert found.column("offset").to_pylist() == [record.offset for record in expected]
    assert found.column("value").to_pylist() == [record.value for record in expected]
    assert found.column("key").to_pylist() == [record.key for record in expected]


# --- archiving -----------------------------------------------------------------------------------


def test_archive_in_a_store_goes_on_where_it_ended(open_topic: Open, store: S3Server, key: str) -> None:
    topic = open_topic(partitions=2)
    seal(topic, 2, partitions=(0, 1))
    first = archive(topic, store.uri(key), file_bytes=1)
    assert first.version == 1 and first.rows == 20
    check(first, store, key, topic)
    before = len(store.requests)
    assert archive(topic, store.uri(key)) == first
    assert not [each for each in store.requests[before:] if each.method == "PUT"], "nothing was sealed"
    seal(topic, 1, partitions=(1,))
    second = archive(topic, store.uri(key))
    assert second.version == 2 and second.partitions[0] == first.partitions[0]
    check(second, store, key, topic)


def test_key_with_escapes_is_written_where_it_is_read(open_topic: Open, store: S3Server, key: str) -> None:
    topic = open_topic()
    seal(topic, 1)
    uri = store.uri(f"{key}/100%25%20%C3%BC")
    made = archive(topic, uri)
    assert archive(topic, uri) == archived(uri) == made
    assert read_archive(uri).read_all().num_rows == made.rows == 5
    assert f"{key}/100% ü/{made.partitions[0].files[0].name}" in store.keys(key)


def test_past_in_a_store_and_the_live_tail_are_one_table(open_topic: Open, store: S3Server, key: str) -> None:
    topic = open_topic()
    seal(topic, 3)
    archive(topic, store.uri(key))
    seal(topic, 1)
    topic.append(b"the last", sync=True)
    kept = topic.partition(0).delete_before(topic.partition(0).segments[2].base_offset)
    offsets = topic.arrow(archive=store.uri(key), columns=["offset"]).read_all().column("offset").to_pylist()
    assert len(offsets) == 21 and offsets[0] == 0 < kept
    middle = offsets[7]
    part = topic.partition(0).arrow(middle, archive=store.uri(key), columns=["offset"]).read_all()
    assert part.column("offset").to_pylist() == offsets[7:]


def test_retention_waits_for_an_archive_in_a_store(
    open_topic: Open, clock: Clock, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = store.uri_of_policy(key, monkeypatch)
    retention = Retention(age=None, bytes=0, archive=place, archive_grace=timedelta(0))
    topic = open_topic(retention=retention)
    seal(topic, 2)
    assert [each.drop for each in topic.retain()] == [False] * 3
    made = archive(topic, store.uri(key), file_bytes=1)
    clock.advance(timedelta(seconds=1))
    seal(topic, 1)
    gone = made.partitions[0].files[1].name
    content = store.get(f"{key}/{gone}")
    store.remove(f"{key}/{gone}")
    assert [each.drop for each in topic.retain(dry_run=True)] == [True, False, False, False], "an object is gone"
    store.put(f"{key}/{gone}", content)
    assert [each.drop for each in topic.retain()] == [True, True, False, False]
    assert topic.arrow(archive=store.uri(key)).read_all().num_rows == 15


def test_command_archives_to_a_store_and_shows_no_secret(
    open_topic: Open, store: S3Server, key: str, path: Path
) -> None:
    topic = open_topic()
    seal(topic)
    command = [sys.executable, "-m", "loglib", "archive", str(path), store.uri(key)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"version 1 of s3://bucket/{key}: 5 records" in ran.stdout + ran.stderr
    assert "secret" not in ran.stdout + ran.stderr
    check(archived(store.uri(key)), store, key, topic)


# --- refusals ------------------------------------------------------------------------------------


def test_other_things_in_the_place_are_refused(open_topic: Open, store: S3Server, key: str, tmp_path: Path) -> None:
    topic = open_topic()
    seal(topic)
    with pytest.raises(FileNotFoundError, match="no archive here"):
        archived(store.uri(key))
    tier(topic, store.uri(f"{key}-segments"))
    with pytest.raises(ValueError, match="has the segments of a topic"):
        archive(topic, store.uri(f"{key}-segments"))
    archive(topic, store.uri(key))
    with Topic.open(tmp_path / "other", create=True) as other, pytest.raises(LogError, match="archive of another log"):
        seal(other)
        archive(other, store.uri(key))
    with pytest.raises(ValueError, match="needs a directory"):
        archive(topic, store.uri(key), delta=True)
    with pytest.raises(ValueError, match="s3://"):
        archive(topic, "gs://bucket/archive?anonymous=true")


def test_spark_is_refused_with_what_it_can_read(open_topic: Open, store: S3Server, key: str) -> None:
    from loglib.spark.archive_and_tail import past_and_tail

    topic = open_topic()
    seal(topic)
    archive(topic, store.uri(key))
    with pytest.raises(ValueError, match=r"archives in directories.*loglib.offload.tier"):
        past_and_tail(
            None, topic.path, store.uri(key),  # type: ignore[arg-type]
            start="begin", end="end", columns=None, where=None,
        )  # fmt: skip


def test_name_that_is_taken_is_refused(
    open_topic: Open, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic()
    seal(topic)
    monkeypatch.setattr(s3.S3Store, "put", lambda *_: False)
    with pytest.raises(LogError, match="is there already"):
        archive(topic, store.uri(key))


def test_retention_drops_nothing_while_the_store_cannot_be_asked(
    open_topic: Open,
    clock: Clock,
    store: S3Server,
    key: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = store.uri_of_policy(key, monkeypatch)
    topic = open_topic(retention=Retention(age=None, bytes=0, archive=place, archive_grace=timedelta(0)))
    seal(topic)
    archive(topic, store.uri(key))
    clock.advance(timedelta(seconds=1))
    with store.failing(lambda _: Fault(False, "denied")):
        assert [each.drop for each in topic.retain()] == [False] * 2
    assert "retention drops nothing" in caplog.text and "secret" not in caplog.text
    assert [each.drop for each in topic.retain()] == [True, False]


def test_object_that_differs_is_removed_and_not_named(open_topic: Open, store: S3Server, key: str) -> None:
    topic = open_topic()
    seal(topic)

    def change(request: Request) -> Fault | None:
        if request.method == "GET" and request.path.partition("?")[0].endswith(".parquet"):
            (name,) = files_of(store, key)
            content = bytearray(store.get(f"{key}/{name}"))
            content[100] ^= 1
            store.put(f"{key}/{name}", bytes(content))
        return None

    with store.failing(change), pytest.raises(CorruptLogError, match="differs from what was uploaded"):
        archive(topic, store.uri(key))
    assert store.keys(key) == []
    check(archive(topic, store.uri(key)), store, key, topic)


def test_damage_in_a_store_is_found_by_reading(open_topic: Open, store: S3Server, key: str) -> None:
    topic = open_topic()
    seal(topic)
    archive(topic, store.uri(key))
    (name,) = files_of(store, key)
    content = store.get(f"{key}/{name}")
    store.put(f"{key}/{name}", content[:-20] + b"?" + content[-19:])
    with pytest.raises(CorruptLogError):
        read_archive(store.uri(key)).read_all()
    store.remove(f"{key}/{name}")
    with pytest.raises(CorruptLogError, match="no file"):
        read_archive(store.uri(key)).read_all()


# --- faults, races and deaths --------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True], ids=["not applied", "applied"])
@pytest.mark.parametrize("which", range(8))
def test_request_that_fails_doubles_and_loses_nothing(
    open_topic: Open, store: S3Server, key: str, which: int, applied: bool
) -> None:
    """Whichever request it is, and whether or not the store did what it was asked."""
    topic = open_topic(partitions=2)
    seal(topic, 2, partitions=(0, 1))
    count = iter(range(100))

    def fault(request: Request) -> Fault | None:
        return Fault(applied, "reset") if next(count) == which else None

    with store.failing(fault):
        try:
            archive(topic, store.uri(key), file_bytes=1)
        except OSError as error:
            assert store.uri(key) not in str(error) and "secret" not in str(error)
    made = archive(topic, store.uri(key), file_bytes=1)
    assert archive(topic, store.uri(key)) == made, "but for what it sweeps"
    check(made, store, key, topic)


def test_who_is_too_late_throws_its_files_away(
    open_topic: Open, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic()
    seal(topic, 2)
    raced: list[int] = []

    def late(place: Store, made: ArchiveManifest) -> bool:
        if not raced:
            raced.append(1)
            archive(topic, store.uri(key), file_bytes=1)
        return commit(place, made)

    monkeypatch.setattr("loglib.offload.archiving.commit", late)
    made = archive(topic, store.uri(key))
    assert made.version == 1 and len(made.partitions[0].files) == 2
    check(made, store, key, topic)


def test_file_that_may_still_be_committed_is_not_swept(
    open_topic: Open, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic()
    seal(topic)
    archive(topic, store.uri(key))
    seal(topic)

    def slow(place: Store, made: ArchiveManifest) -> bool:
        with closing(open_archive(REAL, store.uri(key), 0o600)):
            assert len(files_of(store, key)) == 2
        return commit(place, made)

    monkeypatch.setattr("loglib.offload.archiving.commit", slow)
    check(archive(topic, store.uri(key)), store, key, topic)


def test_nothing_is_uploaded_of_what_was_not_compared(
    open_topic: Open, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic()
    seal(topic)

    def different(*_: object) -> None:
        raise CorruptLogError("x", 0, "records that differ", "the same")

    with monkeypatch.context() as patch, pytest.raises(CorruptLogError):
        patch.setattr(parquet, "compare", different)
        archive(topic, store.uri(key))
    assert store.keys(key) == []


def test_what_a_killed_process_has_left_is_swept(open_topic: Open, store: S3Server, key: str, path: Path) -> None:
    """An object is there, and no manifest names it. The next call does not know whether its process lives."""
    topic = open_topic()
    seal(topic, 2)
    program = """
        import os, sys
        from loglib.offload import archive

        sys.modules["loglib.offload.archiving"].commit = lambda *_: os._exit(9)
        archive(sys.argv[1], sys.argv[2])
    """
    with start_python(program, path, store.uri(key)) as process:
        assert process.wait() == 9
    left = files_of(store, key)
    assert len(left) == 1
    made = archive(topic, store.uri(key))
    assert len(files_of(store, key)) == 2, "while it is not known to be dead, it may still commit"
    archive(topic, store.uri(key))
    assert left[0] not in files_of(store, key)
    check(made, store, key, topic)
