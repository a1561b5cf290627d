"""`loglib check`: what is wrong is a line and an exit code, what cannot be seen is one, too; it touches nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from builders import spoil
from commands import Cli, started

from conftest import MANUAL, last_segment, needs_root, run_python, start_python, tree
from loglib import Retention, Topic, group, testing
from loglib.cli import check
from loglib.copies import mirror
from loglib.retention import Space
from loglib.system import lock
from loglib.system.files import Files
from loglib.system.system_calls import SystemCalls
from loglib.ui.troubles import troubles_of

cli = commands.cli

QUIET: dict[str, Any] = {"flush": MANUAL, "retention": Retention(age=None), "segment_age": None}


def now_us() -> int:
    return time.time_ns() // 1000


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """Two partitions with records of now, and one that a group has not read."""
    return made(tmp_path / "data" / "orders")


def made(path: Path, *, age_s: float = 0.0, partitions: int = 2, records: int = 6) -> Path:
    """A topic whose records were appended this long ago."""
    with testing.open_topic(path, clock=lambda: now_us() - int(age_s * 1e6), partitions=partitions, **QUIET) as topic:
        for number in range(records):
            topic.append(b"%d" % number, partition=number % partitions, sync=True)
    return path


def late(path: Path, name: str = "billing") -> None:
    """A group that has read nothing."""
    with Topic.open(path, mode="r") as topic:
        topic.reset_group(name, "begin")


# --- what is right ------------------------------------------------------------------------------------


def test_topic_that_is_as_it_should_be_is_one_line(cli: Cli, orders: Path) -> None:
    limits = ["--max-lag", "5m", "--max-lag-bytes", "1GiB", "--min-free", "0%", "--max-age", "1h"]
    done = cli("check", orders, *limits)
    assert (done.code, done.errors) == (0, "")
    assert done.output.startswith(f"ok: {orders}: 2 partitions, 864 bytes, newest record ")
    assert done.output.count("\n") == 1
    assert cli("check", orders, "--quiet", *limits) == (0, "", "")
    (facts,) = cli("check", orders, "--json", *limits).objects
    assert facts["kind"] == "ok" and facts["topic"] == str(orders) and facts["partitions"] == 2
    assert facts["newest_us"] <= now_us() and facts["lag_seconds"] == 0 and facts["size_bytes"] > 0


def test_group_of_a_log_that_was_set_back_is_told(cli: Cli, orders: Path, tmp_path: Path) -> None:
    shutil.copytree(orders, tmp_path / "older")
    with Topic.open(orders) as topic:
        topic.append(b"later", partition=1, sync=True)
        topic.reset_group("billing", "end")
    groups = shutil.move(orders / "groups", tmp_path / "groups")
    shutil.rmtree(orders)
    shutil.move(tmp_path / "older", orders)
    shutil.move(groups, orders)
    done = cli("check", orders, "--max-lag", "5m")
    text = "group billing has committed offset 576 of partition 1, and the log ends at 432: it was set back"
    assert done.code == 1 and done.output.startswith(f"lag: {orders}: {text}") and done.output.count("\n") == 1
    assert cli("check", orders, "--json").objects[0]["end"] == 432
    with Topic.open(orders, mode="r") as topic:
        (trouble,) = troubles_of(topic)
    assert trouble.kind == "group" and text in trouble.text
    with Topic.open(orders) as topic:
        topic.append(b"other", partition=1, sync=True)
    text = text.replace("ends at 432", "has other records before it")
    assert cli("check", orders).output == f"lag: {orders}: {text}, and the group cannot continue\n"


def test_topic_that_looks_damaged_for_a_moment_is_not_reported(
    cli: Cli, orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is being deleted, or made again."""
    looks: list[int] = []

    def damage(topic: Topic) -> Iterator[check.Finding]:
        looks.append(1)
        if len(looks) == 1 or lasts:
            yield check.Finding(1, "damage", "a bit has flipped", {})

    monkeypatch.setattr(check, "_damage", damage)
    for lasts in (False, True):
        looks.clear()
        assert cli("check", orders).code == lasts


