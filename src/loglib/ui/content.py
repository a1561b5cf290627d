"""Content: the bytes of keys, values and headers as the page shows them: JSON, text, or hexadecimal digits.

Invariant: what is shown is what is stored. Formatting JSON moves white space and nothing else: numbers, escapes and
repeated names stay as they were written. What is too long is cut, and its whole size is said. Text keeps its control
characters, which the page shows as escapes; the page takes text for text, and never for HTML.

Threads: pure functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

PREVIEW_BYTES = 600  # of a value in a list
WHOLE_BYTES = 256 << 10  # of a value that is looked at alone; the rest can be downloaded
_HEX_LINE = 16
_HEX_BYTES = 4096
_OPEN, _CLOSE = ("{", "["), ("}", "]")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes in a form that a person can read."""

    kind: str  # "null", "json", "text" or "hex"
    text: str
    size_bytes: int
    is_cut: bool


NULL = Content("null", "", 0, False)


def content_of(data: bytes | None, limit_bytes: int, *, pretty: bool = False) -> Content:
    """The bytes as text if they are UTF-8, else as hexadecimal digits. With `pretty` JSON that is whole is indented."""
    if data is None:
        return NULL
    size, is_cut = len(data), len(data) > limit_bytes
    text = _text(data[:limit_bytes], is_cut=is_cut)
    if text is None or not _is_readable(text):
        most = min(limit_bytes, _HEX_BYTES) if pretty else limit_bytes // 4
        shown = "\n".join(_hex_lines(data[:most])) if pretty else data[:most].hex(" ")
        return Content("hex", shown, size, size > most)
    if not is_cut and text.lstrip()[:1] in ("{", "[") and _is_json(text):
        return Content("json", indented(text) if pretty else text, size, False)
    return Content("text", text, size, is_cut)


def _text(data: bytes, *, is_cut: bool) -> str | None:
    for short in range(4 if is_cut else 1):  # a cut may be in the middle of a character
        try:
            return data[: len(data) - short].decode()
        except UnicodeDecodeError:
            continue
    return None


def _is_readable(text: str) -> bool:
    """False for text with many control characters, which is rather binary."""
    odd = sum(character < " " and character not in "\t\r\n" for character in text[:PREVIEW_BYTES])
    return odd * 10 <= min(len(text), PREVIEW_BYTES) or len(text) < 8


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def indented(text: str) -> str:
    """Valid JSON with two spaces for each level. The tokens are not changed."""
    lines, depth, before = list[str](), 0, ""
    for token in _TOKEN.findall(text):
        is_empty = token in _CLOSE and before in _OPEN
        if token in _CLOSE:
            depth -= 1
        if not is_empty and (token in _CLOSE or before in _OPEN):
            lines.append("\n" + "  " * depth)
        lines.append(token)
        if token in _OPEN:
            depth += 1
        elif token == ",":
            lines.append("\n" + "  " * depth)
        elif token == ":":
            lines.append(" ")
        before = token
    return "".join(lines)


def _hex_lines(data: bytes) -> Iterator[str]:
    """Lines with a position, 16 bytes, and the letters among them, as `xxd` prints them."""
    for at in range(0, len(data), _HEX_LINE):
        part = data[at : at + _HEX_LINE]
        letters = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        yield f"{at:08x}  {part[:8].hex(' '):23}  {part[8:].hex(' '):23}  {letters}"
