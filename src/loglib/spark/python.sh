#!/bin/sh
# The Python of Spark's workers (loglib.spark.configure): modules of PySpark are run by daemon.py, and all else as usual.
# Spark has no other setting for all of its Python processes.
case "${1:-} ${2:-}" in
"-m pyspark.daemon") shift 2 && set -- "${0%/*}/daemon.py" "$@" ;;
"-m pyspark."*) set -- "${0%/*}/daemon.py" "$@" ;;
esac
exec "${LOGLIB_SPARK_PYTHON:-python3}" "$@"
