"""The model of a topic as plain lists: what was appended to a partition, and what a power cut leaves of its files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from clock_worlds import Machine

from loglib import Record
from loglib.format.columns import Headers
from loglib.format.watermark import NAME, SECOND_SLOT, Mark
from loglib.segment import HEADER_BYTES
from loglib.testing import UnsyncedFiles

# --- the model ---------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A record to append."""

    value: bytes | None
    key: bytes | None = None
    timestamp: int | None = None  # None: the append time
    headers: Headers = ()


@dataclass(slots=True)
class Appended:
    """A record that was appended at `offset`."""

    row: Row
    offset: int
    appended_at: int  # or later, by the wall clock
    truly_at: int
    timestamp: Any  # None of a record without one of its own, until a reader has seen which it got


@dataclass
class Ledger:
    """What one partition is to hold."""

    start: int = 0
    flushed: int = 0
    appended: list[Appended] = field(default_factory=list)  # all that was not lost, the dropped ones as well
    sent: dict[str, list[tuple[int, range]]] = field(default_factory=dict)  # by producer: sequence and offsets

    def append(self, rows: list[Row], ranges: Iterable[range], clock: Machine) -> None:
        offsets = [offset for each in ranges for offset in each]
        assert len(offsets) == len(rows)
        for row, offset in zip(rows, offsets, strict=True):
            assert not self.appended or offset > self.appended[-1].offset
            self.appended.append(Appended(row, offset, clock(), clock.true_us, row.timestamp))

    def readable(self) -> list[Appended]:
        return [each for each in self.appended if self.start <= each.offset < self.flushed]

    def unflushed(self) -> list[Appended]:
        return [each for each in self.appended if each.offset >= self.flushed]

    def records(self, partition: int, start: int, end: int) -> list[Record]:
        """The flushed records with offsets in [start, end), as a reader is to give them."""
        flushed = [each for each in self.appended if start <= each.offset < self.flushed]
        next_offsets = [*(each.offset for each in flushed[1:]), self.flushed]
        return [
            Record(partition, each.offset, each.timestamp, each.row.key, each.row.value, each.row.headers, next_offset)
            for each, next_offset in zip(flushed, next_offsets, strict=False)
            if each.offset < end
        ]  # fmt: skip

    def first_at_or_after(self, timestamp: int) -> int:
        return next((each.offset for each in self.readable() if each.timestamp >= timestamp), self.flushed)

    def lose_from(self, end: int) -> None:
        """A crash has left what lies below `end`."""
        self.appended = [each for each in self.appended if each.offset < end]
        for name, sent in self.sent.items():
            self.sent[name] = [(sequence, offsets) for sequence, offsets in sent if offsets.stop <= end]


# --- what a power cut leaves -----------------------------------------------------------------------------


class Disk(UnsyncedFiles):
    """Knows what of each watermark is sure to be on the disk."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self.synced: dict[str, bytes] = {}

    def open_write(self, path: str, *, dir_fd: int | None = None) -> int:
        return self.named(super().open_write(path, dir_fd=dir_fd), path)

    def create(self, path: str, permissions: int, *, exclusive: bool = True, dir_fd: int | None = None) -> int:
        return self.named(super().create(path, permissions, exclusive=exclusive, dir_fd=dir_fd), path)

    def named(self, fd: int, path: str) -> int:
        self.paths[fd] = path
        return fd

    def datasync(self, fd: int) -> None:
        path = self.paths.get(fd, "")
        if os.path.basename(path) == NAME:
            self.synced[path] = Path(path).read_bytes()


class Harm(NamedTuple):
    """One thing that happens to bytes which were never synced."""

    kind: str
    place: int
    noise: bytes

    def to(self, content: bytearray, durable: int) -> None:
        at = durable + self.place % (len(content) - durable + 1)
        if self.kind == "cut":
            del content[at:]
        elif self.kind == "zeros":
            content[at:] = bytes(len(content) - at)
        elif self.kind == "noise":
            content[at : at + len(self.noise)] = self.noise
        else:
            content += self.noise


def harm_segment(directory: Path, mark: Mark, harms: list[Harm]) -> None:
    """Damage the last segment above what was promised."""
    path = max(directory.glob("*.log"))
    content = bytearray(path.read_bytes())
    durable = HEADER_BYTES + mark.durable_end - int(path.stem)
    for harm in harms:
        harm.to(content, durable)
    path.write_bytes(content)


def harm_watermark(path: Path, synced: bytes, older: tuple[bool, bool], *, lost: bool) -> None:
    """Put slots back to what was synced last, or lose both."""
    content = path.read_bytes()
    if lost:
        content = bytes(len(content))
    first = synced if older[0] else content
    second = synced if older[1] else content
    path.write_bytes(first[:SECOND_SLOT] + second[SECOND_SLOT:])
