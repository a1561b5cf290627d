"""Micro batch: what the next batch of a stream reads, and the ranges of a batch.

Invariant: without new records there is no new offset, so that Spark runs no batch. A batch has the same records when it
is planned again, in this process or after a restart: everything that matters is in its end offset. Records that are
gone by then are a loss (data_loss.py).

Processes: driver, in the process that plans a query's batches; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import CorruptLogError, InvalidOffsetError, LogMovedError, OffsetOutOfRangeError
from ..format.watermark import Mark
from ..groups import TopicPartition
from ..log.lag import measure_lag
from ..log.log import Log
from ..system.clock import SYSTEM
from .backlog import LogBacklog
from .data_loss import Losses
from .limits import Minimum, most_bytes, most_records
from .options import Options, Trigger
from .plan import Range
from .positions import StreamPosition, StreamPositions, is_known
from .ranges import Part, data_end, range_between
from .stream_offsets import Offsets, Span, by_topic, decode, encode
from .subscription import Live

__all__ = ["Follower"]

Result = TypeVar("Result")
Json = dict[str, Any]
Ends = Mapping[TopicPartition, int]

_TRIES = 10  # retention may come in between a few times
_LONG_LOOK_S = 0.002
_REST = 4  # between two long looks, times the CPU time of one
_UNLIMITED = Trigger(None, None, None, 0.0)


class Follower:
    """One run of a streaming query."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._live = Live(options)
        self._losses = Losses(fail=options.fail_on_data_loss)
        self._standings = StreamPositions(options, self._live, self._losses)
        self._minimum = Minimum()
        self._standing: dict[TopicPartition, StreamPosition] = {}  # at the last look
        self._report: Json = {}
        self._planned: Json = {}  # the last batch that was planned here
        self._idle_at: Json = {}  # the offset after which the last look has found nothing, and what it looked at
        self._idle_parts: Mapping[TopicPartition, Part] = {}
        self._idle_until = 0.0
        self._turn = 0  # which partition is first if not all can have a part of a batch

    def close(self) -> None:
        self._live.close()

    def stop_at_present_end(self) -> None:
        """Let the stream end where the logs end now (AvailableNow)."""
        self._live.refresh()
        self._steadily(self._standings.fix_targets)

    # --- the next batch ----------------------------------------------------------------------------

    def latest(self, start: Json, *, limited: bool) -> Json:
        """The end of the next batch. Without new records it is `start`, and Spark runs no batch."""
        trigger = self._options.trigger if limited else _UNLIMITED
        try:
            return self._steadily(lambda: self._latest(start, trigger))
        finally:
            self._live.release_files()

    def _latest(self, start: Json, trigger: Trigger) -> Json:
        if start == self._idle_at and self._is_as_before():
            return start
        self._idle_at = {}
        before = decode(start)
        if before is not None:
            before = self._standings.present(before)
        standing = self._standings.after(before)
        ends = self._ends(standing, trigger, may_wait=before is not None)
        self._standing = standing
        self._report = _report(standing, ends, skip_damage=self._options.skip_damage)
        if before is not None and not _has_news(before, standing, ends):
            if all(each.start == each.end for each in standing.values()):
                self._idle_at, self._idle_parts = start, self._live.parts()
            return start
        spans = {key: self._standings.span(key, each, ends[key]) for key, each in standing.items()}
        logs = {each.part.topic: each.part.log_id for each in standing.values()}
        self._planned = encode(Offsets(logs, spans))
        self._turn += 1
        return self._planned

    def _is_as_before(self) -> bool:
        """Whether nothing has changed since a look that found nothing new. Spark asks a hundred times a second.

        If a look takes long, because there are hundreds of partitions, there are fewer looks.
        """
        if time.monotonic() < self._idle_until:
            return True
        begun = time.process_time()
        same = self._live.parts() is self._idle_parts and all(
            each.log.mark() == each.mark for each in self._standing.values()
        )
        took = time.process_time() - begun
        if same and took > _LONG_LOOK_S:
            self._idle_until = time.monotonic() + _REST * took
        return same

    def _ends(self, standing: Mapping[TopicPartition, StreamPosition], trigger: Trigger, *, may_wait: bool) -> Ends:
        """Where the next batch ends in each partition."""
        skip = self._options.skip_damage
        backlogs = {
            key: LogBacklog(each.log, each.mark, each.start, each.end, skip_damage=skip)
            for key, each in standing.items()
        }
        least = trigger.min_records if may_wait and not self._standings.has_targets else None
        if least is not None and not self._minimum.is_reached(
            backlogs, least, max_delay_s=trigger.max_delay_s, now=time.monotonic()
        ):
            return {key: each.start for key, each in standing.items()}
        in_order = list(backlogs.values())
        for limit, most in ((trigger.max_records, most_records), (trigger.max_bytes, most_bytes)):
            if limit is not None:
                for backlog, end in zip(in_order, most(in_order, limit, turn=self._turn), strict=True):
                    backlog.end = end
        return {key: backlog.end for key, backlog in backlogs.items()}

    # --- what is known about the run -----------------------------------------------------------------

    def report(self) -> Json:
        """The log's end, and how far the batch that was planned last is behind it: for the query's progress."""
        return self._report

    def positions(self) -> dict[str, dict[int, int]]:
        """The offset to read next, by topic's path and partition. The query has handled everything below."""
        found: dict[str, dict[int, int]] = {}
        for key, each in self._standing.items():
            found.setdefault(each.part.path, {})[key.partition] = each.start
        return found

    # --- the ranges of a batch -----------------------------------------------------------------------

    def ranges(self, end: Json) -> list[Range]:
        """What the batch reads that ends there. It may have been planned before a restart."""
        offsets = decode(end)
        if offsets is None:
            return []
        try:
            return self._steadily(lambda: list(self._ranges(offsets, again=end != self._planned)))
        finally:
            self._live.release_files()

    def _ranges(self, offsets: Offsets, *, again: bool) -> Iterator[Range]:
        parts, offsets = self._live.parts(), self._standings.present(offsets)
        for key, span in offsets.spans.items():
            part = parts.get(key)
            if part is not None and span.start < span.end and is_known(offsets, key, part):
                log = self._live.log(part)
                mark = log.mark()
                start, end = self._kept(part, log, mark, span, again=again)
                if start < end:
                    yield self._range(part, log, mark, start, end)

    def _kept(self, part: Part, log: Log, mark: Mark, span: Span, *, again: bool) -> tuple[int, int]:
        """What is left of the records that were planned."""
        start, end = span.start, span.end
        if start < mark.log_start_offset:
            start = min(end, mark.log_start_offset)
            self._losses.report(
                f"{part}: retention has dropped [{span.start}, {start}) of a batch that was not finished"
            )
        if end > mark.flushed_end:
            self._losses.report(
                f"{part}: a batch that was not finished ends at offset {end}, and the log at {mark.flushed_end}: it "
                "was cut or restored"
            )
            end = mark.flushed_end
        elif again and start < end:
            self._standings.has_other_history(part, log, span)  # reports it
        return start, end

    def _range(self, part: Part, log: Log, mark: Mark, start: int, end: int) -> Range:
        skip_damage = self._options.skip_damage
        if not _reaches_end(log, mark):
            end = min(end, data_end(part, log, mark, self._options))
        try:
            return range_between(part, log, mark, start, end, skip_damage=skip_damage)
        except InvalidOffsetError as error:
            if self._losses.fail:
                raise
            return range_between(part, log, mark, min(error.next_offset, end), end, skip_damage=skip_damage)

    def _steadily(self, work: Callable[[], Result]) -> Result:
        """Do the work again if retention, a restore or a deletion has come in between."""
        for _ in range(_TRIES):
            try:
                return work()
            except OffsetOutOfRangeError:
                continue  # the next mark shows it as a loss
            except (LogMovedError, CorruptLogError):
                if not self._live.has_changed():
                    raise
        return work()


