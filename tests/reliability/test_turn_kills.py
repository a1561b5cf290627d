"""G12: processes take turns at the partitions of a topic, and are killed and stopped at any moment.

What was acknowledged with sync=True is in the log, once and where its append said. What was refused is not there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from counts import count, scale
from roomy import with_room
from turn_chaos import KILLS_PER_ROUND, campaign

pytestmark = pytest.mark.reliability

SHARDS = 8
KILLS, STOPS = 5000, 1000  # of all shards


@pytest.mark.parametrize("shard", range(SHARDS))
def test_killed_and_stopped_processes_that_take_turns_lose_nothing(shard: int, tmp_path: Path) -> None:
    kills, stops = (scale(each // SHARDS) for each in (KILLS, STOPS))
    with with_room(4096 * (shard % 2)):
        done = campaign(tmp_path, shard, kills=max(kills, KILLS_PER_ROUND), stops=stops)
    count(
        "G12", turn_kills=done["kills"], turn_stops=done["stops"], turn_processes=done["processes"],
        turn_records=done["records"], lost=0, wrong=0,
    )  # fmt: skip
