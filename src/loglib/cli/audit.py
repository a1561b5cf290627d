"""Audit: compare the counts of several places."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from ..audit import TRAIL, Balance, Tally, balance
from .arguments import DIRECTORY, DURATION, as_json
from .ending import DAMAGED
from .output import note, print_each, when


@click.command()
@click.argument("places", type=DIRECTORY, nargs=-1, required=True)
@click.option("--window", type=DURATION, default="10m", show_default=True, help="The time window of the trails.")
@click.option("--grace", type=DURATION, help="Accept records that are late by this time.  [default: one window]")
@click.option("--trail", default=TRAIL, show_default=True, help="The name of the topics that contain the counts.")
@click.option("--all", "show_all", is_flag=True, help="Print all windows, also open ones and those that add up.")
@as_json
def audit(
    places: tuple[str, ...], window: timedelta, grace: timedelta | None, trail: str, show_all: bool, as_json: bool
) -> int:
    """Compare directories of topics by time window: what was produced, copied and consumed.

    The last directory should contain the records of all the others together. With one directory, only its own counts
    are compared. Exit code 1 if a closed window does not add up.
    """
    if not window:
        raise click.UsageError("--window must be longer than 0")
    alone = len(places) == 1
    try:
        sources, destination = (places, None) if alone else (places[:-1], places[-1])
        report = balance(sources, destination, window=window, grace=grace, trail=trail)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    shown = report.balances if show_all else report.differences
    if shown:
        names = ["topic", "window from", "place", "tier", ">expected", ">found", ">missing", "state", "where"]
        print_each(shown, _facts, _row, names, as_json=as_json)
    open_windows = sum(not each.closed for each in report.balances)
    note(f"{len(report.balances)} windows, {open_windows} of them open; {len(report.differences)} do not add up")
    return DAMAGED if report.differences else 0


def _state(balance: Balance) -> str:
    if balance.superseded:
        return "set back"
    return "open" if not balance.closed else "adds up" if balance.adds_up else "differs"


def _row(each: Balance) -> tuple[object, ...]:
    where = ", ".join(f"{number}:[{offsets.start}, {offsets.stop})" for number, offsets in each.offsets)
    return (
        each.topic, when(each.window_us), each.place, each.tier, each.expected.records, each.found.records,
        each.missing, _state(each), where or "-",
    )  # fmt: skip


def _facts(each: Balance) -> dict[str, Any]:
    offsets = [{"partition": number, "offsets": [found.start, found.stop]} for number, found in each.offsets]
    tallies = {"expected": _counts(each.expected), "found": _counts(each.found)}
    return each._asdict() | tallies | {"offsets": offsets, "missing": each.missing, "state": _state(each)}


def _counts(tally: Tally) -> dict[str, Any]:
    """The facts of a tally, with the digest as text: many JSON parsers round numbers of that size."""
    return tally._asdict() | {"digest": f"{tally.digest:032x}"}
