"""Pickling: how readers travel to executors, and the error of an executor that cannot run them.

Invariant: an object that is pickled through `by_value` needs nothing on the executor until it is rebuilt there. If
a module is missing then, the error names it, the interpreter and the host. Without this, Spark shows a traceback
that ends in a module which the user may not know.

Processes: pickled in Spark's planning process on the driver's host, rebuilt in executors' workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def by_value(module: str, name: str, *arguments: object) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """The result of `__reduce__` for an object that `module.name(*arguments)` makes again.

    The arguments must be of built-in types.
    """

    # Spark pickles with cloudpickle, which sends the code of an inner function instead of its module's name.
    def rebuild(module: str, name: str, *arguments: object) -> object:
        import importlib
        import platform
        import socket
        import sys

        try:
            found = importlib.import_module(module)
        except ImportError as error:
            missing = f"no module {error.name}" if isinstance(error, ModuleNotFoundError) else str(error)
            raise ImportError(
                f"loglib cannot run in this worker's Python: {missing} ({sys.executable}, Python "
                f"{platform.python_version()} on {socket.gethostname()}). Install loglib-segments[spark] there, or "
                "send the file of `make spark-archive` with loglib.spark.configure(builder, archive=...)",
                name=error.name,
            ) from error
        return getattr(found, name)(*arguments)

    return rebuild, (module, name, *arguments)
