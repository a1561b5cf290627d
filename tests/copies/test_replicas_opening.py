"""Topics with replicas: which directories an opening takes, and which history it chooses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import replicas_written
from replicated import all_have_all, assert_same, open_all, until

from conftest import QUIET, values_of
from loglib import CorruptLogError, LogError, NotLeaderError, Topic, testing
from loglib.copies import mirror
from loglib.copies.election import LogClaim, choose
from loglib.copies.roster import read_members
from loglib.errors import TooFewCopiesError
from loglib.system.files import REAL

places = replicas_written.places
written = replicas_written.written
DAMAGE = CorruptLogError("a.log", 0, "nothing", "a batch")


# --- the choice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "least", "chosen"), [
    ({"a": LogClaim(3, 1, 500), "b": LogClaim(3, 1, 400)}, 2, "a"),
    ({"a": LogClaim(3, 1, 500), "b": LogClaim(4, 2, 400)}, 2, "b"),  # not the longest
    ({"a": LogClaim(3, 1, 500), "b": LogClaim(3, 1, 500)}, 2, "ab"),
    ({"a": LogClaim(4, 2, 500, DAMAGE), "b": LogClaim(3, 1, 400)}, 1, "b"),  # as if a were lost
    ({"a": LogClaim(4, 2, 500, DAMAGE), "b": LogClaim(3, 1, 500)}, 2, ""),
    ({"a": LogClaim(4, 2, 500, DAMAGE), "b": LogClaim(4, 2, 400)}, 2, ""),
    ({"a": LogClaim(4, 2, 500, DAMAGE), "b": LogClaim(4, 2, 500)}, 2, "b"),
    ({"a": LogClaim(4, 2, 400, DAMAGE), "b": LogClaim(4, 2, 500)}, 2, "b"),
])  # fmt: skip
def test_largest_accepted_number_counts_and_then_the_claim(
    found: dict[str, LogClaim], least: int, chosen: str
) -> None:
    if chosen:
        assert choose(found, least=least) == list(chosen)
    else:
        with pytest.raises(CorruptLogError) as caught:
            choose(found, least=least)
        assert caught.value is DAMAGE


def test_two_histories_of_one_number_are_refused() -> None:
    with pytest.raises(LogError, match="two histories of writer 3"):
        choose({"a": LogClaim(3, 1, 500), "b": LogClaim(3, 2, 400)}, least=2)


# --- who must be there ---------------------------------------------------------------------------------------


def test_members_are_known_by_id_and_not_by_path(written: list[Path]) -> None:
    one, other = written[1:]
    os.rename(one, one.with_name("x"))
    os.rename(other, one)
    os.rename(one.with_name("x"), other)
    with open_all(written) as topic:
        topic.append(b"four", sync=True)
    assert len(assert_same(written)) == 4


def test_quorum_opens_without_one_which_joins_later(written: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    away = written[1].with_name("away")
    os.rename(written[1], away)
    with open_all(written) as topic:
        assert [each.state for each in topic.replicas()] == ["own", "in step", "left out"]
        assert "empty; is its disk mounted?" in str(topic.replicas()[2].error)
        topic.append(b"four", sync=True)
        os.rename(away, written[1])
        until(lambda: topic.replicas()[2].state == "in step", "it comes back")
        topic.append(b"five", sync=True)
        until(lambda: topic.replicas()[2].lag_bytes == 0, "it has all")
    assert len(assert_same(written)) == 5
    assert "counts again" in caplog.text


def test_what_returns_must_be_the_member_that_is_missed(written: list[Path]) -> None:
    away = written[1].with_name("away")
    os.rename(written[1], away)
    with open_all(written) as topic:
        assert topic.replicas()[2].id
        for make, why in (
            (written[1].mkdir, "no member of the topic is there; is its disk mounted?"),
            (lambda: shutil.copytree(written[2], written[1], dirs_exist_ok=True), "another directory is there"),
        ):
            make()
            until(partial(has_error, topic, why), "it is refused")
        shutil.rmtree(written[1])
        shutil.copytree(away, written[1])
        members = read_members(REAL, str(away))
        assert members is not None
        members._replace(version=0).write(REAL, str(written[1]), 0o600, now=0)
        until(lambda: "it is not whole" in str(topic.replicas()[2].error), "it is refused")
        members.write(REAL, str(written[1]), 0o600, now=0)
        (written[1] / "0000/watermark").unlink()
        until(lambda: "watermark is lost" in str(topic.replicas()[2].error), "it is refused")
    with open_all(written, replica_timeout=30.0) as topic:
        assert [each.state for each in topic.replicas()] == ["own", "in step", "in step"]
        topic.append(b"four", sync=True)
    assert len(assert_same(written)) == 4


def has_error(topic: Topic, why: str) -> bool:
    return why in str(topic.replicas()[2].error)


def test_all_needs_all(places: list[Path]) -> None:
    with open_all(places) as topic:
        topic.append(b"one", sync=True)
    shutil.rmtree(places[2])
    with pytest.raises(TooFewCopiesError, match="takes 3 of its directories, and 2 count") as caught:
        open_all(places)
    assert caught.value.missing == {str(places[2]): "empty; is its disk mounted?"}
    with open_all(places[:2], forget_replicas=[places[2]]) as topic:
        topic.append(b"two", sync=True)
    with open_all(places[:2]) as topic:
        assert values_of(topic) == [b"one", b"two"]


def test_quorum_needs_a_quorum(written: list[Path]) -> None:
    shutil.rmtree(written[0])
    shutil.rmtree(written[1])
    with pytest.raises(TooFewCopiesError, match="takes 2 of its directories, and 1 count"):
        open_all([written[2], *written[:2]])
    with pytest.raises(TooFewCopiesError, match="takes 2 of its directories, and 1 count"):
        open_all([written[2]], forget_replicas=written[:2])


def test_leader_goes_on_without_others_only_if_told(places: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with open_all(places, acks="leader") as topic:
        topic.append(b"one", sync=True)
        until(partial(all_have_all, topic), "all have it")
    shutil.rmtree(places[0])
    with pytest.raises(TooFewCopiesError, match="takes 3 of its directories, and 2 count"):
        open_all([places[1], places[0], places[2]])
    with open_all(places[1:], forget_replicas=[places[0]]) as topic:
        assert values_of(topic) == [b"one"]
    assert "what only it had is lost" in caplog.text


def test_empty_directory_takes_the_place_of_a_lost_one(written: list[Path]) -> None:
    before = read_members(REAL, str(written[2]))
    shutil.rmtree(written[2])
    written[2].mkdir()
    with open_all(written, forget_replicas=[written[2]]) as topic:
        assert [each.state for each in topic.replicas()] == ["own", "in step", "in step"]
    assert len(assert_same(written)) == 3
    after = read_members(REAL, str(written[2]))
    assert before is not None and after is not None and after.id != before.id and after.version == 2


def test_member_is_given_up_by_its_id(written: list[Path]) -> None:
    gone = read_members(REAL, str(written[2]))
    assert gone is not None
    shutil.rmtree(written[2])
    with open_all(written[:2], forget_replicas=[gone.id]) as topic:
        assert len(topic.replicas()) == 2


def test_member_that_was_given_up_does_not_come_back(written: list[Path]) -> None:
    os.rename(written[2], written[2].with_name("away"))
    with open_all(written[:2], forget_replicas=[written[2]]) as topic:
        topic.append(b"four", sync=True)
    os.rename(written[2].with_name("away"), written[2])
    with pytest.raises(LogError, match="was given up with forget_replicas="):
        open_all(written)
    with pytest.raises(LogError, match="was given up with forget_replicas="):
        open_all([written[2], written[0], written[1]])


def test_two_parts_that_gave_each_other_up_are_told_apart(places: list[Path]) -> None:
    open_all(places).close()
    open_all(places[:2], forget_replicas=[places[2]]).close()
    kept = [read_members(REAL, str(each)) for each in places]
    assert kept[0] is not None and kept[2] is not None
    other = {id_: path for id_, path in kept[2].paths.items() if id_ != kept[0].id}
    kept[2]._replace(paths=other, version=2).write(REAL, str(places[2]), 0o600, now=0)
    with pytest.raises(LogError, match="two lists of members: a part of them was opened apart"):
        open_all(places)


def test_acks_change_when_all_are_there(written: list[Path]) -> None:
    with open_all(written, acks="all") as topic:
        topic.append(b"four", sync=True)
    members = [read_members(REAL, str(each)) for each in written]
    assert [(each.acks, each.version) for each in members if each] == [("all", 2)] * 3
    os.rename(written[2], written[2].with_name("away"))
    with pytest.raises(TooFewCopiesError):
        open_all(written)
    with pytest.raises(TooFewCopiesError):
        open_all(written, acks="quorum")


@pytest.mark.parametrize(("choose_places", "options", "message"), [
    (lambda a, b, c: [a, b], {}, "is written in 3 directories"),
    (lambda a, b, c: [a, b, c, a.with_name("d")], {}, "is written in 3 directories"),
    (lambda a, b, c: [a, b, a.with_name("d")], {"forget_replicas": ["nobody"]}, "no member is there or was there"),
    (lambda a, b, c: [a, b, c], {"forget_replicas": ["c"]}, "and not empty: if it was made again already"),
    (lambda a, b, c: [a.with_name("d"), b, c], {}, "holds a topic; the directory to be opened has none"),
])  # fmt: skip
def test_other_directories_than_stored_are_refused(
    written: list[Path], choose_places: Callable[..., list[Path]], options: dict[str, Any], message: str
) -> None:
    if options.get("forget_replicas") == ["c"]:
        options = {"forget_replicas": [written[2]]}
    with pytest.raises((LogError, ValueError), match=message):
        open_all(choose_places(*written), **options)
    assert len(assert_same(written)) == 3


def test_directories_that_belong_elsewhere_are_refused(written: list[Path], tmp_path: Path) -> None:
    other = [tmp_path / device / "other" for device in "abc"]
    with open_all(other):
        pass
    with pytest.raises(LogError, match="is a member of another topic"):
        open_all([written[0], written[1], other[2]])
    alone = tmp_path / "alone"
    testing.open_topic(alone, **QUIET).close()
    with pytest.raises(LogError, match="is a topic of its own, and no member"):
        open_all([written[0], written[1], alone])
    second = tmp_path / "second"
    testing.open_topic(second, **QUIET).close()
    with pytest.raises(LogError, match="holds a topic, .*; a new replica is made in an empty directory"):
        open_all([alone, second])
    mirror(written[0], copied := tmp_path / "copied")
    with pytest.raises(NotLeaderError, match="is a mirror of"):
        open_all([copied, tmp_path / "new"])
    with pytest.raises(LogError, match="is a mirror of"):
        open_all([alone, copied])
    with pytest.raises(LogError, match="is a replica of"):
        mirror(written[0], written[1])
    (tmp_path / "files").mkdir()
    (tmp_path / "files/notes.txt").touch()
    with pytest.raises(LogError, match="holds files but no topic"):
        open_all([alone, tmp_path / "files"])


def test_copy_of_a_member_is_refused(written: list[Path]) -> None:
    shutil.rmtree(written[2])
    shutil.copytree(written[1], written[2])
    with pytest.raises(LogError, match="is a copy of .*, made by another program"):
        open_all(written)


def test_topic_without_a_directory_is_refused(places: list[Path]) -> None:
    with pytest.raises(LogError, match="holds files but no topic.* the directory to be opened has none"):
        places[1].mkdir(parents=True)
        (places[1] / "notes.txt").touch()
        open_all(places)
    assert not places[0].exists()


@pytest.mark.parametrize(("acks", "version", "message"), [
    ("two", 1, "no valid facts"), ("quorum", 0, "not a whole member of its topic yet"),
])  # fmt: skip
def test_list_that_says_nothing_is_refused(written: list[Path], acks: Any, version: int, message: str) -> None:
    for place in written:
        members = read_members(REAL, str(place))
        assert members is not None
        members._replace(acks=acks, version=version).write(REAL, str(place), 0o600, now=0)
    with pytest.raises(LogError, match=message):
        open_all(written)


def test_unreadable_list_counts_as_a_directory_out_of_reach(written: list[Path]) -> None:
    content = (written[2] / "copy.json").read_bytes()
    (written[2] / "copy.json").write_bytes(content.replace(b"quorum", b"qUorum"))
    with open_all(written) as topic:
        assert "no valid facts" in str(topic.replicas()[2].error)
        topic.append(b"four", sync=True)
    with pytest.raises(LogError, match="no valid facts"):
        open_all([written[2], *written[:2]])
