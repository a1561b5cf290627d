"""Healing: damage of a topic is found, and repaired from other copies of it."""

from __future__ import annotations

from typing import Any

import click

from ..copies.heal import HealReport
from ..copies.heal import heal as heal_from
from ..copies.scrub import Scrub
from .arguments import DIRECTORY, as_json
from .bar import bar
from .care import facts_of, print_report
from .output import note, print_json

__all__ = ["heal", "scrub"]

_DAMAGED = 1


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.option("--from", "donors", type=DIRECTORY, multiple=True, required=True, help="Another copy; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@as_json
def heal(topic: str, donors: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Replace damaged bytes of a topic by those of other copies: mirrors, snapshots, backups. Exit code 1 if any stay.

    Only what the topic itself proves to be the same is taken, so an old copy, or one of another history, does no harm.
    Beside the topic's writer only sealed segments are healed.
    """
    with bar(topic) as progress:
        report = heal_from(topic, donors, dry_run=dry_run, progress=progress)
    if as_json:
        print_json({"topic": topic, **_facts(report)})
    else:
        _print(topic, report)
    if dry_run and report.healed:
        note("nothing was changed")
    damaged = report.unhealed if dry_run else report.unhealed or report.verified.damage or report.verified.gaps
    return _DAMAGED if damaged else 0


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.option("--rate", type=float, metavar="MB/S", help="Read at most so many megabytes a second.")
@click.option("--donor", "donors", type=DIRECTORY, multiple=True, help="Heal from this copy; may be repeated.")
@as_json
def scrub(topic: str, rate: float | None, donors: tuple[str, ...], as_json: bool) -> int:
    """Read and check all of a topic at a limited rate, and heal it from other copies. Exit code 1 if damage stays."""
    with Scrub(topic, bytes_per_second=None if rate is None else rate * 1e6, donors=donors) as made:
        report = made.run()
    if as_json:
        healing = None if report.healing is None else _facts(report.healing)
        print_json({"topic": topic, "found": facts_of(report.found), "healing": healing})
    else:
        print_report(topic, report.found)
        if report.healing is not None:
            _print(topic, report.healing)
    return 0 if report.is_whole else _DAMAGED


def _print(topic: str, report: HealReport) -> None:
    for each in (*report.healed, *report.unhealed):
        click.echo(str(each))
    if not report.healed and not report.unhealed:
        click.echo(f"{topic}: nothing to heal")


def _facts(report: HealReport) -> dict[str, Any]:
    def listed(each: Any) -> dict[str, Any]:
        offsets = [each.offsets.start, each.offsets.stop] if each.offsets else None
        facts: dict[str, Any] = each._asdict() | {"offsets": offsets}
        return facts

    healed, unhealed = list(map(listed, report.healed)), list(map(listed, report.unhealed))
    return {"healed": healed, "unhealed": unhealed, "verified": facts_of(report.verified)}
