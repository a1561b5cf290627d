"""A real browser for tests: Debian's Chromium, led by playwright. Without both the tests say so, and are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from served_page import Page

WIDE = {"width": 1280, "height": 800}
NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, until the end of the context."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip("NOT PROVED: this machine lacks Chromium (Debian's chromium) or playwright")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def tab_of(browser: Any, page: Page) -> Iterator[Any]:
    """A tab for a served page. No script may fail, no dialog may open, and nobody else may be asked."""
    tab = browser.new_page(viewport=WIDE)
    tab.set_default_timeout(60_000)
    faults: list[str] = []
    own = (f"http://127.0.0.1:{page.port}/", "blob:")

    def dismissed(dialog: Any) -> None:
        faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    tab.on("pageerror", lambda error: faults.append(f"error: {error}"))
    tab.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    tab.on("dialog", dismissed)
    tab.on("request", lambda asked: None if asked.url.startswith(own) else faults.append(f"asked: {asked.url}"))
    yield tab
    tab.close()
    assert faults == []
