"""Idempotent producers: a repeat appends nothing, whatever lies between it and the first time."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from conftest import Clock, crash_copy, tree, values_of
from loglib import CorruptLogError, LogError, ReadOnlyError, Topic, WriterFailedError
from loglib.format.header import Producer
from loglib.log.producers import Producers
from loglib.segment import MAX_PRODUCERS, ProducerState, producers_name
from loglib.testing import FaultyFiles, RecordingFiles, UnsyncedFiles

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


def test_one_record_is_appended_once_however_often_it_is_repeated(open_topic: Open) -> None:
    topic = open_topic(partitions=3)
    first = [
        topic.append(b"no key", producer=("p", 1)),
        topic.append(b"a key", b"key", producer=("p", 2), headers={"h": b"1"}, timestamp=5),
        topic.append(b"there", partition=1, producer=("q", 7), sync=True),
        topic.partition(0).append(b"here", producer=("r", 0)),
    ]
    again = [
        topic.append(b"no key", producer=("p", 1), sync=True),
        topic.append(b"a key", b"key", producer=("p", 2)),
        topic.append(b"there", partition=1, producer=("q", 7)),
        topic.partition(0).append(b"here", producer=("r", 0), sync=True),
    ]
    assert again == first
    topic.flush()
    found = {(record.partition, record.offset): record for record in topic.read()}
    assert sorted(found) == sorted((each.partition, each.offset) for each in first)
    assert [(each.value, each.timestamp) for each in found.values() if each.headers] == [(b"a key", 5)]
    with pytest.raises(LogError, match="comes too late"):
        topic.partition(1).append(b"older", producer=("q", 6))
    with pytest.raises(TypeError, match="a producer must be"):
        topic.append(b"x", producer="p")  # type: ignore[arg-type]


def test_record_whose_flush_fails_is_named_in_the_error(open_topic: Open) -> None:
    files = FaultyFiles("datasync", every=True, armed=False)
    topic = open_topic(files=files)
    files.armed = True
    with pytest.raises(WriterFailedError) as caught:
        topic.append(b"x", producer=("p", 1), sync=True)
    assert [each.offsets for each in caught.value.appended] == [range(1)]
    files.armed = False


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
def test_repeated_append_of_a_producer_is_known_after(how: str, open_topic: Open, path: Path, tmp_path: Path) -> None:
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
    topic.partition(0)._access.writer().drop_before(topic.partition(0).segments[-1].base_offset)
    topic.close()
    with open_topic() as topic:
        assert topic.partition(0).append_many([b"a"], producer=("p", 1)) == first
        assert values_of(topic) == []


@pytest.mark.parametrize("how", ["the same segment", "rolls", "crash", "reopening"])
def test_500_other_producers_between_an_append_and_its_replay_duplicate_nothing(
    how: str, open_topic: Open, path: Path, tmp_path: Path
) -> None:
    """The 126th used to make a replay of the first a duplicate."""
    topic = open_topic(files=UnsyncedFiles())
    first = topic.partition(0).append_many([b"a", b"b"], producer=("p", 7))
    for number in range(500):
        topic.partition(0).append_many([b"%d" % number], producer=(f"other {number}", number))
        if how == "rolls" and number % 100 == 99:
            topic.partition(0).roll()
    if how in ("crash", "reopening"):
        topic.partition(0).roll()
        topic.partition(0).append_many([b"behind the file"], producer=("other 3", 1000))
        topic.flush()
    if how == "crash":
        topic = open_topic(crash_copy(path, tmp_path / "copy"))
    elif how == "reopening":
        topic.close()
        topic = open_topic()
    partition = topic.partition(0)
    for number in range(500):
        last = 1000 if number == 3 and how in ("crash", "reopening") else number
        assert partition.last_sequence(f"other {number}") == last
        partition.append_many([b"again"], producer=(f"other {number}", last))
    assert partition.append_many([b"a", b"b"], producer=("p", 7)) == first
    assert partition.last_sequence("p") == 7
    assert partition.last_sequence("nobody") is None
    topic.flush()
    assert len(values_of(topic)) == 502 + (how in ("crash", "reopening"))
    assert topic.verify().damage == ()


def test_producer_is_forgotten_at_a_roll_once_it_has_been_silent_for_the_expiry(open_topic: Open, clock: Clock) -> None:
    clock.advance(timedelta(milliseconds=500))
    topic = open_topic(producer_expiry=timedelta(days=2))
    partition = topic.partition(0)
    partition.append_many([b"old"], producer=("old", 1))
    partition.append_many([b"alive"], producer=("alive", 1))
    clock.advance(timedelta(days=1))
    partition.append_many([b"alive"], producer=("alive", 2))
    clock.advance(timedelta(days=1, microseconds=1))
    assert partition.last_sequence("old") == 1, "not before a roll"
    partition.roll()
    assert (partition.last_sequence("old"), partition.last_sequence("alive")) == (1, 2), "to the second, and no sooner"
    partition.append_many([b"x"])
    clock.advance(timedelta(seconds=1))
    partition.roll()
    assert (partition.last_sequence("old"), partition.last_sequence("alive")) == (None, 2)
    topic.close()
    with open_topic() as topic:
        assert topic.partition(0).last_sequence("old") is None
        assert topic.partition(0).last_sequence("alive") == 2


def test_without_an_expiry_no_producer_is_forgotten(open_topic: Open, clock: Clock) -> None:
    topic = open_topic()
    topic.close()
    Topic.open(topic.path, alter=True, producer_expiry=None).close()
    topic = open_topic()
    topic.partition(0).append_many([b"old"], producer=("old", 1))
    clock.advance(timedelta(days=100_000))
    topic.partition(0).roll()
    topic.close()
    with open_topic(producer_expiry=None) as topic:
        assert topic.config.producer_expiry is None
        assert topic.partition(0).last_sequence("old") == 1


def many_producers(topic: Topic, count: int = MAX_PRODUCERS + 3) -> None:
    for number in range(count):
        topic.partition(0).append_many([b"x"], producer=(f"p{number}", number))
    topic.partition(0).roll()


def files_of_producers(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "0000").iterdir() if "producers" in each.name)


def test_file_of_producers_goes_with_its_segment(open_topic: Open, path: Path) -> None:
    topic = open_topic(files=UnsyncedFiles())
    many_producers(topic, MAX_PRODUCERS)
    assert files_of_producers(path) == [], "there is room for them in the header"
    topic.partition(0).append_many([b"x"], producer=("one more", 1))
    topic.partition(0).roll()
    topic.append(b"x")
    topic.partition(0).roll()
    bases = [each.base_offset for each in topic.partition(0).segments]
    assert files_of_producers(path) == [producers_name(base) for base in bases[2:]]
    topic.partition(0)._access.writer().drop_before(bases[3])
    assert files_of_producers(path) == [producers_name(bases[3])]
    topic.close()
    with open_topic() as topic:
        topic.append(b"x")
        topic.partition(0).roll()
        topic.partition(0)._access.writer().drop_before(topic.partition(0).segments[-1].base_offset)
        assert files_of_producers(path) == [producers_name(topic.partition(0).segments[0].base_offset)]
        assert topic.partition(0).last_sequence("p0") == 0


def test_file_of_producers_without_its_segment_is_removed(open_topic: Open, path: Path) -> None:
    with open_topic(files=UnsyncedFiles()) as topic:
        many_producers(topic)
    (kept,) = files_of_producers(path)
    content = (path / "0000" / kept).read_bytes()
    for name in (producers_name(8), producers_name(1 << 40), kept + ".tmp"):
        (path / "0000" / name).write_bytes(content)
    with open_topic() as topic:
        assert files_of_producers(path) == [kept]
        assert topic.partition(0).last_sequence("p1") == 1


@pytest.mark.parametrize("damage", ["missing", "short", "long", "flipped"])
def test_damaged_file_of_producers_is_an_error_and_never_a_forgotten_producer(
    damage: str, open_topic: Open, path: Path
) -> None:
    with open_topic(files=UnsyncedFiles()) as topic:
        many_producers(topic)
    file = path / "0000" / files_of_producers(path)[0]
    content = file.read_bytes()
    changed = {"short": content[:-1], "long": content + b"x", "flipped": bytes([content[0] ^ 1]) + content[1:]}
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(changed[damage])
    before = tree(path)
    with pytest.raises(CorruptLogError) as raised:
        open_topic()
    assert raised.value.path == str(file) and tree(path) == before
    with Topic.open(path, mode="r") as reader:
        assert len(values_of(reader)) == MAX_PRODUCERS + 3, "its readers need it not"
        assert [each.path for each in reader.verify().damage] == [str(file)]
    file.write_bytes(content)
    with open_topic() as topic:
        assert topic.verify().damage == ()


@pytest.mark.parametrize("name", ["create", "pwritev", "datasync", "rename", "fsync", "lstat", "unlink"])
def test_roll_that_fails_at_the_file_of_producers_loses_no_producer(name: str, open_topic: Open, path: Path) -> None:
    for at in range(1, 7):
        shutil.rmtree(path, ignore_errors=True)
        files = FaultyFiles(name, at=at, armed=False, inner=UnsyncedFiles())
        topic = open_topic(files=files)
        many_producers(topic)
        topic.partition(0).append_many([b"y"], producer=("last", 1))
        topic.flush()
        files.armed = True
        with suppress(LogError):
            topic.partition(0).roll()
        files.armed = False
        with suppress(WriterFailedError):
            topic.partition(0).roll()
            topic.append(b"z", sync=True)
            topic.partition(0).roll()
        with suppress(WriterFailedError):
            topic.close()
        with open_topic() as topic:
            assert topic.partition(0).last_sequence("p0") == 0
            assert topic.partition(0).last_sequence("last") == 1
            assert topic.verify().damage == ()


def test_read_only_topic_knows_no_sequences(open_topic: Open) -> None:
    open_topic().close()
    with open_topic(mode="r") as topic, pytest.raises(ReadOnlyError):
        topic.partition(0).last_sequence("p")


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

    producers = Producers(3, [ProducerState(1, 5, 100, 2, 1), ProducerState(2, 6, 200, 1, 1)], nothing)  # type: ignore[arg-type]
    assert producers.seen(Producer(1, 5)) == range(100, 102)
    assert producers.seen(Producer(1, 6)) is None and producers.seen(Producer(3, 0)) is None
    for _ in range(2):
        producers.remember(Producer(1, 6), range(300, 303), 1_500_000)
    assert producers.snapshot() == (ProducerState(2, 6, 200, 1, 1), ProducerState(1, 6, 300, 3, 2))
    assert producers.snapshot(silent_since_us=1_500_000) == (ProducerState(1, 6, 300, 3, 2),)
    producers.remember(Producer(4, 1), range(400, 401), 1 << 60)  # a clock that lies
    assert producers.snapshot()[-1].last_append_s == (1 << 32) - 1
