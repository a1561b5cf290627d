"""Delta: the files of an archive as a Delta table, for engines that know such tables and not our manifests.

Invariant: the table has only files that a manifest names, and each record once. A commit adds files, and records the
end of each partition: its app id is the log and the partition, and its version an offset. So a repeated call adds
nothing, even if somebody has merged files of the table in between. Files of healed gaps lie before that offset. They
have an app id of their own, whose version is their number.

    commit of the archive (archiving.py)  ->  commit of the table, by the package `deltalake`  ->  its log is synced

The table is never ahead of the archive. After a crash between the two commits, the next call adds the missing files.
The package does not sync what it writes, so a power cut may tear the newest commit. Nobody was told of such a commit,
and the next call removes it and makes it again.

Needs the package `deltalake`, which opens files itself: real files only. Processes: one at a time, by a lock.
"""

from __future__ import annotations

import json
import logging
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..config.extras import named_extras
from ..config.times import to_datetime
from ..config.uri import is_remote
from ..errors import LogError
from ..system.directory import Directory
from ..system.files import Files
from . import parquet
from .archive_manifest import ArchivedFile, ArchiveManifest
from .archive_reader import DIRECTORY

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

logger = logging.getLogger("loglib")

_LOG = "_delta_log"
_COMMIT = re.compile(r"\d{20}\.json")
_MOST_BYTES = 1 << 30
_ACTIONS = "loglib.actions"  # in a commit of ours: the number of its files and versions
_CONFIGURATION = {"delta.appendOnly": "true"}  # no engine deletes or changes rows of the past


def check_delta(files: Files, path: str) -> None:
    """`ImportError` without the package; `ValueError` for files that it cannot write."""
    with named_extras():
        import deltalake.transaction  # noqa: F401

    if not files.real or is_remote(path):
        raise ValueError("delta=True needs a directory: the package deltalake writes its log by itself")


def publish(files: Files, path: str, archived: ArchiveManifest) -> None:
    """Add the files of the manifest that the Delta table in the archive's directory does not have. Synced.

    `LogError` if the package fails; the archive itself is complete then.
    """
    from deltalake.exceptions import DeltaError

    with Directory.open(files, os.path.join(path, DIRECTORY)) as manifests:
        manifests.lock_for_a_moment("a process that writes the Delta table", advice="try again")
        _settle(files, path)
        try:
            _commit(files, path, archived)
        except (DeltaError, OSError) as error:
            raise LogError(
                f"{path}: archived, but its Delta table could not be brought up to that ({error}); call again"
            ) from error
        _settle(files, path)


def _commit(files: Files, path: str, archived: ArchiveManifest) -> None:
    """Add the files after the end that the table has recorded for each partition."""
    from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
    from deltalake.exceptions import DeltaError
    from deltalake.transaction import create_table_with_add_actions

    schema = Schema.from_arrow(parquet.schema())
    table = DeltaTable(path) if DeltaTable.is_deltatable(path) else None
    if table is not None and table.schema() != schema:  # the package adds any files to any table
        raise DeltaError("there is a table with other columns")
    added: list[AddAction] = []
    transactions = []
    for each in archived.partitions:
        app = f"loglib:{archived.log_id.hex()}:{each.partition}"
        healed = f"{app}:healed"
        done = 0 if table is None else table.transaction_version(healed) or 0  # files of healed gaps that it has
        if done < len(each.healed):
            added += [_addition(files, path, each.partition, file) for file in each.healed[done:]]
            transactions.append(Transaction(healed, len(each.healed)))
        known = None if table is None else table.transaction_version(app)
        if known is None or known < each.end:
            later = (file for file in each.files if known is None or file.end > known)
            added += [_addition(files, path, each.partition, file) for file in later]
            transactions.append(Transaction(app, each.end))
    facts: dict[str, Any] = {
        "commit_properties": CommitProperties(
            custom_metadata={_ACTIONS: str(len(added) + len(transactions))}, app_transactions=transactions
        ),
        # A checkpoint that is torn by a power cut would harm commits that are synced.
        "post_commithook_properties": PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False),
    }
    if table is None:
        create_table_with_add_actions(path, schema, added, name=archived.topic, configuration=_CONFIGURATION, **facts)
    elif transactions:
        table.create_write_transaction(list(added), "append", schema, **facts)


def _addition(files: Files, path: str, partition: int, file: ArchivedFile) -> AddAction:
    from deltalake.transaction import AddAction

    stats = json.dumps(_statistics(files, path, partition, file))
    return AddAction(file.name, file.bytes, {}, file.added // 1000, data_change=True, stats=stats)


def _statistics(files: Files, path: str, partition: int, file: ArchivedFile) -> dict[str, Any]:
    """The statistics by which engines skip files. Times are rounded outwards to milliseconds, as Delta has them."""
    full = os.path.join(path, file.name)
    with files.closing(files.open_read(full)) as fd, parquet.sound(full), parquet.opened(files, fd) as opened:
        first, last = parquet.bounds(opened, "offset")
    least: dict[str, Any] = {"partition": partition, "offset": first}
    most: dict[str, Any] = {"partition": partition, "offset": last}
    with suppress(OverflowError):  # years that Delta cannot write
        times = _as_text(file.first_time // 1000), _as_text(-(-file.last_time // 1000))
        least["timestamp"], most["timestamp"] = times
    nulls = dict.fromkeys(least, 0)
    return {"numRecords": file.rows, "minValues": least, "maxValues": most, "nullCount": nulls}


def _as_text(milliseconds: int) -> str:
    return to_datetime(milliseconds * 1000).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- the table's log on disk ----------------------------------------------------------------------------------


def _settle(files: Files, path: str) -> None:
    """Sync the newest commit, or remove it if a power cut has torn it."""
    with suppress(FileNotFoundError), Directory.open(files, os.path.join(path, _LOG)) as log:
        for name in sorted(filter(_COMMIT.fullmatch, log.names()))[-1:]:
            if _is_whole(log.read_whole(name, _MOST_BYTES)):
                with files.closing(log.open_read(name)) as fd:
                    files.datasync(fd)
            else:
                logger.warning("%s: a commit that a power cut has torn is removed and made again", log.path_of(name))
                log.unlink(name)
        log.sync()
        files.sync_directory(path)


def _is_whole(content: bytes) -> bool:
    """True if each line is an object of JSON, and no line of a commit of ours is missing."""
    try:
        actions = [json.loads(line) for line in content.splitlines()]
        said = [each["commitInfo"].get(_ACTIONS) for each in actions if "commitInfo" in each]
        count = sum("add" in each or "txn" in each for each in actions)
        return bool(actions) and all(each is None or int(each) == count for each in said)
    except (ValueError, TypeError, AttributeError):
        return False
