"""Exporter: a collector for `prometheus_client` of the topics at some paths, whichever are there when it is asked.

    registry.register(PathCollector(["/srv/topics"]))

Invariant: a topic is open only while it is asked, so topics may come, go, move and be replaced at any time, and no
descriptor is kept. A topic that is damaged or may not be read takes no figure from another one; its own `loglib_up` is
then 0. The figures are those of `TopicCollector`, without those that count what this process appends,
and what `health` sees. Each has the labels `directory` and `topic`, so topics of one name in two directories differ.

Threads: one collection at a time. A collection that must wait for a disk that hangs makes later ones return nothing,
so threads of a server do not pile up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from ..config.extras import named_extras
from ..errors import CorruptLogError, LogError
from ..log import catalog, topic_file
from ..system.files import REAL
from ..system.not_copyable import NotCopyable
from ..topic import Topic
from .health import copies_of, rooms_of, writers_of
from .prometheus import metrics_of
from .sources import TakenStats

with named_extras():
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

__all__ = ["PathCollector"]

_PATIENCE_S = 5.0  # how long a collection waits for the one before it
_OF_A_PROCESS = (
    "loglib_unflushed_bytes", "loglib_appended_records", "loglib_appended_bytes", "loglib_flush_duration_seconds",
    "loglib_group_handed_out_records",
)  # fmt: skip
_GAUGES = {
    "loglib_up": "1 if all of the topic could be looked at.",
    "loglib_damage": "Places of damage at the ends of the partitions, by a look at a few bytes of each.",
    "loglib_disk_free_bytes": "Free bytes of the file system at a path of the topic.",
    "loglib_disk_size_bytes": "All bytes of the file system at a path of the topic.",
    "loglib_writer": "1 if a process has the partition open for writing (Linux).",
    "loglib_copy_up": "1 if the copy, a replica or a mirror, can be read and belongs to the topic.",
    "loglib_copy_lag_bytes": "Bytes that the copy lacks.",
    "loglib_copy_lag_seconds": "Age of the next record of the copy.",
}

Look = Callable[["_Samples", Topic], None]


class PathCollector(NotCopyable, Collector):
    """The figures of topics, and of all topics in directories of topics, at the moment of each scrape."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """`paths`: of topics, or of directories of topics. They need not exist yet."""
        self._paths = [os.path.abspath(os.fsdecode(each)) for each in paths]
        self._one_at_a_time = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """No names: registering the collector reads no topic."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The present figures. None if a collection before this one still waits for a disk."""
        if not self._one_at_a_time.acquire(timeout=_PATIENCE_S):
            return []
        try:
            samples = _Samples()
            for path in dict.fromkeys(each for given in self._paths for each in _topics_at(given)):
                samples.take(path)
            return samples.families()
        finally:
            self._one_at_a_time.release()


def _topics_at(path: str) -> list[str]:
    """The topic at a path, or all topics in that directory. The path itself if there is none: it is not up."""
    with suppress(LogError, OSError):
        if not topic_file.exists(REAL, path):
            return [os.path.join(path, name) for name in catalog.names(REAL, path)] or [path]
    return [path]


class _Samples:
    """The samples of one collection, by the name of their metric."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {name: Metric(name, text, "gauge") for name, text in _GAUGES.items()}
        self._labels: dict[str, str] = {}  # of the topic that is looked at
        self._damage: set[tuple[str, int]] = set()  # of that topic: files, and places in them

    def families(self) -> list[Metric]:
        return list(self._families.values())

    def take(self, path: str) -> None:
        """Add the samples of the topic at a path."""
        is_up = self._look(path)
        if self._damage:  # a topic that is being deleted, or made again, looks damaged for a moment
            again = _Samples()
            again._look(path)
            self._damage &= again._damage
        self.add("loglib_up", is_up)
        self.add("loglib_damage", len(self._damage))

    def _look(self, path: str) -> bool:
        """Add the samples of what is found, and note damage. False if it was not all found."""
        directory, name = os.path.split(path)
        self._labels, self._damage = {"directory": _text(directory), "topic": _text(name)}, set()
        is_up = False
        try:
            with Topic.open(path, mode="r") as topic:
                is_up = not [look for look in _LOOKS if not self._looked(look, topic)]  # each one is looked at
        except CorruptLogError as error:
            self._damage.add((error.path, error.file_position))
        except (LogError, OSError, ValueError):  # gone, of a newer format, or not for this user
            pass
        return is_up

    def _looked(self, look: Look, topic: Topic) -> bool:
        try:
            look(self, topic)
        except CorruptLogError as error:
            self.add_damage([(error.path, error.file_position)])
            return False
        except (LogError, OSError):
            return False
        return True

    def add(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Add one sample with the labels of the topic, and more."""
        more = {key: _text(each) for key, each in (labels or {}).items()}
        self._families[name].add_sample(name, self._labels | more, value)

    def add_family(self, metric: Metric) -> None:
        """Add the samples of a metric that another collector has made."""
        family = self._families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        family.samples += [each._replace(labels=self._labels | each.labels) for each in metric.samples]

    def add_damage(self, places: Iterable[tuple[str, int]]) -> None:
        self._damage.update(places)


def _text(name: str) -> str:
    """A name of a file as a label, which is UTF-8."""
    return os.fsencode(name).decode(errors="replace")


# --- the looks ---------------------------------------------------------------------------------------


def _figures(samples: _Samples, topic: Topic) -> None:
    stats = topic.stats()
    samples.add_damage((each.path, each.file_position) for each in stats.damaged)
    for metric in metrics_of(TakenStats([stats])):
        if metric.name not in _OF_A_PROCESS:
            samples.add_family(metric)


def _damage(samples: _Samples, topic: Topic) -> None:
    samples.add_damage((each.path, each.file_position) for each in topic.verify(tail_only=True).damage)


def _rooms(samples: _Samples, topic: Topic) -> None:
    for path, room in rooms_of(topic).items():
        samples.add("loglib_disk_free_bytes", room.free, {"path": path})
        samples.add("loglib_disk_size_bytes", room.total, {"path": path})


def _writers(samples: _Samples, topic: Topic) -> None:
    for number, is_written in (writers_of(topic) or {}).items():
        samples.add("loglib_writer", is_written, {"partition": str(number)})


def _copies(samples: _Samples, topic: Topic) -> None:
    for each in copies_of(topic):
        labels = {"copy": each.path}
        samples.add("loglib_copy_up", each.lag is not None, labels)
        if each.lag is not None:
            samples.add("loglib_copy_lag_bytes", each.lag.bytes, labels)
            samples.add("loglib_copy_lag_seconds", each.lag.seconds, labels)


_LOOKS: Sequence[Look] = (_figures, _damage, _rooms, _writers, _copies)
