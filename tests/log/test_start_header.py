"""A damaged header at which a log begins is made anew as it was, also if only an archive or a tier has the past."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import spoil

from conftest import NOW, QUIET
from loglib import Topic, repair, testing
from loglib.config.times import to_datetime
from loglib.copies import snapshot
from loglib.offload import tier
from loglib.segment import START_HEADER as NAME
from loglib.segment import read_segment_header
from loglib.system.files import REAL

Times = list[int]


def made(path: Path, producers: int = 1) -> tuple[Path, Times]:
    """A topic of five segments, of which the first three are in a place only; the path of its first header."""
    times = [50, 90, 10, 20, 30]
    with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
        for number, each in enumerate(times):
            for producer in range(producers):
                topic.append(b"%d" % number, timestamp=NOW + each, producer=(f"p{producer}", number))
                topic.flush()
            topic.partition(0).roll()
        tier(topic, path.parent / "place")
        topic.partition(0).delete_before(topic.partition(0).segments[3].base_offset)
        return Path(topic.partition(0).segments[0].path), times


def header_of(path: Path, file: Path) -> object:
    with Topic.open(path, mode="r") as topic:
        return read_segment_header(REAL, str(file), topic._accesses[0].log.identity)


def test_a_start_by_time_leaves_no_record_out_after_the_first_header_was_repaired(path: Path) -> None:
    """Its largest event time was gone, so a search began behind records that only the place had."""
    file, times = made(path)
    before = header_of(path, file)
    spoil(file, 100)
    assert len(repair(path).repairs) == 1 and header_of(path, file) == before
    with Topic.open(path, mode="r", tier=path.parent / "place") as topic:
        assert not topic.verify().damage
        for late in range(0, 100, 5):
            expected = next((number for number, each in enumerate(times) if each >= late), 5)
            found = [record.value for record in topic.read(to_datetime(NOW + late))]
            assert found == [b"%d" % number for number in range(expected, 5)], late


def test_producers_that_the_first_header_knew_are_known_after_its_repair(path: Path) -> None:
    file, _ = made(path, producers=130)
    before = header_of(path, file)
    spoil(file, 100)
    repair(path)
    assert header_of(path, file) == before
    with Topic.open(path, create=True) as topic:
        assert topic.partition(0).last_sequence("p0") == topic.partition(0).last_sequence("p129") == 4


def test_producers_whose_file_is_gone_are_left_out(path: Path) -> None:
    file, _ = made(path, producers=130)
    spoil(file, 100)
    file.with_suffix(".producers").unlink()
    repair(path)
    with Topic.open(path, mode="r", tier=path.parent / "place") as topic:
        assert not topic.verify().damage


@pytest.mark.parametrize("wrong", ["gone", "damaged", "of another segment", "of another history"])
def test_a_copy_that_does_not_fit_does_not_count(path: Path, wrong: str) -> None:
    """The next segment still knows how late the events were."""
    file, times = made(path)
    copy = path / "0000" / NAME
    if wrong == "gone":
        copy.unlink()
    elif wrong == "damaged":
        spoil(copy, 200)
    else:
        with Topic.open(path, mode="r") as topic:
            (other,) = [each for each in topic.partition(0).segments if each.path == str(file)]
            header = read_segment_header(REAL, other.path, topic._accesses[0].log.identity)
        at = header.base_offset + 8 if wrong == "of another segment" else header.base_offset
        copy.write_bytes(header._replace(base_offset=at, previous_crc=header.previous_crc ^ 1).encode())
    spoil(file, 100)
    repair(path)
    with Topic.open(path, create=True) as topic:
        assert [record.value for record in topic.read()] == [b"3", b"4"] and not topic.verify().damage
    with Topic.open(path, mode="r", tier=path.parent / "place") as topic:
        assert next(iter(topic.read(to_datetime(NOW + max(times))))).value == b"1"


def test_a_log_of_one_segment_knows_nothing_of_what_was_before(path: Path) -> None:
    with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
        topic.append(b"0", timestamp=NOW, sync=True)
        topic.partition(0).roll()
        topic.append(b"1", timestamp=NOW + 1, sync=True)
        topic.partition(0).delete_before(topic.partition(0).segments[1].base_offset)
        (segment,) = topic.partition(0).segments
    (path / "0000" / NAME).unlink()
    spoil(Path(segment.path), 100)
    repair(path)
    with Topic.open(path, create=True) as topic:
        assert [record.value for record in topic.read()] == [b"1"] and not topic.verify().damage


def test_a_damaged_header_does_not_stop_what_drops_the_segments_before_it(path: Path) -> None:
    file, _ = made(path)
    with Topic.open(path, create=True) as topic:
        following = topic.partition(0).segments[1]
        spoil(Path(following.path), 100)
        topic.partition(0).delete_before(following.base_offset)
        assert topic.partition(0).log_start_offset == following.base_offset and not file.exists()


def test_a_snapshot_has_the_copy(path: Path, tmp_path: Path) -> None:
    made(path)
    snapshot(path, tmp_path / "snapshot")
    assert (tmp_path / "snapshot" / "0000" / NAME).read_bytes() == (path / "0000" / NAME).read_bytes()
