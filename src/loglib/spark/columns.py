"""Columns: the names and types of the columns of a query, for Spark and for Arrow.

Invariant: an Arrow schema that is made here equals Spark's translation of the Spark schema, in names, order,
types and nullability. Spark checks the schema of the first batch and trusts the other batches.

    name           type                               content
    key            binary, or string on request       null if the record has no key
    value          binary, or string on request       null if the record's value is null
    topic          string                             the name of its directory
    partition      int
    offset         long                               rises within a partition; not consecutive
    timestamp      timestamp                          the event time, in microseconds
    timestampType  int                                always 0, Kafka's CreateTime
    headers        array<struct<key string,           null if there are none; by default only
                     value binary>>                   with includeHeaders

Case does not matter in names, as in Spark, and a column has its name as the user wrote it.

Processes: pure; driver and executors.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from .options import Options, nearest

_HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_ARROW_HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
_TYPES: dict[str, tuple[DataType, pa.DataType]] = {
    "key": (BinaryType(), pa.binary()),
    "value": (BinaryType(), pa.binary()),
    "topic": (StringType(), pa.string()),
    "partition": (IntegerType(), pa.int32()),
    "offset": (LongType(), pa.int64()),
    "timestamp": (TimestampType(), pa.timestamp("us", tz="UTC")),
    "timestampType": (IntegerType(), pa.int32()),
    "headers": (_HEADERS, _ARROW_HEADERS),
}
_FOLDED = {name.lower(): name for name in _TYPES}
_MAY_BE_TEXT = ("key", "value")


def default_schema(options: Options) -> StructType:
    """The schema of a query whose user gives none: the option `columns`, or Kafka's schema."""
    names: Iterable[str] = options.columns or [name for name in _TYPES if name != "headers" or options.include_headers]
    return StructType([StructField(name, _TYPES[known_name(name)][0]) for name in names])


def arrow_schema(schema: StructType, options: Options) -> pa.Schema:
    """The Arrow schema of a query, whose schema may be the user's.

    `ValueError` for an unknown column or type, and if the options ask for other columns than the schema.
    """
    names, columns = [known_name(field.name) for field in schema.fields], options.columns
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"column {schema.fields[index].name} is there twice")
    arrow = pa.schema([_arrow_field(field) for field in schema.fields])
    if columns is not None and [name.lower() for name in columns] != [name.lower() for name in names]:
        raise ValueError(f"the option columns ({', '.join(columns)}) and schema() differ; give one of them")
    if options.include_headers and "headers" not in names:
        raise ValueError(
            f"option includeHeaders asks for headers, and schema() ({', '.join(schema.names)}) has none; "
            "add headers to the schema, or leave out includeHeaders"
        )
    return arrow


def _arrow_field(field: StructField) -> pa.Field:
    name = known_name(field.name)
    if isinstance(field.dataType, StringType) and name in _MAY_BE_TEXT:
        return pa.field(field.name, pa.string(), nullable=field.nullable)
    spark_type, arrow_type = _TYPES[name]
    if field.dataType != spark_type:
        other = " or string" if name in _MAY_BE_TEXT else ""
        has = f"{spark_type.simpleString()}{other}"
        raise ValueError(f"column {field.name} is {has}, not {field.dataType.simpleString()}; cast it in the query")
    return pa.field(field.name, arrow_type, nullable=field.nullable)


def known_name(name: str) -> str:
    """The name of the column as in the table above. `ValueError` if there is no such column."""
    known = _FOLDED.get(name.lower())
    if known is None:
        raise ValueError(f"no column {name}; {nearest(name.lower(), _FOLDED)}")
    return known
