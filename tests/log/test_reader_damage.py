"""Damage and failing reads: an error, or a gap that is reported, and never a wrong record or a silent end."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from builders import forged

from conftest import NOW, SECOND, fill, values_of
from loglib import CorruptLogError, StorageIOError, Topic, testing
from loglib.config.times import to_datetime
from loglib.segment import Identity
from loglib.testing import Call, FaultyFiles, RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]


# --- reads that fail -----------------------------------------------------------------------------


def test_read_error_is_an_error_and_never_the_end(open_topic: Open, path: Path) -> None:
    with open_topic(batch_records=2) as topic:
        fill(topic, 6)
    files = FaultyFiles("pread", armed=False, every=True)
    with testing.open_topic(path, mode="r", files=files) as topic:
        reader = topic.read()
        first = reader.poll()
        files.armed = True
        with pytest.raises(StorageIOError, match="watermark"):
            topic.partition(0)._access.log.mark()
        with pytest.raises(StorageIOError):
            topic.read()
        with pytest.raises(StorageIOError):
            reader.seek("begin")
        files.armed = False
        assert [r.value for r in first] + [r.value for r in reader] == [b"%d" % n for n in range(6)]


def test_read_error_in_a_segment_names_file_and_byte(open_topic: Open, path: Path) -> None:
    with open_topic() as topic:
        fill(topic, 6)

    class BadSector(RecordingFiles):
        def before(self, call: Call) -> None:
            if call.name == "pread" and call.arguments[1] >= 4096:
                raise OSError(5, "Input/output error")

    with testing.open_topic(path, mode="r", files=BadSector()) as topic:
        for _ in range(2):
            with pytest.raises(StorageIOError, match=r"\.log.*reading at byte 4096"):
                list(topic.read())


# --- damage --------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A batch: its records' values, its offsets in the log, and where it is stored."""

    values: list[bytes | None]
    offsets: range
    segment: Path
    file_position: int


def places_of(path: Path) -> list[Place]:
    with Topic.open(path, mode="r") as topic:
        bases = [segment.base_offset for segment in topic.partition(0).segments]
        found = []
        for batch in topic.batches():
            header = batch._header
            base = max(each for each in bases if each <= header.base_offset)
            segment = path / "0000" / f"{base:020d}.log"
            offsets = range(header.base_offset, header.next_offset)
            found.append(Place(batch.values, offsets, segment, 4096 + header.base_offset - base))
        return found


@pytest.fixture
def stored(open_topic: Open, path: Path) -> list[Place]:
    """Three segments of four batches of three records."""
    with open_topic(files=UnsyncedFiles(), batch_records=3) as topic:
        for number in range(36):
            topic.append(b"%d" % number, timestamp=NOW + number * SECOND)
            if number in (11, 23):
                topic.partition(0).roll()
    return places_of(path)


