"""Commit: the staged records of a write's tasks become visible, once, or are removed.

Invariant: the commit point is one `link` in the store of the topics. Before it, an error means that nothing is
committed. After it, nothing raises: Spark would fail the write, and somebody would repeat it. A committed version that
is not yet applied is applied by the next commit, or by the next writer of the topic.

Spark calls `abort` when a commit has raised, even if that commit still runs in another process. So `abort` first fences
the owner, and then checks if the version is committed. If it is, nothing is removed.

Processes: the driver's host, in processes of Spark that plan.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from ..errors import CorruptLogError, LogError
from ..format.header import HEADER_BYTES
from ..log.store_pointer import settle
from ..segment import Identity
from ..system.clock import SYSTEM
from ..system.files import REAL, Files
from ..transactions.apply import Applier, sweep_staging, topic_of
from ..transactions.fit import Target, check_writers, make_fit
from ..transactions.manifest import Section
from ..transactions.staging import HEADERS, STAGING, directory_of, held_attempts, remove_attempt, sync_names
from ..transactions.state import Intent
from ..transactions.store import Store, find_store
from .repetition import Write, check_repetition, owner_after_abort, tell
from .sink_target import find_topic
from .stage import NAME, Staging, attempts_of, new_attempt

logger = logging.getLogger("loglib")

_APPLY_S = 60.0  # to wait for another process that applies, which may have much to do
_ANSWER_S = 2.0  # a writer that is not stopped answers in milliseconds
_IN_MANIFEST_BYTES = 4 << 20


def commit(write: Write, staged: Sequence[Staging], *, files: Files = REAL) -> bool:
    """Commit the staged records of the tasks, in the order of the tasks. False if all are dropped, or there are none.

    Raises the errors that forbid the commit; then nothing is committed. After `StorageIOError` the commit is in doubt.
    A version that was committed before is dropped and reported (repetition.py).
    """
    topics = _topics(staged)
    if not topics:
        return False
    for path, log_id in topics.items():
        if find_topic(path).log_id != log_id:
            raise LogError(f"{path} was deleted and made again while Spark was writing: nothing is committed")
    store = _find_store(files, topics)
    sections, frames = _listed(files, store, staged)
    with ExitStack() as held:
        now_s = SYSTEM() / 1_000_000
        for path in topics:
            held.enter_context(held_attempts(files, path, attempts_of(files, path, staged), now_s=now_s))
        _check_files(files, store, sections)
        number, repeated = _committed(files, store, write, sections, frames, staged)
    try:
        Applier(files, store, [], clock=SYSTEM).run(_APPLY_S, wanted=0 if repeated else number)
        # Also those that were killed.
        attempts = {each for path in topics for each in attempts_of(files, path, staged)}
        sweep_staging(store, topics, now=SYSTEM(), attempts=attempts)
    except (LogError, OSError) as error:
        logger.warning(
            "version %d of %s is committed in %s, and must not be written again; it is not yet visible everywhere: %s",
            write.version, write.app, store.path, error,
        )  # fmt: skip
    return not repeated


def _committed(
    files: Files, store: Store, write: Write, sections: tuple[Section, ...], frames: bytes, staged: Sequence[Staging]
) -> tuple[int, bool]:
    """Commit the sections; returns the number of the transaction, and whether the version was committed before."""
    targets = sorted({
        Target(topic_of(store, each.topic), Identity.of(each.log_id, each.partition)) for each in sections
    })  # fmt: skip
    check_writers(files, store, targets, answer_s=_ANSWER_S, applying_s=_APPLY_S)
    make_fit(files, store, targets, now=SYSTEM())
    rows = _rows(staged)
    if not write.is_new:
        check_repetition(write, rows.total(), store.app(write.app))
        store.fence_owner(write.app, write.owner, write.source, now=SYSTEM())
        check_repetition(write, rows.total(), store.app(write.app))  # another run may have been quicker
    intent = Intent(write.app, write.version, write.owner, write.source, sections, frames=frames, rows=rows.total())
    number, _, repeated = store.commit(intent, now=SYSTEM())
    if repeated:
        tell(files, write, rows.items(), now=SYSTEM())
    return number, repeated


def abort(write: Write, staged: Sequence[Staging], *, files: Files = REAL) -> bool:
    """Remove the staged records, unless they are committed. True if they are removed.

    An error is a warning: a later commit removes the rest, when it is a day old. A write that may not be committed
    fences nobody.
    """
    topics = _topics(staged)
    if not topics:
        return True
    try:
        store = _find_store(files, topics)
        state = store.app(write.app)
        if not write.is_new:
            check_repetition(write, _rows(staged).total(), state)
        store.fence_owner(write.app, owner_after_abort(state), write.source, now=SYSTEM())
        last = store.last_version(write.app)
        if last is not None and last >= write.version:
            logger.warning("version %d of %s is committed in %s", write.version, write.app, store.path)
            return False
        for path in topics:
            for attempt in attempts_of(files, path, staged):
                remove_attempt(files, path, attempt)
    except (LogError, OSError) as error:
        logger.warning("what version %d of %s has staged is not removed now: %s", write.version, write.app, error)
        return False
    return True


def _topics(staged: Iterable[Staging]) -> dict[str, bytes]:
    """The id of each topic, by path."""
    return {section.topic: section.log_id for each in staged for section in each.sections}


def _rows(staged: Iterable[Staging]) -> Counter[str]:
    """The number of rows for each topic, by path."""
    return sum((Counter(each.rows) for each in staged), Counter())


def _find_store(files: Files, topics: Iterable[str]) -> Store:
    """The store of the topics. It is made if there is none, and the topics are in it from now on."""
    first, *_ = sorted(topics)
    permissions = {each: find_topic(each).config.permissions for each in topics}
    store = find_store(files, first, permissions[first])
    for each in topics:
        settle(files, each, store.path, store.id, permissions=permissions[each])
    return store


# --- before the commit point -------------------------------------------------------------------------------


def _listed(files: Files, store: Store, staged: Sequence[Staging]) -> tuple[tuple[Section, ...], bytes]:
    """The sections for the manifest, in the order of the tasks, and the frames of those that are in no file."""
    joined, found = [], []
    at = 0
    for each in staged:
        found += [one if one.file else one._replace(at=at + one.at) for one in each.sections]
        joined.append(each.frames)
        at += len(each.frames)
    frames = b"".join(joined)
    if len(frames) > _IN_MANIFEST_BYTES:
        attempt = new_attempt(files, staged[0].attempt)  # of the driver
        _park(files, {one.topic for one in found if not one.file}, frames, attempt)
        name, frames = os.path.join(STAGING, attempt, NAME), b""
        found = [one if one.file else one._replace(file=name) for one in found]
    parent = os.path.dirname(store.path)
    sections = tuple(one._replace(topic=os.path.relpath(one.topic, parent)) for one in found)
    return sections, frames


def _park(files: Files, topics: Iterable[str], frames: bytes, attempt: str) -> None:
    """Write frames that are too many for a manifest to a file of the driver in each of these topics. Synced."""
    for path in sorted(topics):
        directory = directory_of(path, attempt)
        permissions = find_topic(path).config.permissions
        files.make_directories(directory, permissions)
        files.fill(files.create(os.path.join(directory, NAME), permissions), frames)
        sync_names(files, path, attempt)


def _check_files(files: Files, store: Store, sections: Iterable[Section]) -> None:
    """`LogError` if this host does not see a staged file, and `CorruptLogError` if a file is too short."""
    ends: dict[str, int] = {}  # by path, what the file must have
    for each in sections:
        if each.file:
            path = os.path.join(topic_of(store, each.topic), each.file)
            ends[path] = max(ends.get(path, 0), each.at + each.size_bytes)
            if each.is_segment:
                ends[path + HEADERS] = each.batches * HEADER_BYTES
    for path, end in ends.items():
        try:
            size = files.facts(path).st_size
        except FileNotFoundError as error:
            raise LogError(
                f"{path} is missing on the driver's host: nothing is committed. The topic must be in storage that "
                "the driver and all executors share, mounted at the same path"
            ) from error
        if size < end:
            raise CorruptLogError(path, size, "the end of the file", f"{end} bytes")
