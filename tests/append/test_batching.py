"""append/batching.py: many records in one call: all of them or none, in batches of about the configured size."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from builders import calm
from hypothesis import example, given
from hypothesis import strategies as st

from loglib import RecordTooLargeError, Topic
from loglib.append import batching
from loglib.append.batching import encode_all
from loglib.config.policies import TopicConfig
from loglib.format.columns import Columns

Open = Callable[..., Topic]
MANY = [b"%d" % number for number in range(3 * batching.MANY)]


def values_of(topic: Topic) -> list[bytes | None]:
    topic.flush()
    return [record.value for record in topic.read()]


def test_many_records_come_back_in_order(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=1000)
    ranges = topic.append_many(MANY)
    assert values_of(topic) == MANY
    assert [offset for _, offsets in ranges for offset in offsets] == [record.offset for record in topic.read()]


@pytest.mark.parametrize("ahead_bytes", [0, 2000, 16 << 20], ids=["checked first", "in part ahead", "all ahead"])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("text", TypeError, "value must be bytes, not str; encode it first"),
        (7, TypeError, "value must be bytes or None, not int"),
        (b"x" * 3001, RecordTooLargeError, f"record {len(MANY)} "),
    ],
    ids=["str", "int", "too large"],
)
def test_refused_value_leaves_the_log_as_it_was(
    wrong: Any,
    error: type[Exception],
    message: str,
    ahead_bytes: int,
    open_topic: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching, "_AHEAD_BYTES", ahead_bytes)
    topic = open_topic(partitions=3, batch_bytes=1000, max_record_bytes=3000)
    topic.append(b"before", partition=0)
    for keys in (None, [b"%d" % number for number in range(len(MANY) + 1)]):
        with pytest.raises(error, match=message if keys is None or error is TypeError else "record "):
            topic.append_many([*MANY, wrong], keys=keys)
    assert values_of(topic) == [b"before"]


def test_what_has_bytes_but_is_not_bytes_is_taken_as_its_bytes(open_topic: Open) -> None:
    topic = open_topic()
    odd: list[Any] = [bytearray(b"array"), memoryview(b"view"), None, memoryview(array("H", [1, 2]))]
    topic.append_many([*MANY, *odd], keys=[*MANY, *odd], partition=0)
    assert values_of(topic)[-4:] == [b"array", b"view", None, array("H", [1, 2]).tobytes()]
    assert [record.key for record in topic.read()][-4:] == [b"array", b"view", None, array("H", [1, 2]).tobytes()]


def test_value_changed_after_the_call_is_kept_as_it_was(open_topic: Open) -> None:
    topic = open_topic()
    value: Any = bytearray(b"as given")
    topic.append_many([*MANY, value])
    value[:] = b"changed!"
    assert values_of(topic)[-1] == b"as given"


@calm
@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 1, 50, 900, 5000])), min_size=1, max_size=8),
    st.integers(0, 20_000),
    st.booleans(),
)
@example([(40, 1), (40, 5000)], 0, True)
def test_batches_are_about_as_large_as_configured(runs: list[tuple[int, int]], ahead_bytes: int, keyed: bool) -> None:
    values = [bytes([index % 256]) * size for index, (count, size) in enumerate(runs) for _ in range(count)]
    config = TopicConfig(batch_bytes=4000, batch_records=64, max_record_bytes=10_000)
    columns = Columns(values, [b"k"] * len(values) if keyed else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_AHEAD_BYTES", ahead_bytes)
        bodies = [body for _, body in encode_all({"only": columns}, config, 0)]
    assert sum(body.record_count for body in bodies) == len(values)
    assert sum(body.value_bytes for body in bodies) == sum(map(len, values))
    assert max(body.record_count for body in bodies) <= config.batch_records
    assert max(body.value_bytes for body in bodies) <= 2 * config.batch_bytes


def test_groups_are_given_in_turn() -> None:
    groups = {name: Columns([name.encode()] * batching.MANY) for name in ("a", "b")}
    assert [name for name, _ in encode_all(groups, TopicConfig(batch_records=600), 0)] == ["a", "a", "b", "b"]


def test_headers_go_with_their_records(open_topic: Open) -> None:
    topic = open_topic(batch_bytes=4000)
    headers = [{"number": value} if number % 3 else None for number, value in enumerate(MANY)]
    topic.append_many(MANY, headers=headers)
    topic.flush()
    found = [(record.value, dict(record.headers) or None) for record in topic.read()]
    assert found == list(zip(MANY, headers, strict=True))
