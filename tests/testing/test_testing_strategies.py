"""The strategies draw nothing that is refused."""

from __future__ import annotations

from typing import Any

from builders import calm
from hypothesis import given

from loglib import testing
from loglib.testing import MemoryFiles
from loglib.testing.strategies import Call, batches, policies, records, workloads


@calm
@given(policies(), workloads())
def test_workload_is_accepted_and_read_back(chosen: dict[str, Any], calls: list[Call]) -> None:
    expected: list[bytes | None] = []
    with testing.open_topic("/topic", files=MemoryFiles(), **chosen) as topic:
        for name, arguments in calls:
            getattr(topic, name)(**arguments)
            expected += arguments.get("values", [arguments["value"]] if "value" in arguments else [])
        topic.flush()
        found = [record.value for record in topic.read()]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))


@calm
@given(records(max_bytes=5), batches(max_records=3, max_bytes=5))
def test_sizes_are_within_what_was_asked_for(record: dict[str, Any], batch: dict[str, Any]) -> None:
    assert len(record["value"] or b"") <= 5
    assert len(batch["values"]) <= 3
    assert {len(column) for column in batch.values()} == {len(batch["values"])}
