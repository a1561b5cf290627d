"""Store pointer: the file `transactions.json` of a topic, which names the store of its transactions.

Invariant: the file is written once, before the first transaction that concerns the topic is committed. A topic
has one store for ever. The path is relative to the topic, so topics and store can be moved together.

    {"format": 1, "store": "../.transactions", "id": "<32 digits>", "crc": "<8 digits>"}

`id` is that of the store; `crc` is explained in format/checked_json.py.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ..errors import LogError
from ..format import checked_json
from ..system.directory import Directory
from ..system.files import Files
from . import copy_role
from .transaction_numbers import is_pending

NAME = "transactions.json"
STORE_FILE = "store.json"  # in the store: its id
_MOST_BYTES = 1 << 16


class StorePointer(NamedTuple):
    """The store of a topic's transactions."""

    path: str  # absolute, not normalized, since parts of it may be links
    id: bytes  # 16 bytes


def content_of(files: Files, topic_path: str) -> bytes | None:
    """The bytes of the topic's file; None if there is none."""
    try:
        return files.read_whole(os.path.join(topic_path, NAME), _MOST_BYTES)
    except FileNotFoundError:
        return None


def read_pointer(files: Files, topic_path: str) -> StorePointer | None:
    """The store of the topic's transactions; None if the topic has never had one."""

    def pointer(facts: dict[str, Any]) -> StorePointer:
        return StorePointer(os.path.join(topic_path, str(facts["store"])), bytes.fromhex(facts["id"]))

    path = os.path.join(topic_path, NAME)
    return checked_json.read(files, path, _MOST_BYTES, pointer, "the JSON of a topic's store", mended=True)


def settle(files: Files, topic_path: str, store_path: str, store_id: bytes, *, permissions: int) -> None:
    """Give the topic this store. Synced. `LogError` if it has another one, or cannot have one."""
    home = read_pointer(files, topic_path)
    if home is None:
        with Directory.open(files, topic_path) as directory:
            directory.lock_for_a_moment("a process that changes the topic", advice="try again")
            home = read_pointer(files, topic_path)  # another process may have been quicker
            if home is None:
                copy_role.check(files, topic_path, copy_role.TRANSACT)
                relative = os.path.relpath(store_path, directory.path)
                directory.replace(NAME, sealed(relative, store_id), permissions)
                return
    if home.id != store_id:
        if os.path.realpath(home.path) == os.path.realpath(store_path):
            raise LogError(lost_store(topic_path, store_path))
        raise LogError(
            f"{topic_path} has its transactions in {os.path.normpath(home.path)}, and not in {store_path}: "
            "topics of one transaction must have one store"
        )


def is_lost(files: Files, topic_path: str) -> bool:
    """True if the topic's store is not at the place that the file names, or if another store is there."""
    pointer = read_pointer(files, topic_path)
    if pointer is None:
        return False
    try:
        described = checked_json.unseal_mended(files.read_whole(os.path.join(pointer.path, STORE_FILE), _MOST_BYTES))
        return bytes.fromhex(described["id"]) != pointer.id
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (ValueError, TypeError, LookupError):  # it is damaged, and not lost
        return False


def lost_store(topic_path: str, store_path: str) -> str:
    """The message for a topic whose store is gone, or has another one in its place."""
    return (
        f"{store_path}, the store of the transactions of {topic_path}, is gone, or another one is in its place. Put it "
        f"back, or open the topic by a path that leads to it; or run `loglib repair {topic_path}`: then the topic gets "
        "a new store with its next transaction, which does not know the versions of apps that were committed before"
    )


def sealed(relative: str, store_id: bytes) -> bytes:
    """The content of the file for a store at this path, as seen from the topic's directory."""
    return checked_json.seal({"store": relative, "id": store_id.hex()})


def is_pending_here(files: Files, topic_path: str, number: int, txn_id: int) -> bool:
    """True if the topic's store has the transaction, and it is not done. False if the store cannot be read."""
    try:
        home = read_pointer(files, topic_path)
        return home is not None and is_pending(files, home.path, number, txn_id)
    except (LogError, OSError):
        return False
