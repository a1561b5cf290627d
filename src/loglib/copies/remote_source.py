"""Remote source: a topic on another host, read by a mirror on this host over a stream.

Invariant: data from the stream is used only after the same checks as on this host: of a batch both checksums, its
place and the batch before it; of a segment its header; of a mark its checksum; of a name its form. If a check fails,
the link breaks, with `BrokenStreamError`.

The copy asks, and the source answers (mirror_server.py). One request is different: READ is answered with as many pieces
of a log as the copy's credit allows, and continues with each acknowledgement. The copy stops a READ that it does not
need any more.

Threads: `wake` from any thread; the rest from one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from struct import Struct
from typing import Any

from ..config.arguments import check_names
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LogMovedError
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
from ..system.clock import monotonic
from ..system.failures import printable
from ..system.not_copyable import NotCopyable
from .frames import ACK, ANSWER, BATCHES, BEAT, ERROR, GAP, PROTOCOL, REQUEST, SEGMENT, STOP, Frame, Link
from .local_source import SMALL_BATCH_BYTES, whole_batches
from .sources import Block, GroupSnapshot, SegmentStart
from .wire_json import as_bytes, as_error, as_mark, tell_mark

TIMEOUT_S = 60.0  # the longest silence of the other end
CREDIT_BYTES = 64 << 20  # the source sends this much of a log ahead of acknowledgements
LOG_OF_COMMITS = re.compile("[0-9a-f]{16}")
BESIDE = Struct("<qq")  # after a segment's header: the sizes of its file of producers and of `clock`; -1 for none
_MOST_WORDS = 1000
# Errors of an answer that is not what was asked for.
_NO_ANSWER = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, CorruptLogError)


class RemoteTopic(NotCopyable):
    """The topic at the other end of a stream; see `TopicSource`."""

    def __init__(self, stream: Any, *, timeout_s: float, credit_bytes: int = CREDIT_BYTES) -> None:
        self._link = Link(stream, timeout_s=timeout_s, doing="asking for a topic on another host", at_source=False)
        self.credit_bytes = credit_bytes
        self._logs: dict[int, RemoteLog] = {}
        self._fresh: set[int] = set()  # partitions whose marks came with the last changes, of one moment
        # The READ that the source is answering: a log, where the next piece begins, its segment's base, and the limit.
        self._reading: tuple[RemoteLog, int, int, int] | None = None
        self._heard_at = monotonic()
        self._host = copy_role.ELSEWHERE
        try:
            answer = self.ask("hello", protocol=PROTOCOL, credit=credit_bytes)
            with self.understood():
                self.log_id = bytes.fromhex(answer["log_id"])
                if len(self.log_id) != 16:
                    raise ValueError("a log id of another length")
                where = printable(str(answer["of"])[:_MOST_WORDS])
                self.place, self._host = copy_role.ELSEWHERE + where, copy_role.ELSEWHERE + where.partition(":")[0]
        except BaseException:
            self._link.close()
            raise
        self._link.stream.doing = f"mirroring {self.place}"

    def close(self) -> None:
        self._link.close()

    def wake(self) -> None:
        self._link.stream.wake()

    def heard_at(self) -> float:
        return self._heard_at

    def beat(self) -> None:
        self._link.send(Frame(BEAT))

    # --- requests ----------------------------------------------------------------------------------------

    def ask(self, what: str, **facts: Any) -> Any:
        """Send a request and return its answer. Raises the error that the source reports."""
        self.request(what, **facts)
        frame = self.receive()
        if frame.kind != ANSWER:
            raise self._link.broken(f"a frame of kind {frame.kind} came, and not the answer to {what}")
        with self.understood():
            return frame.facts()

    def request(self, what: str, **facts: Any) -> None:
        """Send a request. A READ that is being answered is stopped first."""
        if self._reading is not None:
            self._link.send(Frame(STOP))
            while self._reading is not None:
                if self._next().kind in (ANSWER, ERROR):
                    self._reading = None
        self._link.send_facts(REQUEST, {"what": what, **facts})

    def receive(self) -> Frame:
        """Return the next frame. Raises the error that the source reports."""
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
        self._heard_at = monotonic()
        return frame

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Break the link if the block meets an answer that is not what was asked for."""
        try:
            yield
        except _NO_ANSWER as error:
            if isinstance(error, CorruptLogError):
                raise self._link.broken(f"{error.found} came, and not {error.expected}") from error
            raise self._link.broken(f"an answer came that is none: {error!r:.200}") from error

    # --- a READ ------------------------------------------------------------------------------------------

    def read(self, log: RemoteLog, at: End, base: int, limit: int) -> Frame:
        """Return the next piece of a log; see `LogSource.piece`. The caller checks it, and then calls `has_read`."""
        if self._reading != (log, at.end, base, limit):
            self.request("read", log=log.address, at=at, base=base, limit=limit)
            self._reading = log, at.end, base, limit
        return self.receive()

    def has_read(self, log: RemoteLog, end: int, base: int, limit: int) -> None:
        """Note that the piece up to `end` was whole. After the last piece comes the answer."""
        if self._reading is None:  # it was stopped, for a question about this piece
            return
        self._reading = log, end, base, limit
        if end == limit:
            frame = self.receive()
            if frame.kind != ANSWER:
                raise self._link.broken(f"a frame of kind {frame.kind} came, and not the end of what was read")
            self._reading = None

    def acknowledge(self, log: RemoteLog, end: int) -> None:
        """Send the source an acknowledgement: the log is durable here up to this end."""
        self._link.send(Frame(ACK, log.identity.partition, log.identity.salt, end))

    # --- the topic ---------------------------------------------------------------------------------------

    def described(self) -> tuple[bytes, TopicConfig]:
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
        """Return what `TopicSource` says; the store's path is relative to the source's directory."""
        answer = self.ask("home")
        with self.understood():
            if answer is None:
                return None
            store, store_id = answer["store"], bytes.fromhex(answer["id"])
            if not isinstance(store, str) or store.startswith("/") or not store.isprintable() or len(store_id) != 16:
                raise ValueError(f"a store of transactions {answer!r:.200}")
            return store_pointer.sealed(store, store_id)

    def log(self, number: int) -> RemoteLog:
        self._logs[number] = found = RemoteLog(self, number, Identity.of(self.log_id, number), f"{number:04d}")
        return found

    def log_of_commits(self, group: str, name: str) -> RemoteLog:
        identity = offsets_identity(self.log_id, group, name)
        return RemoteLog(self, [group, name], identity, f"groups/{group}/offsets/{name}")

    def marks(self, numbers: Iterable[int]) -> dict[int, Mark]:
        wanted, fresh, self._fresh = list(numbers), self._fresh, set()
        if not fresh.issuperset(wanted):
            self._learn(self.ask("marks", numbers=wanted))
        with self.understood():
            return {number: self._logs[number].mark for number in wanted}

    def _learn(self, answer: Any) -> list[int]:
        """Take over the marks in an answer, which has those that are not yet known."""
        with self.understood():
            learned = {int(number): facts for number, facts in answer["marks"].items()}
            for number, facts in sorted(learned.items()):
                self._logs[number].learn(*facts)
        return sorted(learned)

    # --- groups --------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, GroupSnapshot]:
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
        answer = self.ask("has_group", name=name)
        with self.understood():
            return bool(answer["has"])

    # --- waiting -------------------------------------------------------------------------------------------

    def watch(self) -> bool:
        """Do nothing: the source watches the logs that it is asked for."""
        return False

    def wait_for_changes(self, timeout_s: float) -> list[int]:
        seconds = max(0.0, min(timeout_s, self._link.timeout_s / 3))
        found = self._learn(self.ask("news", seconds=seconds, partitions=len(self._logs)))
        self._fresh = set(found)
        return found

    def unwatch(self) -> None:
        """Do nothing: the source stops watching when the stream ends."""


