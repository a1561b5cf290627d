"""Disks: file systems of a test's own, to fill up, to take the power from, and to wear out.

Invariant: what is mounted here is unmounted when its `with` ends, however it ends, and then nothing
of it is left: the images of loop devices lie in memory, in a file system that goes with them.

    memory      a tmpfs with a limit on bytes or files
    disk        ext4 or XFS on a loop device: its power can be cut, and its writing can fail

All need root and Linux.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from counts import need

__all__ = ["DROP_JOURNAL", "FLUSH_JOURNAL", "Disk", "disk", "fill", "memory", "mount", "run", "unmount"]

# _IOR('X', 125, __u32) of the kernel's fs.h: the file system stops at once, as it does when the machine loses
# power. Everything after it gives EIO, and mounting it again replays the journal.
_SHUTDOWN = 0x8004587D
DROP_JOURNAL = 2  # what has not reached the disk is gone
FLUSH_JOURNAL = 1  # the journal is written first: names and sizes, but not the bytes

# Nothing that would be done in the background after mounting, since the whole life of a mount is some milliseconds.
_MAKE = {
    "ext4": (
        "mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
    ),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
}  # fmt: skip
_IMAGE_BYTES = {"ext4": 64 << 20, "xfs": 320 << 20}  # XFS refuses less than 300 MiB
_PATIENCE_S = 60.0
_PACKAGES = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs"}


def run(*command: str | Path) -> str:
    """Run a system's program; returns what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout.strip()


def mount(*arguments: str | Path) -> None:
    run("mount", *arguments)


def unmount(point: Path) -> None:
    """Unmount, also under files that are still open: these go when they are closed."""
    run("umount", "--lazy", point)


@contextmanager
def memory(point: Path, options: str) -> Iterator[Path]:
    """A tmpfs mounted at `point`, which is made."""
    need(os.geteuid() == 0, "root, to mount a file system")
    point.mkdir()
    mount("-t", "tmpfs", "-o", options, "tmpfs", point)
    try:
        yield point
    finally:
        unmount(point)


class Disk:
    """A file system on a loop device. Use through `disk`."""

    def __init__(self, image: Path, device: str, point: Path, options: str) -> None:
        self.image = image
        self.device = device
        self.point = point
        self.options = options
        self.mounted = False
        self._queue = Path("/sys/block", Path(device).name, "queue/max_sectors_kb")
        self._request_kib = ""

    def mount(self) -> None:
        mount("-o", self.options, self.device, self.point)
        self.mounted = True

    def unmount(self) -> None:
        """Unmount at once; an error if a file is still open, since what follows would not be a new start."""
        run("umount", self.point)
        self.mounted = False
        # A process with a view of the mounts of its own may still have this one, if it began meanwhile. Then the same
        # file system would be mounted again, with all that is in memory.
        deadline = time.monotonic() + _PATIENCE_S
        while any(Path("/sys/fs", kind, Path(self.device).name).exists() for kind in _MAKE):
            assert time.monotonic() < deadline, "another process keeps the file system mounted"
            time.sleep(0.001)

    def leave(self) -> None:
        if self.mounted:
            unmount(self.point)

    def remount(self) -> None:
        """Unmount and mount: what was only in memory is gone, and the journal is replayed."""
        self.unmount()
        self.mount()

    def cut_power(self, flag: int = DROP_JOURNAL) -> None:
        """Stop the file system in mid-air."""
        directory = os.open(self.point, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(directory, _SHUTDOWN, struct.pack("I", flag))
        finally:
            os.close(directory)

    def wear_out(self) -> None:
        """Have every block that is not in use refuse to be written, as a thin volume does that has run out.

        The file system does not know: it takes writes, and learns when it writes them back. Its own blocks
        and those of files that are there are not affected.
        """
        # The loop device takes a write that has failed after its first page for a good one (Linux 6.18), which
        # no disk would do: one page at a time, then. The blocks of the file systems here are as large as pages.
        self._request_kib = self._queue.read_text()
        self._queue.write_text("4")
        with self.image.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, self.image.stat().st_size)  # what is in use has its place
        run("fstrim", self.point)  # and what is not gives it back
        self.wear_out_further()

    def wear_out_further(self) -> None:
        """Take the room that the trim has given back since then: the system goes on with it in the background."""
        fill(self.image.parent)

    def mend(self) -> None:
        """End what `wear_out` began."""
        (self.image.parent / "filler").unlink(missing_ok=True)
        if self._request_kib:
            self._queue.write_text(self._request_kib)


def fill(directory: Path) -> Path:
    """Take up the rest of the room in a file system; returns the file that has it."""
    path = directory / "filler"
    with path.open("ab", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return path


@contextmanager
def disk(directory: Path, kind: str, *, options: str = "noatime", size_bytes: int = 0) -> Iterator[Disk]:
    """A new file system of the kind, mounted at `directory`/disk; its image is in a tmpfs beside it."""
    program, size = _MAKE[kind][0], size_bytes or _IMAGE_BYTES[kind]
    need(shutil.which(program), f"{program} (Debian's {_PACKAGES[program]})")
    with memory(directory / "memory", f"size={size + (32 << 20)}") as store, ExitStack() as undo:
        image = store / "image"
        image.touch()
        os.truncate(image, size)  # sparse
        run(*_MAKE[kind], image)
        device = _attach(image)
        undo.callback(run, "losetup", "--detach", device)
        made = Disk(image, device, directory / "disk", options)
        made.point.mkdir()
        made.mount()
        undo.callback(made.leave)
        undo.callback(made.mend)
        yield made


def _attach(image: Path) -> str:
    device = ""
    try:
        device = run("losetup", "--find", "--show", image)
    except OSError as error:
        need(False, f"loop devices ({error})")
    return device
