"""Who may do what to a copy: one table, in the code, in docs/copies.md, and tried here cell by cell."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import loglib
from conftest import ROOT, alter, fill
from loglib import LogError, NotLeaderError, Retention, Topic
from loglib.log import copy_role
from loglib.log.copy_role import LEADER, MIRROR, REPLICA, ROLES, SNAPSHOT, SUPERSEDED, TIER, Action

Operation = Callable[[Path], object]
COLUMNS = {
    LEADER: "topic", MIRROR: "mirror", SNAPSHOT: "snapshot", SUPERSEDED: "superseded topic", REPLICA: "replica",
    TIER: "place of `tier`",
}  # fmt: skip


def content(path: Path) -> dict[str, bytes | None]:
    """Everything in a directory by its name; None for a directory."""
    return {
        str(each.relative_to(path)): None if each.is_dir() else each.read_bytes() for each in sorted(path.rglob("*"))
    }


def made(root: Path, role: str) -> Path:
    """A directory with this role, with records and the group "copied"."""
    path, to = root / "original" / "orders", root / role / "orders"
    other = root / "disk2" / "orders"
    disks = {"replicas": [other]} if role == REPLICA else {}
    with Topic.open(
        path, create=True, partitions=2, retention=Retention(age=None, bytes=0), **disks  # type: ignore[arg-type]
    ) as topic:
        fill(topic, 3, partition=0)
        fill(topic, 3, partition=1)
        with topic.group("copied", commit="manual") as group:
            group.poll(timeout=0)
            group.commit()
        if role != REPLICA:
            for each in topic.partitions:
                each.roll()
            fill(topic, 1, partition=0)
        if role == TIER:
            loglib.offload.tier(topic, to)
    if role == MIRROR:
        loglib.copies.mirror(path, to)
    if role == SNAPSHOT:
        loglib.copies.snapshot(path, to)
    if role == SUPERSEDED:
        loglib.copies.mirror(path, root / "successor" / "orders")
        loglib.copies.promote(root / "successor" / "orders")
    return {LEADER: path, SUPERSEDED: path, REPLICA: other}.get(role, to)


def other_copy(path: Path) -> Path:
    """A directory with the same log as the one that was made."""
    successor, original = (path.parent.parent / each / "orders" for each in ("successor", "original"))
    found = successor if successor.exists() else original
    if found == path:
        found = path.parent.parent / "other" / "orders"
        if not found.exists():
            loglib.copies.snapshot(path, found)
    return found


def reading(use: Callable[[Topic], object]) -> Operation:
    def go(path: Path) -> None:
        with Topic.open(path, mode="r") as topic:
            use(topic)

    return go


def join(name: str) -> Operation:
    def use(topic: Topic) -> None:
        with topic.group(name, commit="manual") as group:
            group.poll(timeout=0)
            group.commit()

    return reading(use)


def transact(topic: Topic) -> None:
    with loglib.transaction(app="app") as work:
        work.append(topic, b"in a transaction", partition=0)


def commit(topic: Topic) -> None:
    with topic.group("own", commit="manual") as group, loglib.transaction(app="app") as work:
        group.poll(timeout=0)
        work.commit(group)


def evict(topic: Topic) -> None:
    try:
        topic.evict_member("copied", "nobody")
    except NotLeaderError:
        raise
    except LogError:
        pass  # there is no such member, and it would have been evicted


OPERATIONS: dict[Action, dict[str, Operation]] = {
    copy_role.READ: {"read": reading(lambda topic: list(topic.read()))},
    copy_role.APPEND: {
        "open": lambda path: Topic.open(path, create=True).close(),
        "open shared": lambda path: Topic.open(path, shared=True).close(),
        "add partitions": lambda path: Topic.add_partitions(path, 3),
        "reconfigure": lambda path: alter(path, segment_bytes=1 << 20),
    },
    copy_role.TRANSACT: {"append": reading(transact)},
    copy_role.JOIN: {
        "join": join("own"),
        "reset": reading(lambda topic: topic.reset_group("own", "begin")),
    },
    copy_role.JOIN_COPIED: {
        "join": join("copied"),
        "reset": reading(lambda topic: topic.reset_group("copied", "begin")),
        "delete": reading(lambda topic: topic.delete_group("copied")),
        "evict": reading(evict),
    },
    copy_role.REPAIR: {"repair": loglib.repair},
    copy_role.HEAL: {"heal": lambda path: loglib.copies.heal(path, [other_copy(path)])},
    copy_role.FOLLOW: {"mirror": lambda path: loglib.copies.mirror(other_copy(path), path)},
    copy_role.DEMOTE: {"demote": lambda path: loglib.copies.mirror(other_copy(path), path, demote=True)},
    copy_role.PROMOTE: {"promote": loglib.copies.promote},
    copy_role.FORCE: {"promote": lambda path: loglib.copies.promote(path, force=True)},
    copy_role.UPLOAD: {"tier": reading(lambda topic: loglib.offload.tier(topic, Path(topic.path).parent / "uploaded"))},
    copy_role.ARCHIVE: {
        "archive": reading(lambda topic: loglib.offload.archive(topic, Path(topic.path).parent / "archived")),
    },
    copy_role.DELETE: {"delete": Topic.delete},
}
CASES = [
    pytest.param(role, action, operation, id=f"{role}-{copy_role.ACTIONS.index(action)}-{name}")
    for role in ROLES
    for action, operations in OPERATIONS.items()
    for name, operation in operations.items()
    if (role, action, name) != (TIER, copy_role.JOIN_COPIED, "delete")  # no group was copied there
]


@pytest.mark.parametrize(("role", "action", "operation"), CASES)
def test_each_cell_of_the_table_is_what_happens(
    tmp_path: Path, role: str, action: Action, operation: Operation
) -> None:
    path = made(tmp_path, role)
    if action in (copy_role.HEAL, copy_role.FOLLOW, copy_role.DEMOTE):
        other_copy(path)
    before = content(tmp_path)
    if role in action.roles:
        operation(path)
    else:
        with pytest.raises(LogError, match=re.escape(str(path.parent))) as caught:
            operation(path)
        assert action in (copy_role.FOLLOW, copy_role.DEMOTE) or isinstance(caught.value, NotLeaderError)
        assert content(tmp_path) == before


def test_every_action_is_tried() -> None:
    assert set(OPERATIONS) == set(copy_role.ACTIONS)


def test_the_page_has_the_table_of_the_code() -> None:
    page = (ROOT / "docs" / "copies.md").read_text("utf-8")
    part = page.split("\n## Who may do what\n")[1].partition("\n## ")[0]
    rows = [line.strip("| \n").split(" | ") for line in part.splitlines() if "|" in line]
    assert rows[0] == ["to", *COLUMNS.values()]
    assert {each[0]: each[1:] for each in rows[2:]} == {
        action.words: ["yes" if role in action.roles else "no" for role in COLUMNS] for action in copy_role.ACTIONS
    }


@pytest.mark.parametrize("role", [MIRROR, SUPERSEDED, SNAPSHOT])
def test_commits_of_a_copys_own_group_take_part_in_no_transaction(tmp_path: Path, role: str) -> None:
    path = made(tmp_path, role)
    with pytest.raises(NotLeaderError):
        reading(commit)(path)
    assert not os.path.exists(path.parent / ".transactions")
    assert not os.path.exists(path / "transactions.json")


def test_transaction_is_not_committed_to_a_topic_that_was_superseded_meanwhile(tmp_path: Path) -> None:
    """It was committed, never applied, and in the way of all later ones."""
    path, copy = made(tmp_path, LEADER), tmp_path / "copy" / "orders"
    loglib.copies.mirror(path, copy)

    def promote_meanwhile(topic: Topic) -> None:
        with loglib.transaction(app="app") as work:
            work.append(topic, b"late", partition=0)
            loglib.copies.promote(copy)

    with pytest.raises(NotLeaderError, match="superseded"):
        reading(promote_meanwhile)(path)
    assert loglib.transactions.last_version("app", store=path.parent) is None


def test_topic_open_in_several_processes_is_not_changed_after_it_was_superseded(tmp_path: Path) -> None:
    path = made(tmp_path, LEADER)
    loglib.copies.mirror(path, tmp_path / "copy" / "orders")
    with Topic.open(path, create=True, shared=True) as topic:
        loglib.copies.promote(tmp_path / "copy" / "orders")
        before = content(path)
        for change in (lambda: topic.append(b"late"), lambda: topic.alter(segment_bytes=1 << 20)):
            with pytest.raises(NotLeaderError, match="superseded"):
                change()
        assert content(path) == before


def test_group_on_several_topics_is_not_joined_if_one_of_them_lost_its_place(tmp_path: Path) -> None:
    path = made(tmp_path, SUPERSEDED)
    with Topic.open(tmp_path / "first", create=True) as first, Topic.open(path, mode="r") as old:
        before = content(path)
        with pytest.raises(NotLeaderError, match="superseded"):
            loglib.group([first, old], "both")
        assert content(path) == before
        assert first.groups() == []


def test_new_group_is_joined_at_the_first_of_several_directories_only(tmp_path: Path) -> None:
    """What was committed in another one was removed without a word, when the topic was opened the next time."""
    first, second = tmp_path / "disk1" / "orders", tmp_path / "disk2" / "orders"
    Topic.open(first, create=True, replicas=[second]).close()
    join("new")(first)
    with pytest.raises(NotLeaderError, match="written together"):
        join("other")(second)
    Topic.open(second, create=True, replicas=[first]).close()
    join("other")(second)
    with pytest.raises(NotLeaderError, match="written together"):
        join("third")(first)
