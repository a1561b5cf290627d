"""Store: the numbered files in which transactions are committed, one after the other, by any number of processes.

Invariant: the numbers of entries have no gap, also after a power cut, and each entry was allowed by those before it.
So a version of an app is committed once, and a former owner commits nothing after its fence.

    commit      a synced temporary is linked to the next number; of several processes one gets it, and the others
                read its entry and check again; then the directory is synced
    finish      `<number>.done` is linked and synced
    checkpoint  every 256 numbers, when all of them are done; then the older names are removed

Before an entry is linked or acted upon, the directory is synced: a power cut takes away nothing on which it builds.

A removed name is free again. So a stalled process may link an entry to a number that was already checkpointed; such an
entry is ignored. No process takes it for a commit, because of the order in which names are removed: older checkpoints,
then manifests, then `.done`, with a sync after each kind. As long as the checkpoint exists from which a process began,
no name above that checkpoint was removed, and no entry there is ignored. So the process checks that its checkpoint
exists after it has read or linked an entry. If the checkpoint is gone, it begins again from the newest one.

Threads: one lock for each `Store`, held over its file calls. Processes: any number, each with a `Store` of its own.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

from ..errors import (
    CorruptLogError,
    ForkedHandleError,
    LogClosedError,
    LogError,
    LogMovedError,
    StorageIOError,
)
from ..log.store_pointer import STORE_FILE, lost_store, read_pointer
from ..log.topic_file import new_aside, put_in_place
from ..log.transaction_numbers import CHECKPOINT, DONE, MOST_BYTES, name_of, newest_checkpoint, numbers
from ..system.directory import Directory
from ..system.failures import refusing_full_disk
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.reentry import enter
from .manifest import (
    AppState,
    Checkpoint,
    Fence,
    Manifest,
    decode,
    decode_checkpoint,
    decode_store,
    encode,
    encode_checkpoint,
    encode_store,
)
from .state import Intent, State

STORE = ".transactions"  # the directory of a store, beside the topics

CHECKPOINT_EVERY = 256  # a process that opens the store reads at most this many entries, and the pending ones
_MOST_BYTES = 1 << 20
_TEMPORARY = ".tmp"
_ORPHANED_US = 24 * 3600 * 1_000_000  # a temporary of this age belongs to a process that has died

logger = logging.getLogger("loglib")


class Committed(NamedTuple):
    """A transaction that is committed: synced, but perhaps not yet applied."""

    number: int  # if repeated: that of the app's last entry; the transaction has it or a lower one
    version: int
    repeated: bool  # the version was committed before; nothing was added


def make_store(files: Files, path: str, permissions: int) -> None:
    """Make a store at the path if there is none. Synced, including its name; one of several processes wins."""
    aside = new_aside(files, path)
    if not files.exists(path):
        put_in_place(files, aside, path, lambda: _build(files, aside, permissions))
    files.sync_directory(os.path.dirname(path))


def _build(files: Files, aside: str, permissions: int) -> None:
    files.make_directory(aside, permissions)
    files.write_new(os.path.join(aside, STORE_FILE), encode_store(os.urandom(16)), permissions)
    first = encode_checkpoint(Checkpoint(0, {}, {}))
    files.write_new(os.path.join(aside, name_of(0, CHECKPOINT)), first, permissions)
    files.sync_directory(aside)


def find_store(files: Files, topic_path: str, permissions: int, *, path: str | None = None) -> Store:
    """The store of a topic's transactions. If the topic has none, it is made at `path`, or beside the topic."""
    pointer = read_pointer(files, topic_path)
    path = path or (pointer and os.path.normpath(pointer.path)) or os.path.join(os.path.dirname(topic_path), STORE)
    if not files.exists(path):
        if pointer is not None:
            raise LogError(lost_store(topic_path, path))
        make_store(files, path, permissions)
    return open_store(files, path)


# By process id and path: a forked child opens its own. A store without a reference is closed.
_open: WeakValueDictionary[tuple[int, str], Store] = WeakValueDictionary()


def open_store(files: Files, path: str) -> Store:
    """The store at the path, which the process opens once. Do not close it, but keep a reference while it is in use."""
    if not files.real:
        return Store(files, path)
    key = os.getpid(), path
    store = _open.get(key)
    if store is None or not store.is_here():
        store = _open[key] = Store(files, path)
    return store


