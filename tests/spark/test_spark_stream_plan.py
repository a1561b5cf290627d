"""The streaming source without Spark: options, and what one batch of a stream reads."""

import json
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_logs import all_records, random_topic

from conftest import NOW
from loglib import Batch, LogError, Topic
from loglib.format.batch import stored_header
from loglib.groups import TopicPartition
from loglib.spark.limits import Backlog, most_bytes, most_records, shares
from loglib.spark.options import Options, Trigger, parse
from loglib.spark.plan import Part
from loglib.spark.ranges import open_log
from loglib.spark.source import schema_of
from loglib.spark.stream_offsets import INITIAL, Offsets, Span, decode, encode

ZERO = Span(0, 0, 0)


def batches_of(path: Path) -> list[Batch]:
    with Topic.open(path, mode="r") as topic:
        return list(topic.batches())


def log_id_of(path: Path) -> bytes:
    with Topic.open(path, mode="r") as topic:
        return topic.log_id


def parsed(**options: object) -> Options:
    given = {"path": "/logs"} | {name: str(value) for name, value in options.items()}
    return parse(given, now_us=NOW, streaming=True)


# --- options -----------------------------------------------------------------------------------------


def test_options_of_streams_have_defaults_and_units() -> None:
    defaults = parsed()
    assert (defaults.start.otherwise, defaults.group) == ("end", None)
    assert defaults.trigger == Trigger(None, None, None, 900.0)
    limited = parsed(
        maxOffsetsPerTrigger=1000, minOffsetsPerTrigger=10, maxTriggerDelay="5m", maxBytesPerTrigger="1m",
        groupId="etl", isolation="read_committed",
    )  # fmt: skip
    assert limited.trigger == Trigger(1000, 1 << 20, 10, 300.0)
    assert limited.group == "etl"
    for text, seconds in (("250ms", 0.25), ("30 seconds", 30), ("1 hour", 3600), ("2min", 120), ("7S", 7)):
        assert parsed(minOffsetsPerTrigger=1, maxTriggerDelay=text).trigger.max_delay_s == seconds


def test_stream_may_start_at_the_end_and_at_the_beginning() -> None:
    assert parsed(startingOffsets="latest").start.otherwise == "end"
    assert parsed(startingOffsets="earliest").start.otherwise == "begin"
    assert parsed(startingOffsets='{"a": {"0": -1, "1": -2, "2": 7}}').start.named == {
        "a": {0: "end", 1: "begin", 2: 7}
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endingOffsets": "latest"}, "option endingOffsets is for batch reads, and a stream has no end"),
        ({"end": "end"}, "option end is for batch reads"),
        ({"maxOffsetsPerTrigger": 0}, "a number, at least 1"),
        ({"minOffsetsPerTrigger": 3, "maxOffsetsPerTrigger": 2}, "minOffsetsPerTrigger, 3, is above"),
        ({"maxTriggerDelay": "1m"}, "give both"),
        ({"minOffsetsPerTrigger": 3, "maxTriggerDelay": "soon"}, "a time like 500ms"),
        ({"maxBytesPerTrigger": "much"}, "a size like 64m"),
        ({"groupId": "a/b"}, "'a/b' is not a name"),
        ({"isolation": "read_uncommitted"}, "option isolation must be read_committed"),
        ({"maxOffsetPerTrigger": 3}, "did you mean maxOffsetsPerTrigger"),
    ],
)
def test_wrong_options_of_a_stream_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(**options)


def test_schema_is_known_for_options_of_either_kind(tmp_path: Path) -> None:
    path = {"path": str(random_topic(tmp_path / "topic", seed=1, batches=1))}
    for options in ({"startingOffsets": "latest"}, {"maxoffsetspertrigger": "5"}, {"endingOffsets": "latest"}):
        assert schema_of(path | options | {"columns": "value"}).names == ["value"]
    with pytest.raises(ValueError, match="option endingOffsets is for batch reads"):
        schema_of(path | {"maxOffsetsPerTrigger": "5", "endingOffsets": "latest"})
    with pytest.raises(ValueError, match="must be true or false"):
        schema_of(path | {"failOnDataLoss": "no"})


# --- offsets -----------------------------------------------------------------------------------------


