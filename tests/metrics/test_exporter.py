"""The exporter: figures of the topics that are there at a scrape, whatever comes, goes or breaks before the next."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import spoil
from prometheus_client import CollectorRegistry, generate_latest

from conftest import MANUAL, Clock, last_segment, needs_proc, open_files, opened_since, tree
from loglib import Topic, group
from loglib.copies import mirror
from loglib.metrics import exporter
from loglib.metrics.exporter import PathCollector
from loglib.retention import Space
from loglib.system.files import Files

Sample = Callable[..., float | None]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory of topics."""
    made = tmp_path / "topics"
    made.mkdir()
    return made


def add(path: Path, records: int = 3, **options: Any) -> Path:
    with Topic.open(path, create=True, flush=MANUAL, **options) as topic:
        topic.append_many([b"x"] * records)
    return path


def scraped(*paths: Path) -> Iterator[Sample]:
    """Scrape these paths again and again. Each scrape is a function that returns the value of a sample."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PathCollector(paths))
    while True:
        found = {
            (each.name, *sorted(each.labels.items())): each.value
            for metric in registry.collect() for each in metric.samples
        }  # fmt: skip

        def sample(name: str, of: Path, found: dict[Any, float] = found, **labels: str) -> float | None:
            named = {"directory": str(of.parent), "topic": of.name, **labels}
            return found.get((name, *sorted(named.items())))

        yield sample


def test_figures_are_those_of_stats(place: Path) -> None:
    path = add(place / "orders", partitions=2)
    before = tree(place)
    with Topic.open(path, mode="r") as topic:
        topic.reset_group("etl", "begin")
        before, stats = tree(place), topic.stats()
        sample = next(scraped(place))
        for each in stats.partitions:
            number = {"partition": str(each.partition)}
            assert sample("loglib_size_bytes", path, **number) == each.size_bytes
            assert sample("loglib_segments", path, **number) == 1
            assert sample("loglib_high_watermark", path, **number) == each.high_watermark
            newest = None if each.newest is None else each.newest / 1e6
            assert sample("loglib_newest_timestamp_seconds", path, **number) == newest
            lag = stats.lag["etl"][each.partition]
            assert sample("loglib_group_lag_bytes", path, group="etl", **number) == lag.bytes
    assert (sample("loglib_up", path), sample("loglib_damage", path)) == (1, 0)
    free = sample("loglib_disk_free_bytes", path, path=str(path))
    assert free is not None and 0 <= free <= (sample("loglib_disk_size_bytes", path, path=str(path)) or 0)
    assert tree(place) == before, "a scrape changes nothing"


def test_what_counts_in_one_process_alone_is_left_out(place: Path) -> None:
    add(place / "orders")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PathCollector([place]))
    text = generate_latest(registry).decode()
    for name in ("loglib_appended", "loglib_unflushed", "loglib_flush", "handed_out"):
        assert name not in text, "the exporter appends nothing, and a 0 would be read as that"


def test_topics_come_and_go_between_two_scrapes(place: Path) -> None:
    scrapes = scraped(place)
    assert next(scrapes)("loglib_up", place) == 0, "a directory without a topic was given"
    orders, users = add(place / "orders"), add(place / "users")
    sample = next(scrapes)
    assert (sample("loglib_up", place), sample("loglib_up", orders), sample("loglib_up", users)) == (None, 1, 1)
    Topic.delete(users)
    Topic.add_partitions(orders, 2)
    sample = next(scrapes)
    assert sample("loglib_up", users) is None
    assert sample("loglib_size_bytes", orders, partition="1") == 0
    before = sample("loglib_high_watermark", orders, partition="0")
    Topic.delete(orders)
    add(orders, records=1)
    sample = next(scrapes)
    assert sample("loglib_up", orders) == 1 and sample("loglib_size_bytes", orders, partition="1") is None
    assert (sample("loglib_high_watermark", orders, partition="0") or 0) <= (before or 0), "it is another topic"
    shutil.rmtree(place)
    assert next(scrapes)("loglib_up", place) == 0


def test_topic_that_was_named_and_is_gone_is_not_up(place: Path) -> None:
    path = add(place / "orders")
    scrapes = scraped(path)
    assert next(scrapes)("loglib_up", path) == 1
    Topic.delete(path)
    assert next(scrapes)("loglib_up", path) == 0
    assert next(scraped(place / "never"))("loglib_up", place / "never") == 0


def test_two_topics_of_one_name_are_two(place: Path, tmp_path: Path) -> None:
    first, second = add(place / "orders", records=1), add(tmp_path / "other" / "orders", records=9)
    sample = next(scraped(place, second, place, first))
    assert sample("loglib_size_bytes", first, partition="0") != sample("loglib_size_bytes", second, partition="0")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PathCollector([place, second, place, first]))
    lines = [line.rsplit(" ", 1)[0] for line in generate_latest(registry).decode().splitlines()]
    assert len(lines) == len(set(lines)), "Prometheus refuses a sample that comes twice"


@pytest.mark.parametrize("what", ["description", "batch", "group", "partition", "format"])
def test_fault_of_one_topic_takes_nothing_from_another(what: str, place: Path) -> None:
    broken, whole = add(place / "broken"), add(place / "whole")
    if what == "description":
        spoil(broken / "topic.json", 30)
    elif what == "batch":
        spoil(last_segment(broken), last_segment(broken).stat().st_size - 10)
    elif what == "group":
        with Topic.open(broken, mode="r") as topic:
            topic.reset_group("etl", "begin")
        for file in (broken / "groups" / "etl" / "offsets").rglob("*.log"):
            spoil(file, 100)
    elif what == "partition":
        (broken / "0000").rename(place / "aside")
    else:
        facts = json.loads((broken / "topic.json").read_text())
        del facts["crc"]
        (broken / "topic.json").write_text(json.dumps(facts | {"format": 99}))
    sample = next(scraped(place))
    assert sample("loglib_up", whole) == 1 and sample("loglib_damage", whole) == 0
    damage = sample("loglib_damage", broken)
    assert damage is not None and (damage > 0) == (what != "format")
    assert sample("loglib_up", broken) == (what in ("batch", "group"))
    if what in ("batch", "group"):
        assert sample("loglib_size_bytes", broken, partition="0"), "the figures of the rest"
        assert sample("loglib_disk_size_bytes", broken, path=str(broken)) is not None


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="the system has no list of locks")
def test_topic_that_looks_damaged_for_a_moment_is_not_reported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is being deleted, or made again."""
    path = add(place / "orders")
    spoilt, looks = ("a.log", 0), list[int]()

    def damage(samples: exporter._Samples, topic: Topic) -> None:
        looks.append(1)
        if len(looks) == 1 or lasts:
            samples.add_damage([spoilt])

    monkeypatch.setattr(exporter, "_LOOKS", (damage,))
    for lasts in (False, True):
        looks.clear()
        assert next(scraped(place))("loglib_damage", path) == lasts


