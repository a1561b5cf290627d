"""All of a frame is received, or nothing: a frame that could not be taken in can be sent again."""

from __future__ import annotations

import errno
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import transferred
from builders import IDENTITY, PLAIN, encoded, header_of
from transferred import MANUAL, everything, frames_of, receive_all

from conftest import sound
from loglib import CorruptLogError, FlushPolicy, StorageFullError, StorageIOError, Topic, WriterFailedError, testing
from loglib.append import transfer
from loglib.format.header import Producer
from loglib.log.recovery import Tail
from loglib.testing import FaultyFiles

source = transferred.source
target = transferred.target


def test_frame_that_is_cut_short_appends_nothing_and_can_be_sent_again(source: Topic, target: Topic) -> None:
    """Nine of ten records used to be doubled by trying again."""
    sent, _ = frames_of(source, 0, 20_000)
    for size in (len(sent) - 1, len(sent) // 2, 40):
        with pytest.raises(CorruptLogError, match="the end of the stream"):
            target.partition(0).receive(io.BytesIO(sent[:size]))
    target.partition(0).receive(io.BytesIO(sent), preserve_offsets=True)
    values = [record.value for record in everything(target)]
    assert values == [record.value for record in everything(source)][: len(values)] and len(values) > 5


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_frame_that_cannot_be_written_is_undone_and_can_be_received_again(
    source: Topic, tmp_path: Path, error: int
) -> None:
    sent, _ = frames_of(source, 0, 20_000)
    assert len(list(transfer.read_frame(io.BytesIO(sent)))) > 3  # which are written together
    files = FaultyFiles("pwritev", at=1, error=error, armed=False)
    with testing.open_topic(tmp_path / "target", flush=MANUAL, files=files) as target:
        partition = target.partition(0)
        first = partition.append(b"before")
        partition.flush()
        files.armed = True
        with pytest.raises((StorageFullError, StorageIOError)) as caught:
            partition.receive(io.BytesIO(sent))
        assert (caught.value.appended, caught.value.lost, caught.value.resume_at) == ((), (), 0)
        assert [record.offset for record in everything(target)] == [first.offset]
        partition.receive(io.BytesIO(sent))
        assert len(everything(target)) > 3
        sound(partition)


def test_batches_of_more_parts_than_one_write_takes_are_all_written(
    source: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loglib.append.tail._MOST_PARTS", 5)
    sent, _ = frames_of(source, 0, 1 << 40)
    with testing.open_topic(tmp_path / "target", flush=MANUAL) as target:
        receive_all(target, io.BytesIO(sent))
        assert everything(target) == everything(source)
        sound(target.partition(0))


def test_frame_larger_than_a_segment_says_where_to_go_on(source: Topic, tmp_path: Path) -> None:
    sent, _ = frames_of(source, 0, 1 << 40)
    headers = [header for header, _ in transfer.read_frame(io.BytesIO(sent))]
    files = FaultyFiles("rename", at=2, error=errno.ENOSPC, armed=False)
    with testing.open_topic(tmp_path / "small", flush=MANUAL, segment_bytes=8192, files=files) as target:
        partition = target.partition(0)
        files.armed = True
        with pytest.raises(StorageFullError) as caught:
            partition.receive(io.BytesIO(sent), preserve_offsets=True)
        inside = len(caught.value.appended)
        assert 0 < inside < len(headers)
        assert caught.value.resume_at == headers[inside].base_offset == partition.log_end_offset
        frames, _ = frames_of(source, caught.value.resume_at, 1 << 40)
        receive_all(target, io.BytesIO(frames))
        assert everything(target) == everything(source)
        sound(partition)


def test_flush_that_fails_after_a_frame_says_that_it_is_in(source: Topic, tmp_path: Path) -> None:
    sent, _ = frames_of(source, 0, 20_000)
    headers = [header for header, _ in transfer.read_frame(io.BytesIO(sent))]
    files = FaultyFiles("datasync", armed=False)
    policy = FlushPolicy(records=1, interval=None, bytes=None)
    with testing.open_topic(tmp_path / "failing", flush=policy, files=files) as target:
        files.armed = True
        with pytest.raises(WriterFailedError) as caught:
            target.partition(0).receive(io.BytesIO(sent))
        assert caught.value.resume_at == headers[-1].next_offset
        assert len(caught.value.appended) == len(headers) and len(caught.value.in_doubt) == 1
        with pytest.raises(WriterFailedError):
            target.close()


def test_producers_of_a_frame_that_is_undone_are_not_remembered(target: Topic) -> None:
    """A repeat of what was undone must not be answered with offsets that hold nothing."""
    partition = target.partition(0)
    frames = b"".join(encoded(PLAIN, offset, producer=Producer(9, 5)) for offset in (0,))
    second = encoded(PLAIN, len(frames), producer=Producer(9, 6), previous_crc=header_of(frames).header_crc)
    stream = transfer._frame(IDENTITY, 0, len(frames + second)) + frames + second
    active = partition._access.writer().disk.active
    write = active.write

    def full_in_the_second(parts: Sequence[bytes], tail: Tail) -> None:
        write(parts[:-1], tail)
        raise OSError(errno.ENOSPC, "No space left on device")

    active.write = full_in_the_second  # type: ignore[method-assign, assignment]
    with pytest.raises(StorageFullError):
        partition.receive(io.BytesIO(stream))
    active.write = write  # type: ignore[method-assign]
    assert partition._access.writer().last_sequence(9) is None
    partition.receive(io.BytesIO(stream))
    assert partition._access.writer().last_sequence(9) == 6
    assert len(everything(target)) == 2 * len(PLAIN.values)
