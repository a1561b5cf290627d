"""G9: hostile bytes: every decoder, five million times; whole files; bombs; names; links and devices instead of files.

Each failure names the target, the shard and the execution; `replay` in this module runs this execution again.
"""

from __future__ import annotations

import io
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import counts
import fuzzing
import hostile_batches
import hostile_bytes
import pytest
from builders import IDENTITY, LOG_ID, NOW, a_mark, calm, describe, make_topic, resealed_segment
from hostile_bytes import Draw, Outcome, pick, wild
from hypothesis import given, settings
from hypothesis import strategies as st
from spark_logs import all_rows, scan_rows

from conftest import QUIET, Clock, alter, run_python, sound, tree
from loglib import LogError, Topic, testing
from loglib.config.arguments import check_names
from loglib.config.policies import TopicConfig
from loglib.config.times import to_datetime
from loglib.format.chain import added
from loglib.format.watermark import encode_new
from loglib.testing import CrashFS, Image

pytestmark = pytest.mark.reliability

BLOCK = 5000  # executions per seed: few, so that replaying one takes a moment
SHARDS: dict[Any, int] = {
    hostile_batches.batch_header: 3, fuzzing.watermark: 2, fuzzing.segment_header: 2, hostile_batches.batch_columns: 2,
}  # fmt: skip


def shards() -> Iterator[Any]:
    for target in fuzzing.TARGETS:
        for shard in range(number := SHARDS.get(target, 1)):
            yield pytest.param(target, shard, number, id=f"{target.__name__}-{shard}")


