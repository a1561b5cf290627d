"""Commands for records: lines are appended byte for byte, and printed from and to places and times."""

import subprocess
import time
from pathlib import Path

import commands
import pytest
from commands import Cli, started

from conftest import MANUAL, NOW, SECOND, interrupted
from loglib import Topic
from loglib.cli.output import when

cli = commands.cli
clicks = commands.clicks


def test_lines_that_are_appended_come_back_byte_for_byte(tmp_path: Path) -> None:
    lines = [b"plain", b"", b"\x1b[31m\xff", "žluťoučký".encode(), b" spaces ", b"no end"]
    path = tmp_path / "t"
    appended = started("append", path, "--create", stdin=subprocess.PIPE)
    _, errors = appended.communicate(b"\n".join(lines))
    assert (appended.returncode, errors) == (0, b"appended 6 records, 38 bytes\n")
    output, _ = started("cat", path).communicate()
    assert output == b"\n".join(lines) + b"\n"


def test_keys_and_times_are_found_in_lines(cli: Cli, tmp_path: Path) -> None:
    path, log = tmp_path / "t", tmp_path / "access.log"
    log.write_text(
        '10.0.0.1 - [17/May/2015:10:05:03 +0000] "GET /"\n'
        "without anything\n"
        '10.0.0.2 - [17/May/2015:12:05:04 +0200] "GET /"\n'
    )
    how = ("--key-regex", r"^\d\S+", "--timestamp-regex", r"\[([^]]+)\]", "--timestamp-format", "%d/%b/%Y:%H:%M:%S %z")
    assert cli("append", path, log, "--create", *how).code == 0
    found = cli("cat", path, "--json").objects
    assert [each["key"] for each in found] == ["10.0.0.1", None, "10.0.0.2"]
    assert [each["timestamp_us"] for each in found] == [1431857103000000, 1431857103000000, 1431857104000000]
    iso = tmp_path / "iso"
    iso.write_text("2024-05-01T12:00:00Z a\n1714564801.5 b\n")
    assert cli("append", path, iso, "--key", "k", "--timestamp-regex", r"^\S+").code == 0
    times = [each["timestamp_us"] for each in cli("cat", path, "--json").objects if each["key"] == "k"]
    assert times == [1714564800000000, 1714564801500000]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--key", "a", "--key-regex", "b"], "not both"),
        (["--key-regex", "("], "is not a regular expression"),
        (["--timestamp-regex", "word"], "which is not a time"),
    ],
)
def test_wrong_options_of_append_are_named(
    cli: Cli, clicks: Path, tmp_path: Path, options: list[str], problem: str
) -> None:
    (tmp_path / "lines").write_text("word\n")
    done = cli("append", clicks, tmp_path / "lines", *options)
    assert done.code == 2 and problem in done.errors
    assert cli("append", clicks.parent, tmp_path / "lines").code == 2


def test_slow_pipe_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "t"
    appending = started("append", path, "--create", "--sync", stdin=subprocess.PIPE)
    assert appending.stdin is not None
    appending.stdin.write(b"first\nsec")
    appending.stdin.flush()
    while not (path / "topic.json").exists():
        time.sleep(0.01)
    with Topic.open(path, mode="r") as topic:
        assert next(iter(topic.follow("begin", timeout=30))).value == b"first"
    appending.communicate(b"ond\n")
    with Topic.open(path, mode="r") as topic:
        assert [each.value for each in topic.read()] == [b"first", b"second"]


def test_template_that_some_text_is_too_short_for_is_refused_before_anything_is_printed(cli: Cli, clicks: Path) -> None:
    for template in ("{key[0]}", "{value[3]}", "{time[4]}"):
        refused = cli("cat", clicks, "--format", template)
        assert (refused.code, refused.output) == (2, "") and f"--format '{template}'" in refused.errors


