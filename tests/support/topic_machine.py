"""A state machine of Hypothesis: a topic in as many lives as it takes, compared with the lists of the model."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
from clock_worlds import Machine
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_ledger import Appended, Disk, Harm, Ledger, Row, harm_segment, harm_watermark

from conftest import NOW, crash_copy, sound
from loglib import FlushPolicy, LogClosedError, LogError, OffsetOutOfRangeError, OffsetRange, Retention, testing
from loglib.config.quantities import microseconds
from loglib.config.times import to_datetime
from loglib.errors import InvalidOffsetError
from loglib.format.watermark import NAME, newest
from loglib.partition import Partition
from loglib.segment import Identity, read_segment_header
from loglib.system.files import REAL

HOUR = 3600 * 1_000_000
SEGMENT_BYTES = 4096

# What is drawn.
times = st.integers(NOW - 20 * HOUR, NOW + 60 * HOUR)
values = st.one_of(st.none(), st.binary(max_size=30), st.sampled_from([b"", b"x" * 300, bytes(3000)]))
keys = st.sampled_from([b"", b"a", b"b", b"c", b"key"])
headers = st.lists(st.tuples(st.sampled_from(["", "a", "ключ"]), st.binary(max_size=9)), max_size=2).map(tuple)
whole_rows = st.builds(Row, values, st.none() | keys, st.none() | times, headers)
plain_rows = values.map(Row)
runs = st.builds(  # many records without drawing each
    lambda rows, times: rows * times, st.lists(whole_rows, min_size=1, max_size=6), st.sampled_from([1, 2, 10, 80])
)
harms = st.lists(
    st.builds(
        Harm, st.sampled_from(["cut", "zeros", "noise", "longer"]), st.integers(0, 1 << 16), st.binary(max_size=99)
    ),
    max_size=3,
)
numbers = st.integers(0, 1 << 16)  # of a partition or a record, modulo how many there are
limits = st.fixed_dictionaries({}, optional={"max_records": st.integers(1, 60), "max_bytes": st.integers(1, 5000)})
flush_policies = st.builds(
    FlushPolicy,
    records=st.none() | st.integers(1, 50),
    interval=st.none(),
    bytes=st.none() | st.integers(1, 3000),
)
# With retention comes a thread, which flushes what is due when it gets there: then only flush() flushes.
policies = st.one_of(
    st.fixed_dictionaries({"flush": flush_policies, "retention": st.just(Retention(age=None))}),
    st.fixed_dictionaries({
        "flush": st.just(FlushPolicy(records=None, interval=None, bytes=None)),
        "retention": st.sampled_from([Retention(age=timedelta(hours=2)), Retention(age=None, bytes=5000)]),
    }),
)  # fmt: skip


class TopicMachine(RuleBasedStateMachine):
    """One topic, in as many lives as it takes, and one ledger for each of its partitions."""

    whole_every = 1  # after so many steps everything is read

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.directory = Path(tempfile.mkdtemp(prefix="model-"))
        self.path = self.directory / "0"
        self.clock = Machine()
        self.latest = self.clock()  # that the clock has ever shown
        self.disk = Disk()
        self.sequence = 0
        self.calls: dict[str, tuple[dict[str, Any], int]] = {}  # each producer's last one

    @initialize(
        partitions=st.integers(1, 3), policy=policies, compression=st.sampled_from(["none", "zlib", "lz4", "zstd"]),
        batch_bytes=st.sampled_from([1, 100, 1000, 1 << 20]), batch_records=st.sampled_from([1, 7, 1 << 16]),
        durability=st.sampled_from(["disk", "disk", "os"]), seed=st.integers(0, 99),
    )  # fmt: skip
    def make(self, *, partitions: int, policy: dict[str, Any], seed: int, **arguments: Any) -> None:
        # The partition of keyless records must be the same when an example is run again.
        below = random.Random(seed).randrange
        self.chance = mock.patch("loglib.append.placement._random_below", below)
        self.chance.start()
        self.ledgers = [Ledger() for _ in range(partitions)]
        self.live(
            partitions=partitions, segment_bytes=SEGMENT_BYTES, segment_age=None,
            producer_expiry=None,  # it goes by the wall clock, which is wrong here for hours
            **policy, **arguments,
        )  # fmt: skip

    def live(self, **arguments: Any) -> None:
        self.topic = testing.open_topic(self.path, files=self.disk, clock=self.clock, **arguments)
        self.other = testing.open_topic(self.path, mode="r", clock=self.clock)  # as another process would
        self.reader = self.topic.follow("begin")
        self.positions = {each.id: each.log_start_offset for each in self.topic.partitions}

    def teardown(self) -> None:
        if hasattr(self, "topic"):
            self.topic.close()
            self.other.close()
        if hasattr(self, "chance"):
            self.chance.stop()
        shutil.rmtree(self.directory)

    def pairs(self) -> Iterator[tuple[Partition, Ledger]]:
        return zip(self.topic.partitions, self.ledgers, strict=True)

    def pick(self, number: int) -> tuple[Partition, Ledger]:
        number %= len(self.ledgers)
        return self.topic.partition(number), self.ledgers[number]

    # --- what always holds -----------------------------------------------------------------------------

    @invariant()
    def readers_see_what_was_flushed(self) -> None:
        self.steps += 1
        for partition, ledger in self.pairs():
            other = self.other.partition(partition.id)
            self.look(partition, ledger)
            assert (other.log_start_offset, other.high_watermark) == (ledger.start, ledger.flushed)
            self.check_flush_policy(ledger)
            if self.steps % self.whole_every == 0:
                expected = ledger.records(partition.id, ledger.start, ledger.flushed)
                assert list(partition.read()) == expected
                assert list(other.read()) == expected
                assert sound(partition).records == len(expected)

    def look(self, partition: Partition, ledger: Ledger) -> None:
        """Take over what the log decides by itself: what is flushed, dropped, and the append times."""
        start, flushed = partition.log_start_offset, partition.high_watermark
        assert start <= flushed <= partition.log_end_offset
        assert ledger.start <= start
        assert ledger.flushed <= flushed
        if ledger.appended:
            assert ledger.appended[-1].offset < partition.log_end_offset
        dropped = [each for each in ledger.appended if ledger.start <= each.offset < start]
        self.check_retention(dropped, ledger.start, flushed)
        ledger.start, ledger.flushed = start, flushed
        unseen = {each.offset: each for each in ledger.readable() if each.timestamp is None}
        for record in partition.read(min(unseen)) if unseen else ():
            if record.offset in unseen:
                assert unseen[record.offset].appended_at <= record.timestamp <= self.latest
                unseen[record.offset].timestamp = record.timestamp

    def check_retention(self, dropped: list[Appended], start: int, flushed: int) -> None:
        policy = self.topic.config.retention
        if dropped and policy.age is not None:
            assert max(each.truly_at for each in dropped) < self.clock.true_us - microseconds(policy.age)
        elif dropped:
            assert policy.bytes is not None
            assert flushed - start > policy.bytes

    def check_flush_policy(self, ledger: Ledger) -> None:
        limit = self.topic.config.flush.records
        assert limit is None or len(ledger.unflushed()) < limit

    # --- appending ---------------------------------------------------------------------------------------

    @rule(row=whole_rows, number=st.none() | numbers, sync=st.booleans())
    def append(self, row: Row, number: int | None, sync: bool) -> None:
        """One record, with all that one may have."""
        place = None if number is None else number % len(self.ledgers)
        position = self.topic.append(
            row.value, row.key, timestamp=row.timestamp, headers=row.headers, partition=place, sync=sync
        )
        if place is None and row.key is not None:
            place = crc32(row.key) % len(self.ledgers)
        assert place in (None, position.partition)
        self.ledgers[position.partition].append([row], [range(position.offset, position.offset + 1)], self.clock)
        if sync:
            assert self.topic.partition(position.partition).high_watermark > position.offset

    @rule(rows=st.lists(plain_rows, min_size=1, max_size=20), late=times)
    def append_plain(self, rows: list[Row], late: int) -> None:
        """Values alone, by the short way, and one with a timestamp among them."""
        rows.insert(len(rows) // 2, Row(b"late", timestamp=late))
        for row in rows:
            more: dict[str, Any] = {} if row.timestamp is None else {"timestamp": row.timestamp}
            position = self.topic.append(row.value, **more)
            offsets = range(position.offset, position.offset + 1)
            self.ledgers[position.partition].append([row], [offsets], self.clock)

    @rule(rows=runs, columns=st.sets(st.sampled_from(["keys", "timestamps", "headers"])), number=st.none() | numbers)
    def append_many(self, rows: list[Row], columns: set[str], number: int | None) -> None:
        rows = [self.with_columns(row, columns) for row in rows]
        place = None if number is None else number % len(self.ledgers)
        ranges = self.topic.append_many(
            [row.value for row in rows],
            keys=[row.key for row in rows] if "keys" in columns else None,
            timestamps=[row.timestamp or 0 for row in rows] if "timestamps" in columns else None,
            headers=[row.headers for row in rows] if "headers" in columns else None,
            partition=place,
        )
        self.enter(rows, ranges, place)

    def with_columns(self, row: Row, columns: set[str]) -> Row:
        return Row(
            row.value,
            row.key if "keys" in columns else None,
            (row.timestamp or self.clock()) if "timestamps" in columns else None,
            row.headers if "headers" in columns else (),
        )

    def enter(self, rows: list[Row], ranges: list[OffsetRange], place: int | None) -> None:
        """Note rows that a call spread over the partitions. Those without a key stay together."""
        targets = [
            crc32(row.key) % len(self.ledgers) if place is None and row.key is not None else place for row in rows
        ]
        counts = dict.fromkeys(range(len(self.ledgers)), 0)
        for each in ranges:
            counts[each.partition] += len(each.offsets)
        for target in targets:
            if target is not None:
                counts[target] -= 1
        keyless = [number for number, count in counts.items() if count]
        assert len(keyless) <= 1
        targets = [keyless[0] if target is None else target for target in targets]
        for number, ledger in enumerate(self.ledgers):
            here = [row for row, target in zip(rows, targets, strict=True) if target == number]
            ledger.append(here, [each.offsets for each in ranges if each.partition == number], self.clock)

    # --- producers -----------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(["etl", "web"]), rows=runs, number=st.none() | numbers)
    def send(self, name: str, rows: list[Row], number: int | None) -> None:
        """An idempotent append: to one partition, or spread by keys."""
        self.sequence += 1
        rows = [Row(row.value, row.key or b"") for row in rows]
        call: dict[str, Any] = {"values": [row.value for row in rows], "keys": [row.key for row in rows]}
        call["partition"] = None if number is None else number % len(self.ledgers)
        self.calls[name] = (call, self.sequence)
        self.send_again(name)

    @precondition(lambda self: self.calls)
    @rule(name=st.sampled_from(["etl", "web"]))
    def send_again(self, name: str) -> None:
        """What arrived the first time is not appended again; what a crash took is."""
        if name not in self.calls:
            return
        call, sequence = self.calls[name]
        got = {each.partition: each.offsets for each in self.topic.append_many(**call, producer=(name, sequence))}
        rows = [Row(*pair) for pair in zip(call["values"], call["keys"], strict=True)]
        for number, ledger in enumerate(self.ledgers):
            place = call["partition"]
            here = [r for r in rows if (crc32(r.key or b"") % len(self.ledgers) if place is None else place) == number]
            assert len(got.get(number, ())) == len(here)
            sent = ledger.sent.setdefault(name, [])
            if sent and sent[-1][0] == sequence:
                assert got[number] == sent[-1][1]
            elif here:
                ledger.append(here, [got[number]], self.clock)
                sent.append((sequence, got[number]))

    @rule(name=st.sampled_from(["etl", "web"]), number=numbers)
    def send_too_late(self, name: str, number: int) -> None:
        partition, ledger = self.pick(number)
        sent = ledger.sent.get(name)
        if sent:
            with pytest.raises(LogError, match="too late"):
                partition.append_many([b"late"], producer=(name, sent[-1][0] - 1))

    # --- housekeeping ----------------------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        self.topic.flush()
        for partition in self.topic.partitions:
            assert partition.high_watermark == partition.log_end_offset

    @rule(number=numbers)
    def roll(self, number: int) -> None:
        partition, _ = self.pick(number)
        before = [each.base_offset for each in partition.segments]
        has_records = partition.log_end_offset > before[-1]
        assert partition.roll() == has_records
        end = partition.log_end_offset
        assert partition.high_watermark == end
        after = [each.base_offset for each in partition.segments]
        assert after[: len(before)] == before
        assert after[-1] == end  # the open batch may have begun a segment as well

    @rule(hours=st.integers(1, 8))
    def time_passes(self, hours: int) -> None:
        self.clock.true_us += hours * HOUR
        self.latest = max(self.latest, self.clock())

    @rule(hours=st.sampled_from([-1000, -5, -1, 0, 1, 1000]))
    def clock_is_set_wrong(self, hours: int) -> None:
        """Retention goes on by the time since the boot; records get the time that the clock shows."""
        self.clock.error_us = hours * HOUR
        self.latest = max(self.latest, self.clock())
        for partition, ledger in self.pairs():
            written = partition._access.writer().batch.tail.end
            for each in ledger.appended:
                if each.offset >= written:  # stamped when its batch is written
                    each.appended_at = min(each.appended_at, self.clock())

    @rule()
    def retain(self) -> None:
        policy = self.topic.config.retention
        decisions = self.topic.retain()
        dropped = {(each.partition, each.base_offset) for each in decisions if each.drop}
        for partition in self.topic.partitions:
            segments = partition.segments
            assert not dropped & {(partition.id, each.base_offset) for each in segments}
            oldest = segments[0]
            if policy.age is not None and oldest.sealed:
                identity = Identity.of(self.topic.log_id, partition.id)
                sealed = read_segment_header(REAL, segments[1].path, identity).created_boottime
                assert self.clock.moment().boottime_us - sealed <= microseconds(policy.age)
            if policy.bytes is not None and oldest.sealed:
                assert segments[-1].end_offset - oldest.base_offset <= policy.bytes

    # --- reading ---------------------------------------------------------------------------------------------

    def place(self, ledger: Ledger, kind: str, number: int, time: int) -> tuple[Any, int]:
        """A start as a reader takes it, and its offset."""
        readable = ledger.readable()
        if kind == "begin" or (kind == "record" and not readable):
            return "begin", ledger.start
        if kind == "end":
            return "end", ledger.flushed
        if kind == "record":
            offset = readable[number % len(readable)].offset
            return offset, offset
        if readable and number % 2:
            time = readable[number % len(readable)].timestamp + number % 3 - 1
        return to_datetime(time), ledger.first_at_or_after(time)

    places = st.tuples(st.sampled_from(["begin", "end", "record", "record", "time", "time"]), numbers, times)

    @rule(number=numbers, start=places, end=places)
    def read_between(self, number: int, start: tuple[str, int, int], end: tuple[str, int, int]) -> None:
        partition, ledger = self.pick(number)
        start_at, start_offset = self.place(ledger, *start)
        end_at, end_offset = self.place(ledger, *end)
        expected = ledger.records(partition.id, start_offset, end_offset)
        assert list(partition.read(start_at, end_at)) == expected
        batches = list(partition.batches(start_at, end_at))
        assert [record for batch in batches for record in batch.records()] == expected
        assert [offset for batch in batches for offset in batch.offsets] == [record.offset for record in expected]

    @rule(starts=st.lists(places, min_size=3, max_size=3))
    def follow_all(self, starts: list[tuple[str, int, int]]) -> None:
        places = [self.place(ledger, *start) for ledger, start in zip(self.ledgers, starts, strict=False)]
        got = list(self.topic.follow({number: start for number, (start, _) in enumerate(places)}, timeout=0))
        for number, (_, offset) in enumerate(places):
            ledger = self.ledgers[number]
            assert [each for each in got if each.partition == number] == ledger.records(number, offset, ledger.flushed)

    @rule(number=numbers, offset=numbers)
    def read_from_no_record(self, number: int, offset: int) -> None:
        """An offset that is no record's is refused, and says why."""
        partition, ledger = self.pick(number)
        offset %= ledger.flushed + 99
        if not ledger.start <= offset <= ledger.flushed:
            with pytest.raises(OffsetOutOfRangeError):
                partition.read(offset)
        elif offset != ledger.flushed and offset not in {each.offset for each in ledger.appended}:
            with pytest.raises(InvalidOffsetError) as refused:
                partition.read(offset)
            assert refused.value.next_offset in {ledger.flushed, *(each.offset for each in ledger.appended)}

    @rule(limits=limits)
    def poll(self, limits: Mapping[str, int]) -> None:
        """The reader that stays open gets each record once."""
        try:
            polled = self.reader.poll(**limits)
        except OffsetOutOfRangeError as error:
            overtaken = self.ledgers[error.partition]
            assert self.positions[error.partition] < overtaken.start
            self.seek_to({error.partition: "begin"}, {error.partition: overtaken.start})
            return
        for number, ledger in enumerate(self.ledgers):
            got = [record for record in polled if record.partition == number]
            expected = ledger.records(number, self.positions[number], ledger.flushed)[: len(got)]
            # Retention may have dropped a record before its append time was looked at; this reader had its file open.
            expected = [
                each._replace(timestamp=each.timestamp or seen.timestamp)
                for each, seen in zip(expected, got, strict=False)
            ]
            assert got == expected
            if got:
                self.positions[number] = got[-1].next_offset
        assert self.reader.tell() == self.positions
        if not polled:
            assert self.positions == {number: ledger.flushed for number, ledger in enumerate(self.ledgers)}

    @rule(number=numbers, start=places)
    def seek(self, number: int, start: tuple[str, int, int]) -> None:
        partition, ledger = self.pick(number)
        start_at, offset = self.place(ledger, *start)
        self.seek_to({partition.id: start_at}, {partition.id: offset})

    def seek_to(self, starts: dict[int, Any], offsets: dict[int, int]) -> None:
        self.reader.seek(starts)
        self.positions |= offsets
        assert self.reader.tell() == self.positions

    # --- ends and beginnings -------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        ends = [partition.log_end_offset for partition in self.topic.partitions]
        self.topic.close()
        self.other.close()
        with pytest.raises(LogClosedError):
            self.topic.append(b"too late")
        self.live()
        for partition, end in zip(self.topic.partitions, ends, strict=True):
            assert partition.recovery is not None and partition.recovery.clean
            assert partition.high_watermark >= end  # above it where records were not yet a batch

    @rule()
    def kill(self) -> None:
        """A killed process loses the records that were not yet written, and nothing else."""
        written = [partition._access.writer().batch.tail.end for partition in self.topic.partitions]
        self.crash(lambda copy: None)
        assert [partition.high_watermark for partition in self.topic.partitions] == written

    @rule(
        harms=st.lists(harms, min_size=3, max_size=3),
        older=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=3, max_size=3),
        lost=st.sampled_from([False, False, False, True]),
    )
    def cut_power(self, harms: list[list[Harm]], older: list[tuple[bool, bool]], lost: bool) -> None:
        """A power cut takes anything that was not synced, whole or in part, and nothing else."""
        written = [partition._access.writer().batch.tail.end for partition in self.topic.partitions]
        durable: list[int] = []

        def harm(copy: Path) -> None:
            for partition in self.topic.partitions:
                directory = copy / os.path.basename(partition.path)
                mark = newest((directory / NAME).read_bytes(), partition._access.log.identity.salt)
                assert mark is not None
                durable.append(mark.durable_end)
                harm_segment(directory, mark, harms[partition.id])
                synced = self.disk.synced[os.path.join(partition.path, NAME)]
                harm_watermark(directory / NAME, synced, older[partition.id], lost=lost)

        self.crash(harm)
        for partition, low, high in zip(self.topic.partitions, durable, written, strict=True):
            assert low <= partition.high_watermark <= high

    def crash(self, harm: Callable[[Path], None]) -> None:
        """Go on with a copy of the files as they stand; the ledgers lose what it has lost."""
        copy = crash_copy(self.path, self.directory / str(int(self.path.name) + 1))
        harm(copy)
        self.topic.close()
        self.other.close()
        shutil.rmtree(self.path)
        self.path = copy
        self.live()
        for partition, ledger in self.pairs():
            assert partition.high_watermark == partition.log_end_offset
            ledger.lose_from(partition.high_watermark)
            ledger.flushed = min(ledger.flushed, partition.high_watermark)  # lost only with durability "os"
