"""Paper charts: figures 4 and 5 of the paper, one for producers and one for consumers.

Invariant: the charts have no background, and colours that can be read on white and on black. A curve begins where the
first part of the messages was handled.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import pyplot, ticker

from paper_report import BATCHES, Row
from paper_roles import VALUE_BYTES

_COLOURS = {
    "loglib": "#2f7fd6", "loglib, fdatasync": "#8a63d2", "Redis Streams": "#d9480f", "RabbitMQ": "#e0930a",
    "ActiveMQ": "#2b9a66",
}  # fmt: skip
_STYLES = {"1": ":", "50": "-", "stream": "--"}
_GREY = "#808890"  # as readable on white as on black
_POINTS = 25  # of a curve: the measured ones taken together, so that the lines can be told apart
_CONSUMERS = {"records": "-", "columns": "--", "group": ":", "arrow": "-.", "log": "-"}


def draw(rows: list[Row], directory: Path) -> None:
    """Draw both charts, as SVG."""
    producers = [row for row in rows if row.role == "produce"]
    consumers = [row for row in rows if row.role == "consume" and row.batch == "50"]
    _chart(
        producers,
        directory / "paper-producers.svg",
        "Producer: 200-byte messages, batches of 1 (dotted), of 50 (solid), stream (dashed)",
        "MB sent",
        lambda row: (_STYLES[row.batch], f"{row.system.name}, {BATCHES[row.batch]}"),
    )
    _chart(
        consumers,
        directory / "paper-consumers.svg",
        "Consumer: 200-byte messages, sent in batches of 50",
        "MB taken",
        lambda row: (_CONSUMERS[row.way], f"{row.system.name}, {row.label}"),
    )


def _chart(rows: list[Row], path: Path, title: str, below: str, look: Callable[[Row], tuple[str, str]]) -> None:
    settings: dict[Any, Any] = {"svg.hashsalt": "loglib"}  # and no date: the same figures give the same file
    with pyplot.rc_context(settings):
        figure, axis = pyplot.subplots(figsize=(9.5, 5), layout="constrained")
        for row in rows:
            style, label = look(row)
            megabytes, rates = curve(row)
            axis.plot(megabytes, rates, style, color=_COLOURS[row.system.name], linewidth=1.8, label=label)
        axis.set_xscale("log")
        axis.set_yscale("log")
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter(ticker.FuncFormatter(lambda number, _: f"{number:{'g' if number < 1 else ',.0f'}}"))
        axis.set_title(title, loc="left", fontsize=11, color=_GREY)
        axis.set_xlabel(below, color=_GREY)
        axis.set_ylabel("messages per second", color=_GREY)
        axis.tick_params(which="both", colors=_GREY)
        axis.grid(color=_GREY, alpha=0.25)
        for spine in axis.spines.values():
            spine.set_color(_GREY)
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False, labelcolor=_GREY)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def curve(row: Row) -> tuple[list[float], list[float]]:
    """The megabytes handled, and the messages per second since the point before."""
    points = row.measured.curve
    step = max(1, (len(points) - 1) // _POINTS)
    taken = points[::step] if (len(points) - 1) % step == 0 else [*points[::step], points[-1]]
    pairs = [(before, after) for before, after in pairwise(taken) if after[1] > before[1]]
    megabytes = [after[0] * VALUE_BYTES / 1e6 for _, after in pairs]
    return megabytes, [(after[0] - before[0]) / (after[1] - before[1]) for before, after in pairs]
