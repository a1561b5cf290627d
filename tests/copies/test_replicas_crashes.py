"""Topics with replicas: power cuts, losses and damage, again and again, on simulated devices."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from replica_programs import ReplicaProgram, ReplicaWorld, walk
from replicated import assert_same


@pytest.mark.parametrize("seed", range(4))
def test_power_cut_of_any_devices_costs_nothing_that_was_acknowledged(seed: int) -> None:
    assert ReplicaProgram(seed).judge_cuts(19, seed=seed).states


@pytest.mark.parametrize("shard", range(6))
def test_one_crash_after_another_costs_nothing_that_was_acknowledged(shard: int) -> None:
    for seed in range(7 * shard, 7 * shard + 7):
        walk(seed, 25)


PLACES = st.integers(0, 2)
DEVICES = st.sets(PLACES)


class Replicas(RuleBasedStateMachine):
    """The same steps, chosen by Hypothesis, which finds a short way to a failure."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ReplicaWorld("quorum", 0)

    def place(self, number: int) -> str:
        return self.world.places[number]

    @precondition(lambda self: self.world.topic is None)
    @rule(order=st.permutations([0, 1, 2]), absent=st.none() | PLACES)
    def open(self, order: list[int], absent: int | None) -> None:
        self.world.open([self.place(each) for each in order], None if absent is None else self.place(absent))

    @precondition(lambda self: self.world.topic is not None)
    @rule(count=st.integers(1, 3))
    def append(self, count: int) -> None:
        self.world.append(count)

    @precondition(lambda self: self.world.topic is not None)
    @rule()
    def flush(self) -> None:
        self.world.flush()

    @precondition(lambda self: self.world.topic is not None)
    @rule(number=PLACES)
    def fail(self, number: int) -> None:
        self.world.fail(self.place(number))

    @precondition(lambda self: self.world.topic is not None)
    @rule()
    def come_back(self) -> None:
        self.world.come_back()

    @precondition(lambda self: self.world.topic is not None)
    @rule()
    def roll(self) -> None:
        self.world.roll()

    @precondition(lambda self: self.world.topic is not None)
    @rule()
    def close(self) -> None:
        self.world.close()

    @precondition(lambda self: self.world.topic is not None)
    @rule(devices=DEVICES, share=st.floats(0, 1))
    def cut(self, devices: set[int], share: float) -> None:
        self.world.cut([self.place(each) for each in sorted(devices)], share)

    @precondition(lambda self: self.world.topic is None)
    @rule(number=PLACES, how=st.sampled_from(["lost", "cut", "rotten"]))
    def harm(self, number: int, how: str) -> None:
        self.world.harm(self.place(number), how)

    def teardown(self) -> None:
        if self.world.topic is not None:
            self.world.close()
        self.world.open(self.world.places)
        self.world.append(1)
        self.world.flush()
        self.world.close()
        assert_same(self.world.places, self.world.fs)


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
