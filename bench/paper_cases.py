"""Paper cases: which systems take part, how each sends and takes messages, and how many.

Invariant: the counts are for 10 million messages, and scale with them. A system that is slower gets fewer, so that each
measurement takes about a minute on two busy cores; its table shows how many.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MESSAGES = 10_000_000
_FEWEST = 1000
OURS = "loglib"


@dataclass(frozen=True, slots=True)
class Case:
    """One way of producing, and how many messages; then the ways of consuming them."""

    batch: str
    messages: int
    consumers: tuple[str, ...]

    def scaled(self, messages: int) -> int:
        """How many messages of a run with so many."""
        return max(min(messages, _FEWEST), self.messages * messages // MESSAGES)


@dataclass(frozen=True, slots=True)
class System:
    """A system, what it needs, and what it has promised when a message is acknowledged."""

    name: str
    module: str
    cases: tuple[Case, ...]
    promise: str
    settings: str
    needs: tuple[str, ...] = ()
    client: str = ""
    install: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        """What is not installed, or None."""
        path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
        for name in self.needs:
            if not (Path(name).exists() if name.startswith("/") else shutil.which(name, path=path)):
                return f"{name} is missing: {self.install}"
        if self.client and importlib.util.find_spec(self.client) is None:
            return f"the Python package {self.client} is missing: pip install 'loglib-segments[paper]'"
        return None


_OUR_LABELS = {"records": "iteration", "columns": "columns", "group": "group, columns", "arrow": "Arrow"}
_ALL = ("records", "columns", "group", "arrow")

SYSTEMS = (
    System(
        OURS,
        "paper_loglib",
        (
            Case("1", 200_000, _ALL),
            Case("50", 10_000_000, _ALL),
            Case("stream", 10_000_000, _ALL),
        ),
        "The operating system has the messages: they survive a killed process, not a power cut.",
        '`append` or `append_many`, then `flush()`; `durability="os"`. No server: the producer writes the files.',
        labels=_OUR_LABELS,
    ),
    System(
        "loglib, fdatasync",
        "paper_loglib_disk",
        (
            Case("1", 20_000, ("columns",)),
            Case("50", 500_000, ("columns",)),
            Case("stream", 10_000_000, ("columns",)),
        ),
        "`fdatasync` has returned. They survive a power cut.",
        'The same with `durability="disk"`, the default.',
        labels=_OUR_LABELS,
    ),
    System(
        "Redis Streams",
        "paper_redis",
        (
            Case("1", 200_000, ("log",)),
            Case("50", 1_000_000, ("log", "group")),
            Case("stream", 1_000_000, ("log", "group")),
        ),
        "The server has written them to its append-only file, and syncs that once a second. They survive a killed "
        "server; a power cut costs a second or two.",
        "`appendonly yes`, `appendfsync everysec`; XADD alone, or in pipelines of 50 and 1,000 without MULTI; XREAD, "
        "or XREADGROUP and XACK, with COUNT 1000; redis-py with hiredis.",
        needs=("redis-server",),
        client="redis",
        install="apt-get install redis-server",
        labels={"log": "XREAD", "group": "XREADGROUP, XACK"},
    ),
    System(
        "RabbitMQ",
        "paper_rabbitmq",
        (Case("1", 20_000, ("log",)), Case("50", 100_000, ("log",)), Case("stream", 200_000, ("log",))),
        "The server has synced them, those of some hundred milliseconds together. They survive a power cut.",
        "A durable classic queue, persistent messages, publisher confirms; a prefetch of 1,000, and one "
        "acknowledgement for 500 messages; pika, on its connection with callbacks (batches of 1: on the blocking one).",
        needs=("/usr/lib/rabbitmq/bin/rabbitmq-server", "epmd"),
        client="pika",
        install="apt-get install rabbitmq-server",
        labels={"log": "basic.consume"},
    ),
    System(
        "ActiveMQ",
        "paper_activemq",
        (Case("1", 20_000, ("log",)), Case("50", 40_000, ("log",)), Case("stream", 100_000, ("log",))),
        "The broker has them, and syncs its journal once a second, as the paper had it.",
        "A queue in KahaDB, persistent messages, a receipt for each message (batches of 50: for a transaction); a "
        "prefetch of 1,000, and one acknowledgement for 100 messages; STOMP 1.2 with stomp.py.",
        needs=("java", "/usr/share/activemq/bin/activemq.jar"),
        client="stomp",
        install="apt-get install activemq",
        labels={"log": "SUBSCRIBE"},
    ),
)
