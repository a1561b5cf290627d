"""Turns beside everything else that a topic does: retention, transactions, readers, forks, event loops, logging."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from loops import run
from processes import fork, wait
from takers import (
    MIXED,
    PATIENCE_S,
    SINGLE,
    SYNCED,
    Taker,
    Told,
    judge,
    key_of,
    opened,
    take_turns,
    told,
    wait_until,
)

from conftest import MANUAL, QUIET, last_segment, records_of, run_python, values_of
from loglib import FlushPolicy, LockedError, LogError, LogMovedError, Retention, Topic, aio, transaction
from loglib.append.writer import Writer
from loglib.errors import ForkedHandleError
from loglib.log import examine, topic_file
from loglib.log.recovery import list_segments
from loglib.logging import LogHandler, spool_topic
from loglib.system import lock
from loglib.system.files import REAL
from loglib.transactions.apply import Applier
from loglib.transactions.repair_store import repair
from loglib.transactions.store import Store

EACH = FlushPolicy(records=1, interval=None, bytes=None)


def make(path: Path, *, partitions: int = 2, **policies: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    Topic.open(path, create=True, partitions=partitions, **({"segment_bytes": 8192} | QUIET | policies)).close()


class Two:
    """Two takers that work on until the block ends."""

    def __init__(self, path: Path, *, count: int = 2, **given: Any) -> None:
        self.told = [told() for _ in range(count)]
        options: dict[str, Any] = {"actions": MIXED, "wait": PATIENCE_S} | given
        self.pids = [fork(partial(take_turns, path, each, number, **options)) for number, each in enumerate(self.told)]

    def __enter__(self) -> Two:
        for each in self.told:
            wait_until(lambda each=each: each.calls > 3 or each.done, "the takers")  # type: ignore[misc]
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self.told:
            each.over = 1
        assert [wait(pid) for pid in self.pids] == [0] * len(self.pids), "a taker failed; its error is above"


def test_records_without_a_key_stay_in_the_partition_that_the_process_had_last(path: Path) -> None:
    """A process that pauses gives its partition up, and takes it again. So its records keep their order."""
    make(path, partitions=8, flush=MANUAL)
    with Topic.open(path, shared=True) as topic:
        for number in range(8):
            topic.append(b"%d" % number, sync=True)
            (writer,) = topic._handles.writers
            wait_until(lambda: writer.is_parked, "the end of its turn")  # noqa: B023
        topic.append(b"y", partition=(writer.partition + 1) % 8, sync=True)  # it has another one, too
        wait_until(lambda: all(each.is_parked for each in topic._handles.writers), "the end of its turns")
        topic.append(b"8", sync=True)
    found = [each.value for each in records_of(path) if each.partition == writer.partition]
    assert found == [b"%d" % number for number in range(9)]


def test_records_without_a_key_go_elsewhere_while_another_process_has_the_partition(path: Path) -> None:
    make(path, partitions=2, flush=MANUAL)
    with Topic.open(path, shared=True) as topic:
        topic.append(b"0", sync=True)
        (writer,) = topic._handles.writers
        held: list[lock.Lock] = []

        def hold_it() -> bool:
            found = lock.try_acquire(REAL, writer.directory)
            held.extend([] if found is None else [found])
            return bool(held)

        wait_until(hold_it, "the end of its turn")
        topic.append(b"1", sync=True)
        held[0].release()
    found = {each.value: each.partition == writer.partition for each in records_of(path)}
    assert found == {b"0": True, b"1": False}


# --- segments come and go ---------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_rolls_of_everyone_keep_every_record(durability: str, path: Path) -> None:
    """Every process that gets its turn may find segments that others have begun."""
    make(path, durability=durability)
    with Two(path, count=3, actions=(*SINGLE, Taker.roll)) as takers, opened(path, wait=PATIENCE_S) as topic:
        for number in range(20):
            topic.partition(number % 2).roll()
            topic.append(b"-mine", partition=number % 2)
    assert not any(each.locked for each in takers.told)
    assert judge(path, takers.told, others=20) == sum(each.begun for each in takers.told)


def test_retention_of_another_process_drops_only_what_is_old(path: Path) -> None:
    """What is left is a run of records up to the end. It has all that the takers were promised there."""
    make(path, retention=Retention(age=None, bytes=6000), segment_bytes=4096)
    with Two(path) as takers, opened(path, wait=PATIENCE_S) as topic:
        for _ in range(5):
            topic.retain()
            for partition in topic.partitions:
                partition.roll()
        for partition in topic.partitions:
            wait_until(lambda partition=partition: partition.high_watermark > 20_000, "records")  # type: ignore[misc]
        topic.retain()
        assert all(partition.log_start_offset > 0 for partition in topic.partitions)
    judge(path, takers.told, from_start=False)


def test_repair_finds_no_damage_where_a_writer_begins_a_segment_meanwhile(path: Path) -> None:
    """It asked its caller to close the writer, because of damage that was not there."""
    make(path, partitions=1)
    found, count = list_segments, itertools.count()

    def list_and_roll(files: Any, directory: str) -> dict[int, int]:
        listed = found(files, directory)
        if next(count) == 0:
            topic.partition(0).roll()
            topic.append(b"two", sync=True)
        return listed

    with Topic.open(path) as topic:
        topic.append(b"one", sync=True)
        with mock.patch.object(examine, "list_segments", list_and_roll):
            assert repair(str(path)).repairs == ()
    assert next(count) > 1 and len(records_of(path)) == 2


def test_delete_before_from_another_process_drops_segments_under_the_writers(path: Path) -> None:
    make(path, segment_bytes=4096)
    with Two(path) as takers, opened(path, wait=PATIENCE_S) as topic:
        before, number = [0, 0], 0
        while number < 40 or not all(before):  # until the takers have filled segments of both partitions
            number += 1
            partition = topic.partition(number % 2)
            end = partition.high_watermark
            start = partition.delete_before(end)
            assert before[number % 2] <= start <= end
            before[number % 2] = start
            topic.append(b"-mine", partition=partition.id)
    with Topic.open(path, mode="r") as topic:
        mine = sum((record.value or b"").startswith(b"-") for record in topic.read())
    judge(path, takers.told, from_start=False, others=mine)


def test_policies_that_another_process_alters_hold_for_all(path: Path) -> None:
    """A new size of segments is kept by writers that were open before."""
    make(path, segment_bytes=1 << 20)
    with Two(path) as takers, opened(path, wait=PATIENCE_S) as topic:
        topic.alter(compression="zlib")
        for number in range(10):
            topic.append(b"-mine", partition=number % 2, sync=True)
    judge(path, takers.told, others=10)


# --- transactions and readers -----------------------------------------------------------------------------


def test_transactions_of_a_third_process_are_whole_in_all_partitions(tmp_path: Path) -> None:
    """Each is in both partitions, once, and between the records of the takers."""
    path = tmp_path / "data" / "topic"
    make(path)
    count = 15

    def commit() -> None:
        with Topic.open(path, mode="r") as topic:
            for number in range(count):
                with transaction("app", timeout=PATIENCE_S) as tx:
                    for partition in (0, 1):
                        tx.append(topic, b"-tx %d" % number, partition=partition)

    with Two(path) as takers:
        assert wait(fork(commit)) == 0
    judge(path, takers.told, others=2 * count)
    with Topic.open(path, mode="r") as topic:
        for partition in topic.partitions:
            found = [value for value in values_of(partition) if value.startswith(b"-")]
            assert found == [b"-tx %d" % number for number in range(count)]


def test_process_that_takes_turns_commits_transactions_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "data" / "topic"
    make(path)
    count = 8

    def commit(name: bytes) -> None:
        with opened(path, wait=PATIENCE_S) as topic:
            for number in range(count):
                topic.append(b"-plain", partition=number % 2)
                with transaction(name.decode(), timeout=PATIENCE_S) as tx:
                    for partition in (0, 1):
                        tx.append(topic, b"-%s %d" % (name, number), partition=partition)

    with Two(path, actions=SINGLE) as takers:
        children = [fork(partial(commit, name)) for name in (b"a", b"b")]
        assert [wait(child) for child in children] == [0, 0]
    judge(path, takers.told, others=2 * 2 * count + 2 * count)
    with Topic.open(path, mode="r") as topic:
        for partition in topic.partitions:
            for name in (b"a", b"b"):
                found = [value for value in values_of(partition) if value.startswith(b"-%s" % name)]
                assert found == [b"-%s %d" % (name, number) for number in range(count)]


def test_process_that_opens_a_partition_waits_for_no_other_one(path: Path) -> None:
    """It has the one, and a process that has the other may wait for that."""
    make(path)
    child = told()

    def keep() -> None:
        with opened(path, wait=PATIENCE_S) as topic, mock.patch.object(Applier, "_release"):
            for partition in (0, 1):
                topic.append(b"-theirs", partition=partition)
            with transaction("app", timeout=PATIENCE_S) as tx:
                for partition in (0, 1):
                    tx.append(topic, b"-tx", partition=partition)
            with topic._accesses[1].writer().held():
                child.calls = 1
                wait_until(lambda: child.over, "the end")

    with opened(path, wait=10) as topic:
        topic.append(b"-mine", partition=1)
        pid = fork(keep)
        wait_until(lambda: child.calls, "the child")
        topic.append(b"-mine", partition=0)
        child.over = 1
        assert wait(pid) == 0
    assert judge(path, [], others=6) == 0
    with Topic.open(path, mode="r") as topic:
        assert [values_of(each)[-1] for each in topic.partitions] == [b"-mine", b"-tx"]


def test_process_that_commits_has_no_partition_while_it_waits_for_another(path: Path) -> None:
    make(path)
    child = told()

    def keep() -> None:
        with opened(path, wait=10) as topic:
            topic.append(b"-theirs", partition=0)
            with topic._accesses[0].writer().held():
                child.calls = 1
                until = time.monotonic() + 0.5  # by then the commit waits, with or without the other partition
                while lock.is_free(REAL, str(path / "0001")) and time.monotonic() < until:
                    time.sleep(0.001)
                topic.append(b"-theirs", partition=1)

    with opened(path, wait=PATIENCE_S) as topic:
        topic.append(b"-mine", partition=0)
        pid = fork(keep)
        wait_until(lambda: child.calls, "the child")
        with transaction("app", timeout=PATIENCE_S) as tx:
            for partition in (1, 0):
                tx.append(topic, b"-tx", partition=partition)
        assert wait(pid) == 0
    assert judge(path, [], others=5) == 0


def test_process_whose_commit_is_done_has_no_partition_while_it_waits_for_another(path: Path) -> None:
    make(path)
    child = told()

    def keep() -> None:
        with opened(path, wait=10) as topic:
            topic.append(b"-theirs", partition=0)
            child.calls = 1
            wait_until(lambda: child.over, "the commit")
            with topic._accesses[0].writer().held():
                child.calls = 2
                topic.append(b"-theirs", partition=1)

    finish = Store.finish

    def finish_and_let_the_other_go_on(*given: Any, **named: Any) -> None:
        finish(*given, **named)
        child.over = 1
        wait_until(lambda: child.calls == 2, "the child")

    with opened(path, wait=PATIENCE_S) as topic:
        topic.append(b"-mine", partition=0)
        pid = fork(keep)
        wait_until(lambda: child.calls, "the child")
        done = mock.patch.object(Store, "finish", finish_and_let_the_other_go_on)
        with done, transaction("app", timeout=PATIENCE_S) as tx:
            for partition in (0, 1):
                tx.append(topic, b"-tx", partition=partition)
        assert wait(pid) == 0
    assert judge(path, [], others=5) == 0


def test_readers_that_follow_meanwhile_get_each_record_once_and_in_order(path: Path) -> None:
    make(path, flush=EACH, durability="os")
    seen = told()

    def follow() -> None:
        found: dict[tuple[int, int], int] = {}
        newest: dict[int, int] = {}
        with Topic.open(path, mode="r") as topic:
            for record in topic.follow("begin"):
                if record.value == b"-end":
                    seen.calls += 1
                    if seen.calls == 2:
                        break
                    continue
                assert newest.get(record.partition, -1) < record.offset, "out of order"
                newest[record.partition] = record.offset
                taker, number = map(int, (record.value or b"").split()[:2])
                assert (taker, number) not in found, "twice"
                found[taker, number] = record.offset
        seen.begun = len(found)

    reader = fork(follow)
    with Two(path, count=3, actions=(*SINGLE, *SYNCED, Taker.roll, Taker.append_many)) as takers:
        pass
    with opened(path, wait=PATIENCE_S) as topic:
        for partition in topic.partitions:
            partition.append(b"-end")
    assert wait(reader) == 0
    assert seen.begun == judge(path, takers.told, others=2) == sum(each.begun for each in takers.told)


def test_group_handles_each_record_of_writers_that_take_turns(path: Path) -> None:
    make(path, flush=EACH, durability="os")
    with Two(path, actions=SINGLE) as takers, Topic.open(path, mode="r") as topic, topic.group("g") as group:
        early = [(record.partition, record.offset) for record in group.poll(max_records=50, timeout=5.0)]
    with Topic.open(path, mode="r") as topic, topic.group("g") as group:
        late = [(record.partition, record.offset) for record in group.follow(timeout=0.2)]
    expected = [(record.partition, record.offset) for record in records_of(path)]
    assert set(early) | set(late) == set(expected)
    judge(path, takers.told)


# --- the ends of topics and processes ----------------------------------------------------------------------


def test_topic_that_is_closed_between_calls_gives_everything_back(path: Path) -> None:
    make(path)

    def open_and_close(name: int) -> None:
        for number in range(12):
            with opened(path, wait=PATIENCE_S) as topic:
                for each in range(3):
                    topic.append(b"-%d %d %d" % (name, number, each), partition=each % 2)

    with Two(path) as takers:
        children = [fork(partial(open_and_close, name)) for name in range(2)]
        assert [wait(child) for child in children] == [0, 0]
    judge(path, takers.told, others=2 * 12 * 3)


def test_topic_that_is_collected_gives_everything_back(path: Path) -> None:
    """Nobody has closed it. What it had appended is there, and its partitions are free."""
    make(path)

    def forget() -> None:
        topic = opened(path, wait=PATIENCE_S)
        for number in range(4):
            topic.append(b"-forgotten", partition=number % 2)
        with pytest.warns(ResourceWarning, match="was not closed"):
            del topic
            gc.collect()

    with Two(path) as takers:
        for _ in range(5):
            forget()
    with opened(path, wait=PATIENCE_S) as topic:
        for number in (0, 1):
            topic.append(b"-last", partition=number)
    judge(path, takers.told, others=5 * 4 + 2)


def test_process_that_ends_without_closing_loses_nothing(path: Path) -> None:
    make(path)
    program = """
        import sys
        from loglib import Topic
        topic = Topic.open(sys.argv[1], shared=True, wait=60)
        for number in range(20):
            topic.append(b"-left", partition=number % 2)
    """
    with Two(path) as takers:
        run_python(program, path)
    judge(path, takers.told, others=20)


def _in_pool(arguments: tuple[Path, int]) -> int:
    try:
        _PARENTS[0].append(b"never", partition=0)
    except ForkedHandleError:
        return append_five(arguments)
    return 0


_PARENTS: list[Topic] = []


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_pool_of_processes_takes_turns_with_its_parent(method: str, path: Path) -> None:
    """The parent holds a partition when it forks: a child has no part of that, and the parent gives it up."""
    make(path)
    task: Callable[[tuple[Path, int]], int] = _in_pool if method == "fork" else append_five
    with opened(path, wait=PATIENCE_S) as topic:
        for number in range(4):
            topic.append(b"-parent", partition=number % 2)
        _PARENTS[:] = [topic]
        try:
            with multiprocessing.get_context(method).Pool(3) as pool:
                found = pool.map_async(task, [(path, number) for number in range(6)], chunksize=1)
                pids = found.get(PATIENCE_S)
                topic.append(b"-parent", partition=0)
                pool.close()
                pool.join()
        finally:
            _PARENTS.clear()
        assert {0, os.getpid()}.isdisjoint(pids)
        topic.append(b"-parent", partition=1)
    judge(path, [], others=6 + 6 * 5)
    assert len({record.value for record in records_of(path)}) == 1 + 6 * 5


def append_five(arguments: tuple[Path, int]) -> int:
    path, number = arguments
    with opened(path, wait=PATIENCE_S) as topic:
        for each in range(5):
            topic.append(b"-%d %d" % (number, each), key=key_of(each), sync=each == 4)
    return os.getpid()


def test_child_that_was_forked_by_a_waiting_process_keeps_no_turn(path: Path) -> None:
    """A child lives on and does nothing: the parent's partition and its place in the queue are not the child's."""
    make(path, partitions=1)
    report = told()

    def rest() -> None:
        wait_until(lambda: report.over, "the end")

    with Two(path, actions=SYNCED) as takers, opened(path, wait=PATIENCE_S) as topic:
        staying = []
        for _ in range(5):
            topic.append(b"-mine", key=b"k")
            staying.append(fork(rest))
    last = fork(partial(take_turns, path, takers.told[0], 0, calls=0))
    assert wait(last) == 0
    with Topic.open(path):  # all is free, though the children live
        pass
    report.over = 1
    assert [wait(child) for child in staying] == [0] * 5
    judge(path, takers.told, others=5)


# --- other ways to append ----------------------------------------------------------------------------------


def test_tasks_of_event_loops_take_turns(path: Path) -> None:
    """Two processes, each with an event loop and tasks; the loop goes on while a task waits for a turn."""
    make(path)
    calls = 10

    def work(report: Told, name: int) -> None:
        async def append(topic: aio.AsyncTopic, task: int) -> None:
            for number in range(calls):
                await topic.append(b"-%d %d %d" % (name, task, number), key=key_of(task), sync=number % 3 == 0)

        async def main() -> None:
            options: dict[str, Any] = {"shared": True, "wait": PATIENCE_S}
            async with aio.open(path, **options) as topic:
                report.opened = 1
                await asyncio.gather(*(append(topic, task) for task in range(6)))

        run(main())

    with Two(path, actions=SINGLE) as takers:
        children = [fork(partial(work, told(), name)) for name in range(2)]
        assert [wait(child) for child in children] == [0, 0]
    judge(path, takers.told, others=2 * 6 * calls)
    found = [record.value or b"" for record in records_of(path) if (record.value or b"").startswith(b"-")]
    assert len(set(found)) == len(found)
    for name in range(2):
        for task in range(6):
            mine = [value for value in found if value.startswith(b"-%d %d " % (name, task))]
            assert mine == [b"-%d %d %d" % (name, task, number) for number in range(calls)]


def test_event_loop_is_not_blocked_by_a_turn_that_does_not_come(path: Path) -> None:
    """Another writer keeps the partition. Other tasks run, and others' partitions are appended to."""
    make(path)

    async def main() -> None:
        options: dict[str, Any] = {"shared": True, "wait": 0.3}
        async with aio.open(path, **options) as topic:
            waiting = asyncio.create_task(topic.append(b"never", partition=0, sync=True))
            turns = 0
            while not waiting.done():
                await topic.append(b"-free", partition=1)
                await asyncio.sleep(0)
                turns += 1
            with pytest.raises(LockedError, match=f"pid {os.getpid()} "):
                await waiting
            assert turns > 1

    held = lock.acquire(REAL, str(path / "0000"), 0o600)
    try:
        run(main())
    finally:
        held.release()
    assert {record.value for record in records_of(path)} == {b"-free"}


