"""G10: a long run of the model in topic_machine.py: thousands of sequences of calls, crashes and clock jumps.

Each shard has its own seed, so a failure comes again. The failure says how to repeat it by hand.
"""

from __future__ import annotations

import pytest
from builders import calm
from counts import count, scale
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from topic_machine import TopicMachine

pytestmark = pytest.mark.reliability

SHARDS = 32
SEQUENCES = 1200
COUNTED = 0.93  # part of the sequences; Hypothesis begins the others and gives them up
STEPS = 62  # at most; 50 on average, because Hypothesis ends some earlier


@pytest.mark.parametrize("shard", range(SHARDS))
def test_topic_behaves_like_lists_in_thousands_of_sequences(shard: int) -> None:
    done = steps = 0

    class Machine(TopicMachine):
        whole_every = 11

        def teardown(self) -> None:
            nonlocal done, steps
            super().teardown()
            done += 1
            steps += self.steps

    examples = round(scale(SEQUENCES) / SHARDS * COUNTED)
    long = settings(
        calm, max_examples=examples, stateful_step_count=STEPS, derandomize=False, database=None,
        phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    run_state_machine_as_test(seed(shard)(Machine), settings=long)
    assert done >= examples
    count("G10", sequences=done, steps=steps, wrong=0)
