"""Checked JSON: a line of JSON that ends with its own checksum, for small files of facts that a person may read.

Invariant: `unseal` returns what `seal` has written. A line that differs in any byte is a `ValueError`.

    {"format": 1, ..., "crc": "a1b2c3d4"}

The last value is the CRC-32C of the line before `"crc"`. Readers ignore unknown names. A newer format keeps `format`
and `crc` in their places.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any, TypeVar

from ..errors import CorruptLogError, UnsupportedFormatError
from ..system.files import Files
from .header import crc32c

T = TypeVar("T")

_FORMAT = 1  # of all such files
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # of facts that are not as expected
_MOST_MENDED_BYTES = 1 << 14  # of a line in which a flipped bit is looked for: each bit of it is tried


def seal(facts: dict[str, Any]) -> bytes:
    """The facts as one line in ASCII, with a newline."""
    text = json.dumps({"format": _FORMAT} | facts).removesuffix("}") + ", "
    before = text.encode()  # ASCII, since JSON escapes the rest
    return before + _ending(before)


def read(
    files: Files, path: str, limit_bytes: int, make: Callable[[dict[str, Any]], T], what: str, *, mended: bool = False
) -> T | None:
    """The facts in the file, as in `decode`; None if there is no file. `CorruptLogError` above the limit."""
    try:
        content = files.read_whole(path, limit_bytes)
    except FileNotFoundError:
        return None
    return decode(content, path, make, what, mended=mended)


def decode(content: bytes, path: str, make: Callable[[dict[str, Any]], T], what: str, *, mended: bool = False) -> T:
    """The result of `make` for the facts in the content of the file at `path`; errors call it `what`.

    `UnsupportedFormatError` for a newer format. `CorruptLogError` if the line is not whole, or if `make` does not find
    the facts that it expects. With `mended` one flipped bit does no harm.
    """
    try:
        facts = unseal_mended(content) if mended else unseal(content)
        version = facts["format"]
        if type(version) is int and version > _FORMAT:
            raise UnsupportedFormatError(path, "format", version, _FORMAT)
        if type(version) is not int or version != _FORMAT:
            raise ValueError(f"format {version}")
        return make(facts)
    except _FAULTS as error:
        raise CorruptLogError(path, 0, f"no valid facts ({error!r})", what) from error


def unseal(line: bytes) -> dict[str, Any]:
    """The facts in a line that `seal` has written; `ValueError` if it is not whole."""
    before = line.rpartition(b'"crc"')[0]
    if not before or line != before + _ending(before):
        raise ValueError("a line that differs from its crc")
    facts: dict[str, Any] = json.loads(line)  # its ending makes it an object
    return facts


def unseal_mended(line: bytes) -> dict[str, Any]:
    """The facts as `unseal` returns them, also if one bit of the line has flipped: the checksum shows which one.

    `ValueError` if more is wrong.
    """
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
