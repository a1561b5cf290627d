"""The views of `loglib ui` in a real Chromium: what a person sees, types and reads. Needs playwright and Chromium."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import chromium, tab_of
from builders import spoil
from monitored import committed, made
from served_page import Page, serving
from shared_jobs import die

from conftest import QUIET, last_segment, without_coverage
from loglib import Retention, Topic, testing

pytestmark = pytest.mark.slow

HOSTILE = [
    (b"</td><b>bold</b>", b"<img src=x onerror=alert(1)><script>alert(2)</script>"),
    (None, "\u202egnp.exe \u05e9\u05dc\u05d5\u05dd \x1b[31m\x00\u200b".encode()),
    (b"huge", b"x" * 3_000_000),
    (b"json", b'{"deep": {"n": 12345678901234567890, "html": "<b>x</b>"}}'),
    (b"bytes", bytes(range(256))),
    (None, None),
]
PHONE = {"width": 390, "height": 780}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Topics: one that is well, one damaged, one with segments that go, one with a share, one with hostile records."""
    found = tmp_path_factory.mktemp("ui") / "topics"
    now_us = time.time_ns() // 1000 - 200_000_000
    with testing.open_topic(found / "orders", partitions=2, **QUIET) as topic:
        for number in range(120):
            topic.append(b"%d" % number, partition=number % 2, timestamp=now_us + number * 1_000_000)
        topic.flush()
    committed(found / "orders", "billing", "begin")
    damaged = made(found / "damaged")
    spoil(last_segment(damaged), last_segment(damaged).stat().st_size - 10)
    with testing.open_topic(found / "payments", **(QUIET | {"retention": Retention(age=None, bytes=0)})) as topic:
        for _ in range(3):
            topic.append_many([b"x"] * 5)
            topic.partition(0).roll()
    with testing.open_topic(found / "hostile", **QUIET) as topic:
        for key, value in HOSTILE:
            topic.append(value, key=key, headers={"<i>name</i>": b"<u>v</u>"})
        topic.flush()
    with testing.open_topic(found / "worked", partitions=2, **QUIET) as topic:
        for number in range(20):
            topic.append(b"x", partition=number % 2)
        topic.flush()
        share = topic.share("send", member="alice", window=5, max_attempts=2)
        jobs = list(filter(None, (share.take(0.0) for _ in range(10))))
        jobs[0].reject()
        jobs[1].release(delay=36_000.0)
        die(share)  # so there are records in the hand of nobody, and a window is full
    return found


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Page]:
    with without_coverage(), serving(place) as found:
        yield found


@pytest.fixture
def view(browser: Any, served: Page) -> Iterator[Any]:
    with tab_of(browser, served) as tab:
        yield tab


def test_topics_are_listed_with_what_is_wrong_and_the_next_command(view: Any, served: Page, place: Path) -> None:
    view.goto(served.address)
    view.wait_for_selector("text=✓ well")
    view.wait_for_selector("text=⚠ damage")
    assert view.locator("tbody tr a").all_inner_texts() == ["damaged", "hostile", "orders", "payments", "worked"]
    view.wait_for_selector("tr:has-text('orders') >> text=120", timeout=60_000)
    assert f"loglib verify {place / 'damaged'}" in view.locator(".troubles code").all_inner_texts()


def test_topic_shows_charts_partitions_and_policies(view: Any, served: Page) -> None:
    view.goto(served.address + "#/t/orders")
    for title in ("Lag of groups", "Records per second", "Size"):  # a level line has no height to be seen
        view.wait_for_selector(f"figure:has-text('{title}') svg path", state="attached")
    assert view.locator("main h2").all_inner_texts() == ["Partitions", "Policies", "Disk"]
    assert view.locator("tbody tr").count() == 2
    view.click("a:text-is('records') >> nth=1")
    view.wait_for_selector(".rows li")
    assert {each.split(":")[0] for each in view.locator(".rows .place").all_inner_texts()} == {"1"}


def test_segments_say_why_they_stay_or_go(view: Any, served: Page) -> None:
    view.goto(served.address + "#/t/payments/segments/0")
    view.wait_for_selector("text=The next pass of retention drops 3 of them")
    rows = view.locator("tbody tr").all_inner_texts()
    assert len(rows) == 4 and "the limit is 0" in rows[0] and "the segment that is being written" in rows[3]


