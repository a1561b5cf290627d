"""Tier: copies the sealed segments of a topic, unchanged, to another place.

Invariant: uploading continues where the newest manifest ends, in each partition. A manifest names a segment only after
its batches were checked, and after its bytes were read back from the store and were equal to the log's. So a crash, a
second run or another uploader neither doubles a segment nor omits one.

    check      every batch of the segment, and that it follows the segment before it
    upload     under its own name, which the store gives once
    compare    the bytes in the store with the file
    commit     after some segments: the next manifest (manifest_log.py)

Several segments are uploaded together, and committed in the order of the log. If a run has uploaded a segment and not
committed it, the next run compares it, and does not upload it again.

Threads: a call belongs to one thread, and uploads in threads of its own. Processes: any number may upload a topic,
beside its writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

from ..config.arguments import check_count, check_names
from ..config.policies import MAX_OFFSET
from ..errors import CorruptLogError, LogError
from ..format.batch import stored_header
from ..format.record import Damage
from ..log import copy_role, gaps, topic_file
from ..log.cursor import Cursor, has_records
from ..log.history import AHEAD, compare_history
from ..log.log import Log
from ..log.verify import Progress
from ..open_topic import OpenTopic, open_for_reading
from ..segment import HEADER_BYTES, SegmentHeader, producers_name, read_segment_header, segment_name
from ..system.failures import refusing_full_disk
from ..system.files import REAL, Files
from . import manifest_log
from .manifest_log import check_log
from .storage import place_of
from .store import DirectoryStore, Store, compare, put_content
from .tier_files import Tier
from .tier_manifest import TieredPartition, TieredSegment, TierManifest, decode, encode

SEGMENTS_A_COMMIT = 16  # the most that a run compares again after a crash; each manifest names all segments
_MOST_FACTS = 16 << 20
_ADVICE = "nothing was uploaded: upload this topic to another place, and read the old place by itself"
_SAME = "the bytes of the log's segment (this object does not count: remove it, and upload again)"


def tier(
    topic: OpenTopic | str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    in_flight: int = 4,
    progress: Progress | None = None,
) -> TierManifest:
    """Upload the sealed segments of a topic to the place `to`, byte for byte, except those that are there already.

    `to` is a directory, or a URI such as "s3://bucket/logs/clicks?region=eu-central-1". A URI takes the parameters and
    the credentials of `pyarrow.fs.FileSystem.from_uri`. The first call makes the place. Each later call continues where
    the one before it ended, and does nothing if no segment was sealed since then. Every segment is checked, uploaded,
    read back and compared with the log before it counts. After a call that dies or fails, call again. Several processes
    may call together. The topic may be open for writing, here or elsewhere. Only durable segments are uploaded.
    `Partition.roll` seals a segment immediately.

    - `in_flight`: int, by default 4: the number of segments that are uploaded together. Each takes up to 16 MiB.
    - `progress`: called with two numbers of bytes: those that this call has uploaded and compared, and all that it
      found at first.

    Returns the new manifest. `Topic.open(to, mode="r")` reads the place.

    Raises `CorruptLogError` if the log is damaged, or if the place has other bytes than the log; `LogError` if the
    place is another topic's, or has another history of this one, or if its store has no conditional writes;
    `OffsetOutOfRangeError` if the log does not have the offset where the place ends; `OSError` if the store does not
    answer; `FileNotFoundError` if there is no topic. Uploading to S3 needs the extra [s3].
    """
    check_count("in_flight", in_flight)
    with open_for_reading(topic) as opened:
        copy_role.check(opened._files, opened.path, copy_role.UPLOAD)  # noqa: SLF001
        place = os.fsdecode(to)
        with refusing_full_disk(place), closing(_open_store(opened, place, in_flight)) as store:
            return _Uploader(opened, store, in_flight, progress).run()


def tiered(to: str | os.PathLike[str]) -> TierManifest:
    """The newest manifest of the place `to`: the segments of each partition, with their offsets and checksums.

    Raises `FileNotFoundError` if there is no place, and `CorruptLogError` if its manifest is damaged.
    """
    return Tier(REAL, os.fsdecode(to)).tiered


def _open_store(topic: OpenTopic, to: str, in_flight: int) -> Store:
    if not to:
        raise ValueError("the path of a place is empty; give a directory, or a URI such as s3://bucket/logs/clicks")
    storage, path = place_of(to)
    check_names(os.path.basename(path))  # a place is opened as a topic
    if storage.is_local:
        files = topic._files  # noqa: SLF001
        if files.exists(path) and (names := files.names_in(path)) and copy_role.MANIFESTS not in names:
            raise LogError(f"{path} holds other files; a place for segments is made in a new or an empty directory")
        return DirectoryStore(files, path, copy_role.MANIFESTS, topic.config.permissions)
    from .s3 import S3Store

    return S3Store(storage, connections=in_flight + 1)


class _Job(NamedTuple):
    """A segment to upload."""

    log: Log
    header: SegmentHeader
    following: SegmentHeader  # of the next segment, which contains the end of this one

    @property
    def size_bytes(self) -> int:
        """The size of its file."""
        return HEADER_BYTES + self.following.base_offset - self.header.base_offset

    def path(self, name: str) -> str:
        return os.path.join(self.log.directory, name)


class _Uploader:
    """One call of `tier`."""

    def __init__(self, topic: OpenTopic, store: Store, in_flight: int, progress: Progress | None) -> None:
        self._topic = topic
        self._files: Files = topic._files  # noqa: SLF001
        self._clock = topic._clock  # noqa: SLF001
        self._store = store
        self._in_flight = in_flight
        self._progress = progress
        self._done_bytes = 0
        self._all_bytes = 0

    @property
    def _logs(self) -> list[Log]:
        """The logs of the topic's partitions, whose number may grow."""
        return [access.log for access in self._topic._accesses]  # noqa: SLF001

    def run(self) -> TierManifest:
        """Upload and commit until nothing is left."""
        self._take_place()
        nothing = TierManifest(0, self._topic.log_id, self._topic.name, 0, ())
        while True:
            base = manifest_log.newest(self._store, copy_role.MANIFESTS, decode) or nothing
            self._check_log(base)
            self._check_history(base)
            if self._renew(base):
                continue
            spans = [span for log in self._logs for span in self._spans(log, base.partition(log.partition))]
            if not spans and base.version:
                return base
            left_bytes = sum(HEADER_BYTES + end - start for _, start, end in spans)
            self._all_bytes = max(self._all_bytes, self._done_bytes + left_bytes)
            jobs = list(self._jobs(spans[:SEGMENTS_A_COMMIT], base))
            self._write_facts(jobs, base)
            self._commit(base, self._upload(jobs, base))  # if it fails: another run was quicker

    def _commit(self, base: TierManifest, added: dict[int, tuple[TieredSegment, ...]]) -> bool:
        """Commit the next manifest; `added` are the segments of the partitions that change."""
        count = max(len(self._topic.partitions), len(base.partitions))
        segments = [added.get(number, base.partition(number).segments) for number in range(count)]
        partitions = tuple(map(TieredPartition, range(count), segments))
        manifest = TierManifest(base.version + 1, self._topic.log_id, self._topic.name, self._clock(), partitions)
        return manifest_log.commit(self._store, copy_role.MANIFESTS, manifest.version, encode(manifest))

    # --- the place -----------------------------------------------------------------------------------

    def _take_place(self) -> None:
        """Make the place this topic's, or check that it is."""
        content = self._read(copy_role.NAME)
        if content is None:
            if self._store.size(topic_file.NAME) is not None:
                raise LogError(f"{self._store.path} is a topic, and no place for the segments of one")
            log_id, drawn = self._topic.log_id, self._files.random_bytes(8).hex()
            content = copy_role.Role(copy_role.TIER, log_id, drawn, self._topic.path, self._clock()).encode()
            if not put_content(self._store, copy_role.NAME, content):
                return self._take_place()  # another process was quicker
        role = copy_role.decode(content, f"{self._store.path}/{copy_role.NAME}")
        if role.role != copy_role.TIER:
            raise LogError(f"{self._store.path} is a {role.role} of {role.of}, and no place for segments")
        return self._check_log(TierManifest(0, role.log_id, role.of, 0, ()))

    def _check_log(self, manifest: TierManifest) -> None:
        place, advice = f"{self._store.path} has the segments", "upload this topic to another place"
        check_log(manifest, place, self._topic.log_id, self._topic.path, advice=advice)

    def _check_history(self, base: TierManifest) -> None:
        """Refuse a place that does not have the history of this topic. It may be ahead of a topic that lags."""
        for log in self._logs:
            points = base.partition(log.partition).points(base.log_id)
            if points and (comparison := compare_history(points, log)).relation != AHEAD:
                comparison.check(f"the place {self._store.path}", log, _ADVICE)

    def _write_facts(self, jobs: list[_Job], base: TierManifest) -> None:
        """Update the small files that may change."""
        content = self._files.read_whole(os.path.join(self._topic.path, topic_file.NAME), _MOST_FACTS)
        if content != self._read(topic_file.NAME):
            put_content(self._store, topic_file.NAME, content, replace=True)
        for log in dict.fromkeys(each.log for each in jobs):
            end, there, here = base.partition(log.partition).end, self._gaps_there(log), log.gaps()
            self._write_gaps(log, [*gaps.between(there, 0, end), *gaps.between(here, end, MAX_OFFSET)])

    def _read(self, name: str) -> bytes | None:
        try:
            return self._store.read(name)
        except FileNotFoundError:
            return None

    # --- gaps ----------------------------------------------------------------------------------------

    def _renew(self, base: TierManifest) -> bool:
        """Upload a segment again if it had gaps, and the log can read more of it by now; False if there is none."""
        for log in self._logs:
            past = base.partition(log.partition).segments
            lossy = [each for each in past if each.lost]
            there = self._gaps_there(log) if lossy else ()
            for each in lossy:
                if not _is_healed(log, gaps.between(there, each.start, each.end), each):
                    continue
                job = _Job(log, self._header(log, each.start), self._header(log, each.end))
                again, lost = self._upload_one(job, again=True)
                if self._commit(base, {log.partition: tuple(again if known == each else known for known in past)}):
                    others = [*gaps.between(there, 0, each.start), *gaps.between(there, each.end, MAX_OFFSET)]
                    self._write_gaps(log, [*others, *lost])
                return True
        return False

    def _gaps_there(self, log: Log) -> tuple[gaps.Gap, ...]:
        """The gaps that the place declares in its part of a log; those of the log if their file is damaged."""
        name = os.path.join(os.path.basename(log.directory), gaps.NAME)
        content = self._read(name)
        try:
            return () if content is None else gaps.parse_gaps(content, f"{self._store.path}/{name}", log.identity)
        except CorruptLogError:
            return log.gaps()

    def _write_gaps(self, log: Log, found: list[gaps.Gap]) -> None:
        """Make these the gaps that the place declares in a log."""
        name, wanted = os.path.join(os.path.basename(log.directory), gaps.NAME), gaps.joined(found)
        content, before = gaps.encode_gaps(log.identity, wanted), self._read(name)
        if content != before and (wanted or before is not None):
            put_content(self._store, name, content, replace=True)

    # --- segments ------------------------------------------------------------------------------------

    def _spans(self, log: Log, known: TieredPartition) -> Iterator[tuple[Log, int, int]]:
        """The log, start and end of each durable sealed segment after those that the place has."""
        mark = log.mark()
        log.refresh()
        bases = [each for each in log.index.bases() if each >= mark.log_start_offset]
        for start, end in pairwise(bases):
            if known.end < end <= mark.durable_end:
                yield log, start, end

    def _jobs(self, spans: list[tuple[Log, int, int]], base: TierManifest) -> Iterator[_Job]:
        """The segments with their headers. The first one of a partition must follow the place's last one."""
        before: SegmentHeader | None = None  # the header at the end of the last segment
        for log, start, end in spans:
            if before is None or (before.partition, before.base_offset) != (log.partition, start):
                before = self._header(log, start)
                known = base.partition(log.partition)
                if known.segments and start != known.end:
                    raise LogError(
                        f"partition {log.partition}: the place {self._store.path} ends at offset {known.end}, and no "
                        f"segment of {self._topic.path} begins there, but one at {start}; {_ADVICE}"
                    )
            header, before = before, self._header(log, end)
            yield _Job(log, header, before)

    def _header(self, log: Log, base: int) -> SegmentHeader:
        return read_segment_header(self._files, os.path.join(log.directory, segment_name(base)), log.identity)

    def _upload(self, jobs: list[_Job], base: TierManifest) -> dict[int, tuple[TieredSegment, ...]]:
        """Upload and compare these segments, several together; returns the segments of their partitions then."""
        pool = ThreadPoolExecutor(self._in_flight, "loglib-tier")
        done: dict[int, tuple[TieredSegment, ...]] = {}
        try:
            for job, future in [(job, pool.submit(self._upload_one, job)) for job in jobs]:
                number = job.header.partition
                done[number] = (*done.get(number, base.partition(number).segments), future.result()[0])
                self._done_bytes += job.size_bytes
                if self._progress is not None:
                    self._progress(self._done_bytes, self._all_bytes)
        finally:
            pool.shutdown(cancel_futures=True)
        return done

    def _upload_one(self, job: _Job, *, again: bool = False) -> tuple[TieredSegment, list[gaps.Gap]]:
        """Upload and compare a segment; returns it, and its gaps. With `again` it replaces the same segment."""
        lost = _check(job)
        base, following = job.header.base_offset, job.following
        if job.header.more_producers:
            self._upload_file(job, producers_name(base), None, again=False)
        crc = self._upload_file(job, segment_name(base), job.size_bytes, again=again)
        lost_bytes = sum(each.end - each.start for each in lost)
        return TieredSegment(
            base, following.base_offset, following.previous_batch, following.previous_crc, crc, self._clock(),
            following.writer_epoch, lost_bytes,
        ), lost  # fmt: skip

    def _upload_file(self, job: _Job, name: str, size_bytes: int | None, *, again: bool) -> int:
        """Upload a file and compare it; returns its CRC-32C. `size_bytes` is the size that it must have."""
        path = job.path(name)
        there = os.path.join(os.path.basename(job.log.directory), name)
        with self._files.closing(self._files.open_read(path)) as fd:
            size = self._files.size(fd)
            if size_bytes is not None and size != size_bytes:
                raise CorruptLogError(path, min(size, size_bytes), f"{size} bytes", f"{size_bytes}, up to the next one")
            if again or self._store.size(there) is None:
                self._store.put(there, size, lambda count, at: self._files.read_at(fd, count, at), replace=again)
            return compare(self._store, there, self._files, fd, size, expected=_SAME)


