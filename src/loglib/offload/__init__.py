"""Offload: sealed segments as archives of Parquet files, and in object stores."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:
    from .archive_manifest import ArchivedFile, ArchivedPartition, ArchiveManifest
    from .archiving import archive, archived, read_archive
    from .tier_manifest import TieredPartition, TieredSegment, TierManifest
    from .tiering import tier, tiered

__all__ = [
    "ArchiveManifest",
    "ArchivedFile",
    "ArchivedPartition",
    "TierManifest",
    "TieredPartition",
    "TieredSegment",
    "archive",
    "archived",
    "read_archive",
    "tier",
    "tiered",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        ".archive_manifest": "ArchiveManifest ArchivedFile ArchivedPartition",
        ".archiving": "archive archived read_archive",
        ".tier_manifest": "TierManifest TieredPartition TieredSegment",
        ".tiering": "tier tiered",
    },
)
