"""The order of the tests: each process runs the same tests, one after the other, in each run."""

from __future__ import annotations

from fixed_order import deal

TESTS = ["a.py::one", "a.py::two[1]", "b.py::one", "c.py::one", "c.py::two", "c.py::three", "d.py::one"]


def test_tests_go_round_the_processes() -> None:
    assert deal(TESTS, 2) == [[0, 2, 4, 6], [1, 3, 5]]
    assert deal(TESTS[:2], 3) == [[0], [1], []]


def test_whole_files_go_to_one_process_and_the_processes_get_alike() -> None:
    assert deal(TESTS, 2, whole_files=True) == [[3, 4, 5, 6], [0, 1, 2]]
    assert deal(TESTS[:2], 2, whole_files=True) == [[0, 1], []]
