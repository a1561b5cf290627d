"""Repetition: the check that a repeated version is the same batch, and the report of dropped rows.

Invariant: rows are dropped only if the store shows that their batch is committed. Spark repeats the last batch of a
query and no other one, from the same checkpoint, and it has the same number of rows. Any other batch comes from a
checkpoint that was copied or set back, and is refused before the app gets another owner. So the other query of that
checkpoint is not fenced.

Dropped rows are reported by a warning of the logger `loglib`, and in a file in the directory of each topic, because
PySpark's data sources cannot add a figure to a query's progress.

    repetitions.json    {"format": 1, "repetitions": [["<app>", <version>, <rows>, <time>], ...], "crc": "..."}

Processes: the driver's host; `repetitions` anywhere.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from ..config.uri import local_path
from ..errors import LogError
from ..format import checked_json
from ..system.directory import Directory
from ..system.files import REAL, Files
from ..transactions.manifest import AppState

logger = logging.getLogger("loglib")

NAME = "repetitions.json"
_MOST_KEPT = 1000
_MOST_BYTES = 1 << 20
_OWNER = re.compile(r"([^,]*)(?:, batch ([0-9]+))?(?:, checkpoint (.*))?", re.DOTALL)
_ANOTHER = "start the query with a new checkpoint, or write to another topic"


class Write(NamedTuple):
    """The identity of a write in the store."""

    app: str
    version: int
    owner: str  # from `owner_of`, for a write of a streaming query
    source: str | None
    is_new: bool  # the app cannot have been used before
    batch: int | None = None  # of the streaming query; None outside one
    any_rows: bool = False  # if Spark repeats the batch, it may have another number of rows


class Repetition(NamedTuple):
    """Rows that were not written, because their batch was committed before."""

    app: str
    version: int
    rows: int
    time: int  # microseconds UTC


def owner_of(name: str, *, batch: int | None = None, checkpoint: str | None = None) -> str:
    """The owner of an app, with the last batch or the checkpoint of its query, by which a query is recognized."""
    last = "" if batch is None else f", batch {batch}"
    place = "" if checkpoint is None else f", checkpoint {checkpoint}"
    return f"{name}{last}{place}"


def owner_after_abort(state: AppState | None) -> str:
    """An owner that fences the present one, with the same batch and checkpoint."""
    _, batch, checkpoint = _parts("" if state is None else state.owner)
    return owner_of(f"abort-{os.urandom(8).hex()}", batch=batch, checkpoint=checkpoint)


def _parts(owner: str) -> tuple[str, int | None, str | None]:
    found = _OWNER.fullmatch(owner)
    name, batch, checkpoint = found.groups() if found else (owner, None, None)
    return name, None if batch is None else int(batch), checkpoint


# --- the check ------------------------------------------------------------------------------------------------


def check_repetition(write: Write, rows: int, state: AppState | None) -> None:
    """`LogError` if the write would lose rows that are no repetition, or take the app from a query that is alive."""
    if state is None or write.batch is None or write.source != state.source:  # the store refuses another source
        return
    what = f"batch {write.batch} of {rows} rows, version {write.version} of app {write.app}, is not written"
    _, last_batch, checkpoint = _parts(state.owner)
    mine = _parts(write.owner)[2]
    if checkpoint is not None and mine is not None and mine != checkpoint and _is_of(checkpoint, write.source):
        raise LogError(
            f"{what}: the checkpoint {mine} is a copy of {checkpoint}, whose query writes there; {_ANOTHER}. If the "
            "copy takes the place of the other one, remove the other one"
        )
    if state.version is None or write.version > state.version:
        return
    if last_batch is None:
        last_batch = state.version if write.version == write.batch else write.batch
    if write.batch != last_batch:
        raise LogError(
            f"{what}: version {state.version} was committed there with batch {last_batch}, and Spark repeats no other "
            f"batch than the last one. The checkpoint was copied or set back, so the rows may be others; {_ANOTHER}"
        )
    if write.version == state.version and state.rows not in (None, rows) and not write.any_rows:
        raise LogError(
            f"{what}: the version was committed there with {state.rows} rows. The checkpoint was copied or set back, "
            f"or the query gives other rows when Spark repeats a batch; {_ANOTHER}. For such a query there is the "
            "option repeatedBatch=drop"
        )


def _is_of(checkpoint: str, query: str | None) -> bool:
    """True if there is a checkpoint of the query in this directory; False if it cannot be read."""
    with suppress(LogError, OSError, ValueError, TypeError, KeyError):
        facts = json.loads(REAL.read_whole(os.path.join(checkpoint, "metadata"), _MOST_BYTES))
        return bool(facts["id"] == query)
    return False


# --- the report -----------------------------------------------------------------------------------------------


def tell(files: Files, write: Write, rows_of: Iterable[tuple[str, int]], *, now: int) -> None:
    """Report the rows that are dropped, by path of the topic. An error is a warning."""
    for path, rows in rows_of:
        logger.warning(
            "%s: version %d of %s was committed before: %d rows are taken for its repetition, and not written again",
            path, write.version, write.app, rows,
        )  # fmt: skip
        try:
            with Directory.open(files, path) as directory:
                directory.lock_for_a_moment("a process that changes the topic", advice="try again")
                found = [*_read(files, path), Repetition(write.app, write.version, rows, now)]
                content = checked_json.seal({"repetitions": found[-_MOST_KEPT:]})
                permissions = files.facts(os.path.join(path, "topic.json")).st_mode & 0o777
                directory.replace(NAME, content, permissions)
        except (LogError, OSError) as error:
            logger.warning("%s: the repetition is not noted in %s: %s", path, NAME, error)


def repetitions(path: str | os.PathLike[str]) -> list[Repetition]:
    """The latest 1,000 writes of Spark to the topic at `path` that were dropped as repetitions.

    `CorruptLogError` if the file that records them is damaged.
    """
    return _read(REAL, os.path.abspath(local_path(os.fsdecode(path))))


def _read(files: Files, topic_path: str) -> list[Repetition]:
    def found(facts: dict[str, Any]) -> list[Repetition]:
        rows = [(str(app), int(version), int(rows), int(time)) for app, version, rows, time in facts["repetitions"]]
        return list(map(Repetition._make, rows))

    what = "the repetitions of batches; the file may be removed"
    return checked_json.read(files, os.path.join(topic_path, NAME), _MOST_BYTES, found, what) or []
