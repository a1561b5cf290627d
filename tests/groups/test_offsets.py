"""Offsets: what was committed is there, after compaction and crashes as well; damage is never "no commit yet"."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import committed
import pytest
from committed import OF_TOPIC, A, B, anyone, entry, logs, offset_of, put, segments

from conftest import Clock
from loglib import Commit, CorruptLogError, OffsetOutOfRangeError, RecordTooLargeError, testing
from loglib.config.policies import FlushPolicy
from loglib.groups.offsets import Offsets
from loglib.log.cursor import Cursor
from loglib.log.history import history_at
from loglib.testing import Call, WatchedFiles

Opener = Callable[..., Offsets]

directory = committed.directory
open_log = committed.open_log


def test_nothing_is_committed_at_first(open_log: Opener) -> None:
    assert open_log().commits() == {}


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_commit_is_there_for_all(open_log: Opener, durability: str) -> None:
    one, two = open_log(durability=durability), open_log(durability=durability)
    assert two.commits() == {}
    one.commit({A: entry(7, 3, meta="mine"), B: entry(8, 0)}, fence=anyone)
    expected = {A: Commit(7, "mine", 3, "one", 5), B: Commit(8, "", 0, "one", 5)}
    assert one.commits() == two.commits() == open_log(durability=durability).commits() == expected
    assert two.entries()[A] == entry(7, 3, meta="mine")._replace(number=1, topic="clicks")


def test_members_commit_in_turns(open_log: Opener, directory: Path) -> None:
    one, two = open_log(), open_log()
    for offset in range(0, 20, 2):
        put(one, offset)
        put(two, offset + 1, of=B)
        assert (offset_of(one), offset_of(two, B)) == (offset, offset + 1)
    assert len(logs(directory)) == 2


def test_member_that_is_stopped_in_a_commit_stops_nobody(open_log: Opener) -> None:
    """Whoever is stopped holds its own log, and nothing else."""

    class Stopping(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "datasync" and call.file.endswith(".log") and stopping:
                stopping.clear()
                put(healthy, 8, of=B)
                assert offset_of(healthy, B) == 8 and offset_of(healthy) in (5, 6)

    stopping: list[bool] = []
    stopped, healthy = open_log(files=Stopping()), open_log()
    put(stopped, 5)
    stopping.append(True)
    put(stopped, 6)
    assert not stopping and offset_of(healthy) == 6


def test_later_commit_counts_and_may_go_back(open_log: Opener) -> None:
    log = open_log()
    put(log, 9)
    put(log, 5)
    assert offset_of(log) == 5


def test_commit_of_a_lower_generation_changes_nothing(open_log: Opener) -> None:
    log, late = open_log(), open_log()
    put(log, 5, generation=2)
    put(late, 9, generation=1)
    assert offset_of(log) == offset_of(late) == offset_of(open_log()) == 5


def test_claim_without_a_commit_is_none_and_keeps_late_ones_out(open_log: Opener) -> None:
    log, late = open_log(), open_log()
    log.commit({A: entry(None, 4)}, fence=anyone)
    put(late, 9, generation=3)
    assert late.commits() == {} and late.entries()[A].generation == 4


def test_member_that_may_not_commit_writes_nothing(open_log: Opener, directory: Path) -> None:
    log = open_log()
    put(log, 5)
    size = segments(directory)[0].stat().st_size

    def fence() -> None:
        raise RuntimeError("evicted")

    for each in (log, open_log()):
        with pytest.raises(RuntimeError, match="evicted"):
            each.commit({A: entry(9)}, fence=fence)
    assert [each.stat().st_size for each in segments(directory)] == [size]


def test_commit_after_which_the_partition_is_lost_is_not_said_to_have_worked(open_log: Opener) -> None:
    log, asked = open_log(), []

    def fence() -> None:
        asked.append(1)
        if len(asked) == 2:  # evicted while it wrote
            raise RuntimeError("evicted")

    with pytest.raises(RuntimeError, match="evicted"):
        log.commit({A: entry(9)}, fence=fence)


def test_commit_can_be_read_as_the_format_says(open_log: Opener) -> None:
    log = open_log()
    log.commit({A: entry(7, 3, meta="ü"), B: entry(None, 8)}, fence=anyone)
    assert log._own is not None
    mark = log._own._log.mark()
    (batch,) = Cursor.at(log._own._log, mark.log_start_offset).read(mark.flushed_end)
    assert batch.keys == [b"one"] and batch.timestamps == [5]
    assert json.loads(batch.values[0] or b"") == [
        {"topic": "clicks", "log_id": OF_TOPIC.hex(), "partitions": {"0": [7, 3, 1, 77, "ü"]}},
        {"topic": "a-b", "log_id": OF_TOPIC.hex(), "partitions": {"12": [None, 8, 1, 77, ""]}},
    ]


def test_huge_commit_is_refused(open_log: Opener) -> None:
    log = open_log()
    with pytest.raises(RecordTooLargeError, match="the commit is 9"):
        put(log, 5, meta="x" * (9 << 20))
    assert log.commits() == {}


# --- failures and files -------------------------------------------------------------------------------------


def test_later_of_two_logs_of_one_member_counts(open_log: Opener, directory: Path) -> None:
    """A member whose log failed goes on in another, which may come before the first in order."""
    for _ in range(20):
        log = open_log()
        put(log, 4)
        own = log._own
        assert own is not None
        log._own = None  # and its lock is held still
        put(log, 5)
        assert offset_of(log) == offset_of(open_log()) == 5
        own.close()
        log.close()
        for each in logs(directory)[1:]:
            (each / "watermark").rename(directory / ".aside")
            for left in each.iterdir():
                left.unlink()
            each.rmdir()


# --- history ------------------------------------------------------------------------------------------------


def test_history_is_the_batch_before_wherever_one_asks(path: Path, clock: Clock) -> None:
    with testing.open_topic(path, flush=FlushPolicy(None, None, None), clock=clock) as topic:
        partition = topic.partition(0)
        log = partition._access.log
        assert history_at(log, 0) == 0
        crcs = [0]
        for number in range(6):
            topic.append_many([b"%d" % number] * 3)
            topic.flush()
            if number % 2:
                partition.roll()
        for batch in topic.batches():
            header = batch._header
            assert history_at(log, header.base_offset) == header.previous_crc == crcs[-1]
            assert history_at(log, header.base_offset + 2) == header.header_crc
            assert history_at(log, header.next_offset) == header.header_crc
            crcs.append(header.header_crc)
        end = partition.log_end_offset
        partition._access.writer().drop_before(end)
        assert partition.log_start_offset == end and history_at(log, end) == crcs[-1]
        for offset in (0, end + 8):
            with pytest.raises(OffsetOutOfRangeError):
                history_at(log, offset)
        only = next((path / "0000").glob("*.log"))
        only.rename(path / "aside")
        with pytest.raises(CorruptLogError, match="the segment that begins at offset"):
            history_at(log, end)
        (path / "aside").rename(only)


def test_history_is_asked_again_when_retention_is_quicker(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with testing.open_topic(path, flush=FlushPolicy(None, None, None), clock=clock) as topic:
        topic.append(b"x")
        topic.flush()
        partition = topic.partition(0)
        partition.roll()
        log, end = partition._access.log, partition.log_end_offset
        expected = history_at(log, end)
        open_segment = log.open_segment

        def dropped_meanwhile(offset: int, **how: Any) -> Any:
            monkeypatch.setattr(log, "open_segment", open_segment)
            partition._access.writer().drop_before(end)
            return open_segment(offset, **how)

        monkeypatch.setattr(log, "open_segment", dropped_meanwhile)
        assert history_at(log, end) == expected != 0
