"""Background: the work of a topic that goes by the clock, in one thread: flushes, rolls by age, retention. The same
thread uses policies that another process has changed, and then runs retention.

Invariant: there is a thread only if a policy needs one, because Python 3.12 and later warn when a process with threads
forks. Without a flush interval the appending threads flush when a flush is due. With one, a record is flushed at most
one interval and one flush pass after it was appended. The writer's next call raises an error from here; no error is
lost. A failed flush is tried again, each time after a longer pause.

The thread refers to writers, never to the topic, so that garbage collection can free an unused topic.

Threads: safe for all. Any thread may call `touch`, `kick` and `look_soon`, also while it holds a writer's lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..config.policies import TopicConfig
from ..errors import LogClosedError
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from .access import Access
from .handles import Handles
from .losses import from_background
from .retention_pass import RetentionRunner
from .writer import Writer

_HOUSEKEEPING_S = 60.0  # once a minute is often enough, because retention and rolling by age work in hours
_FIRST_PAUSE_S = 0.05  # after a failed flush; a disk that is full now is often full for longer
_LONGEST_PAUSE_S = 5.0  # the longest wait of a person who has made room on the disk


@dataclass(eq=False, repr=False)
class Background(NotCopyable):
    """The thread of a topic, if it has one."""

    handles: Handles
    accesses: Sequence[Access]
    runner: RetentionRunner
    look: Callable[[], object]  # use policies that another process has changed
    may_have_thread: bool
    _flusher: Flusher | None = field(default=None, init=False)
    _stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._beginning = threading.RLock()  # held while the thread begins, so that `stop` does not miss it

    @property
    def has_thread(self) -> bool:
        """True if the thread runs."""
        return self._flusher is not None

    def begin(self, config: TopicConfig) -> None:
        """Begin the thread if a policy needs one."""
        interval = config.flush.interval
        with self._beginning:
            if self._stopped:
                return
            if self._flusher is None and self.may_have_thread and (self.runner.shared or _needs_thread(config)):
                self._flusher = Flusher(
                    self.handles.writers,
                    interval=interval,
                    housekeeping=self._keep_house,
                    housekeeping_every=_HOUSEKEEPING_S,
                    look=self.look,
                    look_at_turns=self.handles.look,
                )
            self.handles.set_timer(None if interval is None else self._flusher)
            self.handles.keeper = self._flusher

    def use(self, config: TopicConfig) -> None:
        """Work by other policies from now on. Waiting records are flushed now if there is a flush interval."""
        self.begin(config)
        if self._flusher is not None:
            self._flusher.set_interval(config.flush.interval)

    def look_soon(self) -> None:
        """Let the thread look whether another process has changed policies. Waits for nothing."""
        if self._flusher is not None:
            self._flusher.look_soon()

    def keep_house_soon(self) -> None:
        """Let the thread roll and run retention now. Waits for nothing."""
        if self._flusher is not None:
            self._flusher.keep_house_soon()

    def stop(self) -> None:
        """End the thread and wait for it."""
        with self._beginning:
            self._stopped = True
        if self._flusher is not None:
            self._flusher.stop()

    def is_here(self) -> bool:
        """True if the caller is this thread."""
        return self._flusher is not None and self._flusher.is_here()

    def _keep_house(self) -> None:
        self.look()  # where the system reports no changes of files
        for access in self.accesses:
            access.keep_house()
        self.runner.run_for_others()


def _needs_thread(config: TopicConfig) -> bool:
    policy = config.retention
    clocked = (config.flush.interval, config.segment_age, policy.age, policy.bytes)
    return any(each is not None for each in clocked) or policy.keep_free > 0


def _seconds(interval: float | None) -> float:
    return math.inf if interval is None else interval


class Flusher(NotCopyable):
    """The thread: it flushes when the interval is over or a writer asks, and calls `housekeeping` regularly.

    It calls `look` when it is asked to.
    """

    def __init__(
        self,
        writers: Sequence[Writer],  # may grow
        *,
        interval: float | None,
        housekeeping: Callable[[], object],
        housekeeping_every: float,
        look: Callable[[], object] = lambda: None,
        look_at_turns: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._writers = writers
        self._interval = _seconds(interval)
        self._housekeeping = housekeeping
        self._every = housekeeping_every
        self._look = look
        self._look_at_turns = look_at_turns
        # Used directly: an interrupt while entering a condition would leave it locked. Reentrant, because a signal
        # handler or a finalizer may append in the middle of `touch` or `kick`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._flush_at = math.inf  # monotonic seconds
        self._turns_at = math.inf  # when to look whether other processes wait for a partition that this one has
        self._pause = _FIRST_PAUSE_S  # the pause before a failed flush is tried again
        self._housekeeping_at = monotonic() + self._every
        self._looks = False  # True if it is asked to look
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="loglib-flusher", daemon=True)
        self._thread.start()

    def set_interval(self, interval: float | None) -> None:
        """Use another flush interval, in seconds. If it is not None, waiting records are flushed now."""
        self._interval = _seconds(interval)
        if interval is not None:
            self.kick()

    def touch(self) -> None:
        """There are records to flush within the interval."""
        if self._flush_at == math.inf:
            self._advance(monotonic() + self._interval)

    def kick(self) -> None:
        """A flush is due now."""
        self._advance(0.0)

    def look_soon(self) -> None:
        """Call `look` now, in the thread."""
        with self._lock:
            self._looks = True
            self._changed.notify()

    def keep_house_soon(self) -> None:
        """Call `housekeeping` now, in the thread."""
        with self._lock:
            self._housekeeping_at = 0.0
            self._changed.notify()

    def watch_turns(self, pause_s: float) -> None:
        """A writer has its partition from now on, and may have to give it up: look after `pause_s` seconds."""
        look_at = monotonic() + pause_s
        if look_at < self._turns_at:
            with self._lock:
                self._changed.notify()
                self._turns_at = min(look_at, self._turns_at)

    def stop(self) -> None:
        """End the thread and wait for it; the writers are not flushed."""
        with self._lock:
            self._stopped = True
            self._changed.notify()
        if not self.is_here():
            self._thread.join()

    def is_here(self) -> bool:
        """True if the caller is the flusher's own thread."""
        return self._thread is threading.current_thread()

    def _advance(self, flush_at: float) -> None:
        with self._lock:
            if flush_at < self._flush_at:
                self._changed.notify()  # first: after an interrupt here the next call notifies again
                self._flush_at = flush_at

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._work()
            except BaseException:  # noqa: BLE001  For example no memory to wait: records still need a flush.
                with self._lock:
                    self._flush_at = min(self._flush_at, monotonic() + self._pause)
                time.sleep(_FIRST_PAUSE_S)

    def _work(self) -> None:
        """Wait until something is due, and do it."""
        with self._lock:
            while not self._stopped and not self._looks and (now := monotonic()) < (due := self._due_at()):
                self._changed.wait(min(due - now, threading.TIMEOUT_MAX))
            now = monotonic()
            if self._stopped:
                return
            flush_due = now >= self._flush_at
            if flush_due:
                self._flush_at = math.inf
            looks, self._looks = self._looks, False
            turns_due = now >= self._turns_at
            if turns_due:
                self._turns_at = math.inf
        if flush_due:
            self._flush_all()
        if turns_due and (pause := self._look_at_turns()) < math.inf:
            self._turns_at = min(self._turns_at, monotonic() + pause)
        if looks:
            self._do("changing policies", self._look)
        if now >= self._housekeeping_at:
            self._housekeeping_at = now + self._every
            self._do("housekeeping", self._housekeeping)

    def _do(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  Raised by the writer's next call.
            for writer in list(self._writers):
                writer.raise_soon(from_background(error, writer.directory, what))

    def _due_at(self) -> float:
        return min(self._flush_at, self._turns_at, self._housekeeping_at)

    def _flush_all(self) -> None:
        failed = False
        for writer in list(self._writers):
            try:
                writer.flush(background=True)
            except LogClosedError:
                continue  # the writer was closed meanwhile, which has flushed it
            except BaseException as error:  # noqa: BLE001  Raised by the writer's next call.
                failed = True
                writer.raise_soon(from_background(error, writer.directory, "flushing"))
        if failed and any(writer.unflushed() for writer in list(self._writers)):
            self._advance(monotonic() + self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        elif not failed:
            self._pause = _FIRST_PAUSE_S
