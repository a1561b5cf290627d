"""`loglib ui` as a process: who is answered and who is refused, what a request can ask for, and how it ends."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from builders import spoil
from commands import Cli, started
from monitored import committed, made
from served_page import Page, serving

from conftest import ROOT, last_segment, run_python, tree, without_coverage
from loglib import Topic

cli = commands.cli
clicks = commands.clicks

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the topic `orders`, two partitions and six records."""
    found = tmp_path_factory.mktemp("ui") / "topics"
    committed(made(found / "orders", partitions=2), "billing", "begin")
    return found


@pytest.fixture(scope="module")
def page(place: Path) -> Iterator[Page]:
    """The page for this directory. The tests share it, and leave the topic unchanged."""
    with without_coverage(), serving(place) as found:
        yield found


FACTS = (
    "topics", "row", "topic", "partitions", "segments", "samples", "groups", "shares", "share", "records", "record",
    "tail",
)  # fmt: skip

# --- who is answered -------------------------------------------------------------------------------------------


def test_page_and_its_facts_are_served_with_the_token(page: Page) -> None:
    index = page.request("/")
    assert index.status == 200 and b'<script type="module" src="app.js">' in index.body
    assert page.facts("topics")["names"] == ["orders"]
    assert page.facts("row", topic="orders")["partitions"] == 2


@pytest.mark.parametrize(
    "given", [None, "", "Bearer ", "Bearer wrong", "Basic {token}", "bearer{token}", "Bearer {token}x"]
)
def test_facts_need_the_token(page: Page, given: str | None) -> None:
    header = None if given is None else given.format(token=page.token)
    for name in (*FACTS, "value", "none"):
        answer = page.ask(name, {"Authorization": header}, topic="orders")
        assert answer.status == 401 and b"orders" not in answer.body, name


@pytest.mark.parametrize("token_in", ["/api/topics?token={token}", "/api/topics?access_token={token}"])
def test_token_counts_in_the_header_alone(page: Page, token_in: str) -> None:
    """A page of another site can make a browser send an address, and no such header."""
    assert page.request(token_in.format(token=page.token)).status == 401
    assert page.request("/api/topics", {"Cookie": f"token={page.token}"}).status == 401


@pytest.mark.parametrize(
    "host",
    [
        None, "evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "localhost.evil.example",
        "10.0.0.1:{port}", "0.0.0.0:{port}", "127.0.0.1@evil.example", "127.0.0.1:x", "127.0.0.1:{port}:1", "",
    ],
)  # fmt: skip
def test_name_of_another_site_that_leads_here_is_refused(page: Page, host: str | None) -> None:
    """DNS rebinding: the browser takes the answer for one of that site."""
    header = None if host is None else host.format(port=page.port)
    for path in ("/", "/app.js", "/api/topics"):
        answer = page.request(path, {"Host": header, "Authorization": f"Bearer {page.token}"})
        assert answer.status in (400, 421) and b"orders" not in answer.body and b"<script" not in answer.body


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "localhost:1", "localhost"])
def test_names_of_this_host_are_answered_also_through_a_forwarded_port(page: Page, host: str) -> None:
    assert page.ask("topics", {"Host": host.format(port=page.port)}).status == 200


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://127.0.0.1:{port}", "http://127.0.0.1:1", "http://localhost:{port}", "null", ""],
)  # fmt: skip
def test_page_of_another_site_is_refused_even_with_the_token(page: Page, origin: str) -> None:
    answer = page.ask("topics", {"Origin": origin.format(port=page.port)})
    assert answer.status == 403 and b"orders" not in answer.body
    assert "access-control-allow-origin" not in answer.headers


