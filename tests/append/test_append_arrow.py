"""append/tables.py: append_arrow appends the same records as append_many, to the same partitions."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from builders import calm
from hypothesis import given
from hypothesis import strategies as st
from test_arrow_columns import BINARY_TYPES, OneStream, reader

from conftest import NOW, QUIET, run_python, sound
from loglib import LogError, RecordTooLargeError, StorageFullError, Topic, testing
from loglib.append import tables
from loglib.format.arrow import HEADERS_TYPE
from loglib.testing import FaultyFiles, MemoryFiles

Open = Callable[..., Topic]
KINDS = [each for each in BINARY_TYPES if not pa.types.is_dictionary(each)]
MANY = 5000


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 4 kB, and 8 kB ahead of a stream, so that little data takes every way."""
    monkeypatch.setattr(tables, "_PIECE_BYTES", 4000)
    monkeypatch.setattr(tables, "_STREAM_PIECE_BYTES", 4000)
    monkeypatch.setattr(tables, "_AHEAD_BYTES", 8000)


def by_first(key: bytes, partitions: int) -> int:
    """A partitioner of the application."""
    return sum(key[:1]) % partitions


def rows_of(topic: Topic, number: int) -> list[tuple[Any, ...]]:
    topic.flush()
    partition = topic.partition(number)
    sound(partition)
    return [(each.value, each.key, each.timestamp, each.headers) for each in partition.read()]


def contents(topic: Topic) -> list[list[tuple[Any, ...]]]:
    """What each partition holds."""
    return [rows_of(topic, number) for number in range(len(topic.partitions))]


def spread_of(ranges: list[Any]) -> dict[int, int]:
    """How many records went to each partition."""
    found: dict[int, int] = {}
    for partition, offsets in ranges:
        found[partition] = found.get(partition, 0) + len(offsets)
    return found


# --- the same as append_many ---------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of append_many; text in place of bytes, so that every type can hold it."""
    count = draw(st.integers(0, 30))

    def column(of: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(of, min_size=count, max_size=count))

    texts = st.text(max_size=draw(st.sampled_from([3, 40])))
    call: dict[str, Any] = {"values": column(st.none() | texts)}
    if draw(st.booleans()):
        call["keys"] = column(draw(st.sampled_from([texts, st.none() | st.sampled_from("abcd"), st.none()])))
    if draw(st.booleans()):
        call["timestamps"] = column(st.integers(-(1 << 60), 1 << 60))
    if draw(st.booleans()):
        pair = st.tuples(st.text(max_size=3), st.binary(max_size=5))
        call["headers"] = column(st.none() | st.lists(pair, max_size=3))
    return call


