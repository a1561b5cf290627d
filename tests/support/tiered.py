"""What the tests of tiering share: topics with sealed segments, and comparing a place with its log."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from s3_server import S3Server

from loglib import Record, Topic
from loglib.format.header import crc32c
from loglib.offload import TierManifest


def seal(
    topic: Topic, segments: int = 1, *, records: int = 5, size: int = 100, partitions: Iterable[int] = (0,)
) -> None:  # fmt: skip
    """Add sealed segments with numbered records."""
    for _ in range(segments):
        for number in partitions:
            part = topic.partition(number)
            for each in range(records):
                part.append(b"%d-%d " % (number, each) + b"x" * size, b"key %d" % each)
            part.flush()
            part.roll()


def records(topic: Topic) -> list[Record]:
    """All records, partition by partition."""
    return [record for part in topic.partitions for record in part.read()]


def bytes_of(path: Path) -> dict[str, bytes]:
    """The segments of a topic or of a place in a directory."""
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.glob("*/*.log"))}


def objects_of(store: S3Server, key: str) -> dict[str, bytes]:
    """The same for a place in an object store."""
    return {each.removeprefix(f"{key}/"): store.get(each) for each in store.segments(key)}


def check(made: TierManifest, place: dict[str, bytes], log: dict[str, bytes]) -> None:
    """The place names exactly these segments, each once, and they are the log's, byte for byte."""
    named = {
        f"{part.partition:04d}/{each.file_name}": (each.bytes, each.crc)
        for part in made.partitions
        for each in part.segments
    }
    assert named == {name: (len(content), crc32c(content)) for name, content in place.items()}
    assert place == {name: log[name] for name in place}
