"""Tally: how many records, how many bytes, and a digest of them that does not depend on their order.

Invariant: the tally of a set of records is the sum of the tallies of its parts, in whatever order and batches they are.
So two places that have the same records have the same tally. The digest is the sum of the CRC-32C of each record's key
and value, modulo 2^64: a record that is lost while another one is there twice changes it, and so does a changed byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import NamedTuple

from ..format.batch import Batch
from ..format.header import crc32c

__all__ = ["NOTHING", "Tally", "Windows", "merged", "tallies"]

_MODULUS = 1 << 64


class Tally(NamedTuple):
    """What was counted. Tallies are added with `+`, also to those of other places."""

    records: int
    bytes: int  # of keys and values
    digest: int

    def __add__(self, other: tuple[object, ...]) -> Tally:
        """The tally of the records of both."""
        records, size, digest = other
        assert isinstance(records, int) and isinstance(size, int) and isinstance(digest, int)
        return Tally(self.records + records, self.bytes + size, (self.digest + digest) % _MODULUS)


NOTHING = Tally(0, 0, 0)
Windows = dict[int, Tally]  # by the first microsecond of the window


def tallies(batch: Batch, window_us: int) -> Windows:
    """The tallies of a batch's records by time window. A record belongs to the window of its timestamp."""
    keys, values = [each or b"" for each in batch.keys], [each or b"" for each in batch.values]
    places = [timestamp // window_us * window_us for timestamp in batch.timestamps]
    if len({*places}) == 1:
        return {places[0]: _tally(keys, values)}
    found: Windows = {}
    for window in {*places}:
        chosen = [place == window for place in places]
        found[window] = _tally(list(compress(keys, chosen)), list(compress(values, chosen)))
    return found


def _tally(keys: list[bytes], values: list[bytes]) -> Tally:
    return Tally(
        len(values), sum(map(len, keys)) + sum(map(len, values)), sum(map(crc32c, values, map(crc32c, keys))) % _MODULUS
    )


def merged(parts: Iterable[Mapping[int, Tally]]) -> Windows:
    """The sum of the tallies of each window."""
    found: Windows = {}
    for part in parts:
        for window, tally in part.items():
            found[window] = found.get(window, NOTHING) + tally
    return found
