"""No line stops another, and each line is JSON for a strict parser, whatever is logged."""

import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from logged import handler_of, logging_to

from conftest import run_python
from loglib import Topic
from loglib.logging import JsonFormatter, spool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app"


@pytest.fixture
def log(path: Path) -> Iterator[logging.Logger]:
    """A logger that writes to the topic at `path`, whose lines have at most 1,000 bytes."""
    with logging_to(path, partitions=1, max_record_bytes=1000) as logger:
        yield logger


def lines(log: logging.Logger, path: Path) -> list[str]:
    assert handler_of(log).drain(60)
    with Topic.open(path, mode="r") as topic:
        return [(record.value or b"").decode() for record in topic.read()]


def lines_and_reports(log: logging.Logger, path: Path) -> list[str]:
    """The lines, when what was dropped is reported as well."""
    lines(log, path)
    while handler_of(log)._spool._unreported:
        time.sleep(0)
    return lines(log, path)


def strict(line: str) -> Any:
    """The line as a parser reads it that knows no NaN, no infinity and no half of a surrogate pair."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    found = json.loads(line, parse_constant=refuse)
    json.dumps(found, ensure_ascii=False).encode()
    return found


class Shy:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


NUMBERS = st.floats() | st.integers()
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=5) | st.just("\udc80")
PLAIN = NUMBERS | TEXTS | st.binary(max_size=5) | st.none() | st.booleans() | st.builds(object)
NAMES = TEXTS | NUMBERS
VALUES = st.recursive(PLAIN, lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3))


@given(VALUES, TEXTS)
@example([float("nan"), {"a": float("-inf")}], "\ud83d\ude00")
def test_each_line_is_json_for_a_strict_parser(value: Any, message: str) -> None:
    record = logging.makeLogRecord({"msg": "%s", "args": (message,), "name": "app", "value": value})
    found = strict(JsonFormatter().format(record))
    assert {"time", "level", "logger", "message", "value"} <= found.keys()


def test_what_is_replaced_is_counted() -> None:
    record = logging.makeLogRecord({"msg": "x\udc80", "loss": float("nan"), "rates": [0.5, float("inf")], "it": Shy()})
    found = strict(JsonFormatter().format(record))
    assert (found["message"], found["loss"], found["rates"]) == ("x\ufffd", "NaN", [0.5, "Infinity"])
    assert (found["it"], found["replaced"]) == ("<Shy that cannot be shown>", 4)
    pair = logging.makeLogRecord({"msg": "\ud83d\ude00", "twice": [[float("nan")]] * 2, "large": 10**5000})
    found = strict(JsonFormatter().format(pair))
    assert found["message"] == "\U0001f600" and found["twice"] == [["NaN"], ["NaN"]]
    assert (found["large"], found["replaced"]) == ("<int that cannot be shown>", 3)


def test_line_whose_formatter_raises_is_dropped_and_counted_and_others_are_written(
    log: logging.Logger, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler_of(log).setFormatter(logging.Formatter("[%(request_id)s] %(message)s"))
    for number in range(5):
        log.info("%d", number, extra={"request_id": "r"} if number != 2 else {})
    found = lines_and_reports(log, path)
    assert [each for each in found if each[0] == "["] == [f"[r] {number}" for number in (0, 1, 3, 4)]
    reports = [json.loads(each) for each in found if each[0] != "["]  # which have no such extra
    assert sum(each["dropped"] for each in reports) == handler_of(log).dropped == 1
    assert "request_id" in capsys.readouterr().err


def test_line_above_the_limit_is_dropped_and_counted_and_others_are_written(log: logging.Logger, path: Path) -> None:
    for number in range(5):
        log.info("%d %s", number, "x" * (2000 if number == 2 else 0))
    found = [json.loads(line) for line in lines_and_reports(log, path)]
    assert [each["message"].strip() for each in found if "dropped" not in each] == ["0", "1", "3", "4"]
    assert sum(each.get("dropped", 0) for each in found) == handler_of(log).dropped == 1


def test_time_that_no_record_has_holds_up_no_other_line(log: logging.Logger, path: Path) -> None:
    log.handle(logging.makeLogRecord({"name": "app", "levelno": 20, "msg": "from the year 300,000", "created": 1e13}))
    log.info("fine")
    assert "fine" in [json.loads(line)["message"] for line in lines(log, path)]
    assert handler_of(log).dropped == 1


def test_report_that_is_too_long_is_not_tried_again(log: logging.Logger, path: Path) -> None:
    handler_of(log).setFormatter(logging.Formatter("%(message)s" + "x" * 1000))
    log.info("too long")
    lines_and_reports(log, path)
    handler_of(log).setFormatter(JsonFormatter())
    log.info("fine")
    assert [json.loads(line)["message"] for line in lines(log, path)] == ["fine"]
    assert handler_of(log).dropped == 1


def test_thread_that_cannot_be_started_is_tried_again(log: logging.Logger, path: Path) -> None:
    with mock.patch.object(spool, "start_new_thread", side_effect=RuntimeError("can't start new thread")):
        log.info("one")
        assert len(lines(log, path)) == 1, "the call writes by itself"
    log.info("two")
    assert [json.loads(line)["message"] for line in lines(log, path)] == ["one", "two"]


def test_whatever_goes_wrong_with_a_line_does_not_end_the_program(
    log: logging.Logger, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(handler_of(log)._spool, "put", lambda *_, **__: 1 / 0)
        log.info("lost")
    assert "ZeroDivisionError" in capsys.readouterr().err
    log.info("fine")
    assert "fine" in [json.loads(line)["message"] for line in lines_and_reports(log, path)]
    assert handler_of(log).dropped == 1


@pytest.mark.usefixtures("unmeasured")
def test_finalizers_that_log_hang_nothing_in_the_middle_of_a_call(path: Path) -> None:
    program = """
        import gc, logging, os, sys
        from loglib.logging import LogHandler

        handler = LogHandler(sys.argv[1])
        log = logging.Logger("app")
        log.addHandler(handler)

        class Session:  # in a cycle: the collector frees it, which runs in the middle of other calls
            def __init__(self): self.itself = self
            def __del__(self): log.info("unclosed")

        gc.set_threshold(3)
        for number in range(3000):
            Session()
            log.info("line")
        gc.set_threshold(0)
        gc.collect()
        print(handler.drain(60), handler.dropped)
        sys.stdout.flush()
        os._exit(0)
    """
    assert run_python(program, path).split() == ["True", "0"]
    with Topic.open(path, mode="r") as topic:
        found = Counter(json.loads(record.value or b"")["message"] for record in topic.read())
    assert found == {"line": 3000, "unclosed": 3000}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("left", ["task", "object of a module"])
def test_finalizer_that_logs_at_the_end_of_the_interpreter_lets_it_end(path: Path, left: str) -> None:
    program = """
        import asyncio, logging, sys
        from loglib.logging import LogHandler

        logging.basicConfig(level=logging.INFO, handlers=[LogHandler(sys.argv[1])])
        logging.info("begin")

        class Session:
            def __del__(self): logging.info("unclosed")

        async def forever(): await asyncio.Event().wait()

        if sys.argv[2] == "task":
            loop = asyncio.new_event_loop()
            task = loop.create_task(forever())
            loop.run_until_complete(asyncio.sleep(0))
        else:
            session = Session()
    """
    run_python(program, path, left)
    with Topic.open(path, mode="r") as topic:
        assert [json.loads(record.value or b"")["message"] for record in topic.read()][:1] == ["begin"]


def test_line_that_comes_while_the_interpreter_is_taken_apart_is_counted(log: logging.Logger, path: Path) -> None:
    with mock.patch.object(sys, "is_finalizing", lambda: True):
        log.info("too late")
    log.info("fine")
    assert [json.loads(line)["message"] for line in lines(log, path)] == ["fine"]
    assert handler_of(log).dropped == 1


def test_thread_without_threading_is_traced_as_others_are() -> None:
    found: list[object] = []
    thread = threading.Thread(target=spool._traced, args=(lambda: found.append("it"),))
    thread.start()
    thread.join()
    assert found == ["it"]
