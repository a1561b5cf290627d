"""Streams that are closed, full or odd are told in one line, and exit code 1 means damage and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import commands
import pytest
from commands import started

from loglib import Topic

clicks = commands.clicks

VERBS = ["ls T", "cat T", "info T --json", "lag T", "--help", "snapshot T S --json"]


def in_shell(command: str, **keywords: object) -> "subprocess.CompletedProcess[str]":
    command = command.replace("loglib", f"{sys.executable} -m loglib", 1)
    keywords.setdefault("env", {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"})
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, **keywords)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("verb", VERBS)
def test_output_that_cannot_be_written_is_told_in_one_line(clicks: Path, tmp_path: Path, verb: str) -> None:
    verb = verb.replace("T", str(clicks)).replace(" S ", f" {tmp_path}/copy ")
    full = in_shell(f"loglib {verb} > /dev/full")
    notes = ["no groups"] if verb.startswith("lag") else []
    assert full.returncode == 3
    assert full.stderr.splitlines() == [*notes, "loglib: standard output: No space left on device"]
    closed = in_shell(f"loglib {verb} >&-".replace("/copy", "/copy2"))
    assert closed.returncode == 3 and closed.stderr.splitlines() == [*notes, "loglib: standard output: it is closed"]


def test_path_that_is_not_utf_8_is_printed_in_escapes(clicks: Path, tmp_path: Path) -> None:
    os.rename(os.fsencode(clicks.parent), os.fsencode(tmp_path) + b"/caf\xe9")
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    found = in_shell("loglib verify caf*", cwd=tmp_path, env=strict)
    assert found.returncode == 0 and found.stdout.startswith("caf\\udce9/clicks: 6 records")
    facts = in_shell("loglib ls caf* --json", cwd=tmp_path, env=strict)
    assert facts.returncode == 0 and os.fsencode(json.loads(facts.stdout)["path"]).endswith(b"/caf\xe9/clicks")


@pytest.mark.parametrize("to", ["2>/dev/full", "<&- >&- 2>&-"])
def test_command_that_can_tell_nobody_does_its_work(clicks: Path, tmp_path: Path, to: str) -> None:
    (tmp_path / "lines").write_text("one\ntwo\n")
    assert in_shell(f"loglib append {clicks} {tmp_path}/lines {to}").returncode == 0
    with Topic.open(clicks, mode="r") as topic:
        assert {b"one", b"two"} < {each.value for each in topic.read()}
    assert in_shell(f"loglib cat {tmp_path}/nowhere {to}").returncode == 2


def test_input_that_is_closed_is_told_in_one_line(clicks: Path) -> None:
    done = in_shell(f"loglib append {clicks} <&-")
    assert (done.returncode, done.stderr) == (3, "loglib: standard input: it is closed\n")


def test_pipe_that_does_not_block_is_read_and_written(clicks: Path, tmp_path: Path) -> None:
    """Another program that has the pipe may have set it so."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    appending = started("append", clicks, "--sync", stdin=reader)
    assert appending.stderr is not None
    with Topic.open(clicks, mode="r") as topic, topic.follow("end", timeout=30) as following:
        os.write(writer, b"late\n")
        assert next(iter(following)).value == b"late"
    os.close(writer)
    assert appending.communicate()[1] == b"appended 1 record, 4 bytes\n"
    with Topic.open(tmp_path / "many", create=True) as many:
        many.append_many([b"x" * 1000] * 1000)
    os.close(reader)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [sys.executable, "-m", "loglib", "cat", str(tmp_path / "many")]
    with subprocess.Popen(command, stdout=writer) as printing, open(reader, "rb") as output:
        os.close(writer)
        assert len(output.read()) == 1_001_000
    assert printing.returncode == 0


def test_broken_pipe_is_an_error_of_nobody(clicks: Path) -> None:
    assert in_shell(f"loglib verify {clicks} | true").stderr == ""
    assert in_shell(f"loglib cat {clicks}/nowhere 2>&1 | true").stderr == ""


def test_fault_of_the_program_is_no_damage() -> None:
    program = """
import sys
from loglib.cli import program, start
def failing(arguments):
    raise ZeroDivisionError("by mistake")
program.run = failing
start.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "by mistake" in done.stderr
