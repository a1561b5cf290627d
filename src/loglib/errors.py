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
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, dataclass_transform

__all__ = [
    "BrokenStreamError", "CommitPendingError", "ConfigConflictError", "CorruptLogError", "DecodeError",
    "FencedError", "FencedJobError", "ForkedHandleError", "GroupBusyError", "GroupElsewhereError", "GroupMismatchError",
    "GroupNotFoundError", "InvalidOffsetError", "LockedError", "LogClosedError", "LogError", "LogMovedError",
    "LogReplacedError", "MissingCodecError", "NotLeaderError", "OffsetOutOfRangeError", "OffsetRange",
    "ReadOnlyError", "RecordTooLargeError", "ShareFullError", "ShareMismatchError", "ShareReplacedError",
    "SourceMismatchError", "StaleGenerationError", "StorageFullError", "StorageIOError", "TooFewCopiesError",
    "TooManyFilesError", "UnsettledError", "UnsupportedFormatError", "UntrustedPeerError", "WriterFailedError",
]  # fmt: skip


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
        losses = [f"{len(each)} buffered records from offset {each.start} of partition {number} were not written"
                  for number, each in self.lost]  # fmt: skip
        doubts = [f"records in [{each.start}, {each.stop}) of partition {number} are in doubt until it is reopened"
                  for number, each in self.in_doubt]  # fmt: skip
        return "; ".join([super().__str__(), *losses, *doubts])

    def again(self) -> LogError:
        """Return a copy for another caller, without the records that this error names."""
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


@dataclass_transform(eq_default=False)
class _FactsError(LogError):
    """An error that is made of facts: a subclass declares them as a dataclass declares its fields.

    The constructor takes the declared attributes in their order, or by name, and keeps them. The message is `_text`
    with the attributes in it, or what `_message` makes of them. A real dataclass would do the same, but 25 of them
    double the time of this module's import.
    """

    _text: ClassVar[str]
    _names: ClassVar[tuple[str, ...]] = ()  # of the facts

    def __init_subclass__(cls) -> None:
        cls._names = (*cls._names, *cls.__annotations__)

    def __init__(self, *values: object, **by_name: object) -> None:
        facts = dict(zip(self._names, values, strict=False)) | by_name
        missing = [name for name in self._names if name not in facts and not hasattr(type(self), name)]
        if missing or len(facts) < len(values) + len(by_name) or not facts.keys() <= {*self._names}:
            raise TypeError(f"{type(self).__name__} takes {', '.join(self._names)}, not {values} and {by_name}")
        vars(self).update(facts)
        super().__init__(self._message())

    def _message(self) -> str:
        return self._text.format_map(vars(self))


class CorruptLogError(_FactsError):
    """Stored bytes differ from what was written. Stop and examine them: loglib has changed nothing."""

    path: str
    file_position: int  # in bytes
    found: str
    expected: str
    _text = "{path}, byte {file_position}: found {found}, expected {expected}; nothing was changed"


class UnsupportedFormatError(_FactsError):
    """The file is intact, but this loglib does not read its format, which is usually newer. Upgrade loglib."""

    path: str
    what: str
    found: int | str
    supported: int | str

    def _message(self) -> str:
        found, supported = self.found, self.supported
        if isinstance(found, int) and isinstance(supported, int) and found < supported:
            why = (
                f"is older than this loglib reads ({supported}): it was made by a loglib from before the format was "
                "frozen; read it with that loglib"
            )
        else:
            why = f"is newer than this loglib knows ({supported}); upgrade loglib"
        return f"{self.path}: {self.what} {found} {why}"


class OffsetOutOfRangeError(_FactsError, LookupError):
    """The offset is outside the log; retention may have dropped it. Choose a start inside the range.

    `log_start_offset` and `high_watermark` are the valid range. `high_watermark` is also a valid position: the reader
    has caught up. `words` replace the message.
    """

    partition: int
    offset: int
    log_start_offset: int
    high_watermark: int
    words: str = ""

    def _message(self) -> str:
        return self.words or (
            f"partition {self.partition}: offset {self.offset} is outside the log, which holds "
            f"[{self.log_start_offset}, {self.high_watermark}); start at {self.log_start_offset} or 'begin'"
        )


