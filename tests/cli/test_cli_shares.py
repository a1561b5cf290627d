"""Commands for shares: share ls, info, reset, evict, alter, delete; and shares in info, top, du and check."""

import os
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from builders import spoil
from commands import Cli
from shared_jobs import die, taken

from conftest import tree
from loglib import Topic
from loglib.errors import FencedJobError

cli = commands.cli
clicks = commands.clicks


@pytest.fixture
def opened(clicks: Path) -> Iterator[Topic]:
    """The topic of six clicks, of which four were begun: two accepted, one released for an hour, one rejected."""
    with Topic.open(clicks, mode="r") as topic:
        with topic.share("mail", max_in_hand=2, member="first") as share:
            jobs = taken(share, 2)
            jobs[0].release(3600)
            jobs[1].accept()
            for job, settle in zip(taken(share, 2), ("accept", "reject"), strict=True):
                getattr(job, settle)()
        yield topic


def test_shares_of_a_topic_and_of_a_directory_are_listed(cli: Cli, opened: Topic, clicks: Path) -> None:
    (facts,) = cli("share", "ls", clicks, "--json").objects
    counted = {"accepted": 2, "rejected": 1, "exhausted": 0, "lost": 0}
    assert (facts["topic"], facts["share"], facts["members"]) == ("clicks", "mail", [])
    assert (facts["in_hand"], facts["free"], facts["waiting"]) == (0, 1, 1)
    assert facts["lag_bytes"] > 0 and facts["oldest_us"] > 0 and facts["counts"].items() >= counted.items()
    (again,) = cli("share", "ls", clicks.parent, "--json").objects
    assert again | {"lag_seconds": 0} == facts | {"lag_seconds": 0}
    heading, row = cli("share", "ls", clicks).output.splitlines()
    assert heading.split()[:3] == ["TOPIC", "SHARE", "MEMBERS"] and row.split()[-2:] == ["2", "1"]


def test_damaged_share_is_named_and_hides_no_other_one(cli: Cli, opened: Topic, clicks: Path) -> None:
    opened.share("broken").close()
    spoil(next((clicks / "shares" / "broken" / "0000").glob("*.acks")), 20)
    done = cli("share", "ls", clicks, "--json")
    assert [each["share"] for each in done.objects] == ["mail"] and done.code == 1
    assert done.errors.startswith("clicks, share broken: ")


def test_damaged_group_is_named_and_hides_no_other_one(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, mode="r") as topic:
        for name in "broken", "whole":
            topic.reset_group(name, "begin")
    for file in (clicks / "groups" / "broken" / "offsets").rglob("*.log"):
        spoil(file, 100)
    for verb in "groups", "lag":
        done = cli(verb, clicks, "--json")
        assert {each["group"] for each in done.objects} == {"whole"} and done.code == 1, verb
        assert done.errors.startswith("clicks, group broken: ")


def test_directory_without_shares_says_so(cli: Cli, clicks: Path) -> None:
    before = tree(clicks)
    assert cli("share", "ls", clicks).errors == "no shares\n"
    assert cli("share", "ls", clicks, "--json").output == ""
    assert cli("share", "ls", clicks.parent.parent).code == 2
    assert tree(clicks) == before


def test_share_is_described_with_what_is_in_hand(cli: Cli, opened: Topic, clicks: Path) -> None:
    with opened.share("mail", member="second") as share:
        jobs = taken(share, 2)
        before = tree(clicks)
        (facts,) = cli("share", "info", clicks, "mail", "--json").objects
        shown = cli("share", "info", clicks, "mail").output
        assert tree(clicks) == before, "looking changes nothing"
    assert (facts["share"], facts["settings"]["max_in_hand"]) == ("mail", 2)
    assert [each["name"] for each in facts["members"]] == ["second"]
    hands = {(each["partition"], hand["offset"]): hand for each in facts["partitions"] for hand in each["in_hand"]}
    assert hands.keys() == {(job.partition, job.offset) for job in jobs}
    assert {(hand["member"], hand["attempt"]) for hand in hands.values()} == {("second", 1)}
    (waiting,) = [wait for each in facts["partitions"] for wait in each["waiting"]]
    assert 0 < waiting["seconds"] <= 3600
    assert sum(each["counts"]["accepted"] for each in facts["partitions"]) == 2
    assert shown.startswith("share mail: 1 member; max_attempts 5, window 10000, max_in_hand 2")
    assert "BLOCKED BY" in shown and shown.count("second") == 1 + len(jobs)