def test_own_origin_is_answered(page: Page) -> None:
    own = {"Origin": f"http://127.0.0.1:{page.port}", "Sec-Fetch-Site": "same-origin"}
    assert page.ask("topics", own).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_request_that_a_browser_names_as_foreign_is_refused(page: Page, site: str) -> None:
    assert page.ask("topics", {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "cors"}).status == 403
    assert page.request("/app.js", {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}).status == 403
    by_a_link = page.request("/", {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"})
    assert by_a_link.status == 200 and b"orders" not in by_a_link.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_page_only_reads(page: Page, place: Path, method: str) -> None:
    before = tree(place)
    for path in ("/", "/api/topics", "/api/row?topic=orders"):
        answer = page.request(path, {"Authorization": f"Bearer {page.token}"}, method=method)
        assert answer.status in (400, 405) and "access-control-allow-methods" not in answer.headers
    assert tree(place) == before


def test_every_answer_forbids_scripts_and_frames_of_others(page: Page) -> None:
    wrong = page.request("/api/topics")
    for answer in (page.request("/"), page.request("/app.js"), page.ask("topics"), wrong, page.request("/none")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy and "data:" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["cache-control"] == "no-store"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_ticket_of_the_browser_is_good_once(tmp_path: Path) -> None:
    made(tmp_path / "orders")
    with serving(tmp_path, "--port", "0") as page:
        assert page.process.stdout is not None
        opened = page.process.stdout.readline().strip()
        ticket = opened.partition("?ticket=")[2]
        assert ticket and page.token not in opened, "other users see the arguments of a process"
        assert page.request("/api/enter", {"Authorization": "Ticket wrong"}).status == 401
        assert page.request("/api/topics", {"Authorization": f"Ticket {ticket}"}).status == 401
        first = page.request("/api/enter", {"Authorization": f"Ticket {ticket}"})
        assert (first.status, first.json) == (200, {"token": page.token})
        assert page.request("/api/enter", {"Authorization": f"Ticket {ticket}"}).status == 401


def test_it_listens_on_the_loopback_address_alone(page: Page) -> None:
    listening = {tuple(line.split()[1:4:2]) for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    port = f"{page.port:04X}"
    assert {local for local, state in listening if state == "0A" and local.endswith(f":{port}")} == {f"0100007F:{port}"}
    assert not any(f":{port} " in line for line in Path("/proc/net/tcp6").read_text().splitlines())


# --- the files of the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/../app.py", "/..%2fapp.py", "/static/app.js", "/app.py", "//etc/passwd", "/%2e%2e/guard.py", "/index.html/x"],
)
def test_no_other_file_is_served(page: Page, path: str) -> None:
    answer = page.request(path, {"Authorization": f"Bearer {page.token}"})
    assert answer.status == 404 and b"import" not in answer.body


def test_page_names_no_other_host_and_has_no_script_within() -> None:
    for path in (ROOT / "src" / "loglib" / "ui" / "static").iterdir():
        text = path.read_text("utf-8")
        outside = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) - {"http://www.w3.org"}
        assert not outside, path.name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, f"{path.name}: {word}"
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=|javascript:", text)


# --- what a request can ask for -------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["..", "../orders", "none", "", ".", "orders/../orders", "%00", "orders\0"])
def test_topic_that_is_not_in_the_directory_is_missing(page: Page, topic: str) -> None:
    for name in ("row", "topic", "records", "segments", "groups", "shares", "share", "tail", "value"):
        answer = page.ask(name, topic=topic)
        assert answer.status == 404 and answer.json["kind"] == "missing", name


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("records", {"partition": "x"}), ("records", {"partition": "7"}), ("records", {"at": "0:x"}),
        ("records", {"at": ":"}), ("records", {"from": "yesterday"}), ("records", {"path": "= 5"}),
        ("records", {"limit": "9" * 400}), ("records", {"partition": "0", "from": "9" * 5000}),
        ("records", {"from": "7"}), ("record", {"partition": "0", "offset": "5"}), ("record", {"partition": "-1"}),
        ("record", {"partition": "0", "offset": "-1"}), ("value", {"partition": "0", "offset": "99999999999"}),
        ("segments", {"partition": "99"}), ("tail", {"partition": "4"}), ("samples", {"after": "a"}),
        ("partitions", {"from": "1e3"}), ("tail", {"at": "0:" + "9" * 5000}),
    ],
)  # fmt: skip
def test_wrong_argument_is_an_answer_with_its_reason(page: Page, name: str, arguments: dict[str, str]) -> None:
    answer = page.ask(name, topic="orders", **arguments)
    assert answer.status == 400 and answer.json["error"], answer.body
    assert page.facts("topics")["names"] == ["orders"], "and the server goes on"


