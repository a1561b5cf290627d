"""Topics with replicas: a record is acknowledged when it is durable in as many directories as were asked for."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from replicated import Devices, assert_same, log_bytes, open_all, until

from conftest import QUIET, values_of
from loglib import FlushPolicy, LogError, NotLeaderError, Topic, repair, testing, transaction
from loglib.copies import promote
from loglib.copies.roster import Acks, needed
from loglib.errors import TooFewCopiesError
from loglib.system.files import REAL
from loglib.system.lock import is_free


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Three directories for one topic."""
    return [tmp_path / device / "topic" for device in "abc"]


@pytest.fixture
def devices() -> Devices:
    return Devices(testing.UnsyncedFiles())


def durable_in(topic: Topic) -> list[tuple[int, ...]]:
    return [each.durable_ends for each in topic.replicas()]


@pytest.mark.parametrize(("acks", "members", "count"), [
    ("all", 2, 2), ("all", 3, 3), ("quorum", 2, 2), ("quorum", 3, 2), ("quorum", 4, 3), ("quorum", 5, 3),
    ("leader", 3, 1),
])  # fmt: skip
def test_acks_say_how_many_directories_must_have_a_record(acks: Acks, members: int, count: int) -> None:
    assert needed(acks, members) == count


def test_acknowledged_record_is_durable_in_all_directories(places: list[Path]) -> None:
    with open_all(places, partitions=2) as topic:
        topic.append(b"one", partition=0, sync=True)
        topic.append_many([b"two", b"three"], partition=1)
        topic.flush()
        own, *others = topic.replicas()
        assert [each.durable_ends for each in others] == [own.durable_ends] * 2
        assert [each.state for each in (own, *others)] == ["own", "in step", "in step"]
    assert assert_same(places) == [b"one", b"two", b"three"]


def test_readers_of_each_directory_see_what_is_acknowledged(places: list[Path]) -> None:
    with open_all(places[:2]) as topic, Topic.open(places[1], mode="r") as reader:
        for number in range(5):
            topic.append(b"%d" % number, sync=True)
            shown = [b"%d" % each for each in range(number + 1)]
            until(partial(shows, reader, shown), "the replica shows it")


def shows(topic: Topic, values: list[bytes]) -> bool:
    return values_of(topic) == values


def test_topic_goes_on_from_any_of_its_directories(places: list[Path]) -> None:
    for number in range(4):
        turned = places[number % 3 :] + places[: number % 3]
        with open_all(turned) as topic:
            topic.append(b"%d" % number, sync=True)
    assert assert_same(places) == [b"0", b"1", b"2", b"3"]


def test_existing_topic_gets_replicas_and_gives_them_up(places: list[Path]) -> None:
    with testing.open_topic(places[0], **QUIET) as topic:
        topic.append(b"before", sync=True)
        topic.partition(0).roll()
    with open_all(places) as topic:
        topic.append(b"with", sync=True)
    assert_same(places)
    with open_all(places[:1], forget_replicas=places[1:]) as topic:
        assert [each.state for each in topic.replicas()] == ["own"]
        topic.append(b"alone", sync=True)
    with testing.open_topic(places[0]) as topic:
        assert topic.replicas() == [] and values_of(topic) == [b"before", b"with", b"alone"]


def test_segments_and_retention_go_along(places: list[Path]) -> None:
    with open_all(places, segment_bytes=8192) as topic:
        for number in range(40):
            topic.append(b"%02d" % number + b"x" * 1000, sync=True)
        topic.partition(0).delete_before(topic.partition(0).segments[2].base_offset)
        topic.append(b"last", sync=True)
        topic.partition(0).roll()
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
    assert assert_same(places) == []
    with open_all(places) as topic:
        topic.append(b"next", sync=True)
    assert assert_same(places) == [b"next"] and len(log_bytes(testing.UnsyncedFiles(), places[2])) == 1


