"""docs/format.md is the format: a reader written from it alone works, and its tables agree with the code."""

import io
import json
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import (
    BODY_AT,
    EVERYTHING,
    IDENTITY,
    LOG_ID,
    NOW,
    PLAIN,
    calm,
    edit_json,
    encoded,
    forged,
    header_of,
    resealed_frame,
    resealed_segment,
    resealed_slot,
)
from conftest import sound
from format_reader import crc32c, read_group, read_topic
from loglib import (
    CorruptLogError,
    FlushPolicy,
    Record,
    Retention,
    Topic,
    TopicConfig,
    TopicPartition,
    UnsupportedFormatError,
    config,
    description,
    group,
    segment,
    testing,
    timeline,
)
from loglib import transfer as frames
from loglib.format import batch, codec
from loglib.format import watermark as marks
from loglib.groups.held import MOST_BYTES
from loglib.groups.offsets import history_at
from loglib.system.files import REAL
from make_golden import GOLDEN, TOPICS, write_frames, write_topic

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "format.md").read_text("utf-8")


# --- the reader written from the page ---------------------------------------------------------------


def test_the_reader_knows_nothing_of_loglib() -> None:
    source = Path(__file__).with_name("format_reader.py").read_text("utf-8")
    assert not re.search(r"^\s*(import|from) (?!json|uuid|zlib|pathlib|struct|typing)", source, re.MULTILINE)


def test_crc_of_the_page_is_the_crc_of_the_code() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(LOG_ID + bytes(4)) == IDENTITY.salt
    assert batch.crc32c(b"789", batch.crc32c(b"123456")) == 0xE3069283, "a CRC continues from another"


@pytest.mark.parametrize("compression", ["none", "zlib"])
def test_reader_written_from_the_page_reads_what_loglib_wrote(tmp_path: Path, compression: str) -> None:
    with Topic.open(
        tmp_path / "topic", partitions=2, compression=compression, segment_bytes=4096, flush=FlushPolicy(interval=None)
    ) as topic:
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
        Topic.open(tmp_path / "clicks", partitions=3, flush=FlushPolicy(interval=None)) as clicks,
        Topic.open(tmp_path / "views", flush=FlushPolicy(interval=None)) as views,
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
            histories = {each: history_at(joined._place.logs[each], expected[each].offset) for each in expected}
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
    assert json.loads((tmp_path / "views/groups/etl").read_text("utf-8")) == {"topic": "clicks"}


def test_files_of_a_group_are_those_on_the_page(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "clicks") as clicks:
        clicks.append(b"x", sync=True)
        with clicks.group("etl", member="m") as joined:
            assert len(joined.poll()) == 1
            place = tmp_path / "clicks/groups/etl"
            names = {f"`{each.relative_to(place).parts[0]}/" for each in place.rglob("*")}
            assert names == {re.match(r"`\w+/", row[0])[0] for row in table("Groups")}  # type: ignore[index]
            facts = {
                "members": json.loads((place / "members/m").read_bytes()),
                "owners": json.loads((place / "owners/clicks-0").read_bytes()),
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
    pytest.param("Watermark slot", marks._SLOT, marks.MAGIC, id="watermark"),
    pytest.param("Frame header", frames._FRAME, frames.MAGIC, id="frame"),
    pytest.param("Clock header", timeline._HEADER, timeline.MAGIC, id="clock"),
    pytest.param("Stamp", timeline._STAMP, None, id="stamp"),
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
        "previous_crc", "producer_count", *segment.SegmentHeader._fields[8:20],
    ]  # fmt: skip
    assert [row.field for row in fields("Producers table entry")] == list(segment.ProducerState._fields)
    assert [row.field for row in fields("Watermark slot") if row.field != "zero"][3:] == list(marks.Mark._fields)


