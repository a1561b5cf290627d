"""Heap: the memory of blocks that come and go stays with the process in between.

Invariant: nothing but speed depends on this.

glibc's malloc gives the top of its heap back to the system as soon as 128 KiB of it are free, and
asks for it again with the next block: a log that is read or written in blocks of a mebibyte then
costs 256 page faults a block, each with a page to be zeroed. Once a larger block that had come from
the system itself has been freed, malloc keeps twice as much as that block had (mallopt(3),
"M_MMAP_THRESHOLD": the threshold is dynamic). Other allocators have no such threshold to raise.
"""

from __future__ import annotations

from functools import cache

__all__ = ["keep_blocks"]

_LARGEST_BLOCK = 4 << 20  # up to 8 MiB of freed memory are kept


@cache
def keep_blocks() -> None:
    """Have the allocator keep the memory of freed blocks. Costs a microsecond, the first time."""
    bytes(_LARGEST_BLOCK)
