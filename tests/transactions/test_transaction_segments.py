"""Large pieces of transactions become segments: their files get a second name, and new headers."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupts import Interrupter, every_point

from conftest import NOW, QUIET, sound, values_of
from loglib import CommitPendingError, Topic, segment, testing, transaction
from loglib.append import tail
from loglib.append.section_writer import SectionWriter
from loglib.append.tail import TailWriter, Txn
from loglib.segment import HEADER_BYTES
from loglib.system.directory import Directory
from loglib.testing import CrashFS, Image, MemoryFiles, UnsyncedFiles
from loglib.transactions import apply, staging
from loglib.transactions import transaction as transaction_module

Open = Callable[..., Topic]

SMALL: dict[str, Any] = {"segment_bytes": 32 << 10, "batch_bytes": 2 << 10}
VALUES = [b"%03d" % number + bytes(997) for number in range(100)]  # 100 kB: 50 batches, in 4 segments


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is staged is in files, and 4 KiB are large."""
    monkeypatch.setattr(staging, "_SMALL_BYTES", 0)
    monkeypatch.setattr(staging, "_LARGE_BYTES", 4 << 10)


@pytest.fixture
def topic(tmp_path: Path, open_topic: Open) -> Topic:
    return open_topic(tmp_path / "data" / "topic", **SMALL)


class Killed(BaseException):
    """The process ends here."""


def die(*_: Any, **__: Any) -> None:
    raise Killed


def append(topic: Topic, version: int = 1, values: list[bytes] = VALUES) -> bool:
    with transaction("etl", version=version) as tx:
        tx.append_many(topic, values)
    return tx.repeated


def segment_files(topic: Topic) -> dict[str, int]:
    """The inode of each segment, by name."""
    return {each.name: each.stat().st_ino for each in (Path(topic.path) / "0000").glob("*.log")}


