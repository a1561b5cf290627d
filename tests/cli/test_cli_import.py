"""Imports: what cannot be appended is named by file and line, and an import goes on without doubling a line."""

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path

import commands
import pytest
from commands import Cli, started

from conftest import QUIET
from loglib import Topic
from loglib.cli import lines, resume
from loglib.cli.lines import LineSource
from loglib.cli.signals import Held

cli = commands.cli
TIME = ("--timestamp-regex", r"^(\S+)")
SYSLOG = ("--timestamp-regex", r"^(\w{3} [ \d]\d \d\d:\d\d:\d\d)", "--timestamp-format", "%b %d %H:%M:%S")


def values(path: Path) -> list[bytes]:
    """The values of a topic, in the order of each partition."""
    with Topic.open(path, mode="r") as topic:
        return [each.value or b"" for each in topic.read()]


def times(cli: Cli, path: Path) -> list[int]:
    return [each["timestamp_us"] // 1_000_000 for each in cli("cat", path, "--json").objects]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file of a hundred lines, in which the time of the last but one is garbled."""
    found = [b"2024-05-01T12:00:%02d.000Z line %d" % (number % 60, number) for number in range(100)]
    found[98] = found[98].replace(b"T12", b"T\x002")
    (tmp_path / "app.log").write_bytes(b"\n".join(found) + b"\n")
    return tmp_path / "app.log"


def test_garbled_time_names_file_line_and_what_is_in_and_the_rest_can_be_appended(
    cli: Cli, tmp_path: Path, log: Path
) -> None:
    path = tmp_path / "t"
    stopped = cli("append", path, log, "--create", *TIME)
    assert stopped.code == 3
    assert stopped.errors.startswith(f"loglib: {log}, line 99: --timestamp-regex found '2024-05-01T")
    assert "--bad-times keep or skip" in stopped.errors and "98 records were appended" in stopped.errors
    assert f"tail -n +99 {log}" in stopped.errors and len(values(path)) == 98
    rest = subprocess.run(["tail", "-n", "+99", log], capture_output=True, check=True).stdout
    appending = started("append", path, *TIME, "--bad-times", "skip", stdin=subprocess.PIPE)
    skipped = b"1 lines with a time that cannot be read were skipped. standard input, line 1: "
    assert skipped in appending.communicate(rest)[1]
    assert values(path) == [each for each in log.read_bytes().splitlines() if b"\0" not in each]


def test_command_for_the_rest_is_right_for_zero_bytes_and_names_with_spaces(cli: Cli, tmp_path: Path) -> None:
    Topic.create(tmp_path / "t", max_record_bytes=20, **QUIET).close()
    log = tmp_path / "two words"
    log.write_bytes(b"one\nline\0two\0" + b"x" * 30 + b"\0four\0")
    stopped = cli("append", tmp_path / "t", log, "-0")
    assert stopped.code == 3 and f"`tail -z -n +3 '{log}' | loglib append ...`" in stopped.errors


def test_garbled_time_in_the_first_line_appends_nothing(cli: Cli, tmp_path: Path, log: Path) -> None:
    done = cli("append", tmp_path / "t", log, "--create", "--timestamp-regex", r"line \d+$")
    assert done.code == 2 and "line 1: " in done.errors and "Nothing was appended" in done.errors
    assert values(tmp_path / "t") == []


def test_garbled_time_can_be_kept_with_the_time_of_the_line_before(cli: Cli, tmp_path: Path, log: Path) -> None:
    done = cli("append", tmp_path / "t", log, "--create", *TIME, "--bad-times", "keep")
    assert done.code == 0 and values(tmp_path / "t") == log.read_bytes().splitlines()
    assert "1 lines with a time that cannot be read were kept, with the time of the line before" in done.errors
    assert f"{log}, line 99" in done.errors
    found = times(cli, tmp_path / "t")
    assert found[97] == found[98] == found[99] - 2


def test_leap_day_without_a_year_decides_the_year(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "syslog"
    log.write_text("".join(f"{day} 23:59:59 host cron[1]: job\n" for day in ("Feb 28", "Feb 29", "Mar  1")))
    os.utime(log, (1_750_000_000, 1_750_000_000))  # 2025
    done = cli("append", tmp_path / "t", log, "--create", *SYSLOG)
    assert done.code == 0 and times(cli, tmp_path / "t") == [1709164799, 1709251199, 1709337599]
    assert "the times name no year and were read as of 2024; --year sets another" in done.errors
    assert "the times name no zone and were read as UTC; --timezone sets another" in done.errors
    given = cli("append", tmp_path / "u", log, "--create", *SYSLOG, "--year", 2020, "--timezone", "+01:00")
    assert given.errors == "appended 3 records, 99 bytes\n"
    assert times(cli, tmp_path / "u")[0] == 1582930799


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--timezone", "UTC"), "need --timestamp-regex"),
        ((*TIME, "--timezone", "CET?"), "no time zone of this system"),
        ((*TIME, "--timestamp-format", "%H:%M"), "names no day"),
        ((*TIME, "--year", "2024"), "without a year"),
        (("--resume",), "a pipe cannot be read again"),
        (("/dev/null", "--resume"), "not a regular file"),
    ],
)
def test_options_that_do_not_fit_are_refused(cli: Cli, tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    done = cli("append", tmp_path / "t", "--create", *options)
    assert done.code == 2 and why in done.errors


def test_file_in_which_no_expression_finds_anything_is_refused_with_the_way_out(
    cli: Cli, tmp_path: Path, log: Path
) -> None:
    packed, wide = tmp_path / "app.log.gz", tmp_path / "wide.log"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    wide.write_bytes(log.read_text().encode("utf-16"))
    assert f"gzip -dc {packed} | loglib append" in cli("append", tmp_path / "t", packed, "--create", *TIME).errors
    assert f"iconv -f UTF-16 -t UTF-8 {wide}" in cli("append", tmp_path / "t", wide, "--create", *TIME).errors
    assert values(tmp_path / "t") == []
    assert cli("append", tmp_path / "t", packed).code == 0  # as bytes


def test_byte_order_mark_and_line_ends_of_windows_hide_no_time(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xef\xbb\xbf2024-05-01T12:00:00Z\r\nno time\r\n")
    assert cli("append", tmp_path / "t", tmp_path / "log", "--create", "--timestamp-regex", "^(2.*)").code == 0
    assert values(tmp_path / "t") == [b"\xef\xbb\xbf2024-05-01T12:00:00Z\r", b"no time\r"]
    assert times(cli, tmp_path / "t") == [1714564800, 1714564800]


def test_lines_before_the_first_time_are_told(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("head\n2024-05-01T12:00:00Z x\n")
    done = cli("append", tmp_path / "t", tmp_path / "log", "--create", "--timestamp-regex", r"^2\S+")
    assert "1 lines got the present time" in done.errors


# --- long lines ------------------------------------------------------------------------------------------


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Lines of up to 10 bytes, three that are longer, and a topic that takes 10."""
    (tmp_path / "long.log").write_bytes(b"0123456789\nab\n" + b"x" * 25 + b"\n" + b"y" * 11 + b"\n\nend\n" + b"z" * 20)
    with Topic.open(tmp_path / "t", create=True, max_record_bytes=10, **QUIET):
        pass
    return tmp_path / "long.log"


def test_line_above_the_limit_names_file_line_and_what_is_in(cli: Cli, tmp_path: Path, long: Path) -> None:
    done = cli("append", tmp_path / "t", long)
    assert done.code == 3 and f"{long}, line 3: it has more than 10 bytes" in done.errors
    assert "--long-lines split or skip" in done.errors and values(tmp_path / "t") == [b"0123456789", b"ab"]


def test_line_above_the_limit_can_be_skipped_or_split(cli: Cli, tmp_path: Path, long: Path) -> None:
    done = cli("append", tmp_path / "t", long, "--long-lines", "skip")
    assert done.code == 0 and "3 lines of more than 10 bytes were skipped" in done.errors
    assert values(tmp_path / "t") == [b"0123456789", b"ab", b"", b"end"]
    with Topic.open(tmp_path / "u", create=True, max_record_bytes=10, **QUIET):
        pass
    assert cli("append", tmp_path / "u", long, "--long-lines", "split").code == 0
    assert values(tmp_path / "u") == [
        b"0123456789", b"ab", b"x" * 10, b"x" * 10, b"x" * 5, b"y" * 10, b"y", b"", b"end", b"z" * 10, b"z" * 10,
    ]  # fmt: skip
    with Topic.open(tmp_path / "v", create=True, max_record_bytes=10, **QUIET):
        pass
    keyed = cli("append", tmp_path / "v", long, "--long-lines", "skip", "--key-regex", "^..")  # keys count, too
    assert "4 lines of more than 5 bytes were skipped" in keyed.errors


@pytest.mark.parametrize("found", [("--key-separator", ":"), ("--key-regex", "^([a-z]+):")], ids=["separator", "regex"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\nv:2\n"])
def test_pieces_of_a_line_have_its_key_and_its_time(
    cli: Cli, tmp_path: Path, found: tuple[str, str], end: bytes
) -> None:
    """Each piece was searched as if it were a line, so what looked like a key in it was cut out of it."""
    with Topic.open(tmp_path / "t", create=True, max_record_bytes=60, **QUIET):
        pass
    line = b"user: 2024-05-01T12:00:00Z {'a': 1, 'b': 'xx:2025-01-01T00:00:00Z:xxxxxxxxxxxx:xxxxxxxxxxxxxxxxxxxxxxxx'}"
    (tmp_path / "log").write_bytes(line + end)
    regex = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    for _ in range(2):
        command = ("append", tmp_path / "t", tmp_path / "log", "--long-lines", "split", "--resume", *found)
        assert cli(*command, "--timestamp-regex", regex).code == 0
    with Topic.open(tmp_path / "t", mode="r") as topic:
        records = [each for each in topic.read() if each.key != b"v"]
    if end:
        assert {(each.key, each.time.isoformat()) for each in records} == {(b"user", "2024-05-01T12:00:00+00:00")}
        joined = b"".join(each.value or b"" for each in records)
        assert joined == (line if found[0] == "--key-regex" else line.removeprefix(b"user:"))


@pytest.mark.parametrize(("how", "left"), [("skip", []), ("keep", [b"a: 2024-99-01T00:00:00Z xxxxxxxxxxxxxxxx"])])
def test_line_with_a_bad_time_is_skipped_or_kept_with_all_its_pieces(
    cli: Cli, tmp_path: Path, how: str, left: list[bytes]
) -> None:
    with Topic.open(tmp_path / "t", create=True, max_record_bytes=30, **QUIET):
        pass
    (tmp_path / "log").write_bytes(b"a: 2024-99-01T00:00:00Z xxxxxxxxxxxxxxxx\nb: 2024-05-01T00:00:00Z\n")
    done = cli(
        "append", tmp_path / "t", tmp_path / "log", "--long-lines", "split", "--bad-times", how, "--timestamp-regex",
        r"\d{4}-\d\d-\d\dT\S+",
    )  # fmt: skip
    assert "1 lines with a time that cannot be read" in done.errors
    assert b"".join(values(tmp_path / "t")) == b"".join([*left, b"b: 2024-05-01T00:00:00Z"])


@pytest.mark.parametrize("how", ["stop", "skip", "split"])
def test_input_without_a_line_end_takes_bounded_memory(tmp_path: Path, how: str) -> None:
    program = """
import sys
from loglib.cli.program import run
code = run(sys.argv[1:])
with open("/proc/self/status") as status:  # ru_maxrss counts the process that was forked, too
    print(code, next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM")))
"""
    with Topic.open(tmp_path / "t", create=True, max_record_bytes=1 << 20, **QUIET):
        pass
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(200 << 20)
    command = [sys.executable, "-c", program, "append", str(tmp_path / "t"), str(huge), "--long-lines", how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, most_mib = map(int, done.stdout.split())
    assert code == (2 if how == "stop" else 0) and most_mib < 150
    assert len(values(tmp_path / "t")) == (200 if how == "split" else 0)


# --- resuming --------------------------------------------------------------------------------------------


def test_import_that_failed_goes_on_without_doubling(cli: Cli, tmp_path: Path, log: Path) -> None:
    path = tmp_path / "t"
    first = cli("append", path, log, "--create", "--resume", *TIME)
    assert first.code == 3 and f"{log}: begins at its first line" in first.errors and "tail -n" not in first.errors
    again = cli("append", path, log, "--resume", *TIME)
    assert again.code == 2 and "line 99" in again.errors
    assert cli("append", path, log, "--resume", *TIME, "--bad-times", "keep").code == 0
    assert values(path) == log.read_bytes().splitlines()
    found = times(cli, path)
    assert found[97] == found[98]  # the line before was appended by another command
    done = cli("append", path, log, "--resume", *TIME)  # what was decided is not asked again
    assert done.code == 0 and f"{log}: continues at byte {log.stat().st_size:,}" in done.errors
    with log.open("ab") as file:
        file.write(b"2024-05-01T12:02:00Z more\n2024-05-01T12:03:00Z without")
    more = cli("append", path, log, "--resume", *TIME)
    assert "appended 1 record," in more.errors and "the last line has no end yet" in more.errors
    with log.open("ab") as file:
        file.write(b" an end\n")
    cli("append", path, log, "--resume", *TIME)
    assert values(path) == log.read_bytes().splitlines()


def test_files_of_one_name_in_two_directories_are_two_files(cli: Cli, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "app.log").write_text("same\n")
    logs = [tmp_path / "a" / "app.log", tmp_path / "b" / "app.log"]
    for _ in range(2):
        assert cli("append", tmp_path / "t", *logs, "--create", "--resume").code == 0
    assert values(tmp_path / "t") == [b"same", b"same"]


def test_file_whose_name_is_not_utf_8_is_resumed(cli: Cli, tmp_path: Path) -> None:
    log = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.log"))
    for content in ("one\n", "one\ntwo\n"):
        log.write_text(content)
        assert cli("append", tmp_path / "t", log, "--create", "--resume").code == 0
    assert values(tmp_path / "t") == [b"one", b"two"]


def test_file_that_was_rotated_or_cut_is_another_file(cli: Cli, tmp_path: Path) -> None:
    path, log = tmp_path / "t", tmp_path / "app.log"
    contents = [[b"a%d" % number for number in range(9)], [b"b%d" % number for number in range(99)], [b"c"]]
    for content in contents:
        log.write_bytes(b"\n".join([*content, b""]))
        for _ in range(2):
            done = cli("append", path, log, "--create", "--resume")
            assert done.code == 0
        assert "is not the file" not in done.errors
    assert values(path) == [line for content in contents for line in content]


@pytest.mark.parametrize("options", [(), ("--key-regex", r"^\S+")], ids=["without keys", "with keys"])
@pytest.mark.parametrize("last", [b"", b"}"])
def test_rotated_file_is_another_one_also_if_the_last_line_was_a_common_one(
    cli: Cli, tmp_path: Path, last: bytes, options: tuple[str, ...]
) -> None:
    path, log = tmp_path / "t", tmp_path / "app.log"
    contents = [[b"old", b"{", b"more", last], [b"n", b"{", b"new 2", b"}", b"", b"new 3", b"new 4"]]
    for content in contents:
        log.write_bytes(b"\n".join([*content, b""]))
        for _ in range(2):
            assert cli("append", path, log, "--create", "--resume", *options).code == 0
    assert values(path) == [line for content in contents for line in content]


@pytest.mark.parametrize("partitions", [1, 3])
def test_keys_are_resumed_after_each_cut(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """The import is cut after each append to a partition, and partitions are added in the middle of it."""
    monkeypatch.setattr(lines, "STEP_BYTES", 16)
    monkeypatch.setattr(resume, "STEP_BYTES", 16)
    monkeypatch.setattr(resume, "_WINDOW_BYTES", 64)
    log, path = tmp_path / "app.log", tmp_path / "t"
    wanted = [b"k%d %d" % (number % 7, number) for number in range(60)] + [b"none %d" % number for number in range(9)]
    wanted.sort(key=lambda line: int(line.split()[1]))
    log.write_bytes(b"\n".join([*wanted, b""]))
    with Topic.open(path, create=True, partitions=partitions, **QUIET):
        pass
    append, left = Topic.append_many, [0]

    def failing(topic: Topic, *arguments: object, **keywords: object) -> object:
        if not left[0]:
            raise OSError(5, "cut")
        left[0] -= 1
        return append(topic, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Topic, "append_many", failing)
    code, rounds = 3, 0
    while code:
        assert code == 3
        left[0], rounds = 2, rounds + 1
        code = cli("append", path, log, "--resume", "--key-regex", r"^k\d+").code
        if rounds == 4 and partitions > 1:
            Topic.add_partitions(path, partitions + 2)
    left[0] = 1_000
    found = values(path)
    assert rounds > 5 and sorted(found) == sorted(wanted)
    for key in (b"none", b"k1 ", b"k2 "):  # each is in one partition, in order
        assert [line for line in found if line.startswith(key)] == [line for line in wanted if line.startswith(key)]
    kept = cli("append", path, log, "--resume", "--key-regex", r"^k\d+")
    assert ("when the import began" in kept.errors) == (partitions > 1)
    refused = cli("append", path, log, "--resume")
    assert refused.code == 2 and "give the same --key or --key-regex" in refused.errors
    (tmp_path / "plain.log").write_text("line\n")
    cli("append", path, tmp_path / "plain.log", "--resume")
    refused = cli("append", path, tmp_path / "plain.log", "--resume", "--key", "k")
    assert refused.code == 2 and "without keys" in refused.errors


def test_killed_import_doubles_and_loses_nothing(tmp_path: Path) -> None:
    log, path = tmp_path / "app.log", tmp_path / "t"
    wanted = [b"k%d %d " % (number % 9, number) + b"x" * 500 for number in range(20_000)]
    log.write_bytes(b"\n".join([*wanted, b""]))
    with Topic.open(path, create=True, partitions=3):
        pass
    arguments = ["append", path, log, "--resume", "--key-regex", r"^\w+"]
    killed = started(*arguments)
    while not (path / "0001" / "00000000000000000000.log").stat().st_size > 1 << 20:
        assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = started(*arguments)
    assert b"continues at byte" in again.communicate()[1] and again.returncode == 0
    assert sorted(values(path)) == sorted(wanted)


def test_resumed_file_whose_last_records_retention_has_dropped_goes_on(cli: Cli, tmp_path: Path) -> None:
    log, path = tmp_path / "app.log", tmp_path / "t"
    log.write_text("one\ntwo\n")
    cli("append", path, log, "--create", "--resume", "-p", 0)
    with Topic.open(path, create=True) as topic:
        topic.partition(0).delete_before(topic.partition(0).high_watermark)
    with log.open("a") as file:
        file.write("three\n")
    assert cli("append", path, log, "--resume", "-p", 0).code == 0
    assert values(path) == [b"three"]


def test_file_that_is_cut_while_it_is_read_is_told(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_bytes(b"line\n" * 1_000)
    with Held() as held, LineSource(str(log), end=b"\n", limit_bytes=100, held=held) as source:
        reading = source.portions()
        assert len(next(reading).lines) == 1_000
        log.write_bytes(b"new\n")
        with pytest.raises(Exception, match="was cut at byte 4 while it was read"):
            next(reading)


def test_places_and_numbers_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "STEP_BYTES", 4)
    log = tmp_path / "app.log"
    log.write_bytes(b"a\n\nlonger than a step\nb\n")
    with Held() as held, LineSource(str(log), end=b"\n", limit_bytes=100, held=held) as source:
        found = [(line, end) for each in source.portions() for line, end in zip(each.lines, each.ends, strict=True)]
        assert found == [(b"a", 2), (b"", 3), (b"longer than a step", 22), (b"b", 24)]
        assert [source.line_start(each) for each in (0, 1, 2, 3, 4, 22, 24)] == [0, 0, 0, 2, 3, 3, 22]
        assert [each.number for each in source.portions()] == [1, 3, 4]
        assert source.line_number(22, 1) == 4
