"""Commands that act on parts of a topic or on all of it: delete-before, seal, du, copy, rename, evict, delete-group."""

import errno
import os
from pathlib import Path
from typing import Any

import commands
import pytest
from builders import spoil
from commands import Cli, holding

import loglib
from conftest import MANUAL, NOW, QUIET, SECOND, last_segment, run_python, tree
from loglib import Record, Retention, StaleGenerationError, Topic, testing
from loglib.system.files import Files

cli = commands.cli
clicks = commands.clicks


def seal_all(path: Path) -> list[int]:
    """Seal the open segments; returns the ends of the partitions."""
    with Topic.open(path) as topic:
        for each in topic.partitions:
            each.roll()
        return [each.high_watermark for each in topic.partitions]


def starts(path: Path) -> list[int]:
    with Topic.open(path, mode="r") as topic:
        return [each.log_start_offset for each in topic.partitions]


@pytest.mark.parametrize("age", ["-1h", "-24h", "-1h30m", "-1d12h", "-7d", "-90m"])
def test_age_with_hours_is_a_place_and_no_question_for_help(cli: Cli, clicks: Path, age: str) -> None:
    done = cli("delete-before", clicks, age, "--dry-run")
    assert done.code == 0 and "Usage" not in done.output and "nothing was dropped" in done.errors
    assert "Usage: loglib delete-before" in cli("delete-before", "--help").output


# --- delete-before -----------------------------------------------------------------------------------------


def test_segments_before_an_offset_are_dropped(cli: Cli, clicks: Path) -> None:
    ends = seal_all(clicks)
    tried = cli("delete-before", clicks, f"0:{ends[0]}", "1:8", "--dry-run", "--json")
    assert [(each["segments"], each["after"], each["done"]) for each in tried.objects] == [
        (1, ends[0], False), (0, 0, False),
    ]  # fmt: skip
    assert cli("delete-before", clicks, f"0:{ends[0]}").code == 2, "nobody can be asked"
    assert starts(clicks) == [0, 0]
    done = cli("delete-before", clicks, f"0:{ends[0]}", "1:8", "--yes", "--json")
    assert done.code == 0 and [each["done"] for each in done.objects] == [True, False]
    assert starts(clicks) == [ends[0], 0]
    assert cli("delete-before", clicks, "0:1", "--yes").code == 0, "what is gone is gone"


def test_all_records_before_a_time_or_the_end_are_dropped(cli: Cli, clicks: Path) -> None:
    ends = seal_all(clicks)
    assert cli("delete-before", clicks, "begin", "--yes").code == 0 and starts(clicks) == [0, 0]
    with Topic.open(clicks) as topic:
        topic.append(b"new", partition=0, timestamp=NOW + 3600 * SECOND)
    assert cli("delete-before", clicks, "2023-11-14T22:30Z", "--yes").code == 0
    assert starts(clicks) == ends
    assert cli("cat", clicks).output == "new\n"
    assert cli("delete-before", clicks, "-365d", "--yes").code == 0, "an age is no option"
    assert cli("cat", clicks).output == "", "and the open segment was sealed"
    with Topic.open(clicks) as topic:
        topic.append(b"newer", partition=1)
    assert cli("delete-before", clicks, "end", "--yes").code == 0
    assert cli("cat", clicks).output == "" and cli("verify", clicks).code == 0


def test_place_that_is_wrong_drops_nothing(cli: Cli, clicks: Path) -> None:
    ends = seal_all(clicks)
    for places in (["0:8", "0:9"], ["end", "0:8"], ["0:8", "end"], ["later"], [], ["--yess", "end"]):
        assert cli("delete-before", clicks, *places, "--yes").code == 2, places
    beyond = cli("delete-before", clicks, f"0:{ends[0]}", f"1:{ends[1] + 1}", "--yes")
    assert beyond.code == 3 and "outside the log" in beyond.errors
    assert cli("delete-before", clicks, "7:0", "--yes").code == 2
    assert cli("delete-before", clicks.parent, "end", "--yes").code == 2
    assert starts(clicks) == [0, 0]