def flip(file: Path, at: int, bits: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= bits
    file.write_bytes(content)


def values_without(stored: list[Place], *lost: int) -> list[bytes | None]:
    return [value for number, place in enumerate(stored) if number not in lost for value in place.values]


@pytest.mark.parametrize("number", [0, 1, 5, 11])
def test_reader_has_every_record_before_the_damage(number: int, stored: list[Place], path: Path) -> None:
    """It used to have none of the block that the damage was in."""
    flip(stored[number].segment, stored[number].file_position + 131)
    before: list[Any] = []
    with Topic.open(path, mode="r") as topic, pytest.raises(CorruptLogError) as caught:
        before.extend(record.value for record in topic.read())
    assert before == values_without(stored[:number])
    assert caught.value.path == str(stored[number].segment)
    assert caught.value.file_position == stored[number].file_position + 128


@pytest.mark.parametrize("at", [0, 5, 9, 13, 20, 40, 90, 120, 128, 146], ids=str)
@pytest.mark.parametrize("number", [0, 3, 4, 6, 11])
def test_skipping_reader_has_every_record_but_those_of_the_damaged_batch(
    number: int, at: int, stored: list[Place], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(stored[number].segment, stored[number].file_position + at)
    expected = values_without(stored, number)
    with Topic.open(path, mode="r") as topic, caplog.at_level(logging.WARNING, "loglib"):
        reader = topic.read(on_damage="skip")
        assert [record.value for record in reader] == expected
        assert reader.tell() == {0: stored[-1].offsets.stop}
        (gap,) = reader.gaps
        assert (gap.partition, gap.offsets, gap.path) == (0, stored[number].offsets, str(stored[number].segment))
        assert stored[number].file_position <= gap.file_position <= stored[number].file_position + max(at, 4)
        for part in (str(stored[number].segment), f"byte {gap.file_position}", f"[{gap.offsets.start}, "):
            assert part in caplog.text
        reader.seek("begin")
        assert [value for batch in reader.batches() for value in batch.values] == expected
        assert reader.gaps == [gap] and len(caplog.records) == 1, "a gap that is met again is not told again"
        assert [value for batch in topic.batches(on_damage="skip") for value in batch.values] == expected
        assert [value for batch in topic.partition(0).batches(on_damage="skip") for value in batch.values] == expected
        follower = topic.follow("begin", timeout=0, on_damage="skip")
        assert [record.value for record in follower.poll(max_records=100)] == expected
        assert follower.gaps == [gap]


@pytest.mark.parametrize("damage", ["zeroed", "of another log", "cut", "emptied"])
def test_batches_behind_a_bad_segment_header_are_read_all_the_same(
    damage: str, stored: list[Place], path: Path, tmp_path: Path
) -> None:
    segment = stored[4].segment
    content = segment.read_bytes()
    if damage == "of another log":
        content = content[:20] + bytes([content[20] ^ 1]) + content[21:]
    elif damage == "zeroed":
        content = bytes(4096) + content[4096:]
    else:
        content = content[:100] if damage == "cut" else b""
    segment.write_bytes(content)
    lost = () if damage in ("zeroed", "of another log") else (4, 5, 6, 7)
    with Topic.open(path, mode="r") as topic:
        with pytest.raises(CorruptLogError):
            values_of(topic)
        starts: list[Any] = ["begin", stored[6].offsets.start + 1, to_datetime(NOW + 19 * SECOND)]
        for start, first in zip(starts, (0, 19, 19), strict=True):
            reader = topic.read(start, on_damage="skip")
            expected = [value for value in values_without(stored, *lost) if int(value or b"") >= first]
            assert [record.value for record in reader] == expected
            header, *rest = reader.gaps
            assert (header.path, len(header.offsets)) == (str(segment), 0)
            assert "nothing lost" in str(header)
            assert [gap.offsets.stop for gap in rest] == ([stored[7].offsets.stop] if lost else [])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_missing_segment_is_a_gap_of_all_its_offsets(number: int, stored: list[Place], path: Path) -> None:
    stored[4 * number].segment.unlink()
    lost = range(4 * number, 4 * number + 4)
    with Topic.open(path, mode="r") as topic:
        with pytest.raises(CorruptLogError):
            values_of(topic)
        reader = topic.read(on_damage="skip")
        assert [record.value for record in reader] == values_without(stored, *lost)
        assert [gap.offsets for gap in reader.gaps] == [
            range(stored[lost[0]].offsets.start, stored[lost[-1]].offsets.stop)
        ]
        reader = topic.read(stored[lost[1]].offsets.start, on_damage="skip")
        assert [record.value for record in reader] == values_without(stored, *range(lost[-1] + 1))


def test_segment_that_vanishes_while_it_is_read_past_is_a_gap(stored: list[Place], path: Path) -> None:
    class Vanishing(UnsyncedFiles):
        def open_read(self, path: str, **within: Any) -> int:
            if path == str(stored[4].segment):
                raise FileNotFoundError(2, "gone", path)
            return super().open_read(path, **within)

    with testing.open_topic(path, mode="r", files=Vanishing()) as topic:
        reader = topic.read(on_damage="skip")
        assert [record.value for record in reader] == values_without(stored, 4, 5, 6, 7)


def test_partition_without_a_segment_is_one_gap(stored: list[Place], path: Path) -> None:
    for segment in {place.segment for place in stored}:
        segment.unlink()
    with Topic.open(path, mode="r") as topic:
        reader = topic.read(on_damage="skip")
        assert list(reader) == []
        assert [gap.offsets for gap in reader.gaps] == [range(stored[-1].offsets.stop)]


def test_segment_cut_at_a_batch_or_within_one_is_a_gap_to_its_end(stored: list[Place], path: Path) -> None:
    content = stored[4].segment.read_bytes()
    for cut in (stored[6].file_position, stored[6].file_position + 60, stored[6].file_position + 129):
        stored[4].segment.write_bytes(content[:cut])
        with Topic.open(path, mode="r") as topic:
            reader = topic.read(on_damage="skip")
            assert [record.value for record in reader] == values_without(stored, 6, 7)
            assert [gap.offsets for gap in reader.gaps] == [range(stored[6].offsets.start, stored[7].offsets.stop)]


def test_start_and_end_within_a_damaged_batch_are_taken_as_they_are(stored: list[Place], path: Path) -> None:
    flip(stored[5].segment, stored[5].file_position)
    first, stop = stored[5].offsets.start + 1, stored[5].offsets.start + 2
    with Topic.open(path, mode="r") as topic:
        ways: list[dict[str, Any]] = [{"start": first}, {"end": stop}]
        for forms in ways:
            with pytest.raises(CorruptLogError):
                topic.read(**forms)
        assert [record.value for record in topic.read(first, on_damage="skip")] == values_without(stored, *range(6))
        reader = topic.read(end=stop, on_damage="skip")
        assert [record.value for record in reader] == values_without(stored[:5])
        assert list(reader) == []
        reader.seek(first)
        assert list(reader) == []


@pytest.mark.parametrize("number", range(12))
def test_start_by_time_does_not_step_over_a_damaged_batch(number: int, stored: list[Place], path: Path) -> None:
    """The search by bisection looks at whole headers only, and went past a bad one without a word."""
    flip(stored[number].segment, stored[number].file_position + 9)
    start = to_datetime(NOW + (3 * number + 1) * SECOND)
    with Topic.open(path, mode="r") as topic:
        with pytest.raises(CorruptLogError):
            values_of(topic, start)
        later = topic.read(start, on_damage="skip")
        assert [record.value for record in later] == values_without(stored, *range(number + 1))
        assert [gap.offsets for gap in later.gaps] == [stored[number].offsets]


def test_follower_goes_on_past_damage_when_more_is_flushed(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    topic.append(b"bad", sync=True)
    flip(path / "0000" / f"{0:020d}.log", 4096 + 129)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin", timeout=0, on_damage="skip")
        assert follower.poll() == []
        topic.append(b"good", sync=True)
        assert [record.value for record in follower.poll()] == [b"good"]
        assert len(follower.gaps) == 1


def test_damage_at_the_end_of_a_segment_does_not_hide_one_made_since(open_topic: Open, path: Path) -> None:
    """The search for the next batch ended where the reader's old listing of the directory did."""
    topic = open_topic()
    topic.append(b"one", sync=True)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin", timeout=0, on_damage="skip")
        assert len(follower.poll()) == 1
        topic.append(b"bad", sync=True)
        topic.partition(0).roll()
        topic.append(b"in a new segment", sync=True)
        flip(path / "0000" / f"{0:020d}.log", 4096 + 144 + 1)
        assert [record.value for record in follower.poll()] == [b"in a new segment"]


def test_columns_that_contradict_their_header_are_a_gap_as_well(open_topic: Open, path: Path) -> None:
    """Such a batch has the right checksums: no rot, but somebody's work, or a fault of the memory."""
    topic = open_topic()
    offsets = [topic.append(value, sync=True).offset for value in (b"one", b"two", b"three")]
    segment = path / "0000" / f"{0:020d}.log"
    content = segment.read_bytes()
    start = 4096 + offsets[2]
    bad = forged(content[start:], body=b"\x01" + content[start + 129 :], identity=Identity.of(topic.log_id, 0))
    segment.write_bytes(content[:start] + bad)
    with Topic.open(path, mode="r") as reading:
        with pytest.raises(CorruptLogError, match="column offsets"):
            values_of(reading)
        reader = reading.read(on_damage="skip")
        assert [record.value for record in reader] == [b"one", b"two"]
        assert [gap.offsets for gap in reader.gaps] == [range(offsets[2], offsets[2] + 144)]


@pytest.mark.parametrize("blocks", ["one block", "a block for each"])
@pytest.mark.parametrize("stale", [0, 1, 2, 3], ids=["first", "second", "third", "last"])
def test_batch_of_another_history_is_not_returned_where_the_next_one_denies_it(
    stale: int, blocks: str, open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that the disk has lost uncovers what stood there: a batch that is whole and fits its place."""
    if blocks == "a block for each":
        monkeypatch.setattr("loglib.log.cursor.BLOCK_BYTES", 128)
    topic = open_topic()
    offsets = [topic.append(b"%d" % number, sync=True).offset for number in range(4)]
    segment = path / "0000" / f"{0:020d}.log"
    content = segment.read_bytes()
    start = 4096 + offsets[stale]
    batch = content[start : start + 144]
    old = forged(batch, body=batch[128:].replace(b"%d" % stale, b"X"), identity=Identity.of(topic.log_id, 0))
    segment.write_bytes(content[:start] + old + content[start + 144 :])
    with Topic.open(path, mode="r") as reading:
        reader = reading.read(on_damage="skip")
        values = [record.value for record in reader]
        if stale == 3:
            assert values == [b"0", b"1", b"2", b"X"], "nothing stands behind it to deny it"
            return
        with pytest.raises(CorruptLogError, match="a batch that follows one"):
            values_of(reading)
        assert [gap.found for gap in reader.gaps] == [reading.verify().damage[0].found]
        assert values == [b"%d" % number for number in range(4) if number != stale]


def test_batch_of_another_history_is_denied_by_the_next_segment_as_well(stored: list[Place], path: Path) -> None:
    for number in (3, 7):
        content = stored[number].segment.read_bytes()
        start = stored[number].file_position
        with Topic.open(path, mode="r") as topic:
            batch = content[start : start + len(stored[number].offsets)]
            old = forged(batch, writer_epoch=9, identity=Identity.of(topic.log_id, 0))
            stored[number].segment.write_bytes(content[:start] + old + content[start + len(batch) :])
            reader = topic.read(on_damage="skip")
            assert [record.value for record in reader] == values_without(stored, number)
            assert [gap.offsets for gap in reader.gaps] == [stored[number].offsets]
        stored[number].segment.write_bytes(content)


@pytest.mark.parametrize("fewest", [1, 64], ids=["in bundles", "in batches"])
def test_follower_is_told_when_the_batch_that_it_had_last_is_denied(
    fewest: int, open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stood behind it when it was read, so that nothing could tell."""
    monkeypatch.setattr("loglib.log.cursor._MANY", fewest)
    monkeypatch.setattr("loglib.log.cursor._WORTH_IMPORT", 1)
    topic = open_topic()
    topic.append(b"old", sync=True)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin", timeout=0, on_damage="skip")
        strict = reading.follow("begin", timeout=0)
        assert [record.value for record in follower.poll()] == [record.value for record in strict.poll()] == [b"old"]
        segment, identity = path / "0000" / f"{0:020d}.log", Identity.of(topic.log_id, 0)
        topic.append(b"new", sync=True)
        topic.append(b"newer", sync=True)
        content = segment.read_bytes()
        other = forged(content[4240:4384], previous_crc=7, identity=identity)  # of another than the one that was read
        third = forged(content[4384:], previous_crc=int.from_bytes(other[4:8], "little"), identity=identity)
        segment.write_bytes(content[:4240] + other + third)
        assert [record.value for record in follower.poll(max_records=9)] == [b"new", b"newer"]
        assert [len(gap.offsets) for gap in follower.gaps] == [0]
        with pytest.raises(CorruptLogError, match="a batch that follows one"):
            strict.poll()


def test_batch_that_neither_neighbour_knows_is_the_one_left_out(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    offsets = [topic.append(b"%d" % number, sync=True).offset for number in range(5)]
    segment = path / "0000" / f"{0:020d}.log"
    content = segment.read_bytes()
    for strange in (1, 2, 3):
        start = 4096 + offsets[strange]
        old = forged(content[start : start + 144], previous_crc=7, identity=Identity.of(topic.log_id, 0))
        segment.write_bytes(content[:start] + old + content[start + 144 :])
        with Topic.open(path, mode="r") as reading:
            reader = reading.read(on_damage="skip")
            assert [record.value for record in reader] == [b"%d" % n for n in range(5) if n != strange]
            assert [gap.offsets for gap in reader.gaps] == [range(offsets[strange], offsets[strange] + 144)]


def test_gap_policy_that_there_is_not_is_refused(open_topic: Open) -> None:
    with pytest.raises(ValueError, match='on_damage must be "raise" or "skip"'):
        open_topic().read(on_damage="ignore")  # type: ignore[arg-type]