def table_of(call: dict[str, Any], kind: pa.DataType, cuts: list[int]) -> pa.Table:
    """The same as a table of chunks that begin at odd places of longer arrays."""
    columns = {"value": pa.array(call["values"], pa.string()).cast(kind)}
    if "keys" in call:
        columns["key"] = pa.array(call["keys"], pa.string()).cast(kind)
    if "timestamps" in call:
        columns["timestamp"] = pa.array(call["timestamps"], pa.int64())
    if "headers" in call:
        pairs = [each and [{"key": name, "value": value} for name, value in each] for each in call["headers"]]
        columns["headers"] = pa.array(pairs, HEADERS_TYPE)
    whole = pa.table(columns)
    bounds = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    parts = [whole.slice(start, stop - start) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return pa.concat_tables(parts) if parts else whole


def encoded(call: dict[str, Any]) -> dict[str, Any]:
    def column(name: str) -> list[bytes | None]:
        return [each if each is None else each.encode() for each in call[name]]

    return call | {name: column(name) for name in ("values", "keys") if name in call}


@calm
@given(
    st.lists(calls(), min_size=1, max_size=3), st.sampled_from(KINDS), st.lists(st.integers(0, 30), max_size=3),
    st.sampled_from([1, 3]), st.sampled_from(["crc32", "murmur2", by_first]), st.sampled_from(["none", "zlib"]),
    st.sampled_from([100, 1 << 20]), st.sampled_from(["table", "reader", "object"]), st.integers(50, 1000),
    st.sampled_from([5, 1024]),
)  # fmt: skip
def test_same_records_as_append_many(
    given_calls: list[dict[str, Any]], kind: pa.DataType, cuts: list[int], partitions: int, partitioner: Any,
    compression: str, batch_bytes: int, form: str, piece_bytes: int, many: int,
) -> None:  # fmt: skip
    policies: dict[str, Any] = {
        "partitions": partitions, "partitioner": partitioner, "compression": compression, "batch_bytes": batch_bytes,
        "segment_bytes": 4096,
    }  # fmt: skip
    forms: dict[str, Callable[[pa.Table], Any]] = {
        "table": lambda table: table, "reader": reader, "object": lambda table: OneStream(reader(table)),
    }  # fmt: skip
    files = MemoryFiles()
    with (
        pytest.MonkeyPatch.context() as patch,
        testing.open_topic("/ours", files=files, clock=lambda: NOW, **QUIET, **policies) as ours,
        testing.open_topic("/theirs", files=files, clock=lambda: NOW, **QUIET, **policies) as theirs,
    ):
        patch.setattr(tables, "_PIECE_BYTES", piece_bytes)
        patch.setattr(tables, "_STREAM_PIECE_BYTES", piece_bytes)
        patch.setattr(tables, "MANY", many)
        patch.setattr(tables, "_AHEAD_BYTES", 2 * piece_bytes)
        for call in given_calls:
            where = None if "keys" in call and None not in call["keys"] else partitions - 1
            expected = theirs.append_many(**encoded(call), partition=where)
            found = ours.append_arrow(forms[form](table_of(call, kind, cuts)), partition=where)
            assert spread_of(found) == spread_of(expected)
        assert contents(ours) == contents(theirs)


@pytest.mark.parametrize("partitioner", ["crc32", "murmur2", by_first], ids=["crc32", "murmur2", "a function"])
def test_null_keys_of_a_call_go_to_one_partition_and_keys_to_their_own(partitioner: Any, open_topic: Open) -> None:
    topic = open_topic(partitions=8, partitioner=partitioner)
    keys = [None if number % 3 == 0 else b"%d" % number for number in range(MANY)]
    topic.append_arrow(pa.table({"value": [b"v"] * MANY, "key": keys}))
    keyless = set()
    for number, rows in enumerate(contents(topic)):
        for _, key, *_ in rows:
            if key is None:
                keyless.add(number)
            else:
                assert topic._placement.of_key(key) == number
    assert len(keyless) == 1


def test_column_says_the_partition_and_where_it_is_null_the_key(open_topic: Open) -> None:
    topic = open_topic(partitions=4)
    table = pa.table({"value": [b"0", b"1", b"2", b"3"], "key": [b"k", b"k", b"k", None], "to": [3, None, 0, None]})
    topic.append_arrow(table.slice(0, 3), partition="to")
    own = topic._placement.of_key(b"k")
    found = [(number, value) for number, rows in enumerate(contents(topic)) for value, *_ in rows]
    assert sorted(found) == sorted([(3, b"0"), (own, b"1"), (0, b"2")])
    topic.append_arrow(table.slice(3), partition="to")
    topic.append_arrow(table.select(["value", "to"]).slice(2), partition="to")
    assert sum(map(len, contents(topic))) == 6
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=f"a record for partition {wrong}, and the topic has 4 partitions"):
            topic.append_arrow(pa.table({"value": [b"v", b"w"], "to": [0, wrong]}), partition="to")
        with pytest.raises(ValueError, match=f"a record for partition {wrong}, and the topic has 4 partitions"):
            topic.append_arrow(pa.table({"value": [b"v", b"w"], "to": [None, wrong]}), partition="to")
    assert sum(map(len, contents(topic))) == 6


def test_function_of_the_topic_is_needed_only_for_keys(open_topic: Open) -> None:
    with open_topic(partitions=3, partitioner=by_first):
        pass
    topic = open_topic(partitioner=None)
    topic.append_arrow(pa.table({"value": [b"v"], "key": pa.nulls(1)}))
    with pytest.raises(ValueError, match="open it with partitioner=by_first"):
        topic.append_arrow(pa.table({"value": [b"v"], "key": [b"k"]}))
    assert sum(map(len, contents(topic))) == 1


def test_keyless_records_of_a_call_go_to_one_partition(open_topic: Open, small_pieces: None) -> None:
    topic = open_topic(partitions=5)
    ranges = topic.append_arrow(pa.table({"value": [b"v" * 50] * MANY}))
    assert list(spread_of(ranges).values()) == [MANY]


