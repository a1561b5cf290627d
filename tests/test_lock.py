"""The writer lock: one holder, named; free when the holder is gone, whatever became of the file."""

import os
import signal
from pathlib import Path

import pytest

from conftest import needs_proc, needs_root, open_files, start_python
from loglib import CorruptLogError, LockedError
from loglib.files import REAL
from loglib.lock import acquire
from loglib.testing import FaultyFiles


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lock"


HOLD = """
    import sys
    from loglib.files import REAL
    from loglib.lock import acquire
    acquire(REAL, sys.argv[1], 0o600)
    print("held")
    sys.stdin.readline()
"""


def test_second_handle_is_refused_and_told_who_holds_it(file: Path) -> None:
    fd = acquire(REAL, str(file), 0o600)
    with pytest.raises(LockedError, match=f"pid {os.getpid()} ") as raised:
        acquire(REAL, str(file), 0o600)
    assert raised.value.path == str(file) and "since 20" in raised.value.holder
    assert "mode='r'" in str(raised.value) and "shared=True" in str(raised.value)
    os.close(fd)
    os.close(acquire(REAL, str(file), 0o600))


def test_lock_of_another_process_names_it_and_is_free_after_sigkill(file: Path) -> None:
    process = start_python(HOLD, file)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=f"pid {process.pid} "):
        acquire(REAL, str(file), 0o600)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    os.close(acquire(REAL, str(file), 0o600))


def test_lock_kept_by_a_forked_child_says_so(file: Path) -> None:
    program = """
        import os, sys
        from loglib.files import REAL
        from loglib.lock import acquire
        acquire(REAL, sys.argv[1], 0o600)
        if os.fork():
            print(os.getpid(), flush=True)
            os._exit(0)
        sys.stdin.readline()
    """
    process = start_python(program, file)
    assert process.stdout is not None
    parent = int(process.stdout.readline())
    process.wait(60)
    with pytest.raises(LockedError, match=f"a process forked by pid {parent} .*which is gone itself"):
        acquire(REAL, str(file), 0o600)
    process.communicate("\n")
    os.close(acquire(REAL, str(file), 0o600))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"12 34", b"x y z"])
def test_holder_that_has_not_written_its_name_yet_is_another_process(content: bytes, file: Path) -> None:
    fd = acquire(REAL, str(file), 0o600)
    file.write_bytes(content)
    with pytest.raises(LockedError, match="another process"):
        acquire(REAL, str(file), 0o600)
    os.close(fd)


def test_lock_of_a_removed_file_is_no_lock(file: Path) -> None:
    class Removing(type(REAL)):  # type: ignore[misc]
        def try_lock(self, fd: int) -> bool:
            locked = super().try_lock(fd)
            file.unlink()
            return bool(locked)

    with pytest.raises(LockedError, match="replaced the lock file"):
        acquire(Removing(), str(file), 0o600)


@needs_proc
def test_failed_acquire_leaks_no_file_and_no_lock(file: Path) -> None:
    before = open_files()
    for name in ("create", "fstat", "flock", "lstat", "ftruncate", "pwritev"):
        with pytest.raises(OSError):
            acquire(FaultyFiles(name), str(file), 0o600)
        assert open_files() == before
    os.close(acquire(REAL, str(file), 0o600))


@needs_root
def test_holder_of_another_user_is_alive(file: Path) -> None:
    process = start_python(HOLD, file)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    os.chown(file, 65534, 65534)
    for each in file.parents:
        each.chmod(each.stat().st_mode | 0o111)
    os.setresuid(65534, 65534, 0)
    try:
        with pytest.raises(LockedError, match=f"pid {process.pid} "):
            acquire(REAL, str(file), 0o600)
    finally:
        os.setresuid(0, 0, 0)
    process.communicate("\n")


def test_symlink_in_place_of_the_lock_is_refused(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    file.symlink_to(target)
    with pytest.raises(CorruptLogError, match="symbolic links"):
        acquire(REAL, str(file), 0o600)
    assert target.read_bytes() == b"precious"
