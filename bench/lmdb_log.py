"""lmdb as a log: the alternative that is a memory-mapped B+tree.

Invariant: keys are integers in append mode; each commit is one write transaction with one putmulti. The
map is not writable. Without fsync, neither data pages nor meta pages are synced.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import lmdb

from alternatives import COMMIT_MESSAGES

_MAP_BYTES = 16 << 30  # Address space, not disk: the file grows as it is filled.


class Lmdb:
    """lmdb with integer keys in append mode, one write transaction with one putmulti per commit.

    putmulti gets a lazy zip: a list of pairs would cost a third of the speed.
    """

    KEY_HEAD = struct.Struct("<H")

    def __init__(self, directory: Path, *, sync: bool) -> None:
        self._environment = lmdb.open(
            str(directory), map_size=_MAP_BYTES, max_dbs=1, sync=sync, metasync=sync, writemap=False
        )
        self._log = self._environment.open_db(b"log", integerkey=True)
        self._next = 0

    def append_many(self, values: list[bytes], keys: list[bytes] | None = None) -> None:
        if keys is not None:
            pack = self.KEY_HEAD.pack
            values = [pack(len(key)) + key + value for key, value in zip(keys, values, strict=True)]
        with self._environment.begin(write=True, db=self._log) as transaction:
            first, self._next = self._next, self._next + len(values)
            numbers = map(struct.Struct("=Q").pack, range(first, self._next))
            transaction.cursor().putmulti(zip(numbers, values, strict=True), append=True)

    def close(self) -> None:
        self._environment.close()


def lmdb_values(directory: Path) -> Iterator[list[bytes]]:
    """Yield the values, 10,000 at a time."""
    with lmdb.open(str(directory), map_size=_MAP_BYTES, max_dbs=1, readonly=True, lock=False) as environment:
        log = environment.open_db(b"log", integerkey=True, create=False)
        with environment.begin(db=log) as transaction:
            rows = transaction.cursor().iternext(keys=False, values=True)
            while values := list(islice(rows, COMMIT_MESSAGES)):
                yield values


def lmdb_records(directory: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield (packed number, value) of each message."""
    with lmdb.open(str(directory), map_size=_MAP_BYTES, max_dbs=1, readonly=True, lock=False) as environment:
        log = environment.open_db(b"log", integerkey=True, create=False)
        with environment.begin(db=log) as transaction:
            yield from transaction.cursor().iternext(keys=True, values=True)
