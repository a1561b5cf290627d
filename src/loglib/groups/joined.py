"""Joined: what a member of a consumer group and one of a share have in common: how they leave, and what they show.

Invariant: a member that is garbage collected without `close` releases its locks, so that others take over. It writes
nothing, because garbage collection may run in the middle of any operation: what it has handled may be handled again.

Threads: those of the subclass; `__del__` may run in any of them.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

from ..errors import LogError
from ..format.display import Shown
from ..system.not_copyable import NotCopyable


class Joined(Shown, NotCopyable):
    """A base class of members. `with` leaves at its end."""

    _kind: ClassVar[str]  # of what it has joined, for a message

    name: str  # of what it has joined
    member: str
    _closed: LogError | None
    _why = ""  # why the member is closed, if a topic was closed
    _left = True  # until all is open

    @abstractmethod
    def close(self) -> None:
        """Leave."""

    @abstractmethod
    def _abandon(self) -> None:
        """Release the locks, and write nothing."""

    @abstractmethod
    def _holding(self) -> tuple[str, object]:
        """The name and the value of the fact to show about a member that is joined."""

    def _end(self, why: str) -> None:
        """Close because a topic was closed. A loop with a timeout then raises instead of ending."""
        if self._closed is None:
            self._why = why
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._left:
            self._left = True
            self._abandon()
            message = f"{self._kind} {self.name}, member {self.member}, was not closed"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield "", self.name
        yield "member", self.member
        yield ("", "closed") if self._closed is not None else self._holding()
