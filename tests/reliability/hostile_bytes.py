"""Hostile bytes: what each target of the fuzzing draws, changes and seals again."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

from builders import IDENTITY, NOW, encoded

from loglib.format.columns import Columns
from loglib.format.header import crc32c

Draw = Callable[[], float]

SALT = IDENTITY.salt
# Wrong values for lengths, counts and offsets.
WILD = (
    0, 1, 2, 3, 7, 8, 9, 15, 16, 63, 64, 100, 127, 128, 129, 136, 255, 256, 4095, 4096, 4097, 65535, 65536,
    (1 << 20) - 1, 1 << 20, 1 << 24, (1 << 24) + 1, 1 << 25, 1 << 26, 1 << 29, (1 << 30) - 8, 1 << 30, (1 << 30) + 8,
    (1 << 31) - 8, (1 << 31) - 1, 1 << 31, (1 << 32) - 8, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 62), (1 << 63) - 4096,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1,
)  # fmt: skip


class Outcome(NamedTuple):
    """Whether the decoder accepted the bytes."""

    accepted: bool


ACCEPTED, REFUSED = Outcome(True), Outcome(False)


def pick(random: Draw, items: Any) -> Any:
    return items[int(random() * len(items))]


def wild(random: Draw, bits: int, *, near: int = 0) -> int:
    """A number of this many bits: one that often breaks decoders, or one close to the right value."""
    if random() < 0.5:
        return int(pick(random, WILD)) & (1 << bits) - 1
    return near + int(random() * 33) - 16 & (1 << bits) - 1


def signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> bits - 1 else number


def damaged(random: Draw, content: bytes, *, most: int = 4) -> bytearray:
    """The bytes with a few of them changed."""
    changed = bytearray(content)
    for _ in range(1 + int(random() * most)):
        if changed:
            changed[int(random() * len(changed))] = int(random() * 256)
    return changed


BATCH = Struct("<4sIIIQQIIBBHIIIIIqqqqQQIIQ")
_BITS = (0, 0, 32, 32, 64, 64, 32, 32, 8, 8, 16, *[32] * 5, *[64] * 6, 32, 32, 64)  # of each field
_SIGNED = range(16, 20)


def templates() -> list[tuple[list[Any], bytes]]:
    """Headers, as lists of their fields, and bodies, of batches as they are written."""
    texts = [b"%d" % number * (number % 7) for number in range(40)]
    columns = [
        Columns([b"x"]),
        Columns([b"abc"] * 9),
        Columns([None, b"", b"value", None], [b"k", None, b"", b"kk"]),
        Columns(texts, texts, [NOW + number for number in range(40)], [(("name", b"v"),) * (n % 3) for n in range(40)]),
        Columns([bytes(3000)] * 3),
    ]
    found = []
    for each in columns:
        for number in range(4):
            stored = encoded(each, codec=number)
            found.append((list(BATCH.unpack_from(stored)), stored[BATCH.size :]))
    return found


TEMPLATES = templates()


def seal(fields: list[Any], body: bytes | None = None) -> bytes:
    """A batch's header, and its body if given, with checksums that are right."""
    if body is not None:
        fields[2] = crc32c(body)
    unsealed = BATCH.pack(*fields)
    sealed = unsealed[:4] + crc32c(unsealed[8:], SALT).to_bytes(4, "little") + unsealed[8:]
    return sealed if body is None else sealed + body


def change_fields(random: Draw, fields: list[Any]) -> None:
    for _ in range(1 + int(random() * 3)):
        index = 2 + int(random() * (len(_BITS) - 2))
        number = wild(random, _BITS[index], near=fields[index])
        fields[index] = signed(number, 64) if index in _SIGNED else number
