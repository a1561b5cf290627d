"""Members share the partitions, each group gets everything, and each partition has one owner."""

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from consumers import committed_number, die, fill, rebalance, rest

import loglib
from loglib import LockedError, LogClosedError, StaleGenerationError, Topic
from loglib.groups import members as members_module
from loglib.groups.owners import Ownership

Opener = Callable[..., Topic]

pytestmark = pytest.mark.usefixtures("attentive")


# --- who gets what -------------------------------------------------------------------------------


def test_each_record_goes_to_one_member_of_each_group(open_topic: Opener) -> None:
    topic = open_topic(partitions=4)
    with topic.group("etl") as one, topic.group("etl") as two, topic.group("audit") as other:
        rebalance(one, two)
        fill(topic, 40)
        shares = [rest(one), rest(two)]
        assert sorted(shares[0] + shares[1]) == list(range(40)) == sorted(rest(other))
        assert len(shares[0]) == len(shares[1]) == 20
        assert rest(one) == rest(two) == rest(other) == []


def test_order_holds_within_a_partition(open_topic: Opener) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 100)
    with topic.group("etl") as group:
        found = [(record.partition, int(record.value or b"")) for record in group.follow(timeout=0.0)]
    for partition in (0, 1):
        assert [number for each, number in found if each == partition] == list(range(partition, 100, 2))


def test_members_share_the_partitions_as_they_come_and_go(open_topic: Opener) -> None:
    topic = open_topic(partitions=6)
    with topic.group("etl", member="a") as a:
        rebalance(a)
        assert a.assignment == [0, 1, 2, 3, 4, 5]
        with topic.group("etl", member="b") as b, topic.group("etl", member="c") as c:
            rebalance(a, b, c)
            assert (a.assignment, b.assignment, c.assignment) == ([0, 1], [2, 3], [4, 5])
            assert a.members == b.members == ["a", "b", "c"]
            die(c)
            rebalance(a, b)
            assert (a.assignment, b.assignment) == ([0, 1, 2], [3, 4, 5])
        rebalance(a)
        assert a.assignment == [0, 1, 2, 3, 4, 5]
        assert a.members == ["a"]


def test_members_above_the_number_of_partitions_wait(open_topic: Opener) -> None:
    topic = open_topic(partitions=1)
    with topic.group("etl", member="a") as a, topic.group("etl", member="b") as b:
        rebalance(a, b)
        assert sorted(a.assignment + b.assignment) == [0]
        idle, busy = (a, b) if b.assignment else (b, a)
        busy.close()
        fill(topic, 3)
        assert rest(idle) == [0, 1, 2]


@pytest.mark.parametrize(("strategy", "kept"), [("range", 1), ("sticky", 2)])
def test_sticky_members_keep_more_than_range_ones(open_topic: Opener, strategy: Any, kept: int) -> None:
    topic = open_topic(partitions=6)
    options: dict[str, Any] = {"strategy": strategy}
    with topic.group("etl", member="m", **options) as m, topic.group("etl", member="n", **options) as n:
        rebalance(m, n)
        before = m.assignment
        with topic.group("etl", member="a", **options) as a:
            rebalance(m, n, a)
            assert len(m.assignment) == len(n.assignment) == len(a.assignment) == 2
            assert len(set(before) & set(m.assignment)) == kept
            assert sorted(m.assignment + n.assignment + a.assignment) == list(range(6))


def test_sticky_group_leaves_no_partition_without_an_owner(open_topic: Opener) -> None:
    topic = open_topic(partitions=5)
    for seed in range(20):
        with ExitStack() as stack:
            members = [stack.enter_context(topic.group(f"g{seed}", strategy="sticky", member=name)) for name in "abcde"]
            for number, member in enumerate(members):
                if seed >> number & 1:
                    assert member.poll() == []
            rebalance(*members)
            for gone in members[:: 1 + seed % 2][:2]:
                gone.close()
            left = [each for each in members if not each.closed]
            rebalance(*left)
            assert sorted(number for each in left for number in each.assignment) == [0, 1, 2, 3, 4]


def test_members_in_threads_handle_everything(open_topic: Opener, path: Path) -> None:
    topic = open_topic(partitions=4)
    found: list[int] = []
    done = threading.Event()

    def work(rounds: int) -> None:
        for _ in range(rounds):
            with suppress(LogClosedError), topic.group("etl") as group:  # of the topic, at the end
                for record in group.follow():
                    found.append(int(record.value or b""))
                    if len(set(found)) == 400:
                        done.set()
                    if done.is_set() or (rounds > 1 and len(found) % 50 == 0):
                        break

    threads = [threading.Thread(target=work, args=(rounds,)) for rounds in (1, 3, 3)]
    for thread in threads:
        thread.start()
    fill(topic, 400)
    done.wait(60)
    topic.close()  # which ends those that wait
    for thread in threads:
        thread.join()
    assert set(found) == set(range(400))


def test_partition_that_another_claims_just_then_is_waited_for(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    with topic.group("etl") as group:
        with monkeypatch.context() as patched:
            patched.setattr(Ownership, "claim", lambda *_, **__: None)
            assert group.poll() == [] and group.assignment == []
        assert rest(group) == list(range(10))


# --- static members, eviction --------------------------------------------------------------------


def test_static_member_gets_its_partitions_back(open_topic: Opener) -> None:
    topic = open_topic(partitions=4)
    with topic.group("etl", member="a", strategy="sticky") as a:
        b = topic.group("etl", member="b", strategy="sticky")
        rebalance(a, b)
        before = b.assignment
        die(b)
        with topic.group("etl", member="b", strategy="sticky") as b:
            rebalance(b, a)
            assert b.assignment == before


def test_second_member_of_a_name_is_refused(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "_JOIN_TRIES", 1)
    with topic.group("etl", member="web-1"), pytest.raises(LockedError, match="a member of that name"):
        topic.group("etl", member="web-1")


def test_evicted_member_learns_of_it_and_commits_nothing_more(topic: Topic) -> None:
    revoked: list[Any] = []
    hung = topic.group("etl", member="hung", on_revoke=revoked.append)
    loop = iter(hung.follow(timeout=0.0))
    record = next(loop)
    assert loglib.groups.evict_member(topic, "etl", "hung") == [0]
    with topic.group("etl") as other:
        assert rest(other) == list(range(10))
        for what in (record, {0: 0}, None):
            with pytest.raises(StaleGenerationError):
                hung.commit(what)
        assert committed_number(other) == 9
        with pytest.raises(StaleGenerationError, match="member hung was evicted"):
            next(loop)
        with pytest.raises(StaleGenerationError):
            hung.poll()
        assert revoked == [[0]] and hung.assignment == []
        hung.close()
        assert committed_number(other) == 9
        assert other.members == [other.member]


def test_member_that_lost_one_partition_reads_it_no_more(open_topic: Opener, path: Path) -> None:
    topic = open_topic(partitions=2)
    with topic.group("etl") as group:
        rebalance(group)
        os.replace(path / f"groups/etl/owners/{topic.log_id.hex()}-0", path / "groups/etl/owners/aside")
        fill(topic, 2)
        with pytest.raises(StaleGenerationError, match="topic-0"):
            rest(group)
        assert sorted(rest(group)) == [0, 1]  # it has joined again, as the owner of a new file


def test_member_that_is_evicted_while_it_waits_can_be_closed(topic: Topic) -> None:
    with topic.group("etl", member="hung") as group:
        assert len(rest(group)) == 10
        assert group.poll(timeout=0.01) == []
        loglib.groups.evict_member(topic, "etl", "hung")
    with topic.group("etl") as group:
        assert rest(group) == []
