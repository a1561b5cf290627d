"""Applications log from anywhere: fork callbacks, finalizers, exit functions, processes without threads, greenlets."""

import _thread
import gc
import json
import logging
import multiprocessing
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from logged import handler_of, logging_to

from conftest import run_python, start_python
from loglib import Topic
from loglib import topic as topic_module
from loglib.logging import LogHandler, spool, spool_topic
from loglib.logging.spool import Drops, Spool
from loglib.system import process
from loglib.testing import Call, UnsyncedFiles, WatchedFiles

BEGIN = """
    import atexit, gc, logging, os, sys, threading
    path = sys.argv[1]
    log = logging.Logger("app")
    def begin():
        from loglib.logging import LogHandler
        handler = LogHandler(path, partitions=2)
        log.addHandler(handler)
        return handler
"""
NO_THREADS = """
    import _thread
    def refuse(*arguments, **keywords): raise RuntimeError("can't start new thread")
    for module, name in ((_thread, "start_new_thread"), (threading, "_start_new_thread"),
                         (_thread, "start_joinable_thread"), (threading, "_start_joinable_thread")):
        if hasattr(module, name):
            setattr(module, name, refuse)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app"


@pytest.fixture
def log(path: Path) -> Iterator[logging.Logger]:
    """A logger that writes to the topic at `path`."""
    with logging_to(path, "app", partitions=1, flush_timeout=60) as logger:
        yield logger


def values(path: Path) -> list[bytes]:
    with Topic.open(path, mode="r") as topic:
        return [record.value or b"" for record in topic.read()]


def messages(path: Path) -> Counter[str]:
    return Counter(facts["message"] for facts in map(json.loads, values(path)) if "dropped" not in facts)


def run(path: Path, *parts: str) -> None:
    run_python("".join(parts), path)


# --- without threads ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("unmeasured")
def test_program_that_can_start_no_thread_writes_each_line(path: Path) -> None:
    program = """
    handler = begin()
    for number in range(300):
        log.info("%d", number)
    log.warning("urgent")
    from loglib import Topic
    assert len(list(Topic.open(path, mode="r").read())) == 301
    log.info("last")
    """
    run(path, BEGIN, NO_THREADS, program)
    assert messages(path) == Counter([*map(str, range(300)), "urgent", "last"])


@pytest.mark.usefixtures("unmeasured")
def test_lines_of_exit_functions_are_written_where_no_thread_can_be_started_then(path: Path) -> None:
    """From Python 3.12 on this is so for every exit function."""
    program = """
    atexit.register(lambda: log.info("from one that was registered first"))
    begin()
    log.info("before")
    atexit.register(lambda: log.info("from one that was registered last"))
    """
    run(path, BEGIN, program, NO_THREADS)
    lasts = [f"from one that was registered {when}" for when in ("first", "last")]
    assert messages(path) == Counter(["before", *lasts])


def test_line_is_written_though_the_topic_can_start_no_thread(
    log: logging.Logger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    log.warning("it")
    assert handler_of(log).drain(60)
    assert handler_of(log)._spool._topic.opened()._background._flusher is None and messages(path) == {"it": 1}


def test_call_without_a_thread_writes_at_most_once_in_a_moment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(spool, "start_new_thread", refuse)
    one = Spool(path, capacity_bytes=1000, patience_s=0, report=lambda drops: b"", partitions=1)
    for number in range(50):
        assert one.put(b"%d" % number, number)
    assert 1 <= len(values(path)) < 50
    assert one.put(b"urgent", 50, urgent=True)
    assert values(path) == [*(b"%d" % number for number in range(50)), b"urgent"]
    assert one.flush(0) and one.close(0) == 0


def test_whatever_goes_wrong_in_a_call_that_writes_by_itself_is_told_and_costs_no_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = Spool(path, capacity_bytes=1000, patience_s=0, report=lambda drops: b"", partitions=1)
    one._end()
    with monkeypatch.context() as broken:
        broken.setattr(one, "_next_portion", lambda **_: 1 / 0)
        assert one.put(b"kept", 1)
    assert "ZeroDivisionError" in caplog.text
    assert one.put(b"next", 2)
    assert values(path) == [b"kept", b"next"]


# --- in the middle of a call -------------------------------------------------------------------------


class Interrupting(WatchedFiles):
    """Calls something when the log is written."""

    def __init__(self) -> None:
        super().__init__(UnsyncedFiles())
        self.calls: list[Any] = []

    def before(self, call: Call) -> None:
        if call.name == "pwritev" and call.file.endswith(".log") and self.calls:
            self.calls.pop()()


def test_calls_in_the_middle_of_writing_do_not_wait_for_it(path: Path) -> None:
    """As a finalizer makes them, which the collector runs in the thread that writes."""
    files = Interrupting()
    one = Spool(path, capacity_bytes=100, patience_s=600, report=lambda drops: b"", partitions=1, files=files)
    found: list[object] = []

    def interrupt() -> None:
        found.extend((one.put(b"in between", 1), one.put(b"x" * 80, 1), one.flush(600), one.close(600)))

    files.calls.append(interrupt)
    assert one.put(b"y" * 50, 1) and one.flush(60)
    assert found == [True, False, False, 2] and one.dropped == 1
    assert one.flush(60) and one.close(60) == 0
    assert values(path)[:1] == [b"y" * 50] and b"in between" in values(path)


def test_flush_under_the_lock_of_logging_does_not_wait_for_a_warning_of_the_writer(path: Path) -> None:
    """`dictConfig` closes the former handlers under that lock, and a logger's first warning needs it."""
    files = Interrupting()
    one = Spool(path, capacity_bytes=100, patience_s=0, report=lambda drops: b"", partitions=1, files=files)
    logger = logging.getLogger("loglib")
    files.calls.append(lambda: logger.warning("a torn tail was cut off"))
    logger.setLevel(logging.NOTSET)  # so it looks up again which levels are enabled
    with logging._lock:  # type: ignore[attr-defined]
        assert one.put(b"it", 1) and one.flush(6)
    assert one.close(60) == 0


