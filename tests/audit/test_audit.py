"""Audit: each record is counted once at each place, and what does not add up is named."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import warnings
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from random import Random
from threading import Event, Thread, Timer
from typing import Any

import pytest
from builders import batch_of, encoded
from forked import in_child
from hypothesis import given
from hypothesis import strategies as st

from conftest import NOW, Clock, start_python
from loglib import CorruptLogError, LockedError, Retention, Topic, audit
from loglib.audit.tally import Windows, merged, tallies
from loglib.audit.trail import Entry, entries, once
from loglib.errors import ForkedHandleError
from loglib.format.columns import Columns

NUMBERS = st.lists(st.integers(0, 5), min_size=1, max_size=8)
MINUTE = timedelta(minutes=1)
US = 60_000_000
START = NOW // US * US  # the beginning of a window
LATER = START + 3600 * 1_000_000  # when all windows are over


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "a"


def write(place: Path, count: int, *, first: int = 0, step_us: int = 1_000_000, name: str = "orders") -> None:
    """Records one second apart, spread over two partitions."""
    with Topic.open(place / name, create=True, partitions=2) as topic:
        for number in range(first, first + count):
            topic.append(b"%d" % number, key=b"k%d" % (number % 5), timestamp=START + number * step_us)


def count_log(place: Path, clock: Clock | None = None, *, name: str = "orders") -> int:
    with (
        Topic.open(place / name, mode="r") as topic,
        Topic.open(place / audit.TRAIL, create=True) as trail,
        audit.Auditor(topic, trail, window=MINUTE, clock=clock or (lambda: LATER)) as auditor,
    ):
        return auditor.publish()


def balance(*places: Path, to: Path | None = None, **options: Any) -> audit.BalanceReport:
    return audit.balance(places, to, window=MINUTE, now_us=LATER, **options)


def copy_of(place: Path, to: Path) -> Path:
    shutil.copytree(place, to)
    return to


def counted(place: Path) -> dict[str, Windows]:
    with Topic.open(place / audit.TRAIL, mode="r") as trail:
        found = once(entries(trail))
    return {tier: merged(each.windows for each in found if each.tier == tier) for tier in {each.tier for each in found}}


def test_a_tally_does_not_depend_on_batches(tmp_path: Path) -> None:
    random = Random(1)
    values = [random.randbytes(random.randrange(40)) for _ in range(300)]
    found = []
    for number, size in enumerate((1, 7, 300)):
        with Topic.open(tmp_path / str(number), create=True, partitions=1) as topic:
            for at in range(0, len(values), size):
                times = [START + each * US // 4 for each in range(at, min(at + size, 300))]
                topic.append_many(values[at : at + size], timestamps=times, keys=[None] * len(times))
            topic.flush()
            found.append(merged(tallies(batch, US) for batch in topic.partition(0).batches()))
    assert found[0] == found[1] == found[2]
    assert sum(tally.records for tally in found[0].values()) == 300
    assert sum(tally.bytes for tally in found[0].values()) == sum(map(len, values))


@given(NUMBERS, NUMBERS)
def test_a_tally_tells_other_records_of_the_same_number_and_size(one: list[int], other: list[int]) -> None:
    def counts(numbers: list[int]) -> Windows:
        values = [b"%d" % each for each in numbers]
        return tallies(batch_of(encoded(Columns(values, [None] * len(values), [START] * len(values)))), US)

    assert (counts(one) == counts(other)) == (sorted(one) == sorted(other))


Fields = tuple[bytes | None, bytes | None, int, tuple[tuple[str, bytes], ...]]  # key, value, timestamp, headers
PAIR: list[Fields] = [
    (b"user-881", b"amount=4800", START, ((("h", b"1"), ("i", b"2")))),
    (b"user-305", b"amount=2274", START + 1, ()),
]
CHANGES: dict[str, list[Fields]] = {
    "bytes that moved from the value to the key": [(b"user-881a", b"mount=4800", *PAIR[0][2:]), PAIR[1]],
    "the whole value in the key": [(b"user-881amount=4800", b"", *PAIR[0][2:]), PAIR[1]],
    "values that were exchanged": [(PAIR[0][0], PAIR[1][1], *PAIR[0][2:]), (PAIR[1][0], PAIR[0][1], *PAIR[1][2:])],
    "times that were exchanged": [(*PAIR[0][:2], START + 1, PAIR[0][3]), (*PAIR[1][:2], START, ())],
    "a time within the window": [(*PAIR[0][:2], START + 2, PAIR[0][3]), PAIR[1]],
    "headers that moved to another record": [(*PAIR[0][:3], ()), (*PAIR[1][:3], PAIR[0][3])],
    "headers in another order": [(*PAIR[0][:3], PAIR[0][3][::-1]), PAIR[1]],
    "bytes that moved from a header to its name": [(*PAIR[0][:3], (("h1", b""), ("i", b"2"))), PAIR[1]],
    "a header in the value": [(b"user-881", b"amount=4800", START, (("h", b"1"),)), PAIR[1]],
    "no key in the place of an empty one": [(b"", *PAIR[0][1:]), PAIR[1]],
    "no value in the place of an empty one": [(b"user-881", b"", *PAIR[0][2:]), PAIR[1]],
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_tally_sees_each_change(change: str) -> None:
    """A sum of checksums did not see bytes that moved, nor for each pair that its values were exchanged."""

    def counts(records: list[Fields]) -> Windows:
        keys, values, times, headers = map(list, zip(*records, strict=True))
        return tallies(batch_of(encoded(Columns(values, keys, times, headers))), US)

    before = PAIR
    if change.startswith("no "):
        before = [tuple(None if each == b"" else each for each in record) for record in CHANGES[change]]  # type: ignore[misc]
    assert counts(before) == counts(before[::-1]) != counts(CHANGES[change])


def test_counts_of_several_runs_are_those_of_the_log(place: Path) -> None:
    for first in range(0, 300, 100):
        write(place, 100, first=first)
        assert count_log(place) == 100
    assert count_log(place) == 0
    with Topic.open(place / "orders", mode="r") as topic:
        windows = merged(tallies(batch, US) for batch in topic.read().batches())
    assert counted(place) == {"log": windows} and len(windows) == 5
    report = balance(place, to=copy_of(place, place.with_name("b")))
    assert len(report.balances) == 5 and not report.differences
    assert all(each.closed and each.adds_up and not each.missing for each in report.balances)


def test_what_retention_has_dropped_is_still_counted(place: Path) -> None:
    write(place, 200)
    count_log(place)
    mirror = copy_of(place, place.with_name("b"))
    with Topic.open(place / "orders", alter=True, retention=Retention(age=None, bytes=0)) as topic:
        for partition in topic.partitions:
            partition.roll()
        topic.retain()
        assert not list(topic.read())
    assert not balance(place, to=mirror).differences and len(balance(place, to=mirror).balances) == 4


def test_what_was_dropped_uncounted_closes_no_window(place: Path) -> None:
    write(place, 100)
    mirror = copy_of(place, place.with_name("b"))
    with Topic.open(place / "orders", create=True) as topic:
        for partition in topic.partitions:
            partition.delete_before(partition.high_watermark)
    write(place, 60, first=180)
    write(mirror, 60, first=180)
    report = balance(place, to=mirror)
    assert [each.closed for each in report.balances] == [False, False, True]
    assert not report.differences


def test_records_that_are_lost_on_the_way_are_named(place: Path) -> None:
    write(place, 200)
    count_log(place)
    mirror = place.with_name("b")
    lost = 130
    with Topic.open(place / "orders", mode="r") as topic, Topic.open(
        mirror / "orders", create=True, partitions=2
    ) as copy:
        for record in topic.read():
            if record.value != b"%d" % lost:
                copy.append(record.value, key=record.key, timestamp=record.timestamp, partition=record.partition)
    (difference,) = balance(place, to=mirror).differences
    assert (difference.topic, difference.tier, difference.missing) == ("orders", "log", 1)
    assert difference.window_us <= START + lost * 1_000_000 < difference.window_us + US
    assert difference.place == str(mirror)
    with Topic.open(mirror / "orders") as copy:  # another one twice does not make up for it
        copy.append(b"131", key=b"k1", timestamp=START + 131_000_000)
    (difference,) = balance(place, to=mirror).differences
    assert difference.missing == 0 and not difference.adds_up


def test_a_topic_that_did_not_arrive_is_missing(place: Path) -> None:
    write(place, 10)
    write(place, 10, name="bills")
    mirror = copy_of(place, place.with_name("b"))
    shutil.rmtree(mirror / "bills")
    differences = balance(place, to=mirror).differences
    assert [(each.topic, each.missing) for each in differences] == [("bills", 10)]


def test_a_topic_that_was_moved_is_the_same_topic(place: Path) -> None:
    write(place, 200)
    mirror = copy_of(place, place.with_name("b"))
    consume(place, "billing")
    count_log(place)
    (place / "orders").rename(place / "renamed")
    with Topic.open(
        place / "renamed", alter=True, retention=Retention(age=None, bytes=0), segment_bytes=8192
    ) as topic:
        for partition in topic.partitions:
            partition.roll()
        assert topic.retain()
    assert not balance(place).differences and balance(place).balances
    assert not balance(place, to=mirror).differences
    assert {each.topic for each in balance(place, to=mirror).balances} == {"renamed", "orders"}


def test_a_copy_beside_its_original_has_counts_of_its_own(place: Path) -> None:
    write(place, 200)
    consume(place, "billing")
    count_log(place)
    copy_of(place / "orders", place / "copy")
    write(place, 100, first=200, name="copy")
    report = balance(place)
    assert {each.topic for each in report.balances} == {"orders"} and not report.differences


def test_sources_are_added(place: Path, tmp_path: Path) -> None:
    other, central = tmp_path / "other", tmp_path / "central"
    write(place, 100)
    write(other, 50, first=40)
    with Topic.open(central / "orders", create=True, partitions=2) as topic:
        for each in (place, other):
            with Topic.open(each / "orders", mode="r") as source:
                for record in source.read():
                    topic.append(record.value, key=record.key, timestamp=record.timestamp)
    assert not balance(place, other, to=central).differences
    assert {each.missing for each in balance(place, to=central).differences} == {-20, -30}


def test_damage_in_a_mirror_is_found_with_its_offsets(place: Path) -> None:
    write(place, 100)
    count_log(place)
    mirror = copy_of(place, place.with_name("b"))
    shutil.rmtree(mirror / audit.TRAIL)
    with Topic.open(mirror / "orders", create=True) as topic:
        partition = topic.partition(0)
        start = partition.high_watermark
        partition.roll()
        partition.delete_before(start)
    assert not balance(place, to=mirror).differences, "it may have been dropped by retention"
    shutil.rmtree(mirror)
    copy_of(place, mirror)
    shutil.rmtree(mirror / audit.TRAIL)
    segment = min((mirror / "orders" / "0000").glob("*.log"))
    content = bytearray(segment.read_bytes())
    content[-20] ^= 1
    segment.write_bytes(content)
    differences = balance(place, to=mirror).differences
    assert differences
    for each in differences:
        assert [where.partition for where in each.offsets] == [0]
        assert each.offsets[0].offsets == range(start)


def consume(place: Path, tier: str, *, skip: int = -1, commit: bool = True) -> None:
    """An application that counts what it handles. `skip`: a batch that it loses."""
    with Topic.open(place / "orders", mode="r") as topic, Topic.open(place / audit.TRAIL, create=True) as trail:
        counter = audit.Counter(trail, tier, window=MINUTE, clock=lambda: LATER)
        with topic.group(tier, commit="manual") as member:
            for number, batch in enumerate(member.batches(timeout=0.0)):
                if number != skip:
                    counter.add(topic, batch)
            counter.publish()
            if commit:
                member.commit()


def test_an_application_that_has_handled_everything_adds_up(place: Path) -> None:
    for first in (0, 50, 100):
        write(place, 50, first=first)
        consume(place, "etl", commit=first != 50)  # what comes again is not counted again
    report = balance(place)
    assert {each.tier for each in report.balances} == {"etl"} and not report.differences


def test_an_application_that_has_lost_records_is_named_with_the_offsets(place: Path) -> None:
    for first in range(0, 150, 30):
        write(place, 30, first=first)
    with Topic.open(place / "orders", mode="r") as topic:
        batches = list(topic.read().batches())
    consume(place, "etl", skip=3)
    differences = balance(place).differences
    assert sum(each.missing for each in differences) in {len(batch) for batch in batches}
    assert all(where.offsets for each in differences for where in each.offsets)
    places = {(where.partition, where.offsets.start) for each in differences for where in each.offsets}
    assert places <= {(batch.partition, batch.offsets.start) for batch in batches} and len(places) == 1
    write(place, 10, first=150)
    assert sum(each.missing for each in balance(place).differences) > sum(each.missing for each in differences)


def test_a_trail_that_was_copied_speaks_for_logs_elsewhere(place: Path, tmp_path: Path) -> None:
    clock = Clock(START)
    write(place, 200)
    central = tmp_path / "central"

    def copy_trail() -> audit.BalanceReport:
        shutil.rmtree(central / audit.TRAIL, ignore_errors=True)
        shutil.copytree(place / audit.TRAIL, central / audit.TRAIL)
        return balance(central)

    with (
        Topic.open(place / "orders", mode="r") as topic,
        Topic.open(place / audit.TRAIL, create=True) as trail,
        audit.Auditor(topic, trail, window=MINUTE, clock=clock) as auditor,
    ):
        auditor.publish()
        with Topic.open(central / "orders", create=True, partitions=2) as copy:
            for record in topic.read():
                copy.append(record.value, key=record.key, timestamp=record.timestamp)
        assert {each.closed for each in copy_trail().balances} == {False}
        clock.now = LATER
        assert auditor.publish() == 0  # only that all windows are over
        report = copy_trail()
        assert {each.closed for each in report.balances} == {True} and not report.differences
        published = len(list(trail.read()))
        assert auditor.publish() == 0 and len(list(trail.read())) == published, "that was said once"
    with Topic.open(central / "orders") as copy:
        copy.append(b"too much", timestamp=START)
    (difference,) = balance(central).differences
    assert difference.missing == -1


def set_back_and_written_otherwise(place: Path, *, before: int, lost: int, after: int) -> None:
    """A log of `before` records, a backup, `lost` records that are counted, then the backup and `after` other ones."""
    write(place, before)
    count_log(place)
    count_as(place, "billing")
    shutil.copytree(place / "orders", place.parent / "backup")
    write(place, lost, first=before)
    count_log(place)
    count_as(place, "billing")
    shutil.rmtree(place / "orders")
    shutil.move(place.parent / "backup", place / "orders")
    write(place, after, first=500)


def count_as(place: Path, tier: str) -> None:
    """An application counts all records of the log, some of them again."""
    with Topic.open(place / "orders", mode="r") as topic, Topic.open(place / audit.TRAIL, create=True) as trail:
        counter = audit.Counter(trail, tier, window=MINUTE, clock=lambda: LATER)
        for batch in topic.batches():
            counter.add(topic, batch)
        counter.publish()


@pytest.mark.parametrize("after", [20, 40, 90])
@pytest.mark.parametrize("counted_again", [False, True])
def test_what_follows_in_a_log_that_was_set_back_is_counted(place: Path, after: int, counted_again: bool) -> None:
    set_back_and_written_otherwise(place, before=30, lost=40, after=after)
    count_as(place, "billing")
    if counted_again:
        count_log(place)
    with Topic.open(place / "orders", mode="r") as topic:
        there = len(list(topic.read()))
    assert there == 30 + after
    report = balance(place)
    now = [each for each in report.balances if not each.superseded]
    assert sum(each.found.records for each in now if each.tier == "billing") == there
    assert sum(each.expected.records for each in now if each.tier == "billing") == there
    assert all(each.adds_up for each in now)


def test_what_was_counted_before_a_log_was_set_back_is_named(place: Path) -> None:
    set_back_and_written_otherwise(place, before=30, lost=40, after=20)
    gone = [each for each in balance(place).differences if each.superseded]
    assert {each.tier for each in gone} == {"log", "billing"}
    assert all(each.found.records == 0 and each.offsets for each in gone)
    assert sum(each.missing for each in gone if each.tier == "billing") == 40


def test_partition_that_a_restored_topic_does_not_have_was_set_back(place: Path) -> None:
    """The backup was made before the partition was added. "All adds up" was said of records that were gone."""
    write(place, 30)
    count_log(place)
    count_as(place, "billing")
    shutil.copytree(place / "orders", place.parent / "backup")
    with Topic.open(place / "orders", mode="r") as topic:
        number = len(topic.partitions)
    Topic.add_partitions(place / "orders", number + 1)
    with Topic.open(place / "orders") as topic:
        topic.append_many([b"gone"] * 40, partition=number, timestamps=[START] * 40)
    count_log(place)
    count_as(place, "billing")
    shutil.rmtree(place / "orders")
    shutil.move(place.parent / "backup", place / "orders")
    count_log(place)
    count_as(place, "billing")
    gone = balance(place).differences
    assert {each.tier for each in gone} == {"log", "billing"} and all(each.superseded for each in gone)
    assert [each.missing for each in gone if each.tier == "billing"] == [40]


def test_windows_of_two_sizes_are_refused(place: Path) -> None:
    write(place, 5)
    count_log(place)
    with pytest.raises(ValueError, match="counts windows of 0:01:00, and not of 0:10:00"):
        audit.balance([place])
    with pytest.raises(ValueError, match="has no topic"):
        audit.balance([place / "nothing"])
    with Topic.open(place / audit.TRAIL, create=True) as trail, pytest.raises(ValueError, match="name of a tier"):
        audit.Counter(trail, "")


def test_a_record_that_is_no_entry_is_refused(place: Path) -> None:
    write(place, 5)
    with Topic.open(place / audit.TRAIL, create=True) as trail:
        trail.append(json.dumps({"tier": "log"}).encode())
    with pytest.raises(CorruptLogError, match="no valid counts in partition 0, offset 0"):
        balance(place)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_what_a_killed_process_has_left_is_counted_once(sizes: list[int], data: st.DataObject) -> None:
    def entry(start: int, end: int) -> Entry:
        tallies = {0: audit.Tally(end - start, 0, sum(range(start, end)))}
        return Entry("log", "orders", "id", 0, start, end, 0, 0, US, tallies, 0)

    chain, at = [], 0
    for size in sizes:
        chain.append(entry(at, at + size))
        at += size
    # Each of these was not visible when the next process began, at the same place.
    left = [entry(each.start, each.start + data.draw(st.integers(1, 6))) for each in chain if data.draw(st.booleans())]
    found = once(data.draw(st.permutations([*chain, *left])))
    whole = merged(each.windows for each in found)[0]
    assert whole.records >= at and whole.digest == sum(range(whole.records))


COUNTING = """
import sys
from datetime import timedelta
from loglib import Topic, audit

