"""Topics: create, list, describe, change, rename and delete them."""

from __future__ import annotations

import os
from typing import Any

import click

from ..config.arguments import check_names
from ..config.policies import TopicConfig
from ..errors import LogError
from ..format.display import counted
from ..groups.several_topics import topics
from ..jobs.administration import check_no_readers
from ..log import catalog, topic_file
from ..log.catalog import TopicInfo
from ..partition import Partition
from ..system.files import REAL
from ..topic import Topic
from .arguments import DIRECTORY, EXISTING, TOPIC, as_json, confirm_limits, confirmed, dry_run, topic_paths, yes
from .ending import each_of
from .output import note, print_each, print_json, print_table, safe, sized, when
from .policies import changes, described, differences, dropped_at_once, policy_options


@click.command()
@click.argument("topic", type=DIRECTORY)
@click.option("--partitions", type=click.IntRange(1, 10_000), metavar="N", default=1, show_default=True,
              help="Number of partitions.")
@click.option("--partitioner", type=click.Choice(["crc32", "murmur2"]), help="Hash that gives the partition of a key.")
@click.option("--permissions", metavar="OCTAL", help="The mode of the files.  [default: 600]")
@policy_options
@yes
def create(
    topic: str, partitions: int, partitioner: Any, permissions: str | None, yes: bool, **given: Any
) -> None:  # fmt: skip
    """Create a topic."""
    policies = TopicConfig().resolved(changes(given))
    if topic_file.exists(REAL, topic):
        raise click.UsageError(f"{topic} is a topic already; `loglib alter` changes its policies")
    if permissions is not None:
        try:
            policies["permissions"] = int(permissions, 8)
        except ValueError:
            raise click.BadParameter(f"{permissions!r} is not an octal number such as 640") from None
    confirm_limits(policies, yes=yes)
    # Shared: no partition is opened, so that any number of them needs few descriptors.
    Topic.open(topic, create=True, shared=True, partitions=partitions, partitioner=partitioner, **policies).close()
    note(f"created {topic}")


@click.command()
@click.argument("directory", type=EXISTING, default=".")
@as_json
def ls(directory: str, as_json: bool) -> None:
    """List the topics in a directory, or the segments of one topic."""
    if topic_file.exists(REAL, directory):
        _list_segments(directory, as_json=as_json)
        return
    found = topics(directory)
    if found or as_json:
        print_each(found, _topic_facts, _topic_row, ["topic", ">partitions", ">size", "groups"], as_json=as_json)
    else:
        note(f"no topics in {directory}")


def _topic_facts(each: TopicInfo) -> dict[str, Any]:
    partitions = None if each.config is None else each.config.partitions
    error = None if each.error is None else str(each.error)
    facts = {"config": None, "partitions": partitions, "error": error, "size_bytes": _listed_bytes(each)}
    return each._asdict() | facts


def _topic_row(each: TopicInfo) -> tuple[object, ...]:
    groups = ", ".join(each.groups) or "-" if each.error is None else str(each.error)
    return each.name, "?" if each.config is None else each.config.partitions, sized(_listed_bytes(each)), groups


def log_bytes(topic: Topic) -> int:
    """The size of a topic, by all commands: the bytes of log that readers see. `loglib du` has those of the files."""
    return sum(each.high_watermark - each.log_start_offset for each in topic.partitions)


def _listed_bytes(each: TopicInfo) -> int:
    """The size of a listed topic. If it cannot be opened, that of its files."""
    if each.error is not None:
        return each.size_bytes
    try:
        with Topic.open(each.path, mode="r") as topic:
            return log_bytes(topic)
    except (LogError, OSError):  # damaged, or just deleted
        return each.size_bytes


def _list_segments(path: str, *, as_json: bool) -> None:
    with Topic.open(path, mode="r") as topic:
        found = [
            {"partition": each.id, **segment._asdict(), "size_bytes": segment.size_bytes}
            for each in topic.partitions for segment in each.segments
        ]  # fmt: skip
    print_each(found, dict, _segment_row, [">partition", ">from", ">to", ">size", "created", "last append"],
               as_json=as_json)  # fmt: skip


def _segment_row(facts: dict[str, Any]) -> tuple[object, ...]:
    last = when(facts["last_append_time"]) if facts["sealed"] else "open"
    size, created = sized(facts["size_bytes"]), when(facts["created"])
    return facts["partition"], facts["base_offset"], facts["end_offset"], size, created, last


@click.command()
@click.argument("topic", type=DIRECTORY)
@as_json
def info(topic: str, as_json: bool) -> int:
    """Describe a topic: its policies, partitions, times, groups and shares. A directory: each of its topics."""
    paths = topic_paths(topic)

    def look(path: str) -> int:
        with Topic.open(path, mode="r") as opened:
            if as_json:
                print_json(_facts(opened))
            else:
                if path != paths[0]:
                    click.echo()
                _describe(opened)
        return 0

    return each_of(paths, look)


def _facts(topic: Topic) -> dict[str, Any]:
    return {
        "name": topic.name, "path": topic.path, "log_id": topic.log_id.hex(), "policies": topic.config.to_json(),
        "groups": topic.groups(), "shares": topic.shares(), "size_bytes": log_bytes(topic),
        "partitions": [_partition_facts(each) for each in topic.partitions],
    }  # fmt: skip


