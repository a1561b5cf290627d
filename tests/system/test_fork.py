"""Forks: what was opened for writing belongs to the parent, whatever the child does."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import in_child

from conftest import records_of, run_python, values_of
from loglib import LockedError, Topic
from loglib.errors import ForkedHandleError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def test_every_call_on_the_parents_topic_is_refused_in_the_child(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append(b"buffered by the parent")

        def child() -> None:
            calls: list[Callable[[], object]] = [
                lambda: topic.append(b"x"),
                lambda: topic.append(b"x", key=b"k", sync=True),
                lambda: topic.append_many([b"x"] * 10),
                lambda: topic.append_many([b"x"] * 10, keys=[b"k"] * 10),
                topic.flush,
                topic.read,
                topic.follow,
                topic.retain,
                lambda: topic.partition(0).append(b"x"),
                topic.partition(0).flush,
                lambda: topic.partition(0).log_start_offset,
            ]
            for call in calls:
                with pytest.raises(ForkedHandleError, match="open it again"):
                    call()
            topic.close()  # closing is allowed, and does nothing

        assert in_child(child) == 0
        topic.append(b"and more")
        topic.flush()
        assert values_of(topic) == [b"buffered by the parent", b"and more"]
    assert len(records_of(path)) == 2  # the child has written nothing


def test_child_that_exits_normally_neither_writes_nor_unlocks(path: Path) -> None:
    program = """
        import os, sys
        from loglib import LockedError, Topic
        topic = Topic.open(sys.argv[1], create=True)
        topic.append(b"once")
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # with exit handlers, finalizers and all
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        try:
            Topic.open(sys.argv[1])
        except LockedError:
            print("still locked")
        topic.close()
        print(len(list(Topic.open(sys.argv[1], mode="r").read())))
    """
    assert run_python(program, path).split("\n")[:2] == ["still locked", "1"]


def test_child_opens_a_topic_of_its_own(path: Path, tmp_path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append(b"parent's")

        def child() -> None:
            with Topic.open(tmp_path / "other", create=True) as other:
                other.append(b"child's", sync=True)
            with pytest.raises(LockedError):
                Topic.open(path, create=True)

        assert in_child(child) == 0
    assert [record.value for record in records_of(tmp_path / "other")] == [b"child's"]


def test_child_reads_along_with_a_reader_opened_before_the_fork(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append_many([b"%d" % number for number in range(1000)])
        topic.flush()
        with Topic.open(path, mode="r") as reading, reading.read() as reader:
            iterator = iter(reader)
            assert next(iterator).value == b"0"

            def child() -> None:
                assert [record.value for record in iterator] == [b"%d" % number for number in range(1, 1000)]

            assert in_child(child) == 0
            assert next(iterator).value == b"1"  # the child's reading has not moved the parent's


def test_follower_of_the_parent_misses_nothing_when_its_child_follows_too(path: Path) -> None:
    with Topic.open(path, create=True) as topic, Topic.open(path, mode="r") as reading:
        follower = reading.follow(start="begin", timeout=30)
        assert follower.poll(timeout=0.01) == []  # its watch on the file is set up now
        ready, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.read(ready, 1)
            found = follower.poll(timeout=30)
            os._exit(0 if [record.value for record in found] == [b"news"] else 1)
        os.write(go, b"x")
        topic.append(b"news", sync=True)
        assert [record.value for record in follower.poll(timeout=30)] == [b"news"]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_lock_of_a_killed_writer_is_free_although_its_child_lives(path: Path) -> None:
    ready, done = os.pipe()
    writer = os.fork()
    if writer == 0:
        topic = Topic.open(path, create=True)
        if os.fork() == 0:
            os.write(done, os.getpid().to_bytes(4, "little"))
            signal.pause()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        topic.close()
    child = int.from_bytes(os.read(ready, 4), "little")
    os.waitpid(writer, 0)
    try:
        Topic.open(path).close()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("forks", [pytest.param(30, id="30"), pytest.param(300, id="300", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("unmeasured")
def test_forking_while_threads_append_harms_neither(path: Path, forks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        import os, sys, threading
        from loglib import FlushPolicy, Topic
        from loglib.errors import ForkedHandleError

        stop = threading.Event()
        appended = [0] * 3
        topic = Topic.open(sys.argv[1], create=True, partitions=2, flush=FlushPolicy(records=100, interval=0.002))

        def work(number):
            while not stop.is_set():
                topic.append(b"%d:%d" % (number, appended[number]), key=b"%d" % number)
                appended[number] += 1

        def child():
            for call in (lambda: topic.append(b"from a child"), topic.flush):
                try:
                    call()
                except ForkedHandleError:
                    continue
                os._exit(1)
            os._exit(0)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(int(sys.argv[2])):
            pid = os.fork()
            if pid == 0:
                child()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        stop.set()
        for thread in threads:
            thread.join()
        topic.close()
        print(*appended)
    """
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::DeprecationWarning")
    appended = [int(count) for count in run_python(program, path, forks).split()]
    expected = {b"%d" % n: [b"%d:%d" % (n, each) for each in range(appended[n])] for n in range(3)}
    found: dict[bytes | None, list[bytes | None]] = {key: [] for key in expected}
    for record in records_of(path):
        found[record.key].append(record.value)
    assert found == expected
