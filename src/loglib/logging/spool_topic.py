"""SpoolTopic: the topic of a spool, and the records of a portion that are in it after an error.

Invariant: after an error each record of a portion is either in the topic, or returned by `missing`. Errors of loglib
name each record that is lost or in doubt; those in doubt are looked up after their partition was recovered.

Several processes may have spools on one topic, also more than it has partitions. Each takes a partition that is free,
or waits for its turn (append/turns.py).

Threads: belongs to the thread that writes.
"""

from __future__ import annotations

import _thread
import logging
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..config.policies import Policies, TopicConfig
from ..errors import (
    InvalidOffsetError,
    LockedError,
    LogClosedError,
    LogError,
    LogMovedError,
    OffsetOutOfRangeError,
    OffsetRange,
)
from ..log import topic_file
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.process import at_exit, try_each
from ..topic import Topic, open_topic

logger = logging.getLogger("loglib")

_WAIT_S = 0.2  # for a partition; then the thread looks whether it must give up, and tries again


class Item(NamedTuple):
    """A record on its way to the topic."""

    value: bytes
    timestamp_us: int


class SpoolTopic(NotCopyable):
    """A topic that is open while a spool needs it."""

    def __init__(
        self, files: Files, path: str, partitions: int | None, defaults: Policies, policies: Policies
    ) -> None:
        """`partitions`, `defaults` and the policies are for a topic that does not exist yet. Wrong ones raise here."""
        given: dict[str, Any] = {"partitions": partitions, **defaults, **policies}
        TopicConfig(**{name: value for name, value in given.items() if value is not None})
        self._files = files
        self._path = path
        self._partitions = partitions
        self._defaults = defaults
        self._policies = policies
        self._topic: Topic | None = None
        self._has_failed = False  # since the last portion that was written

    def opened(self) -> Topic:
        """Open the topic, if it is not open."""
        if self._topic is None:
            # If threads were patched to be greenlets after the import, a thread of the topic would be a greenlet that
            # waits for this thread.
            is_as_imported = _thread.start_new_thread is start_new_thread
            given: dict[str, Any] = {
                "shared": True, "wait": _WAIT_S, "files": self._files, "background": is_as_imported,
            }  # fmt: skip
            if not topic_file.exists(self._files, self._path):
                given |= {"partitions": self._partitions, **self._defaults}
            given |= self._policies  # of a topic that exists, these are compared with the stored ones
            try:
                self._topic = open_topic(self._path, **given)
            except RuntimeError:  # no thread can be started; the spool flushes by itself
                self._topic = open_topic(self._path, **given | {"background": False})
            # At the end of the process the spool closes it, in the thread that writes. Another thread would wait for a
            # write that hangs, and a thread and a greenlet that wait for the same lock do not wake each other.
            at_exit.discard(self._topic.close)
        return self._topic

    def give_back(self) -> list[Exception]:
        """Close the topic, which releases its partition. Return the error of closing, if there is one."""
        topic, self._topic = self._topic, None
        return [] if topic is None else [error for _, error in try_each([topic], Topic.close)]

    def end_portion(self) -> None:
        """A portion was written."""
        self._has_failed = False

    # --- errors ---------------------------------------------------------------------------------------

    def missing(
        self, error: BaseException, portion: list[Item], appended: list[OffsetRange], nap: Callable[[], bool]
    ) -> list[Item]:
        """The records of a portion that are not in the topic after this error. Closes the topic.

        `appended` is the result of `append_many`, or empty if that has failed. `nap` sleeps a moment, and returns False
        if the writer must give up.
        """
        log_id = None if self._topic is None else self._topic.log_id
        errors = [error, *self.give_back()]
        if not self._has_failed and not isinstance(error, LogClosedError | LockedError):
            self._has_failed = True  # one warning until a portion can be written again
            logger.warning("%s: %d records wait in memory: %s", self._path, len(portion), error)
        if isinstance(error, LogMovedError) and (error.kept is not None or self._is_another(log_id)):
            return portion  # the next topic in this path shall have them
        return self._not_written(portion, appended or getattr(error, "appended", ()), errors, nap)

    def _is_another(self, log_id: bytes | None) -> bool:
        """True if the log at the path is not this one, perhaps with added partitions."""
        with suppress(LogError, OSError):
            described = topic_file.read(self._files, self._path)
            return described is None or described[0] != log_id
        return False  # damaged: what is in it must not be written again when it is mended

    def _not_written(
        self, portion: list[Item], appended: Iterable[OffsetRange], errors: Sequence[BaseException],
        nap: Callable[[], bool],
    ) -> list[Item]:  # fmt: skip
        """The records that are not in the topic after these errors, in their order.

        The topic is closed, so a record that was appended, and that no error names, is in the topic.
        """
        not_appended = set(getattr(errors[0], "not_appended", ()))
        places = [(each.partition, offset) for each in appended for offset in each.offsets]
        placed = [index for index in range(len(portion)) if index not in not_appended] if places else []
        lost = _places(errors, "lost")
        doubtful = _places(errors, "in_doubt")
        found = self._records_at(doubtful, nap) if doubtful else {}
        written = {
            index
            for index, place in zip(placed, places, strict=True)
            if place not in lost and (place not in doubtful or found.get(place) == portion[index])
        }
        return [item for index, item in enumerate(portion) if index not in written]

    def _records_at(self, places: set[tuple[int, int]], nap: Callable[[], bool]) -> dict[tuple[int, int], Item]:
        """The records that are at these places now, after their partitions were recovered.

        Another process may have recovered a partition and written it since. Its records have other times.
        """
        found: dict[tuple[int, int], Item] = {}
        for number in sorted({partition for partition, _ in places}):
            while not self._recovered(number):
                if not nap():
                    return found
            first = min(offset for partition, offset in places if partition == number)
            partition = self.opened().partition(number)
            with suppress(OffsetOutOfRangeError, InvalidOffsetError):  # then none of them is there
                for record in partition.read(first):
                    found[number, record.offset] = Item(record.value or b"", record.timestamp)
        return found

    def _recovered(self, number: int) -> bool:
        """Take a partition, which recovers it, and seal the segment that could not be written. False if that fails."""
        try:
            self.opened().partition(number).roll()
        except (LogError, OSError):
            self.give_back()
            return False
        return True


def _places(errors: Iterable[BaseException], name: str) -> set[tuple[int, int]]:
    """The places that errors name as "lost" or "in_doubt"."""
    ranges = [each for error in errors for each in getattr(error, name, ())]
    return {(each.partition, offset) for each in ranges for offset in each.offsets}
