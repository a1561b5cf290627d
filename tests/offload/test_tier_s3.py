"""Tiering to an S3 API server on the loopback interface, whose connections break, time out and answer with errors."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import s3_server
from s3_server import Fault, Request, S3Server
from tiered import bytes_of, check, objects_of, records, seal

from conftest import start_python
from loglib import CorruptLogError, LogError, NotLeaderError, Retention, Topic
from loglib.cli.program import run
from loglib.offload import s3, tier, tiered
from loglib.offload import tiering as uploader
from loglib.offload.object_files import ObjectFiles
from loglib.offload.s3 import S3Store
from loglib.offload.storage import storage_of
from loglib.offload.tier_manifest import decode

Open = Callable[..., Topic]


store, impatient = s3_server.store, s3_server.impatient


@pytest.fixture
def key(tmp_path: Path) -> str:
    """Of a place that only this test has."""
    return f"{tmp_path.name}/topic"


def once(fault: Fault, wanted: Callable[[Request], bool]) -> Callable[[Request], Fault | None]:
    """The fault, at the first request that is wanted."""
    left = [fault]
    return lambda request: left.pop() if left and wanted(request) else None


def is_put_of(suffix: str) -> Callable[[Request], bool]:
    return lambda request: request.method == "PUT" and request.path.partition("?")[0].endswith(suffix)


# --- uploading -------------------------------------------------------------------------------------------------------


def test_segments_are_uploaded_byte_for_byte(open_topic: Open, path: Path, store: S3Server, key: str) -> None:
    topic = open_topic(partitions=2)
    seal(topic, 3, partitions=(0, 1))
    made = tier(topic, store.uri(key))
    check(made, objects_of(store, key), bytes_of(path))
    assert made == tier(topic, store.uri(key)) == tiered(store.uri(key)) and made.version == 1
    puts = [each.path for each in store.requests if each.method == "PUT" and each.path.endswith(".log")]
    assert len(puts) == len(set(puts)) == 6
    seal(topic, 1)
    again = tier(path, store.uri(key))
    assert again.version == 2 and len(again.partitions[0].segments) == 4


def test_key_with_escapes_is_written_where_it_is_read(open_topic: Open, store: S3Server, key: str) -> None:
    topic = open_topic()
    seal(topic, 2)
    uri = store.uri(f"{key}/100%25%20%C3%BC/orders")
    made = tier(topic, uri)
    assert tier(topic, uri) == tiered(uri) == made
    assert f"{key}/100% ü/orders/topic.json" in store.keys(key)
    with Topic.open(uri, mode="r") as place:
        assert records(place) == records(topic)


def test_commands_that_only_read_take_a_place_in_a_store(
    open_topic: Open, store: S3Server, key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    topic = open_topic()
    seal(topic, 2)
    tier(topic, store.uri(key))
    values = "".join(f"{(record.value or b'').decode()}\n" for record in records(topic))
    assert run(["cat", store.uri(key)]) == 0 and capfd.readouterr() == (values, "")
    assert run(["tail", store.uri(key), "-n", "5"]) == 0 and capfd.readouterr() == (values[len(values) // 2 :], "")


def test_a_large_segment_is_uploaded_in_parts(
    open_topic: Open, path: Path, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    topic = open_topic(segment_bytes=64 << 20)
    topic.append_many([os.urandom(1 << 20) for _ in range(12)])
    topic.partition(0).roll()
    made = tier(topic, store.uri(key))
    check(made, objects_of(store, key), bytes_of(path))
    assert len([each for each in store.requests if "partNumber=" in each.path]) == 3
    objects = _store(store, key)
    name = made.partitions[0].segments[0].file_name
    content = (path / "0000" / name).read_bytes()
    assert not objects.put(f"0000/{name}", len(content), lambda size, at: content[at : at + size]), "it is taken"
    assert not _unfinished(objects)


def _store(store: S3Server, key: str) -> S3Store:
    return S3Store(storage_of(store.uri(key))[0], connections=2)


def _unfinished(objects: S3Store) -> list[str]:
    """The keys of uploads in parts that have not come to an end."""
    found = objects._client.list_multipart_uploads(Bucket=objects._bucket, Prefix=objects._prefix)
    return [each["Key"] for each in found.get("Uploads", ())]


_STEPS = [(at, applied) for at in range(5) for applied in (False, True)]  # of an upload in three parts
_FAST = [(2, False), (4, False), (4, True)]


@pytest.mark.parametrize(
    ("at", "applied"), [*_FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in _STEPS if each not in _FAST)]
)
def test_an_upload_in_parts_that_fails_leaves_no_object_and_no_part(
    store: S3Server, key: str, at: int, applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    content = bytes(11 << 20)
    objects = _store(store, key)
    made = [-1]

    def fault(request: Request) -> Fault | None:
        if "uploadId=" not in request.path and not request.path.endswith("?uploads"):
            return None
        made[0] += request.method in ("PUT", "POST")
        return Fault(applied, "reset") if made[0] == at and request.method in ("PUT", "POST") else None

    with store.failing(fault), pytest.raises(OSError, match=f"{key}/0000/x"):
        objects.put("0000/x", len(content), lambda size, at: content[at : at + size])
    there = at == 4 and applied  # the answer to the completion was lost
    assert store.keys(key) == ([f"{key}/0000/x"] if there else [])
    assert objects.put("0000/x", len(content), lambda size, at: content[at : at + size]) is not there
    assert store.get(f"{key}/0000/x") == content and not _unfinished(objects)


def test_an_error_of_the_log_in_mid_upload_leaves_no_object(
    store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    objects = _store(store, key)

    def source(size: int, at: int) -> bytes:
        if at:
            raise OSError(5, "a bad sector")
        return bytes(size)

    with pytest.raises(OSError, match="a bad sector"):
        objects.put("0000/x", 11 << 20, source)
    assert store.keys(key) == [] and not _unfinished(objects)


def test_parts_that_cannot_be_listed_are_left(
    store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    caplog.set_level("INFO", "loglib")
    objects = _store(store, key)
    place = objects._at("0000/xy")
    objects._client.create_multipart_upload(**place)  # of another name, which begins so
    listing = once(Fault(False, "denied"), lambda request: request.method == "GET" and "uploads" in request.path)
    with store.failing(listing):
        assert objects.put("0000/x", 6 << 20, lambda size, at: bytes(size))
    assert "parts of uploads that have died may be left" in caplog.text
    objects._client.create_multipart_upload(**objects._at("0000/z"))  # its uploader has died
    for name, is_new in (("0000/z", True), ("0000/x", False)):
        assert objects.put(name, 6 << 20, lambda size, at: bytes(size)) is is_new
        assert _unfinished(objects) == [place["Key"]]


def test_a_store_that_denies_writing_is_an_error(
    store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    objects = _store(store, key)
    for size in (9, 6 << 20):
        last = once(Fault(False, "denied"), lambda request: "Id=" in request.path or "?" not in request.path)
        with store.failing(last), pytest.raises(OSError, match="AccessDenied"):
            objects.put("0000/x", size, lambda size, at: bytes(size))
    assert store.keys(key) == [] and not _unfinished(objects)


# --- what goes wrong on the way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "busy", "half"])
def test_a_request_that_fails_is_repeated(
    open_topic: Open, path: Path, store: S3Server, key: str, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most requests fail once, half of them after the server has done what it was asked for."""
    monkeypatch.setattr(s3, "ATTEMPTS", 6)
    topic = open_topic()
    seal(topic, 2)
    chance = Random(f"{how} 7")
    seen: set[str] = set()

    def fault(request: Request) -> Fault | None:
        name = f"{request.method} {request.path}"
        if name in seen or chance.random() < 0.3 or (how == "half") != (request.range is not None):
            return None
        seen.add(name)
        return Fault(how == "half" or chance.random() < 0.5, how)

    _without_pauses(monkeypatch)
    with store.failing(fault):
        made = tier(topic, store.uri(key))
    assert seen
    check(made, objects_of(store, key), bytes_of(path))


