"""The sink's options and columns, and how rows are dealt to topics and partitions, without Spark."""

import socket
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from conftest import NOW, QUIET
from loglib import LogError, testing
from loglib.append.partitioner import by_crc32
from loglib.spark.sink import BatchWriter, Message, StreamWriter
from loglib.spark.sink_target import Target, TargetTopic, find_topic, parse
from loglib.spark.stage import RowPartitioner, Staging, TaskStage
from loglib.system.files import REAL
from loglib.transactions.manifest import Section

TEXT, BINARY = StringType(), BinaryType()
HEADERS = ArrayType(StructType([StructField("key", TEXT), StructField("value", BINARY)]))


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


VALUE = schema(value=BINARY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "logs" / "topic")


def make(path: Path, **policies: Any) -> Path:
    testing.open_topic(path, partitions=3, clock=lambda: NOW, **QUIET | policies).close()
    return path


def by_region(key: bytes, partitions: int) -> int:
    return len(key) % partitions


def parsed(path: Path, columns: StructType = VALUE, /, *, streaming: bool = False, **options: Any) -> Target:
    return parse({"path": str(path), **options}, columns, overwrite=False, streaming=streaming)


def test_path_and_option_name_the_topic(path: Path) -> None:
    assert parsed(path).topic == str(path)
    assert parsed(path, topic="topic").topic == str(path)
    assert parsed(path.parent, topic="topic").topic == str(path)
    assert parsed(path.parent, schema(value=BINARY, topic=TEXT)).topic is None
    none: dict[str, Any] = {}
    for message, where, options in (
        ("names another one: other", path, none | {"topic": "other"}),
        ("is no topic: give the option topic, or a column topic", path.parent, none),
        ("is not a name", path.parent, none | {"topic": "../topic"}),
    ):
        with pytest.raises(ValueError, match=message):
            parsed(where, **options)
    with pytest.raises(ValueError, match="option path is missing"):
        parse({}, VALUE, overwrite=False, streaming=True)
    for where, options in ((path.parent / "none", none), (path.parent, none | {"topic": "none"})):
        with pytest.raises(FileNotFoundError, match="no topic here; make it with loglib.Topic.open"):
            parsed(where, **options)


