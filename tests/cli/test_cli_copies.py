"""Commands that copy topics elsewhere: archives, tiers, snapshots, mirrors and streams."""

import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import commands
import pytest
from commands import Cli

from loglib import Topic

cli = commands.cli
clicks = commands.clicks


def test_topic_is_archived_and_archived_again(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    to = tmp_path / "archive"
    first = cli("archive", clicks, to)
    assert first.code == 0 and "version 1" in first.errors and "0 records, empty" in first.errors
    assert "--roll seals the open ones first" in first.errors
    rolled = cli("archive", clicks, to, "--roll")
    assert rolled.code == 0 and "6 records" in rolled.errors and "% of the log" in rolled.errors
    assert "--roll" not in rolled.errors
    with Topic.open(clicks, create=True) as topic:
        topic.append(b"more", partition=1, sync=True)
        refused = cli("archive", clicks, to, "--roll")
        assert refused.code == 3 and "Traceback" not in refused.errors
        topic.partition(1).roll()
        one, other = cli("archive", clicks, to, "--json", "--file-bytes", "1MiB", "--skip-gaps").objects
    assert (one["version"], len(one["files"]), [each["rows"] for each in other["files"]]) == (3, 1, [3, 1])
    assert cli("archive", tmp_path / "nothing", to).code == 2


def test_topic_is_tiered_and_tiered_again(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    to = tmp_path / "place" / "clicks"
    first = cli("tier", clicks, to)
    assert first.code == 0 and "version 1: 0 bytes" in first.errors and "--roll seals" in first.errors
    rolled = cli("tier", clicks, to, "--roll", "--in-flight", "2")
    assert rolled.code == 0 and "version 2" in rolled.errors
    one, other = cli("tier", clicks, to, "--json").objects
    assert (one["version"], one["end"] > 0, len(other["segments"])) == (2, True, 1)
    assert cli("cat", to).output == cli("cat", clicks).output != ""
    assert cli("verify", to).code == 0
    assert cli("tier", clicks, "gs://bucket/x").code == 2
    assert cli("tier", tmp_path / "nothing", to).code == 2


def test_snapshot_says_what_it_has_copied(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    done = cli("snapshot", clicks, tmp_path / "one")
    assert (done.code, done.errors) == (0, "") and "in 2 partitions" in done.output
    (facts,) = cli("snapshot", clicks, tmp_path / "two", "--no-links", "--json").objects
    assert facts["copied_bytes"] == facts["size_bytes"] > 0
    assert len(cli("cat", tmp_path / "two").output.splitlines()) == 6
    (tmp_path / "line").write_text("one more")
    refused = cli("append", tmp_path / "two", tmp_path / "line")
    assert refused.code != 0 and "is a snapshot of" in refused.errors
    assert cli("promote", tmp_path / "two").code == 0
    assert cli("append", tmp_path / "two", tmp_path / "line").code == 0
    assert len(cli("cat", tmp_path / "two").output.splitlines()) == 7
    assert cli("snapshot", clicks, tmp_path / "two").code == 3


def test_mirror_says_what_it_has_copied(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    done = cli("mirror", clicks, tmp_path / "copy")
    assert (done.code, done.errors) == (0, "") and "in 2 partitions" in done.output
    (facts,) = cli("mirror", clicks, tmp_path / "copy", "--json", "--limit", "100").objects
    assert facts["copied_bytes"] == 0 < sum(facts["ends"]) and facts["set_aside"] == []
    assert cli("cat", tmp_path / "copy").output == cli("cat", clicks).output
    assert cli("promote", tmp_path / "copy").code == 0
    assert "is superseded" in cli("promote", clicks).errors or "was superseded" in cli("promote", clicks).errors
    (tmp_path / "line").write_text("one more")
    assert cli("append", tmp_path / "copy", tmp_path / "line").code == 0
    assert cli("promote", clicks, "--force").code == 0
    assert cli("append", clicks, tmp_path / "line").code == 0
    refused = cli("mirror", tmp_path / "copy", clicks)
    assert refused.code != 0 and "is a topic of its own" in refused.errors
    split = cli("mirror", tmp_path / "copy", clicks, "--demote")
    assert split.code == 0 and "does not have what is now in" in split.errors


@pytest.mark.usefixtures("unmeasured")
def test_mirror_prints_the_size_of_the_copy(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    """Not how far its offsets go: retention may have dropped what is before."""
    cli("seal", clicks)
    with Topic.open(clicks) as topic:
        topic.append(b"one more", partition=0, sync=True)
    assert cli("delete-before", clicks, "end", "--yes").code == 0
    (listed,) = cli("ls", clicks.parent, "--json").objects
    done = cli("mirror", clicks, tmp_path / "copy")
    assert f": {listed['size_bytes']:,} bytes in 2 partitions" in done.output


def test_mirror_follows_until_it_is_interrupted(clicks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loglib", "mirror", str(clicks), str(tmp_path / "copy"), "--follow"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "following" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and "in 2 partitions" in output and not errors


def test_topic_is_received_from_a_command_that_serves_it(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    served = shlex.join([sys.executable, "-m", "loglib", "serve", str(clicks)])
    done = cli("receive", tmp_path / "copy", "--through", served)
    assert (done.code, done.errors) == (0, "") and "in 2 partitions" in done.output
    assert cli("cat", tmp_path / "copy").output == cli("cat", clicks).output
    (facts,) = cli("receive", tmp_path / "copy", "--through", served, "--json", "--limit", "100").objects
    assert facts["copied_bytes"] == 0 < sum(facts["ends"])
    broken = cli("receive", tmp_path / "copy", "--through", "true")
    assert broken.code == 3 and "the stream broke while" in broken.errors
    assert cli("receive", tmp_path / "copy", "--through", "true", "--connect", "localhost:1").code == 2
    nobody = cli("receive", tmp_path / "copy", "--connect", "127.0.0.1:1")
    assert nobody.code == 3 and nobody.errors.startswith("loglib: 127.0.0.1:1: ")
    assert "write HOST:PORT" in cli("receive", tmp_path / "copy", "--connect", "localhost").errors


def test_topic_is_received_over_standard_input_and_output(clicks: Path, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loglib = [sys.executable, "-m", "loglib"]
        serving = subprocess.Popen([*loglib, "serve", str(clicks)], stdin=ours.fileno(), stdout=ours.fileno())
        command = [*loglib, "receive", str(tmp_path / "copy")]
        end = theirs.fileno()
        received = subprocess.run(command, stdin=end, stdout=end, stderr=subprocess.PIPE, text=True, check=False)
        assert received.returncode == 0 and "in 2 partitions" in received.stderr
        theirs.close()
        ours.shutdown(socket.SHUT_RDWR)
        assert serving.wait(30) == 0


@pytest.mark.usefixtures("unmeasured")
def test_receiving_goes_on_when_the_stream_breaks(clicks: Path, tmp_path: Path) -> None:
    loglib = [sys.executable, "-m", "loglib"]
    serving = [*loglib, "serve", str(clicks), "--listen"]
    first = subprocess.Popen([*serving, "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    address = "127.0.0.1:" + first.stderr.readline().split()[-1]
    command = [*loglib, "receive", str(tmp_path / "copy"), "--connect", address, "--follow"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "following" in process.stderr.readline()
    first.kill()
    first.communicate()
    assert "trying again in 1 s" in process.stderr.readline()
    second = subprocess.Popen([*serving, address], stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None and address.rpartition(":")[2] in second.stderr.readline()
    while "following" not in process.stderr.readline():
        assert process.poll() is None
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as wrong:
        wrong.sendall(b"GET / HTTP/1.1\r\nHost: nobody.example\r\n\r\n")
        assert "127.0.0.1: the stream broke while serving" in second.stderr.readline()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "in 2 partitions" in output
    second.send_signal(signal.SIGINT)
    second.communicate()
    assert second.returncode == 130


def test_values_that_mean_nothing_are_wrong_use(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    assert cli("receive", tmp_path / "to", "--through", "").code == 2
    assert cli("audit", clicks.parent, "--window", "0s").code == 2
