"""Archive manifest: the files of an archive, and the offsets of the log that each of them contains.

Invariant: a manifest that is decoded is one that was encoded. In each partition the files are in order and do not
overlap. The archive has all readable records of [start, end): each is in one file, or its offset is in a gap. Records
that were in a gap, and were healed in the log later, are in files of their own, in `healed`.

    {"format": 1, "version": 7, "log_id": "<32 digits>", "topic": "clicks", "time": 1764000000000000, "partitions": [
        {"partition": 0, "start": 0, "end": 1073741824, "gaps": [[4096, 8192]], "files": [
            {"name": "0000/<start>-<end>-<random>.parquet", "start": 0, "end": 1073741824, "rows": 5000000,
             "bytes": 90000000, "crc": "<8 digits>", "footer_crc": "<8 digits>", "first_time": ..., "last_time": ...,
             "added": ..., "chain": "<8 digits>", "epoch": 3}],
         "chain": "<8 digits>", "epoch": 3, "healed": []}],
     "crc": "<8 digits>"}

(in one line, see format/checked_json.py). `chain` and `epoch` are those of the log at the `end` beside them
(log/history.py). Times are in microseconds UTC. `first_time` and `last_time` are the smallest and the largest
timestamp of the file's records, `added` is the time when the file was committed, and `time` that of this manifest. The
`crc` of a file is the CRC-32C of all its bytes. `footer_crc` is that of its footer, from the first byte of Parquet's
`FileMetaData` to the end: Parquet has a CRC for each page, and none for the footer, which decides what is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from ..config.policies import MAX_OFFSET
from ..format import checked_json
from ..log.history import HistoryPoint

_FILE = re.compile(r"\d{4}/\d{20}-(\d{20})-[0-9a-f]{16}\.parquet")
_CRCS = ("crc", "footer_crc", "chain")


class ArchivedFile(NamedTuple):
    """A Parquet file of an archive: the records of offsets [start, end) of one partition."""

    name: str  # below the archive's directory
    start: int
    end: int
    rows: int
    bytes: int
    crc: int  # CRC-32C of the whole file
    footer_crc: int  # CRC-32C of the footer alone
    first_time: int  # the smallest timestamp, microseconds UTC
    last_time: int  # the largest
    added: int  # when it was committed, microseconds UTC
    chain: int = 0  # of the log at `end`, by which it is known again; 0: not known
    epoch: int = 0  # of the writer there; 0: not known


class Piece(NamedTuple):
    """A range of offsets [start, end), and the file that contains its records."""

    start: int
    end: int
    file: ArchivedFile


class ArchivedPartition(NamedTuple):
    """The archived offsets [start, end) of one partition."""

    partition: int
    start: int
    end: int
    gaps: tuple[tuple[int, int], ...] = ()  # offsets [start, end) that the log had lost
    files: tuple[ArchivedFile, ...] = ()  # in the order of their offsets
    chain: int = 0  # of the log at `end`; 0: not known
    epoch: int = 0  # of the writer there; 0: not known
    healed: tuple[ArchivedFile, ...] = ()  # records that were in a gap at first, in the order in which they came

    @property
    def all_files(self) -> tuple[ArchivedFile, ...]:
        """The files that were archived in order, and then those of healed gaps."""
        return *self.files, *self.healed

    def pieces(self) -> list[Piece]:
        """The files of all records, in the order of the offsets."""
        healed = [Piece(each.start, each.end, each) for each in sorted(self.healed, key=lambda each: each.start)]
        pieces = [*healed]
        for file in self.files:
            at = file.start
            for each in healed:
                if file.start <= each.start < file.end:
                    pieces.append(Piece(at, each.start, file))
                    at = each.end
            pieces.append(Piece(at, file.end, file))
        return sorted((each for each in pieces if each.start < each.end), key=lambda each: each.start)

    def points(self, log_id: bytes) -> list[HistoryPoint]:
        """The places in the log that prove its history; the last one is the end."""
        ends = [HistoryPoint(log_id, each.end, each.chain, each.epoch) for each in self.files if each.end < self.end]
        return [*ends, HistoryPoint(log_id, self.end, self.chain, self.epoch)]


class ArchiveManifest(NamedTuple):
    """The manifest of an archive. It never changes: the next call of `archive` makes the next version."""

    version: int
    log_id: bytes
    topic: str
    time: int  # when it was committed, microseconds UTC
    partitions: tuple[ArchivedPartition, ...]

    @property
    def ends(self) -> dict[int, int]:
        """The end of each partition's archived offsets, where the live tail begins."""
        return {each.partition: each.end for each in self.partitions}

    @property
    def rows(self) -> int:
        """The number of archived records."""
        return sum(file.rows for each in self.partitions for file in each.all_files)

    @property
    def bytes(self) -> int:
        """The size of all files, in bytes."""
        return sum(file.bytes for each in self.partitions for file in each.all_files)

    @property
    def log_bytes(self) -> int:
        """The size of the archived part of the log, in bytes."""
        return sum(each.end - each.start for each in self.partitions)


