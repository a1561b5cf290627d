"""Reading topics with PySpark: `spark.read.format("loglib").load(path)`; see docs/spark.md.

Spark finds the format by itself through the module `pyspark_loglib`. This package needs the extra
[spark]; nothing in the core imports it.
"""

from .session import configure, read

__all__ = ["configure", "read"]
