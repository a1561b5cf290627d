"""Quarantine: bytes that are about to be overwritten or cut are kept in a file beside theirs.

Invariant: when `copy_aside` returns, the copy and its name are synced. A copy that failed leaves no file.
"""

from __future__ import annotations

from itertools import chain, count

from ..system.directory import Directory

__all__ = ["copy_aside"]


def copy_aside(
    directory: Directory,
    name: str,
    start: int,
    size_bytes: int,
    *,
    word: str = "damaged",
    replaces: bool = False,
    shares: bool = False,
) -> str:
    """Copy bytes of a file into `<name>.<word>-<start>` beside it, and return the path of the copy. Synced.

    The name of a segment loses its `.log`. A second copy gets a number after its name, unless it `replaces` the first.
    A copy that `shares` the disk's blocks, where the file system can do that, takes no time for whole segments.
    """
    files = directory.files
    stem = f"{name.removesuffix('.log')}.{word}-{start}"
    names = chain([stem], (f"{stem}.{number}" for number in count(2)))
    kept = stem if replaces else next(each for each in names if not directory.exists(each))
    source = directory.open_read(name)
    try:
        copy = directory.create(kept, 0o600, exclusive=not replaces)
        try:
            if replaces:
                files.ftruncate(copy, 0)
            copy_range = files.share_range if shares else files.copy_range
            copy_range(source, copy, start=start, end=min(start + size_bytes, files.size(source)), at=0)
            files.datasync(copy)
        except OSError:
            directory.unlink(kept)
            raise
        finally:
            files.close(copy)
    finally:
        files.close(source)
    directory.sync()
    return directory.path_of(kept)
