"""The examples do what they say, run as a reader would run them: each in a process of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from counts import need

import accesslog
import pageviews
from conftest import interrupted
from loglib import Topic

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HOUR_US = 3600 * 1_000_000
LINE = b'83.149.9.216 - - [17/May/2015:10:05:03 +0000] "GET /blog/?page=2 HTTP/1.1" 200 203023 "-" "Mozilla/5.0"'


def start(example: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / example), *map(str, arguments)]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(example: str, *arguments: object, **environment: str) -> str:
    """Run the example to its end and return what it printed."""
    process = start(example, *arguments, **environment)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-4000:]
    assert "Traceback" not in errors
    return output


def table_of(output: str) -> str:
    return output[output.index("   page  ") : output.index("\nChart:")]


# All of them


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_opens_by_saying_what_it_shows(path: Path) -> None:
    assert path.read_text("utf-8").startswith('"""')


@pytest.mark.parametrize(
    "example",
    ["accesslog", "exactly_once", "jobs", "mirror_hosts", "pageviews", "replay", "serve", "tail", "workers"],
)
def test_example_explains_its_arguments(example: str) -> None:
    assert "usage:" in run(f"{example}.py", "--help")


def test_quickstart_reads_back_what_it_wrote() -> None:
    output = run("quickstart.py")
    assert "10005 records in all" in output
    assert "just in: b'news'" in output


# Access log lines


@pytest.mark.parametrize(
    ("line", "hit"),
    [
        pytest.param(LINE, (b"83.149.9.216", 1431857103_000_000, "/blog/"), id="combined"),
        pytest.param(LINE[:-18], (b"83.149.9.216", 1431857103_000_000, "/blog/"), id="common"),
        pytest.param(LINE.replace(b"+0000", b"+0230"), (b"83.149.9.216", 1431848103_000_000, "/blog/"), id="east"),
        pytest.param(LINE.replace(b"+0000", b"-0100"), (b"83.149.9.216", 1431860703_000_000, "/blog/"), id="west"),
        pytest.param(LINE.replace(b"/blog/?page=2", b"/a.PNG"), (b"83.149.9.216", 1431857103_000_000, None), id="png"),
        pytest.param(LINE.replace(b"GET", b"\\x16\\x03"), (b"83.149.9.216", 1431857103_000_000, None), id="no request"),
        pytest.param(LINE.replace(b"203023", b"-"), (b"83.149.9.216", 1431857103_000_000, "/blog/"), id="no size"),
        pytest.param(LINE.replace(b"17/May", b"31/Feb"), None, id="no such day"),
        pytest.param(LINE.replace(b"May", b"Mai"), None, id="no such month"),
        pytest.param(LINE[:60], None, id="cut off"),
        pytest.param(b"", None, id="empty"),
        pytest.param(b"Jun 14 15:16:01 combo sshd[19939]: check pass; user unknown", None, id="syslog"),
        pytest.param(bytes(range(256)), None, id="binary"),
    ],
)
def test_access_log_line_is_parsed_or_refused(line: bytes, hit: tuple[bytes, int, str | None] | None) -> None:
    assert accesslog.parse(line) == hit


def test_generated_lines_are_the_same_for_a_seed_and_in_order_of_time() -> None:
    lines = list(accesslog.generate(5000, seed=7))
    hits = [hit for hit in map(accesslog.parse, lines) if hit]
    times = [hit.timestamp_us for hit in hits]
    assert len(lines) == 5000
    assert len(hits) > 4950
    assert times == sorted(times)
    assert lines == list(accesslog.generate(5000, seed=7)) != list(accesslog.generate(5000, seed=8))


def test_generated_lines_are_skewed() -> None:
    hits = [hit for hit in map(accesslog.parse, accesslog.generate(5000)) if hit]
    by_host = Counter(hit.host for hit in hits)
    assert by_host.most_common(1)[0][1] > 20 * len(hits) / len(by_host)


# Page views


@pytest.fixture
def access_log(tmp_path: Path) -> Path:
    path = tmp_path / "access.log"
    path.write_bytes(b"\n".join([*accesslog.generate(3000), b"not a line \xff", LINE]) + b"\n")
    return path


def count(*arguments: object, **environment: str) -> str:
    return run("pageviews.py", *arguments, "--seconds", 0.3, **environment)


def test_pageviews_counts_made_up_lines_and_draws_a_chart(tmp_path: Path) -> None:
    output = count("--lines", 20_000, "--python", "--out", tmp_path)
    assert "with plain Python (as asked for)" in output
    appended, counted = re.findall(r"^   ([\d,]+) records(?:;| counted)", output, re.MULTILINE)
    assert appended == counted > "19,000"
    assert "the stream has the same count for each minute and page\n" in output
    assert "hosts found in more than one: 0\n" in output
    assert accesslog.FLARE_PAGE in table_of(output)
    assert (tmp_path / "pageviews.png").read_bytes().startswith(b"\x89PNG")


