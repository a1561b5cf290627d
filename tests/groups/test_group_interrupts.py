"""Ctrl-C in a group, at every line: no lock is left behind, and nothing is committed that was not handled."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from interrupts import Interrupter, every_line

from conftest import UnsyncedFiles
from loglib import Group, Topic
from loglib.groups import group as group_module
from loglib.groups import members, membership, offsets

pytestmark = [
    pytest.mark.slow,
    # An interrupt in a finalizer is printed and forgotten, by the interpreter as well.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*was not closed:ResourceWarning"),
]

HANDLED = 3  # of the ten records in partition 0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds a lock that somebody has left behind says so, and does not wait for it."""
    monkeypatch.setattr(members, "_JOIN_TRIES", 3)
    monkeypatch.setattr(offsets, "_OPEN_TRIES", 3)
    monkeypatch.setattr(membership, "_LOOK_S", 0.0)
    monkeypatch.setattr(group_module, "_COMMIT_AFTER_S", 0.0)


@pytest.fixture
def topic(open_topic: Callable[..., Topic]) -> Topic:
    topic = open_topic(partitions=2, durability="os", files=UnsyncedFiles())
    for number in range(10):
        topic.append(b"%d" % number, partition=0)
        topic.flush()
    return topic


def joined(topic: Topic, name: str, member: str = "m") -> Group:
    return topic.group(name, member=member)


def with_some_handled(topic: Topic, name: str) -> Group:
    """A member that has handled some records, of which the last is not yet committed."""
    group = joined(topic, name)
    for _ in range(HANDLED + 1):
        group.poll(max_records=1)
    return group


def beside_another(topic: Topic, name: str) -> Group:
    """A member that has to give up partition 1."""
    group = with_some_handled(topic, name)
    others.append(joined(topic, name, "other"))
    return group


def was_interrupted(interrupter: Interrupter, call: Callable[[], Any]) -> bool:
    try:
        interrupter.run(call)
    except KeyboardInterrupt:
        return True
    return False


others: list[Group] = []

# What is interrupted, of a member that has come how far.
ACTIONS: dict[str, tuple[Callable[[Topic, str], Group], Callable[[Group], Any]]] = {
    "joining, looking and claiming": (joined, lambda group: group.poll(max_records=1)),
    "committing": (with_some_handled, lambda group: group.commit({0: _place(group)})),
    "releasing": (beside_another, lambda group: group.poll(max_records=1)),
    "closing": (with_some_handled, Group.close),
    "closing beside another": (beside_another, Group.close),
}


def _place(group: Group) -> int:
    return group.tell()[0]


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    while others:
        others.pop().close()


@pytest.mark.parametrize("action", ACTIONS)
def test_interrupt_leaves_no_lock_and_commits_nothing_unhandled(topic: Topic, action: str) -> None:
    prepare, call = ACTIONS[action]
    places = [0, *(record.next_offset for record in topic.partition(0).read())]
    tried = 0

    def once(interrupter: Interrupter) -> bool:
        nonlocal tried
        tried += 1
        name = f"g{tried}"
        group = prepare(topic, name)
        interrupted = was_interrupted(interrupter, partial(call, group))
        group.close()
        while others:
            others.pop().close()
        with joined(topic, name) as again:
            record = again.poll(max_records=1)[0]
            assert again.assignment == [0, 1], interrupter.where
            assert record.offset in places[: HANDLED + 2], interrupter.where
            again.commit(record)
        return interrupted

    assert len(list(every_line(once))) > 20


def test_interrupted_join_leaves_no_member(topic: Topic) -> None:
    tried = 0

    def once(interrupter: Interrupter) -> bool:
        nonlocal tried
        tried += 1
        interrupted = was_interrupted(interrupter, lambda: joined(topic, f"g{tried}").close())
        with joined(topic, f"g{tried}") as again:
            assert again.members == ["m"], interrupter.where
        return interrupted

    assert len(list(every_line(once))) > 20


def poll(group: Group, got: list[bytes | None]) -> None:
    got += [record.value for record in group.poll(max_records=3)]
    got += [record.value for record in group.poll(max_records=3)]


def follow(group: Group, got: list[bytes | None]) -> None:
    for record in group.follow(timeout=0.0):
        got.append(record.value)
        if len(got) > 5:
            break


def batches(group: Group, got: list[bytes | None]) -> None:
    for batch in group.batches(timeout=0.0):
        got += batch.values
        if len(got) > 5:
            break


@pytest.mark.parametrize("read", [poll, follow, batches])
def test_group_used_on_after_an_interrupt_passes_nothing_over(
    topic: Topic, read: Callable[[Group, list[bytes | None]], None]
) -> None:
    expected = [record.value for record in topic.read()]
    tried = 0

    def once(interrupter: Interrupter) -> bool:
        nonlocal tried
        tried += 1
        group, got = joined(topic, f"r{tried}"), list[bytes | None]()
        interrupted = was_interrupted(interrupter, partial(read, group, got))
        got += [record.value for record in group.follow(timeout=0.0)]
        assert list(dict.fromkeys(got)) == expected, interrupter.where
        group.close()
        return interrupted

    assert len(list(every_line(once))) > 50
