"""The golden topics for tests: what was written into them, and copies that a test may change."""

import json
import shutil
from pathlib import Path

import pytest
from make_golden import GOLDEN

from loglib import Record, Topic


def _unhexed(item: str | None) -> bytes | None:
    return None if item is None else bytes.fromhex(item)


def golden_records(name: str) -> list[Record]:
    return [
        Record(
            partition, offset, timestamp, _unhexed(key), _unhexed(value),
            tuple((name, bytes.fromhex(value)) for name, value in headers), next_offset,
        )
        for partition, offset, timestamp, key, value, headers, next_offset in json.loads(
            (GOLDEN / f"{name}.json").read_text("utf-8")
        )
    ]  # fmt: skip


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the golden topics, to open and to damage."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def read_all(path: Path) -> list[Record]:
    with Topic.open(path, mode="r") as topic:
        return [record for partition in topic.partitions for record in partition.read()]
