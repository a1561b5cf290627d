"""Errors: every way in which loglib says no, told apart by what the caller would do next.

`LogError` is the root of all that concerns data or state; a bad argument is a `ValueError` or
`TypeError`. Each class takes facts, keeps them as attributes and builds its own message: which
file, which byte or offset, what was found, what was expected, and what to do.

Every `LogError` also says what became of records, so that none goes untold:

    lost          offsets that were handed out for records that are not in the log and never will be
    in_doubt      offsets of records that reopening settles: those below the log's end then are in
    appended      what the call that raised has appended all the same
    not_appended  of a failed `append_many`, the indexes of the records that are not in the log
    errors        of a call over several partitions, what the others raised beside the one that is raised
    resume_at     of a failed `receive`, the sender's offset of the first batch that is not in the log

A record whose append has returned is readable after the next successful flush or reopening, or it is in
`lost` or `in_doubt` of exactly one error that was raised. Lost offsets are given out again.
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "BrokenStreamError",
    "ConfigConflictError",
    "CorruptLogError",
    "ForkedHandleError",
    "GroupBusyError",
    "GroupElsewhereError",
    "GroupMismatchError",
    "GroupNotFoundError",
    "InvalidOffsetError",
    "LockedError",
    "LogClosedError",
    "LogError",
    "LogMovedError",
    "LogReplacedError",
    "MissingCodecError",
    "OffsetOutOfRangeError",
    "OffsetRange",
    "ReadOnlyError",
    "RecordTooLargeError",
    "StaleGenerationError",
    "StorageFullError",
    "StorageIOError",
    "TooManyFilesError",
    "UnsupportedFormatError",
    "WriterFailedError",
    "tell_appended",
    "tell_not_appended",
    "together",
]


class OffsetRange(NamedTuple):
    """Where appended records went, or should have gone: one partition and consecutive offsets there, in order."""

    partition: int
    offsets: range


class LogError(Exception):
    """Root of every error that loglib raises about data or state; the module says what its attributes mean."""

    lost: tuple[OffsetRange, ...] = ()
    in_doubt: tuple[OffsetRange, ...] = ()
    appended: tuple[OffsetRange, ...] = ()
    not_appended: Sequence[int] = ()
    errors: tuple[Exception, ...] = ()
    resume_at: int | None = None

    def __str__(self) -> str:
        doubts = [f"records in [{each.start}, {each.stop}) of partition {number} are in doubt until it is reopened"
                  for number, each in self.in_doubt]  # fmt: skip
        return "; ".join([super().__str__(), *map(_loss, self.lost), *doubts])

    def again(self) -> LogError:
        """The same for another caller, who is told nothing of what this one names."""
        other = _rebuild(type(self), self.args, vars(self))
        vars(other).pop("__notes__", None)
        other.lost = other.in_doubt = other.appended = other.errors = ()
        return other

    def take_over(self, other: LogError) -> None:
        """Name what another error has to name, which will then not be raised itself."""
        self.lost = (*self.lost, *other.lost)
        self.in_doubt = (*self.in_doubt, *other.in_doubt)
        self.errors = (*self.errors, *other.errors)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle would call the class with the message alone. An error that cannot be rebuilt breaks a process pool.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[LogError], arguments: tuple[Any, ...], facts: dict[str, Any]) -> LogError:
    error = kind.__new__(kind, *arguments)
    super(LogError, error).__init__(*arguments)  # that of OSError, where the error is one
    error.__dict__.update(facts)
    return error


def _loss(lost: OffsetRange) -> str:
    start, count = lost.offsets.start, len(lost.offsets)
    return f"{count} buffered records from offset {start} of partition {lost.partition} were not written"


def printable(text: str) -> str:
    """Text from a file, for a message: what could move the cursor of a terminal or begin a line is replaced."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


class CorruptLogError(LogError):
    """Stored bytes are not what was written. Stop: nothing has been cut, deleted or guessed.

    Attributes: `path` of the file, `file_position` in bytes, `found` and `expected` in words.
    """

    def __init__(self, path: str | os.PathLike[str], file_position: int, found: str, expected: str) -> None:
        self.path = os.fspath(path)
        self.file_position = file_position
        self.found = found
        self.expected = expected
        super().__init__(f"{self.path}, byte {file_position}: found {found}, expected {expected}; nothing was changed")


