"""The sink without Spark: tasks that stage, and the driver that commits or aborts."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from spark_logs import all_records
from spark_staging import SCHEMA, make, numbers, stage, values

import loglib
from conftest import NOW, crash_copy
from loglib import CorruptLogError, FencedError, LockedError, LogError, NotLeaderError, Topic
from loglib.append.partitioner import by_crc32
from loglib.spark import commit as commits
from loglib.spark import stage as stages
from loglib.spark.commit import abort, commit
from loglib.spark.repetition import Write, repetitions
from loglib.spark.sink_target import parse
from loglib.spark.stage import RowPartitioner, TaskStage
from loglib.system.files import REAL
from loglib.system.lock import try_acquire
from loglib.transactions import fit, staging
from loglib.transactions.apply import Applier
from loglib.transactions.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "logs" / "topic")


def write(version: int = 0, *, owner: str = "run", source: str | None = "query") -> Write:
    return Write("app", version, owner, source, is_new=False)


def staged_in(path: Path) -> list[str]:
    return sorted(os.listdir(path / "staging")) if (path / "staging").exists() else []


def check(path: Path, expected: list[bytes]) -> None:
    """All are there once, each in the partition of its key, in order."""
    for partition in range(3):
        found = [each.value for each in all_records(path) if each.partition == partition]
        assert found == [each for each in expected if by_crc32(each, 3) == partition]
    with Topic.open(path, mode="r") as topic:
        assert topic.verify().damage == ()


def test_copy_is_not_written(path: Path, tmp_path: Path) -> None:
    """Neither a mirror nor, behind a promotion, what was staged for the topic that it took the place of."""
    staged = stage(path, numbers(10))
    mirror = tmp_path / "copies" / "topic"
    loglib.copies.mirror(path, mirror)
    with pytest.raises(NotLeaderError, match="mirror"):
        parse({"path": str(mirror)}, SCHEMA, overwrite=False, streaming=True)
    loglib.copies.promote(mirror)
    with pytest.raises(NotLeaderError, match="superseded"):
        commit(write(), [staged])
    commit(write(), [stage(mirror, numbers(5))])
    check(mirror, numbers(5))


# --- staging -------------------------------------------------------------------------------------------


def test_few_records_need_no_file(path: Path) -> None:
    staged = stage(path, numbers(100))
    assert staged.frames
    assert staged_in(path) == []
    assert commit(write(), [staged])
    check(path, numbers(100))


def test_many_records_are_staged_in_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "logs" / "topic", batch_bytes=1000, batch_records=7)
    monkeypatch.setattr(stages, "_SECTIONS_BYTES", 20_000)
    monkeypatch.setattr(stages, "_WAITING_BYTES", 6_000)
    staged = stage(path, numbers(1000, 100), rows=17)
    assert staged.frames == b""
    assert len(staged.sections) > 9
    assert staged_in(path) == [staged.attempt]
    commit(write(), [staged])
    check(path, numbers(1000, 100))
    assert staged_in(path) == []


def test_partition_without_new_records_gets_no_section(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_SECTIONS_BYTES", 1000)
    monkeypatch.setattr(stages, "_WAITING_BYTES", 0)
    found = numbers(100, 50) + [b"one".ljust(50)] * 50
    staged = stage(path, found, rows=50)
    assert len(staged.sections) == 3 + 3 + 1
    commit(write(), [staged])
    check(path, found)


@pytest.mark.parametrize("own_files", [64, 1])
def test_much_for_a_partition_gets_a_file_that_becomes_a_segment(
    own_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "logs" / "topic", batch_bytes=1000, batch_records=7, segment_bytes=16_384)
    for module, name, value in [
        (stages, "_SECTIONS_BYTES", 20_000), (stages, "_WAITING_BYTES", 6_000), (stages, "_OWN_BYTES", 1_000),
        (stages, "_OWN_FILES", own_files), (staging, "_SMALL_BYTES", 1_000),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, value)
    staged = stage(path, numbers(1000, 100), rows=17)
    segments = [each for each in staged.sections if each.is_segment]
    assert len({each.partition for each in segments}) == (3 if own_files > 1 else 1)
    inodes = {os.stat(path / each.file).st_ino for each in segments}
    commit(write(), [staged])
    check(path, numbers(1000, 100))
    assert {each.stat().st_ino for each in path.glob("*/*.log")} & inodes
    assert staged_in(path) == []


def test_task_that_gives_up_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_SECTIONS_BYTES", 0)
    task = TaskStage(REAL, lambda: NOW, "write")
    dealer = RowPartitioner(
        parse({"path": str(path)}, SCHEMA, overwrite=False, streaming=False), task, keyless=0, now=int
    )
    large = pa.array([bytes(5 << 20)], pa.binary())
    dealer.deal(pa.RecordBatch.from_pydict({"key": large, "value": large}))
    assert staged_in(path) == [task.attempt]
    task.discard()
    assert staged_in(path) == []


def test_records_of_a_rare_partition_do_not_keep_the_batches_of_spark_in_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are parts of these, and wait for others of their partition."""
    monkeypatch.setattr(stages, "_SECTIONS_BYTES", 1 << 20)
    monkeypatch.setattr(stages, "_BORROWED_BYTES", 1 << 20)
    task = TaskStage(REAL, lambda: NOW, "write")
    keys = pa.array([next(key for key in numbers(99) if by_crc32(key, 3) == each) for each in (0, 0, 0, 1)])
    dealer = RowPartitioner(
        parse({"path": str(path)}, SCHEMA, overwrite=False, streaming=False), task, keyless=0, now=int
    )
    before, most = pa.total_allocated_bytes(), 0
    for _ in range(100):
        values = pa.array([bytes(128 << 10)] * 2 + [b"", b"rare"])
        dealer.deal(pa.RecordBatch.from_pydict({"key": keys, "value": values}))
        most = max(most, pa.total_allocated_bytes() - before)
    task.discard()
    assert most < 10 << 20  # of 25 MiB


