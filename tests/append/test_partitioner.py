"""append/partitioner.py: a key lands in the same partition, in order, as with other clients of Kafka."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import calm
from hypothesis import given
from hypothesis import strategies as st

from loglib import Topic
from loglib.append import partitioner as module
from loglib.append.partitioner import Partitioner, by_crc32, by_murmur2, murmur2, name_of, spread
from loglib.format.columns import Columns

# librdkafka's "consistent" partitioner is crc32(key) % partitions, with the CRC-32 of zlib and PNG; these are
# values published for that CRC (the check value of the catalogue, and of the sentence that everybody uses).
KNOWN = [(b"", 0), (b"123456789", 0xCBF43926), (b"The quick brown fox jumps over the lazy dog", 0x414FA339)]


@pytest.mark.parametrize(("key", "crc"), KNOWN, ids=["empty", "check-value", "fox"])
@pytest.mark.parametrize("partitions", [1, 2, 3, 8, 10_000])
def test_partition_is_the_crc_modulo_their_number(key: bytes, crc: int, partitions: int) -> None:
    assert by_crc32(key, partitions) == crc % partitions


# What Kafka's own UtilsTest.testMurmur2 expects of Utils.murmur2, as Java's signed numbers.
KAFKA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "signed"), KAFKA.items(), ids=map(bytes.decode, KAFKA))
def test_murmur2_is_that_of_kafka(key: bytes, signed: int) -> None:
    assert murmur2(key).to_bytes(4) == signed.to_bytes(4, signed=True)
    for partitions in (1, 2, 3, 8, 10_000):
        assert by_murmur2(key, partitions) == (signed & 0x7FFFFFFF) % partitions


def in_java(key: bytes) -> int:
    """Kafka's Utils.murmur2, byte by byte as it is written there, for signed numbers of 32 bits."""

    def times(number: int, factor: int) -> int:
        return int(struct.unpack("<i", struct.pack("<I", number * factor % 2**32))[0])

    def shifted(number: int, bits: int) -> int:
        """`>>>` of Java, which fills in zeros."""
        return number % 2**32 >> bits

    m = 0x5BD1E995
    h = times(0x9747B28C ^ len(key), 1)
    for i in range(len(key) // 4):
        k = times(key[4 * i] + (key[4 * i + 1] << 8) + (key[4 * i + 2] << 16) + (key[4 * i + 3] << 24), m)
        k = times(k ^ shifted(k, 24), m)
        h = times(h, m) ^ k
    rest = len(key) % 4
    first = len(key) - rest
    if rest == 3:
        h ^= key[first + 2] << 16
    if rest >= 2:
        h ^= key[first + 1] << 8
    if rest >= 1:
        h = times(h ^ key[first], m)
    h = times(h ^ shifted(h, 13), m)
    return times(h ^ shifted(h, 15), 1)


@calm
@given(st.binary(max_size=100), st.integers(1, 10_000))
def test_murmur2_is_what_java_computes(key: bytes, partitions: int) -> None:
    assert murmur2(key) == in_java(key) % 2**32
    for _ in range(2):  # the second time it may be remembered
        assert by_murmur2(key, partitions) == (in_java(key) & 0x7FFFFFFF) % partitions


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, int]:
    """The hashes that are kept, of three keys at most."""
    hashes = module._PositiveHashes()
    monkeypatch.setattr(module, "_positive_murmur2", hashes.__getitem__)
    monkeypatch.setattr(module, "_KEPT_KEYS", 3)
    return hashes


def test_hashes_of_many_keys_or_of_long_ones_do_not_fill_the_memory(kept: dict[bytes, int]) -> None:
    keys = [b"%d" % number for number in range(10)]
    for key in (*keys, b"x" * 64, b"x" * 65, b"x" * 65):
        assert by_murmur2(key, 7) == (in_java(key) & 0x7FFFFFFF) % 7
    assert list(kept) == [b"9", b"x" * 64]


@pytest.mark.parametrize(
    "key", [None, "abc", 5, (1, 2), bytearray(b"abc"), memoryview(b"abc")], ids=lambda key: type(key).__name__
)
def test_only_bytes_are_hashed_and_kept(key: Any, kept: dict[bytes, int]) -> None:
    with pytest.raises(TypeError):
        by_murmur2(key, 7)
    assert not kept


HASHES: dict[Partitioner, Callable[[bytes], int]] = {
    by_crc32: zlib.crc32,
    by_murmur2: lambda key: in_java(key) & 0x7FFFFFFF,
}
each_partitioner = pytest.mark.parametrize("partitioner", HASHES, ids=["crc32", "murmur2"])


def never() -> int:
    raise AssertionError("nobody asked for a keyless partition")


