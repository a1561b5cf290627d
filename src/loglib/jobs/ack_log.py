"""Ack log: the file of a share in one partition, as one process writes and reads it.

Invariant: every member appends to the file, and every member replays it. The order in the file decides, so there is no
lock, no leader, and nobody to wait for. A generation ends with its seal, or with the first bytes that are no entry:
what comes after has no effect. Whoever sees the end makes the next generation; the first one to link it decides.

    sealed                                  more than `_LOG_BYTES` of entries, or the share is altered or reset
    torn                                    a full disk has left a part of an entry: the next entry ends the file
    of another boot                         the clocks of its leases are gone: it is sealed when it is opened
    with other names                        a copy of hard links shares it: each of both makes its own next generation

A file that somebody has linked late, with a number that others have left long ago, is older than the newest one: only
the highest number counts, and it is looked for before and after a file is opened.

Threads: one at a time; the share's lock is held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, groupby
from operator import length_hint
from typing import NamedTuple

from ..errors import CorruptLogError, LogMovedError
from ..system.clock import Clock
from ..system.directory import Directory
from ..system.failures import refused_write
from ..system.files import Files
from ..system.not_copyable import NotCopyable
from ..system.process import finish
from .entries import ENTRY_BYTES, MOST_TOGETHER, PIN, PLAIN, RESET, SEAL, encode
from .generation import Checkpoint, Place, decode, file_name, first_entry, generation_of
from .known_places import KnownPlace
from .state import Counts, State, Taken, items_of

logger = logging.getLogger("loglib")

_BLOCK_BYTES = 1 << 14  # of one read: for more than 128 KiB, malloc asks the system for pages at each look
_LOG_BYTES = (1 << 20) - (1 << 16)  # of entries in a generation; the rest of a MiB is for those that have not seen it
_MORE_FOR_EACH = 24  # bytes of entries for each unsettled record: a large checkpoint is not made after few entries
_TRIES = 100  # a member that is slower than all others for that many generations gives up
_ASIDE = ".tmp"


class Pin(NamedTuple):
    """Records of one hand that a transaction settles, and how."""

    member: int
    token: int
    offset: int
    size: int  # records, with consecutive offsets
    outcome: int  # of the entry that ends the pin

    @property
    def records(self) -> tuple[int, int, int, int]:
        """The arguments of `State.pinned`."""
        return self.token, self.member, self.offset, self.size


def pins_of(member: int, token: int, offsets: Sequence[int], outcome: int) -> list[Pin]:
    """The records with these rising offsets, in as few pins as possible."""
    runs = groupby(zip(offsets, count(), strict=False), lambda pair: pair[0] - pair[1])
    found: list[Pin] = []
    for _, run in runs:
        each = [offset for offset, _ in run]
        parts = (each[first : first + MOST_TOGETHER] for first in range(0, len(each), MOST_TOGETHER))
        found += [Pin(member, token, part[0], len(part), outcome) for part in parts]
    return found


class _AckFile(NotCopyable):
    """The open file of a generation, until the last reference is gone."""

    _close: Iterator[tuple[Callable[[int], object], int]] = iter(())

    def __init__(self, files: Files, fd: int) -> None:
        self.fd = fd
        self._close = iter([(files.close, fd)])

    def close(self) -> None:
        if length_hint(self._close):
            finish(self._close)

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


class _Current(NamedTuple):
    """The newest generation, as it was read up to now."""

    file: _AckFile
    salt: int
    state: State
    checkpoint: Checkpoint
    path: str


class AckLog(NotCopyable):
    """The file of a share in one partition."""

    _closed = False

    def __init__(
        self, files: Files, path: str, place: Place, me: int, clock: Clock, permissions: int,
        next_history: Callable[[int, Sequence[KnownPlace]], int],
    ) -> None:  # fmt: skip
        """Open the newest generation, and replay it. With `me` 0 it only looks, and writes nothing.

        `next_history` is that of known_places.py, for the partition's log.
        """
        self.place = place
        self._next_history = next_history
        self._files = files
        self._path = path
        self._me = me
        self._clock = clock
        self._permissions = permissions
        self._directory = Directory.open(files, path)
        self._synced = 0  # the generation whose name is known to be durable
        self.last_seal: tuple[int, int, int, int] | None = None  # of the last generation that this process saw end
        self._position = 0  # of the next entry to be read
        self._is_whole = False  # False in the middle of a replay: an interrupt would leave half of it
        try:
            self._use(self._load())
            self._is_whole = True
            if self._me and (self._is_of_another_boot() or self._has_other_names()):
                self.seal()
            self.look()
        except BaseException:
            self.close()
            raise

    # --- reading ---------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint:
        """The begin of the present generation."""
        return self._current.checkpoint

    def look(self) -> State:
        """Apply the entries that were written since the last look, and follow the seals; returns the state."""
        if not self._is_whole:
            self._read_again()
        self._is_whole = False
        tried = -1
        while True:
            state = self.state
            block = self._files.pread(self._current.file.fd, _BLOCK_BYTES, self._position)
            used = state.apply(block, self.salt) if block else 0
            self._position += used
            if state.sealed and (self._me or self._newest() > state.generation):
                self._go_on()
            elif (used == len(block) and used < _BLOCK_BYTES) or (used < len(block) and not self._me):
                self._is_whole = True
                return state
            elif used < len(block):
                tried = self._end_at_damage(self._position, tried=tried)

    def _is_of_another_boot(self) -> bool:
        return self.checkpoint.moment.boot_id != self._clock.moment().boot_id

    def _has_other_names(self) -> bool:
        """True if the file is also that of a copy of the topic that was made of hard links, or was just linked."""
        return self._files.fstat(self._current.file.fd).st_nlink > 1

    def _end_at_damage(self, position: int, *, tried: int) -> int:
        """Bytes that are no entry end the generation: after a full disk, a power cut, or damage."""
        if tried != position:  # it also completes a part of an entry, and ends the file if the damage was none
            self.append([self._seal_entry()])
            return position
        logger.warning("%s, byte %d: no entry of a share; a new generation begins", self._current.path, position)
        self._current.state.sealed = True
        self._go_on()
        return -1

    def _read_again(self) -> None:
        """Replay the generation from its begin, after an interrupt."""
        taken = self._current.state.taken
        self._use(self._load())
        self.state.taken |= taken

    def _use(self, current: _Current) -> None:
        self._current = current
        self.salt, self.state = current.salt, current.state  # once more: they are asked for many times for each job

    def _go_on(self) -> None:
        """Go to the newest generation, after the end of this one. Make it if there is none."""
        state = self._current.state
        if self._newest() <= state.generation:
            self._make_next()
        self.last_seal = state.seal
        after = self._load()
        for token in state.mine - after.state.mine:
            state.taken[token] = Taken("this process was stopped meanwhile", state.hands[token].offsets())
        after.state.taken |= state.taken
        after.state.ended.extendleft(reversed(state.ended))
        self._use(after)

    def _newest(self) -> int:
        names = self._directory.names()
        return max([number for name in names if (number := generation_of(name)) is not None], default=0)

    def _load(self) -> _Current:
        """Open the newest generation. Nothing of it is applied yet."""
        for _ in range(_TRIES):
            newest = self._newest()
            if not newest:
                self.check_named()
                raise CorruptLogError(self._path, 0, "no file of a share", "at least one generation")
            path, within = self._directory.path_of(file_name(newest)), self._directory.fd
            open_file = self._files.open_append if self._me else self._files.open_read
            try:
                opened = open_file(path, dir_fd=within)
            except FileNotFoundError:  # others have made the next one
                continue
            file = _AckFile(self._files, opened)
            if self._newest() != newest:
                continue
            content = self._files.read_at(file.fd, self._files.size(file.fd), 0)
            _, fresh, _, settings, counts, _, items = checkpoint = decode(content, path, self.place, newest)
            state = State(self._me, newest, fresh, settings, counts, items)
            self._position = first_entry(len(items))
            return _Current(file, self.place.salt(newest), state, checkpoint, path)
        raise CorruptLogError(self._path, 0, f"a new generation at each of {_TRIES} looks", "one that stays")

    # --- writing ---------------------------------------------------------------------------------------

    def encode(
        self, kind: int, outcome: int = 0, count: int = 0, moment: int = 0, offset: int = 0, token: int = 0
    ) -> bytes:
        """An entry for the generation that was read last."""
        return encode(self._current.salt, kind, outcome, count, moment, offset, token)

    def append(self, entries: list[bytes]) -> None:
        """Append the entries in one write. Handed to the system. The next look shows if they count.

        `StorageFullError` and `StorageIOError` if they were not written, or only in part.
        """
        data = b"".join(entries)
        try:
            written = self._files.append(self._current.file.fd, data)
            if written < len(data):  # the next append tells why
                self._files.append(self._current.file.fd, data[written:])
        except OSError as error:
            doing = "writing what a member of a share has begun or settled"
            raise refused_write(self._current.path, error, doing) from error

    def _seal_entry(self, outcome: int = PLAIN, **fields: int) -> bytes:
        return self.encode(SEAL, outcome, **fields)

    def seal(self, outcome: int = PLAIN, **fields: int) -> None:
        """End the generation. The next look makes the next one."""
        self.append([self._seal_entry(outcome, **fields)])

    def reset(self, offset: int) -> None:
        """Begin again at the offset: end the generation, and see that this seal counts. Others may seal it first."""
        while self.last_seal != (RESET, 0, offset, 0):
            self.seal(RESET, offset=offset)
            self.look()

    def end_pins(self, pins: Sequence[Pin]) -> None:
        """Say how the transaction has ended that settles these records. Synced. Only what is pinned changes.

        An entry that lands after a seal is written again.
        """
        state = self.look()
        while left := [each for each in pins if state.pinned(*each.records)]:
            self.append([
                self.encode(PIN, each.outcome, each.size, moment=each.member, offset=each.offset, token=each.token)
                for each in left
            ])  # fmt: skip
            state = self.look()
        self.sync()

    def is_long(self) -> bool:
        """True if the generation has that many entries that a new one is due."""
        state = self._current.state
        written = state.entries * ENTRY_BYTES
        return written >= _LOG_BYTES and written >= _LOG_BYTES + _MORE_FOR_EACH * state.unsettled

    def sync(self) -> None:
        """Make durable what was read and written. Synced."""
        generation = self._current.state.generation
        if self._synced != generation:
            self._directory.sync()
            self._synced = generation
        self._files.datasync(self._current.file.fd)

    def _make_next(self) -> None:
        """Write the next generation aside, and link it, unless another member has been quicker."""
        state, before, moment = self._current.state, self.checkpoint.moment, self._clock.moment()
        generation = state.generation + 1
        checkpoint = Checkpoint(
            generation, state.fresh, self._history_at_fresh(), state.settings, Counts(*state.counts), before,
            sorted(items_of(state), key=lambda item: (item.token, item.offset)),
        )  # fmt: skip
        checkpoint = (
            checkpoint._replace(moment=moment) if moment.boot_id == before.boot_id else checkpoint.rebased(moment)
        )
        link(self._directory, self.place, checkpoint, self._permissions)
        self._synced = generation
        for name in self._directory.names():
            number = generation_of(name)
            is_left = name.startswith(".") and name.endswith(_ASIDE) and int(name.split(".")[1]) <= generation
            if is_left or (number is not None and number < generation):
                with suppress(FileNotFoundError):
                    self._directory.unlink(name)

    def known_places(self) -> list[KnownPlace]:
        """Return what the share knows of the partition's log."""
        return [(self.checkpoint.fresh, self.checkpoint.history), self._current.state.passed]

    def _history_at_fresh(self) -> int:
        """The chain that identifies the log up to `fresh`. After a reset it is that of the present log."""
        state = self._current.state
        is_reset = state.seal is not None and state.seal[0] == RESET
        return self._next_history(state.fresh, () if is_reset else self.known_places())

    # --- end -------------------------------------------------------------------------------------------

    def check_named(self) -> None:
        """`LogMovedError` if the path no longer leads to this directory."""
        if not self._directory.is_named():
            raise LogMovedError(self._path, "was moved or removed")

    def close(self) -> None:
        """Close the files."""
        current: _Current | None = getattr(self, "_current", None)
        if current is not None:
            current.file.close()
        if not self._closed:
            self._closed = True
            self._directory.close()


def link(directory: Directory, place: Place, checkpoint: Checkpoint, permissions: int) -> None:
    """Give a generation its file, unless another process has done so. Synced."""
    name = file_name(checkpoint.generation)
    aside = f".{checkpoint.generation}.{directory.files.random_bytes(8).hex()}{_ASIDE}"
    try:
        directory.write_new(aside, checkpoint.encode(place), permissions)
        with suppress(FileExistsError, FileNotFoundError):  # another one was quicker, and has removed what it found
            directory.link(aside, name)
    except OSError as error:
        raise refused_write(directory.path_of(name), error, "beginning a new generation of a share's file") from error
    finally:
        with suppress(FileNotFoundError):
            directory.unlink(aside)
    directory.sync()
