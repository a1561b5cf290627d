"""G3: whole files and batches in the wrong place: removed, cut, copied, swapped and spliced.

After any such change, reading past damage returns exactly the records that no gap names, each as it was
written. Reading without `on_damage="skip"` ends with an error, or returns all records. `verify` reports the
change. A writer refuses to open, or opens without changing a byte below the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import counts
import pytest

from conftest import NOW, QUIET, Clock
from loglib import CorruptLogError, Record, Topic, testing
from loglib.format.watermark import SECOND_SLOT, SLOT_BYTES
from loglib.testing import CrashFS, Image

pytestmark = pytest.mark.reliability

Tree = dict[str, bytes]

TOPIC = "/logs/clicks"
BATCH = 144  # of one record of eight bytes
BATCHES = 12  # in each partition, four in a segment
FORKED = 6  # where the other history begins
BASES = (0, 4 * BATCH, 8 * BATCH)
END = BATCHES * BATCH


class Case(NamedTuple):
    """A change of the files."""

    name: str
    tree: Tree
    # Several batches of another history that agree with each other: noticed at their end, after the first was returned.
    told_late: bool = False
    # No flushed batch stands behind it that could show the change.
    hidden: bool = False


class Histories(NamedTuple):
    """The log, another log, and the same log as if a crash had come in its middle."""

    log: Tree
    other: Tree
    forked: Tree
    earlier: Tree
    records: dict[int, list[Record]]


def write(files: CrashFS, numbers: range, text: bytes) -> None:
    with testing.open_topic(TOPIC, files=files, clock=Clock(), partitions=2, **QUIET) as topic:
        for number in numbers:
            for partition in topic.partitions:
                partition.append(text + b"%d%05d" % (partition.id, number), timestamp=NOW, sync=True)
                if number % 4 == 3 and number < BATCHES - 1:
                    partition.roll()


@cache
def histories() -> Histories:
    files = CrashFS()
    write(files, range(FORKED), b"a.")
    early = without_locks(files.tree())
    write(files, range(FORKED, BATCHES), b"a.")
    forked = CrashFS(Image.of(early))
    write(forked, range(0), b"")  # opened once more, so that the epochs of the writers differ too
    write(forked, range(FORKED, BATCHES), b"c.")
    other = CrashFS()
    write(other, range(BATCHES), b"b.")
    with testing.open_topic(TOPIC, mode="r", files=files) as topic:
        assert topic.verify().damage == ()
        records = {each.id: list(each.read()) for each in topic.partitions}
        assert [segment.base_offset for segment in topic.partition(1).segments] == list(BASES)
    ours, others, forks = (without_locks(each.tree()) for each in (files, other, forked))
    return Histories(ours, others, forks, early, records)


def without_locks(tree: Tree) -> Tree:
    return {path: content for path, content in tree.items() if not path.endswith("/lock")}


def segment(partition: int, base: int) -> str:
    return f"{TOPIC}/{partition:04d}/{base:020d}.log"


# --- what is done ----------------------------------------------------------------------------------


def files_tampered_with() -> Iterator[Case]:
    log, other, forked, earlier, _ = histories()
    places = [(partition, base) for partition in (0, 1) for base in BASES]
    for place in places:
        path = segment(*place)
        whole = log[path]
        yield Case(f"{path} removed", {name: content for name, content in log.items() if name != path})
        for size in (0, 1, 4095, *range(4096, len(whole), BATCH), len(whole) - 1):
            yield Case(f"{path} cut at {size}", log | {path: whole[:size]})
        for behind in (b"?", bytes(4096), whole[-BATCH:], whole[4096:]):
            if place[1] != BASES[-1]:
                yield Case(f"{path} with {len(behind)} bytes more", log | {path: whole + behind})
        for source in places:
            if source != place:
                name = f"{path} is a copy of {segment(*source)}"
                yield Case(name, log | {path: log[segment(*source)]})
                yield Case(f"{name} of another log", log | {path: other[segment(*source)]})
        yield Case(f"{path} of another log", log | {path: other[path]})
        if place[1]:
            yield Case(f"{path} of another history", log | {path: forked[path]}, told_late=True)
        for base in (8, BATCH, 2 * BATCH, 5 * BATCH, END, END + BATCH, 1 << 40):
            yield Case(f"{path} also at {base}", log | {segment(place[0], base): whole})
    for partition in (0, 1):
        mark, mirrored = f"{TOPIC}/{partition:04d}/watermark", f"{TOPIC}/{1 - partition:04d}/watermark"
        yield Case(f"{mark} removed", {name: content for name, content in log.items() if name != mark})
        yield Case(f"{mark} of the other partition", log | {mark: log[mirrored]})
        yield Case(f"{mark} of another log", log | {mark: other[mark]})
        for size in (0, SLOT_BYTES - 1, SLOT_BYTES, SECOND_SLOT, SECOND_SLOT + SLOT_BYTES - 1):
            yield Case(f"{mark} cut at {size}", log | {mark: log[mark][:size]})
    swap = {"/0000/": "/0001/", "/0001/": "/0000/"}
    swapped = {name.replace(each, swap[each]): log[name] for each in swap for name in log if each in name}
    yield Case("partitions swapped", {name: content for name, content in log.items() if "json" in name} | swapped)
    yield Case("description of another log", log | {f"{TOPIC}/topic.json": other[f"{TOPIC}/topic.json"]})
    yield Case("a partition more than described", log | {segment(2, 0): log[segment(1, 0)]})
    for partition in (0, 1):  # as from an earlier backup
        for name in log:
            if f"/{partition:04d}/" in name and earlier.get(name, log[name]) != log[name]:
                yield Case(f"{name} as it was before", log | {name: earlier[name]}, hidden="watermark" in name)


def batches_spliced() -> Iterator[Case]:
    """Each batch is replaced by each other one of the same size: of another place, partition, log or history."""
    log, other, forked, _, _ = histories()
    places = [(partition, number) for partition in (0, 1) for number in range(BATCHES)]
    for place in places:
        for source in places:
            if source != place:
                yield _spliced(f"batch {place} is that of {source}", place, batch_of(log, *source))
            yield _spliced(f"batch {place} is that of {source} in another log", place, batch_of(other, *source))
        stale = batch_of(forked, *place)
        if place[1] >= FORKED:
            yield _spliced(f"batch {place} is of another history", place, stale, hidden=place[1] == BATCHES - 1)
    for partition in (0, 1):
        for one in range(BATCHES):
            for two in range(one):
                first, second = batch_of(log, partition, one), batch_of(log, partition, two)
                case = _spliced(f"batches {one} and {two} of {partition} swapped", (partition, one), second)
                yield _spliced(case.name, (partition, two), first, tree=case.tree)


def batch_of(tree: Tree, partition: int, number: int) -> bytes:
    base = BASES[number // 4]
    at = 4096 + number * BATCH - base
    return tree[segment(partition, base)][at : at + BATCH]


def _spliced(
    name: str, place: tuple[int, int], batch: bytes, *, tree: Tree | None = None, hidden: bool = False
) -> Case:
    tree = tree or histories().log
    base = BASES[place[1] // 4]
    at = 4096 + place[1] * BATCH - base
    content = tree[segment(place[0], base)]
    return Case(name, tree | {segment(place[0], base): content[:at] + batch + content[at + BATCH :]}, hidden=hidden)


# --- what must come of it --------------------------------------------------------------------------


@pytest.mark.parametrize("cases", [files_tampered_with, batches_spliced])
def test_what_stands_in_the_wrong_place_is_noticed_and_never_returned(cases: Any) -> None:
    done = list(cases())
    for case in done:
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{case.name}: {error!r}") from error
    counts.count("G3", tamperings=len(done), undetected=0, wrong=0)


def check(case: Case) -> None:
    files = CrashFS(Image.of(case.tree))
    try:
        topic = testing.open_topic(TOPIC, mode="r", files=files)
    except CorruptLogError:
        assert not differences(files.tree(), case.tree)
    else:
        with topic:
            check_reading(case, topic)
        assert not differences(files.tree(), case.tree)
    check_writing(case, files)


def check_reading(case: Case, topic: Topic) -> None:
    written = histories().records
    noticed = bool(topic.verify().damage)
    for partition in topic.partitions:
        reader = None
        try:
            reader = partition.read(on_damage="skip")
            end = partition.high_watermark
        except CorruptLogError:
            continue  # no watermark and no segment says how far the log goes
        found = list(reader)
        gone = [gap.offsets for gap in reader.gaps]
        expected = [
            record for record in written[partition.id]
            if record.offset < end and not any(record.offset in offsets for offsets in gone)
        ]  # fmt: skip
        if not (case.told_late or case.hidden):
            assert found == expected, gone
        strict: list[Any] = []
        refused = False
        try:
            strict.extend(partition.read())
        except CorruptLogError:
            refused = True
        if not (case.told_late or case.hidden):
            assert strict == written[partition.id][: len(strict)]
            assert refused or len(strict) == sum(record.offset < end for record in written[partition.id])
    assert noticed or case.hidden, "verify has not noticed"


def check_writing(case: Case, files: CrashFS) -> None:
    try:
        testing.open_topic(TOPIC, files=files, clock=Clock()).close()
    except CorruptLogError as error:
        # A whole partition may have been opened before, and closed again: this changes its watermark.
        opened = [name for name in case.tree if name.endswith("/watermark") and not error.path.startswith(name[:-10])]
        changed = differences(case.tree, without_locks(files.tree())) - set(opened)
    else:
        written = histories().log
        changed = {name for name in differences(case.tree, files.tree()) if name.endswith(".log") and name in written}
    assert not changed


def differences(one: Tree, other: Tree) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
