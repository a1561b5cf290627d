"""The command line: what each verb prints, its exit code, and how it ends when it is disturbed."""

import json
import os
import pty
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from builders import spoil
from conftest import NOW, QUIET, SECOND, SOURCE, interrupted, last_segment, run_python
from loglib import Retention, Topic, testing
from loglib.cli.program import run
from loglib.cli.shown import age, safe, when


class Done(NamedTuple):
    code: int
    output: str
    errors: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.splitlines()]


Cli = Callable[..., Done]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process."""

    def call(*arguments: object) -> Done:
        capfd.readouterr()
        code = run([str(each) for each in arguments])
        return Done(code, *capfd.readouterr())

    return call


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    """Two partitions with three records each."""
    path = tmp_path / "logs" / "clicks"
    with testing.open_topic(path, clock=lambda: NOW, partitions=2, **QUIET) as topic:
        for number in range(6):
            key, time = b"k%d" % number, NOW + number * SECOND
            topic.append(b"value %d" % number, key=key, timestamp=time, partition=number % 2)
    return path


def started(*arguments: object, **keywords: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "loglib", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **keywords)


# --- making and listing ------------------------------------------------------------------------------------


def test_topic_is_made_with_the_policies_that_were_given(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t"
    made = cli("create", path, "--partitions", 3, "--retention-age", "36h", "--segment-bytes", "1MiB",
               "--flush-interval", "none", "--keep-free", "0.1", "--compression", "zlib",
               "--permissions", "640")  # fmt: skip
    assert made == (0, "", f"made {path}\n")
    with Topic.open(path, mode="r") as topic:
        config = topic.config
    assert (config.partitions, config.segment_bytes, config.compression) == (3, 1 << 20, "zlib")
    assert config.permissions == 0o640
    assert config.retention.age is not None and config.retention.age.total_seconds() == 36 * 3600
    assert config.retention.keep_free == 0.1 and config.flush.interval is None and config.flush.records == 100_000
    assert cli("create", path).code == 2


def test_topics_of_a_directory_are_listed(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks.parent / "broken"):
        pass
    (clicks.parent / "broken" / "topic.json").write_text("{")
    listed = cli("ls", clicks.parent, "--json").objects
    assert [(each["name"], each["partitions"]) for each in listed] == [("broken", None), ("clicks", 2)]
    assert "topic.json" in listed[0]["error"]
    assert "clicks" in cli("ls", clicks.parent).output
    assert cli("ls", clicks.parent / "nowhere") == (0, "", f"no topics in {clicks.parent / 'nowhere'}\n")


def test_segments_of_a_topic_are_listed(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks) as topic:
        topic.partition(0).roll()
    assert [(each["partition"], each["sealed"]) for each in cli("ls", clicks, "--json").objects] == [
        (0, True), (0, False), (1, False),
    ]  # fmt: skip


def test_description_of_a_topic_marks_what_is_not_the_default(cli: Cli, clicks: Path) -> None:
    text = cli("info", clicks).output
    assert "* retention-age      none" in text and "  segment-bytes      1073741824" in text
    (facts,) = cli("info", clicks.parent, "--json").objects
    assert facts["partitions"][1]["partition"] == 1 and facts["policies"]["retention"]["age"] is None


def test_policies_change_beside_a_writer_and_keep_their_other_parts(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks) as topic:
        topic.append(b"x", sync=True)
        assert cli("alter", clicks, "--retention-bytes", "10MB").code == 0
        topic.append(b"y", sync=True)
    with Topic.open(clicks, mode="r") as topic:
        assert topic.config.retention == Retention(age=None, bytes=10_000_000)
    assert cli("alter", clicks).code == 2
    assert cli("alter", clicks, "--add-partitions", 4).code == 0
    with Topic.open(clicks, mode="r") as topic:
        assert len(topic.partitions) == 4


def test_deleting_asks_and_can_be_tried(cli: Cli, clicks: Path) -> None:
    assert cli("delete", clicks, "--dry-run").errors.startswith(f"would delete {clicks}: ")
    assert cli("delete", clicks).code == 2  # no terminal to ask at
    assert clicks.exists()
    assert cli("delete", clicks, "--yes").code == 0
    assert not clicks.exists()


# --- records -----------------------------------------------------------------------------------------------


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
        (["--timestamp-regex", "word"], "which is no time"),
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
    with Topic.open(tmp_path / "t") as topic:
        topic.append(None, key=b"\xff", headers={"h": b"1"})
    (found,) = cli("cat", tmp_path / "t", "--json").objects
    assert found["value"] is None and found["key_base64"] == "/w=="
    assert found["headers"] == [{"name": "h", "value": "1"}]
    assert cli("cat", tmp_path / "t", "--format", "{value} {headers}").output == "null h=1\n"


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
    with Topic.open(clicks) as topic:
        topic.append(b"new", sync=True)
    assert following.stdout.readline() == b"new\n"
    assert interrupted(following) == (b"", b"")
    assert following.returncode == 130
    assert cli("tail", clicks, "-f", "-n", 0, "--timeout", 0.01) == (0, "", "")


def test_closed_pipe_ends_without_a_word(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "t") as topic:
        topic.append_many([b"x" * 100] * 20_000)
    with started("cat", tmp_path / "t") as printing:
        assert printing.stdout is not None and printing.stderr is not None
        printing.stdout.read(10)
        printing.stdout.close()
        assert printing.wait(30) == 141
        assert printing.stderr.read() == b""


def test_terminal_never_gets_a_control_character_unless_asked(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "t") as topic:
        value = "\x1b]0;owned\x07 \x9b31m \u202e \xff".encode() + b"\xff"
        topic.append(value, key=b"\x1b[2J", headers={"\x1b": b"\x08"})
    for options in ([], ["-l"], ["--json"], ["--format", "{key} {value} {headers}"]):
        shown = on_terminal("cat", tmp_path / "t", *options)
        assert not set(shown.decode()) & set("\x1b\x07\x08\x9b\u202e"), options
    assert b"\x1b]0;owned\x07" in on_terminal("cat", tmp_path / "t", "--raw")


def test_long_command_shows_how_far_it_is_on_a_terminal_only(clicks: Path) -> None:
    assert b"clicks" in on_terminal("verify", clicks)
    with started("verify", clicks) as verifying:
        output, errors = verifying.communicate()
    assert b"no damage" in output and errors == b""


def on_terminal(*arguments: object) -> bytes:
    """What a command prints on a terminal of its own."""
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-m", "loglib", *map(str, arguments)])
    found = b""
    try:
        while data := os.read(terminal, 1 << 16):
            found += data
    except OSError:  # Linux reports the end in this way
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, found
    return found


def test_safe_text_keeps_what_can_be_read() -> None:
    assert safe("a\\b \u017elu\u0165 \u65e5\u672c") == "a\\b \u017elu\u0165 \u65e5\u672c"
    assert safe(b"a\tb\r\n\x00\x7f\xc3") == r"a\tb\r\n\x00\x7f\xc3"
    assert safe("\u2028\u200f\ue000") == r"\u2028\u200f\ue000"
    assert safe(None) == "null"
    ages = [age(each) for each in (None, 0, 90e6, 3_600e6 * 30, 5_000, 12)]
    assert ages == ["-", "0s", "1m 30s", "1d 6h", "5ms", "12us"]
    assert when(None) == "-" and when(1 << 62) == f"{1 << 62} us"


# --- groups ------------------------------------------------------------------------------------------------


def test_groups_lag_and_reset(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, mode="r") as topic, topic.group("etl") as group:
        for _, _ in zip(group.follow(timeout=5), range(4), strict=False):
            pass
        (listed,) = cli("groups", clicks.parent, "--json").objects
        assert (listed["topic"], listed["group"], len(listed["members"])) == ("clicks", "etl", 1)
        assert cli("reset", clicks, "etl", "--to", "begin", "--yes").code == 3  # it has a member
    found = cli("lag", clicks, "--json", "--count").objects
    assert [each["partition"] for each in found] == [0, 1]
    assert sum(each["lag_records"] for each in found) in (2, 3) and found[0]["owner"] is None
    assert "etl" in cli("lag", clicks, "etl").output
    assert cli("lag", clicks, "elt").code == 3
    assert cli("reset", clicks, "etl", "--to", "begin").code == 2
    assert cli("reset", clicks, "etl", "--to", "begin", "--dry-run").errors == "nothing was changed\n"
    assert [each["after"] for each in cli("reset", clicks, "etl", "--to", "begin", "--yes", "--json").objects] == [0, 0]
    assert sum(each["lag_records"] for each in cli("lag", clicks, "--json", "--count").objects) == 6


@pytest.mark.usefixtures("unmeasured")
def test_watching_lag_ends_with_ctrl_c(clicks: Path) -> None:
    with Topic.open(clicks) as topic:
        topic.group("etl").close()
        topic.reset_group("etl", "begin")
    watching = started("lag", clicks, "--watch", "0.1")
    assert watching.stdout is not None
    for _ in range(4):
        assert watching.stdout.readline()
    interrupted(watching)
    assert watching.returncode == 130


# --- upkeep ------------------------------------------------------------------------------------------------


def test_retention_is_explained_tried_and_done(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks) as topic:
        topic.partition(0).roll()
    cli("alter", clicks, "--retention-bytes", "0")
    tried = cli("retain", clicks, "--dry-run")
    assert "drop" in tried.output and tried.errors == "nothing was dropped\n"
    assert cli("retain", clicks).code == 2
    assert [each["drop"] for each in cli("retain", clicks, "--yes", "--json").objects].count(True) == 1
    assert cli("cat", clicks, "-p", 0).output == ""


def test_topic_is_archived_and_archived_again(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    to = tmp_path / "archive"
    first = cli("archive", clicks, to)
    assert first.code == 0 and "version 1" in first.errors and "0 records, empty" in first.errors
    rolled = cli("archive", clicks, to, "--roll")
    assert rolled.code == 0 and "6 records" in rolled.errors and "% of the log" in rolled.errors
    with Topic.open(clicks) as topic:
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
    assert first.code == 0 and "version 1: 0 bytes" in first.errors
    rolled = cli("tier", clicks, to, "--roll", "--in-flight", "2")
    assert rolled.code == 0 and "version 2" in rolled.errors
    one, other = cli("tier", clicks, to, "--json").objects
    assert (one["version"], one["end"] > 0, len(other["segments"])) == (2, True, 1)
    assert cli("cat", to).output == cli("cat", clicks).output != ""
    assert cli("verify", to).code == 0
    assert cli("tier", clicks, "gs://bucket/x").code == 3
    assert cli("tier", tmp_path / "nothing", to).code == 2


def test_damage_is_found_by_verify_dump_and_cat(cli: Cli, clicks: Path) -> None:
    assert cli("verify", clicks.parent).code == 0
    segment = last_segment(clicks, 0)
    data = bytearray(segment.read_bytes())
    data[4096 + 130] ^= 1
    segment.write_bytes(data)
    found = cli("verify", clicks)
    assert found.code == 1 and f"{segment}, byte" in found.output
    (report,) = cli("verify", clicks, "--json").objects
    assert len(report["damage"]) == 1 and report["damage"][0]["offsets"]
    dumped = cli("dump", clicks)
    assert dumped.code == 1 and "batch:" in dumped.output and "segment:" in dumped.output
    stopped = cli("cat", clicks)
    assert stopped.code == 1 and str(segment) in stopped.errors
    passed = cli("cat", clicks, "--skip-damage")
    assert (passed.code, passed.output) == (1, "value 1\nvalue 3\nvalue 5\n") and "damage: " in passed.errors


def test_dump_shows_headers_records_and_bytes(cli: Cli, clicks: Path) -> None:
    what = [each["what"] for each in cli("dump", clicks, "--json", "--records").objects]
    assert what == ["segment", "batch", "record", "record", "record"]
    (_, batch) = cli("dump", clicks, "--json").objects
    assert batch["flags"] == ["KEYS", "TIMESTAMPS"] and batch["codec"] == "none"
    text = cli("dump", clicks, "-p", 1, "-n", 1, "--hex", "--records").output
    assert "89 4c 4c 42" in text and "value 1" in text and "header" in text


def test_dump_goes_on_behind_a_damaged_header(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with testing.open_topic(path, **QUIET) as topic:
        for _ in range(4):
            topic.append(b"x", sync=True)
        topic.partition(0).roll()
        topic.append(b"y", sync=True)
    first = min(path.glob("0000/*.log"))
    data = bytearray(first.read_bytes())
    data[20] ^= 1  # the segment's header
    data[4096 + 144 + 20] ^= 1  # the header of the second batch
    first.write_bytes(data)
    done = cli("dump", path, "--json")
    assert done.code == 1
    what = [each["what"] for each in done.objects]
    assert what == ["segment", "batch", "damage", "batch", "batch", "segment", "batch"]
    assert "error" in done.objects[0]
    later = cli("dump", path, "--from", 300, "-n", 1, "--json").objects
    assert [each.get("base_offset") for each in later if each["what"] == "batch"] == [288]


# --- repair ------------------------------------------------------------------------------------------------


def test_repair_says_what_it_does_and_asks(cli: Cli, clicks: Path) -> None:
    assert cli("repair", clicks).output == f"{clicks}: nothing to repair\n"
    segment = last_segment(clicks, 0)
    spoil(segment, 4096 + 130)
    tried = cli("repair", clicks, "--dry-run")
    assert tried.code == 1 and "declared as a gap" in tried.output and tried.errors == "nothing was changed\n"
    assert cli("repair", clicks).code == 2  # nobody can be asked
    assert cli("verify", clicks).code == 1
    (done,) = cli("repair", clicks, "--yes", "--json").objects
    assert [each["partition"] for each in done["repairs"]] == [0, 0] and not done["verified"]["damage"]
    verified = cli("verify", clicks)
    assert verified.code == 1 and "no damage, 1 declared gap\n" in verified.output
    (report,) = cli("verify", clicks, "--json").objects
    assert [each["offsets"] for each in report["gaps"]] == [done["repairs"][0]["offsets"]]
    printed = cli("cat", clicks)
    assert printed.code == 1 and "a gap that a repair has declared" in printed.errors
    assert printed.output == "value 1\nvalue 3\nvalue 5\n"
    assert cli("repair", clicks.parent / "nothing").code == 3


# --- audit -------------------------------------------------------------------------------------------------


def test_audit_names_what_does_not_add_up(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(clicks.parent, mirror)
    fine = cli("audit", clicks.parent, mirror)
    assert (fine.code, fine.output) == (0, "") and "0 do not add up" in fine.errors
    assert cli("audit", clicks.parent, mirror, "--all").output.count("adds up") == 1
    with Topic.open(clicks) as topic:
        topic.append(b"one more", timestamp=NOW, partition=1)
    found = cli("audit", clicks.parent, mirror)
    assert found.code == 1 and "differs" in found.output and "1 do not add up" in found.errors
    (row,) = cli("audit", clicks.parent, mirror, "--json").objects
    assert (row["topic"], row["missing"], row["state"]) == ("clicks", 1, "differs")
    assert cli("audit", clicks.parent).code == 0
    assert cli("audit", tmp_path / "nothing").code == 2


# --- bench -------------------------------------------------------------------------------------------------


def test_bench_measures_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", tmp_path, "--records", 1000, "--size", 100)
    assert done.code == 0 and "append and sync, one a call" in done.output and "records/s" in done.output.lower()
    rows = cli("bench", tmp_path, "--records", 1000, "--json").objects
    assert len(rows) == 6 and all(row["seconds"] > 0 and row["bytes"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())
    assert cli("bench", tmp_path / "nowhere").code == 2


# --- the program -------------------------------------------------------------------------------------------


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


def test_help_of_each_verb_says_what_it_does(cli: Cli) -> None:
    listed = cli("--help").output
    for verb in ("create", "ls", "info", "append", "archive", "cat", "tail", "groups", "lag", "reset", "retain",
                 "alter", "delete", "tier", "verify", "repair", "audit", "bench", "dump", "completion",
                 "serve", "receive"):  # fmt: skip
        assert f"  {verb} " in listed
        assert cli(verb, "--help").code == 0
    assert cli("--version").output.startswith("loglib, version ")
    assert cli("nonsense").code == 2
    assert cli().code == 2


def test_error_of_the_library_or_the_system_is_one_line(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("x\n")
    with Topic.open(clicks):
        refused = cli("append", clicks, tmp_path / "lines")
    assert refused.code == 3 and refused.errors.startswith("loglib: ") and "Traceback" not in refused.errors
    shutil.rmtree(clicks / "0001")
    missing = cli("verify", clicks)
    assert missing.code == 1 and "0001" in missing.output + missing.errors
    assert cli("cat", tmp_path / "nowhere").code == 2


def test_shell_completes_verbs() -> None:
    environment = os.environ | {"_LOGLIB_COMPLETE": "bash_complete", "COMP_WORDS": "loglib ver", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "loglib"]
    completed = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert completed.stdout == b"plain,verify\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_for_a_shell_calls_loglib(cli: Cli, shell: str) -> None:
    assert "_LOGLIB_COMPLETE" in cli("completion", shell).output


def test_start_imports_neither_arrow_nor_spark(clicks: Path) -> None:
    program = """
        import sys
        from loglib.cli.program import run
        run(["info", sys.argv[1]])
        assert not {"numpy", "pyarrow", "pandas", "pyspark", "rich"} & set(sys.modules)
    """
    run_python(program, clicks)


def test_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('no', name='click')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "loglib", "ls"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "pip install 'loglib-segments[cli]'" in done.stderr


# --- the page ------------------------------------------------------------------------------------------------


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    page = (SOURCE.parent / "docs" / "command-line.md").read_text()
    lines = [line.removeprefix("$ ") for line in page.splitlines() if line.startswith("$ ")]
    assert len(lines) > 10
    command = tmp_path / "bin" / "loglib"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m loglib "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    script = "set -e\n" + "\n".join(lines)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"10.0.0.1 - - [17/May/2015" in done.stdout


# --- healing -----------------------------------------------------------------------------------------------


def test_heal_and_scrub_say_what_they_do(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    copy, older = tmp_path / "copies" / "clicks", tmp_path / "old" / "clicks"
    shutil.copytree(clicks, copy)
    shutil.copytree(clicks, older)
    assert cli("heal", clicks, "--from", copy).output == f"{clicks}: nothing to heal\n"
    assert cli("scrub", clicks, "--donor", copy, "--rate", 1000).code == 0
    spoil(last_segment(clicks), 4096 + 140)
    tried = cli("heal", clicks, "--from", copy, "--dry-run")
    assert tried.code == 0 and "1 batch from" in tried.output and "nothing was changed" in tried.errors
    spoil(last_segment(older), 4096 + 140)
    left = cli("heal", clicks, "--from", older, "--json")
    assert left.code == 1 and left.objects[0]["unhealed"][0]["partition"] == 0
    found = cli("scrub", clicks, "--json")
    assert found.code == 1 and found.objects[0]["healing"] is None and len(found.objects[0]["found"]["damage"]) == 1
    healed = cli("scrub", clicks, "--donor", older, "--donor", copy)
    assert healed.code == 0 and "1 damage" in healed.output and f"from {copy}" in healed.output
    spoil(last_segment(clicks), 4096 + 140)
    (done,) = cli("scrub", clicks, "--donor", copy, "--json").objects
    assert done["healing"]["healed"][0]["offsets"] and not done["healing"]["verified"]["damage"]
    assert cli("heal", clicks).code == 2 and cli("heal", clicks, "--from", clicks).code == 3
