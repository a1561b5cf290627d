"""Heap: the process keeps the memory of freed blocks for the next blocks.

Invariant: only speed depends on this.

glibc's malloc returns the top of its heap to the system when 128 KiB of it are free, and requests it again
for the next block. Reading or writing a log in blocks of 1 MiB then costs 256 page faults per block, and each
of them zeroes a page. After a larger block from mmap was freed, malloc keeps twice the size of that block
(mallopt(3), "M_MMAP_THRESHOLD": the threshold is dynamic). Other allocators have no such threshold.
"""

from __future__ import annotations

from functools import cache

__all__ = ["keep_blocks"]

_LARGEST_BLOCK = 4 << 20  # up to 8 MiB of freed memory are kept


@cache
def keep_blocks() -> None:
    """Make the allocator keep the memory of freed blocks. The first call takes a microsecond."""
    bytes(_LARGEST_BLOCK)
