"""A streaming query without Spark: it calls the reader as Spark's micro-batch execution does, with a checkpoint."""

import copy
import json
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable
from spark_logs import Row, rows_of

from loglib.spark.columns import default_schema
from loglib.spark.options import parse
from loglib.spark.stream import StreamReader

Json = dict[str, Any]


class Query:
    """One query with its checkpoint; `restart` is a new run. Offsets pass through JSON, as through the JVM."""

    def __init__(self, path: Path, *, available_now: bool = False, **options: Any) -> None:
        self.given = {"path": str(path), "columns": "topic,partition,offset,value"} | {
            name: str(each) for name, each in options.items()
        }
        self.offsets: list[str] = []  # Spark's offset log: the planned batches
        self.committed = 0  # Spark's commit log: as many batches are done
        self.batches: list[list[Row]] = []  # what the sink got, by number of the batch; a repeated batch replaces it
        self.restart(available_now=available_now)

    def restart(self, *, available_now: bool = False, **options: Any) -> None:
        self.given |= {name: str(each) for name, each in options.items()}
        schema = default_schema(parse(self.given, now_us=0, streaming=True))
        self.reader = StreamReader(self.given, schema)
        self.tasks = copy.deepcopy(self.reader)  # the reader whose `read` the tasks call; it plans nothing
        self.limit = self.reader.getDefaultReadLimit()
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        if len(self.offsets) > self.committed:
            self._run_batch(self.committed)

    def forget_last_commit(self) -> None:
        """As if the process had died before Spark wrote that the last batch was done."""
        self.committed -= 1

    def trigger(self, *, run: bool = True, once: bool = False) -> list[Row] | None:
        """One trigger: the rows of its batch, or None if Spark would run no batch."""
        start = json.loads(self.offsets[-1]) if self.offsets else self.reader.initialOffset()
        end = json.dumps(self.reader.latestOffset(start, ReadAllAvailable() if once else self.limit))
        json.dumps(self.reader.reportLatestOffset())
        if self.offsets and end == self.offsets[-1]:
            return None
        self.offsets.append(end)
        return self._run_batch(len(self.offsets) - 1) if run else []

    def _run_batch(self, number: int) -> list[Row]:
        before = json.loads(self.offsets[number - 1]) if number else self.reader.initialOffset()
        partitions = self.reader.partitions(before, json.loads(self.offsets[number]))
        rows = [row for each in partitions for batch in self.tasks.read(each) for row in rows_of(batch)]
        self.batches[number:] = [rows]
        self.committed = number + 1
        return rows

    def run(self, most: int = 1000) -> list[list[Row]]:
        """Triggers until there is nothing new; the rows of each batch."""
        found: list[list[Row]] = []
        for _ in range(most):
            rows = self.trigger()
            if rows is None:
                return found
            found.append(rows)
        raise AssertionError(f"the query still runs batches after {most}")

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.batches for row in rows]

    @property
    def values(self) -> list[bytes]:
        return [row["value"] for row in self.rows]

    @property
    def end(self) -> Json:
        found: Json = json.loads(self.offsets[-1])
        return found
