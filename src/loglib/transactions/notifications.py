"""Notifications: tell the writers of partitions in other processes that a transaction was committed, or that another
process has changed the topic's policies.

Invariant: notifications are hints. They are never synced, and losing one loses nothing: the store has the committed
transactions, and every writer reads it when it opens a partition.

    notify        a file ring-<random> in <topic>/inbox appears and is removed: the writers of the topic read the store
    request_ack   a file <partition>-<random>; the writer of the partition removes it to acknowledge
    topic.json    another file gets this name in the topic's directory: the policies have changed

A process has one thread for all its topics. It sleeps until the system reports a change in an inbox, or of the files in
a topic's directory (inotify). These change with the topic's policies and its role, and seldom otherwise. It begins to
watch 0.2 s after the first topic was opened, so that a short program never pays for it, and ends with the last topic. A
forked child has no such thread, and forgets that of its parent.

Threads: any thread may call these functions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from ..system.clock import monotonic
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.notify import Observer
from ..system.process import PerProcess

logger = logging.getLogger("loglib")

_INBOX = "inbox"  # the subdirectory in a topic's directory
_NAP_S = 0.001
_FREE_S = 0.02  # between two checks that a partition is still held: a pass of retention holds it for milliseconds
_QUIET_S = 0.2  # after the first topic was opened, before the thread watches
_LOOK_S = 0.2  # where the system reports no changes
_LOOK_AGAIN_S = 1.0  # while a transaction is held: the process that applies it may have died

T = TypeVar("T")


def notify(files: Files, topic_path: str) -> None:
    """Wake the writers of a topic, in all processes."""
    with suppress(FileNotFoundError):  # the topic was deleted
        path = _new_name(files, topic_path, "ring")
        files.close(files.create(path, 0o600))
        files.unlink(path)


def request_ack(
    files: Files,
    topic_path: str,
    partitions: Iterable[int],
    *,
    patience_s: float,
    is_free: Callable[[int], bool] = lambda _: False,
) -> list[int]:
    """Ask the writers of these partitions for an answer; returns the partitions without one in `patience_s` seconds.

    `is_free(partition)` is True if the partition has no writer any more. Then no answer is awaited.
    """
    waiting = {partition: _new_name(files, topic_path, f"{partition:04d}") for partition in partitions}
    for path in waiting.values():
        files.close(files.create(path, 0o600))
    silent = list(waiting)
    now = monotonic()
    deadline, look_at = now + patience_s, now + _FREE_S
    while silent:
        silent = [each for each in silent if files.exists(waiting[each])]
        now = monotonic()
        if now > min(look_at, deadline):
            silent = [each for each in silent if not is_free(each)]
            look_at = now + _FREE_S
        if now > deadline:
            break
        time.sleep(_NAP_S)
    for path in waiting.values():
        with suppress(FileNotFoundError):  # answered
            files.unlink(path)
    return silent


def answer(files: Files, topic_path: str, partitions: Iterable[int]) -> None:
    """Acknowledge the requests for these partitions."""
    inbox = _inbox(topic_path)
    mine = {f"{each:04d}" for each in partitions}
    with suppress(FileNotFoundError):
        for name in files.names_in(inbox):
            if name.partition("-")[0] in mine:
                with suppress(FileNotFoundError):
                    files.unlink(os.path.join(inbox, name))


def _new_name(files: Files, topic_path: str, what: str) -> str:
    inbox = _inbox(topic_path)
    if not files.exists(inbox):
        with suppress(FileExistsError):
            files.make_directory(inbox, 0o600)
    return os.path.join(inbox, f"{what}-{files.random_bytes(8).hex()}")


class NotificationThread(NotCopyable):
    """The thread that watches the inboxes of this process's topics. `listen` and `leave` wait for no other thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a topic may be collected, which leaves, in the middle of a call here
        # By `id(topic)`. Several topics may have the same path.
        self._served: dict[int, _Listener] = {}
        self._thread: threading.Thread | None = None
        self._observer: Observer | None = None
        self._last_left: SimpleQueue[None] = SimpleQueue()  # ends the quiet time of the thread

    def abandon(self) -> None:
        """Close the open files in a forked child: the thread and the topics are the parent's."""
        observer = self._observer
        if observer is not None:
            observer.abandon()

    def listen(
        self, path: str, topic: T, serve: Callable[[T], bool], look: Callable[[T], object] = lambda _: None
    ) -> None:
        """Call `serve(topic)` in the background when the topic's inbox has changed, until it returns False.

        While it returns True (a transaction is held), it is called again each second. `look(topic)` is called when a
        file in the topic's directory has changed, and when watching begins. The topic is not kept alive.
        """
        real = os.path.realpath(path)  # the system knows a directory once, whatever its names
        with self._lock:
            self._served[id(topic)] = _Listener(real, weakref.ref(topic), serve, look)
            if self._thread is None:
                self._last_left = SimpleQueue()
                thread = threading.Thread(target=self._run, args=[self._last_left], name="loglib-inbox", daemon=True)
                thread.start()  # before the assignment: if the system has no thread left, the next call tries again
                self._thread = thread
        self._wake()

    def leave(self, topic: object) -> None:
        """Stop calling `serve` for this topic. Other topics at the same path are still served."""
        with self._lock:
            left = self._served.pop(id(topic), None)
            if not self._served:
                self._last_left.put(None)
        if left is not None:
            self._wake()

    def _wake(self) -> None:
        observer = self._observer
        if observer is not None:
            observer.wake()

    def _run(self, last_left: SimpleQueue[None]) -> None:
        with suppress(Empty):
            last_left.get(timeout=_QUIET_S)
        while not self._is_over():
            try:
                self._watch()
            except BaseException:  # for example no memory
                logger.exception("the inboxes of this process's topics are watched again in a second")
                time.sleep(_LOOK_AGAIN_S)

    def _is_over(self) -> bool:
        """True if no topic is left. Then the thread ends, and the next topic begins another one."""
        with self._lock:
            if not self._served:
                self._thread = None
            return not self._served

    def _watch(self) -> None:
        """Watch until no topic is left, or the system no longer reports changes."""
        watched: dict[str, bool] = {}  # by path of the topic, whose directory is watched: True if its inbox is, too
        held: set[str] = set()
        observer = self._observer = Observer()
        try:
            while served := {each.path for each in list(self._served.values())}:
                for path in watched.keys() - served:
                    observer.forget(path)
                    observer.forget(_inbox(path))
                    del watched[path]
                changed = set(map(str, observer.changed()))  # first: an inbox that is made after this is reported again
                new = served - watched.keys()
                begun = {path for path in served if self._observe(observer, path, watched)}  # they may have files
                for path in served & (changed | new):
                    self._call(path, _Listener.look_now)
                look_at = served & (held | begun | {path for path in served if _inbox(path) in changed})
                held = {path for path in look_at if watched.get(path) and self._call(path, _Listener.serve_now)}
                if not observer.reports:  # a topic was removed, or the system has no more watches: begin again
                    time.sleep(_LOOK_S)
                    return
                observer.wait(_LOOK_AGAIN_S if held else None)
        finally:
            observer.close()
            self._observer = None

    def _observe(self, observer: Observer, path: str, watched: dict[str, bool]) -> bool:
        """Watch the topic's directory, and its inbox if there is one. True if watching the inbox begins now."""
        if path not in watched and os.path.isdir(path):
            observer.observe_directory(path, path)  # before the inbox is looked for, so that its creation is not missed
            watched[path] = False
        if watched.get(path) is not False or not os.path.isdir(_inbox(path)):
            return False
        observer.observe_directory(_inbox(path), _inbox(path))
        watched[path] = True
        return True

    def _call(self, path: str, action: Callable[[_Listener], bool]) -> bool:
        """Do the action for the topics at the path. True if it must be done again soon."""
        again = False
        for listener in list(self._served.values()):
            if listener.path == path:
                try:
                    again |= action(listener)
                except Exception:  # the other topics are served
                    logger.exception("%s: its inbox is read again in a second", path)
                    again = True
        return again


class _Listener(NamedTuple):
    """A topic that is served. Its methods are without the topic, which is not kept alive."""

    path: str
    topic: weakref.ref[Any]
    serve: Callable[[Any], bool]
    look: Callable[[Any], object]

    def serve_now(self) -> bool:
        topic = self.topic()
        return topic is not None and self.serve(topic)

    def look_now(self) -> bool:
        topic = self.topic()
        if topic is not None:
            self.look(topic)
        return False


def _inbox(topic_path: str) -> str:
    return os.path.join(topic_path, _INBOX)


notification_thread = PerProcess(NotificationThread, NotificationThread.abandon)
