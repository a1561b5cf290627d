"""log/polars_scan.py: a lazy frame has the rows of a full read and its query, and reads less for them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from builders import calm, spoil
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.io.plugins import register_io_source

from conftest import NOW, SECOND
from loglib import CorruptLogError, LogClosedError, Topic, testing
from loglib.errors import DecodeError
from loglib.format.arrow import SCHEMA
from loglib.log.polars_scan import Scan, bounds_of
from loglib.testing import Call, WatchedFiles

Open = Callable[..., Topic]
PARTITIONS = 3
COUNT = 400


class CountingFiles(WatchedFiles):
    """Files that count the bytes of segments that are read, by partition."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def after(self, call: Call, result: Any) -> Any:
        if call.name == "pread" and call.path.endswith(".log"):
            partition = Path(call.path).parent.name
            self.counts[partition] = self.counts.get(partition, 0) + len(result)
        return result

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topic]:
    """Records with event times that do not rise, in batches of all sizes."""
    random = Random(7)
    path = tmp_path_factory.mktemp("scan") / "topic"
    with testing.open_topic(path, create=True, partitions=PARTITIONS, durability="os") as topic:
        for number in range(COUNT):
            late = random.choice([0, 0, 0, -50])
            key = random.choice([None, b"a", b"b"])
            time = NOW + (number + late) * SECOND
            topic.append(b"%d" % number, key=key, partition=number % PARTITIONS, timestamp=time)
            if random.random() < 0.2:
                topic.flush()
    with Topic.open(path, mode="r") as reading:
        yield reading


def at(seconds: float) -> datetime:
    """A time of the stored records, as a predicate takes it."""
    return datetime.fromtimestamp(NOW / 1_000_000, UTC) + timedelta(seconds=seconds)


def ordered(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort("partition", "offset")


partition, offset, timestamp = pl.col("partition"), pl.col("offset"), pl.col("timestamp")
OFFSETS = st.integers(-10, 40_000)
TIMES = st.floats(-100, COUNT + 100).map(at)
NUMBERS = st.integers(-1, PARTITIONS)
COMPARED = st.sampled_from(["__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__"])
COMPARISONS = st.one_of(
    st.builds(lambda how, value: getattr(offset, how)(value), COMPARED, OFFSETS | OFFSETS.map(float)),
    st.builds(lambda how, value: getattr(timestamp, how)(value), COMPARED, TIMES),
    st.builds(lambda how, value: getattr(partition, how)(value), COMPARED, NUMBERS),
    st.builds(lambda how, value: getattr(pl.lit(value), how)(offset), COMPARED, OFFSETS),
    st.builds(partition.is_in, st.lists(NUMBERS, max_size=3)),
    st.builds(offset.is_between, OFFSETS, OFFSETS, st.sampled_from(["both", "left", "right", "none"])),
    st.builds(timestamp.is_between, TIMES, TIMES),
    st.sampled_from([pl.col("key") == b"a", pl.col("key").is_null(), offset % 2 == 0, offset > partition,
                     timestamp.dt.second() < 30, pl.col("value").bin.size() == 2, (partition + 1) % 2 == 0]),
)  # fmt: skip
PREDICATES = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.builds(operator.and_, inner, inner), st.builds(operator.or_, inner, inner), st.builds(operator.inv, inner)
    ),
    max_leaves=6,
)  # fmt: skip


