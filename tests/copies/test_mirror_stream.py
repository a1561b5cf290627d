"""Mirrors over a stream: the same bytes, whatever cuts, breaks or forges the stream."""

from __future__ import annotations

import os
import random
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mirrored import assert_same, segments, wait_for
from streamed import Wire, served

import loglib
from conftest import fill, values_of
from loglib import (
    CorruptLogError,
    LogError,
    NotLeaderError,
    OffsetOutOfRangeError,
    Retention,
    Topic,
    UnsupportedFormatError,
    testing,
    transaction,
)
from loglib.copies import Mirror, mirror, promote, receive_mirror, serve_mirror
from loglib.copies.frames import BEAT, Frame
from loglib.copies.local_source import LocalTopicSource
from loglib.copies.remote_source import RemoteLog, RemoteTopic
from loglib.errors import BrokenStreamError
from loglib.system.files import REAL

OpenTopic = Callable[..., Topic]


def over(topic: Any, to: Path, through: Wire | None = None, **options: Any) -> loglib.copies.MirrorReport:
    """Mirror once over a stream. Raises what went wrong at either end."""
    files = testing.UnsyncedFiles()
    with served(topic, through=through) as serving, Mirror.over(serving.stream, to, files=files, **options) as made:
        made.copy()
        report = made.report()
    if serving.error is not None:  # of the last acknowledgement, which the copy does not wait for
        raise serving.error
    return report


def varied(topic: Topic) -> None:
    """Small and large batches, several segments, declared times, keys and headers, and commits of a group."""
    for number in range(3):
        topic.append_many([b"value %d" % each for each in range(200)], keys=[b"%d" % each for each in range(200)])
        topic.append_many([None, b"x" * 30_000], keys=[b"a", b"b"], headers=[{"h": b"1"}, {}])
        for each in range(20):
            topic.append(b"one %d" % each, sync=True)
        topic.flush()
        topic.partition(number % 2).roll()
    with topic.group("etl") as group:
        group.poll(max_records=7, timeout=10)
        group.commit()


# --- what it copies ------------------------------------------------------------------------------------------


def test_copy_over_a_stream_is_that_of_a_local_mirror(open_topic: OpenTopic, to: Path, tmp_path: Path) -> None:
    topic = open_topic(partitions=2, segment_bytes=1 << 16)
    local = tmp_path / "local" / to.name
    for _ in range(2):
        varied(topic)
        topic.append(b"not flushed")
        report, expected = over(topic.path, to), mirror(topic.path, local)
        assert (report.ends, report.copied_bytes) == (expected.ends, expected.copied_bytes)
        topic.flush()
    over(topic.path, to)
    assert_same(topic, to)
    assert over(topic.path, to).copied_bytes == 0
    with Topic.open(to, mode="r") as copy:
        assert copy.group_info("etl").committed == topic.group_info("etl").committed
        assert copy.config == topic.config


