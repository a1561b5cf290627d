"""Offload: sealed segments as archives of Parquet files, and in object stores."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:  # "as" makes a name public for type checkers
    from .archive_manifest import ArchivedFile as ArchivedFile
    from .archive_manifest import ArchivedPartition as ArchivedPartition
    from .archive_manifest import ArchiveManifest as ArchiveManifest
    from .archiving import archive as archive
    from .archiving import archived as archived
    from .archiving import read_archive as read_archive
    from .tier_manifest import TieredPartition as TieredPartition
    from .tier_manifest import TieredSegment as TieredSegment
    from .tier_manifest import TierManifest as TierManifest
    from .tiering import tier as tier
    from .tiering import tiered as tiered

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        ".archive_manifest": "ArchiveManifest ArchivedFile ArchivedPartition",
        ".archiving": "archive archived read_archive",
        ".tier_manifest": "TierManifest TieredPartition TieredSegment",
        ".tiering": "tier tiered",
    },
)
