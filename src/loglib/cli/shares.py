"""Shares: the shares of topics from outside: members, jobs in hand, counts, settings, resets, evictions.

Invariant: looking joins no share and writes nothing. What changes a share asks before.
"""

from __future__ import annotations

from typing import Any

import click

from ..errors import CorruptLogError, GroupBusyError, LogError
from ..format.display import counted
from ..jobs import InHandInfo, Settings, ShareInfo, SharePartition
from ..jobs.directory import changes_of, check_settings, settings_of
from ..log.lag import Lag, total_lag
from ..system.clock import SYSTEM
from ..topic import Topic
from .arguments import DIRECTORY, START, TOPIC, as_json, confirmed, dry_run, topic_paths, yes
from .ending import DAMAGED, each_of
from .output import age, note, print_each, print_json, print_table, safe, sized, when


@click.group()
def share() -> None:
    """Look at the shares of topics, by which workers take jobs, and change them.

    `loglib share COMMAND --help` has the options of a command.
    """


def _lag_of(topic: Topic, number: int, each: SharePartition) -> Lag:
    """The lag of a share in a partition: bytes of log that no member has begun, and the age of the next record."""
    partition = topic.partition(number)
    return partition.lag(each.unbegun_from(partition.high_watermark))


def _age_us(since_us: int | None) -> int | None:
    return None if since_us is None else max(0, SYSTEM() - since_us)


# --- ls ----------------------------------------------------------------------------------------------


@share.command("ls")
@click.argument("topic", type=DIRECTORY)
@as_json
def list_shares(topic: str, as_json: bool) -> int:
    """List the shares of a topic, or of all topics in a directory, without joining them.

    FREE records were begun before and come again. LAG is what no member has begun. OLDEST is the age of the oldest
    record that was begun and is not settled. A damaged share is left out, with a message and exit code 1.
    """
    found: list[dict[str, Any]] = []
    code = each_of(topic_paths(topic), lambda path: _add_shares(found, path))
    names = ["topic", "share", ">members", ">in hand", ">free", ">lag", ">lag time", ">oldest", ">accepted", ">failed"]
    if found or as_json:
        print_each(found, dict, _share_row, names, as_json=as_json)
    elif not code:
        note("no shares")
    return code


def _add_shares(found: list[dict[str, Any]], path: str) -> int:
    """Add the shares of a topic. Returns the exit code."""
    code = 0
    with Topic.open(path, mode="r") as topic:
        for name in topic.shares():
            try:
                found.append(_share_facts(topic, topic.share_info(name)))
            except CorruptLogError as error:
                note(f"{topic.name}, share {safe(name)}: {error}")
                code = DAMAGED
    return code


def _share_facts(topic: Topic, info: ShareInfo) -> dict[str, Any]:
    lag = total_lag(_lag_of(topic, number, each) for number, each in info.partitions.items())
    return {
        "topic": topic.name, "share": info.name, "members": sorted(info.members),
        "in_hand": sum(len(each.in_hand) for each in info.partitions.values()),
        "free": sum(each.free for each in info.partitions.values()),
        "waiting": sum(len(each.waiting) for each in info.partitions.values()),
        "lag_bytes": lag.bytes, "lag_seconds": lag.seconds,
        "oldest_us": min((each.oldest for each in info.partitions.values() if each.oldest is not None), default=None),
        "counts": _summed(info),
    }  # fmt: skip


def _summed(info: ShareInfo) -> dict[str, int]:
    """The counts of all partitions together."""
    counts = [each.counts._asdict() for each in info.partitions.values()]
    return {name: sum(each[name] for each in counts) for name in (counts[0] if counts else ())}


def _share_row(facts: dict[str, Any]) -> tuple[object, ...]:
    counts = facts["counts"]
    accepted = counts.get("accepted", 0)
    return (
        facts["topic"], facts["share"], len(facts["members"]), facts["in_hand"], facts["free"],
        sized(facts["lag_bytes"]), age(facts["lag_seconds"] * 1e6), age(_age_us(facts["oldest_us"])),
        accepted, sum(counts.values()) - accepted,
    )  # fmt: skip


# --- info --------------------------------------------------------------------------------------------


@share.command()
@click.argument("topic", type=TOPIC)
@click.argument("name")
@as_json
def info(topic: str, name: str, as_json: bool) -> None:
    """Describe a share: its settings, members, counts by partition, and what is in hand.

    Records from NEXT on were never begun. WAITING are those of FREE that come again later. BLOCKED BY says which
    setting lets no fresh record be begun.
    """
    with Topic.open(topic, mode="r") as opened:
        found = opened.share_info(name)
        lags = {number: _lag_of(opened, number, each) for number, each in found.partitions.items()}
    if as_json:
        print_json(_info_facts(found, lags))
    else:
        _describe(found, lags)


