"""Recovery: cut only what was never promised, and keep it aside; what was promised stays."""

import errno
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crashed_logs import batch_ends, closed_topic, end_of, mark_of, set_mark, three_segments, write_crashed

from conftest import QUIET, crash_copy, last_segment, records_of, sound, values_of
from loglib import CorruptLogError, Topic, testing
from loglib.segment import HEADER_BYTES as SEGMENT_HEADER
from loglib.testing import FullDisk, UnsyncedFiles

SECTOR = 512
Open = Callable[..., Topic]


# --- a torn tail ---------------------------------------------------------------------------------


def test_clean_close_leaves_nothing_to_recover(open_topic: Open) -> None:
    with open_topic() as topic:
        topic.append(b"one")
    recovery = open_topic().partition(0).recovery
    assert recovery is not None and recovery.clean
    assert recovery == (0, 0, None, False)


def test_whole_unsynced_batches_are_kept_and_written_again(
    open_topic: Open, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = write_crashed(open_topic, path, tmp_path / "copy")
    with caplog.at_level(logging.WARNING, "loglib"), Topic.open(copy, create=True) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and not recovery.clean
        assert recovery.cut_bytes == 0 and recovery.rewritten_bytes > 0 and recovery.quarantine is None
        expected = [b"flushed %d" % i for i in range(6)] + [b"written %d" % i for i in range(8)]
        assert values_of(topic) == expected
        sound(topic.partition(0))
    assert "wrote" in caplog.text and "unsynced bytes again" in caplog.text


def test_tail_torn_at_every_byte_leaves_a_prefix(open_topic: Open, path: Path, tmp_path: Path) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=4)
    segment = last_segment(crashed)
    whole = segment.read_bytes()
    promised = mark_of(crashed).durable_end
    ends = batch_ends(crashed, promised, len(whole) - SEGMENT_HEADER)
    for end in range(promised, len(whole) - SEGMENT_HEADER + 1):
        copy = crash_copy(crashed, tmp_path / "copy")
        (copy / "0000" / segment.name).write_bytes(whole[: SEGMENT_HEADER + end])
        kept = sum(each <= end for each in ends)
        valid_end = max([promised, *(each for each in ends if each <= end)])
        with testing.open_topic(copy, files=UnsyncedFiles()) as topic:
            recovery = topic.partition(0).recovery
            assert recovery is not None
            torn = whole[SEGMENT_HEADER + valid_end : SEGMENT_HEADER + end].rstrip(b"\0")  # the end of it is nothing
            assert (recovery.cut_bytes, recovery.rewritten_bytes) == (len(torn), valid_end - promised), end
            assert len(values_of(topic)) == 6 + 2 * kept, end
            if end > valid_end:
                assert recovery.quarantine is not None
                assert Path(recovery.quarantine).read_bytes() == torn
            topic.append(b"after", sync=True)
        assert values_of_copy(copy)[6 + 2 * kept :] == [b"after"], end


def values_of_copy(path: Path) -> list[bytes | None]:
    return [record.value for record in records_of(path)]


