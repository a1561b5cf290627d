"""`top`: sizes, growth, ages and lags of topics; once in a pipe, and again and again on a terminal."""

import os
import pty
import signal
import sys
from pathlib import Path

import commands
import pytest
from commands import Cli

from conftest import QUIET
from loglib import Topic
from loglib.cli import top
from loglib.log.lag import Lag, measure_lag
from loglib.log.log import Log

cli = commands.cli
clicks = commands.clicks


def test_topics_are_printed_once_in_a_pipe(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, mode="r") as topic:
        topic.reset_group("slow", "begin")
        topic.reset_group("fast", "end")
        size = sum(each.high_watermark - each.log_start_offset for each in topic.partitions)
    Topic.create(clicks.parent / "empty", **QUIET).close()
    found, empty = cli("top", clicks.parent, "--json", "--count").objects
    assert (found["topic"], found["partitions"], found["records"], found["size_bytes"]) == ("clicks", 2, 6, size)
    assert found["lag_bytes"] == size and found["bytes_per_second"] is None and found["oldest_age_us"] > 0
    assert (empty["records"], empty["lag_bytes"], empty["oldest_age_us"], empty["error"]) == (0, None, None, None)
    shown = cli("top", clicks.parent)
    assert shown.code == 0 and shown.output.split()[:4] == ["TOPIC", "PARTITIONS", "SIZE", "RATE"]
    assert cli("top", clicks.parent / "nowhere").code == 2


def test_damaged_topic_has_its_error_in_the_table(cli: Cli, clicks: Path) -> None:
    Topic.create(clicks.parent / "broken", **QUIET).close()
    (clicks.parent / "broken" / "topic.json").write_text("{")
    broken, sound = cli("top", clicks.parent, "--json").objects
    assert "topic.json" in broken["error"] and sound["error"] is None
    assert "topic.json" in cli("top", clicks.parent).output


def test_second_look_has_the_growth_and_counts_only_what_is_new(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, before = top._facts(str(clicks), None, count=True)
    with Topic.open(clicks) as topic:
        topic.append_many([b"x" * 1000] * 50, partition=1)
        topic.flush()
        grown = topic.partition(1).high_watermark - before.ends[1]
    measured: list[int] = []
    def measuring(log: Log, offset: int, *, now_us: int, count_records: bool) -> Lag:
        measured.append(offset)
        return measure_lag(log, offset, now_us=now_us, count_records=count_records)

    monkeypatch.setattr(top, "measure_lag", measuring)
    facts, after = top._facts(str(clicks), before, count=True)
    assert facts["records"] == after.records == 56 and measured == [before.ends[0], before.ends[1]]
    assert facts["bytes_per_second"] * (after.taken_at - before.taken_at) == pytest.approx(grown)
    again, _ = top._facts(str(clicks), after, count=True)
    assert again["records"] == 56 and again["bytes_per_second"] == 0
    with Topic.open(clicks) as topic:
        topic.partition(1).roll()
        topic.partition(1).delete_before(topic.partition(1).high_watermark)
    dropped, _ = top._facts(str(clicks), after, count=True)
    assert dropped["records"] == 3


@pytest.mark.usefixtures("unmeasured")
def test_table_is_printed_again_on_a_terminal_until_a_signal(clicks: Path) -> None:
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-m", "loglib", "top", str(clicks), "--every", "0.1"])
    found = b""
    while found.count(b"TOPIC") < 3:
        found += os.read(terminal, 1 << 16)
    os.kill(child, signal.SIGTERM)
    while True:  # so that it can write its last table
        try:
            os.read(terminal, 1 << 16)
        except OSError:
            break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    os.close(terminal)
    assert b"/s" in found, "the second table has a rate"
