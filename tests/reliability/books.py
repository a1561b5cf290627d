"""Books: each record whose append has returned must be readable, or exactly one error must have named it.

    returned    an append has returned: the record is owed
    raised      the application got an error: records that it calls lost are owed no longer, records that it calls
                in doubt may be there or not
    settle      all was flushed, or the log was opened again: owed records must be there, lost ones must not
    died        the process or the machine was killed: owed records may be gone without an error, once

A record is known by its place. The place of a lost record is given out again; the place of an owed one is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from loglib import LogError, OffsetRange

__all__ = ["Books", "Untold"]

Place = tuple[int, int]  # partition, offset


class Untold(AssertionError):
    """A record is neither readable nor named by an error, or it is both, or it is named twice."""


class Books:
    """The account of one topic."""

    def __init__(self) -> None:
        self.owed: dict[Place, bytes | None] = {}
        self.doubtful: dict[Place, bytes | None] = {}
        self.lost: dict[Place, bytes | None] = {}
        self.accounted = 0  # records whose outcome is settled
        self.named = 0  # how many of these an error has named

    def returned(self, ranges: Iterable[OffsetRange], values: Sequence[bytes | None]) -> None:
        """An append has returned these places for these records, or its error named them in `appended`."""
        places = [(partition, offset) for partition, offsets in ranges for offset in offsets]
        for place, value in zip(places, values, strict=True):
            if place in self.owed:
                raise Untold(f"{place} was given out twice, for {self.owed[place]!r} and {value!r}")
            self.owed[place] = value
            self.lost.pop(place, None)

    def failed(self, error: BaseException, values: Sequence[bytes | None]) -> None:
        """An append of these records has raised the error. The error says which of them are in the log."""
        missing = set(getattr(error, "not_appended", ()))
        ranges: tuple[OffsetRange, ...] = getattr(error, "appended", ())
        if not ranges and not missing:  # a single record
            missing = set(range(len(values)))
        self.returned(ranges, [value for index, value in enumerate(values) if index not in missing])
        self.raised(error, own=len(missing))

    def raised(self, error: BaseException, *, own: int = 0) -> None:
        """The application got an error; `own` records of the call that raised it are not in the log."""
        if not isinstance(error, LogError):
            return
        for partition, offsets in error.lost:
            for place in ((partition, offset) for offset in offsets):
                if place in self.lost:
                    own -= 1  # the place was given out again, to one of these records
                    if own < 0:
                        raise Untold(f"{place} was named twice: {error!r}")
                if place in self.owed:
                    self.lost[place] = self.owed.pop(place)
                    self.accounted += 1
                    self.named += 1
        for partition, offsets in error.in_doubt:
            for place in [each for each in self.owed if each[0] == partition and each[1] in offsets]:
                self.doubtful[place] = self.owed.pop(place)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Note an error that is raised by a call that appends nothing itself."""
        try:
            yield
        except LogError as error:
            self.raised(error)
            raise

    def died(self) -> None:
        """No error can name records any more: records that are not promised may be gone."""
        self.doubtful |= self.owed
        self.owed = {}

    def settle(self, found: Mapping[Place, bytes | None], starts: Mapping[int, int] | None = None) -> None:
        """All was flushed, or opened again; `found` can be read, from these log starts on."""
        for place, value in self.owed.items():
            if place[1] < (starts or {}).get(place[0], 0):  # retention
                continue
            if place not in found:
                raise Untold(f"the record {value!r} at {place} is not there, and no error has named it")
            if found[place] != value:
                raise Untold(f"{place} holds {found[place]!r} in place of {value!r}")
        for place, value in self.lost.items():
            if place in found and found[place] == value:
                raise Untold(f"the record {value!r} at {place} was called lost and is there")
        self.accounted += len(self.owed) + len(self.doubtful)
        self.owed, self.doubtful, self.lost = {}, {}, {}


def found_in(topic: Any) -> dict[Place, bytes | None]:
    """The readable records of a topic, by place."""
    return {(each.partition, each.offset): each.value for each in topic.read()}
