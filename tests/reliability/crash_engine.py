"""Crash engine: runs workloads on a `CrashFS`, cuts the power at every instant, and judges the result of recovery.

A workload is a list of calls, named in `CALLS`. While it runs, an `Account` of each partition notes which records were
appended, and which were promised after how many file operations. A call that returns promises records, and so does a
published watermark, because readers see them. The real `Writer` recovers each state. The result must not be:

    lost        fewer records than were promised at the instant of the cut
    phantoms    records that were never appended there, that replace others, or that were dropped before
    refused     an error although nothing but a crash has happened

Then the state is recovered a second time, which must change nothing. It is appended to, and read. Before the first
recovery a reader reads the state; it must see the beginning of what is there afterwards. The files of a partition
determine the outcome, so equal files are recovered once for all instants at which they occur.

A failure says how to repeat it, and `save` keeps the state for ever: tests/reliability/regressions/.

    run_workloads(workloads())                      all workloads, up to the first failure
    run_workloads(workloads(), disk=NeverSynced)    the same over a faulty `CrashFS`: the engine must see the fault
"""

from __future__ import annotations

import base64
import io
import json
import logging
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
from account import Account, Broken

from loglib import FlushPolicy, LogError, Retention, StorageFullError, Topic, description, segment, testing
from loglib.append.partitioner import by_crc32
from loglib.append.record_arguments import record_columns
from loglib.append.writer import Writer
from loglib.config import TopicConfig
from loglib.cursor import Cursor
from loglib.format.watermark import newest
from loglib.index import SegmentIndex
from loglib.log import Log
from loglib.recovery import Recovery
from loglib.segment import Identity
from loglib.testing import CrashFS, CrashState, Image, MemoryFiles, Mode, Operation, crash_states

PATH = "/topic"
LOG_ID = uuid.UUID("4c4c4c4c-0000-4000-8000-000000000001")
NOW = 1_700_000_000_000_000
LEFT_OUT = ("lock",)  # its text is only for messages: states that differ in nothing else count once
REGRESSIONS = Path(__file__).parent / "regressions"

Row = tuple[int, bytes | None, bytes | None]  # offset, value, key


class Workload(NamedTuple):
    """A list of calls, the policies of the topic, and the seed of everything random."""

    calls: tuple[str, ...]
    durability: str = "disk"
    partitions: int = 1
    compression: str = "none"
    seed: int = 0
    mode: Mode = "strict"

    def config(self) -> TopicConfig:
        """Small segments and batches, and no policy that goes by the clock, so that no thread is started."""
        return TopicConfig(
            partitions=self.partitions, flush=FlushPolicy(records=None, interval=None, bytes=None),
            retention=Retention(age=None), segment_age=None, segment_bytes=8192, batch_bytes=4096,
            compression=self.compression, durability=self.durability,  # type: ignore[arg-type]
        )  # fmt: skip


