"""Groups: members share the partitions, each group gets everything, and what is committed was handled."""

import errno
import json
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import loglib
from conftest import QUIET, SECOND, Clock, crash_copy, needs_proc, needs_root, open_files, run_python
from loglib import (
    CorruptLogError,
    ForkedHandleError,
    Group,
    GroupElsewhereError,
    GroupMismatchError,
    InvalidOffsetError,
    LockedError,
    LogClosedError,
    LogError,
    LogReplacedError,
    OffsetOutOfRangeError,
    Record,
    StaleGenerationError,
    StorageIOError,
    Topic,
    TopicPartition,
)
from loglib.groups import group as group_module
from loglib.groups import members as members_module
from loglib.groups import progress as progress_module
from loglib.groups.owners import Ownership, evict_owner
from loglib.groups.run import Run
from loglib.system import wait as wait_module
from loglib.system.files import REAL
from loglib.testing import Call, FaultyFiles, RecordingFiles, WatchedFiles
from test_fork import in_child

Opener = Callable[..., Topic]


@pytest.fixture(autouse=True)
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members look at each other whenever they are asked for records: nothing depends on the time of day."""
    for name in ("_LOOK_S", "_COMMIT_AFTER_S"):
        monkeypatch.setattr(group_module, name, 0.0)


@pytest.fixture
def topic(open_topic: Opener) -> Topic:
    """One partition with the records 0 to 9, a batch each."""
    topic = open_topic(partitions=1)
    fill(topic, 10)
    return topic


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


def rebalance(*members: Group) -> None:
    """Let the members see each other, a few times in turn, while there is nothing to read."""
    for _ in range(4):
        for member in members:
            assert member.poll() == []


def die(group: Group) -> None:
    """As far as others can see: no commit, no word, and the locks are gone."""
    group.abandon_in_child(os.getpid())


def next_offset(topic: Topic, number: int, partition: int = 0) -> int:
    """Where to go on behind the record."""
    return next(each.next_offset for each in topic.partition(partition).read() if each.value == b"%d" % number)


def committed_number(group: Group, partition: int = 0) -> int:
    """The last number committed in a partition of the fixture's kind; -1 if there is none."""
    commit = group.committed().get(partition)
    if commit is None:
        return -1
    log = group._place.logs[TopicPartition(group._place.topics[0], partition)]
    ends = {record.next_offset: record for record in _records(log)}
    return -1 if commit.offset == 0 else int(ends[commit.offset].value or b"-1")


def _records(log: Any) -> list[Record]:
    mark = log.mark()
    cursor = log.cursor(mark.log_start_offset)
    found: list[Record] = []
    while batches := cursor.read(mark.flushed_end):
        for batch in batches:
            found += batch.records()
    cursor.close()
    return found


# --- who gets what ------------------------------------------------------------------------------------


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


# --- where a group begins -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("begin", list(range(10))), ("end", []), ("-5s", [5, 6, 7, 8, 9]), (timedelta(seconds=2), [8, 9]),
        (datetime.fromtimestamp(1_700_000_003, UTC), list(range(3, 10))),
    ],
)  # fmt: skip
def test_new_group_begins_where_it_is_told(open_topic: Opener, clock: Clock, start: Any, expected: list[int]) -> None:
    topic = open_topic(partitions=2)
    for number in range(10):
        fill(topic, 1, first=number)
        clock.now += SECOND
    with topic.group("etl", start=start) as group:
        assert sorted(rest(group)) == expected
        fill(topic, 1, first=10)
        assert rest(group) == [10]
    with topic.group("etl", start="begin") as group:
        assert rest(group) == []  # it is no new group any more


def test_group_that_began_at_the_end_stays_there_when_its_first_member_dies(topic: Topic) -> None:
    first = topic.group("etl", start="end", commit="manual")
    assert first.poll() == []
    fill(topic, 3, first=10)
    assert numbers(first.poll()) != []
    die(first)
    with topic.group("etl", start="end") as second:
        assert rest(second) == [10, 11, 12]


def test_members_file_and_directories_say_who_and_where(topic: Topic, path: Path) -> None:
    with topic.group("etl", member="web-1") as group:
        assert group.poll() != []
        names = sorted(str(each.relative_to(path / "groups" / "etl")) for each in (path / "groups" / "etl").rglob("*"))
        (log,) = (path / "groups" / "etl" / "offsets").iterdir()
        assert names == [
            "members", "members/web-1", "offsets", f"offsets/{log.name}", f"offsets/{log.name}/{'0' * 20}.log",
            f"offsets/{log.name}/lock", f"offsets/{log.name}/watermark", "owners", "owners/topic-0",
        ]  # fmt: skip
        assert repr(group) == f"<Group etl, member web-1, owning {group.assignment}>"
    assert repr(group) == "<Group etl, member web-1, closed>"


# --- what is handled ----------------------------------------------------------------------------------


def fails_at(group: Group, number: int) -> None:
    for record in group.follow(timeout=0.0):
        if record.value == b"%d" % number:
            raise RuntimeError("cannot handle it")


def test_record_whose_body_raised_comes_again(topic: Topic) -> None:
    with topic.group("etl") as group:
        with pytest.raises(RuntimeError):
            fails_at(group, 6)
        assert rest(group) == [6, 7, 8, 9]
    with topic.group("etl") as group:
        assert rest(group) == []


def test_record_whose_body_raised_comes_to_another_member(topic: Topic) -> None:
    with pytest.raises(RuntimeError), topic.group("etl") as group:
        fails_at(group, 6)
    with topic.group("etl") as group:
        assert committed_number(group) == 5
        assert rest(group) == [6, 7, 8, 9]


def test_record_at_which_the_loop_was_left_comes_again(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 4) == [0, 1, 2, 3]
        assert take(group, 2) == [3, 4]
    with topic.group("etl") as group:
        assert rest(group) == [4, 5, 6, 7, 8, 9]


def test_loop_that_is_held_and_left_behind_gives_its_record_to_the_next(topic: Topic) -> None:
    with topic.group("etl") as group:
        left = iter(group.follow(timeout=0.0))
        assert numbers([next(left), next(left)]) == [0, 1]
        assert numbers([next(iter(group.follow(timeout=0.0)))]) == [1]
        assert sorted(numbers(left)) == list(range(1, 10))


def test_polled_records_are_handled_with_the_next_poll(topic: Topic) -> None:
    group = topic.group("etl")
    assert numbers(group.poll(max_records=1)) == [0]
    assert committed_number(group) == -1
    assert numbers(group.poll()) == [1]
    assert committed_number(group) == 0
    die(group)
    with topic.group("etl") as group:
        assert numbers(group.poll()) == [1]


