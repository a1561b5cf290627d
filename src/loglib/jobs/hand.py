"""Hand: the records that a member has begun together, until each of them is settled or taken away.

Invariant: what is pinned is in hand. State (state.py) changes a hand, by the entries of the share's file.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple


class Doomed(NamedTuple):
    """A record whose attempts are used up, and whose dead letter is not written yet."""

    attempts: int
    first_begun: int  # seconds UTC
    member: int  # that had it in hand last
    how: str = "its worker has died, or its lease was over"


class Hand:
    """Records that were begun together."""

    # Most hands never differ from these.
    not_before = 0  # microseconds since the boot: it was released until then, after its member had looked
    some: set[int] | None = None  # the offsets still in hand; None: all of them
    pinned: Set[int] = frozenset()  # the offsets of them that a transaction settles
    doomed: Doomed | None = None  # no handler has it: it is in hand only for its dead letter

    def __init__(
        self, offset: int, count: int, member: int, until: int, attempt: int, first_begun: int, begun: int
    ) -> None:
        self.offset = offset
        self.count = count
        self.member = member
        self.until = until  # the end of the lease, microseconds since the boot; 0: none
        self.attempt = attempt
        self.first_begun = first_begun  # seconds UTC
        self.begun = begun  # seconds UTC

    def offsets(self) -> Sequence[int]:
        """The offsets still in hand."""
        return range(self.offset, self.offset + self.count) if self.some is None else sorted(self.some)

    def is_in_time(self, now: int) -> bool:
        """True if a handler may begin: neither too early nor after the end of the lease."""
        return self.not_before <= now and (not self.until or self.until > now)

    def loose(self) -> Sequence[int]:
        """The offsets in hand that are not pinned."""
        return [each for each in self.offsets() if each not in self.pinned] if self.pinned else self.offsets()

    def among(self, offset: int, count: int) -> set[int]:
        """The offsets of these that are in hand."""
        wanted = range(max(offset, self.offset), min(offset + count, self.offset + self.count))
        return set(wanted) if self.some is None else self.some.intersection(wanted)

    def __len__(self) -> int:
        return self.count if self.some is None else len(self.some)
