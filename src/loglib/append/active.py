"""Active: the segment that a partition's writer is writing to.

Invariant: bytes go where the caller says, never where the file thinks that it ends, so that writing
again after an interrupt puts the same bytes in the same place. After `sync` has returned everything
below `end` is on the disk; after it has failed nobody may believe the file any more. The file has a
name and ends where its writer says, or `LogMovedError`: who removes it, or restores an older one into
it, must not have records written where no reader finds them, or behind a hole.

Threads: `write` and `cut_back` under the writer's lock; `sync` from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import LogMovedError
from ..recovery import rewrite
from ..segment import HEADER_BYTES
from ..system.files import Buffer, Files
from ..unique import Unique

__all__ = ["ActiveSegment"]


class ActiveSegment(Unique):
    """An open segment file and what its writer must know of it."""

    def __init__(self, files: Files, fd: int, path: str, base_offset: int, *, began: int | None = None) -> None:
        self._files = files
        self.fd = fd
        self.path = path
        self.base_offset = base_offset
        self.began = began  # when its first batch was written: microseconds since the boot, negative before it
        self.in_doubt = False  # whether the answer to a sync may have been lost
        self.links = 1  # names that the file has had at the last look
        self._reach = 0  # how far into the file writes of ours may have come, finished or not

    def file_position(self, offset: int) -> int:
        return HEADER_BYTES + offset - self.base_offset

    def write(self, parts: Sequence[Buffer], offset: int) -> None:
        """Write a batch that begins at `offset`, where the file must end. Handed to the system."""
        position = self.file_position(offset)
        self.look(position)
        self._reach = max(self._reach, position + sum(map(len, parts)))
        self._files.write_all(self.fd, parts, position)

    def ends_at(self, end: int) -> bool:
        """Whether the file ends there for sure."""
        try:
            return self._files.size(self.fd) == self.file_position(end)
        except OSError:
            return False

    def cut_back(self, end: int) -> bool:
        """Make the file end at `end`, whatever a write that failed or was interrupted has left behind it.

        Says whether there was anything. Handed to the system: after a power cut it may be there again.
        """
        position = self.file_position(end)
        if self.look(position) > position:
            self._files.ftruncate(self.fd, position)
            return True
        return False

    def look(self, position: int) -> int:
        """The size of the file, which must have a name and end at `position`, or where a write of ours has come to."""
        facts = self._files.fstat(self.fd)
        self.links = facts.st_nlink
        if not facts.st_nlink:
            raise LogMovedError(self.path, "was removed, or another file put in its place", kept=False)
        if facts.st_size != position and not position < facts.st_size <= self._reach:
            found = f"was changed by somebody else, who left it {facts.st_size} bytes long instead of {position}"
            raise LogMovedError(self.path, found, kept=False)
        return facts.st_size

    def sync(self, *, durable_end: int, end: int) -> None:
        """Make everything below `end` durable; below `durable_end` it is. Synced; an `OSError` is final."""
        try:
            if self.in_doubt:
                start = max(durable_end, self.base_offset)
                rewrite(self._files, self.fd, self.file_position(start), self.file_position(end))
                self.in_doubt = False
            else:
                self._files.datasync(self.fd)
        except OSError:
            raise
        except BaseException:
            # An interrupt may have come between the system's answer and its reading: the answer may
            # have been an error, after which the page cache lies. Write again before syncing again.
            self.in_doubt = True
            raise
