"""Manifests of an archive: a change in any byte is damage, and what is committed does not change."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import archived_topics
import pytest
from archived_topics import newest, open_store

from conftest import NOW
from loglib import CorruptLogError, Topic, UnsupportedFormatError, testing
from loglib.format.checked_json import seal
from loglib.offload import ArchiveManifest, archive, archived, manifest_log
from loglib.offload.archive_manifest import ArchivedFile, ArchivedPartition, decode, encode
from loglib.offload.archive_reader import is_in_a_store
from loglib.offload.archive_reader import newest as newest_of
from loglib.offload.archiving import commit
from loglib.testing import MemoryFiles, RecordingFiles

Open = Callable[..., Topic]

to = archived_topics.to


def an_archive() -> ArchiveManifest:
    file = ArchivedFile(f"0000/{0:020d}-{9:020d}-{'a' * 16}.parquet", 0, 9, 3, 100, 7, 8, -5, NOW, NOW)
    return ArchiveManifest(3, bytes(range(16)), "clicks", NOW, (ArchivedPartition(0, 0, 20, ((9, 12),), (file,)),))


def test_a_manifest_that_differs_in_any_byte_is_damaged() -> None:
    content = encode(an_archive())
    assert decode(content, "m") == an_archive()
    for at in range(len(content)):
        with pytest.raises(CorruptLogError):
            decode(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], "m")
        with pytest.raises(CorruptLogError):
            decode(content[:at], "m")


PARTITION: dict[str, Any] = {
    "partition": 0, "start": 0, "end": 0, "gaps": [], "files": [], "healed": [], "chain": "0", "epoch": 0,
}  # fmt: skip
FILE = {
    "name": "0000/x.parquet", "start": 0, "end": 9, "rows": 1, "bytes": 1, "crc": "0", "footer_crc": "0",
    "first_time": 0, "last_time": 0, "added": 0, "epoch": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1}, {"version": True}, {"version": 1 << 63}, {"log_id": "x"}, {"partitions": 5}, {"format": "1"},
        {"partitions": [PARTITION | {"partition": 1}]}, {"partitions": [PARTITION | {"start": 5}]},
        {"partitions": [PARTITION | {"end": 9, "gaps": [[0, 10]]}]},
        {"partitions": [PARTITION | {"end": 9, "files": [FILE | {"name": "0000/../../x"}]}]},
        {"partitions": [PARTITION | {"end": 8, "healed": [FILE]}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_manifest_is_damaged(changes: dict[str, Any]) -> None:
    facts = {"format": 1, "version": 1, "log_id": "00" * 16, "topic": "t", "time": 0, "partitions": []}
    decode(seal(facts | {"partitions": [PARTITION]}), "m")
    with pytest.raises(CorruptLogError):
        decode(seal(facts | changes), "m")


def test_a_newer_manifest_says_so() -> None:
    with pytest.raises(UnsupportedFormatError):
        decode(seal({"format": 2}), "m")


def test_a_manifest_under_another_number_is_damaged(open_topic: Open, to: Path) -> None:
    archive(open_topic(), to)
    (to / "_loglib" / f"{1:020d}.json").rename(to / "_loglib" / f"{2:020d}.json")
    with pytest.raises(CorruptLogError, match="version 1"):
        archived(to)


def test_manifests_that_vanish_while_they_are_read_are_looked_for_again(to: Path) -> None:
    files = MemoryFiles()
    files.make_directories("/a")
    with closing(open_store("/a", files)) as store:
        assert commit(store, ArchiveManifest(1, bytes(16), "t", 0, ()))

    class Vanishing(RecordingFiles):
        left = 3

        def before(self, call: testing.Call) -> None:
            super().before(call)
            if call.path.endswith(".json") and call.name == "open_read" and self.left:
                self.left -= 1
                raise FileNotFoundError(errno.ENOENT, "gone", call.path)

    vanishing = Vanishing(files)
    found = newest(vanishing, "/a")
    assert found is not None and found.version == 1 and vanishing.left == 0
    vanishing.left = 1000
    with pytest.raises(CorruptLogError, match="vanish"):
        newest(vanishing, "/a")


def test_old_manifests_go_and_their_numbers_are_not_taken_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_log, "VERSIONS_KEPT", 3)
    files = MemoryFiles()
    files.make_directories("/a")
    versions = [ArchiveManifest(number, bytes(16), "t", 0, ()) for number in range(8)]
    with closing(open_store("/a", files)) as store, closing(open_store("/a", files)) as other:
        for each in versions[1:7]:
            assert commit(store, each)
            assert not commit(other, each), "of several processes one commits a version"
        assert len(files.listdir("/a/_loglib")) == 3
        for each in versions[1:4]:
            assert not commit(other, each), "the number is free again, but behind"
        assert newest_of(other) == versions[6]
        assert commit(store, versions[7])
        assert len(files.listdir("/a/_loglib")) == 3


def test_directory_is_in_no_store(tmp_path: Path) -> None:
    assert not is_in_a_store(str(tmp_path))
