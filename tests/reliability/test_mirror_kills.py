"""G20: mirrors over a stream whose writer, server and receiver are killed by SIGKILL at any moment.

Each life is three forked children: one writes the topic, one serves it, one mirrors it over the stream between them.
They are killed in any order. After each life the copy must have only what the source has, byte for byte, and must open.
Every few lives the copy must come up to the source.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from counts import count, scale
from mirrored import assert_same, segments
from processes import fork
from streamed import served

from conftest import QUIET, sound, values_of
from loglib import LogError, Topic, testing
from loglib.copies import Mirror, serve_mirror

pytestmark = pytest.mark.reliability

SHARDS = 2
LIVES = 40  # per shard; each has three kills
LONGEST_LIFE_S = 0.06  # opening takes a few milliseconds


def write(path: Path, seed: int) -> None:
    """Append for ever, in batches of all sizes, and roll."""
    chance = random.Random(seed)
    with Topic.open(path, create=True) as topic:
        while True:
            sizes = [chance.choice([5, 300]) for _ in range(chance.choice([1, 1, 1, 200]))]
            topic.append_many([chance.randbytes(size) for size in sizes], partition=chance.randrange(2))
            topic.flush()
            if chance.random() < 0.05:
                topic.partition(chance.randrange(2)).roll()


def serve(path: Path, ours: socket.socket, theirs: socket.socket) -> None:
    theirs.close()
    with suppress(LogError):  # the other end is gone, and then this one ends, too
        serve_mirror(path, ours)


def follow(to: Path, ours: socket.socket, theirs: socket.socket) -> None:
    theirs.close()
    with suppress(LogError), Mirror.over(ours, to, files=testing.UnsyncedFiles()) as made:
        made.follow()


def live(path: Path, to: Path, chance: random.Random) -> None:
    """One life: three children, and their ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pids = [
            fork(lambda: write(path, chance.randrange(1 << 30))),
            fork(lambda: serve(path, ours, theirs)),
            fork(lambda: follow(to, theirs, ours)),
        ]
    chance.shuffle(pids)
    for pid in pids:
        time.sleep(chance.uniform(0, LONGEST_LIFE_S))
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def check(path: Path, to: Path) -> int:
    """The copy is a prefix of the source; returns the number of its records."""
    theirs = segments(path)
    for name, content in segments(to).items():
        assert theirs[name].startswith(content), name
    if not (to / "topic.json").exists():
        return 0
    with Topic.open(to, mode="r") as copy, Topic.open(path, mode="r") as source:
        shown = 0
        for ours, other in zip(copy.partitions, source.partitions, strict=True):
            sound(ours)
            found = values_of(ours)
            assert found == values_of(other)[: len(found)]
            shown += len(found)
        return shown


@pytest.mark.parametrize("shard", range(SHARDS))
def test_kills_of_writer_server_and_receiver(tmp_path: Path, shard: int) -> None:
    path, to = tmp_path / "topic", tmp_path / "mirror" / "topic"
    Topic.open(path, create=True, partitions=2, **QUIET).close()
    chance = random.Random(shard)
    shown = 0
    for number in range(scale(LIVES)):
        live(path, to, chance)
        shown = max(shown, check(path, to))
        if number % 8 == 7:
            with Topic.open(path) as topic:
                with served(path) as serving, Mirror.over(serving.stream, to, files=testing.UnsyncedFiles()) as made:
                    made.copy()
                    assert made.report().set_aside == ()
                assert_same(topic, to)
    assert shown
    count("G20", stream_kills=3 * scale(LIVES), records_shown_over_streams=shown, wrong=0, lost=0)
