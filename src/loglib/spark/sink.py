"""Sink: the writers of Spark's batch and streaming writes, exactly once.

Invariant: a version of an app is committed once. For a stream the app is the query's id and the version the number of
the batch, so a batch that Spark repeats is dropped if it was committed (repetition.py). For a batch write they are the
options txnAppId and txnVersion; without these the app is random, and each write is a new one. If the target is one
topic, its log id is a part of the app: a topic that was made again, or another one, has committed nothing yet.

    task        stages its records (stage.py), and sends the sections in its commit message
    driver      commits all of them as one transaction (commit.py)

A writer does not learn from Spark which query it serves. The tasks learn it from Spark's local properties.

Processes: made in Spark's planning process; `write` in executors' workers; `commit` and `abort` on the driver's host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from ..errors import LogError
from ..system.clock import SYSTEM
from ..system.files import REAL
from .commit import abort, commit
from .pickling import by_value
from .repetition import Write, owner_of
from .sink_target import Target, parse
from .source import as_schema, freeze_worker
from .stage import RowPartitioner, Staging, TaskStage


@dataclass(frozen=True, slots=True)
class Message(WriterCommitMessage):
    """The records that a task has staged, and the query that it served."""

    task: int
    staging: Staging
    query: str | None  # None outside a streaming query
    batch: int | None
    run: str | None


class BatchWriter(DataSourceArrowWriter):
    """Writes one DataFrame."""

    def __init__(
        self, given: Mapping[str, str], schema: StructType | str, overwrite: bool = False, identity: str | None = None
    ) -> None:
        self._target, self._made_of = _checked(given, schema, overwrite=overwrite, streaming=False)
        self._identity = identity or os.urandom(16).hex()

    def __reduce__(self) -> tuple[Any, ...]:
        return by_value(__name__, "BatchWriter", *self._made_of, False, self._identity)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_task(iterator, self._target, identity=self._identity)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        found = _messages(messages)
        commit(self._write(found), [each.staging for each in found])

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        found = _messages(messages)
        abort(self._write(found), [each.staging for each in found])

    def _write(self, messages: Sequence[Message]) -> Write:
        target = self._target
        if target.app is None or target.version is None:
            return Write(f"save-{self._identity}", 0, self._identity, None, is_new=True)
        # As the topics of an app are counted one by one, one batch may write to several of them.
        app = _app_of(target.app, target, messages)
        queries = {(each.query, each.batch) for each in messages}
        source, batch = queries.pop() if len(queries) == 1 else (None, None)
        owner = owner_of(self._identity, batch=batch)
        return Write(app, target.version, owner, source, is_new=False, batch=batch, any_rows=target.any_rows)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query."""

    def __init__(self, given: Mapping[str, str], schema: StructType | str, overwrite: bool = False) -> None:
        self._target, self._made_of = _checked(given, schema, overwrite=overwrite, streaming=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return by_value(__name__, "StreamWriter", *self._made_of)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write_task(iterator, self._target)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        found = _messages(messages)
        if found:
            commit(_batch_of(found, batchId, self._target), [each.staging for each in found])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        found = _messages(messages)
        if found:
            abort(_batch_of(found, batchId, self._target), [each.staging for each in found])


def _checked(
    given: Mapping[str, str], schema: StructType | str, *, overwrite: bool, streaming: bool
) -> tuple[Target, tuple[dict[str, str], str]]:
    """The target, and the arguments that make it in another process, which may have another working directory."""
    schema = as_schema(schema)
    target = parse(given, schema, overwrite=overwrite, streaming=streaming)
    others = {name: value for name, value in given.items() if name.lower() != "path"}
    return target, ({**others, "path": target.path}, schema.json())


def _app_of(name: str, target: Target, messages: Iterable[Message]) -> str:
    """The app that counts the versions of this name in the target."""
    if target.topic is None:
        return name
    logs = sorted({section.log_id.hex() for each in messages for section in each.staging.sections})
    return "/".join([name, *logs])  # with two logs, the topic was made again meanwhile, and the commit finds it


def _batch_of(messages: Sequence[Message], batch_id: int, target: Target) -> Write:
    (query, batch, run), *others = {(each.query, each.batch, each.run) for each in messages}
    if others or query is None or run is None or batch != batch_id:
        raise LogError(
            f"the tasks of batch {batch_id} say that they are of batch {batch} of query {query}, run {run}: Spark's "
            "local properties are not those of PySpark 4.3, so nothing is committed"
        )
    owner = owner_of(run, checkpoint=target.checkpoint)
    app = _app_of(query, target, messages)
    return Write(app, batch_id, owner, query, is_new=False, batch=batch_id, any_rows=target.any_rows)


def _messages(messages: Iterable[WriterCommitMessage | None]) -> list[Message]:
    """The messages of the tasks that did not fail, in the order of the tasks."""
    return sorted((each for each in messages if isinstance(each, Message)), key=lambda message: message.task)


# --- in a task -----------------------------------------------------------------------------------------------


def write_task(batches: Iterable[pa.RecordBatch], target: Target, *, identity: str = "") -> Message:
    """Stage the records of one task. Durable on return. Only a batch write has an identity."""
    freeze_worker()
    context = TaskContext.get()
    task = 0 if context is None else context.partitionId()
    query, batch, run = (None, None, None) if context is None else _query_of(context)
    stage = TaskStage(REAL, SYSTEM, write=identity or f"{query} {run} {batch}")
    keyless = (crc32(identity.encode()) if identity else 0) + task + (batch or 0)
    dealer = RowPartitioner(target, stage, keyless=keyless, now=SYSTEM)
    try:
        for each in batches:
            dealer.deal(each)
        staging = stage.finish()
    except BaseException:
        stage.discard()
        raise
    return Message(task, staging, query, batch, run)


def _query_of(context: TaskContext) -> tuple[str | None, int | None, str | None]:
    """The ids of the streaming query, its batch and its run; None outside a streaming query."""
    query = context.getLocalProperty("sql.streaming.queryId")
    if query is None:
        return None, None, None
    batch = context.getLocalProperty("streaming.sql.batchId")
    return query, None if batch is None else int(batch), context.getLocalProperty("spark.jobGroup.id")
