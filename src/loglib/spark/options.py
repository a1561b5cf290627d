"""Options: the options of a query, checked and turned into numbers, names and places.

Invariant: an `Options` has passed every check that needs no file. An unknown name is an error that suggests
the nearest known name. An option that needs a Kafka broker is refused, never ignored, and so are options that
contradict each other. Names are those of Spark's Kafka connector, if it has the option. Case does not matter,
because Spark passes names in lower case. Messages spell a known name as the documentation does.

Processes: plain facts, made on the driver.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

from ..config.arguments import Start, Time, check_names, parse_start
from ..config.quantities import microseconds
from ..config.times import to_datetime
from ..config.uri import is_remote, local_path
from ..log.reader import StartLike
from ..offload.storage import storage_of
from .where import Where, parse_where

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# About 0.2 s of work for a task that takes 10 ms to start.
_SPLIT_BYTES = 128 << 20
# Spark is fastest with 1 to 8 MiB in an Arrow batch, and much slower from 16 MiB on: see docs/spark.md.
_ARROW_BATCH_BYTES = 4 << 20
_ALLOWED_ARROW_BATCH_BYTES = range(1 << 10, (16 << 20) + 1)
_ALLOWED_SPLIT_BYTES = range(64 << 10, 1 << 63)

Place = str | int | Time  # "begin", "end", an offset, or the first record at or after a time
_BEGIN, _END = "begin", "end"

_KNOWN = (
    "path", "paths", "subscribe", "subscribePattern", "assign", "columns", "includeHeaders", "where",
    "start", "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "end", "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp",
    "failOnDataLoss", "onGap", "minPartitions", "cores", "maxBytesPerPartition", "arrowBatchBytes", "isolation",
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger", "groupId",
)  # fmt: skip
_CANONICAL = {name.lower(): name for name in _KNOWN}
_CONSUMERS = re.compile(r"kafka\..*|kafkaconsumer\..*|fetchoffset\..*|groupidprefix", re.IGNORECASE)
_OF_STREAMS = {"maxoffsetspertrigger", "minoffsetspertrigger", "maxtriggerdelay", "maxbytespertrigger", "groupid"}
_OF_BATCHES = {"end", "endingoffsets", "endingtimestamp", "endingoffsetsbytimestamp"}
_KAFKAS = {
    name.lower(): name
    for name in (
        "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs", "groupIdPrefix",
    )
}  # fmt: skip
_TABLES = ("owner", "provider", "location")  # what a catalog adds to a table's options

_SIZE = re.compile(r"(\d+)\s*(?:([kmgt])i?b?|b)?", re.IGNORECASE)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_DURATION = re.compile(r"(\d+)\s*(ms|s|sec|second|seconds|m|min|minute|minutes|h|hour|hours)", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Places:
    """The start, or the end, of reading in each partition."""

    option: str  # the option that gave it, for messages
    otherwise: Place | None  # for partitions that are not named; None: all must be named
    named: Mapping[str | None, Mapping[int, Place]]  # by topic; None stands for the only topic
    must_match: bool = False  # a time after all records is an error

    def at(self, topic: str | None, partition: int) -> Place | None:
        """The place in one partition; None if it should have been named."""
        places = self.named.get(topic) or self.named.get(None) or {}
        return places.get(partition, self.otherwise)


@dataclass(frozen=True, slots=True)
class Trigger:
    """The limits of one batch of a stream; None: no limit."""

    max_records: int | None
    max_bytes: int | None
    min_records: int | None
    max_delay_s: float  # after this time a batch with fewer records than `min_records` runs, too


@dataclass(frozen=True, slots=True)
class Options:
    """A query's options, with defaults filled in."""

    paths: tuple[str, ...]
    topics: tuple[str, ...] | None  # None: all topics
    pattern: re.Pattern[str] | None
    assigned: Mapping[str, tuple[int, ...]] | None
    columns: tuple[str, ...] | None
    include_headers: bool
    where: Where | None
    start: Places
    end: Places
    fail_on_data_loss: bool
    skip_damage: bool
    min_partitions: int | None
    cores: int | None  # of the cluster; None: nobody has said
    max_bytes_per_partition: int
    arrow_batch_bytes: int
    trigger: Trigger
    group: str | None  # the consumer group that gets a stream's progress


def for_streams(given: Mapping[str, str]) -> bool:
    """True if an option has a meaning for streams only."""
    return any(name.lower() in _OF_STREAMS for name in given)


