"""One topic has one leader, whatever stands between a copy and its topic: mirrors, old topics, replicas, links."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mirrored import Meanwhile

from conftest import values_of
from loglib import LockedError, LogError, NotLeaderError, Topic
from loglib.copies import mirror, promote, snapshot
from loglib.copies.promotion import promote_on
from loglib.errors import TooFewCopiesError
from loglib.log import copy_role
from loglib.system.directory import Directory
from loglib.system.files import REAL

Change = Callable[[], object]


@pytest.fixture
def a(tmp_path: Path) -> Path:
    """A topic with one record."""
    add(tmp_path / "a" / "t", b"1")
    return tmp_path / "a" / "t"


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return tmp_path / "b" / "t"


@pytest.fixture
def c(tmp_path: Path) -> Path:
    return tmp_path / "c" / "t"


def add(path: Path, value: bytes, *others: Path, **options: object) -> None:
    with Topic.open(
        path, create=True, **({"replicas": others, **options} if others else {})  # type: ignore[arg-type]
    ) as topic:
        topic.append(value, sync=True)


def read(path: Path) -> list[bytes | None]:
    with Topic.open(path, mode="r") as topic:
        return values_of(topic)


def role(path: Path) -> str:
    found = copy_role.read(REAL, str(path))
    return copy_role.LEADER if found is None else found.role


def give_role(path: Path, **facts: object) -> None:
    """Let a directory say that it is something else."""
    found = copy_role.read(REAL, str(path))
    assert found is not None
    with Directory.open(REAL, str(path)) as directory:
        found._replace(**facts).write(directory, 0o600)  # type: ignore[arg-type]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Promote a copy, and end when so many directories have a new role."""

    def promote_in_part(path: Path, steps: int) -> None:
        whole, left = copy_role.Role.take, [steps]

        def take_role(*arguments: object) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            whole(*arguments)  # type: ignore[arg-type]

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(copy_role.Role, "take", take_role)
            promote(path)

    return promote_in_part


# --- mirrors of mirrors ---------------------------------------------------------------------------------------


def test_mirror_of_a_mirror_is_not_promoted_while_the_topic_is_written(a: Path, b: Path, c: Path) -> None:
    """There were two leaders, and the copy lacked what the topic had acknowledged."""
    mirror(a, b)
    mirror(b, c)
    with Topic.open(a, create=True) as topic:
        topic.append(b"2", sync=True)
        with pytest.raises(LockedError):
            promote(c)
        topic.append(b"3", sync=True)
    promote(c)
    assert [role(each) for each in (a, b, c)] == ["superseded", "mirror", "leader"]
    assert read(c) == [b"1", b"2", b"3"]
    add(c, b"4")
    promote(b)  # it follows the superseded topic to the one that has taken its place
    assert [role(each) for each in (a, b, c)] == ["superseded", "leader", "superseded"]
    assert read(b) == [b"1", b"2", b"3", b"4"]


def test_second_mirror_takes_the_place_of_the_first_one(a: Path, b: Path, c: Path) -> None:
    """It was promoted beside it, without its records."""
    mirror(a, b)
    mirror(a, c)
    promote(b)
    with Topic.open(b, create=True) as topic, pytest.raises(LockedError):
        topic.append(b"2", sync=True)
        promote(c)
    promote(c)
    assert [role(each) for each in (a, b, c)] == ["superseded", "superseded", "leader"]
    assert read(c) == [b"1", b"2"]


@pytest.mark.parametrize("again", ["b", "c"])
def test_promotion_that_was_cut_is_finished_by_any_copy(
    a: Path, b: Path, c: Path, cut: Callable[[Path, int], None], again: str
) -> None:
    mirror(a, b)
    mirror(a, c)
    add(a, b"2")
    cut(b, 1)
    assert [role(each) for each in (a, b, c)] == ["superseded", "mirror", "mirror"]
    taken, other = (b, c) if again == "b" else (c, b)
    promote(taken)
    assert (role(taken), role(other), read(taken)) == ("leader", "mirror", [b"1", b"2"])
    promote(other)
    assert (role(taken), role(other), read(other)) == ("superseded", "leader", [b"1", b"2"])


