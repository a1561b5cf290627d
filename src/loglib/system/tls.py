"""TLS: a stream whose bytes are encrypted in transit.

Invariant: no byte is written or returned before the handshake is done, which is TLS 1.3. The time-outs and limits of
the stream hold for the handshake, too. A stream may end without a farewell: its content knows its sizes, so nobody
takes a part for the whole.

The bytes pass through memory (`ssl.SSLObject`), so any stream can be used, and waiting is the same as without TLS.

Threads: as in stream.py.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import BrokenStreamError, UntrustedPeerError
from .clock import monotonic
from .files import Buffer
from .stream import PIECE_BYTES, Stream

_RECORD_BYTES = 1 << 14  # TLS returns at most one record, which has at most this size
_FIRST = (0x16, 0x15)  # the first byte from a peer that speaks TLS: of a handshake, or of an alert


class TlsStream(Stream):
    """A stream with TLS, as soon as `encrypt` has returned."""

    def __init__(self, stream: Any, *, timeout_s: float, doing: str) -> None:
        super().__init__(stream, timeout_s=timeout_s, doing=doing)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._plain = b""  # decrypted, and not yet read
        self._is_over = False
        self._has_begun = False  # the peer has sent something
        self.peer_certificate: bytes | None = None  # DER

    def first_bytes(self) -> bytes:
        """The first bytes that the peer has sent; none if it has left. `encrypt` reads them again."""
        first = super()._piece(PIECE_BYTES)
        self._arrived[:0] = first
        return first

    def encrypt(self, context: ssl.SSLContext, *, host: str | None = None) -> None:
        """Do the handshake: as the server, or as a client that knows the server's name or address.

        Raises `UntrustedPeerError` if one of the ends refuses the other's certificate.
        """
        tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._take_in_handshake()
            except ssl.SSLError as error:
                with suppress(BrokenStreamError):  # tell the peer why
                    self._flush()
                raise self._refused(error) from error
        self._tls = tls
        self._flush()
        self.peer_certificate = tls.getpeercert(binary_form=True)

    def _take_in_handshake(self) -> None:
        piece = super()._piece(PIECE_BYTES)
        if not piece:
            raise self.broken("the other end left during the TLS handshake: it has no TLS, or has refused this end")
        if not self._has_begun and piece[0] not in _FIRST:
            raise self.broken("what came is no TLS: the other end does not encrypt")
        self._has_begun = True
        self._incoming.write(piece)

    def _refused(self, error: ssl.SSLError) -> BrokenStreamError | UntrustedPeerError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return UntrustedPeerError(self.doing, f"the certificate of the other end: {error.verify_message}")
        reason = _reason(error)
        if "alert" in reason and ("certificate" in reason or "unknown ca" in reason):
            return UntrustedPeerError(self.doing, f"the other end refuses the certificate of this one: {reason}")
        return self.broken(f"in the TLS handshake: {reason}")

    # --- bytes -----------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Encrypt and write all of the data."""
        assert self._tls is not None
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            self._tls.write(view[start : start + PIECE_BYTES])
            self._flush()

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> bool:
        """As `Stream.wait`: the stream can be read when bytes are decrypted, not as soon as they have arrived."""
        until = monotonic() + timeout_s
        while not self._decrypted():
            if not super().wait(max(0.0, until - monotonic()), others):
                return False
            self._take_in()
        return True

    def _piece(self, size: int) -> bytes:
        while not self._decrypted():
            self._take_in()
        piece, self._plain = self._plain[:size], self._plain[size:]
        return piece

    def _decrypted(self) -> bool:
        """True if there are decrypted bytes, or the end."""
        if self._plain or self._is_over:
            return True
        assert self._tls is not None
        try:
            self._plain = self._tls.read(_RECORD_BYTES)
        except ssl.SSLWantReadError:
            self._flush()  # an answer to a message of TLS itself
            return False
        except ssl.SSLError as error:
            raise self.broken(f"what came is not what was encrypted: {_reason(error)}") from error
        self._is_over = not self._plain
        return True

    def _take_in(self) -> None:
        piece = super()._piece(PIECE_BYTES)
        self._is_over = not piece
        self._incoming.write(piece)

    def _flush(self) -> None:
        """Write the encrypted bytes."""
        data = self._outgoing.read()
        if data:
            super().write(data)


# --- certificates ----------------------------------------------------------------------------------------


def server_context(certificate: str, private_key: str) -> ssl.SSLContext:
    """The context of a server: its certificate in one PEM file, and the private key in another or the same."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a peer comes rarely: no session is resumed
    try:
        context.load_cert_chain(certificate, private_key, password=_no_password)
    except ssl.SSLError as error:
        why = _reason(error)
        raise ValueError(f"{certificate} and {private_key}: no certificate with its private key ({why})") from error
    except ValueError as error:
        raise ValueError(f"{private_key}: {error}") from error
    return context


def client_context(authority: str | None) -> ssl.SSLContext:
    """The context of a client, which trusts the authorities in a PEM file or the system. It checks host names."""
    try:
        context = ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise ValueError(f"{authority}: no certificate of an authority ({_reason(error)})") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def first_certificate(path: str, content: bytes) -> bytes:
    """The first certificate in the content of a PEM file, as DER; `ValueError` if there is none."""
    text = content.decode("ascii", "replace")
    start = text.find(ssl.PEM_HEADER)
    stop = text.find(ssl.PEM_FOOTER, start)
    if start < 0 or stop < 0:
        raise ValueError(f"{path} has no certificate in PEM")
    try:
        return ssl.PEM_cert_to_DER_cert(text[start : stop + len(ssl.PEM_FOOTER)])
    except ValueError as error:
        raise ValueError(f"{path} has no certificate in PEM ({error})") from error


def _no_password() -> str:
    raise ValueError("the private key is encrypted; give one that is not, in a file that only its owner can read")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
