"""Every state that writers, rolls and retention leave is a state that copies take: the same bytes after one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, product
from typing import Any

import pytest
from replicated import Devices, open_all, until
from streamed import served

from conftest import QUIET, in_parts
from loglib import CorruptLogError, OffsetOutOfRangeError, Topic, testing
from loglib.copies import Mirror
from loglib.copies.local_source import SourceLog
from loglib.copies.snapshots import take_snapshot
from loglib.copies.sources import Block
from loglib.format.chain import End
from loglib.segment import Identity
from loglib.testing import MemoryFiles

SOURCE, COPY = "/data/topic", "/copy/topic"

_values = count()


def append(topic: Topic) -> None:
    topic.append(b"%d" % next(_values), partition=0, sync=True)


def roll(topic: Topic) -> None:
    topic.partition(0).roll()


def drop_all(topic: Topic) -> None:
    topic.partition(0).delete_before(topic.partition(0).high_watermark)


def drop_sealed(topic: Topic) -> None:
    """As retention does it: the open segment stays."""
    topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)


def drop_oldest(topic: Topic) -> None:
    topic.partition(0).delete_before(topic.partition(0).segments[:2][-1].base_offset)


STEPS = {"a": append, "r": roll, "d": drop_all, "s": drop_sealed, "o": drop_oldest}


def sequences(longest: int) -> Iterator[str]:
    """All sequences of so many steps. Shorter ones are their beginnings, at which copies are made."""
    return map("".join, product([*STEPS, "c"], repeat=longest))


def states(files: Any, steps: str, at_each: Callable[[int, Topic], object], **options: Any) -> Topic:
    """Do the steps; before each of them, and behind the last, call `at_each`. The topic is open behind them."""
    topic = testing.open_topic(SOURCE, files=files, partitions=1, **QUIET, **options)
    for number, step in enumerate(steps):
        at_each(number, topic)
        if step == "c":  # another writer
            topic.close()
            topic = testing.open_topic(SOURCE, files=files)
        else:
            STEPS[step](topic)
    at_each(len(steps), topic)
    return topic


def segments(files: Any, path: str) -> dict[str, bytes]:
    names = files.listdir(f"{path}/0000")
    return {name: files.read_whole(f"{path}/0000/{name}", 1 << 20) for name in names if name.endswith(".log")}


def assert_same(files: Any, copy: str, topic: Topic, what: object) -> None:
    assert segments(files, copy) == segments(files, SOURCE), what
    with testing.open_topic(copy, files=files, mode="r") as opened:
        assert opened.verify().damage == (), what
        assert opened.partition(0).log_start_offset == topic.partition(0).log_start_offset, what
        assert opened.partition(0).high_watermark == topic.partition(0).high_watermark, what


def bring_up(source: Any, copy: str, files: Any, topic: Topic, what: object) -> None:
    """One pass. Only a copy that lacks what was dropped may begin anew."""
    with Mirror(source, copy, files=files) as mirror:
        end = mirror.report().ends[0]
        try:
            mirror.copy()
        except OffsetOutOfRangeError:
            assert end < topic.partition(0).log_start_offset, what
        else:
            return
    with Mirror(source, copy, files=files, on_divergence="restart") as mirror:
        mirror.copy()


def test_mirror_of_each_state_has_its_bytes_in_each_later_state() -> None:
    for steps in sequences(3):
        files = MemoryFiles()

        def copy(number: int, _: Topic, files: MemoryFiles = files) -> None:
            with Mirror(SOURCE, f"/copies/{number}/topic", files=files) as mirror:
                mirror.copy()

        with states(files, steps, copy) as topic:
            for number in range(len(steps) + 1):
                bring_up(SOURCE, f"/copies/{number}/topic", files, topic, (steps, number))
                assert_same(files, f"/copies/{number}/topic", topic, (steps, number))


def test_mirror_that_follows_has_the_bytes_of_each_state() -> None:
    for steps in sequences(3):
        files = MemoryFiles()
        opened: list[Mirror] = []

        def copy(number: int, topic: Topic, files: MemoryFiles = files, opened: list[Mirror] = opened) -> None:
            if not opened:
                opened.append(Mirror(SOURCE, COPY, files=files))
            opened[0].copy()
            assert_same(files, COPY, topic, number)

        states(files, steps, copy).close()
        opened[0].close()


class Between(testing.WatchedFiles):
    """Before the `at`-th look at the source, something happens there."""

    def __init__(self, inner: MemoryFiles, at: int, happens: Callable[[], object]) -> None:
        super().__init__(inner)
        self.at, self.happens, self.looks = at, happens, 0

    def before(self, call: testing.Call) -> None:
        if call.path.startswith(SOURCE):
            self.looks += 1
            if self.looks == self.at:
                self.happens()


def changing(files: MemoryFiles, topic: list[Topic], steps: str) -> Callable[[], None]:
    """Does these steps with the topic, which another writer may open."""

    def change() -> None:
        for step in steps:
            if step == "c":
                topic[0].close()
                topic[0] = testing.open_topic(SOURCE, files=files)
            else:
                STEPS[step](topic[0])

    return change


@pytest.mark.parametrize("meanwhile", ["r", "d", "ad", "ard", "adad", "oa", "cd"])
@pytest.mark.parametrize("copied", [0, *[pytest.param(each, marks=pytest.mark.slow) for each in (3, 7)]])
def test_source_that_changes_between_any_two_looks_of_a_pass(meanwhile: str, copied: int) -> None:
    may_lack = copied < 7 or "a" in meanwhile
    at, looks = 0, 1
    while at < looks:
        at += 1
        files = MemoryFiles()

        def copy(number: int, _: Topic, files: MemoryFiles = files) -> None:
            if number == copied > 0:
                with Mirror(SOURCE, COPY, files=files) as mirror:
                    mirror.copy()

        topic = [states(files, "ararara", copy)]
        watched = Between(files, at, changing(files, topic, meanwhile))
        with Mirror(SOURCE, COPY, files=watched, on_divergence="restart" if may_lack else "raise") as mirror:
            mirror.copy()
            assert mirror.report().set_aside == (), (meanwhile, at)  # what retention drops is no other history
        looks = watched.looks
        bring_up(SOURCE, COPY, files, topic[0], at)
        assert_same(files, COPY, topic[0], at)
        topic[0].close()


@pytest.mark.parametrize("meanwhile", ["d", "s", "ad"])
def test_source_that_began_where_the_copy_ends_and_drops_more_is_no_other_history(meanwhile: str) -> None:
    """The batch before the copy's end is dropped, so the two can be compared only by the segment that begins there."""
    at, looks = 0, 1
    while at < looks:
        at += 1
        files = MemoryFiles()

        def copy(number: int, _: Topic, files: MemoryFiles = files) -> None:
            if number == 2:
                with Mirror(SOURCE, COPY, files=files) as mirror:
                    mirror.copy()

        topic = [states(files, "ararcaro", copy)]
        watched = Between(files, at, changing(files, topic, meanwhile))
        with Mirror(SOURCE, COPY, files=watched, on_divergence="restart") as mirror:
            mirror.copy()
            assert mirror.report().set_aside == (), at
        looks = watched.looks
        bring_up(SOURCE, COPY, files, topic[0], at)
        assert_same(files, COPY, topic[0], at)
        topic[0].close()


