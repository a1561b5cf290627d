"""Care: check everything, and repair damage, alone or from copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from ..copies.healing import HealReport
from ..copies.healing import heal as heal_from
from ..copies.scrub import Scrub
from ..errors import LockedError
from ..format.display import counted
from ..log.repair import RepairReport
from ..log.verify import VerifyReport
from ..system.files import REAL
from ..topic import Topic
from ..transactions.repair_store import is_store, verify_store
from ..transactions.repair_store import repair as repair_path
from .arguments import DIRECTORY, MENDABLE, as_json, confirmed, dry_run, rate_option, stores_of, topic_paths, yes
from .ending import DAMAGED, each_of
from .output import bar, listed_facts, note, print_json, refused, sized


@click.command()
@click.argument("topics", type=DIRECTORY, nargs=-1, required=True)
@as_json
def verify(topics: tuple[str, ...], as_json: bool) -> int:
    """Read and check all of a topic: every header, batch and link. Exit code 1 if anything is damaged or missing.

    It changes nothing, and may run beside a writer. Gaps that a repair has declared count as missing, until
    `loglib repair --accept` accepts their loss. The store of transactions, `.transactions`, is checked with the topics
    of its directory, or alone.
    """
    stores = [each for one in topics for each in stores_of(one)]
    paths = [each for one in topics if not is_store(REAL, one) for each in topic_paths(one)]

    def look(path: str) -> int:
        return (_verify_store if path in stores else _verify_topic)(path, as_json=as_json)

    return each_of([*stores, *paths], look)


def _verify_store(path: str, *, as_json: bool) -> int:
    report = verify_store(REAL, path)
    if as_json:
        print_json({"store": path, **_verified_facts(report)})
    else:
        click.echo(f"{path}: a store of transactions: {len(report.damage) or 'no'} damage")
        _print_lines(report.damage)
    return DAMAGED if report.damage else 0


def _verify_topic(path: str, *, as_json: bool) -> int:
    with Topic.open(path, mode="r") as topic, bar(path) as progress:
        report = topic.verify(progress=progress)
    if as_json:
        print_json({"topic": path, **_verified_facts(report)})
    else:
        _print_verified(path, report)
    return 0 if report.is_whole else DAMAGED


def _print_verified(path: str, report: VerifyReport) -> None:
    whole = f"{counted(report.records, 'record')} in {counted(report.batches, 'batch')}, {sized(report.bytes)}"
    gaps = f", {counted(len(report.gaps), 'declared gap')}" if report.gaps else ""
    gaps += f" ({len(report.accepted)} accepted)" if report.accepted else ""
    click.echo(f"{path}: {whole} in {counted(report.segments, 'segment')}: {len(report.damage) or 'no'} damage{gaps}")
    _print_lines((*report.damage, *report.gaps))


def _print_lines(found: Iterable[object]) -> None:
    for each in found:
        click.echo(f"  {each}")


def _verified_facts(report: VerifyReport) -> dict[str, Any]:
    lists = {name: listed_facts(getattr(report, name)) for name in ("damage", "gaps", "accepted")}
    return report._asdict() | lists


@click.command()
@click.argument("topic", type=MENDABLE)
@click.option("--accept", is_flag=True, help="Also accept the loss of all gaps: they are listed, and end `verify`, "
              "`scrub` and `heal` with exit code 0 from now on.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only print what would be done. Exit code 1 if anything is to be done.")
@yes
@as_json
def repair(topic: str, accept: bool, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Repair a damaged topic, so that it opens and is read past the damage. TOPIC may be a store of transactions.

    What cannot be read is declared as a gap: readers skip it and report it. Damaged bytes stay, and bytes that must be
    overwritten or cut are copied first. Stop the topic's writer before, unless only sealed segments are damaged; else
    its partitions are left out, with exit code 3.
    """
    report, held = _repaired(topic, dry_run=dry_run or not yes, accept=accept)
    if report.repairs and not dry_run and not yes:
        lost = f"declare {sized(report.lost_bytes)} as lost" if report.lost_bytes else "lose nothing"
        if not as_json:
            _print_all(topic, report.repairs, "repair")
        confirmed(f"Do these {len(report.repairs)} repairs of {topic}, and {lost}?", yes=False)
        report, held = _repaired(topic, dry_run=False, accept=accept)
    if as_json:
        verified = _verified_facts(report.verified)
        print_json({"topic": topic, "repairs": listed_facts(report.repairs), "verified": verified})
    else:
        _print_all(topic, report.repairs, "repair")
    if dry_run and report.repairs:
        note("nothing was changed")
    left = report.repairs if dry_run else report.verified.damage
    return refused(topic, held) or (DAMAGED if left else 0)


def _repaired(topic: str, *, dry_run: bool, accept: bool) -> tuple[RepairReport, dict[int, str]]:
    """Repair a topic. Returns the report, and who holds the partitions that could not be repaired, by number."""
    try:
        with bar(topic) as progress:
            return repair_path(topic, dry_run=dry_run, accept=accept, progress=progress), {}
    except LockedError as error:
        facts = vars(error)
        if "report" not in facts:  # the whole topic, or its store
            raise
        return facts["report"], facts["holders"]


def _print_all(path: str, done: Iterable[object], verb: str) -> None:
    """Print what was done to a topic, a line for each."""
    lines = list(map(str, done)) or [f"{path}: nothing to {verb}"]
    click.echo("\n".join(lines))


@click.command()
@click.argument("topic", type=MENDABLE)
@click.option("--from", "donors", type=DIRECTORY, multiple=True, required=True, help="Another copy; may be repeated.")
@dry_run
@as_json
def heal(topic: str, donors: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Replace damaged bytes of a topic with those of other copies: mirrors, snapshots, backups.

    Only bytes that the topic itself proves to be right are taken, so an old copy, or one of another history, does no
    harm. Beside the topic's writer only sealed segments are healed. Exit code 1 if any damage stays.
    """
    with bar(topic) as progress:
        report = heal_from(topic, donors, dry_run=dry_run, progress=progress)
    if as_json:
        print_json({"topic": topic, **_healed_facts(report)})
    else:
        _print_all(topic, (*report.healed, *report.unhealed), "heal")
    if dry_run and report.healed:
        note("nothing was changed")
    damaged = bool(report.not_accepted) or not (dry_run or report.verified.is_whole)
    return DAMAGED if damaged else 0


@click.command()
@click.argument("topic", type=MENDABLE)
@rate_option("--rate", help="Read at most this many megabytes per second.")
@click.option("--donor", "donors", type=DIRECTORY, multiple=True, help="Heal from this copy; may be repeated.")
@as_json
def scrub(topic: str, bytes_per_second: float | None, donors: tuple[str, ...], as_json: bool) -> int:
    """Read and check all of a topic at a limited rate, and heal it from other copies. Exit code 1 if damage stays."""
    with Scrub(topic, bytes_per_second=bytes_per_second, donors=donors) as made, bar(topic) as progress:
        report = made.run(progress=progress)
    if as_json:
        healing = None if report.healing is None else _healed_facts(report.healing)
        print_json({"topic": topic, "found": _verified_facts(report.found), "healing": healing})
    else:
        _print_verified(topic, report.found)
        if report.healing is not None:
            _print_all(topic, (*report.healing.healed, *report.healing.unhealed), "heal")
    return 0 if report.is_whole else DAMAGED


def _healed_facts(report: HealReport) -> dict[str, Any]:
    healed, unhealed = listed_facts(report.healed), listed_facts(report.unhealed)
    return {"healed": healed, "unhealed": unhealed, "verified": _verified_facts(report.verified)}
