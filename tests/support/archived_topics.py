"""Topics and their archives for tests: sealed segments, and the files that an archive has."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from conftest import NOW, SECOND
from loglib import Topic
from loglib.offload import ArchiveManifest, archive_reader, archiving
from loglib.offload.manifest_log import FilePlace
from loglib.offload.store import DirectoryStore
from loglib.system.files import REAL, Files


@pytest.fixture
def to(tmp_path: Path) -> Path:
    """Where an archive may be made."""
    return tmp_path / "archive"


def sealed(topic: Topic, *, segments: int = 3, records: int = 10, partition: int = 0) -> None:
    """Add sealed segments with numbered records, with keys, headers and nulls among them."""
    part = topic.partition(partition)
    for _ in range(segments):
        for _ in range(records):
            at = part.log_end_offset
            part.append(
                None if at % 7 == 0 else b"value %d" % at,
                b"k%d" % (at % 3) if at % 2 else None,
                headers=[("at", b"%d" % at), ("at", b"")] if at % 5 == 0 else None,
                timestamp=NOW + at * SECOND,
            )
        part.flush()
        part.roll()


def newest(files: Files, path: str) -> ArchiveManifest | None:
    """The newest manifest of the archive in a directory."""
    return archive_reader.newest(FilePlace(files, path))


def open_store(to: Path | str, files: Files = REAL) -> DirectoryStore:
    """The archive in a directory, open for adding to it."""
    store = archiving.open_archive(files, str(to), 0o600)
    assert isinstance(store, DirectoryStore)
    return store


def in_order(table: pa.Table) -> pa.Table:
    return table.sort_by([("partition", "ascending"), ("offset", "ascending")]).combine_chunks()


def offsets(table: pa.Table) -> list[int]:
    found: list[int] = table.column("offset").to_pylist()
    return found


def parquet_files(to: Path) -> list[Path]:
    return sorted(to.glob("[0-9]*/*"))
