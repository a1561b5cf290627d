"""docs/format.md is the format: a reader written from it alone works, and its tables agree with the code."""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from builders import BODY_AT, EVERYTHING, IDENTITY, LOG_ID, NOW, PLAIN, calm, encoded
from format_reader import crc32c, read_group, read_topic
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import ROOT
from loglib import FlushPolicy, Retention, Topic, TopicConfig, TopicPartition, group, testing
from loglib.append import transfer
from loglib.config import policies
from loglib.format import codec, watermark
from loglib.format import header as batch
from loglib.format import segment_header as segment
from loglib.groups.lock_file import MOST_BYTES
from loglib.jobs import entries, generation
from loglib.log import ages, topic_file
from loglib.log.history import history_at
from loglib.segment import read_segment_header
from loglib.system.files import REAL

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text("utf-8")


# --- the reader written from the page ---------------------------------------------------------------


def test_the_reader_knows_nothing_of_loglib() -> None:
    source = (ROOT / "tests" / "support" / "format_reader.py").read_text("utf-8")
    assert not re.search(r"^\s*(import|from) (?!json|uuid|zlib|pathlib|struct|typing)", source, re.MULTILINE)


def test_crc_of_the_page_is_the_crc_of_the_code() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(LOG_ID + bytes(4)) == IDENTITY.salt
    assert batch.crc32c(b"789", batch.crc32c(b"123456")) == 0xE3069283, "a CRC continues from another"


@pytest.mark.parametrize("compression", ["none", "zlib"])
def test_reader_written_from_the_page_reads_what_loglib_wrote(tmp_path: Path, compression: str) -> None:
    with Topic.open(
        tmp_path / "topic", create=True, partitions=2, compression=compression, segment_bytes=4096,
        flush=FlushPolicy(interval=None),
    ) as topic:  # fmt: skip
        for turn in range(30):
            values, keys, timestamps, headers = EVERYTHING
            topic.append_many(values, keys=keys, timestamps=timestamps, headers=headers, partition=0)
            topic.flush()
            topic.append_many([bytes(100 * turn), b"x"], partition=turn % 2)
            topic.append(b"single", timestamp=turn, partition=1)
            topic.flush()
        topic.append_many([b"idempotent"], partition=0, producer=("p", 1))
        topic.flush()
        segments = [len(each.segments) for each in topic.partitions]
    with Topic.open(tmp_path / "topic", mode="r") as topic:
        expected: dict[int, list[tuple[object, ...]]] = {0: [], 1: []}
        for each in topic.read():
            expected[each.partition].append((each.offset, each.timestamp, each.key, each.value, each.headers))
    assert segments[0] > 1, "the records must fill several segments"
    assert expected[0] and expected[1]
    assert read_topic(tmp_path / "topic") == expected


def test_reader_written_from_the_page_reads_after_retention(tmp_path: Path) -> None:
    clock = iter(range(NOW, NOW * 2, 1_000_000))
    retention = Retention(bytes=4096, age=None)
    with testing.open_topic(
        tmp_path / "topic", segment_bytes=4096, retention=retention, flush=FlushPolicy(), clock=lambda: next(clock)
    ) as topic:
        for _ in range(8):
            topic.append_many([bytes(1500)], partition=0)
            topic.flush()
        topic.retain()
        start = topic.partition(0).log_start_offset
        expected = [record.offset for record in topic.read()]
    assert start > 0
    assert [record[0] for record in read_topic(tmp_path / "topic")[0]] == expected


