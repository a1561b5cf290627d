"""Floors, as a model: retention drops no acknowledged record that what has been offloaded does not hold.

A log has two sealed segments of one record, and room for a third. A record is a number that is never given twice, and
the chain at a place is all records before it, whatever has become of their bytes. Steps: a record is appended; bytes
rot, the gap is declared, a copy heals it; a backup is taken, and put back; sealed segments are offloaded, to an archive
or a place, with their gaps; retention drops the oldest segment if the floor allows it (offload/safe_offset.py).

The writer acknowledges each record. What a backup that is put back does not have is lost by whoever puts it back, and
not by retention; nor is what nobody can read any more. Everything else is in the log, or was offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from explore import Wrong, explore

SEGMENTS = 3
MOST_RECORDS = 4  # that are ever appended
MOST_DAMAGE = 2  # how often bytes rot


class Log(NamedTuple):
    """A log: all records that were ever in it, in order, and what its files have of them."""

    chain: tuple[int, ...] = ()
    start: int = 0  # segments before it are dropped
    rotten: frozenset[int] = frozenset()  # records that cannot be read
    declared: frozenset[int] = frozenset()  # of these, those in a gap that a repair has declared

    def readable(self, at: int) -> bool:
        return self.chain[at] not in self.rotten


class Elsewhere(NamedTuple):
    """What has been offloaded: up to the end of its chain, all records but those in its gaps, as it believes."""

    chain: tuple[int, ...] = ()
    gaps: frozenset[int] = frozenset()
    has: frozenset[int] = frozenset()  # what it has indeed


class State(NamedTuple):
    log: Log = Log()
    elsewhere: Elsewhere = Elsewhere()
    backup: Log | None = None
    owed: frozenset[int] = frozenset()  # acknowledged records that must be in the log or elsewhere
    appended: int = 0
    damage: int = 0


def same_history(state: State) -> bool:
    """Whether the log has the history that was offloaded: the chain at its end is the same."""
    there = state.elsewhere.chain
    return len(there) <= len(state.log.chain) and state.log.chain[: len(there)] == there


def floor(state: State, mistake: str) -> int:
    """The safe offset: segments before it may be dropped."""
    there, log = state.elsewhere, state.log
    if mistake == "a floor is an offset only":
        return len(there.chain)
    if mistake != "a floor of any history counts" and not same_history(state):
        return 0
    for at in range(log.start, min(len(there.chain), len(log.chain))):
        hidden = log.chain[at] in there.gaps
        if hidden and log.readable(at) and mistake != "what was healed does not hold its segment":
            return at
    return len(there.chain)


def offloaded(state: State, mistake: str) -> Elsewhere | None:
    """What is elsewhere after the next call of `archive` or `tier`; None if it is refused, or has nothing to do."""
    log, there = state.log, state.elsewhere
    if len(there.chain) < log.start:
        return None
    if mistake == "it goes on over another history":
        if len(there.chain) > len(log.chain):
            return None
    elif not same_history(state):
        return None
    sealed = log.chain[len(there.chain) : SEGMENTS - 1]
    if any(each in log.rotten - log.declared for each in sealed):
        return None  # damage that is not declared is an error
    known = frozenset(each for each in there.gaps if each not in log.chain[log.start :] or each in log.rotten)
    if mistake == "gaps are taken back unseen":
        known = frozenset()
    back, lost = there.gaps - known - log.rotten, log.rotten.intersection(sealed)
    made = Elsewhere(there.chain + sealed, known | lost, there.has | back | ({*sealed} - lost))
    if made.chain != log.chain[: len(made.chain)]:
        raise Wrong("records of two histories are one range")
    return made if made != there else None


def steps(state: State, mistake: str = "") -> Iterator[tuple[str, State]]:
    """What may happen next."""
    check(state)
    log = state.log
    if len(log.chain) < SEGMENTS and state.appended < MOST_RECORDS:
        record = state.appended + 1
        grown = log._replace(chain=(*log.chain, record))
        yield "append", state._replace(log=grown, owed=state.owed | {record}, appended=record)
    for each in log.chain[log.start :]:
        if each not in log.rotten and state.damage < MOST_DAMAGE:
            # A copy on another disk may heal it, so it is owed still.
            yield f"{each} rots", state._replace(log=log._replace(rotten=log.rotten | {each}), damage=state.damage + 1)
        if each in log.rotten - log.declared:
            yield f"{each} is declared", state._replace(log=log._replace(declared=log.declared | {each}))
        if each in log.rotten:
            whole = log._replace(rotten=log.rotten - {each}, declared=log.declared - {each})
            yield f"{each} is healed", state._replace(log=whole)
    if state.backup is None:
        yield "a backup is taken", state._replace(backup=log)
    elif (back := state.backup) != log:
        has = {*back.chain[back.start :]} | state.elsewhere.has
        yield "the backup is put back", state._replace(log=back, backup=None, owed=state.owed & has)
    made = offloaded(state, mistake)
    if made is not None:
        yield "offload", state._replace(elsewhere=made)
    if log.start < min(floor(state, mistake), len(log.chain), SEGMENTS - 1):
        gone = log.chain[log.start]
        owed = state.owed - {gone} if gone in log.rotten else state.owed  # nobody can read it here
        yield f"retention drops {gone}", state._replace(log=log._replace(start=log.start + 1), owed=owed)


def check(state: State) -> None:
    """Each owed record is in the log, whole or to be healed, or elsewhere."""
    missing = state.owed - {*state.log.chain[state.log.start :]} - state.elsewhere.has
    if missing:
        raise Wrong(f"records {sorted(missing)} are nowhere")


def exploring(mistake: str = "") -> Callable[[State], Iterator[tuple[str, State]]]:
    return lambda state: steps(state, mistake)


def test_no_record_is_dropped_that_is_not_elsewhere() -> None:
    assert explore(State(), exploring()) > 1000


@pytest.mark.parametrize(
    "mistake",
    [
        "a floor is an offset only",
        "a floor of any history counts",
        "what was healed does not hold its segment",
        "gaps are taken back unseen",
        "it goes on over another history",
    ],
)
def test_each_rule_of_a_floor_is_needed(mistake: str) -> None:
    with pytest.raises(Wrong):
        explore(State(), exploring(mistake))
