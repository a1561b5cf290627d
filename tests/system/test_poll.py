"""Poll: waiting works the same where the `select` module has no `poll`, as eventlet leaves it."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import run_python
from loglib import LogError
from loglib.system import system_calls as module
from loglib.system.system_calls import new_poll


@pytest.fixture(params=["poll", "select"])
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "select":
        monkeypatch.delattr(select, "poll")
    return str(request.param)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for each in ends:
        os.close(each)


@pytest.mark.usefixtures("without")
def test_what_is_ready_is_reported_with_its_events(pipe: tuple[int, int]) -> None:
    poll = new_poll()
    poll.register(pipe[0], select.POLLIN)
    assert poll.poll(0) == [] and poll.poll(1) == []
    poll.register(pipe[1], select.POLLOUT)
    assert poll.poll() == [(pipe[1], select.POLLOUT)]
    os.write(pipe[1], b"x")
    assert sorted(poll.poll(1000)) == sorted([(pipe[0], select.POLLIN), (pipe[1], select.POLLOUT)])
    poll.unregister(pipe[1])
    assert poll.poll() == [(pipe[0], select.POLLIN)]


@pytest.mark.usefixtures("without")
def test_an_object_with_a_descriptor_is_taken_for_both_directions() -> None:
    one, other = socket.socketpair()
    with one, other:
        other.send(b"x")
        poll = new_poll()
        poll.register(one, select.POLLIN | select.POLLOUT)
        assert poll.poll() == [(one.fileno(), select.POLLIN | select.POLLOUT)]
        poll.unregister(one)
        assert poll.poll(0) == []


def test_a_descriptor_that_select_does_not_take_is_an_error_in_words(pipe: tuple[int, int]) -> None:
    high = 5000
    try:
        os.dup2(pipe[0], high)
    except OSError:
        pytest.skip("the limit of descriptors is below 5,000")
    poll = module._BySelect()
    poll.register(high, select.POLLIN)
    with pytest.raises(LogError, match="select.select does not take descriptor 5000"):
        poll.poll(0)
    os.close(high)


@pytest.mark.parametrize("lacking", ["del select.poll", "sys.modules['_ctypes'] = None"])
def test_following_and_groups_work_in_an_interpreter_that_lacks_a_part(lacking: str, tmp_path: Path) -> None:
    program = f"""
        import select, sys, threading
        {lacking}
        from loglib import Topic
        with Topic.open(sys.argv[1], create=True, partitions=2) as topic, Topic.open(sys.argv[1], mode="r") as reader:
            follower = reader.follow("end", timeout=30)
            thread = threading.Thread(target=topic.append, args=(b"one",), kwargs=dict(sync=True))
            thread.start()
            assert follower.poll(timeout=30)[0].value == b"one"
            thread.join()
            follower.close()
            with topic.group("g") as group:
                assert len(group.poll()) == 1
        print("done")
    """
    assert run_python(program, tmp_path / "t") == "done\n"
