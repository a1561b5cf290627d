"""Topics for tests of streaming queries: what is appended to them, and what the core reads."""

from pathlib import Path
from typing import Any

import pytest
from spark_logs import Row, all_rows, in_order

from conftest import NOW, QUIET
from loglib import testing


def append(path: Path, values: list[bytes], **arguments: Any) -> None:
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        topic.append_many(values, **arguments)


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"%d" % each for each in range(start, stop)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A topic of three partitions with ten batches of ten records: 0 to 9 in partition 0, 10 to 19 in 1, ..."""
    with testing.open_topic(tmp_path / "topic", partitions=3, clock=lambda: NOW, **QUIET) as topic:
        for each in range(10):
            topic.append_many(numbered(each * 10, each * 10 + 10), partition=each % 3)
            topic.flush()
    return tmp_path / "topic"


def plain(rows: list[Row]) -> list[Row]:
    return in_order(rows)


def core_rows(path: Path) -> list[Row]:
    return [{name: row[name] for name in ("topic", "partition", "offset", "value")} for row in all_rows(path)]
