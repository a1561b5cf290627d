"""Transactions that rot or are forged: what is staged or sent is applied as it was written, or not at all."""

from pathlib import Path
from typing import Any

import pytest
import transacted
from transacted import dying, store_of

import loglib
from conftest import values_of
from loglib import CommitPendingError, Topic, transaction
from loglib.format.header import crc32c
from loglib.transactions import apply, staging
from loglib.transactions.store import Store

pair = transacted.pair


def test_stage_that_rots_stops_its_transaction_and_no_other(
    pair: tuple[Topic, Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, bills = pair
    with dying(monkeypatch, apply.Applier, "run"), transaction("etl") as tx:
        tx.append(bills, bytes(2 << 20))
    (staged,) = Path(bills.path, "staging").rglob("0000")
    content = staged.read_bytes()
    staged.write_bytes(content[:-1] + b"\xff")
    with transaction("etl") as tx:
        tx.append(orders, b"fine", partition=0)
    assert values_of(orders) == [b"fine"]
    with pytest.raises(CommitPendingError, match="waits for transactions before it"), transaction("etl") as tx:
        tx.append(bills, b"behind it")
    staged.write_bytes(content)
    with transaction("etl") as tx:
        tx.append(bills, b"last")
    assert values_of(bills) == [bytes(2 << 20), b"behind it", b"last"]


@pytest.mark.parametrize("change", ["cut", "cut short", "swapped", "flipped", "other partition", "newer"])
def test_spoilt_section_is_never_applied(pair: tuple[Topic, Topic], change: str) -> None:
    orders, _ = pair
    stage = staging.Stage(orders._files, orders._clock)
    identity = orders._accesses[0].log.identity
    other = orders._accesses[1].log.identity
    one = stage.section(orders.path, identity, orders.config)
    for value in (b"a", b"b"):
        one.add(applying_load(value))
        one.seal()
    content = b"".join(one.portions[0].parts)
    half = len(content) // 2
    changed = {
        "cut": content[:-8],
        "cut short": content[:half] + content[half : half + 128],
        "newer": newer(content, identity.salt),
        "swapped": content[half:] + content[:half],
        "flipped": content[:-200] + bytes([content[-200] ^ 1]) + content[-199:],
        "other partition": content,
    }[change]
    found = staging.read_section(
        lambda at, size: changed[at : at + size], len(changed), other if change == "other partition" else identity,
        "staged", at=0,
    )  # fmt: skip
    with pytest.raises(loglib.CorruptLogError):
        list(found)
    whole = staging.read_section(lambda at, size: content[at : at + size], len(content), identity, "staged", at=0)
    assert len(list(whole)) == 2


def newer(content: bytes, salt: int) -> bytes:
    """The section with a first batch of a later version."""
    changed = bytearray(content)
    changed[40] = 9
    changed[4:8] = crc32c(bytes(changed[8:128]), salt).to_bytes(4, "little")
    return bytes(changed)


def applying_load(value: bytes) -> Any:
    from loglib.append.batching import Load
    from loglib.format.columns import Columns

    return Load(Columns([value]), len(value))


@pytest.mark.parametrize("name", ["staging/../0000/x", "staging//x", "../bills/0000/x", "staging", ""])
def test_forged_name_of_a_stage_removes_nothing(pair: tuple[Topic, Topic], name: str) -> None:
    from loglib.transactions.manifest import Manifest, Section

    _, bills = pair
    with transaction("etl") as tx:
        tx.append(bills, b"x")
    store = Store(bills._files, str(store_of(bills)))
    applier = apply.Applier(bills._files, store)
    section = Section("bills", bills.log_id, 0, name, 0, 0, 0)
    applier._remove_staging(Manifest(9, "etl", 1, "owner", None, 0, (section,)))
    store.close()
    assert Path(bills.path, "0000", "watermark").exists()
    assert values_of(bills) == [b"x"]


def test_section_of_another_history_is_never_applied(pair: tuple[Topic, Topic]) -> None:
    orders, _ = pair
    identity = orders._accesses[0].log.identity

    def staged(*values: bytes) -> bytes:
        section = staging.Staged(orders.path, identity, orders.config, orders._clock)
        for value in values:
            section.add(applying_load(value))
            section.seal()
        return section.portions[0].take()

    one, other = staged(b"a", b"b"), staged(b"c", b"b")
    half = len(one) // 2
    mixed = other[:half] + one[half:]
    found = staging.read_section(lambda at, size: mixed[at : at + size], len(mixed), identity, "staged", at=0)
    with pytest.raises(loglib.CorruptLogError, match="follows one with CRC"):
        list(found)
    short = one[:-8]
    found = staging.read_section(lambda at, size: short[at : at + size], len(one), identity, "staged", at=0)
    with pytest.raises(loglib.CorruptLogError, match="the end of the file"):
        list(found)
