"""Golden files: what version 3 wrote is read, written again and continued."""

from pathlib import Path
from typing import Any

import golden_topics
import pytest
from builders import LOG_ID, PLAIN
from format_reader import read_topic
from golden_topics import golden_records, read_all
from make_golden import GOLDEN, TOPICS, write_frames, write_topic

from conftest import sound
from loglib import Topic, segment
from loglib.format import header as batch
from loglib.system.files import REAL

golden = golden_topics.golden


@pytest.mark.parametrize("name", TOPICS)
def test_golden_topic_reads_as_it_was_written(name: str) -> None:
    records = read_all(GOLDEN / name)
    assert records == golden_records(name)
    with Topic.open(GOLDEN / name, mode="r") as topic:
        assert topic.config == TOPICS[name]
        assert topic.log_id == LOG_ID
        assert sum(sound(partition).records for partition in topic.partitions) == len(records)


def test_golden_topic_has_all_that_the_format_has(golden: Path) -> None:
    assert [path.name for path in sorted((golden / "plain" / "0000").glob("*.log"))][1:], "several segments"
    headers: list[Any] = []
    for path in golden.glob("*/0*/*.log"):
        with segment.SegmentReader(REAL, str(path), segment.Identity.of(LOG_ID, int(path.parent.name))) as reader:
            headers += reader.headers(reader.base_offset, reader.end_of_file())
            headers_of_producers = reader.header.producers
            assert reader.base_offset == 0 or headers_of_producers
    seen = 0
    for header in headers:
        seen |= header.flags
    assert seen == batch._KNOWN_FLAGS | batch.PRODUCERS
    assert {header.codec for header in headers} == {0, 1, 2, 3}
    assert any(header.producer_id for header in headers)
    slots = (golden / "plain" / "0000" / "watermark").read_bytes()
    assert slots[:192] != slots[4096:], "both slots in use"


@pytest.mark.parametrize("name", ["plain", "zlib"])
def test_reader_written_from_the_page_reads_the_golden_topics(name: str) -> None:
    found = read_topic(GOLDEN / name)
    assert [(partition, *record) for partition, records in found.items() for record in records] == [
        (each.partition, each.offset, each.timestamp, each.key, each.value, each.headers)
        for each in golden_records(name)
    ]


def test_same_records_give_the_same_bytes_again(tmp_path: Path) -> None:
    write_topic(tmp_path / "plain", TOPICS["plain"])
    write_frames(tmp_path / "plain", tmp_path / "frames.bin")
    written = {
        str(path.relative_to(tmp_path)): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name not in ("lock", "topic.json.spare")
    }
    expected = {str(path.relative_to(GOLDEN)): path.read_bytes() for path in (GOLDEN / "plain").rglob("*.*")}
    for name in ("frames.bin", "plain/0000/watermark", "plain/0001/watermark"):
        expected[name] = (GOLDEN / name).read_bytes()
    assert written == expected


def test_golden_frames_can_be_received(tmp_path: Path) -> None:
    expected = [record for record in golden_records("plain") if record.partition == 0]
    with Topic.open(tmp_path / "copy", create=True) as topic, (GOLDEN / "frames.bin").open("rb") as stream:
        while topic.partition(0).receive(stream, preserve_offsets=True) is not None:
            pass
        topic.flush()
        assert list(topic.partition(0).read()) == expected


def test_golden_topic_can_be_continued(golden: Path) -> None:
    with Topic.open(golden / "plain", create=True) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.clean
        (again,) = topic.append_many(PLAIN.values, partition=0, producer=("golden", 7))
        assert again.offsets == range(352, 355), "the producers table remembers"
        position = topic.append(b"new", partition=0)
        topic.flush()
        assert [record.value for record in topic.partition(0).read(position.offset)] == [b"new"]
