"""Output: tables, JSON, text and progress as the command line prints them.

Invariant: text from a log is safe for a terminal. Control characters, also those of other alphabets than ASCII, are
printed as escapes, unless the user asks for raw output. Progress is drawn on standard error, and only if that is a
terminal. Rich is imported only then.
"""

from __future__ import annotations

import base64
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeVar

import click

from ..config.times import to_datetime
from ..format.display import sized
from ..format.record import Record
from ..system.clock import monotonic
from .ending import FAILED
from .streams import note

__all__ = [
    "Progress", "age", "bar", "bytes_fact", "is_terminal", "json_line", "listed_facts", "note",
    "print_each", "print_json", "print_rows", "print_table", "record_facts", "refused", "safe", "sized", "when",
]  # fmt: skip

T = TypeVar("T")
Progress = Callable[[int, int], object]  # called with the bytes that are done, and with all

_BAR_AFTER_S = 1.0  # of work
_UNITS = ((86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s"), (1_000, "ms"))


def is_terminal() -> bool:
    """True if standard output is a terminal."""
    return sys.stdout.isatty()


def safe(data: bytes | str | None) -> str:
    """The text in one line that a terminal can show. Bytes that are not UTF-8, and control characters, are escapes."""
    if data is None:
        return "null"
    text = data.decode(errors="surrogateescape") if isinstance(data, bytes) else data
    return text if text.isprintable() else "".join(map(_safe_character, text))


def _safe_character(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if character.isprintable() or unicodedata.category(character) == "Zs":  # a space of any width
        return character
    # A control character, one that reverses the direction of writing, a separator of lines, or an unassigned one.
    return character.encode("unicode_escape").decode()


def when(timestamp_us: int | None) -> str:
    """A time in UTC, to the millisecond."""
    if timestamp_us is None:
        return "-"
    try:
        return f"{to_datetime(timestamp_us):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    except OverflowError:
        return f"{timestamp_us} us"


def age(duration_us: float | None) -> str:
    """A duration in its largest unit and the next one: 3d 4h, 1m 5s, 250ms."""
    if duration_us is None:
        return "-"
    rest = round(duration_us)
    for at, (size, unit) in enumerate(_UNITS):
        if rest >= size:
            first = f"{rest // size}{unit}"
            smaller, name = _UNITS[at + 1] if at + 1 < len(_UNITS) - 1 else (0, "")
            second = rest % size // smaller if smaller else 0
            return f"{first} {second}{name}" if second else first
    return f"{rest}us" if rest else "0s"


def json_line(facts: Mapping[str, Any]) -> str:
    """The facts as a JSON object. On a terminal, characters that are not ASCII are escaped."""
    return json.dumps(facts, ensure_ascii=is_terminal(), default=str)


def print_json(facts: Mapping[str, Any]) -> None:
    """Print the facts as a line of JSON. What the output cannot encode, as in a path, is an escape of JSON."""
    line = json_line(facts)
    try:
        line.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        line = json.dumps(facts, default=str)
    click.echo(line)


def print_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with a heading. A column whose name begins with `>` is aligned to the right."""
    print_rows([name.upper() for name in names], rows, ())


def print_rows(
    names: Sequence[str], first: Iterable[Sequence[object]], more: Iterable[Sequence[object]]
) -> None:
    """Print a table whose first rows, together in memory, decide the widths of the columns."""
    right = [name.startswith(">") for name in names]
    table = [[safe(name.removeprefix(">")) for name in names]]
    table += [[safe(str(cell)) for cell in row] for row in first]
    widths = [max(len(row[column]) for row in table) for column in range(len(names))]
    for row in chain(table, ([safe(str(cell)) for cell in row] for row in more)):
        cells = [
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(row, widths, right, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def print_each(
    found: Iterable[T], facts: Callable[[T], Mapping[str, Any]], row: Callable[[T], Sequence[object]],
    names: Sequence[str], *, as_json: bool,
) -> None:  # fmt: skip
    """Print the facts of each thing as a line of JSON, or its row in a table with columns of these names."""
    if as_json:
        for each in found:
            print_json(facts(each))
    else:
        print_table(names, map(row, found))


def refused(path: str, held: Mapping[int, str]) -> int:
    """Print which partitions of a topic other processes hold, by number. Returns the exit code: 0 if there are none."""
    for number, holder in sorted(held.items()):
        note(f"loglib: {path}: partition {number} was left out: {holder} has it")
    return FAILED if held else 0


def listed_facts(found: Iterable[Any]) -> list[dict[str, Any]]:
    """The facts of named tuples whose field `offsets` is a range; for JSON, which has no ranges, it is a list."""
    return [
        each._asdict() | {"offsets": [each.offsets.start, each.offsets.stop] if each.offsets else None}
        for each in found
    ]  # fmt: skip


def record_facts(record: Record) -> dict[str, Any]:
    """The facts of a record for JSON. Bytes are text if they are UTF-8; otherwise their name ends with `_base64`."""
    facts: dict[str, Any] = {
        "partition": record.partition, "offset": record.offset, "timestamp_us": record.timestamp,
        **bytes_fact("key", record.key), **bytes_fact("value", record.value),
    }  # fmt: skip
    if record.headers:
        facts["headers"] = [{"name": name, **bytes_fact("value", value)} for name, value in record.headers]
    return facts


def bytes_fact(name: str, data: bytes | None) -> dict[str, str | None]:
    """The bytes as a fact for JSON: text, or base64 under a name that says it."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


@contextmanager
def bar(what: str) -> Iterator[Progress | None]:
    """Draw a progress bar of bytes, with their rate and the time left, if the work takes more than a second.

    None if standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    began = monotonic()
    with ExitStack() as drawn:
        draw: list[Progress] = []  # when the bar is there

        def progress(done: int, total: int) -> None:
            if not draw:
                if monotonic() - began < _BAR_AFTER_S:
                    return
                draw.append(drawn.enter_context(_bar(what)))
            draw[0](done, total)

        yield progress


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    with Bar(text, *columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(safe(what), total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
