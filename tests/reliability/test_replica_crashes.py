"""G24: power cuts, losses and damage in programs that write a topic with replicas, and kill -9 of such programs.

A killed program is a forked child, which tells in shared memory what was acknowledged to it. Each life opens the
directories in another order, and at times one of them is lost and made anew.
"""

from __future__ import annotations

import ctypes
import logging
import random
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
from counts import count, scale
from processes import killed, shared
from replica_programs import ReplicaProgram, walk
from replicated import assert_same, open_all
from roomy import room_by_chance

from conftest import QUIET, values_of
from loglib import LogError, Topic, testing

pytestmark = pytest.mark.reliability

SHARDS = 2
PROGRAMS = 4  # per shard
EVERY = 7  # of a program's instants, which are some hundreds
WALKS = 50  # per shard
LIVES = 40


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "loglib")  # a directory that is left out, some thousand times


@pytest.mark.parametrize("shard", range(SHARDS))
def test_power_cut_of_any_devices(shard: int) -> None:
    for seed in range(shard, scale(PROGRAMS) * SHARDS, SHARDS):
        with room_by_chance(seed):
            judged = ReplicaProgram(1000 + seed).judge_cuts(EVERY, seed=seed)
        count("G24", replica_programs=1, crash_states=judged.states, lost=0, wrong=0)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_one_crash_after_another(shard: int) -> None:
    for seed in range(shard, scale(WALKS) * SHARDS, SHARDS):
        with room_by_chance(seed):
            world = walk(10_000 + seed, 40)
        count("G24", walks=1, steps=len(world.log), lost=0, wrong=0)


class Told(ctypes.Structure):
    """What a life reports; storing a number is atomic."""

    _fields_ = (("found", ctypes.c_uint64), ("begun", ctypes.c_uint64), ("acknowledged", ctypes.c_uint64))


def open_anew(places: list[Path], forget_replicas: list[Path]) -> Topic:
    """Open the topic and make what is lost anew, if a life before, which died then, has not done that already."""
    try:
        return open_all(places, forget_replicas=forget_replicas)
    except LogError as error:
        if not forget_replicas or "made again already" not in str(error):
            raise
        return open_all(places)


def live(places: list[Path], forget_replicas: list[Path], told: Told) -> None:
    """Open the topic, look, and append numbers until the end."""
    with open_anew(places, forget_replicas) as topic:
        values = values_of(topic)
        assert values == [b"%d" % number for number in range(len(values))]
        told.found = told.acknowledged = told.begun = number = len(values)
        while True:
            told.begun = number + 1
            topic.append(b"%d" % number, sync=True)
            number += 1
            told.acknowledged = number


def test_nothing_acknowledged_is_lost_by_kills_and_lost_directories(tmp_path: Path) -> None:
    chance = random.Random(seed := 24)
    places = [tmp_path / device / "topic" for device in "abc"]
    open_all(places, acks="quorum", **QUIET).close()
    acknowledged = begun = 0
    missing: Path | None = None  # a directory that is lost, and not made anew yet
    for life in range(scale(LIVES)):
        order, forget_replicas, told = chance.sample(places, 3), list[Path](), shared(Told)
        if missing is not None:
            order.sort(key=lambda each: each == missing)
            forget_replicas = [missing]
        elif chance.random() < 0.3:
            missing = order[2]
            shutil.rmtree(missing)
            forget_replicas = [missing] if chance.random() < 0.5 else []
        with killed(partial(live, order, forget_replicas, told)):
            opens = chance.random() < 0.7  # else it may be killed while it opens
            until_s = time.monotonic() + 100
            while opens and not told.begun and time.monotonic() < until_s:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.05)
        assert told.begun or not opens, f"seed {seed}: life {life} never opened the topic"
        if told.begun:
            what = f"seed {seed}, life {life}: {told.found}, of {acknowledged} to {begun}"
            assert acknowledged <= told.found <= begun, what
            acknowledged, begun = told.acknowledged, told.begun
            missing = None if forget_replicas else missing  # the next life makes it again
        count("G24", kills=1, lost=0)
    if missing is not None:
        places.sort(key=lambda each: each == missing)
    with open_anew(places, [] if missing is None else [missing]) as topic:
        assert acknowledged <= len(values_of(topic)) <= begun
    assert len(assert_same(places, testing.UnsyncedFiles())) >= acknowledged
