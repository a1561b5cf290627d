"""Crash: the states that a power cut may leave on a disk, for every instant of a program that ran on `CrashFS`.

Invariant: a state has every byte and name that was synced before the cut, and any part of the operations
that were not synced. It never has a part of an operation that had not begun.

The model, in its strict mode, assumes only what the standards guarantee:

    bytes and size of a file    durable after that file is synced
    a name (made, linked, renamed, removed)    durable after its directory is synced
    a pending operation         done or not, independent of the others and of their order
    a pending write             also torn, by sectors of 512 bytes or pages of 4096: each is new, as before,
                                zeros (the size was there first) or garbage
    a pending rename            whole or not at all, with or without the file's data

The mode "linux" also assumes what ext4 and XFS do: syncing a file makes its name durable. Both modes assume
that a write damages no bytes beside its own, even within its sector, and that a sector that is overwritten
with the same bytes keeps them.

A killed process leaves everything that it had handed to the system, synced or not. This is the state of an
instant in which no operation is missing.

Threads: states may be enumerated when the program has ended.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from random import Random
from typing import Literal, NamedTuple

from ..system.files import Buffer
from .memory import MemoryFiles, Node

SECTOR_BYTES = 512
PAGE_SECTORS = 8
_ROOT = 1
_DATA = ("write", "truncate")
_GARBAGE = Random("what was in the block before").randbytes(1 << 16)

Mode = Literal["strict", "linux"]
# The result for each sector of a write, one letter per sector: New, as it was Before, Zeros, Garbage.
Tear = str


class Operation(NamedTuple):
    """One requested change to the disk, or one sync."""

    name: str  # create, mkdir, write, truncate, rename, link, unlink, rmdir or sync
    path: str
    node: int  # number of the file or directory
    parent: int = 0  # of a name: its directory
    position: int = 0  # of a write; for a truncate, the size
    data: bytes = b""
    target: str = ""  # of a rename or link: the new name
    target_parent: int = 0

    def __str__(self) -> str:
        text = f"{self.name} {self.path}"
        if self.name == "write":
            return f"{text} [{self.position}, {self.position + len(self.data)})"
        if self.name == "truncate":
            return f"{text} to {self.position}"
        return f"{text} to {self.target}" if self.target else text


@dataclass(slots=True, eq=False)
class Image:
    """The contents of a disk: the bytes of each file and the names in each directory, by node number."""

    contents: dict[int, bytes]
    names: dict[int, dict[str, int]]

    @classmethod
    def empty(cls) -> Image:
        """The image of an empty disk."""
        return cls({}, {_ROOT: {}})

    @classmethod
    def of(cls, tree: dict[str, bytes]) -> Image:
        """The image of a disk with these files, by path; a path that ends in / is an empty directory."""
        image = cls.empty()
        number = _ROOT
        for path, content in tree.items():
            directory = _ROOT
            *parents, name = path.lstrip("/").split("/")  # no name after a / at the end
            for each in parents:
                if each not in image.names[directory]:
                    number += 1
                    image.names[directory][each] = number
                    image.names[number] = {}
                directory = image.names[directory][each]
            if name:
                number += 1
                image.names[directory][name] = number
                image.contents[number] = bytes(content)
        return image

    def tree(self) -> dict[str, bytes]:
        """The content of each file by its path. An empty directory has a path that ends in /."""
        return dict(self._walk(_ROOT, "/"))

    def _walk(self, directory: int, path: str) -> Iterator[tuple[str, bytes]]:
        for name, number in sorted(self.names[directory].items()):
            if number not in self.names:
                yield path + name, self.contents.get(number, b"")
            elif self.names[number]:
                yield from self._walk(number, f"{path}{name}/")
            else:
                yield f"{path}{name}/", b""

    def digest(self, directory: str = "/", *, leaving_out: tuple[str, ...] = ()) -> int:
        """A digest of 64 bits of the whole image, or of the part below a directory.

        It ignores the content of files whose names are in `leaving_out`.
        """
        summary = blake2b(digest_size=8)
        number = _ROOT
        for name in directory.split("/"):
            number = self.names[number][name] if name else number
        self._add_to(summary, number, leaving_out)
        return int.from_bytes(summary.digest(), "little")

    def _add_to(self, summary: blake2b, directory: int, leaving_out: tuple[str, ...]) -> None:
        names = self.names
        for name, number in sorted(names[directory].items()):
            if number in names:
                summary.update(b"%s/%d/" % (name.encode(), len(names[number])))
                self._add_to(summary, number, leaving_out)
            else:
                content = b"" if name in leaving_out else self.contents.get(number, b"")
                summary.update(b"%s:%d:" % (name.encode(), len(content)))
                summary.update(content)


class CrashFS(MemoryFiles):
    """A file system in memory that keeps the list of all changes and syncs, in order.

    `operations` is the list. Its length is the instant to which `CrashState.at` refers. So a test notes the
    length each time its program has acknowledged a record.
    """

    def __init__(self, image: Image | None = None, *, capacity: int | None = None) -> None:
        super().__init__(capacity=capacity)
        self.operations: list[Operation] = []
        self.before = Image.empty() if image is None else image
        if image is not None:
            named = [number for names in image.names.values() for number in names.values()]
            self._last_number = max([_ROOT, *image.contents, *image.names, *named])
            self._root = self._grow(image, _ROOT, {})

    def _grow(self, image: Image, number: int, grown: dict[int, Node]) -> Node:
        if number in grown:  # an unfinished rename may have left a file with two names
            grown[number].links += 1
            return grown[number]
        names = image.names.get(number)
        if names is None:
            content = image.contents.get(number, b"")
            self.used += len(content)
            node = Node(number, stat.S_IFREG | 0o600, content, None)
        else:
            entries = {name: self._grow(image, each, grown) for name, each in names.items()}
            node = Node(number, stat.S_IFDIR | 0o700, b"", entries)
        grown[number] = node
        return node

    def _changed(
        self, name: str, path: str, node: Node, parent: int = 0, position: int = 0, data: Buffer = b"",
        target: str = "", target_parent: int = 0,
    ) -> None:  # fmt: skip
        operation = Operation(name, path, node.number, parent, position, bytes(data), target, target_parent)
        self.operations.append(operation)

    def crash_states(
        self, *, mode: Mode = "strict", seed: int = 0, random: int = 4, since: int = 0
    ) -> Iterator[CrashState]:
        """The states that a power cut may leave, at each instant from operation `since` on; see `crash_states`."""
        return crash_states(self.before, self.operations, mode=mode, seed=seed, random=random, since=since)


class CrashState:
    """The state of the disk after a power cut. Each call of `files` returns a new `CrashFS` for recovery."""

    def __init__(self, at: int, disk: _Disk, kept: tuple[int, ...], torn: dict[int, Tear]) -> None:
        self.at = at  # operations begun before the cut
        self._disk = disk
        self._kept = kept
        self._torn = torn
        self.whole = len(kept) == len(disk.pending) and not torn  # the state after a killed process, without a cut
        self._image: Image | None = None

    @property
    def operations(self) -> list[Operation]:
        """The operations that began before the cut."""
        return self._disk.operations[: self.at]

    @property
    def image(self) -> Image:
        """The contents of the disk, to inspect, keep or compare."""
        if self._image is None:
            self._image = self._disk.image(self._kept, self._torn)
        return self._image

    @property
    def files(self) -> CrashFS:
        """A new file system with the contents of the disk."""
        return CrashFS(self.image)

    @property
    def key(self) -> tuple[int, tuple[tuple[int, Tear], ...]]:
        """The kept and torn operations. Equal states of one program have equal keys."""
        mask = self._disk.durable
        for number in self._kept:
            mask |= 1 << number
        return mask, tuple(sorted(self._torn.items()))

    def __repr__(self) -> str:
        operations, pending = self._disk.operations, self._disk.pending
        lines = [f"the cut came after operation {self.at} of {len(operations)}"]
        lines += [f"    lost: {operations[each]}" for each in pending if each not in self._kept]
        lines += [f"    torn: {operations[each]}, its sectors {tear}" for each, tear in sorted(self._torn.items())]
        return "\n".join(lines)


def crash_states(
    before: Image, operations: list[Operation], *, mode: Mode = "strict", seed: int = 0, random: int = 4, since: int = 0
) -> Iterator[CrashState]:
    """The states that a cut may leave after each prefix of the operations, on a disk that held `before`.

    Each prefix has these states: all pending operations done; none done; one missing; only one done; the last
    operation, if it is a write, torn at each sector; and `random` subsets with random tears, drawn with the seed.
    A state may come again at a later instant, when more may have been promised.
    """
    disk = _Disk(before, operations, mode)
    for at in range(len(operations) + 1):
        if at:
            disk = disk.after(at - 1)
        if at >= since:
            yield from _states(disk, at, Random(f"{seed}/{at}"), random)


def _states(disk: _Disk, at: int, choose: Random, count: int) -> Iterator[CrashState]:
    pending = disk.pending
    yield CrashState(at, disk, pending, {})
    if not pending:
        return
    yield CrashState(at, disk, (), {})
    if len(pending) > 1:
        for number in pending:
            yield CrashState(at, disk, tuple(each for each in pending if each != number), {})
            yield CrashState(at, disk, (number,), {})
    # Only the last operation is torn here, because earlier instants have given the tears of the others.
    for tear in _tears(disk.operations[pending[-1]]):
        yield CrashState(at, disk, pending, {pending[-1]: tear})
    for _ in range(count if len(pending) > 1 or disk.operations[pending[-1]].name == "write" else 0):
        likely = choose.random()
        kept = tuple(each for each in pending if choose.random() < likely)
        torn = {each: _random_tear(disk.operations[each], choose) for each in kept if choose.random() < 0.5}
        yield CrashState(at, disk, kept, {each: tear for each, tear in torn.items() if tear})


def _sectors(operation: Operation) -> int:
    """The number of sectors that a write touches; 0 for any other operation."""
    if operation.name != "write" or not operation.data:
        return 0
    last = operation.position + len(operation.data) - 1
    return last // SECTOR_BYTES - operation.position // SECTOR_BYTES + 1


def _borders(operation: Operation, width: int) -> list[int]:
    """The starts of the write's sectors or pages, and its end, counted in sectors from its first one."""
    sectors, first = _sectors(operation), operation.position // SECTOR_BYTES
    return [at for at in range(sectors) if at == 0 or (first + at) % width == 0] + [sectors] * bool(sectors)


