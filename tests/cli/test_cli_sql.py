"""SQL over topics: tables by their names, in constant memory, with the errors of the log and of the query."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import commands
import pytest
from builders import spoil
from commands import Cli, started

from conftest import MANUAL, NOW, QUIET, SECOND, interrupted, last_segment
from loglib import Topic

cli = commands.cli


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory with two topics: orders in two partitions, and users."""
    place = tmp_path / "data"
    with Topic.create(place / "orders", partitions=2, **QUIET) as orders:
        for number in range(6):
            value = b'{"user": %d, "price": %d.5}' % (number % 3, number)
            key, time = b"k%d" % number, NOW + number * SECOND
            orders.append(value, key, partition=number % 2, timestamp=time, headers={"h": b"1"})
        orders.append(b"\xff\x00", None, partition=0, timestamp=NOW)
        orders.append(None, b"\x1b[31m", partition=1, timestamp=NOW)
    with Topic.create(place / "users-2.x", **QUIET) as users:
        users.append_many([b'{"id": %d, "name": "user %d"}' % (number, number) for number in range(3)])
    return place


def test_topics_are_tables_by_their_names(cli: Cli, data: Path) -> None:
    found = cli(
        "sql", "-C", data, "--json", 'select key, "offset" > 0 as o, timestamp from orders order by all limit 1'
    )  # fmt: skip
    assert found.code == 0 and found.errors == ""
    assert found.objects[0] == {"key": "\x1b[31m", "o": True, "timestamp": "2023-11-14T22:13:20+00:00"}
    joined = cli("sql", "-C", data, "--json", """
        select as_json(u.value)->>'name' as name, sum((as_json(o.value)->>'price')::double) as spent
        from ORDERS o join "users-2.x" u on as_json(o.value)->>'user' = as_json(u.value)->>'id' group by 1 order by 1
    """).objects  # fmt: skip
    assert joined == [{"name": f"user {number}", "spent": number * 2 + 4.0} for number in range(3)]


def test_table_is_read_again_for_each_use_in_a_query(cli: Cli, data: Path) -> None:
    query = 'select count(*) as n from orders a join orders b using (partition, "offset")'
    assert cli("sql", "-C", data, "--json", query).objects == [{"n": 8}]
    nested = "with o as (select * from orders) select (select count(*) from o) + (select count(*) from orders) as n"
    assert cli("sql", "-C", data, "--json", nested).objects == [{"n": 16}]


def test_bytes_and_headers_come_as_json_has_them(cli: Cli, data: Path) -> None:
    query = "select value, as_text(value) as t, as_json(value) as j, headers from orders"
    rows = cli("sql", "-C", data, "--json", query + " where key is null or value is null").objects
    assert {"value": None, "t": None, "j": None, "headers": None} in rows
    assert {"value_base64": "/wA=", "t": None, "j": None, "headers": None} in rows
    (one,) = cli("sql", "-C", data, "--json", "select headers from orders where key = 'k0'").objects
    assert one == {"headers": [{"key": "h", "value": "1"}]}
    nested = "select [{'b': '\\xFF'::blob}, {'b': '\\xFF'}] as n"
    (one,) = cli("sql", "-C", data, "--json", nested.replace("{'b': '\\xFF'}]", "{'b': 'a'::blob}]")).objects
    assert one == {"n": [{"b_base64": "/w=="}, {"b": "a"}]}


def test_result_is_a_table_that_is_safe_for_a_terminal(cli: Cli, data: Path) -> None:
    query = "select partition, key, value from orders order by timestamp, key nulls last limit 3"
    shown = cli("sql", "-C", data, query)
    lines = shown.output.splitlines()
    assert lines[0].split() == ["partition", "key", "value"] and shown.code == 0
    assert r"\x1b[31m" in shown.output and "\x1b" not in shown.output and r"\xff\x00" in shown.output
    many = cli("sql", "select range as n, 'x' || range as text from range(2500)").output.splitlines()
    assert len(many) == 2501 and many[-1].split() == ["2499", "x2499"]


def test_times_and_numbers_that_json_or_python_do_not_have_are_text(cli: Cli, tmp_path: Path) -> None:
    with Topic.create(tmp_path / "t", **QUIET) as topic:
        topic.append(b"late", timestamp=1 << 62)
        topic.append(b"early", timestamp=-(1 << 62))
    found = cli("sql", "-C", tmp_path, "--json", "select timestamp from t order by timestamp")
    assert [each["timestamp"] for each in found.objects] == [f"{-(1 << 62)} us", f"{1 << 62} us"]
    assert f"{1 << 62} us" in cli("sql", "-C", tmp_path, "select max(timestamp) from t").output
    query = "select 'nan'::double as n, sum(1) as s, 5.50::decimal(4, 2) as d, 0.1::decimal(38, 37) / 3 as q, true as b"
    (one,) = cli("sql", query, "--json").objects
    assert (one["n"], one["s"], one["d"], one["b"]) == ("nan", 1, 5.5, True)
    assert cli("sql", "select true as b, null as n").output.splitlines()[1].split() == ["true", "null"]


