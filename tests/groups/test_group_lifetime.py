"""The end of a group: closed, collected, forked, or in the middle of a call."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from consumers import committed_number, fill, next_offset, numbers, rest
from forked import in_child

import loglib
from conftest import needs_proc, opened_since, run_python, settled_files
from loglib import Group, LogClosedError, LogError, Topic, testing
from loglib.errors import ForkedHandleError
from loglib.testing import Call, WatchedFiles

pytestmark = pytest.mark.usefixtures("attentive")


# --- closing -------------------------------------------------------------------------------------


def test_closed_group_says_so(topic: Topic) -> None:
    group = topic.group("etl")
    group.close()
    group.close()
    assert group.closed and group.assignment == [] and rest(group) == []
    for call in (group.poll, group.commit, lambda: group.seek("begin"), lambda: group.pause(0)):
        with pytest.raises(LogClosedError, match="join it again"):
            call()


def test_group_closed_in_the_body_of_its_loop_ends_it(topic: Topic) -> None:
    group = topic.group("etl")
    seen = []
    for record in group.follow():
        seen.append(int(record.value or b""))
        if len(seen) == 4:
            group.close()
    assert seen == [0, 1, 2, 3]
    with topic.group("etl") as group:
        assert rest(group) == [3, 4, 5, 6, 7, 8, 9]


def test_loop_that_is_closed_after_its_group_is_no_error(topic: Topic) -> None:
    with topic.group("etl") as group:
        loop = group.follow()
        next(loop)
    loop.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["group", "topic"])
def test_close_from_another_thread_ends_the_wait(topic: Topic, what: str) -> None:
    group = topic.group("etl")
    waiting = threading.Event()
    seen: list[int] = []

    def follow() -> None:
        for record in group.follow():
            seen.append(int(record.value or b""))
            if len(seen) == 10:
                waiting.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert waiting.wait(30)
    (group if what == "group" else topic).close()
    thread.join(30)
    assert not thread.is_alive() and seen == list(range(10)) and group.closed


def test_topic_closes_its_groups(topic: Topic, path: Path) -> None:
    group = topic.group("etl")
    assert len(rest(group)) == 10
    topic.close()
    assert group.closed
    with Topic.open(path, mode="r") as reading, reading.group("etl") as group:
        assert rest(group) == []
    with pytest.raises(LogClosedError):
        topic.group("etl")


def test_topic_whose_group_fails_when_it_is_closed_closes_all_else(topic: Topic, path: Path) -> None:
    """The topic's locks stayed taken, and its other groups and readers open, until it was closed again."""

    def refuse(partitions: list[int]) -> None:
        raise ValueError("a listener of the caller's")

    failing, other, reader = topic.group("etl", on_revoke=refuse), topic.group("other"), topic.follow()
    assert failing.poll() and other.poll()
    with pytest.raises(ValueError, match="listener"):
        topic.close()
    assert failing.closed and other.closed and reader.closed
    Topic.open(path, create=True).close()
    topic.close()


def test_topic_that_is_only_read_can_be_joined(topic: Topic, path: Path) -> None:
    with Topic.open(path, mode="r") as reading:
        with reading.group("etl") as group:
            assert rest(group) == list(range(10))
            fill(topic, 1, first=10)
            assert numbers(group.poll(timeout=30)) == [10]
        with reading.group("etl") as group:
            assert numbers(group.poll()) == [10]


def test_group_that_nobody_closed_is_warned_of_and_lets_go(topic: Topic) -> None:
    group = topic.group("etl", member="lost")
    assert group.poll() != []
    with pytest.warns(ResourceWarning, match="member lost, was not closed"):
        del group
    with topic.group("etl", member="lost") as group:
        assert group.poll() != [] and group.assignment == [0]


@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")
@pytest.mark.parametrize("mode", ["a", "r"])
def test_group_keeps_its_topics_open(mode: Any, topic: Topic, path: Path) -> None:
    """A topic that nobody else referred to was collected, and so closed: its group looked like one without records."""
    topic.close()
    assert numbers(Topic.open(path, create=True, mode=mode).group("first").follow(timeout=0.01)) == list(range(10))
    assert sum(map(len, Topic.open(path, mode=mode).group("second").batches(timeout=0.01))) == 10
    shown = list(loglib.group([Topic.open(path, mode=mode)], "third").follow(timeout=0.01))
    assert numbers(record for _, record in shown) == list(range(10))
    Topic.open(path).close()  # nobody refers to it any more: its locks are free


@pytest.mark.parametrize("follow", [lambda group: group.follow(timeout=60), lambda group: group.batches(timeout=60)])
def test_group_loop_raises_when_its_topic_is_closed(
    follow: Callable[[Group], Iterator[Any]], topic: Topic
) -> None:
    group = topic.group("etl")
    with pytest.raises(LogClosedError, match="open the topic again"):
        for _ in follow(group):
            topic.close()
    for call in (group.poll, lambda: next(follow(group))):
        with pytest.raises(LogClosedError):
            call()


def test_loop_without_a_timeout_just_ends_when_the_topic_is_closed(topic: Topic) -> None:
    """It has no other end, and so its end says it."""
    group = topic.group("etl")
    for _ in group.follow():
        topic.close()
    assert group.closed and list(group.follow()) == []


@needs_proc
def test_closed_groups_leave_no_file_open(topic: Topic) -> None:
    with suppress(ImportError):
        import ctypes  # noqa: F401  # whose libraries stay open
    with topic.group("etl") as group:
        rest(group)
    before = settled_files()
    for number in range(3):
        with topic.group(f"g{number}") as group:
            rest(group)
            group.lag(count_records=True)
        with pytest.raises(ValueError, match="is not a name"):
            topic.group("etl", member="a/b")
    assert not opened_since(before)


