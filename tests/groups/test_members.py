"""Members: who holds the lock of his file is in the group, and nobody else is."""

import json
import os
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from conftest import needs_proc, opened_since, settled_files
from loglib import LockedError
from loglib.errors import GroupMismatchError
from loglib.groups import members
from loglib.groups.members import Member, MemberFile, live_members, new_member_name
from loglib.system.files import REAL
from loglib.testing import Call, WatchedFiles


def join(directory: Path, name: str, *, topics: tuple[str, ...] = ("clicks",), strategy: str = "range") -> MemberFile:
    return MemberFile(REAL, str(directory), name, topics, 0o600, strategy=strategy)


def live(directory: Path) -> list[str]:
    return list(live_members(REAL, str(directory)))


def test_member_is_there_from_joining_to_leaving(tmp_path: Path) -> None:
    one, two = join(tmp_path, "b"), join(tmp_path, "a")
    assert live(tmp_path) == ["a", "b"]
    one.leave()
    assert live(tmp_path) == ["a"]
    two.leave()
    assert live(tmp_path) == [] == os.listdir(tmp_path)
    two.leave()  # once more does nothing


def test_file_of_a_member_can_be_read_by_a_person(tmp_path: Path) -> None:
    member = join(tmp_path, "a")
    text = (tmp_path / "a").read_text()
    facts = json.loads(text)
    member.leave()
    assert text.endswith("}\n")
    assert facts["pid"] == os.getpid() and facts["host"] == os.uname().nodename and facts["topics"] == ["clicks"]
    assert facts["since"].endswith("Z") and facts["strategy"] == "range"


def test_members_know_what_others_read_and_how_they_share(tmp_path: Path) -> None:
    one, two = join(tmp_path, "a"), join(tmp_path, "b", topics=("clicks", "views"), strategy="sticky")
    found = live_members(REAL, str(tmp_path))
    assert one.live() == two.live() == found
    assert [(name, each.topics, each.strategy) for name, each in found.items()] == [
        ("a", ("clicks",), "range"), ("b", ("clicks", "views"), "sticky"),
    ]  # fmt: skip
    assert {(each.pid, each.host) for each in found.values()} == {(os.getpid(), os.uname().nodename)}
    assert abs(datetime.fromisoformat(found["a"].since).timestamp() - time.time()) < 60
    for member, other, strategy in ((one, "b", "sticky"), (two, "a", "range")):
        with pytest.raises(GroupMismatchError, match=f"member {other} has strategy='{strategy}'") as caught:
            member.check_strategy("etl")
        assert caught.value.member == other
    two.leave()
    one.check_strategy("etl")
    one.leave()


TEXTS = {"empty": b"", "half": b'{"pid": 1, "topi', "no object": b"5", "none": b'{"topics": null, "strategy": "range"}'}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_member_that_has_not_said_yet_what_it_reads_reads_nothing(tmp_path: Path, text: bytes) -> None:
    member = join(tmp_path, "a")
    (tmp_path / "a").write_bytes(text)
    assert live_members(REAL, str(tmp_path)) == {"a": Member((), None)}
    member.leave()


def test_looks_at_once_do_not_take_each_other_for_members(tmp_path: Path) -> None:
    class Looking(WatchedFiles):
        def after(self, call: Call, result: Any) -> Any:
            if call.name == "flock" and not seen:
                seen.append(live(tmp_path))
            return result

    seen: list[list[str]] = []
    (tmp_path / "dead").write_text("{}")
    assert live_members(Looking(), str(tmp_path)) == {} and seen == [[]]


def test_dead_members_file_that_may_not_be_removed_blocks_nobody(tmp_path: Path) -> None:
    class Refusing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "unlink":
                raise PermissionError(1, "Operation not permitted")

    (tmp_path / "dead").write_text("{}")
    assert live_members(Refusing(), str(tmp_path)) == {}
    assert os.listdir(tmp_path) == ["dead"]


def test_file_that_may_not_be_read_is_a_members_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "open_read":
                raise PermissionError(13, "Permission denied")

    (tmp_path / "a").write_text("{}")
    for _ in range(2):
        assert live_members(Refusing(), str(tmp_path)) == {"a": Member()}
    assert [record.getMessage() for record in caplog.records if str(tmp_path) in record.getMessage()] == [
        f"no permission to read {tmp_path / 'a'}: it counts as a live member, although it may be dead"
    ]


@pytest.mark.parametrize("may_remove", [True, False])
def test_name_of_a_dead_member_of_another_user_can_be_taken(tmp_path: Path, may_remove: bool) -> None:
    class Others(WatchedFiles):
        """The file is another user's: it may be read, and not written."""

        def before(self, call: Call) -> None:
            refused = ("open_write", "create") if may_remove else ("open_write", "create", "unlink")
            if call.name in refused and (tmp_path / "web-1").exists() and call.name != "create":
                raise PermissionError(13, "Permission denied")

    (tmp_path / "web-1").write_text("{}")
    if may_remove:
        member = MemberFile(Others(), str(tmp_path), "web-1", [], 0o600)
        assert member.is_valid()
        member.abandon()
    else:
        with pytest.raises(PermissionError):
            MemberFile(Others(), str(tmp_path), "web-1", [], 0o600)


