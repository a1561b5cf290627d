"""G20: power cuts in programs that write a topic and mirror it."""

from __future__ import annotations

import pytest
from counts import count, scale
from mirror_programs import MirrorProgram
from roomy import room_by_chance

pytestmark = pytest.mark.reliability

SHARDS = 2
PROGRAMS = 8  # per shard
STREAM_PROGRAMS = 6
EVERY = 9  # of a program's states, which are some thousands


@pytest.mark.parametrize("shard", range(SHARDS))
def test_power_cut_in_a_mirror(shard: int) -> None:
    for seed in range(shard, scale(PROGRAMS) * SHARDS, SHARDS):
        with room_by_chance(seed):
            judged = MirrorProgram(1000 + seed).judge_cuts(EVERY)
        count("G20", mirror_programs=1, crash_states=judged.states, records_shown=judged.shown, wrong=0, lost=0)


def test_power_cut_in_a_mirror_over_a_stream() -> None:
    for seed in range(scale(STREAM_PROGRAMS)):
        judged = MirrorProgram(2000 + seed, over_a_stream=True).judge_cuts(EVERY * 4)
        count("G20", stream_programs=1, crash_states=judged.states, records_shown=judged.shown, wrong=0, lost=0)
