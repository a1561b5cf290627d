"""config/policies.py: a policy that exists has passed its checks, and comes back from JSON as it was."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from builders import calm
from hypothesis import given
from hypothesis import strategies as st

from conftest import alter
from loglib import FlushPolicy, Retention, Topic, TopicConfig
from loglib.config.policies import MAX_BATCH_BYTES, MAX_RECORDS_PER_BATCH
from loglib.config.quantities import microseconds

NAN = float("nan")
WRONG: list[tuple[type, str, list[Any]]] = [
    (FlushPolicy, "records", [0, -1, 1.5, 1e4, True]),
    (FlushPolicy, "interval", [0, -0.1, NAN, float("inf"), True, "1", "1 s", -timedelta(seconds=1)]),
    (FlushPolicy, "bytes", [0, -1, 1e6]),
    (Retention, "age", [timedelta(0), timedelta(seconds=-1), 0, "7", True, float("inf")]),
    (Retention, "bytes", [-1, 1e9]),
    (Retention, "hold_for", [["etl"], "etl", ["a/b"], [".."], [""], [7], 7]),
    (Retention, "hold_age", [timedelta(days=9), timedelta(0), 7]),
    (Retention, "hold_bytes", [1000, -1, 1e9]),
    (Retention, "keep_free", [-0.1, 1, 2.0, NAN, "0.1", None, True]),
    (TopicConfig, "flush", [5, None, "often", {"records": 1}]),
    (TopicConfig, "retention", [7, None, timedelta(days=7), {}]),
    (TopicConfig, "partitions", [0, -1, 10_001, 1.0, True, "8"]),
    (TopicConfig, "partitioner", ["", "a b", "1st", "<lambda>", "by_größe", "a\n", "x" * 101, None, 5, [], b"crc32"]),
    (TopicConfig, "segment_bytes", [0, 4095, 1e9, "4095", "1 XB", ""]),
    (TopicConfig, "segment_age", [timedelta(0), timedelta(-1), 0, "1 hour", b"1h"]),
    (TopicConfig, "producer_expiry", [timedelta(0), timedelta(-1), 0, "1 hour", b"1h"]),
    (TopicConfig, "compression", ["gzip", "", None, 1]),
    (TopicConfig, "durability", ["memory", "", None]),
    (TopicConfig, "batch_bytes", [0, MAX_BATCH_BYTES // 2 + 1, 1e6]),
    (TopicConfig, "batch_records", [0, MAX_RECORDS_PER_BATCH + 1, 1e4]),
    (TopicConfig, "max_record_bytes", [0, MAX_BATCH_BYTES // 2 + 1, 1e4]),
    (TopicConfig, "permissions", [0, 0o400, 0o700, 0o1600, 0o777, -1]),
]
CASES = [
    pytest.param(policy, name, value, id=f"{policy.__name__}.{name}={value}")
    for policy, name, values in WRONG
    for value in values
]


@pytest.mark.parametrize(("policy", "name", "value"), CASES)
def test_value_that_makes_no_sense_is_refused_by_name(policy: type, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        policy(**{name: value})


def test_policy_of_another_type_leaves_the_description_of_a_topic_alone(tmp_path: Any) -> None:
    """It was written to topic.json, after which nobody could open the topic any more."""
    Topic.open(tmp_path / "topic", create=True).close()
    wrongs: list[dict[str, Any]] = [{"flush": 5}, {"retention": 7}, {"segment_age": "often"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            alter(tmp_path / "topic", **wrong)
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Topic.open(tmp_path / "new", create=True, **wrong)
    with Topic.open(tmp_path / "topic") as topic:
        assert topic.config == TopicConfig()
    Topic.create(tmp_path / "new").close()


def test_float_is_refused_when_the_topic_is_opened_and_not_at_the_first_append(tmp_path: Any) -> None:
    # records=1e4 broke the first append; partitions=2.0 left a half-made topic behind.
    with pytest.raises(ValueError, match="a whole number"):
        Topic.open(tmp_path / "topic", create=True, flush=FlushPolicy(records=1e4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a whole number"):
        Topic.open(tmp_path / "topic", create=True, partitions=2.0)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("duration", "expected"),
    [(1, 1_000_000), (0.05, 50_000), (1e-6, 1), (timedelta(days=1, microseconds=1), 86_400_000_001), (-1.5, -1500000)],
)
def test_durations_are_whole_microseconds(duration: float | timedelta, expected: int) -> None:
    assert microseconds(duration) == expected


AGES = st.none() | st.timedeltas(timedelta(microseconds=1), timedelta(days=36500))
POLICIES = st.builds(
    TopicConfig,
    partitions=st.integers(1, 10_000),
    partitioner=st.sampled_from(["crc32", "murmur2", "by_region", "x" * 100]),
    flush=st.builds(
        FlushPolicy,
        records=st.none() | st.integers(1),
        interval=st.none() | st.floats(1e-6, 1e6),
        bytes=st.none() | st.integers(1),
    ),
    retention=st.builds(
        Retention, age=AGES, bytes=st.none() | st.integers(0, 1 << 70), keep_free=st.floats(0, 1, exclude_max=True),
        hold_for=st.lists(st.sampled_from(["etl", "x.y-z_0"]), min_size=1), hold_bytes=st.just(1 << 70),
    ),
    segment_bytes=st.integers(4096),
    segment_age=AGES,
    producer_expiry=AGES,
    compression=st.sampled_from(["none", "zlib", "lz4", "zstd"]),
    durability=st.sampled_from(["disk", "os"]),
    batch_bytes=st.integers(1, MAX_BATCH_BYTES // 2),
    batch_records=st.integers(1, MAX_RECORDS_PER_BATCH),
    max_record_bytes=st.integers(1, MAX_BATCH_BYTES // 2),
    permissions=st.sampled_from([0o600, 0o640, 0o644, 0o660, 0o666]),
)


@calm
@given(POLICIES)
def test_policies_come_back_from_json(config: TopicConfig) -> None:
    assert TopicConfig.from_json(config.to_json()) == config


def test_policies_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        TopicConfig().partitions = 3  # type: ignore[misc]


@pytest.mark.parametrize("values", [{"segment_age": "1d"}, {"retention": {"age": "7d"}}, {"flush": {"bytes": "1MB"}}])
def test_text_is_for_callers_and_not_for_stored_policies(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be a number"):
        TopicConfig.from_json(values)