class InvalidOffsetError(_FactsError, ValueError):
    """The offset lies inside the log, but no record has it. Use offsets of records.

    `batch_offsets` are the record offsets of the batch around it; `next_offset` is where the next batch begins.
    """

    partition: int
    offset: int
    batch_offsets: range
    next_offset: int

    def _message(self) -> str:
        return (
            f"partition {self.partition}: no record has offset {self.offset}; the records around it are "
            f"{self.batch_offsets.start} to {self.batch_offsets.stop - 1}, then {self.next_offset}; "
            "use Record.offset or Record.next_offset"
        )


class LockedError(_FactsError):
    """Another writer or group member holds the file. `holder` describes it."""

    path: str
    holder: str
    advice: str = (
        "close that writer, or open with mode='r' to read, or open both with shared=True, so that they take turns"
    )

    def _message(self) -> str:
        return f"{self.path} is held by {self.holder}; {self.advice}"


class LogClosedError(LogError):
    """The handle is closed. Open the topic again."""


class ForkedHandleError(_FactsError, LogClosedError):
    """The handle was opened before a fork and belongs to the parent. Open the topic in the child."""

    path: str
    parent_pid: int
    _text = "{path} was opened for writing by pid {parent_pid} before a fork; open it again here"


class LogMovedError(_FactsError):
    """The path no longer leads to the open files: they were moved, removed or replaced. Open the topic again.

    Every later call of the same handle raises it, including `close`, which still releases everything.

    `became` says what was found. `kept` is for a writer: True if all flushed records are whole in the files that it had
    open, even if these were moved; None for a reader.
    """

    path: str
    became: str
    kept: bool | None = None

    def _message(self) -> str:
        outcome = {
            None: "",
            True: "; all flushed records are whole in the old files, even if these were moved",
            False: "; the appended records may be lost with it",
        }
        return f"{self.path} {self.became}{outcome[self.kept]}; open the topic again"


class TooManyFilesError(LogError, OSError):
    """The process may have no more open files. Raise `ulimit -n`.

    If a topic could not be opened for writing, nothing stays open or locked. `needed` is the number of descriptors that
    the topic needs for writing, or None if it is not opened for writing; `limit` is the number that the process may
    have in total.
    """

    def __init__(self, path: str, error: OSError, needed: int | None, limit: int) -> None:
        self.path = path
        self.needed = needed
        self.limit = limit
        why, way = "all of them are in use", ""
        if needed is not None:
            why = f"writing to it needs {needed} descriptors besides those in use"
            way = ", or open with shared=True, which opens only what is written to"
        number = error.errno or _errno.EMFILE
        text = f"{path}: {os.strerror(number)}; {why}, and `ulimit -n` is {limit}: raise it{way}"
        super().__init__(number, text)


class StaleGenerationError(_FactsError):
    """A member of a group no longer owns a partition that it reads or commits. Join the group again.

    `partition` is `<topic>-<partition>`, or "" if the member was evicted.
    """

    group: str
    member: str
    partition: str = ""

    def _message(self) -> str:
        what = f"no longer owns {self.partition}" if self.partition else "was evicted"
        return f"group {self.group}: member {self.member} {what}; another member continues; join again"


class GroupBusyError(_FactsError):
    """The call needs a group, or a share, without members. Stop its members first."""

    group: str
    members: list[str]
    kind: str = "group"  # or "share"

    def _message(self) -> str:
        return f"{self.kind} {self.group} is in use by {', '.join(self.members)}; stop its members first"


class GroupNotFoundError(_FactsError, LookupError):
    """The topic has no consumer group, or no share, of this name. `found` has the existing ones."""

    path: str
    group: str
    found: list[str]
    kind: str = "group"  # or "share"

    def _message(self) -> str:
        return f"{self.path} has no {self.kind} {self.group}; it has {', '.join(self.found) or 'none'}"


class GroupMismatchError(_FactsError):
    """Another member of the group has another assignment strategy. Join with the same strategy.

    `given` is the strategy here, and `found` that of the other `member`.
    """

    group: str
    member: str
    given: str
    found: str
    _text = (
        "group {group}: member {member} has strategy={found!r}, this member has strategy={given!r}: "
        "with two strategies some partitions would have no owner; all members need the same strategy"
    )


class GroupElsewhereError(_FactsError):
    """Another topic keeps the group. Name that topic first."""

    path: str
    group: str
    topic: str
    _text = (
        "group {group} is kept with topic {topic}, as {path} says: give all its topics, that topic first, "
        "or choose another group name; remove the file if the group no longer exists"
    )


