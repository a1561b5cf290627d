"""Topics with replicas: which directories an opening takes, and which history it chooses."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conftest import QUIET, values_of
from loglib import CorruptLogError, LogError, NotLeaderError, TooFewCopiesError, Topic, mirror, testing
from loglib.errors import LockedError
from loglib.replication import opening
from loglib.replication.choice import Standing, choose, standing_of
from loglib.replication.copied import CopiedLog, read_mark
from loglib.replication.members import read_members
from loglib.replication.replica import Replica
from loglib.segment import Identity
from loglib.system.directory import Directory
from loglib.system.files import REAL
from replicated import Devices, all_have_all, assert_same, open_all, until

DAMAGE = CorruptLogError("a.log", 0, "nothing", "a batch")


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Three directories for one topic."""
    return [tmp_path / device / "topic" for device in "abc"]


@pytest.fixture
def written(places: list[Path]) -> list[Path]:
    """The same; a topic with acks="quorum" and three records is there."""
    with open_all(places, acks="quorum") as topic:
        topic.append_many([b"one", b"two", b"three"])
        topic.flush()
        until(lambda: len({each.durable_ends for each in topic.copies()}) == 1, "all have it")
    return places


def saved(place: Path) -> Path:
    """A backup of a directory."""
    shutil.copytree(place, kept := place.with_name("saved"))
    return kept


def restored(place: Path) -> None:
    shutil.rmtree(place)
    os.rename(place.with_name("saved"), place)


# --- the choice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "least", "chosen"), [
    ({"a": Standing(3, 1, 500), "b": Standing(3, 1, 400)}, 2, "a"),
    ({"a": Standing(3, 1, 500), "b": Standing(4, 2, 400)}, 2, "b"),  # not the longest
    ({"a": Standing(3, 1, 500), "b": Standing(3, 1, 500)}, 2, "ab"),
    ({"a": Standing(4, 2, 500, DAMAGE), "b": Standing(3, 1, 400)}, 1, "b"),  # as if a were lost
    ({"a": Standing(4, 2, 500, DAMAGE), "b": Standing(3, 1, 500)}, 2, ""),
    ({"a": Standing(4, 2, 500, DAMAGE), "b": Standing(4, 2, 400)}, 2, ""),
    ({"a": Standing(4, 2, 500, DAMAGE), "b": Standing(4, 2, 500)}, 2, "b"),
    ({"a": Standing(4, 2, 400, DAMAGE), "b": Standing(4, 2, 500)}, 2, "b"),
])  # fmt: skip
def test_largest_accepted_number_counts_and_then_the_claim(
    found: dict[str, Standing], least: int, chosen: str
) -> None:
    if chosen:
        assert choose(found, least=least) == list(chosen)
    else:
        with pytest.raises(CorruptLogError) as caught:
            choose(found, least=least)
        assert caught.value is DAMAGE


def test_two_histories_of_one_number_are_refused() -> None:
    with pytest.raises(LogError, match="two histories of writer 3"):
        choose({"a": Standing(3, 1, 500), "b": Standing(3, 2, 400)}, least=2)


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
        assert [each.state for each in topic.copies()] == ["own", "in step", "left out"]
        assert "empty; is its disk mounted?" in str(topic.copies()[2].error)
        topic.append(b"four", sync=True)
        os.rename(away, written[1])
        until(lambda: topic.copies()[2].state == "in step", "it comes back")
        topic.append(b"five", sync=True)
        until(lambda: topic.copies()[2].lag_bytes == 0, "it has all")
    assert len(assert_same(written)) == 5
    assert "counts again" in caplog.text


def test_what_returns_must_be_the_member_that_is_missed(written: list[Path]) -> None:
    away = written[1].with_name("away")
    os.rename(written[1], away)
    with open_all(written) as topic:
        assert topic.copies()[2].id
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
        until(lambda: "it is not whole" in str(topic.copies()[2].error), "it is refused")
        members.write(REAL, str(written[1]), 0o600, now=0)
        (written[1] / "0000/watermark").unlink()
        until(lambda: "watermark is lost" in str(topic.copies()[2].error), "it is refused")
    with open_all(written, replica_timeout=30.0) as topic:
        assert [each.state for each in topic.copies()] == ["own", "in step", "in step"]
        topic.append(b"four", sync=True)
    assert len(assert_same(written)) == 4