class RemoteLog(NotCopyable):
    """A log of the topic at the other end; see `LogSource`."""

    def __init__(self, topic: RemoteTopic, address: int | list[str], identity: Identity, name: str) -> None:
        self._topic = topic
        self.address = address
        self.identity = identity
        self.place = f"{topic.place}/{name}"
        self.credit_bytes = topic.credit_bytes
        # As the source was when it was asked last, for the log of a partition.
        self._mark: Mark | None = None
        self.published_end = 0
        self._segment_at = -1  # the end of the log, if a segment begins there

    @property
    def mark(self) -> Mark:
        """The mark of a partition; `LookupError` if the source has sent none."""
        if self._mark is None:
            raise LookupError(f"no mark of {self.place}")
        return self._mark

    def learn(self, slot: str, end: int, begins: object) -> None:
        """Take over the log's mark, its published end, and the fact that a segment begins at its end."""
        self._mark = mark = as_mark(slot, self.identity.salt)
        self.published_end = max(int(end), mark.flushed_end)
        self._segment_at = mark.flushed_end if begins else -1

    def release_files(self) -> None:
        """Do nothing: no file is open here."""

    def close(self) -> None:
        """Do nothing: no file is open here."""

    def begins(self, end: int) -> bool:
        """True if a segment begins there. False for a log of commits: its next records show it."""
        return self._segment_at == end

    def acknowledge(self, end: int) -> None:
        self._topic.acknowledge(self, end)

    def beside(self, name: str) -> bytes | None:
        answer = self._topic.ask("beside", log=self.address, name=name)
        with self._topic.understood():
            return as_bytes(answer["content"])

    def same(self, ends: Sequence[End], mark: Mark) -> int:
        slot = tell_mark(mark, self.identity.salt)
        answer = self._topic.ask("same", log=self.address, ends=ends, mark=slot)
        with self._topic.understood():
            return range(len(ends) + 1)[int(answer["count"])]

    # --- pieces ------------------------------------------------------------------------------------------

    def first(self) -> SegmentStart:
        self._topic.request("first", log=self.address)
        return self._begun(self._topic.receive(), None)

    def begun(self, base: int) -> SegmentStart:
        self._topic.request("begun", log=self.address, base=base)
        return self._begun(self._topic.receive(), base)

    def piece(self, at: End, base: int, limit: int) -> SegmentStart | Block:
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
        """The segment in a frame, which must have this base offset, if it is known."""
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
                raise ValueError("a file of producers that the header does not have, or another one")
            return SegmentStart(header, more, clock)

    def _check_joins(self, at: End, header: SegmentHeader) -> None:
        if at.crc not in (None, header.previous_crc) and not self._declared(at.end - 1):
            with self._topic.understood():
                raise ValueError(f"a segment that follows a batch with CRC {header.previous_crc:08x}")

    def _block(self, frame: Frame, at: End, limit: int) -> Block:
        """The batches, or the bytes of a gap, in a frame. They follow `at`."""
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
        """Check all of these batches, and return their end."""
        end, (_, partition, salt) = at, self.identity
        try:
            first = parse_header(content, 0, salt=salt, offset=at.end) if len(content) >= BATCH_HEADER_BYTES else None
            if first is not None and first.length <= SMALL_BATCH_BYTES:
                bundle = Bundle.of(content, at.end, Source("the stream", 0), partition, salt)
                if bundle is not None and at.crc in (None, bundle.facts.previous_crc):
                    end = bundle.chain_end
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
        """True if the source has declared a gap around this offset."""
        content = self.beside(GAPS)
        with self._topic.understood():
            gaps = () if content is None else parse_gaps(content, "the stream", self.identity)
        return any(gap.start <= offset < gap.end for gap in gaps)
