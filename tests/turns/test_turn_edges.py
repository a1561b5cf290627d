"""What a process finds when it takes a partition back, and what may come between two steps. Two topics in one process
take turns as two processes do, so each step has its place here."""

from __future__ import annotations

import errno
import logging
import os
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from clock_worlds import HOUR, Machine
from interrupts import Interrupter, every_line
from takers import PATIENCE_S, opened, wait_until

from conftest import MANUAL, QUIET, alter, last_segment, records_of, sound, values_of
from loglib import LockedError, LogError, Retention, Topic, transaction
from loglib.append.section_writer import SectionWriter
from loglib.append.tail import TailWriter
from loglib.append.turns import Turns
from loglib.config.policies import TopicConfig
from loglib.errors import LogClosedError, StorageIOError, WriterFailedError
from loglib.format import watermark
from loglib.system import lock
from loglib.system.files import REAL, Files
from loglib.testing import FaultyFiles, UnsyncedFiles
from loglib.transactions.apply import Applier, end_hold
from loglib.transactions.notifications import _Listener


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A topic with two partitions, in a directory of its own, because transactions stand beside it."""
    path = tmp_path / "data" / "topic"
    path.parent.mkdir()
    Topic.open(path, create=True, partitions=2, **QUIET | {"flush": MANUAL}).close()
    return path


def writer_of(topic: Topic, partition: int = 0) -> SectionWriter:
    return topic._accesses[partition].writer()


def give_up(topic: Topic, partition: int = 0) -> None:
    """What the topic's thread does when another process waits."""
    writer = writer_of(topic, partition)
    writer._take_turn(writer._hand_over)
    assert writer.is_parked


def test_thread_that_takes_the_partition_back_while_another_gives_it_up_has_it(place: Path) -> None:
    """It took what was still locked, the other thread unlocked it, and two processes wrote at once."""
    appending, took = threading.Event(), threading.Event()
    unlock, take = lock.Lock.give_up, Turns._take_free

    def give_up_slowly(held: lock.Lock) -> None:
        if not appending.is_set():
            appender.start()
            assert appending.wait(PATIENCE_S)
            took.wait(1.0)  # which the other thread must not do before this one is through
        unlock(held)

    def take_and_tell(turns: Turns, of: Any) -> bool:
        found = take(turns, of)
        if threading.current_thread() is appender:
            took.set()
        return found

    def append() -> None:
        appending.set()
        mine.append(b"after", partition=0, producer=("p", 1))  # a batch of its own

    appender = threading.Thread(target=append)
    idle = mock.patch.object(SectionWriter, "look", lambda *_, **__: 1.0)  # the topic's thread gives nothing up
    with idle, opened(place, wait=PATIENCE_S) as mine:
        mine.append(b"before", partition=0)
        slowly = mock.patch.object(lock.Lock, "give_up", give_up_slowly)
        with slowly, mock.patch.object(Turns, "_take_free", take_and_tell):
            writer_of(mine)._take_turn(writer_of(mine)._hand_over)
            appender.join()
        assert not writer_of(mine).is_parked and not lock.is_free(REAL, str(place / "0000"))


