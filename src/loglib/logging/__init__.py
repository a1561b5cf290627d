"""Log lines of an application in a topic: `LogHandler` for the standard library's `logging`."""

from .handler import LogHandler
from .json_formatter import JsonFormatter

__all__ = ["JsonFormatter", "LogHandler"]
