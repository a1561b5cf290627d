"""Figures of topics: the values of `Topic.stats`, and exporters of them.

`loglib.metrics.prometheus` and `loglib.metrics.opentelemetry` are the exporters.
"""

from ..append.stats import FlushTimes, PartitionStats, Rates, TopicStats
from ..log.lag import Lag

__all__ = ["FlushTimes", "Lag", "PartitionStats", "Rates", "TopicStats"]
