"""Watcher: one observer for all readers of an event loop, in the loop's own selector.

Invariant: a write after `watch` sets the reader's event, or the event is set already. Readers of the same partition
share one watch of the system, because the system has one per file. If the system reports nothing, the readers check
again every few milliseconds.

The watcher belongs to the loop: only the loop's selector refers to it. A closed loop drops its selector, and with it
the watcher and its descriptors. Readers may live longer, so they refer to the watcher, and to the future of a wait,
only weakly.

Threads: belongs to the loop's thread. Writers ring bells from any thread.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from weakref import WeakKeyDictionary, ref

from ..log.log import LOOK_S, LiveWriter, Log
from ..log.reader import Reader
from ..system.not_copyable import NotCopyable
from ..system.notify import REPLACED, Observer

_NAP_S = 0.01

# The values are weak as well: a watcher in this dictionary would keep its selector alive, and with it the loop.
_watchers: WeakKeyDictionary[asyncio.AbstractEventLoop, ref[_Watcher]] = WeakKeyDictionary()


def watch(reader: Reader) -> Watch:
    """Watch the files of a reader in the running loop. Earlier writes are not reported: check once more."""
    loop = asyncio.get_running_loop()
    known = _watchers.get(loop)
    watcher = None if known is None else known()
    if watcher is None:
        watcher = _Watcher(loop)
        _watchers[loop] = ref(watcher)
    return Watch(watcher, reader)


class Watch(NotCopyable):
    """The watched files of one reader, and its event."""

    def __init__(self, watcher: _Watcher, reader: Reader) -> None:
        self.replaced = False  # True if a file was moved, removed or replaced since the reader last checked
        self._changed = False
        self._waiting: ref[asyncio.Future[None]] | None = None
        self._watcher = ref(watcher)
        self._logs = list(reader._logs.values())
        self._files = reader._watched_files(self._logs)
        for path in self._files:
            watcher.add(path, self)
        self.clear()

    def fits(self, reader: Reader) -> bool:
        """True if it watches all files of the reader, in the running loop."""
        watcher = self._watcher()
        if watcher is None or watcher.loop() is not asyncio.get_running_loop():
            return False
        return len(self._logs) == len(reader._logs)  # logs are only added

    def clear(self) -> None:
        """Forget earlier changes; the reader checks its files after this call."""
        self._changed = False
        if (watcher := self._watcher()) is not None:
            for log in self._logs:
                watcher.listen(log)

    def set(self) -> None:
        """End the wait."""
        self._changed = True
        waiting = None if self._waiting is None else self._waiting()
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def wait(self, timeout: float | None) -> None:
        """Return when a file may have changed since `clear`, or after `timeout` seconds."""
        if self._changed:
            return
        # No local variable refers to the watcher: an error could keep this frame, and so the watcher, alive.
        longest = LOOK_S if self._has_reports() else _NAP_S
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = ref(waiting)
        with suppress(TimeoutError):
            async with asyncio.timeout(longest if timeout is None else min(timeout, longest)):
                await waiting

    def _has_reports(self) -> bool:
        """True if the system reports every change."""
        watcher = self._watcher()
        return watcher is not None and watcher.reports

    def close_soon(self) -> None:
        """`close`, from any thread."""
        watcher = self._watcher()
        loop = None if watcher is None else watcher.loop()
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and with it the watcher
                loop.call_soon_threadsafe(self.close)

    def close(self) -> None:
        """Stop watching, and end the wait."""
        if (watcher := self._watcher()) is not None:
            for path in self._files:
                watcher.remove(path, self)
        self._logs, self._files = [], []
        self.set()


class _Watcher(NotCopyable):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = ref(loop)
        self._observer = Observer()
        self._watches: dict[str, set[Watch]] = {}  # by the path of a file
        self._heard: dict[str, LiveWriter] = {}  # the writers of this process that ring a bell
        self._descriptors: list[int] = []
        self._register()

    @property
    def reports(self) -> bool:
        return self._observer.reports

    def add(self, path: str, watch: Watch) -> None:
        if path not in self._watches:
            self._watches[path] = set()
            self._observer.observe_file(path, path)
            self._register()  # the system may have no watch left
        self._watches[path].add(watch)

    def listen(self, log: Log) -> None:
        """Let a writer in this process ring when it has published, because the system's report comes before that."""
        path, writer = log.watermark_path, log.writer
        if writer is not None and self._heard.get(path) is not writer:
            writer.listen(self._observer.bell(path))
            self._heard[path] = writer

    def remove(self, path: str, watch: Watch) -> None:
        others = self._watches.get(path, set())
        others.discard(watch)
        if path in self._watches and not others:
            del self._watches[path]
            self._heard.pop(path, None)
            self._observer.forget(path)
        loop = self.loop()
        if not self._watches and loop is not None and _watchers.get(loop) == ref(self):  # the last reader of the loop
            del _watchers[loop]
            self._register(stop=True)
            self._observer.close()

    def _register(self, *, stop: bool = False) -> None:
        """Let the loop call `_report` for the observer's present descriptors, or for none with `stop`."""
        loop = self.loop()
        if loop is None or loop.is_closed():
            return
        for fd in self._descriptors:
            loop.remove_reader(fd)
        self._descriptors = [] if stop else self._observer.descriptors()
        for fd in self._descriptors:
            loop.add_reader(fd, self._report)  # so the loop refers to the watcher

    def _report(self) -> None:
        self._observer.wait(0.0)
        changes = self._observer.changed()
        if len(self._observer.descriptors()) != len(self._descriptors):
            self._register()
        for path, names in changes.items():
            for each in self._watches.get(str(path), ()):
                each.replaced |= REPLACED in names
                each.set()
