"""Samples: sizes, ends and lags of topics over the last minutes, taken while somebody looks.

Invariant: a topic is sampled while it is asked for, and for a few seconds after that. Without a page in a browser
nothing is read. A topic whose look costs much is sampled less often, so that the samples take a tenth of one core at
most. A topic that cannot be read has samples no more, and the error.

Threads: one of its own takes the samples; all others only ask.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..append.stats import TopicStats
from ..errors import LogError
from ..groups.grouped_topic import GroupedTopic
from ..log.lag import total_lag
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from ..topic import Topic
from .counts import NOTHING, Count, RecordCounts
from .topics import Topics

EVERY_S = 2.0
_KEPT = 450  # samples: a quarter of an hour
_ASKED_S = 15.0  # how long a topic is sampled after it was asked for
_FRESH_S = 3.0  # a result that is not older serves
_COUNT_S = 0.3  # for counting records, at each sample
_SHARE = 10.0  # a sample that takes a second is taken every ten seconds
_NOW_S = 12.0  # the rate now is that of the last samples within this time


@dataclass(frozen=True, slots=True)
class Sample:
    """A topic at one moment, and its rates since the sample before."""

    time_us: int
    size_bytes: int
    bytes_per_s: float | None  # None for the first sample
    records_per_s: float | None
    lag_bytes: Mapping[str, int]  # by group
    lag_seconds: Mapping[str, float]


class Taken(NamedTuple):
    """One look at a topic."""

    stats: TopicStats
    counted: Count


class _Series(NotCopyable):
    """The samples of one topic."""

    def __init__(self) -> None:
        self.asked = self.due = self.taken_at = 0.0
        self.samples: deque[Sample] = deque(maxlen=_KEPT)
        self.counts = RecordCounts()
        self.log_id = b""
        self.last: tuple[Taken, int] | None = None  # with the sum of the partitions' ends
        self.error: Exception | None = None
        self.lock = threading.Lock()  # held for one look; a second thread that asks waits for its result


class Sampler(NotCopyable):
    """Takes samples of the topics that are asked for. `close` ends its thread."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._series: dict[str, _Series] = {}
        self._wanted = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None

    def taken(self, name: str) -> Taken:
        """A look at the topic that is at most three seconds old. Raises what the look has raised."""
        series = self._asked_for(name)
        with series.lock:
            if series.last is None or monotonic() - series.taken_at > max(_FRESH_S, series.due - series.taken_at):
                self._take(name, series)
            if series.error is not None:
                raise series.error
            assert series.last is not None
            return series.last[0]

    def samples(self, name: str, after_us: int = 0) -> list[Sample]:
        """The samples of the topic that are younger than a time, oldest first."""
        return [each for each in list(self._asked_for(name).samples) if each.time_us > after_us]

    def rate_now(self, name: str) -> tuple[float | None, float | None]:
        """Records and bytes per second in the last seconds; None until there are two samples."""
        series = self._asked_for(name)
        since = time.time_ns() // 1000 - int(_NOW_S * 1e6)
        recent = [each for each in list(series.samples) if each.time_us >= since]
        return _mean(each.records_per_s for each in recent), _mean(each.bytes_per_s for each in recent)

    def close(self) -> None:
        """End the thread."""
        with self._wanted:
            self._ended = True
            self._wanted.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(5.0)

    def _asked_for(self, name: str) -> _Series:
        with self._wanted:
            series = self._series.setdefault(name, _Series())
            series.asked = monotonic()
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._run, name="loglib-ui-samples", daemon=True)
                self._thread.start()
            self._wanted.notify_all()
            return series

    def _run(self) -> None:
        try:
            self._sample_while_asked()
        finally:
            with self._wanted:
                self._thread = None  # after a fault of this program the next question begins another one

    def _sample_while_asked(self) -> None:
        while True:
            with self._wanted:
                now = monotonic()
                self._series = {
                    name: each for name, each in self._series.items() if now - each.asked < 60 * _ASKED_S
                }  # fmt: skip
                live = {name: each for name, each in self._series.items() if now - each.asked < _ASKED_S}
                due = [(name, each) for name, each in live.items() if each.due <= now]
                if not due and not self._ended:
                    soonest = min((each.due for each in live.values()), default=None)
                    self._wanted.wait(None if soonest is None else max(0.01, min(soonest - now, EVERY_S)))
                if self._ended:
                    return
            for name, series in due:
                if series.lock.acquire(blocking=False):
                    try:
                        if series.due <= monotonic():  # no other thread has taken it meanwhile
                            self._take(name, series)
                    finally:
                        series.lock.release()

    def _take(self, name: str, series: _Series) -> None:
        began = monotonic()
        try:
            self._topics.ask(name, lambda topic: _add_sample(topic, series))
            series.error = None
        except (LogError, OSError, ValueError) as error:
            series.error, series.last = error, None
        series.taken_at = monotonic()
        series.due = series.taken_at + max(EVERY_S, (series.taken_at - began) * _SHARE)


def _mean(rates: Iterable[float | None]) -> float | None:
    known = [each for each in rates if each is not None]
    return sum(known) / len(known) if known else None


def _add_sample(topic: Topic, series: _Series) -> None:
    if topic.log_id != series.log_id:  # it was replaced
        series.counts, series.log_id, series.last = RecordCounts(), topic.log_id, None
        series.samples.clear()
    stats = GroupedTopic.stats(topic)  # without those of shares, which shares.py looks at, one by one
    count = NOTHING if series.last is None else series.counts.step(topic, _COUNT_S)  # a person waits for the first
    end = sum(each.high_watermark for each in stats.partitions)
    bytes_per_s = records_per_s = None
    if series.last is not None:
        before, end_before = series.last
        seconds = max(stats.taken_at - before.stats.taken_at, 1e-3)
        bytes_per_s = max(0, end - end_before) / seconds
        if before.counted is not NOTHING:
            records_per_s = (count.appended - before.counted.appended) / seconds
    lags = {name: total_lag(each.values()) for name, each in stats.lag.items()}
    series.samples.append(
        Sample(
            time.time_ns() // 1000, stats.size_bytes, bytes_per_s, records_per_s,
            {name: lag.bytes for name, lag in lags.items()}, {name: lag.seconds for name, lag in lags.items()},
        )
    )  # fmt: skip
    series.last = Taken(stats, count), end
