"""What recovery costs: it reads what lies above the watermark, and each header once."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crashed_logs import end_of, mark_of

from conftest import crash_copy, last_segment, values_of
from loglib import Topic, testing
from loglib.format.header import encode_body
from loglib.log.recovery import rewrite
from loglib.system.files import REAL
from loglib.testing import RecordingFiles, UnsyncedFiles

PAGE = 1 << 16
Open = Callable[..., Topic]


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
