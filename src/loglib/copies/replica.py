"""Replica: another directory of a replicated topic, and the thread that keeps it equal to the writer's own.

Invariant: the records that a replica acknowledges are durable there, and its log is a prefix of the writer's. Its
readers see only acknowledged records. A replica that fails or is slow is left out: it gets no requests, and
acknowledges nothing, until it has caught up, in its own thread, which tries again and again.

    ask        a flush begins: [own end, end) is pulled from the writer's file, which is in the page cache, and synced
    publish    the flush is acknowledged: the writer's mark is published here, too, unless it is ahead of the log here
    return     the lock, an epoch floor, a common history, all that is missing, checked; then the writer is accepted

Nothing is queued except numbers, and no more of them than the flushes of `timeout` seconds.

Threads: `ask` from the thread that flushes, `publish` from any; the rest in the replica's own thread. A thread that
hangs in the system is abandoned.
"""

from __future__ import annotations

import logging
import threading
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
from ..log.recovery import Tail, read_mark
from ..segment import Identity, segment_name
from ..system.clock import monotonic
from ..system.directory import Directory
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from .local_source import SourceLog
from .log_copier import LogCopier
from .roster import Members, read_members

logger = logging.getLogger("loglib")

_NEAR_BYTES = 8 << 20  # a replica that is nearer to the writer's end counts again: the next flush waits for the rest
_SOON_S = 0.002  # how long the thread waits for another flush before it publishes the last one
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between two tries to return


class ReplicaState(NamedTuple):
    """One directory of a replicated topic, as `Topic.copies` lists it."""

    path: str
    id: str  # of the directory, wherever it is mounted
    state: str  # "own": the topic's own directory; "in step"; "left out"
    durable_ends: tuple[int, ...]  # of each partition: the durable end there that this process knows
    lag_bytes: int  # bytes in the topic's own log that this directory does not have yet
    error: str | None  # why it is left out, or its last error


class FlushRequest(NotCopyable):
    """One flush of one partition, which the other directories are asked for."""

    def __init__(self, copies: PartitionCopies, base_offset: int, tail: Tail) -> None:
        self.copies = copies
        self.base_offset = base_offset
        self.tail = tail
        self.began = monotonic()
        self.answers: SimpleQueue[tuple[Replica, bool]] = SimpleQueue()  # True: it is durable there
        self.asked = {each for each in copies.replicas if each.give(self)}

    def settle(self) -> None:
        """Wait until the flush is durable in enough directories. `TooFewCopiesError` names the others."""
        copies, have, waiting = self.copies, 1, set(self.asked)
        now = monotonic()
        copies.own_sync_s, deadline = now - self.began, now + copies.timeout_s
        while have < copies.needed and waiting:
            try:
                replica, has = self.answers.get(timeout=max(0.0, deadline - monotonic()))
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
        self.needed = needed  # copies that an acknowledgement needs, with the topic's own
        self.timeout_s = timeout_s
        self.own_sync_s = 0.0  # how long the last sync took in the topic's own directory
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

    def __init__(self, files: Files, writer: Writer, copier: LogCopier) -> None:
        self._files = files
        self._writer = writer
        self._place = Directory.open(files, writer.directory)  # the writer may be closed before its last flush is here
        self._source = (-1, -1)  # a segment there, and its file
        self.copier = copier
        self.mark: Mark | None = None  # the writer's last publication; published here once the log has come there
        self._shown: Mark | None = None  # the one that was published here last

    @property
    def end(self) -> int:
        """The end of the durable records here."""
        return self.copier.copied.synced.end

    def pull(self, base_offset: int, tail: Tail) -> None:
        """Bring the log to the writer's tail, in its segment with this base offset. Synced."""
        copied = self.copier.copied
        if copied.end.end < tail.end:
            if copied.bases[-1] != base_offset and copied.end.end == base_offset:
                self.copier.begin(self.copier.source.begun(base_offset))
            if copied.bases[-1] == base_offset:
                copied.pull(self._file(base_offset), tail.chain_end)
            else:  # it came back a moment ago, and the writer has rolled since
                self.advance(tail)
        copied.sync()

    def advance(self, tail: Tail) -> None:
        """Catch up with the writer's tail from any distance, checking the chain. Synced."""
        mark = self._writer.disk.mark
        target = mark.flushed_to(tail.end, tail.last_batch)
        self.copier.advance(target, lambda _: None, restart=True, acknowledged=mark.flushed_end)

    def _file(self, base_offset: int) -> int:
        base, fd = self._source
        if base != base_offset:
            self.close_source()
            fd = self._place.open_read(segment_name(base_offset))
            self._source = base_offset, fd
        return fd

    def publish(self) -> None:
        """Let readers here see the acknowledged records that are here, and drop what retention has dropped."""
        copied, mark = self.copier.copied, self.mark
        end, begun = copied.end.end, self._writer.disk.active.base_offset
        if end != copied.bases[-1] and end in (begun, mark and mark.log_start_offset):  # a roll, and nothing after it
            self.copier.begin(self.copier.source.begun(end))
        if mark is None or mark is self._shown or mark.flushed_end > copied.synced.end:
            return
        log_start = mark.log_start_offset
        if log_start > copied.mark.log_start_offset:
            copied.drop_before(log_start, mark)
        copied.publish(mark._replace(log_start_offset=max(log_start, copied.mark.log_start_offset)))
        self._shown = mark

    def rest_at_end(self) -> None:
        """Publish and sync all, so that the directory is closed cleanly."""
        self.publish()
        self.copier.copied.sync()
        self.copier.copied.rest_at(self.copier.copied.mark)

    def close_source(self) -> None:
        (_, fd), self._source = self._source, (-1, -1)
        if fd >= 0:
            self._files.close(fd)

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self.copier.close)
            closing.callback(self._place.close)
            self.close_source()


