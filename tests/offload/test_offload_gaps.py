"""Gaps of a log that is archived or uploaded: they travel with their bytes, and what is healed later is not lost."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from builders import spoil
from s3_server import s3_server
from tiered import records, seal

from conftest import NOW, QUIET
from loglib import CorruptLogError, Retention, Topic, repair, testing
from loglib.config.times import to_datetime
from loglib.log.gaps import NAME as GAPS
from loglib.log.reader import StartLike
from loglib.offload import archive, archived, manifest_log, read_archive, s3, tier, tiered
from loglib.segment import HEADER_BYTES


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "elsewhere" / "topic"


class Damaged:
    """A topic with three sealed segments of three batches, of which those at `numbers` in the first are a gap."""

    def __init__(self, path: Path, *numbers: int) -> None:
        self.path = path
        self.file = path / "0000" / f"{0:020d}.log"
        with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
            for segment in range(3):
                for number in range(3):
                    topic.append(b"%d-%d" % (segment, number), timestamp=NOW + 10 * segment + number, sync=True)
                topic.partition(0).roll()
            self.bases = [each.base_offset for each in topic.partition(0).segments]
        self.whole = self.file.read_bytes()
        self.size = (len(self.whole) - HEADER_BYTES) // 3
        for number in numbers:
            spoil(self.file, HEADER_BYTES + number * self.size + 100)
        repair(path)

    def heal(self, end: int = 3) -> None:
        """Put the bytes back, of the batches below `end`."""
        size = HEADER_BYTES + end * self.size
        self.file.write_bytes(self.whole[:size] + self.file.read_bytes()[size:])
        repair(self.path)

    def drop(self, segments: int) -> None:
        with Topic.open(self.path, create=True) as topic:
            topic.partition(0).delete_before(self.bases[segments])

    def retain(self, to: Path | str) -> list[bool]:
        """What retention drops that waits for the archive only."""
        policy = Retention(age=None, bytes=0, archive=to, archive_grace=timedelta(0))
        with testing.open_topic(self.path, clock=lambda: 2 * NOW, alter=True, retention=policy) as topic:
            return [each.drop for each in topic.retain()]


def values(topic: Topic) -> list[bytes | None]:
    return [each.value for each in records(topic)]


ALL = [b"%d-%d" % (segment, number) for segment in range(3) for number in range(3)]


# --- an archive ------------------------------------------------------------------------------------------------------


def of_archive(to: Path, start: StartLike = "begin") -> list[bytes]:
    found: list[bytes] = read_archive(to, start).read_all()["value"].to_pylist()
    return found


def test_what_was_healed_after_it_was_archived_is_archived_and_then_dropped(path: Path, to: Path) -> None:
    damaged = Damaged(path, 1)
    archive(path, to)
    damaged.heal()
    assert damaged.retain(to) == [False] * 4, "its record is only in the log"
    made = archive(path, to)
    (partition,) = made.partitions
    assert not partition.gaps and [each.rows for each in partition.healed] == [1]
    assert made.rows == 9 and archived(to) == made == archive(path, to)
    assert of_archive(to) == ALL, "in the order of the log"
    assert of_archive(to, 2 * damaged.size) == ALL[2:]
    with Topic.open(path, mode="r") as topic:
        for number in range(3):
            assert topic.arrow(number * damaged.size, archive=to).read_all().num_rows == 9 - number
    assert damaged.retain(to) == [True, True, True, False]
    with Topic.open(path, mode="r") as topic:
        assert topic.arrow(archive=to).read_all()["value"].to_pylist() == ALL


def test_a_start_by_time_finds_what_was_healed(path: Path, to: Path) -> None:
    damaged = Damaged(path, 1)
    archive(path, to)
    damaged.heal()
    archive(path, to)
    for number in range(3):
        assert of_archive(to, to_datetime(NOW + number)) == ALL[number:], number
    assert not of_archive(to, to_datetime(NOW + 30))


def test_a_start_by_time_leaves_out_what_is_earlier_after_an_archived_gap(path: Path, to: Path) -> None:
    """The gap had the first event of that time. The union then began with the end of the archive."""
    with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
        for number, time in enumerate((NOW, NOW + 50, NOW + 1)):
            topic.append(b"%d" % number, timestamp=time, sync=True)
        topic.partition(0).roll()
        base = topic.partition(0).segments[1].base_offset
    spoil(path / "0000" / f"{0:020d}.log", HEADER_BYTES + base // 3 + 100)
    repair(path)
    archive(path, to)
    with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
        for value, time in ((b"early", NOW + 30), (b"late", NOW + 60), (b"last", NOW + 10)):
            topic.append(value, timestamp=time, sync=True)

        def since(time: int) -> list[bytes]:
            found: list[bytes] = topic.arrow(to_datetime(time), archive=to).read_all()["value"].to_pylist()
            return found

        assert since(NOW + 40) == [b"late", b"last"]
        assert since(NOW + 70) == []
        assert since(NOW) == [b"0", b"2", b"early", b"late", b"last"]


def test_a_start_by_time_after_an_archived_gap_is_the_end_of_the_archive_if_damage_hides_it(
    path: Path, to: Path
) -> None:
    with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
        topic.append(b"lost", timestamp=NOW + 50, sync=True)
        topic.partition(0).roll()
        end = topic.partition(0).segments[1].base_offset
    spoil(path / "0000" / f"{0:020d}.log", HEADER_BYTES + 100)
    repair(path)
    archive(path, to)
    with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
        at = [topic.append(b"%d" % number, timestamp=NOW + 30 + number, sync=True).offset for number in range(3)]
    assert at[0] == end
    spoil(path / "0000" / f"{end:020d}.log", HEADER_BYTES + at[1] - end + 100)
    with Topic.open(path, mode="r") as topic:
        start = to_datetime(NOW + 32)
        found = topic.arrow(start, archive=to, on_damage="skip").read_all()
        assert found["value"].to_pylist() == [b"0", b"2"], "the damaged record may be the first of that time"
        with pytest.raises(CorruptLogError):
            topic.arrow(start, archive=to).read_all()


def test_a_segment_that_is_lost_still_does_not_hold_retention(path: Path, to: Path) -> None:
    damaged = Damaged(path, 1)
    archive(path, to)
    assert damaged.retain(to) == [True, True, True, False]


def test_what_of_a_gap_is_healed_is_archived_and_the_rest_stays_a_gap(path: Path, to: Path) -> None:
    damaged = Damaged(path, 0, 1, 2)
    archive(path, to)
    damaged.heal(2)
    (partition,) = archive(path, to).partitions
    assert partition.gaps == ((2 * damaged.size, 3 * damaged.size),)
    assert of_archive(to) == ALL[:2] + ALL[3:]
    assert damaged.retain(to) == [True, True, True, False]


def test_a_gap_that_was_dropped_in_part_stays_one_in_that_part(path: Path, to: Path) -> None:
    damaged = Damaged(path, 1)
    spoil(path / "0000" / f"{damaged.bases[1]:020d}.log", HEADER_BYTES + 100)
    repair(path)
    archive(path, to)
    damaged.drop(1)
    (partition,) = archive(path, to).partitions
    assert partition.gaps[0] == (damaged.size, 2 * damaged.size) and not partition.healed


# --- a place ---------------------------------------------------------------------------------------------------------


def test_what_was_healed_after_it_was_uploaded_is_uploaded_again_and_then_dropped(path: Path, to: Path) -> None:
    damaged = Damaged(path, 1)
    made = tier(path, to)
    assert [each.lost for each in made.partitions[0].segments] == [damaged.size, 0, 0]
    damaged.heal()
    assert damaged.retain(to) == [False] * 4, "its record is only in the log"
    again = tier(path, to)
    assert again.version == made.version + 1 and not any(each.lost for each in again.partitions[0].segments)
    assert (to / "0000" / damaged.file.name).read_bytes() == damaged.whole and not list(to.glob("0000/.*"))
    assert tier(path, to) == again == tiered(to)
    assert damaged.retain(to) == [True, True, True, False]
    with Topic.open(path, mode="r", tier=to) as topic:
        assert values(topic) == ALL
    with Topic.open(to, mode="r") as place:
        assert values(place) == ALL and not place.verify().gaps


def test_what_of_a_segment_is_healed_is_uploaded_and_the_rest_stays_a_gap(path: Path, to: Path) -> None:
    damaged = Damaged(path, 0, 1, 2)
    tier(path, to)
    damaged.heal(2)
    made = tier(path, to)
    assert [each.lost for each in made.partitions[0].segments] == [damaged.size, 0, 0]
    assert tier(path, to) == made, "there is no more"
    assert damaged.retain(to) == [True, True, True, False]
    with Topic.open(path, mode="r", tier=to) as topic:
        assert values(topic) == ALL[:2] + ALL[3:]


def test_a_segment_that_was_healed_and_dropped_is_not_uploaded_again(path: Path, to: Path) -> None:
    damaged = Damaged(path, 1)
    made = tier(path, to)
    damaged.heal()
    damaged.drop(1)
    assert tier(path, to) == made
    assert damaged.retain(to) == [True, True, False]


def test_a_place_keeps_the_gaps_of_what_it_has(path: Path, to: Path) -> None:
    """The next upload told it of the log's gaps alone, and its damaged bytes were no gap any more."""
    damaged = Damaged(path, 1)
    tier(path, to)
    damaged.heal()
    damaged.drop(1)
    with Topic.open(path, create=True) as topic:
        seal(topic)
        base = topic.partition(0).segments[-2].base_offset
    spoil(path / "0000" / f"{base:020d}.log", HEADER_BYTES + 200)
    repair(path)
    tier(path, to)
    with Topic.open(to, mode="r") as place:
        assert [each.offsets.start for each in place.verify().gaps] == [
            damaged.size,
            base,
        ] and not place.verify().damage
    with Topic.open(path, mode="r", tier=to) as topic:
        assert ALL[1] not in values(topic) and len(topic.verify().gaps) == 2


