"""Take the screenshots of docs/ui.md again: `python scripts/ui_screenshots.py [DIRECTORY]`

It makes topics with living writers and groups in a temporary directory, serves them with `loglib ui`, and looks at the
page with Debian's Chromium. Needs the extras [ui] and [arrow], and playwright and Pillow.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import loglib
from loglib import Retention, Topic
from loglib.copies import mirror
from loglib.offload import archive

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 780}
CHARTS_S = 45  # until the charts have a line worth showing
# The name, the address, the width, the scheme, and how long to wait.
SHOTS: tuple[tuple[str, str, dict[str, int], str, float], ...] = (
    ("ui-topic", "#/t/orders", WIDE, "light", CHARTS_S),
    ("ui-topics", "#/", WIDE, "light", 8),
    ("ui-topics-dark", "#/", WIDE, "dark", 8),
    ("ui-records", "#/t/orders/records?path=.total%20%3E%20150&from=begin&way=on", WIDE, "dark", 4),
    ("ui-segments", "#/t/payments/segments/0", WIDE, "light", 4),
    ("ui-groups", "#/t/orders/groups", WIDE, "light", 4),
    ("ui-phone", "#/", PHONE, "dark", 8),
    ("ui-phone-records", "#/t/orders/records?partition=0", PHONE, "light", 4),
)
DOCUMENTED = {"ui-topics", "ui-topic", "ui-records", "ui-segments", "ui-phone"}  # those that the page has
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


def take(
    browser: Any, address: str, place: Path, to: Path, size: dict[str, int], scheme: str, wait_s: float
) -> None:  # fmt: skip
    """One screenshot, with few colours so that the file is small."""
    from PIL import Image

    page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1)
    page.goto(address)
    page.wait_for_timeout(wait_s * 1000)
    page.evaluate(SHOWN, [str(place.parent), "/srv"])
    page.screenshot(path=to)
    page.close()
    image = Image.open(to).convert("RGB").quantize(MOST_COLOURS, dither=Image.Dither.NONE)
    image.save(to, optimize=True)


def main(directory: Path, *, documented: bool) -> None:
    """Write the screenshots into a directory."""
    from playwright.sync_api import sync_playwright

    with ExitStack() as at_end:
        place = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="shop-"))) / "topics"
        address = at_end.enter_context(served(at_end.enter_context(demonstration(place))))
        playwright = at_end.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, hash_, size, scheme, wait_s in SHOTS:
            if not documented or name in DOCUMENTED:
                take(browser, address + hash_, place, directory / f"{name}.png", size, scheme, wait_s)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES, documented=len(sys.argv) < 2)
