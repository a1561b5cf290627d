"""Page views, live: from an access log to a chart, through a topic that three kinds of readers share.

One process appends the lines of an access log to a topic for some seconds. The key is the host, the timestamp the time
of the request. Meanwhile Spark counts the views per minute and page, as a stream, directly from the segment files.
Without Java, plain Python counts the same. Lines that are not access-log lines go to a separate topic. Afterwards
another process reads the records back, and plain Python counts them again: the result must be the same.

    python examples/pageviews.py                        # 200,000 made-up lines in four seconds
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import TYPE_CHECKING

import accesslog
from loglib import Topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Views = Counter[tuple[int, str]]  # (minute in seconds since 1970, page) -> views
TOP, OTHER = 8, "other pages"
MINUTE_US = 60_000_000
LOG4J = Path(__file__).resolve().with_name("log4j2.properties")  # keeps Spark quiet
# A JVM that runs for ten seconds spends most of its time on compiling its own code. These options make it compile fast
# with less optimization, and collect garbage in one thread. They slow down a long program.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
STEPS = 100  # the log is appended in so many parts, or in more if it is large
MOST_LINES, MOST_BYTES = 10_000, 4_000_000  # in a part


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log", nargs="?", type=Path, help="an access log (default: made-up lines)")
    parser.add_argument("--lines", type=int, default=200_000, help="how many lines to make up (default 200,000)")
    parser.add_argument("--seconds", type=float, default=4, help="how long writing them takes, at least (default 4)")
    parser.add_argument("--out", type=Path, default=Path("pageviews-out"), help="directory for topics and chart")
    parser.add_argument("--python", action="store_true", help="count in plain Python even where Spark could")
    args = parser.parse_args()
    if args.log and not args.log.is_file():
        parser.error(f"{args.log} is not a file")
    source = args.log.name if args.log else f"{args.lines:,} made-up lines"
    hits, rejected, chart = args.out / "hits", args.out / "rejected", args.out / "pageviews.png"
    remove_last_run(hits, rejected, chart)
    Topic.open(hits, create=True, partitions=4).close()
    reason = "as asked for" if args.python else why_not_spark()

    print(f"1. Counting views per minute and page with {f'plain Python ({reason})' if reason else 'Spark'},")
    print(f"   while another process appends {source} to {hits}", flush=True)
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:

        def begin() -> Future[str]:
            return process.submit(write, args.log or args.lines, hits, rejected, args.seconds)

        views = count_live_with_python(hits, begin()) if reason else count_live_with_spark(hits, begin)

        print("2. Reading them back in another process, and counting them again with plain Python", flush=True)
        reading = process.submit(read_back, hits)
        expected = count_with_python(hits)
        summary = reading.result()
    if not summary:
        print(f"   Nothing to count: no line of {source} is an access-log line (Apache's common or combined format).")
        return
    print(summary)
    if views != expected:
        raise SystemExit(f"plain Python counts {expected.total():,} views, and the stream {views.total():,}")
    print(f"   {views.total():,} views; the stream has the same count for each minute and page")
    show(folded(views), source, chart)


def remove_last_run(hits: Path, rejected: Path, chart: Path) -> None:
    for topic in (hits, rejected):
        if (topic / "topic.json").exists():  # never remove a directory that is not a topic
            shutil.rmtree(topic)
    chart.unlink(missing_ok=True)


def show_progress(text: str) -> None:
    """Show the text in one line of the terminal, over the text before. Nothing where there is no terminal."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"{text[:width]:{width}}", end="\r", file=sys.stderr, flush=True)


# 1. Writing


def write(source: Path | int, hits_path: Path, rejected_path: Path, seconds: float) -> str:
    """Append each line of the file, or this number of made-up lines, in so many seconds; returns a summary."""
    hit_count, first_rejected, rejected_count = 0, b"", 0
    began = monotonic()
    with Topic.open(hits_path, create=True) as hits, Topic.open(rejected_path, create=True) as rejected:
        for done, lines in made_up(source) if isinstance(source, int) else read_lines(source):
            parsed = [(line, hit) for line in lines if (hit := accesslog.parse(line))]
            others = [line for line in lines if not accesslog.parse(line)] if len(parsed) < len(lines) else []
            hits.append_many(
                [line for line, _ in parsed],
                keys=[hit.host for _, hit in parsed],
                timestamps=[hit.timestamp_us for _, hit in parsed],
            )
            rejected.append_many(others)
            first_rejected = first_rejected or next(iter(others), b"")
            hit_count, rejected_count = hit_count + len(parsed), rejected_count + len(others)
            sleep(max(0.0, began + done * seconds - monotonic()))
    said = f"   {hit_count:,} records; appended in {monotonic() - began:.1f} s"
    if rejected_count:
        said += f"\n   {rejected_count:,} lines are no access-log lines and went to {rejected_path}, first of them"
        said += f"\n   {first_rejected[:100]!r}"
    return said