def test_topic_that_is_missing_is_made_if_it_is_asked_for(path: Path) -> None:
    logs = path.parent
    assert parsed(logs / "a", createTopic="true").topic == str(logs / "a")
    assert parsed(logs, topic="b", createTopic="TRUE", partitions="7").topic == str(logs / "b")
    assert parsed(path, createTopic="true", partitions="7").topic == str(path)  # it is there, and stays as it is
    named = parsed(logs / "new", schema(value=BINARY, topic=TEXT), createTopic="true", partitions="2")
    assert named.topic is None
    assert [find_topic(str(logs / "new" / name), make=named.make).config.partitions for name in "cc"] == [2, 2]
    counts = {name: find_topic(str(logs / name)).config.partitions for name in ("a", "b", "topic")}
    assert counts == {"a": 1, "b": 7, "topic": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"createTopic": "yes"}, 'createTopic must be "true" or "false"'),
        ({"partitions": "3"}, "give createTopic=true, too"),
        ({"createTopic": "true", "partitions": "0"}, "a number from 1 to 10000, not '0'"),
        ({"createTopic": "true", "partitions": "many"}, "not 'many'"),
    ],
)
def test_mistake_about_a_topic_to_make_makes_none(options: dict[str, str], message: str, path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        parse({"path": str(path.parent / "new"), **options}, VALUE, overwrite=False, streaming=False)
    assert not (path.parent / "new").exists()


def test_transaction_is_named_by_both_options_or_neither(path: Path) -> None:
    both: dict[str, Any] = {"txnAppId": "etl", "txnVersion": "7"}
    found = parsed(path, **both)
    assert (found.app, found.version) == ("etl", 7)
    with pytest.raises(ValueError, match="a stream counts its batches itself"):
        parsed(path, streaming=True, **both)
    for wrong in ({"txnAppId": ""}, {"txnVersion": "-1"}, {"txnVersion": str(1 << 63)}):
        with pytest.raises(ValueError, match="must be a n"):
            parsed(path, **both | wrong)
    for name, value in both.items():
        with pytest.raises(ValueError, match="both of the options"):
            parsed(path, **{name: value})


def test_options_of_spark_and_unknown_ones(path: Path) -> None:
    parsed(path, streaming=True, checkpointLocation="/c", queryName="q")
    with pytest.raises(ValueError, match="unknown option txnapid; did you mean txnAppId?"):
        parsed(path, txnapid="a")
    with pytest.raises(ValueError, match="unknown option zzz; for writing there are path, topic"):
        parsed(path, zzz="a")
    for streaming, advice in ((False, 'mode\\("append"\\)'), (True, 'outputMode\\("append"\\)')):
        with pytest.raises(ValueError, match=f"never overwritten: use {advice}"):
            parse({"path": str(path)}, VALUE, overwrite=True, streaming=streaming)


def test_columns_are_known_in_any_case_and_checked(path: Path) -> None:
    columns = schema(
        KEY=TEXT, Value=TEXT, headers=HEADERS, partition=IntegerType(), timestamp=TimestampType(), offset=LongType(),
        timestampType=IntegerType(), topic=TEXT,
    )  # fmt: skip
    assert parsed(path, columns).columns == {
        "key": "KEY", "value": "Value", "headers": "headers", "partition": "partition", "timestamp": "timestamp",
        "topic": "topic",
    }  # fmt: skip
    for message, wrong in (
        ("there is no column value; there are key", schema(key=BINARY)),
        ("column zzz cannot be written; there are value, key", schema(value=BINARY, zzz=LongType())),
        ("column KEY is there twice", schema(value=BINARY, key=BINARY, KEY=BINARY)),
        ("column partition must be int, not bigint", schema(value=BINARY, partition=LongType())),
        ("column headers must be array<struct<key", schema(value=BINARY, headers=BINARY)),
        ("column headers must be array<struct<key", schema(value=BINARY, headers=ArrayType(TEXT))),
    ):
        with pytest.raises(ValueError, match=message):
            parsed(path, wrong)


def test_partitioner_of_the_application_needs_the_column(tmp_path: Path) -> None:
    path = make(tmp_path / "logs" / "own", partitioner=by_region)
    parsed(path)
    parsed(path, schema(value=BINARY, key=BINARY, partition=IntegerType()))
    with pytest.raises(ValueError, match="has the application's partitioner by_region, which Spark does not have"):
        parsed(path, schema(value=BINARY, key=BINARY))
    target = parsed(path.parent, schema(value=BINARY, key=BINARY, topic=TEXT))
    with pytest.raises(ValueError, match="has the application's partitioner by_region"):
        deal(target, key=[b"k"], value=[b"v"], topic=["own"])


# --- rows ----------------------------------------------------------------------------------------------------


class Dealt(TaskStage):
    """Keeps the rows."""

    def __init__(self) -> None:
        super().__init__(REAL, lambda: NOW, "write")
        self.dealt: list[tuple[str, int, list[dict[str, Any]]]] = []

    def add(self, place: TargetTopic, partition: int, records: pa.RecordBatch) -> None:
        self.dealt.append((Path(place.path).name, partition, records.to_pylist()))


def deal(target: Target, *, keyless: int = 0, **columns: Any) -> list[tuple[str, int, list[dict[str, Any]]]]:
    stage = Dealt()
    dealer = RowPartitioner(target, stage, keyless=keyless, now=lambda: NOW)
    dealer.deal(pa.RecordBatch.from_pydict({name: pa.array(each) for name, each in columns.items()}))
    return stage.dealt


def test_rows_go_to_the_partitions_of_their_keys_and_keep_their_columns(path: Path) -> None:
    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    headers = pa.array([[{"key": "h", "value": b"1"}], None], pa.large_list(pair))
    target = parsed(path, schema(value=TEXT, key=TEXT, headers=HEADERS))
    rows = deal(target, keyless=8, value=["a", "b"], key=["k", None], headers=headers)
    assert rows == [
        (path.name, by_crc32(b"k", 3), [{"value": b"a", "key": b"k", "headers": [{"key": "h", "value": b"1"}]}]),
        (path.name, 2, [{"value": b"b", "key": None, "headers": None}]),
    ]


def test_topic_that_an_executor_does_not_see_is_an_error_that_names_the_host(path: Path) -> None:
    target = parsed(path)
    path.rename(path.parent / "elsewhere")
    with pytest.raises(FileNotFoundError) as error:
        deal(target, value=[b"v"])
    assert socket.gethostname() in error.value.__notes__[0]
    assert "the driver and all executors mount at the same path" in error.value.__notes__[0]


def test_rows_are_dealt_by_topic_and_partition_in_their_order(path: Path) -> None:
    make(path.parent / "other")
    target = parsed(path.parent, schema(value=TEXT, topic=TEXT, partition=IntegerType()))
    rows = deal(
        target, keyless=4, value=list("abcdef"), topic=["topic", "other", "topic", "topic", "other", "topic"],
        partition=pa.array([2, 0, None, 2, 0, 0], pa.int32()),
    )  # fmt: skip
    assert rows == [
        ("topic", 0, [{"value": b"f"}]),
        ("topic", 1, [{"value": b"c"}]),
        ("topic", 2, [{"value": b"a"}, {"value": b"d"}]),
        ("other", 0, [{"value": b"b"}, {"value": b"e"}]),
    ]
    with pytest.raises(ValueError, match="a row whose topic is null"):
        deal(target, value=["a"], topic=pa.array([None], pa.string()), partition=pa.array([0], pa.int32()))
    with pytest.raises(ValueError, match="is not a name"):
        deal(target, value=["a"], topic=["../x"], partition=pa.array([0], pa.int32()))
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"a record for partition {wrong}, and .* has 3 partitions"):
            deal(target, value=["a"], topic=["topic"], partition=pa.array([wrong], pa.int32()))
    assert deal(target, value=[], topic=[], partition=[]) == []


