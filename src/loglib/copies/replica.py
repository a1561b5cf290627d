"""Replica: another directory of a replicated topic, and the thread that keeps it up to the writer's own.

Invariant: what a replica answers for is durable there, and its log is a prefix of the writer's. What it shows to its
readers has been acknowledged. A replica that fails or is slow is left out: it is asked for nothing and answers for
nothing until it has caught up, by its own thread, which tries again and again.

    ask        a flush begins: [own end, end) is pulled from the writer's file, which is in the page cache, and synced
    publish    the flush is acknowledged: the writer's mark is published here, too, unless it is ahead of the log here
    return     the lock, a promise, a common history, all that is missing, checked; then the writer is accepted

Nothing is queued but numbers, and no more of them than the flushes of `timeout` seconds.

Threads: `ask` from the thread that flushes, `publish` from any; the rest in the replica's own thread. A thread that
hangs in the system is left behind.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ..append.writer import Writer
from ..errors import LockedError, LogClosedError, LogError, TooFewCopiesError
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import Mark
from ..log import gaps, topic_file
from ..log.ages import NAME as CLOCK
from ..log.recovery import Tail
from ..segment import Identity, segment_name
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .follower_log import read_mark
from .log_copier import LogCopier
from .log_source import SourceLog
from .member_list import Members, read_members

__all__ = ["FlushRequest", "PartitionCopies", "Replica", "ReplicaState"]

logger = logging.getLogger("loglib")

_NEAR_BYTES = 8 << 20  # so near to the writer's end a replica counts again: the next flush waits for the rest
_SOON_S = 0.002  # the thread waits so long for another flush before it shows the last one
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between two tries to return


class ReplicaState(NamedTuple):
    """One directory of a replicated topic, as `Topic.copies` lists it."""

    path: str
    id: str  # of the directory, wherever it is mounted
    state: str  # "own": the topic's own directory; "in step"; "left out"
    durable_ends: tuple[int, ...]  # of each partition: what is durable there, as far as this process knows
    lag_bytes: int  # of the log: what the own directory has and this one has not
    error: str | None  # why it is left out, or what it failed by last


class FlushRequest(NotCopyable):
    """One flush of one partition, as the other directories are asked for it."""

    def __init__(self, copies: PartitionCopies, base_offset: int, tail: Tail) -> None:
        self.copies = copies
        self.base_offset = base_offset
        self.tail = tail
        self.began = time.monotonic()
        self.answers: SimpleQueue[tuple[Replica, bool]] = SimpleQueue()  # and whether it is durable there
        self.asked = {each for each in copies.replicas if each.give(self)}

    def settle(self) -> None:
        """Wait until enough directories have it. `TooFewCopiesError` names those that have not."""
        copies, have, waiting = self.copies, 1, set(self.asked)
        now = time.monotonic()
        copies.own_sync_s, deadline = now - self.began, now + copies.timeout_s
        while have < copies.needed and waiting:
            try:
                replica, has = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                for each in waiting:
                    each.leave_out(f"no answer within {copies.timeout_s} s")
                break
            waiting.discard(replica)
            have += has
        if have < copies.needed:
            missing = {each.path: each.fault for each in copies.replicas if each.fault is not None}
            raise TooFewCopiesError(copies.directory, copies.needed, have, missing, "a flush")


class PartitionCopies(NotCopyable):
    """One partition in the other directories; see `Copies` in append/tail.py."""

    def __init__(self, directory: str, number: int, replicas: Sequence[Replica], needed: int, timeout_s: float) -> None:
        self.directory = directory
        self.number = number
        self.replicas = replicas
        self.needed = needed  # directories that must have what is acknowledged, with the own one
        self.timeout_s = timeout_s
        self.own_sync_s = 0.0  # how long the last sync took in the own directory
        self.accepted = False

    def ask(self, base_offset: int, tail: Tail) -> FlushRequest | PartitionCopies:
        return FlushRequest(self, base_offset, tail) if self.accepted else self

    def settle(self) -> None:
        """Before the opening is complete nothing is acknowledged."""

    def publish(self, mark: Mark) -> None:
        if self.accepted:
            for each in self.replicas:
                each.post(self.number, mark)


class _PartitionFollower(NotCopyable):
    """One partition in a replica."""

    def __init__(self, files: Files, writer: Writer, pair: LogCopier) -> None:
        self._files = files
        self._writer = writer
        self._place = Directory.open(files, writer.directory)  # the writer may be closed before its last flush is here
        self._source = (-1, -1)  # a segment there, and its file
        self.pair = pair
        self.mark: Mark | None = None  # the writer's last publication; shown as soon as the log has come there
        self._shown: Mark | None = None  # the one that was shown last

    @property
    def end(self) -> int:
        """What is durable here."""
        return self.pair.copied.synced.end

    def pull(self, base_offset: int, tail: Tail) -> None:
        """Bring the log to the writer's tail, in its segment with this base offset. Synced."""
        copied = self.pair.copied
        if copied.end.end < tail.end:
            if copied.bases[-1] != base_offset and copied.end.end == base_offset:
                self._begin(base_offset)
            if copied.bases[-1] == base_offset:
                copied.pull(self._file(base_offset), tail.chain_end)
            else:  # it came back a moment ago, and the writer has rolled since
                self.advance(tail)
        copied.sync()

    def _begin(self, base_offset: int) -> None:
        self.pair.carry(CLOCK)
        begun = self.pair.source.begun(base_offset)
        self.pair.copied.begin(begun.header, begun.more_producers)

    def advance(self, tail: Tail) -> None:
        """The same over any distance, and checked."""
        mark = self._writer.disk.mark
        target = mark.flushed_to(tail.end, tail.last_batch)
        self.pair.advance(target, lambda _: None, restart=True, acknowledged=mark.flushed_end)

    def _file(self, base_offset: int) -> int:
        base, fd = self._source
        if base != base_offset:
            self.close_source()
            fd = self._place.open_read(segment_name(base_offset))
            self._source = base_offset, fd
        return fd

    def publish(self) -> None:
        """Show what was acknowledged to readers, as far as it is here, and drop what retention has dropped."""
        copied, mark = self.pair.copied, self.mark
        end, begun = copied.end.end, self._writer.disk.active.base_offset
        if end != copied.bases[-1] and end in (begun, mark and mark.log_start_offset):  # a roll, and nothing behind it
            self._begin(end)
        if mark is None or mark is self._shown or mark.flushed_end > copied.synced.end:
            return
        log_start = mark.log_start_offset
        if log_start > copied.mark.log_start_offset:
            copied.drop_before(log_start, mark)
        copied.publish(mark._replace(log_start_offset=max(log_start, copied.mark.log_start_offset)))
        self._shown = mark

    def rest_at_end(self) -> None:
        """Leave the directory as after a clean end."""
        self.publish()
        self.pair.copied.sync()
        self.pair.copied.rest_at(self.pair.copied.mark)

    def close_source(self) -> None:
        (_, fd), self._source = self._source, (-1, -1)
        if fd >= 0:
            self._files.close(fd)

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self.pair.close)
            closing.callback(self._place.close)
            self.close_source()


