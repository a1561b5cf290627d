"""Records as JSON lines and as CSV: what is written comes back, and what is not a record is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loglib import Record
from loglib.cli.record_lines import CSV_HEAD, CsvRows, Row, from_json, to_csv, to_json

HOSTILE = [
    b"", b'"', b'""', b",", b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"null", b'{"value": null}', b"[1]",
    b"a,b", b'say "a"', b" spaces ", "žluťoučký \u2028 \U0001f600".encode(), b"\x1b[31m", b"x\r", b"\\u0000",
    b"\xed\xa0\x80",
]  # fmt: skip
CONTENT = st.none() | st.sampled_from(HOSTILE) | st.binary(max_size=20) | st.text(max_size=20).map(
    lambda text: text.encode(errors="surrogatepass")
)  # fmt: skip
HEADERS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), CONTENT.map(lambda it: it or b"")
    ),
    max_size=3,
).map(tuple)  # fmt: skip
RECORDS = st.builds(
    Record, st.integers(0, 9), st.integers(0, 1 << 60), st.integers(-(1 << 63), (1 << 63) - 1), CONTENT, CONTENT,
    HEADERS, st.just(1),
)  # fmt: skip


def row_of(record: Record) -> Row:
    return Row(record.value, record.key, record.timestamp, record.headers, record.partition)


def csv_rows(text: bytes, limit_bytes: int = 1 << 30) -> list[Row]:
    made = CsvRows(limit_bytes)
    rows = [made.row(line) for line in text.split(b"\n")]
    assert not made.open_lines
    return [row for row in rows if row is not None]


@given(RECORDS)
def test_record_comes_back_from_a_line_of_json(record: Record) -> None:
    line = to_json(record)
    assert b"\n" not in line and from_json(line) == row_of(record)


@given(st.lists(RECORDS, max_size=5))
def test_records_come_back_from_csv(records: list[Record]) -> None:
    text = CSV_HEAD + b"".join(to_csv(each) + b"\n" for each in records)
    assert csv_rows(text) == [row_of(each) for each in records]


def test_csv_of_others_may_have_some_columns_in_any_order_and_ends_of_windows() -> None:
    assert csv_rows(b'value,key\r\na,"b"\r\n,""\r\n"x\r\ny",\r\n\r\n"",k') == [
        Row(b"a", b"b", None, (), None), Row(None, b"", None, (), None), Row(b"x\r\ny", None, None, (), None),
        Row(b"", b"k", None, (), None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"plain", "not JSON: Expecting value at letter 1"), (b"[1]", "not a JSON object"),
        (b"\xff", "byte 1 is not UTF-8"),
        (b'{"key": "a"}', "no field value"), (b'{"value": 1}', "value must be text or null, not 1"),
        (b'{"value": {"a": 1}}', "a text may contain JSON"), (b'{"value": "a", "value": "b"}', "there twice"),
        (b'{"value": "a", "value_base64": "YQ=="}', "give one of them"), (b'{"value_base64": "Y"}', "not base64"),
        (b'{"value_base64": "YQ==\\n"}', "not base64"), (b'{"value_base64": 5}', "not base64"),
        (b'{"valu": "a"}', r"unknown fields valu \(is value meant\?\); the known"),
        (b'{"value": NaN}', "NaN is not JSON"), (b'{"value": "a", "timestamp_us": 1.0}', "whole number"),
        (b'{"value": "a", "timestamp_us": true}', "whole number"),
        (b'{"value": "a", "timestamp_us": 9223372036854775808}', "whole number"),
        (b'{"value": "a", "partition": -1}', "whole number"), (b'{"value": "\\ud800"}', "half of a surrogate pair"),
        (b'{"value": "a", "headers": {}}', "must be a list"), (b'{"value": "a", "headers": [1]}', "must be an object"),
        (b'{"value": "a", "headers": [{"name": "n"}]}', "needs a name and a value"),
        (b'{"value": "a", "headers": [{"name": "n", "value": "1", "more": 1}]}', "must be an object"),
        (b"[" * 100_000, "nests too deep"), (b'{"value": ' + b"9" * 5000 + b"}", "digits|not JSON"),
    ],
)  # fmt: skip
def test_line_that_is_no_record_is_named(line: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        from_json(line)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"id,name\n1,a", "unknown fields id, name;.*`loglib sql` makes JSON of other columns"),
        (b"valeu\na", r"is value meant"),
        (b"key\na", "value is none of key"),
        (b"value,value\na,b", "a column is there twice"), (b"value,key\na", "1 cells for 2 columns"),
        (b'value\na"b"', "has a quote but does not begin"), (b'value\n"a"b', "comes no comma"),
        (b'value,value_base64\n"",YQ==', "give one of them"), (b"value_base64\nY", "not base64"),
        (b"value,timestamp_us\na,x", "whole number"), (b"value,timestamp_us\na,9223372036854775808", "whole number"),
        (b"value,headers\na,1", "must be a list"), (b"value,headers\na,{", "not JSON"),
        (b'value\n"' + b"a" * 99, "is a quote"),
        (b"value,timestamp_us\na,\xc2\xb2", "whole number"),
    ],
)  # fmt: skip
def test_row_that_is_no_record_is_named(text: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        csv_rows(text, 50)
