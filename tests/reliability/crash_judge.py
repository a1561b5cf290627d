"""The judge of crash states: it recovers each state, compares that with what was promised, and recovers again."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from unittest import mock

from account import Account
from crash_worlds import (
    LEFT_OUT,
    PATH,
    Failure,
    Recorder,
    Row,
    Workload,
    account_with,
    brief,
    fixed_clock,
    judged,
    note_marks,
    rows_in,
)

from loglib import LogError, testing
from loglib.append.record_arguments import record_columns
from loglib.append.writer import Writer
from loglib.config.policies import TopicConfig
from loglib.log.index import SegmentIndex
from loglib.log.log import Log
from loglib.log.recovery import Recovery
from loglib.segment import Identity
from loglib.testing import CrashFS, CrashState, Image, Operation, crash_states

# --- judging a state -----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The result of recovery for the files of one partition."""

    log_start: int
    rows: tuple[Row, ...]


_MOST_OUTCOMES = 100_000  # kept between workloads
_AGAIN, _AGAIN_BYTES = record_columns(b"once more", b"key", None, None, limit_bytes=100)


class Judge:
    """Recovers states, each set of files once, and counts them."""

    def __init__(self, *, disk: Callable[[Image], CrashFS] = Recorder, nested_every: int = 0) -> None:
        self.disk = disk
        self.nested_every = nested_every  # one in so many of the recoveries that had something to do is cut itself
        self.digests: set[int] = set()
        self.nested: set[int] = set()  # digests of the states inside recovery
        self.judged = 0
        self.accounted = 0  # records that were appended; each is looked for in every state
        self.named = 0  # how many of them errors have called lost
        self._outcomes: dict[tuple[int, int, str], Outcome] = {}
        self._went_on: dict[int, Outcome] = {}  # by the files after recovery
        self._same: dict[Outcome, Outcome] = {}
        self._turn = 0

    def judge(
        self, cuts: Iterable[CrashState], config: TopicConfig, identities: Sequence[Identity],
        accounts: Sequence[Account],
    ) -> None:  # fmt: skip
        """Judge these states; raises the first `Failure`."""
        known: dict[Any, tuple[Outcome, ...]] = {}
        if len(self._outcomes) > _MOST_OUTCOMES:
            self._outcomes.clear()
            self._went_on.clear()
        for state in cuts:
            try:
                outcomes = known.get(state.key)
                if outcomes is None:
                    outcomes = known[state.key] = self._recovered(state, config, identities, accounts)
                for account, outcome in zip(accounts, outcomes, strict=True):
                    power = not state.whole
                    judged(account, state.at, power=power, log_start=outcome.log_start, rows=outcome.rows)
            except Failure as failure:
                failure.found_in(state, accounts)
                raise

    def _recovered(
        self, state: CrashState, config: TopicConfig, identities: Sequence[Identity], accounts: Sequence[Account]
    ) -> tuple[Outcome, ...]:
        image = state.image
        digest = image.digest(leaving_out=LEFT_OUT)
        self.digests.add(digest)
        outcomes = []
        for identity, account in zip(identities, accounts, strict=True):
            if len(identities) > 1:  # each partition is recovered on its own
                digest = image.digest(f"{PATH}/{identity.partition:04d}", leaving_out=LEFT_OUT)
            outcome, recovery = self._outcome(image, digest, config, identity)
            if self.nested_every and recovery:
                self._turn += 1
                if self._turn % self.nested_every == 0:
                    self._cut_recovery(image, recovery, config, identity, outcome, account, state)
            outcomes.append(outcome)
        return tuple(outcomes)

    def _outcome(
        self, image: Image, digest: int, config: TopicConfig, identity: Identity
    ) -> tuple[Outcome, Sequence[Operation]]:
        """The result of recovery for a partition; at the first time also the operations by which recovery mends it."""
        directory = f"{PATH}/{identity.partition:04d}"
        key = (digest, identity.partition, config.durability)
        outcome = self._outcomes.get(key)
        if outcome is not None:
            return outcome, ()
        outcome, operations = self._recover(image, directory, config, identity)
        self._outcomes[key] = outcome
        return outcome, operations

    def _recover(
        self, image: Image, directory: str, config: TopicConfig, identity: Identity
    ) -> tuple[Outcome, Sequence[Operation]]:
        """Recover, and continue. The operations are those of the recovery, if it mended anything."""
        self.judged += 1
        files = self.disk(image)
        seen: tuple[Row, ...] = ()
        try:
            if config.durability == "disk":  # otherwise readers must wait until a writer has mended the log
                seen = rows_in(Log(files, directory, identity))
            writer = Writer(files, directory, identity, config, index=SegmentIndex([]), clock=fixed_clock)
            recovery, end, done = writer.disk.recovery, writer.batch.tail.end, len(files.operations)
            if recovery.cut_bytes:
                _check_kept(image, files, recovery)
            files.kill()
            outcome = self._gone_on(files, directory, config, identity, end)
        except (LogError, OSError) as error:
            raise Failure("refused", repr(error)) from error
        rows = outcome.rows[: len(seen)]
        if seen != rows:
            raise Failure("phantoms", f"before recovery a reader saw {brief(seen)}, then there was {brief(rows)}")
        return outcome, () if recovery.clean else files.operations[:done]

    def _gone_on(self, files: CrashFS, directory: str, config: TopicConfig, identity: Identity, end: int) -> Outcome:
        """Recover again, which must change nothing; then append, flush and read. Done once for equal files."""
        ours = {path: content for path, content in files.tree().items() if path.startswith(directory)}
        key = hash((
            end, identity.partition, config.durability, config.compression,
            *(each for each in ours.items() if ".torn-" not in each[0] and not each[0].endswith("/lock")),
        ))  # fmt: skip
        if key in self._went_on:
            return self._went_on[key]
        writer = Writer(files, directory, identity, config, index=SegmentIndex([]), clock=fixed_clock)
        if writer.batch.tail.end != end or not writer.disk.recovery.clean:
            raise Failure("lost", f"recovered again, {writer.disk.recovery}, from {end} to {writer.batch.tail.end}")
        offset = writer.append(_AGAIN, _AGAIN_BYTES).start
        writer.flush()
        log = Log(files, directory, identity)
        log.writer = writer
        *rows, last = rows_in(log)
        files.kill()
        if last != (offset, b"once more", b"key") or offset != end:
            raise Failure("lost", f"at {end} appended a record at {offset} and read {last}")
        outcome = Outcome(log.mark().log_start_offset, tuple(rows))
        self._went_on[key] = outcome = self._same.setdefault(outcome, outcome)
        return outcome

    def _cut_recovery(
        self, image: Image, operations: Sequence[Operation], config: TopicConfig, identity: Identity,
        outcome: Outcome, account: Account, state: CrashState,
    ) -> None:  # fmt: skip
        """Cut the power at every instant of this recovery; what it restored is promised once it is published."""
        inner = account_with(outcome.rows, outcome.log_start)
        inner.promise(account.promised(state.at, power=True) - account.serial_at(outcome.log_start))
        note_marks(operations, {identity.partition: identity}, {identity.partition: inner})
        known: set[Any] = set()
        for cut in crash_states(image, list(operations), seed=self._turn, random=2):
            if cut.key in known:
                continue
            known.add(cut.key)
            digest = cut.image.digest(leaving_out=LEFT_OUT)
            self.digests.add(digest)
            self.nested.add(digest)
            try:
                found, _ = self._outcome(cut.image, digest, config, identity)
                judged(inner, cut.at, power=not cut.whole, log_start=found.log_start, rows=found.rows)
            except Failure as failure:
                failure.found_in(cut, [inner], first_partition=identity.partition)
                raise


