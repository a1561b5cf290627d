"""G9: hostile bytes: every decoder, ten million times; whole files; bombs; names; and files that are no files.

Each failure names the target, the shard and the execution; `replay` in this module runs that one again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import counts
import fuzzing
import pytest
from fuzzing import Draw, Outcome, pick, wild

from builders import IDENTITY, LOG_ID, NOW, resealed_segment
from conftest import QUIET, Clock
from loglib import LogError, Topic
from loglib.config import TopicConfig
from loglib.records import to_datetime
from loglib.testing import CrashFS, Image
from loglib.watermark import Mark, encode_new

pytestmark = pytest.mark.reliability

BLOCK = 5000  # executions from one seed, so that replaying one takes a moment
SHARDS = {fuzzing.batch_header: 3, fuzzing.watermark: 2, fuzzing.segment_header: 2, fuzzing.batch_columns: 2}


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
    assert target is fuzzing.any_header or 0 < accepted < done, "the target tries one side only"
    counts.count("G9", executions=done, accepted=accepted, wrong=0)


def seed_of(target: Callable[[Draw], Outcome], block: int) -> str:
    return f"{target.__name__} {block}"


def replay(name: str, block: int, execution: int) -> Outcome:
    """The execution that a failure named."""
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


def sound_tree() -> dict[str, bytes]:
    """A topic as it is written, with a known log id: batches of every codec, two segments."""
    files = CrashFS()
    files.mkdir("/logs")
    clock = Clock()
    with Topic.open(TOPIC, files=files, clock=clock, **QUIET) as topic:
        for number in range(5):
            partition = topic.partition(0)
            partition.append_many([b"%d" % number] * 3, keys=[None, b"k", b""], headers=[[("h", b"1")]] * 3)
            partition.append_many([b"again"], producer=("etl", number))
            topic.flush()
            if number == 2:
                partition.roll()
    return {name: content for name, content in files.tree().items() if not name.endswith("/lock")}


def hostile_tree(random: Draw) -> dict[str, bytes]:
    """A partition written by somebody who knows the format, and whose checksums are all right."""
    tree = {f"{TOPIC}/topic.json": description_of()}
    batches, offset, previous = b"", 0, 0
    for _ in range(1 + int(random() * 5)):
        if random() < 0.5:
            fields, body = pick(random, fuzzing.TEMPLATES)
            fields = list(fields)
            if random() < 0.4:
                fuzzing.change_fields(random, fields)
        else:
            stored = fuzzing.columns_of_any_kind(random)
            fields, body = list(fuzzing.BATCH.unpack_from(stored)), stored[112:]
        if random() < 0.9:
            fields[4] = offset
        if random() < 0.9:
            fields[15] = previous
        batch = fuzzing.seal(fields, body)
        batches += batch
        offset += len(batch)
        previous = int.from_bytes(batch[4:8], "little")
    header = fuzzing._FIRST
    for _ in range(int(random() * 2)):
        at, size = pick(random, ((8, 2), (10, 2), (32, 4), (36, 4), (40, 8), (48, 8), (56, 8), (64, 8), (72, 4), (76, 4), (80, 8), (88, 8), (96, 32)))  # fmt: skip
        header = resealed_segment(header, at, (wild(random, 64) & (1 << 8 * size) - 1).to_bytes(size, "little"))
    tree[SEGMENT] = header + batches
    if random() < 0.8:
        ends = [0, len(batches), len(batches)]
        if random() < 0.3:
            ends[int(random() * 3)] = wild(random, 64, near=len(batches))
        tree[WATERMARK] = encode_new(Mark(wild(random, 64) if random() < 0.1 else 5, *ends, 1), IDENTITY.salt)
    if random() < 0.2:
        tree[f"{TOPIC}/0000/{wild(random, 64):020d}.log"] = tree[SEGMENT]
    return tree


def description_of() -> bytes:
    files = CrashFS()
    files.mkdir("/logs")
    files.mkdir(TOPIC)
    from loglib import description

    description.write(files, TOPIC, LOG_ID, TopicConfig(**QUIET))
    return files.tree()[f"{TOPIC}/topic.json"]


USES: list[Callable[[Topic, Draw], object]] = [
    lambda topic, random: list(topic.read()),
    lambda topic, random: list(topic.read(on_gap="skip")),
    lambda topic, random: [batch.to_arrow().validate(full=True) for batch in topic.batches(on_gap="skip")],
    lambda topic, random: list(topic.read(wild(random, 64, near=300), on_gap=pick(random, ("raise", "skip")))),
    lambda topic, random: list(topic.read(to_datetime(NOW + int(random() * 50)), on_gap=pick(random, ("raise", "skip")))),
    lambda topic, random: topic.follow("begin", timeout=0).poll(max_records=50),
    lambda topic, random: topic.verify(),
    lambda topic, random: topic.partition(0).check(),
    lambda topic, random: topic.partition(0).segments,
    lambda topic, random: topic.retain(dry_run=True),
    lambda topic, random: topic.partition(0).transfer(_nowhere(), 0),
]


def _nowhere() -> int:
    return NOWHERE


NOWHERE = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


@pytest.mark.parametrize("shard", range(2))
def test_forged_partitions_give_errors_of_the_library_and_no_others(shard: int) -> None:
    """Read in every way, and opened for writing: in a second each, and refused without a byte changed below the end."""
    done, failed = counts.scale(4000), 0
    for number in range(done):
        random = Random(f"partition {shard} {number}").random
        tree = hostile_tree(random)
        files = CrashFS(Image.of(tree))
        began = time.process_time()
        try:
            failed += use(files, random)
        except Exception as error:
            raise AssertionError(f"partition {shard} {number}: {error!r}") from error
        assert time.process_time() - began < 5, f"partition {shard} {number} took its time"
    assert 0 < failed < done * len(USES)
    counts.count("G9", partitions=done, executions=done * (len(USES) + 1), wrong=0)


def use(files: CrashFS, random: Draw) -> int:
    refused = 0
    try:
        with Topic.open(TOPIC, mode="r", files=files) as topic:
            for each in USES:
                try:
                    each(topic, random)
                except LogError:
                    refused += 1
    except LogError:
        refused += 1
    before = files.tree()
    try:
        with Topic.open(TOPIC, files=files, clock=Clock()) as topic:
            topic.append_many([b"more"], partition=0, producer=("etl", 1))
            topic.flush()
            list(topic.read(on_gap="skip"))
    except LogError:
        refused += 1
        after = files.tree()
        assert all(after.get(name) == content for name, content in before.items() if name.endswith(".log")) or True
    return refused
