"""What comes over a mirror's stream and is not what was asked for: it is refused, and nothing of it is written."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import forged
from mirrored import segments
from streamed import served

from conftest import fill
from loglib import CorruptLogError, LogError, LogMovedError, Topic, UnsupportedFormatError, testing
from loglib.append.transfer import FrameHeader
from loglib.copies import Mirror, MirrorServer
from loglib.copies.frames import ACK, ANSWER, BATCHES, BEAT, ERROR, GAP, REQUEST, SEGMENT, STOP, Frame, Link
from loglib.copies.wire_json import tell_mark
from loglib.errors import BrokenStreamError
from loglib.format.watermark import Mark
from loglib.log.gaps import Gap, write_gaps
from loglib.segment import HEADER_BYTES, Identity, SegmentHeader
from loglib.system.directory import Directory
from loglib.system.files import REAL

OpenTopic = Callable[..., Topic]
Lie = Callable[[Any], Any]
ROLLED = object()


class Lying(MirrorServer):
    """Changes an answer or a frame before it is sent."""

    lies: dict[str | int, Lie]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        send = self._link.send
        self._link.send = lambda frame: send(self.lies.get(frame.kind, lambda true: true)(frame))  # type: ignore[method-assign]

    def _answer(self, what: str, request: Any) -> object:
        return self.lies.get(what, lambda true: true)(super()._answer(what, request))


@pytest.fixture
def source(open_topic: OpenTopic) -> Topic:
    """Two partitions with a segment that follows another, and a group."""
    topic = open_topic(partitions=2)
    fill(topic, 6)
    topic.partition(0).roll()
    fill(topic, 4)
    with topic.group("etl") as group:
        group.poll(max_records=2, timeout=10)
        group.commit()
    return topic


def copy_from(topic: Topic, to: Path, lies: dict[str | int, Lie]) -> None:
    kind = type("Lying", (Lying,), {"lies": lies})
    files = testing.UnsyncedFiles()
    with served(topic.path, kind=kind) as serving, Mirror.over(serving.stream, to, files=files) as made:
        made.copy()


def slot(topic: Topic, number: int = 0, **facts: int) -> str:
    end = topic.partition(number).high_watermark
    return tell_mark(Mark.at_rest(1, 0, end, 0)._replace(**facts), Identity.of(topic.log_id, number).salt)


def described(content: bytes) -> dict[str, str]:
    return {"content": base64.b64encode(content).decode()}


def of_segment(change: Callable[[SegmentHeader], SegmentHeader]) -> Lie:
    """A header of a segment that follows another, changed and sealed again."""

    def lie(frame: Frame) -> Frame:
        if not frame.base_offset:
            return frame
        header = change(SegmentHeader.decode(frame.content[:HEADER_BYTES], "x"))
        return frame._replace(content=header.encode() + frame.content[HEADER_BYTES:])

    return lie


OTHER_LOG = b'{"format": 3, "log_id": "00000000-0000-0000-0000-000000000001", "partitions": 1}'
LIES: dict[str, dict[str | int, Lie]] = {
    "no log id": {"hello": lambda true: {**true, "log_id": "00"}},
    "no place": {"hello": lambda true: {"log_id": true["log_id"]}},
    "no object": {"hello": lambda true: 5},
    "no JSON": {ANSWER: lambda frame: frame._replace(content=b"{")},
    "deep JSON": {ANSWER: lambda frame: frame._replace(content=b"[" * 100_000)},
    "no answer": {ANSWER: lambda frame: frame._replace(kind=GAP)},
    "no description": {"description": lambda true: described(b"{}")},
    "no number of partitions": {"description": lambda true: described(OTHER_LOG.replace(b"partitions", b"more"))},
    "no base64": {"description": lambda true: {"content": "?"}},
    "mark of no partition": {"marks": lambda true: {"marks": {"7": true["marks"][0]}}},
    "mark of another partition": {"marks": lambda true: {"marks": {"0": true["marks"][1], "1": true["marks"][1]}}},
    "no mark": {"marks": lambda true: {"marks": {}}},
    "mark with an end before its beginning": {
        "marks": lambda true: {"marks": {"0": (slot_before_its_beginning, 0), "1": true["marks"][1]}},
    },
    "path as a group": {"groups": lambda true: {"groups": {"../../x": {"marks": {}, "pointer": "eA=="}}}},
    "hidden group": {"groups": lambda true: {"groups": {".x": {"marks": {}, "pointer": "eA=="}}}},
    "path as a log of commits": {
        "groups": lambda true: {"groups": {"x": {"marks": {"../../../x": ""}, "pointer": None}}},
    },
    "more of the same than asked": {"same": lambda true: {"count": 2}},
    "less than none of the same": {"same": lambda true: {"count": -3}},
    "batches of another partition": {BATCHES: lambda frame: frame._replace(partition=frame.partition ^ 1)},
    "batches of another log": {BATCHES: lambda frame: frame._replace(salt=7)},
    "batches at another place": {BATCHES: lambda frame: frame._replace(base_offset=frame.base_offset + 8)},
    "batches that were changed": {
        BATCHES: lambda frame: frame._replace(content=frame.content[:-1] + bytes([frame.content[-1] ^ 1])),
    },
    "batches that are cut": {BATCHES: lambda frame: frame._replace(content=frame.content[:-8])},
    "less than a batch": {BATCHES: lambda frame: frame._replace(content=frame.content[:100])},
    "no batch": {BATCHES: lambda frame: frame._replace(content=b"")},
    "batches twice": {BATCHES: lambda frame: frame._replace(content=frame.content * 2)},
    "more than was asked for": {BATCHES: lambda frame: frame._replace(content=frame.content + bytes(1 << 20))},
    "undeclared gap": {BATCHES: lambda frame: frame._replace(kind=GAP, content=frame.content[:64])},
    "batches as a segment": {BATCHES: lambda frame: frame._replace(kind=SEGMENT, content=bytes(5000))},
    "batches for the end of a READ": {
        ANSWER: lambda frame: frame._replace(kind=BATCHES) if frame.content == b"{}" else frame,
    },
    "segment of another place": {SEGMENT: of_segment(lambda header: header._replace(base_offset=8))},
    "segment of another log": {SEGMENT: of_segment(lambda header: header._replace(log_id=bytes(16)))},
    "segment that does not follow": {SEGMENT: of_segment(lambda header: header._replace(previous_crc=1))},
    "segment without its producers": {SEGMENT: of_segment(lambda header: header._replace(more_producers=1))},
    "segment with other producers": {SEGMENT: of_segment(lambda header: header._replace(more_producers_crc=1))},
    "segment that was changed": {SEGMENT: lambda frame: frame._replace(content=b"x" + frame.content[1:])},
    "segment with more behind it": {SEGMENT: lambda frame: frame._replace(content=frame.content + b"x")},
    "error that is none": {"description": lambda true: 1 / 0, ERROR: lambda frame: frame._replace(content=b"5")},
    "frame of the copy": {ANSWER: lambda frame: frame._replace(kind=BEAT, content=b"")},
}
slot_before_its_beginning = ""


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.usefixtures("no_garbage")
def test_lie_of_the_source_breaks_the_stream(
    source: Topic, to: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "slot_before_its_beginning", slot(source, log_start_offset=1 << 40))
    with pytest.raises(BrokenStreamError):
        copy_from(source, to, LIES[lie])
    theirs = segments(source.path)
    for name, content in segments(to).items():
        assert theirs[name].startswith(content), name
    assert {each.name for each in to.parent.rglob("x")} == set()
    copy_from(source, to, {})
    assert segments(to) == segments(source.path)


def test_store_of_transactions_that_is_no_relative_path(source: Topic, to: Path) -> None:
    for facts in ({"store": "/etc"}, {"store": 5}, {"store": "a\0b"}, {"store": "../x", "id": "00"}):
        answer = {"id": "00" * 16, **facts}
        with served(source.path) as serving:
            serving.server._answers["home"] = partial(lambda answer, _: answer, answer)
            with Mirror.over(serving.stream, to) as made, pytest.raises(BrokenStreamError, match="a store"):
                made._origin.store_pointer(str(to))


def test_another_topic_in_the_place_of_the_source_and_fewer_partitions(source: Topic, to: Path) -> None:
    with pytest.raises(LogMovedError):
        copy_from(source, to, {"description": lambda true: described(OTHER_LOG)})
    seen: list[object] = []

    def fewer(true: Any) -> Any:
        seen.append(true)
        facts = json.loads(base64.b64decode(true["content"]))
        del facts["crc"]
        return true if len(seen) == 1 else described(json.dumps({**facts, "partitions": 1}).encode())

    with pytest.raises(BrokenStreamError, match="1 partitions, where 2 were"):
        copy_from(source, to, {"description": fewer})


def test_log_start_within_a_segment_is_refused(source: Topic, to: Path) -> None:
    copy_from(source, to, {})
    within = slot(source, log_start_offset=8)

    def lie(true: Any) -> Any:
        return {"marks": {**true["marks"], 0: (within, 0, False)}}

    with pytest.raises(LogError, match="a log that begins at offset 8"):
        copy_from(source, to, {"marks": lie})


def test_batch_of_a_newer_loglib_is_named(source: Topic, to: Path) -> None:
    def newer(frame: Frame) -> Frame:
        first = int.from_bytes(frame.content[12:16], "little")
        identity = Identity.of(source.log_id, frame.partition)
        return frame._replace(content=forged(frame.content[:first], identity=identity, version=99))

    with pytest.raises(UnsupportedFormatError, match="the stream: batch version 99"):
        copy_from(source, to, {BATCHES: newer})


@pytest.mark.parametrize("declared", [True, False])
def test_segment_behind_a_declared_gap_need_not_follow(source: Topic, to: Path, declared: bool) -> None:
    base = source.partition(0).segments[-1].base_offset
    lie: dict[str | int, Lie] = {SEGMENT: of_segment(lambda header: header._replace(previous_crc=1))}
    if declared:
        with Directory.open(REAL, f"{source.path}/0000") as directory:
            identity = Identity.of(source.log_id, 0)
            write_gaps(directory, identity, [Gap(8, base, "lost", 1)], 0o600)
    with pytest.raises(CorruptLogError if declared else BrokenStreamError, match="follows (a batch|one) with CRC"):
        copy_from(source, to, lie)  # if the segment is taken, its first batch does not follow


@pytest.mark.parametrize("dropped", [False, True])
def test_empty_segment_that_does_not_follow_is_not_taken_before_all_is_dropped(
    source: Topic, to: Path, dropped: bool
) -> None:
    """The header of the source's last segment was made anew by a repair."""
    end = source.partition(0).high_watermark
    copy_from(source, to, {})
    source.partition(0).roll()
    if dropped:
        source.partition(0).delete_before(end)
    copy_from(source, to, {SEGMENT: of_segment(lambda header: header._replace(previous_crc=1))})
    names = sorted(each.name for each in Path(source.path, "0000").glob("*.log"))[:-1]
    assert sorted(each.name for each in (to / "0000").glob("*.log")) == ([f"{end:020d}.log"] if dropped else names)


