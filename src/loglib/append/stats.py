"""Stats: figures about a topic at one moment, for monitoring.

Invariant: taking them writes nothing and reads no batch body. Counters only rise while a topic is open: they count
what was made visible, and a batch that is lost was never counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..format.watermark import Mark
from ..log.lag import Lag
from ..log.log import Log
from .access import Access
from .flushes import FlushTimes

__all__ = [
    "AppendTimes", "FlushTimes", "PartitionStats", "Rates", "SharePartitionStats", "ShareStats", "TopicStats",
    "stats_of_partition",
]  # fmt: skip

# By partition, and "oldest" or "newest": the offset of a batch, and its append time.
AppendTimes = dict[tuple[int, str], tuple[int, int]]


class PartitionStats(NamedTuple):
    """One partition. What this process has appended counts from the moment when it opened the partition."""

    partition: int
    log_start_offset: int
    high_watermark: int
    segments: int
    oldest: int | None  # append time of the oldest batch in microseconds UTC; None for an empty log
    newest: int | None  # append time of the newest batch that readers see, likewise
    appended_records: int  # by this process, visible to readers
    appended_bytes: int
    unflushed_bytes: int  # of this process: batches in files, and values and keys in memory
    flush_times: FlushTimes  # of this process

    @property
    def size_bytes(self) -> int:
        """Bytes of log that readers see."""
        return self.high_watermark - self.log_start_offset


class Rates(NamedTuple):
    """Averages per second between two moments."""

    records: float
    bytes: float
    flushes: float
    flush_seconds: float  # mean duration of a flush; 0 without one


class SharePartitionStats(NamedTuple):
    """A share in one partition."""

    in_hand: int  # records that a handler has begun
    free: int  # records that were begun before, and may be begun again now or later
    waiting: int  # of the free ones: those whose time has not come
    oldest: int | None  # when the oldest unsettled record was first begun: microseconds UTC; None: there is none
    oldest_seconds: float  # its age; 0 if there is none
    settled: Mapping[str, int]  # records by their result, such as "accepted", since the share exists
    lag: Lag  # of the records that no member has begun


class ShareStats(NamedTuple):
    """A share, for the members of all processes."""

    members: int
    partitions: Mapping[int, SharePartitionStats]

    @property
    def oldest_seconds(self) -> float:
        """The age of the oldest record that was begun and is not settled; 0 if there is none."""
        return max((each.oldest_seconds for each in self.partitions.values()), default=0.0)


class TopicStats(NamedTuple):
    """A topic at one moment. The properties add up all partitions."""

    topic: str
    taken_at: float  # seconds of `system.clock.monotonic`
    partitions: tuple[PartitionStats, ...]
    lag: Mapping[str, Mapping[int, Lag]]  # of each group that is stored with the topic, by partition
    shares: Mapping[str, ShareStats]  # by name
    damaged: tuple[CorruptLogError, ...] = ()  # of groups and shares, which are left out of the figures

    @property
    def size_bytes(self) -> int:
        """Bytes of log that readers see."""
        return sum(each.size_bytes for each in self.partitions)

    @property
    def segments(self) -> int:
        """The number of segment files."""
        return sum(each.segments for each in self.partitions)

    @property
    def oldest(self) -> int | None:
        """Append time of the oldest batch in microseconds UTC; None for an empty topic."""
        return min((each.oldest for each in self.partitions if each.oldest is not None), default=None)

    @property
    def newest(self) -> int | None:
        """Append time of the newest batch in microseconds UTC; None for an empty topic."""
        return max((each.newest for each in self.partitions if each.newest is not None), default=None)

    @property
    def appended_records(self) -> int:
        """Records that this process has made visible."""
        return sum(each.appended_records for each in self.partitions)

    @property
    def appended_bytes(self) -> int:
        """Bytes of log that this process has made visible."""
        return sum(each.appended_bytes for each in self.partitions)

    @property
    def flushes(self) -> int:
        """The number of flushes in this process."""
        return sum(each.flush_times.flushes for each in self.partitions)

    @property
    def flush_seconds(self) -> float:
        """Seconds of all flushes together."""
        return sum(each.flush_times.seconds for each in self.partitions)

    def rates_since(self, earlier: TopicStats) -> Rates:
        """The rates between two moments of the same open topic."""
        seconds = max(self.taken_at - earlier.taken_at, 1e-9)
        flushes, took = self.flushes - earlier.flushes, self.flush_seconds - earlier.flush_seconds
        return Rates(
            (self.appended_records - earlier.appended_records) / seconds,
            (self.appended_bytes - earlier.appended_bytes) / seconds,
            flushes / seconds,
            took / flushes if flushes else 0.0,
        )


def stats_of_partition(access: Access, known: AppendTimes) -> PartitionStats:
    """The figures of one partition. `known` remembers the append times between two calls."""
    log, writer = access.log, access.open_writer
    mark = log.mark()
    if writer is None:
        log.refresh()
    records = size = unflushed = 0
    times = FlushTimes()
    if writer is not None:
        records, size = writer.flushed()
        batch = writer.batch
        unflushed = batch.tail.end - mark.flushed_end + batch.buffered_bytes()
        times = writer.flush_clock.times()
    oldest = newest = None
    if mark.log_start_offset < mark.flushed_end:
        oldest = _append_time(log, mark.log_start_offset, mark, "oldest", known)
        newest = _append_time(log, mark.flushed_end - 1, mark, "newest", known)
    log.release_files()  # so that few of thousands of logs have open files
    segments = sum(base >= mark.log_start_offset for base in log.index.bases())
    return PartitionStats(
        access.id, mark.log_start_offset, mark.flushed_end, segments,
        oldest, newest, records, size, max(0, unflushed), times,
    )  # fmt: skip


def _append_time(log: Log, offset: int, mark: Mark, which: str, known: AppendTimes) -> int | None:
    """The append time of the batch that holds the offset. It is read once for each offset."""
    before = known.get((log.partition, which))
    if before is not None and before[0] == offset:
        return before[1]
    try:
        time = log.header_around(offset, mark).append_time
    except (CorruptLogError, OffsetOutOfRangeError):  # damaged, or just dropped by retention
        return None
    known[log.partition, which] = offset, time
    return time
