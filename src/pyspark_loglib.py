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
        from typing import Any

        from pyspark.sql.datasource import (
            DataSourceReader,
            DataSourceStreamReader,
            DataSourceStreamWriter,
            DataSourceWriter,
        )
        from pyspark.sql.types import StructType

    __all__ = ["DefaultSource"]

    class DefaultSource(DataSource):
        """The format "loglib"; see docs/spark.md."""

        @classmethod
        def name(cls) -> str:
            return "loglib"

        def __reduce__(self) -> tuple[Any, ...]:
            from loglib.spark.pickling import by_value

            return by_value(__name__, "DefaultSource", dict(self.options))

        def schema(self) -> StructType:
            from loglib.spark.source import schema_of

            return schema_of(self.options)

        def reader(self, schema: StructType) -> DataSourceReader:
            from loglib.spark.source import BatchReader

            return BatchReader(self.options, schema)

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:
            from loglib.spark.stream import reader_of

            return reader_of(self.options, schema)

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            from loglib.spark.sink import BatchWriter

            return BatchWriter(self.options, schema, overwrite)

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
            from loglib.spark.sink import StreamWriter

            return StreamWriter(self.options, schema, overwrite)