class Failure(Broken):
    """A state that recovery answered wrongly: something is lost, or phantoms are there, or it was refused."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(kind, why)
        self.state: CrashState | None = None
        self.accounts: Sequence[Account] = ()
        self.workload: Workload | None = None

        self.first_partition = 0

    def found_in(self, state: CrashState, accounts: Sequence[Account], *, first_partition: int = 0) -> None:
        """Note where the failure was found, unless a state inside recovery has been noted."""
        if self.state is None:
            self.state, self.accounts, self.first_partition = state, accounts, first_partition


# --- what was appended, and what was promised ---------------------------------------------------------


def judged(account: Account, at: int, *, power: bool, log_start: int, rows: Sequence[Row]) -> None:
    """Raise a `Failure` unless these rows may be what is left after a cut at that instant."""
    try:
        account.judge(rows, at=at, power=power, log_start=log_start)
    except Broken as broken:
        raise Failure(broken.kind, broken.what) from broken


def known_of(account: Account, instant: int, *, power: bool) -> dict[str, Any]:
    """What is true at the instant, in terms of JSON."""
    rows = [(offset, *(None if each is None else _pack(each) for each in two)) for offset, *two in account.contents]
    return {
        "rows": rows,
        "promised": account.promised(instant, power=power),
        "starts": [start for since, start in account.log_starts if since <= instant],
        "dropped": [start for since, start in account.drops if since <= instant],
    }


def account_of(known: dict[str, Any]) -> Account:
    """An account of what is true, in which all instants are one."""
    account = account_with((offset, _unpack(value), _unpack(key)) for offset, value, key in known["rows"])
    account.log_starts = [(0, start) for start in known["starts"]]
    account.drops = [(0, start) for start in known["dropped"]]
    account.promise(known["promised"])
    return account


def account_with(rows: Iterable[Row], log_start: int = 0) -> Account:
    """An account with these rows, which begin to be there; none is promised."""
    rows = list(rows)
    account = Account(rows, log_start=log_start)
    for entry, row in zip(account.entries, rows, strict=True):
        entry.offset = row[0]
    return account


def _short(rows: Sequence[Row]) -> str:
    return str([(offset, (value or b"")[:8], key) for offset, value, key in rows])


class Recorder(CrashFS):
    """A `CrashFS` whose operations do not include the text in lock files."""

    def _changed(self, name: str, path: str, *facts: Any, **more: Any) -> None:
        if not path.endswith("/lock") or name not in ("write", "truncate"):
            super()._changed(name, path, *facts, **more)


class NeverSynced(Recorder):
    """Reports that files are synced, and does not sync them."""

    def datasync(self, fd: int) -> None:
        self._opened(fd)


class DirectoriesNeverSynced(Recorder):
    """Reports that directories are synced, and does not sync them."""

    def fsync(self, fd: int) -> None:
        self._opened(fd)


# --- workloads -------------------------------------------------------------------------------------------


class World:
    """A topic on a disk that records, the accounts of its partitions, and the calls of a workload."""

    def __init__(self, workload: Workload, *, disk: Callable[[Image], CrashFS] = Recorder) -> None:
        self.workload = workload
        self.config = config = workload.config()
        self.disk = disk
        self.choose = Random(workload.seed)
        self.accounts = [Account() for _ in range(config.partitions)]
        self.appended = 0
        self.named = 0  # records that errors have called lost
        self.sequence = 0
        self.last_call: tuple[list[bytes], int] | None = None
        self.identities = [Identity.of(LOG_ID.bytes, number) for number in range(config.partitions)]
        self.start(fresh_image(config))

    def start(self, image: Image) -> None:
        """Open the topic on this disk."""
        self.fs = self.disk(image)
        self.image = image
        self._seen = 0
        self.open()

    def open(self) -> None:
        self.topic = testing.open_topic(PATH, files=self.fs, clock=_clock)

    @property
    def now(self) -> int:
        """The instant: how many file operations have been made."""
        return len(self.fs.operations)

    def states(self, *, since: int) -> Iterator[CrashState]:
        """The states that cuts from this instant on may leave."""
        self.note_marks()
        seed, mode = self.workload.seed, self.workload.mode
        return crash_states(self.image, self.fs.operations, mode=mode, seed=seed, random=8, since=since)

    def value(self, size: int = 0) -> bytes:
        """A value that no other record has."""
        self.appended += 1
        return b"%06d" % self.appended + b"." * max(0, size - 6)

    def note(self, partition: int, offset: int, value: bytes, key: bytes | None = None) -> None:
        self.accounts[partition].returned([offset], [(offset, value, key)])

    def told(self, error: LogError) -> None:
        """An error has named records. They were appended but not promised, and from now on they are not in the log."""
        if error.appended or error.in_doubt:
            raise Failure("lost", f"{error!r} speaks of {error.appended} and {error.in_doubt}")
        for number, offsets in error.lost:
            account = self.accounts[number]
            before = account.named
            account.called_lost(offsets, error)
            if account.named - before != len(offsets):
                raise Failure("phantoms", f"{offsets} are called lost, of {_short(account.contents)}")
            self.named += len(offsets)

    def promise(self, *partitions: int, power: bool = False) -> None:
        for number in partitions or range(self.config.partitions):
            self.accounts[number].promise(at=self.now, power=power or self.config.durability == "disk")

    def note_marks(self) -> None:
        """Note what published watermarks have promised since the last call."""
        identities, accounts = dict(enumerate(self.identities)), dict(enumerate(self.accounts))
        note_marks(self.fs.operations, identities, accounts, since=self._seen)
        self._seen = self.now

    def close(self) -> None:
        self.topic.close()


def note_marks(
    operations: Sequence[Operation], identities: Mapping[int, Identity], accounts: Mapping[int, Account],
    *, since: int = 0,
) -> None:  # fmt: skip
    """Note the promises of published marks: readers see up to the flushed end, the disk has up to the durable end."""
    for at in range(since, len(operations)):
        operation = operations[at]
        if operation.name == "write" and operation.path.endswith("/watermark"):
            number = int(operation.path.rsplit("/", 2)[1])
            mark = newest(operation.data, identities[number].salt)
            if mark is not None:
                account = accounts[number]
                account.promise(account.serial_at(mark.flushed_end), at=at + 1, power=False)
                account.promise(account.serial_at(mark.durable_end), at=at + 1)
                if mark.log_start_offset != account.log_starts[-1][1]:
                    account.log_starts.append((at + 1, mark.log_start_offset))


def _clock() -> int:
    return NOW


def _append(world: World) -> None:
    value = world.value(world.choose.choice((0, 40, 700)))
    world.note(0, world.topic.append(value, partition=0).offset, value)


def _append_sync(world: World) -> None:
    value = world.value(300)
    world.note(0, world.topic.append(value, partition=0, sync=True).offset, value)
    world.promise(0)


def _append_large(world: World) -> None:
    value = world.value(5000)
    world.note(0, world.topic.append_many([value], partition=0)[0].offsets.start, value)


def _append_many(world: World) -> None:
    values = [world.value(world.choose.choice((10, 900))) for _ in range(3)]
    _note_ranges(world, world.topic.append_many(values, partition=0), values)


def _append_keyed(world: World) -> None:
    keys = [b"a", b"b", b"c", b"d"]
    values = [world.value(100) for _ in keys]
    partitions = [by_crc32(key, world.config.partitions) for key in keys]
    for found in world.topic.append_many(values, keys=keys):
        rows = [(value, key) for value, key, each in zip(values, keys, partitions, strict=True) if each == found[0]]
        for offset, (value, key) in zip(found.offsets, rows, strict=True):
            world.note(found[0], offset, value, key)


def _append_arrow(world: World) -> None:
    """Batches of their own, written together: more than what is left of a segment."""
    values = [world.value(world.choose.choice((900, 3000))) for _ in range(5)]
    _note_ranges(world, world.topic.append_arrow(pa.table({"value": pa.array(values)}), partition=0), values)


def _produce(world: World) -> None:
    world.sequence += 1
    values = [world.value(50), world.value(50)]
    world.last_call = values, world.sequence
    _note_ranges(world, world.topic.append_many(values, partition=0, producer=("p", world.sequence)), values)


def _produce_many(world: World) -> None:
    """Use more producers than the header has room for here, so that a roll writes a file of them."""
    world.sequence += 1
    for name in ("q", "r", "s"):
        values = [world.value(20)]
        found = world.topic.append_many(values, partition=0, producer=(name, world.sequence))
        _note_ranges(world, found, values)


def _full(world: World) -> None:
    """Fill the disk, now or soon: records that the errors name are not in the log, and all others are."""
    world.fs.capacity = world.fs.used + world.choose.choice((0, 200, 1500, 6000))
    try:
        for size in (40, 5000, 40):
            value = world.value(size)
            try:
                world.note(0, world.topic.append(value, partition=0).offset, value)
            except StorageFullError as error:
                world.told(error)
        try:
            world.topic.flush()
            world.promise()
        except StorageFullError as error:
            world.told(error)
    finally:
        world.fs.capacity = None


def _retry(world: World) -> None:
    if world.last_call is None:
        return _produce(world)
    values, sequence = world.last_call
    found = world.topic.append_many(values, partition=0, producer=("p", sequence))
    offsets = [offset for each in found for offset in each.offsets]
    known = {row[1]: row[0] for row in world.accounts[0].contents}
    if known.get(values[0]) is None:  # lost in a crash, and appended again
        _note_ranges(world, found, values)
    elif offsets != [known[value] for value in values]:
        raise Failure("phantoms", f"tried again, the call was answered with {offsets}")
    return None


def _note_ranges(world: World, ranges: Any, values: Sequence[bytes]) -> None:
    offsets = [offset for each in ranges for offset in each.offsets]
    for offset, value in zip(offsets, values, strict=True):
        world.note(0, offset, value)


def _flush(world: World) -> None:
    world.topic.flush()
    world.promise()


def _roll(world: World) -> None:
    world.topic.partition(0).roll()
    world.promise(0, power=True)


def _drop(world: World) -> None:
    writer = world.topic.partition(0)._access.writer()
    start = max(segment.base_offset for segment in world.topic.partition(0).segments)
    if writer.drop_before(start):
        world.accounts[0].drops.append((world.now, start))


def _reopen(world: World) -> None:
    world.topic.close()
    world.promise(power=True)
    world.open()


def _receive(world: World) -> None:
    number = world.choose.randrange(1 << 30)
    frame, rows = frame_of(number)
    received = world.topic.partition(0).receive(io.BytesIO(frame))
    assert received is not None
    for offset, value in rows:
        world.note(0, received.start + offset, value)


def _crash(world: World) -> None:
    """Cut the power, or kill the process, and continue with what is left."""
    state = world.choose.choice(list(world.states(since=world.now)))
    world.topic.close()  # the topic of the process that is gone: its disk is no longer in use
    before = world.accounts
    world.start(state.image)
    world.accounts = []
    for number, account in enumerate(before):
        log = world.topic.partition(number)._access.log
        start, rows = log.mark().log_start_offset, _read(log)
        try:
            judged(account, state.at, power=not state.whole, log_start=start, rows=rows)
        except Failure as failure:
            failure.found_in(state, before)
            raise
        world.accounts.append(account_with([*account.contents[: account.serial_at(start)], *rows], start))
        world.accounts[-1].promise()


def _kill(world: World) -> None:
    """Kill the process, and open the topic again: what it had not synced is still pending."""
    world.note_marks()
    world.fs.kill()
    with suppress(LogError, OSError):  # its objects in this process can do nothing any more
        world.topic.close()
    world.open()
    for number, account in enumerate(world.accounts):
        log = world.topic.partition(number)._access.log
        start, rows = log.mark().log_start_offset, _read(log)
        judged(account, world.now, power=False, log_start=start, rows=rows)
        account.recovered(account.serial_at(start) + len(rows))


CALLS: dict[str, Callable[[World], None]] = {
    "append": _append, "append-sync": _append_sync, "append-large": _append_large, "append-many": _append_many,
    "append-keyed": _append_keyed, "append-arrow": _append_arrow, "produce": _produce, "retry": _retry,
    "flush": _flush, "roll": _roll, "drop": _drop, "reopen": _reopen, "receive": _receive, "kill": _kill, "full": _full,
    "produce-many": _produce_many, "crash": _crash,
}  # fmt: skip
SHORT = [name for name in CALLS if name != "crash"]
# At most the last of three calls: two calls show their effect on what follows.
LATE = ("full", "produce-many", "append-arrow")
WEIGHTS = {"crash": 1, "kill": 1, "retry": 1, "drop": 1, "reopen": 1, "append-sync": 3, "flush": 3, "append": 3}


def frame_of(number: int) -> tuple[bytes, list[tuple[int, bytes]]]:
    """A transfer frame with two batches of another log, and its records: (offset from the first, value)."""
    files = MemoryFiles()
    with made(files, Workload(()).config()) as topic:
        values = [b"%d/%d" % (number, each) + b"~" * 60 for each in range(3)]
        positions = [topic.append(values[0], partition=0), topic.append(values[1], partition=0)]
        topic.flush()
        positions.append(topic.append(values[2], partition=0, sync=True))
        out = files.create("/frame", 0o600)
        topic.partition(0).transfer(out, 0)
        frame = files.pread(out, 1 << 20, 0)
    start = positions[0].offset
    return frame, [(position.offset - start, value) for position, value in zip(positions, values, strict=True)]


@contextmanager
def made(files: MemoryFiles, config: TopicConfig) -> Iterator[Topic]:
    """A new topic with a fixed log id."""
    with mock.patch.object(uuid, "uuid4", return_value=LOG_ID):
        description.create(files, PATH, config, now=NOW)
    topic = testing.open_topic(PATH, files=files, clock=_clock)
    try:
        yield topic
    finally:
        topic.close()


_fresh: dict[tuple[Any, ...], Image] = {}


def fresh_image(config: TopicConfig) -> Image:
    """A disk with an empty topic, everything on it synced."""
    key = (config.partitions, config.durability, config.compression)
    if key not in _fresh:
        _fresh[key] = _make_image(config)
    return _fresh[key]


def _make_image(config: TopicConfig) -> Image:
    fs = CrashFS()
    with mock.patch.object(uuid, "uuid4", return_value=LOG_ID):
        description.create(fs, PATH, config, now=NOW)
    return Image.of(fs.tree())


# --- judging a state -----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The result of recovery for the files of one partition."""

    log_start: int
    rows: tuple[Row, ...]