def test_section_of_more_batches_than_one_write_takes_arrives(path: Path) -> None:
    make(path.with_name("small"), batch_records=1)
    staged = stage(path.with_name("small"), numbers(2_000, 100))
    assert not staged.frames
    commit(write(), [staged])
    check(path.with_name("small"), numbers(2_000, 100))


# --- the commit ------------------------------------------------------------------------------------------


def test_tasks_are_committed_in_their_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [stage(path, numbers(300)[start : start + 100]) for start in (0, 100, 200)]
    commit(write(), tasks)
    check(path, numbers(300))


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_what_attempts_have_left_goes_with_their_own_write(
    ends: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_IN_MESSAGE_BYTES", 0)
    staged, killed, other = (stage(path, numbers(10), write=name) for name in ("one", "one", "other"))
    assert len({staged.attempt, killed.attempt, other.attempt}) == 3
    if ends == "commit":
        commit(write(), [staged])
    else:
        abort(write(), [staged])
    assert staged_in(path) == [other.attempt]


def test_frames_that_are_too_many_for_the_manifest_go_to_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "_IN_MANIFEST_BYTES", 10)
    tasks = [stage(path, numbers(200)[:100]), stage(path, [b"x" * 70_000]), stage(path, numbers(200)[100:])]
    assert [bool(each.frames) for each in tasks] == [True, False, True]
    commit(write(), tasks)
    check(path, [*numbers(200)[:100], b"x" * 70_000, *numbers(200)[100:]])
    assert staged_in(path) == []


def test_nothing_is_committed_if_nothing_is_staged(path: Path) -> None:
    assert not commit(write(), [stage(path, [])])
    assert abort(write(), [])
    assert not (path.parent / ".transactions").exists()


def test_repeated_version_is_dropped_and_its_files_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit(write(3), [stage(path, numbers(10))])
    monkeypatch.setattr(stages, "_IN_MESSAGE_BYTES", 0)
    for version in (3, 2):
        again = stage(path, [b"again"])
        assert not commit(write(version, owner="another run"), [again])
        assert f"version {version} of app was committed before: 1 rows" in caplog.text
    check(path, numbers(10))
    assert [(each.app, each.version, each.rows) for each in repetitions(path)] == [("app", 3, 1), ("app", 2, 1)]
    assert staged_in(path) == []
    with pytest.raises(LogError, match="its versions count what comes from source query, not from other"):
        commit(write(4, source="other"), [stage(path, [b"x"])])


def test_former_run_is_refused(path: Path) -> None:
    commit(write(0, owner="first"), [stage(path, [b"0"])])
    commit(write(1, owner="second"), [stage(path, [b"1"])])
    with pytest.raises(FencedError):
        commit(write(2, owner="first"), [stage(path, [b"2"])])
    assert sorted(values(path)) == [b"0", b"1"]


def test_missing_and_short_files_are_found_before_the_commit_point(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_IN_MESSAGE_BYTES", 0)
    staged = stage(path, numbers(10))
    file = path / "staging" / staged.attempt / stages.NAME
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CorruptLogError, match="the end of the file"):
        commit(write(), [staged])
    file.unlink()
    with pytest.raises(LogError, match="is missing on the driver's host: nothing is committed"):
        commit(write(), [staged])
    assert loglib.transactions.last_version("app", store=path.parent) is None


def test_topic_that_is_made_again_meanwhile_is_found(path: Path, tmp_path: Path) -> None:
    staged = stage(path, numbers(10))
    path.rename(tmp_path / "old")
    make(path)
    with pytest.raises(LogError, match="was deleted and made again"):
        commit(write(), [staged])


def test_writer_that_does_not_answer_is_named_before_the_commit_point(path: Path) -> None:
    with Topic.open(
        path, create=True
    ), pytest.raises(LockedError, match="a writer that does not answer"):  # it has no thread
        commit(write(), [stage(path, numbers(10))])
    assert loglib.transactions.last_version("app", store=path.parent) is None


