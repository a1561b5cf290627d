"""Display: what objects say at a prompt and in a notebook, and that they never raise."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from loglib import Topic
from loglib.format.display import Shown, sized


def test_objects_say_what_a_person_at_a_prompt_wants(path: Path) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        topic.append_many([b"x" * 100] * 500, partition=0)
        topic.flush()
        reader = topic.read()
        next(iter(reader))
        with topic.group("etl", member="one") as group:
            group.poll()
            assert repr(group) == "<Group etl, member one, owning [0, 1]>"
        assert repr(reader) == f"<Reader at {{0: 1, 1: 0}}, lag {sized(topic.partition(0).high_watermark - 1)}>"
        assert "offsets 0 to 5" in repr(topic.partition(0)) and "segments 1, since 20" in repr(topic.partition(0))
        assert "partitions 2, mode a, holding 52.1 kB, groups etl" in repr(topic)
        reader.close()
        assert repr(reader).startswith("<Reader closed, at {0: 1")
    assert repr(topic) == f"<Topic at {path}, partitions 2, closed>"
    assert repr(topic.partition(0)) == f"<Partition 0, at {path}/0000>"


def test_object_whose_files_are_gone_shows_what_it_knows(path: Path) -> None:
    Topic.open(path, create=True).close()
    with Topic.open(path, mode="r") as topic:
        shutil.rmtree(path)
        assert repr(topic) == f"<Topic at {path}, partitions 1, mode r, (LogMovedError)>"
        assert repr(topic.partition(0)) == f"<Partition 0, at {path}/0000, (LogMovedError)>"


def test_notebook_shows_a_table() -> None:
    class Thing(Shown):
        def _facts(self) -> Iterator[tuple[str, object]]:
            yield "name", "<b>&"
            raise OSError("no disk")

    assert repr(Thing()) == "<Thing name <b>&, (OSError)>"
    table = Thing()._repr_html_()
    assert "<caption>Thing</caption>" in table and "&lt;b&gt;&amp;" in table and "(OSError)" in table
    with pytest.raises(NotImplementedError):
        list(Shown()._facts())


def test_notebook_shows_the_first_records_of_a_batch_as_text(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append_many([b"<script>\xff\n", None, *[b"x" * 1000] * 10], keys=[b"<b>", *[None] * 11])
        topic.flush()
        batch = next(topic.batches())
        table = batch._repr_html_()
    assert "<td>b&#x27;&lt;b&gt;&#x27;</td><td>b&#x27;&lt;script&gt;\\xff\\n&#x27;</td>" in table
    assert "<script" not in table and "<td>None</td><td>None</td>" in table
    assert "... 1,000 bytes" in table and "and 7 more records" in table and len(table) < 3000


def test_rows_that_cannot_be_read_are_left_out_of_the_table() -> None:
    class Torn(Shown):
        def _facts(self) -> Iterator[tuple[str, object]]:
            yield "name", 1

        def _rows(self) -> Iterator[tuple[object, ...]]:
            yield "a", "<b>"
            raise OSError("no disk")

    assert Torn()._repr_html_().endswith("<tr><td>a</td><td>&lt;b&gt;</td></tr><tr><td>(OSError)</td></tr></table>")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"), (9999, "9,999 bytes"), (12_345, "12.3 kB"), (1 << 40, "1,099.5 GB"),
        (1 << 70, "1,180,591,620.7 TB"),
    ],
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert sized(count) == text
