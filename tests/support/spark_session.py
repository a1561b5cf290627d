"""A Spark session for tests: two slots, and a time zone that is not UTC."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import loglib.spark

TIME_ZONE = "America/St_Johns"  # half an hour off the others, with summer time


@contextmanager
def local_session(warehouse: Path, master: str = "local[2]") -> Iterator[SparkSession]:
    """The session; it stops at the end."""
    environment = {"SPARK_LOCAL_IP": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        builder = SparkSession.builder.master(master).appName("loglib tests")
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.session.timeZone": TIME_ZONE,
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(warehouse),
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = loglib.spark.configure(builder).getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()