def test_close_does_not_wait_for_what_others_log_meanwhile(path: Path) -> None:
    one = Spool(path, capacity_bytes=1 << 30, patience_s=0, report=lambda drops: b"", partitions=1)
    done = threading.Event()

    def log() -> None:
        while not done.is_set():
            one.put(b"another", 1)

    threads = [threading.Thread(target=log) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert one.put(b"mine", 1)
    assert one.close(600) == 0
    assert b"mine" in values(path)
    done.set()
    for thread in threads:
        thread.join()
    assert one.close(60) == 0


@pytest.mark.parametrize("threads", [True, False], ids=["a thread writes", "the call writes"])
def test_interrupt_after_any_call_leaves_a_spool_that_goes_on(
    threads: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    if not threads:
        monkeypatch.setattr(spool, "start_new_thread", refuse)
    one = Spool(path, capacity_bytes=1 << 20, patience_s=0, report=lambda drops: b"", partitions=1)
    interrupted, left = True, 0

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        """As a signal: when a function begins, and when a call has returned."""
        nonlocal left
        if frame.f_code.co_filename in (spool.__file__, spool_topic.__file__) and event in ("call", "c_return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    for number in count(1):
        left, interrupted = number, False
        try:
            sys.setprofile(interrupt)
            one.put(b"interrupted", 1, urgent=True)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.setprofile(None)
        assert one.put(b"%d" % number, 1)
        assert one.flush(6), number
        if not interrupted:
            break
    assert number > 5
    found = [value for value in values(path) if value != b"interrupted"]
    assert found == [b"%d" % each for each in range(1, number + 1)]
    assert one.close(60) == 0


class Raising:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __str__(self) -> str:
        raise self._error


ERRORS = [ValueError("a"), RecursionError("a"), MemoryError("a"), SystemExit("a"), KeyboardInterrupt("a")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["argument", "filter"])
def test_line_that_raises_is_counted_and_only_the_end_of_the_program_goes_on(
    place: str, error: BaseException, log: logging.Logger, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise error

    argument = Raising(error) if place == "argument" else "it"
    if place == "filter":
        handler_of(log).addFilter(refuse)
    if isinstance(error, Exception):
        log.info("%s", argument)
        assert type(error).__name__ in capsys.readouterr().err
    else:
        with pytest.raises(type(error)):
            log.info("%s", argument)
    handler_of(log).filters.clear()
    log.info("fine")
    assert handler_of(log).drain(60)
    assert messages(path) == {"fine": 1} and handler_of(log).dropped == 1


def test_argument_that_logs_is_a_line_of_its_own(log: logging.Logger, path: Path) -> None:
    class Logging:
        def __str__(self) -> str:
            log.info("inner")
            return "outer"

    log.info("%s", Logging())
    assert handler_of(log).drain(60)
    assert list(messages(path)) == ["inner", "outer"]


def test_stderr_that_leads_back_to_the_logger_ends(
    log: logging.Logger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stderr:
        def write(self, text: str) -> None:
            log.error("%d", text)  # which cannot be formatted either

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Stderr())
        log.info("%d", "no number")
    assert handler_of(log).dropped > 1
    log.info("fine")
    assert handler_of(log).drain(60)
    assert messages(path) == {"fine": 1}


def test_extra_whose_name_is_no_text_is_written(log: logging.Logger, path: Path) -> None:
    record = logging.makeLogRecord({"name": "app", "levelno": 20, "msg": "m", "b": 1})
    vars(record)[7] = 2  # type: ignore[index]
    log.handle(record)
    assert handler_of(log).drain(60)
    (line,) = values(path)
    assert (json.loads(line)["b"], json.loads(line)["7"]) == (1, 2)


# --- the end of handlers and processes ---------------------------------------------------------------


@pytest.mark.usefixtures("unmeasured")
def test_lines_of_handlers_that_were_closed_or_lost_are_written_at_the_end(path: Path) -> None:
    program = """
    handler = begin()
    log.info("first")
    logging.shutdown()
    logging.shutdown()
    log.info("after the shutdown")
    lost = logging.Logger("lost")
    from loglib.logging import LogHandler
    lost.addHandler(LogHandler(path))
    lost.info("by a handler that nobody has")
    del lost
    gc.collect()
    """
    run(path, BEGIN, program)
    assert messages(path) == Counter(["first", "after the shutdown", "by a handler that nobody has"])


def test_report_of_drops_is_a_line_of_json_when_the_handler_is_lost(path: Path) -> None:
    handler = LogHandler(path)
    handler.setFormatter(logging.Formatter("text: %(message)s"))
    report, drops = handler._spool._report, Drops(3, 0, 1_000_000)
    assert report(drops).startswith(b"text: 3 lines were dropped within 1.000 s")
    del handler
    gc.collect()
    assert json.loads(report(drops))["dropped"] == 3


@pytest.mark.usefixtures("unmeasured")
def test_lines_of_callbacks_of_a_fork_are_written(path: Path) -> None:
    """Callbacks that came before those of loglib run in a child that has all that is its parent's, a topic also."""
    program = """
    def say(where):
        log.info(where)
        lost.clear()  # a topic that is collected before loglib knows of the fork
    lost = []
    os.register_at_fork(
        before=lambda: log.info("before"), after_in_parent=lambda: log.info("parent"),
        after_in_child=lambda: say("child"),
    )
    begin()
    from loglib import Topic
    topic = Topic.open(path + "-own", create=True)
    topic.append(b"kept")
    lost.append(topic)
    log.info("begin")
    for number in range(3):
        child = os.fork()
        if not child:
            del topic
            log.info("end")
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
    log.info("end")
    """
    run(path, BEGIN, program)
    threes = ["before", "parent", "child", "end"] * 3
    assert messages(path) == Counter(["begin", "end", *threes])
    assert values(Path(f"{path}-own")) == [b"kept"]


@pytest.mark.usefixtures("unmeasured")
def test_lines_of_forks_of_forks_in_threads_are_written(path: Path) -> None:
    program = """
    def generation(number):
        log.info("%d", number)
        def fork():
            child = os.fork()
            if not child:
                generation(number + 1)
                logging.shutdown()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        if number < 4:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
    begin()
    generation(0)
    """
    run(path, BEGIN, program)
    assert messages(path) == Counter("01234")


@pytest.mark.usefixtures("unmeasured")
def test_workers_of_a_copy_of_multiprocessing_lose_nothing(path: Path, tmp_path: Path) -> None:
    """As `multiprocess` is, which pathos uses. It may be imported after the handler was made."""
    shutil.copytree(Path(multiprocessing.__file__).parent, tmp_path / "multiprocess")
    program = """
    handler = begin()
    log.info("begin")
    sys.path.insert(0, os.path.dirname(path))
    import multiprocess
    from loglib import Topic
    def generation(number):
        log.info("%d", number)
        if number < 3:
            topic = Topic.open(f"{path}{number}", create=True)
            topic.append(b"appended")
            process = multiprocess.get_context("fork").Process(target=generation, args=(number + 1,))
            process.start()
            process.join()
            assert process.exitcode == 0
            globals()[f"topic{number}"] = topic
    generation(0)
    """
    run(path, BEGIN, program)
    assert messages(path) == Counter(["begin", *"0123"])
    assert [values(Path(f"{path}{number}")) for number in range(3)] == [[b"appended"]] * 3


@pytest.mark.usefixtures("unmeasured")
def test_lines_of_a_short_worker_that_imports_multiprocessing_after_its_fork_are_written(path: Path) -> None:
    """As a process of billiard does. It may end before the handler's thread has opened the topic."""
    program = """
    begin()
    assert "multiprocessing.util" not in sys.modules
    child = os.fork()
    if not child:
        import multiprocessing.util
        log.info("it")
        multiprocessing.util._exit_function()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    """
    run(path, BEGIN, program)
    assert messages(path) == {"it": 1}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("module", ["uuid", "ctypes"])
def test_child_can_import_what_a_thread_of_loglib_imported_at_the_fork(module: str, path: Path) -> None:
    """Otherwise it would wait for ever for a thread that it does not have."""
    program = f"""
    import signal, time
    begun = threading.Event()
    class Slow:
        def find_spec(self, name, path=None, target=None):
            if name == {module!r} and threading.current_thread() is not threading.main_thread():
                begun.set()
                time.sleep(0.5)
    begin()
    sys.meta_path.insert(0, Slow())
    log.warning("it")
    assert begun.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)
        import {module}
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    """
    run(path, BEGIN, program)
    assert messages(path) == {"it": 1}


@pytest.mark.usefixtures("unmeasured")
def test_program_that_ends_with_a_handler_in_a_variable_says_nothing(path: Path) -> None:
    """The functions and the objects of a module that has both die at the same moment."""
    process = start_python(BEGIN + """
    def function(): pass
    handler = begin()
    log.warning("it")
    """, path)  # fmt: skip
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


def test_only_a_child_leaves_its_parents_handles_before_a_callback_uses_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens between a fork and loglib's own callback, done here, where coverage sees it."""
    left: list[int] = []
    monkeypatch.setattr(process, "_abandon", lambda: left.append(1))
    monkeypatch.setattr(process, "forking", [True])
    for module in (spool, topic_module):
        monkeypatch.setattr(module, "forking", process.forking)
    one = Spool(path, capacity_bytes=1000, patience_s=0, report=lambda drops: b"", partitions=1)
    assert one.put(b"the parent's", 1) and one.flush(60) and not left
    process.forking.clear()  # another thread has forked, and its fork has ended in between
    process.leave_parent()
    assert not left
    process.forking.append(True)
    monkeypatch.setattr(process, "_pid", 0)
    one.drop()
    assert one.flush(60) and one.close(60) == 0 and left
    opened = Topic.open(path, create=True)
    opened.close()
    left.clear()
    opened.__del__()
    assert left


def test_end_of_the_process_does_not_wait_in_the_topic_for_a_write_that_hangs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit function of the topic waited for the thread that writes, and under gevent was not woken."""
    ends = process._AtExit()
    for module in (spool, spool_topic, topic_module):
        monkeypatch.setattr(module, "at_exit", ends)
    files, hung, begun = Interrupting(), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        hung.wait(600)

    files.calls.append(hang)
    one = Spool(
        path, capacity_bytes=100, patience_s=0, report=lambda drops: b"", partitions=1, files=files, end_timeout_s=0.1
    )
    assert one.put(b"it", 1) and begun.wait(60)
    ending = threading.Thread(target=ends.end)
    ending.start()
    try:
        ending.join(20)
        assert not ending.is_alive()
    finally:
        hung.set()
        ending.join()
    assert one.flush(60) and one.close(60) == 0
    assert values(path) == [b"it"]


# --- greenlets ---------------------------------------------------------------------------------------


def test_topic_has_no_thread_of_its_own_when_greenlets_were_patched_in_later(
    log: logging.Logger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would be a greenlet of the thread that waits for it."""
    assert handler_of(log)._spool._topic.opened()._background._flusher is not None
    handler_of(log)._spool._topic.give_back()
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: None)
    log.info("it")
    assert handler_of(log).drain(60)
    assert handler_of(log)._spool._topic.opened()._background._flusher is None and messages(path) == {"it": 1}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("when", ["before the import", "after the import", "after the first line"])
def test_lines_of_greenlets_are_written(when: str, path: Path) -> None:
    pytest.importorskip("gevent")
    patch = """
    import gevent, gevent.monkey
    gevent.monkey.patch_all()
    """
    program = """
    def write(name):
        for number in range(20):
            log.info("%d %d", name, number)
            gevent.sleep(0)
        assert handler.drain(30)
    gevent.joinall([gevent.spawn(write, name) for name in range(20)], raise_error=True)
    """
    begin = """
    handler = begin()
    log.info("begin")
    """
    first = begin + "handler.flush()\n" if when == "after the first line" else ""
    parts = {"before the import": [patch, begin], "after the import": ["\n    import loglib.logging\n", patch, begin]}
    run(path, BEGIN, *parts.get(when, [first, patch]), program)
    assert messages(path) == Counter(["begin", *(f"{name} {number}" for name in range(20) for number in range(20))])