def test_few_records_share_a_batch_with_other_calls(open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"before")
    (found,) = topic.append_arrow(pa.table({"value": [b"a", None], "headers": pa.array([None, [("h", b"x")]],
                                            pa.map_(pa.string(), pa.binary()))}))  # fmt: skip
    topic.append(b"after")
    topic.flush()
    (batch,) = topic.batches()
    assert batch.values == [b"before", b"a", None, b"after"]
    assert found == (0, range(1, 3))


def test_records_without_a_time_get_that_of_appending(open_topic: Open) -> None:
    topic = open_topic()
    for times in ([5, None], [None, None]):
        topic.append_arrow(pa.table({"value": [b"v", b"w"], "timestamp": pa.array(times, pa.timestamp("us", "UTC"))}))
    assert [row[2] for row in rows_of(topic, 0)] == [5, NOW, NOW, NOW]


@pytest.mark.parametrize("form", [lambda table: table, reader], ids=["table", "reader"])
def test_output_of_a_log_goes_into_another(form: Any, open_topic: Open, tmp_path: Path) -> None:
    source = open_topic(tmp_path / "source")
    source.append_many([b"a", None], keys=[None, b"k"], timestamps=[1, 2], headers=[None, {"h": b"x"}])
    source.append_many([b"b"])
    source.flush()
    target = open_topic()
    target.append_arrow(form(pa.Table.from_batches([batch.to_arrow() for batch in source.batches()])))
    assert contents(target) == contents(source)
    target.append_arrow(source)  # which is a stream itself
    assert contents(target)[0] == 2 * contents(source)[0]


def test_partition_takes_tables(open_topic: Open) -> None:
    topic = open_topic(partitions=3)
    table = pa.table({"payload": [b"a", b"b"], "user": [b"k", None]})
    (found,) = topic.partition(2).append_arrow(table, value="payload", key="user")
    assert found == (2, range(2))
    assert topic.partition(2).append_arrow(table, value="payload", key="user", producer=("p", 1)) == [
        topic.partition(2).append_arrow(table, value="payload", key="user", producer=("p", 1))[0]
    ]
    assert [row[:2] for row in rows_of(topic, 2)] == [(b"a", b"k"), (b"b", None)] * 2


# --- producers -----------------------------------------------------------------------------------------------


def test_repeat_of_a_producer_appends_nothing(open_topic: Open, small_pieces: None) -> None:
    topic = open_topic(partitions=3)
    table = pa.table({"value": [b"v" * 20] * MANY, "key": [b"%d" % number for number in range(MANY)]})
    first = topic.append_arrow(table, producer=("p", 1))
    assert len(first) == 3  # a batch in each partition
    assert topic.append_arrow(reader(table), producer=("p", 1)) == first
    assert sum(map(len, contents(topic))) == MANY
    with pytest.raises(ValueError, match="must say partition="):
        topic.append_arrow(table.select(["value"]), producer=("p", 2))
    assert topic.append_arrow(table.slice(0, 0), producer=("p", 2)) == []


def test_call_of_a_producer_that_is_no_batch_is_refused(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = open_topic()
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 1000)
    with pytest.raises(RecordTooLargeError, match="the batch is .* the limit is 1000"):
        topic.append_arrow(pa.table({"value": [b"v" * 600] * 2}), partition=0, producer=("p", 1))
    assert contents(topic) == [[]]


# --- streams, pieces and the helper --------------------------------------------------------------------------


def test_nothing_appends_nothing(open_topic: Open) -> None:
    topic = open_topic()
    nothing = pa.table({"value": pa.array([], pa.binary())})
    assert topic.append_arrow(nothing) == topic.append_arrow(reader(nothing)) == []
    chunks = [nothing, pa.table({"value": [b"v"]}), nothing]
    assert len(topic.append_arrow(pa.concat_tables(chunks))) == 1