@pytest.mark.parametrize("damage", ["zeros", "garbage", "old sectors", "extended", "magic only"])
def test_damaged_tail_is_cut_reported_and_kept_aside(
    damage: str, open_topic: Open, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", flushed=6, unflushed=40)
    segment = last_segment(crashed)
    whole = segment.read_bytes()
    position = SEGMENT_HEADER + mark_of(crashed).durable_end
    rng = random.Random(f"damage {damage}")
    for _ in range(20):
        content = bytearray(whole)
        at = rng.randrange(position, len(content))
        stop = min(len(content), at // SECTOR * SECTOR + SECTOR)
        content[at:stop] = {
            "zeros": bytes(stop - at),
            "garbage": rng.randbytes(stop - at),
            "old sectors": whole[at - 64 : stop - 64],
            "extended": b"",
            "magic only": b"\x89LLB" * ((stop - at) // 4 + 1),
        }[damage][: stop - at]
        if damage == "extended":
            content += bytes(3 * SECTOR)
        copy = crash_copy(crashed, tmp_path / "copy")
        (copy / "0000" / segment.name).write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "loglib"), testing.open_topic(copy, files=UnsyncedFiles()) as topic:
            values = values_of(topic)
            recovery = topic.partition(0).recovery
            sound(topic.partition(0))
            segment_bytes = last_segment(copy).stat().st_size
        everything = [b"flushed %d" % i for i in range(6)] + [b"written %d" % i for i in range(40)]
        assert values == everything[: len(values)] and len(values) >= 6
        assert recovery is not None
        if recovery.cut_bytes:
            assert recovery.quarantine is not None
            kept = Path(recovery.quarantine).read_bytes()
            assert kept == bytes(content).rstrip(b"\0")[-recovery.cut_bytes :]
            assert "torn tail" in caplog.text and recovery.quarantine in caplog.text
        else:
            assert not any(content[segment_bytes:])


def test_valid_batch_after_a_torn_one_is_no_proof_of_corruption(open_topic: Open, path: Path, tmp_path: Path) -> None:
    """The kernel writes pages back out of order: a whole unsynced batch may follow a torn one."""
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=6)
    promised = mark_of(crashed).durable_end
    segment = last_segment(crashed)
    content = bytearray(segment.read_bytes())
    content[SEGMENT_HEADER + promised + 150] ^= 1
    segment.write_bytes(content)
    with Topic.open(crashed, create=True) as topic:
        assert len(values_of(topic)) == 6


def test_unlinked_batch_behind_a_torn_tail_is_not_taken(open_topic: Open, path: Path, tmp_path: Path) -> None:
    """A stale batch that happens to begin where the tail ends belongs to another history."""
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=0)
    other = write_other_history(crashed, tmp_path / "other", count=6)
    this = write_other_history(crashed, tmp_path / "this", count=2, value=b"this")
    first_end = batch_ends(this, mark_of(this).durable_end, end_of(this))[0]
    for garbage in (b"", b"\xff" * 300):  # with garbage behind it, batches are looked at one by one
        copy = crash_copy(this, tmp_path / "copy")
        stale = last_segment(other).read_bytes()[SEGMENT_HEADER + first_end :]
        last_segment(copy).write_bytes(last_segment(this).read_bytes()[: SEGMENT_HEADER + first_end] + stale + garbage)
        with Topic.open(copy, create=True) as topic:
            assert values_of(topic)[6:] == [b"this"] * 2
            sound(topic.partition(0))


def write_other_history(source: Path, target: Path, *, count: int, value: bytes = b"that") -> Path:
    """Append unflushed records to a copy of the topic and leave it as killed."""
    work = crash_copy(source, target.with_name(target.name + "-work"))
    with Topic.open(work, create=True) as topic:
        for _ in range(count + 1):
            topic.append(value, key=b"k", timestamp=len(value) + ord(value[-1:]))
        return crash_copy(work, target)


def test_shorter_torn_tail_at_the_same_place_replaces_the_quarantine(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=0)
    for tail in (b"long" * 100, b"short"):
        with last_segment(crashed).open("ab") as file:
            file.write(tail)
        with Topic.open(crashed, create=True) as topic:
            recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.quarantine is not None
        assert Path(recovery.quarantine).read_bytes() == tail


def test_no_room_to_keep_the_tail_aside_does_not_prevent_recovery(
    open_topic: Open, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=0)
    with last_segment(crashed).open("ab") as file:
        file.write(b"torn" * 1000)
    files = FullDiskFor("torn-", room=100)
    with caplog.at_level(logging.WARNING, "loglib"), testing.open_topic(crashed, files=files) as topic:
        recovery = topic.partition(0).recovery
        assert len(values_of(topic)) == 6
    assert recovery is not None and recovery.cut_bytes == 4000 and recovery.quarantine is None
    assert "no room" in caplog.text
    assert not list((crashed / "0000").glob("*.torn-*")), "what cannot be kept must not take up room"


class FullDiskFor(FullDisk):
    """Full for files whose name contains a word, and for no others."""

    def __init__(self, word: str, room: int) -> None:
        super().__init__(room)
        self._word = word
        self._full: set[int] = set()

    def create(self, path: str, permissions: int, *, exclusive: bool = True, dir_fd: int | None = None) -> int:
        fd = super().create(path, permissions, exclusive=exclusive, dir_fd=dir_fd)
        (self._full.add if self._word in path else self._full.discard)(fd)
        return fd

    def write_all(self, fd: int, parts: Any, position: int) -> int:
        if fd in self._full:
            return super().write_all(fd, parts, position)
        return UnsyncedFiles().write_all(fd, parts, position)


def test_tail_that_cannot_be_kept_for_another_reason_stops_recovery(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=0)
    with last_segment(crashed).open("ab") as file:
        file.write(b"torn" * 1000)
    before = last_segment(crashed).read_bytes()
    (crashed / "0000" / f"{last_segment(crashed).stem}.torn-{len(before) - 4000}").symlink_to("/dev/null")
    with pytest.raises(CorruptLogError, match="symbolic links"):
        Topic.open(crashed, create=True)
    assert last_segment(crashed).read_bytes() == before


