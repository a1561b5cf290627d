"""Assignment: which member of a group should own which partition. Every member computes the same.

Invariant: these functions are pure. Every partition goes to exactly one member. Among members that read
the same topics, the numbers of partitions differ by one at most. The order of the arguments does not
matter, so members that see the same facts agree without communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple


class TopicPartition(NamedTuple):
    """A topic's name and the number of one of its partitions."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


Assignment = dict[str, list[TopicPartition]]  # by member
# A way to assign partitions to members. It gets the partitions, the members, and the present owners.
Strategy = Callable[[Iterable[TopicPartition], Iterable[str], Mapping[TopicPartition, str]], Assignment]


def assign(
    strategy: Strategy,
    partitions: Collection[TopicPartition],
    readers: Mapping[str, Collection[str]],
    owners: Mapping[TopicPartition, str],
) -> Assignment:
    """Assign partitions to the members that read their topics; `readers` has each member's topics.

    Topics with the same members are assigned together, other topics separately. So a member needs no
    facts about topics that it does not read.
    """
    names, topics = sorted(readers), {partition.topic for partition in partitions}
    members_of = {topic: tuple(name for name in names if topic in readers[name]) for topic in topics}
    alike: dict[tuple[str, ...], list[TopicPartition]] = defaultdict(list)
    for partition in partitions:
        alike[members_of[partition.topic]].append(partition)
    shares: Assignment = {name: [] for name in names}
    for members, of_them in alike.items():
        for name, share in strategy(of_them, members, owners).items():
            shares[name] += share
    return {name: sorted(share) for name, share in shares.items()}


def assign_range(
    partitions: Iterable[TopicPartition],
    members: Iterable[str],
    owners: Mapping[TopicPartition, str],  # noqa: ARG001
) -> Assignment:
    """Assign a range of partitions to each member: algorithm 1 of the Kafka paper (2011), section 3.2.

    The paper divides the partitions of each topic. This function divides the partitions of all topics
    together: otherwise many topics of one partition would all go to the first member. The current owners
    do not matter.
    """
    ordered, names = sorted(partitions), sorted(members)
    count, shares = len(ordered), len(names)
    return {name: ordered[count * i // shares : count * (i + 1) // shares] for i, name in enumerate(names)}


def assign_sticky(
    partitions: Iterable[TopicPartition], members: Iterable[str], owners: Mapping[TopicPartition, str]
) -> Assignment:
    """Assign as evenly as `assign_range`, with the fewest moves: an owner keeps partitions up to its share.

    The members that own most get the larger shares. A member releases its last partitions above its share.
    Partitions without an owner then fill the other shares in order.
    """
    ordered, names = sorted(partitions), sorted(members)
    owned: Assignment = {name: [] for name in names}
    for partition in ordered:
        if owners.get(partition) in owned:
            owned[owners[partition]].append(partition)
    share, larger = divmod(len(ordered), max(1, len(names)))
    by_owning = sorted(names, key=lambda name: (-len(owned[name]), name))
    shares = {name: share + (rank < larger) for rank, name in enumerate(by_owning)}
    kept = {name: owned[name][: shares[name]] for name in names}
    taken = {partition for each in kept.values() for partition in each}
    free = iter([partition for partition in ordered if partition not in taken])
    return {name: sorted([*kept[name], *(next(free) for _ in range(shares[name] - len(kept[name])))]) for name in names}


STRATEGIES: dict[str, Strategy] = {"range": assign_range, "sticky": assign_sticky}