def test_a_repair_keeps_the_gaps_of_what_only_the_place_has(path: Path, to: Path) -> None:
    """Past and tail were read; another repair forgot the gap, and reading the past failed."""
    damaged = Damaged(path, 1)
    tier(path, to)
    damaged.drop(2)
    (to / "0000" / GAPS).unlink()  # the place's own list does not help it
    for _ in range(2):
        spoil(path / "0000" / f"{damaged.bases[2]:020d}.log", HEADER_BYTES + 100)
        repair(path)
        with Topic.open(path, mode="r", tier=to) as topic:
            assert {ALL[0], ALL[2]} <= {*values(topic)} and ALL[1] not in values(topic)


def test_a_topic_without_its_list_of_gaps_has_those_of_its_place(
    path: Path, to: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = Damaged(path, 1)
    tier(path, to)
    damaged.drop(2)
    (path / "0000" / GAPS).unlink()
    with Topic.open(path, mode="r", tier=to) as topic:
        assert values(topic) == [ALL[0], *ALL[2:]]
    spoil(to / "0000" / GAPS, 5)
    with Topic.open(path, mode="r", tier=to) as topic, pytest.raises(CorruptLogError):
        values(topic)
    assert "no valid facts" in caplog.text


def test_a_damaged_list_of_gaps_in_a_place_is_made_anew_from_the_log(path: Path, to: Path) -> None:
    Damaged(path, 1)
    tier(path, to)
    whole = (to / "0000" / GAPS).read_bytes()
    spoil(to / "0000" / GAPS, 5)
    with Topic.open(path, create=True) as topic:
        seal(topic)
    spoil(sorted(path.glob("0000/*.log"))[-2], HEADER_BYTES + 100)
    repair(path)
    tier(path, to)
    with Topic.open(to, mode="r") as place:
        assert len(place.verify().gaps) == 2 and (to / "0000" / GAPS).read_bytes() != whole


def test_the_next_run_goes_on_if_another_has_uploaded_again_meanwhile(
    path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = Damaged(path, 1)
    tier(path, to)
    damaged.heal()
    commit, refused = manifest_log.commit, [False]
    monkeypatch.setattr(manifest_log, "commit", lambda *given: refused.pop() if refused else commit(*given))
    assert not any(each.lost for each in tier(path, to).partitions[0].segments)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_healed_segment_is_uploaded_again_to_a_store(
    path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    damaged = Damaged(path, 1)
    with s3_server() as store:
        place = store.uri("logs/topic")
        tier(path, place)
        damaged.heal()
        if large:
            monkeypatch.setattr(s3, "PART_BYTES", 1 << 12)
            monkeypatch.setattr(s3, "MOST_PARTS", 1)
        tier(path, place)
        with Topic.open(place, mode="r") as topic:
            assert values(topic) == ALL


def test_each_healed_gap_stands_between_the_files_around_it(path: Path, to: Path) -> None:
    damaged = Damaged(path, 1)
    second = path / "0000" / f"{damaged.bases[1]:020d}.log"
    whole = second.read_bytes()
    spoil(second, HEADER_BYTES + 100)
    repair(path)
    archive(path, to, file_bytes=1)
    damaged.heal()
    second.write_bytes(whole)
    repair(path)
    archive(path, to)
    assert of_archive(to) == ALL and len(archived(to).partitions[0].healed) == 2
