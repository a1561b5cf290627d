"""What a newer version writes is refused by its name, or ignored where it may be; a flip is called damage."""

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import golden_topics
import pytest
from builders import (
    IDENTITY,
    LOG_ID,
    PLAIN,
    edit_json,
    encoded,
    forged,
    header_of,
    resealed_frame,
    resealed_segment,
    resealed_slot,
)
from golden_topics import golden_records, read_all
from make_golden import GOLDEN, TOPICS

from loglib import CorruptLogError, Topic, UnsupportedFormatError, segment
from loglib.append import transfer
from loglib.format import watermark

golden = golden_topics.golden


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
        slots = [resealed_slot(content[start : start + 192], at, replacement, salt=salt) for start in (0, 4096)]
        return slots[0] + content[192:4096] + slots[1]

    return change


def description_with(**values: object) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        changed = json.loads(content) | values
        del changed["crc"]
        return json.dumps(changed).encode()

    return change


SEGMENT = "0001/00000000000000000000.log"
NEWER = [
    pytest.param(SEGMENT, last_batch({"version": 4}), "batch version 4", id="batch-version"),
    pytest.param(SEGMENT, last_batch({"flags": 0x20}), "batch flags 32", id="batch-required-flag-32"),
    pytest.param(SEGMENT, last_batch({"flags": 0x80}), "batch flags 128", id="batch-required-flag-128"),
    pytest.param(SEGMENT, last_batch({"codec": 4}), "codec 4", id="batch-codec"),
    pytest.param(SEGMENT, last_batch({"version": 9, "codec": 200, "flags": 0xFF}), "version 9", id="batch-all"),
    pytest.param(SEGMENT, segment_field(8, b"\4\0"), "segment version 4", id="segment-version"),
    pytest.param(SEGMENT, segment_field(10, b"\1\0"), "segment flags 1", id="segment-flag-1"),
    pytest.param(SEGMENT, segment_field(10, b"\x80\0"), "segment flags 128", id="segment-flag-128"),
    pytest.param("0001/watermark", both_slots(3, b"\4"), "watermark version 4", id="watermark-version"),
    pytest.param("topic.json", description_with(format=4), "topic format 4", id="topic-format"),
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
        Topic.open(golden / "plain", create=True, mode=mode) as topic,
    ):
        list(topic.partition(1).read())
    assert caught.value.path == str(path)
    assert path.read_bytes() == before, "nothing may be cut or mended"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mode", ["r", "a"])
def test_directory_of_an_old_format_is_refused_by_name(tmp_path: Path, mode: Literal["r", "a"], version: int) -> None:
    path = Path(shutil.copytree(GOLDEN.with_name(f"v{version}") / "plain", tmp_path / "old"))
    before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    with pytest.raises(UnsupportedFormatError, match=f"topic format {version} is older .*before the format was frozen"):
        Topic.open(path, create=True, mode=mode)
    assert {each: each.read_bytes() for each in path.rglob("*") if each.is_file()} == before


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("what", ["frame", "batch"])
def test_stream_of_an_old_format_is_refused_by_name(what: str, version: int) -> None:
    first = encoded(PLAIN)
    frame = transfer._frame(IDENTITY, 0, len(first))
    data = resealed_frame(frame, 4, bytes([version, 0])) + first
    if what == "batch":
        data = frame + forged(first, version=version)
    with pytest.raises(UnsupportedFormatError, match=f"{what} version {version} is older .*before the format"):
        list(transfer.read_frame(io.BytesIO(data)))


@pytest.mark.parametrize("source", ["frame", "kind", "batch", "batch-flag", "batch-codec"])
def test_newer_stream_is_refused_by_name(source: str) -> None:
    first = encoded(PLAIN)
    match source:
        case "frame":
            data = resealed_frame(transfer._frame(IDENTITY, 0, len(first)) + first, 4, b"\4\0")
            message = "frame version 4"
        case "kind":
            data = resealed_frame(transfer._frame(IDENTITY, 0, len(first)) + first, 6, b"\1\0")
            message = "frame kind 1"
        case _:
            change: dict[str, Any] = {"batch": {"version": 4}, "batch-flag": {"flags": 32}, "batch-codec": {"codec": 9}}
            data = transfer._frame(IDENTITY, 0, len(first)) + forged(first, **change[source])
            message = "batch version 4|batch flags 32|codec 9"
    with pytest.raises(UnsupportedFormatError, match=message):
        list(transfer.read_frame(io.BytesIO(data)))


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
    newest = watermark.newest(bytes(content), IDENTITY.salt)
    assert newest is not None
    content[(4096 if newest.sequence % 2 else 0) + 3] ^= 1 << bit
    older = watermark.newest(bytes(content), IDENTITY.salt)
    assert older is not None and older.sequence == newest.sequence - 1


def test_flipped_version_of_a_frame_is_called_damage() -> None:
    data = bytearray((GOLDEN / "frames.bin").read_bytes())
    data[4] ^= 1
    with pytest.raises(CorruptLogError, match="a frame header"):
        list(transfer.read_frame(io.BytesIO(bytes(data))))


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
