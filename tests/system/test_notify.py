"""Waiting: woken by a wake, by a write to a file, or by time; with and without the kernel's help."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import needs_proc, open_files, opened_since, settled_files, start_python
from loglib.system import notify
from loglib.system.notify import Observer, Waiter


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
    monkeypatch.setattr("loglib.system.system_calls._FD_SETSIZE", 0)
    waiter = Waiter([str(file)], use_inotify=False)
    waiter._nap = 60.0
    waiter.wake()
    waiter.wait(None)
    waiter.close()


@needs_proc
def test_missing_file_falls_back_to_polling(tmp_path: Path) -> None:
    before = settled_files()
    waiter = Waiter([str(tmp_path / "none")])
    assert waiter._open is not None and waiter._open.inotify < 0 and waiter._must_look
    waiter.wait(None)
    waiter.close()
    assert not opened_since(before)


def test_used_up_inotify_instances_fall_back_to_polling(file: Path) -> None:
    instances: list[Waiter] = []
    try:
        while not (instances and instances[-1]._must_look) and len(instances) < 5000:
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
    before = settled_files()
    for _ in range(10):
        Waiter([str(file)]).wake()
    assert not opened_since(before)


@needs_proc
def test_wake_after_close_writes_to_no_other_file(tmp_path: Path) -> None:
    """The number of the closed pipe is soon another file's: a segment's, say."""
    waiter = Waiter([])
    assert waiter._open is not None
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


# --- what has changed ---------------------------------------------------------------------------------


@pytest.fixture
def observer() -> Iterator[Observer]:
    observer = Observer()
    yield observer
    observer.close()


def test_observer_says_which_file_was_written_and_what_became_of_a_directory(
    tmp_path: Path, file: Path, observer: Observer
) -> None:
    (tmp_path / "members").mkdir()
    observer.observe_file(("clicks", 0), str(file))
    observer.observe_directory("members", str(tmp_path / "members"))
    assert observer.reports and observer.changed() == {}
    file.write_bytes(b"1")
    assert observer.changed() == {("clicks", 0): {""}}
    (tmp_path / "members" / "a").write_bytes(b"x")
    (tmp_path / "members" / "b").touch()
    assert observer.changed() == {"members": {"a", "b"}}
    (tmp_path / "members" / "a").read_bytes()
    assert observer.changed() == {}
    (tmp_path / "members" / "a").rename(tmp_path / "members" / "c")
    (tmp_path / "members" / "b").unlink()
    assert observer.changed() == {"members": {"b", "c"}}
    observer.forget("members")
    observer.forget("members")
    (tmp_path / "members" / "d").touch()
    assert observer.changed() == {}


def test_observer_hears_of_a_process_that_dies_with_a_file_open(tmp_path: Path, observer: Observer) -> None:
    observer.observe_directory("members", str(tmp_path))
    holder = start_python("import sys, time; file = open(sys.argv[1], 'w'); print(1); time.sleep(60)", tmp_path / "a")
    assert holder.stdout is not None
    holder.stdout.readline()
    observer.changed()
    holder.kill()
    observer.wait(30)
    assert observer.changed() == {"members": {"a"}}
    holder.communicate()


def test_observer_goes_on_with_the_file_that_takes_the_place_of_another(
    tmp_path: Path, file: Path, observer: Observer
) -> None:
    observer.observe_file("it", str(file))
    (tmp_path / "new").write_bytes(b"1")
    (tmp_path / "new").rename(file)
    assert "it" in observer.changed()
    observer.changed()
    file.write_bytes(b"2")
    assert observer.changed() == {"it": {""}}


def test_observer_wait_ends_by_wake_change_and_time(file: Path, observer: Observer) -> None:
    observer.observe_file("it", str(file))
    threading.Timer(0.02, observer.wake).start()
    observer.wait(60)
    assert observer.changed() == {}
    threading.Timer(0.02, file.write_bytes, [b"1"]).start()
    observer.wait(None)
    assert observer.changed() == {"it": {""}}
    observer.wait(0.01)
    observer.changed()
    bell = observer.bell("it")
    assert observer.bell("it") is bell
    for _ in range(100_000):  # more than the pipe holds
        bell.wake()
        observer.wake()
    observer.wait(60)
    assert observer.changed() == {"it": set()}


def test_events_that_were_too_many_count_as_changes_of_everything(
    tmp_path: Path, file: Path, observer: Observer
) -> None:
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    observer.observe_file("it", str(file))
    observer.observe_directory("all", str(tmp_path))
    for number in range(most // 2 + 10):
        (tmp_path / str(number % 50)).write_bytes(b"")
    assert observer.changed() == {"it": set(), "all": set()}
    assert observer.changed() == {}


def test_observer_without_reports_counts_everything_as_changed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Observer(use_inotify=False)
    observer.observe_file("it", str(file))
    observer.observe_directory("all", str(tmp_path))
    assert not observer.reports
    naps = []
    for _ in range(40):
        naps.append(observer._nap)
        monkeypatch.setattr(notify, "monotonic", lambda: 0.0)
        observer._woken_at = 0.0
        observer.wait(0.0 if len(naps) > 3 else None)
        assert observer.changed() == {"it": set(), "all": set()}
    assert naps == sorted(naps) and naps[-1] == 0.01
    observer.progressed()
    assert observer._nap == 0.0001
    observer.forget("it")
    assert observer.changed() == {"all": set()}
    observer.close()


def test_observer_without_reports_sleeps_longer_the_longer_a_look_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Observer(use_inotify=False)
    slept = []

    class Poll:
        def poll(self, timeout: float) -> list[tuple[int, int]]:
            slept.append(timeout)
            return []

    observer._poll = Poll()  # type: ignore[assignment]
    now = iter([10.0, 10.0])
    monkeypatch.setattr(notify, "monotonic", lambda: next(now))
    observer._woken_at = 9.5
    observer.wait(None)
    assert slept == [0.5 * notify._NAP_PER_LOOK * 1000]
    observer.close()


@needs_proc
def test_observer_falls_back_to_looking_where_the_system_has_no_more_watches(tmp_path: Path, file: Path) -> None:
    before = settled_files()
    observer = Observer()
    observer.observe_file("it", str(file))
    observer.observe_file("none", str(tmp_path / "none"))
    observer.observe_file("later", str(file))
    assert not observer.reports
    assert observer.changed() == {"it": set(), "none": set(), "later": set()}
    observer.wait(0.0)
    observer.forget("it")
    observer.close()
    del observer
    assert not opened_since(before)


def test_file_that_is_gone_is_looked_for(file: Path, observer: Observer) -> None:
    observer.observe_file("it", str(file))
    file.unlink()
    assert observer.changed() == observer.changed() == {"it": set()}
    assert not observer.reports


def test_used_up_inotify_instances_leave_an_observer_that_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_inotify", lambda _: None)
    observer = Observer()
    assert not observer.reports
    observer.close()


@needs_proc
def test_closed_observer_is_quiet(file: Path) -> None:
    before = settled_files()
    observer = Observer()
    observer.observe_file("it", str(file))
    observer.close()
    observer.wait(60)
    observer.wake()
    observer.forget("it")
    observer.observe_file("other", str(file))
    assert observer.changed() == {}
    assert not opened_since(before)


def test_closed_observer_has_no_descriptors() -> None:
    observer = Observer()
    assert len(observer.descriptors()) == (2 if observer.reports else 1)
    observer.close()
    assert observer.descriptors() == []


def test_report_that_somebody_else_has_taken_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child shares the descriptors until it has its own."""

    def read(fd: int, size: int) -> bytes:
        raise BlockingIOError

    waiter = Waiter([])
    waiter.wake()
    with monkeypatch.context() as patched:
        patched.setattr(os, "read", read)
        assert waiter.wait(60.0) is False
    waiter.close()


def test_observer_that_a_forked_child_abandons_has_no_open_files(tmp_path: Path) -> None:
    """Also if a frame refers to them for ever: that of a thread which the child does not have."""
    before = open_files()
    observer = Observer()
    waiting = observer._open
    observer.observe_directory("key", str(tmp_path))
    observer.abandon()
    observer.abandon()
    assert not opened_since(before)
    assert observer.descriptors() == []
    del waiting