@pytest.mark.parametrize("module", [batch, segment, marks, frames, timeline], ids=lambda module: module.__name__)
def test_table_in_the_module_is_the_table_on_the_page(module: Any) -> None:
    headings = {
        batch: "Batch header", segment: "Segment header", marks: "Watermark slot", frames: "Frame header",
        timeline: "Clock header",
    }  # fmt: skip
    stated = re.findall(r"^ *(\d+) +(\d+) +([a-z_]+)\b", str(module.__doc__), re.MULTILINE)
    on_page = [(row.byte, row.size, row.field) for row in fields(headings[module])]
    assert [(int(byte), int(size), name) for byte, size, name in stated] == on_page


def test_sizes_on_the_page_are_the_sizes_in_the_code() -> None:
    assert (batch.HEADER_BYTES, segment.HEADER_BYTES, segment.MAX_PRODUCERS) == (128, 4096, 123)
    assert (marks.SLOT_BYTES, marks.SECOND_SLOT, marks.FILE_BYTES, frames.FRAME_BYTES) == (128, 4096, 4224, 36)
    last = list(fields("Segment header"))[-1]
    assert (last.byte, last.size) == (segment._FIELDS.size, segment.MAX_PRODUCERS * segment._PRODUCER.size)


def test_flags_on_the_page_are_the_flags_in_the_code() -> None:
    stated = {name: int(bit) for bit, name, _ in table("Flags of a batch")}
    assert stated == {name: getattr(batch, name) for name in stated}
    required = {name for name, bit in stated.items() if bit & batch._MUST_KNOW}
    assert sum(stated[name] for name in required) == batch._KNOWN_FLAGS | batch.OFFSETS


def test_codecs_on_the_page_are_the_codecs_in_the_code() -> None:
    (row,) = [row for row in fields("Batch header") if row.field == "codec"]
    numbers = [int(number) for number in re.findall(r"\b(\d) [a-zA-Z]", row.meaning)]
    assert numbers == [codec.NONE, codec.ZLIB, codec.LZ4, codec.ZSTD]


def test_versions_on_the_page_are_the_versions_in_the_code() -> None:
    assert [batch.VERSION, segment.VERSION, marks.VERSION, frames.VERSION, description.FORMAT] == [2] * 5
    assert timeline.VERSION == 1
    assert [row.meaning for row in fields("Clock header") if row.field == "version"] == ["1"]
    for heading in ("Batch header", "Segment header", "Watermark slot", "Frame header"):
        assert [row.meaning for row in fields(heading) if row.field == "version"] == ["2"]


def test_names_of_topic_json_on_the_page_are_those_in_the_file() -> None:
    stated = [name for cell, _ in table("topic.json") for name in re.findall(r"`(\w+)`", cell)]
    assert stated == ["format", "log_id", *TopicConfig().to_json(), "crc"]


def test_limits_on_the_page_are_the_limits_in_the_code() -> None:
    limits = {what: limit for what, limit, _ in table("Limits")}
    assert limits["bytes of a batch"] == "2^30" and config.MAX_BATCH_BYTES == 1 << 30
    assert limits["records of a batch"] == "2^24" and config.MAX_RECORDS_PER_BATCH == 1 << 24
    assert int(limits["partitions"]) == config.MAX_PARTITIONS
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
    with Topic.open(tmp_path / "topic", partitions=2) as topic:
        topic.append(b"x")
        topic.flush()
    names = sorted(str(path.relative_to(tmp_path / "topic")) for path in (tmp_path / "topic").rglob("*"))
    segment_file = "00000000000000000000.log"
    partition = ["", f"/{segment_file}", "/lock", "/watermark"]
    assert names == [*(f"0000{name}" for name in partition), *(f"0001{name}" for name in partition), "topic.json"]
    assert json.loads((tmp_path / "topic" / "topic.json").read_text())["format"] == description.FORMAT
    assert len(encoded(PLAIN)) % 8 == 0


# --- golden files: what version 2 wrote ---------------------------------------------------------------