def test_share_without_a_limit_and_without_members_is_described(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, mode="r") as topic, topic.share("idle"):
        pass
    shown = cli("share", "info", clicks, "idle").output
    assert "0 members" in shown and "max_in_hand none" in shown and "MEMBER" not in shown
    assert [each["blocked_by"] for each in cli("share", "info", clicks, "idle", "--json").objects[0]["partitions"]] == [
        None, None,
    ]  # fmt: skip


def test_job_of_a_dead_member_is_shown_as_such(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, mode="r") as topic:
        share = topic.share("mail", member="gone")
        jobs = taken(share, 1)
        die(share)
        (facts,) = cli("share", "info", clicks, "mail", "--json").objects
        hands = [hand for each in facts["partitions"] for hand in each["in_hand"]]
        assert [(hand["member"], hand["offset"]) for hand in hands] == [(None, jobs[0].offset)]
        assert "(dead)" in cli("share", "info", clicks, "mail").output
        share.close()


def test_unknown_share_is_answered_with_the_names_of_those_there_are(cli: Cli, opened: Topic, clicks: Path) -> None:
    for command in (["info"], ["reset", "--to", "end"], ["alter", "--window", 5], ["delete"]):
        refused = cli("share", command[0], clicks, "mial", *command[1:])
        assert refused.code == 3 and "has no share mial; it has mail" in refused.errors, command
    assert cli("share", "evict", clicks, "mial", "first").code == 3
    assert opened.shares() == ["mail"]
    assert "Did you mean 'info'?" in cli("share", "inof", clicks).errors
    assert "Here it is `loglib share ls`." in cli("shares", clicks).errors


def test_share_begins_again_when_somebody_has_said_so(cli: Cli, opened: Topic, clicks: Path) -> None:
    before = tree(clicks)
    tried = cli("share", "reset", clicks, "mail", "--to", "begin", "--dry-run", "--json")
    assert [each["done"] for each in tried.objects] == [False, False]
    asked = cli("share", "reset", clicks, "mail", "--to", "begin")
    assert asked.code == 2 and "Give --yes" in asked.errors
    assert tree(clicks) == before
    with opened.share("mail"):
        busy = cli("share", "reset", clicks, "mail", "--to", "begin", "--yes")
        assert busy.code == 3 and "share mail is in use" in busy.errors
    done = cli("share", "reset", clicks, "mail", "--to", "begin", "--yes", "--json")
    assert [(each["after"], each["done"]) for each in done.objects] == [(each["after"], True) for each in tried.objects]
    with opened.share("mail") as share:
        assert sorted(job.value or b"" for job in share.follow(0.0)) == [b"value %d" % each for each in range(6)]
    one = cli("share", "reset", clicks, "mail", "--to", "1:2", "--yes")
    assert one.code == 0 and one.errors == "reset mail\n" and len(one.output.splitlines()) == 2
    assert cli("share", "reset", clicks, "mail", "--to", "9:8", "--yes").code == 2
    assert cli("share", "reset", clicks, "mail", "--to", "later", "--yes").code == 2


def test_member_that_hangs_is_evicted_from_a_share(cli: Cli, opened: Topic, clicks: Path) -> None:
    with opened.share("mail", member="hung") as share:
        (job,) = taken(share, 1)
        unknown = cli("share", "evict", clicks, "mail", "hang", "--yes")
        assert unknown.code == 3 and "its members: hung" in unknown.errors
        assert cli("share", "evict", clicks, "mail", "hung").code == 2
        facts = {"partition": job.partition, "offset": job.offset}
        assert cli("share", "evict", clicks, "mail", "hung", "--dry-run", "--json").objects == [facts | {"done": False}]
        assert cli("share", "evict", clicks, "mail", "hung", "--dry-run").errors == "nothing was changed\n"
        done = cli("share", "evict", clicks, "mail", "hung", "--yes", "--json")
        assert done.objects == [facts | {"done": True}]
        with pytest.raises(FencedJobError):
            job.accept()


def test_settings_of_a_share_are_changed(cli: Cli, opened: Topic, clicks: Path) -> None:
    nothing = cli("share", "alter", clicks, "mail")
    assert nothing.code == 2 and "give what to change" in nothing.errors
    assert cli("share", "alter", clicks, "mail", "--max-attempts", 0).code == 2
    tried = cli("share", "alter", clicks, "mail", "--max-in-hand", 0, "--window", 10_000, "--dry-run", "--json")
    facts = {"setting": "max_in_hand", "before": 2, "after": None, "done": False}
    assert tried.objects == [facts] and opened.share_info("mail").settings.max_in_hand == 2
    done = cli("share", "alter", clicks, "mail", "--max-in-hand", 0, "--max-attempts", 9)
    assert done.code == 0 and done.errors == "changed mail\n"
    settings = opened.share_info("mail").settings
    assert (settings.max_attempts, settings.max_in_hand) == (9, 0)
    again = cli("share", "alter", clicks, "mail", "--max-attempts", 9)
    assert again.code == 0 and again.errors == "nothing was changed\n"


