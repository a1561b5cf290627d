"""Check: passes over what was written, and stops at the first byte that was not."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import forged, resealed_segment, spoil

from conftest import NOW, Overtaken, last_segment, sound, tree, values_of
from loglib import CorruptLogError, LogError, Retention, Topic, testing
from loglib.format.watermark import encode_new, newest
from loglib.log.verify import VerifyReport
from loglib.segment import Identity
from loglib.testing import UnsyncedFiles

Open = Callable[..., Topic]


def fill(open_topic: Open, **policies: Any) -> None:
    with open_topic(files=UnsyncedFiles(), **policies) as topic:
        for number in range(12):
            topic.append(b"value %d" % number, key=b"k", timestamp=NOW + number % 5, headers={"h": b"1"})
            if number % 3 == 2:
                topic.flush()
            if number % 6 == 5:
                topic.partition(0).roll()


def test_check_counts_what_it_has_seen(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    before = tree(path)
    with Topic.open(path, mode="r") as topic:
        report = sound(topic.partition(0))
        assert (report.segments, report.batches, report.records) == (3, 4, 12)
        assert report.bytes == topic.partition(0).high_watermark
    assert tree(path) == before


def test_check_of_an_empty_partition_passes(open_topic: Open) -> None:
    assert sound(open_topic().partition(0)) == VerifyReport(1, 0, 0, 0)


@pytest.mark.parametrize("index", [0, 1])
def test_flipped_byte_anywhere_is_found(index: int, open_topic: Open, path: Path) -> None:
    fill(open_topic)
    segment = sorted((path / "0000").glob("*.log"))[index]
    whole = segment.read_bytes()
    rng = random.Random(7)
    # Of the header's empty table of producers, a sample; of the rest every byte.
    places = [*range(200), *rng.sample(range(200, 4096), 50), *range(4096, len(whole))]
    with Topic.open(path, mode="r") as topic:
        for at in places:
            segment.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
            with pytest.raises(LogError) as raised:
                sound(topic.partition(0))
            assert str(segment) in str(raised.value) or str(sorted((path / "0000").glob("*.log"))[index + 1]) in str(
                raised.value
            )
        segment.write_bytes(whole)
        sound(topic.partition(0))


def test_bytes_above_the_mark_are_not_looked_at(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    with last_segment(path).open("ab") as file:
        file.write(b"torn")
    with Topic.open(path, mode="r") as topic:
        assert sound(topic.partition(0)).records == 12


def test_missing_first_segment_is_found(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    for expected in ("a first segment at [1-9]", "None"):
        min((path / "0000").glob("*.log")).unlink()
        if expected == "None":
            for each in (path / "0000").glob("*.log"):
                each.unlink()
        with Topic.open(path, mode="r") as topic, pytest.raises(CorruptLogError, match=expected):
            sound(topic.partition(0))


@pytest.mark.parametrize("rolled", [False, True], ids=["in-a-segment", "over-a-roll"])
@pytest.mark.parametrize("forged", ["previous_crc", "running_max_timestamp", "append_time", "max_timestamp"])
def test_batch_that_contradicts_the_one_before_is_found(
    forged: str, rolled: bool, open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is whole by itself: only the links between them are wrong."""
    from loglib.append import tail
    from loglib.format import header

    topic = open_topic()
    topic.append(b"one", sync=True)
    if rolled:
        topic.partition(0).roll()

    def stamp(body: Any, **facts: Any) -> Any:
        if forged == "max_timestamp":
            body = body._replace(max_timestamp=body.max_timestamp + 1)
            facts["running_max_timestamp"] += 1
        else:
            facts[forged] += -1 if forged == "append_time" else 1
        return header.stamp(body, **facts)

    monkeypatch.setattr(tail, "stamp", stamp)
    topic.append(b"two", timestamp=NOW, sync=True)
    monkeypatch.undo()
    with pytest.raises(CorruptLogError, match="that follows one|running maximum and append time") as raised:
        sound(topic.partition(0))
    assert raised.value.file_position >= 4096
    assert len(topic.verify().damage) == 1


def test_check_that_retention_overtakes_begins_again(open_topic: Open, path: Path) -> None:
    """Never a missing file: the log has moved on, and what there is now is checked."""
    fill(open_topic, retention=Retention(age=None, bytes=0))
    topic = open_topic(files=UnsyncedFiles())

    files = Overtaken(topic.retain)
    with testing.open_topic(path, mode="r", files=files) as reading:
        report = reading.partition(0).verify()
    assert files.done and report.segments == 1 and not report.damage