def test_what_a_dead_member_has_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "dead").write_text('{"pid": 1}')
    assert live(tmp_path) == []
    assert os.listdir(tmp_path) == []


def test_own_lock_is_not_tried(tmp_path: Path) -> None:
    (tmp_path / "me").touch()  # which nobody holds: a look at it would remove it
    assert list(live_members(REAL, str(tmp_path), known="me")) == ["me"]


def test_second_member_of_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_JOIN_TRIES", 2)
    member = join(tmp_path, "web-1")
    with pytest.raises(LockedError, match=f'a member of that name: .*"pid": {os.getpid()}.*; join under') as caught:
        join(tmp_path, "web-1")
    assert caught.value.path == str(tmp_path / "web-1")
    assert live(tmp_path) == ["web-1"]
    member.leave()
    join(tmp_path, "web-1").leave()


def test_second_member_joins_when_the_first_leaves_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = join(tmp_path, "web-1")
    monkeypatch.setattr(time, "sleep", lambda _: first.leave())
    second = join(tmp_path, "web-1")
    assert second.is_valid() and not first.is_valid()
    second.leave()


def test_file_removed_by_a_look_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Racing(WatchedFiles):
        def after(self, call: Call, result: Any) -> Any:
            if call.name == "create" and not raced:
                raced.append(call.path)
                os.unlink(call.path)
            return result

    raced: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda _: None)
    member = MemberFile(Racing(), str(tmp_path), "web-1", [], 0o600)
    assert raced and live(tmp_path) == ["web-1"]
    member.leave()


def test_member_is_not_in_the_group_of_a_copy_that_was_made_of_hard_links(tmp_path: Path) -> None:
    for group in ("group", "copy"):
        (tmp_path / group).mkdir()
    (tmp_path / "group" / "web-1").write_text("{}")
    os.link(tmp_path / "group" / "web-1", tmp_path / "copy" / "web-1")
    member = join(tmp_path / "group", "web-1")
    assert member.is_valid() and live(tmp_path / "group") == ["web-1"]
    assert live(tmp_path / "copy") == []
    member.leave()


def test_file_that_is_gone_when_it_is_looked_at_is_no_member(tmp_path: Path) -> None:
    class Racing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "open_read":
                (tmp_path / "a").unlink(missing_ok=True)

    (tmp_path / "a").touch()
    assert live_members(Racing(), str(tmp_path)) == {}


def test_evicted_member_does_not_remove_its_successor(tmp_path: Path) -> None:
    hung = join(tmp_path, "web-1")
    (tmp_path / "web-1").unlink()
    successor = join(tmp_path, "web-1")
    assert not hung.is_valid()
    hung.leave()
    assert live(tmp_path) == ["web-1"]
    successor.leave()


def test_abandoned_member_keeps_its_name(tmp_path: Path) -> None:
    member = join(tmp_path, "a")
    member.abandon()
    assert os.listdir(tmp_path) == ["a"] and not member.is_valid()


def test_member_that_nobody_refers_to_is_gone(tmp_path: Path) -> None:
    join(tmp_path, "a")
    assert live(tmp_path) == []


@needs_proc
def test_refused_member_leaves_no_file_open(tmp_path: Path) -> None:
    before = settled_files()
    with pytest.raises(ValueError, match="is not a name"):
        join(tmp_path, "../a")
    with pytest.raises(FileNotFoundError):
        join(tmp_path / "missing", "a")
    assert not opened_since(before)


def test_looks_and_joins_at_once_lose_no_member(tmp_path: Path) -> None:
    stop = threading.Event()

    def read_if_held() -> None:
        while not stop.is_set():
            live(tmp_path)

    looking = threading.Thread(target=read_if_held)
    looking.start()
    try:
        for _ in range(100):
            member = join(tmp_path, "a")
            assert member.is_valid() and live(tmp_path) == ["a"]
            member.leave()
    finally:
        stop.set()
        looking.join()


def test_names_say_host_and_process_and_are_all_different() -> None:
    names = {new_member_name() for _ in range(100)}
    assert len(names) == 100
    assert all(f"-{os.getpid()}-" in name for name in names)


def test_host_of_a_strange_name_makes_a_safe_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("", "wéb/1", "", "", "")))
    assert new_member_name().startswith("w-b-1-")


def test_file_that_was_replaced_while_it_was_looked_at_is_left_alone(tmp_path: Path) -> None:
    class Replacing(WatchedFiles):
        """Somebody else has removed the dead member's file, and another has joined under its name."""

        def before(self, call: Call) -> None:
            if call.name == "flock":
                (tmp_path / "dead").unlink()
                (tmp_path / "dead").write_text("alive")

    (tmp_path / "dead").write_text("{}")
    assert live_members(Replacing(), str(tmp_path)) == {}
    assert (tmp_path / "dead").read_text() == "alive"
