"""Transactions that settle a record of a share, as a model: PIN, the commit in the store, the settle, and done.

Members act on a stale view of the share's file, and write what they have composed at any later time. They die, and they
are stopped for longer than their lease. Wherever they meet, the results of a record are committed once, a record whose
results are committed is in no hand that begins later, and what is accepted is committed.

    jobs/state.py                   which entries are valid; what is pinned stays in hand
    transactions/dead_letters.py    how a pin whose transaction nobody carries on is resolved
    transactions/apply.py           the settle comes before a transaction is done
    transactions/state.py           a commit is refused after a fence
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
from explore import Wrong, explore

LEASE = 1
MOST_ENTRIES, MOST_OF_THREE = 7, 4
LAST_TIME = 1


class Entry(NamedTuple):
    """An entry of the share's file. Its index is its token, if it is a begin."""

    kind: str  # begin, take back (of the dead, or after a lease), pin, accept, release (both: of what is pinned)
    member: int = -1
    token: int = -1
    time: int = 0  # the end of the lease of a begin; now of a take back


class Said(NamedTuple):
    """What the entries say."""

    token: int = -1  # of the hand; -1: nobody has the record
    member: int = -1
    until: int = 0
    pinned: bool = False
    accepted: bool = False
    valid: frozenset[int] = frozenset()


class Member(NamedTuple):
    alive: bool = True
    view: int = 0  # entries that it has seen
    doing: str = "idle"
    entry: Entry | None = None
    token: int = -1
    pending: bool = False  # what it has read in the store about the token


class World(NamedTuple):
    log: tuple[Entry, ...] = ()
    now: int = 0
    committed: tuple[int, ...] = ()  # tokens, in the store
    done: frozenset[int] = frozenset()  # of these, what the store may have forgotten
    fenced: int = -1  # tokens up to this one are refused
    members: tuple[Member, ...] = (Member(), Member())


@cache
def said(log: tuple[Entry, ...], mistake: str) -> Said:
    """Replay the entries; `mistake` is a rule that is missing."""
    says, valid = Said(), set[int]()
    for number, entry in enumerate(log):
        is_held = says.token >= 0 and says.token == entry.token
        match entry.kind:
            case "begin":
                begins_pinned = mistake == "a pinned record is begun" and says.pinned
                if says.accepted or (says.token >= 0 and not begins_pinned):
                    continue
                says = Said(number, entry.member, entry.time)
            case "take back":
                is_kept = says.pinned and mistake != "a pinned record is taken back"
                if not is_held or is_kept:
                    continue
                says = Said()
            case "pin":
                if not is_held or says.pinned:
                    continue
                says = says._replace(pinned=True)
            case "accept" | "release":
                if not is_held or not says.pinned:
                    continue
                says = Said(accepted=entry.kind == "accept")
        valid.add(number)
    return says._replace(valid=frozenset(valid))


def steps(world: World, mistake: str = "", *, most_entries: int = MOST_ENTRIES) -> Iterator[tuple[str, World]]:
    """The next step of each member, and of the world around them."""
    says = said(world.log, mistake)
    _check(world, says)
    if world.now < LAST_TIME:
        yield "time passes", world._replace(now=world.now + 1)
    for number in range(len(world.members)):
        member = world.members[number]
        if member.alive:
            if all(each.alive for each in world.members):
                yield f"{number} dies", _with(world, number, member._replace(alive=False))
            if member.doing != "composed" or len(world.log) < most_entries:
                yield from _step(world, number, member, says, mistake)


def _with(world: World, number: int, member: Member) -> World:
    return world._replace(members=(*world.members[:number], member, *world.members[number + 1 :]))