class UnsupportedFormatError(LogError):
    """The file is intact but written in a format that this loglib does not read: a newer one, as a rule."""

    def __init__(self, path: str | os.PathLike[str], what: str, found: int | str, supported: int | str) -> None:
        self.path = os.fspath(path)
        self.found = found
        self.supported = supported
        if isinstance(found, int) and isinstance(supported, int) and found < supported:
            why = f"is older than this loglib reads ({supported}); read it with the loglib that wrote it"
        else:
            why = f"is newer than this loglib knows ({supported}); upgrade loglib"
        super().__init__(f"{self.path}: {what} {found} {why}")


class OffsetOutOfRangeError(LogError, LookupError):
    """The offset is not in the log (any more). Choose a start within the range given.

    Attributes: `offset` asked for, and the valid half-open range `log_start_offset`,
    `high_watermark` (which is a valid position itself: it means caught up).
    """

    def __init__(self, partition: int, offset: int, log_start_offset: int, high_watermark: int) -> None:
        self.partition = partition
        self.offset = offset
        self.log_start_offset = log_start_offset
        self.high_watermark = high_watermark
        super().__init__(
            f"partition {partition}: offset {offset} is outside the log, which holds "
            f"[{log_start_offset}, {high_watermark}); start at {log_start_offset} or 'begin'"
        )


class InvalidOffsetError(LogError, ValueError):
    """The offset lies inside the log but no record has it. Use offsets that records carry.

    Attributes: `offset` asked for; `batch_offsets`, the record offsets of the batch around it;
    `next_offset`, where the following batch begins.
    """

    def __init__(self, partition: int, offset: int, batch_offsets: range, next_offset: int) -> None:
        self.partition = partition
        self.offset = offset
        self.batch_offsets = batch_offsets
        self.next_offset = next_offset
        super().__init__(
            f"partition {partition}: no record has offset {offset}; the records around it are "
            f"{batch_offsets.start} to {batch_offsets.stop - 1}, then {next_offset}; "
            "use Record.offset or Record.next_offset"
        )