def _unhexed(item: str | None) -> bytes | None:
    return None if item is None else bytes.fromhex(item)


def golden_records(name: str) -> list[Record]:
    return [
        Record(
            partition, offset, timestamp, _unhexed(key), _unhexed(value),
            tuple((name, bytes.fromhex(value)) for name, value in headers), next_offset,
        )
        for partition, offset, timestamp, key, value, headers, next_offset in json.loads(
            (GOLDEN / f"{name}.json").read_text("utf-8")
        )
    ]  # fmt: skip


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the golden topics, to open and to damage."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def read_all(path: Path) -> list[Record]:
    with Topic.open(path, mode="r") as topic:
        return [record for partition in topic.partitions for record in partition.read()]


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
    assert slots[:128] != slots[4096:], "both slots in use"


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
        header = segment.read_segment_header(REAL, str(path / "0000" / f"{base:020d}.log"), identity)
        appended = [each._header for each in topic.batches()]
    entry = {row.field: (row.byte, row.size) for row in fields("Producers table entry")}
    assert len(content) == 32 * header.more_producers == 32 * 7
    assert batch.crc32c(content) == header.more_producers_crc
    for at, each in zip(range(0, len(content), 32), appended, strict=False):
        facts = {name: int.from_bytes(content[at + byte :][:size], "little") for name, (byte, size) in entry.items()}
        assert facts == {
            "producer_id": each.producer_id, "sequence": each.producer_sequence, "base_offset": each.base_offset,
            "record_count": each.record_count, "last_append_s": NOW // 1_000_000 + 1,
        }  # fmt: skip


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
        if path.is_file() and path.name != "lock"
    }
    expected = {str(path.relative_to(GOLDEN)): path.read_bytes() for path in (GOLDEN / "plain").rglob("*.*")}
    for name in ("frames.bin", "plain/0000/watermark", "plain/0001/watermark"):
        expected[name] = (GOLDEN / name).read_bytes()
    assert written == expected


def test_golden_frames_can_be_received(tmp_path: Path) -> None:
    expected = [record for record in golden_records("plain") if record.partition == 0]
    with Topic.open(tmp_path / "copy") as topic, (GOLDEN / "frames.bin").open("rb") as stream:
        while topic.partition(0).receive(stream, preserve_offsets=True) is not None:
            pass
        topic.flush()
        assert list(topic.partition(0).read()) == expected


def test_golden_topic_can_be_continued(golden: Path) -> None:
    with Topic.open(golden / "plain") as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.clean
        (again,) = topic.append_many(PLAIN.values, partition=0, producer=("golden", 7))
        assert again.offsets == range(352, 355), "the producers table remembers"
        position = topic.append(b"new", partition=0)
        topic.flush()
        assert [record.value for record in topic.partition(0).read(position.offset)] == [b"new"]


# --- growth: newer is not damaged ---------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def last_batch(change: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Forge fields of the only batch in a segment of one."""
    identity = segment.Identity.of(LOG_ID, 1)
    return lambda content: content[:4096] + forged(content[4096:], identity=identity, **change)


def segment_field(at: int, replacement: bytes) -> Callable[[bytes], bytes]:
    return lambda content: resealed_segment(content, at, replacement)


