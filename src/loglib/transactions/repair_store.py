"""Repair store: makes a store of transactions that is damaged, or that was set back, usable again.

Invariant: intact files do not change, and a damaged file is set aside before it is replaced. A transaction that is
committed and intact is given up only if no process can apply it, since a topic has another history, or lacks the file
with its records. A repair may be interrupted at any point and run again.

    store.json      made again, with the id that the topics beside it name
    a checkpoint    a damaged one is replaced by one without apps
    an entry        a damaged one is replaced by an empty one
    the numbers     continue above those that the topics have

Threads: no state. Processes: it holds the store's lock, so no process applies meanwhile; others may commit.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from typing import NamedTuple, TypeVar

from ..config.policies import TopicConfig
from ..errors import CorruptLogError, LockedError, LogError
from ..format.checked_json import unseal
from ..format.record import Damage
from ..log import catalog, topic_file
from ..log.log import Log
from ..log.recovery import Extent
from ..log.repair import Repair, RepairReport, repair_topic
from ..log.store_pointer import STORE_FILE, is_lost, read_pointer
from ..log.transaction_numbers import CHECKPOINT, DONE, MOST_BYTES, name_of, numbers
from ..log.verify import Progress, VerifyReport
from ..segment import Identity
from ..system.clock import SYSTEM
from ..system.directory import Directory
from ..system.files import REAL, Files
from ..system.lock import try_acquire
from .apply import topic_of
from .fit import Target, numbers_of
from .manifest import Checkpoint, Manifest, Section, decode, decode_checkpoint, decode_store, encode, encode_checkpoint
from .manifest import encode_store as encode_description
from .staging import HEADERS
from .store import Store

T = TypeVar("T")


class _Fault(NamedTuple):
    """A fault of a store, and its repair."""

    damage: Damage
    action: str  # what the repair does, for the report
    mend: Callable[[], str | None]  # returns the path of the file that was set aside


def repair(
    path: str | os.PathLike[str], *, dry_run: bool = False, accept: bool = False, progress: Progress | None = None
) -> RepairReport:
    """Repair a damaged topic, so that it opens and is read past the damage. An intact topic does not change.

    Ranges of offsets that cannot be read are declared as gaps: all readers pass over them, log a warning and add them
    to `Reader.gaps`. Damaged bytes stay in their files; bytes that must be overwritten or cut are copied aside first,
    into files `*.damaged-*` beside them. A damaged `topic.json` is replaced by one with the default policies: retention
    then drops nothing until you set it again. A damaged log of a consumer group's commits is not repaired. The part of
    a transaction that no process can finish, because the store of transactions is gone, is declared as a gap, too. If
    the topic has numbers that its store has not given, the store continues above them.

    `path` may also be a store of transactions: a directory `.transactions`. Its damaged files are set aside, as
    `*.damaged`, and replaced by empty ones. If the topics beside it have numbers that it has not given, because it was
    set back to an older state, it continues above them. The versions of apps that it no longer knows can then be
    committed a second time.

    With `accept` the loss of all gaps, also of those that were declared before, is accepted: they stay in
    `VerifyReport.gaps`, and are in `VerifyReport.accepted`, too. `loglib verify`, `scrub` and `heal` then end with exit
    code 0. A gap that grows must be accepted again. `ValueError` for a store, which has no gaps.

    `dry_run` changes nothing and reports what would be done. `progress` is called now and then with two numbers of
    bytes: those that are read, and all. Reads every partition twice.

    Gaps inside sealed segments are declared also beside a writer. If another repair is needed in a partition that a
    process writes, `LockedError` is raised after the other partitions were repaired; its `report` says what was done,
    and its `holders` who has which partition. Raises `LogError` if there is no topic, `CorruptLogError` for a partition
    of which nothing is left, and `StorageIOError` if the disk fails to read: copy the files to another disk first.
    """
    absolute = os.path.abspath(os.fsdecode(path))
    if is_store(REAL, absolute):
        if accept:
            raise ValueError(f"{absolute} is a store of transactions: it has no gaps that could be accepted")
        return repair_store(REAL, absolute, dry_run=dry_run, now=SYSTEM())
    report = repair_topic(REAL, absolute, dry_run=dry_run, accept=accept, progress=progress)
    return report._replace(repairs=(*report.repairs, *_raise_store(REAL, absolute, dry_run=dry_run, now=SYSTEM())))


def is_store(files: Files, path: str) -> bool:
    """True if the directory is a store of transactions, perhaps a damaged one."""
    try:
        return files.exists(os.path.join(path, STORE_FILE)) or bool(numbers(files.names_in(path), CHECKPOINT))
    except (FileNotFoundError, NotADirectoryError):
        return False


def verify_store(files: Files, path: str) -> VerifyReport:
    """Report the faults of a store of transactions: damaged files, and numbers of its topics that it has not given."""
    return VerifyReport(0, 0, 0, 0, tuple(each.damage for each in _Examination(files, path, now=0).faults()))


def repair_store(files: Files, path: str, *, dry_run: bool, now: int) -> RepairReport:
    """Repair a store as `repair` says. `LockedError` if a process is applying transactions."""
    lock = try_acquire(files, path)
    if lock is None:
        raise LockedError(path, "a process that applies transactions", advice="try again")
    try:
        repairs = tuple(_repaired(_Examination(files, path, now=now).faults(), dry_run=dry_run))
    finally:
        lock.release()
    return RepairReport(repairs, verify_store(files, path))


def _raise_store(files: Files, topic: str, *, dry_run: bool, now: int) -> Iterator[Repair]:
    """Let the topic's store, wherever it is, continue above the topic's numbers."""
    with suppress(LogError, OSError):  # the store's own repair
        pointer, described = read_pointer(files, topic), topic_file.read(files, topic)
        if pointer is not None and described is not None and not is_lost(files, topic):
            path = os.path.normpath(pointer.path)
            with Store(files, path) as store:
                faults = _Examination(files, path, now=now).of_numbers(store, _targets(topic, *described))
                yield from _repaired(faults, dry_run=dry_run)


def _repaired(faults: Iterable[_Fault], *, dry_run: bool) -> Iterator[Repair]:
    """Mend each fault before the next one is looked for, or with `dry_run` none."""
    for fault in faults:
        kept = None if dry_run else fault.mend()
        yield Repair(None, fault.damage.path, f"{fault.action} ({fault.damage.found})", kept=kept)


def _targets(topic: str, log_id: bytes, config: TopicConfig) -> Iterator[Target]:
    return (Target(topic, Identity.of(log_id, number)) for number in range(config.partitions))


class _Examination:
    """One look at a store. Each fault may be mended before the next one is looked for."""

    def __init__(self, files: Files, path: str, *, now: int) -> None:
        self._files = files
        self._path = path
        self._now = now

    def faults(self) -> Iterator[_Fault]:
        """Yield the faults in the order in which they are mended."""
        yield from self._of_files()
        with suppress(LogError, OSError), Store(self._files, self._path) as store:  # else the files have a fault
            yield from self.of_numbers(store, (target for _, targets in self._topics() for target in targets))
            yield from self._of_topics(store)

    # --- files -------------------------------------------------------------------------------------------

    def _of_files(self) -> Iterator[_Fault]:
        yield from self._of_file(
            STORE_FILE, decode_store, encode_description, "made again", lambda: encode_description(self._stated_id())
        )
        names = self._files.names_in(self._path)
        newest = max(numbers(names, CHECKPOINT), default=min(numbers(names), default=1) - 1)
        yield from self._of_file(
            name_of(newest, CHECKPOINT), decode_checkpoint, encode_checkpoint,
            "replaced by an empty one: the versions of its apps are lost",
            lambda: encode_checkpoint(Checkpoint(newest, {}, {})),
        )  # fmt: skip
        for number in sorted(each for each in numbers(names) if each > newest):
            lost = "the last version of its app may be lost"
            if name_of(number, DONE) not in names:
                lost = "its records are lost where they are not yet applied"
            yield from self._of_file(
                name_of(number), self._decode_pending, encode, f"replaced by an empty entry: {lost}",
                lambda: encode(Manifest(0, None, None, "", None, self._now)),
            )  # fmt: skip

    def _decode_pending(self, content: bytes, path: str) -> Manifest:
        manifest = decode(content, path)
        if manifest.frames is None and not self._files.exists(path + DONE):
            raise CorruptLogError(path, 0, "damaged records after its line", "those that its line describes")
        return manifest

    def _of_file(
        self, name: str, read: Callable[[bytes, str], T], write: Callable[[T], bytes], action: str,
        instead: Callable[[], bytes],
    ) -> Iterator[_Fault]:  # fmt: skip
        path = os.path.join(self._path, name)
        try:
            content = self._files.read_whole(path, MOST_BYTES)
            whole = write(read(content, path))
        except FileNotFoundError:
            damage = Damage(None, range(0), path, 0, "no file", "one")
        except CorruptLogError as error:
            damage = Damage.of(error, None)
        else:
            with suppress(ValueError):
                unseal(content[: content.find(b"\n") + 1])
                return
            damage = Damage(None, range(0), path, 0, "one flipped bit", "what its checksum says")
            action, instead = "written again, as its checksum says", lambda: whole
        yield _Fault(damage, action, lambda: self._replace(name, instead()))

    def _replace(self, name: str, content: bytes) -> str | None:
        kept = None
        with Directory.open(self._files, self._path) as directory:
            if directory.exists(name):
                kept = f"{name}.damaged"
                with suppress(FileExistsError):  # an interrupted repair has set it aside
                    directory.link(name, kept)
            permissions = stat.S_IMODE(self._files.facts(self._path).st_mode) & 0o666
            directory.replace(name, content, permissions)
            if name.isdigit():  # a process that read it before the damage must not wait for it
                with suppress(FileExistsError):
                    directory.link(name, f"{name}{DONE}")
                directory.sync()
        return None if kept is None else os.path.join(self._path, kept)

    def _stated_id(self) -> bytes:
        """The id that most topics name for this store."""
        ids = Counter(pointer_id for pointer_id, _ in self._topics())
        if not ids:
            raise CorruptLogError(self._path, 0, "no topic that names this store", "one, which has the store's id")
        return ids.most_common(1)[0][0]

    # --- topics ------------------------------------------------------------------------------------------

    def _topics(self) -> Iterator[tuple[bytes, Iterator[Target]]]:
        """For each topic beside the store that names it: the id that it has for the store, and its partitions."""
        parent = os.path.dirname(self._path)
        for name in catalog.names(self._files, parent):
            path = os.path.join(parent, name)
            with suppress(CorruptLogError):
                pointer, described = read_pointer(self._files, path), topic_file.read(self._files, path)
                if pointer is not None and described is not None and os.path.normpath(pointer.path) == self._path:
                    yield pointer.id, _targets(path, *described)

    def of_numbers(self, store: Store, targets: Iterable[Target]) -> Iterator[_Fault]:
        """The fault of a store that has not given the highest number of these partitions."""
        last, ahead = store.last_number(), None
        highest = last
        for target in targets:
            with suppress(LogError, OSError):  # the topic's own repair
                has = numbers_of(self._files, target)
                if max(has.applied_txn, has.held_txn) > highest:
                    highest, ahead = max(has.applied_txn, has.held_txn), target
        if ahead is None:
            return
        found = f"the last transaction is {last}, and {ahead.directory} has transaction {highest}"
        damage = Damage(None, range(0), self._path, 0, found, "a store that has given all numbers of its topics")

        def pass_over() -> None:
            with Store(self._files, self._path) as again:
                again.pass_over(highest, now=self._now)

        yield _Fault(damage, f"the next transaction has a number above {highest}", pass_over)

    def _of_topics(self, store: Store) -> Iterator[_Fault]:
        """Transactions that no process can apply."""
        for manifest in store.pending():
            for section in manifest.sections:
                topic = topic_of(store, section.topic, section.log_id)
                target = Target(topic, Identity.of(section.log_id, section.partition))
                try:
                    obstacle = self._obstacle(target, manifest, section)
                except (LogError, OSError):  # the topic's own repair
                    continue
                if obstacle is not None:
                    yield self._of_pending(manifest, *obstacle)
                    break

    def _obstacle(self, target: Target, manifest: Manifest, section: Section) -> tuple[str, str] | None:
        """The reason why no process can apply the section, and the expected state; None if one can apply it."""
        if self._has_other_history(target, manifest):
            return f"{target.directory} has another history", "the log for which it was committed"
        missing = self._missing_file(target, manifest, section)
        return None if missing is None else (f"there is no {missing}", "the file with its records")

    def _missing_file(self, target: Target, manifest: Manifest, section: Section) -> str | None:
        """The path of a staged file that is missing, while its records are not in the log.

        So it is after a copy that took the topic before the commit, and the store after it.
        """
        if not section.file:
            return None
        path = os.path.join(target.topic_path, section.file)
        needed = (path, path + HEADERS) if section.is_segment else (path,)
        missing = next((each for each in needed if not self._files.exists(each)), None)
        # Looked up last: a process that applies it notes that before it removes the files.
        return missing if missing and numbers_of(self._files, target).applied_txn < manifest.number else None

    def _has_other_history(self, target: Target, manifest: Manifest) -> bool:
        has = numbers_of(self._files, target)
        if has.applied_txn < manifest.number or (has.applied_txn, has.applied_id) == (manifest.number, manifest.id):
            return False
        with closing(Log(self._files, target.directory, target.identity)) as log:
            mark = log.published()
            headers = log.headers_from(mark.log_start_offset, mark)
            return Extent.among(headers, manifest.number, manifest.id) != Extent.WHOLE

    def _of_pending(self, manifest: Manifest, why: str, expected: str) -> _Fault:
        name = name_of(manifest.number)
        found = f"transaction {manifest.number} cannot be applied: {why}"
        damage = Damage(None, range(0), os.path.join(self._path, name), 0, found, expected)

        def give_up() -> str:
            with Directory.open(self._files, self._path) as directory, suppress(FileExistsError):
                directory.link(name, f"{name}.damaged")
            with Store(self._files, self._path) as again:
                again.finish(manifest.number, now=self._now)
            return os.path.join(self._path, f"{name}.damaged")

        return _Fault(damage, "given up: its records that are not yet applied are lost", give_up)
