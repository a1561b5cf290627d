"""Transactions after a power cut: what readers and groups find that come before or after the first writer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import NOW, QUIET, in_parts, run_python, sound, start_python
from loglib import Topic, testing, transaction
from loglib.append.publication import Publication
from loglib.append.section_writer import SectionWriter
from loglib.testing import CrashFS, Image, MemoryFiles
from loglib.transactions import apply, fit, staging
from loglib.transactions import transaction as transaction_module


def disk(**policies: Any) -> CrashFS:
    """A disk with two topics, of two partitions and of one; everything is synced."""
    files = MemoryFiles()
    policies = QUIET | policies
    for name, partitions in (("orders", 2), ("bills", 1)):
        testing.open_topic(f"/data/{name}", files=files, clock=lambda: NOW, partitions=partitions, **policies).close()
    return CrashFS(Image.of(files.tree()))


class Killed(BaseException):
    """The process ends here."""


def die(*_: Any) -> None:
    raise Killed


def open_both(files: CrashFS, mode: Any = "a") -> tuple[Topic, Topic]:
    """The topics as a new process opens them."""
    transaction_module._owner.forget()
    orders, bills = (
        testing.open_topic(f"/data/{name}", mode=mode, files=files, clock=lambda: NOW) for name in ("orders", "bills")
    )
    return orders, bills


def values(topics: tuple[Topic, Topic]) -> list[list[bytes | None]]:
    return [[record.value for record in each.read()] for topic in topics for each in topic.partitions]


def seen_by_readers(files: CrashFS, others: set[bytes]) -> set[int]:
    """How many transactions readers see after a cut and before any writer. Each is in all partitions or in none."""
    seen, known = set(), set()
    for state in files.crash_states(random=1):
        if state._torn or state.key in known:  # two torn publications may take back one that was synced
            continue
        known.add(state.key)
        readers = open_both(state.files, "r")
        found = [[value for value in each if value not in others] for each in values(readers)]
        assert found[0] == found[1] == found[2], state
        seen.add(len(found[0]))
        for topic in readers:
            topic.close()
    return seen


def test_no_reader_before_the_first_writer_sees_half_of_a_transaction() -> None:
    """A power cut took the publication in one partition, and left the one in another."""
    files = disk()
    topics = open_both(files)
    orders, bills = topics
    for value in (b"1", b"2"):
        with transaction("etl") as tx:
            for partition in (0, 1):
                tx.append(orders, value, partition=partition)
            tx.append(bills, value)
        orders.append(b"native", partition=0, sync=True)
    seen = seen_by_readers(files, {b"native"})
    assert seen == {0, 1, 2}
    for topic in topics:
        topic.close()


def test_publication_of_an_owner_in_another_process_is_synced_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner stands still between its publication and the sync of it, and the transaction is done meanwhile."""
    files = disk()
    owners, topics = open_both(files), open_both(files, "r")

    def serve(*_: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Publication, "sync", lambda _: None)
            for owner in owners:
                owner._serving.serve()

    monkeypatch.setattr(fit, "request_ack", lambda *_, **__: [])
    monkeypatch.setattr(apply, "notify", serve)
    with transaction("etl") as tx:
        for partition in (0, 1):
            tx.append(topics[0], b"1", partition=partition)
        tx.append(topics[1], b"1")
    assert seen_by_readers(files, set()) == {0, 1}
    for topic in owners + topics:
        topic.close()


