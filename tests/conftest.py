"""What the tests share: a topic in a temporary directory, a clock that stands still, and copies of both."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from loglib import CorruptLogError, FlushPolicy, LogError, Partition, Record, Retention, Topic, VerifyReport, testing
from loglib.testing import UnsyncedFiles
from loglib.transactions import notifications

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
MANUAL = FlushPolicy(records=None, interval=None, bytes=None)  # only flush() flushes
NOW = 1_700_000_000_000_000  # microseconds UTC; any time will do
SECOND = 1_000_000
# Nothing by the clock and no thread: what happens is what the test does.
QUIET: dict[str, Any] = {"flush": MANUAL, "retention": Retention(age=None), "segment_age": None}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system or be another user")
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc, to see the open files")


# Continuous integration draws the same examples each time, so that a change is judged by what it changes; elsewhere
# they are new in each run, and what they find is printed with how to repeat it. No profile has a deadline: a busy
# machine takes any time.
settings.register_profile("new", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
# For hunting mutants: an example that fails is enough, and a smaller one may take minutes to find.
settings.register_profile("hunt", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.load_profile({None: "new", "": "new", "hunt": "hunt"}.get(os.environ.get("CI"), "ci"))

# A shell that runs the tests in the background has SIGINT ignored, and nohup has SIGHUP ignored, which the programs
# that the tests start would inherit; with a handler here they begin as they would in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="of the proof in tests/reliability, run a fixed part")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--sample"):
        import sample

        config.pluginmanager.register(sample)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config) -> Any:
    """Which process runs a test is the same each time; `--dist worksteal` alone goes by who is free first."""
    from fixed_order import FixedOrder

    return FixedOrder(config) if config.getoption("dist") in ("load", "loadfile") else None


def interrupted(process: subprocess.Popen[Any]) -> tuple[Any, Any]:
    """Press Ctrl-C, and return the rest of a program's output and of its errors.

    The program runs without coverage (fixture `unmeasured`): an interrupt that comes while that has its lock would
    leave it locked for ever.
    """
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it goes on after Ctrl-C: {process.communicate()}") from None


class Clock:
    """The time of day, in microseconds, as the test wants it."""

    def __init__(self, now: int = NOW) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, span: timedelta) -> None:
        self.now += span // timedelta(microseconds=1)


@pytest.fixture(scope="session", autouse=True)
def _watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The thread that watches inboxes opens its files before a test counts the open files, and keeps them."""
    watched = threading.Event()
    (place := tmp_path_factory.mktemp("watched") / "inbox").mkdir()

    def serve(event: threading.Event) -> bool:
        event.set()
        return False

    notifications.notification_thread().listen(str(place.parent), watched, serve)
    assert watched.wait(30)
    yield
    notifications.notification_thread().leave(watched)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a topic may be made."""
    return tmp_path / "topic"


@pytest.fixture
def to(tmp_path: Path, path: Path) -> Path:
    """Where a copy may be made: a directory of the same name, since groups know a topic by its name."""
    return tmp_path / "mirror" / path.name


@pytest.fixture
def open_topic(path: Path, clock: Clock) -> Iterator[Callable[..., Topic]]:
    """Opens the topic at `path`, quiet and with the test's clock; closes it when the test is over."""
    opened: list[Topic] = []

    def open_it(at: Path = path, **arguments: Any) -> Topic:
        arguments.setdefault("clock", clock)
        if not (at / "topic.json").exists():
            arguments = QUIET | arguments
        topic = testing.open_topic(at, **arguments)
        opened.append(topic)
        return topic

    yield open_it
    for topic in opened:
        with suppress(LogError, OSError):  # of a writer that the test has made fail
            topic.close()


@pytest.fixture
def topic(open_topic: Callable[..., Topic]) -> Topic:
    """One partition with the records 0 to 9, a batch each."""
    topic = open_topic(partitions=1)
    for number in range(10):
        topic.append(b"%d" % number, sync=True)
    return topic


@pytest.fixture
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members look at each other whenever they are asked for records: nothing depends on the time of day."""
    for name in ("membership._LOOK_S", "group._COMMIT_AFTER_S"):
        monkeypatch.setattr(f"loglib.groups.{name}", 0.0)


@contextmanager
def without_coverage() -> Iterator[None]:
    """A context in which programs are started without coverage, whose modules and locks would be in the way."""
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("COV")]:
            environment.delenv(name)
        yield


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """Programs that the test starts run without coverage."""
    with without_coverage():
        yield


@pytest.fixture
def no_garbage() -> None:
    """What other tests have left is collected now: a parser that nests too deep would leave its finalizers no stack."""
    gc.collect()


class Overtaken(UnsyncedFiles):
    """Something happens, once, just before the first segment is opened for reading."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self._happens = happens
        self.done = False

    def open_read(self, path: str, **within: Any) -> int:
        if path.endswith(".log") and not self.done:
            self.done = True
            self._happens()
        return super().open_read(path, **within)


