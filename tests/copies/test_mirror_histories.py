"""Mirrors whose source is damaged, or has another history: nothing is mixed, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
from mirrored import Cut, assert_same, mirror_end, segments

import loglib
from conftest import fill, values_of
from loglib import CorruptLogError, LogError, LogMovedError, Topic
from loglib.copies import Mirror, mirror
from loglib.copies.local_source import SourceLog, own_mark
from loglib.format.chain import End
from loglib.format.watermark import Mark, encode_new
from loglib.segment import Identity
from loglib.system.files import REAL

OpenTopic = Callable[..., Topic]


def test_damage_does_not_get_into_the_copy(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    mirror(topic.path, to)
    begin = topic.partition(0).high_watermark
    fill(topic, 6)
    file = next(Path(topic.path, "0000").glob("*.log"))
    content = bytearray(file.read_bytes())
    content[4096 + begin + 140] ^= 1
    topic.close()
    file.write_bytes(content)
    with pytest.raises(CorruptLogError):
        mirror(topic.path, to)
    with Topic.open(to, mode="r") as copy:
        assert len(values_of(copy)) == 3 and copy.verify().damage == ()
    loglib.repair(topic.path)  # declares the place as a gap
    mirror(topic.path, to)
    with Topic.open(to, mode="r") as copy, Topic.open(topic.path, create=True) as repaired:
        assert [record.value for record in copy.partition(0).read()] == values_of(repaired)
        assert copy.partition(0).high_watermark == repaired.partition(0).high_watermark
        report = copy.verify()
        lost = [each.offsets for each in repaired.verify().gaps]
        assert report.damage == () and [each.offsets for each in report.gaps] == lost and lost
        fill(repaired, 2)
        mirror(topic.path, to)
        assert [record.value for record in copy.partition(0).read()] == values_of(repaired)


def test_copy_keeps_what_a_repair_of_its_source_gives_up(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    ends = []
    for number in range(3):
        topic.append(b"%d" % number, sync=True)
        ends.append(topic.partition(0).high_watermark)
        if number == 1:
            mirror(topic.path, to)
    topic.close()
    file = next(Path(topic.path, "0000").glob("*.log"))
    content = bytearray(file.read_bytes())
    content[4096 + ends[0] + 20] ^= 1  # of the header
    file.write_bytes(content)
    loglib.repair(topic.path)
    assert mirror(topic.path, to).set_aside == ()
    with Topic.open(to, mode="r") as copy:
        assert values_of(copy) == [b"0", b"1", b"2"]


def test_what_the_source_has_lost_is_set_aside(open_topic: OpenTopic, to: Path, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    topic.close()
    backup = tmp_path / "backup"
    shutil.copytree(topic.path, backup)
    with Topic.open(topic.path, create=True) as again:
        for _ in range(2):
            fill(again, 3)
            again.partition(0).roll()
        fill(again, 2)
        mirror(topic.path, to)
        lost = segments(to)
    shutil.rmtree(topic.path)
    backup.rename(topic.path)
    with Topic.open(topic.path) as restored:
        restored.append(b"of another history", sync=True)
        report = mirror(topic.path, to)
        assert_same(restored, to)
        assert len(report.set_aside) == 3  # the end of a segment, and two whole ones
        kept = sorted(Path(each).read_bytes() for each in report.set_aside)
        assert all(any(content.endswith(each) for content in lost.values()) for each in kept)
        restored.append(b"more", sync=True)
        assert mirror(topic.path, to).set_aside == ()
        assert_same(restored, to)


def test_source_that_continues_otherwise_in_mid_run(open_topic: OpenTopic, to: Path, tmp_path: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    topic.close()
    shutil.copytree(topic.path, tmp_path / "backup")
    with Mirror(topic.path, to) as made:
        with Topic.open(topic.path, create=True) as again:
            fill(again, 3)
            made.copy()
        for name in ("watermark", "0" * 20 + ".log"):  # a restore puts the files in place of the old ones
            os.replace(tmp_path / "backup" / "0000" / name, Path(topic.path, "0000", name))
        with Topic.open(topic.path) as restored:
            for number in range(9):
                restored.append(b"another %d" % number, sync=True)
            time.sleep(1.1)  # a log looks for files that were replaced once a second
            made.copy()
            assert made.report().set_aside
            assert_same(restored, to)


def test_source_that_is_gone_or_another_topic(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    with Mirror(topic.path, to) as made:
        made.copy()
        topic.close()
        shutil.rmtree(topic.path)
        with pytest.raises((FileNotFoundError, LogMovedError)):
            made.copy()
        with Topic.open(topic.path, create=True) as other:
            fill(other, 3)
        with pytest.raises(LogMovedError, match="another topic"):
            made.copy()
    with pytest.raises(LogError, match="not a mirror of"):
        mirror(topic.path, to)
    with Topic.open(to, mode="r") as copy:
        assert len(values_of(copy)) == 3


def test_copy_that_has_less_than_it_promised_is_an_error(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    mirror(topic.path, to)
    os.truncate(to / "0000" / ("0" * 20 + ".log"), 4100)
    with pytest.raises(CorruptLogError):
        mirror(topic.path, to)


def test_copy_whose_watermark_is_lost(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 3)
    mirror(topic.path, to)
    (to / "0000" / "watermark").unlink()
    fill(topic, 3)
    assert mirror(topic.path, to).set_aside == ()
    assert_same(topic, to)


def split(path: Path, aside: Path) -> tuple[Topic, Topic]:
    """Two topics with one beginning: at `path`, and at `aside`. Their later batches differ, in equal places."""
    with Topic.open(path, create=True, partitions=1) as topic:
        fill(topic, 3)
    shutil.copytree(path, aside)
    return Topic.open(path), Topic.open(aside, create=True)


@pytest.mark.parametrize("roll", [False, True])
def test_other_history_of_the_same_length(path: Path, to: Path, tmp_path: Path, roll: bool) -> None:
    one, other = split(path, tmp_path / "other" / "topic")
    with one, other:
        for topic in (one, other):
            topic.append(b"%d" % (topic is one), sync=True)
            if roll:
                topic.partition(0).roll()
        mirror(one.path, to)
        with Mirror(other.path, to) as made:
            made.copy()
            assert len(made.report().set_aside) == 1
            assert_same(other, to)
        other.append(b"more", sync=True)
        assert mirror(other.path, to).set_aside == ()
        assert_same(other, to)


def test_other_history_whose_beginning_is_gone(path: Path, to: Path, tmp_path: Path) -> None:
    one, other = split(path, tmp_path / "other" / "topic")
    with one, other:
        for topic in (one, other):
            topic.append(b"%d" % (topic is one), sync=True)
            topic.partition(0).roll()
            topic.append(b"more", sync=True)
        mirror(one.path, to)
        other.partition(0).delete_before(other.partition(0).segments[-1].base_offset)
        with pytest.raises(CorruptLogError, match="no batch that the source has"):
            mirror(other.path, to)


def test_segment_that_does_not_follow(open_topic: OpenTopic) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)
    topic.partition(0).roll()
    base = topic.partition(0).segments[-1].base_offset
    fill(topic, 1)
    source = SourceLog(REAL, f"{topic.path}/0000", Identity.of(topic.log_id, 0))
    header = source.begun(base).header
    assert source.piece(End(base, header.previous_batch, header.previous_crc), 0, 1 << 20) == source.begun(base)
    with pytest.raises(CorruptLogError, match="a segment that follows"):
        source.piece(End(base, header.previous_batch, header.previous_crc ^ 1), 0, 1 << 20)
    source.close()


def test_segment_of_another_history_behind_the_mark_is_not_taken(path: Path, to: Path, tmp_path: Path) -> None:
    one, other = split(path, tmp_path / "other" / "topic")
    with one, other:
        one.append(b"1", sync=True)
        mirror(one.path, to)
        for topic in (one, other):
            if topic is other:
                other.append(b"2", sync=True)
            topic.partition(0).roll()
        base = other.partition(0).segments[-1].base_offset
        assert base == one.partition(0).segments[-1].base_offset
        left = to / "0000" / f"{base:020d}.log"
        shutil.copy(Path(other.path, "0000", left.name), left)
        write_mark(to, one.partition(0).log_start_offset)
        one.append(b"more", sync=True)
        assert mirror(one.path, to).set_aside == ()
        assert_same(one, to)


def write_mark(to: Path, end: int) -> None:
    """Let the copy promise no more than an offset at which nothing lies before."""
    with Topic.open(to, mode="r") as copy:
        salt = Identity.of(copy.log_id, 0).salt
    (to / "0000" / "watermark").write_bytes(encode_new(Mark.at_rest(9, end, end, end), salt))


def test_copy_without_its_first_segment_is_an_error(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)
    topic.partition(0).roll()
    fill(topic, 2)
    mirror(topic.path, to)
    for file in sorted((to / "0000").glob("*.log")):
        file.unlink()
        with pytest.raises(CorruptLogError, match="one at 0"):
            mirror(topic.path, to)


def test_damage_within_large_batches(open_topic: OpenTopic, to: Path) -> None:
    """What is whole before the damage is copied."""
    topic = open_topic(partitions=1)
    for number in range(8):
        topic.append_many([b"%d" % number * 300] * 1000)
        topic.flush()
    bases = [batch.offsets[0] for batch in topic.batches()]
    topic.close()
    file = next(Path(topic.path, "0000").glob("*.log"))
    content = bytearray(file.read_bytes())
    content[4096 + bases[5] + 1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptLogError):
        mirror(topic.path, to)
    assert mirror_end(to) == 0  # nothing is published in mid-way, but what was copied is kept
    file.write_bytes(bytes(content[: 4096 + bases[5] + 1000]) + bytes([content[4096 + bases[5] + 1000] ^ 1])
                     + bytes(content[4096 + bases[5] + 1001 :]))  # fmt: skip
    report = mirror(topic.path, to)
    assert report.copied_bytes == report.ends[0] - bases[5]


def test_segment_that_is_gone_at_the_source_is_corruption(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)
    topic.partition(0).roll()
    fill(topic, 2)
    topic.close()
    max(Path(topic.path, "0000").glob("*.log")).unlink()
    with pytest.raises(CorruptLogError):
        mirror(topic.path, to)


def test_other_history_with_other_batches(path: Path, to: Path, tmp_path: Path) -> None:
    one, other = split(path, tmp_path / "other" / "topic")
    with one, other:
        for topic in (one, other):
            topic.partition(0).roll()
        for number in range(4):
            one.append(b"%d" % number, sync=True)
        one.partition(0).roll()
        one.append(b"4", sync=True)
        other.append_many([b"other"] * 500)
        other.flush()
        mirror(one.path, to)
        assert len(mirror(other.path, to).set_aside) == 2
        assert_same(other, to)


def test_other_history_without_batches(path: Path, to: Path, tmp_path: Path) -> None:
    one, other = split(path, tmp_path / "other" / "topic")
    with one, other:
        for topic in (one, other):
            topic.partition(0).roll()
            topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        mirror(one.path, to)
        assert mirror(other.path, to).set_aside == ()
        other.append(b"other", sync=True)
        mirror(other.path, to)
        assert_same(other, to)


def test_copy_without_a_batch_takes_another_history(path: Path, to: Path, tmp_path: Path) -> None:
    """It has nothing to compare, and nothing to lose."""
    one, other = split(path, tmp_path / "other" / "topic")
    with one, other:
        for topic in (one, other):
            topic.append(b"%d" % (topic is one), sync=True)
            topic.partition(0).roll()
            topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
        mirror(one.path, to)
        assert mirror(other.path, to).set_aside == ()
        other.append(b"more", sync=True)
        mirror(other.path, to)
        assert_same(other, to)


def nothing_in_common(path: Path, aside: Path, begins: str) -> tuple[Topic, Topic]:
    """Two topics of one beginning that is gone at one of them or at both; `begins`: where the other one begins."""
    one, other = split(path, aside)
    for topic in (one, other):
        for _ in range(3):
            topic.append(b"%d" % (topic is one), sync=True)
            topic.partition(0).roll()
        topic.append(b"last of %d" % (topic is one), sync=True)
    bases = [each.base_offset for each in one.partition(0).segments]
    first = {"before": (2, 1), "with": (2, 2), "after": (0, 2), "at the end of": (0, 3), "at the first end of": (1, 1)}
    for topic, number in zip((one, other), first[begins], strict=True):
        topic.partition(0).delete_before(bases[number])
    return one, other


BEGINS = ["before", "with", "after", "at the end of", "at the first end of"]


@pytest.mark.parametrize("begins", BEGINS)
def test_copy_of_another_history_begins_anew_and_keeps_the_old(
    path: Path, to: Path, tmp_path: Path, begins: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = nothing_in_common(path, tmp_path / "other" / "topic", begins)
    with one, other:
        mirror(one.path, to)
        had = b"".join(segments(to).values())
        with pytest.raises(CorruptLogError, match='on_divergence="restart" sets this aside'):
            mirror(other.path, to)
        report = mirror(other.path, to, on_divergence="restart")
        assert_same(other, to)
        assert b"".join(Path(each).read_bytes() for each in sorted(report.set_aside)) == had[4096:]
        assert "no batch is left" in caplog.text
        other.append(b"more", sync=True)
        assert mirror(other.path, to, on_divergence="restart").set_aside == ()
        assert_same(other, to)


def test_copy_with_a_batch_across_the_start_of_its_source_begins_anew(path: Path, to: Path, tmp_path: Path) -> None:
    one, other = split(path, tmp_path / "other" / "topic")
    with one, other:
        one.append_many([b"in one batch"] * 20)
        one.flush()
        for topic in (one, other):
            topic.partition(0).roll()
            topic.append(b"%d" % (topic is one), sync=True)
            topic.partition(0).roll()
        start = other.partition(0).segments[-1].base_offset
        last = list(one.partition(0).batches())[-2]
        assert last.offsets.start < start < last.next_offset
        while other.partition(0).high_watermark <= one.partition(0).high_watermark:
            other.append(b"other", sync=True)
        other.partition(0).delete_before(start)
        mirror(one.path, to)
        with pytest.raises(CorruptLogError, match="no batch that the source has"):
            mirror(other.path, to)
        assert len(mirror(other.path, to, on_divergence="restart").set_aside) == 2
        assert_same(other, to)


@pytest.mark.parametrize("begins", BEGINS)
def test_beginning_anew_that_is_cut_anywhere_is_done_again(
    path: Path, to: Path, tmp_path: Path, begins: str
) -> None:
    one, other = nothing_in_common(path, tmp_path / "other" / "topic", begins)
    with one, other:
        mirror(one.path, to)
        shutil.copytree(to, tmp_path / "before" / "topic")
        had = {content[4096:] for content in segments(to).values()} - {b""}
        cut_at = 0
        while True:
            cut_at, calls = cut_at + 1, iter(range(1_000))
            changes = ("pwritev", "write_all", "rename", "unlink", "ftruncate", "create", "datasync")
            files = Cut(lambda call: call.name in changes and next(calls) == cut_at)  # noqa: B023
            with suppress(KeyboardInterrupt), Mirror(other.path, to, on_divergence="restart", files=files) as made:
                made.copy()
                break
            mirror(other.path, to, on_divergence="restart")
            assert_same(other, to)
            kept = b"".join(each.read_bytes() for each in (to / "0000").glob("*.diverged-*"))
            assert all(each in kept for each in had), cut_at
            shutil.rmtree(to)
            shutil.copytree(tmp_path / "before" / "topic", to)
        assert cut_at > 5


def test_old_leader_whose_records_retention_dropped_at_the_new_one_follows_it(
    path: Path, to: Path, tmp_path: Path
) -> None:
    with Topic.open(path, create=True, partitions=1) as old:
        fill(old, 3)
        mirror(path, to)
        old.append(b"never copied", sync=True)
    loglib.copies.promote(to, force=True)
    with Topic.open(to, create=True) as new:
        new.append(b"of the new leader", sync=True)
        new.partition(0).roll()
        new.append(b"kept", sync=True)
        new.partition(0).delete_before(new.partition(0).segments[-1].base_offset)
        report = mirror(to, path, on_divergence="restart", demote=True)
        assert_same(new, path)
        assert any(b"never copied" in Path(each).read_bytes() for each in report.set_aside)


@pytest.mark.parametrize("on_divergence", ["raise", "restart"])
def test_copy_without_a_batch_follows_a_source_that_has_more_of_the_past(
    path: Path, to: Path, on_divergence: Literal["raise", "restart"]
) -> None:
    """Retention has dropped all of an old leader. The new leader still has it, in a segment that goes on."""
    with Topic.open(path, create=True, partitions=1) as old:
        fill(old, 3)
        mirror(path, to)
        old.partition(0).roll()
        old.partition(0).delete_before(old.partition(0).segments[-1].base_offset)
        loglib.copies.promote(to, force=True)
    with Topic.open(to, create=True) as new:
        new.append(b"in the same segment", sync=True)
        assert mirror(to, path, on_divergence=on_divergence, demote=True).set_aside == ()
        assert_same(new, path)
        assert segments(path).keys() == segments(to).keys()
        new.partition(0).roll()
        new.append(b"more", sync=True)
        mirror(to, path)
        assert_same(new, path)


@pytest.mark.parametrize("size", [10, 100_000])
def test_other_history_that_only_the_chain_shows(path: Path, to: Path, tmp_path: Path, size: int) -> None:
    """The files were replaced between the look at the mark and the reading."""
    one, other = split(path, tmp_path / "other" / "topic")
    with one, other:
        for topic in (one, other):
            topic.append(b"%d" % (topic is one) * size, sync=True)
        mirror(one.path, to)
        other.append(b"more" * size, sync=True)
        with Mirror(other.path, to) as made:
            mark = made._origin.marks([0])[0]
            made._copiers[0]._seen = mark.writer_epoch, mark.writer_nonce
            made.copy()
            assert len(made.report().set_aside) == 1
        assert_same(other, to)


def test_setting_aside_that_is_cut_or_fails_is_done_again(path: Path, to: Path, tmp_path: Path) -> None:
    one, other = split(path, tmp_path / "other" / "topic")
    with one, other:
        for topic in (one, other):
            topic.append(b"%d" % (topic is one), sync=True)
        mirror(one.path, to)
        before = segments(to)
        cut = Cut(lambda call: call.name == "pwritev" and call.path == str(to / "0000" / "watermark"))
        with Mirror(other.path, to, files=cut) as made, pytest.raises(KeyboardInterrupt):
            made.copy()
        assert segments(to) == before and mirror_end(to) == one.partition(0).high_watermark
        failing = Cut(lambda call: call.name == "ftruncate" and call.path.endswith(".log"), OSError)
        with Mirror(other.path, to, files=failing) as made, pytest.raises(OSError, match="as the test"):
            made.copy()
        mirror(other.path, to)
        assert_same(other, to)
    kept = sorted((to / "0000").glob("*.diverged-*"))
    assert len(kept) >= 2 and len({each.read_bytes() for each in kept}) == 1


def test_file_of_producers_that_is_gone_is_corruption(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    for number in range(130):
        topic.append(b"x", producer=(f"p{number}", 1))
    topic.flush()
    topic.partition(0).roll()
    topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
    mirror(topic.path, to)
    assert_same(topic, to)
    assert list((to / "0000").glob("*.producers"))
    next(Path(topic.path, "0000").glob("*.producers")).unlink()
    with pytest.raises(CorruptLogError, match="with its producers"):
        mirror(topic.path, to.with_name("another"))


def test_transaction_that_is_held_does_not_count() -> None:
    mark = Mark.at_rest(1, 0, 100, 50)._replace(applied_txn=7)
    assert own_mark(mark).applied_txn == own_mark(mark._replace(held_txn=7, held_from=50)).applied_txn == 7
    assert own_mark(mark._replace(held_txn=7, held_from=100)).applied_txn == 6
