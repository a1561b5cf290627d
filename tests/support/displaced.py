"""Topics for tests that move them: filled, and abandoned in memory by the writer of files that are gone."""

from __future__ import annotations

import pytest

from loglib import LogMovedError, Topic


def fill(topic: Topic, count: int, text: bytes) -> list[bytes]:
    """So many records, each of them acknowledged."""
    values = [b"%s %d %s" % (text, number, b"x" * 300) for number in range(count)]
    for value in values:
        topic.append(value, sync=True)
    return values


def abandon(topic: Topic) -> None:
    """Close a topic whose files are no longer where it was opened."""
    with pytest.raises(LogMovedError):
        topic.close()
