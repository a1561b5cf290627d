"""Spark inputs: the same messages as a topic and as Parquet files.

Invariant: each input is made once, when it is first asked for. Parquet is written by Spark from the topic, so both have
the same records and columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession

import loglib
from inputs import values_of
from loglib import Topic
from loglib.config.times import to_datetime
from ours import open_topic

VALUE_BYTES = 200
KEYS = 10_000  # of the keyed input
_CALL_MESSAGES = 10_000
_MADE_MESSAGES = 200_000  # made once, and appended again and again; Parquet finds no repetition at this distance
_TUPLES_SHARE = 20
_ARCHIVED_SHARE = 0.95
_NARROW = timedelta(milliseconds=20)  # as the messages of the benchmark come: some ten thousand


class Past(NamedTuple):
    """A topic that is archived up to its last part, and another archive that has all of it."""

    topic: str
    archive: str
    everything: str
    narrow: tuple[datetime, datetime]  # times in the middle of the archive


class Keyed(NamedTuple):
    """Records with keys, as a topic and as Parquet files."""

    topic: str
    snappy: str


@dataclass(frozen=True)
class Inputs:
    """The files in a directory, of about this many messages."""

    spark: SparkSession
    directory: Path
    wanted: int

    @property
    def messages(self) -> int:
        return whole_calls(self.wanted)

    @property
    def few_messages(self) -> int:
        """For the source of tuples, which would take minutes."""
        return whole_calls(self.wanted // _TUPLES_SHARE)

    @cached_property
    def topic(self) -> str:
        return write_topic(self.directory / "topics" / "clicks", self.messages)

    @cached_property
    def few(self) -> str:
        return write_topic(self.directory / "topics" / "few", self.few_messages)

    @cached_property
    def keyed(self) -> Keyed:
        topic = write_topic(self.directory / "topics" / "keyed", self.messages, keyed=True)
        return Keyed(topic, self._parquet(topic, "keyed-snappy", "snappy"))

    @cached_property
    def snappy(self) -> str:
        return self._parquet(self.topic, "snappy", "snappy")

    @cached_property
    def uncompressed(self) -> str:
        return self._parquet(self.topic, "none", "none")

    @cached_property
    def past(self) -> Past:
        path, archive, everything = (str(self.directory / name) for name in ("topics/past", "archive", "everything"))
        archived = whole_calls(round(self.messages * _ARCHIVED_SHARE))
        for messages, to in ((archived, archive), (self.messages - archived, everything)):
            write_topic(Path(path), messages)
            with Topic.open(path, create=True) as topic:
                for partition in topic.partitions:
                    partition.roll()
            made = loglib.offload.archive(path, to)
        files = made.partitions[0].files
        middle = to_datetime((files[0].first_time + files[0].last_time) // 2)
        with Topic.open(path, mode="r") as topic:  # between calls there are times without a message
            start = next(iter(topic.partition(0).read(middle))).time
        return Past(path, archive, everything, (start, start + _NARROW))

    def _parquet(self, topic: str, name: str, compression: str) -> str:
        path = str(self.directory / name)
        self.spark.read.format("loglib").load(topic).write.option("compression", compression).parquet(path)
        return path


def whole_calls(messages: int) -> int:
    return -(-messages // _CALL_MESSAGES) * _CALL_MESSAGES


def write_topic(path: Path, messages: int, *, partitions: int = 4, keyed: bool = False) -> str:
    """A topic of this many messages, not synced; the path."""
    values = values_of(str(VALUE_BYTES), min(messages, _MADE_MESSAGES))
    keys = [b"user-%06d" % (number * 7919 % KEYS) for number in range(_CALL_MESSAGES)] if keyed else None
    with open_topic(path, flush="no fsync", partitions=partitions) as topic:
        for start in range(0, messages, _CALL_MESSAGES):
            first = start % len(values)
            topic.append_many(values[first : first + _CALL_MESSAGES], keys=keys)
    return str(path)