def test_printing_from_and_to_places_and_times(cli: Cli, clicks: Path) -> None:
    def values(*options: object) -> list[str]:
        return cli("cat", clicks, *options).output.splitlines()

    assert values("-p", 1) == ["value 1", "value 3", "value 5"]
    assert sorted(values("--from", when(NOW + 3 * SECOND).replace(" ", "T") + "Z")) == ["value 3", "value 4", "value 5"]
    assert values("-p", 0, "--to", "0:2") == ["value 0", "value 2"]
    assert values("-p", 0, "-n", 1) == ["value 0"]
    template = "{time} {partition}:{offset} {key}={value}"
    assert values("-p", 0, "--format", template)[0] == "2023-11-14 22:13:20.000 0:0 k0=value 0"
    assert values("-p", 0, "-l", "-n", 1) == ["2023-11-14 22:13:20.000  0:0  k0  value 0"]
    assert cli("cat", clicks, "-p", 0, "-0").output == "value 0\0value 2\0value 4\0"
    assert cli("cat", clicks, "-p", 0, "--from", "1:0").code == 2
    assert cli("cat", clicks, "--from", "earliest").code == 2
    assert cli("cat", clicks, "--format", "{nothing}").code == 2
    assert cli("cat", clicks, "-l", "--json").code == 2
    assert cli("cat", clicks.parent).code == 2


def test_null_binary_and_headers_are_in_json(cli: Cli, tmp_path: Path) -> None:
    with Topic.open(tmp_path / "t", create=True) as topic:
        topic.append(None, key=b"\xff", headers={"h": b"1"})
    (found,) = cli("cat", tmp_path / "t", "--json").objects
    assert found["value"] is None and found["key_base64"] == "/w=="
    assert found["headers"] == [{"name": "h", "value": "1"}]
    assert cli("cat", tmp_path / "t", "--format", "{value} {headers}").output == "null h=1\n"
    assert cli("cat", tmp_path / "t", "--format", "{value}\udce4").code == 0, "a byte of Latin-1"


@pytest.mark.parametrize("uri", ["s3://key:secret@bucket/x", "s3://key:secr/et@bucket/x"])
def test_command_that_needs_a_directory_refuses_a_uri_and_shows_no_secret(cli: Cli, uri: str) -> None:
    for verb in ("info", "verify", "dump", "lag"):
        done = cli(verb, uri)
        assert done.code == 2 and "is in an object store" in done.errors and "secr" not in done.errors


@pytest.mark.usefixtures("unmeasured")
def test_tail_gives_the_last_records_and_follows(cli: Cli, clicks: Path) -> None:
    assert cli("tail", clicks, "-n", 1).output == "value 4\nvalue 5\n"
    assert cli("tail", clicks, "-n", 2, "-p", 0).output == "value 2\nvalue 4\n"
    assert cli("tail", clicks, "-n", 0).output == ""
    assert len(cli("tail", clicks).output.splitlines()) == 6
    assert cli("tail", clicks, "--from", "1:0", "-p", 1, "-n", 1).output == "value 1\n"
    following = started("tail", clicks, "-f", "-n", 1)
    assert following.stdout is not None
    assert {following.stdout.readline(), following.stdout.readline()} == {b"value 4\n", b"value 5\n"}
    with Topic.open(clicks, create=True) as topic:
        topic.append(b"new", sync=True)
    assert following.stdout.readline() == b"new\n"
    assert interrupted(following) == (b"", b"")
    assert following.returncode == 130
    assert cli("tail", clicks, "-f", "-n", 0, "--timeout", 0.01) == (0, "", "")


@pytest.mark.parametrize("command", ["cat", "tail"])
def test_partition_that_the_topic_does_not_have_is_a_wrong_command(command: str, cli: Cli, clicks: Path) -> None:
    done = cli(command, clicks, "-p", 7)
    assert done.code == 2 and done.errors == f"loglib: {clicks} has partitions 0 to 1, not 7\n"


def test_tail_follows_into_added_partitions(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with Topic.open(path, create=True) as topic:
        topic.append(b"first")
    following = started("tail", path, "-f")
    assert following.stdout is not None
    assert following.stdout.readline() == b"first\n"
    Topic.add_partitions(path, 4)
    with Topic.open(path, alter=True, flush=MANUAL) as topic:
        for number in range(40):
            topic.append(b"%d" % number, partition=number % 4)
    assert sorted(int(following.stdout.readline()) for _ in range(40)) == list(range(40))
    interrupted(following)
