"""Losses: the records that a writer has lost, and the errors that its callers must still get.

Invariant: a loss is recorded before it is raised, and it is raised exactly once, even after an interrupt or a failure
in the background. The assignment that drops an open batch gives the next open batch the error that names the lost
records (`OpenBatch.owed`). The next call that raises an error raises this one, or an error that also names its records.

Threads: `raise_soon` and `report` take the writer's lock; the caller of the others has it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ..errors import LogClosedError, LogError, LogMovedError, OffsetRange, StorageIOError, WriterFailedError
from ..log.recovery import Tail
from ..system.failures import report_appended
from ..system.not_copyable import NotCopyable
from .open_batch import OpenBatch
from .tail import TailWriter


class BatchOwner(Protocol):
    """The writer, as its losses know it."""

    partition: int
    lock: threading.RLock
    closed: LogClosedError | None
    disk: TailWriter
    batch: OpenBatch

    def open_batch(self, tail: Tail) -> OpenBatch:
        """An empty open batch after `tail`, which owes what the present one owes."""


class Losses(NotCopyable):
    """The losses of one writer."""

    def __init__(self, writer: BatchOwner) -> None:
        self._writer = writer
        self._noted = False  # whether the records that a failure of the writer has lost are owed

    def raise_soon(self, error: LogError) -> None:
        """Let the writer's next call raise an error of the background."""
        with self._writer.lock:
            self.mark_lost()
            self._writer.batch.owe(error)

    def raise_owed(self) -> None:
        """Raise the owed error, if there is one."""
        error, self._writer.batch.owed = self._writer.batch.owed, None
        if error is not None:
            raise error

    def report(self, error: BaseException, appended: range | None = None, batch: OpenBatch | None = None) -> None:
        """Add to a call's error the owed error, and the records that the call has appended to `batch`."""
        writer = self._writer
        if isinstance(error, LogError):
            with writer.lock:
                self.mark_lost()
                owed, writer.batch.owed = writer.batch.owed, None
                if owed is not None and owed is not error:
                    error.take_over(owed)
                    if type(owed) is not type(error):
                        error.add_note(f"before that: {owed}")
        if appended is not None and (batch is None or batch.lost is None):
            report_appended(error, [OffsetRange(writer.partition, appended)])

    @contextmanager
    def reporting(self, appended: Sequence[range] = ()) -> Iterator[None]:
        """Add to an error of the call in the `with` the owed error, and the ranges that the call has appended."""
        try:
            yield
        except BaseException as error:
            self.report(error)
            report_appended(error, [OffsetRange(self._writer.partition, each) for each in appended])
            raise

    def drop(self, failure: LogError) -> None:
        """Drop the open batch, and name its records in the failure, which is then owed."""
        batch = self._writer.batch
        if batch.values:
            end = batch.tail.end
            failure.lost = (*failure.lost, OffsetRange(self._writer.partition, range(end, end + len(batch.values))))
        following = self._writer.open_batch(batch.tail)
        following.owe(failure)
        self._writer.batch = following

    def mark_lost(self) -> None:
        """If the writer has failed: owe an error that names the lost records, and those in doubt. Once."""
        writer = self._writer
        failure = writer.disk.failure
        if failure is None or self._noted or writer.closed is not None:
            return
        batch, durable_end = writer.batch, writer.disk.mark.durable_end
        end = batch.tail.end
        error: LogError = WriterFailedError(writer.disk.active.path, failure)
        if isinstance(failure, LogMovedError):
            error = failure.again()
        if batch.values:
            if writer.disk.active.ends_at(end):
                error.lost = (OffsetRange(writer.partition, range(end, end + len(batch.values))),)
                batch.lost = error
            else:  # a failed or interrupted write has left bytes, which recovery may find whole
                end += len(batch.values)
        if durable_end < end:
            error.in_doubt = (OffsetRange(writer.partition, range(durable_end, end)),)
        dead = OpenBatch(batch.tail, writer.partition, owed=batch.owed)
        dead.owe(error)
        writer.batch = dead
        self._noted = True

    def mark_in_doubt(self, error: LogError) -> None:
        """Name the records that are written here, but not in enough other directories: nobody can flush them now."""
        disk = self._writer.disk
        shown, end = disk.mark.flushed_end, self._writer.batch.tail.end
        if disk.copies is not None and disk.failure is None and shown < end:
            error.in_doubt = (*error.in_doubt, OffsetRange(self._writer.partition, range(shown, end)))


def from_background(error: BaseException, path: str, doing: str) -> LogError:
    """The error that the writer's next call raises for an error in the background."""
    if isinstance(error, LogError):
        return error
    if isinstance(error, OSError):
        raised: LogError = StorageIOError(path, error, f"{doing} in the background")
    else:
        raised = LogError(f"{path}: {error!r} while {doing} in the background; it is tried again")
    raised.__cause__ = error
    return raised