def parse(given: Mapping[str, str], *, now_us: int, streaming: bool = False) -> Options:
    """Check the options. `ValueError` names the wrong option and its allowed values. Ages count from `now_us`."""
    options = {name.lower(): value for name, value in given.items()}
    for name in options:
        if name not in _CANONICAL:
            _refuse_name(name)
        if name in (_OF_BATCHES if streaming else _OF_STREAMS):
            kind = "batch reads, and a stream has no end" if streaming else "streams, and this is a batch read"
            raise ValueError(f"option {_CANONICAL[name]} is for {kind}: leave it out")
    _check_isolation(options)
    if len(options.keys() & {"subscribe", "subscribepattern", "assign"}) > 1:
        raise ValueError("give one of the options subscribe, subscribePattern and assign, not several")
    start = _places(options, "start", "starting", now_us=now_us, streaming=streaming)
    end = _places(options, "end", "ending", now_us=now_us, streaming=streaming)
    _check_order(start, end)
    return Options(
        paths=_paths(options, streaming=streaming),
        topics=_names(options, "subscribe"),
        pattern=_pattern(options),
        assigned=_assigned(options),
        columns=_columns(options),
        include_headers=_flag(options, "includeHeaders", default=False),
        where=parse_where(options["where"], now_us=now_us) if "where" in options else None,
        start=start,
        end=end,
        fail_on_data_loss=_flag(options, "failOnDataLoss", default=True),
        skip_damage=_choice(options, "onGap", "raise", "skip", default="raise") == "skip",
        min_partitions=_number(options, "minPartitions", at_least=1),
        cores=_number(options, "cores", at_least=1),
        max_bytes_per_partition=_size(options, "maxBytesPerPartition", _SPLIT_BYTES, _ALLOWED_SPLIT_BYTES),
        arrow_batch_bytes=_size(options, "arrowBatchBytes", _ARROW_BATCH_BYTES, _ALLOWED_ARROW_BATCH_BYTES),
        trigger=_trigger(options),
        group=_group(options),
    )


def _refuse_name(name: str) -> NoReturn:
    refuse_consumers(name)
    if name in _TABLES:
        raise ValueError("no catalog table can be USING loglib: PySpark forgets its options; make a temporary view")
    if name == "archive":
        raise ValueError(
            "format('loglib') reads the log alone, because Parquet through Python workers takes twice as long; "
            "loglib.spark.read(spark, topic, archive=...) gives the archive and the log as one table"
        )
    raise ValueError(f"unknown option {name}; {nearest(name, _CANONICAL)}")


def nearest(name: str, known: Mapping[str, str], *, there_are: str = "there are") -> str:
    """A hint for an unknown name in lower case: the nearest known one, or all of them. `known` maps from lower case."""
    found = get_close_matches(name, known, n=1)
    return f"did you mean {known[found[0]]}?" if found else f"{there_are} {', '.join(known.values())}"


def refuse_consumers(name: str) -> None:
    """`ValueError` for an option that sets up a client of Kafka."""
    if _CONSUMERS.fullmatch(name):
        spelled = _KAFKAS.get(name, name)
        raise ValueError(f"option {spelled} sets up a Kafka consumer; loglib reads the files themselves: leave it out")


def _check_isolation(options: Mapping[str, str]) -> None:
    isolation = options.get("isolation", "read_committed").strip().lower()
    if isolation != "read_committed":
        _wrong("isolation", isolation, "read_committed: nothing else is ever visible in a log")


def _wrong(name: str, value: str, expected: str) -> NoReturn:
    raise ValueError(f"option {name} must be {expected}, not {value!r}")


# --- which topics ----------------------------------------------------------------------------------


def _paths(options: Mapping[str, str], *, streaming: bool) -> tuple[str, ...]:
    if "path" in options:
        given = [options["path"]]
    elif "paths" in options:  # from load([...])
        given = json.loads(options["paths"])
    else:
        raise ValueError("no path: give load() the directory of a topic, or a directory of topics")
    if streaming:
        for path in given:
            refuse_remote(path, "a stream reads a log that is being written; an object store has copies of logs")
    return tuple(map(local_path, given))


def refuse_remote(path: str, why: str) -> None:
    """`ValueError` for a path in an object store; `why` it cannot be used."""
    if is_remote(path):
        raise ValueError(
            f"{storage_of(path)[1]} is not on a file system: {why}. Give a directory that is mounted at the same path "
            "on the driver and all executors"
        )