def _info_facts(info: ShareInfo, lags: dict[int, Lag]) -> dict[str, Any]:
    return {
        "share": info.name, "settings": _settings_facts(info.settings),
        "members": [each._asdict() for _, each in sorted(info.members.items())],
        "partitions": [_partition_facts(number, each, lags[number]) for number, each in info.partitions.items()],
    }  # fmt: skip


def _settings_facts(settings: Settings) -> dict[str, Any]:
    """The settings as `Topic.share` takes them: no limit is None."""
    return settings._asdict() | {"max_in_hand": settings.max_in_hand or None}


def _partition_facts(number: int, each: SharePartition, lag: Lag) -> dict[str, Any]:
    return {
        "partition": number, "settled_to": each.settled_to, "next_offset": each.next_offset,
        "in_hand": [_hand_facts(hand) for hand in each.in_hand], "free": each.free, "deferred": each.deferred,
        "waiting": [{"offset": offset, "seconds": wait_s} for offset, wait_s in each.waiting.items()],
        "counts": each.counts._asdict(), "oldest_us": each.oldest, "blocked_by": each.blocked_by or None,
        "lag_bytes": lag.bytes, "lag_seconds": lag.seconds,
    }  # fmt: skip


def _hand_facts(hand: InHandInfo) -> dict[str, Any]:
    return {
        "offset": hand.offset, "attempt": hand.attempt, "member": hand.member or None, "since_us": hand.since,
    }  # fmt: skip


def _describe(info: ShareInfo, lags: dict[int, Lag]) -> None:
    settings = ", ".join(
        f"{name} {'none' if value is None else value}" for name, value in _settings_facts(info.settings).items()
    )
    click.echo(f"share {safe(info.name)}: {counted(len(info.members), 'member')}; {safe(settings)}")
    if info.members:
        click.echo()
        held = [hand.member for each in info.partitions.values() for hand in each.in_hand]
        print_table(["member", ">pid", "host", "since", ">in hand"], [
            (each.name or "(joining)", each.pid, each.host, each.since, held.count(each.name))
            for _, each in sorted(info.members.items())
        ])  # fmt: skip
    click.echo()
    counts = list(_summed(info))
    names = [">partition", ">settled to", ">next", ">lag", ">in hand", ">free", ">waiting", ">deferred",
             ">oldest", *(f">{each}" for each in counts), "blocked by"]  # fmt: skip
    print_table(names, [
        (number, each.settled_to, each.next_offset, sized(lags[number].bytes), len(each.in_hand), each.free,
         len(each.waiting), each.deferred, age(_age_us(each.oldest)), *each.counts, each.blocked_by or "-")
        for number, each in info.partitions.items()
    ])  # fmt: skip
    hands = [(number, hand) for number, each in info.partitions.items() for hand in each.in_hand]
    if hands:
        click.echo()
        print_table([">partition", ">offset", ">attempt", "member", "since"], [
            (number, hand.offset, hand.attempt, hand.member or "(dead)", when(hand.since)) for number, hand in hands
        ])  # fmt: skip


# --- changes -----------------------------------------------------------------------------------------


