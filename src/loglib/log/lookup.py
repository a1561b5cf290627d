"""Lookup: the offset at which reading begins, for "begin", "end", a time or an offset; the ends of several logs.

Invariant: a start by time is the offset of the first record at or after that time, in the order of the log. Event
times need not rise. So the search uses the largest event time so far, which never falls: segment headers have it, and
batch headers too. If retention drops segments during the search, the search begins again.

Threads: safe for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress

from ..config.arguments import Start, Time, parse_start, partition_numbers
from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..format.batch import stored_header
from ..format.record import Damage
from ..format.watermark import Mark
from .cursor import Cursor
from .log import Log, promised_marks
from .pending_marks import is_held, shown
from .search import first_reaching

StartLike = Start | Mapping[int, Start]


def starts_of(
    start: StartLike, partitions: Collection[int], *, now_us: int, others: str | None
) -> dict[int, str | int | Time]:
    """The start of each partition. Partitions missing from a mapping get `others`, or are omitted if it is None."""
    if isinstance(start, Mapping):
        by_partition = partition_numbers(start)
        unknown = [partition for partition in by_partition if partition not in partitions]
        if unknown:
            raise ValueError(f"no partition {unknown[0]} here; there are {sorted(partitions)}")
        starts = {} if others is None else dict.fromkeys(partitions, parse_start(others, now_us=now_us))
        return starts | {partition: parse_start(each, now_us=now_us) for partition, each in by_partition.items()}
    parsed = parse_start(start, now_us=now_us)
    if isinstance(parsed, int) and len(partitions) > 1:
        raise ValueError(f"offset {parsed} means another record in each partition; give {{partition: offset}}")
    return dict.fromkeys(partitions, parsed)


def resolve(log: Log, start: str | int | Time, *, mark: Mark | None = None, past_damage: bool = False) -> int:
    """The offset of a start. A time gives the first record at or after it, or the flushed end.

    A declared gap that may contain the record counts as the first, so that a reader reports the gap. With
    `past_damage`, other damage counts as the first, too.
    """
    mark = mark or log.mark()
    if start == "begin":
        return mark.log_start_offset
    if start == "end":
        return mark.flushed_end
    if isinstance(start, Time):
        return _of_time(log, start.timestamp_us, mark, past_damage=past_damage)
    assert isinstance(start, int)
    log.batch_base(start, mark, past_damage=past_damage)
    return start


def first_after(log: Log, offset: int, timestamp_us: int) -> int:
    """The offset of the first record at or after a time, from a batch's offset on; `offset` itself if damage hides it.

    As in `resolve`, a declared gap counts as the first, and the flushed end stands for no record.
    """
    gaps: list[Damage] = []
    try:
        found = _next_at_or_after(timestamp_us, Cursor(log, offset, on_gap=gaps.append), log.mark())
    except CorruptLogError:
        return offset
    return min((gap.offsets.start for gap in gaps), default=found)


def ends_together(
    logs: Collection[Log], end: StartLike | None, *, now_us: int, past_damage: Callable[[Log], bool]
) -> dict[int, int]:
    """The offset of `end` in each log, or its present end. A transaction is in all partitions before it, or in none."""
    ends = starts_of("end" if end is None else end, [log.partition for log in logs], now_us=now_us, others="end")
    marks = marks_together(logs)
    return {
        log.partition: resolve(
            log, ends[log.partition], mark=marks[log.partition], past_damage=past_damage(log)
        )
        for log in logs
    }  # fmt: skip


def marks_together(
    logs: Collection[Log], look: Callable[[Log], Mark] = lambda log: log.published()
) -> dict[int, Mark]:  # fmt: skip
    """The marks of a topic's logs, by partition, chosen so that each transaction is in all of them or in none.

    `look` returns a log's mark: `Log.found` for copies; by default the published one, by the method of the log's class.

    A mark that shows a transaction does not fit a mark that was read before the transaction came. In that case the
    second look finds a change, and all marks are read again.
    """
    while True:
        marks = {log.partition: look(log) for log in logs}
        if not any(mark.applied_txn or mark.held_txn for mark in marks.values()):
            return marks
        alone = [log for log in logs if not is_held(marks[log.partition])]
        promised = promised_marks([log for log in logs if is_held(marks[log.partition])])
        seen = {number: shown(marks[number], mark) for number, mark in promised.items()}
        seen |= {log.partition: log.visible(marks[log.partition]) for log in alone}
        over = {marks[number].held for number, mark in seen.items() if not mark.held_txn}
        again = {log.partition: look(log) for log in logs}
        if all(again[number].transactions == mark.transactions for number, mark in marks.items()):
            # Look again at the logs that show a transaction as held: others may have found meanwhile that it is over.
            late = [log for log in alone if seen[log.partition].held_txn and marks[log.partition].held in over]
            return seen | {log.partition: log.visible(marks[log.partition]) for log in late}


def before_end(log: Log, count: int) -> int:
    """The offset of the first of the last `count` records; the log start if there are fewer, the end for none.

    Reads the headers of the batches that have them. If damage is in the way, it is the offset after the damage.
    """
    while True:
        mark = log.mark()
        try:
            return _before_end(log, count, mark)
        except OffsetOutOfRangeError:  # retention has meanwhile dropped the segment
            continue


def _before_end(log: Log, count: int, mark: Mark) -> int:
    found = mark.flushed_end
    while count > 0 and found > mark.log_start_offset:
        try:
            with log.open_segment(found - 1) as segment:
                place, end = log.end_of(segment, mark)
                if found < end:  # before a gap
                    place = log.header_around(found - 1, mark).base_offset
                while place is not None and count > 0:
                    header = segment.header_at(place)
                    if header.record_count >= count:
                        return header.offsets[-count]
                    count -= header.record_count
                    found = place
                    place = header.previous_offset if place > segment.base_offset else None
        except CorruptLogError:
            gap = log.gap_at(found - 1)
            if gap is None:
                break
            found = gap.start
    return found


def _of_time(log: Log, timestamp: int, mark: Mark, *, past_damage: bool) -> int:
    while True:
        try:
            return _first_whole_at_or_after(log, timestamp, mark, past_damage=past_damage)
        except (FileNotFoundError, OffsetOutOfRangeError) as error:
            before, mark = mark, log.mark()
            if mark.log_start_offset == before.log_start_offset:  # retention has not moved the log start
                expected = "all segments from the log start"
                raise CorruptLogError(log.directory, 0, f"no file ({error})", expected) from error


def _first_at_or_after(log: Log, timestamp: int, mark: Mark) -> int:
    for base in _segments_from(log, timestamp, mark):
        if base >= mark.flushed_end:
            break
        with log.open_base(base) as segment:
            last, end = log.end_of(segment, mark)
            first = first_reaching(segment, timestamp, last, end)
        if first is not None:
            gaps: list[Damage] = []
            found = _next_at_or_after(timestamp, Cursor(log, first.base_offset, on_gap=gaps.append), mark)
            return min((gap.offsets.start for gap in gaps), default=found)
    return mark.flushed_end


def _segments_from(log: Log, timestamp: int, mark: Mark) -> list[int]:
    """The base offsets of the segments, from the one that may have the first event at or after the time."""
    bases = [base for base in log.index.bases() if base >= mark.log_start_offset]
    if not bases or mark.flushed_end > bases[-1]:
        log.refresh()
        bases = [base for base in log.index.bases() if base >= mark.log_start_offset]
    # The header of segment i + 1 has the largest event time up to the end of segment i. Retention may have dropped
    # that event since.
    low, high = 0, len(bases) - 1
    while low < high:
        middle = (low + high) // 2
        with log.open_base(bases[middle + 1]) as following:
            reached = following.header.running_max_timestamp >= timestamp
        low, high = (low, middle) if reached else (middle + 1, high)
    return bases[low:]


def _first_whole_at_or_after(log: Log, timestamp: int, mark: Mark, *, past_damage: bool) -> int:
    """The offset of a time in a log with possible damage, which may block the search.

    Then every batch from that segment on is looked at, and every batch of the log if segment headers are damaged.
    Without `past_damage`, damage that is no declared gap raises.
    """
    try:
        return _first_at_or_after(log, timestamp, mark)
    except CorruptLogError:
        doubtful: list[Damage] = []
        on_damage = doubtful.append if past_damage else None
        first = mark.log_start_offset
        with suppress(CorruptLogError):
            first = next(iter(_segments_from(log, timestamp, mark)), first)
        cursor = Cursor(log, first, on_damage=on_damage, on_gap=doubtful.append)
        found = _next_at_or_after(timestamp, cursor, mark, doubtful)
        return min((gap.offsets.start for gap in doubtful if gap.offsets), default=found)


def _next_at_or_after(timestamp: int, cursor: Cursor, mark: Mark, doubtful: list[Damage] | None = None) -> int:
    log = cursor.log
    segment: int | None = None
    early = False  # True if all events before that segment are known to be before the time
    with closing(cursor):
        while batches := cursor.read(mark.flushed_end):
            for batch in batches:
                if doubtful and stored_header(batch).running_max_timestamp < timestamp:
                    base = log.index.find(stored_header(batch).base_offset)
                    if base is None or base != segment:
                        segment, early = base, _begins_before(log, timestamp, stored_header(batch).base_offset)
                    if early:
                        doubtful.clear()  # the damaged records were earlier
                if stored_header(batch).max_timestamp >= timestamp:
                    stamped = zip(batch.offsets, batch.timestamps, strict=True)
                    late = next((offset for offset, each in stamped if each >= timestamp), None)
                    if late is not None:  # None: a forged header has a later time than its records
                        return late
    return mark.flushed_end


def _begins_before(log: Log, timestamp: int, offset: int) -> bool:
    """True if all events before the segment that holds the offset are known to be before the time."""
    with suppress(CorruptLogError), log.open_segment(offset) as segment:
        return segment.header.running_max_timestamp < timestamp
    return False
