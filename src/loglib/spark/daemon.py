"""Daemon: PySpark's own daemon, which forks Spark's Python workers, with three changes. docs/spark.md has figures.

- PySpark is imported from the installed package. Spark puts `pyspark.zip` first on the path, and Python keeps no byte
  code for a zip file: each process would compile PySpark again. Spark's other Python processes, one for each stream
  that is read and one for each batch that is written, are run from here for this change alone.
- loglib and its packages are imported before the fork. PySpark forks a new worker after each task that is cut short,
  as by `show`, `first` and `isEmpty`, and each worker would import them again.
- A worker ends without a traceback when the JVM has closed its socket, because it was idle for a minute or its rows
  are not needed any more.

Invariant: everything else works as without this module. Every other error of a worker is raised.

Processes: a separate program, started by the script `python.sh` in this directory, or on a cluster a module of the
archive. It needs nothing of loglib: if loglib is missing, a worker reports it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from runpy import run_module

_PACKAGE = "loglib"
_NEEDED = (
    "numpy", "pyarrow", "pyspark.sql.datasource", "loglib.spark.source", "loglib.spark.stream", "loglib.spark.sink",
)  # fmt: skip
Worker = Callable[[socket.socket, bool], int]


def main() -> None:
    """Run PySpark's daemon until Spark closes its standard input, or with `-m` another module of PySpark."""
    sys.path[0] = os.getcwd()  # as with `python -m`; before, it is the directory of this file
    prefer_installed_pyspark(sys.path)
    if sys.argv[1:2] == ["-m"]:
        _, _, module, *arguments = sys.argv
        sys.argv[1:] = arguments
        run_module(module, run_name="__main__", alter_sys=True)
        return
    from pyspark import daemon

    preload(sys.argv[1] if len(sys.argv) > 1 else "pyspark.worker")
    sys.meta_path.append(Preloaded())
    daemon.worker = calm(daemon.worker)  # type: ignore[assignment]  # without the names of the parameters
    daemon.manager()


def prefer_installed_pyspark(path: list[str]) -> None:
    """If the path finds an installed PySpark without its zip files, take these and its jars from the path, in place."""
    zip_file = next((entry for entry in path if os.path.basename(entry) == "pyspark.zip"), None)
    if zip_file is None:
        return
    library = os.path.dirname(zip_file)  # of <the package>/python/lib
    jars = os.path.join(os.path.dirname(os.path.dirname(library)), "jars")
    others = [
        each
        for each in path
        if os.path.dirname(each) != jars and not (os.path.dirname(each) == library and each.endswith(".zip"))
    ]
    installed = PathFinder.find_spec("pyspark", others)
    if installed is None or installed.origin is None or PathFinder.find_spec("py4j", others) is None:
        return
    if os.path.realpath(os.path.join(os.path.dirname(installed.origin), "python", "lib")) == os.path.realpath(library):
        for left_out in set(path) - set(others):
            sys.path_importer_cache.pop(left_out, None)  # each worker would read their directories again
        path[:] = others


def preload(worker_module: str) -> None:
    """Import the packages of workers. If an import fails, the worker tries it again, and reports the error.

    PySpark imports nothing before the fork, because of threads. NumPy starts none, since Spark sets OMP_NUM_THREADS
    to the cores of a task. Of pyarrow only its allocator, jemalloc, has a thread, which it starts again after a fork.
    """
    for name in (worker_module, *_NEEDED):
        with suppress(Exception):
            import_module(name)


class Preloaded(MetaPathFinder):
    """Forgets the preloaded loglib in a worker whose job brings another one (`--py-files`). It finds no module.

    A worker that has added the files of a job to its path calls `importlib.invalidate_caches`, which calls each finder.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:  # noqa: ARG002
        return None

    def invalidate_caches(self) -> None:
        loaded, found = sys.modules.get(_PACKAGE), PathFinder.find_spec(_PACKAGE)
        if loaded is not None and found is not None and found.origin != loaded.__file__:
            for name in [each for each in sys.modules if each.partition(".")[0] == _PACKAGE]:
                del sys.modules[name]


def calm(worker: Worker) -> Worker:
    """A worker that ends without an error if the JVM has closed its socket."""

    @wraps(worker)
    def run(sock: socket.socket, authenticated: bool) -> int:
        try:
            return worker(sock, authenticated)
        except (BrokenPipeError, ConnectionResetError) as error:
            poller = select.poll()
            poller.register(sock, 0)  # no events: a hang-up and an error are always reported
            if error.__context__ is not None or not poller.poll(0):  # it hides another error, or is of another pipe
                raise
            return 1  # after 0 the daemon would wait for the next task

    return run


if __name__ == "__main__":
    main()
