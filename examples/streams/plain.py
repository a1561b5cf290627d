"""Plain Python's answer to what a query is asked, and the comparison of the two.

Spark's rule for late rows: the watermark is the highest event time of the batches before, less the delay. A result that
ends at or before the watermark is final: Spark puts it out and forgets it. A row whose result was final in the batch
before is late: Spark drops it. Of several streams, the slowest one counts.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import accesslog
from streams.common import AT_ONCE, Event

MINUTE = 60_000_000  # microseconds
HOUR = 60 * MINUTE


class Timed(Protocol):
    @property
    def time(self) -> int: ...


T = TypeVar("T", bound=Timed)


class View(NamedTuple):
    """What `common.page_views` finds in a hit."""

    time: int
    host: str
    page: str


def views_of(hits: Iterable[Event]) -> list[View | None]:
    """The page view of each hit; None for an image, a style sheet and the like."""
    pages = ((hit, accesslog.page_of(hit.value)) for hit in hits)
    return [View(hit.time, hit.key.decode(), page) if page is not None else None for hit, page in pages]


def micro_batches(*streams: Sequence[T | None], delay: int) -> Iterator[tuple[list[list[T]], int, int]]:
    """For each micro-batch: its rows by stream, and two watermarks: rows are late up to the first, results are final up
    to the second. The last batch is empty: Spark runs it when the watermark has moved."""
    late = final = 0
    highest = [0] * len(streams)
    for start in range(0, max(map(len, streams)) + AT_ONCE, AT_ONCE):
        late, final = final, max(final, min(highest) - delay)
        rows = [[row for row in stream[start : start + AT_ONCE] if row is not None] for stream in streams]
        yield rows, late, final
        highest = [max(high, *(row.time for row in part), 0) for high, part in zip(highest, rows, strict=True)]


def agree(found: Iterable[Hashable], expected: Iterable[Hashable]) -> int:
    """How many results there are, if Spark and plain Python have the same; AssertionError if not."""
    found, expected = Counter(found), Counter(expected)
    if found != expected:
        more, less = list((found - expected).elements()), list((expected - found).elements())
        raise AssertionError(f"Spark has {more[:3]} (of {len(more)}), plain Python has {less[:3]} (of {len(less)})")
    if not found:
        raise AssertionError("there are no results to compare")
    return found.total()