def _partition_facts(partition: Partition) -> dict[str, Any]:
    start, end, segments = partition.log_start_offset, partition.high_watermark, partition.segments
    return {
        "partition": partition.id, "log_start_offset": start, "high_watermark": end, "size_bytes": end - start,
        "segments": len(segments), "oldest_us": segments[0].created if segments and end > start else None,
    }  # fmt: skip


def _describe(topic: Topic) -> None:
    facts = _facts(topic)
    size = sized(facts["size_bytes"])
    click.echo(f"{safe(topic.name)}: {size} in {counted(len(topic.partitions), 'partition')}, at {safe(topic.path)}")
    groups, shares = (safe(", ".join(facts[each]) or "none") for each in ("groups", "shares"))
    click.echo(f"log id {facts['log_id']}, groups: {groups}, shares: {shares}")
    click.echo(f"partitioner {topic.config.partitioner}, permissions {topic.config.permissions:o}")
    click.echo("policies (* is not the default):")
    default = dict(described(TopicConfig()))
    for option, value in described(topic.config):
        click.echo(f"  {' ' if value == default[option] else '*'} {option:18} {value}")
    rows = [
        (each["partition"], each["log_start_offset"], each["high_watermark"], sized(each["size_bytes"]),
         each["segments"], when(each["oldest_us"]))
        for each in facts["partitions"]
    ]  # fmt: skip
    print_table([">partition", ">from", ">to", ">size", ">segments", "oldest segment created"], rows)


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("--add-partitions", type=click.IntRange(1, 10_000), metavar="N", help="Have N partitions in total.")
@policy_options
@dry_run
@yes
def alter(topic: str, add_partitions: int | None, dry_run: bool, yes: bool, **given: Any) -> None:
    """Change policies of a topic, also while a service writes it.

    The service uses the new policies within a second, and keeps them when it starts again. If it then drops segments
    immediately, this command asks before. Partitions can only be added while nobody writes the topic; some keys then
    belong to other partitions.
    """
    if not any(each is not None for each in (add_partitions, *given.values())):
        raise click.UsageError("give what to change, such as --retention-age 14d")
    with Topic.open(topic, mode="r") as opened:
        config = opened.config
        policies = config.resolved(changes(given))
        wanted = config.changed(policies)
        loss = _loss(opened, wanted) if wanted.retention != config.retention else ""
    lines = differences(config, wanted)
    if add_partitions is not None:
        try:
            catalog.check_more(topic, add_partitions, config)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        lines.append(f"partitions: {config.partitions} -> {add_partitions}")
    if dry_run:
        note("\n".join([*lines, *([loss] if loss else []), f"{topic} was not changed"]))
        return
    if loss:
        confirmed(f"Change {topic}? {loss}.", yes=yes)
    else:
        confirm_limits(policies, yes=yes)
    if add_partitions is not None:  # first: it is refused while somebody writes the topic
        Topic.add_partitions(topic, add_partitions)
    if policies:
        with Topic.open(topic, shared=True) as opened:
            opened.alter(**changes(given))
    note("\n".join([*lines, f"changed {topic}"]))


def _loss(topic: Topic, config: TopicConfig) -> str:
    """A sentence that says what the topic's retention drops immediately by these policies; "" for nothing."""
    try:
        dropped = dropped_at_once(topic, config)
    except (LogError, OSError) as error:  # a damaged topic has policies, too
        return f"What the new policies drop immediately is not known: {error}"
    total = sized(sum(each.size_bytes for each in dropped))
    return f"The new policies drop {counted(len(dropped), 'segment')} immediately, {total}" if dropped else ""


@click.command()
@click.argument("topic", type=TOPIC)
@dry_run
@yes
def delete(topic: str, dry_run: bool, yes: bool) -> None:
    """Delete a topic with all its records, groups and shares."""
    with Topic.open(topic, mode="r") as opened:
        groups, shares = (", ".join(each) or "none" for each in (opened.groups(), opened.shares()))
        size, count = sized(log_bytes(opened)), len(opened.partitions)
        what = f"{topic}: {size} in {counted(count, 'partition')}, groups: {groups}, shares: {shares}"
    if dry_run:
        note(f"would delete {what}")
        return
    confirmed(f"Delete {what}?", yes=yes)
    Topic.delete(topic)
    note(f"deleted {topic}")


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("name")
def rename(topic: str, name: str) -> None:
    """Give a topic another name in its directory. Its records, groups and transactions stay with it.

    NAME is the new name, or the path with the new name. Nobody may write the topic, and no member of a group or a
    share may read it. What names the topic by its path (services, mirrors, archives) must be told the new one.
    """
    name = name.rstrip(os.sep) or name
    parent, last = os.path.split(os.path.abspath(name) if os.sep in name else name)
    if parent not in ("", os.path.dirname(os.path.abspath(topic))):
        raise click.UsageError(f"{name} is in another directory; NAME is the new name in the topic's directory")
    try:
        check_names(last)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    path = catalog.rename(topic, last, check_unused=check_no_readers)
    note(f"renamed {topic} to {path}")
