"""A Delta table of an archive: it has each record once, is never ahead of the archive, and outlives each crash."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from builders import spoil
from deltalake import DeltaTable, write_deltalake

from conftest import NOW, start_python
from loglib import LogError, Topic, repair, testing
from loglib.offload import archive
from loglib.testing import Call, CrashFS, DyingFiles, Killed, RecordingFiles

Open = Callable[..., Topic]


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def fill(topic: Topic, *, times: int = 1) -> None:
    """Add a sealed segment to each partition, with nulls and headers among its records."""
    for _ in range(times):
        for part in topic.partitions:
            part.append(None, b"key", timestamp=NOW)
            part.append(b"value", headers=[("a", b"b")], timestamp=NOW + 1_234_567)
            part.flush()
            part.roll()


def rows(table: pa.Table) -> list[Any]:
    found: list[Any] = table.select(["partition", "offset", "timestamp", "key", "value", "headers"]).to_pylist()
    return sorted(found, key=lambda row: (row["partition"], row["offset"]))


def rows_of(to: Path) -> list[Any]:
    """All rows of the Delta table, as its own reader finds them."""
    return rows(DeltaTable(to).to_pyarrow_table())


def commits(to: Path) -> list[Path]:
    return sorted((to / "_delta_log").glob("*.json"))


def test_delta_table_has_the_files_of_the_archive_each_record_once(open_topic: Open, to: Path) -> None:
    with open_topic(partitions=2) as topic:
        fill(topic)
        archive(topic, to)  # without a table
        fill(topic)
        made = archive(topic, to, delta=True)
        fill(topic, times=2)
        made = archive(topic, to, delta=True, file_bytes=1)
        assert archive(topic, to, delta=True) == made
        log = topic.arrow().read_all()
    table = DeltaTable(to)
    assert rows_of(to) == rows(log)
    assert len(commits(to)) == 2
    assert table.metadata().configuration == {"delta.appendOnly": "true"}
    assert sorted(table.file_uris()) == sorted(str(to / each.name) for part in made.partitions for each in part.files)
    for partition, end in made.ends.items():
        assert table.transaction_version(f"loglib:{made.log_id.hex()}:{partition}") == end


def test_other_engines_see_the_table_and_leave_out_files_by_offset_and_time(open_topic: Open, to: Path) -> None:
    with open_topic() as topic:
        fill(topic, times=3)
        made = archive(topic, to, delta=True, file_bytes=1)
    frame = pl.scan_delta(str(to))
    assert frame.select(pl.len()).collect().item() == 6
    last = made.partitions[0].files[-1]
    assert frame.filter(pl.col("offset") >= last.start).collect().height == 2
    moment = datetime.fromtimestamp(NOW / 1e6, UTC)
    assert frame.filter(pl.col("timestamp") <= moment).collect().height == 3
    actions = [json.loads(line) for line in commits(to)[0].read_text().splitlines()]
    stats = [json.loads(each["add"]["stats"]) for each in actions if "add" in each]
    assert [each["numRecords"] for each in stats] == [2, 2, 2]
    assert [each["minValues"]["offset"] for each in stats] == [each.start for each in made.partitions[0].files]
    assert all(each["maxValues"]["timestamp"] >= each["minValues"]["timestamp"] for each in stats)


def test_times_that_delta_cannot_write_have_no_statistics(open_topic: Open, to: Path) -> None:
    with open_topic() as topic:
        topic.append(b"value", timestamp=1 << 62)
        topic.flush()
        topic.partition(0).roll()
        archive(topic, to, delta=True)
    assert "timestamp" not in commits(to)[0].read_text().partition("minValues")[2]


def test_an_empty_archive_is_an_empty_table(open_topic: Open, to: Path) -> None:
    with open_topic() as topic:
        archive(topic, to, delta=True)
    assert DeltaTable(to).to_pyarrow_table().num_rows == 0


def test_rows_that_were_put_together_by_another_engine_are_not_added_again(open_topic: Open, to: Path) -> None:
    with open_topic() as topic:
        fill(topic, times=3)
        archive(topic, to, delta=True, file_bytes=1)
        DeltaTable(to).optimize.compact()
        assert len(DeltaTable(to).file_uris()) == 1
        fill(topic)
        archive(topic, to, delta=True)
        assert rows_of(to) == rows(topic.arrow().read_all())


def test_files_that_are_not_real_are_refused_before_anything_is_written() -> None:
    files = CrashFS()
    files.make_directories("/data")
    with testing.open_topic("/data/t", files=files) as topic:
        with pytest.raises(ValueError, match="needs a directory"):
            archive(topic, "/data/archive", delta=True)
        assert not files.exists("/data/archive")


def test_another_table_is_an_error_and_the_archive_is_complete(open_topic: Open, to: Path) -> None:
    write_deltalake(to, pa.table({"other": [1]}))
    with open_topic() as topic:
        fill(topic)
        with pytest.raises(LogError, match="archived, but its Delta table"):
            archive(topic, to, delta=True)
        assert archive(topic, to).rows == 2


# --- crashes --------------------------------------------------------------------------------------------------


class Dying(DyingFiles):
    """Dies as a process does: its locks go with it."""

    def before(self, call: Call) -> None:
        if call.name != "flock":
            super().before(call)


def test_kills_at_every_step_of_ours_double_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "topic"
    with testing.open_topic(path) as topic:
        fill(topic, times=2)
    for at in range(1, 100):
        to = tmp_path / f"archive-{at}"
        try:
            with testing.open_topic(path, files=Dying(at), mode="r") as topic:
                archive(topic, to, delta=True)
        except Killed:
            judge(path, to, {0, 4})
        else:
            break
    assert at > 15


def test_each_call_syncs_the_newest_commit_before_it_adds_one_and_after(to: Path) -> None:
    files = RecordingFiles()
    with testing.open_topic(to.parent / "topic", files=files) as topic:
        fill(topic)
        archive(topic, to, delta=True)
        first, log = commits(to)[-1], str(to / "_delta_log")
        fill(topic)
        files.calls.clear()
        archive(topic, to, delta=True)
    synced = [call.path for call in files.calls if call.name in ("datasync", "fsync")]
    names = [each for each in synced if each.startswith(log) or each == str(to)]
    assert names[-6:] == [str(first), log, str(to), str(commits(to)[-1]), log, str(to)]


@pytest.mark.parametrize("left", [0, 1, 40, -200, -1], ids=lambda left: f"{left} bytes")
def test_a_commit_that_a_power_cut_has_torn_is_made_again(left: int, tmp_path: Path) -> None:
    path, to = tmp_path / "topic", tmp_path / "archive"
    with testing.open_topic(path) as topic:
        fill(topic)
        archive(topic, to, delta=True)
        fill(topic, times=2)
        archive(topic, to, delta=True, file_bytes=1)
    newest = commits(to)[-1]
    content = newest.read_bytes()
    newest.write_bytes(content[:left])
    judge(path, to, {2, 6})
    newest.write_bytes(content[:left].ljust(len(content), b"\0"))  # the size came to the disk, the rest did not
    judge(path, to, {2, 6})


def test_a_commit_of_which_whole_lines_are_missing_is_made_again(tmp_path: Path) -> None:
    path, to = tmp_path / "topic", tmp_path / "archive"
    with testing.open_topic(path) as topic:
        fill(topic)
        archive(topic, to, delta=True)
        fill(topic, times=2)
        archive(topic, to, delta=True, file_bytes=1)
    newest = commits(to)[-1]
    lines = newest.read_text().splitlines(keepends=True)
    for number in range(len(lines)):
        newest.write_text("".join(lines[:number]))
        judge(path, to, {2, 4, 6})


def judge(path: Path, to: Path, allowed: set[int]) -> None:
    """The table has one of these numbers of rows, if it can be read; a second call completes it."""
    with Topic.open(path, mode="r") as topic:
        log = rows(topic.arrow().read_all())
        try:
            found = rows_of(to)
        except Exception:
            found = []
        assert all(row in log for row in found)
        assert len(found) in allowed | {0}
        archive(topic, to, delta=True)
        assert rows_of(to) == log, "each record once"


_ARCHIVE = "import loglib, sys; loglib.offload.archive(sys.argv[1], sys.argv[2], delta=True, file_bytes=1)"


def test_processes_that_race_double_and_lose_nothing(tmp_path: Path) -> None:
    path, to = tmp_path / "topic", tmp_path / "archive"
    with testing.open_topic(path, partitions=2) as topic:
        fill(topic, times=3)
        racers = [start_python(_ARCHIVE, path, to) for _ in range(2)]
        for each in racers:
            _, errors = each.communicate(timeout=120)
            assert each.returncode == 0, errors
        assert rows_of(to) == rows(topic.arrow().read_all())


@pytest.mark.slow
def test_kills_at_every_call_of_the_package_double_and_lose_nothing(tmp_path: Path) -> None:
    """SIGKILL, which strace injects at the n-th call that makes, links, removes or writes a file."""
    path = tmp_path / "topic"
    with testing.open_topic(path) as topic:
        fill(topic, times=2)
    killed = 0
    for call in ("linkat", "unlink", "mkdir", "fdatasync", "fsync"):
        for at in range(1, 30):
            to = tmp_path / f"archive-{call}-{at}"
            with testing.open_topic(path, mode="r") as topic:
                archive(topic, to, file_bytes=1)
            inject = f"--inject={call}:signal=KILL:when={at}"
            command = ["strace", "-f", "-qq", "-o", "/dev/null", f"--trace={call}", inject]
            status = subprocess.run([*command, sys.executable, "-c", _ARCHIVE, path, to], check=False).returncode
            if status == 0:
                break
            assert status == -signal.SIGKILL
            killed += 1
            judge(path, to, {4})
    assert killed > 5


def test_what_was_healed_after_it_was_archived_comes_to_the_table_once(open_topic: Open, path: Path, to: Path) -> None:
    with open_topic() as topic:
        fill(topic, times=2)
        expected = rows(topic.arrow().read_all())
    file = path / "0000" / f"{0:020d}.log"
    whole = file.read_bytes()
    spoil(file, 4096 + 100)
    repair(path)
    archive(path, to, delta=True)
    assert len(rows_of(to)) == 2
    file.write_bytes(whole)
    repair(path)
    for _ in range(2):
        archive(path, to, delta=True)
        assert rows_of(to) == expected