def test_word_offset_is_explained(cli: Cli, data: Path) -> None:
    for query in ("select offset from orders", "select max(offset) from orders", "from orders where offset > 1"):
        done = cli("sql", "-C", data, query)
        assert done.code == 2 and 'write the column as "offset", in double quotes' in done.errors
    assert cli("sql", "-C", data, "select * from orders offset 7").output.count("\n") == 2
    wrong = cli("sql", "-C", data, 'select "offset" form orders')
    assert wrong.code == 2 and "belongs to SQL" not in wrong.errors


def test_csv_of_other_columns_becomes_records_with_json(cli: Cli, tmp_path: Path) -> None:
    """The two steps of docs/command-line.md."""
    rows, packed = tmp_path / "visits.csv", tmp_path / "visits.parquet"
    rows.write_text("user,page,seen\nann,/a,2026-11-26T10:00:00Z\nbob,/b,2026-11-26 11:00:00+00\n")
    query = (
        "copy (select user as key, to_json(t)::varchar as value, seen::timestamptz as timestamp "
        f"from '{rows}' t) to '{packed}'"
    )
    assert cli("sql", "-C", tmp_path, query).code == 0
    assert cli("append", tmp_path / "visits", packed, "--create", "--format", "parquet").code == 0
    with Topic.open(tmp_path / "visits", mode="r") as topic:
        found = [(each.key, each.value, each.timestamp) for each in topic.read()]
    assert [key for key, *_ in found] == [b"ann", b"bob"] and found[1][2] - found[0][2] == 3600 * SECOND
    assert found[0][1] == b'{"user":"ann","page":"/a","seen":"2026-11-26 10:00:00+00"}'


def test_arrow_of_json_on_bytes_is_explained(cli: Cli, data: Path) -> None:
    """DuckDB makes null of it, without a word."""
    done = cli("sql", "-C", data, "select distinct value->>'user' from orders")
    assert done.code == 0 and "write as_json(value)->" in done.errors
    for right in ("as_json(value)->>'user'", "decode(value)::json->>'user'", "value"):
        assert cli("sql", "-C", data, f"select {right} from orders limit 1").errors == ""


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("select * from ordesr", "The topics in"), ("select nothing from orders", "nothing"), ("", "is empty"),
        ("selec 1", "syntax error"), ("select $1", "parameter"),
    ],
)  # fmt: skip
def test_wrong_query_is_a_wrong_command(cli: Cli, data: Path, query: str, problem: str) -> None:
    done = cli("sql", "-C", data, query)
    assert done.code == 2 and problem in done.errors and "Traceback" not in done.errors
    assert cli("sql", "-C", data / "orders", "select 1").code == 2, "it is a topic, and no directory of topics"


def test_topics_whose_names_differ_only_in_case_are_refused_together(cli: Cli, data: Path) -> None:
    Topic.create(data / "Orders", **QUIET).close()
    assert cli("sql", "-C", data, "--json", "select count(*) as n from orders").objects == [{"n": 8}]
    assert cli("sql", "-C", data, "--json", "select count(*) as n from Orders").objects == [{"n": 0}]
    both = cli("sql", "-C", data, "select 1 from orders, Orders")
    assert both.code == 2 and "Orders and orders differ only in case" in both.errors
    shown = cli("sql", "-C", data, "--json", "select name from (show tables) where name = 'users-2.x'")
    assert shown.objects == [{"name": "users-2.x"}], "and the others"
    assert cli("sql", "-C", data, "select 1 from ORDERS").code == 2


def test_damage_ends_the_query_with_its_place_and_code_or_is_skipped(cli: Cli, data: Path) -> None:
    with Topic.open(data / "orders", mode="r") as topic:
        offset = next(iter(topic.partition(0).read())).offset
    spoil(last_segment(data / "orders"), 4096 + offset + 120)
    stopped = cli("sql", "-C", data, "select count(value) from orders")
    assert stopped.code == 1 and ".log, byte " in stopped.errors and "Traceback" not in stopped.errors
    skipped = cli("sql", "-C", data, "--json", "--skip-damage", "select count(*) as n from orders")
    assert skipped.code == 1 and skipped.objects[0]["n"] < 8 and skipped.errors.startswith("damage: ")


