"""Inbox: a transaction reaches the writers in other processes, and both go on writing."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from forked import in_child

import loglib
from conftest import open_files, opened_since, start_python, values_of
from loglib import LockedError, Topic, transaction
from loglib.system.files import REAL
from loglib.system.notify import Observer
from loglib.system.process import PerProcess
from loglib.transactions import notifications

pytestmark = pytest.mark.usefixtures("unmeasured")

OWNER = """
    import sys, time
    import loglib
    topic = loglib.Topic.open(sys.argv[1], create=True, partitions=2)
    print("open", flush=True)
    number = 0
    while True:
        topic.append(b"native %d" % number, partition=number % 2, sync=True)
        number += 1
        time.sleep(0.005)
"""


@contextmanager
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has the topic and appends to it all the time."""
    process = start_python(OWNER, path, stdin=None, stderr=None)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def stop(process: subprocess.Popen[str]) -> None:
    """Stop all threads of a process, and wait until they stand still."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_owner_in_another_process_applies_and_goes_on(path: Path) -> None:
    with owner(path), Topic.open(path, mode="r") as topic:
        for number in range(5):
            with transaction("etl", timeout=30.0) as tx:
                tx.append(topic, b"%d" % number, partition=0)
                tx.append(topic, b"%d" % number, partition=1)
            for partition in topic.partitions:
                assert [each.value for each in partition.read() if len(each.value or b"") == 1][-1] == b"%d" % number
        before = len(values_of(topic))
        deadline = time.monotonic() + 30
        while len(values_of(topic)) <= before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for number in (0, 1):
        with Topic.open(path, mode="r") as topic:
            values = [each.value or b"" for each in topic.partition(number).read()]
            natives = [int(value.split()[1]) for value in values if value.startswith(b"native")]
            assert natives == list(range(number, 2 * len(natives), 2))
            assert [value for value in values if len(value) == 1] == [b"0", b"1", b"2", b"3", b"4"]
            assert topic.verify().damage == ()
    assert os.listdir(path / "inbox") == []


def test_stopped_owner_is_found_before_anything_is_committed(path: Path) -> None:
    with owner(path) as process, Topic.open(path, mode="r") as topic:
        with transaction("etl", timeout=30.0) as tx:
            tx.append(topic, b"1", partition=0)
        stop(process)
        with (
            pytest.raises(LockedError, match="a writer that does not answer transactions"),
            transaction("etl", timeout=0.5) as tx,
        ):
            tx.append(topic, b"never", partition=0)
        process.send_signal(signal.SIGCONT)
        with transaction("etl", timeout=30.0) as tx:
            tx.append(topic, b"2", partition=0)
        assert (tx.version, tx.repeated) == (1, False)
        assert [value for value in values_of(topic) if not value.startswith(b"native")] == [b"1", b"2"]


def test_partition_of_an_owner_that_died_after_the_commit_is_applied(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner(path) as process, Topic.open(path, mode="r") as topic:
        from loglib.transactions.apply import Applier

        run = Applier.run

        def kill_the_owner_first(self: Applier, timeout_s: float, *, wanted: int = 0) -> None:
            process.kill()
            process.wait()
            run(self, timeout_s, wanted=wanted)

        monkeypatch.setattr(Applier, "run", kill_the_owner_first)
        with transaction("etl", timeout=30.0) as tx:
            tx.append(topic, b"x", partition=0)
            tx.append(topic, b"x", partition=1)
        assert values_of(topic).count(b"x") == 2


def test_owner_that_stopped_after_the_commit_leaves_it_pending(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loglib.transactions.apply import Applier

    run = Applier.run
    with owner(path) as process, Topic.open(path, mode="r") as topic:

        def stop_the_owner_first(self: Applier, timeout_s: float, *, wanted: int = 0) -> None:
            stop(process)
            run(self, timeout_s, wanted=wanted)

        with monkeypatch.context() as patched:
            patched.setattr(Applier, "run", stop_the_owner_first)
            with pytest.raises(loglib.CommitPendingError, match="waits for the writer of"), transaction(
                "etl", timeout=4.0
            ) as tx:
                tx.append(topic, b"x", partition=0)
        assert tx.number is not None
        assert b"x" not in values_of(topic)
        process.send_signal(signal.SIGCONT)
        loglib.transactions.recover_transactions(path.parent, timeout=30.0)
        assert values_of(topic).count(b"x") == 1


def test_topic_of_this_process_that_the_transaction_does_not_name_serves_itself(path: Path) -> None:
    with Topic.open(path, create=True) as writer, Topic.open(path, mode="r") as reader:
        writer.append(b"native", sync=True)
        with transaction("etl", timeout=30.0) as tx:
            tx.append(reader, b"x")
        assert values_of(reader) == [b"native", b"x"]
        writer.append(b"after", sync=True)
        assert values_of(writer) == [b"native", b"x", b"after"]


def test_topic_without_a_thread_refuses_transactions_of_others(open_topic: Callable[..., Topic], path: Path) -> None:
    open_topic()
    with (
        Topic.open(path, mode="r") as reader,
        pytest.raises(LockedError, match="does not answer"),
        transaction("etl", timeout=0.2) as tx,
    ):
        tx.append(reader, b"x")


def test_hold_of_a_dead_coordinator_ends_by_itself(path: Path) -> None:
    program = """
        import os, sys
        import loglib
        from loglib.transactions.store import Store
        Store.finish = lambda *arguments, **keywords: os._exit(0)
        topic = loglib.Topic.open(sys.argv[1], mode="r")
        with loglib.transaction("etl", timeout=30.0) as tx:
            tx.append(topic, b"x", partition=0)
    """
    with owner(path), Topic.open(path, mode="r") as topic:
        dead = start_python(program, path, stdin=None, stdout=None, stderr=None)
        assert dead.wait() == 0
        deadline = time.monotonic() + 30
        while b"x" not in values_of(topic):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_knock_that_nobody_answers_is_taken_back(path: Path) -> None:
    with Topic.open(path, create=True):
        pass
    assert notifications.request_ack(REAL, str(path), [3, 4], patience_s=0.1) == [3, 4]
    assert os.listdir(path / "inbox") == []
    notifications.notify(REAL, str(path.parent / "no topic"))  # of a deleted topic: nothing


def test_only_the_owner_of_the_partition_answers(path: Path) -> None:
    with Topic.open(path, create=True):
        pass
    answers: list[list[int]] = []

    def ask() -> None:
        answers.append(notifications.request_ack(REAL, str(path), [3], patience_s=30.0))

    asking = threading.Thread(target=ask)
    asking.start()
    while not (path / "inbox").exists() or not os.listdir(path / "inbox"):
        time.sleep(0.001)
    notifications.answer(REAL, str(path), [0, 1])
    assert len(os.listdir(path / "inbox")) == 1
    notifications.answer(REAL, str(path), [3])
    asking.join()
    assert answers == [[]]


def test_forked_child_has_an_inbox_of_its_own(path: Path) -> None:
    program = """
        import os, sys, time
        import loglib
        first = loglib.Topic.open(sys.argv[1] + "/first", create=True)
        time.sleep(0.4)  # its thread is running
        if os.fork() == 0:
            with loglib.Topic.open(sys.argv[1] + "/second", create=True) as second:
                time.sleep(0.4)
                with loglib.Topic.open(sys.argv[1] + "/second", mode="r") as reader:
                    with loglib.transaction("child", timeout=30.0) as tx:
                        tx.append(reader, b"x")
                    print([each.value for each in reader.read()], flush=True)
            os._exit(0)
        os.wait()
        first.close()
    """
    process = start_python(program, path, stdin=None, stderr=None)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "[b'x']\n"), sys.version


def test_inbox_thread_that_could_not_be_started_is_started_by_the_next_topic(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic that could not start it is closed, and its partitions are free."""
    monkeypatch.setattr(notifications.notification_thread, "_made", {"value": notifications.NotificationThread()})
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "loglib-inbox":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start"):
            Topic.open(path, create=True)
    with Topic.open(path):
        assert notifications.notification_thread()._thread is not None


