"""Commands that look for damage and mend it: verify, dump, repair, audit, heal and scrub."""

import os
import shutil
from pathlib import Path

import commands
from builders import spoil
from commands import Cli, holding

from conftest import NOW, QUIET, last_segment
from loglib import Topic, testing

cli = commands.cli
clicks = commands.clicks


# --- upkeep ------------------------------------------------------------------------------------------------


def test_damage_is_found_by_verify_dump_and_cat(cli: Cli, clicks: Path) -> None:
    assert cli("verify", clicks.parent).code == 0
    segment = last_segment(clicks, 0)
    data = bytearray(segment.read_bytes())
    data[4096 + 130] ^= 1
    segment.write_bytes(data)
    found = cli("verify", clicks)
    assert found.code == 1 and f"{segment}, byte" in found.output
    (report,) = cli("verify", clicks, "--json").objects
    assert len(report["damage"]) == 1 and report["damage"][0]["offsets"]
    dumped = cli("dump", clicks)
    assert dumped.code == 1 and "batch:" in dumped.output and "segment:" in dumped.output
    stopped = cli("cat", clicks)
    assert stopped.code == 1 and str(segment) in stopped.errors
    passed = cli("cat", clicks, "--skip-damage")
    assert (passed.code, passed.output) == (1, "value 1\nvalue 3\nvalue 5\n") and "damage: " in passed.errors


