"""system/lock.py: who holds a lock is seen in the system's list, and nobody's lock is touched for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from listed_files import Listed

from conftest import start_python
from loglib.system.files import REAL
from loglib.system.lock import acquire, seen_locks
from loglib.testing import MemoryFiles, RecordingFiles

HOLD = """
    import sys
    from loglib.system.files import REAL
    from loglib.system.lock import acquire
    held = acquire(REAL, sys.argv[1], 0o600)
    print("held", flush=True)
    sys.stdin.readline()
"""
ROOT = "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"

linux = pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="the system has no list of locks")


def line_of(path: Path, kind: str = "FLOCK", device: str | None = None) -> str:
    facts = path.stat()
    of = device or f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    return f"1: {kind}  ADVISORY  WRITE 42 {of}:{facts.st_ino} 0 EOF\n"


@linux
def test_lock_of_another_process_is_seen_until_it_ends(tmp_path: Path) -> None:
    held, free = tmp_path / "held", tmp_path / "free"
    held.mkdir()
    free.mkdir()
    with start_python(HOLD, held, stdin=subprocess.PIPE) as holding:
        assert holding.stdout is not None and holding.stdin is not None
        assert holding.stdout.readline().strip() == "held"
        assert seen_locks(REAL, [str(held), str(free)]) == {str(held): True, str(free): False}
        holding.stdin.close()
        holding.wait(30)
    assert seen_locks(REAL, [str(held)]) == {str(held): False}


@linux
def test_looking_takes_no_lock(tmp_path: Path) -> None:
    held = acquire(REAL, str(tmp_path), 0o600)
    files = RecordingFiles()
    assert seen_locks(files, [str(tmp_path)]) == {str(tmp_path): True}
    assert files.count("flock", "create", "open_write") == 0
    held.release()


@pytest.mark.parametrize(
    ("kind", "device", "seen"),
    [
        ("FLOCK", None, True),
        ("POSIX", None, False),
        ("-> FLOCK", None, False),
        ("FLOCK", "08:01", True),
        ("FLOCK", "08:02", False),
    ],
    ids=["held", "another kind", "waited for", "the device of the mount", "another device"],
)
def test_line_of_the_list_counts_if_it_names_the_directory(
    kind: str, device: str | None, seen: bool, tmp_path: Path
) -> None:
    files = Listed(ROOT, line_of(tmp_path, kind, device))
    assert seen_locks(files, [str(tmp_path)]) == {str(tmp_path): seen}


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "overlay", "cifs"])
def test_file_system_that_keeps_its_locks_elsewhere_cannot_be_seen(kind: str, tmp_path: Path) -> None:
    assert seen_locks(Listed(ROOT.replace("ext4", kind), line_of(tmp_path)), [str(tmp_path)]) is None


def test_system_without_a_list_cannot_be_seen(tmp_path: Path) -> None:
    assert seen_locks(Listed(ROOT, None), [str(tmp_path)]) is None
    assert seen_locks(MemoryFiles(), [str(tmp_path)]) is None


