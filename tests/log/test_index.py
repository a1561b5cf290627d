"""log/index.py: the segment that holds an offset is the one with the largest base at or below it."""

from __future__ import annotations

import threading

import pytest
from builders import calm
from hypothesis import given
from hypothesis import strategies as st

from conftest import run_python
from loglib.log.index import SegmentIndex

BASES = st.sets(st.integers(0, 200))


@calm
@given(BASES, st.integers(-1, 201))
def test_offset_is_found_as_by_a_scan(bases: set[int], offset: int) -> None:
    index = SegmentIndex(bases)
    assert index.find(offset) == max((base for base in bases if base <= offset), default=None)
    assert index.after(offset) == min((base for base in bases if base > offset), default=None)
    assert index.bases() == sorted(bases)
    assert len(index) == len(bases)


@calm
@given(BASES, BASES, st.integers(0, 200))
def test_changes_are_those_of_a_set(first: set[int], added: set[int], start: int) -> None:
    index = SegmentIndex(first)
    for base in added:
        index.add(base)
    index.drop_before(start)
    assert index.bases() == sorted(base for base in first | added if base >= start)
    index.replace(first)
    assert index.bases() == sorted(first)


def test_dropped_base_does_not_come_back_by_a_listing_that_still_finds_its_file() -> None:
    index = SegmentIndex([0, 8, 16])
    index.drop_before(16)
    index.refresh(lambda: [0, 8, 16])
    index.drop_before(8)  # decided before, and late
    index.refresh(lambda: [0, 8, 16, 24])
    assert index.bases() == [16, 24]


def test_empty_index_finds_nothing() -> None:
    index = SegmentIndex()
    assert (index.find(0), index.after(0), index.bases(), len(index)) == (None, None, [], 0)


def test_index_may_be_searched_while_it_changes() -> None:
    index = SegmentIndex([0])
    faults: list[object] = []
    stop = threading.Event()

    def search() -> None:
        try:
            while not stop.is_set():
                assert index.find(1 << 40) is not None
                bases = index.bases()
                assert bases and bases == sorted(bases)
        except BaseException as error:
            faults.append(error)
            raise

    searchers = [threading.Thread(target=search) for _ in range(2)]
    for searcher in searchers:
        searcher.start()
    for base in range(1, 5000):
        index.add(base)
        if base % 50 == 0:
            index.drop_before(base)
    index.replace([0])
    stop.set()
    for searcher in searchers:
        searcher.join()
    assert not faults


def test_listing_that_took_long_does_not_replace_a_newer_one() -> None:
    index = SegmentIndex([0])

    def slowly() -> list[int]:
        index.refresh(lambda: [8, 16])  # retention has dropped the first meanwhile, and another thread has seen it
        return [0, 8, 16]

    index.refresh(slowly)
    assert index.bases() == [8, 16]


def test_slow_listing_does_not_replace_what_is_newer() -> None:
    """Of threads that listed the directory at once, the slowest decided: readers were told of missing segments."""
    index = SegmentIndex([0])

    def slow_listing() -> list[int]:
        index.refresh(lambda: [10, 20])
        return [0]

    index.refresh(slow_listing)
    assert index.bases() == [10, 20]

    def slower_than_the_writer() -> list[int]:
        index.add(30)
        index.drop_before(20)
        return [10, 20]

    index.refresh(slower_than_the_writer)
    assert index.bases() == [20, 30]
    index.refresh(lambda: [30])
    assert index.bases() == [30]


@pytest.mark.usefixtures("unmeasured")
def test_child_of_a_fork_in_mid_change_can_change_and_search() -> None:
    """The lock was another thread's at the fork, and nobody's in the child to let it go."""
    program = """
        import os, signal, threading
        from loglib.log.index import SegmentIndex

        index = SegmentIndex([0])
        stop = threading.Event()

        def change():
            while not stop.is_set():
                index.add(1)
                index.refresh(lambda: [0])

        changer = threading.Thread(target=change)
        changer.start()
        for _ in range(30):
            pid = os.fork()
            if pid == 0:
                signal.alarm(30)
                index.add(7)
                os._exit(0 if index.find(9) == 7 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        stop.set()
        changer.join()
        print("well")
    """
    assert run_python(program) == "well\n"
