"""Care: the steps that repair, healing and scrubbing of a topic share.

Invariant: bytes are copied aside before they are overwritten or cut. A dry run changes nothing, and reports what would
be done.

Threads: no state, safe for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress

from ..errors import CorruptLogError, LockedError
from ..segment import Identity
from ..system import lock
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from . import topic_file
from .examine import Findings
from .log import Log
from .recovery import copy_aside, detach
from .verify import Progress, VerifyReport, verify_description, verify_log

ALL_BYTES = 1 << 62  # of a file


# --- a topic -----------------------------------------------------------------------------------------


def change_description(files: Files, path: str, name: str, change: Callable[[Directory], object]) -> str | None:
    """Copy a file of the topic's directory aside, and change it. Returns the copy's path; None if there was no file."""
    with Directory.open(files, path) as directory:
        directory.lock_for_a_moment("a process that changes the topic", advice="try again")
        kept = copy_aside(directory, name, 0, ALL_BYTES) if directory.exists(name) else None
        change(directory)
    return kept


def care_for(
    files: Files, path: str, log_id: bytes, numbers: Iterable[int],
    care: Callable[[Identity, Callable[[int], None]], object], progress: Progress | None,
) -> VerifyReport:  # fmt: skip
    """Call `care` for each of these partitions of a topic, and then verify them and `topic.json`.

    `care` takes a partition and a function, which it calls with the number of bytes that it has examined.
    """
    sizes = {each: _size(files, path, each) for each in (Identity.of(log_id, number) for number in numbers)}
    done, total = 0, 2 * sum(sizes.values())

    def advance(to: int) -> None:
        if progress is not None:
            progress(min(done + to, total), total)

    for identity, size in sizes.items():
        care(identity, advance)
        done += size
    reports = [verify_description(files, path, log_id)]
    for identity, size in sizes.items():
        reports.append(verify_partition(files, path, identity, advance))
        done += size
    advance(0)
    return VerifyReport.of_all(reports)


def verify_partition(
    files: Files, path: str, identity: Identity, progress: Callable[[int], object]
) -> VerifyReport:  # fmt: skip
    """Verify a partition of a topic, also one whose directory is lost. `progress` is called with the bytes so far."""
    try:
        with closing(Log(files, topic_file.partition_directory(path, identity.partition), identity)) as log:
            return verify_log(log, progress)
    except CorruptLogError as error:  # there is no directory
        return VerifyReport.of_error(error, identity.partition)


def _size(files: Files, path: str, identity: Identity) -> int:
    with suppress(FileNotFoundError, NotADirectoryError):
        return sum(files.sizes(topic_file.partition_directory(path, identity.partition)).values())
    return 0


# --- a log -------------------------------------------------------------------------------------------


@contextmanager
def reach(
    files: Files, path: str, permissions: int, *, dry_run: bool
) -> Iterator[tuple[Directory, LockedError | None]]:  # fmt: skip
    """Open and lock the directory of a log. If another process holds the lock, return its `LockedError`, too.

    A dry run takes no lock.
    """
    refusal: LockedError | None = None
    if not dry_run:
        try:
            held = lock.acquire(files, path, permissions)
        except LockedError as error:
            refusal = error
        else:
            try:
                detach(held.directory)
                yield held.directory, None
            finally:
                held.release()
            return
    with Directory.open(files, path) as directory:
        yield directory, refusal


class LogCare(NotCopyable):
    """The care of one log, whose files were examined."""

    def __init__(
        self, directory: Directory, identity: Identity, permissions: int, findings: Findings, *, dry_run: bool
    ) -> None:
        self._directory = directory
        self._files = directory.files
        self._identity = identity
        self._permissions = permissions
        self._findings = findings
        self._dry_run = dry_run

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.path, name)

    def _opened(self, name: str, *, to_write: bool = False) -> AbstractContextManager[int]:
        """Open a file, and close it in the end."""
        return self._files.closing(self._directory.open_write(name) if to_write else self._directory.open_read(name))

    def _keep(self, name: str, start: int = 0, size_bytes: int = ALL_BYTES) -> str | None:
        """Copy bytes of a file aside, if it has any there. Returns the path of the copy."""
        if self._dry_run or self._directory.sizes().get(name, 0) <= start:
            return None
        return copy_aside(self._directory, name, start, size_bytes)

    def _write(self, name: str, position: int, content: bytes) -> None:
        """Overwrite bytes of a file. Synced."""
        if not self._dry_run:
            with self._opened(name, to_write=True) as fd:
                self._files.write_all(fd, [content], position)
                self._files.datasync(fd)

    def _resize(self, name: str, size_bytes: int) -> None:
        """Cut a file, or lengthen it with zeros. Synced, also if it has this size."""
        if not self._dry_run:
            with self._opened(name, to_write=True) as fd:
                if self._files.size(fd) != size_bytes:
                    self._files.ftruncate(fd, size_bytes)
                self._files.datasync(fd)
