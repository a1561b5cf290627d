"""Inputs: the messages that every system gets, made before any clock starts.

Invariant: the same arguments give the same messages. Every message is a separate object in memory,
so no system gains from writing one cached message again and again.
"""

from __future__ import annotations

import random

_NOISE_BYTES = 16 << 20  # Messages are cut from this; a prime stride keeps them different.
_STRIDE_BYTES = 211


def values_of(shape: str, count: int) -> list[bytes]:
    """Return `count` messages of a shape: "200" (bytes), "50-350" (uniform), "16+200" (key, value) or "text"."""
    if shape == "text":
        return _access_log_lines(count)
    sizes = value_sizes(shape, count)
    noise = random.Random(1).randbytes(_NOISE_BYTES)
    room = _NOISE_BYTES - max(sizes)
    starts = ((index * _STRIDE_BYTES) % room for index in range(count))
    return [noise[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def keys_of(shape: str, count: int) -> list[bytes] | None:
    """Return a key for each message of a "16+200" shape, about ten messages per key; for other shapes None."""
    size, plus, _ = shape.partition("+")
    if not plus:
        return None
    users = random.Random(3).choices(range(max(1, count // 10)), k=count)
    return [b"user-%0*d" % (int(size) - 5, user) for user in users]


def payload_bytes_of(shape: str, count: int) -> int:
    """Return the bytes of all keys and values, without making the messages."""
    key, plus, _ = shape.rpartition("+")
    return sum(value_sizes(shape, count)) + (int(key) * count if plus else 0)


def value_sizes(shape: str, count: int) -> list[int]:
    """Return the size of each value of a shape."""
    low, dash, high = shape.partition("-")
    if dash:
        return random.Random(2).choices(range(int(low), int(high) + 1), k=count)
    return [int(shape.rpartition("+")[2])] * count


def in_calls(items: list[bytes], per_call: int) -> list[list[bytes]]:
    """Cut items into lists, one for each call."""
    return [items[start : start + per_call] for start in range(0, len(items), per_call)]


def _access_log_lines(count: int) -> list[bytes]:
    """Return lines like those of a web server's access log, which people compress."""
    choose = random.Random(4)
    statuses = (200, 200, 200, 304, 404)
    pages = [f"/articles/{name}-{number}" for name in ("log", "offset", "segment", "batch") for number in range(50)]
    agents = [f"Mozilla/5.0 (X11; Linux x86_64; rv:{n}.0) Gecko/20100101 Firefox/{n}.0" for n in range(90, 130)]
    lines = []
    for index in range(count):
        second = index // 40
        host = f"10.{choose.randrange(4)}.{choose.randrange(256)}.{choose.randrange(256)}"
        lines.append(
            f"{host} - - [17/May/2015:{10 + second // 3600 % 14:02}:{second // 60 % 60:02}:{second % 60:02} +0000] "
            f'"GET {choose.choice(pages)}?page={choose.randrange(30)} HTTP/1.1" {choose.choice(statuses)} '
            f'{choose.randrange(100_000)} "-" "{choose.choice(agents)}"'.encode()
        )
    return lines
