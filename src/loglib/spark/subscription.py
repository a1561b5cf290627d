"""Subscription: the partitions that a running stream reads, and their logs, which stay open between batches.

Invariant: the topics are looked at again once a second. So partitions that are added, and topics that begin to match,
are found within a second; the same is true of a topic that was deleted or made again.

Processes: driver; one thread. It takes no lock and writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby

from ..format.watermark import Mark
from ..groups import TopicPartition
from ..log import topic_file
from ..log.log import LOOK_S, Log
from ..log.marks_together import marks_together
from ..system.files import REAL
from .options import Options
from .ranges import Part, find_parts, open_log

__all__ = ["Live"]

_SWAP_S = 0.2  # a topic may be missing for this long while a restore replaces its directory
_LONG_LOOK_S = 0.05
_REST = 20  # between two looks at thousands of topics, times the CPU time of one
_MOST_OPEN = 256  # logs that keep their watermark open


class Live:
    """The partitions that the options choose, by topic and number."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._parts: dict[TopicPartition, Part] = {}
        self._logs: dict[TopicPartition, Log] = {}
        self._has_looked = False
        self._look_at = 0.0

    def parts(self) -> dict[TopicPartition, Part]:
        """The partitions, at most a second old."""
        if time.monotonic() >= self._look_at:
            self.refresh()
        return self._parts

    def refresh(self) -> bool:
        """Look at the topics now; whether a known partition has gone or belongs to another log now."""
        begun = time.process_time()
        found = self._found()
        if self._parts.keys() - found.keys():
            time.sleep(_SWAP_S)
            found = self._found()
        gone = [each for each, part in self._parts.items() if found.get(each) != part]
        for each in gone:
            if each in self._logs:
                self._logs.pop(each).close()
        self._parts, self._has_looked = dict(sorted(found.items())), True
        took = time.process_time() - begun
        self._look_at = time.monotonic() + (LOOK_S if took < _LONG_LOOK_S else _REST * took)
        return bool(gone)

    def has_changed(self) -> bool:
        """Look now, also whether a restore has replaced the files of a log."""
        changed = self.refresh()
        for log in self._logs.values():
            before = log.restored
            log.check_moved(patient=False)
            changed = changed or log.restored != before
        return changed

    def log(self, part: Part) -> Log:
        """The open log of a partition."""
        key = TopicPartition(part.topic, part.partition)
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = open_log(part)
        return log

    def marks(self, parts: Mapping[TopicPartition, Part]) -> dict[TopicPartition, Mark]:
        """The marks of the partitions' logs. Those of a topic show all of a transaction, or nothing of it."""
        found: dict[TopicPartition, Mark] = {}
        for topic, of_topic in groupby(parts.values(), key=lambda part: part.topic):
            marks = marks_together([self.log(part) for part in of_topic])
            found |= {TopicPartition(topic, number): mark for number, mark in marks.items()}
        return found

    def release_files(self) -> None:
        """Between batches: keep few files open."""
        for log in self._logs.values() if len(self._logs) > _MOST_OPEN else ():
            log.release_files()

    def close(self) -> None:
        while self._logs:
            self._logs.popitem()[1].close()

    def _found(self) -> dict[TopicPartition, Part]:
        try:
            parts = find_parts(self._options)
            for part in parts:
                if not part.storage.is_local:
                    raise ValueError(f"{part.path} has uploaded segments, which do not grow; stream the topic itself")
        except (OSError, ValueError):
            if not self._has_looked:
                raise
            parts = [part for part in self._parts.values() if self._is_there(part)]  # without the topics that are gone
        return {TopicPartition(part.topic, part.partition): part for part in parts}

    def _is_there(self, part: Part) -> bool:
        with suppress(OSError):
            described = topic_file.read(REAL, part.path)
            return described is not None and described[0] == part.log_id
        return False
