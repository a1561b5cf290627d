"""Jumps: one pointer in each batch of a segment to an earlier one, by which any is found in O(log n) steps.

Invariant: a batch's jump goes to an earlier batch of its segment; that of the segment's first, to itself.
The targets are chosen as in E. W. Myers, "An applicative random-access stack", Information Processing
Letters 17 (1983): whoever goes back by the jump where it does not go too far, and otherwise to the batch
before, comes to any earlier batch within some 3 log2(n) steps.

A search is right whatever earlier batch a jump goes to; that it is short depends on the choice. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Jumps", "added"]


class Jumps(NamedTuple):
    """A batch, and with it those to which its jump goes, the jump of that one, and so on."""

    base_offset: int
    distance: int  # of its jump, in batches; 0 for the segment's first, or if it is not known
    rest: Jumps | None  # from the batch to which its jump goes; None for the segment's first

    @property
    def jump_offset(self) -> int:
        """Base offset of the batch to which its jump goes."""
        return self.base_offset if self.rest is None else self.rest.base_offset


def added(last: Jumps | None, base_offset: int) -> Jumps:
    """The batch at `base_offset`, which follows `last`, the segment's last one until then, if it has any."""
    if last is None:
        return Jumps(base_offset, 0, None)
    target = last.rest
    if target is not None and target.rest is not None and last.distance == target.distance:
        return Jumps(base_offset, 2 * last.distance + 1, target.rest)
    return Jumps(base_offset, 1, last)
