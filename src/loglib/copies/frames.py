"""Frames: the frames that the two ends of a mirror's stream send each other.

Invariant: a frame is returned whole and checked, or the link breaks: then every later call raises the error. The bodies
of all kinds end with a checksum, except BATCHES, whose batches have their own.

Each frame begins with the header of a transfer frame (append/transfer.py). The copy asks, and the source answers:

    kind      from    body                                                     partition, salt   base_offset
    0 BATCHES  source  whole stored batches of one segment                      of the log        of the first one
    1 REQUEST  copy    JSON: the request                                        0                 0
    2 ANSWER   source  JSON: the answer; after a READ its end                   0                 0
    3 ERROR    source  JSON: the error that came instead of the answer          0                 0
    4 SEGMENT  source  a segment begins: its header, and files beside it        of the log        of the segment
    5 GAP      source  stored bytes of a declared gap                           of the log        of the first byte
    6 ACK      copy    none: the log is durable in the copy up to base_offset   of the log        the end
    7 BEAT     copy    none: a sign of life                                     0                 0
    8 STOP     copy    none: end the present READ                               0                 0
    9 NONCE    both    random bytes, to be answered by a PROOF                  0                 0
    10 PROOF   both    proof that this end has the shared key (credentials.py)  0                 0

docs/format.md has the requests and answers. `salt` is that of the log, so a frame of another log is refused.

Threads: `wake` from any thread; the rest from one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..append.transfer import BATCHES, FRAME_BYTES, FrameHeader
from ..config.policies import MAX_BATCH_BYTES
from ..errors import BrokenStreamError, CorruptLogError, UnsupportedFormatError
from ..format.header import crc32c
from ..segment import HEADER_BYTES
from ..system.not_copyable import NotCopyable
from ..system.stream import Stream
from .local_source import BLOCK_BYTES, MOST_BESIDE_BYTES

__all__ = [
    "ACK", "ANSWER", "BATCHES", "BEAT", "ERROR", "GAP", "NONCE", "PROOF", "PROTOCOL", "REQUEST", "SEGMENT",
    "SHORT_BYTES", "STOP", "Frame", "Link",
]  # fmt: skip

PROTOCOL = 1
REQUEST, ANSWER, ERROR, SEGMENT, GAP, ACK, BEAT, STOP, NONCE, PROOF = range(1, 11)
SHORT_BYTES = 32  # of a nonce and of a proof
_CRC_BYTES = 4
_TLS = b"\x16\x03"  # the first bytes of a TLS handshake
_COALESCED_BYTES = 1 << 16  # a body up to this size is written together with its header
_MOST_BYTES = {  # of the body of a frame
    BATCHES: MAX_BATCH_BYTES,
    REQUEST: 1 << 20,
    ANSWER: 64 << 20,  # the marks of 10,000 partitions are 4 MiB
    ERROR: 1 << 20,
    SEGMENT: HEADER_BYTES + 2 * (8 + MOST_BESIDE_BYTES) + _CRC_BYTES,
    GAP: BLOCK_BYTES + _CRC_BYTES,
    ACK: 0,
    BEAT: 0,
    STOP: 0,
    NONCE: SHORT_BYTES + _CRC_BYTES,
    PROOF: SHORT_BYTES + _CRC_BYTES,
}
_FROM_SOURCE = (BATCHES, ANSWER, ERROR, SEGMENT, GAP)
_FROM_COPY = (REQUEST, ACK, BEAT, STOP)
_OF_PROOF = (NONCE, PROOF)  # before all others, if the stream has credentials


class Frame(NamedTuple):
    """One frame; the table at the top of the module explains each field."""

    kind: int
    partition: int = 0
    salt: int = 0
    base_offset: int = 0
    content: bytes = b""

    def facts(self) -> Any:
        """The JSON of the content."""
        return json.loads(self.content)


class Link(NotCopyable):
    """One end of a stream of frames: the source's, or the copy's. With `proving` only proofs are exchanged."""

    def __init__(self, stream: Any, *, timeout_s: float, doing: str, at_source: bool, proving: bool = False) -> None:
        self._awaited: tuple[int, ...] = _FROM_COPY if at_source else _FROM_SOURCE
        if proving:
            self._awaited = _OF_PROOF if at_source else (*_OF_PROOF, ERROR)
        self._failure: BrokenStreamError | UnsupportedFormatError | None = None
        if isinstance(stream, Stream):  # from credentials
            self.stream = stream
            stream.timeout_s, stream.doing = timeout_s, doing
        else:
            self.stream = Stream(stream, timeout_s=timeout_s, doing=doing)
        self.timeout_s = timeout_s

    def close(self) -> None:
        self.stream.close()

    def broken(self, why: object) -> BrokenStreamError:
        """Return the error for a peer that broke the protocol; the link cannot be used any more."""
        self._failure = self.stream.broken(why)
        return self._failure

    @property
    def failed(self) -> bool:
        """True if the link is broken."""
        return self._failure is not None

    # --- frames ------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Send a frame."""
        self._check()
        kind, partition, salt, base_offset, content = frame
        crc = b"" if kind == BATCHES or not content else crc32c(content).to_bytes(_CRC_BYTES, "little")
        header = FrameHeader(kind, partition, salt, base_offset, len(content) + len(crc)).encode()
        try:
            if len(content) < _COALESCED_BYTES:
                self.stream.write(b"".join((header, content, crc)))
            else:
                for part in (header, content, crc):
                    self.stream.write(part)
        except BaseException as error:
            self._note(error)
            raise

    def send_facts(self, kind: int, facts: Any) -> None:
        """Send a frame with these facts as JSON."""
        self.send(Frame(kind, content=json.dumps(facts).encode()))

    def waits(self, timeout_s: float = 0.0, others: Sequence[int] = ()) -> bool:
        """Wait for a frame, or for one of the other descriptors; True if a frame has arrived, or the stream has ended.

        A wait that ends without a frame does not break the link.
        """
        self._check()
        return self.stream.wait(timeout_s, others)

    def receive(self, *, may_end: bool = False) -> Frame | None:
        """The next frame. None at the end of the stream, if it may end here."""
        self._check()
        try:
            return self._receive(may_end=may_end)
        except BaseException as error:
            self._note(error)
            raise

    def _receive(self, *, may_end: bool) -> Frame | None:
        raw = self.stream.read(FRAME_BYTES, may_end=may_end)
        if not raw:
            return None
        try:
            kind, partition, salt, base_offset, size = FrameHeader.decode(raw)
        except CorruptLogError as error:
            hint = "; a TLS handshake: this end does not encrypt" if raw.startswith(_TLS) else ""
            raise self.broken(f"{error.found} came, and not {error.expected}{hint}") from error
        if kind not in _MOST_BYTES:
            raise UnsupportedFormatError("the stream", "frame kind", kind, max(_MOST_BYTES))
        if kind not in self._awaited or size > _MOST_BYTES[kind]:
            raise self.broken(f"a frame of kind {kind} and {size} bytes came, which has no place here")
        content = self.stream.read(size) if size else b""
        if content and kind != BATCHES:
            content, crc = content[:-_CRC_BYTES], content[-_CRC_BYTES:]
            if crc != crc32c(content).to_bytes(_CRC_BYTES, "little"):
                raise self.broken(f"a frame of kind {kind} came with the CRC {crc.hex()}, and not that of its bytes")
        return Frame(kind, partition, salt, base_offset, content)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.again()

    def _note(self, error: BaseException) -> None:
        """Note the error: a link that was interrupted within a frame cannot be used any more."""
        if isinstance(error, BrokenStreamError | UnsupportedFormatError):
            self._failure = error
        else:
            self._failure = self.stream.broken(repr(error))
