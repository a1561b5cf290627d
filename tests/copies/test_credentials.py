"""credentials.py: nobody reads what he was not given, and no copy believes a source that it does not know."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import credentials as files
import pytest
from streamed import Wire

from conftest import fill
from loglib import LogError, Topic
from loglib.append.transfer import FrameHeader
from loglib.copies import (
    CopyCredentials,
    Mirror,
    MirrorServer,
    SourceCredentials,
    credentials,
    receive_mirror,
    serve_mirror,
)
from loglib.copies.frames import ERROR, NONCE, PROOF, REQUEST, SHORT_BYTES, Frame, Link
from loglib.errors import BrokenStreamError, UntrustedPeerError
from loglib.format.header import crc32c
from loglib.system import tls

OpenTopic = Callable[..., Topic]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_SLOW_S", 0.0)


@pytest.fixture
def paths(tmp_path: Path) -> files.Paths:
    return files.made(tmp_path / "keys")


class Peer(threading.Thread):
    """Does something with one end of a stream, and keeps the error."""

    def __init__(self, action: Callable[[socket.socket], object], stream: socket.socket) -> None:
        super().__init__()
        self._action, self._stream = action, stream
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        with self._stream:
            try:
                self._action(self._stream)
            except BaseException as error:
                self.error = error


@contextmanager
def against(action: Callable[[socket.socket], object]) -> Iterator[tuple[socket.socket, Peer]]:
    """A stream at whose other end something is done."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours:
        peer = Peer(action, theirs)
        try:
            yield ours, peer
        finally:
            with suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            peer.join(20)
            assert not peer.is_alive()


def accepting(source: SourceCredentials, **options: Any) -> Callable[[socket.socket], object]:
    return lambda stream: source.accept(stream, **options).close()


def connecting(copy: CopyCredentials, host: str = "localhost") -> Callable[[socket.socket], object]:
    return lambda stream: copy.connect(stream, host).close()


def encrypted(stream: socket.socket, paths: files.Paths) -> tls.TlsStream:
    """A copy that has done the handshake, and nothing else."""
    found = tls.TlsStream(stream, timeout_s=20, doing="testing")
    found.encrypt(tls.client_context(str(paths.certificate)), host="localhost")
    return found


def proving(found: tls.TlsStream) -> Link:
    return Link(found, timeout_s=20, doing="testing", at_source=False, proving=True)


# --- what is right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "::1%lo"])
def test_a_topic_is_mirrored_between_two_ends_that_know_each_other(
    open_topic: OpenTopic, paths: files.Paths, tmp_path: Path, host: str
) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 50)
    topic.append(os.urandom(3 << 20), partition=0, sync=True)

    def serve(stream: socket.socket) -> None:
        serve_mirror(topic.path, paths.source().accept(stream))

    with against(serve) as (stream, peer):
        done = receive_mirror(paths.copy().connect(stream, host), tmp_path / "copy")
        assert done.ends == tuple(each.high_watermark for each in topic.partitions)
    assert peer.error is None
    with Topic.open(tmp_path / "copy", mode="r") as copy:
        assert [each.value for each in copy.read()] == [each.value for each in topic.read()]


def test_both_ends_that_write_at_once_do_not_block_each_other(paths: files.Paths) -> None:
    def serve(stream: socket.socket) -> None:
        with closing(paths.source().accept(stream)) as found:
            found.write(b"s" * (5 << 20))
            assert found.read(900 << 10) == b"c" * (900 << 10)

    with against(serve) as (stream, peer), closing(paths.copy().connect(stream, "localhost")) as found:
        found.write(b"c" * (900 << 10))
        assert found.read(5 << 20) == b"s" * (5 << 20)
        assert found.wait(20) and found.read(1, may_end=True) == b""
    assert peer.error is None


def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[bool, list[Frame]]:
    """The frames that are sent from now on: of the source, and of the copy."""
    found: dict[bool, list[Frame]] = {True: [], False: []}

    class Recording(Link):
        def __init__(self, stream: Any, *, at_source: bool, **options: Any) -> None:
            super().__init__(stream, at_source=at_source, **options)
            self._sent = found[at_source]

        def send(self, frame: Frame) -> None:
            self._sent.append(frame)
            super().send(frame)

    monkeypatch.setattr(credentials, "Link", Recording)
    return found


