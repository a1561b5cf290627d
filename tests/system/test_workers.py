"""Workers of multiprocessing: what they have appended is in the log when they have ended in order.

Such a process leaves by `os._exit`: the interpreter's exit functions never run there.
"""

from __future__ import annotations

import multiprocessing.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import records_of, run_python
from loglib.system import process

pytestmark = pytest.mark.usefixtures("unmeasured")

METHODS = ["fork", "forkserver", "spawn"]

# What the workers do stands in a module, which those that are not forked import.
MODULE = """
    import os
    from loglib import Topic

    topic = None

    def open_topic(path):
        global topic
        topic = Topic.open(f"{path}{os.getpid()}", create=True)

    def append(number):
        topic.append(b"%d" % number)
        return os.getpid()

    def work(path, count):
        open_topic(path)
        for number in range(count):
            append(number)

"""


def run_with_module(program: str, directory: Path, *arguments: object) -> str:
    lines = [line[4:] for line in MODULE.splitlines()]
    (directory / "workers.py").write_text("\n".join(lines), "utf-8")
    begin = "import sys; sys.path.insert(0, sys.argv[1])\n"
    return run_python(begin + "\n".join(line[8:] for line in program.splitlines()), directory, *arguments)


def values_in(directory: Path) -> list[list[int]]:
    """The numbers in each topic below the directory, by its name."""
    topics = sorted(each.parent for each in directory.glob("*/topic.json"))
    return [[int(record.value or b"") for record in records_of(topic)] for topic in topics]


@pytest.mark.parametrize("method", METHODS)
def test_appends_of_a_worker_are_flushed_when_it_ends(method: str, tmp_path: Path) -> None:
    program = """
        import multiprocessing, workers
        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[2])
            started = [context.Process(target=workers.work, args=(sys.argv[1] + "/topic", 20)) for _ in range(2)]
            for each in started:
                each.start()
            for each in started:
                each.join()
            print([each.exitcode for each in started])
    """
    assert run_with_module(program, tmp_path, method) == "[0, 0]\n"
    assert values_in(tmp_path) == [list(range(20))] * 2


@pytest.mark.parametrize("method", METHODS)
def test_appends_to_the_topic_of_a_pools_initializer_are_flushed_when_it_ends(method: str, tmp_path: Path) -> None:
    program = """
        import multiprocessing, workers
        from concurrent.futures import ProcessPoolExecutor
        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[2])
            path = sys.argv[1] + "/topic"
            with ProcessPoolExecutor(2, context, initializer=workers.open_topic, initargs=(path,)) as pool:
                list(pool.map(workers.append, range(20)))
            with context.Pool(2, workers.open_topic, (path,)) as pool:
                pool.map(workers.append, range(20, 40))
                pool.close()
                pool.join()
    """
    run_with_module(program, tmp_path, method)
    found = values_in(tmp_path)
    assert sorted(number for numbers in found for number in numbers) == list(range(40))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_appends_to_a_topic_that_a_module_opens_when_a_worker_imports_it_are_flushed(
    method: str, tmp_path: Path
) -> None:
    """The worker imports the module to learn what it is to do, and forgets the exit functions before it does it."""
    lines = ["import os, workers", "workers.open_topic(os.path.dirname(__file__) + '/topic')"]
    lines += ["def append(number): workers.append(number)"]
    (tmp_path / "opens.py").write_text("\n".join(lines), "utf-8")
    program = """
        import multiprocessing, opens
        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[2])
            started = [context.Process(target=opens.append, args=(number,)) for number in range(2)]
            for each in started:
                each.start()
            for each in started:
                each.join()
            print([each.exitcode for each in started])
    """
    assert run_with_module(program, tmp_path, method) == "[0, 0]\n"
    assert sorted(values_in(tmp_path)) == [[], [0], [1]]  # the parent imports the module, too


def test_worker_of_a_process_that_writes_itself_closes_its_own_topic_and_not_its_parents(tmp_path: Path) -> None:
    """The parent has told multiprocessing of its topics already; its worker forgets that, and must tell anew."""
    program = """
        import multiprocessing, workers
        workers.open_topic(sys.argv[1] + "/parent")
        workers.append(1)
        process = multiprocessing.get_context("fork").Process(target=workers.work, args=(sys.argv[1] + "/child", 3))
        process.start()
        process.join()
        workers.append(2)
        print(process.exitcode)
    """
    assert run_with_module(program, tmp_path) == "0\n"
    assert values_in(tmp_path) == [[0, 1, 2], [1, 2]]


