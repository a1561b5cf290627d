"""docs/operations.md: a copy that is made file by file, beside a writer, has all that was flushed before."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loglib import CorruptLogError, Topic

PAGE = Path(__file__).resolve().parents[1] / "docs" / "operations.md"
WRITER = """
import sys
from loglib import Retention, Topic

path, segment_bytes, kept = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Topic.open(path, partitions=2, segment_bytes=segment_bytes, retention=Retention(age=None, bytes=kept)) as topic:
    for number in range(10_000_000):
        topic.append(b"%d" % number * 20, partition=number % 2, sync=number % 50 == 0)
"""


def back_up() -> Callable[[Path, Path], None]:
    """The function on the page."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0]
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
                with Topic.open(to) as copied:
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
