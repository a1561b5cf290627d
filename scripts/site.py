"""Hooks of mkdocs: pages that stand outside docs/, the reference of the classes, and links that work in the site.

The Markdown files are written for a checkout, where links lead from file to file. Here the files beside docs/ become
pages, links to them are mended, and links to files that are no pages become plain text.
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
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/RESULTS.md": "results.md",
    "tests/reliability/README.md": "proof.md",
    "docs/README.md": "decisions.md",
}
API = """# Classes and functions

What a call takes, gives and raises. [Every public name](reference.md) has them all in one line each.

"""
API_NAMES = (
    "loglib.Topic", "loglib.Partition", "loglib.Reader", "loglib.Record", "loglib.Batch", "loglib.Group",
    "loglib.transaction", "loglib.Transaction", "loglib.Retention", "loglib.FlushPolicy", "loglib.TopicStats",
    "loglib.PartitionStats", "loglib.topics", "loglib.group", "loglib.repair", "loglib.RepairReport",
    "loglib.snapshot", "loglib.Snapshot", "loglib.mirror", "loglib.Mirror", "loglib.promote",
    "loglib.archive", "loglib.Archived", "loglib.tier", "loglib.Tiered",
    "loglib.read_archive", "loglib.audit", "loglib.aio.open", "loglib.aio.AsyncTopic",
    "loglib.aio.AsyncReader", "loglib.aio.AsyncGroup", "loglib.logging.LogHandler", "loglib.metrics.prometheus",
    "loglib.metrics.opentelemetry", "loglib.spark", "loglib.testing",
)  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`(?!\]))", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    blocks = "\n".join(f"::: {name}\n" for name in API_NAMES)
    files.append(File.generated(config, "api.md", content=API + blocks))
    return files


def _title(path: Path) -> str:
    """The first heading of a page."""
    return next((line[2:] for line in path.read_text("utf-8").splitlines() if line.startswith("# ")), path.name)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Mend the links of a page."""
    here = page.file.src_uri
    source = next((path for path, name in PAGES.items() if name == here), f"docs/{here}")

    def mended(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or target.startswith("mailto:"):
            return link[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        uri = PAGES.get(found) or (found.removeprefix("docs/") if found.startswith("docs/") else None)
        if uri is None or not (found in PAGES or (ROOT / found).is_file()):
            return text
        if text.strip("`").endswith(".md"):
            text = _title(ROOT / found)
        relative = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"

    markdown = re.sub(r"^(\s*```python) (?:spark|quoted)$", r"\1", markdown, flags=re.MULTILINE)  # a note for the tests
    parts = CODE.split(markdown)  # every second part is code
    return "".join(part if index % 2 else LINK.sub(mended, part) for index, part in enumerate(parts))
