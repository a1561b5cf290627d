"""Assignment: every partition to one member, evenly, computed alike by all, and with `sticky` moving the fewest."""

from collections.abc import Mapping
from itertools import combinations
from random import Random

import pytest
from builders import calm
from hypothesis import given
from hypothesis import strategies as st

from loglib import TopicPartition
from loglib.groups.assignment import STRATEGIES, Assignment, Strategy, assign, assign_range, assign_sticky

PARTITIONS = st.builds(TopicPartition, st.sampled_from(["a", "b", "a-1"]), st.integers(0, 9))
NAMES = st.text("abxyz-0", min_size=1, max_size=3)
BOTH = pytest.mark.parametrize("assign", STRATEGIES.values(), ids=STRATEGIES)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[TopicPartition], list[str], dict[TopicPartition, str]]:
    """Partitions, members, and who owns what now: members, some that are gone, or nobody."""
    partitions = draw(st.lists(PARTITIONS, max_size=12, unique=True))
    members = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    owner = st.sampled_from([*members, "gone", ""])
    owners = draw(st.fixed_dictionaries({}, optional=dict.fromkeys(partitions, owner)))
    return partitions, members, owners


def owners_of(assignment: Assignment) -> dict[TopicPartition, str]:
    return {partition: name for name, partitions in assignment.items() for partition in partitions}


def moves(before: Mapping[TopicPartition, str], after: Mapping[TopicPartition, str], members: list[str]) -> int:
    """How many partitions a living owner loses."""
    return sum(owner in members and after[partition] != owner for partition, owner in before.items())


@BOTH
@calm
@given(groups())
def test_every_partition_goes_to_one_member(assign: Strategy, group: tuple) -> None:  # type: ignore[type-arg]
    partitions, members, owners = group
    assignment = assign(partitions, members, owners)
    assert sorted(assignment) == sorted(members)
    assert sorted(each for owned in assignment.values() for each in owned) == sorted(partitions)


@BOTH
@calm
@given(groups())
def test_no_member_has_two_more_than_another(assign: Strategy, group: tuple) -> None:  # type: ignore[type-arg]
    shares = [len(owned) for owned in assign(*group).values()]
    assert max(shares) - min(shares) <= 1


@BOTH
@calm
@given(groups(), st.integers(0, 1 << 32))
def test_order_of_arguments_does_not_matter(assign: Strategy, group: tuple, seed: int) -> None:  # type: ignore[type-arg]
    shuffled = [list(each.items()) if isinstance(each, dict) else list(each) for each in group]
    for each in shuffled:
        Random(seed).shuffle(each)
    partitions, members, owners = shuffled
    assert assign(iter(partitions), iter(members), dict(owners)) == assign(*group)


@calm
@given(groups())
def test_sticky_moves_the_fewest(group: tuple) -> None:  # type: ignore[type-arg]
    partitions, members, owners = group
    after = owners_of(assign_sticky(partitions, members, owners))
    assert moves(owners, after, members) == fewest_moves(partitions, members, owners)


def fewest_moves(partitions: list[TopicPartition], members: list[str], owners: Mapping[TopicPartition, str]) -> int:
    """By trying every way to give the larger shares out: what a member holds above its share has to move."""
    share, larger = divmod(len(partitions), len(members))
    held = {name: sum(owners.get(each) == name for each in partitions) for name in members}
    return min(
        sum(max(0, held[name] - share - (name in chosen)) for name in members)
        for chosen in combinations(members, larger)
    )


@calm
@given(groups())
def test_sticky_applied_again_moves_nothing(group: tuple) -> None:  # type: ignore[type-arg]
    partitions, members, owners = group
    first = assign_sticky(partitions, members, owners)
    assert assign_sticky(partitions, members, owners_of(first)) == first


@calm
@given(groups())
def test_range_does_not_ask_who_owns_what(group: tuple) -> None:  # type: ignore[type-arg]
    partitions, members, owners = group
    assert assign_range(partitions, members, owners) == assign_range(partitions, members, {})


def test_range_is_that_of_the_paper() -> None:
    partitions = [TopicPartition("t", number) for number in range(7)]
    found = assign_range(partitions, ["c2", "c0", "c1"], {})
    assert {name: [each.partition for each in owned] for name, owned in found.items()} == {
        "c0": [0, 1],
        "c1": [2, 3],
        "c2": [4, 5, 6],
    }


def test_range_spreads_topics_of_one_partition() -> None:
    topics = [TopicPartition(name, 0) for name in "abcd"]
    assert [len(owned) for owned in assign_range(topics, ["m", "n"], {}).values()] == [2, 2]


def test_sticky_moves_only_what_a_new_member_gets() -> None:
    partitions = [TopicPartition("t", number) for number in range(6)]
    before = owners_of(assign_sticky(partitions, ["m", "n"], {}))
    after = owners_of(assign_sticky(partitions, ["a", "m", "n"], before))
    assert sum(before[each] != after[each] for each in partitions) == 2  # where range would move four


def test_partition_reads_as_in_its_files() -> None:
    assert str(TopicPartition("a-1", 12)) == "a-1-12"


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_each_partition_goes_to_a_member_that_reads_its_topic(strategy: Strategy) -> None:
    partitions = [TopicPartition(topic, number) for topic in "ABC" for number in range(6)]
    readers = {"m1": ("A",), "m2": ("A", "B"), "m3": ("A", "B"), "joining": ()}
    found = assign(strategy, partitions[:12], readers, {})
    assert sorted(each for share in found.values() for each in share) == partitions[:12]
    assert all(each.topic in readers[name] for name, share in found.items() for each in share)
    assert [len([each for each in found[name] if each.topic == "A"]) for name in readers] == [2, 2, 2, 0]
    assert [len([each for each in found[name] if each.topic == "B"]) for name in readers] == [0, 3, 3, 0]
    of_one = assign(strategy, partitions[:6], readers, {})  # as m1 computes it, which does not know B
    assert of_one["m1"] == found["m1"]
    assert assign(strategy, partitions[12:], readers, {}) == {name: [] for name in readers}
