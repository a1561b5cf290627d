"""Display: what objects say at a prompt and in a notebook, and that they never raise."""

import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
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


@pytest.mark.parametrize(("count", "left_out"), [(5, ""), (6, "and 1 more records")])
def test_table_of_a_batch_says_how_many_records_are_left_out_if_there_are_any(
    path: Path, count: int, left_out: str
) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append_many([b"%d" % number for number in range(count)])
        topic.flush()
        table = next(topic.batches())._repr_html_()
    assert "<td>b&#x27;4&#x27;</td>" in table and "<td>b&#x27;5&#x27;</td>" not in table
    assert re.findall("and .* more records", table) == [left_out] * bool(left_out)


def test_notebook_shows_the_partitions_of_a_topic_and_a_chart_of_their_sizes(path: Path) -> None:
    with Topic.open(path, create=True, partitions=3) as topic:
        topic.append_many([b"x" * 100] * 500, partition=0)
        topic.append(b"y", partition=2)
        topic.flush()
        sizes = [each.high_watermark for each in topic.partitions]
        table = topic._repr_html_()
    assert "<td>partition</td><td>from offset</td><td>to offset</td><td>holding</td>" in table
    assert f"<tr><td>0</td><td>0</td><td>{sizes[0]}</td><td>{sized(sizes[0])}</td></tr>" in table
    bars = re.findall(r"height='(\d+)'><title>(.*?)</title>", table)
    assert bars == [("48", f"0: {sized(sizes[0])}"), ("0", "1: 0 bytes"), ("1", f"2: {sized(sizes[2])}")]
    assert f"aria-label='bytes by partition, at most {sized(sizes[0])}'" in table
    closed = topic._repr_html_()
    assert "closed" in closed and "(LogClosedError)" in closed and "<svg" not in closed


def test_chart_of_a_topic_with_one_partition_has_its_segments(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        assert "<svg" not in topic._repr_html_(), "an empty log has no bars"
        for number in (1, 2, 3):
            topic.append_many([b"x" * 1000] * number)
            topic.partition(0).roll()
        starts = [each.base_offset for each in topic.partition(0).segments]
        table = topic._repr_html_()
        with Topic.open(path, mode="r") as reading:
            assert reading._repr_html_().partition("<svg")[2] == table.partition("<svg")[2]
    assert re.findall(r"<title>(.*?)</title>", table) == [
        f"from offset {low}: {sized(high - low)}" for low, high in pairwise(starts)
    ]
    assert "bytes by segment" in table


def test_notebook_shows_what_a_group_owns_and_has_committed(path: Path) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        topic.append_many([b"x"] * 5, partition=1)
        topic.flush()
        with topic.group("etl", member="one", start="begin") as group:
            while batch := group.poll():
                group.commit(batch[-1])
            end = topic.partition(1).high_watermark
            table = group._repr_html_()
            assert f"<tr><td>1</td><td>this member</td><td>{end}</td><td>one</td><td>0 bytes</td></tr>" in table
            assert "<tr><td>0</td><td>this member</td><td>nothing</td><td></td><td>0 bytes</td></tr>" in table
        assert "closed" in group._repr_html_()
    assert group._repr_html_().count("<table>") == 1


def test_notebook_shows_what_a_share_has_in_hand(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append_many([b"x"] * 5)
        topic.flush()
        with topic.share("mail", member="one") as share:
            first, second = share.take(0.0), share.take(0.0)
            assert first is not None and second is not None
            first.reject()
            table = share._repr_html_()
            assert "<td>rejected</td>" in table
            assert "<tr><td>0</td><td>1</td><td>0</td><td>0</td><td>1</td><td>0</td><td>0</td></tr>" in table
            second.accept()
        assert share._repr_html_().count("<table>") == 1


class Charted(Shown):
    def __init__(self, bars: list[tuple[str, int]]) -> None:
        self.bars = bars

    def _facts(self) -> Iterator[tuple[str, object]]:
        yield "a", 1

    def _rows(self) -> Iterator[tuple[object, ...]]:
        yield ("number",)
        yield from ((number,) for number in range(1000))

    def _bars(self) -> tuple[str, list[tuple[str, int]]]:
        return "<i>sizes</i>", self.bars


def test_chart_of_many_bars_has_the_sums_of_neighbours() -> None:
    table = Charted([(f"{number}", 10) for number in range(1000)])._repr_html_()
    assert table.count("<rect") == 63 and "<title>0 to 15: 160 bytes</title>" in table
    assert "<title>992 to 999: 80 bytes</title>" in table


def test_long_table_ends_after_twenty_rows() -> None:
    table = Charted([])._repr_html_()
    assert "<td>19</td></tr><tr><td>and more</td></tr></table>" in table and "<td>20</td>" not in table


def test_names_in_a_chart_are_text() -> None:
    table = Charted([("<script>", 1), ("'", 5)])._repr_html_()
    assert "<script" not in table and "<i>" not in table and "&lt;script&gt;: 1 byte<" in table
    assert "<svg" not in Charted([("a", 0)])._repr_html_()


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