def test_reader_written_from_the_page_reads_what_a_group_has_committed(tmp_path: Path) -> None:
    with (
        Topic.open(tmp_path / "clicks", create=True, partitions=3, flush=FlushPolicy(interval=None)) as clicks,
        Topic.open(tmp_path / "views", create=True, flush=FlushPolicy(interval=None)) as views,
    ):
        for number in range(40):
            clicks.append_many([b"%d" % number] * 4, partition=number % 2)
            views.append(b"%d" % number)
            clicks.flush()
            views.flush()
        for member in ("one", "two", "three"):
            with group([clicks, views], "etl", member=member, commit="manual") as joined:
                for _ in range(40):
                    records = joined.poll(max_records=3)
                    joined.commit(records[-1], meta=f"{member} ü")
        with group([clicks, views], "etl", commit="manual") as joined:
            joined.poll()  # it owns all, and has committed nothing
            expected = joined.committed()
            histories = {each: history_at(joined._directory.logs[each], expected[each].offset) for each in expected}
        log_ids = {each.name: each.log_id.hex() for each in (clicks, views)}
    found = read_group(tmp_path / "clicks", "etl")
    assert found == {
        (topic, number): (
            each.offset, each.meta, each.member, each.timestamp, histories[TopicPartition(topic, number)],
            log_ids[topic],
        )
        for (topic, number), each in expected.items()
    }  # fmt: skip
    assert {("clicks", 0), ("views", 0)} <= set(found) and ("clicks", 2) not in found
    assert json.loads((tmp_path / "views/groups/etl").read_text("utf-8")) == {
        "topic": "clicks", "log_id": log_ids["clicks"], "of": "views",
    }  # fmt: skip


def test_files_of_a_group_are_those_on_the_page(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "clicks", create=True) as clicks:
        clicks.append(b"x", sync=True)
        with clicks.group("etl", member="m") as joined:
            assert len(joined.poll()) == 1
            place = tmp_path / "clicks/groups/etl"
            names = {f"`{each.relative_to(place).parts[0]}/" for each in place.rglob("*")}
            assert names == {re.match(r"`\w+/", row[0])[0] for row in table("Groups")}  # type: ignore[index]
            facts = {
                "members": json.loads((place / "members/m").read_bytes()),
                "owners": json.loads((place / f"owners/{clicks.log_id.hex()}-0").read_bytes()),
            }
    for where, values in facts.items():
        stated = [row[0].strip("`") for row in table("Members and owners") if row[1] in (where, "both")]
        assert sorted(values) == sorted(stated)
    assert MOST_BYTES == 65_536


@settings(calm, max_examples=100)
@given(st.binary(max_size=300))
def test_crc_of_the_page_agrees_on_any_bytes(data: bytes) -> None:
    assert crc32c(data) == batch.crc32c(data)


# --- tables -------------------------------------------------------------------------------------------


class Row(NamedTuple):
    byte: int
    size: int
    field: str
    type: str
    meaning: str


