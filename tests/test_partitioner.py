"""partitioner.py: the same key lands in the same partition, in order, as librdkafka would have it."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import calm
from loglib import Topic
from loglib.append.partitioner import by_crc32, name_of, spread
from loglib.format.batch import Columns

# librdkafka's "consistent" partitioner is crc32(key) % partitions, with the CRC-32 of zlib and PNG; these are
# values published for that CRC (the check value of the catalogue, and of the sentence that everybody uses).
KNOWN = [(b"", 0), (b"123456789", 0xCBF43926), (b"The quick brown fox jumps over the lazy dog", 0x414FA339)]


@pytest.mark.parametrize(("key", "crc"), KNOWN, ids=["empty", "check-value", "fox"])
@pytest.mark.parametrize("partitions", [1, 2, 3, 8, 10_000])
def test_partition_is_the_crc_modulo_their_number(key: bytes, crc: int, partitions: int) -> None:
    assert by_crc32(key, partitions) == crc % partitions


def never() -> int:
    raise AssertionError("nobody asked for a keyless partition")


@st.composite
def columns(draw: st.DrawFn, *, keys: st.SearchStrategy[bytes | None]) -> Columns:
    count = draw(st.integers(0, 30))
    column = draw(st.lists(keys, min_size=count, max_size=count))
    times = draw(st.none() | st.just(list(range(count))))
    headers = draw(st.none() | st.just([(("n", b"%d" % i),) for i in range(count)]))
    return Columns([b"%d" % i for i in range(count)], column, times, headers)


def expected(given_columns: Columns, partitions: int, keyless: int) -> dict[int, list[tuple[object, ...]]]:
    """By the definition, record by record."""
    found: dict[int, list[tuple[object, ...]]] = {}
    count = len(given_columns.values)
    rows = zip(*(column if column is not None else [None] * count for column in given_columns), strict=True)
    for row in rows:
        number = keyless if row[1] is None else zlib.crc32(row[1]) % partitions
        found.setdefault(number, []).append(row)
    return found


def rows_of(groups: dict[int, Columns]) -> dict[int, list[tuple[object, ...]]]:
    return {
        number: list(zip(*(c if c is not None else [None] * len(group.values) for c in group), strict=True))
        for number, group in groups.items()
    }


@calm
@given(columns(keys=st.binary(max_size=3)), st.integers(1, 9))
def test_records_are_spread_in_their_order(given_columns: Columns, partitions: int) -> None:
    groups = spread(given_columns, partitions, by_crc32, never)
    assert rows_of(groups) == expected(given_columns, partitions, 0)


@calm
@given(columns(keys=st.none() | st.binary(max_size=3)), st.integers(1, 9), st.data())
def test_records_with_a_null_key_stay_together(given_columns: Columns, partitions: int, data: st.DataObject) -> None:
    keyless = data.draw(st.integers(0, partitions - 1))
    groups = spread(given_columns, partitions, by_crc32, lambda: keyless)
    assert rows_of(groups) == expected(given_columns, partitions, keyless)


def test_own_partitioner_decides() -> None:
    groups = spread(Columns([b"a", b"b", b"c"], [b"1", None, b"0"]), 3, lambda key, _: int(key), lambda: 2)
    assert rows_of(groups) == {
        1: [(b"a", b"1", None, None)], 2: [(b"b", None, None, None)], 0: [(b"c", b"0", None, None)],
    }  # fmt: skip


@pytest.mark.parametrize("chosen", [-1, 3, 1 << 40])
def test_partition_that_does_not_exist_is_refused(chosen: int) -> None:
    with pytest.raises(ValueError, match=f"chose partition {chosen} of 3"):
        spread(Columns([b"a"], [b"k"]), 3, lambda *_: chosen, never)


def test_keys_that_a_topic_was_given_singly_and_in_bulk_meet(tmp_path: Path) -> None:
    keys = [b"key-%d" % number for number in range(50)]
    with Topic.open(tmp_path / "topic", partitions=7) as topic:
        topic.append_many([b"bulk"] * 50, keys=keys)
        for key in keys:
            assert topic.append(b"single", key=key).partition == zlib.crc32(key) % 7
        topic.flush()
        for partition in topic.partitions:
            found = {record.key for record in partition.read()}
            assert found == {key for key in keys if zlib.crc32(key) % 7 == partition.id}


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
            Named, ["", "1st", "a b", "by_größe", "by-region", "a\n", "x" * 101, "crc32", None, 5]
        ),
    ],
)  # fmt: skip
def test_function_without_a_name_of_its_own_is_refused(partitioner: Any) -> None:
    with pytest.raises(ValueError, match=r"needs a name of its own.*def by_region\(key, partitions\)"):
        name_of(partitioner)