def has_error(topic: Topic, why: str) -> bool:
    return why in str(topic.copies()[2].error)


def test_all_needs_all(places: list[Path]) -> None:
    with open_all(places) as topic:
        topic.append(b"one", sync=True)
    shutil.rmtree(places[2])
    with pytest.raises(TooFewCopiesError, match="takes 3 of its directories, and 2 count") as caught:
        open_all(places)
    assert caught.value.missing == {str(places[2]): "empty; is its disk mounted?"}
    with open_all(places[:2], lose=[places[2]]) as topic:
        topic.append(b"two", sync=True)
    with open_all(places[:2]) as topic:
        assert values_of(topic) == [b"one", b"two"]


def test_quorum_needs_a_quorum(written: list[Path]) -> None:
    shutil.rmtree(written[0])
    shutil.rmtree(written[1])
    with pytest.raises(TooFewCopiesError, match="takes 2 of its directories, and 1 count"):
        open_all([written[2], *written[:2]])
    with pytest.raises(TooFewCopiesError, match="takes 2 of its directories, and 1 count"):
        open_all([written[2]], lose=written[:2])


def test_leader_goes_on_without_others_only_if_told(places: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with open_all(places, acks="leader") as topic:
        topic.append(b"one", sync=True)
        until(partial(all_have_all, topic), "all have it")
    shutil.rmtree(places[0])
    with pytest.raises(TooFewCopiesError, match="takes 3 of its directories, and 2 count"):
        open_all([places[1], places[0], places[2]])
    with open_all(places[1:], lose=[places[0]]) as topic:
        assert values_of(topic) == [b"one"]
    assert "what only it had is lost" in caplog.text


def test_empty_directory_takes_the_place_of_a_lost_one(written: list[Path]) -> None:
    before = read_members(REAL, str(written[2]))
    shutil.rmtree(written[2])
    written[2].mkdir()
    with open_all(written, lose=[written[2]]) as topic:
        assert [each.state for each in topic.copies()] == ["own", "in step", "in step"]
    assert len(assert_same(written)) == 3
    after = read_members(REAL, str(written[2]))
    assert before is not None and after is not None and after.id != before.id and after.version == 2


def test_member_is_given_up_by_its_id(written: list[Path]) -> None:
    gone = read_members(REAL, str(written[2]))
    assert gone is not None
    shutil.rmtree(written[2])
    with open_all(written[:2], lose=[gone.id]) as topic:
        assert len(topic.copies()) == 2


def test_member_that_was_given_up_does_not_come_back(written: list[Path]) -> None:
    os.rename(written[2], written[2].with_name("away"))
    with open_all(written[:2], lose=[written[2]]) as topic:
        topic.append(b"four", sync=True)
    os.rename(written[2].with_name("away"), written[2])
    with pytest.raises(LogError, match="was given up with lose="):
        open_all(written)
    with pytest.raises(LogError, match="was given up with lose="):
        open_all([written[2], written[0], written[1]])


def test_two_parts_that_gave_each_other_up_are_told_apart(places: list[Path]) -> None:
    open_all(places).close()
    open_all(places[:2], lose=[places[2]]).close()
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
    (lambda a, b, c: [a, b, a.with_name("d")], {"lose": ["nobody"]}, "no member is there or was there; last seen"),
    (lambda a, b, c: [a, b, c], {"lose": ["c"]}, "and not empty: if it was made anew already"),
    (lambda a, b, c: [a.with_name("d"), b, c], {}, "holds a topic; the directory to be opened has none"),
])  # fmt: skip
def test_other_directories_than_stored_are_refused(
    written: list[Path], choose_places: Callable[..., list[Path]], options: dict[str, Any], message: str
) -> None:
    if options.get("lose") == ["c"]:
        options = {"lose": [written[2]]}
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
        assert "no valid facts" in str(topic.copies()[2].error)
        topic.append(b"four", sync=True)
    with pytest.raises(LogError, match="no valid facts"):
        open_all([written[2], *written[:2]])


# --- what is there -------------------------------------------------------------------------------------------


def test_stale_directory_is_brought_up(written: list[Path]) -> None:
    saved(written[0])
    with open_all(written) as topic:
        topic.append(b"four", sync=True)
        topic.partition(0).roll()
        topic.append(b"five", sync=True)
        until(partial(all_have_all, topic), "all have it")
    restored(written[0])
    with open_all(written) as topic:
        assert values_of(topic)[3:] == [b"four", b"five"]
        topic.append(b"six", sync=True)
    assert len(assert_same(written)) == 6


