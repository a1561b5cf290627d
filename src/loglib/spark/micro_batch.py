"""Micro batch: the end of a stream's next batch, and the ranges of a batch.

Invariant: without new records there is no new offset, so Spark runs no batch. A batch has the same records when it
is planned again, in this process or after a restart: all facts are in its end offset. Records that are gone by then
are a loss (data_loss.py).

Processes: driver, in the process that plans a query's batches; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from ..errors import CorruptLogError, InvalidOffsetError, LogMovedError, OffsetOutOfRangeError
from ..format.watermark import Mark
from ..groups import TopicPartition
from ..log.lag import measure_lag
from ..log.log import Log
from ..system.clock import SYSTEM, monotonic
from .data_loss import Losses
from .limits import Backlog, Minimum, most_bytes, most_records
from .options import Options, Trigger
from .plan import Part, Range
from .positions import StreamPositions, Subscription
from .ranges import data_end, range_between
from .stream_offsets import Offsets, Span, by_topic, decode, encode

Result = TypeVar("Result")
Json = dict[str, Any]
Ends = Mapping[TopicPartition, int]
Positions = Mapping[TopicPartition, Backlog]

_TRIES = 10  # retention may come in between a few times
_LONG_LOOK_S = 0.002
_REST = 4  # between two long looks, times the CPU time of one
_UNLIMITED = Trigger(None, None, None, 0.0)


class Follower:
    """One run of a streaming query."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._subscription = Subscription(options)
        self._losses = Losses(fail=options.fail_on_data_loss)
        self._positions = StreamPositions(options, self._subscription, self._losses)
        self._minimum = Minimum()
        self._last: Positions = {}  # at the last look
        self.report: Json = {}  # for the progress: the log's end, and the lag of the batch that was planned last
        self._planned: Json = {}  # the last batch that was planned here
        self._idle_at: Json = {}  # the offset after which the last look found nothing, and the parts that it looked at
        self._idle_parts: Mapping[TopicPartition, Part] = {}
        self._idle_until = 0.0
        self._turn = 0  # which partition is first if not all can have a part of a batch

    def close(self) -> None:
        self._subscription.close()

    def stop_at_present_end(self) -> None:
        """Let the stream end where the logs end now (AvailableNow)."""
        self._subscription.refresh()
        self._steadily(self._positions.fix_targets)

    # --- the next batch ----------------------------------------------------------------------------

    def latest(self, start: Json, *, limited: bool) -> Json:
        """The end of the next batch. Without new records it is `start`, and Spark runs no batch."""
        trigger = self._options.trigger if limited else _UNLIMITED
        return self._steadily(lambda: self._latest(start, trigger))

    def _latest(self, start: Json, trigger: Trigger) -> Json:
        if start == self._idle_at and self._is_as_before():
            return start
        self._idle_at = {}
        before = decode(start)
        if before is not None:
            before = self._positions.present(before)
        positions = self._positions.after(before)
        ends = self._ends(positions, trigger, may_wait=before is not None)
        self._last = positions
        self.report = _report(positions, ends)
        if before is not None and not _has_news(before, positions, ends):
            if all(each.start == each.end for each in positions.values()):
                self._idle_at, self._idle_parts = start, self._subscription.parts()
            return start
        spans = {key: self._positions.span(each, ends[key]) for key, each in positions.items()}
        logs = {each.part.topic: each.part.log_id for each in positions.values()}
        self._planned = encode(Offsets(logs, spans))
        self._turn += 1
        return self._planned

    def _is_as_before(self) -> bool:
        """True if nothing has changed since a look that found nothing new. Spark asks a hundred times a second.

        If a look takes long, because there are hundreds of partitions, there are fewer looks.
        """
        if monotonic() < self._idle_until:
            return True
        begun = time.process_time()
        same = self._subscription.parts() is self._idle_parts and all(
            each.log.mark() == each.mark for each in self._last.values()
        )
        took = time.process_time() - begun
        if same and took > _LONG_LOOK_S:
            self._idle_until = monotonic() + _REST * took
        return same

    def _ends(self, positions: Positions, trigger: Trigger, *, may_wait: bool) -> Ends:
        """The end of the next batch in each partition."""
        least = trigger.min_records if may_wait and not self._positions.has_targets else None
        if least is not None and not self._minimum.is_reached(
            positions, least, max_delay_s=trigger.max_delay_s, now=monotonic()
        ):
            return {key: each.start for key, each in positions.items()}
        backlogs = list(positions.values())
        for limit, most in ((trigger.max_records, most_records), (trigger.max_bytes, most_bytes)):
            if limit is not None:
                ends = most(backlogs, limit, turn=self._turn)
                backlogs = [replace(each, end=end) for each, end in zip(backlogs, ends, strict=True)]
        return {key: each.end for key, each in zip(positions, backlogs, strict=True)}

    # --- the progress of the run --------------------------------------------------------------------

    def next_offsets(self) -> dict[str, dict[int, int]]:
        """The offset to read next, by topic's path and partition. The query has handled all records below it."""
        found: dict[str, dict[int, int]] = {}
        for key, each in self._last.items():
            found.setdefault(each.part.path, {})[key.partition] = each.start
        return found

    # --- the ranges of a batch -----------------------------------------------------------------------

    def ranges(self, end: Json) -> list[Range]:
        """The ranges of the batch that ends at `end`. It may have been planned before a restart."""
        offsets = decode(end)
        if offsets is None:
            return []
        return self._steadily(lambda: list(self._ranges(offsets, again=end != self._planned)))

    def _ranges(self, offsets: Offsets, *, again: bool) -> Iterator[Range]:
        parts, offsets = self._subscription.parts(), self._positions.present(offsets)
        for key, span in offsets.spans.items():
            part = parts.get(key)
            if part is not None and span.start < span.end and offsets.has(part):
                log = self._subscription.log(part)
                mark = log.mark()
                start, end = self._kept(part, log, mark, span, again=again)
                if start < end:
                    yield self._range(part, log, mark, start, end)

    def _kept(self, part: Part, log: Log, mark: Mark, span: Span, *, again: bool) -> tuple[int, int]:
        """The part [start, end) of the planned records that is left."""
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
            self._positions.has_other_history(part, log, span)  # reports it
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
        """Do the work, and repeat it if retention, a restore or a deletion has come in between."""
        try:
            for _ in range(_TRIES):
                try:
                    return work()
                except OffsetOutOfRangeError:
                    continue  # the next mark shows it as a loss
                except (LogMovedError, CorruptLogError):
                    if not self._subscription.has_changed():
                        raise
            return work()
        finally:
            self._subscription.release_files()


