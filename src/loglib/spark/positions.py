"""Positions: the partitions that a running stream reads, and its position in each.

Invariant: a stream continues where it ended. If it cannot, because records are gone that it had not read, that is a
loss (data_loss.py). These losses are noticed: retention has overtaken the stream; the topic was deleted, or made again;
the log was cut or restored below the stream's position, even if it has grown again. The checkpoint's `history` shows
the last one. A topic that was moved is the same topic: it is known by its log id.

The topics are looked at again once a second. So partitions that are added, and topics that begin to match, are found
within a second. A partition that comes later is read from its beginning, and a new query where its options say.

Processes: driver; one thread. It takes no lock and writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby

from ..errors import CorruptLogError, InvalidOffsetError
from ..format.watermark import Mark
from ..groups import TopicPartition
from ..log import topic_file
from ..log.history import history_at
from ..log.log import LOOK_S, Log
from ..log.lookup import marks_together
from ..system.clock import monotonic
from ..system.files import REAL
from .data_loss import Losses
from .limits import Backlog
from .options import Options
from .plan import Part
from .ranges import check_places, find_parts, offset_of, open_log
from .stream_offsets import Offsets, Span

_SWAP_S = 0.2  # a topic may be missing for this long while a restore replaces its directory
_LONG_LOOK_S = 0.05
_REST = 20  # between two looks at thousands of topics, times the CPU time of one
_MOST_OPEN = 256  # logs that keep their watermark open


class Subscription:
    """The partitions that the options choose, and their logs, which stay open between batches."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._parts: dict[TopicPartition, Part] = {}
        self._logs: dict[TopicPartition, Log] = {}
        self._has_looked = False
        self._look_at = 0.0

    def parts(self) -> dict[TopicPartition, Part]:
        """The partitions, at most a second old."""
        if monotonic() >= self._look_at:
            self.refresh()
        return self._parts

    def refresh(self) -> bool:
        """Look at the topics now. True if a known partition has gone or belongs to another log now."""
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
        self._look_at = monotonic() + (LOOK_S if took < _LONG_LOOK_S else _REST * took)
        return bool(gone)

    def has_changed(self) -> bool:
        """Look now. True if `refresh` returns True, or if a restore has replaced the files of a log."""
        changed = self.refresh()
        for log in self._logs.values():
            before = log.restored
            log.check_moved(patient=False)
            changed = changed or log.restored != before
        return changed

    def log(self, part: Part) -> Log:
        """The open log of a partition."""
        if part.key not in self._logs:
            self._logs[part.key] = open_log(part)
        return self._logs[part.key]

    def marks(self, parts: Mapping[TopicPartition, Part]) -> dict[TopicPartition, Mark]:
        """The marks of the partitions' logs. Those of one topic show all of a transaction, or nothing of it."""
        found: dict[TopicPartition, Mark] = {}
        for topic, of_topic in groupby(parts.values(), key=lambda part: part.topic):
            marks = marks_together([self.log(part) for part in of_topic])
            found |= {TopicPartition(topic, number): mark for number, mark in marks.items()}
        return found

    def release_files(self) -> None:
        """Keep few files open between batches."""
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
        return {part.key: part for part in parts}

    def _is_there(self, part: Part) -> bool:
        with suppress(OSError):
            described = topic_file.read(REAL, part.path)
            return described is not None and described[0] == part.log_id
        return False