def test_damage_that_retention_has_dropped_meanwhile_is_not_reported(open_topic: Open, path: Path) -> None:
    fill(open_topic, retention=Retention(age=None, bytes=0))
    spoil(names_of(path)[0], 4096 + 140)
    topic = open_topic(files=UnsyncedFiles())
    second = str(names_of(path)[1])

    class Overtaken(UnsyncedFiles):
        opened = 0

        def open_read(self, path: str, **within: Any) -> int:
            fd = super().open_read(path, **within)
            if path == second:
                Overtaken.opened += 1
                if self.opened == 4:  # before that for single headers: now all before it has been read
                    topic.retain()
            return fd

    with testing.open_topic(path, mode="r", files=Overtaken()) as reading:
        report = reading.partition(0).verify()
    assert Overtaken.opened == 4 and report.segments == 1 and not report.damage


def test_file_that_vanishes_without_retention_is_no_reason_to_begin_again(open_topic: Open, path: Path) -> None:
    fill(open_topic)

    class Vanishing(UnsyncedFiles):
        def open_read(self, path: str, **within: Any) -> int:
            if path.endswith(".log"):
                raise FileNotFoundError(2, "gone", path)
            return super().open_read(path, **within)

    with testing.open_topic(
        path, mode="r", files=Vanishing()
    ) as reading, pytest.raises(CorruptLogError, match="no file"):
        sound(reading.partition(0))


# --- all of the damage -----------------------------------------------------------------------------


def names_of(path: Path) -> list[Path]:
    return sorted((path / "0000").glob("*.log"))


def test_damage_on_both_sides_of_a_border_between_segments_is_no_damage_of_the_next(
    open_topic: Open, path: Path
) -> None:
    """What lies between is not known then: the largest event time of the log, for one."""
    fill(open_topic)
    first, second, _ = names_of(path)
    with Topic.open(path, mode="r") as topic:
        batches = [batch._header for batch in topic.batches()]
        spoil(first, 4096 + batches[1].base_offset + 136)
        spoil(second, 50)
        assert [Path(each.path) for each in topic.verify().damage] == [second, first]


def test_verify_of_a_whole_topic_finds_nothing(open_topic: Open, path: Path) -> None:
    fill(open_topic, partitions=2)
    before = tree(path)
    with Topic.open(path, mode="r") as topic:
        report = topic.verify()
        assert (report.records, report.damage) == (12, ())
        assert report.batches == sum(sound(each).batches for each in topic.partitions)
        assert report.bytes == sum(each.high_watermark for each in topic.partitions)
        assert topic.partition(0).verify() == sound(topic.partition(0))
    assert tree(path) == before


