"""Copies: snapshots and mirrors of a topic."""

from __future__ import annotations

from typing import Literal

import click

from ..copies.mirror import Mirror, Mirrored
from ..copies.promote import promote as make_leader
from ..copies.snapshot import snapshot as take_snapshot
from .arguments import DIRECTORY, TOPIC, as_json
from .output import note, print_json, sized

__all__ = ["mirror", "promote", "show", "snapshot"]


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
@click.argument("topic", type=TOPIC)
@click.argument("to", type=DIRECTORY)
@click.option("--follow", is_flag=True, help="Go on, and keep the copy up to the topic, until Ctrl-C.")
@click.option("--restart", is_flag=True, help="Begin anew if retention has dropped what the copy does not have yet.")
@click.option("--demote", is_flag=True, help="Let a topic that a forced promotion has split from this one follow it.")
@click.option("--limit", type=float, metavar="MB/S", help="Copy at most so many megabytes a second.")
@as_json
def mirror(topic: str, to: str, follow: bool, restart: bool, demote: bool, limit: float | None, as_json: bool) -> None:
    """Copy a topic, or bring an earlier copy up to it: the same bytes at the same offsets, and the groups' commits.

    Damage is not copied: it stops the mirror. `loglib promote` lets the copy take the topic's place.
    """
    speed = None if limit is None else limit * 1e6
    on_gap: Literal["error", "restart"] = "restart" if restart else "error"
    with Mirror(topic, to, on_gap=on_gap, bytes_per_second=speed, demote=demote) as made:
        try:
            made.copy()
            if follow:
                note(f"{to}: up to {topic}; following")
                made.follow()
        except KeyboardInterrupt:
            if not follow:
                raise
        report = made.report()
    show(report, as_json=as_json)


def show(report: Mirrored, *, as_json: bool, to_stderr: bool = False) -> None:
    """Print what a mirror has done."""
    if as_json and not to_stderr:
        print_json(report._asdict())
        return
    click.echo(f"{report.path}: {sized(sum(report.ends))} in {len(report.ends)} partitions, "
               f"{sized(report.copied_bytes)} copied", err=to_stderr)  # fmt: skip
    for each in report.set_aside:
        note(f"the topic does not have what is now in {each}")


@click.command()
@click.argument("copy", type=TOPIC)
@click.option("--force", is_flag=True, help="Also if the source of a mirror cannot be reached, or is being written.")
def promote(copy: str, force: bool) -> None:
    """Make a copy a topic of its own, which can be written.

    A mirror takes the place of its source, which is not written any more. The topic that a snapshot was copied from
    stays what it is: stop its writers first if the copy takes its place.
    """
    make_leader(copy, force=force)
