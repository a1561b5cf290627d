"""`cat --format X | append --format X` gives the same records, and what cannot be read stops with its line."""

import json
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import commands
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import Cli, started
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_record_lines import HOSTILE, RECORDS

from conftest import NOW, QUIET, SECOND
from loglib import Record, Topic
from loglib.cli.program import run

cli = commands.cli
clicks = commands.clicks
FORMS = ["jsonl", "csv", "parquet"]


def without_places(path: Path) -> list[list[tuple[Any, ...]]]:
    """The records of each partition, without their offsets."""
    with Topic.open(path, mode="r") as topic:
        return [
            [(each.timestamp, each.key, each.value, each.headers) for each in one.read()] for one in topic.partitions
        ]  # fmt: skip


def fill(path: Path, records: list[Record], partitions: int = 1) -> Path:
    with Topic.create(path, partitions=partitions, **QUIET) as topic:
        for number, each in enumerate(records):
            where = number % partitions
            topic.append(each.value, each.key, timestamp=each.timestamp, headers=each.headers, partition=where)
    return path


def piped(source: Path, to: Path, form: str, *options: str) -> bytes:
    """What `append` says after `cat --format F SOURCE | append --format F TO`."""
    with started("cat", source, "--format", form) as printing:
        appending = started("append", to, "--create", "--format", form, *options, stdin=printing.stdout)
        _, errors = appending.communicate(timeout=60)
        assert printing.wait(60) == 0 and appending.returncode == 0, errors
    return errors


@pytest.mark.parametrize("form", FORMS)
def test_records_are_the_same_after_a_pipe_of_two_processes(tmp_path: Path, form: str) -> None:
    contents = [None, *HOSTILE, bytes(range(256)), b"x" * 3_000_000]
    records = [
        Record(0, 0, NOW + number * SECOND, contents[-number], content, (("h", content or b""),) * (number % 3), 0)
        for number, content in enumerate(contents)
    ]  # fmt: skip
    source = fill(tmp_path / "source", records, partitions=3)
    said = piped(source, fill(tmp_path / "same", [], partitions=3), form, "--keep-partitions")
    assert said.startswith(b"appended %d records" % len(records))
    assert without_places(tmp_path / "same") == without_places(source)
    piped(source, tmp_path / "one", form)
    (found,) = without_places(tmp_path / "one")
    assert sorted(map(repr, found)) == sorted(repr(each) for one in without_places(source) for each in one)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(RECORDS, max_size=6))
def test_any_records_are_the_same_after_a_file(
    cli: Cli, tmp_path_factory: pytest.TempPathFactory, form: str, records: list[Record]
) -> None:
    place = tmp_path_factory.mktemp("any")
    source = fill(place / "source", records)
    with (place / "file").open("w") as file, redirect_stdout(file):
        assert run(["cat", str(source), "--format", form]) == 0
    done = cli("append", place / "to", place / "file", "--create", "--format", form)
    count = "1 record," if len(records) == 1 else f"{len(records)} records,"
    assert done.code == 0 and done.errors.splitlines()[-1].startswith(f"appended {count}")
    assert without_places(place / "to") == without_places(source)