def test_time_that_is_null_is_the_time_of_writing(path: Path) -> None:
    target = parsed(path, schema(value=BINARY, timestamp=TimestampType()))
    times = pa.array(np.array([5, 6]), pa.timestamp("us", tz="America/St_Johns"))
    times = pa.concat_arrays([times, pa.nulls(1, times.type)])
    ((_, _, rows),) = deal(target, value=[b"a", b"b", None], timestamp=times)
    assert rows == [
        {"value": b"a", "timestamp": 5}, {"value": b"b", "timestamp": 6}, {"value": None, "timestamp": NOW},
    ]  # fmt: skip


# --- which write it is -------------------------------------------------------------------------------------


def test_task_knows_its_query_from_local_properties(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        properties: ClassVar[dict[str, str]] = {}

        def partitionId(self) -> int:
            return 5

        def getLocalProperty(self, name: str) -> str | None:
            return self.properties.get(name)

    monkeypatch.setattr(TaskContext, "get", Context)
    writer = StreamWriter({"path": str(path)}, VALUE)

    def found() -> tuple[Any, ...]:
        message: Any = writer.write(iter(()))
        return message.task, message.query, message.batch, message.run

    assert found() == (5, None, None, None)
    Context.properties["sql.streaming.queryId"] = "query"
    assert found() == (5, "query", None, None)
    Context.properties |= {"streaming.sql.batchId": "3", "spark.jobGroup.id": "run"}
    assert found() == (5, "query", 3, "run")


def test_tasks_of_another_batch_are_refused(path: Path) -> None:
    writer = StreamWriter({"path": str(path)}, VALUE)
    right = Message(0, Staging("a", (), b"", {}), "query", 3, "run")
    for wrong in (
        Message(0, Staging("a", (), b"", {}), "query", 2, "run"),
        Message(0, Staging("a", (), b"", {}), None, 3, "run"),
        Message(0, Staging("a", (), b"", {}), "query", 3, None),
        Message(0, Staging("a", (), b"", {}), "query", 3, "other run"),
    ):
        with pytest.raises(LogError, match="the tasks of batch 3 say that they are of batch"):
            writer.commit([right, wrong] if wrong.run == "other run" else [wrong], 3)
    writer.commit([right, None], 3)  # with nothing to commit
    writer.abort([right, None], 3)
    writer.commit([], 4)
    writer.abort([], 4)


def test_app_of_a_batch_write_is_the_option_and_the_topic_or_random(path: Path) -> None:
    options = {"path": str(path), "txnAppId": "etl", "txnVersion": "7"}
    section = Section(str(path), bytes(range(16)), 0, "", 0, 1, 1)
    inside = Message(0, Staging("a", (section,), b"", {}), "query", 3, "run")
    found = BatchWriter(options, VALUE)._write([inside])
    app = f"etl/{bytes(range(16)).hex()}"
    assert (found.app, found.version, found.source, found.is_new, found.batch) == (app, 7, "query", False, 3)
    assert found.owner.endswith(", batch 3")
    everywhere = options | {"path": str(path.parent)}
    assert BatchWriter(everywhere, schema(value=BINARY, topic=TEXT))._write([]).app == "etl"
    first, second = (BatchWriter({"path": str(path)}, VALUE) for _ in range(2))
    assert first._write([]).app != second._write([]).app
    rebuild, arguments = first.__reduce__()
    assert rebuild(*arguments)._write([]) == first._write([])
    first.commit([])
    first.abort([])


def test_writer_is_sent_with_an_absolute_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    writer = StreamWriter({"PATH": "topic"}, VALUE)
    monkeypatch.chdir("/")
    rebuild, arguments = writer.__reduce__()
    rows = pa.RecordBatch.from_pydict({"value": pa.array([b"a"])})
    message = rebuild(*arguments).write(iter([rows]))
    assert [each.topic for each in message.staging.sections] == [str(path)]
    assert (message.query, message.task) == (None, 0)


def test_task_that_fails_removes_what_it_has_staged(path: Path) -> None:
    def rows() -> Any:
        for _ in range(9):
            yield pa.RecordBatch.from_pydict({"value": pa.array([bytes(5 << 20)])})
        assert list((path / "staging").glob("*"))
        raise OSError("the rows end")

    with pytest.raises(OSError, match="the rows end"):
        BatchWriter({"path": str(path)}, VALUE).write(rows())
    assert not list((path / "staging").glob("*"))