def test_groups_show_members_that_are_there(view: Any, served: Page, place: Path) -> None:
    view.goto(served.address + "#/t/orders/groups")
    view.wait_for_selector("text=nobody reads for this group now")
    with Topic.open(place / "orders", mode="r") as topic, topic.group("billing", member="alice") as group:
        group.poll()
        view.wait_for_selector("td:has-text('alice')")
        view.wait_for_selector("td:has-text('0 to 1')")


def test_shares_show_who_has_which_record_in_hand_and_what_waits(view: Any, served: Page, place: Path) -> None:
    made(place / "mails", records=130)
    view.goto(served.address + "#/t/mails/groups")
    view.wait_for_selector("text=Nobody shares the records of this topic")
    with Topic.open(place / "mails") as topic, topic.share("send", member="alice") as share:
        jobs = [share.take(0.0) for _ in range(120)]
        held = [job for job in jobs if job is not None]
        held[0].release(delay=3600.0)
        held[1].reject("<b>no such user</b>")
        held[2].accept()
        view.wait_for_selector("article.share >> td:has-text('alice') >> nth=0")
        figures = view.locator("article.share dl.figures")
        figures.locator("div:has-text('In hand')").locator("dd:text-is('117')").wait_for()
        assert [each.split("\n") for each in figures.locator("div").all_inner_texts()] == [
            ["In hand", "117"], ["Waiting", "1"], ["Free again", "0"], ["Accepted", "1"], ["Dead", "1"], ["Lost", "0"],
        ]  # fmt: skip
        settings = "max_attempts 5, window 10,000, max_in_hand any, dead_letter none, order none"
        assert settings in view.locator("article.share").inner_text()
        in_hand = view.locator("[aria-label='Records in hand, the longest first'] tbody tr")
        assert in_hand.count() == 50
        view.click("article.share >> nav.pages >> text=Last")
        view.wait_for_selector("text=101 to 117 of 117 records")
        assert in_hand.count() == 17
        waiting = view.locator("[aria-label='Records that wait, the next to come first'] tbody tr")
        assert waiting.count() == 1 and f"{held[0].offset}" in waiting.inner_text()
        view.goto(served.address)
        row = view.locator("tr[data-row='mails']")
        row.locator("text=send 117 in hand, 1 waiting, 1 dead").wait_for()
        assert "no share" in view.locator("tr[data-row='hostile']").inner_text()
        view.goto(served.address + "#/t/mails")
        view.click("section a:has-text('send')")
        view.wait_for_selector("article.share")
        view.keyboard.press("j")
        assert view.evaluate("document.activeElement.dataset.row") == f"send 0:{held[3].offset}"
        view.keyboard.press("Enter")
        view.wait_for_selector("pre.content")
        assert view.locator("pre.content").inner_text() == (held[3].value or b"").decode()
        for job in held[3:]:
            job.release()


def test_hostile_names_in_a_shares_files_are_text(view: Any, served: Page, place: Path) -> None:
    made(place / "odd", records=3)
    with Topic.open(place / "odd") as topic, topic.share("send", member="alice") as share:
        job = share.take(0.0)
        text = {"member": "<img src=x onerror=alert(1)>\u202e", "host": "<b>host</b>", "since": "<i>", "boot": ""}
        share._file._file.replace(json.dumps(text | {"pid": 1}).encode())
        view.goto(served.address + "#/t/odd/groups")
        view.wait_for_selector("td:has-text('<b>host</b>')")
        assert view.locator("main img, main b, main i").count() == 0
        assert view.locator("[aria-label=Members] .escape").all_inner_texts() == ["\\u202e"]
        view.wait_for_selector("[aria-label='Records in hand, the longest first'] td:has-text('<img src=x')")
        share._file._file.replace(
            json.dumps({"member": "alice", "pid": 1, "host": "", "since": "", "boot": ""}).encode()
        )
        assert job is not None
        job.accept()