class LogReplacedError(_FactsError):
    """The group's commit was made in another log: the topic was made again, or restored and then extended.

    The committed offset may now lead to another record. Check the topic. Then choose a place with
    `reset_group`, or join with `on_out_of_range="start"`. `partition` is `<topic>-<partition>`.
    """

    group: str
    partition: str
    offset: int  # that was committed
    differs: str
    _text = (
        "group {group}: {partition} is not the log in which offset {offset} was committed: {differs}; "
        "choose a place with reset_group(), or join with on_out_of_range='start'"
    )


class FencedJobError(_FactsError):
    """A record is no longer in the hand that wants to settle it. The call settled nothing.

    `by` says why: its lease was over, its member was evicted, the share was reset, or it was settled before. What is
    not settled comes again.
    """

    share: str
    partition: int
    offset: int
    token: int
    by: str
    _text = (
        "share {share}: the record at offset {offset} of partition {partition} is no longer in this hand: {by}; "
        "this call has settled nothing; unless it was settled before, the record comes again"
    )


class UnsettledError(_FactsError):
    """With `settle="explicit"`, the loop asks for the next record and has not settled this one. It stays in hand."""

    share: str
    partition: int
    offset: int
    _text = (
        "share {share}: the record at offset {offset} of partition {partition} is not settled: call accept(), "
        "release() or reject() before the next step of the loop, or join with settle='after'"
    )


class ShareMismatchError(_FactsError, ValueError):
    """A setting of a share differs from the stored one. Leave it out, or change it with `Topic.alter_share`."""

    share: str
    name: str
    given: object
    stored: object
    _text = (
        "share {share} has {name}={stored!r}, not {given!r}: leave the argument out, or change the share for all its "
        "members with topic.alter_share"
    )


class ShareFullError(_FactsError):
    """No further record may be begun: as many as `window` allows wait or are in hand, and there are fresh ones."""

    share: str
    partition: int
    window: int
    _text = (
        "share {share}: {window} records of partition {partition} wait or are in hand, which is its window, and no "
        "other one may be begun: settle them, or allow more with topic.alter_share(window=...)"
    )


class ShareReplacedError(_FactsError):
    """The log is not the one whose records a share has settled: it was restored, or lost records. Check the topic."""

    share: str
    partition: int
    offset: int  # the first one that the share has not begun
    differs: str
    _text = (
        "share {share}: partition {partition} is not the log whose records before offset {offset} were begun: "
        "{differs}; choose a place with topic.reset_share()"
    )


class FencedError(_FactsError):
    """Another process has taken over the app of this transaction. Stop: nothing was committed by this call.

    `owner` is the process that is refused, `current` the owner of the app.
    """

    app: str
    owner: str
    current: str
    _text = "app {app}: {owner} is not its owner, {current} is; stop, or take the app over if {current} has ended"


class SourceMismatchError(_FactsError):
    """The app has committed the versions of another source, such as another query. Choose another app name.

    `given` is the source here, and `found` the one in the store.
    """

    app: str
    given: str
    found: str
    _text = (
        "app {app}: its versions count what comes from source {found}, not from {given}: this is another query, "
        "or its checkpoint was made again; choose another app name"
    )


class CommitPendingError(_FactsError):
    """The transaction is committed, but not yet visible everywhere. Do not repeat it; it becomes visible by itself."""

    number: int  # of the transaction
    waiting_for: str
    _text = (
        "transaction {number} is committed and must not be repeated; it is not yet visible everywhere: "
        "it waits for {waiting_for}"
    )


class ReadOnlyError(_FactsError):
    """The topic is open with mode='r', but the call needs to write. Open it with mode='a'."""

    path: str
    _text = "{path} is open with mode='r'; open it with mode='a' to write"


class NotLeaderError(_FactsError):
    """The directory is a copy of a topic, or a copy has taken its place. Only a topic of its own is written.

    `role` is "snapshot", "mirror", "superseded", "replica" or "tier". `of` is the topic that the directory is a copy
    of, the copy that has taken its place, or the other directories of the topic. `refused` names a call that is refused
    for another reason than writing, and `advice` says what to do then.
    """

    path: str
    role: str
    of: str
    refused: str = ""
    advice: str = ""

    def _message(self) -> str:
        what = f"was superseded by {self.of}" if self.role == "superseded" else f"is a {self.role} of {self.of}"
        if self.role == "replica":
            what = "is one of several directories that are written together"
        if self.refused:
            return f"{self.path} {what}, so you cannot {self.refused}; {self.advice}"
        way = "make it a topic of its own with loglib.copies.promote"
        if self.role == "replica":
            way = f"for writing with replicas=[...], its other directories ({self.of})"
        return f"{self.path} {what}; open it with mode='r', or {way}"