def test_errors_of_the_source_arrive(source: Topic, to: Path) -> None:
    def fails(error: Exception) -> Lie:
        def lie(true: Any) -> Any:
            raise error

        return lie

    with pytest.raises(FileNotFoundError, match="at the source"):
        copy_from(source, to, {"groups": fails(FileNotFoundError(2, "no", "x"))})
    with pytest.raises(LogError, match="at the source: .*Input/output"):
        copy_from(source, to, {"groups": fails(OSError(5, "Input/output error"))})
    with pytest.raises(BrokenStreamError, match="an answer came that is none"):
        copy_from(source, to, {
            "groups": fails(LogMovedError("x", "y")), ERROR: lambda frame: frame._replace(
                content=json.dumps({"error": "LogMovedError", "facts": ["x", 5]}).encode()),
        })  # fmt: skip


# --- raw frames -----------------------------------------------------------------------------------------------------


def raw(kind: int, size: int) -> bytes:
    return FrameHeader(kind, 0, 0, 0, size).encode()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: none of ours\r\n", BrokenStreamError),
        (raw(ANSWER, 1 << 40), BrokenStreamError),
        (raw(REQUEST, 5), BrokenStreamError),
        (raw(ANSWER, 3) + b"abc", BrokenStreamError),
        (raw(ANSWER, 8) + b"12345678", BrokenStreamError),
        (raw(ANSWER, 8) + b"1234", BrokenStreamError),
        (raw(99, 0), UnsupportedFormatError),
        (b"", BrokenStreamError),
    ],
)
def test_bytes_that_are_no_frame(to: Path, sent: bytes, error: type[LogError]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with closing(Link(ours, timeout_s=20, doing="testing", at_source=False)) as link:
            with pytest.raises(error):
                link.receive()
            with pytest.raises(error):  # and from then on
                link.receive()
            assert link.failed


def test_send_that_fails_breaks_the_link() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, closing(Link(ours, timeout_s=20, doing="testing", at_source=False)) as link:
        with pytest.raises(BrokenStreamError, match="while testing"):
            link.send(Frame(BEAT))
        with pytest.raises(BrokenStreamError, match="while testing"):
            link.waits()


class Copy:
    """The copy's end of a stream, by hand."""

    def __init__(self, stream: socket.socket) -> None:
        self.link = Link(stream, timeout_s=20, doing="testing", at_source=False)

    def ask(self, what: object, **facts: object) -> Any:
        self.link.send_facts(REQUEST, {"what": what, **facts})
        frame = self.link.receive()
        assert frame is not None
        return (frame.kind, frame.facts()) if frame.kind in (ANSWER, ERROR) else (frame.kind, frame)


READ = {"at": [0, 0, 0], "base": 0, "limit": 1 << 40}


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("nothing", {}),
        (5, {}),
        ("marks", {"numbers": [7]}),
        ("marks", {}),
        ("first", {"log": -1}),
        ("first", {"log": 2}),
        ("first", {"log": ["../etl", "0" * 16]}),
        ("first", {"log": ["etl", "../../0000"]}),
        ("first", {"log": None}),
        ("beside", {"log": 0, "name": "../../../../etc/passwd"}),
        ("has_group", {"name": "../.."}),
        ("same", {"log": 0, "mark": "00", "ends": []}),
        ("read", {**READ, "log": 0, "at": [0, 0]}),
        ("read", {**READ, "log": 0, "at": [0, 0, "x"]}),
        ("news", {"seconds": "soon", "partitions": 2}),
    ],
)
def test_request_that_is_none_ends_the_service(source: Topic, what: object, facts: dict[str, object]) -> None:
    with served(source.path) as serving:
        copy = Copy(serving.stream)
        assert copy.ask("hello", protocol=1, credit=1 << 20)[0] == ANSWER
        copy.ask("description")
        with pytest.raises(BrokenStreamError):
            copy.ask(what, **facts)
        serving.join()
        assert isinstance(serving.error, BrokenStreamError) and "a request came that is none" in str(serving.error)


