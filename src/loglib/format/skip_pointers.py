"""Skip pointers: each batch points to one earlier batch of its segment, so any batch is found in O(log n) steps.

Invariant: a batch's jump goes to an earlier batch of its segment. The jump of the segment's first batch goes
to itself. The targets are chosen as in E. W. Myers, "An applicative random-access stack", Information
Processing Letters 17 (1983). A search follows the jump if the jump does not go too far, else it goes to
the previous batch. It reaches any earlier batch within about 3 log2(n) steps.

A search is correct for any choice of targets; only its length depends on them. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Jumps", "added"]

_new_tuple = tuple.__new__  # half the time of calling the NamedTuple; see bench/RESULTS.md


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
