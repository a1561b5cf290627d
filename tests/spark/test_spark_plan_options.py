"""Options of the Spark source without Spark: the topics, records and columns that they choose, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import spark_planned
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType
from spark_logs import all_records, all_rows, in_order, options_of, random_topic, scan_rows

from conftest import NOW, QUIET
from loglib import Topic, testing
from loglib.config.arguments import Time
from loglib.errors import InvalidOffsetError
from loglib.spark.columns import arrow_schema, default_schema
from loglib.spark.options import Options, parse
from loglib.spark.ranges import find_ranges, find_topics
from loglib.spark.source import BatchReader

topic = spark_planned.topic
MILLISECONDS = NOW // 1000


# --- ranges ------------------------------------------------------------------------------------------


def test_planning_reads_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = random_topic(tmp_path / "topic", seed=11)
    for segment in path.rglob("*.log"):
        segment.write_bytes(bytes(segment.stat().st_size))
    assert all(each.size_bytes > 0 for each in find_ranges(options_of(path)))


def test_directory_of_topics_is_all_of_them_or_those_asked_for(tmp_path: Path) -> None:
    for name in ("clicks", "views", "errors"):
        random_topic(tmp_path / name, seed=len(name), partitions=2, batches=9)
    (tmp_path / "not-a-topic").mkdir()
    shutil.copytree(tmp_path / "views", tmp_path / ".views.0123.tmp")  # one that is just being made

    def read(**options: object) -> list[tuple[str, int]]:
        return sorted({each.part.key for each in find_ranges(options_of(tmp_path, **options))})

    assert read() == [(name, number) for name in ("clicks", "errors", "views") for number in (0, 1)]
    assert read(subscribe="views, clicks") == [("clicks", 0), ("clicks", 1), ("views", 0), ("views", 1)]
    assert read(subscribePattern="[ev].*s") == [("errors", 0), ("errors", 1), ("views", 0), ("views", 1)]
    assert read(subscribePattern="nothing") == []
    assert read(assign='{"views": [1], "clicks": [0]}') == [("clicks", 0), ("views", 1)]
    rows = scan_rows(tmp_path, split_bytes=500, includeHeaders=True)
    expected = [row for name in ("clicks", "errors", "views") for row in all_rows(tmp_path / name)]
    assert in_order(rows) == in_order(expected)
    for wrong, message in (
        ({"subscribe": "clicks,vews"}, "no topic vews at .*; there are clicks, errors, views"),
        ({"assign": '{"views": [2]}'}, "views has partitions 0 to 1, not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            read(**wrong)


def test_path_without_a_topic_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no topic\.json here or one level below"):
        find_topics([str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="no such directory on the driver"):
        find_topics([str(tmp_path / "missing")])
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="no such directory on the driver"):
        find_topics([str(tmp_path / "file")])


def test_two_topics_of_one_name_are_refused(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        random_topic(tmp_path / parent / "topic", seed=1, batches=1)
    with pytest.raises(ValueError, match="have the same name; load them separately"):
        find_topics([str(tmp_path / "a"), str(tmp_path / "b" / "topic")])
    assert len(find_topics([str(tmp_path / "a"), str(tmp_path / "a" / "topic")])) == 1


def test_empty_partitions_and_topics_have_empty_ranges(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "topic", create=True, partitions=3, **QUIET) as topic:
        assert scan_rows(tmp_path / "topic") == []
        topic.append(b"one", partition=1)
    ranges = find_ranges(options_of(tmp_path / "topic"))
    assert [each.size_bytes > 0 for each in ranges] == [False, True, False]
    assert scan_rows(tmp_path / "topic", includeHeaders=True) == all_rows(tmp_path / "topic")


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two partitions of twenty records, a millisecond apart, two in a batch."""
    path = tmp_path_factory.mktemp("timed") / "topic"
    with testing.open_topic(path, partitions=2, clock=lambda: NOW, **QUIET) as topic:
        for each in range(0, 20, 2):
            for partition in (0, 1):
                times = [NOW + each * 1000, NOW + (each + 1) * 1000]
                topic.append_many([b"%d" % each, b"%d" % (each + 1)], timestamps=times, partition=partition)
                topic.flush()
    return path


def numbers(path: Path, **options: object) -> dict[int, list[int]]:
    rows = scan_rows(path, split_bytes=300, **options)
    return {number: [int(row["value"]) for row in rows if row["partition"] == number] for number in (0, 1)}


