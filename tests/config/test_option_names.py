"""A keyword argument that a call does not have: the error names the nearest one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loglib
from conftest import QUIET
from loglib import Topic

WRONG: dict[str, Callable[..., object]] = {
    "Topic.open(): retension -> retention": lambda path, topic: Topic.open(path, retension=1),  # type: ignore[call-arg]
    "Topic.open(): creat -> create": lambda path, topic: Topic.open(path, creat=True),  # type: ignore[call-arg]
    "Topic.create(): partition -> partitions": lambda path, topic: Topic.create(path, partition=2),  # type: ignore[call-arg]
    "Topic.alter(): segment_byte -> segment_bytes": lambda path, topic: topic.alter(segment_byte=9),
    "Topic.group(): comit -> commit": lambda path, topic: topic.group("g", comit="manual"),
    "group(): strateg -> strategy": lambda path, topic: loglib.group([topic], "g", strateg="x"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("case", WRONG)
def test_unknown_argument_is_answered_with_the_nearest_and_does_nothing(case: str, path: Path) -> None:
    call, _, names = case.partition(": ")
    wrong, _, right = names.partition(" -> ")
    with Topic.create(path, **QUIET) as topic:
        with pytest.raises(TypeError) as raised:
            WRONG[case](path.parent / "new", topic)
        assert str(raised.value) == f"{call} got an unexpected keyword argument {wrong!r}; is {right!r} meant?"
        assert topic.groups() == [] and not (path.parent / "new").exists()


def test_argument_that_is_like_no_other_is_answered_with_all(path: Path) -> None:
    wrong: Any = {"xyzzy": 1}
    with pytest.raises(TypeError, match="'xyzzy'; it has acks, alter, batch_bytes, .*, wait$"):
        Topic.open(path, **wrong)
