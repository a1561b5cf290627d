"""Assignment: which member of a group owns which partition, computed alike by every member.

Invariant: pure functions of their arguments. Every partition goes to exactly one member, no member
has two more than another that reads the same topics, and the order in which partitions and members are
given does not matter: members that see the same facts agree without talking to each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

__all__ = ["STRATEGIES", "Assignment", "Strategy", "TopicPartition", "assign", "assign_range", "assign_sticky"]


class TopicPartition(NamedTuple):
    """A partition and the topic that it is of, by name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


Assignment = dict[str, list[TopicPartition]]  # by member


class Strategy(Protocol):
    """A way to share partitions out among members."""

    def __call__(
        self, partitions: Iterable[TopicPartition], members: Iterable[str], owners: Mapping[TopicPartition, str]
    ) -> Assignment: ...


def assign(
    strategy: Strategy,
    partitions: Iterable[TopicPartition],
    readers: Mapping[str, Collection[str]],
    owners: Mapping[TopicPartition, str],
) -> Assignment:
    """Share partitions out among the members that read their topics; `readers` has each member's topics.

    Topics that the same members read are shared out together, the others apart: so a member need know
    nothing of topics that it does not read.
    """
    alike: dict[tuple[str, ...], list[TopicPartition]] = defaultdict(list)
    names = sorted(readers)
    of_topic: dict[str, tuple[str, ...]] = {}
    for partition in partitions:
        topic = partition.topic
        if topic not in of_topic:
            of_topic[topic] = tuple(name for name in names if topic in readers[name])
        alike[of_topic[topic]].append(partition)
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
    """Neighbouring partitions to neighbouring members: algorithm 1 of the Kafka paper (2011), section 3.2.

    Where the paper divides the partitions of each topic, this divides those of all together, so that
    many topics of one partition do not all go to the first member. Who owns what now plays no part.
    """
    ordered, names = sorted(partitions), sorted(members)
    count, shares = len(ordered), len(names)
    return {name: ordered[count * i // shares : count * (i + 1) // shares] for i, name in enumerate(names)}


def assign_sticky(
    partitions: Iterable[TopicPartition], members: Iterable[str], owners: Mapping[TopicPartition, str]
) -> Assignment:
    """As even as `assign_range`, and with the fewest moves: who owns a partition keeps it if the shares allow.

    The larger shares go to those who own most; what is above a share is given up from the end, and
    what has no owner fills the others' shares in order.
    """
    ordered, names = sorted(partitions), sorted(members)
    held: Assignment = {name: [] for name in names}
    for partition in ordered:
        if owners.get(partition) in held:
            held[owners[partition]].append(partition)
    share, larger = divmod(len(ordered), max(1, len(names)))
    by_holding = sorted(names, key=lambda name: (-len(held[name]), name))
    shares = {name: share + (rank < larger) for rank, name in enumerate(by_holding)}
    kept = {name: held[name][: shares[name]] for name in names}
    taken = {partition for each in kept.values() for partition in each}
    free = iter([partition for partition in ordered if partition not in taken])
    return {name: sorted([*kept[name], *(next(free) for _ in range(shares[name] - len(kept[name])))]) for name in names}


STRATEGIES: dict[str, Strategy] = {"range": assign_range, "sticky": assign_sticky}
