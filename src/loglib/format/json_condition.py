"""JSON condition: a condition on values that are JSON, such as `.user.id == 7 and not .level == "debug"`.

Invariant: a condition is parsed by the grammar below, and nothing is evaluated as code. It is true or false for each
value, and never raises: a value that is no JSON in UTF-8, or that nests too deep, makes every condition false.

    condition   all-of { "or" all-of }
    all-of      one-of { "and" one-of }
    one-of      "not" one-of | "(" condition ")" | test
    test        path [ operator literal ]
    path        "." | step { step }                   "." is the whole value
    step        "." name | "." string | "[" integer "]" | "[" string "]"
    operator    "==" | "!=" | "<" | "<=" | ">" | ">="
    literal     a string, a number, true, false or null, as in JSON
    name        letters, digits and underscores; a digit is not the first

A path without an operator is true if the value has that place, also if null is there. A test of a place that the value
does not have is false, for every operator. Values of different types differ (`1` and `"1"`, `1` and `true`), and only
two numbers, or two strings, have an order. A negative number counts from the end of a list.

Threads: pure functions.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

Condition = Callable[[Any], bool]  # of a decoded value

_MOST_NESTED = 50  # "not" and parentheses in each other
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\\x00-\x1f]|\\.)*")
        |(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.]))
        |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
        |(?P<operator>==|!=|<=|>=|<|>)
        |(?P<mark>[.\[\]()]))""",
    re.VERBOSE,
)
_CONSTANTS = {"true": True, "false": False, "null": None}
_NO_FIELDS = {*_CONSTANTS, "and", "or", "not", "value"}  # words that begin no path
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_NOTHING = object()  # the value does not have the place
_OTHER_SIGNS = {"=": "==", "&": "and", "|": "or", "!": "not", "'": '"'}
_NO_JSON = object()


class _Token(NamedTuple):
    kind: str  # "string", "number", "name", "operator", "mark", or "end"
    text: str
    at: int  # where it begins in the condition


def parse_condition(text: str) -> Callable[[bytes | None], bool]:
    """The condition as a function of a value. `ValueError` with the place of the mistake if the text is none."""
    parser = _Parser(text)
    condition = parser.condition(0)
    parser.expect("end", "", "the end, `and` or `or`")

    def holds(value: bytes | None) -> bool:
        decoded = _decoded(value)
        return decoded is not _NO_JSON and condition(decoded)

    return holds


