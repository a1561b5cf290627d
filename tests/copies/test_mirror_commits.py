"""Mirrors and groups' commits, and transactions: all or nothing, and never ahead of the data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from mirrored import Cut, Meanwhile, assert_same, mirror_end, source_gone

import loglib
from conftest import QUIET, fill, values_of
from loglib import (
    CorruptLogError,
    LogError,
    LogMovedError,
    NotLeaderError,
    Topic,
    UnsupportedFormatError,
    testing,
    transaction,
)
from loglib.copies import Mirror, local_source, log_copier, mirror, promote
from loglib.copies.promotion import promote_on
from loglib.format.checked_json import seal
from loglib.log.log import Log
from loglib.segment import Identity
from loglib.system.files import REAL
from loglib.testing import CrashFS, MemoryFiles

OpenTopic = Callable[..., Topic]


def test_groups_come_along_and_go(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 4)
    with topic.group("etl") as group:
        group.poll(max_records=2, timeout=10)
        group.commit()
        mirror(topic.path, to)
        with Topic.open(to, mode="r") as copy:
            assert copy.group_info("etl").committed == topic.group_info("etl").committed
            group.poll(max_records=1, timeout=10)
            group.commit()
            mirror(topic.path, to)
            assert copy.group_info("etl").committed == topic.group_info("etl").committed
    topic.delete_group("etl")
    mirror(topic.path, to)
    with Topic.open(to, mode="r") as copy:
        assert copy.groups() == []


def test_groups_of_the_copy_are_its_own(open_topic: OpenTopic, to: Path, caplog: pytest.LogCaptureFixture) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 4)
    with topic.group("etl"):
        pass
    mirror(topic.path, to)
    with Topic.open(to, mode="r") as copy:
        with pytest.raises(NotLeaderError, match="etl is a mirror of"):
            copy.group("etl")
        with pytest.raises(NotLeaderError):
            copy.reset_group("etl", "begin")
        with copy.group("report") as own:
            own.poll(max_records=3, timeout=10)
            own.commit()
            committed = copy.group_info("report").committed
            mirror(topic.path, to)
            assert copy.group_info("report").committed == committed
    with topic.group("report"):
        pass
    mirror(topic.path, to)
    assert "group of its own" in caplog.text
    topic.close()
    promote(to)
    with Topic.open(to, create=True) as promoted:
        assert promoted.group_info("report").committed == committed
        with promoted.group("etl") as group:
            assert len(group.poll(max_records=9, timeout=10)) == 4
            group.commit()
    mirror(to, topic.path)  # the old topic's groups are copies now
    with Topic.open(topic.path, mode="r") as old:
        assert old.group_info("etl").committed[0].offset == old.partition(0).high_watermark
        with pytest.raises(NotLeaderError):
            old.group("report")
    promote(topic.path)
    mirror(topic.path, to)  # and back
    with Topic.open(to, mode="r") as copy, pytest.raises(NotLeaderError):
        copy.group("report")


def test_commits_made_meanwhile_come_with_the_next_pass(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 2)
    with topic.group("etl") as group:
        group.poll(max_records=1, timeout=10)
        group.commit()

        def handle_more() -> None:
            fill(topic, 2)
            while topic.partition(0).high_watermark != group.tell()[0]:
                group.poll(max_records=9, timeout=10)
            group.commit()

        files = Meanwhile(lambda call: call.name == "pwritev" and call.path.startswith(f"{to}/0000/0"), handle_more)
        with Mirror(topic.path, to, files=files) as made:
            made.copy()
            with Topic.open(to, mode="r") as copy:
                committed = copy.group_info("etl").committed[0].offset
                assert committed <= copy.partition(0).high_watermark < topic.partition(0).high_watermark
            made.copy()
            with Topic.open(to, mode="r") as copy:
                assert copy.group_info("etl").committed == topic.group_info("etl").committed


def test_group_on_two_topics_is_kept_with_the_first(path: Path, to: Path, tmp_path: Path) -> None:
    with Topic.open(
        path, create=True, partitions=1
    ) as one, Topic.open(tmp_path / "views", create=True, partitions=1) as two:
        fill(one, 2)
        with loglib.group([one, two], "both") as group:
            group.poll(timeout=10)
            group.commit()
        first, second = sorted([one, two], key=lambda each: not Path(each.path, "groups", "both").is_dir())
        for topic in (first, second, second):
            mirror(topic.path, to.with_name(topic.name))
        assert (to.with_name(second.name) / "groups" / "both").read_bytes()
        with Topic.open(to.with_name(first.name), mode="r") as copy:
            assert copy.groups() == ["both"]


def test_copy_of_a_topic_whose_group_another_topic_keeps_is_promoted(path: Path, to: Path, tmp_path: Path) -> None:
    with Topic.open(path, create=True) as one, Topic.open(tmp_path / "views", create=True) as two:
        with loglib.group([one, two], "both"):
            pass
        (source,) = [each for each in (path, tmp_path / "views") if (each / "groups" / "both").is_file()]
        mirror(source, to)
    promote(to)
    with Topic.open(to) as promoted:
        assert promoted.groups() == [] and (to / "groups" / "both").is_file()
        promoted.append(b"x", sync=True)


def test_group_that_changes_while_it_is_copied(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    fill(topic, 4)
    for name in ("etl", "x"):
        with topic.group(name) as group:
            group.poll(max_records=2, timeout=10)
            group.commit()
    offsets = Path(topic.path, "groups", "etl", "offsets")
    (log,) = offsets.iterdir()
    (left := to / "groups" / ".etl.tmp").mkdir(parents=True)  # of a mirror that died
    shutil.rmtree(to)

    def reads_a_log_of(group: str, times: int) -> Callable[[testing.Call], bool]:
        seen: list[str] = []

        def chosen(call: testing.Call) -> bool:
            wanted = call.name == "open_read" and f"/groups/{group}/" in call.path and call.path.startswith(topic.path)
            seen.extend([call.path] * wanted)
            return wanted and len(seen) == times

        return chosen

    files = Meanwhile(reads_a_log_of("x", 1), lambda: topic.delete_group("x"))
    with Mirror(topic.path, to, files=files) as made:
        left.mkdir(parents=True)
        made.copy()
    with Topic.open(to, mode="r") as copy:
        assert copy.groups() == ["etl"]
    gone = log.with_name("f" * 16)
    files = Meanwhile(reads_a_log_of("etl", 1), lambda: log.rename(gone))
    with Mirror(topic.path, to, files=files) as made, pytest.raises((CorruptLogError, LogMovedError)):
        made.copy()  # the log is of another name: not one that a member has written
    gone.rename(log)
    mirror(topic.path, to)
    with Topic.open(to, mode="r") as copy:
        assert copy.group_info("etl").committed == topic.group_info("etl").committed


def test_logs_that_members_fold_meanwhile(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=2)
    with topic.group("etl", member="a") as one, topic.group("etl", member="b") as other:
        for number, group in enumerate((one, other, one, other)):
            for partition in range(2):
                topic.append(b"%d" % number, partition=partition, sync=True)
            group.poll(timeout=5)
            group.commit()
    mirror(topic.path, to)
    first, second = sorted(Path(topic.path, "groups", "etl", "offsets").iterdir())
    shutil.rmtree(first)
    with Mirror(topic.path, to) as made:
        noted = made._origin.groups()
        assert list(noted["etl"].marks) == [second.name]
        noted["etl"] = noted["etl"]._replace(marks={first.name: noted["etl"].marks[second.name]})
        made._commits.copy(noted)  # it is gone: the next pass finds the other list
        made.copy()
    assert [each.name for each in (to / "groups" / "etl" / "offsets").iterdir()] == [second.name]


def test_list_of_logs_that_never_stands_still(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=1)
    with topic.group("etl"):
        pass
    offsets = Path(topic.path, "groups", "etl", "offsets")

    class Restless(testing.UnsyncedFiles):
        def listdir(self, path: Any) -> list[str]:
            names = os.listdir(path)
            if path == str(offsets):
                made[0] += 1  # ten tries of two looks each
                return names + [names[0]] * (made[0] % 2 == 0)
            return names

    made = [0]
    with Mirror(topic.path, to, files=Restless()) as copier:
        copier.copy()
    assert made[0] == 20 and not (to / "groups" / "etl").exists()


def test_group_goes_on_in_the_promoted_mirror(open_topic: OpenTopic, to: Path) -> None:
    topic = open_topic(partitions=2)
    with topic.group("etl") as group:
        for _ in range(4):
            fill(topic, 4)
            group.poll(max_records=3, timeout=10)
            group.commit()
            mirror(topic.path, to)
    committed = topic.group_info("etl").committed[0].offset
    left = values_of(topic.partition(0), committed)
    topic.close()
    promote(to)
    with Topic.open(to, create=True) as promoted, promoted.group("etl") as group:
        found: list[Any] = []
        while len(found) < len(left):
            found += [record.value for record in group.poll(max_records=99, timeout=10)]
        assert found == left


def writes_to(path: Path, time: int) -> Callable[[testing.Call], bool]:
    """Chooses one of the writes to a file, by its number."""
    times = count(1)
    return lambda call: call.name == "pwritev" and call.path == str(path) and next(times) == time


@pytest.mark.parametrize("roll", [False, True])
@pytest.mark.parametrize(
    ("at", "time", "seen"),
    [
        ("0000/watermark", 1, 0), ("0002/watermark", 1, 0), ("marks.json.tmp", 1, 0), ("0000/watermark", 2, 3),
        ("0001/watermark", 2, 3), ("0002/watermark", 2, 3),
    ],
)  # fmt: skip
def test_transaction_is_in_all_partitions_of_a_copy_or_in_none(
    path: Path, to: Path, at: str, time: int, seen: int, roll: bool
) -> None:
    with Topic.open(path, create=True, partitions=3) as topic:
        fill(topic, 2)
        mirror(path, to)
        if roll:
            topic.partition(0).roll()
        with transaction(app="etl", version=1) as changes:
            for partition in range(3):
                changes.append(topic, b"of one transaction", partition=partition)
        with Topic.open(to, mode="r") as opened_before:
            with Mirror(path, to, files=Cut(writes_to(to / at, time))) as made, pytest.raises(KeyboardInterrupt):
                made.copy()
            copied = to.parent.parent / "copied" / to.name
            loglib.copies.snapshot(to, copied.with_name("snapshot"))
            mirror(to, copied)
            for each in [opened_before, to, copied, copied.with_name("snapshot")]:
                with Topic.open(each, mode="r") if isinstance(each, Path) else nullcontext(each) as reading:
                    assert values_of(reading).count(b"of one transaction") == seen
        if seen:
            shutil.copytree(to, to.parent.parent / "again" / to.name)
            mirror(path, to)
            assert_same(topic, to)
    path.rename(path.with_name("gone"))
    for each in [to, to.parent.parent / "again" / to.name]:
        if each.exists():
            promote(each, force=True)
            with Topic.open(each, create=True) as copy:
                assert values_of(copy).count(b"of one transaction") == seen
                assert not (each / "marks.json").exists()


def test_marks_that_were_written_down_replace_one_that_is_lost(path: Path, to: Path) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        mirror(path, to)
        with transaction(app="etl", version=1) as changes:
            for partition in range(2):
                changes.append(topic, b"of one transaction", partition=partition)
        cut = Cut(writes_to(to / "0001/watermark", 2))
        with Mirror(path, to, files=cut) as made, pytest.raises(KeyboardInterrupt):
            made.copy()
    (to / "0001" / "watermark").unlink()
    path.rename(path.with_name("gone"))
    promote(to, force=True)
    with Topic.open(to, create=True) as copy:
        assert values_of(copy) == [b"of one transaction"] * 2


def test_part_of_a_long_copy_shows_no_part_of_a_transaction(
    path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it copied again after a cut."""
    monkeypatch.setattr(log_copier, "SYNC_BYTES", 1 << 16)
    with Topic.open(path, create=True, partitions=2) as topic:
        fill(topic, 2)
        mirror(path, to)
        with transaction(app="etl", version=1) as changes:
            for number in range(100):
                changes.append(topic, b"%d" % number * 50_000, partition=number % 2)
        whole = topic.partition(0).high_watermark
        cut = Cut(lambda call: call.name == "pwritev" and call.path.startswith(f"{to}/0001/0"))
        with Mirror(path, to, files=cut) as made, pytest.raises(KeyboardInterrupt):
            made.copy()
        with Topic.open(to, mode="r") as copy:
            assert values_of(copy) == [b"0", b"1"]
        with Mirror(path, to) as made:
            assert made.copy() < whole + topic.partition(1).high_watermark - (1 << 16)
        assert_same(topic, to)


