"""Jobs, as a model: members take and settle one record by entries in a file, whose order decides.

Each member acts on a stale view and writes what it has composed at any later time. Members die, stop, hang longer than
their lease, and are evicted; generations are sealed. Wherever they meet, the record is in the hand of one at most,
unless an earlier lease is over; it is accepted once; each start of a handler is counted; and it is never stuck.

    jobs/state.py       which entries are valid
    jobs/taking.py      a member starts what it has seen, and says again what landed after a seal
    jobs/ack_log.py     a generation ends with its seal
    jobs/members.py     a member is dead if its lock is free; an evicted one has lost its file
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
from explore import Wrong, explore

LEASE = 1


class Entry(NamedTuple):
    """An entry, as it was composed for a generation. Its index in the file is its token."""

    generation: int
    kind: str  # begin, accept, release, renew, reap, expire, seal
    member: int = -1  # that begins, or is reaped
    token: int = -1
    time: int = 0  # the end of the lease of a begin or a renew; now of an expire; when a released record comes again


class Hand(NamedTuple):
    token: int
    member: int
    until: int
    not_before: int = 0  # the record was released until then


class Said(NamedTuple):
    """What the entries say."""

    hand: Hand | None
    accepted: int
    begins: int
    generation: int
    valid: frozenset[int]
    by_stranger: bool = False  # a settle counted that had not the token in hand
    not_before: int = 0  # a free record waits until then


class Member(NamedTuple):
    alive: bool = True
    has_file: bool = True
    view: int = 0  # entries that it has seen
    doing: str = "idle"  # idle, composed, sent, runs, told, left
    entry: Entry | None = None
    token: int = -1
    until: int = 0


class World(NamedTuple):
    log: tuple[Entry, ...] = ()
    now: int = 0
    members: tuple[Member, ...] = (Member(), Member())
    starts: int = 0
    evicting: int = 0  # 0: nobody; 1: the file of member 0 is removed; 2: its records are taken back


class Scene(NamedTuple):
    """What may happen."""

    most_entries: int
    last_time: int = 0
    seals: int = 0
    evicts: bool = False
    dies: bool = False
    renews: bool = False
    delays: bool = False  # a release may be for later


SCENES = {
    "leases": Scene(4, last_time=2, dies=True),
    "renewals": Scene(4, last_time=2, renews=True),
    "delays": Scene(4, last_time=1, delays=True),
    "seals": Scene(5, seals=1),
    "evictions": Scene(4, seals=1, evicts=True),
}


@cache
def said(log: tuple[Entry, ...], mistake: str) -> Said:
    """Replay the entries; `mistake` is a rule that is missing."""
    hand: Hand | None = None
    accepted = begins = generation = not_before = 0
    valid, gone, by_stranger = set[int](), set[int](), False
    for number, entry in enumerate(log):
        if entry.generation != generation:
            continue
        fits = hand is not None and (hand.token == entry.token or mistake == "a settle needs no token")
        match entry.kind:
            case "begin":
                is_gone = entry.member in gone and mistake != "a reaped member may begin"
                if accepted or is_gone or (hand is not None and mistake != "a begin takes what is in hand"):
                    continue
                hand = Hand(number, entry.member, entry.time, not_before)
                begins += 1
            case "accept":
                if hand is None or not fits:
                    continue
                by_stranger = by_stranger or hand.token != entry.token
                hand, accepted = None, accepted + 1
            case "release":
                if hand is None or not fits:
                    continue
                by_stranger = by_stranger or hand.token != entry.token
                hand, not_before = None, entry.time
            case "renew":
                if hand is None or hand.token != entry.token:
                    continue
                hand = hand._replace(until=entry.time)
            case "reap":
                gone.add(entry.member)
                if hand is not None and hand.member == entry.member:
                    hand = None
            case "expire":
                is_over = hand is not None and (hand.until <= entry.time or mistake == "a renewed lease is over")
                if hand is None or hand.token != entry.token or not is_over:
                    continue
                hand = None
            case "seal":
                generation += 1
                gone.clear()
        valid.add(number)
    return Said(hand, accepted, begins, generation, frozenset(valid), by_stranger, not_before)


def without_seal(log: tuple[Entry, ...], generation: int) -> Said:
    """What one believes that reads on in a sealed file."""
    return said(tuple(each for each in log if each.generation <= generation and each != Entry(generation, "seal")), "")


def steps(world: World, scene: Scene, mistake: str = "") -> Iterator[tuple[str, World]]:
    """The next step of each member, and of the world around them."""
    now_says = said(world.log, mistake)
    _check(world, now_says)
    if world.now < scene.last_time:
        yield "time passes", world._replace(now=world.now + 1)
    if scene.evicts and world.evicting == 0:
        yield "its file is removed", _with(world, 0, world.members[0]._replace(has_file=False))._replace(evicting=1)
    if world.evicting == 1 and len(world.log) < scene.most_entries:
        reap = Entry(now_says.generation, "reap", 0)
        yield "it is evicted", world._replace(log=(*world.log, reap), evicting=2)
    for number in range(len(world.members)):
        member = world.members[number]
        if member.alive and member.doing != "left":
            if scene.dies and any(each.alive for each in world.members if each is not member):
                yield f"{number} dies", _with(world, number, member._replace(alive=False))
            yield from _step(world, number, member, now_says, scene, mistake)


def _with(world: World, number: int, member: Member) -> World:
    return world._replace(members=(*world.members[:number], member, *world.members[number + 1 :]))


def _step(
    world: World, number: int, member: Member, now_says: Said, scene: Scene, mistake: str
) -> Iterator[tuple[str, World]]:
    seen = said(world.log[: member.view], mistake)
    here = seen.generation

    def composed(entry: Entry, token: int = -1, until: int = 0) -> World:
        return _with(world, number, member._replace(doing="composed", entry=entry, token=token, until=until))

    match member.doing:
        case "idle":
            if member.view < len(world.log):
                after = member._replace(view=len(world.log))
                looks_at_file = mistake != "it does not look at its file in a new generation"
                if now_says.generation != here and looks_at_file and not member.has_file:
                    after = after._replace(doing="left")
                yield f"{number} looks", _with(world, number, after)
            is_free = seen.hand is None and (seen.not_before <= world.now or mistake == "a delay is not looked at")
            if not seen.accepted and (is_free or mistake == "a begin takes what is in hand"):
                until = world.now + LEASE if scene.last_time else 99
                yield f"{number} composes a begin", composed(Entry(here, "begin", number, time=until))
            if seen.hand is not None:
                is_over = seen.hand.until <= world.now
                if is_over or (mistake == "a lease is reaped early" and scene.last_time):
                    time = world.now if is_over else seen.hand.until
                    expire = Entry(here, "expire", token=seen.hand.token, time=time)
                    yield f"{number} composes an expire", composed(expire)
                other = world.members[seen.hand.member]
                looks_dead = not other.alive or not other.has_file or mistake == "the living are reaped"
                if seen.hand.member != number and looks_dead:
                    yield f"{number} composes a reap", composed(Entry(here, "reap", seen.hand.member))
            if here < scene.seals:
                yield f"{number} composes a seal", composed(Entry(here, "seal"))
        case "composed" if len(world.log) < scene.most_entries and member.entry is not None:
            doing = {"begin": "sent", "accept": "told", "release": "told", "renew": "renewed"}.get(
                member.entry.kind, "idle"
            )
            place = len(world.log) if doing == "sent" else member.token
            after = member._replace(doing=doing, token=place)
            if doing == "told":
                after = after._replace(until=len(world.log))  # the place of the settle
            yield f"{number} writes", _with(world, number, after)._replace(log=(*world.log, member.entry))
        case "sent" if member.entry is not None:
            yield f"{number} sees its begin", _seen_begin(world, number, member, now_says, mistake)
        case "runs":
            for kind in ("accept", "release"):
                yield f"{number} composes: {kind}", composed(Entry(here, kind, token=member.token), member.token)
            if scene.delays:
                later = Entry(here, "release", token=member.token, time=world.now + 1)
                yield f"{number} composes a release for later", composed(later, member.token)
            if scene.renews and world.now + LEASE > member.until:
                renew = Entry(here, "renew", token=member.token, time=world.now + LEASE)
                yield f"{number} composes a renew", composed(renew, member.token, member.until)
        case "renewed" if member.entry is not None:
            after = member._replace(view=len(world.log), doing="idle", entry=None)
            if mistake == "a renew is believed unseen":
                after = after._replace(doing="runs", until=member.entry.time)
            elif now_says.hand is not None and now_says.hand.token == member.token:
                after = after._replace(doing="runs", until=now_says.hand.until)
            yield f"{number} sees its renew", _with(world, number, after)
        case "told" if member.entry is not None:
            after = member._replace(view=len(world.log), doing="idle", entry=None)
            is_in_hand = now_says.hand is not None and now_says.hand.token == member.token
            if is_in_hand and member.until not in now_says.valid and mistake != "a settle is not said again":
                again = member.entry._replace(generation=now_says.generation)
                after = after._replace(doing="composed", entry=again)
            elif is_in_hand:
                raise Wrong("the record is stuck in the hand of one that has settled it")
            yield f"{number} sees its settle", _with(world, number, after)


def _seen_begin(world: World, number: int, member: Member, now_says: Said, mistake: str) -> World:
    """It starts its handler only if the begin is valid, and the lease is not over."""
    assert member.entry is not None
    view, token = len(world.log), member.token
    looks_at_file = mistake != "it does not look at its file in a new generation"
    is_new = now_says.generation != said(world.log[: member.view], mistake).generation
    if is_new and looks_at_file and not member.has_file:
        return _with(world, number, member._replace(view=view, doing="left"))
    is_mine = now_says.hand is not None and now_says.hand.token == token
    if mistake == "entries after a seal count":
        own = without_seal(world.log, member.entry.generation)
        is_mine = own.hand is not None and own.hand.member == number
    is_late = member.entry.time <= world.now
    if is_mine and now_says.hand is not None and now_says.hand.not_before > world.now:
        if mistake in ("a delay is not looked at", "a late begin is not given back"):
            raise Wrong("a handler begins before its time")
        until = now_says.hand.not_before
        release = Entry(now_says.generation, "release", token=token, time=until)
        return _with(world, number, member._replace(view=view, doing="composed", entry=release))
    if (is_mine and not is_late) or mistake == "it starts without a look" or (is_mine and mistake == "it starts late"):
        if is_late and mistake == "it starts late":
            raise Wrong("a handler begins after its lease")
        if number == 0 and world.evicting == 2:
            raise Wrong("an evicted member starts a handler")
        runs = member._replace(view=view, doing="runs", entry=None, until=member.entry.time)
        return _with(world, number, runs)._replace(starts=world.starts + 1)
    if is_mine:
        release = Entry(now_says.generation, "release", token=token)
        return _with(world, number, member._replace(view=view, doing="composed", entry=release))
    return _with(world, number, member._replace(view=view, doing="idle", entry=None))


def _check(world: World, now_says: Said) -> None:
    if now_says.accepted > 1:
        raise Wrong("the record is accepted twice")
    if now_says.by_stranger:
        raise Wrong("a settle without the token in hand counts")
    if world.starts > now_says.begins:
        raise Wrong("a start is not counted")
    running = [each for each in world.members if each.alive and each.has_file and _runs(each)]
    if len(running) > 1 and min(each.until for each in running) > world.now:
        raise Wrong("two have the record in hand")


def _runs(member: Member) -> bool:
    renews = member.entry is not None and member.entry.kind == "renew"  # its handler runs meanwhile
    return member.doing == "runs" or (renews and member.doing in ("composed", "renewed"))


@pytest.mark.parametrize("scene", SCENES)
def test_members_never_share_a_record_and_none_is_stuck(scene: str) -> None:
    assert explore(World(), lambda world: steps(world, SCENES[scene])) > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene",
    [
        Scene(3, last_time=1, dies=True),
        SCENES["seals"],
        SCENES["evictions"],
        Scene(3, last_time=2, renews=True),
        Scene(3, last_time=1, delays=True),
    ],
)
def test_three_members_never_share_a_record_either(scene: Scene) -> None:
    assert explore(World(members=(Member(),) * 3), lambda world: steps(world, scene)) > 50_000


@pytest.mark.parametrize(
    ("scene", "mistake", "found"),
    [
        ("leases", "a settle needs no token", "without the token"),
        ("leases", "a begin takes what is in hand", "two|accepted"),
        ("leases", "a lease is reaped early", "two"),
        ("leases", "the living are reaped", "two"),
        ("leases", "it starts without a look", "two|counted"),
        ("seals", "entries after a seal count", "two|counted"),
        ("seals", "a settle is not said again", "stuck"),
        ("leases", "it starts late", "after its lease"),
        ("evictions", "a reaped member may begin", "evicted"),
        ("evictions", "it does not look at its file in a new generation", "evicted"),
        ("renewals", "a renewed lease is over", "two"),
        ("renewals", "a renew is believed unseen", "two"),
        ("delays", "a delay is not looked at", "before its time"),
        ("delays", "a late begin is not given back", "before its time"),
    ],
)
def test_each_rule_of_the_file_is_needed(scene: str, mistake: str, found: str) -> None:
    with pytest.raises(Wrong, match=found):
        explore(World(), lambda world: steps(world, SCENES[scene], mistake))
