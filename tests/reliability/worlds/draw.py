"""Draw: which features a world has, and the matrix of the pairs that worlds have met.

Invariant: the same seed draws the same features. What the documents exclude is never drawn together.

A feature is a policy, a step inside an open topic, or an event between two openings. A world does each of its steps and
events at least once. So a pair of its features is met when the world is over.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
from random import Random
from typing import TypeVar

__all__ = ["FEATURES", "OFF", "Choice", "draw", "features", "pairs", "possible"]

T = TypeVar("T")

POLICIES = ("compression", "shared", "replicas", "os", "retention", "hold", "headers", "background")
STEPS = ("tx", "producers", "mirror", "archive", "tier", "groups", "arrow", "snapshot", "deletebefore", "turns", "jobs")
EVENTS = (
    "kill", "repair", "heal", "promote", "addpart", "store_older", "store_lost", "store_rot", "topic_older",
    "failover", "chain", "two_names", "mark_lost", "mark_rotten", "mended", "idle", "tx_moved", "day", "moved",
)  # fmt: skip
FEATURES = POLICIES + STEPS + EVENTS
# What fails today, and why. Nothing may stand here when the proof passes.
OFF: frozenset[str] = frozenset()

NEEDS = {
    "hold": {"retention", "groups"},
    "turns": {"shared"},
    "heal": {"mirror"},
    "promote": {"mirror"},
    "store_older": {"tx"},
    "store_lost": {"tx"},
    "store_rot": {"tx"},
    "tx_moved": {"tx"},
    "day": {"tx"},
}
# What a topic with replicas refuses, by docs/copies.md, so it is never in one world with them. "refused" looks at it.
ALONE = {
    "tx", "shared", "os", "addpart", "promote", "repair", "store_older", "store_lost", "store_rot", "tx_moved", "day",
    "topic_older", "failover", "chain", "mended", "moved",
}  # fmt: skip
APART = frozenset(frozenset(("replicas", each)) for each in ALONE)

REPLICATED = 5  # every fifth world has replicas
BY_NUMBER = 3  # the pairs of a world that its number chooses


class Choice(Random):
    """Random choices that take one number each, so that a choice among fewer things changes no later choice."""

    def pick(self, things: Sequence[T]) -> T:
        return things[int(self.random() * len(things))]

    def below(self, end: int) -> int:
        """A number from 0 on and below `end`."""
        return int(self.random() * end)

    def mix(self, things: Iterable[T]) -> list[T]:
        return [each for _, each in sorted(((self.random(), each) for each in things), key=_first)]


def _first(pair: tuple[float, object]) -> float:
    return pair[0]


def features() -> tuple[str, ...]:
    """The features that are switched on; `LOGLIB_WORLDS_OFF` has more names to switch off, and `-name` switches on."""
    named = os.environ.get("LOGLIB_WORLDS_OFF", "").split(",")
    away = {*OFF, *named} - {name[1:] for name in named if name.startswith("-")}
    return tuple(name for name in FEATURES if name not in away)


def draw(seed: int, among: tuple[str, ...] | None = None) -> frozenset[str]:
    """The features of the world of this seed. Some pairs are chosen by the number, and the others by chance."""
    among = features() if among is None else among
    choose = Choice(f"features {seed}")
    matrix = possible(among)
    places = [(seed * 7919 + number * len(matrix) // BY_NUMBER) % len(matrix) for number in range(BY_NUMBER)]
    chosen = [name for place in places for name in matrix[place]]
    replicated = ("replicas",) * (seed % REPLICATED == 0)  # which exclude many others, so they come first
    on: set[str] = set()
    for name in (*replicated, *chosen, *choose.mix(among)[: 2 + choose.below(9)]):
        wanted = {name} | NEEDS.get(name, set())
        if wanted <= set(among) and not any(pair <= on | wanted for pair in APART):
            on |= wanted
    return frozenset(on)


@cache
def possible(among: tuple[str, ...]) -> list[tuple[str, str]]:
    """The pairs that can meet, in a fixed order."""

    def closure(pair: tuple[str, str]) -> set[str]:
        return set(pair).union(*(NEEDS.get(name, set()) for name in pair))

    return [pair for pair in combinations(among, 2) if not any(each <= closure(pair) for each in APART)]


def pairs(on: Iterable[str]) -> Counter[str]:
    """The pairs of these features, by their names."""
    return Counter(" + ".join(pair) for pair in combinations(sorted(on), 2))
