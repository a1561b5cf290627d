"""metrics/: what Prometheus and OpenTelemetry get is what the topic's figures say."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import spoil
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from conftest import MANUAL
from loglib import Topic, group
from loglib.metrics import sources
from loglib.metrics.opentelemetry import instrument
from loglib.metrics.prometheus import TopicCollector


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each export of a test takes the figures again."""
    monkeypatch.setattr(sources, "_FRESH_S", 0.0)


def exported(reader: InMemoryMetricReader) -> dict[str, dict[tuple[Any, ...], Any]]:
    """The points by instrument, and by the values of their attributes."""
    data = reader.get_metrics_data()
    found: dict[str, dict[tuple[Any, ...], Any]] = {}
    for each in [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics:
        for point in each.data.data_points:
            named = sorted((point.attributes or {}).items())
            values = tuple(str(value) for name, value in named if name != "messaging.system")
            found.setdefault(each.name, {})[values] = point
    return found


def test_prometheus_gets_the_figures(path: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with Topic.open(path, create=True, partitions=2, flush=MANUAL) as topic, topic.group("etl") as member:
        registry.register(TopicCollector([topic], [member]))
        topic.append_many([b"x"] * 7, partition=1)
        topic.flush()
        assert len(member.poll(timeout=5)) == 7
        stats = topic.stats()
        labels = {"topic": "topic", "partition": "1"}
        sample = registry.get_sample_value
        second = stats.partitions[1]
        assert sample("loglib_appended_records_total", labels) == 7
        assert sample("loglib_size_bytes", labels) == second.size_bytes == sample("loglib_appended_bytes_total", labels)
        assert sample("loglib_oldest_timestamp_seconds", labels) == (second.oldest or 0) / 1e6
        assert sample("loglib_newest_timestamp_seconds", labels) == (second.newest or 0) / 1e6
        for which in ("oldest", "newest"):
            assert sample(f"loglib_{which}_timestamp_seconds", labels | {"partition": "0"}) is None
        assert sample("loglib_flush_duration_seconds_count", labels) == 1
        assert sample("loglib_flush_duration_seconds_sum", labels) == second.flush_times.seconds
        assert sample("loglib_flush_duration_seconds_bucket", labels | {"le": "10.0"}) == 1
        of_group = labels | {"group": "etl"}
        assert sample("loglib_group_lag_bytes", of_group) == second.size_bytes, "polled, and not yet handled"
        assert sample("loglib_group_handed_out_records_total", of_group) == 7
    text = generate_latest(registry).decode()
    assert "# TYPE loglib_flush_duration_seconds histogram" in text
    assert "loglib_size_bytes{" not in text, "the topic is closed"


def shared(topic: Topic) -> None:
    """Seven records, and a share: it has accepted one and rejected one, and one comes again in an hour."""
    topic.append_many([b"x"] * 7, partition=1)
    topic.flush()
    with topic.share("mail", member="left") as share:
        for number in range(3):
            job = share.take(5)
            assert job is not None
            calls: list[Callable[[], None]] = [job.accept, job.reject, partial(job.release, 3600)]
            calls[number]()


def test_prometheus_gets_the_figures_of_shares(path: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with Topic.open(path, create=True, partitions=2, flush=MANUAL) as topic:
        registry.register(TopicCollector([topic]))
        assert topic.stats().shares == {}
        shared(topic)
        with topic.share("mail") as share:
            job = share.take(5)
            stats = topic.stats().shares["mail"]
            sample, labels = registry.get_sample_value, {"topic": "topic", "share": "mail", "partition": "1"}
            assert sample("loglib_share_members", {"topic": "topic", "share": "mail"}) == stats.members == 1
            assert sample("loglib_share_in_hand_records", labels) == 1
            assert sample("loglib_share_free_records", labels) == sample("loglib_share_waiting_records", labels) == 1
            assert sample("loglib_share_lag_bytes", labels) == stats.partitions[1].lag.bytes > 0
            assert sample("loglib_share_lag_bytes", labels | {"partition": "0"}) == 0
            assert (sample("loglib_share_lag_seconds", labels) or 0) > 0
            assert sample("loglib_share_oldest_unsettled_seconds", labels) is not None
            for result, count in {"accepted": 1, "rejected": 1, "exhausted": 0, "lost": 0}.items():
                assert sample("loglib_share_settled_records_total", labels | {"result": result}) == count
            assert stats.oldest_seconds >= stats.partitions[1].oldest_seconds >= 0
            assert stats.partitions[0].oldest is None and stats.partitions[0].oldest_seconds == 0
            assert job is not None
        topic.delete_share("mail")
        assert sample("loglib_share_members", {"topic": "topic", "share": "mail"}) is None


def test_damaged_group_or_share_takes_the_figures_of_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Topic.open(path, create=True, partitions=2, flush=MANUAL) as topic:
        shared(topic)
        for name in "broken", "whole":
            topic.reset_group(name, "begin")
            topic.share(name).close()
        for file in (path / "groups" / "broken" / "offsets").rglob("*.log"):
            spoil(file, 100)
        spoil(next((path / "shares" / "broken" / "0001").glob("*.acks")), 20)
        stats = topic.stats()
    assert len(stats.partitions) == 2 and list(stats.lag) == ["whole"] and sorted(stats.shares) == ["mail", "whole"]
    assert [os.path.relpath(each.path, path).split(os.sep)[:2] for each in stats.damaged] == [
        ["groups", "broken"], ["shares", "broken"],
    ]  # fmt: skip
    assert "group broken" in caplog.text and "share broken" in caplog.text


def test_opentelemetry_gets_the_figures_of_shares(path: Path) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    with Topic.open(path, create=True, partitions=2, flush=MANUAL) as topic:
        instrument([topic], meter_provider=provider)
        shared(topic)
        found, stats = exported(reader), topic.stats().shares["mail"]
    assert found["loglib.share.members"]["mail", "topic"].value == 0
    for name, value in {"in_hand": 0, "free": 1, "waiting": 1, "lag": stats.partitions[1].lag.bytes}.items():
        assert found[f"loglib.share.{name}"]["mail", "topic", "1"].value == value, name
    assert found["loglib.share.delay"]["mail", "topic", "1"].value > 0
    assert found["loglib.share.unsettled"]["mail", "topic", "0"].value == 0
    settled = {key: point.value for key, point in found["loglib.share.settled"].items() if point.value}
    assert settled == {("accepted", "mail", "topic", "1"): 1, ("rejected", "mail", "topic", "1"): 1}
    provider.shutdown()


def test_share_that_is_deleted_meanwhile_has_no_figures(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Topic.open(path, create=True, flush=MANUAL) as topic:
        monkeypatch.setattr(Topic, "shares", lambda _: ["just-gone"])
        assert topic.stats().shares == {}


def test_second_collector_of_the_same_names_is_refused(path: Path) -> None:
    registry = CollectorRegistry(auto_describe=False)
    with Topic.open(path, create=True) as topic:
        registry.register(TopicCollector([topic]))
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(TopicCollector([topic]))


def test_opentelemetry_gets_the_figures_by_the_names_of_its_conventions(path: Path) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    with Topic.open(
        path, create=True, flush=MANUAL
    ) as topic, Topic.open(path.with_name("other"), create=True) as other:
        with group([topic, other], "etl") as member:
            instrument([topic, other], [member], meter_provider=provider)
            topic.append_many([b"x"] * 5)
            topic.flush()
            assert len(member.poll(timeout=5)) == 5
            found = exported(reader)
        stats = topic.stats()
    assert found["messaging.client.sent.messages"]["topic", "0", "append"].value == 5
    assert found["messaging.client.consumed.messages"]["etl", "topic", "0", "follow"].value == 5
    (flush,) = found["messaging.client.operation.duration"].values()
    assert (flush.count, flush.sum) == (1, stats.flush_seconds)
    assert dict(flush.attributes) == {
        "messaging.system": "loglib", "messaging.operation.name": "flush", "messaging.operation.type": "send",
        "messaging.destination.name": "topic",
    }  # fmt: skip
    assert found["loglib.size"]["topic", "0"].value == stats.size_bytes
    assert found["loglib.group.lag"]["etl", "topic", "0"].value == stats.size_bytes
    assert found["loglib.newest"]["topic", "0"].value == stats.newest
    assert ("other", "0") not in found["loglib.oldest"] | found["loglib.newest"]
    provider.shutdown()


def test_exporters_keep_no_topic_open_and_survive_its_end(path: Path) -> None:
    reader = InMemoryMetricReader()
    provider, registry = MeterProvider([reader]), CollectorRegistry()
    topic = Topic.open(path, create=True, flush=MANUAL)
    member = topic.group("etl")
    instrument([topic], [member], meter_provider=provider)
    registry.register(TopicCollector([topic], [member]))
    assert "loglib.size" in exported(reader)
    topic.close()
    assert "loglib.size" not in exported(reader)
    reference = weakref.ref(topic)
    del topic, member
    gc.collect()
    assert reference() is None
    assert "loglib.size" not in exported(reader)
    assert generate_latest(registry)
    provider.shutdown()


def test_export_takes_the_figures_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_FRESH_S", 60.0)
    taken = 0
    original = Topic.stats

    def counted(topic: Topic) -> Any:
        nonlocal taken
        taken += 1
        return original(topic)

    monkeypatch.setattr(Topic, "stats", counted)
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    with Topic.open(path, create=True) as topic:
        instrument([topic], meter_provider=provider)
        assert len(exported(reader)) >= 4
        assert taken == 1
    provider.shutdown()


def test_figures_have_the_partitions_that_were_added(path: Path) -> None:
    registry = CollectorRegistry()
    Topic.open(path, create=True).close()
    with Topic.open(path, mode="r") as topic:
        with topic.group("etl") as member:
            assert member.poll() == []
        registry.register(TopicCollector([topic]))
        reader = InMemoryMetricReader()
        instrument([topic], meter_provider=MeterProvider([reader]))
        Topic.add_partitions(path, 2)
        with Topic.open(path) as writer:
            writer.append(b"x", partition=1)
        labels = {"topic": "topic", "partition": "1"}
        assert registry.get_sample_value("loglib_size_bytes", labels)
        assert registry.get_sample_value("loglib_group_lag_bytes", labels | {"group": "etl"})
        assert ("topic", "1") in exported(reader)["loglib.size"]
