#!/bin/sh
# The Python interpreter of loglib.spark.configure, for Spark's workers: `python -m pyspark.daemon` and the other modules
# of PySpark are run by spark/daemon.py, and everything else runs as with the interpreter itself. Spark itself offers no such
# choice for all of its Python processes.
case "${1:-} ${2:-}" in
"-m pyspark.daemon")
    shift 2
    exec "${LOGLIB_SPARK_PYTHON:-python3}" "${0%/*}/daemon.py" "$@"
    ;;
"-m pyspark."*)
    exec "${LOGLIB_SPARK_PYTHON:-python3}" "${0%/*}/daemon.py" "$@"
    ;;
esac
exec "${LOGLIB_SPARK_PYTHON:-python3}" "$@"
