"""Forgery: payloads made of batches, headers and marks, by somebody who knows the format and the log.

Such a forger reads the log, as anybody may: the log id, the batches so far, the clock, the writer's epoch and
nonce. He also knows where the next batch will begin and what else will be in it, and so where each byte of a
value will stand. Everything that can be checked about his batches is right, but for one thing: no pointer that
a writer wrote leads to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from struct import Struct
from typing import NamedTuple

from builders import BODY_AT, encoded, header_of

from loglib.append.transfer import BATCHES
from loglib.format import header as batch
from loglib.format.codec import LZ4
from loglib.format.columns import Columns
from loglib.format.header import MAGIC, Header, Producer, crc32c
from loglib.format.watermark import Mark, encode_new
from loglib.segment import Identity, SegmentHeader

__all__ = ["KINDS", "Known", "chain", "columns_with", "compressed_forgery", "magics", "passing"]

_NEWER_VERSION = 40  # where it stands in a header


class Known(NamedTuple):
    """What the forger knows: of the log, and of the batch that his payload will be in."""

    identity: Identity
    headers: Sequence[Header]  # of the batches so far
    base_offset: int  # of the batch to come
    now: int  # by the log's clock
    epoch: int = 1
    nonce: int = 0


def chain(known: Known, place: int, size: int, random: Random, *, most: int = 1 << 30) -> bytes:
    """Batches for the `size` bytes at `place` of the log, one behind the other, of which the last ends where these do.

    The first says that it follows the last batch of the log; each further one follows the one before it.
    """
    begin = place
    place, stored = place + (-place % 8), bytes(-place % 8)
    end = begin + size
    before = known.headers[-1] if known.headers and random.random() < 0.8 else None
    places = [each.base_offset for each in known.headers] + [known.base_offset]
    while end - place >= BODY_AT + 24 and len(stored) < most:
        length = BODY_AT + 24 + 8 * random.randrange(20)
        if place + length > end - BODY_AT - 24:
            length = (end - place) & ~7
        value = b"invented" + random.randbytes(length - BODY_AT - 16)
        body = batch.encode_body(Columns([value]), codec=0)
        before_at = place - 8 * random.randrange(1, 99) if before is None else before.base_offset
        header, _ = batch.stamp(
            body, base_offset=place, durable_up_to=random.choice((0, known.base_offset, end, place + body.length)),
            writer_epoch=known.epoch, writer_nonce=known.nonce,
            previous_crc=random.getrandbits(32) if before is None else before.header_crc,
            previous_bytes=max(place - before_at, 0), jump_offset=random.choice(places), append_time=known.now,
            event_time=known.now,
            running_max_timestamp=known.now + random.randrange(-(10**6), 10**7),
            producer=random.choice((batch.NO_PRODUCER, Producer(random.getrandbits(64), random.getrandbits(40)))),
            producers_in_segment=random.random() < 0.5, salt=known.identity.salt,
        )  # fmt: skip
        stored += header + b"".join(body.parts)
        before = header_of(header, place, identity=known.identity)
        places.append(place)
        place += body.length
    return stored.ljust(size, b"\0")[:size]


def magics(known: Known, place: int, size: int, random: Random) -> bytes:
    """The bytes with which a batch begins, again and again, at every place where one may."""
    step = random.choice((4, 8))
    return (bytes(-place % 4) + MAGIC.ljust(step, b"\0") * (size // step + 1))[:size]


def _too_long(known: Known, place: int, size: int, random: Random) -> bytes:
    """Batches that would reach beyond the payload, and beyond the log."""
    stored = bytearray(chain(known, place, size, random))
    for at in range(-place % 8, size - BODY_AT, BODY_AT):
        length = max(random.choice((size - at + 8 * random.randrange(40), 1 << 20, 1 << 30)) & ~7, BODY_AT + 24)
        fields = encoded(Columns([b"x"]), place + at, identity=known.identity)[: BODY_AT + 24]
        header = header_of(fields, place + at, identity=known.identity)
        body = header._replace(length=length, stored_bytes=length - BODY_AT - 8, value_bytes=length - BODY_AT - 16)
        stamped, _ = batch.stamp(
            body, base_offset=place + at, durable_up_to=place + at, writer_epoch=known.epoch,
            writer_nonce=known.nonce, previous_crc=0, previous_bytes=BODY_AT, jump_offset=0, append_time=known.now,
            event_time=known.now,
            running_max_timestamp=known.now, producer=batch.NO_PRODUCER, producers_in_segment=False,
            salt=known.identity.salt,
        )  # fmt: skip
        stored[at : at + BODY_AT] = stamped
    return bytes(stored[:size])


def _newer(known: Known, place: int, size: int, random: Random) -> bytes:
    """A batch of a version to come, which a reader would have to refuse."""
    stored = bytearray(chain(known, place, size, random))
    at = -place % 8
    if len(stored) >= at + BODY_AT:
        stored[at + _NEWER_VERSION] = 9
        crc = crc32c(bytes(stored[at + 8 : at + BODY_AT]), known.identity.salt)
        stored[at + 4 : at + 8] = crc.to_bytes(4, "little")
    return bytes(stored)


def _segment(known: Known, place: int, size: int, random: Random) -> bytes:
    """A segment's header, of a segment that would begin where the payload ends."""
    at = place + size
    header = SegmentHeader(
        known.identity.log_id, known.identity.partition, known.epoch, at, known.now, 0, at,
        random.getrandbits(32), known.now, known.now, previous_batch_bytes=at - known.base_offset,
    )  # fmt: skip
    return (header.encode() + chain(known, place, max(size - 4096, 0), random))[:size].ljust(size, b"\0")


