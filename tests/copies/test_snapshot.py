"""Snapshots: a copy of a living topic has what was flushed at one moment, opens, verifies, and stays as it is."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from mirrored import Cut, Meanwhile

import loglib
from conftest import QUIET, fill, opened_since, start_python, tree, values_of
from loglib import CorruptLogError, LogError, NotLeaderError, Retention, Topic, testing, transaction
from loglib.append.publication import Hold
from loglib.copies import snapshot
from loglib.copies.promotion import promote_on
from loglib.copies.snapshots import take_snapshot
from loglib.format.watermark import FILE_BYTES
from loglib.segment import segment_name
from loglib.testing import CrashFS, FaultyFiles, Image, MemoryFiles

WRITER = """
    import sys
    from loglib import Retention, Topic

    path, segment_bytes, kept = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    retention = Retention(age=None, bytes=kept)
    with Topic.open(path, create=True, partitions=2, segment_bytes=segment_bytes, retention=retention) as topic:
        for number in range(10_000_000):
            topic.append(b"%d " % number * 20, partition=number % 2, sync=True)
"""
OpenTopic = Callable[..., Topic]


def numbers(topic: Topic, partition: int) -> list[int]:
    return [int(record.value.split()[0]) for record in topic.partition(partition).read() if record.value]


def wait_for_records(path: Path, writer: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert writer.poll() is None, writer.communicate()
        try:
            with Topic.open(path, mode="r") as topic:
                if all(each.high_watermark for each in topic.partitions):
                    return
        except FileNotFoundError:
            time.sleep(0.01)
    raise AssertionError("the writer writes nothing")


@pytest.fixture
def rolled(open_topic: OpenTopic) -> Topic:
    """Two sealed segments and an open one, with a record that is not flushed."""
    topic = open_topic(partitions=1)
    for _ in range(2):
        fill(topic, 3)
        topic.partition(0).roll()
    fill(topic, 2)
    topic.append(b"not flushed")
    return topic


# --- what it has -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("segment_bytes", "kept"), [(1 << 20, 1 << 40), (1 << 16, 1 << 20)], ids=["grows", "rolls"])
def test_snapshot_of_a_living_topic_is_a_prefix_of_one_moment(
    path: Path, tmp_path: Path, segment_bytes: int, kept: int
) -> None:
    writer = start_python(WRITER, path, segment_bytes, kept)
    try:
        wait_for_records(path, writer)
        for number in range(12):
            with Topic.open(path, mode="r") as topic:
                before = [each.high_watermark for each in topic.partitions]
            made = snapshot(path, tmp_path / f"copy-{number}", links=number % 2 == 0)
            assert made.at_once
            assert all(end >= known for end, known in zip(made.ends, before, strict=True))
            with Topic.open(made.path, mode="r") as copy:
                assert copy.verify().damage == ()
                assert [each.high_watermark for each in copy.partitions] == list(made.ends)
                even, odd = numbers(copy, 0), numbers(copy, 1)
            for found, first in ((even, 0), (odd, 1)):
                assert found == list(range(found[0], found[-1] + 1, 2)) and found[0] % 2 == first
            assert abs(even[-1] - odd[-1]) == 1  # each record is durable before the next one is appended
    finally:
        writer.kill()
        writer.communicate()


def test_snapshot_links_sealed_segments_and_copies_the_open_one(rolled: Topic, tmp_path: Path) -> None:
    made = snapshot(rolled.path, tmp_path / "copy")
    bases = [each.base_offset for each in rolled.partition(0).segments]
    names = [f"0000/{segment_name(base)}" for base in bases]
    same = [os.path.samefile(f"{rolled.path}/{name}", f"{made.path}/{name}") for name in names]
    assert same == [True, True, False]
    assert made.copied_bytes == made.ends[0] - bases[-1]
    assert made.size_bytes == made.ends[0]


def test_snapshot_without_links_shares_no_file(rolled: Topic, tmp_path: Path) -> None:
    made = snapshot(rolled.path, tmp_path / "copy", links=False)
    assert made.copied_bytes == made.size_bytes
    for each in Path(made.path).rglob("*.log"):
        assert each.stat().st_nlink == 1
    with Topic.open(made.path, mode="r") as copy:
        assert values_of(copy) == values_of(rolled)


@pytest.mark.parametrize("links", [True, False])
def test_progress_rises_to_the_size_of_the_copy(
    rolled: Topic, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.copies.snapshots._PIECE_BYTES", 4096)
    seen: list[tuple[int, int]] = []
    made = snapshot(rolled.path, tmp_path / "copy", links=links, progress=lambda *counts: seen.append(counts))
    done = [each for each, _ in seen]
    assert done == sorted(done) and seen[-1] == (made.size_bytes, made.size_bytes)
    with Topic.open(tmp_path / "copy", mode="r") as copy:
        assert values_of(copy) == values_of(rolled)


def test_snapshot_of_a_topic_that_has_just_rolled_does_not_share_its_last_segment(
    open_topic: OpenTopic, tmp_path: Path
) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    topic.partition(0).roll()
    made = snapshot(topic.path, tmp_path / "copy")
    last = max(Path(made.path, "0000").glob("*.log"))
    assert last.stat().st_nlink == 1 and made.copied_bytes == 0
    with Topic.open(made.path, mode="r") as copy:
        assert len(values_of(copy)) == 3


def test_segment_that_is_sealed_while_it_is_copied_is_not_shared(open_topic: OpenTopic, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)

    class Rolling(testing.UnsyncedFiles):
        """The writer goes on and rolls between the look at the mark and the look at the directory."""

        rolled = False

        def make_directory(self, path: str, permissions: int) -> None:
            if path.endswith("0000") and not self.rolled:
                self.rolled = True
                fill(topic, 3)
                topic.partition(0).roll()
            super().make_directory(path, permissions)

    made = take_snapshot(Rolling(), topic.path, str(tmp_path / "copy"), links=True, now=0)
    assert len(topic.partition(0).segments) == 2
    (only,) = Path(made.path, "0000").glob("*.log")
    assert only.stat().st_nlink == 1 and made.copied_bytes == made.ends[0]
    with Topic.open(made.path, mode="r") as copy:
        assert len(values_of(copy)) == 3


def test_writer_goes_on_beside_its_snapshot_which_stays_as_it_is(rolled: Topic, tmp_path: Path) -> None:
    made = snapshot(rolled.path, tmp_path / "copy")
    before = tree(Path(made.path))
    rolled.append_many([b"more"] * 100)
    rolled.flush()
    rolled.partition(0).roll()
    rolled.alter(retention=Retention(age=None, bytes=0))
    rolled.retain()
    assert tree(Path(made.path)) == before
    with Topic.open(made.path, mode="r") as copy:
        assert copy.verify().damage == () and len(values_of(copy)) == 8


def test_snapshot_has_producers_clock_and_declared_gaps(open_topic: OpenTopic, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    for number in range(130):
        topic.append(b"x", producer=(f"p{number}", 1))
    topic.flush()
    topic.partition(0).roll()
    (Path(topic.path) / "0000" / "clock").write_bytes(b"as it is")
    made = snapshot(topic.path, tmp_path / "copy")
    found, kept = tree(Path(made.path)), tree(Path(topic.path))
    for name in kept:
        if name.endswith((".producers", "clock", ".log")):
            assert found[name] == kept[name]
    with Topic.open(made.path, mode="r") as copy:
        assert copy.verify().damage == ()


def test_snapshot_has_the_groups_with_their_commits(open_topic: OpenTopic, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 5)
    with topic.group("etl") as group:
        records = group.poll(max_records=3, timeout=1)
        group.commit()
        made = snapshot(topic.path, tmp_path / "backups" / topic.name)  # a commit names its topic
    assert made.groups == ("etl",)
    with Topic.open(made.path, mode="r") as copy:
        assert copy.group_info("etl").committed[0].offset == records[-1].next_offset


def test_commits_that_are_made_meanwhile_are_not_ahead_of_the_data(open_topic: OpenTopic, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)
    with topic.group("etl") as group:
        group.poll(timeout=5)
        group.commit()

        def go_on() -> None:
            fill(topic, 3)
            group.poll(timeout=5)
            group.commit()

        offsets = str(Path(topic.path, "groups", "etl", "offsets"))
        files = Meanwhile(lambda call: call.path.startswith(offsets) and call.name == "open_read", go_on)
        path = tmp_path / "backup" / Path(topic.path).name  # commits name their topic
        made = take_snapshot(files, topic.path, str(path), links=True, now=0)
    with Topic.open(made.path, mode="r") as copy:
        (commit,) = copy.group_info("etl").committed.values()
        assert 0 < commit.offset <= copy.partition(0).high_watermark


def test_group_that_another_topic_keeps_is_only_named(open_topic: OpenTopic, tmp_path: Path) -> None:
    one, two = (open_topic(tmp_path / name, partitions=1) for name in ("one", "two"))
    with loglib.group([one, two], "both"):
        made = snapshot(two.path, tmp_path / "copy")
    assert made.groups == ()
    assert (Path(made.path) / "groups" / "both").read_bytes() == (tmp_path / "two/groups/both").read_bytes()


def test_snapshot_never_has_a_half_of_a_transaction(open_topic: OpenTopic, tmp_path: Path) -> None:
    topic = open_topic(partitions=2)
    for number in range(5):
        with transaction("a", version=number) as tx:
            for partition in (0, 1):
                tx.append(topic, b"%d" % number, partition=partition)
    made = snapshot(topic.path, tmp_path / "copy")
    with Topic.open(made.path, mode="r") as copy:
        assert [values_of(each) for each in copy.partitions] == [[b"0", b"1", b"2", b"3", b"4"]] * 2
    assert (tmp_path / "copy" / "transactions.json").exists()


def test_snapshot_ends_before_a_transaction_that_is_held(
    open_topic: OpenTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.log.log.is_pending_here", lambda *_: True)
    topic = open_topic(partitions=1)
    end = fill(topic, 3)[-1]
    writer = topic._accesses[0].writer()
    tail = writer.batch.tail
    writer.disk.publication.publish(hold=Hold(7, tail.end, tail.last_batch, 5, 0))
    topic.append(b"behind it")
    topic.flush()
    made = snapshot(topic.path, tmp_path / "copy")
    assert made.ends == (tail.end,)
    with Topic.open(made.path, mode="r") as copy:
        assert copy.verify().damage == () and list(copy.read())[-1].offset == end


# --- what it is --------------------------------------------------------------------------------------------


def test_snapshot_is_not_opened_for_writing(rolled: Topic, tmp_path: Path) -> None:
    made = snapshot(rolled.path, tmp_path / "copy")
    for shared in (False, True):
        with pytest.raises(NotLeaderError, match=r"is a snapshot of .*loglib\.copies\.promote") as caught:
            Topic.open(made.path, create=True, shared=shared)
    assert (caught.value.path, caught.value.role, caught.value.of) == (made.path, "snapshot", rolled.path)
    with pytest.raises(NotLeaderError):
        Topic.add_partitions(made.path, 5)
    assert loglib.topics(tmp_path)[0].error is None


def test_promoted_snapshot_is_written_and_its_source_as_well(rolled: Topic, tmp_path: Path) -> None:
    made = snapshot(rolled.path, tmp_path / "copy")
    with Topic.open(made.path, mode="r") as copy:
        before = values_of(copy)
    for _ in range(2):  # the second time it is a topic of its own already
        loglib.copies.promote(made.path)
    rolled.append(b"of the source", sync=True)
    with Topic.open(made.path, create=True) as promoted:
        assert promoted.append(b"of the copy", sync=True).offset == made.ends[0]
        assert values_of(promoted) == [*before, b"of the copy"]
        assert not promoted.verify().damage
    assert values_of(rolled) == [*before, b"not flushed", b"of the source"]
    assert not rolled.verify().damage
    loglib.copies.promote(rolled.path)  # has always been a topic of its own
    assert not Path(rolled.path, "copy.json").exists()


def test_batches_of_the_source_do_not_get_into_the_promoted_copy(rolled: Topic, tmp_path: Path) -> None:
    """A tool may put the source's last segment over that of the copy, because both have the same name and log id."""
    made = snapshot(rolled.path, tmp_path / "copy")
    loglib.copies.promote(made.path)
    name = max(Path(rolled.path, "0000").glob("*.log")).name
    rolled.append(b"of the source", sync=True)
    rolled.append(b"of the source again", sync=True)
    with Topic.open(made.path, create=True) as promoted:
        promoted.append(b"of the copy", sync=True)
        promoted.append(b"of the copy again", sync=True)
    (tmp_path / "copy" / "0000" / name).write_bytes(Path(rolled.path, "0000", name).read_bytes())
    with Topic.open(made.path, mode="r") as promoted:
        assert promoted.verify().damage
        with pytest.raises(CorruptLogError):
            values_of(promoted)