def test_large_table_is_written_in_pieces_that_end_with_its_helper(open_topic: Open, small_pieces: None) -> None:
    topic = open_topic(partitions=2, segment_bytes=20_000, batch_bytes=1000)
    values = [b"%d" % number * 3 for number in range(MANY)]
    table = pa.table({"value": values, "key": values})
    threads = threading.active_count()
    for data in (table, reader(table), table.to_batches(max_chunksize=7)):
        if isinstance(data, list):
            data = pa.Table.from_batches(data)
        assert sum(spread_of(topic.append_arrow(data)).values()) == MANY
        assert threading.active_count() == threads
    for partition in topic.partitions:
        assert len(partition.segments) > 3
        assert all(segment.size_bytes <= 20_000 + 4096 for segment in partition.segments)
    expected = topic.append_many(values, keys=values)
    assert [len(rows) for rows in contents(topic)] == [4 * count for _, count in sorted(spread_of(expected).items())]


def test_batches_of_one_write_fill_segments_and_do_not_leave_them(open_topic: Open) -> None:
    topic = open_topic(segment_bytes=20_000, batch_bytes=1000)
    table = numbered(MANY).select(["value"])
    topic.append_arrow(table)
    segments = topic.partition(0).segments
    assert len(segments) > 20
    assert all(18_000 < segment.size_bytes <= 20_000 + 4096 for segment in segments[:-1])
    assert [row[0] for row in rows_of(topic, 0)] == table.column("value").to_pylist()


def test_stream_is_read_and_keys_are_placed_in_the_thread_of_the_caller(open_topic: Open, small_pieces: None) -> None:
    here: set[int] = set()

    def by_anything(key: bytes, partitions: int) -> int:
        here.add(threading.get_ident())
        return 1

    table = pa.table({"value": [b"v" * 100] * MANY, "key": [b"%d" % number for number in range(MANY)]})

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in table.to_batches(max_chunksize=100):
            here.add(threading.get_ident())
            yield batch

    topic = open_topic(partitions=2, partitioner=by_anything)
    topic.append_arrow(pa.RecordBatchReader.from_batches(table.schema, batches()))
    assert here == {threading.get_ident()}


@pytest.mark.slow
def test_memory_of_a_long_stream_is_flat() -> None:
    """1.6 GB of records in batches of 8 MB: more than two pieces are never in memory."""
    out = run_python(
        """
        import itertools, os, resource, sys, tempfile
        import pyarrow as pa
        from loglib import FlushPolicy, Retention, Topic

        keys = pa.array([b"%08d" % n for n in range(40_000)])
        batch = pa.record_batch({"value": pa.array([os.urandom(200) for _ in range(40_000)]), "key": keys})

        def peak(count):
            reader = pa.RecordBatchReader.from_batches(batch.schema, itertools.repeat(batch, count))
            topic.append_arrow(reader)
            topic.flush()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

        with tempfile.TemporaryDirectory() as directory:
            with Topic.open(directory + "/log", create=True, partitions=8, segment_bytes=64 << 20, durability="os",
                            retention=Retention(bytes=256 << 20)) as topic:
                print(peak(20), peak(180))
        """
    )
    before, after = map(int, out.split())
    assert after < before + 40


# --- what is refused, and what errors say -----------------------------------------------------------------------

