"""Tiering to a directory: each sealed segment is there once, byte for byte, and counts only after it was compared."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import spoil
from tiered import bytes_of, check, records, seal

from conftest import NOW, QUIET, run_python
from loglib import (
    CorruptLogError,
    LogError,
    NotLeaderError,
    OffsetOutOfRangeError,
    Topic,
    UnsupportedFormatError,
    repair,
    testing,
)
from loglib.copies import promote
from loglib.format.checked_json import seal as seal_line
from loglib.log.copy_role import MANIFESTS
from loglib.offload import TieredPartition, TieredSegment, TierManifest, archive, manifest_log, tier, tiered
from loglib.offload import tiering as uploader
from loglib.offload.store import DirectoryStore
from loglib.offload.tier_manifest import decode, encode
from loglib.segment import read_segment_header
from loglib.testing import RecordingFiles
from loglib.testing.watched import WatchedFiles

Open = Callable[..., Topic]


@pytest.fixture
def to(tmp_path: Path) -> Path:
    """Where a place may be made."""
    return tmp_path / "tier" / "topic"


def sealed_bytes(path: Path) -> dict[str, bytes]:
    """The segments of a topic but the open ones."""
    found = bytes_of(path)
    last = {name[:4]: name for name in found}
    return {name: content for name, content in found.items() if name not in last.values()}


# --- what is uploaded ------------------------------------------------------------------------------------------------


def test_sealed_segments_are_uploaded_byte_for_byte(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic(partitions=3)
    seal(topic, 3, partitions=(0, 2))
    topic.append(b"in the open segment", partition=0, sync=True)
    told: list[tuple[int, int]] = []
    made = tier(topic, to, progress=lambda done, of: told.append((done, of)))
    check(made, bytes_of(to), sealed_bytes(path))
    assert bytes_of(to) == sealed_bytes(path)
    assert made == tiered(to) == tier(topic, to) and made.version == 1 and made.topic == "topic"
    assert made.ends == {0: topic.partition(0).segments[-1].base_offset, 1: 0, 2: topic.partition(2).high_watermark}
    assert told[-1] == (made.bytes, made.bytes) and len(told) == 6
    assert made.partition(1) == TieredPartition(1) == made.partition(9)._replace(partition=1)


def test_a_later_call_goes_on_where_the_one_before_ended(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 2)
    first = tier(topic, to)
    seal(topic, 2)
    files = RecordingFiles()
    with testing.open_topic(path, files=files, mode="r") as again:
        second = tier(again, to)
    assert second.version == 2 and second.partitions[0].segments[:2] == first.partitions[0].segments
    old = {each.file_name for each in first.partitions[0].segments}
    assert files.count("drop_cached") >= 2, "what is compared comes from the disk"
    linked = {name for call, name in files.named("link") if name.startswith(".0")}
    assert len(linked) == 3, "two segments and a manifest"
    assert not [name for name in linked for each in old if each in name]
    check(second, bytes_of(to), sealed_bytes(path))


def test_a_place_of_an_empty_topic_is_made_and_read(open_topic: Open, path: Path, to: Path) -> None:
    open_topic(partitions=2)
    assert tier(path, to).bytes == 0
    with Topic.open(to, mode="r") as topic:
        assert list(topic.read()) == [] and list(topic.follow()) == [] and topic.verify().damage == ()
        assert [part.segments for part in topic.partitions] == [[], []]


def test_many_segments_are_committed_in_several_versions(
    open_topic: Open, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "SEGMENTS_A_COMMIT", 2)
    topic = open_topic(partitions=2)
    seal(topic, 3, partitions=(0, 1), records=1)
    assert tier(topic, to, in_flight=1).version == 3


def test_several_segments_are_under_way_at_once(
    open_topic: Open, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three uploads waits for the other two."""
    barrier = threading.Barrier(3, timeout=60)
    put = DirectoryStore.put

    def meeting(store: DirectoryStore, *arguments: Any, replace: bool) -> bool:
        if arguments[0].endswith(".log"):
            barrier.wait()
        return put(store, *arguments, replace=replace)

    monkeypatch.setattr(DirectoryStore, "put", meeting)
    topic = open_topic()
    seal(topic, 3)
    assert len(tier(topic, to, in_flight=3).partitions[0].segments) == 3
    with pytest.raises(ValueError, match="in_flight must be at least 1"):
        tier(topic, to, in_flight=0)
    with pytest.raises(ValueError, match="the path of a place is empty"):
        tier(topic, "")


