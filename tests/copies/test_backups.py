"""docs/operations.md: a copy that is made file by file, beside a writer, opens as a prefix or says why not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from counts import need

from loglib import CorruptLogError, Topic, repair
from loglib.segment import HEADER_BYTES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
WRITER = """
import sys
from loglib import Retention, Topic

path, segment_bytes, kept = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Topic.open(
    path, create=True, partitions=2, segment_bytes=segment_bytes, retention=Retention(age=None, bytes=kept)
) as topic:
    for number in range(10_000_000):
        topic.append(b"%d" % number * 20, partition=number % 2, sync=number % 50 == 0)
"""
NUMBERS = """
import sys
from loglib import Topic

with Topic.open(sys.argv[1], create=True, partitions=2, segment_bytes=int(sys.argv[2])) as topic:
    for number in range(10_000_000):
        topic.append(b"%d" % number, partition=number % 2, sync=number % 10 > 1)
"""


def back_up() -> Callable[[Path, Path], None]:
    """The function on the page."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (code,) = (each for each in blocks if "def back_up" in each)
    found: dict[str, Callable[[Path, Path], None]] = {}
    exec(code, found)
    return found["back_up"]


def flushed_ends(path: Path) -> list[int]:
    """The high watermark of each partition; [0] while there is no topic."""
    try:
        with Topic.open(path, mode="r") as topic:
            return [partition.high_watermark for partition in topic.partitions]
    except FileNotFoundError:
        return [0]


@pytest.mark.parametrize(("segment_bytes", "kept"), [(1 << 20, 1 << 40), (1 << 16, 1 << 22)], ids=["grows", "rolls"])
def test_copy_beside_a_writer_is_whole_or_is_refused(path: Path, tmp_path: Path, segment_bytes: int, kept: int) -> None:
    copy, whole = back_up(), 0
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(segment_bytes), str(kept)])
    try:
        deadline = time.monotonic() + 60
        while not all(flushed_ends(path)):  # each partition has records
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for number in range(12):
            time.sleep(0.05)
            before = flushed_ends(path)
            to = tmp_path / f"copy-{number}"
            copy(path, to)
            try:
                with Topic.open(to, create=True) as copied:
                    assert copied.verify().damage == ()
                    ends = [partition.high_watermark for partition in copied.partitions]
                    assert all(end >= known for end, known in zip(ends, before, strict=True))
                    for partition in copied.partitions:
                        assert sum(1 for _ in partition.read()) > 0
                whole += 1
            except CorruptLogError as error:
                assert kept < 1 << 40, f"{error}: nothing was dropped or begun meanwhile"
    finally:
        writer.kill()
        writer.wait()
    assert whole >= 6


TOOLS = {
    "cp": ["cp", "-a", "{source}", "{to}"],
    "rsync": ["rsync", "-a", "{source}/", "{to}"],
    "tar": ["sh", "-c", "mkdir {to}; tar -C {source} -cf - . 2>{to}.errors | tar -C {to} -xf -"],
}


def values_of_each(path: Path) -> list[list[int]]:
    """The values before the first hole of each partition. `loglib repair` keeps what is around a hole."""
    try:
        topic = Topic.open(path, create=True)
        damage: tuple[object, ...] = topic.verify().damage
        topic.close()
    except CorruptLogError as error:
        if "found bytes 00000000" not in str(error):
            raise
        damage = (error,)
    if damage:
        assert all("bytes 00000000" in str(each) for each in damage)
        assert repair(path).verified.damage == ()
    with Topic.open(path) as topic:
        whole = {each.partition: each.offsets.start for each in reversed(topic.verify().gaps)}
        return [
            [int(record.value or b"") for record in each.read(end=whole.get(each.id, "end"))]
            for each in topic.partitions
        ]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("segment_bytes", [1 << 30, 1 << 14], ids=["grows", "rolls"])
def test_copy_by_a_plain_tool_opens_as_a_prefix_or_says_why_not(
    path: Path, tmp_path: Path, tool: str, segment_bytes: int
) -> None:
    """Where the watermark is newer than the segments, the page says: remove it. Then it opens."""
    need(shutil.which(tool), tool)
    writer = subprocess.Popen([sys.executable, "-c", NUMBERS, str(path), str(segment_bytes)])
    try:
        deadline = time.monotonic() + 60
        while not all(flushed_ends(path)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for number in range(8):
            time.sleep(0.02)
            to = tmp_path / f"copy-{number}"
            command = [part.format(source=path, to=to) for part in TOOLS[tool]]
            with Topic.open(path, mode="r") as topic:
                known = [each.high_watermark for each in topic.partitions]
            subprocess.run(command, check=False, capture_output=True)  # some complain that a file has changed
            try:
                found = values_of_each(to)
            except CorruptLogError as error:
                assert "nothing was changed" in str(error)
                for watermark in to.glob("*/watermark"):
                    watermark.unlink()
                found = values_of_each(to)
            for partition, values in enumerate(found):
                assert values == list(range(partition, 2 * len(values), 2)), "it is a prefix"
            with Topic.open(to, mode="r") as copy:
                ends = [each.high_watermark for each in copy.partitions]
                holes = [each.offsets.start for each in copy.verify().gaps]
            assert all(end >= before for end, before in zip(ends, known, strict=True)), "with all from before the copy"
            assert all(hole >= min(known) for hole in holes)
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.parametrize("mark", ["as old as the hole", "newer", "none"])
def test_hole_that_a_tool_has_read_in_the_room_after_a_log_is_named_and_repaired(
    path: Path, tmp_path: Path, mark: str
) -> None:
    """The tool has read zeros, and then what the writer had put after them meanwhile."""
    copy = tmp_path / "copy"
    with Topic.open(path, create=True, partitions=1) as topic:
        for number in range(20):
            if number == 10:
                older = (path / "0000" / "watermark").read_bytes()
            topic.append(b"%d" % number, sync=True)
        starts = [batch.offsets.start for batch in topic.partition(0).read().batches()]
        shutil.copytree(path, copy)
    with (copy / "0000" / f"{0:020}.log").open("r+b") as file:
        file.seek(HEADER_BYTES + starts[10])
        file.write(bytes(starts[12] - starts[10]))
    if mark == "none":
        (copy / "0000" / "watermark").unlink()
    elif mark == "as old as the hole":
        (copy / "0000" / "watermark").write_bytes(older)
    assert values_of_each(copy) == [list(range(10))]
    with Topic.open(copy) as topic:
        rest = [int(record.value or b"") for record in topic.read(on_damage="skip")][10:]
    assert rest == (list(range(12, 20)) if mark == "newer" else [])


def test_watermark_newer_than_the_segments_is_refused_and_removing_it_gives_a_prefix(
    path: Path, tmp_path: Path
) -> None:
    with Topic.open(path, create=True, partitions=1) as topic:
        topic.append(b"0", sync=True)
        shutil.copytree(path, tmp_path / "copy")
        topic.append(b"1", sync=True)
        shutil.copy(path / "0000" / "watermark", tmp_path / "copy" / "0000")
        with pytest.raises(CorruptLogError, match=r"the end of the file, expected data up to offset \d+"):
            Topic.open(tmp_path / "copy", create=True)
        (tmp_path / "copy" / "0000" / "watermark").unlink()
        assert values_of_each(tmp_path / "copy") == [[0]]
