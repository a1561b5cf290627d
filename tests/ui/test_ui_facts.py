"""The facts of the page: topics, what is wrong with them, segments and why they stay, groups, counts and rates."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import spoil
from monitored import committed, healthy, made, troubled

import loglib
from conftest import QUIET, fill, last_segment, needs_root, open_files, tree
from loglib import Retention, Topic, testing
from loglib.copies import mirror
from loglib.errors import CorruptLogError
from loglib.metrics.health import copies_of
from loglib.transactions.store import Store
from loglib.ui.app import Answers, Asked, _plain
from loglib.ui.consumers import groups_of
from loglib.ui.counts import RecordCounts
from loglib.ui.overview import Overview, archive_facts
from loglib.ui.samples import Sampler
from loglib.ui.segments import Segments, explained
from loglib.ui.shares import Shares
from loglib.ui.topics import Topics
from loglib.ui.troubles import Trouble, troubles_of

Open = Callable[..., Topic]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """The answers of a page for this directory, as JSON that was written and read."""
    opened: list[Answers] = []

    def ask(name: str, at: Path = tmp_path, **arguments: object) -> Any:
        answers = Answers(Topics(at))
        opened.append(answers)
        facts = answers.by_name[name](Asked({key: str(each) for key, each in arguments.items()}))
        return json.loads(json.dumps(_plain(facts)))

    yield ask
    for each in opened:
        each.close()


_left: list[Sampler | Topics] = []  # to be closed


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    """End the threads, which would keep files open during later tests."""
    yield
    while _left:
        _left.pop().close()


def sampler_of(topics: Topics) -> Sampler:
    sampler = Sampler(topics)
    _left.extend((topics, sampler))
    return sampler


def overview(at: Path) -> Overview:
    topics = Topics(at)
    return Overview(topics, sampler_of(topics), Shares(topics))


def of_kind(troubles: list[Trouble]) -> dict[str, Trouble]:
    return {each.kind: each for each in troubles}


# --- topics --------------------------------------------------------------------------------------------------


def test_topics_of_a_directory_are_found_while_they_come_and_go(tmp_path: Path) -> None:
    topics = Topics(tmp_path)
    assert (topics.names(), topics.only) == ([], None)
    made(tmp_path / "b")
    made(tmp_path / "a")
    assert topics.names() == ["a", "b"]
    assert topics.ask("a", lambda topic: topic.name) == "a"
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="no topic 'a'"):
        topics.ask("a", lambda topic: topic.name)
    topics.close()


def test_one_topic_is_shown_alone(tmp_path: Path) -> None:
    made(tmp_path / "a")
    made(tmp_path / "b")
    topics = Topics(tmp_path / "a")
    assert (topics.names(), topics.only, topics.root) == (["a"], "a", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        topics.path_of("b")


@pytest.mark.parametrize("name", ["..", ".", "", "../other", "/etc", "a/../b", "a\0b", ".hidden", "x" * 300])
def test_no_name_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    made(tmp_path / "other")
    made(tmp_path / "inside" / "a")
    made(tmp_path / "inside" / ".hidden")
    with pytest.raises(FileNotFoundError):
        Topics(tmp_path / "inside").path_of(name)


def test_topic_that_was_replaced_is_opened_again(tmp_path: Path) -> None:
    topics, at = Topics(tmp_path), made(tmp_path / "a", records=3)
    assert topics.ask("a", lambda topic: len(list(topic.read()))) == 3
    shutil.rmtree(at)
    made(at, records=5)
    deadline = time.monotonic() + 30  # an open topic looks once a second where its path leads
    while topics.ask("a", lambda topic: topic.partition(0).high_watermark and len(list(topic.read()))) != 5:
        assert time.monotonic() < deadline


# --- a row, and what is wrong ---------------------------------------------------------------------------------


def test_row_has_the_figures_of_a_topic(tmp_path: Path) -> None:
    committed(made(tmp_path / "orders", age_s=100, records=6, partitions=2), "billing", "begin")
    row = overview(tmp_path).row("orders")
    with Topic.open(tmp_path / "orders", mode="r") as topic:
        size = sum(each.high_watermark for each in topic.partitions)
    assert (row.partitions, row.size_bytes, row.troubles) == (2, size, [])
    assert row.oldest_us is not None and 100 <= (row.now_us - row.oldest_us) / 1e6 < 3600
    assert [(each.name, each.bytes) for each in row.groups] == [("billing", size)]


def test_troubles_of_a_healthy_place_are_none(tmp_path: Path) -> None:
    place = healthy(tmp_path / "well")
    shown = overview(place)
    assert [shown.row(name).troubles for name in Topics(place).names()] == [[], []]


def test_each_fault_is_a_trouble_with_the_next_command(tmp_path: Path) -> None:
    place = troubled(tmp_path / "topics")
    shown = overview(place)
    found = {name: of_kind(shown.row(name).troubles) for name in Topics(place).names()}
    assert found["stopped"] == {} and found["lagging"] == {}
    assert found["damaged"]["damage"].command == f"loglib verify {place / 'damaged'}"
    assert found["unreadable"]["damage"].command == f"loglib repair {place / 'unreadable'} --dry-run"
    assert "no topic is there" in found["alone"]["copy"].text
    assert "lacks" in found["halved"]["copy"].text and found["halved"]["copy"].command is not None


def test_unreadable_topic_is_a_row_without_figures(tmp_path: Path) -> None:
    at = made(tmp_path / "bad")
    spoil(at / "topic.json", 30)
    row = overview(tmp_path).row("bad")
    assert (row.partitions, row.size_bytes) == (None, None) and [each.kind for each in row.troubles] == ["damage"]


def test_declared_gap_is_a_trouble_until_it_is_accepted(tmp_path: Path) -> None:
    at = made(tmp_path / "t")
    with Topic.open(at) as topic:
        topic.partition(0).roll()
        start = next(iter(topic.read())).offset
    spoil(at / "0000" / f"{0:020}.log", 4096 + start + 100)
    loglib.repair(at)
    with Topic.open(at, mode="r") as topic:
        (gap,) = troubles_of(topic)
        assert (gap.kind, gap.command) == ("gap", f"loglib repair {at} --accept --dry-run")
        loglib.repair(at, accept=True)
        assert troubles_of(topic) == []


def test_reader_that_meets_a_declared_gap_makes_no_second_trouble_of_it(
    tmp_path: Path, page: Callable[..., Any]
) -> None:
    at = made(tmp_path / "t")
    with Topic.open(at) as topic:
        topic.partition(0).roll()
        start = next(iter(topic.read())).offset
    spoil(at / "0000" / f"{0:020}.log", 4096 + start + 100)
    answers = Answers(Topics(tmp_path))

    def met() -> tuple[int, list[str]]:
        found = answers.by_name["records"](Asked({"topic": "t", "way": "on", "from": "begin"}))
        answers._overview._troubles.clear()  # they are looked for every ten seconds
        row = answers.by_name["row"](Asked({"topic": "t"}))
        return len(found.damage), [each.kind for each in row.troubles]

    loglib.repair(at)
    assert met() == (1, ["gap"]), "the page of records names it in its place"
    loglib.repair(at, accept=True)
    assert met() == (1, [])
    answers.close()


def test_pending_transaction_is_a_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, other = made(tmp_path / "a"), made(tmp_path / "b")
    with Topic.open(at) as one, Topic.open(other) as two:
        with loglib.transaction("etl") as transaction:
            transaction.append(one, b"x")
        with Topic.open(at, mode="r") as topic:
            assert troubles_of(topic) == []
        monkeypatch.setattr(Store, "finish", lambda *_, **__: None)  # the process dies before the end
        with loglib.transaction("etl") as transaction:
            transaction.append(one, b"y")
        with Topic.open(at, mode="r") as topic, Topic.open(other, mode="r") as unconcerned:
            (found,) = troubles_of(topic)
            assert found.kind == "transaction" and "not applied yet" in found.text
            assert troubles_of(unconcerned) == []
        assert two.name == "b"
        monkeypatch.undo()


def test_group_whose_commit_retention_has_overtaken_is_a_trouble(tmp_path: Path) -> None:
    at = made(tmp_path / "t", records=5)
    committed(at, "slow", "begin")
    with Topic.open(at) as topic:
        topic.partition(0).delete_before(topic.partition(0).high_watermark)
    with Topic.open(at, mode="r") as topic:
        (found,) = troubles_of(topic)
        assert found.kind == "group" and "group slow has lost records of partition 0" in found.text
        assert found.command == f"loglib reset {at} slow --to begin --dry-run"
        (group,) = groups_of(topic)
        assert group.partitions[0].has_lost


def test_mirror_that_lags_names_the_command_that_updates_it(tmp_path: Path) -> None:
    source = made(tmp_path / "t", age_s=7200)
    mirror(source, tmp_path / "copies" / "t")
    at_us = time.time_ns() // 1000 - 3600 * 1_000_000
    with testing.open_topic(source, clock=lambda: at_us, **QUIET) as topic:
        topic.append(b"late", sync=True)
    with Topic.open(tmp_path / "copies" / "t", mode="r") as topic:
        (found,) = troubles_of(topic)
    assert found.command == f"loglib mirror {source} {tmp_path / 'copies' / 't'}" and "lacks" in found.text


def test_mirror_whose_source_was_set_back_is_no_whole_copy(tmp_path: Path) -> None:
    source, copy = made(tmp_path / "t"), tmp_path / "copies" / "t"
    shutil.copytree(source, tmp_path / "backup")
    with Topic.open(source) as topic:
        topic.append_many([b"newer"] * 1000)
    mirror(source, copy)
    shutil.rmtree(source)
    shutil.copytree(tmp_path / "backup", source)
    for values in ([], [b"other"]):
        with Topic.open(source) as topic:
            topic.append_many(values)
        with Topic.open(copy, mode="r") as topic:
            (state,) = copies_of(topic)
        assert state.lag is None and "was set back, and has another history now" in str(state.error)


def test_commands_are_quoted_for_a_shell(tmp_path: Path) -> None:
    at = made(tmp_path / "a place; rm" / "t")
    spoil(last_segment(at), last_segment(at).stat().st_size - 10)
    (found,) = overview(at.parent).row("t").troubles
    assert found.command == f"loglib verify '{at}'"


def test_damage_that_a_reader_has_met_is_a_trouble_from_then_on(tmp_path: Path) -> None:
    made(tmp_path / "t")
    shown = overview(tmp_path)
    assert shown.row("t").troubles == []
    shown.note_damage("t", ["segment x, byte 5: bad"])
    assert [each.text for each in shown.row("t").troubles] == ["segment x, byte 5: bad"]


def test_key_is_searched_in_its_partition_if_there_are_too_many(
    tmp_path: Path, page: Callable[..., Any]
) -> None:  # fmt: skip
    with testing.open_topic(tmp_path / "t", partitions=40, **QUIET) as topic:
        topic.append_many([b"%d" % number for number in range(400)], keys=[b"k%d" % number for number in range(400)])
        topic.flush()
        goes_to = topic.partition_of(b"k7")
    found = page("records", topic="t", key="k7")
    assert [(each["partition"], each["value"]["text"]) for each in found["records"]] == [(goes_to, "7")]
    assert found["notes"] == [f"only partition {goes_to} was searched, to which this key goes"]
    with pytest.raises(ValueError, match="choose one of them"):
        page("records", topic="t", text="7")


# --- segments ------------------------------------------------------------------------------------------------


def test_each_segment_says_why_it_stays_or_goes(open_topic: Open) -> None:
    topic = open_topic(retention=Retention(age=None, bytes=0, hold_for=["etl"], hold_bytes="1GiB"))
    topic.reset_group("etl", "begin")
    for number in range(3):
        fill(topic, 2)
        if number < 2:
            topic.partition(0).roll()
    held = explained(topic, topic.partition(0))
    assert [(each.goes, each.held_by, each.is_sealed) for each in held] == [
        (False, "etl", True), (False, None, True), (False, None, False),
    ]  # fmt: skip
    assert "but group etl has committed offset 0" in held[0].reason and "an older segment stays" in held[1].reason
    topic.reset_group("etl", "end")
    going = explained(topic, topic.partition(0))
    assert [each.goes for each in going] == [True, True, False]
    assert "the limit is 0" in going[0].reason and going[2].reason == "the segment that is being written"


def test_segments_come_in_parts(tmp_path: Path) -> None:
    with testing.open_topic(tmp_path / "t", **QUIET) as topic:
        for _ in range(25):
            fill(topic, 1)
            topic.partition(0).roll()
    segments = Segments(Topics(tmp_path))
    first, last = segments.page("t", 0, 0, 10), segments.page("t", 0, -5, 10)
    assert (len(first.segments), first.total, len(last.segments), last.start) == (10, 26, 5, 21)
    assert first.segments[0].end_offset == first.segments[1].base_offset
    assert first.command == f"loglib retain {tmp_path / 't'} --dry-run"


def test_archive_that_lacks_due_segments_is_a_trouble(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    place = tmp_path / "archive"
    retention = Retention(age=None, bytes=0, archive=str(place), archive_grace=0)
    with testing.open_topic(tmp_path / "t", **(QUIET | {"retention": retention})) as topic:
        fill(topic, 3)
        topic.partition(0).roll()
        fill(topic, 1)
    with Topic.open(tmp_path / "t", mode="r") as topic:
        facts = archive_facts(topic)
        assert facts is not None and facts.error == "no archive is there yet"
        assert of_kind(troubles_of(topic))["archive"].command == f"loglib archive {tmp_path / 't'} {place}"
        loglib.offload.archive(topic, place)
        done = archive_facts(topic)
        assert done is not None and (done.records, done.kind, done.error) == (3, "archive", None)
        assert done.lacks_bytes == topic.partition(0).high_watermark - int(done.ends["0"]) > 0


def test_object_store_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.offload.storage.Storage.files", lambda *_, **__: pytest.fail("another host is asked"))
    monkeypatch.setattr("loglib.offload.storage.Storage.files_now", lambda *_: pytest.fail("another host is asked"))
    retention = Retention(age="1h", archive="s3://bucket/logs/t")
    with testing.open_topic(tmp_path / "t", **(QUIET | {"retention": retention})) as topic:
        fill(topic, 2)
        topic.partition(0).roll()
    row = overview(tmp_path).row("t")
    assert row.troubles == []
    facts = overview(tmp_path).facts("t")
    assert facts.archive is not None
    assert (facts.archive.kind, facts.archive.path) == ("object store", "s3://bucket/logs/t")
    assert "does not ask" in Segments(Topics(tmp_path)).page("t", 0, 0, 10).segments[0].reason


# --- groups --------------------------------------------------------------------------------------------------


def test_group_shows_its_members_what_they_own_and_its_lag(topic: Topic, open_topic: Open) -> None:
    reading = open_topic(mode="r")
    with topic.group("etl", member="alice", start="begin", commit="manual") as group:
        assert [len(group.poll()) for _ in range(4)] == [1, 1, 1, 1]
        group.commit()
        (found,) = groups_of(reading)
        (member,) = found.members
        assert (member.name, member.pid, member.owns) == ("alice", os.getpid(), [0]) and member.since.endswith("Z")
        (owned,) = found.partitions
        assert (owned.owner, owned.committed_by, owned.has_lost) == ("alice", "alice", False)
        assert owned.committed is not None and 0 < int(owned.committed) < int(owned.high_watermark)
        assert found.lag_bytes == int(owned.high_watermark) - int(owned.committed)
    (left,) = groups_of(reading)
    assert left.members == [] and left.partitions[0].owner is None


# --- counts and samples ----------------------------------------------------------------------------------------


def test_records_are_counted_exactly_and_less_what_retention_drops(open_topic: Open) -> None:
    topic = open_topic(partitions=2)
    fill(topic, 5)
    topic.partition(0).roll()
    fill(topic, 7)
    fill(topic, 4, partition=1)
    counts = RecordCounts()
    first = counts.step(topic, 10.0)
    assert (first.records, first.is_whole, first.appended) == (16, True, 0)
    topic.append_many([b"x"] * 30, partition=1)
    topic.flush()
    second = counts.step(topic, 10.0)
    assert (second.records, second.appended) == (46, 30)
    topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
    third = counts.step(topic, 10.0)
    assert (third.records, third.appended, third.is_whole) == (41, 30, True)


def test_count_without_time_says_that_it_is_not_whole_and_goes_on_later(open_topic: Open) -> None:
    topic = open_topic()
    for _ in range(600):
        topic.append(b"x", sync=True)
    counts = RecordCounts()
    assert not counts.step(topic, 0.0).is_whole
    assert (counts.step(topic, 60.0).records, counts.step(topic, 60.0).is_whole) == (600, True)


def test_damage_leaves_the_count_of_the_rest(open_topic: Open, topic: Topic, path: Path) -> None:
    topic.partition(0).roll()
    fill(topic, 5)
    spoil(last_segment(path).with_name(f"{0:020}.log"), 4096 + list(topic.read())[3].offset + 20)
    found = RecordCounts().step(open_topic(mode="r"), 10.0)
    assert not found.is_whole and 5 <= found.records < 15


def test_rates_are_those_between_two_samples(tmp_path: Path) -> None:
    at = made(tmp_path / "t")
    committed(at, "etl", "end")
    sampler = sampler_of(Topics(tmp_path))
    try:
        sampler.taken("t")
        deadline = time.monotonic() + 60
        while len(sampler.samples("t")) < 3:
            with Topic.open(at) as topic:
                topic.append_many([b"x" * 100] * 50)
            time.sleep(0.2)
            assert time.monotonic() < deadline
        first, *later = sampler.samples("t")
        assert (first.bytes_per_s, first.records_per_s) == (None, None)
        assert all(each.bytes_per_s for each in later) and later[-1].records_per_s
        assert later[-1].size_bytes > first.size_bytes and later[-1].lag_bytes["etl"] > 0
        records, size = sampler.rate_now("t")
        assert records and size and size > records
        assert sampler.samples("t", later[-1].time_us) == [] or sampler.samples("t", later[-1].time_us)[0] not in later
    finally:
        sampler.close()


def test_error_of_a_topic_is_raised_to_who_asks_and_ends_no_sampling(tmp_path: Path) -> None:
    at = made(tmp_path / "t")
    spoil(at / "topic.json", 30)
    sampler = sampler_of(Topics(tmp_path))
    try:
        for _ in range(2):
            with pytest.raises(CorruptLogError):
                sampler.taken("t")
    finally:
        sampler.close()


# --- what holds for all ----------------------------------------------------------------------------------------


def test_looking_at_everything_changes_no_byte_and_leaves_no_file_open(tmp_path: Path) -> None:
    place = troubled(tmp_path / "topics")
    committed(place / "stopped", "etl", "begin")
    before, opened = tree(place), open_files()
    topics = Topics(place)
    answers = Answers(topics)
    for name in ("topic", "row", "partitions", "segments", "samples", "groups", "records", "tail"):
        for each in topics.names():
            asked = Asked({"topic": each, "partition": "0"})
            if each != "unreadable" and not (each == "damaged" and name in ("tail", "records")):
                answers.by_name[name](asked)
    answers.close()
    del answers, topics
    assert tree(place) == before
    assert [each for each in open_files() if str(place) in each] == [each for each in opened if str(place) in each]


@needs_root
def test_read_only_mount_is_shown(tmp_path: Path, page: Callable[..., Any]) -> None:
    place, mount = tmp_path / "place", tmp_path / "mount"
    committed(made(place / "t", records=4), "etl", "begin")
    mount.mkdir()
    if os.system(f"mount --bind {place} {mount} && mount -o remount,ro,bind {mount}") != 0:
        pytest.skip("NOT PROVED: this machine mounts nothing")
    try:
        with pytest.raises(OSError, match="Read-only"):
            (mount / "x").write_bytes(b"")
        for name in ("row", "topic", "partitions", "segments", "samples", "groups", "records", "tail"):
            assert page(name, mount, topic="t", partition=0)
        assert page("row", mount, topic="t")["troubles"] == []
    finally:
        os.system(f"umount -l {mount}")


def test_page_works_beside_a_living_writer_and_takes_nothing_from_it(
    tmp_path: Path, page: Callable[..., Any]
) -> None:
    with Topic.open(tmp_path / "t", create=True) as topic:
        topic.append(b"1", sync=True)
        found = page("records", topic="t")
        topic.append(b"2", sync=True)
        later = page("tail", topic="t")
    assert [each["value"]["text"] for each in found["records"]] == ["1"]
    assert [each["value"]["text"] for each in later["records"]] == ["1", "2"]
