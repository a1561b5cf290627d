"""Floors: the steps that no log in pure Python can leave out, done alone, to show what bounds a figure.

Invariant: nothing here is a log. There are no offsets, no headers and no recovery, and the files could not
be read back. loglib can save what it adds to a floor. It cannot save what the floor costs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from zlib import crc32

from fastcrc.crc32 import iscsi

from alternatives import BLOCK_BYTES
from loglib import Record

_RECORDS_AT_ONCE = 512  # made together, as loglib's readers do


class JoinedFile:
    """Join the values of each call, compute their CRC-32C, and write them in one call."""

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory / "floor", os.O_CREAT | os.O_WRONLY)

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> None:
        data = b"".join(values if keys is None else chain(values, keys))
        iscsi(data)
        os.write(self._fd, data)

    def close(self) -> None:
        os.close(self._fd)


class SpreadFile(JoinedFile):
    """The same in eight parts: the CRC-32 of a record's key chooses the part."""

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> None:
        if keys is None:
            raise ValueError("records without keys are not spread")
        parts: list[tuple[list[bytes], list[bytes]]] = [([], []) for _ in range(8)]
        for value, key in zip(values, keys, strict=True):
            to_values, to_keys = parts[crc32(key) % 8]
            to_values.append(value)
            to_keys.append(key)
        for part in parts:
            super().append_many(*part)


def records_of(values: list[bytes], keys: list[bytes] | None) -> Iterator[Record]:
    """Make records from values and keys that are in memory already: nothing is read, checked or cut."""
    for start in range(0, len(values), _RECORDS_AT_ONCE):
        stop = min(start + _RECORDS_AT_ONCE, len(values))
        fields = zip(
            repeat(0), range(start, stop), repeat(0), repeat(None) if keys is None else keys[start:stop],
            values[start:stop], repeat(()), range(start + 1, stop + 1),
        )  # fmt: skip
        yield from list(map(tuple.__new__, repeat(Record), fields))


def checked_slices(messages: int, per_batch: int) -> Iterator[list[bytes]]:
    """Cut values of 200 bytes out of a block that is in memory, batch by batch, each with its CRC-32C."""
    block = bytes(BLOCK_BYTES)
    view, size = memoryview(block), 200 * per_batch
    starts = range(0, len(block) - size, size)
    for number in range(messages // per_batch):
        start = starts[number % len(starts)]
        iscsi(view[start : start + size])
        yield [block[at : at + 200] for at in range(start, start + size, 200)]


def pread_and_check(path: Path) -> None:
    """Read blocks of 1 MiB and compute the CRC-32C of each."""
    fd = os.open(path, os.O_RDONLY)
    position = 0
    while block := os.pread(fd, BLOCK_BYTES, position):
        iscsi(block)
        position += len(block)
    os.close(fd)


def copy_and_check(paths: list[Path], to: Path) -> None:
    """Copy files in blocks of 1 MiB, compute the CRC-32C of each block, and sync each file."""
    to.mkdir()
    for path in paths:
        source, copy = os.open(path, os.O_RDONLY), os.open(to / path.name, os.O_CREAT | os.O_WRONLY)
        while block := os.read(source, BLOCK_BYTES):
            iscsi(block)
            os.write(copy, block)
        os.fdatasync(copy)
        os.close(copy)
        os.close(source)
