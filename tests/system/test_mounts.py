"""system/lock.py: a writer is warned where another host could write as well."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loglib import Topic, testing
from loglib.system.files import REAL, Files
from loglib.system.lock import file_system_of, network_file_system

TABLE = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:5 / /proc rw,nosuid - proc proc rw
30 21 0:40 / /mnt/share rw,relatime shared:7 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /mnt/share/local\\040disk rw - xfs /dev/sdb1 rw
32 21 0:42 / /home/u/remote rw master:2 propagate_from:1 - fuse.sshfs u@host: rw
33 21 0:43 / /twice rw - cifs //host/a rw
34 33 0:44 / /twice rw - ext4 /dev/sdc1 rw
a line that is cut
"""


class Mounted(Files):
    """The real files, but for the table of mounts."""

    def __init__(self, table: str | None) -> None:
        self.table = table

    def open_read(self, path: str, *, dir_fd: int | None = None) -> int:
        if not path.startswith("/proc"):
            return super().open_read(path, dir_fd=dir_fd)
        if self.table is None:
            raise FileNotFoundError(path)
        read_end, write_end = os.pipe()
        os.write(write_end, self.table.encode())
        os.close(write_end)
        return read_end


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/var/log", "ext4"),
        ("/mnt/share", "nfs4"),
        ("/mnt/share/topics/0000", "nfs4"),
        ("/mnt/shared", "ext4"),
        ("/mnt/share/local disk/t", "xfs"),
        ("/home/u/remote/t", "fuse.sshfs"),
        ("/twice/t", "ext4"),
    ],
)
def test_longest_mount_point_decides(path: str, kind: str) -> None:
    assert file_system_of(TABLE, path) == kind


def test_table_without_the_root_says_nothing() -> None:
    assert file_system_of("", "/var") == ""


def test_only_what_hosts_may_share_is_named(tmp_path: Path) -> None:
    files = Mounted(TABLE)
    assert network_file_system(files, "/mnt/share/t") == "nfs4"
    assert network_file_system(files, "/home/u/remote/t") == "fuse.sshfs"
    assert network_file_system(files, "/var/t") is None
    assert network_file_system(Mounted(None), "/mnt/share/t") is None
    assert network_file_system(REAL, str(tmp_path)) is None or not tmp_path.is_dir()


@pytest.mark.parametrize(("kind", "warned"), [("nfs4", True), ("ext4", False)])
def test_writer_on_a_network_file_system_is_warned(
    kind: str, warned: bool, open_topic: Callable[..., Topic], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = f"21 1 8:1 / / rw - {kind} somewhere rw\n"
    files: Any = Mounted(table)
    with caplog.at_level(logging.WARNING, "loglib"):
        open_topic(files=files).close()
    assert (f"is on {kind}" in caplog.text) is warned
    caplog.clear()
    with caplog.at_level(logging.WARNING, "loglib"):
        testing.open_topic(path, mode="r", files=files).close()
    assert caplog.text == ""


def test_each_directory_of_a_topic_with_replicas_is_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = f"21 1 8:1 / / rw - ext4 disk rw\n22 21 0:1 / {tmp_path}/far rw - nfs4 somewhere rw\n"
    files: Any = Mounted(table)
    with caplog.at_level(logging.WARNING, "loglib"):
        testing.open_topic(tmp_path / "near" / "t", files=files, replicas=[tmp_path / "far" / "t"]).close()
    assert [f"{tmp_path}/far/t is on nfs4" in each for each in caplog.messages] == [True]