def test_mirror_of_a_snapshot_becomes_a_topic_beside_the_original(a: Path, b: Path, c: Path) -> None:
    snapshot(a, b)
    mirror(b, c)
    promote(c)
    assert [role(each) for each in (a, b, c)] == ["leader", "snapshot", "leader"]


@pytest.mark.parametrize("found", ["no topic is there", "another topic is there", "Not a directory"])
def test_copy_whose_topic_cannot_be_reached_is_promoted_by_force_only(a: Path, b: Path, c: Path, found: str) -> None:
    mirror(a, b)
    mirror(b, c)
    shutil.rmtree(a.parent)
    if found.startswith("another"):
        add(a, b"new")
    if found.startswith("Not"):
        a.parent.write_bytes(b"")
    with pytest.raises(LogError, match=f"cannot be reached.*{found}.*force=True"):
        promote(c)
    assert role(c) == "mirror"
    promote(c, force=True)
    assert (role(c), read(c)) == ("leader", [b"1"])


def test_mirror_of_a_mirror_of_another_host_is_promoted_by_force_only(a: Path, b: Path, c: Path) -> None:
    mirror(a, b)
    mirror(b, c)
    give_role(b, of="stream:host:/t")
    with pytest.raises(LogError, match="another host"):
        promote(c)


def test_promotion_waits_for_no_role_that_has_changed_meanwhile(a: Path, b: Path, c: Path, tmp_path: Path) -> None:
    """Another copy is promoted between the look at the chain and the locks."""
    mirror(a, b)
    mirror(a, c)

    def other_first() -> None:
        promote(b)
        add(b, b"2")

    promote_on(Meanwhile(lambda call: call.path == f"{a}/0000", other_first), str(c), now=1)
    assert [role(each) for each in (a, b, c)] == ["superseded", "superseded", "leader"]
    assert read(c) == [b"1", b"2"]


def test_snapshot_that_is_promoted_twice_at_once_stays_one_topic(a: Path, b: Path, c: Path) -> None:
    """And what has taken its place meanwhile keeps it."""
    snapshot(a, b)

    def other_first() -> None:
        promote(b)
        mirror(b, c)
        promote(c)

    with pytest.raises(NotLeaderError):
        promote_on(Meanwhile(lambda call: call.path == f"{b}/0000", other_first), str(b), now=1)
    assert [role(each) for each in (b, c)] == ["superseded", "leader"]


# --- topics with replicas -------------------------------------------------------------------------------------


def lagging(a: Path, b: Path, c: Path, tmp_path: Path) -> None:
    """A topic in three directories, of which the last lacks a record."""
    add(a, b"2", b, c, acks="quorum")
    os.rename(c, tmp_path / "away")
    add(a, b"3", b, c)
    os.rename(tmp_path / "away", c)


def test_mirror_of_a_replica_takes_the_place_of_all_directories(a: Path, b: Path, c: Path, tmp_path: Path) -> None:
    """Only its source was superseded: the others went on, and what the source lacked was lost."""
    lagging(a, b, c, tmp_path)
    copy, farther = tmp_path / "copy" / "t", tmp_path / "farther" / "t"
    mirror(c, copy)
    mirror(copy, farther)
    with Topic.open(a, create=True, replicas=[b, c]), pytest.raises(LockedError):
        promote(farther)
    lagging(b, a, c, tmp_path)
    promote(farther)
    assert [role(each) for each in (a, b, c, copy, farther)] == ["superseded"] * 3 + ["mirror", "leader"]
    assert read(farther) == [b"1", b"2", b"3", b"2", b"3"]
    for first, others in ((a, [b, c]), (b, [a, c]), (c, [b])):
        with pytest.raises(LogError):
            Topic.open(first, create=True, replicas=others)


@pytest.mark.parametrize("acks", ["all", "quorum"])
def test_promotion_that_was_cut_between_directories_is_finished(
    a: Path, b: Path, c: Path, tmp_path: Path, cut: Callable[[Path, int], None], acks: str
) -> None:
    add(a, b"2", b, c, acks=acks)
    copy, other = tmp_path / "copy" / "t", tmp_path / "other" / "t"
    mirror(a, copy)
    mirror(c, other)
    cut(copy, 1)
    assert [role(each) for each in (a, b, c)] == ["replica", "replica", "superseded"]
    expected = [b"1", b"2"]
    if acks == "quorum":  # two of three directories are enough
        add(a, b"3", b, c)
        expected.append(b"3")
    promote(other)
    assert [role(each) for each in (a, b, c, copy, other)] == ["superseded"] * 3 + ["mirror", "leader"]
    assert read(other) == expected


