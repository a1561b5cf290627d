"""A reader that retention overtakes is told the range that is left, or begins again where that was meant."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from conftest import NOW
from loglib import OffsetOutOfRangeError, Retention, Topic
from loglib.log.lookup import resolve

Open = Callable[..., Topic]


def rolled(open_topic: Open, segments: int, **policies: Any) -> tuple[Topic, list[int]]:
    topic = open_topic(retention=Retention(age=None, bytes=0), **policies)
    offsets = []
    for number in range(segments):
        offsets.append(topic.append(b"%d" % number).offset)
        topic.partition(0).roll()
    return topic, offsets


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same handle", "another process's handle"])
def test_reader_overtaken_by_retention_is_told_the_range(elsewhere: bool, open_topic: Open, path: Path) -> None:
    """Its own segment is open and stays readable; the next ones are gone, which is not the end of the file."""
    topic, offsets = rolled(open_topic, 4)
    topic.append(b"last", sync=True)
    source = open_topic(mode="r") if elsewhere else topic
    reader = source.read()
    assert reader.poll()[0].value == b"0"
    for each in topic.partition(0).segments[:3]:
        assert each.sealed
    topic.partition(0)._access.writer().drop_before(offsets[3])
    if elsewhere:
        source.partition(0)._access.log.refresh()
    with pytest.raises(OffsetOutOfRangeError) as raised:
        while reader.poll():
            pass
    assert raised.value.log_start_offset == offsets[3]
    reader.seek("begin")
    assert [r.value for r in reader.poll(max_records=9)] == [b"3", b"last"]


def test_new_reader_racing_retention_is_told_the_range(open_topic: Open, path: Path) -> None:
    topic, offsets = rolled(open_topic, 4)
    with Topic.open(path, mode="r") as reading:
        log = reading.partition(0)._access.log
        stale = log.mark()
        topic.retain()
        with pytest.raises(OffsetOutOfRangeError):
            log.batch_base(offsets[1], stale)
        assert resolve(log, reading_time(NOW - 5), mark=stale) == topic.partition(0).log_start_offset
        with pytest.raises(OffsetOutOfRangeError):
            reading.read(offsets[1])


def reading_time(timestamp: int) -> Any:
    from loglib.config.arguments import Time

    return Time(timestamp)


@pytest.mark.parametrize("start", ["begin", "-1h", timedelta(hours=1)])
def test_start_that_is_no_offset_is_looked_for_again_when_retention_drops_it(
    start: Any, open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for an offset, and yet it was out of range: between its finding and its use the log start moved."""
    topic = open_topic()
    for number in range(6):
        topic.append(b"%d" % number, sync=True)
        topic.partition(0).roll()
    bases = [each.base_offset for each in topic.partition(0).segments]
    writer = topic.partition(0)._access.writer()
    to_drop = [bases[1], bases[3]]

    def overtaken(*arguments: Any, **keywords: Any) -> int:
        offset = resolve(*arguments, **keywords)
        if to_drop and arguments[1] != "end":
            writer.drop_before(to_drop.pop(0))
        return offset

    monkeypatch.setattr("loglib.log.reader.resolve", overtaken)
    assert [record.value for record in topic.read(start)] == [b"3", b"4", b"5"]
    reader = topic.read()
    to_drop[:] = [bases[4]]
    reader.seek(start)
    assert [record.value for record in reader] == [b"4", b"5"]
    with pytest.raises(OffsetOutOfRangeError):
        topic.read(bases[2])
    with pytest.raises(OffsetOutOfRangeError):
        reader.seek(bases[2])


def test_reader_overtaken_by_retention_raises_and_reports_no_gap(open_topic: Open, path: Path) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0))
    topic.append(b"old", sync=True)
    with Topic.open(path, mode="r") as reading:
        follower = reading.follow("begin", on_damage="skip")
        topic.partition(0).roll()
        topic.retain()
        with pytest.raises(OffsetOutOfRangeError):
            follower.poll()
        assert follower.gaps == []
