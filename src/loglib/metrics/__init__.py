"""Figures of topics: the values of `Topic.stats`, and exporters of them.

`loglib.metrics.prometheus` and `loglib.metrics.opentelemetry` export topics that a program has open, and
`loglib.metrics.exporter` those at some paths.
"""

from ..append.stats import FlushTimes, PartitionStats, Rates, SharePartitionStats, ShareStats, TopicStats
from ..log.lag import Lag

__all__ = ["FlushTimes", "Lag", "PartitionStats", "Rates", "SharePartitionStats", "ShareStats", "TopicStats"]