def test_the_key_is_not_sent_and_no_two_proofs_are_the_same(
    paths: files.Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded(monkeypatch)
    for _ in range(2):
        with against(accepting(paths.source())) as (stream, _):
            paths.copy().connect(stream, "localhost").close()
    sent = [frame.content for frames in found.values() for frame in frames]
    assert len(set(sent)) == len(sent) == 8 and {len(each) for each in sent} == {SHORT_BYTES}
    assert not any(paths.shared_key.read_bytes()[:8] in each for each in sent)
    assert "0123" not in repr(paths.source()) + repr(paths.copy())


# --- who is refused ----------------------------------------------------------------------------------------


def test_a_wrong_key_is_refused_and_counted_and_both_ends_are_told(paths: files.Paths, tmp_path: Path) -> None:
    source = paths.source()
    other = files.secret(tmp_path / "other.key", "f" * 64)
    for count in (1, 2):
        with (
            against(accepting(source)) as (stream, peer),
            pytest.raises(UntrustedPeerError, match="the source has another shared key"),
        ):
            CopyCredentials(shared_key=other, authority=paths.certificate).connect(stream, "localhost")
        assert isinstance(peer.error, UntrustedPeerError) and "it has another shared key" in str(peer.error)
        assert source.refused_keys == count
    assert repr(source) == "<SourceCredentials, 2 keys refused>"


def test_a_key_with_a_line_end_is_the_same_key(paths: files.Paths, tmp_path: Path) -> None:
    source = paths.source()
    with_end = files.secret(tmp_path / "with.key", paths.shared_key.read_text() + "\r\n")
    with against(accepting(source)) as (stream, _):
        CopyCredentials(shared_key=with_end, authority=paths.certificate).connect(stream, "localhost").close()
    assert source.refused_keys == 0


def test_a_source_without_the_key_is_not_believed(paths: files.Paths) -> None:
    """It has a certificate that the copy trusts, and sends back what it gets."""

    def reflect(stream: socket.socket) -> None:
        found = tls.TlsStream(stream, timeout_s=20, doing="testing")
        found.encrypt(tls.server_context(str(paths.certificate), str(paths.private_key)))
        link = Link(found, timeout_s=20, doing="testing", at_source=True, proving=True)
        for _ in range(2):
            frame = link.receive()
            assert frame is not None
            link.send(frame)
        found.read(1, may_end=True)

    with (
        against(reflect) as (stream, peer),
        pytest.raises(UntrustedPeerError, match="did not prove that it has the same shared key"),
    ):
        paths.copy().connect(stream, "localhost")
    assert peer.error is None


def test_a_proof_that_was_recorded_opens_no_other_stream(paths: files.Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sent = paths.source(), recorded(monkeypatch)[False]
    with against(accepting(source)) as (stream, _):
        paths.copy().connect(stream, "localhost").close()
    with against(accepting(source)) as (stream, peer), closing(encrypted(stream, paths)) as found:
        link = proving(found)
        assert [each.kind for each in sent] == [NONCE, PROOF]
        for frame in sent:
            link.send(frame)
        assert [link.receive().kind, link.receive().kind] == [NONCE, ERROR]  # type: ignore[union-attr]
    assert isinstance(peer.error, UntrustedPeerError) and source.refused_keys == 1


def test_a_proof_for_another_certificate_is_refused(paths: files.Paths, tmp_path: Path) -> None:
    """A server in the middle, whose certificate the copy trusts as well, passes on what both ends say."""
    others = files.made(tmp_path / "others", files.MIDDLE)
    source = paths.source()

    def pass_on(stream: socket.socket) -> None:
        with against(accepting(source)) as (further, _), closing(encrypted(further, paths)) as there:
            here = tls.TlsStream(stream, timeout_s=20, doing="testing")
            here.encrypt(tls.server_context(str(others.certificate), str(others.private_key)))
            of_copy = Link(here, timeout_s=20, doing="testing", at_source=True, proving=True)
            of_source = proving(there)
            for one, other in ((of_copy, of_source), (of_source, of_copy)) * 2:
                frame = one.receive()
                assert frame is not None
                other.send(frame)

    both = tmp_path / "both.pem"
    both.write_text(files.GOOD + files.MIDDLE)
    with against(pass_on) as (stream, peer), pytest.raises(UntrustedPeerError, match="another shared key"):
        CopyCredentials(shared_key=paths.shared_key, authority=both).connect(stream, "localhost")
    assert source.refused_keys == 1 and peer.error is None


CERTIFICATES = {
    "expired": (files.EXPIRED, "certificate has expired"),
    "of another host": (files.OTHER, "certificate is not valid for 'localhost'"),
    "of nobody": (files.MIDDLE, "self-signed certificate"),
}


@pytest.mark.parametrize("kind", CERTIFICATES)
def test_a_certificate_that_proves_nothing_is_refused_before_the_key_is_used(
    kind: str, paths: files.Paths, tmp_path: Path
) -> None:
    certificate, words = CERTIFICATES[kind]
    served = files.made(tmp_path / "served", certificate)
    trusted = paths if kind == "of nobody" else served
    with against(accepting(served.source())) as (stream, peer), pytest.raises(UntrustedPeerError, match=words):
        trusted.copy().connect(stream, "localhost")
    assert isinstance(peer.error, UntrustedPeerError) and "refuses the certificate of this one" in str(peer.error)


def test_the_authorities_of_the_system_count_if_none_is_given(
    paths: files.Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(paths.certificate))
    source = paths.source()
    with against(accepting(source)) as (stream, _):
        CopyCredentials(shared_key=paths.shared_key).connect(stream, "localhost").close()
    assert source.refused_keys == 0


# --- who speaks otherwise ----------------------------------------------------------------------------------


def test_a_copy_without_credentials_is_told_what_it_lacks(paths: files.Paths, tmp_path: Path) -> None:
    with (
        against(accepting(paths.source())) as (stream, peer),
        pytest.raises(LogError, match="this source wants TLS and a shared key"),
    ):
        receive_mirror(stream, tmp_path / "copy")
    assert "it came without TLS" in str(peer.error)
    assert not (tmp_path / "copy").exists()


def test_a_copy_with_credentials_takes_nothing_from_a_source_without(
    open_topic: OpenTopic, paths: files.Paths
) -> None:
    topic = open_topic(partitions=1)
    with (
        against(lambda stream: serve_mirror(topic.path, stream)) as (stream, peer),
        pytest.raises(BrokenStreamError, match="left during the TLS handshake: it has no TLS, or"),
    ):
        paths.copy().connect(stream, "localhost")
    assert "a TLS handshake: this end does not encrypt" in str(peer.error)


def test_a_source_that_answers_in_the_clear_is_not_believed(paths: files.Paths) -> None:
    def answer(stream: socket.socket) -> None:
        stream.recv(1 << 16)
        stream.sendall(b"\x89LLT" + bytes(60))

    with against(answer) as (stream, _), pytest.raises(BrokenStreamError, match="what came is no TLS"):
        paths.copy().connect(stream, "localhost")


def test_an_older_tls_is_refused(paths: files.Paths) -> None:
    with against(accepting(paths.source())) as (stream, peer):
        context = ssl.create_default_context(cafile=str(paths.certificate))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(stream, server_hostname="localhost")
    assert "in the TLS handshake: unsupported protocol" in str(peer.error)


@pytest.mark.parametrize("frame", [Frame(REQUEST, content=b"{}"), Frame(NONCE, content=b"short"), Frame(PROOF)])
def test_nothing_is_answered_before_the_proof(frame: Frame, paths: files.Paths) -> None:
    with against(accepting(paths.source())) as (stream, peer), closing(encrypted(stream, paths)) as found:
        proving(found).send(frame)
        assert found.read(1, may_end=True) == b""
    assert isinstance(peer.error, BrokenStreamError)


def test_no_bytes_of_strangers_end_a_source_otherwise_than_with_a_broken_stream(paths: files.Paths) -> None:
    """Frames that are cut, flipped, doubled or made up, before the key was proved, inside TLS and in its place."""
    random, source = Random(25), paths.source()
    for number in range(150):
        kind = random.randrange(12)
        content = random.randbytes(random.choice((0, 31, 32, 33, 200)))
        raw = bytearray(FrameHeader(kind, 0, 0, 0, len(content) + 4).encode() + content)
        raw += crc32c(content).to_bytes(4, "little")
        for _ in range(random.randrange(3)):
            raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        raw = raw[: random.randrange(len(raw) + 1)] * random.choice((1, 1, 2))
        with against(accepting(source)) as (stream, peer), suppress(LogError, OSError):
            if number % 2:
                with closing(encrypted(stream, paths)) as found:
                    found.write(bytes(raw))
                    stream.shutdown(socket.SHUT_WR)
                    found.read(1 << 20)
            else:
                stream.sendall(raw if number % 4 else b"\x16\x03\x01" + raw)
                stream.shutdown(socket.SHUT_WR)
                while stream.recv(1 << 16):
                    pass
        assert isinstance(peer.error, LogError), (number, peer.error)


@pytest.mark.parametrize("is_said", [True, False])
def test_the_end_of_a_stream_is_its_end_with_a_farewell_or_without(is_said: bool, paths: files.Paths) -> None:
    def serve(stream: socket.socket) -> None:
        found = paths.source().accept(stream)
        found.write(b"last")
        if is_said:
            with suppress(ssl.SSLWantReadError):
                found._tls.unwrap()
            found.write(b"")
            found._flush()

    with against(serve) as (stream, peer), closing(paths.copy().connect(stream, "localhost")) as found:
        assert found.read(4) == b"last"
        assert found.wait(20) and found.read(1, may_end=True) == b""
        with pytest.raises(BrokenStreamError, match="it ended"):
            found.read(1)
    assert peer.error is None


def test_bytes_that_were_changed_on_their_way_break_the_stream(paths: files.Paths) -> None:
    def serve(stream: socket.socket) -> None:
        paths.source().accept(stream)
        stream.setblocking(True)
        stream.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))

    with (
        against(serve) as (stream, _),
        closing(paths.copy().connect(stream, "localhost")) as found,
        pytest.raises(BrokenStreamError, match="what came is not what was encrypted: "),
    ):
        found.read(1)


