"""Manifest: the bytes of the files in a store of transactions.

Invariant: `decode` returns the facts that `encode` has written, or raises. A flipped or missing byte anywhere is
`CorruptLogError`; a newer format that is intact is `UnsupportedFormatError`.

A file is one line of JSON (see format/checked_json.py). The frames of a manifest follow the line:

    {"format": 1, ..., "frames": {"size": 3, "crc": "..."}, "crc": "a1b2c3d4"}
    frames

The number of a transaction is in the name of its file and not in the bytes. So a process that loses the race for a
number links the same synced bytes to the next one.

Threads: no state, safe for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ..errors import RecordTooLargeError
from ..format import checked_json
from ..format.header import crc32c
from ..log.transaction_numbers import MOST_BYTES

T = TypeVar("T")


class Section(NamedTuple):
    """Records for one partition."""

    topic: str  # path of the topic, relative to the directory that contains the store
    log_id: bytes  # of the topic
    partition: int
    file: str  # path of the staged file, relative to the topic's directory; "" if the frames are in the manifest
    at: int  # first byte in that file, or in the manifest's frames
    size_bytes: int
    batches: int
    is_segment: bool = False  # the file may become a segment; see staging.py


class GroupCommit(NamedTuple):
    """A commit of a consumer group for one partition."""

    topic: str  # path of the topic that has the group's directory, relative as in a section
    group: str
    partition: str  # "<log id>-<number>"
    entry: list[Any]  # offset, generation, and what the group's log needs besides
    log: str = ""  # log id of that topic, in hexadecimal digits

    @property
    def generation(self) -> int:
        """The generation in which the committing member owns the partition."""
        return int(self.entry[1])


class JobCommit(NamedTuple):
    """Records of a share that the transaction settles: consecutive ones in one hand."""

    topic: str  # path of the topic of the share, relative as in a section
    log: str  # log id of that topic, in hexadecimal digits
    share: str
    partition: int
    member: int
    token: int
    offset: int
    size: int  # records, with consecutive offsets
    outcome: int  # of the entry in the share's file

    @property
    def hand(self) -> tuple[str, str, int, int, int]:
        """Which hand it is."""
        return self.log, self.share, self.partition, self.member, self.token

    @property
    def fence(self) -> tuple[str, str, str]:
        """The name of its fence: one for each member and partition of a share. It is none of a group's partition."""
        return self.log, f"shares/{self.share}", f"{self.partition}-{self.member:08x}"


class Fence(NamedTuple):
    """A partition of a consumer group has a new owner: no lower generation can be committed after it."""

    topic: str  # as in `GroupCommit`
    group: str
    partition: str
    generation: int


class Manifest(NamedTuple):
    """One entry of a store.

    With a version it is a transaction of the app. With an app and no version, the owner takes over the app.
    Without an app it only fences partitions of groups, or skips numbers that a topic has from another store.
    """

    number: int
    app: str | None
    version: int | None
    owner: str
    source: str | None  # where the versions come from, such as the id of a query
    time: int  # microseconds
    sections: tuple[Section, ...] = ()
    offsets: tuple[GroupCommit, ...] = ()
    fences: tuple[Fence, ...] = ()
    frames: bytes | None = b""  # None: they are damaged, or were not read because the entry is done
    id: int = 0  # drawn at random for each transaction: it names its records in the logs; 0 if there are none
    skip: int = 0  # 0, or above `number`: numbers up to here are never given
    rows: int | None = None  # to be compared with those of a repetition
    jobs: tuple[JobCommit, ...] = ()

    @property
    def last_number(self) -> int:
        """The number before that of the next entry."""
        return max(self.number, self.skip)

    @property
    def applies(self) -> bool:
        """True if there is anything to apply. If not, the transaction is done when it is committed."""
        return bool(self.sections or self.offsets or self.jobs)


class AppState(NamedTuple):
    """The state of an app after its last entry."""

    version: int | None  # the last one; None if the app has only an owner
    owner: str
    former: tuple[str, ...]  # owners that are refused, the latest one last
    source: str | None
    number: int  # of the app's last entry
    last_used: int  # microseconds
    rows: int | None = None  # of the last version


class Checkpoint(NamedTuple):
    """The state after all entries up to a number. All of them are done."""

    number: int
    apps: Mapping[str, AppState]
    generations: Mapping[tuple[str, str, str], int]  # the highest one, by topic, group and partition


# --- bytes -------------------------------------------------------------------------------------------------


def encode(manifest: Manifest) -> bytes:
    """The bytes of the entry's file; `RecordTooLargeError` above the limit."""
    _check(manifest)
    frames = manifest.frames or b""
    content = checked_json.seal({
        "app": manifest.app, "version": manifest.version, "owner": manifest.owner, "source": manifest.source,
        "time": manifest.time, "id": f"{manifest.id:016x}", "skip": manifest.skip, "rows": manifest.rows,
        "sections": [
            {"topic": each.topic, "log": each.log_id.hex(), "partition": each.partition, "file": each.file,
             "at": each.at, "bytes": each.size_bytes, "batches": each.batches, "segment": each.is_segment}
            for each in manifest.sections
        ],
        "offsets": [each._asdict() for each in manifest.offsets],
        "fences": [each._asdict() for each in manifest.fences],
        **({"jobs": [each._asdict() for each in manifest.jobs]} if manifest.jobs else {}),
        "frames": {"size": len(frames), "crc": f"{crc32c(frames):08x}"},
    }) + frames  # fmt: skip
    return _small(content, "the transaction's manifest")


