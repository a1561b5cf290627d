"""Pinning: what a member does for transactions that settle records, and for dead letters.

Invariant: a record is pinned before its transaction is committed, and stays in hand until the transaction has ended.
A pin for which no transaction runs is *in doubt*: its member has died, its lease is over, or the commit has failed in
a way that does not tell what happened. Then the store of transactions tells (`Transactions.resolve`).

A record whose attempts are used up is taken by any member, which writes its dead letter. If that fails, the record goes
back, and a member tries again later; other records are not delayed.

Threads: safe for all. The share's lock is never held while a transaction is committed or resolved, because whoever
applies a transaction takes this lock while it holds the lock of the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple
from weakref import WeakSet

from ..errors import CommitPendingError, FencedJobError, LogClosedError, LogError, StaleGenerationError
from ..format.record import Record
from ..system.clock import Moment, monotonic
from ..system.not_copyable import NotCopyable
from .ack_log import Pin, pins_of
from .directory import ShareDirectory
from .entries import EXHAUSTED, REJECTED, RELEASED, UNPINNED
from .hand import Doomed, Hand
from .job import InHand
from .members import file_of
from .records import record_of
from .taking import Settling, Taking
from .transacting import Death, Letter, Promise

logger = logging.getLogger("loglib")

_PAUSE_S = 1.0  # after a dead letter, or the end of a transaction, that has failed; it doubles with each failure
_MOST_PAUSE_S = 60.0

Use = Callable[[], AbstractContextManager[None]]  # holds the share's lock; `LogClosedError` if the share is closed


class Pinning(NotCopyable):
    """The pins and the dead letters of one member."""

    def __init__(
        self, directory: ShareDirectory, takings: Mapping[int, Taking], me: int, member: str, lease_us: int
    ) -> None:
        self.directory = directory
        self.takings = takings
        self.running: WeakSet[Promise] = WeakSet()  # an interrupt may end a transaction without a word
        self.in_doubt: set[tuple[int, int]] = set()  # partition and token; not those of this member
        self.may_be_pending = True  # a transaction, whose process has died after it had settled its records
        self._me = me
        self._member = member
        self._lease_us = lease_us
        self._pause_s = _PAUSE_S
        self._try_at = 0.0
        self._tried = -1  # the partition of the last dead letter

    # --- promises ----------------------------------------------------------------------------------------

    def promise(self, use: Use, job: InHand, outcome: int) -> Promise:
        """Let a transaction settle what is left of a job. `FencedJobError` if it is no longer in this hand."""
        with use():
            offsets = self.takings[job.partition].in_hand(job.token, job.first_offset, job.count)
            return self._promised(use, job.partition, job.token, offsets, outcome, job)

    def _promised(
        self, use: Use, partition: int, token: int, offsets: Sequence[int], outcome: int, job: InHand | None = None
    ) -> Promise:
        found = Promise(KeeperOf(self, use), partition, pins_of(self._me, token, offsets, outcome), job)
        self.running.add(found)
        return found

    def _running_tokens(self, partition: int) -> set[int]:
        return {pin.token for each in self.running if each.partition == partition for pin in each.pins}

    # --- dead letters --------------------------------------------------------------------------------------

    def is_death(self, job: InHand, outcome: int) -> bool:
        """True if a dead letter is written for a job that is settled so."""
        settings = self.takings[job.partition].acks.state.settings
        is_last = outcome == RELEASED and job.attempt >= settings.max_attempts
        return settings.dead_letter is not None and (is_last or outcome == REJECTED)

    def bury(self, use: Use, job: InHand, outcome: int, reason: str) -> None:
        """Write dead letters for what is left of a job, and settle it. If it raises, the job stays in hand."""
        path = self.directory.settings().dead_letter
        with use():
            taking = self.takings[job.partition]
            if path is None:  # since just now
                taking.settle(Settling(job.token, job.first_offset, job.count, outcome), reason)
                return
            offsets = taking.in_hand(job.token, job.first_offset, job.count)
            outcome = REJECTED if outcome == REJECTED else EXHAUSTED
            promise = self._promised(use, job.partition, job.token, offsets, outcome)
            records = job.records_at(offsets)  # retention may have dropped them from the log
            letters = self._letters(taking, records, path, job.attempt, reason, self._member)
        self._write(path, letters, promise)

    def _letters(
        self, taking: Taking, records: Sequence[Record], path: str, attempts: int, reason: str, member: str
    ) -> list[Letter]:
        death = Death(self.directory.topic_path, self.directory.name, attempts, reason, member)
        for each in records:
            taking.note_reason(each.offset, reason)
        return [death.letter(each, path) for each in records]

    def _write(self, path: str, letters: list[Letter], promise: Promise) -> None:
        try:
            self.directory.transactions.bury(path, letters, promise)
        except CommitPendingError as error:
            logger.warning("share %s: a dead letter is committed, and not visible yet: %s", self.directory.name, error)
        finally:
            promise.keeper.forget(promise, settled=False)

    # --- what is due ---------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """True if a dead letter is to be written, or a pin is in doubt."""
        if self.may_be_pending:
            return monotonic() >= self._try_at
        for taking in self.takings.values():
            state = taking.acks.state
            if (
                (state.doomed and state.may_take())
                or (state.burials and state.burials - self._running_tokens(taking.partition))
                or (state.pins and self.doubtful(taking))
            ):
                return monotonic() >= self._try_at
        return False

    def doubtful(self, taking: Taking) -> list[int]:
        """The tokens whose pins are in doubt, as this member knows."""
        state, number = taking.acks.state, taking.partition
        mine = state.pins & state.mine
        if mine:
            mine -= self._running_tokens(number)
        return sorted(mine.union(token for token in state.pins - state.mine if (number, token) in self.in_doubt))

    def run(self, use: Use, moment: Callable[[], Moment]) -> None:
        """Resolve the pins that are in doubt, and write one dead letter. Errors are logged, and it is tried again."""
        try:
            if self.may_be_pending:
                self.directory.transactions.finish(self.directory)
                self.may_be_pending = False
            self.in_doubt = {each for each in self.in_doubt if each[1] in self.takings[each[0]].acks.state.pins}
            for taking in list(self.takings.values()):
                if self.doubtful(taking):
                    self.directory.transactions.resolve(self.directory, _InDoubt(self, use, taking))
            self._bury_one(use, moment)
        except (LogClosedError, FencedJobError):  # the caller looks; or another member was quicker
            return
        except StaleGenerationError:
            raise
        except (LogError, OSError) as error:
            self._pause()
            what = "a dead letter, or the end of a transaction, waits"
            logger.warning("share %s: %s: %s", self.directory.name, what, error)

    def _pause(self) -> None:
        self._try_at = monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    def _bury_one(self, use: Use, moment: Callable[[], Moment]) -> None:
        path = self.directory.settings().dead_letter
        # One that fails must not stop those of other partitions: it is the last one that is tried again.
        for partition, taking in sorted(self.takings.items(), key=lambda each: each[0] <= self._tried):
            with use():
                token = taking.take_doomed(moment(), self._lease_us, self._running_tokens(partition))
                if token is None:
                    continue
                hand = taking.acks.state.hands[token]
                if path is None or hand.doomed is None:  # an alteration ends the doomed ones
                    taking.settle(Settling(token, hand.offset, 1, RELEASED))
                    if hand.offset in taking.acks.state.doomed:  # the alteration is not whole yet
                        self._pause()
                    continue
            self._tried = partition
            try:
                self._bury_doomed(use, taking, token, hand, hand.doomed, path)
            except (LogError, OSError):
                with suppress(LogError, OSError), use():  # it may be pinned
                    taking.settle(Settling(token, hand.offset, 1, RELEASED))
                raise
            self._pause_s = _PAUSE_S
            return

    def _bury_doomed(self, use: Use, taking: Taking, token: int, hand: Hand, doomed: Doomed, path: str) -> None:
        with use():
            promise = self._promised(use, taking.partition, token, [hand.offset], EXHAUSTED)
            record = record_of(taking.records.around(hand.offset), hand.offset)
            letters = self._letters(taking, [record], path, hand.attempt, doomed.how, file_of(doomed.member))
        self._write(path, letters, promise)

    def note_in_doubt(self, taking: Taking, members: Container[int], now_us: int | None) -> None:
        """Note the pins of dead members, and those whose leases are over."""
        state = taking.acks.state
        for token in state.pins - state.mine:
            hand = state.hands[token]
            if hand.member in members or (now_us is not None and 0 < hand.until <= now_us):
                self.in_doubt.add((taking.partition, token))


class KeeperOf(NamedTuple):
    """The `Keeper` of a member."""

    pinning: Pinning
    use: Use

    @property
    def directory(self) -> ShareDirectory:
        return self.pinning.directory

    def pin(self, promises: Sequence[Promise]) -> None:
        with self.use():
            for partition, pins in _by_partition(promises):
                self.pinning.takings[partition].pin(pins)

    def unpin(self, promises: Sequence[Promise]) -> None:
        with self.use():
            for partition, pins in _by_partition(promises):
                self.settle_with(partition, [each._replace(outcome=UNPINNED) for each in pins])

    def settle(self, partition: int, pins: Sequence[Pin]) -> None:
        with self.use():
            self.settle_with(partition, pins)

    def settle_with(self, partition: int, pins: Sequence[Pin]) -> None:
        taking = self.pinning.takings[partition]
        taking.acks.end_pins(pins)
        taking.look()  # and log what has ended

    def forget(self, promise: Promise, *, settled: bool) -> None:
        self.pinning.running.discard(promise)
        if isinstance(promise.job, InHand):
            promise.job.end_promise(settled=settled)


class _InDoubt:
    """The `Doubts` of a member about one partition."""

    def __init__(self, pinning: Pinning, use: Use, taking: Taking) -> None:
        self._pinning = pinning
        self._use = use
        self._taking = taking
        self.partition = taking.partition

    def pins(self) -> list[Pin]:
        with self._use():
            state = self._taking.look()
            return [
                pin
                for token in self._pinning.doubtful(self._taking)
                for pin in pins_of(state.hands[token].member, token, sorted(state.hands[token].pinned), RELEASED)
            ]

    def release(self, pins: Sequence[Pin]) -> None:
        with self._use():
            self._taking.acks.end_pins(pins)


def _by_partition(promises: Sequence[Promise]) -> Iterator[tuple[int, list[Pin]]]:
    """The pins of the promises, by partition."""
    for partition in sorted({each.partition for each in promises}):
        yield partition, [pin for each in promises if each.partition == partition for pin in each.pins]
