"""Daemon: runs PySpark's own daemon, which forks Spark's Python workers, with three changes; see docs/spark.md.

The changes:

- PySpark is imported from the installed package. Spark puts `pyspark.zip` first on the path, and Python keeps no byte
  code for a zip file: each daemon and each worker would compile PySpark again. Each new worker would also read the
  directories of the zip files again, and that of a jar, because PySpark lets Python forget what it knows of the path.
- loglib and the packages that it needs are imported before the fork. PySpark forks a worker anew after each task that
  is cut short, as by `show`, `first` and `isEmpty`, and each worker would import them again: 0.25 s. If a job brings
  another loglib (`--py-files`), its workers forget this one; see `Preloaded`.
- A worker ends without a traceback when the JVM has closed its socket. The JVM closes the socket of a worker that was
  idle for a minute, or whose rows are no longer needed. With Unix domain sockets PySpark's worker then fails to write
  its last message, and prints a traceback.

Invariant: everything else works as without this module. The path is changed only if the zip file is a part of the
installed package. Every other error of a worker is raised.

Streams have Python processes that no daemon forks, one for each stream that is read and one for each batch that is
written. They are run from here for the sake of the first change alone.

Processes: a separate program, started by the script `python.sh` in this directory, or on a cluster a module of the
archive. It works without loglib as well: then workers import it, and say what is missing.
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

__all__ = ["Preloaded", "calm", "main", "prefer_installed_pyspark", "preload"]

_PACKAGE = "loglib"
_NEEDED = (
    "numpy",
    "pyarrow",
    "pyspark.sql.datasource",
    "loglib.spark.source",
    "loglib.spark.stream",
    "loglib.spark.sink",
)
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


def preload(worker_module: str) -> None:
    """Import what workers need. What cannot be imported here, a worker tries again, and reports.

    PySpark imports nothing before the fork, for fear of threads. NumPy starts none, because Spark sets OMP_NUM_THREADS
    to the cores of a task. Of pyarrow only its allocator, jemalloc, has a thread, which it starts anew after a fork.
    """
    for name in (worker_module, *_NEEDED):
        with suppress(Exception):
            import_module(name)


class Preloaded(MetaPathFinder):
    """Forgets the preloaded loglib in a worker whose path has another one.

    It finds no module. Python calls `invalidate_caches` of each finder when `importlib.invalidate_caches` is called,
    and PySpark does this in a worker that has added the files of a job to its path.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:  # noqa: ARG002
        return None

    def invalidate_caches(self) -> None:
        loaded, found = sys.modules.get(_PACKAGE), PathFinder.find_spec(_PACKAGE)
        if loaded is not None and found is not None and found.origin != loaded.__file__:
            for name in [each for each in sys.modules if each.partition(".")[0] == _PACKAGE]:
                del sys.modules[name]


def prefer_installed_pyspark(path: list[str]) -> None:
    """Leave out the zip files of an installed PySpark and its jars, in place. All Python in them is installed."""
    for entry in path:
        if os.path.basename(entry) == "pyspark.zip":
            directory = os.path.dirname(entry)
            zips = [each for each in path if os.path.dirname(each) == directory and each.endswith(".zip")]
            jars = os.path.join(os.path.dirname(os.path.dirname(directory)), "jars")
            others = [each for each in path if each not in zips and os.path.dirname(each) != jars]
            if _comes_with_zips(directory, others) and PathFinder.find_spec("py4j", others):
                for left_out in set(path) - set(others):
                    sys.path_importer_cache.pop(left_out, None)
                path[:] = others
            return


def _comes_with_zips(directory: str, path: list[str]) -> bool:
    """Whether the directory belongs to the package `pyspark` that the path finds."""
    spec = PathFinder.find_spec("pyspark", path)
    if spec is None or spec.origin is None:
        return False
    own = os.path.join(os.path.dirname(spec.origin), "python", "lib")
    return os.path.realpath(own) == os.path.realpath(directory)


def calm(worker: Worker) -> Worker:
    """The same worker, which ends without an error if the JVM closed its socket."""

    @wraps(worker)
    def run(sock: socket.socket, authenticated: bool) -> int:
        try:
            return worker(sock, authenticated)
        except (BrokenPipeError, ConnectionResetError) as error:
            if error.__context__ is not None or not _is_closed(sock):  # it hides another error, or is of another pipe
                raise
            return 1  # after 0 the daemon would wait for the next task

    return run


def _is_closed(sock: socket.socket) -> bool:
    """Whether the other end of the socket is closed."""
    poller = select.poll()
    poller.register(sock, 0)  # no events: a hang-up and an error are always reported
    return bool(poller.poll(0))


if __name__ == "__main__":
    main()