def some_offsets() -> Offsets:
    spans = {
        TopicPartition("b", 10): Span(1, 2, 3),
        TopicPartition("b", 9): Span(4, 5, 6),
        TopicPartition("a", 0): ZERO,
    }
    return Offsets({"b": bytes(16), "a": bytes(range(16))}, spans)


def test_offsets_are_the_same_text_after_the_way_through_spark() -> None:
    text = json.dumps(encode(some_offsets()))
    assert decode(json.loads(text)) == some_offsets()
    assert json.dumps(encode(decode(json.loads(text)) or some_offsets())) == text
    assert list(json.loads(text)["end"]["b"]) == ["9", "10"]
    assert decode(json.loads(json.dumps(INITIAL))) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "offsets of version 2, and this loglib knows version 1"),
        ({"end": 7}, "no offset of loglib"),
        ({"from": {}}, "no offset of loglib"),
        ({"log": {"a": "00"}}, "no offset of loglib"),
        ({"log": {"a": "x", "b": "00"}}, "no offset of loglib"),
        ({"history": {"a": {"0": None}}}, "no offset of loglib"),
    ],
)
def test_offsets_of_something_else_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LogError, match=message):
        decode(encode(some_offsets()) | change)


# --- how much one batch reads ------------------------------------------------------------------------


class Batches(Backlog):
    """A backlog in memory: batches of the log as (length, number of records)."""

    def __init__(self, batches: list[tuple[int, int]], start: int = 0) -> None:
        self.start = start
        self.spans: list[tuple[int, int]] = []  # (base offset, number of records)
        self.end = 0
        for length, count in batches:
            self.spans.append((self.end, count))
            self.end += length

    def places(self) -> list[int]:
        """The offsets of all records, and the end."""
        places = [base + each for base, count in self.spans for each in range(count)]
        return [place for place in places if self.start <= place < self.end] + [self.end]

    def skip(self, offset: int, count: int) -> tuple[int, int]:
        rest = [place for place in self.places() if place >= offset]
        taken = min(count, len(rest) - 1)
        return rest[taken], taken

    def whole_batches(self, offset: int, limit: int) -> int:
        return max([offset, *(each for each in self.ends() if offset <= each <= limit)])

    def next_batch(self, offset: int) -> int:
        return min(each for each in self.ends() if each > offset)

    def ends(self) -> list[int]:
        return [base for base, _ in self.spans[1:]] + [self.end]


lengths = st.tuples(st.integers(1, 40), st.integers(1, 30)).map(lambda each: (8 * max(each[0], each[1]), each[1]))
logs = st.lists(st.lists(lengths, max_size=6), min_size=1, max_size=5)


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=30), st.integers(0, 1 << 42), st.integers(0, 1000))
def test_shares_are_whole_and_fair(weights: list[int], total: int, turn: int) -> None:
    parts = shares(weights, total, turn=turn)
    assert sum(parts) == min(total, sum(weights))
    assert all(0 <= part <= weight for part, weight in zip(parts, weights, strict=True))
    waiting = sum(weight > 0 for weight in weights)
    if total >= waiting:
        assert all(part > 0 for part, weight in zip(parts, weights, strict=True) if weight)
    if total <= sum(weights):
        exact = [weight * total / max(1, sum(weights)) for weight in weights]
        assert all(abs(part - each) <= waiting + 1 for part, each in zip(parts, exact, strict=True))


@given(logs, st.integers(1, 300), st.integers(0, 9), st.randoms(use_true_random=False))
def test_batch_has_exactly_the_records_that_are_asked_for(
    batches: list[list[tuple[int, int]]], count: int, turn: int, random: Random
) -> None:
    backlogs = [Batches(each) for each in batches]
    for each in backlogs:
        each.start = random.choice(each.places())
    every = sum(len(each.places()) - 1 for each in backlogs)
    ends = most_records(backlogs, count, turn=turn)
    taken = [sum(place < end for place in each.places()) for each, end in zip(backlogs, ends, strict=True)]
    assert sum(taken) == min(count, every)
    assert all(end in each.places() for each, end in zip(backlogs, ends, strict=True))
    waiting = [each.start < each.end for each in backlogs]
    if count >= sum(waiting):
        assert all(got > 0 for got, waits in zip(taken, waiting, strict=True) if waits)