def decode(content: bytes, path: str) -> Manifest:
    """The entry in the bytes of a file, whose name has the number. Damaged frames are None."""
    number = int(os.path.basename(path))
    return _read(content, path, "a transaction", lambda values, rest: _manifest(number, values, rest))


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The bytes of the checkpoint's file; `RecordTooLargeError` above the limit."""
    content = checked_json.seal({
        "number": checkpoint.number,
        "apps": {app: list(state) for app, state in checkpoint.apps.items()},
        "generations": [[*key, generation] for key, generation in checkpoint.generations.items()],
    })  # fmt: skip
    return _small(content, "the checkpoint of the transactions")


def decode_checkpoint(content: bytes, path: str) -> Checkpoint:
    """The checkpoint in the bytes of a file."""
    return _read(content, path, "a checkpoint of transactions", _checkpoint)


def encode_store(store_id: bytes) -> bytes:
    """The bytes of `store.json`."""
    return checked_json.seal({"id": store_id.hex()})


def decode_store(content: bytes, path: str) -> bytes:
    """The id of the store, 16 bytes."""
    return _read(content, path, "a store of transactions", lambda values, _: _id(values["id"]))


# --- one line and its checksum -----------------------------------------------------------------------------


def _read(content: bytes, path: str, what: str, facts: Callable[[dict[str, Any], bytes], T]) -> T:
    line = content[: content.find(b"\n") + 1]
    rest = content[len(line) :]
    return checked_json.decode(line, path, lambda values: facts(values, rest), f"the JSON of {what}", mended=True)


def _small(content: bytes, what: str) -> bytes:
    if len(content) > MOST_BYTES:
        raise RecordTooLargeError(what, len(content), MOST_BYTES)
    return content


# --- facts -------------------------------------------------------------------------------------------------


def _manifest(number: int, values: dict[str, Any], frames: bytes) -> Manifest:
    stated = values["frames"]
    is_whole = (stated["size"], stated["crc"]) == (len(frames), f"{crc32c(frames):08x}")
    manifest = Manifest(
        number, _maybe(_text, values["app"]), _maybe(_count, values["version"]), _text(values["owner"]),
        _maybe(_text, values["source"]), _whole(values["time"]),
        tuple(map(_section, values["sections"])), tuple(map(_offsets, values["offsets"])),
        tuple(map(_fence, values["fences"])), frames if is_whole else None, int(_text(values["id"]), 16),
        _count(values["skip"]), _maybe(_whole, values["rows"]), tuple(map(_job, values.get("jobs", ()))),
    )  # fmt: skip
    _check(manifest)
    return manifest


def _section(values: dict[str, Any]) -> Section:
    return Section(
        _text(values["topic"]), _id(values["log"]), _count(values["partition"]), _text(values["file"]),
        _count(values["at"]), _count(values["bytes"]), _count(values["batches"]), _flag(values.get("segment", False)),
    )  # fmt: skip


def _offsets(values: dict[str, Any]) -> GroupCommit:
    topic, group, partition, log = (_text(values[each]) for each in ("topic", "group", "partition", "log"))
    return GroupCommit(topic, group, partition, list(values["entry"]), bytes.fromhex(log).hex())


def _job(values: dict[str, Any]) -> JobCommit:
    topic, log, share = (_text(values[each]) for each in ("topic", "log", "share"))
    numbers = (_count(values[each]) for each in JobCommit._fields[3:])
    return JobCommit(topic, bytes.fromhex(log).hex(), share, *numbers)


def _fence(values: dict[str, Any]) -> Fence:
    topic, group, partition = (_text(values[each]) for each in ("topic", "group", "partition"))
    return Fence(topic, group, partition, _count(values["generation"]))


def _check(manifest: Manifest) -> None:
    """Refuse a manifest that no process could apply."""
    for each in manifest.sections:
        if manifest.frames is not None and not each.file and each.at + each.size_bytes > len(manifest.frames):
            raise ValueError(f"a section ends at {each.at + each.size_bytes} in {len(manifest.frames)} bytes of frames")
    for offsets in manifest.offsets:
        _count(offsets.entry[1])
    if manifest.version is not None and manifest.app is None:
        raise ValueError("a version without an app")


def _checkpoint(values: dict[str, Any], rest: bytes) -> Checkpoint:
    if rest:
        raise ValueError(f"{len(rest)} bytes after the line")
    apps = {
        app: AppState(
            _maybe(_count, version), _text(owner), tuple(map(_text, former)), _maybe(_text, source), _count(number),
            _whole(last_used), _maybe(_whole, rows),
        )
        for app, (version, owner, former, source, number, last_used, rows) in values["apps"].items()
    }  # fmt: skip
    generations = {
        (_text(topic), _text(group), _text(partition)): _count(generation)
        for topic, group, partition, generation in values["generations"]
    }
    return Checkpoint(_count(values["number"]), apps, generations)


def _maybe(kind: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else kind(value)


def _exactly(kind: type[T]) -> Callable[[Any], T]:
    def check(value: Any) -> T:
        if type(value) is not kind:  # `True` is no integer here
            raise TypeError(f"{value!r} is not of type {kind.__name__}")
        return value

    return check


_text, _whole, _flag = _exactly(str), _exactly(int), _exactly(bool)


def _count(value: Any) -> int:
    if _whole(value) < 0:
        raise ValueError(f"{value} is below 0")
    return int(value)


def _id(value: Any) -> bytes:
    decoded = bytes.fromhex(_text(value))
    if len(decoded) != 16:
        raise ValueError(f"{value} has not 16 bytes")
    return decoded
