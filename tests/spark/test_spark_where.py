"""The condition `where` of the Spark source without Spark: what it chooses, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, StringType, StructField, StructType
from spark_logs import COLUMNS, Row, all_rows, in_order, random_topic, scan_batches, scan_rows

from conftest import NOW, QUIET, run_python
from loglib import testing
from loglib.config.times import to_datetime
from loglib.spark.where import Where, parse_where

TIMES = st.integers(NOW - 12, NOW + 12)
KEYS = st.sampled_from([b"", b"k0", b"k1", b"k2", b"k3", b"it's", b"\x00\xff"])
WHERES = st.builds(
    Where,
    first_us=st.just(Where().first_us) | TIMES,
    last_us=st.just(Where().last_us) | TIMES,
    keys=st.none() | st.frozensets(KEYS),
).filter(lambda where: where != Where())


def fulfils(where: Where, row: Row) -> bool:
    """What SQL says of the row."""
    is_in = where.keys is None or (row["key"] is not None and row["key"] in where.keys)
    return where.first_us <= row["timestamp"] <= where.last_us and is_in


def quoted(key: bytes) -> str:
    """The key as a text of SQL."""
    return "'" + key.decode().replace("'", "''") + "'"


@pytest.fixture(scope="module")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_topic(tmp_path_factory.mktemp("where") / "topic", seed=21)


@settings(deadline=None)
@given(where=WHERES)
def test_text_of_a_condition_is_the_condition(where: Where) -> None:
    assert parse_where(where.as_option(), now_us=NOW) == where


@pytest.mark.parametrize(("text", "wanted"), [
    ("timestamp >= '-99999999d'", ""), ("timestamp < '0001-01-01T00:00Z'", "timestamp <= '0001-01-01T00:00:00+00:00'"),
    ("timestamp >= '0001-01-01T00:00Z'", "timestamp >= '0001-01-01T00:00:00+00:00'"),
])  # fmt: skip
def test_limit_that_no_text_can_say_is_left_out(text: str, wanted: str) -> None:
    assert parse_where(text, now_us=NOW).as_option() == wanted


@settings(deadline=None)
@given(where=WHERES, columns=st.sets(st.sampled_from(COLUMNS), min_size=1), split_bytes=st.integers(500, 9000))
def test_records_that_fulfil_the_condition_are_read(
    topic: Path, where: Where, columns: set[str], split_bytes: int
) -> None:
    wanted = [row for row in all_rows(topic) if fulfils(where, row)]
    options = {"where": where.as_option(), "columns": ",".join(sorted(columns))}
    rows = scan_rows(topic, split_bytes=split_bytes, arrow_batch_bytes=2000, **options)
    assert rows == [{name: row[name] for name in sorted(columns)} for row in wanted]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("key = 'a'", Where(keys=frozenset([b"a"]))),
        ("KEY in('a' ,'it''s',x'00fF')", Where(keys=frozenset([b"a", b"it's", b"\x00\xff"]))),
        ("key IN ('a', 'b') and Key IN ('b', 'c')", Where(keys=frozenset([b"b"]))),
        ("key = 'ключ'", Where(keys=frozenset(["ключ".encode()]))),
        ("timestamp >= '2024-05-01T12:00Z'", Where(first_us=1714564800_000000)),
        ("timestamp > '2024-05-01T14:00+02:00'", Where(first_us=1714564800_000001)),
        ("timestamp <= '2024-05-01 12:00:00Z'", Where(last_us=1714564800_000000)),
        ("timestamp < '2024-05-01T12:00Z'", Where(last_us=1714564799_999999)),
        ("timestamp = '-1h'", Where(first_us=NOW - 3600_000000, last_us=NOW - 3600_000000)),
        (
            "timestamp BETWEEN '-2h' AND '-1h' AND timestamp >= '-90m' AND key='a'",
            Where(NOW - 5400_000000, NOW - 3600_000000, frozenset([b"a"])),
        ),
    ],
)
def test_conditions_are_read_as_sql(text: str, where: Where) -> None:
    assert parse_where(text, now_us=NOW) == where


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a column is missing before the end"),
        ("value = 'a'", "there is no condition on value"),
        ("key = 'a' OR key = 'b'", "AND is missing before OR"),
        ("NOT key = 'a'", "there is no condition on not"),
        ("key = 'a' AND", "a column is missing before the end"),
        ("key LIKE 'a%'", "= or IN is missing before LIKE"),
        ("key > 'a'", "= or IN is missing before >"),
        ("key IN ()", "a text in single quotes is missing before )"),
        ("key IN ('a'", ") is missing before the end"),
        ('key = "a"', "'\"a\"' is not understood"),
        ("key = 'a", "\"'a\" is not understood"),
        ("key = X'0'", "a text in single quotes is missing before X"),
        ("key = 7", "'7' is not understood"),
        ("timestamp = X'00'", "a text in single quotes is missing before X'00'"),
        ("timestamp >= 'yesterday'", "'yesterday' is not a time with its zone"),
        ("timestamp >= '2024-05-01T12:00'", "is not a time with its zone"),
        ("timestamp >= 'begin'", "'begin' is not a time"),
        ("timestamp IN ('-1h')", "a comparison is missing before IN"),
        ("timestamp , '-1h'", ", is no comparison"),
        ("timestamp BETWEEN '-2h' OR '-1h'", "AND is missing before OR"),
        ("key = 'a'; DROP TABLE x", "'; DROP TABLE x' is not understood"),
    ],
)
def test_all_else_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"option where must be conditions on timestamp and key") as caught:
        parse_where(text, now_us=NOW)
    assert why in str(caught.value)


def test_record_that_is_no_text_is_only_an_error_where_it_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "topic"
    with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
        topic.append_many([b"good", b"\xff", b"good too"], keys=[b"a", b"b", b"a"], timestamps=[NOW, NOW + 1, NOW + 2])
        topic.flush()
        bad = topic.partition(0).read().poll()[1].offset
    text: Any = StructType([StructField("value", StringType()), StructField("key", BinaryType())])
    rows = scan_rows(path, schema=text, where="key = 'a'")
    assert [row["value"] for row in rows] == ["good", "good too"]
    with pytest.raises(ValueError, match=f"offset {bad}: the value is not UTF-8"):
        scan_rows(path, schema=text, where=f"timestamp > '{to_datetime(NOW)}'")


def test_columns_that_only_decide_are_not_given(topic: Path) -> None:
    batches = scan_batches(topic, columns="value", where="key = 'k1' AND timestamp >= '1970-01-01T00:00Z'")
    assert {tuple(batch.schema.names) for batch in batches} == {("value",)}
    assert sum(batch.num_rows for batch in batches) == sum(row["key"] == b"k1" for row in all_rows(topic))


def test_condition_does_not_import_pandas(topic: Path) -> None:
    """It takes half a second in each worker."""
    run_python(
        """
        import sys
        from pathlib import Path
        from spark_logs import scan_rows
        before = "pandas" in sys.modules
        assert scan_rows(Path(sys.argv[1]), columns="value", where="key = 'k1' AND timestamp > '1970-01-01T00:00Z'")
        assert before or "pandas" not in sys.modules
        """,
        topic,
    )


def test_age_counts_from_the_query(topic: Path) -> None:
    rows = all_rows(topic)
    recent = [row for row in rows if row["timestamp"] >= NOW - 3]
    assert 0 < len(recent) < len(rows)
    assert in_order(scan_rows(topic, where="timestamp >= '-3us'", includeHeaders=True)) == in_order(recent)
