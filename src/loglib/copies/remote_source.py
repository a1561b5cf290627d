"""Remote source: a topic on another host, as its mirror here reads it, over a stream.

Invariant: what comes is believed only after the same checks as on this host: of a batch both checksums, its place and
the batch before it; of a segment its header; of a mark its checksum; of a name whether it is one. Nothing that fails a
check is handed on: the link breaks, with `BrokenStreamError`.

The copy asks, and the source answers (mirror_server.py). One request is different: READ is answered with as many pieces
of a log as the copy's credit allows, and goes on with its acknowledgements. A READ that is not wanted any more is
stopped.

Threads: `wake` from any thread; the rest from one at a time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from struct import Struct
from typing import Any, NamedTuple

from ..config.arguments import check_names
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogMovedError, printable
from ..format.batch import Source
from ..format.chain import End
from ..format.header import HEADER_BYTES as BATCH_HEADER_BYTES
from ..format.header import BadBatch, NewerBatch, crc32c, parse_header
from ..format.watermark import Mark
from ..groups.offsets import offsets_identity
from ..log import copy_role, store_pointer, topic_file
from ..log.bundle_reader import Bundle
from ..log.gaps import NAME as GAPS
from ..log.gaps import parse_gaps
from ..segment import HEADER_BYTES, Identity, SegmentHeader
from ..system.not_copyable import NotCopyable
from .frames import ACK, ANSWER, BATCHES, BEAT, ERROR, GAP, PROTOCOL, REQUEST, SEGMENT, STOP, Frame, Link
from .log_source import SMALL_BATCH_BYTES, Block, SegmentStart, whole_batches
from .topic_source import GroupSnapshot
from .wire_json import as_bytes, as_error, as_mark, tell_mark

__all__ = ["BESIDE", "CREDIT_BYTES", "LOG_OF_COMMITS", "TIMEOUT_S", "RemoteLog", "RemoteTopic"]

TIMEOUT_S = 60.0  # the longest silence of the other end
CREDIT_BYTES = 64 << 20  # the source sends so much of a log, and then waits for an acknowledgement
LOG_OF_COMMITS = re.compile("[0-9a-f]{16}")
BESIDE = Struct("<qq")  # behind a segment's header: the sizes of its file of producers and of `clock`; -1 for none
_MOST_WORDS = 1000
_NO_ANSWER = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, CorruptLogError)


class _Reading(NamedTuple):
    """A READ that the source is answering: what it will send next."""

    log: RemoteLog
    at: int
    base: int
    limit: int


class RemoteTopic(NotCopyable):
    """The topic at the other end of a stream."""

    def __init__(self, stream: Any, *, timeout_s: float, credit_bytes: int = CREDIT_BYTES) -> None:
        self._link = Link(stream, timeout_s=timeout_s, doing="asking for a topic on another host", at_source=False)
        self.credit_bytes = credit_bytes
        self._logs: dict[int, RemoteLog] = {}
        self._marks: dict[int, Mark] = {}
        self._ends: dict[int, int] = {}
        self._begun: dict[int, int] = {}  # where a segment begins at the end of a log
        self._fresh: set[int] = set()  # whose marks came with the last news, of one moment
        self._reading: _Reading | None = None
        self._heard_at = time.monotonic()
        self._host = copy_role.ELSEWHERE
        try:
            answer = self.ask("hello", protocol=PROTOCOL, credit=credit_bytes)
            with self.understood():
                self.log_id = bytes.fromhex(answer["log_id"])
                if len(self.log_id) != 16:
                    raise ValueError("a log id that is none")
                where = printable(str(answer["of"])[:_MOST_WORDS])
                self.place, self._host = copy_role.ELSEWHERE + where, copy_role.ELSEWHERE + where.partition(":")[0]
        except BaseException:
            self._link.close()
            raise
        self._link.now_doing(f"mirroring {self.place}")

    def close(self) -> None:
        self._link.close()

    def wake(self) -> None:
        """End the present wait for the source and all later ones with `LogClosedError`."""
        self._link.wake()

    def heard_at(self) -> float:
        """When the source has answered last, by the monotonic clock."""
        return self._heard_at

    def beat(self) -> None:
        """Tell the source that this end is alive."""
        self._link.send(Frame(BEAT))

    # --- requests ----------------------------------------------------------------------------------------

    def ask(self, what: str, **facts: Any) -> Any:
        """The answer to a request; raises the error that the source has met."""
        self.request(what, **facts)
        frame = self.receive()
        if frame.kind != ANSWER:
            raise self._link.broken(f"a frame of kind {frame.kind} came, and not the answer to {what}")
        with self.understood():
            return frame.facts()

    def request(self, what: str, **facts: Any) -> None:
        """Send a request, after the end of a READ."""
        if self._reading is not None:
            self._link.send(Frame(STOP))
            while self._reading is not None:
                if self._next().kind in (ANSWER, ERROR):
                    self._reading = None
        self._link.send_facts(REQUEST, {"what": what, **facts})

    def receive(self) -> Frame:
        """The next frame; raises the error that the source has met."""
        frame = self._next()
        if frame.kind == ERROR:
            self._reading = None
            with self.understood():
                error = as_error(frame.facts(), self._host)
            raise error
        return frame

    def _next(self) -> Frame:
        frame = self._link.receive()
        assert frame is not None
        self._heard_at = time.monotonic()
        return frame

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Break the link if what came is not what was asked for."""
        try:
            yield
        except _NO_ANSWER as error:
            if isinstance(error, CorruptLogError):
                raise self._link.broken(f"{error.found} came, and not {error.expected}") from error
            raise self._link.broken(f"an answer came that is none: {error!r:.200}") from error

    # --- a READ ------------------------------------------------------------------------------------------

    def read(self, log: RemoteLog, at: End, base: int, limit: int) -> Frame:
        """The next piece of a log; see `RemoteLog.piece`. The caller checks it and tells how far it goes."""
        if self._reading != (log, at.end, base, limit):
            self.request("read", log=log.address, at=at, base=base, limit=limit)
            self._reading = _Reading(log, at.end, base, limit)
        return self.receive()

    def has_read(self, log: RemoteLog, end: int, base: int, limit: int) -> None:
        """The piece was whole. Behind the last one comes the answer."""
        if self._reading is None:  # it was stopped, for a question about this piece
            return
        self._reading = _Reading(log, end, base, limit)
        if end == limit:
            frame = self.receive()
            if frame.kind != ANSWER:
                raise self._link.broken(f"a frame of kind {frame.kind} came, and not the end of what was read")
            self._reading = None

    def acknowledge(self, log: RemoteLog, end: int) -> None:
        """Tell the source that a log is durable here up to this end."""
        self._link.send(Frame(ACK, log.identity.partition, log.identity.salt, end))

    # --- the topic ---------------------------------------------------------------------------------------

    def described(self) -> tuple[bytes, TopicConfig]:
        """The content of `topic.json`, and the policies in it. `LogMovedError` if there is another topic now."""
        answer = self.ask("description")
        with self.understood():
            content = as_bytes(answer["content"]) or b""
            log_id, config = topic_file.parse("the stream", content)
            if config.partitions < len(self._logs):
                raise ValueError(f"{config.partitions} partitions, where {len(self._logs)} were")
        if log_id != self.log_id:
            raise LogMovedError(self.place, "was moved or removed, or holds another topic now")
        return content, config

    def store_pointer(self, _copy: str, /) -> bytes | None:
        """What a copy has in `transactions.json`: the store's path as it is seen from the source's directory."""
        answer = self.ask("home")
        with self.understood():
            if answer is None:
                return None
            store, store_id = answer["store"], bytes.fromhex(answer["id"])
            if not isinstance(store, str) or store.startswith("/") or not store.isprintable() or len(store_id) != 16:
                raise ValueError(f"a store of transactions {answer!r:.200}")
            return store_pointer.sealed(store, store_id)

    def log(self, number: int) -> RemoteLog:
        """The log of a partition."""
        self._logs[number] = found = RemoteLog(self, number, Identity.of(self.log_id, number), f"{number:04d}")
        return found

    def log_of_commits(self, group: str, name: str) -> RemoteLog:
        """One of a group's logs of commits."""
        identity = offsets_identity(self.log_id, group, name)
        return RemoteLog(self, [group, name], identity, f"groups/{group}/offsets/{name}")

    def marks(self, numbers: Iterable[int]) -> dict[int, Mark]:
        """The marks of these partitions at one moment."""
        wanted, fresh, self._fresh = list(numbers), self._fresh, set()
        if not fresh.issuperset(wanted):
            self._learn(self.ask("marks", numbers=wanted))
        with self.understood():
            return {number: self._marks[number] for number in wanted}

    def published_end(self, number: int) -> int:
        """The end that the source had published when it was asked last."""
        return self._ends.get(number, 0)

    def begins(self, number: int, end: int) -> bool:
        """Whether a segment began at this end of a log when the source was asked last."""
        return self._begun.get(number) == end

    def _learn(self, answer: Any) -> list[int]:
        """Take over the marks in an answer, which has those that are not yet known."""
        with self.understood():
            learned = {int(number): facts for number, facts in answer["marks"].items()}
            for number, (slot, end, begins) in sorted(learned.items()):
                self._marks[number] = as_mark(slot, self._logs[number].identity.salt)
                self._ends[number] = max(int(end), self._marks[number].flushed_end)
                self._begun[number] = self._marks[number].flushed_end if begins else -1
        return sorted(learned)

    # --- groups --------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, GroupSnapshot]:
        """Where the commits of each group end now."""
        answer = self.ask("groups")
        with self.understood():
            return {name: self._noted(name, facts) for name, facts in answer["groups"].items()}

    def _noted(self, group: str, facts: Any) -> GroupSnapshot:
        check_names(group)
        for name in ("." * group.startswith("."), *facts["marks"]):
            if name and not LOG_OF_COMMITS.fullmatch(name):
                raise ValueError(f"a log of commits {name!r:.100} of group {group}")
        marks = {
            name: as_mark(slot, offsets_identity(self.log_id, group, name).salt)
            for name, slot in facts["marks"].items()
        }
        return GroupSnapshot(marks, as_bytes(facts["pointer"]))

    def has_group(self, name: str) -> bool:
        """Whether there is a group of this name."""
        answer = self.ask("has_group", name=name)
        with self.understood():
            return bool(answer["has"])

    # --- waiting -------------------------------------------------------------------------------------------

    def watch(self) -> bool:
        """The source watches what it is asked for, and tells all that is not yet known here."""
        return False

    def wait_for_changes(self, timeout_s: float) -> list[int]:
        """The partitions that have news. Waits for some until the time is over."""
        seconds = max(0.0, min(timeout_s, self._link.timeout_s / 3))
        found = self._learn(self.ask("news", seconds=seconds, partitions=len(self._logs)))
        self._fresh = set(found)
        return found

    def unwatch(self) -> None:
        """The source stops when this end has gone."""