with (
    Topic.open(sys.argv[1] + "/orders", mode="r") as topic,
    Topic.open(sys.argv[1] + "/_audit", create=True, shared=True) as trail,
):
    with audit.Auditor(topic, trail, window=timedelta(minutes=1)) as auditor:
        print("counting", flush=True)
        auditor.run(every=0.001)
"""


def test_an_auditor_that_is_killed_counts_each_record_once(place: Path) -> None:
    random = Random(4)
    with Topic.open(place / "orders", create=True, partitions=4, segment_bytes=20_000):
        Topic.open(place / audit.TRAIL, create=True).close()  # one partition, for all of them
    number = 0
    with ExitStack() as started:
        counting: list[subprocess.Popen[str]] = []  # two at a time, who share the partitions
        for _ in range(7):
            process = started.enter_context(start_python(COUNTING, place))
            assert process.stdout is not None and process.stdout.readline() == "counting\n"
            counting.append(process)
            with Topic.open(place / "orders") as topic:
                for _ in range(random.randrange(5, 40)):
                    topic.append_many([b"%d" % each for each in range(number, number + 20)], timestamps=[START] * 20)
                    topic.flush()
                    number += 20
                if len(counting) == 2:
                    counting.pop(0).send_signal(signal.SIGKILL)
        counting[0].send_signal(signal.SIGKILL)
    count_log(place)
    assert counted(place)["log"][START].records == number
    assert not balance(place, to=place).differences


def test_several_processes_write_a_trail_of_one_partition(place: Path) -> None:
    """The second of them died of `LockedError`, and its application was accused of records that it had counted."""
    with ExitStack() as opened:

        def enter(kind: Any) -> Any:
            return opened.enter_context(kind)

        write(place, 50)
        trails = [enter(Topic.open(place / audit.TRAIL, create=True, shared=True)) for _ in range(3)]
        topics = [enter(Topic.open(place / "orders", mode="r")) for _ in range(3)]
        one = enter(audit.Auditor(topics[0], trails[0], window=MINUTE, clock=lambda: LATER))
        assert one.publish() == 50
        two = enter(audit.Auditor(topics[1], trails[1], window=MINUTE, clock=lambda: LATER))
        counter = audit.Counter(trails[2], "etl", window=MINUTE, clock=lambda: LATER)
        member = enter(topics[2].group("etl", commit="manual", on_assign=counter.on_assign))
        for first in (50, 100, 150):
            write(place, 50, first=first)
            found = [one.publish() + two.publish() for _ in range(3)]  # the partitions are handed over meanwhile
            assert sum(found) == 50
            for batch in member.batches(timeout=0.0):
                counter.add(topics[2], batch)
            assert counter.publish() == (100 if first == 50 else 50)
            member.commit()
            report = balance(place)
            assert report.balances and not report.differences
    assert counted(place)["log"] == counted(place)["etl"]


def test_counts_wait_for_a_trail_that_others_have(place: Path) -> None:
    write(place, 30)
    with (
        Topic.open(place / "orders", mode="r") as topic,
        Topic.open(place / audit.TRAIL, create=True, shared=True, wait=0.02) as trail,
    ):
        counter = audit.Counter(trail, "etl", window=MINUTE, clock=lambda: LATER)
        batches = list(topic.read().batches())
        with Topic.open(place / audit.TRAIL):  # for itself, and for long
            counter.add(topic, batches[0])
            with pytest.raises(LockedError, match="_audit"):
                counter.publish()
        for batch in batches[1:]:
            counter.add(topic, batch)
        assert counter.publish() == 30
        assert counter.publish() == 0
    report = balance(place)
    assert report.balances and not report.differences


def test_an_auditor_goes_on_when_others_had_the_trail_for_too_long(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(place, 30)
    with (
        ExitStack() as others,
        Topic.open(place / "orders", mode="r") as topic,
        Topic.open(place / audit.TRAIL, create=True, shared=True, wait=0.02) as trail,
    ):
        others.enter_context(Topic.open(place / audit.TRAIL))
        auditor = audit.Auditor(topic, trail, window=MINUTE, clock=lambda: LATER)
        waiting: list[float] = []

        def wait(seconds: float) -> None:
            waiting.append(seconds)
            others.close()
            if len(waiting) == 2:  # nothing new has come meanwhile
                auditor.close()

        monkeypatch.setattr(auditor._ended, "wait", wait)
        auditor.run(every=1.0)
    assert "wait for their trail" in caplog.text
    assert sum(tally.records for tally in counted(place)["log"].values()) == 30


def test_a_counter_belongs_to_the_process_that_made_it(place: Path) -> None:
    write(place, 30)
    with (
        Topic.open(place / "orders", mode="r") as topic,
        Topic.open(place / audit.TRAIL, create=True, shared=True) as trail,
    ):
        counter = audit.Counter(trail, "etl", window=MINUTE, clock=lambda: LATER)
        for batch in topic.read().batches():
            counter.add(topic, batch)

        def publish() -> None:
            with pytest.raises(ForkedHandleError, match="_audit"):
                counter.publish()

        assert in_child(publish) == 0
        assert counter.publish() == 30
    assert not balance(place).differences


def test_a_child_closes_an_auditor_that_a_thread_of_its_parent_uses(place: Path) -> None:
    """The child waited for that thread, which it does not have."""
    write(place, 5)
    asked, forked = Event(), Event()

    def close() -> None:
        signal.alarm(20)  # so that a child that waits for ever ends
        auditor.close()

    def clock() -> int:  # in the middle of a pass
        asked.set()
        forked.wait(60)
        return LATER

    with Topic.open(place / "orders", mode="r") as topic, Topic.open(
        place / audit.TRAIL, create=True, shared=True
    ) as trail:
        auditor = audit.Auditor(topic, trail, window=MINUTE, clock=clock)
        counting = Thread(target=auditor.publish)
        counting.start()
        asked.wait(60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: it is the case
            assert in_child(close) == 0
        forked.set()
        counting.join()
        auditor.close()
    assert counted(place)["log"][START].records == 5


def test_auditor_that_is_closed_in_mid_run_is_done_with_its_topics(place: Path) -> None:
    """It is closed while it reads, publishes or waits. The trail closes as soon as the run has returned."""
    ended = Event()

    def keep_writing(topic: Topic) -> None:
        while not ended.wait(0.0005):
            topic.append_many([b"more"] * 50, timestamps=[START] * 50)
            topic.flush()

    with Topic.open(place / "orders", create=True) as topic:
        writing = Thread(target=keep_writing, args=[topic])
        writing.start()
        try:
            for after in (0.0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.2):
                with Topic.open(place / audit.TRAIL, create=True) as trail:
                    auditor = audit.Auditor(topic, trail, window=MINUTE)
                    closing = Timer(after, auditor.close)
                    closing.start()
                    auditor.run(every=0.001)
                closing.join()
        finally:
            ended.set()
            writing.join()
    count_log(place)
    assert not balance(place, to=place).differences


def test_auditor_closed_by_a_signal_handler_finishes_what_it_is_at(place: Path) -> None:
    write(place, 5)
    with Topic.open(place / "orders", mode="r") as topic, Topic.open(place / audit.TRAIL, create=True) as trail:

        def clock() -> int:
            auditor.close()
            return LATER

        auditor = audit.Auditor(topic, trail, window=MINUTE, clock=clock)
        auditor.run(every=60.0)  # the clock is asked in the middle of a pass, in this thread
        assert not topic.group_info("audit").members
    assert counted(place)["log"][START].records >= 1
    count_log(place)  # the next one counts the rest
    assert counted(place)["log"][START].records == 5


def test_run_ends_when_the_auditor_is_closed(place: Path) -> None:
    write(place, 5)
    with Topic.open(place / "orders", mode="r") as topic, Topic.open(place / audit.TRAIL, create=True) as trail:
        auditor = audit.Auditor(topic, trail, window=MINUTE)
        Timer(0.2, auditor.close).start()
        auditor.run(every=0.01)
        assert len(list(trail.read())) >= 1


def test_balance_that_would_compare_nothing_is_refused(place: Path) -> None:
    """Its report without a difference would read as a proof."""
    write(place, 10)
    assert count_log(place) == 10
    other = copy_of(place, place.with_name("b"))
    with pytest.raises(ValueError, match="2 sources and no destination"):
        balance(place, other)
    with pytest.raises(ValueError, match="0 sources and no destination"):
        balance()
    with pytest.raises(ValueError, match="nothing to compare: no application has counted the topics of"):
        balance(place)
