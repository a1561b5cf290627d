"""Lets Spark find the data source: PySpark imports every top-level module named `pyspark_*` and
registers its `DefaultSource`, so `spark.read.format("loglib")` works without a register call.

Spark guards these imports by nothing, so this module must never raise and cost next to nothing:
where the data source cannot be imported, it is simply not offered.
"""

try:
    from loglib.spark.source import LogSource as DefaultSource
except ImportError:
    pass
else:
    __all__ = ["DefaultSource"]