def _frames(known: Known, place: int, size: int, random: Random) -> bytes:
    """Transfer frames of forged batches."""
    size = max(size, 36)
    head = Struct("<4sHHIIQQ").pack(
        b"\x89LLT", 3, BATCHES, known.identity.partition, known.identity.salt, place, size - 36
    )
    return head + crc32c(head).to_bytes(4, "little") + chain(known, place + 36, size - 36, random)


def _slots(known: Known, place: int, size: int, random: Random) -> bytes:
    """A watermark that is newer than the log's."""
    mark = Mark.at_rest((1 << 62) + random.randrange(2), 0, place + 64, place)
    return (encode_new(mark, known.identity.salt) * (size // 4224 + 1))[:size]


def _mixture(known: Known, place: int, size: int, random: Random) -> bytes:
    stored = b""
    while len(stored) < size:
        room = min(size - len(stored), 40 + 8 * random.randrange(120))
        stored += random.choice(KINDS)(known, place + len(stored), room, random)
    return stored[:size]


KINDS: list[Callable[[Known, int, int, Random], bytes]] = [chain, magics, _too_long, _newer, _segment, _frames, _slots]
EVERY_KIND = [chain, chain, chain, *KINDS, _mixture]


def columns_with(known: Known, columns: Columns, random: Random) -> Columns:
    """The same columns with every value, key and header's value forged for the place where it will stand.

    Lengths stay as they are, so that places do, too. The batch must not be compressed.
    """
    body = batch.encode_body(columns, codec=0)
    header, _ = batch.stamp(
        body, base_offset=known.base_offset, durable_up_to=0, writer_epoch=0, writer_nonce=0, previous_crc=0,
        previous_bytes=0, jump_offset=0, append_time=0, event_time=0, running_max_timestamp=0,
        producer=batch.NO_PRODUCER,
        producers_in_segment=False, salt=known.identity.salt,
    )  # fmt: skip
    at = batch.layout(header_of(header, known.base_offset, identity=known.identity))
    start = known.base_offset + BODY_AT
    values = _forged_items(known, columns.values, start + at.values.items, random)
    keys = columns.keys
    if keys is not None and at.keys is not None:
        keys = _forged_items(known, keys, start + at.keys.items, random)
    headers = columns.headers
    if headers is not None and at.headers is not None:
        pairs = [pair for each in headers for pair in each]
        names = sum(len(name.encode()) for name, _ in pairs)
        place = start + at.headers.section + 2 * _padded(4 * (len(pairs) + 1)) + _padded(names)
        forged = iter(_forged_items(known, [value for _, value in pairs], place, random))
        headers = [tuple((name, next(forged) or b"") for name, _ in each) for each in headers]
    return Columns(values, keys, columns.timestamps, headers)


def _forged_items(
    known: Known, items: Sequence[bytes | None], place: int, random: Random
) -> list[bytes | None]:
    forged: list[bytes | None] = []
    for item in items:
        forged.append(item if item is None else random.choice(EVERY_KIND)(known, place, len(item), random)[: len(item)])
        place += len(item or b"")
    return forged


def compressed_forgery(known: Known, number: int, random: Random) -> bytes:
    """A value that, compressed with this codec alone in its batch, has forged batches in their right places; or b"".

    Noise does not shrink, and a codec stores it as it is, together with what is hidden in it.
    """
    start = known.base_offset + BODY_AT
    place = start
    size = 68_000 if number == LZ4 else 140_000  # more than what the codec takes at once
    for turn in range(48):
        noise, at = random.randbytes(size), size // 2 + turn % 8
        for _ in range(2):
            forged = chain(known, place, BODY_AT + 24, random)
            value = noise[:at] + forged + noise[at:] + bytes(size)
            body = batch.encode_body(Columns([value]), codec=number)
            found = start + b"".join(bytes(each) for each in body.parts).find(forged[:BODY_AT])
            if found == place:
                return value
            if found < start or found & 7:
                break
            place = found
    return b""


def passing(content: bytes, base: int, identity: Identity) -> list[int]:
    """The offsets at which these bytes, of a segment that begins at `base`, have a header that passes every check."""
    found, at = [], content.find(MAGIC)
    while at >= 0:
        if not (base + at) & 7:
            try:
                batch.parse_header(content, at, salt=identity.salt, offset=base + at)
                found.append(base + at)
            except (batch.BadBatch, batch.NewerBatch):
                pass
        at = content.find(MAGIC, at + 1)
    return found


def _padded(size: int) -> int:
    return size + (-size & 7)

