"""Notifications: how a transaction reaches the writer of a partition in another process.

Invariant: notifications are hints. They are never synced, and losing one loses nothing: what is committed is in the
store, and every writer looks there when it opens a partition.

    notify        a file ring-<random> in <topic>/inbox appears and is removed: the writers of the topic read the store
    request_ack   a file <partition>-<random>; the writer of the partition removes it: it answers notifications

A process has one thread for all its topics. It sleeps until the system reports a change in an inbox (inotify). It
begins 0.2 s after the first topic was opened, so that a short program never pays for it.

Threads: any thread may call these functions. `listen` and `leave` wait for no other thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.notify import Observer

__all__ = ["INBOX", "answer", "leave", "listen", "notify", "request_ack"]

logger = logging.getLogger("loglib")

INBOX = "inbox"  # the subdirectory in a topic's directory
_NAP_S = 0.001
_FREE_S = 0.02  # between two looks whether a partition is still held: a pass of retention holds it for milliseconds
_QUIET_S = 0.2  # after the first topic was opened
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
    """The partitions whose writers do not answer in time.

    `is_free`: whether a partition has no writer any more. Then there is nobody to wait for.
    """
    waiting = {partition: _new_name(files, topic_path, f"{partition:04d}") for partition in partitions}
    for path in waiting.values():
        files.close(files.create(path, 0o600))
    silent = list(waiting)
    now = time.monotonic()
    deadline, look_at = now + patience_s, now + _FREE_S
    while silent:
        silent = [each for each in silent if files.exists(waiting[each])]
        now = time.monotonic()
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
    inbox = os.path.join(topic_path, INBOX)
    mine = {f"{each:04d}" for each in partitions}
    with suppress(FileNotFoundError):
        for name in files.listdir(inbox):
            if name.partition("-")[0] in mine:
                with suppress(FileNotFoundError):
                    files.unlink(os.path.join(inbox, name))


def _new_name(files: Files, topic_path: str, what: str) -> str:
    inbox = os.path.join(topic_path, INBOX)
    if not files.exists(inbox):
        with suppress(FileExistsError):
            files.make_directory(inbox, 0o600)
    return os.path.join(inbox, f"{what}-{files.random_bytes(8).hex()}")


class _NotificationThread(NotCopyable):
    """The thread that watches the inboxes of this process's topics."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a topic may be collected, which leaves, in the middle of a call here
        # By the topic's identity: its path, the topic, and its method without the topic. One path may have several.
        self._served: dict[int, tuple[str, weakref.ref[Any], Callable[[Any], bool]]] = {}
        self._thread: threading.Thread | None = None
        self._observer: Observer | None = None

    def listen(self, path: str, topic: T, serve: Callable[[T], bool]) -> None:
        real = os.path.realpath(path)  # the system knows a directory once, whatever its names
        with self._lock:
            self._served[id(topic)] = real, weakref.ref(topic), serve
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="loglib-inbox", daemon=True)
                thread.start()  # first: if there is no thread left, the next call tries again
                self._thread = thread
        self._wake()

    def leave(self, topic: object) -> None:
        with self._lock:
            left = self._served.pop(id(topic), None)
        if left is not None:
            self._wake()

    def _wake(self) -> None:
        observer = self._observer
        if observer is not None:
            observer.wake()

    def _run(self) -> None:
        time.sleep(_QUIET_S)
        while True:
            try:
                self._watch()
            except BaseException:  # for example no memory
                logger.exception("the inboxes of this process's topics are watched again in a second")
                time.sleep(_LOOK_AGAIN_S)

    def _watch(self) -> None:
        """Watch until the system no longer reports changes."""
        observer = self._observer = Observer()
        watched: dict[str, bool] = {}  # by path of the topic: whether its inbox is watched, and not only its directory
        held: set[str] = set()
        while True:
            served = {path for path, _, _ in list(self._served.values())}
            for path in watched.keys() - served:
                observer.forget(path)
                del watched[path]
            changed = set(map(str, observer.changed()))  # first: an inbox that is made from now on is reported again
            begun = {path for path in served if self._observe(observer, path, watched)}  # something may be there
            look_at = served & (held | changed | begun)
            held = {path for path in look_at if watched.get(path) and self._call(path)}
            if not observer.reports:  # a topic was removed, or the system has no more watches: look again, and anew
                time.sleep(_LOOK_S)
                return
            observer.wait(_LOOK_AGAIN_S if held else None)

    def _observe(self, observer: Observer, path: str, watched: dict[str, bool]) -> bool:
        """Watch the topic's inbox, or its directory while it has no inbox. True if the inbox is watched from now on."""
        inbox = os.path.join(path, INBOX)
        if path not in watched and os.path.isdir(path):
            observer.observe_directory(path, path)  # before the look at the inbox, so that its making is not missed
            watched[path] = False
        if watched.get(path) is not False or not os.path.isdir(inbox):
            return False
        observer.forget(path)
        observer.observe_directory(path, inbox)
        watched[path] = True
        return True

    def _call(self, path: str) -> bool:
        """Let the topics at the path look into their inbox. True if they must do so again soon."""
        again = False
        for each, topic, serve in list(self._served.values()):
            found = topic() if each == path else None
            if found is not None:
                try:
                    again |= serve(found)
                except Exception:  # one topic's trouble is not the others'
                    logger.exception("%s: its inbox is looked at again in a second", path)
                    again = True
        return again


_postmen: dict[int, _NotificationThread] = {}  # by process id: after a fork the child has no such thread


def _postman() -> _NotificationThread:
    return _postmen.get(os.getpid()) or _postmen.setdefault(os.getpid(), _NotificationThread())


def listen(path: str, topic: T, serve: Callable[[T], bool]) -> None:
    """Call `serve(topic)` in the background when the topic's inbox has changed, until it returns False.

    While it returns True (a transaction is held), it is called again each second. The topic is not kept alive.
    """
    _postman().listen(path, topic, serve)


def leave(topic: object) -> None:
    """Stop that. Other topics at the same path are still attended."""
    _postman().leave(topic)