def test_other_history_is_set_aside(written: list[Path], devices: Devices) -> None:
    """A writer whose records reached its own directory only, and then a topic without it."""
    topic = open_all(written, files=devices)
    with devices.failing(written[1]), devices.failing(written[2]):
        topic.append(b"alone")
        with pytest.raises(TooFewCopiesError):
            topic.close()
    away = written[0].with_name("away")
    os.rename(written[0], away)
    with open_all([written[1], written[0], written[2]], files=devices) as topic:
        topic.append(b"four", sync=True)
    os.rename(away, written[0])
    with open_all(written, files=devices) as topic:
        assert values_of(topic) == [b"one", b"two", b"three", b"four"]
    assert len(assert_same(written)) == 4
    assert [each.name for each in (written[0] / "0000").glob("*.diverged-*")]


def rot(place: Path, name: str, start: int, end: int | None = None) -> None:
    path = place / "0000" / name
    content = bytearray(path.read_bytes())
    content[start:end] = bytes(len(content[start:end]))
    path.write_bytes(content)


FIRST = f"{0:020d}.log"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("damage", [
    lambda place: rot(place, FIRST, 4096 + 150),
    lambda place: rot(place, FIRST, 4096),
    lambda place: rot(place, FIRST, 0),
    lambda place: os.truncate(place / "0000" / FIRST, 4200),
    lambda place: os.truncate(place / "0000" / FIRST, 100),
    lambda place: (place / "0000" / FIRST).unlink(),
    lambda place: rot(place, "watermark", 0),
    lambda place: (place / "0000/watermark").unlink(),
    lambda place: shutil.rmtree(place / "0000"),
    lambda place: [(place / "0000" / name).unlink() for name in ("watermark", FIRST)],
], ids=[
    "body", "batch", "header", "cut", "cut header", "no segment", "mark", "no mark", "no partition", "no files",
])  # fmt: skip
def test_rotten_directory_is_healed_by_the_others(
    written: list[Path], damage: Callable[[Path], object], victim: int
) -> None:
    damage(written[victim])
    for number in range(2):
        with open_all(written) as topic:
            assert values_of(topic)[:3] == [b"one", b"two", b"three"]
            topic.append(b"%d" % number, sync=True)
            until(partial(all_have_all, topic), "all have it")
        assert len(assert_same(written)) == 4 + number
        if number == 0:
            damage(written[victim])
    members = [read_members(REAL, str(each)) for each in written]
    assert [each.version for each in members if each is not None] == [1, 1, 1]


def test_damage_of_all_is_an_error(written: list[Path]) -> None:
    for place in written:
        rot(place, FIRST, 4096 + 150)
    with pytest.raises(CorruptLogError):
        open_all(written)


def test_damage_that_the_source_meets_later_is_passed_by_another_source(written: list[Path]) -> None:
    with open_all(written) as topic:
        topic.append(b"four", sync=True)
        until(partial(all_have_all, topic), "all have it")
    rot(written[0], FIRST, 4096 + 140, 4096 + 160)  # in the first batch of two
    shutil.rmtree(written[2])
    with open_all(written, lose=[written[2]]) as topic:
        assert len(topic.copies()) == 3
    assert_same(written[1:])


def test_damage_inside_of_every_source_is_an_error(written: list[Path]) -> None:
    with open_all(written) as topic:
        topic.append(b"four", sync=True)
        until(partial(all_have_all, topic), "all have it")
    for place in written[:2]:
        rot(place, FIRST, 4096 + 140, 4096 + 160)  # in the first batch of two
    shutil.rmtree(written[2])
    with pytest.raises(CorruptLogError, match=r"byte 4096|byte 42"):
        open_all(written, lose=[written[2]])


def test_copy_that_says_to_have_been_longer_counts_so(path: Path, open_topic: Callable[..., Topic]) -> None:
    topic = open_topic(partitions=1)
    topic.append(b"one", sync=True)
    mark = (path / "0000/watermark").read_bytes()
    ends = []
    for value in (b"two", b"three"):
        topic.append(value, sync=True)
        ends.append(topic.partition(0).high_watermark)
    with Directory.open(REAL, str(path / "0000")) as place:
        identity = Identity.of(topic.log_id, 0)
        (path / "0000/watermark").write_bytes(mark)  # a power cut has taken the newer marks,
        content = (path / "0000" / FIRST).read_bytes()
        (path / "0000" / FIRST).write_bytes(content.replace(b"two", b"tow"))  # and what was durable is damaged
        found = read_mark(place, identity)
        assert found is not None
        standing = standing_of(place, identity, found)
    assert standing.claim == ends[0] and standing.damage is not None and not standing.is_rotten


