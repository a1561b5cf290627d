"""Ranges: the topics and partitions of a query, and the range of records in each.

Invariant: planning reads each partition's watermark. If a start or an end is not an end of the log, it also needs
a few small reads to find the batch. Nothing is scanned or counted, for a log of any size.

Processes: runs on the driver; takes no lock and writes nothing.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache
from itertools import groupby
from typing import NamedTuple
from urllib.parse import quote

from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..format.record import Damage
from ..format.watermark import Mark
from ..log import topic_file
from ..log.copy_role import is_tier
from ..log.log import FixedMark, Log
from ..log.lookup import marks_together, resolve
from ..log.recovery import list_segments
from ..offload.storage import Storage, storage_of
from ..offload.tier_files import newest
from ..segment import HEADER_BYTES, Identity, segment_name
from ..system.files import REAL, Files
from ..system.lock import file_system
from .copied_mark import mark_of_copy
from .data_loss import report_gap, warn_of_loss
from .options import Options, Places
from .plan import Part, Range


class Found(NamedTuple):
    """A topic that was found."""

    storage: Storage
    path: str


def find_ranges(options: Options) -> list[Range]:
    """The ranges that the options mean at present; a range may be empty."""
    parts = find_parts(options)
    for places in (options.start, options.end):
        check_places(places, parts)
    of_topics = [list(of_topic) for _, of_topic in groupby(parts, key=lambda part: part.path)]
    return [each for of_topic in of_topics for each in _ranges_of(of_topic, options)]


def find_parts(options: Options) -> list[Part]:
    """The partitions that the options choose at present."""
    return list(_chosen(find_topics(options.paths), options))


def open_log(part: Part, *, files: Files | None = None) -> Log:
    """The log of one partition; close it after use."""
    files = files or part.storage.files()
    directory = topic_file.partition_directory(part.path, part.partition)
    return Log(files, directory, Identity.of(part.log_id, part.partition))


def open_range(wanted: Range, *, until_offset: int | None = None) -> Log:
    """The log of a range, for reading up to `until_offset`.

    The directory is listed only if the segments that the plan found do not suffice. In an object store it is never
    listed, and the log has the ends of the plan.
    """
    part = wanted.part
    if part.storage.is_local:
        return open_log(part, files=_Planned(wanted.segments) if wanted.segments else None)
    log = open_log(part, files=part.storage.files(listings=_listings(wanted), until_offset=until_offset))
    log.writer = FixedMark(Mark.at_rest(0, wanted.segments[0], wanted.flushed_end, wanted.flushed_tail))
    return log


def _listings(wanted: Range) -> dict[str, dict[str, int]]:
    """The directory of the partition as the plan found it."""
    ends = [*wanted.segments[1:], wanted.flushed_end]
    sizes = {
        segment_name(base): end - base + HEADER_BYTES for base, end in zip(wanted.segments, ends, strict=True)
    }
    return {topic_file.partition_directory(wanted.part.path, wanted.part.partition): sizes}


class _Planned(Files):
    """The real files, except that the first listing of a directory returns the planned segments."""

    def __init__(self, segments: Iterable[int]) -> None:
        self._planned: dict[str, int] | None = {segment_name(base): 0 for base in segments}

    def sizes(self, directory: str, *, dir_fd: int | None = None) -> dict[str, int]:
        planned, self._planned = self._planned, None
        return super().sizes(directory, dir_fd=dir_fd) if planned is None else planned


# --- which topics ------------------------------------------------------------------------------------


def find_topics(paths: Iterable[str]) -> dict[str, Found]:
    """The topics at these paths, by name. Each path is a topic, or a directory of topics."""
    topics: dict[str, Found] = {}
    for storage, path in map(storage_of, paths):
        path = os.path.abspath(path) if storage.is_local else path
        files = storage.files()
        found = [path]
        if not topic_file.exists(files, path):
            found = sorted(each for each in _entries(files, path) if topic_file.exists(files, each))
        if not found:
            raise FileNotFoundError(errno.ENOENT, f"no {topic_file.NAME} here or one level below: no topic", path)
        for each in found:
            name = os.path.basename(each)
            if topics.setdefault(name, Found(_storage_at(storage, each), each)).path != each:
                raise ValueError(f"{topics[name].path} and {each} have the same name; load them separately")
    return topics


def _storage_at(storage: Storage, path: str) -> Storage:
    """The storage of a topic. A directory that `loglib.offload.tier` fills is read like objects."""
    return Storage(f"file://{quote(path)}", path) if storage.is_local and is_tier(REAL, path) else storage


def _entries(files: Files, path: str) -> list[str]:
    try:  # the name of an unfinished topic begins with a dot
        return [os.path.join(path, name) for name in files.sizes(path) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError) as error:
        where = "no such directory on the driver" if files.real else "no such object, and none below it"
        raise FileNotFoundError(errno.ENOENT, where, path) from error


def _chosen(topics: Mapping[str, Found], options: Options) -> Iterable[Part]:
    names: Sequence[str] = list(topics)
    if options.pattern is not None:
        names = [name for name in topics if options.pattern.fullmatch(name)]
    elif options.topics is not None:
        names = options.topics
    elif options.assigned is not None:
        names = list(options.assigned)
    for name in names:
        if name not in topics:
            raise ValueError(f"no topic {name} at {', '.join(options.paths)}; there are {', '.join(sorted(topics))}")
        storage, path = topics[name]
        described = topic_file.read(storage.files(), path)
        if described is None:
            raise FileNotFoundError(errno.ENOENT, "the topic was removed while the query was planned", path)
        log_id, config = described
        numbers = range(config.partitions) if options.assigned is None else options.assigned[name]
        for number in numbers:
            if not 0 <= number < config.partitions:
                raise ValueError(f"{path} has partitions 0 to {config.partitions - 1}, not {number} (option assign)")
            yield Part(name, path, log_id, number, storage)


# --- from where to where -----------------------------------------------------------------------------


def check_places(places: Places, parts: Sequence[Part]) -> None:
    """`ValueError` for places that have no meaning for these partitions, or that would be ignored."""
    topics = {part.topic for part in parts}
    if isinstance(places.otherwise, int) and len(parts) > 1:
        raise ValueError(
            f"option {places.option}: offset {places.otherwise} means another record in each of "
            f'{len(parts)} partitions; give one for each, as in {{"0": 4096, "1": 8192}}'
        )
    if None in places.named and len(topics) > 1:
        raise ValueError(f"option {places.option} names partitions but no topics, and there are {len(topics)}")
    for topic, named in places.named.items():
        read = {part.partition for part in parts if topic in (None, part.topic)}
        if strange := named.keys() - read:
            of = "" if topic is None else f" of topic {topic}"
            raise ValueError(f"option {places.option} names partition {min(strange)}{of}, which is not read")
    if places.otherwise is None:
        for part in parts:
            if places.at(part.topic, part.partition) is None:
                raise ValueError(
                    f"option {places.option} must name every partition that is read; "
                    f"it lacks partition {part.partition} of topic {part.topic}"
                )


def _ranges_of(parts: Iterable[Part], options: Options) -> list[Range]:
    """The ranges in one topic. Together they have all records of a transaction, or none."""
    with ExitStack() as opened:
        logs = {part: opened.enter_context(closing(log)) for part, log in _logs_of(list(parts))}
        for part, log in logs.items():
            if not part.storage.is_local and log.writer is None:
                log.writer = FixedMark(mark_of_copy(log, options))
        marks = marks_together(logs.values())
        return [_range_of(part, log, marks[part.partition], options) for part, log in logs.items()]


def _logs_of(parts: Sequence[Part]) -> Iterator[tuple[Part, Log]]:
    """The logs of a topic. The end of uploaded logs (`loglib.offload.tier`) comes from their newest manifest."""
    part = parts[0]
    tiered = None if part.storage.is_local else newest(part.storage.files(), part.path)
    for part in parts:
        if tiered is None:
            yield part, open_log(part)
            continue
        found = tiered.partition(part.partition)
        listings = {topic_file.partition_directory(part.path, part.partition): found.listing}
        log = open_log(part, files=part.storage.files(listings=listings))
        log.writer = FixedMark(found.mark)
        yield part, log


def _range_of(part: Part, log: Log, mark: Mark, options: Options) -> Range:
    readable_end = data_end(part, log, mark, options)
    start = offset_of(options.start, part, log, mark, options)
    end = offset_of(options.end, part, log, mark, options)
    if start > end and options.fail_on_data_loss:
        raise ValueError(
            f"{part}: the start, {start}, lies after the end, {end} "
            f"(options {options.start.option} and {options.end.option})"
        )
    return range_between(part, log, mark, start, min(end, readable_end), skip_damage=options.skip_damage)


def range_between(part: Part, log: Log, mark: Mark, start: int, end: int, *, skip_damage: bool) -> Range:
    """The records [start, end) of a partition. `OffsetOutOfRangeError` if retention has dropped the start."""
    position = start
    if start != mark.log_start_offset:
        position = log.batch_base(start, mark, past_damage=skip_damage)
    return Range(
        part, start_position=position, start_offset=start, end_offset=end, flushed_end=mark.flushed_end,
        flushed_tail=mark.flushed_tail, segments=tuple(log.index.bases()),
        made_on=_this_host(part.path) if part.storage.is_local else "",
    )  # fmt: skip


def data_end(part: Part, log: Log, mark: Mark, options: Options) -> int:
    """The log's flushed end, or the end of its last file if that is lower and damage is skipped.

    Without this check a damaged watermark would lead to a huge number of tasks.
    """
    segments = list_segments(log.files, log.directory)
    base = max(segments, default=mark.flushed_end)
    end = base + segments.get(base, HEADER_BYTES) - HEADER_BYTES
    if end >= mark.flushed_end:
        return mark.flushed_end
    path = os.path.join(log.directory, segment_name(base))
    error = CorruptLogError(path, segments[base], "the end of the file", f"data up to offset {mark.flushed_end}")
    if not options.skip_damage:
        raise error
    report_gap(str(part), Damage.of(error, part.partition, range(end, mark.flushed_end)))
    return end


def offset_of(places: Places, part: Part, log: Log, mark: Mark, options: Options) -> int:
    """The offset that the option means in a partition at present."""
    place = places.at(part.topic, part.partition)
    assert place is not None
    kept = range(mark.log_start_offset, mark.flushed_end + 1)
    if isinstance(place, int) and place not in kept and not options.fail_on_data_loss:
        nearest = min(max(place, kept.start), kept.stop - 1)
        warn_of_loss(f"{part}: offset {place} is gone (option {places.option}); it continues at {nearest}")
        return nearest
    try:
        offset = resolve(log, place, mark=mark, past_damage=options.skip_damage)
    except OffsetOutOfRangeError as error:
        error.add_note(f"(topic {part.path}; failOnDataLoss=false reads what is left)")
        raise
    if places.must_match and offset == mark.flushed_end:
        raise ValueError(
            f"{part}: no record is as late as option {places.option} says; "
            "with startingOffsetsByTimestampStrategy=latest nothing is read from it"
        )
    return offset


@cache
def _this_host(path: str) -> str:
    """This host, and the type of the file system of the path, for a message on another host."""
    kind = file_system(REAL, path)
    return f"{socket.gethostname()}, where the path is on {kind}" if kind else socket.gethostname()