def _check_kept(image: Image, files: CrashFS, recovery: Recovery) -> None:
    """The bytes that were cut must be in the quarantine file, but for zeros at their end."""
    if recovery.quarantine is None:
        raise Failure("lost", f"{recovery.cut_bytes} bytes were cut and not kept aside")
    segment, _, position = recovery.quarantine.rpartition(".torn-")
    cut = image.tree()[segment + ".log"][int(position) :].rstrip(b"\0")
    if files.read_whole(recovery.quarantine, len(cut)) != cut or len(cut) != recovery.cut_bytes:
        raise Failure("lost", f"{recovery.quarantine} is not what was cut")


# --- making a topic ----------------------------------------------------------------------------------------


def judge_making(judge: Judge, workload: Workload) -> None:
    """Cut the power while a topic is made, first opened, appended to, altered and closed."""
    fs = judge.disk(Image.empty())
    path, numbers = "/data/logs/topic", iter(range(1, 1000))
    config = workload.config()
    promised: list[tuple[int, list[bytes]]] = [(0, [])]
    policies = {name: getattr(config, name) for name in ("partitions", "flush", "retention", "durability")}

    def next_id() -> uuid.UUID:
        return uuid.UUID(int=next(numbers))

    with mock.patch.object(uuid, "uuid4", next_id):
        with testing.open_topic(path, files=fs, clock=fixed_clock, **policies) as topic:
            topic.append(b"one", partition=0, sync=True)
            if workload.durability == "disk":
                promised.append((len(fs.operations), [b"one"]))
            topic.append(b"two", partition=0)
        promised.append((len(fs.operations), [b"one", b"two"]))
        with testing.open_topic(path, files=fs) as topic:
            topic.alter(segment_bytes=1 << 20)
        seen: set[tuple[int, int]] = set()
        for state in fs.crash_states(mode=workload.mode, seed=workload.seed):
            digest = state.image.digest(leaving_out=LEFT_OUT)
            judge.digests.add(digest)
            least = [values for at, values in promised if at <= state.at][-1]
            if (digest, len(least)) in seen:
                continue
            seen.add((digest, len(least)))
            try:
                judge_made(judge.disk(state.image), path, policies, least)
            except Failure as failure:
                failure.found_in(state, ())
                raise


def judge_made(files: CrashFS, path: str, policies: dict[str, Any], least: list[bytes]) -> None:
    """Open a topic that may be half made, twice; at least these records must be there."""
    expected = least
    try:
        for again in (False, True):
            with testing.open_topic(path, files=files, clock=fixed_clock, **policies) as topic:
                values = [record.value or b"" for record in topic.partition(0).read()]
                if values != expected and (again or values[: len(least)] != least or values != _MADE[: len(values)]):
                    raise Failure("lost", f"{values} are left, {expected} were promised")
                topic.append(b"three", partition=0)
            expected = [*values, b"three"]
    except (LogError, OSError) as error:
        raise Failure("refused", repr(error)) from error


_MADE = [b"one", b"two"]
