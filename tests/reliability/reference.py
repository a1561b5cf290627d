"""Reference: work that does everything that loglib does with files once, and an account of the allowed results.

After an error the work continues as a caller would: with the same writer if that still works, and with a new one if
the writer says that it has failed. Each fault happens once, so the work must always reach its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from account import Account, by_value, failed, returned

from conftest import QUIET, crash_copy, last_segment, open_files, opened_since, sound
from loglib import CorruptLogError, LogError, OffsetRange, Topic, UnsupportedFormatError, WriterFailedError, testing
from loglib.system.files import REAL, Files

__all__ = ["POLICIES", "STEPS", "Kept", "Reference", "accounts_of"]

POLICIES = {**QUIET, "partitions": 2, "segment_bytes": 4096, "batch_bytes": 2048}


class Kept:
    """A topic that is opened again whenever it was closed or has failed, and the accounts of its partitions."""

    def __init__(self, path: Path, files: Files, accounts: list[Account], policies: dict[str, Any]) -> None:
        self.path, self.files, self.accounts, self.policies = path, files, accounts, policies
        self.topic: Topic | None = None

    def open(self) -> Topic:
        if self.topic is None:
            topic = testing.open_topic(self.path, files=self.files, **self.policies)
            try:
                self.settle(topic)
            except BaseException:
                _close(topic)
                raise
            self.topic = topic
        return self.topic

    def settle(self, topic: Topic) -> None:
        for partition, account in zip(topic.partitions, self.accounts, strict=True):
            account.settle(list(partition.read()))

    @contextmanager
    def telling(self, values: Sequence[bytes] = ()) -> Iterator[None]:
        """Note an error in the accounts. If there are records, an append of them has raised it."""
        try:
            yield
        except (LogError, OSError) as error:
            failed(self.accounts, error, values)
            raise

    def append(self, number: int, values: Sequence[bytes], **arguments: Any) -> None:
        """Append one record or several, and note them."""
        partition = self.open().partition(number)
        with self.telling(values):
            if len(values) > 1:
                returned(self.accounts, partition.append_many(values, **arguments), values)
            else:
                offset = partition.append(values[0], **arguments).offset
                returned(self.accounts, [OffsetRange(number, range(offset, offset + 1))], values)

    def close(self) -> None:
        topic, self.topic = self.topic, None
        if topic is not None:
            with self.telling():
                topic.close()
            self.acknowledge()

    def flush(self) -> None:
        topic = self.open()
        with self.telling():
            topic.flush()
        self.acknowledge()

    def acknowledge(self) -> None:
        for account in self.accounts:
            account.promise()

    def go_on(self) -> list[Exception]:
        """After an error: flush what can be flushed, or close a writer that has failed. Returns the errors of that."""
        said: list[Exception] = []
        while self.topic is not None:
            try:
                with self.telling():
                    self.topic.flush()
                self.settle(self.topic)
                return said
            except WriterFailedError as error:
                said.append(error)
                with suppress(LogError, OSError), self.telling():
                    self.topic.close()
                self.topic = None
            except (LogError, OSError) as error:  # of housekeeping, raised by the next call
                said.append(error)
                assert len(said) < 3, said
        return said

    def judge(self) -> None:
        """Open with files that work: no acknowledged record is lost, no lost one is there, and appending works."""
        if not (self.path / "topic.json").exists():
            assert not any(account.promised() for account in self.accounts), f"{self.path} is gone"
            return
        with testing.open_topic(self.path, files=REAL) as topic:
            self.settle(topic)
            for partition, account in zip(topic.partitions, self.accounts, strict=True):
                sound(partition)
                account.returned([partition.append(b"last", sync=True).offset], [b"last"])
        with testing.open_topic(self.path, mode="r", files=REAL) as topic:
            self.settle(topic)


class Reference:
    """The work, on `files` below the directory `root`."""

    def __init__(self, root: Path, files: Files, leave_a_crash: Callable[[Path, Path], None] | None = None) -> None:
        self.root, self.files = root, files
        self.leave_a_crash = leave_a_crash or leave_torn_copy
        self.main = Kept(root / "topic", files, accounts_of(2), POLICIES)
        self.receiver = Kept(root / "receiver", files, accounts_of(1), QUIET)
        self.crashed = Kept(root / "crashed", files, accounts_of(2), POLICIES)
        self.errors: list[tuple[str, BaseException]] = []
        self.serial = 0

    def run(self) -> None:
        before = open_files()
        for step in STEPS:
            self.take(step)
        assert not opened_since(before), "files were left open"

    def take(self, step: Callable[[Reference], None]) -> None:
        try:
            step(self)
        except (CorruptLogError, UnsupportedFormatError) as error:
            raise AssertionError(f"{step.__name__} took a fault of the system for damage") from error
        except (LogError, OSError) as error:
            self.note(step.__name__, error)
            for kept in (self.main, self.receiver, self.crashed):
                for each in kept.go_on():
                    self.note("go_on", each)

    def note(self, where: str, error: BaseException) -> None:
        """Keep the error without its traceback: that would keep files open."""
        self.errors.append((where, error))
        reason: BaseException | None = error
        while reason is not None:
            reason = reason.with_traceback(None).__cause__ or reason.__context__

    def judge(self) -> None:
        for kept in (self.main, self.receiver, self.crashed):
            kept.judge()

    @property
    def accounts(self) -> list[Account]:
        return [account for kept in (self.main, self.receiver, self.crashed) for account in kept.accounts]

    def new_values(self, number: int, size: int = 20) -> list[bytes]:
        self.serial += number
        return [b"%d " % each + b"." * size for each in range(self.serial - number, self.serial)]

    # --- steps -----------------------------------------------------------------------------------

    def append_singly(self) -> None:
        for value in self.new_values(3):
            self.main.append(0, [value], key=b"key")  # if the append is refused, the record must not be there

    def append_many(self) -> None:
        self.main.open()
        values = self.new_values(12, size=300)
        self.main.accounts[1].begin(values)  # two batches: the first may be there without the second
        self.main.append(1, values, headers=[[("name", b"value")]] * 12)

    def produce(self) -> None:
        partition, values = self.main.open().partition(0), self.new_values(4)
        self.main.accounts[0].begin(values)
        self.main.append(0, values, producer=("reference", self.serial))
        with self.main.telling():
            partition.append_many(values, producer=("reference", self.serial))

    def flush(self) -> None:
        self.main.flush()

    def append_synced(self) -> None:
        self.main.open()
        account = self.main.accounts[1]
        for value in self.new_values(4, size=1500):
            account.begin([value])
            self.main.append(1, [value], sync=True)
            account.promise()

    def roll(self) -> None:
        topic = self.main.open()
        with self.main.telling():
            topic.partition(0).roll()
        self.main.accounts[0].promise()

    def drop(self) -> None:
        partition, account = self.main.open().partition(1), self.main.accounts[1]
        bases = [segment.base_offset for segment in partition.segments]
        if len(bases) < 2:  # an error has ended the step that rolls
            return
        base = bases[-2]
        first = account.first + len(list(partition.read("begin", base)))
        account.drop(first, done=False)
        with self.main.telling():
            partition._access.writer().drop_before(base)
        account.drop(first)

    def read(self) -> None:
        for partition, account in zip(self.main.open().partitions, self.main.accounts, strict=True):
            account.judge(list(partition.read()))
            *_, last = partition.read()
            assert next(iter(partition.read(last.offset))) == last
            sound(partition)

    def follow(self) -> None:
        with self.main.open().partition(0).follow("begin", timeout=0) as reader:
            self.main.accounts[0].judge(list(reader))

    def transfer(self) -> None:
        frames = os.open(self.root / "frames", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            self.main.open().partition(0).transfer(frames, 0)
            os.lseek(frames, 0, os.SEEK_SET)
            partition = self.receiver.open().partition(0)
            self.receiver.accounts[0].begin(self.main.accounts[0].contents)
            with self.receiver.telling():
                while partition.receive(frames):
                    pass
            self.receiver.flush()
        finally:
            os.close(frames)

    def crash(self) -> None:
        """Leave a copy as a dying process would: with batches that were never synced, and a torn batch."""
        self.append_many()
        self.leave_a_crash(self.main.path, self.crashed.path)
        for account, original in zip(self.crashed.accounts, self.main.accounts, strict=True):
            account.go_on_from(original)

    def recover(self) -> None:
        if self.crashed.path.exists():
            self.crashed.open()

    def go_on_where_it_crashed(self) -> None:
        if self.crashed.path.exists():
            self.crashed.open()
            values = self.new_values(4)
            self.crashed.accounts[1].begin(values)
            self.crashed.append(1, values)
            self.crashed.flush()

    def close(self) -> None:
        self.main.close()

    def close_others(self) -> None:
        try:
            self.receiver.close()
        finally:
            self.crashed.close()

    def read_only(self) -> None:
        with testing.open_topic(self.main.path, mode="r", files=self.files) as topic:
            for partition, account in zip(topic.partitions, self.main.accounts, strict=True):
                account.judge(list(partition.read()))


STEPS: list[Callable[[Reference], None]] = [
    Reference.append_singly,
    Reference.append_many,
    Reference.flush,
    Reference.append_synced,
    Reference.produce,
    Reference.roll,
    Reference.drop,
    Reference.read,
    Reference.follow,
    Reference.transfer,
    Reference.crash,
    Reference.recover,
    Reference.go_on_where_it_crashed,
    Reference.close,
    Reference.close_others,
    Reference.read_only,
]


def accounts_of(partitions: int) -> list[Account]:
    return [Account(known_by=by_value) for _ in range(partitions)]


def leave_torn_copy(source: Path, target: Path) -> None:
    crash_copy(source, target)
    with last_segment(target, 1).open("ab") as file:
        file.write(b"torn" * 300)


def _close(topic: Topic) -> None:
    with suppress(LogError, OSError):
        topic.close()