LARGE = b"x" * 3001
WRONG = [
    ({"value": [LARGE]}, RecordTooLargeError, f"record {MANY} is 300. bytes, the limit is 3000"),
    ({"key": [LARGE]}, RecordTooLargeError, f"record {MANY} is 300. bytes, the limit is 3000"),
    ({"headers": pa.array([[{"key": "h", "value": None}]], HEADERS_TYPE)}, ValueError, "whose key or value is null"),
    ({"headers": pa.array([[{"key": "h", "value": LARGE}]], HEADERS_TYPE)}, RecordTooLargeError, "the limit is 3000"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=["value", "key", "null header", "header"])
@pytest.mark.parametrize("form", [lambda table: table, OneStream], ids=["table", "stream"])
def test_refused_record_leaves_the_log_as_it_was(
    wrong: dict[str, Any], error: type[Exception], message: str, form: Any, open_topic: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(tables, "_PIECE_BYTES", 4000)
    monkeypatch.setattr(tables, "_STREAM_PIECE_BYTES", 4000)
    if not isinstance(form, type):  # of a table everything is checked, of a stream what fits 16 MiB
        monkeypatch.setattr(tables, "_AHEAD_BYTES", 8000)
    topic = open_topic(partitions=3, batch_bytes=1000, max_record_bytes=3000)
    topic.append(b"before", partition=0)
    good = {"value": [b"v"] * MANY, "key": [b"%d" % n for n in range(MANY)], "headers": pa.nulls(MANY, HEADERS_TYPE)}
    bad = {"value": [b"v"], "key": [b"k"], "headers": pa.nulls(1, HEADERS_TYPE)} | wrong
    with pytest.raises(error, match=message) as caught:
        topic.append_arrow(form(pa.concat_tables([pa.table(good), pa.table(bad)])))
    if isinstance(caught.value, LogError):
        assert list(caught.value.not_appended) == list(range(MANY + 1))
    assert sum(map(len, contents(topic))) == 1


def not_appended(topic: Topic, error: BaseException, taken: int) -> None:
    """The error's account agrees with the log: each record is either in it or named, and none is both."""
    there = sorted(int(value) for rows in contents(topic) for value, *_ in rows)
    assert sorted([*there, *getattr(error, "not_appended")]) == list(range(taken))  # noqa: B009
    assert sum(len(offsets) for _, offsets in getattr(error, "appended")) == len(there)  # noqa: B009


def numbered(count: int, **more: Any) -> pa.Table:
    values = [b"%0100d" % number for number in range(count)]
    return pa.table({"value": values, "key": [value[-2:] for value in values], **more})


def test_error_in_the_middle_of_a_stream_names_what_is_not_in_the_log(open_topic: Open, small_pieces: None) -> None:
    topic = open_topic(partitions=3, max_record_bytes=1000, batch_bytes=1000)
    batches = [*numbered(MANY).to_batches(max_chunksize=50), pa.record_batch({"value": [b"x" * 1001], "key": [b"k"]})]
    with pytest.raises(RecordTooLargeError, match=f"record {MANY} is") as caught:
        topic.append_arrow(pa.RecordBatchReader.from_batches(batches[0].schema, batches))
    assert 0 < len(caught.value.not_appended) < MANY
    not_appended(topic, caught.value, MANY + 1)


def test_stream_that_fails_is_an_error_that_says_what_was_appended(open_topic: Open, small_pieces: None) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from numbered(MANY).to_batches(max_chunksize=50)
        raise OSError(errno.EIO, "the other side is gone")

    topic = open_topic(partitions=3, batch_bytes=1000)
    stream = pa.RecordBatchReader.from_batches(numbered(1).schema, batches())
    with pytest.raises(OSError, match="the other side is gone") as caught:
        topic.append_arrow(stream)
    not_appended(topic, caught.value, MANY)
    assert f"of this call's {MANY} records are in the log" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("at", [1, 2, 3, 7])
@pytest.mark.parametrize("form", [lambda table: table, reader], ids=["table", "reader"])
@pytest.mark.parametrize("keyed", [True, False])
def test_full_disk_names_each_record_that_is_not_in_the_log(
    at: int, form: Any, keyed: bool, tmp_path: Path, small_pieces: None
) -> None:
    files = FaultyFiles("pwritev", at=at, error=errno.ENOSPC, armed=False)
    table = numbered(3 * MANY) if keyed else numbered(3 * MANY).select(["value"])
    policies: dict[str, Any] = QUIET | {"partitions": 3, "batch_bytes": 1000, "segment_bytes": 100_000}
    with testing.open_topic(tmp_path / "topic", files=files, **policies) as topic:
        files.armed = True
        with pytest.raises(StorageFullError) as caught:
            topic.append_arrow(form(table))
        files.armed = False
        taken = 3 * MANY if isinstance(form(table), pa.Table) else max(caught.value.not_appended) + 1
        not_appended(topic, caught.value, taken)
        missing = table.take(pa.array(list(caught.value.not_appended)))
        topic.append_arrow(missing)
        topic.append_arrow(table.slice(taken))
        found = sorted(int(value) for rows in contents(topic) for value, *_ in rows)
        assert found == list(range(3 * MANY))


def test_closed_topic_and_topic_for_reading_refuse(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    table = pa.table({"value": [b"v"]})
    with Topic.open(path, mode="r") as reading, pytest.raises(LogError):
        reading.append_arrow(table)
    topic.close()
    with pytest.raises(LogError):
        topic.append_arrow(table)


# --- data frames and results of other engines -------------------------------------------------------------------

EXPECTED = [(b"a", b"1", NOW, ()), (None, None, NOW + 1, ()), ("\N{SNOWMAN}".encode(), b"3", NOW + 2, ())]
TIMES = [datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC) + timedelta(microseconds=number) for number in range(3)]


def test_data_frame_of_polars_is_appended(open_topic: Open) -> None:
    topic = open_topic()
    frame = pl.DataFrame({"value": ["a", None, "\N{SNOWMAN}"], "key": [b"1", None, b"3"], "timestamp": TIMES})
    topic.append_arrow(frame)
    assert rows_of(topic, 0) == EXPECTED
    topic.append_arrow(frame.select("value").rechunk().slice(1), value="value")
    coded = pl.DataFrame({"value": pl.Series(["x", "y", "x"], dtype=pl.Categorical)})
    topic.append_arrow(coded)
    packed = pl.DataFrame({"a": [1], "b": ["x"]}).select(pl.struct(pl.all()).struct.json_encode().alias("value"))
    topic.append_arrow(packed)
    assert [row[0] for row in rows_of(topic, 0)][3:] == [None, EXPECTED[2][0], b"x", b"y", b"x", b'{"a":1,"b":"x"}']


def test_addresses_of_python_objects_in_polars_are_not_appended(open_topic: Open) -> None:
    """They came as eight bytes of memory each."""
    topic = open_topic()
    with pytest.raises(TypeError, match="a column of Python objects"):
        topic.append_arrow(pl.DataFrame({"value": [object()]}, schema={"value": pl.Object}))
    assert contents(topic) == [[]]


def test_large_data_frame_of_polars_is_appended_in_pieces(open_topic: Open, small_pieces: None) -> None:
    topic = open_topic(partitions=3)
    frame = pl.DataFrame({"value": [f"value {number}" for number in range(MANY)], "key": ["k", "l"] * (MANY // 2)})
    topic.append_arrow(pl.concat([frame, frame]))
    values = [row[0] for row in contents(topic)[topic._placement.of_key(b"k")] if row[1] == b"k"]
    assert values == [b"value %d" % number for number in range(0, MANY, 2)] * 2


def test_data_frame_of_pandas_is_appended(open_topic: Open) -> None:
    topic = open_topic()
    frame = pd.DataFrame({"value": ["a", None, "\N{SNOWMAN}"], "key": [b"1", None, b"3"], "timestamp": TIMES})
    topic.append_arrow(frame)
    assert rows_of(topic, 0) == EXPECTED
    with pytest.raises(ValueError, match=r"column '__index_level_0__' is none of .*reset_index\(drop=True\)"):
        topic.append_arrow(frame.iloc[[2, 0]])
    topic.append_arrow(frame.iloc[[2, 0]].reset_index(drop=True))
    assert rows_of(topic, 0)[3:] == [EXPECTED[2], EXPECTED[0]]


def test_results_of_duckdb_are_appended(open_topic: Open) -> None:
    topic = open_topic(partitions=3)
    with duckdb.connect() as engine:
        engine.execute("set timezone = 'UTC'")
        topic.append_arrow(
            engine.sql(
                "select 'value ' || range as value, ('k' || range % 7)::blob as key, "
                "make_timestamptz(range) as timestamp, map {'n': range::varchar::blob} as headers from range(300000)"
            )
        )
        rows = sorted(row for each in contents(topic) for row in each)
        expected = [(b"value %d" % n, b"k%d" % (n % 7), n, (("n", b"%d" % n),)) for n in range(300_000)]
        assert rows == sorted(expected)
        topic.append_arrow(engine.sql("select to_json(t) as value from (select 1 as a, 'x' as b) t"), partition=1)
    assert rows_of(topic, 1)[-1][0] == b'{"a":1,"b":"x"}'


def test_numbers_of_numpy_behind_a_column_are_not_changed(open_topic: Open) -> None:
    memory = np.frombuffer(bytearray(b"abcd" * 1000), np.uint8)
    before = memory.copy()
    offsets = np.arange(0, 4001, 4, dtype=np.int32)
    values = pa.Array.from_buffers(pa.binary(), 1000, [None, pa.py_buffer(offsets), pa.py_buffer(memory)])
    topic = open_topic(batch_bytes=100)
    topic.append_arrow(pa.table({"value": values}).slice(1))
    assert (memory == before).all() and (offsets == np.arange(0, 4001, 4)).all()
    assert [row[0] for row in rows_of(topic, 0)] == [b"abcd"] * 999
