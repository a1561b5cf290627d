"""Taking: one partition of a share, as one member takes and settles its records.

Invariant: a handler gets a record only after this member has *seen* its BEGIN valid, and its lease not over. A settle
counts only if it was seen: one that landed after a seal is written again. Writing an entry twice is harmless, because
the second one has no effect. So an interrupt between any two lines loses nothing: a record in the hand of this member
that no `Job` stands for any more is released at its next step.

Threads: one at a time; the share's lock is held.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from ..errors import FencedJobError, LogError, OffsetOutOfRangeError, StaleGenerationError
from ..format.batch import Batch
from ..log.log import Log
from ..system.clock import Clock, Moment
from ..system.not_copyable import NotCopyable
from .ack_log import AckLog, Pin
from .entries import (
    ACCEPTED,
    BEGIN,
    BY_KEY,
    BY_TIME,
    DEAD,
    DEFER,
    EXPIRED,
    LOST,
    MOST_SPARE,
    MOST_TOGETHER,
    PASS,
    PIN,
    PINNED,
    REAP,
    RELEASED,
    RENEW,
    RETURNED,
    SETTLE,
    encode,
    pair,
)
from .free_records import CHOICES
from .hand import Hand
from .key_order import KeyOrder
from .records import Records
from .state import KEY_ORDER, Counts, State

logger = logging.getLogger("loglib")

_MOST_HANDED = 1000  # tokens that are no longer in hand, before they are forgotten
_MOST_DEFERRED = 1000  # records in one write
_MOST_REASONS = 1000  # of records that were released or rejected, until their end is logged


class Begun(NamedTuple):
    """Records that have come into the hand of this member: some of a batch."""

    token: int
    batch: Batch
    offset: int
    size: int  # records
    attempt: int
    first_begun: int  # seconds UTC


class Settling(NamedTuple):
    """Records of one hand that are to be settled together."""

    token: int
    offset: int
    size: int  # records
    outcome: int = ACCEPTED
    until: int = 0


class Taking(NotCopyable):
    """The records of one partition."""

    def __init__(self, acks: AckLog, log: Log, clock: Clock, share: str, member: str, me: int) -> None:
        self.partition = log.partition
        self.acks = acks
        self.records = Records(log, share)
        self._order = KeyOrder(self.records) if acks.state.settings.order == KEY_ORDER else None
        self.is_unsynced = False  # something was settled since the last sync
        self.is_blocked = False  # the window is full, and there is a fresh record
        self._clock = clock
        self._share = share
        self._member = member
        self._me = me
        self._pending: list[Settling] = []  # not written, or not seen yet
        self._void: list[Settling] = []  # seen, and void: the next step of the loop raises
        # By token, a reference to the job, as long as somebody has it. Some of the tokens are no longer in hand.
        self._jobs: dict[int, Callable[[], object | None]] = {}
        self._stamped: Moment | None = None  # the moment of the stamp: this member, and the time in seconds
        self._stamp = 0
        self._choice = 0  # of the free records: another one after another member was quicker
        self._reasons: dict[int, str] = {}  # by offset

    # --- taking ----------------------------------------------------------------------------------------

    def take(self, most: int, moment: Moment, lease_us: int) -> Begun | None:
        """Take up to `most` fresh records, or one that is free; None if there is none now.

        What is pending is written in the same step. Raises `FencedJobError` if it was void; the records that this call
        has begun then come with the next one.
        """
        self._look()
        self._release_orphans()
        while True:
            self._raise_void()
            begun = self._begun()
            if begun is not None:
                return begun
            found = self._candidate(self.acks.state, most, moment)
            if found is None:
                entries = [*self._encoded(self._due()), *self._passed(self.acks.state)]
                if not entries:
                    return None
                self.acks.append(entries)
                self._confirm(self._look())
                continue
            self._begin(*found, moment, lease_us)
            self._choice = 0 if self.acks.state.begun else self._me
            if lease_us:
                moment = self._clock.moment()  # this process may have been stopped for longer than a lease

    def take_next(self, moment: Moment) -> Begun | None:
        """Take the next fresh record in few steps. None in any unusual case: then `take` looks what to do.

        It writes before it looks: if others have begun this record, one of those after it comes.
        """
        state = self.acks.state
        offset, batch, offsets = state.fresh, self.records.plain, self.records.plain_offsets
        if (
            batch is None or offset not in offsets or self._void or state.begun or state.ended
            or len(state.mine) > len(self._pending) or not state.is_simple
        ):  # fmt: skip
            return None
        state = self._begin(offset, 1, offsets.stop - offset - 1, moment)
        begun = state.begun
        if len(begun) != 1:
            return None
        token = begun[0]
        hand = state.plain_hand(token)
        if hand is None or token in self._jobs or hand[0] not in offsets:
            return None
        return Begun(token, batch, hand[0], 1, 1, hand[1])

    def _begin(self, offset: int, count: int, spare: int, moment: Moment, lease_us: int = 0) -> State:
        """Say that these records are begun, and look. What is pending is written before."""
        acks, until = self.acks, moment.boottime_us + lease_us if lease_us else 0
        if moment is not self._stamped:  # it is the same for many records
            self._stamp = pair(self._me, min(max(moment.wall_us // 1_000_000, 0), 0xFFFFFFFF))
            self._stamped = moment
        entries = self._encoded(self._due()) if self._pending else []
        entries.append(encode(acks.salt, BEGIN, min(spare, MOST_SPARE), count, self._stamp, offset, until))
        acks.append(entries)
        state = self._look()
        if self._pending:
            self._confirm(state)
        if state.gone and self._me in state.gone:
            raise StaleGenerationError(self._share, self._member)
        return state

    def take_doomed(self, moment: Moment, lease_us: int, others: Collection[int]) -> int | None:
        """Take a record whose dead letter is to be written; returns its token, None if there is none now.

        `others` are tokens for which another thread does this.
        """
        state = self._look()
        while True:
            mine = [token for token in state.burials - state.pins if token not in others]
            if mine:
                return mine[0]
            if not state.doomed or not state.may_take():
                return None
            offset = next(iter(state.doomed))
            try:
                self.records.around(offset)
            except OffsetOutOfRangeError:
                state = self._lose(state, offset)
                continue
            state = self._begin(offset, 1, 0, moment, lease_us)

    def _begun(self) -> Begun | None:
        """The records that this member has begun, and not handed out."""
        while self.acks.state.begun:
            state = self.acks.state
            token = state.begun[-1]
            hand = state.hand(token)
            if hand is not None and token not in self._jobs:
                if not (hand.until or hand.not_before) or hand.is_in_time(self._clock.moment().boottime_us):
                    with suppress(OffsetOutOfRangeError):  # begun before an interrupt, and dropped by retention since
                        batch = self.records.around(hand.offset)
                        return Begun(token, batch, hand.offset, hand.count, hand.attempt, hand.first_begun)
                self._settle_if_held(token, hand, RETURNED)  # no handler has it: it is too early, too late, or gone
            state.begun.pop()
        return None

    def hand_out(self, token: int, job: object) -> None:
        """The job stands for the records of the token from now on."""
        state = self.acks.state
        if len(self._jobs) > _MOST_HANDED + len(state.mine):
            self._jobs = {each: self._jobs[each] for each in self._jobs.keys() & state.mine}
        self._jobs[token] = weakref.ref(job)
        state.begun.pop()

    def _candidate(self, state: State, most: int, moment: Moment) -> tuple[int, int, int] | None:
        """The offset and number of records that may be begun, and of those after them that may be taken instead.

        Defers those that are met before their time.
        """
        self.is_blocked = False
        while state.may_take():
            offset = None
            try:
                if self._order is not None:
                    self._order.follow(state)
                offset = self._free(state, moment)
                if offset is not None:
                    around = self.records.around(offset)  # before it is begun, so that damage raises here
                    if offset in state.free or self._wait_of(around, offset, state, moment) is None:
                        return offset, 1, 0
                    state = self._defer(around, range(offset, offset + 1), state, moment)
                    continue
                batch = self.records.fresh(state.fresh)
                if batch is None:
                    return None
                first, stop = max(batch.offsets.start, state.fresh), batch.offsets.stop
                count = min(most, stop - first, state.room(), MOST_TOGETHER)
                self.is_blocked = count <= 0
                if self.is_blocked:
                    return None
                if self._order is None and not self.records.due_times(batch):
                    self.records.note_plain(batch)
                    return first, count, stop - first - count
                if count := self._count_due(batch, first, count, state, moment):
                    return first, count, 0
                most_deferred = min(stop - first, state.window_room(), _MOST_DEFERRED)
                state = self._defer(batch, range(first, first + most_deferred), state, moment)
            except OffsetOutOfRangeError:
                state = self._lose(state, offset)
        return None

    def _free(self, state: State, moment: Moment) -> int | None:
        """A record that is not fresh, and may be begun."""
        now_us, order = moment.boottime_us, self._order
        if order is None:
            return state.free.ready(now_us, self._choice)
        found = list(islice(order.candidates(state, state.free.all_ready(now_us)), CHOICES))
        return found[self._choice % len(found)] if found else None

    def _wait_of(self, batch: Batch, offset: int, state: State, moment: Moment) -> tuple[int, int] | None:
        """Why a record may not be begun yet, and until when if that is known: an outcome of DEFER. None: it may."""
        due_us = self.records.due_times(batch).get(offset, 0)
        if self._order is not None and self._order.is_held_up(batch.keys[offset - batch.offsets.start], offset, state):
            return BY_KEY, 0
        if due_us > moment.wall_us:
            return BY_TIME, moment.boottime_us + due_us - moment.wall_us
        return None

    def _count_due(self, batch: Batch, first: int, most: int, state: State, moment: Moment) -> int:
        """The number of fresh records, up to `most`, that may be begun together."""
        waits = (self._wait_of(batch, offset, state, moment) for offset in range(first, first + most))
        return next((number for number, wait in enumerate(waits) if wait is not None), most)

    def _defer(self, batch: Batch, offsets: range, state: State, moment: Moment) -> State:
        """Let these records of the batch wait, up to the first that need not."""
        entries, keys = list[bytes](), set[bytes]()  # the keys of those that wait
        for each in offsets:
            key = None if self._order is None else batch.keys[each - batch.offsets.start]
            wait = (BY_KEY, 0) if key in keys else self._wait_of(batch, each, state, moment)
            if wait is None:
                break
            entries.append(self.acks.encode(DEFER, wait[0], 1, moment=wait[1], offset=each))
            if key is not None:
                keys.add(key)
        self.acks.append(entries)
        return self._look()

    def _passed(self, state: State) -> list[bytes]:
        """The entry which says that there is no record between the last one that was begun and the end of the log.

        Otherwise nobody could tell later if retention has dropped records after that one, or the rest of its batch.
        """
        end, chain = self.records.none_before(state.fresh)
        return [self.acks.encode(PASS, moment=chain, offset=end)] if end > state.fresh else []

    def _lose(self, state: State, offset: int | None) -> State:
        """Settle as lost what retention has dropped, or a record in a declared gap."""
        start, fresh = self.records.log_start(), state.fresh
        is_in_gap = offset is not None and offset >= start
        lost = offset if offset is not None and is_in_gap else start
        self.acks.append([self.acks.encode(LOST, 0, int(is_in_gap), offset=lost, token=self._me)])
        state = self._look()
        if not is_in_gap and fresh < start:
            logger.warning(
                "share %s, partition %d: retention has dropped the records of [%d, %d) that nobody had begun",
                self._share, self.partition, fresh, start,
            )  # fmt: skip
        return state

    def _release_orphans(self) -> None:
        """Release what was handed out, and has no job any more: it was dropped, or an interrupt came before."""
        mine = self.acks.state.mine
        if len(mine) <= len(self._pending):  # as in a loop
            return
        pending = {each.token for each in self._pending}
        orphans = [each for each in mine - pending if (job := self._jobs.get(each)) is not None and job() is None]
        for token in orphans:
            hand = self.acks.state.hand(token)
            if hand is not None:
                self._settle_if_held(token, hand, RELEASED)

    # --- settling --------------------------------------------------------------------------------------

    def accept_later(self, token: int, offset: int, count: int) -> None:
        """Accept what is left of these records, with the next write."""
        if token in self.acks.state.mine:
            self._pending.append(Settling(token, offset, count))
        elif token in self.acks.state.taken:
            raise self._fenced(Settling(token, offset, count))

    def settle_pending(self) -> None:
        """Write what is pending, and see that it counts. Raises `FencedJobError` for the first that was void."""
        while due := self._due():
            self.acks.append(self._encoded(due))
            self._confirm(self._look())
        self._raise_void()

    def _due(self) -> list[Settling]:
        """The pending ones that can count now. A record that a transaction in doubt has pinned waits for its end."""
        state = self.acks.state
        return [each for each in self._pending if _holds(state, each)] if state.pins else self._pending

    def _raise_void(self) -> None:
        if self._void:
            raise self._fenced(self._void.pop())

    def settle(self, what: Settling, reason: str = "") -> None:
        """Settle records now. `FencedJobError` if they are no longer in this hand."""
        self.note_reason(what.offset, reason)
        self._settle(what)
        if what.token not in self.acks.state.mine:
            self._jobs[what.token] = _nobody  # if damage makes this void, the record comes again
        self._log_ended(self.acks.state)

    def _settle(self, what: Settling) -> None:
        if not _holds(self.acks.state, what):
            raise self._fenced(what)
        while _holds(self.acks.state, what):
            self.acks.append(self._encoded([*self._pending, what]))
            self._look()
        if self._was_taken(what):
            raise self._fenced(what)
        self._confirm(self.acks.state)

    def _settle_if_held(self, token: int, hand: Hand, outcome: int) -> None:
        with suppress(FencedJobError):  # it was just taken away
            self._settle(Settling(token, hand.offset, hand.count, outcome, hand.not_before))

    def in_hand(self, token: int, offset: int, count: int) -> list[int]:
        """Those of the records that this member may settle, after a look. `FencedJobError` if there is none."""
        what = Settling(token, offset, count)
        if not _holds(self._look(), what):
            raise self._fenced(what)
        hand = self.acks.state.hands[token]
        return sorted(hand.among(offset, count) - hand.pinned)

    def pin(self, pins: Sequence[Pin]) -> None:
        """Pin these records, and see that it counts. Synced. `FencedJobError` if some are no longer in this hand."""
        state = self._look()
        while True:
            left = [each for each in pins if len(state.pinned(*each.records)) < each.size]
            if not left:
                break
            for each in left:
                what = Settling(each.token, each.offset, each.size)
                hand = state.hand(each.token)
                if hand is None or len(hand.among(each.offset, each.size) - hand.pinned) < each.size:
                    raise self._fenced(what)
            encode = self.acks.encode
            self.acks.append([
                encode(PIN, PINNED, each.size, moment=each.member, offset=each.offset, token=each.token)
                for each in left
            ])  # fmt: skip
            state = self._look()
        self.acks.sync()

    def note_reason(self, offset: int, reason: str) -> None:
        """Keep the reason until the end of the record is logged."""
        if reason:
            if len(self._reasons) >= _MOST_REASONS:
                self._reasons.clear()
            self._reasons[offset] = reason

    def _encoded(self, settling: list[Settling]) -> list[bytes]:
        salt = self.acks.salt
        if settling:
            self.is_unsynced = True
        return [
            encode(salt, SETTLE, outcome, size, until, offset, token)
            for token, offset, size, outcome, until in settling
        ]

    def _confirm(self, state: State) -> None:
        """Forget what is pending and was seen. The rest landed after a seal."""
        if state.taken:
            self._void += [each for each in self._pending if self._was_taken(each)]
        mine = state.mine
        self._pending = [each for each in self._pending if each.token in mine]

    def _was_taken(self, what: Settling) -> bool:
        taken = self.acks.state.taken.get(what.token)
        return taken is not None and what.offset in taken.offsets

    def _fenced(self, what: Settling) -> FencedJobError:
        taken = self.acks.state.taken.get(what.token)
        by = "it was settled before" if taken is None else taken.why
        if what.token in self.acks.state.pins:
            by = "a transaction that is to settle it has not ended yet"
        return FencedJobError(self._share, self.partition, what.offset, what.token, by)

    def renew(self, token: int, offset: int, until: int) -> None:
        """Let the lease end then. `FencedJobError` if the records are no longer in this hand."""
        what = Settling(token, offset, 1)
        self._look()
        if not _holds(self.acks.state, what):
            raise self._fenced(what)
        while _holds(self.acks.state, what) and self.acks.state.hands[token].until != until:
            self.acks.append([self.acks.encode(RENEW, moment=until, offset=offset, token=token)])
            self._look()
        if not _holds(self.acks.state, what):
            raise self._fenced(what)

    def holds(self, token: int) -> bool:
        """True if records of the token are in the hand of this member, as it knows."""
        return token in self.acks.state.mine

    # --- others ----------------------------------------------------------------------------------------

    def reap(self, members: set[int]) -> None:
        """Take the records of dead members back."""
        entries = [self.acks.encode(REAP, DEAD, moment=each, offset=self._me) for each in members]
        if entries:
            self.acks.append(entries)
            self._look()

    def reap_expired(self, moment: Moment) -> None:
        """Take the records back whose leases are over, except those that are pinned."""
        now, hands = moment.boottime_us, self.acks.state.hands
        over = [each for each in self.acks.state.expired(now) if len(hands[each]) > len(hands[each].pinned)]
        if over:
            encode = self.acks.encode
            self.acks.append([encode(REAP, EXPIRED, moment=now, offset=self._me, token=token) for token in over])
            self._look()

    def look(self) -> State:
        """Read what others have written."""
        return self._look()

    def _look(self) -> State:
        acks = self.acks
        state = acks.look()
        if acks.is_long():
            acks.seal()
            state = acks.look()
        if state.ended:
            self._log_ended(state)
        return state

    def _log_ended(self, state: State) -> None:
        while state.ended:
            offset, attempts, how = state.ended.popleft()
            reason = self._reasons.pop(offset, "")
            logger.warning(
                "share %s: the record at offset %d of partition %d has ended after %d attempts, %s%s",
                self._share, offset, self.partition, attempts, how, f": {reason}" if reason else "",
            )  # fmt: skip

    def sync(self) -> None:
        """Make durable what was settled, and of which log. Synced."""
        if self.is_unsynced:
            fresh = self.acks.state.fresh
            end, chain = self.records.none_before_in_batch(fresh)
            if chain and fresh > self.acks.state.passed[0]:
                with suppress(LogError):  # a later one says it
                    self.acks.append([self.acks.encode(PASS, moment=chain, offset=end)])
            self.acks.sync()
            self.is_unsynced = False

    def release_all(self) -> None:
        """Release all that this member has in hand."""
        for token in list(self._look().mine):
            hand = self.acks.state.hand(token)
            if hand is not None:
                self._settle_if_held(token, hand, RELEASED if token in self._jobs else RETURNED)

    def close(self) -> None:
        """Close the files."""
        self.records.release()
        self.acks.close()


def _nobody() -> None:
    """A reference to no job."""


def _holds(state: State, what: Settling) -> bool:
    hand = state.hand(what.token)
    if hand is None or what.token not in state.mine:
        return False
    if hand.pinned:
        return not hand.among(what.offset, what.size) <= hand.pinned
    return hand.some is None or not hand.some.isdisjoint(range(what.offset, what.offset + what.size))


def shown_rows(takings: Iterable[Taking]) -> Iterator[Sequence[object]]:
    """The table of a share in a notebook: the names, and a row for each partition, as this member has read it."""
    yield "partition", "in hand of all members", "free again", *Counts._fields
    for each in takings:
        state = each.acks.state
        yield each.partition, state.in_hand, len(state.free), *state.counts