def test_deleting_beside_a_writer_does_the_rest_and_names_it(cli: Cli, clicks: Path) -> None:
    ends = seal_all(clicks)
    with holding(clicks, 0):
        done = cli("delete-before", clicks, "end", "--yes", "--json")
    assert done.code == 3 and f"partition 0 was left out: pid {os.getpid()} " in done.errors
    assert [(each["segments"], each["done"]) for each in done.objects] == [(0, False), (1, True)]
    assert starts(clicks) == [0, ends[1]]


def test_segment_that_another_process_continues_is_not_counted_as_dropped(
    cli: Cli, clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (end, _) = seal_all(clicks)
    with Topic.open(clicks) as topic:
        topic.append(b"open", partition=0)
    program = "import sys; from loglib import Topic; Topic.open(sys.argv[1]).append(b'later', partition=0, sync=True)"
    monkeypatch.setattr("loglib.cli.upkeep.confirmed", lambda *_, **__: run_python(program, clicks))
    (done, _) = cli("delete-before", clicks, "end", "--json").objects
    assert (done["segments"], done["after"], done["size_bytes"]) == (1, end, end)
    assert cli("cat", clicks, "-p", 0).output == "open\nlater\n"


def test_question_names_the_groups_that_have_not_read(cli: Cli, clicks: Path) -> None:
    seal_all(clicks)
    with Topic.open(clicks, mode="r") as topic:
        topic.reset_group("fast", "end")
        topic.reset_group("slow", "begin")
    asked = cli("delete-before", clicks, "end")
    assert asked.code == 2 and "Groups that have not read all of it: slow." in asked.errors


# --- seal --------------------------------------------------------------------------------------------------


def test_open_segments_are_sealed_if_they_have_records(cli: Cli, clicks: Path) -> None:
    with holding(clicks, 0):
        part = cli("seal", clicks, "--json")
    assert part.code == 3 and "partition 0 was left out" in part.errors
    assert [(each["partition"], each["sealed"]) for each in part.objects] == [(1, True)]
    assert [each["sealed"] for each in cli("seal", clicks, "--json").objects] == [True, False]
    assert "it is empty" in cli("seal", clicks, "-p", 1).output
    with Topic.open(clicks, mode="r") as topic:
        assert [[each.sealed for each in one.segments] for one in topic.partitions] == [[True, False]] * 2


# --- du ----------------------------------------------------------------------------------------------------


def test_bytes_of_a_topic_are_counted_by_what_they_are_for(cli: Cli, clicks: Path) -> None:
    seal_all(clicks)
    with Topic.open(clicks, mode="r") as topic:
        topic.reset_group("etl", "begin")
    (clicks / "0001" / "00000000000000000000.log.damaged-4096").write_bytes(b"x" * 5000)
    (clicks / "staging" / "attempt").mkdir(parents=True)
    (clicks / "staging" / "attempt" / "0").write_bytes(b"x" * 100)
    left = clicks.parent / ".old.0123456789abcdef.tmp"
    left.mkdir()
    (left / "topic.json").write_bytes(b"{}")
    rows = cli("du", clicks.parent, "--json").objects
    sizes = {(each["partition"], each["what"]): each["size_bytes"] for each in rows}
    segments = sorted((clicks / "0000").glob("*.log"))
    assert sizes[0, "segments"] == sum(each.stat().st_size for each in segments)
    assert (sizes[1, "set aside"], sizes[None, "staging"], sizes[None, "left over"]) == (5000, 100, 2)
    assert sizes[None, "group etl"] > 0
    whole = sum(each.stat().st_size for each in clicks.parent.rglob("*") if each.is_file())
    assert sum(sizes.values()) == whole
    listed = cli("du", clicks, "--all", "--json").objects
    named = [each["name"] for each in listed if each["what"] == "segments"]
    assert named[:2] == [f"0000/{each.name}" for each in segments]
    shown = cli("du", clicks).output
    assert shown.splitlines()[-1].startswith("total") and "set aside" in shown
    assert cli("du", clicks / "0000").code == 2
    assert cli("du", clicks.parent / "nothing").code == 2


def test_bytes_of_the_store_of_transactions_are_counted(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks) as topic, loglib.transaction("etl") as made:
        made.append(topic, b"x")
    rows = cli("du", clicks.parent, "--json").objects
    (store,) = [each for each in rows if each["what"] == "transactions"]
    assert store["topic"] is None and store["size_bytes"] > 0
    alone = cli("du", clicks.parent / ".transactions", "--json").objects
    assert [(each["what"], each["size_bytes"]) for each in alone] == [("transactions", store["size_bytes"])]


def test_file_with_two_names_takes_the_disk_once(cli: Cli, clicks: Path) -> None:
    seal_all(clicks)
    before = sum(each["disk_bytes"] for each in cli("du", clicks.parent, "--json").objects)
    (twin,) = [each for each in (clicks / "0000").glob("*.log") if each.stat().st_size > 4096]
    os.link(twin, clicks / "0000" / "another name")
    rows = cli("du", clicks.parent, "--json").objects
    assert sum(each["disk_bytes"] for each in rows) == before
    (clicks / "topic.json").unlink()
    assert cli("du", clicks).code == 0, "also without its description"


def test_directory_that_may_not_be_read_is_named(cli: Cli, clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = "groups"

    class Closed(Files):
        def listdir(self, path: Any) -> list[str]:
            if str(path).endswith(hidden):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return super().listdir(path)

    with Topic.open(clicks, mode="r") as topic:
        topic.reset_group("etl", "begin")
    monkeypatch.setattr("loglib.cli.sizes.REAL", Closed())
    done = cli("du", clicks)
    assert done.code == 3 and done.errors == f"loglib: {clicks / 'groups'}: Permission denied\n"
    assert "segments" in done.output, "and the rest is counted"
    hidden = "clicks"
    assert cli("du", clicks).code == 3


# --- copy --------------------------------------------------------------------------------------------------


def rows(path: Path) -> list[Record]:
    """The records of each partition, in order, without their offsets."""
    with Topic.open(path, mode="r") as topic:
        return [record._replace(offset=0, next_offset=0) for each in topic.partitions for record in each.read()]


def test_copy_has_the_same_records_and_the_policies_that_were_given(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    policies = {"retention": Retention(age="3d", bytes=1 << 20), "segment_bytes": 1 << 16}
    with Topic.open(clicks, alter=True, **policies) as topic:  # type: ignore[arg-type]
        topic.append(None, headers={"a": b"1"}, timestamp=NOW, partition=1)
        topic.append(b"", timestamp=NOW, partition=0)
        topic.flush()
        to = tmp_path / "new" / "place" / "t"
        done = cli("copy", clicks, to, "--compression", "zlib", "--retention-bytes", "2MiB", "--json")
    assert done.code == 0 and done.objects[0]["records"] == 8
    assert rows(to) == rows(clicks) and os.listdir(to.parent) == ["t"]
    with Topic.open(to, mode="r") as copied, Topic.open(clicks, mode="r") as source:
        assert copied.config == source.config.changed(
            {"compression": "zlib", "retention": Retention(age="3d", bytes=2 << 20)}
        )
        assert copied.log_id != source.log_id
    for other in (to, clicks):
        assert cli("copy", clicks, other).code == 2, other
    assert cli("copy", tmp_path / "nothing", tmp_path / "x").code == 2
    assert cli("verify", to).code == 0


def test_copy_has_segments_as_small_as_its_retention_needs(cli: Cli, tmp_path: Path) -> None:
    """Otherwise all records are in one segment, and the first drop takes them all."""
    path, to = tmp_path / "t", tmp_path / "u"
    with Topic.create(path, retention=Retention(bytes=1 << 20), batch_bytes=1 << 15) as topic:
        for _ in range(10):
            topic.append_many([b"x" * 1000] * 100)
    assert cli("copy", path, to).code == 0
    with Topic.open(to, mode="r") as topic:
        assert max(each.size_bytes for each in topic.partition(0).segments) <= 1 << 18
        assert topic.config.segment_bytes == 1 << 30
    assert cli("copy", path, to.parent / "v", "--retention-bytes", "none").code == 0
    with Topic.open(to.parent / "v", mode="r") as topic:
        assert len(topic.partition(0).segments) == 1


def test_place_in_an_object_store_is_copied(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    seal_all(clicks)
    assert cli("tier", clicks, tmp_path / "place").code == 0
    assert cli("copy", tmp_path / "place", tmp_path / "back" / "clicks").code == 0
    assert rows(tmp_path / "back" / "clicks") == rows(clicks)


def test_copy_with_more_partitions_keeps_the_order_of_each_key(cli: Cli, tmp_path: Path) -> None:
    """Partitions were added to the source, so records of one key are in two of its partitions."""
    path, to, times = tmp_path / "t", tmp_path / "u", iter(range(NOW, NOW + 10_000))
    values = [b"%d" % number for number in range(300)]

    def fill(first: int, last: int) -> None:
        with testing.open_topic(path, clock=lambda: next(times), **QUIET) as topic:
            for number in range(first, last):
                topic.append(values[number], key=b"k%d" % (number % 7), sync=True)
                topic.append(values[number], partition=number % 2, sync=True)

    testing.open_topic(path, clock=lambda: NOW, partitions=5, **QUIET).close()
    fill(0, 100)
    Topic.add_partitions(path, 8)
    fill(100, 200)
    assert cli("copy", path, to, "--partitions", 3, "--partitioner", "murmur2").code == 0
    found = rows(to)
    assert len(found) == 400 and {each.partition for each in found} == {0, 1, 2}
    for key in range(7):
        mine = [each for each in found if each.key == b"k%d" % key]
        assert len({each.partition for each in mine}) == 1, "a key has one partition"
        assert [each.value for each in mine] == [values[number] for number in range(200) if number % 7 == key]
    for parity in (0, 1):  # without a key: the order of their partition
        mine = [each for each in found if each.key is None and each.partition == parity]
        assert [each.value for each in mine] == [values[number] for number in range(200) if number % 2 == parity]


def test_copy_of_a_damaged_topic_is_refused_or_says_what_is_missing(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    spoil(last_segment(clicks, 0), 4096 + 130)
    to = tmp_path / "copies" / "t"
    refused = cli("copy", clicks, to)
    assert refused.code == 1 and os.listdir(to.parent) == [], "nothing is left of it"
    skipped = cli("copy", clicks, to, "--skip-damage", "--json")
    assert skipped.code == 1 and skipped.objects[0]["gaps"][0]["partition"] == 0 and "damage: " in skipped.errors
    assert [each.value for each in rows(to)] == [b"value 1", b"value 3", b"value 5"]


def test_copy_of_a_partitioner_that_only_the_application_has(cli: Cli, tmp_path: Path) -> None:
    def by_length(key: bytes, partitions: int) -> int:
        return len(key) % partitions

    path = tmp_path / "t"
    with Topic.create(path, partitions=2, partitioner=by_length) as topic:
        topic.append(b"x", key=b"abc")
    assert cli("copy", path, tmp_path / "same").code == 0
    assert rows(tmp_path / "same") == rows(path)
    with Topic.open(tmp_path / "same", partitioner=by_length) as topic:
        assert topic.append(b"y", key=b"ab").partition == 0
    refused = cli("copy", path, tmp_path / "other", "--partitions", 3)
    assert refused.code == 2 and "by_length" in refused.errors and not (tmp_path / "other").exists()
    assert cli("copy", path, tmp_path / "other", "--partitions", 3, "--partitioner", "crc32").code == 0


# --- rename ------------------------------------------------------------------------------------------------


def test_renamed_topic_keeps_its_records_and_groups(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, mode="r") as topic, topic.group("etl") as group:
        assert len(list(group.follow(timeout=0.0))) == 6
    before = rows(clicks)
    assert cli("rename", clicks, "hits").code == 0 and not clicks.exists()
    renamed = clicks.parent / "hits"
    assert rows(renamed) == before
    with Topic.open(renamed, mode="r") as topic, topic.group("etl") as group:
        assert list(group.follow(timeout=0.0)) == [], "it continues where it was"
    assert cli("rename", renamed, f"{clicks}/").code == 0 and clicks.exists(), "a path is a name, too"


def test_topic_that_is_used_or_whose_new_name_is_not_free_is_not_renamed(cli: Cli, clicks: Path) -> None:
    other = clicks.parent / "views"
    Topic.create(other).close()
    with holding(clicks, 1):
        assert cli("rename", clicks, "hits").code == 3
    with Topic.open(other, mode="r") as views, Topic.open(clicks, mode="r") as topic:
        with topic.group("etl"):
            assert cli("rename", clicks, "hits").code == 3
        with loglib.group([views, topic], "both"):  # its directory is in the other topic
            busy = cli("rename", clicks, "hits")
            assert busy.code == 3 and "both" in busy.errors
        with topic.share("mail"):
            shared = cli("rename", clicks, "hits")
            assert shared.code == 3 and "share mail is in use" in shared.errors
    assert cli("rename", clicks, "views").code == 3
    for name in (clicks.parent.parent / "hits", "a b", ".hits", "", "a/b", ".."):
        assert cli("rename", clicks, name).code in (2, 3), name
    assert cli("rename", clicks.parent / "nothing", "hits").code == 2
    assert clicks.exists() and cli("verify", clicks.parent).code == 0


# --- groups ------------------------------------------------------------------------------------------------


def test_group_is_deleted_with_what_names_it_in_other_topics(cli: Cli, clicks: Path) -> None:
    other = clicks.parent / "views"
    Topic.create(other, flush=MANUAL).close()
    with (
        Topic.open(clicks, mode="r") as topic, Topic.open(other, mode="r") as views,
        loglib.group([topic, views], "both"),
    ):  # fmt: skip
        assert cli("delete-group", clicks, "both", "--yes").code == 3, "it has a member"
    before = tree(clicks)
    tried = cli("delete-group", clicks, "both", "--dry-run")
    assert tried.code == 0 and "also reads views" in tried.errors and tree(clicks) == before
    assert cli("delete-group", clicks, "both").code == 2
    assert cli("delete-group", other, "both", "--yes").code == 3, "it is kept with the first topic"
    assert cli("delete-group", clicks, "both", "--yes").code == 0
    assert not list((other / "groups").iterdir()) and cli("groups", clicks.parent).errors == "no groups\n"
    again = cli("delete-group", clicks, "both", "--yes")
    assert again.code == 3 and "has no group both" in again.errors


def test_member_that_hangs_is_evicted(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, mode="r") as topic, topic.group("etl", member="hung", commit="manual") as hung:
        assert hung.poll() != []
        unknown = cli("evict", clicks, "etl", "hang", "--yes")
        assert unknown.code == 3 and "its members: hung" in unknown.errors
        assert cli("evict", clicks, "elt", "hung", "--yes").code == 3
        assert cli("evict", clicks, "etl", "hung").code == 2
        tried = cli("evict", clicks, "etl", "hung", "--dry-run", "--json").objects
        assert tried == [{"topic": "clicks", "partition": number, "done": False} for number in (0, 1)]
        done = cli("evict", clicks, "etl", "hung", "--yes", "--json").objects
        assert [(each["partition"], each["done"]) for each in done] == [(0, True), (1, True)]
        with pytest.raises(StaleGenerationError):
            hung.commit()


def test_group_that_does_not_exist_is_not_reset(cli: Cli, clicks: Path) -> None:
    """A mistyped name made a group, whose commits nobody reads."""
    with Topic.open(clicks, mode="r") as topic:
        topic.reset_group("etl", "begin")
    for options in (["--yes"], ["--dry-run"]):
        refused = cli("reset", clicks, "elt", "--to", "end", *options)
        assert refused.code == 3 and "has no group elt; it has etl" in refused.errors
    with Topic.open(clicks, mode="r") as topic:
        assert topic.groups() == ["etl"]
    assert cli("reset", clicks, "elt", "--to", "end", "--create", "--dry-run").code == 0
    assert cli("reset", clicks, "elt", "--to", "end", "--create", "--yes").code == 0
    with Topic.open(clicks, mode="r") as topic:
        assert topic.groups() == ["elt", "etl"]
