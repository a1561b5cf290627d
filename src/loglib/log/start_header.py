"""Start header: a copy of the header of the segment at which a log begins, in the file `start.header`.

Invariant: the copy was a whole header of this log. A damaged header is rebuilt from the segment before it. When that
segment is dropped, only the copy still has the facts that link the log to an archive or a tier: the batch before the
segment, the largest event time and the producers. A copy that is damaged, or of another segment, does not count.

Threads: no state.
"""

from __future__ import annotations

from contextlib import suppress

from ..errors import CorruptLogError, UnsupportedFormatError
from ..segment import HEADER_BYTES, Identity, SegmentHeader, read_segment_header, segment_name
from ..system.directory import Directory

__all__ = ["NAME", "keep", "kept"]

NAME = "start.header"


def keep(directory: Directory, identity: Identity, base: int, permissions: int) -> None:
    """Keep a copy of the header of the segment at which the log begins from now on. Synced.

    A damaged header is not kept. On a full disk nothing is kept either: the pass of retention that frees it must go
    through.
    """
    with suppress(CorruptLogError, OSError):
        path = directory.path_of(segment_name(base))
        header = read_segment_header(directory.files, path, identity, within=directory)
        directory.replace(NAME, header.encode(), permissions)


def kept(directory: Directory, identity: Identity, base: int) -> SegmentHeader | None:
    """The header that was kept of this segment; None if there is no whole one."""
    with suppress(CorruptLogError, UnsupportedFormatError, OSError):
        header = SegmentHeader.decode(directory.read_whole(NAME, HEADER_BYTES), directory.path_of(NAME))
        if (header.log_id, header.partition, header.base_offset) == (*identity[:2], base):
            return header
    return None
