"""Commands for topics and groups: they make, list, describe, change, delete, reset, and apply retention."""

from pathlib import Path

import commands
import pytest
from commands import Cli, started

from conftest import interrupted
from loglib import Retention, Topic

cli = commands.cli
clicks = commands.clicks


# --- making and listing ------------------------------------------------------------------------------------


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
    assert nowhere.code == 3 and "No such file or directory" in nowhere.errors


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


def test_deleting_asks_and_can_be_tried(cli: Cli, clicks: Path) -> None:
    assert cli("delete", clicks, "--dry-run").errors.startswith(f"would delete {clicks}: ")
    assert cli("delete", clicks).code == 2  # no terminal to ask at
    assert clicks.exists()
    assert cli("delete", clicks, "--yes").code == 0
    assert not clicks.exists()


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
    cli("alter", clicks, "--retention-bytes", "0")
    tried = cli("retain", clicks, "--dry-run")
    assert "drop" in tried.output and tried.errors == "nothing was dropped\n"
    assert cli("retain", clicks).code == 2
    assert [each["drop"] for each in cli("retain", clicks, "--yes", "--json").objects].count(True) == 1
    assert cli("cat", clicks, "-p", 0).output == ""
