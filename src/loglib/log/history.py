"""History: a place in a log that is remembered elsewhere, and the question if the log still has the history up to it.

Invariant: the chain at an offset is the CRC of the header of the batch that ends there, or that holds it. A batch's
header covers the CRC of the batch before. So two logs with one id and one chain at an offset have the same bytes below
it. A chain of 0 is unknown: the log begins there, or a gap is in the way.

A program that remembers a place in a log stores a `HistoryPoint`, and compares it before acting on it. An archive, a
tier or a copy that holds the point is one of these:

    same      it ends where the log has the same history
    ahead     it has more than the log, and nothing shows that the rest is of another history
    too old   it ends before the log begins: nothing can be compared any more
    beside    it has another history from some offset on
    foreign   it is of another log

Threads: no state, safe for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import CorruptLogError, LogError, OffsetOutOfRangeError
from ..format.header import Header
from ..format.watermark import Mark
from ..segment import SegmentHeader, read_segment_header
from .log import Log

SAME, AHEAD, TOO_OLD, BESIDE, FOREIGN = "same", "ahead", "too old", "beside", "foreign"
SET_BACK = (BESIDE, AHEAD)  # of a history of flushed records: the log was set back


class HistoryPoint(NamedTuple):
    """A place in a log, and what proves the history up to there."""

    log_id: bytes
    offset: int
    chain: int  # 0: not known
    epoch: int = 0  # of the writer there, or of a later one; 0: not known

    def agrees(self, other: HistoryPoint) -> bool | None:
        """True if both are of one history, given that they are at one offset; None if that is not known."""
        return self.chain == other.chain if self.chain and other.chain else None


class Comparison(NamedTuple):
    """The relation of a stored history to a log. Offsets that damage or a gap hides count as the same."""

    relation: str
    common: int  # both are proven to have the same history up to here; 0: nothing is proven
    point: HistoryPoint  # the end of the stored history
    log_start: int
    log_end: int

    @property
    def is_same(self) -> bool:
        return self.relation == SAME

    def words(self, holder: str, log: str) -> str:
        """The finding as a text; `holder` has the point, and `log` is the path of the log."""
        end, holds = self.point.offset, f"{log} holds [{self.log_start}, {self.log_end})"
        match self.relation:
            case "ahead":
                return f"{holder} is ahead: it ends at offset {end}, and {holds}; nothing shows that they differ"
            case "too old":
                return f"{holder} is too old: it ends at offset {end}, and {holds}: what lies between is missing"
            case "beside":
                return (
                    f"{holder} has another history than {log}: they are proven to be the same up to offset "
                    f"{self.common}, and differ before {min(end, self.log_end)}"
                )
            case "foreign":
                return f"{holder} is of log {self.point.log_id.hex()}, and {log} is another log"
        return f"{holder} has the history of {log} up to offset {end}"

    def check(self, holder: str, log: Log, advice: str) -> None:
        """`OffsetOutOfRangeError` or `LogError` unless it is the same history; `advice` is what a person can do."""
        if self.is_same:
            return
        words = f"partition {log.partition}: {self.words(holder, log.directory)}; {advice}"
        if self.relation in (AHEAD, TOO_OLD):
            raise OffsetOutOfRangeError(log.partition, self.point.offset, self.log_start, self.log_end, words=words)
        raise LogError(words)


def history_at(log: Log, offset: int) -> int:
    """The chain at an offset. It identifies the whole log up to there.

    It is 0 at the beginning of a log, and in a declared gap. Raises `OffsetOutOfRangeError` and `CorruptLogError` like
    a read.
    """
    return point_at(log, offset).chain


def point_at(log: Log, offset: int) -> HistoryPoint:
    """The point at an offset of the log. Raises like `history_at`."""
    while True:
        mark = log.mark()
        if not mark.log_start_offset <= offset <= mark.flushed_end:
            raise OffsetOutOfRangeError(log.partition, offset, mark.log_start_offset, mark.flushed_end)
        with suppress(OffsetOutOfRangeError):  # retention has meanwhile dropped more
            return HistoryPoint(log.identity.log_id, offset, *_facts(log, offset, mark))


def _facts(log: Log, offset: int, mark: Mark) -> tuple[int, int]:
    """The chain at the offset, and the epoch there."""
    header: Header | None = None
    if mark.log_start_offset < mark.flushed_end:  # else retention has left one segment without a batch
        try:
            header = log.header_around(offset - (offset == mark.flushed_end), mark)
        except CorruptLogError:
            if offset not in log.index.bases():
                raise
    if header is None or (not header.record_count and offset in log.index.bases()):  # the next segment may know
        begun = _segment_at(log, offset)
        return begun.previous_crc, begun.writer_epoch
    return (header.previous_crc if header.base_offset == offset else header.header_crc), header.writer_epoch


def _segment_at(log: Log, offset: int) -> SegmentHeader:
    path = log.path_of(offset)
    try:
        return read_segment_header(log.files, path, log.identity)
    except FileNotFoundError as error:
        raise CorruptLogError(path, 0, "no file", f"the segment that begins at offset {offset}") from error


def may_have(point: HistoryPoint, log: Log) -> bool:
    """False if the log is another one, ends before the point, or has another history there; True if that is unknown."""
    try:
        return point.log_id == log.identity.log_id and point_at(log, point.offset).agrees(point) is not False
    except OffsetOutOfRangeError as error:
        return point.offset < error.log_start_offset  # retention has dropped what was there
    except CorruptLogError:
        return True


def compare_history(points: Sequence[HistoryPoint], log: Log) -> Comparison:
    """Compare a stored history with a log. `points`, at least one, rise; the last one is the end of that history."""
    while True:
        mark, last = log.mark(), points[-1]
        start, end = mark.log_start_offset, mark.flushed_end

        def result(relation: str, common: int, ends: tuple[int, int] = (start, end)) -> Comparison:
            return Comparison(relation, common, points[-1], *ends)

        if last.log_id != log.identity.log_id:
            return result(FOREIGN, 0)
        if last.offset < start:
            return result(TOO_OLD, last.offset)
        with suppress(OffsetOutOfRangeError):  # retention has meanwhile dropped more
            common, differs = _common([each for each in points if start <= each.offset <= end], log)
            if differs:
                return result(BESIDE, common)
            if last.offset <= end:
                return result(SAME, common)
            # Epochs never fall along a log: nothing after the log's end can be of an older writer.
            is_newer = end > start and 0 < last.epoch < point_at(log, end).epoch
            return result(BESIDE if is_newer else AHEAD, common)


def _common(points: Sequence[HistoryPoint], log: Log) -> tuple[int, bool]:
    """The last of these points that the log has, too; and True if a later one differs."""
    differs = False
    for each in reversed(points):
        try:
            agrees = point_at(log, each.offset).agrees(each)
        except CorruptLogError:
            agrees = None
        if agrees:
            return each.offset, differs
        differs = differs or agrees is False
    return 0, differs
