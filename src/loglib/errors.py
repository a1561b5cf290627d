"""Errors: one class for each thing that a caller can do next.

`LogError` is the root of all errors about data or state. A bad argument is a `ValueError` or `TypeError`.
Each class takes facts, keeps them as attributes and builds its message: the file, the byte or offset,
what was found, what was expected, and what to do.

Every `LogError` also names the records that it affects:

    lost          offsets that were returned for records that are not in the log and never will be
    in_doubt      offsets of records that may be in the log; after reopening, those below its end are
    appended      records that the failed call has nevertheless appended
    not_appended  after a failed `append_many`: the indexes of the records that are not in the log
    errors        after a call on several partitions: the errors of the other partitions
    resume_at     after a failed `receive`: the sender's offset of the first batch that is not in the log

If an append has returned, its record is readable after the next successful flush or reopening, or exactly
one raised error has its offset in `lost` or `in_doubt`. Lost offsets are used again.
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "BrokenStreamError",
    "CommitPendingError",
    "ConfigConflictError",
    "CorruptLogError",
    "FencedError",
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
    "NotLeaderError",
    "OffsetOutOfRangeError",
    "OffsetRange",
    "ReadOnlyError",
    "RecordTooLargeError",
    "SourceMismatchError",
    "StaleGenerationError",
    "StorageFullError",
    "StorageIOError",
    "TooFewCopiesError",
    "TooManyFilesError",
    "UnsupportedFormatError",
    "UntrustedPeerError",
    "WriterFailedError",
    "is_out_of_descriptors",
    "report_appended",
    "report_missing",
    "report_not_appended",
    "together",
]


class OffsetRange(NamedTuple):
    """The place of appended or lost records: a partition, and consecutive offsets in it, in the records' order."""

    partition: int
    offsets: range


class LogError(Exception):
    """Root of all errors of loglib about data or state. The module's docstring explains the attributes."""

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
        """A copy for another caller, without the records that this error names."""
        other = _rebuild(type(self), self.args, vars(self))
        vars(other).pop("__notes__", None)
        other.lost = other.in_doubt = other.appended = other.errors = ()
        return other

    def take_over(self, other: LogError) -> None:
        """Take the records that another error names. That error is then not raised."""
        self.lost = (*self.lost, *other.lost)
        self.in_doubt = (*self.in_doubt, *other.in_doubt)
        self.errors = (*self.errors, *other.errors)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle would pass only the message to the class. An error that cannot be unpickled breaks a process pool.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[LogError], arguments: tuple[Any, ...], facts: dict[str, Any]) -> LogError:
    error = kind.__new__(kind, *arguments)
    super(LogError, error).__init__(*arguments)  # `OSError.__init__`, if the class is an OSError
    error.__dict__.update(facts)
    return error


def _loss(lost: OffsetRange) -> str:
    start, count = lost.offsets.start, len(lost.offsets)
    return f"{count} buffered records from offset {start} of partition {lost.partition} were not written"


def printable(text: str) -> str:
    """Text from a file, made safe for a message: control characters and line breaks are replaced."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


class CorruptLogError(LogError):
    """Stored bytes differ from what was written. Stop and look: loglib has not changed anything.

    Attributes: `path` of the file, `file_position` in bytes, `found` and `expected` in words.
    """

    def __init__(self, path: str | os.PathLike[str], file_position: int, found: str, expected: str) -> None:
        self.path = os.fspath(path)
        self.file_position = file_position
        self.found = found
        self.expected = expected
        super().__init__(f"{self.path}, byte {file_position}: found {found}, expected {expected}; nothing was changed")


class UnsupportedFormatError(LogError):
    """The file is intact, but this loglib does not read its format, which is usually newer. Upgrade loglib."""

    def __init__(self, path: str | os.PathLike[str], what: str, found: int | str, supported: int | str) -> None:
        self.path = os.fspath(path)
        self.found = found
        self.supported = supported
        if isinstance(found, int) and isinstance(supported, int) and found < supported:
            why = (
                f"is older than this loglib reads ({supported}): it was made by a loglib from before the format was "
                "frozen; read it with that loglib"
            )
        else:
            why = f"is newer than this loglib knows ({supported}); upgrade loglib"
        super().__init__(f"{self.path}: {what} {found} {why}")


class OffsetOutOfRangeError(LogError, LookupError):
    """The offset is outside the log; retention may have dropped it. Choose a start inside the range.

    Attributes: `partition`; the requested `offset`; `log_start_offset` and `high_watermark`, the valid range.
    `high_watermark` is also a valid position: the reader has caught up.
    """

    def __init__(
        self, partition: int, offset: int, log_start_offset: int, high_watermark: int, *, words: str = ""
    ) -> None:
        self.partition = partition
        self.offset = offset
        self.log_start_offset = log_start_offset
        self.high_watermark = high_watermark
        super().__init__(
            words
            or f"partition {partition}: offset {offset} is outside the log, which holds "
            f"[{log_start_offset}, {high_watermark}); start at {log_start_offset} or 'begin'"
        )


class InvalidOffsetError(LogError, ValueError):
    """The offset lies inside the log, but no record has it. Use offsets of records.

    Attributes: the requested `offset`; `batch_offsets`, the record offsets of the batch around it;
    `next_offset`, where the next batch begins.
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
    """Another writer or group member holds the file. Attributes: `path` of the file, `holder` in words."""

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
    """The path no longer leads to the open files: they were moved, removed or replaced. Open the topic again.

    Every later call of the same handle raises it, including `close`, which still releases everything.

    Attributes: `path`; `became`, what was found, in words; `kept`, for a writer: whether all flushed records are
    whole in the files that it had open, even if these were moved; None for a reader.
    """

    def __init__(self, path: str | os.PathLike[str], became: str, *, kept: bool | None = None) -> None:
        self.path = os.fspath(path)
        self.became = became
        self.kept = kept
        outcome = "" if kept is None else _KEPT if kept else _GONE
        super().__init__(f"{self.path} {became}{outcome}; open the topic again")


