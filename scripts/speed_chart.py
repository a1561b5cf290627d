"""Draw docs/images/speed.svg, the chart of the landing page, from the figures in bench/RESULTS.md.

`make bench` runs this after the benchmarks. A test compares the file with the figures.

Invariant: text has the colour of the text around the chart, so that it can be read on white and on black.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "RESULTS.md"
CHART = ROOT / "docs" / "images" / "speed.svg"
# The cases, by their heading in RESULTS.md.
CASES = {
    "append_many[200B, batch=10000, no fsync]": "append, 10,000 records per call",
    "append[200B, one a call, sync=True, 16 threads]": "append and fsync each record, 16 threads",
    "read records[200B]": "read records as objects",
}
# The systems, by their row, with their names in the chart.
SYSTEMS = {
    "loglib": "loglib", "sqlite3": "SQLite", "lmdb": "LMDB", "pyarrow IPC": "pyarrow IPC",
    "obvious log": "plain Python log",
}  # fmt: skip
WIDTH, LEFT, BAR, ROW, HEAD = 560, 118, 300, 19, 32


def figures(results: str, case: str) -> list[tuple[str, str]]:
    """Systems and messages per second of a case, as in RESULTS.md."""
    section = results.split(f"### {case}\n", 1)[1].split("\n###", 1)[0]
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", section, re.MULTILINE))
    return [(system, rows[system]) for system in SYSTEMS if system in rows]


def number(text: str) -> float:
    """Messages per second: "10.73 M" or "19,725"."""
    return float(text.removesuffix(" M")) * 1e6 if text.endswith(" M") else float(text.replace(",", ""))


def chart(results: str) -> str:
    """The chart as SVG: a group of bars per case, each as long as its share of the fastest."""
    lines, top = [], 0
    for case, title in CASES.items():
        rows = figures(results, case)
        fastest = max(number(rate) for _, rate in rows)
        lines.append(f'<text x="0" y="{top + 20}" class="head">{title}</text>')
        top += HEAD
        for system, rate in rows:
            width = max(round(BAR * number(rate) / fastest), 1)
            kind = "ours" if system == "loglib" else "other"
            lines += [
                f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end">{SYSTEMS[system]}</text>',
                f'<rect x="{LEFT}" y="{top + 2}" width="{width}" height="14" rx="2" class="{kind}"/>',
                f'<text x="{LEFT + width + 8}" y="{top + 13}">{rate}</text>',
            ]
            top += ROW
        top += 6
    label = "Records per second by system: " + "; ".join(
        f"{title}: " + ", ".join(f"{SYSTEMS[system]} {rate}" for system, rate in figures(results, case))
        for case, title in CASES.items()
    )
    style = (
        ".speed { color: #444c56; max-width: 100% } @media (prefers-color-scheme: dark) { .speed { color: #c9d1d9 } } "
        ".speed text { fill: currentColor } .speed .head { font-weight: 600 } "
        ".speed .ours { fill: #3b82d6 } .speed .other { fill: #8b949e }"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="speed" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" role="img" '
        f'aria-label="{label}" font-family="system-ui, sans-serif" font-size="13">\n<style>{style}</style>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    CHART.write_text(chart(RESULTS.read_text("utf-8")), "utf-8")
