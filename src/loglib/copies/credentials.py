"""Credentials: proof of who is at the other end of a mirror's stream, in a network that others use, too.

Invariant: no byte of a topic is sent, and none is used, before both ends have proved that they have the shared key,
over TLS 1.3, to a source whose certificate the copy trusts. The key itself is never sent.

    copy     -> source   NONCE   32 random bytes
    source   -> copy     NONCE   32 random bytes
    copy     -> source   PROOF   HMAC-SHA256 of the key over the words "loglib copy 1", both nonces, and the certificate
    source   -> copy     PROOF   the same over "loglib source 1", or an ERROR

The nonces are fresh, so a recorded proof is worthless. The certificate is in the proof (its SHA-256, like
`tls-server-end-point` of RFC 5929), so a proof cannot be passed to another server. The copy proves first: a peer
without the key gets nothing made with it from a source, not even a hash to try passwords on.

A source gives an unknown peer ten seconds and 64 KiB, for all of this together. It answers a wrong key slowly, and
counts it.

Threads: credentials may be shared by all; `accept` and `connect` run in the caller's.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import BrokenStreamError, CorruptLogError, LogClosedError, LogError, UntrustedPeerError
from ..system.files import REAL
from ..system.not_copyable import NotCopyable
from .frames import ERROR, NONCE, PROOF, SHORT_BYTES, Frame, Link

if TYPE_CHECKING:
    from ..system.tls import TlsStream

_STRANGER_S = 10.0  # the time of an unknown peer to prove its key
_STRANGER_BYTES = 1 << 16  # the bytes that it may send until then; a TLS handshake is some 2 KiB
_SLOW_S = 2.0  # until a wrong key is answered
_LEAST_KEY, _MOST_KEY = 32, 4096  # bytes; 32 random hexadecimal digits are 128 bits
_PEM_BYTES = 1 << 20
_OF_COPY, _OF_SOURCE = b"loglib copy 1", b"loglib source 1"
_FIRST_OF_A_FRAME = b"\x89"


class SourceCredentials(NotCopyable):
    """The certificate and the shared key of a source.

    `certificate` is a PEM file with the source's certificate, and those between it and its authority. `private_key` is
    the PEM file with its key; without it, the key is in the file of the certificate, too. `shared_key` is a file with
    the secret that all copies of this source have: at least 32 characters, such as `openssl rand -hex 32` makes. White
    space around it does not count.

    The files with secrets must be readable by their owner only (or by the group, too, if root owns them). All of them
    are read once, here.

    Raises `ValueError` if a file has another content or may be read by others, `FileNotFoundError`, and
    `PermissionError`.
    """

    def __init__(
        self, *, certificate: str | os.PathLike[str], shared_key: str | os.PathLike[str],
        private_key: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        path, secret = os.fspath(certificate), os.fspath(certificate if private_key is None else private_key)
        self._key = _shared_key(os.fspath(shared_key))
        _secret_content(secret, _PEM_BYTES)
        self._certificate = _tls().first_certificate(path, _content(path, _PEM_BYTES)[0])
        self._context = _tls().server_context(path, secret)
        self._counting = threading.Lock()
        self.refused_keys = 0

    def __repr__(self) -> str:
        return f"<SourceCredentials, {self.refused_keys} keys refused>"

    def accept(self, stream: Any, *, timeout: float = _STRANGER_S) -> Any:
        """Wait until the copy at the other end has proved its key. Returns the encrypted stream.

        `stream` is a connected socket, or two files or descriptors: one to read and one to write. The caller closes it,
        and must not use it otherwise any more. Give the result to `MirrorServer` or `serve_mirror`. The peer has
        `timeout` seconds. A wrong key is answered after two seconds, and counted in `refused_keys`.

        Raises `UntrustedPeerError` if the peer has another key, or does not trust the certificate; and
        `BrokenStreamError` if it leaves, is too slow, or sends something else.
        """
        with _stranger(stream, timeout, "waiting for a copy to prove its key") as found:
            if found.first_bytes().startswith(_FIRST_OF_A_FRAME):
                self._answer_in_the_clear(stream)
                raise found.broken("it came without TLS, and this source serves those with a shared key only")
            found.encrypt(self._context)
            self._check(found, Link(found, timeout_s=timeout, doing=found.doing, at_source=True, proving=True))
        return found

    def _answer_in_the_clear(self, stream: Any) -> None:
        """Send an error to a copy that has no credentials, unencrypted, so that it can report it."""
        plain = Link(stream, timeout_s=1.0, doing="refusing a copy without TLS", at_source=True)
        try:
            plain.send_facts(ERROR, _error("this source wants TLS and a shared key; give the copy both"))
        except (BrokenStreamError, LogClosedError):
            pass
        finally:
            plain.close()

    def _check(self, found: TlsStream, link: Link) -> None:
        theirs = _received(link, NONCE)
        ours = REAL.random_bytes(SHORT_BYTES)
        link.send(Frame(NONCE, content=ours))
        both = theirs + ours
        if not _are_same(_received(link, PROOF), _proof(self._key, _OF_COPY, both, self._certificate)):
            with self._counting:
                self.refused_keys += 1
            time.sleep(_SLOW_S)
            found.unlimit()
            link.send_facts(ERROR, _error("another shared key"))
            raise UntrustedPeerError(found.doing, "it has another shared key")
        link.send(Frame(PROOF, content=_proof(self._key, _OF_SOURCE, both, self._certificate)))


class CopyCredentials(NotCopyable):
    """The shared key of a copy, and the authorities that it trusts.

    `shared_key` is a file with the same secret as at the source; see `SourceCredentials`. `authority` is a PEM file
    with the certificates of the authorities that the copy trusts, or with the certificate of the source itself. Without
    it, the authorities of the system count.

    Raises `ValueError` if a file has another content or may be read by others, `FileNotFoundError`, and
    `PermissionError`.
    """

    def __init__(
        self, *, shared_key: str | os.PathLike[str], authority: str | os.PathLike[str] | None = None
    ) -> None:
        self._key = _shared_key(os.fspath(shared_key))
        path = None if authority is None else os.fspath(authority)
        if path is not None:
            _tls().first_certificate(path, _content(path, _PEM_BYTES)[0])
        self._context = _tls().client_context(path)

    def __repr__(self) -> str:
        return "<CopyCredentials>"

    def connect(self, stream: Any, host: str, *, timeout: float = _STRANGER_S) -> Any:
        """Prove the key to the source at the other end, and check the source's proof. Returns the encrypted stream.

        `host` is the name or address of the source, for which its certificate must have been made. `stream` is as in
        `SourceCredentials.accept`. Give the result to `Mirror.over` or `loglib.copies.receive_mirror`. The source has
        `timeout` seconds.

        Raises `UntrustedPeerError` if the certificate is not valid or for another host, if the source refuses the key,
        or does not have it; and `BrokenStreamError` if it leaves, is too slow, or sends something else.
        """
        with _stranger(stream, timeout, f"proving the shared key to {host}") as found:
            found.encrypt(self._context, host=host.partition("%")[0])
            self._check(found, Link(found, timeout_s=timeout, doing=found.doing, at_source=False, proving=True))
        return found

    def _check(self, found: TlsStream, link: Link) -> None:
        assert found.peer_certificate is not None
        ours = REAL.random_bytes(SHORT_BYTES)
        link.send(Frame(NONCE, content=ours))
        both = ours + _received(link, NONCE)
        link.send(Frame(PROOF, content=_proof(self._key, _OF_COPY, both, found.peer_certificate)))
        wanted = _proof(self._key, _OF_SOURCE, both, found.peer_certificate)
        if not _are_same(_received(link, PROOF), wanted):
            raise UntrustedPeerError(found.doing, "the source did not prove that it has the same shared key")


@contextmanager
def _stranger(stream: Any, timeout_s: float, doing: str) -> Iterator[TlsStream]:
    """A stream to a peer that has not proved its key, with the limits of a stranger. An error closes it."""
    found: TlsStream = _tls().TlsStream(stream, timeout_s=timeout_s, doing=doing)
    try:
        found.limit(timeout_s, _STRANGER_BYTES)
        yield found
        found.unlimit()
    except BaseException:
        found.close()
        raise


def _received(link: Link, kind: int) -> bytes:
    """The bytes of the next frame, which must be of this kind."""
    frame = link.receive()
    assert frame is not None
    if frame.kind == ERROR:
        raise UntrustedPeerError(link.stream.doing, "the source has another shared key than this end")
    if frame.kind != kind or len(frame.content) != SHORT_BYTES:
        raise link.broken(f"a frame of kind {frame.kind} and {len(frame.content)} bytes came, which proves nothing")
    return frame.content


def _proof(key: bytes, role: bytes, nonces: bytes, certificate: bytes) -> bytes:
    import hashlib  # these two would be in each program that has a topic
    import hmac

    return hmac.digest(key, role + nonces + hashlib.sha256(certificate).digest(), "sha256")


def _are_same(given: bytes, wanted: bytes) -> bool:
    """True if two proofs are the same. The time that it takes does not depend on where they differ."""
    import hmac

    return hmac.compare_digest(given, wanted)


def _error(words: str) -> dict[str, Any]:
    return {"error": UntrustedPeerError.__name__, "facts": [], "words": words}


# --- files ---------------------------------------------------------------------------------------------


def _shared_key(path: str) -> bytes:
    key = _secret_content(path, _MOST_KEY).strip()
    if len(key) < _LEAST_KEY:
        raise ValueError(
            f"{path}: a shared key has at least {_LEAST_KEY} characters, and this one {len(key)}; "
            f"make one with: openssl rand -hex 32"
        )
    return key


def _secret_content(path: str, most_bytes: int) -> bytes:
    """The content of a file that nobody else may read."""
    content, facts = _content(path, most_bytes)
    ours, owner, mode = os.geteuid(), facts.st_uid, stat.S_IMODE(facts.st_mode)
    if owner not in (0, ours) and ours != 0:
        raise ValueError(f"{path} has a secret, and belongs to user {owner}: let it belong to user {ours}")
    if mode & (0o037 if owner == 0 != ours else 0o077):
        raise ValueError(f"{path} has a secret, and others may use it (mode {mode:04o}); run: chmod 600 {path}")
    return content


def _content(path: str, most_bytes: int) -> tuple[bytes, os.stat_result]:
    """The content of a small file, or of the file that a link leads to, and its status."""
    try:
        fd = REAL.open_read(os.path.realpath(path))
        facts = REAL.fstat(fd)
        return REAL.drain(fd, path, most_bytes), facts
    except CorruptLogError as error:
        raise ValueError(f"{path}: {error.found}, and not {error.expected}") from error


def _tls() -> ModuleType:
    """The module for TLS, which is imported when it is used, and not with each program that has a topic."""
    try:
        from ..system import tls
    except ImportError as error:
        raise LogError(f"this Python has no TLS ({error}); let ssh carry the stream") from error
    return tls
