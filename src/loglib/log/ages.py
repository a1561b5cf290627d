"""Ages: the ages of segments that a partition's stamps prove, even if the wall clock was wrong.

Invariant: an age is never above the true age, unless the wall clock was wrong for more than an hour without a
break. Ages are monotone: a segment that was sealed before another one is at least as old.

A stamp is a moment by both clocks (the wall clock and the time since the boot), with the base offset of the
open segment at that moment. The header of each segment has a stamp, and retention adds one at each pass.
Within a boot the time since the boot gives the age. Across boots only wall clocks can be compared. The
*lead* of a boot is its wall clock minus its time since the boot. It changes only when a person or a program
sets the clock. A lead is believed if it stayed the same for more than an hour. Then every stamp of that
boot is believed, even if the wall clock was wrong when the stamp was made.

The file `clock` of a partition keeps the stamps that matter, at most four for each boot. If it is lost,
retention waits longer; no data is lost.

    byte size field        meaning (little-endian)
       0    8  magic        89 4C 4C 43 4C 4B 0D 0A
       8    2  version      1
      10    2  flags        low byte: a reader must know each bit, and none is known yet; high byte: may ignore
      12    4  crc          CRC-32C of bytes 0..11 and of all from 16, salted with log id and partition
      16  40n  stamps       each: base_offset u64, wall i64, boottime i64, both in microseconds, boot_id 16 bytes

This module reads no clock and no disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple

from ..config.policies import MAX_OFFSET
from ..errors import CorruptLogError, UnsupportedFormatError
from ..format.header import crc32c
from ..segment import SegmentHeader, SegmentReader
from ..system.clock import TIME_ITSELF, Moment

NAME = "clock"
MAGIC = b"\x89LLCLK\r\n"
VERSION = 1
_MUST_KNOW = 0x00FF
_HEADER = Struct("<8sHHI")
_STAMP = Struct("<Qqq16s")
_MOST_STAMPS = 1024  # of 256 boots, say; without older stamps retention only waits longer
MOST_BYTES = _HEADER.size + _MOST_STAMPS * _STAMP.size
assert _HEADER.size == 16 and _STAMP.size == 40

BELIEVED_AFTER_US = 60 * 60 * 1_000_000  # the longest time that a clock may be wrong
# Steps up to this size are no jump: a leap second, or a time daemon's correction. Ages across boots are reduced by
# this tolerance, so that no such step drops a segment early.
TOLERANCE_US = 2_000_000


class Stamp(NamedTuple):
    """A moment, and the base offset of the open segment then. All segments below it had been sealed."""

    base_offset: int
    wall_us: int
    boottime_us: int
    boot_id: bytes

    @classmethod
    def of(cls, header: SegmentHeader) -> Stamp:
        """The stamp of the segment's creation, which is when the previous segment was sealed."""
        return cls(header.base_offset, header.created, header.created_boottime, header.boot_id)

    @property
    def lead_us(self) -> int:
        return self.wall_us - self.boottime_us


class Age(NamedTuple):
    """The age of a sealed segment."""

    at_least_us: int
    exact: bool  # False: `at_least_us` is only a lower bound
    order: tuple[int, int]  # sorts the segments of all partitions by their known ages, the oldest first


class _Boot:
    """The known facts about one boot."""

    def __init__(self, first: Stamp) -> None:
        self.first = first
        self.anchor = first  # the first stamp with the present lead, which all later stamps share
        self.proof: tuple[Stamp, Stamp] | None = None  # more than an hour apart, with the same lead

    @property
    def believed_lead(self) -> int | None:
        return None if self.proof is None else self.proof[0].lead_us

    def add(self, stamp: Stamp) -> bool:
        if abs(stamp.lead_us - self.anchor.lead_us) > TOLERANCE_US:
            self.anchor = stamp
            return True
        if stamp.boottime_us - self.anchor.boottime_us <= BELIEVED_AFTER_US:
            return False
        if self.proof is not None and self.proof[0] == self.anchor:
            return False
        self.proof = (self.anchor, stamp)
        return True

    def worth_keeping(self) -> list[Stamp]:
        return sorted({self.first, *(self.proof or ()), self.anchor}, key=_by_boottime)