def _is_healed(log: Log, lost: list[gaps.Gap], segment: TieredSegment) -> bool:
    """True if the log can read some of the bytes that were lost in a segment when it was uploaded."""
    bases = log.index.bases()
    if segment.start < log.mark().log_start_offset or not {segment.start, segment.end} <= {*bases}:
        return False
    return any(has_records(log, each.start, each.end) for each in lost)


def _check(job: _Job) -> list[gaps.Gap]:
    """Check every batch of the segment, and the CRCs in the headers around it; returns the declared gaps in it."""
    start, end = job.header.base_offset, job.following.base_offset
    first = last = None
    met: list[Damage] = []
    with closing(Cursor(job.log, start, on_gap=met.append)) as cursor:
        while cursor.position < end and (block := cursor.read(end)):
            last = stored_header(block[-1])
            first = first or stored_header(block[0])
    path = job.path(segment_name(job.header.base_offset))
    if first is not None and first.base_offset == job.header.base_offset:
        _check_crc(path, HEADER_BYTES, first.previous_crc, job.header.previous_crc)
    if last is not None and last.next_offset == end:
        at = HEADER_BYTES + last.base_offset - job.header.base_offset
        _check_crc(path, at, last.header_crc, job.following.previous_crc)
    declared = {gap.end: gap for gap in job.log.gaps()}
    lost = (declared[each.offsets.stop]._replace(start=each.offsets.start) for each in met)
    return gaps.between(lost, start, end)


def _check_crc(path: str, position: int, found: int, expected: int) -> None:
    if found != expected:
        raise CorruptLogError(path, position, f"batch CRC {found:08x}", f"{expected:08x}, as the segments' headers say")
