"""A reader with donors hands out what another copy has for damaged bytes, proven, and says so; never wrong bytes."""

from __future__ import annotations

import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import spoil

from conftest import QUIET, values_of
from loglib import CorruptLogError, Mirror, Topic, repair, snapshot, testing
from loglib.log import topic_file
from loglib.log.donors import Donor, Donors
from loglib.segment import HEADER_BYTES, Identity
from loglib.system.files import REAL

SMALL: dict[str, Any] = {"segment_bytes": 4096, "batch_bytes": 512}
VALUES = [b"%03d" % number + b"." * 100 for number in range(120)]


@pytest.fixture
def copy(tmp_path: Path, path: Path) -> Path:
    """A mirror of the topic at `path`, which has some segments."""
    copy = tmp_path / "copy" / path.name
    write(path)
    with Mirror(path, copy, files=testing.UnsyncedFiles()) as made:
        made.copy()
    return copy


def write(path: Path, values: list[bytes] = VALUES, **policies: Any) -> None:
    with testing.open_topic(path, files=testing.UnsyncedFiles(), **QUIET, **(SMALL | policies)) as topic:
        for value in values:
            topic.append(value, key=b"k")


def segments(path: Path) -> list[Path]:
    return sorted((path / "0000").glob("*.log"))


def second_batch(segment: Path) -> int:
    """Where the second batch of a file begins."""
    content = segment.read_bytes()
    return HEADER_BYTES + int.from_bytes(content[HEADER_BYTES + 12 : HEADER_BYTES + 16], "little")


def spoil_header(path: Path) -> None:
    spoil(segments(path)[1], 40)


def spoil_two_batches(path: Path) -> None:
    at = second_batch(segments(path)[1])
    spoil(segments(path)[1], at + 20, at + 140)
    spoil(segments(path)[2], second_batch(segments(path)[2]) + 30)


def remove(path: Path) -> None:
    for each in segments(path)[1:3]:
        each.unlink()


def cut_the_end(path: Path) -> None:
    last = segments(path)[-1]
    last.write_bytes(last.read_bytes()[: second_batch(last) + 10])


def spoil_the_first(path: Path) -> None:
    spoil(segments(path)[0], 50, HEADER_BYTES + 20)


def declare_gaps(path: Path) -> None:
    spoil_two_batches(path)
    repair(path)


CHANGES = [spoil_header, spoil_two_batches, remove, cut_the_end, spoil_the_first, declare_gaps]


