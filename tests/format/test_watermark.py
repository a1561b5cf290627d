"""format/watermark.py: one whole slot is enough, and no damaged slot ever counts."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import IDENTITY, LOG_ID, a_mark, calm, resealed_slot
from hypothesis import given
from hypothesis import strategies as st

from loglib import CorruptLogError, StorageIOError, UnsupportedFormatError
from loglib.format.watermark import (
    FILE_BYTES,
    SECOND_SLOT,
    SLOT_BYTES,
    Mark,
    WatermarkReader,
    WatermarkWriter,
    encode_new,
    newest,
)
from loglib.segment import Identity
from loglib.system.directory import Directory
from loglib.system.files import REAL, Files
from loglib.testing import FaultyFiles

SALT = IDENTITY.salt
OLDER, NEWER = a_mark(6, 0, 800, 640, 3), a_mark(7, 80, 1600, 1600, 4)
U63 = st.integers(0, (1 << 63) - 1)


def two_slots() -> bytes:
    """OLDER in the first slot, NEWER in the second."""
    return encode_new(OLDER, SALT)[:SECOND_SLOT] + encode_new(NEWER, SALT)[:SLOT_BYTES]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "watermark"
    path.write_bytes(encode_new(Mark.at_rest(0), SALT))
    return path


@pytest.fixture
def writer(path: Path) -> Iterator[WatermarkWriter]:
    with Directory.open(REAL, str(path.parent)) as place:
        yield WatermarkWriter(place, SALT, Mark.at_rest(0))


@calm
@given(st.tuples(U63, U63, U63).map(sorted), U63, st.integers(0, (1 << 32) - 1))
def test_encoded_watermark_decodes_to_the_same(ends: list[int], sequence: int, epoch: int) -> None:
    held_from, held_tail = ends[2], ends[1]
    mark = Mark(
        sequence, ends[0], ends[2], ends[1], epoch, epoch, ends[2], sequence, 1, held_from, epoch, ends[1], held_tail
    )  # fmt: skip
    content = encode_new(mark, SALT)
    assert len(content) == FILE_BYTES
    assert newest(content, SALT) == mark


def test_slot_with_the_higher_sequence_wins() -> None:
    content = two_slots()
    assert newest(content, SALT) == NEWER
    assert newest(content[SECOND_SLOT:] + content[SLOT_BYTES:SECOND_SLOT] + content[:SLOT_BYTES], SALT) == NEWER


def test_publications_go_to_the_slots_in_turn(path: Path, writer: WatermarkWriter) -> None:
    reader = WatermarkReader(REAL, str(path), SALT)
    before = path.read_bytes()
    for sequence in range(1, 6):
        mark = a_mark(sequence, 0, 8 * sequence, 8 * sequence, 1)
        writer.publish(mark)
        after = path.read_bytes()
        changed = {at // SECOND_SLOT for at in range(FILE_BYTES) if before[at] != after[at]}
        assert changed == {sequence % 2}
        assert reader.read() == mark == writer.mark
        assert newest(after[:SLOT_BYTES], SALT) or newest(after, SALT)
        before = after
    writer.sync()
    writer.close()
    reader.close()


def test_poll_without_a_publication_decodes_nothing(path: Path) -> None:
    reader = WatermarkReader(REAL, str(path), SALT)
    assert reader.read() is reader.read()
    reader.close()


# --- damage -------------------------------------------------------------------------------------------


def test_flip_falls_to_the_other_slot() -> None:
    content = bytearray(two_slots())
    for at in [*range(SLOT_BYTES), *range(SECOND_SLOT, FILE_BYTES)]:
        for bit in range(8):
            content[at] ^= 1 << bit
            assert newest(bytes(content), SALT) == (NEWER if at < SECOND_SLOT else OLDER), f"byte {at}, bit {bit}"
            content[at] ^= 1 << bit


def test_bytes_outside_the_slots_are_ignored() -> None:
    content = two_slots()
    assert newest(content[:SLOT_BYTES] + b"\xff" * (SECOND_SLOT - SLOT_BYTES) + content[SECOND_SLOT:], SALT) == NEWER
    assert newest(content + b"more", SALT) == NEWER


def test_interrupt_of_the_unlocking_leaves_the_file_free_for_other_processes(
    path: Path, writer: WatermarkWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlock, interrupts = Files.unlock, iter([True])

    def unlock_or_be_interrupted(files: Files, fd: int) -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt
        unlock(files, fd)

    monkeypatch.setattr(Files, "unlock", unlock_or_be_interrupted)
    with pytest.raises(KeyboardInterrupt), writer.locked():
        pass
    with path.open("rb") as again:
        assert REAL.try_lock(again.fileno())


def test_prefix_has_the_slots_that_are_whole_in_it() -> None:
    content = two_slots()
    for size in [*range(SLOT_BYTES + 2), *range(SECOND_SLOT - 2, FILE_BYTES + 1)]:
        expected = None if size < SLOT_BYTES else OLDER if size < FILE_BYTES else NEWER
        assert newest(content[:size], SALT) == expected, f"{size} bytes"


def test_torn_publication_leaves_the_one_before() -> None:
    old, new = encode_new(NEWER._replace(sequence=5), SALT)[:SLOT_BYTES], encode_new(NEWER, SALT)[:SLOT_BYTES]
    first = encode_new(OLDER, SALT)[:SECOND_SLOT]
    for torn in range(1, SLOT_BYTES):
        found = newest(first + new[:torn] + old[torn:], SALT)
        assert found in (OLDER, NEWER), f"torn at {torn}"
        assert found == OLDER or new[:torn] + old[torn:] == new


@pytest.mark.parametrize("content", [b"", bytes(FILE_BYTES), b"\xff" * FILE_BYTES], ids=["empty", "zeros", "ones"])
def test_without_a_whole_slot_there_is_no_mark(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    reader = WatermarkReader(REAL, str(path), SALT)
    assert reader.read() is None
    reader.close()


@pytest.mark.parametrize("identity", [Identity.of(LOG_ID, 1), Identity.of(bytes(16), 0)], ids=["partition", "log"])
def test_watermark_of_another_log_does_not_count(identity: Identity) -> None:
    assert newest(encode_new(NEWER, identity.salt), SALT) is None


# --- whole slots that cannot be taken -------------------------------------------------------------------


@pytest.mark.parametrize("slot", [0, SECOND_SLOT])
def test_newer_slot_is_refused_by_name(slot: int) -> None:
    content = two_slots()
    changed = resealed_slot(content[slot : slot + SLOT_BYTES], 3, b"\4")
    with pytest.raises(UnsupportedFormatError, match="a file: watermark version 4 is newer") as caught:
        newest(content[:slot] + changed + content[slot + SLOT_BYTES :], SALT, "a file")
    assert (caught.value.found, caught.value.supported) == (4, 3)


@pytest.mark.parametrize("numbers", [(1 << 63, 0, 8, 8), (9, 0, 1 << 63, 8)], ids=["sequence", "flushed-end"])
def test_number_that_has_none_behind_it_is_damage(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(CorruptLogError, match="at most|up to"):
        newest(encode_new(a_mark(*numbers, 1), SALT), SALT, "a file")


@pytest.mark.parametrize("slot", [0, SECOND_SLOT])
def test_version_zero_is_no_version(slot: int) -> None:
    content = two_slots()
    changed = resealed_slot(content[slot : slot + SLOT_BYTES], 3, b"\0")
    with pytest.raises(CorruptLogError, match="watermark version 0") as caught:
        newest(content[:slot] + changed + content[slot + SLOT_BYTES :], SALT, "a file")
    assert caught.value.file_position == slot + 3


@pytest.mark.parametrize(
    ("log_start", "durable", "flushed"),
    [(9, 8, 8), (0, 9, 8), (1 << 63, 0, 0), (0, 1 << 63, 0)],
    ids=["start-above-durable", "durable-above-flushed", "start-wild", "durable-wild"],
)
@pytest.mark.parametrize("slot", [0, SECOND_SLOT])
def test_slot_that_contradicts_itself_is_damage(slot: int, log_start: int, durable: int, flushed: int) -> None:
    bad = encode_new(a_mark(9, log_start, flushed, durable, 1), SALT)[:SLOT_BYTES]
    content = two_slots()
    with pytest.raises(CorruptLogError, match=f"log start {log_start}, durable end {durable}") as caught:
        newest(content[:slot] + bad + content[slot + SLOT_BYTES :], SALT, "a file")
    assert (caught.value.path, caught.value.file_position) == ("a file", slot)


@pytest.mark.parametrize(("flushed_tail", "durable_tail"), [(801, 640), (800, 641)])
def test_last_batch_behind_the_end_is_damage(flushed_tail: int, durable_tail: int) -> None:
    bad = OLDER._replace(flushed_tail=flushed_tail, durable_tail=durable_tail)
    with pytest.raises(CorruptLogError, match=f"last batches at {flushed_tail} and {durable_tail}") as caught:
        newest(encode_new(bad, SALT), SALT, "a file")
    assert caught.value.file_position == 48


@pytest.mark.parametrize(("at", "size"), [(84, 4), (144, 48)])
def test_bytes_kept_free_in_a_slot_are_ignored(at: int, size: int) -> None:
    changed = resealed_slot(two_slots()[SECOND_SLOT:], at, b"\xff" * size)
    assert newest(two_slots()[:SECOND_SLOT] + changed, SALT) == NEWER


def test_read_error_is_no_lost_watermark(path: Path) -> None:
    class Broken(Files):
        def pread(self, fd: int, size: int, position: int) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    reader = WatermarkReader(Broken(), str(path), SALT)
    with pytest.raises(StorageIOError, match="while reading the watermark"):
        reader.read()
    reader.close()


def test_reading_changes_nothing(path: Path) -> None:
    os.chmod(path, 0o400)
    before = path.stat()
    reader = WatermarkReader(REAL, str(path), SALT)
    reader.read()
    reader.close()
    after = path.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


@pytest.mark.parametrize(("start", "tail"), [(10, 0), (1 << 63, 0), (250, 251)])
def test_hold_that_contradicts_itself_is_refused(start: int, tail: int) -> None:
    mark = NEWER._replace(held_txn=7, held_from=start, held_tail=tail)
    with pytest.raises(CorruptLogError, match="transaction 7 held from offset"):
        newest(encode_new(mark, SALT), SALT)


# --- news -----------------------------------------------------------------------------------------------


def test_news_are_the_publications_after_the_one_read_last(path: Path, writer: WatermarkWriter) -> None:
    reader = WatermarkReader(REAL, str(path), SALT)
    assert reader.next_mark() is None and reader.has_next_mark(), "nothing was read yet: only read() can tell"
    reader.read()
    marks = [a_mark(sequence, 0, 8 * sequence, 8 * sequence, 1) for sequence in range(1, 8)]
    for mark in marks[:4]:
        assert (reader.has_next_mark(), reader.next_mark()) == (False, None)
        writer.publish(mark)
        assert reader.has_next_mark()
        assert reader.next_mark() == mark == reader.read()
    writer.publish(marks[4])
    writer.publish(marks[5])
    assert [reader.next_mark(), reader.next_mark(), reader.next_mark()] == [marks[4], marks[5], None], (
        "one after the other"
    )
    writer.publish(marks[5]._replace(sequence=7))
    writer.publish(marks[5]._replace(sequence=8))
    writer.publish(marks[5]._replace(sequence=9))
    assert reader.next_mark() == marks[5]._replace(sequence=9), "or a later one"
    assert reader.read() == marks[5]._replace(sequence=9)
    writer.close()
    reader.close()


def test_slot_that_is_not_whole_is_no_news(path: Path, writer: WatermarkWriter) -> None:
    reader = WatermarkReader(REAL, str(path), SALT)
    before = reader.read()
    writer.publish(a_mark(1, 0, 8, 8, 1))
    content = path.read_bytes()
    for at in range(SECOND_SLOT, FILE_BYTES):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert reader.next_mark() is None and reader.read() == before, f"byte {at}"
    for size in (0, SECOND_SLOT - 1, SECOND_SLOT, SECOND_SLOT + 12, FILE_BYTES - 1):
        path.write_bytes(content[:size])
        assert reader.next_mark() is None, f"{size} bytes"
    path.write_bytes(content)
    assert reader.next_mark() == writer.mark
    writer.close()
    reader.close()


def test_watermark_that_cannot_be_read_is_left_to_the_next_read(path: Path) -> None:
    files = FaultyFiles("pread", every=True, armed=False)
    reader = WatermarkReader(files, str(path), SALT)
    reader.read()
    files.armed = True
    assert reader.next_mark() is None and reader.has_next_mark()
    files.armed = False
    reader.close()
