"""Loggers that write to a topic."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loglib.logging import LogHandler


@contextmanager
def logging_to(path: Path, name: str = "app.web", **options: Any) -> Iterator[logging.Logger]:
    """A logger that writes to the topic at `path`; its handlers are closed at the end."""
    logger = logging.Logger(name, logging.DEBUG)
    logger.addHandler(LogHandler(path, **options))
    yield logger
    for handler in list(logger.handlers):
        handler.close()


def handler_of(log: logging.Logger) -> LogHandler:
    """The logger's only handler."""
    (handler,) = log.handlers
    assert isinstance(handler, LogHandler)
    return handler
