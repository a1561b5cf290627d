"""The chain: whole batches are taken one after the other, and none that does not follow the one before."""

from __future__ import annotations

import pytest
from builders import IDENTITY, chained, encoded, forged, header_of

from loglib.format.batch import Batch, Source, take
from loglib.format.chain import End, follow
from loglib.format.columns import Columns
from loglib.format.header import BadBatch, Header

PARTS = [Columns([b"value %d" % number]) for number in range(3)]
STORED = chained(PARTS)
SIZE = len(STORED) // 3
HERE = Source("the block", 0)
BEGIN = End(0, 0, 0)


def followed(content: bytes, end: End = BEGIN, start: int = 0) -> list[int]:
    return [header.base_offset for header in follow(content, end, start=start, salt=IDENTITY.salt)]


def test_batches_follow_each_other_up_to_one_that_is_cut() -> None:
    assert followed(STORED) == [0, SIZE, 2 * SIZE]
    for cut in (1, SIZE - 1):
        assert followed(STORED[:-cut]) == [0, SIZE]
    assert followed(STORED[: SIZE + 1]) == [0]
    assert followed(b"") == []


def test_first_batch_may_follow_an_end_that_is_not_known() -> None:
    assert followed(STORED[SIZE:], End(SIZE, SIZE, None), SIZE) == [SIZE, 2 * SIZE]
    assert followed(STORED, End.after(header_of(STORED))) == [SIZE, 2 * SIZE], "what was checked is not checked again"


@pytest.mark.parametrize("end", [End(SIZE, 0, 7), End(SIZE, 8, header_of(STORED).header_crc)], ids=["CRC", "place"])
def test_batch_that_follows_another_one_is_refused(end: End) -> None:
    with pytest.raises(BadBatch) as caught:
        followed(STORED[SIZE:], end, SIZE)
    assert caught.value.at == 60 and "follows one with CRC" in caught.value.found


def test_damaged_batch_and_a_first_one_that_is_cut_are_refused() -> None:
    for content in (STORED[: SIZE - 1], STORED[:-1] + b"!"):
        with pytest.raises(BadBatch, match="a body with CRC"):
            followed(content)


def taken(block: bytes, position: int = 0, room: int | None = None) -> Batch | Header:
    return take(block, position, HERE, offset=position, partition=0, salt=IDENTITY.salt, room=room)


def test_batch_is_taken_whole_or_its_header_says_how_long_it_is() -> None:
    batch, header = taken(STORED, SIZE), taken(STORED[:-1], 2 * SIZE)
    assert isinstance(batch, Batch) and batch.values == PARTS[1].values
    assert isinstance(header, Header) and header.length == SIZE


def test_compressed_batch_is_decompressed_if_there_is_room() -> None:
    stored = encoded(Columns([bytes(1000)]), codec=1)
    batch = taken(stored, room=1008)
    assert isinstance(batch, Batch) and batch.values == [bytes(1000)]
    assert isinstance(taken(stored, room=1007), Header)
    with pytest.raises(BadBatch, match="decompresses to its declared size"):
        taken(forged(stored, value_bytes=1008))