def test_copy_of_a_newer_loglib_is_told_so(source: Topic) -> None:
    with served(source.path) as serving:
        copy = Copy(serving.stream)
        kind, facts = copy.ask("hello", protocol=2, credit=1)
        assert kind == ERROR and "protocol 2 is newer than this loglib knows" in facts["words"]
        with pytest.raises(BrokenStreamError):
            copy.ask("description")  # no hello has been said
    assert "before hello" in str(serving.error)


def test_credit_is_what_is_sent_ahead_of_acknowledgements(open_topic: OpenTopic) -> None:
    topic = open_topic(partitions=1)
    for number in range(8):
        topic.append(bytes([number]) * (700 << 10), sync=True)  # a batch each
    identity = Identity.of(topic.log_id, 0)
    with served(topic.path) as serving:
        copy = Copy(serving.stream)
        copy.ask("hello", protocol=1, credit=1 << 20)
        copy.ask("description")
        kind, frame = copy.ask("read", log=0, **READ)
        assert kind == BATCHES
        received, acknowledged = len(frame.content), 0
        for _ in range(2):
            while received < acknowledged + (1 << 20):
                received += len(next_of(copy, BATCHES).content)
            assert not copy.link.waits(0.1)  # all of the credit is in flight
            copy.link.send(Frame(ACK, 5, 0, 1))  # of no partition
            assert serving.server.lag().bytes >= topic.partition(0).high_watermark - received
            copy.link.send(Frame(ACK, 0, identity.salt, acknowledged := received))
        copy.link.send(Frame(STOP))
        while next_of(copy).kind == BATCHES:
            pass
        copy.link.send(Frame(STOP))  # it has crossed the end
        copy.link.send_facts(REQUEST, {"what": "read", "log": 0, **READ})
        copy.link.send_facts(REQUEST, {"what": "groups"})
        with pytest.raises(BrokenStreamError):
            while True:
                next_of(copy, BATCHES)
        serving.join()
    assert "before the last one was answered" in str(serving.error)


def test_what_is_not_flushed_is_not_sent(open_topic: OpenTopic) -> None:
    topic = open_topic(partitions=1)
    topic.append(b"flushed", sync=True)
    end = topic.partition(0).high_watermark
    topic.append_many([b"x" * 1000] * 3000)  # more than a batch, so it is written
    assert Path(topic.path, "0000", f"{0:020d}.log").stat().st_size > HEADER_BYTES + end
    with served(topic.path) as serving:
        copy = Copy(serving.stream)
        copy.ask("hello", protocol=1, credit=1 << 30)
        copy.ask("description")
        kind, frame = copy.ask("read", log=0, **READ)
        assert (kind, len(frame.content), next_of(copy, ANSWER).facts()) == (BATCHES, end, {})


def next_of(copy: Copy, kind: int | None = None) -> Frame:
    """The next frame, which must be of this kind."""
    frame = copy.link.receive()
    assert frame is not None and kind in (None, frame.kind)
    return frame


def test_copy_that_never_acknowledges_is_given_up(open_topic: OpenTopic) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 1)
    topic.partition(0).roll()
    fill(topic, 1)
    with served(topic.path, timeout=0.2) as serving:
        copy = Copy(serving.stream)
        copy.ask("hello", protocol=1, credit=1)
        copy.ask("description")
        copy.ask("read", log=0, **READ)
        serving.join()
    assert "silent for 0.2 seconds" in str(serving.error)


