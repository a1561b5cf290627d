"""Staging: the records of a transaction before its commit, as whole encoded batches.

Invariant: staged records are in no log. A piece (batches for one partition) is a small log of its own: its offsets
begin at 0, each batch names the CRC of the one before it, and the checksums are salted for the partition that will
get it. So a piece that was cut, mixed up or sent to another partition is detected before it is applied.

    up to 1 MiB in all     in memory, and then in the manifest of the transaction
    more                   <topic>/staging/<attempt>/<partition>, with pieces of about 1 MiB, and
                           <topic>/staging/<attempt>/<partition>-1, -2 ... for the pieces after the first one

The files after the first one are laid out as segments: 4096 bytes of zeros, and then the batches. A large one (16 MiB
or a quarter of a segment) has a copy of its headers beside it, in <partition>-1.headers. It becomes a segment without
being copied: its headers are rewritten in place. The copy is for a process that continues after a crash, since a
torn header would be the only one. The first piece is always copied, so that the segment before the new one has a batch.

The name of an attempt is random, so no file is ever written by two attempts. A directory of an attempt that no
manifest names is removed when it is a day old.

Threads: a stage belongs to one thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ..append.batching import Load, chunks, encode_all
from ..append.open_batch import OpenBatch
from ..config.policies import TopicConfig
from ..errors import CorruptLogError, ForkedHandleError, LogError, LogMovedError
from ..format.chain import End
from ..format.codec import codec_id
from ..format.header import (
    HEADER_BYTES,
    NO_PRODUCER,
    BadBatch,
    Body,
    Header,
    NewerBatch,
    check_body,
    encode_body,
    parse_header,
    stamp,
)
from ..log.recovery import Tail
from ..segment import HEADER_BYTES as SEGMENT_HEADER_BYTES
from ..segment import Identity
from ..system.failures import refusing_full_disk
from ..system.files import Buffer, Files
from ..system.lock import Lock, try_acquire
from ..system.not_copyable import NotCopyable

STAGING = "staging"  # the subdirectory in a topic's directory
HEADERS = ".headers"  # added to the name of a staged file
_SMALL_BYTES = 1 << 20  # staged in memory, of one transaction
_LARGE_BYTES = 16 << 20  # of a piece: to copy it takes about 80 ms, to make a segment of it 15 ms
_ORPHAN_S = 24 * 3600
_MOST_PARTS = 1000  # of one write: the system takes 1,024
_EMPTY = Tail(0, 0, 0, 0, 0, 0, 0)  # of a log without a batch


class Portion(NotCopyable):
    """A piece, while batches are added to it."""

    def __init__(self, name: str, at: int) -> None:
        self.name = name  # of its file, if it gets one
        self.at = at  # first byte in that file
        self.size_bytes = 0  # of all its batches
        self.parts: list[Buffer] = []  # encoded batches that are not in the file
        self.buffered_bytes = 0  # of these
        self.headers: list[bytes] = []
        self.last = (0, 0)  # CRC and length of the last batch
        self.fd = -1
        self.is_segment = False  # its headers are in a file, too

    @property
    def batches(self) -> int:
        return len(self.headers)

    def take(self) -> bytes:
        """Return the batches in memory, and forget them."""
        content = b"".join(self.parts)
        self.parts, self.buffered_bytes = [], 0
        return content

    def drain(self, files: Files, fd: int, at: int) -> None:
        """Write the batches in memory to byte `at` of an open file, and forget them. Handed to the system."""
        parts, self.parts, self.buffered_bytes = self.parts, [], 0
        for start in range(0, len(parts), _MOST_PARTS):
            at += files.write_all(fd, parts[start : start + _MOST_PARTS], at)

    def write(self, files: Files, directory: str, permissions: int) -> None:
        """Write the batches in memory to the file, which is made if there is none. Handed to the system."""
        if self.fd < 0:
            files.make_directories(directory, permissions)
            self.fd = files.create(os.path.join(directory, self.name), permissions)
            if self.at:
                files.write_all(self.fd, [bytes(self.at)], 0)
        with refusing_full_disk(os.path.join(directory, self.name)):
            self.drain(files, self.fd, self.at + self.size_bytes - self.buffered_bytes)

    def sync(self, files: Files, directory: str, permissions: int, *, large_bytes: int) -> None:
        """Make the file durable, except its name. A large one gets a copy of its headers. Synced.

        `LogMovedError` if its name does not lead to it: what is committed could not be applied.
        """
        path = os.path.join(directory, self.name)
        if not files.same_file(self.fd, path):
            raise LogMovedError(path, "was removed, or another file put in its place: nothing is committed")
        files.datasync(self.fd)
        if self.at and self.size_bytes >= large_bytes:
            path += HEADERS
            files.fill(files.create(path, permissions), b"".join(self.headers))
            self.is_segment = True

    def close(self, files: Files) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            files.close(fd)


class Staged(NotCopyable):
    """The section of one partition, while records are added to it.

    Without `copies` the bodies that are added are not copied: their memory must not change until they are written.
    """

    def __init__(
        self, topic_path: str, identity: Identity, config: TopicConfig, now: Callable[[], int], *, copies: bool = True
    ) -> None:
        self.topic_path = topic_path
        self.identity = identity
        self.portions = [Portion(f"{identity.partition:04d}", 0)]
        self._config = config
        self._codec = codec_id(config.compression)
        self._now = now
        self._copies = copies
        self._open = self._new_batch()  # not yet encoded records

    def _new_batch(self) -> OpenBatch:
        batch = OpenBatch(_EMPTY, self.identity.partition)
        batch.take_up_to(self._config.batch_records, self._config.batch_bytes)
        return batch

    @property
    def batches(self) -> int:
        """The number of all encoded batches."""
        return sum(each.batches for each in self.portions)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of encoded batches in memory."""
        return sum(each.buffered_bytes for each in self.portions)

    @property
    def large_bytes(self) -> int:
        """From this size on a piece becomes a segment."""
        return min(_LARGE_BYTES, self._config.roll_bytes // 4)

    def add(self, load: Load) -> None:
        """Add the records of one call. Raises the errors of `check_columns`; then none of them is added."""
        columns, size_bytes = load
        config = self._config
        if size_bytes is None:
            bodies = [body for _, body in encode_all({0: columns}, config, self._codec)]  # all are checked first
            for body in bodies:
                self.add_body(body)
        elif 2 * size_bytes >= config.batch_bytes or len(columns.values) > config.batch_records:
            self.seal()
            for chunk in chunks(columns, config):
                self._stage(encode_body(chunk, codec=self._codec))
        else:
            self._open.extend(columns, size_bytes)
            if self._open.is_full():
                self.seal()

    def seal(self) -> None:
        """Encode the records that are not yet encoded."""
        if self._open.values:
            columns, self._open = self._open.columns(self._now()), self._new_batch()
            for chunk in chunks(columns, self._config):
                self._stage(encode_body(chunk, codec=self._codec))

    def add_body(self, body: Body) -> None:
        """Add an encoded batch after all records that were added before."""
        self.seal()
        self._stage(body)

    def _stage(self, body: Body) -> None:
        portion = self.portions[-1]
        limit = _SMALL_BYTES if len(self.portions) == 1 else self._config.roll_bytes
        if portion.size_bytes and portion.size_bytes + body.length > limit:
            portion = self.cut()
        now, at = self._now(), portion.size_bytes
        header, crc = stamp(
            body,
            base_offset=at,
            durable_up_to=0,
            writer_epoch=0,
            writer_nonce=0,
            previous_crc=portion.last[0],
            previous_bytes=portion.last[1],
            jump_offset=at,
            append_time=now,
            event_time=now,
            running_max_timestamp=now if body.max_timestamp is None else body.max_timestamp,
            producer=NO_PRODUCER,
            producers_in_segment=False,
            salt=self.identity.salt,
        )
        portion.parts += [header, *(map(bytes, body.parts) if self._copies else body.parts)]
        portion.headers.append(header)
        portion.last = crc, body.length
        portion.size_bytes += body.length
        portion.buffered_bytes += body.length

    def cut(self) -> Portion:
        """Begin another piece."""
        portion = Portion(f"{self.identity.partition:04d}-{len(self.portions)}", SEGMENT_HEADER_BYTES)
        self.portions.append(portion)
        return portion


class Stage(NotCopyable):
    """All staged records of one transaction."""

    def __init__(self, files: Files, now: Callable[[], int]) -> None:
        self.attempt = files.random_bytes(16).hex()
        self._pid = os.getpid()
        self._files = files
        self._now = now
        self._sections: dict[tuple[str, int], Staged] = {}
        self._spilled = False
        self._permissions = 0o600
        self._locks: dict[str, Lock | None] = {}  # of its directories, by topic: a locked one is not swept

    def check_not_forked(self, what: str) -> None:
        """`ForkedHandleError` in a forked child: the files are its parent's."""
        if os.getpid() != self._pid:
            raise ForkedHandleError(what, self._pid)

    def section(self, topic_path: str, identity: Identity, config: TopicConfig) -> Staged:
        """The section of a partition."""
        self._permissions = config.permissions
        key = topic_path, identity.partition
        if key not in self._sections:
            self._sections[key] = Staged(topic_path, identity, config, self._now)
        return self._sections[key]

    def sections(self) -> list[Staged]:
        """The sections that have records, all encoded."""
        for each in self._sections.values():
            each.seal()
        return [each for each in self._sections.values() if each.batches]

    def spill(self, *, last: bool = False) -> bool:
        """Write the batches in memory to files above 1 MiB, and with `last` if others are. True if there are files."""
        if sum(each.buffered_bytes for each in self._sections.values()) > _SMALL_BYTES:
            self._spilled = True
        elif not (self._spilled and last):
            return self._spilled
        for section in self._sections.values():
            self._lock(section)
            for portion in section.portions:
                if portion.parts:
                    portion.write(self._files, self._directory(section), self._permissions)
        return True

    def _lock(self, section: Staged) -> None:
        if section.topic_path not in self._locks and any(each.parts for each in section.portions):
            self._files.make_directories(self._directory(section), self._permissions)
            self._locks[section.topic_path] = try_acquire(self._files, self._directory(section))

    def _directory(self, section: Staged) -> str:
        return directory_of(section.topic_path, self.attempt)

    def sync(self) -> None:
        """Make the files durable, with their names. Synced."""
        topics = set()
        for section in self._sections.values():
            for portion in section.portions:
                if portion.fd >= 0:
                    directory, large_bytes = self._directory(section), section.large_bytes
                    portion.sync(self._files, directory, self._permissions, large_bytes=large_bytes)
                    topics.add(section.topic_path)
        for path in topics:
            sync_names(self._files, path, self.attempt)

    def close(self) -> None:
        """Close the files."""
        with ExitStack() as closing:
            for portion in [each for section in self._sections.values() for each in section.portions]:
                closing.callback(portion.close, self._files)
            for lock in [each for each in self._locks.values() if each is not None]:
                closing.callback(lock.release)

    def discard(self) -> None:
        """Close and remove the files. A forked child only closes them: its parent may commit them."""
        self.close()
        if self._spilled and os.getpid() == self._pid:
            for path in {each.topic_path for each in self._sections.values()}:
                remove_attempt(self._files, path, self.attempt)


def each_header(headers: bytes) -> Iterator[bytes]:
    """The bytes of each header in a copy of all headers."""
    return (headers[at : at + HEADER_BYTES] for at in range(0, len(headers), HEADER_BYTES))


def read_headers(
    read_next: Callable[[int], bytes], size_bytes: int, identity: Identity, path: str, *, at: int
) -> Iterator[Header]:
    """The checked headers of a piece, in order. Errors as of `read_section`.

    `read_next(position)` gives the bytes of the next header, which is at this position in the piece.
    """
    end = End(0, 0, 0)
    while end.end < size_bytes:
        try:
            header = parse_header(read_next(end.end), 0, salt=identity.salt, offset=end.end)
            end.check(header)
            if header.next_offset > size_bytes:
                raise BadBatch(12, f"length {header.length}", f"at most {size_bytes - end.end}")
        except BadBatch as error:
            raise error.in_file(path, at + end.end) from error
        except NewerBatch as error:
            raise CorruptLogError(path, at + end.end, f"{error.what} {error.found}", str(error.supported)) from error
        yield header
        end = End.after(header)


def read_section(
    read: Callable[[int, int], bytes],
    size_bytes: int,
    identity: Identity,
    path: str,
    *,
    at: int,
    headers: bytes | None = None,
) -> Iterator[tuple[Header, bytes]]:
    """The checked batches of a piece. `read(position, size)` gives its bytes; it begins at byte `at` of `path`.

    `headers`: the copy of its headers, if those in the file may have been rewritten. Raises `CorruptLogError` if
    the piece is not whole, or was made for another partition.
    """
    copied = None if headers is None else each_header(headers)

    def read_next(position: int) -> bytes:
        return read(position, HEADER_BYTES) if copied is None else next(copied, b"")

    for header in read_headers(read_next, size_bytes, identity, path, at=at):
        position = header.base_offset + HEADER_BYTES
        body = read(position, header.length - HEADER_BYTES)
        found = at + position + len(body)
        if found < at + header.next_offset:
            raise CorruptLogError(path, found, "the end of the file", f"a batch of {header.length} bytes")
        try:
            check_body(header, body)
        except BadBatch as error:
            raise error.in_file(path, at + header.base_offset) from error
        yield header, body


def directory_of(topic_path: str, attempt: str) -> str:
    """The directory of the files that an attempt has staged in a topic."""
    return os.path.join(topic_path, STAGING, attempt)


def sync_names(files: Files, topic_path: str, attempt: str) -> None:
    """Make the names of an attempt's files durable. Synced."""
    for path in (directory_of(topic_path, attempt), os.path.join(topic_path, STAGING), topic_path):
        files.sync_directory(path)


def remove_attempt(files: Files, topic_path: str, attempt: str) -> None:
    """Remove the directory of an attempt, if it is there."""
    files.remove_tree(directory_of(topic_path, attempt))


def sweep(files: Files, topic_path: str, pending: Callable[[], set[str]], *, now_s: float) -> None:
    """Remove the attempts of a day ago and before that no process holds, but those which `pending` names.

    Who commits an attempt holds it until the commit. So `pending` is asked while this process has the lock: a commit
    that came before is among what it says.
    """
    parent = os.path.join(topic_path, STAGING)
    with suppress(FileNotFoundError):
        for name in files.names_in(parent):
            path = os.path.join(parent, name)
            with suppress(FileNotFoundError):  # its own process has removed it
                if not _is_old(files, path, now_s):
                    continue
                lock = try_acquire(files, path)
                if lock is not None:
                    try:
                        if name not in pending():
                            files.remove_tree(path)
                    finally:
                        lock.release()


@contextmanager
def held_attempts(files: Files, topic_path: str, attempts: Iterable[str], *, now_s: float) -> Iterator[None]:
    """Hold those of the attempts that might be swept. `LogError` for one that is just being swept.

    Only old ones are locked: a write may have thousands, and each lock takes a descriptor.
    """
    with ExitStack() as held:
        for name in attempts:
            path = directory_of(topic_path, name)
            with suppress(FileNotFoundError):
                if _is_old(files, path, now_s + _ORPHAN_S / 2):
                    lock = try_acquire(files, path)
                    if lock is None:
                        raise LogError(f"{path} is a day old, and is just being removed: nothing is committed")
                    held.callback(lock.release)
        yield


def _is_old(files: Files, path: str, now_s: float) -> bool:
    facts = files.facts(path)
    return stat.S_ISDIR(facts.st_mode) and facts.st_mtime < now_s - _ORPHAN_S
