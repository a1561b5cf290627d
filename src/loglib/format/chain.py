"""Chain: the order of batches. Each batch names the batch before it, by the CRC of its header and by its length.

Invariant: the CRC of a header covers the CRC that it names, and so on to the first batch of the log. Two logs that have
the same batch before an offset are the same up to this offset.

Each batch also has a *jump* to an earlier batch of its segment, so any batch is found in O(log n) steps. The jump of
the segment's first batch goes to itself. The targets are chosen as in E. W. Myers, "An applicative random-access
stack", Information Processing Letters 17 (1983). A search follows the jump if the jump does not go too far, else it
goes to the batch before. It reaches any earlier batch within about 3 log2(n) steps. It is correct for any targets.

This module does no I/O and keeps no state: bytes in, facts out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .header import HEADER_BYTES, BadBatch, Header, check_body, parse_header

_new_tuple = tuple.__new__  # half the time of calling the NamedTuple; see bench/RESULTS.md


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


# --- jumps ------------------------------------------------------------------------------------


class Jumps(NamedTuple):
    """A batch, the batch to which its jump goes, the batch to which that batch's jump goes, and so on."""

    base_offset: int
    distance: int  # of its jump, in batches; 0 for the segment's first batch, or if it is not known
    rest: Jumps | None  # from the batch to which its jump goes; None for the segment's first batch

    @property
    def jump_offset(self) -> int:
        """Base offset of the batch to which its jump goes."""
        return self.base_offset if self.rest is None else self.rest.base_offset


def added(last: Jumps | None, base_offset: int) -> Jumps:
    """The jumps of the batch at `base_offset`, which follows `last`; None: it is the first batch of the segment."""
    if last is None:
        return _new_tuple(Jumps, (base_offset, 0, None))
    target = last.rest
    if target is not None and target.rest is not None and last.distance == target.distance:
        return _new_tuple(Jumps, (base_offset, 2 * last.distance + 1, target.rest))
    return _new_tuple(Jumps, (base_offset, 1, last))
