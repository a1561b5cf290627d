"""Participant: a topic's part in the transactions of other processes.

Invariant: applying goes by numbers and may be repeated (apply.py). So several processes or threads may serve the same
transaction.

Threads: `apply` runs where a topic is opened or waits for a transaction; `serve` in the one thread of
notifications.py. Neither keeps a topic alive: a participant refers to the topic's writers only.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ..append.handles import Handles
from ..append.section_writer import SectionWriter
from ..errors import CommitPendingError, LogClosedError, LogError, LogMovedError
from ..log.store_pointer import StorePointer, read_pointer
from ..system.clock import monotonic
from ..system.files import Files
from ..system.process import importing
from . import notifications

if TYPE_CHECKING:  # most topics are in no transaction, and need neither
    from .apply import Applier
    from .store import Store

logger = logging.getLogger("loglib")

_PATIENCE_S = 1.0  # for the process that applies a transaction
_APPLY_S = 2.0  # at most for the transactions of a dead process, when a topic is opened


class Participant:
    """The part of one open topic in transactions."""

    look_soon: Callable[[], object]  # called when files of the topic's directory have changed

    def __init__(self, files: Files, path: str, handles: Handles, clock: Callable[[], int]) -> None:
        self._files = files
        self._path = path
        self._handles = handles  # of the topic, with its open writers
        self._clock = clock
        self._held_since: float | None = None  # when a pending transaction was first seen

    def listen(self) -> None:
        """Serve whenever another process notifies the topic, and look at its description whenever that has changed."""
        notifications.notification_thread().listen(self._path, self, Participant.serve, Participant.look)

    def leave(self) -> None:
        """Stop serving."""
        notifications.notification_thread().leave(self)

    def apply(self, made: SectionWriter | None = None) -> None:
        """Apply transactions that a dead process has committed, and for which records of the topic may wait.

        `made`: a writer that is not in use yet. The call then waits for no other process, which may need its partition.
        Raises `CorruptLogError` if the log has a part of a transaction that no process can finish: records that are
        appended after it would never be visible.
        """
        writers = [*self._handles.writers, *([made] if made is not None else [])]
        concerned = writers if made is None else [made]
        pointer = read_pointer(self._files, self._path)
        try:
            if pointer is None:
                if any(_held(concerned)):
                    raise FileNotFoundError(errno.ENOENT, "no store of transactions is known", self._path)
                return
            store, applier = self._open(pointer, writers)
            if store.pending():
                applier.run(_APPLY_S if made is None else 0.0)
        except (LogError, OSError) as error:
            is_applying = isinstance(error, CommitPendingError)  # another process
            if made is None or not is_applying:
                logger.warning("%s: transactions were not applied: %s", self._path, error)
            if is_applying:
                return
            with importing:
                from .apply import end_hold

            for writer in _held(concerned):
                end_hold(writer, writer.published())
        else:
            applier.release_own(concerned)

    def look(self) -> None:
        """Let the topic look at its description."""
        self.look_soon()

    def serve(self) -> bool:
        """Apply transactions of other processes to the partitions of this one. True while a transaction is held.

        If it is held for a second, the process that applies it may have died: then this process applies it.
        """
        writers = list(self._handles.writers)
        notifications.answer(self._files, self._path, [each.partition for each in writers])
        try:
            pointer = read_pointer(self._files, self._path)
            if pointer is None:
                return False
            store, applier = self._open(pointer, writers)
            for manifest in store.pending():
                applier.apply_own(manifest)
            applier.release_own()
            if not any(_held(writers)):
                self._held_since = None
            elif self._held_since is None:
                self._held_since = monotonic()
            elif monotonic() - self._held_since >= _PATIENCE_S:
                applier.run(_PATIENCE_S)
        except LogClosedError:
            return False
        except CommitPendingError:  # the transaction before it is not done yet: its end notifies again
            return True
        except (LogError, OSError) as error:
            logger.warning("%s: transactions were not applied: %s", self._path, error)
            if isinstance(error, (FileNotFoundError, NotADirectoryError, LogMovedError)):
                self._end_holds(writers)
        return any(_held(writers))

    def _end_holds(self, writers: list[SectionWriter]) -> None:
        """End the holds after the store is gone. A part of a transaction makes the next append raise."""
        with importing:
            from .apply import end_hold

        for writer in _held(writers):
            try:
                end_hold(writer, writer.published())
            except LogError as error:
                writer.raise_soon(error)

    def _open(self, pointer: StorePointer, writers: list[SectionWriter]) -> tuple[Store, Applier]:
        """The store of the topic's transactions, and an applier for these writers."""
        with importing:  # in a thread of this process, which may fork meanwhile
            from .apply import Applier
            from .store import open_store

        store = self._handles.store = open_store(self._files, os.path.normpath(pointer.path))
        return store, Applier(self._files, store, writers, clock=self._clock)


def _held(writers: Iterable[SectionWriter]) -> Iterator[SectionWriter]:
    """The writers whose partition holds back a transaction, each checked when its turn comes."""
    return (each for each in writers if each.published().held_txn)