def test_verify_goes_on_after_a_fault_and_names_file_byte_and_what_is_lost(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    first, second, third = names_of(path)
    with Topic.open(path, mode="r") as topic:
        batches = [batch._header for batch in topic.batches()]
        spoil(first, 4096 + 3, 4096 + batches[1].base_offset + 136)  # both batches: a magic, and a body
        spoil(second, 50)
        spoil(third, 3000)
        spoil(path / "0000" / "watermark", 4096 + 20)
        spoil(path / "topic.json", 30)
        before = tree(path)
        report = topic.verify()
        assert (report.segments, report.batches, report.records) == (1, 2, 6)
        assert report.bytes == batches[2].length + batches[3].length
        found = [(Path(each.path), each.file_position, each.offsets) for each in report.damage]
        assert found == [
            (path / "topic.json", found[0][1], range(0)),
            (path / "0000" / "watermark", 4096, range(0)),
            (second, 12, range(0)),
            (third, 12, range(0)),
            (first, 4096, range(batches[1].base_offset)),
            (first, 4096 + batches[1].base_offset + 128, range(batches[1].base_offset, batches[1].next_offset)),
        ]
        assert [each.partition for each in report.damage] == [None, 0, 0, 0, 0, 0]
        assert all(each.found != each.expected for each in report.damage)
        with pytest.raises(CorruptLogError, match="watermark, byte 4096"):
            sound(topic.partition(0))
    assert tree(path) == before


def test_verify_finds_what_is_missing(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    names_of(path)[1].unlink()
    (path / "0000" / "watermark").unlink()
    with Topic.open(path, mode="r") as topic:
        (path / "topic.json").unlink()
        facts = [(Path(each.path).name, each.found.split(",")[0]) for each in topic.verify().damage]
        assert facts[:2] == [("topic.json", "no file"), ("watermark", "no file")]
        assert facts[2][1] == "before it", "the third segment says what should stand before it"


def test_verify_finds_the_description_of_another_topic(open_topic: Open, path: Path, tmp_path: Path) -> None:
    fill(open_topic)
    with Topic.open(tmp_path / "other", create=True):
        pass
    with Topic.open(path, mode="r") as topic:
        (path / "topic.json").write_bytes((tmp_path / "other" / "topic.json").read_bytes())
        (damage,) = topic.verify().damage
        assert damage.expected == f"log {topic.log_id.hex()}"


def test_verify_of_what_is_too_bad_for_details_says_so(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    with Topic.open(path, mode="r") as topic:
        (path / "0000").rename(path / "elsewhere")
        (damage,) = topic.partition(0).verify().damage
        assert (damage.path, damage.found) == (str(path / "0000"), "no directory")


def test_verify_finds_columns_that_contradict_their_header(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    segment = names_of(path)[1]
    content = segment.read_bytes()
    with Topic.open(path, mode="r") as topic:
        last = list(topic.batches())[-1]._header
        at = len(content) - last.length
        bad = forged(content[at:], body=b"\x01" + content[at + 129 :], identity=Identity.of(topic.log_id, 0))
        segment.write_bytes(content[:at] + bad)
        report = topic.verify()
        assert report.records == 9
        assert [each.offsets for each in report.damage] == [range(last.base_offset, last.next_offset)]


def test_segment_header_that_tells_of_another_past_is_found(open_topic: Open, path: Path) -> None:
    """Its checksum is right: the header of a copy of the log, say, put back after a crash."""
    fill(open_topic)
    for index, at in ((1, 72), (1, 80), (2, 88)):  # the last segment has no batch that could tell
        segment = names_of(path)[index]
        whole = segment.read_bytes()
        segment.write_bytes(resealed_segment(whole, at, bytes([whole[at] ^ 1])))
        with Topic.open(path, mode="r") as topic:
            (damage,) = topic.verify().damage
            assert (Path(damage.path), damage.file_position) == (segment, 72)
        segment.write_bytes(whole)


def test_slot_that_is_being_written_is_no_damage(open_topic: Open, path: Path) -> None:
    fill(open_topic)

    class Torn(UnsyncedFiles):
        """The first read of the watermark meets a slot half written."""

        reads = 0

        def read_whole(self, path: str, limit_bytes: int) -> bytes:
            content = super().read_whole(path, limit_bytes)
            if path.endswith("watermark"):
                Torn.reads += 1
                if Torn.reads == 1:
                    return b"?" + content[1:]
            return content

    with testing.open_topic(path, mode="r", files=Torn()) as topic:
        assert topic.verify().damage == ()
    assert Torn.reads == 2


def test_check_beside_a_writer_that_rolls_finds_no_fault(open_topic: Open, path: Path) -> None:
    """The size of a segment was taken, then its last bytes and the next segment came: a broken chain, so it seemed."""
    topic = open_topic()
    topic.append(b"one", sync=True)

    class Slow(UnsyncedFiles):
        def sizes(self, directory: str, **within: Any) -> dict[str, int]:
            before = super().sizes(directory, **within)
            topic.append(b"two", sync=True)
            topic.partition(0).roll()
            topic.append(b"three", sync=True)
            return super().sizes(directory) | before

    with testing.open_topic(path, mode="r", files=Slow()) as reading:
        assert sound(reading.partition(0)).damage == ()


@pytest.mark.parametrize("when", [2, 3], ids=["before the second segment is read", "when it has been opened"])
def test_retention_in_the_midst_of_the_batches_begins_the_check_again(when: int, open_topic: Open, path: Path) -> None:
    fill(open_topic, retention=Retention(age=None, bytes=0))
    topic = open_topic(files=UnsyncedFiles())
    first, second, _ = names_of(path)
    spoil(first, 4096)  # which is met, and then is no matter any more

    class Overtaken(UnsyncedFiles):
        opened = 0

        def open_read(self, path: str, **within: Any) -> int:
            fd = super().open_read(path, **within)
            if path == str(second):
                Overtaken.opened += 1
                if Overtaken.opened == when:  # for its header, for its first batch's link, and to be read
                    topic.retain()
            return fd

    with testing.open_topic(path, mode="r", files=Overtaken()) as reading:
        report = reading.verify()
    assert Overtaken.opened >= when and (report.segments, report.damage) == (1, ())


@pytest.mark.parametrize("field", ["previous_bytes", "jump_offset"])
@pytest.mark.parametrize("number", [0, 1, 6])
def test_pointer_that_leads_elsewhere_is_found(field: str, number: int, open_topic: Open, path: Path) -> None:
    """A reader that goes forwards would not notice."""
    topic = open_topic()
    offsets = [topic.append(b"%d" % each, sync=True).offset for each in range(8)]
    topic.close()
    segment = names_of(path)[0]
    content, start, size = segment.read_bytes(), 4096 + offsets[number], offsets[1]
    wrong: Any = {field: {"previous_bytes": 8, "jump_offset": offsets[number] - 8 if number else 8}[field]}
    identity = Identity.of(topic.log_id, 0)
    changed = forged(content[start : start + size], identity=identity, **wrong)
    stored = content[:start] + changed
    for after in range(start + size, len(content), size):  # linked anew, so that only the pointer is wrong
        crc = int.from_bytes(stored[-size + 4 : -size + 8], "little")
        stored += forged(content[after : after + size], previous_crc=crc, identity=identity)
    segment.write_bytes(stored)
    with Topic.open(path, mode="r") as reading:
        (damage,) = reading.verify().damage
        assert (damage.path, damage.file_position) == (str(segment), start + 112)
        assert "batches pointed to" in damage.found


def test_watermark_that_names_another_last_batch_is_found(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    for number in range(3):
        topic.append(b"%d" % number, sync=True)
    topic.close()
    salt = Identity.of(topic.log_id, 0).salt
    watermark = path / "0000" / "watermark"
    mark = newest(watermark.read_bytes(), salt)
    assert mark is not None
    watermark.write_bytes(encode_new(mark._replace(flushed_tail=0), salt))
    with Topic.open(path, mode="r") as reading:
        (damage,) = reading.verify().damage
        assert (damage.path, damage.file_position) == (str(watermark), 48)
        assert values_of(reading) == [b"0", b"1", b"2"]


@pytest.mark.timeout(20)
def test_check_of_a_log_start_inside_a_segment_never_ended(open_topic: Open, path: Path) -> None:
    """No writer leaves one there; the check took it for retention that came between, each time anew."""
    fill(open_topic)
    watermark = path / "0000" / "watermark"
    with Topic.open(path, mode="r") as reading:
        salt = Identity.of(reading.log_id, 0).salt
        first, *_ = reading.partition(0).segments
    mark = newest(watermark.read_bytes(), salt)
    assert mark is not None
    inside = first.end_offset - 8
    watermark.write_bytes(encode_new(mark._replace(log_start_offset=inside), salt))
    with Topic.open(path, mode="r") as reading:
        report = reading.verify()
        assert [each.offsets for each in report.damage if each.offsets] == [range(inside, first.end_offset)]
        assert report.records == 6


class Unlisted(UnsyncedFiles):
    """Says once, after `act`, that the directory of a partition is none."""

    act: Callable[[], object] | None = None

    def is_directory(self, path: str, **within: Any) -> bool:
        act, self.act = self.act, None
        if act is not None:
            act()
        return act is None and super().is_directory(path, **within)


def test_verify_of_a_partition_that_cannot_be_listed_says_so(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    files = Unlisted()
    with testing.open_topic(path, mode="r", files=files) as reading:
        files.act = lambda: None
        (damage,) = reading.partition(0).verify().damage
        assert (damage.path, damage.found) == (str(path / "0000"), "something else")
        assert reading.partition(0).verify().damage == ()


def test_damage_met_while_retention_drops_begins_the_check_again(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    files = Unlisted()
    with Topic.open(path, create=True) as topic, testing.open_topic(path, mode="r", files=files) as reading:
        second = topic.partition(0).segments[1].base_offset
        files.act = lambda: topic.partition(0).delete_before(second)
        report = reading.partition(0).verify()
        assert report.damage == () and report.records == 6


def test_progress_rises_to_the_size_of_the_log(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    for partition in topic.partitions:
        for _ in range(3):
            topic.append(b"x" * 700_000, partition=partition.id, sync=True)
    size = topic.partition(0).high_watermark
    seen: list[tuple[int, int]] = []
    topic.verify(progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and len(seen) >= 4 and seen[-1] == (2 * size, 2 * size)
    seen.clear()
    topic.partition(1).verify(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (size, size)


def test_progress_of_what_is_too_bad_is_none(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    with Topic.open(path, mode="r") as topic:
        (path / "0000").rename(path / "elsewhere")
        seen: list[tuple[int, int]] = []
        assert topic.verify(progress=lambda *both: seen.append(both)).damage
        assert seen == []


# --- the end of the log alone ------------------------------------------------------------------------


def lengthy(open_topic: Open) -> None:
    """Five sealed segments and an open one, each of two batches."""
    with open_topic(files=UnsyncedFiles()) as topic:
        for number in range(12):
            topic.append(b"value %d" % number, sync=True)
            if number % 2 and number < 11:
                topic.partition(0).roll()


def test_look_at_the_end_reads_one_batch_of_a_long_log(open_topic: Open, path: Path) -> None:
    lengthy(open_topic)
    before = tree(path)
    with Topic.open(path, mode="r") as topic:
        for report in (topic.verify(tail_only=True), topic.partition(0).verify(tail_only=True)):
            assert (report.segments, report.batches, report.records, report.damage) == (2, 1, 1, ())
    assert tree(path) == before


@pytest.mark.parametrize("roll", [False, True], ids=["empty", "the last segment is empty"])
def test_look_at_the_end_passes_without_a_batch_in_the_last_segment(roll: bool, open_topic: Open, path: Path) -> None:
    with open_topic(files=UnsyncedFiles()) as topic:
        if roll:
            topic.append(b"x", sync=True)
            topic.partition(0).roll()
    with Topic.open(path, mode="r") as topic:
        assert topic.verify(tail_only=True).damage == ()


def test_look_at_the_end_passes_when_all_was_dropped(open_topic: Open, path: Path) -> None:
    topic = open_topic(files=UnsyncedFiles())
    topic.append(b"x", sync=True)
    topic.partition(0).delete_before(topic.partition(0).high_watermark)
    assert topic.verify(tail_only=True).damage == ()


def test_look_at_the_end_finds_each_flipped_byte_of_the_last_batch(open_topic: Open, path: Path) -> None:
    lengthy(open_topic)
    last = last_segment(path)
    whole = last.read_bytes()
    with Topic.open(path, mode="r") as topic:
        begin = topic.partition(0).offset_before_end(1) - topic.partition(0).segments[-1].base_offset + 4096
        for at in range(begin, len(whole)):
            last.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert topic.verify(tail_only=True).damage, at


@pytest.mark.parametrize("slot", [0, 4096])
def test_look_at_the_end_finds_a_bad_slot_of_the_watermark(slot: int, open_topic: Open, path: Path) -> None:
    lengthy(open_topic)
    spoil(path / "0000" / "watermark", slot + 20)
    with Topic.open(path, mode="r") as topic:
        (damage,) = topic.verify(tail_only=True).damage
    assert (damage.path, damage.file_position) == (str(path / "0000" / "watermark"), slot)


@pytest.mark.parametrize("what", ["missing", "cut", "header"])
def test_look_at_the_end_finds_a_segment_that_is_missing_or_cut_anywhere(
    what: str, open_topic: Open, path: Path
) -> None:
    lengthy(open_topic)
    segments = sorted((path / "0000").glob("*.log"))
    if what == "missing":
        segments[1].unlink()
    elif what == "cut":
        os.truncate(segments[1], segments[1].stat().st_size - 1)
    else:
        spoil(segments[-1], 100)
    with Topic.open(path, mode="r") as topic:
        damage = topic.verify(tail_only=True).damage
    assert damage and damage[0].path in map(str, (segments[0], segments[1], segments[-1]))


def test_look_at_the_end_passes_beside_a_writer_that_rolls(open_topic: Open, path: Path) -> None:
    with open_topic(files=UnsyncedFiles()) as writer, Topic.open(path, mode="r") as topic:
        for number in range(60):
            writer.append(b"%d" % number, sync=True)
            if number % 3 == 0:
                writer.partition(0).roll()
            if number % 10 == 9:
                writer.partition(0).delete_before(writer.partition(0).segments[-2].base_offset)
            assert topic.verify(tail_only=True).damage == ()
