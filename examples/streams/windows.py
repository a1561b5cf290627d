"""Windows over event time: tumbling, sliding, and sessions. Rows that come too late are dropped."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from streams.common import Event, Kitchen, hits_of, page_views
from streams.plain import HOUR, MINUTE, View, agree, micro_batches, views_of

DELAY = 30 * MINUTE


def tumbling(views: DataFrame) -> DataFrame:
    """Views per page and hour."""
    return views.withWatermark("time", "30 minutes").groupBy(f.window("time", "1 hour"), "page").count()


def sliding(views: DataFrame) -> DataFrame:
    """Views per page in the last hour, every 20 minutes."""
    return views.withWatermark("time", "30 minutes").groupBy(f.window("time", "1 hour", "20 minutes"), "page").count()


def sessions(views: DataFrame) -> DataFrame:
    """Visits: the views of a host, until it is silent for 15 minutes."""
    return views.withWatermark("time", "30 minutes").groupBy(f.session_window("time", "15 minutes"), "host").count()


def run(kitchen: Kitchen) -> str:
    hits = out_of_order(hits_of(kitchen.lines))
    views, arrived = page_views(kitchen.stream(kitchen.topic("hits", hits))), views_of(hits)

    rows = kitchen.rows(tumbling(views).select(f.unix_micros("window.start"), "page", "count"))
    by_hour = in_windows(arrived, length=HOUR, slide=HOUR)
    said = [f"{agree(map(tuple, rows), by_hour):,} tumbling windows"]

    rows = kitchen.rows(sliding(views).select(f.unix_micros("window.start"), "page", "count"))
    said += [f"{agree(map(tuple, rows), in_windows(arrived, length=HOUR, slide=20 * MINUTE)):,} sliding windows"]

    start, end = f.unix_micros("session_window.start"), f.unix_micros("session_window.end")
    rows = kitchen.rows(sessions(views).select("host", start, end, "count"))
    said += [f"{agree(map(tuple, rows), visits(arrived, gap=15 * MINUTE)):,} sessions"]

    last = max(start for start, _, _ in by_hour)
    due, counted = sum(view is not None and view.time < last + HOUR for view in arrived), sum(row[2] for row in by_hour)
    return f"{', '.join(said)}; {due - counted:,} of {due:,} views were too late for their hour"


def out_of_order(hits: list[Event]) -> list[Event]:
    """The hits as they arrive: most of them within five minutes, one in fifty up to 36 hours late."""
    rng = random.Random(1)

    def arrival(hit: Event) -> float:
        return hit.time + rng.uniform(0, 36 * HOUR if rng.random() < 0.02 else 5 * MINUTE)

    return sorted(hits, key=arrival)


def in_windows(arrived: Sequence[View | None], *, length: int, slide: int) -> list[tuple[int, str, int]]:
    """The final windows: start, page, views."""
    counts: Counter[tuple[int, str]] = Counter()
    finals = []
    for (views,), late, final in micro_batches(arrived, delay=DELAY):
        for view in views:
            last_start = view.time // slide * slide
            for start in range(last_start, last_start - length, -slide):
                if start + length > late:
                    counts[start, view.page] += 1
        for start, page in [window for window in counts if window[0] + length <= final]:
            finals.append((start, page, counts.pop((start, page))))
    return finals


def visits(arrived: Sequence[View | None], *, gap: int) -> list[tuple[str, int, int, int]]:
    """The final sessions: host, start, end, views. The end is the last view and the gap."""
    going_on: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    finals = []
    for (views,), late, final in micro_batches(arrived, delay=DELAY):
        for view in views:
            if view.time + gap > late:
                going_on[view.host].append((view.time, view.time + gap, 1))
        for host, spans in going_on.items():
            merged = merge(spans)
            finals += [(host, *span) for span in merged if span[1] <= final]
            going_on[host] = [span for span in merged if span[1] > final]
    return finals


def merge(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Spans that touch become one; their counts are added."""
    merged: list[tuple[int, int, int]] = []
    for start, end, count in sorted(spans):
        if merged and start <= merged[-1][1]:
            first, last, counted = merged.pop()
            start, end, count = first, max(last, end), counted + count
        merged.append((start, end, count))
    return merged