def ms(after: int) -> int:
    return MILLISECONDS + after


def test_kafkas_options_choose_the_records_that_they_choose_there(timed: Path) -> None:
    def both(start: int, stop: int) -> dict[int, list[int]]:
        return {0: list(range(start, stop)), 1: list(range(start, stop))}

    offsets = [record.offset for record in all_records(timed) if record.partition == 0]
    assert numbers(timed) == both(0, 20)
    assert numbers(timed, startingOffsets="earliest", endingOffsets="latest") == both(0, 20)
    assert numbers(timed, startingTimestamp=ms(3), endingTimestamp=ms(7)) == both(3, 7)
    assert numbers(timed, endingTimestamp=ms(99)) == both(0, 20)
    assert numbers(timed, startingTimestamp=ms(3), startingOffsets="earliest") == both(3, 20)
    times = json.dumps({"topic": {"0": ms(5), "1": ms(8)}})
    assert numbers(timed, startingOffsetsByTimestamp=times) == {0: [*range(5, 20)], 1: [*range(8, 20)]}
    assert numbers(timed, endingOffsetsByTimestamp=times) == {0: [*range(5)], 1: [*range(8)]}
    places = json.dumps({"topic": {"0": offsets[5], "1": -2}})
    assert numbers(timed, startingOffsets=places) == {0: [*range(5, 20)], 1: [*range(20)]}
    places = json.dumps({"topic": {"0": offsets[5], "1": -1}})
    assert numbers(timed, endingOffsets=places) == {0: [*range(5)], 1: [*range(20)]}
    late = {"startingTimestamp": ms(99)}
    with pytest.raises(ValueError, match="no record is as late as option startingTimestamp says"):
        numbers(timed, **late)
    assert numbers(timed, **late, startingOffsetsByTimestampStrategy="latest") == both(0, 0)


def test_start_and_end_take_every_form_that_the_core_takes(timed: Path) -> None:
    offsets = [record.offset for record in all_records(timed) if record.partition == 0]
    assert numbers(timed, start="begin", end="end")[1] == [*range(20)]
    assert numbers(timed, start="end") == {0: [], 1: []}
    assert numbers(timed, start="-0s", end="2023-11-14T22:13:20.004Z")[0] == [*range(4)]
    assert numbers(timed, start="2023-11-14T23:13:20.018+01:00")[1] == [18, 19]
    assert numbers(timed, start=json.dumps({"1": offsets[7]})) == {0: [*range(20)], 1: [*range(7, 20)]}
    assert numbers(timed, end=json.dumps({"0": "begin", "1": "-0s"})) == {0: [], 1: []}
    one = json.dumps({"topic": [1]})
    assert numbers(timed, assign=one, start=offsets[3], end=offsets[5]) == {0: [], 1: [3, 4]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 4096}, "offset 4096 means another record in each of 2 partitions"),
        ({"start": '{"2": 0}'}, "option start names partition 2, which is not read"),
        ({"startingOffsets": '{"topic": {"0": 0}}'}, "must name every partition .* lacks partition 1 of topic topic"),
        ({"startingOffsets": '{"topic": {"0": 0, "1": 0}, "other": {"0": 0}}'}, "partition 0 of topic other"),
        ({"assign": '{"topic": [1]}', "start": 1 << 40}, "outside the log"),
        ({"assign": '{"topic": [1]}', "start": 3}, "no record has offset 3"),
        ({"start": "2023-11-14T22:13:20.009Z", "end": "2023-11-14T22:13:20.002Z"}, "lies after the end"),
    ],
)
def test_places_that_mean_nothing_here_are_refused(timed: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, LookupError), match=message):
        find_ranges(options_of(timed, **options))


def test_offset_that_is_no_record_is_refused_also_where_loss_is_accepted(timed: Path) -> None:
    with pytest.raises(InvalidOffsetError):
        find_ranges(options_of(timed, start='{"0": 3}', failOnDataLoss=False))


def test_offset_outside_the_log_is_moved_into_it_on_request(timed: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"partition 0: offset 1099511627776 is gone \(option start\)"):
        ranges = find_ranges(options_of(timed, start=json.dumps({"0": 1 << 40}), failOnDataLoss=False))
    assert [each.size_bytes > 0 for each in ranges] == [False, True]


