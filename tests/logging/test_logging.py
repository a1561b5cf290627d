"""The handler for `logging`: what a line says, what it costs, and that none is lost or doubled."""

import io
import json
import logging
import logging.config
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from consumers import wait_for
from disks import memory
from logged import logging_to

from conftest import run_python
from loglib import Topic
from loglib.logging import JsonFormatter, LogHandler, spool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app"


@pytest.fixture
def log(path: Path) -> Iterator[logging.Logger]:
    """A logger that writes to the topic at `path`."""
    with logging_to(path) as logger:
        yield logger


def lines(path: Path) -> list[bytes]:
    with Topic.open(path, mode="r") as topic:
        return [record.value or b"" for record in topic.read()]


def written(log: logging.Logger, path: Path) -> list[dict[str, Any]]:
    for handler in log.handlers:
        handler.flush()
    return [json.loads(line) for line in lines(path)]


def test_line_says_when_where_what_and_extras(log: logging.Logger, path: Path) -> None:
    before = time.time()
    log.info("took %d ms", 15, extra={"user": "žofie", "request": {"id": 7}, "path": Path("/x"), "level": 3})
    (facts,) = written(log, path)
    stamp = facts.pop("time")
    assert facts == {
        "level": "INFO", "logger": "app.web", "message": "took 15 ms", "user": "žofie", "request": {"id": 7},
        "path": repr(Path("/x")), "extra.level": 3,
    }  # fmt: skip
    with Topic.open(path, mode="r") as topic:
        (record,) = topic.read()
    assert before - 1 < record.timestamp / 1e6 < time.time() + 1
    assert f"{record.time:%Y-%m-%dT%H:%M:%S}" == stamp[:19] and stamp.endswith("Z")


def test_exceptions_and_stacks_are_kept(log: logging.Logger, path: Path) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        log.exception("failed", stack_info=True)
    (facts,) = written(log, path)
    assert "KeyError: 'lost'" in facts["exception"] and "test_logging.py" in facts["stack"]


def test_whatever_is_logged_becomes_a_line_of_json(log: logging.Logger, path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    log.info("a\nb \udc80", extra={"bytes": b"\xff", "nan": float("nan"), "keys": {(1, 2): 3}})
    log.info("round", extra={"circle": circle})
    first, second = written(log, path)
    assert first["message"] == "a\nb \ufffd" and first["bytes"] == repr(b"\xff") and first["keys"] == {"(1, 2)": 3}
    assert (first["nan"], first["replaced"]) == ("NaN", 2)
    assert second["circle"] == ["[[...]]"] and "replaced" not in second
    assert all(b"\n" not in line for line in lines(path))


def test_text_by_another_formatter(log: logging.Logger, path: Path) -> None:
    log.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.warning("plain")
    log.handlers[0].flush()
    assert lines(path) == [b"WARNING plain"]


def test_configuration_by_a_dictionary(path: Path) -> None:
    logging.config.dictConfig({
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"short": {"format": "%(name)s: %(message)s"}},
        "handlers": {
            "topic": {
                "class": "loglib.logging.LogHandler", "path": str(path), "level": "INFO", "formatter": "short",
                "partitions": 3, "capacity": 1000000, "compression": "zlib",
            }
        },
        "loggers": {"configured": {"handlers": ["topic"], "level": "DEBUG", "propagate": False}},
    })  # fmt: skip
    logger = logging.getLogger("configured")
    logger.debug("left out")
    logger.info("kept")
    (handler,) = logger.handlers
    handler.close()
    assert lines(path) == [b"configured: kept"]
    with Topic.open(path, mode="r") as topic:
        assert (topic.config.partitions, topic.config.compression, topic.config.durability) == (3, "zlib", "os")