def test_partition_that_another_commit_holds_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(write(0), [stage(path, numbers(10))])
    applying = try_acquire(REAL, str(path.parent / ".transactions"))
    partition = [try_acquire(REAL, str(path / f"{number:04d}")) for number in range(3)]
    assert applying is not None

    def let_go(_: float) -> None:
        for lock in [*partition, applying]:
            if lock is not None:
                lock.release()
        partition.clear()

    monkeypatch.setattr(fit, "time", SimpleNamespace(sleep=let_go))
    assert commit(write(1), [stage(path, [b"next"])])


def test_commit_that_holds_a_partition_for_too_long_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(write(0), [stage(path, numbers(10))])
    monkeypatch.setattr(commits, "_APPLY_S", 0.0)
    applying = try_acquire(REAL, str(path.parent / ".transactions"))
    with Topic.open(path, create=True), pytest.raises(LockedError):
        commit(write(1), [stage(path, numbers(10))])
    assert applying is not None
    applying.release()


# --- failures ------------------------------------------------------------------------------------------------


def test_abort_removes_what_is_staged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_IN_MESSAGE_BYTES", 0)
    staged = [stage(path, numbers(10)), stage(path, numbers(10))]
    assert abort(write(), staged)
    assert staged_in(path) == []


def test_abort_fences_a_commit_that_is_still_on_its_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_IN_MESSAGE_BYTES", 0)
    staged = [stage(path, numbers(10))]
    original = Store.commit

    def overtaken(self: Store, *arguments: Any, **keywords: Any) -> Any:
        monkeypatch.setattr(Store, "commit", original)
        assert abort(write(), staged)
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(Store, "commit", overtaken)
    with pytest.raises(FencedError):
        commit(write(), staged)
    assert values(path) == []


@pytest.mark.parametrize("is_new", [False, True], ids=["an app that may exist", "a new app"])
def test_abort_after_the_commit_point_removes_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stages, "_IN_MESSAGE_BYTES", 0)
    staged = [stage(path, numbers(10))]
    this = write()._replace(is_new=is_new)
    with monkeypatch.context() as patched:
        patched.setattr(Applier, "run", fail)
        assert commit(this, staged)
    assert "version 0 of app is committed" in caplog.text
    assert "must not be written again" in caplog.text
    assert values(path) == []
    assert not abort(this, staged)
    assert staged_in(path) == [staged[0].attempt]
    copied = crash_copy(path.parent, tmp_path / "copy")
    with Topic.open(copied / "topic", create=True):
        check(copied / "topic", numbers(10))
    assert not commit(write(0, owner="again"), [stage(path, numbers(10))])
    check(path, numbers(10))


def fail(*_: Any, **__: Any) -> None:
    raise OSError("the disk fails")


def test_abort_that_fails_is_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    staged = [stage(path, numbers(10))]
    monkeypatch.setattr(Store, "fence_owner", fail)
    assert not abort(write(), staged)
    assert "what version 0 of app has staged is not removed now: the disk fails" in caplog.text


@pytest.mark.parametrize("swept_at", ["_check_files", "make_fit"])
def test_attempt_of_a_day_ago_that_is_committed_is_not_swept(
    path: Path, monkeypatch: pytest.MonkeyPatch, swept_at: str
) -> None:
    staged = [stage(path, numbers(200_000))]
    (attempt,) = staged_in(path)
    os.utime(path / "staging" / attempt, (1, 1))
    checked = getattr(commits, swept_at)

    def sweep_and_check(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.setattr(commits, swept_at, checked)
        staging.sweep(REAL, str(path), set, now_s=time.time())  # another process
        checked(*arguments, **keywords)

    monkeypatch.setattr(commits, swept_at, sweep_and_check)
    assert commit(write(), staged)
    with Topic.open(path, mode="r") as topic:
        assert len(list(topic.read())) == 200_000
    assert staged_in(path) == []


def test_attempt_that_is_just_swept_is_not_committed(path: Path) -> None:
    staged = [stage(path, numbers(200_000))]
    (attempt,) = staged_in(path)
    os.utime(path / "staging" / attempt, (1, 1))
    sweeper = try_acquire(REAL, str(path / "staging" / attempt))
    assert sweeper is not None
    with pytest.raises(LogError, match="is a day old, and is just being removed: nothing is committed"):
        commit(write(), staged)
    sweeper.release()
    assert commit(write(), staged)


def test_attempts_of_a_day_ago_are_removed(path: Path) -> None:
    for name, age in (("old", 90_000), ("young", 0)):
        (path / "staging" / name).mkdir(parents=True)
        os.utime(path / "staging" / name, (os.stat(path).st_mtime - age,) * 2)
    commit(write(), [stage(path, numbers(10))])
    assert staged_in(path) == ["young"]
