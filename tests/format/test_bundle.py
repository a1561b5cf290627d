"""A bundle shows what its batches would show one by one, and nothing that they would refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from batch_contents import columns, split
from builders import IDENTITY, NOW, calm, chained, encoded, forged, read_back, records_of, spoil, write_segment
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import fill, run_python
from loglib import LogError, Record, Topic, testing
from loglib.config.policies import MAX_BATCH_BYTES, MAX_OFFSET
from loglib.format.batch import Batch
from loglib.format.columns import Columns
from loglib.format.header import Header
from loglib.log import bundle_reader, cursor
from loglib.log.bundle_reader import Bundle
from loglib.segment import SegmentReader
from loglib.system.files import REAL, Files

Open = Callable[..., Topic]


def plain(draw_from: Random, *, keyed: bool, stamped: bool, counts: tuple[int, ...], sizes: tuple[int, ...]) -> Columns:
    """Columns that a bundle takes."""
    count = draw_from.choice(counts)
    values = [draw_from.randbytes(draw_from.choice(sizes)) for _ in range(count)]
    keys = [draw_from.randbytes(draw_from.randrange(9)) for _ in range(count)] if keyed else None
    times = [NOW + draw_from.randrange(-50, 50) for _ in range(count)] if stamped else None
    return Columns(values, keys, times)


def many(seed: int, *, most: int = 30) -> list[Columns]:
    random = Random(seed)
    mixed = random.random() < 0.5
    keyed, stamped = random.random() < 0.5, random.random() < 0.5
    counts = random.choice(((1, 1, 1, 2, 7), (1, 2, 7, 9, 60), (30, 60)))  # values are decoded together, or one by one
    sizes = random.choice(((0, 1, 8, 50), (20,)))
    return [
        plain(
            random,
            keyed=random.random() < 0.5 if mixed else keyed,
            stamped=random.random() < 0.5 if mixed else stamped,
            counts=counts,
            sizes=sizes,
        )
        for _ in range(random.randrange(1, most))
    ]


def bundle_of(path: Path, *, block_bytes: int = 1 << 20) -> Bundle | None:
    with SegmentReader(REAL, str(path), IDENTITY) as segment:
        return Bundle.read(segment, 0, segment.end_of_file(), block_bytes=block_bytes)


def arrow_of(pieces: list[Batch] | list[Bundle]) -> pa.Table:
    table = pa.Table.from_batches([piece.to_arrow() for piece in pieces]).combine_chunks()
    table.validate(full=True)
    return table


# --- one bundle ----------------------------------------------------------------------------------


@settings(calm, max_examples=80)
@given(seed=st.integers(0, 1 << 40))
def test_bundle_shows_what_its_batches_show(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_segment(tmp_path_factory.mktemp("segment"), chained(many(seed)))
    batches = read_back(path)
    found = bundle_of(path)
    assert found is not None
    assert len(found.facts.positions) == len(batches)
    assert found.held_bytes == found.next_offset, "the batches, and nothing behind them"
    assert found.records() == records_of(batches)
    assert records_of(list(found.batches())) == records_of(batches)
    assert found.part(0, 0).batches() == []
    assert arrow_of([found]).equals(arrow_of(batches))
    for name in ("key", "value", "partition", "offset", "timestamp", "headers"):
        assert found.to_arrow([name]).column(0).equals(found.to_arrow().column(name))
    assert found.next_offset == batches[-1].next_offset
    assert (found.facts.previous_crc, found.facts.last_crc) == (0, batches[-1]._header.header_crc)
    assert found.content_bytes == sum(batch.content_bytes for batch in batches)


@settings(calm, max_examples=60)
@given(seed=st.integers(0, 1 << 40), data=st.data())
def test_part_of_a_bundle_shows_the_same_part(
    seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = bundle_of(write_segment(tmp_path_factory.mktemp("segment"), chained(many(seed))))
    assert found is not None
    assert found.part(0, 0).records() == []
    for _ in range(2):  # a part, and a part of that part
        records = found.records()
        first = data.draw(st.integers(0, len(records)))
        stop = data.draw(st.integers(0, len(records) + 2))
        part = found.part(first, stop)
        wanted = records[first:stop]
        assert len(part) == len(wanted)
        if not wanted:
            return
        assert part.records() == wanted
        assert records_of(list(part.batches())) == wanted
        assert part.to_arrow().column("offset").to_pylist() == [record.offset for record in wanted]
        assert [part.offset_of(number) for number in range(len(wanted))] == [record.offset for record in wanted]
        assert part.next_offset == part.offset_of(len(part)) == wanted[-1].next_offset
        assert 0 <= part.content_bytes <= found.content_bytes
        found = part
    offsets = [record.offset for record in records]
    start, end = data.draw(st.integers(0, offsets[-1] + 99)), data.draw(st.integers(0, offsets[-1] + 99))
    between = [record for record in found.records() if start <= record.offset < end]
    assert found.between(start, end).records() == between


@settings(calm, max_examples=40)
@given(seed=st.integers(0, 1 << 40), data=st.data())
def test_bundle_ends_before_the_batch_that_begins_at_an_offset(
    seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_segment(tmp_path_factory.mktemp("segment"), chained(many(seed)))
    batches, found = read_back(path), bundle_of(path)
    assert found is not None
    offset = data.draw(st.integers(1, batches[-1].next_offset + 8))
    wanted = [batch for batch in batches if batch._header.base_offset < offset]
    assert found.beginning_before(offset).records() == records_of(wanted)


@settings(calm, max_examples=60)
@given(parts=st.lists(columns(), min_size=1, max_size=5), codec=st.sampled_from([0, 0, 0, 1]))
def test_bundle_ends_where_a_batch_is_rare(
    parts: list[Columns], codec: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nulls, record headers and compression are left to the way that takes each batch by itself."""
    path = write_segment(tmp_path_factory.mktemp("segment"), chained(parts, codec=codec))
    batches, found = read_back(path), bundle_of(path)
    plain_ones = []
    for batch in batches:
        if batch._header.codec or batch._header.flags & ~(1 | 8):
            break
        plain_ones.append(batch)
    assert ([] if found is None else found.records()) == records_of(plain_ones)


