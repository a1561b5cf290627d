"""G26: workers of a share are killed, stopped, poisoned, evicted or without room at any moment. Each job is done once.

Each record is accepted once after a handler has ended, in the order of its key, and each start of a handler is counted;
or it has one result of a transaction, or one dead letter (support/job_chaos.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from counts import count, scale
from job_chaos import transactions_harmed, workers_harmed

pytestmark = pytest.mark.reliability

SHARDS = 4
ROUNDS = 10  # of a shard
KILLS_PER_ROUND = 60  # and stops


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("order", ["none", "key"])
def test_killed_and_stopped_workers_handle_each_record(shard: int, order: str, tmp_path: Path) -> None:
    done = Counter[str]()
    for number in range(scale(ROUNDS)):
        seed = SHARDS * number + shard
        done.update(workers_harmed(tmp_path / f"{seed}", seed, order=order, count=800, kills=KILLS_PER_ROUND))
    count("G26", **done, lost=0, wrong=0)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_killed_and_stopped_workers_have_one_result_or_one_dead_letter(shard: int, tmp_path: Path) -> None:
    done = Counter[str]()
    for number in range(scale(ROUNDS)):
        seed = SHARDS * number + shard
        (tmp_path / f"{seed}").mkdir()
        done.update(transactions_harmed(tmp_path / f"{seed}" / "mail", seed, count=150, kills=KILLS_PER_ROUND))
    count("G26", **done, lost=0, wrong=0)
