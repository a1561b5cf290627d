"""Display: the facts about an object that a prompt and a notebook show.

Invariant: it never raises. If a look at the disk fails, the facts before it are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


class Shown:
    """A base class that shows the names and values of `_facts` as a text or a table."""

    __slots__ = ()

    def _facts(self) -> Iterator[tuple[str, object]]:
        """The facts to show, the most important one first. It may raise in the middle."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(f'{name} {value}'.strip() for name, value in _found(self))}>"

    def _repr_html_(self) -> str:
        import html

        rows = [
            f"<tr><th style='text-align: left'>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in _found(self)
        ]
        listed = [
            f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in _listed(self)
        ]  # fmt: skip
        table = f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"
        return f"{table}<table>{''.join(listed)}</table>" if listed else table

    def _rows(self) -> Iterator[Sequence[object]]:
        """The rows of a second table in a notebook, the names first; by default none. It may raise in the middle."""
        return iter(())


def _found(shown: Shown) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    try:
        for fact in shown._facts():  # noqa: SLF001  It exists for this module.
            found.append(fact)  # noqa: PERF402  The facts before an error stay.
    except Exception as error:  # noqa: BLE001  No error may keep a person from seeing the object.
        found.append(("", f"({type(error).__name__})"))
    return found


def _listed(shown: Shown) -> list[Sequence[object]]:
    found: list[Sequence[object]] = []
    try:
        for row in shown._rows():  # noqa: SLF001  Likewise.
            found.append(row)  # noqa: PERF402  Likewise.
    except Exception as error:  # noqa: BLE001  Likewise.
        found.append((f"({type(error).__name__})",))
    return found


def sized(count: int) -> str:
    """A number of bytes as a person reads it: 1,234 bytes, 12.3 MB."""
    size, unit = float(count), 0
    while size >= 10_000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{count:,} bytes" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"
