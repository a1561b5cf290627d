"""append/work_ahead.py: results come in order, errors where they are taken, and no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from conftest import run_python
from loglib.append.work_ahead import WorkAhead


def digits(number: int) -> Iterator[str]:
    for digit in str(number):
        if digit == "0":
            raise ValueError(f"a zero in {number}")
        yield digit


def test_results_come_in_the_order_of_the_pieces() -> None:
    helper = WorkAhead(digits)
    for number in (12, 3, 4567):
        helper.give(number)
    assert [list(helper.take()) for _ in range(3)] == [["1", "2"], ["3"], ["4", "5", "6", "7"]]
    helper.stop()


def test_error_of_the_work_is_raised_where_its_result_would_be() -> None:
    helper = WorkAhead(digits)
    for number in (1, 203, 4):
        helper.give(number)
    assert list(helper.take()) == ["1"]
    taking = helper.take()
    assert next(taking) == "2"
    with pytest.raises(ValueError, match="a zero in 203"):
        next(taking)
    assert list(helper.take()) == ["4"]
    helper.stop()


def test_stop_ends_the_work_after_the_result_that_is_being_made() -> None:
    begun, go_on = threading.Event(), threading.Event()
    made = []

    def slowly(number: int) -> Iterator[int]:
        for each in range(number):
            made.append(each)
            begun.set()
            assert go_on.wait(30)
            yield each

    before = threading.active_count()
    helper = WorkAhead(slowly)
    helper.give(1000)
    assert begun.wait(30)
    stopping = threading.Thread(target=helper.stop)
    stopping.start()
    while not helper._stopped:
        pass
    go_on.set()
    stopping.join()
    assert made == [0]
    assert threading.active_count() == before


@pytest.mark.usefixtures("unmeasured")
def test_interrupt_in_the_middle_of_an_append_leaves_no_thread_and_a_sound_log() -> None:
    out = run_python(
        """
        import os, signal, tempfile, threading
        import pyarrow as pa
        from loglib import Topic

        batch = pa.record_batch({"value": pa.array([b"v" * 1000] * 10_000), "key": pa.array([b"k"] * 10_000)})

        def batches():
            for number in range(1000):
                if number == 7:
                    os.kill(os.getpid(), signal.SIGINT)
                yield batch

        with tempfile.TemporaryDirectory() as directory, Topic.open(
            directory + "/log", create=True, partitions=2
        ) as topic:
            before = threading.active_count()
            try:
                topic.append_arrow(pa.RecordBatchReader.from_batches(batch.schema, batches()))
            except KeyboardInterrupt as error:
                appended = sum(len(offsets) for _, offsets in getattr(error, "appended", ()))
            assert threading.active_count() == before
            topic.flush()
            found = sum(len(one) for one in topic.batches())
            assert appended <= found <= 70_000 and not topic.verify().damage
            print("sound")
        """
    )
    assert out == "sound\n"
