"""Prometheus: a collector for `prometheus_client` (extra `prometheus`).

    from prometheus_client import REGISTRY
    from loglib.metrics.prometheus import TopicCollector

    REGISTRY.register(TopicCollector([topic]))

Invariant: a scrape gets all figures of one moment. `sources` omits topics that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from ..append.flushes import FLUSH_BOUNDS_S
from ..append.stats import SharePartitionStats
from ..config.extras import named_extras
from ..groups import Group, TopicsGroup
from ..topic import Topic
from .sources import Sources

with named_extras():
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

__all__ = ["TopicCollector"]

_PARTITION = ("topic", "partition")
_GROUP = ("topic", "group", "partition")
_SHARE = ("topic", "share", "partition")

_FIELDS: tuple[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str], ...] = (  # of PartitionStats
    (GaugeMetricFamily, "size_bytes", "Bytes of log."),
    (GaugeMetricFamily, "segments", "Segment files."),
    (GaugeMetricFamily, "log_start_offset", "Offset of the oldest record."),
    (GaugeMetricFamily, "high_watermark", "Offset of the next record that becomes visible."),
    (GaugeMetricFamily, "unflushed_bytes", "Bytes that this process has appended and not yet flushed."),
    (CounterMetricFamily, "appended_records", "Records that this process has made visible."),
    (CounterMetricFamily, "appended_bytes", "Bytes of log that this process has made visible."),
)
_SHARE_FIELDS: tuple[tuple[str, str, Callable[[SharePartitionStats], float]], ...] = (
    ("lag_bytes", "Bytes of log that no member has begun.", lambda each: each.lag.bytes),
    ("lag_seconds", "Age of the next record that no member has begun.", lambda each: each.lag.seconds),
    ("in_hand_records", "Records that a handler has begun.", lambda each: each.in_hand),
    ("free_records", "Records that were begun before and come again.", lambda each: each.free),
    ("waiting_records", "Records that come again at a later time.", lambda each: each.waiting),
    ("oldest_unsettled_seconds", "Time since the oldest unsettled record was begun.", lambda each: each.oldest_seconds),
)


class TopicCollector(Collector):
    """Sizes, counters and times of flushes of topics, lag of their groups, their shares, and what members yielded."""

    def __init__(self, topics: Iterable[Topic], groups: Iterable[Group | TopicsGroup] = ()) -> None:
        """`groups`: members in this process. The lag of all groups that are kept with the topics needs no member."""
        self._sources = Sources(topics, groups)

    def describe(self) -> Iterable[Metric]:
        """The names of the metrics. The topics are not read."""
        return [*metrics_of(Sources((), ()))]

    def collect(self) -> Iterable[Metric]:
        """The present figures."""
        return [*metrics_of(self._sources)]


def metrics_of(sources: Sources) -> Iterator[Metric]:
    """The metrics of these sources, each with all its samples."""
    partitions = [((topic, str(each.partition)), each) for topic, each in sources.partitions()]
    lags = [((topic, group, str(number)), lag) for group, (topic, number), lag in sources.lags()]
    for kind, name, text in _FIELDS:
        family = kind(f"loglib_{name}", text, labels=_PARTITION)
        for labels, each in partitions:
            family.add_metric(labels, getattr(each, name))
        yield family
    oldest, newest = (
        GaugeMetricFamily(f"loglib_{each}_timestamp_seconds", f"When the {each} was appended.", labels=_PARTITION)
        for each in ("oldest", "newest")
    )
    flushes = HistogramMetricFamily("loglib_flush_duration_seconds", "Time of a flush.", labels=_PARTITION)
    bounds = [*map(str, FLUSH_BOUNDS_S), "+Inf"]
    for labels, each in partitions:
        for family, time in ((oldest, each.oldest), (newest, each.newest)):
            if time is not None:
                family.add_metric(labels, time / 1e6)
        times = each.flush_times
        flushes.add_metric(labels, list(zip(bounds, accumulate(times.counts), strict=True)), times.seconds)
    behind = GaugeMetricFamily("loglib_group_lag_bytes", "Bytes from the commit to the end.", labels=_GROUP)
    seconds = GaugeMetricFamily("loglib_group_lag_seconds", "Age of the next record of the group.", labels=_GROUP)
    for names, lag in lags:
        behind.add_metric(names, lag.bytes)
        seconds.add_metric(names, lag.seconds)
    text = "Records that members in this process have handed out."
    handed_out = CounterMetricFamily("loglib_group_handed_out_records", text, labels=_GROUP)
    for group, (topic, number), count in sources.handed_out():
        handed_out.add_metric((topic, group, str(number)), count)
    yield from (oldest, newest, flushes, behind, seconds, handed_out)
    yield from _of_shares(sources)


def _of_shares(sources: Sources) -> Iterator[Metric]:
    jobs = [((topic, share, str(number)), each) for share, (topic, number), each in sources.jobs()]
    for name, text, value in _SHARE_FIELDS:
        family = GaugeMetricFamily(f"loglib_share_{name}", text, labels=_SHARE)
        for labels, each in jobs:
            family.add_metric(labels, value(each))
        yield family
    text = "Records that were settled, by their result."
    settled = CounterMetricFamily("loglib_share_settled_records", text, labels=(*_SHARE, "result"))
    for labels, each in jobs:
        for result, count in each.settled.items():
            settled.add_metric((*labels, result), count)
    members = GaugeMetricFamily("loglib_share_members", "Living members.", labels=("topic", "share"))
    for topic, name, share in sources.shares():
        members.add_metric((topic, name), share.members)
    yield from (settled, members)
