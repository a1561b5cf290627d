"""Room: small synced appends go into zeros that were written before, and nobody sees these."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from crashed_logs import identity_of, mark_of
from displaced import abandon
from roomy import with_room

from conftest import crash_copy, last_segment, run_python, sound, values_of
from loglib import LogMovedError, Retention, Topic, repair, testing
from loglib.append import room
from loglib.format.header import Header
from loglib.log import recovery
from loglib.log.search import proven_headers
from loglib.segment import HEADER_BYTES, SegmentReader
from loglib.system import statx
from loglib.system.directory import Directory
from loglib.system.files import REAL
from loglib.testing import FaultyFiles, UnsyncedFiles

Open = Callable[..., Topic]
VALUES = [b"value %d" % number for number in range(30)]


@pytest.fixture(autouse=True)
def _at_once() -> Iterator[None]:
    with with_room():
        yield


def append(topic: Topic, values: list[bytes] = VALUES) -> None:
    for each in values:
        topic.append(each, sync=True)


def end_of(path: Path) -> int:
    return mark_of(path).flushed_end


def room_after(path: Path) -> int:
    """Bytes of the last segment's file after the end of the log."""
    return last_segment(path).stat().st_size - HEADER_BYTES - end_of(path)


# --- who sees it -----------------------------------------------------------------------------------------


def test_log_with_room_reads_as_without(open_topic: Open, path: Path) -> None:
    with open_topic(files=UnsyncedFiles()) as topic:
        append(topic)
        behind = last_segment(path).read_bytes()[HEADER_BYTES + end_of(path) :]
        assert behind and not any(behind)
        assert values_of(topic) == VALUES
        sound(topic.partition(0))
        with Topic.open(path, mode="r") as reader:
            assert values_of(reader) == VALUES and reader.verify().damage == ()
            assert reader.partition(0).segments[-1].size_bytes == end_of(path)
            assert reader.stats().size_bytes <= end_of(path) + HEADER_BYTES
    assert room_after(path) == 0, "closing cuts it off"


def test_sealed_segment_has_no_room(open_topic: Open, path: Path) -> None:
    with open_topic(files=UnsyncedFiles()) as topic:
        append(topic)
        assert room_after(path) > 0
        sealed, end = last_segment(path), end_of(path)
        assert topic.partition(0).roll()
        append(topic)
        assert sealed.stat().st_size == HEADER_BYTES + end
        assert topic.verify().damage == ()
    assert repair(path).repairs == ()


def test_killed_writer_leaves_room_that_means_nothing(open_topic: Open, path: Path, tmp_path: Path) -> None:
    with open_topic(files=UnsyncedFiles()) as topic:
        append(topic)
        copy = crash_copy(path, tmp_path / "copy")
    assert room_after(copy) > 0
    with Topic.open(copy) as again:
        recovery = again.partition(0).recovery
        assert recovery is not None and (recovery.cut_bytes, recovery.quarantine) == (0, None)
        assert room_after(copy) == 0
        append(again, VALUES[:5])
        assert values_of(again) == VALUES + VALUES[:5]
        sound(again.partition(0))