def test_hold_begins_at_the_end_of_what_a_power_cut_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hold was kept, and the records before it were lost: its section came before it, was seen, and came twice."""
    files = disk()
    orders, bills = open_both(files)
    bills.append(b"lost")  # in front of the section, and not synced
    with monkeypatch.context() as patched:
        patched.setattr(SectionWriter, "append_section", die)
        with pytest.raises(Killed), transaction("etl", version=1) as tx:
            tx.append(bills, b"once")
    states = [each for each in files.crash_states(random=0, since=len(files.operations)) if not each.whole]
    for topic in (orders, bills):
        topic.close()
    published = [each for each in states if "0000.log" in repr(each) and "watermark" not in repr(each)]
    assert published
    for state in published:
        after = state.files
        with monkeypatch.context() as patched:
            patched.setattr(SectionWriter, "end_section", die)
            with pytest.raises(Killed):
                testing.open_topic("/data/bills", files=after, clock=lambda: NOW)
        after.kill()
        readers = open_both(after, "r")
        assert values(readers) == [[], [], []]
        again = open_both(after)
        assert values(again) == [[], [], [b"once"]]
        for topic in readers + again:
            topic.close()


@pytest.mark.usefixtures("attentive")
def test_group_whose_files_went_back_in_a_power_cut_goes_on_behind_its_transactions() -> None:
    """With durability "os" the files of a generation may be lost. The store knew it, and refused each lower one."""
    files = disk(durability="os")
    orders, bills = open_both(files)
    members = [orders.group("etl", member="a", commit="manual")]
    members[0].poll(max_records=1)
    with transaction("etl") as tx:
        tx.append(bills, b"before")
        tx.commit(members[0], {0: 0, 1: 0}, meta="a")
    for name in ("b", "c"):  # each in a generation of its own
        orders.evict_member("etl", members[-1].member)
        members.append(orders.group("etl", member=name, commit="manual"))
        members[-1].poll(max_records=1)
    states = [each for each in files.crash_states(random=3, since=len(files.operations)) if not each.whole]
    for member in members:
        member._abandon_in_child(os.getpid())
    for topic in (orders, bills):
        topic.close()
    for state in states[:1] + states[-3:]:
        after = open_both(state.files)
        with after[0].group("etl", member="d", commit="manual") as group:
            group.poll(max_records=1)
            with transaction("etl") as tx:
                tx.append(after[1], b"after")
                tx.commit(group, {0: 0, 1: 0}, meta="d")
            found = group.committed()
        assert {commit.meta for commit in found.values()} == {"d"}
        assert values(after)[-1][-1] == b"after"
        for topic in after:
            topic.close()


LARGE = """
    import os, signal, sys
    from loglib import Topic, transaction
    from loglib.append.section_writer import SectionWriter
    from loglib.transactions import staging

    path, way, chunk, when = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if way == "append_section":
        staging.Staged.large_bytes = 1 << 40  # nothing becomes a segment
    method = getattr(SectionWriter, way)
    calls = 0

    def called(*arguments):
        global calls
        calls += 1
        if calls == chunk and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = method(*arguments)
        if calls == chunk and when == "behind":
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(SectionWriter, way, called)
    with Topic.open(path, create=True) as topic, transaction("etl", version=1) as tx:
        for number in range(200):
            tx.append_many(topic, [b"%d %d " % (number, each) + bytes(10_000) for each in range(100)])
    print(tx.repeated, calls)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("way", "first", "second"), [("append_section", 7, 8), ("attach_section", 2, 1)])
def test_large_section_that_was_killed_between_two_chunks_comes_once(
    way: str, first: int, second: int, tmp_path: Path
) -> None:
    """200 MB: killed behind and before chunks, with 500 producers between, and repeated."""
    path = tmp_path / "data" / "topic"
    Topic.open(path, create=True, segment_bytes=64 << 20).close()
    killed = start_python(LARGE, path, way, first, "behind")
    assert killed.wait(120) == -signal.SIGKILL
    killed.communicate()
    with Topic.open(path, mode="r") as topic:
        assert list(topic.read()) == []
    found = start_python(LARGE, path, way, second, "before")  # goes on in the middle, and dies again
    found.communicate(timeout=120)
    assert found.returncode == -signal.SIGKILL
    with Topic.open(path) as topic:
        for number in range(500):
            topic.append_many([b"other"], partition=0, producer=(f"producer {number}", 1))
    repeated, chunks = run_python(LARGE, path, way, -1, "never").split()
    assert (repeated, chunks) == ("True", "0")
    with Topic.open(path) as topic:
        values = [bytes((record.value or b"")[:12]) for record in topic.read()]
        expected = [b"%d %d " % (number, each) for number in range(200) for each in range(100)]
        assert [value.rstrip(b"\0") for value in values] == expected + [b"other"] * 500
        sound(topic.partitions[0])


@in_parts(2)
def test_stage_stays_until_each_partition_has_its_section(part: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies between two partitions; the next one reads what was staged, which is synced."""
    files = disk()
    topics = open_both(files)
    with monkeypatch.context() as patched:
        patched.setattr(staging, "_SMALL_BYTES", 0)
        with transaction("etl") as tx:
            for partition in (0, 1):
                tx.append(topics[0], b"1", partition=partition)
            tx.append(topics[1], b"1")
    seen = set()
    for state in [each for each in files.crash_states(random=0) if not each._torn][part]:
        after = open_both(state.files)
        found = values(after)
        assert found in ([[], [], []], [[b"1"]] * 3), state
        seen.add(len(found[0]))
        for topic in after:
            topic.close()
    assert seen == {0, 1}
    for topic in topics:
        topic.close()
