#!/bin/sh
# The Python interpreter of loglib.spark.configure, for Spark's workers: `python -m pyspark.daemon` runs daemon.py, and
# everything else runs as with the interpreter itself. Spark itself offers no such choice for all of its daemons.
if [ "${1:-} ${2:-}" = "-m pyspark.daemon" ]; then
    shift 2
    exec "${LOGLIB_SPARK_PYTHON:-python3}" "${0%/*}/daemon.py" "$@"
fi
exec "${LOGLIB_SPARK_PYTHON:-python3}" "$@"
