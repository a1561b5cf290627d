"""The chart of the page view example: stacked bars, one colour per page, per minute, hour or day as fits the span."""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")  # draws into files, without a screen
from matplotlib import dates, ticker
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

MINUTE, HOUR, DAY = 60, 3600, 86_400
BINS = {
    "minute": MINUTE,
    "5 minutes": 5 * MINUTE,
    "15 minutes": 15 * MINUTE,
    "hour": HOUR,
    "3 hours": 3 * HOUR,
    "12 hours": 12 * HOUR,
    "day": DAY,
    "week": 7 * DAY,
    "year": 365 * DAY,
}
MOST_BARS = 130  # more bars would be too thin to see
COLOURS = ["#3b6fb6", "#e8833a", "#4f9d69", "#c9504b", "#8a6bb1", "#d9b23d", "#4bb3c4", "#d77fae"]
OTHER_COLOUR = "#d5d8dc"
INK, FAINT = "#2b3036", "#7a828c"


def draw(views: Mapping[tuple[int, str], int], *, pages: list[str], other: str, source: str, to: Path) -> None:
    """Draw views per (minute, page) into a PNG file; `pages`: the counted pages in order, `other`: the rest."""
    minutes = [minute for minute, _ in views]
    first, last = min(minutes), max(minutes)
    label, seconds = next(((n, s) for n, s in BINS.items() if (last - first) / s < MOST_BARS), ("year", 365 * DAY))
    bins = range(first - first % seconds, last + 1, seconds)
    height: Counter[tuple[int, str]] = Counter()
    for (minute, page), count in views.items():
        height[minute - minute % seconds, page] += count

    figure, axes = plt.subplots(figsize=(11, 5.6), dpi=150)
    middles = [dates.date2num(datetime.fromtimestamp(start + seconds / 2, UTC)) for start in bins]
    bottoms = [0] * len(bins)
    for page, colour in zip([*pages, other], [*COLOURS[: len(pages)], OTHER_COLOUR], strict=True):
        heights = [height[start, page] for start in bins]
        total = f"{_shortened(page)}  ({sum(heights):,})"
        axes.bar(middles, heights, bottom=bottoms, width=0.86 * seconds / DAY, color=colour, label=total, linewidth=0)
        bottoms = [low + more for low, more in zip(bottoms, heights, strict=True)]

    _label(axes, title=f"Page views per {label}", subtitle=_subtitle(source, first, last, sum(bottoms)))
    axes.set_ylabel(f"views per {label}", color=FAINT)
    axes.set_xlabel("time of the request (UTC)", color=FAINT)
    handles, names = axes.get_legend_handles_labels()  # reversed below: the legend has the order of the bars
    legend = axes.legend(
        handles[::-1], names[::-1], title="page (views)", loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False,
        fontsize=9, title_fontsize=9, alignment="left", labelcolor=INK, handlelength=1.0, handleheight=1.0,
    )  # fmt: skip
    legend.get_title().set_color(FAINT)
    figure.savefig(to, bbox_inches="tight", pad_inches=0.25, facecolor="white")
    plt.close(figure)


def _label(axes: Axes, *, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=16, fontweight="bold", color=INK, pad=30)
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=10, color=FAINT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#b8bec5")
    axes.tick_params(colors=FAINT, length=0)
    axes.tick_params(axis="x", length=4)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    locator = dates.AutoDateLocator(minticks=4, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, show_offset=False))


def _subtitle(source: str, first: int, last: int, total: int) -> str:
    begin, end = datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(last, UTC)
    return f"{source}: {total:,} views, {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}"


def _shortened(page: str, most: int = 38) -> str:
    page = page.replace("$", r"\$")  # a dollar sign would start a formula
    return page if len(page) <= most else f"{page[: most // 2 - 1]}…{page[-most // 2 :]}"