@settings(calm, max_examples=50)
@given(PREDICATES, st.none() | st.integers(0, COUNT // PARTITIONS - 1), st.none() | st.integers(0, 50))
def test_rows_are_those_of_a_full_read_that_is_filtered(
    stored: Topic, predicate: pl.Expr, first: int | None, limit: int | None
) -> None:
    start: Any = "begin"
    if first is not None:
        start = {1: list(stored.partition(1).read())[first].offset}
    everything = pl.DataFrame(stored.arrow(start))
    scan = stored.scan_polars(start)
    assert ordered(scan.filter(predicate).collect()).equals(ordered(everything.filter(predicate)))
    narrow = scan.filter(predicate).select("offset", "partition").collect()
    assert ordered(narrow).equals(ordered(everything.filter(predicate).select("offset", "partition")))
    if limit is not None:
        assert len(scan.filter(predicate).head(limit).collect()) == min(limit, len(everything.filter(predicate)))
        found = scan.head(limit).filter(predicate).collect()
        assert found.equals(everything.head(limit).filter(predicate))


def test_end_is_that_of_the_call(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    topic.append(b"a", partition=0, sync=True)
    scan = topic.scan_polars()
    ended = topic.scan_polars(end={0: "begin"})
    topic.append(b"b", partition=1, sync=True)
    assert scan.collect()["value"].to_list() == [b"a"]
    assert scan.filter(partition == 1).collect().is_empty() and ended.collect().is_empty()
    assert scan.join(scan, on="offset").collect().height == 1
    assert scan.filter(offset == offset.max()).collect(engine="streaming")["value"].to_list() == [b"a"]
    assert topic.partition(1).scan_polars().collect()["value"].to_list() == [b"b"]
    assert topic.scan_polars("end").collect().is_empty()


@pytest.fixture
def large(path: Path) -> Iterator[tuple[Topic, CountingFiles]]:
    """Three partitions with 4 MB each, a record of 10 kB each second, in segments of 1 MiB."""
    with testing.open_topic(path, create=True, partitions=3, durability="os", segment_bytes=1 << 20) as topic:
        for number in range(400):
            for each in range(3):
                topic.append(bytes(10_000), partition=each, timestamp=NOW + number * SECOND)
        topic.flush()
    files = CountingFiles()
    with testing.open_topic(path, mode="r", files=files) as reading:
        yield reading, files


def bytes_read(files: CountingFiles, query: pl.LazyFrame) -> int:
    files.counts.clear()
    query.collect()
    return files.total


def test_predicate_on_places_reads_less(large: tuple[Topic, CountingFiles]) -> None:
    topic, files = large
    scan = topic.scan_polars()
    whole = bytes_read(files, scan.select("value"))
    assert whole > 12_000_000
    assert bytes_read(files, scan.filter(partition == 1)) < whole * 0.4 and set(files.counts) == {"0001"}
    assert bytes_read(files, scan.filter(partition.is_in([0, 2]))) < whole * 0.7
    assert set(files.counts) == {"0000", "0002"}
    end = topic.partition(0).high_watermark
    assert bytes_read(files, scan.filter(offset > end - 100_000)) < whole * 0.3
    assert bytes_read(files, scan.filter(offset < 100_000)) < whole * 0.3
    assert bytes_read(files, scan.filter(offset.is_between(50_000, 100_000))) < whole * 0.3
    assert bytes_read(files, scan.filter(timestamp >= at(390))) < whole * 0.5  # with the search
    both = (timestamp >= at(390)) & (partition == 2) & (pl.col("value").bin.size() > 5)
    assert bytes_read(files, scan.filter(both)) < whole * 0.2
    assert bytes_read(files, scan.filter(timestamp < at(10))) > 12_000_000  # an early event may come late
    assert bytes_read(files, scan.filter((partition == 1) | (offset < 1000))) > 12_000_000


def test_limit_ends_the_read(large: tuple[Topic, CountingFiles]) -> None:
    topic, files = large
    assert bytes_read(files, topic.scan_polars().head(3)) < 3_000_000
    assert topic.scan_polars().head(0).collect().is_empty()


def test_columns_that_a_query_does_not_use_are_not_decoded(open_topic: Open) -> None:
    """Values that are no JSON would raise."""
    topic = open_topic()
    topic.append_many([b"no JSON"] * 3, keys=[b"k"] * 3)
    topic.flush()
    scan = topic.scan_polars(decode="json", schema={"a": "int64"})
    assert scan.select("key").collect()["key"].to_list() == ["k"] * 3
    assert scan.collect_schema()["value"] == pl.Struct({"a": pl.Int64})
    with pytest.raises(DecodeError, match="is not JSON"):
        scan.collect()


def test_json_and_text_are_filtered_by_their_fields(open_topic: Open) -> None:
    topic = open_topic()
    topic.append_many([b'{"ms": %d}' % number for number in range(100)])
    topic.flush()
    scan = topic.scan_polars(decode="json", schema={"ms": "int64"}).unnest("value")
    assert scan.filter(pl.col("ms") > 90).select("ms").collect()["ms"].to_list() == list(range(91, 100))
    texts = topic.scan_polars(decode="text").filter(pl.col("value").str.contains("99"))
    assert texts.collect()["value"].to_list() == ['{"ms": 99}']
    with pytest.raises(ValueError, match="needs schema="):
        topic.scan_polars(decode="json")


@pytest.mark.parametrize("byte", [10, 130], ids=["header", "body"])
def test_damage_is_reported_or_skipped_as_in_a_read(open_topic: Open, path: Path, byte: int) -> None:
    with open_topic(durability="os") as topic:
        for number in range(100):
            topic.append(b"%d" % number * 20)
            topic.flush()
        places = [record.offset for record in topic.read()]
    (file,) = path.glob("0000/*.log")
    spoil(file, 4096 + places[60] + byte)
    topic = open_topic(mode="r")
    with pytest.raises(CorruptLogError, match="byte"):
        topic.scan_polars().collect()
    scan = topic.scan_polars(on_damage="skip")
    assert scan.collect()["offset"].to_list() == places[:60] + places[61:]
    whole = places[:60] + places[61:]
    for first in (places[60], places[60] + 1, places[61], places[80]):
        after, before = scan.filter(offset >= first).collect(), scan.filter(offset < first).collect()
        assert after["offset"].to_list() == [each for each in whole if each >= first]
        assert before["offset"].to_list() == [each for each in whole if each < first]
        parts = list(scan_of(topic, on_damage="skip").rows(["offset"], optimized(offset >= first), None, None))
        assert pl.concat(parts)["offset"].equals(after["offset"])


def test_topic_that_is_closed_or_has_dropped_the_records_says_so(open_topic: Open) -> None:
    topic = open_topic(segment_bytes=1 << 20)
    topic.append(b"a", sync=True)
    scan = topic.scan_polars()
    topic.partition(0).roll()
    topic.append(b"b", sync=True)
    topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
    assert topic.scan_polars().collect()["value"].to_list() == [b"b"]
    assert scan.collect().is_empty()
    topic.close()
    with pytest.raises(LogClosedError):
        scan.collect()


def optimized(predicate: pl.Expr) -> pl.Expr:
    """The predicate as a source gets it: Polars gives constants the types of the columns."""
    frame = pl.DataFrame(schema=pl.DataFrame(SCHEMA.empty_table()).schema)
    seen: list[pl.Expr | None] = []

    def source(columns: Any, predicate: pl.Expr | None, limit: Any, size: Any) -> Iterator[pl.DataFrame]:
        seen.append(predicate)
        yield frame if columns is None else frame.select(columns)

    register_io_source(source, schema=frame.schema).filter(predicate).collect()
    assert seen[0] is not None
    return seen[0]


BOUNDS = {
    "nothing": (None, {}),
    "a comparison": (offset > 5, {"first": 6}),
    "turned round": (pl.lit(5) >= offset, {"stop": 6}),
    "equal": (offset == 5, {"first": 5, "stop": 6}),
    "not equal": (offset != 5, {}),
    "partitions": (partition.is_in([0, 2]) & (partition > 0), {"partitions": frozenset({2})}),
    "the stronger": ((offset < 9) & (offset < 7) & (offset >= 2), {"stop": 7, "first": 2}),
    "between": (offset.is_between(3, 9), {"first": 3, "stop": 10}),
    "between, open": (offset.is_between(3, 9, "none"), {"first": 4, "stop": 9}),
    "times between": (timestamp.is_between(at(1), at(2)), {"since_us": NOW + SECOND}),
    "or": ((offset < 9) | (partition == 1), {}),
    "a time": ((timestamp > at(1)) & (timestamp > at(0)), {"since_us": NOW + SECOND}),
    "an end by time": (timestamp < at(1), {}),
    "another column": ((pl.col("key") == b"a") & (offset <= 3), {"stop": 4}),
    "a function": (offset.abs() > 3, {}),
}


@pytest.mark.parametrize("predicate, expected", BOUNDS.values(), ids=BOUNDS)
def test_bounds_are_what_a_predicate_says_about_places(predicate: pl.Expr | None, expected: dict[str, Any]) -> None:
    given_predicate = None if predicate is None else optimized(predicate)
    assert bounds_of(given_predicate, range(3)) == bounds_of(None, range(3))._replace(**expected)


def test_constant_may_stand_first() -> None:
    """Polars' optimizer turns it round, so this is for versions that do not."""
    assert bounds_of(pl.lit(5, pl.Int64) < offset, range(1)).first == 6
    assert bounds_of(pl.lit(5, pl.Int64) == offset, range(1))[1:3] == (5, 6)


def test_expression_that_polars_cannot_show_bounds_nothing() -> None:
    """So it is for a form of JSON that another version has."""

    strange: Any = SimpleNamespace(meta=SimpleNamespace(serialize=lambda format: "[]"))  # noqa: A006
    assert bounds_of(strange, range(3)) == bounds_of(None, range(3))
    assert bounds_of(partition.cast(pl.String).str.to_integer(strict=True) // 0 > 1, range(2)).partitions == frozenset()


def scan_of(topic: Topic, **how: Any) -> Scan:
    """What `scan_polars` registers."""
    return Scan(
        logs=topic._logs, read=lambda ends: topic.read("begin", ends, **how), ends=topic.read("end").tell(),
        stream=lambda reader, columns: reader.arrow(columns), schema=SCHEMA,
    )  # fmt: skip


def test_rows_of_a_source_are_bounded_and_filtered(stored: Topic) -> None:
    """What Polars asks for, in this thread."""
    everything = pl.DataFrame(stored.arrow())
    scan = scan_of(stored)
    predicate = optimized((partition != 1) & (offset > 5000) & (offset <= 9001) & (timestamp > at(100)))
    found = pl.concat(scan.rows(["offset"], predicate, None, None))
    assert found["offset"].sort().equals(everything.filter(predicate)["offset"].sort())
    assert pl.concat(scan.rows(None, None, 5, None)).equals(everything.head(5))
    expected = everything.head(200).filter(predicate).select("key")
    assert pl.concat(scan.rows(["key"], predicate, 200, None)).equals(expected)
    assert pl.concat(scan.rows(None, None, None, None)).equals(everything)


def test_partitions_that_were_added_since_are_not_in_the_frame(open_topic: Open, path: Path) -> None:
    writer = open_topic(partitions=1)
    writer.append(b"a", sync=True)
    topic = Topic.open(path, mode="r")
    scan = topic.scan_polars()
    writer.close()
    Topic.add_partitions(path, 2)
    with open_topic() as writer:
        writer.append(b"b", partition=1, sync=True)
    assert topic.scan_polars().collect().height == 2
    assert scan.collect()["value"].to_list() == [b"a"]
