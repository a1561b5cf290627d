"""Write docs/reference.md anew: every public name and the first line of its docstring. `python scripts/reference.py`"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import loglib
import loglib.aio
import loglib.audit
import loglib.copies
import loglib.errors
import loglib.groups
import loglib.log
import loglib.logging
import loglib.metrics.exporter
import loglib.metrics.opentelemetry
import loglib.metrics.prometheus
import loglib.offload
import loglib.spark
import loglib.testing
import loglib.transactions
from loglib.system.files import Files

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
BEGINNING = """# Every public name

The first line of each docstring; `help(loglib.Topic.open)` shows the whole. This page is made by
`python scripts/reference.py`.
"""


def reference() -> str:
    """The page as it should be."""
    lines = [BEGINNING]
    rooms = loglib.groups, loglib.transactions, loglib.copies, loglib.offload, loglib.log, loglib.errors
    metrics = (
        loglib.metrics, loglib.metrics.opentelemetry, loglib.metrics.prometheus, loglib.metrics.exporter,
    )  # fmt: skip
    for module in (loglib, *rooms, loglib.aio, loglib.audit, loglib.logging, *metrics, loglib.spark, loglib.testing):
        hidden = set() if module is loglib else set(loglib.__all__)  # a name has one row
        names = [name for name in module.__all__ if not name.startswith("__") and name not in hidden]
        names.sort(key=_order(module))
        lines += [f"## `{module.__name__}`", "", "| name | what it is |", "| --- | --- |"]
        for name in names:
            lines += _rows(name, getattr(module, name))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _order(module: ModuleType) -> Any:
    """Functions and classes first, errors last; by name."""

    def key(name: str) -> tuple[bool, str]:
        thing = getattr(module, name)
        return inspect.isclass(thing) and issubclass(thing, BaseException), name

    return key


def _rows(name: str, thing: Any) -> Iterator[str]:
    yield f"| `{name}` | {_first_line(thing)} |"
    if inspect.isclass(thing) and not issubclass(thing, BaseException):
        for member, value in sorted(_members(thing).items()):
            yield f"| `{name}.{member}` | {_first_line(value)} |"


def _members(thing: type) -> dict[str, Any]:
    """The public methods and properties that loglib gives a class, its own and inherited ones."""
    found: dict[str, Any] = {}
    for base in reversed(thing.__mro__):
        ours = base.__module__.startswith("loglib") and base not in Files.__mro__
        for name, value in vars(base).items() if ours else ():
            plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            described = inspect.isfunction(plain) or isinstance(plain, property)
            if described and not name.startswith("_") and not hasattr(Files, name):
                found[name] = plain
    return found


def _first_line(thing: Any) -> str:
    if not (inspect.isclass(thing) or inspect.isfunction(thing) or isinstance(thing, property)):
        thing = re.sub(r"[a-z.]+\.(?=[A-Za-z])", "", str(thing)).replace("|", "or")
        return f"`{thing}`"
    return (inspect.getdoc(thing) or "").partition("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), "utf-8")
