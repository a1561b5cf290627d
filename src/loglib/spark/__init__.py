"""Read topics with PySpark: `spark.read.format("loglib").load(path)` (docs/spark.md), or as streams with
`spark.readStream` (docs/spark-streaming.md).

Spark finds the format through the module `pyspark_loglib`. This package needs the extra [spark]; the core
does not import it.
"""

from .repetition import Repetition, repetitions
from .session import activate, backfill, configure, counts, map_batches, read

__all__ = ["Repetition", "activate", "backfill", "configure", "counts", "map_batches", "read", "repetitions"]
