"""Hooks of mkdocs: pages from files outside docs/, the reference of the classes, and links that work in the site.

The Markdown files are written for a checkout, where links lead from file to file. Here the files beside docs/ become
pages, links to them are mended, and links to files that are no pages become plain text. The search ranks guides above
decisions and records.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Files outside docs/, and the pages that they become.
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/RESULTS.md": "results.md",
    "tests/reliability/README.md": "proof.md",
    "docs/README.md": "decisions.md",
}
ALIASES = {"README.md": "index.md"}  # the landing page says the same
DECISIONS = "\n## Decisions\n"  # the part of docs/README.md that the navigation does not have
CHART = "images/speed.svg"  # within the page, so that its text has the colour of the page
# Factors of a page's rank in the search, in which a word of a title counts a thousand times.
LOW_IN_SEARCH = {"decisions": 1e-4, "changelog.md": 1e-3, "results.md": 1e-2, "contributing.md": 1e-2, "proof.md": 0.1}
API = """# Classes and functions

Arguments, results and errors of each call. [Every public name](reference.md) has one line per name.

"""
API_NAMES = (
    "loglib.Topic", "loglib.Partition", "loglib.Reader", "loglib.Record", "loglib.Batch", "loglib.Group",
    "loglib.transaction", "loglib.Transaction", "loglib.Retention", "loglib.FlushPolicy", "loglib.metrics.TopicStats",
    "loglib.metrics.PartitionStats", "loglib.topics", "loglib.group", "loglib.repair", "loglib.log.RepairReport",
    "loglib.copies.snapshot", "loglib.copies.Snapshot", "loglib.copies.mirror", "loglib.copies.Mirror",
    "loglib.copies.promote", "loglib.offload.archive", "loglib.offload.ArchiveManifest", "loglib.offload.tier",
    "loglib.offload.TierManifest", "loglib.offload.read_archive", "loglib.audit", "loglib.aio.open",
    "loglib.aio.AsyncTopic", "loglib.aio.AsyncReader", "loglib.aio.AsyncGroup", "loglib.logging.LogHandler",
    "loglib.metrics.prometheus", "loglib.metrics.opentelemetry", "loglib.spark", "loglib.testing",
)  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`(?!\]))", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_content(source)))
    blocks = "\n".join(f"::: {name}\n" for name in API_NAMES)
    files.append(File.generated(config, "api.md", content=API + blocks))
    return files


def _content(source: str) -> str:
    """The text of a page from outside docs/."""
    text = (ROOT / source).read_text("utf-8")
    return f"# Decisions\n{text.split(DECISIONS)[1]}" if source == "docs/README.md" else text


def _title(path: Path) -> str:
    """The first heading of a page."""
    return next((line[2:] for line in path.read_text("utf-8").splitlines() if line.startswith("# ")), path.name)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Mend the links of a page."""
    here = page.file.src_uri
    for name, boost in LOW_IN_SEARCH.items():
        if here.startswith(name):
            page.meta["search"] = {"boost": boost}
    source = next((path for path, name in PAGES.items() if name == here), f"docs/{here}")

    def mended(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or target.startswith("mailto:"):
            return link[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = found.removeprefix("docs/") if found.startswith("docs/") else None
        uri = PAGES.get(found) or ALIASES.get(found) or inside
        if uri is None or not (found in PAGES or (ROOT / found).is_file()):
            return text
        if image and uri == CHART:
            return f'<div class="chart">{(ROOT / found).read_text("utf-8").replace(chr(10), "")}</div>'
        if text.strip("`").endswith(".md"):
            text = _title(ROOT / found)
        relative = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"

    markdown = re.sub(r"^(\s*```python) (?:spark|quoted)$", r"\1", markdown, flags=re.MULTILINE)  # a note for the tests
    parts = CODE.split(markdown)  # every second part is code
    return "".join(part if index % 2 else LINK.sub(mended, part) for index, part in enumerate(parts))
