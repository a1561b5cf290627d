"""Topics whose records have an age, for tests of retention, and a machine with clocks that a test sets."""

from __future__ import annotations

import pytest
from clock_worlds import Machine

from loglib import Topic


@pytest.fixture
def machine() -> Machine:
    return Machine()


def dropped(topic: Topic) -> int:
    return sum(each.drop for each in topic.retain())