def _names(options: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    text = options.get(name.lower())
    if text is None:
        return None
    names = tuple(each.strip() for each in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        _wrong(name, text, "different names separated by commas")
    return names


def _columns(options: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names as the user wrote them. They must differ in more than case, as in Spark."""
    names = _names(options, "columns")
    if names is None:
        return None
    if len({name.lower() for name in names}) < len(names):
        _wrong("columns", options["columns"], "different names separated by commas")
    has_headers = "headers" in map(str.lower, names)
    if "includeheaders" in options and _flag(options, "includeHeaders", default=False) != has_headers:
        raise ValueError(
            f"options includeHeaders={options['includeheaders']} and columns={options['columns']} contradict each "
            "other: columns says by itself whether to read headers; leave out includeHeaders"
        )
    return names


def _pattern(options: Mapping[str, str]) -> re.Pattern[str] | None:
    text = options.get("subscribepattern")
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ValueError(f"option subscribePattern is not a regular expression: {error}") from error


def _assigned(options: Mapping[str, str]) -> Mapping[str, tuple[int, ...]] | None:
    text = options.get("assign")
    if text is None:
        return None
    expected = 'JSON of partitions by topic, as in {"clicks": [0, 1]}'
    assigned: dict[str, tuple[int, ...]] = {}
    for topic, numbers in _json("assign", text, expected).items():
        if not isinstance(numbers, list) or not all(map(_is_int, numbers)) or len(set(numbers)) < len(numbers):
            _wrong("assign", text, expected)
        assigned[topic] = tuple(numbers)
    return assigned


# --- streams ---------------------------------------------------------------------------------------


def _trigger(options: Mapping[str, str]) -> Trigger:
    least = _number(options, "minOffsetsPerTrigger", at_least=1)
    most = _number(options, "maxOffsetsPerTrigger", at_least=1)
    if least is not None and most is not None and least > most:
        raise ValueError(f"option minOffsetsPerTrigger, {least}, is above maxOffsetsPerTrigger, {most}")
    if least is None and "maxtriggerdelay" in options:
        raise ValueError("option maxTriggerDelay says how long to wait for minOffsetsPerTrigger records: give both")
    most_bytes = _size(options, "maxBytesPerTrigger", 0, range(1, 1 << 63)) or None
    return Trigger(most, most_bytes, least, _seconds(options, "maxTriggerDelay", 15 * 60.0))


def _group(options: Mapping[str, str]) -> str | None:
    name = options.get("groupid")
    if name is not None:
        check_names(name)
    return name


# --- from where to where ---------------------------------------------------------------------------


def _places(options: Mapping[str, str], own: str, kafkas: str, *, now_us: int, streaming: bool) -> Places:
    """The places from the most specific option, in the order of precedence of Kafka's connector."""
    default = _BEGIN if own == "start" and not streaming else _END
    names = [f"{kafkas}Timestamp", f"{kafkas}OffsetsByTimestamp", f"{kafkas}Offsets"]
    present = [name for name in names if name.lower() in options]
    strategy = _choice(options, "startingOffsetsByTimestampStrategy", "error", "latest", default="error")
    if own in options:
        if present:
            raise ValueError(f"options {own} and {present[0]} say the same thing twice; give one of them")
        return _own_places(own, options[own], default, now_us=now_us)
    if not present:
        return Places(own, default, {})
    name, text = present[0], options[present[0].lower()]
    must_match = own == "start" and strategy == "error"
    if name == names[0]:
        return Places(name, _milliseconds(name, text), {}, must_match)
    if name == names[1]:
        expected = 'JSON of milliseconds by topic and partition, as in {"clicks": {"0": 1700000000000}}'
        times = _by_partition(name, text, expected, lambda milliseconds: Time(milliseconds * 1000))
        return Places(name, None, times, must_match)
    refused = None if streaming else _END if own == "start" else _BEGIN  # a batch would read nothing
    return _offsets(name, text, refused)


def _own_places(name: str, text: str, default: Place, *, now_us: int) -> Places:
    if not text.lstrip().startswith("{"):
        return Places(name, _place(name, text, now_us=now_us), {})
    expected = 'a place, or JSON of places by partition, as in {"0": 4096, "1": "-15m"}'
    places = {
        _partition(name, number, text, expected): _place(name, str(place), now_us=now_us)
        for number, place in _json(name, text, expected).items()
    }
    return Places(name, default, {None: places})


def _place(name: str, text: str, *, now_us: int) -> Place:
    text = text.strip()
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return parse_start(text, now_us=now_us)
    except ValueError as error:
        expected = '"begin", "end", an offset, an age like "-15m", or a time with its zone like 2024-05-01T12:00Z'
        raise ValueError(f"option {name} must be {expected}, not {text!r}") from error


def _milliseconds(name: str, text: str) -> Time:
    try:
        return Time(int(text) * 1000)
    except ValueError:
        _wrong(name, text, "a time in milliseconds since 1970")


def _offsets(name: str, text: str, refused: Place | None) -> Places:
    """The places of `earliest`, `latest` or JSON. In JSON -2 means earliest and -1 means latest."""
    known: dict[str, Place] = {"earliest": _BEGIN, "latest": _END, "-2": _BEGIN, "-1": _END}
    if text.strip().lower() in known:
        places = Places(name, known[text.strip().lower()], {})
    else:
        expected = 'earliest, latest or JSON of offsets by topic and partition, as in {"clicks": {"0": 4096, "1": -2}}'
        named = _by_partition(name, text, expected, lambda offset: known.get(str(offset), offset))
        places = Places(name, None, named)
    if refused is None:
        return places
    if places.otherwise == refused or any(refused in part.values() for part in places.named.values()):
        what = "latest (-1)" if refused == _END else "earliest (-2)"
        raise ValueError(f"option {name} cannot be {what}: a batch would read nothing")
    return places


def _check_order(start: Places, end: Places) -> None:
    """`ValueError` for a start after the end. Places of two kinds are compared in the log (ranges.py)."""
    pairs = [(start.otherwise, end.otherwise, "")]
    for topic in {**start.named, **end.named}:
        of = "" if topic is None else f" of topic {topic}"
        pairs += [
            (start.at(topic, number), end.at(topic, number), f" in partition {number}{of}")
            for number in {**start.named.get(topic, {}), **end.named.get(topic, {})}
        ]
    for first, stop, where in pairs:
        if _is_after(first, stop):
            raise ValueError(
                f"the start, {_shown(first)}, lies after the end, {_shown(stop)}{where} "
                f"(options {start.option} and {end.option})"
            )


def _is_after(first: Place | None, stop: Place | None) -> bool:
    if isinstance(first, int) and isinstance(stop, int):
        return first > stop
    if isinstance(first, Time) and isinstance(stop, Time):
        return first > stop
    return (first, stop) == (_END, _BEGIN)


def _shown(place: Place | None) -> str:
    return to_datetime(place.timestamp_us).isoformat() if isinstance(place, Time) else str(place)


def _by_partition(
    name: str, text: str, expected: str, place: Callable[[int], Place]
) -> dict[str | None, Mapping[int, Place]]:
    result: dict[str | None, Mapping[int, Place]] = {}
    for topic, numbers in _json(name, text, expected).items():
        if not isinstance(numbers, dict) or not all(map(_is_int, numbers.values())):
            _wrong(name, text, expected)
        result[topic] = {_partition(name, number, text, expected): place(each) for number, each in numbers.items()}
    return result


def _partition(name: str, number: str, text: str, expected: str) -> int:
    if not (number.isascii() and number.isdigit()):
        _wrong(name, text, expected)
    return int(number)


# --- values ----------------------------------------------------------------------------------------


def _json(name: str, text: str, expected: str) -> dict[str, object]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        _wrong(name, text, expected)
    return values


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _choice(options: Mapping[str, str], name: str, *allowed: str, default: str) -> str:
    text = options.get(name.lower(), default).strip().lower()
    if text not in allowed:
        _wrong(name, text, " or ".join(allowed))
    return text


def _flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    return _choice(options, name, "true", "false", default=str(default).lower()) == "true"


def _number(options: Mapping[str, str], name: str, *, at_least: int) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < at_least:
        _wrong(name, text, f"a number, at least {at_least}")
    return int(text)


def _size(options: Mapping[str, str], name: str, default: int, allowed: range) -> int:
    text = options.get(name.lower())
    if text is None:
        return default
    size = _SIZE.fullmatch(text.strip())
    number = -1 if size is None else int(size[1]) << _SHIFTS[(size[2] or "").lower()]
    if number not in allowed:
        most = f" to {allowed.stop - 1}" if allowed.stop < 1 << 62 else " or more"
        _wrong(name, text, f"a size like 64m, in bytes {allowed.start}{most}")
    return number


def _seconds(options: Mapping[str, str], name: str, default: float) -> float:
    text = options.get(name.lower())
    if text is None:
        return default
    duration = _DURATION.fullmatch(text.strip())
    if duration is None:
        _wrong(name, text, "a time like 500ms, 30s, 15m or 1h")
    unit = duration[2].lower()
    return int(duration[1]) * _SECONDS["ms" if unit == "ms" else unit[0]]


# --- what the driver says with options ---------------------------------------------------------------


def cores_of(spark: SparkSession) -> dict[str, str]:
    """The option that says how many cores Spark has at present. A session of Spark Connect does not know it."""
    context = getattr(spark, "sparkContext", None)
    return {} if context is None else {"cores": str(context.defaultParallelism)}


def selecting(columns: Iterable[str] | None, where: str | None) -> dict[str, str]:
    """The options that choose these columns, and the records of this condition; None: all."""
    given = {} if columns is None else {"columns": ",".join(columns)}
    return given if where is None else given | {"where": where}


def as_option(start: StartLike) -> str:
    """A start as the text of the options `start` and `end`."""
    if isinstance(start, Mapping):
        return json.dumps({str(partition): _start_text(each) for partition, each in start.items()})
    return _start_text(start)


def _start_text(start: Start) -> str:
    if isinstance(start, timedelta):
        return f"-{abs(microseconds(start))}us"
    return start.isoformat() if isinstance(start, datetime) else str(start)