def test_worker_that_is_a_parent_closes_after_its_own_workers(tmp_path: Path) -> None:
    """Other exit functions come first, in which somebody may append still."""
    program = """
        import multiprocessing, multiprocessing.util, workers

        def work(path):
            workers.work(path, 2)
            multiprocessing.util.Finalize(None, workers.append, args=(7,), exitpriority=-5)
            multiprocessing.get_context("fork").Process(target=workers.work, args=(path, 3)).start()

        process = multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1] + "/topic",))
        process.start()
        process.join()
    """
    run_with_module(program, tmp_path)
    assert sorted(values_in(tmp_path)) == [[0, 1, 2], [0, 1, 7]]


@pytest.mark.parametrize("ending", ["after a task", "closed"])
def test_worker_of_the_pool_of_celery_flushes_when_it_ends(ending: str, tmp_path: Path) -> None:
    """billiard's pool calls no exit functions, and ends a worker that says that it is done by SIGTERM."""
    program = """
        import billiard, workers
        path, most = sys.argv[1] + "/topic", 1 if sys.argv[2] == "after a task" else None
        for _ in range(3):
            pool = billiard.get_context("fork").Pool(1, maxtasksperchild=most)
            pool.apply(workers.work, (path, 3))
            pool.close()
            pool.join()
    """
    run_with_module(program, tmp_path, ending)
    assert values_in(tmp_path) == [[0, 1, 2]] * 3


class Closing:
    """A handle that notes when it is closed, which may fail."""

    def __init__(self, notes: list[object], error: Exception | None = None) -> None:
        self._notes = notes
        self._error = error

    def close(self) -> None:
        self._notes.append("closed")
        if self._error is not None:
            raise self._error


@pytest.fixture
def billiard_pool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the module of billiard's pool; no other package with exit functions is there."""
    pool = ModuleType("billiard.pool")
    monkeypatch.setitem(sys.modules, "billiard.pool", pool)
    monkeypatch.setattr(process, "_POOLS", ())
    return pool


@pytest.mark.parametrize("error", [None, OSError("no disk")])
def test_worker_of_billiards_pool_ends_after_all_handles_are_closed_once(
    error: Exception | None, billiard_pool: ModuleType
) -> None:
    notes: list[object] = []

    class Worker:
        def _do_exit(self, pid: int, exitcode: int) -> None:
            notes.append((self, pid, exitcode))

    billiard_pool.Worker = Worker  # type: ignore[attr-defined]
    handles = [Closing(notes, error), Closing(notes)]
    at_exit = process._AtExit()
    for each in handles:
        at_exit.add(each.close)
    worker = Worker()
    with nullcontext() if error is None else pytest.raises(OSError, match="no disk"):
        worker._do_exit(7, exitcode=3)
    assert notes == ["closed", "closed", (worker, 7, 3)]


def test_worker_of_a_billiard_that_ends_otherwise_is_left_alone(billiard_pool: ModuleType) -> None:
    class Worker:
        pass

    billiard_pool.Worker = Worker  # type: ignore[attr-defined]
    notes: list[object] = []
    handle = Closing(notes)
    at_exit = process._AtExit()
    at_exit.add(handle.close)
    assert not hasattr(Worker, "_do_exit")
    at_exit.end()
    assert notes == ["closed"]


def test_topic_opened_before_multiprocessing_is_imported_is_closed_once(tmp_path: Path) -> None:
    program = """
        import workers
        workers.open_topic(sys.argv[1] + "/topic")
        assert "multiprocessing" not in sys.modules
        workers.append(1)
        import multiprocessing
        workers.append(2)
    """
    run_with_module(program, tmp_path)
    assert values_in(tmp_path) == [[1, 2]]


def test_exit_function_is_registered_with_multiprocessing_once(
    open_topic: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(process.at_exit, "_registered", set())
    util = multiprocessing.util
    monkeypatch.setattr(util, "Finalize", lambda *what, exitpriority: told.append((*what, exitpriority)))
    monkeypatch.setattr(process, "_POOLS", ("multiprocessing.util",))
    monkeypatch.setattr(util, "register_after_fork", lambda *_: None)  # whose registry outlives this test
    for name in ("a", "b"):
        open_topic(path / name)
    assert told == [(None, process.at_exit.end, process._LAST)] and process._LAST < -5