def file_name(partition: int, start: int, end: int, chance: bytes) -> str:
    """The name of a file, below the archive's directory."""
    return f"{partition:04d}/{start:020d}-{end:020d}-{chance.hex()}.parquet"


def end_of(name: str) -> int | None:
    """The end of the offsets in the file of this name; None if `file_name` has not made the name."""
    match = _FILE.fullmatch(name)
    return None if match is None else int(match[1])


def encode(archived: ArchiveManifest) -> bytes:
    """The manifest as the content of its file."""
    return checked_json.seal({
        "version": archived.version, "log_id": archived.log_id.hex(), "topic": archived.topic,
        "time": archived.time, "partitions": list(map(_partition_facts, archived.partitions)),
    })  # fmt: skip


def _partition_facts(each: ArchivedPartition) -> dict[str, Any]:
    files, healed = (list(map(_file_facts, files)) for files in (each.files, each.healed))
    return each._asdict() | {"chain": f"{each.chain:08x}", "files": files, "healed": healed}


def _file_facts(each: ArchivedFile) -> dict[str, Any]:
    return each._asdict() | {name: f"{getattr(each, name):08x}" for name in _CRCS}


def decode(content: bytes, path: str) -> ArchiveManifest:
    """The manifest in a file; `CorruptLogError` if it is damaged, `UnsupportedFormatError` if it is a newer one."""
    return checked_json.decode(content, path, _archived, "the manifest of an archive")


def _archived(facts: dict[str, Any]) -> ArchiveManifest:
    archived = ArchiveManifest(
        _whole(facts, "version"), bytes.fromhex(facts["log_id"]), str(facts["topic"]), _whole(facts, "time"),
        tuple(map(_partition, facts["partitions"])),
    )  # fmt: skip
    if [each.partition for each in archived.partitions] != list(range(len(archived.partitions))):
        raise ValueError("partitions that do not count from 0")
    return archived


def _partition(facts: dict[str, Any]) -> ArchivedPartition:
    start, end = _whole(facts, "start"), _whole(facts, "end")
    gaps = tuple((each[0], each[1]) for each in facts["gaps"])
    files = tuple(map(_file, facts["files"]))
    _check_ranges(start, end, gaps)
    _check_ranges(start, end, [(each.start, each.end) for each in files])
    healed = tuple(map(_file, facts["healed"]))
    _check_ranges(start, end, sorted((each.start, each.end) for each in healed))
    chain, epoch = int(facts["chain"], 16), _whole(facts, "epoch")
    return ArchivedPartition(_whole(facts, "partition"), start, end, gaps, files, chain, epoch, healed)


def _file(facts: dict[str, Any]) -> ArchivedFile:
    numbers = {name: _whole(facts, name) for name in ("start", "end", "rows", "bytes", "added", "epoch")}
    times = {name: _whole(facts, name, least=-MAX_OFFSET - 1) for name in ("first_time", "last_time")}
    if end_of(facts["name"]) is None:
        raise ValueError(f"a file {facts['name']!r:.100}")
    crcs = {name: int(facts[name], 16) for name in _CRCS}
    return ArchivedFile(name=facts["name"], **crcs, **numbers, **times)


def _whole(facts: dict[str, Any], name: str, *, least: int = 0) -> int:
    number = facts[name]
    if type(number) is not int or not least <= number <= MAX_OFFSET:
        raise ValueError(f"{name} {number!r:.100}")
    return number


def _check_ranges(start: int, end: int, ranges: Iterable[tuple[int, int]]) -> None:
    bounds = [start, *(bound for each in ranges for bound in each), end]
    if any(after < before for before, after in pairwise(bounds)):
        raise ValueError(f"ranges out of order: {bounds!r:.100}")