class SlowToUnlink(UnsyncedFiles):
    """Says when it is about to remove a file, and waits until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.inside.set()
        assert self.go_on.wait(60)
        super().unlink(path, dir_fd=dir_fd)


def sound(partition: Partition) -> VerifyReport:
    """What verifying a partition has found; the first damage is raised."""
    report = partition.verify()
    for damage in report.damage:
        raise CorruptLogError(damage.path, damage.file_position, damage.found, damage.expected)
    return report


def alter(path: Any, **policies: Any) -> None:
    """Change the policies of a topic that is not open."""
    with Topic.open(path, create=True) as topic:
        topic.alter(**policies)


def values_of(topic: Any, start: Any = "begin") -> list[Any]:
    """The values of all records of a topic or partition, in order; None is one."""
    return [record.value for record in topic.read(start)]


def offsets_of(topic: Topic) -> list[int]:
    return [record.offset for record in topic.read()]


def records_of(path: Path) -> list[Record]:
    """All records of the topic, read as another process would."""
    with Topic.open(path, mode="r") as topic:
        return list(topic.read())


def fill(topic: Topic, count: int, *, partition: int = 0, step: int = SECOND) -> list[int]:
    """Append records with rising times, flushed; returns their offsets."""
    offsets = [
        topic.append(b"%d" % number, partition=partition, timestamp=NOW + number * step).offset
        for number in range(count)
    ]
    topic.flush()
    return offsets


def wait_until_waiting(*readers: Any) -> None:
    while any(reader._waiter is None for reader in readers):
        time.sleep(0)


def crash_copy(source: Path, target: Path) -> Path:
    """The topic as a process killed now would leave it: a copy, whose lock nobody holds."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)
    return target


def tree(path: Path) -> dict[str, bytes]:
    """Every file and its bytes, but for the lock's, which is for messages only."""
    return {
        str(each.relative_to(path)): each.read_bytes()
        for each in sorted(path.rglob("*"))
        if each.is_file() and each.name != "lock"
    }


def in_parts(count: int) -> pytest.MarkDecorator:
    """A test of many cases gets a `part` of them, a slice: every `count`-th one, and all of them in the whole proof."""
    parts = [slice(number, None, count) for number in range(count)]
    marked = [pytest.param(each, marks=pytest.mark.slow if each.start else ()) for each in parts]
    return pytest.mark.parametrize("part", marked, ids=[f"part {each.start + 1} of {count}" for each in parts])


def last_segment(path: Path, partition: int = 0) -> Path:
    return max((path / f"{partition:04d}").glob("*.log"))


def once_each(calls: list[tuple[str, str]], *names: str) -> list[tuple[str, str]]:
    """The calls of these names, and of several equal ones in a row the first."""
    chosen = [call for call in calls if call[0] in names]
    return [call for call, before in zip(chosen, [("", ""), *chosen], strict=False) if call != before]


_counting: list[str] = []  # the test that has counted last


def open_files() -> list[str]:
    """The files that this process has open, by what they lead to; none where the system does not say.

    Those of the thread that watches inboxes are left out: it closes and opens them at moments of its own. So is what
    earlier tests have left to the collector, which would come at any moment: it is collected at a test's first call.
    """
    this = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0] if "PYTEST_CURRENT_TEST" in os.environ else ""
    if _counting != [this]:
        _counting[:] = [this]
        gc.collect()
    found: dict[int, str] = {}
    if not os.path.isdir("/proc/self/fd"):
        return []
    others = _descriptors_of_inboxes()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # that of the listing itself
            continue
    others |= _descriptors_of_inboxes()
    return sorted(what for fd, what in found.items() if fd not in others)


def _descriptors_of_inboxes() -> set[int]:
    observer = notifications.notification_thread()._observer
    descriptors = None if observer is None else observer._open
    return set() if descriptors is None else {descriptors.inotify, descriptors.wake_in, descriptors.wake_out}


def settled_files() -> list[str]:
    """The open files without those that are garbage: a collection may close these at any later moment."""
    gc.collect()
    return open_files()


def opened_since(before: list[str]) -> list[str]:
    """The files that are open and were not `before`. What earlier tests have left open may close at any moment."""
    return sorted((Counter(open_files()) - Counter(before)).elements())


def limit_of_files(spare: int) -> int:
    """The RLIMIT_NOFILE that lets a process open so many more files. It limits numbers, and those in use have holes."""
    gc.collect()  # which may close some
    used = {int(number) for number in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{number}")}
    return next(islice((number for number in count() if number not in used), spare, None))


def start_python(program: str, *arguments: object, **keywords: Any) -> subprocess.Popen[str]:
    """A program in an interpreter of its own, with pipes to and from it."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    path = os.pathsep.join(map(str, (SOURCE, ROOT / "tests", ROOT / "tests" / "support")))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **(pipes | keywords))


def run_python(program: str, *arguments: object) -> str:
    """Run the program to its end; returns what it printed, and fails with what it complained of."""
    process = start_python(program, *arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-4000:]
    return output


__all__ = [
    "MANUAL", "NOW", "QUIET", "ROOT", "SECOND", "SOURCE", "Clock", "UnsyncedFiles", "crash_copy", "fill",
    "last_segment",
    "needs_proc", "needs_root", "offsets_of", "once_each", "open_files", "records_of", "run_python",
    "start_python", "tree", "values_of", "wait_until_waiting", "without_coverage",
]  # fmt: skip