def test_mirror_of_a_directory_that_was_given_up_finds_the_topic(a: Path, b: Path, c: Path, tmp_path: Path) -> None:
    add(a, b"2", b, c)
    copy, other = tmp_path / "copy" / "t", tmp_path / "other" / "t"
    mirror(c, copy)
    mirror(c, other)
    os.rename(c, tmp_path / "away")
    add(a, b"3", b, forget_replicas=[c])
    os.rename(tmp_path / "away", c)
    promote(copy)
    assert [role(each) for each in (a, b, c)] == ["superseded", "superseded", "replica"]
    assert read(copy) == [b"1", b"2", b"3"]


def test_mirror_of_a_former_replica_finds_the_one_directory_that_is_left(a: Path, b: Path, tmp_path: Path) -> None:
    add(a, b"2", b)
    copy = tmp_path / "copy" / "t"
    mirror(b, copy)
    with Topic.open(a, create=True, replicas=[], forget_replicas=[b]) as topic:
        topic.append(b"3", sync=True)
    promote(copy)
    assert (role(a), read(copy)) == ("superseded", [b"1", b"2", b"3"])


@pytest.mark.parametrize("how", ["lost", "replaced", "damaged"])
def test_replica_that_cannot_be_reached_needs_force(a: Path, b: Path, c: Path, tmp_path: Path, how: str) -> None:
    add(a, b"2", b, c, acks="quorum")
    copy = tmp_path / "copy" / "t"
    mirror(a, copy)
    if how != "damaged":
        shutil.rmtree(c)
    if how == "replaced":
        snapshot(a, c)
    if how == "damaged":
        (c / "copy.json").write_bytes(b"{}")
    with pytest.raises(LogError):
        promote(copy)
    assert role(copy) == "mirror"
    promote(copy, force=True)
    assert role(copy) == "leader"


def test_directories_that_cannot_say_what_was_acknowledged_need_force(
    a: Path, b: Path, c: Path, tmp_path: Path
) -> None:
    add(a, b"2", b, c, acks="quorum")
    copy = tmp_path / "copy" / "t"
    mirror(a, copy)
    for each in (b, c):
        (each / "0000" / "watermark").unlink()
    with pytest.raises(TooFewCopiesError):
        promote(copy)
    assert role(copy) == "mirror"
    promote(copy, force=True)
    assert read(copy) == [b"1", b"2"]


def test_member_that_is_lost_after_a_swap_is_named_by_where_it_was(a: Path, b: Path, c: Path, tmp_path: Path) -> None:
    """The error said to empty a healthy directory."""
    add(a, b"2", b, c)
    os.rename(a, tmp_path / "x")
    os.rename(b, a)
    os.rename(tmp_path / "x", b)
    shutil.rmtree(b)
    with pytest.raises(LogError, match="empty"):  # `all` waits for it
        Topic.open(a, create=True, replicas=[b, c])
    with Topic.open(a, replicas=[b, c], forget_replicas=[b]) as topic:
        assert values_of(topic) == [b"1", b"2"]
    assert read(b) == [b"1", b"2"]


