"""Lines: the lines of a file or of a pipe, in portions, with their places.

Invariant: memory is bounded by the longest allowed line and a few MiB, for any input. A portion contains the lines that
one read has completed. All its lines end in the same MiB of a file, so portions never cross a border of `STEP_BYTES`.

A signal ends the input. Data that was read from a pipe is still returned, also a line without its end, because it
exists nowhere else. A file can be read again, so its last line without an end is returned only at the end of the file.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Literal, NamedTuple

import click

from ..errors import LogError
from ..system.files import REAL
from .signals import Held
from .streams import INPUT, why

__all__ = ["BOM", "STEP_BYTES", "LineSource", "LongLines", "Portion", "TooLongLine"]

LongLines = Literal["stop", "skip", "split"]

STEP_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


class Portion(NamedTuple):
    """Lines that follow each other, without their ends."""

    lines: Sequence[bytes]
    number: int  # of the first line, from 1 on; counted from where the reading began
    start: int  # where the first line begins, in bytes
    ends: Sequence[int]  # the place after each line and its end


class TooLongLine(LogError):
    """A line is longer than a record may be."""

    def __init__(self, number: int, limit_bytes: int) -> None:
        super().__init__(f"it has more than {limit_bytes:,} bytes, the longest allowed line")
        self.number = number


class LineSource:
    """A file, or standard input, that is read from its beginning or from a place in it."""

    def __init__(self, name: str, *, end: bytes, limit_bytes: int, held: Held) -> None:
        self.name = INPUT if name == "-" else name
        self._end, self._limit, self._held = end, limit_bytes, held
        with held.loose():  # opening a named pipe waits for a process that writes it
            self._fd = 0 if name == "-" else os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
        self.is_file = name != "-" and stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._looked = False

    def __enter__(self) -> LineSource:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._fd:
            os.close(self._fd)

    def check_text(self) -> None:
        """Raise a usage error if the file is compressed or UTF-16, so that no regular expression finds anything."""
        begin = os.pread(self._fd, 8, 0) if self.is_file else b""
        for magic, program in _COMPRESSED.items():
            if begin.startswith(magic):
                raise click.UsageError(f"{self.name} is compressed; {program} -dc {self.name} | loglib append ...")
        if begin.startswith(_UTF_16):
            raise click.UsageError(f"{self.name} is UTF-16; iconv -f UTF-16 -t UTF-8 {self.name} | loglib append ...")

    @property
    def modified(self) -> float:
        """The time of the last change of the file, in seconds since 1970."""
        return os.fstat(self._fd).st_mtime

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def bytes_before(self, end: int, count: int) -> bytes:
        """`count` bytes of the file before the place `end`; fewer at the beginning of the file."""
        start = max(0, end - count)
        return REAL.read_at(self._fd, end - start, start)

    def line_start(self, place: int) -> int:
        """The beginning of the line that contains the byte before this place, or ends with it."""
        while place > 0:
            block = self.bytes_before(place - 1, STEP_BYTES)
            found = block.rfind(self._end)
            place = place - 1 - len(block)
            if found >= 0:
                return place + found + 1
        return 0

    def line_number(self, start: int, number: int) -> int:
        """The number in the whole file of a line that has this `number` when counting begins at the place `start`."""
        places = range(0, start, STEP_BYTES)
        return number + sum(os.pread(self._fd, min(STEP_BYTES, start - at), at).count(self._end) for at in places)

    # --- reading -----------------------------------------------------------------------------------------

    def portions(
        self, start: int = 0, *, long_lines: LongLines = "stop", known_end: int = 0, leave_open_end: bool = False
    ) -> Iterator[Portion]:
        """The lines from the place `start` on, at which a line begins.

        A line above the limit ends the reading (`TooLongLine`), is skipped, or is split into pieces of the limit. An
        earlier reading has decided about lines that begin before `known_end`. `LogError` if the file is cut while it is
        read.
        """
        self._long, self._known_end = long_lines, known_end
        self.skipped = 0  # lines that were too long
        self.has_open_end = False  # True if the last line had no end yet, and was left
        self._place = start  # of the next byte to read
        self._number = 1  # of the line that is being read
        self._rest: list[bytes] = []  # the parts of that line that were read
        self._rest_bytes = 0
        self._skipping = False  # True in a line that was too long
        while data := self._read():
            yield from self._cut(data)
            self._place += len(data)
        if self.is_file:
            if self._held.number is not None:
                return
            if self.size_bytes < self._place:
                raise LogError(f"{self.name} was cut at byte {self.size_bytes:,} while it was read; read it again")
        if self._rest and leave_open_end:
            self.has_open_end = True
        elif self._rest_bytes:
            line = b"".join(self._rest)
            yield Portion([line], self._number, self._place - len(line), [self._place])

    def _read(self) -> bytes:
        """The next bytes; none at the end, or after a signal when nothing more can be read without waiting."""
        size = STEP_BYTES - self._place % STEP_BYTES
        try:
            if self.is_file:
                return b"" if self._held.number is not None else os.pread(self._fd, size, self._place)
            while self._held.wait_readable(self._fd) or self._is_last_look():
                with suppress(BlockingIOError):  # another process has read it
                    return os.read(self._fd, size)
            return b""
        except OSError as error:
            raise OSError(error.errno, why(error), self.name) from error

    def _is_last_look(self) -> bool:
        """True once after a signal if the pipe still contains data: data that came before the signal is not lost."""
        looked, self._looked = self._looked, True
        return not looked and REAL.poll(self._fd, select.POLLIN, 0)

    def _cut(self, data: bytes) -> Iterator[Portion]:
        """Yield the lines that end in this data, and keep the rest."""
        first, *others = data.split(self._end)
        if not others:
            yield from self._keep(first, self._place)
            return
        place = self._place  # of what follows
        if self._rest or self._skipping:
            yield from self._keep(first, place)
            place += len(first) + 1
            yield from self._kept(place)
        else:
            others.insert(0, first)
        rest = others.pop()
        yield from self._whole(others, place)
        yield from self._keep(rest, self._place + len(data) - len(rest))

    def _whole(self, lines: list[bytes], place: int) -> Iterator[Portion]:
        """Yield whole lines, the first of which begins at this place."""
        while lines:
            long = len(lines)  # the number of lines that are not too long
            if len(max(lines, key=len)) > self._limit:
                long = next(at for at, line in enumerate(lines) if len(line) > self._limit)
            if long:
                ends = list(accumulate([len(line) + 1 for line in lines[:long]], initial=place))
                yield Portion(lines[:long], self._number, place, ends[1:])
                self._number += long
                place = ends[-1]
            for line in lines[long : long + 1]:
                yield from self._keep(line, place)
                place += len(line) + 1
                yield from self._kept(place)
            lines = lines[long + 1 :]

    def _kept(self, end: int) -> Iterator[Portion]:
        """Yield the line that was kept, and whose end is at this place."""
        if self._rest:
            line = b"".join(self._rest)
            yield Portion([line], self._number, end - 1 - len(line), [end])
        self._number += 1
        self._rest, self._rest_bytes, self._skipping = [], 0, False

    def _keep(self, part: bytes, place: int) -> Iterator[Portion]:
        """Keep a part of a line until the line's end is read. The pieces of a long line are yielded or dropped."""
        if self._skipping or not part:
            return
        self._rest.append(part)
        self._rest_bytes += len(part)
        if self._rest_bytes <= self._limit:
            return
        is_known = place < self._known_end
        if self._long == "stop" and not is_known:
            raise TooLongLine(self._number, self._limit)
        if self._long != "split":
            self.skipped += not is_known
            self._skipping = True
            self._rest, self._rest_bytes = [], 0
            return
        line = b"".join(self._rest)
        start, most = place + len(part) - len(line), (len(line) - 1) // self._limit * self._limit
        for at in range(0, most, self._limit):
            piece = line[at : at + self._limit]
            yield Portion([piece], self._number, start + at, [start + at + self._limit])
        self._rest, self._rest_bytes = [line[most:]], len(line) - most
