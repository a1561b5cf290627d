"""Files: what loglib does with files and directories, and what each operation promises.

Invariant: all operations use only the methods of `SystemCalls`, so another implementation (`loglib.testing` has
several) overrides only these.

Each method states its promise: *handed to the system* (survives a killed process) or *synced* (survives a
power cut). The caller gives every position, and there is no shared cursor. So an interrupted write can be repeated at
the same place, and readers never disturb each other. The exception is a file of `open_append`, in which the order of
the entries of several processes is the point (jobs/ack_log.py).

Threads: no state, safe for all.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import select
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..errors import CorruptLogError, LogError, StorageIOError, TooManyFilesError
from .failures import is_out_of_descriptors
from .statx import Facts
from .system_calls import COPY_BYTES, LACKS, Buffer, SystemCalls

__all__ = ["REAL", "Buffer", "Files", "spare_files", "with_a_free_descriptor"]

T = TypeVar("T")

# O_NOFOLLOW: a symlink planted in a log directory must not redirect a write. O_NONBLOCK: opening a
# FIFO planted there must not hang. Both change nothing for regular files, the only files that are accepted.
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# The system's errors for opening a link, a directory for writing, a socket, or a pipe without its other end.
_NOT_REGULAR = (errno.ELOOP, errno.EISDIR, errno.EOPNOTSUPP, errno.ENXIO)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PROC_BYTES = 1 << 16  # of one read; for more than 128 KiB malloc asks the system for pages each time
_NO_LOCKS = (*LACKS, errno.ENOLCK, errno.EBADF)  # the last two: NFS without a lock daemon; it locks no directory
_NO_LINKS = (*LACKS, errno.EPERM)
_NO_PERMISSIONS = (*LACKS, errno.EPERM)

logger = logging.getLogger("loglib")


def with_a_free_descriptor(path: str, call: Callable[[], T]) -> T:
    """Make a call that needs a descriptor. If none is left, close files that are open and not in use, and try again."""
    try:
        return call()
    except OSError as error:
        if not is_out_of_descriptors(error):
            raise
        for release in spare_files:
            release()
    try:
        return call()
    except OSError as error:
        if is_out_of_descriptors(error):
            raise TooManyFilesError(path, error, None, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) from error
        raise


spare_files: list[Callable[[], object]] = []  # each closes files that would be opened again at their next use


def _check_name(path: str, error: OSError) -> None:
    """Raise `LogError` if the name is too long: some file systems take shorter names than a topic may have."""
    if error.errno == errno.ENAMETOOLONG:
        longest = max(map(len, path.split(os.sep)))
        raise LogError(
            f"{path}: this file system takes no name of {longest} letters, or no path of {len(path)}: choose a "
            "shorter one, or another directory"
        ) from error


def _name(path: str, dir_fd: int | None) -> str:
    """The path for a system call, or its last part for a call in an open directory."""
    return path if dir_fd is None else os.path.basename(path)


class Files(SystemCalls):
    """The real file system. Tests replace it by other implementations."""

    real = True  # the paths are files of the system, so inotify can watch them

    def random_bytes(self, count: int) -> bytes:
        """Bytes that cannot be predicted."""
        return os.urandom(count)

    # --- files --------------------------------------------------------------------------------------
    # With `dir_fd`, an open directory, the last part of the path is looked up there; the path is for messages.

    def open_read(self, path: str, *, dir_fd: int | None = None) -> int:
        """Open a regular file for reading; `CorruptLogError` if it is anything else."""
        return self._open_regular(path, os.O_RDONLY, dir_fd=dir_fd)

    def open_write(self, path: str, *, dir_fd: int | None = None) -> int:
        """Open an existing regular file for reading and writing.

        If the file has more than one name (`cp -al`, a backup of hard links, a snapshot), a copy takes its place first.
        So writes do not reach the other names, where another writer may be. Nobody may be writing by this name.
        """
        return self._open_regular(path, os.O_RDWR, own=True, dir_fd=dir_fd)

    def _own_copy(self, shared: int, path: str, facts: os.stat_result, dir_fd: int | None) -> int:
        """Replace the name `path` of the open file by a copy; close the file, and return the open copy. Synced."""
        temporary = f"{path}.{self.random_bytes(4).hex()}.tmp"
        try:
            fd = self.create(temporary, stat.S_IMODE(facts.st_mode), dir_fd=dir_fd)
            try:
                self._copy_whole(shared, fd, facts.st_size)
                self.datasync(fd)
                self.rename(_name(temporary, dir_fd), _name(path, dir_fd), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                self.sync_directory(os.path.dirname(path), dir_fd=dir_fd)
            except BaseException:
                self.close(fd)
                with suppress(OSError):
                    self.unlink(_name(temporary, dir_fd), dir_fd=dir_fd)
                raise
        finally:
            self.close(shared)
        return fd

    def _copy_whole(self, source: int, target: int, size_bytes: int) -> None:
        """Copy an open file to an empty one. Who writes the source may cut off zeros at its end meanwhile."""
        while True:
            try:
                self.share_range(source, target, start=0, end=size_bytes, at=0)
                return
            except OSError:
                if self.size(source) >= size_bytes:
                    raise
            size_bytes = self.size(source)
            self.ftruncate(target, 0)

    def make_own(self, path: str, *, dir_fd: int | None = None) -> None:
        """If the file at the path has other names, replace it by a copy, as `open_write` does."""
        with suppress(FileNotFoundError):
            if self.facts(path, dir_fd=dir_fd).st_nlink > 1:
                self.close(self.open_write(path, dir_fd=dir_fd))

    def open_to_lock(self, path: str) -> int:
        """Open an existing regular file for reading and writing, even with other names: others may have locked it."""
        return self._open_regular(path, os.O_RDWR)

    def open_append(self, path: str, *, dir_fd: int | None = None) -> int:
        """Open an existing regular file for reading, and for `append`: each call writes at the end of the file.

        The system never mixes two appends of up to a page that lie in one page: a killed process leaves all of one, or
        nothing. A full disk may leave a part of it.
        """
        return self._open_regular(path, os.O_RDWR | os.O_APPEND, dir_fd=dir_fd)

    def create(self, path: str, permissions: int, *, exclusive: bool = True, dir_fd: int | None = None) -> int:
        """Create a file for reading and writing, with exactly these permissions.

        If the file exists, it is opened as `open_write` does, or with `exclusive` raises `FileExistsError`.
        """
        fd = -1
        while fd < 0:
            if not exclusive:
                with suppress(FileNotFoundError):
                    return self.open_write(path, dir_fd=dir_fd)
            try:
                fd = self._open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, permissions, dir_fd=dir_fd)
            except FileExistsError:  # another process made it between the two calls
                if exclusive:
                    raise
        try:
            # The umask may have removed bits that the owner of the topic asked for.
            self._permit(path, permissions, lambda: self.fchmod(fd, permissions), lambda: self.fstat(fd))
        except BaseException:
            self.close(fd)
            raise
        return fd

    def _open_regular(
        self, path: str, flags: int, permissions: int = 0o600, *, own: bool = False, dir_fd: int | None = None
    ) -> int:
        expected = "a regular file, and no link, pipe or device"
        name = _name(path, dir_fd)
        try:
            fd = with_a_free_descriptor(path, lambda: self.open(name, flags | _SAFE, permissions, dir_fd=dir_fd))
        except TooManyFilesError:
            raise
        except OSError as error:
            error.filename = path
            _check_name(path, error)
            # Links above the file may form a loop: that error has the same number, but is not the file's.
            if error.errno not in _NOT_REGULAR or not self.exists(path, dir_fd=dir_fd):
                raise
            raise CorruptLogError(path, 0, error.strerror or "something else", expected) from error
        try:
            facts = self.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise CorruptLogError(path, 0, "something else", expected)
        except BaseException:
            self.close(fd)
            raise
        if own and facts.st_nlink > 1:
            return self._own_copy(fd, path, facts, dir_fd)
        return fd

    @contextmanager
    def closing(self, fd: int) -> Iterator[int]:
        """Close the open file at the end of the `with` statement."""
        try:
            yield fd
        finally:
            self.close(fd)

    def size(self, fd: int) -> int:
        """The size of the open file in bytes."""
        return self.fstat(fd).st_size

    def exists(self, path: str, *, dir_fd: int | None = None) -> bool:
        """True if the name exists, even as a dangling link."""
        try:
            self.facts(path, dir_fd=dir_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def facts(self, path: str, *, dir_fd: int | None = None) -> os.stat_result:
        """The system's facts about the name itself, without following a link: type, size, inode, number of names."""
        try:
            return self.lstat(_name(path, dir_fd), dir_fd=dir_fd)
        except OSError as error:
            _check_name(path, error)
            raise

    def write_all(self, fd: int, parts: Sequence[Buffer], position: int) -> int:
        """Write the parts one after the other at `position`; returns the bytes written. Handed to the system.

        Short writes are continued. After an error some of the bytes may be in the file: the caller knows the
        position, and cuts back or writes again.
        """
        total = sum(map(len, parts))
        written = self.pwritev(fd, parts, position)
        while written < total:
            rest = memoryview(b"".join(parts))[written:]
            count = self.pwritev(fd, [rest], position + written)
            if count == 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            written += count
        return total

    def write_new(self, path: str, content: bytes, permissions: int) -> None:
        """Create the file with this content. Synced, except its name: sync the directory."""
        self.fill(self.create(path, permissions), content)

    def fill(self, fd: int, content: bytes) -> None:
        """Write the content of a new file, and close it. Synced, except its name."""
        try:
            self.write_all(fd, [content], 0)
            self.datasync(fd)
        finally:
            self.close(fd)

    def read_at(self, fd: int, size_bytes: int, position: int) -> bytes:
        """The bytes of the file from `position`; fewer than `size_bytes` only at its end.

        A system read that meets a bad sector stops before it, and only the next read fails. So one short read does
        not prove the end of the file.
        """
        data = self.pread(fd, size_bytes, position)
        while 0 < len(data) < size_bytes:
            more = self.pread(fd, size_bytes - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    def read_whole(self, path: str, limit_bytes: int) -> bytes:
        """The whole content of a small file; `CorruptLogError` above the limit."""
        return self.drain(self.open_read(path), path, limit_bytes)

    def drain(self, fd: int, path: str, limit_bytes: int) -> bytes:
        """Read the whole content of a small open file and close it; `CorruptLogError` above the limit."""
        try:
            if (size := self.size(fd)) > limit_bytes:
                raise CorruptLogError(path, limit_bytes, f"{size} bytes", f"at most {limit_bytes}")
            return self.read_at(fd, size, 0)
        finally:
            self.close(fd)

    def read_proc(self, path: str) -> bytes:
        """The whole content of a file whose size the system does not know, as of those in /proc."""
        fd = self.open_read(path)
        try:
            return b"".join(iter(lambda: self.read(fd, _PROC_BYTES), b""))
        finally:
            self.close(fd)

    def copy_range(self, source: int, target: int, *, start: int, end: int, at: int) -> None:
        """Copy bytes [start, end) of one open file to position `at` in another or the same. Handed to the system."""
        while start < end:
            block = self.pread(source, min(COPY_BYTES, end - start), start)
            if not block:
                raise OSError(errno.EIO, "the file ended early")
            self.write_all(target, [block], at)
            start += len(block)
            at += len(block)

    def share_range(self, source: int, target: int, *, start: int, end: int, at: int) -> None:
        """As `copy_range`, but the files share the disk's blocks (a reflink) if the file system can do that.

        Otherwise the system copies the bytes, if it can, without passing them through this process.
        """
        with suppress(OSError):  # it cannot between these files; a full disk is found again below
            while start < end and (count := self.copy_file_range(source, target, end - start, start, at)):
                start += count
                at += count
        self.copy_range(source, target, start=start, end=end, at=at)

    def try_lock(self, fd: int, path: str = "the file", *, shared: bool = False) -> bool:
        """Take the exclusive flock of the open file, or return False if it is not free. The path is for the error.

        `StorageIOError` if the file system has no such locks: without them two writers would share a log.

        With `shared` it takes a shared flock. A process that only checks whether a file is locked uses it, so that
        two such processes do not block each other. For both, the file need only be open for reading.
        """
        try:
            self.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            doing = (
                "locking it: this file system has no flock, and nothing else keeps a second writer out; mount it with "
                "locks (Lustre: -o flock; NFS: a lock daemon), or use a directory on a local disk"
            )
            raise StorageIOError(path, error, doing) from error
        return True

    def link_name(self, path: str, target: str, *, dir_fd: int | None = None) -> None:
        """Give a file a second name; `FileExistsError` if something has that name. Handed to the system.

        With `dir_fd`, the last parts of both paths are names in that open directory. `StorageIOError` if the file
        system has no hard links: only with them the first of several processes gets a name, with a whole file.
        """
        try:
            self.link(_name(path, dir_fd), _name(target, dir_fd), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except OSError as error:
            if error.errno in _NO_LINKS:
                doing = (
                    f"making the second name {target}: this file system has no hard links, or forbids them here; "
                    "transactions, archives and tiers need them, so use a directory on another file system"
                )
                raise StorageIOError(path, error, doing) from error
            error.filename, error.filename2 = path, target
            raise

    def unlock(self, fd: int) -> None:
        """Release the flock of the open file, also for processes that share the file by a fork."""
        try:
            self.flock(fd, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # where it could not be locked either
                raise

    def try_lock_bytes(self, fd: int, start: int, end: int) -> bool:
        """Take this process's locks of bytes of a file that is open for writing. False if they are not free.

        False also if the file system has no such locks: what they guard must do without.
        """
        try:
            self.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, end - start, start)
        except OSError:
            return False
        return True

    def unlock_bytes(self, fd: int, start: int, end: int) -> None:
        """Release this process's locks of the bytes, if it has any."""
        if start < end:
            with suppress(OSError):
                self.lockf(fd, fcntl.LOCK_UN, end - start, start)

    def first_lock(self, fd: int, start: int, end: int) -> tuple[int, int] | None:
        """The first of these bytes that another process has locked, and its process id; None if all are free.

        The id is 0 if that process is outside of this process's container. Raises `OSError` if the file system has no
        such locks.
        """
        found = None
        while start < end and (lock := self.getlk(fd, end - start, start)) is not None:  # of several, it tells any
            found, end = lock, max(lock[0], start)
        return found

    def identity(self, fd: int) -> tuple[int, int]:
        """Device and inode of an open file or directory: unique while it is open, even after it was removed."""
        facts = self.fstat(fd)
        return facts.st_dev, facts.st_ino

    def leads_to(
        self, path: str, identity: tuple[int, int], *, dir_fd: int | None = None, untimed: bool = False
    ) -> bool:
        """True if the path leads to the open file with this identity. One lstat, or one without times (statx.py)."""
        look: Callable[..., Facts | os.stat_result] = self.lstatx if untimed else self.lstat
        try:
            facts = look(_name(path, dir_fd), dir_fd=dir_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (facts.st_dev, facts.st_ino) == identity

    def same_file(self, fd: int, path: str) -> bool:
        """True if the path still leads to the open file."""
        return self.leads_to(path, self.identity(fd))

    # --- directories --------------------------------------------------------------------------------

    def is_directory(self, path: str, *, dir_fd: int | None = None) -> bool:
        """True if the path itself is a directory, and not a link to one."""
        return stat.S_ISDIR(self.facts(path, dir_fd=dir_fd).st_mode)

    def names_in(self, directory: str, *, dir_fd: int | None = None) -> list[str]:
        """The names of everything in the directory (in `dir_fd`, if given), in no order."""
        place = directory if dir_fd is None else dir_fd
        return with_a_free_descriptor(directory, lambda: self.listdir(place))

    def sizes(self, directory: str, *, dir_fd: int | None = None) -> dict[str, int]:
        """Name and size in bytes of everything in the directory (in `dir_fd`, if given), in no order."""
        found: dict[str, int] = {}
        for name in self.names_in(directory, dir_fd=dir_fd):
            try:
                path = os.path.join(directory, name) if dir_fd is None else name
                found[name] = self.facts(path, dir_fd=dir_fd).st_size
            except FileNotFoundError:  # retention removed it between the two calls
                continue
        return found

    def open_directory(self, path: str) -> int:
        """Open a directory, to lock or to sync it."""
        return with_a_free_descriptor(path, lambda: self.open(path, _DIRECTORY))

    def sync_directory(self, path: str, *, dir_fd: int | None = None) -> None:
        """Make creations, renames and removals in the directory durable. It may be open already, as `dir_fd`.

        Some file systems (SMB, FUSE) cannot do it: that is logged once.
        """
        fd = self.open_directory(path) if dir_fd is None else dir_fd
        try:
            self.fsync(fd)
        except OSError as error:
            if error.errno not in LACKS:
                error.filename = path
                raise
            _log_once(self.fstat(fd).st_dev, path, "cannot sync a directory: after a power cut new files may be gone")
        finally:
            if dir_fd is None:
                self.close(fd)

    def _permit(
        self, path: str, permissions: int, change: Callable[[], None], look: Callable[[], os.stat_result]
    ) -> None:
        """Call `change`. Some file systems (SMB, FAT) have fixed permissions, which `look` finds: logged once."""
        try:
            change()
        except OSError as error:
            if error.errno not in _NO_PERMISSIONS:
                raise
            facts = look()
            found = stat.S_IMODE(facts.st_mode)
            if found != permissions:
                what = f"does not take permissions: instead of {permissions:o} files and directories have {found:o}"
                _log_once(facts.st_dev, path, what)

    def make_directory(self, path: str, permissions: int) -> None:
        """Create one directory. Its search bits follow the read bits of `permissions`."""
        try:
            self.mkdir(path, 0o700)
        except OSError as error:
            _check_name(path, error)
            raise
        # Where the directory above has the setgid bit, its group owns all that is made below: the bit was inherited.
        wanted = permissions | (permissions & 0o444) >> 2 | self.stat(path).st_mode & stat.S_ISGID
        self._permit(path, wanted, lambda: self.chmod(path, wanted), lambda: self.stat(path))

    def make_directories(self, path: str, permissions: int = 0o600) -> None:
        """Create the directory and its missing parents, as `make_directory` does.

        Each name is synced in its parent.
        """
        missing = []
        while not self._is_directory(path):
            missing.append(path)
            path = os.path.dirname(path)
        for each in reversed(missing):
            with suppress(FileExistsError):
                self.make_directory(each, permissions)
            self.sync_directory(os.path.dirname(each))

    def move_directory(self, path: str, target: str, *, first: str = "") -> None:
        """Rename a directory to a name that nothing has. Handed to the system.

        An overlay does not rename a directory of the image below it. Then the content is moved piece by piece,
        beginning with the file `first`, without which the rest means nothing.
        """
        try:
            self.rename(path, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self.make_directory(target, stat.S_IMODE(self.stat(path).st_mode))
            for name in sorted(self.names_in(path), key=lambda name: (name != first, name)):
                old, new = os.path.join(path, name), os.path.join(target, name)
                if self.is_directory(old):
                    self.move_directory(old, new)
                else:
                    self.rename(old, new)
            self.rmdir(path)

    def _is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(self.stat(path).st_mode)
        except OSError:
            return False

    def remove_tree(self, path: str) -> None:
        """Remove a private directory with its contents. What cannot be removed stays."""
        with suppress(OSError):
            for name in self.names_in(path):
                each = os.path.join(path, name)
                try:
                    self.unlink(each)
                except OSError:  # a directory; macOS says EPERM, others EISDIR
                    self.remove_tree(each)
            self.rmdir(path)

    def free_space(self, path: str) -> tuple[int, int]:
        """(free, total) bytes of the file system for an unprivileged user."""
        facts = self.statvfs(path)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize

    # --- streams ------------------------------------------------------------------------------------

    def write_stream(self, to: int, data: Buffer, *, timeout_s: float | None = None) -> None:
        """Write to a socket, pipe or file at its own position, and wait while it is not ready.

        `TimeoutError` if it takes nothing for `timeout_s`; a part of the data may be written then.
        """
        view = memoryview(data)
        while view:
            try:
                view = view[self.write(to, view) :]
            except BlockingIOError:
                self.wait_writable(to, timeout_s)

    def wait_readable(self, source: Any) -> None:
        """Wait until a file descriptor, or an object that has one, has data to read."""
        self.poll(source, select.POLLIN)

    def wait_writable(self, to: Any, timeout_s: float | None = None) -> None:
        """Wait until a file descriptor, or an object that has one, takes data; `TimeoutError` after `timeout_s`."""
        if self.poll(to, select.POLLOUT, timeout_s) is False:
            raise TimeoutError(errno.ETIMEDOUT, f"the stream took nothing for {timeout_s} seconds")

    def send_range(
        self, to: int, source: int, start: int, size_bytes: int, *, timeout_s: float | None = None
    ) -> None:  # fmt: skip
        """Send bytes of an open file to a socket, pipe or file, without copying if the system can.

        `TimeoutError` if it takes nothing for `timeout_s`; a part of the bytes may be sent then.
        """
        end = start + size_bytes
        while start < end:
            try:
                sent = self.sendfile(to, source, start, end - start)
            except BlockingIOError:
                self.wait_writable(to, timeout_s)
                continue
            except OSError as error:
                if error.errno not in LACKS:
                    raise
                block = self.pread(source, min(COPY_BYTES, end - start), start)  # `to` may be open for appending
                self.write_stream(to, block, timeout_s=timeout_s)
                sent = len(block)
            if sent == 0:
                raise OSError(errno.EIO, "the file ended early")
            start += sent


_logged: set[tuple[int, str]] = set()  # file systems, and what each lacks


def _log_once(device: int, path: str, what: str) -> None:
    """Log what a file system lacks, once for each in this process."""
    if (device, what) not in _logged:
        _logged.add((device, what))
        logger.warning("%s: this file system %s", path, what)


REAL = Files()
