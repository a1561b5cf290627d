"""The process keeps memory for small objects, so that each batch of values need not get it anew."""

import re

from conftest import start_python

PROGRAM = """
    import sys

    from loglib.system.heap import keep_arenas

    before = [bytes(200) for _ in range(20_000)]  # they fill the arenas that there are
    for _ in range(20):
        values = [bytes(200) for _ in range(5000)]
        if sys.argv[1] == "kept":
            keep_arenas(values)
        del values
    sys._debugmallocstats()
"""


def reclaimed(way: str) -> int:
    process = start_python(PROGRAM, way)
    _, told = process.communicate()
    assert process.returncode == 0, told
    (count,) = re.findall(r"# arenas reclaimed +=\s+([\d,]+)", told)
    return int(count.replace(",", ""))


def test_arenas_for_a_batch_are_not_returned_after_each() -> None:
    assert reclaimed("kept") < 5
    assert reclaimed("not kept") >= 15, "otherwise this shows nothing"
