"""A call in the middle of another call of its thread is refused or done at once: it never waits for itself.

A file system that calls back stands for a signal handler, or for a finalizer that the collector runs: these may come
at any step of a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import loglib
from conftest import QUIET, records_of, run_python
from loglib import LogError, Retention, Topic, testing
from loglib.copies import Mirror
from loglib.system.directory import Directory
from loglib.system.files import REAL
from loglib.system.reentry import enter, is_mine
from loglib.testing import Call, WatchedFiles


class CallingFiles(WatchedFiles):
    """Calls back once, before the next call of this name to a file whose path ends so."""

    def __init__(self) -> None:
        super().__init__(REAL)
        self.at: tuple[str, str] = "", ""
        self.calls: Callable[[], object] = lambda: None
        self.came: list[object] = []

    def before(self, call: Call) -> None:
        if call.name == self.at[0] and str(call.path).endswith(self.at[1]):
            self.at = "", ""
            try:
                self.came.append(self.calls())
            except LogError as error:
                self.came.append(error)


def in_time(action: Callable[[], object]) -> None:
    """Run the action in a thread, and fail if it does not end."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for itself"
    if failed:
        raise failed[0]


@pytest.fixture
def files() -> CallingFiles:
    return CallingFiles()


@pytest.fixture
def topic(path: Path, files: CallingFiles) -> Iterator[Topic]:
    with testing.open_topic(path, partitions=2, files=files, **QUIET) as topic:
        topic.append(b"first", partition=0, sync=True)
        yield topic


POINTS = {
    "while it is written": ("pwritev", ".log"),
    "while it is synced": ("datasync", ".log"),
    "while it is published": ("pwritev", "watermark"),
}
CALLS: dict[str, Callable[[Topic], object]] = {
    "append": lambda topic: topic.append(b"inner"),
    "append to a partition": lambda topic: topic.append(b"inner", partition=0),
    "append, synced": lambda topic: topic.append(b"inner", partition=0, sync=True),
    "append_many": lambda topic: topic.append_many([b"inner"], partition=0),
    "append_many, many": lambda topic: topic.append_many([b"inner"] * 2000, partition=0),
    "append of a producer": lambda topic: topic.append(b"inner", partition=0, producer=("p", 1)),
    "flush": lambda topic: topic.flush(),
    "roll": lambda topic: topic.partition(0).roll(),
    "retain": lambda topic: topic.retain(),
    "alter": lambda topic: topic.alter(retention=Retention(age=timedelta(days=3))),
    "last_sequence": lambda topic: topic.partition(0).last_sequence("p"),
    "follow": lambda topic: topic.follow("begin", timeout=0.0).poll(),
    "stats": lambda topic: topic.stats(),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_the_middle_of_an_append_ends(call: str, point: str, topic: Topic, files: CallingFiles) -> None:
    files.calls = lambda: CALLS[call](topic)

    def outer() -> None:
        files.at = POINTS[point]
        topic.append(b"outer", partition=0, sync=True)
        topic.flush()

    in_time(outer)
    (came,) = files.came
    topic.append(b"last", partition=0, sync=True)
    values = [each.value for each in topic.read()]
    assert [each for each in values if each != b"inner"] == [b"first", b"outer", b"last"]
    if isinstance(came, LogError) and call.startswith("append"):
        assert "another call of this thread" in str(came)
        assert values.count(b"inner") == sum(len(each.offsets) for each in came.appended)
    elif call.startswith("append"):
        assert values.count(b"inner") == (2000 if call.endswith("many, many") else 1)
    assert not topic.verify().damage


@pytest.mark.parametrize("call", [each for each in CALLS if each not in ("follow", "stats")])
def test_what_must_wait_for_the_write_is_refused(call: str, topic: Topic, files: CallingFiles) -> None:
    files.calls = lambda: CALLS[call](topic)

    def outer() -> None:
        topic.append(b"outer", partition=0)
        files.at = POINTS["while it is written"]
        topic.flush()

    in_time(outer)
    if call == "append":  # it chooses the partition that is not in use, or is refused
        assert len(files.came) == 1
    else:
        assert isinstance(files.came[0], LogError) and "must return first" in str(files.came[0])


def test_the_fast_append_in_the_middle_of_itself_is_refused(path: Path) -> None:
    """The collector runs in it, and a finalizer logs."""
    with Topic.open(path, create=True, partitions=1, **QUIET) as topic:
        topic.append(b"first")
        writer = topic._placement.sticky
        assert writer is not None

        def inner() -> None:
            with writer.lock, pytest.raises(LogError, match="must return first"):
                topic.append(b"inner")

        in_time(inner)
        topic.append(b"second")
    assert [each.value for each in records_of(path)] == [b"first", b"second"]


def test_a_writer_that_is_being_made_is_not_waited_for(path: Path, files: CallingFiles) -> None:
    Topic.open(path, create=True, partitions=2).close()
    with testing.open_topic(path, shared=True, files=files, **QUIET) as topic:
        files.calls = lambda: topic.append(b"inner", partition=0)

        def outer() -> None:
            files.at = "open_write", ".log"
            topic.append(b"outer", partition=0)

        in_time(outer)
    assert [str(each) for each in files.came if "the topic is in the middle" in str(each)] == [str(files.came[0])]
    assert [each.value for each in records_of(path)] == [b"outer"]


def test_another_pass_of_a_mirror_is_refused_in_the_middle_of_one(path: Path, tmp_path: Path) -> None:
    with Topic.open(path, create=True, partitions=1) as topic, Mirror(path, tmp_path / "copy") as mirror:
        topic.append(b"one", sync=True)

        def inner() -> None:
            with mirror._in_pass, pytest.raises(LogError, match="copy is in the middle of another call"):
                mirror.copy()

        in_time(inner)
        assert mirror.copy() > 0


def test_a_reader_that_is_reading_is_not_asked_for_more(path: Path) -> None:
    with Topic.open(path, create=True, partitions=1) as topic:
        topic.append(b"one", sync=True)
        reader = topic.read()

        def inner() -> None:
            with reader._reading:
                with pytest.raises(LogError, match="the reader is in the middle"):
                    reader.poll()
                reader.close()  # the call that reads cleans up

        in_time(inner)
        assert reader.closed


def test_a_directory_that_this_thread_holds_for_a_moment_is_not_waited_for(tmp_path: Path) -> None:
    with Directory.open(REAL, str(tmp_path)) as held, Directory.open(REAL, str(tmp_path)) as other:
        held.lock_for_a_moment("the test", advice="")
        with pytest.raises(LogError, match="must return first"):
            other.lock_for_a_moment("the test", advice="")
    with Directory.open(REAL, str(tmp_path)) as after:
        after.lock_for_a_moment("the test", advice="")


def test_a_lock_is_entered_by_one_thread_once() -> None:
    lock = threading.RLock()
    with enter(lock, "it"):
        assert is_mine(lock)
        with pytest.raises(LogError, match="it is in the middle of another call of this thread"):
            enter(lock, "it")
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(is_mine(lock)))
        thread.start()
        thread.join()
        assert found == [False]
    assert not is_mine(lock)