def test_policies_and_commits_of_groups_follow(places: list[Path]) -> None:
    with open_all(places[:2]) as topic:
        topic.append_many([b"one", b"two"])
        topic.flush()
        with topic.group("etl", commit="manual") as group:
            for record in group.follow(timeout=0):
                group.commit(record)
        topic.alter(max_record_bytes=5000)
    open_all(places[:2]).close()
    assert not (places[0] / "groups/etl/mirrored").exists() and (places[1] / "groups/etl/mirrored").exists()
    with Topic.open(places[1], mode="r") as topic:
        assert topic.config.max_record_bytes == 5000
        with pytest.raises(NotLeaderError), topic.group("etl"):
            pass
    with open_all([places[1], places[0]]) as topic:
        topic.append(b"three", sync=True)
        with topic.group("etl") as group:
            assert [record.value for record in group.follow(timeout=0)] == [b"three"]
    assert (places[0] / "groups/etl/mirrored").exists() and not (places[1] / "groups/etl/mirrored").exists()


def test_background_flush_is_acknowledged_by_all(places: list[Path]) -> None:
    with open_all(places, flush=FlushPolicy(interval=0.001, records=None, bytes=None)) as topic:
        topic.append(b"one")
        until(lambda: values_of(topic) == [b"one"], "it is flushed")
        own, *others = durable_in(topic)
        assert others == [own] * 2


# --- a slow or failing directory ---------------------------------------------------------------------------


