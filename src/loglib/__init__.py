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

if _TYPE_CHECKING:  # each name is loaded when it is first used; "as" makes it public for type checkers
    from . import aio as aio
    from . import audit as audit
    from . import copies as copies
    from . import groups as groups
    from . import jobs as jobs
    from . import metrics as metrics
    from . import offload as offload
    from . import spark as spark
    from . import testing as testing
    from . import transactions as transactions
    from .append.record_arguments import HeadersLike as HeadersLike
    from .config.policies import FlushPolicy as FlushPolicy
    from .config.policies import Policies as Policies
    from .config.policies import Retention as Retention
    from .config.policies import TopicConfig as TopicConfig
    from .errors import CommitPendingError as CommitPendingError
    from .errors import ConfigConflictError as ConfigConflictError
    from .errors import CorruptLogError as CorruptLogError
    from .errors import FencedError as FencedError
    from .errors import GroupBusyError as GroupBusyError
    from .errors import GroupNotFoundError as GroupNotFoundError
    from .errors import LockedError as LockedError
    from .errors import LogClosedError as LogClosedError
    from .errors import LogError as LogError
    from .errors import LogMovedError as LogMovedError
    from .errors import NotLeaderError as NotLeaderError
    from .errors import OffsetOutOfRangeError as OffsetOutOfRangeError
    from .errors import ReadOnlyError as ReadOnlyError
    from .errors import RecordTooLargeError as RecordTooLargeError
    from .errors import StaleGenerationError as StaleGenerationError
    from .errors import StorageFullError as StorageFullError
    from .errors import StorageIOError as StorageIOError
    from .errors import UnsupportedFormatError as UnsupportedFormatError
    from .errors import WriterFailedError as WriterFailedError
    from .format.batch import Batch as Batch
    from .format.record import Damage as Damage
    from .format.record import OffsetRange as OffsetRange
    from .format.record import Position as Position
    from .format.record import Record as Record
    from .groups import Commit as Commit
    from .groups import Group as Group
    from .groups import GroupInfo as GroupInfo
    from .groups import TopicPartition as TopicPartition
    from .groups import TopicsGroup as TopicsGroup
    from .groups.several_topics import group as group
    from .groups.several_topics import topics as topics
    from .jobs import Job as Job
    from .jobs import Reject as Reject
    from .jobs import Share as Share
    from .jobs.several_topics import share as share
    from .log.reader import Reader as Reader
    from .log.reader import StartLike as StartLike
    from .log.verify import VerifyReport as VerifyReport
    from .partition import Partition as Partition
    from .topic import Topic as Topic
    from .transactions.repair_store import repair as repair
    from .transactions.transaction import Transaction as Transaction
    from .transactions.transaction import transaction as transaction

__version__ = "0.1.0"

_logging.getLogger("loglib").addHandler(_logging.NullHandler())

__getattr__, __dir__, __all__ = _lazily(
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
        ".jobs": "Job Reject Share",
        ".jobs.several_topics": "share",
        ".log.reader": "Reader StartLike",
        ".log.verify": "VerifyReport",
        ".partition": "Partition",
        ".topic": "Topic",
        ".transactions.repair_store": "repair",
        ".transactions.transaction": "Transaction transaction",
    },
    rooms="aio audit copies errors groups jobs log metrics offload retention segment spark testing transactions",
)
__all__ += ["__version__"]
