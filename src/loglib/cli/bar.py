"""Bar: how far a long command has come, for a person who waits.

Invariant: it is drawn on standard error, and only if that is a terminal. Rich is imported only then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .output import safe

__all__ = ["bar"]


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], object] | None]:
    """A bar of bytes, with their rate and the time left; None if nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    with Progress(text, *columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(safe(what), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
