"""A log to send and one to receive it, for tests of transfer, and the frames between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import IDENTITY, PLAIN, chained

from loglib import FlushPolicy, Record, Topic
from loglib.append import transfer
from loglib.format.columns import Columns

MANUAL = FlushPolicy(None, None, None)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Topic]:
    """A topic of several segments and batches of all sizes."""
    with Topic.open(tmp_path / "source", create=True, segment_bytes=40_000, batch_bytes=4096, flush=MANUAL) as topic:
        choose = random.Random(5)
        for number in range(60):
            values = [choose.randbytes(choose.randrange(3000)) for _ in range(choose.randrange(1, 4))]
            topic.append_many(values, keys=[b"%d" % number] * len(values))
            topic.flush()
        assert len(topic.partition(0).segments) > 2
        yield topic


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Topic]:
    with Topic.open(tmp_path / "target", create=True, flush=MANUAL) as topic:
        yield topic


def everything(topic: Topic) -> list[Record]:
    topic.flush()
    return list(topic.read())


def send_all(
    topic: Topic, to: object, then: Callable[[], object] = lambda: None, *, max_bytes: int = 50_000
) -> None:
    partition, offset = topic.partition(0), 0
    while offset < partition.high_watermark:
        offset = partition.transfer(to, offset, max_bytes)
    then()


def receive_all(topic: Topic, stream: object, *, preserve_offsets: bool = True) -> None:
    while topic.partition(0).receive(stream, preserve_offsets=preserve_offsets) is not None:
        pass


# --- how much is sent -----------------------------------------------------------------------------------


def frames_of(topic: Topic, start: int, max_bytes: int) -> tuple[bytes, int]:
    path = Path(topic.path).with_name("frames")
    with path.open("wb") as file:
        end = topic.partition(0).transfer(file, start, max_bytes)
    return path.read_bytes(), end


# --- damaged streams ----------------------------------------------------------------------------------------


def one_frame(*, codec: int = 0) -> bytes:
    stored = chained([PLAIN, Columns([b"v" * 40, None])], codec=codec)
    return transfer._frame(IDENTITY, 0, len(stored)) + stored
