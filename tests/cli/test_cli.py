"""The command line as a program: what it says of itself and of errors, and how it ends when it is disturbed."""

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import commands
import pyarrow.parquet as pq
import pytest
from commands import Cli, started

from conftest import SOURCE, run_python
from loglib import Topic
from loglib.cli.output import age, safe, when
from loglib.cli.program import _ELSEWHERE, _OPTIONS_ELSEWHERE, _VERBS
from loglib.copies import snapshot

cli = commands.cli
clicks = commands.clicks


def test_closed_pipe_ends_without_a_word(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "t", create=True) as topic:
        topic.append_many([b"x" * 100] * 20_000)
    with started("cat", tmp_path / "t") as printing:
        assert printing.stdout is not None and printing.stderr is not None
        printing.stdout.read(10)
        printing.stdout.close()
        assert printing.wait(30) == 141
        assert printing.stderr.read() == b""


def test_terminal_never_gets_a_control_character_unless_asked(tmp_path: Path) -> None:
    with Topic.open(tmp_path / "t", create=True) as topic:
        value = "\x1b]0;owned\x07 \x9b31m \u202e \xff".encode() + b"\xff"
        topic.append(value, key=b"\x1b[2J", headers={"\x1b": b"\x08"})
    forms = (["--json"], ["--format", "csv"], ["--format", "jsonl"], ["--format", "{key} {value} {headers}"])
    readers = (["cat"], ["tail", "--grep", "owned"], ["consume", "--group", "g", "--timeout", "0"])
    commands = [[*reader, *form] for reader in readers for form in ([], ["-l"], *forms)]
    for verb, *options in [*commands[:6], *commands[6:9], *commands[12:15]]:
        shown = on_terminal(verb, tmp_path / "t", *options)
        assert not set(shown.decode()) & set("\x1b\x07\x08\x9b\u202e"), options
    assert b"\x1b]0;owned\x07" in on_terminal("cat", tmp_path / "t", "--raw")


def test_long_command_shows_how_far_it_is_on_a_terminal_only(clicks: Path) -> None:
    assert b"clicks" in on_terminal("verify", clicks)
    with started("verify", clicks) as verifying:
        output, errors = verifying.communicate()
    assert b"no damage" in output and errors == b""


BAR_FROM_THE_START = """
from loglib.cli import output, start
output._BAR_AFTER_S = 0.0
start.main()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a topic, a copy of it, and files to append."""
    place = tmp_path_factory.mktemp("place")
    with Topic.create(place / "clicks") as topic:
        for _ in range(3):
            topic.append_many([b"x" * 1000] * 500)
            topic.partition(0).roll()
        pq.write_table(topic.arrow().read_all(), place / "parquet")
    snapshot(place / "clicks", place / "copies" / "clicks")
    (place / "lines").write_bytes(b"line\n" * 1000)
    (place / "csv").write_bytes(b"value\n" + b"line\n" * 1000)
    return place


@pytest.mark.parametrize(
    "command",
    [
        "verify clicks", "scrub clicks", "mirror clicks MIRROR", "archive clicks ARCHIVE", "tier clicks TIER",
        "repair clicks --yes", "heal clicks --from copies/clicks", "copy clicks COPY", "append LINES lines --create",
        "append CSV csv --create --format csv", "append PARQUET parquet --create --format parquet",
        "snapshot clicks SNAPSHOT", "snapshot clicks COPIED --no-links",
    ],
    ids=lambda command: command.replace(" ", "-"),
)  # fmt: skip
def test_what_takes_long_shows_how_far_it_is_on_a_terminal_and_nothing_in_a_pipe(place: Path, command: str) -> None:
    def words(where: str) -> list[str]:
        return [f"{where}-{each}" if each.isupper() else each for each in command.split()]

    assert b"\x1b[" in seen([sys.executable, "-c", BAR_FROM_THE_START, *words("terminal")], place)
    with started(*words("pipe"), cwd=place) as silent:
        _, errors = silent.communicate()
    assert silent.returncode == 0 and b"\x1b" not in errors and b"/s" not in errors


def test_work_of_less_than_a_second_draws_no_bar(clicks: Path) -> None:
    assert b"\x1b" not in on_terminal("verify", clicks)


def on_terminal(*arguments: object) -> bytes:
    """What a command prints on a terminal of its own."""
    return seen([sys.executable, "-m", "loglib", *map(str, arguments)])


