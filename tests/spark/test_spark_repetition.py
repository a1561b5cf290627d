"""A checkpoint that was copied or set back is refused before a row is lost, and the original goes on."""

import json
from pathlib import Path

import pytest
from spark_staging import SCHEMA, make, numbers, stage, values

from loglib import CorruptLogError, LogError
from loglib.errors import SourceMismatchError
from loglib.spark.commit import abort, commit
from loglib.spark.repetition import NAME, Write, owner_of, repetitions
from loglib.spark.sink_target import parse
from loglib.transactions.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "logs" / "topic")


def batch(number: int, *, run: str = "run", checkpoint: str | None = None, any_rows: bool = False) -> Write:
    """A batch of a streaming query."""
    owner = owner_of(run, checkpoint=checkpoint)
    return Write("app", number, owner, "query", is_new=False, batch=number, any_rows=any_rows)


def each_batch(number: int, version: int, *, name: str = "random") -> Write:
    """A write in `foreachBatch`."""
    return Write("app", version, owner_of(name, batch=number), "query", is_new=False, batch=number)


def checkpoint(path: Path, query: str = "query") -> str:
    path.mkdir()
    (path / "metadata").write_text(json.dumps({"id": query}))
    return str(path)


def refused(path: Path, write: Write, rows: int, why: str) -> None:
    """It is refused, and Spark calls `abort`; the rows are not there."""
    before, staged = values(path), [stage(path, numbers(rows))]
    with pytest.raises(LogError, match=why):
        commit(write, staged)
    assert not abort(write, staged)
    assert values(path) == before


def test_batch_that_spark_repeats_is_dropped_and_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    commit(batch(0), [stage(path, numbers(5))])
    assert repetitions(path) == []
    assert not commit(batch(0, run="again"), [stage(path, numbers(5))])
    assert "topic: version 0 of app was committed before: 5 rows are taken for its repetition" in caplog.text
    assert [each[:3] for each in repetitions(path)] == [("app", 0, 5)]
    assert commit(batch(1, run="again"), [stage(path, [b"next"])])


@pytest.mark.parametrize(("number", "rows", "why"), [
    (0, 5, "Spark repeats no other batch than the last one"), (2, 6, "committed there with 5 rows"),
])  # fmt: skip
def test_checkpoint_that_was_set_back_is_refused_and_fences_nobody(
    path: Path, number: int, rows: int, why: str
) -> None:
    for each in range(3):
        commit(batch(each), [stage(path, numbers(5))])
    refused(path, batch(number, run="copy"), rows, why)
    assert commit(batch(3), [stage(path, [b"of the original"])])


def test_query_that_gives_other_rows_when_it_is_repeated_may_say_so(path: Path) -> None:
    commit(batch(0), [stage(path, numbers(5))])
    assert not commit(batch(0, run="again", any_rows=True), [stage(path, numbers(6))])
    assert [each.rows for each in repetitions(path)] == [6]


def test_copy_of_a_checkpoint_is_refused_while_the_original_is_there(path: Path, tmp_path: Path) -> None:
    original, copy = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two")
    commit(batch(0, checkpoint=original), [stage(path, numbers(5))])
    for number in (0, 1):
        refused(path, batch(number, run="copy", checkpoint=copy), 5, "two is a copy of .*one, whose query writes there")
    assert commit(batch(1, checkpoint=original), [stage(path, [b"1"])])
    abort(batch(2, checkpoint=original), [stage(path, [b"2"])])  # whoever comes now is compared all the same
    refused(path, batch(2, run="copy", checkpoint=copy), 5, "is a copy of")
    (tmp_path / "one").rename(tmp_path / "aside")  # it was moved
    assert commit(batch(2, run="copy", checkpoint=copy), [stage(path, [b"2"])])
    (tmp_path / "two/metadata").write_text('{"id": "another query"}')  # its place was used again
    other = checkpoint(tmp_path / "three")
    assert commit(batch(3, run="next", checkpoint=other), [stage(path, [b"3"])])


def test_function_that_writes_each_batch_twice_is_repeated_as_a_whole(path: Path) -> None:
    for number in range(2):
        for version in (2 * number, 2 * number + 1):
            commit(each_batch(number, version, name=str(version)), [stage(path, numbers(3))])
    for version in (2, 3):
        write = each_batch(1, version, name=f"again{version}")
        assert not commit(write, [stage(path, numbers(3))])
    refused(path, each_batch(0, 1), 3, "version 3 was committed there with batch 1")
    refused(path, each_batch(2, 3), 3, "batch 2 of 3 rows, version 3 of app app, is not written")
    refused(path, each_batch(1, 3), 4, "committed there with 3 rows")
    assert commit(each_batch(2, 4), [stage(path, [b"4"])])


def test_other_query_is_told_that_the_app_counts_those_of_the_first(path: Path) -> None:
    for number in range(3):
        commit(each_batch(number, number), [stage(path, numbers(3))])
    with pytest.raises(SourceMismatchError):
        commit(each_batch(0, 0)._replace(source="another query"), [stage(path, numbers(3))])


def test_batch_that_another_run_commits_meanwhile_is_compared_as_well(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Store.fence_owner

    def overtaken(self: Store, app: str, owner: str, *rest: object, **named: object) -> int:
        monkeypatch.undo()
        commit(batch(0, run="other"), [stage(path, numbers(9))])
        return original(self, app, owner, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "fence_owner", overtaken)
    with pytest.raises(LogError, match="committed there with 9 rows"):
        commit(batch(0), [stage(path, numbers(5))])


def test_repetition_that_cannot_be_noted_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    commit(batch(0), [stage(path, numbers(5))])
    (path / NAME).write_text("[]")
    with pytest.raises(CorruptLogError, match="may be removed"):
        repetitions(path)
    assert not commit(batch(0, run="again"), [stage(path, numbers(5))])
    assert "the repetition is not noted in" in caplog.text


def test_options_of_a_checkpoint_and_of_repetitions_are_known(path: Path, tmp_path: Path) -> None:
    def target(**options: str) -> object:
        return parse({"path": str(path), **options}, SCHEMA, overwrite=False, streaming=True)

    (tmp_path / "link").symlink_to(tmp_path)
    found = [
        target(checkpointLocation=each)
        for each in (str(tmp_path / "ck"), f"file:{tmp_path}/ck", str(tmp_path / "link/ck"))
    ]
    assert found[0] == found[1] == found[2] != target(checkpointLocation="s3a://bucket/ck") != target()
    assert target(repeatedBatch="drop") != target(repeatedBatch="compare") == target()
    with pytest.raises(ValueError, match='repeatedBatch must be "compare" or "drop"'):
        target(repeatedBatch="keep")