def staged_files(topic: Topic) -> dict[str, int]:
    return {each.name: each.stat().st_ino for each in (Path(topic.path) / "staging").glob("*/*")}


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The names of the files that were to become segments, and whether they did."""
    found: list[tuple[str, bool]] = []
    attach_section = SectionWriter.attach_section

    def attach(writer: SectionWriter, path: str, batches: Any) -> bool:
        done = attach_section(writer, path, batches)
        found.append((os.path.basename(path), done))
        return done

    monkeypatch.setattr(SectionWriter, "attach_section", attach)
    return found


def test_files_become_segments_and_are_not_copied(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, attached: list[tuple[str, bool]]
) -> None:
    staged: dict[str, int] = {}
    begin = noting(SectionWriter.begin_section, lambda: staged.update(staged_files(topic)))
    monkeypatch.setattr(SectionWriter, "begin_section", begin)
    topic.append(b"before")
    assert not append(topic)
    topic.append(b"after", sync=True)
    assert values_of(topic) == [b"before", *VALUES, b"after"]
    assert attached == [("0000-1", True), ("0000-2", True), ("0000-3", True), ("0000-4", True)]
    segments = segment_files(topic)
    assert {staged[name] for name, _ in attached} < set(segments.values())
    assert staged["0000"] not in segments.values()
    assert staged_files(topic) == {}
    assert all(each.size_bytes <= SMALL["segment_bytes"] for each in topic.partitions[0].segments)
    sound(topic.partitions[0])


def noting(method: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        note()
        return method(*arguments)

    return noted


def test_what_is_not_large_is_copied(topic: Topic, attached: list[tuple[str, bool]]) -> None:
    append(topic, values=VALUES[:5])  # the piece behind the first batch has fewer than 4 KiB
    assert attached == []
    assert values_of(topic) == VALUES[:5]


def test_log_is_the_same_after_recovery(topic: Topic, tmp_path: Path, open_topic: Open) -> None:
    append(topic)
    topic.append(b"after", sync=True)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "copy" / "topic" / "0000" / "watermark").unlink()
    copy = open_topic(tmp_path / "copy" / "topic")
    assert values_of(copy) == [*VALUES, b"after"]
    assert sound(copy.partitions[0]).records == len(VALUES) + 1


def test_follower_reads_through(topic: Topic) -> None:
    records = iter(topic.follow(timeout=30.0))
    topic.append(b"before", sync=True)
    assert next(records).value == b"before"
    append(topic)
    assert [next(records).value for _ in VALUES] == VALUES


@pytest.mark.parametrize("calls", [1, 2, 4])
@pytest.mark.parametrize("where", ["before", "behind", "headers"])
def test_process_that_dies_at_a_segment_goes_on_there(
    calls: int, where: str, topic: Topic, monkeypatch: pytest.MonkeyPatch, open_topic: Open
) -> None:
    """It dies before a file is attached, behind it, or when some of its headers are written anew."""
    attach = segment.attach_segment
    left = [calls]

    def dying(*arguments: Any) -> None:
        left[0] -= 1
        if not left[0] and where == "headers":
            directory, _, _, fd = arguments
            files = directory.files
            files.write_all(fd, [bytes(files.read_at(fd, 64, HEADER_BYTES)) + bytes(64)], HEADER_BYTES)  # torn
        if not left[0] and where != "behind":
            raise Killed
        attach(*arguments)
        if not left[0]:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(tail, "attach_segment", dying)
        with pytest.raises(Killed):
            append(topic)
    topic.append(b"native", sync=True)  # the process lived on after all, and its writer goes on
    assert values_of(topic) == []
    assert append(topic)
    values = values_of(topic)
    values.remove(b"native")
    assert values == VALUES
    sound(topic.partitions[0])
    topic.close()
    assert len(values_of(open_topic(Path(topic.path)))) == len(VALUES) + 1


@pytest.mark.parametrize("step", ["unlink", "sync"])
def test_attaching_is_repeated_behind_the_second_name(
    step: str, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was interrupted when the file had its new name, or a temporary one, and is called again."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def attach(*arguments: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Directory, "rename" if step == "unlink" else "sync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                segment.attach_segment(*arguments)
        segment.attach_segment(*arguments)

    monkeypatch.setattr(tail, "attach_segment", attach)
    append(topic)
    assert values_of(topic) == VALUES
    assert not list(Path(topic.path).glob("*/*.tmp"))
    sound(topic.partitions[0])


def test_next_process_finds_what_is_attached(
    topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_topic: Open, attached: list[tuple[str, bool]]
) -> None:
    attach = SectionWriter.attach_section

    def third(writer: SectionWriter, path: str, batches: Any) -> bool:
        done = attach(writer, path, batches)
        if len(attached) == 3:
            raise Killed
        return done

    with monkeypatch.context() as patched:
        patched.setattr(SectionWriter, "attach_section", third)
        with pytest.raises(Killed):
            append(topic)
    copy = tmp_path / "copy"
    os.system(f"cp -a '{tmp_path}/data' '{copy}'")  # keeps that two names are one file
    attached.clear()
    after = open_topic(copy / "topic")
    assert attached == [("0000-4", True)]
    assert values_of(after) == VALUES
    assert append(after)
    sound(after.partitions[0])


def refuse(number: int) -> Callable[..., None]:
    def refusing(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refusing


def test_partition_in_another_file_system_gets_copies(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, attached: list[tuple[str, bool]]
) -> None:
    monkeypatch.setattr(tail, "attach_segment", refuse(errno.EXDEV))
    append(topic)
    assert values_of(topic) == VALUES
    assert {done for _, done in attached} == {False}
    sound(topic.partitions[0])


def test_disk_that_fails_delays_what_is_committed(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(tail, "attach_segment", refuse(errno.ENOSPC))
        with pytest.raises(CommitPendingError):
            append(topic)
    assert values_of(topic) == []
    assert append(topic)
    assert values_of(topic) == VALUES


def test_directory_that_was_moved_is_named(topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(writer: SectionWriter, txn: Txn) -> None:
        begin(writer, txn)
        (Path(topic.path) / "0000" / "00000000000000000000.log").unlink()

    begin = SectionWriter.begin_section
    topic.append(b"x", sync=True)
    monkeypatch.setattr(SectionWriter, "begin_section", move)
    monkeypatch.setattr(SectionWriter, "append_section", lambda *_: None)  # so that attaching is the first to see it
    with pytest.raises(CommitPendingError, match="removed"):
        append(topic)


def test_segment_without_a_batch_is_kept(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, attached: list[tuple[str, bool]]
) -> None:
    attach = SectionWriter.attach_section

    def behind_a_roll(writer: SectionWriter, path: str, batches: Any) -> bool:
        assert writer.roll()
        return attach(writer, path, batches)

    monkeypatch.setattr(SectionWriter, "attach_section", behind_a_roll)
    append(topic)
    assert values_of(topic) == VALUES
    assert {done for _, done in attached} == {False}
    sound(topic.partitions[0])


def test_power_cut_at_any_operation_leaves_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    files = MemoryFiles()
    testing.open_topic("/data/topic", files=files, clock=lambda: NOW, **QUIET | SMALL).close()
    disk = CrashFS(Image.of(files.tree()))
    topic = testing.open_topic("/data/topic", files=disk, clock=lambda: NOW)
    topic.append(b"before", sync=True)
    since = len(disk.operations)
    values = VALUES[:12]
    append(topic, values=values)
    last = len(disk.operations)
    seen, done = set(), 0
    for state in disk.crash_states(random=0, since=since):
        after = testing.open_topic("/data/topic", files=state.files, clock=lambda: NOW)
        found = values_of(after)
        assert found in ([b"before"], [b"before", *values]), state
        assert found == [b"before", *values] or state.at < last
        seen.add(len(found))
        transaction_module._owner.forget()
        with monkeypatch.context() as patched:
            patched.setattr(staging, "_SMALL_BYTES", 1 << 20)  # the name of its attempt is that of the first process
            append(after, values=values)
        assert values_of(after) == [b"before", *values], state
        for damage in after.verify().damage:
            raise AssertionError(damage)
        after.close()
        done += 1
    topic.close()
    assert seen == {1, 13}
    assert done > 100


@pytest.mark.parametrize("change", ["larger segments were allowed", "longer", "elsewhere"])
def test_file_that_cannot_be_a_segment_is_copied(
    change: str, topic: Topic, monkeypatch: pytest.MonkeyPatch, attached: list[tuple[str, bool]]
) -> None:
    begin = SectionWriter.begin_section

    def changing(writer: SectionWriter, txn: Txn) -> None:
        begin(writer, txn)
        if change == "larger segments were allowed":
            topic.alter(segment_bytes=8 << 10)
        for each in (Path(topic.path) / "staging").glob("*/*-?") if change == "longer" else ():
            with each.open("ab") as file:
                file.write(bytes(8))

    monkeypatch.setattr(SectionWriter, "begin_section", changing)
    if change == "elsewhere":
        monkeypatch.setattr(apply, "_attempt", lambda _: None)
    append(topic)
    assert values_of(topic) == VALUES
    assert not any(done for _, done in attached[:-1])
    sound(topic.partitions[0])


def test_copied_headers_are_checked(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = SectionWriter.begin_section

    def changing(writer: SectionWriter, txn: Txn) -> None:
        begin(writer, txn)
        for each in (Path(topic.path) / "staging").glob("*/*.headers"):
            with each.open("r+b") as file:
                file.seek(40)
                file.write(b"?")

    monkeypatch.setattr(SectionWriter, "begin_section", changing)
    with pytest.raises(CommitPendingError, match="0000-1"):
        append(topic)
    assert values_of(topic) == []


def test_interrupt_before_the_new_end_counts_changes_nothing(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    attach = TailWriter.attach

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def attach_and_interrupt(*arguments: Any) -> Any:
        done = attach(*arguments)
        patched.setattr(SectionWriter, "open_batch", interrupted)
        return done

    with monkeypatch.context() as patched:
        patched.setattr(TailWriter, "attach", attach_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            append(topic)
    topic.append(b"native", sync=True)
    assert append(topic)
    values = values_of(topic)
    values.remove(b"native")
    assert values == VALUES
    sound(topic.partitions[0])


@pytest.mark.slow
def test_interrupt_at_any_point_leaves_one_of_each_record(tmp_path: Path) -> None:
    """Ctrl-C while a file becomes a segment; the writer appends, and the transaction is repeated."""
    path = tmp_path / "data" / "topic"
    values = VALUES[:20]

    def once(interrupter: Interrupter) -> bool:
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        topic = testing.open_topic(path, files=UnsyncedFiles(), **SMALL)
        topic.append(b"before", sync=True)
        attach_section = SectionWriter.attach_section

        def attach(writer: SectionWriter, path: str, batches: Any) -> Any:
            return interrupter.run(lambda: attach_section(writer, path, batches))

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SectionWriter, "attach_section", attach)
            try:
                append(topic, values=values)
            except KeyboardInterrupt:
                assert interrupter.where
        topic.append(b"native", sync=True)
        append(topic, values=values)
        found = values_of(topic)
        found.remove(b"native")
        assert found == [b"before", *values], interrupter.where
        sound(topic.partitions[0])
        topic.close()
        return bool(interrupter.where)

    assert len(list(every_point(once, lines_only=True))) > 50
