"""Spark: the benchmarks of the connector, `python bench/spark.py [--messages N] [--only NAMES] [--full] [--write]`.

Invariant: all systems of a case run in one session and take turns. CPU seconds are of the whole process tree: the
driver, the JVM with its compiler and its garbage collector, and the Python workers. Other work on the machine hardly
changes them. All files are removed at the end.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from pyspark.sql import SparkSession

import loglib.spark
import machine
import spark_sources
from measure import Measurement
from process_tree import Usage, peak_of_workers, reset_peaks, usage
from report import target_table, with_spark
from results import Results
from spark_cases import SparkCase, SparkRun, spark_cases
from spark_inputs import VALUE_BYTES, Inputs
from spark_report import case_table, section
from spark_targets import spark_checks

_BENCH = Path(__file__).resolve().parent
_RESULTS = _BENCH / "RESULTS.md"
_MESSAGES = 10_000_000
_HEAP = "4g"


def main() -> None:
    """Run the chosen cases, and print them and the targets."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the directory is removed.
    results, titles = Results(), dict[str, str]()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="loglib-bench-", dir=arguments.dir or machine.disk_directory()) as name:
        facts = _facts(Path(name))
        spark = _session(Path(name))
        inputs = Inputs(spark, Path(name), arguments.messages)
        for key, make in spark_cases(spark, inputs, arguments.repeats, full=arguments.full).items():
            if arguments.only and key not in arguments.only.split(","):
                continue
            case = make()
            titles[key] = case.title
            print(f"\n[{time.monotonic() - started:.0f} s] {key}: {case.title}", flush=True)
            _run_case(key, case, results)
            print(f"\n{case_table(results, key)}", flush=True)
        spark.stop()
    facts["took"] = f"{time.monotonic() - started:.0f} s"
    checks = spark_checks(results)
    print("\n" + target_table(checks))
    if arguments.write:
        old = _RESULTS.read_text() if _RESULTS.exists() else ""
        _RESULTS.write_text(with_spark(old, section(results, titles, checks, facts)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure loglib's connector for Spark.")
    parser.add_argument("--messages", type=int, default=_MESSAGES, help="values of 200 bytes in each input")
    parser.add_argument("--repeats", type=int, default=5, help="how often the systems of a case take turns")
    parser.add_argument("--only", metavar="NAMES", help="the cases to run, with commas: scan,count")
    parser.add_argument("--full", action="store_true", help="also the memory of a task that reads 10 GB")
    parser.add_argument("--write", action="store_true", help="write the section on Spark of bench/RESULTS.md")
    parser.add_argument("--dir", type=Path, help="where to put the files; must be on a disk")
    return parser.parse_args()


def _session(directory: Path) -> SparkSession:
    """Two slots, and Spark's defaults but for the heap. Workers find the sources of this directory."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{_BENCH}{os.pathsep}{path}" if path else str(_BENCH)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has byte code, and workers import it often
    settings: dict[str, bool | float | int | str | None] = {
        "spark.driver.memory": _HEAP,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(directory / "spark"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
    }
    builder = SparkSession.builder.master("local[2]").appName("loglib benchmarks").config(map=settings)
    spark = loglib.spark.configure(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark_sources.register(spark)
    return spark


def _run_case(key: str, case: SparkCase, results: Results) -> None:
    for run in case.runs:
        if case.repeats > 1:
            run.before()
            run.work()  # The JVM compiles what it runs often.
    for _ in range(case.repeats):
        for run in case.runs:
            results.add(key, run.label, _measured(run, shows_memory=case.shows_memory))
            print(".", end="", flush=True)


def _measured(run: SparkRun, *, shows_memory: bool) -> Measurement:
    run.before()
    if shows_memory:
        reset_peaks()
    before, start = usage(), time.perf_counter()
    figures = run.work() or {}
    seconds = time.perf_counter() - start
    used = usage() - before
    shown = {"JVM CPU s": used.jvm_seconds, "Python CPU s": used.python_seconds}
    if shows_memory:  # and no CPU: Spark may end a daemon meanwhile, and the times of its workers go with it
        used, shown = Usage(0.0, 0.0), {"peak MB of a worker": peak_of_workers() / 1e6}
    return Measurement(
        messages=run.messages,
        payload_bytes=run.messages * VALUE_BYTES,
        seconds=seconds,
        best_seconds=seconds,
        cpu_seconds=sum(used),
        figures={**shown, **figures},
    )


def _facts(directory: Path) -> dict[str, str]:
    now = datetime.datetime.now(datetime.UTC)
    java = "PySpark {}, local[2], heap {}, Java {}".format(machine.version("pyspark"), _HEAP, machine.java_version())
    command = " ".join(["python bench/spark.py", *machine.shown_arguments(sys.argv[1:])])
    facts = machine.description(directory)
    facts["packages"] = f"pyarrow {machine.version('pyarrow')}, numpy {machine.version('numpy')}"
    return {**facts, "Spark": java, "date": f"{now:%Y-%m-%d %H:%M} UTC", "command": f"`{command}`"}


if __name__ == "__main__":
    main()
