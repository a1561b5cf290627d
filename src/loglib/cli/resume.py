"""Resume: the place in a file up to which its lines are in a topic, so that its import continues without duplicates.

The import is a producer, named after the file's path, so the log itself contains that place. The number of each append
is

    bits 14 to 63   the place in the file after the last line of the append
    bits  0 to 13   the number of partitions among which keys choose: those of the topic when the import began, also if
                    it has more now; 0 if all lines go to one partition

Invariant: a line is in the topic exactly if the number of its partition is at or past the line's end. This also holds
after a power cut, when each partition may have lost another part of its unflushed records: everything that ends before
a border of `_WINDOW_BYTES` is flushed before anything after it is appended, so only the last window is compared.

A file that was cut, rotated or replaced does not contain the last appended lines in their places. Then it is another
file of this path, with a producer of its own.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import click

from ..append.partitioner import BUILT_IN
from ..errors import LogError, OffsetOutOfRangeError
from ..log.producers import producer_id
from ..topic import Topic
from .lines import STEP_BYTES, LineSource, Portion

_COUNT_BITS = 14
_WINDOW_BYTES = 64 * STEP_BYTES
_MOST_FILES = 1000  # of one path, in the course of time
_COMPARED = 100  # of the last appended lines: one alone, such as an empty one or a brace, may be anywhere


class Resume:
    """The import of one file."""

    def __init__(self, topic: Topic, source: LineSource, *, partition: int | None, has_keys: bool) -> None:
        """Find the place up to which the file is in the topic.

        A usage error if the import has keys and began without them, or the reverse.
        """
        self._topic = topic
        # Bytes that are not UTF-8 are escapes: the name of a producer is text.
        self._path = os.fsencode(os.path.realpath(source.name)).decode(errors="backslashreplace")
        self._topic_count = len(topic.partitions)
        self._count = self._topic_count if has_keys and partition is None else 0
        self._constant = partition
        self.is_other_file = False
        for number in range(1, _MOST_FILES):
            self._name = f"file {self._path}" + (f" ({number})" if number > 1 else "")
            self._ends = self._known()
            if not self._ends or self._is_same(source):
                break
            self.is_other_file = True
        # `end`: the place after the last line that is in the topic.
        self.end, before = max(self._ends.values(), default=(0, self._count))
        if before and not self._count:
            raise click.UsageError(f"{source.name} was appended with keys; give the same --key or --key-regex")
        if self._count and not before:
            raise click.UsageError(f"{source.name} was appended without keys, or with --partition; do the same")
        self.has_fewer = before < self._count  # partitions than the topic has now
        self._count = before
        # From one step before the last window, so that the time of the line before the first new one is known.
        window = max(0, self.end - 1 - STEP_BYTES) // _WINDOW_BYTES
        self.start = source.line_start(window * _WINDOW_BYTES)
        self._flushed = window * _WINDOW_BYTES

    def _known(self) -> dict[int, tuple[int, int]]:
        """By partition: the place after its last append, and the number of partitions among which keys chose."""
        found = {each.id: each.last_sequence(self._name) for each in self._topic.partitions}
        return {
            number: (sequence >> _COUNT_BITS, sequence & (1 << _COUNT_BITS) - 1)
            for number, sequence in found.items() if sequence is not None
        }  # fmt: skip

    def _is_same(self, source: LineSource) -> bool:
        """True if the file contains the last appended lines in their places."""
        number, (end, count) = max(self._ends.items(), key=lambda each: each[1])
        if source.size_bytes < end:
            return False
        partition = self._topic.partition(number)
        self._topic.flush()
        # This repeats the last append, so it appends nothing, and returns the offsets of the first time.
        (found,) = partition.append_many([b""], producer=(self._name, end << _COUNT_BITS | count))
        offsets = found.offsets
        try:
            with partition.read(offsets.start) as reader:
                appended = takewhile(lambda record: record.offset < offsets.stop, reader)
                values = list(deque((record.value or b"" for record in appended), maxlen=_COMPARED))
        except OffsetOutOfRangeError:  # retention has dropped them
            return True
        block = source.bytes_before(end, sum(map(len, values)) + STEP_BYTES)
        if block.endswith(source.end):  # not so in the middle of a long line that is split
            values[-1] += source.end
        if not count and not block.endswith(values[-1]):  # with keys, the last line may be in another partition
            return False
        place = len(block)
        for value in reversed(values):
            place = block.rfind(value, 0, place)
            if place < 0:
                return False
        return True

    # --- lines -------------------------------------------------------------------------------------------

    def is_in(self, end: int, key: bytes | None) -> bool:
        """True if the line with this key, which ends at this place, is in the topic."""
        if end > self.end or not self._count:
            return end <= self.end
        return end <= self._ends.get(self._partition(key), (0, 0))[0]

    def append(self, portion: Portion, columns: dict[str, Any]) -> list[bytes]:
        """Append the lines of the portion that are not in the topic yet, and return them."""
        keys: Sequence[bytes | None] = columns.get("keys") or [None] * len(portion.lines)
        border = (portion.ends[-1] - 1) // _WINDOW_BYTES * _WINDOW_BYTES
        if border > self._flushed:
            self._topic.flush()
            self._flushed = border
        missing: dict[int, list[int]] = defaultdict(list)
        for at, (end, key) in enumerate(zip(portion.ends, keys, strict=True)):
            if not self.is_in(end, key):
                missing[self._partition(key)].append(at)
        number = portion.ends[-1] << _COUNT_BITS | self._count
        appended: list[bytes] = []
        for partition, places in sorted(missing.items()):
            some = {name: [column[at] for at in places] for name, column in columns.items()}
            lines = [portion.lines[at] for at in places]
            self._topic.append_many(lines, partition=partition, producer=(self._name, number), **some)
            appended += lines
        return appended

    def _partition(self, key: bytes | None) -> int:
        """The partition of a line with this key. All lines without a key go to one, so that they keep their order."""
        if self._constant is not None:
            return self._constant
        if not self._count:
            return max(self._ends, key=self._ends.__getitem__, default=producer_id(self._name) % self._topic_count)
        if key is None:
            return producer_id(self._name) % self._count
        name = self._topic.config.partitioner
        if name not in BUILT_IN:
            raise LogError(f"{self._topic.path} spreads keys by {name}, a function of an application; give --partition")
        return BUILT_IN[name](key, self._count)
