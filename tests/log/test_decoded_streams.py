"""A topic as a table of text and of JSON: `decode=` of streams, for pyarrow, DuckDB, Polars and pandas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import page_views
import pyarrow as pa
import pytest

from loglib import Reader, Topic, offload
from loglib.errors import DecodeError

Open = Callable[..., Topic]
SCHEMA = {"page": "string", "ms": "int64"}


views = page_views.views


@pytest.mark.parametrize("schema", [SCHEMA, None, pa.schema(SCHEMA)], ids=["mapping", "learned", "schema"])
@pytest.mark.parametrize("batch_bytes", [1, 500, 1 << 20])
def test_fields_of_json_are_columns(views: Topic, schema: Any, batch_bytes: int) -> None:
    expected = [((each.key or b"").decode(), json.loads(each.value or b"")) for each in views.read()]
    table = views.arrow(columns=["key", "value"], batch_bytes=batch_bytes, decode="json", schema=schema).read_all()
    assert table.schema.field("value").type == pa.struct([("page", pa.string()), ("ms", pa.int64())])
    assert sorted(zip(*table.to_pydict().values(), strict=True), key=str) == sorted(expected, key=str)


def test_engines_get_columns_of_json(views: Topic) -> None:
    stream = views.arrow(decode="json", schema=SCHEMA)
    query = "select value.page, count(*), max(value.ms) from views group by all order by all"
    found = duckdb.from_arrow(stream).query("views", query)
    assert found is not None
    assert found.fetchall() == [("/0", 1000, 2997), ("/1", 1000, 2998), ("/2", 1000, 2999)]
    frame = views.to_polars(columns=["value"], decode="json").unnest("value")
    assert frame["ms"].sum() == sum(range(3000)) and frame["page"].n_unique() == 3
    pandas = views.to_pandas(columns=["key", "value"], decode="json", schema=SCHEMA)
    assert list(pandas.columns) == ["key", "value.page", "value.ms"] and pandas["value.ms"].sum() == sum(range(3000))


def test_text_is_a_column_of_strings(views: Topic) -> None:
    table = views.arrow(columns=["value", "key", "offset"], decode="text").read_all()
    assert [table.schema.field(name).type for name in ("key", "value")] == [pa.string(), pa.string()]
    raw = views.arrow(columns=["value", "key", "offset"]).read_all()
    assert table.cast(raw.schema) == raw
    assert views.to_pandas(decode="text")["key"].str.startswith("user-").all()
    assert views.to_polars(decode="text", columns=["key"])["key"].n_unique() == 7


def read_past_bad(reader: Reader, **how: Any) -> tuple[list[int], list[int]]:
    """The offsets of the rows, and those of the records that do not decode; each of these is read by itself."""
    rows: list[int] = []
    bad: list[int] = []
    while True:
        try:
            for batch in reader.arrow(["value", "offset"], **how):
                rows += batch.column("offset").to_pylist()
        except DecodeError as error:
            record = next(iter(reader))
            assert (record.partition, record.offset) == (error.partition, error.offset)
            bad.append(record.offset)
            continue
        return rows, bad


@pytest.mark.parametrize("batch_bytes", [1, 60, 300, 1 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_record_that_does_not_decode_can_be_passed_and_no_other_is_lost(
    open_topic: Open, batch_bytes: int, seed: int
) -> None:
    random = Random(seed)
    topic = open_topic(durability="os")
    values = [b'{"ms": 1}', b"{}", None, b"no JSON", b'{"ms": "x"}', b"\xff"]
    for _ in range(20):
        topic.append_many(random.choices(values, k=random.randint(1, 9)))
        topic.flush()
    records = list(topic.read())
    fine = [each.offset for each in records if each.value in (b'{"ms": 1}', b"{}", None)]
    rest = [each.offset for each in records if each.offset not in fine]
    found = read_past_bad(topic.read(), batch_bytes=batch_bytes, decode="json", schema={"ms": "int64"})
    assert found == (fine, rest)


def test_type_is_learned_from_all_records_and_the_reader_stays(open_topic: Open) -> None:
    topic = open_topic(segment_bytes=1 << 20)
    topic.append_many([b'{"a": %d}' % number for number in range(200_000)])
    topic.append(b'{"b": "late"}', sync=True)
    reader = topic.read()
    first = next(iter(reader))
    stream = reader.arrow(["value"], decode="json")
    topic.append(b'{"c": "after the end of the reader"}', sync=True)
    assert reader.tell() == {0: first.next_offset}
    assert stream.schema.field("value").type == pa.struct([("a", pa.int64()), ("b", pa.string())])
    table = stream.read_all()
    assert table.num_rows == 200_000 and table.column("value")[-1].as_py() == {"a": None, "b": "late"}


def test_reader_that_follows_needs_a_schema(open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b'{"a": 1}', sync=True)
    reader = topic.follow("begin", timeout=0.01)
    with pytest.raises(ValueError, match="needs schema="):
        reader.arrow(decode="json")
    assert reader.arrow(["value"], decode="json", schema={"a": "int64"}).read_all().to_pylist() == [{"value": {"a": 1}}]
    assert topic.follow("begin", timeout=0.01).arrow(["key"], decode="json").read_all().to_pylist() == [{"key": None}]


def test_archive_and_tail_decode_together(open_topic: Open, tmp_path: Path) -> None:
    topic = open_topic()
    topic.append_many([b'{"ms": %d}' % number for number in range(50)])
    topic.flush()
    topic.partition(0).roll()
    offload.archive(topic, tmp_path / "archive")
    topic.append_many([b'{"ms": %d}' % number for number in range(50, 60)] + [b"bad"])
    topic.flush()
    with pytest.raises(ValueError, match="with an archive needs schema="):
        topic.arrow(decode="json", archive=tmp_path / "archive")
    stream = topic.arrow(columns=["value"], decode="json", schema={"ms": "int64"}, archive=tmp_path / "archive")
    found: list[int] = []
    last = list(topic.read())[-1]
    with pytest.raises(DecodeError, match=f"partition 0, offset {last.offset}: the value is not JSON"):
        found.extend(row["ms"] for batch in stream for row in batch.column("value").to_pylist())
    assert found == list(range(60))
    texts = topic.arrow(columns=["value"], decode="text", archive=tmp_path / "archive").read_all()
    assert texts.column("value").to_pylist() == [(record.value or b"").decode() for record in topic.read()]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"decode": "yaml"}, "decode must be"),
        ({"schema": SCHEMA}, 'schema= is for decode="json"'),
        ({"decode": "json", "schema": {"at": pa.timestamp("us")}}, "value.at is timestamp"),
    ],
)
def test_wrong_arguments_are_refused(open_topic: Open, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        open_topic().arrow(**arguments)