class StreamPositions:
    """The positions of one streaming query run."""

    def __init__(self, options: Options, subscription: Subscription, losses: Losses) -> None:
        self._options = options
        self._subscription = subscription
        self._losses = losses
        self._first: dict[TopicPartition, int] = {}  # from the options, at the first look
        self._targets: dict[TopicPartition, tuple[bytes, int]] | None = None  # log id and end, with AvailableNow
        self._proven: dict[TopicPartition, tuple[int, int, int]] = {}  # offset, history, and state of the log

    @property
    def has_targets(self) -> bool:
        """True if the stream ends at a fixed end."""
        return self._targets is not None

    def fix_targets(self) -> None:
        """Let the stream end where the logs end now (AvailableNow)."""
        parts = self._subscription.parts()
        marks = self._subscription.marks(parts)
        self._targets = {key: (part.log_id, marks[key].flushed_end) for key, part in parts.items()}

    def span(self, position: Backlog, end: int) -> Span:
        """The span of a batch from this position to `end`."""
        history = self._history(position.log, end)
        self._proven[position.part.key] = (end, history, position.log.restored)
        return Span(position.start, end, history)

    def _history(self, log: Log, offset: int) -> int:
        """The CRC that names the log up to the offset; 0 if damage hides it and is skipped."""
        try:
            return history_at(log, offset)
        except CorruptLogError:
            if not self._options.skip_damage:
                raise
            return 0

    def has_other_history(self, part: Part, log: Log, span: Span) -> bool:
        """Report a loss and return True if the log up to the end of a batch is not the one that the query has read."""
        found = self._history(log, span.end)
        if found == span.history or (self._options.skip_damage and 0 in (found, span.history)):
            return False
        self._losses.report(
            f"{part}: the batch before offset {span.end} has CRC {found:08x}, and when the query read it, it had "
            f"{span.history:08x}: the log was cut or restored, and has grown again with other records"
        )
        return True

    def present(self, offsets: Offsets) -> Offsets:
        """The offsets with the present names of the topics. Reports the topics and partitions that are gone."""
        parts = self._subscription.parts()
        found, moved = {part.topic: part for part in parts.values()}, offsets.moved(parts.values())
        for topic, log_id in offsets.logs.items():
            if topic in moved:
                continue
            part = found.get(topic)
            if part is None:
                self._losses.report(
                    f"topic {topic} is gone (log {log_id.hex()}): it was deleted or moved, or the query's options do "
                    "not choose it any more"
                )
            elif part.log_id != log_id:
                self._losses.report(
                    f"{part.path} is log {part.log_id.hex()}, and the query has read log {log_id.hex()}: the topic was "
                    "made again, or the checkpoint belongs to another path"
                )
        offsets = offsets.renamed(moved)
        for key in sorted(offsets.spans.keys() - parts.keys()):
            if key.topic in found and found[key.topic].log_id == offsets.logs[key.topic]:
                self._losses.report(
                    f"{found[key.topic].path}, partition {key.partition}: the query's options do not choose it"
                )
        return offsets

    def after(self, before: Offsets | None) -> dict[TopicPartition, Backlog]:
        """The backlogs after a batch, or for None before the first batch."""
        parts = self._subscription.parts()
        marks = self._subscription.marks(parts)
        if before is None:
            self._resolve_first(parts, marks)
        found: dict[TopicPartition, Backlog] = {}
        for key, part in parts.items():
            span = before.spans[key] if before is not None and before.has(part) else None
            if span is None and self._is_late(part):
                continue
            log, mark = self._subscription.log(part), marks[key]
            if span is not None:
                start = self._resumed(part, log, mark, span)
            elif before is None:
                start = max(self._first.get(key, 0), mark.log_start_offset)
            else:
                start = mark.log_start_offset
            end = max(start, self._end(part, mark))
            found[key] = Backlog(part, log, mark, start, end, skip_damage=self._options.skip_damage)
        return found

    def _resolve_first(self, parts: Mapping[TopicPartition, Part], marks: Mapping[TopicPartition, Mark]) -> None:
        if self._first:
            return
        places = self._options.start
        check_places(places, list(parts.values()))
        self._first = {
            key: offset_of(places, part, self._subscription.log(part), marks[key], self._options)
            for key, part in parts.items()
        }

    def _is_late(self, part: Part) -> bool:
        """True if the partition came after the end was fixed."""
        return self._targets is not None and self._targets.get(part.key, (b"", 0))[0] != part.log_id

    def _end(self, part: Part, mark: Mark) -> int:
        if self._targets is None:
            return mark.flushed_end
        return 0 if self._is_late(part) else min(self._targets[part.key][1], mark.flushed_end)

    def _resumed(self, part: Part, log: Log, mark: Mark, span: Span) -> int:
        """The offset at which the stream continues after the span."""
        offset = span.end
        if offset < mark.log_start_offset:
            gone = mark.log_start_offset - offset
            self._losses.report(
                f"{part}: retention has dropped [{offset}, {mark.log_start_offset}), {gone} bytes that the query had "
                "not read"
            )
            return mark.log_start_offset
        if offset > mark.flushed_end:
            self._losses.report(
                f"{part}: the query has read up to offset {offset}, and the log ends at {mark.flushed_end}: it was "
                "cut or restored"
            )
            return mark.flushed_end
        state = (offset, span.history, log.restored)
        if self._proven.get(part.key) != state:
            if self.has_other_history(part, log, span):
                return _next_batch(log, mark, offset)
            self._proven[part.key] = state
        return offset


def _next_batch(log: Log, mark: Mark, offset: int) -> int:
    """The offset, if a batch begins there; otherwise the end of the batch around it."""
    try:
        return offset if log.batch_base(offset, mark) == offset else log.header_around(offset, mark).next_offset
    except InvalidOffsetError as error:
        return error.next_offset
