"""Lines of an application in a topic: `LogHandler`, a handler for the standard library's `logging`."""

from .handler import JsonFormatter, LogHandler

__all__ = ["JsonFormatter", "LogHandler"]
