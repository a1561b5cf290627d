"""An entry of the store is read as it was written, or refused; a number that is done stays done."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import in_parts
from loglib import CorruptLogError, RecordTooLargeError, UnsupportedFormatError
from loglib.format.header import crc32c
from loglib.log.transaction_numbers import is_done, name_of, numbers
from loglib.testing import FaultyFiles, MemoryFiles
from loglib.transactions import manifest as bytes_of
from loglib.transactions.manifest import (
    AppState,
    Checkpoint,
    Fence,
    GroupCommit,
    JobCommit,
    Manifest,
    Section,
    decode,
    decode_checkpoint,
    decode_store,
    encode,
    encode_checkpoint,
    encode_store,
)

PATH = f"/store/{name_of(17)}"
LOG_ID = bytes(range(16))
ENTRY = [8123, 4, 1, "ab", "", "member", 5, LOG_ID.hex()]
MANIFEST = Manifest(
    17, "etl", 7, "b1d2", "5c07", 1_700_000_000_000_000,
    (Section("orders", LOG_ID, 3, "staging/9a1f/0.frames", 5, 81_920, 1), Section("bills", LOG_ID, 0, "", 1, 9, 2)),
    (GroupCommit("clicks", "etl", "clicks-3", ENTRY),), (Fence("clicks", "etl", "clicks-4", 9),), b'\n"crc": \n\xff',
    0x0123456789ABCDEF,
)  # fmt: skip
CHECKPOINT = Checkpoint(
    17, {"etl": AppState(7, "b1d2", ("a0", "a1"), "5c07", 16, 5), "new": AppState(None, "c", (), None, 17, 6)},
    {("clicks", "etl", "clicks-3"): 4},
)  # fmt: skip

counts = st.integers(0, 2**64)
words = st.text(max_size=20)
sections = st.builds(
    Section, words, st.binary(min_size=16, max_size=16), counts, words.filter(bool), counts, counts, counts,
    st.booleans(),
)
digits = st.binary(min_size=16, max_size=16).map(bytes.hex)
offsets = st.builds(GroupCommit, words, words, words, st.tuples(counts, counts, words).map(list), digits)
fences = st.builds(Fence, words, words, words, counts)
jobs = st.builds(JobCommit, words, digits, words, counts, counts, counts, counts, counts, counts)
manifests = st.builds(
    Manifest, st.just(17), words, st.none() | counts, words, st.none() | words, st.integers(-5, 2**60),
    st.lists(sections, max_size=3).map(tuple), st.lists(offsets, max_size=3).map(tuple),
    st.lists(fences, max_size=3).map(tuple), st.binary(max_size=100), st.integers(0, 2**64 - 1), counts,
    jobs=st.lists(jobs, max_size=3).map(tuple),
)  # fmt: skip
states = st.builds(
    AppState, st.none() | counts, words, st.lists(words).map(tuple), st.none() | words, counts, st.integers()
)
checkpoints = st.builds(
    Checkpoint, counts, st.dictionaries(words, states, max_size=3),
    st.dictionaries(st.tuples(words, words, words), counts, max_size=3),
)  # fmt: skip


@given(manifests)
def test_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    assert decode(encode(manifest), PATH) == manifest


@given(checkpoints)
def test_checkpoint_is_read_as_it_was_written(checkpoint: Checkpoint) -> None:
    assert decode_checkpoint(encode_checkpoint(checkpoint), PATH) == checkpoint


def test_entry_that_only_fences_is_read_as_it_was_written() -> None:
    for entry in (
        Manifest(17, None, None, "", None, 5, fences=MANIFEST.fences),
        Manifest(17, "etl", None, "b1d2", None, 5),
    ):
        assert decode(encode(entry), PATH) == entry and not entry.applies
    assert decode(encode(MANIFEST), PATH) == MANIFEST and MANIFEST.applies
    assert decode_store(encode_store(LOG_ID), PATH) == LOG_ID


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (encode(MANIFEST), decode),
        (encode_checkpoint(CHECKPOINT), decode_checkpoint),
        (encode_store(LOG_ID), decode_store),
    ],
    ids=["manifest", "checkpoint", "store"],
)
@in_parts(3)
def test_flipped_and_missing_bytes_are_found(part: slice, content: bytes, read: Any) -> None:
    for at in range(0, len(content), 11)[part]:
        if at <= content.find(b"\n") or read is not decode:
            with pytest.raises(CorruptLogError, match=PATH):
                read(content[:at], PATH)
        else:
            assert read(content[:at], PATH).frames is None
        for other in (3, 0x28, 0xFF):
            changed = content[:at] + bytes([content[at] ^ other]) + content[at + 1 :]
            if at <= content.find(b"\n") or read is not decode:
                with pytest.raises(CorruptLogError):
                    read(changed, PATH)
            else:
                assert read(changed, PATH).frames is None
    for more in (b"\n", b"x"):
        if read is decode:
            assert read(content + more, PATH).frames is None
        elif read is decode_checkpoint:
            with pytest.raises(CorruptLogError):
                read(content + more, PATH)


@in_parts(3)
def test_one_flipped_bit_of_a_line_is_put_right(part: slice) -> None:
    content = encode(MANIFEST)
    for at in range(0, content.find(b"\n"), 5)[part]:
        for bit in (0, 3, 7):
            flipped = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
            assert decode(flipped, PATH) == MANIFEST, (at, bit)


def test_long_line_is_not_searched_for_a_flipped_bit() -> None:
    content = bytearray(encode(MANIFEST._replace(owner="x" * (16 << 10))))
    content[20] ^= 1
    with pytest.raises(CorruptLogError):
        decode(bytes(content), PATH)


def sealed(content: bytes, **changes: Any) -> bytes:
    """The content with other values, and a right checksum."""
    line, _, frames = content.partition(b"\n")
    values = json.loads(line) | changes
    del values["crc"]
    before = (json.dumps(values).removesuffix("}") + ", ").encode()
    return before + f'"crc": "{crc32c(before):08x}"}}\n'.encode() + frames


def test_newer_format_is_unsupported_and_not_damaged() -> None:
    with pytest.raises(UnsupportedFormatError, match="format 2 is newer"):
        decode(sealed(encode(MANIFEST), format=2), PATH)
    assert decode(sealed(encode(MANIFEST), later="ignored"), PATH) == MANIFEST


SECTION = {"topic": "t", "log": LOG_ID.hex(), "partition": 0, "file": "", "at": 0, "bytes": 1, "batches": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 0}, {"format": "1"}, {"format": True}, {"version": -1}, {"version": 1.5}, {"version": True},
        {"owner": None}, {"app": 5}, {"app": None}, {"time": "now"}, {"frames": None}, {"frames": {"size": 3}},
        {"id": "no number"}, {"skip": -1}, {"sections": None}, {"sections": [{}]},
        {"sections": [SECTION | {"at": -1}]}, {"sections": [SECTION | {"log": "00"}]},
        {"sections": [SECTION | {"log": "no hex"}]}, {"sections": [SECTION | {"bytes": 1 << 20}]},
        {"sections": [SECTION | {"segment": 1}]},
        {"offsets": [{"topic": "t", "group": "g", "partition": "p", "entry": []}]},
        {"offsets": [{"topic": "t", "group": "g", "partition": "p", "entry": [1, "2"]}]},
        {"fences": [{"topic": "t", "group": "g", "partition": "p", "generation": -1}]},
    ],
    ids=str,
)  # fmt: skip
def test_facts_that_cannot_be_are_damage(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptLogError, match="no valid facts"):
        decode(sealed(encode(MANIFEST), **changes), PATH)


@pytest.mark.parametrize(
    "changes",
    [
        {"apps": {"a": [1]}}, {"apps": []}, {"number": -1}, {"generations": [["t", "g", 3, 4]]},
        {"generations": {"t": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_checkpoint_that_cannot_be_is_damage(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptLogError, match="no valid facts"):
        decode_checkpoint(sealed(encode_checkpoint(CHECKPOINT), **changes), PATH)


def test_sections_beyond_the_frames_are_not_written() -> None:
    with pytest.raises(ValueError, match="a section ends at 10 in 9 bytes"):
        encode(MANIFEST._replace(frames=b"x" * 9))


def test_manifest_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytes_of, "MOST_BYTES", 1000)
    with pytest.raises(RecordTooLargeError, match="the transaction's manifest is"):
        encode(MANIFEST._replace(frames=b"x" * 1000))


# --- log/transaction_numbers.py -------------------------------------------------------------------


def store_of(*names: str) -> MemoryFiles:
    files = MemoryFiles()
    files.make_directories("/store")
    for name in names:
        files.write_new(f"/store/{name}", b"", 0o600)
    return files


def test_number_is_done_by_its_name_or_by_a_checkpoint() -> None:
    files = store_of(name_of(4, ".checkpoint"), name_of(0, ".checkpoint"), name_of(6, ".done"), name_of(5), name_of(6))
    assert [number for number in range(1, 9) if is_done(files, "/store", number)] == [1, 2, 3, 4, 6]


def test_void_manifest_hides_nothing() -> None:
    files = store_of(name_of(4, ".checkpoint"), name_of(3))
    assert is_done(files, "/store", 3)


def test_store_that_cannot_be_read_says_that_nothing_is_done() -> None:
    assert not is_done(MemoryFiles(), "/store", 1)
    assert not is_done(store_of(), "/store", 1), "without a checkpoint it is no store"
    assert not is_done(FaultyFiles("listdir", inner=store_of(name_of(4, ".checkpoint"))), "/store", 1)
    assert not is_done(FaultyFiles("lstat", inner=store_of(name_of(1, ".done"))), "/store", 1)


def test_other_names_are_no_numbers() -> None:
    names = [name_of(3), "17", name_of(4, ".done"), "x" * 20, "²" * 20, ".tmp", name_of(5) + ".tmp"]
    assert numbers(names) == [3] and numbers(names, ".done") == [4]
