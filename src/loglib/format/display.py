"""Display: what an object says of itself at a prompt and in a notebook.

Invariant: it never raises. A look at the disk may fail; then what was found before that is shown.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Shown", "sized"]

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


class Shown:
    """A base class: `_facts` gives names and values, of which text and a table are made."""

    __slots__ = ()

    def _facts(self) -> Iterator[tuple[str, object]]:
        """What to show, from the most to the least important. May raise midway."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(f'{name} {value}'.strip() for name, value in _found(self))}>"

    def _repr_html_(self) -> str:
        import html

        rows = [
            f"<tr><th style='text-align: left'>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in _found(self)
        ]
        return f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"


def _found(shown: Shown) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    try:
        for fact in shown._facts():  # noqa: SLF001  It is for this module.
            found.append(fact)  # noqa: PERF402  What comes before an error stays.
    except Exception as error:  # noqa: BLE001  Whatever it is: it must not keep a person from seeing the object.
        found.append(("", f"({type(error).__name__})"))
    return found


def sized(count: int) -> str:
    """A number of bytes as a person reads it: 1,234 bytes, 12.3 MB."""
    size, unit = float(count), 0
    while size >= 10_000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{count:,} bytes" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"