def test_polled_records_are_handled_when_a_loop_asks_for_more(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert numbers(group.poll()) == [0]
        assert take(group, 1) == [1]
        assert committed_number(group) == 0


def test_closing_does_not_commit_what_was_polled_last(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert numbers(group.poll() + group.poll()) == [0, 1]
    with topic.group("etl") as group:
        assert numbers(group.poll()) == [1]


def test_poll_gives_up_to_so_many(open_topic: Opener) -> None:
    topic = open_topic(partitions=1)
    topic.append_many([b"%d" % number for number in range(100)])
    topic.flush()
    with topic.group("etl") as group:
        assert numbers(group.poll(max_records=30)) == list(range(30))
        assert numbers(group.poll()) == list(range(30, 100))
        assert group.poll(timeout=0.01) == []
        with pytest.raises(ValueError, match="at least 1"):
            group.poll(max_records=0)


def test_batch_whose_body_raised_comes_again(topic: Topic) -> None:
    with topic.group("etl") as group:
        with pytest.raises(RuntimeError):
            for number, batch in enumerate(group.batches(timeout=0.0)):
                assert batch.values == [b"%d" % number]
                if number == 6:
                    raise RuntimeError
        assert [batch.values for batch in group.batches(timeout=0.0)] == [[b"6"], [b"7"], [b"8"], [b"9"]]
    with topic.group("etl") as group:
        assert rest(group) == []


def test_batch_that_was_read_in_part_comes_as_its_rest(open_topic: Opener) -> None:
    topic = open_topic(partitions=1)
    topic.append_many([b"%d" % number for number in range(10)])
    topic.flush()
    with topic.group("etl") as group:
        assert take(group, 4) == [0, 1, 2, 3]
        assert [numbers(batch.records()) for batch in group.batches(timeout=0.0)] == [[3, 4, 5, 6, 7, 8, 9]]


# --- commits ------------------------------------------------------------------------------------------


def test_what_is_handled_is_committed_as_it_goes(topic: Topic) -> None:
    with topic.group("etl") as group:
        seen = [(int(record.value or b""), committed_number(group)) for record in group.follow(timeout=0.0)]
        assert seen[0] == (0, -1)
        assert all(committed < number for number, committed in seen)
        assert committed_number(group) == 9


def test_manual_group_commits_by_hand_alone(topic: Topic) -> None:
    with topic.group("etl", commit="manual") as group:
        assert rest(group) == list(range(10))
        assert group.committed() == {}
    with topic.group("etl", commit="manual") as group:
        assert len(rest(group)) == 10
        group.commit()
    with topic.group("etl", commit="manual") as group:
        assert rest(group) == []


@pytest.mark.parametrize("interval", [3600, 3600.5, timedelta(hours=1)])
def test_interval_group_commits_again_only_after_the_interval(topic: Topic, interval: Any) -> None:
    with topic.group("etl", commit=interval) as group:
        assert len(rest(group)) == 10
        first = committed_number(group)
        assert first < 9
        fill(topic, 1, first=10)
        assert rest(group) == [10]
        assert committed_number(group) == first
    with topic.group("etl") as group:
        assert committed_number(group) == 10  # when it was closed


@pytest.mark.parametrize("commit", ["before", 0, -1, True, timedelta(0)])
def test_other_commit_policies_are_refused(topic: Topic, commit: Any) -> None:
    with pytest.raises(ValueError, match="commit must be"):
        topic.group("etl", commit=commit)


def test_commit_of_a_record_says_it_is_handled(topic: Topic, clock: Clock) -> None:
    with topic.group("etl", commit="manual", member="m") as group:
        for record in group.follow(timeout=0.0):
            if record.value == b"4":
                group.commit(record, meta="page 7")
                break
        commit = group.committed()[0]
        assert commit == loglib.Commit(next_offset(topic, 4), "page 7", 1, "m", clock.now)
        assert rest(group) == [5, 6, 7, 8, 9]


def test_commit_of_a_record_holds_when_its_body_raises_later(topic: Topic) -> None:
    with topic.group("etl") as group:
        for record in group.follow(timeout=0.0):
            if record.value == b"4":
                group.commit(record)
                break
    with topic.group("etl") as group:
        assert rest(group) == [5, 6, 7, 8, 9]


def test_commit_without_argument_is_of_all_that_was_handed_out(topic: Topic) -> None:
    with topic.group("etl", commit="manual") as group:
        for record in group.follow(timeout=0.0):
            group.commit()
            assert b"%d" % committed_number(group) == record.value
        group.commit()  # which changes nothing
        fill(topic, 2, first=10)
        assert numbers(group.poll()) == [10]
        group.commit()
        assert committed_number(group) == 10
        for batch in group.batches(timeout=0.0):
            group.commit()
            assert batch.values == [b"11"] and committed_number(group) == 11


def test_commit_of_a_mapping_says_where_to_go_on(topic: Topic) -> None:
    with topic.group("etl", commit="manual") as group:
        assert take(group, 1) == [0]
        group.commit({0: next_offset(topic, 6)}, meta="by hand")
        assert group.committed()[0].meta == "by hand"
    with topic.group("etl") as group:
        assert rest(group) == [7, 8, 9]


def test_commit_of_what_is_no_place_is_refused(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 1) == [0]
        for what, error in [
            ({0: 1 << 40}, OffsetOutOfRangeError), ({0: 1}, InvalidOffsetError), ({7: 0}, ValueError),
            ({0: "nowhere"}, ValueError), ({0: 1.5}, TypeError), (b"record", TypeError), (5, TypeError),
        ]:  # fmt: skip
            with pytest.raises(error):
                group.commit(what)
        assert group.committed() == {}


def test_commit_for_a_partition_of_another_is_refused(open_topic: Opener) -> None:
    topic = open_topic(partitions=2)
    with topic.group("etl", member="a") as a, topic.group("etl", member="b") as b:
        rebalance(a, b)
        with pytest.raises(StaleGenerationError, match="member b no longer owns topic-0") as caught:
            b.commit({0: 0})
        assert (caught.value.group, caught.value.member, caught.value.partition) == ("etl", "b", "topic-0")
        with pytest.raises(StaleGenerationError):
            b.seek({0: "begin"})
        with pytest.raises(StaleGenerationError):
            b.pause(0)


# --- places -------------------------------------------------------------------------------------------


def test_seek_rewinds_and_replays(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
        group.seek("begin")
        assert rest(group) == list(range(10))
        group.seek({0: next_offset(topic, 7)})
        assert rest(group) == [8, 9]
        group.seek("end")
        assert rest(group) == []


def test_seek_right_after_joining_is_heeded(topic: Topic) -> None:
    with topic.group("etl") as group:
        group.seek({0: next_offset(topic, 7)})
        assert rest(group) == [8, 9]


def test_seek_is_committed_like_progress(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
        group.seek({0: next_offset(topic, 2)})
    with topic.group("etl") as group:
        assert rest(group) == [3, 4, 5, 6, 7, 8, 9]


def test_seek_in_the_body_of_a_loop_goes_there_at_once(topic: Topic) -> None:
    with topic.group("etl") as group:
        seen = []
        for record in group.follow(timeout=0.0):
            seen.append(int(record.value or b""))
            if seen == [0, 1, 2]:
                group.seek({0: next_offset(topic, 7)})
        assert seen == [0, 1, 2, 8, 9]


def test_one_offset_for_many_partitions_is_refused(open_topic: Opener) -> None:
    topic = open_topic(partitions=2)
    with topic.group("etl") as group:
        rebalance(group)
        with pytest.raises(ValueError, match="another record in each partition"):
            group.seek(0)
        with pytest.raises(ValueError, match="no partition 9"):
            group.seek({9: 0})


def test_paused_partition_hands_out_nothing_until_it_is_resumed(open_topic: Opener) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 20)
    with topic.group("etl") as group:
        seen = []
        for record in group.follow(timeout=0.0):
            seen.append(int(record.value or b""))
            if seen[-1] == 4:
                group.pause(0)
                group.pause(0)
                assert group.tell()[0] == next_offset(topic, 4)
        assert sorted(seen) == sorted([0, 2, 4, *range(1, 20, 2)])
        assert group.assignment == [0, 1]
        assert committed_number(group, 0) == 4
        group.resume(0, 1)
        assert rest(group) == list(range(6, 20, 2))


def test_seek_moves_a_paused_partition(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 2) == [0, 1]
        group.pause(0)
        group.seek({0: next_offset(topic, 7)})
        assert group.tell() == {0: next_offset(topic, 7)} and rest(group) == []
        group.resume(0)
        assert rest(group) == [8, 9]


def test_loop_left_at_a_record_whose_partition_it_paused_gets_it_again(topic: Topic) -> None:
    with topic.group("etl") as group:
        for record in group.follow(timeout=0.0):
            if record.value == b"3":
                group.pause(0)
                break
        assert group.poll() == []
        group.resume(0)
        assert rest(group)[0] == 3


def test_tell_is_the_next_record_to_be_handed_out(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert group.tell() == {}
        for record in group.follow(timeout=0.0):
            assert group.tell() == {0: record.next_offset}


def test_lag_counts_bytes_seconds_and_records(open_topic: Opener, clock: Clock) -> None:
    topic = open_topic(partitions=2)
    for _ in range(3):
        clock.now += SECOND
        topic.append_many([b"x"] * 4, partition=0)
        topic.flush()
    clock.now += 2 * SECOND
    with topic.group("etl") as group:
        start, end = topic.partition(0).log_start_offset, topic.partition(0).log_end_offset
        assert group.lag() == {0: (end - start, 4.0, None), 1: (0, 0.0, None)}
        assert group.lag(count_records=True) == {0: (end - start, 4.0, 12), 1: (0, 0.0, 0)}
        records = list(topic.partition(0).read())
        for count, seconds in ((1, 4.0), (4, 3.0), (6, 3.0)):
            offset = records[count].offset
            group.seek({0: offset})
            group.commit()
            assert group.lag(count_records=True)[0] == (end - offset, seconds, 12 - count)


def test_lag_of_a_new_group_at_the_end_is_nothing(topic: Topic) -> None:
    with topic.group("etl", start="end") as group:
        assert group.lag(count_records=True) == {0: (0, 0.0, 0)}


# --- listeners ----------------------------------------------------------------------------------------


def test_listeners_are_told_before_reading_and_before_giving_up(open_topic: Opener) -> None:
    topic = open_topic(partitions=2)
    told: list[Any] = []
    a = topic.group(
        "etl", member="a", on_assign=lambda each: told.append(("+", each)),
        on_revoke=lambda each: told.append(("-", each, a.assignment, [*a.committed()])),
    )  # fmt: skip
    rebalance(a)
    fill(topic, 2)
    assert sorted(rest(a)) == [0, 1]
    with topic.group("etl", member="b") as b:
        rebalance(a, b)
        assert told == [("+", [0, 1]), ("-", [1], [0, 1], [0, 1])]
    rebalance(a)
    assert told[2:] == [("+", [1])]
    a.close()
    assert told[3:] == [("-", [0, 1], [0, 1], [0, 1])]


def test_listener_may_commit_when_the_group_is_closed(topic: Topic) -> None:
    group = topic.group("etl", commit="manual", on_revoke=lambda _: group.commit())
    assert rest(group) == list(range(10))
    group.close()
    with topic.group("etl") as group:
        assert rest(group) == []


def test_listener_may_seek_where_it_begins(topic: Topic) -> None:
    group = topic.group("etl", on_assign=lambda each: group.seek(dict.fromkeys(each, next_offset(topic, 7))))
    with group:
        assert rest(group) == [8, 9]


def test_listener_that_raises_does_not_keep_the_partitions(topic: Topic) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("listener")

    group = topic.group("etl", on_revoke=refuse)
    assert rest(group) == list(range(10))
    with pytest.raises(RuntimeError, match="listener"):
        group.close()
    with topic.group("etl", on_assign=refuse) as group:
        with pytest.raises(RuntimeError, match="listener"):
            group.poll()
        assert group.assignment == [0]


# --- static members, eviction -------------------------------------------------------------------------


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
    assert loglib.evict_member(topic, "etl", "hung") == [0]
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
        os.replace(path / "groups/etl/owners/topic-0", path / "groups/etl/owners/aside")
        fill(topic, 2)
        with pytest.raises(StaleGenerationError, match="topic-0"):
            rest(group)
        assert sorted(rest(group)) == [0, 1]  # it has joined again, as the owner of a new file


# --- what is not in the log ---------------------------------------------------------------------------


def drop_first(topic: Topic, count: int) -> None:
    """Have retention drop the first so many records."""
    topic.partition(0).roll()
    start = topic.partition(0).log_end_offset
    fill(topic, 5, first=100)
    topic.partition(0).writer().drop_before(start)


def test_commit_below_the_log_start_is_an_error(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 3) == [0, 1, 2]
    drop_first(topic, 10)
    with topic.group("etl") as group:
        for _ in range(2):
            with pytest.raises(OffsetOutOfRangeError):
                group.poll()
        assert group.assignment == []
        assert group.lag(count_records=True)[0].records == 5


@pytest.mark.parametrize(("start", "expected"), [("begin", [100, 101, 102, 103, 104]), ("end", [])])
def test_commit_below_the_log_start_begins_again(topic: Topic, start: str, expected: list[int]) -> None:
    with topic.group("etl") as group:
        assert take(group, 3) == [0, 1, 2]
    drop_first(topic, 10)
    group = topic.group("etl", start=start, on_out_of_range="start", commit="manual")
    assert rest(group) == expected
    die(group)
    fill(topic, 1, first=105)
    with topic.group("etl", start=start, on_out_of_range="start") as group:
        assert rest(group) == [*expected, 105]  # the new beginning is kept


def test_member_that_retention_overtakes_begins_again_or_says_so(topic: Topic) -> None:
    with topic.group("etl", on_out_of_range="start") as heedless, topic.group("audit") as strict:
        assert numbers(heedless.poll()) == numbers(strict.poll()) == [0]
        heedless.seek({0: next_offset(topic, 0)})
        strict.seek({0: next_offset(topic, 0)})
        drop_first(topic, 10)
        assert rest(heedless) == [100, 101, 102, 103, 104]
        with pytest.raises(OffsetOutOfRangeError):
            rest(strict)


def test_commit_ahead_of_the_log_is_an_error_or_begins_again(open_topic: Opener, topic: Topic, path: Path) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
    fill(topic, 5, first=10)
    with topic.group("etl") as group:
        assert len(rest(group)) == 5
        ahead = group.committed()[0].offset
    log = group._place.logs[TopicPartition("topic", 0)]
    mark = log.mark()
    shorter = mark._replace(flushed_end=next_offset(topic, 5), durable_end=next_offset(topic, 5))
    log.mark = lambda: shorter  # type: ignore[method-assign]  # as where a log was lost and begun anew
    with topic.group("etl") as group, pytest.raises(OffsetOutOfRangeError) as caught:
        group.poll()
    assert caught.value.offset == ahead
    with topic.group("etl", on_out_of_range="start") as group:
        group.poll()
        assert group.committed()[0].offset == 0


@pytest.mark.parametrize("value", ["", "skip", None])
def test_other_answers_to_a_lost_place_are_refused(topic: Topic, value: Any) -> None:
    with pytest.raises(ValueError, match="on_out_of_range must be"):
        topic.group("etl", on_out_of_range=value)


def test_damaged_offsets_are_an_error_and_never_a_new_group(topic: Topic, path: Path) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
    segment = max((path / "groups/etl/offsets").glob("*/*.log"))
    raw = bytearray(segment.read_bytes())
    raw[4096 + 70] ^= 1
    segment.write_bytes(raw)
    with topic.group("etl") as group:
        with pytest.raises(CorruptLogError):
            group.poll()
        assert group.assignment == []
        with pytest.raises(CorruptLogError):
            group.committed()


def test_missing_offsets_are_an_error_and_never_a_new_group(topic: Topic, path: Path) -> None:
    with topic.group("etl") as group:
        assert len(rest(group)) == 10
    offsets = path / "groups/etl/offsets"
    offsets.rename(path / "aside")
    with pytest.raises(CorruptLogError, match="no directory"):
        topic.group("etl")
    offsets.mkdir()
    with pytest.raises(CorruptLogError), topic.group("etl") as group:
        group.poll()


# --- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 250])
def test_names_that_are_no_file_names_are_refused(topic: Topic, path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        topic.group(name)
    assert not (path / "groups").exists()
    with pytest.raises(ValueError, match="is not a name"):
        topic.group("etl", member=name)


def test_starts_and_strategies_that_make_no_sense_are_refused(topic: Topic, path: Path) -> None:
    for options, message in [
        ({"start": 5}, "cannot start at offset 5"), ({"start": "middle"}, "start must be"),
        ({"strategy": "random"}, "strategy must be one of"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            topic.group("etl", **options)  # type: ignore[arg-type]
    assert not (path / "groups").exists()


# --- several topics -----------------------------------------------------------------------------------


@pytest.fixture
def two_topics(open_topic: Opener, tmp_path: Path) -> tuple[Topic, Topic]:
    clicks, views = open_topic(tmp_path / "clicks", partitions=2), open_topic(tmp_path / "views", partitions=1)
    fill(clicks, 6)
    fill(views, 3)
    return clicks, views


def test_group_on_several_topics_says_which(two_topics: tuple[Topic, Topic]) -> None:
    clicks, views = two_topics
    with loglib.group([clicks, views], "etl") as group:
        found = [(name, int(record.value or b"")) for name, record in group.follow(timeout=0.0)]
        assert sorted(found) == [*(("clicks", each) for each in range(6)), *(("views", each) for each in range(3))]
        assert group.assignment == [("clicks", 0), ("clicks", 1), ("views", 0)]
        assert set(group.committed()) == set(group.lag()) == set(group.tell()) == set(group.assignment)
        group.seek({("views", 0): "begin"})
        assert [batch.values for name, batch in group.batches(timeout=0.0) if name == "views"] == [
            [b"0"],
            [b"1"],
            [b"2"],
        ]
        group.pause(("views", 0))
        fill(views, 1, first=3)
        assert group.poll() == []
        group.resume(TopicPartition("views", 0))
        ((name, record),) = group.poll()
        assert (name, record.value) == ("views", b"3")
        group.commit((name, record))
        group.commit({("views", 0): record.next_offset})
    with loglib.group([clicks, views], "etl") as group:
        assert group.poll() == []


def test_group_on_several_topics_refuses_what_does_not_say_which(two_topics: tuple[Topic, Topic]) -> None:
    with loglib.group(two_topics, "etl") as group:
        ((_, record),) = group.poll(max_records=1)
        for what in (record, ("clicks", 5), [("clicks", record)]):
            with pytest.raises(TypeError, match="takes \\(topic, record\\)"):
                group.commit(what)
        for key in (0, ("clicks", 9), "clicks", ("other", 0)):
            with pytest.raises(ValueError, match="no partition"):
                group.pause(key)
    with pytest.raises(ValueError, match="different names"):
        loglib.group([two_topics[0]] * 2, "etl")
    with pytest.raises(ValueError, match="different names"):
        loglib.group([], "etl")


def test_closing_any_of_its_topics_closes_the_group(two_topics: tuple[Topic, Topic]) -> None:
    group = loglib.group(two_topics, "etl")
    two_topics[1].close()
    assert group.closed


# --- the end ------------------------------------------------------------------------------------------


def test_closed_group_says_so(topic: Topic) -> None:
    group = topic.group("etl")
    group.close()
    group.close()
    assert group.closed and group.assignment == [] and rest(group) == []
    for call in (group.poll, group.commit, lambda: group.seek("begin"), lambda: group.pause(0)):
        with pytest.raises(LogClosedError, match="join it again"):
            call()  # type: ignore[operator]


def test_group_closed_in_the_body_of_its_loop_ends_it(topic: Topic) -> None:
    group = topic.group("etl")
    seen = []
    for record in group.follow():
        seen.append(int(record.value or b""))
        if len(seen) == 4:
            group.close()
    assert seen == [0, 1, 2, 3]
    with topic.group("etl") as group:
        assert rest(group) == [3, 4, 5, 6, 7, 8, 9]


def test_loop_that_is_closed_after_its_group_is_no_error(topic: Topic) -> None:
    with topic.group("etl") as group:
        loop = group.follow()
        next(loop)
    loop.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["group", "topic"])
def test_close_from_another_thread_ends_the_wait(topic: Topic, what: str) -> None:
    group = topic.group("etl")
    waiting = threading.Event()
    seen: list[int] = []

    def follow() -> None:
        for record in group.follow():
            seen.append(int(record.value or b""))
            if len(seen) == 10:
                waiting.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert waiting.wait(30)
    (group if what == "group" else topic).close()
    thread.join(30)
    assert not thread.is_alive() and seen == list(range(10)) and group.closed


def test_topic_closes_its_groups(topic: Topic, path: Path) -> None:
    group = topic.group("etl")
    assert len(rest(group)) == 10
    topic.close()
    assert group.closed
    with Topic.open(path, mode="r") as reading, reading.group("etl") as group:
        assert rest(group) == []
    with pytest.raises(LogClosedError):
        topic.group("etl")


def test_topic_that_is_only_read_can_be_joined(topic: Topic, path: Path) -> None:
    with Topic.open(path, mode="r") as reading:
        with reading.group("etl") as group:
            assert rest(group) == list(range(10))
            fill(topic, 1, first=10)
            assert numbers(group.poll(timeout=30)) == [10]
        with reading.group("etl") as group:
            assert numbers(group.poll()) == [10]


def test_group_that_nobody_closed_is_warned_of_and_lets_go(topic: Topic) -> None:
    group = topic.group("etl", member="lost")
    assert group.poll() != []
    with pytest.warns(ResourceWarning, match="member lost, was not closed"):
        del group
    with topic.group("etl", member="lost") as group:
        assert group.poll() != [] and group.assignment == [0]


@pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning")
@pytest.mark.parametrize("mode", ["a", "r"])
def test_group_keeps_its_topics_open(mode: Any, topic: Topic, path: Path) -> None:
    """A topic that nobody else referred to was collected, and so closed: its group looked like one without records."""
    topic.close()
    assert numbers(Topic.open(path, mode=mode).group("first").follow(timeout=0.01)) == list(range(10))
    assert sum(map(len, Topic.open(path, mode=mode).group("second").batches(timeout=0.01))) == 10
    shown = list(loglib.group([Topic.open(path, mode=mode)], "third").follow(timeout=0.01))
    assert numbers(record for _, record in shown) == list(range(10))
    Topic.open(path).close()  # nobody refers to it any more: its locks are free


@pytest.mark.parametrize("follow", [lambda group: group.follow(timeout=60), lambda group: group.batches(timeout=60)])
def test_loop_of_a_group_whose_topic_is_closed_is_no_finished_log(
    follow: Callable[[Group], Iterator[Any]], topic: Topic
) -> None:
    group = topic.group("etl")
    with pytest.raises(LogClosedError, match="open the topic again"):
        for _ in follow(group):
            topic.close()
    for call in (group.poll, lambda: next(follow(group))):
        with pytest.raises(LogClosedError):
            call()


def test_loop_without_a_timeout_just_ends_when_the_topic_is_closed(topic: Topic) -> None:
    """It has no other end, and so its end says it."""
    group = topic.group("etl")
    for _ in group.follow():
        topic.close()
    assert group.closed and list(group.follow()) == []


def test_positions_of_a_group_go_to_json_and_back(topic: Topic) -> None:
    with topic.group("etl") as group:
        assert take(group, 4) == [0, 1, 2, 3]
        told = json.loads(json.dumps(group.tell()))
        assert rest(group) == list(range(3, 10))
        group.seek(told)
        assert rest(group) == list(range(3, 10))
        for unknown in ("x", 1.5, True, None):
            with pytest.raises(TypeError, match="named by its number"):
                group.seek({unknown: 0})


@needs_proc
def test_closed_groups_leave_no_file_open(topic: Topic) -> None:
    with suppress(ImportError):
        import ctypes  # noqa: F401  # whose libraries stay open
    with topic.group("etl") as group:
        rest(group)
    before = open_files()
    for number in range(3):
        with topic.group(f"g{number}") as group:
            rest(group)
            group.lag(count_records=True)
        with pytest.raises(ValueError, match="is not a name"):
            topic.group("etl", member="a/b")
    assert open_files() == before


def test_forked_child_has_nothing_of_the_group(topic: Topic, path: Path) -> None:
    group = topic.group("etl", member="parent")
    loop = iter(group.follow(timeout=0.0))
    assert numbers([next(loop) for _ in range(3)]) == [0, 1, 2]

    def child() -> None:
        with pytest.raises(ForkedHandleError):
            next(loop)
        for call in (group.poll, group.commit, lambda: group.seek("begin")):
            with pytest.raises(ForkedHandleError):
                call()  # type: ignore[operator]
        group.close()  # which is allowed, and does nothing
        with Topic.open(path, mode="r") as reading, reading.group("etl", member="child") as own:
            assert own.members == ["child", "parent"]

    assert in_child(child) == 0
    assert group.members == ["parent"]
    assert numbers(loop) == [3, 4, 5, 6, 7, 8, 9]
    group.close()
    with topic.group("etl", member="parent") as group:
        assert rest(group) == []


def test_locks_of_a_closed_member_do_not_live_on_in_its_child(topic: Topic) -> None:
    group = topic.group("etl", member="parent")
    assert group.poll() != []
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    try:
        group.close()
        with topic.group("etl", member="parent") as again:
            assert again.poll() != []
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(ready)


# --- what happens at once ------------------------------------------------------------------------------


def test_batch_committed_by_hand_does_not_come_again(topic: Topic) -> None:
    with topic.group("etl", commit="manual") as group:
        for batch in group.batches(timeout=0.0):
            if batch.values == [b"3"]:
                group.commit()
                break
        assert rest(group) == [4, 5, 6, 7, 8, 9]


def test_commit_below_what_is_handled_leaves_that_to_be_committed(topic: Topic) -> None:
    with topic.group("etl", commit=3600) as group:
        assert rest(group) == list(range(10))
        group.commit({0: 0})
        assert committed_number(group) == -1
    with topic.group("etl") as group:
        assert rest(group) == []


def test_group_closed_just_as_its_records_come_hands_out_none(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    group = topic.group("etl")
    next_run = group._next

    def closed_meanwhile(*asked: Any) -> Any:
        run = next_run(*asked)
        group.close()
        return run

    monkeypatch.setattr(group, "_next", closed_meanwhile)
    assert rest(group) == []
    with topic.group("etl") as group:
        assert rest(group) == list(range(10))


def test_reader_of_a_topic_that_another_closes_ends_quietly(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    group = topic.group("etl")

    def closed_meanwhile(*_: Any) -> Any:
        group.close()
        raise LogClosedError("the topic was closed")

    monkeypatch.setattr(group._progress, "take", closed_meanwhile)
    assert rest(group) == []
    group = topic.group("etl")

    def closed_alone(*_: Any) -> Any:
        raise LogClosedError("something else was closed")

    monkeypatch.setattr(group._progress, "take", closed_alone)
    with group, pytest.raises(LogClosedError, match="something else"):
        rest(group)


def test_member_that_only_reads_is_woken(topic: Topic, path: Path) -> None:
    with Topic.open(path, mode="r") as reading, reading.group("etl", commit=3600) as group:
        assert len(rest(group)) == 10
        waiting = threading.Thread(target=lambda: found.extend(numbers(group.poll(timeout=60))))
        found: list[int] = []
        waiting.start()
        fill(topic, 1, first=10)
        waiting.join(60)
        assert found == [10]


def test_group_whose_making_fails_leaves_nothing(topic: Topic, path: Path) -> None:
    place = topic.place("etl", {})
    with pytest.raises(OSError, match="No space"):
        place._replace(files=FaultyFiles("rename", error=errno.ENOSPC)).make()
    assert list((path / "groups").iterdir()) == []


def test_group_that_two_make_at_once_is_made_once(topic: Topic, path: Path) -> None:
    class Racing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "mkdir" and call.file == "groups":
                place.make()

    place = topic.place("etl", {})
    place._replace(files=Racing()).make()
    assert [each.name for each in (path / "groups").iterdir()] == ["etl"]
    place.make()


def test_child_that_exits_normally_harms_nothing(path: Path) -> None:
    program = """
        import os, sys
        from loglib import ForkedHandleError, Topic
        topic = Topic.open(sys.argv[1])
        topic.append_many([b"%d" % number for number in range(10)])
        topic.flush()
        group = topic.group("etl", member="parent")
        for record in group.follow(timeout=0.0):
            if record.value == b"4" and os.fork() == 0:
                try:
                    next(group.follow())
                except ForkedHandleError:
                    sys.exit(0)  # with exit handlers, finalizers and all
        os.wait()
        print(group.members, group.assignment)
        group.close()
        print(len(topic.group("etl").poll()))
    """
    assert run_python(program, path).split("\n")[:2] == ["['parent'] [0]", "0"]


def test_group_whose_making_fails_at_once_says_why(topic: Topic) -> None:
    with pytest.raises(OSError, match="No space"):
        topic.place("etl", {})._replace(files=FaultyFiles("mkdir", at=2, error=errno.ENOSPC)).make()


def test_tell_in_the_middle_of_a_batch_is_the_next_record(open_topic: Opener) -> None:
    topic = open_topic(partitions=1)
    topic.append_many([b"%d" % number for number in range(100)])
    topic.flush()
    with topic.group("etl") as group:
        for record in group.follow(timeout=0.0):
            assert group.tell() == {0: record.next_offset}


@pytest.mark.parametrize(("took", "expected"), [(0.001, 128), (0.0075, 64), (0.011, 8)])
def test_runs_are_as_long_as_bodies_are_quick(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, took: float, expected: int
) -> None:
    with topic.group("etl") as group:
        progress = group._progress
        batch = next(iter(topic.batches()))
        run = progress.run = Run(TopicPartition("topic", 0), batch, "one by one")
        progress._run_length = 64
        monkeypatch.setattr(run, "seconds", lambda: took)
        progress.leave(run, came_back=False)
        assert progress._run_length == expected


@pytest.mark.parametrize("ask", [lambda group: group.poll(), lambda group: next(group.follow(timeout=0.0))])
def test_batch_that_a_loop_still_holds_is_not_handled_when_somebody_asks_for_more(
    topic: Topic, ask: Callable[[Group], Any]
) -> None:
    with topic.group("etl") as group:
        loop = group.batches(timeout=0.0)
        held = next(loop)
        asked = ask(group)
        first = asked[0] if isinstance(asked, list) else asked
        assert first.offset == held.offsets.start


def test_batch_of_a_lost_partition_is_left_without_an_error(topic: Topic) -> None:
    group = topic.group("etl", member="hung")
    loop = group.batches(timeout=0.0)
    next(loop)  # type: ignore[call-overload]
    loglib.evict_member(topic, "etl", "hung")
    with pytest.raises(StaleGenerationError):
        group.poll()
    loop.close()  # type: ignore[attr-defined]
    group.close()


def test_member_that_is_evicted_while_it_waits_can_be_closed(topic: Topic) -> None:
    with topic.group("etl", member="hung") as group:
        assert len(rest(group)) == 10
        assert group.poll(timeout=0.01) == []
        loglib.evict_member(topic, "etl", "hung")
    with topic.group("etl") as group:
        assert rest(group) == []


# --- another log at the place of the one committed to ---------------------------------------------------


def test_topic_deleted_and_made_again_is_not_read_from_where_the_old_one_was_left(
    open_topic: Opener, tmp_path: Path
) -> None:
    clicks, views = open_topic(tmp_path / "clicks", partitions=1), open_topic(tmp_path / "views", partitions=1)
    fill(views, 100)
    with loglib.group([clicks, views], "etl") as group:
        assert len(list(group.follow(timeout=0.0))) == 100
    views.close()
    shutil.rmtree(tmp_path / "views")
    views = open_topic(tmp_path / "views", partitions=1)
    fill(views, 150, first=1000)
    with loglib.group([clicks, views], "etl") as group:
        assert group.lag(count_records=True)["views", 0].records == 150
        for _ in range(2):
            with pytest.raises(LogReplacedError, match="views-0 is not the log of which offset") as caught:
                group.poll()
        assert caught.value.partition == "views-0" and group.assignment == []
    with loglib.group([clicks, views], "etl", on_out_of_range="start") as group:
        assert [int(record.value) for _, record in group.follow(timeout=0.0)] == list(range(1000, 1150))
    with loglib.group([clicks, views], "etl") as group:
        assert group.poll() == []


def test_partition_restored_from_a_backup_and_grown_on_is_not_read_from_the_old_place(
    open_topic: Opener, topic: Topic, path: Path, tmp_path: Path
) -> None:
    topic.flush()
    backup = crash_copy(path / "0000", tmp_path / "backup")
    fill(topic, 10, first=10)
    with topic.group("etl") as group:
        assert len(rest(group)) == 20
    topic.close()
    crash_copy(backup, path / "0000")
    topic = open_topic()
    fill(topic, 30, first=100)
    with topic.group("etl") as group, pytest.raises(LogReplacedError, match="had CRC"):
        group.poll()
    loglib.reset_group(topic, "etl", {0: next_offset(topic, 9)})
    with topic.group("etl") as group:
        assert rest(group) == list(range(100, 130))


def test_backup_with_all_that_was_committed_is_read_on(open_topic: Opener, topic: Topic, path: Path) -> None:
    with topic.group("etl") as group:
        for record in group.follow(timeout=0.0):  # in the midst of a batch, at its border, at the end
            if record.value == b"6":
                break
    topic.close()
    backup = crash_copy(path / "0000", path.parent / "backup")
    topic = open_topic()
    fill(topic, 10, first=10)
    topic.close()
    crash_copy(backup, path / "0000")
    topic = open_topic()
    fill(topic, 2, first=100)
    with topic.group("etl") as group:
        assert rest(group) == [6, 7, 8, 9, 100, 101]


def test_commit_in_the_midst_of_a_batch_is_gone_on_from(open_topic: Opener) -> None:
    topic = open_topic(partitions=1)
    topic.append_many([b"%d" % number for number in range(10)])
    topic.flush()
    with topic.group("etl") as group:
        assert take(group, 4) == [0, 1, 2, 3]
    with topic.group("etl") as group:
        assert rest(group) == [3, 4, 5, 6, 7, 8, 9]


# --- settings that differ -------------------------------------------------------------------------------


def test_member_with_another_strategy_is_refused_by_name(topic: Topic) -> None:
    with topic.group("etl", member="web-1"):
        with pytest.raises(GroupMismatchError, match="member web-1 has strategy='range', this one 'sticky'"):
            topic.group("etl", strategy="sticky")
        with topic.group("etl") as other:
            assert other.members == sorted([other.member, "web-1"])
    with topic.group("etl", strategy="sticky") as group:
        assert rest(group) == list(range(10))


@pytest.mark.parametrize("strategy", ["range", "sticky"])
def test_members_with_other_topics_leave_no_partition_without_an_owner(
    open_topic: Opener, tmp_path: Path, strategy: Any
) -> None:
    clicks, views = (open_topic(tmp_path / name, partitions=4) for name in ("clicks", "views"))
    with ExitStack() as stack:
        old = [stack.enter_context(clicks.group("etl", member=f"b{n}", strategy=strategy)) for n in range(2)]
        rebalance(*old)
        both = [clicks, views]
        new = [stack.enter_context(loglib.group(both, "etl", member=f"a{n}", strategy=strategy)) for n in range(2)]
        rebalance(*old, *new)
        rebalance(*old, *new)
        owned = [("clicks", number) for each in old for number in each.assignment]
        owned += [tuple(each) for member in new for each in member.assignment]
        assert sorted(owned) == [(name, number) for name in ("clicks", "views") for number in range(4)]


def test_group_of_several_topics_is_found_from_any_of_them_or_refused_by_name(
    two_topics: tuple[Topic, Topic], tmp_path: Path
) -> None:
    clicks, views = two_topics
    with loglib.group([clicks, views], "etl") as group:
        assert group.poll() != []
    asked: list[Callable[[], Any]] = [
        lambda: views.group("etl"), lambda: loglib.reset_group(views, "etl", "begin"),
        lambda: loglib.reset_group(views, "etl", "begin", dry_run=True),
        lambda: loglib.evict_member(views, "etl", "web"), lambda: loglib.group([views, clicks], "etl"),
    ]  # fmt: skip
    for call in asked:
        with pytest.raises(GroupElsewhereError, match="group etl is kept with topic clicks") as caught:
            call()
        assert caught.value.topic == "clicks" and caught.value.path == str(tmp_path / "views/groups/etl")
    with views.group("audit") as group:
        assert rest(group) == [0, 1, 2]
    with pytest.raises(GroupElsewhereError, match="group audit is kept with topic views"):
        loglib.group([clicks, views], "audit")
    (tmp_path / "views/groups/etl").write_text("{")
    with pytest.raises(GroupElsewhereError, match="with topic another"):
        views.group("etl")


def test_reset_of_a_group_on_several_topics_moves_all_of_them(two_topics: tuple[Topic, Topic]) -> None:
    with loglib.group(two_topics, "etl") as group:
        assert len(list(group.follow(timeout=0.0))) == 9
    moves = loglib.reset_group(two_topics, "etl", {("views", 0): 0})
    assert list(moves) == [TopicPartition("views", 0)]
    with loglib.group(two_topics, "etl") as group:
        found = [(name, int(record.value)) for name, record in group.follow(timeout=0.0)]
        assert found == [("views", number) for number in range(3)]
    assert len(loglib.reset_group(two_topics, "etl", "begin")) == 3
    with loglib.group(two_topics, "etl") as group:
        assert len(list(group.follow(timeout=0.0))) == 9


def test_place_that_cannot_be_told_in_another_topics_directory_is_reported(
    two_topics: tuple[Topic, Topic], caplog: pytest.LogCaptureFixture
) -> None:
    clicks, views = two_topics
    place = clicks.place("etl", two_topics)
    with pytest.raises(OSError, match="No space"):
        place._replace(files=FaultyFiles("rename", at=4, error=errno.ENOSPC)).make()

    class ReadOnly(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "create" and str(views.path) in call.path:
                raise OSError(errno.EROFS, "Read-only file system")

    place._replace(files=ReadOnly()).make()
    assert "cannot say that group etl is with topic clicks" in caplog.text


# --- calls in the midst of others -----------------------------------------------------------------------


def test_commit_in_a_signal_handler_is_an_error_at_once_or_works(topic: Topic) -> None:
    """At whatever instruction of another commit: nothing of it is lost, and nothing is written elsewhere."""

    class Interrupting(WatchedFiles):
        def before(self, call: Call) -> None:
            if busy:
                busy.clear()
                with pytest.raises(LogError, match="in the middle of another call"):
                    group.commit({0: next_offset(topic, 8)})
                refused.append(call.name)

    busy: list[int] = []
    refused: list[str] = []
    files = Interrupting()
    with Topic.open(topic.path, mode="r", files=files) as reading, reading.group("etl", commit="manual") as group:
        assert len(rest(group)) == 10
        for number in range(6):
            busy.append(number)
            group.commit({0: next_offset(topic, number)})
            assert committed_number(group) == number
        assert len(refused) == 6 and not busy
        for call in (group.poll, lambda: next(group.follow()), group.lag, lambda: group.seek("begin")):
            asked: list[bool] = []

            def handler(*_: Any, call: Any = call, asked: Any = asked) -> None:
                with pytest.raises(LogError, match="in the middle of another call"):
                    call()
                asked.append(True)

            with monkeypatched(files, "before", handler):
                group.commit({0: 0})
            assert asked


@contextmanager
def monkeypatched(files: Any, name: str, function: Callable[..., None]) -> Iterator[None]:
    """Have a method called once in place of its own."""
    original = getattr(files, name)

    def once(*arguments: Any) -> None:
        setattr(files, name, original)
        function(*arguments)

    setattr(files, name, once)
    try:
        yield
    finally:
        setattr(files, name, original)


def test_close_in_the_midst_of_a_call_closes_when_that_returns(topic: Topic) -> None:
    class Closing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "datasync" and closing:
                closing.clear()
                group.close()

    closing: list[bool] = []
    with Topic.open(topic.path, mode="r", files=Closing()) as reading:
        group = reading.group("etl", commit="manual")
        assert len(rest(group)) == 10
        closing.append(True)
        group.commit()
        assert group.closed and group.assignment == []
    with topic.group("etl") as group:
        assert rest(group) == []


def test_sigterm_ends_a_loop_that_waits_on_a_quiet_topic(topic: Topic, path: Path) -> None:
    """Under a handler that sets a flag it waited on: Python goes on with the wait when the handler has returned."""
    program = """
        import os, signal, sys, threading
        from loglib import Topic
        with Topic.open(sys.argv[1], mode="r") as topic, topic.group("etl", commit=3600) as group:
            signal.signal(signal.SIGTERM, lambda *_: group.close())
            for record in group.follow():
                print(record.value.decode())
                if record.value == b"9":
                    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            print("ended", group.closed)
    """
    assert run_python(program, path).split() == [*map(str, range(10)), "ended", "True"]
    with topic.group("etl") as group:
        assert rest(group) == []  # what was handled is committed, long before the interval was over


def test_listener_that_asks_for_records_is_refused(topic: Topic) -> None:
    group = topic.group("etl", on_assign=lambda _: group.poll())
    with group, pytest.raises(LogError, match="in a listener nothing that gives records"):
        group.poll()


def test_listener_that_raised_is_told_again_before_any_record(topic: Topic) -> None:
    told: list[Any] = []

    def seek_after_a_failure(partitions: list[int]) -> None:
        told.append(partitions)
        if len(told) < 3:
            raise RuntimeError("not yet")
        group.seek(dict.fromkeys(partitions, next_offset(topic, 7)))

    with topic.group("etl", on_assign=seek_after_a_failure) as group:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="not yet"):
                group.poll()
        assert rest(group) == [8, 9]
        assert told == [[0]] * 3


def test_commit_after_the_place_was_lost_says_so_until_records_are_asked_for(open_topic: Opener, path: Path) -> None:
    topic = open_topic(partitions=2)
    group = topic.group("etl", member="hung", commit="manual")
    rebalance(group)
    os.replace(path / "groups/etl/owners/topic-0", path / "groups/etl/owners/aside")
    with pytest.raises(StaleGenerationError, match="topic-0"):
        group.poll()
    for _ in range(2):
        with pytest.raises(StaleGenerationError, match="topic-0"):
            group.commit()
    assert group.poll() == []
    group.commit()
    loglib.evict_member(topic, "etl", "hung")
    with pytest.raises(StaleGenerationError, match="was evicted"):
        group.commit()
    with pytest.raises(StaleGenerationError, match="was evicted"):
        group.poll()
    with pytest.raises(StaleGenerationError, match="was evicted"):
        group.commit()
    group.close()


@pytest.mark.parametrize("meta", [None, 5, b"x"])
def test_meta_that_is_no_text_is_refused(topic: Topic, meta: Any) -> None:
    with topic.group("etl") as group:
        assert take(group, 1) == [0]
        with pytest.raises(TypeError, match="meta must be text"):
            group.commit(meta=meta)
        assert group.committed() == {}


def test_meta_of_the_last_commit_outlives_its_owner(topic: Topic, clock: Clock) -> None:
    with topic.group("etl", commit="manual", member="m") as group:
        assert take(group, 3) == [0, 1, 2]
        group.commit(meta="page 7")
        before = group.committed()[0]
    clock.now += SECOND
    with topic.group("etl", commit="manual") as group:
        assert group.poll() != []
        assert group.committed()[0] == before._replace(generation=2)


# --- files and descriptors ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
def test_running_out_of_descriptors_says_so_and_leaves_nothing_owned(topic: Topic, error: int) -> None:
    files = FaultyFiles("create", error=error, armed=False)
    with Topic.open(topic.path, mode="r", files=files) as reading, reading.group("etl") as group:
        files.armed = True
        with pytest.raises(StorageIOError, match="claiming 1 partitions, each with an open file; raise the limit"):
            group.poll()
        assert group.assignment == [] and files.failed == 1
        assert rest(group) == list(range(10))


@needs_proc
def test_descriptors_are_one_for_each_partition_and_some(path: Path) -> None:
    """A thousand partitions would be two or three thousand files otherwise, which is more than a process may open."""
    program = """
        import os, resource, sys
        from loglib import FlushPolicy, StorageIOError, Topic
        with Topic.open(sys.argv[1], partitions=150, durability="os", shared=True) as topic:
            pass
        for number in range(0, 150, 7):
            with Topic.open(sys.argv[1], shared=True) as topic:
                topic.append(b"%d" % number, partition=number, sync=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (270, 270))
        with Topic.open(sys.argv[1], mode="r") as topic:
            with topic.group("etl") as group:
                print(sorted(int(record.value) for record in group.follow(timeout=0.0)) == list(range(0, 150, 7)))
                print(len(group.assignment), 150 < len(os.listdir("/proc/self/fd")) < 150 + 80)
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 270))
            with topic.group("etl") as group:
                for _ in range(2):
                    try:
                        group.poll()
                    except StorageIOError as error:
                        print(group.assignment, "raise the limit (ulimit -n)" in str(error))
            resource.setrlimit(resource.RLIMIT_NOFILE, (270, 270))
            with topic.group("etl") as group:
                print(group.poll(), len(group.assignment))
    """
    assert run_python(program, path).splitlines() == ["True", "150 True", "[] True", "[] True", "[] 150"]


def rare_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members look at each other when something is reported, and not again for a minute."""
    monkeypatch.setattr(group_module, "_LOOK_S", 60.0)


def test_member_that_waits_for_a_busy_one_is_told_when_that_gives_up(
    open_topic: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare_looks(monkeypatch)
    topic = open_topic(partitions=2)
    fill(topic, 2)
    with topic.group("etl", member="a") as busy, ExitStack() as stack:
        assert numbers(busy.poll(timeout=10)) == [0]
        waiting = stack.enter_context(topic.group("etl", member="b"))
        looks: list[int] = []
        look = waiting._membership.live
        monkeypatch.setattr(waiting._membership, "live", lambda: [looks.append(1), look()][1])
        assert waiting.poll(timeout=1.0) == [] and waiting.assignment == []
        assert 0 < len(looks) <= 2 * len(group_module._LOOKS_S)  # and not one each 2 ms
        giving_up = threading.Timer(0.2, rest, [busy])
        giving_up.start()
        assert numbers(waiting.poll(timeout=30)) == [1]
        giving_up.join()
        assert (busy.assignment, waiting.assignment) == ([0], [1])


@pytest.mark.parametrize("strategy", ["range", "sticky"])
def test_idle_member_is_told_when_others_come_and_go_and_die(
    open_topic: Opener, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    rare_looks(monkeypatch)
    topic = open_topic(partitions=4)
    with topic.group("etl", member="a", strategy=strategy) as idle:
        asked = threading.Event()

        def follow() -> None:
            with pytest.raises(StaleGenerationError):
                for _ in idle.follow():
                    asked.set()

        thread = threading.Thread(target=follow)
        thread.start()
        wait_for(lambda: idle.assignment == [0, 1, 2, 3])
        with topic.group("etl", member="b", strategy=strategy) as other:
            wait_for(lambda: other.poll(timeout=0.01) == [] and len(other.assignment) == 2)
            assert len(idle.assignment) == 2
        wait_for(lambda: len(idle.assignment) == 4)
        dying = topic.group("etl", member="c", strategy=strategy)
        wait_for(lambda: dying.poll(timeout=0.01) == [] and len(dying.assignment) == 2)
        die(dying)
        wait_for(lambda: len(idle.assignment) == 4)
        fill(topic, 1)
        assert asked.wait(30)
        loglib.evict_member(topic, "etl", "a")
        thread.join(30)
        assert not thread.is_alive()

        def is_told() -> bool:
            with pytest.raises(StaleGenerationError) as told:  # first, perhaps, of a partition that it could not commit
                idle.poll()
            return "was evicted" in str(told.value)

        wait_for(is_told)
        assert idle.assignment == []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_evicted_owner_is_told_at_once(open_topic: Opener, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rare_looks(monkeypatch)
    topic = open_topic(partitions=2)
    with topic.group("etl", member="a") as group:
        assert group.poll(timeout=0.4) == []
        evict_owner(REAL, str(path / "groups/etl/owners"), TopicPartition("topic", 1), 0o600)
        with pytest.raises(StaleGenerationError, match="topic-1"):
            group.poll(timeout=30)


@pytest.mark.parametrize("strategy", ["range", "sticky"])
def test_group_without_reports_of_the_system_works_all_the_same(
    open_topic: Opener, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    monkeypatch.setattr(wait_module.sys, "platform", "plan9")
    monkeypatch.setattr(group_module, "_LOOK_S", 2.0)
    topic = open_topic(partitions=2)
    with topic.group("etl", member="a", strategy=strategy) as a, topic.group("etl", member="b", strategy=strategy) as b:
        assert not a._observer.reports
        wait_for(lambda: a.poll() == b.poll() == [] and a.assignment == [0] and b.assignment == [1])
        fill(topic, 2)
        assert (numbers(a.poll(timeout=30)), numbers(b.poll(timeout=30))) == ([0], [1])
        threading.Timer(0.05, fill, [topic, 1], {"first": 2}).start()
        assert numbers(a.poll(timeout=30)) == [2]


def test_many_idle_partitions_are_not_looked_at(open_topic: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_MOST_OPEN", 2)
    rare_looks(monkeypatch)
    topic = open_topic(partitions=20)
    files = RecordingFiles()
    with Topic.open(topic.path, mode="r", files=files) as reading, reading.group("etl") as group:
        assert group.poll(timeout=0.5) == []
        files.calls.clear()
        assert group.poll(timeout=0.5) == []
        assert files.calls == []
        fill(topic, 60)
        assert sorted(rest(group)) == list(range(60))
        fill(topic, 1, first=60)
        files.calls.clear()
        assert numbers(group.poll(timeout=30)) == [60]
        assert {call.path.split("/")[-2] for call in files.calls if call.name == "open_read"} <= {"0000"}


# --- other users ----------------------------------------------------------------------------------------


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    """Where processes of all users may come."""
    for each in (tmp_path, *tmp_path.parents):
        if each.is_relative_to("/tmp") and each != Path("/tmp"):
            each.chmod(0o755)
    return tmp_path / "topic"


def as_user(uid: int, action: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        os.setgid(1000)
        os.setuid(uid)
        action()

    return act


@needs_root
def test_process_of_another_user_does_not_end_the_work_of_a_consumer(shared_path: Path) -> None:
    def own() -> None:
        with Topic.open(shared_path, partitions=2, **QUIET) as topic:
            fill(topic, 2)
            with topic.group("etl", member="healthy") as group:
                assert sorted(rest(group)) == [0, 1]

                def root() -> None:
                    with Topic.open(shared_path, mode="r") as reading:
                        intruder = reading.group("etl", member="root")
                        assert set(intruder.lag()) == {0, 1} and rest(intruder) == []
                        os.kill(os.getpid(), signal.SIGKILL)

                child = os.fork()
                if not child:
                    os.setresuid(0, 0, 0)
                    root()
                deadline = time.monotonic() + 30
                fill(topic, 2, first=2)
                seen: list[int] = []
                while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                    seen += numbers(group.poll(timeout=0.01))
                seen += rest(group)
                assert set(seen) <= {2, 3} and group.members == ["healthy"]  # root may have handled the others
                fill(topic, 2, first=4)
                wait_for(lambda: group.poll() is not None and group.assignment == [0, 1])
                assert {each.offset for each in group.committed().values()} != {0}

    def unprivileged() -> None:
        os.setgid(1000)
        os.setresuid(1000, 1000, 0)  # so that a child may be root again
        own()

    shared_path.parent.chmod(0o777)
    assert in_child(unprivileged) == 0


@needs_root
def test_members_of_several_users_take_over_from_each_other(shared_path: Path) -> None:
    shared_path.parent.chmod(0o777)
    with Topic.open(shared_path, partitions=1, permissions=0o666, **QUIET) as topic:
        fill(topic, 4)

    def handle_one_and_die() -> None:
        with Topic.open(shared_path, mode="r") as topic:
            group = topic.group("etl", member="worker")
            (record,) = group.poll(max_records=1)
            group.commit(record)
            assert record.value == b"%d" % (os.getuid() % 10)
            os.kill(os.getpid(), signal.SIGKILL)

    old = os.umask(0o077)
    try:
        for uid in (1000, 1001, 1002):
            assert in_child(as_user(uid, handle_one_and_die)) == -signal.SIGKILL
    finally:
        os.umask(old)
    with Topic.open(shared_path, mode="r") as topic, topic.group("etl", member="worker") as group:
        assert rest(group) == [3]


@needs_root
def test_members_of_a_topic_with_narrow_permissions_follow_each_other(shared_path: Path) -> None:
    """root's commits count for the topic's own user, who may read and not write what root has left."""
    shared_path.parent.chmod(0o777)

    def handle(number: int) -> Callable[[], None]:
        def act() -> None:
            with Topic.open(shared_path, mode="r") as topic:
                group = topic.group("etl", member="worker")
                (record,) = group.poll(max_records=1)
                group.commit(record)
                assert record.value == b"%d" % number
                os.kill(os.getpid(), signal.SIGKILL)

        return act

    def make() -> None:
        with Topic.open(shared_path, partitions=1, **QUIET) as topic:
            fill(topic, 4)

    assert in_child(as_user(1000, make)) == 0
    for number, uid in enumerate((1000, 0, 1000, 0)):
        assert in_child(as_user(uid, handle(number))) == -signal.SIGKILL, number


@needs_root
def test_process_without_rights_is_refused_and_disturbs_nobody(shared_path: Path) -> None:
    with Topic.open(shared_path, partitions=1, permissions=0o644, **QUIET) as topic, topic.group("etl") as group:
        fill(topic, 1)

        def intrude() -> None:
            with Topic.open(shared_path, mode="r") as reading, pytest.raises(PermissionError):
                reading.group("etl")

        assert in_child(as_user(1001, intrude)) == 0
        assert rest(group) == [0]


@pytest.mark.parametrize("umask", [0, 0o077])
@pytest.mark.parametrize("permissions", [0o600, 0o660])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int, permissions: int) -> None:
    old = os.umask(umask)
    try:
        with Topic.open(tmp_path / "data/here/topic", partitions=1, permissions=permissions, **QUIET) as topic:
            fill(topic, 2)
            with topic.group("etl", member="m") as group:
                assert rest(group) == [0, 1]
                modes = {
                    str(each.relative_to(tmp_path)): stat.S_IMODE(each.stat().st_mode) for each in tmp_path.rglob("*")
                }
    finally:
        os.umask(old)
    directory = permissions | (permissions & 0o444) >> 2
    for name, mode in modes.items():
        inside = name.partition("groups/etl/")[2]
        file, tree = permissions, directory
        if "/" in inside:  # guarded by the directory above, and to be read by all who come in
            file, tree = permissions | 0o444, directory | 0o555
        assert mode == (tree if (tmp_path / name).is_dir() or name.endswith("offsets") else file), name


def test_partition_that_another_claims_just_then_is_waited_for(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    with topic.group("etl") as group:
        with monkeypatch.context() as patched:
            patched.setattr(Ownership, "claim", lambda *_, **__: False)
            assert group.poll() == [] and group.assignment == []
        assert rest(group) == list(range(10))
