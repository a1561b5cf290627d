"""The seam: all that the library does to files goes through `system/system_calls.py`, in the order that tests see."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from counts import need

from conftest import QUIET, SOURCE, run_python, values_of
from loglib import FlushPolicy, Retention, Topic, testing
from loglib.system.files import Files
from loglib.system.system_calls import SYSTEM_CALLS
from loglib.testing import MemoryFiles

# Everything that a topic's owner can do to its files, by the name `files`, at the path `path`.
WORKLOAD = """
    import io, os
    from datetime import timedelta
    from loglib import FlushPolicy, Retention, testing
    from loglib.system.directory import Directory

    QUIET = dict(flush=FlushPolicy(records=None, interval=None, bytes=None), segment_age=None)

    def work(path, files):
        policies = QUIET | dict(retention=Retention(age=None, bytes=20_000), segment_bytes=8192)
        with testing.open_topic(path, partitions=2, files=files, **policies) as topic:
            for number in range(30):
                topic.append_many([b"x" * 900], partition=number % 2)
                topic.append(b"y", partition=0, sync=True)
            topic.append_many([b"p"], partition=1, producer=("p", 1))
            topic.flush()
            topic.partition(0).roll()
            topic.retain()
            assert len(list(topic.read())) > 10
            assert topic.follow("begin", timeout=0.01).poll()
            topic.partition(0).verify()
            out = io.BytesIO()
            frame = files.create(path + ".frame", 0o600)
            topic.partition(0).transfer(frame, topic.partition(0).log_start_offset)
            topic.partition(1).receive(io.BytesIO(files.pread(frame, 1 << 20, 0)))
            files.close(frame)
        files.link(path + ".frame", path + ".copy")
        with Directory.open(files, path) as directory:
            directory.write_new(".one", b"x", 0o600)
            directory.link(".one", ".other")
        segment = max(name for name in files.sizes(path + "/0000") if name.endswith(".log"))
        fd = files.open_write(f"{path}/0000/{segment}")
        files.write_all(fd, [b"torn" * 50], files.size(fd))
        files.close(fd)
        files.unlink(path + "/0001/watermark")
        with testing.open_topic(path, files=files) as topic:
            recovery = topic.partition(0).recovery
            assert recovery.cut_bytes == 200 and topic.partition(1).recovery.watermark_lost
        with testing.open_topic(path, mode="r", files=files) as topic:
            assert len(list(topic.read())) > 10
"""


def test_nothing_but_the_seam_touches_files(tmp_path: Path) -> None:
    """Seen by the interpreter itself, which tells of every file that is opened, made, renamed, removed or locked."""
    program = (
        WORKLOAD
        + """
    import ctypes, os, sys  # the thread that watches inboxes imports ctypes a little later
    from loglib.testing import RecordingFiles

    work(sys.argv[1] + "/first", RecordingFiles())  # imports what is imported late
    SEAM = ("/system/files.py", "/system/system_calls.py", "/system/files_wrapper.py", "/testing/watched.py")
    FILES = ("open", "os.", "fcntl.", "shutil.", "glob.", "pathlib.", "tempfile.")
    seen, strangers = set(), set()

    def audit(event, args):
        if not event.startswith(FILES):
            return
        frame = sys._getframe(1)
        while frame is not None and "/loglib/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            seen.add(event)
            if not frame.f_code.co_filename.endswith(SEAM):
                strangers.add((event, frame.f_code.co_filename, frame.f_lineno))

    sys.addaudithook(audit)
    work(sys.argv[1] + "/second", RecordingFiles())
    assert {"open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.truncate", "os.listdir", "fcntl.flock"} <= seen
    assert not strangers, strangers
    """
    )
    run_python(program, tmp_path)


@pytest.mark.usefixtures("unmeasured")
def test_recorded_calls_are_those_the_kernel_sees(tmp_path: Path) -> None:
    """The list that the crash states are made from is the truth: strace sees the same calls in the same order."""
    need(shutil.which("strace"), "strace")
    program = tmp_path / "program.py"
    program.write_text(
        "\n".join(line[4:] for line in WORKLOAD.splitlines())
        + """
import json, sys
from loglib.testing import CHANGES, RecordingFiles

files = RecordingFiles()
work(sys.argv[1], files)
recorded = []
for call in files.calls:
    if call.name in CHANGES:
        size = sum(map(len, call.arguments[0])) if call.name == "pwritev" else 0
        rest = {"pwritev": call.arguments[1:], "ftruncate": call.arguments, "rename": call.arguments}
        rest |= {"link": call.arguments}
        recorded.append([call.name, call.path, *rest.get(call.name, ()), *([size] if size else [])])