def test_transactions_come_along_and_the_promoted_topic_knows_their_store(path: Path, to: Path) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        for version in range(2):
            with transaction(app="etl", version=version) as changes:
                for partition in range(2):
                    changes.append(topic, b"%d" % version, partition=partition)
            mirror(path, to)
        assert_same(topic, to)
    promote(to)
    with Topic.open(to, create=True) as promoted:
        with transaction(app="etl", version=2) as changes:
            changes.append(promoted, b"2", partition=0)
        assert loglib.transactions.last_version("etl", store=path.parent) == 2
        assert sorted(values_of(promoted)) == [b"0", b"0", b"1", b"1", b"2"]


def test_store_that_cannot_be_read_takes_nothing_back(path: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Topic.open(path, create=True, partitions=2) as topic:
        with transaction(app="etl", version=0) as changes:
            for partition in range(2):
                changes.append(topic, b"0", partition=partition)
        topic.append(b"behind it", partition=0, sync=True)
        mirror(path, to)
        end = mirror_end(to)
        with Mirror(path, to) as made:
            mark = Log(REAL, f"{path}/0000", Identity.of(topic.log_id, 0)).published()
            made._copiers[0].publish(mark)
            lower = mark._replace(flushed_end=mark.log_start_offset, held_txn=0)
            lowest = lambda logs, _: {each.partition: lower for each in logs}  # noqa: E731
            monkeypatch.setattr(local_source, "marks_together", lowest)
            made.copy()
            assert made.report().set_aside == ()
        assert mirror_end(to) == end


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 1}'])
def test_damaged_marks_are_an_error(open_topic: OpenTopic, to: Path, content: bytes) -> None:
    topic = open_topic(partitions=1)
    mirror(topic.path, to)
    (to / "marks.json").write_bytes(content)
    with pytest.raises(CorruptLogError, match="the marks of this copy"):
        mirror(topic.path, to)


