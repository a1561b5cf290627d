"""format/header.py: a header and a body to bytes and back, and no trust in bytes that make no sense."""

from __future__ import annotations

from typing import Any

import pytest
from batch_contents import columns
from builders import (
    BODY_AT,
    EVERYTHING,
    IDENTITY,
    LOG_ID,
    NONCE,
    NOW,
    PLAIN,
    batch_of,
    calm,
    columns_of,
    encoded,
    forged,
    header_of,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loglib.config.policies import MAX_BATCH_BYTES, MAX_RECORDS_PER_BATCH
from loglib.format import header as batch
from loglib.format.columns import Columns
from loglib.format.header import BadBatch, NewerBatch, Producer
from loglib.segment import Identity

CODECS = [pytest.param(number, id=name) for number, name in enumerate(("none", "zlib", "lz4", "zstd"))]


def complete(given_columns: Columns) -> Columns:
    """The columns as a reader sees them: those left out are null, now, or empty."""
    count = len(given_columns.values)
    return Columns(
        list(given_columns.values),
        [None] * count if given_columns.keys is None else list(given_columns.keys),
        [NOW] * count if given_columns.timestamps is None else list(given_columns.timestamps),
        [()] * count if given_columns.headers is None else list(given_columns.headers),
    )


# --- there and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@settings(calm, max_examples=150)
@given(given_columns=columns(), base_offset=st.integers(0, 1 << 40).map(lambda n: 8 * n))
@example(EVERYTHING, 0)
@example(PLAIN, 0)
@example(Columns([None]), 0)
@example(Columns([b""], [b""], [0], [(("", b""),)]), 8)
@example(Columns([b"x"] * 9, [None] * 9, [1] * 9, [()] * 9), 8)
def test_what_is_encoded_is_decoded(codec: int, given_columns: Columns, base_offset: int) -> None:
    stored = encoded(given_columns, base_offset, codec=codec)
    found = batch_of(stored, base_offset)
    assert columns_of(found) == complete(given_columns)
    with pytest.MonkeyPatch.context() as patch:  # also where the items are sliced by Arrow, which large columns are
        patch.setattr("loglib.format.columns._ARROW_LEAST", 1)
        assert columns_of(batch_of(stored, base_offset)) == complete(given_columns)
    assert found.offsets == range(base_offset, base_offset + len(given_columns.values))
    assert found.next_offset == base_offset + len(stored)
    times = complete(given_columns).timestamps
    assert times is not None
    assert (found._header.base_timestamp, found._header.max_timestamp) == (times[0], max(times))


@pytest.mark.parametrize("codec", CODECS)
def test_a_megabyte_in_one_record_comes_back(codec: int) -> None:
    value = bytes(range(256)) * 4096
    found = batch_of(encoded(Columns([value, None, value[::-1]], [b"k", value, None]), codec=codec))
    assert found.values == [value, None, value[::-1]]
    assert found.keys == [b"k", value, None]


@pytest.mark.parametrize("codec", CODECS)
def test_length_is_never_below_the_record_count(codec: int) -> None:
    count = 20_000
    stored = encoded(Columns([b""] * count), codec=codec)
    header = header_of(stored)
    assert count <= header.length == len(stored)
    assert batch_of(stored).values == [b""] * count
    if codec:
        assert header.stored_bytes < header.length - BODY_AT, "padded"
        assert not any(stored[BODY_AT + header.stored_bytes :]), "with zeros"


def test_body_that_does_not_shrink_is_stored_as_it_is() -> None:
    assert encoded(Columns([b"x"]), codec=1) == encoded(Columns([b"x"]))
    assert header_of(encoded(Columns([b"x" * 1000]), codec=1)).codec == 1


# --- place --------------------------------------------------------------------------------------------


def test_new_place_leaves_the_body_alone() -> None:
    stored = encoded(EVERYTHING, producer=Producer(3, 4))
    header = header_of(stored)
    other = Identity.of(bytes(16), 9)
    moved, crc = batch.stamp(
        header, base_offset=800, durable_up_to=8, writer_epoch=5, writer_nonce=2, previous_crc=6, previous_bytes=8,
        jump_offset=16, append_time=7, event_time=7, running_max_timestamp=NOW + 99,
        producer=batch.NO_PRODUCER, producers_in_segment=False, salt=other.salt,
    )  # fmt: skip
    again = header_of(moved, 800, identity=other)
    assert again.header_crc == crc
    assert again._replace(
        header_crc=header.header_crc, base_offset=0, durable_up_to=0, writer_epoch=1, writer_nonce=NONCE,
        previous_crc=0, previous_bytes=0, jump_offset=0, append_time=NOW,
        running_max_timestamp=header.running_max_timestamp, flags=header.flags, producer_id=3, producer_sequence=4,
    ) == header  # fmt: skip
    assert header.flags & batch.PRODUCERS and not again.flags & batch.PRODUCERS
    batch.check_body(again, stored[BODY_AT:])


def test_optional_flags_of_a_newer_writer_are_not_passed_on() -> None:
    header = header_of(forged(encoded(PLAIN), flags=0xFE00))
    moved, _ = batch.stamp(
        header, base_offset=0, durable_up_to=0, writer_epoch=1, writer_nonce=0, previous_crc=0, previous_bytes=0,
        jump_offset=0, append_time=0, event_time=0, running_max_timestamp=0,
        producer=batch.NO_PRODUCER, producers_in_segment=True, salt=IDENTITY.salt,
    )  # fmt: skip
    assert header_of(moved).flags == batch.PRODUCERS


@pytest.mark.parametrize(
    "identity",
    [
        pytest.param(Identity.of(LOG_ID, 1), id="another-partition"),
        pytest.param(Identity.of(LOG_ID[::-1], 0), id="another-log"),
    ],
)
def test_batch_of_another_log_is_refused(identity: Identity) -> None:
    with pytest.raises(BadBatch) as caught:
        header_of(encoded(PLAIN), identity=identity)
    assert caught.value.at == 4


def test_batch_at_another_place_is_refused() -> None:
    with pytest.raises(BadBatch, match="made for offset 8") as caught:
        header_of(encoded(PLAIN, 8), 16)
    assert caught.value.at == 16


# --- damage -------------------------------------------------------------------------------------------


def test_no_prefix_of_a_header_is_accepted() -> None:
    stored = encoded(PLAIN)
    for size in range(BODY_AT):
        with pytest.raises(BadBatch) as caught:
            header_of(stored[:size])
        assert caught.value.at == size


def test_no_flip_in_a_header_is_accepted() -> None:
    stored = bytearray(encoded(EVERYTHING))
    for bit in range(8 * BODY_AT):
        stored[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadBatch):
            header_of(bytes(stored))
        stored[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("codec", CODECS)
def test_no_flip_in_a_body_is_accepted(codec: int) -> None:
    stored = bytearray(encoded(Columns([b"x" * 300, b"y"]), codec=codec))
    header = header_of(bytes(stored))
    for bit in range(8 * BODY_AT, 8 * len(stored)):
        stored[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadBatch, match="CRC"):
            batch.check_body(header, bytes(stored[BODY_AT:]))
        stored[bit // 8] ^= 1 << bit % 8


# --- forged: the checksums are right, the numbers are not -----------------------------------------------

NONSENSE = [
    pytest.param({"length": 0}, 12, id="length-zero"),
    pytest.param({"length": 128}, 12, id="length-of-the-header-alone"),
    pytest.param({"length": 113}, 12, id="length-no-multiple-of-8"),
    pytest.param({"length": MAX_BATCH_BYTES + 8}, 12, id="length-above-the-limit"),
    pytest.param({"length": 0xFFFFFFF8}, 12, id="length-wild"),
    pytest.param({"record_count": 0}, 36, id="no-records"),
    pytest.param({"record_count": 1000}, 36, id="more-records-than-bytes"),
    pytest.param({"record_count": MAX_RECORDS_PER_BATCH + 1, "length": 1 << 28}, 36, id="too-many-records"),
    pytest.param({"record_count": 0xFFFFFFFF}, 36, id="records-wild"),
    pytest.param({"stored_bytes": 0}, 44, id="stored-nothing"),
    pytest.param({"stored_bytes": 8}, 44, id="stored-less-than-the-columns"),
    pytest.param({"stored_bytes": 0xFFFFFFFF}, 44, id="stored-wild"),
    pytest.param({"stored_bytes": 0xFFFFFFFF, "codec": 1}, 44, id="stored-wild-compressed"),
    pytest.param({"value_bytes": 0xFFFFFFFF}, 48, id="values-wild"),
    pytest.param({"key_bytes": MAX_BATCH_BYTES}, 48, id="keys-wild"),
    pytest.param({"header_bytes": MAX_BATCH_BYTES}, 48, id="headers-wild"),
    pytest.param({"value_bytes": MAX_BATCH_BYTES // 2, "key_bytes": MAX_BATCH_BYTES, "codec": 3}, 48, id="sum-wild"),
    pytest.param({"value_bytes": 100}, 44, id="values-beyond-the-body"),
    pytest.param({"flags": 1}, 44, id="a-key-column-that-is-not-there"),
    pytest.param({"flags": 2}, 44, id="a-bitmap-that-is-not-there"),
    pytest.param({"flags": 8}, 44, id="timestamps-that-are-not-there"),
    pytest.param({"flags": 16}, 44, id="headers-that-are-not-there"),
]


@pytest.mark.parametrize(("fields", "at"), NONSENSE)
def test_sizes_that_make_no_sense_are_refused(fields: dict[str, Any], at: int) -> None:
    with pytest.raises(BadBatch) as caught:
        header_of(forged(encoded(PLAIN), **fields))
    assert caught.value.at == at


def test_batch_that_ends_beyond_the_last_offset_is_bad() -> None:
    """Its offsets would not fit Arrow's and Spark's columns."""
    last = (1 << 63) - 144
    assert header_of(encoded(Columns([b"x"]), last - 8), last - 8)
    with pytest.raises(BadBatch, match=r".") as caught:
        header_of(encoded(Columns([b"x"]), last), last)
    assert caught.value.at == 16


def test_version_zero_is_no_version() -> None:
    with pytest.raises(BadBatch) as caught:
        header_of(forged(encoded(PLAIN), version=0))
    assert (caught.value.at, caught.value.found) == (40, "batch version 0")


@pytest.mark.parametrize("fields", [{"version": 4}, {"flags": 0x20}, {"codec": 4}], ids=["version", "flag", "codec"])
def test_newer_batch_is_told_from_a_bad_one(fields: dict[str, Any]) -> None:
    with pytest.raises(NewerBatch):
        header_of(forged(encoded(PLAIN), **fields))


@settings(calm, max_examples=300)
@given(st.data())
def test_random_numbers_in_a_header_are_refused_or_harmless(data: st.DataObject) -> None:
    number = st.sampled_from([0, 1, 7, 8, 0x7FFFFFFF, 0xFFFFFFFF]) | st.integers(0, 400)
    names = ["length", "record_count", "stored_bytes", "value_bytes", "key_bytes", "header_bytes"]
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1), "names")
    fields: dict[str, Any] = {name: data.draw(number, name) for name in chosen}
    fields["flags"] = data.draw(st.integers(0, 31), "flags")
    stored = forged(encoded(EVERYTHING), **fields)
    try:
        header = header_of(stored)
    except BadBatch:
        return
    assert batch.layout(header).end == header.stored_bytes <= header.length - BODY_AT


# --- limits -------------------------------------------------------------------------------------------


class Repeated(list[bytes]):
    """A long column that takes no memory."""

    def __init__(self, item: bytes, count: int) -> None:
        super().__init__([item])
        self._count = count

    def __len__(self) -> int:
        return self._count


def test_more_records_than_a_batch_holds_are_refused_before_they_are_encoded() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_RECORDS_PER_BATCH} records"):
        batch.encode_body(Columns(Repeated(b"", MAX_RECORDS_PER_BATCH + 1)), codec=0)