# --- the log that it finds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 40])
def test_batches_of_another_process_are_found_by_their_jumps(count: int, place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as theirs:
        mine.append(b"mine", partition=0)
        give_up(mine)
        for _ in range(count):
            theirs.append(b"theirs", partition=0, sync=True)
        give_up(theirs)
        mine.append(b"mine again", partition=0, sync=True)
    with Topic.open(place, mode="r") as topic:
        sound(topic.partition(0))
        assert values_of(topic) == [b"mine", *[b"theirs"] * count, b"mine again"]
        for record in topic.partition(0).read():
            assert next(iter(topic.partition(0).read(record.offset))) == record


def test_file_that_another_program_has_put_in_place_is_recovered(place: Path) -> None:
    """A restored file has the same bytes, and is not the one that is open."""
    with opened(place, wait=PATIENCE_S) as topic:
        topic.append(b"one", partition=0, sync=True)
        give_up(topic)
        path = last_segment(place)
        content = path.read_bytes()
        path.rename(place.parent / "former")
        path.write_bytes(content)
        topic.append(b"two", partition=0, sync=True)
        assert values_of(topic) == [b"one", b"two"]
    assert [each.value for each in records_of(place)] == [b"one", b"two"]


@pytest.mark.parametrize("known", [True, False])
def test_numbers_that_a_producer_used_elsewhere_are_known_when_the_partition_comes_back(
    known: bool, place: Path
) -> None:
    """Whether this process has read the producers of the segment before, or has not."""
    with opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as theirs:
        first = mine.append(b"1", partition=0, producer=("p", 1) if known else None)
        give_up(mine)
        second = theirs.append(b"2", partition=0, producer=("p", 2))
        give_up(theirs)
        assert mine.append(b"2", partition=0, producer=("p", 2)) == second
        assert mine.append(b"3", partition=0, producer=("p", 3)).offset > second.offset > first.offset
        mine.flush()
        assert values_of(mine) == [b"1", b"2", b"3"]


def test_number_that_a_producer_used_here_is_known_after_another_process_has_written(place: Path) -> None:
    """The last batch before the turn had it. It was forgotten, and the repeated call appended the record again."""
    with opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as theirs:
        first = mine.append(b"1", partition=0, producer=("p", 1))
        give_up(mine)
        theirs.append(b"2", partition=0)
        give_up(theirs)
        assert mine.append(b"1", partition=0, producer=("p", 1)) == first
        assert mine.partition(0).last_sequence("p") == 1
        mine.flush()
        assert values_of(mine) == [b"1", b"2"]


def test_age_of_a_segment_counts_from_the_first_batch_of_another_process(place: Path) -> None:
    machine = Machine()
    clocked: dict[str, Any] = {"wait": PATIENCE_S, "files": UnsyncedFiles(), "clock": machine, "background": False}
    alter(place, segment_age=timedelta(hours=1))
    with opened(place, **clocked) as mine, opened(place, **clocked) as theirs:
        mine.append(b"mine", partition=0, sync=True)
        mine.partition(0).roll()  # the new segment is empty when this process gives it up
        theirs.append(b"theirs", partition=0, sync=True)
        machine.true_us += HOUR * 50 // 60
        mine.append(b"mine again", partition=0, sync=True)
        machine.true_us += HOUR * 9 // 60
        mine._accesses[0].keep_house()
        assert len(mine.partition(0).segments) == 2
        machine.true_us += HOUR * 2 // 60
        mine._accesses[0].keep_house()
        assert len(mine.partition(0).segments) == 3
        assert values_of(mine) == [b"mine", b"theirs", b"mine again"]


def test_housekeeping_leaves_a_partition_to_the_process_that_has_it(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as theirs:
        mine.append(b"mine", partition=0, sync=True)
        give_up(mine)
        theirs.append(b"theirs", partition=0)
        with writer_of(theirs).held():
            mine._accesses[0].keep_house()
            assert writer_of(mine).is_parked and not writer_of(theirs).is_parked
        mine.append(b"mine again", partition=0, sync=True)  # raises what housekeeping has met
        assert values_of(mine) == [b"mine", b"theirs", b"mine again"]


def test_who_has_a_partition_is_found_out_only_for_an_error_that_somebody_reads(place: Path) -> None:
    """A record without a key tries each partition, and housekeeping tries each second."""
    asked = mock.patch.object(lock, "holder_of", side_effect=AssertionError("the system's list of all locks was read"))
    with opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as theirs:
        for number in (0, 1):
            mine.append(b"mine", partition=number, sync=True)
        mine._placement.sticky = writer_of(mine)
        for number in (0, 1):
            give_up(mine, number)
        theirs.append(b"theirs", partition=0)
        with writer_of(theirs).held():
            with asked:
                mine._accesses[0].keep_house()
                assert mine.append(b"mine", sync=True).partition == 1
                with opened(place, wait=PATIENCE_S) as new:
                    give_up(mine, 1)
                    assert [new.append(b"new", sync=True).partition for _ in range(3)] == [1, 1, 1]
            with pytest.raises(LockedError, match=f"pid {os.getpid()} "), writer_of(mine).held(wait_s=0.01):
                pass


@pytest.mark.parametrize("known", [True, False])
def test_thread_that_waits_for_no_partition_waits_for_no_thread_either(known: bool, place: Path) -> None:
    """One thread waited for a partition. Housekeeping and records without a key then waited for that thread, and so did
    all flushes."""
    with opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as theirs:
        theirs.append(b"theirs", partition=0, sync=True)
        if known:
            mine.append(b"mine", partition=0, sync=True)
            give_up(mine)
        with writer_of(theirs).held():
            appending = threading.Thread(target=partial(mine.append, b"late", partition=0))
            appending.start()
            access = mine._accesses[0]
            wait_until(lambda: access._is_awaited or (known and writer_of(mine)._is_awaited), "a thread that waits")
            with pytest.raises(LockedError, match=f"pid {os.getpid()} "), access.writer(wait_s=0.0).held(wait_s=0.0):
                pass
            access.keep_house()
            assert mine.append(b"anywhere", sync=True).partition == 1
            assert appending.is_alive()
        appending.join()
        mine.flush()
        assert [record.value for record in mine.partition(0).read()][-1] == b"late"


def test_process_that_opens_a_partition_waits_for_no_thread_that_applies_a_transaction(place: Path) -> None:
    """It had the partition meanwhile. Two processes waited so for each other, until appends were refused."""
    settled = threading.Event()

    def settle() -> None:
        with writer_of(mine).settling():
            settled.set()

    with opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as theirs:
        mine.append(b"mine", partition=0, sync=True)
        give_up(mine)
        theirs.append(b"theirs", partition=0, sync=True)
        with writer_of(theirs).held():
            thread = threading.Thread(target=settle)
            thread.start()
            wait_until(lambda: writer_of(mine)._is_awaited, "a thread that waits")
            with pytest.raises(LockedError), writer_of(mine).settling(wait_s=0.0):
                pass
            assert not settled.is_set()
        thread.join()
    assert settled.is_set()


def test_record_without_a_key_goes_to_the_partition_that_is_free_first(place: Path) -> None:
    """It waited for the one that it had last, whose process was stopped, and was refused."""
    with opened(place, wait=2.0) as mine, opened(place) as theirs, opened(place) as stopped:
        mine.append(b"mine", partition=0, sync=True)
        mine._placement.sticky = writer_of(mine)
        give_up(mine)
        for topic, number in ((stopped, 0), (theirs, 1)):
            topic.append(b"theirs", partition=number, sync=True)
        held = writer_of(theirs, 1).held()
        held.__enter__()
        ending = threading.Timer(0.1, held.__exit__, (None, None, None))
        ending.start()
        with writer_of(stopped).held():
            assert mine.append(b"mine", sync=True).partition == 1
        ending.join()


def test_pass_that_makes_space_leaves_a_partition_to_the_process_that_has_it(place: Path) -> None:
    """It waited, and kept others. Two processes did so, and each waited for the other until an append was refused."""
    alter(place, retention=Retention(age=None, keep_free=0.5))
    with opened(place, wait=0.3) as mine, opened(place, wait=PATIENCE_S) as theirs:
        for number in (0, 1):
            mine.append(b"mine", partition=number)
            assert mine.partition(number).roll()
        give_up(mine, 1)
        theirs.append(b"theirs", partition=1)
        with writer_of(theirs, 1).held(), mock.patch.object(Files, "free_space", return_value=(1, 1000)):
            mine._accesses[0].keep_house()
            assert writer_of(mine, 1).is_parked
        assert mine.partition(0).log_start_offset > 0 == mine.partition(1).log_start_offset


def test_transaction_that_another_process_has_left_is_ended_by_who_takes_the_partition(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as mine:
        mine.append(b"mine", partition=0)
        give_up(mine)
        with opened(place, wait=PATIENCE_S) as theirs:
            theirs.append(b"theirs", partition=0)
            with mock.patch.object(Applier, "_release"), transaction("app", timeout=PATIENCE_S) as tx:
                tx.append(theirs, b"tx", partition=0)
        mine.append(b"mine", partition=0, sync=True)
        wait_until(lambda: not writer_of(mine).published().held_txn, "the end of the hold")
        assert values_of(mine) == [b"mine", b"theirs", b"tx", b"mine"]


def test_partition_opens_beside_who_applies_transactions_and_says_nothing(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(place, wait=PATIENCE_S) as theirs:
        theirs.append(b"theirs", partition=0)
        with mock.patch.object(Applier, "_release"), transaction("app", timeout=PATIENCE_S) as tx:
            tx.append(theirs, b"tx", partition=0)
    applying = lock.try_acquire(REAL, str(place.parent / ".transactions"))
    assert applying is not None
    with opened(place, wait=PATIENCE_S) as mine, caplog.at_level(logging.WARNING, "loglib"):
        with mock.patch("loglib.transactions.store.Store.pending", return_value=[mock.Mock()]):
            mine.append(b"mine", partition=0, sync=True)
        applying.release()
        wait_until(lambda: not writer_of(mine).published().held_txn, "the end of the hold")
        assert values_of(mine) == [b"theirs", b"tx", b"mine"]
    assert "were not applied" not in caplog.text


# --- between two steps ----------------------------------------------------------------------------------------


def test_call_whose_partition_goes_before_it_has_the_lock_takes_it_again(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as topic:
        topic.append(b"one", partition=0)
        give_up(topic)
        writer = writer_of(topic)
        real, calls = writer._take_back, []

        def take_back() -> None:
            calls.append(1)
            if len(calls) > 1:  # the first time it has the partition, and loses it again
                real()

        with mock.patch.object(writer, "_take_back", take_back):
            topic.append(b"two", partition=0, producer=("p", 1))
        assert len(calls) == 2
        topic.flush()
        assert values_of(topic) == [b"one", b"two"]


def test_thread_that_finds_the_partition_taken_back_does_nothing(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as topic:
        topic.append(b"one", partition=0)
        writer_of(topic)._take_back()
        turns = topic._handles.turns
        assert turns is not None
        writer_of(topic)._release_again(turns)
        assert not writer_of(topic).is_parked
        topic.append(b"two", partition=0, sync=True)
        assert values_of(topic) == [b"one", b"two"]


@pytest.mark.parametrize("rolls", [True, False], ids=["a recovery", "the same segment"])
def test_interrupt_at_any_line_of_taking_a_partition_back_loses_nothing(tmp_path: Path, rolls: bool) -> None:
    """It closed the files that the writer had just opened: the next write went into whatever file had their numbers."""
    made = 0

    def once(interrupter: Interrupter) -> bool:
        nonlocal made
        made += 1
        path = tmp_path / f"topic{made}"
        Topic.open(path, create=True, **QUIET | {"flush": MANUAL}).close()
        with opened(path, wait=PATIENCE_S) as mine, opened(path, wait=PATIENCE_S) as other:

            def append(topic: Topic, value: bytes) -> None:
                topic.append(value, partition=0, sync=True)
                if topic is other and rolls:
                    topic.partition(0).roll()

            for topic, value in ((mine, b"1"), (other, b"2")):
                append(topic, value)
                give_up(topic)
            was_interrupted = False
            try:
                interrupter.run(lambda: append(mine, b"3"))
            except KeyboardInterrupt:
                was_interrupted = True
            with (tmp_path / "else").open("w+b") as bystander, (tmp_path / "more").open("w+b") as another:
                for topic, value in ((mine, b"4"), (other, b"5"), (mine, b"6")):
                    append(topic, value)
                    give_up(topic)
                assert [os.fstat(each.fileno()).st_size for each in (bystander, another)] == [0, 0], interrupter.where
        found = values_of_path(path)
        assert [each for each in found if each != b"3"] == [b"1", b"2", b"4", b"5", b"6"], interrupter.where
        assert found.count(b"3") <= 1 and (was_interrupted or b"3" in found), interrupter.where
        return was_interrupted

    with mock.patch.object(SectionWriter, "look", lambda *_, **__: 1.0):  # the topics' threads give nothing up
        assert len(list(every_line(once))) > 100


def test_interrupt_after_a_recovery_and_before_its_end_is_known_recovers_again(place: Path) -> None:
    """The new segment was read from where the old one had ended, at a negative position."""
    reopen = TailWriter.reopen

    def reopen_and_interrupt(disk: TailWriter) -> None:
        reopen(disk)
        raise KeyboardInterrupt

    large = bytes(5000)  # more than the header of a segment has
    idle = mock.patch.object(SectionWriter, "look", lambda *_, **__: 1.0)
    with idle, opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as other:
        mine.append(b"1", partition=0, producer=("p", 1), sync=True)
        give_up(mine)
        for _ in range(2):
            other.append(large, partition=0, sync=True)
            other.partition(0).roll()
        give_up(other)
        with mock.patch.object(TailWriter, "reopen", reopen_and_interrupt), pytest.raises(KeyboardInterrupt):
            mine.append(b"3", partition=0, sync=True)
        other.append(b"4", partition=0, producer=("p", 2), sync=True)  # its number is read in the new segment
        give_up(other)
        mine.append(b"5", partition=0, sync=True)
        assert mine.partition(0).last_sequence("p") == 2
    assert values_of_path(place) == [b"1", large, large, b"4", b"5"]


def values_of_path(path: Path) -> list[bytes | None]:
    return [record.value for record in records_of(path)]


def test_lock_that_an_interrupt_has_kept_is_given_up_at_the_next_look(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as topic, opened(place, wait=PATIENCE_S) as other:
        topic.append(b"one", partition=0)
        writer = writer_of(topic)
        interrupted = mock.patch.object(writer, "_release_turn", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            give_up(topic)
        writer.look(is_over=False)
        other.append(b"two", partition=0, sync=True)
        assert values_of(other) == [b"one", b"two"]


def test_writer_without_a_thread_gives_its_partition_up_after_each_call(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as topic, opened(place, wait=PATIENCE_S) as other:
        writer = writer_of(topic)
        writer.keeper = None
        for number in range(3):
            topic.append(b"%d" % number, partition=0, sync=True)
            assert writer.is_parked
            other.append(b"other", partition=0)
            give_up(other)
        assert values_of(topic) == [b"0", b"other", b"1", b"other", b"2"]


def test_flush_of_what_another_process_has_flushed_publishes_nothing(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as theirs:
        mine.append(b"mine", partition=0)
        give_up(mine)
        theirs.append(b"theirs", partition=0, sync=True)
        before = writer_of(theirs).published()
        mine.flush()
        assert writer_of(theirs).published() == writer_of(mine).published() == before


def test_topic_that_is_closed_has_synced_what_it_wrote_before_it_gave_its_partition_up(place: Path) -> None:
    """With durability "os", too, as a topic that one process has alone."""
    alter(place, durability="os")
    with opened(place, wait=PATIENCE_S) as mine:
        mine.append(b"mine", partition=0, sync=True)
        give_up(mine)
        assert writer_of(mine).published().durable_end == 0
    with Topic.open(place, mode="r") as topic:
        assert topic.partition(0).durable_end == topic.partition(0).high_watermark > 0


def test_topic_that_is_closed_ends_the_wait_of_its_threads(place: Path) -> None:
    errors: list[Exception] = []
    with opened(place, wait=PATIENCE_S) as theirs:
        mine = opened(place, wait=PATIENCE_S)
        mine.append(b"mine", partition=0)
        give_up(mine)
        with writer_of(theirs).held():
            theirs.append(b"theirs", partition=0)
            waits = threading.Event()
            real = Turns.take

            def take(self: Turns, *given: Any, **named: Any) -> bool:
                waits.set()
                return real(self, *given, **named)

            def append() -> None:
                try:
                    mine.append(b"never", partition=0)
                except (LockedError, LogClosedError) as error:
                    errors.append(error)

            with mock.patch.object(Turns, "take", take):
                thread = threading.Thread(target=append)
                thread.start()
                assert waits.wait(PATIENCE_S)
                mine.close()
                thread.join()
    assert len(errors) == 1
    assert [each.value for each in records_of(place)] == [b"mine", b"theirs"]


@pytest.mark.parametrize("known", [True, False])
def test_thread_whose_wait_is_ended_by_closing_is_told_so(known: bool, place: Path) -> None:
    """It was told that it had waited for a process that might be stopped."""
    errors: list[Exception] = []

    def append() -> None:
        try:
            mine.append(b"never", partition=0)
        except LogError as error:
            errors.append(error)

    with opened(place, wait=PATIENCE_S) as theirs:
        mine = opened(place, wait=PATIENCE_S)
        if known:
            mine.append(b"mine", partition=0)
            give_up(mine)
        theirs.append(b"theirs", partition=0)
        with writer_of(theirs).held():
            thread = threading.Thread(target=append)
            thread.start()
            access = mine._accesses[0]
            wait_until(lambda: access._is_awaited or (known and writer_of(mine)._is_awaited), "a thread that waits")
            mine.close()
            thread.join()
    assert [type(each) for each in errors] == [LogClosedError]


def test_call_on_a_topic_that_is_being_closed_is_told_so(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as topic:
        topic.append(b"one", partition=0)
        give_up(topic)
        writer_of(topic)._ending = True
        with pytest.raises(LogClosedError, match="is being closed"):
            topic.append(b"two", partition=0)


def test_writer_that_is_closed_while_it_takes_its_partition_gives_it_up(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as topic, opened(place, wait=PATIENCE_S) as other:
        topic.append(b"one", partition=0)
        give_up(topic)
        writer = writer_of(topic)
        writer.check = lambda: setattr(writer, "closed", LogClosedError("closed meanwhile"))
        with pytest.raises(LogClosedError, match="closed meanwhile"), writer.held():
            writer.check_usable()
        other.append(b"two", partition=0, sync=True)
        assert values_of(other) == [b"one", b"two"]


def test_hold_that_another_process_has_ended_meanwhile_is_left_alone(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as topic:
        topic.append(b"one", partition=0)
        writer = writer_of(topic)
        before = writer.published()
        with mock.patch.object(writer, "published", return_value=before._replace(held_txn=5)):
            writer.release(5)
        end_hold(writer, before._replace(held_txn=5, held_id=7))
        topic.flush()
        assert writer.published().transactions == before.transactions
        assert values_of(topic) == [b"one"]


def test_commit_whose_partition_is_elsewhere_when_it_is_done_is_visible(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as topic:
        topic.append(b"one", partition=0)
        refusal = LockedError(str(place / "0000" / "lock"), "pid 1")
        with mock.patch.object(SectionWriter, "release", side_effect=refusal):
            with transaction("app", timeout=PATIENCE_S) as tx:
                tx.append(topic, b"tx", partition=0)
            assert values_of(topic) == [b"one", b"tx"]


# --- failures -------------------------------------------------------------------------------------------------


def test_writer_that_has_failed_lets_others_have_its_partition(place: Path) -> None:
    files = FaultyFiles("datasync", every=True, error=errno.EIO, inner=UnsyncedFiles(), armed=False)
    with opened(place, files=files, wait=PATIENCE_S) as broken, opened(place, wait=PATIENCE_S) as other:
        broken.append(b"one", partition=0)
        files.armed = True
        with pytest.raises(WriterFailedError):
            broken.append(b"lost", partition=0, sync=True)
        files.armed = False
        other.append(b"two", partition=0, sync=True)
        assert values_of(other)[-1] == b"two"
        with pytest.raises(WriterFailedError):
            broken.close()


def test_partition_that_cannot_be_opened_after_a_wait_keeps_no_turn(place: Path) -> None:
    """The process kept the turn, and had nothing to do in it. Others appended at a twentieth of their pace."""
    with opened(place, wait=PATIENCE_S) as mine, opened(place, wait=PATIENCE_S) as theirs:
        theirs.append(b"theirs", partition=0)
        turns, held = mine._handles.turns, writer_of(theirs).held()
        assert turns is not None
        held.__enter__()
        waiting = threading.Timer(0.1, held.__exit__, (None, None, None))
        waiting.start()
        failure = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        with mock.patch.object(lock, "_sign", side_effect=failure), pytest.raises(OSError, match="open files"):
            mine.append(b"mine", partition=0)
        waiting.join()
        assert not turns._is_mine and not turns.look(is_idle=True)
        mine.append(b"mine", partition=0, sync=True)
        assert values_of(mine) == [b"theirs", b"mine"]


@pytest.mark.parametrize("error", [LogClosedError("closed"), OSError(errno.EIO, "x")])
def test_error_while_a_partition_is_given_up_reaches_the_next_call(error: Exception, place: Path) -> None:
    """Except that the topic is closed: then there is no next call."""
    with opened(place, wait=PATIENCE_S) as topic:
        topic.append(b"one", partition=0)
        writer = writer_of(topic)
        with mock.patch.object(writer, "look", side_effect=error):
            topic._handles.look()
        if isinstance(error, OSError):
            with pytest.raises(StorageIOError, match="giving the partition up"):
                topic.append(b"two", partition=0)
        topic.append(b"three", partition=0, sync=True)
        assert values_of(topic) == [b"one", b"three"]


def test_records_that_a_failed_change_of_policies_finds_are_kept(place: Path) -> None:
    with opened(place, wait=PATIENCE_S) as topic:
        topic.append(b"one", partition=0)
        writer = writer_of(topic)
        with mock.patch.object(writer, "_seal", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            writer.use(TopicConfig(partitions=2))
        topic.flush()
        assert values_of(topic) == [b"one"]


def test_process_that_stops_in_the_middle_of_a_publication_is_told_of(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watermark, "_PATIENCE_S", 0.01)
    with opened(place, wait=PATIENCE_S) as topic:
        topic.append(b"one", partition=0)
        mark = writer_of(topic).disk._watermark
        kept = REAL.open_write(str(place / "0000" / watermark.NAME))
        assert REAL.try_lock(kept, "")
        with pytest.raises(LockedError, match="a process that publishes"), mark.locked():
            pass
        REAL.unlock(kept)
        REAL.close(kept)
        with mark.locked():
            pass


def test_process_that_is_gone_has_no_program() -> None:
    assert lock._program(REAL, 1 << 30) == ""


# --- the turn, retention, the inbox ---------------------------------------------------------------------------


def test_topic_that_is_closed_in_its_turn_gives_the_turn_up(place: Path) -> None:
    mine, other = opened(place), opened(place)
    turns, others = mine._handles.turns, other._handles.turns
    assert turns is not None and others is not None
    assert turns._take_turn()
    assert not others._take_turn()
    mine.close()
    assert others._take_turn()
    other.close()


def test_child_of_a_process_that_never_waited_has_no_file_to_close(place: Path) -> None:
    turns = Turns(REAL, str(place), 1.0, 0o600)
    turns._abandon(0)
    assert not turns._is_anothers()


def test_partitions_that_others_may_write_are_explained_from_their_files(place: Path) -> None:
    with opened(place, wait=PATIENCE_S, alter=True, retention=Retention(bytes=0, age=None)) as topic:
        topic.append(b"one", partition=0, sync=True)
        topic.partition(0).roll()
        topic.append(b"two", partition=0, sync=True)
        give_up(topic)
        assert next((each.partition, each.drop) for each in topic.retain(dry_run=True)) == (0, True)
        assert {each.partition for each in topic.partition(0).retain()} == {0}
        assert values_of(topic) == [b"two"]


def test_topic_that_is_gone_does_not_look_at_its_files() -> None:
    looks = mock.Mock()
    assert not _Listener("", lambda: None, looks, looks).look_now()  # type: ignore[arg-type]
    looks.assert_not_called()
