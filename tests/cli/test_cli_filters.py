"""`cat` and `tail` print the records that pass the filters, and no others."""

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import commands
import pytest
from builders import spoil
from commands import Cli, started

from conftest import NOW, QUIET, SECOND, interrupted, last_segment
from loglib import Topic, testing
from loglib.cli.output import when

cli = commands.cli
clicks = commands.clicks


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """One partition: forty events, a second apart, of which every tenth is an error; and some that are no JSON."""
    path = tmp_path / "events"
    with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
        for number in range(40):
            event = {"n": number, "level": "info" if number % 10 else "error", "user": {"id": number % 7}}
            key, time = b"k%d" % (number % 2), NOW + number * SECOND
            topic.append(json.dumps(event).encode(), key=key, timestamp=time, sync=True)
        topic.append(b"no json", key=b"", timestamp=NOW)
        topic.append(None, key=b"k1", timestamp=NOW - 1)
    return path


def numbers(cli: Cli, *arguments: object) -> list[int | None]:
    """The numbers of the printed events; None for what is no event."""
    done = cli(*arguments)
    assert done.code == 0, done
    return [json.loads(line)["n"] if line.startswith("{") else None for line in done.output.splitlines()]


def test_filters_hold_together(cli: Cli, events: Path) -> None:
    assert numbers(cli, "cat", events, "--where", ".user.id == 3 and .n > 10") == [17, 24, 31, 38]
    assert numbers(cli, "cat", events, "--where", '.level == "error"', "--key", "k0", "-n", 2) == [0, 10]
    assert numbers(cli, "cat", events, "--grep", r'"n": 1\d?,') == [1, *range(10, 20)]
    assert numbers(cli, "cat", events, "--grep", "^no") == [None]
    assert numbers(cli, "cat", events, "--key", "") == [None], "an empty key is a key"
    assert numbers(cli, "cat", events, "--key", "k1", "--grep", '"error"') == []
    assert numbers(cli, "cat", events, "--from", "0:0", "--where", "not .level", "--key", "k0") == []


def test_time_of_each_record_decides_whatever_its_place(cli: Cli, events: Path) -> None:
    since, until = (when(NOW + each * SECOND).replace(" ", "T") + "Z" for each in (37, 39))
    assert numbers(cli, "cat", events, "--since", since) == [37, 38, 39]
    assert numbers(cli, "cat", events, "--since", since, "--until", until) == [37, 38]
    assert numbers(cli, "cat", events, "--until", when(NOW + SECOND)) == [0, None, None], "also what came late"
    assert numbers(cli, "cat", events, "--from", since, "--until", until, "--key", "k1") == [37, None]
    assert numbers(cli, "cat", events, "--since", "today") == []
    assert len(numbers(cli, "cat", events, "--until", "1d")) == 42


def test_today_and_ages_count_from_the_present(cli: Cli, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    with Topic.open(tmp_path / "t", create=True) as topic:
        for age in (timedelta(days=3), timedelta(minutes=20), timedelta(0)):
            topic.append(b"%d" % age.total_seconds(), timestamp=now - age)
    assert cli("cat", tmp_path / "t", "--since", "15m").output == "0\n"
    assert cli("cat", tmp_path / "t", "--since", "1h").output == "1200\n0\n"
    assert cli("cat", tmp_path / "t", "--since", "2d", "--until", "15m").output == "1200\n"
    assert cli("cat", tmp_path / "t", "--until", "yesterday").output == "259200\n"
    assert cli("tail", tmp_path / "t", "--since", "1h", "-n", 1).output == "1200\n"


def test_tail_prints_the_last_that_pass(cli: Cli, events: Path) -> None:
    assert numbers(cli, "tail", events, "-n", 2, "--where", '.level == "error"') == [20, 30]
    assert numbers(cli, "tail", events, "-n", 9, "--where", '.level == "error"') == [0, 10, 20, 30]
    assert numbers(cli, "tail", events, "--where", ".n < 0") == []
    assert numbers(cli, "tail", events, "-n", 0, "--where", ".n") == []
    assert len(numbers(cli, "tail", events, "--where", ".n")) == 10


def test_tail_in_each_partition_prints_the_last_that_pass(cli: Cli, clicks: Path) -> None:
    assert cli("tail", clicks, "-n", 1, "--grep", "[0123]$").output == "value 2\nvalue 3\n"
    assert cli("tail", clicks, "-n", 1, "-p", 1, "--key", "k1").output == "value 1\n"


def test_tail_looks_for_the_last_that_pass_on_both_sides_of_damage(cli: Cli, events: Path) -> None:
    with Topic.open(events, mode="r") as topic:
        spoiled = [record.offset for record in topic.read()][20]
    spoil(last_segment(events), 4096 + spoiled + 100)
    found = cli("tail", events, "-n", 4, "--where", '.level == "error"', "--skip-damage")
    assert found.code == 1 and [json.loads(line)["n"] for line in found.output.splitlines()] == [0, 10, 30]
    assert cli("tail", events, "-n", 4, "--where", '.level == "error"').code == 1
    assert numbers(cli, "tail", events, "-n", 1, "--where", '.level == "error"') == [30], "which is after the damage"


@pytest.mark.usefixtures("unmeasured")
def test_tail_follows_what_passes(events: Path) -> None:
    following = started("tail", events, "-f", "-n", 1, "--where", '.level == "error"')
    assert following.stdout is not None
    assert json.loads(following.stdout.readline())["n"] == 30
    with Topic.open(events) as topic:
        topic.append(b'{"level": "info"}')
        topic.append(b"no json")
        topic.append(b'{"level": "error", "n": 99}', sync=True)
    assert json.loads(following.stdout.readline())["n"] == 99
    assert interrupted(following) == (b"", b"") and following.returncode == 130


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--since", "tomorrow"], "'tomorrow' is no time; write 15m"), (["--until", "5"], "--until"),
        (["--since", "1h", "--until", "2h"], "--until is before --since"), (["--timezone", "UTC"], "--timezone is for"),
        (["--where", ".a = 1"], "'=' cannot be here; write =="), (["--grep", "("], "is not a regular expression"),
        (["--since", "today", "--timezone", "CET?"], "no time zone"),
    ],
)  # fmt: skip
def test_wrong_filter_is_named(cli: Cli, events: Path, options: list[str], problem: str) -> None:
    for verb in ("cat", "tail"):
        done = cli(verb, events, *options)
        assert done.code == 2 and problem in " ".join(done.errors.split()), done


def test_reader_that_leaves_ends_a_filter_without_a_word(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "t", create=True) as topic:
        topic.append_many([b'{"a": "%d"}' % number for number in range(50_000)])
    with started("cat", tmp_path / "t", "--where", ".a", "--grep", "a", stdin=subprocess.DEVNULL) as printing:
        assert printing.stdout is not None and printing.stderr is not None
        printing.stdout.read(10)
        printing.stdout.close()
        assert printing.wait(30) == 141 and printing.stderr.read() == b""