_KEPT = "; all flushed records are whole in the old files, even if these were moved"
_GONE = "; the appended records may be lost with it"


class TooManyFilesError(LogError, OSError):
    """The process may have no more open files. Raise `ulimit -n`.

    If a topic could not be opened for writing, nothing stays open or locked. Attributes: `path`; `needed`, the number
    of descriptors that the topic needs for writing, or None if it is not opened for writing; `limit`, the number that
    the process may have in total.
    """

    def __init__(self, path: str | os.PathLike[str], error: OSError, needed: int | None, limit: int) -> None:
        self.path = os.fspath(path)
        self.needed = needed
        self.limit = limit
        why, way = "all of them are in use", ""
        if needed is not None:
            why = f"writing to it needs {needed} descriptors besides those in use"
            way = ", or open with shared=True, which opens only what is written to"
        number = error.errno or _errno.EMFILE
        text = f"{self.path}: {os.strerror(number)}; {why}, and `ulimit -n` is {limit}: raise it{way}"
        super().__init__(number, text)


def is_out_of_descriptors(error: BaseException) -> bool:
    """Whether a call failed because the process, or the system, may have no more open files."""
    return isinstance(error, OSError) and error.errno in (_errno.EMFILE, _errno.ENFILE)


class StaleGenerationError(LogError):
    """A member of a group no longer owns a partition that it reads or commits. Join the group again.

    Attributes: `group`, `member`, and `partition` as `<topic>-<partition>`, or "" if the member was evicted.
    """

    def __init__(self, group: str, member: str, partition: str = "") -> None:
        self.group = group
        self.member = member
        self.partition = partition
        what = f"no longer owns {partition}" if partition else "was evicted"
        super().__init__(f"group {group}: member {member} {what}; another member reads on; join again to continue")


class GroupBusyError(LogError):
    """The call needs a group without members. Stop its members first. Attributes: `group`, `members`."""

    def __init__(self, group: str, members: list[str]) -> None:
        self.group = group
        self.members = members
        super().__init__(f"group {group} is in use by {', '.join(members)}; stop its members first")


class GroupNotFoundError(LogError, LookupError):
    """The topic has no consumer group of this name. Attributes: `path`, `group`, and `found`, the existing groups."""

    def __init__(self, path: str | os.PathLike[str], group: str, found: list[str]) -> None:
        self.path = os.fspath(path)
        self.group = group
        self.found = found
        super().__init__(f"{self.path} has no group {group}; it has {', '.join(found) or 'none'}")


class GroupMismatchError(LogError):
    """Another member of the group has another assignment strategy. Join with the same strategy.

    Attributes: `group`; the other `member`; the strategy `given` here and the one `found` there.
    """

    def __init__(self, group: str, member: str, given: str, found: str) -> None:
        self.group = group
        self.member = member
        self.given = given
        self.found = found
        super().__init__(
            f"group {group}: member {member} has strategy={found!r}, this member has strategy={given!r}: "
            "with two strategies some partitions would have no owner; all members need the same strategy"
        )


class GroupElsewhereError(LogError):
    """Another topic keeps the group. Name that topic first. Attributes: `path`, `group`, `topic`."""

    def __init__(self, path: str | os.PathLike[str], group: str, topic: str) -> None:
        self.path = os.fspath(path)
        self.group = group
        self.topic = topic
        super().__init__(
            f"group {group} is kept with topic {topic}, as {self.path} says: give all its topics, that topic first, "
            "or choose another group name; remove the file if the group no longer exists"
        )


