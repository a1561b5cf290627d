"""Copies of topics in an object store: the Spark source against an S3 API server, and its rows against the reader's."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from s3_server import S3Server, s3_server
from spark_logs import (
    Row,
    all_rows,
    in_order,
    options_of,
    random_topic,
    scan_rows,
    splits_of,
)
from spark_session import local_session

from conftest import NOW, QUIET, last_segment
from loglib import CorruptLogError, OffsetOutOfRangeError, Topic, testing
from loglib.config.times import to_datetime
from loglib.format.watermark import Mark, encode_new
from loglib.log import topic_file
from loglib.offload import tier
from loglib.offload.storage import storage_of
from loglib.segment import HEADER_BYTES, Identity, read_segment_header
from loglib.spark import counts
from loglib.spark.options import parse
from loglib.spark.ranges import find_ranges, find_topics
from loglib.spark.session import path_of
from loglib.spark.sink_target import parse as parse_target
from loglib.system.files import REAL

SHOWN = "s3://bucket/"


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic that no test changes: two partitions of several segments, and one without records."""
    return random_topic(tmp_path_factory.mktemp("logs") / "topic", seed=1, batches=50, empty_partitions=1)


@pytest.fixture(scope="module")
def copy(store: S3Server, topic: Path) -> str:
    """The URI of its copy."""
    store.sync(topic, "whole/topic")
    return store.uri("whole/topic")


@pytest.fixture
def changed(store: S3Server, topic: Path, tmp_path: Path) -> str:
    """The key of another copy, which the test may change."""
    key = f"{tmp_path.name}/topic"
    store.sync(topic, key)
    return key


def below(path: Path, ends: dict[int, int]) -> list[Row]:
    """The records of a topic below an offset in each partition."""
    return [row for row in all_rows(path) if row["offset"] < ends[row["partition"]]]


def last_bases(path: Path, partitions: int = 3) -> dict[int, int]:
    return {number: int(last_segment(path, number).stem) for number in range(partitions)}


# --- the same records --------------------------------------------------------------------------------


@pytest.mark.parametrize("split_bytes", [1000, 1 << 20])
def test_copy_gives_the_records_of_the_log(copy: str, topic: Path, split_bytes: int) -> None:
    rows = scan_rows(copy, split_bytes=split_bytes, includeHeaders=True)
    assert in_order(rows) == in_order(all_rows(topic))


