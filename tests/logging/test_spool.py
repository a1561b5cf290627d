"""The spool: accepted records are in the topic once, whatever happens; nobody waits longer than asked."""

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conftest import run_python, start_python
from loglib import FlushPolicy, LockedError, Partition, Topic
from loglib.logging import spool
from loglib.logging.spool import Drops, Spool
from loglib.system.files import Files
from loglib.testing import Call, FaultyFiles, UnsyncedFiles, WatchedFiles

POLICIES: dict[str, Any] = {"flush": FlushPolicy(records=None, interval=None, bytes=None), "durability": "os"}


def report(drops: Drops) -> bytes:
    return b"dropped %d" % drops.records


class Gate(WatchedFiles):
    """Writing waits while the gate is shut."""

    def __init__(self) -> None:
        super().__init__(UnsyncedFiles())
        self.shut_until = threading.Event()
        self.reached = threading.Event()

    def before(self, call: Call) -> None:
        if call.name == "pwritev" and call.file.endswith(".log"):
            self.reached.set()
            assert self.shut_until.wait(60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_LINGER_S", 0.001)
    monkeypatch.setattr(spool, "_FIRST_NAP_S", 0.001)
    monkeypatch.setattr(spool, "_LOOK_S", 0.005)


@pytest.fixture
def made(path: Path) -> Iterator[Any]:
    spools: list[Spool] = []

    def make(files: Files | None = None, *, capacity: int = 1 << 20, patience: float = 0.0, **more: Any) -> Spool:
        files = files or UnsyncedFiles()
        options = {"partitions": 2, **POLICIES, **more}
        spools.append(
            Spool(path, capacity_bytes=capacity, patience_s=patience, report=report, files=files, **options)
        )
        return spools[-1]

    yield make
    for each in spools:
        each.close(10)


def values(path: Path) -> list[bytes | None]:
    with Topic.open(path, mode="r") as topic:
        return [record.value for record in topic.read()]


def test_accepted_records_are_in_the_topic_once_and_in_order(made: Any, path: Path) -> None:
    one = made()
    for number in range(5000):
        assert one.put(b"%d" % number, number)
    assert one.flush(30)
    assert values(path) == [b"%d" % number for number in range(5000)]
    with Topic.open(path, mode="r") as topic:
        assert [record.timestamp for record in topic.read()][:3] == [0, 1, 2]
        assert topic.config.durability == "os"
    assert one.put(b"urgent", 1, urgent=True)
    while b"urgent" not in values(path):
        time.sleep(0.001)


def test_put_never_waits_and_drops_are_counted_and_reported(made: Any, path: Path) -> None:
    gate = Gate()
    one = made(gate, capacity=100)
    one.put(b"x" * 40, 1)
    assert gate.reached.wait(30)  # from now on the thread stands still, in the middle of a write
    with mock.patch.object(spool, "_shut", side_effect=AssertionError("it waits")):
        accepted = [one.put(b"%02d" % number + b"y" * 18, number) for number in range(10)]
    assert not gate.shut_until.is_set() and not values(path), "nothing was written meanwhile"
    assert accepted == [True, True, True] + [False] * 7
    assert one.dropped == 7
    assert not one.flush(0.01)
    gate.shut_until.set()
    assert one.flush(30)
    while b"dropped 7" not in values(path):
        time.sleep(0.001)
    assert one.dropped == 7
    assert len(values(path)) == 5
    with Topic.open(path, mode="r") as topic:
        assert [record.timestamp for record in topic.read() if record.value == b"dropped 7"] == [9]


def test_put_waits_for_room_as_long_as_it_may(made: Any, path: Path) -> None:
    gate = Gate()
    one = made(gate, capacity=100, patience=0.05)
    one.put(b"x" * 90, 1)
    assert gate.reached.wait(30)
    assert not one.put(b"y" * 20, 2), "the patience is over"
    assert not one.put(b"z" * 101, 2), "it would never have room"
    one._patience_s = 60
    threading.Timer(0.05, gate.shut_until.set).start()
    assert one.put(b"y" * 20, 3)
    assert one.flush(30)
    assert values(path)[0] == b"x" * 90 and b"y" * 20 in values(path)


@pytest.mark.parametrize("name", ["pwritev", "create", "rename", "flock", "fsync", "fstat", "pread", "open", "any"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_failing_call_costs_no_accepted_record_and_doubles_none(
    made: Any, path: Path, name: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Topic.open(path, create=True, partitions=2, **POLICIES).close()
    names = [] if name == "any" else [name]
    for at in [*range(1, 12), 15, 20, 30, 45]:
        files = FaultyFiles(*names, at=at, error=error, inner=UnsyncedFiles())
        one = made(files)
        before = Counter(values(path))
        expected = []
        for portion in range(3):
            for number in range(20):
                expected.append(b"%d %d %d %s %d" % (at, portion, number, name.encode(), error))
                assert one.put(expected[-1], number)
            assert one.flush(30), (name, at)
        assert one.close(30) == 0
        assert Counter(values(path)) - before == Counter(expected), (name, at, files.failed)
        if not files.failed:
            break


def test_disk_that_fails_in_the_middle_of_a_sync_leaves_doubts_that_are_looked_up(made: Any, path: Path) -> None:
    for at in range(1, 8):
        files = FaultyFiles("datasync", at=at, inner=Files())
        one = made(files, durability="disk") if at == 1 else made(files)
        expected = [b"%d %d" % (at, number) for number in range(50)]
        before = Counter(values(path)) if at > 1 else Counter()
        for value in expected:
            one.put(value, 1)
        assert one.flush(30)
        assert one.close(30) == 0
        assert Counter(values(path)) - before == Counter(expected), at


@pytest.mark.parametrize("trouble", [LockedError("file", "another"), OSError(errno.EIO, "odd")])
def test_doubts_wait_for_their_partition(
    made: Any, path: Path, trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the failed sync another process has the partition for a while, or it cannot be opened."""
    files = FaultyFiles("datasync", at=1 << 40)
    one = made(files, partitions=1, durability="disk")
    one.put(b"first", 1)
    assert one.flush(30)
    files.at = files.seen + 1
    roll, rolled = Partition.roll, []

    def later(self: Partition) -> bool:
        rolled.append(1)
        if len(rolled) < 3:
            raise trouble
        return roll(self)

    monkeypatch.setattr(Partition, "roll", later)
    one.put(b"second", 2)
    assert one.flush(30)
    assert values(path) == [b"first", b"second"] and len(rolled) == 3


def test_closing_gives_up_doubts_too(made: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FaultyFiles("datasync", at=1 << 40)
    one = made(files, partitions=1, durability="disk")
    one.put(b"first", 1)
    assert one.flush(30)
    files.at = files.seen + 1
    with monkeypatch.context() as patched:
        patched.setattr(Partition, "roll", mock.Mock(side_effect=LockedError("file", "another")))
        one.put(b"second", 2)
        assert one.close(0.1) == 1


def test_any_error_of_the_library_keeps_the_records(made: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_many, calls = Topic.append_many, []

    def fail(self: Topic, *arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) < 3:
            raise MemoryError("no memory")
        return append_many(self, *arguments, **keywords)

    monkeypatch.setattr(Topic, "append_many", fail)
    one = made()
    one.put(b"kept", 1)
    assert one.flush(30)
    assert values(path) == [b"kept"]


def test_topic_that_is_moved_away_or_deleted_is_made_again(made: Any, path: Path) -> None:
    one = made()
    one.put(b"first", 1)
    assert one.flush(30)
    path.rename(path.with_name("elsewhere"))
    one.put(b"second", 1)
    assert one.flush(30)
    assert values(path) == [b"second"]
    shutil.rmtree(path)
    one.put(b"third", 1)
    assert one.flush(30)
    assert values(path) == [b"third"]


def test_records_wait_while_a_damaged_topic_is_in_the_place_of_one_that_was_moved(made: Any, path: Path) -> None:
    one = made()
    one.put(b"first", 1)
    assert one.flush(30)
    path.rename(path.with_name("elsewhere"))
    Topic.create(path).close()
    (path / "topic.json").write_bytes(b"{")
    one.put(b"second", 1)
    assert not one.flush(0.05)
    shutil.rmtree(path)
    assert one.flush(30)
    assert values(path) == [b"second"]


def test_closing_gives_up_in_time_and_says_what_is_not_written(made: Any, path: Path) -> None:
    Topic.open(path, create=True).close()
    one = made(FaultyFiles("pwritev", every=True, error=errno.ENOSPC, inner=UnsyncedFiles()))
    for number in range(3):
        one.put(b"%d" % number, 1)
    assert not one.flush(0.05)
    assert one.close(0.05) == 3
    assert one.close(0.05) == 3, "it has tried again"
    one._topic._files.every = False  # the disk is mended
    one.put(b"3", 1)
    assert one.close(30) == 0
    assert values(path) == [b"0", b"1", b"2", b"3"]


def test_closing_without_time_does_not_wait_for_a_disk_that_hangs(
    made: Any, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(gate := Gate())
    one.put(b"x", 1)
    assert gate.reached.wait(60)
    assert one.close(0) == 1 and "1 lines were not written" in caplog.text
    gate.shut_until.set()
    assert one.flush(60)
    assert values(path) == [b"x"]


def test_closing_at_the_end_of_the_interpreter_says_nothing_if_nothing_is_left(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = made()
    with mock.patch.object(sys, "is_finalizing", lambda: True):
        assert one.close(60) == 0
    assert not caplog.records


def test_spool_that_was_closed_begins_anew(made: Any, path: Path) -> None:
    one = made(partitions=1)
    assert one.close(1) == 0
    for number in range(3):
        one.put(b"%d" % number, number)
        assert one.close(30) == 0
    assert values(path) == [b"0", b"1", b"2"]


def test_partition_is_given_back_after_some_idle_time(made: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_IDLE_S", 0.02)
    one = made(partitions=1)
    one.put(b"x", 1)
    assert one.flush(30)
    while one._writer is not None:
        time.sleep(0.005)
    Topic.open(path).close()  # also for a program that does not share it
    one.put(b"y", 1)
    assert one.flush(30)
    assert values(path) == [b"x", b"y"]


def test_spools_take_turns_at_a_partition(made: Any, path: Path) -> None:
    spools = [made(partitions=1) for _ in range(3)]
    for number in range(30):
        one = spools[number % 3]
        assert one.put(b"%d" % number, number) and one.flush(30)
    assert sorted(values(path), key=lambda value: int(value or b"")) == [b"%d" % number for number in range(30)]


def test_busy_spools_share_a_partition(made: Any, path: Path) -> None:
    spools = [made(partitions=1) for _ in range(3)]
    done = threading.Event()

    def write(one: Spool, name: int) -> None:
        number = 0
        while not done.is_set():
            one.put(b"%d %d" % (name, number), 1)
            number += 1
            time.sleep(0.0005)
        assert one.flush(30)
        counts[name] = number

    counts: dict[int, int] = {}
    threads = [threading.Thread(target=write, args=(one, name)) for name, one in enumerate(spools)]
    for thread in threads:
        thread.start()
    while not path.exists() or len({(value or b"")[:1] for value in values(path)}) < 3:
        time.sleep(0.01)
    done.set()
    for thread in threads:
        thread.join()
    expected = Counter(b"%d %d" % (name, number) for name, count in counts.items() for number in range(count))
    assert Counter(values(path)) == expected


WORKER = """
    import os, sys, time
    from loglib.logging.spool import Spool
    one = Spool(sys.argv[1], capacity_bytes=1 << 20, patience_s=10.0, report=lambda drops: b"dropped", partitions=2)
    for number in range(int(sys.argv[3])):
        assert one.put(b"%s %d" % (sys.argv[2].encode(), number), number)
        if number % 50 == 0:
            assert one.flush(30)
            print(number, flush=True)
    assert one.flush(30)
    print("done", flush=True)
    if sys.argv[4] == "die":
        time.sleep(60)
    assert one.close(30) == 0
"""


def test_more_processes_than_partitions_write_each_record_once(path: Path) -> None:
    workers = [start_python(WORKER, path, name, 400, "end") for name in "abcde"]
    for worker in workers:
        output, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
        assert output.endswith("done\n")
    assert Counter(values(path)) == Counter(b"%s %d" % (name, number) for name in (b"a", b"b", b"c", b"d", b"e")
                                            for number in range(400))  # fmt: skip


def test_what_was_flushed_survives_kill_9(path: Path) -> None:
    worker = start_python(WORKER, path, "k", 1_000_000, "die")
    assert worker.stdout is not None
    last = 0
    while last < 500:
        last = int(worker.stdout.readline())
    worker.send_signal(signal.SIGKILL)
    output, _ = worker.communicate(timeout=60)
    last = max([last, *map(int, output.split())])
    found = values(path)
    assert found == [b"k %d" % number for number in range(len(found))], "a prefix, each once"
    assert len(found) > last


def test_forked_child_has_its_own_records_and_the_parent_keeps_its_own(path: Path) -> None:
    run_python(
        """
        import os, sys, time
        from loglib.logging.spool import Spool
        one = Spool(sys.argv[1], capacity_bytes=1 << 20, patience_s=0.0, report=lambda drops: b"dropped", partitions=4)
        one.put(b"before", 1)
        children = []
        for name in (b"a", b"b"):
            child = os.fork()
            if not child:
                for number in range(100):
                    one.put(name + b" %d" % number, 1)
                os._exit(0 if one.close(30) == 0 else 1)
            children.append(child)
        for number in range(100):
            one.put(b"parent %d" % number, 1)
        assert one.close(30) == 0
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        path,
    )
    expected = [b"before", *(b"%s %d" % (name, number) for name in (b"a", b"b", b"parent") for number in range(100))]
    assert Counter(values(path)) == Counter(expected)


@pytest.mark.usefixtures("unmeasured")
def test_lines_of_a_child_of_a_child_are_written(path: Path) -> None:
    program = """
        import logging, os, sys
        from loglib.logging import LogHandler

        log = logging.Logger("app")
        log.addHandler(LogHandler(sys.argv[1]))

        def generation(number):
            log.info("%d", number)
            log.handlers[0].flush()
            if number < 4 and os.fork() == 0:
                generation(number + 1)
                sys.exit()  # it ends in order
            if number < 4:
                assert os.wait()[1] == 0

        generation(0)
    """
    run_python(program, path)
    assert sorted(json.loads(value or b"")["message"] for value in values(path)) == list("01234")


def test_child_has_an_empty_spool(made: Any, path: Path) -> None:
    """What a forked child does first, done here, where coverage sees it."""
    one = made()
    one.put(b"the parent's", 1)
    assert one.close(30) == 0
    with mock.patch.object(os, "getpid", lambda: -1):
        one._begin_in_child(os.getpid())
    one.put(b"the child's", 2)
    assert one.flush(30)
    assert sorted(values(path), key=str) == [b"the child's", b"the parent's"]


def test_threads_and_a_fork_in_the_middle_of_it(path: Path) -> None:
    run_python(
        """
        import os, sys, threading
        from loglib.logging.spool import Spool
        one = Spool(sys.argv[1], capacity_bytes=1 << 20, patience_s=10.0, report=lambda drops: b"dropped", partitions=2)
        def write(name):
            for number in range(500):
                assert one.put(b"%s %d" % (name, number), 1)
        threads = [threading.Thread(target=write, args=(b"t%d" % number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        children = []
        for number in range(5):
            child = os.fork()
            if not child:
                one.put(b"child %d" % number, 1)
                os._exit(0 if one.flush(30) else 1)
            children.append(child)
        for thread in threads:
            thread.join()
        assert one.close(30) == 0
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        path,
    )
    expected = [b"t%d %d" % (name, number) for name in range(4) for number in range(500)]
    assert Counter(values(path)) == Counter([*expected, *(b"child %d" % number for number in range(5))])


def test_partition_that_another_writer_holds_is_waited_for(made: Any, path: Path) -> None:
    """Another writer, that knows nothing of spools, holds all partitions for a while."""
    with Topic.open(path, create=True, partitions=2):
        one = made()
        one.put(b"x", 1)
        assert not one.flush(1), "it waits, and tries again"
    assert one.flush(30)
    assert values(path) == [b"x"]
