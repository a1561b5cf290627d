"""Transacting: what a share asks of transactions, and what a transaction knows of a share. And dead letters.

Invariant: this room knows no transactions. Its topic hands in what implements `Transactions`.

A dead letter is a record with the key, the value, the timestamp and the headers of the record that has died, and with
these headers, as text:

    loglib-origin-topic      the path of the topic, relative to the directory of the topic for dead letters
    loglib-origin-partition  loglib-origin-offset
    loglib-share             loglib-attempts
    loglib-reason            why it has died: the reason of `reject` or `release`, or the exception
    loglib-member            who had it last: the name; of a dead member only the number is known
    loglib-redriven          how often the record was sent back from the dead letters to its topic before

Threads: facts that do not change, and pure functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..format.columns import Headers
from ..format.record import Record
from ..system.clock import Clock
from ..system.files import Files
from .ack_log import Pin

ORIGIN_TOPIC = "loglib-origin-topic"
ORIGIN_PARTITION = "loglib-origin-partition"
ORIGIN_OFFSET = "loglib-origin-offset"
REDRIVEN = "loglib-redriven"
_SHARE, _ATTEMPTS, _REASON, _MEMBER = "loglib-share", "loglib-attempts", "loglib-reason", "loglib-member"
NAMES = frozenset({ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET, REDRIVEN, _SHARE, _ATTEMPTS, _REASON, _MEMBER})
_MOST_REASON = 1000  # characters


class ShareFacts(Protocol):
    """A share's directory, as transactions know it."""

    @property
    def files(self) -> Files: ...
    @property
    def topic_path(self) -> str: ...
    @property
    def log_id(self) -> bytes: ...
    @property
    def name(self) -> str: ...
    @property
    def permissions(self) -> int: ...
    @property
    def clock(self) -> Clock: ...


class Keeper(Protocol):
    """The member that has the records of a promise in hand."""

    @property
    def directory(self) -> ShareFacts: ...

    def pin(self, promises: Sequence[Promise]) -> None:
        """Keep the records in this hand until the transaction has ended. Synced.

        `FencedJobError` if one of them was taken away; then some may be pinned.
        """

    def unpin(self, promises: Sequence[Promise]) -> None:
        """Let the records be settled otherwise: the transaction was not committed. An error leaves them in doubt."""

    def settle(self, partition: int, pins: Sequence[Pin]) -> None:
        """Settle the records: the transaction is committed. Synced. `LogClosedError` if the member has left."""

    def forget(self, promise: Promise, *, settled: bool) -> None:
        """The transaction is over. What is still pinned then is in doubt, and is resolved."""


class Promise:
    """Records in the hand of a member that a transaction settles, if it is committed.

    As long as somebody refers to it, and it was not forgotten, its transaction runs.
    """

    __slots__ = ("__weakref__", "job", "keeper", "partition", "pins")

    def __init__(self, keeper: Keeper, partition: int, pins: Sequence[Pin], job: object = None) -> None:
        self.keeper = keeper
        self.partition = partition
        self.pins = pins
        self.job = job  # it stays in use until the transaction is over


class Doubts(Protocol):
    """Pinned records of one partition whose transaction nobody carries on."""

    @property
    def partition(self) -> int: ...

    def pins(self) -> list[Pin]:
        """Those that are still pinned, after a look at the file."""

    def release(self, pins: Sequence[Pin]) -> None:
        """Take these back: their transaction was not committed, and never will be. Synced."""


class Letter(NamedTuple):
    """A dead letter."""

    value: bytes | None
    key: bytes | None
    timestamp: int
    headers: Headers


class Transactions(Protocol):
    """The transactions that settle records of shares."""

    def bury(self, path: str, letters: Sequence[Letter], promise: Promise) -> None:
        """Write the dead letters to the topic at the path, and settle the records of the promise, all or nothing.

        The topic is made if there is none. Before anything is committed it raises the errors of a transaction, and
        those of a topic that cannot be written. `CommitPendingError` if it is committed, and not visible yet.
        """

    def finish(self, share: ShareFacts) -> None:
        """Make visible what is committed and settles records of this share: its process may have died before."""

    def resolve(self, share: ShareFacts, doubts: Doubts) -> None:
        """Settle the records whose transaction is committed, and take the others back. Raises if it is not known."""


class Death(NamedTuple):
    """Why a record has died, for its dead letter."""

    topic_path: str
    share: str
    attempts: int
    reason: str
    member: str

    def letter(self, record: Record, dead_path: str) -> Letter:
        """The dead letter of the record, for the topic at this path."""
        own = tuple(each for each in record.headers if each[0] not in NAMES)
        redriven = next((value for name, value in record.headers if name == REDRIVEN), b"0")
        facts: dict[str, str | int] = {
            ORIGIN_TOPIC: os.path.relpath(os.path.realpath(self.topic_path), os.path.dirname(dead_path)),
            ORIGIN_PARTITION: record.partition, ORIGIN_OFFSET: record.offset, _SHARE: self.share,
            _ATTEMPTS: self.attempts, _REASON: self.reason[:_MOST_REASON], _MEMBER: self.member,
        }  # fmt: skip
        told = tuple((name, str(fact).encode("utf-8", "replace")) for name, fact in facts.items())
        return Letter(record.value, record.key, record.timestamp, (*own, *told, (REDRIVEN, redriven or b"0")))