def test_share_that_is_blocked_or_cannot_be_read_is_told_with_the_next_command(
    view: Any, served: Page, place: Path
) -> None:
    made(place / "stuck", records=6)
    with Topic.open(place / "stuck") as topic:
        topic.share("torn").close()
        damaged = next((place / "stuck" / "shares" / "torn" / "0000").glob("*.acks"))
        damaged.write_bytes(b"LOGLACKS")
        with topic.share("send", member="alice", window=2) as share:
            held = [share.take(0.0) for _ in range(2)]
            view.goto(served.address + "#/t/stuck/groups")
            view.wait_for_selector("td:has-text('⚠ the window is full')")
            view.wait_for_selector("article.share:has-text('torn') >> .bad:has-text('8 bytes')")
            view.goto(served.address + "#/t/stuck")
            view.wait_for_selector("ul.troubles >> text=share send begins no other record of partition 0")
            commands = view.locator("ul.troubles code").all_inner_texts()
            assert held[0] is not None and held[1] is not None
            assert commands == [
                f"loglib cat {place / 'stuck'} -p 0 --from 0:{held[0].offset} -n 1",
                f"ls -lR {place / 'stuck' / 'shares' / 'torn'}",
            ]
            for job in held:
                assert job is not None
                job.accept()
    damaged.unlink()


def test_records_are_paged_and_searched(view: Any, served: Page) -> None:
    view.goto(served.address + "#/t/orders/records")
    view.wait_for_selector(".rows li")
    newest = view.locator(".rows .value").all_inner_texts()
    assert newest == [str(number) for number in range(70, 120)]
    view.keyboard.press("[")
    view.wait_for_selector(".rows .value bdi:text-is('20')")
    assert view.locator(".rows .value").all_inner_texts() == [str(number) for number in range(20, 70)]
    view.keyboard.press("]")
    view.wait_for_selector(".rows .value bdi:text-is('119')")
    view.fill("input[name=text]", "11")
    view.keyboard.press("Enter")
    view.wait_for_selector("text=records looked at")
    assert view.locator(".rows .value").all_inner_texts() == ["11", *(str(number) for number in range(110, 120))]


def test_hostile_records_are_text(view: Any, served: Page) -> None:
    view.goto(served.address + "#/t/hostile/records")
    view.wait_for_selector(".rows li")
    assert view.locator(".rows .value").nth(0).inner_text() == "<img src=x onerror=alert(1)><script>alert(2)</script>"
    assert view.locator(".rows .key").nth(0).inner_text() == "</td><b>bold</b>"
    assert view.locator("main img, main script, main b, main i, main u").count() == 0
    escapes = view.locator(".rows li").nth(1).locator(".escape").all_inner_texts()
    assert escapes == ["\\u202e", "\\x1b", "\\x00", "\\u200b"]
    assert "3,000.0 kB" in view.locator(".rows li").nth(2).inner_text()
    assert view.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no record makes the page wider"


def test_record_has_a_link_a_shell_command_and_its_whole_value(view: Any, served: Page, place: Path) -> None:
    with Topic.open(place / "hostile", mode="r") as topic:
        offsets = [record.offset for record in topic.read()]
    view.goto(served.address + f"#/t/hostile/record/0/{offsets[3]}")
    view.wait_for_selector("pre.content")
    shown = view.locator("pre.content").nth(1).inner_text()
    assert json.loads(shown) == json.loads(HOSTILE[3][1] or b"") and '\n    "n": 12345678901234567890' in shown
    assert f"loglib cat {place / 'hostile'} -p 0 --from 0:{offsets[3]} -n 1" in view.locator("code").all_inner_texts()
    assert view.locator("dt", has_text="<i>name</i>").count() == 1
    view.keyboard.press("[")
    view.wait_for_selector("text=Only the beginning is shown. The whole has 3,000.0 kB.")
    with view.expect_download() as started:
        view.click("text=Download the value")
    assert Path(started.value.path()).read_bytes() == HOSTILE[2][1]


def test_live_tail_shows_what_comes_and_says_what_it_passes_over(view: Any, served: Page, place: Path) -> None:
    made(place / "live", records=3)
    view.goto(served.address + "#/t/live/records?live=1")
    view.wait_for_selector(".rows .value bdi:text-is('2')")
    with Topic.open(place / "live") as topic:
        topic.append(b"came later", sync=True)
        view.wait_for_selector(".rows .value bdi:text-is('came later')")
        topic.append_many([b"burst %d" % number for number in range(5000)], partition=0)
        topic.flush()
    view.wait_for_selector(".rows .value bdi:text-is('burst 4999')")
    passed = view.locator("li.passed").inner_text()
    assert passed.startswith("4,800 records of partition 0 passed over")
    assert "passed over" in view.locator(".below").inner_text()
    with Topic.open(place / "live") as topic:
        for number in range(3):  # so that the first rows leave the list, with what was passed over among them
            topic.append_many([b"more %d" % number] * 200, partition=0)
            topic.flush()
            view.wait_for_selector(f".rows .value bdi:text-is('more {number}') >> nth=199")
    view.wait_for_selector("p.passed:has-text('of this tail are not listed any more')")
    assert view.locator(".rows li").count() <= 500 and view.locator("li.passed").count() == 0
    view.click("p.passed >> text=Go back to them")
    view.wait_for_selector(".rows .value bdi:text-is('0')")
    view.wait_for_selector(".rows .value bdi:text-is('burst 0')")