def test_opening_that_dies_while_it_sets_a_partition_aside_leaves_no_witness(
    written: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rot(written[1], FIRST, 4096)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="it dies here"):
        patched.setattr(opening._Assembly, "_set_aside", dying)
        patched.setattr(opening._Assembly, "_lose_reach", dying)
        open_all(written)
    members = read_members(REAL, str(written[1]))
    assert members is not None and not members.version
    with open_all([written[1], written[0], written[2]]) as topic:
        assert len(values_of(topic)) == 3
    members = read_members(REAL, str(written[1]))
    assert members is not None and members.version


def dying(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "it dies here")


def test_replacement_that_dies_is_repeated(written: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(written[2])
    with monkeypatch.context() as patched, pytest.raises(OSError, match="it dies here"):
        patched.setattr(opening._Assembly, "promise", dying)
        open_all(written, lose=[written[2]])
    with open_all(written, lose=[written[2]]) as topic:
        assert [each.state for each in topic.copies()] == ["own", "in step", "in step"]
    assert len(assert_same(written)) == 3


def test_long_copy_shows_what_is_acknowledged_on_its_way(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.replication.pair.SYNC_BYTES", 1)
    monkeypatch.setattr("loglib.replication.source.BLOCK_BYTES", 1)
    devices = Devices(testing.UnsyncedFiles())
    with testing.open_topic(places[0], **QUIET) as topic:
        for number in range(5):
            topic.append(b"%d" % number, sync=True)
    topic = open_all(places[:2], files=devices)
    with devices.failing(places[1]):
        for _ in range(5):
            with pytest.raises(TooFewCopiesError):
                topic.append(b"not acknowledged", sync=True)
        with pytest.raises(TooFewCopiesError):
            topic.close()
    open_all(places[:2], files=devices).close()
    assert len(assert_same(places[:2])) == 10


def test_lost_mark_is_no_witness(written: list[Path]) -> None:
    (written[1] / "0000/watermark").unlink()
    os.rename(written[2], written[2].with_name("away"))
    with pytest.raises(TooFewCopiesError, match="does not say what was acknowledged"):
        open_all(written)


def test_directory_that_fails_while_it_is_opened_is_left_out(written: list[Path], devices: Devices) -> None:
    with devices.failing(written[2]), open_all(written, files=devices) as topic:
        assert "the device fails" in str(topic.copies()[2].error)
        topic.append(b"four", sync=True)
    with devices.failing(written[0]), pytest.raises(OSError, match="the device fails"):
        open_all(written, files=devices)
    with devices.gone(written[1]), open_all(written, files=devices) as topic:
        assert "the device is gone" in str(topic.copies()[2].error)
    with open_all(written, files=devices) as topic:
        assert len(values_of(topic)) == 4
    assert len(assert_same(written)) == 4


@pytest.mark.parametrize("file", ["watermark", FIRST])
def test_directory_that_fails_later_in_the_opening_is_left_out(
    written: list[Path], devices: Devices, file: str
) -> None:
    saved(written[2])
    with open_all(written, files=devices) as topic:
        topic.append(b"four", sync=True)
        until(partial(all_have_all, topic), "all have it")
    restored(written[2])

    def refuse(call: testing.Call) -> None:
        if call.path == f"{written[2]}/0000/{file}" and call.name == "pwritev":
            raise OSError(errno.EIO, "refused", call.path)

    devices.meanwhile = refuse
    with open_all(written, files=devices) as topic:
        assert "refused" in str(topic.copies()[2].error)
        topic.append(b"five", sync=True)
    devices.meanwhile = lambda _: None
    with open_all(written, files=devices) as topic:
        assert len(values_of(topic)) == 5
    assert_same(written)


def test_new_directory_that_fails_late_makes_no_replicated_topic(places: list[Path], devices: Devices) -> None:
    def refuse(call: testing.Call) -> None:
        if call.path.startswith(f"{places[1]}/0000") and call.name == "datasync":
            raise OSError(errno.EIO, "refused", call.path)

    devices.meanwhile = refuse
    with pytest.raises(OSError, match="refused"):
        open_all(places, files=devices)
    testing.open_topic(places[0]).close()


def test_failure_before_the_writers_are_made_releases_all(written: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(OSError, match="it dies here"):
        patched.setattr("loglib.topic.Access", dying)
        open_all(written)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="it dies here"):
        patched.setattr("loglib.access.Writer", dying)
        open_all(written)
    open_all(written).close()


def test_new_directory_that_fails_makes_no_replicated_topic(places: list[Path], devices: Devices) -> None:
    with devices.failing(places[1]), pytest.raises(OSError, match="the device fails"):
        open_all(places, files=devices)
    with testing.open_topic(places[0]) as topic:
        topic.append(b"one", sync=True)
    with open_all(places, files=devices) as topic:
        assert values_of(topic) == [b"one"]
    assert_same(places)


def test_promise_is_durable_in_all_before_anything_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made, places = testing.MemoryFiles(), [f"/{device}/topic" for device in "abc"]
    with open_all(places, files=made, acks="quorum") as topic:
        identity = Identity.of(topic.log_id, 0)
    fs = testing.CrashFS(testing.Image.of(made.tree()))

    def promised(files: Any) -> list[int]:
        marks = []
        for place in places:
            with Directory.open(files, f"{place}/0000") as directory:
                marks.append(read_mark(directory, identity))
        return [mark.promised_epoch for mark in marks if mark is not None]

    before, seen = promised(fs), []

    def look(*arguments: Any) -> Standing:
        _, nothing_pending, *_ = fs.crash_states(since=len(fs.operations))
        seen.append(promised(nothing_pending.files))
        return standing_of(*arguments)

    monkeypatch.setattr(opening, "standing_of", look)
    open_all(places, files=fs).close()
    assert seen[0] == [before[0] + 1] * 3


def test_directory_that_comes_back_has_accepted_the_writer_for_good() -> None:
    made, places = testing.MemoryFiles(), [f"/{device}/topic" for device in "abc"]
    open_all(places, files=made, acks="quorum").close()
    fs = testing.CrashFS(testing.Image.of(made.tree()))
    devices = Devices(fs)
    with devices.gone("/c"):
        topic = open_all(places, files=devices)
    with topic:
        until(lambda: topic.copies()[2].state == "in step", "it comes back")
        _, nothing_pending, *_ = fs.crash_states(since=len(fs.operations))
        epochs = []
        for place in places:
            with Directory.open(nothing_pending.files, f"{place}/0000") as directory:
                mark = read_mark(directory, Identity.of(topic.log_id, 0))
                epochs.append(None if mark is None else mark.writer_epoch)
    assert epochs[0] and epochs == [epochs[0]] * 3


def test_opening_that_too_few_accept_shows_nothing_new(
    places: list[Path], devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_all(places[:2], files=devices)
    topic.append(b"one", sync=True)
    with devices.failing(places[1]), pytest.raises(TooFewCopiesError):
        topic.append(b"two")
        topic.close()
    with monkeypatch.context() as patched, pytest.raises(TooFewCopiesError, match="the disk is full"):
        patched.setattr(Replica, "accept", lambda _: (_ for _ in ()).throw(OSError("the disk is full")))
        open_all(places[:2], files=devices)
    for place in places[:2]:
        with testing.open_topic(place, files=devices, mode="r") as reader:
            assert values_of(reader) == [b"one"]
    with open_all(places[:2], files=devices) as topic:
        assert values_of(topic) == [b"one", b"two"]


def test_number_that_was_promised_to_a_later_opening_keeps_a_directory_out(written: list[Path]) -> None:
    away = written[1].with_name("away")
    os.rename(written[1], away)
    with open_all(written) as topic:
        copied = CopiedLog(REAL, str(away / "0000"), Identity.of(topic.log_id, 0), 0o600, shows=False)
        copied.promise(99)
        copied.close()
        os.rename(away, written[1])
        until(lambda: "a later opening" in str(topic.copies()[2].error), "it is refused")
    with pytest.raises(LockedError), open_all(written), open_all(written):
        pass


@pytest.fixture
def devices() -> Devices:
    return Devices(testing.UnsyncedFiles())
