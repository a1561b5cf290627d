"""Producers: the last batch of each idempotent producer, so that a repeated append is ignored.

Invariant: a producer's entry describes its batch with the highest sequence in this partition. A segment's
header has the entries of earlier segments; if there are many, a separate file has the rest. Batch headers have
the entries within the segment. So the last segment is enough to rebuild all entries. It is read only when the
first producer appends.

When a segment is rolled, a producer is forgotten if its last batch is older than `producer_expiry`. All other
producers are kept, any number of them: 32 bytes each on the disk.

Threads: guarded by the writer's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import LogError
from ..format.header import SECTION, Header, Producer
from ..segment import ProducerState

_LAST_S = (1 << 32) - 1  # the year 2106; no larger time is stored


class Producers:
    """The producers known to one partition."""

    def __init__(self, partition: int, before: Iterable[ProducerState], since: Callable[[], Iterable[Header]]) -> None:
        """`before`: from the segment's header; `since`: yields the headers of the batches in it."""
        self._partition = partition
        self._before = tuple(before)
        self._since: Callable[[], Iterable[Header]] | None = since
        self._known: dict[int, ProducerState] = {}

    def seen(self, producer: Producer) -> range | None:
        """The offsets of the batch if it was appended before; `LogError` if a later batch was."""
        if self.is_news(producer):
            return None
        last = self._known[producer.id]
        if producer.sequence < last.sequence:
            raise LogError(
                f"partition {self._partition}: producer {producer.id:016x} has appended sequence {last.sequence} "
                f"already, so {producer.sequence} comes too late; use rising sequences"
            )
        return range(last.base_offset, last.base_offset + last.record_count)

    def is_news(self, producer: Producer) -> bool:
        """True if the batch is newer than those that the producer appended before."""
        if not producer.id:
            return False
        last = self.last_sequence(producer.id)
        return last is None or producer.sequence > last

    def last_sequence(self, producer_id: int) -> int | None:
        """The sequence of the producer's last batch; None for an unknown producer."""
        self._load()
        last = self._known.get(producer_id)
        return None if last is None else last.sequence

    def remember(self, producer: Producer, offsets: range, append_time: int) -> None:
        """Note that the producer's last batch was written at these offsets. A repeated call does no harm."""
        self._load()
        self._add(producer, offsets, append_time)

    def learn(self, headers: Iterable[Header]) -> None:
        """Note the producers of batches that another process has appended, if those before them are loaded."""
        if self._since is None:
            for header in headers:
                self._note(header)

    def snapshot(self, *, silent_since_us: int | None = None) -> tuple[ProducerState, ...]:
        """The entries for the next segment. Producers without a batch since that time are forgotten."""
        self._load()
        if silent_since_us is not None:
            self._known = {
                each.producer_id: each
                for each in self._known.values()
                if not each.last_append_s or each.last_append_s * 1_000_000 >= silent_since_us
            }
        return tuple(self._known.values())

    def _load(self) -> None:
        if self._since is not None:
            self._known = {state.producer_id: state for state in self._before}
            for header in self._since():
                self._note(header)
            self._since, self._before = None, ()

    def _note(self, header: Header) -> None:
        if header.producer_id and not header.flags & SECTION:
            producer = Producer(header.producer_id, header.producer_sequence)
            self._add(producer, header.offsets, header.append_time)

    def _add(self, producer: Producer, offsets: range, append_time: int) -> None:
        self._known.pop(producer.id, None)  # move it to the end: the header's table has the latest producers
        seconds = min(max(-(-append_time // 1_000_000), 1), _LAST_S)  # 0 would be unknown
        self._known[producer.id] = ProducerState(producer.id, producer.sequence, offsets.start, len(offsets), seconds)


def parse_producer(producer: tuple[str, int]) -> Producer:
    """A producer's name as the number for batch headers, and its sequence."""
    match producer:
        case (str() as name, int() as sequence) if type(sequence) is int:
            if not 0 <= sequence < 1 << 64:
                raise ValueError(f"a producer's sequence must be a number of 64 bits, not {sequence}")
            return Producer(producer_id(name), sequence)
        case _:
            raise TypeError(f"a producer must be a name (str) and a sequence (int), not {producer!r}")


def producer_id(name: str) -> int:
    """The number for a producer's name in batch headers; never 0, which means no producer."""
    from hashlib import blake2b  # here, because this import takes longer than all of loglib

    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1
