"""Pending marks: the file `marks.json` of a mirror, which has the marks that are about to be published together.

Invariant: all that the marks promise is synced before the file is written. It is removed after the marks were published
and synced. A program that finds it publishes them, so a transaction is in all partitions of a copy or in none.

This holds for readers, too. Before the file is written, each of these partitions publishes a mark that *holds* the new
records, with the number `HELD_TOGETHER`. A reader that meets it looks for the file. If the file is there, the reader
takes the mark in it; if not, the reader stops where the hold begins. So all partitions change when the file comes.

    {"format": 1, "log_id": "<32 digits>", "marks": {"<partition>": [<the fields of the mark>], ...},
     "crc": "<8 digits>"}

(in one line). A mark whose sequence is not above that of the partition's own mark was published.

Threads: no state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..format import checked_json
from ..format.watermark import Mark
from ..system.directory import Directory
from ..system.files import Files

HELD_TOGETHER = (1 << 64) - 1  # as `held_txn` of a mark: no store gives this number
NAME = "marks.json"
_MOST_BYTES = 64 << 20


def is_held(mark: Mark) -> bool:
    """True if the mark waits for the file."""
    return mark.held_txn == HELD_TOGETHER


def held(own: Mark, end: int, last_batch: int) -> Mark:
    """The mark of a log that is durable up to `end`. Until the file is there, readers see only what `own` shows."""
    before = own.committed()
    return own.durable_to(end, last_batch)._replace(
        held_txn=HELD_TOGETHER, held_from=before.flushed_end, held_tail=before.flushed_tail
    )


def settled(mark: Mark) -> Mark:
    """The mark instead of one that waits for the file, when the file will never come."""
    return mark.committed()._replace(held_txn=0, held_from=0, held_tail=0)


def shown(mark: Mark, promised: Mark | None) -> Mark:
    """The mark for readers of one that waits for the file; `promised` is that of the partition in the file."""
    return promised if promised is not None and promised.sequence > mark.sequence else mark.committed()


def read_marks(files: Files, path: str, log_id: bytes) -> dict[int, Mark]:
    """The marks of the copy at `path` that are to be published, by partition."""

    def marks(facts: dict[str, Any]) -> dict[int, Mark]:
        if facts["log_id"] != log_id.hex():
            raise ValueError(f"log {facts['log_id']}")
        return {int(number): Mark(*map(int, fields)) for number, fields in facts["marks"].items()}

    return checked_json.read(files, os.path.join(path, NAME), _MOST_BYTES, marks, "the marks of this copy") or {}


def write_marks(files: Files, path: str, log_id: bytes, marks: Mapping[int, Mark], permissions: int) -> None:
    """Write down the marks that will be published. Synced."""
    fields = {str(number): list(mark) for number, mark in marks.items()}
    with Directory.open(files, path) as directory:
        directory.replace(NAME, checked_json.seal({"log_id": log_id.hex(), "marks": fields}), permissions)


def forget_marks(files: Files, path: str) -> None:
    """Remove the file, if it is there. Synced."""
    if files.exists(os.path.join(path, NAME)):
        with Directory.open(files, path) as directory:
            directory.unlink(NAME)
            directory.sync()
