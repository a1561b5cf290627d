"""The end of a topic: everything is flushed and released, wherever a call is at that moment."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from conftest import needs_proc, opened_since, records_of, run_python, settled_files, values_of
from loglib import CorruptLogError, LogClosedError, LogError, Topic
from loglib.testing import Call, FaultyFiles, UnsyncedFiles, WatchedFiles

Open = Callable[..., Topic]


@needs_proc
def test_close_releases_everything_also_when_a_flush_fails(open_topic: Open, path: Path) -> None:
    before = settled_files()
    files = FaultyFiles("datasync", every=True, armed=False)
    topic = open_topic(partitions=3, files=files)
    reader = topic.follow()
    reader.poll(timeout=0.001)
    for number in range(3):
        topic.append(b"x", partition=number)
    files.armed = True
    with pytest.raises(LogError):
        topic.close()
    assert not opened_since(before) and reader.closed and topic.closed
    topic.close()
    with open_topic() as topic:
        assert Counter(values_of(topic)) <= Counter([b"x"] * 3)


@needs_proc
def test_failed_open_releases_everything(open_topic: Open, path: Path) -> None:
    open_topic(partitions=3).close()
    before = settled_files()
    (path / "0002" / f"{0:020d}.log").write_bytes(b"x")
    with pytest.raises(CorruptLogError):
        Topic.open(path, create=True)
    assert not opened_since(before)


def test_everything_unflushed_is_flushed_at_the_end_of_the_process(path: Path) -> None:
    output = run_python(
        """
        import sys
        from loglib import FlushPolicy, Topic
        manual = FlushPolicy(records=None, interval=None, bytes=None)
        topics = [Topic.open(f"{sys.argv[1]}{n}", create=True, flush=manual) for n in range(3)]
        for topic in topics:
            topic.append(b"never flushed by hand")
        print("done")
        """,
        path,
    )
    assert output == "done\n"
    for number in range(3):
        with Topic.open(f"{path}{number}", mode="r") as topic:
            assert values_of(topic) == [b"never flushed by hand"]


def test_topic_that_cannot_be_flushed_at_the_end_leaves_the_others_no_worse(path: Path) -> None:
    from conftest import start_python

    process = start_python(
        """
        import sys
        from loglib.testing import FaultyFiles, open_topic
        from loglib import FlushPolicy
        manual = FlushPolicy(records=None, interval=None, bytes=None)
        files = FaultyFiles("datasync", every=True, armed=False)
        topics = [
            open_topic(f"{sys.argv[1]}{n}", flush=manual, **({"files": files} if n == 1 else {})) for n in range(4)
        ]
        for topic in topics:
            topic.append(b"x")
        files.armed = True
        """,
        path,
    )
    _, errors = process.communicate(timeout=60)
    assert "WriterFailedError" in errors
    for number in (0, 2, 3):
        with Topic.open(f"{path}{number}", mode="r") as topic:
            assert values_of(topic) == [b"x"]


@pytest.mark.parametrize("call", ["pwritev", "datasync", "rename"])
def test_close_in_the_middle_of_another_call_closes_when_that_has_ended(
    call: str, open_topic: Open, path: Path
) -> None:
    """As a signal handler may: it waited for locks that the call which it had interrupted held."""

    class Interrupting(WatchedFiles):
        handler: Any = None

        def before(self, called: Call) -> None:
            if called.name == call and self.handler is not None:
                handler, self.handler = self.handler, None
                handler()

    files = Interrupting(UnsyncedFiles())
    topic = open_topic(files=files, segment_bytes=4096, batch_records=2)
    topic.append(b"before", sync=True)
    files.handler = topic.close
    with suppress(LogClosedError):
        for number in range(100):
            topic.append(b"%d" % number + bytes(1000))
            topic.flush()
    topic.close()
    for thread in threading.enumerate():
        if thread.name == "loglib-close":
            thread.join(60)
    assert files.handler is None
    assert topic.closed
    with Topic.open(path, create=True) as again:
        recovery = again.partition(0).recovery
        assert recovery is not None and recovery.clean
        assert values_of(again)[0] == b"before"


def test_close_within_a_call_on_another_topic_closes_at_once(open_topic: Open, tmp_path: Path) -> None:
    source = open_topic()
    source.append(b"x", sync=True)

    def values() -> Iterator[bytes | None]:
        yield from values_of(source)
        source.close()
        assert source.partition(0)._access.writer().closed is not None

    target = open_topic(tmp_path / "target")
    target.append_many(values())
    target.flush()
    assert values_of(target) == [b"x"]


@pytest.mark.usefixtures("unmeasured")  # measuring has locks of its own, which a handler may find taken
def test_service_that_closes_in_its_signal_handler_ends_and_keeps_everything(path: Path) -> None:
    program = """
        import os, signal, sys
        from loglib import LogClosedError, Topic
        topic = Topic.open(sys.argv[1], create=True)
        def stop(*_):
            topic.close()
            sys.exit(0)
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
        number = 0
        try:
            while True:
                topic.append(b"%d" % number, sync=number % 100 == 0)
                number += 1
        except LogClosedError:
            pass
        finally:
            print(number)
    """
    for milliseconds in (20, 31, 47):
        before = len(records_of(path)) if path.exists() else 0
        appended = int(run_python(program, path, milliseconds / 1000))
        values = [record.value for record in records_of(path)[before:]]
        assert values[:appended] == [b"%d" % number for number in range(appended)]
        assert len(values) <= appended + 1
