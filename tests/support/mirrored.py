"""Helpers of the tests of mirrors."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import values_of
from loglib import Topic, testing
from loglib.copies import Mirror


class Cut(testing.WatchedFiles):
    """The process ends at one call, or the call fails."""

    def __init__(
        self, chosen: Callable[[testing.Call], object], error: type[BaseException] = KeyboardInterrupt
    ) -> None:
        super().__init__(testing.UnsyncedFiles())
        self._chosen = chosen
        self._error = error

    def before(self, call: testing.Call) -> None:
        if self._chosen(call):
            raise self._error("as the test wants it")


class Meanwhile(testing.WatchedFiles):
    """Something happens, once, just before the first call that is chosen."""

    def __init__(self, chosen: Callable[[testing.Call], object], happens: Callable[[], object]) -> None:
        super().__init__(testing.UnsyncedFiles())
        self._chosen = chosen
        self._happens: Callable[[], object] | None = happens

    @property
    def happened(self) -> bool:
        return self._happens is None

    def before(self, call: testing.Call) -> None:
        if self._happens is not None and self._chosen(call):
            happens, self._happens = self._happens, None
            happens()


def segments(path: str | os.PathLike[str]) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(Path(path).glob("*/*.log"))}


def assert_same(source: Topic, to: Path) -> None:
    """The copy has all that is flushed at the source, byte for byte, and opens."""
    with Topic.open(to, mode="r") as copy:
        assert copy.verify().damage == ()
        for ours, theirs in zip(copy.partitions, source.partitions, strict=True):
            assert (ours.log_start_offset, ours.high_watermark) == (theirs.log_start_offset, theirs.high_watermark)
        assert values_of(copy) == values_of(source)
    theirs_segments = segments(source.path)
    for name, content in segments(to).items():
        assert theirs_segments[name].startswith(content), name


@contextmanager
def following(source: Any, to: Path, **options: Any) -> Iterator[Mirror]:
    with Mirror(source, to, **options) as made:
        errors: list[BaseException] = []

        def follow() -> None:
            try:
                made.follow()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield made
        finally:
            made.close()
            thread.join(30)
            assert not thread.is_alive() and not errors


def wait_for(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def mirror_end(to: Path) -> int:
    with Topic.open(to, mode="r") as copy:
        return copy.partition(0).high_watermark


def source_gone(files: testing.CrashFS) -> testing.CrashFS:
    files.rename("/data/topic", "/data/gone")
    return files
