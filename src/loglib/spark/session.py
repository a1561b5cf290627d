"""Session: what a user calls with a Spark session: read a topic, count or map its records, and configure the session.

Invariant: `counts` and `map_batches` choose the range of records when they are called.
Of `map_batches` only the results pass through the JVM. `counts` reads batch headers in the driver's process, and no
batch body.

Processes: the user's driver; the function of `map_batches` in executors' workers.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..config.uri import is_remote, local_path
from ..format.watermark import Mark
from ..log.reader import StartLike
from ..system.clock import SYSTEM
from ..topic import Topic
from .options import as_option, cores_of, parse, selecting
from .plan import Range
from .ranges import find_ranges, open_range

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from .archive_and_tail import Backfill

# A task of `map_batches` reads this in 0.2 s, and costs Spark 50 ms of CPU. Records that pass through the JVM take five
# times as long.
_TASK_BYTES = "512m"
_PACKAGE = __name__.partition(".")[0]
_UNPACKED = "loglib-archive"  # a directory in the working directory of each executor
# Spark lists more files than this by a job: 33 files took 0.95 s, and 32 took 0.1 s.
_LISTING = "spark.sql.sources.parallelPartitionDiscovery.threshold"
_DAEMON = "loglib_spark_daemon"  # in the archive: a copy of daemon.py, which imports nothing of loglib
_LAUNCHER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "python.sh")


def read(
    spark: SparkSession,
    topic: str | os.PathLike[str] | Topic,
    *,
    start: StartLike = "begin",
    end: StartLike = "end",
    columns: Iterable[str] | None = None,
    where: str | None = None,
    archive: str | os.PathLike[str] | None = None,
) -> DataFrame:
    """The records of a topic as a DataFrame, with only the requested columns.

    `start` and `end` are as in `Topic.read`. Spark reads all columns of the DataFrame for any query, so a
    query with few `columns` is faster; see docs/spark.md. With `where`, a condition such as
    `timestamp >= '-15m' AND key IN ('a', 'b')`, the other records do not get to Spark at all. It raises `ValueError` if
    it is anything but conditions on these two columns, joined by AND.

    With `archive`, a directory of `loglib.offload.archive`, the records up to the end of the archive come from its
    Parquet files, by Spark's own reader, and all later ones from the log. With a place of `loglib.offload.tier`, a
    directory or a URI, they come from its segments. The range of the table is fixed by this call. Raises
    `FileNotFoundError` if there is no archive, `LogError` if it is another topic's, and `OffsetOutOfRangeError` if
    retention has dropped records that are not in the archive.
    """
    if archive is not None:
        from .archive_and_tail import past_and_tail

        return past_and_tail(spark, path_of(topic), archive, start=start, end=end, columns=columns, where=where).table
    given = {**cores_of(spark), **selecting(columns, where), "start": as_option(start), "end": as_option(end)}
    return spark.read.format("loglib").options(**given).load(path_of(topic))


def backfill(
    spark: SparkSession,
    topic: str | os.PathLike[str] | Topic,
    *,
    archive: str | os.PathLike[str],
    start: StartLike = "begin",
    columns: Iterable[str] | None = None,
    where: str | None = None,
) -> Backfill:
    """All records of a topic and its archive up to now, and the offsets where later records begin.

    `.table` is a DataFrame as from `read`. A stream that begins at `.ends` continues without a gap and without a
    repetition: `spark.readStream.format("loglib").option("start", json.dumps(ends))`. Raises the errors of `read`.
    """
    from .archive_and_tail import past_and_tail

    return past_and_tail(spark, path_of(topic), archive, start=start, end="end", columns=columns, where=where)


def counts(
    topic: str | os.PathLike[str] | Topic, *, start: StartLike = "begin", end: StartLike = "end"
) -> dict[int, int]:
    """The number of records in each partition of a topic, from the headers of its batches.

    `start` and `end` are as in `Topic.read`. This needs no Spark session. Bodies are not read, so their damage is not
    noticed; a damaged header raises `CorruptLogError`. `ValueError` if the path is a directory of several topics.
    """
    path = path_of(topic)
    options = parse({"path": path, "start": as_option(start), "end": as_option(end)}, now_us=SYSTEM())
    ranges = find_ranges(options)
    names = sorted({each.part.topic for each in ranges})
    if len(names) > 1:
        raise ValueError(f"{path} is a directory of topics ({', '.join(names)}); count each by its own path")
    return {each.part.partition: _count(each) for each in ranges}


def _count(range_: Range) -> int:
    if not range_.size_bytes:
        return 0
    count, planned = 0, Mark.at_rest(0, 0, range_.flushed_end, range_.flushed_tail)
    with closing(open_range(range_)) as log:
        for header in log.headers(range_.start_position, range_.end_offset, planned):
            first, stop = header.offsets.start, header.offsets.stop
            count += max(0, min(stop, range_.end_offset) - max(first, range_.start_offset))
    return count


def map_batches(
    spark: SparkSession,
    topic: str | os.PathLike[str] | Topic,
    fn: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    schema: StructType | str,
    *,
    start: StartLike = "begin",
    end: StartLike = "end",
    columns: Iterable[str] | None = None,
    where: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """A DataFrame of the results of `fn` for the topic's records. Only the results pass through the JVM.

    Spark calls `fn` once per task with an iterator of the task's Arrow batches, as `DataFrame.mapInArrow` does. It
    returns batches of `schema`. A task reads a range of one partition, or several ranges of small partitions, one after
    the other. So `fn` may filter, convert, or make partial sums, which Spark adds up.

    `start` and `end` are as in `Topic.read`. `columns` are all but `headers` by default; `where` is as in `read`: `fn`
    gets only these records. `options` are further options of the data source, such as
    `{"minPartitions": "8", "onGap": "skip"}`; `maxBytesPerPartition` is 512 MiB by default. The range is fixed by this
    call.
    """
    from .source import BatchReader, schema_of

    given = {"maxBytesPerPartition": _TASK_BYTES, **cores_of(spark), **(options or {})}
    given |= {"path": path_of(topic), "start": as_option(start), "end": as_option(end), **selecting(columns, where)}
    reader = BatchReader(given, schema_of(given))
    tasks = reader.partitions()

    def run(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from fn(reader.read(tasks[number]))

    return spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(run, schema)


def activate(spark: SparkSession) -> None:
    """Let the present thread write topics with this session; call it once in each thread that you start.

    PySpark looks for the format in the session that is active in the thread, and in a thread other than the first one
    none is. A write then raises `[DATA_SOURCE_NOT_FOUND]`. For the threads of a pool:
    `ThreadPoolExecutor(initializer=loglib.spark.activate, initargs=(spark,))`. With Spark Connect this does nothing.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(spark._jsparkSession)  # noqa: SLF001  # as in createDataFrame


