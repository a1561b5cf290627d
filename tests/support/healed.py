"""Damaged logs with other copies of them, and what healing owes to both."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from random import Random
from typing import NamedTuple

from damaged import TOPIC, Rows, Tree, WholeLog, append_some, damage, files_with, rows_of

from loglib import CorruptLogError, testing
from loglib.copies import HealReport
from loglib.copies.healing import heal_topic
from loglib.testing import CrashFS, MemoryFiles

HEALTHY, DAMAGED, OLDER, SPLIT, FOREIGN = KINDS = ("healthy", "damaged", "older", "split", "foreign")
_WATERMARKS = {"watermark", "no watermark"}  # kinds of damage after which nothing may say where the log ends


class Copies(NamedTuple):
    """A damaged log, and the others that may heal it."""

    whole: WholeLog  # as the log was
    tree: Tree  # of the damaged log
    kinds: list[str]  # of its damages
    donors: dict[str, Tree]


def copies(random: Random) -> Copies:
    """A log that two writers have written, damaged, and other copies of it, good ones and bad ones."""
    segment_bytes = random.choice((4096, 6000, 20_000))
    older = _written(MemoryFiles(), random, segment_bytes)
    files = files_with(older)
    for _ in range(100):
        files.random_bytes(4)  # another writer has another nonce than the one of the split copy
    whole_tree = _written(files, random, segment_bytes, first=100)
    rows = rows_of(files_with(whole_tree))
    assert rows is not None
    whole = WholeLog(whole_tree, rows, 0)
    tree, kinds = damage(whole_tree, random)
    donors = {
        HEALTHY: whole_tree,
        DAMAGED: damage(whole_tree, random)[0],
        OLDER: older,
        SPLIT: _written(files_with(older), random, segment_bytes, first=200),
        FOREIGN: _written(MemoryFiles(), random, segment_bytes),
    }
    return Copies(whole, tree, kinds, donors)


def _written(files: MemoryFiles, random: Random, segment_bytes: int, first: int = 0) -> Tree:
    with testing.open_topic(TOPIC, files=files, segment_bytes=segment_bytes) as topic:
        append_some(topic, random, first)
    return files.tree()


def beside(tree: Tree, donors: dict[str, Tree], names: Iterable[str]) -> CrashFS:
    """A disk with the log, and with these other copies of it: `/healthy/topic` and so on."""
    moved = {path.replace("/data/", f"/{name}/", 1): each for name in names for path, each in donors[name].items()}
    return files_with(tree | moved)


def healed(files: MemoryFiles, names: Iterable[str], *, dry_run: bool = False) -> HealReport | None:
    """Heal the topic from these; None if nothing says what it was."""
    try:
        return heal_topic(files, TOPIC, [f"/{name}/topic" for name in names], dry_run=dry_run)
    except CorruptLogError as error:
        found = ("no whole header of a segment", "no file")
        assert error.found in found or error.path.endswith("topic.json"), error
        return None


def judge(files: MemoryFiles, report: HealReport, given: Copies, names: Collection[str]) -> int:
    """Check the result of healing from these donors; returns how many records came back."""
    after, whole = files.tree(), given.whole
    for path in whole.tree:
        if path.endswith((".log", ".producers")):
            _judge_file(path, after.get(path), given.tree.get(path), whole.tree[path])
    for path in given.tree.keys() - whole.tree.keys():
        assert after[path] == given.tree[path]
    before, rows = _readable(files_with(given.tree)), _readable(files)
    assert rows.items() <= whole.rows.items(), "a record was invented or changed"
    assert before.items() <= rows.items(), "a record that could be read cannot be read any more"
    if HEALTHY in names and not _WATERMARKS & set(given.kinds):
        assert not report.unhealed and not report.verified.damage, report
        assert rows == whole.rows
        last = max(path for path in whole.tree if path.endswith(".log"))
        for path, content in whole.tree.items():
            if path.endswith((".log", ".producers", "topic.json")):  # what is behind the log's end is a torn tail
                found = after[path] if path != last else after[path][: len(content)]
                assert found == content, f"{path} is not as it was"
        _goes_on(files, rows)
    return len(rows) - len(before)


def _judge_file(path: str, after: bytes | None, before: bytes | None, whole: bytes) -> None:
    """Each byte is as it was before, or as it was before the damage."""
    assert after is not None or before is None, f"{path} is gone"
    for at, byte in enumerate(after or b""):
        old = None if before is None or at >= len(before) else before[at]
        right = whole[at] if at < len(whole) else None
        if byte not in (old, right) and not (old is None and byte == 0 and at < len(whole)):
            raise AssertionError(f"{path}, byte {at}: {byte} was {old} and should be {right}")


def _goes_on(files: MemoryFiles, rows: Rows) -> None:
    with testing.open_topic(TOPIC, files=files) as topic:
        place = topic.append(b"after")
        topic.flush()
    assert rows_of(files) == rows | {place.offset: b"after"}


def _readable(files: MemoryFiles) -> Rows:
    return rows_of(files, on_damage="skip") or {}
