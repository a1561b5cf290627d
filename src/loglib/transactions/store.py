"""Store: the numbered files in which transactions are committed, one after the other, by any number of processes.

Invariant: the numbers of entries have no gap, also after a power cut, and each entry was allowed by those before it.
So a version of an app is committed once, and nothing of a former owner is committed behind its fence.

    commit      a synced temporary is linked to the next number; of several processes one gets it, and the others
                read its entry and check again; then the directory is synced
    finish      `<number>.done` is linked and synced
    checkpoint  every 256 numbers, when all of them are done; then the older names go

Before an entry is linked or acted upon, the directory is synced: no power cut takes away what it builds on.

A deleted name is free again. So a process that stood still may link an entry to a number that others have folded into
a checkpoint: this entry is void. Nobody takes it for a commit, because of the order in which names go: older
checkpoints, then manifests, then `.done`, with a sync after each kind. As long as the checkpoint exists from which a
process began, no name above that checkpoint has been deleted, and none is void. So the process looks for that
checkpoint after it has read or linked an entry. If the checkpoint is gone, it begins again from the newest one.

Threads: one lock for each `Store`, held over its file calls. Processes: any number, each with a `Store` of its own.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

from ..errors import CorruptLogError, ForkedHandleError, LogClosedError, LogError, LogMovedError, StorageIOError
from ..log.store_pointer import STORE_FILE as NAME
from ..log.topic_file import new_aside, put_in_place
from ..log.transaction_numbers import CHECKPOINT, DONE, MOST_BYTES, name_of, newest_checkpoint, numbers
from ..system.directory import Directory
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

__all__ = ["NAME", "Committed", "Store", "make_store", "open_store"]

CHECKPOINT_EVERY = 256  # a process that opens the store reads at most this many entries, besides those that wait
_MOST_BYTES = 1 << 20
_LISTINGS = 3  # a listing misses the newest checkpoint only if another one replaces it meanwhile
_TEMPORARY = ".tmp"
_ORPHANED_US = 24 * 3600 * 1_000_000  # a temporary of this age belongs to a process that has died

logger = logging.getLogger("loglib")


class Committed(NamedTuple):
    """A transaction that is committed: synced, but perhaps not yet applied."""

    number: int  # if repeated: that of the app's last entry; the transaction has it or a lower one
    version: int
    repeated: bool  # the version was committed before; nothing was added


def make_store(files: Files, path: str, permissions: int) -> None:
    """Make a store if there is none at the path. Synced, including its name; one of several processes wins."""
    aside = new_aside(files, path)
    if not files.exists(path):
        put_in_place(files, aside, path, lambda: _build(files, aside, permissions))
    files.sync_directory(os.path.dirname(path))


def _build(files: Files, aside: str, permissions: int) -> None:
    files.make_directory(aside, permissions)
    files.write_new(os.path.join(aside, NAME), encode_store(os.urandom(16)), permissions)
    first = encode_checkpoint(Checkpoint(0, {}, {}))
    files.write_new(os.path.join(aside, name_of(0, CHECKPOINT)), first, permissions)
    files.sync_directory(aside)


# By process id and path: a forked child opens its own. A store that nobody refers to is closed.
_open: WeakValueDictionary[tuple[int, str], Store] = WeakValueDictionary()


def open_store(files: Files, path: str) -> Store:
    """The store at the path, with what this process knows of it already. Do not close it, but keep it while in use."""
    if not files.real:
        return Store(files, path)
    key = os.getpid(), path
    store = _open.get(key)
    if store is None or not store.is_here():
        store = _open[key] = Store(files, path)
    return store


class Store(NotCopyable):
    """An open store. `FileNotFoundError` if there is none. Close it; one that nobody refers to closes itself."""

    _directory: Directory | None = None

    def __init__(self, files: Files, path: str) -> None:
        self.files = files
        self.path = path
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._expire_before: int | None = None
        self._stale = False  # what is known may be half changed
        self._synced = 0
        self._directory = Directory.open(files, path)
        try:
            name = os.path.join(path, NAME)
            fd = self._directory.open_read(NAME)
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
        """Whether the path still leads to this store."""
        directory = self._directory
        return directory is not None and directory.is_named()

    # --- committing -------------------------------------------------------------------------------------

    def commit(self, intent: Intent, *, now: int) -> Committed:
        """Commit a transaction, once for each version of its app. Synced.

        Its staged files must be synced before. `FencedError`, `SourceMismatchError` or `StaleGenerationError` if
        it may not be committed; `StorageIOError` if it is in doubt: then a repeated call, or `last_version`, says.
        """
        number, version = 0, intent.version
        drawn = int.from_bytes(self.files.random_bytes(8), "little") | 1  # never 0

        def entry(doubtful: Manifest | None) -> Manifest | None:
            nonlocal number, version
            wanted = intent if doubtful is None else intent._replace(version=doubtful.version)
            version = self._state.version_for(wanted)
            if version is not None:
                return Manifest(
                    0, intent.app, version, intent.owner, intent.source, now, intent.sections, intent.offsets,
                    frames=intent.frames, id=drawn, rows=intent.rows,
                )  # fmt: skip
            number, version = self._state.apps[intent.app].number, wanted.version
            if intent.version is None:
                raise LogError(
                    f"{self.path}: version {version} of app {intent.app} is committed, but perhaps by another process "
                    f"of the same owner, {intent.owner}; compare the records, and give each process its own owner"
                )
            return None

        with self._turn() as directory:
            committed = self._append(directory, entry, now)
            assert version is not None
            return Committed(number if committed is None else committed.number, version, committed is None)

    def pass_over(self, number: int, *, now: int) -> None:
        """Never give a number up to this one: a topic has it from another store. Synced."""

        def entry(_: Manifest | None) -> Manifest | None:
            return Manifest(0, None, None, "", None, now, skip=number) if self._state.number < number else None

        with self._turn() as directory:
            self._append(directory, entry, now)

    def fence_owner(self, app: str, owner: str, source: str | None, *, now: int) -> int:
        """Make the owner that of the app: former owners are refused from now on. Synced.

        Returns the number of the app's last entry: a new one, if it had another owner. `FencedError` if it is a
        former owner itself.
        """

        def entry(_: Manifest | None) -> Manifest | None:
            if self._state.is_owner(app, owner, source):
                return None
            return Manifest(0, app, None, owner, source, now)

        with self._turn() as directory:
            self._append(directory, entry, now)
            return self._state.apps[app].number

    def fence_groups(self, fences: tuple[Fence, ...], *, now: int) -> None:
        """From now on a lower generation than these cannot be committed for these partitions of groups. Synced."""

        def entry(_: Manifest | None) -> Manifest | None:
            unknown = self._state.unknown(fences)
            return Manifest(0, None, None, "", None, now, fences=unknown) if unknown else None

        with self._turn() as directory:
            self._append(directory, entry, now)

    def generations(self, topic: str, group: str) -> dict[str, int]:
        """The highest generation of each partition of the group that is in an entry. Synced."""
        with self._turn() as directory:
            self._advance(directory)
            self._sync(directory)
            known = self._state.generations.items()
            return {key[2]: generation for key, generation in known if key[:2] == (topic, group)}

    def last_version(self, app: str) -> int | None:
        """The last version of the app that is committed; None if there is none."""
        state = self.app(app)
        return None if state is None else state.version

    def app(self, app: str) -> AppState | None:
        """What the transactions of the app have left; None if there are none. Synced."""
        with self._turn() as directory:
            self._advance(directory)
            self._sync(directory)
            return self._state.apps.get(app)

    def expire(self, before: int) -> None:
        """Forget the apps that were last used before this time, in microseconds, at the next checkpoint."""
        self._expire_before = before

    def fold(self, *, now: int) -> list[str]:
        """Make a checkpoint now, however few entries there are; returns the apps that it forgets. Synced."""
        with self._turn() as directory:
            # An entry that says nothing: the checkpoint needs a new number.
            self._append(directory, lambda _: Manifest(0, None, None, "", None, now), now)
            self._settle(directory)
            before = set(self._folded.apps)
            self._make_checkpoint(directory)
            self._sweep(directory, now)
            return sorted(before - set(self._folded.apps))

    # --- applying ---------------------------------------------------------------------------------------

    def pending(self) -> list[Manifest]:
        """The transactions that are committed and not yet done, in order. Synced: they may be applied."""
        with self._turn() as directory:
            self._catch_up(directory)
            self._sync(directory)
            return [self._waiting[number] for number in sorted(self._waiting)]

    def last_number(self) -> int:
        """The number of the last entry. Synced."""
        with self._turn() as directory:
            self._advance(directory)
            self._sync(directory)
            return self._state.number

    def is_done(self, number: int) -> bool:
        """Whether the entry is applied everywhere. An entry that has nothing to apply is done when it is committed."""
        with self._turn() as directory:
            self._catch_up(directory)
            return number <= self._state.number and number not in self._waiting

    def waiting_id(self, number: int) -> int | None:
        """The id of the transaction with this number, if it is committed and not yet done; else None."""
        with self._turn() as directory:
            self._catch_up(directory)
            waiting = self._waiting.get(number)
            return None if waiting is None else waiting.id

    def finish(self, number: int, *, now: int) -> None:
        """State that the transaction is applied everywhere, and that all of this is synced. Synced."""
        with self._turn() as directory:
            self._advance(directory)
            self._sync(directory)
            if number > self._state.number:
                raise ValueError(f"transaction {number} is not committed; the last one is {self._state.number}")
            if number > self._base:
                try:
                    directory.link(name_of(number), name_of(number, DONE))
                except FileExistsError:
                    pass
                except FileNotFoundError:  # others have finished it, and have made a checkpoint
                    self._advance(directory)
                    if number > self._base:
                        raise
                directory.sync()
            self._fold(directory, now)

    # --- inside: the next number ------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Iterator[Directory]:
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
                self._stale = True  # it may have been interrupted halfway
                raise

    def _append(
        self, directory: Directory, entry: Callable[[Manifest | None], Manifest | None], now: int
    ) -> Manifest | None:
        """Link the entry that is wanted behind those that are there; None if none is wanted. Synced.

        `entry` is called again whenever there are new ones. Its argument is an entry that was linked, and that others
        may have folded, or else was void.
        """
        if not directory.is_named():
            raise LogMovedError(self.path, "was moved, removed or replaced")
        temporary = written = doubtful = None
        try:
            while True:
                self._advance(directory)
                wanted = entry(doubtful)
                self._sync(directory)
                if wanted is None:
                    return None
                if temporary is None or wanted != written:
                    self._drop(directory, temporary)
                    temporary, written = self._write(directory, encode(wanted)), wanted
                linked = wanted._replace(number=self._state.number + 1)
                try:
                    directory.link(temporary, name_of(linked.number))
                except FileExistsError:
                    continue
                except FileNotFoundError:  # it was so old that it was taken for an orphan
                    temporary = None
                    continue
                if not self._may_be_void(directory, linked.number):
                    self._take(linked)
                elif not self._state.has(linked):
                    doubtful = linked
                    continue
                self._sync_commit(directory, linked.number)
                self._fold(directory, now)
                return linked
        finally:
            self._drop(directory, temporary)

    def _may_be_void(self, directory: Directory, number: int) -> bool:
        """Whether a checkpoint replaces the number that was just linked. If so, the name is removed."""
        if self._is_base_there(directory) or self._newest(directory) < number:
            return False
        with suppress(FileNotFoundError):
            directory.unlink(name_of(number))
        self._load(directory)
        return True

    def _write(self, directory: Directory, content: bytes) -> str:
        while True:
            name = f".{self.files.random_bytes(16).hex()}{_TEMPORARY}"
            try:
                fd = directory.create(name, self._permissions)
            except FileExistsError:
                continue
            try:
                self.files.fill(fd, content)
            except BaseException:
                self._drop(directory, name)
                raise
            return name

    def _drop(self, directory: Directory, temporary: str | None) -> None:
        if temporary is not None:
            with suppress(OSError):  # an orphan goes later
                directory.unlink(temporary)

    def _sync(self, directory: Directory) -> None:
        """Make all entries durable that are known here."""
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
            newest = self._newest(directory)
            name = name_of(newest, CHECKPOINT)
            try:
                fd = directory.open_read(name)
            except FileNotFoundError:  # another one has replaced it
                continue
            identity = _identity(self.files.fstat(fd))
            content = self.files.drain(fd, directory.path_of(name), MOST_BYTES)
            break
        checkpoint = decode_checkpoint(content, directory.path_of(name))
        if checkpoint.number != newest:
            raise CorruptLogError(directory.path_of(name), 0, f"number {checkpoint.number}", f"number {newest}")
        self._base, self._base_identity = newest, identity
        self._state = State(checkpoint)  # of all entries that are known
        self._folded = State(checkpoint)  # of those up to the first that is not done
        self._behind: deque[Manifest] = deque()  # the entries between the two, without their frames
        self._waiting: dict[int, Manifest] = {}  # those of them that are not known to be done
        self._synced = 0  # entries up to here are known to be durable
        self._stale = False

    def _rebase(self, directory: Directory) -> bool:
        """Go over to the newest checkpoint; False if it is beyond the known entries, so that all was loaded anew."""
        while True:
            newest = self._newest(directory)
            if newest > self._state.number:
                self._load(directory)
                return False
            with suppress(FileNotFoundError):
                facts = self.files.facts(name_of(newest, CHECKPOINT), dir_fd=directory.fd)
                self._base, self._base_identity = newest, _identity(facts)
                return True

    def _is_base_there(self, directory: Directory) -> bool:
        """Whether the checkpoint is there from which this process began, and not another one of its number."""
        try:
            facts = self.files.facts(name_of(self._base, CHECKPOINT), dir_fd=directory.fd)
        except FileNotFoundError:
            return False
        return _identity(facts) == self._base_identity

    def _newest(self, directory: Directory) -> int:
        for _ in range(_LISTINGS):
            newest = newest_checkpoint(directory.names())
            if newest is not None:
                return newest
        raise CorruptLogError(self.path, 0, "no checkpoint", "at least one")

    def _advance(self, directory: Directory) -> None:
        """Read the entries that others have linked."""
        while True:
            found = self._read_on(directory)
            if not self._is_base_there(directory) and not self._rebase(directory):
                continue  # what was read may be void
            for manifest in found:
                self._take(manifest)
            return

    def _read_on(self, directory: Directory) -> list[Manifest]:
        found: list[Manifest] = []
        while True:
            number = (found[-1].last_number if found else self._state.number) + 1
            try:
                content = directory.read_whole(name_of(number), MOST_BYTES)
            except FileNotFoundError:
                return found
            found.append(self._decode(directory, number, content))

    def _decode(self, directory: Directory, number: int, content: bytes) -> Manifest:
        """The entry in the bytes of its file. What has rotten in an entry that is done stops nothing."""
        path = directory.path_of(name_of(number))
        try:
            return decode(content, path)
        except CorruptLogError as error:
            if not directory.exists(name_of(number, DONE)):
                raise
            logger.warning(
                "%s: transaction %d is done, but its file is damaged, so the last version of its app may not be known; "
                "`loglib repair` sets it aside (%s)", self.path, number, error,
            )  # fmt: skip
            return Manifest(number, None, None, "", None, 0)

    def _take(self, manifest: Manifest) -> None:
        if manifest.applies:
            self._waiting[manifest.number] = manifest
        self._behind.append(manifest._replace(sections=(), frames=b""))
        self._state.apply(manifest)

    def _catch_up(self, directory: Directory) -> None:
        """Read what is there, and which of it is done."""
        while True:
            self._advance(directory)
            self._settle(directory)
            if not self._waiting or self._is_base_there(directory):  # else a `.done` may have been removed meanwhile
                return

    def _settle(self, directory: Directory) -> None:
        """Look which entries are done by now."""
        for number in list(self._waiting):
            if number <= self._base or directory.exists(name_of(number, DONE)):
                del self._waiting[number]
        while self._behind and self._behind[0].number not in self._waiting:
            self._folded.apply(self._behind.popleft())

    # --- inside: checkpoints --------------------------------------------------------------------------------

    def _fold(self, directory: Directory, now: int) -> None:
        """Make a checkpoint if it is time. A failure is logged and changes nothing: a later call tries again."""
        if self._state.number - self._base < CHECKPOINT_EVERY:
            return
        self._settle(directory)
        if self._folded.number - self._base < CHECKPOINT_EVERY:
            return
        try:
            self._make_checkpoint(directory)
            self._sweep(directory, now)
        except (OSError, LogError) as error:
            logger.warning("%s: cannot make a checkpoint of the transactions: %s", self.path, error)

    def _make_checkpoint(self, directory: Directory) -> None:
        checkpoint = self._folded.checkpoint()
        unused = self._unused()
        apps = {app: state for app, state in checkpoint.apps.items() if app not in unused}
        temporary = self._write(directory, encode_checkpoint(checkpoint._replace(apps=apps)))
        try:
            directory.link(temporary, name_of(checkpoint.number, CHECKPOINT))
        except OSError as error:
            if error.errno != errno.EEXIST:  # another process has made it
                raise
        else:
            for app in unused:
                del self._state.apps[app], self._folded.apps[app]
        finally:
            self._drop(directory, temporary)

    def _unused(self) -> set[str]:
        if self._expire_before is None:
            return set()
        known = self._state.apps
        return {
            app for app, state in self._folded.apps.items()
            if state.last_used < self._expire_before and known[app] == state
        }  # fmt: skip

    def _sweep(self, directory: Directory, now: int) -> None:
        """Remove what the newest checkpoint replaces. The order of the kinds is the one that the module explains."""
        self._rebase(directory)
        newest = self._base
        directory.sync()  # this checkpoint may be another process's, and not yet durable
        names = directory.names()
        for suffix, highest in ((CHECKPOINT, newest - 1), ("", newest), (DONE, newest)):
            for number in numbers(names, suffix):
                if number <= highest:
                    with suppress(FileNotFoundError):  # another process removes the same
                        directory.unlink(name_of(number, suffix))
            directory.sync()
        for name in names:
            if name.endswith(_TEMPORARY) and self._is_orphan(directory, name, now):
                self._drop(directory, name)

    def _is_orphan(self, directory: Directory, name: str, now: int) -> bool:
        try:
            facts = self.files.facts(name, dir_fd=directory.fd)
        except FileNotFoundError:
            return False
        return now - facts.st_mtime * 1_000_000 > _ORPHANED_US


def _identity(facts: os.stat_result) -> tuple[int, float]:
    return facts.st_ino, facts.st_mtime  # the number of a removed file may be given again, but to a younger file
