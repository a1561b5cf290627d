"""Mirror server: the source's side of a mirror on another host. It answers the copy's requests over a stream.

Invariant: it only reads the topic, takes no lock, and keeps nothing that a later stream would need. Bytes of a log are
checked before they are sent. At most the copy's credit and one more piece are sent ahead of acknowledgements.

Threads: `lag` and `close` from any thread; the rest from one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..config.arguments import check_names, topic_path
from ..errors import LogClosedError, LogError, UnsupportedFormatError
from ..format.watermark import Mark
from ..groups.offsets import offsets_identity
from ..log import store_pointer
from ..log.ages import NAME as CLOCK
from ..log.gaps import NAME as GAPS
from ..segment import Identity
from ..system.clock import monotonic
from ..system.files import REAL, Files
from ..system.not_copyable import NotCopyable
from .frames import ACK, ANSWER, BATCHES, ERROR, GAP, PROTOCOL, REQUEST, SEGMENT, STOP, Frame, Link
from .local_source import LocalTopicSource, SourceLog
from .mirrors import MirrorLag
from .remote_source import BESIDE, LOG_OF_COMMITS, TIMEOUT_S
from .sources import SegmentStart
from .wire_json import as_end, as_mark, tell_bytes, tell_error, tell_mark

_MANY = 64  # partitions: with more, files are closed after each look
_NAP_S = 0.02  # where the system does not report changes
# Errors of a request that cannot be read.
_NO_REQUEST = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


def serve_mirror(topic: str | os.PathLike[str], stream: Any, *, timeout: float = TIMEOUT_S) -> None:
    """Let a mirror at the other end of the stream copy the topic in this directory, until it leaves.

    At the other end `loglib.copies.receive_mirror` or `Mirror.over` runs. See `MirrorServer` for the rest.
    """
    with MirrorServer(topic, stream, timeout=timeout) as server:
        server.serve()


class _Left(Exception):
    """The stream has ended between two frames: the mirror was closed, or has died."""


class MirrorServer(NotCopyable):
    """Serves one mirror of a topic on another host.

    `stream` is a connected socket, or two files or descriptors: one to read and one to write. The caller closes it,
    and must not use it meanwhile. The topic may be written meanwhile, by any process. The other end may read all of the
    topic: let ssh or a network that you trust carry the stream.

    A mirror that neither sends nor takes a byte for `timeout` seconds is given up.

    Raises `FileNotFoundError` if there is no topic, and the errors of `serve`.
    """

    def __init__(
        self, topic: str | os.PathLike[str], stream: Any, *, timeout: float = TIMEOUT_S, files: Files = REAL
    ) -> None:
        self._topic = LocalTopicSource(files, topic_path(topic))
        self._files = files
        self.path = self._topic.place
        self._link = Link(stream, timeout_s=timeout, doing=f"serving a mirror of {self.path}", at_source=True)
        self._logs: list[SourceLog] = []
        self._told: dict[int, tuple[Mark, int, bool]] = {}  # the facts of each partition that the copy knows
        self._durable: dict[int, int] = {}  # the durable end of each partition in the copy
        self._lagging: set[int] = set()  # partitions that are not durable up to the known mark
        self._caught_up_at = monotonic()
        self._credit_bytes = 0
        self._acknowledged = 0  # of the log that is being read
        self._answers: dict[str, Callable[[Any], object]] = {
            "description": self._description, "groups": self._groups, "has_group": self._has_group,
            "home": self._home, "marks": lambda request: {"marks": self._news_of(request["numbers"])},
            "news": self._wait_for_changes,
        }  # fmt: skip
        self._answers_of_log: dict[str, Callable[[SourceLog, Any], object]] = {
            "begun": lambda log, request: _segment(log, log.begun(int(request["base"]))), "beside": _beside,
            "first": lambda log, _: _segment(log, log.first()), "read": self._read, "same": _same,
        }  # fmt: skip

    def __enter__(self) -> MirrorServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._release()

    def __repr__(self) -> str:
        return f"<MirrorServer of {self.path!r}>"

    def close(self) -> None:
        """End `serve`, which runs in another thread."""
        self._link.stream.wake()

    def _release(self) -> None:
        with ExitStack() as closing:
            closing.callback(self._link.close)
            closing.callback(self._topic.close)
            for log in self._logs:
                closing.callback(log.close)

    def lag(self) -> MirrorLag:
        """The lag of the mirror: bytes that are not durable there, and the time since it had all."""
        size = 0
        for number, log in enumerate(list(self._logs)):
            mark = log.log.published()
            size += max(0, mark.flushed_end - self._durable.get(number, mark.log_start_offset))
        return MirrorLag(size, monotonic() - self._caught_up_at if size else 0.0)

    # --- requests ------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer the mirror until it leaves, or `close` is called.

        Raises `BrokenStreamError` if the stream ends within a frame, the mirror falls silent, or a request cannot be
        read, and `UnsupportedFormatError` if the mirror is of a newer loglib.
        """
        try:
            while True:
                frame = self._next()
                if frame.kind == REQUEST:
                    self._serve(frame)
                else:
                    self._take(frame)
        except (_Left, LogClosedError):  # the latter by `close`
            pass

    def _next(self) -> Frame:
        frame = self._link.receive(may_end=True)
        if frame is None:
            raise _Left
        return frame

    def _serve(self, frame: Frame) -> None:
        try:
            request = frame.facts()
            answer = self._answer(request["what"], request)
        except (LogError, OSError) as error:
            if self._link.failed or isinstance(error, LogClosedError):
                raise
            self._link.send_facts(ERROR, tell_error(error))
        except _NO_REQUEST as error:
            raise self._link.broken(f"a request came that is none: {error!r:.200}") from error
        else:
            if isinstance(answer, Frame):
                self._link.send(answer)
            else:
                self._link.send_facts(ANSWER, answer)

    def _answer(self, what: str, request: Any) -> object:
        if what == "hello":
            return self._hello(request)
        if not self._credit_bytes:
            raise ValueError(f"{what!r:.100} before hello")
        if what in self._answers:
            return self._answers[what](request)
        answer = self._answers_of_log[what]
        with self._log(request["log"]) as log:
            return answer(log, request)

    def _hello(self, request: Any) -> object:
        if request["protocol"] > PROTOCOL:
            raise UnsupportedFormatError("the stream", "protocol", int(request["protocol"]), PROTOCOL)
        self._credit_bytes = max(1, int(request["credit"]))
        return {"protocol": PROTOCOL, "log_id": self._topic.log_id.hex(), "of": f"{os.uname().nodename}:{self.path}"}

    def _take(self, frame: Frame) -> None:
        """Note an acknowledgement. A sign of life, or a STOP that has crossed the end of its READ, needs no answer."""
        if frame.kind != ACK:
            return
        number, end = frame.partition, frame.base_offset
        if number < len(self._logs) and frame.salt == self._logs[number].log.identity.salt:
            self._durable[number] = end
            self._compare(number)

    def _compare(self, number: int) -> None:
        """Note if the copy has a partition up to the mark that it knows."""
        if number in self._told and self._durable.get(number, -1) < self._told[number][0].flushed_end:
            self._lagging.add(number)
        else:
            self._lagging.discard(number)
        if not self._lagging:
            self._caught_up_at = monotonic()

    # --- the topic -----------------------------------------------------------------------------------------

    def _description(self, _request: Any) -> object:
        content, config = self._topic.described()
        for number in range(len(self._logs), config.partitions):
            self._logs.append(self._topic.log(number))
        return {"content": tell_bytes(content)}

    def _home(self, _request: Any) -> object:
        found = store_pointer.read_pointer(self._files, self.path)
        return found and {"store": os.path.relpath(os.path.normpath(found.path), self.path), "id": found.id.hex()}

    def _groups(self, _request: Any) -> object:
        found = {}
        for group, noted in self._topic.groups().items():
            salts = {name: offsets_identity(self._topic.log_id, group, name).salt for name in noted.marks}
            marks = {name: tell_mark(mark, salts[name]) for name, mark in noted.marks.items()}
            found[group] = {"marks": marks, "pointer": tell_bytes(noted.pointer)}
        return {"groups": found}

    def _has_group(self, request: Any) -> object:
        check_names(request["name"])
        return {"has": self._topic.has_group(request["name"])}

    def _wait_for_changes(self, request: Any) -> object:
        """Wait for marks that the copy does not know, and return them."""
        until = monotonic() + min(float(request["seconds"]), self._link.timeout_s)
        while True:
            numbers = range(len(self._logs)) if self._topic.watch() else self._topic.changed()
            news = self._news_of([each for each in numbers if each < request["partitions"]])
            left = until - monotonic()
            if news or left <= 0:
                return {"marks": news}
            if self._link.waits(left if self._topic.reports else min(left, _NAP_S), self._topic.descriptors()):
                self._take(self._receive())

    def _news_of(self, numbers: Iterable[int]) -> dict[int, tuple[str, int, bool]]:
        """Those marks of these partitions, at one moment, that the copy does not know."""
        news = {}
        for number, mark in self._topic.marks(numbers).items():
            log = self._logs[number]
            facts = mark, log.published_end, log.begins(mark.flushed_end)
            if self._told.get(number) != facts:
                self._told[number] = facts
                news[number] = tell_mark(mark, log.log.identity.salt), *facts[1:]
                self._compare(number)
            if len(self._logs) > _MANY:
                log.release_files()
        if not self._lagging:
            self._caught_up_at = monotonic()
        return news

    # --- a log ---------------------------------------------------------------------------------------------

    @contextmanager
    def _log(self, address: Any) -> Iterator[SourceLog]:
        """The log of a partition, or one of a group's logs of commits."""
        if isinstance(address, int):
            if address < 0:
                raise ValueError(f"partition {address}")
            log = self._logs[address]
            yield log
            if len(self._logs) > _MANY:
                log.release_files()
            return
        group, name = address
        check_names(group)
        if not LOG_OF_COMMITS.fullmatch(name):
            raise ValueError(f"a log of commits {name!r:.100}")
        log = self._topic.log_of_commits(group, name)
        try:
            yield log
        finally:
            log.close()

    def _read(self, log: SourceLog, request: Any) -> object:
        """Send the log after an end, piece by piece. Then comes an empty answer."""
        at, base = as_end(request["at"]), int(request["base"])
        limit = min(int(request["limit"]), log.published_end)
        self._acknowledged = at.end
        while at.end < limit and self._may_send(log.log.identity, at.end):
            piece = log.piece(at, base, limit)
            if isinstance(piece, SegmentStart):
                self._link.send(_segment(log, piece))
                at, base = piece.header.chain_end, at.end
            else:
                _, partition, salt = log.log.identity
                kind = GAP if piece.end.crc is None else BATCHES
                self._link.send(Frame(kind, partition, salt, at.end, piece.content))
                at = piece.end
        return {}

    def _may_send(self, identity: Identity, end: int) -> bool:
        """Read the copy's frames, and wait while its credit is used up. False if it has sent a STOP."""
        while True:
            spent = end - self._acknowledged >= self._credit_bytes
            if not self._link.waits(self._link.timeout_s if spent else 0.0):
                if spent:
                    raise self._link.broken(f"the other end was silent for {self._link.timeout_s:g} seconds")
                return True
            frame = self._receive()
            if frame.kind == STOP:
                return False
            self._take(frame)
            if frame.kind == ACK and frame.salt == identity.salt:
                self._acknowledged = max(self._acknowledged, frame.base_offset)

    def _receive(self) -> Frame:
        """The next frame. It must not be a request, because one is being answered."""
        frame = self._next()
        if frame.kind == REQUEST:
            raise self._link.broken("a request came before the last one was answered")
        return frame


def _segment(log: SourceLog, begun: SegmentStart) -> Frame:
    """The frame of a segment's beginning."""
    _, partition, salt = log.log.identity
    header, *files = begun
    sizes = BESIDE.pack(*(-1 if each is None else len(each) for each in files))
    content = b"".join((header.encode(), sizes, *(each or b"" for each in files)))
    return Frame(SEGMENT, partition, salt, header.base_offset, content)


def _beside(log: SourceLog, request: Any) -> object:
    if request["name"] not in (CLOCK, GAPS):
        raise ValueError(f"a file {request['name']!r:.100}")
    return {"content": tell_bytes(log.beside(request["name"]))}


def _same(log: SourceLog, request: Any) -> object:
    mark = as_mark(request["mark"], log.log.identity.salt)
    return {"count": log.same([as_end(each) for each in request["ends"]], mark)}
