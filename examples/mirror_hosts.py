"""Mirror hosts: a topic is copied to another host while it is written, over a link that breaks all the time.

The two hosts are network namespaces of this machine, joined by a virtual cable. While one host writes, the cable is
pulled and plugged in again, and each end of the stream is killed and started again, at random. At the end both hosts
have the same bytes. It needs Linux, root, and `ip` of iproute2.

    sudo python examples/mirror_hosts.py --seconds 20
    sudo python examples/mirror_hosts.py --cuts 5 --seed 1
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from loglib import LogError, Topic

PORT = "9900"
WRITER = """
import sys
from loglib import Topic

with Topic.open(sys.argv[1], create=True, partitions=2, segment_bytes=1 << 20) as topic:
    number = 0
    while not sys.stdin.closed and number < 10_000_000:
        topic.append_many([b"%d " % each * 20 for each in range(number, number + 200)], partition=number // 200 % 2)
        topic.flush()
        number += 200
        print(number, flush=True)
        if not sys.stdin.readline():
            break
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2, and a cable between them. Their names are this process's own."""
    one, other = f"loglib-{os.getpid()}-a", f"loglib-{os.getpid()}-b"
    with ExitStack() as made:
        for host in (one, other):
            ip("netns", "add", host)
            made.callback(ip, "netns", "delete", host)
        ip("-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
        for host, address in ((one, "10.77.0.1/24"), (other, "10.77.0.2/24")):
            ip("-n", host, "address", "add", address, "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")
        yield one, other


class Program:
    """A program of Python on a host, which can be killed and started again."""

    def __init__(self, host: str, *arguments: str, **options: int) -> None:
        self._command = ["ip", "netns", "exec", host, sys.executable, *arguments]
        self._options = options
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, text=True, **self._options)  # type: ignore[call-overload]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def cut(host: str, server: Program, receiver: Program, chance: random.Random) -> str:
    """Break the stream in one of four ways, and let it be whole again."""
    how = chance.choice(["a short pull of the cable", "a long pull of the cable", "kill -9 of the server",
                         "kill -9 of the receiver"])  # fmt: skip
    if "kill" in how:  # the connection of the other end is reset
        program = server if "server" in how else receiver
        program.kill()
        program.start()
        return how
    ip("-n", host, "link", "set", "cable", "down")
    time.sleep(0.05 if "short" in how else 2.5)  # the time-out of both ends is 2 s
    ip("-n", host, "link", "set", "cable", "up")
    return how


def files_of(topic: Path) -> dict[str, bytes]:
    return {str(each.relative_to(topic)): each.read_bytes() for each in sorted(topic.glob("*/*.log"))}


def ends_of(path: Path) -> list[int]:
    """Where the partitions of a topic end for its readers; nothing if it is not made yet."""
    try:
        with Topic.open(path, mode="r") as topic:
            return [each.high_watermark for each in topic.partitions]
    except (LogError, FileNotFoundError):
        return []


def run(directory: Path, *, seconds: float, cuts: int, seed: int) -> None:
    chance = random.Random(seed)
    source, copy = directory / "here" / "orders", directory / "there" / "orders"
    loglib = ["-m", "loglib"]
    with ExitStack() as running:
        here, there = running.enter_context(two_hosts())
        writer = Program(here, "-c", WRITER, str(source), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.callback(writer.kill)
        assert writer.process.stdin is not None and writer.process.stdout is not None
        writer.process.stdout.readline()
        # Nobody else is in this network. In another one, both ends would have a key (docs/copies.md).
        serve = [*loglib, "serve", str(source), "--listen", f"10.77.0.1:{PORT}", "--open", "--timeout", "2s"]
        connect = ["--connect", f"10.77.0.1:{PORT}", "--open"]
        receive = [*loglib, "receive", str(copy), *connect, "--follow", "--timeout", "2s"]
        server = Program(here, *serve, stderr=subprocess.DEVNULL)
        running.callback(server.kill)
        receiver = Program(there, *receive, stderr=subprocess.DEVNULL)
        running.callback(receiver.kill)
        done, until = 0, time.monotonic() + seconds
        next_cut = time.monotonic() + chance.uniform(0.2, 1.5)
        while done < cuts or time.monotonic() < until:
            writer.process.stdin.write("more\n")
            writer.process.stdin.flush()
            writer.process.stdout.readline()
            if time.monotonic() > next_cut:
                print(f"after {sum(ends_of(source)):,} bytes: {cut(here, server, receiver, chance)}")
                done, next_cut = done + 1, time.monotonic() + chance.uniform(0.2, 1.5)
        writer.process.communicate()  # its input ends, and so does it
        began = time.monotonic()
        while ends_of(source) != ends_of(copy):
            if time.monotonic() - began > 120:
                sys.exit("mirror_hosts: the copy does not come up to the source")
            time.sleep(0.05)
    ours, theirs = files_of(source), files_of(copy)
    assert ours == theirs, "the copy differs"
    print(f"{done} cuts: {len(ours)} segments with {sum(map(len, ours.values())):,} bytes are the same on both hosts")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.0, help="how long to write, at least")
    parser.add_argument("--cuts", type=int, default=0, help="how often to cut the link, at least")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if os.geteuid() or not shutil.which("ip"):
        sys.exit("mirror_hosts: network namespaces need root, and `ip` of iproute2")
    with TemporaryDirectory() as directory:
        run(Path(directory), seconds=args.seconds, cuts=args.cuts, seed=args.seed)


if __name__ == "__main__":
    main()
