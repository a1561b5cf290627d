"""Session: read a topic from a Spark session, and configure a session for loglib.

Processes: the user's driver.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ..arguments import Start
from ..config import microseconds
from ..reader import StartLike
from ..topic import Topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["configure", "read"]

_LAUNCHER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "python.sh")


def read(
    spark: SparkSession,
    topic: str | os.PathLike[str] | Topic,
    *,
    start: StartLike = "begin",
    end: StartLike = "end",
    columns: Iterable[str] | None = None,
) -> DataFrame:
    """The records of a topic as a DataFrame, with only the requested columns.

    `start` and `end` are as in `Topic.read`. Spark reads all columns of the DataFrame for any query, so a
    query with few `columns` is faster; see docs/spark.md.
    """
    path = topic.path if isinstance(topic, Topic) else os.path.abspath(os.fspath(topic))
    reader = spark.read.format("loglib").option("start", _text(start)).option("end", _text(end))
    if columns is not None:
        reader = reader.option("columns", ",".join(columns))
    return reader.load(path)


def configure(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Let Spark find loglib, and make its Python tasks faster. Call this before `getOrCreate()`.

    Spark starts `python3` for its workers. If the virtual environment is not activated, that interpreter has no
    loglib, and Spark raises `[DATA_SOURCE_NOT_FOUND]`. So this call sets the current interpreter in
    PYSPARK_DRIVER_PYTHON. With a local master, or without a master so far, it also sets PYSPARK_PYTHON. A variable
    that is already set stays. Unix domain sockets between the JVM and its Python workers save about 30 ms per task.

    With a local master the interpreter is started through the script `loglib/spark/python.sh`. Spark's Python workers
    then import PySpark in a third of the time, and end without a traceback when the JVM closes their socket. To
    avoid this script, set both variables to `sys.executable` before this call.
    """
    interpreter = sys.executable
    master = str(getattr(builder, "_options", {}).get("spark.master", ""))
    if master.startswith("local") and os.access(_LAUNCHER, os.X_OK) and not _has_jvm():
        os.environ["LOGLIB_SPARK_PYTHON"] = sys.executable
        interpreter = _LAUNCHER
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", interpreter)
    if not master or master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", interpreter)  # on a cluster the path may not exist
    return builder.config("spark.python.unix.domain.socket.enabled", "true")


def _has_jvm() -> bool:
    """Whether a JVM is running already. It has the environment variables of its start, not the current ones."""
    context = sys.modules.get("pyspark.core.context")  # not imported here: PySpark's Connect client does not have it
    started = getattr(getattr(context, "SparkContext", None), "_gateway", None) is not None
    return started or "PYSPARK_GATEWAY_PORT" in os.environ


def _text(start: StartLike) -> str:
    if isinstance(start, Mapping):
        return json.dumps({str(partition): _start_text(each) for partition, each in start.items()})
    return _start_text(start)


def _start_text(start: Start) -> str:
    if isinstance(start, timedelta):
        return f"-{abs(microseconds(start))}us"
    return start.isoformat() if isinstance(start, datetime) else str(start)
