"""Healing beside writers, retention, other healers, disks that fail, and donors that change."""

from __future__ import annotations

import errno
from pathlib import Path

import mended
import pytest
from builders import spoil
from mended import batches, changed, identity, mirrored, segments, write

from conftest import tree, values_of
from loglib import StorageIOError, Topic, repair, testing
from loglib.copies import heal
from loglib.copies.healing import heal_topic
from loglib.format.watermark import encode_new, newest
from loglib.system import lock
from loglib.system.files import REAL

copy = mended.copy
whole = mended.whole


def test_beside_a_writer_only_sealed_segments_are_healed(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    first, second, *_, last = segments(path)
    second.unlink()
    spoil(first, batches(first)[1][0] + 20)
    spoil(first, 50)
    spoil(last, batches(last)[0][0] + 140)
    spoil(last, 60)
    spoil(path / "0000" / "watermark", 4106)
    held = lock.acquire(REAL, str(path / "0000"), 0o600)
    try:
        assert len(heal(path, [copy], dry_run=True).healed) == 3
        report = heal(path, [copy])
        assert changed(path, whole) == {str(last.relative_to(path)), "0000/watermark"}
        assert len(report.healed) == 3 and all("close that writer" in each.why for each in report.unhealed)
        assert len(report.unhealed) == 3
    finally:
        held.release()
    assert not heal(path, [copy]).unhealed
    assert changed(path, whole) <= {"0000/watermark"}


def test_a_living_writer_goes_on_while_its_sealed_segments_are_healed(path: Path, copy: Path) -> None:
    write(path, 60)
    mirrored(path, copy)
    with Topic.open(path, create=True) as topic:
        topic.append(b"last", sync=True)
        segment = segments(path)[0]
        content = segment.read_bytes()
        spoil(segment, batches(segment)[1][0] + 20)
        assert not heal(path, [copy]).unhealed and segment.read_bytes() == content
        topic.append(b"more", sync=True)
        assert len(values_of(topic)) == 62 and not topic.verify().damage


def test_what_retention_drops_meanwhile_is_not_made_again(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    gone, kept = segments(path)[0], segments(path)[2]
    gone.unlink()
    held = lock.acquire(REAL, str(path / "0000"), 0o600)

    class Dropping(testing.UnsyncedFiles):
        """Retention drops the first segments as soon as a donor is read."""

        def open_read(self, name: str, *, dir_fd: int | None = None) -> int:
            if name.startswith(str(copy)) and not dropped:
                dropped.append(name)
                salt = identity(path).salt
                mark = newest((path / "0000" / "watermark").read_bytes(), salt)
                assert mark is not None
                higher = mark._replace(log_start_offset=int(kept.stem))
                (path / "0000" / "watermark").write_bytes(encode_new(higher, salt))
            return super().open_read(name, dir_fd=dir_fd)

    dropped: list[str] = []
    try:
        report = heal_topic(Dropping(), str(path), [str(copy)])
    finally:
        held.release()
    assert dropped and "retention has dropped it" in report.unhealed[0].why and not gone.exists()


def test_a_disk_that_gives_other_bytes_than_were_written_is_an_error(
    path: Path, copy: Path, whole: dict[str, bytes]
) -> None:
    segment = segments(path)[1]
    spoil(segment, batches(segment)[1][0] + 20)

    class Losing(testing.UnsyncedFiles):
        """The disk has lost what it was given, and the page cache shows it until it is dropped."""

        def drop_cached(self, fd: int, start: int, size_bytes: int) -> None:
            spoil(segment, batches(segments(copy)[1])[1][0] + 20)

    with pytest.raises(StorageIOError, match="other bytes than were written"):
        heal_topic(Losing(), str(path), [str(copy)])


def test_a_full_disk_changes_nothing(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    segment = segments(path)[1]
    spoil(segment, batches(segment)[1][0] + 20)
    before = tree(path)

    class Full(testing.UnsyncedFiles):
        def copy_range(self, source: int, target: int, *, start: int, end: int, at: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        heal_topic(Full(), str(path), [str(copy)])
    now = {name: each for name, each in tree(path).items() if ".damaged-" not in name}
    assert now == before
    assert not heal(path, [copy]).unhealed and not changed(path, whole)


@pytest.mark.parametrize("number", [1, 2])
def test_a_donor_that_changes_meanwhile_is_no_donor(
    path: Path, copy: Path, whole: dict[str, bytes], number: int
) -> None:
    name = segments(path)[1].relative_to(path)
    position, length = batches(path / name)[1]
    spoil(path / name, position + 140)
    reads = 0

    class Changing(testing.UnsyncedFiles):
        """The donor's batch is damaged when it has been read so many times."""

        def read_at(self, fd: int, size_bytes: int, at: int) -> bytes:
            nonlocal reads
            content = super().read_at(fd, size_bytes, at)
            if content == whole[str(name)][position : position + length]:
                reads += 1
                if reads > number:
                    return bytes(len(content))
            return content

    report = heal_topic(Changing(), str(path), [str(copy)])
    assert not report.healed and "has changed meanwhile" in report.unhealed[0].why


def test_what_another_process_has_healed_meanwhile_is_left_alone(
    path: Path, copy: Path, whole: dict[str, bytes]
) -> None:
    segment = segments(path)[1]
    content = segment.read_bytes()
    position, length = batches(segment)[1]
    spoil(segment, position + 20)

    class Meanwhile(testing.UnsyncedFiles):
        """Another process heals the same batch as soon as a donor is read."""

        def open_read(self, name: str, *, dir_fd: int | None = None) -> int:
            if name.startswith(str(copy)) and name.endswith(".log"):
                with segment.open("r+b") as file:
                    file.seek(position)
                    file.write(content[position : position + length])
            return super().open_read(name, dir_fd=dir_fd)

    report = heal_topic(Meanwhile(), str(path), [str(copy)])
    assert not report.healed and not report.unhealed and not report.verified.damage and not changed(path, whole)


def test_of_a_gap_only_what_is_damaged_is_written(path: Path, copy: Path, whole: dict[str, bytes]) -> None:
    segment = segments(path)[1]
    content, places = segment.read_bytes(), batches(segment)
    spoil(segment, *(each + 20 for each, _ in places[1:4]))
    repair(path)
    position, length = places[2]
    with segment.open("r+b") as file:
        file.seek(position)
        file.write(content[position : position + length])
    report = heal(path, [copy])
    assert [len(each.offsets) for each in report.healed] == [places[1][1], places[3][1], 0]
    assert segment.read_bytes() == content and not report.verified.gaps