def _reaches_end(log: Log, mark: Mark) -> bool:
    """True if the files reach the flushed end. The index then has all segments, so that tasks list no directory."""
    for _ in range(2):
        with (
            suppress(FileNotFoundError, IndexError),
            log.open_base(log.index.bases()[-1], past_damage=True) as last,
        ):
            if mark.flushed_end <= last.end_of_file():
                return True
        log.refresh()  # the writer may have rolled
    return False


def _has_news(before: Offsets, positions: Positions, ends: Ends) -> bool:
    """True if the stream advances in a partition."""
    return any(
        ends[key] != (before.spans[key].end if before.has(each.part) else each.start)
        for key, each in positions.items()
    )


def _report(positions: Positions, ends: Ends) -> Json:
    now_us = SYSTEM()
    lag_bytes, seconds = 0, 0.0
    for key, each in positions.items():
        lag_bytes += each.mark.flushed_end - ends[key]
        if ends[key] < each.mark.flushed_end:
            with suppress(*[CorruptLogError] if each.skip_damage else []):  # the age of a damaged batch is unknown
                seconds = max(seconds, measure_lag(each.log, ends[key], now_us=now_us).seconds)
    return {
        "end": by_topic({key: each.mark.flushed_end for key, each in positions.items()}),
        "lag": {"bytes": lag_bytes, "seconds": round(seconds, 3)},
        "version": 1,
    }