def test_reader_of_a_topic_that_another_closes_ends_quietly(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    group = topic.group("etl")

    def closed_meanwhile(*_: Any) -> Any:
        group.close()
        raise LogClosedError("the topic was closed")

    monkeypatch.setattr(group._delivery, "take", closed_meanwhile)
    assert rest(group) == []
    group = topic.group("etl")

    def closed_alone(*_: Any) -> Any:
        raise LogClosedError("something else was closed")

    monkeypatch.setattr(group._delivery, "take", closed_alone)
    with group, pytest.raises(LogClosedError, match="something else"):
        rest(group)


# --- children ------------------------------------------------------------------------------------


def test_forked_child_has_nothing_of_the_group(topic: Topic, path: Path) -> None:
    group = topic.group("etl", member="parent")
    loop = iter(group.follow(timeout=0.0))
    assert numbers([next(loop) for _ in range(3)]) == [0, 1, 2]

    def child() -> None:
        with pytest.raises(ForkedHandleError):
            next(loop)
        for call in (group.poll, group.commit, lambda: group.seek("begin")):
            with pytest.raises(ForkedHandleError):
                call()
        group.close()  # which is allowed, and does nothing
        with Topic.open(path, mode="r") as reading, reading.group("etl", member="child") as own:
            assert own.members == ["child", "parent"]

    assert in_child(child) == 0
    assert group.members == ["parent"]
    assert numbers(loop) == [3, 4, 5, 6, 7, 8, 9]
    group.close()
    with topic.group("etl", member="parent") as group:
        assert rest(group) == []


def test_locks_of_a_closed_member_do_not_live_on_in_its_child(topic: Topic) -> None:
    group = topic.group("etl", member="parent")
    assert group.poll() != []
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    try:
        group.close()
        with topic.group("etl", member="parent") as again:
            assert again.poll() != []
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(ready)


def test_child_that_exits_normally_harms_nothing(path: Path) -> None:
    program = """
        import os, sys
        from loglib import Topic
        from loglib.errors import ForkedHandleError
        topic = Topic.open(sys.argv[1], create=True)
        topic.append_many([b"%d" % number for number in range(10)])
        topic.flush()
        group = topic.group("etl", member="parent")
        for record in group.follow(timeout=0.0):
            if record.value == b"4" and os.fork() == 0:
                try:
                    next(group.follow())
                except ForkedHandleError:
                    sys.exit(0)  # with exit handlers, finalizers and all
        os.wait()
        print(group.members, group.assignment)
        group.close()
        print(len(topic.group("etl").poll()))
    """
    assert run_python(program, path).split("\n")[:2] == ["['parent'] [0]", "0"]


# --- calls in the midst of others ----------------------------------------------------------------


def test_commit_in_a_signal_handler_is_an_error_at_once_or_works(topic: Topic) -> None:
    """At whatever instruction of another commit: nothing of it is lost, and nothing is written elsewhere."""

    class Interrupting(WatchedFiles):
        def before(self, call: Call) -> None:
            if busy:
                busy.clear()
                with pytest.raises(LogError, match="in the middle of another call"):
                    group.commit({0: next_offset(topic, 8)})
                refused.append(call.name)

    busy: list[int] = []
    refused: list[str] = []
    files = Interrupting()
    with testing.open_topic(
        topic.path, mode="r", files=files
    ) as reading, reading.group("etl", commit="manual") as group:
        assert len(rest(group)) == 10
        for number in range(6):
            busy.append(number)
            group.commit({0: next_offset(topic, number)})
            assert committed_number(group) == number
        assert len(refused) == 6 and not busy
        for call in (group.poll, lambda: next(group.follow()), group.lag, lambda: group.seek("begin")):
            asked: list[bool] = []

            def handler(*_: Any, call: Any = call, asked: Any = asked) -> None:
                with pytest.raises(LogError, match="in the middle of another call"):
                    call()
                asked.append(True)

            with monkeypatched(files, "before", handler):
                group.commit({0: 0})
            assert asked


@contextmanager
def monkeypatched(files: Any, name: str, function: Callable[..., None]) -> Iterator[None]:
    """Have a method called once in place of its own."""
    original = getattr(files, name)

    def once(*arguments: Any) -> None:
        setattr(files, name, original)
        function(*arguments)

    setattr(files, name, once)
    try:
        yield
    finally:
        setattr(files, name, original)


def test_close_in_the_midst_of_a_call_closes_when_that_returns(topic: Topic) -> None:
    class Closing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "datasync" and closing:
                closing.clear()
                group.close()

    closing: list[bool] = []
    with testing.open_topic(topic.path, mode="r", files=Closing()) as reading:
        group = reading.group("etl", commit="manual")
        assert len(rest(group)) == 10
        closing.append(True)
        group.commit()
        assert group.closed and group.assignment == []
    with topic.group("etl") as group:
        assert rest(group) == []


def test_sigterm_ends_a_loop_that_waits_on_a_quiet_topic(topic: Topic, path: Path) -> None:
    """Under a handler that sets a flag it waited on: Python goes on with the wait when the handler has returned."""
    program = """
        import os, signal, sys, threading
        from loglib import Topic
        with Topic.open(sys.argv[1], mode="r") as topic, topic.group("etl", commit=3600) as group:
            signal.signal(signal.SIGTERM, lambda *_: group.close())
            for record in group.follow():
                print(record.value.decode())
                if record.value == b"9":
                    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            print("ended", group.closed)
    """
    assert run_python(program, path).split() == [*map(str, range(10)), "ended", "True"]
    with topic.group("etl") as group:
        assert rest(group) == []  # what was handled is committed, long before the interval was over