class Store(NotCopyable):
    """An open store. `FileNotFoundError` if there is none. A store without a reference closes itself."""

    _directory: Directory | None = None

    def __init__(self, files: Files, path: str) -> None:
        self.files = files
        self.path = path
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._stale = False  # an exception may have left the fields below half changed
        self._synced = 0
        self._directory = Directory.open(files, path)
        try:
            name = os.path.join(path, STORE_FILE)
            try:
                fd = self._directory.open_read(STORE_FILE)
            except FileNotFoundError as error:
                if not numbers(files.names_in(path), CHECKPOINT):  # another directory
                    raise
                expected = "the description of a store of transactions, which `loglib repair` can make again"
                raise CorruptLogError(name, 0, "no file", expected) from error
            self._permissions = stat.S_IMODE(files.fstat(fd).st_mode)
            self.id = decode_store(files.drain(fd, name, _MOST_BYTES), name)
            self._load(self._directory)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(OSError):  # nothing is written
            self.close()

    def close(self) -> None:
        """Close the directory. Safe to repeat."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    def is_here(self) -> bool:
        """True if the path still leads to this store."""
        directory = self._directory
        return directory is not None and directory.is_named()

    # --- committing -------------------------------------------------------------------------------------

    def commit(self, intent: Intent, *, now: int) -> Committed:
        """Commit a transaction, once for each version of its app. Synced.

        Its staged files must be synced before. `FencedError`, `SourceMismatchError`, `StaleGenerationError` or
        `FencedJobError` if it may not be committed; `StorageIOError` if it is in doubt: then call it again, or ask for
        `last_version`.
        """
        number, version = 0, intent.version
        drawn = int.from_bytes(self.files.random_bytes(8), "little") | 1  # never 0

        def entry(maybe_committed: Manifest | None) -> Manifest | None:
            nonlocal number, version
            wanted = intent if maybe_committed is None else intent._replace(version=maybe_committed.version)
            version = self._state.version_for(wanted)
            if version is not None:
                return Manifest(
                    0, intent.app, version, intent.owner, intent.source, now, intent.sections, intent.offsets,
                    frames=intent.frames, id=drawn, rows=intent.rows, jobs=intent.jobs,
                )  # fmt: skip
            number, version = self._state.apps[intent.app].number, wanted.version
            if intent.version is None:
                raise LogError(
                    f"{self.path}: version {version} of app {intent.app} is committed, but perhaps by another process "
                    f"of the same owner, {intent.owner}; compare the records, and give each process its own owner"
                )
            return None

        with self._use() as directory:
            committed = self._append(directory, entry, now)
            assert version is not None
            return Committed(number if committed is None else committed.number, version, committed is None)

    def pass_over(self, number: int, *, now: int) -> None:
        """Give no number up to this one: a topic has it from another store. Synced."""
        skipping = Manifest(0, None, None, "", None, now, skip=number)
        with self._use() as directory:
            self._append(directory, lambda _: skipping if self._state.number < number else None, now)

    def fence_owner(self, app: str, owner: str, source: str | None, *, now: int) -> int:
        """Make the owner that of the app: former owners are refused from now on. Synced.

        Returns the number of the app's last entry: a new one, if it had another owner. `FencedError` if it is a
        former owner itself.
        """

        def entry(_: Manifest | None) -> Manifest | None:
            is_owner = self._state.is_owner(app, owner, source)
            return None if is_owner else Manifest(0, app, None, owner, source, now)

        with self._use() as directory:
            self._append(directory, entry, now)
            return self._state.apps[app].number

    def fence_groups(self, fences: Sequence[Fence], *, now: int) -> None:
        """Refuse commits of lower generations than these for these partitions of groups from now on. Synced."""

        def entry(_: Manifest | None) -> Manifest | None:
            unknown = self._state.unknown(fences)
            return Manifest(0, None, None, "", None, now, fences=unknown) if unknown else None

        with self._use() as directory:
            self._append(directory, entry, now)

    def generations(self, topic: str, group: str) -> dict[str, int]:
        """The highest generation of each partition of the group that is in an entry. Synced."""
        with self._current() as state:
            known = state.generations.items()
            return {key[2]: generation for key, generation in known if key[:2] == (topic, group)}

    def last_version(self, app: str) -> int | None:
        """The last version of the app that is committed; None if there is none."""
        state = self.app(app)
        return None if state is None else state.version

    def app(self, app: str) -> AppState | None:
        """The state of the app after all transactions; None if it has none. Synced."""
        with self._current() as state:
            return state.apps.get(app)

    def last_number(self) -> int:
        """The number of the last entry. Synced."""
        with self._current() as state:
            return state.number

    def expire(self, used_before: float = -math.inf, *, now: int) -> list[str]:
        """Make a checkpoint now that forgets the apps that were last used before a time; returns them. Synced."""
        with self._use() as directory:
            # An entry without content: the checkpoint needs a new number.
            self._append(directory, lambda _: Manifest(0, None, None, "", None, now), now)
            self._find_done(directory)
            before = set(self._done_state.apps)
            self._make_checkpoint(directory, used_before)
            self._sweep(directory, now)
            return sorted(before - set(self._done_state.apps))

    # --- applying ---------------------------------------------------------------------------------------

    def pending(self) -> list[Manifest]:
        """The transactions that are committed and not yet done, in order. Synced: they may be applied."""
        with self._use() as directory:
            self._advance_and_find_done(directory)
            self._sync(directory)
            return [self._pending[number] for number in sorted(self._pending)]

    def is_done(self, number: int) -> bool:
        """True if the entry is applied everywhere. An entry that has nothing to apply is done when it is committed."""
        with self._use() as directory:
            self._advance_and_find_done(directory)
            return number <= self._state.number and number not in self._pending

    def pending_id(self, number: int) -> int | None:
        """The id of the transaction with this number, if it is committed and not yet done; else None."""
        with self._use() as directory:
            self._advance_and_find_done(directory)
            pending = self._pending.get(number)
            return None if pending is None else pending.id

    def finish(self, number: int, *, now: int) -> None:
        """Mark the transaction as done: it is applied everywhere, and this is synced. Synced."""
        with self._use() as directory:
            self._advance(directory)
            self._sync(directory)
            if number > self._state.number:
                raise ValueError(f"transaction {number} is not committed; the last one is {self._state.number}")
            if number > self._checkpoint_number:
                try:
                    directory.link(name_of(number), name_of(number, DONE))
                except FileExistsError:
                    pass
                except FileNotFoundError:  # another process has finished it, and made a checkpoint
                    self._advance(directory)
                    if number > self._checkpoint_number:
                        raise
                directory.sync()
            self._checkpoint_if_due(directory, now)

    # --- inside: the next number ------------------------------------------------------------------------

    @contextmanager
    def _use(self) -> Iterator[Directory]:
        if os.getpid() != self._pid:
            raise ForkedHandleError(self.path, self._pid)
        with enter(self._lock, self.path):
            directory = self._directory
            if directory is None:
                raise LogClosedError(f"{self.path} is closed")
            if self._stale:
                self._load(directory)
            try:
                yield directory
            except LogError:
                raise
            except BaseException:
                self._stale = True
                raise

    @contextmanager
    def _current(self) -> Iterator[State]:
        """The state after all entries, which are synced."""
        with self._use() as directory:
            self._advance(directory)
            self._sync(directory)
            yield self._state

    def _append(
        self, directory: Directory, entry: Callable[[Manifest | None], Manifest | None], now: int
    ) -> Manifest | None:
        """Link the entry that `entry()` returns to the next number; None if it returns None. Synced.

        `entry` is called again after entries of other processes. Its argument is None, or an entry that this call has
        linked to a number that was checkpointed: either the checkpoint contains it, or it was ignored.
        """
        if not directory.is_named():
            raise LogMovedError(self.path, "was moved, removed or replaced")
        temporary = written = maybe_committed = None
        try:
            while True:
                self._advance(directory)
                wanted = entry(maybe_committed)
                self._sync(directory)
                if wanted is None:
                    return None
                if temporary is None or wanted != written:
                    self._drop(directory, temporary)
                    temporary, written = self._write(directory, encode(wanted)), wanted
                linked = wanted._replace(number=self._state.number + 1)
                try:
                    with refusing_full_disk(directory.path_of(name_of(linked.number))):
                        directory.link(temporary, name_of(linked.number))
                except FileExistsError:
                    continue
                except FileNotFoundError:  # it was old, and removed as an orphan
                    temporary = None
                    continue
                if not self._was_checkpointed(directory, linked.number):
                    self._add(linked)
                elif not self._state.has(linked):
                    maybe_committed = linked
                    continue
                self._sync_commit(directory, linked.number)
                self._checkpoint_if_due(directory, now)
                return linked
        finally:
            self._drop(directory, temporary)

    def _was_checkpointed(self, directory: Directory, number: int) -> bool:
        """True if a checkpoint covers the number that was just linked. The name is then removed."""
        if self._is_checkpoint_there(directory) or self._newest_number(directory) < number:
            return False
        with suppress(FileNotFoundError):
            directory.unlink(name_of(number))
        self._load(directory)
        return True

    def _write(self, directory: Directory, content: bytes) -> str:
        name = f".{self.files.random_bytes(16).hex()}{_TEMPORARY}"
        try:
            with refusing_full_disk(directory.path):
                directory.write_new(name, content, self._permissions)
        except BaseException:
            self._drop(directory, name)
            raise
        return name

    def _drop(self, directory: Directory, temporary: str | None) -> None:
        if temporary is not None:
            with suppress(OSError):  # an orphan is removed later
                directory.unlink(temporary)

    def _sync(self, directory: Directory) -> None:
        """Make all known entries durable."""
        if self._synced < self._state.number:
            directory.sync()
            self._synced = self._state.number

    def _sync_commit(self, directory: Directory, number: int) -> None:
        try:
            self._sync(directory)
        except OSError as error:
            name = os.path.join(self.path, name_of(number))
            raise StorageIOError(name, error, "syncing a commit, which is now in doubt") from error

    # --- inside: what is there ----------------------------------------------------------------------------

    def _load(self, directory: Directory) -> None:
        """Begin from the newest checkpoint."""
        while True:
            newest = self._newest_number(directory)
            name = name_of(newest, CHECKPOINT)
            try:
                fd = directory.open_read(name)
            except FileNotFoundError:  # a newer one has replaced it
                continue
            identity = _identity(self.files.fstat(fd))
            content = self.files.drain(fd, directory.path_of(name), MOST_BYTES)
            break
        checkpoint = decode_checkpoint(content, directory.path_of(name))
        if checkpoint.number != newest:
            raise CorruptLogError(directory.path_of(name), 0, f"number {checkpoint.number}", f"number {newest}")
        self._checkpoint_number, self._checkpoint_identity = newest, identity
        self._state = State(checkpoint)  # after all known entries
        self._done_state = State(checkpoint)  # after the entries before the first that is not done
        self._after_done: deque[Manifest] = deque()  # the entries between the two, without their frames
        self._pending: dict[int, Manifest] = {}  # those of them that are not known to be done, by number
        self._synced = 0  # entries up to here are known to be durable
        self._stale = False

    def _move_to_newest_checkpoint(self, directory: Directory) -> bool:
        """Continue from the newest checkpoint; False if it is past the known entries, so that all was loaded again."""
        while True:
            newest = self._newest_number(directory)
            if newest > self._state.number:
                self._load(directory)
                return False
            with suppress(FileNotFoundError):
                facts = self.files.facts(name_of(newest, CHECKPOINT), dir_fd=directory.fd)
                self._checkpoint_number, self._checkpoint_identity = newest, _identity(facts)
                return True

    def _is_checkpoint_there(self, directory: Directory) -> bool:
        """True if the checkpoint exists from which this process began, and not another one of its number."""
        try:
            facts = self.files.facts(name_of(self._checkpoint_number, CHECKPOINT), dir_fd=directory.fd)
        except FileNotFoundError:
            return False
        return _identity(facts) == self._checkpoint_identity

    def _newest_number(self, directory: Directory) -> int:
        newest = newest_checkpoint(directory.names)
        if newest is None:
            raise CorruptLogError(self.path, 0, "no checkpoint", "at least one")
        return newest

    def _advance(self, directory: Directory) -> None:
        """Read the entries that others have linked."""
        while True:
            manifests = self._read_new(directory)
            if not self._is_checkpoint_there(directory) and not self._move_to_newest_checkpoint(directory):
                continue  # the entries that were read may be ignored ones
            for manifest in manifests:
                self._add(manifest)
            return

    def _read_new(self, directory: Directory) -> list[Manifest]:
        manifests: list[Manifest] = []
        while True:
            number = (manifests[-1].last_number if manifests else self._state.number) + 1
            try:
                content = directory.read_whole(name_of(number), MOST_BYTES)
            except FileNotFoundError:
                return manifests
            manifests.append(_decode(directory, number, content))

    def _add(self, manifest: Manifest) -> None:
        if manifest.applies:
            self._pending[manifest.number] = manifest
        self._after_done.append(manifest._replace(sections=(), frames=b"", jobs=()))
        self._state.apply(manifest)

    def _advance_and_find_done(self, directory: Directory) -> None:
        """Read the entries that others have linked, and find those that are done."""
        while True:
            self._advance(directory)
            self._find_done(directory)
            if not self._pending or self._is_checkpoint_there(directory):  # else a `.done` may have been removed
                return

    def _find_done(self, directory: Directory) -> None:
        """Find the entries that are done now."""
        for number in list(self._pending):
            if number <= self._checkpoint_number or directory.exists(name_of(number, DONE)):
                del self._pending[number]
        while self._after_done and self._after_done[0].number not in self._pending:
            self._done_state.apply(self._after_done.popleft())

    # --- inside: checkpoints --------------------------------------------------------------------------------

    def _checkpoint_if_due(self, directory: Directory, now: int) -> None:
        """Make a checkpoint every 256 numbers. A failure is logged and changes nothing: a later call tries again."""
        if self._state.number - self._checkpoint_number < CHECKPOINT_EVERY:
            return
        self._find_done(directory)
        if self._done_state.number - self._checkpoint_number < CHECKPOINT_EVERY:
            return
        try:
            self._make_checkpoint(directory)
            self._sweep(directory, now)
        except (OSError, LogError) as error:
            logger.warning("%s: cannot make a checkpoint of the transactions: %s", self.path, error)

    def _make_checkpoint(self, directory: Directory, used_before: float = -math.inf) -> None:
        """Make a checkpoint of the entries that are done. It forgets the apps that were last used before a time."""
        done, known = self._done_state, self._state.apps
        unused = {app for app, at in done.apps.items() if at.last_used < used_before and known[app] == at}
        apps = {app: state for app, state in done.apps.items() if app not in unused}
        checkpoint = Checkpoint(done.number, apps, done.generations)
        temporary = self._write(directory, encode_checkpoint(checkpoint))
        try:
            directory.link(temporary, name_of(checkpoint.number, CHECKPOINT))
            for app in unused:
                del self._state.apps[app], self._done_state.apps[app]
        except FileExistsError:  # another process has made it
            pass
        finally:
            self._drop(directory, temporary)

    def _sweep(self, directory: Directory, now: int) -> None:
        """Remove the files that the newest checkpoint replaces. The module explains the order of the kinds."""
        self._move_to_newest_checkpoint(directory)
        newest = self._checkpoint_number
        directory.sync()  # this checkpoint may be another process's, and not yet durable
        names = directory.names()
        for suffix, highest in ((CHECKPOINT, newest - 1), ("", newest), (DONE, newest)):
            for number in numbers(names, suffix):
                if number <= highest:
                    with suppress(FileNotFoundError):  # another process removes the same
                        directory.unlink(name_of(number, suffix))
            directory.sync()
        for name in names:
            if name.endswith(_TEMPORARY) and _is_orphan(directory, name, now):
                self._drop(directory, name)


def _identity(facts: os.stat_result) -> tuple[int, float]:
    return facts.st_ino, facts.st_mtime  # the inode of a removed file may be used again, by a younger file


def _decode(directory: Directory, number: int, content: bytes) -> Manifest:
    """The entry in the bytes of its file. Damage of an entry that is done is logged, and stops nothing."""
    try:
        return decode(content, directory.path_of(name_of(number)))
    except CorruptLogError as error:
        if not directory.exists(name_of(number, DONE)):
            raise
        logger.warning(
            "%s: transaction %d is done, but its file is damaged, so the last version of its app may not be known; "
            "`loglib repair` sets it aside (%s)", directory.path, number, error,
        )  # fmt: skip
        return Manifest(number, None, None, "", None, 0)


def _is_orphan(directory: Directory, name: str, now: int) -> bool:
    try:
        facts = directory.files.facts(name, dir_fd=directory.fd)
    except FileNotFoundError:
        return False
    return now - facts.st_mtime * 1_000_000 > _ORPHANED_US
