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
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from typing import Literal, NamedTuple

import click

from ..errors import LogError
from ..system.files import REAL
from ..system.system_calls import nameless_file
from .signals import Held
from .streams import INPUT, why

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
    goes_on: bool = False  # True for a piece of a long line after the first one


class RefusedLine(LogError):
    """A line cannot be appended, and the options say to stop there."""

    def __init__(self, number: int, why: str, options: str) -> None:
        super().__init__(f"{why}; use {options} to continue")
        self.number = number


class LineSource:
    """A file, or standard input, that is read from its beginning or from a place in it."""

    def __init__(self, name: str, *, end: bytes, limit_bytes: int, held: Held) -> None:
        self.name = INPUT if name == "-" else name
        self.end, self._limit, self._held = end, limit_bytes, held
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
            found = block.rfind(self.end)
            place = place - 1 - len(block)
            if found >= 0:
                return place + found + 1
        return 0

    def line_number(self, start: int, number: int) -> int:
        """The number in the whole file of a line that has this `number` when counting begins at the place `start`."""
        places = range(0, start, STEP_BYTES)
        return number + sum(os.pread(self._fd, min(STEP_BYTES, start - at), at).count(self.end) for at in places)

    # --- reading -----------------------------------------------------------------------------------------

    def portions(
        self, start: int = 0, *, long_lines: LongLines = "stop", known_end: int = 0, leave_open_end: bool = False
    ) -> Iterator[Portion]:
        """The lines from the place `start` on, at which a line begins.

        A line above the limit ends the reading (`RefusedLine`), is skipped, or is split into pieces of the limit. An
        earlier reading has decided about lines that begin before `known_end`. `LogError` if the file is cut while it is
        read.
        """
        self._long, self._known_end = long_lines, known_end
        self.skipped = 0  # lines that were too long
        self.has_open_end = False  # True if the last line had no end yet, and was left
        self._place = start  # of the next byte to read, and in `_cut` of the next one to cut
        self._number = 1  # of the line that is being read
        self._rest: list[bytes] = []  # the parts of that line that were read
        self._rest_bytes = 0
        self._skipping = False  # True in a line that was too long
        self._is_split = False  # True in a line of which a piece was yielded
        while data := self._read():
            yield from self._cut(data)
        if self.is_file:
            if self._held.number is not None:
                return
            if self.size_bytes < self._place:
                raise LogError(f"{self.name} was cut at byte {self.size_bytes:,} while it was read; read it again")
        if self._rest and leave_open_end:
            self.has_open_end = True
        elif self._rest_bytes:
            line = b"".join(self._rest)
            yield Portion([line], self._number, self._place - len(line), [self._place], self._is_split)

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
        *lines, rest = data.split(self.end)
        if lines and (self._rest or self._skipping):
            yield from self._ended(lines.pop(0))
        while lines:
            fitting = len(lines)  # the number of lines before the first one that is too long
            if len(max(lines, key=len)) > self._limit:
                fitting = next(at for at, line in enumerate(lines) if len(line) > self._limit)
            if fitting:
                start, *ends = accumulate([len(line) + 1 for line in lines[:fitting]], initial=self._place)
                yield Portion(lines[:fitting], self._number, start, ends)
                self._number += fitting
                self._place = ends[-1]
            for line in lines[fitting : fitting + 1]:
                yield from self._ended(line)
            lines = lines[fitting + 1 :]
        yield from self._keep(rest)

    def _ended(self, last: bytes) -> Iterator[Portion]:
        """Yield the line that was kept, with its last part."""
        yield from self._keep(last)
        self._place += 1  # the line's end
        if self._rest:
            line = b"".join(self._rest)
            yield Portion([line], self._number, self._place - 1 - len(line), [self._place], self._is_split)
        self._number += 1
        self._rest, self._rest_bytes, self._skipping, self._is_split = [], 0, False, False

    def _keep(self, part: bytes) -> Iterator[Portion]:
        """Keep a part of a line until the line's end is read. The pieces of a long line are yielded or dropped."""
        is_known = self._place < self._known_end
        self._place += len(part)
        if self._skipping or not part:
            return
        self._rest.append(part)
        self._rest_bytes += len(part)
        if self._rest_bytes <= self._limit:
            return
        if self._long == "stop" and not is_known:
            why = f"it has more than {self._limit:,} bytes, the longest allowed line"
            raise RefusedLine(self._number, why, "--long-lines split or skip")
        if self._long != "split":
            self.skipped += not is_known
            self._skipping = True
            self._rest, self._rest_bytes = [], 0
            return
        line = b"".join(self._rest)
        start, most = self._place - len(line), (len(line) - 1) // self._limit * self._limit
        for at in range(0, most, self._limit):
            piece = line[at : at + self._limit]
            yield Portion([piece], self._number, start + at, [start + at + self._limit], self._is_split)
            self._is_split = True
        self._rest, self._rest_bytes = [line[most:]], len(line) - most


@contextmanager
def whole_file(name: str, held: Held) -> Iterator[int]:
    """A descriptor of a file, or of standard input, that can be read at any position.

    What cannot, such as a pipe, is first copied to a file without a name. A signal ends that, since nothing is lost.
    """
    with ExitStack() as opened:
        with held.loose():
            fd = 0 if name == "-" else os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
            if fd:
                opened.callback(os.close, fd)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                fd = _copied(fd, opened.enter_context(REAL.closing(nameless_file())))
        yield fd


def _copied(source: int, to: int) -> int:
    position = 0
    while block := os.read(source, STEP_BYTES):
        REAL.write_all(to, [block], position)
        position += len(block)
    return to
