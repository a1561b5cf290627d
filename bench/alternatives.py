"""Alternatives: other ways to store messages, each written as a good engineer would write it.

Invariant: every alternative gets its best known settings for the promise that is compared.
"No fsync" means that no system syncs; "fsync" means that every commit is on the disk when it returns.
A commit is one call of `append_many`. No checks are added to those of the systems:
lmdb, sqlite3 and the Arrow stream have no checksum of the messages.

lmdb and pyarrow are in `lmdb_log.py` and `arrow_stream.py`, so that only their own processes import them.

Threads: each writer belongs to one thread; `Shared` makes any of them safe for many threads.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Protocol

BLOCK_BYTES = 1 << 20
COMMIT_MESSAGES = 10_000


class Writer(Protocol):
    """What a benchmark needs of a log: one commit per call."""

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> object: ...

    def close(self) -> None: ...


class RawFile:
    """The machine's limit: the bytes are handed to the system as they are."""

    def __init__(self, directory: Path, *, sync: bool) -> None:
        self._fd = os.open(directory / "raw", os.O_CREAT | os.O_WRONLY)
        self._sync = sync

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> None:
        """Write each value (a block of 1 MiB, say) by one call to the system."""
        for value in values:
            os.write(self._fd, value)
        if self._sync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class ObviousLog:
    """The log that everyone writes first: length, CRC, message, again and again; one write per commit.

    It uses a plain loop, which is faster here than a list comprehension or a pipeline of map and zip.
    """

    HEAD = struct.Struct("<II")  # value length, crc of the value
    KEYED_HEAD = struct.Struct("<III")  # key length, value length, crc of key and value

    def __init__(self, directory: Path, *, sync: bool) -> None:
        self._fd = os.open(directory / "log", os.O_CREAT | os.O_WRONLY)
        self._sync = sync

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> None:
        os.write(self._fd, b"".join(self._parts(values) if keys is None else self._keyed_parts(values, keys)))
        if self._sync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _parts(self, values: list[bytes]) -> list[bytes]:
        pack, crc32 = self.HEAD.pack, zlib.crc32
        parts: list[bytes] = []
        for value in values:
            parts.append(pack(len(value), crc32(value)))
            parts.append(value)
        return parts

    def _keyed_parts(self, values: list[bytes], keys: list[bytes]) -> list[bytes]:
        pack, crc32 = self.KEYED_HEAD.pack, zlib.crc32
        parts: list[bytes] = []
        for value, key in zip(values, keys, strict=True):
            parts.append(pack(len(key), len(value), crc32(value, crc32(key))))
            parts.append(key)
            parts.append(value)
        return parts


def obvious_records(directory: Path, *, keyed: bool) -> Iterator[tuple[int, bytes | None, bytes]]:
    """Yield (offset, key, value) of each message, its CRC checked."""
    with open(directory / "log", "rb", buffering=BLOCK_BYTES) as file:
        yield from (_obvious_keyed_records if keyed else _obvious_records)(file)


def _obvious_records(file: Readable) -> Iterator[tuple[int, bytes | None, bytes]]:
    read, unpack, crc32, offset = file.read, ObviousLog.HEAD.unpack, zlib.crc32, 0
    while head := read(8):
        length, crc = unpack(head)
        value = read(length)
        if crc32(value) != crc:
            raise ValueError(f"wrong CRC at byte {offset}")
        yield offset, None, value
        offset += 8 + length


def _obvious_keyed_records(file: Readable) -> Iterator[tuple[int, bytes | None, bytes]]:
    read, unpack, crc32, offset = file.read, ObviousLog.KEYED_HEAD.unpack, zlib.crc32, 0
    while head := read(12):
        key_length, value_length, crc = unpack(head)
        key, value = read(key_length), read(value_length)
        if crc32(value, crc32(key)) != crc:
            raise ValueError(f"wrong CRC at byte {offset}")
        yield offset, key, value
        offset += 12 + key_length + value_length


class Readable(Protocol):
    """The part of a file's interface that a reader of records needs."""

    def read(self, count: int, /) -> bytes: ...


class Sqlite:
    """sqlite3 in WAL mode, one transaction with one executemany per commit.

    Without fsync, large pages and rare checkpoints are fastest. With fsync, every commit writes its
    pages to the WAL and waits, so small pages are fastest.
    """

    def __init__(self, directory: Path, *, sync: bool) -> None:
        self._db = sqlite3.connect(directory / "log.db", isolation_level=None, check_same_thread=False)
        self._db.execute(f"PRAGMA page_size = {4096 if sync else 16384}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if sync else 'OFF'}")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {(40 << 20) // (4096 if sync else 16384)}")
        self._db.execute(
            'CREATE TABLE log ("offset" INTEGER PRIMARY KEY, timestamp INTEGER NOT NULL,'
            " key BLOB, value BLOB, headers BLOB)"
        )

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> None:
        now_us = time.time_ns() // 1000
        if len(values) == 1 and keys is None:  # A single statement is its own transaction.
            self._db.execute("INSERT INTO log (timestamp, value) VALUES (?, ?)", (now_us, values[0]))
            return
        self._db.execute("BEGIN")
        if keys is None:
            rows = zip(repeat(now_us), values)
            self._db.executemany("INSERT INTO log (timestamp, value) VALUES (?, ?)", rows)
        else:
            keyed_rows = zip(repeat(now_us), keys, values)
            self._db.executemany("INSERT INTO log (timestamp, key, value) VALUES (?, ?, ?)", keyed_rows)
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


def sqlite_values(directory: Path) -> Iterator[list[bytes]]:
    """Yield the values, 10,000 at a time."""
    db = sqlite3.connect(directory / "log.db")
    try:
        cursor = db.execute('SELECT value FROM log ORDER BY "offset"')
        while values := [value for (value,) in islice(cursor, COMMIT_MESSAGES)]:
            yield values
    finally:
        db.close()


def sqlite_records(directory: Path) -> Iterator[tuple[int, int, bytes | None, bytes, bytes | None]]:
    """Yield the columns that a Record has."""
    db = sqlite3.connect(directory / "log.db")
    try:
        yield from db.execute('SELECT "offset", timestamp, key, value, headers FROM log ORDER BY "offset"')
    finally:
        db.close()


class Gathering:
    """Any of the writers above, with the calls of loglib.

    With `gather`, messages wait in a list until 10,000 of them make a commit, as in loglib.
    Without it every call is a commit.
    """

    def __init__(self, writer: Writer, *, gather: bool) -> None:
        self._writer = writer
        self._limit = COMMIT_MESSAGES if gather else 1
        self._values: list[bytes] = []
        if not gather:  # Nothing between the caller and the system.
            self.append_many = writer.append_many  # type: ignore[method-assign]

    def append(self, value: bytes) -> None:
        self._values.append(value)
        if len(self._values) >= self._limit:
            self.flush()

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> object:
        assert keys is None  # Keyed calls are commits.
        self._values.extend(values)
        if len(self._values) >= self._limit:
            self.flush()
        return None

    def flush(self) -> None:
        if self._values:
            values, self._values = self._values, []
            self._writer.append_many(values)

    def close(self) -> None:
        self.flush()
        self._writer.close()


class Shared:
    """Any of the writers above for many threads: a lock around each commit.

    For sqlite3 this is faster than one connection per thread, whose busy handler sleeps for milliseconds.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._lock = threading.Lock()

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> None:
        with self._lock:
            self._writer.append_many(values, keys)

    def close(self) -> None:
        self._writer.close()
