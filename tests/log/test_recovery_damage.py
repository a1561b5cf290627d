"""Recovery refuses damage of what was promised, names it, and touches nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import a_mark, forged
from crashed_logs import (
    batch_ends,
    closed_topic,
    end_of,
    identity_of,
    mark_of,
    refuses_and_changes_nothing,
    set_mark,
    three_segments,
    write_crashed,
)

from conftest import crash_copy, last_segment, tree, values_of
from loglib import CorruptLogError, Topic, UnsupportedFormatError
from loglib.format.header import HEADER_BYTES as BATCH_HEADER
from loglib.format.watermark import encode_new
from loglib.segment import HEADER_BYTES as SEGMENT_HEADER
from loglib.segment import Identity, SegmentHeader, segment_name

Open = Callable[..., Topic]


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
    with Topic.open(crash_copy(copy, tmp_path / "fine"), create=True) as recovered:
        assert values_of(recovered) == [b"first", b"second", b"third"]
    content = bytearray(last_segment(copy).read_bytes())
    content[SEGMENT_HEADER + stale.durable_end + BATCH_HEADER + 3] ^= 1
    last_segment(copy).write_bytes(content)
    error = refuses_and_changes_nothing(copy)
    assert error.file_position == SEGMENT_HEADER + stale.durable_end + BATCH_HEADER


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
            Topic.open(path, create=True, mode=mode)
    assert tree(elsewhere) == before


def test_missing_partition_directory_is_corruption(open_topic: Open, path: Path) -> None:
    with open_topic(partitions=2):
        pass
    shutil.rmtree(path / "0001")
    for mode in ("a", "r"):
        with pytest.raises(CorruptLogError, match="0001"):
            Topic.open(path, create=True, mode=mode)
    assert not (path / "0001").exists()


def test_newer_format_above_the_watermark_is_refused_by_name(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    crashed = write_crashed(open_topic, path, tmp_path / "crashed", unflushed=2)
    segment = last_segment(crashed)
    content, start = segment.read_bytes(), SEGMENT_HEADER + mark_of(crashed).durable_end
    end = start + batch_ends(crashed, mark_of(crashed).durable_end, mark_of(crashed).durable_end + 1)[0]
    bad = forged(content[start : end - mark_of(crashed).durable_end], version=4, identity=identity_of(crashed))
    segment.write_bytes(content[:start] + bad + content[start + len(bad) :])
    before = tree(crashed)
    with pytest.raises(UnsupportedFormatError, match="batch version 4"):
        Topic.open(crashed, create=True)
    assert tree(crashed) == before


def test_unfinished_retention_is_not_finished_when_the_log_is_damaged(open_topic: Open, path: Path) -> None:
    segments = three_segments(open_topic, path)
    set_mark(path, mark_of(path)._replace(log_start_offset=int(segments[1].stem)))
    cut_last_to_header(segments)
    refuses_and_changes_nothing(path)


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
        Topic.open(path, create=True)
    assert tree(path) == before


def test_segment_whose_base_is_not_where_the_one_before_ends_is_refused(open_topic: Open, path: Path) -> None:
    segments = three_segments(open_topic, path)
    content = segments[2].read_bytes()
    header = SegmentHeader.decode(content[:SEGMENT_HEADER], str(segments[2]))
    moved = header._replace(base_offset=header.base_offset + 8)
    segments[2].unlink()
    (path / "0000" / segment_name(moved.base_offset)).write_bytes(moved.encode())
    assert "the end of the segment before" in str(refuses_and_changes_nothing(path))
