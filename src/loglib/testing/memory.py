"""Memory: a file system in this process, for tests that are fast and the same each time.

Invariant: a call of `Files` promises and refuses the same here as on Linux. For example, the error numbers
are the same, a removed file stays readable while it is open, and a lock ends when its file is closed. Not
simulated: symbolic links, devices, permissions that refuse a call, other processes, and paths of more than one name in
an open directory (`dir_fd`).

Threads: safe for all; every call that changes something takes one lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NoReturn

from ..system.files import REAL, Buffer, Files

_FIRST_FD = 1 << 30  # above all descriptors of the system, so that a wrong descriptor is refused
_ROOT = 1
_BLOCK_BYTES = 4096
_ENDLESS = 1 << 50
_WRITABLE = os.O_WRONLY | os.O_RDWR


@dataclass(slots=True, eq=False)
class Node:
    """A file with `data`, or a directory with `entries`."""

    number: int
    mode: int
    data: bytes | bytearray  # bytes until the first change, because file systems of one image share them
    entries: dict[str, Node] | None
    links: int = 1  # number of names; 0 after it is removed (it may still be open)
    holder: int = 0  # the open file that has the exclusive lock
    sharers: frozenset[int] = frozenset()  # the open files that share the lock


@dataclass(slots=True, eq=False)
class _Open:
    """An open file, which a descriptor stands for."""

    node: Node
    path: str
    flags: int
    position: int = 0


class MemoryFiles(Files):
    """Files and directories in memory; `open_topic(path, files=MemoryFiles())` needs nothing else.

    With a `capacity`, a write beyond that many bytes is short, and the next one fails with ENOSPC.
    """

    real = False

    def __init__(self, *, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.used = 0
        # Reentrant: garbage collection may run in the middle of a call and close files of unused objects.
        self._lock = threading.RLock()
        self._root = Node(_ROOT, stat.S_IFDIR | 0o755, b"", {})
        self._last_number = _ROOT
        self._directories: dict[str, Node] = {}  # a cache by path; cleared when a directory is moved or removed
        self._open: dict[int, _Open] = {}
        self._next_fd = self._born = _FIRST_FD
        self._drawn = 0

    def tree(self) -> dict[str, bytes]:
        """The content of every file, by its path."""
        return dict(_contents(self._root, ""))

    def kill(self) -> None:
        """End the simulated process: its descriptors and locks are gone, but its writes stay."""
        with self._lock:
            for opened in list(self._open.values()):
                opened.node.holder, opened.node.sharers = 0, frozenset()
            self._open.clear()
            self._born = self._next_fd

    def open_paths(self) -> list[str]:
        """The paths of the open files, each as it was at the time of opening."""
        return sorted(opened.path for opened in self._open.values())

    # --- for a recording subclass; the lock is held ---------------------------------------------------

    def _changed(
        self, name: str, path: str, node: Node, parent: int = 0, position: int = 0, data: Buffer = b"",
        target: str = "", target_parent: int = 0,
    ) -> None:  # fmt: skip
        """A system call has changed or synced something."""

    def random_bytes(self, count: int) -> bytes:
        """Bytes that are the same in each run, so that a failing test can be repeated."""
        self._drawn += 1
        return blake2b(self._drawn.to_bytes(8, "little"), digest_size=count).digest()

    # --- system calls: open files ---------------------------------------------------------------------

    def open(self, path: Any, flags: int, permissions: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._lock:
            path, parent, name, node = self._find(path, dir_fd)
            if node is None:
                if not flags & os.O_CREAT:
                    _refuse(errno.ENOENT, path)
                node = self._make(parent, name, path, stat.S_IFREG | permissions & 0o777, "create")
            elif flags & os.O_CREAT and flags & os.O_EXCL:
                _refuse(errno.EEXIST, path)
            elif node.entries is None and flags & os.O_DIRECTORY:
                _refuse(errno.ENOTDIR, path)
            elif node.entries is not None and flags & (_WRITABLE | os.O_CREAT):
                _refuse(errno.EISDIR, path)
            fd = self._next_fd
            self._next_fd += 1
            self._open[fd] = _Open(node, path, flags)
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            opened = self._open.pop(fd, None)
            if opened is None:
                if _FIRST_FD <= fd < self._born:
                    return  # a file of the killed process: its remaining objects may close it without an error
                _refuse(errno.EBADF)
            _unlock(opened.node, fd)

    def pread(self, fd: int, size: int, position: int) -> bytes:
        node = self._opened(fd).node
        if node.entries is not None:
            _refuse(errno.EISDIR)
        return bytes(node.data[position : position + size])

    def pwritev(self, fd: int, parts: Sequence[Buffer], position: int) -> int:  # type: ignore[override]
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        opened = self._writable(fd)
        if not data:
            return 0
        with self._lock:
            node = opened.node
            if not isinstance(node.data, bytearray):
                node.data = bytearray(node.data)
            if self.capacity is not None:
                data = data[: max(0, len(node.data) + self.capacity - self.used - position)]
                if not data:
                    _refuse(errno.ENOSPC, opened.path)
            before = len(node.data)
            if position > before:
                node.data.extend(bytes(position - before))
            node.data[position : position + len(data)] = data
            self.used += len(node.data) - before
            self._changed("write", opened.path, node, position=position, data=data)
            return len(data)

    def append(self, fd: int, data: Buffer) -> int:  # type: ignore[override]
        with self._lock:
            return self.pwritev(fd, [data], len(self._writable(fd).node.data))

    def ftruncate(self, fd: int, size: int) -> None:
        opened = self._writable(fd, errno.EINVAL)
        with self._lock:
            node = opened.node
            before = len(node.data)
            if self.capacity is not None and size - before > self.capacity - self.used:
                _refuse(errno.ENOSPC, opened.path)
            node.data = node.data[:size] if size <= before else node.data + bytes(size - before)
            self.used += size - before
            self._changed("truncate", opened.path, node, position=size)

    def datasync(self, fd: int) -> None:
        opened = self._opened(fd)
        with self._lock:
            self._changed("sync", opened.path, opened.node)

    def drop_cached(self, fd: int, *_: int) -> None:
        self._opened(fd)

    def fsync(self, fd: int) -> None:
        self.datasync(fd)

    def fchmod(self, fd: int, permissions: int) -> None:
        node = self._opened(fd).node
        node.mode = stat.S_IFMT(node.mode) | permissions

    def fstat(self, fd: int) -> os.stat_result:
        return _facts(self._opened(fd).node)

    fstatx = fstat

    def flock(self, fd: int, operation: int) -> None:
        node = self._opened(fd).node
        with self._lock:
            if operation & fcntl.LOCK_UN:
                _unlock(node, fd)
            elif node.holder not in (0, fd) or (not operation & fcntl.LOCK_SH and node.sharers - {fd}):
                _refuse(errno.EWOULDBLOCK)  # a wait would never end, because the holder is in this process
            else:
                _unlock(node, fd)
                if operation & fcntl.LOCK_SH:
                    node.sharers |= {fd}
                else:
                    node.holder = fd

    def lockf(self, fd: int, operation: int, size_bytes: int, start: int) -> None:
        """Nothing to do: these locks belong to the process, and no other process has the file."""
        del fd, operation, size_bytes, start

    def getlk(self, fd: int, size_bytes: int, start: int) -> None:
        """No other process has a lock."""
        del fd, size_bytes, start

    # --- system calls: names --------------------------------------------------------------------------

    def rename(self, path: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        with self._lock:
            path, parent, name, node = self._find(path, src_dir_fd)
            target, target_parent, target_name, replaced = self._find(target, dst_dir_fd)
            if node is None:
                _refuse(errno.ENOENT, path)
            if node is replaced:
                return
            if _holds(node, target_parent):
                _refuse(errno.EINVAL, target)
            if replaced is not None:
                if _holds(replaced, parent):
                    _refuse(errno.ENOTEMPTY, target)
                if replaced.entries is not None and node.entries is None:
                    _refuse(errno.EISDIR, target)
                if replaced.entries is None and node.entries is not None:
                    _refuse(errno.ENOTDIR, target)
                if replaced.entries:
                    _refuse(errno.ENOTEMPTY, target)
                self._lose_name(replaced)
            elif not target_parent.links:
                _refuse(errno.ENOENT, target)
            del _entries(parent)[name]
            _entries(target_parent)[target_name] = node
            self._directories.clear()
            for opened in list(self._open.values()):
                if opened.node is node:
                    opened.path = target
            self._changed("rename", path, node, parent=parent.number, target=target, target_parent=target_parent.number)

    def link(self, path: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:  # type: ignore[override]
        with self._lock:
            path, parent, _, node = self._find_existing(path, src_dir_fd)
            target, target_parent, target_name, taken = self._find(target, dst_dir_fd)
            if taken is not None:
                _refuse(errno.EEXIST, target)
            if not target_parent.links:
                _refuse(errno.ENOENT, target)
            if node.entries is not None:
                _refuse(errno.EPERM, path)
            _entries(target_parent)[target_name] = node
            node.links += 1
            self._changed("link", path, node, parent=parent.number, target=target, target_parent=target_parent.number)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        with self._lock:
            path, parent, name, node = self._find_existing(path, dir_fd)
            if node.entries is not None:
                _refuse(errno.EISDIR, path)
            del _entries(parent)[name]
            self._lose_name(node)
            self._changed("unlink", path, node, parent=parent.number)

    def mkdir(self, path: Any, permissions: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._lock:
            path, parent, name, node = self._find(path, dir_fd)
            if node is not None:
                _refuse(errno.EEXIST, path)
            self._make(parent, name, path, stat.S_IFDIR | permissions & 0o777, "mkdir")

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        with self._lock:
            path, parent, name, node = self._find_existing(path, dir_fd)
            if _entries(node, path):
                _refuse(errno.ENOTEMPTY, path)
            del _entries(parent)[name]
            node.links -= 1
            self._directories.clear()
            self._changed("rmdir", path, node, parent=parent.number)

    def chmod(self, path: Any, permissions: int, *, dir_fd: int | None = None) -> None:  # type: ignore[override]
        node = self._named(path, dir_fd)
        node.mode = stat.S_IFMT(node.mode) | permissions

    def stat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:  # type: ignore[override]
        return _facts(self._named(path, dir_fd))

    lstat = lstatx = stat

    def listdir(self, path: Any) -> list[str]:
        return list(_entries(self._named_or_open(path), path))

    def statvfs(self, path: Any) -> os.statvfs_result:
        self._named_or_open(path)
        total = _ENDLESS if self.capacity is None else self.capacity
        blocks, free = total // _BLOCK_BYTES, max(0, total - self.used) // _BLOCK_BYTES
        return os.statvfs_result((_BLOCK_BYTES, _BLOCK_BYTES, blocks, free, free, 1 << 30, 1 << 30, 1 << 30, 0, 255))

    # --- system calls: streams of the system, or files of this file system --------------------------------

    def sendfile(self, to: int, source: int, start: int, size_bytes: int) -> int:
        return self.write(to, self.pread(source, size_bytes, start))

    def copy_file_range(self, source: int, to: int, size_bytes: int, start: int, at: int) -> int:
        return self.pwritev(to, [self.pread(source, size_bytes, start)], at)

    def read(self, fd: int, size: int) -> bytes:
        if fd < _FIRST_FD:
            return REAL.read(fd, size)
        opened = self._opened(fd)
        data = self.pread(fd, size, opened.position)
        opened.position += len(data)
        return data

    def write(self, fd: int, data: Buffer) -> int:  # type: ignore[override]
        if fd < _FIRST_FD:
            return REAL.write(fd, data)
        opened = self._opened(fd)
        count = self.pwritev(fd, [data], opened.position)
        opened.position += count
        return count

    # --- inside -------------------------------------------------------------------------------------------

    def _opened(self, fd: int) -> _Open:
        try:
            return self._open[fd]
        except KeyError:
            _refuse(errno.EBADF)

    def _writable(self, fd: int, otherwise: int = errno.EBADF) -> _Open:
        opened = self._opened(fd)
        if not opened.flags & _WRITABLE:
            _refuse(otherwise)
        return opened

    def _find(self, path: str | os.PathLike[str], dir_fd: int | None = None) -> tuple[str, Node, str, Node | None]:
        """(whole path, directory, name in it, the node with the name or None)."""
        path = os.fspath(path)
        if dir_fd is not None and not path.startswith("/"):
            opened = self._opened(dir_fd)
            if path in ("", ".") or "/" in path:
                _refuse(errno.EINVAL, path)  # only one name is supported here
            return f"{opened.path}/{path}", opened.node, path, _entries(opened.node, path).get(path)
        above, _, name = path.rpartition("/")
        directory = self._directories.get(above)
        if directory is None or name in ("", ".", ".."):
            directory, name = self._walk(path)
            if not name:
                return path, directory, name, directory
        if directory.entries is None:
            _refuse(errno.ENOTDIR, path)
        return path, directory, name, directory.entries.get(name)

    def _find_existing(self, path: str | os.PathLike[str], dir_fd: int | None) -> tuple[str, Node, str, Node]:
        """As `_find`. ENOENT if there is no node."""
        whole, directory, name, node = self._find(path, dir_fd)
        if node is None:
            _refuse(errno.ENOENT, whole)
        return whole, directory, name, node

    def _walk(self, path: str) -> tuple[Node, str]:
        """The directory of the path's last name, and that name. Caches the directory."""
        parts = [part for part in path.split("/") if part and part != "."]
        last = parts.pop() if parts and parts[-1] != ".." else ""
        trail, names = [self._root], [""]
        for part in parts:
            entries = _entries(trail[-1], path)
            if part == "..":
                if len(trail) > 1:
                    del trail[-1], names[-1]
                continue
            if part not in entries:
                _refuse(errno.ENOENT, path)
            trail.append(entries[part])
            names.append(part)
        if not last:  # the path ends in .. or is the root
            return trail[-2:][0], names[-1]
        above, _, name = path.rpartition("/")
        if name == last and trail[-1].entries is not None:
            self._directories[above] = trail[-1]
        return trail[-1], last

    def _named(self, path: str | os.PathLike[str], dir_fd: int | None = None) -> Node:
        return self._find_existing(path, dir_fd)[-1]

    def _named_or_open(self, path: str | os.PathLike[str] | int) -> Node:
        return self._opened(path).node if isinstance(path, int) else self._named(path)

    def _make(self, parent: Node, name: str, path: str, mode: int, call: str) -> Node:
        if not parent.links:  # removed, but still open
            _refuse(errno.ENOENT, path)
        self._last_number += 1
        node = Node(self._last_number, mode, b"", {} if stat.S_ISDIR(mode) else None)
        _entries(parent)[name] = node
        self._changed(call, path, node, parent=parent.number)
        return node

    def _lose_name(self, node: Node) -> None:
        node.links -= 1
        if not node.links:
            self.used -= len(node.data)


def _unlock(node: Node, fd: int) -> None:
    node.holder = 0 if node.holder == fd else node.holder
    node.sharers -= {fd}


def _entries(node: Node, path: Any = None) -> dict[str, Node]:
    if node.entries is None:
        _refuse(errno.ENOTDIR, path)
    return node.entries


def _holds(node: Node, other: Node) -> bool:
    """True if `other` is the node itself or lies below it."""
    return node is other or any(_holds(each, other) for each in (node.entries or {}).values())


def _facts(node: Node) -> os.stat_result:
    links = node.links if node.entries is None else 2 * node.links
    return os.stat_result((node.mode, node.number, 0, links, 0, 0, len(node.data), 0, 0, 0))


def _contents(node: Node, path: str) -> Iterator[tuple[str, bytes]]:
    if node.entries is None:
        yield path, bytes(node.data)
    else:
        for name in sorted(node.entries):
            yield from _contents(node.entries[name], f"{path}/{name}")


def _refuse(error: int, path: Any = None) -> NoReturn:
    raise OSError(error, os.strerror(error), path)
