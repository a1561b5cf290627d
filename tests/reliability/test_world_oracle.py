"""The oracle of worlds finds out each kind of wrong reading, and accepts what is allowed."""

import pytest
from worlds.draw import FEATURES, Choice, draw, pairs, possible
from worlds.oracle import Ledger, Row, Section, Wrong, judge_sections

A, B, C = b"a", b"b", b"c"
STARTS = {0: 0}


def ledger_of(*values: bytes) -> Ledger:
    ledger = Ledger("orders")
    ledger.given(values)
    ledger.acknowledged(values)
    return ledger


def rows(*values: bytes) -> list[Row]:
    return [Row(0, offset, value, None, 0) for offset, value in enumerate(values)]


def test_what_was_acknowledged_is_right() -> None:
    ledger_of(A, B, C).judge(rows(A, B, C), STARTS)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (rows(A, B), "LOST"),
        (rows(A, C, B), "given later"),
        (rows(A, B, C, C), "twice"),
        (rows(A, B, C, b"d"), "invented"),
    ],
    ids=["lost", "out of order", "twice", "invented"],
)
def test_anything_else_is_wrong(found: list[Row], says: str) -> None:
    with pytest.raises(Wrong, match=says):
        ledger_of(A, B, C).judge(found, STARTS)


def test_record_that_moves_is_wrong() -> None:
    ledger = ledger_of(A)
    ledger.judge(rows(A), STARTS)
    with pytest.raises(Wrong, match="has moved"):
        ledger.judge([Row(0, 7, A, None, 0)], STARTS)


def test_what_was_aborted_must_not_be_read() -> None:
    ledger = ledger_of(A)
    ledger.refused([A])
    ledger.judge([], STARTS)
    with pytest.raises(Wrong, match="refused or aborted"):
        ledger.judge(rows(A), STARTS)


def test_retention_excuses_what_stands_below_the_log_start_alone() -> None:
    ledger = ledger_of(A, B)
    ledger.judge(rows(A, B), STARTS)
    ledger.may_drop()
    ledger.judge(rows(A, B)[1:], {0: 1})
    with pytest.raises(Wrong, match="LOST"):
        ledger.judge([], {0: 1})


def test_archive_has_what_the_log_has_dropped() -> None:
    ledger_of(A, B).judge(rows(A, B)[1:], {0: 1}, elsewhere={A})


def test_what_a_repair_has_declared_may_be_missing_and_may_come_back() -> None:
    ledger = ledger_of(A, B)
    ledger.excuse([A])
    ledger.judge(rows(A, B)[1:], STARTS)
    ledger.judge(rows(A, B), STARTS)


def test_transaction_stands_where_it_was_committed() -> None:
    ledger = ledger_of(A, B)
    ledger.again([A])
    with pytest.raises(Wrong, match="given later"):
        ledger.judge(rows(A, B), STARTS)
    ledger.judge(rows(B, A), STARTS)


def test_half_of_a_transaction_is_wrong() -> None:
    sections = [Section("orders", (A,)), Section("bills", (B,))]
    ledgers = {"orders": Ledger("orders"), "bills": Ledger("bills")}
    for seen in ({"orders": {A}, "bills": {B}}, {"orders": set[bytes](), "bills": set[bytes]()}):
        judge_sections(sections, ledgers, seen, "begun")
    with pytest.raises(Wrong, match="a part of a transaction"):
        judge_sections(sections, ledgers, {"orders": {A}, "bills": set()}, "begun")


def test_features_of_a_seed_are_always_the_same() -> None:
    assert [draw(seed, FEATURES) for seed in range(50)] == [draw(seed, FEATURES) for seed in range(50)]


def test_what_the_documents_exclude_is_never_drawn_together() -> None:
    allowed = pairs_of(possible(FEATURES))
    drawn = {pair for seed in range(1000) for pair in pairs(draw(seed, FEATURES))}
    assert drawn == allowed
    assert "replicas + tx" not in allowed


def pairs_of(matrix: list[tuple[str, str]]) -> set[str]:
    return {name for pair in matrix for name in pairs(pair)}


def test_choice_among_fewer_things_changes_no_later_choice() -> None:
    first, second = Choice("seed"), Choice("seed")
    first.pick(range(1))
    second.pick(range(1000))
    assert first.random() == second.random()
