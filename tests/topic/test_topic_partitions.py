"""Which partition a record goes to: by its key, by a function of the caller's, or as the caller says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from own_partitioners import by_region, by_tenant

from conftest import alter, values_of
from loglib import ConfigConflictError, Topic

Open = Callable[..., Topic]


# --- where records go --------------------------------------------------------------------------------


def test_key_chooses_the_partition_by_crc32(open_topic: Open) -> None:
    topic = open_topic(partitions=5)
    keys = [b"key %d" % n for n in range(50)] + [b""]
    for key in keys:
        assert topic.append(key, key=key).partition == crc32(key) % 5
    for partition, offsets in topic.append_many(keys, keys=keys):
        assert len(offsets) == sum(crc32(key) % 5 == partition for key in keys)
    topic.flush()
    assert all(r.partition == crc32(r.key or b"") % 5 for r in topic.read())
    for number in range(5):
        ours = [key for key in keys if crc32(key) % 5 == number]
        assert [r.value for r in topic.partition(number).read()] == ours * 2


def test_keyless_records_stay_together_until_a_batch_is_full(open_topic: Open) -> None:
    topic = open_topic(partitions=4, batch_records=10)
    places = [topic.append(b"x").partition for _ in range(400)]
    runs = [places[start : start + 10] for start in range(0, 400, 10)]
    assert sum(len(set(run)) == 1 for run in runs) >= 30
    assert len(set(places)) == 4


def test_explicit_partition_beats_the_key(open_topic: Open) -> None:
    topic = open_topic(partitions=4)
    wrong = (crc32(b"k") + 1) % 4
    assert topic.append(b"x", key=b"k", partition=wrong).partition == wrong
    (only,) = topic.append_many([b"x"] * 9, keys=[b"k"] * 9, partition=wrong)
    assert only.partition == wrong and len(only.offsets) == 9


def test_records_with_and_without_keys_share_a_call(open_topic: Open) -> None:
    topic = open_topic(partitions=3)
    keys = [None, b"a", None, b"b", b""]
    topic.append_many(
        [b"%d" % n for n in range(5)], keys=keys, timestamps=range(5), headers=[None, {"h": b"1"}] + [None] * 3
    )
    topic.flush()
    found = sorted(topic.read(), key=lambda r: r.timestamp)
    assert [r.value for r in found] == [b"0", b"1", b"2", b"3", b"4"] and [r.key for r in found] == keys
    assert found[1].headers == (("h", b"1"),)
    assert found[0].partition == found[2].partition


def test_own_partitioner_is_kept_by_name_and_must_be_given_again(open_topic: Open, path: Path) -> None:
    def by_length(key: bytes, partitions: int) -> int:
        return len(key) % partitions

    with open_topic(partitions=3, partitioner=by_length) as topic:
        assert topic.append(b"x", key=b"12345").partition == 2
        assert {each.partition for each in topic.append_many([b"x"] * 2, keys=[b"1", b"1234"])} == {1}
    assert json.loads((path / "topic.json").read_text())["partitioner"] == "by_length"
    alter(path, compression="zlib")
    with open_topic() as topic:
        topic.append(b"keyless needs none")
        assert topic.append(b"x", key=b"k", partition=2).partition == 2
        assert [each.partition for each in topic.append_many([b"x"], keys=[b"k"], partition=0)] == [0]
        for append in (lambda: topic.append(b"x", key=b"k"), lambda: topic.append_many([b"x"], keys=[b"k"])):
            with pytest.raises(ValueError, match="by your function by_length: open it with partitioner=by_length"):
                append()
    with open_topic(mode="r") as topic:
        assert len(values_of(topic)) == 6
    with open_topic(partitioner=by_length) as topic:
        assert topic.append(b"x", key=b"12345").partition == 2


@pytest.mark.parametrize("other", ["crc32", "murmur2", by_region], ids=["crc32", "murmur2", "by_region"])
def test_partitioner_of_another_name_is_refused(other: Any, open_topic: Open) -> None:
    open_topic(partitioner=by_tenant).close()
    name = getattr(other, "__name__", other)
    for mode in ("a", "r"):
        with pytest.raises(ConfigConflictError, match=f"'by_tenant', not '{name}'.*copy the records"):
            open_topic(partitioner=other, mode=mode)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_partitioner_that_chooses_no_partition_is_refused(wrong: int, open_topic: Open) -> None:
    def astray(key: bytes, partitions: int) -> int:
        return wrong

    with open_topic(partitions=3, partitioner=astray) as topic:
        for append in (lambda: topic.append(b"x", key=b"k"), lambda: topic.append_many([b"x"], keys=[b"k"])):
            with pytest.raises(ValueError, match="the partitioner chose"):
                append()


@pytest.mark.parametrize("value", ["text", 5, [1], object()])
def test_values_that_are_not_bytes_are_refused_with_advice(value: Any, open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"first")
    for append in (
        lambda: topic.append(value), lambda: topic.append(b"v", key=value), lambda: topic.append_many([value]),
        lambda: topic.append_many([b"v"], keys=[value]), lambda: topic.append(b"v", headers={"h": value}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="must be bytes|must map str to bytes"):
            append()
    topic.flush()
    assert values_of(topic) == [b"first"]


def test_bytes_like_values_are_copied(open_topic: Open) -> None:
    topic = open_topic()
    buffer = bytearray(b"abc")
    topic.append(buffer)  # type: ignore[arg-type]
    topic.append(memoryview(buffer))  # type: ignore[arg-type]
    buffer[:] = b"xyz"
    topic.flush()
    assert values_of(topic) == [b"abc", b"abc"]


# --- the end -----------------------------------------------------------------------------------------


def test_large_records_of_one_key_are_not_put_into_one_batch(open_topic: Open) -> None:
    topic = open_topic(partitions=2, max_record_bytes=1000, batch_bytes=2000)
    values = [b"x" * 900] * 20 + [b"y"] * 20
    topic.append_many(values, keys=[b"a"] * 20 + [b"d"] * 20)
    topic.flush()
    assert sorted(values_of(topic)) == sorted(values)
    assert max(batch._header.value_bytes for batch in topic.batches()) <= 3000
