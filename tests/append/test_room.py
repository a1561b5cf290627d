"""Room: small synced appends go into zeros that were written before, and nobody sees these."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from crashed_logs import mark_of
from displaced import abandon
from roomy import with_room

from conftest import crash_copy, last_segment, sound, values_of
from loglib import LogMovedError, Topic, repair, testing
from loglib.append import room
from loglib.segment import HEADER_BYTES
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
