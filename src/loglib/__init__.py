"""loglib: Kafka's log as a library: partitioned, append-only, segment files, no server.

from loglib import Topic

with Topic.create("data/clicks", partitions=8) as topic:
    topic.append(b"page=/home", key=b"user-42")
    topic.flush()
    for record in topic.read():
        print(record.offset, record.value)

The names here are those that most programs need. `loglib.errors` has all errors; the rest is where it belongs:
`loglib.copies` (snapshots, mirrors, healing), `loglib.offload` (archives, object stores), `loglib.transactions`,
`loglib.groups`, `loglib.log`, `loglib.metrics`, `loglib.logging`, `loglib.aio`, `loglib.audit`, `loglib.testing`.
"""

try:
    import fcntl as _fcntl  # noqa: F401
except ImportError as _error:
    raise ImportError("loglib needs POSIX file locks (the fcntl module): it runs on Linux and macOS") from _error

import logging as _logging  # the attribute `logging` of this package is its module of that name
from typing import TYPE_CHECKING as _TYPE_CHECKING

from .config.lazy import lazily as _lazily

if _TYPE_CHECKING:  # each name is loaded when it is first used
    from . import aio as aio
    from . import audit as audit
    from . import copies as copies
    from . import groups as groups
    from . import metrics as metrics
    from . import offload as offload
    from . import spark as spark
    from . import testing as testing
    from . import transactions as transactions
    from .append.record_arguments import HeadersLike
    from .config.policies import FlushPolicy, Policies, Retention, TopicConfig
    from .errors import (
        CommitPendingError,
        ConfigConflictError,
        CorruptLogError,
        FencedError,
        GroupBusyError,
        GroupNotFoundError,
        LockedError,
        LogClosedError,
        LogError,
        LogMovedError,
        NotLeaderError,
        OffsetOutOfRangeError,
        ReadOnlyError,
        RecordTooLargeError,
        StaleGenerationError,
        StorageFullError,
        StorageIOError,
        UnsupportedFormatError,
        WriterFailedError,
    )
    from .format.batch import Batch
    from .format.record import Damage, OffsetRange, Position, Record
    from .groups import Commit, Group, GroupInfo, TopicPartition, TopicsGroup
    from .groups.several_topics import group, topics
    from .log.reader import Reader, StartLike
    from .log.verify import VerifyReport
    from .partition import Partition
    from .topic import Topic
    from .transactions.repair_store import repair
    from .transactions.transaction import Transaction, transaction

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Commit",
    "CommitPendingError",
    "ConfigConflictError",
    "CorruptLogError",
    "Damage",
    "FencedError",
    "FlushPolicy",
    "Group",
    "GroupBusyError",
    "GroupInfo",
    "GroupNotFoundError",
    "HeadersLike",
    "LockedError",
    "LogClosedError",
    "LogError",
    "LogMovedError",
    "NotLeaderError",
    "OffsetOutOfRangeError",
    "OffsetRange",
    "Partition",
    "Policies",
    "Position",
    "ReadOnlyError",
    "Reader",
    "Record",
    "RecordTooLargeError",
    "Retention",
    "StaleGenerationError",
    "StartLike",
    "StorageFullError",
    "StorageIOError",
    "Topic",
    "TopicConfig",
    "TopicPartition",
    "TopicsGroup",
    "Transaction",
    "UnsupportedFormatError",
    "VerifyReport",
    "WriterFailedError",
    "__version__",
    "group",
    "repair",
    "topics",
    "transaction",
]

_logging.getLogger("loglib").addHandler(_logging.NullHandler())

__getattr__, __dir__ = _lazily(
    __name__,
    {
        ".append.record_arguments": "HeadersLike",
        ".config.policies": "FlushPolicy Policies Retention TopicConfig",
        ".errors": (
            "CommitPendingError ConfigConflictError CorruptLogError FencedError GroupBusyError "
            "GroupNotFoundError LockedError LogClosedError LogError LogMovedError NotLeaderError "
            "OffsetOutOfRangeError ReadOnlyError RecordTooLargeError StaleGenerationError "
            "StorageFullError StorageIOError UnsupportedFormatError WriterFailedError"
        ),
        ".format.batch": "Batch",
        ".format.record": "Damage OffsetRange Position Record",
        ".groups": "Commit Group GroupInfo TopicPartition TopicsGroup",
        ".groups.several_topics": "group topics",
        ".log.reader": "Reader StartLike",
        ".log.verify": "VerifyReport",
        ".partition": "Partition",
        ".topic": "Topic",
        ".transactions.repair_store": "repair",
        ".transactions.transaction": "Transaction transaction",
    },
    rooms="aio audit copies errors groups log metrics offload retention segment spark testing transactions",
)
