"""Archivers beside each other: none doubles or loses a record, and each sweeps only what dead processes left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import archived_topics
import pytest
from archived_topics import in_order, open_store, parquet_files, sealed

from conftest import start_python
from loglib import LockedError, Topic, testing
from loglib.offload import archive, read_archive
from loglib.system.files import REAL
from loglib.testing import RecordingFiles

Open = Callable[..., Topic]

to = archived_topics.to


def test_what_dead_processes_left_is_swept_and_nothing_else(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    archive(topic, to)
    kept = set(parquet_files(to))
    orphan = f"{0:020d}-{100:020d}-{'b' * 16}.parquet"
    drawn = "ab" * 8
    ours = [to / "0000" / orphan, to / "0000" / f".{orphan}-{drawn}.tmp", to / "_loglib" / f".7-{drawn}.tmp"]
    others = [to / "0000" / "notes.txt", to / "readme", to / "9999"]
    for each in (*ours, *others):
        each.write_bytes(b"x")
    archive(topic, to)
    assert not any(each.exists() for each in ours)
    assert all(each.exists() for each in others) and set(parquet_files(to)) > kept


def test_files_of_a_live_process_are_not_swept(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    sealed(topic)
    with closing(open_store(to)):
        unfinished = to / "0000" / f"{0:020d}-{100:020d}-{'b' * 16}.parquet"
        unfinished.parent.mkdir()
        unfinished.write_bytes(b"x")
        archive(topic, to)
        assert unfinished.exists()
    archive(topic, to)
    assert not unfinished.exists()


def test_whoever_sweeps_is_waited_for(to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.system.directory._LOCK_TIMEOUT_S", 0.01)
    to.mkdir()
    fd = REAL.open_directory(str(to))
    try:
        assert REAL.try_lock(fd)
        with pytest.raises(LockedError, match="sweeps"):
            open_store(to)
    finally:
        REAL.close(fd)


RACER = """
import sys
from loglib.offload import archive
for _ in range(int(sys.argv[3])):
    archive(sys.argv[1], sys.argv[2], file_bytes=1)
"""


def test_archivers_that_race_double_and_lose_nothing(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic(partitions=2)
    for number in range(8):
        sealed(topic, segments=1, partition=number % 2)
    racers = [start_python(RACER, path, to, 10) for _ in range(2)]
    for number in range(10):
        sealed(topic, segments=1, partition=number % 2)
    for each in racers:
        assert each.communicate(timeout=60)[1] == "" and each.returncode == 0
    made = archive(topic, to)
    assert made.rows == 180
    assert in_order(read_archive(to).read_all()).equals(in_order(topic.arrow().read_all()))
    named = {to / file.name for each in made.partitions for file in each.files}
    assert set(parquet_files(to)) == named


def test_a_file_that_another_process_archived_first_is_thrown_away(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    sealed(topic)

    class Overtaken(RecordingFiles):
        """Another process archives all before the first manifest is linked."""

        done = False

        def before(self, call: testing.Call) -> None:
            super().before(call)
            if call.name == "link" and "1.json-" in call.path and not self.done:
                self.done = True
                archive(topic, to)

    with testing.open_topic(path, files=Overtaken(), mode="r") as reader:
        made = archive(reader, to)
    assert made.version == 1 and made.rows == 30 and len(parquet_files(to)) == 1


def test_what_another_process_archived_and_retention_dropped_meanwhile_is_no_error(
    open_topic: Open, path: Path, to: Path
) -> None:
    topic = open_topic()
    sealed(topic)

    class Overtaken(RecordingFiles):
        """While the first file is written, another process archives all, and retention drops it."""

        done = False

        def before(self, call: testing.Call) -> None:
            super().before(call)
            if call.name == "create" and ".parquet-" in call.path and not self.done:
                self.done = True
                archive(topic, to)
                topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)

    with testing.open_topic(path, files=Overtaken(), mode="r") as reader:
        made = archive(reader, to, file_bytes=1)
    assert made.version == 1 and made.rows == 30 and len(parquet_files(to)) == 1


@pytest.mark.parametrize("given", ["a topic", "another topic", "nothing"])
def test_an_archive_is_a_directory_of_its_own(open_topic: Open, path: Path, tmp_path: Path, given: str) -> None:
    Topic.open(tmp_path / "other", create=True).close()
    topic = open_topic()
    sealed(topic)
    places: dict[str, str | Path] = {"a topic": path, "another topic": tmp_path / "other", "nothing": ""}
    with pytest.raises(ValueError, match="is a topic; an archive" if given != "nothing" else "is empty"):
        archive(topic, places[given])
    assert not list(tmp_path.rglob("_loglib"))
