"""Strategies: records and topics for tests with Hypothesis.

Invariant: each call accepts all arguments that are drawn for it. The names are the call's own argument names,
so `topic.append(**record)` and `Topic.open(path, **policies)` work directly.

    @given(workload=workloads())
    def test_nothing_is_lost(workload):
        with open_topic("/log", files=MemoryFiles()) as topic:
            for name, arguments in workload:
                getattr(topic, name)(**arguments)

This module needs Hypothesis; the rest of loglib does not.
"""

from __future__ import annotations

from typing import Any

from ..config.extras import named_extras
from ..config.policies import FlushPolicy, Retention

with named_extras():
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy

# The name of a method of `Topic`, and its arguments.
Call = tuple[str, dict[str, Any]]

_TIMESTAMPS = st.integers(-(1 << 60), 1 << 60)  # about 36,000 years before and after 1970


def values(*, max_bytes: int = 100) -> SearchStrategy[bytes | None]:
    """Values: mostly short bytes, sometimes null (which differs from the empty value)."""
    return st.none() | st.binary(max_size=max_bytes)


def keys() -> SearchStrategy[bytes | None]:
    """Keys: only a few different ones, so that keys repeat."""
    return st.none() | st.sampled_from([b"", b"a", b"b", b"c", b"key"])


def _headers() -> SearchStrategy[list[tuple[str, bytes]]]:
    name = st.text(st.characters(codec="utf-8"), max_size=5)
    return st.lists(st.tuples(name, st.binary(max_size=10)), max_size=3)


def records(*, max_bytes: int = 100) -> SearchStrategy[dict[str, Any]]:
    """Arguments of `append`: a value, and any of key, timestamp and headers."""
    return st.fixed_dictionaries(
        {"value": values(max_bytes=max_bytes)},
        optional={"key": keys(), "timestamp": _TIMESTAMPS, "headers": _headers()},
    )


@st.composite
def batches(draw: st.DrawFn, *, max_records: int = 20, max_bytes: int = 100) -> dict[str, Any]:
    """Arguments of `append_many`: a column of values, and any of the other columns with the same length."""
    size = draw(st.integers(0, max_records))

    def column(of: SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(of, min_size=size, max_size=size))

    batch: dict[str, Any] = {"values": column(values(max_bytes=max_bytes))}
    for name, of in (("keys", keys()), ("timestamps", _TIMESTAMPS), ("headers", _headers())):
        if draw(st.booleans()):
            batch[name] = column(of)
    return batch


def policies() -> SearchStrategy[dict[str, Any]]:
    """Arguments of `Topic.open` for a new topic: segments and batches are small, so that little data fills many.

    No policy depends on the clock, so no thread is started and a failure can be repeated.
    """
    counts = st.none() | st.integers(1, 10)
    sizes = st.none() | st.integers(1, 10).map(lambda count: 100 * count)
    return st.fixed_dictionaries(
        {
            "partitions": st.integers(1, 3),
            "flush": st.builds(FlushPolicy, records=counts, interval=st.none(), bytes=sizes),
            "retention": st.just(Retention(age=None)),
            "segment_age": st.none(),
            "segment_bytes": st.sampled_from([4096, 8192, 1 << 20]),
        },
        optional={
            "batch_bytes": st.integers(100, 10_000),
            "batch_records": st.integers(1, 100),
            "compression": st.sampled_from(["none", "zlib"]),
            "durability": st.sampled_from(["disk", "os"]),
        },
    )


def workloads(*, max_calls: int = 10) -> SearchStrategy[list[Call]]:
    """Calls of a topic's methods, in order."""
    calls = st.one_of(
        st.tuples(st.just("append"), records()),
        st.tuples(st.just("append"), records().map(lambda record: record | {"sync": True})),
        st.tuples(st.just("append_many"), batches()),
        st.just(("flush", dict[str, Any]())),
    )
    return st.lists(calls, max_size=max_calls)
