"""Take the screenshots of docs/ui.md again: `python scripts/ui_screenshots.py [DIRECTORY]`

It makes topics with living writers, groups and shares in a temporary directory, serves them with `loglib ui`, and looks
at the page with Debian's Chromium. Needs the extras [ui] and [arrow], and playwright and Pillow. With a directory it
also takes those that docs/ui.md does not have. It fails if there is an error in the browser's console, or a request to
another host.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import loglib
from loglib import Retention, Topic
from loglib.copies import mirror
from loglib.offload import archive

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHARTS_S = 45.0  # until the charts have a line worth showing


class Size(NamedTuple):
    """A window's."""

    width: int
    height: int


class Shot(NamedTuple):
    """One screenshot."""

    name: str
    address: str
    ready: str  # what the page shows when it is loaded
    size: Size = Size(1280, 800)
    scheme: str = "light"
    settle_s: float = 0.5
    is_documented: bool = False


PHONE = Size(390, 780)
ROWS_S = 7.0  # until the rates in the rows are those of several samples
CHARTS = Shot("ui-topic", "#/t/orders", "figure svg path", is_documented=True)
SHOTS = (
    Shot("ui-topics", "#/", "text=✓ well", settle_s=ROWS_S, is_documented=True),
    Shot("ui-topics-dark", "#/", "text=✓ well", scheme="dark"),
    Shot("ui-records", "#/t/orders/records?path=.total%20%3E%20150&from=begin&way=on", ".rows li", scheme="dark",
         is_documented=True),
    Shot("ui-segments", "#/t/payments/segments/0", "tbody tr", is_documented=True),
    Shot("ui-groups", "#/t/orders/groups", "tbody tr"),
    Shot("ui-shares", "#/t/mails/groups", "article.share td", is_documented=True),
    Shot("ui-phone", "#/", "text=✓ well", PHONE, "dark", is_documented=True),
    Shot("ui-phone-records", "#/t/orders/records?partition=0", ".rows li", PHONE),
    Shot("ui-phone-shares", "#/t/mails/groups", "article.share td", PHONE, "dark"),
)  # fmt: skip
MOST_COLOURS = 255
# The temporary directory is shown as a place that a reader may have.
SHOWN = """([place, shown]) => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = texts.nextNode(); text; text = texts.nextNode()) text.data = text.data.replaceAll(place, shown);
}"""


def order(number: int, chance: random.Random) -> bytes:
    count = chance.randrange(1, 3)
    goods = [{"sku": f"A-{chance.randrange(40)}", "count": chance.randrange(1, 5)} for _ in range(count)]
    name, total = chance.choice(("ada", "grace", "alan", "edsger")), round(chance.uniform(3, 200), 2)
    return json.dumps({"order": number, "total": total, "customer": {"name": name}, "items": goods}).encode()


def put(topic: Topic, values: list[bytes], keys: int, chance: random.Random) -> None:
    """Append the values, with one of this number of keys each."""
    topic.append_many(values, keys=[b"c-%d" % chance.randrange(keys) for _ in values])


def payments(place: Path) -> None:
    """A topic whose segments stay and go for different reasons."""
    retention = Retention(age="7d", bytes="256KiB", hold_for=["ledger"], hold_bytes="1GiB")
    with Topic.create(place / "payments", retention=Retention(age=None), segment_bytes="64KiB") as topic:
        for number in range(9):
            topic.append_many([b'{"payment": %d, "state": "settled"}' % (number * 400 + each) for each in range(1400)])
            topic.partition(0).roll()
        records = [record.offset for record in topic.read()]
        topic.reset_group("ledger", {0: records[5200]})
    with Topic.open(place / "payments", mode="a", alter=True, retention=retention):
        pass


def mail(place: Path, stop: threading.Event, member: str) -> None:
    """Work on the share of a topic, now and then without success, until the event."""
    chance = random.Random(member)
    with Topic.open(place / "mails", mode="r") as topic, topic.share("send", member=member, max_attempts=3) as share:
        done = 0
        while not stop.is_set():
            job = share.take(0.2)
            if job is None:
                continue
            if done >= 60:
                stop.wait(chance.uniform(0.5, 3))
            done, fate = done + 1, chance.random()
            if fate < 0.8:
                job.accept()
            elif fate < 0.84:
                job.reject("there is no such address")
            else:
                job.release(delay=0 if fate > 0.9 else chance.uniform(60, 900))