class LockedError(LogError):
    """Another writer, or member of a group, holds the file. Attributes: its `path`, the `holder` in words."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        holder: str,
        *,
        advice: str = "close that writer, or open with mode='r' to read, "
        "or with shared=True to write to a partition of your own",
    ) -> None:
        self.path = os.fspath(path)
        self.holder = holder
        super().__init__(f"{self.path} is held by {holder}; {advice}")


class LogClosedError(LogError):
    """The handle is closed. Open the topic again."""


class ForkedHandleError(LogClosedError):
    """The handle was opened before a fork and belongs to the parent. Open the topic in the child."""

    def __init__(self, path: str | os.PathLike[str], parent_pid: int) -> None:
        self.path = os.fspath(path)
        self.parent_pid = parent_pid
        super().__init__(f"{self.path} was opened for writing by pid {parent_pid} before a fork; open it again here")


class LogMovedError(LogError):
    """The files are no longer what their path names: moved, removed, or others put there. Open the topic again.

    Raised by every later call of the same handle, `close` included, which releases everything all the same.

    Attributes: `path`; `became`, what was found, in words; `kept`: for a writer, whether what was flushed is whole
    in the files that it had open, wherever these are now; None for a reader.
    """

    def __init__(self, path: str | os.PathLike[str], became: str, *, kept: bool | None = None) -> None:
        self.path = os.fspath(path)
        self.became = became
        self.kept = kept
        outcome = "" if kept is None else _KEPT if kept else _GONE
        super().__init__(f"{self.path} {became}{outcome}; open the topic again")


_KEPT = "; what was flushed is whole in the files as they were, wherever these are now"
_GONE = "; what was appended may be gone with it"


class TooManyFilesError(LogError, OSError):
    """Opening the topic for writing needs more open files than this process may have. Raise `ulimit -n`.

    Nothing is left open or locked. Attributes: `path`; `needed`, the descriptors that the topic needs for itself,
    and `limit`, those that the process may have in all.
    """

    def __init__(self, path: str | os.PathLike[str], error: OSError, needed: int, limit: int) -> None:
        self.path = os.fspath(path)
        self.needed = needed
        self.limit = limit
        super().__init__(
            error.errno or _errno.EMFILE,
            f"{self.path}: {error.strerror}; writing to it needs {needed} descriptors besides those in use, and "
            f"`ulimit -n` is {limit}: raise it, or open with shared=True, which opens only what is written to",
        )


class StaleGenerationError(LogError):
    """A member of a group no longer owns what it reads or commits. Join the group again.

    Attributes: `group`, `member`, and `partition` as `<topic>-<partition>`, "" if it has lost its place altogether.
    """

    def __init__(self, group: str, member: str, partition: str = "") -> None:
        self.group = group
        self.member = member
        self.partition = partition
        what = f"no longer owns {partition}" if partition else "was evicted"
        super().__init__(f"group {group}: member {member} {what}; its records go to another, join again to go on")


class GroupBusyError(LogError):
    """The group has members, and what was asked for needs that it has none. Attributes: `group`, `members`."""

    def __init__(self, group: str, members: list[str]) -> None:
        self.group = group
        self.members = members
        super().__init__(f"group {group} is in use by {', '.join(members)}; stop its members first")


class GroupNotFoundError(LogError, LookupError):
    """No consumer group of that name is kept with the topic. Attributes: `path`, `group`, `found`: those that are."""

    def __init__(self, path: str | os.PathLike[str], group: str, found: list[str]) -> None:
        self.path = os.fspath(path)
        self.group = group
        self.found = found
        super().__init__(f"{self.path} has no group {group}; it has {', '.join(found) or 'none'}")


class GroupMismatchError(LogError):
    """Another member of the group shares partitions out in another way. Join with the same strategy.

    Attributes: `group`, `member` that differs, the strategy `given` here and the one `found` there.
    """

    def __init__(self, group: str, member: str, given: str, found: str) -> None:
        self.group = group
        self.member = member
        self.given = given
        self.found = found
        super().__init__(
            f"group {group}: member {member} has strategy={found!r}, this one {given!r}: "
            "between them partitions would be left out; all members need the same"
        )


class GroupElsewhereError(LogError):
    """The group is kept with another topic. Name that one first. Attributes: `path`, `group`, `topic`."""

    def __init__(self, path: str | os.PathLike[str], group: str, topic: str) -> None:
        self.path = os.fspath(path)
        self.group = group
        self.topic = topic
        super().__init__(
            f"group {group} is kept with topic {topic}, as {self.path} says: give all its topics, that one first, "
            "or choose another name; remove the file if that group is no more"
        )


class LogReplacedError(LogError):
    """The log is not the one that the group has committed to: made anew, or restored and grown on.

    Where the group would go on, another record stands than the one it had come to. Check what the topic
    is, then choose a place with `reset_group`, or join with `on_out_of_range="start"`.

    Attributes: `group`, `partition` as `<topic>-<partition>`, `offset` committed, and what `differs`.
    """

    def __init__(self, group: str, partition: str, offset: int, differs: str) -> None:
        self.group = group
        self.partition = partition
        self.offset = offset
        self.differs = differs
        super().__init__(
            f"group {group}: {partition} is not the log of which offset {offset} was committed: {differs}; "
            "choose a place with reset_group(), or join with on_out_of_range='start'"
        )


class ReadOnlyError(LogError):
    """A write was asked of a topic opened with mode='r'."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        super().__init__(f"{self.path} is open with mode='r'; open it with mode='a' to write")


class RecordTooLargeError(LogError, ValueError):
    """A record, or a batch that must stay whole, exceeds its limit. Nothing was appended.

    Attributes: `size_bytes` found and `limit_bytes` allowed.
    """

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"{what} is {size_bytes} bytes, the limit is {limit_bytes}; nothing was appended")


class StorageFullError(LogError, OSError):
    """The disk, a quota or a file-size limit refused a write. Make room and append again.

    The file was cut back to its last good batch and the writer stays usable. `lost` has the offsets
    that were handed out but not written; those offsets will be given out again.
    """

    def __init__(self, path: str | os.PathLike[str], error: OSError) -> None:
        self.path = os.fspath(path)
        super().__init__(error.errno or _errno.ENOSPC, f"{self.path}: {error.strerror}")