def _read(log: Log) -> tuple[Row, ...]:
    mark = log.mark()
    rows: list[Row] = []
    cursor = Cursor(log, mark.log_start_offset)
    try:
        while batches := cursor.read(mark.flushed_end):
            for batch in batches:
                keys = batch.keys or [None] * len(batch)
                rows += zip(batch.offsets, batch.values, keys, strict=True)
    finally:
        cursor.close()
    return tuple(rows)


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
                seen = _read(Log(files, directory, identity))
            writer = Writer(files, directory, identity, config, index=SegmentIndex([]), clock=_clock)
            recovery, end, done = writer.disk.recovery, writer.batch.tail.end, len(files.operations)
            if recovery.cut_bytes:
                _check_kept(image, files, recovery)
            files.kill()
            outcome = self._gone_on(files, directory, config, identity, end)
        except (LogError, OSError) as error:
            raise Failure("refused", repr(error)) from error
        rows = outcome.rows[: len(seen)]
        if seen != rows:
            raise Failure("phantoms", f"before recovery a reader saw {_short(seen)}, then there was {_short(rows)}")
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
        writer = Writer(files, directory, identity, config, index=SegmentIndex([]), clock=_clock)
        if writer.batch.tail.end != end or not writer.disk.recovery.clean:
            raise Failure("lost", f"recovered again, {writer.disk.recovery}, from {end} to {writer.batch.tail.end}")
        offset = writer.append(_AGAIN, _AGAIN_BYTES).start
        writer.flush()
        log = Log(files, directory, identity)
        log.writer = writer
        *rows, last = _read(log)
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
    """The bytes that were cut must be in the quarantine file."""
    if recovery.quarantine is None:
        raise Failure("lost", f"{recovery.cut_bytes} bytes were cut and not kept aside")
    segment, _, position = recovery.quarantine.rpartition(".torn-")
    cut = image.tree()[segment + ".log"][int(position) :]
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
        with testing.open_topic(path, files=fs, clock=_clock, **policies) as topic:
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
            with testing.open_topic(path, files=files, clock=_clock, **policies) as topic:
                values = [record.value or b"" for record in topic.partition(0).read()]
                if values != expected and (again or values[: len(least)] != least or values != _MADE[: len(values)]):
                    raise Failure("lost", f"{values} are left, {expected} were promised")
                topic.append(b"three", partition=0)
            expected = [*values, b"three"]
    except (LogError, OSError) as error:
        raise Failure("refused", repr(error)) from error


