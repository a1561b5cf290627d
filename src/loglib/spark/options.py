"""Options: the options of a query, checked and turned into numbers, names and places.

Invariant: an `Options` has passed every check that needs no file. An unknown name is an error that suggests
the nearest known name. An option that needs a Kafka broker is refused, never ignored. Names are those of
Spark's Kafka connector, if it has the option. Case does not matter, because Spark passes names in lower case.

Processes: plain facts, made on the driver.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from ..arguments import Time, parse_start

__all__ = ["DEFAULT_ARROW_BATCH_BYTES", "DEFAULT_MAX_BYTES_PER_PARTITION", "Options", "Place", "Places", "parse"]

# About 0.2 s of work for a task that takes 10 ms to start.
DEFAULT_MAX_BYTES_PER_PARTITION = 128 << 20
# Spark is fastest with 1 to 8 MiB in an Arrow batch, and much slower from 16 MiB on: see docs/spark.md.
DEFAULT_ARROW_BATCH_BYTES = 4 << 20
_ARROW_BATCH_BYTES = range(1 << 10, (16 << 20) + 1)
_SMALLEST_SPLIT_BYTES = 64 << 10

Place = str | int | Time  # "begin", "end", an offset, or the first record at or after a time
_BEGIN, _END = "begin", "end"

_KNOWN = (
    "path", "paths", "subscribe", "subscribePattern", "assign", "columns", "includeHeaders",
    "start", "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "end", "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp",
    "failOnDataLoss", "minPartitions", "maxBytesPerPartition", "arrowBatchBytes",
)  # fmt: skip
_CANONICAL = {name.lower(): name for name in _KNOWN}
_CONSUMERS = re.compile(r"kafka\..*|kafkaconsumer\..*|fetchoffset\..*|groupidprefix", re.IGNORECASE)
_STREAMS = ("maxoffsetspertrigger", "minoffsetspertrigger", "maxtriggerdelay", "maxbytespertrigger")
_TABLES = ("owner", "provider", "location")  # what a catalog adds to a table's options

_SIZE = re.compile(r"(\d+)\s*(?:([kmgt])i?b?|b)?", re.IGNORECASE)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)  # two letters or more, as in s3://


@dataclass(frozen=True, slots=True)
class Places:
    """The start, or the end, of reading in each partition."""

    option: str  # the option that gave it, for messages
    otherwise: Place | None  # for partitions that are not named; None: all must be named
    named: Mapping[str | None, Mapping[int, Place]]  # by topic; None stands for the only topic
    must_match: bool = False  # a time after all records is an error

    def at(self, topic: str, partition: int) -> Place | None:
        """The place in one partition; None if it should have been named."""
        places = self.named.get(topic) or self.named.get(None) or {}
        return places.get(partition, self.otherwise)


@dataclass(frozen=True, slots=True)
class Options:
    """A query's options, with defaults filled in."""

    paths: tuple[str, ...]
    topics: tuple[str, ...] | None  # None: all topics
    pattern: re.Pattern[str] | None
    assigned: Mapping[str, tuple[int, ...]] | None
    columns: tuple[str, ...] | None
    include_headers: bool
    start: Places
    end: Places
    fail_on_data_loss: bool
    min_partitions: int | None
    max_bytes_per_partition: int
    arrow_batch_bytes: int


def parse(given: Mapping[str, str], *, now_us: int) -> Options:
    """Check the options. `ValueError` names the wrong option and its allowed values. Ages count from `now_us`."""
    options = {name.lower(): value for name, value in given.items()}
    for name in options:
        if name not in _CANONICAL:
            _refuse_name(name)
    if len(options.keys() & {"subscribe", "subscribepattern", "assign"}) > 1:
        raise ValueError("give one of the options subscribe, subscribePattern and assign, not several")
    return Options(
        paths=_paths(options),
        topics=_names(options, "subscribe"),
        pattern=_pattern(options),
        assigned=_assigned(options),
        columns=_names(options, "columns"),
        include_headers=_flag(options, "includeHeaders", default=False),
        start=_places(options, "start", "starting", now_us=now_us),
        end=_places(options, "end", "ending", now_us=now_us),
        fail_on_data_loss=_flag(options, "failOnDataLoss", default=True),
        min_partitions=_number(options, "minPartitions", at_least=1),
        max_bytes_per_partition=_size(
            options, "maxBytesPerPartition", DEFAULT_MAX_BYTES_PER_PARTITION, range(_SMALLEST_SPLIT_BYTES, 1 << 63)
        ),
        arrow_batch_bytes=_size(options, "arrowBatchBytes", DEFAULT_ARROW_BATCH_BYTES, _ARROW_BATCH_BYTES),
    )