def test_look_at_a_living_log_finds_no_damage(
    open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumer groups look so at the log of their commits: it found zeros, and then the batches that came meanwhile."""
    with open_topic(files=UnsyncedFiles()) as topic:
        append(topic, VALUES[:10])
        mark = mark_of(path)

        def look_later(*arguments: Any) -> Iterator[Header]:
            monkeypatch.setattr("loglib.log.recovery.proven_headers", proven_headers)
            append(topic, VALUES[:4])
            return proven_headers(*arguments)

        monkeypatch.setattr("loglib.log.recovery.proven_headers", look_later)
        with SegmentReader(REAL, str(last_segment(path)), identity_of(path)) as reader:
            _, tail = recovery.measure(reader, mark)
        assert tail.end == end_of(path) > mark.flushed_end


@pytest.mark.parametrize("cut_bytes", [1, 5000])
def test_copy_of_hard_links_is_opened_while_the_original_is_cut(path: Path, tmp_path: Path, cut_bytes: int) -> None:
    class Cutting(FaultyFiles):
        cut = False

        def copy_file_range(self, source: int, to: int, size_bytes: int, start: int, at: int) -> int:
            if not self.cut:
                self.cut = True
                os.truncate(original, original.stat().st_size - cut_bytes)
                return 0
            return super().copy_file_range(source, to, size_bytes, start, at)

    original, name = tmp_path / "original", tmp_path / "copy"
    original.write_bytes(b"x" * 10_000 + bytes(5000))
    name.hardlink_to(original)
    files = Cutting(armed=False)
    files.close(files.open_write(str(name)))
    assert files.cut and name.read_bytes() == original.read_bytes() and name.stat().st_nlink == 1
    assert {each.name for each in tmp_path.iterdir()} == {"copy", "original"}


def test_copy_of_hard_links_that_fails_leaves_nothing(path: Path, tmp_path: Path) -> None:
    (tmp_path / "original").write_bytes(b"x" * 10_000)
    (tmp_path / "copy").hardlink_to(tmp_path / "original")
    with pytest.raises(OSError, match="Input/output error"):
        FaultyFiles("pread", every=True, inner=FaultyFiles("copy_file_range", every=True)).open_write(
            str(tmp_path / "copy")
        )
    assert {each.name for each in tmp_path.iterdir()} == {"copy", "original"}


def test_copy_of_hard_links_that_fails_in_a_moved_directory_leaves_nothing(tmp_path: Path) -> None:
    place, moved = tmp_path / "place", tmp_path / "moved"
    place.mkdir()
    (place / "original").write_bytes(b"x" * 10_000)
    (place / "copy").hardlink_to(place / "original")
    files = FaultyFiles("pread", every=True, inner=FaultyFiles("copy_file_range", every=True))
    with Directory.open(files, str(place)) as directory:
        place.rename(moved)
        with pytest.raises(OSError, match="Input/output error"):
            directory.open_write("copy")
    assert {each.name for each in moved.iterdir()} == {"copy", "original"}


def test_room_is_given_back_with_the_partition(path: Path) -> None:
    """Who takes it continues immediately: after a writer that has died, the log would be recovered."""
    files = UnsyncedFiles()
    with (
        testing.open_topic(path, files=files, shared=True) as one,
        testing.open_topic(path, files=files, shared=True) as other,
    ):
        for _ in range(5):
            for each in (one, other):
                append(each, VALUES[:10])
                assert each.partition(0)._access.writer().disk.openings == 1
        assert len(values_of(one)) == 100
        sound(one.partition(0))


def test_short_turns_make_no_room(path: Path) -> None:
    """It would be cut off at the end of each turn."""
    with (
        mock.patch.object(room, "_FEW_SYNCS", 20),
        testing.open_topic(path, files=UnsyncedFiles(), shared=True) as one,
        testing.open_topic(path, files=UnsyncedFiles(), shared=True) as other,
    ):
        for _ in range(5):
            for each in (one, other):
                append(each, VALUES[:10])
                assert room_after(path) == 0


def test_room_ends_with_the_segment(open_topic: Open, path: Path) -> None:
    with with_room(1 << 20), open_topic(files=UnsyncedFiles(), segment_bytes=20_000) as topic:
        sizes = set[int]()
        for _ in range(10):
            append(topic)
            sizes.add(last_segment(path).stat().st_size)
        assert max(sizes) == HEADER_BYTES + 20_000
        assert len(values_of(topic)) == 300
        sound(topic.partition(0))


# --- what else may happen to the file ------------------------------------------------------------------


@pytest.mark.parametrize("call", ["append", "flush", "roll", "close"])
def test_older_state_that_is_copied_back_into_the_files_is_noticed(open_topic: Open, path: Path, call: str) -> None:
    """Both states have the same size: the room of the older one is as long as that of the later one."""
    with with_room(1 << 16):
        topic = open_topic(files=UnsyncedFiles())
        append(topic, VALUES[:5])
        backup = shutil.copytree(path, path.with_suffix(".backup"))
        append(topic, VALUES[5:10])
        assert last_segment(path).stat().st_size == last_segment(backup).stat().st_size
        for each in backup.rglob("*"):
            if each.is_file():
                shutil.copyfile(each, path / each.relative_to(backup))  # into the same file, as cp does
        with pytest.raises(LogMovedError, match="its last batch is gone") as caught:
            match call:
                case "append":
                    topic.append(b"x", sync=True)
                case "flush":
                    topic.append(b"x")
                    topic.flush()
                case "roll":
                    topic.partition(0).roll()
                case _:
                    topic.close()
        assert caught.value.kept is False
        if call != "close":
            abandon(topic)
    with open_topic(files=UnsyncedFiles()) as again:
        assert values_of(again) == VALUES[:5]
        sound(again.partition(0))


def test_removed_file_with_room_is_noticed(open_topic: Open, path: Path) -> None:
    topic = open_topic(files=UnsyncedFiles())
    append(topic, VALUES[:5])
    os.unlink(last_segment(path))
    with pytest.raises(LogMovedError, match="was removed"):
        topic.append(b"x", sync=True)
    abandon(topic)


def test_replaced_watermark_is_noticed(open_topic: Open, path: Path) -> None:
    topic = open_topic(files=UnsyncedFiles())
    append(topic, VALUES[:5])
    watermark = path / "0000" / "watermark"
    shutil.copy(watermark, watermark.with_suffix(".new"))
    watermark.with_suffix(".new").rename(watermark)
    with pytest.raises(LogMovedError, match="another file put in its place"):
        topic.append(b"x", sync=True)
    abandon(topic)


class NoRoom(FaultyFiles):
    """A disk that has no block left for zeros."""

    def pwritev(self, fd: int, parts: list[bytes], position: int) -> int:  # type: ignore[override]
        if position > HEADER_BYTES and b"".join(parts) == bytes(4096):
            self.failed += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, parts, position)


def test_disk_without_room_takes_records(path: Path) -> None:
    files = NoRoom(armed=False, inner=UnsyncedFiles())
    with testing.open_topic(path, files=files) as topic:
        append(topic)
        assert files.failed == 1, "it is not tried again in this segment"
        assert values_of(topic) == VALUES
    assert room_after(path) == 0


def test_failed_write_into_room_is_cut_off(path: Path) -> None:
    files = FaultyFiles("pwritev", error=errno.EIO, armed=False, inner=UnsyncedFiles())
    with testing.open_topic(path, files=files) as topic:
        append(topic, VALUES[:5])
        files.armed = True
        with pytest.raises(OSError, match="Input/output"):
            topic.append(b"lost", sync=True)
        assert room_after(path) == 0
        append(topic, VALUES[5:10])
        assert values_of(topic) == VALUES[:10]
        sound(topic.partition(0))


class LittleSpace(FaultyFiles):
    """A disk of 1 GB, of which `free_bytes` are free."""

    free_bytes = 1 << 29

    def statvfs(self, path: object) -> os.statvfs_result:
        free = self.free_bytes >> 12
        return os.statvfs_result((4096, 4096, 1 << 18, free, free, 1 << 20, 1 << 20, 1 << 20, 0, 255))


def test_no_room_where_little_is_free(path: Path) -> None:
    files = LittleSpace(armed=False, inner=UnsyncedFiles())
    files.free_bytes = 63 * 4096
    with testing.open_topic(path, files=files) as topic:
        append(topic)
        assert room_after(path) == 0 and values_of(topic) == VALUES


def test_zeros_that_were_written_in_part_are_cut_off(path: Path) -> None:
    class Torn(NoRoom):
        def pwritev(self, fd: int, parts: list[bytes], position: int) -> int:  # type: ignore[override]
            try:
                return super().pwritev(fd, parts, position)
            except OSError:
                os.pwrite(fd, bytes(1000), position)
                raise

    with testing.open_topic(path, files=Torn(armed=False, inner=UnsyncedFiles())) as topic:
        append(topic)
        assert room_after(path) == 0


def test_retention_gives_room_back_before_it_drops_records(path: Path) -> None:
    files = LittleSpace(armed=False, inner=UnsyncedFiles())
    retention = Retention(age=None, keep_free=0.4)
    with testing.open_topic(path, files=files, partitions=2, retention=retention) as topic:
        for number in range(2):
            topic.append_many([bytes(1000)] * 5, partition=number)
            topic.flush()
            topic.partition(number).roll()
            for each in VALUES:
                topic.append(each, partition=number, sync=True)
        assert all(has_room(each) for each in path.glob("000?"))
        given_back: list[Path] = []

        def statvfs(where: object) -> os.statvfs_result:
            """The zeros are what is missing."""
            given_back[:] = [each for each in sorted(path.glob("000?")) if not has_room(each)]
            files.free_bytes = (1 << 29) if len(given_back) == 2 else 0
            return LittleSpace.statvfs(files, where)

        with mock.patch.object(files, "statvfs", statvfs):
            assert not any(each.drop for each in topic.retain())
        assert len(given_back) == 2
        append(topic)
        assert len(values_of(topic)) == 10 + 3 * len(VALUES)
        assert topic.verify().damage == ()


def has_room(partition: Path) -> bool:
    return max(partition.glob("*.log")).read_bytes().endswith(bytes(64))


def test_log_that_is_not_synced_any_more_gets_no_room(open_topic: Open, path: Path) -> None:
    with open_topic(files=UnsyncedFiles()) as topic:
        append(topic)
        topic.alter(durability="os")
        for _ in range(50):
            topic.append_many([bytes(1000)] * 20)
            topic.flush()
        assert room_after(path) <= 0


@pytest.mark.parametrize("error", [PermissionError(errno.EPERM, "refused"), OSError(errno.ENOSYS, "no such call")])
def test_filter_that_refuses_the_call_later_is_no_error(open_topic: Open, path: Path, error: OSError) -> None:
    with open_topic() as topic:
        append(topic)
        with mock.patch.object(statx, "call", lambda: mock.Mock(side_effect=error)):
            append(topic)
        assert values_of(topic) == VALUES * 2


@pytest.mark.parametrize("error", ["MemoryError", "RuntimeError", "ImportError"])
def test_process_that_cannot_load_ctypes_asks_in_the_usual_way(path: Path, error: str) -> None:
    """SELinux may forbid memory that can be executed, and an audit hook may forbid anything."""
    run_python(
        """
        import sys

        def hook(event, arguments):
            if event.startswith("ctypes.") or (event == "import" and arguments[0] == "ctypes"):
                raise getattr(__builtins__, sys.argv[2])("refused")

        sys.addaudithook(hook)
        from loglib import Topic
        from roomy import with_room
        with with_room(), Topic.create(sys.argv[1]) as topic:
            for number in range(40):
                topic.append(b"%d" % number, sync=True)
            assert len(list(topic.read())) == 40
        """,
        path,
        error,
    )


# --- when there is room ------------------------------------------------------------------------------


def test_large_flushes_need_no_room(open_topic: Open, path: Path) -> None:
    with open_topic(files=UnsyncedFiles()) as topic:
        for _ in range(20):
            topic.append_many([bytes(1000)] * 20)
            topic.flush()
        assert room_after(path) == 0


def test_first_appends_make_no_room(open_topic: Open, path: Path) -> None:
    with with_room(0), open_topic(files=UnsyncedFiles()) as topic:
        append(topic)
        assert room_after(path) == 0
