"""Check: passes over what was written, and stops at the first byte that was not."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import NOW, last_segment, tree
from faulty_files import Unsynced
from loglib import CorruptLogError, LogError, Retention, Topic

Open = Callable[..., Topic]


def fill(open_topic: Open, **policies: Any) -> None:
    with open_topic(files=Unsynced(), **policies) as topic:
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
        report = topic.partition(0).check()
        assert (report.segments, report.batches, report.records) == (3, 4, 12)
        assert report.bytes == topic.partition(0).high_watermark
    assert tree(path) == before


def test_check_of_an_empty_partition_passes(open_topic: Open) -> None:
    assert open_topic().partition(0).check() == (1, 0, 0, 0)


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
                topic.partition(0).check()
            assert str(segment) in str(raised.value) or str(sorted((path / "0000").glob("*.log"))[index + 1]) in str(
                raised.value
            )
        segment.write_bytes(whole)
        topic.partition(0).check()


def test_bytes_above_the_mark_are_not_looked_at(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    with last_segment(path).open("ab") as file:
        file.write(b"torn")
    with Topic.open(path, mode="r") as topic:
        assert topic.partition(0).check().records == 12


def test_missing_first_segment_is_found(open_topic: Open, path: Path) -> None:
    fill(open_topic)
    for expected in ("a first segment at [1-9]", "None"):
        min((path / "0000").glob("*.log")).unlink()
        if expected == "None":
            for each in (path / "0000").glob("*.log"):
                each.unlink()
        with Topic.open(path, mode="r") as topic, pytest.raises(CorruptLogError, match=expected):
            topic.partition(0).check()


@pytest.mark.parametrize("forged", ["previous_crc", "running_max_timestamp", "append_time", "max_timestamp"])
def test_batch_that_contradicts_the_one_before_is_found(
    forged: str, open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is whole by itself: only the links between them are wrong."""
    from loglib import batch as module
    from loglib import writer

    topic = open_topic()
    topic.append(b"one", sync=True)

    def stamp(body: Any, **facts: Any) -> Any:
        if forged == "max_timestamp":
            body = body._replace(max_timestamp=body.max_timestamp + 1)
            facts["running_max_timestamp"] += 1
        else:
            facts[forged] += -1 if forged == "append_time" else 1
        return module.stamp(body, **facts)

    monkeypatch.setattr(writer, "stamp", stamp)
    topic.append(b"two", sync=True)
    monkeypatch.undo()
    with pytest.raises(CorruptLogError, match="previous CRC, running maximum") as raised:
        topic.partition(0).check()
    assert raised.value.file_position > 4096


def test_check_that_retention_overtakes_begins_again(open_topic: Open, path: Path) -> None:
    """Never a missing file: the log has moved on, and what there is now is checked."""
    fill(open_topic, retention=Retention(age=None, bytes=0))
    topic = open_topic(files=Unsynced())

    class Overtaken(Unsynced):
        done = False

        def open_read(self, path: str) -> int:
            if path.endswith(".log") and not self.done:
                Overtaken.done = True
                topic.retain()
            return super().open_read(path)

    with Topic.open(path, mode="r", files=Overtaken()) as reading:
        report = reading.partition(0).check()
    assert Overtaken.done and report.segments == 1


def test_file_that_vanishes_without_retention_is_no_reason_to_begin_again(open_topic: Open, path: Path) -> None:
    fill(open_topic)

    class Vanishing(Unsynced):
        def open_read(self, path: str) -> int:
            if path.endswith(".log"):
                raise FileNotFoundError(2, "gone", path)
            return super().open_read(path)

    with Topic.open(path, mode="r", files=Vanishing()) as reading, pytest.raises(CorruptLogError, match="no file"):
        reading.partition(0).check()
