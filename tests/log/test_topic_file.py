"""log/topic_file.py: `topic.json` says what a topic is; a directory that has it is whole."""

from __future__ import annotations

import errno
import json
import os
import threading
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from builders import LOG_ID, NOW, describe, edit_json

from loglib import (
    CorruptLogError,
    FlushPolicy,
    LogError,
    Retention,
    StorageFullError,
    Topic,
    TopicConfig,
    UnsupportedFormatError,
    testing,
)
from loglib.log import topic_file
from loglib.segment import HEADER_BYTES
from loglib.system.directory import Directory
from loglib.system.files import REAL, Files
from loglib.testing import CrashFS, FaultyFiles, MemoryFiles

CONFIG = TopicConfig(
    partitions=3,
    flush=FlushPolicy(5, None, 7),
    retention=Retention(timedelta(days=3, microseconds=1), 1 << 40, 0.25),
    segment_age=None,
    compression="zstd",
    durability="os",
    permissions=0o640,
    producer_expiry=timedelta(hours=30),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory with a description."""
    path = tmp_path / "topic"
    path.mkdir()
    describe(path, LOG_ID, CONFIG)
    return path


def test_written_description_reads_back(path: Path) -> None:
    assert topic_file.read(REAL, str(path)) == (LOG_ID, CONFIG)
    assert sorted(os.listdir(path)) == ["topic.json", "topic.json.spare"]
    assert {each.stat().st_mode & 0o777 for each in path.iterdir()} == {0o640}


def test_description_is_replaced_whole(path: Path) -> None:
    (path / "topic.json.tmp").write_text("left by a crash")
    describe(path, LOG_ID, TopicConfig())
    assert topic_file.read(REAL, str(path)) == (LOG_ID, TopicConfig())
    assert sorted(os.listdir(path)) == ["topic.json", "topic.json.spare"]


def test_directory_without_a_description_is_no_topic(tmp_path: Path) -> None:
    assert topic_file.read(REAL, str(tmp_path)) is None
    assert topic_file.read(REAL, str(tmp_path / "missing")) is None


def test_names_that_are_missing_have_their_defaults(path: Path) -> None:
    (path / "topic.json").write_text(json.dumps({"format": 3, "log_id": str(uuid.UUID(bytes=LOG_ID)), "partitions": 1}))
    assert topic_file.read(REAL, str(path)) == (LOG_ID, TopicConfig())
    (path / "topic.json").write_text(
        json.dumps(
            {"format": 3, "log_id": LOG_ID.hex(), "partitions": 1, "retention": {"bytes": 5}, "flush": {"records": 9}}
        )
    )
    found = topic_file.read(REAL, str(path))
    assert found is not None
    assert found[1] == TopicConfig(retention=Retention(bytes=5), flush=FlushPolicy(records=9))


def test_names_that_are_unknown_are_left_alone(path: Path) -> None:
    # Those inside of `flush` and `retention` were called damage.
    values = json.loads((path / "topic.json").read_text())
    newer = {"newer": [1, {"crc": None}]}
    edit_json(path / "topic.json", **newer, flush=values["flush"] | newer, retention=values["retention"] | newer)
    assert topic_file.read(REAL, str(path)) == (LOG_ID, CONFIG)


def test_no_flip_in_a_description_changes_what_it_says(path: Path) -> None:
    # One flip in `"partitions"` hid all partitions but the first; one in `"age"` had old segments dropped.
    content = bytearray((path / "topic.json").read_bytes())
    name_of_crc = range(content.index(b'"crc"'), content.index(b'"crc"') + 5)
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        (path / "topic.json").write_bytes(content)
        try:
            assert topic_file.read(REAL, str(path)) == (LOG_ID, CONFIG)
            assert bit // 8 in name_of_crc or not bytes(content[bit // 8 : bit // 8 + 1]).strip(), f"bit {bit}"
        except CorruptLogError as error:
            assert error.path == str(path / "topic.json")
        content[bit // 8] ^= 1 << bit % 8


def test_description_without_its_crc_may_be_edited(path: Path) -> None:
    edit_json(path / "topic.json", segment_bytes=9999)
    found = topic_file.read(REAL, str(path))
    assert found is not None and found[1].segment_bytes == 9999
    content = (path / "topic.json").read_bytes()
    describe(path, LOG_ID, CONFIG)
    signed = (path / "topic.json").read_bytes().replace(b"1073741824", b"1073741825")
    (path / "topic.json").write_bytes(signed)
    with pytest.raises(CorruptLogError, match="remove the crc to edit the file by hand"):
        topic_file.read(REAL, str(path))
    assert content != signed


def test_fewer_partitions_than_there_are_are_not_read(path: Path) -> None:
    (path / "0002").mkdir()
    edit_json(path / "topic.json", partitions=2)
    left_by_a_crash = topic_file.read(REAL, str(path))
    assert left_by_a_crash == (LOG_ID, replace(CONFIG, partitions=2))
    (path / "0002" / f"{0:020d}.log").write_bytes(bytes(HEADER_BYTES + 1))
    with pytest.raises(CorruptLogError, match="2 partitions"):
        topic_file.read(REAL, str(path))
    edit_json(path / "topic.json", partitions=3)
    assert topic_file.read(REAL, str(path)) == (LOG_ID, CONFIG)


def test_number_of_partitions_has_no_default(path: Path) -> None:
    (path / "topic.json").write_text(json.dumps({"format": 3, "log_id": LOG_ID.hex()}))
    with pytest.raises(CorruptLogError, match="partitions"):
        topic_file.read(REAL, str(path))


NO_DESCRIPTIONS = [
    pytest.param(b"", id="empty"),
    pytest.param(bytes(4096), id="zeros"),
    pytest.param(b"\xff\xfe\xff", id="no-utf-8"),
    pytest.param(b"[" * 200_000, id="nested-too-deep"),
    pytest.param(b'{"format": ' + b"9" * 5000 + b"}", id="a-number-too-long"),
    *[pytest.param(text.encode(), id=text) for text in ("null", "[]", "1", '"text"', "{}", '{"format": 3}', "{")],
]


@pytest.mark.parametrize("content", NO_DESCRIPTIONS)
@pytest.mark.usefixtures("no_garbage")
def test_what_is_no_description_is_damage(path: Path, content: bytes) -> None:
    (path / "topic.json").write_bytes(content)
    with pytest.raises(CorruptLogError, match="the JSON of a topic") as caught:
        topic_file.read(REAL, str(path))
    assert caught.value.path == str(path / "topic.json")


def test_no_prefix_of_a_description_is_accepted(path: Path) -> None:
    content = (path / "topic.json").read_bytes()
    for size in range(len(content) - 2):
        (path / "topic.json").write_bytes(content[:size])
        with pytest.raises(CorruptLogError):
            topic_file.read(REAL, str(path))


@pytest.mark.parametrize("name", ["format", "log_id", *CONFIG.to_json()])
@pytest.mark.parametrize(
    "value", [{}, [1], "text", -1, 1.5, 1e300, float("inf"), float("nan"), 10**400], ids=lambda value: repr(value)[:12]
)
def test_value_of_the_wrong_kind_is_an_error_and_no_crash(path: Path, name: str, value: object) -> None:
    edit_json(path / "topic.json", **{name: value})
    try:
        found = topic_file.read(REAL, str(path))
    except (CorruptLogError, UnsupportedFormatError) as error:
        assert str(path) in str(error)
    else:
        assert found is not None
        json.dumps(found[1].to_json())  # whatever was taken can be written again


@pytest.mark.parametrize("size", [0, 15, 17])
def test_log_id_that_is_not_as_long_as_a_uuid_is_damage(path: Path, size: int) -> None:
    edit_json(path / "topic.json", log_id=bytes(size).hex())
    with pytest.raises(CorruptLogError, match="is no UUID"):
        topic_file.read(REAL, str(path))


@pytest.mark.parametrize("name", ["flush", "retention"])
@pytest.mark.parametrize("values", [{"bytes": "9"}, {"bytes": 1.5}, {"bytes": -1}, {"age": "x", "interval": "x"}])
def test_wrong_values_in_a_policy_are_damage(path: Path, name: str, values: dict[str, object]) -> None:
    edit_json(path / "topic.json", **{name: values})
    with pytest.raises(CorruptLogError):
        topic_file.read(REAL, str(path))


@pytest.mark.parametrize("name", ["flush", "retention"])
@pytest.mark.parametrize("value", [[], ["age"], "age", 0, None, False], ids=repr)
def test_policy_that_is_no_object_is_damage_and_not_the_default(path: Path, name: str, value: object) -> None:
    """`"retention": []` was read as the default: a topic kept for ever would have lost what is older than a week."""
    edit_json(path / "topic.json", **{name: value})
    with pytest.raises(CorruptLogError, match="must be an object"):
        topic_file.read(REAL, str(path))


@pytest.mark.parametrize("version", [0, -1, 0.5, float("nan"), True, None, "1", [1]])
def test_format_that_is_no_number_of_a_version_is_damage(path: Path, version: object) -> None:
    edit_json(path / "topic.json", format=version)
    with pytest.raises(CorruptLogError):
        topic_file.read(REAL, str(path))


@pytest.mark.parametrize("version", [4, 99, 1 << 40])
def test_newer_description_is_refused_by_name(path: Path, version: int) -> None:
    edit_json(path / "topic.json", format=version, partitions="in words")
    with pytest.raises(UnsupportedFormatError, match=f"topic format {version} is newer") as caught:
        topic_file.read(REAL, str(path))
    assert (caught.value.found, caught.value.supported) == (version, 3)


def test_compression_of_a_newer_version_is_refused_by_name(path: Path) -> None:
    edit_json(path / "topic.json", compression="brotli")
    with pytest.raises(UnsupportedFormatError, match="compression brotli is newer .*none, zlib, lz4, zstd"):
        topic_file.read(REAL, str(path))


def test_description_that_is_too_large_is_not_read(path: Path) -> None:
    (path / "topic.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(CorruptLogError, match="at most 1048576"):
        topic_file.read(REAL, str(path))


# --- creation -------------------------------------------------------------------------------------------


def test_topic_is_made_whole_with_the_directories_above_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "topic"
    topic_file.create(REAL, str(path), CONFIG, now=NOW)
    assert sorted(os.listdir(path)) == ["0000", "0001", "0002", "topic.json", "topic.json.spare"]
    assert sorted(os.listdir(path / "0002")) == ["00000000000000000000.log", "watermark"]
    assert os.listdir(path.parent) == ["topic"]
    assert {each.stat().st_mode & 0o777 for each in path.rglob("*") if each.is_file()} == {0o640}
    assert {each.stat().st_mode & 0o777 for each in (path, path / "0000")} == {0o750}
    found = topic_file.read(REAL, str(path))
    assert found is not None and found[1] == CONFIG


def test_each_topic_has_a_log_id_of_its_own(tmp_path: Path) -> None:
    ids = set()
    for number in range(3):
        topic_file.create(REAL, str(tmp_path / str(number)), TopicConfig(), now=NOW)
        found = topic_file.read(REAL, str(tmp_path / str(number)))
        assert found is not None
        ids.add(found[0])
    assert len(ids) == 3


def test_topic_is_made_in_an_empty_directory_but_in_no_other(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    topic_file.create(REAL, str(tmp_path / "empty"), TopicConfig(), now=NOW)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(LogError, match=r"holds files but no topic\.json"):
        topic_file.create(REAL, str(tmp_path / "full"), TopicConfig(), now=NOW)
    assert os.listdir(tmp_path / "full") == ["thesis.txt"]
    assert sorted(os.listdir(tmp_path)) == ["empty", "full"]


def test_of_several_that_make_a_topic_one_wins_and_all_use_it(tmp_path: Path) -> None:
    path = tmp_path / "topic"
    start = threading.Barrier(4)
    faults: list[Exception] = []

    def make() -> None:
        start.wait()
        try:
            topic_file.create(REAL, str(path), TopicConfig(), now=NOW)
        except LogError as error:  # it came later and has seen the topic
            faults.append(error)

    makers = [threading.Thread(target=make) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(faults) < 4
    assert os.listdir(tmp_path) == ["topic"]
    with Topic.open(path, create=True) as topic:
        topic.append(b"x")


def test_topic_that_another_process_made_meanwhile_counts(tmp_path: Path) -> None:
    path = tmp_path / "topic"

    class Late(Files):
        """Another process comes first, just before the rename."""

        def rename(self, source: str, target: str, **directories: int) -> None:  # type: ignore[override]
            if target == str(path):
                topic_file.create(REAL, str(path), TopicConfig(partitions=2), now=NOW)
            os.rename(source, target, **directories)

    topic_file.create(Late(), str(path), TopicConfig(), now=NOW)
    found = topic_file.read(REAL, str(path))
    assert found is not None and found[1].partitions == 2
    assert os.listdir(tmp_path) == ["topic"]


def test_rename_that_fails_for_another_reason_is_reported(tmp_path: Path) -> None:
    class Broken(Files):
        def rename(self, source: str, target: str, **directories: int) -> None:  # type: ignore[override]
            if target.endswith("topic"):
                raise OSError(errno.EIO, "Input/output error")
            os.rename(source, target, **directories)

    with pytest.raises(OSError, match="Input/output"):
        topic_file.create(Broken(), str(tmp_path / "topic"), TopicConfig(), now=NOW)
    assert not (tmp_path / "topic").exists()


def test_topic_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    # The error of removing what had not been made stood in its place.
    class ReadOnly(Files):
        def make_directory(self, path: str, permissions: int) -> None:
            raise OSError(errno.EROFS, "Read-only file system", path)

    with pytest.raises(OSError, match="Read-only"):
        topic_file.create(ReadOnly(), str(tmp_path / "topic"), TopicConfig(), now=NOW)
    assert os.listdir(tmp_path) == []


def test_description_that_is_read_while_partitions_are_added(tmp_path: Path) -> None:
    """The new partition may have records when its directory is looked at, and the text was read before."""
    path = tmp_path / "grows"
    with Topic.open(path, create=True, partitions=1) as topic:
        topic.append(b"x", sync=True)

    class Adding(testing.UnsyncedFiles):
        added = False

        def read_whole(self, name: str, limit_bytes: int) -> bytes:
            content = super().read_whole(name, limit_bytes)
            if not self.added:
                self.added = True
                Topic.add_partitions(path, 2)
                with Topic.open(path, create=True) as grown:
                    grown.append(b"y", partition=1, sync=True)
            return content

    described = topic_file.read(Adding(), str(path))
    assert described is not None and described[1].partitions == 2


# --- a full disk -----------------------------------------------------------------------------------------------


def full_disk() -> MemoryFiles:
    """A topic on a disk without room for one more byte."""
    files = MemoryFiles()
    topic_file.create(files, "/topic", TopicConfig(), now=NOW)
    files.capacity = files.used
    return files


def change(files: Files, **policies: Any) -> None:
    described = topic_file.read(files, "/topic")
    assert described is not None
    with Directory.open(files, "/topic") as directory:
        topic_file.write(directory, described[0], described[1].changed(policies))


def policies_of(files: Files) -> TopicConfig:
    described = topic_file.read(files, "/topic")
    assert described is not None
    return described[1]


def test_policies_change_on_a_full_disk_again_and_again() -> None:
    """A smaller limit of retention is what makes room, and a full disk refused it."""
    files = full_disk()
    for size_bytes in (1 << 40, 1 << 30, 5):
        change(files, retention=Retention(bytes=size_bytes), permissions=0o640)
        assert policies_of(files).retention.bytes == size_bytes
    names = {name for name in files.tree() if "topic.json" in name}
    assert names == {"/topic/topic.json", "/topic/topic.json.spare"}
    assert files.facts("/topic/topic.json").st_mode & 0o777 == 0o640


@pytest.mark.parametrize("spare", ["missing", "short", "shared"])
def test_full_disk_without_a_spare_file_is_told_and_changes_nothing(spare: str) -> None:
    files = full_disk()
    files.capacity = None
    if spare == "shared":
        files.link("/topic/topic.json.spare", "/copy of a name")
    else:
        files.unlink("/topic/topic.json.spare")
    if spare == "short":
        files.close(files.create("/topic/topic.json.spare", 0o600))
    files.capacity = 0
    before = files.tree()
    with pytest.raises(StorageFullError, match="topic.json: No space left"):
        change(files, batch_records=7)
    assert files.tree() == before and policies_of(files) == TopicConfig()


def test_spare_file_is_made_again_when_there_is_room() -> None:
    files = full_disk()
    files.unlink("/topic/topic.json.spare")
    files.capacity = None
    change(files, batch_records=7)
    assert len(files.tree()["/topic/topic.json.spare"]) == 4096
    files.link("/topic/topic.json.spare", "/other")
    files.link("/topic/topic.json", "/topic/topic.json.spare.tmp")  # left by a crash on a full disk
    change(files, batch_records=8)
    assert not files.exists("/topic/topic.json.spare.tmp")
    assert files.facts("/topic/topic.json.spare").st_nlink == 1


def test_two_names_of_one_spare_file_become_one(tmp_path: Path) -> None:
    """A crash of a change on a full disk may leave both, and to rename one onto the other does nothing."""
    with Directory.open(REAL, str(tmp_path)) as directory:
        topic_file.write(directory, bytes(16), TopicConfig())
        os.link(tmp_path / topic_file.SPARE, tmp_path / f"{topic_file.SPARE}.tmp")
        topic_file.write(directory, bytes(16), TopicConfig(batch_records=7))
    assert sorted(os.listdir(tmp_path)) == ["topic.json", "topic.json.spare"]
    assert os.stat(tmp_path / topic_file.SPARE).st_nlink == 1


def test_failing_disk_is_not_told_as_a_full_one() -> None:
    files = full_disk()
    broken = FaultyFiles("rename", error=errno.EIO, inner=files)
    with Directory.open(broken, "/topic") as directory, pytest.raises(OSError, match="Input/output"):
        topic_file.write(directory, bytes(16), TopicConfig(batch_records=7))
    assert policies_of(files) == TopicConfig()


def test_change_on_a_full_disk_that_is_cut_has_happened_or_not() -> None:
    """Whatever step a crash follows, and whatever of it the disk has, `topic.json` has the old or the new policies."""
    files = CrashFS()
    topic_file.create(files, "/topic", TopicConfig(), now=NOW)
    begun = len(files.operations)
    files.capacity = files.used
    change(files, batch_records=7)
    states = list(files.crash_states(since=begun, random=20))
    assert {policies_of(each.files).batch_records for each in states} == {TopicConfig().batch_records, 7}
    done = [each for each in states if each.at == len(files.operations)]
    assert {policies_of(each.files).batch_records for each in done} == {7}, "durable when the call returns"


def test_other_error_of_a_disk_is_not_a_full_disk() -> None:
    files = FaultyFiles("pwritev", inner=full_disk())
    with pytest.raises(OSError) as raised:
        change(files, batch_records=7)
    assert not isinstance(raised.value, StorageFullError) and raised.value.errno == errno.EIO


def test_topic_that_another_process_has_made_meanwhile_stays(tmp_path: Path) -> None:
    """Many processes that begin together make one topic: who looked before it was there finds it now."""
    path = str(tmp_path / "topic")
    topic_file.create(REAL, path, TopicConfig(partitions=3), now=1)
    made = topic_file.read(REAL, path)
    topic_file.create(REAL, path, TopicConfig(), now=2)
    assert topic_file.read(REAL, path) == made
