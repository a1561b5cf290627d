"""Policies: the options that set the policies of a topic.

Invariant: an option that is not given changes nothing. A policy of several parts, such as retention, keeps its other
parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import click

from ..config.policies import TopicConfig
from ..config.quantities import microseconds
from ..retention import SegmentDecision
from ..topic import Topic
from .arguments import DURATION, NAMES, SIZE, Command, add_options
from .output import age


class _OrNone(click.ParamType[Any]):
    """A value of another type, or `none` for no limit."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self._inner = inner
        self.name = f"{inner.name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "none" else self._inner.convert(value, param, ctx)


class _Policy(NamedTuple):
    option: str
    name: str
    part: str | None  # of a policy of several parts
    type: click.ParamType[Any]
    help: str


_COUNT = click.IntRange(1)
_COUNT.name = "n"
_PART = click.FloatRange(0, 1, max_open=True)
_POLICIES = (
    _Policy("--retention-age", "retention", "age", _OrNone(DURATION), "Drop segments sealed longer ago than this."),
    _Policy("--retention-bytes", "retention", "bytes", _OrNone(SIZE), "Keep at most this much per partition."),
    _Policy("--keep-free", "retention", "keep_free", _PART, "Keep this part of the disk free."),
    _Policy("--hold-for", "retention", "hold_for", NAMES, "Wait for these groups and shares (commas)."),
    _Policy("--hold-age", "retention", "hold_age", _OrNone(DURATION), "Do not wait for them beyond this age."),
    _Policy("--hold-bytes", "retention", "hold_bytes", _OrNone(SIZE), "Nor beyond this much per partition."),
    _Policy("--archive", "retention", "archive", _OrNone(click.STRING), "Drop only what this archive contains."),
    _Policy("--archive-grace", "retention", "archive_grace", DURATION, "And only this long after it was added."),
    _Policy("--flush-records", "flush", "records", _OrNone(_COUNT), "Flush after this many records."),
    _Policy("--flush-interval", "flush", "interval", _OrNone(DURATION), "Flush after this time."),
    _Policy("--flush-bytes", "flush", "bytes", _OrNone(SIZE), "Flush after this many bytes."),
    _Policy("--segment-bytes", "segment_bytes", None, SIZE, "Size of a segment."),
    _Policy("--segment-age", "segment_age", None, _OrNone(DURATION), "Seal a segment at this age."),
    _Policy("--batch-bytes", "batch_bytes", None, SIZE, "Size of a batch."),
    _Policy("--batch-records", "batch_records", None, _COUNT, "Records in a batch."),
    _Policy("--max-record-bytes", "max_record_bytes", None, SIZE, "Refuse larger records."),
    _Policy("--compression", "compression", None, click.Choice(["none", "zlib", "lz4", "zstd"]), "Codec of batches."),
    _Policy("--durability", "durability", None, click.Choice(["disk", "os"]), "The medium that a flush waits for."),
    _Policy("--producer-expiry", "producer_expiry", None, _OrNone(DURATION), "Forget producers silent for longer."),
)


def policy_options(command: Command) -> Command:
    """Add an option for each policy to a command."""
    options = [click.option(each.option, _variable(each), type=each.type, help=each.help) for each in _POLICIES]
    return add_options(*options)(command)


def changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The policies that the options in `given` set. One of which only parts are given is a function of what it is.

    So two commands that change parts of one policy at one time keep both: the function is called under a lock.
    """
    policies: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}  # by policy: some parts need each other
    for each in _POLICIES:
        value = given[_variable(each)]
        if value is None:
            continue
        value = None if value == "none" and each.name != "compression" else value
        if each.part is None:
            policies[each.name] = value
        else:
            parts.setdefault(each.name, {})[each.part] = value
    return policies | {name: partial(replace, **of_one) for name, of_one in parts.items()}


def differences(before: TopicConfig, after: TopicConfig) -> list[str]:
    """A line for each option whose value differs: its name, the value before, and the value after."""
    former = dict(described(before))
    return [f"{name}: {former[name]} -> {value}" for name, value in described(after) if value != former[name]]


def dropped_at_once(topic: Topic, config: TopicConfig) -> list[SegmentDecision]:
    """The segments that retention would drop now by these policies, and keeps by the present ones.

    The topic is open for reading. It explains its retention by `config` from now on.
    """
    due = {each.path for each in topic.retain(dry_run=True) if each.drop}
    topic._retention.assign(config)  # noqa: SLF001
    return [each for each in topic.retain(dry_run=True) if each.drop and each.path not in due]


def described(config: TopicConfig) -> Iterator[tuple[str, str]]:
    """The option of each policy, and its value in the form that the option takes."""
    for each in _POLICIES:
        value = getattr(config, each.name) if each.part is None else getattr(getattr(config, each.name), each.part)
        if each.part == "interval" and value is not None:
            value = timedelta(seconds=value)
        if value is None or value == ():
            text = "none"
        elif isinstance(value, tuple):
            text = ",".join(value)
        elif isinstance(value, timedelta):
            text = age(microseconds(value)).replace(" ", "")
        else:
            text = str(value)
        yield each.option.removeprefix("--"), text


def _variable(policy: _Policy) -> str:
    return policy.option.removeprefix("--").replace("-", "_")
