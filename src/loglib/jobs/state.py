"""State: what the entries of a share say about the records of one partition. It is the same in every process.

Invariant: the order of the entries in the file decides, and nothing else. A record below `fresh` is settled, unless it
is in `hands`, `free`, `doomed` or `deferred`. So the state is as large as the number of unsettled records. The replay
reads no clock and no records: what an entry needs to know, it has.

    BEGIN     valid if all its records are fresh, or if it is one that is free or deferred; if `max_in_hand` and
              `window` allow it; and if its member was not reaped before. If its records are no longer fresh, it takes
              the next ones instead that are, up to its `spare`: so members that begin together do not try again
    SETTLE    valid with the token of a hand; otherwise it changes nothing
    RENEW     valid with the token of a hand that has a lease
    REAP      of a dead member: valid always; of a lease: valid with the token of a hand whose lease is over by then
    LOST      the records below an offset, or the one there, are gone from the log; those in hand stay in hand
    DEFER     valid for records that are fresh, if `window` allows it: they wait for a time, or for earlier records of
              their keys. One that waits for its key may then wait for a time
    PASS      there are no records from `fresh` up to an offset, and this is the history of the log up to there
    PIN       valid with the token of a hand and its member. What is pinned stays in hand, whatever happens to its
              member and its lease, until another PIN says how the transaction has ended that settles it
    SEAL      the last entry of a generation that counts

A record whose attempts have reached `max_attempts` is settled as exhausted when it is released, reaped or expired. If
dead letters are written, it is *doomed* instead: a member takes it once more, only to write its dead letter.

Threads: one at a time; the share's lock is held.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..format.header import crc32c
from ..system.not_copyable import NotCopyable
from .entries import (
    ACCEPTED,
    ALTERED,
    BEGIN,
    BY_TIME,
    DEAD,
    DEFER,
    ENTRY,
    ENTRY_BYTES,
    EXHAUSTED,
    LOST,
    PASS,
    PIN,
    PINNED,
    REAP,
    REJECTED,
    RELEASED,
    RENEW,
    RESET,
    SEAL,
    SETTLE,
    UNPINNED,
    unpair,
)
from .free_records import Free, FreeRecords
from .hand import Doomed, Hand

_unpack = ENTRY.unpack_from
_MOST_ATTEMPTS = 0xFFFF  # in a checkpoint
_IS_PINNED, _IS_DOOMED, _IS_DEFERRED = 1, 2, 4  # flags of an item
NO_ORDER, KEY_ORDER = "none", "key"


class Settings(NamedTuple):
    """The settings of a share that all members need to agree on."""

    max_attempts: int = 5
    window: int = 10_000  # unsettled records of a partition that may have been begun
    max_in_hand: int = 0  # records of a partition that may be in hand; 0: any number
    # The path of the topic for dead letters; None: there is none. A generation's file has only whether there is one.
    dead_letter: str | None = None
    order: str = NO_ORDER  # KEY_ORDER: a record is begun only after all earlier ones of its key are settled

    def is_told_by(self, settings: Settings) -> bool:
        """True if those of a generation's file are these."""
        return self[:3] == settings[:3] and (self.dead_letter is None) == (settings.dead_letter is None)


class Counts(NamedTuple):
    """The settled records of a partition by their ends, since the share exists."""

    accepted: int = 0
    rejected: int = 0
    exhausted: int = 0
    lost: int = 0  # free records that retention has dropped; not those that were never begun


class Taken(NamedTuple):
    """Records that were taken out of a hand of this member, and why."""

    why: str
    offsets: Sequence[int]


class Ended(NamedTuple):
    """Records that ended otherwise than by an accept, for the log of the member that did it."""

    offset: int
    attempts: int
    how: str


class Item(NamedTuple):
    """An unsettled record in a checkpoint."""

    offset: int
    token: int  # 0: it is free
    until: int
    member: int
    first_begun: int
    begun: int
    attempts: int
    flags: int = 0


