"""Machine: a description of the machine that the figures come from, and a real disk to measure on.

Invariant: the description names no path of the machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import subprocess
import tempfile
from pathlib import Path

_PACKAGES = ("fastcrc", "sortedcontainers", "lmdb", "pyarrow", "lz4", "zstandard")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def description(directory: Path) -> dict[str, str]:
    """Return the facts that a reader needs to judge the figures."""
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return {
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "file system": file_system(directory),
        "busy with other work": f"load average {os.getloadavg()[0]:.1f} at the start",
        "system": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": f"{packages}, SQLite {sqlite3.sqlite_version}",
    }


def disk_directory() -> Path:
    """Return a directory for temporary files on a disk; the usual directory is often in memory."""
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    for candidate in candidates:
        if candidate.is_dir() and file_system(candidate) not in _MEMORY_FILE_SYSTEMS:
            return candidate
    raise SystemExit("no directory on a disk found: name one with --dir")


def free_bytes(directory: Path) -> int:
    """Return how many bytes may still be written."""
    return shutil.disk_usage(directory).free


def file_system(directory: Path) -> str:
    """Return the type of the file system a directory is on."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    path = str(directory.resolve())
    best_mount, best_type = "", "unknown"
    for line in mounts.read_text().splitlines():
        _, mount, kind, *_ = line.split()
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best_mount):
            best_mount, best_type = mount, kind
    return best_type


def java_version() -> str:
    """Return the version of the Java that Spark starts."""
    home = os.environ.get("JAVA_HOME")
    java = "java" if home is None else os.path.join(home, "bin", "java")
    found = subprocess.run([java, "-version"], check=True, stderr=subprocess.PIPE, text=True).stderr
    return found.split('"')[1]


def shown_arguments(given: list[str]) -> list[str]:
    """Return the arguments of a command line without the directory, which should not be shown."""
    arguments = [argument for argument in given if not argument.startswith("--dir=")]
    if "--dir" in arguments:
        at = arguments.index("--dir")
        del arguments[at : at + 2]
    return arguments


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
