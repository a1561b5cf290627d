"""Records: pages of records, forwards and backwards, one record, and the end of a topic while it grows.

Invariant: a page says where it begins and ends, how much was looked at, and why it ended. What cannot be read is listed
as damage, in its place. A tail that cannot show all says what it has passed over, and from where to where it is.

A page is limited in records, in bytes and in time. So a search of a large topic comes in several pages, the next one
from the place where the last one ended. Records of several partitions are merged by their times; those of one partition
stay in their order.

Threads: no state, safe for all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..config.times import to_text
from ..errors import CorruptLogError, InvalidOffsetError, LogError, OffsetOutOfRangeError
from ..format.record import Damage, Record
from ..log.gaps import NAME as GAPS
from ..partition import Partition
from ..system.clock import monotonic
from ..topic import Topic
from .content import PREVIEW_BYTES, WHOLE_BYTES, Content, content_of
from .filters import Filter
from .topics import log_of

MOST_RECORDS = 500  # of a page
MOST_MERGED = 16  # partitions whose records are shown together
MOST_FOLLOWED = 1000  # partitions of a tail; each has its place in the address of a request
_MOST_BYTES = 32 << 20  # of the records of a page
_RUN_BYTES = 1 << 20  # of log that is read at a time on the way back
_SECONDS = 1.0  # for a page: a search then says how far it came
_COUNT_S = 0.3  # for counting what a tail has passed over
_TAIL_BYTES = 8 << 20  # of log that a tail reads of a partition at a time
_OF_A_GAP = f"/{GAPS}, byte 0: found a gap "  # in the text of a declared gap, as `Gap.as_damage` has it
_LOOKS = 256  # headers between two looks at the clock


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """One record. Offsets are text, since JavaScript rounds large numbers."""

    partition: int
    offset: str
    next_offset: str
    timestamp_us: str
    time: str  # ISO 8601, UTC
    key: Content
    value: Content
    headers: list[tuple[str, Content]]
    size_bytes: int  # of key, value and headers


@dataclass(slots=True)
class RecordPage:
    """Records in the order in which they are shown, oldest first."""

    records: list[RecordFacts] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # about a start that was not a record's place
    before: dict[str, str] = field(default_factory=dict)  # by partition, where an older page ends
    after: dict[str, str] = field(default_factory=dict)  # where a newer page begins
    ended: str = "full"  # "full", "end", "time" or "bytes"
    looked_at: int = 0  # records
    left_bytes: int = 0  # of log in this direction, up to a batch


def undeclared(damage: list[str]) -> list[str]:
    """The damage that is no declared gap: a gap is a trouble of its own, and none when its loss was accepted."""
    return [each for each in damage if _OF_A_GAP not in each]


@dataclass(frozen=True, slots=True)
class Passed:
    """Records of a partition that a tail does not show."""

    partition: int
    start: str
    end: str
    bytes: int
    records: int | None  # None: that are too many to count in a moment
    why: str  # "too many", or "dropped" by retention before they were read


@dataclass(slots=True)
class TailPage:
    """The records that have come since the last look."""

    records: list[RecordFacts] = field(default_factory=list)
    passed: list[Passed] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    position: dict[str, str] = field(default_factory=dict)  # by partition, from where the next look reads


def facts_of(record: Record, limit_bytes: int = PREVIEW_BYTES, *, pretty: bool = False) -> RecordFacts:
    """The record as the page shows it. Each part is cut at a number of bytes."""
    parts = [record.key, record.value, *(value for _, value in record.headers)]
    return RecordFacts(
        record.partition, str(record.offset), str(record.next_offset), str(record.timestamp), to_text(record.timestamp),
        content_of(record.key, limit_bytes, pretty=pretty), content_of(record.value, limit_bytes, pretty=pretty),
        [(name, content_of(value, limit_bytes)) for name, value in record.headers],
        sum(len(part) for part in parts if part is not None),
    )  # fmt: skip


def one_record(topic: Topic, partition: int, offset: int) -> Record:
    """The record with this offset. Raises the errors of `Partition.read`, and `OffsetOutOfRangeError` at the end."""
    source = topic.partition(partition)
    with source.read(offset) as reader:
        for record in reader:
            if record.offset == offset:
                return record
            break
    raise OffsetOutOfRangeError(partition, offset, source.log_start_offset, source.high_watermark)


def whole_record(topic: Topic, partition: int, offset: int) -> RecordFacts:
    """The facts of one record, with JSON indented and up to 256 KiB of each part."""
    return facts_of(one_record(topic, partition, offset), WHOLE_BYTES, pretty=True)


# --- pages -----------------------------------------------------------------------------------------------


def page_after(
    topic: Topic, start: str | Mapping[int, int], *, partition: int | None = None, limit: int = 50,
    wanted: Filter | None = None, seconds: float = _SECONDS,
) -> RecordPage:  # fmt: skip
    """The records from a start on: "begin", "end", an offset as digits, a time or an age as text, or places."""
    page = RecordPage()
    places = _places(topic, start, partition, page.notes)
    ends = {number: topic.partition(number).high_watermark for number in places}
    streams = {
        number: _forwards(topic.partition(number), place, ends[number], page.damage) for number, place in places.items()
    }
    found, reached = _taken(streams, places, page, limit, wanted, seconds, forwards=True)
    if page.ended == "end":  # what lies between the last record and the end is damage, which is listed
        reached = {number: max(place, ends[number]) for number, place in places.items()}
    page.records = list(map(facts_of, found))
    page.before, page.after = _texts(places), _texts(reached)
    page.left_bytes = sum(max(0, ends[number] - place) for number, place in reached.items())
    return page


def page_before(
    topic: Topic, end: str | Mapping[int, int], *, partition: int | None = None, limit: int = 50,
    wanted: Filter | None = None, seconds: float = _SECONDS,
) -> RecordPage:  # fmt: skip
    """The last records before an end, which has the forms of a start in `page_after`."""
    page = RecordPage()
    places = _places(topic, end, partition, page.notes)
    at_most = limit if wanted is None else math.inf
    streams = {
        number: _backwards(topic.partition(number), place, at_most, page.damage) for number, place in places.items()
    }
    found, reached = _taken(streams, places, page, limit, wanted, seconds, forwards=False)
    starts = {number: topic.partition(number).log_start_offset for number in places}
    if page.ended == "end":
        reached = starts
    page.records = list(map(facts_of, reversed(found)))
    page.damage.reverse()
    page.before, page.after = _texts(reached), _texts(places)
    page.left_bytes = sum(max(0, place - starts[number]) for number, place in reached.items())
    return page


def _taken(
    streams: Mapping[int, Iterator[Record]], places: Mapping[int, int], page: RecordPage, limit: int,
    wanted: Filter | None, seconds: float, *, forwards: bool,
) -> tuple[list[Record], dict[int, int]]:  # fmt: skip
    """The next records of the merged streams, and how far each partition was looked at."""
    deadline, size_bytes = monotonic() + seconds, 0
    found: list[Record] = []
    reached = dict(places)
    page.ended = "end"
    for record in heapq.merge(*streams.values(), key=_by_time if forwards else _by_time_back):
        reached[record.partition] = record.next_offset if forwards else record.offset
        page.looked_at += 1
        if wanted is None or wanted.matches(record):
            found.append(record)
            size_bytes += len(record.value or b"") + len(record.key or b"")
            if len(found) >= limit or size_bytes >= _MOST_BYTES:
                page.ended = "full" if len(found) >= limit else "bytes"
                break
        if monotonic() >= deadline:
            page.ended = "time"
            break
    return found, reached


def _by_time(record: Record) -> int:
    return record.timestamp


def _by_time_back(record: Record) -> int:
    return -record.timestamp


def _forwards(partition: Partition, start: int, end: int, damage: list[str]) -> Iterator[Record]:
    """The records in [start, end). Damage is noted, and reading continues after it."""
    if start >= end:
        return
    with partition.read(start, end, on_damage="skip") as reader:
        noted = 0
        for record in reader:
            noted = _note(reader.gaps, damage, noted)
            yield record
        _note(reader.gaps, damage, noted)


def _note(gaps: Sequence[Damage], damage: list[str], noted: int) -> int:
    damage.extend(map(str, gaps[noted:]))
    return len(gaps)


def _backwards(partition: Partition, end: int, at_most: float, damage: list[str]) -> Iterator[Record]:
    """The records before `end`, the newest first. It reads runs of batches forwards, each before the last one."""
    while (start := run_before(partition, end, count=at_most, log_bytes=_RUN_BYTES)) < end:
        noted: list[str] = []
        records = list(_forwards(partition, start, end, noted))
        damage.extend(reversed(noted))
        records.reverse()
        yield from records
        end = start


def run_before(partition: Partition, end: int, *, count: float, log_bytes: float = math.inf) -> int:
    """The offset of the first of the last `count` records before `end`; the log start if there are fewer.

    With `log_bytes` it stops after that many bytes of log. Then a batch that is larger than that comes alone. If damage
    is in the way, it is the beginning of the segment that has the damage.
    """
    log = log_of(partition)
    mark = log.mark()
    found, left = min(end, mark.flushed_end), count
    try:
        while found > mark.log_start_offset and left > 0 and end - found < log_bytes:
            header = log.header_around(found - 1, mark)
            stop = min(header.offsets.stop, found)
            taken = max(0, stop - header.base_offset)
            if header.length > log_bytes and found < end:
                break
            if taken > left:
                return stop - int(left)
            found, left = header.base_offset, left - taken
    except CorruptLogError:
        found = max(mark.log_start_offset, min(found - 1, log.index.find(found - 1) or 0))
    except OffsetOutOfRangeError:  # retention has dropped it meanwhile
        found = min(end, log.mark().log_start_offset)
    finally:
        log.release_files()
    return found


def is_too_many(topic: Topic) -> bool:
    """True if the records of all partitions are not shown together: then one partition must be chosen."""
    return len(topic.partitions) > MOST_MERGED


# --- places ----------------------------------------------------------------------------------------------


def _places(
    topic: Topic, start: str | Mapping[int, int], partition: int | None, notes: list[str]
) -> dict[int, int]:  # fmt: skip
    """The place in each partition that is shown. A place that no record has is moved to the next record."""
    numbers = [each.id for each in topic.partitions] if partition is None else [topic.partition(partition).id]
    if len(numbers) > MOST_MERGED:
        raise ValueError(f"{topic.name} has {len(numbers)} partitions; choose one of them: {MOST_MERGED} can be merged")
    if isinstance(start, Mapping):
        return {number: _sound(topic.partition(number), start[number], notes) for number in numbers if number in start}
    if start.isascii() and start.isdigit():
        if len(numbers) > 1:
            raise ValueError(f"offset {start} means another record in each partition; choose a partition")
        return {number: _sound(topic.partition(number), int(start), notes) for number in numbers}
    return {number: _named(topic.partition(number), start) for number in numbers}


def _named(partition: Partition, start: str) -> int:
    if start == "begin":
        return partition.log_start_offset
    return partition.high_watermark if start == "end" else partition.offset_at(start)


def _sound(partition: Partition, offset: int, notes: list[str]) -> int:
    """The offset, or that of the next record if no record has it."""
    start, end = partition.log_start_offset, partition.high_watermark
    moved = min(max(offset, start), end)
    try:
        partition.read(moved, on_damage="skip").close()
    except InvalidOffsetError as error:
        inside = error.offset in range(error.batch_offsets.start, error.batch_offsets.stop)
        moved = error.offset if inside else error.next_offset
    except OffsetOutOfRangeError:  # retention has dropped it just now
        moved = partition.log_start_offset
    if moved != offset:
        notes.append(f"no record of partition {partition.id} has offset {offset}; this is offset {moved}")
    return moved


def _texts(places: Mapping[int, int]) -> dict[str, str]:
    return {str(number): str(place) for number, place in places.items()}


# --- the tail --------------------------------------------------------------------------------------------


def tail_start(topic: Topic, partition: int | None, count: int) -> dict[int, int]:
    """Where a tail begins that shows about the last `count` records of all these partitions together."""
    numbers = [each.id for each in topic.partitions] if partition is None else [partition]
    if len(numbers) > MOST_FOLLOWED:
        said = f"{topic.name} has {len(numbers)} partitions; choose one of them"
        raise ValueError(f"{said}: a tail follows at most {MOST_FOLLOWED}")
    each_of = count // len(numbers)
    return {number: topic.partition(number).offset_before_end(each_of) for number in numbers}


def tail(
    topic: Topic, position: Mapping[int, int], *, partition: int | None = None, limit: int = 200
) -> TailPage:  # fmt: skip
    """The records since a position. If there are more than the limit, the last ones, and what was passed over."""
    page = TailPage()
    sources = topic.partitions if partition is None else (topic.partition(partition),)
    ends = {each.id: each.high_watermark for each in sources}
    news = [each for each in sources if position.get(each.id, 0) < ends[each.id]]
    most, found = max(1, limit // max(1, len(news))), list[list[Record]]()
    reached = {number: min(position.get(number, 0), end) for number, end in ends.items()}
    for each in news[:limit]:  # the others come at the next look
        start, end = reached[each.id], ends[each.id]
        try:
            records, reached[each.id] = _tail_of(each, start, end, most, page)
        except LogError as error:
            page.damage.append(str(error))
            records, reached[each.id] = [], end
            page.passed.append(Passed(each.id, str(start), str(end), end - start, None, "damaged"))
        found.append(records)
    page.records = [facts_of(each) for each in heapq.merge(*found, key=_by_time)]
    page.position = _texts(reached)
    return page


def _tail_of(
    partition: Partition, start: int, end: int, most: int, page: TailPage
) -> tuple[list[Record], int]:  # fmt: skip
    """Records of [start, end), and where the next look begins. Adds to the page what is passed over."""
    log_start = partition.log_start_offset
    if start < log_start:
        page.passed.append(Passed(partition.id, str(start), str(log_start), log_start - start, None, "dropped"))
        start = log_start
    first = max(start, run_before(partition, end, count=most))
    if first > start:
        count = count_between(partition, start, first)
        page.passed.append(Passed(partition.id, str(start), str(first), first - start, count, "too many"))
    records: list[Record] = []
    size_bytes = 0
    for record in _forwards(partition, first, end, page.damage):
        records.append(record)
        size_bytes += len(record.value or b"")
        if size_bytes >= _TAIL_BYTES:
            return records, record.next_offset
    return records, end


def count_between(partition: Partition, start: int, end: int) -> int | None:
    """The number of records in [start, end), from the headers of batches; None if there are too many for a moment."""
    log, deadline, count = log_of(partition), monotonic() + _COUNT_S, 0
    mark = log.mark()
    try:
        first = log.header_around(start, mark)
        for number, header in enumerate(log.headers(first.base_offset, end, mark)):
            count += len(range(max(header.base_offset, start), min(header.offsets.stop, end)))
            if number % _LOOKS == 0 and monotonic() >= deadline:
                return None
    except LogError:
        return None
    finally:
        log.release_files()
    return count
