"""Redriving: send records from a topic for dead letters back to the topics that they came from.

Invariant: each dead letter is sent back once, whatever happens meanwhile. The share `redrive` of the topic for dead
letters remembers which ones were sent, and a transaction sends some of them and accepts them there. A run that is
killed is continued by the next one. Runs at the same time share the work. What a run leaves out stays unsettled, so a
later run with another filter finds it. A record that dies again during the run is one for the next run.

A record that is sent back has its key, its value, its timestamp and its own headers, and `loglib-redriven`, which says
how often it was sent back.

Threads: a call belongs to one thread.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

from ..config.arguments import check_count
from ..config.lazy import called_later
from ..errors import LogError
from ..format.record import Record
from ..jobs import Job
from ..jobs.directory import ShareDirectory
from ..jobs.job import InHand
from ..jobs.transacting import NAMES, ORIGIN_PARTITION, ORIGIN_TOPIC, REDRIVEN
from ..open_topic import OpenTopic
from .dead_letters import APP
from .transaction import Transaction

SHARE = "redrive"  # of the topic for dead letters
_WINDOW = 1_000_000  # dead letters of a partition that may be left out
_MOST_ATTEMPTS = 0xFFFF  # runs that may be killed while they have the same dead letter in hand
_MOST_RECORDS = 1000  # of one transaction
_MOST_BYTES = 8 << 20  # of one transaction, about
_TIMEOUT_S = 2.0

logger = logging.getLogger("loglib")

_open_topic = called_later("loglib.topic", "open_topic")
Where = Callable[[Record], object]


class RedriveReport(NamedTuple):
    """The result of a call of `redrive`; of a dry run, what it would do."""

    redriven: int  # dead letters that were sent back
    to: dict[str, int]  # how many of them, by the path of the topic
    left_out: int  # that `where` leaves, or whose origin is not known; a later call may send them
    dry_run: bool


class _Sent(NamedTuple):
    """Where a dead letter is sent."""

    path: str
    partition: int | None  # None: by its key


def redrive(
    dead_topic: str | os.PathLike[str], to: str | os.PathLike[str] | None = None, *, where: Where | None = None,
    limit: int | None = None, dry_run: bool = False,
) -> RedriveReport:  # fmt: skip
    """Send the records of a topic for dead letters back to the topics and partitions that they came from, each once.

    `to`: the path of another topic, for all of them. `where`: a function of a record; only records for which it is true
    are sent. `limit`: the largest number to send. With `dry_run` nothing is written. A record without the headers of a
    dead letter is left out, unless there is `to`. What is sent is committed in transactions of up to 1000 records.

    `FileNotFoundError` if a topic does not exist; `LogError` if it has fewer partitions than before; the errors of
    transactions; `ShareFullError` if a million records are left out before others. What was sent before the error stays
    sent, and the next call continues. `ValueError` for `to` the same topic: what is sent would come again, for ever.
    """
    if limit is not None:
        check_count("limit", limit)
    target = None if to is None else os.path.realpath(os.fspath(to))
    if target == os.path.realpath(os.fspath(dead_topic)):
        raise ValueError(f"to must be another topic than the one with the dead letters, {target}")
    with ExitStack() as opened:
        dead = opened.enter_context(_open_topic(dead_topic, mode="r"))
        redriving = _Redriving(dead, target, where, limit, opened)
        if dry_run:
            redriving.look()
        else:
            redriving.run()
        return RedriveReport(sum(redriving.to.values()), dict(redriving.to), redriving.left_out, dry_run)


class _Redriving:
    """One call."""

    def __init__(
        self, dead: Any, to: str | None, where: Where | None, limit: int | None, opened: ExitStack
    ) -> None:  # fmt: skip
        self._dead = dead
        self._to = to
        self._where = where
        self._limit = limit
        self._opened = opened
        self._targets: dict[str, OpenTopic] = {}
        self.to: Counter[str] = Counter()
        self.left_out = 0

    def look(self) -> None:
        """Count what `run` would send."""
        for record in self._unsent():
            if self._is_full():
                break
            sent = self._sent(record)
            if sent is not None:
                self._target(sent)
                self.to[sent.path] += 1

    def _unsent(self) -> Iterator[Record]:
        """The records that were not sent before."""
        directory: ShareDirectory = self._dead._share_directory(SHARE)  # noqa: SLF001
        unsettled: dict[int, Callable[[int], bool]] = {}
        for partition in directory.partitions() if directory.exists() else ():
            with closing(directory.acks(partition, 0)) as acks:
                unsettled[partition] = acks.state.is_unsettled
        for record in self._dead.read():
            is_unsettled = unsettled.get(record.partition)
            if is_unsettled is None or is_unsettled(record.offset):
                yield record

    def run(self) -> None:
        """Send."""
        share = self._dead.share(SHARE, max_attempts=_MOST_ATTEMPTS, window=_WINDOW, settle="explicit")
        with share:
            ends = {each.id: each.high_watermark for each in self._dead.partitions}
            kept: list[InHand] = []  # in hand until the end, so that they do not come again in this run
            part: list[tuple[Job, _Sent]] = []  # for one transaction
            part_bytes = 0
            while not self._is_full(len(part)) and (batch := share.take_batch(_MOST_RECORDS, 0.0)) is not None:
                if batch.first_offset >= ends.get(batch.partition, 0):  # they have died since this run began
                    kept.append(batch)
                    if not self._is_more_before(ends):
                        break
                    continue
                for job in batch.jobs():
                    sent = None if self._is_full(len(part)) else self._sent(job.record)
                    if sent is None:
                        kept.append(job)
                        continue
                    part.append((job, sent))
                    part_bytes += len(job.value or b"") + len(job.key or b"")
                    if len(part) >= _MOST_RECORDS or part_bytes >= _MOST_BYTES:
                        self._send(part)
                        part, part_bytes = [], 0
            self._send(part)
            for job in kept:
                job.release(count=False)

    def _is_more_before(self, ends: Mapping[int, int]) -> bool:
        """True if there are dead letters before these offsets, by partition, that nobody has in hand."""
        directory: ShareDirectory = self._dead._share_directory(SHARE)  # noqa: SLF001
        for partition in directory.partitions():  # one that was just added may have no file yet
            end = ends.get(partition, 0)
            with closing(directory.acks(partition, 0)) as acks:
                if acks.state.fresh < end or any(each < end for each in acks.state.free):
                    return True
        return False

    def _is_full(self, more: int = 0) -> bool:
        return self._limit is not None and sum(self.to.values()) + more >= self._limit

    def _send(self, part: list[tuple[Job, _Sent]]) -> None:
        with Transaction(APP, None, owner=APP, source=None, store=None, timeout=_TIMEOUT_S) as transaction:
            for job, sent in part:
                transaction.accept(job)
                transaction.append(
                    self._target(sent), job.value, job.key, timestamp=job.timestamp,
                    headers=_own_headers(job.record), partition=sent.partition,
                )  # fmt: skip
        self.to.update(sent.path for _, sent in part)

    def _sent(self, record: Record) -> _Sent | None:
        """Where the record is sent; None if it is left out."""
        headers = dict(record.headers)
        if self._where is not None and not self._where(record):
            self.left_out += 1
            return None
        if self._to is not None:
            return _Sent(self._to, None)
        try:
            topic, partition = _text(headers, ORIGIN_TOPIC), int(_text(headers, ORIGIN_PARTITION))
        except (KeyError, ValueError):
            self._leave_out(record, "is no dead letter")
            return None
        own = os.path.realpath(self._dead.path)
        path = os.path.normpath(os.path.join(os.path.dirname(own), topic))
        if path == own:
            self._leave_out(record, "comes from here")
            return None
        return _Sent(path, partition)

    def _leave_out(self, record: Record, why: str) -> None:
        logger.warning("%s: the record at offset %d of partition %d %s: it is left out",
                       self._dead.path, record.offset, record.partition, why)  # fmt: skip
        self.left_out += 1

    def _target(self, sent: _Sent) -> OpenTopic:
        """The topic that gets the record. `LogError` if it no longer has the record's partition."""
        path, partition = sent
        if path not in self._targets:
            self._targets[path] = self._opened.enter_context(_open_topic(path, mode="r"))
        topic = self._targets[path]
        if partition is not None and partition >= (count := len(topic.partitions)):
            raise LogError(
                f"{path} has no partition {partition}, where a dead letter comes from: it has {count} now. "
                f"With that path as `to` (--to), all dead letters go there, by their keys"
            )
        return topic


def _text(headers: Mapping[str, bytes | None], name: str) -> str:
    return (headers[name] or b"").decode()


def _own_headers(record: Record) -> tuple[tuple[str, bytes], ...]:
    """The record's own headers, and how often it was sent back, with this time."""
    before = dict(record.headers).get(REDRIVEN) or b"0"
    times = int(before) + 1 if before.isdigit() else 1
    own = tuple(each for each in record.headers if each[0] not in NAMES)
    return (*own, (REDRIVEN, b"%d" % times))
