"""Producers: which batch each idempotent producer appended last, so that a repeat appends nothing.

Invariant: a producer's entry is that of its batch with the highest sequence in this partition. The
entries before a segment stand in its header, those within it in its batches' headers; so the last
segment alone rebuilds them, and that is read only when a producer is first heard of.

At most 125 producers are remembered: a new one displaces the one that has been silent the longest.

Threads: guarded by the writer's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .batch import Header, Producer
from .errors import LogError
from .segment import MAX_PRODUCERS, ProducerState

__all__ = ["Producers"]


class Producers:
    """The producers known to one partition."""

    def __init__(self, partition: int, before: Iterable[ProducerState], since: Callable[[], Iterable[Header]]) -> None:
        """`before`: from the segment's header; `since`: yields the headers of the batches in it."""
        self._partition = partition
        self._before = tuple(before)
        self._since: Callable[[], Iterable[Header]] | None = since
        self._known: dict[int, ProducerState] = {}

    def seen(self, producer: Producer) -> range | None:
        """The offsets of the batch if it was appended before; `LogError` if a later one was."""
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
        """Whether a batch of this producer can be told from those that it appended before."""
        if not producer.id:
            return False
        self._load()
        last = self._known.get(producer.id)
        return last is None or producer.sequence > last.sequence

    def remember(self, producer: Producer, offsets: range) -> None:
        """The producer's last batch has been written at these offsets. May be said again."""
        self._load()
        self._add(producer, offsets)

    def snapshot(self) -> tuple[ProducerState, ...]:
        """What the next segment's header is to say."""
        self._load()
        return tuple(self._known.values())

    def _load(self) -> None:
        if self._since is not None:
            self._known = {state.producer_id: state for state in self._before}
            for header in self._since():
                if header.producer_id:
                    self._add(Producer(header.producer_id, header.producer_sequence), header.offsets)
            self._since = None

    def _add(self, producer: Producer, offsets: range) -> None:
        self._known.pop(producer.id, None)  # to the end: the first is the one that has been silent the longest
        self._known[producer.id] = ProducerState(producer.id, producer.sequence, offsets.start, len(offsets))
        if len(self._known) > MAX_PRODUCERS:
            del self._known[next(iter(self._known))]