def seen(command: list[str], directory: Path | None = None) -> bytes:
    """What a program that succeeds prints on a terminal of its own."""
    child, terminal = pty.fork()
    if not child:
        if directory is not None:
            os.chdir(directory)
        os.environ["TERM"] = "xterm"
        os.execv(command[0], command)
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


def test_bench_measures_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", tmp_path, "--records", 1000, "--size", 100)
    assert done.code == 0 and "append and sync, one a call" in done.output and "records/s" in done.output.lower()
    rows = cli("bench", tmp_path, "--records", 1000, "--json").objects
    assert len(rows) == 6 and all(row["seconds"] > 0 and row["bytes"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())
    assert cli("bench", tmp_path / "nowhere").code == 2


def test_help_of_each_verb_says_what_it_does(cli: Cli) -> None:
    verbs = list(verbs_of(cli("--help").output))
    assert len(verbs) == len({*verbs}) == 42
    for verb in verbs:
        shown = cli(verb, "--help")
        assert shown.code == 0 and shown.output.startswith(f"Usage: loglib {verb} "), verb
        assert len(shown.output.splitlines()) <= 36, f"{verb}: the help is more than one screen"
    assert cli("--version").output.startswith("loglib, version ")
    assert cli("nonsense").code == 2
    assert cli().code == 2


def verbs_of(listed: str) -> Iterator[str]:
    """The verbs in the list of all, which groups them by purpose."""
    for _, verbs in re.findall(r"^([A-Z][^:\n]+):\n((?:  .*\n)+)", listed.partition("--help")[2], re.MULTILINE):
        yield from re.findall(r"^  ([a-z-]+) ", verbs, re.MULTILINE)


def test_verbs_are_listed_by_what_one_wants_to_do(cli: Cli) -> None:
    listed = cli("--help").output
    purposes = re.findall(r"^([A-Z].*):$", listed, re.MULTILINE)[1:]
    assert purposes[0] == "Write and read records" and len(purposes) == len({*purposes}) >= 6
    assert listed.index("append") < listed.index("Make and change topics:") < listed.index("  create")


def test_word_that_is_no_verb_or_option_is_answered_with_the_nearest(cli: Cli, clicks: Path) -> None:
    assert "Did you mean 'info'?" in cli("infoo", clicks).errors
    produced = cli("produce", clicks)
    assert produced.code == 2 and "Here it is `loglib append`." in produced.errors
    assert "`loglib cat --grep`" in cli("GREP", clicks).errors
    assert "'--grep'" in cli("cat", clicks, "--gerp", "x").errors
    assert "Did you mean" not in cli("zzzzzz").errors


def test_words_of_other_tools_lead_to_verbs() -> None:
    assert not _ELSEWHERE.keys() & _VERBS.keys()
    assert {command.split()[0] for command in _ELSEWHERE.values()} <= _VERBS.keys()


def test_options_of_other_tools_lead_to_options(cli: Cli, clicks: Path) -> None:
    refused = cli("cat", clicks, "--limit", "3")
    assert refused.code == 2 and "No such option '--limit'. Here it is `-n`." in refused.errors
    assert "`--timeout 0`" in cli("consume", clicks, "-g", "g", "-f").errors
    help_of = {verb: cli(verb, "--help").output for verb in {verb for verb, _ in _OPTIONS_ELSEWHERE}}
    for (verb, option), here in _OPTIONS_ELSEWHERE.items():
        assert not re.search(rf"(?<!\S){option}\b", help_of[verb]), (verb, option)
        named = re.findall(r"`(?:loglib (\w+) )?(--?\w+)", here)
        assert all(each in help_of[other or verb] for other, each in named), (verb, option)


def test_error_of_the_library_or_the_system_is_one_line(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("x\n")
    with Topic.open(clicks, create=True):
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


def test_list_of_verbs_imports_no_verb() -> None:
    program = """
        import sys
        from loglib.cli.program import run
        before = set(sys.modules)
        assert run(["--help"]) == 0
        print({name for name in sys.modules if name.startswith("loglib.")} - before)
    """
    assert run_python(program).endswith("set()\n")


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


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    page = (SOURCE.parent / "docs" / "command-line.md").read_text()
    lines = [line.removeprefix("$ ") for line in page.splitlines() if line.startswith("$ ")]
    assert len(lines) > 10
    with Topic.create(tmp_path / "data" / "mail") as mail, mail.share("send"):  # of its section on shares
        pass
    command = tmp_path / "bin" / "loglib"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m loglib "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    script = "set -e\n" + "\n".join(lines)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"10.0.0.1 - - [17/May/2015" in done.stdout
