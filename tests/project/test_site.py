"""The documentation as a site: it builds, every page is in it, and every link of it leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
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
