"""Mounts: the type of the file system of a path, for a warning where locks may not work.

Invariant: the result is a guess, used only in warnings and error messages.

`flock` over NFS is a byte-range lock at the server since Linux 2.6.12 (flock(2)), and a mount option can
make it local to one client. On FUSE and SMB it depends on the implementation. So two hosts may both believe
that they are the only writer of a partition. Reading works there as anywhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from .files import Files

__all__ = ["file_system", "network_file_system", "warn_of_other_hosts"]

logger = logging.getLogger("loglib")

_TABLE = "/proc/self/mountinfo"  # one mount per line; see proc(5)
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "afs", "gfs2", "ocfs2", "glusterfs"}


def network_file_system(files: Files, path: str) -> str | None:
    """The type of the file system of `path` if other hosts may share it; None if not, or if it is unknown."""
    kind = file_system(files, path)
    return kind if kind in _NETWORK or kind.startswith("fuse") else None


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
        table = files.read_proc(_TABLE).decode(errors="replace")
    except OSError:  # not Linux, or no /proc
        return ""
    return file_system_of(table, os.path.realpath(path))


def file_system_of(table: str, path: str) -> str:
    """The type of the file system at the longest mount point above `path`; "" if there is none."""
    found, longest = "", -1
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = _unescaped(fields[4]).rstrip("/")
        if (path + "/").startswith(point + "/") and len(point) >= longest:  # at one point the last mount is on top
            found, longest = after.split(" ")[0], len(point)
    return found


def _unescaped(field: str) -> str:
    """The field with its escapes decoded: the table writes a space as a backslash and three octal digits."""
    head, *rest = field.split("\\")
    return head + "".join(chr(int(each[:3], 8)) + each[3:] for each in rest)