@settings(calm, max_examples=150)
@given(seed=st.integers(0, 1 << 40), data=st.data())
def test_bundle_ends_before_a_batch_that_is_forged(
    seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each field of a header is checked, also if the checksums agree with it."""
    batches = split(chained(many(seed)))
    number = data.draw(st.integers(0, len(batches) - 1))
    name = data.draw(st.sampled_from([name for name in Header._fields if name not in {"header_crc", "body_crc"}]))
    bits = {"magic": 0, "version": 8, "codec": 8, "flags": 16}.get(name, 31)
    if bits:
        limits = st.sampled_from([0, 1, MAX_BATCH_BYTES + 8, (1 << bits) - 1])
        value = data.draw(st.integers(0, (1 << bits) - 1) | limits) & (1 << bits) - 1
        fields: dict[str, Any] = {name: value}
        batches[number] = forged(batches[number], **fields)
    else:
        batches[number] = b"\x89LLX" + batches[number][4:]
    path = write_segment(tmp_path_factory.mktemp("segment"), b"".join(batches))
    with SegmentReader(REAL, str(path), IDENTITY) as segment:
        end = segment.end_of_file()
        found = Bundle.read(segment, 0, end, block_bytes=1 << 20)
        alone = outcome(records_alone(segment, end))
    shown = [] if found is None else found.records()
    assert shown == alone[: len(shown)]


def records_alone(segment: SegmentReader, end: int) -> Iterator[Record]:
    for batch in segment.batches(0, end, block_bytes=1 << 20):
        yield from batch.records()


@pytest.mark.parametrize(
    ("at", "keyed"), [(0, False), (4, False), (12, False), (0, True), (12, True), (16, True), (20, True), (28, True)]
)
def test_bundle_ends_before_column_offsets_that_do_not_rise(tmp_path: Path, at: int, keyed: bool) -> None:
    three = Columns([b"one", b"two", b"three"], [b"a", b"b", b"c"] if keyed else None)
    good = encoded(three)
    bad = encoded(three, len(good), previous_crc=int.from_bytes(good[4:8], "little"), previous_bytes=len(good))
    body = bytearray(bad[128:])
    body[at : at + 4] = (77).to_bytes(4, "little")
    path = write_segment(tmp_path, good + forged(bad, body=bytes(body)))
    found = bundle_of(path)
    assert found is not None
    assert [record.value for record in found.records()] == [b"one", b"two", b"three"]
    (tmp_path / "first").mkdir()
    assert bundle_of(write_segment(tmp_path / "first", forged(good, body=bytes(body)))) is None


def test_bundle_takes_whole_batches_of_a_block_only(tmp_path: Path) -> None:
    path = write_segment(tmp_path, chained([Columns([b"x" * 100])] * 10))
    size = read_back(path)[0]._header.length
    for block_bytes in (size, size + 1, size + 127, size + 128, 2 * size - 1, 2 * size, 100 * size):
        found = bundle_of(path, block_bytes=block_bytes)
        assert found is not None
        assert len(found.facts.positions) == min(block_bytes // size, 10)
    assert bundle_of(path, block_bytes=size - 1) is None


def test_a_batch_beyond_the_last_offset_is_refused(tmp_path: Path) -> None:
    with SegmentReader(REAL, str(write_segment(tmp_path, chained([Columns([b"x"])]))), IDENTITY) as segment:
        from loglib.format.bundle import bundled

        block = segment.read(0, 1 << 20)
        last = MAX_OFFSET - len(block) + 8
        moved = forged(block, base_offset=last)
        assert bundled(moved, last, salt=IDENTITY.salt) is None
        assert bundled(forged(block, base_offset=last - 8), last - 8, salt=IDENTITY.salt) is not None


# --- readers -------------------------------------------------------------------------------------


def filled(path: Path, seed: int) -> Path:
    """A log of small batches; some with nulls and headers, some large."""
    random = Random(seed)
    rare = random.random() < 0.5
    with Topic.open(path, create=True, durability="os", segment_bytes=4096) as topic:
        for number in range(random.randrange(80)):
            headers = (("h", b"1"),) if rare and random.random() < 0.2 else ()
            value = None if rare and random.random() < 0.1 else b"%d" % number * random.choice((1, 9, 300))
            key = random.choice((None, b"k", b"key"))
            topic.append(value, key=key, headers=headers)
            if random.random() < 0.8:
                topic.flush()
    return path


def outcome(made: Iterator[Any] | Callable[[], Any]) -> list[Any]:
    """What is given, and the error that ends it."""
    given_so_far: list[Any] = []
    try:
        given_so_far.extend(made) if not callable(made) else given_so_far.append(made())
    except LogError as error:
        given_so_far.append((type(error), str(error)))
    return given_so_far


@settings(calm, max_examples=24)
@given(seed=st.integers(0, 1 << 40))
def test_readers_do_the_same_with_bundles_and_without(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = filled(tmp_path_factory.mktemp("topic") / "t", seed)
    with Topic.open(path, mode="r") as topic:
        done = []
        for fewest in (1, 1 << 30):
            random = Random(seed)
            with pytest.MonkeyPatch.context() as patch, topic.read() as reader:
                patch.setattr(cursor, "_MANY", fewest)
                done.append([step(reader, topic, random) for _ in range(30)])
        for number, (one, other) in enumerate(zip(*done, strict=True)):
            assert one == other, number


def step(reader: Any, topic: Topic, random: Random) -> Any:
    """A call of the reader, and what can be seen of it."""
    match random.randrange(6):
        case 0:
            found: Any = next(iter(reader), None)
        case 1:
            found = reader.poll(max_records=random.choice((1, 2, 40)))
        case 2:
            found = reader.poll(max_bytes=random.choice((1, 50, 5000)))
        case 3:
            batch = next(reader.batches(), None)
            found = batch and (batch.records(), batch.next_offset)
        case 4:
            records = list(topic.read())
            record = random.choice(records) if records else None
            found = record and reader.seek({record.partition: record.offset})
        case _:
            found = reader.lag_bytes()
    return found, reader.tell()


@settings(calm, max_examples=40)
@given(seed=st.integers(0, 1 << 40), on_damage=st.sampled_from(["raise", "skip"]))
def test_damage_is_told_the_same_with_bundles_and_without(
    seed: int, on_damage: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = filled(tmp_path_factory.mktemp("topic") / "t", seed)
    random = Random(seed)
    file = random.choice(sorted(path.glob("*/*.log")))
    size = file.stat().st_size
    if size > 4096:
        spoil(file, *(random.randrange(4096, size) for _ in range(random.choice((1, 1, 3)))))
    with Topic.open(path, mode="r") as topic:
        results = []
        for fewest in (1, 1 << 30):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cursor, "_MANY", fewest)
                reader = topic.read(on_damage=on_damage)
                records = outcome(iter(reader))
                batches = outcome(batch.records() for batch in topic.batches(on_damage=on_damage))
                results.append((records, reader.gaps, reader.tell(), batches))
    with_bundles, without = results
    assert with_bundles == without


def test_batch_of_another_history_is_refused_among_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic: Topic, path: Path
) -> None:
    """The batches of a bundle follow each other, the batch before them, and the batch after them."""
    monkeypatch.setattr(cursor, "_MANY", 1)
    for number in range(20):
        topic.append(b"%d" % number, sync=True)
    topic.close()
    (file,) = path.glob("0000/*.log")
    content = file.read_bytes()
    batches = split(content[4096:])
    identity = Topic.open(path, mode="r")._accesses[0].log.identity
    other = forged(batches[7], identity=identity, append_time=NOW + 1)
    file.write_bytes(content[:4096] + b"".join([*batches[:7], other, *batches[8:]]))
    with Topic.open(path, mode="r") as again:
        told = outcome(iter(again.read()))
        assert [record.value for record in told[:-1]] == [b"%d" % number for number in range(7)]
        assert "a batch that follows one with CRC" in told[-1][1]


def test_a_log_of_small_batches_is_read_in_blocks_of_one_size(open_topic: Open, path: Path) -> None:
    """Blocks that grew by a sixteenth with each read would need more memory for each gigabyte."""
    with open_topic(durability="os") as topic:
        for _ in range(40):
            topic.append_many([b"x" * 65_000] * 2)
            topic.flush()
    sizes: list[int] = []

    class Counting(Files):
        def read_at(self, fd: int, size_bytes: int, position: int) -> bytes:
            sizes.append(size_bytes)
            return super().read_at(fd, size_bytes, position)

    for fewest in (1, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cursor, "_MANY", fewest)
            with testing.open_topic(path, mode="r", files=Counting()) as topic:
                assert len(list(topic.read())) == 80
    assert max(sizes) <= 1.2 * cursor.BLOCK_BYTES


def test_small_batches_are_read_without_numpy(open_topic: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_topic(durability="os") as topic:
        fill(topic, 200)
        bundle_reader._parser.cache_clear()
        monkeypatch.setattr(cursor, "_MANY", 1)
        monkeypatch.setitem(sys.modules, "loglib.format.bundle", None)
        assert [record.value for record in topic.read()] == [b"%d" % number for number in range(200)]
        bundle_reader._parser.cache_clear()


def test_a_program_without_numpy_imports_it_only_for_many_small_batches(open_topic: Open, path: Path) -> None:
    with open_topic(durability="os") as topic:
        for _ in range(3):
            topic.append(b"x", sync=True)
        assert run_python(IMPORTED, path).strip() == "False"
        for _ in range(17_000):
            topic.append(b"x")
            topic.flush()
    assert run_python(IMPORTED, path).strip() == "True"


IMPORTED = """
import sys, loglib
topic = loglib.Topic.open(sys.argv[1], mode="r")
count = sum(1 for _ in topic.read())
print("numpy" in sys.modules)
"""
