"""Display: the facts about an object that a prompt and a notebook show.

Invariant: it never raises. If a look at the disk fails, the facts before it are shown. All that is shown is escaped, so
nothing in it is markup. The chart is a drawing in the notebook's own colour: it needs no script and no library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_MOST_ROWS = 21  # of the second table, the names with them
_MOST_BARS = 64  # of a chart; then a bar has several neighbours
_WIDTH, _HEIGHT, _WIDEST = 384, 48, 24  # of a chart and a bar, in pixels

Bars = Sequence[tuple[str, int]]


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
        more = f"<table>{''.join(listed)}</table>" if listed else ""
        return f"{table}{more}{_chart(self)}"

    def _rows(self) -> Iterator[Sequence[object]]:
        """The rows of a second table in a notebook, the names first; by default none. It may raise in the middle.

        The first 20 rows are shown.
        """
        return iter(())


    def _bars(self) -> tuple[str, Bars]:
        """The title of a small chart in a notebook, and its bars: a name and a number of bytes each. It may raise."""
        return "", ()


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
            found.append(row if len(found) < _MOST_ROWS else ("and more",))
            if len(found) > _MOST_ROWS:
                break
    except Exception as error:  # noqa: BLE001  Likewise.
        found.append((f"({type(error).__name__})",))
    return found


def _chart(shown: Shown) -> str:
    """The bars as a drawing; nothing without them. Each says its name and number."""
    import html

    try:
        title, bars = shown._bars()  # noqa: SLF001  Likewise.
    except Exception:  # noqa: BLE001  The table says which error it was.
        return ""
    bars = _merged(bars)
    most, wide = max([size for _, size in bars], default=0), min(_WIDEST, _WIDTH // max(1, len(bars)))
    if not most:
        return ""
    drawn = []
    for number, (name, size) in enumerate(bars):
        high = max(1, round(_HEIGHT * size / most)) if size else 0
        place = f"x='{number * wide}' y='{_HEIGHT - high}' width='{wide - 1}' height='{high}'"
        drawn.append(f"<rect {place}><title>{html.escape(f'{name}: {sized(size)}')}</title></rect>")
    shape = f"width='{wide * len(bars)}' height='{_HEIGHT}' fill='currentColor' fill-opacity='0.6' role='img'"
    said = html.escape(f"{title}, at most {sized(most)}")
    return f"<div>{said}</div><svg {shape} aria-label='{said}'>{''.join(drawn)}</svg>"


def _merged(bars: Bars) -> Bars:
    """The bars, or fewer ones that have the sums of neighbours."""
    step = -(-len(bars) // _MOST_BARS)
    if step <= 1:
        return bars
    parts = [bars[first : first + step] for first in range(0, len(bars), step)]
    return [(f"{part[0][0]} to {part[-1][0]}", sum(size for _, size in part)) for part in parts]


def sized(count: int) -> str:
    """A number of bytes as a person reads it: 1,234 bytes, 12.3 MB."""
    size, unit = float(count), 0
    while size >= 10_000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return counted(count, "byte") if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"


def counted(count: int, noun: str) -> str:
    """A number of things as a person reads it: 1 record, 2,000 records."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"
