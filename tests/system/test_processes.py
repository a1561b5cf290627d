"""Several processes and one log: kills, locks, sharing, exits, and what may be pickled."""

import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from conftest import interrupted, records_of, run_python, sound, start_python, values_of
from loglib import LockedError, Topic

# Appends numbered records and says how far it has got: each line it prints is acknowledged.
WRITER = """
    import sys
    from loglib import FlushPolicy, Topic
    topic = Topic.open(
        sys.argv[1], create=True, segment_bytes=20_000, flush=FlushPolicy(records=None, interval=None, bytes=None)
    )
    number = sum(len(batch) for batch in topic.batches())
    print("open", flush=True)
    while True:
        for _ in range(7):
            topic.append(b"%d " % number + b"x" * (number % 400))
            number += 1
        topic.append(b"%d " % number, sync=True)
        number += 1
        sys.stdout.write("%d\\n" % number)
        sys.stdout.flush()
"""


@pytest.mark.parametrize("kills", [pytest.param(10, id="10"), pytest.param(60, id="60", marks=pytest.mark.slow)])
def test_nothing_acknowledged_is_lost_by_kill_9(path: Path, kills: int) -> None:
    rng = random.Random(kills)
    acknowledged = 0
    for _ in range(kills):
        writer = start_python(WRITER, path)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n", writer.communicate()
        lines = [writer.stdout.readline() for _ in range(rng.randrange(60))]
        writer.kill()
        rest, _ = writer.communicate()
        whole = ["0", *lines, *rest.split("\n")[:-1]]  # the last line may have been cut
        acknowledged = max([acknowledged, *(int(each) for each in whole)])
        numbers = [int((record.value or b"").split()[0]) for record in records_of(path)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= acknowledged
    with Topic.open(path, create=True) as topic:
        sound(topic.partition(0))


def test_second_writer_learns_who_has_the_topic(path: Path) -> None:
    program = """
        import sys
        from loglib import Topic
        with Topic.open(sys.argv[1], create=True):
            print("open", flush=True)
            sys.stdin.read()
    """
    holder = start_python(program, path)
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        with pytest.raises(LockedError, match=rf"pid {holder.pid} .* since \d{{4}}-"):
            Topic.open(path, create=True)
        with Topic.open(path, mode="r") as topic:
            assert values_of(topic) == []
    finally:
        holder.communicate("")
    Topic.open(path).close()


@pytest.mark.parametrize("racers", [pytest.param(8, id="8")])
def test_of_many_openers_at_once_one_gets_the_lock(path: Path, racers: int) -> None:
    Topic.open(path, create=True).close()
    program = """
        import sys
        from loglib import LockedError, Topic
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            topic = Topic.open(sys.argv[1], create=True)
        except LockedError:
            print("refused", flush=True)
        else:
            print("got it", flush=True)
        sys.stdin.read()
    """
    processes = [start_python(program, path) for _ in range(racers)]
    for process in processes:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        assert process.stdout is not None
        answers.append(process.stdout.readline().strip())
    for process in processes:
        process.communicate("")
    assert sorted(answers) == ["got it"] + ["refused"] * (racers - 1)


def test_topic_made_by_many_processes_at_once_is_one_topic(path: Path) -> None:
    program = """
        import sys
        from loglib import Topic
        print("ready", flush=True)
        sys.stdin.readline()
        with Topic.open(sys.argv[1], create=True, partitions=16, shared=True) as topic:
            topic.append(sys.argv[2].encode(), sync=True)
            print(topic.log_id.hex(), flush=True)
    """
    processes = [start_python(program, path, number) for number in range(6)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    ids = set()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        ids.add(output.strip())
    assert len(ids) == 1
    assert sorted(record.value or b"" for record in records_of(path)) == [b"%d" % number for number in range(6)]
    assert [each for each in os.listdir(path.parent) if each.endswith(".tmp")] == []


def test_processes_that_share_a_topic_write_each_record_once_and_in_order(path: Path) -> None:
    program = """
        import sys
        from loglib import Topic
        with Topic.open(sys.argv[1], shared=True, wait=60) as topic:
            for number in range(1000):
                topic.append(b"%s %d" % (sys.argv[2].encode(), number), key=b"%d" % (number % 7))
            topic.flush()
            print("flushed", flush=True)
            sys.stdin.read()
    """
    Topic.open(path, create=True, partitions=2).close()
    workers = [start_python(program, path, name) for name in "abcd"]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "flushed\n"
    with Topic.open(path, shared=True, wait=60) as fifth:
        fifth.append(b"e 0", sync=True)
    for worker in workers:
        assert worker.communicate("")[1] == ""
    found: dict[tuple[bytes, bytes | None], list[int]] = {}
    for record in records_of(path):
        name, number = (record.value or b"").split()
        found.setdefault((name, record.key), []).append(int(number))
    expected = {(b"%c" % name, b"%d" % key): list(range(key, 1000, 7)) for name in b"abcd" for key in range(7)}
    assert found == expected | {(b"e", None): [0]}


def test_worker_that_was_killed_leaves_its_partition_free(path: Path) -> None:
    with Topic.open(path, create=True, shared=True, wait=60) as topic:
        topic.append(b"mine")
        program = """
            import os, signal, sys
            from loglib import Topic
            topic = Topic.open(sys.argv[1], shared=True, wait=60)
            topic.append(b"theirs", sync=True)
            topic.append(b"not flushed")
            os.kill(os.getpid(), signal.SIGKILL)
        """
        for _ in range(2):
            worker = start_python(program, path)
            worker.communicate()
            assert worker.returncode == -signal.SIGKILL
        topic.append(b"mine, too", sync=True)
    assert [record.value for record in records_of(path)] == [b"mine", b"theirs", b"theirs", b"mine, too"]


def test_exit_without_close_flushes(path: Path) -> None:
    program = """
        import sys
        from loglib import FlushPolicy, Topic
        topic = Topic.open(sys.argv[1], create=True, flush=FlushPolicy(records=None, interval=None, bytes=None))
        topic.append(b"buffered when the interpreter ended")
    """
    run_python(program, path)
    assert [record.value for record in records_of(path)] == [b"buffered when the interpreter ended"]


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_abrupt_end_keeps_what_was_flushed(path: Path, ending: str) -> None:
    program = f"""
        import os, signal, sys
        from loglib import FlushPolicy, Topic
        topic = Topic.open(sys.argv[1], create=True, flush=FlushPolicy(records=None, interval=None, bytes=None))
        topic.append(b"flushed", sync=True)
        topic.append(b"buffered")
        {ending}
    """
    start_python(program, path).communicate()
    assert [record.value for record in records_of(path)] == [b"flushed"]
    Topic.open(path, create=True).close()


@pytest.mark.parametrize(
    ("ending", "status", "more"),
    [
        pytest.param("", 0, [], id="the last line"),
        pytest.param("sys.exit(3)", 3, [], id="sys.exit"),
        pytest.param("raise ValueError", 1, [], id="an exception"),
        pytest.param("atexit.register(topic.append, b'at exit')", 0, [b"at exit"], id="an exit function that appends"),
        pytest.param("atexit.register(topic.close)", 0, [], id="an exit function that closes"),
        pytest.param(
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); os.kill(os.getpid(), signal.SIGTERM)", 4, [],
            id="a handler that exits",
        ),
        pytest.param(
            "signal.signal(signal.SIGTERM, lambda *_: topic.close()); os.kill(os.getpid(), signal.SIGTERM)", 0, [],
            id="a handler that closes",
        ),
        pytest.param("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, [], id="Ctrl-C"),
        pytest.param(
            "threading.Thread(target=append_later).start()", 0, [b"later"], id="a thread that goes on"
        ),
        pytest.param(
            "threading.Thread(target=append_for_ever, daemon=True).start(); time.sleep(0.01)", 0, ...,
            id="a daemon thread that never ends",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unmeasured")
def test_orderly_end_without_close_keeps_what_was_buffered(path: Path, ending: str, status: int, more: Any) -> None:
    program = f"""
        import atexit, os, signal, sys, threading, time
        from loglib import FlushPolicy, LogClosedError, Topic
        topic = Topic.open(sys.argv[1], create=True, flush=FlushPolicy(records=None, interval=None, bytes=None))
        topic.append(b"buffered")

        def append_later():
            time.sleep(0.05)
            topic.append(b"later")

        def append_for_ever():
            try:
                while True:
                    topic.append(b"and on")
            except LogClosedError:
                pass

        {ending}
    """
    ended = start_python(program, path)
    errors = ended.communicate(timeout=60)[1]
    assert ended.returncode == status, errors
    values = [record.value for record in records_of(path)]
    if more is ...:
        assert values[0] == b"buffered" and set(values[1:]) <= {b"and on"}
    else:
        assert values == [b"buffered", *more]
    with Topic.open(path, create=True) as topic:
        recovery = topic.partition(0).recovery
        assert recovery is not None and recovery.clean


def test_interval_flushes_without_a_call(path: Path) -> None:
    program = """
        import os, sys
        from loglib import FlushPolicy, Topic
        topic = Topic.open(sys.argv[1], create=True, flush=FlushPolicy(records=None, interval=0.01, bytes=None))
        topic.append(b"left alone")
        for record in topic.follow("begin", timeout=30):  # ends when the record can be read
            print(record.value)
            os._exit(0)
    """
    assert run_python(program, path).strip() == "b'left alone'"


def test_follower_in_another_process_sees_rolls_and_a_new_writer(path: Path) -> None:
    Topic.open(path, create=True, segment_bytes=4096).close()
    program = """
        import sys
        from loglib import Topic
        with Topic.open(sys.argv[1], mode="r") as topic:
            print("following", flush=True)
            for record in topic.follow("begin", timeout=60):
                print(record.value.decode(), flush=True)
                if record.value == b"last":
                    break
    """
    follower = start_python(program, path)
    assert follower.stdout is not None
    follower.stdout.readline()
    for writer in range(3):
        with Topic.open(path) as topic:
            for number in range(40):
                topic.append(b"%d.%d" % (writer, number) + b"." * 500, sync=True)
    with Topic.open(path) as topic:
        assert len(topic.partition(0).segments) > 10
        topic.append(b"last", sync=True)
    output, errors = follower.communicate(timeout=60)
    assert errors == ""
    expected = [f"{writer}.{number}" for writer in range(3) for number in range(40)]
    assert [line.rstrip(".") for line in output.split("\n")[:-1]] == [*expected, "last"]


@pytest.mark.usefixtures("unmeasured")
def test_interrupt_ends_a_follower(path: Path) -> None:
    Topic.open(path, create=True).close()
    program = """
        import sys
        from loglib import Topic
        try:
            with Topic.open(sys.argv[1], mode="r") as topic:
                print("following", flush=True)
                for record in topic.follow():
                    pass
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    follower = start_python(program, path, stderr=subprocess.STDOUT)
    assert follower.stdout is not None
    follower.stdout.readline()
    assert interrupted(follower)[0] == "interrupted\n"


def test_topic_for_writing_cannot_be_pickled_and_one_for_reading_goes_by_its_path(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append(b"x", sync=True)
        with pytest.raises(TypeError, match="pickle its path"):
            pickle.dumps(topic)
    with Topic.open(path, mode="r") as topic, pickle.loads(pickle.dumps(topic)) as again:
        assert (again.path, again.mode) == (topic.path, "r")
        assert values_of(again) == [b"x"]


def test_spawned_worker_writes_a_topic_that_its_parent_named(path: Path) -> None:
    program = """
        import multiprocessing, sys
        from loglib import Topic

        def work(path):
            with Topic.open(path, create=True) as topic:
                topic.append(b"from a spawned worker", sync=True)

        if __name__ == "__main__":
            worker = multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1],))
            worker.start()
            worker.join()
            assert worker.exitcode == 0
    """
    script = path.parent / "spawning.py"
    script.write_text(textwrap.dedent(program))
    source = Path(__file__).resolve().parents[2] / "src"
    command = [sys.executable, str(script), str(path)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(source)})
    assert [record.value for record in records_of(path)] == [b"from a spawned worker"]