def _tears(operation: Operation) -> Iterator[Tear]:
    """A write that is cut at each sector from either side, or with one bad sector or page."""
    sectors = _sectors(operation)
    borders = _borders(operation, 1 if sectors <= 4 * PAGE_SECTORS else PAGE_SECTORS)  # a large write: by pages
    for at in borders[1:-1]:
        yield "N" * at + "B" * (sectors - at)
        yield "B" * at + "N" * (sectors - at)
    for start, end in pairwise(borders):
        for kind in "ZG":
            yield "N" * start + kind * (end - start) + "N" * (sectors - end)
    if len(borders) > 2:
        yield "Z" * sectors
        yield "G" * sectors


def _random_tear(operation: Operation, choose: Random) -> Tear:
    borders = _borders(operation, choose.choice((1, PAGE_SECTORS)))
    tear = "".join(choose.choice("NNNBZG") * (end - start) for start, end in pairwise(borders))
    return tear if tear.strip("N") else ""


@dataclass(frozen=True, slots=True, eq=False)
class _Disk:
    """A disk at one instant: the durable contents, and the pending operations."""

    durable_image: Image
    operations: list[Operation]
    mode: Mode
    durable: int = 0  # the durable operations, one bit per operation
    pending: tuple[int, ...] = ()

    def after(self, number: int) -> _Disk:
        """The disk after this operation, too."""
        operation = self.operations[number]
        if operation.name != "sync":
            return replace(self, pending=(*self.pending, number))
        settled = self._settled_by(operation)
        if not settled:
            return self
        image = self.image(tuple(each for each in self.pending if each in settled), {})
        pending = tuple(each for each in self.pending if each not in settled)
        durable = self.durable | sum(1 << each for each in settled)
        return replace(self, durable_image=image, durable=durable, pending=pending)

    def _settled_by(self, sync: Operation) -> set[int]:
        """The pending operations that a sync of this file or directory makes durable."""
        settled = set()
        named = {sync.node} if self.mode == "linux" else set()
        for number in reversed(self.pending):
            operation = self.operations[number]
            if operation.name in _DATA:
                if operation.node == sync.node:
                    settled.add(number)
            elif (operation.target_parent or operation.parent) == sync.node:
                settled.add(number)
            elif operation.node in named:
                settled.add(number)
                named.add(operation.target_parent or operation.parent)
        return settled

    def image(self, kept: tuple[int, ...], torn: dict[int, Tear]) -> Image:
        """The contents of the disk if these pending operations have reached it."""
        contents, names = self.durable_image.contents.copy(), self.durable_image.names.copy()
        for number in kept:
            operation = self.operations[number]
            name, node = operation.name, operation.node
            if name == "write":
                contents[node] = _written(contents.get(node, b""), operation, torn.get(number))
            elif name == "truncate":
                content, size = contents.get(node, b""), operation.position
                contents[node] = content[:size] if size <= len(content) else content + bytes(size - len(content))
            elif name in ("create", "mkdir"):
                _add_name(names, operation.parent, operation.path, node)
                if name == "mkdir":
                    names.setdefault(node, {})
            else:
                if name != "link":
                    _remove_name(names, operation.parent, operation.path, node)
                if operation.target:
                    _add_name(names, operation.target_parent, operation.target, node)
        return Image(contents, names)


