"""docs/runbooks.md and the other pages of commands: the commands run, and each named verb and option exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import monitored
import pytest
from disks import fill, memory

from conftest import ROOT, needs_root
from loglib import Retention, Topic
from loglib.cli import program

# The format's page names the lines of a protocol, which begin with the same word.
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "format"]
PAGES = [*DOCS, ROOT / "README.md", ROOT / "examples" / "monitoring" / "alerts.yml"]
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^\$ |^    |`)(loglib [a-z][^`\n]*)", re.MULTILINE)


def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of a console as a shell would, with `loglib` as a command."""
    places = directory / "bin"
    places.mkdir(exist_ok=True)
    (places / "loglib").write_text(f'#!/bin/sh\nexec {sys.executable} -m loglib "$@"\n')
    (places / "loglib").chmod(0o755)
    environment = os.environ | {"PATH": f"{places}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        ["sh", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_commands_of_the_runbooks_work_in_their_order(tmp_path: Path) -> None:
    monitored.made(tmp_path / "data" / "orders", partitions=2)
    monitored.made(tmp_path / "data" / "users")
    monitored.committed(tmp_path / "data" / "orders", "billing", "begin")
    (tmp_path / "backups").mkdir()
    blocks = CONSOLE.findall((ROOT / "docs" / "runbooks.md").read_text("utf-8"))
    commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    assert len(commands) >= 15
    for command in commands:
        done = run(command, tmp_path)
        full = command.startswith("loglib check") and done.stdout.startswith("free: ")  # the disk of this machine
        assert done.returncode == 0 or full, f"{command}: {done.stdout}{done.stderr}"
    with Topic.open(tmp_path / "disk2" / "orders") as topic:
        assert sorted(record.value or b"" for record in topic.read()) == [b"%d" % n for n in range(6)]
        assert topic.config.retention.keep_free == 0.1
        assert topic.groups() == ["billing"], "the groups have moved with it"
    assert not (tmp_path / "data" / "orders").exists()


def test_move_to_another_host_works_as_the_page_says(tmp_path: Path) -> None:
    """Without ssh: the command that it would run there is run here."""
    old = monitored.made(tmp_path / "old" / "orders")
    page = (ROOT / "docs" / "runbooks.md").read_text("utf-8")
    receive, promote, verify = re.findall(r"^    (loglib .*)$", page, re.MULTILINE)
    receive = receive.replace("ssh old loglib serve /srv/data/orders", f"loglib serve {old}")
    assert run(receive, tmp_path).returncode == 0
    with Topic.open(old) as topic:
        topic.append(b"late")
    for command in (receive, promote, verify):
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    with Topic.open(tmp_path / "data" / "orders") as topic:
        assert [record.value for record in topic.read()][-1] == b"late"


@needs_root
def test_disk_that_is_really_full_gets_room_by_the_steps_of_the_page(tmp_path: Path) -> None:
    with memory(tmp_path / "data", "size=2m") as disk:
        with Topic.open(disk / "orders", create=True, segment_bytes="64KiB", retention=Retention(age=None)) as topic:
            for _ in range(200):
                topic.append(os.urandom(4000), sync=True)
        fill(disk)
        assert run("loglib check data --min-free 10%", tmp_path).stdout.startswith("free: ")
        for command in (
            "alter data/orders --retention-bytes 256KiB --yes", "retain data/orders --yes", "verify data",
            "check data --min-free 10%",
        ):  # fmt: skip
            done = run(f"loglib {command}", tmp_path)
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def commands() -> list[object]:
    found: dict[tuple[Path, str], None] = {}
    for page in PAGES:
        for command in COMMAND.findall(page.read_text("utf-8")):
            found[page, command.split(" | ")[0].strip()] = None
    return [pytest.param(command, id=f"{page.stem}: {command}") for page, command in found]


@pytest.mark.parametrize("command", commands())
def test_verb_and_options_that_a_page_names_exist(command: str) -> None:
    if command.count('"') % 2:  # the text goes on in the next line
        command = command[: command.rindex('"')]
    words = shlex.split(command.replace("...", "").replace("'", '"') if command.count("'") % 2 else command)
    verb = words[1].rstrip(".,;:")
    known = program._loglib.get_command(click.Context(program._loglib), verb)
    assert known is not None, f"there is no verb {verb}"
    if isinstance(known, click.Group) and len(words) > 2:
        known = known.get_command(click.Context(known), words[2].rstrip(".,;:"))
        assert known is not None, f"{verb} has no command {words[2]}"
    options = {name for each in known.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    named = {word.split("=")[0] for word in words[2:] if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
    assert named <= options, f"{command}: no {sorted(named - options)}"
