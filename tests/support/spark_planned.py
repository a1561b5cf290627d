"""A topic for tests of plans for Spark."""

from pathlib import Path

import pytest
from spark_logs import random_topic


@pytest.fixture(scope="module")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic that no test changes: two partitions, several segments each."""
    return random_topic(tmp_path_factory.mktemp("logs") / "topic", seed=1, batches=80)
