"""Check: a topic compared with limits, for cron, Nagios and health probes: one line for each thing that is wrong.

Invariant: a check changes nothing and locks nothing. A fault of one topic, or of one part of it, hides nothing of the
others: each is looked at by itself, and what cannot be looked at is a line, too. A check that says "ok" has looked at
everything that it was asked for.

The exit code is that of the most serious line, and the table is that of all commands (cli/start.py). So it is 0 and 3
as Nagios has them, 1 for all that was found, and 2 for a topic that is not there; docs/monitoring.md says why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import click

from ..append.stats import TopicStats
from ..config.quantities import parse_size
from ..config.uri import is_remote
from ..errors import CorruptLogError, LogError, LogMovedError
from ..log.lag import Lag
from ..metrics.health import copies_of, lost_places_of, rooms_of, writers_of
from ..system.failures import told
from ..topic import Topic
from .arguments import DURATION, SIZE, Parsed, as_json, topic_paths
from .ending import DAMAGED, FAILED, GRAVITY, WRONG
from .output import age, print_json, safe, sized

_COPY_LAG_S = 60.0  # of a copy without --max-lag: one that is left out comes back within seconds, if it can
_AHEAD_S = 60.0  # clocks of two hosts may differ by this without a word


class Finding(NamedTuple):
    """One line of a check of a topic."""

    code: int
    # "damage", "missing", "unknown", "free", "age", "writer", "copy", "lag", "unsettled"; "ok" for a topic without one
    kind: str
    text: str
    facts: dict[str, Any]


class Limits(NamedTuple):
    """The options; None: no such limit."""

    max_lag_s: float | None
    max_lag_bytes: int | None
    groups: tuple[str, ...]  # that are looked at; all if there is none
    seen: set[str]  # the groups that were looked at
    min_free: float | int | None  # a share of the file system if it is a float, bytes if it is an int
    max_age_s: float | None
    writer: bool  # True if each partition must have one
    max_unsettled_s: float | None


def _free(text: str) -> float | int:
    """A share of the file system, or a number of bytes."""
    with suppress(ValueError):
        if text.endswith("%") and 0 <= (share := float(text[:-1]) / 100) <= 1:
            return share
        if not text.isdigit():  # 10 is meant as 10%, and would be ten bytes
            return parse_size(text)
    raise ValueError(f"{text!r} is not a part of a file system; write 10% or 20GiB")


@click.command()
@click.argument("topics", type=click.Path(readable=False), nargs=-1, required=True)
@click.option("--max-lag", type=DURATION, help="The age of the next record of a group, a share or a copy.")
@click.option("--max-lag-bytes", type=SIZE, help="The bytes that a group, or a share, has not begun.")
@click.option("--max-unsettled-age", type=DURATION, help="The time since a share began its oldest unsettled record.")
@click.option("--group", "groups", metavar="NAME", multiple=True,
              help="Look at this group, or share, only; may be repeated.  [default: all]")
@click.option("--min-free", type=Parsed("percent|size", _free), help="The free space of the file system.")
@click.option("--max-age", type=DURATION, help="The age of the newest record: the topic is still written.")
@click.option("--writer", is_flag=True, help="Each partition must be open for writing in some process (Linux).")
@click.option("--quiet", is_flag=True, help="Print nothing for a topic that is as it should be.")
@as_json
def check(
    topics: tuple[str, ...], max_lag: timedelta | None, max_lag_bytes: int | None,
    max_unsettled_age: timedelta | None, groups: tuple[str, ...], min_free: float | int | None,
    max_age: timedelta | None, writer: bool, quiet: bool, as_json: bool,
) -> int:  # fmt: skip
    """Compare topics with limits, for cron, Nagios and health probes: a line for each thing that is wrong.

    Without a limit it looks for damage at the end of each partition, for replicas that are missing or left out, and for
    groups of a log that was set back. It changes and locks nothing. TOPICS are topics, or directories of topics.

    Exit codes: 0 all is well, 1 damage was found or a limit is passed, 2 a topic is not there or the command was
    wrong, 3 something could not be looked at.
    """
    durations = (max_lag, max_age, max_unsettled_age)
    lag_s, age_s, unsettled_s = (None if each is None else each.total_seconds() for each in durations)
    limits = Limits(lag_s, max_lag_bytes, groups, set(), min_free, age_s, writer, unsettled_s)
    found = [(path, each) for given in topics for path in _paths(given) for each in _of_topic(path, limits)]
    missing = [each for each in groups if each not in limits.seen]
    found += [(", ".join(topics), Finding(DAMAGED, "lag", f"there is no group and no share {each}", {"group": each}))
              for each in missing]  # fmt: skip
    # Nagios shows the first line alone.
    found.sort(key=lambda each: GRAVITY.index(each[1].code))
    for where, each in found:
        if each.code or not quiet:
            _print(where, each, as_json=as_json)
    return found[0][1].code if found else 0


def _print(where: str, found: Finding, *, as_json: bool) -> None:
    if as_json:
        print_json({"kind": found.kind, "topic": where, **found.facts, "text": found.text})
    else:
        click.echo(f"{found.kind}: {safe(where)}: {safe(found.text)}")


def _paths(given: str) -> list[str]:
    """The topics at a path. A path without one is a topic that is missing, and stays in the list."""
    try:
        return topic_paths(given)
    except click.UsageError:
        if is_remote(given):
            raise
        return [given]
    except OSError:  # it says why when it is opened
        return [given]


def _of_topic(path: str, limits: Limits) -> list[Finding]:
    """The faults of a topic, or one line that says that it has none.

    A topic that is being deleted, or made again, looks damaged for a moment: what is damaged is looked at twice.
    """
    found = _found(path, limits)
    return _found(path, limits) if any(each.code == DAMAGED for each in found) else found


def _found(path: str, limits: Limits) -> list[Finding]:
    try:
        topic = Topic.open(path, mode="r")
    except (LogError, OSError, ValueError) as error:
        return [_failure(error)]
    with topic:
        try:
            stats = topic.stats()
            found = [_failure(error) for error in stats.damaged]
        except (LogError, OSError) as error:  # lag and age cannot be told; damage and the rest can
            stats, found = None, [_failure(error)]
        looks: list[Callable[[], Iterator[Finding]]] = [
            lambda: _damage(topic), lambda: _copies(topic, limits), lambda: _room(topic, limits),
            lambda: _writers(topic, limits), lambda: _lost_places(topic, limits),
        ]  # fmt: skip
        if stats is not None:
            looks += [
                lambda: _age(topic, stats, limits), lambda: _lag(stats, limits),
                lambda: _shares(stats, limits),
            ]  # fmt: skip
        for look in looks:
            try:
                found += look()
            except (LogError, OSError) as error:
                found.append(_failure(error))
        if stats is not None and not found:
            return [_well(stats)]
        return list({(each.kind, each.text): each for each in found}.values())  # several looks may meet one fault


def _failure(error: Exception) -> Finding:
    """The line for a look that an error has ended."""
    if isinstance(error, CorruptLogError):
        facts = {"path": error.path, "file_position": error.file_position}
        return Finding(DAMAGED, "damage", f"{error}", facts)
    if isinstance(error, FileNotFoundError | NotADirectoryError | LogMovedError):
        return Finding(WRONG, "missing", "no topic is there", {})
    return Finding(FAILED, "unknown", told(error), {})


def _well(stats: TopicStats) -> Finding:
    lags = [each for found in stats.lag.values() for each in found.values()]
    lags += [each.lag for share in stats.shares.values() for each in share.partitions.values()]
    lag_s = max((each.seconds for each in lags), default=0.0)
    newest = "no record" if stats.newest is None else f"newest record {age(_seconds_since(stats.newest) * 1e6)} ago"
    count = len(stats.partitions)
    text = f"{count} partition{'s' * (count != 1)}, {sized(stats.size_bytes)}, {newest}, longest lag {age(lag_s * 1e6)}"
    facts = {
        "partitions": count, "size_bytes": stats.size_bytes, "newest_us": stats.newest,
        "lag_seconds": lag_s,
    }  # fmt: skip
    return Finding(0, "ok", text, facts)


def _seconds_since(time_us: int) -> float:
    return time.time() - time_us / 1e6


# --- the looks ---------------------------------------------------------------------------------------


def _damage(topic: Topic) -> Iterator[Finding]:
    for each in topic.verify(tail_only=True).damage:
        facts = {"partition": each.partition, "path": each.path, "file_position": each.file_position}
        yield Finding(DAMAGED, "damage", str(each), facts)


def _copies(topic: Topic, limits: Limits) -> Iterator[Finding]:
    limit_s = _COPY_LAG_S if limits.max_lag_s is None else limits.max_lag_s
    for each in copies_of(topic):
        facts: dict[str, Any] = {"copy": each.path}
        if each.lag is None:
            yield Finding(DAMAGED, "copy", f"{each.path} is left out: {each.error}", facts)
        elif each.lag.seconds > limit_s:
            text = f"{each.path} {_lagging(each.lag.seconds, limit_s)}; it lacks {sized(each.lag.bytes)}"
            facts |= {"lag_bytes": each.lag.bytes, "lag_seconds": each.lag.seconds, "limit_seconds": limit_s}
            yield Finding(DAMAGED, "copy", text, facts)


def _room(topic: Topic, limits: Limits) -> Iterator[Finding]:
    wanted = limits.min_free
    if wanted is None:
        return
    for path, room in rooms_of(topic).items():
        limit = wanted if isinstance(wanted, int) else math.ceil(wanted * room.total)
        if room.free < limit:
            text = f"{sized(room.free)} of {sized(room.total)} are free for {path}, at least {sized(limit)} are wanted"
            facts = {"path": path, "free_bytes": room.free, "total_bytes": room.total, "limit_bytes": limit}
            yield Finding(DAMAGED, "free", text, facts)


def _writers(topic: Topic, limits: Limits) -> Iterator[Finding]:
    if not limits.writer:
        return
    writers = writers_of(topic)
    if writers is None:
        text = "this system, or this file system, does not show whether a process writes it"
        yield Finding(FAILED, "unknown", text, {})
        return
    for number in sorted(number for number, written in writers.items() if not written):
        text = f"no process has partition {number} open for writing"
        yield Finding(DAMAGED, "writer", text, {"partition": number})


def _age(topic: Topic, stats: TopicStats, limits: Limits) -> Iterator[Finding]:
    """Compare the newest record of all partitions, since records without a key go to one of them for a while."""
    if limits.max_age_s is None:
        return
    limit = limits.max_age_s
    newest, what = stats.newest, "the newest record is"
    if newest is None:  # empty since its open segment was begun: then it was made, or all before it was dropped
        begun = [each.segments[-1].created for each in topic.partitions if each.segments]
        newest, what = max(begun, default=0), "the topic is empty, and its segment is"
    seconds = _seconds_since(newest)
    facts = {"age_seconds": seconds, "limit_seconds": limit}
    if seconds > limit:
        text = f"{what} {age(seconds * 1e6)} old, and at most {age(limit * 1e6)} are allowed"
        yield Finding(DAMAGED, "age", text, facts)
    elif seconds < -_AHEAD_S:  # it would look new for ever
        text = f"{what} dated {age(-seconds * 1e6)} in the future: a clock was wrong, so its age says nothing"
        yield Finding(DAMAGED, "age", text, facts)


def _lost_places(topic: Topic, limits: Limits) -> Iterator[Finding]:
    for each in lost_places_of(topic):
        if not limits.groups or each.group in limits.groups:
            yield Finding(DAMAGED, "lag", str(each), each._asdict())


def _lag(stats: TopicStats, limits: Limits) -> Iterator[Finding]:
    for group in sorted(stats.lag):
        if limits.groups and group not in limits.groups:
            continue
        limits.seen.add(group)
        for number, lag in sorted(stats.lag[group].items()):
            yield from _too_late("group", group, number, lag, limits)


def _too_late(kind: str, name: str, number: int, lag: Lag, limits: Limits) -> Iterator[Finding]:
    """The line for a group, or a share, whose lag is too long in a partition."""
    texts: list[str] = []
    if limits.max_lag_s is not None and lag.seconds > limits.max_lag_s:
        texts.append(_lagging(lag.seconds, limits.max_lag_s))
    if limits.max_lag_bytes is not None and lag.bytes > limits.max_lag_bytes:
        texts.append(f"lags by {sized(lag.bytes)}, and at most {sized(limits.max_lag_bytes)} are allowed")
    if texts:
        facts = {
            kind: name, "partition": number, "lag_seconds": lag.seconds, "lag_bytes": lag.bytes,
            "limit_seconds": limits.max_lag_s, "limit_bytes": limits.max_lag_bytes,
        }  # fmt: skip
        yield Finding(DAMAGED, "lag", f"{kind} {name} in partition {number} {', and '.join(texts)}", facts)


def _shares(stats: TopicStats, limits: Limits) -> Iterator[Finding]:
    for share in sorted(stats.shares):
        if limits.groups and share not in limits.groups:
            continue
        limits.seen.add(share)
        for number, each in sorted(stats.shares[share].partitions.items()):
            yield from _too_late("share", share, number, each.lag, limits)
            limit = limits.max_unsettled_s
            if limit is not None and each.oldest_seconds > limit:
                old, most = age(each.oldest_seconds * 1e6), age(limit * 1e6)
                text = f"a record that share {share} began {old} ago in partition {number} is not settled"
                facts = {
                    "share": share, "partition": number, "age_seconds": each.oldest_seconds, "limit_seconds": limit,
                }  # fmt: skip
                yield Finding(DAMAGED, "unsettled", f"{text}, and at most {most} are allowed", facts)


def _lagging(seconds: float, limit: float) -> str:
    return f"lags by {age(seconds * 1e6)}, and at most {age(limit * 1e6)} are allowed"
