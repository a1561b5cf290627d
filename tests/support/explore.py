"""Explore: every state that a small protocol can reach, one step of one process after the other.

A protocol is a function that gives the steps from a state: their names, and the states after them. It raises `Wrong` in
a state that must not be, and `explore` adds the steps that lead there. States are values: equal ones are visited once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

State = TypeVar("State", bound=Hashable)

MOST = 3_000_000  # states; a model that has more is too large for a test


class Wrong(AssertionError):
    """The protocol has reached a state that must not be."""


def explore(start: State, steps: Callable[[State], Iterable[tuple[str, State]]]) -> int:
    """Visit each reachable state; returns their number. Raises `Wrong` with the steps that lead to a wrong one."""
    before: dict[State, tuple[str, State] | None] = {start: None}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        try:
            for name, after in steps(state):
                if after not in before:
                    before[after] = name, state
                    waiting.append(after)
        except Wrong as wrong:
            raise Wrong(f"{wrong}: {' | '.join(_path(state, before))}") from None
        assert len(before) <= MOST, "the model is too large"
    return len(before)


def _path(state: State, before: dict[State, tuple[str, State] | None]) -> list[str]:
    names: list[str] = []
    while (came := before[state]) is not None:
        name, state = came
        names.append(name)
    return names[::-1]