def test_event_loop_is_not_blocked_by_records_without_a_key_when_others_have_all_partitions(path: Path) -> None:
    """The loop's thread waited for a partition itself, up to five seconds."""
    make(path)

    async def main() -> None:
        async with aio.open(path, shared=True, wait=1.0) as topic:
            await topic.append(b"-free", sync=True)
            for writer in topic.topic._handles.writers:
                wait_until(lambda writer=writer: writer.is_parked, "a partition that is given up")  # type: ignore[misc]
            held = [lock.acquire(REAL, str(path / name), 0o600) for name in ("0000", "0001")]
            try:
                waiting = asyncio.create_task(topic.append(b"never"))
                began = time.monotonic()
                await asyncio.sleep(0)  # in which the task asks
                assert time.monotonic() - began < 0.5
                with pytest.raises(LockedError, match=f"pid {os.getpid()} "):
                    await waiting
            finally:
                for each in held:
                    each.release()

    run(main())
    assert {record.value for record in records_of(path)} == {b"-free"}


def test_loggers_of_three_processes_share_one_partition(path: Path) -> None:
    """Each line that `drain` has said to be written is there once, and no line is dropped."""
    lines = 30
    report = told()

    def log(name: int) -> None:
        handler = LogHandler(path, partitions=1)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger = logging.Logger(f"app{name}", logging.INFO)
        logger.addHandler(handler)
        for number in range(lines):
            logger.info("-%d %d", name, number)
            if number % 7 == 0:
                assert handler.drain(PATIENCE_S)
                report.durable[name] = number + 1
        handler.close()
        assert handler.dropped == 0

    children = [fork(partial(log, name)) for name in range(3)]
    assert [wait(child) for child in children] == [0] * 3
    found = [record.value or b"" for record in records_of(path)]
    assert sorted(found) == sorted(b"-%d %d" % (name, number) for name in range(3) for number in range(lines))
    for name in range(3):
        mine = [int(value.split()[1]) for value in found if value.startswith(b"-%d " % name)]
        assert mine == sorted(mine)