class Replica(NotCopyable):
    """A directory that is kept up to the topic's own."""

    def __init__(self, files: Files, path: str, members: Members, ids: Collection[str], permissions: int) -> None:
        self._files = files
        self.path = path
        self._members = members
        self._ids = ids  # of the members that it may be: more than one if it could not be reached yet
        self._permissions = permissions
        self.fault: str | None = None  # why it is left out
        self.last_error: str | None = None
        self._writers: list[Writer] = []
        self._epochs: list[int] = []
        self._lanes: list[_PartitionFollower] = []
        self._inbox: SimpleQueue[FlushRequest | None] = SimpleQueue()
        self._is_idle = False  # whether only the inbox wakes the thread
        self._unanswered: deque[FlushRequest] = deque()
        self._pause = _FIRST_PAUSE_S
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="loglib-replica", daemon=True)

    @property
    def id(self) -> str:
        """Of the directory; empty if it is not known yet."""
        return next(iter(self._ids)) if len(self._ids) == 1 else ""

    def has_begun(self) -> bool:
        """Whether it was started."""
        return self._thread.ident is not None

    def is_here(self) -> bool:
        """Whether the caller is its own thread."""
        return self._thread is threading.current_thread()

    # --- any thread ------------------------------------------------------------------------------------

    def give(self, ask: FlushRequest) -> bool:
        """Ask for a flush; False if the replica is left out."""
        with suppress(IndexError):  # all is answered
            waited, allowed = ask.began - self._unanswered[0].began, ask.copies.timeout_s + ask.copies.own_sync_s
            if waited > allowed:
                self.leave_out(f"no answer within {allowed:.1f} s")
        if self.fault is not None:
            return False
        self._unanswered.append(ask)
        self._inbox.put(ask)
        return True

    def post(self, number: int, mark: Mark) -> None:
        """Let the readers there see what was acknowledged, soon."""
        lanes = self._lanes
        if self.fault is None and number < len(lanes):
            lanes[number].mark = mark
            if self._is_idle:  # else it looks by itself, within a moment: a busy writer saves half of the wakes
                self._inbox.put(None)

    def leave_out(self, why: str) -> None:
        """Let it answer for nothing until it has caught up."""
        if self.fault is None:
            self.fault = self.last_error = why
            logger.warning("%s: left out of the replicated topic: %s; it is tried again", self.path, why)
            self._inbox.put(None)

    def state(self) -> ReplicaState:
        """Where it is."""
        ends = tuple(each.end for each in list(self._lanes)) or (0,) * len(self._writers)
        lag = sum(max(0, writer.batch.tail.end - end) for writer, end in zip(self._writers, ends, strict=False))
        state = "in step" if self.fault is None else "left out"
        return ReplicaState(self.path, self.id, state, ends, lag, self.fault or self.last_error)

    # --- opening and closing ---------------------------------------------------------------------------

    def join(self, writers: Sequence[Writer], pairs: Mapping[int, LogCopier]) -> None:
        """Follow these writers, with logs that have all that theirs have; none if the directory is out of reach."""
        self._writers, self._epochs = list(writers), [each.disk.epoch for each in writers]
        if pairs:
            self._lanes = [_PartitionFollower(self._files, each, pairs[number]) for number, each in enumerate(writers)]

    def set_epoch(self) -> None:
        """Take the logs for the writers' own. Synced."""
        for writer, lane in zip(self._writers, self._lanes, strict=True):
            lane.pair.copied.set_epoch(writer.disk.epoch, writer.disk.nonce)

    def log_start(self, number: int) -> int:
        """Where the log of a partition begins here."""
        return self._lanes[number].pair.copied.mark.log_start_offset

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Show what was acknowledged, and end the thread. See `wait`."""
        self._ending = True
        self._inbox.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Whether the thread has ended in time. It may hang in the system; then the locks stay with it."""
        if self.has_begun():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Release the directory. The thread must have ended, or not have begun."""
        lanes, self._lanes = self._lanes, []
        with ExitStack() as closing:
            for each in lanes:
                closing.callback(each.close)

    # --- its own thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending or not self._inbox.empty():
            try:
                news = self._due_flushes()
                if self.fault is None:
                    self._serve(news)
                elif not self._ending:
                    self._try_to_return()
            except Exception as error:  # noqa: BLE001  Whatever it is, the directory does not have what was asked for.
                self._fail(error)
        try:
            if self.fault is None:
                for lane in self._lanes:
                    lane.rest_at_end()
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        finally:
            with suppress(OSError):
                self.close()

    def _due_flushes(self) -> list[FlushRequest]:
        """The flushes that are asked for. A replica that is left out waits for a while instead, unless it is to end."""
        news: list[FlushRequest | None] = []
        with suppress(Empty):
            if self.fault is None:
                news.append(self._next())
            else:
                deadline = time.monotonic() + self._pause
                while not self._ending:
                    self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
                    self._answer(list(self._unanswered))  # asked before it was left out
        with suppress(Empty):
            while True:
                news.append(self._inbox.get_nowait())
        return [each for each in news if each is not None]

    def _next(self) -> FlushRequest | None:
        """Wait for the next flush, or for something to show."""
        with suppress(Empty):
            return self._inbox.get(timeout=_SOON_S)
        self._is_idle = True
        try:
            self._publish()  # what came before the others could know that it is idle
            return self._inbox.get()
        finally:
            self._is_idle = False

    def _fail(self, error: Exception) -> None:
        why = str(error) or repr(error)
        if self.fault is not None:
            self.fault = self.last_error = why
        self.leave_out(why)
        self._answer(list(self._unanswered))

    def _serve(self, asks: Sequence[FlushRequest]) -> None:
        for ask in {each.copies.number: each for each in asks}.values():  # the last has what the others want
            self._lanes[ask.copies.number].pull(ask.base_offset, ask.tail)
        self._answer(asks)
        self._publish()

    def _publish(self) -> None:
        for lane in self._lanes:
            lane.publish()

    def _answer(self, asks: Sequence[FlushRequest]) -> None:
        for ask in asks:
            with suppress(ValueError):  # answered before
                self._unanswered.remove(ask)
                ask.answers.put((self, self.fault is None))

    # --- return --------------------------------------------------------------------------------------------

    def _try_to_return(self) -> None:
        try:
            self._return()
        except Exception:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
            raise
        self._pause = _FIRST_PAUSE_S
        self.fault = None
        logger.warning("%s: has caught up, and counts again", self.path)

    def _return(self) -> None:
        self.close()
        self._check_member()
        lanes: list[_PartitionFollower] = []
        try:
            for writer, epoch in zip(self._writers, self._epochs, strict=True):
                lanes.append(self._reopened(writer, epoch))
            for lane, writer in zip(lanes, self._writers, strict=True):
                self._catch_up(lane, writer)
            for lane, writer in zip(lanes, self._writers, strict=True):
                lane.pair.copied.set_epoch(writer.disk.epoch, writer.disk.nonce)
                lane.mark = writer.disk.mark
                lane.publish()
        except BaseException:
            with ExitStack() as closing:
                for lane in lanes:
                    closing.callback(lane.close)
            raise
        self._lanes = lanes

    def _check_member(self) -> None:
        """Whether the path leads to the directory that is missed."""
        found = read_members(self._files, self.path)
        if found is None:
            raise LogError("no member of the topic is there; is its disk mounted?")
        if found.log_id != self._members.log_id or found.id not in self._ids:
            raise LogError(f"another directory is there: member {found.id}, and not {' or '.join(self._ids)}")
        if found.version != self._members.version:
            raise LogError("it is not whole, or has another list of members; open the topic again, which mends it")
        self._ids = {found.id}

    def _reopened(self, writer: Writer, epoch: int) -> _PartitionFollower:
        """A partition, locked, with a promise; its log may lack something, or have what the writer has not."""
        identity = Identity.of(self._members.log_id, writer.partition)
        directory = topic_file.partition_directory(self.path, writer.partition)
        with Directory.open(self._files, directory) as place:
            if read_mark(place, identity) is None:
                raise LogError(f"{place.path_of(WATERMARK)} is lost; open the topic again, which mends it")
        source = SourceLog(self._files, writer.directory, identity)
        pair = LogCopier(self._files, source, directory, identity, self._permissions, shows=False)
        try:
            copied = pair.copied
            if copied.mark.promised_epoch > epoch:
                raise LockedError(copied.path, "a later opening of the topic", advice="close this one, or that one")
            copied.set_epoch_floor(epoch)
            pair.carry(gaps.NAME)
        except BaseException:
            pair.close()
            raise
        return _PartitionFollower(self._files, writer, pair)

    def _catch_up(self, lane: _PartitionFollower, writer: Writer) -> None:
        """Come near to the writer's tail. What was written before it is there, so this needs no lock of the writer."""
        while not self._ending:
            tail = writer.batch.tail
            lane.advance(tail)
            if writer.batch.tail.end - tail.end <= _NEAR_BYTES:
                return
        raise LogClosedError("the topic is being closed")
