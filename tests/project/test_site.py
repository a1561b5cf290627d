"""The documentation as a site: it builds, every page is in it, every link leads somewhere, and its chart is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from runpy import run_path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"""<(?:a|img|link|script)\b[^>]*?\b(?:href|src)="([^"]+)""")
NAME = re.compile(r"""\bid="([^"]+)""")


@pytest.mark.slow
def test_site_has_every_page_and_no_dead_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    names = {path: set(map(unescape, NAME.findall(text))) for path, text in pages.items()}
    for source in (ROOT / "docs").rglob("*.md"):
        if source != ROOT / "docs" / "README.md":
            assert source.relative_to(ROOT / "docs").with_suffix(".html") in pages
    dead: list[str] = []
    outside: set[str] = set()
    for page, text in pages.items():
        if page.name == "404.html":
            continue
        for link in map(unescape, LINK.findall(text)):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:|//", link):
                outside.add(link)
                continue
            target = Path(os.path.normpath(page.parent / unquote(path))) if path else page
            missing = anchor and target in names and unquote(anchor) not in names[target]
            if missing or not (tmp_path / target).exists():
                dead.append(f"{page}: {link}")
    assert dead == []
    assert not [each for each in outside if "fonts.g" in each or "unpkg" in each], "it needs no network"
    assert (tmp_path / "search" / "search_index.js").exists(), "the search works from disk"
    assert '<svg xmlns="http://www.w3.org/2000/svg" class="speed"' in pages[Path("index.html")]


def test_chart_of_the_landing_page_has_the_figures_of_the_benchmarks() -> None:
    script = run_path(str(ROOT / "scripts" / "speed_chart.py"))
    chart = script["CHART"].read_text("utf-8")
    assert chart == script["chart"](script["RESULTS"].read_text("utf-8")), "run scripts/speed_chart.py"
    assert chart.count('class="ours"') == len(script["CASES"])