@pytest.mark.parametrize(("target", "shard", "number"), list(shards()))
def test_decoders_refuse_or_tell_the_truth(target: Callable[[Draw], Outcome], shard: int, number: int) -> None:
    executions = counts.scale(fuzzing.TARGETS[target]) // number
    size = min(BLOCK, executions)
    accepted = done = 0
    for block in range(shard, number * (executions // size), number):
        random = Random(seed_of(target, block)).random
        for execution in range(size):
            try:
                accepted += target(random).accepted
            except Exception as error:
                raise AssertionError(f"replay({target.__name__!r}, {block}, {execution}): {error!r}") from error
        done += size
    assert target is hostile_batches.any_header or 0 < accepted < done, "the target tries one side only"
    counts.count("G9", executions=done, accepted=accepted, wrong=0)


def seed_of(target: Callable[[Draw], Outcome], block: int) -> str:
    return f"{target.__name__} {block}"


def replay(name: str, block: int, execution: int) -> Outcome:
    """Run the execution that a failure named."""
    target = getattr(fuzzing, name)
    random = Random(seed_of(target, block)).random
    for _ in range(execution):
        try:
            target(random)
        except Exception:
            continue
    outcome: Outcome = target(random)
    return outcome


# --- whole partitions ------------------------------------------------------------------------------

TOPIC = "/logs/hostile"
SEGMENT = f"{TOPIC}/0000/{0:020d}.log"
WATERMARK = f"{TOPIC}/0000/watermark"
HEADER_FIELDS = (  # (first byte, size)
    (8, 2), (10, 2), (32, 4), (36, 4), (40, 8), (48, 8), (56, 8), (64, 8), (72, 4), (76, 4), (80, 8), (88, 8), (96, 24),
    (120, 4), (124, 4), (128, 8), (136, 16), (152, 4), (156, 4), (160, 24), (184, 8), (192, 8),
)  # fmt: skip


@cache
def description_bytes() -> bytes:
    files = CrashFS(Image.of({f"{TOPIC}/lock": b""}))
    describe(TOPIC, LOG_ID, TopicConfig(**QUIET), files=files)
    return files.tree()[f"{TOPIC}/topic.json"]


def hostile_tree(random: Draw) -> dict[str, bytes]:
    """A partition written by somebody who knows the format; all its checksums are right."""
    batches, previous, last = b"", 0, 0
    jumps = None
    for _ in range(1 + int(random() * 5)):
        if random() < 0.5:
            fields, body = pick(random, hostile_bytes.TEMPLATES)
            fields = list(fields)
            if random() < 0.4:
                hostile_bytes.change_fields(random, fields)
        else:
            stored = hostile_batches.columns_of_any_kind(random)
            fields, body = list(hostile_bytes.BATCH.unpack_from(stored)), stored[hostile_bytes.BATCH.size :]
        if random() < 0.9:
            fields[4] = len(batches)
        if random() < 0.9:
            jumps = added(jumps, len(batches))
            fields[15], fields[22], fields[24] = previous, len(batches) - last, jumps.jump_offset
        batch = hostile_bytes.seal(fields, body)
        last = len(batches)
        batches += batch
        previous = int.from_bytes(batch[4:8], "little")
    header = fuzzing.FIRST_SEGMENT
    if random() < 0.4:
        at, size = pick(random, HEADER_FIELDS)
        header = resealed_segment(header, at, (wild(random, 64) & (1 << 8 * size) - 1).to_bytes(size, "little"))
    tree = {f"{TOPIC}/topic.json": description_bytes(), SEGMENT: header + batches}
    if random() < 0.8:
        ends = [0, len(batches), len(batches)]
        if random() < 0.3:
            ends[int(random() * 3)] = wild(random, 64, near=len(batches))
        sequence, epoch = wild(random, 64) if random() < 0.1 else 5, wild(random, 32) if random() < 0.1 else 1
        tail = wild(random, 64, near=last) if random() < 0.2 else last
        mark = a_mark(sequence, ends[0], ends[1], ends[2], epoch, tail=tail)
        tree[WATERMARK] = encode_new(mark, IDENTITY.salt)
    if random() < 0.2:
        tree[f"{TOPIC}/0000/{wild(random, 64):020d}.log"] = tree[SEGMENT]
    return tree


def any_gap(random: Draw) -> Any:
    return pick(random, ("raise", "skip"))


NOWHERE = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
USES: list[Callable[[Topic, Draw], object]] = [
    lambda topic, random: list(topic.read()),
    lambda topic, random: list(topic.read(on_damage="skip")),
    lambda topic, random: [batch.to_arrow().validate(full=True) for batch in topic.batches(on_damage="skip")],
    lambda topic, random: list(topic.read(wild(random, 64, near=300), on_damage=any_gap(random))),
    lambda topic, random: list(topic.read(to_datetime(NOW + int(random() * 50)), on_damage=any_gap(random))),
    lambda topic, random: topic.follow("begin", timeout=0).poll(max_records=50),
    lambda topic, random: topic.verify(),
    lambda topic, random: sound(topic.partition(0)),
    lambda topic, random: topic.partition(0).segments,
    lambda topic, random: topic.retain(dry_run=True),
    lambda topic, random: topic.partition(0).transfer(NOWHERE, 0),
]


@pytest.mark.parametrize("shard", range(2))
def test_forged_partitions_give_errors_of_the_library_and_no_others(shard: int) -> None:
    """Read in every way and open for writing: within a second, and a refusal changes nothing."""
    done, refused = counts.scale(2000), 0
    for number in range(done):
        random = Random(f"partition {shard} {number}").random
        files = CrashFS(Image.of(hostile_tree(random)))
        began = time.process_time()
        try:
            refused += read_in_every_way(files, random) + write_once(files)
        except Exception as error:
            raise AssertionError(f"partition {shard} {number}: {error!r}") from error
        assert time.process_time() - began < len(USES), f"partition {shard} {number} takes its time"
    assert 0 < refused < done * len(USES)
    counts.count("G9", partitions=done, executions=done * (len(USES) + 1), wrong=0)


def read_in_every_way(files: CrashFS, random: Draw) -> int:
    refused, before = 0, files.tree()
    with testing.open_topic(TOPIC, mode="r", files=files) as topic:
        for each in USES:
            try:
                each(topic, random)
            except LogError:
                refused += 1
    assert files.tree() == before, "a reader has written"
    return refused


def write_once(files: CrashFS) -> int:
    before = files.tree()
    try:
        topic = testing.open_topic(TOPIC, files=files, clock=Clock())
    except LogError:
        after = files.tree()
        after.pop(f"{TOPIC}/0000/lock", None)
        assert after == before, "refused, but not left alone"
        return 1
    with topic, suppress(LogError):
        topic.append_many([b"more"], partition=0, producer=("etl", 1))
        topic.flush()
        list(topic.read(on_damage="skip"))
    return 0


# --- a peer that lies ------------------------------------------------------------------------------


def test_whatever_a_peer_sends_the_log_stays_readable() -> None:
    """Batches that are refused leave nothing behind; batches that are accepted are read like any others."""
    done, taken = counts.scale(4000), 0
    files = CrashFS()
    with testing.open_topic(TOPIC, files=files, clock=Clock(), **QUIET) as topic:
        partition = topic.partition(0)
        for number in range(done):
            random = Random(f"peer {number}").random
            end = partition.log_end_offset
            stream = io.BytesIO(fuzzing.frame(random))
            try:
                taken += partition.receive(stream, preserve_offsets=random() < 0.2) is not None
            except LogError:
                taken += partition.log_end_offset > end  # the frame declared more than its one batch
            except Exception as error:
                raise AssertionError(f"peer {number}: {error!r}") from error
            if number % 200 == 0:
                topic.flush()
                for batch in topic.batches({0: end}):
                    batch.to_arrow().validate(full=True)
        topic.flush()
        report = topic.verify()
        assert report.damage == () and report.batches == taken > 0
    counts.count("G9", executions=done, accepted=taken, wrong=0)


# --- Spark's way -----------------------------------------------------------------------------------


def test_forged_partitions_through_the_spark_source(tmp_path: Path) -> None:
    """Read as a Spark task reads, without Spark: valid Arrow batches with the right records, or an error."""
    path = tmp_path / "hostile"
    make_topic(path, TopicConfig(**QUIET))
    done, given = counts.scale(1500), 0
    for number in range(done):
        random = Random(f"spark {number}").random
        tree = hostile_tree(random)
        (path / "0000" / f"{0:020d}.log").write_bytes(tree[SEGMENT])
        if WATERMARK in tree:
            (path / "0000" / "watermark").write_bytes(tree[WATERMARK])
        try:
            rows = scan_rows(path, split_bytes=pick(random, (100, 300, 1 << 20)), includeHeaders=True)
        except LogError:
            continue
        except Exception as error:
            raise AssertionError(f"spark {number}: {error!r}") from error
        with suppress(LogError):  # if only the watermark is false: one of the two asks it for more than the other
            assert rows == all_rows(path), f"spark {number}"
            given += 1
    assert given
    counts.count("G9", executions=done, accepted=given, wrong=0)


# --- memory ----------------------------------------------------------------------------------------

BOMB = """
import resource, sys, threading
from pathlib import Path
import loglib.format.arrow, lz4.frame, zlib, zstandard  # now, since importing takes memory as well
from builders import IDENTITY, a_mark, encoded, forged, make_topic
from loglib import CorruptLogError, Topic
from loglib.format import codec
from loglib.format.columns import Columns
from loglib.config.policies import TopicConfig
from loglib.format.watermark import encode_new

path, number, size, declared = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
body = codec.compress(number, bytes(size))
batch = forged(encoded(Columns([b"x"])), body=body, codec=number, stored_bytes=len(body), value_bytes=declared)
make_topic(path, TopicConfig())
with (path / "0000" / f"{0:020d}.log").open("ab") as file:
    file.write(batch)
(path / "0000" / "watermark").write_bytes(encode_new(a_mark(2, 0, len(batch), len(batch), 1), IDENTITY.salt))
del body, batch
threading.stack_size(1 << 20)  # a thread that reads ahead, or not, would else decide: by default it takes 8 MiB
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
with Topic.open(path, mode="r") as topic:
    for read in (lambda: list(topic.read()), lambda: [each.to_arrow() for each in topic.batches()], topic.verify):
        try:
            read()
        except CorruptLogError:
            pass
print("done")
"""


@pytest.mark.parametrize("declared", [1000, 24 << 20, 1 << 29], ids="declares-{}".format)
@pytest.mark.parametrize("number", [1, 2, 3], ids=["zlib", "lz4", "zstd"])
def test_bomb_costs_no_more_than_64_mib(
    number: int, declared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an address space of that size: bombs larger than they declare, as large, and some that declare 512 MiB."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # else a thread that happens to start takes 64 MiB of addresses
    for size in (256 << 20, declared):
        assert run_python(BOMB, tmp_path / f"bomb-{size}", number, size, declared).strip() == "done"
    counts.count("G9", bombs=2, wrong=0)


# --- names, and files that are no files ------------------------------------------------------------


@settings(calm, max_examples=400)
@given(st.text(max_size=300) | st.text("aZ0._-/\\ ~", max_size=12) | st.sampled_from((".", "..", "CON", "a" * 250)))
def test_no_name_leads_out_of_its_directory(name: str) -> None:
    """F25. An accepted name makes one entry of the directory; a refused name makes nothing."""
    with TemporaryDirectory() as directory:
        inside = Path(directory) / "inside"
        inside.mkdir()
        try:
            check_names(name)
        except ValueError:
            if "/" not in name:  # otherwise it is a path, which the caller may choose
                with pytest.raises(ValueError, match=r"."):
                    Topic.open(f"{inside}/{name}" if name not in ("", ".", "..") else f"{inside}/\0", create=True)
                assert list(inside.iterdir()) == []
        else:
            Topic.open(inside / name, create=True, **QUIET).close()
            assert [each.name for each in inside.iterdir()] == [name]
            assert (inside / name / "topic.json").is_file()
        assert [each.name for each in Path(directory).iterdir()] == ["inside"]


PLACES = ("segment", "watermark", "topic.json", "lock", "partition", "segment.tmp", "topic.json.tmp")
KINDS = ("link", "dangling link", "link to a device", "pipe", "socket", "directory", "device")


def place_of(path: Path, place: str) -> Path:
    directory = path / "0000"
    segment = directory / f"{0:020d}.log"
    return {
        "segment": segment, "watermark": directory / "watermark", "topic.json": path / "topic.json",
        "lock": directory / "lock", "partition": directory, "segment.tmp": segment.with_suffix(".log.tmp"),
        "topic.json.tmp": path / "topic.json.tmp",
    }[place]  # fmt: skip


def plant(kind: str, at: Path, elsewhere: Path) -> None:
    match kind:
        case "link":
            at.symlink_to(elsewhere)
        case "dangling link":
            at.symlink_to(elsewhere / "nothing")
        case "link to a device":
            at.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(at)
        case "socket":
            os.mknod(at, stat.S_IFSOCK | 0o600)
        case "directory":
            at.mkdir()
        case "device":
            os.mknod(at, stat.S_IFCHR | 0o600, os.makedev(1, 5))


@contextmanager
def a_second() -> Iterator[None]:
    """Turn a hang into an error."""

    def hang(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, 10)  # long enough for a busy machine
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_refused_or_left_alone_and_never_followed(place: str, kind: str, tmp_path: Path) -> None:
    """F26. Nothing hangs, and no file outside of the topic is read as a part of it or written."""
    if kind == "device":
        counts.need(os.geteuid() == 0, "root, to make a device file")
    path, outside = tmp_path / "topic", tmp_path / "outside"
    with Topic.open(path, create=True, **QUIET) as topic:
        topic.append(b"ours", sync=True)
    at = place_of(path, place)
    if at.exists():  # so that the link leads to a valid file, if it is followed
        at.rename(outside)
    else:
        outside.write_bytes(b"not ours")
    plant(kind, at, outside)
    before = tree(outside) if outside.is_dir() else outside.read_bytes()
    with a_second(), suppress(LogError), Topic.open(path, mode="r") as topic:
        values = [record.value for record in topic.read(on_damage="skip")]
        assert values in ([], [b"ours"]) and (values == [] or place not in ("segment", "partition"))
        assert topic.verify().damage or place in ("lock", "segment.tmp", "topic.json.tmp")
    with a_second(), suppress(LogError), Topic.open(path) as topic:
        topic.append(b"more", sync=True)
        assert place in ("segment.tmp", "topic.json.tmp"), "a writer has taken it for ours"
    with a_second(), suppress(LogError, OSError):
        alter(path, segment_bytes=1 << 20)
    assert (tree(outside) if outside.is_dir() else outside.read_bytes()) == before
    counts.count("G9", planted_files=1)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o777], ids=oct)
@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o660, 0o664], ids=oct)
def test_files_have_the_mode_that_was_asked_for_whatever_the_umask(
    permissions: int, umask: int, tmp_path: Path
) -> None:
    """F30."""
    before = os.umask(umask)
    try:
        with Topic.open(tmp_path / "topic", create=True, permissions=permissions, **QUIET) as topic:
            topic.append(b"x", sync=True)
            topic.partition(0).roll()
    finally:
        os.umask(before)
    for each in (tmp_path / "topic").rglob("*"):
        mode = stat.S_IMODE(each.stat().st_mode)
        if each.name == "lock":
            assert mode & ~permissions == 0, each
        else:
            assert mode == (permissions | (permissions & 0o444) >> 2 if each.is_dir() else permissions), each
    counts.count("G9", modes=1)
