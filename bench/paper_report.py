"""Paper report: the tables of docs/guarantees.md.

Invariant: what was measured stands between two marks in the page; the rest of the page is written by hand, and stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from paper_cases import System
from paper_roles import PREFETCH, VALUE_BYTES, WINDOW, Measured
from report import speed, table

_BEGIN, _END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
BATCHES = {"1": "1", "50": "50", "stream": f"stream, {WINDOW:,}"}


@dataclass(slots=True)
class Row:
    """What one role measured, and what the server used for it."""

    system: System
    batch: str
    role: str
    way: str
    measured: Measured
    server_cpu_seconds: float | None = None
    server_peak_bytes: int | None = None
    disk_bytes: int = 0

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.measured.messages / self.measured.seconds

    @property
    def label(self) -> str:
        """Which way it is, in the words of the system."""
        return BATCHES[self.batch] if self.role == "produce" else self.system.labels[self.way]


def section(rows: list[Row], facts: dict[str, str], left_out: list[str]) -> str:
    """The measured part of the page."""
    about = "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    missing = "".join(f"\n**Left out:** {one}\n" for one in left_out)
    return f"{about}\n{missing}\n{_settings(rows)}\n\n{tables(rows)}\n"


def with_section(page: str, measured: str) -> str:
    """The page with another measured part."""
    before, found, behind = page.partition(_BEGIN)
    _, ended, after = behind.partition(_END)
    if not found or not ended:
        raise ValueError(f"the page has no {_BEGIN.strip()} and {_END.strip()}")
    return f"{before}{_BEGIN}\n{measured}\n{_END}{after}"


def tables(rows: list[Row]) -> str:
    """A table of the producers and one of the consumers."""
    return (
        f"**Producers.** Batches of 1 and 50, and a stream with {WINDOW:,} messages on their way.\n\n{_producers(rows)}"
        f"\n\n**Consumers.** A prefetch of {PREFETCH:,} messages where a system has one.\n\n{_consumers(rows)}"
    )


def _settings(rows: list[Row]) -> str:
    """What each system promises, and how it is set up."""
    systems = list({row.system.name: row.system for row in rows}.values())
    head = ["system", "what an acknowledgement promises", "settings"]
    return "**Settings.**\n\n" + table(head, [[each.name, each.promise, each.settings] for each in systems])


def _producers(rows: list[Row]) -> str:
    head = [
        "system", "batch", "messages", "messages/s", "MB/s", "CPU s per million: producer", "server's CPU", "peak MB",
        "server's peak MB", "bytes on disk per message",
    ]  # fmt: skip
    found = [row for row in rows if row.role == "produce"]
    cells = [[*_shared(row), f"{row.disk_bytes / row.measured.messages:,.0f}"] for row in found]
    return table(head, [[row.system.name, row.label, *each] for row, each in zip(found, cells, strict=True)])


def _consumers(rows: list[Row]) -> str:
    head = [
        "system", "reads by", "sent in", "messages", "messages/s", "MB/s", "CPU s per million: consumer",
        "server's CPU", "peak MB", "server's peak MB",
    ]  # fmt: skip
    found = [row for row in rows if row.role == "consume"]
    return table(head, [[row.system.name, row.label, BATCHES[row.batch], *_shared(row)] for row in found])


def _shared(row: Row) -> list[str]:
    """What both tables have."""
    million = row.measured.messages / 1e6
    server_cpu = "" if row.server_cpu_seconds is None else f"{row.server_cpu_seconds / million:,.1f}"
    server_peak = "" if row.server_peak_bytes is None else f"{row.server_peak_bytes / 1e6:,.0f}"
    return [
        f"{row.measured.messages:,}",
        speed(row.rate),
        f"{row.rate * VALUE_BYTES / 1e6:,.1f}",
        f"{row.measured.cpu_seconds / million:,.1f}",
        server_cpu,
        f"{row.measured.peak_bytes / 1e6:,.0f}",
        server_peak,
    ]
