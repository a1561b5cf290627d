"""Ranges: the topics and partitions of a query, and the range of records in each.

Invariant: this reads each partition's watermark. If a start or an end is not an end of the log, it needs
a few small reads to find the batch. Nothing is scanned or counted, for a log of any size.

Processes: runs on the driver; takes no lock and writes nothing.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from .. import description
from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..format.watermark import Mark
from ..log import Log
from ..recovery import list_segments
from ..segment import HEADER_BYTES, Identity, segment_name
from ..starts import resolve
from ..system.files import REAL
from .options import Options, Places
from .plan import Range

__all__ = ["find_ranges", "find_topics", "open_log"]


class _Part(NamedTuple):
    """A partition of the query."""

    topic: str
    path: str  # of the topic
    log_id: bytes
    partition: int

    def __str__(self) -> str:
        return f"{self.path}, partition {self.partition}"


def find_ranges(options: Options) -> list[Range]:
    """The ranges that the options mean now; some ranges may be empty."""
    parts = list(_chosen(find_topics(options.paths), options))
    for places in (options.start, options.end):
        _check_places(places, parts)
    return [_range_of(part, options) for part in parts]


def open_log(path: str, log_id: bytes, partition: int) -> Log:
    """The log of one partition of the topic at `path`; close it after use."""
    return Log(REAL, description.partition_directory(path, partition), Identity.of(log_id, partition))


# --- which topics ------------------------------------------------------------------------------------


def find_topics(paths: Iterable[str]) -> dict[str, str]:
    """The topics at these paths, as paths by name. Each path is a topic, or a directory of topics."""
    topics: dict[str, str] = {}
    for path in map(os.path.abspath, paths):
        found = [path] if _is_topic(path) else sorted(filter(_is_topic, _entries(path)))
        if not found:
            raise FileNotFoundError(errno.ENOENT, f"no {description.NAME} here or one level below: no topic", path)
        for each in found:
            name = os.path.basename(each)
            if topics.setdefault(name, each) != each:
                raise ValueError(f"{topics[name]} and {each} have the same name; load them separately")
    return topics


def _is_topic(path: str) -> bool:
    return REAL.exists(os.path.join(path, description.NAME))


def _entries(path: str) -> list[str]:
    try:  # the name of an unfinished topic begins with a dot
        return [os.path.join(path, name) for name in REAL.sizes(path) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(errno.ENOENT, "no such directory on the driver", path) from error


def _chosen(topics: Mapping[str, str], options: Options) -> Iterable[_Part]:
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
        path = topics[name]
        described = description.read(REAL, path)
        if described is None:
            raise FileNotFoundError(errno.ENOENT, "the topic was removed while the query was planned", path)
        log_id, config = described
        numbers = range(config.partitions) if options.assigned is None else options.assigned[name]
        for number in numbers:
            if not 0 <= number < config.partitions:
                raise ValueError(f"{path} has partitions 0 to {config.partitions - 1}, not {number} (option assign)")
            yield _Part(name, path, log_id, number)


# --- from where to where -----------------------------------------------------------------------------


def _check_places(places: Places, parts: Sequence[_Part]) -> None:
    """Refuse places that have no meaning for these partitions, or that would be ignored."""
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


def _range_of(part: _Part, options: Options) -> Range:
    with closing(open_log(part.path, part.log_id, part.partition)) as log:
        mark = log.mark()
        _check_end(log, mark)
        try:
            start = _offset(part, log, mark, options.start, options)
            end = _offset(part, log, mark, options.end, options)
        except OffsetOutOfRangeError as error:
            error.add_note(f"(topic {part.path}; failOnDataLoss=false reads what is left)")
            raise
        position = start if start == mark.log_start_offset else log.batch_base(start, mark)
    if start > end and options.fail_on_data_loss:
        raise ValueError(
            f"{part}: the start, {start}, lies after the end, {end} "
            f"(options {options.start.option} and {options.end.option})"
        )
    return Range(
        part.topic, part.path, part.log_id, part.partition,
        start_position=position, start_offset=start, end_offset=end, flushed_end=mark.flushed_end,
    )  # fmt: skip


def _check_end(log: Log, mark: Mark) -> None:
    """Check that the log reaches its watermark's end. A bad watermark would give a huge number of tasks."""
    segments = list_segments(log.files, log.directory)
    base = max(segments, default=mark.flushed_end)
    end = base + segments.get(base, HEADER_BYTES) - HEADER_BYTES
    if end < mark.flushed_end:
        path = os.path.join(log.directory, segment_name(base))
        raise CorruptLogError(path, segments[base], "the end of the file", f"data up to offset {mark.flushed_end}")


def _offset(part: _Part, log: Log, mark: Mark, places: Places, options: Options) -> int:
    place = places.at(part.topic, part.partition)
    assert place is not None
    kept = range(mark.log_start_offset, mark.flushed_end + 1)
    if isinstance(place, int) and place not in kept and not options.fail_on_data_loss:
        nearest = min(max(place, kept.start), kept.stop - 1)
        warn_of_loss(f"{part}: offset {place} is gone (option {places.option}); it goes on at {nearest}")
        return nearest
    offset = resolve(log, place, mark=mark)
    if places.must_match and offset == mark.flushed_end:
        raise ValueError(
            f"{part}: no record is as late as option {places.option} says; "
            "with startingOffsetsByTimestampStrategy=latest nothing is read from it"
        )
    return offset


def warn_of_loss(what: str) -> None:
    """Warn on standard error, which Spark collects, that a query skips lost records."""
    warnings.warn(f"{what} (failOnDataLoss=false)", RuntimeWarning, stacklevel=3)
