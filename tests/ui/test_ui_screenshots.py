"""scripts/ui_screenshots.py takes the pictures of docs/ui.md from a page that works and asks nobody else."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from browsers import chromium

from conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unmeasured")]

IMAGES = ROOT / "docs" / "images"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("ui_screenshots", ROOT / "scripts" / "ui_screenshots.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ui_screenshots", found)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def faulty() -> Iterator[str]:
    """The address of a page that complains, and asks another host."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            asks = "fetch(`http://localhost:${location.port}/other`)"
            self.wfile.write(f"<script>console.error('no such thing'); {asks}</script><p>x</p>".encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_address[1]}/"
        site.shutdown()


def sizes(directory: Path) -> dict[str, tuple[int, int]]:
    image = pytest.importorskip("PIL.Image")
    found = {}
    for path in directory.glob("ui-*.png"):
        with image.open(path) as opened:
            found[path.name] = opened.size
    return found


def test_script_takes_each_picture_of_the_page_again(script: ModuleType, tmp_path: Path) -> None:
    with chromium():
        pass  # or it is skipped
    faults = script.main(tmp_path, documented=True, charts_s=0.0)
    assert faults == [], "no error in the console, and no request to another host"
    taken, kept = sizes(tmp_path), sizes(IMAGES)
    assert taken == kept and len(kept) >= 6
    assert all((tmp_path / name).stat().st_size > 5_000 for name in taken), "a page that is empty is small"


def test_page_of_the_documentation_shows_each_picture() -> None:
    shown = re.findall(r"\]\(images/(ui-[a-z-]+\.png)\)", (ROOT / "docs" / "ui.md").read_text("utf-8"))
    assert sorted(shown) == sorted(path.name for path in IMAGES.glob("ui-*.png"))


def test_script_notes_an_error_in_the_console_and_a_request_to_another_host(
    script: ModuleType, tmp_path: Path, faulty: str
) -> None:
    with chromium() as browser:
        shot = script.Shot("ui-faulty", "", "p")
        visit = script.Visit(browser, faulty, shot)
        visit.page.wait_for_load_state("networkidle")
        faults = visit.take(tmp_path, tmp_path / "ui-faulty.png")
    assert "ui-faulty: no such thing" in faults
    assert any(re.fullmatch(r"ui-faulty: http://localhost:\d+/other", each) for each in faults)