def test_a_transaction_in_the_middle_of_a_transaction_ends(topic: Topic, files: CallingFiles) -> None:
    def transact(value: bytes) -> None:
        with loglib.transaction(f"app-{value.decode()}") as transaction:
            transaction.append(topic, value, partition=0)

    files.calls = lambda: transact(b"inner")

    def outer() -> None:
        files.at = "datasync", ".log"
        transact(b"outer")

    in_time(outer)
    assert len(files.came) == 1
    topic.flush()
    values = [each.value for each in topic.read()]
    assert values[:2] == [b"first", b"outer"] and not topic.verify().damage


@pytest.mark.usefixtures("unmeasured")  # measured, a handler takes longer than the time to the next signal
def test_finalizers_and_signals_that_append_end(path: Path) -> None:
    program = """
        import gc, signal, sys
        from loglib import LogError, Topic

        topic = Topic.open(sys.argv[1], create=True, partitions=1)
        sure = set()

        def other(*_):
            value = b"inner %d" % len(sure)
            try:
                topic.append(value)
            except LogError:
                return
            sure.add(value)

        class Cycle:
            def __init__(self):
                self.me = self

            def __del__(self):
                other()

        signal.signal(signal.SIGALRM, other)
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        gc.set_threshold(5)
        for number in range(20_000):
            Cycle()
            value = b"outer %d" % number
            topic.append(value, sync=number % 500 == 3)
            sure.add(value)
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.disable()
        topic.flush()
        assert not sure - {each.value for each in topic.read()} and not topic.verify().damage
        print(len(sure) > 20_000)
    """
    assert run_python(program, path) == "True\n"