def _add_name(names: dict[int, dict[str, int]], directory: int, path: str, node: int) -> None:
    names[directory] = names.get(directory, {}) | {_last(path): node}


def _remove_name(names: dict[int, dict[str, int]], directory: int, path: str, node: int) -> None:
    """Remove a name, unless it is another node's by now."""
    kept = names.get(directory, {}).copy()
    if kept.get(_last(path)) == node:
        del kept[_last(path)]
    names[directory] = kept


def _written(content: bytes, operation: Operation, tear: Tear | None) -> bytes:
    """The content of a file after a write, or the rest that a tear leaves of it, has reached the disk."""
    position, data = operation.position, operation.data
    if tear is None:
        if position > len(content):
            content += bytes(position - len(content))
        return b"".join((content[:position], data, content[position + len(data) :]))
    changed = bytearray(content)
    start, end = position, position + len(data)
    for kind in tear:
        stop = min(start - start % SECTOR_BYTES + SECTOR_BYTES, end)
        new = data[start - position : stop - position]
        if kind != "B" and changed[start:stop] != new:  # bytes that are overwritten with the same bytes are safe
            if start > len(changed):
                changed.extend(bytes(start - len(changed)))
            if kind == "N":
                changed[start:stop] = new
            elif kind == "Z":
                changed[start:stop] = bytes(stop - start)
            else:
                at = start % len(_GARBAGE)
                changed[start:stop] = _GARBAGE[at : at + stop - start].ljust(stop - start, b"\xa5")
        start = stop
    return bytes(changed)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