def path_of(topic: str | os.PathLike[str] | Topic) -> str:
    """The absolute path, or the URI, of a topic that is given by a path, a URI or a handle."""
    if isinstance(topic, Topic):
        return topic._parts.opened_by[0]  # noqa: SLF001
    path = os.fspath(topic)
    return path if is_remote(path) else os.path.abspath(local_path(path))


# --- the environment of a session --------------------------------------------------------------------


def configure(builder: SparkSession.Builder, *, archive: str | os.PathLike[str] | None = None) -> SparkSession.Builder:
    """Let Spark find loglib, and make its Python tasks faster. Call this before `getOrCreate()`.

    Spark starts `python3` for its workers. If the virtual environment is not activated, that interpreter has no
    loglib, and Spark raises `[DATA_SOURCE_NOT_FOUND]`. So this call sets the current interpreter in
    PYSPARK_DRIVER_PYTHON and PYSPARK_PYTHON. With the master of a cluster it puts the interpreter's directory first
    on the PATH instead, because the interpreter's path may not exist on another host. A variable that is already set
    stays. Unix domain sockets between the JVM and its Python workers save about 30 ms per task.

    With a local master the interpreter is started through the script `loglib/spark/python.sh`: Spark's Python workers
    then start faster, and end without a traceback when the JVM closes their socket. To avoid this script, set both
    variables to `sys.executable` before this call.

    `archive` is the path of the file that `make spark-archive` writes. Spark sends it to the executors of a cluster,
    whose Python then needs PySpark and nothing of loglib. A local master ignores it.

    Raises `ValueError` if PYSPARK_PYTHON of a cluster does not exist on this host, and `FileNotFoundError` if the
    archive does not.
    """
    options: dict[str, object] = getattr(builder, "_options", {})
    master = str(options.get("spark.master", ""))
    if master and not master.startswith("local"):
        _use_python_of_cluster()
    else:
        interpreter = sys.executable
        if master and os.access(_LAUNCHER, os.X_OK) and not _has_jvm():
            os.environ["LOGLIB_SPARK_PYTHON"] = sys.executable
            interpreter = _LAUNCHER
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", interpreter)
        os.environ.setdefault("PYSPARK_PYTHON", interpreter)
    if archive is not None and (not master.startswith("local") or master.startswith("local-cluster")):
        _send(builder, os.path.abspath(archive), options)
    if _LISTING not in options:
        builder.config(_LISTING, "10000")
    return builder.config("spark.python.unix.domain.socket.enabled", "true")