TYPES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q"}


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the page, without its two head lines."""
    section = PAGE.split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]]


def fields(heading: str) -> Iterator[Row]:
    for byte, size, name, type_, meaning in table(heading):
        yield Row(int(byte), int(size), name, type_, meaning)


def format_of(rows: list[Row]) -> str:
    return "<" + "".join(f"{row.size}x" if row.field == "zero" else TYPES.get(row.type, f"{row.size}s") for row in rows)


STRUCTURES = [
    pytest.param("Batch header", batch._HEADER, batch.MAGIC, id="batch"),
    pytest.param("Segment header", segment._FIELDS, segment.MAGIC, id="segment"),
    pytest.param("Producers table entry", segment._PRODUCER, None, id="producer"),
    pytest.param("Watermark slot", watermark._SLOT, watermark.MAGIC, id="watermark"),
    pytest.param("Frame header", transfer._FRAME, transfer.MAGIC, id="frame"),
    pytest.param("Clock header", ages._HEADER, ages.MAGIC, id="clock"),
    pytest.param("Stamp", ages._STAMP, None, id="stamp"),
    pytest.param("Entry of a share", entries.ENTRY, None, id="entry"),
    pytest.param("File of a share", generation._FIELDS, generation.MAGIC, id="share"),
    pytest.param("Item of a share", generation._ITEM, None, id="item"),
]


@pytest.mark.parametrize(("heading", "layout", "magic"), STRUCTURES)
def test_table_on_the_page_is_the_layout_in_the_code(heading: str, layout: struct.Struct, magic: bytes | None) -> None:
    rows = [row for row in fields(heading) if row.type != "table"]
    at = 0
    for row in rows:
        assert row.byte == at, f"{row.field} stands at byte {row.byte}, the fields before it end at {at}"
        assert row.type == "bytes" or struct.calcsize(TYPES[row.type]) == row.size, row
        at += row.size
    assert format_of(rows) == layout.format
    assert at == layout.size
    if magic is not None:
        stated = re.match(r"`([0-9A-F ]+)`", rows[0].meaning)
        assert stated is not None
        assert bytes.fromhex(stated[1]) == magic


def test_names_on_the_page_are_the_names_in_the_code() -> None:
    assert [row.field for row in fields("Batch header")] == list(batch.Header._fields)
    assert [row.field for row in fields("Segment header")] == [
        "magic", "version", "flags", "crc",
        *segment.SegmentHeader._fields[:7],
        "previous_crc", "producer_count", *segment.SegmentHeader._fields[8:25], "zero", "producers",
    ]  # fmt: skip
    assert [row.field for row in fields("Producers table entry")] == list(segment.ProducerState._fields)
    assert [row.field for row in fields("Watermark slot") if row.field != "zero"][3:] == list(watermark.Mark._fields)


@pytest.mark.parametrize(
    "module", [batch, segment, watermark, transfer, ages, entries, generation], ids=lambda module: module.__name__
)
def test_table_in_the_module_is_the_table_on_the_page(module: Any) -> None:
    headings = {
        batch: "Batch header", segment: "Segment header", watermark: "Watermark slot", transfer: "Frame header",
        ages: "Clock header", entries: "Entry of a share", generation: "File of a share",
    }  # fmt: skip
    stated = re.findall(r"^ *(\d+) +(\d+) +([a-z_]+)\b", str(module.__doc__), re.MULTILINE)
    on_page = [(row.byte, row.size, row.field) for row in fields(headings[module])]
    assert [(int(byte), int(size), name) for byte, size, name in stated] == on_page


def test_sizes_on_the_page_are_the_sizes_in_the_code() -> None:
    assert (batch.HEADER_BYTES, segment.HEADER_BYTES, segment.MAX_PRODUCERS) == (128, 4096, 121)
    assert (watermark.SLOT_BYTES, watermark.SECOND_SLOT, watermark.FILE_BYTES) == (192, 4096, 4288)
    assert transfer.FRAME_BYTES == 36
    last = list(fields("Segment header"))[-1]
    assert (last.byte, last.size) == (segment._FIELDS.size, segment.MAX_PRODUCERS * segment._PRODUCER.size)


def test_flags_on_the_page_are_the_flags_in_the_code() -> None:
    stated = {name: int(bit) for bit, name, _ in table("Flags of a batch")}
    assert stated == {name: getattr(batch, name) for name in stated}
    required = {name for name, bit in stated.items() if bit & batch._MUST_KNOW}
    assert sum(stated[name] for name in required) == batch._KNOWN_FLAGS | batch.OFFSETS | batch.TYPED


def test_codecs_on_the_page_are_the_codecs_in_the_code() -> None:
    (row,) = [row for row in fields("Batch header") if row.field == "codec"]
    numbers = [int(number) for number in re.findall(r"\b(\d) [a-zA-Z]", row.meaning)]
    assert numbers == [codec.NONE, codec.ZLIB, codec.LZ4, codec.ZSTD]


def test_versions_on_the_page_are_the_versions_in_the_code() -> None:
    assert [batch.VERSION, segment.VERSION, watermark.VERSION, transfer.VERSION, topic_file.FORMAT] == [3] * 5
    assert ages.VERSION == generation.VERSION == 1
    assert [row.meaning for row in fields("Clock header") if row.field == "version"] == ["1"]
    for heading in ("Batch header", "Segment header", "Watermark slot", "Frame header"):
        assert [row.meaning for row in fields(heading) if row.field == "version"] == ["3"]


def test_names_of_topic_json_on_the_page_are_those_in_the_file() -> None:
    stated = [name for cell, _ in table("topic.json") for name in re.findall(r"`(\w+)`", cell)]
    assert stated == ["format", "log_id", *TopicConfig().to_json(), "crc"]


def test_limits_on_the_page_are_the_limits_in_the_code() -> None:
    limits = {what: limit for what, limit, _ in table("Limits")}
    assert limits["bytes of a batch"] == "2^30" and policies.MAX_BATCH_BYTES == 1 << 30
    assert limits["records of a batch"] == "2^24" and policies.MAX_RECORDS_PER_BATCH == 1 << 24
    assert int(limits["partitions"]) == policies.MAX_PARTITIONS
    assert int(limits["producers in a segment's header"]) == segment.MAX_PRODUCERS
    TopicConfig(max_record_bytes=1 << 29)
    with pytest.raises(ValueError, match="max_record_bytes"):
        TopicConfig(max_record_bytes=(1 << 29) + 1)


def test_columns_of_the_body_stand_as_on_the_page() -> None:
    stored = encoded(EVERYTHING)
    at: Any = batch.layout(batch.parse_header(stored, 0, salt=IDENTITY.salt, offset=0))
    assert [row[0] for row in table("Body")] == [
        "value offsets", "key offsets", "value validity", "key validity", "timestamps", "header counts",
        "values", "keys", "record headers",
    ]  # fmt: skip
    places: list[int] = [
        at.values.offsets, at.keys.offsets, at.values.validity, at.keys.validity, at.timestamps, at.headers.counts,
        at.values.items, at.keys.items, at.headers.section, at.end,
    ]  # fmt: skip
    assert places[0] == 0 and places == sorted(places) and not any(place & 7 for place in places)
    assert stored[BODY_AT + at.values.offsets :][:24] == struct.pack("<6i", 0, 3, 3, 3, 7, 12)
    assert stored[BODY_AT + at.values.validity] == 0b11101
    assert stored[BODY_AT + at.keys.validity] == 0b01011


def test_topic_directory_holds_the_names_on_the_page(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True, partitions=2) as topic:
        topic.append(b"x")
        topic.flush()
    names = sorted(str(path.relative_to(tmp_path / "topic")) for path in (tmp_path / "topic").rglob("*"))
    segment_file = "00000000000000000000.log"
    partition = ["", f"/{segment_file}", "/lock", "/watermark"]
    partitions = [f"{number}{name}" for number in ("0000", "0001") for name in partition]
    assert names == [*partitions, "topic.json", "topic.json.spare"]
    assert json.loads((tmp_path / "topic" / "topic.json").read_text())["format"] == topic_file.FORMAT
    assert len(encoded(PLAIN)) % 8 == 0


def test_file_of_producers_is_as_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "topic"
    with testing.open_topic(path, clock=lambda: NOW + 1) as topic:
        for number in range(130):
            topic.partition(0).append_many([b"x"] * (number % 3 + 1), producer=(f"producer {number}", number))
        topic.partition(0).roll()
        base = topic.partition(0).segments[-1].base_offset
        (name,) = [each.name for each in (path / "0000").iterdir() if each.suffix == ".producers"]
        assert name == f"{base:020d}.producers"
        content = (path / "0000" / name).read_bytes()
        identity = topic.partition(0)._access.log.identity
        header = read_segment_header(REAL, str(path / "0000" / f"{base:020d}.log"), identity)
        appended = [each._header for each in topic.batches()]
    entry = {row.field: (row.byte, row.size) for row in fields("Producers table entry")}
    assert len(content) == 32 * header.more_producers == 32 * 9
    assert batch.crc32c(content) == header.more_producers_crc
    for at, each in zip(range(0, len(content), 32), appended, strict=False):
        facts = {name: int.from_bytes(content[at + byte :][:size], "little") for name, (byte, size) in entry.items()}
        assert facts == {
            "producer_id": each.producer_id, "sequence": each.producer_sequence, "base_offset": each.base_offset,
            "record_count": each.record_count, "last_append_s": NOW // 1_000_000 + 1,
        }  # fmt: skip
