"""Recovery: cut only what was never promised, keep it aside, refuse everything else and touch nothing."""

import errno
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import a_mark, forged
from conftest import QUIET, crash_copy, last_segment, records_of, sound, tree, values_of
from loglib import CorruptLogError, LogError, StorageIOError, Topic, UnsupportedFormatError, testing
from loglib.format.batch import HEADER_BYTES as BATCH_HEADER
from loglib.format.batch import encode_body, parse_header
from loglib.format.watermark import Mark, encode_new, newest
from loglib.recovery import rewrite
from loglib.segment import HEADER_BYTES as SEGMENT_HEADER
from loglib.segment import Identity, SegmentHeader, segment_name
from loglib.system.files import REAL
from loglib.testing import Call, DyingFiles, FaultyFiles, FullDisk, Killed, RecordingFiles, UnsyncedFiles

SECTOR = 512
PAGE = 1 << 16
Open = Callable[..., Topic]


def write_crashed(
    open_topic: Open, path: Path, copy: Path, *, flushed: int = 6, unflushed: int = 8, **policy: Any
) -> Path:
    """A topic killed with `flushed` records promised and `unflushed` written, two a batch; returns the copy."""
    topic = open_topic(batch_records=2, files=UnsyncedFiles(), **policy)
    for number in range(flushed):
        topic.append(b"flushed %d" % number, key=b"k")
    topic.flush()
    for number in range(unflushed + 1):  # the one too many stays in memory
        topic.append(b"written %d" % number, key=b"k")
    return crash_copy(path, copy)


def mark_of(path: Path, partition: int = 0) -> Mark:
    mark = newest((path / f"{partition:04d}" / "watermark").read_bytes(), identity_of(path, partition).salt)
    assert mark is not None
    return mark


def identity_of(path: Path, partition: int = 0) -> Identity:
    with Topic.open(path, mode="r") as topic:
        return Identity.of(topic.log_id, partition)


def set_mark(path: Path, mark: Mark) -> None:
    (path / "0000" / "watermark").write_bytes(encode_new(mark, identity_of(path).salt))


def batch_ends(path: Path, start: int, end: int) -> list[int]:
    """Where the batches in [start, end) of the only segment end, as offsets."""
    content, salt = last_segment(path).read_bytes(), identity_of(path).salt
    ends = []
    while start < end:
        start = parse_header(content, SEGMENT_HEADER + start, salt=salt, offset=start).next_offset
        ends.append(start)
    return ends


def refuses_and_changes_nothing(path: Path, **arguments: Any) -> CorruptLogError:
    before = tree(path)
    with pytest.raises(CorruptLogError) as raised:
        Topic.open(path, **arguments)
    assert tree(path) == before
    return raised.value


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
    with caplog.at_level(logging.WARNING, "loglib"), Topic.open(copy) as topic:
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
            assert (recovery.cut_bytes, recovery.rewritten_bytes) == (end - valid_end, valid_end - promised), end
            assert len(values_of(topic)) == 6 + 2 * kept, end
            if end > valid_end:
                assert recovery.quarantine is not None
                assert (
                    Path(recovery.quarantine).read_bytes() == whole[SEGMENT_HEADER + valid_end : SEGMENT_HEADER + end]
                )
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
        everything = [b"flushed %d" % i for i in range(6)] + [b"written %d" % i for i in range(40)]
        assert values == everything[: len(values)] and len(values) >= 6
        assert recovery is not None
        if recovery.cut_bytes:
            assert recovery.quarantine is not None
            kept = Path(recovery.quarantine).read_bytes()
            assert kept == bytes(content)[-recovery.cut_bytes :]
            assert "torn tail" in caplog.text and recovery.quarantine in caplog.text
        else:
            assert bytes(content).startswith(whole)