@pytest.mark.parametrize(
    "options",
    [
        {"start": to_datetime(NOW + 7).isoformat()},
        {"end": to_datetime(NOW + 4).isoformat(), "columns": "offset,partition,topic"},
        {"startingTimestamp": NOW // 1000 + 1, "startingOffsetsByTimestampStrategy": "latest"},
    ],
)
def test_times_give_the_same_ranges_in_a_copy(copy: str, topic: Path, options: dict[str, Any]) -> None:
    assert scan_rows(copy, **options) == scan_rows(topic, **options)


def test_offsets_give_the_same_ranges_in_a_copy(copy: str, topic: Path) -> None:
    rows = [row for row in all_rows(topic) if row["partition"] == 1]
    start, end = rows[7]["offset"], rows[-9]["offset"]
    options = {"assign": '{"topic": [1]}', "start": start, "end": end, "includeHeaders": True}
    assert scan_rows(copy, split_bytes=3000, **options) == rows[7:-9]
    with pytest.raises(OffsetOutOfRangeError):
        scan_rows(copy, assign='{"topic": [1]}', start=1 << 40)


@pytest.mark.parametrize("compression", ["none", "zlib"])
def test_large_log_is_read_in_windows(store: S3Server, tmp_path: Path, compression: str) -> None:
    path = tmp_path / "large"
    with testing.open_topic(path, clock=lambda: NOW, compression=compression, segment_bytes=4 << 20, **QUIET) as topic:
        for each in range(90):
            topic.append_many([bytes([each, number]) * 50_000 for number in range(2)])
            topic.flush()
    store.sync(path, f"{compression}/large")
    uri = store.uri(f"{compression}/large")
    options = options_of(uri)
    del store.requests[:]
    splits = splits_of(find_ranges(options), 5 << 20)
    planning = [each for each in store.requests if each.range]
    assert len(planning) <= 3  # topic.json, the watermark, and nothing of the log
    del store.requests[:]
    rows = scan_rows(uri, splits=splits, includeHeaders=True)
    assert rows == all_rows(path)
    if compression == "none":
        sizes = [_size(each.range) for each in store.requests if each.range]
        assert max(sizes) >= 2 << 20 and sum(sizes) < 1.5 * sum(split.size_bytes for split in splits) + (1 << 20)


def _size(bytes_: str) -> int:
    first, last = bytes_.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def test_uploaded_segments_are_read_up_to_the_newest_manifest(store: S3Server, topic: Path, tmp_path: Path) -> None:
    made = tier(topic, store.uri("tiered/topic"))
    tier(topic, tmp_path / "place" / "topic")
    store.put(f"tiered/topic/0000/{made.ends[0]:020d}.log", b"not yet named by a manifest")
    expected = in_order(below(topic, made.ends))
    for place in (store.uri("tiered/topic"), store.uri("tiered"), tmp_path / "place" / "topic", tmp_path / "place"):
        assert in_order(scan_rows(place, split_bytes=5000, includeHeaders=True)) == expected
    assert sum(counts(store.uri("tiered/topic")).values()) == len(expected) > 0


def test_directory_of_topics_is_read(store: S3Server, tmp_path: Path) -> None:
    for seed, name in enumerate(("clicks", "views")):
        store.sync(random_topic(tmp_path / name, seed, batches=5), f"many/{name}")
    rows = scan_rows(store.uri("many"), includeHeaders=True)
    assert in_order(rows) == in_order(all_rows(tmp_path / "clicks") + all_rows(tmp_path / "views"))
    assert {row["topic"] for row in scan_rows(store.uri("many/"), subscribe="views")} == {"views"}


def test_counts_of_a_copy_come_from_headers(copy: str, topic: Path) -> None:
    expected = {number: sum(row["partition"] == number for row in all_rows(topic)) for number in range(3)}
    assert counts(copy) == expected


# --- requests ------------------------------------------------------------------------------------------


def test_tasks_list_nothing_and_read_only_ranges_of_segments(copy: str, store: S3Server, topic: Path) -> None:
    splits = splits_of(find_ranges(options_of(copy)), 2000)
    splits = pickle.loads(pickle.dumps(splits))
    del store.requests[:]
    rows = scan_rows(copy, splits=splits, includeHeaders=True)
    assert in_order(rows) == in_order(all_rows(topic))
    assert store.requests
    for request in store.requests:
        assert request.path.endswith(".log")
        assert request.method == "HEAD" or (request.method == "GET" and request.range)


def test_planning_reads_headers_by_ranges(copy: str, store: S3Server) -> None:
    del store.requests[:]
    find_ranges(options_of(copy))
    read = [each for each in store.requests if each.method == "GET" and not each.is_listing]
    assert read and all(each.range for each in read)
    assert not [each for each in read if each.path.endswith(".log")]


# --- what was copied -----------------------------------------------------------------------------------


def test_copy_without_a_watermark_gives_the_sealed_segments(
    store: S3Server, topic: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.sync(topic, "sealed", without="watermark")
    rows = scan_rows(store.uri("sealed"), includeHeaders=True)
    expected = below(topic, last_bases(topic))
    assert 0 < len(expected) < len(all_rows(topic))
    assert [row | {"topic": "topic"} for row in in_order(rows)] == in_order(expected)
    assert "has no watermark, so its last segment, from offset" in caplog.text


def test_nothing_beyond_the_watermark_is_read(store: S3Server, tmp_path: Path) -> None:
    """The watermark was copied first, and the segments later."""
    path = random_topic(tmp_path / "topic", seed=3, batches=20)
    store.sync(path, "early/topic")
    before = all_rows(path)
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        for partition in range(2):
            topic.append_many([b"later" * 200] * 9, partition=partition)
            topic.flush()
    store.sync(path, "early/topic", without="watermark")
    assert scan_rows(store.uri("early/topic"), includeHeaders=True) == before


def test_segments_that_end_before_the_watermark_are_an_error(store: S3Server, changed: str, topic: Path) -> None:
    """The segments were copied first, or the last one is missing."""
    key = store.segments(f"{changed}/0001")[-1]
    for content in (store.get(key)[:-8], None):
        if content is None:
            store.remove(key)
        else:
            store.put(key, content)
        with pytest.raises(CorruptLogError, match=r"found the end of the file, expected data up to offset \d+"):
            scan_rows(store.uri(changed))
    rows = scan_rows(store.uri(changed), onGap="skip", includeHeaders=True)
    ends = dict.fromkeys(range(3), 1 << 40) | {1: last_bases(topic)[1]}
    assert in_order(rows) == in_order(below(topic, ends))


def test_segments_that_retention_has_dropped_are_read(store: S3Server, tmp_path: Path) -> None:
    path = random_topic(tmp_path / "topic", seed=4, batches=40, partitions=1)
    store.sync(path, "kept/topic")
    expected = all_rows(path)
    with Topic.open(path, create=True) as topic:
        assert topic.partition(0).delete_before(last_bases(path, 1)[0]) > 0
    store.sync(path, "kept/topic")
    assert scan_rows(store.uri("kept/topic"), includeHeaders=True) == expected


def test_first_segment_that_the_watermark_names_must_be_there(
    store: S3Server, changed: str, topic: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, *_ = store.segments(f"{changed}/0000")
    store.remove(first)
    with pytest.raises(CorruptLogError, match=f"{SHOWN}{first}.*found no object, expected the first segment"):
        scan_rows(store.uri(changed))
    rows = scan_rows(store.uri(changed), failOnDataLoss=False, includeHeaders=True)
    base = int(Path(second).stem)
    assert in_order(rows) == [row for row in in_order(all_rows(topic)) if row["partition"] or row["offset"] >= base]
    assert f"no such object; the copy is read from offset {base} on" in caplog.text


def test_transaction_that_is_not_done_is_not_read(store: S3Server, changed: str, topic: Path) -> None:
    rows = [row for row in all_rows(topic) if row["partition"] == 0]
    with Topic.open(topic, mode="r") as opened:
        tail, held = (batch.offsets.start for batch in list(opened.partition(0).read().batches())[-2:])
    end = find_ranges(options_of(topic))[0].flushed_end
    mark = Mark.at_rest(9, 0, end, held)._replace(held_txn=7, held_from=held, held_tail=tail)
    store.put(f"{changed}/0000/watermark", encode_new(mark, _identity(topic).salt))
    got = scan_rows(store.uri(changed), assign='{"topic": [0]}', includeHeaders=True)
    assert got == [row for row in rows if row["offset"] < held]


def _identity(path: Path, partition: int = 0) -> Identity:
    described = topic_file.read(REAL, str(path))
    assert described is not None
    return Identity.of(described[0], partition)


@pytest.mark.parametrize("where", ["in the log", "at its start", "after it"])
def test_transaction_that_was_not_done_when_a_segment_was_sealed_is_not_read(
    store: S3Server, changed: str, topic: Path, where: str
) -> None:
    with Topic.open(topic, mode="r") as opened:
        batches = list(opened.partition(0).read().batches())
    last = last_segment(topic, 0)
    base = int(last.stem)
    sealed = [batch.offsets.start for batch in batches if batch.offsets.start < base]
    held = {"in the log": sealed[-3], "at its start": 0, "after it": base}[where]
    header = read_segment_header(REAL, str(last), _identity(topic))._replace(held_txn=7, held_from=held)
    store.put(f"{changed}/0000/{last.name}", header.encode() + last.read_bytes()[HEADER_BYTES:])
    store.remove(f"{changed}/0000/watermark")
    got = scan_rows(store.uri(changed), assign='{"topic": [0]}', includeHeaders=True)
    assert got == [row for row in all_rows(topic) if row["partition"] == 0 and row["offset"] < held]


# --- damage --------------------------------------------------------------------------------------------


def test_flipped_byte_is_found_and_named(store: S3Server, changed: str, topic: Path) -> None:
    key = store.segments(f"{changed}/0000")[1]
    content = bytearray(store.get(key))
    content[HEADER_BYTES + 300] ^= 1
    store.put(key, bytes(content))
    with pytest.raises(CorruptLogError, match=f"{SHOWN}{key}"):
        scan_rows(store.uri(changed))
    rows = scan_rows(store.uri(changed), onGap="skip", includeHeaders=True)
    whole = all_rows(topic)
    assert 0 < len(whole) - len(rows) <= 12
    assert all(row in whole for row in rows)


def cut(content: bytes) -> bytes:
    return content[:-16]


def longer(content: bytes) -> bytes:
    return content + bytes(16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "found no object, expected the log up to .*; a segment is missing"),
        (cut, "found no object, expected the log up to .*; a segment is missing, or the one before it was copied in"),
        (longer, "found an object of .* bytes, expected .*, up to the next segment"),
    ],
)
def test_copy_with_a_gap_is_refused_at_plan_time(
    store: S3Server, changed: str, topic: Path, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    key = store.segments(f"{changed}/0000")[1]
    if change is None:
        store.remove(key)
    else:
        store.put(key, change(store.get(key)))
    with pytest.raises(CorruptLogError, match=f"{SHOWN}{changed}/0000/.*{message}"):
        find_ranges(options_of(store.uri(changed)))
    rows = scan_rows(store.uri(changed), split_bytes=5000, onGap="skip", includeHeaders=True)
    bases = [int(Path(each).stem) for each in (key, *store.segments(f"{changed}/0000")) if each >= key]
    base, following = sorted(set(bases))[:2]
    outside = [row for row in all_rows(topic) if row["partition"] or not base <= row["offset"] < following]
    assert [row for row in in_order(rows) if row in outside] == in_order(outside)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "found no file, expected the segment that holds offset"),
        (cut, "found the end of the file, expected"),
        (lambda content: bytes(len(content)), "expected the segment magic"),
    ],
)
def test_object_that_has_changed_since_the_plan_is_an_error(
    store: S3Server, changed: str, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    splits = splits_of(find_ranges(options_of(store.uri(changed))), 1 << 20)
    key = store.segments(f"{changed}/0000")[1]
    if change is None:
        store.remove(key)
    else:
        store.put(key, change(store.get(key)))
    with pytest.raises(CorruptLogError, match=f"{SHOWN}{key}.*{message}"):
        scan_rows(store.uri(changed), splits=splits)


def test_segment_of_another_log_is_an_error(store: S3Server, changed: str, tmp_path: Path) -> None:
    other = random_topic(tmp_path / "topic", seed=1, batches=50, empty_partitions=1)
    store.sync(other / "0000", f"{changed}/0000", without="watermark")
    with pytest.raises(CorruptLogError, match="a segment of log .*, partition 0"):
        scan_rows(store.uri(changed))


def test_partition_without_objects_is_an_error(store: S3Server, changed: str) -> None:
    for key in store.segments(f"{changed}/0001"):
        store.remove(key)
    with pytest.raises(CorruptLogError, match=f"{SHOWN}{changed}/0001.*found no segment"):
        find_ranges(options_of(store.uri(changed)))
    for key in store.keys(f"{changed}/0001"):
        store.remove(key)
    with pytest.raises(CorruptLogError, match=f"{SHOWN}{changed}/0001.*found no directory"):
        find_ranges(options_of(store.uri(changed)))


def test_broken_watermark_is_an_error(store: S3Server, changed: str) -> None:
    store.put(f"{changed}/0000/watermark", bytes(4224))
    with pytest.raises(CorruptLogError, match="found no whole watermark, expected one of this log, or no such object"):
        find_ranges(options_of(store.uri(changed)))


# --- what is refused -----------------------------------------------------------------------------------


def test_missing_topics_and_unknown_stores_are_named_without_credentials(store: S3Server) -> None:
    with pytest.raises(FileNotFoundError, match="no such object, and none below it") as error:
        find_topics([store.uri("nothing/here")])
    assert error.value.filename == "s3://bucket/nothing/here"
    with pytest.raises(ValueError, match=r"^nfs://host/a is no path, and no URI that") as refused:
        find_topics(["nfs://key:secret@host/a?password=hidden"])
    assert "secret" not in str(refused.value) and "hidden" not in str(refused.value)
    assert storage_of("s3a://bucket/a/")[1] == "s3://bucket/a"


def test_streams_and_writes_are_refused() -> None:
    with pytest.raises(ValueError, match="s3://bucket/a is not on a file system: a stream reads a log that is being"):
        parse({"path": "s3://key:secret@bucket/a"}, now_us=NOW, streaming=True)
    with pytest.raises(ValueError, match="s3://bucket/a is not on a file system: a log is appended to in place"):
        parse_target({"path": "s3://bucket/a"}, StructType(), overwrite=False, streaming=False)


def test_objects_are_only_read(copy: str) -> None:
    storage, path = storage_of(copy)
    files = storage.files()
    with pytest.raises(OSError, match="a copy in an object store is only read"):
        files.open_write(f"{path}/topic.json")
    assert files.facts(f"{path}/topic.json").st_size > 0
    assert not files.exists(f"{path}/topic.jso")


def test_paths_of_calls_may_be_uris(tmp_path: Path) -> None:
    assert path_of("s3://bucket/a") == "s3://bucket/a"
    assert path_of("file:///a%20b") == "/a b"


# --- Spark -----------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.slow
def test_spark_reads_a_copy(copy: str, topic: Path, tmp_path: Path) -> None:
    with local_session(tmp_path / "warehouse") as spark:
        frame = spark.read.format("loglib").option("minPartitions", 4).option("includeHeaders", "true").load(copy)
        got = [(row.partition, row.offset, row.value and bytes(row.value)) for row in frame.collect()]
        _refuse_a_stream(spark, copy)
    assert sorted(got) == [(row["partition"], row["offset"], row["value"]) for row in in_order(all_rows(topic))]


def _refuse_a_stream(spark: SparkSession, copy: str) -> None:
    with pytest.raises(Exception, match="is not on a file system: a stream reads a log"):
        spark.readStream.format("loglib").load(copy).writeStream.format("noop").start().processAllAvailable()