def test_keys_move_open_and_explain(view: Any, served: Page) -> None:
    view.goto(served.address)
    view.wait_for_selector("tbody tr")
    view.keyboard.press("j")
    view.keyboard.press("j")
    assert view.evaluate("document.activeElement.dataset.row") == "hostile"
    view.keyboard.press("Enter")
    view.wait_for_selector("h1:has-text('hostile')")
    view.keyboard.press("2")
    view.wait_for_selector(".rows li")
    view.keyboard.press("/")
    assert view.evaluate("document.activeElement.name") == "text"
    view.keyboard.press("Escape")
    view.keyboard.press("?")
    view.wait_for_selector("dialog[open] >> text=live tail")
    view.keyboard.press("Escape")
    view.keyboard.press("t")
    view.wait_for_selector("text=What is wrong")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "address",
    ["#/", "#/t/orders", "#/t/payments/segments/0", "#/t/orders/groups", "#/t/worked/groups", "#/t/hostile/records"],
)
def test_text_has_the_contrast_of_wcag_aa_and_fits_a_phone(
    browser: Any, served: Page, scheme: str, address: str
) -> None:  # fmt: skip
    tab = browser.new_page(viewport=PHONE, color_scheme=scheme)
    try:
        tab.goto(served.address + address)
        tab.wait_for_selector("tbody tr, .rows li, .figures dd", timeout=60_000)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        low = tab.evaluate(CONTRAST)
        assert low == []
    finally:
        tab.close()


# Each element with text of its own, whose colour differs too little from the first opaque background below it.
CONTRAST = """() => {
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => {
        const linear = (each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
        const [x, y, z] = [r, g, b].map((each) => linear(each / 255));
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const back = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const found = parts(getComputedStyle(at).backgroundColor);
            if (found.length < 4 || found[3] === 1) return found;
        }
        return [255, 255, 255];
    };
    const low = [];
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
        if (!own || element.closest(":disabled, .off, .hidden-text, noscript, dialog:not([open])")) continue;
        const style = getComputedStyle(element);
        const colour = parts(element instanceof SVGElement ? style.fill : style.color);
        const [a, b] = [light(colour), light(back(element))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) low.push(`${element.tagName} ${ratio.toFixed(2)} ${element.textContent.slice(0, 30)}`);
    }
    return low;
}"""


def test_page_of_another_site_learns_nothing(browser: Any, served: Page) -> None:
    """A real browser on another site's page, which knows the port and even the token."""
    import http.server

    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>another site</title>")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        tab = browser.new_page()
        try:
            tab.goto(f"http://localhost:{site.server_address[1]}/")
            learned = tab.evaluate(
                """async ([address, token]) => {
                    const tries = [{}, {headers: {Authorization: `Bearer ${token}`}}, {mode: "no-cors"}];
                    const ask = (each) => fetch(address, each).then((answer) => answer.text(), (error) => error.name);
                    return Promise.all(tries.map(ask));
                }""",
                [f"http://127.0.0.1:{served.port}/api/topics", served.token],
            )
            assert learned == ["TypeError"] * 3
            tab.set_content(f'<iframe src="{served.address}"></iframe><script src="{served.address}"></script>')
            frame = tab.frame_locator("iframe").locator("body")
            assert "orders" not in tab.content() and "orders" not in frame.inner_text(timeout=30_000)
        finally:
            tab.close()
            site.shutdown()


def test_wrong_token_is_told_and_shows_nothing(browser: Any, served: Page) -> None:
    tab = browser.new_page()
    tab.goto(f"http://127.0.0.1:{served.port}/?token=wrong")
    tab.wait_for_selector("[role=alert]:has-text('the token is missing or wrong')", timeout=60_000)
    assert "orders" not in tab.content()
    tab.close()
