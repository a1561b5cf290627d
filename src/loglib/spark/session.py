"""Session: short ways to read a topic from a Spark session and to set one up for it.

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
    """The records of a topic as a DataFrame, with only the columns that are asked for.

    `start` and `end` are what `Topic.read` takes. Spark reads all columns whatever the query uses,
    so naming them pays; see docs/spark.md.
    """
    path = topic.path if isinstance(topic, Topic) else os.path.abspath(os.fspath(topic))
    reader = spark.read.format("loglib").option("start", _text(start)).option("end", _text(end))
    if columns is not None:
        reader = reader.option("columns", ",".join(columns))
    return reader.load(path)


def configure(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Set what Spark needs to find loglib, and what makes its Python tasks quick, before `getOrCreate()`.

    Spark starts `python3` for its work, which has no loglib where the virtual environment is not activated:
    `[DATA_SOURCE_NOT_FOUND]`. So this interpreter is set in PYSPARK_DRIVER_PYTHON, and with a local master, or
    none chosen yet, in PYSPARK_PYTHON too; what is set already stays. Unix domain sockets between the JVM and its
    Python workers take some 30 ms off each task.

    With a local master, the interpreter is started through the script `loglib/spark/python.sh`. Spark's Python workers
    then import PySpark in a third of the time, and end without a traceback when the JVM closes their socket. Set
    both variables to `sys.executable` before this call to do without.
    """
    interpreter = sys.executable
    master = str(getattr(builder, "_options", {}).get("spark.master", ""))
    if master.startswith("local") and os.access(_LAUNCHER, os.X_OK) and not _has_jvm():
        os.environ["LOGLIB_SPARK_PYTHON"] = sys.executable
        interpreter = _LAUNCHER
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", interpreter)
    if not master or master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", interpreter)  # on a cluster the path may lead nowhere
    return builder.config("spark.python.unix.domain.socket.enabled", "true")


def _has_jvm() -> bool:
    """Whether there is a JVM already. It has the environment variables of its start, not those that are set now."""
    context = sys.modules.get("pyspark.core.context")  # not imported here: PySpark's client for Connect has none
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