def test_valid_batch_after_a_torn_one_is_no_proof_of_corruption(open_topic: Open, path: Path, tmp_path: Path) -> None:
    """The kernel writes pages back out of order: a whole unsynced batch may follow a torn one."""
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=6)
    promised = mark_of(crashed).durable_end
    segment = last_segment(crashed)
    content = bytearray(segment.read_bytes())
    content[SEGMENT_HEADER + promised + 150] ^= 1
    segment.write_bytes(content)
    with Topic.open(crashed) as topic:
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
        with Topic.open(copy) as topic:
            assert values_of(topic)[6:] == [b"this"] * 2
            sound(topic.partition(0))


def end_of(path: Path) -> int:
    return last_segment(path).stat().st_size - SEGMENT_HEADER


def write_other_history(source: Path, target: Path, *, count: int, value: bytes = b"that") -> Path:
    """Append unflushed records to a copy of the topic and leave it as killed."""
    work = crash_copy(source, target.with_name(target.name + "-work"))
    with Topic.open(work) as topic:
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
        with Topic.open(crashed) as topic:
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
        Topic.open(crashed)
    assert last_segment(crashed).read_bytes() == before


# --- damage below the watermark --------------------------------------------------------------------


def closed_topic(open_topic: Open, *, records: int = 12, **policy: Any) -> None:
    with open_topic(batch_records=2, files=UnsyncedFiles(), **policy) as topic:
        for number in range(records):
            topic.append(b"value %d" % number, key=b"k")
            if number % 4 == 3:
                topic.flush()


