"""Lock: one writer per partition, by an flock of its directory. The kernel releases it when its holder dies.

Invariant: from the return of `acquire` to the call of `release`, no other handle in any process holds the
partition. The lock is on the directory itself: people remove lock files that block them, and then a second
writer would lock a new file. The file `lock` only names the holder, for messages.

A forked child shares its parent's lock. The child must close its copy of the directory, because the copy
would keep the lock after the parent's death. It must never unlock it, because that also releases the
parent's lock. So this module knows all held locks, and a fork waits while a lock is acquired or released.

`flock` over NFS is a byte-range lock at the server since Linux 2.6.12 (flock(2)), and a mount option can make it local
to one client. On FUSE and SMB it depends on the implementation. So two hosts may both believe that they are the only
writer of a partition. The type of a file system is a guess, used only in warnings and error messages.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from ..errors import LockedError
from .directory import Directory
from .failures import printable
from .files import Files
from .not_copyable import NotCopyable
from .process import finish, fork_lock, in_child

NAME = "lock"
_MOUNTS = "/proc/self/mountinfo"  # one mount per line; see proc(5)
_LOCKS = "/proc/locks"  # one lock per line; see proc(5)
_ANOTHER = "another process"
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "afs", "gfs2", "ocfs2", "glusterfs"}

logger = logging.getLogger("loglib")

_changing = fork_lock()
_in_child = in_child()


class Lock(NotCopyable):
    """A lock that this process holds, until it is released or garbage collected."""

    # The default, for a lock whose construction was interrupted before its first line.
    _to_do: Iterator[tuple[Callable[[int], object], int]] = iter(())

    def __init__(self, directory: Directory) -> None:
        self.directory = directory  # the locked directory; the holder works in it
        # Unlock first: a child that has just been forked may not have closed its copy yet.
        files, fd = directory.files, directory.fd
        self._to_do = iter([(files.unlock, fd), (files.close, fd)])
        _in_child.add(self.abandon)

    def give_up(self) -> None:
        """Let another handle have the lock, and keep the directory open. Further calls do nothing."""
        self.directory.files.unlock(self.directory.fd)

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        with _changing:
            finish(self._to_do)
            _in_child.discard(self.abandon)

    def __del__(self) -> None:  # for a lock that an interrupt kept from its holder
        # Without `_changing`: the thread that collects it may have another lock for which a fork waits.
        with suppress(OSError):  # no caller can get the error
            finish(self._to_do)

    def abandon(self, parent_pid: int) -> None:
        """Close this process's copy of its parent's lock."""
        del parent_pid
        next(self._to_do, None)
        self.release()


def acquire(
    files: Files, path: str, permissions: int, *, wait_s: float = 0.0, take: Callable[..., bool] | None = None,
    says_who: bool = True,
) -> Lock:  # fmt: skip
    """Lock the directory `path`, whose file `lock` then names the holder; `LockedError` if it is locked.

    `take` locks the open directory, and may wait for `wait_s` seconds. It returns False if another handle still has
    the lock. By default the call does not wait. Without `says_who` the error does not name the holder.
    """
    with _changing:
        lock = Lock(Directory.open(files, path))
    place = lock.directory
    try:
        if take is None:
            if not files.try_lock(place.fd, path):
                raise refusal(place)
        elif not take(place):
            raise refusal(place, says_who=says_who, advice=waited_for(wait_s))
        with _changing:
            _sign(place, permissions)
    except BaseException:
        lock.release()
        raise
    return lock


def try_acquire(files: Files, path: str) -> Lock | None:
    """Lock the directory `path` without naming a holder; None if it is locked."""
    with _changing:
        lock = Lock(Directory.open(files, path))
        if files.try_lock(lock.directory.fd, path):
            return lock
        lock.release()
        return None


def is_free(files: Files, path: str) -> bool:
    """True if the lock of the directory `path` is free. The check itself holds the lock for a moment."""
    found = try_acquire(files, path)
    if found is not None:
        found.release()
    return found is not None


def seen_locks(files: Files, paths: Iterable[str]) -> dict[str, bool] | None:
    """For each directory of a topic, whether a process holds its lock, by the system's list. No lock is touched.

    None if the list cannot tell: there is none, or the file system keeps its locks elsewhere (network, FUSE, overlay).
    The list has the locks of those processes that this one may see: with a process namespace of its own, as in a
    container, it lacks those outside.
    """
    if not files.real:
        return None
    try:
        table, held = files.read_proc(_MOUNTS).decode(errors="replace"), _flocks(files)
    except OSError:  # not Linux, or no /proc
        return None
    seen: dict[str, bool] = {}
    for path in paths:
        kind, device = _mount_of(table, os.path.realpath(path))
        if _is_shared(kind) or kind in ("overlay", ""):
            return None
        with Directory.open(files, path) as directory:
            own, inode = files.identity(directory.fd)
        # Btrfs gives each subvolume a device of its own, and lists locks by that of the whole file system.
        devices = {(os.major(own), os.minor(own)), device}
        seen[path] = any(f"{major:02x}:{minor:02x}:{inode}" in held for major, minor in devices)
    return seen


def _sign(directory: Directory, permissions: int) -> None:
    files = directory.files
    fd = directory.create(NAME, permissions, exclusive=False)
    try:
        files.ftruncate(fd, files.write_all(fd, [_describe_self()], 0))  # this order needs no space on a full disk
    finally:
        files.close(fd)


def _describe_self() -> bytes:
    program = os.path.basename(sys.argv[0] if sys.argv else sys.executable) or "python"
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"{os.getpid()} {since} {program}\n".encode(errors="replace")


def waited_for(seconds: float) -> str:
    """Advice about a lock that another process has kept for `seconds`."""
    return (
        f"it was waited for {seconds:g} s (`wait` of Topic.open). Is that process stopped, or has it opened the topic "
        "without shared=True? A process that shares a topic gives a partition up within milliseconds"
    )


def refusal(directory: Directory, *, says_who: bool = True, **advice: str) -> LockedError:
    """The error for a directory that another handle has locked. `advice`: other than to open in another mode."""
    return LockedError(directory.path_of(NAME), holder_of(directory) if says_who else _ANOTHER, **advice)


def holder_of(directory: Directory) -> str:
    """A description of the process that has the lock of a directory. Writers that take turns sign only once."""
    named, holder = _named_holder(directory), 0
    device, inode = directory.files.identity(directory.fd)
    with suppress(OSError):  # not Linux, or no /proc
        holder = _flocks(directory.files).get(f"{os.major(device):02x}:{os.minor(device):02x}:{inode}", 0)
    program = _program(directory.files, holder) if holder > 0 else ""
    return f"pid {holder} ({program})" if program and not named.startswith(f"pid {holder} ") else named


def _flocks(files: Files) -> dict[str, int]:
    """The process that has each flock, by device and inode as the system writes them."""
    lines = [line.split() for line in files.read_proc(_LOCKS).decode(errors="replace").splitlines()]
    return {fields[5]: int(fields[4]) for fields in lines if len(fields) > 5 and fields[1] == "FLOCK"}


def _program(files: Files, pid: int) -> str:
    try:
        return printable(files.read_proc(f"/proc/{pid}/comm").decode(errors="replace").strip())
    except OSError:  # it has ended, or lives in another namespace
        return ""


def _named_holder(directory: Directory) -> str:
    try:
        text = printable(directory.read_whole(NAME, 4096).decode(errors="replace").strip())
        pid, since, program = text.split(maxsplit=2)
        alive = _is_alive(int(pid))
    except (FileNotFoundError, ValueError):  # the file is not yet written, or was removed
        return _ANOTHER
    if alive:
        return f"pid {pid} ({program}) since {since}"
    return f"a process forked by pid {pid} ({program}), which is gone itself; since {since}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# --- file systems that other hosts may share ---------------------------------------------------


def network_file_system(files: Files, path: str) -> str | None:
    """The type of the file system of `path` if other hosts may share it; None if not, or if it is unknown."""
    kind = file_system(files, path)
    return kind if _is_shared(kind) else None


def _is_shared(kind: str) -> bool:
    return kind in _NETWORK or kind.startswith("fuse")


def warn_of_other_hosts(files: Files, paths: Iterable[str]) -> None:
    """Log a warning for each path that other hosts may write, too."""
    for path in paths:
        if (kind := network_file_system(files, path)) is not None:
            logger.warning(
                "%s is on %s: the locks that keep a second writer out may not reach other hosts; write from one only",
                path, kind,
            )  # fmt: skip


def file_system(files: Files, path: str) -> str:
    """The type of the file system of `path`; "" if it is unknown."""
    if not files.real:
        return ""
    try:
        table = files.read_proc(_MOUNTS).decode(errors="replace")
    except OSError:  # not Linux, or no /proc
        return ""
    return file_system_of(table, os.path.realpath(path))


def file_system_of(table: str, path: str) -> str:
    """The type of the file system at the longest mount point above `path`; "" if there is none."""
    return _mount_of(table, path)[0]


def _mount_of(table: str, path: str) -> tuple[str, tuple[int, int]]:
    """The type and the device of the file system at the longest mount point above `path`; "" if there is none."""
    found, device, longest = "", (0, 0), -1
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = _unescaped(fields[4]).rstrip("/")
        if (path + "/").startswith(point + "/") and len(point) >= longest:  # at one point the last mount is on top
            major, _, minor = fields[2].partition(":")
            found, device, longest = after.split(" ")[0], (int(major), int(minor)), len(point)
    return found, device


def _unescaped(field: str) -> str:
    """The field with its escapes decoded: the table writes a space as a backslash and three octal digits."""
    head, *rest = field.split("\\")
    return head + "".join(chr(int(each[:3], 8)) + each[3:] for each in rest)
