"""Host check: whether this host sees the topic that a query or a write was planned for.

Invariant: a task reads or stages nothing unless the topic at the path has the log id of the plan. Whether another host
sees a path cannot be known where the plan is made: containers may share an ext4 file system, and hosts need not share
an NFS mount. So the plan says where it was made, and the first task on a host that does not see the topic says both.

Processes: `made_on` on the driver, `check_here` in tasks.
"""

from __future__ import annotations

import errno
import socket
from functools import cache

from ..errors import LogError
from ..log import topic_file
from ..system.files import REAL
from ..system.mounts import file_system

__all__ = ["check_here", "made_on"]


@cache
def made_on(path: str) -> str:
    """This host, and the type of the file system of the path, for a message on another host."""
    kind = file_system(REAL, path)
    return f"{socket.gethostname()}, where the path is on {kind}" if kind else socket.gethostname()


def check_here(path: str, log_id: bytes, made_on: str) -> None:
    """`FileNotFoundError` if there is no topic at the path, and `LogError` if it is another one."""
    host = socket.gethostname()
    described = topic_file.read(REAL, path)
    if described is None:
        raise FileNotFoundError(
            errno.ENOENT,
            f"no topic on {host}, and the plan was made on {made_on}; logs must be on storage that all executors mount "
            "at the same path",
            path,
        )
    if described[0] != log_id:
        raise LogError(
            f"{path} on {host} is log {described[0].hex()}, and the query was planned for {log_id.hex()} on {made_on}: "
            "the topic was made again, or it is not the same storage; load() again"
        )