def test_share_is_deleted_when_somebody_has_said_so(cli: Cli, opened: Topic, clicks: Path) -> None:
    tried = cli("share", "delete", clicks, "mail", "--dry-run")
    assert tried.code == 0 and "with 1 record begun and not settled" in tried.errors
    assert cli("share", "delete", clicks, "mail").code == 2
    with opened.share("mail"):
        assert cli("share", "delete", clicks, "mail", "--dry-run").code == 3, "it has a member"
    assert cli("share", "delete", clicks, "mail", "--yes").code == 0
    assert opened.shares() == [] and cli("cat", clicks).code == 0


def test_dry_run_of_an_alteration_says_what_the_alteration_does(cli: Cli, opened: Topic, clicks: Path) -> None:
    opened.share("mail").close()
    for path in ("", str(clicks), os.path.relpath(clicks.parent / "dead"), ""):
        command = "share", "alter", clicks, "mail", "--dead-letter", path, "--json"
        tried, done = cli(*command, "--dry-run"), cli(*command)
        assert (tried.code, tried.output.replace("false", "true")) == (done.code, done.output)


def test_share_with_a_damaged_file_can_be_deleted(cli: Cli, opened: Topic, clicks: Path) -> None:
    opened.share("mail").close()
    for each in (clicks / "shares" / "mail").glob("*/*.acks"):
        each.write_bytes(bytes(300))
    assert cli("share", "info", clicks, "mail").code == 1
    assert "which is damaged" in cli("share", "delete", clicks, "mail", "--dry-run").errors
    assert cli("share", "delete", clicks, "mail", "--yes").code == 0
    assert opened.shares() == []


def test_each_command_of_shares_says_what_it_does(cli: Cli) -> None:
    listed = cli("share", "--help").output
    for command in ("ls", "info", "reset", "evict", "alter", "delete"):
        assert f"\n  {command} " in listed
        shown = cli("share", command, "--help")
        assert shown.code == 0 and shown.output.startswith(f"Usage: loglib share {command} ")
    assert cli("share").code == 2


def test_topic_is_described_and_deleted_with_its_shares(cli: Cli, opened: Topic, clicks: Path) -> None:
    assert cli("info", clicks, "--json").objects[0]["shares"] == ["mail"]
    assert "groups: none, shares: mail" in cli("info", clicks).output
    assert "groups: none, shares: mail" in cli("delete", clicks, "--dry-run").errors


def test_bytes_of_shares_are_counted(cli: Cli, opened: Topic, clicks: Path) -> None:
    rows = cli("du", clicks, "--json").objects
    (row,) = [each for each in rows if each["what"] == "share mail"]
    assert row["size_bytes"] > 0 and row["files"] >= 3


def test_limits_of_a_share_are_checked(cli: Cli, opened: Topic, clicks: Path) -> None:
    """Two of its six records were never begun, and one waits."""
    assert cli("check", clicks, "--max-unsettled-age", "1h", "--max-lag-bytes", "1GiB").code == 0
    late = cli("check", clicks, "--max-lag", "1h", "--json")
    assert late.code == 1 and {(each["kind"], each["share"]) for each in late.objects} == {("lag", "mail")}
    (old,) = cli("check", clicks, "--max-unsettled-age", "0s", "--json").objects
    assert (old["kind"], old["share"], old["limit_seconds"]) == ("unsettled", "mail", 0) and old["age_seconds"] > 0
    assert "a record that share mail began" in old["text"]
    assert cli("check", clicks, "--max-lag", "1h", "--group", "mail").code == 1
    other = cli("check", clicks, "--max-lag", "1h", "--group", "mial")
    assert "there is no group and no share mial" in other.output and "share mail" not in other.output
    assert "longest lag 0s" not in cli("check", clicks).output


def test_top_shows_the_lag_of_a_share(cli: Cli, opened: Topic, clicks: Path) -> None:
    (facts,) = cli("top", clicks.parent, "--json").objects
    (share,) = cli("share", "ls", clicks, "--json").objects
    assert facts["lag_bytes"] == share["lag_bytes"] > 0
