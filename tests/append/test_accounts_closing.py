"""Closing, the end of the process and interrupts name all that is lost, in each partition and topic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from named_records import FullPartitions, fresh, named

from conftest import run_python, values_of
from loglib import StorageFullError, StorageIOError, Topic
from loglib.format.header import encode_body
from loglib.system.process import at_exit
from loglib.testing import Call, FaultyFiles

Open = Callable[..., Topic]


def test_interrupted_flush_and_close_keep_what_they_have_to_tell(open_topic: Open) -> None:
    class Interrupting(FullPartitions):
        interrupted = False

        def before(self, call: Call) -> None:
            super().before(call)
            if self.interrupted and call.name == "pwritev" and "/0001/" in call.path and call.path.endswith(".log"):
                self.interrupted = False
                raise KeyboardInterrupt

    for act in (Topic.flush, Topic.close):
        files = Interrupting()
        topic = open_topic(fresh(open_topic), files=files, partitions=2)
        lost = topic.append(b"lost", partition=0)
        topic.append(b"kept", partition=1)
        files.full, files.interrupted = {0}, True
        with pytest.raises(KeyboardInterrupt):
            act(topic)
        files.full = set()
        with pytest.raises(StorageFullError) as raised:
            act(topic)
        assert named(raised.value) == [lost]
        topic.close()
        with Topic.open(topic.path, create=True) as again:
            assert values_of(again) == [b"kept"]


def test_interrupt_after_memory_ran_out_in_another_partition(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing that such an error names, and so nothing to be told later."""
    from loglib.append import batch_writer

    raising = [KeyboardInterrupt(), MemoryError()]

    def encode_or_raise(columns: Any, **keywords: Any) -> Any:
        if raising:
            raise raising.pop()
        return encode_body(columns, **keywords)

    topic = open_topic(partitions=2)
    for number in range(2):
        topic.append(b"%d" % number, partition=number)
    monkeypatch.setattr(batch_writer, "encode_body", encode_or_raise)
    with pytest.raises(KeyboardInterrupt):
        topic.flush()
    topic.flush()
    assert sorted(values_of(topic)) == [b"0", b"1"]


def test_topics_that_are_closed_at_exit_raise_one_error(open_topic: Open, tmp_path: Path) -> None:
    topics = [open_topic(tmp_path / name, files=FullPartitions()) for name in ("a", "b", "c")]
    lost = [topic.append(b"x") for topic in topics[:2]]
    for topic in topics[:2]:
        topic._files.full = {0}  # type: ignore[attr-defined]
    with pytest.raises(StorageFullError) as raised:
        at_exit.end()
    assert named(raised.value) == lost
    assert all(topic.closed for topic in topics)
    at_exit.end()


def test_memory_that_runs_out_in_one_partition_stops_no_other(
    open_topic: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loglib.append import batch_writer

    def no_memory(columns: Any, **keywords: Any) -> Any:
        if columns.values[0] == b"0":
            raise MemoryError
        return encode_body(columns, **keywords)

    topic = open_topic(partitions=3)
    for number in range(3):
        topic.append(b"%d" % number, partition=number)
    monkeypatch.setattr(batch_writer, "encode_body", no_memory)
    for _ in range(2):
        with pytest.raises(MemoryError):
            topic.flush()
    assert sorted(values_of(topic)) == [b"1", b"2"]
    with pytest.raises(MemoryError):
        topic.close()
    monkeypatch.undo()
    topic.close()
    with open_topic() as topic:
        assert sorted(values_of(topic)) == [b"0", b"1", b"2"], "what could not be written for a moment is not lost"


def test_file_that_cannot_be_closed_or_cut_at_the_end_is_said(open_topic: Open) -> None:
    for name in ("close", "fstat"):
        files = FaultyFiles(name, armed=False)
        topic = open_topic(fresh(open_topic), files=files)
        topic.append(b"kept", sync=True)
        files.armed = True
        with pytest.raises(StorageIOError, match="while closing"):
            topic.close()
        files.armed = False
        with Topic.open(topic.path, create=True) as again:
            assert values_of(again) == [b"kept"]


def test_topics_left_open_at_exit_name_all_that_is_lost(tmp_path: Path) -> None:
    program = """
        import atexit, errno, os, sys
        from loglib.system.process import at_exit
        from loglib.testing import FaultyFiles, open_topic
        files = [FaultyFiles("pwritev", error=errno.ENOSPC, every=True, armed=False) for _ in range(2)]
        topics = [open_topic(os.path.join(sys.argv[1], str(n)), files=each) for n, each in enumerate(files)]
        for topic, each in zip(topics, files):
            topic.append(b"x")
            each.armed = True
        try:
            at_exit.end()
        except Exception as error:
            print(len(error.lost), len(error.errors))
        at_exit.clear()
    """
    tmp_path.joinpath("topics").mkdir()
    assert run_python(program, tmp_path / "topics").split() == ["2", "1"]
