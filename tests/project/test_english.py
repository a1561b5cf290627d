"""The English of code and pages: turns of speech that many readers must read twice do not come back.

The test reads the comments, docstrings and messages of src, and the prose of the pages. Names of code (in backquotes)
and fenced examples are left out. Decisions keep the words of their day.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT

# Each turn, and what to write instead.
TURNS = {
    r"\banew\b": "again, or new",
    r"\b(the|an|its|their) own (?=(one|ones)\b)": "name the thing",
    r"\bthe own\b": "its own, or the topic's own",
    r"(?<!falls )(?<!fall )(?<!fell )(?<!lag )(?<!lags )(?<!far )\bbehind\b": "after, or past",
    r"\bso (many|long|few|much)\b(?! (as|that)\b)": "that many, n, or until",
    r"\bas far as\b": "if, or up to",
    r"\bin words\b": "with an error that says so",
    r"\bbut for\b": "except",
    r"\bas (it is|they are)\b": "unchanged",
    r"\bat once\b": "immediately, or together",
    r"\b(go|goes|went|gone|going) on\b": "continue",
    r"\b(stands|stood|stand)\b(?! for\b)": "is",
    r"\bof (its|their) own accord\b": "by itself",
    r"(?:^|(?<=[.:] ))Whether\b": "True if",
}
# The first word of a docstring is a noun or a verb of the field.
FIRST_WORDS = ("The same", "What ", "Whether ", "See ", "How ", "Who ")


def sources() -> list[Path]:
    return sorted((ROOT / "src").rglob("*.py"))


def pages() -> list[Path]:
    at_the_top = (ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"))
    return [*at_the_top, *sorted((ROOT / "docs").glob("*.md"))]


def prose_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """The comments and strings of a module, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
        elif token.type == tokenize.STRING:
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line.strip("\"' ")


def prose_of_page(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page outside its fenced examples."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def turns(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    for number, line in lines:
        bare = re.sub(r"`[^`]*`", "", line)
        for turn, instead in TURNS.items():
            if found := re.search(turn, bare):
                yield f"{number}: {found[0]!r} -> {instead}: {line.strip()}"


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_code_is_in_plain_english(path: Path) -> None:
    found = list(turns(prose_of_code(path)))
    found += [f"{line}: {text.splitlines()[0]}" for line, text in docstrings(path) if text.startswith(FIRST_WORDS)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_page_is_in_plain_english(path: Path) -> None:
    found = list(turns(prose_of_page(path)))
    assert not found, "\n" + "\n".join(found)
