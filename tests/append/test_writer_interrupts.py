"""A Ctrl-C at any point of a call leaves what was there, and perhaps what the call appends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupted_calls import ACTIONS, interrupt_everywhere

from conftest import values_of
from loglib import Topic
from loglib.format.columns import Columns
from loglib.testing import Call, RecordingFiles

Open = Callable[..., Topic]


# --- at every point ------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS)
def test_interrupt_at_any_line_leaves_the_log_consistent(action: Callable[[Topic], None], path: Path) -> None:
    assert interrupt_everywhere(action, path, lines_only=True) >= 5


# --- at points chosen by hand --------------------------------------------------------------------


class Interrupted(list[Any]):
    """A list that a Ctrl-C meets in the middle of being taken over, or of growing."""

    def __iter__(self) -> Any:
        raise KeyboardInterrupt

    def append(self, item: Any) -> None:
        raise KeyboardInterrupt


def test_interrupt_within_an_append_leaves_the_columns_in_step(open_topic: Open) -> None:
    topic = open_topic()
    writer = topic.partition(0)._access.writer()
    topic.append(b"before")
    with pytest.raises(KeyboardInterrupt):
        writer.append(Columns([b"never"], Interrupted([b"k"])), 6)
    assert topic.append(b"after", key=b"k").offset == 1
    topic.flush()
    assert [(r.value, r.key) for r in topic.read()] == [(b"before", None), (b"after", b"k")]


def test_interrupt_on_the_fast_path_gives_the_offset_out_again(open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"before")
    batch = topic.partition(0)._access.writer().batch
    values, batch.values = batch.values, Interrupted(batch.values)
    with pytest.raises(KeyboardInterrupt):
        topic.append(b"never")
    batch.values = values
    batch.resume()
    assert topic.append(b"after").offset == 1
    topic.flush()
    assert values_of(topic) == [b"before", b"after"]


def test_interrupt_between_a_key_and_its_value_gives_the_offset_out_again(open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"before", key=b"k")
    batch = topic.partition(0)._access.writer().batch
    values, batch.values = batch.values, Interrupted(batch.values)
    with pytest.raises(KeyboardInterrupt):
        topic.append(b"never", key=b"lost")
    batch.values = values
    batch.resume()
    assert topic.append(b"after", key=b"kept").offset == 1
    topic.flush()
    assert [(r.value, r.key) for r in topic.read()] == [(b"before", b"k"), (b"after", b"kept")]


def test_interrupted_fsync_is_not_believed_and_everything_is_written_again(open_topic: Open) -> None:
    """Its answer may have been an error that nobody read, after which the page cache lies."""

    class Interrupting(RecordingFiles):
        armed = False

        def after(self, call: Call, result: Any) -> Any:
            if self.armed and call.name == "datasync":
                self.armed = False
                raise KeyboardInterrupt
            return super().after(call, result)

    files = Interrupting()
    topic = open_topic(files=files)
    topic.append(b"x" * 1000)
    files.armed = True
    with pytest.raises(KeyboardInterrupt):
        topic.flush()
    assert values_of(topic) == []
    files.calls.clear()
    topic.flush()
    segment = "00000000000000000000.log"
    assert files.named("pwritev", "datasync")[:2] == [("pwritev", segment), ("datasync", segment)]
    assert values_of(topic) == [b"x" * 1000]
    files.calls.clear()
    topic.append(b"y", sync=True)
    assert files.count("pread") == 0, "once is enough"
