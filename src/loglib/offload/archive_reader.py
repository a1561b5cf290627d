"""Archive reader: the records of an archive, alone or with the live tail of its log, as a stream of Arrow batches.

Invariant: each record comes once. Records below the end of the archive come from its files, and the others from the
log, which is read from exactly that offset. Only files and row groups with wanted offsets are read. A start by time is
the first record at or after it in the order of the log, as in log/lookup.py.

Threads: a stream belongs to one thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ..config.arguments import Start, Time, check_count, parse_start
from ..config.extras import named_extras
from ..config.times import to_datetime
from ..config.uri import is_remote
from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..log.history import TOO_OLD, compare_history
from ..log.log import Log
from ..log.lookup import first_after, starts_of
from ..log.reader import Reader, StartLike
from ..system.files import REAL, Files
from . import manifest_log, parquet
from .archive_manifest import ArchivedFile, ArchivedPartition, ArchiveManifest, Piece, decode
from .manifest_log import FilePlace, Place, check_log
from .storage import place_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ..format.decoding import Decoder

DIRECTORY = "_loglib"  # of the manifests; engines that read all of a directory ignore names that begin with _
Parsed = str | int | Time
_ADVICE = "nothing was read: read the archive and the topic by themselves, or name the archive of this topic"


def newest(place: Place) -> ArchiveManifest | None:
    """The newest manifest of the archive; None if there is none. It is durable."""
    return manifest_log.newest(place, DIRECTORY, decode)


def _located(files: Files, given: str) -> tuple[Files, str]:
    """The files for one look at the archive at a path or a URI, and its path in them. `files` are for paths."""
    storage, path = place_of(given)
    return storage.files_now(files), path


def is_in_a_store(given: str) -> bool:
    """True if the URI is that of an archive in an object store, and the store answers."""
    if not is_remote(given):
        return False
    try:
        files, path = _located(REAL, given)
        return files.exists(f"{path}/{DIRECTORY}")
    except (OSError, ValueError, ImportError):
        return False


class Range(NamedTuple):
    """Offsets [start, end) of a partition."""

    partition: int
    start: int
    end: int


class Split(NamedTuple):
    """The wanted records that are archived, and the start and end of the others in each partition of the log."""

    ranges: list[Range]
    starts: dict[int, Start]
    ends: dict[int, Start]  # equal to the start if all wanted records are archived


class ArchiveReader:
    """The files that one manifest of an archive names."""

    def __init__(self, files: Files, path: str, archived: ArchiveManifest) -> None:
        self.archived = archived
        self.path = path
        self._files = files

    @classmethod
    def load(cls, files: Files, path: str | os.PathLike[str]) -> ArchiveReader:
        """The newest manifest at a path or a URI; `FileNotFoundError` if there is none. `files` are for paths."""
        files, inner = _located(files, os.fsdecode(path))
        manifest = newest(FilePlace(files, inner))
        if manifest is None:
            raise FileNotFoundError(errno.ENOENT, "no archive here; loglib.offload.archive makes one", inner)
        return cls(files, inner, manifest)

    def check_log(self, log_id: bytes, path: str, logs: Iterable[Log]) -> None:
        """Refuse the archive of another log, or of another history of it, or one that has more than the log."""
        advice = "name the archive of this topic"
        check_log(self.archived, f"{self.path} is the archive", log_id, path, advice=advice)
        for log in logs:
            for each in self.archived.partitions[log.partition : log.partition + 1]:
                comparison = compare_history(each.points(log_id), log)
                if comparison.relation != TOO_OLD:  # a missing record is an error only for a call that wants it
                    comparison.check(f"the archive {self.path}", log, _ADVICE)

    def split(
        self, partitions: Collection[int], start: StartLike, end: StartLike | None, *, now_us: int, alone: bool = False
    ) -> Split:
        """The records from `start` to `end`: in the archive up to its end, and after it in the log.

        If the archive is read `alone`, an offset after its end is an `OffsetOutOfRangeError`.
        """
        starts = starts_of(start, partitions, now_us=now_us, others="begin")
        ends = starts_of("end" if end is None else end, partitions, now_us=now_us, others="end")
        ranges = []
        for number, each in self._archived(starts).items():
            first, last = (self._offset_of(each, given[number], alone=alone) for given in (starts, ends))
            if first is not None:
                starts[number] = each.end
                ranges.append(Range(number, first, each.end if last is None else last))
            if last is not None:
                starts[number] = ends[number] = each.end
        if alone:
            return Split(ranges, {}, {})
        places = ({number: _as_start(each) for number, each in given.items()} for given in (starts, ends))
        return Split(ranges, *places)

    def begin_tail(self, tail: Reader, logs: Iterable[Log], starts: Mapping[int, Start]) -> None:
        """Move a reader of the log past the end of the archive, if a time has led it to a gap before that.

        The gap is also one of the archive, whose records are before the time.
        """
        places, early = tail.tell(), {}
        archived = self._archived(places)
        for log in logs:
            number = log.partition
            if number in archived and places[number] < (end := archived[number].end):
                time = parse_start(starts[number], now_us=0)
                early[number] = first_after(log, end, time.timestamp_us) if isinstance(time, Time) else end
        if early:
            tail.seek(early)

    def _archived(self, partitions: Collection[int]) -> dict[int, ArchivedPartition]:
        return {each.partition: each for each in self.archived.partitions if each.partition in partitions}

    def files(self, wanted: Range) -> list[ArchivedFile]:
        """The files with records of a range."""
        return list(dict.fromkeys(each.file for each in self._pieces(wanted)))

    def _pieces(self, wanted: Range) -> list[Piece]:
        """The files of a range's records, in the order of the offsets."""
        pieces = self.archived.partitions[wanted.partition].pieces()
        return [each for each in pieces if each.start < wanted.end and wanted.start < each.end]

    def _offset_of(self, partition: ArchivedPartition, start: Parsed, *, alone: bool) -> int | None:
        """The offset of a start in the archive; None if it lies after the archive's end."""
        match start:
            case "begin":
                return partition.start
            case Time(timestamp_us):
                return self._offset_of_time(partition, timestamp_us)
            case int():
                if start < partition.start or (alone and start > partition.end):
                    raise OffsetOutOfRangeError(partition.partition, start, partition.start, partition.end)
                return start if start < partition.end else None
        return None

    def _offset_of_time(self, partition: ArchivedPartition, timestamp_us: int) -> int | None:
        """The offset of the first record at or after a time."""
        for each in partition.pieces():
            if each.file.last_time < timestamp_us:
                continue
            wanted = Range(partition.partition, each.start, each.end)
            with self._open(each.file) as (fd, file):
                groups = _groups(file, wanted)
                late = [group for group in groups if parquet.largest(file, group, "timestamp") >= timestamp_us]
                names = ("offset", "timestamp")
                for batch in parquet.batches(self._files, fd, names, batch_bytes=None, groups=late):
                    part = _cut(batch, wanted)
                    times = part.column("timestamp").cast("int64").to_numpy() >= timestamp_us
                    if times.any():
                        return int(part.column("offset")[int(times.argmax())].as_py())
        return None

    def batches(self, wanted: Range, columns: Sequence[str], batch_bytes: int) -> Iterator[pa.RecordBatch]:
        """The archived records of a range."""
        for each in self._pieces(wanted):
            part = Range(wanted.partition, max(wanted.start, each.start), min(wanted.end, each.end))
            yield from self._batches(each.file, part, columns, batch_bytes)

    def _batches(
        self, file: ArchivedFile, wanted: Range, columns: Sequence[str], batch_bytes: int
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        whole = wanted.start <= file.start and file.end <= wanted.end
        names = columns if whole or "offset" in columns else [*columns, "offset"]
        with self._open(file) as (fd, opened):
            groups = _groups(opened, wanted)
            for batch in parquet.batches(self._files, fd, names, batch_bytes=batch_bytes, groups=groups):
                part = batch if whole else _cut(batch, wanted)
                if part.num_rows:
                    yield part.select(list(columns))
                if not whole and batch.column("offset")[-1].as_py() >= wanted.end - 1:
                    break  # the remaining records of the row group need not be decoded

    def size_of(self, file: ArchivedFile) -> int:
        """The size of a file now, which is opened for that."""
        with self._files.closing(self._files.open_read(os.path.join(self.path, file.name))) as fd:
            return self._files.size(fd)

    @contextmanager
    def _open(self, file: ArchivedFile) -> Iterator[tuple[int, pq.ParquetFile]]:
        """An open file that has the size and the footer that the manifest names."""
        path = os.path.join(self.path, file.name)
        try:
            fd = self._files.open_read(path)
        except FileNotFoundError as error:
            raise CorruptLogError(path, 0, "no file", f"an archived file of {file.bytes} bytes") from error
        with self._files.closing(fd):
            size = self._files.size(fd)
            if size != file.bytes or parquet.footer_crc(self._files, fd, size) != file.footer_crc:
                found = f"{size} bytes with another ending"
                raise CorruptLogError(path, 0, found, f"the {file.bytes} bytes that were archived")
            with parquet.sound(path), parquet.opened(self._files, fd) as opened:
                yield fd, opened


def _groups(file: pq.ParquetFile, wanted: Range) -> list[int]:
    """The row groups with offsets of a range."""
    groups, before = [], -1
    for group in range(file.num_row_groups):
        last = parquet.largest(file, group, "offset")
        if last >= wanted.start and before + 1 < wanted.end:
            groups.append(group)
        before = last
    return groups


def _cut(batch: pa.RecordBatch, wanted: Range) -> pa.RecordBatch:
    """The records of a batch that lie in a range. Offsets rise."""
    offsets = batch.column("offset").to_numpy()
    # A plain int would make NumPy convert the whole column.
    first, last = (int(offsets.searchsorted(offsets.dtype.type(each))) for each in (wanted.start, wanted.end))
    return batch.slice(first, max(0, last - first))


def stream(
    past: ArchiveReader, start: StartLike, end: StartLike | None, *, columns: Sequence[str] | None, batch_bytes: int,
    now_us: int,
) -> pa.RecordBatchReader:  # fmt: skip
    """The archived records from `start` to `end`."""
    split = past.split(past.archived.ends, start, end, now_us=now_us, alone=True)
    return _reader(past, split.ranges, columns, batch_bytes, None, ())


def with_tail(
    archive: str | os.PathLike[str], read: Callable[[StartLike, StartLike], Reader], logs: Sequence[Log],
    start: StartLike, end: StartLike | None, *, columns: Sequence[str] | None, batch_bytes: int,
    decoder: Decoder | None, now_us: int,
) -> pa.RecordBatchReader:  # fmt: skip
    """The records from `start` to `end`, from the archive up to its end, and after it from these logs with `read`."""
    past = ArchiveReader.load(logs[0].files, archive)
    past.check_log(logs[0].identity.log_id, logs[0].directory, logs)
    split = past.split([each.partition for each in logs], start, end, now_us=now_us)
    tail = read(split.starts, split.ends)
    past.begin_tail(tail, logs, split.starts)
    read_columns = columns if decoder is None else decoder.read_columns
    return _reader(
        past, split.ranges, columns, batch_bytes, decoder, tail.arrow(read_columns, batch_bytes=batch_bytes)
    )  # fmt: skip


def _as_start(parsed: Parsed) -> Start:
    return to_datetime(parsed.timestamp_us) if isinstance(parsed, Time) else parsed


def _reader(
    past: ArchiveReader, ranges: Sequence[Range], columns: Sequence[str] | None, batch_bytes: int,
    decoder: Decoder | None, tail: Iterable[pa.RecordBatch],
) -> pa.RecordBatchReader:  # fmt: skip
    with named_extras():
        import pyarrow as pa

        from ..format.arrow import schema_of

    check_count("batch_bytes", batch_bytes)
    schema = schema_of(columns)
    names = schema.names if decoder is None else decoder.read_columns

    def records() -> Iterator[pa.RecordBatch]:
        for each in ranges:
            yield from past.batches(each, names, batch_bytes)
        yield from tail

    if decoder is None:
        return pa.RecordBatchReader.from_batches(schema, records())
    return pa.RecordBatchReader.from_batches(decoder.schema, decoder.each(records()))
