"""Ours: loglib with the same few calls as the alternatives.

Invariant: only the public API is used, but by `batch_by_batch` and `general_ways`, which turn off what is measured.
Settings that a case does not name have their defaults, so a user gets the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loglib import Batch, FlushPolicy, Record, Topic
from loglib.append.tail import TailWriter
from loglib.log import cursor
from loglib.log.cursor import Cursor
from loglib.system.group_commit import Turn

if TYPE_CHECKING:
    import pyarrow as pa

NEVER = FlushPolicy(records=None, interval=None, bytes=None)  # Only flush() and close() flush.
EACH_CALL = FlushPolicy(records=1, interval=None)


def open_topic(directory: Path, *, flush: str, partitions: int = 1, compression: str = "none") -> Topic:
    """Open a topic under one of the flush settings that the cases name."""
    if flush == "default":
        return Topic.open(directory, create=True, partitions=partitions, compression=compression)
    policy = EACH_CALL if flush == "each call, no fsync" else NEVER
    durability: Literal["disk", "os"] = "disk" if flush == "fsync" else "os"
    return Topic.open(
        directory, create=True, partitions=partitions, flush=policy, durability=durability, compression=compression
    )


class SyncedCalls:
    """A topic in which every call is durable when it returns."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    def append(self, value: bytes) -> None:
        self._topic.append(value, sync=True)

    def append_many(self, values: list[bytes], *, keys: list[bytes] | None = None) -> None:
        self._topic.append_many(values, keys=keys)
        self._topic.flush()

    def flush(self) -> None:
        """Nothing is ever left to flush."""

    def close(self) -> None:
        self._topic.close()


def batches(directory: Path) -> Iterator[Batch]:
    """Yield the batches of partition 0 from the beginning."""
    with Topic.open(directory, mode="r") as topic:
        yield from topic.batches(start="begin")


def arrow(directory: Path, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the Arrow batches of a stream."""
    with Topic.open(directory, mode="r") as topic:
        yield from topic.arrow(columns=columns)


def batch_by_batch() -> None:
    """Read small batches one by one from now on, as a program without NumPy does."""
    vars(cursor)["_MANY"] = 1 << 60


def general_ways() -> None:
    """Append, follow and make records from now on as for any batch: without the short ways of decision 28."""

    def nothing(*_: object) -> None:
        """Nothing is done in a short way."""

    for owner, name, way in (
        (TailWriter, "write_one", nothing), (Turn, "take_at_once", nothing), (Cursor, "read_news", nothing),
        (Batch, "records", _of_lists),
    ):  # fmt: skip
        setattr(owner, name, way)


def _of_lists(batch: Batch) -> list[Record]:
    """A batch's records from a list for each column, also for one that all records share."""
    following = chain(range(batch.offsets.start + 1, batch.offsets.stop), (batch.next_offset,))
    fields = zip(
        repeat(batch.partition), batch.offsets, batch.timestamps, batch.keys, batch.values, batch.headers, following
    )
    return list(map(tuple.__new__, repeat(Record), fields))


def records(directory: Path) -> Iterator[Record]:
    """Return the iterator that a user gets, with nothing around it."""
    topic = Topic.open(directory, mode="r")
    return iter(topic.read(start="begin"))
