"""Hosts on this machine: each with its own network, mounts, processes and name. Only one directory is common.

The first process of a host is the init of a PID namespace. If it is killed, the kernel kills all processes of the
host at once. Host 1 has a bridge; virtual cables lead from it to the others. Nothing of this is visible outside of the
hosts, and it goes with them.
"""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from spark_cluster import HOME, environment

from conftest import SOURCE

NETWORK = "10.213.47"
# An empty disk of its own stands in the place of the directory $1, and $2 below it stays the common directory.
BEGIN = """
set -e
mount --bind "$2" /mnt
mount -t tmpfs none "$1"
mkdir -p "$2" "$1/local"
mount --move /mnt "$2"
hostname "$3"
printf '127.0.0.1 localhost\\n%s' "$4" > "$1/local/hosts"
mount --bind "$1/local/hosts" /etc/hosts
mount -t proc none /proc
ip link set lo up
echo begun
exec sleep infinity
"""
# Slave: what other tests unmount goes here, too. A copy of a mount would keep its file system alive.
ISOLATED = ["unshare", "--net", "--mount", "--propagation", "slave", "--uts", "--pid", "--fork", "--kill-child"]


def can_be_hosts() -> bool:
    """Whether this process may make namespaces, and has the programs for that."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    command = [*ISOLATED, "ip", "link", "add", "tried", "type", "bridge"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


class Host:
    """A running host."""

    def __init__(self, number: int, count: int, directory: Path, shared: Path) -> None:
        self.name = f"host{number}"
        self.address = f"{NETWORK}.{number}"
        self.directory = directory
        names = "".join(f"{NETWORK}.{each} host{each}\n" for each in range(1, count + 1))
        command = [*ISOLATED, "sh", "-c", BEGIN, "sh", str(directory), str(shared), self.name, names]
        self._unshare = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._unshare.stdout is not None and self._unshare.stdout.readline() == b"begun\n"
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text()
        self._init = int(children)
        self._started: list[subprocess.Popen[bytes]] = []

    def ip(self, words: str) -> None:
        """Set up the host's network."""
        subprocess.run(["nsenter", f"--target={self._init}", "--net", "ip", *words.split()], check=True)

    def connect(self, other: "Host") -> None:
        """A cable from this host's bridge to the other one."""
        self.ip(f"link add to-{other.name} type veth peer name eth0 netns {other._init}")
        self.ip(f"link set to-{other.name} master bridge up")
        other.ip(f"address add {other.address}/24 dev eth0")
        other.ip("link set eth0 up")

    def start(self, *command: object, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program there; its output goes to a file outside."""
        enter = ["nsenter", f"--target={self._init}", "--net", "--mount", "--uts", "--pid"]
        local = {"SPARK_LOCAL_IP": self.address, "SPARK_LOCAL_DIRS": str(self.directory / "local")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*enter, *map(str, command)], env=environment() | local | variables,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    def kill_all(self) -> None:
        """All processes are killed, and the kernel of the host lives on: it closes their connections."""
        enter = ["nsenter", f"--target={self._init}", "--pid"]
        subprocess.run([*enter, "sh", "-c", "kill -9 -1"], check=False)  # to all but the init and itself
        for process in self._started:
            process.wait(30)

    def kill(self) -> None:
        """All processes of the host die at once."""
        if self._unshare.poll() is None:
            os.kill(self._init, signal.SIGKILL)
            assert self._unshare.stdout is not None
            self._unshare.stdout.close()
        for process in [*self._started, self._unshare]:
            process.wait(30)


@contextmanager
def hosts(count: int, directory: Path, shared: Path) -> Iterator[list[Host]]:
    """Hosts with addresses in one network; at the end they are killed."""
    with ExitStack() as running:
        made = []
        for number in range(1, count + 1):
            host = Host(number, count, directory, shared)
            running.callback(host.kill)
            made.append(host)
        first, *others = made
        first.ip("link add bridge type bridge")
        first.ip(f"address add {first.address}/24 dev bridge")
        first.ip("link set bridge up")
        for each in others:
            first.connect(each)
        yield made


@contextmanager
def cluster_of_hosts(workers: int, directory: Path, shared: Path, logs: Path) -> Iterator[tuple[str, list[Host]]]:
    """A master on host 1 and one worker with one core on each other host; the master's address, and the hosts."""
    with hosts(workers + 1, directory, shared) as made:
        first = made[0]
        address = f"spark://{first.address}:7077"
        command = [HOME / "bin" / "spark-class", "org.apache.spark.deploy.master.Master", "--host", first.address]
        master = logs / "master.log"
        first.start(*command, "--port", 7077, "--webui-port", 0, log=master, SPARK_HOME=str(HOME))
        _wait_for("I have been elected leader", 1, master)  # who comes too early tries again after many seconds
        for each in made[1:]:
            command = [HOME / "bin" / "spark-class", "org.apache.spark.deploy.worker.Worker", "--host", each.address]
            sizes = ["--cores", 1, "--memory", "1g", "--webui-port", 0, "--work-dir", directory / "local" / "work"]
            each.start(*command, *sizes, address, log=logs / f"{each.name}.log", SPARK_HOME=str(HOME))
        _wait_for("Registering worker", workers, master)
        yield address, made


def _wait_for(line: str, times: int, log: Path) -> None:
    end = time.monotonic() + 120
    while log.read_text().count(line) < times:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def start_driver(host: Host, program: str, *arguments: object, log: Path) -> subprocess.Popen[bytes]:
    """Start the program as a driver on the host."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return host.start(*command, log=log, PYTHONPATH=str(SOURCE), PYSPARK_PYTHON=sys.executable)