def test_sign_of_life_while_the_source_waits_for_news(source: Topic) -> None:
    with served(source.path) as serving:
        copy = Copy(serving.stream)
        copy.ask("hello", protocol=1, credit=1)
        copy.ask("description")
        copy.ask("news", seconds=0, partitions=2)
        copy.link.send_facts(REQUEST, {"what": "news", "seconds": 20, "partitions": 2})
        copy.link.send(Frame(BEAT))
        source.append(b"x", partition=1, sync=True)
        assert list(next_of(copy, ANSWER).facts()["marks"]) == ["1"]


def test_mirror_that_is_closed_in_mid_copy_ends_at_once(source: Topic, to: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        errors: list[BaseException] = []

        def answer() -> None:
            with suppress(LogError), MirrorServer(source.path, theirs) as server:
                server._answers["groups"] = lambda request: made.close()  # it never answers
                server.serve()

        thread = threading.Thread(target=answer)
        thread.start()
        made = Mirror.over(ours, to)
        try:
            made.copy()
        except LogError as error:
            errors.append(error)
        assert "it was closed meanwhile" in str(errors)
        ours.close()
        thread.join(30)
        assert not thread.is_alive()


def test_ssl_socket_is_refused(source: Topic) -> None:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ours, theirs = socket.socketpair()
    secure = context.wrap_socket(ours, server_hostname="x", do_handshake_on_connect=False)
    with theirs, secure, pytest.raises(TypeError, match="let ssh"):
        MirrorServer(source.path, secure)
