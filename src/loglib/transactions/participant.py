"""Participant: a topic's part in the transactions that others have committed.

Invariant: applying goes by numbers and may be done again (apply.py), so it does no harm if several processes or
threads serve one transaction.

Threads: `apply` runs where a topic is opened or held up; `serve` in the one thread of notifications.py. Neither keeps a
topic alive: a serving knows its writers, and nothing of what owns them.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..append.handles import Handles
from ..append.section_writer import SectionWriter
from ..errors import CommitPendingError, LogClosedError, LogError, LogMovedError
from ..log.store_pointer import StorePointer, read_pointer
from ..system.clock import monotonic
from ..system.files import Files
from . import notifications

if TYPE_CHECKING:  # most topics are in no transaction, and need neither
    from .apply import Applier
    from .store import Store

__all__ = ["Participant"]

logger = logging.getLogger("loglib")

_PATIENCE_S = 1.0  # for the process that applies a transaction
_APPLY_S = 2.0  # at most for the transactions of a dead process, when a topic is opened


class Participant:
    """What is done for the transactions of one open topic."""

    def __init__(self, files: Files, path: str, handles: Handles, clock: Callable[[], int]) -> None:
        self._files = files
        self._path = path
        self._handles = handles  # they have the writers that are open now
        self._clock = clock
        self._held_since: float | None = None  # when a transaction was first seen that is not done

    def listen(self) -> None:
        """Serve from now on, whenever another process leaves word in the topic's inbox."""
        notifications.listen(self._path, self, Participant.serve)

    def leave(self) -> None:
        """Serve no more."""
        notifications.leave(self)

    def apply(self, made: SectionWriter | None = None) -> None:
        """Apply what a dead process has committed. Records of the topic may wait for it.

        `made`: a writer that is not in use yet. Raises `CorruptLogError` if the log has a part of a transaction that
        nobody can finish: what is appended behind it would never be visible.
        """
        writers = [*self._handles.writers, *([made] if made is not None else [])]
        home = read_pointer(self._files, self._path)
        try:
            if home is None:
                if any(each.disk.mark.held_txn for each in writers):
                    raise FileNotFoundError(errno.ENOENT, "no store of transactions is known", self._path)
                return
            store, applier = self._of(home, writers)
            if store.pending():
                applier.run(_APPLY_S)
        except CommitPendingError as error:  # another process is applying
            logger.warning("%s: transactions were not applied: %s", self._path, error)
        except (LogError, OSError) as error:
            logger.warning("%s: transactions were not applied: %s", self._path, error)
            from .apply import end_hold

            for writer in writers:
                if writer.disk.mark.held_txn:
                    end_hold(writer)
        else:
            applier.release_own()

    def serve(self) -> bool:
        """Apply what other processes commit to the partitions of this one. True while something is held.

        If it is held for a second, the process that applies it may have died: then this one goes on.
        """
        writers = list(self._handles.writers)
        notifications.answer(self._files, self._path, [each.partition for each in writers])
        try:
            home = read_pointer(self._files, self._path)
            if home is None:
                return False
            store, applier = self._of(home, writers)
            for manifest in store.pending():
                applier.apply_own(manifest)
            applier.release_own()
            held = any(each.disk.mark.held_txn for each in writers)
            if not held:
                self._held_since = None
            elif self._held_since is None:
                self._held_since = monotonic()
            elif monotonic() - self._held_since >= _PATIENCE_S:
                applier.run(_PATIENCE_S)
        except LogClosedError:
            return False
        except CommitPendingError:  # the transaction before it is not done yet: its end rings again
            return True
        except (LogError, OSError) as error:
            logger.warning("%s: transactions were not applied: %s", self._path, error)
            if isinstance(error, (FileNotFoundError, NotADirectoryError, LogMovedError)):
                self._end_holds(writers)
        return any(each.disk.mark.held_txn for each in writers)

    def _end_holds(self, writers: list[SectionWriter]) -> None:
        """The store is gone, so that nobody finishes what is held. A part of it makes the next append raise."""
        from .apply import end_hold

        for writer in writers:
            if writer.disk.mark.held_txn:
                try:
                    end_hold(writer)
                except LogError as error:
                    writer.raise_soon(error)

    def _of(self, home: StorePointer, writers: list[SectionWriter]) -> tuple[Store, Applier]:
        """The store of the topic's transactions, with what applies them."""
        from .apply import Applier
        from .store import open_store

        store = self._handles.store = open_store(self._files, os.path.normpath(home.path))
        return store, Applier(self._files, store, writers, clock=self._clock)
