"""Writes docs/llms.txt: the pages of the documentation with one line each, for programs that read about loglib.

The form is that of llmstxt.org: a title, a summary, and lists of links. The first sentence of a page describes it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "llms.txt"
SUMMARY = (
    "loglib is an embedded log for Python with Kafka's model of storage: topics, partitions, offsets, consumer groups "
    "and transactions in plain files, without a server. PySpark reads and writes the same files."
)


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def text() -> str:
    """The content of the file."""
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), _Loader)["nav"]
    lines = ["# loglib", "", f"> {SUMMARY}"]
    for section in navigation:
        for title, pages in section.items():
            lines += ["", f"## {title}", ""]
            for page in pages:
                name = page if isinstance(page, str) else next(iter(page.values()))
                if (ROOT / "docs" / name).exists():
                    lines.append(_line(name))
    return "\n".join(lines) + "\n"


def _line(name: str) -> str:
    content = (ROOT / "docs" / name).read_text("utf-8")
    title = content.split("\n", 1)[0].removeprefix("# ")
    paragraphs = [each for each in content.split("\n\n")[1:] if re.match(r"[A-Za-z*`]", each)]
    first = " ".join(paragraphs[0].split()) if paragraphs else ""
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`*])", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first).replace("*", ""))[0]
    return f"- [{title}]({name}): {sentence.rstrip(':')}"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text("utf-8") != text())
    PAGE.write_text(text(), "utf-8")
