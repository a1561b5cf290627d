"""Checked JSON: a line of JSON that ends with its own checksum, for small files of facts that a person may read.

Invariant: what `seal` has written, `unseal` returns. A line that differs in any byte is a `ValueError`.

    {"format": 1, ..., "crc": "a1b2c3d4"}

The last value is the CRC-32C of the line before `"crc"`. Readers ignore unknown names. A newer format keeps `format`
and `crc` in their places.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import product
from typing import Any

from .header import crc32c

__all__ = ["seal", "unseal", "unseal_mended"]

_MOST_MENDED_BYTES = 1 << 14  # of a line in which a flipped bit is looked for: each bit of it is tried


def seal(facts: dict[str, Any]) -> bytes:
    """The facts as one line in ASCII, with a newline."""
    text = json.dumps(facts).removesuffix("}") + ", "
    before = text.encode()  # ASCII, since JSON escapes the rest
    return before + _ending(before)


def unseal(line: bytes) -> dict[str, Any]:
    """The facts in a line that `seal` has written; `ValueError` if it is not whole."""
    before = line.rpartition(b'"crc"')[0]
    if not before or line != before + _ending(before):
        raise ValueError("a line that differs from its crc")
    facts: dict[str, Any] = json.loads(line)  # its ending makes it an object
    return facts


def unseal_mended(line: bytes) -> dict[str, Any]:
    """As `unseal`, also if one bit of the line has flipped: the checksum says which. `ValueError` if more is wrong."""
    try:
        return unseal(line)
    except ValueError:
        if len(line) > _MOST_MENDED_BYTES:
            raise
        tried = bytearray(line)
        for at, bit in product(range(len(line)), range(8)):
            tried[at] ^= 1 << bit
            with suppress(ValueError):
                return unseal(bytes(tried))
            tried[at] ^= 1 << bit
        raise


def _ending(before: bytes) -> bytes:
    return f'"crc": "{crc32c(before):08x}"}}\n'.encode()
