"""Prometheus: a collector for `prometheus_client` (extra `prometheus`).

    from prometheus_client import REGISTRY
    from loglib.metrics.prometheus import TopicCollector

    REGISTRY.register(TopicCollector([topic]))

Invariant: a scrape sees all figures of one moment. See `sources` for topics that have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..append.flush_times import FLUSH_BOUNDS_S
from ..append.stats import PartitionStats, TopicStats
from ..groups import Group, TopicsGroup
from ..topic import Topic
from .sources import Sources

__all__ = ["TopicCollector"]

_PARTITION = ("topic", "partition")
_GROUP = ("topic", "group", "partition")

_FIELDS: tuple[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str], ...] = (  # of PartitionStats
    (GaugeMetricFamily, "size_bytes", "Bytes of log."),
    (GaugeMetricFamily, "segments", "Segment files."),
    (GaugeMetricFamily, "log_start_offset", "Offset of the oldest record."),
    (GaugeMetricFamily, "high_watermark", "Offset of the next record that becomes visible."),
    (GaugeMetricFamily, "unflushed_bytes", "Bytes that this process has appended and not yet flushed."),
    (CounterMetricFamily, "appended_records", "Records that this process has made visible."),
    (CounterMetricFamily, "appended_bytes", "Bytes of log that this process has made visible."),
)

Labelled = Sequence[tuple[tuple[str, str], PartitionStats]]


class TopicCollector(Collector):
    """Sizes, counters and times of flushes of topics, lag of their groups, and what members have handed out."""

    def __init__(self, topics: Iterable[Topic], groups: Iterable[Group | TopicsGroup] = ()) -> None:
        """`groups`: members in this process. The lag of all groups that are kept with the topics needs no member."""
        self._sources = Sources(topics, groups)

    def describe(self) -> Iterable[Metric]:
        """The names, without a look at the topics."""
        return [*_of_partitions([]), *_of_groups([]), _handed_out([])]

    def collect(self) -> Iterable[Metric]:
        """All figures as they are now."""
        stats = self._sources.stats()
        partitions = [((one.topic, str(each.partition)), each) for one in stats for each in one.partitions]
        handed = [((each.topic, group, str(each.partition)), n) for group, each, n in self._sources.handed_out()]
        return [*_of_partitions(partitions), *_of_groups(stats), _handed_out(handed)]


def _of_partitions(partitions: Labelled) -> Iterator[Metric]:
    for kind, name, text in _FIELDS:
        family = kind(f"loglib_{name}", text, labels=_PARTITION)
        for labels, each in partitions:
            family.add_metric(labels, getattr(each, name))
        yield family
    oldest = GaugeMetricFamily("loglib_oldest_timestamp_seconds", "When the oldest was appended.", labels=_PARTITION)
    for labels, each in partitions:
        if each.oldest is not None:
            oldest.add_metric(labels, each.oldest / 1e6)
    yield oldest
    flushes = HistogramMetricFamily("loglib_flush_duration_seconds", "Time of a flush.", labels=_PARTITION)
    bounds = [*map(str, FLUSH_BOUNDS_S), "+Inf"]
    for labels, each in partitions:
        times = each.flush_times
        flushes.add_metric(labels, list(zip(bounds, accumulate(times.counts), strict=True)), times.seconds)
    yield flushes


def _of_groups(stats: Sequence[TopicStats]) -> Iterator[Metric]:
    behind = GaugeMetricFamily("loglib_group_lag_bytes", "Bytes from the commit to the end.", labels=_GROUP)
    seconds = GaugeMetricFamily("loglib_group_lag_seconds", "Age of the next record of the group.", labels=_GROUP)
    for one in stats:
        for group, partitions in one.lag.items():
            for partition, lag in partitions.items():
                labels = (one.topic, group, str(partition))
                behind.add_metric(labels, lag.bytes)
                seconds.add_metric(labels, lag.seconds)
    yield behind
    yield seconds


def _handed_out(counts: Iterable[tuple[tuple[str, str, str], int]]) -> Metric:
    text = "Records that members in this process have handed out."
    family = CounterMetricFamily("loglib_group_handed_out_records", text, labels=_GROUP)
    for labels, count in counts:
        family.add_metric(labels, count)
    return family
