"""Share: one member of a share, as its users know it: it hands out jobs, and settles them.

Invariant: a record is in the hand of one member at most, unless the lease of an earlier hand is over. In hand is what a
handler has begun, or is about to begin: nothing is fetched ahead of it.

A member looks at the others while it asks for records. The system reports a member that dies, because that closes its
file. So there is no heartbeat, and no lease is needed to notice a death.

Threads: safe for all; each loop has jobs of its own. A call in the middle of another call of the same thread (from a
signal handler) is refused, except `close`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Literal, TypedDict, TypeVar

from ..config.arguments import check_count, check_names
from ..config.quantities import Duration, seconds, timeout_seconds
from ..errors import (
    ForkedHandleError,
    LogClosedError,
    LogError,
    ShareFullError,
    StaleGenerationError,
    UnsettledError,
)
from ..groups.joined import Joined
from ..groups.members import new_member_name
from ..log.lookup import StartLike
from ..system.clock import Clock, Moment, monotonic
from ..system.files import with_a_free_descriptor
from ..system.notify import Observer
from ..system.process import in_child
from ..system.reentry import asker, refuse
from .common_wait import CommonWait
from .directory import ShareDirectory, check_settings
from .entries import ACCEPTED, MOST_TOGETHER, RELEASED
from .job import InHand, Job, JobBatch
from .job_source import JobSource, lent
from .members import MemberFile, is_dead
from .pinning import Pinning
from .recent_moment import RecentMoment
from .records import record_of
from .taking import Begun, Settling, Taking, shown_rows
from .transacting import Promise

# How often a member looks at the others although the system reports nothing, and how often where it reports nothing.
_LOOK_S = 0.5
_UNREPORTED_LOOK_S = 0.05
# The times of the looks after a report. A dying process releases its locks after the report, one file at a time.
_LOOKS_S = (0.0, 0.001, 0.004, 0.016, 0.064, 0.25)
# How often a member that always has records reads the reports.
_READ_S = 0.01
# How long a member sleeps that was woken, and found nothing: others write for each of their records.
_NAP_S = 0.001
_JOBS_A_TURN = 64  # of one partition; then the next one is asked first
_SPREAD = 0.2  # of a backoff, so that what failed together does not come back together
_MOST_BACKOFF_S = 86_400.0
_MEMBERS = "members"  # the observer's name for this directory
_US = 1_000_000

_in_child = in_child()

Taken = TypeVar("Taken", bound=InHand)


class ShareOptions(TypedDict, total=False):
    """The options of a member, which `Topic.share` explains. `Share` has their defaults."""

    start: StartLike
    member: str | None
    max_attempts: int
    window: int
    max_in_hand: int | None
    dead_letter: str | os.PathLike[str] | None
    order: Literal["none", "key"]
    backoff: Duration
    lease: Duration | None
    settle: Literal["after", "explicit"]
    commit: Duration


class Share(Joined, JobSource):
    """One member of a share. `Topic.share` makes it; it is a context manager, and iterable."""

    _kind = "share"

    def __init__(
        self,
        directory: ShareDirectory,
        *,
        start: StartLike = "begin",
        member: str | None = None,
        backoff: Duration = 0.0,
        lease: Duration | None = None,
        settle: Literal["after", "explicit"] = "after",
        commit: Duration = 0.1,
        **settings: int | str | os.PathLike[str] | None,
    ) -> None:
        if settle not in ("after", "explicit"):
            raise ValueError(f'settle must be "after" or "explicit", not {settle!r}')
        check_settings(settings, directory.topic_path)
        self.name = directory.name
        self.member = new_member_name() if member is None else member
        check_names(self.member)
        self._backoff_s = _at_least("backoff", backoff, 0.0)
        self._lease_us = 0 if lease is None else round(_at_least("lease", lease, 0.001) * _US)
        self._commit_s = _at_least("commit", commit, 0.0)
        self._explicit = settle == "explicit"
        self._directory = directory
        self._clock = directory.clock
        self._closed: LogError | None = None
        self._given_up = False  # what is in hand
        self._using = threading.RLock()  # held while a call reads or writes; never while it waits or handles
        self._is_using = asker(self._using)
        self._takings: dict[int, Taking] = {}
        self._turn = 0  # the place of the partition that is asked first
        self._served = 0  # jobs and batches, from any partition
        self._last: Taking | None = None  # the partition that is asked next, if nothing else is to be done
        self._owing: dict[int, Taking] = {}  # by partition; these have an accept to be written with the next take
        self._recent = RecentMoment(self._clock)
        self._looks = iter(_LOOKS_S)
        self._look_at = self._read_at = 0.0
        self._waiting: list[None] = []  # an item for each thread that waits for a job
        self._stopped = False
        self._sync_at: float | None = None  # when what was settled is to be durable
        directory.make(start, settings)
        with ExitStack() as opened:
            self._file = MemberFile(
                directory.files, directory.members, self.member, self._clock.moment().boot_id, directory.permissions
            )
            opened.callback(self._file.leave)
            self._pinning = Pinning(directory, self._takings, self._file.number, self.member, self._lease_us)
            self._observer = with_a_free_descriptor(directory.path, lambda: Observer(use_inotify=directory.files.real))
            opened.callback(self._observer.close)
            self._wait = CommonWait(self._observer)
            self._observer.observe_directory(_MEMBERS, directory.members)
            opened.callback(self._close_takings)
            self._take_in_added()
            opened.pop_all()
        self._turn = self._file.number  # so that members begin with different partitions
        self._left = False
        _in_child.add(self._abandon_in_child)
        self._topic = directory.track(self._end)  # a topic closes itself if nothing refers to it

    def _abandon(self) -> None:
        self._file.abandon()

    # --- for several shares together -------------------------------------------------------------------

    def settle_owed(self) -> None:
        """Write the accept of a loop that would otherwise wait for the next take."""
        if self._owing:
            with self._opened():
                self._settle_owed(None)

    def rest(self, deadline: float | None) -> float:
        """The time in seconds after which the share is to be asked although no descriptor is readable."""
        with self._use():
            return self._until(deadline)

    def end_wait(self) -> None:
        """The wait for the descriptors is over, and the next call looks."""
        self._wait.wait(0.0, self._wait.number())
        self._read_at = 0.0

    def _holding(self) -> tuple[str, object]:
        return "in hand", sum(len(each.acks.state.mine) for each in self._takings.values())

    def _rows(self) -> Iterator[Sequence[object]]:
        return iter(()) if self._closed is not None else shown_rows(list(self._takings.values()))

    # --- taking ----------------------------------------------------------------------------------------

    def batches(self, max_records: int = 100, timeout: Duration | None = None) -> Iterator[JobBatch]:
        """Like `follow`, but up to `max_records` records of a partition together: one write to take all of them.

        A record that was released, or whose member has died, comes as a batch of one.
        """
        check_count("max_records", max_records)
        wait_s, most = timeout_seconds(timeout), min(max_records, MOST_TOGETHER)
        return lent(partial(self._next, wait_s, most, self._batch))

    def _given(self, wait_s: float | None) -> Job | None:
        job = self._given_quickly()
        return self._next(wait_s, 1, self._job) if job is None else job

    def take_back(self, job: InHand, *, is_handled: bool) -> None:
        """Take back a job that is not settled. Its loop asks for the next one (`is_handled`), or is left."""
        if not is_handled:
            # A loop may end in the middle of another call. The next step of this member then releases the record.
            if self._closed is None and not self._is_using():
                with suppress(LogError, OSError):
                    job.release(reason="its loop was left")
            return
        with self._use():
            taking = self._takings[job.partition]
            if self._closed is not None:
                return
            if not self._explicit:
                self._owing[job.partition] = taking
                taking.accept_later(job.token, job.first_offset, job.count)
            elif taking.holds(job.token):
                raise UnsettledError(self.name, job.partition, job.first_offset)

    def _job(self, taking: Taking, _: int, moment: Moment) -> Job | None:
        begun = taking.take(1, moment, self._lease_us)
        return None if begun is None else self._handed_out(taking, begun)

    def _handed_out(self, taking: Taking, begun: Begun) -> Job:
        token, batch, offset, _, attempt, first_begun = begun
        job = Job(self, record_of(batch, offset), token, attempt, first_begun * _US)
        taking.hand_out(token, job)
        return job

    def _batch(self, taking: Taking, most: int, moment: Moment) -> JobBatch | None:
        begun = taking.take(most, moment, self._lease_us)
        if begun is None:
            return None
        token, batch, offset, count, attempt, first_begun = begun
        batch.decode()  # once for all parts of the batch
        jobs = JobBatch(self, batch.between(offset, offset + count), token, attempt, first_begun * _US)
        taking.hand_out(token, jobs)
        return jobs

    def _next(
        self, wait_s: float | None, most: int, make: Callable[[Taking, int, Moment], Taken | None]
    ) -> Taken | None:
        deadline = None if wait_s is None else monotonic() + wait_s
        is_fruitless = False
        while True:
            with self._use():
                if self._closed is not None:
                    break
                now, number = monotonic(), self._wait.number()
                if now >= self._read_at or now >= self._look_at:
                    self._act(now)
                found = None if self._pinning.is_due() else self._try_each(most, make)
                if found is not None:
                    if self._waiting:
                        self._wait.wake()  # another thread, which may have more to take
                    self._sync_if_due(now)
                    return found
                self._sync_if_due(monotonic())
                is_due = self._pinning.is_due()
                if not is_due and (self._stopped or (deadline is not None and now >= deadline)):
                    self._check_not_blocked()
                    return None
                until = self._until(deadline)
                self._waiting.append(None)
            try:
                if is_due:
                    self._pinning.run(self._opened, self._clock.moment)
                    continue
                if is_fruitless:  # it was woken for a record of others, who may write thousands each second
                    time.sleep(min(_NAP_S, until))
                self._wait.wait(until, number)
            finally:
                self._waiting.pop()
            self._read_at, is_fruitless = 0.0, True
        if isinstance(self._closed, ForkedHandleError) or (self._why and wait_s is not None):
            raise self._closed
        self._release_if_closed()
        return None

    def _given_quickly(self) -> Job | None:
        """The next record of the partition that the last one came from, in few steps. None in any unusual case.

        All is checked that `_next` and `_try_each` check; they try again after a None.
        """
        with self._use():
            taking, now = self._last, monotonic()
            moment = self._recent.known(now)
            if (
                taking is None or moment is None or now >= self._read_at or now >= self._look_at
                or self._lease_us or self._stopped or self._closed is not None or self._pinning.may_be_pending
                or ((self._served + 1) % _JOBS_A_TURN == 0 and len(self._takings) > 1)
                or self._owes_elsewhere(taking)
            ):  # fmt: skip
                return None
            before = taking.acks.state
            begun = taking.take_next(moment)
            if taking.is_unsynced and self._sync_at is None:
                self._sync_at = now + self._commit_s
            if taking.acks.state is not before:
                self._check_valid()
            if begun is None:
                return None
            self._served += 1
            job = self._handed_out(taking, begun)
            if self._waiting:
                self._wait.wake()  # another thread, which may have more to take
            self._sync_if_due(now)
            return job

    def _owes_elsewhere(self, taking: Taking) -> bool:
        owing = self._owing
        return bool(owing) and (len(owing) > 1 or taking.partition not in owing)

    def _until(self, deadline: float | None) -> float:
        moments = [taking.acks.state.next_moment() for taking in self._takings.values()]
        return _rest((self._look_at, deadline, self._sync_at), moments, self._clock)

    def _try_each(
        self, most: int, make: Callable[[Taking, int, Moment], Taken | None]
    ) -> Taken | None:
        takings = list(self._takings.values())
        # Leases and waiting records ask for the true moment.
        is_timed = bool(self._lease_us) or any(taking.acks.state.is_timed for taking in takings)
        moment = self._recent.read(exactly=is_timed)
        if self._stopped:
            for taking in takings:
                taking.settle_pending()
            return None
        first = takings[self._turn % len(takings)]
        self._settle_owed(first)
        for place in range(len(takings)):
            taking = takings[(self._turn + place) % len(takings)]
            if taking.acks.state.expired(moment.boottime_us):
                taking.reap_expired(moment)
                self._pinning.note_in_doubt(taking, (), moment.boottime_us)
            before = taking.acks.state.generation
            job = make(taking, most, moment)
            if taking.is_unsynced and self._sync_at is None:
                self._sync_at = monotonic() + self._commit_s
            if taking.acks.state.generation != before:
                self._check_valid()
            if job is not None:
                self._served += 1
                self._last = taking if self._served % _JOBS_A_TURN else None  # then it is another one's turn
                self._turn += place + (self._served % _JOBS_A_TURN == 0)
                return job
        return None

    def _settle_owed(self, unless: Taking | None) -> None:
        """Write accepts that would wait for the end of another partition's job: all but those of this partition."""
        for taking in list(self._owing.values()):
            if taking is not unless:
                taking.settle_pending()
                del self._owing[taking.partition]

    def _check_not_blocked(self) -> None:
        for taking in () if self._stopped else self._takings.values():
            if taking.is_blocked:
                raise ShareFullError(self.name, taking.partition, taking.acks.state.settings.window)

    # --- others ----------------------------------------------------------------------------------------

    def _act(self, now: float) -> None:
        """Read the system's reports, and look at the other members, each if it is due."""
        if now >= self._read_at:
            self._read_at = now + _READ_S
            changes = self._wait.changed()
            if _MEMBERS in changes and self._observer.reports:
                self._looks = iter(_LOOKS_S)
                self._look_at = min(self._look_at, now + next(self._looks))
                self._pinning.may_be_pending = True  # one that has just died may have left a transaction
        if now >= self._look_at:
            self._look_at_members()
            soon = next(self._looks, None)
            if soon is None:
                self._take_in_added()
                soon = _LOOK_S if self._observer.reports else _UNREPORTED_LOOK_S
            self._look_at = now + soon

    def _look_at_members(self) -> None:
        self._check_valid()
        self._directory.check_role()  # after a promotion, others handle the records in the copy
        files, directory, me = self._directory.files, self._directory.members, self._file.number
        dead: dict[int, bool] = {}
        for taking in self._takings.values():
            state = taking.look()
            others = state.members() - {me}
            for each in others | {state.hands[token].member for token in state.pins - state.mine}:
                if each not in dead:
                    dead[each] = is_dead(files, directory, each)
            taking.reap({each for each in others if dead[each]})
            self._pinning.note_in_doubt(taking, {each for each, is_gone in dead.items() if is_gone}, None)

    def _check_valid(self) -> None:
        for taking in self._takings.values():
            taking.acks.check_named()
        if not self._file.is_valid():
            raise StaleGenerationError(self.name, self.member)

    def _take_in_added(self) -> None:
        directory = self._directory
        for partition, log in directory.find_logs().items():
            if partition in self._takings:
                continue
            directory.make_added(partition)
            acks = directory.acks(partition, self._file.number)
            taking = Taking(acks, log, self._clock, self.name, self.member, self._file.number)
            self._takings[partition] = taking
            directory.check_history(acks)
            directory.follow_settings(acks)
            self._observer.observe_file(partition, log.watermark_path)
            self._observer.observe_directory(("acks", partition), directory.of_partition(partition))

    # --- settling --------------------------------------------------------------------------------------

    def settle(self, job: InHand, outcome: int, *, delay: Duration | None = None, reason: str = "") -> None:
        """Settle the records of a job: `Job.accept`, `release` and `reject` call it."""
        until = 0
        if outcome == RELEASED or delay is not None:
            wait_s = _wait_s(self._backoff_s, job.attempt) if delay is None else _at_least("delay", delay, 0.0)
            until = self._clock.moment().boottime_us + round(wait_s * _US) if wait_s else 0
        if self._pinning.is_death(job, outcome):
            self._pinning.bury(self._opened, job, outcome, reason)
            return
        with self._opened():
            taking = self._takings[job.partition]
            taking.settle(Settling(job.token, job.first_offset, job.count, outcome, until), reason)
            now = monotonic()
            self._sync_at = now + self._commit_s if self._sync_at is None else self._sync_at
            self._sync_if_due(now)

    def promise(self, job: InHand) -> Promise:
        """Let a transaction accept the records of a job: `Transaction.accept` calls it."""
        return self._pinning.promise(self._opened, job, ACCEPTED)

    def renew(self, job: InHand, period: Duration) -> None:
        """Give a job a new lease: `Job.renew` calls it."""
        if not self._lease_us:
            raise ValueError("this share was joined without lease=, so nothing takes the record away")
        lease_s = _at_least("seconds", period, 0.001)
        with self._opened():
            until = self._clock.moment().boottime_us + round(lease_s * _US)
            self._takings[job.partition].renew(job.token, job.first_offset, until)

    def take_batch(self, max_records: int = 100, timeout: Duration | None = None) -> JobBatch | None:
        """Like `take`, but up to `max_records` records of a partition together."""
        check_count("max_records", max_records)
        return self._next(timeout_seconds(timeout), min(max_records, MOST_TOGETHER), self._batch)

    def stop(self) -> None:
        """Let all loops end when they ask for the next job. What is in hand stays in hand. Any thread may call this."""
        self._stopped = True
        self._wait.wake()

    def flush(self) -> None:
        """Make durable all that was settled. Synced."""
        with self._opened():
            for taking in self._takings.values():
                taking.settle_pending()
                taking.sync()
            self._sync_at = None

    def _sync_if_due(self, now: float) -> None:
        if self._sync_at is not None and (now >= self._sync_at or not self._commit_s):
            for taking in self._takings.values():
                taking.sync()
            self._sync_at = None

    # --- life ------------------------------------------------------------------------------------------

    def _use(self) -> threading.RLock:
        if self._is_using():
            refuse("the share")
        return self._using

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Hold the lock for a call on the open share."""
        try:
            with self._use():
                self._check_open()
                yield
        finally:
            self._release_if_closed()

    def _release_if_closed(self) -> None:
        """A `close` that came in the middle of a call of its thread has left the rest to that call."""
        if self._closed is not None and not self._left:
            self.close()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def close(self) -> None:
        """Release what is in hand, make durable what is settled, and leave the share. Loops end.

        A job that is still being handled is released, too, and may be handled by another member meanwhile: let the
        handlers return first. In a signal handler that interrupted another call on this share, that call closes it.
        """
        if self._closed is None:
            self._closed = LogClosedError(self._why or f"share {self.name} is closed; join it again")
        self._wait.wake()
        if not self._is_using():
            with self._using:
                self._release()

    def _release(self) -> None:
        """Give everything up. After an interrupt it may be called again."""
        if self._left:
            return
        try:
            if not self._given_up:
                self._given_up = True  # if this fails, others take the records back, because the member has left
                with ExitStack() as ends:  # all of it, also if an accept is void
                    for taking in self._takings.values():
                        for end in (taking.sync, taking.release_all, taking.settle_pending):  # the last one first
                            ends.callback(end)
        finally:
            self._file.leave()
            self._close_takings()
            self._observer.close()
            _in_child.discard(self._abandon_in_child)
            self._left = True

    def _close_takings(self) -> None:
        for taking in self._takings.values():
            taking.close()

    def _abandon_in_child(self, parent_pid: int) -> None:
        """After a fork: the membership belongs to the parent, and the child must not keep its lock."""
        self._using = threading.RLock()
        self._is_using = asker(self._using)
        self._closed = ForkedHandleError(self._directory.path, parent_pid)
        self._left = True
        self._file.abandon()
        self._observer.abandon()
        self._wait = CommonWait(self._observer)
        self._close_takings()


def _wait_s(backoff_s: float, attempt: int) -> float:
    doubled = min(backoff_s * 2.0 ** min(attempt - 1, 64), max(_MOST_BACKOFF_S, backoff_s))
    return doubled * random.uniform(1 - _SPREAD, 1 + _SPREAD) if doubled else 0.0


def _rest(due: Iterable[float | None], moments: Iterable[int | None], clock: Clock) -> float:
    """Seconds until something is due: a look, a sync, a record that waits, the end of a lease, or a deadline."""
    until = [each for each in due if each is not None]
    now, now_us = monotonic(), clock.moment().boottime_us
    # One that is past waits for something else: `max_in_hand`.
    until += [now + (each - now_us) / _US for each in moments if each is not None and each > now_us]
    return max(0.0, min(until) - now)


def _at_least(name: str, given: Duration, least: float) -> float:
    found = seconds(name, given)
    if not least <= found < 1e9:
        raise ValueError(f"{name} must be at least {least:g} seconds, not {given!r}")
    return found
