"""Redrive: dead letters go back to the topics that they came from, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..format.display import counted
from ..transactions import redrive as send_back
from .arguments import TOPIC, as_json, dry_run
from .filters import filter_options, split_options
from .output import note, print_each


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("--to", "target", type=TOPIC, help="Send all of them to this topic.")
@filter_options
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Send at most N.")
@dry_run
@as_json
def redrive(topic: str, target: str | None, **options: Any) -> None:
    """Send the records of a topic for dead letters back to the topics and partitions that they came from, each once.

    What the filters leave out may be sent by a later call. The next call continues one that was interrupted or killed.
    """
    filters, how = split_options(options)
    report = send_back(topic, target, where=filters.passes, limit=how["limit"], dry_run=how["dry_run"])
    facts = [{"topic": path, "records": count, "done": not report.dry_run} for path, count in sorted(report.to.items())]
    print_each(facts, dict, _row, ["topic", ">records"], as_json=how["as_json"])
    if not how["as_json"]:
        begin = "would send" if report.dry_run else "sent"
        note(f"{begin} {counted(report.redriven, 'record')}; left out {report.left_out}")


def _row(facts: dict[str, Any]) -> Sequence[object]:
    return facts["topic"], facts["records"]
