"""The world of a workload: a topic on a disk that records, what was appended to it, and what was promised."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from account import Account, Broken

from loglib import FlushPolicy, LogError, Retention, Topic, testing
from loglib.config.policies import TopicConfig
from loglib.format.watermark import newest
from loglib.log import topic_file
from loglib.log.cursor import Cursor
from loglib.log.log import Log
from loglib.segment import Identity
from loglib.testing import CrashFS, CrashState, Image, MemoryFiles, Mode, Operation, crash_states

PATH = "/topic"
LOG_ID = uuid.UUID("4c4c4c4c-0000-4000-8000-000000000001")
NOW = 1_700_000_000_000_000
LEFT_OUT = ("lock",)  # its text is only for messages: states that differ in nothing else count once
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


def account_with(rows: Iterable[Row], log_start: int = 0) -> Account:
    """An account with these rows, which begin to be there; none is promised."""
    rows = list(rows)
    account = Account(rows, log_start=log_start)
    for entry, row in zip(account.entries, rows, strict=True):
        entry.offset = row[0]
    return account


def brief(rows: Sequence[Row]) -> str:
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
        self.topic = testing.open_topic(PATH, files=self.fs, clock=fixed_clock)

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
                raise Failure("phantoms", f"{offsets} are called lost, of {brief(account.contents)}")
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


def fixed_clock() -> int:
    return NOW


@contextmanager
def made(files: MemoryFiles, config: TopicConfig) -> Iterator[Topic]:
    """A new topic with a fixed log id."""
    with mock.patch.object(uuid, "uuid4", return_value=LOG_ID):
        topic_file.create(files, PATH, config, now=NOW)
    topic = testing.open_topic(PATH, files=files, clock=fixed_clock)
    try:
        yield topic
    finally:
        topic.close()


fresh_images: dict[tuple[Any, ...], Image] = {}


def fresh_image(config: TopicConfig) -> Image:
    """A disk with an empty topic, everything on it synced."""
    key = (config.partitions, config.durability, config.compression)
    if key not in fresh_images:
        fresh_images[key] = _make_image(config)
    return fresh_images[key]


def _make_image(config: TopicConfig) -> Image:
    fs = CrashFS()
    with mock.patch.object(uuid, "uuid4", return_value=LOG_ID):
        topic_file.create(fs, PATH, config, now=NOW)
    return Image.of(fs.tree())


# --- judging a state -----------------------------------------------------------------------------------------


def rows_in(log: Log) -> tuple[Row, ...]:
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