def _refuse_name(name: str) -> NoReturn:
    if _CONSUMERS.fullmatch(name):
        raise ValueError(f"option {name} sets up a Kafka consumer; loglib reads the files themselves: leave it out")
    if name in _STREAMS:
        raise ValueError(f"option {name} is for streams, and this is a batch read: leave it out")
    if name in _TABLES:
        raise ValueError("no catalog table can be USING loglib: PySpark forgets its options; make a temporary view")
    nearest = get_close_matches(name, _CANONICAL, n=1)
    hint = f"did you mean {_CANONICAL[nearest[0]]}?" if nearest else f"there are {', '.join(_KNOWN)}"
    raise ValueError(f"unknown option {name}; {hint}")


def _wrong(name: str, value: str, expected: str) -> NoReturn:
    raise ValueError(f"option {name} must be {expected}, not {value!r}")


# --- which topics ----------------------------------------------------------------------------------


def _paths(options: Mapping[str, str]) -> tuple[str, ...]:
    if "path" in options:
        return (_local(options["path"]),)
    if "paths" in options:  # from load([...])
        return tuple(map(_local, json.loads(options["paths"])))
    raise ValueError("no path: give load() the directory of a topic, or a directory of topics")


def _local(path: str) -> str:
    if path.startswith("file:"):
        return unquote(urlsplit(path).path)
    if scheme := _SCHEME.match(path):
        raise ValueError(
            f"{path} is not on a file system: loglib reads directories, which must be mounted alike on the driver "
            f"and all executors; it knows no {scheme[1]} storage"
        )
    return path


def _names(options: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    text = options.get(name.lower())
    if text is None:
        return None
    names = tuple(each.strip() for each in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        _wrong(name, text, "different names separated by commas")
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


# --- from where to where ---------------------------------------------------------------------------


def _places(options: Mapping[str, str], own: str, kafkas: str, *, now_us: int) -> Places:
    """The place from the most specific option, in the order of precedence of Kafka's connector."""
    default = _BEGIN if own == "start" else _END
    names = [f"{kafkas}Timestamp", f"{kafkas}OffsetsByTimestamp", f"{kafkas}Offsets"]
    present = [name for name in names if name.lower() in options]
    strategy = options.get("startingoffsetsbytimestampstrategy", "error").lower()
    if strategy not in ("error", "latest"):
        _wrong("startingOffsetsByTimestampStrategy", strategy, "error or latest")
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
    return _offsets(name, text, default)


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


def _offsets(name: str, text: str, default: Place) -> Places:
    """earliest, latest or JSON. In JSON -2 means earliest and -1 means latest."""
    known: dict[str, Place] = {"earliest": _BEGIN, "latest": _END, "-2": _BEGIN, "-1": _END}
    refused = _END if default == _BEGIN else _BEGIN  # a batch query that starts at the end would read nothing
    if text.strip().lower() in known:
        places = Places(name, known[text.strip().lower()], {})
    else:
        expected = 'earliest, latest or JSON of offsets by topic and partition, as in {"clicks": {"0": 4096, "1": -2}}'
        named = _by_partition(name, text, expected, lambda offset: known.get(str(offset), offset))
        places = Places(name, None, named)
    if places.otherwise == refused or any(refused in part.values() for part in places.named.values()):
        what = "latest (-1)" if refused == _END else "earliest (-2)"
        raise ValueError(f"option {name} cannot be {what}: a batch would read nothing")
    return places


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


def _flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        _wrong(name, text, "true or false")
    return text == "true"


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
        most = f" to {allowed.stop - 1}" if allowed.stop < 1 << 62 else ""
        _wrong(name, text, f"a size like 64m, in bytes {allowed.start}{most}")
    return number
