"""OpenTelemetry: instruments for topics (extra `opentelemetry`), with the names of its messaging conventions.

    from loglib.metrics.opentelemetry import instrument

    instrument([topic])

    messaging.client.sent.messages         records that this process has made visible
    messaging.client.consumed.messages     records that members in this process have handed out
    messaging.client.operation.duration    histogram of flushes in seconds; the operation is "flush"
    loglib.*                               figures without a name in the conventions: sizes, segments, lag, shares

Source of the names: OpenTelemetry, semantic conventions for messaging client metrics (status: development).

Invariant: an export gets all figures of one moment. `sources` omits topics that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ..append.flushes import FLUSH_BOUNDS_S
from ..append.stats import SharePartitionStats
from ..config.extras import named_extras
from ..groups import Group, TopicsGroup
from ..topic import Topic
from .sources import Sources

with named_extras():
    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation, get_meter_provider

__all__ = ["instrument"]

Callback = Callable[[CallbackOptions], Iterable[Observation]]

_SYSTEM = {"messaging.system": "loglib"}
_TOPIC, _PARTITION = "messaging.destination.name", "messaging.destination.partition.id"
_GROUP, _OPERATION = "messaging.consumer.group.name", "messaging.operation.name"
_RESULT = "loglib.result"  # of a record of a share

_GAUGES = (
    ("size", "size_bytes", "By", "Bytes of log."),
    ("segments", "segments", "{segment}", "Segment files."),
    ("unflushed", "unflushed_bytes", "By", "Bytes that this process has appended and not yet flushed."),
    ("oldest", "oldest", "us", "When the oldest batch was appended, microseconds UTC."),
    ("newest", "newest", "us", "When the newest batch was appended, microseconds UTC."),
)
_SHARE_GAUGES: tuple[tuple[str, Callable[[SharePartitionStats], float], str, str], ...] = (
    ("lag", lambda each: each.lag.bytes, "By", "Bytes of log that no member has begun."),
    ("delay", lambda each: each.lag.seconds, "s", "Age of the next record that no member has begun."),
    ("in_hand", lambda each: each.in_hand, "{record}", "Records that a handler has begun."),
    ("free", lambda each: each.free, "{record}", "Records that were begun before and come again."),
    ("waiting", lambda each: each.waiting, "{record}", "Records that come again at a later time."),
    ("unsettled", lambda each: each.oldest_seconds, "s", "Time since the oldest unsettled record was begun."),
)


def instrument(
    topics: Iterable[Topic], groups: Iterable[Group | TopicsGroup] = (), *, meter_provider: MeterProvider | None = None
) -> None:
    """Report these topics, and these members of groups, to a meter provider; by default the global one.

    The lag of all groups, and the shares, that are kept with the topics need no member.
    """
    topics = tuple(topics)
    sources = Sources(topics, groups)
    meter = (meter_provider or get_meter_provider()).get_meter("loglib")

    def observable(callback: Callable[[Sources], Iterable[Observation]]) -> list[Callback]:
        return [lambda _: callback(sources)]

    for name, callback, text in (
        ("messaging.client.sent.messages", _sent, "Records that this process has made visible."),
        ("messaging.client.consumed.messages", _consumed, "Records that members have handed out."),
    ):
        meter.create_observable_counter(name, observable(callback), "{message}", text)
    for name, field, unit, text in _GAUGES:
        meter.create_observable_gauge(f"loglib.{name}", observable(partial(_of_partitions, field)), unit, text)
    meter.create_observable_gauge("loglib.group.lag", observable(partial(_lag, "bytes")), "By", "Bytes to the end.")
    meter.create_observable_gauge("loglib.group.delay", observable(partial(_lag, "seconds")), "s", "Age of the next.")
    for name, value, unit, text in _SHARE_GAUGES:
        meter.create_observable_gauge(f"loglib.share.{name}", observable(partial(_of_shares, value)), unit, text)
    text = "Records that were settled, by their result."
    meter.create_observable_counter("loglib.share.settled", observable(_settled), "{record}", text)
    meter.create_observable_gauge("loglib.share.members", observable(_members), "{member}", "Living members.")
    duration = meter.create_histogram(
        "messaging.client.operation.duration", "s", "Duration of a flush.",
        explicit_bucket_boundaries_advisory=FLUSH_BOUNDS_S,
    )  # fmt: skip
    for topic in topics:
        topic.on_flush(partial(_record, duration, topic.name))


def _record(duration: Histogram, topic: str, seconds: float) -> None:
    duration.record(seconds, _SYSTEM | {_OPERATION: "flush", "messaging.operation.type": "send", _TOPIC: topic})


def _sent(sources: Sources) -> Iterator[Observation]:
    for topic, each in sources.partitions():
        yield Observation(each.appended_records, _attributes(topic, each.partition) | {_OPERATION: "append"})


def _consumed(sources: Sources) -> Iterator[Observation]:
    for group, each, count in sources.handed_out():
        yield Observation(count, _attributes(*each) | {_GROUP: group, _OPERATION: "follow"})


def _of_partitions(field: str, sources: Sources) -> Iterator[Observation]:
    for topic, each in sources.partitions():
        value = getattr(each, field)
        if value is not None:
            yield Observation(value, _attributes(topic, each.partition))


def _lag(field: str, sources: Sources) -> Iterator[Observation]:
    for group, each, lag in sources.lags():
        yield Observation(getattr(lag, field), _attributes(*each) | {_GROUP: group})


def _of_shares(value: Callable[[SharePartitionStats], float], sources: Sources) -> Iterator[Observation]:
    for share, each, stats in sources.jobs():
        yield Observation(value(stats), _attributes(*each) | {_GROUP: share})


def _settled(sources: Sources) -> Iterator[Observation]:
    for share, each, stats in sources.jobs():
        for result, count in stats.settled.items():
            yield Observation(count, _attributes(*each) | {_GROUP: share, _RESULT: result})


def _members(sources: Sources) -> Iterator[Observation]:
    for topic, share, stats in sources.shares():
        yield Observation(stats.members, _SYSTEM | {_TOPIC: topic, _GROUP: share})


def _attributes(topic: str, partition: int) -> dict[str, str]:
    return _SYSTEM | {_TOPIC: topic, _PARTITION: str(partition)}
