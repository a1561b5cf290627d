"""Consume: a member of a consumer group from the shell.

Invariant: a record is committed after standard output has accepted it, and never before. So a command that is killed,
or whose reader has gone, loses no record: the group's next member prints again what was not committed. A signal ends
the command after the records that it has already asked for, and commits them.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from ..groups.group import POLLED_RECORDS
from ..topic import Topic
from .arguments import START, TOPIC
from .read import form_options, text_form
from .signals import Held


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("-g", "--group", required=True, metavar="NAME", help="The group; it is created if there is none.")
@click.option("--from", "start", type=START, default="begin", show_default=True,
              help="Where a group without commits begins: begin, end, a time, or an age like -15m.")
@click.option("--member", metavar="NAME", help="A name, with which a member gets its partitions back.")
@click.option("-n", "--max", "records", type=click.IntRange(0), metavar="N", help="End after N records.")
@click.option("--timeout", type=float, metavar="SECONDS", help="End after this time without a record. 0 ends when "
              "nothing is left.  [default: wait for more, until Ctrl-C]")
@form_options
def consume(
    topic: str, group: str, start: Any, member: str | None, records: int | None, timeout: float | None, **how: Any
) -> None:
    """Read a topic as a member of a consumer group: print records, and commit them.

    Members of one group share the partitions, also with members in programs. Each record goes to one of them, and a
    group continues where it has ended. A record is committed when its output was accepted. After a kill, the records
    since the last commit are printed again.
    """
    if how["form"] == "parquet":
        raise click.UsageError("--format parquet is for a file, and a group has no end; `loglib cat` writes one")
    if isinstance(start, dict):
        raise click.UsageError("--from is for all partitions; `loglib reset` moves a group to an offset")
    head, line = text_form(**how)
    output = sys.stdout.buffer
    with (
        Topic.open(topic, mode="r") as opened, Held() as held,
        opened.group(group, start=start, member=member, commit="manual") as joined,
    ):  # fmt: skip
        output.write(head)
        left = POLLED_RECORDS if records is None else records
        while left > 0 and held.number is None:
            with held.loose():
                polled = joined.poll(max_records=min(left, POLLED_RECORDS), timeout=timeout)
            for record in polled:
                output.write(line(record))
            output.flush()
            if not polled:
                break
            joined.commit()
            if records is not None:
                left -= len(polled)
    held.raise_recorded()