def test_quorum_goes_on_without_one_which_catches_up(
    places: list[Path], devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    with open_all(places, acks="quorum", files=devices) as topic:
        topic.append(b"before", sync=True)
        with devices.failing(places[2]):
            for number in range(20):
                topic.append(b"%d" % number, sync=True)
            until(lambda: topic.replicas()[2].state == "left out", "its failure is noticed")
            topic.append(b"without", sync=True)
            left_out = topic.replicas()[2]
            assert "the device fails" in str(left_out.error) and left_out.lag_bytes
            assert topic.replicas()[1].state == "in step"
            assert f"{places[2]}: left out" in caplog.text
        until(lambda: topic.replicas()[2].state == "in step", "it comes back")
        topic.append(b"after", sync=True)
        assert len(values_of(topic)) == 23
    assert len(assert_same(places)) == 23
    assert "counts again" in caplog.text


def test_all_does_not_acknowledge_without_one(places: list[Path], devices: Devices) -> None:
    with open_all(places[:2], files=devices) as topic:
        with devices.failing(places[1]):
            with pytest.raises(TooFewCopiesError, match="the device fails") as caught:
                topic.append(b"one", sync=True)
            assert (caught.value.needed, caught.value.found) == (2, 1)
            assert str(places[1]) in caught.value.missing and caught.value.appended
            with pytest.raises(TooFewCopiesError):
                topic.flush()
            assert values_of(topic) == []
        until(lambda: topic.replicas()[1].state == "in step", "it comes back")
        topic.flush()
        assert values_of(topic) == [b"one"]
    assert assert_same(places[:2]) == [b"one"]


def test_append_that_must_begin_a_segment_waits_for_all(places: list[Path], devices: Devices) -> None:
    with open_all(places[:2], segment_bytes=4096, files=devices) as topic:
        topic.append(b"one" + bytes(3000), sync=True)
        with devices.failing(places[1]):
            topic.append(b"two" + bytes(500), sync=False)
            for _ in range(2):
                with pytest.raises(TooFewCopiesError) as caught:
                    topic.append(b"three" + bytes(3000), sync=True)
                assert not caught.value.lost
        until(lambda: topic.replicas()[1].state == "in step", "it comes back")
        topic.flush()
        assert [value.rstrip(b"\0") for value in values_of(topic)] == [b"one", b"two", b"three", b"three"]
        assert len(topic.partition(0).segments) > 1
    assert len(assert_same(places[:2])) == 4


def test_slow_directory_is_left_out_in_time(places: list[Path], devices: Devices) -> None:
    with open_all(places[:2], files=devices, replica_timeout=0.5) as topic:  # the flush below needs an answer in time
        with devices.stalled(str(places[1])), pytest.raises(TooFewCopiesError, match=r"no answer within 0\.5 s"):
            topic.append(b"one", sync=True)
        until(lambda: topic.replicas()[1].state == "in step", "it comes back")
        topic.flush()
    assert assert_same(places[:2]) == [b"one"]


def test_slow_directory_holds_up_no_quorum(places: list[Path], devices: Devices) -> None:
    with open_all(places, acks="quorum", files=devices, replica_timeout=0.01) as topic:
        with devices.stalled(str(places[1])):
            until(lambda: is_left_out_after_a_flush(topic), "the flush after the timeout leaves it out")
        until(lambda: topic.replicas()[1].state == "in step", "it comes back")
        count = len(values_of(topic))
    assert len(assert_same(places)) == count


def is_left_out_after_a_flush(topic: Topic) -> bool:
    topic.append(b"x", sync=True)
    return topic.replicas()[1].state == "left out"


def test_leader_waits_for_nobody(places: list[Path], devices: Devices) -> None:
    with open_all(places, acks="leader", files=devices, replica_timeout=60) as topic:
        with devices.stalled(str(places[1])), devices.stalled(str(places[2])):
            topic.append(b"one", sync=True)
            assert values_of(topic) == [b"one"]
        until(lambda: durable_in(topic) == [durable_in(topic)[0]] * 3, "the others come up")
    assert assert_same(places) == [b"one"]


def test_records_in_doubt_at_close_are_named(places: list[Path], devices: Devices) -> None:
    topic = open_all(places[:2], files=devices)
    with devices.failing(places[1]):
        topic.append_many([b"one", b"two"])
        with pytest.raises(TooFewCopiesError) as caught:
            topic.close()
    assert [len(each.offsets) > 0 for each in caught.value.in_doubt] == [True]
    with open_all(places[:2], files=devices) as topic:  # they are in the own directory, and nothing was acknowledged
        assert values_of(topic) == [b"one", b"two"]
    assert_same(places[:2])


@pytest.mark.parametrize("turned", [False, True])
def test_retention_that_one_directory_missed_goes_along_later(
    places: list[Path], devices: Devices, turned: bool
) -> None:
    with open_all(places[:2], files=devices) as topic:
        for number in range(3):
            topic.append(b"%d" % number, sync=True)
            topic.partition(0).roll()
        with devices.failing(places[1]):
            topic.partition(0).delete_before(topic.partition(0).segments[1].base_offset)
            until(lambda: topic.replicas()[1].state == "left out", "its failure is noticed")
            topic.close()
    with open_all(places[1::-1] if turned else places[:2], files=devices) as topic:
        assert values_of(topic) == [b"1", b"2"]
        topic.append(b"3", sync=True)
    assert assert_same(places[:2]) == [b"1", b"2", b"3"]


def test_retention_and_rolls_while_one_is_away(places: list[Path], devices: Devices) -> None:
    with open_all(places, acks="quorum", segment_bytes=8192, files=devices) as topic:
        topic.append(b"before", sync=True)
        with devices.failing(places[1]):
            for number in range(40):
                topic.append(b"%02d" % number + b"x" * 1000, sync=True)
            topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        until(lambda: topic.replicas()[1].state == "in step", "it begins again where the log begins now")
        topic.append(b"after", sync=True)
    assert assert_same(places)[-1] == b"after"


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"shared": True}, ValueError, "has one writer"),
    ({"mode": "r"}, ValueError, "leave replicas="),
    ({"acks": "two"}, ValueError, "acks is one of 'all', 'quorum', 'leader', not 'two'"),
    ({"replica_timeout": 0}, ValueError, "replica_timeout is a number of seconds above 0"),
    ({"replicas": "/a"}, TypeError, "replicas is a list"),
    ({"forget_replicas": "/a"}, TypeError, "forget_replicas is a list"),
    ({"forget_replicas": ["/a"]}, ValueError, "has no replicas yet"),
    ({"replicas": None, "acks": "all"}, ValueError, "replicas=.* is missing"),
    ({"durability": "os"}, ValueError, "durability='os'; a topic with replicas needs 'disk'"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(
    places: list[Path], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"replicas": places[1:], **options}
    with pytest.raises(error, match=message):
        testing.open_topic(places[0], **given)


def test_directory_that_is_named_twice_is_refused(places: list[Path]) -> None:
    with pytest.raises(ValueError, match="named twice"):
        Topic.open(places[0], create=True, replicas=[places[0]])


def test_directory_that_is_opened_is_not_given_up(places: list[Path]) -> None:
    with pytest.raises(ValueError, match="is opened, so it cannot be in forget_replicas="):
        Topic.open(places[0], create=True, replicas=places[1:], forget_replicas=[places[0]])


def test_replicated_topic_is_not_written_without_its_replicas(places: list[Path]) -> None:
    with open_all(places):
        pass
    for place in places:
        with pytest.raises(NotLeaderError, match=r"with replicas=\[\.\.\.\], its other directories"):
            Topic.open(place, create=True)
        with pytest.raises(NotLeaderError, match="written together"):
            Topic.add_partitions(place, 3)
        with pytest.raises(NotLeaderError, match="written together"):
            promote(place)
        with pytest.raises(NotLeaderError, match="written together"):
            repair(place)
        assert repair(place, dry_run=True).repairs == ()


def test_durability_of_a_replicated_topic_stays(places: list[Path]) -> None:
    with open_all(places) as topic, pytest.raises(ValueError, match="has durability='disk'"):
        topic.alter(durability="os")


def test_topic_with_replicas_takes_part_in_no_transaction(places: list[Path]) -> None:
    refused = pytest.raises(LogError, match="you cannot use it in transactions")
    with open_all(places) as topic, refused, transaction("app") as work:
        work.append(topic, b"one")
    other = [places[0].parent / "other", places[1].parent / "other"]
    with testing.open_topic(other[0], **QUIET) as topic, transaction("app") as work:
        work.append(topic, b"one")
    with pytest.raises(LogError, match="takes part in transactions"):
        open_all(other)


def test_second_writer_is_refused(places: list[Path]) -> None:
    with open_all(places), pytest.raises(LogError, match="is held by"):
        open_all([places[1], places[0], places[2]])


# --- in the background, and at the end -----------------------------------------------------------------------


def test_commits_follow_while_the_topic_is_open(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.copies.replica_set._CARRY_S", 0.001)
    with open_all(places[:2]) as topic, topic.group("etl", commit="manual") as group:
        for number in range(3):
            topic.append(b"%d" % number, sync=True)
            for record in group.follow(timeout=0):
                group.commit(record)
            with Topic.open(places[1], mode="r") as copy:
                end = topic.partition(0).high_watermark
                until(lambda: copy.groups() == ["etl"], "the group is there")
                until(partial(has_committed, copy, end), "the commit is there")


def has_committed(topic: Topic, offset: int) -> bool:
    commits = topic.group_info("etl").committed
    return bool(commits) and commits[0].offset == offset


def test_commits_that_cannot_be_copied_are_reported(
    places: list[Path], devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    with open_all(places[:2], files=devices) as topic:
        topic.append(b"one", sync=True)
        with topic.group("etl"):
            pass
        devices.meanwhile = refusing(lambda call: call.path.startswith(f"{places[1]}/groups"))
    assert "the groups' commits could not be copied" in caplog.text
    assert assert_same(places[:2]) == [b"one"]


def refusing(chosen: Callable[[testing.Call], object]) -> Callable[[testing.Call], None]:
    """A device that refuses the chosen calls."""

    def meanwhile(call: testing.Call) -> None:
        if call.name in testing.CHANGES and chosen(call):
            raise OSError(errno.EIO, "refused", call.path)

    return meanwhile


def test_directory_that_fails_while_it_comes_back_is_tried_again(places: list[Path], devices: Devices) -> None:
    with open_all(places, acks="quorum", files=devices) as topic:
        tries: list[str] = []

        def is_log(call: testing.Call) -> bool:
            found = call.path.startswith(str(places[2])) and call.name == "pwritev" and call.file.endswith(".log")
            return found and len(tries) < 3 and not tries.append(call.path)  # type: ignore[func-returns-value]

        devices.meanwhile = refusing(is_log)
        topic.append(b"one", sync=True)
        until(lambda: len(tries) == 3, "it was tried again")
        until(lambda: topic.replicas()[2].state == "in step", "it comes back")
        topic.append(b"two", sync=True)
    assert assert_same(places) == [b"one", b"two"]


def test_close_ends_a_return(places: list[Path], devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.copies.replica._NEAR_BYTES", -1)  # it never comes near
    with open_all(places, acks="quorum", files=devices) as topic:
        with devices.failing(places[2]):
            topic.append(b"one", sync=True)
            until(lambda: topic.replicas()[2].state == "left out", "its failure is noticed")
        until(lambda: (places[2] / "0000" / f"{0:020d}.log").stat().st_size > 4096, "it catches up")
    with open_all(places, files=devices) as topic:
        assert values_of(topic) == [b"one"]
    assert_same(places)


def test_directory_that_fails_at_the_end_is_reported(
    places: list[Path], devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    with open_all(places[:2], files=devices) as topic:
        topic.append(b"one", sync=True)
        mark = f"{places[1]}/0000/watermark"
        devices.meanwhile = refusing(lambda call: call.path == mark and call.name == "datasync")
    assert f"{places[1]}: left out" in caplog.text
    devices.meanwhile = lambda _: None
    with open_all(places[:2], files=devices) as topic:
        assert values_of(topic) == [b"one"]


def test_close_leaves_a_directory_that_hangs_behind(
    places: list[Path], devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    topic = open_all(places, acks="quorum", files=devices, replica_timeout=0.01)
    with devices.stalled(str(places[2])):
        topic.append(b"one", sync=True)
        topic.close()
        assert f"{places[2]}: does not answer" in caplog.text
        with pytest.raises(LogError, match="is held by"):
            open_all(places, files=devices)
    until(lambda: is_free(REAL, str(places[2] / "0000")), "its thread ends")
    with open_all(places, files=devices) as topic:
        assert values_of(topic) == [b"one"]


def test_topic_that_its_own_thread_finds_abandoned_is_closed_in_another(places: list[Path], devices: Devices) -> None:
    topic = open_all(places[:2], files=devices)
    told: list[str] = []

    def abandon(call: testing.Call) -> None:
        if threading.current_thread().name == "loglib-replica" and call.name == "datasync" and not told:
            told.append(call.path)
            topic.__del__()  # as garbage collection does, in any thread

    devices.meanwhile = abandon
    with pytest.warns(ResourceWarning, match="was not closed"):
        topic.append(b"one", sync=True)
        until(lambda: topic.closed, "it is closed")
    until(lambda: is_free(REAL, str(places[1] / "0000")), "its directories are released")
    devices.meanwhile = lambda _: None
    with open_all(places[:2], files=devices) as topic:
        assert values_of(topic) == [b"one"]


def test_forked_child_leaves_the_directories_alone(places: list[Path]) -> None:
    with open_all(places[:2]) as topic:
        topic.append(b"one", sync=True)
        pid = os.fork()
        if pid == 0:
            topic.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        topic.append(b"two", sync=True)
    assert assert_same(places[:2]) == [b"one", b"two"]