def test_small_files_policies_and_new_partitions_come_along(
    open_topic: OpenTopic, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.copies.mirror_server._MANY", 1)
    topic = open_topic(partitions=1)
    for number in range(130):  # more producers than a segment's header takes
        topic.append(b"x", producer=(f"p{number}", 1))
    topic.flush()
    topic.partition(0).roll()
    (Path(topic.path) / "0000" / "clock").write_bytes(b"as it is")
    topic.append(b"y", sync=True)
    with served(topic.path) as serving, Mirror.over(serving.stream, to, files=testing.UnsyncedFiles()) as made:
        made.copy()
        assert_same(topic, to)
        assert made._origin.store_pointer(str(to)) is None
        for name in ("clock", next(Path(topic.path, "0000").glob("*.producers")).name):
            assert (to / "0000" / name).read_bytes() == (Path(topic.path) / "0000" / name).read_bytes()
        topic.alter(retention=Retention(age=None, bytes=12345))
        topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        topic.close()
        Topic.add_partitions(topic.path, 3)
        with Topic.open(topic.path, create=True) as grown:
            grown.append(b"x", partition=2, sync=True)
            made.copy()
            assert_same(grown, to)
    with Topic.open(to, mode="r") as copy:
        assert copy.config.retention.bytes == 12345


def test_large_and_compressed_batches_with_a_small_credit(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1, compression="zlib", max_record_bytes=4 << 20, segment_bytes=4 << 20)
    for size in (3 << 20, 100, 1 << 20):
        topic.append(random.Random(size).randbytes(size), sync=True)
    topic.append_many([b"%d" % each for each in range(50_000)])
    topic.flush()
    with served(topic.path) as serving:
        remote = RemoteTopic(serving.stream, timeout_s=60, credit_bytes=1 << 16)
        with Mirror(remote, to, files=testing.UnsyncedFiles()) as made:
            made.copy()
    assert_same(topic, to)


def test_what_is_acknowledged_is_durable(open_topic: OpenTopic, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.copies.log_copier.SYNC_BYTES", 1 << 18)
    topic = open_topic(partitions=1)
    for _ in range(8):
        topic.append_many([b"x" * 1000] * 300)
    topic.flush()
    name, synced = str(to / "0000" / f"{0:020d}.log"), [4096]

    class Noting(testing.UnsyncedFiles):
        def datasync(self, fd: int) -> None:
            size = os.fstat(fd).st_size
            super().datasync(fd)
            if os.readlink(f"/proc/self/fd/{fd}") == name:
                synced.append(size)

    acknowledged: list[int] = []
    with served(topic.path) as serving:
        remote = RemoteTopic(serving.stream, timeout_s=60)
        acknowledge = remote.acknowledge

        def note(log: RemoteLog, end: int) -> None:
            assert 4096 + end <= synced[-1]
            acknowledged.append(end)
            acknowledge(log, end)

        monkeypatch.setattr(remote, "acknowledge", note)
        with Mirror(remote, to, files=Noting()) as made:
            made.copy()
    assert acknowledged[-1] == topic.partition(0).high_watermark and len(set(acknowledged)) > 3
    assert_same(topic, to)


def test_full_disk_in_mid_read_and_the_mirror_goes_on(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    with served(topic.path) as serving, Mirror.over(serving.stream, to, files=testing.UnsyncedFiles()) as made:
        made.copy()
    for number in range(5):
        topic.append(b"%d" % number * (700 << 10), sync=True)  # a batch each, and a frame
    files = testing.FullDisk(1 << 20, testing.UnsyncedFiles())
    with served(topic.path) as serving, Mirror(RemoteTopic(serving.stream, timeout_s=60), to, files=files) as made:
        with pytest.raises(OSError, match="No space left"):
            made.copy()
        assert isinstance(made._origin, RemoteTopic) and made._origin._link.waits(60)  # more is on its way
        files.room = 1 << 30
        made.copy()  # over the same stream: what was on its way is passed over
    assert_same(topic, to)


def test_groups_go_and_pointers_come(path: Path, to: Path, tmp_path: Path) -> None:
    with Topic.open(
        path, create=True, partitions=1
    ) as one, Topic.open(tmp_path / "views", create=True, partitions=1) as two:
        fill(one, 2)
        with loglib.group([one, two], "both") as group:
            group.poll(timeout=10)
            group.commit()
        first, second = sorted([one, two], key=lambda each: not Path(each.path, "groups", "both").is_dir())
        with first.group("gone"):
            pass
        for topic in (first, second):
            over(topic.path, to.with_name(topic.name))
        assert (to.with_name(second.name) / "groups" / "both").read_bytes()
        first.delete_group("gone")
        over(first.path, to.with_name(first.name))
        with Topic.open(to.with_name(first.name), mode="r") as copy:
            assert copy.groups() == ["both"]


def test_transactions_are_whole_and_their_store_is_known(path: Path, to: Path) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        for version in range(2):
            with transaction(app="etl", version=version) as changes:
                for partition in range(2):
                    changes.append(topic, b"%d" % version, partition=partition)
            over(path, to)
        assert_same(topic, to)
    assert (to / "transactions.json").read_bytes() == (path / "transactions.json").read_bytes()
    with Topic.open(to, mode="r") as copy:
        assert sorted(values_of(copy)) == [b"0", b"0", b"1", b"1"]


def test_following_over_a_stream_shows_each_record_soon_and_both_ends_know_the_lag(
    open_topic: OpenTopic, to: Path
) -> None:
    topic = open_topic(partitions=2)
    with served(topic.path) as serving, Mirror.over(serving.stream, to) as made:
        thread = threading.Thread(target=made.follow)
        thread.start()
        wait_for((to / "topic.json").exists, "the copy is made")
        for number in range(20):
            topic.append(b"%d" % number, partition=number % 2, sync=True)
            wait_for(lambda: mirror_ends(to) == ends_of(topic), "it is shown")
        wait_for(lambda: not serving.server.lag().bytes and not made.lag().bytes, "nothing is behind")
        assert serving.server.lag().seconds == 0.0 and made.lag().seconds < 60
        made.close()
        thread.join()
        topic.append(b"x" * 100, partition=0, sync=True)
        assert serving.server.lag().bytes > 100 and repr(serving.server) == f"<MirrorServer of {topic.path!r}>"


def ends_of(topic: Topic) -> list[int]:
    return [each.high_watermark for each in topic.partitions]


def mirror_ends(to: Path) -> list[int]:
    with Topic.open(to, mode="r") as copy:
        return ends_of(copy)


def test_following_without_reports_of_the_system(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=2)

    class Unreported(testing.UnsyncedFiles):
        real = False

    with served(topic.path, files=Unreported()) as serving, Mirror.over(serving.stream, to) as made:
        thread = threading.Thread(target=made.follow)
        thread.start()
        wait_for((to / "topic.json").exists, "the copy is made")
        topic.append(b"x", partition=1, sync=True)
        wait_for(lambda: mirror_ends(to) == ends_of(topic), "it is shown")
        made.close()
        thread.join()
        serving.server.close()
        serving.join()
        assert serving.error is None


def test_speed_limit_over_a_stream_sends_signs_of_life(
    open_topic: OpenTopic, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.copies.rate_limit._BEAT_S", 0.01)
    topic = open_topic(partitions=1)
    topic.append(b"x" * 10_000, sync=True)
    beats: list[Frame] = []
    with served(topic.path) as serving, Mirror.over(serving.stream, to, bytes_per_second=100_000) as made:
        taking = serving.server._take

        def take(frame: Frame) -> None:
            beats.append(frame)
            taking(frame)

        monkeypatch.setattr(serving.server, "_take", take)
        made.copy()
        made.copy()
    assert any(frame.kind == BEAT for frame in beats)
    assert_same(topic, to)


def test_following_ends_with_the_stream(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 1)
    with served(topic.path) as serving:
        ended: list[BaseException] = []

        def follow() -> None:
            try:
                receive_mirror(serving.stream, to, follow=True)
            except BrokenStreamError as error:
                ended.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        wait_for(lambda: (to / "topic.json").exists() and mirror_ends(to) == ends_of(topic), "it is copied")
        serving.server.close()
        thread.join(30)
    assert "mirroring stream:" in str(ended)
    assert_same(topic, to)


def test_topic_here_tells_what_has_news(open_topic: OpenTopic) -> None:
    topic = open_topic(partitions=2)
    here = LocalTopicSource(REAL, topic.path)
    with closing(here), closing(here.log(0)), closing(here.log(1)):
        assert here.changed() == [] and not here.reports and here.descriptors() == []
        assert here.watch() and not here.watch()
        topic.append(b"x", partition=1, sync=True)
        assert here.wait_for_changes(30) == [1]  # it has come already
        assert here.wait_for_changes(0) == []
        assert here.store_pointer("elsewhere") is None


# --- other histories -------------------------------------------------------------------------------------------


def test_history_that_differs_is_set_aside_over_a_stream(
    open_topic: OpenTopic, path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.copies.log_copier._COMPARED_AT_ONCE", 3)
    topic = open_topic(partitions=1)
    fill(topic, 7)
    topic.close()
    shutil.copytree(path, path.with_name("backup"))
    with Topic.open(path, create=True) as topic:
        for number in range(4):
            topic.append(b"lost %d" % number, sync=True)
        over(path, to)
    shutil.rmtree(path)
    path.with_name("backup").rename(path)
    with Topic.open(path) as topic:
        topic.append(b"another", sync=True)
        report = over(path, to)
        assert len(report.set_aside) == 1 and over(path, to).set_aside == ()
        assert_same(topic, to)


def test_retention_that_overtakes_over_a_stream(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    over(topic.path, to)
    for _ in range(2):
        fill(topic, 3)
        topic.partition(0).roll()
    topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
    fill(topic, 2)
    with pytest.raises(OffsetOutOfRangeError):
        over(topic.path, to)
    over(topic.path, to, on_divergence="restart")
    assert_same(topic, to)


def test_damage_at_the_source_is_told_and_not_copied(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    for number in range(3):
        topic.append(b"%d" % number * 100, sync=True)
    last = topic.partition(0).high_watermark
    segment = Path(topic.path, "0000", f"{0:020d}.log")
    content = bytearray(segment.read_bytes())
    content[4096 + last - 50] ^= 1
    segment.write_bytes(content)
    with pytest.raises(CorruptLogError, match=f"^stream:{os.uname().nodename}:{segment}, byte "):
        over(topic.path, to)
    assert 0 < len(segments(to)[f"0000/{0:020d}.log"]) < 4096 + last
    topic.close()
    loglib.repair(topic.path)
    with Topic.open(topic.path, create=True) as topic:
        topic.append(b"behind the gap", sync=True)
        topic.partition(0).roll()
        topic.append(b"and more", sync=True)
        over(topic.path, to)
        assert (to / "0000" / "gaps.json").read_bytes() == Path(topic.path, "0000", "gaps.json").read_bytes()
        assert segments(to) == segments(topic.path)
        with Topic.open(to, mode="r") as copy:
            assert list(copy.read(on_damage="skip")) == list(topic.read(on_damage="skip"))


def test_failing_over_and_back(open_topic: OpenTopic, path: Path, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)
    over(path, to)
    with pytest.raises(LogError, match="stream:.*cannot be reached"):
        promote(to)
    topic.append(b"only here", sync=True)
    topic.close()
    promote(to, force=True)
    with Topic.open(to, create=True) as now:
        now.append(b"new", sync=True)
        with pytest.raises(NotLeaderError):
            over(to, path)
        assert len(over(to, path, demote=True).set_aside) == 1
        assert_same(now, path)


# --- streams -----------------------------------------------------------------------------------------------------


def test_pipes_and_files(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    with open(read_there, "rb") as requests, open(write_there, "wb") as answers:
        thread = threading.Thread(target=serve_mirror, args=(topic.path, (requests, answers)))
        thread.start()
        receive_mirror((read_here, write_here), to)
        assert os.get_blocking(read_here) and os.get_blocking(write_here)
        os.close(write_here)
        thread.join()
    os.close(read_here)
    assert_same(topic, to)


def test_tcp(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        thread = threading.Thread(target=serve_mirror, args=(topic.path, theirs))
        thread.start()
        receive_mirror(ours, to)
        ours.shutdown(socket.SHUT_WR)
        thread.join()
    assert_same(topic, to)


def test_silent_end_is_given_up(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(BrokenStreamError, match="silent for 0.05 seconds"):
            serve_mirror(topic.path, theirs, timeout=0.05)
        with pytest.raises(BrokenStreamError, match="silent for 0.05 seconds"):
            receive_mirror(ours, to, timeout=0.05)
    assert not to.exists()


def test_wrong_arguments(open_topic: OpenTopic, path: Path, to: Path) -> None:
    topic = open_topic(partitions=1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(TypeError, match="a stream is a connected socket"):
            receive_mirror("hosta:9900", to)
        with pytest.raises(ValueError, match="time-out"):
            receive_mirror(ours, to, timeout=0)
        with pytest.raises(FileNotFoundError):
            serve_mirror(path.with_name("nothing"), theirs)
        with pytest.raises(ValueError, match="on_divergence"), served(topic.path) as serving:
            Mirror.over(serving.stream, to, on_divergence="ignore")  # type: ignore[arg-type]
        with Topic.open(path.with_name("other"), create=True, partitions=1) as other:
            with pytest.raises(NotLeaderError):
                over(topic.path, Path(other.path))
            over(other.path, to)
        with pytest.raises(LogError, match="with another log id"):
            over(topic.path, to)


# --- streams that break --------------------------------------------------------------------------------------------


def prefix_of(topic: Topic, to: Path) -> None:
    """The copy, if there is one, opens, and has only what the source has."""
    theirs = segments(topic.path)
    for name, content in segments(to).items():
        assert theirs[name].startswith(content), name
    if (to / "topic.json").exists():
        with Topic.open(to, mode="r") as copy:
            assert copy.verify().damage == ()
            for ours, other in zip(copy.partitions, topic.partitions, strict=True):
                found = values_of(ours)
                assert found == values_of(other)[: len(found)]


@pytest.mark.parametrize("seed", range(3))
def test_stream_that_is_cut_after_any_number_of_bytes_in_either_direction(
    open_topic: OpenTopic, to: Path, seed: int
) -> None:
    chance = random.Random(seed)
    topic = open_topic(partitions=2)
    varied(topic)
    over(topic.path, to, through=(whole := Wire()))
    assert_same(topic, to)
    shutil.rmtree(to)
    cuts = 0
    for number in range(10):
        from_source = chance.random() < 0.7
        at = int(whole.carried[from_source] * chance.random() ** (1 + number))  # less and less is left to be sent
        wire = Wire(from_source=at if from_source else None, from_copy=None if from_source else at)
        try:
            over(topic.path, to, through=wire)
        except BrokenStreamError:
            cuts += 1
        prefix_of(topic, to)
        if chance.random() < 0.3:
            fill(topic, 1)
    assert cuts > 3
    over(topic.path, to)
    assert_same(topic, to)
    with Topic.open(to, mode="r") as copy:
        assert copy.group_info("etl").committed == topic.group_info("etl").committed


@pytest.mark.parametrize("seed", range(2))
def test_byte_that_is_flipped_on_the_way_is_found(open_topic: OpenTopic, to: Path, seed: int) -> None:
    chance = random.Random(seed)
    topic = open_topic(partitions=2)
    varied(topic)
    over(topic.path, to, through=(whole := Wire()))
    for number in range(9):
        shutil.rmtree(to)
        from_source = number % 3 > 0
        at, bit = chance.randrange(whole.carried[from_source]), chance.randrange(8)
        wire = Wire(from_source=at if from_source else None, from_copy=None if from_source else at, flips=True, bit=bit)
        with pytest.raises((BrokenStreamError, UnsupportedFormatError)):
            over(topic.path, to, through=wire)
        assert wire.struck
        prefix_of(topic, to)
        over(topic.path, to)
        assert_same(topic, to)