@st.composite
def columns(draw: st.DrawFn, *, keys: st.SearchStrategy[bytes | None]) -> Columns:
    count = draw(st.integers(0, 30))
    column = draw(st.lists(keys, min_size=count, max_size=count))
    times = draw(st.none() | st.just(list(range(count))))
    headers = draw(st.none() | st.just([(("n", b"%d" % i),) for i in range(count)]))
    return Columns([b"%d" % i for i in range(count)], column, times, headers)


Rows = dict[int, list[tuple[object, ...]]]


def expected(given_columns: Columns, partitions: int, partitioner: Partitioner, keyless: int) -> Rows:
    """By the definition, record by record."""
    found: Rows = {}
    count = len(given_columns.values)
    rows = zip(*(column if column is not None else [None] * count for column in given_columns), strict=True)
    for row in rows:
        number = keyless if row[1] is None else HASHES[partitioner](row[1]) % partitions
        found.setdefault(number, []).append(row)
    return found


def rows_of(groups: dict[int, Columns]) -> Rows:
    return {
        number: list(zip(*(c if c is not None else [None] * len(group.values) for c in group), strict=True))
        for number, group in groups.items()
    }


@each_partitioner
@calm
@given(columns(keys=st.binary(max_size=9)), st.integers(1, 9))
def test_records_are_spread_in_their_order(partitioner: Partitioner, given_columns: Columns, partitions: int) -> None:
    groups = spread(given_columns, partitions, partitioner, never)
    assert rows_of(groups) == expected(given_columns, partitions, partitioner, 0)


@each_partitioner
@calm
@given(columns(keys=st.none() | st.binary(max_size=9)), st.integers(1, 9), st.data())
def test_records_with_a_null_key_stay_together(
    partitioner: Partitioner, given_columns: Columns, partitions: int, data: st.DataObject
) -> None:
    keyless = data.draw(st.integers(0, partitions - 1))
    groups = spread(given_columns, partitions, partitioner, lambda: keyless)
    assert rows_of(groups) == expected(given_columns, partitions, partitioner, keyless)


def test_own_partitioner_decides() -> None:
    groups = spread(Columns([b"a", b"b", b"c"], [b"1", None, b"0"]), 3, lambda key, _: int(key), lambda: 2)
    assert rows_of(groups) == {
        1: [(b"a", b"1", None, None)], 2: [(b"b", None, None, None)], 0: [(b"c", b"0", None, None)],
    }  # fmt: skip


@pytest.mark.parametrize("chosen", [-1, 3, 1 << 40])
def test_partition_that_does_not_exist_is_refused(chosen: int) -> None:
    with pytest.raises(ValueError, match=f"chose partition {chosen} of 3"):
        spread(Columns([b"a"], [b"k"]), 3, lambda *_: chosen, never)


@each_partitioner
@pytest.mark.parametrize("timestamps", [None, range(50)], ids=["plain", "timestamps"])
def test_keys_that_a_topic_was_given_singly_and_in_bulk_meet(
    partitioner: Partitioner, timestamps: range | None, tmp_path: Path
) -> None:
    hash_of = HASHES[partitioner]
    keys = [b"key-%d" % number for number in range(50)]
    names: dict[Partitioner, Any] = {by_crc32: "crc32", by_murmur2: "murmur2"}
    Topic.open(tmp_path / "topic", create=True, partitions=7, partitioner=names[partitioner]).close()
    with Topic.open(tmp_path / "topic") as topic:
        assert topic.config.partitioner == names[partitioner]
        topic.append_many([b"bulk"] * 50, keys=keys, timestamps=timestamps)
        for key in keys:
            assert topic.append(b"single", key=key).partition == hash_of(key) % 7
        topic.flush()
        for partition in topic.partitions:
            found = {record.key for record in partition.read()}
            assert found == {key for key in keys if hash_of(key) % 7 == partition.id}


class Named:
    """A function by its use; its name is an attribute like any other."""

    def __init__(self, name: object) -> None:
        self.__name__ = name

    def __call__(self, key: bytes, partitions: int) -> int:
        return 0


def by_region(key: bytes, partitions: int) -> int:
    return 0


@pytest.mark.parametrize("name", ["by_region", "_", "B2", "custom", "x" * 100])
def test_function_is_known_by_its_name(name: str) -> None:
    assert name_of(Named(name)) == name
    assert name_of(functools.cache(by_region)) == "by_region"


@pytest.mark.parametrize(
    "partitioner",
    [
        lambda key, partitions: 0, functools.partial(by_region), *map(
            Named, ["", "1st", "a b", "by_größe", "by-region", "a\n", "x" * 101, "crc32", "murmur2", None, 5]
        ),
    ],
)  # fmt: skip
def test_function_without_a_name_of_its_own_is_refused(partitioner: Any) -> None:
    with pytest.raises(ValueError, match=r"needs a name of its own.*def by_region\(key, partitions\)"):
        name_of(partitioner)