@pytest.mark.parametrize("meanwhile", ["r", "d", "ad", "ard", "adad", "oa", "cd"])
def test_source_that_changes_between_any_two_looks_of_a_snapshot(meanwhile: str) -> None:
    at, looks = 0, 1
    while at < looks:
        at += 1
        files = MemoryFiles()
        topic = [states(files, "ararara", lambda *_: None)]
        watched = Between(files, at, changing(files, topic, meanwhile))
        take_snapshot(watched, SOURCE, COPY, links=at % 2 == 0, now=0)
        looks = watched.looks
        with testing.open_topic(COPY, files=files, mode="r") as opened:
            assert opened.verify().damage == (), at
            assert 0 <= topic[0].partition(0).high_watermark - opened.partition(0).high_watermark < 500, at
        topic[0].close()


@in_parts(3)
def test_mirror_over_a_stream_has_the_bytes_of_each_state(part: slice) -> None:
    for steps in [*sequences(3)][part]:
        files = MemoryFiles()

        def copy(number: int, _: Topic, files: MemoryFiles = files) -> None:
            if number == 1:
                with served(SOURCE, files=files) as serving, Mirror.over(serving.stream, COPY, files=files) as mirror:
                    mirror.copy()

        with states(files, steps, copy) as topic:
            for _ in range(2):
                with served(SOURCE, files=files) as serving, Mirror.over(
                    serving.stream, COPY, files=files, on_divergence="restart"
                ) as mirror:  # fmt: skip
                    mirror.copy()
            assert_same(files, COPY, topic, steps)


