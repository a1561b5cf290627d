"""Shares as tests look at them: topics with records, and what a share says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from loglib import Job, Share, Topic
from loglib.jobs import SharePartition

RECORDS = 10


def with_records(open_topic: Callable[..., Topic], count: int = RECORDS, **arguments: Any) -> Topic:
    """A topic with the records 0 to count - 1, in batches of three."""
    topic = open_topic(**arguments)
    for first in range(0, count, 3):
        topic.append_many([b"%d" % number for number in range(first, min(first + 3, count))], partition=0)
    topic.flush()
    return topic


def values(share: Share, timeout: float = 0.0) -> list[bytes]:
    """The values that a loop gets, and accepts. A record without a value counts as an empty one."""
    return [job.value or b"" for job in share.follow(timeout)]


def taken(share: Share, count: int) -> list[Job]:
    """That many jobs, which stay in hand."""
    found = [share.take(0.0) for _ in range(count)]
    assert None not in found, "there are fewer"
    return [job for job in found if job is not None]


def only(topic: Topic, name: str = "mail") -> SharePartition:
    """The share in partition 0."""
    return topic.share_info(name).partitions[0]


def acks_of(topic: Topic, name: str = "mail", partition: int = 0) -> Path:
    """The newest file of a share."""
    return max((Path(topic.path) / "shares" / name / f"{partition:04d}").glob("*.acks"))


def die(share: Share) -> None:
    """End the member as its death would: the system closes its file, and nothing is written."""
    share._left = True
    share._file.abandon()
    share._observer.close()


def ignoring(*errors: type[BaseException]) -> Any:
    return suppress(*errors)


def counted(values: Iterator[Any]) -> int:
    return sum(1 for _ in values)