_MADE = [b"one", b"two"]

# --- all of it -----------------------------------------------------------------------------------------------


def run_workload(workload: Workload, judge: Judge) -> None:
    """Run one workload. Judge the states that cuts during its last call may leave; if it is long, during any call."""
    if workload.calls == MAKING:
        judge_making(judge, workload)
        return
    world = World(workload, disk=judge.disk)
    try:
        begun = 0
        for number, name in enumerate(workload.calls, 1):
            before, now = world.fs, world.now
            if name == "crash":  # the earlier states are on another disk
                judge.judge(world.states(since=begun), world.config, world.identities, world.accounts)
            CALLS[name](world)
            if world.fs is not before:
                begun = 0
            elif number == len(workload.calls) <= LONGEST_SHORT:  # the workloads without this call have judged the rest
                begun = now + 1
        judge.judge(world.states(since=begun), world.config, world.identities, world.accounts)
    finally:
        with suppress(LogError, OSError):
            world.close()
        judge.accounted += world.appended
        judge.named += world.named


@contextmanager
def _unlogged() -> Iterator[None]:
    """Switch logging off: each recovery logs a line, and there are a million of them."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@_unlogged()
def run_workloads(
    workloads: Iterable[Workload], *, judge: Judge | None = None, disk: Callable[[Image], CrashFS] = Recorder
) -> Judge:
    """Run the workloads up to the first `Failure`, which says how to repeat it. Returns the counts."""
    judge = judge or Judge(disk=disk)
    _fresh.clear()  # images made by earlier code; the code may be patched now
    for workload in workloads:
        try:
            with mock.patch.object(segment, "MAX_PRODUCERS", 1):  # so that two producers are too many
                run_workload(workload, judge)
        except Failure as failure:
            failure.workload = workload
            failure.add_note(f"in {workload}")
            if failure.state is not None:
                listed = [f"{at:4} {operation}" for at, operation in enumerate(failure.state.operations, 1)]
                failure.add_note("\n".join([f"{failure.state!r}", "operations:", *listed]))
            raise
    return judge


MAKING = ("make a topic",)
LONGEST_SHORT = 3


def short_workloads(length: int, *, durability: str = "disk") -> Iterator[Workload]:
    """Every workload with this many calls."""
    for calls in product(SHORT, repeat=length):
        if length < LONGEST_SHORT or not set(LATE) & set(calls[:-1]):
            yield Workload(calls, durability, partitions=2 if "append-keyed" in calls else 1)


def long_workload(seed: int) -> Workload:
    """Some calls in an order that the seed determines."""
    choose = Random(f"a long workload/{seed}")
    partitions = choose.choice((1, 1, 1, 2))
    names = [name for name in CALLS if partitions > 1 or name != "append-keyed"]
    calls = choose.choices(names, [WEIGHTS.get(name, 2) for name in names], k=choose.randrange(4, 14))
    durability, compression = choose.choice(("disk", "disk", "os")), choose.choice(("none", "none", "zlib"))
    mode: Mode = "linux" if seed % 8 == 7 else "strict"
    return Workload(tuple(calls), durability, partitions, compression, seed, mode)


def making_workloads() -> Iterator[Workload]:
    """The making of topics."""
    for partitions, durability, mode in product((1, 3), ("disk", "os"), ("strict", "linux")):
        yield Workload(MAKING, durability, partitions, mode=mode)  # type: ignore[arg-type]


def workloads(*, long: int = 200) -> Iterator[Workload]:
    """All kinds, the short ones first, because they find a fault soonest."""
    for durability in ("disk", "os"):
        yield from short_workloads(1, durability=durability)
    yield from making_workloads()
    yield from short_workloads(2)
    yield from map(long_workload, range(long))


# --- states that have once failed ------------------------------------------------------------------------------


def save(failure: Failure, directory: Path = REGRESSIONS) -> Path | None:
    """Keep the state and what is true of it, as a file that `replay` reads."""
    state, workload = failure.state, failure.workload
    if state is None or workload is None or not failure.accounts:
        return None
    facts = {
        "why": str(failure),
        "workload": workload._asdict(),
        "first_partition": failure.first_partition,
        "histories": [known_of(account, state.at, power=not state.whole) for account in failure.accounts],
        "files": {path: _pack(content) for path, content in state.image.tree().items()},
    }
    directory.mkdir(exist_ok=True)
    path = directory / f"{state.image.digest(leaving_out=LEFT_OUT):016x}.json"
    path.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    return path


def replay(path: Path) -> None:
    """Judge a state that has been kept."""
    facts = json.loads(path.read_text("utf-8"))
    workload = Workload(**facts["workload"])
    image = Image.of({name: zlib.decompress(base64.b64decode(content)) for name, content in facts["files"].items()})
    for number, known in enumerate(facts["histories"], facts["first_partition"]):
        identity = Identity.of(LOG_ID.bytes, number)
        outcome, _ = Judge()._outcome(image, 0, workload.config(), identity)
        judged(account_of(known), 0, power=True, log_start=outcome.log_start, rows=outcome.rows)


def _pack(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def _unpack(content: str | None) -> bytes | None:
    return None if content is None else zlib.decompress(base64.b64decode(content))
