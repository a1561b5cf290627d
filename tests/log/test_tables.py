"""A topic, a partition and a reader are tables: for pyarrow, DuckDB, Polars and pandas, in constant memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import page_views
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from batch_contents import arrow_rows, columns, split
from builders import calm, forged, spoil
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import SECOND, Clock, fill, run_python
from loglib import CorruptLogError, LogClosedError, Topic
from loglib.format.arrow import SCHEMA
from loglib.format.columns import Columns

Open = Callable[..., Topic]


def rows_of(topic: Any, start: Any = "begin", end: Any = None) -> list[tuple[object, ...]]:
    """What the records say, as Arrow's Python values."""
    return [
        (
            record.key, record.value, record.partition, record.offset, record.timestamp,
            [{"key": name, "value": value} for name, value in record.headers] or None,
        )
        for record in topic.read(start, end)
    ]  # fmt: skip


def fetched(found: duckdb.DuckDBPyRelation | None) -> list[Any]:
    """The rows of DuckDB's answer."""
    assert found is not None
    return found.fetchall()


def rows_in(stream: pa.RecordBatchReader) -> list[tuple[object, ...]]:
    return [row for batch in stream for row in arrow_rows(batch)]


@settings(calm, max_examples=60)
@given(
    parts=st.lists(columns(), max_size=6),
    flushed=st.booleans(),
    batch_bytes=st.sampled_from([1, 50, 400, 5000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_a_stream_has_every_record_once_in_batches_of_the_size_asked_for(
    parts: list[Columns], flushed: bool, batch_bytes: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random = Random(seed)
    with Topic.open(
        tmp_path_factory.mktemp("t") / "t", create=True, partitions=1, durability="os", batch_records=7
    ) as topic:
        for part in parts:
            topic.append_many(part.values, keys=part.keys, timestamps=part.timestamps, headers=part.headers)
            if flushed or random.random() < 0.3:
                topic.flush()
        topic.flush()
        expected = rows_of(topic)
        batches = list(topic.arrow(batch_bytes=batch_bytes))
        assert [row for batch in batches for row in arrow_rows(batch)] == expected
        assert all(batch.num_rows for batch in batches)
        if expected:
            offsets = [record.offset for record in topic.read()]
            first, stop = sorted((random.randrange(len(expected)), random.randrange(len(expected))))
            start, end = offsets[first], offsets[stop]
            assert rows_in(topic.arrow(start, end, batch_bytes=batch_bytes)) == expected[first:stop]


def test_small_batches_are_joined_and_large_ones_cut(open_topic: Open) -> None:
    with open_topic(durability="os", batch_bytes=1 << 20) as topic:
        for _ in range(50):
            topic.append_many([b"x" * 1000] * 10)
            topic.flush()
        topic.append_many([b"y" * 1000] * 1000)
        topic.flush()
        sizes = [batch.num_rows for batch in topic.arrow(batch_bytes=100_000)]
        assert sum(sizes) == 1500
        assert max(sizes) <= 100 and len(sizes) <= 25


def test_partitions_come_together_and_each_in_order(open_topic: Open) -> None:
    with open_topic(partitions=3) as topic:
        for number in range(300):
            topic.append(b"%d" % number, key=b"%d" % (number % 17))
        topic.flush()
        found = rows_in(topic.arrow(batch_bytes=500))
        assert sorted(found) == sorted(rows_of(topic))
        for partition in range(3):
            expected = rows_of(topic.partition(partition))
            assert [row for row in found if row[2] == partition] == expected
            assert rows_in(topic.partition(partition).arrow()) == expected


def test_times_bound_what_is_read(open_topic: Open, clock: Clock) -> None:
    topic = open_topic()
    fill(topic, 60, step=SECOND)
    clock.advance(timedelta(seconds=59))
    assert [value for _, value, *_ in rows_in(topic.arrow("-9s"))] == [b"%d" % number for number in range(50, 60)]
    assert topic.to_polars(timedelta(seconds=9), columns=["value"]).height == 10
    assert len(topic.to_pandas("-9s", "-4s")) == 5


def test_a_stream_is_read_while_it_is_asked_for(open_topic: Open) -> None:
    """So a topic larger than memory can be read, and the reader knows how far."""
    topic = open_topic(segment_bytes=1 << 20)
    for number in range(20):
        topic.append_many([b"%d" % number * 1000] * 500)
    reader = topic.read()
    stream = reader.arrow(["offset"])
    assert reader.tell() == {0: 0}
    first = stream.read_next_batch()
    last = first.column("offset").to_pylist()[-1]
    offsets = [record.offset for record in topic.read()]
    assert reader.tell() == {0: offsets[offsets.index(last) + 1]}
    assert next(iter(reader)).offset == offsets[first.num_rows]
    rest = [offset for batch in stream for offset in batch.column("offset").to_pylist()]
    assert [*first.column("offset").to_pylist(), offsets[first.num_rows], *rest] == offsets


def test_an_empty_topic_has_its_columns(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    assert topic.arrow().read_all() == SCHEMA.empty_table()
    assert topic.arrow(columns=["value", "offset"]).schema.names == ["value", "offset"]
    assert fetched(duckdb.sql("select count(*) from topic")) == [(0,)]
    assert topic.to_polars().shape == topic.to_pandas().shape == (0, 6)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"columns": ["nothing"]}, "no column 'nothing'"),
        ({"columns": "value"}, "must be names in a list"),
        ({"batch_bytes": 0}, "batch_bytes"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_read(
    open_topic: Open, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        open_topic().arrow(**arguments)


# --- engines -------------------------------------------------------------------------------------


views = page_views.views


def test_duckdb_takes_a_topic_a_partition_and_a_reader(views: Topic) -> None:
    for taken in (views, views.partition(1), views.read(), views.read({0: "end"})):
        expected = len(list(views.read())) if taken is views else None
        (count,) = fetched(duckdb.sql("select count(*) from taken"))[0]
        if expected is not None:
            assert count == expected == 3000
        else:
            assert 0 < count <= 3000
    assert fetched(duckdb.sql("select count(distinct key) from views")) == [(7,)]
    assert fetched(duckdb.sql("select count(*) from views a join views b using (partition, \"offset\")")) == [(3000,)]


def test_json_values_become_columns_in_duckdb(views: Topic) -> None:
    found = fetched(duckdb.sql("""
        with parsed as (
            select json_transform(decode(value)::json, '{"page": "varchar", "ms": "bigint"}') as view from views
        )
        select view.page, count(*), max(view.ms) from parsed group by all order by all
    """))
    assert found == [("/0", 1000, 2997), ("/1", 1000, 2998), ("/2", 1000, 2999)]


def test_polars_and_pandas_take_a_topic(views: Topic) -> None:
    expected = sorted((row[2], row[3], row[1]) for row in rows_of(views))
    names = ["partition", "offset", "value"]
    for frame in (pl.DataFrame(views), views.to_polars(), pl.DataFrame(views.read())):
        assert sorted(frame.select(names).rows()) == expected
    for table in (views.to_pandas(), pa.table(views).to_pandas()):
        assert isinstance(table, pd.DataFrame)
        assert sorted(table[names].itertuples(index=False, name=None)) == expected
    assert views.to_polars(columns=["key"]).columns == list(views.to_pandas(columns=["key"]).columns) == ["key"]


# --- streams that do not end, and ends that are not orderly ---------------------------------------


def test_a_stream_that_follows_gives_what_comes(open_topic: Open) -> None:
    topic = open_topic()
    reader = topic.follow("begin")
    stream = reader.arrow(["value"])
    found: list[bytes] = []

    def read() -> None:
        found.extend(value for batch in stream for value in batch.column("value").to_pylist())

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(20):
        topic.append(b"%d" % number, sync=True)
    deadline = threading.Event()
    while len(found) < 20:
        deadline.wait(0.01)
    reader.close()
    thread.join()
    assert found == [b"%d" % number for number in range(20)]
    assert topic.follow("begin", timeout=0.01).arrow().read_all().num_rows == 20


def test_damage_ends_a_stream_with_its_error_behind_what_is_whole(open_topic: Open, path: Path) -> None:
    with open_topic(durability="os") as topic:
        for number in range(100):
            topic.append(b"%d" % number * 20)
            topic.flush()
        damaged = [record.offset for record in topic.read()][60]
    (file,) = path.glob("0000/*.log")
    spoil(file, 4096 + damaged + 130)
    topic = open_topic(mode="r")
    found: list[bytes] = []
    with pytest.raises(CorruptLogError, match=f"{file}, byte"):
        found.extend(value for batch in topic.arrow() for value in batch.column("value").to_pylist())
    assert found == [b"%d" % number * 20 for number in range(60)]
    with pytest.raises(Exception, match="byte"):
        fetched(duckdb.sql("select count(*) from topic"))
    skipped = topic.read(on_damage="skip")
    assert skipped.arrow().read_all().num_rows == topic.arrow(on_damage="skip").read_all().num_rows == 99
    assert [gap.offsets.start for gap in skipped.gaps] == [damaged]


def test_columns_that_do_not_fit_come_behind_the_batches_before_them(open_topic: Open, path: Path) -> None:
    """Their checksums are right, so reading the batch finds nothing."""
    with open_topic(durability="os") as topic:
        for number in range(5):
            topic.append_many([b"%d" % number, None])  # because of the null each batch is read by itself
            topic.flush()
        identity = topic._accesses[0].log.identity
    (file,) = path.glob("0000/*.log")
    content = file.read_bytes()
    batches = split(content[4096:])
    body = bytearray(batches[4][128:])
    body[4:8] = (99).to_bytes(4, "little")
    file.write_bytes(content[:4096] + b"".join([*batches[:4], forged(batches[4], body=bytes(body), identity=identity)]))
    topic = open_topic(mode="r")
    stream = topic.arrow()
    assert stream.read_next_batch().num_rows == 8
    with pytest.raises(CorruptLogError, match="column offsets that do not rise"):
        stream.read_next_batch()


def test_a_topic_that_is_closed_ends_its_streams_with_an_error(open_topic: Open) -> None:
    topic = open_topic(segment_bytes=1 << 20)
    for _ in range(30):
        topic.append_many([b"x" * 1000] * 500)
    topic.flush()
    stream = topic.arrow()
    stream.read_next_batch()
    topic.close()
    with pytest.raises(LogClosedError):
        stream.read_all()


def test_a_stream_keeps_its_topic_open(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 10)
    stream = topic.arrow()
    path = topic.path
    topic.close()
    stream = Topic.open(path, mode="r").arrow()
    assert stream.read_all().num_rows == 10


def test_memory_does_not_grow_with_the_log(open_topic: Open, path: Path) -> None:
    with open_topic() as topic:
        for _ in range(100):
            topic.append_many([bytes(1000)] * 2000)
    assert int(run_python(PEAK, path)) < 40_000  # kB; the log has 200 MB


PEAK = """
import resource, sys
import pyarrow
from loglib import Topic
topic = Topic.open(sys.argv[1], mode="r")
stream = topic.arrow()
stream.read_next_batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = sum(batch.num_rows for batch in stream)
assert rows > 190_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
