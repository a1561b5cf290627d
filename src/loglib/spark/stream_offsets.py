"""Stream offsets: how far a streaming query has planned to read, as the JSON in Spark's checkpoint.

Invariant: equal offsets have equal text, because Spark compares the text. The keys are in order. Each offset also has
the start of its batch (`from`). Spark does not store the start of the first batch, and asks again for the initial
offset when it repeats that batch. With `from` the repeated batch has the same records.

    {"end": {"clicks": {"0": 8192}}, "from": {"clicks": {"0": 4096}}, "history": {"clicks": {"0": 2868901522}},
     "log": {"clicks": "<32 digits>"}, "version": 1}

    end      by topic and partition: the offset to read next, which is a record's offset or the log's end
    from     the offset where the batch that ends at `end` begins
    history  the CRC of the header of the batch before (or around) `end`: it names the whole log up to there
    log      the log id of each topic: a topic that was made again has another one

The initial offset is `{"start": "options", "version": 1}`. It refers to the options, and names no place. So it costs
nothing if Spark asks for it and does not use it.

Processes: pure; driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import LogError
from ..groups import TopicPartition
from .plan import Part

VERSION = 1
INITIAL = {"start": "options", "version": VERSION}


class Span(NamedTuple):
    """The part of a partition that one batch reads: [start, end)."""

    start: int
    end: int
    history: int  # the CRC that names the log up to `end`


@dataclass(frozen=True, slots=True)
class Offsets:
    """The spans of one batch in all partitions."""

    logs: Mapping[str, bytes]  # the log id of each topic
    spans: Mapping[TopicPartition, Span]

    def has(self, part: Part) -> bool:
        """True if the batch has a span of this partition, and of the same log."""
        return self.logs.get(part.topic) == part.log_id and part.key in self.spans

    def moved(self, parts: Iterable[Part]) -> dict[str, str]:
        """The present name, in `parts`, of each topic that has another name here."""
        present = {part.topic: part.log_id for part in parts}
        found = {}
        for topic, log_id in self.logs.items():
            if present.get(topic) != log_id:
                names = [name for name, found_id in present.items() if found_id == log_id != self.logs.get(name)]
                if len(names) == 1:  # of two copies nobody knows which one was read
                    found[topic] = names[0]
        return found

    def renamed(self, moved: Mapping[str, str]) -> Offsets:
        """These offsets with the present names of the topics that were moved."""
        if not moved:
            return self
        taken = set(moved.values())  # the topic that had such a name before is gone
        names = {topic: moved.get(topic, topic) for topic in self.logs if topic in moved or topic not in taken}
        return Offsets(
            {name: self.logs[topic] for topic, name in names.items()},
            {
                TopicPartition(names[key.topic], key.partition): span
                for key, span in self.spans.items()
                if key.topic in names
            },
        )


def encode(offsets: Offsets) -> dict[str, Any]:
    """The offsets for Spark."""
    spans = offsets.spans
    return {
        "end": by_topic({each: span.end for each, span in spans.items()}),
        "from": by_topic({each: span.start for each, span in spans.items()}),
        "history": by_topic({each: span.history for each, span in spans.items()}),
        "log": {topic: offsets.logs[topic].hex() for topic in sorted(offsets.logs)},
        "version": VERSION,
    }


def by_topic(numbers: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """The numbers by topic and partition, in order."""
    found: dict[str, dict[str, int]] = {}
    for each in sorted(numbers):
        found.setdefault(each.topic, {})[str(each.partition)] = numbers[each]
    return found


def decode(content: Mapping[str, Any]) -> Offsets | None:
    """The offsets of a checkpoint; None for the initial offset. `LogError` if they are not offsets of loglib."""
    if content == INITIAL:
        return None
    try:
        if content["version"] != VERSION:
            raise LogError(
                f"the checkpoint has offsets of version {content['version']}, and this loglib knows version "
                f"{VERSION}: use the loglib that wrote the checkpoint, or a newer one"
            )
        logs = {str(topic): bytes.fromhex(log_id) for topic, log_id in content["log"].items()}
        spans = {
            TopicPartition(topic, int(number)): Span(
                int(content["from"][topic][number]), int(end), int(content["history"][topic][number])
            )
            for topic, ends in content["end"].items()
            for number, end in ends.items()
        }
        if any(each.topic not in logs for each in spans):
            raise KeyError("log")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LogError(
            f"the checkpoint has {content!r}, which is no offset of loglib; is it another source's?"
        ) from error
    return Offsets(logs, spans)