print(json.dumps(recorded))
""",
        "utf-8",
    )
    changing = (
        "open,openat,openat2,creat,write,writev,pwrite64,pwritev,pwritev2,truncate,ftruncate,fallocate,fsync,fdatasync,"
        "sync,syncfs,sync_file_range,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mkdir,"
        "mkdirat,rmdir,copy_file_range"
    )
    log = tmp_path / "strace"
    command = ["strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={changing}"]
    topic = tmp_path / "below" / "topic"
    topic.parent.mkdir()
    command += [sys.executable, str(program), str(topic)]
    environment = {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    recorded = [tuple(call) for call in json.loads(ran.stdout)]
    lines = whole_lines(log.read_text("utf-8").splitlines())
    traced = [call for line in lines if (call := traced_call(line, str(topic.parent)))]
    assert recorded == traced
    assert len(traced) > 200
    assert {call[0] for call in traced} >= {"create", "pwritev", "datasync", "rename", "link", "unlink"}


TRACED = re.compile(r"^\d+ +(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
NAMES = {
    "fdatasync": "datasync", "openat": "create", "pwritev2": "pwritev", "renameat": "rename", "renameat2": "rename",
    "linkat": "link", "unlinkat": "unlink", "mkdirat": "mkdir",
}  # fmt: skip


def whole_lines(lines: list[str]) -> list[str]:
    """Lines of strace's with those joined that it has parted, because another thread came or went meanwhile."""
    whole: list[str] = []
    parted: dict[str, int] = {}  # by thread: which line
    for line in lines:
        thread, _, rest = line.partition(" ")
        if rest.lstrip().startswith("<... "):
            whole[parted.pop(thread)] += rest.partition("resumed>")[2]
            continue
        if line.endswith(" <unfinished ...>"):
            parted[thread] = len(whole)
        whole.append(line.removesuffix(" <unfinished ...>"))
    return whole


def traced_call(line: str, below: str) -> tuple[object, ...] | None:
    """A line of strace's as a recorded call, if it changes something below the directory."""
    found = TRACED.match(line)
    if found is None or found["result"].startswith("-"):
        return None
    name, arguments = found["name"], found["arguments"]
    if name == "openat" and "O_CREAT" not in arguments:
        return None
    paths = [
        os.path.join(directory, name or "")  # of `name` alone if it is a whole path
        for directory, name in re.findall(r'(?:\w+<([^>]*)>(?:, )?)?(?:"([^"]*)")?', arguments)
        if directory or name
    ]
    paths = [path.rstrip("/") for path in paths]
    if not paths or not paths[0].startswith(below):
        return None
    if name == "write" and paths[0].endswith(".frame"):  # a stream, to the library
        return None
    numbers = [int(each) for each in re.findall(r", (\d+)(?=,|$)", arguments)]
    call: tuple[object, ...] = (NAMES.get(name, name), paths[0])
    if name in ("pwritev", "pwritev2"):  # the second has flags behind the position
        return *call, numbers[-1 if name == "pwritev" else -2], int(found["result"])
    if name == "ftruncate":
        return *call, numbers[-1]
    if call[0] in ("rename", "link"):
        return *call, paths[1]
    return call


def test_operations_on_files_replace_no_system_call() -> None:
    assert not vars(Files).keys() & set(SYSTEM_CALLS)
    assert not [value for value in vars(Files).values() if isinstance(value, staticmethod)]


# --- files that the system does not know ------------------------------------------------------------------


def test_reader_of_another_topic_follows_files_in_memory(tmp_path: Path) -> None:
    """No inotify there, though files of these names may exist: it looks every few milliseconds."""
    path = tmp_path / "topic"
    Topic.open(path, create=True, **QUIET).close()  # the real files by the same names, which never change
    files = MemoryFiles()
    with testing.open_topic(
        path, files=files, **QUIET
    ) as writer, testing.open_topic(path, mode="r", files=files) as topic:
        reader = topic.follow("begin", timeout=60)
        found: list[bytes | None] = []
        thread = threading.Thread(target=lambda: found.append(next(iter(reader)).value))
        thread.start()
        writer.append(b"seen", sync=True)
        thread.join(60)
        assert found == [b"seen"]
        reader.close()
        assert values_of(Topic.open(path, mode="r")) == []


def test_clocked_policies_work_in_memory() -> None:
    files = MemoryFiles()
    policy = FlushPolicy(records=None, interval=timedelta(milliseconds=1).total_seconds(), bytes=None)
    with testing.open_topic("/topic", files=files, flush=policy, retention=Retention(age=timedelta(days=1))) as topic:
        reader = topic.follow("begin", timeout=60)
        topic.append(b"by the clock")
        assert next(iter(reader)).value == b"by the clock"