class State(NotCopyable):
    """The unsettled records of one partition, after some entries of one generation."""

    def __init__(
        self, me: int, generation: int, fresh: int, settings: Settings, counts: Counts,
        items: Iterable[Item] = (),
    ) -> None:  # fmt: skip
        self.me = me  # the number of this member; 0: it only looks
        self.generation = generation
        self.fresh = fresh  # all records from here on were never begun
        self.passed = 0, 0  # the offset of the last PASS, and the chain of the log there; 0: not known
        self.settings = settings
        self.counts = list(counts)
        self.entries = 0  # that were applied, of this generation
        self.sealed = False
        self.seal: tuple[int, int, int, int] | None = None  # outcome, moment, offset and token of the seal
        self._hands: dict[int, Hand] = {}  # by token, but those in `_plain`
        # By token: a record that was begun as a fresh one, and the moment of its BEGIN. `hands` takes them in.
        self._plain: dict[int, tuple[int, int]] = {}
        self.in_hand = 0  # records
        self.free = FreeRecords()
        self.doomed: dict[int, Doomed] = {}  # by offset
        self.deferred: dict[int, None] = {}  # offsets that wait for earlier records of their keys
        # With an order: records that are no longer fresh, since somebody has looked.
        self.arrived: list[range] | None = [] if me and settings.order == KEY_ORDER else None
        self.pins: set[int] = set()  # tokens of hands with pinned records
        self.burials: set[int] = set()  # tokens of hands of this member that are only for a dead letter
        self.mine: set[int] = set()  # the tokens of this member
        self.begun: list[int] = []  # tokens of this member that nobody has asked for
        self.taken: dict[int, Taken] = {}  # by token; taken away from this member
        self.gone: set[int] = set()  # members that were reaped in this generation
        self.ended: deque[Ended] = deque(maxlen=100)  # by this member
        self.leases: list[tuple[int, int]] = []  # a heap of (until, token); some are no longer in hand
        for each in items:
            _restore(self, each)
        self._count_room()

    # --- entries -------------------------------------------------------------------------------------

    def apply(self, block: bytes, salt: int) -> int:
        """Apply the whole entries at the begin of the block; returns their size in bytes.

        It ends at a seal, and before bytes that are no entry. If it is interrupted, the state is of no use any more.
        """
        if self.sealed:
            return 0
        size, high = len(block) - len(block) % ENTRY_BYTES, self.generation << 32
        plain, mine, begun, me = self._plain, self.mine, self.begun, self.me
        for at in range(0, size, ENTRY_BYTES):
            crc, kind, outcome, count, moment, offset, token = _unpack(block, at)
            if crc32c(block[at + 4 : at + ENTRY_BYTES], salt) != crc:
                return at
            # Nearly all entries begin one fresh record, or accept it: as `_begin` and `_settle` do, in fewer steps.
            if kind == SETTLE:
                if token in plain and outcome == ACCEPTED and count == 1 and plain[token][0] == offset:
                    del plain[token]
                    self._hands.pop(token, None)
                    mine.discard(token)
                    self.in_hand -= 1
                    self.counts[0] += 1
                else:
                    self._settle(outcome, count, moment, offset, token)
            elif kind == BEGIN:
                fresh = self.fresh
                if count == 1 and not token and offset + outcome >= fresh and self.in_hand < self._plain_room:
                    if offset < fresh:
                        offset = fresh
                    self.fresh = offset + 1
                    self.in_hand += 1
                    here = self.entries | high
                    plain[here] = offset, moment
                    if moment & 0xFFFFFFFF == me:
                        mine.add(here)
                        begun.append(here)
                else:
                    self._begin(outcome, count, moment, offset, token)
            else:
                self._apply_rare(kind, outcome, count, moment, offset, token)
            self.entries += 1
            if kind == SEAL:
                return at + ENTRY_BYTES
        return size

    def _count_room(self) -> None:
        """Count with how many records in hand another fresh one may come in few steps: to any member, or to this one.

        This one also has to look after whatever else there is to be done.
        """
        free, doomed, deferred, (_, window, most, _, _) = self.free, self.doomed, self.deferred, self.settings
        room = window - len(free) - len(doomed) - len(deferred)
        self._plain_room = 0 if self.gone or self.arrived is not None else min(room, most) if most else room
        self._simple_room = 0 if free or doomed or self.pins or most else room

    def _apply_rare(self, kind: int, outcome: int, count: int, moment: int, offset: int, token: int) -> None:
        if kind == REAP:
            self._reap(outcome, moment, token, by=offset)
        elif kind == RENEW:
            self._renew(moment, token)
        elif kind == LOST:
            self._lose(offset, count, by=token)
        elif kind == DEFER:
            self._defer(outcome, count, moment, offset)
        elif kind == PASS:
            self.fresh, self.passed = max(self.fresh, offset), max(self.passed, (offset, moment))
        elif kind == PIN:
            self._pin(outcome, count, moment, offset, token)
        elif kind == SEAL:
            self._seal(outcome, moment, offset, token)
        self._count_room()

    @property
    def hands(self) -> dict[int, Hand]:
        """The hands of all members by token."""
        for token in list(self._plain):
            self.hand(token)
        return self._hands

    def hand(self, token: int) -> Hand | None:
        """The hand with this token; None if it has ended."""
        plain = self._plain.get(token)
        if plain is not None:
            member, now = unpair(plain[1])
            self._hands[token] = Hand(plain[0], 1, member, 0, 1, now, now)
            del self._plain[token]  # an interrupt before this does no harm: a hand may be in both
        return self._hands.get(token)

    def plain_hand(self, token: int) -> tuple[int, int] | None:
        """The offset and the first begin (seconds UTC) of a hand of one record at its first attempt, without a lease.

        None for another hand, and for one that `hand` or `hands` has shown.
        """
        found = self._plain.get(token)
        return None if found is None else (found[0], found[1] >> 32)

    def _begin(self, spare: int, count: int, moment: int, offset: int, until: int) -> None:
        member, now = moment & 0xFFFFFFFF, moment >> 32
        if spare and offset < self.fresh:
            count = min(count, offset + count + spare - self.fresh)
            offset = self.fresh
        _, window, most, _, _ = self.settings
        in_hand = self.in_hand + count
        if (most and in_hand > most) or member in self.gone or count <= 0:
            return
        attempt, first_begun, not_before, doomed = 1, now, 0, None
        is_fresh = offset >= self.fresh
        if is_fresh:
            if in_hand + len(self.free) + len(self.doomed) + len(self.deferred) > window:
                return
            self._arrive(offset, count)
        elif count == 1 and (doomed := self.doomed.pop(offset, None)) is not None:
            attempt, first_begun = doomed.attempts, doomed.first_begun
        elif count == 1 and offset in self.deferred:
            del self.deferred[offset]
        else:
            free = self.free.take(offset) if count == 1 else None
            if free is None:
                return
            attempt, first_begun, not_before = free.attempts + 1, free.first_begun or now, free.until
        if not is_fresh:
            self._count_room()
        token = self.entries | self.generation << 32  # as `pair` does, in fewer steps
        hand = self._hands[token] = Hand(offset, count, member, until, attempt, first_begun, now)
        if doomed is not None:
            hand.doomed = doomed
        if not_before:
            hand.not_before = not_before
        self.in_hand = in_hand
        if until:
            heapq.heappush(self.leases, (until, token))
        if member == self.me:
            self.mine.add(token)
            (self.burials.add if doomed else self.begun.append)(token)

    def _arrive(self, offset: int, count: int) -> None:
        self.fresh = offset + count
        if self.arrived is not None:
            self.arrived.append(range(offset, offset + count))

    def _defer(self, outcome: int, count: int, until: int, offset: int) -> None:
        offsets = range(offset, offset + count)
        if offset >= self.fresh and self.unsettled + count <= self.settings.window:
            self._arrive(offset, count)
        elif outcome == BY_TIME and count == 1 and offset in self.deferred:
            del self.deferred[offset]
        else:
            return
        for each in offsets:
            if outcome == BY_TIME:
                self.free.put(each, Free(0, until, 0))
            else:
                self.deferred[each] = None

    def _settle(self, outcome: int, count: int, until: int, offset: int, token: int) -> None:
        hand = self.hand(token) if token in self._plain else self._hands.get(token)
        if hand is None:
            return
        if hand.some is None and not hand.pinned and hand.offset == offset and hand.count == count:
            if outcome == ACCEPTED:  # as `_drop` does, in fewer steps
                del self._hands[token]
                self.in_hand -= count
                self.counts[0] += count
                self.mine.discard(token)
                self.burials.discard(token)
                return
            leaving: Sequence[int] = hand.offsets()
            self._drop(token, hand)
        else:
            leaving = sorted(hand.among(offset, count) - hand.pinned)
            self._take_out(token, hand, leaving)
        for each in leaving:
            if outcome == ACCEPTED:
                self.counts[0] += 1
            elif outcome == REJECTED:
                self.counts[1] += 1
                self._end(each, hand, "rejected")
            else:
                self._release(each, hand, until, counts=outcome == RELEASED, how="released")
        self._count_room()

    def _drop(self, token: int, hand: Hand) -> None:
        """Take all that is left of a hand out of it."""
        del self._hands[token]
        self.in_hand -= len(hand)
        self.mine.discard(token)
        self.pins.discard(token)
        self.burials.discard(token)

    def _take_out(self, token: int, hand: Hand, leaving: Sequence[int]) -> None:
        """Take some records out of a hand."""
        if len(leaving) == len(hand):
            self._drop(token, hand)
            return
        if hand.some is None:
            hand.some = set(hand.offsets())
        hand.some.difference_update(leaving)
        hand.pinned -= set(leaving)
        if not hand.pinned:
            self.pins.discard(token)
        self.in_hand -= len(leaving)

    def _release(self, offset: int, hand: Hand, until: int, *, counts: bool, how: str) -> None:
        attempts = hand.attempt if counts else hand.attempt - 1
        if hand.doomed is not None or (counts and attempts >= self.settings.max_attempts):
            if self.settings.dead_letter is None:
                self._exhaust(offset, hand, how)
            else:
                doomed = hand.doomed or Doomed(attempts, hand.first_begun, hand.member, how)
                self.doomed[offset] = doomed
            return
        self.free.put(offset, Free(attempts, until, hand.first_begun))

    def _exhaust(self, offset: int, hand: Hand, how: str) -> None:
        self.counts[2] += 1
        self._end(offset, hand, f"exhausted: {how}")

    def _end(self, offset: int, hand: Hand, how: str) -> None:
        if self.me and hand.member == self.me:
            self.ended.append(Ended(offset, hand.attempt, how))

    def _renew(self, until: int, token: int) -> None:
        hand = self.hand(token)
        if hand is not None and hand.until:
            hand.until = until
            heapq.heappush(self.leases, (until, token))

    def _reap(self, outcome: int, moment: int, token: int, *, by: int) -> None:
        if outcome == DEAD:
            self.gone.add(moment)
            for each, hand in [found for found in self.hands.items() if found[1].member == moment]:
                self._take_away(each, hand, "its member was evicted", "its worker has died, or was evicted", by=by)
            return
        taken = self.hand(token)
        if taken is not None and 0 < taken.until <= moment:
            self._take_away(token, taken, "its lease was over", "its lease was over", by=by)

    def _take_away(self, token: int, hand: Hand, why: str, how: str, *, by: int) -> None:
        leaving, is_mine = hand.loose(), token in self.mine
        self._take_out(token, hand, leaving)
        if is_mine:
            self._note_taken(token, why, leaving)
        for each in leaving:
            before = self.counts[2]
            self._release(each, hand, 0, counts=True, how=how)
            if self.counts[2] > before and self.me and by == self.me != hand.member:
                self.ended.append(Ended(each, hand.attempt, "exhausted: its member has died, or its lease was over"))

    def _note_taken(self, token: int, why: str, leaving: Sequence[int]) -> None:
        before = self.taken.get(token)
        self.taken[token] = Taken(why, leaving if before is None else [*before.offsets, *leaving])

    def _pin(self, outcome: int, count: int, member: int, offset: int, token: int) -> None:
        hand = self.hand(token)
        if hand is None or hand.member != member:
            return
        wanted = hand.among(offset, count)
        if outcome == PINNED:
            if len(wanted) == count and wanted.isdisjoint(hand.pinned):
                hand.pinned |= wanted
                self.pins.add(token)
            return
        leaving = sorted(wanted & hand.pinned)
        if outcome == UNPINNED:
            hand.pinned -= set(leaving)
            if not hand.pinned:
                self.pins.discard(token)
            return
        is_mine = token in self.mine
        self._take_out(token, hand, leaving)
        if outcome == RELEASED and is_mine:
            self._note_taken(token, "a transaction that was to settle it was not committed", leaving)
        for each in leaving:
            if outcome == ACCEPTED:
                self.counts[0] += 1
            elif outcome == REJECTED:
                self.counts[1] += 1
                self._end(each, hand, "rejected, with a dead letter")
            elif outcome == EXHAUSTED:
                self._exhaust(each, hand, "with a dead letter")
            else:
                self._release(each, hand, 0, counts=True, how="its worker has died")

    def _lose(self, start: int, count: int, *, by: int) -> None:
        lost = [start] if count else [each for each in (*self.free, *self.doomed, *self.deferred) if each < start]
        for offset in lost:
            free = self.free.take(offset) or self.doomed.pop(offset, None)
            if free is None and offset not in self.deferred:
                continue
            self.deferred.pop(offset, None)
            self.counts[3] += 1
            if self.me and by == self.me:
                attempts = 0 if free is None else free.attempts
                self.ended.append(Ended(offset, attempts, "lost: the log no longer has it"))
        if not count:
            self.fresh = max(self.fresh, start)

    def _seal(self, outcome: int, moment: int, offset: int, token: int) -> None:
        self.sealed, self.seal = True, (outcome, moment, offset, token)
        if outcome == ALTERED:
            self.settings = Settings(*unpair(moment), offset, "" if token else None, self.settings.order)
            if not token:
                self.counts[2] += len(self.doomed)
                self.doomed.clear()
        elif outcome == RESET:
            for token, hand in list(self.hands.items()):
                if token in self.mine:
                    self.taken[token] = Taken("the share was reset", hand.offsets())
                self._drop(token, hand)
            self.free.clear()
            self.doomed.clear()
            self.deferred.clear()
            self.fresh = offset

    # --- what there is to do ---------------------------------------------------------------------------

    @property
    def unsettled(self) -> int:
        """The number of records that are neither fresh nor settled."""
        return self.in_hand + len(self.free) + len(self.doomed) + len(self.deferred)

    def room(self) -> int:
        """The number of fresh records that the window allows, and of records that may come into a hand."""
        room = self.window_room()
        most = self.settings.max_in_hand
        return min(room, most - self.in_hand) if most else room

    def window_room(self) -> int:
        """The number of fresh records that the window allows."""
        return self.settings.window - self.unsettled

    @property
    def is_simple(self) -> bool:
        """True if a fresh record may be begun, and there is nothing else that might be done."""
        return self.in_hand < self._simple_room and not self.leases

    def may_take(self) -> bool:
        """True if `max_in_hand` allows another record in hand."""
        return not self.settings.max_in_hand or self.in_hand < self.settings.max_in_hand

    def expired(self, now_us: int) -> list[int]:
        """The tokens of hands whose leases are over."""
        leases, over = self.leases, []
        while leases and leases[0][0] <= now_us:
            until, token = heapq.heappop(leases)
            hand = self.hand(token)
            if hand is not None and hand.until == until:
                over.append(token)
        for token in over:  # until they are reaped
            heapq.heappush(leases, (self.hands[token].until, token))
        return over

    @property
    def is_timed(self) -> bool:
        """True if something may be due at some time: a record that waits, or a lease."""
        return self.free.is_timed or bool(self.leases)

    def next_moment(self) -> int | None:
        """When a released record need not wait any longer, or a lease is over: microseconds since the boot."""
        leases = self.leases
        while leases and ((hand := self.hand(leases[0][1])) is None or hand.until != leases[0][0]):
            heapq.heappop(leases)
        moments = self.free.next_moment(), leases[0][0] if leases else None
        return min([each for each in moments if each is not None], default=None)

    def settled_to(self) -> int:
        """All records before this offset are settled."""
        return min([self.fresh, *self.unsettled_offsets()])

    def is_unsettled(self, offset: int) -> bool:
        """True if the record at the offset is not settled."""
        if offset >= self.fresh or offset in self.free or offset in self.doomed or offset in self.deferred:
            return True
        return any(hand.among(offset, 1) for hand in self.hands.values())

    def unsettled_offsets(self) -> list[int]:
        """The offsets of the records that are neither fresh nor settled, in no order."""
        in_hand = [offset for hand in self.hands.values() for offset in hand.offsets()]
        return [*in_hand, *self.free, *self.doomed, *self.deferred]

    def members(self) -> set[int]:
        """The members that have records in hand which are not pinned."""
        return {hand.member for hand in self.hands.values() if len(hand) > len(hand.pinned)}

    def pinned(self, token: int, member: int, offset: int, count: int) -> set[int]:
        """Those of these records that are pinned."""
        hand = self.hand(token)
        return set() if hand is None or hand.member != member else hand.among(offset, count) & hand.pinned