class RecordTooLargeError(_FactsError, ValueError):
    """A record, or a batch that must stay whole, exceeds its limit. Nothing was appended."""

    what: str
    size_bytes: int
    limit_bytes: int
    _text = "{what} is {size_bytes} bytes, the limit is {limit_bytes}; nothing was appended"


class DecodeError(_FactsError, ValueError):
    """A key or a value is not what the `decode` of a stream expects. Skip the record, or read it as bytes."""

    partition: int
    offset: int
    column: str
    why: str
    _text = "partition {partition}, offset {offset}: the {column} {why}; without decode= it is read as bytes"


class StorageFullError(LogError, OSError):
    """The disk, a quota or a file-size limit refused a write. Make room and append again.

    The file was cut back to its last good batch, and the writer stays usable. `lost` has the offsets of
    records that were appended but not written; these offsets will be used again.
    """

    def __init__(self, path: str, error: OSError) -> None:
        self.path = path
        super().__init__(error.errno or _errno.ENOSPC, f"{path}: {error.strerror}")


class StorageIOError(LogError, OSError):
    """The operating system failed to read or write. loglib never treats this as the end of the log."""

    def __init__(self, path: str, error: OSError, doing: str) -> None:
        self.path = path
        super().__init__(error.errno or _errno.EIO, f"{path}: {error.strerror} while {doing}")


class WriterFailedError(_FactsError):
    """A flush failed, so the writer no longer knows what the disk holds. Reopen the topic to recover.

    Every later append, flush and close of the same writer raises it: after a failed fsync the page cache
    shows data that the disk may never get. The first of these errors has the affected records in
    `in_doubt`, and records that were never written in `lost`. The later errors do not.
    """

    path: str
    error: BaseException
    _text = "{path}: a flush failed ({error}); records since the last flush are in doubt, reopen"


class ConfigConflictError(_FactsError, ValueError):
    """An argument differs from what the topic was created with: `given` is its value here, `stored` that of the topic.

    A policy that is `fixed` cannot be changed.
    """

    path: str
    name: str
    given: object
    stored: object
    fixed: bool = False

    def _message(self) -> str:
        way_out = 'open it with mode="a" and alter=True to change it'
        if self.fixed:
            way_out = "copy the records to a new topic"
        if self.name == "partitions":
            way_out += ", or add some with Topic.add_partitions: keys move then, and the number can only rise"
        created = f"{self.path} was created with {self.name}={self.stored!r}, not {self.given!r}"
        return f"{created}; leave the argument out, or {way_out}"


class MissingCodecError(_FactsError, ImportError):
    """The package of a compression codec is not installed. The message has the command that installs it."""

    codec: str
    extra: str
    _text = "compression {codec!r} needs a package that is not installed: pip install 'loglib-segments[{extra}]'"


class TooFewCopiesError(_FactsError):
    """Too few directories of a replicated topic have what must be acknowledged, or can be reached.

    A flush that raises it may be repeated: nothing is lost, and the records are acknowledged when enough directories
    have them. A failed opening has changed nothing but promises; make the missing directories available, or continue
    without them with `forget_replicas=`.

    `needed` and `found` count directories. `missing` maps the path of each other directory to the reason.
    """

    path: str
    needed: int
    found: int
    missing: Mapping[str, str]
    doing: str = "writing"

    def _message(self) -> str:
        self.missing = dict(self.missing)  # plain, for pickle
        others = "; ".join(f"{each}: {why}" for each, why in self.missing.items()) or "none"
        counts = f"takes {self.needed} of its directories, and {self.found} count"
        return f"{self.path}: {self.doing} {counts}; missing: {others}"


class BrokenStreamError(_FactsError):
    """The stream ended, timed out or is corrupt. Open a new stream to continue.

    After a call that was interrupted in the middle of a frame, each later `transfer` to this stream or `receive` from
    it raises this. The error of the interrupted call names the records that it appended; the rest of the frame was not
    appended. A mirror continues where it stopped.
    """

    doing: str
    why: str
    _text = "the stream broke while {doing} ({why}); open a new stream to continue"


class UntrustedPeerError(_FactsError):
    """The other end of a stream did not prove its identity, or does not trust this end: a certificate, or the key.

    Another stream to the same peer fails in the same way: check the files that both ends were given.
    """

    doing: str
    why: str
    _text = "no trust while {doing}: {why}"
