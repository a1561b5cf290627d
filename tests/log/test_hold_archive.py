"""Retention with an archive: what the archive does not hold safely stays, whatever the limits say."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from conftest import MANUAL, SECOND, Clock
from loglib import Retention, Topic, testing
from loglib.config.policies import TopicConfig
from loglib.offload import archive, archived

# All that is sealed is due at once, so a segment stays for the archive alone.
GRACE = timedelta(minutes=10)
MINUTE = 60 * SECOND


def due_at_once(to: str | Path, *, grace: timedelta = timedelta(0)) -> Retention:
    return Retention(age=None, bytes=0, archive=to, archive_grace=grace)


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def topic(path: Path, to: Path) -> Iterator[Topic]:
    with Topic.open(path, create=True, retention=due_at_once(to)) as opened:
        yield opened


def seal(topic: Topic, segments: int, *, partition: int = 0) -> None:
    for _ in range(segments):
        topic.append(b"x" * 100, partition=partition, sync=True)
        topic.partition(partition).roll()


def drops(topic: Topic) -> list[bool]:
    return [each.drop for each in topic.retain()]


def test_segment_stays_until_the_archive_has_it(topic: Topic, to: Path, caplog: pytest.LogCaptureFixture) -> None:
    seal(topic, 3)
    assert drops(topic) == [False] * 4
    assert "retention drops nothing without its archive" in caplog.text and "no archive here" in caplog.text
    archive(topic, to)
    seal(topic, 1)
    assert drops(topic) == [True, True, True, False, False], "the last one was sealed after the archive was made"
    assert len(list(topic.read())) == 1
    assert archived(to).rows == 3


def test_retention_at_a_roll_waits_as_well(path: Path, to: Path) -> None:
    """A pass that runs by itself must not overtake an archive that is filled from outside."""
    with Topic.open(path, create=True, retention=due_at_once(to), segment_bytes=4096) as topic:
        for _ in range(20):
            topic.append(b"x" * 1000, sync=True)
        sealed = len(topic.partition(0).segments) - 1
        assert sealed >= 4 and topic.partition(0).log_start_offset == 0
        made = archive(topic, to)
        # One pass may drop nothing: when the wall clock steps back, the archive is too young for a moment.
        while topic.partition(0).log_start_offset < made.ends[0]:
            topic.append(b"x" * 1000, sync=True)
        for _ in range(12):
            topic.append(b"x" * 1000, sync=True)
        assert topic.partition(0).log_start_offset == made.ends[0] and len(topic.partition(0).segments) > 3


def test_decisions_name_the_archive_that_is_waited_for(topic: Topic, to: Path) -> None:
    seal(topic, 1)
    (first, last) = topic.retain(dry_run=True)
    assert (first.held_by, last.held_by) == (str(to), None)
    assert first.reason.endswith(f"the limit is 0, but the archive {to} has held nothing for its grace time")
    archive(topic, to)
    seal(topic, 1)
    (first, second, _) = topic.retain()
    assert (first.drop, second.drop, second.held_by) == (True, False, str(to))
    assert second.reason.endswith(f"has held offsets below {second.base_offset} for its grace time")


def test_segment_stays_for_the_grace_time(path: Path, to: Path, clock: Clock) -> None:
    retention = due_at_once(to, grace=GRACE)
    with testing.open_topic(path, retention=retention, clock=clock, flush=MANUAL) as topic:
        for _ in range(2):
            seal(topic, 1)
            archive(topic, to, file_bytes=1)
            clock.now += 6 * MINUTE
        assert drops(topic) == [True, False, False], "of two files the first is old enough"
        clock.now += 6 * MINUTE
        assert drops(topic) == [True, False]


def test_archive_that_ends_in_the_middle_of_a_segment_keeps_it(topic: Topic, to: Path) -> None:
    """A floor is an offset, and a segment goes as a whole."""
    seal(topic, 2)
    archive(topic, to, file_bytes=1)
    first, second = topic.partition(0).segments[:2]
    (file,) = sorted(to.glob("0000/*.parquet"))[1:]
    file.unlink()
    assert first.end_offset == second.base_offset
    assert drops(topic) == [True, False, False]


@pytest.mark.parametrize("harm", ["removed", "cut", "a link to itself"])
def test_file_that_is_gone_or_another_keeps_its_records(
    topic: Topic, to: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    seal(topic, 2)
    archive(topic, to)
    (file,) = to.glob("0000/*.parquet")
    if harm == "removed":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
        file.symlink_to(file)
    assert drops(topic) == [False] * 3
    assert "retention keeps the records" in caplog.text


def test_archive_of_another_topic_holds_nothing_safely(
    topic: Topic, to: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Topic.open(tmp_path / "other", create=True) as other:
        seal(other, 2)
        archive(other, to)
    seal(topic, 2)
    assert drops(topic) == [False] * 3
    assert "the archive of another log" in caplog.text


def test_damaged_manifest_drops_nothing(topic: Topic, to: Path) -> None:
    seal(topic, 2)
    archive(topic, to)
    (manifest,) = to.glob("_loglib/*.json")
    manifest.write_bytes(manifest.read_bytes().replace(b"rows", b"r0ws"))
    assert drops(topic) == [False] * 3


def test_full_disk_drops_nothing_that_is_not_in_the_archive(clock: Clock) -> None:
    """And what is in it goes, oldest first."""

    class Full(testing.MemoryFiles):
        def free_space(self, path: str) -> tuple[int, int]:
            return 0, 10_000

    retention = Retention(age=None, keep_free=0.001, archive="/archive", archive_grace=timedelta(0))
    with testing.open_topic("/topic", files=Full(), clock=clock, retention=retention, flush=MANUAL) as topic:
        seal(topic, 3)
        assert not any(drops(topic))
        archive(topic, "/archive")
        clock.now += 1
        found = drops(topic)
        assert found[0] and found.count(True) == 1, "10 bytes must be free, and a segment has more"


def test_partitions_wait_each_for_itself(path: Path, to: Path) -> None:
    with Topic.open(path, create=True, partitions=2, retention=due_at_once(to)) as topic:
        seal(topic, 2)
        archive(topic, to)
        seal(topic, 2, partition=1)
        topic.retain()
        assert [len(each.segments) for each in topic.partitions] == [1, 3]


def test_partition_that_came_later_is_not_in_the_archive_yet(path: Path, to: Path) -> None:
    with Topic.open(path, create=True, retention=due_at_once(to)) as topic:
        seal(topic, 1)
        archive(topic, to)
    Topic.add_partitions(path, 2)
    with Topic.open(path) as topic:
        seal(topic, 2, partition=1)
        topic.retain()
        assert len(topic.partition(1).segments) == 3


def test_log_that_begins_before_its_archive_keeps_what_lies_before(topic: Topic, to: Path, path: Path) -> None:
    """An older copy of the topic was restored, and its archive begins later."""
    seal(topic, 3)
    base = topic.partition(0).segments[1].base_offset
    made = archive(topic, to)
    (one,) = made.partitions
    from loglib.offload.archive_manifest import encode

    later = made._replace(version=2, partitions=(one._replace(start=base, files=(one.files[0]._replace(start=base),)),))
    (to / "_loglib" / f"{2:020d}.json").write_bytes(encode(later))
    assert drops(topic) == [False] * 4


def test_relative_archive_counts_from_the_topic(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with Topic.open(path, create=True, retention=due_at_once("../archive")) as topic:
        seal(topic, 1)
        archive(topic, path.parent / "archive")
        assert drops(topic) == [True, False]


def test_policy_is_kept_with_the_topic_and_may_change(path: Path, to: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Topic.open(path, create=True, retention=Retention(archive=to, archive_grace=GRACE)):
        pass
    with Topic.open(path) as topic:
        assert topic.config.retention.archive == str(to)
        assert topic.config.retention.archive_grace == GRACE
        topic.alter(retention=Retention())
    with Topic.open(path) as topic:
        assert topic.config.retention.archive is None
    assert "archive" not in (path / "topic.json").read_text()


@pytest.mark.parametrize("given", ["", b"bytes", "with\0zero", 7, True])
def test_archive_that_is_no_path_is_refused(given: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Retention\.archive"):
        Retention(archive=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "uri",
    ["s3://key:se@cret@bucket/x", "s3a://key@bucket/x", "S3://key:se/cret@bucket/x"],
    ids=["both", "key", "slash"],
)
def test_policy_has_no_credentials(uri: str) -> None:
    with pytest.raises(ValueError, match=r"Retention\.archive has credentials") as caught:
        Retention(archive=uri)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    "archive",
    ["s3://bucket/user@example.com?endpoint_override=host:9000", "s3://bucket?endpoint_override=host:9000", "//[x"],
)
def test_policy_without_credentials_is_taken_as_it_is(archive: str) -> None:
    assert Retention(archive=archive).archive == archive


def test_grace_is_a_duration_and_not_below_zero() -> None:
    with pytest.raises((TypeError, ValueError), match="archive_grace"):
        Retention(archive="a", archive_grace="soon")
    with pytest.raises(ValueError, match="archive_grace"):
        Retention(archive="a", archive_grace=timedelta(seconds=-1))
    config = TopicConfig(retention=Retention(archive="a"))
    assert TopicConfig.from_json(config.to_json()) == config