# --- the watermark -----------------------------------------------------------------------------------


def test_segments_below_the_log_start_are_removed(open_topic: Open, path: Path) -> None:
    """Retention makes the new start durable before it removes files; a crash between leaves some."""
    segments = three_segments(open_topic, path)
    start = int(segments[1].stem)
    set_mark(path, mark_of(path)._replace(log_start_offset=start))
    with Topic.open(path, create=True) as topic:
        assert topic.partition(0).log_start_offset == start
        assert values_of(topic) == [b"value 1", b"value 2"]
    assert not segments[0].exists()


def test_leftover_temporary_files_are_removed(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    leftover = path / "0000" / "00000000000000009999.log.tmp"
    leftover.write_bytes(b"half a header")
    with Topic.open(path, create=True) as topic:
        assert len(values_of(topic)) == 12
    assert not leftover.exists()


def test_directory_with_the_name_of_an_unfinished_file_is_left_alone(open_topic: Open, path: Path) -> None:
    """It used to end the opening for writing with an error of the system."""
    open_topic().close()
    planted = path / "0000" / f"{8:020d}.log.tmp"
    planted.mkdir()
    with open_topic() as topic:
        topic.append(b"x", sync=True)
    assert planted.is_dir()


def test_other_files_in_the_directory_are_left_alone(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    for name in ("notes.txt", "1.log", "0000000000000000000x.log"):
        (path / "0000" / name).write_bytes(b"mine")
    with Topic.open(path, create=True) as topic:
        assert len(topic.partition(0).segments) == 1
    assert (path / "0000" / "notes.txt").read_bytes() == b"mine"


# --- durability "os" and producers -------------------------------------------------------------------


def test_os_durability_loses_no_record_to_a_kill(open_topic: Open, path: Path, tmp_path: Path) -> None:
    topic = open_topic(durability="os")
    topic.append(b"one")
    topic.flush()
    copy = crash_copy(path, tmp_path / "copy")
    mark = mark_of(copy)
    assert mark.durable_end < mark.flushed_end
    with Topic.open(copy, create=True) as recovered:
        assert values_of(recovered) == [b"one"]


def test_os_durability_may_lose_what_was_only_handed_to_the_system(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    topic = open_topic(durability="os")
    topic.append(b"one")
    topic.flush()
    topic.append(b"two")
    topic.flush()
    copy = crash_copy(path, tmp_path / "copy")
    segment = last_segment(copy)
    segment.write_bytes(segment.read_bytes()[:-20])  # a power cut
    with Topic.open(copy, create=True) as recovered:
        assert values_of(recovered) == [b"one"]
        assert recovered.partition(0).high_watermark < mark_of(path).flushed_end


@pytest.mark.parametrize("rolled", [False, True])
def test_producers_are_rebuilt_after_a_crash(rolled: bool, open_topic: Open, path: Path, tmp_path: Path) -> None:
    topic = open_topic(files=UnsyncedFiles())
    first = topic.partition(0).append_many([b"a", b"b"], producer=("p", 1))
    if rolled:
        topic.partition(0).roll()
    last = topic.partition(0).append_many([b"c"], producer=("q", 7))
    with Topic.open(crash_copy(path, tmp_path / "copy"), create=True) as recovered:
        assert recovered.partition(0).append_many([b"a", b"b"], producer=("p", 1)) == first
        assert recovered.partition(0).append_many([b"c"], producer=("q", 7)) == last
        recovered.flush()
        assert values_of(recovered) == [b"a", b"b", b"c"]


def test_quiet_policies_are_what_the_tests_think(open_topic: Open) -> None:
    with open_topic() as topic:
        assert topic.config.flush == QUIET["flush"] and topic._background._flusher is None


def test_no_room_for_the_name_of_the_quarantine_does_not_prevent_recovery(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=0)
    with last_segment(crashed).open("ab") as file:
        file.write(b"torn" * 1000)

    class NoInode(UnsyncedFiles):
        def create(self, path: str, permissions: int, *, exclusive: bool = True, dir_fd: int | None = None) -> int:
            if "torn-" in path:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().create(path, permissions, exclusive=exclusive, dir_fd=dir_fd)

    with testing.open_topic(crashed, files=NoInode()) as topic:
        assert len(values_of(topic)) == 6
