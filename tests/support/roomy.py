"""Roomy: writers that put room after their logs after the first sync, and after each one that has used it up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from random import Random
from unittest import mock

from loglib.append import room


@contextmanager
def with_room(size_bytes: int = 4096) -> Iterator[None]:
    """Writers have that much room at first, in bytes, then twice as much each time. 0: none, as without a disk."""
    if not size_bytes:
        with mock.patch.object(room, "_LEAST_SYNC_S", 1e9):
            yield
        return
    eager = {
        "_FEW_SYNCS": 1, "_LEAST_BYTES": size_bytes, "_MOST_BYTES": 16 * size_bytes,
        "_LEAST_SYNC_S": -1.0, "_WORTH": 1e9,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in eager.items():
            stack.enter_context(mock.patch.object(room, name, value))
        yield


def room_by_chance(seed: object) -> AbstractContextManager[None]:
    """Room in one program of two."""
    return with_room(Random(f"room {seed}").choice((0, 200)))