def test_directory_of_topics_has_a_line_for_each(cli: Cli, orders: Path) -> None:
    made(orders.with_name("users"))
    done = cli("check", orders.parent)
    assert done.code == 0 and [line.split(":")[0] for line in done.output.splitlines()] == ["ok", "ok"]


def test_check_changes_nothing_and_takes_no_lock(
    cli: Cli, orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late(orders)
    before = {**tree(orders)}, {each: each.stat().st_mtime_ns for each in orders.rglob("*")}

    def refused(*_: object) -> None:
        raise AssertionError("a lock was asked for")

    monkeypatch.setattr(Files, "try_lock", refused)
    monkeypatch.setattr(SystemCalls, "flock", staticmethod(refused))
    assert cli("check", orders, "--writer", "--min-free", "0%", "--max-age", "1h", "--max-lag", "1h").code in (1, 3)
    assert before == ({**tree(orders)}, {each: each.stat().st_mtime_ns for each in orders.rglob("*")})


def test_writer_beside_it_is_no_damage(cli: Cli, orders: Path) -> None:
    with Topic.open(orders, flush=MANUAL) as topic:
        for number in range(40):
            topic.append_many([b"x" * 100] * 20, partition=0)
            if number % 2:
                topic.flush()
            if number % 5 == 0:
                topic.partition(0).roll()
            if number % 10 == 9:
                topic.partition(0).delete_before(topic.partition(0).segments[-1].base_offset)
            done = cli("check", orders, "--max-age", "1h")
            assert done.code == 0, done.output


# --- each limit ---------------------------------------------------------------------------------------


def test_group_that_is_behind_in_time_or_in_bytes_is_found(cli: Cli, tmp_path: Path) -> None:
    path = made(tmp_path / "t", age_s=600)
    late(path)
    done = cli("check", path, "--max-lag", "5m")
    assert done.code == 1 and done.output.count("\n") == 2
    assert done.output.startswith(f"lag: {path}: group billing in partition 0 lags by 10m")
    assert ", and at most 5m are allowed\n" in done.output
    first, second = cli("check", path, "--max-lag-bytes", "100B", "--json").objects
    assert (first["group"], first["partition"], first["lag_bytes"], first["limit_bytes"]) == ("billing", 0, 432, 100)
    assert second["partition"] == 1 and first["limit_seconds"] is None and 600 <= first["lag_seconds"] < 700
    assert cli("check", path, "--max-lag", "1h", "--max-lag-bytes", "432").code == 0


def test_group_that_was_not_named_is_not_looked_at(cli: Cli, tmp_path: Path) -> None:
    path = made(tmp_path / "data" / "t", age_s=600)
    made(tmp_path / "data" / "without")
    late(path, "abandoned")
    with Topic.open(path, mode="r") as topic:
        topic.reset_group("billing", "end")
    assert cli("check", path, "--max-lag", "5m").code == 1
    assert cli("check", path.parent, "--max-lag", "5m", "--group", "billing").code == 0
    done = cli("check", path.parent, "--max-lag", "5m", "--group", "biling", "--group", "billing", "--quiet")
    assert (done.code, done.output) == (1, f"lag: {path.parent}: there is no group and no share biling\n")


def test_group_on_several_topics_is_found_in_each(cli: Cli, tmp_path: Path) -> None:
    paths = [made(tmp_path / name, age_s=600, partitions=1) for name in ("first", "second")]
    first, second = (Topic.open(path, mode="r") for path in paths)
    with first, second, group([first, second], "both"):
        pass
    for path in paths:
        assert "group both in partition 0" in cli("check", path, "--max-lag", "5m").output


def test_topic_that_is_no_longer_written_is_found_by_the_newest_of_its_partitions(cli: Cli, tmp_path: Path) -> None:
    path = made(tmp_path / "t", age_s=7200)
    done = cli("check", path, "--max-age", "1h", "--json")
    (facts,) = done.objects
    assert done.code == 1 and facts["kind"] == "age" and 7200 <= facts["age_seconds"] < 7300
    assert facts["limit_seconds"] == 3600 and "2h old, and at most 1h are allowed" in facts["text"]
    with Topic.open(path) as topic:
        topic.append(b"x", partition=1)
    assert cli("check", path, "--max-age", "1h").code == 0


def test_empty_topic_is_as_old_as_its_segment(cli: Cli, tmp_path: Path) -> None:
    path = made(tmp_path / "t", age_s=7200, records=0)
    assert "the topic is empty, and its segment is 2h" in cli("check", path, "--max-age", "1h").output
    assert cli("check", path, "--max-age", "1d").code == 0


def test_record_from_the_future_does_not_look_new_for_ever(cli: Cli, tmp_path: Path) -> None:
    path = made(tmp_path / "t", age_s=-86400)
    done = cli("check", path, "--max-age", "1h")
    assert done.code == 1 and "in the future: a clock was wrong" in done.output
    assert cli("check", made(tmp_path / "near", age_s=-5), "--max-age", "1h").code == 0, "clocks differ a little"


@pytest.mark.parametrize(
    ("limit", "code"), [("10%", 0), ("10.5%", 1), ("100B", 0), ("101B", 1), ("0%", 0), ("100%", 1)]
)
def test_free_space_is_compared_as_a_share_or_in_bytes(
    limit: str, code: int, cli: Cli, orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "free_space", lambda *_: Space(100, 1000))
    done = cli("check", orders, "--min-free", limit, "--json")
    assert done.code == code
    if code:
        (facts,) = done.objects
        assert (facts["kind"], facts["free_bytes"], facts["total_bytes"]) == ("free", 100, 1000)
        assert facts["limit_bytes"] > 100 and facts["path"] == str(orders)


@pytest.mark.parametrize(
    "wrong", [["--min-free", "10"], ["--min-free", "110%"], ["--min-free", "%"], ["--max-lag", "5"], ["--max-age", "x"]]
)
def test_wrong_limit_is_a_usage_error(wrong: list[str], cli: Cli, orders: Path) -> None:
    done = cli("check", orders, *wrong)
    assert (done.code, done.output) == (2, "") and "Usage: " in done.errors
    assert cli("check").code == 2
    assert cli("check", "s3://bucket/topic").code == 2


# --- writers ------------------------------------------------------------------------------------------

WRITE = """
    import sys
    from loglib import Topic
    topic = Topic.open(sys.argv[1])
    topic.append(b"x", partition=1, sync=True)
    print("written", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="the system has no list of locks")
def test_partition_whose_writer_has_stopped_is_found(cli: Cli, orders: Path) -> None:
    with start_python(WRITE, orders) as writing:
        assert writing.stdout is not None
        assert writing.stdout.readline() == "written\n"
        assert cli("check", orders, "--writer").code == 0
        writing.kill()
    with Topic.open(orders, shared=True) as topic, topic.partition(1)._access.writer().held():
        done = cli("check", orders, "--writer", "--json")
        assert done.code == 1 and [(each["kind"], each["partition"]) for each in done.objects] == [("writer", 0)]
    done = cli("check", orders, "--writer")
    assert done.code == 1 and done.output.count("no process has partition") == 2
    assert cli("check", orders).code == 0, "nobody asked"


def test_writers_that_cannot_be_seen_are_no_success(
    cli: Cli, orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_LOCKS", str(orders / "no such list"))
    done = cli("check", orders, "--writer")
    assert done.code == 3 and done.output.startswith(f"unknown: {orders}: this system")


# --- copies -------------------------------------------------------------------------------------------


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two directories of one topic, as its writer has left them."""
    first, second = tmp_path / "a" / "t", tmp_path / "b" / "t"
    with Topic.open(first, create=True, replicas=[second]) as topic:
        topic.append(b"x", sync=True)
    yield first, second


def test_replicas_that_are_in_step_are_no_finding(cli: Cli, replicated: tuple[Path, Path]) -> None:
    for path in replicated:
        assert cli("check", path, "--min-free", "0%").code == 0


def test_replica_that_is_gone_or_damaged_is_found(cli: Cli, replicated: tuple[Path, Path]) -> None:
    first, second = replicated
    second.rename(second.with_name("elsewhere"))
    done = cli("check", first, "--min-free", "0%", "--json")
    (facts,) = done.objects
    assert (done.code, facts["kind"], facts["copy"]) == (1, "copy", str(second))
    assert facts["text"] == f"{second} is left out: no topic is there"
    made(second)
    assert "holds another topic" in cli("check", first).output


def test_replica_that_is_left_out_is_found_from_each_directory(cli: Cli, tmp_path: Path) -> None:
    paths = [tmp_path / name / "t" for name in "abc"]
    past = now_us() - 600_000_000

    def append(value: bytes) -> None:
        with testing.open_topic(paths[0], clock=lambda: past, replicas=paths[1:], acks="quorum", **QUIET) as topic:
            topic.append(value, sync=True)

    append(b"x")
    aside = paths[2].with_name("aside")
    paths[2].rename(aside)
    append(b"y")
    aside.rename(paths[2])
    for path in paths:
        done = cli("check", path)
        assert done.code == 1, path
        assert done.output.startswith(f"copy: {path}: {paths[2]} lags by 10m"), done.output
        assert cli("check", path, "--max-lag", "1h").code == 0


def test_replica_that_was_given_up_says_so(cli: Cli, tmp_path: Path) -> None:
    first, second, third = paths = [tmp_path / name / "t" for name in "abc"]
    with Topic.open(first, create=True, replicas=[second, third]) as topic:
        topic.append(b"x", sync=True)
    Topic.open(first, replicas=[second], forget_replicas=[third]).close()
    assert [cli("check", path).code for path in paths] == [0, 0, 1]
    assert f"{third} is left out: it was given up; the topic is now in {first}, {second}" in cli("check", third).output
    Topic.open(first, replicas=[], forget_replicas=[second]).close()
    assert [cli("check", path).code for path in paths] == [0, 1, 1]
    assert f"{second} is left out: it was given up; the topic is now in {first}" in cli("check", second).output


def test_mirror_that_is_behind_its_source_is_found(cli: Cli, tmp_path: Path) -> None:
    source, copy = made(tmp_path / "t", age_s=600), tmp_path / "copy" / "t"
    mirror(source, copy)
    assert cli("check", copy).code == 0
    past = now_us() - 600_000_000
    with testing.open_topic(source, clock=lambda: past, **QUIET) as topic:
        topic.append(b"y", partition=0, sync=True)
    done = cli("check", copy, "--json")
    (facts,) = done.objects
    assert (done.code, facts["kind"], facts["copy"], facts["lag_bytes"]) == (1, "copy", str(copy), 144)
    Topic.delete(source)
    assert f"its source {source}: no topic is there" in cli("check", copy).output


# --- damage, and what cannot be looked at ---------------------------------------------------------------


@pytest.mark.parametrize(
    "what", ["description", "watermark", "both slots", "last batch", "segment", "partition", "group", "share"]
)
def test_damage_is_found_by_a_cheap_look(what: str, cli: Cli, orders: Path) -> None:
    if what == "description":
        spoil(orders / "topic.json", 30)
    elif what == "watermark":
        spoil(orders / "0001" / "watermark", 20)
    elif what == "both slots":
        spoil(orders / "0001" / "watermark", 20, 4096 + 20)
    elif what == "last batch":
        file = last_segment(orders, 1)
        spoil(file, file.stat().st_size - 20)
    elif what == "segment":
        last_segment(orders, 1).unlink()
    elif what == "group":
        late(orders)
        spoil(next((orders / "groups" / "billing" / "offsets").rglob("*.log")), 100)
    elif what == "share":
        with Topic.open(orders, mode="r") as topic:
            topic.share("mail").close()
        spoil(next((orders / "shares" / "mail" / "0000").glob("*.acks")), 20)
    else:
        (orders / "0001").rename(orders / "aside")
    done = cli("check", orders, "--json")
    assert done.code == 1, done
    assert {each["kind"] for each in done.objects} == {"damage"}
    assert all(each["path"].startswith(str(orders)) for each in done.objects)


def test_damage_of_one_topic_hides_nothing_of_another(cli: Cli, tmp_path: Path) -> None:
    late(made(tmp_path / "data" / "a", age_s=600))
    broken = made(tmp_path / "data" / "b")
    spoil(last_segment(broken, 1), last_segment(broken, 1).stat().st_size - 20)
    made(tmp_path / "data" / "c")
    gone = tmp_path / "gone"
    done = cli("check", gone, tmp_path / "data", "--max-lag", "5m")
    kinds = [line.split(":")[0] for line in done.output.splitlines()]
    assert done.code == 1 and sorted(kinds) == ["damage", "lag", "lag", "missing", "ok"]
    assert kinds[-2:] == ["missing", "ok"], "the most serious is first, because Nagios shows one line"


def test_damage_does_not_hide_that_the_disk_is_full(
    cli: Cli, orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "free_space", lambda *_: Space(0, 1000))
    spoil(orders / "0000" / "watermark", 20, 4096 + 20)
    last_segment(orders, 0).unlink()
    kinds = {each["kind"] for each in cli("check", orders, "--min-free", "1%", "--json").objects}
    assert kinds == {"damage", "free"}


def test_topic_that_is_not_there_is_a_line_and_code_2(cli: Cli, orders: Path, tmp_path: Path) -> None:
    done = cli("check", tmp_path / "gone", orders)
    assert (done.code, done.errors) == (2, "")
    assert done.output.startswith(f"missing: {tmp_path / 'gone'}: no topic is there\nok: {orders}: ")
    (tmp_path / "file").write_text("x")
    assert cli("check", tmp_path / "file").code == 2


def test_topic_of_a_newer_format_is_unknown(cli: Cli, orders: Path) -> None:
    facts = json.loads((orders / "topic.json").read_text())
    facts["format"] += 1
    del facts["crc"]
    (orders / "topic.json").write_text(json.dumps(facts))
    done = cli("check", orders)
    assert done.code == 3 and done.output.startswith(f"unknown: {orders}: ") and "upgrade loglib" in done.output


@needs_root
def test_topic_that_may_not_be_read_is_unknown_and_the_next_one_is_checked(tmp_path: Path) -> None:
    for each in [tmp_path, *tmp_path.parents]:
        if each.stat().st_uid == 0 and len(each.parts) > 2:
            each.chmod(0o755)
    secret, closed, public = (tmp_path / name for name in ("secret", "closed", "public"))
    for path, mode in ((secret, 0o600), (closed, 0o600), (public, 0o644)):
        Topic.open(path, create=True, permissions=mode).close()
    secret.chmod(0o755)
    public.chmod(0o755)
    program = """
        import os, sys
        from loglib.cli.program import run
        run(["check", "--quiet", sys.argv[-1]])  # imports all modules: the user may not read those of the interpreter
        os.setuid(65534)
        print(run(["check", *sys.argv[1:]]))
    """
    lines = run_python(program, secret, closed, public).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["unknown", "unknown", "ok", "3"], lines
    assert lines[0].endswith("Permission denied") and str(secret) in lines[0]


def test_closed_pipe_ends_it_without_a_word(orders: Path) -> None:
    with started("check", *[orders] * 3, stdin=subprocess.DEVNULL) as checking:
        assert checking.stdout is not None and checking.stderr is not None
        checking.stdout.close()
        assert checking.wait(60) == 141
        assert checking.stderr.read() == b""


def test_names_cannot_move_the_cursor(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2Jb" / "t"
    made(path)
    done = cli("check", path)
    assert done.code == 0 and "\x1b" not in done.output


def test_all_lines_name_the_topic_as_the_command_did(
    cli: Cli, orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Looks at the open topic, and looks at its figures, have one name for it."""
    late(orders)
    spoil(orders / "0000" / "watermark", 20)
    monkeypatch.chdir(orders.parent)
    found = cli("check", orders.name, "--writer", "--max-age", "1us", "--max-lag-bytes", "1", "--json")
    assert {each["kind"] for each in found.objects} >= {"damage", "writer", "lag"}
    assert {each["topic"] for each in found.objects} == {orders.name}