def test_pageviews_are_written_in_the_given_time_and_counted_meanwhile(tmp_path: Path) -> None:
    output = run("pageviews.py", "--lines", 1000, "--seconds", 1, "--python", "--out", tmp_path)
    seconds, batches = re.findall(r"appended in ([\d.]+) s|counted in (\d+) batches", output)
    assert 1 <= float(seconds[0]) < 10
    assert int(batches[1]) > 3


def test_pageviews_keeps_and_reports_lines_that_are_no_hits(access_log: Path, tmp_path: Path) -> None:
    malformed = [line for line in access_log.read_bytes().splitlines() if accesslog.parse(line) is None]
    output = count(access_log, "--python", "--out", tmp_path / "out")
    assert f"{3002 - len(malformed):,} records; " in output
    assert f"{len(malformed)} lines are no access-log lines" in output
    with Topic.open(tmp_path / "out" / "rejected", mode="r") as rejected:
        assert [record.value for record in rejected.read()] == malformed


def test_pageviews_starts_afresh_each_time(access_log: Path, tmp_path: Path) -> None:
    once = count(access_log, "--python", "--out", tmp_path / "out")
    assert table_of(count(access_log, "--python", "--out", tmp_path / "out")) == table_of(once)


def test_pageviews_says_so_where_no_line_is_an_access_log_line(tmp_path: Path) -> None:
    log = tmp_path / "messages"
    log.write_text("Jun 14 15:16:01 combo sshd[19939]: check pass; user unknown\n" * 50)
    output = count(log, "--python", "--out", tmp_path / "out")
    assert "50 lines are no access-log lines" in output
    assert "Nothing to count: no line of messages is an access-log line" in output


def test_pageviews_copes_with_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    assert "Nothing to count" in count(tmp_path / "empty.log", "--python", "--out", tmp_path / "out")


def test_pageviews_says_so_where_there_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "images.log").write_bytes(LINE.replace(b"/blog/?page=2", b"/logo.png") + b"\n")
    output = count(tmp_path / "images.log", "--python", "--out", tmp_path / "out")
    assert "Nothing to draw" in output


def test_pageviews_without_java_counts_in_python_and_says_so(tmp_path: Path) -> None:
    output = count("--lines", 1000, "--out", tmp_path, JAVA_HOME="", PATH="")
    assert "with plain Python (Spark needs Java 17 or newer, and there is none)" in output


def test_progress_is_one_line_of_a_terminal_and_nothing_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = pageviews.Progress()
    progress.records, progress.batches = 12_000, 3
    progress.show("500 records")
    progress.summary()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress.show("500 records")
    output, errors = capsys.readouterr()
    assert output == "" and re.match(r"   12,000 records   [\d,]+/s   batch 3   500 records behind *\r$", errors)


@pytest.mark.spark
@pytest.mark.slow
def test_spark_counts_what_plain_python_counts(access_log: Path, tmp_path: Path) -> None:
    in_spark = count(access_log, "--out", tmp_path / "spark")
    in_python = count(access_log, "--python", "--out", tmp_path / "python")
    assert "with Spark" in in_spark
    assert table_of(in_spark) == table_of(in_python)


# The others


@pytest.fixture
def topic_path(tmp_path: Path) -> Path:
    """A topic of two partitions with twenty hourly records."""
    path = tmp_path / "hourly"
    with Topic.open(path, create=True, partitions=2) as topic:
        for hour in range(20):
            key, headers = b"key %d" % (hour % 5), {"n": b"%d" % hour}
            topic.append(b"hour %d" % hour, key, timestamp=hour * HOUR_US, headers=headers)
    return path


def test_tail_prints_what_is_there_and_stops_after_silence(topic_path: Path) -> None:
    lines = run("tail.py", topic_path, "--start", "begin", "--timeout", 0.5).splitlines()
    assert len(lines) == 20
    assert any(line.startswith("1970-01-01 19:00:00 ") and line.endswith(" key 4 hour 19") for line in lines)


@pytest.mark.usefixtures("unmeasured")
def test_tail_prints_what_comes_until_interrupted(topic_path: Path) -> None:
    process = start("tail.py", topic_path, "--start", "begin")
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    with Topic.open(topic_path, create=True) as topic:
        topic.append(b"news", sync=True)
        assert process.stdout.readline().endswith(" - news\n")
    output, errors = interrupted(process)
    assert (process.returncode, output, errors) == (0, "", "")


