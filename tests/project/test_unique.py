"""system/not_copyable.py: what holds open files, locks or threads refuses to be copied or pickled."""

from __future__ import annotations

import ast
import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from test_layers import modules

from conftest import needs_proc, opened_since, settled_files, values_of
from loglib import Group, Topic
from loglib.format.watermark import WatermarkReader
from loglib.groups.lock_file import LockFile
from loglib.segment import SegmentReader
from loglib.system.directory import Directory
from loglib.system.files import REAL
from loglib.system.lock import Lock
from loglib.system.notify import Waiter, _Descriptors

Open = Callable[..., Topic]

WAYS = [copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy({"among": [1, one]})]


def all_that_is_open(topic: Topic, reading: Topic) -> list[Any]:
    """One of each class that holds open files, locks or threads, in use."""
    reader, follower = reading.read(), reading.follow("begin")
    assert len(reader.poll(max_records=2)) == 2 and len(follower.poll()) == 10 and follower.poll(timeout=0.01) == []
    group = topic.group("etl")
    assert len(group.poll()) == 10
    writer, log, cursor = topic.partition(0)._access.writer(), reading.partition(0)._access.log, reader._cursors[0]
    waiter = follower._waiter
    assert isinstance(waiter, Waiter)
    return [
        topic, topic.partition(0), reader, follower, group, writer, log, cursor, waiter, waiter._open,
        writer.disk, writer.disk.active, writer._turn, writer._held, writer.disk._watermark, log._watermark,
        log.open_segment(0), topic._handles, topic._background._flusher, group._delivery, group._membership,
        group._membership.file, group._membership.ownership, group._membership.offsets,
    ]  # fmt: skip


@needs_proc
@pytest.mark.parametrize("way", WAYS)
def test_what_holds_files_refuses_to_be_copied_and_reads_on(way: Callable[[Any], object], open_topic: Open) -> None:
    """A failing deep copy of a reader closed the original's descriptors: it read from whatever got their numbers."""
    topic = open_topic(segment_age=None, flush=None)
    topic.append_many([b"%d" % number for number in range(10)])
    topic.flush()
    reading = open_topic(mode="r")
    directory = Directory.open(REAL, topic.path)
    everything = [*all_that_is_open(topic, reading), LockFile(REAL, f"{topic.path}/held", 0o600), directory]
    before = settled_files()
    for each in everything:
        with pytest.raises(TypeError, match="cannot be (copied or )?pickled"):
            way(each)
    gc.collect()
    assert not opened_since(before)
    reader, group = everything[2], everything[4]
    assert [record.value for record in reader] == [b"%d" % number for number in range(2, 10)]
    assert len(list(group.follow(timeout=0.01))) == 0
    group.close()
    directory.close()
    topic.append(b"later", sync=True)
    assert values_of(reading)[-1] == b"later"


def test_topic_for_reading_is_pickled_by_its_path(open_topic: Open) -> None:
    open_topic().append(b"x", sync=True)
    for copied in (pickle.loads(pickle.dumps(open_topic(mode="r"))), copy.deepcopy(open_topic(mode="r"))):
        assert values_of(copied) == [b"x"]


HOLDING = {"Lock", "RLock", "Condition", "Event", "Thread", "pipe", "open_read", "open_write", "open_directory"}


def test_every_class_that_holds_files_locks_or_threads_is_unique() -> None:
    """So that a class which comes later is not forgotten."""
    found = set()
    for name, path in modules().items():
        if name.startswith(("spark/", "testing/")) or name == "topic":  # the topic has its own way, by its path
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and _holds(node):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                unique = {"NotCopyable", "BatchWriter", "TurnWriter", "Joined"}  # the others inherit the first
                assert bases & unique, f"{name}.{node.name}"
                found.add(node.name)
    assert {"Writer", "Lock", "Turn", "Handles", "SegmentReader", "WatermarkReader", "LockFile", "AnyGroup"} <= found


def _holds(node: ast.ClassDef) -> bool:
    """Whether it has a finalizer, or keeps what a call of such a name has given."""
    if any(isinstance(each, ast.FunctionDef) and each.name == "__del__" for each in node.body):
        return True
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and any(_is_attribute(target) for target in each.targets):
            called = each.value.func if isinstance(each.value, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in HOLDING:
                return True
    return False


def _is_attribute(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


@pytest.mark.parametrize("kind", [Topic, Group, WatermarkReader, SegmentReader, LockFile, Lock, _Descriptors])
def test_object_that_an_interrupt_left_unmade_complained_when_it_was_collected(kind: Any) -> None:
    """An interrupt may come before the first line of `__init__`."""
    kind.__new__(kind).__del__()