@contextmanager
def demonstration(place: Path) -> Iterator[Path]:
    """Topics of a shop, while they are written and read."""
    chance, stop = random.Random(7), threading.Event()
    with ExitStack() as at_end:
        orders = at_end.enter_context(Topic.create(place / "orders", partitions=3, segment_bytes="4MiB"))
        put(orders, [order(number, chance) for number in range(60_000)], 500, chance)
        orders.flush()
        payments(place)
        clicks = at_end.enter_context(Topic.create(place / "clicks", partitions=8))
        put(clicks, [b"GET /page/%d" % each for each in range(200_000)], 9999, chance)
        clicks.flush()
        archived = Retention(age=None, bytes=0, archive="../../archive", archive_grace=0)
        with Topic.create(place / "audit", retention=archived) as topic:
            topic.append_many([b"login"] * 500)
            topic.partition(0).roll()
            archive(topic, place.parent / "archive")
            topic.append_many([b"logout"] * 900)
            topic.partition(0).roll()
        with Topic.create(place / "sensors") as topic:
            topic.append_many([bytes(chance.randrange(256) for _ in range(24)) for _ in range(800)])
            topic.partition(0).roll()
            topic.append(b"last")
        segment = place / "sensors" / "0000" / f"{0:020}.log"
        content = bytearray(segment.read_bytes())
        content[4096 + 900] ^= 1
        segment.write_bytes(content)
        loglib.repair(place / "sensors")
        mirror(place / "clicks", place / "clicks-mirror")
        with Topic.create(place / "mails", partitions=2) as topic:
            for number in range(900):
                topic.append(b"to customer %d" % number, partition=number % 2)

        def write() -> None:
            number = 60_000
            while not stop.wait(0.05):
                burst = int(30 + 25 * abs((number // 400) % 9 - 4))
                put(orders, [order(number + each, chance) for each in range(burst)], 500, chance)
                put(clicks, [b"GET /page/%d" % chance.randrange(999) for _ in range(90)], 9999, chance)
                number += burst

        def read(member: str, pause_s: float) -> None:
            options: Any = {"member": member, "start": "end"}
            with Topic.open(place / "orders", mode="r") as topic, topic.group("billing", **options) as group:
                while not stop.wait(pause_s):
                    while group.poll():
                        pass

        orders.reset_group("shipping", {each.id: each.offset_before_end(4000) for each in orders.partitions})
        members = (("till-1", 0.4), ("till-2", 9.0))
        threads = [threading.Thread(target=read, args=each) for each in members] + [threading.Thread(target=write)]
        threads += [threading.Thread(target=mail, args=(place, stop, f"sender-{number}")) for number in range(3)]
        for each in threads:
            each.start()
        try:
            yield place
        finally:
            stop.set()
            for each in threads:
                each.join()


@contextmanager
def served(place: Path) -> Iterator[str]:
    """`loglib ui` on these topics, and its address."""
    command = [sys.executable, "-m", "loglib", "ui", str(place), "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.match(r"serving (http://\S+)\n", line)
            if found is None:
                raise RuntimeError(line)
            yield found[1]
        finally:
            process.terminate()


class Visit:
    """A tab of the browser, and what is wrong with its page."""

    def __init__(self, browser: Any, address: str, shot: Shot) -> None:
        self.shot = shot
        self.faults: list[str] = []
        size = shot.size._asdict()
        self.page: Any = browser.new_page(viewport=size, color_scheme=shot.scheme, device_scale_factor=1)
        own = re.match(r"http://[^/]+/", address)
        assert own is not None
        self.page.on("pageerror", lambda error: self._note(f"error: {error}"))
        self.page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        self.page.on("request", lambda asked: None if asked.url.startswith(own[0]) else self._note(asked.url))
        self.page.goto(address + shot.address)
        self.page.wait_for_selector(shot.ready, state="attached")

    def _note(self, fault: str) -> None:
        self.faults.append(f"{self.shot.name}: {fault}")

    def take(self, place: Path, to: Path) -> list[str]:
        """Write the picture, with few colours so that the file is small; returns the faults of the page."""
        from PIL import Image

        self.page.wait_for_timeout(self.shot.settle_s * 1000)
        self.page.evaluate(SHOWN, [str(place.parent), "/srv"])
        self.page.screenshot(path=to)
        self.page.close()
        image = Image.open(to).convert("RGB").quantize(MOST_COLOURS, dither=Image.Dither.NONE)
        image.save(to, optimize=True)
        return self.faults


def main(directory: Path, *, documented: bool, charts_s: float = CHARTS_S) -> list[str]:
    """Write the screenshots into a directory; returns what was wrong with the pages.

    The topic with charts is open, and sampled, while the others are looked at.
    """
    from playwright.sync_api import sync_playwright

    chosen = [each for each in SHOTS if each.is_documented or not documented]
    with ExitStack() as at_end:
        place = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="shop-"))) / "topics"
        address = at_end.enter_context(served(at_end.enter_context(demonstration(place))))
        playwright = at_end.enter_context(sync_playwright())
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        charts, ready_at = Visit(browser, address, CHARTS), time.monotonic() + charts_s
        faults = [
            fault for shot in chosen
            for fault in Visit(browser, address, shot).take(place, directory / f"{shot.name}.png")
        ]  # fmt: skip
        charts.page.wait_for_timeout(max(0.0, ready_at - time.monotonic()) * 1000)
        faults += charts.take(place, directory / f"{CHARTS.name}.png")
        browser.close()
    return faults


if __name__ == "__main__":
    found = main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES, documented=len(sys.argv) < 2)
    if found:
        sys.exit("\n".join(found))
