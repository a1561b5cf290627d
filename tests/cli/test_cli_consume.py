"""Members of a group from the shell: what is printed is committed, and nothing else. Lines with keys and headers."""

import signal
import subprocess
from pathlib import Path

import commands
import pytest
from commands import Cli, started

from conftest import QUIET, interrupted
from loglib import Topic
from loglib.cli.lines import BOM

cli = commands.cli
clicks = commands.clicks


def committed(path: Path, group: str) -> dict[int, int]:
    with Topic.open(path, mode="r") as topic:
        return {number: each.offset for number, each in topic.group_info(group).committed.items()}


def many(path: Path, count: int = 20_000, partitions: int = 4) -> list[bytes]:
    values = [b"%d" % number for number in range(count)]
    with Topic.create(path, partitions=partitions, **QUIET) as topic:
        topic.append_many(values, keys=values)
    return values


def test_group_continues_where_it_has_ended(cli: Cli, clicks: Path) -> None:
    first = cli("consume", clicks, "--group", "etl", "--max", 2, "--timeout", 10)
    rest = cli("consume", clicks, "--group", "etl", "--timeout", 0)
    assert (first.code, rest.code, first.errors, rest.errors) == (0, 0, "", "")
    assert len(first.output.splitlines()) == 2
    assert sorted(first.output.splitlines() + rest.output.splitlines()) == [f"value {number}" for number in range(6)]
    assert cli("consume", clicks, "--group", "etl", "--timeout", 0).output == ""
    assert len(cli("consume", clicks, "--group", "other", "--timeout", 0, "--json").objects) == 6
    assert cli("consume", clicks, "--group", "late", "--timeout", 0, "--from", "end").output == ""
    assert cli("consume", clicks, "--group", "none", "--max", 0).output == ""
    assert [each["lag_bytes"] for each in cli("lag", clicks, "etl", "--json").objects] == [0, 0]


def test_members_in_two_processes_share_the_records(tmp_path: Path) -> None:
    values = many(tmp_path / "t")
    members = [started("consume", tmp_path / "t", "--group", "g", "--timeout", 3) for _ in range(2)]
    printed = [member.communicate(timeout=60) for member in members]
    assert [member.returncode for member in members] == [0, 0], printed
    assert sorted(printed[0][0].split() + printed[1][0].split()) == sorted(values)


@pytest.mark.usefixtures("unmeasured")
def test_signal_commits_what_was_printed_and_no_more(tmp_path: Path) -> None:
    values = many(tmp_path / "t")
    consuming = started("consume", tmp_path / "t", "--group", "g")
    assert consuming.stdout is not None
    first = consuming.stdout.readline()
    consuming.send_signal(signal.SIGTERM)
    rest = consuming.stdout.read()  # not `communicate`, which would drop what `readline` has read ahead
    assert consuming.communicate(timeout=60)[1] == b"" and consuming.returncode == 143
    again = started("consume", tmp_path / "t", "--group", "g", "--timeout", 0).communicate(timeout=60)[0]
    assert sorted((first + rest + again).split()) == sorted(values), "each record exactly once"


@pytest.mark.usefixtures("unmeasured")
def test_signal_ends_a_wait_for_records(clicks: Path) -> None:
    consuming = started("consume", clicks, "--group", "g")
    assert consuming.stdout is not None
    for _ in range(6):
        consuming.stdout.readline()
    assert interrupted(consuming) == (b"", b"") and consuming.returncode == 130


def test_records_that_were_printed_when_it_was_killed_come_again_and_none_is_lost(tmp_path: Path) -> None:
    values = many(tmp_path / "t")
    consuming = started("consume", tmp_path / "t", "--group", "g")
    assert consuming.stdout is not None
    printed = [consuming.stdout.readline() for _ in range(3000)]
    consuming.kill()
    printed += consuming.stdout.read().splitlines()
    consuming.communicate()
    again = started("consume", tmp_path / "t", "--group", "g", "--timeout", 0).communicate(timeout=60)[0]
    assert {each.strip() for each in printed} | {*again.split()} >= {*values}


