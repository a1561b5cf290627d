"""G21: healing brings back what another copy has, takes nothing from a wrong one, and can be cut at any instant.

Logs with damage of every kind are healed on a `CrashFS` from a healthy copy, a damaged one, an older one, one that was
split off and went on with other records, and one of another log. The disk is cut at instants of the healing, and each
state is healed again. No byte that was whole changes, no byte is anything but what it was before the damage, and a
healthy copy brings back every byte below the mark.
"""

from random import Random

import pytest
from counts import count, scale
from healed import HEALTHY, KINDS, beside, copies, healed, judge

from loglib.testing import CrashState

pytestmark = pytest.mark.reliability

SHARDS = 2
LOGS = 90  # per shard
STATES = 5  # of each healing


@pytest.mark.parametrize("shard", range(SHARDS))
def test_healing_that_is_cut_is_repeated(shard: int) -> None:
    figures = dict.fromkeys(("healings", "hopeless", "records_back", "cut_healings"), 0)
    for seed in range(shard, scale(LOGS) * SHARDS, SHARDS):
        random = Random(seed)
        given = copies(random)
        others = random.sample(KINDS[1:], random.randrange(1, 4))
        for names in (others, random.sample([HEALTHY, *others], 1 + len(others))):
            files = beside(given.tree, given.donors, names)
            report = healed(files, names)
            if report is None:
                figures["hopeless"] += 1
                continue
            states = chosen(list(files.crash_states(seed=seed, mode=random.choice(("strict", "linux")))), random)
            figures["healings"] += 1
            figures["records_back"] += judge(files, report, given, names)
            for state in states:
                cut = state.files
                try:
                    report = healed(cut, names)
                    assert report is not None
                    judge(cut, report, given, names)
                except AssertionError as error:
                    raise AssertionError(f"log {seed}, {given.kinds}, from {names}: {state!r}") from error
                figures["cut_healings"] += 1
    count("G21", lost=0, invented=0, wrong=0, **figures)


def chosen(states: list[CrashState], random: Random) -> list[CrashState]:
    """Some of the states, of instants in the whole healing."""
    return random.sample(states, min(len(states), STATES))