@pytest.mark.parametrize("then", ["nothing", "damage", "an error of the disk"])
def test_lines_are_there_once_though_partitions_were_added_in_the_middle_of_a_portion(
    path: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batches of the portion were in the topic, and were written again."""
    make(path, partitions=1, batch_bytes=1 << 16)
    append, count, described = Writer.append_body, itertools.count(), list[bytes]()

    def add_before_the_third(writer: Writer, *args: Any, **options: Any) -> range:
        if next(count) == 2:
            writer._take_turn(writer._hand_over)
            Topic.add_partitions(path, 2)
            whole = (path / "topic.json").read_bytes()
            if then == "damage":
                (path / "topic.json").write_bytes(b"{")
            elif then == "an error of the disk":
                failing = mock.Mock(wraps=topic_file)
                failing.read.side_effect = OSError(errno.EIO, "Input/output error")
                monkeypatch.setattr(spool_topic, "topic_file", failing)
            described.append(whole)
        return append(writer, *args, **options)

    handler = LogHandler(path)
    handler.setFormatter(logging.Formatter("%(message)s"))
    with mock.patch.object(Writer, "append_body", add_before_the_third):
        for number in range(5000):
            handler.handle(logging.LogRecord("a", logging.INFO, "", 0, f"{number:060}", None, None))
        if then == "damage":
            wait_until(lambda: bool(described), "the third batch")
            assert not handler.drain(0.2)
            (path / "topic.json").write_bytes(described[0])
        assert handler.drain(PATIENCE_S)
    handler.close()
    assert next(count) > 2
    assert sorted(int(each.value or b"") for each in records_of(path)) == list(range(5000))


def test_tables_go_to_several_partitions_from_two_processes(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    make(path, partitions=3, segment_bytes=1 << 20)

    def append(name: int) -> None:
        with opened(path, wait=PATIENCE_S) as topic:
            for number in range(6):
                keys = [key_of(each) for each in random.Random(number + name).sample(range(24), 24)]
                table = pyarrow.table({"key": keys, "value": [b"-%d %d %s" % (name, number, key) for key in keys]})
                topic.append_arrow(table)

    children = [fork(partial(append, name)) for name in range(2)]
    assert [wait(child) for child in children] == [0, 0]
    judge(path, [], others=2 * 6 * 24)
    found = [record.value for record in records_of(path)]
    assert len(set(found)) == len(found)


# --- the topic changes while a process has given everything up ------------------------------------------------


def given_up(path: Path) -> Topic:
    """An open topic that has appended, and that holds no partition any more."""
    topic = opened(path, wait=0.5)
    for number in range(len(topic.partitions)):
        topic.append(b"-first", partition=number, sync=True)
    wait_until(lambda: _all_are_free(path), "that all partitions are given up")
    return topic


def _all_are_free(path: Path) -> bool:
    return all(lock.is_free(REAL, str(each)) for each in path.iterdir() if each.name.isdigit())


@pytest.mark.parametrize("sync", [True, False])
def test_added_partitions_end_appends_of_a_process_that_held_none(path: Path, sync: bool) -> None:
    """Otherwise its keys would go to the former partitions, and those of others to the new ones."""
    make(path)
    topic = given_up(path)
    Topic.add_partitions(path, 5)
    with pytest.raises(LogMovedError):
        topic.append(b"-x", key=b"k", sync=sync)
    with pytest.raises(LogMovedError):
        topic.append_many([b"-x", b"-y"], keys=[key_of(0), key_of(1)])
    with suppress(LogError):
        topic.close()
    with opened(path, wait=PATIENCE_S) as again:
        again.append(b"-after", key=b"k", sync=True)
    judge(path, [], others=3)


@pytest.mark.parametrize("what", ["deleted", "made again", "moved", "replaced by an older copy"])
def test_topic_that_was_replaced_meanwhile_is_not_appended_to(path: Path, what: str) -> None:
    make(path)
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    topic = given_up(path)
    if what == "moved":
        path.rename(path.with_name("other"))
    else:
        Topic.delete(path)
    if what == "made again":
        make(path)
    elif what == "replaced by an older copy":
        copy.rename(path)
    for append in (
        lambda: topic.append(b"-x", partition=0, sync=True),
        lambda: topic.append_many([b"-x"] * 9, keys=[key_of(each) for each in range(9)]),
    ):
        with pytest.raises(LogMovedError):
            append()
    with suppress(LogError):
        topic.close()
    assert path.exists() == (what in ("made again", "replaced by an older copy"))
    if path.exists():
        assert records_of(path) == []


@pytest.mark.parametrize("partition", [0, None])
def test_topic_that_was_made_again_before_the_first_append_is_not_called_damaged(
    partition: int | None, path: Path
) -> None:
    make(path)
    with Topic.open(path, shared=True) as topic:
        Topic.delete(path)
        make(path)
        with pytest.raises(LogMovedError, match="is another topic now"):
            topic.append(b"-x", partition=partition)
    assert records_of(path) == []


def test_topic_that_was_made_again_is_not_altered_by_a_process_without_a_partition(path: Path) -> None:
    """It gave the new topic the description of the deleted one. Then no process could open or read it."""
    make(path)
    with Topic.open(path, shared=True) as topic:
        Topic.delete(path)
        make(path, partitions=3)
        with pytest.raises(LogMovedError, match="is another topic now"):
            topic.alter(segment_bytes=1 << 20)
    with Topic.open(path) as again:
        assert len(again.partitions) == 3 and again.config.segment_bytes != 1 << 20
        again.append(b"x", sync=True)
    assert len(records_of(path)) == 1


def test_writer_of_all_partitions_may_change_everything_meanwhile(path: Path) -> None:
    """It rolls, drops and alters; the others continue behind what it has left."""
    make(path)
    with given_up(path) as topic:
        with Topic.open(path) as alone:
            for partition in alone.partitions:
                partition.roll()
                partition.append(b"-alone", sync=True)
                partition.delete_before(partition.high_watermark)
            alone.alter(compression="zlib")
        for number in (0, 1):
            topic.append(b"-last", partition=number, sync=True)
    judge(path, [], others=2, from_start=False)


def test_tail_that_a_killed_process_has_torn_is_cut_by_the_next_turn(path: Path) -> None:
    make(path)
    with given_up(path) as topic:
        with last_segment(path).open("ab") as file:
            file.write(b"torn" * 30)
        topic.append(b"-last", partition=0, sync=True)
    judge(path, [], others=3)


def test_full_batch_is_where_it_said_after_another_writer(path: Path) -> None:
    """A batch that fills while others wait, and one as large as the limit."""
    make(path, partitions=1, flush=MANUAL, segment_bytes=1 << 20, batch_bytes=4096)
    with Two(path, actions=SINGLE) as takers, opened(path, wait=PATIENCE_S) as topic:
        places = [topic.append(b"-" + bytes(size), key=b"k") for size in (4000, 4095, 4096, 10_000, 1) * 4]
    judge(path, takers.told, others=20)
    found = [record.offset for record in records_of(path) if (record.value or b"").startswith(b"-")]
    assert found == [place.offset for place in places]