def _decoded(value: bytes | None) -> Any:
    """The value of a JSON text; `_NO_JSON` for anything else."""
    if value is None:
        return _NO_JSON
    try:
        return json.loads(value.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of thousands of digits, or nested too deep
        return _NO_JSON


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class _Parser:
    """Reads a condition from left to right, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._next = self._read()

    def condition(self, depth: int) -> Condition:
        parts = [self._all_of(depth)]
        while self._takes("name", "or"):
            parts.append(self._all_of(depth))
        return parts[0] if len(parts) == 1 else lambda value: any(each(value) for each in parts)

    def _all_of(self, depth: int) -> Condition:
        parts = [self._one_of(depth)]
        while self._takes("name", "and"):
            parts.append(self._one_of(depth))
        return parts[0] if len(parts) == 1 else lambda value: all(each(value) for each in parts)

    def _one_of(self, depth: int) -> Condition:
        if depth > _MOST_NESTED:
            self._fail(f"more than {_MOST_NESTED} parentheses and `not` in each other")
        if self._takes("name", "not"):
            inner = self._one_of(depth + 1)
            return lambda value: not inner(value)
        if self._takes("mark", "("):
            inner = self.condition(depth + 1)
            self.expect("mark", ")", "`)`")
            return inner
        return self._test()

    def _test(self) -> Condition:
        path = self._path()
        if self._next.kind != "operator":
            return lambda value: _at(value, path) is not _NOTHING
        sign = self._take().text
        literal = self._literal()
        if sign == "==":
            return lambda value: _is_equal(_at(value, path), literal)
        if sign == "!=":
            return lambda value: (found := _at(value, path)) is not _NOTHING and not _is_equal(found, literal)
        compare = _OPERATORS[sign]
        if _kind(literal) not in ("number", "text"):
            self._fail(f"only numbers and strings have an order: `{sign}` needs one")
        return lambda value: _kind(found := _at(value, path)) == _kind(literal) and compare(found, literal)

    def _path(self) -> list[str | int]:
        if self._next.text not in (".", "[") or self._next.kind != "mark":
            is_field = self._next.kind == "name" and self._next.text not in _NO_FIELDS
            hint = f"; write .{self._next.text}" if is_field else ""
            self._fail(f"expected a path in the value, such as .user.id{hint}")
        steps: list[str | int] = []
        begin = True
        while self._next.kind == "mark" and self._next.text in (".", "["):
            if self._takes("mark", "["):
                steps.append(self._index())
            else:
                dot = self._take()
                if self._next.kind == "string":
                    steps.append(self._json(self._take()))
                elif self._next.kind == "name" and self._next.at == dot.at + 1:
                    steps.append(self._take().text)
                elif not begin or self._next.text == ".":
                    self._fail('expected a name, or a string such as ."user id"')
            begin = False
        return steps

    def _index(self) -> str | int:
        token = self._take()
        step: str | int
        if token.kind == "string":
            step = self._json(token)
        elif token.kind == "number" and re.fullmatch(r"-?\d{1,18}", token.text):
            step = int(token.text)
        else:
            self._fail('expected an index such as [0], or a name such as ["user id"]', token)
        self.expect("mark", "]", "`]`")
        return step

    def _json(self, token: _Token) -> Any:
        try:
            return json.loads(token.text)
        except ValueError:  # an escape that JSON does not have, or thousands of digits
            self._fail(f"{token.text[:40]} is not JSON", token)

    def _literal(self) -> Any:
        token = self._take()
        if token.kind in ("string", "number"):
            return self._json(token)
        if token.kind == "name" and token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        return self._fail('expected a number, a string in double quotes, true, false or null', token)

    # --- tokens ------------------------------------------------------------------------------------------

    def expect(self, kind: str, text: str, wanted: str) -> None:
        """Take this token, or raise `ValueError`."""
        if not self._takes(kind, text):
            self._fail(f"expected {wanted}")

    def _takes(self, kind: str, text: str) -> bool:
        is_next = (self._next.kind, self._next.text) == (kind, text)
        if is_next:
            self._take()
        return is_next

    def _take(self) -> _Token:
        token, self._next = self._next, self._read() if self._next.kind != "end" else self._next
        return token

    def _read(self) -> _Token:
        rest = self._text[self._at :]
        if not rest.strip():
            return _Token("end", "", len(self._text))
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            at = self._at + len(rest) - len(rest.lstrip())
            sign = self._text[at]
            hint = f"; write {_OTHER_SIGNS[sign]}" if sign in _OTHER_SIGNS else ""
            raise ValueError(f"{_shown(self._text, at)}: {sign!r} cannot be here{hint}")
        self._at = found.end()
        kind = found.lastgroup or ""
        return _Token(kind, found[kind], found.start(kind))

    def _fail(self, why: str, token: _Token | None = None) -> NoReturn:
        raise ValueError(f"{_shown(self._text, (token or self._next).at)}: {why}")


def _shown(text: str, at: int) -> str:
    return f"the condition {text!r}, " + ("at its end" if at >= len(text) else f"at letter {at + 1}")


def _at(value: Any, path: list[str | int]) -> Any:
    """The place of a decoded value; `_NOTHING` if it does not have it."""
    for step in path:
        if isinstance(step, str):
            if not isinstance(value, dict) or step not in value:
                return _NOTHING
        elif not isinstance(value, list) or not -len(value) <= step < len(value):
            return _NOTHING
        value = value[step]
    return value


def _kind(value: Any) -> str:
    """The type of a value in JSON. In Python `True` is also a number."""
    match value:
        case None | True | False:
            return "constant"
        case int() | float():
            return "number"
        case str():
            return "text"
    return "other"


def _is_equal(found: Any, literal: Any) -> bool:
    if found is _NOTHING or _kind(found) != _kind(literal):
        return False
    return found is literal if _kind(literal) == "constant" else bool(found == literal)
