"""Tally: the number of records, their bytes, and a digest that does not depend on their order.

Invariant: the tally of a set of records is the sum of the tallies of its parts, in any order and any batches. So two
places with the same records have the same tally. The digest is the sum of a hash of each record, modulo 2^128. The hash
is BLAKE2b of the record's timestamp, key, value and headers, each with its size, so that no byte can move from one to
another unnoticed. A sum of checksums is not enough: a CRC is linear, and for some records that exchange their values
both errors cancel out.

The digest does not depend on the order of the records, their partitions and offsets. It is no proof against a forger,
who can search for other records with the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import compress
from struct import Struct
from typing import NamedTuple

from ..format.batch import Batch
from ..format.columns import Headers

_DIGEST_BYTES = 16
_MODULUS = 1 << 8 * _DIGEST_BYTES
_HEAD = Struct("<qqqq").pack  # of a record: timestamp, sizes of key and value (-1: null), number of headers
_HEADER = Struct("<qq").pack  # of a header: sizes of name and value
_NULL = -1


class Tally(NamedTuple):
    """Counts of records. Tallies are added with `+`, also to those of other places."""

    records: int
    bytes: int  # of keys and values
    digest: int

    def __add__(self, other: Tally) -> Tally:  # type: ignore[override]  # not the `+` of tuples
        """The tally of the records of both."""
        digest = (self.digest + other.digest) % _MODULUS
        return Tally(self.records + other.records, self.bytes + other.bytes, digest)


NOTHING = Tally(0, 0, 0)
Windows = dict[int, Tally]  # by the first microsecond of the window


def tallies(batch: Batch, window_us: int) -> Windows:
    """The tallies of a batch's records by time window. A record belongs to the window of its timestamp."""
    keys, values, times, headers = batch.keys, batch.values, batch.timestamps, batch.headers
    places = [time // window_us * window_us for time in times]
    if len({*places}) == 1:
        return {places[0]: _tally(keys, values, times, headers)}
    found: Windows = {}
    for window in {*places}:
        chosen = [place == window for place in places]
        found[window] = _tally(
            [*compress(keys, chosen)], [*compress(values, chosen)], compress(times, chosen), compress(headers, chosen)
        )
    return found


def _tally(
    keys: Sequence[bytes | None], values: Sequence[bytes | None], times: Iterable[int], headers: Iterable[Headers]
) -> Tally:
    sizes = sum(map(len, filter(None, keys))) + sum(map(len, filter(None, values)))
    digests = map(_digest, keys, values, times, headers)
    return Tally(len(values), sizes, sum(int.from_bytes(each, "little") for each in digests) % _MODULUS)


def _digest(key: bytes | None, value: bytes | None, time: int, headers: Headers) -> bytes:
    """The hash of one record."""
    head = _HEAD(time, _NULL if key is None else len(key), _NULL if value is None else len(value), len(headers))
    found = blake2b(b"".join((head, key or b"", value or b"")), digest_size=_DIGEST_BYTES)
    for name, content in headers:
        encoded = name.encode()
        found.update(_HEADER(len(encoded), len(content)) + encoded + content)
    return found.digest()


def merged(parts: Iterable[Mapping[int, Tally]]) -> Windows:
    """The sum of the tallies of each window."""
    found: Windows = {}
    for part in parts:
        for window, tally in part.items():
            found[window] = found.get(window, NOTHING) + tally
    return found