# --- checkpoints --------------------------------------------------------------------------------------


def items_of(state: State) -> Iterator[Item]:
    """The unsettled records, for the checkpoint of the next generation."""
    for token, hand in state.hands.items():
        attempts, is_doomed = min(hand.attempt, _MOST_ATTEMPTS), _IS_DOOMED if hand.doomed else 0
        for offset in hand.offsets():
            flags = is_doomed | (offset in hand.pinned and _IS_PINNED)
            yield Item(offset, token, hand.until, hand.member, hand.first_begun, hand.begun, attempts, flags)
    for offset, each in state.doomed.items():
        attempts = min(each.attempts, _MOST_ATTEMPTS)
        yield Item(offset, 0, 0, each.member, each.first_begun, 0, attempts, _IS_DOOMED)
    for offset in state.deferred:
        yield Item(offset, 0, 0, 0, 0, 0, 0, _IS_DEFERRED)
    for offset, free in state.free.items():
        yield Item(offset, 0, free.until, 0, free.first_begun, 0, min(free.attempts, _MOST_ATTEMPTS))


def _restore(state: State, item: Item) -> None:
    doomed = Doomed(item.attempts, item.first_begun, item.member) if item.flags & _IS_DOOMED else None
    if not item.token:
        if doomed is not None:
            state.doomed[item.offset] = doomed
            return
        if item.flags & _IS_DEFERRED:
            state.deferred[item.offset] = None
            return
        state.free.put(item.offset, Free(item.attempts, item.until, item.first_begun))
        return
    state.in_hand += 1
    hand = state.hand(item.token)
    if hand is None:
        hand = Hand(item.offset, 1, item.member, item.until, item.attempts, item.first_begun, item.begun)
        hand.doomed = doomed
        state.hands[item.token] = hand
        if item.until:
            heapq.heappush(state.leases, (item.until, item.token))
        if item.member == state.me:
            state.mine.add(item.token)
            (state.burials.add if doomed else state.begun.append)(item.token)
    else:
        if hand.some is None:
            hand.some = set(hand.offsets())
        hand.some.add(item.offset)
        hand.count = item.offset + 1 - hand.offset  # items of one token rise
    if item.flags & _IS_PINNED:
        hand.pinned |= {item.offset}
        state.pins.add(item.token)
