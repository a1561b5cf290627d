"""What is reserved for later versions is refused by name at every door, and never damaged; a hint is passed over."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import forged, header_of, resealed_segment
from crashed_logs import batch_ends, closed_topic, end_of, identity_of
from mirrored import segments

from conftest import last_segment, tree, values_of
from loglib import Retention, Topic, UnsupportedFormatError, repair
from loglib.append import transfer
from loglib.copies import heal, mirror, snapshot
from loglib.format.header import OFFSETS, TYPED
from loglib.format.segment_header import HEADER_BYTES, REWRITTEN, segment_name

Open = Callable[..., Topic]


def reserve(path: Path, what: str) -> str:
    """Let the topic have what a later version may write; returns the words of the error."""
    segment = last_segment(path)
    content = segment.read_bytes()
    if what == "REWRITTEN":
        segment.write_bytes(resealed_segment(content, 10, REWRITTEN.to_bytes(2, "little")))
        return r"segment flags 1 is newer than this loglib knows .*; upgrade loglib"
    bit = {"OFFSETS": OFFSETS, "TYPED": TYPED}[what]
    *_, last, _ = [0, *batch_ends(path, 0, end_of(path))]
    batch, identity = content[HEADER_BYTES + last :], identity_of(path)
    header = header_of(batch, last, identity=identity)
    newer = forged(batch, identity=identity, flags=header.flags | bit)
    segment.write_bytes(content[: HEADER_BYTES + last] + newer)
    return rf"batch flags {bit} is newer than this loglib knows .*; upgrade loglib"


def read(path: Path) -> None:
    with Topic.open(path, mode="r") as topic:
        values_of(topic)


def to_arrow(path: Path) -> None:
    with Topic.open(path, mode="r") as topic:
        for batch in topic.batches():
            batch.to_arrow()


def verify(path: Path) -> None:
    with Topic.open(path, mode="r") as topic:
        topic.verify()


def write(path: Path) -> None:
    Topic.open(path, create=True)


def send(path: Path) -> None:
    stream = io.BytesIO()
    with Topic.open(path, mode="r") as topic, (path.parent / "frames").open("w+b") as file:
        topic.partition(0).transfer(file, 0)
        file.seek(0)
        stream.write(file.read())
    stream.seek(0)
    list(transfer.read_frame(stream))


DOORS: list[Callable[[Path], object]] = [read, to_arrow, verify, write, repair]
DOORS += [lambda path: mirror(path, path.parent / "mirror"), lambda path: heal(path, [path.parent / "other"])]
NAMES = ["read", "arrow", "verify", "write", "repair", "mirror", "heal"]


@pytest.mark.parametrize("what", ["OFFSETS", "TYPED", "REWRITTEN"])
@pytest.mark.parametrize("door", [*DOORS, send], ids=[*NAMES, "transfer"])
def test_what_is_reserved_is_refused_by_name_and_stays_as_it_is(
    open_topic: Open, path: Path, door: Callable[[Path], object], what: str
) -> None:
    closed_topic(open_topic)
    snapshot(path, path.parent / "other")
    words = reserve(path, what)
    before = tree(path)
    with pytest.raises(UnsupportedFormatError, match=words):
        door(path)
    assert tree(path) == before


@pytest.mark.parametrize("what", ["OFFSETS", "TYPED"])
def test_batches_before_a_reserved_one_are_read(open_topic: Open, path: Path, what: str) -> None:
    closed_topic(open_topic)
    reserve(path, what)
    found: list[bytes | None] = []
    with Topic.open(path, mode="r") as topic, pytest.raises(UnsupportedFormatError):
        found.extend(record.value for record in topic.read())
    assert found == [b"value %d" % number for number in range(10)]


def test_hint_beside_a_segment_is_passed_over_and_goes_with_its_segment(
    open_topic: Open, path: Path, tmp_path: Path
) -> None:
    with open_topic(retention=Retention(age=None)) as topic:
        for number in range(4):
            topic.append(b"%d" % number, sync=True)
            topic.partition(0).roll()
        topic.append(b"last", sync=True)
        expected = values_of(topic)
        bases = [each.base_offset for each in topic.partition(0).segments]
    hints = [path / "0000" / segment_name(base).replace(".log", ".keys") for base in bases[:-1]]
    for each in hints:
        each.write_bytes(b"a filter of a later version")
    with Topic.open(path, mode="r") as topic:
        assert values_of(topic) == expected and topic.verify().damage == ()
    assert repair(path).repairs == ()
    mirror(path, tmp_path / "mirror")
    snapshot(path, tmp_path / "snapshot")
    for name in ("mirror", "snapshot"):
        assert segments(tmp_path / name) == segments(path)
        assert not list((tmp_path / name).rglob("*.keys"))
    with Topic.open(path, create=True) as topic:
        assert topic.partition(0).recovery == (0, 0, None, False)
        assert all(each.exists() for each in hints)
        topic.partition(0)._access.writer().disk.drop_before(bases[2])
        assert values_of(topic) == expected[2:]
    with Topic.open(path) as topic:
        assert [each.exists() for each in hints] == [False, False, True, True]
        assert values_of(topic) == expected[2:]
    stray = tmp_path / "mirror" / "0000" / segment_name(12_345_678).replace(".log", ".keys")
    stray.write_bytes(b"of no segment")
    mirror(path, tmp_path / "mirror")
    assert not stray.exists()
    Topic.delete(path)
    assert not path.exists()
