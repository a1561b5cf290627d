"""Policies: the policies of a topic, as given to `Topic.open` and stored in `topic.json`.

Invariant: a value of these classes has passed its checks. The classes are plain facts: nothing here reads
a clock or a disk.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from .quantities import Duration, Size, as_duration, as_size, seconds
from .uri import has_credentials

Durability = Literal["disk", "os"]

MAX_BATCH_BYTES = 1 << 30  # signed 32-bit numbers address a batch's columns; half of that leaves room
MAX_OFFSET = (1 << 63) - 1  # offsets are signed 64-bit numbers in Arrow and Spark
MAX_DECOMPRESSED_BYTES = 1 << 25  # of a batch's body: limits the memory that a few forged bytes can claim
MAX_RECORDS_PER_BATCH = 1 << 24
MIN_SEGMENT_BYTES = 4096
# Retention does not seal smaller segments: each segment costs a header of 4 KiB and some fsyncs.
LEAST_SEALED_BYTES = 1 << 16
SEGMENTS_KEPT = 4  # at least, under a limit of bytes or free space; with fewer, dropping one would drop most records
FIXED = ("partitions", "partitioner")  # policies that cannot change: keys would move to other partitions
MAX_PARTITIONS = 10_000  # directories are named with four digits
NAME = re.compile(r"(?!\.\.?$)[a-zA-Z0-9._-]{1,249}")  # of a topic, group or member; Kafka's rule for topics
PARTITIONER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")  # a built-in one, or the application's own


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {rule}, not {value!r}")


def _require_whole(policy: object, *names: str) -> None:
    for name in names:
        value = getattr(policy, name)
        _require(value is None or type(value) is int, f"{type(policy).__name__}.{name}", value, "a whole number")


def _convert(policy: object, convert: Callable[[str, Any], object], *names: str) -> None:
    """Let these fields have what `convert` makes of their names and values. None remains None."""
    cls = type(policy).__name__
    for name in names:
        value = getattr(policy, name)
        if value is not None:
            try:
                converted = convert(name if cls == "TopicConfig" else f"{cls}.{name}", value)
            except TypeError as error:
                raise ValueError(*error.args) from None
            object.__setattr__(policy, name, converted)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """When appended records are flushed (become durable and visible): at the first limit that is reached.

    `records` is a number of records. `interval` is a duration (0.05, "50ms"); a background thread keeps it, and the
    attribute has its seconds. `bytes` is a size of encoded bytes ("64MiB"). None switches a limit off. Without a limit
    only `flush()`, `append(sync=True)` and `close()` flush.

    The defaults: 0.05 s, so that a person who watches a quiet log sees no delay; 100,000 records and 64 MiB,
    so that one flush takes well under a second.
    """

    records: int | None = 100_000
    interval: float | None = 0.05
    bytes: int | None = 64 << 20

    if TYPE_CHECKING:  # callers may give more than the attributes have

        def __init__(
            self,
            records: int | None = ...,
            interval: Duration | None = ...,
            bytes: Size | None = ...,  # noqa: A002
        ) -> None: ...

    def __post_init__(self) -> None:
        _convert(self, seconds, "interval")
        _convert(self, as_size, "bytes")
        _require_whole(self, "records", "bytes")
        _require(self.records is None or self.records >= 1, "FlushPolicy.records", self.records, "at least 1")
        interval = self.interval
        _require(interval is None or _is_number(interval), "FlushPolicy.interval", interval, "a number of seconds")
        _require(interval is None or interval > 0, "FlushPolicy.interval", interval, "above 0 seconds")
        _require(self.bytes is None or self.bytes >= 1, "FlushPolicy.bytes", self.bytes, "at least 1")


@dataclass(frozen=True, slots=True)
class Retention:
    """When whole sealed segments are dropped. None switches a limit off; for `keep_free` 0 does.

    `age` is a duration ("7d", or a timedelta) since the segment was sealed, so its newest record is at least as old.
    `bytes` is a size ("10GiB"), the most that one partition keeps; with 0 it keeps only the segment that is being
    written. `keep_free` is the fraction of the file system, from 0 up to 1, that must stay free.

    A limit may make segments smaller than `segment_bytes`, so that there are sealed segments to drop. With `bytes`
    a segment has at most a quarter of it. With `keep_free` it has at most a quarter of the topic's room, divided
    by the partitions. It always has at least 64 KiB. A partition may exceed `bytes` by one segment and one batch
    until the next pass. If nothing else frees enough space for `keep_free`, open segments of 64 KiB and more are
    sealed and dropped as well.

    `hold_for` names consumer groups and shares. `age` and `bytes` drop no segment that one of these groups has not
    committed past, or of which one of these shares has not settled each record, until the segment is older than
    `hold_age`, or the partition larger than `hold_bytes`. At least one of these two ceilings must be given, because a
    group that nobody runs any more would fill the disk. A group without a commit holds everything, and so does a name
    that no group and no share has. `keep_free` drops what is held last.

    `archive` is an archive that `loglib.offload.archive` fills, or a place that `loglib.offload.tier` fills, as a path
    from the topic's directory, an absolute one or a URI without credentials. No limit then drops a segment that is not
    there, or that came to it less than `archive_grace` ago: not even `keep_free`, so archive or tier regularly.
    """

    age: timedelta | None = timedelta(days=7)
    bytes: int | None = None
    keep_free: float = 0.0
    hold_for: Sequence[str] = ()
    hold_age: timedelta | None = None
    hold_bytes: int | None = None
    archive: str | os.PathLike[str] | None = None
    archive_grace: timedelta = timedelta(hours=1)

    if TYPE_CHECKING:  # callers may give more than the attributes have

        def __init__(
            self,
            age: Duration | None = ...,
            bytes: Size | None = ...,  # noqa: A002
            keep_free: float = ...,
            hold_for: Sequence[str] = ...,
            hold_age: Duration | None = ...,
            hold_bytes: Size | None = ...,
            archive: str | os.PathLike[str] | None = ...,
            archive_grace: Duration = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        _convert(self, as_duration, "age", "hold_age", "archive_grace")
        _convert(self, as_size, "bytes", "hold_bytes")
        _require_whole(self, "bytes", "hold_bytes")
        for name in ("age", "hold_age"):
            value = getattr(self, name)
            _require(value is None or value > timedelta(0), f"Retention.{name}", value, "above zero")
        for name in ("bytes", "hold_bytes"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"Retention.{name}", value, "at least 0")
        _require(_is_number(self.keep_free), "Retention.keep_free", self.keep_free, "a part from 0 up to 1")
        _require(0 <= self.keep_free < 1, "Retention.keep_free", self.keep_free, "a part from 0 up to 1")
        self._check_hold()
        self._check_archive()

    def _check_hold(self) -> None:
        groups: object = self.hold_for
        named = isinstance(groups, Sequence) and not isinstance(groups, str) and all(map(_is_name, groups))
        _require(named, "Retention.hold_for", groups, "a list of names of groups")
        object.__setattr__(self, "hold_for", tuple(self.hold_for))
        if bool(groups) != (self.hold_age is not None or self.hold_bytes is not None):
            raise ValueError("Retention.hold_for needs a ceiling, hold_age or hold_bytes, and these need hold_for")
        if self.hold_age is not None and self.age is not None:
            _require(self.hold_age >= self.age, "Retention.hold_age", self.hold_age, f"at least the age, {self.age}")
        if self.hold_bytes is not None and self.bytes is not None:
            rule = f"at least the bytes, {self.bytes}"
            _require(self.hold_bytes >= self.bytes, "Retention.hold_bytes", self.hold_bytes, rule)

    def _check_archive(self) -> None:
        named: object = self.archive
        if named is not None:
            path = os.fspath(named) if isinstance(named, str | os.PathLike) else b""
            known = isinstance(path, str) and path != "" and "\0" not in path
            _require(known, "Retention.archive", named, "the path of a directory")
            if has_credentials(str(path)):
                raise ValueError(
                    "Retention.archive has credentials, and a policy is stored and logged where others read it; "
                    "give them in the environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                )
            object.__setattr__(self, "archive", path)
        _require(self.archive_grace >= timedelta(0), "Retention.archive_grace", self.archive_grace, "at least zero")


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """All policies of a topic. They are stored with it."""

    partitions: int = 1
    partitioner: str = "crc32"
    flush: FlushPolicy = field(default_factory=FlushPolicy)
    retention: Retention = field(default_factory=Retention)
    segment_bytes: int = 1 << 30
    segment_age: timedelta | None = timedelta(days=1)
    compression: str = "none"
    durability: Durability = "disk"
    batch_bytes: int = 1 << 20  # see bench/RESULTS.md: more gains little, and reading one record checks a whole batch
    batch_records: int = 1 << 16
    max_record_bytes: int = 64 << 20
    permissions: int = 0o600
    producer_expiry: timedelta | None = timedelta(days=7)  # how long the last number of an inactive producer is kept

    def __post_init__(self) -> None:
        _require(isinstance(self.flush, FlushPolicy), "flush", self.flush, "a FlushPolicy")
        _require(isinstance(self.retention, Retention), "retention", self.retention, "a Retention")
        _convert(self, as_duration, "segment_age", "producer_expiry")
        _convert(self, as_size, "segment_bytes", "batch_bytes", "max_record_bytes")
        _require_whole(
            self, "partitions", "segment_bytes", "batch_bytes", "batch_records", "max_record_bytes", "permissions"
        )
        half = MAX_BATCH_BYTES // 2  # of a batch; the other half is for offsets, timestamps and the like
        limits = (
            ("partitions", MAX_PARTITIONS), ("batch_bytes", half), ("batch_records", MAX_RECORDS_PER_BATCH),
            ("max_record_bytes", half),
        )  # fmt: skip
        for name, most in limits:
            value = getattr(self, name)
            _require(1 <= value <= most, name, value, f"1 to {most}")
        named = type(self.partitioner) is str and PARTITIONER_NAME.fullmatch(self.partitioner) is not None
        _require(named, "partitioner", self.partitioner, "the name of a function, of at most 100 characters")
        _require(self.segment_bytes >= MIN_SEGMENT_BYTES, "segment_bytes", self.segment_bytes, "at least 4096")
        for name in ("segment_age", "producer_expiry"):
            value = getattr(self, name)
            _require(value is None or value > timedelta(0), name, value, "above 0")
        _require(self.compression in CODEC_NAMES, "compression", self.compression, f"one of {CODEC_NAMES}")
        _require(self.durability in ("disk", "os"), "durability", self.durability, "'disk' or 'os'")
        bits = self.permissions
        usable = bits & ~0o666 == 0 and bits & 0o600 == 0o600
        _require(usable, "permissions", oct(bits), "read and write bits, with the owner's set")

    @property
    def roll_bytes(self) -> int:
        """The largest size of a segment in bytes, by the policies alone."""
        kept = self.retention.bytes
        return min(self.segment_bytes, max(LEAST_SEALED_BYTES, kept // SEGMENTS_KEPT)) if kept else self.segment_bytes

    def changed(self, policies: Mapping[str, Any]) -> TopicConfig:
        """These policies with some replaced, in any form that `Topic.open` takes. `ValueError` for an invalid one.

        A value may also be a function, as in `resolved`.
        """
        return replace(self, **self.resolved(policies))

    def resolved(self, policies: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the policies. One that is a function gets the present value, and returns the new one."""
        return {name: value(getattr(self, name)) if callable(value) else value for name, value in policies.items()}

    def differences(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The given policies that differ from these, as `replace` would have them. `ValueError` for an invalid one."""
        changed = self.changed(given)
        return {name: getattr(changed, name) for name in given if getattr(changed, name) != getattr(self, name)}

    def differing(self, other: TopicConfig) -> Iterator[tuple[str, object, object]]:
        """The policies that differ: the name, the value here, the value there. Of `flush` and `retention` the parts."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine != theirs and isinstance(mine, FlushPolicy | Retention):
                parts = [part.name for part in fields(mine)]
                found = [(f"{each.name}.{part}", getattr(mine, part), getattr(theirs, part)) for part in parts]
                yield from (part for part in found if part[1] != part[2])
            elif mine != theirs:
                yield each.name, mine, theirs

    def to_json(self) -> dict[str, Any]:
        """The policies as JSON values; durations become seconds."""
        values = asdict(self, dict_factory=_json_object)
        retention = values["retention"]
        for name in ("hold_for", "hold_age", "hold_bytes"):  # in the files of those who use it
            if not self.retention.hold_for or retention[name] is None:
                del retention[name]
        if self.retention.archive is None:
            del retention["archive"], retention["archive_grace"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TopicConfig:
        """The reverse of `to_json`. Unknown names are ignored: later versions may add them."""
        known = _known(cls, values)
        if "flush" in known:
            known["flush"] = FlushPolicy(**_known(FlushPolicy, known["flush"]))
        if "retention" in known:
            known["retention"] = Retention(**_known(Retention, known["retention"]))
        return cls(**known)


class Policies(TypedDict, total=False):
    """The policies that a topic may change, with the names of `TopicConfig`."""

    flush: FlushPolicy
    retention: Retention
    segment_bytes: Size
    segment_age: Duration | None
    compression: str
    durability: Durability
    batch_bytes: Size
    batch_records: int
    max_record_bytes: Size
    permissions: int
    producer_expiry: Duration | None


_NUMBERS = (
    "interval", "age", "hold_age", "archive_grace", "segment_age", "producer_expiry",
    "bytes", "hold_bytes", "segment_bytes", "batch_bytes", "max_record_bytes",
)  # fmt: skip
CODEC_NAMES = ("none", "zlib", "lz4", "zstd")


POLICY_NAMES = Policies.__annotations__.keys()


def _known(cls: type[FlushPolicy | Retention | TopicConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise TypeError(f"{cls.__name__} must be an object with names, not {values!r}")
    for name in _NUMBERS:  # only callers write them as text
        if isinstance(values.get(name), str):
            raise TypeError(f"{name} must be a number, not {values[name]!r}")
    return {each.name: values[each.name] for each in fields(cls) if each.name in values}


def _json_object(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.total_seconds() if isinstance(value, timedelta) else value for name, value in items}