def test_policies_of_a_topic_that_exists_stay_and_those_that_differ_are_named(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were ignored without a word. The handler's own default of the durability is no wish of the caller."""
    Topic.create(path, batch_records=7).close()
    for _ in range(2):
        handler = LogHandler(path, batch_records=9, segment_age=None)
        handler.handle(logging.makeLogRecord({"name": "app", "msg": "x", "levelno": 20, "levelname": "INFO"}))
        handler.close()
    told = [each.getMessage() for each in caplog.records]
    assert [each.split(": ", 1)[1].partition(" is ")[0] for each in told] == ["segment_age", "batch_records"]
    with Topic.open(path, mode="r") as topic:
        assert (topic.config.batch_records, topic.config.durability) == (7, "disk")


def test_policies_that_an_operator_changes_reach_the_handler(path: Path) -> None:
    handler = LogHandler(path)

    def log() -> str:
        handler.handle(logging.makeLogRecord({"name": "app", "msg": "x", "levelno": 30, "levelname": "WARNING"}))
        handler.flush()
        with Topic.open(path, mode="r") as topic:
            return "zlib" if any(each._header.codec for each in topic.batches()) else "none"

    assert log() == "none"
    with Topic.open(path, shared=True) as topic:
        topic.alter(compression="zlib")
    wait_for(lambda: log() == "zlib")
    handler.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"durability": "certainly"}, {"segment_bytez": 1 << 20}, {"partitions": 0}, {"segment_bytes": -1},
        {"compression": "none at all"}, {"patience": "soon"}, {"flush_timeout": "later"}, {"capacity": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_wrong_argument_is_an_error_of_the_constructor(wrong: dict[str, Any], path: Path) -> None:
    """The thread that opens the topic has nobody to tell: each line would wait in memory, and be lost."""
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        LogHandler(path, **wrong)
    LogHandler(path, segment_age=None, retention=None).close()  # type: ignore[arg-type]


def test_lines_of_loglib_itself_are_left_out(path: Path) -> None:
    handler = LogHandler(path)
    for name in ("loglib", "loglib.x", "loglibrary"):
        handler.handle(logging.makeLogRecord({"name": name, "msg": name, "levelno": 20, "levelname": "INFO"}))
    handler.close()
    assert [json.loads(line)["logger"] for line in lines(path)] == ["loglibrary"]


def test_warning_of_loglib_that_no_other_handler_takes_is_printed(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An application whose only handler cannot write lost all lines without a word."""
    path.touch()
    handlers: list[logging.Handler] = [logging.NullHandler()]
    handlers += [LogHandler(path, flush_timeout=0.1), LogHandler(path)]
    logger = logging.getLogger("loglib")
    monkeypatch.setattr(logger, "handlers", handlers)
    monkeypatch.setattr(logger, "propagate", False)
    handlers[1].handle(logging.makeLogRecord({"msg": "nowhere to go", "levelno": 20}))
    handlers[1].close()
    logger.info("not even a warning")
    first, last = capsys.readouterr().err.splitlines()
    assert "1 records wait in memory" in first and "1 lines were not written" in last
    handlers.append(logging.StreamHandler(io.StringIO()))
    logger.warning("for the other handler")
    monkeypatch.setattr(logger, "handlers", handlers[2:3])
    monkeypatch.setattr(logging, "lastResort", None)
    logger.warning("the application wants none")
    assert capsys.readouterr().err == ""


def test_filter_decides_and_may_replace(path: Path) -> None:
    handler = LogHandler(path)
    handler.addFilter(lambda record: "secret" not in record.getMessage())
    records = [logging.makeLogRecord({"name": "x", "msg": text, "levelno": 20}) for text in ("plain", "a secret")]
    assert [handler.handle(each) for each in records] == [True, False]
    handler.filter = lambda record: logging.makeLogRecord({"msg": "another", "levelno": 20})  # type: ignore[assignment,method-assign,return-value]
    assert handler.handle(records[1])
    handler.close()
    assert [json.loads(line)["message"] for line in lines(path)] == ["plain", "another"]


def test_formatter_that_fails_does_not_end_the_program(
    log: logging.Logger, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.info("%d", "no number")
    log.info("fine")
    assert [each["message"][:23] for each in written(log, path)] == ["fine", "1 lines were dropped wi"]
    assert "TypeError" in capsys.readouterr().err


def test_threads_lose_no_line_and_keep_their_order(log: logging.Logger, path: Path) -> None:
    def write(name: int) -> None:
        for number in range(500):
            log.info("%d %d", name, number)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: dict[str, list[int]] = {}
    for each in written(log, path):
        name, number = each["message"].split()
        found.setdefault(name, []).append(int(number))
    assert len(found) == 8 and all(numbers == list(range(500)) for numbers in found.values())


def test_end_of_the_process_writes_everything_also_what_comes_last(path: Path) -> None:
    run_python(
        """
        import atexit, logging, sys
        from loglib.logging import LogHandler

        atexit.register(lambda: logging.info("from an exit function that was registered first"))
        logging.basicConfig(level=logging.INFO, handlers=[LogHandler(sys.argv[1])])
        atexit.register(lambda: logging.info("from one that was registered last"))
        for number in range(1000):
            logging.info("%d", number)
        """,
        path,
    )
    found = [json.loads(line)["message"] for line in lines(path)]
    assert Counter(found) == Counter([
        *map(str, range(1000)), "from one that was registered last", "from an exit function that was registered first",
    ])  # fmt: skip


def test_workers_of_a_pool_each_write_their_lines(path: Path) -> None:
    program = """
        import logging, multiprocessing, sys
        from loglib.logging import LogHandler

        def work(number):
            logging.info("%d", number)

        if __name__ == "__main__":
            logging.basicConfig(level=logging.INFO, handlers=[LogHandler(sys.argv[1], partitions=2)])
            logging.info("parent")
            with multiprocessing.get_context("fork").Pool(5) as pool:
                pool.map(work, range(500), chunksize=7)
                pool.close()
                pool.join()
    """
    run_python(program, path)
    assert Counter(json.loads(line)["message"] for line in lines(path)) == Counter(["parent", *map(str, range(500))])


def test_handler_that_is_closed_and_used_again_begins_anew(log: logging.Logger, path: Path) -> None:
    log.info("first")
    log.handlers[0].close()
    log.info("second")
    assert sorted(each["message"] for each in written(log, path)) == ["first", "second"]


def test_full_disk_costs_no_time_and_what_was_dropped_is_reported(tmp_path: Path) -> None:
    with memory(tmp_path / "small", "size=2m") as disk:
        handler = LogHandler(disk / "app", capacity=100_000, flush_timeout=0.2, partitions=1, segment_bytes=1 << 20)
        logger = logging.Logger("app", logging.DEBUG)
        logger.addHandler(handler)
        blocker = disk / "blocker"
        logger.info("first")
        handler.flush()
        blocker.write_bytes(bytes(1_900_000))
        numbers = 0
        with mock.patch.object(spool, "_shut", side_effect=AssertionError("it waits")):
            while not handler.dropped:
                logger.info("%d %s", numbers, "x" * 500)
                numbers += 1
                assert numbers < 100_000
        for _ in range(9):
            logger.info("dropped, too %s", "x" * 500)
        dropped = handler.dropped
        blocker.unlink()
        assert handler.drain(60)
        logger.info("last")
        handler._flush_timeout = 30
        handler.close()
        found = [json.loads(line) for line in lines(disk / "app")]
    told = [each for each in found if "dropped" in each]
    assert sum(each["dropped"] for each in told) == dropped >= 10
    accepted = [each["message"].split()[0] for each in found if "dropped" not in each]
    assert Counter(accepted) == Counter(["first", *map(str, range(numbers - 1)), "last"])


def test_what_cannot_be_written_at_the_end_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    handler = LogHandler(tmp_path / "file" / "app", flush_timeout=0.1)
    handler.handle(logging.makeLogRecord({"msg": "nowhere to go", "levelno": 20}))
    handler.close()
    assert "1 lines were not written" in caplog.text


def test_end_of_the_process_waits_for_a_failing_disk_no_longer_than_the_timeout(path: Path) -> None:
    """`logging` flushes and closes the handler again, after it has waited at its own end."""
    handler = LogHandler(path, partitions=1, flush_timeout=0.2)
    path.touch()
    handler.handle(logging.makeLogRecord({"msg": "waits", "levelno": 20}))
    handler._spool._end()
    with mock.patch.object(handler._spool, "flush", wraps=handler._spool.flush) as flush:
        logging.shutdown([weakref.ref(handler)])
    assert [call.args for call in flush.call_args_list] == [(0.0,), (0.0,)]
    path.unlink()
    handler.handle(logging.makeLogRecord({"msg": "late", "levelno": 20}))
    handler.close()
    assert [json.loads(line)["message"] for line in lines(path)] == ["waits", "late"]


def test_line_at_the_end_is_written_when_the_call_returns(path: Path) -> None:
    handler = LogHandler(path)
    handler._spool._end()
    handler.handle(logging.makeLogRecord({"msg": "late", "levelno": 20}))
    assert [json.loads(line)["message"] for line in lines(path)] == ["late"]
    handler.close()


def test_child_does_not_end_with_its_parent(path: Path) -> None:
    """What a forked child does first, done here, where coverage sees it."""
    handler = LogHandler(path)
    handler._spool._end()
    with mock.patch.object(os, "getpid", lambda: -1):
        handler._spool._begin_in_child(os.getpid())
    assert handler._spool._end_at is None
    handler.close()


def test_formatter_stands_alone() -> None:
    record = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": "m", "created": 1_700_000_000.25})
    assert JsonFormatter().format(record) == (
        '{"time": "2023-11-14T22:13:20.250000Z", "level": "INFO", "logger": "n", "message": "m"}'
    )
    early = logging.makeLogRecord({"msg": "m", "created": -4.5})
    assert '"time": "1969-12-31T23:59:55.500000Z"' in JsonFormatter().format(early)
