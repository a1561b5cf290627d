"""Sink target: the options of a sink, its columns, and the topics that it may write to.

Invariant: a `Target` has passed every check that needs no record. Names and meanings are those of Spark's Kafka sink.
An option or a column without a meaning is refused, never ignored.

    column       type                    content
    value        binary or string        required; null is a record without a value
    key          binary or string        null: no key
    headers      array<struct<key,value>> null: none
    topic        string                  required if neither the path nor the option names the topic
    partition    int                     null: the topic's partitioner chooses
    timestamp    timestamp               null: the time of writing

The columns `offset` and `timestampType` of a source are left out. The sink makes a topic only if it is asked to.

Processes: driver and executors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
    TimestampType,
)

from ..append.hash_columns import can_hash
from ..config.arguments import check_names
from ..config.policies import MAX_PARTITIONS, TopicConfig
from ..config.uri import is_remote, local_path
from ..log import copy_role, topic_file
from ..system.clock import SYSTEM
from ..system.files import REAL
from .options import nearest, refuse_consumers, refuse_remote

_CANONICAL = {name.lower(): name for name in (
    "path", "topic", "txnAppId", "txnVersion", "repeatedBatch", "createTopic", "partitions",
)}  # fmt: skip
_SPARKS = {"checkpointlocation", "queryname"}  # which Spark passes on
_WRITTEN: dict[str, tuple[str, tuple[type[DataType], ...]]] = {
    "value": ("binary or string", (BinaryType, StringType)),
    "key": ("binary or string", (BinaryType, StringType)),
    "headers": ("array<struct<key:string,value:binary>>", (ArrayType,)),
    "topic": ("string", (StringType,)),
    "partition": ("int", (IntegerType,)),
    "timestamp": ("timestamp", (TimestampType,)),
}
_LEFT_OUT = ("offset", "timestamptype")
_MOST_VERSION = 1 << 63


@dataclass(frozen=True, slots=True)
class TargetTopic:
    """A topic that is written to."""

    path: str
    log_id: bytes
    config: TopicConfig


@dataclass(frozen=True, slots=True)
class Target:
    """The topics and columns that a sink writes."""

    path: str  # a topic, or a directory of topics
    topic: str | None  # path of the only topic; None: a column names the topics
    app: str | None
    version: int | None
    columns: Mapping[str, str]  # the names in the DataFrame, by known name
    checkpoint: str | None = None  # of the stream, if it is an option of the query
    any_rows: bool = False  # a batch that Spark repeats may have another number of rows
    make: int | None = None  # the partitions of a topic that is made if there is none; None: none is made


def parse(given: Mapping[str, str], schema: StructType, *, overwrite: bool, streaming: bool) -> Target:
    """Check the options and the columns of a sink. `ValueError` names the mistake."""
    if overwrite:
        raise ValueError(
            "a log is appended to, never overwritten: "
            + ('use outputMode("append") or "update"' if streaming else 'use mode("append")')
        )
    options = {name.lower(): value for name, value in given.items()}
    for name in options.keys() - _SPARKS - _CANONICAL.keys():
        refuse_consumers(name)
        raise ValueError(f"unknown option {name}; {nearest(name, _CANONICAL, there_are='for writing there are')}")
    if "path" not in options:
        raise ValueError("option path is missing: the topic to write to, or a directory of topics")
    app, version = _transaction(options, streaming=streaming)
    refuse_remote(options["path"], "a log is appended to in place, and objects cannot be")
    path = os.path.abspath(local_path(options["path"]))
    make = _partitions_to_make(options)
    columns = _columns(schema)
    topic = _only_topic(path, options.get("topic"), has_column="topic" in columns and make is not None)
    if topic is None and "topic" not in columns:
        raise ValueError(f"{path} is no topic: give the option topic, or a column topic with the name of one")
    only = None if topic is None else find_topic(topic, make=make)
    if only is not None and "key" in columns and "partition" not in columns and not can_hash(only.config.partitioner):
        raise no_function(only)
    checkpoint, any_rows = _checkpoint(options.get("checkpointlocation")), _any_rows(options)
    return Target(path, topic, app, version, columns, checkpoint, any_rows, make)


def find_topic(path: str, *, make: int | None = None) -> TargetTopic:
    """The topic at the path. `FileNotFoundError` if there is none, `NotLeaderError` if it is a copy.

    `make`: the number of partitions with which a missing topic is made. Tasks that need it may make it together.
    """
    found = topic_file.read(REAL, path)
    if found is None and make is not None:
        topic_file.create(REAL, path, TopicConfig(partitions=make), now=SYSTEM())
        found = topic_file.read(REAL, path)
    if found is None:
        advice = "make it with loglib.Topic.open(path, create=True), or with the option createTopic"
        raise FileNotFoundError(errno.ENOENT, f"no topic here; {advice}", path)
    copy_role.check(REAL, path, copy_role.TRANSACT)
    return TargetTopic(path, *found)


def no_function(topic: TargetTopic) -> ValueError:
    return ValueError(
        f"{topic.path} has the application's partitioner {topic.config.partitioner}, which Spark does not have; "
        "add a column partition"
    )


def _transaction(options: Mapping[str, str], *, streaming: bool) -> tuple[str | None, int | None]:
    app, version = options.get("txnappid"), options.get("txnversion")
    if app is None and version is None:
        return None, None
    if streaming:
        raise ValueError(
            "options txnAppId and txnVersion are for batch writes in foreachBatch; a stream counts its batches itself"
        )
    if app is None or version is None:
        raise ValueError("give both of the options txnAppId and txnVersion, or neither")
    if not app:
        raise ValueError("option txnAppId must be a name, not ''")
    if not (version.isascii() and version.isdigit()) or int(version) >= _MOST_VERSION:
        raise ValueError(f"option txnVersion must be a number from 0 on, not {version!r}")
    return app, int(version)


def _partitions_to_make(options: Mapping[str, str]) -> int | None:
    asked, count = options.get("createtopic", "false").lower(), options.get("partitions")
    if asked not in ("true", "false"):
        raise ValueError(f'option createTopic must be "true" or "false", not {asked!r}')
    if asked == "false":
        if count is not None:
            raise ValueError("option partitions is for a topic that is made: give createTopic=true, too")
        return None
    if count is not None and not (count.isascii() and count.isdigit() and int(count) in range(1, MAX_PARTITIONS + 1)):
        raise ValueError(f"option partitions must be a number from 1 to {MAX_PARTITIONS}, not {count!r}")
    return int(count or 1)


def _any_rows(options: Mapping[str, str]) -> bool:
    given = options.get("repeatedbatch", "compare")
    if given not in ("compare", "drop"):
        raise ValueError(f'option repeatedBatch must be "compare" or "drop", not {given!r}')
    return given == "drop"


def _checkpoint(given: str | None) -> str | None:
    """The real path of the checkpoint, which is the same for all names of it; unchanged if it is remote."""
    return given if given is None or is_remote(given) else os.path.realpath(local_path(given))


def _only_topic(path: str, name: str | None, *, has_column: bool) -> str | None:
    """The path of the only topic; None if a column names the topics.

    `has_column`: there is such a column, and its topics are made, so that their directory may be missing.
    """
    if topic_file.exists(REAL, path):
        if name not in (None, os.path.basename(path)):
            raise ValueError(f"the path {path} is a topic, and the option topic names another one: {name}")
        return path
    if name is None:
        return None if has_column or REAL.exists(path) else path
    check_names(name)
    return os.path.join(path, name)


# --- columns -----------------------------------------------------------------------------------------------


def _columns(schema: StructType) -> dict[str, str]:
    columns: dict[str, str] = {}
    for field in schema.fields:
        name = field.name.lower()
        if name in _LEFT_OUT:
            continue
        if name not in _WRITTEN:
            hint = nearest(name, dict(zip(_WRITTEN, _WRITTEN, strict=True)))
            raise ValueError(f"column {field.name} cannot be written; {hint} Select what is to be written")
        if name in columns:
            raise ValueError(f"column {field.name} is there twice")
        _check_type(field.name, name, field.dataType)
        columns[name] = field.name
    if "value" not in columns:
        raise ValueError(f"there is no column value; there are {', '.join(schema.names)}")
    return columns


def _check_type(given: str, name: str, found: DataType) -> None:
    expected, kinds = _WRITTEN[name]
    fits = isinstance(found, kinds)
    if fits and isinstance(found, ArrayType):
        pair = found.elementType
        fits = isinstance(pair, StructType) and [
            (field.name.lower(), type(field.dataType)) for field in pair.fields
        ] == [("key", StringType), ("value", BinaryType)]
    if not fits:
        raise ValueError(f"column {given} must be {expected}, not {found.simpleString()}; cast it in the query")
