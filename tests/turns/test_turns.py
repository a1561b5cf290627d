"""Writers take turns: with `shared=True` each append goes where its key belongs, from any number of processes."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from processes import fork, wait
from takers import (
    MIXED,
    PATIENCE_S,
    SINGLE,
    SYNCED,
    Action,
    Taker,
    Told,
    judge,
    key_of,
    opened,
    take_turns,
    together,
    told,
    wait_until,
)

from conftest import MANUAL, QUIET, records_of, values_of
from loglib import FlushPolicy, LockedError, LogError, Topic

WORK = {"single": SINGLE, "synced": SYNCED, "mixed": MIXED, "mixed, and rolls": (*MIXED, Taker.roll)}
POLICIES: dict[str, dict[str, Any]] = {
    "by hand": {"flush": MANUAL},
    "by the clock": {"flush": FlushPolicy(records=None, interval=0.001, bytes=None)},
    "by count": {"flush": FlushPolicy(records=3, interval=None, bytes=None), "durability": "os"},
    "each": {"flush": FlushPolicy(records=1, interval=None, bytes=None), "durability": "os"},
    "small batches": {"flush": MANUAL, "batch_records": 3, "batch_bytes": 900, "compression": "zlib"},
}


def make(path: Path, *, partitions: int = 3, **policies: Any) -> None:
    """A topic whose segments are small, and that drops nothing."""
    Topic.open(path, create=True, partitions=partitions, segment_bytes=8192, **(QUIET | policies)).close()


@pytest.mark.parametrize("actions", WORK.values(), ids=WORK)
@pytest.mark.parametrize(("processes", "partitions"), [(2, 1), (4, 3), (3, 8)])
def test_each_append_is_there_once_and_where_it_said(
    processes: int, partitions: int, actions: tuple[Action, ...], path: Path
) -> None:
    """No process is refused, though all of them need each partition again and again."""
    make(path, partitions=partitions)
    calls = 40
    takers = together(path, processes, actions=actions, calls=calls, wait=PATIENCE_S)
    found = judge(path, takers)
    assert found == sum(taker.begun for taker in takers)
    assert not any(taker.locked for taker in takers)


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_turns_keep_to_the_policies_of_the_topic(policies: dict[str, Any], path: Path) -> None:
    make(path, **policies)
    takers = together(path, 3, calls=40, wait=PATIENCE_S, seed=1)
    assert judge(path, takers) == sum(taker.begun for taker in takers)


def test_many_processes_at_one_partition_all_come_to_their_turn(path: Path) -> None:
    make(path, partitions=1, durability="os")
    takers = together(path, 12, actions=SYNCED, calls=8, wait=PATIENCE_S)
    assert judge(path, takers) == 12 * 8
    assert [taker.locked for taker in takers] == [0] * 12


def test_default_wait_is_long_enough_for_a_holder_that_works(path: Path) -> None:
    """Nobody names `wait=`, and nobody is refused."""
    make(path, partitions=2)
    takers = together(path, 3, calls=30)
    assert judge(path, takers) == sum(taker.begun for taker in takers)


def test_idle_process_gives_its_partition_up(path: Path) -> None:
    """It makes no call while another process waits: what it had buffered is flushed, at its offset, and first."""
    make(path, partitions=1)
    report = told()

    def hold() -> None:
        with opened(path, wait=PATIENCE_S) as topic:
            at = topic.append(b"first", key=b"k")
            report.append(0, at.partition, at.offset)
            report.opened = 1
            wait_until(lambda: report.over, "the end")

    child = fork(hold)
    wait_until(lambda: report.opened, "the holder")
    with opened(path, wait=PATIENCE_S) as topic:
        second = topic.append(b"second", key=b"k", sync=True)
        assert values_of(topic) == [b"first", b"second"]
        assert [record.offset for record in topic.read()] == [0, second.offset]
        report.over = 1
        assert wait(child) == 0
        topic.append(b"third", key=b"k", sync=True)
        assert values_of(topic) == [b"first", b"second", b"third"]
    assert report.place(0) == (0, 0)


@pytest.mark.parametrize("sync", [False, True])
def test_partition_goes_back_and_forth_without_a_flush_by_hand(path: Path, sync: bool) -> None:
    """Each of two processes appends when the other one has, and each record is where its append said."""
    make(path, partitions=1)
    turn = told()

    def play(parity: int) -> None:
        with opened(path, wait=PATIENCE_S) as topic:
            for number in range(parity, 40, 2):
                wait_until(lambda number=number: turn.calls == number, "the turn")  # type: ignore[misc]
                at = topic.append(b"%d" % number, key=b"k", sync=sync)
                turn.append(number, at.partition, at.offset)
                turn.calls = number + 1

    children = [fork(partial(play, parity)) for parity in (0, 1)]
    assert [wait(child) for child in children] == [0, 0]
    assert values_at(path) == [(b"%d" % number, turn.place(number)) for number in range(40)]


def values_at(path: Path) -> list[tuple[bytes | None, tuple[int, int]]]:
    return [(record.value, (record.partition, record.offset)) for record in records_of(path)]


def test_append_many_in_opposite_orders_ends(path: Path) -> None:
    """Two processes need the same partitions, one from the first to the last, one from the last to the first."""
    make(path, partitions=6)

    def spread(name: bytes, *, backwards: bool) -> None:
        with opened(path, wait=PATIENCE_S) as topic:
            keys = [key_of(number) for number in range(24)]
            for each in range(30):
                given = keys[::-1] if backwards else keys
                ranges = topic.append_many([b"%s %d " % (name, each) + key for key in given], keys=given)
                assert sum(len(each.offsets) for each in ranges) == len(keys)

    children = [fork(partial(spread, b"a", backwards=False)), fork(partial(spread, b"b", backwards=True))]
    assert [wait(child) for child in children] == [0, 0]
    found = [record.value or b"" for record in records_of(path)]
    assert len(found) == len(set(found)) == 2 * 30 * 24
    with Topic.open(path, mode="r") as topic:
        for partition in topic.partitions:
            for name in (b"a ", b"b "):
                each = [int((value or b"").split()[1]) for value in values_of(partition) if value.startswith(name)]
                assert each == sorted(each)


def test_number_that_a_producer_repeats_from_another_process_is_not_appended_again(path: Path) -> None:
    """The last call is repeated in the next process, while others take the partition in between."""
    make(path)
    first, second, other = told(), told(), told()

    def produce(told: Told, start: int, end: int) -> None:
        with opened(path, wait=PATIENCE_S) as topic:
            for number in range(start, end):
                at = topic.append(b"-%d" % number, key=b"k", producer=("p", number), sync=number % 5 == 0)
                told.append(number, at.partition, at.offset)

    disturber = fork(partial(take_turns, path, other, 0, actions=SINGLE, wait=PATIENCE_S))
    for start in range(20):
        assert wait(fork(partial(produce, first, start, start + 1))) == 0
        assert wait(fork(partial(produce, second, start, start + 2))) == 0
        assert second.place(start) == first.place(start)
        assert wait(fork(partial(produce, first, start + 1, start + 2))) == 0
        assert second.place(start + 1) == first.place(start + 1)
    other.over = 1
    assert wait(disturber) == 0
    judge(path, [other], others=21)


def test_producers_that_race_with_the_same_numbers_append_each_once(path: Path) -> None:
    """Each number is sent by every process, and is there once. One that comes too late is refused."""
    make(path, partitions=2)

    def produce() -> None:
        with opened(path, wait=PATIENCE_S) as topic:
            for number in range(30):
                try:
                    topic.append_many([b"%d" % number, b"%da" % number], keys=[b"k", b"k"], producer=("p", number))
                except LogError as error:
                    assert "comes too late" in str(error), error

    children = [fork(produce) for _ in range(3)]
    assert [wait(child) for child in children] == [0] * 3
    expected = [value for number in range(30) for value in (b"%d" % number, b"%da" % number)]
    assert [record.value for record in records_of(path)] == expected


def test_threads_of_several_processes_share_the_turns(path: Path) -> None:
    make(path, partitions=2)

    def work(name: int) -> None:
        with opened(path, wait=PATIENCE_S) as topic:
            failures: list[BaseException] = []

            def append(thread: int) -> None:
                try:
                    for number in range(20):
                        topic.append(
                            b"%d %d %d" % (name, thread, number), key=b"%d" % (number % 5), sync=number % 3 == 0
                        )
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=append, args=(each,)) for each in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures, failures[0]

    children = [fork(partial(work, name)) for name in range(3)]
    assert [wait(child) for child in children] == [0] * 3
    found = [tuple(map(int, (record.value or b"").split())) for record in records_of(path)]
    assert sorted(found) == [(name, thread, number) for name in range(3) for thread in range(4) for number in range(20)]
    by_key: dict[tuple[int, int, int], list[int]] = {}
    for name, thread, number in found:
        by_key.setdefault((name, thread, number % 5), []).append(number)
    assert all(each == sorted(each) for each in by_key.values())


def test_two_topics_of_one_process_take_turns_as_well(path: Path) -> None:
    """As two libraries in one program would have them."""
    make(path, partitions=2)
    with opened(path, wait=PATIENCE_S) as one, opened(path, wait=PATIENCE_S) as two:
        for _ in range(20):
            one.append(b"one", key=b"k")
            two.append(b"two", key=b"k")
    assert values_of_path(path) == [b"one", b"two"] * 20


def values_of_path(path: Path) -> list[bytes | None]:
    return [record.value for record in records_of(path)]


def test_closed_topic_lets_others_in_and_holds_nothing(path: Path) -> None:
    make(path)
    topic = opened(path, wait=0.0)
    for number in range(6):
        topic.append(b"x", key=key_of(number))
    topic.close()
    with Topic.open(path) as exclusive:  # all partitions are free
        exclusive.append(b"y", sync=True)
    assert len(records_of(path)) == 7


def test_writer_of_all_partitions_gives_none_up(path: Path) -> None:
    """One that has opened without `shared` keeps what it has: others wait, and are told who has it."""
    make(path)
    with Topic.open(path) as alone, opened(path, wait=0.05) as topic:
        alone.append(b"mine", partition=0)
        with pytest.raises(LockedError, match=f"pid {os.getpid()} "):
            topic.append(b"x", partition=0)
        alone.append(b"mine as well", partition=0, sync=True)
    assert values_of_path(path) == [b"mine", b"mine as well"]


def test_process_that_needs_no_turn_keeps_its_partition(path: Path) -> None:
    """Nobody waits for it, so its buffered records stay together: one batch, and not one for each call."""
    make(path, partitions=2)
    with opened(path, wait=PATIENCE_S) as topic, opened(path, wait=PATIENCE_S) as other:
        for _ in range(50):
            topic.append(b"x", partition=0)
            other.append(b"y", partition=1)
        topic.flush()
        other.flush()
        assert [len(list(topic.partition(number).batches())) for number in (0, 1)] == [1, 1]


def test_taker_that_never_ends_is_over_when_told(path: Path) -> None:
    """The helper of these tests: a taker goes on until the test ends it, and then has flushed."""
    make(path)
    report = told()
    child = fork(partial(take_turns, path, report, 0, wait=PATIENCE_S))
    wait_until(lambda: report.calls > 20, "the taker")
    report.over = 1
    assert wait(child) == 0 and report.done
    assert judge(path, [report]) == report.begun


# --- what others have done meanwhile ------------------------------------------------------------------------


def test_who_has_given_the_partition_up_publishes_nothing_that_is_published(tmp_path: Path) -> None:
    """Another process may write into the same file without asking."""
    Topic.create(tmp_path / "t", **QUIET).close()
    with Topic.open(tmp_path / "t", shared=True) as topic:
        topic.append(b"a", sync=True)
        writer = topic.partition(0)._access.writer()
        writer._take_turn(writer._hand_over)
        watermark = (tmp_path / "t" / "0000" / "watermark").read_bytes()
        writer.publication.publish(flushed=writer.batch.tail)
        assert (tmp_path / "t" / "0000" / "watermark").read_bytes() == watermark
        assert not writer.publication.in_progress
        topic.append(b"b", sync=True)
        assert values_of(topic) == [b"a", b"b"]


def test_sync_of_a_segment_reaches_as_far_as_others_have_written(tmp_path: Path) -> None:
    with Topic.create(tmp_path / "t", **QUIET) as topic:
        topic.append(b"a", sync=True)
        writer = topic.partition(0)._access.writer()
        disk, first = writer.disk, writer.batch.tail
        topic.append(b"b", sync=True)
        last = writer.batch.tail
        by_others = disk.mark._replace(written_end=last.end, written_tail=first.end)
        with mock.patch.object(type(disk), "mark", new_callable=mock.PropertyMock, return_value=by_others):
            assert disk.with_others(first, disk.active)[:2] == (last.end, first.end)
            assert disk.with_others(last, disk.active) == last
        beyond = by_others._replace(written_end=last.end + 100)
        with mock.patch.object(type(disk), "mark", new_callable=mock.PropertyMock, return_value=beyond):
            assert disk.with_others(first, disk.active) == first, "what is not in the file yet is not reached"
