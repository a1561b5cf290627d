"""Listed files: the real files of a system that has other lists of mounts and of locks, or none."""

from __future__ import annotations

from loglib.system.files import Files


class Listed(Files):
    """The real files, with these lists of mounts and of locks. None: the system does not have the list."""

    def __init__(self, mounts: str | None = None, locks: str | None = None) -> None:
        self.lists = {"/proc/self/mountinfo": mounts, "/proc/locks": locks}

    def read_proc(self, path: str) -> bytes:
        if (found := self.lists[path]) is None:
            raise FileNotFoundError(path)
        return found.encode()