def test_tail_into_a_closed_pipe_ends_quietly(topic_path: Path) -> None:
    """As behind `| head -1`: it said "Broken pipe"."""
    process = start("tail.py", topic_path, "--start", "begin")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    with Topic.open(topic_path, create=True) as topic:
        for number in range(1000):
            topic.append(b"%d" % number * 100, sync=True)
            if process.poll() is not None:
                break
    with process.stderr:
        assert process.wait(30) == 0 and process.stderr.read() == ""


def test_tail_of_a_missing_topic_says_so_in_one_line(tmp_path: Path) -> None:
    process = start("tail.py", tmp_path / "missing")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.startswith("tail: ")
    assert "missing" in errors
    assert errors.count("\n") == 1


def test_replay_keeps_time_order_keys_headers_and_timestamps(topic_path: Path, tmp_path: Path) -> None:
    assert "20 records replayed" in run("replay.py", topic_path, tmp_path / "again", "--speed", 1_000_000)
    with Topic.open(topic_path, mode="r") as topic, Topic.open(tmp_path / "again", mode="r") as again:
        for index in range(2):
            past, copy = (list(each.partition(index).read()) for each in (topic, again))
            assert [record[2:6] for record in copy] == [record[2:6] for record in past]


@pytest.mark.usefixtures("unmeasured")
def test_serve_copies_a_topic_over_a_socket_and_goes_on_where_it_was(topic_path: Path, tmp_path: Path) -> None:
    server = start("serve.py", "send", topic_path)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split()[-1]
        copy_path = tmp_path / "copy"
        run("serve.py", "receive", copy_path, "--port", port)
        with Topic.open(topic_path, create=True) as topic:
            topic.append(b"news", sync=True)
        run("serve.py", "receive", copy_path, "--port", port)
        with Topic.open(topic_path, mode="r") as topic, Topic.open(copy_path, mode="r") as copy:
            assert sorted(copy.read()) == sorted(topic.read())
            assert sum(1 for _ in copy.read()) == 21
    finally:
        interrupted(server)


def test_workers_handle_every_line_though_they_are_killed(access_log: Path) -> None:
    process = start("workers.py", access_log, "--workers", 3, "--kills", 2, "--work", 0.5)
    assert process.stdout is not None
    killed = 0
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "has process id" in line and killed < 3:
            os.kill(int(line.split()[-1]), signal.SIGKILL)  # some of them before they have begun
            killed += 1
    _, errors = process.communicate(timeout=60)
    output = "".join(seen)
    assert process.returncode == 0, errors[-4000:]
    assert output.count("died of SIGKILL") >= 3
    assert "3,002 of 3,002 lines handled" in output


ONCE = """\
bills: 2,000 of 2,000 orders, 0 of them more than once
stock: 2,000 of 2,000 orders, 0 of them more than once
"""


def test_exactly_once_is_so_and_a_second_start_adds_nothing(tmp_path: Path) -> None:
    first = run("exactly_once.py", tmp_path, "--orders", 2000, "--work", 0)
    assert first.startswith("2,000 orders\ntransaction 0: ") and "2,000 orders in this run\n" + ONCE in first
    again = run("exactly_once.py", tmp_path, "--orders", 2000)
    assert again == f"the orders are there already\n{ONCE}each order has its effect exactly once\n"


def test_exactly_once_is_so_though_it_is_killed(tmp_path: Path) -> None:
    arguments = tmp_path, "--orders", 2000, "--at-once", 50
    for lines_until in (1, 4, 9):
        process = start("exactly_once.py", *arguments)
        assert process.stdout is not None
        for _ in range(lines_until):
            assert process.stdout.readline()
        process.kill()
        process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
    output = run("exactly_once.py", *arguments)
    assert output.startswith("the orders are there already\ntransaction ")
    assert output.endswith(f"{ONCE}each order has its effect exactly once\n")
    assert "2,000 orders in this run" not in output


@pytest.mark.usefixtures("unmeasured")
def test_exactly_once_stops_at_an_interrupt(tmp_path: Path) -> None:
    process = start("exactly_once.py", tmp_path, "--orders", 5000, "--at-once", 50, "--work", 1)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    _, errors = interrupted(process)
    assert (process.returncode, errors) == (1, "stopped; start it again to go on\n")


@pytest.mark.slow
def test_mirror_on_another_host_outlives_its_link() -> None:
    need(os.geteuid() == 0 and shutil.which("ip"), "root and iproute2, for network namespaces")
    assert "are the same on both hosts" in run("mirror_hosts.py", "--cuts", "6")
