"""The paper's experiment: it runs, a consumer that gets other messages fails it, and the page has its figures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from paper_cases import SYSTEMS, Case, System  # noqa: E402
from paper_charts import curve, draw  # noqa: E402
from paper_report import Row, section, with_section  # noqa: E402
from paper_roles import Measured, Work, consume, expected_checksum, produce  # noqa: E402

PAGE = BENCH.parent / "docs" / "guarantees.md"


def paper(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "paper.py"), "--dir", str(cwd), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=240)


def figures(system: System, role: str, way: str, rate: float) -> Row:
    points = [(1000 * number, 1000 * number / rate) for number in range(101)]
    measured = Measured(100_000, points[-1][1], 1.5, 50_000_000, 7, points)
    row = Row(system, "50", role, way, measured, disk_bytes=21_000_000 if role == "produce" else 0)
    if system.client:
        row.server_cpu_seconds, row.server_peak_bytes = 2.5, 60_000_000
    return row


@pytest.mark.slow
def test_experiment_runs_with_loglib_and_its_tables_have_every_case(tmp_path: Path) -> None:
    done = paper("--messages", "4000", "--only", "loglib", cwd=tmp_path)
    assert (done.returncode, "FAILED" in done.stderr) == (0, False), done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| loglib")]
    cases = [case for system in SYSTEMS if system.name.startswith("loglib") for case in system.cases]
    assert len(rows) == sum(1 + len(case.consumers) for case in cases)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("system", [each for each in SYSTEMS if each.client], ids=lambda each: each.name)
def test_other_systems_run_or_are_left_out_loudly(system: System, tmp_path: Path) -> None:
    done = paper("--messages", "1000", "--only", system.name.lower(), cwd=tmp_path)
    if (reason := system.missing()) is None:
        assert done.returncode == 0 and f"| {system.name} |" in done.stdout, done.stderr
    else:
        assert f"*** {system.name} is LEFT OUT. {reason}" in done.stderr
        assert "apt-get install" in reason or "pip install" in reason


def test_a_name_that_is_no_system_is_refused(tmp_path: Path) -> None:
    done = paper("--only", "kafka", cwd=tmp_path)
    assert done.returncode == 1 and "no system is called kafka: there are loglib" in done.stderr


def test_consumer_that_gets_other_messages_is_found(tmp_path: Path) -> None:
    work = Work("paper_loglib", "produce", "50", 3000, str(tmp_path))
    assert produce(work).messages == 3000
    for way in ("records", "columns", "group", "arrow"):
        found = consume(Work("paper_loglib", "consume", way, 3000, str(tmp_path)))
        assert (found.messages, found.checksum) == (3000, expected_checksum(3000))
    assert expected_checksum(3000) != expected_checksum(2999)


def test_slower_systems_get_a_share_of_the_messages() -> None:
    assert [Case("50", 100_000, ()).scaled(each) for each in (10_000_000, 1_000_000, 500)] == [100_000, 10_000, 500]


def test_page_gets_the_measured_part_and_keeps_the_rest(tmp_path: Path) -> None:
    redis = next(each for each in SYSTEMS if each.name == "Redis Streams")
    rows = [
        figures(SYSTEMS[0], "produce", "50", 700_000), figures(SYSTEMS[0], "consume", "records", 2_000_000),
        figures(redis, "produce", "50", 90_000), figures(redis, "consume", "log", 300_000),
    ]  # fmt: skip
    before = PAGE.read_text("utf-8")
    page = with_section(before, section(rows, {"CPU": "some"}, ["RabbitMQ: it is missing"]))
    assert page.split("<!-- measured")[0] == before.split("<!-- measured")[0]
    for part in ("- CPU: some", "**Left out:** RabbitMQ: it is missing", "| loglib | 50 | 100,000 | 0.70 M |",
                 "| Redis Streams | XREAD | 50 |", "syncs that once a second"):  # fmt: skip
        assert part in page, part
    assert with_section(page, section(rows, {}, [])).count("<!-- measured: begin -->") == 1
    with pytest.raises(ValueError, match="the page has no"):
        with_section("# another page\n", "")
    draw(rows, tmp_path)
    for name in ("paper-producers.svg", "paper-consumers.svg"):
        assert "loglib" in (tmp_path / name).read_text("utf-8")
    megabytes, rates = curve(rows[0])
    assert megabytes[-1] == 20 and rates == pytest.approx([700_000] * len(rates))