def test_paths_of_members_are_those_of_the_last_opening(a: Path, b: Path, c: Path, tmp_path: Path) -> None:
    add(a, b"2", b)
    os.rename(b, tmp_path / "moved")
    add(a, b"3", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")
    with Topic.open(a, create=True, replicas=[], forget_replicas=[tmp_path / "moved"]) as topic:
        assert values_of(topic) == [b"1", b"2", b"3"]


def test_lost_members_that_cannot_be_told_apart_are_named_by_id(a: Path, b: Path, c: Path, tmp_path: Path) -> None:
    fourth = tmp_path / "d" / "t"
    add(a, b"2", b, c, fourth, acks="leader")
    os.rename(a, tmp_path / "x")
    os.rename(b, a)
    os.rename(tmp_path / "x", b)
    shutil.rmtree(b)
    shutil.rmtree(c)
    with pytest.raises(LogError, match="2 others are not there: .*these ids"):
        Topic.open(a, create=True, replicas=[fourth], forget_replicas=[b])
    with Topic.open(a, replicas=[fourth], forget_replicas=[b, c]) as topic:
        assert values_of(topic) == [b"1", b"2"]


# --- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("demote", [False, True])
def test_topic_is_no_mirror_of_itself_by_another_name(a: Path, b: Path, c: Path, demote: bool) -> None:
    """It gave up its role, and there was no leader."""
    b.parent.symlink_to(a.parent)
    with pytest.raises(NotLeaderError):
        mirror(a, b, demote=demote)
    mirror(a, c)
    link = c.parent.parent / "link"
    link.symlink_to(c)
    with pytest.raises(LogError, match="are one directory"):
        mirror(c, link, demote=demote)
    assert (role(a), role(c)) == ("leader", "mirror")


def test_mirrors_of_each_other_are_refused(a: Path, b: Path, c: Path, tmp_path: Path) -> None:
    """No topic stood behind them any more, and a promotion saw none."""
    mirror(a, b)
    mirror(b, c)
    (tmp_path / "link").symlink_to(b)
    for to in (b, tmp_path / "link"):
        with pytest.raises(LogError, match="so cannot be its source"):
            mirror(c, to)
    give_role(b, of=str(c))
    with pytest.raises(LogError, match="in a circle"):
        promote(c)
    with pytest.raises(LogError, match="in a circle"):
        mirror(b, tmp_path / "d" / "t")
        promote(tmp_path / "d" / "t")


def test_superseded_topic_is_no_source_of_what_took_its_place(a: Path, b: Path, c: Path) -> None:
    """The mirror led to the old topic, and was promoted beside the new one."""
    mirror(a, b)
    promote(b)
    add(b, b"2")
    mirror(b, c)
    promote(c)
    with pytest.raises(LogError, match="cannot be its source"):
        mirror(a, b)
    mirror(c, b)
    mirror(c, a)
    promote(b)
    assert [role(each) for each in (a, b, c)] == ["mirror", "leader", "superseded"]
    assert read(b) == [b"1", b"2"]


def test_last_topic_does_not_become_a_mirror_of_what_is_behind_it(
    a: Path, b: Path, c: Path, cut: Callable[[Path, int], None]
) -> None:
    """After a promotion that was cut it is the only one that is known to have everything."""
    mirror(a, b)
    mirror(b, c)
    add(a, b"2")
    cut(c, 2)  # the copy names the topic, and the topic is superseded
    assert [role(each) for each in (a, b, c)] == ["superseded", "mirror", "mirror"]
    for source, to in ((b, a), (c, a), (b, c)):
        with pytest.raises(LogError, match="cannot be its source"):
            mirror(source, to)
    promote(c)
    assert [role(each) for each in (a, b, c)] == ["superseded", "mirror", "leader"]
    assert read(c) == [b"1", b"2"]


def test_mirror_of_another_directory_follows_that_one(a: Path, b: Path, c: Path) -> None:
    mirror(a, b)
    mirror(a, c)
    promote(b)
    add(b, b"2")
    os.rename(b, b.with_name("moved"))
    with pytest.raises(LogError, match="cannot be reached"):
        promote(c)
    mirror(b.with_name("moved"), c)
    promote(c)
    assert (role(c), role(b.with_name("moved"))) == ("leader", "superseded")


@pytest.mark.parametrize("there", [False, True])
def test_replica_is_not_named_twice(a: Path, b: Path, tmp_path: Path, there: bool) -> None:
    """One directory counted as two that have each record."""
    b.parent.mkdir()
    (tmp_path / "link").symlink_to(b.parent)
    if there:
        b.mkdir()
    with pytest.raises(ValueError, match="named twice"):
        Topic.open(a, create=True, replicas=[b, tmp_path / "link" / "t"])
    (tmp_path / "other").symlink_to(a.parent)
    with pytest.raises(ValueError, match="named twice"):
        Topic.open(a, replicas=[tmp_path / "other" / "t"])
    assert role(a) == "leader"
