"""Tier manifest: the segments of a log that a place holds.

Invariant: a manifest that is decoded is one that was encoded. In each partition the segments follow each other without
a gap. A segment that is named was uploaded, read back and found equal to the log's.

    {"format": 1, "version": 7, "log_id": "<32 digits>", "topic": "clicks", "time": 1764000000000000, "partitions": [
        [[0, 1073741824, 1072693248, "<8 digits>", "<8 digits>", 1764000000000000, 3, 0], ...]],
     "crc": "<8 digits>"}

(in one line, see format/checked_json.py). Each segment has eight numbers: `start` and `end`, its offsets; `last_batch`,
the base offset of its last batch, and `last_crc`, the header CRC of that batch, which the next segment repeats; `crc`,
the CRC-32C of the whole file; `added`, the time when it was committed, in microseconds UTC; `epoch`, that of the writer
of the next segment; `lost`, the number of its bytes that were in a declared gap when it was uploaded.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from ..config.policies import MAX_OFFSET
from ..format import checked_json
from ..format.watermark import Mark
from ..log.history import HistoryPoint
from ..segment import HEADER_BYTES, segment_name


class TieredSegment(NamedTuple):
    """A segment in a place: the offsets [start, end) of one partition."""

    start: int
    end: int
    last_batch: int  # base offset of its last batch
    last_crc: int  # header CRC of that batch
    crc: int  # CRC-32C of the whole file
    added: int  # when it was committed, microseconds UTC
    epoch: int = 0  # of the writer that made the next segment; 0: not known
    lost: int = 0  # bytes of it that were a declared gap when it was uploaded

    @property
    def file_name(self) -> str:
        """The name of its file, in the directory of its partition."""
        return segment_name(self.start)

    @property
    def bytes(self) -> int:
        """The size of its file."""
        return HEADER_BYTES + self.end - self.start


class TieredPartition(NamedTuple):
    """The uploaded segments of one partition: offsets [start, end), without a gap."""

    partition: int
    segments: tuple[TieredSegment, ...] = ()  # in the order of their offsets

    @property
    def start(self) -> int:
        """The first offset; 0 without a segment."""
        return self.segments[0].start if self.segments else 0

    @property
    def end(self) -> int:
        """The end of the offsets; 0 without a segment."""
        return self.segments[-1].end if self.segments else 0

    def points(self, log_id: bytes) -> list[HistoryPoint]:
        """The places in the log that prove its history; none without a segment."""
        return [HistoryPoint(log_id, each.end, each.last_crc, each.epoch) for each in self.segments]

    @property
    def mark(self) -> Mark:
        """The ends of its log."""
        return Mark.at_rest(0, self.start, self.end, self.segments[-1].last_batch if self.segments else 0)

    @property
    def listing(self) -> dict[str, int]:
        """Name and size of its segments, as a directory would have them."""
        return {each.file_name: each.bytes for each in self.segments}


class TierManifest(NamedTuple):
    """The manifest of a place. It never changes: the next call of `tier` makes the next version."""

    version: int
    log_id: bytes
    topic: str
    time: int  # when it was committed, microseconds UTC
    partitions: tuple[TieredPartition, ...]

    @property
    def ends(self) -> dict[int, int]:
        """The end of each partition's uploaded offsets, where the live tail begins."""
        return {each.partition: each.end for each in self.partitions}

    @property
    def bytes(self) -> int:
        """The size of all segments, in bytes."""
        return sum(segment.bytes for each in self.partitions for segment in each.segments)

    def partition(self, number: int) -> TieredPartition:
        """The uploaded segments of a partition; none if the partition was added later."""
        return self.partitions[number] if number < len(self.partitions) else TieredPartition(number)


def encode(tiered: TierManifest) -> bytes:
    """The manifest as the content of its file."""
    partitions = [[_segment_facts(segment) for segment in each.segments] for each in tiered.partitions]
    return checked_json.seal({
        "version": tiered.version, "log_id": tiered.log_id.hex(), "topic": tiered.topic,
        "time": tiered.time, "partitions": partitions,
    })  # fmt: skip


def _segment_facts(each: TieredSegment) -> list[Any]:
    crcs = f"{each.last_crc:08x}", f"{each.crc:08x}"
    return [each.start, each.end, each.last_batch, *crcs, each.added, each.epoch, each.lost]


def decode(content: bytes, path: str) -> TierManifest:
    """The manifest in a file; `CorruptLogError` if it is damaged, `UnsupportedFormatError` if it is a newer one."""

    def tiered(facts: dict[str, Any]) -> TierManifest:
        partitions = tuple(_partition(number, each) for number, each in enumerate(facts["partitions"]))
        log_id, topic = bytes.fromhex(facts["log_id"]), str(facts["topic"])
        return TierManifest(_whole(facts["version"]), log_id, topic, _whole(facts["time"]), partitions)

    return checked_json.decode(content, path, tiered, "the manifest of a place")


def _partition(number: int, segments: list[list[Any]]) -> TieredPartition:
    checked = tuple(map(_segment, segments))
    if any(each.end != after.start for each, after in pairwise(checked)):
        raise ValueError(f"segments of partition {number} that do not follow each other")
    return TieredPartition(number, checked)


def _segment(facts: list[Any]) -> TieredSegment:
    start, end, last_batch, last_crc, crc, added, epoch, lost = facts
    segment = TieredSegment(
        _whole(start), _whole(end), _whole(last_batch), int(last_crc, 16), int(crc, 16), _whole(added), _whole(epoch),
        _whole(lost),
    )  # fmt: skip
    if segment.start >= segment.end or segment.last_batch > segment.end:
        raise ValueError(f"a segment {facts!r:.200}")
    return segment


def _whole(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= MAX_OFFSET:
        raise ValueError(f"a number {number!r:.100}")
    return number