def _use_python_of_cluster() -> None:
    """Let planning, on this host, and reading, on executors, find a Python by the same name.

    PySpark 4.3 starts both with PYSPARK_DRIVER_PYTHON, or else with PYSPARK_PYTHON, or else with `python3`.
    """
    if "PYSPARK_DRIVER_PYTHON" in os.environ:
        return
    python = os.environ.get("PYSPARK_PYTHON")
    if python is None:
        _prepend("PATH", os.path.dirname(sys.executable))
        return
    if os.path.isabs(python) and not os.access(python, os.X_OK):
        raise ValueError(
            f"PYSPARK_PYTHON is {python}, and this host has no such program: PySpark plans with it here, and reads "
            "with it on the executors; give a path or a name that both have, or set PYSPARK_DRIVER_PYTHON"
        )
    for module in (_PACKAGE, "fastcrc", "sortedcontainers"):  # the interpreter may lack them, as those of executors
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            _append("PYTHONPATH", os.path.dirname(os.path.dirname(spec.origin)))


def _prepend(variable: str, directory: str) -> None:
    entries = [each for each in os.environ.get(variable, "").split(os.pathsep) if each != directory]
    os.environ[variable] = os.pathsep.join([directory, *entries])


def _append(variable: str, directory: str) -> None:
    entries = [each for each in os.environ.get(variable, "").split(os.pathsep) if each]
    if directory not in entries:
        os.environ[variable] = os.pathsep.join([*entries, directory])


def _send(builder: SparkSession.Builder, archive: str, options: Mapping[str, object]) -> None:
    """Let Spark unpack the archive in each executor's directory, and its Python workers import from there."""
    if not os.access(archive, os.R_OK):
        raise FileNotFoundError(errno.ENOENT, "no archive; make it with `make spark-archive`", archive)
    path = options.get("spark.executorEnv.PYTHONPATH")
    archives = options.get("spark.archives")
    builder.config("spark.archives", f"{archives},{archive}#{_UNPACKED}" if archives else f"{archive}#{_UNPACKED}")
    builder.config("spark.executorEnv.PYTHONPATH", f"{_UNPACKED}:{path}" if path else _UNPACKED)
    builder.config("spark.python.daemon.module", _DAEMON)


def _has_jvm() -> bool:
    """True if a JVM is running already. It has the environment variables of its start, not the current ones."""
    context = sys.modules.get("pyspark.core.context")  # not imported here: PySpark's Connect client does not have it
    started = getattr(getattr(context, "SparkContext", None), "_gateway", None) is not None
    return started or "PYSPARK_GATEWAY_PORT" in os.environ