def test_a_plain_copy_that_does_not_hear_the_answer_is_no_other_error(paths: files.Paths) -> None:
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    os.write(write_there, b"\x89LLT" + bytes(32))
    os.close(read_there)
    with pytest.raises(BrokenStreamError, match="it came without TLS"):
        paths.source().accept((read_here, write_here))
    for fd in (write_here, read_here, write_there):
        os.close(fd)


@pytest.mark.parametrize("flips", [False, True])
def test_encrypted_stream_that_breaks_anywhere_is_no_loss(
    open_topic: OpenTopic, paths: files.Paths, tmp_path: Path, flips: bool
) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 200)
    random, to = Random(26), tmp_path / "copy"
    source, copy = paths.source(), paths.copy()

    def mirror(**cut: int) -> Peer:
        wire = Wire(**cut, flips=flips, bit=random.randrange(8))
        near, middle = socket.socketpair()
        with near, against(lambda stream: serve_mirror(topic.path, source.accept(stream))) as (far, peer):
            relay = threading.Thread(target=wire.carry, args=(far, middle))
            relay.start()
            try:
                receive_mirror(copy.connect(near, "localhost"), to)
            finally:
                near.close()
                relay.join(20)
        return peer

    for number in range(12):
        side = "from_source" if number % 2 else "from_copy"
        with suppress(LogError):  # a flip in what comes last harms nobody
            mirror(**{side: random.randrange(4000)})
    assert mirror().error is None
    with Topic.open(to, mode="r") as made:
        assert [each.value for each in made.read()] == [each.value for each in topic.read()]


