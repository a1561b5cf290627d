"""A Spark cluster on the loopback interface: a master and a worker as processes of their own, and a bare Python."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pyspark

from conftest import SOURCE

HOME = Path(pyspark.__file__).parent
OF_PYSPARK = ("pyspark", "py4j", "pyarrow", "numpy", "pandas", "python-dateutil", "pytz", "tzdata")


def bare_python(directory: Path) -> Path:
    """An interpreter with PySpark and what PySpark needs, and nothing else."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    for name in OF_PYSPARK:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(distribution.locate_file(top)))
    return python


def environment() -> dict[str, str]:
    """The present environment without a word of Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "LOGLIB"))}
    return kept | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m", "SPARK_NO_DAEMONIZE": "1"}


# Runs a program that sees the first of its arguments, an empty directory, in the place of each path up to `--`.
HIDING = """
empty=$1; shift
while [ "$1" != -- ]; do mount --bind "$empty" "$1" || exit; shift; done
shift; exec "$@"
"""


def can_hide() -> bool:
    """Whether a process may have mounts of its own."""
    command = ["unshare", "--mount", "--map-root-user", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, check=False).returncode == 0


@contextmanager
def cluster(directory: Path, hidden: Iterable[Path]) -> Iterator[str]:
    """A running cluster of one master, and one worker with two cores that does not see some paths; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"spark://127.0.0.1:{port}"
    started: list[subprocess.Popen[bytes]] = []
    work = directory / "work"
    work.mkdir()
    (directory / "empty").mkdir()
    # Slave: what others unmount goes here, too. A copy of a mount would keep its file system alive.
    hiding = [
        "unshare", "--mount", "--propagation", "slave", "--map-root-user", "sh", "-c", HIDING, "sh",
        str(directory / "empty"),
    ]  # fmt: skip
    for role, arguments in (
        ("master.Master", ["--port", str(port)]),
        ("worker.Worker", ["--cores", "2", "--memory", "1g", "--work-dir", str(work), address]),
    ):
        prefix = [*hiding, *map(str, hidden), "--"] if role == "worker.Worker" else []
        command = [*prefix, str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{role}", "--host", "127.0.0.1"]
        with (directory / f"{role}.log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [*command, "--webui-port", "0", *arguments],
                    cwd=directory, env=environment() | {"SPARK_HOME": str(HOME)}, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip
    try:
        yield address
    finally:
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_driver(program: str, *arguments: object, python: Path, directory: Path) -> str:
    """What the program prints as a driver whose executors run with this Python."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    variables = environment() | {"PYTHONPATH": str(SOURCE), "PYSPARK_PYTHON": str(python)}
    ran = subprocess.run(
        command, cwd=directory, env=variables, capture_output=True, text=True, check=False, timeout=280
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout
