"""append/hash_columns.py: the partitions of columns of keys are those of append/partitioner.py, key by key."""

from random import Random

import numpy as np
import pyarrow as pa
import pytest
from builders import calm
from hypothesis import given
from hypothesis import strategies as st

from loglib.append.hash_columns import can_hash, deal, partitions_by, partitions_of
from loglib.append.partitioner import BUILT_IN

KINDS = [pa.binary(), pa.large_binary()]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("partitions", [1, 3, 16])
def test_partitions_of_a_column_are_those_of_its_keys(name: str, partitions: int) -> None:
    random = Random(partitions)
    sizes = [random.choice((None, 0, 1, 2, 3, 4, 5, 7, 8, 40, 300)) for _ in range(500)]
    keys = [None if size is None else random.randbytes(size) for size in sizes]
    expected = [9 if key is None else BUILT_IN[name](key, partitions) for key in keys]
    column = pa.array([b"first", *keys], pa.binary()).slice(1)
    assert partitions_of(column, name, partitions, keyless=9).tolist() == expected


def test_column_without_keys_and_of_empty_keys() -> None:
    assert partitions_of(pa.array([None, None], pa.binary()), "crc32", 4, keyless=2).tolist() == [2, 2]
    assert partitions_of(pa.array([], pa.binary()), "murmur2", 4, keyless=2).tolist() == []
    for name, one in BUILT_IN.items():
        assert partitions_of(pa.array([b"", b""]), name, 7, keyless=2).tolist() == [one(b"", 7)] * 2
        assert can_hash(name)
    assert not can_hash("by_region")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 15, 16, 36, 63, 64, 65, 256, 257])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_keys_of_one_length_are_hashed_at_once(name: str, size: int, kind: pa.DataType) -> None:
    keys = [Random(number).randbytes(size) for number in range(200)]
    column = pa.array([b"before", *keys], kind).slice(1)
    expected = [BUILT_IN[name](key, 7) for key in keys]
    assert partitions_of(column, name, 7, keyless=0).tolist() == expected


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@calm
@given(st.lists(st.none() | st.binary(max_size=6), max_size=200), st.integers(1, 10_000), st.sampled_from(KINDS))
def test_partition_is_that_of_the_key_alone(name: str, keys: list[bytes | None], count: int, kind: pa.DataType) -> None:
    column = pa.array([*keys, *keys], kind).slice(len(keys))
    expected = [count - 1 if key is None else BUILT_IN[name](key, count) for key in keys]
    assert partitions_of(column, name, count, keyless=count - 1).tolist() == expected


def test_function_of_the_application_is_called_once_for_each_key() -> None:
    asked: list[bytes] = []

    def by_length(key: bytes, partitions: int) -> int:
        asked.append(key)
        return len(key) % partitions

    keys = [b"a", None, b"bb", b"a", b"", None, b"bb"]
    assert partitions_by(by_length, pa.array(keys), 2, keyless=1).tolist() == [1, 1, 0, 1, 0, 1, 0]
    assert sorted(asked) == [b"", b"a", b"bb"]


@pytest.mark.parametrize("wrong", [-1, 2])
def test_function_that_chooses_no_partition_is_an_error(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"the partitioner chose partition {wrong} of 2"):
        partitions_by(lambda key, partitions: wrong, pa.array([b"k"]), 2, keyless=0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=50))
def test_records_of_a_partition_keep_their_order(partitions: list[int]) -> None:
    records = pa.record_batch({"value": pa.array([b"%d" % number for number in range(len(partitions))])})
    shares = list(deal(records, np.array(partitions, np.uint16)))
    assert [share.partition for share in shares] == sorted(set(partitions))
    for share in shares:
        expected = [index for index, partition in enumerate(partitions) if partition == share.partition]
        assert [int(index) for index in share.indexes] == expected
        assert share.records.column("value").to_pylist() == [b"%d" % index for index in expected]