class LogReplacedError(LogError):
    """The group's commit was made in another log: the topic was made again, or restored and then extended.

    The committed offset may now lead to another record. Check the topic. Then choose a place with
    `reset_group`, or join with `on_out_of_range="start"`.

    Attributes: `group`, `partition` as `<topic>-<partition>`, the committed `offset`, and what `differs`.
    """

    def __init__(self, group: str, partition: str, offset: int, differs: str) -> None:
        self.group = group
        self.partition = partition
        self.offset = offset
        self.differs = differs
        super().__init__(
            f"group {group}: {partition} is not the log in which offset {offset} was committed: {differs}; "
            "choose a place with reset_group(), or join with on_out_of_range='start'"
        )


class FencedError(LogError):
    """Another process has taken over the app of this transaction. Stop: nothing was committed by this call.

    Attributes: `app`; `owner`, the one that is refused; `current`, the owner of the app.
    """

    def __init__(self, app: str, owner: str, current: str) -> None:
        self.app = app
        self.owner = owner
        self.current = current
        super().__init__(
            f"app {app}: {owner} is not its owner, {current} is; stop, or take the app over if {current} has ended"
        )


class SourceMismatchError(LogError):
    """The app has committed the versions of another source, such as another query. Choose another app name.

    Attributes: `app`; the source `given` here and the one `found` in the store.
    """

    def __init__(self, app: str, given: str, found: str) -> None:
        self.app = app
        self.given = given
        self.found = found
        super().__init__(
            f"app {app}: its versions count what comes from source {found}, not from {given}: this is another query, "
            "or its checkpoint was made again; choose another app name"
        )


class CommitPendingError(LogError):
    """The transaction is committed, but not yet visible everywhere. Do not repeat it; it becomes visible by itself.

    Attributes: `number` of the transaction, and `waiting_for` in words.
    """

    def __init__(self, number: int, waiting_for: str) -> None:
        self.number = number
        self.waiting_for = waiting_for
        super().__init__(
            f"transaction {number} is committed and must not be repeated; it is not yet visible everywhere: "
            f"it waits for {waiting_for}"
        )


class ReadOnlyError(LogError):
    """The topic is open with mode='r', but the call needs to write. Open it with mode='a'."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        super().__init__(f"{self.path} is open with mode='r'; open it with mode='a' to write")


class NotLeaderError(LogError):
    """The directory is a copy of a topic, or a copy has taken its place. Only a topic of its own is written.

    Attributes: `path`; its `role` ("snapshot", "mirror", "superseded", "replica", "tier"); `of`, the topic that it is a
    copy of, the copy that has taken its place, or the other directories of the topic.
    """

    def __init__(
        self, path: str | os.PathLike[str], role: str, of: str, *, refused: str = "", advice: str = ""
    ) -> None:
        self.path = os.fspath(path)
        self.role = role
        self.of = of
        what = f"was superseded by {of}" if role == "superseded" else f"is a {role} of {of}"
        if role == "replica":
            what = "is one of several directories that are written together"
        if refused:
            what += f", so you cannot {refused}"
        elif role != "replica":
            advice = "open it with mode='r', or make it a topic of its own with loglib.promote"
        else:
            advice = f"open it with mode='r', or for writing with replicas=[...], its other directories ({of})"
        super().__init__(f"{self.path} {what}; {advice}")


class RecordTooLargeError(LogError, ValueError):
    """A record, or a batch that must stay whole, exceeds its limit. Nothing was appended.

    Attributes: `size_bytes`, the size found, and `limit_bytes`, the largest allowed.
    """

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"{what} is {size_bytes} bytes, the limit is {limit_bytes}; nothing was appended")


class StorageFullError(LogError, OSError):
    """The disk, a quota or a file-size limit refused a write. Make room and append again.

    The file was cut back to its last good batch, and the writer stays usable. `lost` has the offsets of
    records that were appended but not written; these offsets will be used again.
    """

    def __init__(self, path: str | os.PathLike[str], error: OSError) -> None:
        self.path = os.fspath(path)
        super().__init__(error.errno or _errno.ENOSPC, f"{self.path}: {error.strerror}")


class StorageIOError(LogError, OSError):
    """The operating system failed to read or write. loglib never treats this as the end of the log."""

    def __init__(self, path: str | os.PathLike[str], error: OSError, doing: str) -> None:
        self.path = os.fspath(path)
        super().__init__(error.errno or _errno.EIO, f"{self.path}: {error.strerror} while {doing}")


class WriterFailedError(LogError):
    """A flush failed, so the writer no longer knows what the disk holds. Reopen the topic to recover.

    Every later append, flush and close of the same writer raises it: after a failed fsync the page cache
    shows data that the disk may never get. The first of these errors has the affected records in
    `in_doubt`, and records that were never written in `lost`. The later errors do not.
    """

    def __init__(self, path: str | os.PathLike[str], error: BaseException) -> None:
        self.path = os.fspath(path)
        self.error = error
        super().__init__(f"{self.path}: a flush failed ({error}); records since the last flush are in doubt, reopen")


class ConfigConflictError(LogError, ValueError):
    """An argument differs from what the topic was created with.

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
        if name == "partitions":
            way_out += ", or add some with Topic.add_partitions: keys move then, and the number can only rise"
        super().__init__(
            f"{self.path} was created with {name}={stored!r}, not {given!r}; leave the argument out, or {way_out}"
        )