def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0)


def test_a_store_that_does_not_answer_is_given_up_and_tried_again(
    open_topic: Open, path: Path, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.2)
    topic = open_topic()
    seal(topic, 2)
    with store.failing(once(Fault(True, "silence"), is_put_of(".log"))), pytest.raises(OSError, match="timeout"):
        tier(topic, store.uri(key))
    assert not [each for each in store.keys(key) if "_tier" in each]
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 60)
    check(tier(topic, store.uri(key)), objects_of(store, key), bytes_of(path))


def test_a_lost_answer_to_the_manifest_commits_once(
    open_topic: Open, path: Path, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic()
    seal(topic, 2)
    lost = once(Fault(True, "reset"), is_put_of("1.json"))
    with store.failing(lost), pytest.raises(OSError, match="_tier"):
        tier(topic, store.uri(key))
    assert tiered(store.uri(key)).version == 1
    monkeypatch.setattr(s3, "ATTEMPTS", 3)
    _without_pauses(monkeypatch)
    seal(topic, 1)
    with store.failing(once(Fault(True, "reset"), is_put_of("2.json"))):
        made = tier(topic, store.uri(key))
    assert made.version == 2 and len([each for each in store.keys(key) if "_tier" in each]) == 2
    check(made, objects_of(store, key), bytes_of(path))


@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_dies_at_any_request_is_gone_on_with(
    open_topic: Open, path: Path, store: S3Server, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first run dies at some request, before or after it was done; a second one, too; the third one gets through."""
    monkeypatch.setattr(uploader, "SEGMENTS_A_COMMIT", 2)
    topic = open_topic()
    seal(topic, 3, records=1)
    _die_and_go_on(topic, path, store, f"{tmp_path.name}/topic", Random(seed), times=3)


@pytest.mark.slow
def test_a_run_that_dies_at_every_request_is_gone_on_with(
    open_topic: Open, path: Path, store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "SEGMENTS_A_COMMIT", 2)
    topic = open_topic()
    seal(topic, 3, records=1)
    for seed in range(40):
        _die_and_go_on(topic, path, store, f"{tmp_path.name}-{seed}/topic", Random(seed), times=6)


def _die_and_go_on(topic: Topic, path: Path, store: S3Server, key: str, chance: Random, *, times: int) -> None:
    puts: list[str] = []
    for _ in range(times):
        left = [chance.randrange(30)]
        applied = chance.random() < 0.5

        def fault(request: Request, left: list[int] = left, applied: bool = applied) -> Fault | None:
            left[0] -= 1
            dead = left[0] < 0
            if request.method == "PUT" and (not dead or (applied and left[0] == -1)):
                puts.append(request.path)
            return Fault(applied and left[0] == -1, "reset") if dead else None

        with store.failing(fault):
            try:
                tier(topic, store.uri(key), in_flight=1)
            except OSError:
                named = _named(store, key)
                assert named.items() <= objects_of(store, key).items(), "a manifest names what is there"
    made = tier(topic, store.uri(key), in_flight=1)
    check(made, objects_of(store, key), bytes_of(path))
    segments = [each for each in puts if each.endswith(".log")]
    assert len(segments) == len(set(segments)), "no segment is uploaded twice"


def _named(store: S3Server, key: str) -> dict[str, bytes]:
    """The objects that the newest manifest names."""
    manifests = [each for each in store.keys(key) if "_tier" in each]
    if not manifests:
        return {}
    made = decode(store.get(manifests[-1]), manifests[-1])
    names = [f"{part.partition:04d}/{each.file_name}" for part in made.partitions for each in part.segments]
    return {name: store.get(f"{key}/{name}") for name in names}


@pytest.mark.slow
def test_a_process_that_is_killed_in_mid_upload_is_gone_on_with(
    open_topic: Open, path: Path, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 while the second of three parts is on its way: no object of half the segment, and no part is left."""
    topic = open_topic(segment_bytes=64 << 20)
    topic.append_many([os.urandom(1 << 20) for _ in range(12)])
    topic.partition(0).roll()
    program = """
        import sys
        from loglib.offload import tier
        from loglib.offload import s3
        s3.PART_BYTES = 5 << 20
        tier(sys.argv[1], sys.argv[2])
    """
    running: list[subprocess.Popen[str]] = []
    started = threading.Event()

    def kill(request: Request) -> Fault | None:
        if "partNumber=2" in request.path:
            assert started.wait(30)
            running[0].send_signal(signal.SIGKILL)
            running[0].wait(30)
            return Fault(False, "reset")
        return None

    with store.failing(kill):
        running.append(start_python(program, str(path), store.uri(key)))
        started.set()
        assert running[0].wait(60) == -signal.SIGKILL
        running[0].communicate()
    assert store.segments(key) == [] and len(_unfinished(_store(store, key))) == 1
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    check(tier(topic, store.uri(key)), objects_of(store, key), bytes_of(path))
    assert not _unfinished(_store(store, key))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_an_object_that_the_store_has_changed_does_not_count(
    open_topic: Open, store: S3Server, key: str
) -> None:
    topic = open_topic()
    seal(topic, 2)
    tier(topic, store.uri(key))
    seal(topic, 1)
    name = f"{key}/0000/{os.path.basename(topic.partition(0).segments[2].path)}"
    store.put(name, b"another one")
    with pytest.raises(CorruptLogError, match=r"s3://bucket/.*found other bytes.* does not count"):
        tier(topic, store.uri(key))
    assert store.get(name) == b"another one" and len(tiered(store.uri(key)).partitions[0].segments) == 2


def test_a_store_that_ignores_the_condition_is_refused(
    open_topic: Open, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_IF_NEW", {})
    topic = open_topic()
    seal(topic)
    with pytest.raises(LogError, match="this store ignores If-None-Match"):
        tier(topic, store.uri(key))


def test_manifests_that_are_far_behind_go(
    open_topic: Open, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.offload.manifest_log.VERSIONS_KEPT", 2)
    topic = open_topic()
    for _ in range(3):
        seal(topic, 1, records=1)
        made = tier(topic, store.uri(key))
    assert made.version == 3 and len([each for each in store.keys(key) if "_tier" in each]) == 2


def test_what_is_no_s3_place_is_refused_without_its_secrets(open_topic: Open, store: S3Server, key: str) -> None:
    topic = open_topic()
    for uri, what in {
        "gs://user:secret@bucket/x": "uploading goes to s3://... or to a directory",
        "s3://key:secret@bucket/x?colour=blue": "no URI that pyarrow",
    }.items():
        with pytest.raises(ValueError, match=what) as raised:
            tier(topic, uri)
        assert "secret" not in str(raised.value)
    wrong = store.uri(key).replace("/bucket/", "/nobucket/").replace("@bucket/", "@nobucket/")
    with pytest.raises(OSError, match="s3://nobucket") as failed:
        tier(topic, wrong)
    assert "secret" not in str(failed.value)
    with pytest.raises(FileNotFoundError, match="no uploaded segments here"):
        tiered(store.uri(f"{key}/nothing"))


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_place_is_read_by_ranges_and_without_a_listing_of_segments(
    open_topic: Open, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.offload.object_files._MOST_KEPT", 1)
    topic = open_topic(partitions=2)
    seal(topic, 3, partitions=(0, 1))
    tier(topic, store.uri(key))
    expected = records(topic)
    del store.requests[:]
    with Topic.open(store.uri(key), mode="r") as place:
        assert place.path == f"s3://bucket/{key}" and "secret" not in repr(place)
        assert records(place) == expected == list(place.partition(0).follow("begin")) + list(place.partition(1).read())
        assert place.verify().damage == () and place.arrow().read_all().num_rows == len(expected)
        assert place.groups() == []
        with pytest.raises(NotLeaderError, match="groups"):
            place.group("etl")
        assert place._files.listdir(f"s3://bucket/{key}/0000")
    listings = [each.path for each in store.requests if each.is_listing and "0000" in each.path]
    assert listings == []
    assert all(each.range for each in store.requests if each.method == "GET" and each.path.endswith(".log"))


def test_several_ranges_are_under_way_and_memory_is_bounded(
    open_topic: Open, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_topic(segment_bytes=32 << 20, batch_bytes=1 << 18)
    topic.append_many([os.urandom(1 << 16) for _ in range(16 * 20)])
    topic.partition(0).roll()
    tier(topic, store.uri(key))
    together = threading.Barrier(2, timeout=20)
    under_way, most = [0], [0]
    lock = threading.Lock()

    def meeting(request: Request) -> Fault | None:
        if request.method == "GET" and request.path.endswith(".log") and _size(request) > 1 << 20:
            with lock:
                under_way[0] += 1
                most[0] = max(most[0], under_way[0])
            if most[0] < 2 or together.n_waiting:
                together.wait()
            with lock:
                under_way[0] -= 1
        return None

    with store.failing(meeting), Topic.open(store.uri(key), mode="r") as place:
        first = next(iter(place.read()))
        assert most[0] == 0, "who wants one record does not wait for windows of megabytes"
        assert list(place.read()) == records(topic)
        assert first.offset == 0
        files = place._files
        assert isinstance(files, ObjectFiles)
        assert files._room() == 64 << 20
        files._open.update(dict.fromkeys(range(1000), None))  # type: ignore[arg-type]
        assert files._room() == 1 << 20
    assert most[0] >= 2


def _size(request: Request) -> int:
    first, last = (request.range or "bytes=0-0").removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def test_past_in_the_store_and_tail_in_the_directory_are_one_range(
    open_topic: Open, path: Path, store: S3Server, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = store.uri_of_policy(key, monkeypatch)
    topic = open_topic()
    seal(topic, 4)
    tier(topic, store.uri(key))
    topic.append(b"live", sync=True)
    expected = records(topic)
    topic.alter(retention=Retention(age=None, bytes=0, archive=place, archive_grace=timedelta(seconds=1)))
    topic._clock.advance(timedelta(seconds=2))  # type: ignore[attr-defined]
    assert [each.drop for each in topic.retain()] == [True] * 4 + [False]
    with Topic.open(path, mode="r", tier=store.uri(key)) as both:
        follower = both.follow("begin", timeout=0)
        assert list(follower) == expected and both.verify().damage == ()
        seal(topic, 2)
        tier(topic, store.uri(key))
        topic.partition(0).delete_before(topic.partition(0).segments[1].base_offset)
        assert [(record.value or b"")[:3] for record in follower] == [b"0-%d" % (each % 5) for each in range(10)]
        assert len(records(both)) == len(expected) + 10
        assert both.partition(0).transfer(_null(), 0) > 0


def _null() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def test_retention_keeps_all_while_the_store_does_not_answer(
    open_topic: Open, store: S3Server, key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = store.uri_of_policy(key, monkeypatch)
    topic = open_topic()
    seal(topic, 2)
    tier(topic, store.uri(key))
    topic.alter(retention=Retention(age=None, bytes=0, archive=place, archive_grace=timedelta(0)))
    topic._clock.advance(timedelta(seconds=2))  # type: ignore[attr-defined]
    denied = Fault(False, "denied")
    with store.failing(lambda request: denied if request.is_listing and "0000" in request.path else None):
        assert [each.drop for each in topic.retain()] == [False] * 3
    assert "retention drops nothing of partition 0" in caplog.text and "secret" not in caplog.text
    store.remove(store.segments(key)[1])
    assert [each.drop for each in topic.retain()] == [True, False, False]


def test_a_read_that_fails_is_an_error_and_may_be_repeated(open_topic: Open, store: S3Server, key: str) -> None:
    topic = open_topic()
    seal(topic, 2)
    tier(topic, store.uri(key))
    with Topic.open(store.uri(key), mode="r") as place:
        reader = place.read()
        with (
            store.failing(lambda request: Fault(False, "denied") if request.path.endswith(".log") else None),
            pytest.raises(OSError),
        ):
            list(reader)
        assert list(reader) == records(topic), "no record was lost, none came twice"
