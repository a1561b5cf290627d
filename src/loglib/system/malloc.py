"""Malloc: the process keeps the memory of freed blocks and values for the next ones.

Invariant: only speed depends on this.

glibc's malloc returns the top of its heap to the system when 128 KiB of it are free, and requests it again
for the next block. Reading or writing a log in blocks of 1 MiB then costs 256 page faults per block, and each
of them zeroes a page. After a larger block from mmap was freed, malloc keeps twice the size of that block
(mallopt(3), "M_MMAP_THRESHOLD": the threshold is dynamic). Other allocators have no such threshold.

CPython has small objects in arenas of 1 MiB (docs.python.org, "Memory Management", "The pymalloc allocator"). It
returns an arena in which nothing is in use, and the values of a batch may fill one or two arenas. Then each batch costs
the same page faults again, and reading values takes three times as long. A few values in use keep all the arenas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

_LARGEST_BLOCK = 4 << 20  # up to 8 MiB of freed memory are kept
_SMALL_BYTES = 512 - 33  # with the header of a bytes object the largest that lies in an arena
_STEP = 1000  # an arena has at least 2,048 of them

_in_use: Sequence[bytes | None] = ()


@cache
def keep_blocks() -> None:
    """Make the allocator keep the memory of freed blocks. The first call takes a microsecond."""
    bytes(_LARGEST_BLOCK)


def keep_arenas(values: Sequence[bytes | None]) -> None:
    """If these are many small values, keep their memory for the values of the next call."""
    global _in_use  # noqa: PLW0603  one for the process, as the arenas are
    if len(values) >= _STEP and len(values[0] or b"") <= _SMALL_BYTES:
        _in_use = values[::_STEP]