class StorageIOError(LogError, OSError):
    """The operating system failed to read or write. Never taken for the end of the log."""

    def __init__(self, path: str | os.PathLike[str], error: OSError, doing: str) -> None:
        self.path = os.fspath(path)
        super().__init__(error.errno or _errno.EIO, f"{self.path}: {error.strerror} while {doing}")


class WriterFailedError(LogError):
    """A flush failed, so the writer can no longer know what the disk holds. Reopen to recover.

    Raised by every later append, flush and close of the same writer: after one failed fsync the
    page cache shows data that the disk may never get. The first of these errors says in `in_doubt`
    which records that concerns, and in `lost` which were not even written; the later ones do not.
    """

    def __init__(self, path: str | os.PathLike[str], error: BaseException) -> None:
        self.path = os.fspath(path)
        self.error = error
        super().__init__(f"{self.path}: a flush failed ({error}); records since the last flush are in doubt, reopen")


class ConfigConflictError(LogError, ValueError):
    """An argument disagrees with what the topic was created with.

    Attributes: `name` of the argument, the value `given` and the value `stored`.
    """

    def __init__(
        self, path: str | os.PathLike[str], name: str, given: object, stored: object,
        *, fixed: bool = False,
    ) -> None:  # fmt: skip
        self.path = os.fspath(path)
        self.name = name
        self.given = given
        self.stored = stored
        way_out = "copy the records to a new topic" if fixed else 'open it with mode="a" to change it'
        super().__init__(
            f"{self.path} was created with {name}={stored!r}, not {given!r}; leave the argument out, or {way_out}"
        )


class MissingCodecError(LogError, ImportError):
    """The package of a compression codec is not installed. Install the extra named."""

    def __init__(self, codec: str, extra: str) -> None:
        self.codec = codec
        self.extra = extra
        super().__init__(
            f"compression {codec!r} needs a package that is not installed; install loglib's extra [{extra}]"
        )


class BrokenStreamError(LogError):
    """A stream has stopped in the middle of a frame, so what comes next on it begins nowhere. Open a new one.

    Raised by each `transfer` to it, or `receive` from it, after the one that was cut short. What that
    one has appended is said by its own error; the rest of the frame was not appended.
    """

    def __init__(self, doing: str, why: str) -> None:
        self.why = why
        super().__init__(f"the stream stopped in mid-frame while {doing} ({why}); open a new one and send again")


# --- what an error says of records -----------------------------------------------------------------


def together(errors: Sequence[Exception]) -> Exception:
    """One error for all of these: the most telling of them, which names what they all have lost.

    Its `errors` are the others. A writer that must be reopened tells more than a disk that must be mended,
    that more than a full disk, and what no one foresaw (no memory, say) the least.
    """
    first = max(errors, key=_telling)
    others = [each for each in errors if each is not first]
    for each in others:
        first.add_note(f"also: {each!r}")
        if isinstance(first, LogError):
            first.errors = (*first.errors, each)
            if isinstance(each, LogError):
                first.take_over(each)
    return first


def _telling(error: Exception) -> int:
    order = (OSError, LogError, StorageFullError, StorageIOError, WriterFailedError)  # of several classes, the last
    return max((rank for rank, kind in enumerate(order, 1) if isinstance(error, kind)), default=0)


def tell_appended(error: BaseException, ranges: Iterable[OffsetRange]) -> None:
    """Note in the error what its call has appended before it, besides what the error says already."""
    known: tuple[OffsetRange, ...] = getattr(error, "appended", ())
    ranges = (*ranges, *known)
    if ranges or isinstance(error, LogError):
        vars(error)["appended"] = ranges


def tell_not_appended(error: BaseException, indexes: Mapping[int, Sequence[int]]) -> None:
    """Note in the error which records of its call are not in the log; `indexes` are those for each partition."""
    missing: list[int] = []
    ranges: tuple[OffsetRange, ...] = getattr(error, "appended", ())
    if not ranges and not isinstance(error, LogError):  # a refusal, which appends nothing and says so
        return
    count = sum(map(len, indexes.values()))
    for partition, each in indexes.items():
        missing += each[sum(len(offsets) for number, offsets in ranges if number == partition) :]
    vars(error)["not_appended"] = tuple(sorted(missing))
    if ranges:
        error.add_note(f"{count - len(missing)} of this call's {count} records are in; not_appended has the others")
