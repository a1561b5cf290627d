"""Page views: a topic of two partitions whose values are JSON, and whose keys are users."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loglib import Topic


@pytest.fixture
def views(open_topic: Callable[..., Topic]) -> Topic:
    topic = open_topic(partitions=2)
    values = [b'{"page": "/%d", "ms": %d}' % (number % 3, number) for number in range(3000)]
    topic.append_many(values, keys=[b"user-%d" % (number % 7) for number in range(3000)])
    topic.flush()
    return topic
