"""Sources: what a copier asks of a topic, and of each of its logs.

Invariant: a block that a source returns contains whole checked batches that follow the batch before, or the bytes of a
declared gap. Two logs are the same up to an end if both have the batch before it: its header's CRC covers that of the
batch before, and so on to the beginning of the log.

There are two implementations: a topic in a directory of this host (local_source.py), and one on another host
(remote_source.py).

Threads: `wake` from any thread; the rest from one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogMovedError, OffsetOutOfRangeError
from ..format.chain import End
from ..format.watermark import Mark
from ..segment import SegmentHeader

# Errors that mean "this log of commits was folded into another one meanwhile".
FOLDED = (FileNotFoundError, LogMovedError, OffsetOutOfRangeError, CorruptLogError)


class SegmentStart(NamedTuple):
    """The beginning of a segment."""

    header: SegmentHeader
    more_producers: bytes | None  # the content of its file of producers, if it has one
    clock: bytes | None  # that of the log's file `clock`, if it has one


class Block(NamedTuple):
    """The next batches, or a part of a declared gap: then the CRC of `end` is None."""

    content: bytes
    end: End


class GroupSnapshot(NamedTuple):
    """A group at one moment."""

    marks: Mapping[str, Mark]  # of its logs of commits, by name
    pointer: bytes | None  # the content of the file that names the place of a group which another topic keeps


class LogSource(Protocol):
    """A log that is copied."""

    place: str  # the directory of the log, for messages
    credit_bytes: int  # the bytes that the source sends ahead of acknowledgements

    @property
    def published_end(self) -> int:
        """The end that the writer has published, also after a transaction that is not done."""

    def first(self) -> SegmentStart:
        """Return the first segment of the log."""

    def begun(self, base: int) -> SegmentStart:
        """Return the segment with this base offset. `OffsetOutOfRangeError` if retention has dropped it."""

    def begins(self, end: int) -> bool:
        """True if a segment begins at the end of the log: then the one before it is sealed."""

    def piece(self, at: End, base: int, limit: int) -> SegmentStart | Block:
        """Return what follows `at` in the log, below `limit`; `base` is the base of the segment that `at` ends in.

        Either a segment begins there; or the next whole batches of one segment, about 1 MiB of them.
        `CorruptLogError` if they are damaged or do not follow the batch before, and
        `OffsetOutOfRangeError` if retention has dropped them.
        """

    def beside(self, name: str) -> bytes | None:
        """Return the content of a small file beside the segments; None if there is none."""

    def same(self, ends: Sequence[End], mark: Mark) -> int:
        """Count the leading `ends` whose batch before is identical in this log, whose mark is given.

        `OffsetOutOfRangeError` if retention has dropped what follows.
        """

    def acknowledge(self, end: int) -> None:
        """Note that the copy is durable up to this end."""

    def release_files(self) -> None:
        """Close the files until their next use."""

    def close(self) -> None: ...


class TopicSource(Protocol):
    """A topic that is copied."""

    place: str  # the directory of the topic, for messages
    log_id: bytes

    def heard_at(self) -> float:
        """Return when the source has answered last, by the monotonic clock."""

    def beat(self) -> None:
        """Send a sign of life, if the source waits for one."""

    def described(self) -> tuple[bytes, TopicConfig]:
        """Return the content of `topic.json`, and its policies. `LogMovedError` if there is another topic now."""

    def store_pointer(self, copy: str, /) -> bytes | None:
        """Return the content of `transactions.json` for a copy at this path; None without transactions."""

    def log(self, number: int) -> LogSource:
        """Open the log of a partition. The caller closes it."""

    def log_of_commits(self, group: str, name: str) -> LogSource:
        """Open one of a group's logs of commits. The caller closes it."""

    def groups(self) -> dict[str, GroupSnapshot]:
        """Return the ends of each group's commits now."""

    def has_group(self, name: str) -> bool:
        """True if there is a group of this name."""

    def marks(self, numbers: Iterable[int]) -> dict[int, Mark]:
        """Return the marks of these partitions at one moment."""

    def watch(self) -> bool:
        """Watch the logs that `log` has opened. True if some were not watched before: their marks may be old."""

    def wait_for_changes(self, timeout_s: float) -> list[int]:
        """Wait for partitions that may have changed since the last call, until the time is over or until `wake`."""

    def wake(self) -> None:
        """End the present wait for changes."""

    def unwatch(self) -> None:
        """Stop watching."""

    def close(self) -> None: ...
