"""G7: forks at random moments while threads append, flush, roll, read and open: the parent keeps all that it had.

In the child, every call on topics that the parent has open for writing is refused, and reading works at once. The
child keeps no lock and writes no byte, while it lives and when it ends. The parent notices nothing.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from counts import count, scale
from processes import together, wait

from conftest import records_of
from loglib import FlushPolicy, Retention, Topic, testing
from loglib.errors import ForkedHandleError
from loglib.testing import UnsyncedFiles

pytestmark = pytest.mark.reliability

THREADS = 3


class Parent:
    """Threads that work on a topic, and a thread that opens and closes another topic all the time."""

    def __init__(self, path: Path, policy: FlushPolicy) -> None:
        self.path = path
        self.stop = threading.Event()
        self.failures: list[BaseException] = []
        self.appended = [0] * THREADS
        self.topic = testing.open_topic(
            path, partitions=2, flush=policy, segment_bytes=20_000, files=UnsyncedFiles(), retention=Retention(age=None)
        )
        self.reading = Topic.open(path, mode="r")
        self.other = path.with_name("other")
        work = [self.flush_and_roll, self.read, self.open_and_close]
        work += [lambda number=number: self.append(number) for number in range(THREADS)]  # type: ignore[misc]
        self.threads = [threading.Thread(target=self.repeat, args=(each,)) for each in work]
        for thread in self.threads:
            thread.start()

    def repeat(self, work: Callable[[], object]) -> None:
        try:
            while not self.stop.is_set():
                work()
        except BaseException as error:
            self.failures.append(error)

    def append(self, number: int) -> None:
        self.topic.append(b"%d:%d" % (number, self.appended[number]), key=b"%d" % number)
        self.appended[number] += 1
        time.sleep(0.0001)  # so that the thread that forks gets its turn

    def flush_and_roll(self) -> None:
        self.topic.flush()
        if random.random() < 0.05:
            self.topic.partition(random.randrange(2)).roll()

    def read(self) -> None:
        for _ in zip(self.reading.read("-1s"), range(100), strict=False):
            pass
        self.reading.partition(0).segments  # lists the directory

    def open_and_close(self) -> None:
        with testing.open_topic(self.other, files=UnsyncedFiles()) as topic:
            topic.append(b"x", sync=True)

    def finish(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        self.reading.close()
        self.topic.close()
        assert not self.failures, self.failures[0]
        found: dict[bytes | None, list[bytes | None]] = {b"%d" % number: [] for number in range(THREADS)}
        for record in records_of(self.path):
            found[record.key].append(record.value)
        for number, appended in enumerate(self.appended):
            assert found[b"%d" % number] == [b"%d:%d" % (number, each) for each in range(appended)]

    # --- in a child ------------------------------------------------------------------------------------

    def be_refused(self) -> None:
        for call in (
            lambda: self.topic.append(b"from a child"),
            lambda: self.topic.append(b"from a child", key=b"0", sync=True),
            lambda: self.topic.append_many([b"from a child"]),
            self.topic.flush,
            self.topic.partition(0).roll,
            self.topic.retain,
            self.topic.read,
        ):
            with pytest.raises(ForkedHandleError):
                call()
        self.topic.close()

    def read_on(self) -> None:
        """Read with objects that the parent's threads were using at the fork, and with a topic opened here."""
        for topic in (self.reading, Topic.open(self.path, mode="r")):
            for _ in zip(topic.read(), range(50), strict=False):
                pass
            for partition in topic.partitions:
                assert partition.segments

    def leave(self) -> None:
        """End as a child does after its last line: finalizers and exit functions run."""
        for held in (self.topic, self.reading):
            held.close()
        del self.topic, self.reading
        gc.collect()


def fork_at_random_moments(path: Path, policy: FlushPolicy, forks: int, seed: int) -> None:
    rng = random.Random(seed)
    parent = Parent(path, policy)
    for number in range(forks):
        time.sleep(rng.uniform(0, 0.003))
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # a hang here would last for ever
            status = 1
            try:
                rng.choice([parent.be_refused, parent.read_on, parent.leave])()
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
        assert wait(pid) == 0, f"fork {number} of seed {seed}"
        assert not parent.failures
    # A child that goes on living holds no lock.
    staying = os.fork()
    if staying == 0:
        signal.pause()
    parent.finish()
    testing.open_topic(path, files=UnsyncedFiles()).close()
    testing.open_topic(parent.other, files=UnsyncedFiles()).close()
    os.kill(staying, signal.SIGKILL)
    wait(staying)


@pytest.mark.parametrize(
    ("seed", "policy"),
    [
        (0, FlushPolicy(records=None, interval=None, bytes=None)),
        (1, FlushPolicy(records=20, interval=None, bytes=None)),
        (2, FlushPolicy(records=None, interval=0.001, bytes=None)),
        (3, FlushPolicy(records=100, interval=0.002, bytes=4000)),
    ],
    ids=["by hand", "by count", "by the clock", "by all"],
)
def test_forks_while_threads_work_harm_neither_parent_nor_child(seed: int, policy: FlushPolicy, path: Path) -> None:
    forks = scale(250)
    together([lambda: fork_at_random_moments(path, policy, forks, seed)])
    count("G7", forks=forks, lost=0, wrong=0)