def test_inboxes_are_watched_again_after_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [MemoryError("no memory for a watch")]

    def failing() -> Observer:
        if failures:
            raise failures.pop()
        return Observer()

    monkeypatch.setattr(notifications, "Observer", failing)
    monkeypatch.setattr(notifications, "_LOOK_AGAIN_S", 0.01)
    served = threading.Event()
    (path / "inbox").mkdir(parents=True)
    postman = notifications.NotificationThread()

    def serve(event: threading.Event) -> bool:
        event.set()
        return False

    postman.listen(str(path), served, serve)
    assert served.wait(30)
    assert failures == []
    postman.leave(served)


def test_inboxes_are_looked_at_where_the_system_reports_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "Observer", lambda: Observer(use_inotify=False))
    monkeypatch.setattr(notifications, "_LOOK_S", 0.01)
    (path / "inbox").mkdir(parents=True)
    served, gone = threading.Semaphore(0), threading.Semaphore(0)

    def serve(looks: threading.Semaphore) -> bool:
        looks.release()
        return False

    postman = notifications.NotificationThread()
    postman.listen(str(path), served, serve)
    postman.listen(str(path / "gone"), gone, serve)
    for _ in range(3):
        assert served.acquire(timeout=30)
    postman.leave(served)
    postman.leave(gone)