# --- options -----------------------------------------------------------------------------------------


def parsed(**options: object) -> Options:
    return parse({"path": "/logs"} | {name: str(value) for name, value in options.items()}, now_us=NOW)


def test_options_are_known_in_any_case_and_have_defaults() -> None:
    options = parsed(
        INCLUDEHEADERS="True", maxbytesperpartition="64K", arrowBatchBytes="2mib", columns=" value, headers"
    )
    assert options.include_headers
    assert options.max_bytes_per_partition == 64 << 10
    assert options.arrow_batch_bytes == 2 << 20
    assert options.columns == ("value", "headers")
    defaults = parsed()
    assert (defaults.max_bytes_per_partition, defaults.arrow_batch_bytes) == (128 << 20, 4 << 20)
    assert (defaults.start.otherwise, defaults.end.otherwise, defaults.fail_on_data_loss) == ("begin", "end", True)
    assert parsed(start="-15m").start.otherwise == Time(NOW - 15 * 60 * 1_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffset": "earliest"}, "unknown option startingoffset; did you mean startingOffsets"),
        ({"minpartition": 3}, "did you mean minPartitions"),
        ({"zzz": 3}, "unknown option zzz; there are path, "),
        ({"archive": "/a"}, "gives the archive and the log as one table"),
        ({"archive": "/a", "failOnDataLoss": "false"}, "gives the archive and the log as one table"),
        ({"kafka.bootstrap.servers": "a:9092"}, "kafka.bootstrap.servers sets up a Kafka consumer"),
        ({"kafka.group.id": "a"}, "sets up a Kafka consumer"),
        ({"groupidprefix": "a"}, "option groupIdPrefix sets up a Kafka consumer"),
        ({"fetchOffset.numRetries": "3"}, "sets up a Kafka consumer"),
        ({"kafkaConsumer.pollTimeoutMs": "3"}, "sets up a Kafka consumer"),
        ({"maxoffsetspertrigger": "3"}, "option maxOffsetsPerTrigger is for streams"),
        ({"owner": "me", "provider": "loglib"}, "make a temporary view"),
        ({"subscribe": "a", "assign": "{}"}, "give one of the options subscribe, subscribePattern and assign"),
        ({"subscribe": "a,,b"}, "different names separated by commas"),
        ({"subscribePattern": "("}, "is not a regular expression"),
        ({"assign": '{"a": 1}'}, "must be JSON of partitions by topic"),
        ({"assign": '{"a": [1, 1]}'}, "must be JSON of partitions by topic"),
        ({"assign": "[]"}, "must be JSON of partitions by topic"),
        ({"startingOffsets": "latest"}, "cannot be latest"),
        ({"startingOffsets": '{"a": {"0": -1}}'}, "cannot be latest"),
        ({"endingOffsets": "earliest"}, "cannot be earliest"),
        ({"endingOffsets": '{"a": {"0": -2}}'}, "cannot be earliest"),
        ({"columns": "value,Value"}, "different names separated by commas"),
        ({"columns": "value", "includeHeaders": "true"}, "includeHeaders=true and columns=value contradict each other"),
        ({"columns": "Headers", "includeHeaders": "false"}, "includeHeaders=false and columns=Headers contradict"),
        ({"start": "9", "end": "8"}, r"the start, 9, lies after the end, 8 \(options start and end\)"),
        ({"start": "end", "end": "begin"}, "the start, end, lies after the end, begin"),
        ({"start": '{"1": 9}', "end": '{"0": 1, "1": 8}'}, "the start, 9, lies after the end, 8 in partition 1"),
        ({"start": "-1m", "end": "-2m"}, r"the start, 2023-.*, lies after the end, 2023-"),
        (
            {"startingTimestamp": "2000", "endingOffsetsByTimestamp": '{"a": {"0": 1000}}'},
            r"00:00:02.*after the end, .*00:00:01\+00:00 in partition 0 of topic a \(options startingTimestamp and end",
        ),
        ({"endingOffsets": "tomorrow"}, "must be earliest, latest or JSON"),
        ({"endingOffsets": '{"a": {"x": 1}}'}, "must be earliest, latest or JSON"),
        ({"endingOffsets": '{"a": {"0": true}}'}, "must be earliest, latest or JSON"),
        ({"startingTimestamp": "noon"}, "a time in milliseconds"),
        ({"startingOffsetsByTimestamp": "{]"}, "JSON of milliseconds"),
        ({"startingOffsetsByTimestampStrategy": "skip"}, "error or latest"),
        ({"start": "2024-05-01"}, "a time with its zone"),
        ({"start": "yesterday"}, "option start must be"),
        ({"end": '{"a": 1}'}, "JSON of places by partition"),
        ({"end": "begin", "endingOffsets": "latest"}, "options end and endingOffsets say the same thing twice"),
        ({"failOnDataLoss": "no"}, "true or false"),
        ({"onGap": "ignore"}, "option onGap must be raise or skip, not 'ignore'"),
        ({"minPartitions": "0"}, "a number, at least 1"),
        ({"minPartitions": "many"}, "a number, at least 1"),
        ({"maxBytesPerPartition": "10"}, "a size like 64m, in bytes 65536"),
        ({"arrowBatchBytes": "17m"}, "a size like 64m, in bytes 1024 to 16777216"),
        ({"arrowBatchBytes": "big"}, "a size like 64m"),
    ],
)
def test_wrong_options_are_refused_with_what_to_write_instead(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(**options)


def test_paths_are_directories_that_everyone_can_see() -> None:
    assert parse({"path": "file:///logs/a%20b"}, now_us=NOW).paths == ("/logs/a b",)
    assert parse({"paths": '["/a", "b"]'}, now_us=NOW).paths == ("/a", "b")
    with pytest.raises(ValueError, match="s3://bucket/logs is not on a file system: a stream reads a log that is"):
        parse({"path": "s3a://bucket/logs"}, now_us=NOW, streaming=True)
    with pytest.raises(ValueError, match="no path: give load"):
        parse({}, now_us=NOW)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (StructField("vaule", BinaryType()), "no column vaule; did you mean value"),
        (StructField("Offfset", LongType()), "no column Offfset; did you mean offset"),
        (StructField("Offset", StringType()), "column Offset is bigint, not string"),
        (StructField("qqq", LongType()), "no column qqq; there are key, value"),
        (StructField("offset", StringType()), "column offset is bigint, not string; cast it in the query"),
        (StructField("value", LongType()), "column value is binary or string, not bigint"),
    ],
)
def test_spark_schema_with_columns_that_do_not_exist_is_refused(field: StructField, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrow_schema(StructType([field]), options_of("/logs/t"))


def test_column_that_is_there_twice_is_refused() -> None:
    fields = [StructField("offset", LongType()), StructField("OFFSET", LongType())]
    with pytest.raises(ValueError, match="column OFFSET is there twice"):
        arrow_schema(StructType(fields), options_of("/logs/t"))


def test_columns_are_known_in_any_case_and_named_as_the_user_wrote_them(topic: Path) -> None:
    expected = [{"VALUE": row["value"], "Offset": row["offset"], "TOPIC": row["topic"]} for row in all_rows(topic)]
    assert scan_rows(topic, columns="VALUE,Offset,TOPIC") == expected
    with pytest.raises(ValueError, match="no column Ofset; did you mean offset"):
        scan_rows(topic, columns="Ofset")


def test_reader_on_an_executor_is_the_planned_one(topic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages count from the time of the plan; counted from the time of a task, this start would lie after the end."""
    given = {"path": str(topic), "start": "-2m", "end": "2023-11-14T22:13:20Z", "columns": "value"}
    monkeypatch.setattr("loglib.spark.source.SYSTEM", lambda: NOW)
    reader = BatchReader(given, default_schema(options_of(topic, columns="value")))
    monkeypatch.setattr("loglib.spark.source.SYSTEM", lambda: NOW + 200_000_000)
    rebuild, arguments = reader.__reduce__()
    again = rebuild(*arguments)
    assert (again._options, again._schema) == (reader._options, reader._schema)


def test_headers_that_the_schema_has_not_are_refused(topic: Path) -> None:
    schema = StructType([StructField("value", BinaryType())])
    with pytest.raises(ValueError, match=r"includeHeaders asks for headers, and schema\(\) \(value\) has none"):
        BatchReader({"path": str(topic), "includeheaders": "true"}, schema)
    BatchReader({"path": str(topic), "columns": "VALUE"}, schema)
    with pytest.raises(ValueError, match=r"the option columns \(key\) and schema\(\) differ"):
        BatchReader({"path": str(topic), "columns": "key"}, schema)