def both_slots(at: int, replacement: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        salt = segment.Identity.of(LOG_ID, 1).salt
        slots = [resealed_slot(content[start : start + 128], at, replacement, salt=salt) for start in (0, 4096)]
        return slots[0] + content[128:4096] + slots[1]

    return change


def description_with(**values: object) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        changed = json.loads(content) | values
        del changed["crc"]
        return json.dumps(changed).encode()

    return change


SEGMENT = "0001/00000000000000000000.log"
NEWER = [
    pytest.param(SEGMENT, last_batch({"version": 3}), "batch version 3", id="batch-version"),
    pytest.param(SEGMENT, last_batch({"flags": 0x20}), "batch flags 32", id="batch-required-flag-32"),
    pytest.param(SEGMENT, last_batch({"flags": 0x40}), "batch flags 64", id="batch-required-flag-64"),
    pytest.param(SEGMENT, last_batch({"flags": 0x80}), "batch flags 128", id="batch-required-flag-128"),
    pytest.param(SEGMENT, last_batch({"codec": 4}), "codec 4", id="batch-codec"),
    pytest.param(SEGMENT, last_batch({"version": 9, "codec": 200, "flags": 0xFF}), "version 9", id="batch-all"),
    pytest.param(SEGMENT, segment_field(8, b"\3\0"), "segment version 3", id="segment-version"),
    pytest.param(SEGMENT, segment_field(10, b"\1\0"), "segment flags 1", id="segment-flag-1"),
    pytest.param(SEGMENT, segment_field(10, b"\x80\0"), "segment flags 128", id="segment-flag-128"),
    pytest.param("0001/watermark", both_slots(3, b"\3"), "watermark version 3", id="watermark-version"),
    pytest.param("topic.json", description_with(format=3), "topic format 3", id="topic-format"),
    pytest.param("topic.json", description_with(format=99, log_id={}), "topic format 99", id="topic-format-99"),
    pytest.param("topic.json", description_with(compression="brotli"), "compression brotli", id="topic-compression"),
]


@pytest.mark.parametrize(("name", "change", "message"), NEWER)
@pytest.mark.parametrize("mode", ["r", "a"])
def test_newer_format_is_refused_by_name(
    golden: Path, mode: Literal["r", "a"], name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    path = golden / "plain" / name
    rewrite(path, change)
    before = path.read_bytes()
    with (
        pytest.raises(UnsupportedFormatError, match=f"{message} is newer") as caught,
        Topic.open(golden / "plain", mode=mode) as topic,
    ):
        list(topic.partition(1).read())
    assert caught.value.path == str(path)
    assert path.read_bytes() == before, "nothing may be cut or mended"


@pytest.mark.parametrize("mode", ["r", "a"])
def test_directory_of_the_old_format_is_refused_by_name(tmp_path: Path, mode: Literal["r", "a"]) -> None:
    path = Path(shutil.copytree(GOLDEN.with_name("v1") / "plain", tmp_path / "old"))
    before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    with pytest.raises(UnsupportedFormatError, match="topic format 1 is older than this loglib reads"):
        Topic.open(path, mode=mode)
    assert {each: each.read_bytes() for each in path.rglob("*") if each.is_file()} == before


@pytest.mark.parametrize("source", ["frame", "kind", "batch", "batch-flag", "batch-codec"])
def test_newer_stream_is_refused_by_name(source: str) -> None:
    first = encoded(PLAIN)
    match source:
        case "frame":
            data = resealed_frame(frames._frame(IDENTITY, 0, len(first)) + first, 4, b"\3\0")
            message = "frame version 3"
        case "kind":
            data = resealed_frame(frames._frame(IDENTITY, 0, len(first)) + first, 6, b"\1\0")
            message = "frame kind 1"
        case _:
            change: dict[str, Any] = {"batch": {"version": 3}, "batch-flag": {"flags": 32}, "batch-codec": {"codec": 9}}
            data = frames._frame(IDENTITY, 0, len(first)) + forged(first, **change[source])
            message = "batch version 3|batch flags 32|codec 9"
    with pytest.raises(UnsupportedFormatError, match=message):
        list(frames.read_frame(io.BytesIO(data)))


@pytest.mark.parametrize("bit", [256, 512, 0x1000, 0x8000, 0xFF00])
def test_unknown_optional_flags_are_ignored(golden: Path, bit: int) -> None:
    path = golden / "plain" / SEGMENT
    header = header_of(path.read_bytes()[4096:], identity=segment.Identity.of(LOG_ID, 1))
    rewrite(path, last_batch({"flags": header.flags | bit}))
    assert read_all(golden / "plain") == golden_records("plain")


def test_unknown_names_in_the_description_are_ignored(golden: Path) -> None:
    path = golden / "plain" / "topic.json"
    values = json.loads(path.read_text())
    newer = {"newer": {"a": [1]}}
    edit_json(path, **newer, flush=values["flush"] | newer, retention=values["retention"] | newer)
    assert read_all(golden / "plain") == golden_records("plain")
    with Topic.open(golden / "plain", mode="r") as topic:
        assert topic.config == TOPICS["plain"]


@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param(SEGMENT, 4096 + 40, id="batch-version"),
        pytest.param(SEGMENT, 4096 + 41, id="batch-codec"),
        pytest.param(SEGMENT, 4096 + 42, id="batch-flags"),
        pytest.param(SEGMENT, 8, id="segment-version"),
        pytest.param(SEGMENT, 10, id="segment-flags"),
    ],
)
@pytest.mark.parametrize("bit", range(8))
def test_flip_that_looks_like_a_newer_format_is_called_damage(golden: Path, name: str, at: int, bit: int) -> None:
    path = golden / "plain" / name
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(CorruptLogError, match="CRC|no batch header"):
        read_all(golden / "plain")


