"""loglib: Kafka's log as a library: partitioned, append-only, segment files, no server.

from loglib import Topic

with Topic.open("data/clicks", partitions=8) as topic:
    topic.append(b"page=/home", key=b"user-42")
    topic.flush()
    for record in topic.read():
        print(record.offset, record.value)
"""

try:
    import fcntl as _fcntl  # noqa: F401
except ImportError as _error:
    raise ImportError("loglib needs POSIX file locks (the fcntl module): it runs on Linux and macOS") from _error

import logging as _logging  # the attribute `logging` of this package is its module of that name
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .append.record_arguments import HeadersLike
from .append.stats import FlushTimes, PartitionStats, Rates, TopicStats
from .config.policies import FlushPolicy, Policies, Retention, TopicConfig
from .errors import (
    BrokenStreamError,
    CommitPendingError,
    ConfigConflictError,
    CorruptLogError,
    FencedError,
    ForkedHandleError,
    GroupBusyError,
    GroupElsewhereError,
    GroupMismatchError,
    GroupNotFoundError,
    InvalidOffsetError,
    LockedError,
    LogClosedError,
    LogError,
    LogMovedError,
    LogReplacedError,
    MissingCodecError,
    NotLeaderError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    RecordTooLargeError,
    SourceMismatchError,
    StaleGenerationError,
    StorageFullError,
    StorageIOError,
    TooFewCopiesError,
    TooManyFilesError,
    UnsupportedFormatError,
    UntrustedPeerError,
    WriterFailedError,
)
from .format.batch import Batch
from .format.record import Damage, OffsetRange, Position, Record
from .groups import Commit, Group, GroupInfo, Member, Move, TopicPartition, TopicsGroup
from .groups.several_topics import delete_group, evict_member, group, group_info, reset_group
from .log.catalog import TopicInfo
from .log.cursor import BorrowedRange
from .log.lag import Lag
from .log.reader import OnGap, Reader, StartLike
from .log.recovery import Recovery
from .log.verify import VerifyReport
from .partition import Partition
from .retention import SegmentDecision
from .segment import SegmentInfo
from .topic import Topic, topics

if _TYPE_CHECKING:
    from .copies.credentials import CopyCredentials, SourceCredentials
    from .copies.heal import HealReport, heal
    from .copies.heal_log import Healed, Unhealed
    from .copies.mirror import Mirror, Mirrored, MirrorLag, mirror, receive_mirror
    from .copies.mirror_server import MirrorServer, serve_mirror
    from .copies.promote import promote
    from .copies.replica import ReplicaState
    from .copies.scrub import Scrub, ScrubReport
    from .copies.snapshot import Snapshot, snapshot
    from .log.repair import Repair, RepairReport
    from .offload.archive import archive, archived, read_archive
    from .offload.archive_manifest import Archived, ArchivedFile, ArchivedPartition
    from .offload.tier import tier, tiered
    from .offload.tier_manifest import Tiered, TieredPartition, TieredSegment
    from .transactions.repair_store import repair
    from .transactions.transaction import Transaction, expire_apps, last_version, recover_transactions, transaction

__version__ = "0.1.0"

__all__ = [
    "Archived",
    "ArchivedFile",
    "ArchivedPartition",
    "Batch",
    "BorrowedRange",
    "BrokenStreamError",
    "Commit",
    "CommitPendingError",
    "ConfigConflictError",
    "CopyCredentials",
    "CorruptLogError",
    "Damage",
    "FencedError",
    "FlushPolicy",
    "FlushTimes",
    "ForkedHandleError",
    "Group",
    "GroupBusyError",
    "GroupElsewhereError",
    "GroupInfo",
    "GroupMismatchError",
    "GroupNotFoundError",
    "HeadersLike",
    "HealReport",
    "Healed",
    "InvalidOffsetError",
    "Lag",
    "LockedError",
    "LogClosedError",
    "LogError",
    "LogMovedError",
    "LogReplacedError",
    "Member",
    "Mirror",
    "MirrorLag",
    "MirrorServer",
    "Mirrored",
    "MissingCodecError",
    "Move",
    "NotLeaderError",
    "OffsetOutOfRangeError",
    "OffsetRange",
    "OnGap",
    "Partition",
    "PartitionStats",
    "Policies",
    "Position",
    "Rates",
    "ReadOnlyError",
    "Reader",
    "Record",
    "RecordTooLargeError",
    "Recovery",
    "Repair",
    "RepairReport",
    "ReplicaState",
    "Retention",
    "Scrub",
    "ScrubReport",
    "SegmentDecision",
    "SegmentInfo",
    "Snapshot",
    "SourceCredentials",
    "SourceMismatchError",
    "StaleGenerationError",
    "StartLike",
    "StorageFullError",
    "StorageIOError",
    "Tiered",
    "TieredPartition",
    "TieredSegment",
    "TooFewCopiesError",
    "TooManyFilesError",
    "Topic",
    "TopicConfig",
    "TopicInfo",
    "TopicPartition",
    "TopicStats",
    "TopicsGroup",
    "Transaction",
    "Unhealed",
    "UnsupportedFormatError",
    "UntrustedPeerError",
    "VerifyReport",
    "WriterFailedError",
    "__version__",
    "archive",
    "archived",
    "delete_group",
    "evict_member",
    "expire_apps",
    "group",
    "group_info",
    "heal",
    "last_version",
    "mirror",
    "promote",
    "read_archive",
    "receive_mirror",
    "recover_transactions",
    "repair",
    "reset_group",
    "serve_mirror",
    "snapshot",
    "tier",
    "tiered",
    "topics",
    "transaction",
]

_logging.getLogger("loglib").addHandler(_logging.NullHandler())

# Loaded when it is first used, since most programs use little of it: the module of each name.
_LATER = {
    "CopyCredentials": "copies.credentials",
    "SourceCredentials": "copies.credentials",
    "HealReport": "copies.heal",
    "heal": "copies.heal",
    "Healed": "copies.heal_log",
    "Unhealed": "copies.heal_log",
    "Mirror": "copies.mirror",
    "Mirrored": "copies.mirror",
    "MirrorLag": "copies.mirror",
    "mirror": "copies.mirror",
    "receive_mirror": "copies.mirror",
    "MirrorServer": "copies.mirror_server",
    "serve_mirror": "copies.mirror_server",
    "promote": "copies.promote",
    "ReplicaState": "copies.replica",
    "Scrub": "copies.scrub",
    "ScrubReport": "copies.scrub",
    "Snapshot": "copies.snapshot",
    "snapshot": "copies.snapshot",
    "archive": "offload.archive",
    "archived": "offload.archive",
    "read_archive": "offload.archive",
    "Archived": "offload.archive_manifest",
    "ArchivedFile": "offload.archive_manifest",
    "ArchivedPartition": "offload.archive_manifest",
    "tier": "offload.tier",
    "tiered": "offload.tier",
    "Tiered": "offload.tier_manifest",
    "TieredPartition": "offload.tier_manifest",
    "TieredSegment": "offload.tier_manifest",
    "repair": "transactions.repair_store",
    "Transaction": "transactions.transaction",
    "expire_apps": "transactions.transaction",
    "last_version": "transactions.transaction",
    "recover_transactions": "transactions.transaction",
    "transaction": "transactions.transaction",
    "Repair": "log.repair",
    "RepairReport": "log.repair",
}


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