@given(logs, st.integers(1, 3000), st.integers(0, 9))
def test_batch_has_at_most_the_bytes_that_are_asked_for_or_one_batch(
    batches: list[list[tuple[int, int]]], limit: int, turn: int
) -> None:
    backlogs = [Batches(each) for each in batches]
    ends = most_bytes(backlogs, limit, turn=turn)
    assert all(end in (0, *each.ends()) for each, end in zip(backlogs, ends, strict=True))
    read = [(each, end) for each, end in zip(backlogs, ends, strict=True) if end]
    assert bool(read) == any(each.end for each in backlogs)
    one = len(read) == 1 and read[0][1] == read[0][0].ends()[0]
    assert sum(ends) <= limit or one
    for each, end in zip(backlogs, ends, strict=True):  # the next batch of no partition has room
        assert end == each.end or sum(ends) + each.next_batch(end) - end > limit


def test_limit_is_used_whole_by_many_partitions() -> None:
    """The share of each of 60 partitions was below one batch, and 97 % of the limit was left."""
    backlogs = [Batches([(1000, 1000)] * 3) for _ in range(60)]
    for turn in range(6):
        ends = most_bytes(backlogs, 32_500, turn=turn)
        assert sum(end - each.start for each, end in zip(backlogs, ends, strict=True)) in (32_000, 20_000)
        for each, end in zip(backlogs, ends, strict=True):
            each.start = end
    assert all(each.start == each.end for each in backlogs)


@pytest.mark.parametrize("most", [most_records, most_bytes])
@given(logs, st.integers(1, 40))
def test_every_partition_comes_to_its_turn(most: Any, batches: list[list[tuple[int, int]]], limit: int) -> None:
    """Though the other partitions get new records all the time."""
    if not any(batches):
        return
    for waiting in [index for index, each in enumerate(batches) if each]:
        for turn in range(len(batches)):
            if most([Batches(each) for each in batches], limit, turn=turn)[waiting]:
                break
        else:
            raise AssertionError(f"partition {waiting} never gets a part")


@given(logs, st.integers(1, 300), st.integers(1, 3000))
def test_both_limits_together_hold_and_end(batches: list[list[tuple[int, int]]], count: int, limit: int) -> None:
    backlogs = [Batches(each) for each in batches]
    ends = [each.end for each in backlogs]
    every = sum(len(each.places()) - 1 for each in backlogs)
    for turn in range(every + 1):
        if [each.start for each in backlogs] == ends:
            break
        for each, end in zip(backlogs, ends, strict=True):
            each.end = end
        for each, end in zip(backlogs, most_records(backlogs, count, turn=turn), strict=True):
            each.end = end
        after = most_bytes(backlogs, limit, turn=turn)
        read = sum(place < end for each, end in zip(backlogs, after, strict=True) for place in each.places()[:-1])
        assert 0 < read <= count
        for each, end in zip(backlogs, after, strict=True):
            each.start = end
    assert [each.start for each in backlogs] == ends


@pytest.mark.parametrize("seed", range(3))
def test_backlog_of_a_log_is_counted_by_headers(tmp_path: Path, seed: int) -> None:
    path = random_topic(tmp_path / "topic", seed, partitions=1)
    records = all_records(path)
    places = [*(record.offset for record in records), records[-1].next_offset]
    bases = sorted({stored_header(batch).next_offset for batch in batches_of(path)})
    random = Random(seed)
    part = Part("topic", str(path), log_id_of(path), 0)
    with closing(open_log(part)) as log:
        mark = log.mark()
        for _ in range(200):
            low, high = sorted(random.sample(range(len(places)), 2))
            backlog = Backlog(part, log, mark, places[low], places[high], skip_damage=False)
            count = random.randint(1, len(places))
            taken = min(count, high - low)
            assert backlog.skip(places[low], count) == (places[low + taken], taken)
            limit = random.randint(places[low], places[high] + 50)
            ends = [base for base in bases if places[low] <= base <= min(limit, places[high])]
            if limit >= places[high]:
                ends.append(places[high])
            assert backlog.whole_batches(places[low], limit) == max([places[low], *ends])
            following = min([base for base in bases if base > places[low]])
            assert backlog.next_batch(places[low]) == min(following, places[high])