def test_snapshot_of_each_state_has_its_bytes() -> None:
    for steps in sequences(3):
        files = MemoryFiles()
        with states(files, steps, lambda *_: None) as topic:
            take_snapshot(files, SOURCE, COPY, links=False, now=0)
            assert_same(files, COPY, topic, steps)


def same_now(files: Any) -> bool:
    try:
        return segments(files, COPY) == segments(files, SOURCE)
    except FileNotFoundError:  # the replica drops a segment between the list of the names and the look at one
        return False


def until_same(files: Any) -> None:
    until(lambda: same_now(files), "the replica has other bytes")


def test_replica_has_the_bytes_of_each_state() -> None:
    """Also of one that its writer has closed. The replica takes the end of a sealed segment over at once."""
    for steps in map("".join, product("ards", repeat=3)):
        files = MemoryFiles()
        with open_all([SOURCE, COPY], files=files) as topic:
            for step in steps:
                STEPS[step](topic)
                until_same(files)
        assert segments(files, COPY) == segments(files, SOURCE), steps


@pytest.mark.parametrize("steps", ["r", "d", "ad", "ard", "rad", "arad"])
def test_replica_that_comes_back_has_the_bytes_of_each_state(steps: str) -> None:
    files = Devices(MemoryFiles())
    with open_all([SOURCE, COPY, "/third/topic"], files=files, acks="quorum") as topic:
        append(topic)
        with files.gone("/copy"):
            for step in steps:
                STEPS[step](topic)
            append(topic)
        STEPS[steps[-1]](topic)
        until_same(files)


def test_empty_segment_that_the_source_has_no_more_goes_from_the_copy() -> None:
    """Its file was lost, and the source's next writer has gone on in the segment before."""
    files = MemoryFiles()
    states(files, "ar", lambda *_: None).close()
    bring_up(SOURCE, COPY, files, topic := testing.open_topic(SOURCE, files=files, mode="r"), "copied")
    assert_same(files, COPY, topic, "copied")
    topic.close()
    files.unlink(f"{SOURCE}/0000/{max(segments(files, SOURCE))}")
    with testing.open_topic(SOURCE, files=files) as again:
        append(again)
        bring_up(SOURCE, COPY, files, again, "lost")
        assert_same(files, COPY, again, "lost")


def test_segment_that_begins_elsewhere_than_in_the_copy_is_refused() -> None:
    files = MemoryFiles()
    with states(files, "aa", lambda *_: None) as topic:
        end = topic.partition(0).high_watermark
        identity = Identity.of(topic.log_id, 0)
    log = SourceLog(files, f"{SOURCE}/0000", identity)
    first = log.piece(End(0, 0, 0), 0, end // 2)
    assert isinstance(first, Block)
    with pytest.raises(CorruptLogError, match="a segment from offset 0, expected one from 8, as the copy has it"):
        log.piece(first.end, 8, end)
    log.close()