@contextmanager
def attended(path: Path) -> Iterator[tuple[notifications.NotificationThread, threading.Event]]:
    """A directory that a postman attends, without an inbox; and what tells that it was served."""
    path.mkdir()
    served = threading.Event()

    def serve(event: threading.Event) -> bool:
        event.set()
        return False

    postman = notifications.NotificationThread()
    postman.listen(str(path), served, serve)
    yield postman, served
    postman.leave(served)


def test_inbox_that_is_made_while_its_watch_begins_is_not_missed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Observer):
        def observe_directory(self, key: Hashable, path: str) -> None:
            if not path.endswith("inbox"):
                (Path(path) / "inbox").mkdir()
            super().observe_directory(key, path)

    monkeypatch.setattr(notifications, "Observer", Slow)
    with attended(path) as (_, served):
        assert served.wait(30)


def test_inbox_that_is_made_while_changes_are_read_is_not_missed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Late(Observer):
        def changed(self) -> dict[Hashable, set[str]]:
            calls.append(self)
            if len(calls) == 2:
                (path / "inbox").mkdir()
            return super().changed()

    monkeypatch.setattr(notifications, "Observer", Late)
    with attended(path) as (postman, served):
        while not calls:
            time.sleep(0.01)
        time.sleep(0.1)  # it watches the directory, and waits
        postman._wake()
        assert served.wait(30)


def test_trouble_of_one_topic_is_not_the_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "_LOOK_AGAIN_S", 0.01)
    (path / "inbox").mkdir(parents=True)
    troubles = []
    served = threading.Event()

    def fail(event: threading.Event) -> bool:
        troubles.append(event)
        if len(troubles) < 3:
            raise MemoryError("no memory for one topic")
        return False

    def serve(event: threading.Event) -> bool:
        if len(troubles) == 3:
            event.set()
        return False

    postman = notifications.NotificationThread()
    troubled = threading.Event()
    postman.listen(str(path), troubled, fail)
    postman.listen(str(path), served, serve)
    assert served.wait(30)
    postman.leave(troubled)
    postman.leave(served)


def test_writer_stays_reachable_when_a_reader_of_the_same_topic_is_closed(path: Path) -> None:
    other_name = path.parent / "other"
    other_name.symlink_to(path)
    with Topic.open(path, create=True) as writer, Topic.open(path, mode="r") as reader:
        with Topic.open(path, mode="r") as closed:
            assert values_of(closed) == []
        with Topic.open(other_name, mode="r") as closed:
            assert values_of(closed) == []
        with transaction("etl", timeout=30.0) as tx:
            tx.append(reader, b"x")
        assert values_of(writer) == [b"x"]


