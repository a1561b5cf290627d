"""Conditions of --where: the grammar exactly, and values that are no JSON."""

import json
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loglib.format.json_condition import parse_condition

VALUE = b'{"user": {"id": 7, "user id": 1}, "level": "error", "tags": ["a", "b"], "none": null, "yes": true, "n": -2.5}'


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('.user.id == 7', True), ('.user.id == 7.0', True), ('.user.id == 8', False), ('.user.id == "7"', False),
        ('.user.id != 8', True), ('.user.id != 7', False), ('.user.id != "7"', True),
        ('.level == "error"', True), ('.level == "\\u0065rror"', True), ('.level != "error"', False),
        ('.user.id < 8', True), ('.user.id <= 7', True), ('.user.id > 7', False), ('.user.id >= 7', True),
        ('.level < "f"', True), ('.level < 9', False), ('.tags < 9', False), ('.yes < 2', False),
        ('.n == -2.5', True), ('.n < -2', True), ('.n == -25e-1', True),
        ('.user', True), ('.nothing', False), ('.none', True), ('.none == null', True), ('.none != null', False),
        ('.nothing == null', False), ('.nothing != 1', False), ('not .nothing', True), ('not .nothing == 1', True),
        ('.yes == true', True), ('.yes == 1', False), ('.yes != 1', True), ('.yes == false', False),
        ('.tags[0] == "a"', True), ('.tags[-1] == "b"', True), ('.tags[2]', False), ('.tags[-3]', False),
        ('.tags.a', False), ('.user[0]', False), ('.level[0]', False), ('.level.length', False),
        ('.user."user id" == 1', True), ('.user["user id"] == 1', True), ('["level"] == "error"', True),
        ('.', True), ('. == 1', False), ('.[0]', False), ('.["level"]', True),
        ('.level == "error" and .user.id == 8', False), ('.level == "error" or .user.id == 8', True),
        ('.no or .level and .no', False), ('(.level or .no) and .user', True), ('not (.level and .no)', True),
        ('not not .level', True), ('not .no and .level', True), ('.level=="error"and .user.id==7', True),
    ],
)  # fmt: skip
def test_condition_holds_exactly_as_the_grammar_says(condition: str, holds: bool) -> None:
    assert parse_condition(condition)(VALUE) is holds


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("", "at its end: expected a path"), ("user == 7", "at letter 1: expected a path"),
        ("user == 7", ".user.id; write .user"), (".a or b", "; write .b"),
        (".user = 7", "letter 7: '=' cannot be here; write =="), (".a && .b", "write and"), (".a == 'b'", 'write "'),
        (".a ==", "at its end: expected a number"), (".a == b", "letter 7: expected a number"),
        (".a == .b", "expected a number"), (".a .b c", "expected the end"), (".a == 07", "cannot be here"),
        (".a[", "expected an index"), (".a[1.5]", "expected an index"), (".a[0", "expected `]`"),
        ("(.a", "expected `)`"),
        (".a and", "expected a path"), (".a == 1 == 2", "expected the end"), (".a < null", "have an order"),
        ("..a", "expected a name"), (".a.", "expected a name"), ('.a == "b', "cannot be here"),
        ('.a == "\\x"', "is not JSON"), ('."\\q" == 1', "is not JSON"), ('.["\\q"] == 1', "is not JSON"),
        (".a == " + "9" * 5000, "is not JSON"), ("(" * 60 + ".a", "more than 50"),
        ("not " * 60 + ".a", "more than 50"), ("__import__('os')", "expected a path"), (". a == 1", "expected"),
    ],
)  # fmt: skip
def test_mistake_is_named_with_its_place(condition: str, problem: str) -> None:
    with pytest.raises(ValueError, match="the condition") as raised:
        parse_condition(condition)
    assert problem in str(raised.value)


@pytest.mark.parametrize("condition", ["value.user == 7", "not and", "true == .a"])
def test_word_that_is_no_field_is_not_proposed_as_a_path(condition: str) -> None:
    with pytest.raises(ValueError, match=r"expected a path in the value, such as \.user\.id$"):
        parse_condition(condition)


@pytest.mark.parametrize(
    "value",
    [
        None, b"", b"{", b"plain", b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000, b"9" * 5000,
        json.dumps({"a": 1}).encode("utf-16"), b"\xef\xbb\xbf{}", b'{"a": 1} {"a": 1}', b'{"a": \x01}', b"'a'",
    ],
    ids=lambda value: repr(value)[:12],
)  # fmt: skip
def test_value_that_is_no_json_fulfils_no_condition(value: bytes | None) -> None:
    for condition in (".", "not .", ".a", "not .a", ".a != 1", "not .a == 1"):
        assert parse_condition(condition)(value) is False


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, -1.0, 1.0]) | st.sampled_from("ab")
KINDS: dict[type, str] = {int: "number", float: "number", str: "text"}


@given(SCALARS, SCALARS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]))
def test_two_scalars_compare_by_kind_and_then_as_in_python(found: Any, literal: Any, sign: str) -> None:
    kinds = KINDS.get(type(found)), KINDS.get(type(literal))
    if sign in ("==", "!="):
        same = found == literal if None not in kinds else found is literal
        expected = (same and kinds[0] == kinds[1]) == (sign == "==")
    else:
        if kinds[1] is None:
            return
        compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[sign]
        expected = kinds[0] == kinds[1] and compare(found, literal)
    condition = f".a {sign} {json.dumps(literal)}"
    assert parse_condition(condition)(json.dumps({"a": found}).encode()) is expected
