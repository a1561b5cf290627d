"""G19: a repair loses nothing that can be read, wherever a power cut ends it.

Logs with damage of every kind are repaired on a `CrashFS`, and the disk is cut at instants of the repair. Each state
is repaired again. Then everything that could be read before is read, at the same offsets, a gap hides no record, and
every record that is lost stands in a declared gap. A writer appends behind it all.
"""

from random import Random

import pytest
from counts import count, scale
from damaged import damage, files_with, judge, repaired, rows_of, whole_log

from loglib.testing import CrashState

pytestmark = pytest.mark.reliability

SHARDS = 2
LOGS = 300  # per shard
STATES = 6  # of each repair


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_repair_that_is_cut_is_repeated(shard: int) -> None:
    figures = dict.fromkeys(("repairs", "hopeless", "lost_to_damage", "cut_repairs"), 0)
    for seed in range(shard, scale(LOGS) * SHARDS, SHARDS):
        random = Random(seed)
        whole = whole_log(random)
        tree, kinds = damage(whole.tree, random)
        before = rows_of(files_with(tree), on_damage="skip")
        files = files_with(tree)
        report = repaired(files)
        if report is None:
            figures["hopeless"] += 1
            assert before is None or not before, kinds
            continue
        states = chosen(list(files.crash_states(seed=seed, mode=random.choice(("strict", "linux")))), random)
        figures["repairs"] += 1
        figures["lost_to_damage"] += judge(files, report, whole, before, kinds)
        for state in states:
            cut = state.files
            report = repaired(cut)
            assert report is not None, f"{seed}, {kinds}: {state!r}"
            try:
                judge(cut, report, whole, before, kinds)
            except AssertionError as error:
                raise AssertionError(f"log {seed}, {kinds}: {state!r}") from error
            figures["cut_repairs"] += 1
    count("G19", lost=0, invented=0, hidden=0, **figures)


def chosen(states: list[CrashState], random: Random) -> list[CrashState]:
    """Some of the states, of instants in the whole repair."""
    return random.sample(states, min(len(states), STATES))
