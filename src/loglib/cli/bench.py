"""Bench: the speed at which a disk and this machine write, sync and read a log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click

from ..config.policies import FlushPolicy
from ..system.files import REAL
from ..topic import Topic
from .arguments import DIRECTORY, SIZE, as_json
from .output import note, print_each, sized

_TOGETHER = 10_000  # records in a call of append_many
_SYNCS = 200
_BLOCK_BYTES = 1 << 20


class _Row(NamedTuple):
    """One measurement."""

    what: str
    records: int
    bytes: int
    seconds: float
    middle_us: float | None = None  # of one call: p50 and p99
    slow_us: float | None = None


@click.command()
@click.argument("directory", type=DIRECTORY, default=".")
@click.option("--records", type=click.IntRange(1000, 100_000_000), metavar="N", default=500_000, show_default=True,
              help="Number of records.")  # fmt: skip
@click.option("--size", type=SIZE, default="200", show_default=True, help="Size of a value.")
@as_json
def bench(directory: str, records: int, size: int, as_json: bool) -> None:
    """Measure writing and reading on the disk of a directory.

    A topic is created there and removed at the end. The figures vary with the load: run it on an idle machine, and more
    than once.
    """
    if not REAL.exists(directory):
        raise click.UsageError(f"{directory} does not exist")
    rows = list(_measured(directory, records, size))
    print_each(rows, _Row._asdict, _shown, ["what", ">records/s", ">bytes/s", ">p50", ">p99"], as_json=as_json)
    if not as_json:
        note(f"values of {size} bytes; {records:,} records")


def _measured(directory: str, records: int, size: int) -> Iterator[_Row]:
    path = os.path.join(os.path.abspath(directory), f".loglib-bench-{os.getpid()}.tmp")
    REAL.make_directory(path, 0o600)
    try:
        yield _raw(os.path.join(path, "raw"), records * size)
        value = bytes(size)
        manual = FlushPolicy(None, None, None)
        with Topic.create(os.path.join(path, "topic"), flush=manual) as topic:
            many = records // _TOGETHER + 1

            def append_many() -> None:
                for _ in range(many):
                    topic.append_many([value] * _TOGETHER, partition=0)
                topic.flush()

            yield _timed(f"append_many of {_TOGETHER:,}, one flush", many * _TOGETHER, size, append_many)
            yield _timed("read as batches", many * _TOGETHER, size, lambda: sum(map(len, topic.read().batches())))
            yield _timed("read as records", many * _TOGETHER, size, lambda: sum(1 for _ in topic.read()))
            single = min(records, 100_000)

            def append() -> None:
                for _ in range(single):
                    topic.append(value, partition=0)
                topic.flush()

            yield _timed("append one a call, one flush", single, size, append)
            yield _synced(topic, value)
    finally:
        REAL.remove_tree(path)


def _raw(path: str, size_bytes: int) -> _Row:
    """Write and sync as many bytes without a log."""
    block = bytes(_BLOCK_BYTES)
    with REAL.closing(REAL.create(path, 0o600)) as fd:
        began = time.perf_counter()
        for at in range(0, size_bytes, _BLOCK_BYTES):
            REAL.write_all(fd, [block], at)
        REAL.datasync(fd)
        return _Row("the disk alone: write, one sync", 0, size_bytes, time.perf_counter() - began)


def _timed(what: str, records: int, size: int, work: Callable[[], object]) -> _Row:
    began = time.perf_counter()
    work()
    return _Row(what, records, records * size, time.perf_counter() - began)


def _synced(topic: Topic, value: bytes) -> _Row:
    times = []
    for _ in range(_SYNCS):
        began = time.perf_counter()
        topic.append(value, partition=0, sync=True)
        times.append((time.perf_counter() - began) * 1e6)
    times.sort()
    seconds = sum(times) / 1e6
    return _Row("append and sync, one a call", _SYNCS, _SYNCS * len(value), seconds, times[_SYNCS // 2], times[-2])


def _shown(row: _Row) -> tuple[object, ...]:
    rate = f"{row.records / row.seconds:,.0f}" if row.records else "-"
    middle, slow = ("-" if each is None else f"{each / 1000:.2f} ms" for each in (row.middle_us, row.slow_us))
    return row.what, rate, sized(round(row.bytes / row.seconds)), middle, slow
