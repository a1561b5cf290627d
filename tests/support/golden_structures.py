"""One example of each structure of the format: how it is written, how it is read, and what it says.

`make_golden.py` writes them into tests/golden; `test_golden_structures.py` compares.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from builders import EVERYTHING, IDENTITY, LOG_ID, NOW, PLAIN, batch_of, encoded
from make_golden import POLICIES

from loglib.append import transfer
from loglib.copies import roster
from loglib.format import watermark
from loglib.format.columns import Columns
from loglib.format.header import crc32c
from loglib.groups import commit_log
from loglib.jobs import entries, generation
from loglib.jobs.state import Counts, Item, Settings, State
from loglib.log import ages, copy_role, gaps, pending_marks, topic_file
from loglib.log.store_pointer import read_pointer, sealed
from loglib.segment import (
    MAX_PRODUCERS,
    ProducerState,
    SegmentHeader,
    first_segment,
    read_producers,
    segment_name,
    write_producers,
)
from loglib.system.clock import Moment
from loglib.system.directory import Directory
from loglib.system.files import REAL
from loglib.transactions import manifest

SHARED = Columns([b"a", b"", None], headers=[(("schema", b"7"), ("ключ", b""))] * 3)
COMPRESSIBLE = Columns([b"compressible " * 40, b"x" * 100], keys=[b"k", b"k"], timestamps=[NOW, NOW + 1])
PRODUCERS = tuple(ProducerState(number + 1, number, 8 * number, 3, NOW // 10**6) for number in range(MAX_PRODUCERS + 9))
STORE_ID = bytes(range(16, 32))


class Structure(NamedTuple):
    """An example. `read` gives `says` from the bytes, and `write` gives the bytes again."""

    write: Callable[[], bytes]
    read: Callable[[bytes], Any]
    says: Any
    same_bytes: bool = True  # False: another library may compress otherwise


def in_a_file(name: str, write: Callable[[str], object]) -> bytes:
    """What a function writes into a file of this name in the directory that it gets."""
    with tempfile.TemporaryDirectory() as directory:
        write(directory)
        return (Path(directory) / name).read_bytes()


def from_a_file(name: str, read: Callable[[str], Any], content: bytes) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / name).write_bytes(content)
        return read(directory)


def _with_directory(use: Callable[[Directory], object]) -> Callable[[str], object]:
    def run(path: str) -> object:
        with Directory.open(REAL, path) as directory:
            return use(directory)

    return run


def _batch(columns: Columns, codec: int = 0) -> Structure:
    def read(content: bytes) -> Columns:
        found = batch_of(content, 4096)
        assert found._header.codec == codec, "it shrinks"
        return Columns(found.values, found.keys, found.timestamps, found.headers)

    count = len(columns.values)
    says = Columns(
        columns.values, columns.keys or [None] * count, columns.timestamps or [NOW] * count,
        columns.headers or [()] * count,
    )  # fmt: skip
    return Structure(lambda: encoded(columns, 4096, codec=codec), read, says, same_bytes=codec == 0)


def _described(content: bytes) -> tuple[Any, ...]:
    return from_a_file("topic.json", lambda path: topic_file.read(REAL, path), content)[-2:]  # type: ignore[no-any-return]


MARK = watermark.Mark(9, 4096, 81920, 73728, 5, 6, 77824, 7, 8, 81920, 4, 69632, 77824, 90112, 81920, 10, 11, 12)
HEADER = SegmentHeader(
    LOG_ID, 0, 7, 8192, NOW, 4096, 4096, 0xDEADBEEF, NOW - 1, NOW + 1, 1, 2, 3, 4, 512, 6, STORE_ID, 9, 8,
    10, 11, 12, 13, 14, 15, PRODUCERS[:2], 0x0100,
)  # fmt: skip
GAPS = (gaps.Gap(0, 4096, "a header CRC", NOW), gaps.Gap(8192, 9000, "no file", NOW + 1))
STAMPS = [ages.Stamp(0, NOW, 5, LOG_ID), ages.Stamp(4096, NOW + 9, 14, STORE_ID)]
ROLE = copy_role.Role("mirror", LOG_ID, "0123456789abcdef", "/data/orders", NOW)
MEMBERS = roster.Members(
    LOG_ID, "00000000000000aa", {"00000000000000aa": "/a/t", "00000000000000bb": "/b/t"}, "quorum", 3
)
ENTRIES = {commit_log.LogPartition(LOG_ID, 3): commit_log.Entry(4096, 2, LOG_ID, 77, "meta ü", "one", NOW, 5, "orders")}
MANIFEST = manifest.Manifest(
    3, "etl", 4, "owner", "query", NOW,
    (manifest.Section("orders", LOG_ID, 1, "staging/a/0001", 0, 512, 2, True),
     manifest.Section("orders", LOG_ID, 2, "", 0, 5, 1)),
    (manifest.GroupCommit("orders", "g", "orders-1", [4096, 2, "rest"]),),
    (manifest.Fence("orders", "g", "orders-2", 7),), b"bytes",
)  # fmt: skip
MANIFEST_WITH_JOBS = MANIFEST._replace(
    jobs=(manifest.JobCommit("mail", LOG_ID.hex(), "send", 0, 11, 1 << 32, 4096, 2, 1),)
)
CHECKPOINT = manifest.Checkpoint(
    2, {"etl": manifest.AppState(3, "owner", ("before",), "query", 2, NOW)}, {("orders", "g", "orders-1"): 2}
)
_MORE = HEADER._replace(base_offset=0, more_producers=9, producers=PRODUCERS[-MAX_PRODUCERS:])


def _producers_file() -> bytes:
    name = segment_name(0).replace(".log", ".producers")
    return in_a_file(name, _with_directory(lambda place: write_producers(place, 0, PRODUCERS, 0o600)))


def _read_producers_file(content: bytes) -> Any:
    header = _MORE._replace(more_producers_crc=crc32c(content))
    name = segment_name(0).replace(".log", ".producers")
    return from_a_file(name, lambda path: read_producers(REAL, path, header), content)


def _commit(content: bytes) -> Any:
    stored = json.loads(content)
    return commit_log.parse(stored["value"].encode(), stored["key"].encode(), stored["timestamp"], "d", 0)


def _written_commit() -> bytes:
    (value,), (key,), (timestamp,), _ = commit_log.encoded(ENTRIES)  # type: ignore[misc]
    return json.dumps({"key": key.decode(), "timestamp": timestamp, "value": value.decode()}).encode()  # type: ignore[union-attr]


SHARE = generation.Place(LOG_ID, 3, "mail")
CHECKPOINT_OF_A_SHARE = generation.Checkpoint(
    2, 4099, 77, Settings(5, 10_000, 0), Counts(1, 2, 3, 4), Moment(NOW, 5_000_000, STORE_ID),
    (Item(4096, 0, 7_000_000, 0, 1, 0, 2), Item(4098, entries.pair(4, 1), 8_000_000, 11, 1, 2, 3)),
)  # fmt: skip
ENTRIES_OF_A_SHARE: tuple[tuple[Any, ...], ...] = (
    (entries.BEGIN, 0, 1, entries.pair(11, 1_700_000_000), 4099, 9_000_000),
    (entries.RENEW, 0, 0, 9_500_000, 4099, entries.pair(0, 2)),
    (entries.SETTLE, entries.RELEASED, 1, 9_600_000, 4099, entries.pair(0, 2)),
    (entries.REAP, entries.DEAD, 0, 12, 11, 0),
    (entries.REAP, entries.EXPIRED, 0, 9_700_000, 11, entries.pair(4, 1)),
    (entries.LOST, 0, 1, 0, 4096, 11),
    (entries.DEFER, entries.BY_TIME, 1, 9_800_000, 4100, 0),
    (entries.DEFER, entries.BY_KEY, 2, 0, 4101, 0),
    (entries.BEGIN, 5, 1, entries.pair(11, 1_700_000_000), 4099, 0),
    (entries.PASS, 0, 0, 0, 8192, 0),
    (entries.SEAL, entries.ALTERED, 0, entries.pair(5, 10_000), 0, 0),
)
CHECKPOINT_WITH_PINS = CHECKPOINT_OF_A_SHARE._replace(
    settings=Settings(5, 10_000, 0, "", "key"),
    items=(Item(4090, 0, 0, 12, 1, 0, 5, 2), Item(4091, 0, 0, 0, 0, 0, 0, 4),
           Item(4098, entries.pair(4, 1), 0, 11, 1, 2, 3, 1), Item(4099, entries.pair(5, 1), 0, 11, 1, 2, 5, 3)),
)  # fmt: skip
PINS_OF_A_SHARE: tuple[tuple[Any, ...], ...] = (
    (entries.BEGIN, 0, 2, entries.pair(11, 1_700_000_000), 4101, 0),
    (entries.PIN, entries.PINNED, 1, 11, 4101, entries.pair(0, 3)),
    (entries.PIN, entries.UNPINNED, 1, 11, 4101, entries.pair(0, 3)),
    (entries.PIN, entries.PINNED, 2, 11, 4101, entries.pair(0, 3)),
    (entries.PIN, entries.ACCEPTED, 1, 11, 4101, entries.pair(0, 3)),
    (entries.PIN, entries.RELEASED, 1, 11, 4102, entries.pair(0, 3)),
    (entries.PIN, entries.REJECTED, 1, 11, 4098, entries.pair(4, 1)),
    (entries.PIN, entries.EXHAUSTED, 1, 11, 4099, entries.pair(5, 1)),
    (entries.SEAL, entries.ALTERED, 0, entries.pair(5, 10_000), 0, 1),
)


def _write_entries(written: tuple[tuple[Any, ...], ...] = ENTRIES_OF_A_SHARE) -> bytes:
    return b"".join(
        entries.encode(SHARE.salt(2), kind, outcome, count, moment=moment, offset=offset, token=token)
        for kind, outcome, count, moment, offset, token in written
    )


def _with_tuple(checkpoint: generation.Checkpoint) -> generation.Checkpoint:
    return checkpoint._replace(items=tuple(checkpoint.items))


def _read_pins(content: bytes) -> tuple[tuple[Any, ...], ...]:
    state = State(11, 3, 4101, CHECKPOINT_WITH_PINS.settings, Counts(), CHECKPOINT_WITH_PINS.items)
    assert state.apply(content, SHARE.salt(2)) == len(content), "all have their checksums"
    assert (list(state.free), list(state.doomed), state.hands, state.pins) == ([4102], [4090], {}, set())
    assert (state.counts, state.seal) == ([1, 1, 1, 0], (entries.ALTERED, entries.pair(5, 10_000), 0, 1))
    return tuple(fields[1:] for fields in entries.ENTRY.iter_unpack(content))


def _read_entries(content: bytes) -> tuple[tuple[Any, ...], ...]:
    state = State(11, 2, 4099, Settings(), Counts(), CHECKPOINT_OF_A_SHARE.items)
    assert state.apply(content, SHARE.salt(2)) == len(content), "all have their checksums"
    assert (state.sealed, state.fresh, sorted(state.free)) == (True, 8192, [4098, 4099, 4100])
    assert [hand.offset for hand in state.hands.values()] == [4103], "the next one, since others were quicker"
    return tuple(fields[1:] for fields in entries.ENTRY.iter_unpack(content))


STRUCTURES: dict[str, Structure] = {
    "batch-plain.bin": _batch(PLAIN),
    "batch-everything.bin": _batch(EVERYTHING),
    "batch-shared-headers.bin": _batch(SHARED),
    "batch-zlib.bin": _batch(COMPRESSIBLE, 1),
    "batch-lz4.bin": _batch(COMPRESSIBLE, 2),
    "batch-zstd.bin": _batch(COMPRESSIBLE, 3),
    "segment-header.bin": Structure(HEADER.encode, lambda content: SegmentHeader.decode(content, "a"), HEADER),
    "segment-header-first.bin": Structure(
        first_segment(IDENTITY, created=NOW).encode,
        lambda content: SegmentHeader.decode(content, "a"),
        first_segment(IDENTITY, created=NOW),
    ),
    "producers.bin": Structure(_producers_file, _read_producers_file, PRODUCERS),
    "watermark.bin": Structure(
        lambda: watermark.encode_new(MARK, IDENTITY.salt),
        lambda content: watermark.newest(content, IDENTITY.salt),
        MARK,
    ),
    "frame-header.bin": Structure(
        transfer.FrameHeader(0, 3, IDENTITY.salt, 4096, 512).encode,
        transfer.FrameHeader.decode,
        transfer.FrameHeader(0, 3, IDENTITY.salt, 4096, 512),
    ),
    "topic.json": Structure(
        lambda: in_a_file("topic.json", _with_directory(lambda place: topic_file.write(place, LOG_ID, POLICIES))),
        _described,
        (LOG_ID, POLICIES),
    ),
    "copy.json": Structure(ROLE.encode, lambda content: copy_role.decode(content, "a"), ROLE),
    "copy-replica.json": Structure(
        lambda: in_a_file("copy.json", lambda path: MEMBERS.write(REAL, path, 0o600, now=NOW)),
        lambda content: from_a_file("copy.json", lambda path: roster.read_members(REAL, path), content),
        MEMBERS,
    ),
    "gaps.json": Structure(
        lambda: in_a_file(gaps.NAME, _with_directory(lambda place: gaps.write_gaps(place, IDENTITY, GAPS, 0o600))),
        lambda content: gaps.parse_gaps(content, "a", IDENTITY),
        GAPS,
    ),
    "clock.bin": Structure(
        lambda: ages.encode(STAMPS, IDENTITY.salt), lambda content: ages.decode(content, IDENTITY.salt), STAMPS
    ),
    "marks.json": Structure(
        lambda: in_a_file("marks.json", lambda path: pending_marks.write_marks(REAL, path, LOG_ID, {3: MARK}, 0o600)),
        lambda content: from_a_file(
            "marks.json", lambda path: pending_marks.read_marks(REAL, path, LOG_ID), content
        ),
        {3: MARK},
    ),
    "commit.json": Structure(_written_commit, _commit, ENTRIES),
    "share-checkpoint.bin": Structure(
        lambda: CHECKPOINT_OF_A_SHARE.encode(SHARE),
        lambda content: generation.decode(content, "a", SHARE, 2)._replace(items=CHECKPOINT_OF_A_SHARE.items),
        CHECKPOINT_OF_A_SHARE,
    ),
    "share-entries.bin": Structure(_write_entries, _read_entries, ENTRIES_OF_A_SHARE),
    "share-checkpoint-pins.bin": Structure(
        lambda: CHECKPOINT_WITH_PINS.encode(SHARE),
        lambda content: _with_tuple(generation.decode(content, "a", SHARE, 2)),
        CHECKPOINT_WITH_PINS,
    ),
    "share-pins.bin": Structure(lambda: _write_entries(PINS_OF_A_SHARE), _read_pins, PINS_OF_A_SHARE),
    "manifest-jobs.bin": Structure(
        lambda: manifest.encode(MANIFEST_WITH_JOBS),
        lambda content: manifest.decode(content, f"{3:020d}"),
        MANIFEST_WITH_JOBS,
    ),
    "manifest.bin": Structure(
        lambda: manifest.encode(MANIFEST), lambda content: manifest.decode(content, f"{3:020d}"), MANIFEST
    ),
    "checkpoint.json": Structure(
        lambda: manifest.encode_checkpoint(CHECKPOINT),
        lambda content: manifest.decode_checkpoint(content, "a"),
        CHECKPOINT,
    ),
    "store.json": Structure(
        lambda: manifest.encode_store(STORE_ID), lambda content: manifest.decode_store(content, "a"), STORE_ID
    ),
    "transactions.json": Structure(
        lambda: sealed("../.transactions", STORE_ID),
        lambda content: from_a_file("transactions.json", lambda path: read_pointer(REAL, path), content).id,
        STORE_ID,
    ),
}
