"""Waiting: woken by a wake, by a write to a file, or by time; with and without the kernel's help."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from conftest import needs_proc, open_files
from loglib.wait import Waiter


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "watermark"
    path.write_bytes(b"0")
    return path


def test_wake_ends_the_present_wait(file: Path) -> None:
    for paths in ([], [str(file)]):
        waiter = Waiter(paths)
        threading.Timer(0.02, waiter.wake).start()
        waiter.wait(60)
        waiter.close()


def test_wake_that_came_before_is_not_missed() -> None:
    waiter = Waiter([])
    for _ in range(100_000):  # more than the pipe holds
        waiter.wake()
    waiter.wait(60)
    waiter.wait(0.0)
    waiter.close()


def test_write_that_came_before_is_not_missed(file: Path) -> None:
    waiter = Waiter([str(file)])
    file.write_bytes(b"1")
    waiter.wait(60)
    waiter.close()


def test_write_to_any_of_the_files_wakes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    for each in files:
        each.write_bytes(b"0")
    waiter = Waiter(map(str, files))
    for each in files:
        threading.Timer(0.01, each.write_bytes, [b"1"]).start()
        waiter.wait(60)
    waiter.close()


def test_timeout_ends_a_wait_in_which_nothing_happens(file: Path) -> None:
    for waiter in (Waiter([]), Waiter([str(file)]), Waiter([str(file)], use_inotify=False)):
        waiter.wait(0)
        waiter.wait(-1.0)
        began = time.monotonic()
        waiter.wait(0.01)
        assert time.monotonic() - began < 30
        waiter.close()


def test_polling_naps_grow_while_nothing_happens_and_shrink_after_progress(file: Path) -> None:
    waiter = Waiter([str(file)], use_inotify=False)
    naps = []
    for _ in range(40):
        naps.append(waiter._nap)
        waiter.wait(None)
    assert naps == sorted(naps) and naps[0] == 0.0001 and naps[-1] == 0.01
    waiter.progressed()
    assert waiter._nap == 0.0001
    waiter.close()


def test_wake_ends_a_nap_of_polling(file: Path) -> None:
    waiter = Waiter([str(file)], use_inotify=False)
    waiter._nap = 60.0
    threading.Timer(0.02, waiter.wake).start()
    waiter.wait(None)
    waiter.close()


def test_high_file_numbers_are_waited_for_without_select(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.wait._FD_SETSIZE", 0)
    waiter = Waiter([str(file)], use_inotify=False)
    waiter._nap = 60.0
    waiter.wake()
    waiter.wait(None)
    waiter.close()


@needs_proc
def test_missing_file_falls_back_to_polling(tmp_path: Path) -> None:
    before = open_files()
    waiter = Waiter([str(tmp_path / "none")])
    assert waiter._open.inotify < 0 and waiter._must_look
    waiter.wait(None)
    waiter.close()
    assert open_files() == before


def test_used_up_inotify_instances_fall_back_to_polling(file: Path) -> None:
    instances: list[Waiter] = []
    try:
        while (not instances or instances[-1]._open.inotify >= 0) and len(instances) < 5000:
            instances.append(Waiter([str(file)]))
        assert instances[-1]._must_look, "this system gives out inotify instances without end"
        instances[-1].wait(None)
    except OSError as error:
        if error.errno != errno.EMFILE:  # files ran out first
            raise
    finally:
        for each in instances:
            each.close()


@needs_proc
def test_dropped_waiter_leaks_nothing(file: Path) -> None:
    before = open_files()
    for _ in range(10):
        Waiter([str(file)]).wake()
    assert open_files() == before


@needs_proc
def test_wake_after_close_writes_to_no_other_file(tmp_path: Path) -> None:
    """The number of the closed pipe is soon another file's: a segment's, say."""
    waiter = Waiter([])
    numbers = {waiter._open.wake_in, waiter._open.wake_out}
    waiter.close()
    files = [os.open(tmp_path / f"{number}", os.O_RDWR | os.O_CREAT) for number in range(4)]
    assert numbers & set(files)
    waiter.wake()
    waiter.close()
    for each in files:
        assert os.fstat(each).st_size == 0
        os.close(each)


def test_closed_waiter_does_not_wait(file: Path) -> None:
    waiter = Waiter([str(file)])
    waiter.close()
    waiter.wait(None)


def test_wakes_and_closes_of_many_threads_never_write_elsewhere(tmp_path: Path) -> None:
    stop = threading.Event()
    waiters: list[Waiter] = [Waiter([])]

    def wake() -> None:
        while not stop.is_set():
            waiters[-1].wake()

    threads = [threading.Thread(target=wake) for _ in range(4)]
    for each in threads:
        each.start()
    path = tmp_path / "victim"
    for _ in range(500):
        waiters.append(Waiter([]))
        waiters[-2].close()
        fds = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(3)]
        assert os.fstat(fds[0]).st_size == 0
        for fd in fds:
            os.close(fd)
        waiters.pop(0)
    stop.set()
    for each in threads:
        each.join()
    for waiter in waiters:
        waiter.close()