def test_writer_is_seen_while_it_writes(place: Path) -> None:
    path, scrapes = add(place / "orders"), scraped(place)
    with Topic.open(path):
        assert next(scrapes)("loglib_writer", path, partition="0") == 1
    assert next(scrapes)("loglib_writer", path, partition="0") == 0


def test_group_on_several_topics_has_lag_in_each(place: Path) -> None:
    paths = [add(place / name) for name in ("a", "b")]
    first, second = (Topic.open(path, mode="r") for path in paths)
    with first, second, group([first, second], "both"):
        sample = next(scraped(place))
        for path in paths:
            assert sample("loglib_group_lag_bytes", path, group="both", partition="0") == 152


def test_copies_are_there_with_their_lag(place: Path, tmp_path: Path) -> None:
    first, second = place / "t", tmp_path / "b" / "t"
    with Topic.open(first, create=True, replicas=[second]) as topic:
        topic.append(b"x", sync=True)
    scrapes = scraped(place)
    sample = next(scrapes)
    for path in (first, second):
        assert sample("loglib_copy_up", first, copy=str(path)) == 1
        assert sample("loglib_copy_lag_bytes", first, copy=str(path)) == 0
        assert sample("loglib_disk_free_bytes", first, path=str(path)) is not None
    shutil.rmtree(second)
    sample = next(scrapes)
    assert sample("loglib_copy_up", first, copy=str(second)) == 0
    assert sample("loglib_copy_lag_seconds", first, copy=str(second)) is None
    assert sample("loglib_up", first) == 1

    source, copy = add(place / "s"), tmp_path / "c" / "s"
    mirror(source, copy)
    add(source)
    sample = next(scraped(copy))
    assert sample("loglib_copy_lag_bytes", copy, copy=str(copy)) == 152
    assert (sample("loglib_copy_lag_seconds", copy, copy=str(copy)) or 0) > 0


def test_disk_that_is_full_is_seen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = add(place / "orders")
    monkeypatch.setattr(Files, "free_space", lambda *_: Space(0, 1000))
    assert next(scraped(place))("loglib_disk_free_bytes", path, path=str(path)) == 0


def test_scrape_beside_one_that_hangs_ends_and_has_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(place / "orders")
    monkeypatch.setattr(exporter, "_PATIENCE_S", 0.01)
    collector = PathCollector([place])
    with collector._one_at_a_time:  # as one that waits for a disk
        assert collector.collect() == []
    assert collector.collect() != []


def test_directory_whose_name_is_no_text_is_a_label_all_the_same(tmp_path: Path) -> None:
    add(Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\"\n")) / "t")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PathCollector([Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\"\n"))]))
    assert "a\ufffd\\\"\\n" in generate_latest(registry).decode()


@needs_proc
def test_no_file_stays_open_between_scrapes(place: Path) -> None:
    add(place / "orders", partitions=3)
    scrapes = scraped(place)
    next(scrapes)
    before = open_files()
    for _ in range(3):
        next(scrapes)
    assert not opened_since(before)


def test_lag_falls_when_the_group_commits(place: Path, clock: Clock) -> None:
    path, scrapes = add(place / "orders"), scraped(place)
    with Topic.open(path, mode="r") as topic:
        topic.reset_group("etl", "begin")
        assert (next(scrapes)("loglib_group_lag_seconds", path, group="etl", partition="0") or 0) > 0
        topic.reset_group("etl", "end")
        assert next(scrapes)("loglib_group_lag_seconds", path, group="etl", partition="0") == 0
