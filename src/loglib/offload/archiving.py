"""Archive: the sealed segments of a topic, as files in an archive.

Invariant: archiving continues where the newest manifest ends, in each partition, if the log has the archived history
there. Records that were in a gap then, and can be read now, are archived as well. A manifest names a file only after
it was synced, read back and compared with the log. So a crash, a second run or another archiver neither doubles a
record nor omits one.

    write      a file without a name, row group by row group; synced, read back, compared
    name       one that was never used (store.py, s3.py)
    commit     after some files: the next manifest

No file that a manifest names is changed, replaced or removed. If another process has committed in between, a process
removes its own new files, and continues from that manifest.

Files of processes that have died are removed by the next call. In a directory this call holds the lock exclusively, so
it removes every file that no manifest names. An object store has no locks. There a file that the newest manifest does
not name, and that ends where that manifest ends or before, can never be committed any more.

Threads: a call belongs to one thread. Processes: any number may archive a topic, beside its writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from ..config.arguments import check_count
from ..config.extras import named_extras
from ..config.uri import is_remote, local_path
from ..errors import CorruptLogError, LogError, OffsetOutOfRangeError
from ..log import copy_role, topic_file
from ..log.cursor import BLOCK_BYTES, has_records
from ..log.history import TOO_OLD, HistoryPoint, compare_history, point_at
from ..log.log import Log
from ..log.reader import OnDamage, Reader, StartLike
from ..log.verify import Progress
from ..open_topic import OpenTopic, open_for_reading
from ..partition import Partition
from ..system.clock import SYSTEM
from ..system.failures import refusing_full_disk
from ..system.files import REAL, Files
from . import delta as delta_table
from . import manifest_log, parquet
from .archive_manifest import ArchivedFile, ArchivedPartition, ArchiveManifest, encode, end_of, file_name
from .archive_reader import DIRECTORY, ArchiveReader, newest, stream
from .manifest_log import check_log
from .storage import storage_of
from .store import DirectoryStore, Store

if TYPE_CHECKING:
    import pyarrow as pa

FILE_BYTES = 512 << 20  # of log; engines read files of some 100 MB best
ROW_GROUP_BYTES = 32 << 20
FILES_A_COMMIT = 16  # the most that a run repeats after a crash; each manifest names all files
_BATCH_BYTES = 1 << 20  # larger pieces take new memory each time, which costs more than reading them
_ADVICE = (
    "nothing was written: archive this log to another directory, and read the old archive by itself "
    "(on_damage='skip' skips what is missing)"
)
_COLUMNS = ["key", "value", "partition", "offset", "timestamp", "headers"]


def archive(
    topic: OpenTopic | str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    file_bytes: int = FILE_BYTES,
    row_group_bytes: int = ROW_GROUP_BYTES,
    on_damage: OnDamage = "raise",
    progress: Progress | None = None,
    delta: bool = False,
) -> ArchiveManifest:
    """Write the sealed segments of a topic that are not yet archived to Parquet files in the directory `to`.

    The first call makes the archive. Each later call continues where the one before it ended, and does nothing if no
    segment was sealed since then. Every file is read back and compared with the log before it counts. After a call
    that dies, call again. Several processes may call together. The topic may be open for writing, here or elsewhere.
    Only durable records are archived. `Partition.roll` seals a segment immediately.

    - `file_bytes`: int, by default 512 MiB. A file gets whole segments, until it has that many bytes of log.
    - `row_group_bytes`: int, by default 32 MiB, of keys and values. Memory grows with it, and not with the log.
    - `on_damage`: "raise", or "skip": skip damage, and offsets that retention dropped before they were archived. The
      manifest lists them as gaps, like those that `repair` has declared.
    - `progress`: called with two numbers of bytes of log: those that this call has archived, and all that it found at
      first.
    - `delta`: also make the directory a Delta table of the same files, for engines that read such tables. Needs the
      extra [delta]. Each call with `delta` adds all archived files to the table at its end.

    Records that were in a gap, and were healed since then, are archived by the next call.

    Returns the new manifest. Raises `CorruptLogError` if the log is damaged, or if a file differs from it
    when it is read back; `OffsetOutOfRangeError` if the log does not have the offset where the archive ends;
    `LogError` if the archive is another topic's, if it has another history of this one, or if the Delta table cannot
    be written (the archive is complete then); `FileNotFoundError` if there is no topic. Needs the extra [arrow].
    """
    check_count("file_bytes", file_bytes)
    check_count("row_group_bytes", row_group_bytes)
    with named_extras():
        import pyarrow.parquet  # noqa: F401  If it is missing, it is missed before anything is made.
    with open_for_reading(topic) as opened:
        files, path = opened._files, _path(to)  # noqa: SLF001
        copy_role.check(files, opened.path, copy_role.ARCHIVE)
        if delta:
            delta_table.check_delta(files, path)
        with refusing_full_disk(path), closing(open_archive(files, path, opened.config.permissions)) as store:
            made = _Archiver(opened, store, file_bytes, row_group_bytes, on_damage, progress).run()
            if delta:
                delta_table.publish(files, path, made)
            return made


def archived(to: str | os.PathLike[str]) -> ArchiveManifest:
    """The newest manifest of the archive `to`, a directory or a URI: its files, with their offsets and times.

    Raises `FileNotFoundError` if there is no archive, and `CorruptLogError` if its manifest is damaged.
    """
    return ArchiveReader.load(REAL, _path(to)).archived


def _path(to: str | os.PathLike[str]) -> str:
    given = os.fsdecode(to)
    if not given:
        raise ValueError("the path of an archive is empty; give its directory")
    return given if is_remote(given) else os.path.abspath(local_path(given))


def open_archive(files: Files, path: str, permissions: int) -> Store:
    """The archive at a path or a URI, open for adding to it. `ValueError` if a topic is there."""
    if not is_remote(path):
        if topic_file.exists(files, path):
            raise ValueError(f"{path} is a topic; an archive is a directory of its own")
        return DirectoryStore(files, path, DIRECTORY, permissions, _unnamed)
    from .s3 import S3Store

    store = S3Store(storage_of(path)[0], connections=1)
    try:
        if store.size(topic_file.NAME) is not None:
            raise ValueError(f"{store.path} has the segments of a topic; an archive is a place of its own")
        _remove_late(store)
    except BaseException:
        store.close()
        raise
    return store


def _unnamed(store: DirectoryStore) -> Iterable[str]:
    """The files of the archive that no manifest names. No other process has the archive open."""
    named = _named_files(newest(store))
    return [name for name in store.names() if end_of(name) is not None and name not in named]


def _remove_late(store: Store) -> None:
    """Remove the files of processes that died before they committed, or that were too late."""
    manifest = newest(store)
    named = _named_files(manifest)
    for each in manifest.partitions if manifest else ():
        directory = f"{each.partition:04d}"
        for name in (f"{directory}/{file}" for file in store.names_in(directory)):
            end = end_of(name)
            if end is not None and end <= each.end and name not in named:
                store.remove(name)


def commit(store: Store, manifest: ArchiveManifest) -> bool:
    """Commit the manifest, which builds on the one before it; False if another process was quicker. Durable."""
    return manifest_log.commit(store, DIRECTORY, manifest.version, encode(manifest))


def _named_files(manifest: ArchiveManifest | None) -> set[str]:
    """The names of all files that a manifest names."""
    return {file.name for each in (manifest.partitions if manifest else ()) for file in each.all_files}


class _Archiver:
    """One call of `archive`."""

    def __init__(
        self, topic: OpenTopic, store: Store, file_bytes: int, row_group_bytes: int, on_damage: OnDamage,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self._topic = topic
        self._random_bytes = topic._files.random_bytes  # noqa: SLF001
        self._clock = topic._clock  # noqa: SLF001
        self._store = store
        self._file_bytes = file_bytes
        self._row_group_bytes = row_group_bytes
        self._on_gap = on_damage
        self._progress = progress
        self._added: list[ArchivedFile] = []  # not yet committed
        self._first: int | None = None  # the bytes of log that were archived when the call began
        self._all = 0  # the bytes that this call will archive

    def run(self) -> ArchiveManifest:
        """Archive and commit until nothing is left."""
        nothing = ArchiveManifest(0, self._topic.log_id, self._topic.name, 0, ())
        while True:
            base = newest(self._store) or nothing
            self._check_same(base)
            self._added = []
            try:
                partitions = [self._begin(base, each) for each in self._topic.partitions]
                partitions = [self._heal(each) for each in partitions]
                self._add(partitions)
            except OffsetOutOfRangeError:
                if (newest(self._store) or nothing) == base:
                    raise
                self._discard()  # another process has archived these offsets, and retention has dropped them
                continue
            if base.version and partitions == list(base.partitions):
                return base
            now = self._clock()
            if not commit(self._store, nothing._replace(version=base.version + 1, time=now, partitions=(*partitions,))):
                self._discard()

    def _check_same(self, base: ArchiveManifest) -> None:
        place, advice = f"{self._store.path} is the archive", "archive this topic to another directory"
        check_log(base, place, self._topic.log_id, self._topic.path, advice=advice)
        if len(base.partitions) > len(self._topic.partitions):
            raise LogError(
                f"the archive {self._store.path} is ahead: it has {len(base.partitions)} partitions, and "
                f"{self._topic.path} has {len(self._topic.partitions)}; {_ADVICE}"
            )

    def _begin(self, base: ArchiveManifest, partition: Partition) -> ArchivedPartition:
        """A partition as the manifest has it, up to the offset where the log is read next."""
        start = partition.log_start_offset
        if partition.id >= len(base.partitions):
            return self._ending(ArchivedPartition(partition.id, start, start), start)
        each, log = base.partitions[partition.id], self._log(partition.id)
        comparison = compare_history(each.points(self._topic.log_id), log)
        if comparison.relation == TOO_OLD and self._on_gap == "skip":
            return self._ending(each._replace(gaps=(*each.gaps, (each.end, start))), start)
        comparison.check(f"the archive {self._store.path}", log, _ADVICE)
        return each

    def _log(self, partition: int) -> Log:
        return self._topic._accesses[partition].log  # noqa: SLF001

    def _heal(self, archived: ArchivedPartition) -> ArchivedPartition:
        """Write the records that were in a gap when it was archived, and can be read now."""
        partition, gaps = self._topic.partitions[archived.partition], []
        for first, end in archived.gaps:
            start = max(first, partition.log_start_offset)
            if not has_records(self._log(partition.id), start, end):
                gaps.append((first, end))
                continue
            files, left = self._write_range(partition.id, start, end, "skip")
            gaps += [each for each in ((first, start), *left) if each[0] < each[1]]
            archived = archived._replace(healed=(*archived.healed, *files))
        return archived._replace(gaps=tuple(gaps))

    def _add(self, partitions: list[ArchivedPartition]) -> None:
        """Write some files, and add them to their partitions."""
        runs = {each.partition: list(self._runs(each)) for each in partitions}
        self._report(partitions, runs)
        for number, ranges in runs.items():
            for start, end in ranges[: FILES_A_COMMIT - len(self._added)]:
                partitions[number] = self._write(partitions[number], start, end)
                self._report(partitions, runs)

    def _runs(self, archived: ArchivedPartition) -> Iterator[tuple[int, int]]:
        """Ranges of offsets, each for one file: durable sealed segments after those that are archived."""
        partition = self._topic.partitions[archived.partition]
        start = end = archived.end
        durable_end = partition.durable_end
        for each in takewhile(lambda each: each.sealed and each.end_offset <= durable_end, partition.segments):
            end = max(end, each.end_offset)
            if end - start >= self._file_bytes:
                yield start, end
                start = end
        if start < end:
            yield start, end

    def _write(self, archived: ArchivedPartition, start: int, end: int) -> ArchivedPartition:
        """Write the records of a range to a file, if there are any; returns the partition with it."""
        files, gaps = self._write_range(archived.partition, start, end, self._on_gap)
        added = archived._replace(gaps=(*archived.gaps, *gaps), files=(*archived.files, *files))
        return self._ending(added, end)

    def _write_range(
        self, partition: int, start: int, end: int, on_damage: OnDamage
    ) -> tuple[list[ArchivedFile], list[tuple[int, int]]]:  # fmt: skip
        """Write the records of a range to a file, if there are any; returns it, and the gaps of the range."""
        reader, records = self._read(partition, start, end, on_damage)
        first = next(records, None)
        files: list[ArchivedFile] = []
        if first is not None:
            files = [self._write_file(partition, start, end, chain([first], records), on_damage)]
            self._added += files
        return files, [(max(start, gap.start), min(end, gap.stop)) for gap in (each.offsets for each in reader.gaps)]

    def _read(
        self, partition: int, start: int, end: int, on_damage: OnDamage
    ) -> tuple[Reader, Iterator[pa.RecordBatch]]:  # fmt: skip
        reader = self._topic.partitions[partition].read(start, end, on_damage=on_damage)
        return reader, iter(reader.arrow(_COLUMNS, batch_bytes=min(self._row_group_bytes, _BATCH_BYTES)))

    def _write_file(
        self, partition: int, start: int, end: int, records: Iterator[pa.RecordBatch], on_damage: OnDamage
    ) -> ArchivedFile:
        name, topic = file_name(partition, start, end, self._random_bytes(8)), self._topic.name
        with self._store.new_file(name) as (files, fd, path):
            written = parquet.write(files, fd, topic, records, row_group_bytes=self._row_group_bytes)
            reader, again = self._read(partition, start, end, on_damage)
            with reader:
                parquet.compare(files, fd, path, written, topic, again)
        _, _, chained, epoch = self._point(partition, end)
        return ArchivedFile(name, start, end, *written, self._clock(), chained, epoch)

    def _ending(self, archived: ArchivedPartition, end: int) -> ArchivedPartition:
        """The partition, archived up to this offset of its log."""
        _, _, chained, epoch = self._point(archived.partition, end)
        return archived._replace(end=end, chain=chained, epoch=epoch)

    def _point(self, partition: int, offset: int) -> HistoryPoint:
        """The proof of the log's history up to an offset; an unknown chain if damage is in the way."""
        log = self._log(partition)
        try:
            return point_at(log, offset)
        except CorruptLogError:
            if self._on_gap == "raise":
                raise
            return HistoryPoint(log.identity.log_id, offset, 0)

    def _discard(self) -> None:
        """Remove the files of this run that no manifest names: another process has committed this version."""
        for name in {each.name for each in self._added} - _named_files(newest(self._store)):
            self._store.remove(name)

    def _report(self, partitions: list[ArchivedPartition], runs: dict[int, list[tuple[int, int]]]) -> None:
        if self._progress is None:
            return
        done = sum(each.end - each.start for each in partitions)
        if self._first is None:
            self._first = done
            self._all = sum(end - start for each in runs.values() for start, end in each)
        self._progress(done - self._first, max(self._all, done - self._first))


def read_archive(
    to: str | os.PathLike[str],
    start: StartLike = "begin",
    end: StartLike | None = None,
    *,
    columns: Sequence[str] | None = None,
    batch_bytes: int = BLOCK_BYTES,
) -> pa.RecordBatchReader:
    """The archived records from `start` to `end` as a `pyarrow.RecordBatchReader`, which reads on demand.

    The arguments and columns are those of `Topic.arrow`, which with `archive=to` also has the live tail. The records
    come partition after partition. Files and row groups before `start` and after `end` are not read. An age like
    "-1h" counts from now.

    Raises `FileNotFoundError` if there is no archive, `OffsetOutOfRangeError` for an offset outside of it, and
    `CorruptLogError` if a file is damaged or missing. Needs the extra [arrow].
    """
    past = ArchiveReader.load(REAL, to)
    return stream(past, start, end, columns=columns, batch_bytes=batch_bytes, now_us=SYSTEM())