def test_tail_says_what_is_damaged_before_its_records(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with testing.open_topic(path, **QUIET) as topic:
        for number in range(4):
            topic.append(b"%d" % number, sync=True)
        offsets = [record.offset for record in topic.read("begin")]
        place = topic.partition(0).segments[0].path
    assert (cli("tail", path, "-n", 2).code, cli("tail", path, "-n", 0).code) == (0, 0)
    spoil(Path(place), 4096 + offsets[1] + 20)
    for options in (), ("-n", 3), ("--skip-damage",), ("-f", "--timeout", 0):
        done = cli("tail", path, *options)
        assert (done.code, done.output) == (1, "2\n3\n") and "before this damage: " in done.errors, options
        assert done.errors.count(place) == 1
    assert cli("tail", path, "-n", 1) == (0, "3\n", "")


def test_dump_shows_headers_records_and_bytes(cli: Cli, clicks: Path) -> None:
    what = [each["what"] for each in cli("dump", clicks, "--json", "--records").objects]
    assert what == ["segment", "batch", "record", "record", "record"]
    (_, batch) = cli("dump", clicks, "--json").objects
    assert batch["flags"] == ["KEYS", "TIMESTAMPS"] and batch["codec"] == "none"
    text = cli("dump", clicks, "-p", 1, "-n", 1, "--hex", "--records").output
    assert "89 4c 4c 42" in text and "value 1" in text and "header" in text


def test_dump_goes_on_behind_a_damaged_header(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with testing.open_topic(path, **QUIET) as topic:
        for _ in range(4):
            topic.append(b"x", sync=True)
        topic.partition(0).roll()
        topic.append(b"y", sync=True)
    first = min(path.glob("0000/*.log"))
    data = bytearray(first.read_bytes())
    data[20] ^= 1  # the segment's header
    data[4096 + 144 + 20] ^= 1  # the header of the second batch
    first.write_bytes(data)
    done = cli("dump", path, "--json")
    assert done.code == 1
    what = [each["what"] for each in done.objects]
    assert what == ["segment", "batch", "damage", "batch", "batch", "segment", "batch"]
    assert "error" in done.objects[0]
    later = cli("dump", path, "--from", 300, "-n", 1, "--json").objects
    assert [each.get("base_offset") for each in later if each["what"] == "batch"] == [288]


# --- repair ------------------------------------------------------------------------------------------------


def test_repair_says_what_it_does_and_asks(cli: Cli, clicks: Path) -> None:
    assert cli("repair", clicks).output == f"{clicks}: nothing to repair\n"
    segment = last_segment(clicks, 0)
    spoil(segment, 4096 + 130)
    tried = cli("repair", clicks, "--dry-run")
    assert tried.code == 1 and "declared as a gap" in tried.output and tried.errors == "nothing was changed\n"
    assert cli("repair", clicks).code == 2  # nobody can be asked
    assert cli("verify", clicks).code == 1
    (done,) = cli("repair", clicks, "--yes", "--json").objects
    assert [each["partition"] for each in done["repairs"]] == [0, 0] and not done["verified"]["damage"]
    verified = cli("verify", clicks)
    assert verified.code == 1 and "no damage, 1 declared gap\n" in verified.output
    (report,) = cli("verify", clicks, "--json").objects
    assert [each["offsets"] for each in report["gaps"]] == [done["repairs"][0]["offsets"]]
    printed = cli("cat", clicks)
    assert printed.code == 1 and "a gap that a repair has declared" in printed.errors
    assert printed.output == "value 1\nvalue 3\nvalue 5\n"
    assert cli("repair", clicks.parent / "nothing").code == 2


def test_gaps_that_are_accepted_end_checks_with_code_0_and_are_listed(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    older = tmp_path / "old" / "clicks"
    spoil(last_segment(clicks, 0), 4096 + 130)
    shutil.copytree(clicks, older)  # with the same damage
    assert cli("repair", clicks, "--yes").code == 0
    for command in (["verify"], ["scrub"], ["scrub", "--donor", older], ["heal", "--from", older]):
        assert cli(*command, clicks).code == 1, command
    tried = cli("repair", clicks, "--accept", "--dry-run")
    assert tried.code == 1 and "is accepted" in tried.output
    assert cli("repair", clicks, "--accept").code == 2, "nobody can be asked"
    assert cli("verify", clicks).code == 1
    (done,) = cli("repair", clicks, "--accept", "--yes", "--json").objects
    assert [each["partition"] for each in done["repairs"]] == [0] and len(done["verified"]["accepted"]) == 1
    assert cli("repair", clicks, "--accept", "--yes").output == f"{clicks}: nothing to repair\n"
    for command in (["verify"], ["scrub"], ["scrub", "--donor", older], ["heal", "--from", older]):
        assert cli(*command, clicks).code == 0, command
    shown = cli("verify", clicks).output
    assert "1 declared gap (1 accepted)\n" in shown and "whose loss was accepted" in shown
    (report,) = cli("verify", clicks, "--json").objects
    assert report["accepted"] == report["gaps"] and len(report["gaps"]) == 1
    (healed,) = cli("heal", clicks, "--from", older, "--json").objects
    assert len(healed["unhealed"]) == 1, "and heal still says what it did not find"
    with Topic.open(clicks) as topic:
        topic.append(b"sealed", partition=1)
        topic.partition(1).roll()
    spoil(min((clicks / "0001").glob("*.log")), 4096 + 130)
    assert cli("verify", clicks).code == 1, "new damage is not accepted"
    with Topic.open(clicks):
        assert cli("repair", clicks, "--accept", "--yes").code == 0, "also beside a writer, in a sealed segment"
    assert cli("verify", clicks).code == 0
    assert cli("snapshot", clicks, tmp_path / "copies" / "clicks").code == 0
    assert cli("verify", tmp_path / "copies" / "clicks").code == 0, "a copy knows it, too"


def test_repair_beside_a_writer_mends_the_rest_and_names_the_writer(cli: Cli, clicks: Path) -> None:
    for number in (0, 1):
        (clicks / f"000{number}" / "watermark").write_bytes(b"")
    with holding(clicks, 0):
        done = cli("repair", clicks, "--yes", "--json")
    assert done.code == 3 and f"partition 0 was left out: pid {os.getpid()} " in done.errors
    assert {each["partition"] for each in done.objects[0]["repairs"]} == {1}, "and it says what it has done"
    assert {each["partition"] for each in done.objects[0]["verified"]["damage"]} == {0}
    assert cli("repair", clicks, "--yes").code == 0 and cli("verify", clicks).code == 0


# --- audit -------------------------------------------------------------------------------------------------


def test_audit_names_what_does_not_add_up(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(clicks.parent, mirror)
    fine = cli("audit", clicks.parent, mirror)
    assert (fine.code, fine.output) == (0, "") and "0 do not add up" in fine.errors
    assert cli("audit", clicks.parent, mirror, "--all").output.count("adds up") == 1
    with Topic.open(clicks, create=True) as topic:
        topic.append(b"one more", timestamp=NOW, partition=1)
    found = cli("audit", clicks.parent, mirror)
    assert found.code == 1 and "differs" in found.output and "1 do not add up" in found.errors
    (row,) = cli("audit", clicks.parent, mirror, "--json").objects
    assert (row["topic"], row["missing"], row["state"]) == ("clicks", 1, "differs")
    alone = cli("audit", clicks.parent)
    assert alone.code == 2 and "give a destination" in alone.errors, "nothing was compared"
    assert cli("audit", tmp_path / "nothing").code == 2


# --- healing -----------------------------------------------------------------------------------------------


def test_heal_and_scrub_say_what_they_do(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    copy, older = tmp_path / "copies" / "clicks", tmp_path / "old" / "clicks"
    shutil.copytree(clicks, copy)
    shutil.copytree(clicks, older)
    assert cli("heal", clicks, "--from", copy).output == f"{clicks}: nothing to heal\n"
    assert cli("scrub", clicks, "--donor", copy, "--rate", 1000).code == 0
    spoil(last_segment(clicks), 4096 + 140)
    tried = cli("heal", clicks, "--from", copy, "--dry-run")
    assert tried.code == 0 and "1 batch from" in tried.output and "nothing was changed" in tried.errors
    spoil(last_segment(older), 4096 + 140)
    left = cli("heal", clicks, "--from", older, "--json")
    assert left.code == 1 and left.objects[0]["unhealed"][0]["partition"] == 0
    found = cli("scrub", clicks, "--json")
    assert found.code == 1 and found.objects[0]["healing"] is None and len(found.objects[0]["found"]["damage"]) == 1
    healed = cli("scrub", clicks, "--donor", older, "--donor", copy)
    assert healed.code == 0 and "1 damage" in healed.output and f"from {copy}" in healed.output
    spoil(last_segment(clicks), 4096 + 140)
    (done,) = cli("scrub", clicks, "--donor", copy, "--json").objects
    assert done["healing"]["healed"][0]["offsets"] and not done["healing"]["verified"]["damage"]
    assert cli("heal", clicks).code == 2 and cli("heal", clicks, "--from", clicks).code == 2


# --- directories -------------------------------------------------------------------------------------------


def test_topic_that_does_not_open_hides_no_other_one(cli: Cli, clicks: Path) -> None:
    """It is named, its exit code counts, and the topics before and after it are shown."""
    with Topic.open(clicks, mode="r") as topic:
        topic.reset_group("etl", "begin")
        topic.share("mail").close()
    for name in "aaa", "zzz":
        cli("create", clicks.parent / name)
    spoil(clicks.parent / "aaa" / "topic.json", 20)
    (clicks.parent / "zzz" / "0000" / "watermark").unlink()
    (clicks.parent / "zzz" / "0000" / "00000000000000000000.log").unlink()
    shown = {"verify": "topic", "info": "path", "groups": "group", "lag": "group", "share ls": "share"}
    for verb, name in shown.items():
        done = cli(*verb.split(), clicks.parent, "--json")
        assert {os.path.basename(each[name]) for each in done.objects} & {"clicks", "etl", "mail"}, verb
        assert done.code == 1 and "aaa" in done.errors, verb
    alone = cli("info", clicks.parent / "aaa", "--json")
    assert alone.code == 1 and alone.output == "" and "aaa" in alone.errors


def test_lag_of_one_group_of_a_directory_needs_one_topic_that_has_it(cli: Cli, clicks: Path) -> None:
    with Topic.open(clicks, mode="r") as topic:
        topic.reset_group("etl", "begin")
    cli("create", clicks.parent / "other")
    found = cli("lag", clicks.parent, "etl", "--json")
    assert {each["topic"] for each in found.objects} == {"clicks"} and (found.code, found.errors) == (0, "")
    missing = cli("lag", clicks.parent, "none", "--json")
    assert (missing.code, missing.output) == (3, "") and "no topic" in missing.errors and "none" in missing.errors
    assert cli("lag", clicks.parent / "other", "etl").code == 3


def test_path_without_a_topic_is_a_wrong_command(cli: Cli, clicks: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in empty, tmp_path / "nothing":
        for arguments in ("repair", path), ("heal", path, "--from", clicks), ("scrub", path):
            done = cli(*arguments)
            assert done.code == 2 and "has no topic" in done.errors, arguments
    assert cli("ls", tmp_path / "nothing").code == 2
    assert "directory of topics" in cli("scrub", clicks.parent).errors
    (clicks / "topic.json").unlink()  # a topic all the same
    assert cli("repair", clicks, "--yes").code == 0
