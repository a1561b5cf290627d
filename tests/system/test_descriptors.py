"""Descriptors: whatever a service has closed, no file of the library has the number of a standard stream."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conftest import needs_proc, records_of, run_python
from loglib.system.system_calls import above_standard, nameless_file

# The numbers 0, 1 and 2 are closed, and `seen` names what has come to stand there.
CLOSED = """
    import fcntl, os, sys
    out = fcntl.fcntl(1, fcntl.F_DUPFD, 50)
    for each in (0, 1, 2):
        os.close(each)

    seen = []

    def look(after):
        for each in ("0", "1", "2"):
            if os.path.lexists(f"/proc/self/fd/{each}"):
                seen.append((after, each, os.readlink(f"/proc/self/fd/{each}")))

"""


@needs_proc
def test_no_file_of_a_topic_takes_the_place_of_a_closed_standard_stream(tmp_path: Path) -> None:
    program = (
        CLOSED
        + """
    import loglib
    from loglib import Topic

    path = sys.argv[1]
    topic = Topic.open(path, create=True, partitions=2)
    look("open")
    topic.append(b"one", sync=True)
    topic.partition(0).roll()
    look("roll")
    with topic.follow("begin", timeout=0.01) as reader:
        assert reader.poll() and not reader.poll()
        look("follow")
    with topic.group("g") as group:
        list(group.follow(timeout=0.01))
        look("group")
    with loglib.transaction("app") as transaction:
        transaction.append(topic, b"two")
        look("staged")
    look("transaction")
    loglib.copies.snapshot(path, path + "-copy")
    look("snapshot")
    with loglib.copies.Mirror(path, path + "-mirror") as mirror:
        mirror.copy()
        look("mirror")
    if os.fork() == 0:
        with Topic.open(path, mode="r") as reader:
            with reader.follow("end", timeout=0.01) as ends:
                ends.poll()
                look("child")
        os._exit(len(seen))
    assert os.wait()[1] == 0
    topic.close()
    look("close")
    os.write(out, repr(seen).encode())
    """
    )
    assert run_python(program, tmp_path / "t") == "[]"
    assert len(records_of(tmp_path / "t")) == 2


@needs_proc
def test_a_warning_of_a_c_library_does_not_reach_a_log(tmp_path: Path) -> None:
    program = (
        CLOSED
        + """
    from loglib import Topic

    with Topic.open(sys.argv[1], create=True) as topic:
        topic.append(b"one", sync=True)
        for each in (1, 2):
            try:
                os.write(each, b"libfoo: warning: deprecated call")
            except OSError as error:
                seen.append(error.errno)
        topic.append(b"two", sync=True)
    os.write(out, repr(seen).encode())
    """
    )
    assert run_python(program, tmp_path / "t") == "[9, 9]"  # EBADF
    assert [each.value for each in records_of(tmp_path / "t")] == [b"one", b"two"]


def test_a_descriptor_above_the_standard_ones_stays_as_it_is() -> None:
    read, write = os.pipe()
    assert above_standard(read) == read
    os.close(read)
    os.close(write)


def test_a_moved_descriptor_is_the_same_file_and_leaves_its_number_free() -> None:
    program = (
        CLOSED
        + """
    from loglib.system.system_calls import above_standard

    fd = os.open(sys.executable, os.O_RDONLY | os.O_CLOEXEC)
    facts = os.fstat(fd)
    moved = above_standard(fd)
    assert fd == 0 and moved > 2 and os.path.samestat(facts, os.fstat(moved)) and not os.get_inheritable(moved)
    look("moved")
    os.write(out, str(len(seen)).encode())
    """
    )
    assert run_python(program) == "0"


def test_a_nameless_file_takes_bytes_and_is_gone_when_it_is_closed() -> None:
    fd = nameless_file()
    assert fd > 2 and os.fstat(fd).st_nlink == 0
    assert os.pwrite(fd, b"bytes", 0) == 5 and os.pread(fd, 9, 0) == b"bytes"
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
