"""Checked JSON: a line of JSON that ends with its own checksum, for small files of facts that a person may read.

Invariant: what `seal` has written, `unseal` returns. A line that differs in any byte is a `ValueError`.

    {"format": 1, ..., "crc": "a1b2c3d4"}

The last value is the CRC-32C of the line before `"crc"`. Readers ignore unknown names. A newer format keeps `format`
and `crc` in their places.
"""

from __future__ import annotations

import json
from typing import Any

from .header import crc32c

__all__ = ["seal", "unseal"]


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


def _ending(before: bytes) -> bytes:
    return f'"crc": "{crc32c(before):08x}"}}\n'.encode()