class Replica(NotCopyable):
    """A directory that is kept equal to the topic's own."""

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
        self._followers: list[_PartitionFollower] = []
        self._inbox: SimpleQueue[FlushRequest | None] = SimpleQueue()
        self._is_idle = False  # True if only the inbox wakes the thread
        self._unanswered: deque[FlushRequest] = deque()
        self._pause = _FIRST_PAUSE_S
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="loglib-replica", daemon=True)

    @property
    def id(self) -> str:
        """The id of the directory; empty if it is not known yet."""
        return next(iter(self._ids)) if len(self._ids) == 1 else ""

    def has_begun(self) -> bool:
        """True if the thread was started."""
        return self._thread.ident is not None

    def is_here(self) -> bool:
        """True if the caller is the replica's own thread."""
        return self._thread is threading.current_thread()

    # --- any thread ------------------------------------------------------------------------------------

    def give(self, request: FlushRequest) -> bool:
        """Ask for a flush; False if the replica is left out."""
        with suppress(IndexError):  # no request is unanswered
            copies, waited = request.copies, request.began - self._unanswered[0].began
            allowed = copies.timeout_s + copies.own_sync_s
            if waited > allowed:
                self.leave_out(f"no answer within {allowed:.1f} s")
        if self.fault is not None:
            return False
        self._unanswered.append(request)
        self._inbox.put(request)
        return True

    def post(self, number: int, mark: Mark) -> None:
        """Let the readers of a partition there see up to the writer's mark, soon."""
        followers = self._followers
        if self.fault is None and number < len(followers):
            followers[number].mark = mark
            if self._is_idle:  # else it looks by itself in a moment: a busy writer saves half of the wakes
                self._inbox.put(None)

    def leave_out(self, why: str) -> None:
        """Leave the directory out until it has caught up. `why` is the reason."""
        if self.fault is None:
            self.fault = self.last_error = why
            logger.warning("%s: left out of the replicated topic: %s; it is tried again", self.path, why)
            self._inbox.put(None)

    def state(self) -> ReplicaState:
        """The state of the directory."""
        ends = tuple(each.end for each in list(self._followers)) or (0,) * len(self._writers)
        lag = sum(max(0, writer.batch.tail.end - end) for writer, end in zip(self._writers, ends, strict=False))
        state = "in step" if self.fault is None else "left out"
        return ReplicaState(self.path, self.id, state, ends, lag, self.fault or self.last_error)

    # --- opening and closing ---------------------------------------------------------------------------

    def join(self, writers: Sequence[Writer], copiers: Mapping[int, LogCopier]) -> None:
        """Follow these writers, with copiers whose logs are equal to theirs; none if the directory is out of reach."""
        self._writers, self._epochs = list(writers), [each.disk.epoch for each in writers]
        if copiers:
            pairs = zip(writers, (copiers[number] for number in range(len(writers))), strict=True)
            self._followers = [_PartitionFollower(self._files, *each) for each in pairs]

    def set_epoch(self) -> None:
        """Accept the writers: record their epochs in the marks of the logs. Synced."""
        for writer, follower in zip(self._writers, self._followers, strict=True):
            follower.copier.copied.set_epoch(writer.disk.epoch, writer.disk.nonce)

    def log_start(self, number: int) -> int:
        """The log start of a partition here."""
        return self._followers[number].copier.copied.mark.log_start_offset

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Publish the acknowledged records, and end the thread. See `wait`."""
        self._ending = True
        self._inbox.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the thread; True if it has ended in time. If it hangs in the system, the locks stay with it."""
        if self.has_begun():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Release the directory. The thread must have ended, or not have begun."""
        followers, self._followers = self._followers, []
        with ExitStack() as closing:
            for each in followers:
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
            except Exception as error:  # noqa: BLE001  Whatever it is, the directory does not have the records.
                self._fail(error)
        try:
            if self.fault is None:
                for follower in self._followers:
                    follower.rest_at_end()
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        finally:
            with suppress(OSError):
                self.close()

    def _due_flushes(self) -> list[FlushRequest]:
        """Wait for requests and return them. A replica that is left out only waits for a while, unless it shall end."""
        news: list[FlushRequest | None] = []
        with suppress(Empty):
            if self.fault is None:
                news.append(self._next())
            else:
                deadline = monotonic() + self._pause
                while not self._ending:
                    self._inbox.get(timeout=max(0.0, deadline - monotonic()))
                    self._answer(list(self._unanswered))  # requests from before it was left out
        with suppress(Empty):
            while True:
                news.append(self._inbox.get_nowait())
        return [each for each in news if each is not None]

    def _next(self) -> FlushRequest | None:
        """Wait for the next flush, or for a mark to publish."""
        with suppress(Empty):
            return self._inbox.get(timeout=_SOON_S)
        self._is_idle = True
        try:
            self._publish()  # marks that were posted before `_is_idle` was set
            return self._inbox.get()
        finally:
            self._is_idle = False

    def _fail(self, error: Exception) -> None:
        why = str(error) or repr(error)
        if self.fault is not None:
            self.fault = self.last_error = why
        self.leave_out(why)
        self._answer(list(self._unanswered))

    def _serve(self, requests: Sequence[FlushRequest]) -> None:
        for last in {each.copies.number: each for each in requests}.values():  # it covers those before it
            self._followers[last.copies.number].pull(last.base_offset, last.tail)
        self._answer(requests)
        self._publish()

    def _publish(self) -> None:
        for follower in self._followers:
            follower.publish()

    def _answer(self, requests: Sequence[FlushRequest]) -> None:
        for request in requests:
            with suppress(ValueError):  # answered before
                self._unanswered.remove(request)
                request.answers.put((self, self.fault is None))

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
        followers: list[_PartitionFollower] = []
        try:
            for writer, epoch in zip(self._writers, self._epochs, strict=True):
                followers.append(self._reopened(writer, epoch))
            for follower, writer in zip(followers, self._writers, strict=True):
                self._catch_up(follower, writer)
            for follower, writer in zip(followers, self._writers, strict=True):
                follower.copier.copied.set_epoch(writer.disk.epoch, writer.disk.nonce)
                follower.mark = writer.disk.mark
                follower.publish()
        except BaseException:
            with ExitStack() as closing:
                for follower in followers:
                    closing.callback(follower.close)
            raise
        self._followers = followers

    def _check_member(self) -> None:
        """`LogError` unless the path leads to the directory that is missing."""
        found = read_members(self._files, self.path)
        if found is None:
            raise LogError("no member of the topic is there; is its disk mounted?")
        if found.log_id != self._members.log_id or found.id not in self._ids:
            raise LogError(f"another directory is there: member {found.id}, and not {' or '.join(self._ids)}")
        if found.version != self._members.version:
            raise LogError("it is not whole, or has another list of members; open the topic again, which mends it")
        self._ids = {found.id}

    def _reopened(self, writer: Writer, epoch: int) -> _PartitionFollower:
        """Open and lock a partition, and set its epoch floor. Its log may differ from the writer's."""
        identity = Identity.of(self._members.log_id, writer.partition)
        directory = topic_file.partition_directory(self.path, writer.partition)
        with Directory.open(self._files, directory) as place:
            if read_mark(place, identity) is None:
                raise LogError(f"{place.path_of(WATERMARK)} is lost; open the topic again, which mends it")
        source = SourceLog(self._files, writer.directory, identity)
        copier = LogCopier(self._files, source, directory, identity, self._permissions, shows=False)
        try:
            copied = copier.copied
            if copied.mark.promised_epoch > epoch:
                raise LockedError(copied.path, "a later opening of the topic", advice="close this one, or that one")
            copied.set_epoch_floor(epoch)
            copier.carry(gaps.NAME)
        except BaseException:
            copier.close()
            raise
        return _PartitionFollower(self._files, writer, copier)

    def _catch_up(self, follower: _PartitionFollower, writer: Writer) -> None:
        """Copy up to near the writer's tail. All bytes before it are written, so no lock of the writer is needed."""
        while not self._ending:
            tail = writer.batch.tail
            follower.advance(tail)
            if writer.batch.tail.end - tail.end <= _NEAR_BYTES:
                return
        raise LogClosedError("the topic is being closed")