class MissingCodecError(LogError, ImportError):
    """The package of a compression codec is not installed. Install the extra in the message."""

    def __init__(self, codec: str, extra: str) -> None:
        self.codec = codec
        self.extra = extra
        super().__init__(
            f"compression {codec!r} needs a package that is not installed; install loglib's extra [{extra}]"
        )


class TooFewCopiesError(LogError):
    """Too few directories of a replicated topic have what must be acknowledged, or can be reached.

    A flush that raises it may be repeated: nothing is lost, and the records are acknowledged when enough directories
    have them. At opening nothing was changed but promises; make the missing directories available, or go on without
    them with `lose=`.

    Attributes: `path` of the topic; how many directories are `needed`, and how many were `found`; `missing`, the
    reason for each of the others, by its path.
    """

    def __init__(
        self, path: str | os.PathLike[str], needed: int, found: int, missing: Mapping[str, str], doing: str = "writing"
    ) -> None:
        self.path = os.fspath(path)
        self.needed = needed
        self.found = found
        self.missing = dict(missing)
        others = "; ".join(f"{each}: {why}" for each, why in self.missing.items()) or "none"
        counts = f"takes {needed} of its directories, and {found} count"
        super().__init__(f"{self.path}: {doing} {counts}; missing: {others}")


class BrokenStreamError(LogError):
    """A stream has ended or fallen silent, or what comes is not what was sent. Open a new stream and go on.

    Each `transfer` to this stream or `receive` from it raises this, after the call that was interrupted in the middle
    of a frame. The error of that call says what it appended; the rest of the frame was not appended. A mirror goes on
    where it was. Attribute: `why`, in words.
    """

    def __init__(self, doing: str, why: str) -> None:
        self.why = why
        super().__init__(f"the stream broke while {doing} ({why}); open a new stream and go on")


class UntrustedPeerError(LogError):
    """The other end of a stream did not prove who it is, or does not trust this end: a certificate, or the shared key.

    Another stream to the same peer ends in the same way: look at the files that both ends were given. Attribute: `why`,
    in words.
    """

    def __init__(self, doing: str, why: str) -> None:
        self.why = why
        super().__init__(f"no trust while {doing}: {why}")


# --- the records that an error names ---------------------------------------------------------------


def together(errors: Sequence[Exception]) -> Exception:
    """One error for all of these: the most important one, which names the lost records of all.

    Its `errors` are the others. The order of importance: a writer that must be reopened, a failing disk, a
    full disk, other errors of loglib, and then unexpected errors (such as no memory).
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
    order = (OSError, LogError, StorageFullError, StorageIOError, WriterFailedError)  # the last that fits counts
    return max((rank for rank, kind in enumerate(order, 1) if isinstance(error, kind)), default=0)


def report_appended(error: BaseException, ranges: Iterable[OffsetRange]) -> None:
    """Add to the error what its call had already appended."""
    known: tuple[OffsetRange, ...] = getattr(error, "appended", ())
    ranges = (*ranges, *known)
    if ranges or isinstance(error, LogError):
        vars(error)["appended"] = ranges


def report_not_appended(error: BaseException, indexes: Mapping[int, Sequence[int]]) -> None:
    """Add to the error the records of its call that are not in the log; `indexes` has them per partition."""
    missing: list[int] = []
    ranges: tuple[OffsetRange, ...] = getattr(error, "appended", ())
    count = sum(map(len, indexes.values()))
    for partition, each in indexes.items():
        missing += each[sum(len(offsets) for number, offsets in ranges if number == partition) :]
    report_missing(error, tuple(sorted(missing)), count)


def report_missing(error: BaseException, missing: Sequence[int], count: int) -> None:
    """Add to the error the indexes of those of its call's `count` records that are not in the log."""
    appended: tuple[OffsetRange, ...] = getattr(error, "appended", ())
    if not appended and not isinstance(error, LogError):  # a refused call has appended nothing, and its message says so
        return
    vars(error)["not_appended"] = missing
    if appended:
        error.add_note(f"{count - len(missing)} of this call's {count} records are in the log; not_appended: the rest")
