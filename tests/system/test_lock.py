"""The writer lock: one holder, named; free when the holder is gone, whatever became of the file."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from listed_files import Listed

from conftest import needs_proc, needs_root, opened_since, settled_files, start_python
from loglib import CorruptLogError, LockedError
from loglib.system.files import REAL
from loglib.system.lock import acquire
from loglib.testing import FaultyFiles, WatchedFiles
from loglib.testing.watched import Call


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lock"


HOLD = """
    import sys
    from loglib.system.files import REAL
    from loglib.system.lock import acquire
    held = acquire(REAL, sys.argv[1], 0o600)
    print("held")
    sys.stdin.readline()
"""


def test_second_handle_is_refused_and_told_who_holds_it(file: Path) -> None:
    lock = acquire(REAL, str(file.parent), 0o600)
    with pytest.raises(LockedError, match=f"pid {os.getpid()} ") as raised:
        acquire(REAL, str(file.parent), 0o600)
    assert raised.value.path == str(file) and "since 20" in raised.value.holder
    assert "mode='r'" in str(raised.value) and "shared=True" in str(raised.value)
    lock.release()
    acquire(REAL, str(file.parent), 0o600).release()


def test_lock_of_another_process_names_it_and_is_free_after_sigkill(file: Path) -> None:
    process = start_python(HOLD, file.parent)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=f"pid {process.pid} "):
        acquire(REAL, str(file.parent), 0o600)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    acquire(REAL, str(file.parent), 0o600).release()


def test_lock_kept_by_a_forked_child_says_so(file: Path) -> None:
    program = """
        import ctypes, os, sys
        from loglib.system.files import REAL
        from loglib.system.lock import acquire
        held = acquire(REAL, sys.argv[1], 0o600)
        if ctypes.CDLL(None).fork():  # as other languages fork, of which Python knows nothing
            print(os.getpid(), flush=True)
            os._exit(0)
        sys.stdin.readline()
    """
    process = start_python(program, file.parent)
    assert process.stdout is not None
    parent = int(process.stdout.readline())
    process.wait(60)
    with pytest.raises(LockedError, match=f"a process forked by pid {parent} .*which is gone itself"):
        acquire(REAL, str(file.parent), 0o600)
    process.communicate("\n")
    acquire(REAL, str(file.parent), 0o600).release()


UNNAMED = rf"another process|pid {os.getpid()} \("


@pytest.mark.parametrize("content", [b"", b"nonsense", b"12 34", b"x y z"])
def test_holder_that_has_not_written_its_name_yet_is_found_in_the_list_of_locks(content: bytes, file: Path) -> None:
    lock = acquire(REAL, str(file.parent), 0o600)
    file.write_bytes(content)
    with pytest.raises(LockedError, match=UNNAMED):
        acquire(REAL, str(file.parent), 0o600)
    with pytest.raises(LockedError, match="another process"):
        acquire(Listed(), str(file.parent), 0o600)
    lock.release()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_second_writer_is_refused_although_the_lock_file_is_gone(how: str, file: Path) -> None:
    """Who removed a lock file that was in the way got a second writer in, and both wrote the same segment."""
    lock = acquire(REAL, str(file.parent), 0o600)
    file.unlink()
    if how == "replaced":
        file.write_bytes(b"")
    with pytest.raises(LockedError, match=UNNAMED):
        acquire(REAL, str(file.parent), 0o600)
    lock.release()
    acquire(REAL, str(file.parent), 0o600).release()


def test_releasing_twice_releases_once(file: Path) -> None:
    lock = acquire(REAL, str(file.parent), 0o600)
    lock.release()
    second = acquire(REAL, str(file.parent), 0o600)
    lock.release()
    with pytest.raises(LockedError):
        acquire(REAL, str(file.parent), 0o600)
    second.release()


def test_name_of_the_holder_fits_on_a_full_disk(file: Path) -> None:
    acquire(REAL, str(file.parent), 0o600).release()
    written: list[str] = []

    class Watching(WatchedFiles):
        def before(self, call: Call) -> None:
            written.append(call.name)

    acquire(Watching(), str(file.parent), 0o600).release()
    assert written.index("pwritev") < written.index("ftruncate"), "a block that was let go may not be had again"


@pytest.mark.parametrize("moment", ["flock", "close"])
def test_lock_that_is_taken_or_let_go_during_a_fork_is_not_kept_by_the_child(moment: str, file: Path) -> None:
    """A child forked between the opening of the lock and its registration kept the partition locked for ever."""
    reached, forked = threading.Event(), threading.Event()

    class Waiting(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == moment and threading.current_thread() is other:
                reached.set()
                forked.wait(0.5)  # which the fork does not let it do

    def take_and_let_go() -> None:
        acquire(Waiting(), str(file.parent), 0o600).release()

    other = threading.Thread(target=take_and_let_go)
    other.start()
    assert reached.wait(60)
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    forked.set()
    other.join()
    try:
        acquire(REAL, str(file.parent), 0o600).release()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@needs_proc
def test_failed_acquire_leaks_no_file_and_no_lock(file: Path) -> None:
    before = settled_files()
    for name in ("open_directory", "flock", "create", "fstat", "pwritev", "ftruncate"):
        with pytest.raises(OSError):
            acquire(FaultyFiles(name), str(file.parent), 0o600)
        assert not opened_since(before)
    acquire(REAL, str(file.parent), 0o600).release()


@needs_root
def test_holder_of_another_user_is_alive(file: Path) -> None:
    process = start_python(HOLD, file.parent)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    os.chown(file, 65534, 65534)
    for each in file.parents:
        each.chmod(each.stat().st_mode | 0o555)
    os.setresuid(65534, 65534, 0)
    try:
        with pytest.raises(LockedError, match=f"pid {process.pid} "):
            acquire(REAL, str(file.parent), 0o600)
    finally:
        os.setresuid(0, 0, 0)
    process.communicate("\n")


def test_symlink_in_place_of_the_lock_is_refused(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    file.symlink_to(target)
    with pytest.raises(CorruptLogError, match="symbolic links"):
        acquire(REAL, str(file.parent), 0o600)
    assert target.read_bytes() == b"precious"


def test_control_characters_of_a_lock_file_reach_no_message(file: Path) -> None:
    """Its text is anybody's who may write to the directory, and messages go to terminals and logs."""
    lock = acquire(REAL, str(file.parent), 0o600)
    file.write_bytes(b"%d now\x1b[2J\x07 \x1b]0;title\x07evil\r\nERROR: forged line\x00\xff\n" % os.getpid())
    with pytest.raises(LockedError, match="evil") as caught:
        acquire(REAL, str(file.parent), 0o600)
    assert str(caught.value).isprintable() and caught.value.holder.isprintable()
    lock.release()
