"""Positions: where a stream stands in each partition, and what it has not read there.

Invariant: a stream goes on where it ended. If it cannot, because records are gone that it had not read, that is a loss
(data_loss.py). These losses are noticed: retention has overtaken the stream; the topic was deleted, or made again; the
log was cut or restored below the stream's place, even if it has grown again. The checkpoint's `history` shows the last
one. A topic that was moved is the same topic: it is known by its log id.

A partition that comes later is read from its beginning. A new query begins where its options say.

Processes: driver; one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import CorruptLogError, InvalidOffsetError
from ..format.watermark import Mark
from ..groups import TopicPartition
from ..log.history import history_at
from ..log.log import Log
from .data_loss import Losses
from .options import Options
from .ranges import Part, check_places, offset_of
from .stream_offsets import Offsets, Span
from .subscription import Live

__all__ = ["StreamPosition", "StreamPositions", "check_topics", "is_known"]


class StreamPosition(NamedTuple):
    """A partition, and what the stream has not read of it: [start, end)."""

    part: Part
    log: Log
    mark: Mark
    start: int
    end: int


class StreamPositions:
    """Where one run of a query stands."""

    def __init__(self, options: Options, live: Live, losses: Losses) -> None:
        self._options = options
        self._live = live
        self._losses = losses
        self._first: dict[TopicPartition, int] = {}  # what the options mean, from the first look on
        self._targets: dict[TopicPartition, tuple[bytes, int]] | None = None  # log id and end, with AvailableNow
        self._proven: dict[TopicPartition, tuple[int, int, int]] = {}  # offset, history, and state of the log

    @property
    def has_targets(self) -> bool:
        """Whether the stream ends at an end that is fixed."""
        return self._targets is not None

    def fix_targets(self) -> None:
        """Let the stream end where the logs end now (AvailableNow)."""
        parts = self._live.parts()
        marks = self._live.marks(parts)
        self._targets = {key: (part.log_id, marks[key].flushed_end) for key, part in parts.items()}

    def span(self, key: TopicPartition, standing: StreamPosition, end: int) -> Span:
        """What a batch reads that ends there."""
        history = self.history(standing.log, end)
        self._proven[key] = (end, history, standing.log.restored)
        return Span(standing.start, end, history)

    def history(self, log: Log, offset: int) -> int:
        """The CRC that names the log up to the offset; 0 if damage hides it and is skipped."""
        try:
            return history_at(log, offset)
        except CorruptLogError:
            if not self._options.skip_damage:
                raise
            return 0

    def has_other_history(self, part: Part, log: Log, span: Span) -> bool:
        """Whether the log up to the end of a batch is another one than the query has read. That is a loss."""
        found = self.history(log, span.end)
        if found == span.history or (self._options.skip_damage and 0 in (found, span.history)):
            return False
        self._losses.report(
            f"{part}: the batch before offset {span.end} has CRC {found:08x}, and when the query read it, it had "
            f"{span.history:08x}: the log was cut or restored, and has grown again with other records"
        )
        return True

    def present(self, offsets: Offsets) -> Offsets:
        """The offsets with the present names of the topics. Reports the topics and partitions that are gone."""
        parts = self._live.parts()
        check_topics(offsets, parts, self._losses)
        return with_present_names(offsets, parts)

    def after(self, before: Offsets | None) -> dict[TopicPartition, StreamPosition]:
        """Where the stream stands after a batch; None: before the first batch."""
        parts = self._live.parts()
        marks = self._live.marks(parts)
        if before is None:
            self._resolve_first(parts, marks)
        found: dict[TopicPartition, StreamPosition] = {}
        for key, part in parts.items():
            span = before.spans[key] if before is not None and is_known(before, key, part) else None
            if span is None and self._is_late(key, part):
                continue
            log, mark = self._live.log(part), marks[key]
            if span is not None:
                start = self._resumed(key, part, log, mark, span)
            elif before is None:
                start = max(self._first.get(key, 0), mark.log_start_offset)
            else:
                start = mark.log_start_offset
            found[key] = StreamPosition(part, log, mark, start, max(start, self._end(key, part, mark)))
        return found

    def _resolve_first(self, parts: Mapping[TopicPartition, Part], marks: Mapping[TopicPartition, Mark]) -> None:
        if self._first:
            return
        places = self._options.start
        check_places(places, list(parts.values()))
        self._first = {
            key: offset_of(places, part, self._live.log(part), marks[key], self._options) for key, part in parts.items()
        }

    def _is_late(self, key: TopicPartition, part: Part) -> bool:
        """Whether the partition came after the end was fixed."""
        return self._targets is not None and self._targets.get(key, (b"", 0))[0] != part.log_id

    def _end(self, key: TopicPartition, part: Part, mark: Mark) -> int:
        if self._targets is None:
            return mark.flushed_end
        return 0 if self._is_late(key, part) else min(self._targets[key][1], mark.flushed_end)

    def _resumed(self, key: TopicPartition, part: Part, log: Log, mark: Mark, span: Span) -> int:
        """The offset from which a partition is read on."""
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
        if self._proven.get(key) != state:
            if self.has_other_history(part, log, span):
                return _next_batch(log, mark, offset)
            self._proven[key] = state
        return offset


def check_topics(offsets: Offsets, parts: Mapping[TopicPartition, Part], losses: Losses) -> None:
    """Report the topics and partitions of the offsets that are gone."""
    found, moved = {part.topic: part for part in parts.values()}, _moved(offsets, parts)
    for topic, log_id in offsets.logs.items():
        if topic in moved:
            continue
        part = found.get(topic)
        if part is None:
            losses.report(
                f"topic {topic} is gone (log {log_id.hex()}): it was deleted or moved, or the query's options do not "
                "choose it any more"
            )
        elif part.log_id != log_id:
            losses.report(
                f"{part.path} is log {part.log_id.hex()}, and the query has read log {log_id.hex()}: the topic was "
                "made again, or the checkpoint belongs to another path"
            )
    present = with_present_names(offsets, parts)
    for key in sorted(present.spans.keys() - parts.keys()):
        if key.topic in found and found[key.topic].log_id == present.logs[key.topic]:
            losses.report(f"{found[key.topic].path}, partition {key.partition}: the query's options do not choose it")


def with_present_names(offsets: Offsets, parts: Mapping[TopicPartition, Part]) -> Offsets:
    """The same offsets, with the present names of the topics that were moved."""
    moved = _moved(offsets, parts)
    if not moved:
        return offsets
    taken = set(moved.values())  # the topic that had such a name before is gone
    names = {topic: moved.get(topic, topic) for topic in offsets.logs if topic in moved or topic not in taken}
    logs = {names[topic]: log_id for topic, log_id in offsets.logs.items() if topic in names}
    spans = {
        TopicPartition(names[key.topic], key.partition): span
        for key, span in offsets.spans.items()
        if key.topic in names
    }
    return Offsets(logs, spans)


def _moved(offsets: Offsets, parts: Mapping[TopicPartition, Part]) -> dict[str, str]:
    """The present name of each topic that has another name than in the offsets."""
    present = {part.topic: part.log_id for part in parts.values()}
    found = {}
    for topic, log_id in offsets.logs.items():
        if present.get(topic) != log_id:
            names = [name for name, found_id in present.items() if found_id == log_id != offsets.logs.get(name)]
            if len(names) == 1:  # of two copies nobody knows which one was read
                found[topic] = names[0]
    return found


def is_known(offsets: Offsets, key: TopicPartition, part: Part) -> bool:
    """Whether the offsets have this partition of this log."""
    return offsets.logs.get(key.topic) == part.log_id and key in offsets.spans


def _next_batch(log: Log, mark: Mark, offset: int) -> int:
    """The offset, if a batch begins there; otherwise the end of the batch around it."""
    try:
        return offset if log.batch_base(offset, mark) == offset else log.header_around(offset, mark).next_offset
    except InvalidOffsetError as error:
        return error.next_offset