def test_value_is_downloaded_byte_for_byte(page: Page, place: Path) -> None:
    data = bytes(range(256)) * 9
    made(place / "binary")
    with Topic.open(place / "binary") as topic:
        at = topic.append(data, key=b"<script>", partition=0, sync=True)
    answer = page.ask("value", topic="binary", partition=0, offset=at.offset)
    assert answer.body == data and answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment"
    assert page.ask("value", topic="binary", partition=0, offset=at.offset, part="key").body == b"<script>"
    shutil.rmtree(place / "binary")


def test_damage_that_a_page_of_records_meets_is_listed_from_then_on(page: Page, place: Path) -> None:
    at = made(place / "t", records=9)
    with Topic.open(at, mode="r") as topic:
        offsets = [record.offset for record in topic.read()]
    spoil(last_segment(at), 4096 + offsets[3] + 100)
    assert page.facts("row", topic="t")["troubles"] == []
    found = page.facts("records", topic="t")
    assert len(found["records"]) == 8 and len(found["damage"]) == 1
    (trouble,) = page.facts("row", topic="t")["troubles"]
    assert trouble["kind"] == "damage" and trouble["command"] == f"loglib verify {at}"
    damaged = page.ask("record", topic="t", partition=0, offset=offsets[3])
    assert (damaged.status, damaged.json["kind"]) == (400, "damage")
    shutil.rmtree(at)


def test_tail_follows_a_thousand_partitions_by_their_places(page: Page, place: Path) -> None:
    made(place / "wide", records=1, partitions=1000)
    first = page.facts("tail", topic="wide")
    assert len(first["position"]) == 1000
    far = ",".join(f"{number}:{offset}".ljust(20, "0") for number, offset in first["position"].items())
    assert page.facts("tail", topic="wide", at=far)["records"] == []
    shutil.rmtree(place / "wide")


def test_topics_may_come_and_go_while_it_serves(page: Page, place: Path) -> None:
    made(place / "clicks")
    assert page.facts("topics")["names"] == ["clicks", "orders"]
    assert page.facts("row", topic="clicks")["partitions"] == 1
    shutil.rmtree(place / "clicks")
    assert page.ask("row", topic="clicks").status == 404
    assert page.facts("topics")["names"] == ["orders"]


# --- the command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signal_ends_it_without_a_word(tmp_path: Path, number: int, code: int) -> None:
    with started("ui", tmp_path, "--no-browser", stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stderr is not None and process.stdout is not None
            assert process.stderr.readline().startswith(b"serving http://127.0.0.1:")
            process.send_signal(number)
            assert process.wait(60) == code
            assert (process.stderr.read(), process.stdout.read()) == (b"", b"")
        finally:
            process.kill()


def test_port_that_is_taken_is_one_line(cli: Cli, clicks: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = cli("ui", clicks, "--port", port, "--no-browser")
    assert (done.code, done.output) == (3, "") and f"127.0.0.1:{port}: Address already in use" in done.errors


@pytest.mark.parametrize("wrong", [["s3://bucket/topics"], ["/nowhere/at/all"], [".", "--port", "99999"]])
def test_wrong_argument_is_a_usage_error(wrong: list[str], cli: Cli) -> None:
    done = cli("ui", *wrong)
    assert done.code == 2 and "Usage: " in done.errors


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_missing_package_is_named_with_the_command(
    cli: Cli, clicks: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("loglib.ui.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    done = cli("ui", clicks, "--no-browser")
    assert done.code == 3 and f"the page needs {package}: pip install 'loglib-segments[ui]'" in done.errors


def test_neither_the_library_nor_the_help_loads_the_page() -> None:
    program = """
        import sys
        import loglib
        from loglib.cli.program import run
        run(["--help"])
        heavy = ("starlette", "uvicorn", "anyio", "h11", "asyncio", "loglib.ui")
        print([name for name in sys.modules if name.startswith(heavy)])
    """
    assert run_python(program).splitlines()[-1] == "[]"


def test_one_topic_is_served_alone(tmp_path: Path) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b")
    with serving(tmp_path / "a") as page:
        found = page.facts("topics")
        assert (found["only"], found["names"]) == ("a", ["a"])
        assert page.ask("row", topic="b").status == 404