@pytest.mark.parametrize(
    ("facts", "error"),
    [({"format": 2}, UnsupportedFormatError), ({"format": 1, "log_id": "00", "marks": {}}, CorruptLogError)],
)
def test_marks_of_another_format_or_log(
    open_topic: OpenTopic, to: Path, facts: dict[str, Any], error: type[LogError]
) -> None:
    topic = open_topic(partitions=1)
    mirror(topic.path, to)
    (to / "marks.json").write_bytes(seal(facts))
    with pytest.raises(error):
        mirror(topic.path, to)


def test_power_cut_while_a_transaction_is_mirrored() -> None:
    source = MemoryFiles()
    with testing.open_topic("/data/topic", files=source, partitions=2, **QUIET) as topic:
        with transaction(app="etl", version=0) as changes:
            for partition in range(2):
                changes.append(topic, b"0", partition=partition)
        with Mirror("/data/topic", "/data/copy", files=source) as made:
            made.copy()
        with transaction(app="etl", version=1) as changes:
            for partition in range(2):
                changes.append(topic, b"1", partition=partition)
    fs = CrashFS(testing.Image.of(source.tree()))
    fs.kill()
    with Mirror("/data/topic", "/data/copy", files=fs) as made:
        made.copy()
    seen = set()
    for state in fs.crash_states(random=1):
        files = source_gone(state.files)
        promote_on(files, "/data/copy", now=1, force=True)
        with testing.open_topic("/data/copy", files=files, **QUIET) as copy:
            found = [values_of(each) for each in copy.partitions]
            assert found in ([[b"0"], [b"0"]], [[b"0", b"1"], [b"0", b"1"]]), state
            seen.add(len(found[0]))
    assert seen == {1, 2}
