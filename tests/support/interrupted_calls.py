"""Calls on a topic that are interrupted at each point in turn, and what the log must hold afterwards."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupts import Interrupter, every_point

from conftest import QUIET, sound, values_of
from loglib import FlushPolicy, Topic, testing
from loglib.testing import UnsyncedFiles

OLD = [b"old %d" % number for number in range(3)]
NEW = [b"new %d" % number for number in range(3)]


def append_plain(topic: Topic) -> None:
    topic.append(NEW[0])


def append_keyed(topic: Topic) -> None:
    topic.append(NEW[0], key=b"k")


def append_with_headers(topic: Topic) -> None:
    topic.append(NEW[0], key=b"k", timestamp=1, headers={"h": b"v"})


def append_sync(topic: Topic) -> None:
    topic.append(NEW[0], sync=True)


def append_many(topic: Topic) -> None:
    topic.append_many(NEW)


def append_many_keyed(topic: Topic) -> None:
    topic.append_many(NEW, keys=[b"k"] * len(NEW))


def append_idempotent(topic: Topic) -> None:
    topic.append_many(NEW, partition=0, producer=("p", 2))


def flush(topic: Topic) -> None:
    topic.flush()


def roll(topic: Topic) -> None:
    topic.partition(0).roll()


def close(topic: Topic) -> None:
    topic.close()


def interrupt_everywhere(
    action: Callable[[Topic], None], path: Path, *, lines_only: bool, error: type[BaseException] = KeyboardInterrupt,
    **policies: Any,
) -> int:  # fmt: skip
    """Interrupt the action at each point in turn; afterwards the log must hold what it held, and perhaps the new."""
    new = NEW if "many" in action.__name__ or "idempotent" in action.__name__ else NEW[:1]
    new = new if "append" in action.__name__ else []

    def once(interrupter: Interrupter) -> bool:
        shutil.rmtree(path, ignore_errors=True)
        topic = testing.open_topic(path, files=UnsyncedFiles(), **(QUIET | policies))
        topic.append(OLD[0], sync=True)
        topic.append_many(OLD[1:2], partition=0, producer=("p", 1))
        topic.append(OLD[2], key=b"k" if action is append_keyed else None)
        try:
            interrupter.run(lambda: action(topic))
        except error:
            assert interrupter.where
        else:
            topic.close()
            return False
        if action is close:
            topic.close()
            expected: list[list[bytes]] = [OLD]
        else:
            if action is append_idempotent:
                action(topic)
            topic.append(b"later", sync=True)
            cut = len(new) + 1 if action is not append_idempotent else 0
            expected = [[*OLD, *new[:count], b"later"] for count in range(cut)] or [[*OLD, *new, b"later"]]
            assert values_of(topic) in expected, interrupter.where
            if action is append_keyed:
                keyed = [each.value for each in topic.read() if each.key == b"k"]
                assert keyed in ([OLD[2]], [OLD[2], NEW[0]]), interrupter.where
            topic.close()
        with testing.open_topic(path, files=UnsyncedFiles()) as topic:
            recovery = topic.partition(0).recovery
            assert recovery is not None and recovery.clean, interrupter.where
            assert values_of(topic) in expected, interrupter.where
            sound(topic.partition(0))
        return True

    return len(list(every_point(once, lines_only=lines_only, error=error)))


ACTIONS = [
    append_plain, append_keyed, append_with_headers, append_sync, append_many, append_many_keyed, append_idempotent,
    flush, roll, close,
]  # fmt: skip
POLICIES = [
    pytest.param({}, id="quiet"),
    pytest.param({"flush": FlushPolicy(records=2, interval=None, bytes=None), "batch_records": 2}, id="flushing"),
    pytest.param({"segment_bytes": 4096, "batch_bytes": 100, "batch_records": 1}, id="small"),
]
