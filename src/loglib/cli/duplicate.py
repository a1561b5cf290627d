"""Duplicate: the records of a topic in a new topic, which may have other partitions and policies.

Invariant: the new topic is built aside, under a name that begins with a dot, and renamed when all of its records are on
the disk. So a directory at the given path is a whole copy. Nothing is dropped from it before.

The new topic has a log of its own: other offsets, and new times of append. Keys, values, headers and event times are
unchanged. If the number of partitions or the partitioner differs, records are taken in the order in which they were
appended, from all partitions, so those of a key stay in order also if partitions were added to the source.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any, NamedTuple

import click

from ..append.partitioner import BUILT_IN
from ..config.arguments import topic_path
from ..config.policies import FIXED, FlushPolicy, Retention, TopicConfig
from ..config.uri import is_remote
from ..format.batch import Batch
from ..format.display import counted
from ..log import topic_file
from ..log.lookup import marks_together
from ..log.reader import OnDamage, Reader
from ..offload.storage import storage_of
from ..system.failures import refusing_full_disk
from ..system.files import REAL
from ..topic import Topic
from .arguments import DIRECTORY, SOURCE, as_json, confirm_limits, yes
from .ending import DAMAGED
from .output import bar, listed_facts, note, print_json, sized
from .policies import changes, policy_options

# While records are copied, nothing is dropped, and few flushes are made.
_MEANWHILE: dict[str, Any] = {
    "retention": Retention(age=None), "durability": "disk",
    "flush": FlushPolicy(records=None, interval=None, bytes=64 << 20),
}  # fmt: skip


class _Copied(NamedTuple):
    records: int
    bytes: int  # of keys, values and headers


@click.command()
@click.argument("source", type=SOURCE)
@click.argument("target", type=DIRECTORY)
@click.option("--partitions", type=click.IntRange(1, 10_000), metavar="N", help="Number of partitions.")
@click.option("--partitioner", type=click.Choice(list(BUILT_IN)), help="Hash that gives the partition of a key.")
@click.option("--skip-damage", "on_damage", flag_value="skip", default="raise",
              help="Skip damage, and end with exit code 1.")  # fmt: skip
@policy_options
@yes
@as_json
def copy(
    source: str, target: str, partitions: int | None, partitioner: Any, on_damage: OnDamage, yes: bool, as_json: bool,
    **given: Any,
) -> int:  # fmt: skip
    """Copy the records of a topic to a new one, also with other partitions.

    TARGET has the source's policies, except those given here, its own offsets, and no groups. It appears when it is
    whole. See also `loglib snapshot`.
    """
    shown = storage_of(source)[1] if is_remote(source) else source  # without credentials
    if is_remote(target):
        raise click.UsageError("TARGET must be a directory")
    path = topic_path(target)
    if REAL.exists(path) and (not REAL.is_directory(path) or REAL.names_in(path)):
        raise click.UsageError(f"{target} exists already")
    with Topic.open(source, mode="r") as opened:
        policies = {each.name: getattr(opened.config, each.name) for each in fields(TopicConfig)}
        altered = opened.config.resolved(changes(given))
        confirm_limits(altered, yes=yes)
        policies |= altered
        if partitions is not None:
            policies["partitions"] = partitions
        policies["partitioner"] = partitioner or opened.config.partitioner
        with bar(shown) as progress:
            copied, gaps = _build(opened, path, TopicConfig(**policies), on_damage, progress)
    if as_json:
        facts = {"topic": shown, "copy": path, **copied._asdict(), "gaps": listed_facts(gaps)}
        print_json(facts)
    else:
        note(f"copied {counted(copied.records, 'record')}, {sized(copied.bytes)}, to {target}")
    for damage in gaps:
        note(f"damage: {damage}")
    return DAMAGED if gaps else 0


def _build(
    source: Topic, path: str, config: TopicConfig, on_damage: OnDamage, progress: Callable[[int, int], object] | None
) -> tuple[_Copied, list[Any]]:
    """Build the copy aside, and give it its name. Nothing is left if that fails."""
    aside = topic_file.new_topic_aside(REAL, path, config.permissions)
    policies = {each.name: getattr(config, each.name) for each in fields(TopicConfig) if each.name not in FIXED}
    # A limit of bytes in the retention policy makes segments smaller, so that it need not drop all at the same time.
    meanwhile = _MEANWHILE | {"segment_bytes": config.roll_bytes}
    try:
        with refusing_full_disk(path), ExitStack() as readers:
            spread = _partitioner(config.partitioner)
            with Topic.create(aside, partitions=config.partitions, partitioner=spread, **policies | meanwhile) as made:
                copying = _Copying(source, made, on_damage, readers, progress)
                copied = copying.run()
                made.flush()
                made.alter(**{name: policies[name] for name in meanwhile})
        REAL.rename(aside, path)
        REAL.sync_directory(os.path.dirname(path))
    except BaseException:
        REAL.remove_tree(aside)
        raise
    return copied, copying.gaps


def _partitioner(name: str) -> Any:
    """A built-in partitioner by its name; or a function of that name, of which only the name is stored."""
    if name in BUILT_IN:
        return name

    def unknown(_key: bytes, _partitions: int) -> int:
        raise click.UsageError(
            f"the partitioner {name} is a function of an application: give --partitioner, or copy with the same number "
            "of partitions"
        )

    unknown.__name__ = name
    return unknown


class _Copying:
    """Copies the records that a topic has at one moment, a transaction whole or not at all."""

    def __init__(
        self, source: Topic, target: Topic, on_damage: OnDamage, readers: ExitStack,
        progress: Callable[[int, int], object] | None,
    ) -> None:  # fmt: skip
        self._target = target
        self._progress = progress
        self._moves = any(getattr(source.config, name) != getattr(target.config, name) for name in FIXED)
        ends = marks_together(source._logs())  # noqa: SLF001
        self._readers: list[Reader] = [
            readers.enter_context(each.read("begin", ends[each.id].flushed_end, on_damage=on_damage))
            for each in source.partitions if each.id in ends
        ]  # fmt: skip
        self._total = sum(mark.flushed_end - mark.log_start_offset for mark in ends.values())

    @property
    def gaps(self) -> list[Any]:
        """The damage that was skipped, and the declared gaps."""
        return [damage for reader in self._readers for damage in reader.gaps]

    def run(self) -> _Copied:
        records = size = done = 0
        for batch in self._batches():
            self._append(batch)
            records += len(batch)
            size += batch.content_bytes
            done += batch.next_offset - batch.offsets.start
            if self._progress is not None:
                self._progress(done, self._total)
        return _Copied(records, size)

    def _batches(self) -> Iterator[Batch]:
        if self._moves:
            yield from heapq.merge(*(each.batches() for each in self._readers), key=lambda batch: batch.append_time)
        else:  # few files are open
            for reader in self._readers:
                yield from reader.batches()
                reader.close()

    def _append(self, batch: Batch) -> None:
        if not self._moves:
            self._append_rows(batch, partition=batch.partition)
            return
        keyed = [at for at, key in enumerate(batch.keys) if key is not None]
        keyless = [at for at, key in enumerate(batch.keys) if key is None]
        self._append_rows(batch, keyed)
        # Records without a key keep their order, too.
        self._append_rows(batch, keyless, partition=batch.partition % len(self._target.partitions))

    def _append_rows(self, batch: Batch, rows: list[int] | None = None, *, partition: int | None = None) -> None:
        """Append these rows of a batch, or all. Without a partition, their keys choose it."""
        columns: Iterable[list[Any]] = (batch.values, batch.keys, batch.timestamps, batch.headers)
        if rows is not None and len(rows) < len(batch):
            columns = ([column[at] for at in rows] for column in columns)
        values, keys, times, headers = columns
        self._target.append_many(values, keys=keys, timestamps=times, headers=headers, partition=partition)