def test_server_of_an_encrypted_stream_is_closed_from_another_thread(
    open_topic: OpenTopic, paths: files.Paths, tmp_path: Path
) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 5)
    servers: list[MirrorServer] = []

    def serve(stream: socket.socket) -> None:
        with MirrorServer(topic.path, paths.source().accept(stream)) as server:
            servers.append(server)
            server.serve()

    with (
        against(serve) as (stream, peer),
        Mirror.over(paths.copy().connect(stream, "localhost"), tmp_path / "copy") as mirror,
    ):
        mirror.copy()
        servers[0].close()
        peer.join(20)
        with pytest.raises(BrokenStreamError):
            mirror.copy()
    assert peer.error is None


def test_encrypted_peer_that_falls_silent_is_given_up(paths: files.Paths) -> None:
    def serve(stream: socket.socket) -> None:
        found = paths.source().accept(stream)
        found.timeout_s = 0.05
        found.read(1)

    with against(serve) as (stream, peer), closing(paths.copy().connect(stream, "localhost")) as found:
        assert found.wait(20)
    assert "silent for 0.05 seconds" in str(peer.error)


# --- limits ------------------------------------------------------------------------------------------------


def test_a_stranger_has_little_time_however_busy_he_is(paths: files.Paths) -> None:
    with against(accepting(paths.source(), timeout=0.2)) as (stream, peer):
        peer_left = False
        stream.sendall(b"\x16")
        while not peer_left:  # a byte at a time is no silence
            try:
                stream.sendall(b"\x03\x01\x7f\xff"[:1])
                stream.settimeout(0.01)
                peer_left = stream.recv(1) == b""
            except TimeoutError:
                pass
            except OSError:
                peer_left = True
    assert isinstance(peer.error, BrokenStreamError)


def test_a_stranger_who_says_nothing_is_given_up(paths: files.Paths) -> None:
    with against(accepting(paths.source(), timeout=0.05)) as (stream, peer):
        assert stream.recv(1) == b""
    assert "not known after 0.05 seconds" in str(peer.error)
    with against(accepting(paths.source(), timeout=0.2)) as (stream, peer), closing(encrypted(stream, paths)) as found:
        assert found.read(1, may_end=True) == b""
    assert "not known after 0.2 seconds" in str(peer.error)


