"""Commands for topics and groups: they make, list, describe, change, delete, reset, and apply retention."""

import errno
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import Cli, holding, started

import loglib
from conftest import interrupted, run_python, tree
from loglib import Retention, Topic
from loglib.system.files import Files

cli = commands.cli
clicks = commands.clicks


# --- making and listing ------------------------------------------------------------------------------------


def test_no_topic_is_made_in_another_one(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    """No listing would show it, and it would be deleted with that one."""
    before = tree(clicks)
    other = tmp_path / "other"
    shutil.copytree(clicks, other)
    for place in clicks / "inside", clicks / "0000" / "deep" / "inside":
        for verb in ("create",), ("copy", other), ("snapshot", other), ("mirror", other):
            done = cli(*verb, place)
            assert done.code == 3 and f"would be a part of the topic {clicks}" in done.errors, verb
    assert tree(clicks) == before


def test_topic_is_made_with_the_policies_that_were_given(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t"
    made = cli("create", path, "--partitions", 3, "--retention-age", "36h", "--segment-bytes", "1MiB",
               "--flush-interval", "none", "--keep-free", "0.1", "--compression", "zlib",
               "--permissions", "640")  # fmt: skip
    assert made == (0, "", f"created {path}\n")
    with Topic.open(path, mode="r") as topic:
        config = topic.config
    assert (config.partitions, config.segment_bytes, config.compression) == (3, 1 << 20, "zlib")
    assert config.permissions == 0o640
    assert config.retention.age is not None and config.retention.age.total_seconds() == 36 * 3600
    assert config.retention.keep_free == 0.1 and config.flush.interval is None and config.flush.records == 100_000
    assert cli("create", path).code == 2


def test_topics_of_a_directory_are_listed(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks.parent / "broken", create=True):
        pass
    (clicks.parent / "broken" / "topic.json").write_text("{")
    listed = cli("ls", clicks.parent, "--json").objects
    assert [(each["name"], each["partitions"]) for each in listed] == [("broken", None), ("clicks", 2)]
    assert "topic.json" in listed[0]["error"]
    assert "clicks" in cli("ls", clicks.parent).output
    nowhere = cli("ls", clicks.parent / "nowhere")
    assert nowhere.code == 2 and "does not exist" in nowhere.errors


def test_topic_has_one_size_in_all_commands(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks) as topic:
        topic.partition(0).roll()
        topic.append(b"x" * 10_000, partition=0, sync=True)
        size = sum(each.high_watermark - each.log_start_offset for each in topic.partitions)
    (listed,) = cli("ls", clicks.parent, "--json").objects
    (described,) = cli("info", clicks, "--json").objects
    assert listed["size_bytes"] == described["size_bytes"] == size
    assert sum(each["size_bytes"] for each in cli("ls", clicks, "--json").objects) == size, "of its segments"
    shown = cli("info", clicks).output.splitlines()[0].split(": ")[1].split(" in ")[0]
    assert shown in cli("ls", clicks.parent).output and shown in cli("delete", clicks, "--dry-run").errors


def test_segments_of_a_topic_are_listed(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, create=True) as topic:
        topic.partition(0).roll()
    assert [(each["partition"], each["sealed"]) for each in cli("ls", clicks, "--json").objects] == [
        (0, True), (0, False), (1, False),
    ]  # fmt: skip


def test_description_of_a_topic_marks_what_is_not_the_default(cli: Cli, clicks: Path) -> None:
    text = cli("info", clicks).output
    assert "* retention-age      none" in text and "  segment-bytes      1073741824" in text
    (facts,) = cli("info", clicks.parent, "--json").objects
    assert facts["partitions"][1]["partition"] == 1 and facts["policies"]["retention"]["age"] is None


def test_policies_change_beside_a_writer_and_keep_their_other_parts(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, create=True) as topic:
        topic.append(b"x", sync=True)
        assert cli("alter", clicks, "--retention-bytes", "10MB").code == 0
        topic.append(b"y", sync=True)
    with Topic.open(clicks, mode="r") as topic:
        assert topic.config.retention == Retention(age=None, bytes=10_000_000)
    assert cli("alter", clicks).code == 2
    assert cli("alter", clicks, "--add-partitions", 4).code == 0
    with Topic.open(clicks, mode="r") as topic:
        assert len(topic.partitions) == 4


def test_change_that_drops_segments_at_once_asks_and_can_be_tried(cli: Cli, clicks: Path) -> None:
    """`--retention-bytes 0`, meant as no limit, dropped all sealed segments without a word."""
    with Topic.open(clicks) as topic:
        topic.partition(0).roll()
        asked = cli("alter", clicks, "--retention-bytes", "0")
        assert asked.code == 2 and "The new policies drop 1 segment immediately" in asked.errors
        tried = cli("alter", clicks, "--retention-bytes", "0", "--dry-run")
        lines = tried.errors.splitlines()
        assert (tried.code, lines[0], lines[-1]) == (0, "retention-bytes: none -> 0", f"{clicks} was not changed")
        assert lines[1].startswith("The new policies drop 1 segment immediately, ")
        assert topic.config.retention.bytes is None and len(topic.partition(0).segments) == 2
        done = cli("alter", clicks, "--retention-bytes", "0", "--yes")
        assert (done.code, done.errors) == (0, f"retention-bytes: none -> 0\nchanged {clicks}\n")
    again = cli("alter", clicks, "--retention-bytes", "100kB")
    assert again.code == 0, "what is due by the former policies is not asked about"
    assert cli("alter", clicks, "--compression", "zlib").errors == f"compression: none -> zlib\nchanged {clicks}\n"


def test_policies_of_a_damaged_topic_change_after_a_question(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks) as topic:
        topic.partition(0).roll()
    segment = min((clicks / "0000").glob("*.log"))
    segment.write_bytes(bytes(4096) + segment.read_bytes()[4096:])
    asked = cli("alter", clicks, "--retention-bytes", "1")
    assert asked.code == 2 and "is not known: " in asked.errors and segment.name in asked.errors
    assert cli("alter", clicks, "--retention-bytes", "1", "--yes").code == 0
    assert cli("alter", clicks, "--compression", "zlib").code == 0, "which drops nothing"


def test_deleting_asks_and_can_be_tried(cli: Cli, clicks: Path) -> None:
    assert cli("delete", clicks, "--dry-run").errors.startswith(f"would delete {clicks}: ")
    assert cli("delete", clicks).code == 2  # no terminal to ask at
    assert clicks.exists()
    assert cli("delete", clicks, "--yes").code == 0
    assert not clicks.exists()


@pytest.mark.parametrize("limit", [("bytes", "0"), ("bytes", "4KiB"), ("age", "10s")])
def test_limit_that_keeps_no_segment_is_asked_for(
    cli: Cli, clicks: Path, tmp_path: Path, limit: tuple[str, str]
) -> None:
    """`--retention-bytes 0` is not "no limit", as elsewhere: the records were gone a minute later."""
    option = (f"--retention-{limit[0]}", limit[1])
    for command in (("alter", clicks), ("create", tmp_path / "new"), ("copy", clicks, tmp_path / "new")):
        refused = cli(*command, *option)
        assert refused.code == 2 and f"{option[0]} " in refused.errors and "Give --yes to do it\n" in refused.errors
    with Topic.open(clicks, mode="r") as topic:
        assert topic.config.retention == Retention(age=None) and not (tmp_path / "new").exists()
    assert cli("alter", clicks, *option, "--archive", "../archive").code == 0, "what it lacks stays"
    assert cli("alter", clicks, *option, "--archive", "none", "--yes").code == 0
    assert cli("create", tmp_path / "new", *option, "--yes").code == 0
    assert cli("alter", clicks, "--segment-age", "1h").code == 0, "a limit that is there already is not asked for"


def test_limit_that_drops_sealed_segments_now_is_asked_for(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks) as topic:
        for number in range(2):
            topic.append_many([b"x" * 200_000] * 2, partition=number)
            topic.partition(number).roll()
        topic.append(b"x" * 200_000, partition=0, sync=True)
    refused = cli("alter", clicks, "--retention-bytes", "100kB")
    assert refused.code == 2 and "The new policies drop 2 segments immediately" in refused.errors
    assert cli("alter", clicks, "--retention-bytes", "5MB").code == 0, "all of them stay"
    assert cli("alter", clicks, "--retention-bytes", "100kB", "--yes").code == 0
    with Topic.open(clicks, mode="r") as topic:
        assert topic.config.retention.bytes == 100_000


# --- groups ------------------------------------------------------------------------------------------------


def test_groups_lag_and_reset(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, mode="r") as topic, topic.group("etl") as group:
        for _, _ in zip(group.follow(timeout=5), range(4), strict=False):
            pass
        (listed,) = cli("groups", clicks.parent, "--json").objects
        assert (listed["topic"], listed["group"], len(listed["members"])) == ("clicks", "etl", 1)
        assert cli("reset", clicks, "etl", "--to", "begin", "--yes").code == 3  # it has a member
    found = cli("lag", clicks, "--json", "--count").objects
    assert [each["partition"] for each in found] == [0, 1]
    assert sum(each["lag_records"] for each in found) in (2, 3) and found[0]["owner"] is None
    assert "etl" in cli("lag", clicks, "etl").output
    assert cli("lag", clicks, "elt").code == 3
    assert cli("reset", clicks, "etl", "--to", "begin").code == 2
    assert cli("reset", clicks, "etl", "--to", "begin", "--dry-run").errors == "nothing was changed\n"
    assert [each["after"] for each in cli("reset", clicks, "etl", "--to", "begin", "--yes", "--json").objects] == [0, 0]
    assert sum(each["lag_records"] for each in cli("lag", clicks, "--json", "--count").objects) == 6


@pytest.mark.usefixtures("unmeasured")
def test_watching_lag_ends_with_ctrl_c(clicks: Path) -> None:
    with Topic.open(clicks, create=True) as topic:
        topic.group("etl").close()
        topic.reset_group("etl", "begin")
    watching = started("lag", clicks, "--watch", "0.1")
    assert watching.stdout is not None
    for _ in range(4):
        assert watching.stdout.readline()
    interrupted(watching)
    assert watching.returncode == 130


# --- upkeep ------------------------------------------------------------------------------------------------


def test_retention_is_explained_tried_and_done(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, create=True) as topic:
        topic.partition(0).roll()
    assert cli("alter", clicks, "--retention-bytes", "0", "--yes").code == 0
    tried = cli("retain", clicks, "--dry-run")
    assert "drop" in tried.output and tried.errors == "nothing was dropped\n"
    assert cli("retain", clicks).code == 2
    assert [each["drop"] for each in cli("retain", clicks, "--yes", "--json").objects].count(True) == 1
    assert cli("cat", clicks, "-p", 0).output == ""


def test_retention_names_who_has_a_partition_with_segments_to_drop(cli: Cli, clicks: Path) -> None:
    """It printed an empty table, dropped nothing, and ended with exit code 0."""
    with Topic.open(clicks, shared=True) as topic:
        for each in topic.partitions:
            each.roll()
    assert cli("alter", clicks, "--retention-bytes", "0", "--yes").code == 0
    with Topic.open(clicks, mode="r") as topic:
        free = topic.partition(1).high_watermark
    with Topic.open(clicks):
        held = cli("retain", clicks, "--yes", "--json")
    assert held.code == 3 and held.errors.count("has it") == 2 and f"pid {os.getpid()} " in held.errors
    kept = [each for each in held.objects if each["held_by"]]
    assert [(each["partition"], each["drop"]) for each in kept] == [(0, False), (1, False)]
    assert "has the partition" in kept[0]["reason"]
    with holding(clicks, 0):
        part = cli("retain", clicks, "--yes")
    assert part.code == 3 and "partition 0 was left out" in part.errors and "partition 1" not in part.errors
    with Topic.open(clicks, mode="r") as topic:
        assert topic.partition(0).log_start_offset == 0 and topic.partition(1).log_start_offset == free
    assert cli("retain", clicks, "--yes").code == 0
    with Topic.open(clicks, mode="r") as topic:
        assert topic.partition(0).log_start_offset > 0


def test_retention_with_nothing_to_drop_passes_a_writer_over(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks):
        done = cli("retain", clicks, "--yes", "--json")
    assert (done.code, done.errors) == (0, "") and [each["drop"] for each in done.objects] == [False, False]


def test_two_alterations_of_parts_of_a_policy_at_one_time_keep_both(
    cli: Cli, clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter = Topic.alter

    def after_another(topic: Topic, **policies: Any) -> None:
        monkeypatch.setattr(Topic, "alter", alter)
        assert cli("alter", clicks, "--hold-for", "billing", "--hold-bytes", "1GiB", "--yes").code == 0
        topic.alter(**policies)

    monkeypatch.setattr(Topic, "alter", after_another)
    assert cli("alter", clicks, "--retention-bytes", "100MiB", "--yes").code == 0
    with Topic.open(clicks, mode="r") as topic:
        retention = topic.config.retention
    assert (retention.hold_for, retention.hold_bytes, retention.bytes) == (("billing",), 1 << 30, 100 << 20)


def test_directory_that_is_closed_hides_no_other_topic(
    cli: Cli, clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another user: mode 0700 is the default."""
    (clicks.parent / "alices").mkdir()
    facts = Files.facts

    def closed(files: Files, path: str, **options: Any) -> os.stat_result:
        if "alices/" in path:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return facts(files, path, **options)

    monkeypatch.setattr(Files, "facts", closed)
    done = cli("ls", clicks.parent)
    assert "clicks" in done.output and "alices           ?" in done.output
    checked = cli("check", clicks.parent)
    assert checked.code == 3 and "clicks: 2 partitions" in checked.output and "Permission denied" in checked.output
    assert loglib.topics(clicks.parent)[1].config is not None


def test_partitions_to_add_are_shown_and_refused_before_a_policy_is_changed(cli: Cli, clicks: Path) -> None:
    tried = cli("alter", clicks, "--add-partitions", 3, "--dry-run")
    assert tried.code == 0 and "partitions: 2 -> 3" in tried.errors
    for wanted in (1, 2):
        for dry in ([], ["--dry-run"]):
            done = cli("alter", clicks, "--add-partitions", wanted, "--retention-age", "3d", *dry)
            assert done.code == 2 and "the number can only rise" in done.errors
    with holding(clicks, 0):
        assert cli("alter", clicks, "--add-partitions", 3, "--retention-age", "3d").code == 3
    with Topic.open(clicks, mode="r") as topic:
        assert (topic.config.partitions, topic.config.retention.age) == (2, None)


def test_topic_of_many_partitions_is_created_with_few_descriptors(tmp_path: Path) -> None:
    run_python(
        """
        import resource, sys
        from loglib.cli.program import run
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        assert run(["create", sys.argv[1], "--partitions", "200"]) == 0
        """,
        tmp_path / "wide",
    )
    with Topic.open(tmp_path / "wide", mode="r") as topic:
        assert len(topic.partitions) == 200


class _Person(io.StringIO):
    """A person at a terminal, who answers."""

    def isatty(self) -> bool:
        return True


def test_question_that_is_answered_with_no_changes_nothing(
    cli: Cli, clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    before = tree(clicks)
    monkeypatch.setattr(sys, "stdin", _Person("n\n"))
    done = cli("delete", clicks)
    assert done.code == 3 and "nothing was changed" in done.errors and tree(clicks) == before
    monkeypatch.setattr(sys, "stdin", _Person("y\n"))
    assert cli("delete", clicks).code == 0 and not clicks.exists()