def test_flipped_bit_in_the_last_promised_header_is_refused(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    segment = last_segment(path)
    whole = segment.read_bytes()
    last = [0, *batch_ends(path, 0, end_of(path))][-2]
    for at in range(last, last + BATCH_HEADER):
        segment.write_bytes(
            whole[: SEGMENT_HEADER + at] + bytes([whole[SEGMENT_HEADER + at] ^ 1]) + whole[SEGMENT_HEADER + at + 1 :]
        )
        error = refuses_and_changes_nothing(path)
        assert error.path == str(segment) and 0 <= error.file_position <= len(whole)
        assert error.found and error.expected


def test_damaged_first_header_is_refused(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    segment = last_segment(path)
    content = bytearray(segment.read_bytes())
    content[SEGMENT_HEADER] ^= 1
    segment.write_bytes(content)
    assert refuses_and_changes_nothing(path).file_position == SEGMENT_HEADER


@pytest.mark.parametrize("cut", [1, 8, 100, 300])
def test_file_shorter_than_promised_is_refused(cut: int, open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    segment = last_segment(path)
    segment.write_bytes(segment.read_bytes()[:-cut])
    error = refuses_and_changes_nothing(path)
    assert (error.path, error.file_position) == (str(segment), segment.stat().st_size)


def test_bad_bytes_that_a_later_batch_calls_durable_are_corruption(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    """The watermark may be stale after a power cut; a batch further on still proves what was synced."""
    topic = open_topic(batch_records=1)
    topic.append(b"first", sync=True)
    stale = mark_of(path)
    topic.append(b"second", sync=True)
    topic.append(b"third", sync=True)
    copy = crash_copy(path, tmp_path / "copy")
    set_mark(copy, stale)
    with Topic.open(crash_copy(copy, tmp_path / "fine")) as recovered:
        assert values_of(recovered) == [b"first", b"second", b"third"]
    content = bytearray(last_segment(copy).read_bytes())
    content[SEGMENT_HEADER + stale.durable_end + BATCH_HEADER + 3] ^= 1
    last_segment(copy).write_bytes(content)
    error = refuses_and_changes_nothing(copy)
    assert error.file_position == SEGMENT_HEADER + stale.durable_end + BATCH_HEADER


def three_segments(open_topic: Open, path: Path, **policy: Any) -> list[Path]:
    with open_topic(files=UnsyncedFiles(), **policy) as topic:
        for number in range(3):
            topic.partition(0).append(b"value %d" % number)
            if number < 2:
                topic.partition(0).roll()
    return sorted((path / "0000").glob("*.log"))


def remove(segments: list[Path]) -> None:
    segments[1].unlink()


def remove_first(segments: list[Path]) -> None:
    segments[0].unlink()


def remove_last(segments: list[Path]) -> None:
    segments[2].unlink()


def empty(segments: list[Path]) -> None:
    segments[1].write_bytes(b"")


def empty_last(segments: list[Path]) -> None:
    segments[2].write_bytes(b"")


def cut_to_header(segments: list[Path]) -> None:
    segments[1].write_bytes(segments[1].read_bytes()[:SEGMENT_HEADER])


def cut_last_to_header(segments: list[Path]) -> None:
    segments[2].write_bytes(segments[2].read_bytes()[:SEGMENT_HEADER])


def lengthen(segments: list[Path]) -> None:
    segments[0].write_bytes(segments[0].read_bytes() + bytes(8))


def swap(segments: list[Path]) -> None:
    aside = segments[0].with_suffix(".aside")
    segments[0].rename(aside)
    segments[1].rename(segments[0])
    aside.rename(segments[1])


def duplicate(segments: list[Path]) -> None:
    shutil.copy(segments[1], segments[1].with_name(segment_name(10_000)))


def remove_all(segments: list[Path]) -> None:
    for each in segments:
        each.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        remove, remove_first, remove_last, remove_all, empty, empty_last, cut_to_header, cut_last_to_header,
        lengthen, swap, duplicate,
    ],
)  # fmt: skip
def test_tampered_segment_is_refused(damage: Callable[[list[Path]], None], open_topic: Open, path: Path) -> None:
    damage(three_segments(open_topic, path))
    error = refuses_and_changes_nothing(path)
    assert str(path) in str(error) and "nothing was changed" in str(error)


def test_segment_of_another_partition_is_refused(open_topic: Open, path: Path) -> None:
    with open_topic(partitions=2) as topic:
        for partition in topic.partitions:
            partition.append(b"x")
    shutil.copy(path / "0001" / segment_name(0), path / "0000" / segment_name(0))
    assert refuses_and_changes_nothing(path).file_position == 16


def test_link_in_place_of_a_partition_is_not_followed(open_topic: Open, path: Path) -> None:
    """It would have the lock of another directory written over."""
    open_topic().close()
    elsewhere = (path / "0000").rename(path.parent / "elsewhere")
    (path / "0000").symlink_to(elsewhere)
    before = tree(elsewhere)
    for mode in ("a", "r"):
        with pytest.raises(CorruptLogError, match="a directory, and no link to one"):
            Topic.open(path, mode=mode)
    assert tree(elsewhere) == before


def test_missing_partition_directory_is_corruption(open_topic: Open, path: Path) -> None:
    with open_topic(partitions=2):
        pass
    shutil.rmtree(path / "0001")
    for mode in ("a", "r"):
        with pytest.raises(CorruptLogError, match="0001"):
            Topic.open(path, mode=mode)
    assert not (path / "0001").exists()


def test_newer_format_above_the_watermark_is_refused_by_name(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=2)
    segment = last_segment(crashed)
    content, start = segment.read_bytes(), SEGMENT_HEADER + mark_of(crashed).durable_end
    end = start + batch_ends(crashed, mark_of(crashed).durable_end, mark_of(crashed).durable_end + 1)[0]
    bad = forged(content[start : end - mark_of(crashed).durable_end], version=3, identity=identity_of(crashed))
    segment.write_bytes(content[:start] + bad + content[start + len(bad) :])
    before = tree(crashed)
    with pytest.raises(UnsupportedFormatError, match="batch version 3"):
        Topic.open(crashed)
    assert tree(crashed) == before


# --- the watermark -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"\0" * 8192, b"\xff" * 8192])
def test_lost_watermark_is_rebuilt_from_the_last_segment(
    content: bytes | None, open_topic: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    three_segments(open_topic, path)
    watermark = path / "0000" / "watermark"
    watermark.unlink() if content is None else watermark.write_bytes(content)
    with caplog.at_level(logging.WARNING, "loglib"), Topic.open(path) as topic:
        assert values_of(topic) == [b"value 0", b"value 1", b"value 2"]
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.watermark_lost and not recovery.clean
        topic.append(b"value 3")
    assert "rebuilt the watermark" in caplog.text
    with Topic.open(path) as topic:
        again = topic.partition(0).recovery
        assert again is not None and again.clean
        assert len(values_of(topic)) == 4


def test_lost_watermark_is_rebuilt_in_place_so_that_readers_of_it_go_on(open_topic: Open, path: Path) -> None:
    """A reader keeps the file open: a new file under the same name would leave it with the lost one for ever."""
    closed_topic(open_topic, records=2)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin")
        assert len(follower.poll()) == 2
        (path / "0000" / "watermark").write_bytes(b"\0" * 8192)
        with open_topic() as topic:
            topic.append(b"new", sync=True)
            assert [each.value for each in follower.poll(timeout=30)] == [b"new"]


def test_lost_watermark_does_not_turn_rot_into_a_torn_tail(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    (path / "0000" / "watermark").unlink()
    segment = last_segment(path)
    content = bytearray(segment.read_bytes())
    content[SEGMENT_HEADER + BATCH_HEADER] ^= 1
    segment.write_bytes(content)
    refuses_and_changes_nothing(path)


def test_lost_watermark_leaves_alone_what_a_batch_proves_to_be_durable(open_topic: Open, path: Path) -> None:
    """Only the last flush has no batch behind it that says so, and is written again."""
    with open_topic() as topic:
        for value in (b"first", b"second", b"third"):
            last = topic.append(value, sync=True)
        end = topic.partition(0).high_watermark
    (path / "0000" / "watermark").unlink()
    with Topic.open(path) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.rewritten_bytes == end - last.offset


def test_watermark_ahead_of_the_data_is_corruption(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    mark = mark_of(path)
    set_mark(path, mark._replace(flushed_end=mark.flushed_end + 8, durable_end=mark.durable_end + 8))
    refuses_and_changes_nothing(path)


def test_watermark_inside_a_batch_is_corruption(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    mark = mark_of(path)
    set_mark(path, mark._replace(flushed_end=mark.flushed_end - 8, durable_end=mark.durable_end - 8))
    assert "ends at offset" in str(refuses_and_changes_nothing(path))


def test_stale_watermark_costs_a_rewrite_and_no_record(open_topic: Open, path: Path) -> None:
    """After a power cut the watermark may be older than the data that it once called durable."""
    with open_topic(batch_records=2) as topic:
        topic.append(b"a", sync=True)
        stale = mark_of(path)
        for value in (b"b", b"c"):
            topic.append(value, sync=True)
    set_mark(path, stale)
    with Topic.open(path) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.rewritten_bytes > 0
        assert values_of(topic) == [b"a", b"b", b"c"]


def test_watermark_from_before_a_roll_is_no_harm(open_topic: Open, path: Path) -> None:
    with open_topic() as topic:
        topic.append(b"a", sync=True)
        stale = mark_of(path)
        topic.partition(0).roll()
        topic.append(b"b", sync=True)
    set_mark(path, stale)
    with Topic.open(path) as topic:
        assert values_of(topic) == [b"a", b"b"]


def test_segments_below_the_log_start_are_removed(open_topic: Open, path: Path) -> None:
    """Retention makes the new start durable before it removes files; a crash between leaves some."""
    segments = three_segments(open_topic, path)
    start = int(segments[1].stem)
    set_mark(path, mark_of(path)._replace(log_start_offset=start))
    with Topic.open(path) as topic:
        assert topic.partition(0).log_start_offset == start
        assert values_of(topic) == [b"value 1", b"value 2"]
    assert not segments[0].exists()


def test_unfinished_retention_is_not_finished_when_the_log_is_damaged(open_topic: Open, path: Path) -> None:
    segments = three_segments(open_topic, path)
    set_mark(path, mark_of(path)._replace(log_start_offset=int(segments[1].stem)))
    cut_last_to_header(segments)
    refuses_and_changes_nothing(path)


def test_leftover_temporary_files_are_removed(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    leftover = path / "0000" / "00000000000000009999.log.tmp"
    leftover.write_bytes(b"half a header")
    with Topic.open(path) as topic:
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


@pytest.mark.parametrize("what", ["batch", "watermark"])
def test_last_writer_epoch_of_all_is_refused_before_anything_is_changed(
    what: str, open_topic: Open, path: Path
) -> None:
    """Forged: the next one would not fit its field."""
    with open_topic() as topic:
        topic.append(b"x", sync=True)
    identity = Identity.of(topic.log_id, 0)
    if what == "batch":
        content = last_segment(path).read_bytes()
        bad = forged(content[4096:], writer_epoch=(1 << 32) - 1, identity=identity)
        last_segment(path).write_bytes(content[:4096] + bad)
    else:
        mark = a_mark(9, 0, 144, 144, (1 << 32) - 1)
        (path / "0000" / "watermark").write_bytes(encode_new(mark, identity.salt))
    before = tree(path)
    with pytest.raises(CorruptLogError, match="writer epoch 4294967295"):
        Topic.open(path)
    assert tree(path) == before


def test_other_files_in_the_directory_are_left_alone(open_topic: Open, path: Path) -> None:
    closed_topic(open_topic)
    for name in ("notes.txt", "1.log", "0000000000000000000x.log"):
        (path / "0000" / name).write_bytes(b"mine")
    with Topic.open(path) as topic:
        assert len(topic.partition(0).segments) == 1
    assert (path / "0000" / "notes.txt").read_bytes() == b"mine"


# --- recovery that fails or dies itself --------------------------------------------------------------


def outcome(path: Path) -> tuple[list[Any], bytes]:
    """What a reader of the topic sees, and the bytes of its last segment."""
    return records_of(path), last_segment(path).read_bytes()


@pytest.mark.parametrize("lost_watermark", [False, True], ids=["watermark", "no watermark"])
def test_recovery_that_dies_anywhere_is_repeated_with_the_same_result(
    lost_watermark: bool, open_topic: Open, path: Path, tmp_path: Path
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed")
    with last_segment(crashed).open("ab") as file:
        file.write(b"torn" * 50)
    (crashed / "0000" / "00000000000000009999.log.tmp").write_bytes(b"rubbish")
    if lost_watermark:
        (crashed / "0000" / "watermark").unlink()
    once = crash_copy(crashed, tmp_path / "once")
    Topic.open(once).close()
    expected = outcome(once)
    at = 0
    while True:
        at += 1
        copy = crash_copy(crashed, tmp_path / "copy")
        files = DyingFiles(at)
        topic = None
        try:
            topic = testing.open_topic(copy, files=files)
            topic.close()
        except Killed:
            image = crash_copy(copy, tmp_path / "image")
        else:
            break
        finally:
            files.at = 1 << 30
            if topic is not None:
                topic.close()
        assert last_segment(image).read_bytes().startswith(expected[1])
        Topic.open(image).close()
        assert outcome(image) == expected, f"after dying before change {at}"
    assert at > 6


def test_any_failing_call_of_opening_is_an_error_and_leaks_nothing(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed")
    with last_segment(crashed).open("ab") as file:
        file.write(b"torn" * 50)
    once = crash_copy(crashed, tmp_path / "once")
    Topic.open(once).close()
    expected = outcome(once)

    class OfTheTopic(FaultyFiles):
        def before(self, call: Call) -> None:
            if not call.path.startswith("/proc"):  # where the file system's kind is looked up, which may fail
                super().before(call)

    files = OfTheTopic(at=1)
    while True:
        copy = crash_copy(crashed, tmp_path / "copy")
        open_before = open_files_of(copy)
        try:
            testing.open_topic(copy, files=files).close()
        except (LogError, OSError) as error:
            assert os.strerror(errno.EIO) in str(error)
        else:
            assert not files.failed, f"call {files.at} failed unnoticed"
            break
        assert open_files_of(copy) == open_before, f"after call {files.at} failed"
        Topic.open(copy).close()
        assert outcome(copy) == expected, f"after call {files.at} failed"
        files = OfTheTopic(at=files.at + 1)
    assert files.at > 30


def open_files_of(path: Path) -> list[str]:
    from conftest import open_files

    return [each for each in open_files() if each.startswith(str(path))]


def test_read_error_during_recovery_is_no_torn_tail(open_topic: Open, path: Path, tmp_path: Path) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed")
    before = tree(crashed)
    probe = FaultyFiles("pread", at=1 << 30)
    testing.open_topic(crash_copy(crashed, tmp_path / "probe"), files=probe).close()
    for at in range(1, probe.seen + 1):
        copy = crash_copy(crashed, tmp_path / "copy")
        with pytest.raises((StorageIOError, OSError)):
            testing.open_topic(copy, files=FaultyFiles("pread", at=at, every=True)).close()
        kept = tree(copy)
        assert all(kept[name].startswith(before[name]) for name in before if name.endswith(".log"))


# --- what it costs -----------------------------------------------------------------------------------


def test_bad_sector_under_a_stale_watermark_is_no_torn_tail(open_topic: Open, path: Path, tmp_path: Path) -> None:
    class BadSector(UnsyncedFiles):
        def pread(self, fd: int, size: int, position: int) -> bytes:
            if not os.readlink(f"/proc/self/fd/{fd}").endswith(".log"):
                return super().pread(fd, size, position)
            if position >= bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().pread(fd, min(size, bad - position), position)  # the kernel gives what it has

    crashed = write_crashed(open_topic, path, tmp_path / "crashed")
    bad = SEGMENT_HEADER + batch_ends(crashed, 0, mark_of(crashed).flushed_end + 1)[-1] + 40
    before = tree(crashed)
    with pytest.raises(StorageIOError):
        testing.open_topic(crashed, files=BadSector())
    assert tree(crashed) == before


def test_pages_are_read_whole_and_dropped_before_they_are_written_again(tmp_path: Path) -> None:
    """Or ext4 takes those that it has failed to write for written, and they are zeros after a restart."""
    content = random.Random(0).randbytes(3 << 20)
    (tmp_path / "file").write_bytes(content)
    files = RecordingFiles()
    fd = files.open_write(str(tmp_path / "file"))
    start, end = 100_000, len(content) - 100_000
    rewrite(files, fd, start, end)
    files.close(fd)
    assert (tmp_path / "file").read_bytes() == content
    dropped = written = start
    for call in files.calls:
        if call.name == "pread":
            assert call.arguments[1] >= dropped, "read after it was dropped"
        elif call.name == "drop_cached":
            position, size = call.arguments
            assert position % PAGE == size % PAGE == 0
            assert position <= dropped
            dropped = position + size
        elif call.name == "pwritev":
            parts, position = call.arguments
            assert position == written
            written += sum(map(len, parts))
            assert written <= dropped
    assert (written, files.calls[-2].name) == (end, "datasync")


def test_file_that_ends_while_it_is_written_again_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"short")
    fd = REAL.open_write(str(tmp_path / "file"))
    with pytest.raises(OSError, match="ended early"):
        rewrite(REAL, fd, 0, 6)
    REAL.close(fd)


def test_reopening_reads_only_what_lies_above_the_watermark(open_topic: Open, path: Path, tmp_path: Path) -> None:
    topic = open_topic(batch_records=100)
    topic.append_many([b"x" * 1000] * 5000)
    topic.flush()
    topic.append_many([b"y" * 1000] * 100)
    topic.partition(0)._access.writer().append_body(encode_body(topic_columns(50), codec=0))
    copy = crash_copy(path, tmp_path / "copy")
    above = end_of(copy) - mark_of(copy).durable_end
    assert above < 200_000 < 5_000_000 < end_of(copy)  # in batches of 100,000 bytes
    files = RecordingFiles()
    with testing.open_topic(copy, files=files) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.rewritten_bytes == above
    # Read to check and to write again; a header of the segment, the first and the last batch besides.
    assert files.bytes_read[last_segment(copy).name] <= 2 * above + 500_000


def topic_columns(count: int) -> Any:
    from loglib.format.columns import Columns

    return Columns([b"z" * 1000] * count)


def test_opening_many_segments_takes_a_few_calls_for_each(open_topic: Open, path: Path) -> None:
    costs = []
    for segments in (100, 200):
        with open_topic(files=UnsyncedFiles(), segment_bytes=4096) as topic:
            while len(topic.partition(0)._access.log.index) < segments:
                topic.append(b"x", sync=False)
                topic.partition(0).roll()
        files = RecordingFiles()
        with testing.open_topic(path, files=files) as topic:
            assert len(topic.partition(0).segments) == segments
            costs.append((len(files.calls), sum(files.bytes_read.values())))
    per_segment = (costs[1][0] - costs[0][0]) / 100
    assert per_segment <= 12, "opening must cost O(segments) calls"
    assert costs[1][1] <= 2.2 * costs[0][1]


@pytest.mark.slow
def test_opening_ten_thousand_segments_reads_each_header_once(open_topic: Open, path: Path) -> None:
    with open_topic(files=UnsyncedFiles(), segment_bytes=4096) as topic:
        partition = topic.partition(0)
        for _ in range(9_999):
            partition.append(b"x")
            partition.roll()
    files = RecordingFiles()
    with testing.open_topic(path, files=files) as topic:
        assert len(topic.partition(0)._access.log.index) == 10_000
        assert files.count("open_read") <= 10_010 and files.count("pread") <= 10_020
        assert len(values_of(topic)) == 9_999


# --- durability "os" and producers -------------------------------------------------------------------


def test_os_durability_loses_no_record_to_a_kill(open_topic: Open, path: Path, tmp_path: Path) -> None:
    topic = open_topic(durability="os")
    topic.append(b"one")
    topic.flush()
    copy = crash_copy(path, tmp_path / "copy")
    mark = mark_of(copy)
    assert mark.durable_end < mark.flushed_end
    with Topic.open(copy) as recovered:
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
    with Topic.open(copy) as recovered:
        assert values_of(recovered) == [b"one"]
        assert recovered.partition(0).high_watermark < mark_of(path).flushed_end


@pytest.mark.parametrize("rolled", [False, True])
def test_producers_are_rebuilt_after_a_crash(rolled: bool, open_topic: Open, path: Path, tmp_path: Path) -> None:
    topic = open_topic(files=UnsyncedFiles())
    first = topic.partition(0).append_many([b"a", b"b"], producer=("p", 1))
    if rolled:
        topic.partition(0).roll()
    last = topic.partition(0).append_many([b"c"], producer=("q", 7))
    with Topic.open(crash_copy(path, tmp_path / "copy")) as recovered:
        assert recovered.partition(0).append_many([b"a", b"b"], producer=("p", 1)) == first
        assert recovered.partition(0).append_many([b"c"], producer=("q", 7)) == last
        recovered.flush()
        assert values_of(recovered) == [b"a", b"b", b"c"]


def test_quiet_policies_are_what_the_tests_think(open_topic: Open) -> None:
    with open_topic() as topic:
        assert topic.config.flush == QUIET["flush"] and topic._flusher is None


def test_segment_whose_base_is_not_where_the_one_before_ends_is_refused(open_topic: Open, path: Path) -> None:
    segments = three_segments(open_topic, path)
    content = segments[2].read_bytes()
    header = SegmentHeader.decode(content[:SEGMENT_HEADER], str(segments[2]))
    moved = header._replace(base_offset=header.base_offset + 8)
    segments[2].unlink()
    (path / "0000" / segment_name(moved.base_offset)).write_bytes(moved.encode())
    assert "the end of the segment before" in str(refuses_and_changes_nothing(path))


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
