"""A record that is flushed alone: the same bytes, accounts and errors as any other, in fewer steps."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import Interrupter, every_point

from conftest import records_of, tree, values_of
from loglib import FlushPolicy, LogClosedError, RecordTooLargeError, StorageFullError, Topic, testing
from loglib.append.tail import TailWriter
from loglib.format.columns import Columns
from loglib.format.header import NO_PRODUCER, PRODUCERS, batch_of_one, encode_body, stamp
from loglib.system.files import Files
from loglib.system.group_commit import Turn

Open = Callable[..., Topic]
NUMBER = st.integers(0, (1 << 32) - 1)
OFFSET = st.integers(0, (1 << 62) - 1)


@given(
    st.binary(max_size=40), st.none() | st.binary(max_size=20), OFFSET, OFFSET, NUMBER, NUMBER, NUMBER, NUMBER, OFFSET,
    OFFSET, OFFSET, OFFSET, st.booleans(), NUMBER,
)  # fmt: skip
def test_batch_of_one_record_has_the_bytes_that_any_batch_has(
    value: bytes, key: bytes | None, base: int, durable: int, epoch: int, nonce: int, previous: int, before: int,
    jump: int, appended: int, event: int, largest: int, produced: bool, salt: int,
) -> None:  # fmt: skip
    body = encode_body(Columns([value], None if key is None else [key]), codec=0)
    header, crc = stamp(
        body, base_offset=base, durable_up_to=durable, writer_epoch=epoch, writer_nonce=nonce, previous_crc=previous,
        previous_bytes=before, jump_offset=jump, append_time=appended, event_time=event, running_max_timestamp=largest,
        producer=NO_PRODUCER, producers_in_segment=produced, salt=salt,
    )  # fmt: skip
    rest = (previous, appended, event, event, largest, 0, 0, before, nonce, jump)
    flags = PRODUCERS if produced else 0
    short = batch_of_one(value, key, (base, durable, epoch), rest, flags=flags, salt=salt)
    assert short == (header + b"".join(body.parts), crc)


class Determined(Files):
    """Two writers of the same log draw the same numbers."""

    def random_bytes(self, count: int) -> bytes:
        return bytes(range(1, count + 1))


class Stepping:
    """A clock that the test moves, mostly forwards."""

    def __init__(self) -> None:
        self._now = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self._now

    def step(self) -> None:
        self._now += 1000 if self._now % 7 else -1500


VALUE = st.binary(max_size=30) | st.integers(0, 3000).map(bytes)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), VALUE, st.booleans()),
        st.tuples(st.just("keyed"), VALUE, st.booleans()),
        st.tuples(st.just("null"), st.none(), st.booleans()),
        st.tuples(st.just("numbered"), VALUE, st.booleans()),
        st.tuples(st.just("many"), VALUE, st.just(False)),
        st.tuples(st.just("flush"), st.none(), st.just(False)),
        st.tuples(st.just("roll"), st.none(), st.just(False)),
        st.tuples(st.just("reopen"), st.none(), st.just(False)),
    ),
    max_size=25,
)


def make_calls(path: Path, calls: list[tuple[str, Any, bool]], **policies: Any) -> list[Any]:
    """The offsets that the calls return."""
    clock = Stepping()
    topic = testing.open_topic(path, files=Determined(), clock=clock)
    found: list[Any] = []
    for number, (name, value, sync) in enumerate(calls):
        clock.step()
        if name == "append":
            found.append(topic.append(value, sync=sync))
        elif name == "keyed":
            found.append(topic.append(value, b"key", sync=sync))
        elif name == "null":
            found.append(topic.append(None, sync=sync))
        elif name == "numbered":
            found.append(topic.append(value, producer=("p", number), sync=sync))
        elif name == "many":
            found.extend(topic.append_many([value] * 3))
        elif name == "flush":
            topic.flush()
        elif name == "roll":
            topic.partition(0).roll()
        else:
            topic.close()
            topic = testing.open_topic(path, files=Determined(), clock=clock)
    topic.close()
    return found


@settings(max_examples=60, deadline=None)
@given(
    calls=CALLS, records=st.sampled_from([None, 1, 3]), size=st.sampled_from([None, 1, 2000]),
    codec=st.sampled_from(["none", "zlib"]), batch_records=st.sampled_from([1, 2, 65_536]),
)  # fmt: skip
def test_log_has_the_same_bytes_without_the_short_ways(
    calls: list[tuple[str, Any, bool]], records: int | None, size: int | None, codec: str, batch_records: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    directory = tmp_path_factory.mktemp("same")
    one, other = directory / "one" / "t", directory / "other" / "t"
    flush = FlushPolicy(records=records, bytes=size, interval=None)
    testing.open_topic(
        one, files=Determined(), clock=Stepping(), flush=flush, segment_bytes=8192, compression=codec,
        batch_records=batch_records,
    ).close()  # fmt: skip
    shutil.copytree(one, other)
    offsets = make_calls(one, calls)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TailWriter, "write_one", lambda *_: None)
        patched.setattr(Turn, "take_at_once", lambda *_: None)
        assert make_calls(other, calls) == offsets
    first, second = tree(one), tree(other)
    for each in (first, second):
        each.pop("0000/lock", None)  # names the holder
    assert first == second
    with Topic.open(one, mode="r") as topic:
        assert not topic.verify().damage


def test_record_goes_behind_those_that_wait(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    topic.append(b"waits")
    topic.append(b"comes after it", sync=True)
    assert [record.value for record in records_of(path)] == [b"waits", b"comes after it"]


def test_record_beside_written_but_hidden_ones_makes_them_visible(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    topic.append_many([b"x"] * 2000)  # written at once, and not yet flushed
    topic.append(b"last", sync=True)
    assert len(records_of(path)) == 2001


def test_record_of_another_thread_s_turn_takes_the_long_way(open_topic: Open, path: Path) -> None:
    topic = open_topic()
    topic.append(b"first", sync=True)
    turn = topic.partition(0)._access.writer()._turn
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert go.wait(60)

    holder = threading.Thread(target=lambda: turn.take(hold))
    holder.start()
    assert entered.wait(60)
    appender = threading.Thread(target=lambda: topic.append(b"second", sync=True))
    appender.start()
    while not turn._arrived:
        pass
    go.set()
    holder.join(60)
    appender.join(60)
    assert [record.value for record in records_of(path)] == [b"first", b"second"]


def test_policy_of_one_record_with_an_interval_leaves_the_flush_to_the_timer(open_topic: Open, path: Path) -> None:
    topic = open_topic(flush=FlushPolicy(records=1, interval=3600.0))
    writer = topic.partition(0)._access.writer()
    assert writer.timer is not None
    assert writer.append_lone(b"x", sync=False) is None
    assert writer.append_lone(b"x", sync=True) == 0
    assert [record.value for record in records_of(path)] == [b"x"]


def test_policy_of_one_record_without_an_interval_flushes_each(open_topic: Open, path: Path) -> None:
    topic = open_topic(flush=FlushPolicy(records=1, interval=None))
    for number in range(3):
        topic.append(b"%d" % number)
        assert len(records_of(path)) == number + 1


def test_record_that_begins_a_segment_tells_of_the_roll(open_topic: Open) -> None:
    topic = open_topic(segment_bytes=4096)
    writer = topic.partition(0)._access.writer()
    rolled: list[int] = []
    writer.on_roll = lambda: rolled.append(1)
    while not rolled:
        topic.append(bytes(1000), sync=True)
    assert len(topic.partition(0).segments) == 2


def test_too_large_record_is_refused(open_topic: Open) -> None:
    topic = open_topic(max_record_bytes=10)
    topic.append(bytes(10), sync=True)
    with pytest.raises(RecordTooLargeError):
        topic.append(bytes(11), sync=True)
    assert len(values_of(topic)) == 1


def test_closed_writer_refuses(open_topic: Open) -> None:
    topic = open_topic()
    topic.append(b"x", sync=True)
    writer = topic.partition(0)._access.writer()
    topic.close()
    assert writer.append_lone(b"y", sync=True) is None
    with pytest.raises(LogClosedError):
        topic.append(b"y", sync=True)


def test_full_disk_loses_the_record_by_name_and_the_next_one_is_written(open_topic: Open, path: Path) -> None:
    disk = testing.FullDisk(1 << 20)
    topic = open_topic(files=disk)
    topic.append(b"x", sync=True)
    disk.room = 0
    with pytest.raises(StorageFullError) as caught:
        topic.append(b"lost", sync=True)
    assert [(each.partition, len(each.offsets)) for each in caught.value.lost] == [(0, 1)]
    assert not caught.value.appended
    disk.room = 1 << 20
    topic.append(b"y", sync=True)
    assert [record.value for record in records_of(path)] == [b"x", b"y"]


@pytest.mark.parametrize("partitions", [1, 3])
def test_records_without_a_key_go_to_all_partitions(partitions: int, open_topic: Open) -> None:
    topic = open_topic(partitions=partitions)
    assert {topic.append(b"x", sync=True).partition for _ in range(100)} == set(range(partitions))


def test_interrupt_at_any_point_appends_the_record_once_or_not_at_all(open_topic: Open, tmp_path: Path) -> None:
    """And the error says which, so that the caller knows whether to append it again."""
    numbers = iter(range(1 << 20))

    def once(interrupter: Interrupter) -> bool:
        path = tmp_path / f"t{next(numbers)}"
        topic = open_topic(path)
        topic.append(b"before", sync=True)
        interrupted, told = False, False
        try:
            interrupter.run(lambda: topic.append(b"lone", sync=True))
        except KeyboardInterrupt as error:
            interrupted, told = True, bool(getattr(error, "appended", ()))
        topic.append(b"after", sync=True)
        topic.close()
        found = [record.value for record in records_of(path)]
        assert found in ([b"before", b"lone", b"after"], [b"before", b"after"]), interrupter.where
        assert not told or b"lone" in found, interrupter.where
        assert interrupted or b"lone" in found
        shutil.rmtree(path)
        return interrupted

    assert len(list(every_point(once, lines_only=True))) > 20
