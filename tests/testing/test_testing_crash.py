"""CrashFS: what is synced stays, what is not may be there in any part, and nothing else ever is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, combinations
from random import Random
from typing import Any

import pytest

from conftest import in_parts
from loglib import FlushPolicy, Retention, testing
from loglib.testing import CrashFS, CrashState, Image, Mode, crash_states

QUIET: dict[str, Any] = {
    "flush": FlushPolicy(records=None, interval=None, bytes=None),
    "retention": Retention(age=None),
    "segment_age": None,
}


def disk(**files: bytes) -> CrashFS:
    """A disk that holds these files, in one directory, synced."""
    return CrashFS(Image.of({f"/d/{name}": content for name, content in files.items()} | {"/d/": b""}))


def left(fs: CrashFS, mode: Mode = "strict", *, at: int | None = None) -> set[tuple[tuple[str, bytes], ...]]:
    """What cuts leave: at the end, or at every instant with at=-1."""
    states = fs.crash_states(mode=mode, random=20)
    when = len(fs.operations) if at is None else at
    return {tuple(state.image.tree().items()) for state in states if when in (-1, state.at)}


def write(fs: CrashFS, name: str, data: bytes, position: int = 0, *, sync: bool = False) -> None:
    fd = fs.create(f"/d/{name}", 0o600, exclusive=False)
    fs.write_all(fd, [data], position)
    if sync:
        fs.datasync(fd)
    fs.close(fd)


# --- the model --------------------------------------------------------------------------------------------


def test_synced_file_survives_every_power_cut() -> None:
    fs = disk()
    write(fs, "a", b"safe", sync=True)
    fs.sync_directory("/d")
    assert left(fs) == {(("/d/a", b"safe"),)}


def test_file_without_its_directory_synced_may_have_no_name() -> None:
    fs = disk()
    write(fs, "a", b"safe", sync=True)
    assert left(fs) == {(("/d/a", b"safe"),), (("/d/", b""),)}
    assert left(fs, "linux") == {(("/d/a", b"safe"),)}


def test_name_may_be_there_without_the_bytes() -> None:
    fs = disk()
    write(fs, "a", b"x")
    fs.sync_directory("/d")
    found = {dict(each)["/d/a"] for each in left(fs)}
    assert found >= {b"", b"x", b"\0"} and len(found) > 3, "also with garbage in it"
    assert all(len(each) <= 1 for each in found)


def test_rename_is_whole_or_not_at_all_with_or_without_the_bytes() -> None:
    fs = disk(old=b"before")
    write(fs, "new", b"after!")
    fs.rename("/d/new", "/d/old")
    whole = {tree for tree in left(fs) if all(b"\0" not in content and content.isascii() for _, content in tree)}
    assert whole >= {
        (("/d/old", b"before"),),
        (("/d/old", b"after!"),),
        (("/d/old", b""),),
        (("/d/new", b"after!"), ("/d/old", b"before")),
    }


def test_half_of_two_renames_leaves_one_file_with_two_names() -> None:
    fs = disk(a=b"x")
    fs.rename("/d/a", "/d/b")
    fs.rename("/d/b", "/d/c")
    assert left(fs) >= {(("/d/a", b"x"), ("/d/c", b"x")), (("/d/c", b"x"),), (("/d/b", b"x"),)}
    two = next(state for state in fs.crash_states() if len(state.image.tree()) == 2).files
    fd = two.open_to_lock("/d/a")  # `open_write` would make it a file of its own
    two.pwritev(fd, [b"y"], 0)
    two.close(fd)
    assert two.tree() == {"/d/a": b"y", "/d/c": b"y"} and two.used == 1


def test_linked_name_is_durable_after_its_directory_is_synced_and_not_before() -> None:
    fs = disk()
    write(fs, "a", b"x", sync=True)
    fs.link("/d/a", "/d/b")
    assert str(fs.operations[-1]) == "link /d/a to /d/b"
    both = (("/d/a", b"x"), ("/d/b", b"x"))
    assert left(fs) == {both, both[:1], both[1:], (("/d/", b""),)}, "either name without the other"
    fs.sync_directory("/d")
    assert left(fs) == {both}
    fs.unlink("/d/a")
    assert left(fs) == {both, both[1:]}
    again = list(fs.crash_states())[-1].files
    write(again, "b", b"yy")
    assert again.read_whole("/d/b", 10) == b"yy"


def test_linked_name_may_be_there_without_the_bytes() -> None:
    fs = disk()
    write(fs, "a", b"x")
    fs.link("/d/a", "/d/b")
    fs.sync_directory("/d")
    assert {dict(tree)["/d/b"] for tree in left(fs)} >= {b"", b"x", b"\0"}
    assert all(dict(tree)["/d/a"] == dict(tree)["/d/b"] for tree in left(fs)), "one file"


def test_new_file_is_not_taken_for_an_empty_one_that_was_there() -> None:
    # A file without bytes was not counted, and the next new file was recorded as that one.
    fs = disk()
    write(fs, "a", b"")
    fs.sync_directory("/d")
    (state,) = [each for each in fs.crash_states() if each.at == 2]
    again = state.files
    write(again, "b", b"x")
    assert {tuple(each.image.tree().items()) for each in again.crash_states() if each.whole} == {
        (("/d/a", b""),), (("/d/a", b""), ("/d/b", b"")), (("/d/a", b""), ("/d/b", b"x")),
    }  # fmt: skip


def test_power_cut_may_undo_a_removal_that_was_not_synced() -> None:
    fs = disk(a=b"1", b=b"2")
    fs.unlink("/d/a")
    fs.unlink("/d/b")
    assert {tuple(name for name, _ in tree) for tree in left(fs)} == {
        ("/d/",), ("/d/a",), ("/d/b",), ("/d/a", "/d/b"),
    }  # fmt: skip
    fs.sync_directory("/d")
    assert left(fs) == {(("/d/", b""),)}


def test_directories_come_and_go_by_the_directory_above() -> None:
    fs = disk()
    fs.mkdir("/d/e")
    assert left(fs) == {(("/d/", b""),), (("/d/e/", b""),)}
    fs.sync_directory("/d")
    fs.rmdir("/d/e")
    assert left(fs) == {(("/d/", b""),), (("/d/e/", b""),)}


def test_truncation_is_pending_like_a_write() -> None:
    fs = disk(a=b"0123456789")
    fd = fs.open_write("/d/a")
    fs.ftruncate(fd, 4)
    fs.ftruncate(fd, 6)
    assert {dict(tree)["/d/a"] for tree in left(fs)} == {b"0123456789", b"0123", b"0123\0\0", b"012345"}
    fs.datasync(fd)
    assert left(fs) == {(("/d/a", b"0123\0\0"),)}


def test_sync_of_one_file_says_nothing_of_another() -> None:
    fs = disk(a=b"1", b=b"2")
    write(fs, "a", b"x")
    write(fs, "b", b"y", sync=True)
    found = {(dict(tree)["/d/a"], dict(tree)["/d/b"]) for tree in left(fs)}
    assert {b for _, b in found} == {b"y"} and {a for a, _ in found} >= {b"1", b"x"}


def test_linux_mode_persists_the_names_of_the_directories_above_a_synced_file() -> None:
    fs = disk()
    fs.mkdir("/d/e")
    fs.mkdir("/d/e/f")
    fs.write_new("/d/e/f/a", b"x", 0o600)
    assert left(fs, "linux") == {(("/d/e/f/a", b"x"),)}
    assert len(left(fs)) > 2


@pytest.mark.parametrize("size", [1, 512, 513, 2000, 4096, 40_000])
def test_writes_are_torn_by_sectors(size: int) -> None:
    fs = disk(a=b"")
    data = Random(size).randbytes(size)
    write(fs, "a", data, 100)
    found = [dict(tree)["/d/a"] for tree in left(fs)]
    assert data in {each[100:] for each in found} and b"" in found
    assert all(not each[:100].strip(b"\0") for each in found), "nothing but the write's own bytes are touched"
    assert all(len(each) <= 100 + size for each in found)
    if size > 1024:
        first = 4096 if size > 16_384 else 512  # large writes are torn by pages
        assert any(each[100:] == data[: first - 100] for each in found), "cut at the first border"
        assert any(each.endswith(data[-100:]) and data[:100] not in each for each in found), "the end without the rest"
        assert any(len(each) == 100 + size and not each.strip(b"\0") for each in found), "the size without the bytes"


def test_bytes_written_over_themselves_are_safe() -> None:
    fs = disk(a=b"same" * 500)
    write(fs, "a", b"same" * 500)
    assert left(fs) == {(("/d/a", b"same" * 500),)}


def test_every_prefix_gives_all_none_each_missing_and_each_alone() -> None:
    fs = disk(a=b".", b=b".", c=b".")
    for name in "abc":
        write(fs, name, b"x" + name.encode() * 600)
    for at in range(len(fs.operations) + 1):
        found = left(fs, at=at)
        names = ["a", "b", "c"][:at]
        for size in (0, 1, at - 1, at):
            for kept in combinations(names, max(size, 0)):
                expected = {f"/d/{each}": b"x" + each.encode() * 600 if each in kept else b"." for each in "abc"}
                assert tuple(expected.items()) in found, (at, kept)


def test_states_are_the_same_each_time_and_the_seed_makes_others() -> None:
    fs = disk()
    for number in range(6):
        write(fs, f"{number}", b"%d" % number * 700)

    def digests(seed: int) -> list[int]:
        return [state.image.digest() for state in fs.crash_states(seed=seed)]

    assert digests(1) == digests(1) != digests(2)


def test_killed_process_leaves_the_whole_states() -> None:
    fs = disk(a=b"1")
    write(fs, "a", b"x")
    write(fs, "b", b"y")
    whole = {state.at: state.image.tree() for state in fs.crash_states() if state.whole}
    assert [tree.get("/d/b") for tree in whole.values()] == [None, None, b"", b"y"]
    assert [tree["/d/a"] for tree in whole.values()] == [b"1", b"x", b"x", b"x"]


def test_state_says_what_was_lost_and_torn() -> None:
    fs = disk(a=b"1", old=b"2")
    write(fs, "a", b"x" * 1000)
    fd = fs.open_write("/d/old")
    fs.ftruncate(fd, 0)
    fs.rename("/d/old", "/d/new")
    fs.unlink("/d/new")
    texts = [repr(state) for state in fs.crash_states()]
    assert any("torn: write /d/a [0, 1000), its sectors NB" in text for text in texts)
    assert any("lost: rename /d/old to /d/new" in text and "lost: unlink /d/new" in text for text in texts)
    assert any("lost: truncate /d/old to 0" in text for text in texts)
    assert [str(operation) for operation in fs.operations][-1] == "unlink /d/new"
    last = list(fs.crash_states())[-1]
    assert last.operations == fs.operations and last.at == 4


def test_states_with_equal_keys_are_equal() -> None:
    fs = disk(a=b"1")
    for number in range(4):
        write(fs, "ab"[number % 2], b"%d" % number * 300, sync=number == 2)
    by_key: dict[Any, set[int]] = {}
    for state in fs.crash_states(random=10):
        by_key.setdefault(state.key, set()).add(state.image.digest())
    assert all(len(digests) == 1 for digests in by_key.values()) and len(by_key) > 10


def test_image_has_the_files_of_its_tree_and_a_digest_of_them() -> None:
    tree = {"/a/b/c": b"1", "/a/d": b"2", "/e/": b"", "/f": b""}
    image = Image.of(tree)
    assert image.tree() == tree
    assert CrashFS(image).tree() == {path: content for path, content in tree.items() if path != "/e/"}
    assert CrashFS(image).listdir("/e") == []
    assert Image.of(tree).digest() == image.digest() != Image.of(tree | {"/f": b"3"}).digest()
    assert Image.of(tree | {"/f": b"3"}).digest(leaving_out=("f",)) == image.digest(leaving_out=("f",))
    assert Image.of({"/x/c": b"1"}).digest("/x") == image.digest("/a/b") != image.digest("/a")


def test_recorded_operations_lead_to_the_file_system_as_it_is() -> None:
    """The state with everything in it is the file system itself, whatever was done to it."""
    for seed in range(30):
        choose = Random(seed)
        fs = disk(a=b"1", b=b"2" * 600)
        for _ in range(12):
            random_change(fs, choose)
        assert [state.image.tree() for state in fs.crash_states() if state.whole][-1] == with_directories(fs), seed


def random_change(fs: CrashFS, choose: Random) -> None:
    name, other = choose.choice("abc"), choose.choice("abc")
    calls: list[Callable[[], object]] = [
        lambda: write(fs, name, choose.randbytes(700), choose.randrange(900), sync=choose.random() < 0.3),
        lambda: fs.unlink(f"/d/{name}"),
        lambda: fs.rename(f"/d/{name}", f"/d/{other}"),
        lambda: fs.link(f"/d/{name}", f"/d/{other}"),
        lambda: fs.mkdir(f"/d/{name}"),
        lambda: fs.rmdir(f"/d/{name}"),
        lambda: fs.sync_directory("/d"),
        lambda: fs.ftruncate(fs.open_write(f"/d/{name}"), choose.randrange(900)),
    ]
    try:
        choose.choice(calls)()
    except OSError:
        return  # there is nothing of that name, or something else
    except Exception as error:
        if "regular file" not in str(error):
            raise


def with_directories(fs: CrashFS) -> dict[str, bytes]:
    """The tree with its empty directories, as an image has it."""
    found = fs.tree()
    for name in ["", *fs.listdir("/d")]:
        path = f"/d/{name}".rstrip("/")
        if path not in found and not fs.listdir(path):
            found[path + "/"] = b""
    return dict(sorted(found.items(), key=lambda each: each[0].split("/")))


# --- with a topic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["strict", "linux"])
def test_topic_keeps_what_it_acknowledged_through_any_cut(mode: Mode) -> None:
    fs = CrashFS()
    acknowledged: list[tuple[int, bytes]] = []
    with testing.open_topic("/topic", files=fs, **QUIET) as topic:
        for number in range(3):
            topic.append(b"%d" % number, sync=True)
            acknowledged.append((len(fs.operations), b"%d" % number))
    for state, values in recovered(fs.crash_states(mode=mode)):
        promised = [value for at, value in acknowledged if at <= state.at]
        assert values[: len(promised)] == promised, state
        assert values == [b"0", b"1", b"2"][: len(values)], state


def recovered(states: Iterator[CrashState]) -> Iterator[tuple[CrashState, list[bytes | None]]]:
    for state in states:
        with testing.open_topic("/topic", files=state.files, **QUIET) as topic:
            yield state, [record.value for record in topic.read()]


@in_parts(3)
def test_cut_within_the_recovery_from_a_cut_loses_nothing(part: slice) -> None:
    fs = CrashFS()
    with testing.open_topic("/topic", files=fs, **QUIET) as topic:
        topic.append(b"kept", sync=True)
        since = len(fs.operations)
        topic.append_many([b"perhaps" * 200])
        topic.flush()
    cuts = 0
    for state in list(fs.crash_states(since=since))[::5][part]:
        again = state.files
        with testing.open_topic("/topic", files=again):
            pass
        for inner, values in recovered(chain(crash_states(state.image, again.operations, random=1))):
            assert values[:1] == [b"kept"], (state, inner)
            cuts += 1
    assert cuts > 50