def _step(world: World, number: int, member: Member, says: Said, mistake: str) -> Iterator[tuple[str, World]]:
    seen = said(world.log[: member.view], mistake)
    everything = len(world.log)

    def does(doing: str, **changes: object) -> World:
        return _with(world, number, member._replace(doing=doing, **changes))  # type: ignore[arg-type]

    def composed(entry: Entry) -> World:
        return does("composed", entry=entry)

    match member.doing:
        case "idle":
            if member.view < everything:
                yield f"{number} looks", does("idle", view=everything)
            if not seen.accepted and (seen.token < 0 or (seen.pinned and mistake == "a pinned record is begun")):
                yield f"{number} composes a begin", composed(Entry("begin", number, time=world.now + LEASE))
            is_over = seen.token >= 0 and (not world.members[seen.member].alive or seen.until <= world.now)
            if is_over and seen.member != number:
                if not seen.pinned or mistake == "a pinned record is taken back":
                    yield f"{number} composes: take back", composed(Entry("take back", token=seen.token))
                if seen.pinned:
                    yield f"{number} finds a pin", does("doubts", token=seen.token)
        case "composed" if member.entry is not None:
            entry = member.entry
            doing = {"begin": "began", "pin": "pinned"}.get(entry.kind, "settled")
            token = everything if entry.kind == "begin" else entry.token
            doing = "idle" if entry.kind == "take back" else doing
            yield f"{number} writes: {entry.kind}", does(doing, token=token)._replace(log=(*world.log, entry))
        case "began":
            is_mine = says.token == member.token and world.now < says.until
            yield f"{number} sees its begin", does("runs" if is_mine else "idle", view=everything, entry=None)
        case "runs":
            yield f"{number} composes a pin", composed(Entry("pin", number, member.token))
            if mistake == "no pin":
                yield f"{number} commits without a pin", does("commits", view=everything)
        case "pinned":
            is_pinned = says.token == member.token and says.pinned
            is_seen = is_pinned or mistake == "a pin is not looked at"
            yield f"{number} sees its pin", does("commits" if is_seen else "idle", view=everything, entry=None)
        case "commits":
            if member.token <= world.fenced:
                yield f"{number} is refused", does("idle", view=everything)
            else:
                after = does("done first" if mistake == "done comes before the settle" else "applies")
                yield f"{number} commits", after._replace(committed=(*world.committed, member.token))
        case "done first":
            yield f"{number} ends it", does("applies")._replace(done=world.done | {member.token})
        case "applies":
            yield f"{number} composes: accept", composed(Entry("accept", number, member.token))
        case "settled":
            yield from _see_settle(world, number, member, says, mistake)
        case "doubts":  # first the fence, then the store, then the pin
            if mistake == "the store is read before the fence":
                yield f"{number} reads the store", does("fences", pending=_is_pending(world, member.token))
            else:
                is_fenced = mistake != "no fence"
                fenced = max(world.fenced, member.token) if is_fenced else world.fenced
                yield f"{number} fences", does("asks")._replace(fenced=fenced)
        case "fences":
            fenced = max(world.fenced, member.token)
            yield f"{number} fences", does("resolves", view=everything)._replace(fenced=fenced)
        case "asks":
            if mistake == "the pin is looked at before the store":
                yield f"{number} looks at the pin", does("asks late", view=everything)
            else:
                yield f"{number} reads the store", does("resolves", pending=_is_pending(world, member.token))
        case "asks late":
            yield f"{number} reads the store", does("resolves late", pending=_is_pending(world, member.token))
        case "resolves" | "resolves late":
            view = seen if member.doing == "resolves late" else says
            yield f"{number} resolves", _resolved(does, member, view, everything, world)


def _is_pending(world: World, token: int) -> bool:
    return token in world.committed and token not in world.done


def _resolved(does: object, member: Member, view: Said, everything: int, world: World) -> World:
    if view.token != member.token or not view.pinned:
        return does("idle", view=everything)  # type: ignore[operator, no-any-return]
    kind = "accept" if member.pending else "release"
    if kind == "release" and member.token in world.done:
        raise Wrong("a record is given back whose transaction is done")
    return does("composed", entry=Entry(kind, token=member.token))  # type: ignore[operator, no-any-return]


def _see_settle(world: World, number: int, member: Member, says: Said, mistake: str) -> Iterator[tuple[str, World]]:
    after = _with(world, number, member._replace(doing="idle", entry=None, view=len(world.log)))
    if member.entry is not None and member.entry.kind == "accept" and mistake != "done comes before the settle":
        yield f"{number} ends it", after._replace(done=world.done | {member.token})
    else:
        yield f"{number} sees its settle", after


def _check(world: World, says: Said) -> None:
    if len(world.committed) > 1:
        raise Wrong("the results are committed twice")
    if says.accepted and not world.committed:
        raise Wrong("the record is accepted, and its results are not committed")
    if world.committed and says.token >= 0 and says.token not in world.committed:
        raise Wrong("the results are committed, and the record is begun again")
    if world.committed and says.token < 0 and not says.accepted:
        raise Wrong("the results are committed, and the record is free")


def test_results_and_acknowledgement_are_committed_together_and_once() -> None:
    assert explore(World(), steps) > 1000


@pytest.mark.slow
def test_three_members_commit_together_and_once() -> None:
    assert explore(World(members=(Member(),) * 3), lambda world: steps(world, most_entries=MOST_OF_THREE)) > 1_000_000


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ("no fence", "committed"),
        ("the store is read before the fence", "committed|done"),
        ("a pinned record is begun", "committed"),
        ("a pinned record is taken back", "committed"),
        ("a pin is not looked at", "committed"),
        ("no pin", "committed"),
        ("done comes before the settle", "committed|done"),
        ("the pin is looked at before the store", "committed|done"),
    ],
)
def test_each_rule_of_the_pin_is_needed(mistake: str, found: str) -> None:
    with pytest.raises(Wrong, match=found):
        explore(World(), lambda world: steps(world, mistake))