def test_json_is_the_same_by_both_names_and_is_found_by_filters(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    assert cli("cat", clicks, "--json") == cli("cat", clicks, "--format", "jsonl")
    (tmp_path / "file").write_text(cli("cat", clicks, "--format", "csv", "--key", "k3").output)
    assert (tmp_path / "file").read_text().splitlines()[1].endswith(",k3,,value 3,,")
    assert cli("append", tmp_path / "t", tmp_path / "file", "--create", "--format", "csv").code == 0
    assert cli("cat", tmp_path / "t").output == "value 3\n"


def test_lines_that_are_records_are_noticed_without_the_option(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(cli("cat", clicks, "--json").output)
    done = cli("append", tmp_path / "t", tmp_path / "file", "--create")
    assert done.code == 0 and "with --format jsonl, `append` appends the records" in done.errors
    assert cli("cat", tmp_path / "t", "-n", 1).output.startswith('{"partition": '), "what was asked for is done"


@pytest.mark.parametrize(
    ("form", "content", "problem"),
    [
        ("jsonl", b'{"value": "a"}\n\n{"value": "b"}\nplain\n{"value": "c"}\n', "line 4: it is not JSON"),
        ("csv", b'value,key\na,\n"b\n",k\nc\n', "line 5: it has 1 cells for 2 columns"),
        ("csv", b'value\na\nb\n"c\nd\n', "line 4: a cell in quotes begins in this row and has no end"),
    ],
    ids=["jsonl", "csv", "open quote"],
)  # fmt: skip
def test_record_that_cannot_be_read_names_its_line_and_what_is_in(
    cli: Cli, tmp_path: Path, form: str, content: bytes, problem: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    done = cli("append", tmp_path / "t", tmp_path / "file", "--create", "--format", form)
    assert done.code == 3 and problem in done.errors and "2 records before it were appended" in done.errors
    assert len(without_places(tmp_path / "t")[0]) == 2


@pytest.mark.parametrize("form", FORMS)
def test_file_of_something_else_appends_nothing(cli: Cli, tmp_path: Path, form: str) -> None:
    (tmp_path / "csv").write_text("id,name,price\n1,bell,5.5\n")
    pq.write_table(pa.table({"id": [1], "name": ["bell"]}), tmp_path / "parquet")
    (tmp_path / "jsonl").write_text('{"id": 1, "name": "bell"}\n')
    done = cli("append", tmp_path / "t", tmp_path / form, "--create", "--format", form)
    assert done.code == 2 and "Nothing was appended" in done.errors and "id" in done.errors, done
    assert without_places(tmp_path / "t") == [[]]
    (tmp_path / "noise").write_bytes(b"\x00\xff" * 5000)
    noise = cli("append", tmp_path / "t", tmp_path / "noise", "--create", "--format", form)
    assert noise.code in (2, 3) and str(tmp_path / "noise") in noise.errors and "Traceback" not in noise.errors
    cut = (tmp_path / "parquet").read_bytes()[:-3]
    (tmp_path / "cut").write_bytes(cut)
    assert "Traceback" not in cli("append", tmp_path / "t", tmp_path / "cut", "--format", form).errors


def test_record_above_the_limit_is_named(cli: Cli, tmp_path: Path) -> None:
    Topic.create(tmp_path / "t", max_record_bytes=10, **QUIET).close()
    (tmp_path / "file").write_text('{"value": "small"}\n{"value": "0123456789", "key": "k"}\n')
    done = cli("append", tmp_path / "t", tmp_path / "file", "--format", "jsonl")
    assert done.code == 3 and "line 2: its record has 11 bytes; --max-record-bytes of the topic is 10" in done.errors
    (tmp_path / "escaped").write_text('{"value": "' + r"\u0000" * 10 + '"}\n')
    assert cli("append", tmp_path / "t", tmp_path / "escaped", "--format", "jsonl").code == 0
    other = cli("append", tmp_path / "t", tmp_path / "file", "--format", "jsonl", "--keep-partitions")
    assert other.code == 3, "a record that names no partition goes by its key"


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("form", "begin", "half"), [("jsonl", b"", b'{"value": "ha'), ("csv", b"value\n", b'"ha')], ids=["jsonl", "csv"]
)
def test_signal_loses_no_whole_record_that_was_read_from_a_pipe(
    tmp_path: Path, form: str, begin: bytes, half: bytes
) -> None:
    appending = started("append", tmp_path / "t", "--create", "--format", form, "--sync", stdin=subprocess.PIPE)
    assert appending.stdin is not None
    lines = [b'{"value": "%d"}\n' % each if form == "jsonl" else b"%d\n" % each for each in range(1000)]
    appending.stdin.write(begin + b"".join(lines) + half)
    appending.stdin.flush()
    wait_for(tmp_path / "t", 1000)
    appending.send_signal(signal.SIGTERM)
    assert appending.wait(30) == 143
    assert len(without_places(tmp_path / "t")[0]) == 1000
    appending.communicate()


def wait_for(path: Path, count: int) -> None:
    """Wait until the topic has this number of records."""
    while not (path / "topic.json").exists():
        time.sleep(0.01)
    with Topic.open(path, mode="r") as topic, topic.follow("begin", timeout=30) as reader:
        assert sum(1 for _ in islice(reader, count)) == count


def test_record_of_parquet_that_is_too_large_is_named_by_its_place_in_the_file(cli: Cli, tmp_path: Path) -> None:
    Topic.create(tmp_path / "t", max_record_bytes=100, **QUIET).close()
    table = pa.table({"value": pa.array([b"x" * 10] * 4 + [b"x" * 200], pa.binary())})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    done = cli("append", tmp_path / "t", tmp_path / "rows.parquet", "--format", "parquet")
    assert "rows.parquet, record 5: it has 200 bytes, and the limit is 100. " in done.errors
    with Topic.open(tmp_path / "t", mode="r") as topic:
        count = sum(1 for _ in topic.read())
    assert f"{count} records before it were appended" in done.errors if count else "Nothing was appended" in done.errors


def test_gigabyte_without_an_end_takes_bounded_memory_in_each_format(tmp_path: Path) -> None:
    program = """
import sys
from loglib.cli.program import run
code = run(sys.argv[1:])
with open("/proc/self/status") as status:
    print(code, next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM")))
"""
    Topic.create(tmp_path / "t", max_record_bytes=1 << 20, **QUIET).close()
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.write(b'value\n"')
        file.truncate(1 << 30)
    for form in ("jsonl", "csv"):
        command = [sys.executable, "-c", program, "append", str(tmp_path / "t"), str(huge), "--format", form]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        code, most_mib = map(int, done.stdout.split())
        assert code == 2 and most_mib < 150, done


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--format", "jsonl", "--key", "k"], "--key is for lines"), (["--format", "csv", "-0"], "--null is for lines"),
        (["--keep-partitions"], "is for --format"), (["--format", "jsonl", "--keep-partitions", "-p", "0"], "not both"),
        (["--format", "xml"], "xml"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(cli: Cli, clicks: Path, tmp_path: Path, options: list[str], problem: str) -> None:
    (tmp_path / "file").write_text("")
    done = cli("append", clicks, tmp_path / "file", *options)
    assert done.code == 2 and problem in done.errors
    assert cli("append", clicks, tmp_path / "file", "--format", "jsonl").errors == "appended 0 records, 0 bytes\n"


def test_form_that_does_not_exist_is_named_with_the_nearest(cli: Cli, clicks: Path) -> None:
    done = cli("cat", clicks, "--format", "json")
    assert done.code == 2 and "is jsonl meant?" in done.errors
    assert cli("cat", clicks, "--format", "csv", "-0").code == 2
    assert cli("cat", clicks, "--format", "parquet", "--raw").code == 2


@pytest.mark.parametrize("form", FORMS)
def test_reader_that_leaves_is_an_error_of_nobody(tmp_path: Path, form: str) -> None:
    with Topic.create(tmp_path / "t", **QUIET) as topic:
        topic.append_many([b"%d" % number * 200 for number in range(100_000)])
    with started("cat", tmp_path / "t", "--format", form) as printing:
        assert printing.stdout is not None and printing.stderr is not None
        printing.stdout.read(10)
        printing.stdout.close()
        assert printing.wait(60) == 141 and printing.stderr.read() == b""


def test_other_tools_read_what_is_written(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    import csv

    with (tmp_path / "csv").open("wb") as file, started("cat", clicks, "--format", "csv") as printing:
        file.write(printing.communicate()[0])
    with (tmp_path / "csv").open(newline="") as text:
        assert [row["value"] for row in csv.DictReader(text)] == [f"value {number}" for number in (0, 2, 4, 1, 3, 5)]
    with (tmp_path / "parquet").open("wb") as file, started("cat", clicks, "--format", "parquet") as printing:
        file.write(printing.communicate()[0])
    assert sorted(pq.read_table(tmp_path / "parquet")["key"].to_pylist()) == [b"k%d" % number for number in range(6)]
    values = [json.loads(line)["value"] for line in cli("cat", clicks, "--format", "jsonl").output.splitlines()]
    assert sorted(values) == [f"value {number}" for number in range(6)]
