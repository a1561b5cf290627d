"""Page views: from an access log to a chart, through a topic that three kinds of readers share.

One process appends the lines of an access log to a topic. The key is the host, the timestamp the time of the request. A
second process reads them back. Then Spark counts the views per minute and page directly from the segment files. Without
Java, plain Python counts the same. Lines that are not access-log lines go to a separate topic.

    python examples/pageviews.py                        # 200,000 made-up lines
    python examples/pageviews.py /var/log/access.log    # a file in Apache's common or combined format
    python examples/pageviews.py --out /somewhere       # instead of ./pageviews-out
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import accesslog
from loglib import Topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
Views = Counter[tuple[int, str]]  # (minute in seconds since 1970, page) -> views
TOP, OTHER = 8, "other pages"
MINUTE_US = 60_000_000
LOG4J = Path(__file__).resolve().with_name("log4j2.properties")  # keeps Spark quiet
# A JVM that runs for ten seconds spends most of its time on compiling its own code. These options make it compile fast
# with less optimization, and collect garbage in one thread. They slow down a long program.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log", nargs="?", type=Path, help="an access log (default: made-up lines)")
    parser.add_argument("--lines", type=int, default=200_000, help="how many lines to make up (default 200,000)")
    parser.add_argument("--out", type=Path, default=Path("pageviews-out"), help="directory for topics and chart")
    parser.add_argument("--python", action="store_true", help="count in plain Python even where Spark could")
    args = parser.parse_args()
    if args.log and not args.log.is_file():
        parser.error(f"{args.log} is not a file")
    source = args.log.name if args.log else f"{args.lines:,} made-up lines"
    hits, rejected, chart = args.out / "hits", args.out / "rejected", args.out / "pageviews.png"
    remove_last_run(hits, rejected, chart)

    print(f"1. Writing {source} to {hits}", flush=True)
    print(in_a_process(write, args.log or args.lines, hits, rejected))

    print("2. Reading them back in another process", flush=True)
    summary = in_a_process(read_back, hits)
    if not summary:
        print(f"   Nothing to count: no line of {source} is an access-log line (Apache's common or combined format).")
        return
    print(summary)

    reason = "as asked for" if args.python else why_not_spark()
    print(f"3. Counting views per minute and page with {f'plain Python ({reason})' if reason else 'Spark'}", flush=True)
    began = monotonic()
    views = count_with_python(hits) if reason else count_with_spark(hits)
    print(f"   {views.total():,} views counted in {monotonic() - began:.1f} s")
    show(views, source, chart)


def remove_last_run(hits: Path, rejected: Path, chart: Path) -> None:
    for topic in (hits, rejected):
        if (topic / "topic.json").exists():  # never remove a directory that is not a topic
            shutil.rmtree(topic)
    chart.unlink(missing_ok=True)


def show_progress(what: str) -> None:
    """Print the current step: on a terminal in a line that the next one overwrites, else in a separate line."""
    if not sys.stdout.isatty():
        print(f"   {what}", flush=True)
        return
    width = shutil.get_terminal_size().columns - 1
    print(f"{f'   {what}'[:width]:{width}}", end="\r", flush=True)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Print the current step while it runs: on a terminal with the seconds so far, else once."""
    if not sys.stdout.isatty():
        show_progress(what)
        yield
        return

    def count_seconds() -> None:
        began = monotonic()
        show_progress(what)
        while not ended.wait(1):
            show_progress(f"{what}: {monotonic() - began:.0f} s")

    ended = Event()
    thread = Thread(target=count_seconds, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show_progress("")


def in_a_process(function: Callable[..., T], *args: object) -> T:
    """Call the function in a new Python process and return its result."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# 1. Writing


def write(source: Path | int, hits_path: Path, rejected_path: Path) -> str:
    """Append each line of the file, or this number of made-up lines, and return a summary."""
    hit_count, first_rejected, rejected_count, append_seconds = 0, b"", 0, 0.0
    with Topic.open(hits_path, partitions=4) as hits, Topic.open(rejected_path) as rejected:
        for lines in chunks(accesslog.generate(source) if isinstance(source, int) else read_lines(source), 10_000):
            parsed = [(line, hit) for line in lines if (hit := accesslog.parse(line))]
            others = [line for line in lines if not accesslog.parse(line)] if len(parsed) < len(lines) else []
            began = monotonic()
            hits.append_many(
                [line for line, _ in parsed],
                keys=[hit.host for _, hit in parsed],
                timestamps=[hit.timestamp_us for _, hit in parsed],
            )
            rejected.append_many(others)
            append_seconds += monotonic() - began
            first_rejected = first_rejected or next(iter(others), b"")
            hit_count, rejected_count = hit_count + len(parsed), rejected_count + len(others)
            if (hit_count + rejected_count) % 50_000 == 0:
                show_progress(f"{hit_count + rejected_count:,} lines")
    said = f"   {hit_count:,} messages; appending them took {append_seconds:.2f} s"
    if rejected_count:
        said += f"\n   {rejected_count:,} lines are no access-log lines and went to {rejected_path}, first of them"
        said += f"\n   {first_rejected[:100]!r}"
    return said


def read_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            yield line.rstrip(b"\r\n")


def chunks(lines: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    lines = iter(lines)
    while chunk := list(islice(lines, size)):
        yield chunk


# 2. Reading


def read_back(path: Path) -> str:
    """Read every record, check that each host is in one partition, and return a summary."""
    began = monotonic()
    messages: Counter[int] = Counter()
    hosts: dict[int, set[bytes | None]] = defaultdict(set)
    first, last = sys.maxsize, 0
    with Topic.open(path, mode="r") as topic:
        for batch in topic.batches():
            messages[batch.partition] += len(batch)
            hosts[batch.partition].update(batch.keys)
            first, last = min([first, *batch.timestamps]), max([last, *batch.timestamps])
    if not messages:
        return ""
    strays = sum(map(len, hosts.values())) - len(set().union(*hosts.values()))
    return (
        f"   {messages.total():,} messages from {minute_text(first // 1_000_000)} to {minute_text(last // 1_000_000)}, "
        f"read in {monotonic() - began:.2f} s\n"
        f"   by partition: {', '.join(f'{messages[index]:,}' for index in sorted(messages))}; "
        f"hosts found in more than one: {strays}"
    )


# 3. Counting


def count_with_python(path: Path) -> Views:
    views: Views = Counter()
    with Topic.open(path, mode="r") as topic:
        for batch in topic.batches():
            for line, time in zip(batch.values, batch.timestamps, strict=True):
                page = accesslog.page_of(line or b"")
                if page is not None:
                    views[time // MINUTE_US * 60, page] += 1
    top = {page for page, _ in most_common(views)[:TOP]}
    folded: Views = Counter()
    for (minute, page), count in views.items():
        folded[minute, page if page in top else OTHER] += count
    return folded


def count_with_spark(path: Path) -> Views:
    from pyspark.sql import functions as f

    spark = start_spark()
    with progress("opening the topic in Spark"):
        reader = spark.read.format("loglib").option("columns", "timestamp,value")  # without it Spark reads all columns
        lines = reader.load(str(path))
    per_minute = (
        lines.select("timestamp", f.regexp_extract(f.col("value").cast("string"), accesslog.PAGE, 1).alias("page"))
        .where((f.col("page") != "") & ~f.col("page").rlike(accesslog.NOT_A_PAGE))
        .groupBy(f.window("timestamp", "1 minute")["start"].cast("long").alias("minute"), "page")
        .agg(f.count("*").alias("views"))
        .cache()  # two queries use it, so read it once
    )
    by_page = per_minute.groupBy("page").agg(f.sum("views").alias("views")).orderBy(f.desc("views"), "page")
    with progress("finding the pages with the most views"):
        top = [row["page"] for row in by_page.limit(TOP).collect()]
    folded = (
        per_minute.withColumn("page", f.when(f.col("page").isin(top), f.col("page")).otherwise(OTHER))
        .groupBy("minute", "page")
        .agg(f.sum("views").alias("views"))
    )
    with progress("counting their views per minute"):
        views: Views = Counter({(row["minute"], row["page"]): row["views"] for row in folded.collect()})
    spark.stop()
    return views


def start_spark() -> SparkSession:
    from pyspark.sql import SparkSession

    from loglib.spark import configure

    began = monotonic()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", SHORT_LIVED)
    with progress("starting Spark"):
        spark = (
            configure(SparkSession.builder.master("local[2]"))
            .appName("pageviews")
            .config("spark.driver.extraJavaOptions", f'-Dlog4j2.configurationFile="{LOG4J}" {SHORT_LIVED}')
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
    print(f"   Spark {spark.version} started in {monotonic() - began:.1f} s", flush=True)
    return spark


def why_not_spark() -> str:
    """An empty string if Spark can run, else what is missing."""
    if find_spec("pyspark") is None:
        return "PySpark is not installed"
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if java is None:
        return "Spark needs Java 17 or newer, and there is none"
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) < 17:
        return f"Spark needs Java 17 or newer, and {java} is not"
    return ""


# 4. Showing


def show(views: Views, source: str, chart: Path) -> None:
    """Print a table of the top pages and draw the chart."""
    if not views:
        print("Nothing to draw: all requests were for images, style sheets and the like.")
        return
    pages = [page for page, _ in most_common(views) if page != OTHER]
    print_table(views, pages)
    if find_spec("matplotlib") is None:
        print("\nNo chart: matplotlib is not installed.")
        return
    from chart import draw

    draw(views, pages=pages, other=OTHER, source=source, to=chart)
    print(f"\nChart: {chart}")


def print_table(views: Views, pages: list[str]) -> None:
    totals = dict(most_common(views))
    width = max(map(len, totals))
    print(f"\n   {'page':{width}}    views   share   busiest minute")
    for page in [*pages, *([OTHER] if OTHER in totals else [])]:
        count, minute = max((count, minute) for (minute, of), count in views.items() if of == page)
        share = totals[page] / views.total()
        print(f"   {page:{width}} {totals[page]:>8,} {share:>7.1%}   {minute_text(minute)} ({count:,})")


def most_common(views: Views) -> list[tuple[str, int]]:
    totals: Counter[str] = Counter()
    for (_, page), count in views.items():
        totals[page] += count
    return sorted(totals.items(), key=lambda item: (-item[1], item[0]))


def minute_text(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


if __name__ == "__main__":
    main()
