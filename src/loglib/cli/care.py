"""Care: drop what retention says, check everything, and repair what is damaged, alone or from other copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from ..copies.heal import HealReport
from ..copies.heal import heal as heal_from
from ..copies.scrub import Scrub
from ..format.record import Damage
from ..log.repair import RepairReport
from ..log.verify import VerifyReport
from ..system.files import REAL
from ..topic import Topic
from ..transactions.repair_store import is_store, verify_store
from ..transactions.repair_store import repair as repair_path
from .arguments import DIRECTORY, TOPIC, as_json, confirmed, stores_of, topic_paths
from .output import age, bar, note, print_json, print_table, sized

__all__ = ["facts_of", "heal", "print_report", "repair", "retain", "scrub", "verify"]

_DAMAGED = 1


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("--dry-run", is_flag=True, help="Say what would be dropped, and why, and why other segments stay.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def retain(topic: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Drop the segments of a topic that its retention policy does not keep.

    A service that writes the topic does this by itself. Here it is done for partitions that nobody writes.
    """
    with Topic.open(topic, create=False, **({"mode": "r"} if dry_run else {"shared": True})) as opened:
        decisions = opened.retain(dry_run=True)
        dropped = [each for each in decisions if each.drop]
        if not dry_run and dropped:
            total = sized(sum(each.size_bytes for each in dropped))
            confirmed(f"Drop {len(dropped)} segments of {topic}, {total}?", yes=yes)
            decisions = opened.retain()
    if as_json:
        for each in decisions:
            print_json(each._asdict())
        return
    rows = [
        (each.partition, each.base_offset, sized(each.size_bytes), age(each.age_us), "drop" if each.drop else "keep",
         each.reason)
        for each in decisions
    ]  # fmt: skip
    print_table([">partition", ">from", ">size", ">sealed for", "decision", "reason"], rows)
    if dry_run:
        note("nothing was dropped")


@click.command()
@click.argument("topics", type=DIRECTORY, nargs=-1, required=True)
@as_json
def verify(topics: tuple[str, ...], as_json: bool) -> int:
    """Read and check all of a topic: every header, batch and link. Exit code 1 if anything is damaged or missing.

    Changes nothing, and may run beside a writer. Gaps that a repair has declared count as missing. The store of
    transactions, `.transactions`, is checked with the topics of its directory, or alone.
    """
    damaged = False
    for path in [each for one in topics for each in stores_of(one)]:
        report = verify_store(REAL, path)
        damaged |= bool(report.damage)
        if as_json:
            print_json({"store": path, **facts_of(report)})
        else:
            click.echo(f"{path}: a store of transactions: {len(report.damage) or 'no'} damage")
            for each in report.damage:
                click.echo(f"  {each}")
    for path in [each for one in topics if not is_store(REAL, one) for each in topic_paths(one)]:
        with Topic.open(path, mode="r") as topic, bar(path) as progress:
            report = topic.verify(progress=progress)
        damaged |= bool(report.damage or report.gaps)
        if as_json:
            print_json({"topic": path, **facts_of(report)})
        else:
            print_report(path, report)
    return _DAMAGED if damaged else 0


def print_report(path: str, report: VerifyReport) -> None:
    """What was verified, and the damage and gaps, for a person."""
    whole = f"{report.records:,} records in {report.batches:,} batches, {sized(report.bytes)}"
    gaps = f", {len(report.gaps)} declared gap{'s' * (len(report.gaps) > 1)}" if report.gaps else ""
    click.echo(f"{path}: {whole} in {report.segments:,} segments: {len(report.damage) or 'no'} damage{gaps}")
    for each in (*report.damage, *report.gaps):
        click.echo(f"  {each}")


def facts_of(report: VerifyReport) -> dict[str, Any]:
    """The same, for a program."""
    return report._asdict() | {"damage": _listed(report.damage), "gaps": _listed(report.gaps)}


def _listed(found: Iterable[Damage]) -> list[dict[str, Any]]:
    return [each._asdict() | {"offsets": _ends(each.offsets)} for each in found]


def _ends(offsets: range) -> list[int] | None:
    return [offsets.start, offsets.stop] if offsets else None


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.option("--dry-run", is_flag=True, help="Only say what would be done. Exit code 1 if there is anything to do.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def repair(topic: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Make a damaged topic one that opens, and that is read past the damage. Takes a store of transactions, too.

    What cannot be read is declared as a gap: readers pass over it and say so. Damaged bytes stay, and bytes that must
    be overwritten or cut are copied aside first. Stop the topic's writer before, unless only sealed segments are
    damaged.
    """
    with bar(topic) as progress:
        report = repair_path(topic, dry_run=dry_run or not yes, progress=progress)
    if report.repairs and not dry_run and not yes:
        lost = f"declare {sized(report.lost_bytes)} as lost" if report.lost_bytes else "lose nothing"
        if not as_json:
            _print_repairs(topic, report, as_json=False)
        confirmed(f"Do these {len(report.repairs)} repairs of {topic}, and {lost}?", yes=False)
        with bar(topic) as progress:
            report = repair_path(topic, progress=progress)
    _print_repairs(topic, report, as_json=as_json)
    if dry_run and report.repairs:
        note("nothing was changed")
    return _DAMAGED if report.verified.damage else 0


def _print_repairs(path: str, report: RepairReport, *, as_json: bool) -> None:
    if as_json:
        repairs = [each._asdict() | {"offsets": _ends(each.offsets)} for each in report.repairs]
        print_json({"topic": path, "repairs": repairs, "verified": facts_of(report.verified)})
        return
    for each in report.repairs:
        click.echo(str(each))
    if not report.repairs:
        click.echo(f"{path}: nothing to repair")


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
