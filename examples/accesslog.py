"""Access logs, as pure functions: parse a line of Apache's combined format, and generate realistic lines.

    83.149.9.216 - - [17/May/2015:10:05:03 +0000] "GET /blog/?page=2 HTTP/1.1" 200 203023 "-" "Mozilla/5.0 ..."

`parse` returns the facts that are needed for counting, and None for an invalid line. `generate` is for trials without a
real log: the same seed gives the same lines.

    python examples/accesslog.py 5        # print five made-up lines
"""

import argparse
import math
import random
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

# These two patterns work in Python's and in Java's regular expressions, so that Spark counts the same pages.
PAGE = r'^[^"]*"[A-Z]+ (/[^ ?"]*)'
NOT_A_PAGE = r"(?i)\.(css|js|json|map|png|jpe?g|gif|ico|svg|webp|woff2?|ttf|eot|txt|xml|pdf|zip|gz|jar)$"

LINE = re.compile(rb'(\S+) \S+ \S+ \[([^\]]+)\] "(?:[^"\\]|\\.)*" \d{3} (?:\d+|-)')
MONTHS = {name: number for number, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}
TIME = re.compile(rb"(\d\d)/(\w{3})/(\d{4}):(\d\d):(\d\d):(\d\d) ([+-])(\d\d)(\d\d)")
_page = re.compile(PAGE.encode())
_not_a_page = re.compile(NOT_A_PAGE.encode())


class Hit(NamedTuple):
    host: bytes
    timestamp_us: int
    page: str | None  # None for an image, a style sheet, or a request without a path


def parse(line: bytes) -> Hit | None:
    """The hit in an access log line, or None if the line is invalid."""
    match = LINE.match(line)
    timestamp_us = parse_time(match[2]) if match else None
    if match is None or timestamp_us is None:
        return None
    return Hit(match[1], timestamp_us, page_of(line))


def page_of(line: bytes) -> str | None:
    """The requested page, without its query string."""
    match = _page.match(line)
    if match is None or _not_a_page.search(match[1]):
        return None
    return match[1].decode(errors="replace")


@lru_cache(maxsize=1024)  # neighbouring lines mostly have the same second
def parse_time(text: bytes) -> int | None:
    """Microseconds since 1970, UTC, for Apache's `17/May/2015:10:05:03 +0000`; None if it is invalid."""
    match = TIME.fullmatch(text)
    if match is None or match[2] not in MONTHS:
        return None
    day, year, hour, minute, second, zone_hours, zone_minutes = map(int, match.group(1, 3, 4, 5, 6, 8, 9))
    try:
        local = datetime(year, MONTHS[match[2]], day, hour, minute, second, tzinfo=UTC)
    except ValueError:  # for example 31 February
        return None
    east = 1 if match[7] == b"+" else -1
    return int(local.timestamp() - east * 60 * (60 * zone_hours + zone_minutes)) * 1_000_000


def generate(count: int, *, seed: int = 1, days: int = 2) -> Iterator[bytes]:
    """Generate `count` access log lines in the order of their times.

    The traffic is skewed like on a real site: a few pages and hosts have most of it (Zipf's law), nights are quiet, one
    linked post has a peak, and one line in five thousand is cut off in the middle.
    """
    rng = random.Random(seed)
    pages, page_weights = PAGES, list(accumulate(1 / rank for rank in range(1, len(PAGES) + 1)))
    hosts = [f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}" for _ in range(3000)]
    host_weights = list(accumulate(1 / rank for rank in range(1, len(hosts) + 1)))

    start = datetime(2026, 3, 2, tzinfo=UTC)
    flare_minute = 60 * 24 * days * 2 // 3
    base = [_daily_rate(minute) * rng.gammavariate(30, 1 / 30) for minute in range(60 * 24 * days)]
    flare = [0.0 if m < flare_minute else 2.0 * math.exp((flare_minute - m) / 150) for m in range(len(base))]
    due_lines = list(accumulate(base[m] + flare[m] for m in range(len(base))))

    made = 0
    for minute, due in enumerate(due_lines):
        lines = round(count * due / due_lines[-1]) - made
        made += lines
        when = start + timedelta(minutes=minute)
        month = list(MONTHS)[when.month - 1].decode()  # strftime's %b depends on the user's language
        minute_text = f"{when:%d}/{month}/{when:%Y:%H:%M}"
        for second in sorted(rng.randrange(60) for _ in range(lines)):
            host = rng.choices(hosts, cum_weights=host_weights)[0]
            flares_up = rng.random() * (base[minute] + flare[minute]) < flare[minute]
            page = FLARE_PAGE if flares_up else rng.choices(pages, cum_weights=page_weights)[0]
            line = _line(rng, host, f"{minute_text}:{second:02}", page)
            yield line[: rng.randrange(40)] if rng.random() < 0.0002 else line


FLARE_PAGE = "/blog/a-log-is-all-you-need"
PAGES = [
    "/", "/blog/", "/style.css", "/docs/getting-started", "/favicon.ico", "/blog/offsets-are-not-ids", "/pricing",
    "/images/logo.png", "/docs/api", "/about", "/blog/what-fsync-promises", "/docs/faq", "/search?q=log", "/robots.txt",
    "/blog/order-in-a-partition", "/docs/recovery", "/contact", "/jobs", "/blog/crash-tests", "/docs/format",
    *(f"/blog/archive/{year}/{month:02}" for year in (2025, 2024, 2023) for month in range(12, 0, -1)),
    *(f"/images/photo-{number}.jpg" for number in range(1, 60)),
]  # fmt: skip
AGENTS = [
    "Mozilla/5.0 (X11; Linux x86_64; rv:124.0) Gecko/20100101 Firefox/124.0",
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 14) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/17.4 Safari/605.1.15",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 17_4 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) Mobile/15E148",
    "Mozilla/5.0 (compatible; Feedbot/1.0)",
]


def _daily_rate(minute: int) -> float:
    """The rate of visits: the peak is at 16:00, and the minimum, a sixth of the peak, at 4:00."""
    return 1 - 0.7 * math.cos(2 * math.pi * (minute - 4 * 60) / (24 * 60))


def _line(rng: random.Random, host: str, time: str, page: str) -> bytes:
    status = rng.choices([200, 304, 404, 500], cum_weights=[90, 97, 99.8, 100])[0]
    size = int(rng.lognormvariate(9, 1)) if status == 200 else 0
    return f'{host} - - [{time} +0000] "GET {page} HTTP/1.1" {status} {size} "-" "{rng.choice(AGENTS)}"'.encode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print made-up access log lines.")
    parser.add_argument("count", type=int, help="how many lines")
    parser.add_argument("--seed", type=int, default=1, help="another seed makes other lines (default 1)")
    arguments = parser.parse_args()
    for made_up in generate(arguments.count, seed=arguments.seed):
        print(made_up.decode())
