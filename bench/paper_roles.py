"""Paper roles: a producer and a consumer, each in a process of its own, `python paper_roles.py WORK`.

Invariant: every system gets the same messages and is timed by the same loop. The clock of a producer runs until its
last message is acknowledged. The consumer's runs until it has counted the last message, and made a checksum over the
contents of all, in their order. The process prints what it measured as one line of JSON, and nothing else.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Protocol

from fastcrc import crc32

from inputs import values_of
from measure import cpu_seconds, peak_bytes

VALUE_BYTES = 200
WINDOW = 1000  # messages of a stream that may be on their way, not acknowledged
PREFETCH = 1000  # messages that a consumer asks for at once, as in the paper
DIFFERENT = 100_000  # messages, which come again and again: in memory before any clock starts
_POINTS = 100  # of the curve in a chart
_JOINED = 256  # values in a checksum: their bytes stay in the cache, and the allocator keeps the block

Values = Iterable[bytes] | tuple[int, memoryview]  # or so many messages in a buffer


class Way(Protocol):
    """What a producer of some system can do."""

    def send(self, values: list[bytes]) -> None:
        """Send messages, and return when all are acknowledged."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a process does: `way` is a producer's ("1", "50" or "stream") or a consumer's."""

    module: str
    role: str
    way: str
    messages: int
    directory: str
    port: int = 0
    points: int = _POINTS

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Measured:
    """What a role measured. `curve` has how many messages had been handled, and the seconds until then."""

    messages: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    checksum: int
    curve: list[tuple[int, float]]


def main(work: Work) -> None:
    """Do the work, and print what was measured."""
    measured = produce(work) if work.role == "produce" else consume(work)
    print(json.dumps(asdict(measured)))


def produce(work: Work) -> Measured:
    """Send all messages, in the pieces that are points of the curve."""
    pieces = list(_pieces(work.messages, work.points))
    producer: Way = importlib.import_module(work.module).producer(work)
    _settle()
    curve, sent = [(0, 0.0)], 0
    cpu, start = cpu_seconds(), time.perf_counter()
    for piece in pieces:
        producer.send(piece)
        sent += len(piece)
        curve.append((sent, time.perf_counter() - start))
    measured = Measured(sent, curve[-1][1], cpu_seconds() - cpu, peak_bytes(), 0, curve)
    producer.close()
    return measured


def consume(work: Work) -> Measured:
    """Take all messages."""
    values: Iterator[Values] = importlib.import_module(work.module).consume(work)
    step = max(1, work.messages // work.points)
    _settle()
    curve, taken, checksum = [(0, 0.0)], 0, 0
    cpu, start = cpu_seconds(), time.perf_counter()
    for some in values:
        count, checksum = checked(some, checksum)
        taken += count
        if taken - curve[-1][0] >= step or taken >= work.messages:
            curve.append((taken, time.perf_counter() - start))
            if taken >= work.messages:
                break
    return Measured(taken, curve[-1][1], cpu_seconds() - cpu, peak_bytes(), checksum, curve)


def checked(values: Values, checksum: int) -> tuple[int, int]:
    """How many messages these are, and the checksum of everything up to them."""
    if isinstance(values, tuple):
        count, buffer = values
        return count, crc32.iscsi(buffer, checksum)
    values = list(values)
    for first in range(0, len(values), _JOINED):
        checksum = crc32.iscsi(b"".join(values[first : first + _JOINED]), checksum)
    return len(values), checksum


def expected_checksum(messages: int) -> int:
    """The checksum that a consumer of all messages must come to."""
    checksum = 0
    for piece in _pieces(messages, 1 + messages // DIFFERENT):
        checksum = checked(piece, checksum)[1]
    return checksum


def in_batches(values: list[bytes], size: int) -> Iterator[list[bytes]]:
    """Cut messages into batches."""
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _pieces(messages: int, count: int) -> Iterator[list[bytes]]:
    """Yield all messages in about so many lists."""
    different = values_of(str(VALUE_BYTES), min(messages, DIFFERENT))
    ends = [messages * number // count for number in range(count + 1)]
    for first, end in pairwise(ends):
        piece: list[bytes] = []
        while first < end:
            place = first % len(different)
            piece += different[place : place + end - first]
            first = min(end, first - place + len(different))
        if piece:
            yield piece


def _settle() -> None:
    """Make sure that no system pays when the collector walks over the messages."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main(Work(**json.loads(sys.argv[1])))