def made_up(count: int) -> Iterator[tuple[float, list[bytes]]]:
    """Made-up lines in parts, each with the share of all lines up to its end."""
    lines, done = accesslog.generate(count), 0
    while part := list(islice(lines, min(count // STEPS + 1, MOST_LINES))):
        done += len(part)
        yield done / count, part


def read_lines(path: Path) -> Iterator[tuple[float, list[bytes]]]:
    """The lines of a file in parts, each with the share of all bytes up to its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while part := file.readlines(min(size // STEPS + 1, MOST_BYTES)):
            yield min(1.0, file.tell() / size), [line.rstrip(b"\r\n") for line in part]


# 2. Reading


def read_back(path: Path) -> str:
    """Read every record, check that each host is in one partition, and return a summary."""
    began = monotonic()
    records: Counter[int] = Counter()
    hosts: dict[int, set[bytes | None]] = defaultdict(set)
    first, last = sys.maxsize, 0
    with Topic.open(path, mode="r") as topic:
        for batch in topic.batches():
            records[batch.partition] += len(batch)
            hosts[batch.partition].update(batch.keys)
            first, last = min([first, *batch.timestamps]), max([last, *batch.timestamps])
    if not records:
        return ""
    strays = sum(map(len, hosts.values())) - len(set().union(*hosts.values()))
    return (
        f"   {records.total():,} records from {minute_text(first // 1_000_000)} to {minute_text(last // 1_000_000)}, "
        f"read in {monotonic() - began:.2f} s\n"
        f"   by partition: {', '.join(f'{records[index]:,}' for index in sorted(records))}; "
        f"hosts found in more than one: {strays}"
    )


# 3. Counting


def count_with_python(path: Path) -> Views:
    """Read the topic to its present end, and count."""
    views: Views = Counter()
    with Topic.open(path, mode="r") as topic:
        for batch in topic.batches():
            count_lines(views, batch.values, batch.timestamps)
    return views


def count_lines(views: Views, lines: Sequence[bytes | None], timestamps: Sequence[int]) -> None:
    for line, time in zip(lines, timestamps, strict=True):
        page = accesslog.page_of(line or b"")
        if page is not None:
            views[time // MINUTE_US * 60, page] += 1


def count_live_with_python(path: Path, writing: Future[str]) -> Views:
    """Follow the topic until all is written and counted."""
    views: Views = Counter()
    progress = Progress()
    with Topic.open(path, mode="r") as topic, topic.follow("begin", timeout=0.2) as reader:
        written = False
        while not written:
            written = writing.done()  # then this round reads the rest
            for batch in reader.batches():
                count_lines(views, batch.values, batch.timestamps)
                progress.records, progress.batches = progress.records + len(batch), progress.batches + 1
                progress.show(f"{sum(reader.lag_bytes().values()):,} bytes")
    print(f"{writing.result()}\n{progress.summary()}", flush=True)
    return views


def count_live_with_spark(path: Path, begin: Callable[[], Future[str]]) -> Views:
    """Count as a stream, from the beginning of the topic until all is written and counted."""
    from loglib.spark import counts

    spark = start_spark()
    views: Views = Counter()

    def save(changed: DataFrame, _: int) -> None:
        columns = (column.to_pylist() for column in changed.toArrow().columns)
        for minute, page, count in zip(*columns, strict=True):
            views[minute, page] = count  # the whole count, so a repeated batch changes nothing

    reader = spark.readStream.format("loglib").option("startingOffsets", "earliest")
    lines = reader.option("columns", "timestamp,value").load(str(path))  # without it Spark reads all columns
    with TemporaryDirectory() as checkpoint:
        counting = per_minute(lines).writeStream.outputMode("update").foreachBatch(save)
        show_progress("   starting the stream")
        query = counting.option("checkpointLocation", checkpoint).start()
        query.processAllAvailable()  # the first batch, which is empty, costs Spark the most
        writing, progress = begin(), Progress()
        records: dict[int, int] = {}  # of each batch
        behind = 1
        while query.isActive and (behind or not writing.done()):
            sleep(0.2)
            records |= {each["batchId"]: each["numInputRows"] for each in query.recentProgress if each["numInputRows"]}
            progress.records, progress.batches = sum(records.values()), len(records)
            behind = sum(counts(path).values()) - progress.records
            progress.show(f"{behind:,} records")
        query.processAllAvailable()  # raises what has stopped the query
        query.stop()
    spark.stop()
    print(f"{writing.result()}\n{progress.summary()}", flush=True)
    return views


def per_minute(lines: DataFrame) -> DataFrame:
    """Views per minute and page."""
    from pyspark.sql import functions as f

    return (
        lines.select("timestamp", f.regexp_extract(f.col("value").cast("string"), accesslog.PAGE, 1).alias("page"))
        .where((f.col("page") != "") & ~f.col("page").rlike(accesslog.NOT_A_PAGE))
        .groupBy(f.window("timestamp", "1 minute")["start"].cast("long").alias("minute"), "page")
        .agg(f.count("*").alias("views"))
    )


def folded(views: Views) -> Views:
    """The views of the top pages, and of all others together."""
    top = {page for page, _ in most_common(views)[:TOP]}
    found: Views = Counter()
    for (minute, page), count in views.items():
        found[minute, page if page in top else OTHER] += count
    return found


class Progress:
    """How far the stream is, and how fast; shown on a terminal."""

    def __init__(self) -> None:
        self.records = self.batches = 0
        self._began = monotonic()

    def show(self, behind: str) -> None:
        rate = self.records / (monotonic() - self._began)
        show_progress(f"   {self.records:,} records   {rate:,.0f}/s   batch {self.batches}   {behind} behind")

    def summary(self) -> str:
        show_progress("")
        return f"   {self.records:,} records counted in {self.batches} batches"


def start_spark() -> SparkSession:
    from pyspark.sql import SparkSession

    from loglib.spark import configure

    began = monotonic()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", SHORT_LIVED)
    show_progress("   starting Spark")
    spark = (
        configure(SparkSession.builder.master("local[2]"))
        .appName("pageviews")
        .config("spark.driver.extraJavaOptions", f'-Dlog4j2.configurationFile="{LOG4J}" {SHORT_LIVED}')
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.adaptive.enabled", "false")  # streams do without it, and warn of it
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    show_progress("")
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