class RemoteLog(NotCopyable):
    """A log of the topic at the other end."""

    def __init__(self, topic: RemoteTopic, address: int | list[str], identity: Identity, name: str) -> None:
        self._topic = topic
        self.address = address
        self.identity = identity
        self.place = f"{topic.place}/{name}"

    def release_files(self) -> None:
        """Nothing is open here."""

    def close(self) -> None:
        """Nothing is open here."""

    @property
    def credit_bytes(self) -> int:
        return self._topic.credit_bytes

    @property
    def published_end(self) -> int:
        """The end that the source had published when it was asked last."""
        return self._topic.published_end(self.identity.partition)

    def begins(self, end: int) -> bool:
        """Whether a segment begins at the end of the log; False for a log of commits: its next records tell."""
        return isinstance(self.address, int) and self._topic.begins(self.address, end)

    def acknowledge(self, end: int) -> None:
        """Tell the source that the log is durable here up to this end."""
        self._topic.acknowledge(self, end)

    def beside(self, name: str) -> bytes | None:
        """The content of a small file beside the segments; None if there is none."""
        answer = self._topic.ask("beside", log=self.address, name=name)
        with self._topic.understood():
            return as_bytes(answer["content"])

    def same(self, ends: Sequence[End], mark: Mark) -> int:
        """Of how many of these ends, in order, the log has the batch before, the same one."""
        slot = tell_mark(mark, self.identity.salt)
        answer = self._topic.ask("same", log=self.address, ends=ends, mark=slot)
        with self._topic.understood():
            return range(len(ends) + 1)[int(answer["count"])]

    # --- pieces ------------------------------------------------------------------------------------------

    def first(self) -> SegmentStart:
        """The segment at which the log begins."""
        self._topic.request("first", log=self.address)
        return self._begun(self._topic.receive(), None)

    def begun(self, base: int) -> SegmentStart:
        """The segment with this base offset, as it begins. `OffsetOutOfRangeError` if retention has dropped it."""
        self._topic.request("begun", log=self.address, base=base)
        return self._begun(self._topic.receive(), base)

    def piece(self, at: End, base: int, limit: int) -> SegmentStart | Block:
        """What follows `at` in the log, below `limit`; see `SourceLog.piece`."""
        frame = self._topic.read(self, at, base, limit)
        piece: SegmentStart | Block
        if frame.kind == SEGMENT:
            piece = self._begun(frame, at.end)
            self._check_joins(at, piece.header)
            end, base = at.end, at.end
        else:
            piece = self._block(frame, at, limit)
            end = piece.end.end
        self._topic.has_read(self, end, base, limit)
        return piece

    def _begun(self, frame: Frame, base: int | None) -> SegmentStart:
        """The segment that a frame has, which must be that of this base offset, if it is known."""
        with self._topic.understood():
            self._check_frame(frame, (SEGMENT,), base)
            header = SegmentHeader.decode(frame.content[:HEADER_BYTES], self.place)
            if header[:2] != self.identity[:2] or header.base_offset != frame.base_offset:
                raise ValueError("the header of another segment")
            place = HEADER_BYTES + BESIDE.size
            sizes = BESIDE.unpack(frame.content[HEADER_BYTES:place])
            files: list[bytes | None] = []
            for size in sizes:
                files.append(None if size < 0 else frame.content[place : place + size])
                place += max(size, 0)
            more, clock = files
            if place != len(frame.content):
                raise ValueError(f"files of {sizes} bytes in {len(frame.content)}")
            if (more is None) == bool(header.more_producers) or crc32c(more or b"") != header.more_producers_crc:
                raise ValueError("a file of producers that the header does not have, or has otherwise")
            return SegmentStart(header, more, clock)

    def _check_joins(self, at: End, header: SegmentHeader) -> None:
        if at.crc not in (None, header.previous_crc) and not self._declared(at.end - 1):
            with self._topic.understood():
                raise ValueError(f"a segment that follows a batch with CRC {header.previous_crc:08x}")

    def _block(self, frame: Frame, at: End, limit: int) -> Block:
        """The batches or the bytes that a frame has, which follow `at`."""
        content = frame.content
        with self._topic.understood():
            self._check_frame(frame, (BATCHES, GAP), at.end)
            if not 0 < len(content) <= limit - at.end:
                raise ValueError(f"{len(content)} bytes, where {limit - at.end} were asked for")
            if frame.kind == BATCHES:
                return Block(content, self._end_of(content, at))
        if not self._declared(at.end):
            with self._topic.understood():
                raise ValueError("bytes of a gap that nobody has declared")
        return Block(content, End(at.end + len(content), at.last_batch, None))

    def _end_of(self, content: bytes, at: End) -> End:
        """Where these batches end; all of them are checked."""
        end, (_, partition, salt) = at, self.identity
        try:
            first = parse_header(content, 0, salt=salt, offset=at.end) if len(content) >= BATCH_HEADER_BYTES else None
            if first is not None and first.length <= SMALL_BATCH_BYTES:
                bundle = Bundle.of(content, at.end, Source("the stream", 0), partition, salt)
                if bundle is not None and at.crc in (None, bundle.previous_crc):
                    end = End(bundle.next_offset, bundle.last_batch, bundle.last_crc)
            end, fault = whole_batches(content, at, end, salt)
            if fault is not None:
                raise fault
        except (BadBatch, NewerBatch) as error:
            raise error.in_file("the stream", 0) from error
        if end.end - at.end != len(content):
            raise ValueError(f"{len(content)} bytes with whole batches in {end.end - at.end} of them")
        return end

    def _check_frame(self, frame: Frame, kinds: tuple[int, ...], offset: int | None) -> None:
        facts = frame.partition, frame.salt, frame.base_offset
        wanted = self.identity.partition, self.identity.salt, frame.base_offset if offset is None else offset
        if frame.kind not in kinds or facts != wanted:
            raise ValueError(f"a frame of kind {frame.kind}, of partition, salt and offset {facts}, and not {wanted}")

    def _declared(self, offset: int) -> bool:
        """Whether the source has declared a gap around this offset."""
        content = self.beside(GAPS)
        with self._topic.understood():
            gaps = () if content is None else parse_gaps(content, "the stream", self.identity)
        return any(gap.start <= offset < gap.end for gap in gaps)
