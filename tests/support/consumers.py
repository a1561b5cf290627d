"""Members of groups, as the tests move them: reading, looking at each other, dying, and what they have committed."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from loglib import Group, Record, Topic, TopicPartition
from loglib.groups.group import AnyGroup
from loglib.log.cursor import Cursor


def fill(topic: Topic, count: int, *, first: int = 0) -> None:
    for number in range(first, first + count):
        topic.append(b"%d" % number, partition=number % len(topic.partitions))
        topic.flush()


def numbers(records: list[Record] | Iterator[Record]) -> list[int]:
    return [int(record.value or b"-1") for record in records]


def take(group: Group, count: int) -> list[int]:
    """Read records in a loop, and leave it in the body of the last one."""
    taken: list[int] = []
    for record in group.follow(timeout=30):
        taken.append(int(record.value or b"-1"))
        if len(taken) == count:
            break
    return taken


def rest(group: Group) -> list[int]:
    """Read and handle all there is."""
    return numbers(group.follow(timeout=0.0))


def rebalance(*members: AnyGroup[Any, Any, Any]) -> None:
    """Let the members see each other, a few times in turn, while there is nothing to read."""
    for _ in range(4):
        for member in members:
            assert member.poll() == []


def die(group: Group) -> None:
    """As far as others can see: no commit, no word, and the locks are gone."""
    group._abandon_in_child(os.getpid())


def next_offset(topic: Topic, number: int, partition: int = 0) -> int:
    """Where to go on behind the record."""
    return next(each.next_offset for each in topic.partition(partition).read() if each.value == b"%d" % number)


def committed_number(group: Group, partition: int = 0) -> int:
    """The last number committed in a partition of the fixture's kind; -1 if there is none."""
    commit = group.committed().get(partition)
    if commit is None:
        return -1
    log = group._directory.logs[TopicPartition(group._directory.topics[0], partition)]
    ends = {record.next_offset: record for record in _records(log)}
    return -1 if commit.offset == 0 else int(ends[commit.offset].value or b"-1")


def _records(log: Any) -> list[Record]:
    mark = log.mark()
    cursor = Cursor.at(log, mark.log_start_offset)
    found: list[Record] = []
    while batches := cursor.read(mark.flushed_end):
        for batch in batches:
            found += batch.records()
    cursor.close()
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
