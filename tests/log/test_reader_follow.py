"""A reader that follows is woken by each flush, of any process, and costs nothing while it waits."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import fill, interrupted, run_python, start_python
from loglib import FlushPolicy, Retention, Topic

Open = Callable[..., Topic]


def test_follow_starts_at_the_end_and_ends_after_silence(open_topic: Open) -> None:
    topic = open_topic()
    fill(topic, 3)
    reader = topic.follow(timeout=0.02)
    topic.append(b"new", sync=True)
    assert [r.value for r in reader] == [b"new"]
    assert list(reader) == []


@pytest.mark.parametrize("inotify", [True, False])
def test_follow_survives_rolls_retention_and_writer_restarts(
    inotify: bool, open_topic: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inotify:
        monkeypatch.setattr("loglib.system.notify._inotify", lambda _: None)
    open_topic(segment_bytes=4096, retention=Retention(age=None, bytes=0)).close()
    with Topic.open(path, mode="r") as reading:
        follower = iter(reading.follow("begin"))
        seen = []
        for round_ in range(4):
            with open_topic() as topic:
                for number in range(20):
                    topic.append(b"%d %d" % (round_, number) + b"x" * 500, sync=True)
                    seen.append(next(follower).value[:5].split(b"x")[0])  # type: ignore[index]
                topic.retain()
        assert seen == [b"%d %d" % (r, n) for r in range(4) for n in range(20)]
        assert reading.partition(0).log_start_offset > 0


def test_follower_in_another_process_wakes_at_a_flush(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    process = start_python(
        """
        import sys
        from loglib import Topic
        with Topic.open(sys.argv[1], mode="r") as topic:
            print("ready")
            for record in topic.follow("begin", timeout=60):
                print(record.value.decode())
                if record.value == b"stop":
                    break
        """,
        path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in range(5):
        topic.append(b"%d" % number, sync=True)
        assert process.stdout.readline() == f"{number}\n"
    topic.append(b"stop", sync=True)
    output, errors = process.communicate(timeout=60)
    assert (output, errors, process.returncode) == ("stop\n", "", 0)


def test_follower_survives_the_writer_being_killed(path: Path) -> None:
    writer = """
        import os, signal, sys
        from loglib import Topic
        topic = Topic.open(sys.argv[1], create=True)
        topic.append(sys.argv[2].encode(), sync=True)
        topic.append(b"never flushed")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    Topic.open(path, create=True, flush=FlushPolicy(records=None, interval=None, bytes=None)).close()
    with Topic.open(path, mode="r") as topic:
        follower = iter(topic.follow("begin", timeout=60))
        for number in range(3):
            process = start_python(writer, path, number)
            assert process.wait(60) == -signal.SIGKILL
            process.communicate()
            assert next(follower).value == b"%d" % number


@pytest.mark.usefixtures("unmeasured")
def test_sigint_ends_a_waiting_follow(open_topic: Open, path: Path) -> None:
    open_topic().close()
    for mode in ("r", "a"):
        process = start_python(
            """
            import sys
            from loglib import Topic
            with Topic.open(sys.argv[1], create=True, mode=sys.argv[2]) as topic:
                follower = topic.follow()
                follower.poll(timeout=0.01)
                print("waiting")
                try:
                    for record in follower:
                        pass
                except KeyboardInterrupt:
                    print("interrupted")
                    assert follower.poll() == []
            """,
            path,
            mode,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        while "S" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0)
        output, errors = interrupted(process)
        assert (output, errors, process.returncode) == ("interrupted\n", "", 0)


@pytest.mark.slow
@pytest.mark.parametrize("use_inotify", [True, False])
def test_idle_follow_costs_next_to_no_cpu(use_inotify: bool, open_topic: Open, path: Path) -> None:
    open_topic().close()
    output = run_python(
        """
        import sys, time
        from loglib import Topic
        from loglib.system import notify
        if sys.argv[2] == "False":
            notify._inotify = lambda _: None
        with Topic.open(sys.argv[1], mode="r") as topic:
            follower = topic.follow()
            follower.poll(timeout=0.2)  # until the naps are as long as they get
            cpu, wall = time.process_time(), time.monotonic()
            assert follower.poll(timeout=2.0) == []
            print((time.process_time() - cpu) / (time.monotonic() - wall))
        """,
        path,
        use_inotify,
    )
    assert float(output) < 0.03
