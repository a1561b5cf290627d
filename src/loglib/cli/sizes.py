"""Sizes: how many bytes of a disk a topic takes, and for what.

Invariant: it opens no log and takes no lock, so it works beside a writer, and for a damaged topic. Files that vanish
meanwhile are left out. A file with several names, such as a segment of a snapshot, counts once for the disk. A
directory that may not be read is named, and the exit code is 3.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click

from ..groups.directory import GROUPS
from ..jobs.directory import SHARES
from ..segment import parse_segment_name
from ..system.files import REAL
from ..transactions.repair_store import is_store
from ..transactions.staging import STAGING
from .arguments import DIRECTORY, PARTITION, as_json, has_partitions, stores_of, topic_paths
from .ending import FAILED
from .output import note, print_each, print_table, sized

_BLOCK_BYTES = 512  # of `st_blocks`
# Bytes that recovery, repairs, healing and mirrors have copied or moved aside.
_SET_ASIDE = re.compile(r"\.(torn|damaged|diverged|rotten)(-|$)")
_LEFT_OVER = re.compile(r"\..*\.[0-9a-f]{16}\.tmp")  # of a topic that was being made or deleted


class _File(NamedTuple):
    """A file, and what it is for."""

    topic: str | None
    partition: int | None
    what: str
    name: str  # the path from the topic's directory
    size_bytes: int
    disk_bytes: int
    files: int = 1


@dataclass
class _Look:
    """A look at the files of some topics."""

    unreadable: list[str] = field(default_factory=list)  # directories
    _seen: set[tuple[int, int]] = field(default_factory=set)  # files by device and inode: some have several names

    def topic(self, path: str) -> Iterator[_File]:
        name = os.path.basename(os.path.abspath(path))
        for inside, facts in self._below(path):
            partition, what = _what(inside)
            yield self._file(name, partition, what, inside, facts)

    def whole(self, path: str, what: str) -> Iterator[_File]:
        for inside, facts in self._below(path):
            yield self._file(None, None, what, os.path.join(os.path.basename(path), inside), facts)

    def _file(self, topic: str | None, partition: int | None, what: str, name: str, facts: os.stat_result) -> _File:
        identity = (facts.st_dev, facts.st_ino)
        on_disk = 0 if identity in self._seen else facts.st_blocks * _BLOCK_BYTES
        self._seen.add(identity)
        return _File(topic, partition, what, name, facts.st_size, on_disk)

    def _below(self, path: str, inside: str = "") -> Iterator[tuple[str, os.stat_result]]:
        """The files in a directory and in those below it, by their paths from there, in order."""
        directory = os.path.join(path, inside)
        try:
            names = sorted(REAL.names_in(directory))
        except PermissionError:
            self.unreadable.append(directory)
            return
        for name in names:
            each = os.path.join(inside, name)
            with suppress(FileNotFoundError):  # retention removed it, or a group ended
                facts = REAL.facts(os.path.join(path, each))
                if stat.S_ISDIR(facts.st_mode):
                    yield from self._below(path, each)
                else:
                    yield each, facts


def _what(inside: str) -> tuple[int | None, str]:
    """The partition of a file in a topic's directory, if it has one, and what the file is for."""
    first, _, rest = inside.partition(os.sep)
    name = os.path.basename(inside)
    if rest and first in (GROUPS, SHARES):
        owner = rest.split(os.sep)[0]
        return None, "left over" if owner.startswith(".") and os.sep in rest else f"{first[:-1]} {owner}"
    if rest and first == STAGING:
        return None, "staging"
    partition = int(first) if rest and PARTITION.fullmatch(first) else None
    if _SET_ASIDE.search(inside):
        return partition, "set aside"
    if partition is not None and parse_segment_name(name) is not None:
        return partition, "segments"
    return partition, "other"


def _files(look: _Look, directory: str) -> Iterator[_File]:
    if has_partitions(directory):
        yield from look.topic(directory)
    elif not is_store(REAL, directory):
        for path in topic_paths(directory):
            yield from look.topic(path)
    for store in stores_of(directory):
        yield from look.whole(store, "transactions")
    for name in sorted(filter(_LEFT_OVER.fullmatch, REAL.names_in(directory))):
        yield from look.whole(os.path.join(directory, name), "left over")


def _summed(files: Iterator[_File]) -> list[_File]:
    """One row for the files of each partition that are for the same thing; its name is empty."""
    rows: dict[tuple[str | None, int | None, str], _File] = {}
    for each in files:
        key = (each.topic, each.partition, each.what)
        row = rows.get(key, each._replace(name="", size_bytes=0, disk_bytes=0, files=0))
        rows[key] = row._replace(
            size_bytes=row.size_bytes + each.size_bytes, disk_bytes=row.disk_bytes + each.disk_bytes,
            files=row.files + 1,
        )  # fmt: skip
    return list(rows.values())


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.option("-a", "--all", "each", is_flag=True, help="List each file, such as each segment.")
@as_json
def du(topic: str, each: bool, as_json: bool) -> int:
    """Show how many bytes a topic takes: segments, what was set aside, groups, shares. A directory: all of its topics.

    SIZE is the length of the files. ON DISK is what they take there: a file with two names counts once, and a hole in
    a file does not count. It takes no lock, and works for a damaged topic.
    """
    look = _Look()
    files = _files(look, topic)
    rows = list(files) if each else _summed(files)
    if as_json:
        print_each(rows, _facts, _row, [], as_json=True)
    else:
        _print_rows(rows, each=each)
    for directory in look.unreadable:
        note(f"loglib: {directory}: Permission denied")
    return FAILED if look.unreadable else 0


def _print_rows(rows: list[_File], *, each: bool) -> None:
    size, on_disk = sum(row.size_bytes for row in rows), sum(row.disk_bytes for row in rows)
    total = _File("total", None, "", "", size, on_disk, sum(row.files for row in rows))
    names = ["topic", ">partition", "what", *(["file"] if each else [">files"]), ">size", ">on disk"]
    print_table(names, (_row(row, each=each) for row in [*rows, total]))


def _facts(row: _File) -> dict[str, Any]:
    facts = row._asdict()
    if not row.name:
        del facts["name"]
    return facts


def _row(row: _File, *, each: bool = False) -> tuple[object, ...]:
    partition = "-" if row.partition is None else row.partition
    what = row.name if each else row.files
    return row.topic or "-", partition, row.what or "-", what, sized(row.size_bytes), sized(row.disk_bytes)