def test_group_goes_on_in_the_promoted_copy_where_it_was(open_topic: OpenTopic, tmp_path: Path) -> None:
    topic = open_topic(tmp_path / "orders")
    fill(topic, 4)
    with topic.group("etl") as group:
        assert len(group.poll(max_records=2, timeout=10)) == 2
        group.commit()
    made = snapshot(topic.path, tmp_path / "backup" / "orders")
    loglib.copies.promote(made.path)
    with Topic.open(made.path, create=True) as promoted, promoted.group("etl") as group:
        assert [record.value for record in group.poll(max_records=9, timeout=10)] == values_of(topic)[2:]


def test_promotion_that_is_cut_has_happened_or_not() -> None:
    """And after each cut it may be repeated."""
    files = MemoryFiles()
    with testing.open_topic("/data/topic", files=files, **QUIET) as topic:
        fill(topic, 2)
    take_snapshot(files, "/data/topic", "/data/copy", links=True, now=7)
    disk = CrashFS(Image.of(files.tree()))
    promote_on(disk, "/data/copy", now=8)
    last, roles = len(disk.operations), set()
    for state in disk.crash_states(random=0):
        after = state.files
        try:
            testing.open_topic("/data/copy", files=after, **QUIET).close()
            roles.add("leader")
        except NotLeaderError:
            assert state.at < last
            roles.add("snapshot")
        promote_on(after, "/data/copy", now=9)
        with testing.open_topic("/data/copy", files=after, **QUIET) as promoted:
            assert len(values_of(promoted)) == 2
    assert roles == {"leader", "snapshot"}


