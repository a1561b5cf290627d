"""Types: what a type checker tells the users of the library, in a program of theirs."""

import re
import sys
import textwrap
from pathlib import Path

import pytest
from mypy import api

from conftest import SOURCE

pytestmark = pytest.mark.slow

RIGHT = """
    from datetime import timedelta

    import loglib
    from loglib import Batch, Commit, Group, GroupInfo, Record, Retention, Topic, TopicPartition
    from loglib.metrics import Lag

    def handle(group: Group) -> None:
        for record in group.follow(timeout=1.0):
            value: bytes | None = record.value
            group.commit(record)
        batches: list[Batch] = list(group.batches(timeout=0.0))
        committed: dict[int, Commit] = group.committed()
        lag: dict[int, Lag] = group.lag(count_records=True)

    with Topic.open("clicks", create=True) as clicks, Topic.open("views", create=True) as views:
        clicks.alter(retention=Retention(age=timedelta(days=14)), segment_age=None)
        handle(clicks.group("etl"))
        info: GroupInfo = clicks.group_info("etl")
        with loglib.group([clicks, views], "both", commit="manual", strategy="sticky") as group:
            for topic, record in group.follow(timeout=0.0):
                name: str = topic
                offset: int = record.offset
                group.commit((topic, record))
            places: list[TopicPartition] = group.assignment
        records: list[Record] = clicks.read().poll(max_records=5)
"""

WRONG = """
    import loglib
    from loglib import Topic

    with Topic.open("clicks") as topic:
        for record in topic.group("etl").follow():
            record.valu  # attr-defined
        for pair in loglib.group([topic], "etl").follow():
            pair.value  # attr-defined
        topic.group("etl", comit="manual")  # call-arg
        loglib.group([topic], "etl", strategy="fair")  # arg-type
        topic.alter(retention=14)  # typeddict-item, arg-type
        topic.alter(partitions=2)  # call-arg
        topic.append("text")  # arg-type
"""


def errors_of(program: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Line and kind of each error, as `mypy --strict` has them."""
    path = directory / "program.py"
    path.write_text(textwrap.dedent(program), "utf-8")
    monkeypatch.setenv("MYPYPATH", str(SOURCE))
    output, complaint, _ = api.run(
        ["--strict", "--follow-imports=silent", "--cache-dir", str(directory), "--python-executable", sys.executable,
         str(path)]
    )  # fmt: skip
    assert not complaint
    return [(int(line), kind) for line, kind in re.findall(r"program.py:(\d+): error: .*\[([a-z-]+)\]", output)]


def test_program_that_is_right_has_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors_of(RIGHT, tmp_path, monkeypatch) == []


def test_type_checker_finds_the_mistakes_of_a_users_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = errors_of(WRONG, tmp_path, monkeypatch)
    lines = textwrap.dedent(WRONG).splitlines()
    expected = {number: line.partition("# ")[2].split(", ") for number, line in enumerate(lines, 1) if "  # " in line}
    assert {line for line, _ in found} == set(expected)
    assert all(kind in expected[line] for line, kind in found)
