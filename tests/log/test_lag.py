"""Lag: how far a position is behind, counted from batch headers, also while retention and rolls go on."""

from collections.abc import Callable

import pytest

from conftest import NOW, SECOND, Clock
from loglib import LogClosedError, OffsetOutOfRangeError, Topic
from loglib.log import lag
from loglib.log.lag import Lag, measure_lag

Opener = Callable[..., Topic]


@pytest.fixture
def topic(open_topic: Opener, clock: Clock) -> Topic:
    """Three segments of two batches of three records, a second apart each."""
    topic = open_topic()
    for number in range(6):
        clock.now += SECOND
        topic.append_many([b"%d" % number] * 3)
        topic.flush()
        if number % 2:
            topic.partition(0).roll()
    return topic


def test_every_record_is_counted_from_every_place(topic: Topic, clock: Clock) -> None:
    log = topic.partition(0)._access.log
    records = list(topic.read())
    for index, record in enumerate(records):
        found = measure_lag(log, record.offset, now_us=clock.now, count_records=True)
        seconds = (clock.now - NOW) / SECOND - 1 - index // 3
        assert found == Lag(log.mark().flushed_end - record.offset, seconds, len(records) - index)
        assert measure_lag(log, record.offset, now_us=clock.now) == found._replace(records=None)
    end = log.mark().flushed_end
    assert measure_lag(log, end, now_us=clock.now, count_records=True) == Lag(0, 0.0, 0)
    assert measure_lag(log, end, now_us=clock.now) == Lag(0, 0.0)


def test_partition_tells_the_lag_of_any_position(topic: Topic, clock: Clock) -> None:
    partition = topic.partition(0)
    end = partition.high_watermark
    for record in topic.read():
        expected = measure_lag(partition._access.log, record.offset, now_us=clock.now, count_records=True)
        assert partition.lag(record.offset, count_records=True) == expected
        assert partition.lag(record.offset) == expected._replace(records=None)
    assert partition.lag(end) == partition.lag(end + 1000) == Lag(0, 0.0)
    topic.close()
    with pytest.raises(LogClosedError):
        partition.lag(0)


def test_what_retention_has_dropped_does_not_count(topic: Topic, clock: Clock) -> None:
    partition = topic.partition(0)
    partition._access.writer().drop_before(partition.segments[1].base_offset)
    found = measure_lag(partition._access.log, 0, now_us=clock.now, count_records=True)
    assert found == Lag(partition.log_end_offset - partition.log_start_offset, 3.0, 12)


def test_clock_behind_the_log_gives_no_negative_lag(topic: Topic) -> None:
    assert measure_lag(topic.partition(0)._access.log, 0, now_us=NOW - SECOND).seconds == 0.0


def test_retention_in_the_middle_of_a_measurement_is_waited_out(
    topic: Topic, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = topic.partition(0)
    measure = lag._measure

    def dropped_meanwhile(*arguments: object, **facts: object) -> Lag:
        monkeypatch.setattr(lag, "_measure", measure)
        partition._access.writer().drop_before(partition.segments[2].base_offset)
        raise OffsetOutOfRangeError(0, 0, 1, 2)

    monkeypatch.setattr(lag, "_measure", dropped_meanwhile)
    assert measure_lag(partition._access.log, 0, now_us=clock.now, count_records=True).records == 6
