"""Lets Spark find the data source: PySpark imports every top-level module named `pyspark_*` and
registers its `DefaultSource`, so that `spark.read.format("loglib")` needs no register call.

Every session pays for this import, whether it reads logs or not, and one module that raises costs
all of them their formats. So nothing here can fail, and loglib itself is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from pyspark.sql.datasource import DataSource
except ImportError:  # no PySpark, or one before 4.0: nobody to offer the format to
    __all__ = []
else:
    if TYPE_CHECKING:
        from pyspark.sql.datasource import DataSourceReader
        from pyspark.sql.types import StructType

    __all__ = ["DefaultSource"]

    class DefaultSource(DataSource):
        """The format "loglib"; see docs/spark.md."""

        @classmethod
        def name(cls) -> str:
            return "loglib"

        def schema(self) -> StructType:
            from loglib.spark.source import schema_of

            return schema_of(self.options)

        def reader(self, schema: StructType) -> DataSourceReader:
            from loglib.spark.source import BatchReader

            return BatchReader(self.options, schema)