def test_reader_that_leaves_has_committed_only_what_the_pipe_took(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with Topic.create(path, **QUIET) as topic:
        topic.append_many([b"%d" % number * 1000 for number in range(5000)])
        end = topic.partition(0).log_end_offset
    with started("consume", path, "--group", "g") as consuming:
        assert consuming.stdout is not None and consuming.stderr is not None
        consuming.stdout.readline()
        consuming.stdout.close()
        assert consuming.wait(60) == 141 and consuming.stderr.read() == b""
    assert committed(path, "g").get(0, 0) < end
    again = started("consume", path, "--group", "g", "--timeout", 0, "--max", 1).communicate(timeout=60)[0]
    assert again, "the group has more"


def test_wrong_use_is_named(cli: Cli, clicks: Path) -> None:
    assert "--group" in cli("consume", clicks).errors
    assert "has no end" in cli("consume", clicks, "--group", "g", "--format", "parquet").errors
    assert "loglib reset" in cli("consume", clicks, "--group", "g", "--from", "0:0").errors
    assert cli("consume", clicks, "--group", "g", "--long", "--json").code == 2
    assert cli("consume", clicks, "--group", "../g", "--timeout", 0).code == 2
    assert not (clicks / "groups").exists()


# --- lines with keys and headers ----------------------------------------------------------------------------


def test_lines_have_their_keys_before_a_separator_and_headers_for_all(tmp_path: Path) -> None:
    path = tmp_path / "t"
    options = ("--key-separator", "\\t", "--header", "trace=47=11", "--header", "source=")
    appending = started("append", path, "--create", *options, stdin=subprocess.PIPE)
    _, errors = appending.communicate(b"ann\tone\ttwo\n\tempty key\nno key\nbob\t\n")
    assert errors.splitlines()[1:] == [b"1 lines without the separator are values without a key"]
    with Topic.open(path, mode="r") as topic:
        found = list(topic.read())
    assert [(each.key, each.value) for each in found] == [
        (b"ann", b"one\ttwo"), (b"", b"empty key"), (None, b"no key"), (b"bob", b""),
    ]  # fmt: skip
    assert {each.headers for each in found} == {(("trace", b"47=11"), ("source", b""))}


def test_mark_of_the_encoding_is_no_part_of_the_first_key(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(BOM + b"ann:one\nann:two\n")
    assert cli("append", tmp_path / "t", tmp_path / "log", "--create", "--key-separator", ":").code == 0
    assert [each["key"] for each in cli("cat", tmp_path / "t", "--json").objects] == ["ann", "ann"]


def test_import_with_a_separator_is_resumed(cli: Cli, tmp_path: Path) -> None:
    path, log = tmp_path / "t", tmp_path / "log"
    log.write_text("".join(f"k{number % 3}|2024-05-01T12:00:0{number}Z {number}\n" for number in range(5)))
    options = ("--key-separator", "|", "--header", "a=b", "--timestamp-regex", r"\|(\S+)", "--resume")
    assert cli("append", path, log, "--create", *options).code == 0
    with log.open("a") as file:
        file.write("k0|2024-05-01T12:00:09Z 5\n")
    done = cli("append", path, log, *options)
    assert done.code == 0 and "appended 1 record," in done.errors
    with Topic.open(path, mode="r") as topic:
        found = list(topic.read())
    assert [each.key for each in found] == [b"k0", b"k1", b"k2", b"k0", b"k1", b"k0"]
    assert found[-1].value == b"2024-05-01T12:00:09Z 5" and found[-1].timestamp == 1714564809000000
    assert cli("append", path, log, "--resume").code == 2, "without keys"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--key-separator", ""], "the separator is empty"), (["--header", "trace"], "is no header; write NAME=VALUE"),
        (["--header", "=1"], "is no header"), (["--key-separator", ":", "--key", "a"], "give one of --key"),
        (["--format", "jsonl", "--header", "a=1"], "--header is for lines"),
    ],
)  # fmt: skip
def test_wrong_separator_or_header_is_named(cli: Cli, clicks: Path, options: list[str], problem: str) -> None:
    done = cli("append", clicks, "/dev/null", *options)
    assert done.code == 2 and problem in done.errors


def test_headers_count_for_the_limit_of_a_line(cli: Cli, tmp_path: Path) -> None:
    Topic.create(tmp_path / "t", max_record_bytes=40, **QUIET).close()
    (tmp_path / "log").write_text("x" * 40 + "\n")
    done = cli("append", tmp_path / "t", tmp_path / "log", "--header", "trace=1")
    assert done.code == 2 and "the longest allowed line" in done.errors
