"""The process keeps memory for small objects, so that each batch of values need not get it anew."""

import re
from itertools import pairwise

from conftest import start_python

PROGRAM = """
    import sys

    from loglib.system.malloc import keep_arenas

    before = []
    for _ in range(12):  # what else is in use, and how much of it shares an arena with the values
        before += [bytes(200) for _ in range(1700)]
        sys._debugmallocstats()
        for _ in range(20):
            values = [bytes(200) for _ in range(5000)]
            if sys.argv[1] == "kept":
                keep_arenas(values)
            del values
    sys._debugmallocstats()
"""


def most_reclaimed(way: str) -> int:
    """The largest number of arenas that were returned to the system in one of twelve rounds."""
    process = start_python(PROGRAM, way)
    _, told = process.communicate()
    assert process.returncode == 0, told
    counts = [int(count.replace(",", "")) for count in re.findall(r"# arenas reclaimed +=\s+([\d,]+)", told)]
    assert len(counts) == 13
    return max(after - before for before, after in pairwise(counts))


def test_arenas_for_a_batch_are_not_returned_after_each() -> None:
    assert most_reclaimed("kept") < 5
    # Where the system puts the first arenas decides whether a process shows it: four of five do.
    assert any(most_reclaimed("not kept") >= 15 for _ in range(20)), "otherwise this shows nothing"
