"""What a crash leaves of a log of offsets is mended; damage is an error, and never "no commit yet"."""

from collections.abc import Callable
from pathlib import Path

import committed
import pytest
from committed import LOG_ID, B, logs, offset_of, put, segments

from conftest import Clock
from loglib import CorruptLogError, TopicPartition
from loglib.append.writer import Writer
from loglib.config.policies import TopicConfig
from loglib.format.columns import Columns
from loglib.groups.offsets import Offsets, offsets_identity
from loglib.log.index import SegmentIndex
from loglib.system.files import REAL

Opener = Callable[..., Offsets]

directory = committed.directory
open_log = committed.open_log


# --- what a crash has left --------------------------------------------------------------------------------


def tear(directory: Path) -> None:
    """As after a kill in the middle of a commit: bytes above the watermark."""
    with segments(directory)[0].open("ab") as file:
        file.write(b"half of a batch")


def test_torn_commit_is_none_and_is_mended_by_the_next_member(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.abandon()
    tear(directory)
    assert offset_of(open_log()) == offset_of(log) == 5
    other = open_log()
    assert offset_of(other) == 5
    put(other, 6)
    assert offset_of(open_log()) == offset_of(log) == 6


def test_commit_that_was_synced_is_found_although_the_watermark_was_not(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 4)
    (watermark,) = directory.glob("*/watermark")
    before = watermark.read_bytes()
    put(log, 5)
    put(log, 7, of=B)
    watermark.write_bytes(before)  # as after a power cut
    found = open_log()
    assert (offset_of(found), offset_of(found, B)) == (5, 7)
    log.abandon()
    put(found, 8, of=TopicPartition("clicks", 1))
    assert (offset_of(found), offset_of(open_log(), B)) == (5, 7)


def test_commit_of_a_history_that_a_crash_has_cut_off_does_not_count(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 4)
    (segment,), (watermark,) = directory.glob("*/*.log"), directory.glob("*/watermark")
    one, mark, end = segment.read_bytes(), watermark.read_bytes(), segment.stat().st_size
    put(log, 5)
    put(log, 6)
    later = segment.read_bytes()
    log.abandon()
    segment.write_bytes(one)
    watermark.write_bytes(mark)
    other = open_log()
    put(other, 9)  # of another epoch, and so with another CRC
    other.abandon()
    mark = watermark.read_bytes()
    size = segment.stat().st_size
    segment.write_bytes(segment.read_bytes() + later[size:])  # what the disk had there uncovered
    assert size > end and offset_of(open_log()) == 9
    watermark.write_bytes(mark)
    assert offset_of(open_log()) == 9


def test_damage_above_the_watermark_that_was_durable_is_an_error(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 4)
    (segment,), (watermark,) = directory.glob("*/*.log"), directory.glob("*/watermark")
    before, start = watermark.read_bytes(), segment.stat().st_size
    for offset in (5, 6, 7):
        put(log, offset)
    log.abandon()
    watermark.write_bytes(before)  # as after a power cut
    raw = bytearray(segment.read_bytes())
    raw[start + 150] ^= 1
    segment.write_bytes(raw)
    with pytest.raises(CorruptLogError):
        open_log().commits()
    last = bytearray(raw)
    raw = raw[: start + (len(raw) - start) // 3]
    segment.write_bytes(raw)  # the last alone, which nothing proves to have been synced
    assert offset_of(open_log()) == 4
    assert len(last) > len(raw)


@pytest.mark.filterwarnings("ignore:.*watermark is lost")
def test_lost_watermark_is_not_taken_for_no_commit(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.close()
    (watermark,) = directory.glob("*/watermark")
    watermark.unlink()
    assert offset_of(open_log()) == 5
    watermark.write_bytes(bytes(512))
    log = open_log()
    put(log, 6)
    assert offset_of(log) == 6


def test_power_cut_that_leaves_less_than_was_flushed_is_no_damage(open_log: Opener, directory: Path) -> None:
    """As durability "os" allows: the watermark was written by the system, and the last commit was not."""
    log = open_log(durability="os")
    for offset in (4, 5, 6):
        put(log, offset)
    (segment,) = directory.glob("*/*.log")
    log.abandon()
    raw = bytearray(segment.read_bytes())
    third = (len(raw) - 4096) // 3
    segment.write_bytes(raw[: 4096 + 2 * third] + bytes(third))
    assert offset_of(open_log(durability="os")) == 5
    segment.write_bytes(raw[: 4096 + third // 2])
    assert open_log(durability="os").commits() == {}
    other = open_log(durability="os")
    put(other, 7, generation=2)
    assert offset_of(other) == 7


# --- damage ------------------------------------------------------------------------------------------------


def test_damaged_commit_is_an_error(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    put(log, 6)
    path = segments(directory)[0]
    raw = bytearray(path.read_bytes())
    raw[4096 + 60] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptLogError):
        open_log().commits()


def test_missing_files_are_an_error(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.close()
    segments(directory)[0].unlink()
    with pytest.raises(CorruptLogError):
        open_log().commits()
    with pytest.raises(CorruptLogError):
        put(open_log(), 6)


def test_missing_logs_are_an_error_and_never_no_commit(open_log: Opener, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptLogError, match="no directory"):
        open_log(tmp_path / "missing")
    log = open_log()
    (only,) = logs(directory)
    only.rename(tmp_path / "aside")
    with pytest.raises(CorruptLogError, match="no log of committed offsets"):
        log.commits()


def test_log_cut_below_its_watermark_is_an_error(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    log.close()
    path = segments(directory)[0]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptLogError):
        put(open_log(), 6)
    with pytest.raises(CorruptLogError):
        open_log().commits()


def test_log_of_another_group_or_name_is_an_error(open_log: Opener, directory: Path, clock: Clock) -> None:
    other = Offsets(REAL, str(directory), LOG_ID, "other", durability="disk", permissions=0o600, clock=clock)
    with pytest.raises(CorruptLogError):
        other.commits()
    (only,) = logs(directory)
    only.rename(directory / "moved")
    with pytest.raises(CorruptLogError):
        open_log().commits()


OF_CLICKS = b'[{"topic": "clicks", "log_id": "00", "partitions": {"0": %b}}]'
FORGED = {
    "no JSON": b"{", "no object": b"[1]", "no partition": b'[{"topic": "a", "log_id": "00"}]',
    "too few": OF_CLICKS % b"[1]",
    "no number": OF_CLICKS % b'["x", 1, 1, 0, ""]', "endless": OF_CLICKS % b'[1e999, 1, 1, 0, ""]', "nothing": b"",
    "no list": OF_CLICKS % b"5", "no text": b"\xff", "deep": b"[" * 100_000, "no log id": b'[{"topic": "clicks"}]',
}  # fmt: skip


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
@pytest.mark.usefixtures("no_garbage")
def test_record_that_is_no_commit_is_an_error(open_log: Opener, directory: Path, clock: Clock, value: bytes) -> None:
    (only,) = logs(directory)
    identity = offsets_identity(LOG_ID, "etl", only.name)
    writer = Writer(REAL, str(only), identity, TopicConfig(), index=SegmentIndex([]), clock=clock)
    writer.append(Columns([value], [b"one"]), len(value))
    writer.close()
    with pytest.raises(CorruptLogError, match="a record at offset 0 that is not a commit"):
        open_log().commits()