def _reaches_end(log: Log, mark: Mark) -> bool:
    """Whether the files reach the flushed end. The index then has all segments, so that tasks list no directory."""
    for _ in range(2):
        with (
            suppress(FileNotFoundError, IndexError),
            log.open_base(log.index.bases()[-1], past_damage=True) as last,
        ):
            if mark.flushed_end <= last.end_of_file():
                return True
        log.refresh()  # the writer may have rolled
    return False


def _has_news(before: Offsets, standing: Mapping[TopicPartition, StreamPosition], ends: Ends) -> bool:
    """Whether the stream moves on in a partition."""
    return any(
        ends[key] != (before.spans[key].end if is_known(before, key, each.part) else each.start)
        for key, each in standing.items()
    )


def _report(standing: Mapping[TopicPartition, StreamPosition], ends: Ends, *, skip_damage: bool) -> Json:
    now_us = SYSTEM()
    behind, seconds = 0, 0.0
    for key, each in standing.items():
        behind += each.mark.flushed_end - ends[key]
        if ends[key] < each.mark.flushed_end:
            with suppress(*[CorruptLogError] if skip_damage else []):  # the age of a damaged batch is unknown
                seconds = max(seconds, measure_lag(each.log, ends[key], now_us=now_us).seconds)
    return {
        "end": by_topic({key: each.mark.flushed_end for key, each in standing.items()}),
        "lag": {"bytes": behind, "seconds": round(seconds, 3)},
        "version": 1,
    }