@share.command()
@click.argument("topic", type=TOPIC)
@click.argument("name")
@click.option("--to", "start", type=START, required=True, help="begin, end, a time, an age, or PARTITION:OFFSET.")
@dry_run
@yes
@as_json
def reset(topic: str, name: str, start: Any, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Let a share that has no members begin again at a start.

    All records from there on come again, with their first attempt; none before it does. PARTITION:OFFSET resets one
    partition.
    """
    with Topic.open(topic, mode="r") as opened:
        found = opened.share_info(name)
        _check_no_members(found)
        after = _starts(opened, start)
        if not dry_run:
            confirmed(f"Let {name} begin again in {counted(len(after), 'partition')} of {topic}?", yes=yes)
            after = opened.reset_share(name, start)
    facts = [
        {"partition": number, "before": found.partitions[number].settled_to if number in found.partitions else None,
         "after": offset, "done": not dry_run}
        for number, offset in sorted(after.items())
    ]  # fmt: skip
    print_each(facts, dict, _move_row, [">partition", ">before", ">after"], as_json=as_json)
    if not as_json:
        note("nothing was changed" if dry_run else f"reset {name}")


def _starts(topic: Topic, start: Any) -> dict[int, int]:
    """Where a reset would let each of the partitions begin."""
    with topic.read(start) as reader:
        found = reader.tell()
    return {number: found[number] for number in (start if isinstance(start, dict) else found)}


def _check_no_members(info: ShareInfo) -> None:
    if info.members:
        raise GroupBusyError(info.name, sorted(info.members), "share")


def _move_row(facts: dict[str, Any]) -> tuple[object, ...]:
    return facts["partition"], "-" if facts["before"] is None else facts["before"], facts["after"]


@share.command()
@click.argument("topic", type=TOPIC)
@click.argument("name")
@click.argument("member")
@dry_run
@yes
@as_json
def evict(topic: str, name: str, member: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Take its jobs away from a member of a share that hangs. The others handle them again, and the attempts count.

    `loglib share info` shows which member has which record in hand. The evicted member gets an error when it settles,
    or asks for a job.
    """
    with Topic.open(topic, mode="r") as opened:
        info = opened.share_info(name)
        if member not in info.members:
            members = ", ".join(sorted(info.members)) or "none"
            raise LogError(f"share {name} has no member {member}; its members: {members}")
        taken = {number: _held_by(member, each) for number, each in info.partitions.items()}
        count = sum(map(len, taken.values()))
        if not dry_run:
            confirmed(f"Evict {member}, which has {counted(count, 'record')} of {topic} in hand?", yes=yes)
            taken = opened.evict_share_member(name, member)
    facts = [
        {"partition": number, "offset": offset, "done": not dry_run}
        for number, offsets in sorted(taken.items()) for offset in offsets
    ]  # fmt: skip
    print_each(facts, dict, lambda each: (each["partition"], each["offset"]), [">partition", ">offset"],
               as_json=as_json)  # fmt: skip
    if not as_json:
        note("nothing was changed" if dry_run else f"evicted {member}")


def _held_by(member: str, each: SharePartition) -> list[int]:
    return [hand.offset for hand in each.in_hand if hand.member == member]


@share.command()
@click.argument("topic", type=TOPIC)
@click.argument("name")
@click.option("--max-attempts", type=click.IntRange(1, 65_535), metavar="N", help="Starts of a handler for a record.")
@click.option("--window", type=click.IntRange(1, 1_000_000), metavar="N",
              help="Records of a partition that may be begun and not settled.")  # fmt: skip
@click.option("--max-in-hand", type=click.IntRange(0, 1 << 32), metavar="N",
              help="Records of a partition that may be in hand; 0: any number.")  # fmt: skip
@click.option("--dead-letter", metavar="PATH", help="The topic for records that no worker can handle; '' for none.")
@dry_run
@as_json
def alter(topic: str, name: str, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Change settings of a share, also while it has members: they use the new ones immediately."""
    if all(value is None for value in given.values()):
        raise click.UsageError("give what to change, such as --max-attempts 10")
    with Topic.open(topic, mode="r") as opened:
        before = opened.share_info(name).settings
        if dry_run:
            changed = changes_of(given)
            check_settings(changed, opened.path)
            after = settings_of(changed, before)
        else:
            after = opened.alter_share(name, **given)
    stored = _settings_facts(after)
    facts = [
        {"setting": key, "before": value, "after": stored[key], "done": not dry_run}
        for key, value in _settings_facts(before).items() if value != stored[key]
    ]  # fmt: skip
    print_each(facts, dict, _setting_row, ["setting", ">before", ">after"], as_json=as_json)
    if not as_json:
        note("nothing was changed" if dry_run or not facts else f"changed {name}")


def _setting_row(facts: dict[str, Any]) -> tuple[object, ...]:
    return facts["setting"], *("none" if facts[each] is None else facts[each] for each in ("before", "after"))


@share.command()
@click.argument("topic", type=TOPIC)
@click.argument("name")
@dry_run
@yes
def delete(topic: str, name: str, dry_run: bool, yes: bool) -> None:
    """Delete a share that has no members, with all that it knows of its records. The records stay in the topic."""
    with Topic.open(topic, mode="r") as opened:
        what = f"share {name} of {topic}, {_unsettled(opened, name)}"
        if dry_run:
            note(f"would delete {what}")
            return
        confirmed(f"Delete {what}?", yes=yes)
        opened.delete_share(name)
    note(f"deleted share {name}")


def _unsettled(topic: Topic, name: str) -> str:
    """The loss that a person confirms, as text. `GroupBusyError` if the share has members."""
    try:
        info = topic.share_info(name)
    except CorruptLogError as error:
        return f"which is damaged: {error}"
    _check_no_members(info)
    unsettled = sum(len(each.in_hand) + each.free for each in info.partitions.values())
    return f"with {counted(unsettled, 'record')} begun and not settled"