def test_records_that_a_transaction_has_not_finished_are_not_uploaded(
    open_topic: Open, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic()
    seal(topic)
    mark = topic.partition(0)._access.log.mark()
    held = mark._replace(held_txn=7, held_from=mark.log_start_offset, held_tail=mark.log_start_offset)
    log = topic.partition(0)._access.log
    assert log.writer is not None
    monkeypatch.setattr(log.writer, "mark", lambda: held)
    monkeypatch.setattr("loglib.log.log.is_pending_here", lambda *_: True)
    assert tier(topic, to).bytes == 0


def test_partitions_that_were_added_are_uploaded(path: Path, to: Path) -> None:
    with testing.open_topic(path, clock=lambda: NOW, partitions=1, **QUIET) as topic:
        seal(topic)
        tier(topic, to)
    Topic.add_partitions(path, 2)
    with testing.open_topic(path, clock=lambda: NOW) as topic:
        seal(topic, partitions=(1,))
        assert [len(each.segments) for each in tier(topic, to).partitions] == [1, 1]
        expected = records(topic)
    with Topic.open(to, mode="r") as topic:
        assert records(topic) == expected


def test_producers_and_declared_gaps_go_along(path: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loglib.segment.MAX_PRODUCERS", 2)
    with testing.open_topic(path, clock=lambda: NOW, **QUIET) as topic:
        for each in range(5):
            topic.append(b"x" * 100, producer=(f"p{each}", 1), sync=True)
        topic.partition(0).roll()
        seal(topic, 2)
        damaged = topic.partition(0).segments[0].path
        last = topic.partition(0).segments[1]
    spoil(Path(damaged), 4096 + 200)
    spoil(Path(last.path), 4096 + last.size_bytes - 3)
    with pytest.raises(CorruptLogError):
        tier(path, to)
    assert tiered_or_none(to) is None
    repair(path)
    made = tier(path, to)
    assert len(list(to.glob("0000/*.producers"))) == 2 and (to / "0000" / "gaps.json").exists()
    check(made, bytes_of(to), bytes_of(path))
    with Topic.open(path, mode="r") as log, Topic.open(to, mode="r") as place:
        end = made.ends[0]
        assert [each for each in records(log) if each.offset < end] == records(place)
        assert not place.verify().damage and place.verify().gaps


def tiered_or_none(to: Path) -> TierManifest | None:
    try:
        return tiered(to)
    except FileNotFoundError:
        return None


# --- what counts -------------------------------------------------------------------------------------------------


def test_a_segment_is_compared_with_what_the_disk_has(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 2)
    topic.close()

    class Rotten(WatchedFiles):
        """A disk that gives back another byte of what was written to the place."""

        def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
            content: bytes = super().pread(fd, size_bytes, position)
            if self._paths.get(fd, "").startswith(str(to / "0000")) and position == 0:
                return content[:50] + bytes([content[50] ^ 1]) + content[51:]
            return content

    with testing.open_topic(path, files=Rotten(), mode="r") as topic:
        with pytest.raises(CorruptLogError, match="does not count: remove it, and upload again"):
            tier(topic, to)
        assert tiered_or_none(to) is None


def test_what_a_dead_run_has_uploaded_is_compared_and_not_uploaded_again(
    open_topic: Open, path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic()
    seal(topic, 3)
    with monkeypatch.context() as patched:
        patched.setattr(manifest_log, "commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tier(topic, to)
    assert len(bytes_of(to)) == 3 and tiered_or_none(to) is None
    topic.close()
    files = RecordingFiles()
    with testing.open_topic(path, files=files, mode="r") as again:
        made = tier(again, to)
    assert not [name for _, name in files.named("create") if ".log-" in name]
    calls = [name for call, name in files.named("fsync", "link") if call == "link" or name == "0000"]
    assert calls[0] == "0000" and len(calls) == 4, "the dead run may not have synced the names that a manifest has"
    check(made, bytes_of(to), sealed_bytes(path))


@pytest.mark.parametrize("change", ["another byte", "shorter", "longer"])
def test_an_object_with_other_bytes_is_refused_and_not_replaced(
    open_topic: Open, to: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic()
    seal(topic, 2)
    with monkeypatch.context() as patched:
        patched.setattr(manifest_log, "commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tier(topic, to)
    found = sorted(to.glob("0000/*.log"))[1]
    content = found.read_bytes()
    changed = {"another byte": content[:-1] + b"?", "shorter": content[:-9], "longer": content + b"?"}[change]
    found.write_bytes(changed)
    with pytest.raises(CorruptLogError, match=found.name) as raised:
        tier(topic, to)
    assert found.read_bytes() == changed and str(found) in str(raised.value)
    found.unlink()
    assert len(tier(topic, to).partitions[0].segments) == 2


def test_a_damaged_segment_is_not_uploaded(open_topic: Open, path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic, 3)
    damaged = topic.partition(0).segments[1]
    topic.close()
    spoil(Path(damaged.path), 4096 + 150)
    with pytest.raises(CorruptLogError, match=os.path.basename(damaged.path)):
        tier(path, to)
    assert os.path.basename(damaged.path) not in {os.path.basename(name) for name in bytes_of(to)}
    spoil(Path(damaged.path), 4096 + 150)
    with open(damaged.path, "ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptLogError, match="up to the next one"):
        tier(path, to)


def test_a_segment_whose_neighbours_say_otherwise_is_not_uploaded(
    open_topic: Open, path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic()
    seal(topic, 2)
    with monkeypatch.context() as patched:
        read = read_segment_header
        patched.setattr(uploader, "read_segment_header", lambda *given: read(*given)._replace(previous_crc=5))
        with pytest.raises(CorruptLogError, match="expected 00000005, as the segments' headers say"):
            tier(topic, to)
    assert tiered_or_none(to) is None


# --- other logs, and other histories ---------------------------------------------------------------------------------


def test_another_topic_is_refused(open_topic: Open, tmp_path: Path, to: Path) -> None:
    topic = open_topic()
    seal(topic)
    tier(topic, to)
    other = open_topic(tmp_path / "other")
    with pytest.raises(LogError, match=r"has the segments of another log .*other .*; upload"):
        tier(other, to)
    (to / "copy.json").unlink()
    with pytest.raises(LogError, match="is a topic, and no place"):
        tier(other, to)
    (to / "topic.json").unlink()
    with pytest.raises(LogError, match="has the segments of another log"):
        tier(other, to)


def test_of_two_topics_that_make_a_place_at_once_one_is_refused(
    open_topic: Open, tmp_path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, other = open_topic(), open_topic(tmp_path / "other")
    seal(topic)
    put = DirectoryStore.put

    def late(store: DirectoryStore, *arguments: Any, replace: bool) -> bool:
        monkeypatch.setattr(DirectoryStore, "put", put)
        tier(topic, to)
        return put(store, *arguments, replace=replace)

    monkeypatch.setattr(DirectoryStore, "put", late)
    with pytest.raises(LogError, match="has the segments of another log"):
        tier(other, to)
    assert tiered(to).log_id == topic.log_id and tiered(to).bytes


def test_a_topic_an_archive_or_a_full_directory_is_no_place(open_topic: Open, tmp_path: Path) -> None:
    topic = open_topic()
    seal(topic)
    other = open_topic(tmp_path / "other")
    archive(topic, tmp_path / "parquet")
    for wrong in (other.path, topic.path, tmp_path / "parquet", tmp_path):
        before = sorted(os.listdir(wrong))
        with pytest.raises(LogError, match="holds other files; a place for segments is made in a new or an empty"):
            tier(topic, wrong)
        assert sorted(os.listdir(wrong)) == before
    with pytest.raises(FileNotFoundError, match="no uploaded segments here"):
        tiered(tmp_path)
    promoted = tmp_path / "place"
    tier(topic, promoted)
    promote(promoted)
    with pytest.raises(LogError, match=r"is a leader of .*, and no place for segments"):
        tier(topic, promoted)


def test_another_history_is_refused(open_topic: Open, path: Path, tmp_path: Path, to: Path) -> None:
    """A backup was restored, and then grew otherwise."""
    topic = open_topic()
    seal(topic, 1)
    topic.close()
    backup = tmp_path / "backup" / "topic"
    os.makedirs(backup.parent)
    os.system(f"cp -r {path} {backup}")
    topic = open_topic()
    seal(topic, 1)
    tier(topic, to)
    with testing.open_topic(backup, clock=lambda: NOW + 5) as restored:
        assert tier(restored, to) == tiered(to), "it has less, and nothing else"
        seal(restored, 1)  # as long as the other
        seal(restored, 1)
        with pytest.raises(LogError, match="partition 0: .* has another history than"):
            tier(restored, to)
        assert len(tiered(to).partitions[0].segments) == 2


def test_what_was_dropped_before_it_was_uploaded_is_an_error(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    seal(topic, 2)
    topic.partition(0).delete_before(topic.partition(0).segments[1].base_offset)
    made = tier(topic, to)
    assert made.partitions[0].start == topic.partition(0).log_start_offset > 0
    seal(topic, 2)
    topic.partition(0).delete_before(topic.partition(0).high_watermark)
    with pytest.raises(OffsetOutOfRangeError):
        tier(topic, to)


# --- other processes, and what they leave ----------------------------------------------------------------------------


def test_two_runs_at_once_upload_each_segment_once(
    open_topic: Open, path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run goes through all of its work between this one's look at the manifests and its commit."""
    topic = open_topic()
    seal(topic, 2)
    commit = manifest_log.commit

    def late(*arguments: Any) -> bool:
        monkeypatch.setattr(manifest_log, "commit", commit)
        seal(topic, 1)
        tier(topic, to)
        return commit(*arguments)

    monkeypatch.setattr(manifest_log, "commit", late)
    made = tier(topic, to)
    check(made, bytes_of(to), sealed_bytes(path))
    assert made.version == 1 and len(made.partitions[0].segments) == 3


def test_a_name_that_is_taken_meanwhile_is_compared(
    open_topic: Open, path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run uploads a segment behind this one's look for it."""
    topic = open_topic()
    seal(topic, 2)
    size = DirectoryStore.size

    def late(store: DirectoryStore, name: str) -> int | None:
        found = size(store, name)
        if found is None and name.endswith(".log"):
            os.makedirs(to / "0000", exist_ok=True)
            (to / name).write_bytes((path / name).read_bytes())
        return found

    monkeypatch.setattr(DirectoryStore, "size", late)
    check(tier(topic, to), bytes_of(to), sealed_bytes(path))


def test_what_dead_processes_left_is_swept_and_nothing_else(open_topic: Open, to: Path) -> None:
    topic = open_topic()
    seal(topic)
    tier(topic, to)
    drawn = "ab" * 8
    ours = [to / "0000" / f".{0:020d}.log", to / ".topic.json", to / "_tier" / ".7"]
    ours = [each.with_name(f"{each.name}-{drawn}.tmp") for each in ours]
    others = [to / "0000" / "notes.tmp", to / ".mine.tmp", to / "mine"]
    others[2].mkdir()
    others.append(to / "mine" / f".x-{drawn}.tmp")
    for each in (*ours, others[0], others[1], others[3]):
        each.write_bytes(b"x")
    tier(topic, to)
    assert not any(each.exists() for each in ours) and all(each.exists() for each in others)
    held = ours[0]
    store = DirectoryStore(topic._files, str(to), MANIFESTS, 0o600)
    held.write_bytes(b"x")
    tier(topic, to)
    store.close()
    assert held.exists(), "while another process uploads, nothing is swept"


def test_parent_directory_that_cannot_be_read_is_no_error(open_topic: Open, path: Path, to: Path) -> None:
    class Private(WatchedFiles):
        """Only the directories below the test's own can be read."""

        def before(self, call: Any) -> None:
            if call.name == "open_directory" and not call.path.startswith(str(to.parent.parent)):
                raise PermissionError(13, "injected", call.path)

    seal(open_topic())
    with testing.open_topic(path, files=Private(), mode="r") as again:
        assert tier(again, to).version == 1


@pytest.mark.parametrize("call", ["create", "link", "rename", "open_directory"])
def test_an_error_of_the_disk_leaves_no_open_file_and_no_unfinished_one(
    open_topic: Open, path: Path, to: Path, call: str
) -> None:
    topic = open_topic()
    seal(topic)
    topic.close()
    for at in range(20):
        files = Failing(call, at, to)
        with testing.open_topic(path, files=files, mode="r") as again:
            try:
                tier(again, to)
            except OSError:
                assert not [each for each in files.open_numbers() if str(to) in files._paths[each]]
                continue
        break
    assert at > 0 and tiered(to).bytes
    assert not list(to.rglob(".*"))


def test_a_lock_that_fails_closes_the_place(open_topic: Open, path: Path, to: Path) -> None:
    open_topic().close()
    files = Failing("flock", 0, to)
    with testing.open_topic(path, files=files, mode="r") as topic, pytest.raises(OSError, match="injected"):
        tier(topic, to)
    assert not [each for each in files.open_numbers() if str(to) in files._paths[each]]


class Failing(RecordingFiles):
    """The real files, of which one call below a path fails."""

    def __init__(self, name: str, at: int, below: Path) -> None:
        super().__init__()
        self._name, self._at, self._below = name, at, str(below)
        self._opened: set[int] = set()

    def before(self, call: Any) -> None:
        super().before(call)
        if call.name == self._name and call.path.startswith(self._below):
            self._at -= 1
            if self._at == -1:
                raise OSError(5, "injected", call.path)

    def open_numbers(self) -> set[int]:
        return self._opened

    def open(self, *given: Any, **places: Any) -> int:
        number: int = super().open(*given, **places)
        self._opened.add(number)
        return number

    def close(self, fd: int) -> None:
        self._opened.discard(fd)
        super().close(fd)


def test_a_place_is_promoted_also_if_a_partition_never_had_a_sealed_segment(
    open_topic: Open, tmp_path: Path, to: Path
) -> None:
    topic = open_topic(partitions=2)
    for number in range(4):
        topic.append(b"%d" % number, partition=1, sync=True)
    topic.append(b"not sealed", partition=0, sync=True)
    topic.partition(1).roll()
    tier(topic, to)
    shutil.copytree(to, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "0001")
    with pytest.raises(LogError, match="0001 is missing, and the place has segments of it"):
        promote(tmp_path / "half")
    assert not (tmp_path / "half" / "0000").exists()
    promote(to)
    with Topic.open(to, create=True) as restored:
        assert [each.value for each in restored.partition(1).read()] == [b"0", b"1", b"2", b"3"]
        assert restored.append(b"first", partition=0, sync=True).offset == 0
        assert restored.verify().damage == ()


def test_a_place_is_only_read_until_it_is_promoted(open_topic: Open, path: Path, to: Path) -> None:
    """Restoring: a place that was downloaded becomes a topic that goes on."""
    topic = open_topic()
    seal(topic, 2)
    expected = records(topic)
    tier(topic, to)
    with pytest.raises(NotLeaderError, match="is a tier of"):
        Topic.open(to, create=True)
    promote(to)
    with Topic.open(to) as restored:
        assert records(restored) == expected
        restored.append(b"and on", sync=True)
    with Topic.open(to, mode="r") as restored:
        assert [each.value for each in restored.read()][-1] == b"and on", "it is a topic like others"
        assert restored.verify().damage == ()


# --- the manifest ----------------------------------------------------------------------------------------------------

SEGMENT = TieredSegment(0, 1000, 900, 1, 2, NOW)
MADE = TierManifest(3, bytes(range(16)), "clicks", NOW, (TieredPartition(0, (SEGMENT,)), TieredPartition(1)))


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert decode(encode(MADE), "m") == MADE
    assert MADE.bytes == 4096 + 1000 and MADE.ends == {0: 1000, 1: 0}


@pytest.mark.parametrize(
    "segments",
    [
        [[0, 1000, 900, "1", "2", NOW, 1, 0], [1001, 2000, 1900, "1", "2", NOW, 1, 0]],
        [[0, 0, 0, "1", "2", NOW, 1, 0]],
        [[0, 10, 11, "1", "2", NOW, 1, 0]],
        [[0, 10, 5, "x", "2", NOW, 1, 0]],
        [[-1, 10, 5, "1", "2", NOW, 1, 0]],
        [[0, 10, 5, "1", "2", NOW]],
        [7],
    ],
)
def test_a_manifest_that_cannot_be_is_damaged(segments: list[Any]) -> None:
    facts = json.loads(encode(MADE)) | {"partitions": [segments]}
    del facts["crc"]
    with pytest.raises(CorruptLogError, match="the manifest of a place"):
        decode(seal_line(facts), "m")


def test_other_formats_of_a_manifest() -> None:
    facts = json.loads(encode(MADE))
    del facts["crc"]
    with pytest.raises(UnsupportedFormatError):
        decode(seal_line(facts | {"format": 2}), "m")
    with pytest.raises(CorruptLogError):
        decode(seal_line(facts | {"format": 0}), "m")


def test_any_flipped_byte_of_a_manifest_is_found() -> None:
    content = encode(MADE)
    for at in range(len(content)):
        with pytest.raises(CorruptLogError):
            decode(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], "m")


def test_importing_loglib_needs_neither_pyarrow_nor_boto3() -> None:
    program = """
        import sys
        sys.modules["boto3"] = sys.modules["botocore"] = None
        import loglib
        print("pyarrow" in sys.modules)
        try:
            loglib.offload.tier("/nowhere/topic", "s3://bucket/x?region=us-east-1")
        except FileNotFoundError:
            print("no topic")
        from loglib.offload.s3 import _client
        try:
            _client("s3://bucket/x", 1)
        except ImportError as error:
            print(error)
    """
    assert run_python(program).splitlines() == [
        "False", "no topic", 'uploading to S3 needs the extra [s3]: pip install "loglib-segments[s3]"',
    ]  # fmt: skip