def test_a_stranger_sends_no_more_than_a_handshake_needs(
    paths: files.Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_STRANGER_BYTES", 5000)
    with against(accepting(paths.source())) as (stream, peer), suppress(OSError):
        stream.sendall(b"\x16\x03\x01\x40\x00\x01\x00\xff\xf0" + bytes(16000))  # of a hello without an end
        stream.recv(1)
    assert "sent more than it may before it is known" in str(peer.error)


# --- files -------------------------------------------------------------------------------------------------


def test_a_secret_that_others_may_read_is_refused(paths: files.Paths, tmp_path: Path) -> None:
    for path in (paths.shared_key, paths.private_key):
        for mode in (0o640, 0o604, 0o666):
            path.chmod(mode)
            with pytest.raises(ValueError, match=f"{path} has a secret, and others may use it .*chmod 600"):
                paths.source()
        path.chmod(0o600)
    link = tmp_path / "link.key"  # as secrets are mounted
    link.symlink_to(paths.shared_key)
    paths._replace(shared_key=link).source()
    paths._replace(shared_key=link).copy()


OWNERS = [
    (1000, 1000, 0o600, True),
    (0, 1000, 0o640, True),  # as postgres has it: root lets a group read it
    (0, 1000, 0o644, False),
    (0, 0, 0o640, False),
    (1001, 1000, 0o600, False),
    (1001, 0, 0o600, True),
]


@pytest.mark.parametrize(("owner", "user", "mode", "is_right"), OWNERS)
def test_who_may_own_a_secret(
    owner: int, user: int, mode: int, is_right: bool, paths: files.Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = os.stat_result((0o100000 | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    content = paths.shared_key.read_bytes()
    monkeypatch.setattr(credentials, "_content", lambda path, most: (content, facts))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if is_right:
        assert credentials._shared_key("k") == content
    else:
        with pytest.raises(ValueError, match="k has a secret"):
            credentials._shared_key("k")


def test_files_that_are_not_what_they_should_be_are_named(paths: files.Paths, tmp_path: Path) -> None:
    def refused(words: str, **changed: Path) -> None:
        with pytest.raises(ValueError, match=words):
            paths._replace(**changed).source()

    empty = files.secret(tmp_path / "empty", "")
    refused("empty: a shared key has at least 32 characters, and this one 0", shared_key=empty)
    refused("at least 32 characters, and this one 3", shared_key=files.secret(tmp_path / "short", "abc\n" + " " * 99))
    refused("5000 bytes, and not at most 4096", shared_key=files.secret(tmp_path / "long", "x" * 5000))
    refused("something else, and not a regular file", shared_key=tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    refused("pipe: .*regular file", shared_key=tmp_path / "pipe")
    refused("empty has no certificate in PEM", certificate=empty)
    cut = files.secret(tmp_path / "cut", files.GOOD[:200])
    refused("cut has no certificate in PEM", certificate=cut)
    odd = files.secret(tmp_path / "odd", files.GOOD.replace("MII", "?II"))
    refused("odd", certificate=odd)
    refused("no certificate with its private key", private_key=empty)
    refused("key values mismatch", private_key=files.secret(tmp_path / "key2", files.KEY2))
    refused("the private key is encrypted", private_key=files.secret(tmp_path / "encrypted", files.ENCRYPTED))
    with pytest.raises(FileNotFoundError, match="nothing"):
        paths._replace(shared_key=tmp_path / "nothing").copy()
    with pytest.raises(ValueError, match="empty has no certificate in PEM"):
        CopyCredentials(shared_key=paths.shared_key, authority=empty)
    for path in (odd, files.secret(tmp_path / "odd2", files.GOOD.replace("MII", "AAA"))):
        with pytest.raises(ValueError, match=path.name):
            CopyCredentials(shared_key=paths.shared_key, authority=path)
    with pytest.raises(ValueError, match="odd"):
        CopyCredentials(shared_key=paths.shared_key, authority=odd)
    both = files.secret(tmp_path / "both.pem", files.KEY + files.GOOD)
    SourceCredentials(certificate=both, shared_key=paths.shared_key)


def test_a_python_without_ssl_says_so(paths: files.Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "loglib.system.tls", None)
    monkeypatch.delattr("loglib.system.tls")
    with pytest.raises(LogError, match="this Python has no TLS .*let ssh carry the stream"):
        paths.copy()