def test_statements_that_give_no_rows_work(cli: Cli, data: Path, tmp_path: Path) -> None:
    done = cli("sql", "-C", data, f"copy (select as_text(key) as key from orders) to '{tmp_path}/keys.csv' (header)")
    assert (done.code, done.output, done.errors) == (0, "", "8 rows\n")
    assert (tmp_path / "keys.csv").read_text().splitlines()[0] == "key"
    assert cli("sql", "-C", data, "set threads = 1; select count(*) as n from orders", "--json").objects == [{"n": 8}]


def test_topic_larger_than_the_memory_limit_is_streamed(tmp_path: Path) -> None:
    program = """
import sys
from loglib.cli.program import run
code = run(sys.argv[1:])
with open("/proc/self/status") as status:
    print(code, next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM")))
"""
    with Topic.create(tmp_path / "big", flush=MANUAL) as topic:
        for _ in range(40):
            topic.append_many([os.urandom(1000)] * 10_000)
            topic.flush()
    query = "set memory_limit = '100MB'; select count(*) as n, max(octet_length(value)) as m from big"
    command = [sys.executable, "-c", program, "sql", "-C", str(tmp_path), "--json", query]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, last = done.stdout.splitlines()
    code, most_mib = map(int, last.split())
    assert rows == '{"n": 400000, "m": 1000}' and code == 0 and most_mib < 350, done


def test_reader_that_leaves_ends_it_without_a_word() -> None:
    with started("sql", "--json", "select range as n from range(10000000)") as printing:
        assert printing.stdout is not None and printing.stderr is not None
        printing.stdout.read(10)
        printing.stdout.close()
        assert printing.wait(60) == 141 and printing.stderr.read() == b""


def processor_ticks(pid: int) -> int:
    """The processor time that the process has taken, as the system counts it (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.usefixtures("unmeasured")
def test_interrupt_ends_a_query_that_would_take_for_ever(tmp_path: Path) -> None:
    begun = tmp_path / "begun.csv"
    query = f"copy (select 1) to '{begun}'; select count(*) from range(1000000000000) where range % 7 = 3"
    running = started("sql", query)
    while not begun.exists():
        assert running.poll() is None
        time.sleep(0.01)
    before = processor_ticks(running.pid)
    while processor_ticks(running.pid) < before + 30:  # of a hundredth of a second: the second statement runs
        assert running.poll() is None
        time.sleep(0.01)
    assert interrupted(running) == (b"", b"") and running.returncode == 130


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("duckdb", ["sql", "select 1"], "sql"), ("pyarrow", ["cat", "TOPIC", "--format", "parquet"], "arrow"),
        ("pyarrow", ["archive", "TOPIC", "archive", "--roll"], "arrow"), ("rich", ["verify", "TOPIC"], None),
    ],
    ids=["duckdb", "parquet", "archive", "none"],
)  # fmt: skip
def test_missing_extra_is_named_with_the_command_that_installs_it(
    data: Path, tmp_path: Path, package: str, command: list[str], extra: str | None
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / f"{package}.py").write_text(f"raise ModuleNotFoundError('no', name={package!r})\n")
    paths = os.pathsep.join([str(tmp_path / "hidden"), os.environ.get("PYTHONPATH", "")])
    words = [str(data / "orders") if each == "TOPIC" else each for each in command]
    done = subprocess.run(
        [sys.executable, "-m", "loglib", *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if extra is None:
        assert done.returncode == 0
    else:
        assert done.returncode == 3
        assert done.stderr == f"loglib: this needs {package}: pip install 'loglib-segments[{extra}]'\n"


def test_topic_that_is_deleted_while_it_is_read_is_an_error_in_one_line(tmp_path: Path) -> None:
    with Topic.create(tmp_path / "t", flush=MANUAL) as topic:
        for _ in range(20):
            topic.append_many([b"%d" % number * 300 for number in range(2000)])
            topic.partition(0).roll()
    for command in (["cat", tmp_path / "t"], ["sql", "-C", tmp_path, "--json", "select value from t"]):
        shutil.copytree(tmp_path / "t", tmp_path / "kept")
        with started(*command) as reading:
            assert reading.stdout is not None and reading.stderr is not None
            reading.stdout.readline()
            Topic.delete(tmp_path / "t")
            reading.stdout.read()
            errors = reading.stderr.read()
            assert reading.wait(60) == 3 and errors.count(b"\n") == 1 and errors.startswith(b"loglib: "), errors
        (tmp_path / "kept").rename(tmp_path / "t")


def test_column_that_is_called_count_is_shown(cli: Cli, data: Path) -> None:
    assert cli("sql", "-C", data, "--json", "select 7 as Count").objects == [{"Count": 7}]
    assert "text" in cli("sql", "-C", data, "select 'text' as Count").output


def test_columns_of_one_name_are_all_there(cli: Cli, data: Path) -> None:
    assert cli("sql", "-C", data, "--json", "select 1 as a, 2 as a, 3 as a").objects == [{"a": 1, "a_1": 2, "a_2": 3}]
