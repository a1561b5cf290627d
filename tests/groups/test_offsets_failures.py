"""A commit that fails or is interrupted is an error, the next one is whole, and no file stays open."""

from collections.abc import Callable
from typing import Any

import committed
import pytest
from committed import offset_of, put

from conftest import needs_proc, opened_since, settled_files
from loglib import StorageIOError
from loglib.append.writer import Writer
from loglib.format.watermark import WatermarkWriter
from loglib.groups.offsets import Offsets
from loglib.testing import Call, WatchedFiles

Opener = Callable[..., Offsets]

directory = committed.directory
open_log = committed.open_log


@pytest.mark.parametrize("call", ["pwritev", "datasync"])
def test_commit_that_fails_is_an_error_and_the_next_one_is_whole(open_log: Opener, call: str) -> None:
    class Failing(WatchedFiles):
        failing = False

        def before(self, each: Call) -> None:
            if self.failing and each.name == call:
                self.failing = False
                raise OSError(5, "Input/output error")

    files = Failing()
    log = open_log(files=files)
    put(log, 4)
    files.failing = True
    with pytest.raises(StorageIOError, match="committing offsets"):
        put(log, 5)
    assert offset_of(open_log()) in (4, 5)
    put(log, 6)
    assert offset_of(log) == offset_of(open_log()) == 6


@needs_proc
def test_closed_log_leaves_no_file_open(open_log: Opener) -> None:
    before = settled_files()
    log = open_log()
    put(log, 5)
    log.commits()
    log.close()
    log.close()
    del log
    other = open_log()
    put(other, 6)
    other.abandon()
    other.abandon()
    assert not opened_since(before)


def test_commit_that_is_interrupted_is_made_good_by_the_next_one(
    open_log: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    put(log, 4)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WatermarkWriter, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(log, 5)
    put(log, 6)
    assert offset_of(log) == offset_of(open_log()) == 6


def test_writer_whose_close_is_interrupted_is_closed(open_log: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    close = Writer.close
    calls: list[Writer] = []

    def interrupted_once(writer: Writer) -> None:
        calls.append(writer)
        if len(calls) == 1:
            raise KeyboardInterrupt
        close(writer)

    log = open_log()
    put(log, 4)
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "close", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            log.close()
    other = open_log()
    put(other, 5)
    assert offset_of(other) == 5 and len(calls) == 2