def test_only_a_topic_is_promoted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no topic here"):
        loglib.copies.promote(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": 1, "crc": "00000000"}\n'])
def test_damaged_role_is_an_error_and_no_permission(rolled: Topic, tmp_path: Path, content: bytes) -> None:
    made = snapshot(rolled.path, tmp_path / "copy")
    (tmp_path / "copy" / "copy.json").write_bytes(content)
    with pytest.raises(CorruptLogError, match=r"copy\.json"):
        Topic.open(made.path, create=True)


def test_role_of_a_later_format_is_refused_by_name(rolled: Topic, tmp_path: Path) -> None:
    from loglib.format.checked_json import seal

    made = snapshot(rolled.path, tmp_path / "copy")
    (tmp_path / "copy" / "copy.json").write_bytes(seal({"format": 2}))
    with pytest.raises(loglib.UnsupportedFormatError, match="newer"):
        Topic.open(made.path, create=True)


# --- what it refuses -----------------------------------------------------------------------------------------


def test_snapshot_needs_a_topic_and_a_new_place(rolled: Topic, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        snapshot(tmp_path / "nothing", tmp_path / "copy")
    snapshot(rolled.path, tmp_path / "copy")
    with pytest.raises(FileExistsError):
        snapshot(rolled.path, tmp_path / "copy")


def test_place_that_is_taken_meanwhile_is_an_error(rolled: Topic, tmp_path: Path) -> None:
    class Taken(testing.UnsyncedFiles):
        def rename(self, path: Any, target: Any, **within: Any) -> None:  # type: ignore[override]
            if target == str(tmp_path / "copy"):
                (tmp_path / "copy" / "else").mkdir(parents=True)
            super().rename(path, target, **within)

    with pytest.raises(FileExistsError, match="meanwhile"):
        take_snapshot(Taken(), rolled.path, str(tmp_path / "copy"), links=True, now=0)
    assert not list(tmp_path.glob(".copy*"))


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_links_are_impossible_the_segments_are_copied(rolled: Topic, tmp_path: Path, error: int) -> None:
    files = FaultyFiles("link", every=True, error=error)
    made = take_snapshot(files, rolled.path, str(tmp_path / "copy"), links=True, now=0)
    assert files.failed == 2 and made.copied_bytes == made.size_bytes


@pytest.mark.parametrize("error", [errno.EXDEV, errno.ENOSYS, errno.EINVAL])
def test_where_blocks_cannot_be_shared_bytes_are_copied(rolled: Topic, tmp_path: Path, error: int) -> None:
    files = FaultyFiles("copy_file_range", every=True, error=error)
    made = take_snapshot(files, rolled.path, str(tmp_path / "copy"), links=False, now=0)
    with Topic.open(made.path, mode="r") as copy:
        assert copy.verify().damage == () and values_of(copy) == values_of(rolled)


def test_full_disk_leaves_nothing(rolled: Topic, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        take_snapshot(testing.FullDisk(9000), rolled.path, str(tmp_path / "copy"), links=False, now=0)
    assert sorted(tmp_path.iterdir()) == before


def test_snapshot_that_is_interrupted_leaves_nothing(rolled: Topic, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    files = Cut(lambda call: call.name == "link")
    with pytest.raises(KeyboardInterrupt):
        take_snapshot(files, rolled.path, str(tmp_path / "copy"), links=True, now=0)
    assert sorted(tmp_path.iterdir()) == before


def test_snapshot_begins_where_retention_has_come_meanwhile(rolled: Topic, tmp_path: Path) -> None:
    bases = [each.base_offset for each in rolled.partition(0).segments]
    files = Meanwhile(lambda call: call.name == "link", lambda: rolled.partition(0).delete_before(bases[1]))
    made = take_snapshot(files, rolled.path, str(tmp_path / "copy"), links=True, now=0)
    with Topic.open(made.path, mode="r") as copy:
        assert copy.partition(0).log_start_offset == bases[1]
        assert copy.verify().damage == () and len(values_of(copy)) == 5


@pytest.mark.parametrize("times", [1, 99])
@pytest.mark.parametrize("at", ["open_read", "listdir"])
def test_snapshot_that_retention_overtakes_is_taken_again(rolled: Topic, tmp_path: Path, at: str, times: int) -> None:
    """Everything that the marks promise is dropped, before the segments are listed or before the first is opened."""
    dropped: list[int] = []

    class Dropping(testing.WatchedFiles):
        has_mark = False

        def before(self, call: testing.Call) -> None:
            if self.has_mark and call.name == at and "0000" in call.path and len(dropped) < times:
                self.has_mark = False
                rolled.append(b"behind it", partition=0, sync=True)
                dropped.append(rolled.partition(0).delete_before(rolled.partition(0).high_watermark))
            self.has_mark |= call.name == "pread" and call.file == "watermark"

    files = Dropping(testing.UnsyncedFiles())
    with nullcontext() if times == 1 else pytest.raises(loglib.OffsetOutOfRangeError):
        take_snapshot(files, rolled.path, str(tmp_path / "copy"), links=False, now=0)
        with Topic.open(tmp_path / "copy", mode="r") as copy:
            assert copy.verify().damage == () and [copy.partition(0).log_start_offset] == dropped
    assert (tmp_path / "copy").exists() == (times == 1)


@pytest.mark.parametrize("number", [0, 1])
def test_snapshot_of_a_topic_without_one_of_its_segments_is_refused(
    open_topic: OpenTopic, tmp_path: Path, number: int
) -> None:
    topic = open_topic(partitions=1)
    for _ in range(3):
        fill(topic, 2)
        topic.partition(0).roll()
    Path(topic.partition(0).segments[number].path).unlink()
    with pytest.raises(CorruptLogError, match="no file, or one that ends before"):
        snapshot(topic.path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_missing_segment_is_corruption(rolled: Topic, tmp_path: Path) -> None:
    rolled.close()
    segments = sorted(Path(rolled.path, "0000").glob("*.log"))
    segments[-1].unlink()
    with pytest.raises(CorruptLogError):
        snapshot(rolled.path, tmp_path / "copy")


def test_segment_that_goes_although_nothing_dropped_it_is_corruption(rolled: Topic, tmp_path: Path) -> None:
    first = min(Path(rolled.path, "0000").glob("*.log"))
    files = Meanwhile(lambda call: call.name == "link", first.unlink)
    with pytest.raises(CorruptLogError, match="no file"):
        take_snapshot(files, rolled.path, str(tmp_path / "copy"), links=True, now=0)


@pytest.mark.parametrize("at", ["open_read", "mkdir"], ids=["while they are listed", "when the first is copied"])
def test_group_whose_logs_are_folded_meanwhile_is_copied_again(
    open_topic: OpenTopic, tmp_path: Path, at: str
) -> None:
    topic = open_topic(partitions=2)
    with topic.group("etl", member="a") as one, topic.group("etl", member="b") as other:
        for number, group in enumerate((one, other, one, other)):
            topic.append(b"%d" % number, partition=0, sync=True)
            topic.append(b"%d" % number, partition=1, sync=True)
            group.poll(timeout=5)
            group.commit()
        first, second = sorted(Path(topic.path, "groups", "etl", "offsets").iterdir())
        gone = tmp_path / "gone"
        files = Meanwhile(
            lambda call: f"/offsets/{second.name}" in call.path and call.name == at, lambda: first.rename(gone)
        )
        take_snapshot(files, topic.path, str(tmp_path / "copy"), links=True, now=0)
        gone.rename(first)  # its member still lives
    assert [each.name for each in (tmp_path / "copy" / "groups" / "etl" / "offsets").iterdir()] == [second.name]


def test_group_that_is_deleted_meanwhile_is_left_out(open_topic: OpenTopic, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    with topic.group("etl"):
        pass
    offsets = str(Path(topic.path, "groups", "etl", "offsets"))
    files = Meanwhile(
        lambda call: call.path.startswith(offsets) and call.name == "open_read", lambda: topic.delete_group("etl")
    )
    assert take_snapshot(files, topic.path, str(tmp_path / "copy"), links=True, now=0).groups == ()
    with topic.group("x"):
        pass
    gone = Meanwhile(
        lambda call: call.name == "lstat" and call.path.endswith("/groups/x"), lambda: topic.delete_group("x")
    )
    assert take_snapshot(gone, topic.path, str(tmp_path / "other"), links=True, now=0).groups == ()


def test_damaged_log_of_a_group_is_an_error(open_topic: OpenTopic, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    with topic.group("etl"):
        pass
    for each in Path(topic.path, "groups", "etl", "offsets").rglob("*.log"):
        each.unlink()
    with pytest.raises(CorruptLogError):
        snapshot(topic.path, tmp_path / "copy")


# --- crashes -------------------------------------------------------------------------------------------------


def test_snapshot_that_was_cut_is_not_taken_for_a_whole_one() -> None:
    source = MemoryFiles()
    with testing.open_topic("/data/topic", files=source, partitions=2, **QUIET) as topic:
        for number in range(6):
            topic.append(b"%d" % number * 30, partition=number % 2)
            topic.flush()
            topic.partition(number % 2).roll()
    fs = CrashFS(testing.Image.of(source.tree()))
    fs.kill()
    before = {name: data for name, data in fs.tree().items() if name.startswith("/data/topic/")}
    taken = take_snapshot(fs, "/data/topic", "/data/copy", links=True, now=0)
    done = len(fs.operations)
    whole = states = 0
    for state in fs.crash_states(random=1):
        states += 1
        files = state.files
        assert files.exists("/data/copy/topic.json") or state.at < done
        if files.exists("/data/copy"):
            with testing.open_topic("/data/copy", files=files, mode="r") as copy:
                assert copy.verify().damage == ()
                assert tuple(each.high_watermark for each in copy.partitions) == taken.ends
                assert [len(values_of(each)) for each in copy.partitions] == [3, 3]
                whole += 1
        assert {name: data for name, data in files.tree().items() if name.startswith("/data/topic/")} == before
    assert whole >= 3 and states > 200


def test_error_of_one_log_does_not_leave_files_open(rolled: Topic, tmp_path: Path) -> None:
    from conftest import settled_files

    before = settled_files()
    with pytest.raises(OSError, match="Input/output"):
        take_snapshot(
            FaultyFiles("datasync", at=1, every=True), rolled.path, str(tmp_path / "copy"), links=False, now=0
        )
    assert not opened_since(before)


def test_marks_that_never_stand_still_are_said_to_be_of_several_moments(
    open_topic: OpenTopic, tmp_path: Path
) -> None:
    topic = open_topic(partitions=2)

    class Restless(testing.UnsyncedFiles):
        busy = False

        def pread(self, fd: int, size: int, position: int) -> bytes:
            data = super().pread(fd, size, position)
            if size == FILE_BYTES and not self.busy:
                self.busy = True
                topic.append(b"x", partition=0)
                topic.flush()
                self.busy = False
            return data

    made = take_snapshot(Restless(), topic.path, str(tmp_path / "copy"), links=True, now=0)
    assert not made.at_once
    with Topic.open(made.path, mode="r") as copy:
        assert copy.verify().damage == ()


def test_errors_are_log_errors_or_of_the_system() -> None:
    assert issubclass(NotLeaderError, LogError)
