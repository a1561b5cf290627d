"""Systems: makes the writer that a case names, when it is needed.

Invariant: a process imports only the system that it measures.

    flush           loglib                                   the alternatives
    no fsync        durability="os", one flush at the end    no sync
    each call, ...  durability="os", a flush each call       no sync, a commit each call
    default         the default flush policy                 a sync each commit
    fsync           each call durable when it returns        a sync each commit
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from alternatives import Gathering, ObviousLog, RawFile, Sqlite, Writer

if TYPE_CHECKING:
    from pathlib import Path


class FlushingWriter(Protocol):
    """The calls that workloads make: loglib's Topic has them, and the alternatives get them from Gathering."""

    def append(self, value: bytes) -> object: ...

    def append_many(self, values: list[bytes], *, keys: list[bytes] | None = None) -> object: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def open_writer(system: str, directory: Path, *, flush: str, gather: bool, partitions: int) -> FlushingWriter:
    """Open `system` in an empty directory. With `gather`, several calls make one commit of 10,000 messages."""
    if system in ("loglib", "loglib, with Arrow"):
        import ours

        if system != "loglib":
            import pyarrow  # noqa: F401  by which loglib encodes then

        topic = ours.open_topic(directory, flush=flush, partitions=partitions)
        return ours.SyncedCalls(topic) if flush == "fsync" else topic
    return Gathering(open_alternative(system, directory, sync=flush in ("fsync", "default")), gather=gather)


def open_alternative(system: str, directory: Path, *, sync: bool) -> Writer:
    """Open one of the alternatives in an empty directory."""
    if system == "raw":
        return RawFile(directory, sync=sync)
    if system == "obvious":
        return ObviousLog(directory, sync=sync)
    if system == "sqlite3":
        return Sqlite(directory, sync=sync)
    if system == "lmdb":
        from lmdb_log import Lmdb

        return Lmdb(directory, sync=sync)
    if system == "arrow":
        from arrow_stream import ArrowStream

        return ArrowStream(directory, sync=sync)
    if system in ("floor", "spread floor"):
        from floors import JoinedFile, SpreadFile

        return (JoinedFile if system == "floor" else SpreadFile)(directory)
    raise ValueError(f"unknown system: {system}")