@pytest.mark.parametrize("change", CHANGES, ids=[each.__name__ for each in CHANGES])
@pytest.mark.parametrize("on_gap", ["raise", "skip"])
def test_damage_is_read_from_a_donor(
    path: Path, copy: Path, change: Callable[[Path], None], on_gap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    change(path)
    with Topic.open(path, mode="r", donors=[copy.parent / "nothing", copy]) as topic:
        reader = topic.read(on_gap=on_gap)
        assert [each.value for each in reader] == VALUES
        assert reader.healed or (change is spoil_header and on_gap == "skip")
        assert all(each.donor == str(copy / "0000") for each in reader.healed)
        assert not [gap for gap in reader.gaps if gap.offsets]
        told = [each for each in caplog.messages if "are read from" in each]
        assert len(told) >= len(reader.healed)
        assert [value for batch in topic.batches(on_gap=on_gap) for value in batch.values] == VALUES


def test_every_start_and_end_in_the_damage_is_found(path: Path, copy: Path) -> None:
    with Topic.open(path, mode="r") as topic:
        offsets = [each.offset for each in topic.read()]
    spoil_two_batches(path)
    with Topic.open(path, mode="r", donors=[copy]) as topic:
        for number in range(0, 120, 7):
            assert values_of(topic, {0: offsets[number]}) == VALUES[number:]
            reader = topic.read({0: offsets[3]}, {0: offsets[number]})
            assert [each.value for each in reader] == VALUES[3:number]
            reader.seek({0: offsets[number]})


def test_followers_arrow_and_groups_read_from_donors(
    path: Path, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil_two_batches(path)
    with Topic.open(path, mode="r", donors=[copy]) as topic:
        assert [each.value for each in topic.follow("begin", timeout=0)] == VALUES
        assert topic.partition(0).read().poll(max_records=200)[50].value == VALUES[50]
        assert topic.arrow().read_all().num_rows == 120
        caplog.clear()
        with topic.group("them") as group:
            assert [each.value for each in group.follow(timeout=0)] == VALUES
        assert any("are read from" in each for each in caplog.messages)
        again = pickle.loads(pickle.dumps(topic))
    with again:
        assert values_of(again) == VALUES


def test_verify_is_not_deceived_by_donors(path: Path, copy: Path) -> None:
    spoil_two_batches(path)
    with Topic.open(path, mode="r", donors=[copy]) as topic:
        assert len(topic.verify().damage) == 2


def test_without_what_it_needs_the_reader_raises_or_passes_over(path: Path, copy: Path) -> None:
    """One of two neighbouring batches is damaged in the donor as well: none of them is handed out in its place."""
    name = segments(path)[1].relative_to(path)
    at = second_batch(path / name)
    spoil(path / name, HEADER_BYTES + 140, at + 140)
    spoil(copy / name, HEADER_BYTES + 140)
    with Topic.open(path, mode="r", donors=[copy]) as topic:
        with pytest.raises(CorruptLogError):
            values_of(topic)
        reader = topic.read(on_gap="skip")
        found = [each.value for each in reader]
        assert len(found) < 120 and len(reader.gaps) == 1 and len(reader.healed) == 1
        assert found == [each for each in VALUES if each in found]


def test_a_batch_of_another_history_is_not_handed_out(path: Path, tmp_path: Path) -> None:
    """Two topics that were split have other records at the same places. Neither is a donor of the other there."""
    base, split = tmp_path / "base" / path.name, tmp_path / "split" / path.name
    write(base, VALUES[:4])
    for each, letter in ((path, b"a"), (split, b"b")):
        shutil.copytree(base, each)
        write(each, [letter * 100] * 40)
    name = segments(path)[-1].relative_to(path)
    assert (split / name).stat().st_size == (path / name).stat().st_size
    spoil(path / name, second_batch(path / name) + 140)
    with Topic.open(path, mode="r", donors=[split]) as topic, pytest.raises(CorruptLogError):
        values_of(topic)


def test_a_batch_that_does_not_follow_the_one_before_is_not_handed_out(path: Path, tmp_path: Path) -> None:
    """The disk has lost a write, and shows a whole batch of an older history. What follows it is not joined to it."""
    base, split = tmp_path / "base" / path.name, tmp_path / "split" / path.name
    write(base, VALUES[:4])
    for each, letter in ((path, b"a"), (split, b"b")):
        shutil.copytree(base, each)
        write(each, [letter * 100] * 20)
    whole = tmp_path / "whole" / path.name
    shutil.copytree(path, whole)
    name = segments(path)[0].relative_to(path)
    places, at = [], HEADER_BYTES
    content = (path / name).read_bytes()
    while at < len(content):
        places.append(at)
        at += int.from_bytes(content[at + 12 : at + 16], "little")
    other = (split / name).read_bytes()
    strange, damaged = places[1], places[2]
    (path / name).write_bytes(content[:strange] + other[strange:damaged] + content[damaged:])
    spoil(path / name, damaged + 20)
    with Topic.open(path, mode="r", donors=[whole]) as topic, topic.read() as reader:
        handed: list[bytes | None] = []
        with pytest.raises(CorruptLogError):
            handed.extend(each.value for each in reader)
        assert not reader.healed


def test_compressed_and_large_batches_come_in_pieces(path: Path, tmp_path: Path) -> None:
    values = [b"%04d" % number + bytes(40_000) for number in range(300)]
    write(path, values, compression="zlib", batch_bytes=1 << 20, segment_bytes=1 << 30)
    copy = tmp_path / "copy" / path.name
    snapshot(path, copy, links=False)
    [segment] = segments(path)
    segment.unlink()
    with Topic.open(path, mode="r", donors=[copy]) as topic:
        reader = topic.read()
        assert [each.value for each in reader] == values
        assert len(reader.healed) == 1  # the pieces that neighbour each other are one
        healed = list(reader.healed)
        reader.seek("begin")
        assert len(list(reader)) == 300 and reader.healed == healed


@pytest.mark.parametrize("is_wiped", [False, True], ids=["headers", "everything"])
def test_every_start_in_damage_of_many_batches_is_read_from_a_donor(
    path: Path, tmp_path: Path, is_wiped: bool
) -> None:
    large = {"batch_bytes": 1 << 20, "segment_bytes": 1 << 30}
    write(path, [b"%04d" % number + bytes(40_000) for number in range(200)], **large)
    copy = tmp_path / "copy" / path.name
    snapshot(path, copy, links=False)
    with Topic.open(path, mode="r") as topic:
        records, batches = list(topic.read()), list(topic.batches())
    [segment] = segments(path)
    first, last = (HEADER_BYTES + each.offsets[0] for each in (batches[1], batches[-1]))
    if is_wiped:
        content = segment.read_bytes()
        segment.write_bytes(content[:first] + bytes(last - first) + content[last:])
    else:
        spoil(segment, *(HEADER_BYTES + each.offsets[0] + 20 for each in batches[1:-1]))
    with Topic.open(path, mode="r", donors=[copy]) as topic:
        assert list(topic.read()) == records
        for each in batches[1:]:
            start = each.offsets[3]
            assert list(topic.read(start)) == [record for record in records if record.offset >= start]


def test_a_donor_that_changes_after_the_proof_is_no_donor(
    path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_two_batches(path)
    name = segments(path)[1].relative_to(path)
    prove = Donors.prove

    def proven(*arguments: Any, **options: Any) -> Any:
        found = prove(*arguments, **options)
        content = (copy / name).read_bytes()
        at = second_batch(copy / name)
        (copy / name).write_bytes(content[:at] + bytes(200) + content[at + 200 :])
        return found

    monkeypatch.setattr(Donors, "prove", proven)
    with Topic.open(path, mode="r", donors=[copy]) as topic, pytest.raises(CorruptLogError):
        values_of(topic)


def test_the_same_damage_is_reported_once(path: Path, copy: Path) -> None:
    spoil_two_batches(path)
    with Topic.open(path, mode="r", donors=[copy]) as topic:
        reader = topic.read()
        assert len(list(reader)) == 120
        healed = list(reader.healed)
        reader.seek("begin")
        assert len(list(reader)) == 120 and reader.healed == healed
        assert logging.getLogger("loglib") is not None and "are read from" in str(healed[0])


def test_donor_has_no_batch_where_its_bytes_end_inside_one(path: Path) -> None:
    write(path)
    log_id = topic_file.read(REAL, str(path))
    assert log_id is not None
    donor = Donor(REAL, str(path / "0000"), Identity.of(log_id[0], 0))
    first = donor.log.header_around(0, donor.mark)
    assert donor.batch(0, first.length).header == first
    for length in (8, first.length - 8, first.length + 8):
        with pytest.raises(CorruptLogError):
            donor.batch(0, length)
    with pytest.raises(CorruptLogError, match="found 2 batches, expected one"):
        donor.batch(0, first.length + donor.log.header_around(first.next_offset, donor.mark).length)
    donor.release_files()