@pytest.mark.parametrize("bit", range(8))
def test_flipped_version_of_a_watermark_slot_falls_to_the_other(golden: Path, bit: int) -> None:
    path = golden / "plain" / "0000" / "watermark"
    content = bytearray(path.read_bytes())
    newest = marks.newest(bytes(content), IDENTITY.salt)
    assert newest is not None
    content[(4096 if newest.sequence % 2 else 0) + 3] ^= 1 << bit
    older = marks.newest(bytes(content), IDENTITY.salt)
    assert older is not None and older.sequence == newest.sequence - 1


def test_flipped_version_of_a_frame_is_called_damage() -> None:
    data = bytearray((GOLDEN / "frames.bin").read_bytes())
    data[4] ^= 1
    with pytest.raises(CorruptLogError, match="a frame header"):
        list(frames.read_frame(io.BytesIO(bytes(data))))


@pytest.mark.parametrize("name", ["plain", "zlib"])
def test_flip_anywhere_in_a_topic_is_reported_or_does_no_harm(golden: Path, name: str) -> None:
    choose = random.Random(11)
    expected = golden_records(name)
    for path in sorted(each for each in (golden / name).rglob("*") if each.is_file()):
        content = path.read_bytes()
        for _ in range(150):
            at, bit = choose.randrange(len(content)), choose.randrange(8)
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            try:
                found = read_all(golden / name)
            except (CorruptLogError, UnsupportedFormatError) as error:
                assert str(golden / name) in str(error)
                continue
            if path.name == "watermark":  # the publication before counts: fewer records, never other ones
                assert [record for record in expected if record in found] == found, f"{path}, byte {at}, bit {bit}"
            else:
                assert path.name == "topic.json", f"{path}, byte {at}, bit {bit}"
                assert found == expected
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["plain", "zlib"])
def test_topic_cut_anywhere_is_reported_or_does_no_harm(golden: Path, name: str) -> None:
    choose = random.Random(12)
    expected = golden_records(name)
    for path in sorted(each for each in (golden / name).rglob("*") if each.is_file()):
        content = path.read_bytes()
        for size in {0, 1, len(content) - 1, *(choose.randrange(len(content)) for _ in range(60))}:
            path.write_bytes(content[:size])
            try:
                found = read_all(golden / name)
            except (CorruptLogError, UnsupportedFormatError) as error:
                assert str(golden / name) in str(error)
                continue
            if path.name == "watermark":
                assert [record for record in expected if record in found] == found, f"{path}, {size} bytes"
            else:
                assert path.name == "topic.json" and size == len(content) - 1, f"{path}, {size} bytes"
        path.write_bytes(content)
