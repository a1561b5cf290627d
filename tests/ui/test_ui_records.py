"""ui/records.py, ui/content.py, ui/filters.py: pages of records, what is shown of them, and what a search finds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from builders import spoil

from conftest import NOW, SECOND, last_segment
from loglib import Topic
from loglib.ui.content import content_of, indented
from loglib.ui.filters import parse_filter
from loglib.ui.records import RecordPage, page_after, page_before, tail, tail_start, whole_record

Open = Callable[..., Topic]


def values(page: Any) -> list[str]:
    return [each.value.text for each in page.records]


def flat(pages: Iterable[list[str]]) -> list[str]:
    return [each for page in pages for each in page]


def places(found: dict[str, str]) -> dict[int, int]:
    """A position as the page gives it back."""
    return {int(partition): int(offset) for partition, offset in found.items()}


@pytest.fixture
def many(open_topic: Open) -> Topic:
    """One partition with 100 records in batches of seven."""
    topic = open_topic(partitions=1)
    for start in range(0, 100, 7):
        topic.append_many([b"%d" % number for number in range(start, min(100, start + 7))])
        topic.flush()
    return topic


def every(topic: Topic, read: Callable[..., RecordPage], start: str, way: str, **arguments: Any) -> list[list[str]]:
    """All pages from a start on, in the order in which they are asked for."""
    pages = [read(topic, start, **arguments)]
    while pages[-1].ended != "end":
        pages.append(read(topic, places(getattr(pages[-1], way)), **arguments))
    return [values(each) for each in pages]


def test_pages_forwards_and_backwards_have_each_record_once(many: Topic) -> None:
    forwards = every(many, page_after, "begin", "after", limit=9)
    assert flat(forwards) == [str(number) for number in range(100)] and len(forwards[0]) == 9
    backwards = every(many, page_before, "end", "before", limit=9)
    assert flat(reversed(backwards)) == [str(number) for number in range(100)] and len(backwards[0]) == 9


def test_older_and_newer_pages_meet_where_the_page_began(many: Topic) -> None:
    middle = page_after(many, {0: int(page_after(many, "begin", limit=40).after["0"])}, limit=10)
    assert values(middle) == [str(number) for number in range(40, 50)]
    assert values(page_before(many, places(middle.before), limit=5)) == ["35", "36", "37", "38", "39"]
    assert values(page_after(many, places(middle.after), limit=2)) == ["50", "51"]
    assert (middle.looked_at, middle.left_bytes > 0, middle.ended) == (10, True, "full")


def test_partitions_are_merged_by_time_and_stay_in_order(open_topic: Open) -> None:
    topic = open_topic(partitions=3)
    for number in range(30):
        topic.append(b"%d" % number, partition=number % 3, timestamp=NOW + number * SECOND)
    topic.flush()
    expected = [str(number) for number in range(30)]
    assert flat(every(topic, page_after, "begin", "after", limit=7)) == expected
    assert flat(reversed(every(topic, page_before, "end", "before", limit=7))) == expected
    assert values(page_after(topic, "begin", partition=1, limit=3)) == ["1", "4", "7"]


def test_more_partitions_than_can_be_merged_are_refused(open_topic: Open) -> None:
    topic = open_topic(partitions=17)
    with pytest.raises(ValueError, match="choose one of them"):
        page_after(topic, "begin")
    assert page_after(topic, "begin", partition=16).ended == "end"


def test_start_may_be_a_time_or_an_offset_that_no_record_has(open_topic: Open) -> None:
    topic = open_topic(partitions=1)
    for number in range(10):
        topic.append(b"%d" % number, timestamp=NOW + number * 60 * SECOND)
    topic.flush()
    topic.append(b"last", sync=True)
    assert values(page_after(topic, "2023-11-14T22:20:00Z", limit=2)) == ["7", "8"]
    between = page_after(topic, "12")
    assert values(between) == ["last"] and "no record of partition 0 has offset 12" in between.notes[0]
    beyond = page_before(topic, "999999999", limit=1)
    assert values(beyond) == ["last"] and "no record" in beyond.notes[0]
    with pytest.raises(ValueError, match="start must be"):
        page_after(topic, "yesterday")


def test_damage_is_listed_in_its_place_and_reading_continues(
    open_topic: Open, topic: Topic, path: Path
) -> None:
    spoil(last_segment(path), 4096 + list(topic.read())[4].offset + 100)
    reading = open_topic(mode="r")
    page = page_after(reading, "begin")
    assert values(page) == ["0", "1", "2", "3", "5", "6", "7", "8", "9"]
    assert len(page.damage) == 1 and "cannot be read" in page.damage[0]
    back = page_before(reading, "end", limit=100)
    assert values(back) == values(page) and back.damage == page.damage


def test_search_looks_in_values_keys_headers_and_json(open_topic: Open) -> None:
    topic = open_topic(partitions=1)
    topic.append(b'{"user": {"name": "Ada"}, "status": 503, "items": [{"sku": "A-7"}]}', key=b"k1")
    topic.append("Grüße".encode(), key=b"k2", headers={"trace": b"xyz-1"})
    topic.append(b"not json", key=None)
    topic.append(None, key=b"k1")
    topic.flush()

    def found(**asked: str) -> list[int]:
        wanted = parse_filter(asked.get("text", ""), asked.get("key", ""), asked.get("path", ""))
        page = page_after(topic, "begin", wanted=wanted)
        assert page.looked_at == 4 and page.ended == "end"
        return [int(each.offset) for each in page.records]

    assert found(text="ada") == [0] and found(text="GRÜSSE") == [] and found(text="GRÜßE") == [1]
    assert found(text="XYZ") == [1] and found(text="trace") == [1]
    assert found(key="k1") == [0, 3] and found(key="k1", text="ada") == [0]
    assert found(path='.user.name == "Ada"') == [0] and found(path=".status >= 500") == [0]
    assert found(path=".status > 503") == [] and found(path=".items[0].sku") == [0]


def test_search_ends_in_time_and_says_where_it_continues(many: Topic) -> None:
    wanted = parse_filter("9", "", "")
    first = page_after(many, "begin", wanted=wanted, seconds=0.0)
    assert (first.ended, first.looked_at, values(first)) == ("time", 1, [])
    rest = page_after(many, places(first.after), wanted=wanted)
    assert len(rest.records) == 19 and rest.looked_at == 99 and rest.left_bytes == 0


def test_json_is_indented_and_not_changed() -> None:
    written = '{"a":[1.50,1e400,{"b":"x,\\"y:{ }"}],"e":{},"f":[ ], "a":"\\u0041"}'
    shown = indented(written)
    assert json.loads(shown, parse_float=str) == json.loads(written, parse_float=str)
    assert '"e": {}' in shown and '"f": []' in shown and "1.50" in shown and shown.count('"a"') == 2


def test_bytes_are_shown_as_json_text_or_digits_and_cut_with_their_size() -> None:
    assert content_of(None, 10).kind == "null" and content_of(b"", 10).kind == "text"
    assert content_of(b'{"a": 1}', 100).kind == "json" and content_of(b'{"a": 1', 100).kind == "text"
    assert content_of(b"[" * 100_000, 1 << 20).kind == "text"
    cut = content_of("ä".encode() * 1000, 601)
    assert (cut.text, cut.size_bytes, cut.is_cut) == ("ä" * 300, 2000, True)
    digits = content_of(b"\x00\xff" * 600, 600, pretty=True)
    assert (digits.kind, digits.size_bytes, digits.is_cut) == ("hex", 1200, True)
    assert digits.text.splitlines()[0].startswith("00000000  00 ff")
    assert content_of(b"\x00" * 20, 600).kind == "hex"


def test_one_record_is_whole(many: Topic) -> None:
    many.append(b'{"a":1}', key=b"\xff", headers={"h": b"v"}, sync=True)
    record = page_before(many, "end", limit=1).records[0]
    found = whole_record(many, record.partition, int(record.offset))
    assert (found.value.text, found.key.kind, found.headers[0][0]) == ('{\n  "a": 1\n}', "hex", "h")
    with pytest.raises(ValueError):
        whole_record(many, 0, int(record.offset) + 1)


# --- the tail ----------------------------------------------------------------------------------------------


def test_tail_shows_what_comes_and_continues_after_it(many: Topic) -> None:
    start = tail_start(many, None, 10)
    first = tail(many, start)
    assert values(first) == [str(number) for number in range(90, 100)] and not first.passed
    assert values(tail(many, places(first.position))) == []
    many.append(b"new", sync=True)
    second = tail(many, places(first.position))
    assert values(second) == ["new"]


def test_tail_says_what_it_passes_over_and_where_that_is(many: Topic) -> None:
    start = {0: many.partition(0).log_start_offset}
    page = tail(many, start, limit=20)
    assert values(page) == [str(number) for number in range(80, 100)]
    (passed,) = page.passed
    assert (passed.records, passed.why, passed.start) == (80, "too many", "0")
    gone_back = page_after(many, {0: int(passed.start)}, limit=80)
    assert values(gone_back) == [str(number) for number in range(80)] and gone_back.after == {"0": passed.end}


def test_tail_that_retention_has_overtaken_says_so(many: Topic) -> None:
    many.partition(0).roll()
    many.append(b"kept", sync=True)
    kept = many.partition(0).delete_before(many.partition(0).segments[-1].base_offset)
    page = tail(many, {0: 0})
    assert values(page) == ["kept"]
    assert [(each.why, each.start, each.end) for each in page.passed] == [("dropped", "0", str(kept))]


def test_tail_of_many_busy_partitions_leaves_none_out(open_topic: Open) -> None:
    topic = open_topic(partitions=30)
    for number in range(30):
        topic.append(b"%d" % number, partition=number)
    topic.flush()
    shown, position = list[str](), dict[int, int](dict.fromkeys(range(30), 0))
    for _ in range(4):
        page = tail(topic, position, limit=10)
        assert not page.passed
        shown, position = shown + values(page), places(page.position)
    assert sorted(map(int, shown)) == list(range(30))


def test_record_facts_hold_any_time_and_any_bytes(open_topic: Open) -> None:
    topic = open_topic(partitions=1)
    topic.append(b"\x00\xff", key=b"<script>", timestamp=-(1 << 62))
    topic.flush()
    (record,) = page_after(topic, "begin").records
    assert record.timestamp_us == str(-(1 << 62)) and record.time.endswith(" us")
    assert (record.key.text, record.value.text) == ("<script>", "00 ff")
