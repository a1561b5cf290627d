"""Partition rows: the rows of Arrow batches, dealt to topics and partitions.

Invariant: rows of one partition keep their order. A row's partition comes from the column `partition`; if this is null,
from the key by the topic's partitioner; without a key it is the same one for the whole task.

Processes: executors; pure except for the stage that it fills.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..append.arrow_bodies import Numbers
from ..append.hash_columns import can_hash, deal, partitions_of, place_rows
from ..config.arguments import check_names
from ..format.arrow import HEADERS_TYPE
from .sink_target import Target, TargetTopic, find_place, no_function
from .stage import TaskStage

__all__ = ["RowPartitioner"]


class RowPartitioner:
    """Deals the rows of one task to its stage."""

    def __init__(self, target: Target, stage: TaskStage, *, keyless: int, now: Callable[[], int]) -> None:
        self._target = target
        self._stage = stage
        self._keyless = keyless
        self._now = now
        self._places: dict[str, TargetTopic] = {}

    def deal(self, rows: pa.RecordBatch) -> None:
        """Stage the rows of one Arrow batch."""
        if not rows.num_rows:
            return
        self._deal_to_topics(rows)
        self._stage.borrow(rows.nbytes)

    def _deal_to_topics(self, rows: pa.RecordBatch) -> None:
        if self._target.topic is not None:
            self._deal(self._place(self._target.topic), rows)
            return
        topics = pc.dictionary_encode(rows.column(self._target.columns["topic"]))
        if topics.null_count:
            raise ValueError("a row whose topic is null; give each row a topic, or give the option topic")
        numbers = topics.indices.to_numpy()
        for number, name in enumerate(topics.dictionary.to_pylist()):
            check_names(name)
            place = self._place(os.path.join(self._target.path, name))
            self._deal(place, rows if len(topics.dictionary) == 1 else _taken(rows, np.flatnonzero(numbers == number)))

    def _place(self, path: str) -> TargetTopic:
        if path not in self._places:
            try:
                self._places[path] = find_place(path)
            except FileNotFoundError as error:
                error.add_note(
                    f"(on {socket.gethostname()}; topics must be on storage that the driver and all executors mount at "
                    "the same path)"
                )
                raise
        return self._places[path]

    def _deal(self, place: TargetTopic, rows: pa.RecordBatch) -> None:
        records = self._records(rows)
        for share in deal(records, self._partitions(place, rows, records)):
            self._stage.add(place, share.partition, share.records)

    def _records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The columns that are written, in the types that `Rows` knows."""
        columns = {}
        for name in ("value", "key"):
            if name in self._target.columns:
                columns[name] = rows.column(self._target.columns[name]).cast(pa.binary())
        if "timestamp" in self._target.columns:
            times = rows.column(self._target.columns["timestamp"])
            times = times.cast(pa.timestamp("us", tz=times.type.tz)).view(pa.int64())
            columns["timestamp"] = pc.fill_null(times, self._now())
        if "headers" in self._target.columns:
            columns["headers"] = rows.column(self._target.columns["headers"]).cast(HEADERS_TYPE)
        return pa.RecordBatch.from_pydict(columns)

    def _partitions(self, place: TargetTopic, rows: pa.RecordBatch, records: pa.RecordBatch) -> Numbers:
        count, partitioner = place.config.partitions, place.config.partitioner
        keyless = self._keyless % count

        def of_keys(keys: pa.Array) -> Numbers:
            if not can_hash(partitioner):
                raise no_function(place)
            return partitions_of(keys, partitioner, count, keyless=keyless)

        columns = self._target.columns
        chosen = rows.column(columns["partition"]) if "partition" in columns else None
        keys = records.column("key") if "key" in columns else None
        return place_rows(len(records), keys, chosen, of_keys, count, keyless=keyless, topic=place.path)


def _taken(rows: pa.RecordBatch, order: Numbers) -> pa.RecordBatch:
    return rows.take(pa.array(order))
