"""G25: in one world with many features, every way of reading gives what was acknowledged, once, in order, nothing else.

A world has features drawn by its seed, each of which it meets at least once: policies, steps inside an open topic, and
events between two openings, such as a kill, a promotion, or a store of transactions that is restored from an older
backup. After each event one oracle is compared with all ways of reading. Each pair of features that the documents allow
together is met.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from counts import count, count_pairs, scale
from sample import CASES
from worlds.draw import draw, features, pairs, possible
from worlds.run import run_world

from loglib import Topic
from loglib.transactions.apply import Applier

SHARDS = 20
WORLDS = 100  # per shard


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Warnings about what a world does on purpose would fill the memory."""
    logger = logging.getLogger("loglib")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def seeds_of(shard: int) -> range:
    return range(shard, scale(WORLDS) * SHARDS, SHARDS)


@pytest.mark.reliability
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_way_of_reading_gives_what_was_acknowledged(shard: int, tmp_path: Path) -> None:
    met = Counter({" + ".join(sorted(pair)): 0 for pair in possible(features())})
    steps = values = worlds = 0
    for seed in seeds_of(shard):
        done = run_world(seed, tmp_path)
        met.update(done.pairs)
        steps, values, worlds = steps + done.steps, values + done.values, worlds + 1
    count_pairs("G25", met)
    count("G25", worlds=worlds, steps=steps, values=values, lost=0, invented=0, wrong=0)


def test_worlds_of_the_sample_meet_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the sample fails for a pair that no world could meet, after all else has passed."""
    monkeypatch.setenv("LOGLIB_SOAK", "0.2")  # as `make proof-sample` has it
    met = {pair for shard in range(0, SHARDS, CASES) for seed in seeds_of(shard) for pair in pairs(draw(seed))}
    assert met >= {name for pair in possible(features()) for name in pairs(pair)}


# --- the proof can fail ------------------------------------------------------------------------------------------


def _acknowledge_what_is_not_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Topic, "flush", lambda topic: None)


def _end_a_pass_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Applier, "run", lambda *given, **named: None)


MISTAKES = {
    "a flush does nothing": (_acknowledge_what_is_not_flushed, {"groups"}),
    "a transaction is committed and not applied": (_end_a_pass_too_early, {"tx"}),
}


@pytest.mark.parametrize(("mistake", "on"), MISTAKES.values(), ids=MISTAKES.keys())
def test_world_finds_a_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None], on: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_world(1, tmp_path / "right", frozenset(on))
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="world 1 with"):
        run_world(1, tmp_path / "wrong", frozenset(on))
