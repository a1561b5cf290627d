"""Paper, loglib: the same producer and consumers on a log in a directory. There is no server.

Invariant: only the public API is used, and `flush()` is the acknowledgement.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from loglib import Topic
from ours import NEVER
from paper_roles import PREFETCH, WINDOW, Way, Work, in_batches

if TYPE_CHECKING:
    import pyarrow as pa

    from paper_roles import Values

_GROUP_WAIT_S = 30.0  # for a record; there always is one


def producer(work: Work, durability: Literal["disk", "os"] = "os") -> Way:
    """A producer that flushes after each batch; for a stream, after as many messages as may be on their way."""
    topic = Topic.open(_path(work), create=True, flush=NEVER, durability=durability)
    return Batches(topic, int(work.way)) if work.way == "50" else Singles(topic, 1 if work.way == "1" else WINDOW)


def consume(work: Work) -> Iterator[Values]:
    """All values, in one of the ways in which loglib reads."""
    if work.way == "arrow":
        import pyarrow  # noqa: F401 - loaded before the clock starts
    return _read(work)


class Batches:
    """Each batch is one `append_many`, flushed."""

    def __init__(self, topic: Topic, size: int) -> None:
        self._topic, self._size = topic, size

    def send(self, values: list[bytes]) -> None:
        for batch in in_batches(values, self._size):
            self._topic.append_many(batch)
            self._topic.flush()

    def close(self) -> None:
        self._topic.close()


class Singles:
    """Each message is one `append`; so many of them are flushed together."""

    def __init__(self, topic: Topic, together: int) -> None:
        self._topic, self._together = topic, together

    def send(self, values: list[bytes]) -> None:
        append, flush = self._topic.append, self._topic.flush
        for batch in in_batches(values, self._together):
            for value in batch:
                append(value)
            flush()

    def close(self) -> None:
        self._topic.close()


def _path(work: Work) -> Path:
    return Path(work.directory) / "topic"


def _read(work: Work) -> Iterator[Values]:
    with Topic.open(_path(work), mode="r") as topic:
        if work.way == "records":
            yield from _records(topic)
        elif work.way == "columns":
            for batch in topic.batches():
                yield cast("list[bytes]", batch.values)
        elif work.way == "group":
            with topic.group("paper") as group:
                for handed in group.batches(timeout=_GROUP_WAIT_S):
                    yield cast("list[bytes]", handed.values)
        else:
            for table in topic.arrow(columns=["value"]):
                yield table.num_rows, _bytes_of(table.column("value"))


def _records(topic: Topic) -> Iterator[list[bytes]]:
    """The values of records, taken one by one."""
    values: list[bytes] = []
    for record in topic.read("begin"):
        values.append(cast("bytes", record.value))
        if len(values) == PREFETCH:
            yield values
            values = []
    yield values


def _bytes_of(column: pa.BinaryArray) -> memoryview:
    """The bytes of all values of a column, as they lie in memory. Ours have no nulls."""
    _, offsets, data = column.buffers()
    ends = memoryview(offsets).cast("i")
    return memoryview(data)[ends[column.offset] : ends[column.offset + len(column)]]
