"""cli/redrive.py: dead letters go back to the topics that they came from."""

from __future__ import annotations

from pathlib import Path

import commands
import pytest
from commands import Cli

from conftest import tree
from loglib import Topic

cli = commands.cli


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """A topic of four dead letters: JSON with a user, and the user as the key."""
    with Topic.create(tmp_path / "mail") as topic:
        for user in range(4):
            topic.append(b'{"user": %d}' % user, b"%d" % user)
        topic.flush()
        with topic.share("mail", dead_letter=tmp_path / "dead") as share:
            for job in share.follow(0.0):
                job.reject("bad")
    return tmp_path / "dead"


def users(path: Path) -> list[bytes | None]:
    with Topic.open(path, mode="r") as topic:
        return [each.key for each in topic.read() if "loglib-redriven" in dict(each.headers)]


def test_dead_letters_that_pass_the_filters_are_sent_back_once(cli: Cli, dead: Path) -> None:
    mail = dead.parent / "mail"
    done = cli("redrive", dead, "--where", ".user >= 2")
    heading, row = done.output.splitlines()
    assert (heading.split(), row.split()) == (["TOPIC", "RECORDS"], [str(mail), "2"])
    assert done.errors == "sent 2 records; left out 2\n"
    assert cli("redrive", dead, "--where", ".user >= 2").errors == "sent 0 records; left out 2\n"
    assert cli("redrive", dead, "--key", "1").errors == "sent 1 record; left out 1\n"
    assert sorted(users(mail)) == [b"1", b"2", b"3"]  # type: ignore[type-var]


def test_dry_run_and_json_say_what_would_be_sent_and_write_nothing(cli: Cli, dead: Path) -> None:
    mail = dead.parent / "mail"
    before = tree(mail)
    assert cli("redrive", dead, "--dry-run").errors == "would send 4 records; left out 0\n"
    (facts,) = cli("redrive", dead, "--dry-run", "--json", "-n", "3").objects
    assert facts == {"topic": str(mail), "records": 3, "done": False}
    assert tree(mail) == before
    (facts,) = cli("redrive", dead, "--json").objects
    assert facts == {"topic": str(mail), "records": 4, "done": True}


def test_all_are_sent_to_another_topic(cli: Cli, dead: Path, tmp_path: Path) -> None:
    Topic.create(tmp_path / "again").close()
    assert cli("redrive", dead, "--to", tmp_path / "again").errors == "sent 4 records; left out 0\n"
    assert len(users(tmp_path / "again")) == 4


def test_topic_that_is_not_there_is_named(cli: Cli, dead: Path, tmp_path: Path) -> None:
    done = cli("redrive", tmp_path / "none")
    assert done.code == 2 and "none" in done.errors
    done = cli("redrive", dead, "--to", tmp_path / "none")
    assert done.code == 2 and "none" in done.errors
    done = cli("redrive", dead, "--where", ".user >>")
    assert done.code == 2 and "--where" in done.errors