class Timeline:
    """The stamps of one partition, and the ages that follow from them."""

    def __init__(self, stamps: Iterable[Stamp] = ()) -> None:
        self._boots: dict[bytes, _Boot] = {}
        for stamp in sorted(stamps, key=_by_boottime):
            self.add(stamp)

    def add(self, stamp: Stamp) -> bool:
        """Add a stamp; the stamps of a boot must come in order. True if the stamp adds a fact."""
        if not any(stamp.boot_id):  # an unknown boot: its times cannot be compared
            return False
        boot = self._boots.get(stamp.boot_id)
        if boot is None:
            self._boots[stamp.boot_id] = _Boot(stamp)
            return True
        return boot.add(stamp)

    def forget_before(self, log_start_offset: int) -> None:
        """Forget the boots in which no remaining segment was sealed."""
        begun = (boot.first.base_offset for boot in self._boots.values())
        latest = max((base for base in begun if base <= log_start_offset), default=0)
        for boot_id in [key for key, boot in self._boots.items() if boot.first.base_offset < latest]:
            del self._boots[boot_id]

    def worth_keeping(self) -> list[Stamp]:
        """The stamps that give the same ages as all stamps; at most four per boot."""
        return [stamp for boot in self._boots.values() for stamp in boot.worth_keeping()]

    def age(self, sealed: Stamp, now: Moment) -> Age:
        """The age of the segment that ends at this stamp's base offset."""
        known = self._known_age(sealed, now)
        order = self._order(sealed, now)
        if known is not None:
            return Age(known, True, order)
        bounds = (
            self._known_age(boot.first, now) or 0
            for boot in self._boots.values()
            if boot.first.base_offset >= sealed.base_offset
        )
        return Age(max(bounds, default=0), False, order)

    def believes(self, now: Moment) -> bool:
        """True if the present time of the wall clock is believed."""
        if now.boot_id == TIME_ITSELF:
            return True
        boot = self._boots.get(now.boot_id)
        lead = None if boot is None else boot.believed_lead
        return lead is not None and abs(now.wall_us - now.boottime_us - lead) <= TOLERANCE_US

    def steady_us(self, now: Moment) -> int:
        """The time for which the clock is known to have run without a jump, in microseconds."""
        boot = self._boots.get(now.boot_id)
        if boot is None or abs(now.wall_us - now.boottime_us - boot.anchor.lead_us) > TOLERANCE_US:
            return 0
        return max(now.boottime_us - boot.anchor.boottime_us, 0)

    def _known_age(self, stamp: Stamp, now: Moment) -> int | None:
        if stamp.boot_id == now.boot_id:
            return max(now.boottime_us - stamp.boottime_us, 0)
        boot = self._boots.get(stamp.boot_id)
        if boot is None or boot.believed_lead is None or not self.believes(now):
            return None
        sealed = stamp.boottime_us + boot.believed_lead
        present = now.boottime_us + (self._boots[now.boot_id].believed_lead or 0)
        return max(present - sealed - 2 * TOLERANCE_US, 0)

    def _order(self, stamp: Stamp, now: Moment) -> tuple[int, int]:
        if stamp.boot_id == now.boot_id:
            return 1, stamp.boottime_us
        boot = self._boots.get(stamp.boot_id)
        lead = None if boot is None else boot.believed_lead
        return 0, stamp.boottime_us + (stamp.lead_us if lead is None else lead)


def open_since(segment: SegmentReader, now: Moment) -> int:
    """The time at which the first batch of an open segment was written; see `began_boottime`. The segment has one."""
    first = segment.header_at(segment.base_offset)
    return began_boottime(Stamp.of(segment.header), first.append_time, now)


def began_boottime(created: Stamp, first_append_time: int, now: Moment) -> int:
    """The time at which its first batch was written, in microseconds since the boot; a guess across boots.

    The time only decides when the segment is rolled, so a wrong guess is acceptable. But the segment must be rolled
    some day, so a time in the future is not believed.
    """
    walls = [each for each in (first_append_time, created.wall_us) if each <= now.wall_us]
    guess = now.boottime_us - (now.wall_us - walls[0] if walls else now.wall_us)
    return max(guess, created.boottime_us) if created.boot_id == now.boot_id else guess


def encode(stamps: Sequence[Stamp], salt: int) -> bytes:
    """The content of the file `clock`."""
    newest = sorted(stamps, key=lambda stamp: stamp.base_offset)[-_MOST_STAMPS:]
    body = b"".join(_STAMP.pack(*stamp) for stamp in newest)
    unsealed = _HEADER.pack(MAGIC, VERSION, 0, 0)
    return unsealed[:12] + _crc(unsealed + body, salt).to_bytes(4, "little") + body


def decode(content: bytes, salt: int, path: str = NAME) -> list[Stamp]:
    """The stamps in the content of a file `clock`; `CorruptLogError` or `UnsupportedFormatError` if it is invalid."""
    if len(content) < _HEADER.size or (len(content) - _HEADER.size) % _STAMP.size:
        expected = f"{_HEADER.size} and a multiple of {_STAMP.size}"
        raise CorruptLogError(path, len(content), f"{len(content)} bytes", expected)
    magic, version, flags, crc = _HEADER.unpack_from(content)
    if magic != MAGIC:
        raise CorruptLogError(path, 0, f"bytes {magic.hex()}", f"the magic {MAGIC.hex()}")
    actual = _crc(content, salt)
    if crc != actual:
        raise CorruptLogError(path, 12, f"CRC {crc:08x}", f"{actual:08x}, that of the bytes")
    if not version:
        raise CorruptLogError(path, 8, "version 0", f"at least {VERSION}")
    if version > VERSION:
        raise UnsupportedFormatError(path, "clock version", version, VERSION)
    if flags & _MUST_KNOW:
        raise UnsupportedFormatError(path, "clock flags", flags, 0)
    stamps = [Stamp(*row) for row in _STAMP.iter_unpack(content[_HEADER.size :])]
    for number, stamp in enumerate(stamps):
        if stamp.base_offset > MAX_OFFSET:
            at = _HEADER.size + number * _STAMP.size
            raise CorruptLogError(path, at, f"base offset {stamp.base_offset}", f"at most {MAX_OFFSET}")
    return stamps


def _crc(content: bytes, salt: int) -> int:
    return crc32c(content[_HEADER.size :], crc32c(content[:12], salt))


def _by_boottime(stamp: Stamp) -> int:
    return stamp.boottime_us
