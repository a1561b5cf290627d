"""Chain: the order of batches. Each batch names the batch before it, by the CRC of its header and by its length.

Invariant: the CRC of a header covers the CRC that it names, and so on to the first batch of the log. Two logs that have
the same batch before an offset are the same up to this offset.

This module does no I/O and keeps no state: bytes in, facts out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .header import HEADER_BYTES, BadBatch, Header, check_body, parse_header

__all__ = ["End", "follow"]


class End(NamedTuple):
    """The end of a chain: what the next batch must name."""

    end: int
    last_batch: int  # base offset of the batch before; `end` if there is none
    crc: int | None  # of that batch's header; None if it is not known, as after a gap

    @classmethod
    def after(cls, header: Header) -> End:
        """The end of the chain with this batch."""
        return cls(header.next_offset, header.base_offset, header.header_crc)

    def check(self, header: Header) -> None:
        """`BadBatch` if the batch with this header does not follow."""
        if self.crc is not None and (header.previous_crc, header.previous_offset) != (self.crc, self.last_batch):
            found = f"a batch that follows one with CRC {header.previous_crc:08x}"
            raise BadBatch(60, found, f"{self.crc:08x}, the CRC of the batch before")


def follow(content: bytes, end: End, *, start: int, salt: int) -> Iterator[Header]:
    """The headers of the whole batches in `content`, checked with their bodies; each follows the one before.

    The first byte of `content` is that of offset `start`, and the first batch begins at `end`. A later batch that is
    cut ends the iteration. `BadBatch` or `NewerBatch` for any other one that is not the next of the chain.
    """
    while len(content) - (place := end.end - start) >= HEADER_BYTES:
        header = parse_header(content, place, salt=salt, offset=end.end)
        if place and header.length > len(content) - place:
            return
        end.check(header)
        check_body(header, memoryview(content)[place + HEADER_BYTES : place + header.length])
        yield header
        end = End.after(header)
