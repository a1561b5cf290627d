"""Idempotent producers: a repeat appends nothing, whatever lies between it and the first time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import crash_copy, values_of
from loglib import LogError, Topic
from loglib.batch import Producer
from loglib.producers import Producers
from loglib.segment import MAX_PRODUCERS, ProducerState
from loglib.testing import RecordingFiles, UnsyncedFiles

Open = Callable[..., Topic]


def test_repeated_append_answers_with_the_first_offsets(open_topic: Open) -> None:
    topic = open_topic()
    first = topic.append_many([b"a", b"b"], partition=0, producer=("loader", 1))
    topic.append(b"other")
    assert topic.append_many([b"a", b"b"], partition=0, producer=("loader", 1)) == first
    assert topic.partition(0).append_many([b"what it holds is not compared"], producer=("loader", 1)) == first
    second = topic.append_many([b"c"], partition=0, producer=("loader", 2))
    assert second != first
    topic.flush()
    assert values_of(topic) == [b"a", b"b", b"other", b"c"]


def test_sequence_older_than_the_last_is_an_error_that_names_both(open_topic: Open) -> None:
    topic = open_topic()
    topic.partition(0).append_many([b"a"], producer=("p", 5))
    with pytest.raises(LogError, match="has appended sequence 5 already, so 4 comes too late"):
        topic.partition(0).append_many([b"b"], producer=("p", 4))
    topic.flush()
    assert values_of(topic) == [b"a"]


def test_sequences_may_skip_and_producers_do_not_mix(open_topic: Open) -> None:
    topic = open_topic()
    for sequence in (0, 7, 1 << 40):
        for name in ("p", "q", "ünï"):
            topic.partition(0).append_many([f"{name} {sequence}".encode()], producer=(name, sequence))
            topic.partition(0).append_many([b"again"], producer=(name, sequence))
    topic.flush()
    assert len(values_of(topic)) == 9


def test_bad_producers_are_refused(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    for sequence in (-1, 1 << 64):
        with pytest.raises(ValueError, match="a number of 64 bits"):
            topic.append_many([b"a"], partition=0, producer=("p", sequence))
    with pytest.raises(ValueError, match="must say partition="):
        topic.append_many([b"a"], producer=("p", 1))


def test_keyed_append_is_idempotent_in_every_partition(open_topic: Open) -> None:
    topic = open_topic(partitions=4)
    keys = [b"%d" % n for n in range(40)]
    first = topic.append_many(keys, keys=keys, producer=("p", 1))
    assert len(first) == 4 and topic.append_many(keys, keys=keys, producer=("p", 1)) == first
    topic.flush()
    assert sorted(values_of(topic)) == sorted(keys)


@pytest.mark.parametrize("how", ["close", "roll", "roll and close", "crash", "roll and crash"])
def test_repeat_is_known_after(how: str, open_topic: Open, path: Path, tmp_path: Path) -> None:
    topic = open_topic()
    first = topic.partition(0).append_many([b"a", b"b"], producer=("p", 1))
    topic.append(b"x")
    if "roll" in how:
        topic.partition(0).roll()
        topic.append(b"y", sync=True)
    topic.flush()
    if "close" in how:
        topic.close()
        topic = open_topic()
    elif "crash" in how:
        topic = open_topic(crash_copy(path, tmp_path / "copy"))
    assert topic.partition(0).append_many([b"a", b"b"], producer=("p", 1)) == first
    with pytest.raises(LogError):
        topic.partition(0).append_many([b"old"], producer=("p", 0))


def test_producers_survive_many_segments_with_retention(open_topic: Open) -> None:
    topic = open_topic(files=UnsyncedFiles())
    first = topic.partition(0).append_many([b"a"], producer=("p", 1))
    for _ in range(5):
        topic.append(b"x")
        topic.partition(0).roll()
    topic.partition(0).writer().drop_before(topic.partition(0).segments[-1].base_offset)
    topic.close()
    with open_topic() as topic:
        assert topic.partition(0).append_many([b"a"], producer=("p", 1)) == first
        assert values_of(topic) == []


def test_producer_silent_the_longest_is_forgotten_first(open_topic: Open) -> None:
    topic = open_topic(files=UnsyncedFiles())
    partition = topic.partition(0)
    for number in range(MAX_PRODUCERS):
        partition.append_many([b"%d" % number], producer=(f"p{number}", 1))
    partition.append_many([b"again"], producer=("p0", 2))
    partition.append_many([b"one too many"], producer=("new", 1))
    for reopened in (False, True):
        if reopened:
            partition.roll()
            topic.close()
            topic = open_topic(files=UnsyncedFiles())
            partition = topic.partition(0)
        count = len(values_of(topic))
        partition.append_many([b"again"], producer=("p0", 2))
        partition.append_many([b"x"], producer=("p2", 1))
        partition.append_many([b"x"], producer=("new", 1))
        partition.flush()
        assert len(values_of(topic)) == count if reopened else MAX_PRODUCERS + 2
    before = len(values_of(topic))
    partition.append_many([b"p1 again"], producer=("p1", 1))
    partition.flush()
    assert len(values_of(topic)) == before + 1, "p1 was forgotten: its repeat is taken for new"


def test_segments_without_producers_are_not_read_for_them(open_topic: Open) -> None:
    with open_topic(batch_records=1) as topic:
        for number in range(200):
            topic.append(b"%d" % number)
    files = RecordingFiles()
    with open_topic(files=files) as topic:
        files.calls.clear()
        topic.partition(0).append_many([b"x"], producer=("p", 1))
        assert files.count("pread") == 0


def test_empty_append_says_nothing_of_its_producer(open_topic: Open) -> None:
    topic = open_topic()
    assert topic.partition(0).append_many([], producer=("p", 1)) == []
    assert topic.partition(0).append_many([b"a"], producer=("p", 1))[0].offsets == range(1)


def test_state_is_rebuilt_from_the_header_and_the_batches_behind_it() -> None:
    def nothing() -> list[object]:
        return []

    producers = Producers(3, [ProducerState(1, 5, 100, 2), ProducerState(2, 6, 200, 1)], nothing)  # type: ignore[arg-type]
    assert producers.seen(Producer(1, 5)) == range(100, 102)
    assert producers.seen(Producer(1, 6)) is None and producers.seen(Producer(3, 0)) is None
    producers.remember(Producer(1, 6), range(300, 303))
    producers.remember(Producer(1, 6), range(300, 303))
    assert producers.snapshot() == (ProducerState(2, 6, 200, 1), ProducerState(1, 6, 300, 3))
