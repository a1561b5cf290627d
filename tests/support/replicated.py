"""Helpers of the tests of topics with replicas: several directories, each a device of its own that stalls or fails."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import QUIET, values_of
from loglib import Topic, testing

__all__ = ["Devices", "all_have_all", "assert_same", "log_bytes", "open_all", "until"]


class Devices(testing.WatchedFiles):
    """Files on several devices, by the first directories of their paths. A device may stall, or fail each change."""

    def __init__(self, inner: testing.MemoryFiles | testing.UnsyncedFiles) -> None:
        super().__init__(inner)
        self._stalled: dict[str, threading.Event] = {}
        self._failing: set[str] = set()
        self._gone: set[str] = set()
        self.meanwhile: Callable[[testing.Call], None] = lambda _: None

    @contextmanager
    def stalled(self, device: str) -> Iterator[None]:
        """Meanwhile each change of a file on the device waits."""
        self._stalled[device] = gate = threading.Event()
        try:
            yield
        finally:
            del self._stalled[device]
            gate.set()

    @contextmanager
    def failing(self, device: str | Path) -> Iterator[None]:
        """Meanwhile each change of a file on the device is refused."""
        self._failing.add(str(device))
        try:
            yield
        finally:
            self._failing.discard(str(device))

    @contextmanager
    def gone(self, device: str | Path) -> Iterator[None]:
        """Meanwhile the device does not answer at all."""
        self._gone.add(str(device))
        try:
            yield
        finally:
            self._gone.discard(str(device))

    def before(self, call: testing.Call) -> None:
        self.meanwhile(call)
        if any(call.path.startswith(each) for each in self._gone):
            raise OSError(errno.EIO, "the device is gone", call.path)
        if call.name in testing.CHANGES:
            for device, gate in list(self._stalled.items()):
                if call.path.startswith(device):
                    gate.wait(60)
            if any(call.path.startswith(each) for each in self._failing):
                raise OSError(errno.EIO, "the device fails", call.path)


def open_all(places: list[Any], **options: Any) -> Topic:
    """A topic in these directories; the first is its own."""
    own, *others = places
    options = {"replica_timeout": 30.0} | options
    files = options.get("files", testing.UnsyncedFiles())
    if not files.exists(f"{own}/topic.json"):
        options = QUIET | options
    return testing.open_topic(own, replicas=others, **{"files": files} | options)


def log_bytes(files: Any, place: Any) -> dict[str, bytes]:
    """The bytes of all segments of a directory, by partition and name."""
    found = {}
    for partition in sorted(files.listdir(str(place))):
        if len(partition) == 4 and partition.isdigit():
            for name in sorted(files.listdir(f"{place}/{partition}")):
                if name.endswith(".log"):
                    found[f"{partition}/{name}"] = files.read_whole(f"{place}/{partition}/{name}", 1 << 30)
    return found


def assert_same(places: list[Any], files: Any = None) -> list[bytes]:
    """All directories have the same bytes, and show the same whole records, which are returned."""
    files = files or testing.UnsyncedFiles()
    own = log_bytes(files, places[0])
    shown: list[list[bytes]] = []
    for place in places:
        theirs = log_bytes(files, place)
        # A new segment without batches gets to the others with the first of them.
        assert {name: each for name, each in theirs.items() if len(each) > 4096} == {
            name: each for name, each in own.items() if len(each) > 4096
        }, place
        with testing.open_topic(place, files=files, mode="r") as topic:
            assert topic.verify().damage == (), place
            shown.append(values_of(topic))
    assert all(each == shown[0] for each in shown)
    return shown[0]


def all_have_all(topic: Topic) -> bool:
    """Whether no directory lacks anything that was appended."""
    return not any(each.lag_bytes for each in topic.replicas())


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)