@pytest.fixture
def postman(monkeypatch: pytest.MonkeyPatch) -> notifications.NotificationThread:
    """A thread for the topics of one test."""
    made = PerProcess(notifications.NotificationThread, notifications.NotificationThread.abandon)
    monkeypatch.setattr(notifications, "notification_thread", made)
    return made()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("watching", [True, False], ids=["it watches", "it has not begun to watch"])
def test_thread_of_the_inboxes_ends_with_the_last_topic_and_begins_anew(
    path: Path, watching: bool, postman: notifications.NotificationThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "_QUIET_S", 0.0 if watching else 60.0)
    for number in range(3):
        before = open_files()
        with Topic.open(path, create=True) as topic, Topic.open(path.parent / "other", create=True):
            thread = postman._thread
            assert thread is not None
            wait_until(lambda: not watching or postman._observer is not None)
            topic.append(b"%d" % number)
        thread.join(30)
        assert not thread.is_alive()
        assert (postman._thread, postman._observer) == (None, None)
        assert not opened_since(before)


def test_topic_that_is_opened_while_the_thread_ends_is_attended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "_QUIET_S", 0.0)
    first, second, served = threading.Event(), threading.Event(), threading.Event()
    (path / "inbox").mkdir(parents=True)

    def serve(event: threading.Event) -> bool:
        served.set()
        return False

    postman = notifications.NotificationThread()
    is_over = notifications.NotificationThread._is_over
    opened: list[threading.Event] = []

    def open_another(self: notifications.NotificationThread) -> bool:
        if not self._served and not opened:
            opened.append(second)
            postman.listen(str(path), second, serve)
        return is_over(self)

    monkeypatch.setattr(notifications.NotificationThread, "_is_over", open_another)
    postman.listen(str(path), first, lambda _: False)
    wait_until(lambda: postman._observer is not None)
    postman.leave(first)
    assert served.wait(30)
    postman.leave(second)


def test_forked_child_has_neither_thread_nor_files_of_its_parents_inboxes(
    path: Path, postman: notifications.NotificationThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "_QUIET_S", 0.0)
    with Topic.open(path, create=True):
        wait_until(lambda: postman._observer is not None)
        observer = postman._observer
        assert observer is not None
        descriptors = [(fd, os.fstat(fd)) for fd in observer.descriptors()]
        del observer

        def look() -> None:
            assert notifications.notification_thread() is not postman
            for fd, facts in descriptors:
                with suppress(OSError):
                    assert not os.path.samestat(os.fstat(fd), facts)
            with Topic.open(path.parent / "of-the-child", create=True):
                assert notifications.notification_thread()._thread is not None

        assert in_child(look) == 0
    notifications.NotificationThread().abandon()  # one that has never watched
    watching, before = notifications.NotificationThread(), open_files()
    watching._observer = Observer()
    watching.abandon()
    assert opened_since(before) == []


FORKS = """
    import os, signal, sys, threading, time
    from loglib import Topic
    begun = threading.Event()
    class Slow:
        def find_spec(self, name, path=None, target=None):
            if name == "loglib.transactions.apply" and threading.current_thread() is not threading.main_thread():
                begun.set()
                time.sleep(0.5)
    sys.meta_path.insert(0, Slow())
    topic = Topic.open(sys.argv[1], create=True)
    topic.append(b"mine", sync=True)
    print("open", flush=True)
    assert begun.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)
        import loglib.transactions.apply
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
    sys.stdin.readline()
"""


def test_child_can_begin_a_transaction_that_is_forked_while_a_thread_first_applies_one(path: Path) -> None:
    """The thread is importing the module. Without its parent's threads the child would wait for it for ever."""
    process = start_python(FORKS, path, stderr=None)
    assert process.stdout is not None and process.stdin is not None
    with process.stdout, process.stdin:
        assert process.stdout.readline() == "open\n"
        with Topic.open(path, shared=True) as topic, transaction("app", timeout=30.0) as tx:
            tx.append(topic, b"theirs")
        assert process.stdout.readline() == "0\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait() == 0
    with Topic.open(path, mode="r") as topic:
        assert values_of(topic) == [b"mine", b"theirs"]
