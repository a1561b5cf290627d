"""Write tests/golden/v3 again: `PYTHONPATH=src python tests/support/make_golden.py`. Only for a new format version.

Log id, clock, nonce and records are fixed, so that the same code writes the same bytes. What a release has
written stays in the repository for good: a new version gets a directory of its own.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from builders import EVERYTHING, NOW, PLAIN, make_topic

from loglib import FlushPolicy, Retention, Topic, TopicConfig, testing
from loglib.system.files import Files

GOLDEN = Path(__file__).parents[1] / "golden" / "v3"
# Nothing by the clock, and no default that may change one day.
POLICIES = TopicConfig(
    flush=FlushPolicy(None, None, None), retention=Retention(None, None, 0.0), segment_bytes=1 << 30, segment_age=None,
    batch_bytes=1 << 20, batch_records=1 << 16, max_record_bytes=1 << 26, permissions=0o600,
    producer_expiry=timedelta(days=7),
)  # fmt: skip


class FixedFiles(Files):
    """Files whose random bytes are always the same."""

    def random_bytes(self, count: int) -> bytes:
        return bytes(range(count))


TOPICS = {
    "plain": replace(POLICIES, partitions=2, segment_bytes=4096),
    "zlib": replace(POLICIES, compression="zlib"),
    "lz4": replace(POLICIES, compression="lz4"),
    "zstd": replace(POLICIES, compression="zstd"),
}


def write_topic(path: Path, config: TopicConfig) -> None:
    """A topic with every column, an idempotent batch and, if its segments are small, several of them."""
    make_topic(path, config)
    clock = itertools.count(NOW, 1_000)
    with testing.open_topic(path, files=FixedFiles(), clock=lambda: next(clock)) as topic:
        values, keys, timestamps, headers = EVERYTHING
        topic.append_many(values, keys=keys, timestamps=timestamps, headers=headers, partition=0)
        topic.flush()
        topic.append_many(PLAIN.values, partition=0, producer=("golden", 7))
        topic.append_many([b"compressible " * 100, None, b""], keys=[None, b"", b"k"], partition=0)
        topic.flush()
        topic.append_many([bytes(range(256)) * 11], timestamps=[-1], partition=0)
        topic.append_many([b"%d" % number for number in range(20)], partition=0)
        topic.flush()
        topic.append_many([b"1", b"2", b"3"], headers=[{"schema": b"7", "trace": b""}] * 3, partition=0)
        topic.flush()
        topic.append(b"last", key=b"k", timestamp=NOW + 1, headers={"h": b"v"}, partition=len(topic.partitions) - 1)


def records_of(path: Path) -> list[list[object]]:
    """The records of a topic as JSON has them; bytes as hexadecimal digits."""
    with Topic.open(path, mode="r") as topic:
        return [
            [
                each.partition, each.offset, each.timestamp,
                None if each.key is None else each.key.hex(), None if each.value is None else each.value.hex(),
                [[name, value.hex()] for name, value in each.headers], each.next_offset,
            ]
            for partition in topic.partitions for each in partition.read()
        ]  # fmt: skip


def write_frames(topic_path: Path, target: Path) -> None:
    """What `transfer` sends of the first partition, in frames of one or more batches."""
    with Topic.open(topic_path, mode="r") as topic, target.open("wb") as file:
        partition, offset = topic.partition(0), 0
        while offset < partition.high_watermark:
            offset = partition.transfer(file, offset, max_bytes=1500)


def main(target: Path) -> None:
    for name, config in TOPICS.items():
        write_topic(target / name, config)
        lines = ",\n".join(json.dumps(record) for record in records_of(target / name))
        (target / f"{name}.json").write_text(f"[\n{lines}\n]\n", "utf-8")
        for lock in (target / name).rglob("lock"):
            lock.unlink()
    write_frames(target / "plain", target / "frames.bin")
    from golden_structures import STRUCTURES  # which needs the policies of this module

    (target / "structures").mkdir()
    for name, structure in STRUCTURES.items():
        (target / "structures" / name).write_bytes(structure.write())


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    main(GOLDEN)
    sys.stdout.write(f"wrote {GOLDEN}\n")
