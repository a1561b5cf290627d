"""Cuts, as a model: marks of several partitions that are read one after the other show each transaction in all or none.

Two transactions are applied to two partitions, one after the other: a hold, half of the records, all of them; when
both partitions have them, the transaction is done, and the holds end. A reader reads the mark of each partition, asks
once which transactions are done, and then reads the marks again. If a mark has changed, it begins again
(copies/local_source.py). Each choice of moments for these five reads is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import NamedTuple

import pytest

PARTITIONS = (0, 1)
TRANSACTIONS = (1, 2)


class Mark(NamedTuple):
    """What a partition publishes, and what its log holds then."""

    applied: int = 0  # the highest transaction that is there as a whole
    held: int = 0  # this transaction is not shown unless it is done
    half: int = 0  # this transaction is there in part


class Moment(NamedTuple):
    """What a reader finds if it looks now."""

    marks: tuple[Mark, ...]
    done: int  # transactions up to this number


def moments() -> Iterator[Moment]:
    """One after the other, from before the first transaction to after the second."""
    marks, done = [Mark() for _ in PARTITIONS], 0
    yield Moment(tuple(marks), done)
    for number in TRANSACTIONS:
        order = PARTITIONS if number % 2 else PARTITIONS[::-1]
        for each in order:
            for change in ({"held": number}, {"half": number}, {"applied": number, "half": 0}):
                marks[each] = marks[each]._replace(**change)
                yield Moment(tuple(marks), done)
        done = number
        yield Moment(tuple(marks), done)
        for each in order:
            marks[each] = marks[each]._replace(held=0)
            yield Moment(tuple(marks), done)


def shown(mark: Mark, done: int) -> dict[int, str]:
    """Which transactions a reader of the partition sees, and whether as a whole."""
    seen = dict.fromkeys(range(1, mark.applied + 1), "whole")
    if mark.half:
        seen[mark.half] = "half"
    if mark.held > done:
        seen.pop(mark.held, None)
    return seen


def cuts(mistake: str = "") -> tuple[int, int]:
    """The number of cuts that a reader takes, and of those that show a transaction in part."""
    taken = torn = 0
    for one, two, asked, again_one, again_two in combinations_with_replacement(list(moments()), 5):
        before = one.marks[0], two.marks[1]
        after = again_one.marks[0], again_two.marks[1]
        looks_again = mistake != "it does not look again"
        if looks_again and any((a.applied, a.held) != (b.applied, b.held) for a, b in zip(before, after, strict=True)):
            continue
        taken += 1
        answers = (two.done, asked.done) if mistake == "it asks for each partition" else (asked.done, asked.done)
        first, second = map(shown, before, answers)
        torn += any((first.get(each), second.get(each)) not in WHOLE for each in TRANSACTIONS)
    return taken, torn


WHOLE = ((None, None), ("whole", "whole"))


def test_no_cut_shows_a_transaction_in_part() -> None:
    taken, torn = cuts()
    assert taken > 100 and torn == 0


@pytest.mark.parametrize("mistake", ["it does not look again", "it asks for each partition"])
def test_each_rule_of_a_cut_is_needed(mistake: str) -> None:
    assert cuts(mistake)[1] > 0
