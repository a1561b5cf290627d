"""Read topics with PySpark: `spark.read.format("loglib").load(path)`; see docs/spark.md.

Spark finds the format through the module `pyspark_loglib`. This package needs the extra [spark]; the core
does not import it.
"""

from .session import configure, read

__all__ = ["configure", "read"]
