"""Transaction numbers: the names in a store of transactions, and the question if a number is applied everywhere.

Invariant: once a transaction is done and this is synced, it stays done: through power cuts, deletions and names that
another process gives. A checkpoint means that all numbers up to its own are done. A store has a checkpoint at every
instant; its first one has the number 0.

    00000000000000000017               manifest: transaction 17 is committed
    00000000000000000017.done          it is applied everywhere; a second name of the manifest
    00000000000000000016.checkpoint    all transactions up to 16, folded; each of them is done

A manifest at or below the newest checkpoint is void: a process that had stopped for a while has linked it to a deleted
name.

Threads: no state, safe for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from ..format.checked_json import unseal_mended
from ..system.files import Files

DONE = ".done"
CHECKPOINT = ".checkpoint"
MOST_BYTES = 64 << 20  # of a manifest: it is read as a whole, by every process that commits
_DIGITS = 20
_LISTINGS = 3  # a listing misses the checkpoint only if another one replaces it meanwhile


def is_done(files: Files, store_path: str, number: int) -> bool:
    """True if the transaction is applied everywhere, by the store; False also if the store cannot be read.

    The manifest is not read, because the number of a transaction that is done may have a void one.
    """
    try:
        if files.exists(os.path.join(store_path, name_of(number, DONE))):
            return True
        newest = newest_checkpoint(lambda: files.names_in(store_path))
        return newest is not None and newest >= number
    except OSError:
        return False


def is_pending(files: Files, store_path: str, number: int, txn_id: int) -> bool:
    """True if the store has the transaction, and it is not done. The number alone may be that of another one."""
    try:
        content = files.read_whole(os.path.join(store_path, name_of(number)), MOST_BYTES)
        facts = unseal_mended(content[: content.find(b"\n") + 1])
        return int(facts["id"], 16) == txn_id and not is_done(files, store_path, number)
    except (OSError, ValueError, TypeError, LookupError):
        return False


def newest_checkpoint(list_names: Callable[[], Iterable[str]]) -> int | None:
    """The highest number of a checkpoint in the listed names; None if there is no checkpoint."""
    for _ in range(_LISTINGS):
        found = numbers(list_names(), CHECKPOINT)
        if found:
            return max(found)
    return None


def name_of(number: int, suffix: str = "") -> str:
    """The name of a manifest, or with a suffix of another file."""
    return f"{number:0{_DIGITS}d}{suffix}"


def numbers(names: Iterable[str], suffix: str = "") -> list[int]:
    """The numbers of the names with this suffix; other names are ignored."""
    heads = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return [int(head) for head in heads if len(head) == _DIGITS and head.isascii() and head.isdigit()]
