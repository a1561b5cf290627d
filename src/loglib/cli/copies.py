"""Copies: snapshots of a topic."""

from __future__ import annotations

import click

from ..replication.promotion import promote as make_leader
from ..replication.snapshot import snapshot as take_snapshot
from .given import DIRECTORY, TOPIC, as_json
from .shown import note, print_json, sized

__all__ = ["promote", "snapshot"]


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("to", type=DIRECTORY)
@click.option("--no-links", is_flag=True, help="Copy all bytes: no file of the copy is a file of the topic.")
@as_json
def snapshot(topic: str, to: str, no_links: bool, as_json: bool) -> None:
    """Copy a topic to a new directory, also while it is being written.

    The copy has what was flushed at one moment, with the groups and their commits.
    """
    made = take_snapshot(topic, to, links=not no_links)
    if as_json:
        print_json(made._asdict())
        return
    sizes = f"{sized(made.size_bytes)} in {len(made.ends)} partitions, {sized(made.copied_bytes)} copied"
    click.echo(f"{made.path}: {sizes}")
    if not made.at_once:
        note("the partitions are from moments that follow each other: none at which all stood still was found")


@click.command()
@click.argument("copy", type=TOPIC)
def promote(copy: str) -> None:
    """Make a snapshot a topic of its own, which can be written.

    The topic that it was copied from stays what it is: stop its writers first if this one takes its place.
    """
    make_leader(copy)
